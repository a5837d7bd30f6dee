"""An agent that adds two numbers with a tool: the plain client of OpenAI, whose calls stream where the argument is "stream"."""

import json
import os
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def ask(client, talk, stream):
    """The text and the calls of an answer."""
    reply = client.chat.completions.create(model="policy", messages=talk, tools=TOOLS, stream=stream)
    if not stream:
        message = reply.choices[0].message
        return message.content or "", [
            (call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        ]
    text, calls = "", []
    for chunk in reply:
        text += chunk.choices[0].delta.content or ""
        for part in chunk.choices[0].delta.tool_calls or ():
            calls.append((part.id, part.function.name, part.function.arguments))
    return text, calls


def main(stream):
    number, client = int(os.environ["NLAC_SEED"]), openai.OpenAI()
    talk = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": f"What is {number} + 7?"}]
    while True:
        text, calls = ask(client, talk, stream)
        if not calls:
            return float(str(number + 7) in text)
        made = [{"id": id, "type": "function", "function": {"name": name, "arguments": args}} for id, name, args in calls]
        talk.append({"role": "assistant", "content": text or None, "tool_calls": made})
        for id, _, arguments in calls:
            total = sum(json.loads(arguments).values())
            talk.append({"role": "tool", "tool_call_id": id, "content": str(total)})


if __name__ == "__main__":
    print(json.dumps({"reward": main(sys.argv[1:] == ["stream"])}))
