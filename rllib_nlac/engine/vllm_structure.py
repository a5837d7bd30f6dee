"""Structured answers in vLLM: which patterns it can enforce, and where a thinking model's reasoning ends.

Private seams of vLLM, pinned with those of ``vllm_engine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

THINKING = "rllib_nlac_thinking"  # name of the parser below, as vLLM's registry has it
TAIL = 8  # tokens at the end of a prompt in which a template opens or closes a reasoning block


def register_thinking() -> str:
    """Makes the parser of reasoning blocks known to vLLM, and returns its name."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    if THINKING not in ReasoningParserManager.reasoning_parsers:

        class AfterThinking(BaseThinkingReasoningParser):
            """Holds the structure back until the answer's own ``</think>``.

            vLLM's parsers search the whole prompt for it, and would find that of a former turn.
            """

            start_token = "<think>"  # type: ignore[assignment]
            end_token = "</think>"  # type: ignore[assignment]

            def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
                return super().is_reasoning_end(list(input_ids)[-TAIL:])

        ReasoningParserManager.register_module(THINKING, module=AfterThinking)
    return THINKING


@lru_cache(maxsize=4096)
def why_not(pattern: str) -> str | None:
    """Why vLLM cannot enforce a pattern; None where it can."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(regex=pattern)))
    except Exception as error:  # of whichever library compiles it
        return str(error).splitlines()[0][:200]
    return None


def structure(pattern: str) -> Any:
    """What ``SamplingParams`` take to enforce a pattern."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex=pattern)
