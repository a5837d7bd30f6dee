"""One client for OpenAI-compatible endpoints: users and oracles of environments speak through it, and the endpoint engine.

The official client does the talking and retries what HTTP says may be retried, with backoff; an answer that is no answer is
asked for again here. After the last try there is one kind of error, whose text names the endpoint and the cause.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_nlac.names import unknown_key

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
LIMIT, NEWER_LIMIT = "max_tokens", "max_completion_tokens"  # OpenAI's reasoning models know the second alone, and say so
# How a server is told what an answer must look like: as vLLM's does, as OpenAI's does, or not at all.
WAYS = ("structured_outputs", "response_format", "")


class EndpointError(RuntimeError):
    """An endpoint did not give a usable answer, after all retries. Plain text only, so that it survives pickling."""


class RequestRefusedError(EndpointError):
    """The endpoint works and does not take this request: too long a prompt for its model, or one that a filter refuses."""


def _speaks_of_structure(message: str) -> bool:
    """Whether an error is about the form of the answer, or about an argument that the server does not know."""
    return (
        re.search(r"structured_outputs|response_format|regex|grammar|schema|pattern|extra|unknown|unrecogni", message, re.I)
        is not None
    )


def _enforced(pattern: str, way: str) -> dict[str, Any]:
    """What a request says of the form of its answer, in one of ``WAYS``."""
    if way == "structured_outputs":
        return {"extra_body": {way: {"regex": pattern}}}
    if way == "response_format":
        schema = {
            "type": "object",
            "properties": {"answer": {"type": "string", "pattern": f"^(?:{pattern})$"}},
            "required": ["answer"],
            "additionalProperties": False,
        }
        return {way: {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}}
    return {}


def _with_calls(message: Any) -> Any:
    """The content of an answer, and behind it its calls; one that cannot be read stays as it is, for the reader to complain."""
    form = '<tool_call>\n{{"name": {}, "arguments": {}}}\n</tool_call>'
    functions = [call.function for call in message.tool_calls or ()]
    calls = [form.format(json.dumps(function.name), function.arguments or "{}") for function in functions]
    return "\n".join([*([message.content] if message.content else ()), *calls]) if calls else message.content


@dataclass(frozen=True)
class Answer:
    """What an endpoint said; ``finished`` is False where the length limit cut it off."""

    text: str
    finished: bool


@dataclass
class Endpoint:
    """An OpenAI-compatible chat endpoint.

    Args:
        base_url: As in ``http://localhost:8000/v1``.
        model: The model's name there.
        api_key_env: Name of the environment variable that holds the key; the key itself is in no configuration or log.
        timeout_s: Time limit of one attempt, in seconds.
        max_retries: Attempts after the first.
        temperature: Temperature of the answers, unless a call says otherwise.
        max_tokens: Token limit of one answer, likewise.

    Raises:
        EndpointError: The endpoint needs a key and its variable is not set.
    """

    base_url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 60.0
    max_retries: int = 5
    temperature: float = 0.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not os.environ.get(self.api_key_env) and "api.openai.com" in self.base_url:
            raise EndpointError(f"{self.base_url} needs a key: set the environment variable {self.api_key_env}")
        self._client: Any = None
        self._limit = LIMIT
        self._way = 0  # of WAYS, in which the server takes the form of an answer
        self.num_unstructured = 0  # answers whose form was asked for and not kept

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        may_be_empty: bool = False,
        pattern: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> Answer:
        """Asks once, trying again where that may help.

        Args:
            messages: Dicts of role and content, and what else the API knows.
            may_be_empty: Whether an empty answer is one.
            pattern: Regular expression that the server is asked to enforce, as far as it can.
            tools: Schemas of what the model may call; a call is a part of the answer's text, as ``read_calls`` reads it.
            sampling: ``temperature``, ``max_tokens``, ``top_p`` or ``seed`` of this call.

        Raises:
            RequestRefusedError: It does not take this request.
            EndpointError: No usable answer after all retries.
        """
        import openai

        arguments: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, **sampling}
        arguments[self._limit] = arguments.pop(LIMIT)
        if tools:
            arguments["tools"] = list(tools)
        way = self._way  # of this call; another thread may go on to the next one meanwhile
        if pattern is not None:
            arguments |= _enforced(pattern, WAYS[way])
        cause = ""
        for attempt in range(self.max_retries + 1):
            if attempt:
                time.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
            try:
                reply = self._connect().chat.completions.create(model=self.model, messages=list(messages), **arguments)
                choice = reply.choices[0]
                text = _with_calls(choice.message)
                if may_be_empty or (isinstance(text, str) and text.strip()):
                    finished = choice.finish_reason != "length"
                    return Answer(text or "" if pattern is None else self._kept(text or "", pattern, WAYS[way]), finished)
                cause = "an answer without content"
            except openai.APIResponseValidationError as error:
                cause = f"an answer that is no chat completion ({error})"
            except openai.OpenAIError as error:
                refused = isinstance(error, (openai.BadRequestError, openai.UnprocessableEntityError))
                if refused and LIMIT in arguments and NEWER_LIMIT in str(error):
                    self._limit = NEWER_LIMIT
                    return self.ask(messages, may_be_empty, pattern, tools, **sampling)
                if refused and pattern is not None and way < len(WAYS) - 1 and _speaks_of_structure(str(error)):
                    self._way = max(self._way, way + 1)
                    return self.ask(messages, may_be_empty, pattern, tools, **sampling)
                # Not "from error": the client's exceptions do not survive Ray's pickling, and with one as its cause ours
                # would not either.
                kind = RequestRefusedError if refused else EndpointError
                raise kind(f"the endpoint {self.base_url} failed: {type(error).__name__}: {error}") from None
            except (ValueError, TypeError, AttributeError, IndexError) as error:
                cause = f"an answer that is no chat completion ({type(error).__name__}: {error})"
        raise EndpointError(f"the endpoint {self.base_url} gave {cause}, {self.max_retries + 1} times")

    def _kept(self, text: str, pattern: str, way: str) -> str:
        """An answer as text; counted if it does not have the form that was asked for."""
        said = text.rpartition("</think>")[2].strip()
        if way == "response_format":
            try:
                answer = json.loads(said)["answer"]
                text = said = answer if isinstance(answer, str) else said
            except (ValueError, TypeError, KeyError):
                pass
        if re.fullmatch(pattern, said) is None:
            self.num_unstructured += 1
            if self.num_unstructured == 1:
                logger.warning("the endpoint %s does not enforce the form of an answer; parsers read what comes", self.base_url)
        return text

    def _connect(self) -> Any:
        if self._client is None:
            import openai

            key = os.environ.get(self.api_key_env) or "none"
            self._client = openai.OpenAI(
                base_url=self.base_url, api_key=key, max_retries=self.max_retries, timeout=self.timeout_s
            )
        return self._client


ENDPOINT_KEYS = ("base_url", "model", "api_key_env", "timeout_s", "max_retries", "temperature", "max_tokens")


def endpoint_from(config: Mapping[str, Any], where: str) -> Endpoint:
    """Builds an endpoint from a mapping of a configuration.

    Raises:
        ValueError: A key is unknown, or ``base_url`` or ``model`` is missing.
    """
    for key in config:
        if key not in ENDPOINT_KEYS:
            raise ValueError(f"{where}: {unknown_key(key, ENDPOINT_KEYS)}")
    for key in ("base_url", "model"):
        if not config.get(key):
            raise ValueError(f"{where}: {key} is missing, as in {{base_url: http://localhost:8000/v1, model: MY_MODEL}}")
    return Endpoint(**config)
