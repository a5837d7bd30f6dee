"""What an evaluation asks the critic: it is compared with what came, changes nothing, and what falls meanwhile is said."""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_runs import ROOT
from numbered_episodes import episode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from scripted_engine import ScriptedEngine
from scripted_roles import SETTINGS, script, transition
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rllib_nlac.diagnostics.examination import Examiner, calibration, compared, examine, forks_of, log, predictions
from rllib_nlac.diagnostics.record import FOLDER, read_lines
from rllib_nlac.diagnostics.results import Run, with_beginning
from rllib_nlac.diagnostics.rules import DURING, critic_biased
from rllib_nlac.episode import TASK, TASK_SEED
from rllib_nlac.language.prediction import predicted_success
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import Future, Generation, Refinement, Transition, Weights


def generation(number: int) -> Generation:
    return Generation((1, 2), (number,), np.zeros(1, np.float32), True, number)


@pytest.fixture()
def small(config):
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=48, minibatch_size=24, tau=0.5)
    config.evaluation(evaluation_interval=1, evaluation_duration=32, evaluation_critic={"states": 24, "branches": 2})
    config.evaluation(evaluate_before_training=False)
    config.num_envs_per_env_runner = 16
    return config


def test_what_is_replayed_is_of_the_environment_that_was_trained_in(chat):
    stages = SimpleNamespace(settings=SETTINGS, purpose="")
    examiner = Examiner(stages, "Evaluated", 0, 1)
    place = (episode(0, 1), 0)
    assert [t.env for t in (*examiner.transitions([place]), *examiner.transitions([place], "Trained"))] == [
        "Evaluated",
        "Trained",
    ]


def trained(config, iterations: int = 2) -> tuple[list[dict], str]:
    """The results of a run, and its folder."""
    algorithm = config.build_algo()
    try:
        return [algorithm.train() for _ in range(iterations)], algorithm.logdir
    finally:
        algorithm.stop()


def test_an_evaluation_says_how_well_the_critic_tells_success_and_changes_nothing(small, ray_session, lent_engine, documented):
    without = small.copy(copy_frozen=False).evaluation(
        evaluation_critic={"states": 0, "fixed_states": 0}, evaluation_repeats={"tasks": 0}
    )
    (results, folder), (silent, silent_folder) = trained(small), trained(without)
    assert "critic" not in silent[-1]["evaluation"] and "repeated" not in silent[-1]["evaluation"]
    for one, other in zip(results, silent, strict=True):
        assert one["learners"]["default_policy"]["critic_loss"] == other["learners"]["default_policy"]["critic_loss"]
        assert one["evaluation"]["env_runners"]["success_rate"] == other["evaluation"]["env_runners"]["success_rate"]
    for result in results:
        critic = result["evaluation"]["critic"]
        known = critic["num_states"]
        assert known == pytest.approx(24 * (1 - critic["unparsed_rate"])) and known > 12
        assert sum(critic["reliability"]["count"]) == known
        assert sum(part["num_states"] for part in critic["by_turn"].values()) == known
        weighted = np.average(critic["reliability"]["predicted"], weights=critic["reliability"]["count"])
        assert critic["predicted_success"] == pytest.approx(weighted)
        assert 0 <= critic["brier"] <= 1 and (math.isnan(critic["auc"]) or 0 <= critic["auc"] <= 1)
        assert sum(part["num_states"] for part in critic["replayed"]["by_age"].values()) == critic["replayed"]["num_states"]
        refinement = critic["refinement"]
        assert 0 < refinement["num_states"] <= 24 and refinement["num_lost"] == 0
        difference = refinement["success_of_refined"] - refinement["success_of_action"]
        assert refinement["gain"] == pytest.approx(difference)
        assert result["evaluation"]["repeated"]["pass_at_4"] >= result["evaluation"]["repeated"]["success_rate"]
        assert result["evaluation"]["env_runners"]["action_entropy"] > 0
    assert {"state_1", "state_2", "state_3"} == results[0]["evaluation"]["critic"]["fixed"].keys()
    for result in results:  # each with its own iteration: RLlib gathers an iteration's metrics before it evaluates
        assert 0 < result["seconds"]["evaluation_critic"] < result["seconds"]["evaluation"] < result["time_this_iter_s"]
    assert not undocumented(results, documented) and not unlogged(results, documented)
    check_events(folder, results)
    states = [line for line in recorded(folder) if line["kind"] == "state"]
    assert len(states) == 3 * len(results) and not [line for line in recorded(silent_folder) if line["kind"] == "state"]
    for number in (1, 2, 3):  # each is one state, and not a new one each time
        own = [line for line in states if line["number"] == number]
        assert len({(str(line["state"]), line["action"]) for line in own}) == 1
        for line, result in zip(own, results, strict=True):
            said = result["evaluation"]["critic"]["fixed"][f"state_{number}"]
            assert any(each["success"] for each in line["futures"]) or not said["predicts_success"]


# What RLlib and Tune report of themselves; their documentation tells of it.
RLLIBS = re.compile(
    r"timers/|config/|perf/|.*_throughput/|learners/__all_modules__/|(evaluation/)?(env_runner_group|fault_tolerance)/"
    r"|.*(actor_manager_num_outstanding_async_reqs|num_healthy_workers|num_remote_worker_restarts|num_env_runners_dropped_lifetime)$"
    r"|learners/default_policy/(module_train_batch_size_mean|num_module_steps_trained\w*|num_\w*_parameters|total_loss|weights_seq_no)$"
    r"|.*/(episode_duration_sec_mean|num_env_steps_sampled_lifetime|agent_\w+|module_\w+)$|[^/]+$"
)


def paths_of(values: dict, prefix: str = "") -> set[str]:
    return {
        path
        for key, value in values.items()
        for path in (paths_of(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}"})
    }


@pytest.fixture
def documented(monkeypatch) -> str:
    """The tables of metrics on the page "Reading a run", as they are generated."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("metrics_reference").reference()


def undocumented(results: list[dict], documented: str) -> list[str]:
    """The metrics of a run that have no row in the generated tables."""
    rows = [line for line in documented.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    last = {name.rpartition("/")[2] for name in named}
    whole = {name.partition("/...")[0] for name in named if name.endswith("...")} | {"subgoals"}
    return sorted(
        path
        for path in paths_of(results[-1])
        if not RLLIBS.match(path)
        and path.rpartition("/")[2] not in last
        and not re.search(r"/stop_reason_|/wave_\d+", path)
        and whole.isdisjoint(path.split("/"))
    )


def unlogged(results: list[dict], documented: str) -> list[str]:
    """The rows of the generated tables about what every run reports, and this one does not."""
    missing = []
    for prefix in ("replay_buffer", "collection", "language_stages", "sync"):
        table = documented.partition(f"### `{prefix}`\n")[2].partition("\n### ")[0]
        names = re.findall(r"`([^`]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
        reported = {path.rpartition("/")[2] for path in paths_of(results[-1][prefix])}
        assert names, prefix
        missing += [f"{prefix}/{name}" for name in names if name.rpartition("/")[2] not in reported]
    return missing


def recorded(folder: str) -> list[dict]:
    """Lines of the evaluations' record, the first evaluation first."""
    files = sorted((Path(folder) / FOLDER).glob("evaluation_*.jsonl"))
    return [line for file in files for line in read_lines(file)[0]]


def check_events(folder: str, results: list[dict]) -> None:
    """A transition of each iteration is TensorBoard text."""
    events = EventAccumulator(folder, size_guidance={"tensors": 0})
    events.Reload()
    assert [each.step for each in events.Tensors("transition/text_summary")] == [r["training_iteration"] for r in results]


def played(number: int, length: int = 4, won: bool = True, task: int | None = None):
    made = episode(number, length, truncated=not won)
    made.custom_data[TASK_SEED] = 1000 + number
    if task is not None:
        made.custom_data[TASK] = task
    return made


@pytest.fixture()
def make_examiner(chat, compact):
    """An examiner, and the engine that it asks."""

    def make(answer=None, futures: int = 3, seed: int = 0, **settings):
        engine = ScriptedEngine(chat, answer or script())
        stages = LanguageStages(engine, chat, lambda env: compact, replace(SETTINGS, **settings), seed=5)
        return Examiner(stages, "TwentyQuestions", seed, futures), engine, stages

    return make


class TestExaminer:
    def test_turns_are_drawn_evenly_once_each_by_its_own_seed(self, make_examiner):
        episodes = [played(0, 1), played(1, 3), played(2, 6)]
        every = {(e.id_, t) for e in episodes for t in range(len(e))}
        counts: Counter = Counter()
        for seed in range(600):
            drawn = [(e.id_, t) for e, t in make_examiner(seed=seed)[0].draw(episodes, 4)]
            assert len(set(drawn)) == 4
            counts.update(drawn)
        assert counts.keys() == every and all(180 < count < 300 for count in counts.values())  # 240 of each
        first, again, other = (make_examiner(seed=seed)[0].draw(episodes, 4) for seed in (7, 7, 8))
        assert first == again != other
        assert len(make_examiner()[0].draw(episodes, 99)) == 10 and make_examiner()[0].draw([], 4) == []

    def test_turns_are_those_of_their_episodes_under_numbers_of_their_own(self, make_examiner):
        episodes = [played(3), played(4, won=False)]
        turns = make_examiner()[0].transitions([(episodes[1], 2), (episodes[0], 2), (episodes[1], 3)])
        assert [(t.id, t.action, t.episode_success) for t in turns] == [
            (0, "q4.2", False),
            (1, "q3.2", True),
            (2, "q4.3", False),
        ]
        assert {t.env for t in turns} == {"TwentyQuestions"}

    def test_it_asks_k_futures_of_each_turn_with_seeds_of_their_own_and_leaves_the_stages_alone(self, make_examiner):
        examiner, engine, stages = make_examiner(futures=3)
        turns = examiner.transitions([(played(0), t) for t in range(4)])
        before = stages.rng.bit_generator.state, stages.settings
        assert [len(own) for own in examiner.predict(turns)] == [3] * 4
        assert len({request.seed for _, request in engine.requests}) == len(engine.requests) == 12
        assert {weights for weights, _ in engine.requests} == {Weights.POLICY}
        examiner.predict(turns, Weights.TARGET)
        assert {weights for weights, _ in engine.requests[12:]} == {Weights.TARGET}
        examiner.refine(turns)
        assert (stages.rng.bit_generator.state, stages.settings) == before
        asked = [(weights, request) for weights, request in engine.requests]
        again, other = make_examiner(futures=3), make_examiner(futures=3, seed=1)
        for examiner_, *_ in (again, other):
            examiner_.predict(turns)
            examiner_.predict(turns, Weights.TARGET)
            examiner_.refine(turns)
        assert again[1].requests == asked
        assert not {r.seed for _, r in other[1].requests} & {r.seed for _, r in asked}

    def test_one_round_of_advice_whatever_training_does(self, make_examiner):
        """Further rounds would judge the refined action again; a rejected one is compared all the same."""
        examiner, engine, _ = make_examiner(num_refinements=3, rejected_weight=0.0)
        (refinement,) = examiner.refine(examiner.transitions([(played(0), 1)]))
        assert refinement.action == "Is it alive?" and not refinement.kept and refinement.weight == 1.0
        assert len(engine.calls) == 3 and examiner.refine([]) == [] and examiner.predict([]) == []

    def test_what_does_not_parse_is_left_out_and_counted(self, make_examiner):
        futures = iter(["Future: won SUCCESS", "rubbish", "Future: lost FAILURE", "rubbish", "rubbish", "rubbish"])
        examiner, _, _ = make_examiner(script(future=None), futures=3)
        examiner._stages.engine.answer = lambda prompt, weights: next(futures)
        turns = examiner.transitions([(played(0), 0), (played(1, won=False), 0)])
        found = calibration(turns, examiner.predict(turns), [1, 1], "turn")
        assert found["num_states"] == 1 and found["unparsed_rate"] == 0.5
        assert (found["predicted_success"], found["success"], found["brier"]) == (0.5, 1.0, 0.25)


def turn(success: bool) -> Transition:
    return replace(transition(), episode_success=success)


def hopes(*well: bool) -> list[Future]:
    return [Future("", each) for each in well]


def test_the_figures_of_turns_are_given_in_all_and_by_their_sizes():
    turns = [turn(True), turn(False), turn(True), turn(False), turn(True)]
    futures = [hopes(True, True), hopes(False, True), [], hopes(False, False), hopes(True, False, False, False)]
    predicted, came, known = predictions(turns, futures)
    assert (predicted.tolist(), came.tolist(), known) == ([1.0, 0.5, 0.0, 0.25], [True, False, False, True], [0, 1, 3, 4])
    found = calibration(turns, futures, [0, 1, 1, 2, 3], "age")
    assert found["unparsed_rate"] == pytest.approx(0.2) and found["num_states"] == 4 and found["auc"] == 0.75
    assert found["brier"] == pytest.approx((0 + 0.25 + 0 + 0.75**2) / 4)
    assert found["by_age"].keys() == {"0", "1", "2_to_3"} and found["by_age"]["2_to_3"]["num_states"] == 2
    assert found["by_age"]["2_to_3"]["auc"] == 1.0 and found["by_age"]["0"]["predicted_success"] == 1.0
    assert found["by_age"]["1"].keys() == {"num_states", "auc", "brier", "predicted_success", "success"}
    assert found["reliability"] == {"predicted": [0.0, 0.25, 0.5, 1.0], "came": [0.0, 1.0, 0.0, 1.0], "count": [1, 1, 1, 1]}
    assert math.isnan(calibration([], [], [], "age")["unparsed_rate"])


class TestForks:
    def refined(self, episode, t: int, kept: bool = False, parsed: bool = True) -> Refinement:
        judged = replace(transition(action="Is it big?"), generation=generation(7))
        own = generation(8) if parsed else None
        return Refinement(judged, (), None, "Is it alive?", own, kept, "refined")

    def test_each_turn_goes_on_so_often_with_either_action_and_the_same_seeds(self):
        one, two, other = played(1, task=5), played(2, task=5), played(3, task=6)
        places = [(one, 2), (one, 3), (two, 0), (other, 1), (played(4, task=7), 0), (played(5, task=8), 0)]
        refinements = [self.refined(*place) for place in places]
        refinements[4], refinements[5] = self.refined(*places[4], kept=True), self.refined(*places[5], parsed=False)
        starts = forks_of(places, refinements, 2)
        assert [start.name for start in starts] == [
            f"fork-{number:06d}-{arm}-{branch:04d}"
            for number in (0, 3)  # one turn of a task, and only where the action is another
            for arm in ("action", "refined")
            for branch in range(2)
        ]
        assert [start.prefix for start in starts] == [places[0]] * 4 + [places[3]] * 4
        assert [start.task_seed for start in starts] == [1001] * 4 + [1003] * 4
        assert [start.turn.token_ids for start in starts] == [(7,), (7,), (8,), (8,)] * 2
        seeds = [start.sampling_seed for start in starts]
        assert seeds[0:2] == seeds[2:4] and seeds[4:6] == seeds[6:8] and len(set(seeds)) == 4

    def test_what_came_of_them_is_counted_by_states(self):
        """The refined action wins one state and ties another; of a third one fork was lost, and of a fourth all were."""
        outcomes = {
            0: ((False, False), (True, True)),
            1: ((True, False), (False, True)),
            2: ((True, True), (False,)),
            3: ((), ()),
        }
        starts, episodes = [], []
        for number, arms in outcomes.items():
            for arm, own in zip(("action", "refined"), arms, strict=True):
                starts += [Start(f"fork-{number:06d}-{arm}-{branch:04d}", 0, 0) for branch in range(2)]
                for branch, won in enumerate(own):
                    episodes.append(episode(0, truncated=not won))
                    episodes[-1].id_ = f"fork-{number:06d}-{arm}-{branch:04d}"
        found = compared(episodes, starts)
        assert (found["num_states"], found["num_decided"], found["num_lost"]) == (2, 1, 2)
        assert found["win_rate"] == 1 and found["gain"] == 0.5
        assert found["success_of_action"] == 0.25 and found["success_of_refined"] == 0.75
        assert compared([], [])["num_lost"] == 0 and compared([], starts)["num_lost"] == 4


class TestExamine:
    def figures(self, make_examiner, branches: int, replayed, play=lambda starts: []):
        examiner, engine, _ = make_examiner(futures=2)
        episodes = [played(0, won=True, task=0), played(1, won=False, task=1)]
        return examine(examiner, episodes, replayed, 9, 5, branches, play), engine

    def test_turns_of_the_evaluation_by_their_places_and_of_the_buffer_by_their_ages(self, make_examiner):
        replayed = [episode(9, 1), episode(8, 1), episode(2, 1), episode(12, 1)]  # each of the weights of its number
        for each in replayed:
            each.custom_data[TASK_SEED] = 0
        replayed.append(episode(9, 1))  # of a log, and so of no age
        found, engine = self.figures(make_examiner, 0, replayed)
        assert found["num_states"] == 5 and found["replayed"]["num_states"] == 5 and "refinement" not in found
        assert found["by_turn"].keys() <= {"1", "2_to_3", "4_to_7"}  # the first turn is number 1
        ages = {name: part["num_states"] for name, part in found["replayed"]["by_age"].items()}
        assert ages == {"0": 2, "1": 1, "4_to_7": 1}  # weights of a later number are as new as can be
        assert len(engine.requests) == 2 * (5 + 5)
        assert "replayed" not in self.figures(make_examiner, 0, [])[0]

    def test_refined_actions_are_played_on(self, make_examiner):
        asked: list = []
        found, _ = self.figures(make_examiner, 3, [], lambda starts: asked.extend(starts) or [])
        assert len(asked) == 2 * 3 * found["refinement"]["num_lost"] > 0

    def test_figures_are_booked_below_the_evaluation_and_lists_as_they_stand(self):
        metrics = MetricsLogger(root=True)
        log(metrics, {"auc": 0.5, "by_turn": {"1": {"brier": 0.25}}, "reliability": {"count": [1, 2]}})
        critic = metrics.reduce()["evaluation"]["critic"]
        assert critic["auc"].peek() == 0.5 and critic["by_turn"]["1"]["brier"].peek() == 0.25
        assert critic["reliability"]["count"].peek() == [1, 2]
        log(metrics, {"auc": 0.7})
        assert metrics.reduce()["evaluation"]["critic"]["auc"].peek() == 0.7  # of the latest, not a mean


def test_the_predicted_chance_is_the_share_of_futures_that_end_well():
    futures = [Future("", True), Future("", False), Future("", True), Future("", True)]
    assert predicted_success(futures) == 0.75 and predicted_success([]) is None


def evaluation(success: float, auc: float, predicted: float, pass_at_4: float, states: int = 400) -> dict:
    return {
        "env_runners": {"success_rate": success, "success_low": success - 0.03, "success_high": success + 0.03},
        "critic": {
            "auc": auc,
            "predicted_success": predicted,
            "success": success,
            "bias_error": 0.01,
            "num_states": states,
        },
        "repeated": {"success_rate": success, "pass_at_2": pass_at_4, "pass_at_4": pass_at_4, "num_tasks": 200},
    }


class TestRules:
    """What is told during a run and in its report."""

    def said(self, *evaluations: dict) -> dict[str, str | None]:
        results = [
            {"training_iteration": i, "config": {"evaluation_interval": 1}, "evaluation": each}
            for i, each in enumerate(evaluations, start=1)
        ]
        run = Run(Path(), "", results)
        return {rule.__name__: text for rule in DURING if (text := rule(run))}

    def test_what_falls_as_success_rises_is_said(self):
        said = self.said(evaluation(0.4, 0.8, 0.42, 0.9), evaluation(0.6, 0.6, 0.9, 0.65))
        assert "AUC fell from 0.80 to 0.60" in said["critic_forgets"]
        assert "hopes for more than comes: it predicts 0.90 where 0.60 came" in said["critic_biased"]
        assert "pass@4 fell from 0.90 to 0.65" in said["less_variety"]

    def test_what_falls_with_success_is_no_news(self):
        said = self.said(evaluation(0.6, 0.8, 0.62, 0.9), evaluation(0.4, 0.6, 0.42, 0.65))
        assert said.keys() == {"fell_back"} and "Success fell from 0.60 (iteration 1) to 0.40" in str(said)

    def test_what_may_be_chance_is_not_said(self):
        few = {"states": 20}
        assert not self.said(evaluation(0.4, 0.8, 0.42, 0.9, **few), evaluation(0.6, 0.65, 0.62, 0.85, **few))

    def test_without_a_critic_nothing_is_said(self):
        plain = [{"env_runners": evaluation(s, 0, 0, 0)["env_runners"]} for s in (0.4, 0.6)]
        assert not self.said(*plain)

    def test_a_slow_fall_is_held_against_the_best_and_not_the_last(self):
        falling = [evaluation(0.2 + 0.2 * i, 0.80 - 0.06 * i, 0.2 + 0.2 * i, 0.9 - 0.06 * i) for i in range(4)]
        said = self.said(*falling)
        assert (
            "AUC fell from 0.80 to 0.62" in said["critic_forgets"] and "pass@4 fell from 0.90 to 0.72" in said["less_variety"]
        )
        assert not self.said(*falling[:2])  # 0.06 is not worth a word

    def test_success_that_rose_by_chance_is_no_news_of_the_critic(self):
        assert "critic_forgets" not in self.said(evaluation(0.5, 0.8, 0.5, 0.9), evaluation(0.55, 0.6, 0.55, 0.9))

    def test_a_small_fall_is_not_worth_a_word_however_sure(self):
        many = [evaluation(s, a, s, p, states=10**6) for s, a, p in ((0.4, 0.8, 0.9), (0.6, 0.75, 0.85))]
        for each in many:
            each["repeated"]["num_tasks"] = 10**6
        assert not self.said(*many)

    def test_a_critic_that_expects_too_little_is_said_too(self):
        said = self.said(evaluation(0.4, 0.8, 0.42, 0.9), evaluation(0.8, 0.8, 0.3, 0.9))
        assert said.keys() == {"critic_biased"} and "expects less than comes: it predicts 0.30 where 0.80 came" in str(said)

    def test_of_a_critic_before_training_no_bias_is_said(self):
        first = {
            "config": {"evaluation_interval": 4},
            "training_iteration": 1,
            "before_training": evaluation(0.4, 0.5, 0.9, 0.5),
        }
        run = Run(Path(), "", with_beginning([first]))
        assert run.evaluated and critic_biased(run) is None

    def test_other_numbers_of_attempts_are_not_compared(self):
        fewer = evaluation(0.6, 0.8, 0.62, 0.65)
        fewer["repeated"] = {"success_rate": 0.6, "pass_at_2": 0.65, "pass_at_8": 0.65, "num_tasks": 200}
        assert not self.said(evaluation(0.4, 0.8, 0.42, 0.9), fewer)
