"""Hostile rows of task files and dialogues, and hostile answers, each with what its error says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS, PROBLEMS, DIALOGUES = "tasks", "problems", "dialogues"
GOOD = {
    TASKS: {"prompt": "6 * 7?", "reward_model": {"style": "rule-openai/gsm8k", "ground_truth": "42"}},
    PROBLEMS: {"problem": "6 * 7?", "answer": "42"},
    DIALOGUES: {"messages": [{"role": "assistant", "content": "hello"}], "reward": 1.0},
}
ENDPOINT = {"kind": "endpoint", "base_url": "http://127.0.0.1:9/", "model": "m", "api_key_env": "ATTACK_SECRET"}
DEEP = 100_000


@dataclass(frozen=True)
class HostileRow:
    """A file whose first row is good and whose second one is not.

    Attributes:
        name: What it tries.
        says: A part of the error, beside the file and the line.
        row: The second line, as bytes, or what JSON makes of this.
        kind: Who reads it.
        write: Writes the whole file instead, which is then of parquet; the error names the file, and rows where it can.
    """

    name: str
    says: str
    row: Any = None
    kind: str = TASKS
    write: Callable[[Path], None] | None = None

    def file(self, folder: Path) -> Path:
        """Writes the file."""
        if self.write is not None:
            path = folder / "hostile.parquet"
            self.write(path)
            return path
        path = folder / "hostile.jsonl"
        second = self.row if isinstance(self.row, bytes) else json.dumps(self.row).encode()
        path.write_bytes(json.dumps(GOOD[self.kind]).encode() + b"\n" + second + b"\n")
        return path


def _env(name: str, says: str, prefix: str, **arguments: Any) -> HostileRow:
    return HostileRow(name, says, {"env_str": f"{prefix}@{json.dumps(arguments)}"})


def _reward(name: str, says: str, style: str, truth: Any, **settings: Any) -> HostileRow:
    return HostileRow(name, says, {"prompt": "x", "reward_model": {"style": style, "ground_truth": truth, **settings}})


NOT_SET, NOT_CHOSEN = "a row may not set", "rows may not choose"

NAMES = (
    _env("a secret to an oracle of one's own", f"{NOT_SET} 'oracle'", "TwentyQuestions", oracle=ENDPOINT),
    _env("a secret to a customer of one's own", f"{NOT_SET} 'user'", "ServiceDesk", user=ENDPOINT),
    _env("a secret to an opponent of one's own", f"{NOT_SET} 'opponents'", "TextArena", num_players=2, opponents=ENDPOINT),
    _env(
        "a function as opponent",
        f"{NOT_SET} 'opponents'",
        "TextArena",
        num_players=2,
        opponents={"kind": "function", "function": "os:system"},
    ),
    _env("arguments of a game", f"{NOT_SET} 'game_config'", "TextArena", game_config={"path": "/etc/passwd"}),
    _env("a game by a path", "'game': '../../etc/passwd' does not match", "TextArena", game="../../etc/passwd"),
    _env("a table from any file", f"{NOT_SET} 'table'", "TwentyQuestions", table="/etc/passwd"),
    _env("words from any file", "'words': '/etc/passwd' is not of type 'array'", "TwentyQuestions", words="/etc/passwd"),
    _env("problems from any file", f"{NOT_SET} 'files'", "MathReasoning", files="/etc/*.jsonl"),
    _env("held-out ids from any file", f"{NOT_SET} 'held_out'", "MathReasoning", held_out="/etc/passwd"),
    _env("an environment by its module", "unknown key 'os:system'", "os:system"),
    _env("a module that is imported by its name", "unknown key 'antigravity:x'", "antigravity:x"),
    _env("a gymnasium id that imports", f"{NOT_CHOSEN} GymnasiumText", "GymnasiumText", id="antigravity:Any-v0"),
    _env("a command", f"{NOT_CHOSEN} Harness", "Harness", command=["sh", "-c", "touch pwned"]),
    _env("a task set within a task set", f"{NOT_CHOSEN} TaskSet", "TaskSet", train_files="hostile.jsonl"),
    _env("a task set that trusts itself", f"{NOT_CHOSEN} TaskSet", "TaskSet", train_files="hostile.jsonl", trusted=True),
    _env("a user simulator that is paid for", f"{NOT_CHOSEN} TauBench", "TauBench", user_model="gpt-4o"),
    _env("an API base of one's own", f"{NOT_CHOSEN} Tau2Bench", "Tau2Bench", user_llm_args={"api_base": "http://127.0.0.1:9"}),
    _env("the environment of logged dialogues", f"{NOT_CHOSEN} LoggedDialogues", "LoggedDialogues"),
    _reward("a verifier of one's own", f"{NOT_SET} 'url'", "verifier_service", "1", url="http://127.0.0.1:9/"),
    _reward("a verifier by a file", f"{NOT_SET} 'url'", "verifier_service", "1", url="file:///etc/passwd"),
    _reward("a verifier that nobody configured", "unknown key 'mine'", "verifier_service", "1", verifier="mine"),
    _reward("retries for ever", f"{NOT_SET} 'max_retries'", "verifier_service", "1", max_retries=10**9),
    _reward(
        "limits of the sandbox",
        f"{NOT_SET} 'limits'",
        "code-sandbox",
        {"inputs": ["1"], "outputs": ["1"]},
        limits={"seconds": 10**9},
    ),
    _reward("trust", f"{NOT_SET} 'trusted'", "rule-openai/gsm8k", "42", trusted=True),
    _reward("an environment as truth", "needs the environment's string", "agent_env", "GymnasiumText@{}"),
    _reward("a style by its module", "unknown key 'os:system'", "os:system", "1"),
    _reward("a style that is a list", "unknown key", ["code-sandbox"], "1"),
)

SIZES = (
    _env("a house 100,000 locks deep", "'depth': 100000 is greater than the maximum of 4", "TextHouse", depth=DEEP),
    _env("a house that is true", "'house': True is not of type", "TextHouse", house=True),
    _env("a billion turns", "'max_turns': 1000000000 is greater", "TwentyQuestions", max_turns=10**9),
    _env("turns in a text", "'max_turns': '6' is not of type 'integer'", "TwentyQuestions", max_turns="6"),
    _env("half an object", "'num_objects': 1.5 is not of type 'integer'", "TwentyQuestions", num_objects=1.5),
    _env("a million words", "'words': ", "TwentyQuestions", words=["a"] * 100_000),
    _env("words that are lists", "'words': ['a'] is not of type 'string'", "TwentyQuestions", words=[["a"]]),
    _env("a negative seed", "'seed': -1 is less than the minimum", "TwentyQuestions", seed=-1),
    _env("a seed of a thousand digits", "'seed': ", "TwentyQuestions", seed=10**1000),
    _env("a task of a megabyte", "'task_id': ", "TwentyQuestions", task_id="x" * 900_000),
    _env("a level that does not exist", "'level': ", "MathReasoning", level=99),
    _env("a key of a megabyte", "unknown key 'xxx", "TwentyQuestions", **{"x" * 900_000: 1}),
    HostileRow("a prefix of a megabyte", "unknown key 'xxx", {"env_str": "x" * 900_000 + "@{}"}),
    HostileRow("a string of an environment of two megabytes", "'env_str' has 2000000 characters", {"env_str": "x" * 2 * 10**6}),
    HostileRow("arguments 100,000 objects deep", "deeper than 64", {"env_str": "TwentyQuestions@" + '{"a":' * DEEP}),
    HostileRow(
        "arguments 65 lists deep", "deeper than 64", {"env_str": 'TwentyQuestions@{"words": ' + "[" * 65 + "]" * 65 + "}"}
    ),
    HostileRow(
        "an argument twice",
        "the key 'max_turns' stands there twice",
        {"env_str": 'TwentyQuestions@{"max_turns": 6, "max_turns": 7}'},
    ),
    HostileRow("an argument that is NaN", "NaN is no number", {"env_str": 'TextHouse@{"bonus": NaN}'}),
    HostileRow("a prompt of two megabytes", "'prompt' has 2000000 characters", {**GOOD[TASKS], "prompt": "x" * 2 * 10**6}),
    HostileRow(
        "a message that is no text", "'content' must be a text", {**GOOD[TASKS], "prompt": [{"role": "user", "content": {}}]}
    ),
    HostileRow(
        "a style of a megabyte",
        "unknown data_source 'xxx",
        {"prompt": "x", "data_source": "x" * 10**6, "reward_model": {"style": "rule", "ground_truth": "1"}},
    ),
)

LINES = (
    HostileRow("60 MB in one line", "longer than 8 MiB", b'{"prompt": "' + b"x" * (60 << 20) + b'"}'),
    HostileRow("60 MB of nothing", "longer than 8 MiB", b" " * (60 << 20)),
    HostileRow("60 MB of zeros", "longer than 8 MiB", bytes(60 << 20)),
    HostileRow("lists 100,000 deep", "deeper than 64", b"[" * DEEP),
    HostileRow("lists 100,000 deep, and closed", "deeper than 64", b"[" * DEEP + b"]" * DEEP),
    HostileRow("objects 100,000 deep", "deeper than 64", b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    HostileRow("lists 800 deep, which Python can read", "deeper than 64", b'{"a": ' + b"[" * 800 + b"]" * 800 + b"}"),
    HostileRow("a key twice", "the key 'prompt' stands there twice", b'{"prompt": "a", "prompt": "b"}'),
    HostileRow(
        "a key twice, further in",
        "the key 'style' stands there twice",
        b'{"prompt": "a", "reward_model": {"style": "rule-openai/gsm8k", "style": "code-sandbox"}}',
    ),
    HostileRow("NaN", "NaN is no number", b'{"prompt": "a", "x": NaN}'),
    HostileRow("infinity", "-Infinity is no number", b'{"prompt": "a", "x": -Infinity}'),
    HostileRow("a number out of range", "the number 1e999999999 is out of range", b'{"prompt": "a", "x": 1e999999999}'),
    HostileRow("a number of 100,000 digits", "a number of 100000 digits", b'{"prompt": "a", "x": ' + b"9" * 100_000 + b"}"),
    HostileRow("Latin-1", "not UTF-8", '{"prompt": "é"}'.encode("latin-1")),
    HostileRow("UTF-16", "not UTF-8", '{"prompt": "é"}'.encode("utf-16")),
    HostileRow("UTF-16 without a mark", "not valid JSON", '{"prompt": "a"}'.encode("utf-16-le")),
    HostileRow("surrogates as bytes", "not UTF-8", b'{"prompt": "\xed\xa0\x80"}'),
    HostileRow("NUL", "not valid JSON", b'{"prompt": "a\x00"}'),
    HostileRow("half an object", "not valid JSON", b'{"prompt": "a"'),
    HostileRow("two objects", "not valid JSON", b'{"prompt": "a"} {}'),
    HostileRow("a list", "a row must be a JSON object, and it is a list", b"[]"),
    HostileRow("a number", "a row must be a JSON object, and it is a int", b"1"),
    HostileRow("code", "not valid JSON", b'__import__("os").system("true")'),
)

TRUTHS = (
    _reward("a division by zero as truth", "ground_truth must be a number", "rule-openai/gsm8k", "1/0"),
    _reward("a tower of powers as truth", "ground_truth must be a number", "rule-openai/gsm8k", "9**9**9**9"),
    _reward("a float as large as none as truth", "ground_truth must be a number", "rule-openai/gsm8k", "#### 1e999999999"),
    _reward("a million digits as truth", "an answer of 1 to 2000 characters", "rule-openai/gsm8k", "9" * 10**6),
    _reward("500 digits as truth", "ground_truth must be a number", "rule-openai/gsm8k", "9" * 500),
    _reward("100,000 brackets as truth", "an answer of 1 to 2000", "rule-lighteval/MATH", "(" * DEEP),
    _reward("a list as truth", "ground_truth must be a text or a number", "rule-lighteval/MATH", ["1"]),
    _reward("nothing as truth", "an answer of 1 to 2000", "rule-lighteval/MATH", " "),
    _reward(
        "yes as a setting that is a number",
        "'math_verify': 1 is not of type 'boolean'",
        "rule-lighteval/MATH",
        "1",
        math_verify=1,
    ),
    _reward("tests that are no tests", "tests must be", "code-sandbox", "[]"),
    _reward("tests 100,000 deep", "deeper than 64", "code-sandbox", "[" * DEEP),
    _reward("tests without an end", "not valid JSON", "code-sandbox", '{"inputs": ['),
    _reward("fewer answers than tests", "of the same length", "code-sandbox", {"inputs": ["1", "2"], "outputs": ["1"]}),
    _reward(
        "code as a function's name",
        "fn_name must be the name of a function",
        "code-sandbox",
        {"fn_name": "f); import os; (f", "inputs": [[1]], "outputs": [1]},
    ),
    _reward(
        "arguments that are no list",
        "each of inputs must be a list",
        "code-sandbox",
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
    ),
)

OTHERS = (
    HostileRow("a level of a million digits", "level must be a number", {**GOOD[PROBLEMS], "level": "9" * 10**6}, PROBLEMS),
    HostileRow("an id that is a list", "'id' must be a number or a short text", {**GOOD[PROBLEMS], "id": [1]}, PROBLEMS),
    HostileRow(
        "an id of a megabyte", "'id' must be a number or a short text", {**GOOD[PROBLEMS], "id": "../" * 10**5}, PROBLEMS
    ),
    HostileRow(
        "an answer of a megabyte",
        "the answer has 900000 characters",
        {"problem": "x", "answer": "#### " + "9" * 900_000},
        PROBLEMS,
    ),
    HostileRow("a reward that is NaN", "NaN is no number", b'{"messages": [], "reward": NaN}', DIALOGUES),
    HostileRow("a reward of 400 digits", "a reward must be a finite number", {**GOOD[DIALOGUES], "reward": 10**400}, DIALOGUES),
    HostileRow("a reward that is yes", "a reward must be a finite number", {**GOOD[DIALOGUES], "reward": True}, DIALOGUES),
    HostileRow("a success that is a text", "'success' must be true or false", {**GOOD[DIALOGUES], "success": "no"}, DIALOGUES),
    HostileRow("a success that is a list", "'success' must be true or false", {**GOOD[DIALOGUES], "success": [1]}, DIALOGUES),
    HostileRow(
        "a role of one's own",
        "message 0 must have a role",
        {"messages": [{"role": "critic", "content": "x"}], "reward": 1},
        DIALOGUES,
    ),
    HostileRow(
        "a content that is an object",
        "message 0 must have a content",
        {"messages": [{"role": "user", "content": {"text": "x"}}], "reward": 1},
        DIALOGUES,
    ),
    HostileRow("messages in a text", "'messages' must be a list", {"messages": "hello", "reward": 1}, DIALOGUES),
    HostileRow(
        "a task that is an object",
        "'task_id' must be a number or a short text",
        {**GOOD[DIALOGUES], "task_id": {"a": 1}},
        DIALOGUES,
    ),
    HostileRow(
        "a task by a path of a megabyte",
        "'task_id' must be a number or a short text",
        {**GOOD[DIALOGUES], "task_id": "../" * 10**5},
        DIALOGUES,
    ),
    HostileRow(
        "a message of two megabytes",
        "message 0 has 2000000 characters",
        {"messages": [{"role": "assistant", "content": "x" * 2 * 10**6}], "reward": 1},
        DIALOGUES,
    ),
)


def _table(columns: dict[str, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")

    return write


def _many(path: Path) -> None:
    import pyarrow

    _table({"prompt": pyarrow.ListArray.from_arrays([0, 1 << 25], pyarrow.nulls(1 << 25, pyarrow.int8()))})(path)


def _invalid_text(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.StringArray.from_buffers(1, buffers[1], buffers[2])}), path)


def _cut(path: Path) -> None:
    _table({"prompt": ["a" * 10_000] * 50})(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[-200:])


def _noise(path: Path) -> None:
    path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def _shared(path: Path, nested: bool) -> None:
    """One text of 20 MB, in the dictionary that a thousand rows share."""
    import pyarrow
    import pyarrow.parquet

    rows = 1000
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["y" * (20 << 20)])
    if nested:
        messages = pyarrow.StructArray.from_arrays([texts], ["content"])
        texts = pyarrow.ListArray.from_arrays(pyarrow.array([0, rows], pyarrow.int32()), messages)
    table = pyarrow.table({"prompt": texts})
    pyarrow.parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, data_page_size=1 << 30)


PARQUET = (
    HostileRow(
        "a text of 20 MB in a thousand rows of a small file",
        "more than 8 MiB a row",
        write=lambda path: _shared(path, nested=False),
    ),
    HostileRow("the same a thousand times in one row", "more than 8 MiB a row", write=lambda path: _shared(path, nested=True)),
    HostileRow("33 million values in one row", "has 33554432 values in a row group", write=_many),
    HostileRow("other columns", "row 1: no reward style", write=_table({"text": ["a"]})),
    HostileRow(
        "a prompt of numbers",
        "row 1: 'prompt' must be a text",
        write=_table({"prompt": [1], "reward_model": [{"style": "rule-openai/gsm8k", "ground_truth": "1"}]}),
    ),
    HostileRow("a reward model that is a text", "row 1: reward_model must be a dict", write=_table({"reward_model": ["{}"]})),
    HostileRow(
        "an oracle",
        'row 1: \'TwentyQuestions@{"oracle"',
        write=_table({"env_str": [f"TwentyQuestions@{json.dumps({'oracle': ENDPOINT})}"]}),
    ),
    HostileRow("text that is no UTF-8", "not a parquet file that can be read", write=_invalid_text),
    HostileRow("no parquet", "not a parquet file", write=_noise),
    HostileRow("half a file", "not a parquet file", write=_cut),
    HostileRow("a file of 3 GiB", "3.0 GiB, and rows of at most 2 GiB", write=_sparse),
    HostileRow("an empty file", "not a parquet file", write=lambda path: path.touch()),
)

ROWS = (*NAMES, *SIZES, *LINES, *TRUTHS, *OTHERS, *PARQUET)
