"""Templates that leave the thinking of former turns out of a prompt, as those of thinking models do.

What is stored for a turn, what is trained on and what the next turn's prompt shows are three different things then: the turn
is trained on as it was sampled, thought included, under the prompt that the engine saw; later prompts and the critic, who
judges what the environment got, see it without its thought.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from scripted_engine import ScriptedEngine, last_message
from scripted_roles import script

from rllib_nlac import NLACConfig
from rllib_nlac.engine.chat import Chat
from rllib_nlac.episode import GENERATION, MESSAGES
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import TextReplayBuffer
from rllib_nlac.sampling.env_runner import TextEnvRunner

TURN = "<think>\nSECRET THOUGHT\n</think>\n\nIs it big?"


@pytest.fixture(scope="module")
def stripping(chat) -> Chat:
    """The small model's template, with the line of Qwen3's and its relatives."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    template = tokenizer.chat_template
    assert "message['content']" in template or 'message["content"]' in template
    stripped = "(message['content'].split('</think>')[-1].lstrip() if message['role'] == 'assistant' else message['content'])"
    for name in ("message['content']", 'message["content"]'):
        template = template.replace(name, "@@")
    tokenizer.chat_template = template.replace("@@", stripped)
    return Chat(tokenizer, chat.max_context)


@pytest.fixture()
def played(stripping, config, monkeypatch):
    def answer(prompt, weights):
        if any(last_message(prompt).startswith(role) for role in ("Predict.", "Backup.", "Evaluate.", "Refine.")):
            return script(refine=TURN.replace("big", "alive"))(prompt, weights)
        return TURN

    config.language(max_action_tokens=48)
    config.num_envs_per_env_runner = 2
    monkeypatch.setattr(config, "make_chat", lambda: stripping)
    runner = TextEnvRunner(config=config, worker_index=0)
    runner.attach(ScriptedEngine(stripping, answer))
    return runner.engine, runner.sample(num_episodes=2)


def text(chat: Chat, ids) -> str:
    return chat.tokenizer.decode(list(ids))


def test_later_prompts_leave_the_thought_out_and_the_stored_turn_keeps_it(played, stripping):
    _, episodes = played
    for episode in episodes:
        for t in range(len(episode)):
            generation, messages = (episode.get_extra_model_outputs(key, t) for key in (GENERATION, MESSAGES))
            assert generation.prompt_ids == stripping.prompt_ids(messages)
            prompt = text(stripping, generation.prompt_ids)
            assert "SECRET THOUGHT" not in prompt and prompt.count("Is it big?") == t
            assert "SECRET THOUGHT" in text(stripping, generation.token_ids) and episode.get_actions(t) == TURN
            assert sum("SECRET THOUGHT" in message.content for message in messages) == t  # the messages keep everything


def test_every_turn_with_a_thought_is_counted_whose_next_prompt_is_written_anew(stripping, config, monkeypatch):
    config.language(max_action_tokens=48)
    monkeypatch.setattr(config, "make_chat", lambda: stripping)
    counted = {}
    for turn in (TURN, "Is it big?"):
        runner = TextEnvRunner(config=config, worker_index=0)
        runner.attach(ScriptedEngine(stripping, lambda prompt, weights, turn=turn: turn))
        episodes = runner.sample(num_episodes=2)
        counted[turn] = int(runner.get_metrics()["retokenised_turns"]), sum(len(episode) - 1 for episode in episodes)
    assert counted[TURN][0] == counted[TURN][1] > 0 and counted["Is it big?"][0] == 0


def test_the_environment_gets_the_turn_without_its_thought(played):
    _, episodes = played
    assert all(reply in ("Yes.", "No.") for episode in episodes for reply in episode.get_observations()[1:3])


@pytest.mark.parametrize(
    ("opens", "turn", "reached"),
    [
        ("", "<think>\nIs it a dog? Is it a", False),
        ("<think>\n", "Is it a dog? Is it a", False),
        ("<think>\n", "Is it a dog?\n</think>\n\nIs it big?", True),
        ("", "Is it big?", True),
    ],
)
def test_reasoning_that_was_cut_off_reaches_no_environment(chat, config, monkeypatch, opens, turn, reached):
    """Fails where a thought is played as the action, which may name the object or the right answer by chance."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template += "{% if add_generation_prompt %}" + opens + "{% endif %}"
    opening = Chat(tokenizer, chat.max_context)
    config.language(max_action_tokens=32)
    monkeypatch.setattr(config, "make_chat", lambda: opening)
    runner = TextEnvRunner(config=config, worker_index=0)
    runner.attach(ScriptedEngine(opening, lambda prompt, weights: turn))
    (episode,) = runner.sample(num_episodes=1)
    replies = episode.get_observations()[1:]
    assert {reply in ("Yes.", "No.") for reply in replies[:-1]} == {reached}
    assert int(runner.get_metrics()["action_parse_failures"]) == (0 if reached else len(episode))


@pytest.mark.parametrize("turn", ["SECRET THOUGHT</think>Is it big?", "SECRET THOUGHT"])
def test_a_thought_that_the_prompt_opened_is_in_no_later_prompt(chat, config, monkeypatch, turn):
    """Fails where the template, which looks for both marks, gets one alone, or none of a thought without an end."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    both = "(c.split('</think>')[-1] if '<think>' in c and '</think>' in c else c)"
    template = tokenizer.chat_template
    for name in ("message['content']", 'message["content"]'):
        template = template.replace(name, both.replace("c.", "@@.").replace("in c", "in @@").replace("else c", "else @@"))
    tokenizer.chat_template = template.replace("@@", "message['content']") + "{% if add_generation_prompt %}<think>{% endif %}"
    opening = Chat(tokenizer, chat.max_context)
    config.language(max_action_tokens=32)
    monkeypatch.setattr(config, "make_chat", lambda: opening)
    runner = TextEnvRunner(config=config, worker_index=0)
    runner.attach(ScriptedEngine(opening, lambda prompt, weights: turn))
    (episode,) = runner.sample(num_episodes=1)
    assert len(episode) > 1
    for t in range(len(episode)):
        prompt = text(opening, episode.get_extra_model_outputs(GENERATION, t).prompt_ids)
        assert "SECRET THOUGHT" not in prompt and "</think>" not in prompt and prompt.endswith("<think>")
        assert prompt.count("Is it big?") == (t if "</think>" in turn else 0)


def test_training_uses_the_prompt_that_the_engine_saw_and_the_ids_that_it_sampled(played, stripping, compact):
    engine, episodes = played
    buffer = TextReplayBuffer(env="TwentyQuestions", seed=0)
    buffer.add(episodes)
    sample = buffer.sample_transitions(8, 0.4)
    settings = NLACConfig().roles(max_reasoning_tokens=0, max_future_tokens=24, max_critique_tokens=24).stage_settings
    algorithm = NLAC.__new__(NLAC)
    algorithm.config = NLACConfig().training(minibatch_size=8, train_batch_size_per_learner=8)
    algorithm.rng = np.random.default_rng(0)
    algorithm.stages = LanguageStages(engine, stripping, lambda env: compact, settings)
    asked_before = {request.prompt_ids for _, request in engine.requests}
    targets, refinements, _ = algorithm.stages.run(sample.transitions)
    asked = {request.prompt_ids for _, request in engine.requests}
    assert not any("SECRET THOUGHT" in text(stripping, ids) for ids in asked)  # no role sees a former or judged turn's thought
    sequences = algorithm.sequences_of(sample, targets, refinements)
    assert sequences
    for sequence in sequences:
        prompt, answer = tuple(sequence.prompt_ids), text(stripping, sequence.answer_ids)
        if sequence.role:
            assert prompt in asked_before and answer.startswith("<think>\nSECRET THOUGHT")
        else:
            assert prompt in asked and "SECRET THOUGHT" not in answer
