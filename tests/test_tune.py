"""Sweeps: what a file may say, what is refused, and that a value changed by PBT is the one in force."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle, tune
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from rllib_nlac.command import search
from rllib_nlac.command.experiment import (
    ExperimentError,
    load_experiments,
    read_experiment,
    resolve,
    trainable_of,
    tune_arguments,
)

EXAMPLES = Path(__file__).parent.parent / "tuned_examples"


def experiment(**entry):
    config = {"prompts": "compact", **entry.pop("config", {})}
    return read_experiment("e", {"run": "NLAC", "env": "TwentyQuestions", "config": config, **entry}, "e")


class TestSearchSpaces:
    def test_become_tunes_own(self):
        config = {"lr": {"loguniform": [1e-4, 1e-2]}, "replay_buffer_config": {"alpha": {"uniform": [0, 1]}, "capacity": 9}}
        made = search.domain({**config, "tau": {"grid_search": [0.1, 0.2]}, "prompts": {"choice": ["compact", "default"]}})
        assert isinstance(made["lr"], tune.search.sample.Float) and 1e-4 <= made["lr"].sample() <= 1e-2
        assert made["replay_buffer_config"]["alpha"].upper == 1 and made["replay_buffer_config"]["capacity"] == 9
        assert made["tau"] == {"grid_search": [0.1, 0.2]} and made["prompts"].categories == ["compact", "default"]

    def test_every_value_and_both_ends_are_checked_before_anything_starts(self):
        for space in ({"choice": [0.1, 7]}, {"uniform": [0.5, 7]}, {"grid_search": [0.1, 7]}):
            with pytest.raises(ExperimentError, match=r"config\.tau is 7 and must be between 0 and 1"):
                experiment(config={"tau": space})
        with pytest.raises(ExperimentError, match="unknown key 'alhpa'"):
            experiment(config={"replay_buffer_config": {"alhpa": {"uniform": [0, 1]}}})

    @pytest.mark.parametrize("name", ["randint", "qrandint", "lograndint", "qlograndint"])
    def test_the_ends_of_whole_numbers_are_those_that_tune_draws(self, name):
        """Fails where rounded ones are taken to stop before their upper bound: 63 is no multiple of 8."""
        space = {name: [8, 64, 8] if name.startswith("q") else [8, 65]}
        (ends,) = {tuple(each["k"] for each in search.variants({"k": space}))}
        drawn = {search.domain(space).sample() for _ in range(500)}
        assert set(ends) == {8, 64} and min(drawn) >= 8 and max(drawn) <= 64
        assert 64 in drawn or not name.startswith("q")

    def test_one_takes_the_place_of_another_where_a_file_extends_one(self, tmp_path):
        """Fails where both are merged, as mappings are."""
        entry = {"run": "NLAC", "env": "GuessNumber", "config": {"prompts": "compact", "lr": {"uniform": [0.1, 0.2]}}}
        (tmp_path / "a.yaml").write_text(json.dumps(entry))
        (tmp_path / "b.yaml").write_text(json.dumps({"b": {"extends": "a.yaml", "config": {"lr": {"loguniform": [0.1, 0.2]}}}}))
        (one,) = load_experiments(tmp_path / "b.yaml")
        assert one.config["lr"] == {"loguniform": [0.1, 0.2]} and one.config["prompts"] == "compact"

    @pytest.mark.parametrize("space", [{"uniform": [1]}, {"loguniform": [0, 1]}, {"randint": [1]}])
    def test_a_malformed_range_is_named(self, space):
        with pytest.raises(ExperimentError, match=r"e, tau: \w+ .* is no range"):
            experiment(config={"tau": space})

    @pytest.mark.parametrize(
        ("config", "samples", "expected"),
        [
            ({"lr": 1e-3}, 1, 1),
            ({"lr": {"loguniform": [1e-4, 1e-2]}, "seed": {"choice": [0, 1]}}, 5, 5),  # drawn, and not each of them
            ({"lr": {"grid_search": [1, 2]}, "env_config": {"max_turns": {"grid_search": [4, 6, 8]}}}, 2, 12),
            ({"seed": {"grid_search": [1, 2]}}, -1, 0),
        ],
    )
    def test_their_number_of_trials_is_known(self, config, samples, expected):
        assert search.num_trials(config, samples) == expected


class TestSchedulers:
    def test_are_tunes_own(self):
        made = tune_arguments(experiment(metric="m", scheduler={"type": "asha", "max_t": 5}))
        assert isinstance(made["scheduler"], ASHAScheduler) and made["mode"] == "max" and made["metric"] == "m"
        mutations = {"lr": {"loguniform": [1e-4, 1e-2]}, "num_futures": [1, 2], "replay_buffer_config": {"alpha": [0.1, 0.9]}}
        made = tune_arguments(experiment(metric="m", scheduler={"type": "pbt", "hyperparam_mutations": mutations}))
        assert isinstance(made["scheduler"], PopulationBasedTraining)
        made = tune_arguments(experiment(metric="m", search_alg={"type": "optuna", "seed": 0}))
        assert type(made["search_alg"]).__name__ == "OptunaSearch"

    def test_a_search_algorithm_bears_results_between_evaluations(self):
        """Fails where Tune hands them on: Optuna ends the sweep by a KeyError, or learns nothing of a trial that ends so."""
        from optuna.trial import TrialState

        path = "evaluation/env_runners/success_rate"
        made = tune_arguments(
            experiment(
                config={"lr": {"loguniform": [1e-4, 1e-2]}, "evaluation_interval": 2},
                metric=path,
                search_alg={"type": "optuna"},
            )
        )["search_alg"]
        assert made.set_search_properties(path, "max", {"lr": tune.loguniform(1e-4, 1e-2)})
        made.suggest("t"), made.suggest("u")
        results = [{"training_iteration": 1}, {"training_iteration": 2, path: 0.4}, {"training_iteration": 3}]
        for result in results:
            made.on_trial_result("t", result)
            made.on_trial_result("u", {"training_iteration": result["training_iteration"]})
        made.on_trial_complete(trial_id="t", result=results[-1], error=False)
        made.on_trial_complete(trial_id="u", result={"training_iteration": 3})
        told, never = made._ot_study.trials
        assert (told.state, told.value, told.intermediate_values) == (TrialState.COMPLETE, 0.4, {2: 0.4})
        assert never.state == TrialState.PRUNED

    @pytest.mark.parametrize("name", ["hyperband", "hb_bohb"])
    def test_what_compares_trials_at_one_iteration_needs_an_evaluation_in_each(self, name):
        entry = {"metric": "evaluation/env_runners/success_rate", "scheduler": {"type": name, "max_t": 8}}
        with pytest.raises(ExperimentError, match=f"{name} compares.* needs evaluation_interval: 1; it is 2"):
            tune_arguments(experiment(config={"evaluation_interval": 2}, **entry))
        assert tune_arguments(experiment(config={"evaluation_interval": 1}, **entry))["scheduler"] is not None

    def test_what_pbt_changes_within_a_mapping_must_be_there(self):
        """Fails where it is found by a KeyError of Tune's at the first perturbation: Tune fills in whole keys alone."""
        pbt = {"type": "pbt", "hyperparam_mutations": {"replay_buffer_config": {"alpha": [0.0, 0.6]}, "lr": [0.1, 0.2]}}
        wrong = experiment(config={"replay_buffer_config": {"capacity": 9}}, metric="m", scheduler=pbt)
        with pytest.raises(ExperimentError, match="changes replay_buffer_config/alpha, which config does not set"):
            tune_arguments(wrong)

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 2**31), st.floats(0.5, 1.0), st.integers(64, 511))
    def test_pbt_stays_in_the_ranges_of_the_file(self, seed, fraction, batch):
        """Fails where it does as Tune by itself, which multiplies by 0.8 or 1.2: a trial would end as it is built anew."""
        ranges = {
            "judged_fraction": {"uniform": [0.5, 1.0]},
            "train_batch_size_per_learner": {"randint": [64, 512]},
            "replay_buffer_config": {"alpha": {"uniform": [0.5, 1.0]}},
        }
        first = {
            "judged_fraction": fraction,
            "train_batch_size_per_learner": batch,
            "tau": 0.1,
            "replay_buffer_config": {"alpha": fraction, "capacity": 9},
        }
        pbt = {"type": "pbt", "hyperparam_mutations": ranges, "resample_probability": 0.0}
        made = tune_arguments(experiment(config=first, metric="m", scheduler=pbt))["scheduler"]
        random.seed(seed)
        np.random.seed(seed)
        new, _ = made._get_new_config(SimpleNamespace(), SimpleNamespace(config=copy.deepcopy(first), evaluated_params={}))
        assert 0.5 <= new["judged_fraction"] <= 1.0 and 0.5 <= new["replay_buffer_config"]["alpha"] <= 1.0
        assert 64 <= new["train_batch_size_per_learner"] <= 511 and isinstance(new["train_batch_size_per_learner"], int)
        assert new["tau"] == 0.1 and new["replay_buffer_config"]["capacity"] == 9

    def test_what_pbt_may_set_is_checked_too(self):
        with pytest.raises(ExperimentError, match=r"config\.tau is 3"):
            experiment(metric="m", scheduler={"type": "pbt", "hyperparam_mutations": {"tau": [0.1, 3]}})

    def test_what_pbt_sets_within_a_mapping_is_checked_with_the_rest_of_it(self, tmp_path):
        """As PBT does it. Fails where the mapping is replaced: a task set without its files is none."""
        (tmp_path / "t.jsonl").write_text('{"env_str": "GuessNumber@{}"}\n')
        entry = {"env": "TaskSet", "config": {"env_config": {"train_files": str(tmp_path / "t.jsonl")}}, "metric": "m"}
        mutations = {"env_config": {"trusted": [True, False]}}
        experiment(**entry, scheduler={"type": "pbt", "hyperparam_mutations": mutations})

    @pytest.mark.parametrize("name", ["wandb", "mlflow"])
    def test_a_logger_without_its_package_says_what_to_install(self, name):
        try:
            __import__(name)
        except ImportError:
            with pytest.raises(ExperimentError, match=f"pip install {name}"):
                tune_arguments(experiment(loggers={name: {"project": "p"} if name == "wandb" else {}}))


class TestChosen:
    """What is said of the best trial of a sweep."""

    CONFIG: ClassVar = {"lr": {"uniform": [0.1, 0.5]}, "env_config": {"depth": {"choice": [1, 2]}}, "tau": 0.1}

    def test_of_what_a_scheduler_changes_it_is_what_was_in_force(self):
        """Fails where Tune's memory of the first values is shown: PBT leaves it as it was."""
        scheduler = {"type": "pbt", "hyperparam_mutations": {"lr": [0.1, 0.2], "num_futures": [1, 2, 3]}}
        best = SimpleNamespace(
            evaluated_params={"lr": 0.1, "env_config/depth": 2, "num_futures": 1},
            config={"lr": 0.2, "env_config": {"depth": 2}, "tau": 0.1, "num_futures": 3},
        )
        found = search.chosen(best, self.CONFIG, scheduler, "e")
        assert found == {"env_config": {"depth": 2}, "lr": 0.2, "num_futures": 3}

    @pytest.mark.parametrize("scheduler", [None, "asha", {"type": "asha", "max_t": 5}])
    def test_else_it_is_what_was_drawn(self, scheduler):
        drawn = {"lr": 0.1, "env_config/depth": 2}
        best = SimpleNamespace(evaluated_params=drawn, config={"lr": 0.1, "env_config": {"depth": 2}, "tau": 0.1})
        assert search.chosen(best, self.CONFIG, scheduler, "e") == drawn


@pytest.mark.parametrize("name", ["sweep", "pbt"])
def test_the_examples_are_sound(name):
    (one,) = load_experiments(EXAMPLES / f"twenty_questions_nlac_{name}.yaml")
    assert tune_arguments(one)["scheduler"] is not None and resolve(one).num_cpus_for_main_process == 1


class InForce(RLlibCallback):
    """Reports what the parts of the algorithm really use, and a score by which the second trial is the worse one."""

    def on_algorithm_init(self, *, algorithm, **kwargs):
        draw = algorithm.local_replay_buffer.sample_transitions

        def counted(count, *arguments):
            self.drawn = count
            return draw(count, *arguments)

        algorithm.local_replay_buffer.sample_transitions = counted

    def on_train_result(self, *, algorithm, result, **kwargs):
        learner = algorithm.learner_group._learner
        settings = algorithm.stages.settings
        result["in_force"] = {
            "lr": learner.trainer.engine.optimizer.param_groups[0]["lr"],
            "tau": learner.target.tau,
            "alpha": algorithm.local_replay_buffer._alpha,
            "num_futures": settings.num_futures,
            "num_refinements": settings.num_refinements,
            "action_temperature": settings.action.temperature,
            "runner_temperature": algorithm.env_runner.config.action_temperature,
            "batch": self.drawn,
            "prompt": algorithm.stages.prompts_for("TwentyQuestions").evaluate,
        }
        result["score"] = algorithm.config.grad_clip


@pytest.mark.long
def test_a_value_that_pbt_changed_is_in_force_after_it(ray_session, tmp_path):
    """Fails where restoring the donor's checkpoint brings its values back (ray#62173)."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # trials cannot import this file
    (one,) = load_experiments(EXAMPLES / "twenty_questions_nlac_pbt.yaml")
    for key in ("evaluation_interval", "evaluation_duration"):
        one.config.pop(key)
    one.config.update(
        callbacks=InForce,
        episodes_per_iteration=8,
        num_envs_per_env_runner=8,
        minibatch_size=16,
        train_batch_size_per_learner=32,
        grad_clip=tune.grid_search([1.0, 0.5]),
    )
    one.tune.update(metric="score", num_samples=1)
    one.tune["scheduler"] = {**one.tune["scheduler"], "perturbation_interval": 1, "resample_probability": 1.0}
    one.tune["scheduler"]["hyperparam_mutations"] = {
        "lr": [2e-4],
        "tau": [0.25],
        "num_futures": [3],
        "num_refinements": [2],
        "action_temperature": [0.9],
        "train_batch_size_per_learner": [48],
        "prompts": [{"extends": "compact", "name": "judge", "evaluate": "Judge.\n{futures}"}],
        "replay_buffer_config": {"alpha": [0.3]},
    }
    arguments = {**tune_arguments(one), "storage_path": str(tmp_path), "stop": {"training_iteration": 2}}
    analysis = tune.run(trainable_of(one), name="pbt", verbose=0, **arguments)
    results = [json.loads(line) for path in tmp_path.glob("pbt/*/result.json") for line in path.read_text().splitlines()]
    assert {trial.status for trial in analysis.trials} == {"TERMINATED"}
    exploited = [r for r in results if r["config"]["lr"] == 2e-4]
    assert exploited, "PBT never changed a trial"
    for result in exploited:
        found = result["in_force"]
        assert found["lr"] == 2e-4 and found["tau"] == 0.25 and found["alpha"] == 0.3
        assert (found["num_futures"], found["num_refinements"], found["batch"]) == (3, 2, 48)
        assert found["action_temperature"] == found["runner_temperature"] == 0.9 and found["prompt"].startswith("Judge.")
    untouched = [r["in_force"] for r in results if r["config"]["lr"] == 0.001]
    assert untouched and all((found["lr"], found["tau"], found["alpha"]) == (0.001, 0.01, 0.6) for found in untouched)


@pytest.mark.long
def test_tuner_restore_goes_on_from_the_last_checkpoint(ray_session, config, tmp_path):
    marker = tmp_path / "marker"

    class Crash(RLlibCallback):
        """Ends the trial's process, as a machine that goes down, once."""

        def on_train_result(self, *, algorithm, result, **kwargs):
            if algorithm.iteration == 2 and not marker.exists():
                marker.touch()
                os._exit(1)

    config.training(episodes_per_iteration=8, train_batch_size_per_learner=16, minibatch_size=16).callbacks(Crash)
    config.num_envs_per_env_runner = 8
    run_config = tune.RunConfig(
        name="crash",
        stop={"training_iteration": 3},
        storage_path=str(tmp_path),
        verbose=0,
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
    )
    (crashed,) = tune.Tuner("NLAC", param_space=config, run_config=run_config).fit()
    assert crashed.error and crashed.metrics["training_iteration"] == 1  # the second never arrived
    tuner = tune.Tuner.restore(str(tmp_path / "crash"), "NLAC", param_space=config, resume_errored=True)
    (resumed,) = tuner.fit()
    assert not resumed.error and resumed.metrics["training_iteration"] == 3
    assert resumed.metrics["env_runners"]["num_episodes_lifetime"] == 24 and resumed.metrics["iterations_since_restore"] == 2
