"""Harnesses as environments: what a child process asks, is answered and says in the end; and what may go wrong in between."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_nlac.command.cli import app
from rllib_nlac.envs import contract, registry
from rllib_nlac.envs.adapters import harness_process
from rllib_nlac.envs.adapters.harness import Harness
from rllib_nlac.envs.answers import checked_reset, checked_step
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.inputs.tool_calls import Call

pytestmark = pytest.mark.process
PRELUDE = """
import http.client, json, os, sys, urllib.parse
at = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
line = http.client.HTTPConnection(at.netloc)
def post(path, body, connection=line):
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()
def ask(messages, **more):
    status, text = post(at.path + "/chat/completions", {"model": "any", "messages": messages, **more})
    assert status == 200, text
    return json.loads(text)["choices"][0]
def user(text): return {"role": "user", "content": text}
def end(reward, **more): print(json.dumps({"reward": reward, **more}))
"""
GUESS = """
secret = int(os.environ["NLAC_SEED"]) % 3
talk = [{"role": "system", "content": "Guess."}, user("A number below 3?")]
while True:
    said = ask(talk)["message"]
    if said["content"].strip().isdigit():
        end(float(int(said["content"]) == secret))
        break
    talk += [said, user("Say a number.")]
"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@pytest.fixture
def play(tmp_path):
    """Makes environments whose command is a script with the prelude, and closes them."""
    made: list[Harness] = []

    def make(script: str, **config) -> Harness:
        path = tmp_path / f"child_{len(made)}.py"
        path.write_text(PRELUDE + script)
        made.append(Harness([sys.executable, "-I", "-S", str(path)], **config))
        return made[-1]

    yield make
    for env in made:
        env.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(true) -> bool:
    """Whether it becomes true within some seconds."""
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(true())


class TestDialogue:
    def test_an_episode(self, play):
        env = play(GUESS)
        observation, info = checked_reset(env.reset(options={"task_id": "7"}))
        assert (observation, info["system_prompt"], info["tools"]) == ("A number below 3?", "Guess.", [])
        observation, reward, terminated, truncated, info = checked_step(env.step("Hm."))
        assert (observation, reward, terminated, truncated) == ("Say a number.", 0.0, False, False)
        assert "new_messages" not in info
        assert checked_step(env.step("1"))[:4] == ("The task is solved.", 1.0, True, False)
        env.reset(options={"task_id": "7"})
        observation, reward, terminated, _, info = env.step("2")
        assert (observation, reward, terminated) == ("The task has failed.", 0.0, True)
        assert (info["success"], info["stop_reason"], info["task_id"]) == (False, "failure", "7")

    def test_what_the_end_says(self, play):
        env = play('ask([user("?")]); print("log"); end(0.5, success=True, text="Well done.")')
        env.reset(seed=0)
        assert env.step("!")[:3] == ("Well done.", 0.5, True)

    def test_a_reward_in_a_file(self, play):
        env = play(
            'ask([user("?")]); open(os.environ["NLAC_REWARD_FILE"], "w").write(json.dumps({"reward": -2}))', reward="file"
        )
        env.reset(seed=0)
        assert env.step("!")[1:3] == (-2.0, True)

    def test_a_call_and_its_result(self, play):
        env = play(
            f"""
tools = [{ADD!r}]
talk = [user("What is 1 + 2?")]
choice = ask(talk, tools=tools)
(call,) = choice["message"]["tool_calls"]
assert choice["finish_reason"] == "tool_calls" and call["type"] == "function"
assert json.loads(call["function"]["arguments"]) == {{"a": 2}} and choice["message"]["content"] == "So."
talk += [choice["message"], {{"role": "tool", "tool_call_id": call["id"], "content": [{{"type": "text", "text": "3"}}]}}]
talk += [{{"role": "tool", "tool_call_id": "\\n", "content": "?"}}, user("And?")]
choice = ask(talk, tools=tools)
assert choice["finish_reason"] == "stop" and not choice["message"].get("tool_calls")
end(1.0 if choice["message"]["content"] == "{{broken" else 0.0)
"""
        )
        _, info = checked_reset(env.reset(seed=0))
        assert info["tools"] == [ADD]
        observation, *_, info = checked_step(env.step(f"So. {Call('add', {'a': 2})}"))
        result = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call_1_0"}
        unknown = {"role": "tool", "content": "?"}
        assert info["new_messages"] == [result, unknown, {"role": "user", "content": "And?"}]
        assert observation == "3\n?\nAnd?"
        assert env.step("{broken")[1] == 1.0

    def test_a_call_without_tools_is_text(self, play):
        env = play('end(1.0 if "tool_call" in ask([user("?")])["message"]["content"] else 0.0)')
        env.reset(seed=0)
        assert env.step(str(Call("add", {})))[1] == 1.0

    @pytest.mark.parametrize("usage", [True, False])
    def test_streaming(self, play, usage):
        env = play(
            f"""
body = {{"messages": [user("?")], "tools": [{ADD!r}], "stream": True, "stream_options": {{"include_usage": {usage}}}}}
status, text = post(at.path + "/chat/completions", body)
*events, last = [part.removeprefix("data: ") for part in text.strip().split("\\n\\n")]
chunks = [json.loads(event) for event in events]
assert last == "[DONE]" and {{chunk["object"] for chunk in chunks}} == {{"chat.completion.chunk"}}
deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
assert deltas[0]["delta"]["tool_calls"][0]["index"] == 0 and deltas[-1]["finish_reason"] == "tool_calls"
end(float(("usage" in chunks[-1]) is {usage}))
"""
        )
        env.reset(seed=0)
        assert env.step(str(Call("add", {"a": 1})))[1] == 1.0

    def test_turns_may_be_worded_otherwise_when_they_come_back(self, play):
        """As by harnesses that keep calls as text, or leave reasoning out: the agent sees its turns as it said them."""
        env = play(
            """
talk = [user("?")]
ask(talk)
talk += [{"role": "assistant", "content": "called"}, {"role": "assistant", "content": "add"}, user("3")]
ask(talk)
talk[1:3] = [{"role": "assistant", "content": "..."}]
ask(talk + [{"role": "assistant", "content": None}, {"role": "system", "content": "Hurry."}])
end(1)
"""
        )
        env.reset(seed=0)
        steps = [env.step("x") for _ in range(3)]
        assert [step[0] for step in steps] == ["3", "Hurry.", "The task is solved."] and steps[1][4]["system_prompt"] == ""

    def test_examples_are_told_apart(self, play):
        env = play(
            'ask([user("1?"), {"role": "assistant", "content": "2."}, {"role": "developer", "content": "D"}, user("3?")])'
        )
        observation, info = env.reset(seed=0)
        assert (observation, info["system_prompt"]) == ("User: 1?\n\nAssistant: 2.\n\nUser: 3?", "D")

    def test_tasks_are_rows(self, play, tmp_path):
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"question": "1+1", "command": ["rm"]}\n{"question": "\\u00fc \\u0000"}\n')
        env = play('ask([user(json.loads(os.environ["NLAC_TASK"])["question"])])', train_files=str(rows))
        assert [env.reset(options={"task_id": task})[0] for task in "01"] == ["1+1", "ü \0"]
        assert env.reset(seed=3) == env.reset(seed=3)
        with pytest.raises(ValueError, match="tasks are the rows 0 to 1"):
            env.reset(options={"task_id": "2"})
        env = play('ask([user(os.environ["NLAC_SEED"])])', train_files=str(rows))
        assert max(int(env.reset(seed=seed)[0]) for seed in range(3)) > 1  # not the number of a row
        rows = tmp_path / "large.jsonl"
        rows.write_text(json.dumps({"question": "x" * 200_000}))
        with pytest.raises(ValueError, match=r"large.jsonl, line 1: 2000\d\d bytes .* NLAC_TASK holds"):
            play("", train_files=str(rows))


class TestWhatTheChildSees:
    def test_only_named_variables(self, play, monkeypatch):
        monkeypatch.setenv("A_SECRET", "s")
        monkeypatch.setenv("A_KEY", "k")
        env = play("ask([user(json.dumps(dict(os.environ)))])", env={"A_KEY": None, "N": 3})
        seen = json.loads(env.reset(options={"task_id": "5"})[0])
        assert seen.pop("OPENAI_BASE_URL") == seen.pop("OPENAI_API_BASE")
        folder = seen.pop("HOME")
        assert folder == seen.pop("TMPDIR") and os.path.isdir(folder)
        wanted = {"PATH": os.environ["PATH"], "A_KEY": "k", "N": "3", "NLAC_SEED": "5", "OPENAI_API_KEY": "unused"}
        assert {key: value for key, value in seen.items() if key != "LC_CTYPE"} == {
            **wanted,
            "NO_PROXY": "127.0.0.1",
            "LANG": "C.UTF-8",
        }
        env.close()
        assert not os.path.exists(folder)

    @pytest.mark.parametrize(
        ("config", "told"),
        [
            ({"command": "python agent.py"}, r"command is 'python agent.py' and must be a list"),
            ({"command": ["no_such_program"]}, "no program 'no_such_program' on the PATH"),
            ({"command": ["bin/agent"], "cwd": "/usr"}, "no program '/usr/bin/agent'$"),
            ({"cwd": "/no/such"}, "there is no folder '/no/such'"),
            ({"reward": "stdout"}, "reward is 'stdout' and must be stdout_json or file"),
            ({"env": {"NO_SUCH_KEY": None}}, "NO_SUCH_KEY has no value"),
            ({"env": {"OPENAI_API_KEY": "x"}}, "OPENAI_API_KEY, which this environment sets itself"),
            ({"env": {"FLAG": True}}, "FLAG is True and must be a text"),
            ({"start_timeout_s": "1"}, "start_timeout_s is '1' and must be a finite number"),
            ({"val_files": "x.jsonl"}, "train_files is empty, and the split is 'train'"),
        ],
    )
    def test_what_is_wrong_is_named(self, config, told):
        with pytest.raises(ValueError, match=told):
            Harness(**{"command": [sys.executable], **config})

    def test_a_command_that_cannot_be_started(self, tmp_path):
        (tmp_path / "agent").write_text("no program")
        (tmp_path / "agent").chmod(0o755)
        with pytest.raises(ValueError, match=r"agent' cannot be started: .*Exec format error"):
            Harness([f"{tmp_path}/agent"]).reset(seed=0)

    def test_rows_choose_no_command(self, tmp_path):
        rows = tmp_path / "rows.jsonl"
        told = {"Harness": {"command": [sys.executable]}}
        for row, environments in (({"command": ["sh"]}, told), ({"cwd": "/"}, told), ({"env": {}}, told), ({}, {})):
            rows.write_text(json.dumps({"env_str": f"Harness@{json.dumps(row)}"}))
            with pytest.raises(ValueError, match=r"line 1: .*(rows may not|may not set)"):
                TaskSet(str(rows), environments=environments)


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "told"),
        [
            ("{", 400, "not valid JSON"),
            ('{"a": 1, "a": 2}', 400, "twice"),
            ("[" * 10_000, 400, "deep"),
            ({"messages": []}, 400, "'messages' must be a list"),
            ({"messages": ["x"]}, 400, "'messages' must be a list"),
            ({"messages": [{"role": "robot", "content": ""}]}, 400, "has the role 'robot'"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
            ({"messages": [{"role": "user", "content": {"a": 1}}]}, 400, "must be text"),
            ({"messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "'n' must be 1"),
            ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, 400, "'logprobs' is not supported"),
            ({"messages": [{"role": "user", "content": "x"}], "functions": [{}]}, 400, "use tools"),
            ({"messages": [{"role": "user", "content": "x"}], "tools": 3}, 400, "'tools' must be a list"),
        ],
    )
    def test_bodies(self, play, body, status, told):
        env = play(f'status, text = post(at.path + "/chat/completions", {body!r}); ask([user(f"{{status}} {{text}}")])')
        observation = env.reset(seed=0)[0]
        assert observation.startswith(f"{status} ") and told in json.loads(observation[4:])["error"]["message"]

    def test_routes_and_sizes(self, play):
        env = play(
            f"""
told = [post(at.path + "/embeddings", {{}}), post("/guess/v1/chat/completions", {{}}), post("/", "")]
line.request("GET", at.path + "/models"); answer = line.getresponse(); told.append((answer.status, answer.read().decode()))
line.putrequest("POST", at.path + "/chat/completions"); line.putheader("Content-Length", {harness_process.MAX_BODY + 1})
line.endheaders(); answer = line.getresponse(); told.append((answer.status, answer.read().decode()))
ask([user(json.dumps([(status, "error" in json.loads(text)) for status, text in told]))])
"""
        )
        assert json.loads(env.reset(seed=0)[0]) == [[404, True]] * 4 + [[413, True]]

    def test_a_second_request_beside_the_first(self, play, tmp_path):
        env = play(
            f"""
import select
lines = [line, http.client.HTTPConnection(at.netloc)]
for each in lines:
    each.request("POST", at.path + "/chat/completions", json.dumps({{"messages": [user("?")]}}))
(early,) = select.select([each.sock for each in lines], [], [])[0]
lines.sort(key=lambda each: each.sock is not early)
told = [lines[0].getresponse()]
told = [told[0].status, told[0].read().decode()]
open({str(tmp_path / "refused")!r}, "w").close()
end(1, text=f"{{told}} {{lines[1].getresponse().read().decode()}}")
"""
        )
        env.reset(seed=0)
        assert until((tmp_path / "refused").exists)
        observation = env.step("hello")[0]
        assert observation.startswith("[400, ") and "make one call at a time" in observation and '"hello"' in observation


class TestLostEpisodes:
    @pytest.mark.parametrize(
        ("script", "reason", "told"),
        [
            ("", "harness_no_request", "ended before it made a request to .OPENAI_BASE_URL"),
            ('sys.exit("no data")', "harness_no_request", "stderr: no data"),
            ("import time; time.sleep(60)", "harness_timeout", r"within 0.6 s \(env_config.start_timeout_s\)"),
            ('post(at.path + "/chat/completions", {"n": 2})', "harness_no_request", "was refused: 'messages'"),
        ],
    )
    def test_before_the_first_turn(self, play, script, reason, told):
        env = play(script, start_timeout_s=0.6 if "timeout" in reason else 60)
        with pytest.raises(EpisodeLost, match=told) as lost:
            env.reset(seed=0)
        assert lost.value.reason == reason

    @pytest.mark.parametrize(
        ("script", "reason", "told"),
        [
            ('raise ValueError("bad luck")', "harness_failed", "exit code 1; stderr: Traceback.*bad luck"),
            ("end(1); os.kill(os.getpid(), 9)", "harness_failed", "signal 9"),
            ("", "harness_no_reward", r'must write \{"reward": 1.0, "success": true\} as the last line.* wrote \'\''),
            ('print("{}")', "harness_no_reward", "no key 'reward'"),
            ('print("[1]")', "harness_no_reward", "wrote '\\[1\\]'"),
            ('print("{\\"reward\\": NaN}")', "harness_no_reward", "NaN is no number"),
            ('end(1, success="yes")', "harness_no_reward", "success must be true or false"),
            ("import time; time.sleep(60)", "harness_timeout", r"within 0.3 s \(env_config.turn_timeout_s\)"),
            ('ask([user("1"), user("2")])', "history_edited", "message 2 was the agent's turn and something new and is"),
            ('ask([user("1")])', "history_edited", "message 2 was .* and is nothing"),
            ('ask([user("1"), {"role": "assistant", "content": "!"}])', "history_edited", "something new and is .'assistant'"),
            (
                'ask([user("one"), {"role": "assistant", "content": "!"}, user("2")])',
                "history_edited",
                "was .*'1'.* is .*'one'",
            ),
            (f'ask([user("1"), {{"role": "assistant"}}, user("2")], tools=[{ADD!r}])', "history_edited", "offers other tools"),
        ],
    )
    def test_after_it(self, play, script, reason, told):
        env = play(f'ask([user("1")])\n{script}', turn_timeout_s=0.3 if "timeout" in reason else 60)
        env.reset(seed=0)
        observation, reward, terminated, truncated, info = checked_step(env.step("!"))
        assert (reward, terminated, truncated, info["discard"], info["stop_reason"]) == (0.0, False, True, True, reason)
        assert re.search(told, observation, re.DOTALL), observation

    @pytest.mark.parametrize(
        "after", ['[user("1"), {"role": "assistant"}, user("3"), user("4")]', '[user("1"), user("2"), user("3"), user("4")]']
    )
    def test_an_opening_of_two_messages(self, play, after):
        env = play(f'ask([user("1"), user("2")]); ask({after})')
        assert env.reset(seed=0)[0] == "1\n\n2"
        assert env.step("!")[4]["stop_reason"] == "history_edited"

    def test_an_output_is_kept_in_part(self, play):
        """However much a child prints, also what it never reads back; the last line counts."""
        env = play('ask([user("?")]); print("x" * 3_000_000); print("y" * 300_000, file=sys.stderr); end(1)')
        env.reset(seed=0)
        assert env.step("!")[1] == 1.0


class TestEnds:
    def test_turns_run_out(self, play):
        env = play(
            """
talk = [user(str(os.getpid()))]
while True: talk += [ask(talk)["message"], user("more")]
""",
            max_turns=2,
        )
        pid = int(env.reset(seed=0)[0])
        assert env.step("1")[2:4] == (False, False) and is_alive(pid)
        observation, reward, terminated, truncated, info = env.step("2")
        assert (observation, reward, terminated, truncated) == ("more No turns left.", 0.0, False, True)
        assert info["stop_reason"] == "turn_limit" and not is_alive(pid)

    @pytest.mark.parametrize("way", ["close", "reset", "forget"])
    def test_nothing_is_left(self, play, tmp_path, way, monkeypatch):
        """A child that takes no SIGTERM, and has a child of its own that holds its pipes."""
        monkeypatch.setattr(harness_process, "GRACE_S", 0.05)
        (tmp_path / "child.py").write_text(
            PRELUDE
            + """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen(["sleep", "60"])
ask([user(f"{os.getpid()} {other.pid}")])
"""
        )
        assert until(lambda: "harness" not in [thread.name for thread in threading.enumerate()])
        before = set(threading.enumerate())
        env = Harness([sys.executable, "-I", "-S", str(tmp_path / "child.py")])
        pids = [int(word) for word in env.reset(seed=0)[0].split()]
        assert all(map(is_alive, pids))
        if way == "close":
            env.close()
        elif way == "reset":
            env.reset(seed=1)
        assert way == "forget" or not is_alive(pids[0])
        del env
        assert until(lambda: not any(map(is_alive, pids)))
        assert until(lambda: set(threading.enumerate()) <= before)

    def test_a_grandchild_that_lives_on_holds_nothing_up(self, play):
        env = play('import subprocess; subprocess.Popen(["sleep", "60"]); ask([user("?")]); end(1)', turn_timeout_s=50)
        env.reset(seed=0)
        assert env.step("!")[1] == 1.0

    def test_sixteen_at_once(self, play):
        envs = [play(GUESS) for _ in range(16)]
        rewards = [None] * 16

        def episode(number: int) -> None:
            envs[number].reset(options={"task_id": str(number)})
            envs[number].step("Hm.")
            rewards[number] = envs[number].step("1")[1]

        threads = [threading.Thread(target=episode, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(env._endpoint) for env in envs}) == 1
        assert rewards == [float(number % 3 == 1) for number in range(16)]


def test_a_person_plays(tmp_path):
    (tmp_path / "child.py").write_text(PRELUDE + GUESS)
    config = json.dumps({"command": [sys.executable, "-I", "-S", str(tmp_path / "child.py")]})
    result = CliRunner().invoke(app, ["env", "play", "Harness", "--config", config, "--task", "7"], input="Hm.\n\n1\n\n")
    for text in ("Guess.", "A number below 3?", "Say a number.", "The task is solved.", "success True, return 1"):
        assert text in result.stdout


def test_the_contract(tmp_path):
    (tmp_path / "child.py").write_text(PRELUDE + GUESS)
    config = {"command": [sys.executable, "-I", "-S", str(tmp_path / "child.py")], "max_turns": 7}
    findings = list(contract.check_environment(lambda: registry.make("Harness", config), seeds=(0, 1, 2)))
    assert not [finding for finding in findings if finding.verdict == "FAILED"], findings
