"""The waves in detail: what was cut off, chains of stored steps, the cache of targets, what is counted."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from scripted_engine import CutOff, ScriptedEngine, last_message
from scripted_roles import SETTINGS, YES, script, transition

from rllib_nlac.engine.chat import Chat
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Ask
from rllib_nlac.types import Generation, Message, Weights


@pytest.fixture()
def make(chat, compact):
    def make(answer, variant=NLAC_AS_IT_IS, **settings):
        engine = ScriptedEngine(chat, answer)
        return engine, LanguageStages(engine, chat, lambda env: compact, replace(SETTINGS, **settings), 0, variant)

    return make


def test_a_cut_off_future_behind_the_next_action_leaves_no_target(make):
    """d' that its limit cut off is no future, though its words parse."""

    def answer(prompt: str, weights: Weights) -> str | None:
        if last_message(prompt) == "Predict." and weights is Weights.TARGET:
            return CutOff("Future: Yes. SUCCESS")
        return script()(prompt, weights)

    _, stages = make(answer)
    (target,), _, _ = stages.run([transition()])
    assert target.generation is None and target.next_future is None and target.next_action == "Can it fly?"


def test_of_k_futures_those_that_were_cut_off_are_left_out(make):
    futures = iter(["Future: a SUCCESS", CutOff("Future: b SUCCESS"), "no label", "Future: d FAILURE"])

    def answer(prompt: str, weights: Weights) -> str | None:
        return next(futures) if last_message(prompt) == "Predict." else script()(prompt, weights)

    _, stages = make(answer, num_futures=4)
    _, (refinement,), _ = stages.run([transition(ended=True)])
    assert [future.text for future in refinement.futures] == ["a SUCCESS", "d FAILURE"]


@pytest.mark.parametrize(
    ("outcomes", "trained"), [("SSFF", True), ("SFFF", False), ("SFF", False), ("SSF", True), ("S", True), ("F", False)]
)
def test_a_yes_is_learned_where_half_of_the_futures_succeed(make, outcomes, trained):
    futures = iter([f"Future: x {'SUCCESS' if outcome == 'S' else 'FAILURE'}" for outcome in outcomes])

    def answer(prompt: str, weights: Weights) -> str | None:
        return next(futures) if last_message(prompt) == "Predict." else script(verdict=YES)(prompt, weights)

    _, stages = make(answer, num_futures=len(outcomes))
    _, (refinement,), _ = stages.run([transition(ended=True)])
    assert (refinement.generation is not None) is trained
    assert refinement.reason == ("yes_success" if trained else "yes_skipped")


@pytest.mark.parametrize("second", [None, "", CutOff("Is it a")])
def test_where_a_later_round_offers_nothing_the_former_action_stands_and_is_verified(make, second):
    turns = iter(["Is it alive?", second])
    judged: list[str] = []

    def answer(prompt: str, weights: Weights) -> str | None:
        if last_message(prompt).startswith("Refine."):
            return next(turns)
        if last_message(prompt).startswith("Evaluate."):
            judged.append(prompt.split("<|assistant|>")[1].split("<|end|>")[0])
        return script()(prompt, weights)

    _, stages = make(answer, num_refinements=2, rejected_weight=0.2)
    _, (refinement,), _ = stages.run([transition(ended=True)])
    assert judged == ["Is it big?", "Is it alive?", "Is it alive?"]
    assert (refinement.action, refinement.reason, refinement.weight) == ("Is it alive?", "rejected", 0.2)


def test_a_chain_rests_on_as_many_stored_steps_as_it_brings_along(make):
    """Two stored steps: two backups, a' asked for behind the second, whose reply no other prompt but its backup's shows."""
    engine, stages = make(script())
    first, second = (replace(transition(i, action=f"a{i}"), observation=f"reply {i}") for i in (1, 2))
    second = replace(second, state=first.next_state)
    stages.run([replace(first, following=(second,))])
    asked = [p for _, ps in engine.calls for p in ps]
    backups = [p for p in asked if last_message(p).startswith("Backup.")]
    assert [last_message(p).split("Reply: ")[1] for p in backups] == ["reply 2", "reply 1"]
    assert backups[1].count("reply") == 1 and "<|assistant|>a1<|end|>" in backups[1] and "a2" not in backups[1]
    (next_action,) = [p for p in asked if last_message(p) == "reply 2"]
    assert next_action.endswith("a2<|end|><|user|>reply 2<|end|><|assistant|>")


@pytest.mark.parametrize("end", [{"ended": True}, {"truncated": True}])
def test_a_chain_that_reaches_the_end_asks_for_nothing_behind_it(make, end):
    engine, stages = make(script())
    chain = replace(transition(1), following=(replace(transition(2, **end), action="last"),))
    (target,), *_ = stages.run([chain])
    asked = [last_message(p) for _, ps in engine.calls for p in ps]
    assert asked.count("Predict.") == 1 and sum(text.startswith("Backup. The end.") for text in asked) == 1
    assert target.next_action is None and target.next_future is None and target.generation is not None


def test_chains_of_different_lengths_keep_their_places(make):
    """Each target is its own chain's: fails where depths are mixed up."""

    def answer(prompt: str, weights: Weights) -> str | None:
        if not last_message(prompt).startswith("Backup."):
            return script()(prompt, weights)
        action = prompt.split("<|assistant|>")[1].split("<|end|>")[0]
        later = last_message(prompt).partition("Next: ")[2].partition(" Reward")[0]
        return f"Future: {action}({later.removesuffix(' FAILURE')}) FAILURE"

    _, stages = make(answer)
    chains = []
    for number in range(4):
        steps = [transition(10 * number + i, action=f"{number}.{i}") for i in range(number + 1)]
        chains.append(replace(steps[0], following=tuple(steps[1:])))
    targets, *_ = stages.run(chains)
    behind = "No. few left."
    assert [t.future.text.removesuffix(" FAILURE") for t in targets] == [
        f"0.0({behind})",
        f"1.0(1.1({behind}))",
        f"2.0(2.1(2.2({behind})))",
        f"3.0(3.1(3.2(3.3({behind}))))",
    ]
    assert [t.transition.id for t in targets] == [0, 10, 20, 30]


def test_a_target_belongs_to_the_draw_that_asked_for_it(make):
    _, stages = make(script())
    item = transition(1)
    stages.run([item])
    other = replace(item, reward=0.5)
    (target,), *_ = stages.run([other])
    assert target.transition is other


def test_waves_are_named_counted_and_timed(make, chat):
    engine, stages = make(script(), num_refinements=2)
    started = time.perf_counter()
    *_, report = stages.run([transition(i) for i in range(3)])
    assert sum(report.seconds.values()) <= time.perf_counter() - started
    waves = [f"wave_{number}" for number in range(1, 7)]
    assert list(report.seconds) == waves and all(seconds > 0 for seconds in report.seconds.values())
    generated = [sum(len(chat.encode(engine.answer(p, w))) for p in ps) for w, ps in engine.calls]
    assert sum(report.tokens.values()) == sum(generated) and report.calls == len(engine.calls)
    assert report.tokens["wave_1"] == generated[0]


def test_the_prompt_of_the_successor_model_is_the_one_it_was_asked_under(make, chat, compact):
    engine, stages = make(script())
    item = transition()
    (target,), *_ = stages.run([item])
    assert target.prompt_ids in [r.prompt_ids for _, r in engine.requests]
    assert target.prompt_ids == chat.prompt_ids(compact.predict_messages(item.state, item.action))


def test_prompts_leave_room_for_their_answers(chat):
    """A prompt that fits alone and not with its answer is dropped and counted."""
    prompt = (Message("user", "Guess my object."),)
    needed = len(chat.prompt_ids(prompt)) + SETTINGS.future.max_tokens

    def stage():
        return (yield Ask("future", [prompt], SETTINGS.future, Weights.POLICY))

    for context, fits in ((needed, True), (needed - 1, False)):
        tight = Chat(chat.tokenizer, context)
        stages = LanguageStages(ScriptedEngine(tight, lambda p, w: "Future: x"), tight, lambda env: None, SETTINGS)
        ((answer,),) = stages.drive(report := StageReport(), stage())
        assert (answer is not None) is fits and report.counts["prompt_too_long"] == (not fits)


def test_of_each_role_the_first_answer_that_did_not_parse_is_shown_and_all_are_counted(make):
    bad = {"future": "no label", "critique": "Optimal: hm", "target": "neither", "refinement": ""}
    report = StageReport()
    for role, text in bad.items():
        whole, cut = (Generation((1,), (2,), np.zeros(1, np.float32), finished, 0) for finished in (True, False))
        last = cut if role == "target" else whole
        report.note(role, [(whole, "fine"), None, (whole, text), (last, "another")], ["parsed", None, None, None], [None] * 4)
    assert report.examples == bad
    assert report.answered == dict.fromkeys(bad, 3) and report.unparsed == dict.fromkeys(bad, 2)
    assert report.cut_off == {**dict.fromkeys(bad, 0), "target": 1}
