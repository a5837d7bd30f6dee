"""Reward styles: right answers 1, wrong ones 0, and programs that nobody trusts are kept from doing harm."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rllib_nlac.inputs.endpoint import EndpointError
from rllib_nlac.rewards.row_rewards import SETTINGS
from rllib_nlac.rewards.sandbox import Limits, SandboxError, run_python, why_unavailable
from rllib_nlac.rewards.styles import SOURCES, STYLES, program_of, reward

QUICK = Limits(seconds=1)


@pytest.mark.parametrize(
    ("style", "answer", "truth", "value"),
    [
        ("rule-openai/gsm8k", "so\n#### 1,234", "1234", 1.0),
        ("rule-openai/gsm8k", "it is 7 and then 42.", "x\n#### 42", 1.0),
        ("rule-openai/gsm8k", "#### 43", "42", 0.0),
        ("rule-openai/gsm8k", "The answer is 42, I think.", "42", 1.0),
        ("rule-openai/gsm8k", "It is 1,234,567, or so.", "1234567", 1.0),
        ("rule-openai/gsm8k", "none", "42", 0.0),
        ("rule-openai/gsm8k", "#### Step 1: add\n2+2=4.\n#### Step 2: the answer\nThe answer is 4.", "#### 4", 1.0),
        ("rule-openai/gsm8k", "#### Step 2: the answer\nThe answer is 5.", "4", 0.0),
        ("rule-openai/gsm8k", "#### Answer: 42", "42", 1.0),
        ("rule-openai/gsm8k", "#### **42**\nas 40 and 2 say", "42", 1.0),
        ("rule-openai/gsm8k", "#### **$1,042**", "1042", 1.0),
        ("rule-openai/gsm8k", "#### \\boxed{42}\nas 40 and 2 say", "42", 1.0),
        ("rule-openai/gsm8k", "#### **\\boxed{-42}**", "-42", 1.0),
        ("rule-openai/gsm8k", "#### ", "", 0.0),
        ("rule-lighteval/MATH", r"\boxed{\frac12}", "0.5", 1.0),
        ("rule-lighteval/MATH", r"\boxed{1} \boxed{2}", r"\boxed{1}", 0.0),
        ("rule-lighteval/MATH", "0.5", "0.5", 0.0),
        ("rule-math_dapo", "So it is 34.\nAnswer: 34", "34", 1.0),
        ("rule-math_dapo", "Answer: 33\nNo.\n\n**answer :** $34$.", "34", 1.0),
        ("rule-math_dapo", "Answer: 33\nNo.\n\nAnswer : $34$.\nDone.", "34", 1.0),
        ("rule-math_dapo", r"Answer: $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        ("rule-math_dapo", r"\boxed{34}", "34", 0.0),
        ("rule-math_dapo", "Answer:", "34", 0.0),
        ("rule-math_dapo", "Answer: 34 or 35", "34", 0.0),
    ],
)
def test_rules(style, answer, truth, value):
    assert reward(style, answer, truth) == value


def test_unknown_styles_are_named():
    with pytest.raises(ValueError, match="did you mean 'code-sandbox'"):
        reward("code_sandbox", "x", "y")
    rules = {"rule-openai/gsm8k", "rule-lighteval/MATH", "rule-math_dapo"}
    assert set(STYLES) == {*rules, "code-sandbox", "verifier_service", "agent_env"}
    assert set(SOURCES.values()) < set(STYLES) and set(SETTINGS) == set(STYLES) - {"agent_env"}


def test_an_environment_pays_for_a_whole_episode():
    game = 'TwentyQuestions@{"num_objects": 16, "max_turns": 2, "task_id": "dog"}'
    assert reward("agent_env", "Is it a dog?", game) == 1.0 and reward("agent_env", "Is it a ship?", game) == 0.0
    assert reward("agent_env", ["Is it big?", "Is it a dog?"], game) == 1.0
    assert reward("agent_env", ["Is it big?", "Is it?", "Is it a dog?"], game) == 0.0  # one turn too late
    with pytest.raises(ValueError, match="names no environment"):
        reward("agent_env", "x", "TwentyQuestions")


needs_sandbox = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@pytest.mark.process
@needs_sandbox
class TestPrograms:
    DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2", "42\n"]}

    def test_input_and_output(self):
        right = "Here it is:\n```python\nprint(2 * int(input()))\n```\n"
        assert (
            reward("code-sandbox", right, self.DOUBLE) == 1.0 and reward("code-sandbox", right, json.dumps(self.DOUBLE)) == 1.0
        )
        assert reward("code-sandbox", "print(2)", self.DOUBLE) == 0.0
        assert reward("code-sandbox", "1/0", self.DOUBLE) == 0.0

    def test_functions_and_methods(self):
        truth = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
        assert reward("code-sandbox", "def f(a, b):\n    return a + b", truth) == 1.0
        assert reward("code-sandbox", "class Solution:\n    def f(self, a, b):\n        return a + b", truth) == 1.0
        assert reward("code-sandbox", "def f(a, b):\n    return str(a + b)", truth) == 0.0
        assert reward("code-sandbox", "def g(): pass", truth) == 0.0

    @pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()"])
    def test_a_program_may_end_by_leaving(self, end):
        """Fails where Python starts without what an interactive one has, and right programs are paid nothing."""
        truth = {"inputs": ["3\n"], "outputs": ["6\n"]}
        assert reward("code-sandbox", f"print(2 * int(input()))\n{end}", truth) == 1.0
        assert reward("code-sandbox", f"{end}\nprint(2 * int(input()))", truth) == 0.0

    def test_its_classes_are_found_in_its_own_main_module(self):
        program = "import pickle\nclass A: x = 6\nprint(pickle.loads(pickle.dumps(A())).x, __import__('__main__').A is A)"
        assert reward("code-sandbox", program, {"inputs": [""], "outputs": ["6 True"]}) == 1.0

    def test_a_test_may_be_a_list_of_lines(self):
        """As some data sets have them. Fails where the list itself is what the program reads, and all are paid nothing."""
        truth = {"inputs": [["2", "3 4"], "1\n5"], "outputs": [["3", "4"], 5]}
        assert reward("code-sandbox", "n = input()\nprint(*input().split(), sep='\\n')", truth) == 1.0
        for wrong in ({"inputs": [[["1"]]], "outputs": ["1"]}, {"inputs": ["1"], "outputs": [None]}):
            with pytest.raises(ValueError, match="must be a text or a list of lines, and one is"):
                reward("code-sandbox", "x", wrong)

    def test_leaving_early_is_no_way_to_pass(self):
        truth = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}
        for cheat in (
            "import os; os._exit(0)",
            "import sys; sys.exit(0)",
            "class E:\n  def __eq__(s, o): return True\nf = lambda x: E()",
        ):
            assert reward("code-sandbox", cheat, truth) == 0.0

    def test_malformed_tests_are_an_error_and_not_a_zero(self):
        for truth in ({"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, "[]"):
            with pytest.raises(ValueError, match="tests must be"):
                reward("code-sandbox", "x", truth)

    @pytest.mark.parametrize(
        ("answer", "program"),
        [
            ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
            ("plain", "plain"),
            ("First:\n```text\nabc\n```\nProgram:\n```python\nprint(1)\n```\n", "print(1)\n"),
            ("```python\na\n```\nIt prints\n```output\n1\n```", "a\n"),
            ("```python\na\n```\nOutput:\n```\n1\n```", "a\n"),
            ("```\na\n```\n```\nb\n```\n```output\n1\n```", "b\n"),
            ("```python3\na\n```", "a\n"),
            ("```Python\nx = '''\n```'''\n```", "x = '''\n```'''\n"),
            ("1. So:\n   ```py\n   if a:\n     b\n   ```", "if a:\n  b\n"),
            ("```python\nprint(4)```", "print(4)"),
            ("```json\n{}\n```", "{}\n"),
            ("So:\r\n```python\r\nif a:\r\n  b\r\n```\r\nDone.\r\n", "if a:\n  b\n"),
        ],
    )
    def test_the_last_block_of_pythons_is_the_program(self, answer, program):
        assert program_of(answer) == program


@pytest.mark.process
def test_a_sandbox_that_cannot_protect_refuses(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys\nopen(json.load(open(sys.argv[1]))['state'], 'w').write('the sandbox needs Landlock'); sys.exit(77)"
    )
    monkeypatch.setattr("rllib_nlac.rewards.sandbox_child.__file__", str(child))
    with pytest.raises(SandboxError, match="cannot work here: the sandbox needs Landlock"):
        reward("code-sandbox", "print(1)", {"inputs": [""], "outputs": ["1"]})
    assert "Landlock" in why_unavailable()
    child.write_text("1 / 0")  # whatever ends it before the program runs is no fault of the program
    with pytest.raises(SandboxError, match=r"(?s)it did not start.*ZeroDivisionError"):
        reward("code-sandbox", "print(1)", {"inputs": [""], "outputs": ["1"]})


@pytest.mark.process
@needs_sandbox
class TestSandbox:
    """Each program tries something that would hurt; what it tried must not have happened."""

    def test_an_honest_program_gets_what_it_needs(self):
        program = "import math, json, re, heapq\nopen('a', 'w').write('b')\nprint(open('a').read(), input(), math.sqrt(4))"
        assert run_python(program, stdin="hi").output == "b hi 2.0\n"
        assert (
            run_python("import threading\nt = threading.Thread(target=print, args=('in',)); t.start(); t.join()").output
            == "in\n"
        )

    @pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)", "import signal\nsignal.pause()"])
    def test_time(self, program):
        started = time.monotonic()
        run = run_python(program, limits=QUICK)
        assert not run.ok and run.problem == "timeout" and time.monotonic() - started < 5

    def test_memory(self):
        assert "MemoryError" in run_python("x = bytearray(10**10)").problem
        assert not run_python("x = []\nwhile True: x.append(bytearray(10**7))").ok

    @pytest.mark.parametrize(
        "program",
        [
            "f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)",
            "while True: print('x' * 10**5)",
            "import sys\nwhile True: sys.stderr.write('x' * 10**5)",
            "fs = [open(str(i), 'w') for i in range(10**4)]",
        ],
    )
    def test_files(self, program):
        run = run_python(program, limits=Limits(seconds=5, file_mb=2))
        assert not run.ok and len(run.output) <= 2 << 20

    @pytest.mark.parametrize(
        "program",
        [
            "import socket; socket.create_connection(('127.0.0.1', {port}))",
            "import socket; socket.socket(socket.AF_UNIX)",
            "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}')",
            "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
            "if libc.socket(2, 1, 0) < 0: raise OSError(os.strerror(ctypes.get_errno()))",
        ],
    )
    def test_network(self, program, service):
        run = run_python(program.format(port=service.server_port))
        assert not run.ok and "Operation not permitted" in run.problem and service.asked == []

    def test_other_peoples_files(self, tmp_path):
        secret = tmp_path / "secret"
        secret.write_text("hush")
        for program in (
            f"print(open({str(secret)!r}).read())",
            f"import os; print(os.listdir({str(tmp_path)!r}))",
            "print(open('/etc/passwd').read())",
            "print(open('/proc/1/environ').read())",
            "import os; print(os.listdir(os.path.dirname(os.getcwd())))",
        ):
            run = run_python(program)
            assert not run.ok and "hush" not in run.output and "Permission" in run.problem, program
        for attempt in (
            "open(it, 'w')",
            "os.remove(it)",
            "os.chmod(it, 0)",
            "os.rename(it, 'mine')",
            "os.link(it, 'mine')",
            "os.truncate(it, 0)",
            "os.symlink(it, 'a'); print(open('a').read())",
        ):
            assert not run_python(f"import os; it = {str(secret)!r}; {attempt}").ok, attempt
        assert secret.read_text() == "hush" and oct(secret.stat().st_mode)[-3:] != "000"

    def test_other_processes(self):
        for program in (
            "import os\nwhile True: os.fork()",
            "import subprocess; subprocess.run(['true'])",
            "import os; os.execv('/bin/sh', ['sh'])",
            "import multiprocessing as m\np = m.Process(target=print); p.start()",
            f"import os; os.kill({os.getpid()}, 9)",
            "import os, signal; os.killpg(0, signal.SIGKILL)",
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        ):
            run = run_python(program, limits=Limits(seconds=5))
            refused = "maximum limit" if "setrlimit" in program else "Operation not permitted"
            assert not run.ok and refused in run.problem, program

    def test_it_leaves_nothing_and_tells_nothing(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setenv("MY_KEY", "hush")
        assert "hush" not in run_python("import os; print(dict(os.environ))").output
        assert list(Path(tmp_path).iterdir()) == []


class Service(HTTPServer):
    """A verifier that answers as it is told, one answer a request, then with a reward of 1."""

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []
        super().__init__(("127.0.0.1", 0), Verify)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/verify"


class Verify(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.server.answers.pop(0) if self.server.answers else (200, '{"reward": 1}')
        if status is None:  # no HTTP
            self.close_connection = True
        else:
            self.send_response(status)
            self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        self.server.asked.append("GET")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture()
def service():
    server = Service()
    yield server
    server.shutdown()
    server.server_close()


class TestVerifier:
    def test_it_is_told_prompt_answer_and_truth(self, service):
        service.answers = [(200, '{"reward": 0.25}')]
        assert reward("verifier_service", "a", {"k": 1}, url=service.url, prompt="p") == 0.25
        assert service.asked == [{"prompt": "p", "response": "a", "ground_truth": {"k": 1}}]

    def test_what_may_be_retried_is_retried(self, service):
        service.answers = [(500, ""), (200, "rubbish"), (200, '{"reward": true}'), (200, '{"reward": 0.5}')]
        assert reward("verifier_service", "a", None, url=service.url) == 0.5 and len(service.asked) == 4

    @pytest.mark.parametrize("first", [(429, ""), (200, '{"reward": NaN}'), (200, '{"reward": 1e999}')])
    def test_one_that_is_busy_or_pays_no_number_is_asked_again(self, service, first):
        service.answers = [first]
        assert reward("verifier_service", "a", None, url=service.url) == 1.0 and len(service.asked) == 2

    def test_one_that_never_answers_is_waited_for_as_long_as_it_is_told(self, monkeypatch):
        given: list[float | None] = []

        def stall(request, timeout=None):
            given.append(timeout)
            raise TimeoutError("timed out")

        monkeypatch.setattr(urllib.request, "urlopen", stall)
        with pytest.raises(EndpointError, match="timed out"):
            reward("verifier_service", "a", None, url="http://127.0.0.1:9/", timeout_s=0.2, max_retries=0)
        assert given == [0.2]

    def test_what_is_no_http_is_retried_too(self, service):
        cut_off = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"
        service.answers = [(None, "rubbish\r\n"), (None, cut_off), (200, '{"reward": 0.5}')]
        assert reward("verifier_service", "a", None, url=service.url) == 0.5 and len(service.asked) == 3

    def test_what_fails_for_good(self, service):
        service.answers = [(503, "")] * 9
        with pytest.raises(EndpointError, match="gave 503 Service Unavailable, 2 times"):
            reward("verifier_service", "a", None, url=service.url, max_retries=1)
        service.answers = [(404, "")]
        with pytest.raises(ValueError, match="refuses: 404"):
            reward("verifier_service", "a", None, url=service.url)
        with pytest.raises(ValueError, match="needs the url"):
            reward("verifier_service", "a", None)
