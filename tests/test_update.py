"""``NLAC.training_step`` and what it trains on, exactly, on stand-ins for everything that would need Ray, vLLM or a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numbered_episodes import episode as numbered_episode
from scripted_roles import transition

from rllib_nlac import NLACConfig, nlac
from rllib_nlac.ablations import Frozen
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm, last_losses
from rllib_nlac.algorithm.logs import LOGGED
from rllib_nlac.algorithm.replay import REPLAY_BUFFER, ReplayAlgorithm
from rllib_nlac.checkpoints.checkpoint import CheckpointError
from rllib_nlac.diagnostics.notices import Notices
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.language.report import StageReport
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, shard_evenly
from rllib_nlac.learner.losses import priorities
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import ReplaySample, TextReplayBuffer
from rllib_nlac.sampling.env_runner import NEXT_EPISODE
from rllib_nlac.types import BellmanTarget, Generation, Refinement

COUNT = 10
NAN = float("nan")


def generation(*ids: int) -> Generation:
    return Generation((1, 2), ids, np.zeros(len(ids), np.float32), True, 0)


def items(count: int = COUNT):
    """Transitions of which 3 and 7 have no target and every third no refinement."""
    transitions = [replace(transition(i), generation=generation(100 + i)) for i in range(count)]
    transitions = [replace(t, generation=replace(t.generation, prompt_ids=(50, i))) for i, t in enumerate(transitions)]
    targets = [
        BellmanTarget(t, None if i in (3, 7) else generation(200 + i, 201), None, None, None, (60, t.id))
        for i, t in enumerate(transitions)
    ]
    refinements = [
        Refinement(t, (), None, None, generation(300 + i) if i % 3 else None, False, "refined" if i % 3 else "yes_skipped")
        for i, t in enumerate(transitions)
    ]
    return transitions, targets, refinements


def sample_of(transitions) -> ReplaySample:
    weights = np.linspace(0.1, 1.0, len(transitions)).astype(np.float32)
    return ReplaySample(transitions, weights, [40 + i for i in range(len(transitions))])


@pytest.fixture()
def make():
    """An NLAC whose parts are told to it and not built."""

    def make(steps: int = 0, **settings) -> NLAC:
        algorithm = NLAC.__new__(NLAC)
        config = NLACConfig().environment("TwentyQuestions")
        config.training(train_batch_size_per_learner=COUNT, minibatch_size=4)
        for key, value in settings.items():
            setattr(config, key, value)
        algorithm.config = config
        algorithm.rng = np.random.default_rng(0)
        algorithm.stages = SimpleNamespace(rng=np.random.default_rng(1))
        algorithm.metrics = SimpleNamespace(log_time=lambda *_: _Nothing(), log_value=lambda *_, **__: None)
        algorithm.env_steps_sampled = lambda: steps
        algorithm.env_runner_group = algorithm.collector = None
        algorithm.notices = Notices()
        algorithm.watch, algorithm.examination = Watch(algorithm), SimpleNamespace(fixed=())
        algorithm.weight_version = 5
        algorithm._iteration = 3
        return algorithm

    return make


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class TestSequences:
    def test_each_losses_weights_are_coefficient_times_importance_over_the_number_in_its_minibatch(self, make):
        """Fails without the importance weights, with the batch's number in the minibatch's place, with swapped roles."""
        transitions, targets, refinements = items()
        sample = sample_of(transitions)
        algorithm = make(policy_loss_coeff=0.5)
        found = {(s.role, s.item): s for s in algorithm.sequences_of(sample, targets, refinements)}
        critics, policies = [i for i in range(COUNT) if i not in (3, 7)], [i for i in range(COUNT) if i % 3]
        assert found.keys() == {(CRITIC, i) for i in critics} | {(POLICY, i) for i in policies}
        for (role, i), s in found.items():
            members = critics if role == CRITIC else policies
            size = sum(j // 4 == i // 4 for j in members)
            coefficient = 1.0 if role == CRITIC else 0.5
            assert s.minibatch == i // 4 and s.weight == pytest.approx(coefficient * sample.weights[i] / size, rel=1e-6)
            assert s.prompt_ids == ((60, i) if role == CRITIC else (50, i))
            assert s.answer_ids == ((200 + i, 201) if role == CRITIC else (300 + i,))
            assert s.origin == f"transition {i}"  # messages about a step that was stopped name it

    def test_a_minibatch_weighs_its_refinements_relative_to_each_other(self, make):
        """Rejected ones count little beside accepted ones; where there are no others they count in full."""
        transitions, targets, refinements = items(8)
        refinements = [
            replace(r, generation=generation(300), weight=w)
            for r, w in zip(refinements, (1, 0.1, 0.1, 1, 0.1, 0.1, 0.1, 0.1), strict=True)
        ]
        sample = replace(sample_of(transitions), weights=np.ones(8, np.float32))
        weights = [s.weight for s in make().sequences_of(sample, targets, refinements) if s.role == POLICY]
        assert weights == pytest.approx([1 / 2.2, 0.1 / 2.2, 0.1 / 2.2, 1 / 2.2, *[0.25] * 4])

    def test_epochs(self, make):
        transitions, targets, refinements = items()
        algorithm = make(num_epochs=3)
        sequences = algorithm.sequences_of(sample_of(transitions), targets, refinements)
        by_epoch = [[s for s in sequences if s.minibatch // 3 == epoch] for epoch in range(3)]
        assert {s.minibatch for s in sequences} == set(range(9))
        for epoch, own in enumerate(by_epoch):
            assert sorted(s.item for s in own if s.role == CRITIC) == [i for i in range(COUNT) if i not in (3, 7)]
            assert sorted(s.item for s in own if s.role == POLICY) == [i for i in range(COUNT) if i % 3]
            sizes = [len({s.item for s in own if s.minibatch == epoch * 3 + step}) for step in range(3)]
            assert max(sizes) <= 4
        # The first pass is in the order of the draws, the others are shuffled, each in its own way.
        orders = [[s.item for s in own if s.role == CRITIC] for own in by_epoch]
        assert orders[0] == sorted(orders[0]) and len({tuple(order) for order in orders}) == 3

    def test_a_coefficient_of_0_or_a_frozen_critic_switches_a_loss_off(self, make):
        transitions, targets, refinements = items()
        sample, algorithm = sample_of(transitions), make(policy_loss_coeff=0.0)
        assert {s.role for s in algorithm.sequences_of(sample, targets, refinements)} == {CRITIC}
        algorithm = make()
        algorithm.variant = Frozen()
        assert {s.role for s in algorithm.sequences_of(sample, targets, refinements)} == {POLICY}


class TestPriorities:
    def test_what_is_not_known_is_not_taken_for_nothing_to_learn(self, make):
        transitions, _, _ = items(6)
        reasons = ["refined", "yes_skipped", "unparsed_future", "unparsed_critique", "unparsed_action", "not_refined"]
        refinements = [
            Refinement(t, (), None, None, generation(1) if reason == "refined" else None, False, reason)
            for t, reason in zip(transitions, reasons, strict=True)
        ]
        losses = make().policy_losses(np.array([2.0, NAN, NAN, NAN, NAN, NAN]), refinements)
        np.testing.assert_array_equal(losses, [2.0, 0.0, NAN, NAN, NAN, 0.0])

    def test_an_action_that_is_trained_on_and_has_no_loss_yet_is_not_known(self, make):
        """Fails where all that has no loss counts as learned."""
        (t,), _, _ = items(1)
        refinement = Refinement(t, (), None, None, generation(1), False, "refined")
        assert np.isnan(make().policy_losses(np.array([NAN]), [refinement])).all()

    def test_where_a_part_is_judged_they_are_the_critics(self, make):
        _, _, refinements = items(4)
        assert np.isnan(make(judged_fraction=0.99).policy_losses(np.ones(4), refinements)).all()

    def test_without_a_trained_critic_they_are_the_policys_even_so(self, make):
        _, _, refinements = items(4)
        algorithm = make(judged_fraction=0.5)
        algorithm.variant = Frozen()
        assert np.isfinite(algorithm.policy_losses(np.ones(4), refinements)).all()

    def test_dropping_a_loss_by_chance_makes_no_transition_rarer(self):
        """All lose alike, and a third did not parse: with 0 for what is not known it would be drawn 0.5^0.6 = 0.66 times as
        often as the others, with the batch's mean exactly as often."""
        critic, policy = np.ones(300), np.ones(300)
        policy[::3] = NAN
        mass = priorities(critic, policy) ** 0.6
        assert mass[::3].mean() / mass[1::3].mean() == pytest.approx(1.0)
        critic[1::3] = NAN
        np.testing.assert_allclose(priorities(critic, policy), 2.001)

    def test_of_several_epochs_the_last_counts_whichever_learner_had_it(self):
        """Steps are divided by length, so that the learners of an item change: fails where the last learner's rows count."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 30, 40)
        sequences = [
            TrainingSequence((1,) * int(lengths[i]), (2,), CRITIC, int(i), epoch * 10 + place // 4, 1.0)
            for epoch in range(3)
            for place, i in enumerate(rng.permutation(40))
        ]
        shards = shard_evenly(sequences, 2)
        half = len(shards) // 2
        tables = [
            np.array([(s.item, s.role, s.minibatch, float(s.minibatch), 1.0) for s in own])
            for own in (shards[:half], shards[half:])
        ]
        owners = {i: {n for n, t in enumerate(tables) if i in t[:, 0]} for i in range(40)}
        assert any(len(own) == 2 for own in owners.values())
        losses = last_losses(tables, 40)
        last = {s.item: s.minibatch for s in sequences}
        assert losses[CRITIC].tolist() == [last[i] for i in range(40)] and np.isnan(losses[POLICY]).all()

    def test_losses_by_role_and_item(self):
        rows = [[0, CRITIC, 0, 1.5], [0, POLICY, 0, 2.5], [2, CRITIC, 1, 3.5], [-1, CRITIC, 9, 8.0], [3, CRITIC, 9, 9.0]]
        losses = last_losses([np.array([[*row, 1.0] for row in rows]), np.zeros((0, 5))], 3)
        np.testing.assert_array_equal(losses[CRITIC], [1.5, NAN, 3.5])
        np.testing.assert_array_equal(losses[POLICY], [2.5, NAN, NAN])

    def test_a_step_that_was_stopped_says_nothing_unless_it_was_the_only_one(self):
        rows = [[0, CRITIC, 0, 1.5, 1.0], [0, CRITIC, 1, 7.0, np.inf], [1, CRITIC, 1, 2.5, np.nan], [2, CRITIC, 1, NAN, NAN]]
        assert last_losses([np.array(rows)], 3)[CRITIC].tolist() == [1.5, np.inf, np.inf]

    def test_without_a_trained_critic_a_turn_that_was_not_judged_keeps_its_own(self, make):
        """Fails where it counts as learned, so that it is hardly drawn again."""
        (one, other), _, _ = items(2)
        algorithm, found = make(judged_fraction=0.5), []
        algorithm.variant = Frozen()
        refinements = [
            Refinement(one, (), None, None, generation(1), False, "refined"),
            Refinement(other, (), None, None, None, False, "not_judged"),
        ]
        algorithm.sequences_of, algorithm.check_lessons = lambda *_: ["s"], lambda sequences: None
        algorithm.learn = lambda sequences, count: {CRITIC: np.array([NAN, NAN]), POLICY: np.array([2.0, NAN])}

        class Enough(Exception):
            pass

        def prioritise(sample, new):
            found.extend(new)
            raise Enough

        algorithm.prioritise = prioritise
        batch = SimpleNamespace(sample=SimpleNamespace(transitions=[one, other]), refinements=refinements, targets=[])
        with pytest.raises(Enough):
            algorithm.learn_from(batch)
        assert np.isfinite(found[0]) and np.isnan(found[1])


class TestStep:
    """Who is called with what, in which order."""

    def run(self, make, monkeypatch, targets=None, **settings):
        calls: list[tuple] = []
        transitions, own_targets, refinements = items()
        full = sample_of(transitions)
        algorithm = make(**settings)
        algorithm.collect = lambda: calls.append(("collect",)) or ["episode"]
        algorithm.replay = lambda episodes: calls.append(("replay", episodes)) or full
        report = StageReport()

        def stages_run(asked):
            calls.append(("stages", asked))
            return targets if targets is not None else own_targets, refinements, report

        algorithm.stages.run = stages_run
        algorithm.recorder = SimpleNamespace(
            begin=lambda *a: calls.append(("begin_record", *a)), end=lambda learned: calls.append(("end_record", learned))
        )
        losses = {CRITIC: np.linspace(1, 2, COUNT), POLICY: np.where(np.arange(COUNT) % 3, 0.5, NAN)}
        algorithm.learn = lambda sequences, count: calls.append(("learn", sequences, count)) or losses
        algorithm.local_replay_buffer = SimpleNamespace(
            update_priorities_of=lambda *a: calls.append(("priorities", *a)), holds=lambda s: np.ones(len(s.nodes), bool)
        )
        algorithm.sync_weights = lambda: calls.append(("sync",))
        monkeypatch.setattr(nlac, "log_stages", lambda *a: calls.append(("log_stages", a[1])))
        monkeypatch.setattr(nlac, "log_replay", lambda *a: calls.append(("log_replay", *a[1:])))
        algorithm.training_step()
        return calls, full, report, losses

    def test_the_stages_in_their_order(self, make, monkeypatch):
        calls, sample, report, losses = self.run(make, monkeypatch)
        assert [call[0] for call in calls] == [
            *("collect", "replay", "stages", "log_stages", "begin_record"),
            *("learn", "priorities", "end_record", "log_replay", "sync"),
        ]
        by_name = {call[0]: call[1:] for call in calls}
        assert by_name["replay"] == (["episode"],)
        assert by_name["stages"] == (sample.transitions,) and by_name["log_stages"] == (report,)
        sequences, count = by_name["learn"]
        assert count == COUNT and len(sequences) == 8 + 6
        nodes, values = by_name["priorities"]
        expected = priorities(losses[CRITIC], np.where(np.arange(COUNT) % 3, 0.5, 0.0))
        assert nodes == sample.nodes and values.tolist() == expected.tolist()
        buffer, *rest = by_name["log_replay"]
        assert hasattr(buffer, "update_priorities_of") and rest == [sample, 5]
        (learned,) = by_name["end_record"]
        assert by_name["begin_record"][0].report is report and (
            learned.critic_loss is losses[CRITIC] and learned.policy_loss is losses[POLICY]
        )

    def test_where_nothing_parses_nothing_is_learned_or_synced(self, make, monkeypatch):
        transitions, _, _ = items()
        unparsed = [BellmanTarget(t, None, None, None, None) for t in transitions]
        calls, *_ = self.run(make, monkeypatch, targets=unparsed, policy_loss_coeff=0.0)
        assert [call[0] for call in calls] == [*("collect", "replay", "stages", "log_stages", "begin_record", "end_record")]
        assert calls[-1] == ("end_record", None)


class TestReplay:
    @pytest.mark.parametrize(
        ("steps", "final", "beta"), [(0, 100, 0.4), (50, 100, 0.7), (100, 100, 1.0), (1000, 100, 1.0), (1, 0, 1.0), (1, 1, 1.0)]
    )
    def test_beta_moves_linearly_to_its_last_value(self, make, steps, final, beta):
        algorithm = make(steps, replay_buffer_config={"beta": 0.4, "beta_final_timesteps": final})
        assert algorithm._beta() == pytest.approx(beta)
        falling = make(steps, replay_buffer_config={"beta": 0.4, "beta_final": 0.0, "beta_final_timesteps": final})
        assert falling._beta() == pytest.approx(0.4 - (beta - 0.4) * 0.4 / 0.6)

    def drawing(self, make, monkeypatch, steps=0, **settings):
        algorithm = make(steps, **settings)
        log: list[tuple] = []
        monkeypatch.setattr(nlac.LanguageAlgorithm, "collect", lambda self: log.append(("collect",)) or ["episode"])
        algorithm.local_replay_buffer = SimpleNamespace(
            add=lambda episodes: log.append(("add", episodes)),
            sample_transitions=lambda *a: log.append(("draw", *a)) or "drawn",
        )
        return algorithm, log

    def test_what_was_collected_is_kept_before_anything_is_drawn(self, make, monkeypatch):
        algorithm, log = self.drawing(
            make, monkeypatch, 50, n_step=3, replay_buffer_config={"beta": 0.5, "beta_final_timesteps": 100}
        )
        assert algorithm.replay(algorithm.collect()) == "drawn"
        assert log == [("collect",), ("add", ["episode"]), ("draw", COUNT, 0.75, 3)]

    def test_without_logs_the_first_iteration_collects(self, make):
        algorithm = make()
        algorithm._iteration = 0
        assert not algorithm.is_learning_offline
        algorithm.config.offline_iterations = 1
        assert algorithm.is_learning_offline

    @pytest.mark.parametrize("logged", [True, False])
    def test_logged_dialogues_are_in_the_buffer_before_anything_is_learned(self, make, monkeypatch, logged):
        monkeypatch.setattr(LanguageAlgorithm, "setup", lambda self, config: None)
        algorithm, added = make(prompts="compact"), []
        algorithm.chat = "chat"
        algorithm.local_replay_buffer = SimpleNamespace(add=added.append, num_evicted=0, num_added=0)
        data = SimpleNamespace(episodes=lambda chat, prompts: (chat, prompts.name), fingerprint="these", notice=None)
        algorithm.offline_data = data if logged else None
        ReplayAlgorithm.setup(algorithm, {})
        assert added == ([("chat", "compact")] if logged else [])

    @pytest.mark.parametrize(
        ("env", "iterations", "offline"),
        [("E", None, False), ("E", 3, False), ("E", 4, True), ("E", 0, False), (LOGGED, None, True), (LOGGED, 0, True)],
    )
    def test_offline_iterations_collect_nothing(self, make, monkeypatch, env, iterations, offline):
        algorithm, log = self.drawing(make, monkeypatch, env=env, offline_iterations=iterations)  # of which three are over
        assert algorithm.is_learning_offline is offline
        algorithm.replay(algorithm.collect())
        assert [entry[0] for entry in log] == (["draw"] if offline else ["collect", "add", "draw"])

    def test_the_buffer_is_what_the_config_says(self, make):
        settings = {"capacity": 123, "max_bytes": 456, "alpha": 0.3, "success_share": 0.6}
        config = make(seed=7, replay_buffer_config=settings).config
        buffer = NLAC._create_local_replay_buffer_if_necessary(None, config)
        assert {name: getattr(buffer, name) for name in settings} == settings and buffer.env == "TwentyQuestions"
        assert buffer.rng.random() == np.random.default_rng(7).random()
        config.seed = None
        plain = NLAC._create_local_replay_buffer_if_necessary(None, config)
        assert plain.rng.random() == np.random.default_rng(0).random()

    @pytest.mark.parametrize("kept", [True, False])
    def test_checkpoints_hold_the_buffer_where_asked_to(self, make, monkeypatch, tmp_path, kept):
        monkeypatch.setattr("rllib_nlac.checkpoints.shards.on_every_learner", lambda *_: [])
        algorithm = make(replay_buffer_config={"in_checkpoints": kept})
        algorithm.learner_group = None
        algorithm.local_replay_buffer = TextReplayBuffer(env="E")
        algorithm.save_parts(tmp_path)
        assert (tmp_path / REPLAY_BUFFER).is_dir() is kept
        loaded: list = []
        algorithm.local_replay_buffer = SimpleNamespace(load=lambda *a: loaded.append(a), num_added=0)
        algorithm.load_parts(tmp_path)
        assert loaded == ([(tmp_path / REPLAY_BUFFER,)] if kept else [])

    def test_what_was_played_after_a_checkpoint_without_buffer_is_played_again(self, make, monkeypatch, tmp_path):
        """The runners' counters go back, and so the same episodes come again; logged ones are kept."""
        monkeypatch.setattr("rllib_nlac.algorithm.algorithm.load_shards", lambda *_: None)
        algorithm = make(replay_buffer_config={"in_checkpoints": False})
        algorithm.chat = algorithm.learner_group = None
        logged, played = numbered_episode(0), numbered_episode(1)
        algorithm.offline_data = SimpleNamespace(episodes=lambda chat, prompts: [logged], fingerprint="these", notice=None)
        algorithm.local_replay_buffer = algorithm._create_local_replay_buffer_if_necessary(algorithm.config)
        algorithm._keep_logs()
        algorithm.local_replay_buffer.add([played])
        algorithm.load_parts(tmp_path)
        algorithm.local_replay_buffer.add([played])
        assert [e.id_ for e in algorithm.local_replay_buffer.episodes] == [logged.id_, played.id_]

    @pytest.mark.parametrize(("then", "now"), [("old", "new"), (None, "new"), ("old", None), ("old", "old")])
    def test_a_restored_buffer_says_that_it_was_not_filled_with_what_is_named_now(self, make, monkeypatch, tmp_path, then, now):
        """Nothing of it would ever be drawn. Fails where the checkpoint's buffer silently takes its place."""
        monkeypatch.setattr("rllib_nlac.checkpoints.shards.on_every_learner", lambda *_: [])
        monkeypatch.setattr("rllib_nlac.algorithm.algorithm.load_shards", lambda *_: None)
        monkeypatch.setattr(LanguageAlgorithm, "step", lambda self: {"went": "on"})

        def algorithm_with(logs):
            algorithm = make()
            algorithm.chat = algorithm.learner_group = algorithm.offline_data = None
            if logs:
                algorithm.offline_data = SimpleNamespace(
                    episodes=lambda chat, prompts: [numbered_episode(len(logs))], fingerprint=logs, notice=None
                )
            algorithm.local_replay_buffer = algorithm._create_local_replay_buffer_if_necessary(algorithm.config)
            algorithm._keep_logs()
            return algorithm

        former = algorithm_with(then)
        former.local_replay_buffer.add([numbered_episode(1)])
        former.save_parts(tmp_path)
        restored = algorithm_with(now)
        restored.load_parts(tmp_path)
        if now in (None, then):
            assert restored.step() == {"went": "on"}
        else:
            with pytest.raises(CheckpointError, match="names other dialogues than those that the checkpoint's replay buffer"):
                restored.step()
        assert restored.local_replay_buffer.logs == then  # also of the next checkpoint


def test_a_restored_run_goes_on_with_the_stages_random_state(make):
    algorithm = make()
    state = algorithm.own_state()
    expected = algorithm.stages.rng.random(3).tolist(), algorithm.rng.random(3).tolist()
    algorithm.weight_version = 99
    algorithm.set_own_state(state)
    assert (algorithm.stages.rng.random(3).tolist(), algorithm.rng.random(3).tolist()) == expected
    assert algorithm.weight_version == 5


def test_runners_that_are_away_for_a_while_play_no_episode_twice(make):
    """As after a look at a checkpoint with num_env_runners: 0. Fails where their counters are dropped meanwhile."""
    with_runners = {"env_runners": {0: {}, 1: {NEXT_EPISODE: 64}, 2: {NEXT_EPISODE: 48}}}
    algorithm = make()
    assert algorithm.collector is None
    algorithm.set_own_state({**algorithm.own_state(), **with_runners})
    counters = algorithm.own_state()["env_runners"]
    assert (counters[1], counters[2]) == ({NEXT_EPISODE: 64}, {NEXT_EPISODE: 48})


def test_the_algorithms_parts_are_its_stages_and_a_recorder_that_ends_with_it(make, monkeypatch):
    calls: list = []
    for name in ("setup", "cleanup"):
        monkeypatch.setattr(ReplayAlgorithm, name, lambda self, *given, name=name: calls.append((name, *given)))
    monkeypatch.setattr(NLAC, "make_stages", lambda self, kind, variant: f"stages of {kind.__name__}")
    monkeypatch.setattr(nlac, "Recorder", lambda *given: SimpleNamespace(close=lambda: calls.append("closed")))
    algorithm = make()
    algorithm.setup("config")
    assert algorithm.stages == "stages of LanguageStages" and calls == [("setup", "config")]
    assert algorithm.watch.examine is algorithm.examination
    algorithm.cleanup()
    assert calls[1:] == ["closed", ("cleanup",)]
    NLAC.cleanup(NLAC.__new__(NLAC))  # one that failed before it had a recorder
    assert calls[3:] == [("cleanup",)]


def test_the_states_of_every_evaluation_are_part_of_a_checkpoint(make):
    one, two = make(), make()
    one.examination.fixed = (transition(4),)
    two.set_own_state(one.own_state())
    assert two.examination.fixed == one.examination.fixed


def test_priorities_go_to_the_nodes_that_were_drawn_and_unknown_ones_change_nothing(make):
    algorithm, given = make(), []
    kept = np.array([True, True, True, True, False])
    algorithm.local_replay_buffer = SimpleNamespace(update_priorities_of=lambda *a: given.append(a), holds=lambda sample: kept)
    transitions, _, _ = items(5)
    algorithm.prioritise(sample_of(transitions), np.array([1.0, NAN, 3.0, NAN, 5.0]))
    ((nodes, values),) = given
    assert nodes == [40, 42] and values.tolist() == [1.0, 3.0]  # the last has made room for others
