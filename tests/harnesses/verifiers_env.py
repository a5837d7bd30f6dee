"""The same task as an environment of verifiers: a task with a reward, and a harness that runs the agent of OpenAI's client."""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["ClientLoop"]


class Sum(vf.TaskData):
    number: int


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.number + 7) in trace.last_reply)


class ClientLoop(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        variables = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret, "NLAC_SEED": str(data.number)}
        agent = str(Path(__file__).with_name("openai_agent.py"))
        return await runtime.run_program([sys.executable, agent], variables)


async def main() -> float:
    number = int(os.environ["NLAC_SEED"])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    harness = {"id": Path(__file__).stem}
    config = vf.AgentConfig(model="policy", client=client, harness=harness, runtime=vf.SubprocessConfig())
    async with vf.Agent(config) as agent:
        trace = await agent.run(SumTask(Sum(number=number, prompt=f"What is {number} + 7?"), vf.TaskConfig()))
    if not trace.ok:
        raise SystemExit(str(trace.errors))
    return trace.reward


if __name__ == "__main__":
    print(json.dumps({"reward": asyncio.run(main())}))
