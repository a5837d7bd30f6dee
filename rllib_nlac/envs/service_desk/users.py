"""Who sits on the other side of the desk: a scripted customer, or a language model that plays one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rllib_nlac.envs.service_desk.tasks import DeskTask, Request
from rllib_nlac.inputs.endpoint import Endpoint

GOODBYE = "No, that is all. Goodbye."
STOP = "###STOP###"

_ASKS = {
    "email": r"e-?mail|who are you|identify|your name",
    "order": r"(which|what).{0,20}order|order.{0,12}(number|id)\b",
    "item": r"(which|what).{0,20}(item|product|article)s?",
    "colour": r"colou?r|variant",
    "reason": r"reason|why",
    "address": r"(which|what|new|give|tell).{0,30}address",
}
_CONFIRM = r"\bconfirm|shall i|should i|may i|do you want me to|would you like me to|go ahead|is that (correct|right|ok)"
_REFUSES = (
    r"\bcan(?:not| not|['’]t| no longer)\b|\bunable\b|\bdeclin|impossible"
    r"|(?:\bnot|n['’]t|\bno longer) (?:be )?(?:possible|allow(?:ed)?|able|eligible|permitted)\b"
)
_SETTLES = r"anything else|something else|\bdone\b|has been|have been|is now|completed"


class User(Protocol):
    """A customer. Picklable, so that an episode can be."""

    def begin(self, task: DeskTask) -> str:
        """The first words."""

    def answer(self, task: DeskTask, text: str) -> str:
        """The reply to what the agent said; ``is_over`` says whether it was the last."""

    @property
    def is_over(self) -> bool:
        """Whether the customer has left."""


@dataclass
class ScriptedUser:
    """Tells a request, answers what is asked, confirms, and goes on when the agent says that something is settled.

    It believes what it is told: only the database shows whether a write was made.
    """

    position: int = 0
    is_over: bool = False

    def begin(self, task: DeskTask) -> str:
        self.position, self.is_over = 0, False
        return f"Hello. {task.requests[0].opening}"

    def answer(self, task: DeskTask, text: str) -> str:
        said = text.lower()[:4000]
        request = task.requests[self.position]
        if re.search(_CONFIRM, said):
            return self._confirm(request, text)
        answers = [
            f"My email is {task.email}." if slot == "email" else request.answers[slot]
            for slot, pattern in _ASKS.items()
            if "?" in said and re.search(pattern, said) and (slot == "email" or slot in request.answers)
        ]
        if "anything else" in said or (request.kind == "refused" and refuses(text) and not answers):
            return self._go_on(task, refused=refuses(text))
        if answers:
            return " ".join(answers)
        if re.search(_SETTLES, said) or (request.kind == "price" and request.fact and states(text, request.fact)):
            return self._go_on(task)
        return f"I do not understand. {request.opening}"

    def _confirm(self, request: Request, text: str) -> str:
        if not names(text, request.order_id):
            return f"No. {request.answers['order']}"
        return "Yes, please do that."

    def _go_on(self, task: DeskTask, refused: bool = False) -> str:
        thanks = "That is a pity." if refused else "Thank you."
        if self.position + 1 < len(task.requests):
            self.position += 1
            return f"{thanks} One more thing. {task.requests[self.position].opening}"
        self.is_over = True
        return f"{thanks} {GOODBYE}"


@dataclass
class EndpointUser:
    """A language model that is told what its customer wants and knows. The policy in training never plays this part."""

    endpoint: Endpoint
    said: list[dict[str, str]] = field(default_factory=list)
    is_over: bool = False

    def begin(self, task: DeskTask) -> str:
        self.is_over = False
        self.said = [{"role": "system", "content": brief(task)}, {"role": "user", "content": "Hello, how can I help you?"}]
        return self._speak()

    def answer(self, task: DeskTask, text: str) -> str:
        self.said.append({"role": "user", "content": text})
        return self._speak()

    def _speak(self) -> str:
        text = self.endpoint.ask(self.said).text.strip()
        self.said.append({"role": "assistant", "content": text})
        self.is_over = STOP in text
        return text.replace(STOP, "").strip() or GOODBYE


def brief(task: DeskTask) -> str:
    """What a model that plays the customer is told."""
    wishes = [
        f"{number}. {request.opening} When you are asked, and only then: {' '.join(request.answers.values())}"
        for number, request in enumerate(task.requests, start=1)
    ]
    return "\n".join(
        [
            "You are a customer who writes to the service desk of a shop. Write one short message at a time, in plain words. "
            f"Your email is {task.email}; say so when asked. You want, one after the other:",
            *wishes,
            "Do not invent anything. When the agent asks you to confirm exactly what you want, answer with yes; when it says "
            "that something is not possible, accept it and go on to the next wish, or end. When everything is settled, answer "
            f"with {STOP} and nothing else.",
        ]
    )


def names(text: str, order_id: str) -> bool:
    """Whether a text names an order."""
    return re.search(rf"\b{re.escape(order_id)}\b", text) is not None


def refuses(text: str) -> bool:
    """Whether a text says that something is not possible."""
    return re.search(_REFUSES, text.lower()[:4000]) is not None


def states(text: str, fact: str) -> bool:
    """Whether a text states an amount: 49.50, and also 49.5 or $49.50."""
    amounts: Sequence[str] = re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")[:4000])
    return any(float(amount) == float(fact) for amount in amounts if len(amount) < 20)
