"""The corrected chain of thought of thinking models (arXiv 2512.04601, App. B.2).

A backup reasons with the true next observation in view, and a refinement with the critique in view. Trained on as it is,
that reasoning teaches the model to claim what it will not know when it has to predict or to act. So it is rewritten, under
the target weights, to speak of possibility; a rewriting that still quotes what was withheld is thrown away, and the
reasoning is left empty. The text behind the reasoning always stays as it was.

Models that do not think have nothing to correct: their targets are descriptions only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rllib_nlac.engine.chat import Chat
from rllib_nlac.language.parsing import LABEL, without_thinking
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.variant import Answer, Ask, Stage
from rllib_nlac.types import BellmanTarget, Critique, Generation, Message, Seen, Weights

SPAN = 8  # tokens of a quotation that counts as a leak
BYTES = 3  # tokens that may be missing of a character at the end of a span: byte-level tokenizers have one for each byte
_THINK = re.compile(r"\A\s*(?:<think>)?(?P<reasoning>.*?)</think>\s*(?P<final>.*)\Z", re.DOTALL)
_REACT = re.compile(
    rf"\A[\s>#*_-]*Thought[*_\s]*:(?P<reasoning>.*?)(?P<final>{LABEL.format('Action')}.*)\Z", re.I | re.S | re.M
)


@dataclass(frozen=True)
class Thought:
    """A sampled answer that reasons before it speaks.

    Attributes:
        generation: The answer as it was sampled.
        final: What follows the reasoning.
        withheld: Texts that the reasoning must not quote.
        prompt: Asks for the rewriting.
        react: Whether the reasoning is the ``Thought:`` of a ReAct turn, and not a block of a thinking model.
        seen: What an engine has seen of the prompt, where it shows a turn as it was sampled.
    """

    generation: Generation
    final: str
    withheld: tuple[str, ...]
    prompt: tuple[Message, ...]
    react: bool = False
    seen: Seen | None = None


def target_thought(prompts: PromptSet, target: BellmanTarget, chat: Chat) -> Thought | None:
    """The reasoning of a Bellman target; None where there is none.

    It saw the next observation. With n steps it also saw a text that was written in view of the later ones.
    """
    if target.generation is None:
        return None
    match = _THINK.match(chat.decode(target.generation.token_ids))
    if match is None:
        return None
    t = target.transition
    prompt = prompts.rethink_messages(t.state, t.action, match["reasoning"].strip(), match["final"].strip())
    withheld = tuple(step.observation for step in (t, *t.following))
    return Thought(target.generation, match["final"].strip(), withheld, prompt, seen=t.seen)


def action_thought(
    prompts: PromptSet,
    state: Sequence[Message],
    answer: Answer | None,
    critiques: Sequence[Critique],
    chat: Chat,
) -> Thought | None:
    """The reasoning of a refined action; None where there is none or a ReAct thought is clean.

    It saw the critique of its round and the turn before it, which may quote an earlier critique.
    """
    if answer is None or not critiques:
        return None
    withheld = tuple(critique.text for critique in critiques)
    generation, text = answer
    match = _THINK.match(text)
    react = match is None
    match = match or _REACT.match(text)
    # A ReAct thought is part of every turn and mostly speaks of the task alone; a thinking block is always rewritten.
    if match is None or (react and not leaks(match["reasoning"], withheld, chat)):
        return None
    final = match["final"].strip()
    if not react and (spoken := _REACT.match(final)) and leaks(spoken["reasoning"], withheld, chat):
        final = spoken["final"].strip()  # the thought behind the block leaks, too, and the action needs none
    prompt = prompts.rethink_action_messages(state, final, match["reasoning"].strip())
    return Thought(generation, final, withheld, prompt, react)


def accepted(thought: Thought, answer: Answer | None, chat: Chat) -> str:
    """The rewritten reasoning, or nothing where it was cut off or still quotes what was withheld."""
    if answer is None or not answer[0].finished:
        return ""
    text = without_thinking(answer[1])
    return "" if "</think>" in text or leaks(text, thought.withheld, chat) else text


def leaks(text: str, withheld: tuple[str, ...], chat: Chat) -> bool:
    """Whether ``text`` holds a span of 8 or more tokens of a withheld text, however it is cased or spaced."""
    haystack = _plain(text)
    return any(span and span in haystack for each in withheld for span in _spans(each, chat))


def _spans(text: str, chat: Chat) -> Iterator[str]:
    """All spans of ``SPAN`` tokens, longer where the last one ends within a character, as a rare one has several tokens."""
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(ids) - SPAN + 1):
        ends = range(start + SPAN, min(start + SPAN + BYTES, len(ids)) + 1)
        decoded = (chat.tokenizer.decode(ids[start:end]) for end in ends)
        yield _plain(next((span for span in decoded if not span.endswith("\ufffd")), ""))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def with_reasoning(thought: Thought, reasoning: str, chat: Chat) -> Generation:
    """The answer's ids with another reasoning before the same final text."""
    if thought.react:
        ids = chat.encode(f"Thought: {reasoning}\n{thought.final}")
    else:
        opening = "" if chat.opens_thinking(thought.generation.prompt_ids) else "<think>\n"
        ids = chat.encode(f"{opening}{reasoning}\n</think>\n\n{thought.final}")
    return replace(thought.generation, token_ids=ids, logprobs=thought.generation.logprobs[:0])


def correction_stage(
    thoughts: Sequence[Thought | None], sampling: Sampling, limit: int, chat: Chat, report: StageReport
) -> Stage[list[Generation | None]]:
    """Each generation with its reasoning rewritten, or emptied if it still leaks; None where there is no reasoning.

    Args:
        thoughts: What is rewritten.
        sampling: Sampling of the rewritten reasoning.
        limit: Tokens that the role may speak. What would teach it to speak longer is emptied, too.
        chat: Turns messages into tokens and back.
        report: Counts what came of them.
    """
    if not any(thoughts):
        return [None] * len(thoughts)
    prompts, seen = [t.prompt if t else None for t in thoughts], [t.seen if t else None for t in thoughts]
    answers = yield Ask("reasoning", prompts, sampling, Weights.TARGET, seen)
    generations: list[Generation | None] = []
    for thought, answer in zip(thoughts, answers, strict=True):
        if thought is None:
            generations.append(None)
            continue
        rewritten = accepted(thought, answer, chat)
        generation = with_reasoning(thought, rewritten, chat)
        if rewritten and len(generation.token_ids) > limit:
            rewritten, generation = "", with_reasoning(thought, "", chat)
        report.counts["reasoning_rewritten" if rewritten else "reasoning_emptied"] += 1
        generations.append(generation)
    return generations
