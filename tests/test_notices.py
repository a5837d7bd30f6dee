"""What a person is told while a run goes on: columns that hold anything, and what does not parse."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.tune.experiment import Trial

from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.baselines.rft import RFTConfig
from rllib_nlac.baselines.stock import TextPPOConfig
from rllib_nlac.command.progress import COLUMNS, ProgressLines
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.diagnostics.notices import NOTICES, Notices, shown
from rllib_nlac.diagnostics.results import Run
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.engine.template import ChatTemplate
from rllib_nlac.language.report import StageReport
from rllib_nlac.reporting.advice import advise
from rllib_nlac.reporting.report import markdown
from rllib_nlac.sampling.collector import CollectionError
from rllib_nlac.sampling.env_runner import UNPARSED_TURNS

TRIAL = SimpleNamespace(trial_id="abc_00000")


def printed(*results: dict, stop: dict | None = None) -> list[str]:
    with contextlib.redirect_stdout(file := io.StringIO()):
        lines = ProgressLines(Terminal(), stop or {})
        for result in results:
            lines.on_trial_result(0, [TRIAL], TRIAL, result)
    return file.getvalue().splitlines()


def test_what_is_left_of_a_run_that_goes_on_from_a_checkpoint():
    """Fails where its first iteration is taken to have done all that was done before it."""
    first = {**result(1.0, 101), "time_this_iter_s": 60.0}
    assert printed(first, stop={"training_iteration": 200})[1].endswith("99 min")
    first["training_iteration"] = 1
    assert printed(first, stop={"training_iteration": 4})[1].endswith("3 min")


def result(value, iteration=1) -> dict:
    env = dict.fromkeys(("num_episodes_lifetime", "success_rate", "episode_return_mean", "tokens_per_s"), value)
    return {
        "training_iteration": iteration,
        "time_total_s": value,
        "env_runners": env,
        "config": {"evaluation_interval": 1},
        "learners": {"default_policy": {"critic_loss": value, "policy_loss": value}},
        "time_this_iter_s": 1.0,
        "evaluation": {"env_runners": {"success_rate": value}},
    }


class TestColumns:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (math.nan, "-"),
            (None, "-"),
            (10**400, "inf"),
            (-(10**400), "-inf"),
            (1e300, "1e+300"),
            (12345678, "12345678"),
            (0.25, "0.250"),
            ([1], "-"),
            ({}, "-"),
            ("text", "text"),
            (True, "1"),
        ],
    )
    def test_every_column_holds_everything(self, value, text):
        header, row = printed(result(value))
        assert header.split() == " ".join(COLUMNS).split()
        assert row.split().count(text) == 8 + (text in ("1", "-"))  # the iteration is 1, and nothing says what is left

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None, 10**400, -5.0, 0.0, "x"])
    @pytest.mark.parametrize("threshold", [1.0, math.inf, math.nan, 10**400, "x", 0, -1])
    def test_what_is_left_of_any_stop_criterion(self, value, threshold):
        rows = printed(result(value), result(value, 2), stop={"env_runners/success_rate": threshold})
        assert [row.split()[-1] for row in rows[1:]] == ["-", "-"]

    def test_what_is_left_of_a_plain_one(self):
        rows = printed(result(0.25), result(1.0, 2), stop={"env_runners/success_rate": 1.0})
        assert [" ".join(row.split()[-2:]) for row in rows[1:]] == ["3 s", "0 s"]


class TestNotices:
    def test_each_is_said_once_until_it_is_over(self, caplog):
        notices = Notices()
        with caplog.at_level(logging.WARNING):
            for text in ("a fails", "a fails", None, None, "a fails again"):
                notices.update("a", text)
        assert notices.take() == ["a fails", "a fails again"] and notices.take() == []
        assert caplog.text.count("a fails") == 2

    def test_foreign_text_is_shortened_and_escaped(self):
        assert shown("\x1b[31mred\u202e\n[/INST]\ud800") == "'\\x1b[31mred\\u202e\\n[/INST]\\ud800'"
        assert shown("x" * 1_000_000) == "'" + "x" * 200 + "' and so on, 1000000 characters"

    def test_on_screen_they_are_no_markup(self):
        rows = printed({**result(0.5), NOTICES: "[/INST] [bold]x[/bold] do not parse\nand more"})
        assert rows[-2:] == ["Note: [/INST] [bold]x[/bold] do not parse", "Note: and more"]


class TestParsing:
    """What is said of answers that do not parse, by how many failed, of how many, and how many of them were cut off."""

    def told(self, *calls: tuple[int, int, int]) -> list[str]:
        defaults = SimpleNamespace(max_future_tokens=24, prompts="compact")
        a = SimpleNamespace(notices=Notices(), config=SimpleNamespace(model_defaults=defaults, language_model="tiny"))
        for failed, asked, cut_off in calls:
            Watch(a).check_parsing("the futures", failed, asked, cut_off, "hm", "max_future_tokens")
        return a.notices.take()

    @pytest.mark.parametrize(("cut_off", "is_limit"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
    def test_the_limit_is_to_blame_where_it_cut_off_most_of_them(self, cut_off, is_limit):
        (text,) = self.told((4, 4, cut_off))
        assert "4 of 4 of the futures (100%) do not parse" in text
        assert ("cut off by max_future_tokens" in text) == (cut_off > 0)
        advice = text.split("What to do: ")[1]
        assert ("raise max_future_tokens, which is 24" in advice) == is_limit
        assert ("prompts (compact) are written for it" in advice) == (not is_limit)

    @pytest.mark.parametrize(("structured", "asks"), [(False, True), (True, False)])
    def test_a_form_that_is_not_enforced_comes_before_any_limit(self, structured, asks):
        """Fails where a model that rambles is given more room to ramble."""
        defaults = SimpleNamespace(max_future_tokens=24, prompts="small", structured_answers=structured)
        a = SimpleNamespace(notices=Notices(), config=SimpleNamespace(model_defaults=defaults, language_model="some/model"))
        Watch(a).check_parsing("the futures", 4, 4, 4, "hm", "max_future_tokens", has_form=True)
        (text,) = a.notices.take()
        assert ("set structured_answers: true" in text) is asks and ("raise max_future_tokens" in text) is not asks

    def test_it_is_said_once_until_most_parse_and_not_until_nobody_asks(self):
        bad, good, unasked = (4, 4, 0), (2, 4, 0), (0, 0, 0)
        assert len(self.told(bad, unasked, bad)) == 1
        assert len(self.told(bad, good, bad)) == 2
        assert self.told(good, unasked) == []


class TestStart:
    """RLlib takes the first answer of its runners; where there is none it says that a list is empty."""

    def started(self, **found):
        def setup():
            raise IndexError("list index out of range")

        Watch(SimpleNamespace(config=RFTConfig(), _storage=None, **found)).setup(setup)

    def test_runners_that_never_answered_are_said(self):
        group = SimpleNamespace(num_remote_env_runners=lambda: 2)
        with pytest.raises(CollectionError, match="none of 2 EnvRunners answered when the run began"):
            self.started(env_runner_group=group)

    def test_another_error_stays_what_it_is(self):
        for found in ({}, {"env_runner_group": SimpleNamespace(), "spaces": {}}):
            with pytest.raises(IndexError, match="list index"):
                self.started(**found)


class TestIterations:
    """RLlib's own logger repeats what was ever logged, with NaN for what was not logged since."""

    def stepped(self, monkeypatch, *iterations, config=None, iteration=0) -> list[dict]:
        root, todo = MetricsLogger(root=True), iter(iterations)
        a = LanguageAlgorithm.__new__(LanguageAlgorithm)
        a.notices, a.watch, a.config, a._iteration = Notices(), Watch(a), config or RFTConfig(), iteration
        a.token_usage, a.metrics = SimpleNamespace(since_last=dict), root
        a.engine = SimpleNamespace(seconds_rested=lambda: None)
        a.chat = SimpleNamespace(template=SimpleNamespace(tools_obstacle="it knows none"))
        a._with_learners, a.learner_group = lambda work: work(), SimpleNamespace(is_remote=False, is_local=True)

        def step(self) -> dict:
            if callable(evaluated := next(todo)(root)):
                monkeypatch.setattr(Algorithm, "evaluate", lambda self: evaluated(root) or {})
                self.evaluate()
            return root.compile()

        monkeypatch.setattr(Algorithm, "step", step)
        return [a.step() for _ in iterations]

    def played(self, root: MetricsLogger, turns: list[str], steps: int = 4) -> None:
        runners = []
        for turn in turns:
            runner = MetricsLogger(root=False)
            for name, value in (("action_parse_failures", steps), ("num_env_steps_sampled", steps)):
                runner.log_value(name, value, reduce="sum")
            runner.log_value(UNPARSED_TURNS, turn, reduce="item_series")
            runners.append(runner.reduce())
        root.aggregate(runners, key="env_runners")

    @pytest.mark.parametrize("turns", [["the whole turn"], ["the whole turn", "another"]])
    def test_of_turns_that_do_not_parse_a_whole_one_is_shown(self, monkeypatch, turns):
        """Fails where the only one is taken for a list of letters."""
        (result,) = self.stepped(monkeypatch, lambda root: self.played(root, turns))
        assert "(100%) do not parse. One of them: 'the whole turn'. What to do" in result[NOTICES]

    @pytest.mark.parametrize(
        ("counted", "said"),
        [
            ({"success_guessed": 3}, "3 of 8 episodes ended without info['success'], so that a return above 0 counts"),
            ({"invented_turns": 5}, "5 of 40 turns hold special tokens of another role"),
            ({"success_guessed": 0, "invented_turns": 4}, ""),
            ({"episodes_with_tools": 8}, "tools were offered, and no turn called one"),
            ({"episodes_with_tools": 8, "tool_calls": 1}, "their results told as user messages, for it knows none"),
            ({"episodes_with_tools": 0, "tool_calls": 0}, ""),
        ],
    )
    def test_success_that_is_guessed_and_turns_that_are_invented_are_said(self, monkeypatch, counted, said):
        """Fails where a run says success 1 of games that are all lost and pay something."""

        def play(root: MetricsLogger) -> None:
            runner = MetricsLogger(root=False)
            for name, value in {"num_episodes": 8, "num_env_steps_sampled": 40, **counted}.items():
                runner.log_value(name, value, reduce="sum")
            root.aggregate([runner.reduce()], key="env_runners")

        (result,) = self.stepped(monkeypatch, play)
        assert said in result.get(NOTICES, "") and (NOTICES in result) is bool(said)

    @pytest.mark.parametrize(
        ("config", "played", "said"),
        [
            (RFTConfig().engines(engine_config={"extra": {"block_size": 512}}), (6.0, 0.0), "(block_size is 512)"),
            (RFTConfig().engines(engine_config={"enable_prefix_caching": False}), (6.0, 0.0), "{enable_prefix_caching: true}"),
            (RFTConfig(), (6.0, 1e-3), ""),
            (RFTConfig(), (1.0, 0.0), ""),  # no turn has one before it
            (ReActConfig().training(endpoint={"base_url": "http://x/v1", "model": "x"}), (6.0, 0.0), ""),  # nobody knows
        ],
    )
    def test_a_prefix_cache_that_holds_nothing_is_said(self, monkeypatch, config, played, said):
        def play(root: MetricsLogger) -> None:
            runner = MetricsLogger(root=False)
            for name, value in zip(("episode_len_mean", "prefix_cache_hit_rate"), played, strict=True):
                runner.log_value(name, value, reduce="mean")
            root.aggregate([runner.reduce()], key="env_runners")

        first, second = self.stepped(monkeypatch, play, lambda root: None, config=config)
        assert said in first.get(NOTICES, "") and (NOTICES in first) is bool(said) and NOTICES not in second

    def test_an_iteration_without_episodes_is_one_without_turns(self, monkeypatch):
        first, second = self.stepped(monkeypatch, lambda root: self.played(root, ["x"]), lambda root: None)
        assert math.isnan(second["env_runners"]["action_parse_failures"])  # what RLlib makes of it
        assert NOTICES in first and NOTICES not in second

    def test_an_evaluation_stands_in_the_result_of_its_own_iteration_alone(self, monkeypatch):
        """Fails where RLlib's repeats and NaNs stay: Tune scores by the first, and forgets its best at the second. Fails, too,
        where an evaluation is told what an earlier one counted."""

        def log(**figures: float):
            def log_all(root: MetricsLogger) -> None:
                for name, value in figures.items():
                    root.log_value(("evaluation", "env_runners", name), value, window=1)

            return lambda root: log_all

        nothing = lambda root: None  # noqa: E731
        first, second = log(success_rate=0.9, lost=5), log(success_rate=0.5)
        results = self.stepped(monkeypatch, nothing, first, nothing, nothing, second, nothing)
        assert ["evaluation" in result for result in results] == [False, True, False, False, True, False]
        assert results[1]["evaluation"]["env_runners"] == {"success_rate": 0.9, "lost": 5}
        assert results[4]["evaluation"]["env_runners"] == {"success_rate": 0.5}
        trial = Trial("PPO", stub=True)
        for result in results:
            trial.update_last_result(dict(result))
        found = trial.metric_analysis["evaluation/env_runners/success_rate"]
        assert (found["max"], found["last"]) == (0.9, 0.5)

    @pytest.mark.parametrize(
        ("asked", "iteration", "evaluates"),
        [
            ({}, 0, True),
            ({}, 4, False),
            ({"evaluate_before_training": False}, 0, False),
            ({"evaluation_interval": None}, 0, False),
        ],
    )
    def test_a_run_is_evaluated_before_training_and_a_restored_one_is_not(self, monkeypatch, asked, iteration, evaluates):
        said: list[int] = []

        def evaluate(self) -> dict:
            said.append(self.watch.evaluated_iteration)
            self.watch.evaluation_seconds["evaluation"] = 2.0
            return {"env_runners": {"success_rate": 0.25}}

        monkeypatch.setattr(LanguageAlgorithm, "evaluate", evaluate)
        config = RFTConfig().evaluation(**{"evaluation_interval": 4, **asked})
        (result,) = self.stepped(monkeypatch, lambda root: None, config=config, iteration=iteration)
        assert said == ([0] if evaluates else [])
        assert ("before_training" in result) is evaluates and "evaluation" not in result
        if evaluates:
            assert result["before_training"] == {"env_runners": {"success_rate": 0.25}}
            assert result["seconds"]["evaluation_before"] == 2.0

    def test_what_a_callback_logs_at_the_end_of_an_evaluation_is_in_its_results(self):
        """Fails where RLlib's results are returned as they are: they were taken before, and the next evaluation starts anew."""
        metrics = MetricsLogger(root=True)

        def evaluate() -> dict:
            metrics.log_value(("evaluation", "mine"), 3.0, window=1)
            return {"env_runners": {"success_rate": 0.5}}

        watch = Watch(SimpleNamespace(metrics=metrics, config=RFTConfig()))
        assert watch.evaluate(evaluate) == {
            "env_runners": {"success_rate": 0.5},
            "mine": 3.0,
        }

    def test_parts_that_did_not_run_have_no_seconds_and_leave_no_share_open(self, monkeypatch):
        def log(**seconds: float):
            return lambda root: [root.log_value(("seconds", name), took, reduce="sum") for name, took in seconds.items()]

        iterations = log(play=1.0, record=1.0, evaluation=3.0), log(play=1.0)
        first, second = self.stepped(monkeypatch, *iterations)
        assert first["seconds"] == {"play": 1.0, "record": 1.0, "evaluation": 3.0}
        assert second["seconds"] == {"play": 1.0}
        assert second["idle"].keys() == {"engine", "learner"} and not any(map(math.isnan, second["idle"].values()))


class TestReport:
    def test_what_did_not_parse_is_counted_by_role_with_an_example(self, engine, chat):
        from rllib_nlac.types import Request

        answers = [(g, f"answer {i}") for i, g in enumerate(engine.generate([Request((3, 10), 2)] * 3))]
        cut = [(replace(g, finished=i != 1), text) for i, (g, text) in enumerate(answers)]
        report = StageReport()
        report.note("future", [None, *cut], [None, "parsed", None, None], [None] * 4)
        assert (report.answered["future"], report.unparsed["future"], report.cut_off["future"]) == (3, 2, 1)
        assert report.examples == {"future": "answer 1"}

    def test_prompts_that_are_too_long_are_said_of_the_role_that_lost_most_of_them(self):
        """Fails where a role that is never asked looks like one whose answers all parse."""
        a = SimpleNamespace(notices=Notices())
        report = StageReport()
        report.prompts.update(future=10, critique=10)
        report.too_long.update(future=5, critique=6)
        Watch(a).check_stages(report)
        (text,) = a.notices.take()
        assert "exceed the context were not asked: 6 of 10 of critique. What to do: raise max_context, or lower" in text
        Watch(a).check_stages(StageReport())
        assert not a.notices.take()


def small(config):
    config.environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
    config.language(language_model="tiny").debugging(seed=0)
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=32, minibatch_size=16, lr=1e-4)
    config.num_envs_per_env_runner = 16
    return config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": 1e-3}, "a lower lr (now 0.001) or"),
        ({"lr": 1e-6, "deepspeed_config": {"scheduler": {}}}, "a lower learning rate (the"),
    ],
)
def test_the_way_back_names_what_sets_the_learning_rate(given, said):
    """Fails where ``lr`` is named, which has no effect beside a scheduler."""
    assert said in Watch(SimpleNamespace(config=SimpleNamespace(grad_clip=1.0, **given))).way_back()


class TestRuns:
    def test_a_model_that_speaks_garbage_is_noticed_with_an_example_and_until_it_recovers(
        self, config, ray_session, lent_engine, chat
    ):
        algorithm = small(config).build_algo()
        try:
            generate = algorithm.engine.generate
            ids = chat.encode("no label \x1b[31m here")

            def garbage(finished):
                return lambda requests: [
                    replace(g, token_ids=ids, logprobs=g.logprobs[:1].repeat(len(ids)), finished=finished)
                    for g in generate(requests)
                ]

            algorithm.engine.generate = garbage(True)
            first = algorithm.train()[NOTICES].splitlines()
            (future,) = [text for text in first if "the critic's futures" in text]
            assert "(100%) do not parse. One of them: 'no label" in future and "\x1b" not in future
            assert "language_model (tiny) is instruction-tuned and that prompts (compact)" in future
            assert any("Bellman targets (100%)" in text for text in first)
            assert any("nothing was learned in iteration 1" in text for text in first)
            assert NOTICES not in algorithm.train()  # said already
            algorithm.engine.generate = generate
            assert NOTICES not in algorithm.train()
            algorithm.engine.generate = garbage(False)
            again = [text for text in algorithm.train()[NOTICES].splitlines() if "the critic's futures" in text]
            (future,) = [text for text in again if "cut off by max_future_tokens" in text]
            assert "What to do: set structured_answers: true" in future
        finally:
            algorithm.stop()

    def test_turns_without_an_action_nothing_to_imitate_and_a_template_that_cannot_be_bridged(
        self, ray_session, lent_engine, monkeypatch
    ):
        monkeypatch.setattr(ChatTemplate, "_find_opening", lambda template: (None, "it drops the thoughts of earlier turns"))
        algorithm = small(RFTConfig()).language(action_format="react").build_algo()
        try:
            notices = algorithm.train()[NOTICES].splitlines()
        finally:
            algorithm.stop()
        assert any("of the policy's turns (100%) do not parse" in text and "One of them: '" in text for text in notices)
        assert any("nothing was learned in iteration 1: no episode was accepted" in text for text in notices)
        assert any("encoded from its text" in text and "drops the thoughts of earlier turns" in text for text in notices)

    @pytest.mark.long
    def test_under_rllibs_own_algorithms_too(self, ray_session, engine, monkeypatch):
        monkeypatch.setattr("rllib_nlac.baselines.stock_runner.local_engine", lambda config, chat: engine)
        config = TextPPOConfig().environment("TwentyQuestions", env_config={"max_turns": 3}).debugging(seed=0)
        config.language(language_model="tiny", action_format="react")
        config.training(train_batch_size_per_learner=16, minibatch_size=16, num_epochs=1)
        config.num_envs_per_env_runner = 4
        algorithm = config.build_algo()
        try:
            results = algorithm.train()
        finally:
            algorithm.stop()
        (notice,) = results[NOTICES].splitlines()
        assert "of the policy's turns (100%) do not parse" in notice and "One of them: '" in notice
        # And their report, of what RLlib reports.
        plain = json.loads(json.dumps({**results, "training_iteration": 1}, default=str))
        run = Run(Path("trial"), "PPO", [plain])
        report = markdown(run)
        assert "iteration 1: " + notice in report and "No evaluation asked a critic in words" in report
        assert "| training, not measured by stage |" in report and "| Environment | `TwentyQuestions` |" in report
        assert advise(run)[0].rule == "turns_unparsed"
