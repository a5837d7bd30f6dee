"""``rllib env``: which environments there are, what an agent sees in one, and whether somebody's own keeps the contract."""

from __future__ import annotations

import inspect
import json
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rllib_nlac.command.errors import clear_errors
from rllib_nlac.command.terminal import Waiting, terminal
from rllib_nlac.inputs.plain_yaml import mapping

app = typer.Typer(help="List, play and check environments.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A registered name, or my_module:MyEnvironment.")]
EnvConfig = Annotated[str, typer.Option(help="env_config as YAML or JSON.")]
NEEDS = {
    "MiniWoB": "selenium",
    "TextArena": "textarena",
    "ReasoningGym": "reasoning_gym",
    "TauBench": "tau_bench",
    "Tau2Bench": "tau2",
}


@app.command("list")
def list_environments() -> None:
    """Print the registered environments and the keys of their env_config."""
    import rllib_nlac
    from rllib_nlac.envs import registry

    rllib_nlac.load()
    rows = []
    for name, factory in sorted(registry.ENVIRONMENTS.items()):
        doc = (inspect.getdoc(factory) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
        module = NEEDS.get(name)
        if module is not None and find_spec(module) is None:
            doc += f" (not installed: {module})"
        rows.append((name, doc, ", ".join(inspect.signature(factory).parameters)))
    terminal.rows(rows, head=("name", "what it is", "env_config"))


@app.command()
def play(
    name: Name,
    config: EnvConfig = "{}",
    seed: Annotated[int | None, typer.Option(help="Seed of the task; drawn if left out.")] = None,
    task: Annotated[str | None, typer.Option(help="Id of the task.")] = None,
) -> None:
    """Play an episode in the terminal, seeing what an agent sees. An empty line ends a message, Ctrl-D the game."""
    with clear_errors():
        import rllib_nlac
        from rllib_nlac.envs import registry

        rllib_nlac.load()
        env = registry.make(name, mapping(config, "--config"))
        observation, info = env.reset(seed=seed, options={"task_id": task} if task is not None else None)
        if info.get("system_prompt"):
            terminal.rule("system prompt")
            terminal.say(info["system_prompt"])
        for tool in info.get("tools") or ():
            terminal.rule(f"tool {tool['function']['name']}")
            terminal.say(json.dumps(tool["function"], ensure_ascii=False))
        if info.get("tools"):
            terminal.say("A call is one JSON object, as in " + '{"name": "TOOL", "arguments": {...}}.')
        terminal.rule(f"task {info.get('task_id', '')}")
        terminal.say("An empty line sends what you wrote; Ctrl-D ends the game.")
        total, over = 0.0, False
        while not over:
            terminal.say(observation)
            action = _read_action()
            if action is None:
                return
            observation, reward, terminated, truncated, info = env.step(action)
            total, over = total + float(reward), terminated or truncated
        terminal.say(observation)
        terminal.rule("the end")
        ending = f"success {info.get('success')}, " if info.get("success") is not None else ""
        terminal.say(f"{ending}return {total:g}, {info.get('stop_reason') or ('terminated' if terminated else 'truncated')}")


@app.command()
def expert(
    name: Name,
    out: Annotated[Path, typer.Option(help="File to write, as chats.jsonl.")],
    config: EnvConfig = "{}",
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 300,
    skill: Annotated[float, typer.Option(min=0, max=1, help="Share of the expert's turns; the others are mistakes.")] = 0.7,
    prompts: Annotated[str, typer.Option(help="Prompt set that words the roles.")] = "small",
    roles: Annotated[
        str,
        typer.Option(
            help="Some of policy, predict, backup, evaluate, refine, separated by commas; twice: at two turns. Default: all."
        ),
    ] = "",
    teacher: Annotated[
        str, typer.Option(help="A larger model in the expert's place: {base_url: ..., model: ...} as YAML or JSON.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seeds tasks and mistakes.")] = 0,
) -> None:
    """Write conversations for a warm-up (run: SFT): the expert's play, and the critic's roles in its words."""
    with clear_errors(), Waiting(terminal) as waiting:
        waiting.turn_to("loading the libraries")
        from rllib_nlac.command.expert import write_conversations

        wanted = [role.strip() for role in roles.split(",") if role.strip()]
        endpoint = mapping(teacher, "--teacher") if teacher else None
        write_conversations(name, mapping(config, "--config"), out, episodes, skill, prompts, wanted, endpoint, seed, terminal)


@app.command()
def check(
    name: Name,
    config: EnvConfig = "{}",
) -> None:
    """Put an environment through the contract; exits with 1 where it fails."""
    with clear_errors():
        import rllib_nlac
        from rllib_nlac.envs import contract, registry

        rllib_nlac.load()
        make = partial(registry.make, name, mapping(config, "--config"))
        make().close()
        failed = 0
        for finding in contract.check_environment(make):
            failed += finding.verdict == "FAILED"
            terminal.say(f"{finding.verdict:>7}  {finding.check}")
            if finding.detail:
                terminal.say(f"         {finding.detail}")
        if not failed:
            with closing(make()) as env:
                tools = env.reset(seed=0)[1].get("tools") or ()
            if tools:
                terminal.say(f"\n{name} offers the tools {', '.join(tool['function']['name'] for tool in tools)}")
        terminal.say(f"\n{name}: {'keeps the contract' if not failed else f'{failed} checks failed'}")
    if failed:
        raise typer.Exit(1)


def _read_action() -> str | None:
    """Lines up to an empty one; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input("> " if not lines else "  ")
        except EOFError:
            return "\n".join(lines) if lines else None
        if not line.strip() and lines:
            return "\n".join(lines)
        if line.strip():
            lines.append(line)
