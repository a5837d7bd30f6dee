"""How the critic's answers are written. A prompt set declares each form once; instruction, pattern and parser follow from it.

* ``shown`` is what the instruction tells the model about the form.
* ``pattern`` is the regular expression that an engine can enforce while it samples. It is narrower than what the parser
  reads: one line a field, of bounded length, so that an answer ends before the token limit.
* ``parse`` reads what a model wrote, enforced or not. ``None`` means that a text does not parse; nothing is ever guessed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from rllib_nlac.language.parsing import LABEL, without_thinking
from rllib_nlac.names import unknown_key
from rllib_nlac.types import Critique, Future

CHARACTERS_PER_TOKEN = 2  # fewer than English text has, so that the longest answer of a pattern ends before its token limit
SUCCESS, FAILURE = "SUCCESS", "FAILURE"  # end a future
LONGEST = 4000  # characters of a part of an answer, the most that a form may allow
_START = r"[^\s<]"  # of a field: neither a space nor what a placeholder begins with
_PLACEHOLDER = re.compile(r"[^\w<]*<[^<>\n]+>[\W_]*\Z")  # copied from an instruction
# The outcome at the end of a text. In other letters it must be a sentence of its own, since "without success" states none.
_OUTCOME = re.compile(rf"(?:(?<![^\W_])({SUCCESS}|{FAILURE})|(?:\A|[^\w\s]|_)\s*((?i:{SUCCESS}|{FAILURE})))[\W_]*\Z")
# An outcome that is offered beside another one.
_OFFERED = re.compile(rf"(?<![^\W_])(?:{SUCCESS}|{FAILURE})[\s*_]*(?:or|/|\|)[\s*_]*\Z", re.IGNORECASE)
_VERDICT = re.compile(r"(yes|no)\b(?![\s*_]*(?:or|/|\|)[\s*_]*(?:yes|no)\b)", re.IGNORECASE)


@dataclass(frozen=True)
class FutureForm:
    """The form of a future: a label, what happens in words, and one of two words for the outcome.

    Attributes:
        what: What an instruction without examples calls the words in between.
        characters: Largest number of characters of these words that the pattern allows.
        examples: Whole answers, which the instruction shows in place of a placeholder.
    """

    label: ClassVar[str] = "Future"
    what: str = "what happens"
    characters: int = 400
    examples: tuple[str, ...] = ()

    def written(self, text: str, success: bool) -> str:
        """A whole answer in this form; ``text`` is one line."""
        return f"{self.label}: {text} {self.outcome(success)}"

    def outcome(self, success: bool) -> str:
        """Word of an outcome."""
        return SUCCESS if success else FAILURE

    @property
    def shown(self) -> str:
        """What an instruction says about the form."""
        if self.examples:
            return "\n".join(self.examples)
        return "\nor\n".join(self.written(f"<{self.what}>", success) for success in (True, False))

    def pattern(self, max_tokens: int) -> str:
        """Regular expression of an answer that ends before a token limit."""
        most = max(min(self.characters, CHARACTERS_PER_TOKEN * max_tokens), 2)
        return f"{self.label}: {_START}[^\\n]{{0,{most - 1}}} (?:{SUCCESS}|{FAILURE})"

    def parse(self, text: str) -> Future | None:
        """Reads one future. Several, or a repeated instruction, state none."""
        text = without_thinking(text)
        labels = list(_label(self.label).finditer(text))
        if len(labels) != 1:
            return None
        body = text[labels[0].end() :].strip()
        outcome = _OUTCOME.search(body)
        if outcome is None:
            return None
        before = body[: outcome.start(outcome.lastindex or 0)]
        if _PLACEHOLDER.match(before) or _OFFERED.search(before):
            return None
        return Future(body, (outcome[1] or outcome[2]).upper() == SUCCESS)

    def composed(self, reply: str, later: Future | None, success: bool) -> str:
        """A Bellman target that no model writes: the reply, the first clause of what follows, and the outcome.

        What the later future says after its first clause is left out. This is the textual discount.

        Args:
            reply: What really came next.
            later: The future of the next action; None if the episode ended with the reply.
            success: The outcome, of ``later`` if there is one.
        """
        half = self.characters // 2
        text = _sentence(reply, half)
        if later is not None:
            clause = _sentence(_first_clause(self._words(later)), half)
            text = f"{text} Then: {clause}".strip() if clause else text
        return self.written(text or "Nothing.", success)

    def _words(self, future: Future) -> str:
        """What a future says before its outcome."""
        return re.sub(rf"\W*\b(?:{SUCCESS}|{FAILURE})\W*\Z", "", future.text, flags=re.IGNORECASE)

    def check(self) -> None:
        """Refuses a form whose answers the parser would not read back.

        Raises:
            ValueError: The message names the field.
        """
        _check_lengths(self, ("characters",))
        both = (True, False)
        _check_reading(self, {self.written("It ends.", each): Future(f"It ends. {self.outcome(each)}", each) for each in both})


@dataclass(frozen=True)
class CritiqueForm:
    """The form of a critique: a verdict, a reason and, where the verdict is no, a better action.

    Attributes:
        better: What an instruction without examples calls the better action.
        reason_first: Whether the reason comes before the verdict, so that a small model reasons before it decides.
        reason_characters: Largest number of characters of a reason that the pattern allows.
        fix_characters: Largest number of characters of a better action that the pattern allows.
        examples: Whole answers, which the instruction shows in place of placeholders.
    """

    labels: ClassVar[tuple[str, str, str]] = ("Optimal", "Reason", "Fix")
    better: str = "the better action"
    reason_first: bool = False
    reason_characters: int = 240
    fix_characters: int = 200
    examples: tuple[str, ...] = ()

    def written(self, optimal: bool, reason: str, fix: str = "") -> str:
        """A whole answer in this form; reason and fix are one line each."""
        return self._in_order(
            f"Optimal: {'Yes' if optimal else 'No'}",
            f"Reason: {reason}",
            "" if optimal else f"\nFix: {fix}",
        )

    def _in_order(self, verdict: str, reason: str, fix: str) -> str:
        first, second = (reason, verdict) if self.reason_first else (verdict, reason)
        return f"{first}\n{second}{fix}"

    @property
    def shown(self) -> str:
        """What an instruction says about the form."""
        if self.examples:
            return "\nor\n".join(self.examples)
        return self._in_order(
            "Optimal: Yes or No",
            "Reason: <one or two sentences>",
            f"\nFix: <{self.better}; leave this line out if the answer is Yes>",
        )

    def pattern(self, max_tokens: int) -> str:
        """Regular expression of an answer that ends before a token limit."""
        share = min(1.0, CHARACTERS_PER_TOKEN * max_tokens / (self.reason_characters + self.fix_characters))
        reason, fix = (max(int(share * most), 2) for most in (self.reason_characters, self.fix_characters))
        reasoned = f"Reason: {_START}[^\\n]{{0,{reason - 1}}}"
        fixed = f"\\nFix: {_START}[^\\n]{{0,{fix - 1}}}"
        if self.reason_first:
            return f"{reasoned}\\nOptimal: (?:Yes|No{fixed})"
        return f"Optimal: (?:Yes\\n{reasoned}|No\\n{reasoned}{fixed})"

    def parse(self, text: str) -> Critique | None:
        """Reads verdict, reason and fix. A no without a fix does not parse."""
        text = without_thinking(text)
        starts = {name: match for name in self.labels if (match := _label(name).search(text))}
        if "Optimal" not in starts:
            return None
        bounds = [*sorted(match.start() for match in starts.values()), len(text)]

        def field(name: str) -> str:
            if name not in starts:
                return ""
            end = next(bound for bound in bounds if bound > starts[name].start())
            return text[starts[name].end() : end].strip().strip("*_").strip()

        verdict = _VERDICT.match(field("Optimal"))
        if verdict is None or _PLACEHOLDER.match(field("Reason")):
            return None
        optimal = verdict[1].lower() == "yes"
        if not optimal and (not field("Fix") or _PLACEHOLDER.match(field("Fix"))):
            return None
        return Critique(text, optimal, field("Reason"), "" if optimal else field("Fix"))

    def check(self) -> None:
        """Refuses a form whose answers the parser would not read back.

        Raises:
            ValueError: The message names the field.
        """
        _check_lengths(self, ("reason_characters", "fix_characters"))
        yes, no = self.written(True, "It ends."), self.written(False, "It ends.", "Go on.")
        _check_reading(self, {yes: Critique(yes, True, "It ends.", ""), no: Critique(no, False, "It ends.", "Go on.")})


@dataclass(frozen=True)
class Forms:
    """The forms of a prompt set.

    Attributes:
        future: Form of futures and Bellman targets.
        critique: Form of critiques.
    """

    future: FutureForm = FutureForm()
    critique: CritiqueForm = CritiqueForm()

    @classmethod
    def of(cls, data: Mapping[str, Mapping[str, Any]]) -> Self:
        """Forms as a YAML file has them; what is left out is as in the default set.

        Raises:
            ValueError: A key is unknown, a value is of another kind, or answers in a form would not be read back.
        """
        made: dict[str, Any] = {}
        for name, own in data.items():
            kind = {"future": FutureForm, "critique": CritiqueForm}.get(name)
            if kind is None:
                raise ValueError(f"forms: {unknown_key(name, ('future', 'critique'))}")
            known = {field.name for field in fields(kind)}
            for key, value in own.items():
                if key not in known:
                    raise ValueError(f"forms.{name}: {unknown_key(key, known)}")
                texts = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
                if key == "examples" and not texts:
                    raise ValueError(f"forms.{name}.examples must be a list of texts, and it is {value!r:.80}")
            values = {key: tuple(value) if key == "examples" else value for key, value in own.items()}
            try:
                made[name] = kind(**values)
                made[name].check()
            except ValueError as error:
                raise ValueError(f"forms.{name}: {error}") from None
        return cls(**made)


def _first_clause(text: str) -> str:
    """A text up to the end of its first sentence."""
    line = " ".join(text.split())
    end = re.search(r"[.!?;](?=\s|\Z)", line)
    return line[: end.end()] if end else line


def _sentence(text: str, most: int) -> str:
    """A text in one line, cut after a whole word, with a mark at its end."""
    line = " ".join(text.split())
    if len(line) > most:
        line = line[:most].rpartition(" ")[0] or line[:most]
    return line if not line or line[-1] in ".!?" else f"{line.rstrip(',;:')}."


@functools.cache
def _label(name: str) -> re.Pattern[str]:
    return re.compile(LABEL.format(re.escape(name)) + r"[*_ \t]*", re.IGNORECASE | re.MULTILINE)


def _check_lengths(form: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(form, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= LONGEST:
            raise ValueError(f"{name} must be a whole number between 8 and {LONGEST}, and it is {value!r:.80}")


def _check_reading(form: FutureForm | CritiqueForm, answers: Mapping[str, Future | Critique]) -> None:
    """Holds pattern, parser and examples of a form against answers of which it is known what they say."""
    for answer, meant in answers.items():
        if re.fullmatch(form.pattern(LONGEST), answer) is None or form.parse(answer) != meant:
            raise ValueError(f"an answer in this form, {answer!r}, would not be read back")
    for example in form.examples:
        if form.parse(example) is None:
            raise ValueError(f"the example {example!r:.100} is not in this form, as {next(iter(answers))!r} is")
