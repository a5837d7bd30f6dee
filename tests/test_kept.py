"""A greedy answer that the same waves have is not asked again, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, last_message
from scripted_roles import SETTINGS, transition

from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import Ask
from rllib_nlac.types import Message, Weights

GREEDY = replace(SETTINGS, **dict.fromkeys(("backup", "critique", "refine"), Sampling(24, 0.0)), judge_weights=Weights.INITIAL)


class Forgetful(dict):
    """What nothing is ever found in."""

    def __contains__(self, key: object) -> bool:
        return False


def speaks(prompt: str, weights: Weights) -> str:
    """Two worlds apart: each prompt has an answer of its own, and other weights say something else."""
    kind, number = last_message(prompt), sum(map(ord, prompt)) % 3
    if kind == "Predict.":
        return f"Future: {weights} {number}. FAILURE"
    if kind.startswith("Backup."):
        return f"Future: {weights} backs {number}. FAILURE"
    if kind.startswith("Evaluate."):
        return f"Optimal: No\nReason: {weights} {number}.\nFix: {number}"
    return f"Is it {weights} {number}?"


def texts(found) -> list:
    targets, refinements, _ = found
    return [t.future.text if t.future else None for t in targets], [(r.action, r.reason) for r in refinements]


def asked_of(engine) -> Counter:
    seen = [request for _, request in engine.requests]
    return Counter((r.prompt_ids, r.max_tokens, r.temperature, r.seed if r.temperature else None, r.weights) for r in seen)


def forgets(stages: LanguageStages, patch) -> LanguageStages:
    """The same without what it keeps."""
    right = stages._wave
    patch.setattr(stages, "_wave", lambda report, asks, known, seeds: right(report, asks, Forgetful(), seeds))
    return stages


@pytest.fixture(scope="module")
def both(chat, compact):
    """Runs stages twice, with what they keep and without; the texts and the engine of each."""

    def run(items, settings):
        found = []
        for keeps in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                engine = ScriptedEngine(chat, speaks)
                stages = LanguageStages(engine, chat, lambda env: compact, settings, seed=3)
                if not keeps:
                    forgets(stages, patch)
                found.append((stages.run(items), engine))
        return found

    return run


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8),
    st.fixed_dictionaries(
        {
            "num_refinements": st.integers(0, 2),
            "num_next_actions": st.integers(1, 2),
            "rejected_weight": st.sampled_from([1.0, 0.5]),
            "judge_weights": st.sampled_from(list(Weights)),
            "critic_input": st.sampled_from(["predicted", "backed_up"]),
        }
    ),
)
def test_texts_and_all_that_is_sampled_are_as_without_it(both, states, changes):
    items = [transition(i, ended, action=f"Is it {action}?") for i, (action, ended) in enumerate(states)]
    (kept, engine), (plain, reference) = both(items, replace(GREEDY, **changes))
    assert texts(kept) == texts(plain)
    asked, all_asked = asked_of(engine), asked_of(reference)
    sampled = {key: count for key, count in all_asked.items() if key[2]}
    assert {key: count for key, count in asked.items() if key[2]} == sampled  # with the same seeds
    once = Counter((ids, limit, weights) for ids, limit, temperature, _, weights in asked.elements() if not temperature)
    assert all(count == 1 for count in once.values())
    assert once.keys() == {(ids, limit, weights) for ids, limit, temperature, _, weights in all_asked if not temperature}
    # The costs are those of what was asked, and the rest is said.
    mine, others = kept[2], plain[2]
    assert mine.kept_answers == all_asked.total() - asked.total() and not others.kept_answers
    assert sum(mine.tokens.values()) + mine.kept_tokens == sum(others.tokens.values())
    assert (mine.answered, mine.unparsed, mine.counts) == (others.answered, others.unparsed, others.counts)


def test_other_weights_other_limits_and_other_waves_of_other_batches_are_asked(chat):
    prompt = (Message("user", "Guess my object."),)
    engine = ScriptedEngine(chat, speaks)
    stages = LanguageStages(engine, chat, lambda env: None, GREEDY)

    def stage(sampling, weights):
        first = yield Ask("critique", [prompt, prompt], sampling, weights)
        second = yield Ask("critique", [prompt], sampling, weights)
        return [text for _, text in (*first, *second)]

    greedy, longer, hot = Sampling(24, 0.0), Sampling(25, 0.0), Sampling(24, 0.5)
    three = [(greedy, Weights.INITIAL), (greedy, Weights.TARGET), (longer, Weights.INITIAL)]
    first, second, _ = stages.drive(StageReport(), *(stage(*each) for each in three))
    assert len(set(first)) == len(set(second)) == 1 and first != second and len(engine.requests) == 3
    stages.drive(StageReport(), stage(hot, Weights.INITIAL))
    assert len(engine.requests) == 6  # what is sampled is asked each time
    stages.drive(StageReport(), stage(greedy, Weights.INITIAL))
    assert len(engine.requests) == 7  # weights may have changed between two batches


def test_a_real_engine_says_the_same(engine, base_weights, chat, compact, config, monkeypatch):
    """Greedy answers of a batch whose prompts repeat, beside others or not: the same texts."""
    for weights in (Weights.TARGET, Weights.INITIAL):
        engine.set_weights(weights, 0, base_weights)
    settings = config.training(judge_weights="initial").stage_settings
    items = [transition(i, ended=i % 3 == 0, action=f"Is it {word}?") for i, word in enumerate(["big", "alive", "red"] * 16)]
    stages = LanguageStages(engine, chat, lambda env: compact, settings, seed=1)
    kept = stages.run(items)
    plain = forgets(LanguageStages(engine, chat, lambda env: compact, settings, seed=1), monkeypatch).run(items)
    assert texts(kept) == texts(plain) and kept[2].kept_answers > 10
    assert sum(kept[2].tokens.values()) + kept[2].kept_tokens == sum(plain[2].tokens.values())
