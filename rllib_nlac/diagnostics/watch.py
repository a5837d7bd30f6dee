"""Watches over an algorithm on text: evaluations, the last checkpoint, answers that do not parse, other causes of warnings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_LEN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED,
    NUM_EPISODES,
)

from rllib_nlac.activity import EPISODES, activity, publish_to_ray
from rllib_nlac.diagnostics.metrics import SECONDS
from rllib_nlac.diagnostics.notices import NOTICES, shown
from rllib_nlac.diagnostics.results import BEFORE, ROLES, WITH_FORM, Run, figure, one_branch, with_beginning
from rllib_nlac.diagnostics.rules import DURING
from rllib_nlac.engine.chat import TOO_LONG
from rllib_nlac.engine.vllm_settings import VLLMSettings
from rllib_nlac.language.report import StageReport
from rllib_nlac.sampling.collector import CollectionError
from rllib_nlac.sampling.env_runner import UNPARSED_TURNS

EVALUATION = "evaluation"  # the part of an iteration's seconds
MANY_INVENTED = 0.1  # share of turns with another role's special tokens above which a run warns
MANY = 0.5  # share of a role's answers that do not parse, or of its prompts that are too long, from which on it is said
Examine = Callable[[Sequence[SingleAgentEpisode], EnvRunnerGroup | None], None]


class Watch:
    """Belongs to one algorithm, RLlib's or ours, which passes its calls of RLlib's methods through this object.

    Args:
        algorithm: The algorithm, with ``config``, ``metrics`` and ``notices``.

    Attributes:
        last_checkpoint: Path of the checkpoint that was written or restored last; None where there is none.
        evaluation_seconds: Seconds of each part of this iteration's evaluation.
        examine: Called with the episodes that an evaluation has just played, and the runners that play in evaluations (None:
            the algorithm's own runner). None: nothing else looks at them.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self._results: list[dict[str, Any]] = []
        self._is_before_training = False
        self.last_checkpoint: str | None = None
        self.evaluation_seconds: dict[str, float] = {}
        self.examine: Examine | None = None

    def setup(self, setup: Callable[[], None]) -> None:
        """Runs RLlib's ``setup``.

        Raises:
            CollectionError: No EnvRunner answered.
        """
        algorithm = self._algorithm
        chosen = algorithm.config.model_defaults.why
        activity.turn_to(f"loading the model{', ' if chosen else ''}{chosen}", iteration=0)
        if algorithm._storage is not None:  # Tune's, whose driver reads it
            publish_to_ray(algorithm._storage.trial_dir_name)
        try:
            setup()
        except IndexError as error:  # RLlib looks for the first answer of its runners, of which there was none
            if getattr(algorithm, "spaces", None) is not None or getattr(algorithm, "env_runner_group", None) is None:
                raise
            count = algorithm.env_runner_group.num_remote_env_runners()
            raise CollectionError(
                f"none of {count} EnvRunners answered when the run began: their processes ended or are too slow to start. An "
                "environment's constructor ends its process, or memory or processors are short: see the runners' logs in Ray's "
                "session folder"
            ) from error

    def step(self, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs RLlib's ``step``.

        Returns:
            Its results, with new warnings under ``notices``.
        """
        algorithm = self._algorithm
        begun = self._evaluate_before() if algorithm.iteration == 0 else None
        activity.turn_to("training", iteration=algorithm.iteration + 1)
        self.evaluation_seconds.clear()
        results = step()
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
        self._check_turns(runners, runners.pop(UNPARSED_TURNS, []))
        self._check_prefix_cache(runners)
        self._check_results(results)
        if new := algorithm.notices.take():
            results[NOTICES] = "\n".join(new)  # a list would be taken for a histogram
        return results

    def _evaluate_before(self) -> tuple[dict[str, Any], float] | None:
        """Evaluates the model before training.

        Returns:
            Its results and the seconds that it took; None where the configuration does not ask for it.
        """
        config = self._algorithm.config
        if not (config.evaluation_interval and config.evaluate_before_training):
            return None
        self._is_before_training = True
        try:
            results = self._algorithm.evaluate()
        finally:
            self._is_before_training = False
        return results, self.evaluation_seconds[EVALUATION]

    def _check_results(self, results: dict[str, Any]) -> None:
        """Warns by the rules that hold during a run, of the evaluations that this process has seen."""
        iteration, interval = self._algorithm.iteration + 1, self._algorithm.config.evaluation_interval
        own = {key: results[key] for key in (BEFORE, EVALUATION_RESULTS) if key in results}
        own |= {"training_iteration": iteration, "config": {"evaluation_interval": interval}}
        results_so_far = one_branch([*self._results, own], lambda r: r["training_iteration"])
        self._results = [r for r in results_so_far if BEFORE in r or EVALUATION_RESULTS in r]
        run = Run(Path(), "", with_beginning(self._results))
        for rule in DURING:
            self._algorithm.notices.update(rule.__name__, rule(run))

    @property
    def evaluated_iteration(self) -> int:
        """Number of the iteration that an evaluation under way is of; 0 before training."""
        return 0 if self._is_before_training else self._algorithm.iteration + 1

    def _check_turns(self, runners: dict[str, Any], examples: str | list[str]) -> None:
        names = ("action_parse_failures", NUM_ENV_STEPS_SAMPLED, "action_parse_failures_cut_off")
        counts = (figure(runners, name) for name in names)
        failed, steps, cut_off = (0 if math.isnan(count) else int(count) for count in counts)
        example = examples if isinstance(examples, str) else next(iter(examples), "")  # RLlib unpacks a list of one
        self.check_parsing("the policy's turns", failed, steps, cut_off, example, "max_action_tokens")
        episodes, guessed, invented = (figure(runners, name) for name in (NUM_EPISODES, "success_guessed", "invented_turns"))
        update = self._algorithm.notices.update
        if episodes > 0:  # not NaN, as where nothing was played
            text = (
                f"{guessed:.0f} of {episodes:.0f} episodes ended without info['success'], so that a return above 0 counts as "
                "success, also where a lost game pays something. What to do: put it into the info of the last step"
            )
            update("success guessed", text if guessed > 0 else None)
            text = (
                f"{invented:.0f} of {steps} turns hold special tokens of another role: the model goes on with what others say. "
                "What to do: see that its chat template is its own and that it is instruction-tuned"
            )
            update("invented turns", text if invented > MANY_INVENTED * steps else None)
        if figure(runners, "episodes_with_tools") > 0:
            obstacle = self._algorithm.chat.template.tools_obstacle
            text = f"tools are described in the system prompt and their results told as user messages, for {obstacle}"
            update("tools in plain text", text if obstacle else None)
            text = (
                "tools were offered, and no turn called one. What to do: look at a turn; a model that writes calls in a form "
                "of its own needs tool_template, and one that writes none a warm-up (run: SFT)"
            )
            update("no tool called", text if not figure(runners, "tool_calls") > 0 else None)

    def _check_prefix_cache(self, runners: dict[str, Any]) -> None:
        """Warns where episodes of several turns found nothing in the prefix cache; only vLLM here says what it found."""
        rate, turns = (figure(runners, name) for name in ("prefix_cache_hit_rate", EPISODE_LEN_MEAN))
        if math.isnan(rate) or not turns > 1:
            return
        spec = self._algorithm.config.engine_spec
        settings = spec.settings
        if spec.endpoint or not isinstance(settings, VLLMSettings):
            return
        block = (settings.extra or {}).get("block_size", "vLLM's choice")
        advice = (
            "set a block_size below the length of a dialogue, as in engine_config: {extra: {block_size: 32}}, since the cache "
            f"keeps whole blocks only (block_size is {block})"
            if settings.enable_prefix_caching
            else "set engine_config: {enable_prefix_caching: true}"
        )
        text = f"prefix_cache_hit_rate is 0, so each turn computes its whole dialogue again. What to do: {advice}"
        self._algorithm.notices.update("prefix cache", None if rate else text)

    def check_stages(self, report: StageReport) -> None:
        """Tells a person where most answers of one of the critic's roles do not parse, or most of its prompts are too long."""
        lost = [f"{n} of {of} of {role}" for role, of in report.prompts.items() if (n := report.too_long[role]) > MANY * of]
        text = f"prompts that exceed the context were not asked: {', '.join(lost)}. What to do: {TOO_LONG}" if lost else None
        self._algorithm.notices.update("long prompts", text)
        for role, (name, limit) in ROLES.items():
            failed, asked, cut_off = report.unparsed[role], report.answered[role], report.cut_off[role]
            example, has_form = report.examples.get(role, ""), role in WITH_FORM
            self.check_parsing(f"the {name}", failed, asked, cut_off, example, limit, has_form)

    def check_parsing(
        self, role: str, failed: int, asked: int, cut_off: int, example: str, limit: str, has_form: bool = False
    ) -> None:
        """Tells a person where most answers of a role do not parse, and what to do; once, until it is better.

        Args:
            role: Whose answers, as a person calls them.
            failed: How many did not parse.
            asked: Number of answers.
            cut_off: How many of those that failed the token limit cut off.
            example: One of them, as it came.
            limit: The key of the token limit.
            has_form: Whether an engine can enforce the form of these answers.
        """
        if failed <= MANY * asked:
            if asked:
                self._algorithm.notices.update(role, None)
            return
        defaults = self._algorithm.config.model_defaults
        if has_form and not defaults.structured_answers:
            advice = f"set structured_answers: true, so that the engine enforces the form; or {self._suitable()}"
        elif 2 * cut_off > failed:
            advice = f"raise {limit}, which is {getattr(defaults, limit)}"
        else:
            advice = self._suitable()
        cut = f", {cut_off} of them cut off by {limit}" if cut_off else ""
        self._algorithm.notices.update(
            role,
            f"{failed} of {asked} of {role} ({failed / asked:.0%}) do not parse{cut}. One of them: {shown(example)}. "
            f"What to do: {advice}",
        )

    def _suitable(self) -> str:
        config = self._algorithm.config
        prompts = config.model_defaults.prompts if isinstance(config.model_defaults.prompts, str) else "a mapping of your own"
        return (
            f"see that language_model ({config.language_model}) is instruction-tuned and that prompts ({prompts}) are written "
            "for it: 'default' suits large models, 'small' those below 3B"
        )

    def way_back(self) -> str:
        """Where a run that ends because of its numbers can go on, and with what."""
        config = self._algorithm.config
        where = (
            f"Go on from the last good checkpoint, {self.last_checkpoint},"
            if self.last_checkpoint
            else ("No checkpoint was written or restored in this process: go on from one of an earlier run, or start anew,")
        )
        has_scheduler = "scheduler" in getattr(config, "deepspeed_config", {})
        rate = "learning rate (the scheduler of deepspeed_config)" if has_scheduler else f"lr (now {config.lr})"
        return f"{where} with a lower {rate} or grad_clip (now {config.grad_clip})"

    def evaluate(self, evaluate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs RLlib's ``evaluate``, and adds what callbacks logged at its end."""
        metrics = self._algorithm.metrics
        # Or what this evaluation does not count, as episodes that the context ended, would have the last one's number.
        metrics.delete(EVALUATION_RESULTS, key_error=False)
        with self.timing(EVALUATION), activity.stage("evaluating", self._num_evaluated, EPISODES):
            results = evaluate()
        # What a callback logs at the end of an evaluation comes after RLlib has taken the results.
        late = metrics.peek(EVALUATION_RESULTS, default={})
        return results | {name: value for name, value in late.items() if name not in results}

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
        config = self._algorithm.config
        count = config.evaluation_duration
        return count if config.evaluation_duration_unit == EPISODES and isinstance(count, int) else 0

    def save(self, save: Callable[[], Any]) -> Any:
        """Runs Tune's ``save``: what it writes is moved to where the trial keeps its checkpoints, and counts as there."""
        activity.turn_to("saving a checkpoint")
        result = save()
        self.last_checkpoint = result.checkpoint.path
        return result
