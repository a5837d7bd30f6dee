"""``python -m benchmarks.gpu``: the roofline in closed form, what is reported of parts that fail, and its form for a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu, memory, roofline
from benchmarks.gpu import FAILED, MEASURED, NOT_RUN, Outcome, fitting_shape, last_line_of, measure, outcome_of, plain, table
from benchmarks.gpu_parts import PARTS, SPREAD, SYNC_ON_TWO, Task, against_estimate, config_of
from benchmarks.lora import compare
from rllib_nlac import NLACConfig
from rllib_nlac.engine.shapes import shape_of
from rllib_nlac.language.forms import CritiqueForm, FutureForm
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.memory.weights import GIB
from rllib_nlac.types import Generation

parse_future, parse_critique = FutureForm().parse, CritiqueForm().parse

TINY = shape_of(NLACConfig().model_path)  # four layers of width 96, three heads of 32, MLPs of 256, 536 tokens, tied
P = 495_840


class TestRoofline:
    def test_decoding_alone_reads_all_weights_and_its_own_keys_and_values(self):
        assert roofline.decode_bytes(TINY, 2, 1, 0) == 2 * P
        assert roofline.decode_bytes(TINY, 2, 1, 100) - 2 * P == 100 * 2 * 4 * 3 * 32 * 2

    def test_sequences_share_the_weights_and_not_the_cache(self):
        assert roofline.decode_bytes(TINY, 4, 64, 10) == 4 * P / 64 + 10 * 2 * 4 * 3 * 32 * 4

    def test_an_embedding_that_is_not_the_output_layer_is_not_read(self):
        untied = replace(TINY, tied=False, parameters=P + 536 * 96)
        assert roofline.decode_bytes(untied, 2, 1, 0) == 2 * P

    def test_a_share(self):
        assert roofline.share(3e12, 2.0, 6e12) == 0.25 and roofline.share(3e12, 2.0, None) is None

    def test_a_cpu_has_no_peak_whatever_its_name(self):
        assert Task("speed", device="NVIDIA L4").peak is None and Task("speed", device="NVIDIA L4", on_gpu=True).peak


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "small"
    memory.build(folder, "small", context=1024, spread=SPREAD)
    return str(folder)


class TestShapes:
    @pytest.mark.parametrize(
        ("part", "wanted", "gib", "taken"),
        [
            ("iteration", "Qwen2.5-1.5B", 80, "Qwen2.5-1.5B"),
            ("iteration-lora", "Qwen2.5-7B", 80, "Qwen2.5-7B"),
            ("iteration-lora", "Qwen2.5-7B", 40, "Qwen3-4B"),
            ("iteration", "Qwen2.5-1.5B", 40, "Qwen3-0.6B"),
            ("speed", "Qwen2.5-1.5B", 24, "Qwen2.5-1.5B"),
            ("iteration", "Qwen2.5-1.5B", 4, None),
        ],
    )
    def test_the_largest_that_fits_by_the_estimate(self, part, wanted, gib, taken):
        shape, note = fitting_shape(part, wanted, True, gib * GIB, 1000 * GIB)
        assert shape == taken and note.startswith(f"{wanted} does not fit by the estimate (") == (taken != wanted)

    @pytest.mark.parametrize("part", PARTS)
    def test_on_an_h100_all_parts_have_the_shapes_that_they_want(self, part):
        wanted = gpu.wanted_shape(part, True)
        assert fitting_shape(part, wanted, True, 79 * GIB, 128 * GIB) == (wanted, "")

    @pytest.mark.parametrize("on_gpu", [False, True])
    @pytest.mark.parametrize("part", PARTS)
    def test_configurations_are_valid(self, part, on_gpu, model):
        config = config_of(part, model, on_gpu)
        config.validate()
        if part.startswith("sync"):  # on one GPU, or on two
            on_gpus = {"sync": "in_process", "sync-actor": "ipc", SYNC_ON_TWO: "nccl"}[part]
            assert config.transfer == (on_gpus if on_gpu or part == "sync" else "object_store")

    def test_logits_are_spread(self, model):
        lm = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            logits = lm(input_ids=torch.arange(3, 203)[None]).logits
        assert float(logits.std()) == pytest.approx(SPREAD, rel=0.1)
        said = logits.log_softmax(-1)
        assert 0.5 < float(-(said.exp() * said).sum(-1).mean()) < 4  # nats: neither certain nor anything at all

    def test_memory_stands_beside_the_estimate_of_the_same_process(self, model):
        # An engine without a learner has no optimizer, and a learner without an engine no cache.
        tasks = {part: Task(part, folder=model) for part in ("iteration", "learner", "speed")}
        said = {part: against_estimate(task, 0.5)["memory_said_gib"] for part, task in tasks.items()}
        assert max(said["learner"], said["speed"]) < said["iteration"]
        assert against_estimate(tasks["learner"], 0.5)["memory_said_to_measured"] == 2 * said["learner"]


def tasks(*parts: str, shape: str = "small") -> list[Task]:
    return [Task(part, shape) for part in parts]


def report_of(outcomes: dict[str, Outcome]) -> dict:
    return {
        "on_gpu": True,
        "device": {"name": "NVIDIA L4", "memory_bytes": 24 * GIB, "driver": "1.2"},
        "versions": {"torch": "2"},
        "date": "2026-01-01T00:00:00+00:00",
        "commit": None,
        "seconds": 1.0,
        "parts": {part: vars(outcome) for part, outcome in outcomes.items()},
    }


class TestParts:
    def test_others_go_on_after_one_that_fails(self, tmp_path):
        def run(task: Task, limit: float) -> Outcome:
            if task.part == "speed":
                return outcome_of(task.shape, 1, {"error": "OutOfMemoryError: CUDA out of memory"}, "noise", 2.0)
            return outcome_of(task.shape, 0, {"figures": {"gap_largest": 0.25, "mfu": None}}, "noise", 1.0)

        found = measure(tasks("speed", "logprobs"), {}, 100.0, run, tmp_path)
        assert {part: outcome.status for part, outcome in found.items()} == {"speed": FAILED, "logprobs": MEASURED}
        printed = table(report_of(found))
        assert "speed: small, failed (2 s)\n  OutOfMemoryError: CUDA out of memory\n" in printed and "noise" not in printed
        assert "1 measured, 1 failed, 0 not run, of 2 parts" in printed and "no commit known" in printed
        assert "NO GPU" not in printed and "NO GPU" in table({**report_of(found), "on_gpu": False})

    @pytest.mark.parametrize(
        ("code", "answer", "error"),
        [
            (1, {}, "exit code 1: its last words"),
            (0, {}, "exit code 0: its last words"),  # it says that all is well, and has measured nothing
            (1, {"figures": {"mfu": 0.9}}, "exit code 1: its last words"),
            (-9, {}, "ended by SIGKILL; its last line: its last words"),
            (-9, {"figures": {"mfu": 0.9}}, "ended by SIGKILL; its last line: its last words"),
            (None, {}, "did not end within 30 s; its last line: its last words"),
        ],
    )
    def test_nothing_is_measured_where_a_process_did_not_end_well(self, code, answer, error):
        assert outcome_of("small", code, answer, "its last words", 30.0) == Outcome(FAILED, "small", "", 30.0, {}, error)

    def test_a_model_that_cannot_be_built_fails_its_parts_and_is_tried_once(self, tmp_path):
        asked = []

        def run(task: Task, limit: float) -> Outcome:
            asked.append((task.part, task.shape))
            return (
                Outcome(FAILED, task.shape, error="No space left") if task.shape == "large" else Outcome(MEASURED, task.shape)
            )

        wanted = [*tasks("lora", "sync", shape="large"), *tasks("speed")]
        found = measure(wanted, {"lora": "a note"}, 100.0, run, tmp_path)
        assert asked == [("build", "large"), ("build", "small"), ("speed", "small")]
        assert found["lora"] == Outcome(FAILED, "large", "a note", error="its model was not built: No space left")
        assert found["sync"].status == FAILED and found["speed"].status == MEASURED

    def test_a_model_is_there_as_long_as_it_is_needed(self, tmp_path):
        def run(task: Task, limit: float) -> Outcome:
            folders = {folder.name for folder in tmp_path.iterdir()}
            if task.part == "build":
                (tmp_path / task.shape).mkdir()
            else:
                assert task.folder == str(tmp_path / task.shape) and folders == {"small"}
            return Outcome(MEASURED)

        measure(tasks("speed", "sync"), {}, 100.0, run, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_what_has_no_time_or_no_memory_is_not_run(self, tmp_path):
        def run(task: Task, limit: float) -> Outcome:
            raise AssertionError("nothing is run")

        found = measure([*tasks("speed"), Task("lora")], {"lora": "none fits"}, 1.0, run, tmp_path)
        assert found["speed"] == Outcome(NOT_RUN, "small", "no time was left (--minutes)")
        assert found["lora"] == Outcome(NOT_RUN, note="none fits")

    def test_a_part_whose_model_took_all_the_time_is_not_run(self, tmp_path, monkeypatch):
        now = iter([0.0, 0.0, 70.0, 80.0])
        monkeypatch.setattr("benchmarks.gpu.time", SimpleNamespace(monotonic=lambda: next(now)))
        found = measure(tasks("speed"), {}, 80.0, lambda task, limit: Outcome(MEASURED), tmp_path)
        assert found["speed"] == Outcome(NOT_RUN, "small", "no time was left (--minutes)")

    def test_what_json_has_not_is_not_known(self):
        assert plain({"a": {"b": float("nan"), "c": 1.5}, "d": float("inf")}) == {"a": {"b": None, "c": 1.5}, "d": None}

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("program", "limit", "ended"),
        [
            ("print('one'); print('two')", 60, (0, "two")),
            ("raise ValueError('a reason')", 60, (1, "ValueError: a reason")),
            ("import os; print('killed', flush=True); os.kill(os.getpid(), 9)", 60, (-9, "killed")),
            ("import time; print('hangs', flush=True); time.sleep(600)", 2, (None, "hangs")),
        ],
    )
    def test_the_last_line_of_a_process(self, program, limit, ended):
        assert last_line_of([sys.executable, "-c", program], limit) == ended

    @pytest.mark.process
    def test_all_that_a_process_prints_is_kept_where_that_is_asked_for(self, tmp_path):
        log = tmp_path / "part.log"
        assert last_line_of([sys.executable, "-c", "print('one'); print('two')"], 60, log) == (0, "two")
        assert log.read_text() == "one\ntwo\n"


class Greedy:
    """Answers with given tokens, the nth of n times a given log-probability."""

    def __init__(self, answers: list[tuple[int, ...]], logprob: float) -> None:
        self.answers, self.logprob = answers, logprob

    def generate(self, requests):
        return [
            Generation(request.prompt_ids, ids, self.logprob * np.arange(1, len(ids) + 1, dtype=np.float32), True, 1)
            for request, ids in zip(requests, self.answers, strict=True)
        ]


def test_the_answer_that_counts_as_one_that_parses_does_in_every_role():
    """Fails where the parsers ask for more than it says: the benchmark's iteration would train on nothing."""
    assert parse_future(memory.ANSWER) and parse_critique(memory.ANSWER) and parse_action(memory.ANSWER, "plain")


def test_answers_are_compared_up_to_the_first_token_that_differs(monkeypatch):
    monkeypatch.setattr(
        "benchmarks.lora.logprobs_by", lambda model, answers: [np.full(len(a.token_ids), -2.0) for a in answers]
    )
    one, other = Greedy([(1, 2, 3), (4, 5)], -1.0), Greedy([(1, 9, 3), (4, 5)], -1.5)
    found = compare(one, other, None, 2)
    assert (found.same, found.tokens, found.same_tokens, found.gap, found.of_peft) == (1, 5, 1 + 2, 1.0, 1.0)
    assert np.isnan(compare(Greedy([(1,)], -1.0), Greedy([(2,)], -1.0), None, 1).gap)


@pytest.mark.process
@pytest.mark.timeout(1800)
@pytest.mark.long
def test_the_form_for_a_cpu(tmp_path, capsys):
    """The whole command, with real vLLM and DeepSpeed: a figure that none of its parts can make any more fails it."""
    out = tmp_path / "figures.json"
    assert gpu.main(["--minutes", "25", "--out", str(out)]) == 0
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert printed.rstrip().startswith(report["device"]["name"]) and "NO GPU" in printed
    assert f"{len(PARTS) - 1} measured, 0 failed, 1 not run, of {len(PARTS)} parts" in printed
    assert report["parts"][SYNC_ON_TWO]["note"] == "it needs two GPUs, and 0 are here"
    assert not report["on_gpu"] and {"torch", "ray", "rllib_nlac", "python"} <= set(report["versions"]) and report["date"]
    assert set(report["parts"]) == set(PARTS) and not report["parts_not_asked_for"]
    logprobs, learner = (report["parts"][part]["figures"] for part in ("logprobs", "learner"))
    assert logprobs["engine_dtype"] == logprobs["learner_dtype"] == "float32" and logprobs["tokens"] > 16
    # Agreement says something: of equal logits each token would have -log 536 = -6.3, of one that is certain 0.
    assert 0 < logprobs["gap_largest"] < 1e-4 and -4 < logprobs["logprob_mean"] < -0.3
    assert learner["tokens_per_s"] == pytest.approx(learner["tokens"] / learner["step_s"]) and learner["mfu"] is None
    assert 0.5 < learner["memory_said_to_measured"] < 2
    assert learner["packed"] and not learner["by_varlen_kernel"] and learner["alike_padded_mfu"] is None
    for kind in ("", "alike_"):
        ratio = learner[f"{kind}tokens_per_s"] / learner[f"{kind}padded_tokens_per_s"]
        assert learner[f"{kind}packed_to_padded"] == pytest.approx(ratio) and ratio > 0
    assert learner["alike_flops_per_token"] < 0.8 * learner["flops_per_token"]  # what is shared is computed once
    assert f"  {'mfu':32} -\n" in printed
