"""Between the library ``gepa``, which searches, and what plays and reflects here. This file alone imports the library.

The library decides which candidate is changed next, whether the result is accepted, and which candidates are best on some
validation task. It keeps its state in a file and goes on from there, so that a search can be cut into iterations: each is a
call of ``gepa.optimize`` that begins with the state that the last one left.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.strategies.eval_policy import FullEvaluationPolicy
from gepa.strategies.instruction_proposal import InstructionProposalSignature as Wording
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.episode import episode_success, messages_at
from rllib_nlac.sampling.env_runner import EVALUATION_SEED
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import hash_seed

logger = logging.getLogger(__name__)
INSTRUCTIONS = "instructions"  # a candidate's one text
ATTEMPTS = "<side_info>"  # the library's placeholder; it fills in the instructions first
VALIDATION_SEED = 2 * EVALUATION_SEED
ENDLESS = 1 << 31
Play = Callable[[Sequence[Start], str], list[SingleAgentEpisode | None]]
Reflect = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Search:
    """Where a search stands.

    Attributes:
        state: The library's own, as it writes it.
        candidates: Instructions that were accepted; the first are those that it began with.
        returns: The mean return of each over the validation tasks.
        front: Numbers of those that no other beats on some validation task.
        worst: The least return of all episodes; infinite before there is one.
        validation: Seed and number of the validation tasks.
        budget: Episodes that it was allowed so far.
        tasks_per_round: By which the rounds' tasks are numbered; None in checkpoints of earlier versions.
    """

    state: bytes
    candidates: tuple[str, ...]
    returns: tuple[float, ...]
    front: tuple[int, ...]
    worst: float
    validation: tuple[int, int]
    budget: int
    tasks_per_round: int | None = None

    @property
    def instructions(self) -> str:
        """Those with the best mean return, the first of equals."""
        return self.candidates[self.returns.index(max(self.returns))]


class Tasks:
    """Tasks by their numbers, as the library loads data.

    Args:
        seed: Tells one supply from another.
        count: How many there are.
    """

    def __init__(self, seed: int, count: int = ENDLESS) -> None:
        self.seed, self._count = seed, count

    def __len__(self) -> int:
        return self._count

    def all_ids(self) -> range:
        """The numbers of all."""
        return range(self._count)

    def fetch(self, ids: Sequence[int]) -> list[Start]:
        """The tasks of these numbers. All candidates play one with the same seeds."""
        seeds = [hash_seed(self.seed, number) for number in ids]
        return [Start(f"{number:010d}", task_seed=seed, sampling_seed=seed) for number, seed in zip(ids, seeds, strict=True)]


class NewTasks:
    """A round's tasks were in no round before."""

    def __init__(self, count: int) -> None:
        self._count = count

    def next_minibatch_ids(self, loader: Tasks, state: Any) -> list[int]:
        """Their numbers, by the round's."""
        return list(range(state.i * self._count, (state.i + 1) * self._count))


class Adapter:
    """The library's ``GEPAAdapter``: it plays, shows what came of it, and asks for better instructions.

    Args:
        play: Plays tasks under instructions; gives None in the place of an episode that its environment lost.
        reflect: Answers the first of several prompts that fits the context; None where none does, or the answer is no use.
        wording: Asks for instructions, with the library's placeholders; None: the library's own.
        quote: Begins each line of what an environment or the policy said.
    """

    def __init__(self, play: Play, reflect: Reflect, wording: str | None, quote: str) -> None:
        self._play, self._reflect, self._wording, self._quote = play, reflect, wording, quote
        self.error: Exception | None = None  # the library logs some and goes on
        self.rounds = self.proposals = 0
        self.worst = math.inf  # return of all episodes so far

    def evaluate(self, batch: list[Start], candidate: dict[str, str], capture_traces: bool = False) -> EvaluationBatch:
        """The return of each task. A lost episode counts as the worst of its batch, a lost batch as the worst of the search.

        Raises:
            RuntimeError: All episodes with which the search begins were lost.
        """
        episodes = self._play(batch, candidate[INSTRUCTIONS]) if batch else []
        played = [episode.get_return() for episode in episodes if episode is not None]
        self.worst = min([self.worst, *played])
        if episodes and self.worst == math.inf:
            raise RuntimeError(f"all {len(episodes)} episodes with which the search begins were lost: the log names the causes")
        worst = min(played, default=self.worst)
        returns = [worst if episode is None else episode.get_return() for episode in episodes]
        return EvaluationBatch(outputs=returns, scores=returns, trajectories=episodes)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """A record of each episode; nothing where all were won."""
        played = [episode for episode in eval_batch.trajectories or [] if episode is not None]
        if all(map(episode_success, played)):
            return {}
        with self._noting_errors():
            return {INSTRUCTIONS: self._records(played, candidate[INSTRUCTIONS])}

    def _records(self, episodes: Sequence[SingleAgentEpisode], instructions: str) -> list[dict[str, Any]]:
        records, told = [], ""
        for episode in episodes:
            inputs = {"First message": self._quoted(episode.get_observations(0))}
            first = messages_at(episode, 0)[0]
            system = first.content.removesuffix(instructions).strip() if first.role == "system" else ""
            if system != told:  # most tasks have the same
                inputs, told = {"System prompt": self._quoted(system), **inputs}, system
            records.append({"Inputs": inputs, "Generated Outputs": self._dialogue(episode), "Feedback": outcome(episode)})
        return records

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """New instructions from what came of the present ones; nothing where there is nothing to learn, or no useful answer."""
        records, present = list(reflective_dataset.get(INSTRUCTIONS, ())), candidate[INSTRUCTIONS]
        self.rounds += bool(records)
        with self._noting_errors():
            answer = self._reflect([self._prompt(present, records[:number]) for number in range(len(records), 0, -1)])
        text = "" if answer is None else Wording.output_extractor(answer)["new_instruction"].replace(ATTEMPTS, "").strip()
        if not text or text == present:
            return {}
        self.proposals += 1
        return {INSTRUCTIONS: text}

    def _prompt(self, present: str, records: Sequence[Mapping[str, Any]]) -> str:
        known = {"current_instruction_doc": present, "dataset_with_feedback": records, "prompt_template": self._wording}
        return str(Wording.prompt_renderer(known))

    def _dialogue(self, episode: SingleAgentEpisode) -> str:
        """The turns and what was replied to each."""
        turns = zip(episode.get_actions(), episode.get_observations(slice(1, None)), strict=True)
        return "\n".join(f"Assistant:\n{self._quoted(turn)}\nReply:\n{self._quoted(reply)}" for turn, reply in turns)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise

    def _quoted(self, text: str) -> str:
        return "\n".join(f"{self._quote}{line}" for line in text.splitlines() or [""])


def outcome(episode: SingleAgentEpisode) -> str:
    """How an episode ended, in words."""
    return f"The task was {'won' if episode_success(episode) else 'lost'}, with a return of {episode.get_return():g}."


class _Log:
    """Where the library says what it does."""

    def log(self, message: str) -> None:
        logger.debug("%s", message)


def go_on(
    search: Search | None,
    adapter: Adapter,
    instructions: str,
    tasks: Tasks,
    validation: Tasks,
    tasks_per_round: int,
    budget: int,
    seed: int,
) -> Search:
    """Plays rounds, at least one, until as many episodes of the whole search as ``budget`` were asked for.

    Args:
        search: Where it stands; None: it begins, by playing the validation tasks under ``instructions``.
        adapter: Plays and reflects.
        instructions: The first candidate.
        tasks: On which a candidate is compared with its parent, and which are reflected on.
        validation: On which those are compared that were better than their parents.
        tasks_per_round: Tasks of a round.
        budget: Episodes since the search began.
        seed: Of the choice among candidates.

    Raises:
        Exception: Whatever a player or the engine that reflects raised.
    """
    adapter.rounds = adapter.proposals = 0
    asked = count()

    def enough(state: Any) -> bool:
        """The library asks before each round."""
        return adapter.error is not None or (next(asked) > 0 and state.total_num_evals >= budget)

    policy: Any = FullEvaluationPolicy()
    if search is not None:
        adapter.worst = search.worst
        # The library plays the first candidate again before it reads its state.
        policy.get_seed_eval_batch = lambda loader: []
    with TemporaryDirectory(prefix="gepa_") as folder:
        file = Path(folder) / "gepa_state.bin"
        if search is not None:
            file.write_bytes(search.state)
        optimize: Any = gepa.optimize  # its protocols have more methods than it calls
        result = optimize(
            seed_candidate={INSTRUCTIONS: instructions},
            trainset=tasks,
            valset=validation,
            adapter=adapter,
            batch_sampler=NewTasks(tasks_per_round),
            skip_perfect_score=False,
            stop_callbacks=enough,
            logger=_Log(),
            run_dir=folder,
            track_best_outputs=False,
            val_evaluation_policy=policy,
            seed=seed,
        )
        if adapter.error is not None:
            raise adapter.error
        return Search(
            state=file.read_bytes(),
            candidates=tuple(candidate[INSTRUCTIONS] for candidate in result.candidates),
            returns=tuple(result.val_aggregate_scores),
            front=tuple(sorted(set().union(*result.per_val_instance_best_candidates.values()))),
            worst=adapter.worst,
            validation=(validation.seed, len(validation)),
            budget=budget,
            tasks_per_round=tasks_per_round,
        )
