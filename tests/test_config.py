"""Configuration and experiment files: what is wrong is said before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from stand_ins import stand_in_for_smollm2
from typer.testing import CliRunner

from rllib_nlac import NLACConfig
from rllib_nlac.ablations import ABLATIONS, FreshActions, Hindsight
from rllib_nlac.algorithm.model_defaults import ModelDefaults
from rllib_nlac.algorithms import OURS, STOCK_ON_TEXT
from rllib_nlac.baselines.grpo import GRPO
from rllib_nlac.baselines.nlql import NLQL
from rllib_nlac.baselines.rft import RFT
from rllib_nlac.baselines.scalar_critic import ScalarCritic
from rllib_nlac.command import search
from rllib_nlac.command.cli import app
from rllib_nlac.command.experiment import ExperimentError, check_resources, load_experiments, resolve, trainable_of
from rllib_nlac.command.progress import read_result
from rllib_nlac.diagnostics.results import evaluated, lookup
from rllib_nlac.engine.places import Node
from rllib_nlac.envs.miniwob.env import MiniWoB
from rllib_nlac.names import unknown_key
from rllib_nlac.nlac import NLAC, PRESETS

ROOT = Path(__file__).parent.parent
NEEDS = {
    "math_reasoning_nlac_qwen2.5_7b": "no file matches 'data/math.jsonl'",
    "tau_bench_nlac_qwen2.5_7b": "needs τ-bench: pip install",
    "tau_bench_airline_react": "needs τ-bench: pip install",
}
try:
    MiniWoB()
except ValueError:
    NEEDS["miniwob_nlac_qwen2.5_7b"] = "the environment MiniWoB needs"
EXAMPLES = sorted(Path(__file__).parent.parent.glob("tuned_examples/*.yaml"))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("num_futures", 0, "num_futures is 0 and must be at least 1"),
        ("num_refinements", -1, "must not be negative"),
        ("num_next_actions", 0, "num_next_actions is 0 and must be at least 1"),
        ("judged_fraction", 0.0, "must be above 0 and at most 1"),
        ("rejected_weight", 1.5, "must be between 0 and 1"),
        ("episodes_per_iteration", 0, "must be at least 1"),
        ("tau", 1.5, "between 0"),
        ("deepspeed_config", {"zero_optimization": {"stage": 4}}, "zero_optimization.stage of 0, 1, 2 or 3"),
        ("optimizer", {"weight_decai": 0.1}, "did you mean 'weight_decay'"),
        ("minibatch_size", 4096, "must not exceed the batch, train_batch_size_per_learner times the learners, 512"),
        ("max_critique_tokens", 512, "max_critique_tokens is 512, and the context, prompt and answer together, is 512 tokens"),
        ("max_context", 32, "max_critique_tokens is 32, and the context"),
        *(
            (key, None, f"config.{key} is None and must be a mapping")
            for key in ("engine_config", "deepspeed_config", "optimizer", "learner_model", "evaluation_critic")
        ),
        ("deepspeed_config", {"zero_optimization": 2}, "must have a mapping at zero_optimization"),
        ("deepspeed_config", {"bf16": True}, "must have a mapping at bf16"),
        ("critic_input", "random", "one of predicted, backed_up"),
        ("train_on_yes", "maybe", "one of success, always, never"),
        ("action_format", "xml", "one of plain, react"),
        ("learner_model", {"packing": "on"}, r"learner_model\['packing'\] is 'on' and must be one of auto, always, never"),
        ("learner_model", {"dtype": "float16"}, "one of auto, float32, bfloat16"),
        ("action_temperature", -1.0, "must not be negative"),
        ("num_env_runners", 2, "num_engines"),
        ("evaluation_num_env_runners", 1, "evaluation_num_env_runners is 1 and must be 0 where num_engines is 0"),
        ("evaluation_parallel_to_training", True, "must be False: evaluations ask engines and learner"),
        ("explore", False, "explore is False and changes nothing here: set action_temperature to 0"),
        ("engine_config", {"max_num_seq": 8}, "did you mean 'max_num_seqs'"),
        ("replay_buffer_config", {"capaciti": 8}, "did you mean 'capacity'"),
        ("prompts", "compakt", "no prompt set"),
        ("max_context", 100_000, "reads at most 512"),
        ("language_model", "./missing", "does not exist"),
        ("train_batch_size", 128, "train_batch_size is 128 and has no effect here: set train_batch_size_per_learner"),
        ("gamma", 0.5, "gamma is 0.5 and has no effect: this algorithm discounts nothing"),
        ("clip_rewards", True, "clip_rewards is True and has no effect here"),
        ("observation_filter", "MeanStdFilter", "has no effect here: texts are neither clipped nor scaled"),
        ("deepspeed_config", {"gradient_clipping": 0.5}, "has 'gradient_clipping': remove it and set grad_clip instead"),
        ("deepspeed_config", {"scheduler": {"type": "WarmupLR"}}, r"lr is .* and has no effect beside deepspeed_config"),
        ("engine_config", {"extra": ["seed"]}, "extra must be a mapping of vLLM's arguments"),
        ("engine_config", {"extra": {"seed": 1}}, "extra has 'seed': leave it out, set seed instead"),
        ("engine_config", {"extra": {"logprobs_mode": "raw_logprobs"}}, "this package relies on its own value"),
        ("num_gpus", 1, "num_gpus is 1 and reserves none here: set num_gpus_per_learner"),
        ("num_gpus_per_engine", 1, "num_gpus_per_engine is 1 and needs num_engines of at least 1"),
    ],
)
def test_a_wrong_value_names_key_and_fix(config, key, value, complaint):
    config.validate()
    setattr(config, key, value)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        config.validate()


@pytest.mark.parametrize("kind", [GRPO, RFT])
def test_keys_of_nlac_that_another_algorithm_does_not_read_are_refused(kind):
    """Fails where a tau that is left in a file costs a copy of the weights that nothing answers with."""
    config = kind.get_default_config().environment("TwentyQuestions")
    config.copy(copy_frozen=False).training(lr=1e-3).validate()
    for key, value, complaint in (
        ("tau", 0.01, "tau is 0.01 and has no effect: this algorithm has no target weights"),
        ("train_batch_size", 256, "has no effect here: an iteration learns from all that it played"),
    ):
        with pytest.raises(ValueError, match=complaint):
            config.copy(copy_frozen=False).training(**{key: value}).validate()
    ScalarCritic.get_default_config().environment("TwentyQuestions").training(gamma=0.5, tau=0.1).validate()


def test_a_path_may_begin_at_home(tmp_path, monkeypatch, config):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(config.model_path, tmp_path / "models" / "own")
    (tmp_path / "mine.yaml").write_text("extends: compact\nname: mine\n")
    config.language(language_model="~/models/own", prompts="~/mine.yaml").validate()
    assert config.prompts_for("TwentyQuestions").name == "mine" and config.model_path == str(tmp_path / "models" / "own")
    (tmp_path / "models" / "own" / "config.json").rename(tmp_path / "models" / "own" / "adapter_config.json")
    with pytest.raises(FileNotFoundError, match=r"holds an adapter alone.*rllib export --merge"):
        config.copy(copy_frozen=False).validate()


def test_a_minibatch_is_part_of_what_all_learners_draw_and_of_nothing_without_replay(config):
    """Fails where the bound is one learner's part, or is asked of algorithms that draw nothing."""
    config.learners(num_learners=2).training(train_batch_size_per_learner=64, minibatch_size=128).validate()
    with pytest.raises(ValueError, match="minibatch_size is 129 and must not exceed the batch"):
        config.training(minibatch_size=129).validate()
    GRPO.get_default_config().environment("TwentyQuestions").training(minibatch_size=1024).validate()


def test_where_no_step_is_made_no_schedule_over_steps_is_taken(tmp_path):
    (tmp_path / "log.jsonl").write_text("{}")
    config = NLACConfig().offline_data(input_=[str(tmp_path)]).training(lr=1e-3)
    config.copy(copy_frozen=False).validate()
    with pytest.raises(ValueError, match=r"lr is .* and counts environment steps, and learning from logs alone makes none"):
        config.training(lr=[[0, 1e-3], [1000, 1e-5]]).validate()


def test_an_engine_needs_a_gpu_for_each_of_its_parts(config):
    config.engines(num_engines=1, num_gpus_per_engine=2, engine_config={"tensor_parallel_size": 2}).validate()
    config.engines(num_gpus_per_engine=0.5, engine_config={}).validate()
    with pytest.raises(ValueError, match=r"num_gpus_per_engine is 1 and must be at least.*tensor_parallel_size, 4"):
        config.engines(num_gpus_per_engine=1, engine_config={"tensor_parallel_size": 4}).validate()


def test_an_engine_is_not_left_without_a_gpu(config):
    """Learners apart have the GPUs, and the trial's own process none."""
    config.learners(num_gpus_per_learner=1).validate()
    config.learners(num_learners=1)
    with pytest.raises(ValueError, match=r"num_engines is 0 and must be at least 1, with num_gpus_per_engine, where learners"):
        config.validate()
    config.engines(num_engines=1, num_gpus_per_engine=1).validate()


def test_an_engine_in_the_learners_process_has_its_gpu_alone(config):
    config.engines(engine_config={"tensor_parallel_size": 2}).validate()  # on CPUs
    with pytest.raises(ValueError, match=r"tensor_parallel_size of 2, and the engine has the 1 GPU of its process"):
        config.learners(num_gpus_per_learner=1).validate()


def test_an_optimizer_on_the_host_is_given_cores(config):
    """Ray would let it compute with one thread."""
    config.deepspeed(deepspeed_config={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    config.learners(num_learners=1).validate()
    config.learners(num_gpus_per_learner=1).engines(num_engines=1, num_gpus_per_engine=1)
    with pytest.raises(ValueError, match=r"num_cpus_per_learner is 'auto' and gives a learner with a GPU one thread"):
        config.validate()
    config.learners(num_cpus_per_learner=4).validate()


def test_only_training_is_played_ahead_and_needs_remote_runners_for_it(config):
    config.env_runners(num_env_runners=1, max_staleness=1).engines(num_engines=1)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=0).validate()
    with pytest.raises(ValueError, match=r"max_staleness is 1 and needs remote EnvRunners \(num_env_runners > 0\)"):
        config.env_runners(num_env_runners=0).validate()


def test_only_stored_actions_are_judged_by_their_targets(config):
    config.training(critic_input="backed_up").validate()
    for kind in (FreshActions, NLQL):
        with pytest.raises(ValueError, match="speaks of stored actions, and this algorithm judges new ones"):
            kind.get_default_config().environment("TwentyQuestions").training(critic_input="backed_up").validate()


@pytest.mark.parametrize("cls", [*OURS.values(), *STOCK_ON_TEXT.values()])
def test_a_class_derived_from_ours_is_the_one_its_configuration_builds(cls):
    derived = type("Derived", (cls,), {})
    assert (derived.get_default_config().algo_class, cls.get_default_config().algo_class) == (derived, cls)


def test_what_a_derived_class_does_otherwise_counts_where_its_configuration_is_checked():
    class OfMine(NLAC):
        variant = FreshActions.variant

    with pytest.raises(ValueError, match="speaks of stored actions, and this algorithm judges new ones"):
        OfMine.get_default_config().environment("TwentyQuestions").training(critic_input="backed_up").validate()


@pytest.mark.parametrize("cls", [NLAC, *ABLATIONS.values()])
def test_another_preset_gives_back_the_algorithms_own_defaults(cls):
    twice = cls.get_default_config().training(preset="long_horizon").training(preset="paper")
    assert twice.to_dict() == cls.get_default_config().training(preset="paper").to_dict()


@pytest.mark.parametrize(("key", "instead"), [("fp16", "learner_model: {dtype: bfloat16}"), ("optimizer", "lr and optimizer")])
def test_what_a_key_of_ours_decides_is_refused_among_deepspeeds(config, key, instead):
    with pytest.raises(ValueError, match=f"config.deepspeed_config has '{key}': remove it and set {instead} instead"):
        config.deepspeed(deepspeed_config={key: {}}).validate()


def test_an_iteration_that_would_never_end_is_refused():
    config = OURS["ReAct"].get_default_config().environment("TwentyQuestions").language(language_model="tiny")
    with pytest.raises(ValueError, match="min_train_timesteps_per_iteration is 1 and is never reached, for nothing is trained"):
        config.reporting(min_train_timesteps_per_iteration=1).validate()


def test_hindsight_reads_whole_episodes():
    config = Hindsight.get_default_config().environment("TwentyQuestions")
    config.validate()
    assert (config.n_step, config.examination.states, config.algo_class) == (1000, 0, Hindsight)
    for asked in ({"branches": 4}, {"states": 0}, {"states": 8, "fixed_states": 0}):
        config = Hindsight.get_default_config().environment("TwentyQuestions").evaluation(evaluation_critic=asked)
        with pytest.raises(ValueError, match=r"evaluation_critic is .* and asks for predictions, and this algorithm reads"):
            config.validate()


@pytest.mark.parametrize(
    ("key", "value"), [("evaluate_before_training", True), ("evaluation_critic", {"states": 8}), ("evaluation_duration", 64)]
)
def test_what_is_said_of_evaluations_is_not_said_within_evaluation_config(key, value):
    """Fails where it passes, and is ignored."""
    config = NLACConfig().environment("TwentyQuestions").evaluation(**{key: value})
    config.evaluation(evaluation_config={"action_temperature": 0.5, "evaluation_repeats": {"tasks": 4}}).validate()
    with pytest.raises(ValueError, match=f"evaluation_config has '{key}', which has no effect there: set it beside"):
        config.evaluation(evaluation_config={key: value}).validate()


def test_what_a_configuration_leaves_open_its_model_brings():
    config = NLACConfig().environment("TwentyQuestions")
    config.validate()
    assert config.model_defaults == ModelDefaults("compact", 12, 24, 32, False, "model")
    assert config.language(prompts="default", max_action_tokens=7).model_defaults == ModelDefaults(
        "default", 7, 24, 32, False, "model"
    )
    other = NLACConfig().language(language_model="Qwen/Qwen2.5-7B-Instruct")
    assert other.model_defaults == ModelDefaults("default", 128, 192, 192) and other.stage_settings.critique.max_tokens == 192


def test_a_preset_comes_first_and_everything_else_over_it():
    config = NLACConfig().training(preset="long_horizon", n_step=5)
    assert (config.n_step, config.num_refinements, config.judge_weights) == (5, 4, "initial")
    for keys in ({"n_step": 5, "preset": "long_horizon"}, {"preset": "long_horizon", "n_step": 5}):
        assert NLACConfig().update_from_dict(keys).n_step == 5
    assert NLACConfig().update_from_dict(config.to_dict()).n_step == 5
    again = NLACConfig().training(preset="long_horizon").training(preset="paper")  # fails where the first one's keys stay
    assert {key: getattr(again, key) for key in PRESETS["long_horizon"]} == {
        key: getattr(NLACConfig(), key) for key in PRESETS["long_horizon"]
    }
    with pytest.raises(ValueError, match=r"config\.preset: unknown preset 'long_horizn'; did you mean 'long_horizon'"):
        NLACConfig().training(preset="long_horizn")


def test_training_takes_our_keys_and_rllibs(config):
    config.training(num_futures=3, lr=5e-4, grad_clip=0.5)
    assert (config.num_futures, config.lr, config.grad_clip) == (3, 5e-4, 0.5)
    with pytest.raises(TypeError):
        config.training(num_future=3)


def test_deepspeed_settings_merge_over_ours(config):
    config.deepspeed(deepspeed_config={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert config.deepspeed_settings["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert config.deepspeed_settings["gradient_clipping"] == 1.0


def test_unknown_key_names_the_nearest():
    assert "did you mean 'tau'" in unknown_key("taus", ["tau", "lr"])
    assert "known are lr, tau" in unknown_key("qqqq", ["tau", "lr"])


def write(path: Path, **changes) -> Path:
    entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"env_config": {"max_turns": 6}}}
    entry.update(changes)
    path.write_text(yaml.safe_dump({"test": entry}))
    return path


class TestExperimentFiles:
    @pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem not in NEEDS], ids=lambda path: path.stem)
    def test_every_tuned_example_resolves(self, path, monkeypatch, tmp_path):
        if "smollm2" in path.stem:
            stand_in_for_smollm2(tmp_path, monkeypatch)
        assert all(resolve(experiment) for experiment in load_experiments(path))

    def test_grid_search_checks_every_value(self, tmp_path):
        config = {"tau": {"grid_search": [0.1, 0.5]}}
        (experiment,) = load_experiments(write(tmp_path / "x.yaml", config=config))
        assert resolve(experiment).tau == 0.1 and experiment.config["tau"] == {"grid_search": [0.1, 0.5]}
        with pytest.raises(ExperimentError, match="tau is 7"):
            load_experiments(write(tmp_path / "x.yaml", config={"tau": {"grid_search": [0.1, 7]}}))

    def test_rllibs_own_algorithms(self, tmp_path):
        (experiment,) = load_experiments(write(tmp_path / "x.yaml", run="PPO", env="CartPole-v1", config={"lr": 1e-4}))
        assert type(resolve(experiment)).__name__ == "PPOConfig" and resolve(experiment).lr == 1e-4

    @pytest.mark.parametrize(("run", "ours"), [("PPO", "TextPPO"), ("APPO", "TextAPPO"), ("GRPO", "GRPO"), ("NLQL", "NLQL")])
    def test_on_text_one_word_swaps_the_algorithm(self, tmp_path, run, ours):
        config = {"language_model": "tiny", "prompts": "compact", "max_action_tokens": 12, "lr": 1e-4}
        (experiment,) = load_experiments(write(tmp_path / "x.yaml", run=run, config=config))
        assert trainable_of(experiment).__name__ == ours and resolve(experiment).max_action_tokens == 12

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"run": "SAC"}, "RLlib's SAC does not know text environments such as 'TwentyQuestions'; on text run .*APPO.*PPO"),
            ({"run": "PPO", "config": {"num_futures": 2}}, "unknown key 'num_futures'"),
            ({"run": "RFT", "config": {"num_futures": 2}}, "'num_futures' for this algorithm: it is one of NLAC"),
            ({"run": "PPO", "config": {"action_top_p": 0.5}}, "action_top_p is 0.5 and must be 1"),
            ({"run": "GRPO", "config": {"episodes_per_iteration": 60}}, "must be a multiple of episodes_per_task, 8"),
            ({"config": {"n_step": 0}}, "n_step is 0 and must be at least 1"),
            ({"config": {"num_futurs": 2}}, "did you mean 'num_futures'"),
            ({"config": {"num_futurs": 2, "taau": 0.1}}, "did you mean 'num_futures'.*'taau'; did you mean 'tau'"),
            ({"config": {"num_workers": 2}}, "'num_env_runners' now"),
            ({"run": "NLCA"}, "did you mean 'NLAC'"),
            ({"confg": {}}, "did you mean 'config'"),
            ({"local_dir": "x"}, "'storage_path' now"),
            ({"config": {"env_config": {"max_turns": 0}}}, "max_turns is 0"),
            ({"config": {"env_config": {"turns": 3}}}, "did you mean 'max_turns'"),
            ({"config": {"num_futures": 0}}, "num_futures is 0"),
            ({"config": {"language_model": "./missing"}}, "does not exist"),
            ({"config": {"tau": {"grid_search": []}}}, "needs a list of values"),
        ],
    )
    def test_mistakes(self, tmp_path, changes, complaint):
        with pytest.raises(ExperimentError, match=complaint):
            load_experiments(write(tmp_path / "x.yaml", **changes))

    def test_a_machine_that_is_too_small_is_an_error_and_not_a_wait(self, monkeypatch):
        monkeypatch.setattr("ray.is_initialized", lambda: False)  # another test may have left one, with nodes of its own
        examples = {path.stem: path for path in EXAMPLES}
        (large,) = load_experiments(examples["twenty_questions_nlac_qwen2.5_7b"])
        with pytest.raises(ExperimentError, match=r"each engine takes 1 CPU, \d GPUs? on one node, .*\(here: 64 CPUs\)"):
            check_resources(large, [Node("here", {"CPU": 64.0})])
        (small,) = load_experiments(examples["twenty_questions_nlac"])
        check_resources(small, [Node("here", {"CPU": 1.0})])
        with pytest.raises(ExperimentError, match=r"the trial's own process takes 1 CPU .* lower num_cpus_for_main_process"):
            check_resources(small, [Node("here", {"CPU": 0.5})])

    def test_missing_parts(self, tmp_path):
        with pytest.raises(ExperimentError, match="no experiment file"):
            load_experiments(tmp_path / "none.yaml")
        (tmp_path / "x.yaml").write_text("just text")
        with pytest.raises(ExperimentError, match="must map experiment names"):
            load_experiments(tmp_path / "x.yaml")
        (tmp_path / "x.yaml").write_text("a: [")
        with pytest.raises(ExperimentError, match="not valid YAML"):
            load_experiments(tmp_path / "x.yaml")
        (tmp_path / "x.yaml").write_text("a: {env: X}")
        with pytest.raises(ExperimentError, match="'run' is missing"):
            load_experiments(tmp_path / "x.yaml")


class TestCommand:
    def run(self, *arguments: str):
        return CliRunner().invoke(app, arguments)

    @pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
    def test_dry_run_prints_the_resolved_configuration(self, path, monkeypatch, tmp_path):
        monkeypatch.chdir(ROOT)
        if "smollm2" in path.stem:
            stand_in_for_smollm2(tmp_path, monkeypatch)
        if path.stem in NEEDS:
            # What it needs is not here, which is what the error says; all else is looked at in another environment.
            result = self.run("train", "file", str(path), "--dry-run")
            assert result.exit_code == 2 and NEEDS[path.stem] in result.output
            ((name, entry),) = yaml.safe_load(path.read_text()).items()
            entry["env"] = "ServiceDesk"
            entry["config"] |= {"env_config": {}} | (
                {"language_model": "tiny", "max_context": 512, "max_action_tokens": 128} if "react" in path.stem else {}
            )
            if "evaluation_config" in entry["config"]:
                entry["config"]["evaluation_config"]["env_config"] = {"split": "eval"}
            shutil.copytree(path.parent / "bases", tmp_path / "bases")
            path = tmp_path / path.name
            path.write_text(yaml.safe_dump({name: entry}))
        result = self.run("train", "file", str(path), "--dry-run")
        assert result.exit_code == 0, result.output
        (printed,) = yaml.safe_load(result.output).values()
        (written,) = yaml.safe_load(path.read_text()).values()
        for key, value in search.variants(written["config"])[0].items():
            shown = {**printed["config (defaults)"], **printed["config (set)"]}
            found = shown["lambda_" if key == "lambda" else key]
            # A mapping is merged with that of the file that is extended.
            whole = {**found, **value} if "extends" in written and isinstance(value, dict) else value
            assert found == whole, key

    def test_overrides(self, tmp_path):
        path = write(tmp_path / "x.yaml", stop={"training_iteration": 5})
        result = self.run(
            "train",
            "file",
            str(path),
            "--dry-run",
            "--stop",
            '{"env_runners/success_rate": 0.9}',
            "--storage-path",
            str(tmp_path),
            "--num-samples",
            "3",
        )
        printed = yaml.safe_load(result.output)["test"]
        assert printed["stop"] == {"training_iteration": 5, "env_runners/success_rate": 0.9}
        assert printed["num_samples"] == 3 and printed["storage_path"] == str(tmp_path)

    def test_a_storage_path_behind_an_equals_sign_begins_at_home(self, tmp_path, monkeypatch):
        """The shell leaves the ~ of ``--storage-path=~/results`` as it is."""
        monkeypatch.setenv("HOME", str(tmp_path))
        result = self.run("train", "--algo", "NLAC", "--env", "GuessNumber", "--storage-path=~/results", "--dry-run")
        assert yaml.safe_load(result.output)["nlac-guessnumber"]["storage_path"] == str(tmp_path / "results")

    def test_train_from_options(self):
        result = self.run("train", "--algo", "NLAC", "--env", "TwentyQuestions", "--config", '{"tau": 0.3}', "--dry-run")
        assert yaml.safe_load(result.output)["nlac-twentyquestions"]["config (set)"]["tau"] == 0.3

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("train",), "give --algo and --env"),
            (("train", "--algo", "NLAC", "--env", "TwentyQuestions", "--config", "[1]"), "must be a mapping"),
            (("train", "--algo", "NLAC", "--env", "TwentyQuestions", "--config", "{taus: 1}"), "did you mean 'tau'"),
            (("train", "--algo", "NLAC", "--env", "GuessNumber", "--resume", "--num-samples", "2"), "leave out --num-samples"),
            (("train", "file", "missing.yaml"), "no experiment file"),
            (("train", "--dry-run", "file", "missing.yaml"), "put --dry-run behind it"),
            (("train", "--storage-path", "here", "file", "missing.yaml"), "put --storage-path behind it"),
            (("evaluate", "missing"), "is no checkpoint"),
            (("train", "--algo", "NLAC", "--env", "GuessNumber", "--restore", "s3://a/b"), "s3://a/b is an address: copy"),
            (("inspect", "run", "s3://a/b"), "s3://a/b is an address: copy"),
        ],
    )
    def test_mistakes_are_one_line_and_exit_2(self, arguments, complaint):
        result = self.run(*arguments)
        assert result.exit_code == 2 and complaint in result.output.replace("\n", " ") and "Traceback" not in result.output


def test_results_are_read_by_path():
    result = {"env_runners": {"success_rate": 0.5, "num_episodes_lifetime": 64}, "training_iteration": 1}
    assert lookup(result, "env_runners/success_rate") == 0.5 and lookup(result, "env_runners/x/y") is None
    assert read_result(result)["episodes"] == 64 and read_result(result)["L1 critic"] is None


def test_an_evaluation_is_shown_for_its_own_iteration_only():
    result = {"config": {"evaluation_interval": 4}, "evaluation": {"env_runners": {"success_rate": 0.8}}}
    assert evaluated({**result, "training_iteration": 4}) == 0.8 and evaluated({**result, "training_iteration": 5}) is None
    assert evaluated({**result, "config": {"evaluation_interval": None}, "training_iteration": 4}) is None
