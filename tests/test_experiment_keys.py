"""Experiment files that cannot mean what they say: Tune's keys, YAML's traps, metrics that never come."""

from __future__ import annotations

import pytest
import yaml
from ray.tune import Callback

from rllib_nlac.command.experiment import EXAMPLE_METRIC, ExperimentError, load_experiments, read_experiment, tune_arguments
from rllib_nlac.command.tune_keys import MetricCheck, check_metrics, find_metric
from rllib_nlac.inputs import plain_yaml

EVALUATED = {"evaluation_interval": 2, "evaluation_duration": 8}


def check(**entry):
    entry = {"run": "NLAC", "env": "TwentyQuestions", **entry}
    return tune_arguments(read_experiment("e", entry, "e"))


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"num_samples": -2}, "num_samples is -2 and must be at least 1"),
        ({"num_samples": "3"}, "num_samples is '3' and must be"),
        ({"num_samples": -1}, "num_samples is -1, which never ends"),
        ({"mode": "maximum", "metric": "m"}, "mode is 'maximum' and must be max or min"),
        ({"mode": "max"}, "there is no metric that it is about"),
        ({"metric": ["m"]}, "must be a result's path"),
        ({"metric": EXAMPLE_METRIC}, f"metric: '{EXAMPLE_METRIC}' needs evaluation; set evaluation_interval"),
        ({"max_failures": 1.5}, "max_failures is 1.5"),
        ({"time_budget_s": 0}, "time_budget_s is 0 and must be a number of seconds above 0"),
        ({"max_concurrent_trials": -1}, "max_concurrent_trials is -1 and must be at least 1"),
        ({"storage_path": 3}, "storage_path is 3"),
        ({"loggers": ["wandb"]}, "loggers is .* must be a mapping"),
        ({"loggers": {"wandb": "nlac"}}, "wandb takes a mapping"),
        ({"scheduler": {"type": "ashaa"}, "metric": "m"}, "unknown scheduler 'ashaa'; did you mean 'asha'"),
        ({"scheduler": {"type": [1]}, "metric": "m"}, "unknown scheduler"),
        ({"scheduler": {"type": "asha", "max_tt": 3}, "metric": "m"}, "unknown key 'max_tt'.*did you mean 'max_t'"),
        ({"scheduler": {"type": "asha"}}, "scheduler need 'metric'"),
        ({"scheduler": {"max_t": 3}, "metric": "m"}, "name it by 'type'"),
        ({"loggers": {"wandbb": None}}, "unknown logger 'wandbb'.*did you mean 'wandb'"),
        ({"search_alg": {"type": "optuna", "sede": 1}, "metric": "m"}, "unknown key 'sede'; did you mean 'seed'"),
        ({"search_alg": "optunaa", "metric": "m"}, "unknown search algorithm 'optunaa'; did you mean 'optuna'"),
        ({"checkpoint_config": ["x"]}, "checkpoint_config is .* must be a mapping"),
        ({"checkpoint_config": {"num_to_kep": 2}}, "unknown key 'num_to_kep'; did you mean 'num_to_keep'"),
        ({"checkpoint_config": {"num_to_keep": 0}}, "num_to_keep is 0 and must be at least 1"),
        ({"checkpoint_config": {"checkpoint_frequency": -1}}, "checkpoint_frequency is -1"),
        ({"checkpoint_config": {"checkpoint_at_end": "yes"}}, "checkpoint_at_end is 'yes' and must be true or false"),
        ({"checkpoint_config": {"checkpoint_score_order": "best"}}, "must be max or min"),
        ({"stop": 5}, "stop is 5 and must be a mapping"),
        ({"stop": {"training_iteration": "8"}}, "training_iteration is '8' and must be a finite number"),
        ({"stop": {"training_iteration": float("nan")}}, "must be a finite number"),
        ({"stop": {"training_iteration": True}}, "must be a finite number"),
        ({"stop": {"training_iteration": -1}}, "training_iteration is -1 and must be above 0"),
        ({"stop": {"env_runners/num_episodes_lifetime": 0}}, "must be above 0"),
        ({"stop": {"env_runners": {"success_rate": 0.9}}}, "one path, as in 'env_runners/success_rate"),
        ({"stop": {1: 2}}, "must be the path of a result"),
        ({"stop": {EXAMPLE_METRIC: 0.9}}, "needs evaluation"),
        ({"config": [1]}, "config is .* must be a mapping"),
        ({"env": "TwentyQuestons"}, "environment: unknown key 'TwentyQuestons'; did you mean 'TwentyQuestions'"),
        ({"env": "CartPole-v1"}, "environment: unknown key 'CartPole-v1'"),
        (
            {"run": "PPO", "env": "TwentyQuestons", "config": {"language_model": "tiny"}},
            "unknown environment 'TwentyQuestons'; did",
        ),
        ({"config": {**EVALUATED, "evaluation_config": {"env": "TwentyQestions"}}}, "did you mean 'TwentyQuestions'"),
        ({"config": {"env_config": 5}}, "env_config is 5 and must be a mapping"),
        ({"scheduler": {"type": "pbt", "hyperparam_mutations": 5}, "metric": "m"}, "hyperparam_mutations is 5 and must map"),
        ({"scheduler": {"type": "pb2", "hyperparam_bounds": {"lr": 5}}, "metric": "m"}, "hyperparam_bounds is {'lr': 5}"),
        (
            {
                "checkpoint_config": {"checkpoint_score_attribute": EXAMPLE_METRIC, "checkpoint_frequency": 2},
                "config": {**EVALUATED, "evaluation_interval": {"choice": [2, 4]}},
            },
            "evaluation_interval must be one number where checkpoints are kept by",
        ),
        ({"config": {**EVALUATED, "evaluation_config": {"exploer": False}}}, "evaluation_config: unknown key 'exploer'"),
        (
            {"config": {**EVALUATED, "evaluation_config": {"action_temperature": -1}}},
            "e, evaluation_config: config.action_temperature is -1 and must not be negative",
        ),
        ({"config": {**EVALUATED, "evaluation_config": [1]}}, "evaluation_config is .* must be a mapping"),
        ({"config": {**EVALUATED, "evaluation_config": {"env_config": {"turns": 1}}}}, "did you mean 'max_turns'"),
    ],
)
def test_what_is_wrong_is_named(entry, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        check(**entry)


def test_what_never_comes_of_logs_alone_is_named():
    """Else such a run never ends: Tune waits for the first episode."""
    for metric in ("env_runners/num_episodes_lifetime", "num_env_steps_sampled_lifetime"):  # RLlib reports 0 of the second
        with pytest.raises(ExperimentError, match="never comes of logged dialogues alone; use training_iteration"):
            check_metrics([("stop", metric)], {"input_": "logs"}, "e")
    check_metrics([("stop", "training_iteration"), ("stop", "env_runners/success_rate")], {"env": "TwentyQuestions"}, "e")


def test_what_is_right_passes():
    made = check(
        num_samples=2,
        metric=EXAMPLE_METRIC,
        mode="min",
        max_failures=-1,
        time_budget_s=1.5,
        max_concurrent_trials=2,
        stop={EXAMPLE_METRIC: 0.9, "env_runners/episode_return_mean": -200},
        config=EVALUATED,
        checkpoint_config={"num_to_keep": None, "checkpoint_frequency": 0},
    )
    assert made["num_samples"] == 2 and made["mode"] == "min"
    assert check(num_samples=-1, time_budget_s=9)["num_samples"] == -1


class TestEvaluationsEnvironment:
    """RLlib merges evaluation_config over the run's own."""

    def test_it_completes_that_of_the_run(self, tmp_path):
        """Fails where it is checked alone: a task set without its files is none."""
        (tmp_path / "t.jsonl").write_text('{"env_str": "GuessNumber@{}"}\n')
        files = dict.fromkeys(("train_files", "val_files"), str(tmp_path / "t.jsonl"))
        config = {**EVALUATED, "env_config": files, "evaluation_config": {"env_config": {"split": "eval"}}}
        check(env="TaskSet", config=config)

    def test_what_it_leaves_of_another_environment_is_found(self):
        """Fails where it is checked alone: TextHouse's depth reaches GuessNumber."""
        evaluation = {"env": "GuessNumber", "env_config": {"max_turns": 9}}
        config = {**EVALUATED, "env_config": {"depth": 3, "house": 4}, "evaluation_config": evaluation}
        with pytest.raises(ExperimentError, match="e, evaluation_config: env_config of GuessNumber: unknown key 'depth'"):
            check(env="TextHouse", config=config)

    def test_of_logs_alone_it_is_the_only_one(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("{}")
        logs = {"input_": str(tmp_path), "evaluation_config": {"action_temperature": 0}}
        read_experiment("e", {"run": "NLAC", "config": logs}, "e")
        played = {"env": "TwentyQuestions", "env_config": {"turns": 3}}
        logs = {**EVALUATED, "input_": str(tmp_path), "evaluation_config": played}
        with pytest.raises(ExperimentError, match="did you mean 'max_turns'"):
            read_experiment("e", {"run": "NLAC", "config": logs}, "e")


@pytest.mark.parametrize("run", ["GRPO", "PPO", "APPO", "ScalarCritic"])
def test_what_a_gradient_needs_is_not_asked_of_an_evaluation(run, tmp_path):
    """A greedy evaluation of a policy that is trained at temperature 1."""
    for key, value in (("action_temperature", 0), ("action_top_p", 0.9)):
        entry = {"run": run, "env": "TwentyQuestions"}
        read_experiment("e", {**entry, "config": {**EVALUATED, "evaluation_config": {key: value}}}, "e")
        with pytest.raises(ExperimentError, match=f"^e: config.{key} is {value}"):
            read_experiment("e", {**entry, "config": {**EVALUATED, key: value}}, "e")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("e:\n  run: NLAC\n  run: PPO\n", "line 3, column 3: .*'run' is there twice, first in line 2"),
        ("e:\n  run: NLAC\ne:\n  run: PPO\n", "'e' is there twice"),
        ("e:\n\trun: NLAC\n", "line 2, column 1: .*YAML takes no tabs"),
        ("", "holds nothing; it must map experiment names"),
        ("# a comment\n", "holds nothing"),
        ("- run: NLAC\n", "holds a list; it must map"),
        ("run: NLAC\nenv: TwentyQuestions\n", "run: the experiment has no name"),
        ("e: NLAC\n", "e: it is 'NLAC'; it must map"),
        ("1: {run: NLAC, env: TwentyQuestions}\n", "the experiment's name, 1, must do as the name of a folder"),
        ("../x: {run: NLAC, env: TwentyQuestions}\n", "must do as the name of a folder"),
        ("e: {run: NLAC", "line 1, column 14: not valid YAML"),
        ("e: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        ("a: " + "[" * 3000, "nested too deeply"),
        (b"e: \xff\xfe", "is no UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(text, complaint, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ExperimentError, match=complaint) as found:
        load_experiments(path)
    assert str(path) in str(found.value)


def test_numbers_are_those_of_json_and_merges_still_work():
    text = "base: &b {lr: 1e-4, x: 1}\nmine: {<<: *b, x: 2, y: -2E+3, z: 1.5e3, name: e5, id: 0x1f, big: 1.e3}"
    assert plain_yaml.parse(text, "x")["mine"] == {
        "lr": 1e-4,
        "x": 2,
        "y": -2000.0,
        "z": 1500.0,
        "name": "e5",
        "id": 31,
        "big": 1000.0,
    }


def test_what_is_merged_and_merged_again_is_no_key_that_is_there_twice():
    text = "a: {b: &b {x: 1, y: 1}, c: {d: &d {<<: *b, y: 2}}}\ne: {<<: *d, z: 3}\nf: {<<: [*d, *b], y: 4}"
    assert plain_yaml.parse(text, "x") == yaml.safe_load(text)
    with pytest.raises(ValueError, match=r"line 2, column 19: .*'y' is there twice, first in line 2"):
        plain_yaml.parse("b: &b {x: 1}\nc: {<<: *b, y: 2, y: 3}", "x")


def test_a_file_holds_several_experiments(tmp_path):
    entry = {"run": "NLAC", "env": "TwentyQuestions"}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"a": entry, "b": entry}))
    assert [experiment.name for experiment in load_experiments(tmp_path / "x.yaml")] == ["a", "b"]


def test_what_extends_another_file_merges_its_mappings_and_replaces_everything_else(tmp_path):
    """Fails where lists are joined, and where two search spaces become one."""
    oracle = {"kind": "endpoint", "base_url": "http://localhost:1/v1", "model": "a"}
    config = {"env_config": {"words": ["cat", "dog"], "oracle": oracle}, "tau": {"choice": [0.1, 0.2]}, "lr": 1e-3}
    base = {"run": "NLAC", "env": "TwentyQuestions", "config": config}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    config = {"env_config": {"words": ["lamp"], "oracle": {"model": "b"}}, "tau": {"uniform": [0.1, 0.5]}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"e": {"extends": "base.yaml", "config": config}}))
    (experiment,) = load_experiments(tmp_path / "x.yaml")
    assert experiment.config == {
        "env": "TwentyQuestions",
        "env_config": {"words": ["lamp"], "oracle": {**oracle, "model": "b"}},
        "tau": {"uniform": [0.1, 0.5]},
        "lr": 1e-3,
    }


def test_what_says_nothing_takes_nothing_back_of_what_it_extends(tmp_path):
    """Fails where a ``config:`` whose keys are comments trains something else, and without an end."""
    base = {"run": "NLAC", "env": "TwentyQuestions", "stop": {"training_iteration": 5}, "config": {"lr": 0.25, "lora": None}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "x.yaml").write_text("e:\n  extends: base.yaml\n  stop:\n  config:\n    # lr: 1\n")
    (experiment,) = load_experiments(tmp_path / "x.yaml")
    assert experiment.stop == {"training_iteration": 5} and experiment.config["lr"] == 0.25
    with pytest.raises(
        ExperimentError, match="env_config is empty and must be a mapping; leave it out if there is nothing to say"
    ):
        read_experiment("e", {**base, "config": {"env_config": None}}, "e")


def test_two_environments_are_one_too_many():
    entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"env": "TextHouse"}}
    with pytest.raises(ExperimentError, match=r"env is 'TwentyQuestions', and config\.env is 'TextHouse': leave one"):
        read_experiment("e", entry, "e")
    read_experiment("e", {**entry, "config": {"env": "TwentyQuestions"}}, "e")


RESULT = {
    "training_iteration": 1,
    "config": {"success_rat": 1},
    "env_runners": {"num_episodes": 8, "success_rate": 0.5, "success_low": 0.1, "return": {"mean": 1.0}},
    "learners": {"default_policy": {"loss": 0.1}},
}


class TestMetrics:
    @pytest.mark.parametrize(
        ("metric", "found"),
        [
            ("training_iteration", True),
            ("env_runners/success_rate", True),
            ("success_rat", "did you mean 'env_runners/success_rate'?"),
            ("env_runners/success_rat", "did you mean 'env_runners/success_rate'?"),
            ("training_iterations", "did you mean 'training_iteration'?"),
            ("env_runners/return", "it is a group of them: env_runners/return/mean"),
            ("env_runners/" + 40 * "q", "there are env_runners/num_episodes, "),
            ("learners/default_policy/los", "did you mean 'learners/default_policy/loss'?"),
            ("evaluation/env_runners/success_rat", False),
            ("config/success_rat", True),
        ],
    )
    def test_of_a_result(self, metric, found):
        answer = find_metric(RESULT, metric)
        assert answer.startswith(found) if isinstance(found, str) else answer is found

    def test_what_comes_later_is_waited_for(self):
        evaluation = {"env_runners": {"num_episodes": 4, "success_rate": 1.0}}
        assert find_metric({**RESULT, "evaluation": {}}, "evaluation/env_runners/success_rat") is False
        answer = find_metric({**RESULT, "evaluation": evaluation}, "evaluation/env_runners/success_rat")
        assert answer == "did you mean 'evaluation/env_runners/success_rate'?"
        early = {"training_iteration": 1, "env_runners": {"num_episodes": 0, "steps": 9}, "learners": {}}
        assert find_metric(early, "env_runners/episode_return_mean") is False  # no episode has ended yet
        assert find_metric(early, "learners/default_policy/loss") is False  # nothing has been learned yet

    def test_a_run_ends_at_the_first_result_that_shows_it(self):
        check = MetricCheck([("stop", "training_iteration"), ("metric", "evaluation/env_runners/succes")], "e")
        assert isinstance(check, Callback)
        check.on_trial_result(1, [], None, RESULT)
        assert check.problem is None
        with pytest.raises(ExperimentError, match="e, metric: no result has 'evaluation/env_runners/succes'; did you mean"):
            check.on_trial_result(2, [], None, {**RESULT, "evaluation": {"env_runners": {"num_episodes": 1, "success": 1}}})
        assert check.problem
