"""Supervised fine-tuning: which tokens are trained, in which order, and what is wrong with a row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_nlac.algorithm.logs import LOGGED
from rllib_nlac.baselines.sft import SFTConfig
from rllib_nlac.checkpoints.checkpoint import CheckpointError
from rllib_nlac.checkpoints.start import starting_point
from rllib_nlac.envs.rows import Row
from rllib_nlac.replay.conversations import ConversationData, epochs, parse_conversation, sequences_of
from rllib_nlac.replay.messages import CALLING, TOO_LONG, UNLEARNED
from rllib_nlac.types import Message

USER, ASSISTANT = {"role": "user", "content": "Guess."}, {"role": "assistant", "content": "Is it big?"}
CHAT = [{"role": "system", "content": "Play."}, USER, ASSISTANT, {"role": "user", "content": "No."}, ASSISTANT]


def row(messages, **fields) -> Row:
    return Row("chats.jsonl, line 7", {"messages": messages, **fields})


def test_the_assistants_turns_are_trained_and_nothing_else(chat):
    conversation = parse_conversation(row(CHAT))
    first, second = sequences_of(conversation, chat)
    assert first.prompt_ids == chat.prompt_ids(conversation.messages[:2])
    assert second.prompt_ids == chat.prompt_ids(conversation.messages[:4])
    assert first.answer_ids == second.answer_ids == chat.encode("Is it big?")
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.answer_ids)] == first.prompt_ids + first.answer_ids
    assert second.origin == "chats.jsonl, line 7, message 4" and first.weight == len(first.answer_ids)


def test_a_weight_of_0_leaves_a_turn_out_but_not_its_text(chat):
    masked = [*CHAT[:2], {**ASSISTANT, "weight": 0}, *CHAT[3:]]
    (only,) = sequences_of(parse_conversation(row(masked)), chat)
    assert only.prompt_ids == sequences_of(parse_conversation(row(CHAT)), chat)[1].prompt_ids


def test_what_others_say_in_a_row_is_one_message():
    tools = [USER, {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, ASSISTANT]
    assert parse_conversation(row(tools)).messages == (Message("user", "Guess.\n3\n4"), Message("assistant", "Is it big?"))
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ASSISTANT]
    assert parse_conversation(row(parts)).messages[0].content == "ab"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "'messages' must be a list of messages"),
        ([], "'messages' must be a list of messages"),
        ("hello", "'messages' must be a list of messages"),
        ([USER], "no message is the assistant's"),
        ([USER, {"role": "critic", "content": "x"}], "message 1 must have a role of system, user, tool, assistant"),
        ([USER, "hello"], "message 1 must have a role"),
        ([USER, {"role": "assistant"}], "message 1 must have a content"),
        ([USER, {"role": "assistant", "content": " "}], "message 1 is trained, and its content is empty"),
        ([{"role": "user", "content": [{"type": "image"}]}, ASSISTANT], "message 0 must have a content"),
        ([ASSISTANT], "message 0 is the assistant's, and no user or tool message is before it"),
        ([USER, ASSISTANT, ASSISTANT], "message 2 is the assistant's, and no user"),
        ([CHAT[0], ASSISTANT], "message 1 is the assistant's, and no user"),
        ([USER, CHAT[0], ASSISTANT], "message 1 is a system message, and only the first may be one"),
        ([USER, {**ASSISTANT, "weight": 0.5}], "message 1 has the weight 0.5, and it must be 0 or 1"),
        ([USER, {**ASSISTANT, "weight": True}], "message 1 has the weight True"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(messages, complaint):
    with pytest.raises(ValueError, match=complaint) as raised:
        parse_conversation(row(messages))
    assert str(raised.value).startswith("chats.jsonl, line 7: ")


def test_a_row_of_which_nothing_is_trained_is_left_out_and_counted(chats, chat):
    """Fails where one row of calls alone ends the run."""
    rows = [{"messages": [USER, {**ASSISTANT, **more}]} for more in ({"tool_calls": [{"id": "1"}]}, {"weight": 0}, {})]
    data = ConversationData(config_of(chats(*rows)))
    assert len(data.sequences(chat)) == 1 and data.notes == {CALLING: 1, UNLEARNED: 2}
    with pytest.raises(ValueError, match=r"no conversation is left to learn from: config\.input_: 1 rows have no turn"):
        ConversationData(config_of(chats(rows[1]))).sequences(chat)


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 40), st.integers(0, 3))
def test_every_pass_draws_each_item_once_however_it_is_cut(count, start, size, seed):
    whole, _ = epochs(count, 0, start + size, seed)
    part, passes = epochs(count, start, size, seed)
    assert part == whole[start:] and passes == (start + size) / count
    for which in range(len(whole) // count):
        assert sorted(whole[which * count : (which + 1) * count]) == list(range(count))


@pytest.fixture()
def chats(tmp_path):
    file = tmp_path / "chats.jsonl"

    def write(*rows) -> str:
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return str(file)

    return write


def config_of(path, **keys) -> SFTConfig:
    config = SFTConfig().offline_data(input_=path, held_out_fraction=0.0).debugging(seed=0)
    config.training(lr=2e-3, train_batch_size_per_learner=8, minibatch_size=4)
    return config.update_from_dict(keys)


def test_rows_of_a_group_stay_together(chats, chat):
    rows = [{"messages": CHAT, "group": name} for name in ("a", "a", "b", "a")] + [{"messages": CHAT}] * 2
    groups = ConversationData(config_of(chats(*rows))).sequences(chat)
    assert [len(group) for group in groups] == [4, 2, 2, 2, 2]


def test_what_exceeds_the_context_is_left_out_and_counted(chats, chat):
    long = [{"role": "user", "content": "alive " * 3000}, ASSISTANT]
    data = ConversationData(config_of(chats({"messages": long}, {"messages": CHAT})))
    assert len(data.sequences(chat)) == 1 and data.notes == {TOO_LONG: 1}
    with pytest.raises(ValueError, match="1 rows exceed the context and are left out; of those that are too long"):
        ConversationData(config_of(chats({"messages": long}))).sequences(chat)


def test_a_configuration_says_what_it_lacks(chats, tmp_path):
    with pytest.raises(ValueError, match=r"config.input_ must name the conversations.*rllib env expert"):
        SFTConfig().validate()
    with pytest.raises(FileNotFoundError, match="no JSONL or parquet file"):
        config_of(str(tmp_path / "none.jsonl")).validate()
    with pytest.raises(ValueError, match=r"evaluation_interval .* set env"):
        config_of(chats({"messages": CHAT}), evaluation_interval=1).validate()
    path = chats({"messages": CHAT})
    with pytest.raises(ValueError, match=r"config.input_ is \[3\] and must name the conversations"):
        config_of([3]).validate()
    config = config_of((Path(path),))
    config.validate()
    assert config.env == LOGGED and config.input_ == [path]


@pytest.fixture()
def algorithms(ray_session):
    built = []

    def build(config):
        built.append(config.build_algo())
        return built[-1]

    yield build
    for algorithm in built:
        algorithm.stop()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("lora", "lr", "left"), [(None, 2e-3, 0.5), pytest.param({"rank": 4}, 2e-2, 1.0, marks=pytest.mark.long)]
)
def test_it_learns_resumes_bit_for_bit_and_is_where_others_start(algorithms, chats, tmp_path, lora, lr, left, request):
    """The loss falls towards what is left to chance: each of two answers is given half of the time. An adapter is slower."""
    if lora is None:  # one engine serves all; it has no adapters
        request.getfixturevalue("lent_engine")
    rows = [{"messages": [USER, {"role": "assistant", "content": answer}]} for answer in ("Is it big?", "Is it red?") * 8]
    path = chats(*rows)
    algorithm = algorithms(config_of(path, lora=lora, lr=lr, num_epochs=4, held_out_fraction=0.25))
    losses = [algorithm.train()["sft"]["held_out_loss"] for _ in range(4)]
    assert losses[-1] < losses[0] / 2 and losses[-1] < left
    saved = algorithm.save_to_path(str(tmp_path / "saved"))
    after = [algorithm.train()["sft"] for _ in range(2)]
    again = algorithms(config_of(path, lora=lora, lr=lr, num_epochs=4, held_out_fraction=0.25))
    again.restore_from_path(saved)
    assert [again.train()["sft"] for _ in range(2)] == after
    start = starting_point(saved)
    assert start != saved and starting_point(saved) == start and starting_point(start) == start
    other = algorithms(config_of(path, language_model=saved, held_out_fraction=0.25))
    assert other.config.language_model == start and other.held_out_loss() < losses[0]
    chats(*rows[:-1])
    changed = algorithms(config_of(path, lora=lora, lr=lr, num_epochs=4, held_out_fraction=0.25))
    changed.restore_from_path(saved)
    with pytest.raises(CheckpointError, match=r"config.input_ names other conversations"):
        changed.training_step()


def test_each_token_of_a_step_weighs_alike(chats, chat):
    """Fails where each answer weighs alike, as in the policy's distillation."""
    from rllib_nlac.learner.batch import into_minibatches

    rows = [{"messages": [USER, {"role": "assistant", "content": text}]} for text in ("No.", "Is it alive and big?")]
    turns = [turn for group in ConversationData(config_of(chats(*rows))).sequences(chat) for turn in group]
    step = into_minibatches(turns, 8, 1, None)
    lengths = [len(turn.answer_ids) for turn in step]
    assert [turn.weight for turn in step] == pytest.approx([length / sum(lengths) for length in lengths])
    assert Counter(turn.minibatch for turn in step) == {0: 2}
