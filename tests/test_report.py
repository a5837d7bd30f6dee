"""The report of a run: true of whatever the run has, also of half of it, and nothing of a foreign text's becomes its own."""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from told_runs import GOOD, changed, evaluation, result, run_of

from rllib_nlac.diagnostics.results import Run, Setting, differing, read_results
from rllib_nlac.inputs.foreign import code, fenced
from rllib_nlac.reporting.advice import advise
from rllib_nlac.reporting.costs import stages
from rllib_nlac.reporting.report import REPORT, markdown, summary, write_report
from rllib_nlac.reporting.transitions import chosen, read_examples

HOSTILE = (
    "`x` ```\n````\n# Free\n\n"
    "</pre><img src=x onerror=alert(1)> | cell | [a](javascript:b) <!-- \u202egnp \x1b[31m \ud800 **b**"
    "\r\n~~~~\n"
)
OURS = {"Report of", "What was trained", "Settings", "Success", "Return", "What the critic knows", "Time and tokens"} | {
    "Settings that are not the defaults",
    "Three transitions",
    "Warnings",
    "What to try next",
    "How it ended",
    "Of an episode that was won",
    "Of one that was lost",
    "The most surprising one",
}


class TestWhatIsTold:
    def test_success_before_and_after_with_its_interval(self):
        text = markdown(GOOD)
        assert "| evaluation after iteration 1 | 0.300 (0.220 to 0.380) |" in text
        assert "| evaluation after iteration 3 | 0.980 (0.900 to 1.000) |" in text
        # Of 32 episodes 8 were won: Wilson's interval of any textbook.
        assert "| episodes of iteration 1, by the weights that it began with | 0.250 (0.133 to 0.421) of 32 |" in text

    def test_the_interval_of_collected_success_is_of_the_episodes_that_it_is_the_mean_of(self):
        """Rollouts and second attempts are episodes too, and no part of success: each of 64 was played on three times."""
        played = changed(run_of(result(1, 0.5)), "env_runners/num_episodes", 256)
        for reason in ("solved", "turn_limit"):
            played = changed(played, f"env_runners/stop_reason_{reason}", 32)
        for left_out in ("stop_reason_user_failed", "episodes_discarded"):
            played = changed(played, f"env_runners/{left_out}", 5)
        assert "| 0.500 (0.381 to 0.619) of 64 |" in markdown(played)
        earlier = changed(played, "env_runners/stop_reason_response_limit", math.nan)  # as RLlib repeats it
        assert "| 0.500 (0.381 to 0.619) of 64 |" in markdown(earlier)

    def test_a_restored_run_did_not_begin_with_the_model(self):
        text = markdown(replace(GOOD, restored="old/checkpoint"))
        assert "by the weights that it began with" not in text and "the checkpoint `old/checkpoint`" in text

    def test_repeated_evaluations_count_once(self):
        """RLlib repeats the last evaluation in results that had none."""
        repeated = [result(i, 0.5, evaluation(0.1 * i), interval=2) for i in (1, 2, 3, 4)]
        run = run_of(*repeated)
        assert [r["training_iteration"] for r in run.evaluated] == [2, 4]

    def test_pass_at_k_and_entropy_stand_beside_success(self):
        text = markdown(GOOD)
        assert "| iteration | episodes | success | pass@1 | pass@4 | action entropy | token entropy | AUC | Brier |" in text
        assert "| 2 | 64 | 0.600 (0.520 to 0.680) | 0.600 | 0.700 | 1.500 | 0.500 | 0.800 | 0.150 |" in text

    def test_the_critic_before_and_after(self):
        assert "| AUC (0.5 is chance) | 0.650 | 0.800 |" in markdown(changed(GOOD, "evaluation/critic/auc", 0.65, place=0))

    def test_time_and_tokens_add_up(self):
        found = {each.name: each for each in stages(GOOD)}
        assert sum(each.seconds for each in found.values()) == pytest.approx(30.0)  # parts of stages are not counted twice
        assert found["language stages"].seconds == 12 and found["language stages"].tokens == 12000
        assert found["evaluation"].tokens == 1500 and found["learner"].tokens == 27000
        assert "| language stages | 12.0 | 40% | 12,000 |" in markdown(GOOD)

    def test_where_the_engines_count_a_stage_has_its_roles_tokens(self):
        """Runners count rollouts as episodes. Fails where theirs are taken, or another evaluation's told again."""
        spent = {"play": 700, "branches": 300, "future": 4000, "evaluation": 250}
        seconds = {"play": 2.0, "branches": 1.0, "waves": 4.0, "evaluation": 1.0}
        found = stages(run_of(*(result(i, 0.5, evaluation(0.5), tokens=spent, seconds=seconds) for i in (1, 2))))
        assert {each.name: each.tokens for each in found if not math.isnan(each.tokens)} == {
            "episodes": 1400,
            "rollouts from the middle": 600,
            "language stages": 8000,
            "evaluation": 500,
            "learner": 18000,
        }

    def test_tokens_by_role_the_dearest_first(self):
        spent = [
            {"tokens": {"play": 100, "future": 250, "evaluation": 0}, "prompt_tokens": {"play": 900, "future": 2000}},
            {"tokens": {"play": 100, "future": 50, "no|role": 0}, "prompt_tokens": {"play": 900, "future": 400, "no|role": 7}},
        ]
        text = markdown(run_of(*(result(i, **each) for i, each in enumerate(spent, start=1))))
        rows = text.partition("| role | generated | share | prompts |")[2].partition("\n\n")[0].splitlines()[2:]
        assert rows == [
            "| `future` | 300 | 60% | 2,400 |",
            "| `play` | 200 | 40% | 1,800 |",
            "| `no\\|role` | 0 | 0% | 7 |",
            "| all | 500 | | 4,207 |",
        ]
        assert "| role |" not in markdown(GOOD)  # an engine that does not count

    def test_warnings_with_their_iteration(self):
        assert "iteration 2: it leaps\niteration 2: and falls" in markdown(changed(GOOD, "notices", "it leaps\nand falls", 1))

    def test_settings_against_the_defaults(self):
        config = {"lr": 0.5, "tau": 0.1, "seed": None, "shape": [1, 2], "foreign": 1, "callbacks": "<object at 0x1>"}
        found = differing(config, {"lr": 0.1, "tau": 0.1, "seed": None, "shape": (1, 2), "callbacks": object(), "other": 1})
        assert found == [Setting("lr", 0.5, 0.1)]
        assert "lr: 0.5   # default: 0.1" in markdown(replace(GOOD, settings=found))

    def test_many_evaluations_make_a_short_table_that_ends_with_the_last(self):
        run = run_of(*(result(i, 0.5, evaluation(0.5)) for i in range(1, 101)))
        rows = re.findall(r"^\| (\d+) \| \d+ \| 0\.500 \(", markdown(run), re.MULTILINE)
        assert len(rows) <= 12 and rows[-1] == "100" and "Of 100 evaluations each 9th is shown." in markdown(run)

    def test_on_screen_a_few_lines(self):
        lines = summary(GOOD)
        assert lines[0] == "Run:         NLAC on TwentyQuestions from tiny: 3 iterations, 96 episodes in 0.5 minutes"
        assert "0.300 (0.220 to 0.380) (evaluation after iteration 1) -> 0.980" in lines[1]
        assert lines[2] == "Critic:      AUC 0.800 -> 0.800, Brier score 0.150 -> 0.150"
        assert lines[3].startswith("Time:        language stages 40%") and len(lines) <= 9

    def test_a_run_that_began_from_a_checkpoint_counts_its_own_episodes(self):
        own = run_of(*(result(i) for i in range(9, 13)))  # 32 episodes each, after 256 of another run
        assert "4 iterations, 128 episodes in" in summary(own)[0]

    def test_the_evaluation_before_training_is_no_iteration(self):
        begun = {"training_iteration": 0, "evaluation": evaluation(0.1), "env_runners": {"num_episodes_lifetime": 0}}
        assert ": 2 iterations, 64 episodes in" in summary(run_of(begun, result(1), result(2)))[0]
        assert "no iteration was ended" in summary(run_of(begun))[0]

    def test_a_stage_that_nobody_timed_has_no_share(self):
        """As of RLlib's own algorithms. Fails where NaN counts as a time."""
        plain = [result(i, seconds={"learner": 2.5}) for i in (1, 2)]
        assert "Time:        training, not measured by stage 75%, learner 25%" in summary(run_of(*plain))
        assert "| episodes | - | - | 2,000 |" in markdown(run_of(*plain))

    def test_the_evaluation_before_training_is_an_evaluation(self):
        """Fails where its time counts as training's."""
        own = run_of(result(1, seconds={"learner": 2.5, "evaluation_before": 5.0}))
        assert any("evaluation 50%" in line for line in summary(own))


class TestWhatIsMissing:
    """Each of these runs has its report, which says what there is not."""

    def test_nothing_at_all(self):
        run = run_of(end="failed", error="  what:  it broke")
        text = markdown(run)
        assert "**it failed**" in text and "it broke" in text and "The run ended before its first result." in text
        assert summary(run)[0].endswith("no iteration was ended")

    def test_without_an_evaluation(self):
        run = run_of(result(1, interval=None), result(2, interval=None))
        text = markdown(run)
        assert "Nothing was evaluated" in text and "No evaluation asked a critic in words" in text
        assert "episodes of iteration 1" in summary(run)[1]

    def test_an_algorithm_without_a_critic_in_words(self):
        plain = [result(i, 0.5, {"env_runners": evaluation(0.5)["env_runners"]}) for i in (1, 2)]
        for each in plain:
            del each["language_stages"], each["seconds"]
        run = run_of(*plain)
        text = markdown(run)
        assert (
            "No evaluation asked a critic in words" in text and "| training, not measured by stage | 20.0 | 100% | - |" in text
        )
        assert "None were recorded" in text and "AUC" not in text and "pass@" not in text

    def test_an_environment_that_speaks_of_no_success(self):
        plain = [{"training_iteration": i, "env_runners": {"episode_return_mean": 10.0 * i}} for i in (1, 2)]
        run = run_of(*plain)
        assert "## Return" in markdown(run) and "10.000" in summary(run)[1] and "Success" not in "".join(summary(run))

    def test_prompting_alone(self):
        run = run_of({k: v for k, v in result(1, 0.4, interval=None).items() if k != "learners"})
        assert {each.rule for each in advise(run)} == {"nothing"} and "0.400" in summary(run)[1]

    def test_logs_alone(self):
        """Learning from dialogues plays nothing in training; evaluations do."""
        results = [result(i, 0.5, evaluation(0.5)) for i in (1, 2)]
        for each in results:
            del each["env_runners"]
        run = run_of(*results)
        assert run.progress(run.last) == 2 and "0.500 (0.420 to 0.580)" in markdown(run)

    def test_interrupted(self):
        run = replace(GOOD, end="interrupted")
        assert "it was interrupted" in markdown(run) and advise(run)[0].rule == "interrupted"

    def test_one_class(self):
        run = changed(changed(GOOD, "evaluation/critic/auc", math.nan), "evaluation/critic/one_class", 1.0)
        assert "all turns that were drawn are of episodes that ended alike" in markdown(run)

    def test_an_area_under_the_curve_that_cannot_be(self):
        assert "## What to try next" in markdown(changed(GOOD, "evaluation/critic/auc", -1.0))

    @settings(max_examples=60)
    @given(st.data())
    def test_whatever_is_missing_or_of_another_kind_there_is_a_report(self, data):
        """Any figure of any result may be gone, not finite, a text or a list."""
        run = GOOD
        for _ in range(data.draw(st.integers(1, 6))):
            paths = sorted(_paths(run.results[0]))
            value = data.draw(st.sampled_from([None, math.nan, math.inf, -math.inf, "text", [], {}, 10**400, -1]))
            place = data.draw(st.integers(0, 2))
            try:
                run = changed(run, data.draw(st.sampled_from(paths)), value, place)
            except (AttributeError, TypeError):  # its parent is no mapping any more
                continue
        results = [r for r in run.results if isinstance(r.get("training_iteration"), int)]  # what is none is no result
        run = replace(run, results=results)
        assert "## What to try next" in markdown(run) and summary(run)


def _paths(result: dict, prefix: str = "") -> list[str]:
    return [
        path
        for key, value in result.items()
        if key != "training_iteration"
        for path in (f"{prefix}{key}", *(_paths(value, f"{prefix}{key}/") if isinstance(value, dict) else ()))
    ]


def example(text: str, **more) -> dict:
    return {
        "kind": "transition",
        "iteration": 3,
        "predicted": 0.75,
        "success": False,
        "critique": {"optimal": True, "text": text},
        "state": [{"role": text, "content": text}],
        **dict.fromkeys(("action", "judged", "refined", "reason", "observation", "ended", "next_action", "next_future"), text),
        "futures": [{"text": text, "success": True}],
        "target": {"text": text, "success": True},
    } | more


class TestForeignTexts:
    def run(self, text: str) -> Run:
        """One whose every text is somebody else's."""
        run = replace(
            changed(changed(GOOD, "notices", text), "config/env", text),
            algorithm=text,
            settings=[Setting("env_config", {"x": text}, text)],
            examples={"success": example(text), "surprise": example(text, iteration=text, reward=text)},
            end="failed",
            error=text,
            restored=text,
            checkpoint=text,
        )
        return changed(run, "config/language_model", text)

    @settings(max_examples=100)
    @given(st.one_of(st.just(HOSTILE), st.text(max_size=60), st.text("`~#|<>[]()!*\n\r \\-=&;x", max_size=60)))
    def test_they_stay_texts(self, text):
        report = markdown(self.run(text))
        report.encode("utf-8")
        assert "\x1b" not in report and "\u202e" not in report
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(report)
        kinds = {token.type for token in tokens} | {c.type for token in tokens for c in token.children or ()}
        assert kinds.isdisjoint({"html_block", "html_inline", "link_open", "image", "code_block", "blockquote_open"})
        for number, token in enumerate(tokens):
            if token.type == "heading_open":
                words = "".join(c.content for c in tokens[number + 1].children if c.type == "text").strip()
                assert words in OURS, words
            if token.type == "inline":
                # What is no code is the report's own: it holds nothing that a canary could be.
                own = "".join(c.content for c in token.children if c.type == "text")
                assert "javascript" not in own and "onerror" not in own and "Free" not in own
        # Every row has as many cells as its head: no text has ended a cell.
        in_fences = {number for token in tokens if token.type == "fence" for number in range(*token.map)}
        unfenced = "\n".join(line for number, line in enumerate(report.split("\n")) if number not in in_fences)
        for table in re.findall(r"(?:^\|.*\n)+", unfenced, re.MULTILINE):
            cells = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(cells) == 1, table

    @given(st.one_of(st.just(HOSTILE), st.text()))
    def test_a_fence_holds(self, text):
        text = text.replace("\r", "")
        (token,) = MarkdownIt("commonmark").parse(fenced(text))
        assert token.type == "fence" and token.content.rstrip("\n") == text.replace("\0", "\ufffd").rstrip("\n")

    def test_code_is_one_line_and_is_cut(self):
        assert code("a\nb") == "`a b`" and code("`a`") == "`` `a` ``" and code("a|b") == "`a\\|b`" and code("") == ""
        assert len(code("x" * 1000)) < 220


class TestFiles:
    def test_the_report_is_written(self, tmp_path):
        run = replace(GOOD, folder=tmp_path)
        assert write_report(run) == tmp_path / REPORT and (tmp_path / REPORT).read_text() == markdown(run)

    def test_half_a_line_is_left_out_and_said(self, tmp_path):
        lines = [json.dumps(result(i)) for i in (1, 2)]
        file = tmp_path / "result.json"
        file.write_text("\n".join([*lines, lines[1][:100]]))
        results, unreadable = read_results(file)
        assert [r["training_iteration"] for r in results] == [1, 2] and unreadable == 1
        assert "1 lines of its results could not be read" in markdown(run_of(*results, unreadable=unreadable))

    def test_what_a_resumed_run_repeats_counts_once_and_the_later_one(self, tmp_path):
        rows = [result(1, 0.1), result(2, 0.2), result(2, 0.9), result(3, 0.3)]
        (tmp_path / "result.json").write_text("\n".join(map(json.dumps, rows)))
        results, _ = read_results(tmp_path / "result.json")
        assert [r["env_runners"]["success_rate"] for r in results] == [0.1, 0.9, 0.3]

    def test_what_was_reached_before_a_run_went_back_and_was_not_reached_again_is_no_part_of_it(self, tmp_path):
        rows = [result(number, 0.1 * number) for number in (1, 2, 3, 4)] + [result(3, 0.05)]
        (tmp_path / "result.json").write_text("\n".join(map(json.dumps, rows)))
        results, _ = read_results(tmp_path / "result.json")
        assert [r["env_runners"]["success_rate"] for r in results] == [0.1, 0.2, 0.05]

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2]\n{}\nnull\n3", b'{"training_iteration": NaN}'])
    def test_files_that_are_no_results(self, tmp_path, content):
        (tmp_path / "result.json").write_bytes(content)
        recorded(tmp_path, 1).write_bytes(content)
        assert read_results(tmp_path / "result.json")[0] == [] and read_examples(tmp_path) == {}
        assert read_results(tmp_path / "no.json") == ([], 0) and read_examples(tmp_path / "no") == {}

    def test_a_line_that_is_nested_beyond_reading_costs_no_report(self, tmp_path):
        deep = '{"training_iteration": 2, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
        (tmp_path / "result.json").write_text(f"{json.dumps(result(1))}\n{deep}\n")
        results, unreadable = read_results(tmp_path / "result.json")
        assert [r["training_iteration"] for r in results] == [1] and unreadable == 1
        recorded(tmp_path, 1).write_text(deep)
        assert read_examples(tmp_path) == {}

    @pytest.mark.parametrize(("before", "kept"), [(40.0, [1, 2, 3, 4, 5, 6]), (39.5, [5, 6])])
    def test_what_came_before_another_trials_checkpoint_is_not_this_runs(self, tmp_path, before, kept):
        """Under population-based training no iteration is repeated. Fails where the jump counts as what was learned."""
        rows = [result(i, time_total_s=10.0 * i, iterations_since_restore=i) for i in (1, 2, 3, 4)]
        rows += [result(4 + i, time_total_s=before + 10.0 * i, iterations_since_restore=i, success=0.9) for i in (1, 2)]
        (tmp_path / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        results, _ = read_results(tmp_path / "result.json")
        assert [r["training_iteration"] for r in results] == kept


def trial(folder, status="TERMINATED", **more) -> SimpleNamespace:
    return SimpleNamespace(
        path=str(folder), status=status, checkpoint=None, config={"env": "TwentyQuestions", "lr": 0.5}, **more
    )


class TestAtTheEndOfATrial:
    @pytest.fixture()
    def experiment(self):
        from rllib_nlac.command.experiment import Experiment

        return Experiment("mine", "NLAC", {"env": "TwentyQuestions", "lr": 0.5})

    def test_a_run_of_another_process_is_told(self, tmp_path, experiment):
        from rllib_nlac.command.report import tell

        (tmp_path / "result.json").write_text(json.dumps(result(1, 0.5, evaluation(0.5))))
        lines = tell(trial(tmp_path), experiment, is_interrupted=False)
        assert lines[-1] == f"Report:      {tmp_path / REPORT}" and "as it should" in (tmp_path / REPORT).read_text()

    def test_before_the_first_result_the_settings_are_those_that_were_given(self, tmp_path, experiment):
        from rllib_nlac.command.report import tell

        error = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: it broke\n'
        tell(trial(tmp_path, "ERROR"), experiment, is_interrupted=False, error=error)
        text = (tmp_path / REPORT).read_text()
        assert "lr: 0.5   # default: 1e-06" in text and "**it failed**" in text and "ValueError: it broke" in text

    @pytest.mark.parametrize(
        ("status", "done", "error", "word"),
        [
            ("TERMINATED", False, "", "it was interrupted"),  # so Tune calls a trial that it was asked to end
            ("TERMINATED", True, "", "as it should"),
            ("RUNNING", False, "Tune recorded no error", "it was interrupted"),
            ("ERROR", False, "ValueError: it broke", "**it failed**"),
        ],
    )
    def test_what_the_interruption_came_to(self, tmp_path, experiment, status, done, error, word):
        from rllib_nlac.command.report import tell

        (tmp_path / "result.json").write_text(json.dumps(result(1, done=done)))
        tell(trial(tmp_path, status), experiment, is_interrupted=True, error=error)
        assert f"| How it ended | {word} |" in (tmp_path / REPORT).read_text()

    def test_where_tune_itself_fails_its_trials_are_told_of(self, tmp_path, experiment):
        from rllib_nlac.command.report import tell_of_failure

        for name, age in (("now", 0), ("before", 1000)):
            (tmp_path / name).mkdir()
            file = tmp_path / name / "result.json"
            file.write_text(json.dumps(result(1)))
            os.utime(file, (time.time() - age, time.time() - age))
        lines = tell_of_failure(tmp_path, experiment, MemoryError("too little"), time.time() - 100, None)
        assert lines[-1] == f"Report:      {tmp_path / 'now' / REPORT}" and not (tmp_path / "before" / REPORT).exists()
        assert "MemoryError: too little" in (tmp_path / "now" / REPORT).read_text()

    def test_an_error_of_the_report_is_one_line(self, tmp_path, experiment, monkeypatch):
        from rllib_nlac.command import report

        (tmp_path / REPORT).mkdir()  # what stands in its way
        (line,) = report.tell(trial(tmp_path), experiment, is_interrupted=False)
        assert line.startswith("Report:      none, as it could not be written: IsADirectoryError")
        monkeypatch.setattr(report, "write_report", lambda run: 1 / 0)
        (line,) = report.tell(trial(tmp_path), experiment, is_interrupted=False)
        assert "ZeroDivisionError" in line
        (line,) = report.tell(trial("s3://bucket/mine"), experiment, is_interrupted=False)
        assert line.startswith("Report:      none, as s3:") and "no folder of this machine" in line


def recorded(folder, iteration: int, *lines: dict):
    """The file of an iteration's record."""
    file = folder / "transitions" / f"iteration_{iteration:08d}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({**line, "iteration": iteration}) + "\n" for line in lines))
    return file


def line(number: int, won: bool, futures: tuple[bool, ...], reason: str = "kept") -> dict:
    return {
        "kind": "transition",
        "id": number,
        "state": [{"role": "user", "content": f"state {number}"}],
        "action": f"act {number}",
        "refined": "other" if reason == "refined" else f"act {number}",
        "reason": reason,
        "critique": {"text": "so", "optimal": False},
        "futures": [{"text": f"then {good}", "success": good} for good in futures],
        "predicted": sum(futures) / len(futures) if futures else None,
        "success": won,
    }


class TestExamples:
    def chosen(self, *lines: dict) -> dict[str, int]:
        return {kind: each["id"] for kind, each in chosen(lines).items()}

    def test_one_that_was_won_one_that_was_lost_and_the_most_surprising(self):
        assert self.chosen(
            line(0, False, (False, True)),
            line(1, True, (True, True)),
            line(2, True, (False, True, False, False)),  # three of four were wrong
            line(3, True, (True,), "refined"),
            line(4, False, (True, True), "not_judged"),
        ) == {"surprise": 2, "success": 3, "failure": 0}

    def test_where_all_came_as_it_was_said_nothing_surprises(self):
        assert self.chosen(line(0, True, (True,)), line(1, False, (False,))) == {"success": 0, "failure": 1}
        assert self.chosen() == {} and self.chosen(line(0, True, ())) == {"success": 0}

    def test_the_latest_of_each_kind_is_shown(self, tmp_path):
        """Fails where the first batch after a resume is all that is left."""
        for iteration, one in ((1, line(0, True, (True,))), (2, line(1, False, (False,))), (3, line(2, False, (False,)))):
            recorded(tmp_path, iteration, one)
        found = read_examples(tmp_path)
        assert {kind: each["iteration"] for kind, each in found.items()} == {"success": 1, "failure": 3}
        text = markdown(run_of(examples=found))
        assert "of the futures that the critic reads 100% end in success, and the episode was won" in text
        assert "user: state 0" in text and "user: state 1" not in text and "user: state 2" in text

    @pytest.mark.parametrize("left", ["", '{"kind": "tran', "[" * 200_000, '{"kind": "state"}', '[1, {"kind": []}]\nnull\n3'])
    def test_lines_that_are_no_transitions_are_left_out(self, tmp_path, left):
        recorded(tmp_path, 1, line(0, False, (False,)))
        recorded(tmp_path, 2).write_text(left)
        assert {kind: each["iteration"] for kind, each in read_examples(tmp_path).items()} == {"failure": 1}

    @pytest.mark.parametrize("value", [None, "x", 3, 10**400, [], [1, None, {"role": 3}], {}, {"text": 3}, True])
    def test_a_field_that_is_not_what_it_should_be_costs_no_report(self, tmp_path, value):
        good = {**line(0, True, (True,)), "reward": 1.0, "target": {"text": "so"}, "observation": "reply"}
        for name in good.keys() - {"kind", "success"}:
            recorded(tmp_path, 1, {**good, name: value})
            assert "Of an episode that was won" in markdown(run_of(examples=read_examples(tmp_path)))

    def test_of_long_and_broken_texts_a_part_is_shown(self, tmp_path):
        state = [{"role": "user", "content": "a" * 100_000 + "end"}]
        recorded(tmp_path, 1, {**line(0, True, (True,)), "state": state, "action": "b\ud800" * 9000})
        text = markdown(run_of(examples=read_examples(tmp_path)))
        text.encode("utf-8")
        assert "characters before]" in text and "aend" in text and "more characters]" in text and len(text) < 20_000
