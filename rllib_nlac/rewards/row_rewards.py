"""What a row of a task file may say about its reward: plain settings of its style, and a truth that the style can grade."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema

from rllib_nlac.inputs import plain_json
from rllib_nlac.names import unknown_key
from rllib_nlac.rewards.grading import MAX_ANSWER, after_hashes, as_number, boxed

_BOOLEAN = {"type": "boolean"}
# The address of a verifier stands in the run's configuration; a row names one that stands there.
SETTINGS: dict[str, dict[str, Any]] = {
    "rule-openai/gsm8k": {},
    "rule-lighteval/MATH": {"math_verify": _BOOLEAN},
    "rule-math_dapo": {"math_verify": _BOOLEAN},
    "code-sandbox": {},
    "verifier_service": {"verifier": {"type": "string"}},
}


def check_settings(style: str, settings: Mapping[str, Any], verifiers: Mapping[str, Any]) -> None:
    """Checks what stands in a row's ``reward_model`` beside style and truth.

    Raises:
        ValueError: A key is not one that a row may set, its value is of the wrong kind, or no verifier has that name.
    """
    check_values(settings, SETTINGS[style], f"reward_model of {style}", "env_config.reward_config")
    name = settings.get("verifier")
    if name is not None and name not in verifiers:
        raise ValueError(f"reward_model.verifier: env_config.reward_config.verifiers: {unknown_key(name, verifiers)}")


def check_values(values: Mapping[str, Any], schema: Mapping[str, Any], what: str, instead: str) -> None:
    """Checks values of a row, each against its JSON schema.

    Args:
        values: By their keys.
        schema: JSON schema of the keys that a row may set.
        what: Whose keys they are, for the error.
        instead: Where the run's configuration may set the others.

    Raises:
        ValueError: A key is not in the schema, or a value does not fit it.
    """
    for key, value in values.items():
        if key not in schema:
            may = ", ".join(sorted(schema)) or "nothing"
            raise ValueError(
                f"{what}: a row may not set {key!r:.80}; it may set {may}. Set it under {instead}, or env_config.trusted: true "
                "where the files are your own"
            )
        # Draft 4, where 1.0 is no integer.
        for error in jsonschema.Draft4Validator(schema[key]).iter_errors(value):
            raise ValueError(f"{what}: {key!r}: {error.message:.200}")


def check_truth(style: str, truth: Any) -> None:
    """Whether a style can grade by this truth.

    Raises:
        ValueError: It cannot: it is of the wrong kind, too long, or what it says is no answer.
    """
    _CHECKS[style](truth)


def parse_tests(truth: Any) -> Mapping[str, Any]:
    """The tests of a program, which may be JSON text.

    Raises:
        ValueError: They are malformed.
    """
    tests = plain_json.loads(truth) if isinstance(truth, str) else truth
    given, wanted = (tests.get("inputs"), tests.get("outputs")) if isinstance(tests, Mapping) else (None, None)
    lists = isinstance(given, (list, tuple)) and isinstance(wanted, (list, tuple)) and len(given) == len(wanted)
    if not lists or not given:
        raise ValueError(f"tests must be {{'inputs': [...], 'outputs': [...]}} of the same length, and are {truth!s:.80}")
    name = tests.get("fn_name")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"fn_name must be the name of a function, and it is {name!r:.80}")
    if name is not None and not all(isinstance(arguments, (list, tuple)) for arguments in given):
        raise ValueError(f"each of inputs must be a list, the arguments of {name!r:.80}")
    if name is None:
        tests = {**tests, **{key: [_text_of(each, key) for each in tests[key]] for key in ("inputs", "outputs")}}
    return tests


def _text_of(value: Any, key: str) -> str:
    """What a program reads or prints: a text or a number, or a list of them, one a line."""
    lines = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(line, (str, int, float)) for line in lines):
        raise ValueError(f"each of {key} must be a text or a list of lines, and one is {value!r:.80}; fn_name allows any value")
    return "\n".join(map(str, lines))


def _check_number(truth: Any) -> None:
    answer = _short_text(truth, after_hashes)
    if as_number(answer) is None:
        raise ValueError(f"ground_truth must be a number, or end in '#### ' and one, and it is {answer!r:.80}")


def _check_answer(truth: Any) -> None:
    _short_text(truth, boxed)


def _short_text(truth: Any, read: Callable[[str], str | None]) -> str:
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        raise ValueError(f"ground_truth must be a text or a number, and it is {truth!r:.80}")
    answer = read(str(truth)) or str(truth)
    if not answer.strip() or len(answer) > MAX_ANSWER:
        raise ValueError(f"ground_truth must be an answer of 1 to {MAX_ANSWER} characters, and has {len(answer)}")
    return answer


_CHECKS: dict[str, Callable[[Any], object]] = {
    "rule-openai/gsm8k": _check_number,
    "rule-lighteval/MATH": _check_answer,
    "rule-math_dapo": _check_answer,
    "code-sandbox": parse_tests,
    "verifier_service": lambda truth: None,
}
