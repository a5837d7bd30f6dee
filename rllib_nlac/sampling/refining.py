"""The policy with one refinement at test time, as an engine: each turn is criticised and replaced before it is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Variant
from rllib_nlac.types import Generation, Request, Transition


class RefiningPolicy:
    """Answers as the policy would after one round of futures, critique and refinement.

    Where the critique accepts the turn, or anything does not parse, the policy's own turn stands.

    Args:
        engine: Holds the weights of all roles.
        chat: Turns messages into tokens and back.
        prompts_for: The prompts of an environment, by its name.
        settings: Sampling and weights of the roles. How training decides what to learn does not matter here: there is one
            round, the turn that was sampled is what is judged, and the refined one is played whether it would be verified
            or not.
        variant: What the algorithm does otherwise than NLAC.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        prompts_for: Callable[[str], PromptSet],
        settings: StageSettings,
        variant: Variant = NLAC_AS_IT_IS,
    ) -> None:
        self._engine = engine
        self._chat = chat
        settings = replace(settings, num_refinements=1, rejected_weight=1.0)
        variant = NLAC_AS_IT_IS if variant.judges_new_actions else variant  # a turn that is played is today's
        self._stages = LanguageStages(engine, chat, prompts_for, settings, variant=variant)
        self._stages.purpose = "evaluation"  # as the turns
        self._queue: list[tuple[int, Request]] = []
        self._next_ticket = 0

    def submit(self, requests: list[Request]) -> list[int]:
        """Queues requests and returns their tickets."""
        tickets = list(range(self._next_ticket, self._next_ticket + len(requests)))
        self._next_ticket += len(requests)
        self._queue += zip(tickets, requests, strict=True)
        return tickets

    def withdraw(self) -> None:
        """Gives up what is queued."""
        self._queue.clear()

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        """Answers everything that is queued, in four calls of the engine, whatever the patience."""
        if not self._queue:
            return []
        (tickets, requests), self._queue = zip(*self._queue, strict=True), []
        turns = self._engine.generate(requests)
        transitions = [
            Transition(
                id=ticket,
                env=request.env,
                state=request.messages,
                action=self._chat.said(turn),
                generation=turn,
                observation="",
                reward=0.0,
                terminated=False,
                truncated=False,
                episode_success=False,
                returns_to_go=0.0,
            )
            for ticket, request, turn in zip(tickets, requests, turns, strict=True)
        ]
        # Seeded by the turns' own seeds, so that a task is answered alike whoever plays it, beside whatever others.
        seeds = [request.seed or 0 for request in requests]
        improvement = self._stages.improvement(transitions, report := StageReport())
        (refinements,) = self._stages.drive(report, improvement, seeds=seeds)
        return [(ticket, r.generation or turn) for ticket, r, turn in zip(tickets, refinements, turns, strict=True)]
