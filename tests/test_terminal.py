"""Texts that are not ours are printed as they are: no markup, no pictures, nothing that a terminal would obey."""

from __future__ import annotations

import ast
import io
import logging
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rllib_nlac
from rllib_nlac.command.cli import app
from rllib_nlac.command.terminal import Terminal, VisibleHandler
from rllib_nlac.inputs.foreign import visible

PACKAGE = Path(rllib_nlac.__file__).parent
HOSTILE = "[/INST] [bold]x[/bold] [link=http://x]y :smile: \x1b]0;title\x07 \x9b2J \rover \u202egnp.exe \ud800 \u2028 end"
SHOWN = r"[/INST] [bold]x[/bold] [link=http://x]y :smile: \x1b]0;title\x07 \x9b2J \rover \u202egnp.exe \ud800 \u2028 end"

TYPED = HOSTILE.replace("\ud800", "\udc80")  # of the surrogates a command line can hold these


def rllib(*arguments: str, stdin: str = "") -> str:
    """What a command prints, standard error included."""
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "500"}).output


@pytest.mark.parametrize(
    "say",
    [
        lambda terminal: terminal.say(HOSTILE),
        lambda terminal: terminal.say(HOSTILE, "red"),
        lambda terminal: terminal.say(ValueError(HOSTILE)),
        lambda terminal: terminal.rule(HOSTILE),
        lambda terminal: terminal.rows([(HOSTILE, "x")]),
        lambda terminal: terminal.rows([("x", HOSTILE)], head=("a", HOSTILE)),
        lambda terminal: terminal.rows([("x", "y" * 200)], title=HOSTILE),
    ],
)
def test_hostile_text_is_shown(say, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    say(Terminal())
    assert SHOWN in capsys.readouterr().out


def test_a_terminal_of_another_encoding_shows_what_it_cannot_as_an_escape(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Terminal().say("café ─ 日本")
    sys.stdout.flush()
    assert written.getvalue() == rb"caf\xe9 \u2500 \u65e5\u672c" + b"\n"


def test_what_is_logged_is_shown_too():
    record = logging.LogRecord("rllib_nlac", logging.WARNING, __file__, 1, "step() raised %s", (HOSTILE,), None)
    assert VisibleHandler(Terminal()).format(record) == f"step() raised {SHOWN}"


def test_ordinary_text_stays_as_it_is():
    text = "Zwölf Boxkämpfer, 日本語, شکر‌گزار, 👨‍👩‍👧, ε ≤ 1,\n\ttab: {a: [1, 2]} \\x1b"
    assert visible(text) == text


def test_nothing_is_printed_in_another_way():
    """Rich is used in one place, so that no text can reach it as markup, and no command prints without it."""
    modules = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    commands = {path for path in modules if path.parts[0] == "command" and path.name != "terminal.py"}
    assert Path("command/cli.py") in commands and Path("command/terminal.py") in modules
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and path != Path("command/terminal.py"):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any(name.split(".")[0] == "rich" for name in names), f"{path}:{node.lineno} imports rich"
            if path in commands and isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "typer.echo", "typer.secho", "sys.stderr.write"), (
                    f"{path}:{node.lineno}: {called}"
                )


ENVIRONMENT = f"""
import gymnasium as gym
from rllib_nlac.envs.spaces import TextSpace

HOSTILE = {HOSTILE!r}

class Hostile(gym.Env):
    def __init__(self, **config):
        self.observation_space = self.action_space = TextSpace()
        if "fail" in config:
            raise ValueError(HOSTILE)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "see " + HOSTILE, {{"system_prompt": "rules " + HOSTILE, "task_id": "task " + HOSTILE}}

    def step(self, action):
        if action == "fail":
            raise LookupError(HOSTILE)
        return "then " + HOSTILE, 1.0, True, False, {{"success": True, "stop_reason": "stop " + HOSTILE}}
"""


@pytest.fixture()
def hostile(tmp_path, monkeypatch) -> str:
    (tmp_path / "hostile_env.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield "hostile_env:Hostile"
    sys.modules.pop("hostile_env", None)


class TestCommands:
    def test_play(self, hostile):
        printed = rllib("env", "play", hostile, stdin="hello\n\n")
        assert all(f"{word} {SHOWN}" in printed for word in ("rules", "see", "then", "stop")), printed
        assert f"task {SHOWN}"[:40] in printed  # in a title, which is as long as the terminal is wide

    def test_an_environment_that_raises_while_it_is_played(self, hostile):
        result = CliRunner().invoke(app, ["env", "play", hostile], input="fail\n\n", env={"COLUMNS": "500"})
        *_, where, what, everything = result.output.splitlines()
        assert result.exit_code == 1 and f"LookupError: {SHOWN}" in what
        assert "hostile_env.py, line 19, in step" in where and "Traceback" not in result.output
        file = Path(everything.partition("all:")[2].strip())
        assert "LookupError" in file.read_text() and "Traceback" in file.read_text()
        file.unlink()

    @pytest.mark.process
    def test_check(self, hostile):
        assert "hostile_env:Hostile: " in rllib("env", "check", hostile)  # runs to its end
        assert f"Error: {SHOWN}" in rllib("env", "check", hostile, "--config", "{fail: 1}")

    @pytest.mark.parametrize(
        ("arguments", "shown"),
        [
            (("train", "file", TYPED), True),
            (("train", "--algo", TYPED, "--env", "TwentyQuestions", "--name", "x"), True),
            (("train", "--algo", "NLAC", "--env", "x", "--config", TYPED), False),
            (("evaluate", TYPED), True),
            (("examples", TYPED), True),
            ((TYPED,), True),
            (("train", "--num-samples", TYPED), False),
            (("env", "play", TYPED), True),
        ],
    )
    def test_what_was_typed(self, arguments, shown):
        result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "500"})
        printed = result.output
        assert result.exit_code == 2 and ("[/INST]" in printed and ":smile:" in printed) == shown, printed
        assert not any(character in printed for character in "\x1b\x07\x9b\r\u202e\u2028\udc80")

    def test_a_dry_run(self, tmp_path):
        name = "[INST] [bold]: :smile: x"
        entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"language_model": "tiny", "action_format": "plain"}}
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({name: entry}))
        printed = rllib("train", "file", str(tmp_path / "x.yaml"), "--dry-run")
        assert yaml.safe_load(printed)[name]["config (defaults)"]["language_model"] == "tiny"
        entry["config"]["language_model"] = f"/no/{HOSTILE}"
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({name: entry}))
        printed = rllib("train", "file", str(tmp_path / "x.yaml"), "--dry-run")
        assert "[/INST]" in printed and "does not exist" in printed and "\x1b" not in printed, printed
