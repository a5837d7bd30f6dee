"""What every algorithm on text watches over: its last checkpoint, answers that do not parse, and what a person must be told."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS, NUM_ENV_STEPS_SAMPLED

from rllib_nlac.activity import EPISODES, activity, publish_to_ray
from rllib_nlac.diagnostics.metrics import SECONDS
from rllib_nlac.diagnostics.notices import NOTICES, Notices, shown
from rllib_nlac.diagnostics.results import BEFORE, ROLES, WITH_FORM, figure
from rllib_nlac.diagnostics.trends import Trends
from rllib_nlac.engine.chat import TOO_LONG
from rllib_nlac.language.report import StageReport
from rllib_nlac.sampling.collector import CollectionError
from rllib_nlac.sampling.env_runner import UNPARSED_TURNS

EVALUATION = "evaluation"  # the part of an iteration's seconds
MANY = 0.5  # share of a role's answers that do not parse, or of its prompts that are too long, from which on it is said


class Watched(Algorithm):
    """A mixin for RLlib's algorithms and ours: put it before the algorithm."""

    config: Any
    engine: Any = None  # the algorithm's own; None where each runner has one, as under RLlib's algorithms
    instructions = ""  # what the policy is told beside the environment's own system prompt
    _is_before_training = False
    weight_version: int | None = None  # of the weights that play; None where RLlib's own sync numbers none

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.notices = Notices()
        self.trends = Trends(self.notices.heed)
        self.last_checkpoint: str | None = None
        self.evaluation_seconds: dict[str, float] = {}
        super().__init__(*args, **kwargs)

    @override(Algorithm)
    def setup(self, config: Any) -> None:
        chosen = self.config.manners.why
        activity.turn_to(f"loading the model{', ' if chosen else ''}{chosen}", iteration=0)
        if self._storage is not None:  # Tune's, whose driver reads it
            publish_to_ray(self._storage.trial_dir_name)
        try:
            super().setup(config)
        except IndexError as error:  # RLlib looks for the first answer of its runners, of which there was none
            if getattr(self, "spaces", None) is not None or getattr(self, "env_runner_group", None) is None:
                raise
            count = self.env_runner_group.num_remote_env_runners()
            raise CollectionError(
                f"none of {count} EnvRunners answered when the run began: their processes ended or are too slow to start. An "
                "environment's constructor ends its process, or memory or processors are short: see the runners' logs in Ray's "
                "session folder"
            ) from error

    @override(Algorithm)
    def step(self) -> dict[str, Any]:
        """RLlib's iteration, with what is new for a person under ``notices`` in its results."""
        begun = self._evaluate_before() if self.iteration == 0 else None
        activity.turn_to("training", iteration=self.iteration + 1)
        self.evaluation_seconds.clear()
        results = super().step()
        if begun is not None:
            results[BEFORE] = begun[0]
            results.setdefault(SECONDS, {})["evaluation_before"] = begun[1]
        if EVALUATION not in self.evaluation_seconds:
            # RLlib repeats the last evaluation in the next result, and has NaN in those after: neither is of this iteration.
            # Tune would take the first for its score, and forget its best at the second.
            results.pop(EVALUATION_RESULTS, None)
        # RLlib evaluates after it has gathered an iteration's metrics: what is logged then is the next one's.
        if seconds := {**results.get(SECONDS, {}), **self.evaluation_seconds}:
            # It repeats what was ever logged, with NaN for what was not logged in this iteration.
            results[SECONDS] = {part: took for part, took in seconds.items() if not math.isnan(took)}
        runners = results.get(ENV_RUNNER_RESULTS) or {}
        self._heed_turns(runners, runners.pop(UNPARSED_TURNS, []))
        self.trends.heed_iteration(results)
        if new := self.notices.take():
            results[NOTICES] = "\n".join(new)  # a list would be taken for a histogram
        return results

    def _evaluate_before(self) -> tuple[dict[str, Any], float] | None:
        """What the model can do before anything is trained, and the seconds that it took; None where nobody asks."""
        config = self.config
        if not (config.evaluation_interval and config.evaluate_before_training):
            return None
        self._is_before_training = True
        try:
            results = self.evaluate()
        finally:
            self._is_before_training = False
        return results, self.evaluation_seconds[EVALUATION]

    @property
    def evaluated_iteration(self) -> int:
        """Number of the iteration that an evaluation under way is of; 0 before training."""
        return 0 if self._is_before_training else self.iteration + 1

    def _heed_turns(self, runners: dict[str, Any], examples: str | list[str]) -> None:
        names = ("action_parse_failures", NUM_ENV_STEPS_SAMPLED, "action_parse_failures_cut_off")
        counts = (figure(runners, name) for name in names)
        failed, steps, cut_off = (0 if math.isnan(count) else int(count) for count in counts)
        example = examples if isinstance(examples, str) else next(iter(examples), "")  # RLlib unpacks a list of one
        self.heed_parsing("the policy's turns", failed, steps, cut_off, example, "max_action_tokens")

    def heed_stages(self, report: StageReport) -> None:
        """Tells a person where most answers of one of the critic's roles do not parse, or most of its prompts are too long."""
        lost = [f"{n} of {of} of {role}" for role, of in report.prompts.items() if (n := report.too_long[role]) > MANY * of]
        text = f"prompts that exceed the context were not asked: {', '.join(lost)}. What to do: {TOO_LONG}" if lost else None
        self.notices.heed("long prompts", text)
        for role, (name, limit) in ROLES.items():
            failed, asked, cut_off = report.unparsed[role], report.answered[role], report.cut_off[role]
            example, has_form = report.examples.get(role, ""), role in WITH_FORM
            self.heed_parsing(f"the {name}", failed, asked, cut_off, example, limit, has_form)

    def heed_parsing(
        self, role: str, failed: int, asked: int, cut_off: int, example: str, limit: str, has_form: bool = False
    ) -> None:
        """Tells a person where most answers of a role do not parse, and what to do; once, until it is better.

        Args:
            role: Whose answers, as a person calls them.
            failed: How many did not parse.
            asked: Of how many.
            cut_off: How many of those that failed the token limit cut off.
            example: One of them, as it came.
            limit: The key of the token limit.
            has_form: Whether an engine can enforce the form of these answers.
        """
        if failed <= MANY * asked:
            if asked:
                self.notices.heed(role, None)
            return
        if has_form and not self.config.manners.structured_answers:
            advice = f"set structured_answers: true, so that the engine enforces the form; or {self._suitable()}"
        elif 2 * cut_off > failed:
            advice = f"raise {limit}, which is {getattr(self.config.manners, limit)}"
        else:
            advice = self._suitable()
        cut = f", {cut_off} of them cut off by {limit}" if cut_off else ""
        self.notices.heed(
            role,
            f"{failed} of {asked} of {role} ({failed / asked:.0%}) do not parse{cut}. One of them: {shown(example)}. "
            f"What to do: {advice}",
        )

    def _suitable(self) -> str:
        return (
            f"see that language_model ({self.config.language_model}) is instruction-tuned and that prompts "
            f"({_name(self.config.manners.prompts)}) are written for it: 'default' suits large models, 'small' those below 3B"
        )

    def examine(self, episodes: Sequence[SingleAgentEpisode], group: EnvRunnerGroup | None) -> None:
        """What else an algorithm looks at in the episodes of an evaluation; here nothing.

        Args:
            episodes: As the current policy has just played them.
            group: Who plays in evaluations; None: the algorithm's own runner.
        """

    def way_back(self) -> str:
        """Where a run that ends because of its numbers can go on, and with what."""
        where = (
            f"Go on from the last good checkpoint, {self.last_checkpoint},"
            if self.last_checkpoint
            else ("No checkpoint was written or restored in this process: go on from one of an earlier run, or start anew,")
        )
        return f"{where} with a lower lr (now {self.config.lr}) or grad_clip (now {self.config.grad_clip})"

    @override(Algorithm)
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # Or what this evaluation does not count, as episodes that the context ended, would have the last one's number.
        self.metrics.delete(EVALUATION_RESULTS, key_error=False)
        with self.timing(EVALUATION), activity.stage("evaluating", self._num_evaluated, EPISODES):
            results = super().evaluate(*args, **kwargs)
        # What a callback logs at the end of an evaluation comes after RLlib has taken the results.
        late = self.metrics.peek(EVALUATION_RESULTS, default={})
        results |= {name: value for name, value in late.items() if name not in results}
        self.trends.heed_evaluation(results)
        return results

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Reports the seconds of a part of an evaluation, with the iteration that it is of."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.evaluation_seconds[name] = time.perf_counter() - started

    @property
    def _num_evaluated(self) -> int:
        """Episodes of an evaluation; 0 where it is measured otherwise."""
        count = self.config.evaluation_duration
        return count if self.config.evaluation_duration_unit == EPISODES and isinstance(count, int) else 0

    @override(Algorithm)
    def cleanup(self) -> None:
        activity.withdraw()
        super().cleanup()

    @override(Algorithm)
    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Tune's: what it writes is moved to where the trial keeps its checkpoints, and counts as there."""
        activity.turn_to("saving a checkpoint")
        result = super().save(*args, **kwargs)
        self.last_checkpoint = result.checkpoint.path
        return result

    @override(Algorithm)
    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        self.last_checkpoint = super().save_to_path(path, **kwargs)
        return self.last_checkpoint

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().restore_from_path(path, *args, **kwargs)
        if kwargs.get("component") is None:
            self.last_checkpoint = str(path)


def _name(prompts: Any) -> str:
    return prompts if isinstance(prompts, str) else "a mapping of your own"
