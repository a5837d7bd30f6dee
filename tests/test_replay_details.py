"""The replay buffer in detail: duplicates, new transitions, eviction, what a state holds, and the files behind it."""

from __future__ import annotations

import gc
import json
import os
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.episode import ENVIRONMENT, GENERATION, MESSAGES
from rllib_nlac.replay import storage
from rllib_nlac.replay.buffer import MAX_EPISODE_LENGTH, TextReplayBuffer, size_of, transition_at
from rllib_nlac.replay.storage import EPISODES_PER_FILE, EpisodeFiles
from rllib_nlac.types import Generation, Message, Weights


def episode(number: int, length: int = 3) -> SingleAgentEpisode:
    made = SingleAgentEpisode(id_=f"e{number}")
    made.add_env_reset("Go.", {})
    for t in range(length):
        generation = Generation((1, 2, 3), (4,), np.zeros(1, np.float32), True, number)
        outputs = {GENERATION: generation, MESSAGES: (Message("user", "Go."),)}
        made.add_env_step(f"o{t}", f"a{number}.{t}", 0.0, {}, terminated=t == length - 1, extra_model_outputs=outputs)
    return made


def test_a_transition_names_the_environment_that_was_really_played():
    """As a task set's rows do. Fails where all have the prompts of the one that is configured."""
    of_a_set, other = episode(1), episode(2)
    of_a_set.get_infos(0)[ENVIRONMENT] = "TextHouse"
    assert [transition_at("Tasks", each, 1).env for each in (of_a_set, other)] == ["TextHouse", "Tasks"]


def filled(episodes: int = 4, **settings) -> TextReplayBuffer:
    buffer = TextReplayBuffer(**{"env": "E", "seed": 0, "alpha": 1.0, **settings})
    buffer.add([episode(number) for number in range(episodes)])
    return buffer


def masses(buffer: TextReplayBuffer) -> dict[tuple[int, int], float]:
    return {(index, t): buffer._sum_segment[node] for index, t, node in buffer._indices}


@pytest.mark.parametrize("pickled", [False, True])
def test_what_is_counted_is_what_memory_holds(pickled):
    """Long dialogues, as a runner in another process sends them. Fails where each id is an object of its own."""

    def long(number: int) -> SingleAgentEpisode:
        made, ids = episode(number, 8), list(range(1000, 1400))
        for t in range(8):
            prompt, answer = (tuple(json.loads(json.dumps(some))) for some in (ids * (t + 1), ids[:100]))
            made.extra_model_outputs[GENERATION][t] = Generation(prompt, answer, np.zeros(100, np.float32), True, 0)
        return pickle.loads(pickle.dumps(made)) if pickled else made

    buffer = TextReplayBuffer(env="E")
    long(0)  # what all share is made
    tracemalloc.start()
    buffer.add([long(number) for number in range(3)])
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert buffer.num_bytes > 300_000 and 0.8 < held / buffer.num_bytes < 1.3


def test_a_generation_is_the_same_wherever_it_was():
    made = Generation((1, 300_000), (7,), np.array([-0.5], np.float32), False, 3, Weights.TARGET, 2)
    back = pickle.loads(pickle.dumps(made))
    assert back.logprobs.tolist() == [-0.5] and replace(back, logprobs=0) == replace(made, logprobs=0)
    assert [type(i) for i in back.prompt_ids] == [int, int]


def test_of_a_transition_that_was_drawn_twice_the_last_priority_counts():
    """Neither their sum nor the largest of them: each draw's losses are those of the whole transition."""
    buffer = filled()
    a, b = (node for *_, node in buffer._indices[:2])
    buffer.update_priorities_of([a, b, a], np.array([5.0, 2.0, 3.0]))
    assert (buffer._sum_segment[a], buffer._sum_segment[b]) == (3.0, 2.0)
    assert buffer._sum_segment.sum() == 3.0 + 2.0 + 10 * 1.0 and buffer._min_segment.min() == 1.0
    sample = buffer.sample_transitions(2000, beta=1.0)
    assert sample.nodes.count(a) / 2000 == pytest.approx(3 / 15, abs=0.04)


def test_draws_are_with_replacement_in_the_order_drawn():
    buffer = filled(1)
    sample = buffer.sample_transitions(50, beta=0.0)
    assert len(sample.transitions) == len(sample.nodes) == len(sample.weights) == 50 and len(set(sample.nodes)) == 3
    place = {node: t for _, t, node in buffer._indices}
    assert [t.id for t in sample.transitions] == [place[node] for node in sample.nodes]
    assert buffer.sampled_timesteps == 50 and sample.weights.tolist() == [1.0] * 50


def test_new_transitions_get_the_largest_priority_ever_and_1_before_any():
    buffer = filled(2)
    assert set(masses(buffer).values()) == {1.0}
    nodes = [node for *_, node in buffer._indices]
    buffer.update_priorities_of(nodes, np.full(6, 0.2))
    buffer.add([episode(2)])
    assert [mass for (index, _), mass in masses(buffer).items() if index == 2] == [1.0] * 3  # it does not fall
    buffer.update_priorities_of(nodes[:1], np.array([4.0]))
    buffer.update_priorities_of(nodes, np.full(6, 0.1))
    buffer.add([episode(3)])
    assert [mass for (index, _), mass in masses(buffer).items() if index == 3] == [4.0] * 3
    buffer.add([episode(4)], weight=2.5)
    assert [mass for (index, _), mass in masses(buffer).items() if index == 4] == [2.5] * 3


def test_importance_weights_are_by_the_rarest_of_the_buffer_and_not_of_the_batch():
    """Fails where the largest of the batch is what they are divided by: then they would depend on what else was drawn."""
    buffer = filled(20)
    nodes = [node for *_, node in buffer._indices]
    buffer.update_priorities_of(nodes, np.array([0.01] + [1.0] * 59))
    for _ in range(5):
        sample = buffer.sample_transitions(4, beta=0.5)
        if nodes[0] not in sample.nodes:
            np.testing.assert_allclose(sample.weights, 0.1, rtol=1e-6)
            return
    raise AssertionError("the rarest of sixty was drawn each time")


def test_what_was_evicted_is_never_drawn_and_counts_for_no_weight():
    buffer = filled(4, capacity=9)
    rare = next(node for index, t, node in buffer._indices if (index, t) == (1, 0))
    buffer.update_priorities_of([rare], np.array([1e-6]))
    buffer.add([episode(9)])
    assert [e.id_ for e in buffer.episodes] == ["e2", "e3", "e9"] and buffer.get_num_timesteps() == 9
    sample = buffer.sample_transitions(500, beta=1.0)
    assert {t.action.split(".")[0] for t in sample.transitions} == {"a2", "a3", "a9"}
    assert sample.weights.tolist() == [1.0] * 500  # that of the rare one left with it
    assert {t.id for t in sample.transitions} == {i * MAX_EPISODE_LENGTH + t for i in (2, 3, 4) for t in range(3)}
    assert buffer.num_bytes == 3 * size_of(episode(3)) and buffer._sum_segment.sum() == 9.0


def test_one_episode_alone_may_exceed_the_capacity_until_the_next_comes():
    buffer = TextReplayBuffer(env="E", capacity=4)
    buffer.add([episode(0, length=6)])
    assert buffer.get_num_timesteps() == 6
    buffer.add([episode(1, length=2), episode(2, length=2)])
    assert [e.id_ for e in buffer.episodes] == ["e1", "e2"]


@pytest.mark.parametrize(("capacity", "length"), [(1, 3), (4, 9), (5, 11)])
def test_one_of_more_than_twice_the_capacity_is_refused_and_nothing_is_lost(capacity, length):
    buffer = TextReplayBuffer(env="E", capacity=capacity)
    buffer.add([episode(0, length=1), episode(1, length=2 * capacity)])
    with pytest.raises(ValueError, match=rf"episode e2 has {length} turns, .*\{{capacity: {capacity}\}}: set capacity"):
        buffer.add([episode(2, length=length)])
    assert [e.id_ for e in buffer.episodes] == ["e1"] and buffer.get_num_timesteps() == 2 * capacity


def test_a_restored_buffer_with_too_little_room_for_an_episode_says_so():
    """Fails with an IndexError of RLlib's where only what is played is checked."""
    former = TextReplayBuffer(env="E", capacity=100)
    former.add([episode(0, length=4)])
    with pytest.raises(ValueError, match=r"episode e0 has 4 turns, more than twice .*capacity: 1\}"):
        TextReplayBuffer(env="E", capacity=1).set_state(former.get_state())


def test_bytes_are_those_of_texts_ids_and_log_probabilities():
    made = episode(0, length=2)
    texts = len("Go.") + 2 * len("o0") + 2 * len("a0.0")
    assert size_of(made) == texts + 2 * (8 * (3 + 1) + 4)
    wide = SingleAgentEpisode(id_="w")
    wide.add_env_reset("é", {})
    outputs = {GENERATION: made.get_extra_model_outputs(GENERATION, 0)}
    wide.add_env_step("", "", 0.0, {}, terminated=True, extra_model_outputs=outputs)
    assert size_of(wide) == 2 + 36  # bytes, not characters


def test_the_mean_priority():
    buffer = TextReplayBuffer(env="E", alpha=0.5)
    assert buffer.mean_priority == 0.0
    for length, priorities, mean in ((1, [4.0], 2.0), (2, [4.0, 9.0], 2.5)):
        buffer = TextReplayBuffer(env="E", alpha=0.5)
        buffer.add([episode(0, length=length)])
        buffer.update_priorities_of([node for *_, node in buffer._indices], np.array(priorities))
        assert buffer.mean_priority == pytest.approx(mean)


class TestStates:
    def test_a_buffer_of_the_same_settings_goes_on_as_the_first_would(self):
        buffer = filled(6, capacity=12)
        buffer.update_priorities_of([node for *_, node in buffer._indices], np.linspace(0.1, 2, 12))
        buffer.sample_transitions(5, 0.4)
        state = pickle.loads(pickle.dumps(buffer.get_state()))
        other = filled(3, capacity=12)
        other.set_state(state)
        for each in (buffer, other):
            each.add([episode(70), episode(71)])
        assert masses(buffer) == masses(other) and buffer.num_bytes == other.num_bytes
        assert buffer.sampled_timesteps == other.sampled_timesteps == 5
        drawn = [each.sample_transitions(30, 0.4) for each in (buffer, other)]
        assert drawn[0].nodes == drawn[1].nodes and [t.id for t in drawn[0].transitions] == [t.id for t in drawn[1].transitions]

    @pytest.mark.parametrize(("alpha", "capacity"), [(0.5, 12), (1.0, 6), (0.0, 12), (2.0, 9)])
    def test_other_settings_hold_at_once_and_ids_stay(self, alpha, capacity):
        buffer = filled(6, capacity=12)  # holds the last four
        values = {(i, t): 0.1 * (1 + 3 * i + t) for i, t, _ in buffer._indices}
        buffer.update_priorities_of([node for *_, node in buffer._indices], np.array(list(values.values())))
        buffer.sample_transitions(7, 0.4)
        other = TextReplayBuffer(env="E", capacity=capacity, alpha=alpha, seed=3)
        other.set_state(buffer.get_state())
        kept = {place: value**alpha for place, value in values.items() if place[0] >= 6 - capacity // 3}
        assert masses(other) == pytest.approx(kept) and other.sampled_timesteps == 7
        expected = {i * MAX_EPISODE_LENGTH + t for i, t in kept}
        assert {t.id for t in other.sample_transitions(800, 0.0).transitions} == expected
        other.add([episode(50)])
        assert max(masses(other).items())[1] == pytest.approx(1.8**alpha)  # the largest so far
        assert other.capacity == capacity and other.alpha == alpha

    def test_from_uniform_replay_all_come_as_important_as_new_ones(self):
        buffer = filled(2, alpha=0.0)
        other = TextReplayBuffer(env="E", alpha=1.0)
        other.set_state(buffer.get_state())
        assert set(masses(other).values()) == {1.0}

    def test_saving_changes_nothing(self, tmp_path):
        buffer = filled(5)
        before = masses(buffer), [e.id_ for e in buffer.episodes], buffer.num_bytes
        buffer.save(tmp_path / "a")
        assert (masses(buffer), [e.id_ for e in buffer.episodes], buffer.num_bytes) == before
        with pytest.raises(FileExistsError):
            buffer.save(tmp_path / "a")


class TestFiles:
    def names(self, states) -> list[str]:
        return [SingleAgentEpisode.from_state(state).id_ for state in states]

    @pytest.mark.parametrize(
        ("first", "count"),
        [(0, 1), (0, 256), (0, 257), (255, 2), (256, 1), (256, 256), (300, 10), (511, 2), (100, 600), (512, 0)],
    )
    def test_any_range_of_episodes_is_written_and_read(self, tmp_path, first, count):
        held = [episode(number, length=1) for number in range(first, first + count)]
        EpisodeFiles().write(tmp_path, held, first)
        numbers = sorted({(first + i) // EPISODES_PER_FILE for i in range(count)})
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"episodes_{n:08d}.pkl" for n in numbers]
        assert self.names(EpisodeFiles().read(tmp_path, first, count)) == [f"e{first + i}" for i in range(count)]

    def test_what_was_read_is_linked_into_the_next_checkpoint_and_written_on(self, tmp_path):
        folders = [tmp_path / name for name in "abc"]
        for folder in folders:
            folder.mkdir()
        EpisodeFiles().write(folders[0], [episode(n, 1) for n in range(300)], 0)
        files = EpisodeFiles()
        files.read(folders[0], 0, 300)
        files.write(folders[1], [episode(n, 1) for n in range(300)], 0)
        inodes = [{p.name: p.stat().st_ino for p in folder.iterdir()} for folder in folders[:2]]
        assert inodes[0] == inodes[1]
        # The oldest go, further ones come: the former last file is written anew, and the former checkpoint keeps its own.
        files.write(folders[2], [episode(n, 1) for n in range(280, 310)], 280)
        assert [p.name for p in folders[2].iterdir()] == ["episodes_00000001.pkl"]
        assert self.names(EpisodeFiles().read(folders[2], 280, 30)) == [f"e{n}" for n in range(280, 310)]
        assert self.names(EpisodeFiles().read(folders[0], 0, 300)) == [f"e{n}" for n in range(300)]

    def test_a_file_that_lost_its_oldest_serves_on(self, tmp_path):
        """A full file is not written again where its first episodes are evicted: the reader leaves them out."""
        files = EpisodeFiles()
        for name, first in (("a", 0), ("b", 10)):
            (tmp_path / name).mkdir()
            files.write(tmp_path / name, [episode(n, 1) for n in range(first, 256)], first)
        assert len({(tmp_path / name / "episodes_00000000.pkl").stat().st_ino for name in "ab"}) == 1
        assert self.names(EpisodeFiles().read(tmp_path / "b", 10, 246)) == [f"e{n}" for n in range(10, 256)]

    def test_without_hard_links_files_are_copied(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError("no links here")

        monkeypatch.setattr(os, "link", refuse)
        assert storage.os.link is refuse
        EpisodeFiles().write(tmp_path, [episode(0, 1)], 0)
        assert self.names(EpisodeFiles().read(tmp_path, 0, 1)) == ["e0"]
