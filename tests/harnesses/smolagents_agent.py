"""The same task for an agent of smolagents, which words its turns anew in every request."""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=6, verbosity_level=0)
number = int(os.environ["NLAC_SEED"])
print(json.dumps({"reward": float(str(agent.run(f"What is {number} + 7?")) == str(number + 7))}))
