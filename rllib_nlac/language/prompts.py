"""Prompts as versioned data: one YAML file a set, in ``prompt_sets/`` or anywhere a user keeps one.

Every role speaks into the dialogue itself: its prompt is s (and a), followed by one user message, the instruction. So
all roles share the prefix of the policy's own prompt, which an engine's prefix cache then computes once.

Instructions quote texts that others wrote: an environment's reply, and futures and critiques, which may repeat it. A quoted
text stays in its place whatever it says, see ``PromptSet.quote``.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from rllib_nlac.inputs.tool_calls import tools_message
from rllib_nlac.language.forms import Forms
from rllib_nlac.types import Future, Message, Transition

SHIPPED = ("default", "small", "compact")

# Which fields each role's instruction must show. An instruction without its futures would be a critic that sees nothing.
_REQUIRED = {
    "predict": set(),
    "backup": {"observation", "reward", "next_future"},
    "backup_end": {"observation", "reward"},
    "evaluate": {"futures"},
    "refine": {"critique"},
    "rethink": {"reasoning", "final"},
    "rethink_action": {"reasoning"},
}

# Where an instruction says how to answer, it may show the form that the set declares.
_OPTIONAL = {
    "predict": {"future_form"},
    "backup": {"future_form"},
    "backup_end": {"future_form"},
    "evaluate": {"critique_form"},
}
_KINDS = {int: "a whole number", str: "a text"}


@dataclass(frozen=True)
class PromptSet:
    """The wording of every role for one environment.

    Attributes:
        name: The set's name.
        version: Counted up with every change of wording.
        forms: How futures and critiques are written; ``{future_form}`` and ``{critique_form}`` in an instruction show it.
        predict: Asks for ``Future: ...`` ending in SUCCESS or FAILURE.
        backup: Asks for one new future from the reply, the reward and d'.
        backup_end: The same where nothing follows.
        evaluate: Asks for ``Optimal:``, ``Reason:``, ``Fix:``.
        refine: Asks for the action again.
        system: Replaces the environment's system prompt where it is not None; "" drops it.
        rethink: Asks a thinking model for the reasoning behind a future again, without hindsight.
        rethink_action: Asks it for the reasoning behind a turn again, without the critique.
        quote: Prefix of every line of a quoted text, such as "| "; the instruction says that such lines are data. Empty: no
            prefix, for models that know exact wordings only. Then labels and list numbers within a quoted text are altered, so
            that no reader takes them for the instruction's or the answer's own.
        react: Added to the system prompt where turns have a thought and an action (``action_format: react``).
    """

    name: str
    version: int
    predict: str
    backup: str
    backup_end: str
    evaluate: str
    refine: str
    forms: Forms = field(default_factory=Forms)
    system: str | None = None
    rethink: str = (
        "[The task is paused. You are now its critic.]\n"
        "Somebody who already knew the reply to the last action above wrote this reasoning:\n{reasoning}\n\n"
        "and then this prediction:\n{final}\n\n"
        "Write the reasoning again as it could have been written before the reply was known: speak of what may happen, as "
        "in 'if the user answers yes, ...', and never quote the reply. Write only the reasoning."
    )
    rethink_action: str = (
        "[The task is paused.]\n"
        "Behind your last turn above is this reasoning, which had a critic's advice in view:\n{reasoning}\n\n"
        "Write the reasoning again from the dialogue alone, so that it leads to the same turn and never speaks of a critic, "
        "of advice or of an earlier attempt. Write only the reasoning."
    )
    quote: str = ""
    react: str = "Answer with a line 'Thought: ...' and then a line 'Action: ...'. Only the action reaches the environment."

    def __post_init__(self) -> None:
        for key in fields(self):
            if key.name == "forms":  # checked where they are read
                continue
            value, kind = getattr(self, key.name), int if key.name == "version" else str
            if not isinstance(value, kind) and not (value is None and key.default is None):
                raise ValueError(f"prompt set {self.name!r}, {key.name}: it must be {_KINDS[kind]}, and it is {value!r:.80}")
        for role, required in _REQUIRED.items():
            template = getattr(self, role)
            if template is None:  # what may be left out
                continue
            try:
                used = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
            except ValueError as error:
                raise ValueError(f"prompt set {self.name!r}, {role}: {error}; write a literal brace as {{{{") from error
            if used - _OPTIONAL.get(role, set()) != required:
                raise ValueError(
                    f"prompt set {self.name!r}, {role}: the fields must be {sorted(required)}, and it has {sorted(used)}"
                )
        if self.quote and not self.quote.strip():
            raise ValueError(
                f"prompt set {self.name!r}, quote: it must be empty or hold a visible mark, and it is {self.quote!r}"
            )

    def state(
        self, system_prompt: str, first_observation: str, action_format: str = "plain", tools: Sequence[Any] | None = None
    ) -> tuple[Message, ...]:
        """The messages at the start of an episode; ``tools`` are the schemas of what the agent may call."""
        system = system_prompt if self.system is None else self.system
        if action_format == "react" and self.react:
            system = f"{system}\n\n{self.react}".strip()
        opening: tuple[Message, ...] = (Message("user", first_observation),)
        if system:
            opening = (Message("system", system), *opening)
        return (tools_message(tools), *opening) if tools else opening

    def predict_messages(self, state: Sequence[Message], action: str) -> tuple[Message, ...]:
        """Prompt of M(d | s, a)."""
        return self._ask(state, action, self.predict.format(future_form=self.forms.future.shown))

    def backup_messages(self, transition: Transition, next_future: str | None) -> tuple[Message, ...]:
        """Prompt of B(s', r, d'), with ``next_future`` None exactly when the episode ended here."""
        known = {
            "observation": self._quoted(transition.observation, "backup"),
            "reward": f"{transition.reward:g}",
            "future_form": self.forms.future.shown,
        }
        if next_future is None:
            return self._ask(transition.state, transition.action, self.backup_end.format(**known))
        instruction = self.backup.format(**known, next_future=self._quoted(next_future, "backup"))
        return self._ask(transition.state, transition.action, instruction)

    def evaluate_messages(self, state: Sequence[Message], action: str, futures: Sequence[Future]) -> tuple[Message, ...]:
        """Prompt of E(s, a, d_1..d_k)."""
        after = "\n" if self.quote else " "
        listed = "\n".join(
            f"{number}.{after}{self._quoted(future.text, 'evaluate')}" for number, future in enumerate(futures, start=1)
        )
        return self._ask(state, action, self.evaluate.format(futures=listed, critique_form=self.forms.critique.shown))

    def refine_messages(self, state: Sequence[Message], action: str, critique: str) -> tuple[Message, ...]:
        """Prompt of π_r(a | s, a, Q_L)."""
        return self._ask(state, action, self.refine.format(critique=self._quoted(critique, None)))

    def rethink_messages(self, state: Sequence[Message], action: str, reasoning: str, final: str) -> tuple[Message, ...]:
        """Prompt for the corrected reasoning of a future."""
        quoted = {"reasoning": self._quoted(reasoning, None), "final": self._quoted(final, None)}
        return self._ask(state, action, self.rethink.format(**quoted))

    def rethink_action_messages(self, state: Sequence[Message], action: str, reasoning: str) -> tuple[Message, ...]:
        """Prompt for the corrected reasoning of a refined turn."""
        return self._ask(state, action, self.rethink_action.format(reasoning=self._quoted(reasoning, None)))

    def _quoted(self, text: str, role: str | None) -> str:
        """A text of others as an instruction shows it.

        Args:
            text: What they wrote.
            role: The role whose instruction shows it; None for a text that is an answer itself and stands last, so that it can
                imitate nothing.
        """
        if self.quote:
            return "\n".join(f"{self.quote}{line}" for line in text.splitlines() or [""])
        if role is None:
            return text
        # The colon moves off its label: "Reply :" says the same and is none.
        text = _labels(self.backup + self.evaluate, self.forms).sub(r"\1 :", text)
        return _NUMBERED.sub(r"\1 .", text) if role == "evaluate" else text

    @staticmethod
    def _ask(state: Sequence[Message], action: str, instruction: str) -> tuple[Message, ...]:
        return (*state, Message("assistant", action), Message("user", instruction))


_NUMBERED = re.compile(r"(?<=\n)([^\S\n]*[0-9]+)\.")  # as the futures of a list are


@functools.cache
def _labels(instruction: str, forms: Forms) -> re.Pattern[str]:
    """Finds the labels of an instruction and of an answer."""
    answers = (forms.future.label, *forms.critique.labels)
    own = {label.lower() for label in (*re.findall(r"(\w+):", instruction), *answers)}
    return re.compile(rf"\b({'|'.join(sorted(own))})[*_]*:", re.IGNORECASE)


def load_prompts(source: str | dict[str, Any], env: str | None = None) -> PromptSet:
    """Loads a prompt set and applies its overrides for one environment.

    Args:
        source: Name of a shipped set (one of ``SHIPPED``), path of a YAML file, or the mapping itself; one with the key
            ``extends`` names another source, a path from the file in which it stands, and says only what differs. A role that
            it sets is set for every environment; below ``environments`` it sets those of one.
        env: Registered name of the environment, a key below ``environments`` in the set.

    Raises:
        ValueError: The set is unknown, lacks a role, has an unknown key, or extends itself.
    """
    data = resolved_prompts(source)
    forms, overrides = data.pop("forms"), data.pop("environments")
    known = {key.name for key in fields(PromptSet)}
    for key in [*data, *(key for override in overrides.values() for key in override)]:
        if key not in known:
            raise ValueError(f"prompt set {data.get('name', source)!r}: unknown key {key!r}; known are {sorted(known)}")
    missing = known - {key.name for key in fields(PromptSet) if key.default is not MISSING} - {"forms", *data}
    if missing:
        raise ValueError(f"prompt set {data.get('name', source)!r} lacks {sorted(missing)}")
    own = dict(overrides.get(env or "", {}))
    forms = _merged(forms, own.pop("forms", None), data["name"])
    try:
        made = Forms.of(forms)
    except ValueError as error:
        raise ValueError(f"prompt set {data['name']!r}, {error}") from None
    return replace(PromptSet(**data, forms=made), **own)


def resolved_prompts(source: str | dict[str, Any]) -> dict[str, Any]:
    """A prompt set with all that it extends, as one mapping that ``load_prompts`` reads as it reads the set.

    Raises:
        ValueError: The set is unknown, is no mapping where one is wanted, or extends itself.
    """
    data: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    overrides: dict[str, dict[str, Any]] = {}
    for layer in reversed(_layers(source)):
        forms = _merged(forms, layer.pop("forms", None), data.get("name", source))
        data |= {key: value for key, value in layer.items() if key != "environments"}
        overrides = {name: {key: roles[key] for key in roles if key not in layer} for name, roles in overrides.items()}
        own = layer.get("environments") or {}
        if not isinstance(own, Mapping) or not all(isinstance(roles, Mapping) for roles in own.values()):
            raise ValueError(f"prompt set {data.get('name', source)!r}: environments must map names to mappings of roles")
        overrides |= {name: {**overrides.get(name, {}), **roles} for name, roles in own.items()}
    return {**data, "forms": forms, "environments": overrides}


def _merged(forms: dict[str, Any], more: Any, name: Any) -> dict[str, Any]:
    """The ``forms`` of a set with what a later layer, or an environment, says otherwise."""
    if more is None:
        return forms
    if not isinstance(more, Mapping) or not all(isinstance(own, Mapping) for own in more.values()):
        raise ValueError(f"prompt set {name!r}, forms: it must map future and critique to mappings, and it is {more!r:.80}")
    return {**forms, **{key: {**forms.get(key, {}), **own} for key, own in more.items()}}


def _layers(source: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """A prompt set and those that it extends, itself first."""
    layers: list[dict[str, Any]] = []
    folder, read = Path(), set[Path]()
    while True:
        if isinstance(source, Mapping):
            layer = dict(source)
        else:
            path = _find(source, folder)
            if path.resolve() in read:
                raise ValueError(f"prompt set {source!r} extends itself")
            read.add(path.resolve())
            layer, folder = _read(path), path.parent
        layers.append(layer)
        if "extends" not in layer:
            return layers
        source = layer.pop("extends")


def _find(source: Any, folder: Path) -> Path:
    """The file of a shipped set, or else one by its path from a folder."""
    shipped = Path(str(resources.files("rllib_nlac.language") / "prompt_sets" / f"{source}.yaml"))
    path = shipped if shipped.is_file() else folder / Path(str(source)).expanduser()
    if not path.is_file():
        raise ValueError(
            f"no prompt set is called {source!r}, and no file of that name is there; shipped are {', '.join(SHIPPED)}"
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"prompt set {str(path)!r} must be a YAML mapping, and it is a {type(data).__name__}")
    return data
