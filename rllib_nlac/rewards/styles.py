"""The reward styles of task files, as functions of an answer and what its row says is right."""

from __future__ import annotations

import fnmatch
import json
import re
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from rllib_nlac.inputs import plain_json
from rllib_nlac.inputs.endpoint import EndpointError
from rllib_nlac.names import unknown_key
from rllib_nlac.rewards.grading import MAX_ANSWER, after_hashes, as_number, boxed, exact_equal, math_equal
from rllib_nlac.rewards.row_rewards import parse_tests
from rllib_nlac.rewards.sandbox import Limits, run_python

MAX_TESTS = 50  # of a program; a row with more is tested on the first ones
MAX_SECONDS = 60.0  # of all tests of a program; those that are left then count as failed


def gsm8k(answer: str, truth: Any, **_: Any) -> float:
    r"""1 where the number after the last ``####`` is right.

    It may be in bold or in ``\boxed{}``, and the last number of the text counts where no number follows the mark, or there is
    none.
    """
    said = after_hashes(answer) or ""
    said = (boxed(said) or said).strip("* ")
    if not _is_number(said):
        said = (re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", answer[-2000:]) or [""])[-1]
    right = after_hashes(str(truth)) or str(truth)
    return float(_is_number(said) and exact_equal(said, right))


def _is_number(text: str) -> bool:
    return len(text) <= MAX_ANSWER and as_number(text) is not None


def math(answer: str, truth: Any, *, math_verify: bool = False, **_: Any) -> float:
    r"""1 where the content of the last ``\boxed{}`` is right, asking math-verify too where ``math_verify`` is set."""
    return _same_answer(boxed(answer), truth, math_verify)


def dapo(answer: str, truth: Any, *, math_verify: bool = False, **_: Any) -> float:
    r"""As ``math``, of what follows the last ``Answer:`` in its line, which may be in ``\boxed{}`` or between dollar signs."""
    said = re.split(r"(?i)\banswer\s*:", answer)[1:]
    line = said[-1].strip().partition("\n")[0].strip("* ") if said else None
    return _same_answer(line and (boxed(line) or line), truth, math_verify)


def _same_answer(said: str | None, truth: Any, math_verify: bool) -> float:
    if said is None:
        return 0.0
    right = boxed(str(truth)) or str(truth)
    return float(math_equal(said, right) if math_verify else exact_equal(said, right))


def code(answer: str, truth: Any, *, limits: Limits | None = None, **_: Any) -> float:
    """1 where a program passes all its tests.

    Args:
        answer: The program, or a text whose last fenced block is one.
        truth: ``{"inputs": [...], "outputs": [...]}``, for each test a text, or a list of lines, in and one out; with
            ``"fn_name"`` lists of arguments and returned values, the function being one of the program or of its class
            ``Solution``. JSON text will do.
        limits: Limits of each test.

    Raises:
        ValueError: ``truth`` is malformed.
        SandboxError: The sandbox cannot work here.
    """
    tests = parse_tests(truth)
    program, name = program_of(answer), tests.get("fn_name")
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))[:MAX_TESTS]
    deadline = time.monotonic() + MAX_SECONDS
    for given, wanted in pairs:
        if time.monotonic() > deadline:
            return 0.0
        if name:
            run = run_python(program, call=(name, list(given)), limits=limits)
            passed = run.ok and _same_value(run.output, wanted)
        else:
            run = run_python(program, stdin=str(given), limits=limits)
            passed = run.ok and _lines(run.output) == _lines(str(wanted))
        if not passed:
            return 0.0
    return 1.0


def program_of(answer: str) -> str:
    """The program in a text: its last fenced block of Python's, else the last without a language, else the last, else all."""
    answer = answer.replace("\r\n", "\n")
    blocks = re.findall(r"^[ \t]*```([^\n`]*)\n(.*?)```[ \t]*$", answer, re.DOTALL | re.MULTILINE)
    pythons = [program for tag, program in blocks if tag.strip().lower().startswith("py")]
    untagged = [program for tag, program in blocks if not tag.strip()]
    return textwrap.dedent((pythons or untagged or [program for _, program in blocks] or [answer])[-1])


def _same_value(output: str, wanted: Any) -> bool:
    lines = output.strip().splitlines()
    try:
        said = plain_json.loads(lines[-1]) if lines else None
    except ValueError:
        return False
    wanted = json.loads(json.dumps(wanted))
    return bool(lines) and said == wanted and type(said) is type(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def verifier(
    answer: str, truth: Any, *, url: str = "", prompt: str = "", timeout_s: float = 30.0, max_retries: int = 3, **_: Any
) -> float:
    """Asks a verifier over HTTP: POST of ``{"prompt", "response", "ground_truth"}``, answered with ``{"reward": number}``.

    Raises:
        ValueError: ``url`` is missing or the verifier refuses the question (4xx).
        EndpointError: It could not be reached, or gave no number, after all retries; the episode is then left out.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the reward style 'verifier_service' needs the url of the service, and has {url!r}")
    body = json.dumps({"prompt": prompt, "response": answer, "ground_truth": truth}).encode()
    cause = ""
    for attempt in range(max_retries + 1):
        if attempt:
            time.sleep(min(0.25 * 2**attempt, 8.0))
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                reward = json.loads(reply.read(1 << 20))["reward"]
                if isinstance(reward, (int, float)) and not isinstance(reward, bool) and abs(reward) < float("inf"):
                    return float(reward)
                cause = f"the reward {reward!r:.80}"
        except urllib.error.HTTPError as error:
            if 400 <= error.code < 500 and error.code != 429:
                raise ValueError(f"the verifier {url} refuses: {error.code} {error.reason}") from None
            cause = f"{error.code} {error.reason}"
        except (OSError, HTTPException, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            cause = f"{type(error).__name__}: {error}"
    raise EndpointError(f"the verifier {url} gave {cause}, {max_retries + 1} times")


# An environment's own reward, ``agent_env``, is added by ``envs/task_strings.py``.
STYLES: dict[str, Callable[..., float]] = {
    "rule-openai/gsm8k": gsm8k,
    "rule-lighteval/MATH": math,
    "rule-math_dapo": dapo,
    "code-sandbox": code,
    "verifier_service": verifier,
}


# Which style grades the rows of a data source, by names or patterns: what verl's ``default_compute_score`` does with them.
SOURCES = {
    "openai/gsm8k": "rule-openai/gsm8k",
    "lighteval/MATH": "rule-lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval": "rule-lighteval/MATH",
    "HuggingFaceH4/MATH-500": "rule-lighteval/MATH",
    "numina_*": "rule-lighteval/MATH",
    "math": "rule-math_dapo",
    "math_dapo*": "rule-math_dapo",
    "aime*": "rule-math_dapo",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code-sandbox"),
}


def style_of(source: str, own: Mapping[str, str]) -> str | None:
    """The style that grades a data source; a configuration's ``own`` names and patterns go before ``SOURCES``."""
    return next((style for name, style in (*own.items(), *SOURCES.items()) if fnmatch.fnmatchcase(source, name)), None)


def reward(style: str, answer: str, truth: Any, **settings: Any) -> float:
    """The reward of an answer.

    Args:
        style: One of ``STYLES``.
        answer: The agent's whole text.
        truth: What the row says is right.
        settings: Settings of the style; those of other styles are ignored.

    Raises:
        ValueError: The style is unknown, or what it needs is missing.
    """
    if style not in STYLES:
        raise ValueError(f"reward style: {unknown_key(style, STYLES)}")
    return STYLES[style](answer, truth, **settings)
