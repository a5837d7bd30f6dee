"""The small base model: what its corpus teaches, and whether the shipped weights do what their card says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from rllib_nlac.envs.twenty_questions import candidates_after
from rllib_nlac.language.parsing import parse_critique, parse_future
from rllib_nlac.tiny.build import make_corpus
from rllib_nlac.tiny.card import HELD_OUT_SEED, Player, measure_roles
from rllib_nlac.tiny.twenty_questions import TwentyQuestionsCorpus


@pytest.fixture(scope="module")
def examples() -> dict[str, list]:
    corpus = make_corpus(11)
    by_role: dict[str, list] = {role: [] for role in TwentyQuestionsCorpus.ROLES}
    for example in itertools.islice(corpus, 8000):
        by_role[example.role].append(example)
    return by_role


def dialogue(prompt) -> list[tuple[str, str]]:
    turns = [message.content for message in prompt]
    return [(turns[i], turns[i + 1]) for i in range(1, len(turns) - 1, 2) if prompt[i].role == "assistant"]


def test_no_policy_example_is_better_than_chance(examples):
    """The share of greedy moves among the policy's examples is that of uniformly random moves: 1/16 to 1/32."""
    table = make_corpus(0).table
    played = examples["policy"]
    greedy = 0
    for example in played:
        so_far = [(a.content, o.content) for a, o in zip(example.prompt[1::2], example.prompt[2::2], strict=True)]
        best = table.say(table.best(candidates_after(table, so_far), 6 - len(so_far)))
        greedy += example.answer == best
    # A move is a question (one of 8) or a guess (one of 16), each with probability 1/2.
    assert 1 / 32 * 0.5 < greedy / len(played) < 1 / 16 * 1.5 and len({example.answer for example in played}) == 24


def test_critiques_and_futures_of_the_corpus_parse(examples):
    assert all(parse_critique(example.answer) for example in examples["evaluate"])
    assert all(parse_future(example.answer) for role in ("predict", "backup") for example in examples[role])


def test_a_backup_repeats_the_real_reply_and_keeps_the_next_futures_outcome(examples):
    for example in examples["backup"]:
        shown, answer = example.prompt[-1].content, example.answer
        reply = re.search(r"Reply: (.*)", shown)[1]
        if "The end." in shown:
            assert answer.endswith("SUCCESS") is (reply == "Correct!")
            continue
        first = answer.removeprefix("Future: ").split(".")[0]
        assert first == ("Unknown" if reply.startswith("I do not") else reply.split(".")[0])
        next_future = re.search(r"Next: (.*) Reward:", shown)[1]
        assert answer.rsplit(" ", 1)[1] == next_future.rsplit(" ", 1)[1]
        later = answer.split(", then ")[1].split(".")[0]
        assert later == ("correct" if next_future.startswith("Correct") else next_future.split(". ")[1].split(",")[0])


def test_verdicts_follow_the_futures_where_the_move_has_no_flaw(examples):
    for example in examples["evaluate"]:
        futures = example.prompt[-1].content.splitlines()[1:]
        critique = parse_critique(example.answer)
        hopeful = 2 * sum(future.endswith("SUCCESS") for future in futures) >= len(futures)
        if critique.optimal:
            assert hopeful
        elif critique.reason == "it leads to failure.":
            assert not hopeful


def test_a_refinement_is_the_fix_of_its_critique(examples):
    for example in examples["refine"]:
        critique = parse_critique(example.prompt[-1].content.removeprefix("Refine.\n"))
        assert example.answer == (critique.fix or example.prompt[-2].content)


def test_words_of_the_world_are_single_tokens(chat):
    for word in (" dog", " alive", " left", " SUCCESS", "Optimal", "Future", " few"):
        assert len(chat.tokenizer.encode(word, add_special_tokens=False)) == 1, word


def test_the_shipped_model_fits_its_card(engine, chat, model_path):
    player = Player(engine, chat, HELD_OUT_SEED)
    figures = measure_roles(player, examples=1500)
    assert figures["backup: exact"] >= 0.9 and figures["refine: exact"] >= 0.9
    assert min(value for name, value in figures.items() if name.endswith("parses")) >= 0.95
    assert player.play(256, player.act) <= 0.25
    assert player.play(256, player.suggest) >= 0.88  # 0.9 of 512 games on the card
    assert (Path(model_path) / "MODEL_CARD.md").is_file()
