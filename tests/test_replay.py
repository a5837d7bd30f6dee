"""The replay buffer: whole dialogues, proportional sampling, importance weights, bounds, state."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numbered_episodes import episode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from scipy import stats

from rllib_nlac.replay.buffer import TextReplayBuffer, size_of


def filled(episodes: int = 8, **settings) -> TextReplayBuffer:
    buffer = TextReplayBuffer(**{"env": "E", "seed": 0, **settings})
    buffer.add([episode(number) for number in range(episodes)])
    return buffer


def test_a_transition_carries_the_whole_dialogue_before_it():
    for t in filled().sample_transitions(200, beta=0.4).transitions:
        number, turn = t.action[1:].split(".")
        said = [f"q{number}.{i}" for i in range(int(turn))]
        assert [m.content for m in t.state if m.role == "assistant"] == said
        assert [m.content for m in t.state if m.role == "user"] == ["Go.", *(f"reply {number}.{i}" for i in range(int(turn)))]
        assert t.observation == f"reply {number}.{turn}" and t.next_state[-1].content == t.observation
        assert t.generation.token_ids == (4, int(turn)) and t.generation.weight_version == int(number)
        assert t.ended == (turn == "3") and t.reward == float(turn == "3")
        assert t.returns_to_go == 1.0 and t.episode_success is True


def test_ids_are_unique():
    drawn = filled(20).sample_transitions(2000, beta=0.0).transitions
    assert len({t.id for t in drawn}) == len({t.action for t in drawn}) == 80


def test_truncation_is_an_end_and_not_a_success():
    buffer = TextReplayBuffer(env="E", seed=0)
    buffer.add([episode(0, length=1, truncated=True)])
    (t,) = buffer.sample_transitions(1, beta=0.0).transitions
    assert t.truncated and t.ended and not t.terminated and t.episode_success is False


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_sampling_is_proportional_to_the_priority_to_the_power_of_alpha(alpha):
    """Chi-square at p > 1e-3 over 20,000 draws; fails with another exponent and with uniform sampling."""
    buffer = filled(2, alpha=alpha)
    everything = buffer.sample_transitions(400, beta=0.0)
    node_of = {t.action: node for t, node in zip(everything.transitions, everything.nodes, strict=True)}
    names = sorted(node_of)
    priorities = np.linspace(0.1, 2.0, len(names))
    buffer.update_priorities_of([node_of[name] for name in names], priorities)
    drawn = buffer.sample_transitions(20_000, beta=0.0).transitions
    observed = [sum(t.action == name for t in drawn) for name in names]
    expected = priorities**alpha / (priorities**alpha).sum() * len(drawn)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    if alpha:
        assert stats.chisquare(observed, np.full(len(names), len(drawn) / len(names))).pvalue < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights(beta):
    buffer = filled(2, alpha=0.6)
    everything = buffer.sample_transitions(400, beta=0.0)
    nodes = sorted(set(everything.nodes))
    priorities = np.linspace(0.1, 2.0, len(nodes))
    buffer.update_priorities_of(nodes, priorities)
    chance = dict(zip(nodes, priorities**0.6 / (priorities**0.6).sum(), strict=True))
    sample = buffer.sample_transitions(300, beta=beta)
    expected = [(len(nodes) * chance[node]) ** -beta for node in sample.nodes]
    largest = (len(nodes) * min(chance.values())) ** -beta
    np.testing.assert_allclose(sample.weights, np.array(expected) / largest, rtol=1e-5)
    assert sample.weights.max() <= 1.0 + 1e-6


def a_third_won(success_share: float, alpha: float) -> tuple[TextReplayBuffer, dict[int, float], set[int]]:
    """Two lost episodes and one that was won; p^α of each node, and the nodes of the one that was won."""
    buffer = TextReplayBuffer(env="E", seed=0, alpha=alpha)
    buffer.add([episode(0, truncated=True), episode(1), episode(2, truncated=True)])
    everything = buffer.sample_transitions(400, beta=0.0)
    won = {node for t, node in zip(everything.transitions, everything.nodes, strict=True) if t.episode_success}
    nodes = sorted(set(everything.nodes))
    priorities = np.linspace(0.1, 2.0, len(nodes))
    buffer.update_priorities_of(nodes, priorities)
    assert (len(nodes), len(won)) == (12, 4)
    buffer.success_share = success_share
    return buffer, dict(zip(nodes, priorities**alpha, strict=True)), won


@pytest.mark.parametrize("share", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_successes_have_their_share_of_the_draws_and_keep_their_priorities_among_themselves(share, alpha):
    """Chi-square against the closed form. Fails where the share comes on top of what priorities give, and where successes are
    drawn uniformly."""
    buffer, mass, won = a_third_won(share, alpha)
    total, of_won = sum(mass.values()), sum(mass[node] for node in won)
    wins = max(of_won / total, share)
    expected = {n: wins * m / of_won if n in won else (1 - wins) * m / (total - of_won) for n, m in mass.items()}
    sample = buffer.sample_transitions(4_000, beta=0.7)
    possible = [node for node in mass if expected[node]]
    observed = [sample.nodes.count(node) for node in possible]
    assert sum(observed) == 4_000
    assert stats.chisquare(observed, [4_000 * expected[node] for node in possible]).pvalue > 1e-3
    # The weights correct for the chance that a transition really had.
    raw = np.array([expected[node] ** -0.7 for node in sample.nodes])
    np.testing.assert_allclose(sample.weights / sample.weights[0], raw / raw[0], rtol=1e-4)
    assert 0 < sample.weights.max() <= 1 + 1e-6


@pytest.mark.parametrize("truncated", [True, False])
def test_without_successes_or_with_nothing_else_a_share_of_them_changes_no_draw(truncated):
    buffers = [TextReplayBuffer(env="E", seed=5, success_share=share) for share in (0.0, 0.5)]
    for buffer in buffers:
        buffer.add([episode(number, truncated=truncated) for number in range(4)])
    first, second = (buffer.sample_transitions(100, beta=0.4) for buffer in buffers)
    assert first.nodes == second.nodes
    np.testing.assert_array_equal(first.weights, second.weights)


def test_evicted_successes_are_drawn_no_more_and_later_ones_are():
    buffer = TextReplayBuffer(env="E", seed=0, capacity=12, success_share=1.0)
    buffer.add([episode(0), *(episode(number, truncated=True) for number in range(1, 4))])
    assert not any(t.episode_success for t in buffer.sample_transitions(200, beta=0.0).transitions)
    buffer.add([episode(4)])
    assert {t.action[:2] for t in buffer.sample_transitions(200, beta=0.0).transitions} == {"q4"}


def test_new_transitions_get_the_largest_priority():
    buffer = filled(2)
    sample = buffer.sample_transitions(8, beta=0.0)
    buffer.update_priorities_of(sample.nodes, np.full(8, 7.0))
    buffer.add([episode(99)])
    top = [node for node in range(12) if buffer._sum_segment[node] == pytest.approx(7.0**0.6)]
    drawn = buffer.sample_transitions(3000, beta=0.0)
    new = {node for t, node in zip(drawn.transitions, drawn.nodes, strict=True) if t.action.startswith("q99.")}
    assert len(new) == 4 and new <= set(top)


@pytest.mark.parametrize("change", [{"capacity": 1000}, {"alpha": 0.9}])
def test_what_a_large_buffer_held_is_kept_by_one_with_other_settings(monkeypatch, change):
    """Fails where the limit of bytes on the way is the default."""
    settings = {"capacity": 400, "alpha": 0.6}
    first = TextReplayBuffer(env="E", max_bytes=1 << 40, **settings)
    first.add([episode(number) for number in range(20)])
    state = first.get_state()
    monkeypatch.setitem(TextReplayBuffer.__init__.__kwdefaults__, "max_bytes", 1)
    second = TextReplayBuffer(env="E", max_bytes=1 << 40, **{**settings, **change})
    second.set_state(state)
    assert [e.id_ for e in second.episodes] == [e.id_ for e in first.episodes]


def test_capacity_evicts_the_oldest_episodes_whole():
    buffer = filled(10, capacity=20)
    numbers = {t.action[1:].split(".")[0] for t in buffer.sample_transitions(1000, beta=0.0).transitions}
    assert buffer.get_num_timesteps() == 20 and numbers == {"5", "6", "7", "8", "9"}


def test_a_transition_that_made_room_is_held_no_more_and_gives_its_priority_to_nobody():
    """Its node is another's by then, or nobody's, and a priority there would be drawn."""
    buffer = filled(8, capacity=32)
    sample = buffer.sample_transitions(200, beta=0.0)
    assert buffer.holds(sample).all()
    buffer.add([episode(number) for number in range(8, 12)])
    expected = [int(t.action[1:].split(".")[0]) >= 4 for t in sample.transitions]
    assert buffer.holds(sample).tolist() == expected and 0 < sum(expected) < 200
    copy = TextReplayBuffer(env="E", capacity=32)
    copy.set_state(buffer.get_state())
    assert copy.holds(sample).tolist() == expected


def test_bytes_are_bounded():
    limit = 3 * size_of(episode(0))
    buffer = filled(10, max_bytes=limit)
    assert buffer.num_bytes <= limit and buffer.get_num_episodes() == 3
    buffer.add([episode(50, text="long " * 1000)])
    assert buffer.get_num_episodes() == 1  # one that is too large alone stays until the next comes
    buffer.add([episode(51)])
    assert buffer.num_bytes <= limit and buffer.capacity == 50_000


def test_state_brings_back_the_same_draws():
    buffer = filled(6, capacity=16)
    sample = buffer.sample_transitions(16, beta=0.4)
    buffer.update_priorities_of(sample.nodes, np.linspace(0.1, 3.0, 16))
    state = pickle.loads(pickle.dumps(buffer.get_state()))
    other = TextReplayBuffer(env="E", capacity=16, seed=123)
    other.set_state(state)
    for _ in range(3):
        mine, restored = buffer.sample_transitions(50, beta=0.7), other.sample_transitions(50, beta=0.7)
        assert [t.id for t in mine.transitions] == [t.id for t in restored.transitions]
        np.testing.assert_array_equal(mine.weights, restored.weights)
        assert [t.state for t in mine.transitions] == [t.state for t in restored.transitions]
    assert other.num_bytes == buffer.num_bytes


def test_bad_input():
    with pytest.raises(ValueError, match="empty"):
        TextReplayBuffer(env="E").sample_transitions(1, beta=0.0)
    unfinished = SingleAgentEpisode(id_="open")
    unfinished.add_env_reset("Go.", {})
    with pytest.raises(ValueError, match="has not ended"):
        TextReplayBuffer(env="E").add([unfinished])


class TestOnDisk:
    def test_what_was_saved_is_loaded(self, tmp_path):
        buffer = filled(300)
        sample = buffer.sample_transitions(50, beta=0.4)
        buffer.update_priorities_of(sample.nodes, np.linspace(0.1, 3, 50))
        buffer.save(tmp_path / "a")
        other = TextReplayBuffer(env="E", seed=7)
        other.load(tmp_path / "a")
        mine, theirs = buffer.sample_transitions(200, beta=0.4), other.sample_transitions(200, beta=0.4)
        assert [repr(t) for t in mine.transitions] == [repr(t) for t in theirs.transitions] and mine.nodes == theirs.nodes
        np.testing.assert_array_equal(mine.weights, theirs.weights)

    def test_each_episode_is_written_once(self, tmp_path):
        """Full files are links to those of the checkpoint before; only the last one is new."""
        buffer = filled(600)
        buffer.save(tmp_path / "a")
        buffer.add([episode(number) for number in range(600, 610)])
        buffer.save(tmp_path / "b")
        inodes = [{path.name: path.stat().st_ino for path in (tmp_path / name).glob("episodes*")} for name in "ab"]
        assert inodes[0].keys() == inodes[1].keys() == {f"episodes_{number:08d}.pkl" for number in range(3)}
        assert [name for name in sorted(inodes[0]) if inodes[0][name] == inodes[1][name]] == sorted(inodes[0])[:2]
        other = TextReplayBuffer(env="E")
        other.load(tmp_path / "a")  # the later checkpoint left the former's last file alone
        assert other.get_num_episodes() == 600

    def test_evicted_episodes_leave_the_disk(self, tmp_path):
        buffer = TextReplayBuffer(env="E", capacity=1200, seed=0)  # 300 episodes
        for start in range(0, 2000, 50):
            buffer.add([episode(number) for number in range(start, start + 50)])
            buffer.save(tmp_path / str(start))
        last = tmp_path / "1950"
        assert len(list(last.glob("episodes*"))) <= 3
        other = TextReplayBuffer(env="E", capacity=1200)
        other.load(last)
        assert [e.id_ for e in other.episodes] == [f"episode-{number}" for number in range(1700, 2000)]
        other.add([episode(2000)])
        other.save(tmp_path / "next")
        third = TextReplayBuffer(env="E", capacity=1200)
        third.load(tmp_path / "next")
        assert [e.id_ for e in third.episodes] == [f"episode-{number}" for number in range(1701, 2001)]

    def test_a_new_alpha_and_capacity_are_in_force(self, tmp_path):
        buffer = filled(10, alpha=0.6)
        sample = buffer.sample_transitions(400, beta=0.0)
        priorities = {node: float(node + 1) for node in set(sample.nodes)}
        buffer.update_priorities_of(list(priorities), np.array(list(priorities.values())))
        by_step = {(i, t): priorities.get(node) for i, t, node in buffer._indices}
        buffer.save(tmp_path / "a")
        for alpha in (1.0, 0.3):
            other = TextReplayBuffer(env="E", capacity=20, alpha=alpha, seed=0)
            other.load(tmp_path / "a")
            assert [e.id_ for e in other.episodes] == [f"episode-{number}" for number in range(5, 10)]
            masses = np.array([other._sum_segment[node] for *_, node in other._indices])
            expected = np.array([by_step[i, t] ** alpha for i, t, _ in other._indices])
            np.testing.assert_allclose(masses, expected, rtol=1e-9)
        uniform = TextReplayBuffer(env="E", alpha=0.0)
        uniform.load(tmp_path / "a")
        masses = np.array([uniform._sum_segment[node] for *_, node in uniform._indices])
        np.testing.assert_allclose(masses, 1.0, rtol=1e-9)

    def test_loading_replaces_what_was_there(self, tmp_path):
        buffer = filled(5)
        buffer.save(tmp_path / "a")
        buffer.add([episode(number) for number in range(5, 9)])
        buffer.load(tmp_path / "a")
        assert [e.id_ for e in buffer.episodes] == [f"episode-{number}" for number in range(5)]
