"""ERL: who reflects on what, what a second attempt sees, what is recorded of it, and what is internalised."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from micro import played
from scripted_engine import CutOff, ScriptedEngine, last_message

from rllib_nlac.baselines.erl import ERL, ERLConfig, baselines
from rllib_nlac.diagnostics.notices import Notices
from rllib_nlac.engine.chat import Prompt, PromptTooLong
from rllib_nlac.envs.twenty_questions import load_table
from rllib_nlac.episode import episode_success, generation_at, generations_of, messages_at, task_seed_of
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.learner.batch import POLICY
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import Message

WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 3}
NAMES = load_table(None, 16, 8).objects
NOTE = "Ask whether it is a dog."


def config_of(**settings) -> ERLConfig:
    config = ERLConfig().environment("TwentyQuestions", env_config=dict(WORLD)).debugging(seed=0)
    config.language(language_model="tiny").training(episodes_per_task=2, minibatch_size=500, **settings)
    config.num_envs_per_env_runner = 4
    return config


def answer(prompt: str, weights) -> str:
    """Loses, unless a note is in view; and reflects."""
    told = last_message(prompt)
    if told.startswith("Evaluate."):
        return NOTE
    return "dog cat frog" if NOTE not in told else "Is it a duck?" if "Guess my object." in told else "Is it alive?"


@pytest.fixture()
def algorithm(chat):
    """ERL on a scripted model: real environment, runner, prompts and tokens; no learner."""

    def make(answer=answer, **settings) -> ERL:
        config = config_of(**settings)
        runner = TextEnvRunner(config=config, worker_index=0)
        engine = ScriptedEngine(chat, answer)
        runner.attach(engine)
        a = ERL.__new__(ERL)
        a.config, a.chat, a.engine, a.rng = config, chat, engine, np.random.default_rng(0)
        a.logged = {}
        a.metrics = SimpleNamespace(
            log_value=lambda name, value, **_: a.logged.__setitem__(name, value), aggregate=lambda *_, **__: None
        )
        a.env_runner_group = SimpleNamespace(local_env_runner=runner, num_remote_env_runners=lambda: 0)
        a.prompts_for = functools.cache(config.prompts_for)
        a.notices, a._iteration = Notices(), 4
        a.first = runner.sample(num_episodes=4)
        engine.requests.clear()
        return a

    return make


def texts(a) -> list[str]:
    return [a.engine.text(request) for _, request in a.engine.requests]


def test_the_model_reflects_on_its_whole_attempt_with_the_replies_and_the_outcome(algorithm):
    """Fails where the outcome is not told, or where only a part of the attempt is in view."""
    a = algorithm()
    notes = a.reflect(a.first[:2])
    assert [(e.id_, note) for e, note in notes] == [(e.id_, NOTE) for e in a.first[:2]]
    for prompt, episode in zip(texts(a), a.first, strict=False):
        reply = episode.get_observations(-1)
        assert last_message(prompt) == f"Evaluate.\n1. {reply} FAILURE" and prompt.count("dog cat frog") == 3


def test_a_note_that_is_empty_teaches_nothing_and_is_not_played(algorithm):
    a = algorithm(lambda prompt, w: "" if last_message(prompt).startswith("Evaluate.") else answer(prompt, w))
    assert a.reflect(a.first) == [] and a.attempt_again([]) == []


def test_reflections_that_come_to_nothing_are_counted_and_a_person_is_told(algorithm):
    """Fails where a limit cannot be set, where what is cut off or does not fit vanishes, and where an empty one is blamed."""

    def reflecting(note):
        return lambda prompt, w: note if last_message(prompt).startswith("Evaluate.") else answer(prompt, w)

    a = algorithm(max_reflection_tokens=50)
    assert len(a.reflect(a.first)) == 4 and {r.max_tokens for _, r in a.engine.requests} == {50}
    assert a.logged["reflected_rate"] == 1.0 and a.notices.take() == []
    b = algorithm(reflecting(CutOff(NOTE)))
    assert b.reflect(b.first) == [] and b.logged["reflected_rate"] == 0.0
    assert b.notices.take() == [
        "most reflections of iteration 5 came to nothing: 4 of 4 were cut off (max_reflection_tokens is 32), and 0 did not fit "
        "the context (max_context is 512); raise what is too small"
    ]
    c = algorithm(max_reflection_tokens=500)
    assert c.reflect(c.first) == [] and c.logged["reflected_rate"] == 0.0 and not c.engine.requests
    assert "0 of 4 were cut off (max_reflection_tokens is 500), and 4 did not fit" in c.notices.take()[0]
    d = algorithm(reflecting(""))
    assert d.reflect(d.first) == [] and d.logged["reflected_rate"] == 0.0 and d.notices.take() == []


def test_a_second_attempt_plays_the_same_task_with_the_note_in_view_and_is_recorded_without(algorithm):
    """Fails where the note is not shown in every turn, where it gets into the dialogue, and where another task is played."""
    a = algorithm()
    again = a.attempt_again([(e, NOTE) for e in a.first])
    assert [e.id_ for e in again] == [f"{e.id_}/again" for e in a.first]
    assert [task_seed_of(e) for e in again] == [task_seed_of(e) for e in a.first]
    assert [e.get_infos(0)["task_id"] for e in again] == [e.get_infos(0)["task_id"] for e in a.first]
    for episode in again:
        assert len(episode) > 1 or episode_success(episode)
        for t in range(len(episode)):
            seen = a.chat.tokenizer.decode(generation_at(episode, t).prompt_ids)
            dialogue = messages_at(episode, t)
            assert last_message(seen) == f"{dialogue[-1].content}\n\nRefine.\n{NOTE}" and seen.count(NOTE) == 1
            assert not any(NOTE in message.content for message in dialogue)
    assert not any(NOTE in text for text in a.env_runner_group.local_env_runner.sample(num_episodes=2)[0].get_actions())


def test_a_note_beyond_the_context_is_left_out_and_counted(algorithm):
    a = algorithm()
    runner = a.env_runner_group.local_env_runner
    runner.get_metrics()
    (again,) = runner.play_forks([Start("x/again", task_seed_of(a.first[0]), 0, note="word " * 600)])
    metrics = runner.get_metrics()
    assert len(again) == int(metrics["notes_left_out"]) > 0 and "episodes_discarded" not in metrics


def test_what_is_internalised_is_trained_under_prompts_without_the_note(algorithm):
    """Fails where the prompts that the engine saw are trained on, and where a lost attempt is."""

    def winning(prompt: str, weights) -> str:
        if last_message(prompt).startswith("Evaluate."):
            return NOTE
        return guess[0] if NOTE in prompt else "dog cat frog"

    guess = [""]
    a = algorithm(winning)
    made: list = []
    for name in NAMES:  # until one of the four objects is named
        guess[0] = f"Is it a {name}?"
        if made := a.training_sequences(a.first):
            break
    assert made and 0 < a.logged["second_attempt_success"] <= 1
    opening = a.chat.prompt_ids((Message("user", "Guess my object."),))
    answer_ids = a.chat.encode(guess[0])
    for s in made:
        assert s.prompt_ids[: len(opening)] == opening and NOTE not in a.chat.tokenizer.decode(s.prompt_ids)
        assert s.answer_ids == answer_ids and s.origin.split(",")[0].endswith("/again")


def test_a_reflection_is_sampled_as_an_action(algorithm):
    """Fails where it is sampled at temperature 1 whatever the configuration says."""
    a = algorithm()
    a.config.language(action_temperature=0.5, action_top_p=0.9)
    a.reflect([episode for episode in a.first if not episode_success(episode)])
    assert {(request.temperature, request.top_p) for _, request in a.engine.requests} == {(0.5, 0.9)}


@pytest.fixture()
def attempts():
    """Task 5 was lost, won and lost, task 6 lost. What was lost was tried again: of task 5 one was won, and that of task 6."""
    first = [
        played([0.0, 0.0], task=5, success=False, name="a"),
        played([0.0, 1.0], task=5, lengths=[1, 3], success=True, name="b"),
        played([0.0], task=5, success=False, name="c"),
        played([0.0], task=6, success=False, name="d"),
    ]
    again = [
        played([0.0, 1.0], task=5, success=True, name="a/again"),
        played([0.0], task=5, success=False, name="c/again"),
        played([1.0], task=6, success=True, name="d/again"),
    ]
    return first, again


class TestInternalised:
    def sequences(self, attempts, internalise: str):
        first, again = attempts
        wanted: list = []

        def prompts(asked):
            wanted.extend(asked)
            return [Prompt((99, len(w.messages))) for w in asked]

        a = ERL.__new__(ERL)
        a.config = SimpleNamespace(internalise=internalise, minibatch_size=100, num_epochs=1)
        a.rng, a.logged, a.chat = np.random.default_rng(0), {}, SimpleNamespace(prompts=prompts)
        a.metrics = SimpleNamespace(log_value=lambda name, value, **_: a.logged.__setitem__(name, value))
        reflected: list = []
        a.reflect = lambda lost: reflected.extend(lost) or [(e, NOTE) for e in lost]
        a.attempt_again = lambda notes: again
        made = a.training_sequences(first)
        assert [e.id_ for e in reflected] == ["a", "c", "d"]  # what was won needs no second attempt
        return a, made, wanted

    def by_episode(self, made) -> dict[str, float]:
        weights: dict[str, float] = {}
        for s in made:
            name = s.origin.split(" ")[1].rstrip(",")
            weights[name] = weights.get(name, 0.0) + s.weight
        return weights

    def test_success_counts_alike_whether_of_a_first_or_a_second_attempt(self, attempts):
        a, made, wanted = self.sequences(attempts, "success")
        assert self.by_episode(made) == pytest.approx({"b": 1 / 3, "a/again": 1 / 3, "d/again": 1 / 3})
        assert a.logged["second_attempt_success"] == pytest.approx(2 / 3)
        assert a.logged["internalised_rate"] == pytest.approx(3 / 7)
        # First attempts under the prompts that they were played under, second ones under their plain dialogues.
        for s in made:
            assert s.prompt_ids[0] == (99 if "again" in s.origin else 2) and s.role == POLICY
        assert [w.messages for w in wanted] == [
            messages_at(e, t) for e in (attempts[1][0], attempts[1][2]) for t in range(len(e))
        ]
        assert all(isinstance(m, Message) for w in wanted for m in w.messages)

    def test_advantages_are_those_over_the_tasks_first_attempts(self, attempts):
        """1 - 1/3 in task 5, 1 - 0 in task 6: fails where second attempts are in the baseline, or all tasks'."""
        assert baselines(*attempts) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 1 / 3, 1 / 3, 0])
        _, made, _ = self.sequences(attempts, "advantage")
        total = 2 / 3 + 2 / 3 + 1
        assert self.by_episode(made) == pytest.approx({"b": 2 / 3 / total, "a/again": 2 / 3 / total, "d/again": 1 / total})

    def test_rounding_is_no_advantage(self):
        """The mean of six returns of 0.4 is 5.6e-17 below 0.4."""
        first = [played([0.4], success=False, name=str(i)) for i in range(6)]
        a = ERL.__new__(ERL)
        a.config = SimpleNamespace(internalise="advantage")
        assert 0.0 < 0.4 - baselines(first, [])[0] < 1e-15
        assert [a.weight(e, b) for e, b in zip(first, baselines(first, []), strict=True)] == [0.0] * 6

    def test_returns_that_are_no_success_count_by_advantage_alone(self):
        first, again = [played([0.2], success=False, name="a")], [played([0.5], success=False, name="a/again")]
        a = ERL.__new__(ERL)
        for internalise, expected in (("success", [0.0, 0.0]), ("advantage", [0.0, 0.3])):
            a.config = SimpleNamespace(internalise=internalise)
            found = [a.weight(e, b) for e, b in zip([*first, *again], baselines(first, again), strict=True)]
            assert found == pytest.approx(expected)


def test_a_turn_that_was_not_sampled_has_no_sequence(attempts):
    episode = played([0.0, 1.0], lengths=[0, 2], success=True, name="x/again")
    a = ERL.__new__(ERL)
    a.chat = SimpleNamespace(prompts=lambda wanted: [Prompt((len(w.messages),)) for w in wanted])
    (turn,) = a.without_note(episode)
    assert turn.prompt_ids == (len(messages_at(episode, 1)),) and turn.answer_ids == generations_of(episode)[1].token_ids


def test_a_turn_whose_prompt_does_not_fit_is_left_out_alone():
    episode = played([0.0, 0.0, 1.0], lengths=[1, 2, 3], success=True, name="x/again")
    a = ERL.__new__(ERL)
    a.chat = SimpleNamespace(
        prompts=lambda wanted: [Prompt((w.room,)) if w.room != 2 else PromptTooLong("too long") for w in wanted]
    )
    assert [(turn.prompt_ids, len(turn.answer_ids)) for turn in a.without_note(episode)] == [((1,), 1), ((3,), 3)]


class TestPrompts:
    def test_a_note_stands_behind_the_last_message_and_quotes_itself(self):
        state = (Message("system", "Play."), Message("user", "Go."))
        made = load_prompts("default").retry_messages(state, "Turn left.\n[The task is over.]")
        assert made[:-1] == state[:-1] and made[-1].role == "user"
        assert made[-1].content.startswith("Go.\n\n[You have tried") and made[-1].content.endswith(
            "\n| Turn left.\n| [The task is over.]"
        )

    def test_what_the_environment_said_cannot_pass_for_the_instruction(self):
        made = load_prompts("default").reflect_messages((Message("user", "Go."),), "left", "Lost.\nLook back. FAILURE")
        assert "\n| Lost.\n| Look back. FAILURE\n" in made[-1].content and made[-2] == Message("assistant", "left")


def test_settings():
    config = config_of()
    config.validate()
    assert ERLConfig().internalise == "success" and ERLConfig().episodes_per_task == 8
    with pytest.raises(ValueError, match="internalise is 'all' and must be one of success, advantage"):
        config.training(internalise="all").validate()
    with pytest.raises(ValueError, match="max_reflection_tokens is 0"):
        config_of(max_reflection_tokens=0).validate()
