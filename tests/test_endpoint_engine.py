"""The engine whose model is behind an endpoint: what it asks, and whose answer is whose. What fails: ``test_baselines.py``."""

from __future__ import annotations

import threading
import time

import pytest

from rllib_nlac.engine.endpoint_engine import EndpointEngine
from rllib_nlac.types import Message, Request


def asking(text: str = "Go.") -> Request:
    return Request((3,), 12, 0.7, 0.8, seed=5, messages=(Message("user", text),))


def test_the_requests_limit_and_sampling_are_asked_for(serve, chat):
    server = serve()
    EndpointEngine(chat, server.url, "m").generate([asking()])
    body = server.asked[0]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (12, 0.7, 0.8, 5)


def test_an_answer_that_its_limit_cut_off_is_not_finished(serve, chat):
    engine = EndpointEngine(chat, serve("cut", 200).url, "m", max_concurrency=1)
    assert [answer.finished for answer in engine.generate([asking(), asking()])] == [False, True]


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
def test_what_is_no_text_is_replaced(serve, chat, text):
    (answer,) = EndpointEngine(chat, serve(say=text).url, "m").generate([asking()])
    assert chat.decode(answer.token_ids) == "a\ufffdb"


def test_refusals_among_as_many_answers_do_not_end_the_run(serve, chat):
    """Fails where refusals of a whole run are counted without its answers."""
    engine = EndpointEngine(chat, serve(*[400, 200] * 12).url, "m", max_concurrency=1)
    assert [answer.finished for answer in engine.generate([asking()] * 24)] == [False, True] * 12


def test_each_ticket_gets_its_own_answer_however_many_are_there_at_once(serve, chat):
    server = serve(say=lambda messages: messages[-1]["content"])
    engine, found = EndpointEngine(chat, server.url, "m"), {}
    tickets = engine.submit([asking(f"n {number}") for number in range(20)])
    while len(server.asked) < 20:
        time.sleep(0.01)
    while len(found) < 20:
        found.update(engine.poll())
    assert [chat.decode(found[ticket].token_ids) for ticket in tickets] == [f"n {number}" for number in range(20)]


def test_what_is_withdrawn_is_never_answered(serve, chat):
    engine = EndpointEngine(chat, serve(say=lambda messages: messages[-1]["content"]).url, "m")
    engine.submit([asking("old")])
    engine.withdraw()
    (ticket,) = engine.submit([asking("new")])
    assert [(found, chat.decode(answer.token_ids)) for found, answer in engine.poll()] == [(ticket, "new")]
    assert engine.poll() == []


def test_as_many_are_asked_at_once_as_it_is_told(serve, chat):
    """Each answer waits for three others."""
    together = threading.Barrier(4, timeout=10)
    server = serve(say=lambda messages: str(together.wait() >= 0))
    engine = EndpointEngine(chat, server.url, "m", max_concurrency=4, max_retries=0)
    assert all(answer.finished for answer in engine.generate([asking()] * 4))
