"""Tracebacks of several processes, in three lines."""

from __future__ import annotations

import sys

import pytest
import ray
from ray import cloudpickle

from rllib_nlac.command.errors import find_cause, lines_of, text_of, write_traceback
from rllib_nlac.sampling.collector import Failure


def broken_environment():
    raise LookupError("no such key: [/INST]")


def wrapped():
    try:
        broken_environment()
    except LookupError as error:
        raise RuntimeError(f"the environment failed 10 times: {error}") from error


def failed(function) -> str:
    with pytest.raises(Exception) as found:
        function()
    return text_of(found.value)


def test_the_place_is_where_it_was_raised_and_the_message_is_the_explanation():
    cause = find_cause(failed(wrapped))
    assert cause.message == "RuntimeError: the environment failed 10 times: no such key: [/INST]"
    assert cause.place.startswith(f"{__file__}, line ") and cause.place.endswith("in broken_environment")


def test_what_an_explanation_leaves_out_is_added():
    def vague():
        try:
            broken_environment()
        except LookupError as error:
            raise RuntimeError("collection failed") from error

    assert find_cause(failed(vague)).message == "RuntimeError: collection failed (from LookupError: no such key: [/INST])"


def test_a_runner_s_traceback_comes_with_its_failure():
    def collect():
        try:
            broken_environment()
        except LookupError as error:
            failure = Failure.of(error)
        raise failure.raised("EnvRunner 3")

    cause = find_cause(failed(collect))
    assert "in broken_environment" in cause.place and cause.message == "LookupError: no such key: [/INST]"


def test_through_actors_of_actors(ray_session):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this file

    @ray.remote(num_cpus=0)
    class Inner:
        def act(self):
            broken_environment()

    @ray.remote(num_cpus=0)
    class Outer:
        def act(self):
            ray.get(Inner.remote().act.remote())

    @ray.remote(num_cpus=0)
    class Explains:
        def act(self):
            try:
                ray.get(Outer.remote().act.remote())
            except Exception as error:
                raise RuntimeError(f"an engine failed: {error}") from error

    for actor in (Outer, Explains):
        cause = find_cause(failed(lambda actor=actor: ray.get(actor.remote().act.remote())))
        assert "in broken_environment" in cause.place and "LookupError: no such key: [/INST]" in cause.message


def test_an_error_without_a_traceback_is_quoted_in_brief():
    assert find_cause("The actor died unexpectedly.\n\nPages of advice.").message == "The actor died unexpectedly."
    assert len(find_cause("x" * 9999).message) < 600


def test_three_lines_and_a_file(tmp_path):
    text = failed(wrapped)
    file = write_traceback(text + "\ud800")
    assert "broken_environment" in file.read_text() and len(lines := lines_of(text, file)) == 3 and str(file) in lines[2]
    file.unlink()
