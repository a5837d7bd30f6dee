"""Rows, programs and answers that mean harm: refused by name, or contained; and what honest ones may still do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attacks import row_files, rows, sandbox, sandbox_programs
from chat_server import ChatServer

from rllib_nlac.envs.math_reasoning import MathReasoning
from rllib_nlac.envs.registry import ENVIRONMENTS
from rllib_nlac.envs.rows import read_rows
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.envs.task_strings import row_env
from rllib_nlac.envs.tools import ToolError, parse_tool_call
from rllib_nlac.rewards import styles
from rllib_nlac.rewards.grading import exact_equal, math_equal
from rllib_nlac.rewards.math_verify_worker import MathVerify, UnreadableTruth
from rllib_nlac.rewards.sandbox import Limits, run_python, why_unavailable
from rllib_nlac.rewards.styles import reward

# The whole package takes long to import.
ALONE = (
    "import sys, types\npackage = sys.modules['rllib_nlac'] = types.ModuleType('rllib_nlac')\n"
    f"package.__path__ = [{str(Path(styles.__file__).parents[1])!r}]\n"
)
needs_sandbox = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@pytest.mark.parametrize("row", row_files.ROWS, ids=lambda row: row.name)
def test_a_hostile_row_is_refused(row, tmp_path):
    assert rows.attack(row, tmp_path) == []


@pytest.fixture(scope="module")
def around():
    with sandbox.Surroundings() as around:
        yield around


@pytest.mark.process
@needs_sandbox
@pytest.mark.parametrize("program", sandbox_programs.PROGRAMS, ids=lambda program: program.name)
def test_a_hostile_program_is_contained(program, around):
    assert sandbox.attack(program, around) == []


def write(path: Path, *lines: dict) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


class TestWhatRowsMay:
    ROW = {"env_str": 'TwentyQuestions@{"num_objects": 16, "task_id": "dog"}'}

    @pytest.fixture()
    def server(self):
        server = ChatServer(say="Yes.")
        yield server
        server.shutdown()
        server.server_close()

    def test_the_configuration_gives_what_a_row_may_not(self, server, tmp_path):
        oracle = {"kind": "endpoint", "base_url": server.url, "model": "m", "max_retries": 0}
        env = TaskSet(
            write(tmp_path / "t.jsonl", self.ROW), environments={"TwentyQuestions": {"oracle": oracle, "max_turns": 3}}
        )
        env.reset(seed=0)
        assert env.step("Is it big?")[0] == "Yes." and len(server.asked) == 1
        assert "one of: dog" in env.system_prompt and "you have 3 turns" in env.system_prompt

    def test_rows_of_ones_own_may_everything(self, server, monkeypatch, tmp_path):
        monkeypatch.setenv("MY_KEY", "hush")
        oracle = {"kind": "endpoint", "base_url": server.url, "model": "m", "api_key_env": "MY_KEY"}
        file = write(tmp_path / "t.jsonl", {"env_str": f"TwentyQuestions@{json.dumps({'oracle': oracle})}"})
        env = TaskSet(file, trusted=True)
        env.reset(seed=0)
        assert env.step("Is it big?")[0] == "Yes."
        with pytest.raises(ValueError, match=r"line 1: .*a row may not set 'oracle'.*env_config.environments.TwentyQuestions"):
            TaskSet(file)

    def test_an_environment_without_a_schema_is_chosen_where_the_configuration_names_it(self, monkeypatch, tmp_path):
        file = write(tmp_path / "t.jsonl", {"env_str": "Own@{}"}, {"env_str": 'Own@{"level": 1}'})
        monkeypatch.setitem(ENVIRONMENTS, "Own", lambda level=2: MathReasoning(level=level))
        with pytest.raises(ValueError, match=r"line 1: .*rows may not choose Own"):
            TaskSet(file)
        with pytest.raises(ValueError, match=r"line 2: .*may not set 'level'"):
            TaskSet(file, environments={"Own": {"level": 3}})
        env = TaskSet(file, environments={"Own": {"level": 3}}, trusted=True)
        assert env.reset(seed=0, options={"task_id": "1"})[0].startswith("What is")
        env.reset(seed=0, options={"task_id": "0"})
        assert env._inner.env.levels == (3,)  # the configuration's, which a row adds to, whoever wrote it

    def test_an_environment_of_ones_own_says_what_rows_may_set(self, monkeypatch, tmp_path):
        class Echo(MathReasoning):
            row_schema = {"level": {"type": "integer", "maximum": 3}}

        monkeypatch.setitem(ENVIRONMENTS, "Echo", Echo)
        assert TaskSet(write(tmp_path / "t.jsonl", {"env_str": 'Echo@{"level": 1}'})).reset(seed=0)[0].startswith("What is")
        for arguments in ('{"level": 1, "split": "eval"}', '{"level": 4}', '{"level": "1"}'):
            with pytest.raises(ValueError, match="line 1"):
                TaskSet(write(tmp_path / "u.jsonl", {"env_str": f"Echo@{arguments}"}))

    def test_a_row_chooses_among_the_verifiers_of_the_configuration(self, monkeypatch, tmp_path):
        asked = []
        monkeypatch.setitem(styles.STYLES, "verifier_service", lambda *a, **settings: asked.append(settings["url"]) or 1.0)
        model = {"style": "verifier_service", "ground_truth": "1"}
        lines = [{"prompt": "x", "reward_model": {**model, "verifier": name}} for name in ("a", "b")]
        file = write(tmp_path / "t.jsonl", {"prompt": "x", "reward_model": model}, *lines)
        env = TaskSet(
            file, reward_config={"url": "http://d", "verifiers": {"a": {"url": "http://a"}, "b": {"url": "http://b"}}}
        )
        for task in "012":
            env.reset(seed=0, options={"task_id": task})
            env.step("y")
        assert asked == ["http://d", "http://a", "http://b"]
        with pytest.raises(ValueError, match=r"verifiers.a: unknown key 'ulr'"):
            TaskSet(file, reward_config={"verifiers": {"a": {"ulr": ""}}})

    def test_what_an_environment_refuses_later_names_the_row_too(self, tmp_path):
        env = TaskSet(write(tmp_path / "t.jsonl", {"env_str": 'TwentyQuestions@{"num_objects": 9999}'}))
        with pytest.raises(ValueError, match=r"t.jsonl, line 1: num_objects is 9999"):
            env.reset(seed=0)

    def test_a_truth_is_a_row_and_a_callers_string_is_not(self):
        own = 'TwentyQuestions@{"table": "/etc/hostname"}'
        with pytest.raises(ValueError, match="may not set 'table'"):
            reward("agent_env", "x", own)
        with pytest.raises(ValueError, match="may not set 'table'"):
            row_env(own)
        for trusted in (lambda: row_env(own, trusted=True), lambda: reward("agent_env", "x", own, trusted=True)):
            with pytest.raises((ValueError, FileNotFoundError), match="hostname"):
                trusted()

    def test_honest_files_are_read(self, tmp_path):
        (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\r\n{"a": [1.5, {"b": null}]}')
        assert [row.fields for row in read_rows(str(tmp_path / "mark.jsonl"))] == [{"a": "é"}, {"a": [1.5, {"b": None}]}]
        table = [{"a": "x" * 5_000_000, "n": float("nan"), "m": [{"c": str(i)}]} for i in range(3)]
        pq.write_table(pa.Table.from_pylist(table), tmp_path / "t.parquet")
        read = [row.fields for row in read_rows(str(tmp_path / "t.parquet"))]
        assert [row["m"] for row in read] == [row["m"] for row in table] and read[2]["a"] == table[2]["a"]


BOMBS = (
    "9**9**9**9",
    "1/0",
    "1e999999999",
    "0/0",
    "(" * 10**6,
    r"\frac{1}{" * 10**5,
    r"\text{" * 10**5,
    "9" * 10**6,
    "-" * 10**6,
    "1," * 10**6,
    " " * 10**6,
    r"\boxed{" * 10**5,
    "{" * 10**6,
    "[" * 10**6,
    "#" * 10**6,
    "```" * 10**5,
    "\0",
    "\ud800",
    '{"name": ' * 10**5,
    '{"name": ' + "9" * 10**5 + "}",
    "?" * 10**6 + "x",
    "٣" * 10**5,
    "1/" + "0" * 399,
)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: f"{bomb!r:.20}")
def test_no_answer_holds_up_a_grader(bomb):
    started = time.process_time()
    for answer in (bomb, rf"\boxed{{{bomb}}}", f"#### {bomb}"):
        assert reward("rule-openai/gsm8k", answer, "42") == 0.0
        assert reward("rule-lighteval/MATH", answer, "42") == 0.0
        try:
            parse_tool_call(answer)
        except ToolError as error:
            assert len(str(error)) < 300
    assert not exact_equal(bomb, "42")
    assert time.process_time() - started < 5


@pytest.mark.process
class TestMathVerify:
    def test_a_truth_that_cannot_be_compared_is_an_error_of_its_row(self, monkeypatch, tmp_path):
        monkeypatch.setattr("rllib_nlac.rewards.grading._MATH_VERIFY.equal.__func__.__defaults__", (1.0,))
        bad = {"prompt": "x", "reward_model": {"style": "rule-lighteval/MATH", "ground_truth": "9^{9^{9^9}}"}}
        env = TaskSet(write(tmp_path / "t.jsonl", bad), reward_config={"math_verify": True})
        env.reset(seed=0)
        with pytest.raises(ValueError, match=r"t.jsonl, line 1: the true answer .* cannot be read by math-verify"):
            env.step(r"\boxed{3x}")
        env = MathReasoning(
            files=write(tmp_path / "p.jsonl", *[{"problem": f"{i}", "answer": "9^{9^{9^9}}"} for i in range(30)]),
            grader="math_verify",
        )
        env.reset(seed=0)
        with pytest.raises(ValueError, match=r"p.jsonl, line \d+: the true answer"):
            env.step(r"\boxed{3x}")
        assert math_equal(r"\{1,2\}", r"\{2,1\}")

    def test_the_worker_has_no_variables_and_no_rights(self, monkeypatch):
        monkeypatch.setenv("ATTACK_SECRET", "hush")
        verify = MathVerify()
        assert verify.equal("x+1", "1+x", timeout_s=60)
        process = Path(f"/proc/{verify._process.pid}")
        assert b"hush" not in (process / "environ").read_bytes()
        if why_unavailable() is None:
            assert "Seccomp:\t2" in (process / "status").read_text()
        assert isinstance(UnreadableTruth(), ValueError)
        verify.stop()

    def test_a_question_that_never_ends_ends_with_its_trainer(self):
        script = (
            f"{ALONE}from rllib_nlac.rewards.math_verify_worker import *\n"
            "verify = MathVerify()\n"
            "verify._start()\n"
            "verify._line = lambda deadline: print(verify._process.pid, flush=True) or time.sleep(1000)\n"
            "verify.equal('3x', '9^{9^{9^9}}', timeout_s=2)"
        )
        trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            worker = Path(f"/proc/{int(trainer.stdout.readline())}/cmdline")  # empty once it has ended
        finally:
            trainer.kill()
            trainer.wait()
        deadline = time.monotonic() + 20
        while worker.exists() and worker.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.process
@needs_sandbox
class TestSandbox:
    def test_honest_programs_keep_what_they_need(self):
        program = textwrap.dedent(
            """
            import collections, decimal, fractions, functools, hashlib, heapq, itertools, random, re, sqlite3, tempfile
            import threading, zlib
            from concurrent.futures import ThreadPoolExecutor
            import datetime, os, sys, time, zoneinfo
            sys.setrecursionlimit(10**5)
            def deep(n): return n and deep(n - 1)
            assert deep(20_000) == 0
            assert sum(ThreadPoolExecutor(8).map(int, '123')) == 6
            open('a', 'w').write('b'); open('a', 'a').write('c'); assert open('a').read() == 'bc'; open('a', 'w')
            sqlite3.connect(':memory:').execute('select 1'); time.sleep(0.01); random.random(); os.listdir('.')
            print(input(), datetime.datetime.now(zoneinfo.ZoneInfo('UTC')).tzinfo, file=sys.stdout)
            """
        )
        run = run_python(program, stdin="hi")
        assert run.ok and run.output == "hi UTC\n", run.problem

    def test_arguments_may_be_large(self):
        assert reward("code-sandbox", "f = len", {"fn_name": "f", "inputs": [["x" * 500_000]], "outputs": [500_000]}) == 1.0

    def test_all_tests_together_have_a_bound(self, monkeypatch):
        monkeypatch.setattr(styles, "MAX_SECONDS", 0.1)
        tests = {"inputs": [""] * 50, "outputs": ["1"] * 50}
        ran, run = [], styles.run_python
        monkeypatch.setattr(styles, "run_python", lambda *given, **settings: ran.append(given) or run(*given, **settings))
        assert reward("code-sandbox", "import time; time.sleep(0.2); print(1)", tests) == 0.0  # each is right, and late
        assert len(ran) == 1

    def test_a_program_ends_with_its_trainer(self, tmp_path):
        script = (
            f"{ALONE}from rllib_nlac.rewards.sandbox import *\n"
            "run_python('import time; time.sleep(1000)', limits=Limits(seconds=1000))"
        )
        trainer = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
        try:
            deadline = time.monotonic() + 120
            while not any(state.stat().st_size == 0 for state in tmp_path.glob("*/state")):  # it runs
                assert time.monotonic() < deadline and trainer.poll() is None
                time.sleep(0.05)
        finally:
            trainer.kill()
            trainer.wait()
        deadline = time.monotonic() + 10
        while sandbox._processes(str(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_start_up_does_not_count_against_a_program(self):
        assert run_python("print(1)", limits=Limits(seconds=0.05)).ok
