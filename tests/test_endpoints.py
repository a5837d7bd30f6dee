"""Users and oracles behind an endpoint: a real vLLM server, and servers that fail, stall, send rubbish or are busy."""

from __future__ import annotations

import functools
import pickle

import pytest
from chat_server import BODIES, vllm_server
from scripted_engine import ScriptedEngine

import rllib_nlac.inputs.endpoint
from rllib_nlac import NLACConfig
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.service_desk.env import ServiceDesk, expert_script
from rllib_nlac.envs.service_desk.store import make_store
from rllib_nlac.envs.service_desk.tasks import make_tasks
from rllib_nlac.envs.service_desk.users import STOP, ScriptedUser
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.inputs.endpoint import Endpoint, EndpointError, endpoint_from
from rllib_nlac.replay.buffer import TextReplayBuffer
from rllib_nlac.sampling.env_runner import TextEnvRunner

QUESTION = [{"role": "user", "content": "Is it big?"}]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rllib_nlac.inputs.endpoint, "FIRST_PAUSE_S", 0.0)


@pytest.fixture()
def serve(serve):
    return functools.partial(serve, say="Yes.")


@pytest.mark.parametrize("behaviour", [429, 500, 503, "hang up", "empty", *BODIES])
def test_one_mishap_is_survived(serve, behaviour):
    server = serve(behaviour)
    endpoint = Endpoint(server.url, "m")
    assert endpoint.ask(QUESTION).text == "Yes." and len(server.asked) == 2


def test_a_stall_ends_in_a_timeout_and_another_try(serve):
    server = serve("stall")
    assert Endpoint(server.url, "m", timeout_s=0.5).ask(QUESTION).text == "Yes." and len(server.asked) == 2


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        ("stall", "APITimeoutError"),
        ("hang up", "APIConnectionError"),
        ("empty", "an answer without content, 2 times"),
        ("html", "no chat completion .*2 times"),
        ("half", "no chat completion"),
        ("no choices", "no chat completion"),
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
    ],
)
def test_what_fails_for_good_names_the_endpoint_and_the_cause(serve, behaviour, cause):
    server = serve(*[behaviour] * 9)
    endpoint = Endpoint(server.url, "m", max_retries=1, timeout_s=0.5 if behaviour == "stall" else 60.0)
    with pytest.raises(EndpointError, match=rf"endpoint {server.url} .*{cause}") as raised:
        endpoint.ask(QUESTION)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert len(server.asked) == (1 if behaviour in (400, 401) else 2)


def test_nobody_there():
    with pytest.raises(EndpointError, match="APIConnectionError"):
        Endpoint("http://127.0.0.1:9/v1", "m", max_retries=0).ask(QUESTION)


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(monkeypatch, serve):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(EndpointError, match="set the environment variable OPENAI_API_KEY"):
        Endpoint("https://api.openai.com/v1", "m")
    monkeypatch.setenv("MY_KEY", "hush")
    server = serve()
    endpoint = Endpoint(server.url, "m", api_key_env="MY_KEY")
    endpoint.ask(QUESTION)
    assert server.keys == ["Bearer hush"] and "hush" not in repr(endpoint) and b"hush" not in pickle.dumps(endpoint)
    assert pickle.loads(pickle.dumps(endpoint)).ask(QUESTION).text == "Yes."


def test_every_key_of_the_configuration_arrives():
    given = {"base_url": "http://x/v1", "model": "m", "api_key_env": "K", "timeout_s": 9.0}
    given |= {"max_retries": 1, "temperature": 0.3, "max_tokens": 7}
    assert endpoint_from(given, "oracle") == Endpoint(**given)


def test_its_own_limit_and_temperature_are_asked_for(serve):
    server = serve()
    Endpoint(server.url, "m", temperature=0.3, max_tokens=7).ask(QUESTION)
    assert (server.asked[0]["max_tokens"], server.asked[0]["temperature"]) == (7, 0.3)


def test_it_waits_longer_before_each_try(serve, monkeypatch):
    """Fails where a server that is down is asked again without a pause."""
    pauses: list[float] = []
    monkeypatch.setattr(rllib_nlac.inputs.endpoint, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(rllib_nlac.inputs.endpoint.time, "sleep", pauses.append)
    assert Endpoint(serve("empty", "empty", "empty").url, "m").ask(QUESTION).text == "Yes."
    assert pauses == [0.5, 1.0, 2.0]


class TestOracle:
    def env(self, server, **config):
        return TwentyQuestions(oracle={"kind": "endpoint", "base_url": server.url, "model": "m", "max_retries": 0}, **config)

    @pytest.mark.parametrize(
        ("said", "heard"),
        [
            ("Yes, it is.", "Yes."),
            ("no", "No."),
            ("**No**.", "No."),
            ("Unknown", "I do not know."),
            ("Nobody knows", "I do not know."),
        ],
    )
    def test_what_the_model_says_is_yes_no_or_nothing(self, serve, said, heard):
        server = serve(say=said)
        env = self.env(server, words=["glass door", "dog"])
        env.reset(seed=0, options={"task_id": "glass door"})
        assert env.step("Can one see through it?")[0] == heard
        assert "glass door" in server.asked[0]["messages"][0]["content"] and server.asked[0]["temperature"] == 0

    def test_a_guess_is_judged_by_its_words_without_a_call(self, serve, tmp_path):
        server = serve()
        (tmp_path / "words.txt").write_text("# things\nGlass door\ndog\n\nice-cream cone\n")
        env = self.env(server, words=str(tmp_path / "words.txt"))
        env.reset(seed=0, options={"task_id": "glass door"})
        for guess in ("Is it a dog?", "the ice-cream cone", "My guess is a dog.", "Could it be a dog?"):
            assert env.step(guess)[0] == "No."
        assert env.step("is it a glass  Door?")[:3] == ("Correct!", 1.0, True) and not server.asked
        assert "glass door" in env.system_prompt

    @pytest.mark.parametrize("word", ["apple", "ant", "theatre", "anchor", "the wall", "isle"])
    def test_the_article_of_a_guess_is_no_part_of_the_word(self, serve, word):
        server = serve()
        env = self.env(server, words=[word, "dog"])
        for opening in ("", "Is it ", "is it a ", "It's an ", "is the object the ", "Could it be "):
            for name in (word, word.removeprefix("the ")):
                env.reset(seed=0, options={"task_id": word})
                assert env.step(f"{opening}{name}?")[:3] == ("Correct!", 1.0, True), opening
        assert not server.asked

    @pytest.mark.parametrize("words", [["lamp", "dog"], ["dog", "lamp"]])
    @pytest.mark.parametrize("listed", ["a dog or a lamp", "a lamp or a dog", "dog, lamp"])
    def test_listing_everything_is_no_guess(self, serve, words, listed):
        """Fails where the first word of a list, or the first object that the list holds, counts as the guess."""
        server = serve(say="No")
        env = self.env(server, words=words)
        env.reset(seed=0, options={"task_id": "dog"})
        assert env.step(f"Is it {listed}?")[:4] == ("No.", 0.0, False, False) and len(server.asked) == 1

    def test_many_words_are_not_listed(self, serve):
        assert "w300" not in self.env(serve(), words=[f"w{i}" for i in range(500)]).system_prompt

    def test_mistakes(self, serve, tmp_path):
        with pytest.raises(ValueError, match="words needs an oracle that knows them"):
            TwentyQuestions(words=["a"])
        with pytest.raises(ValueError, match="'a' stands there twice"):
            self.env(serve(), words=["a", "A"])
        with pytest.raises(ValueError, match="did you mean 'base_url'"):
            TwentyQuestions(oracle={"kind": "endpoint", "base_ur": "x", "model": "m"})
        with pytest.raises(ValueError, match="model is missing"):
            TwentyQuestions(oracle={"kind": "endpoint", "base_url": "x"})
        with pytest.raises(ValueError, match="kind: table, or kind: endpoint"):
            TwentyQuestions(oracle={"kind": "human"})


def customer(task):
    """A server's answers for one that plays a task's customer as the scripted one would."""
    user = ScriptedUser()

    def say(messages):
        if len(messages) == 2:
            return user.begin(task)
        answer = user.answer(task, messages[-1]["content"])
        return f"{answer} {STOP}" if user.is_over else answer

    return say


def test_a_model_can_be_the_customer(serve):
    for name, task in list(make_tasks()["train"].items())[:10]:
        server = serve(say=customer(task))
        env = ServiceDesk(user={"kind": "endpoint", "base_url": server.url, "model": "m"})
        env.reset(seed=0, options={"task_id": name})
        for action in expert_script(make_store(), task):
            observation, reward, terminated, *_ = env.step(action)
            assert STOP not in observation
        assert (reward, terminated) == (1.0, True)
        system = server.asked[-1]["messages"][0]["content"]
        assert task.email in system and not any(tool in str(server.asked) for tool in ("cancel_order", "return_items"))


class TestFailures:
    """A failed oracle ends its episode without blame: truncated, with its reason, and kept out of replay."""

    def config(self, config: NLACConfig, url: str, **settings) -> NLACConfig:
        oracle = {"kind": "endpoint", "base_url": url, "model": "m", "max_retries": 0}
        config.environment(
            "TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 3, "oracle": oracle}
        )
        for key, value in settings.items():
            setattr(config, key, value)
        return config

    def test_the_environment_says_so(self, serve, config):
        env = TwentyQuestions(oracle={"kind": "endpoint", "base_url": serve(500).url, "model": "m", "max_retries": 0})
        env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step("Is it big?")
        assert (reward, terminated, truncated) == (0.0, False, True) and "InternalServerError" in observation
        assert info["discard"] is True and info["stop_reason"] == "endpoint_failure" and info["success"] is None

    @pytest.mark.parametrize("threads", [0, 4])
    def test_such_episodes_are_replaced_and_reach_no_buffer(self, serve, config, chat, threads):
        server = serve(*[500, 200, 200, 500] * 3)
        runner = TextEnvRunner(
            config=self.config(config, server.url, num_envs_per_env_runner=4, env_threads=threads), worker_index=0
        )
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: "Is it big?"))
        episodes = runner.sample(num_episodes=12)
        metrics = runner.get_metrics()
        assert len(episodes) == 12 and all(len(episode) == 3 for episode in episodes)
        assert int(metrics["episodes_discarded"]) == 6 and int(metrics["stop_reason_endpoint_failure"]) == 6
        assert int(metrics["num_episodes"]) == 12
        buffer = TextReplayBuffer(env="E")
        buffer.add(episodes)
        texts = {t.observation for t in buffer.sample_transitions(200, 0.0).transitions}
        assert texts == {"Yes.", "Yes. No turns left."}

    @pytest.mark.parametrize("threads", [0, 4])
    def test_a_short_outage_while_many_episodes_begin_ends_no_run(self, serve, config, chat, threads):
        server = serve(*[500] * 40)
        user = {"kind": "endpoint", "base_url": server.url, "model": "m", "max_retries": 0}
        config.env, config.env_config = "ServiceDesk", {"user": user, "max_turns": 2, "plain_text": True}
        config.num_envs_per_env_runner, config.env_threads = 32, threads
        runner = TextEnvRunner(config=config, worker_index=0)
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: "Hm."))
        assert len(runner.sample(num_episodes=32)) == 32
        metrics = runner.get_metrics()
        assert int(metrics["stop_reason_endpoint_failure"]) == 40 and "env_failures" not in metrics

    def test_an_endpoint_that_is_gone_ends_the_run_with_the_cause(self, config, chat):
        runner = TextEnvRunner(config=self.config(config, "http://127.0.0.1:9/v1", num_envs_per_env_runner=4), worker_index=0)
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: "Is it big?"))
        with pytest.raises(
            RuntimeError, match=r"lost 24 episodes in a row \(endpoint_failure\).*127.0.0.1:9/v1.*APIConnectionError"
        ):
            runner.sample(num_episodes=4)


@pytest.fixture(scope="module")
def real_server(model_path, tmp_path_factory):
    with vllm_server(model_path, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


def test_a_real_vllm_server_is_oracle_and_customer(real_server, config, chat):
    """The small model is no good oracle; what matters is that a real server's answers come through."""
    oracle = {"kind": "endpoint", "base_url": real_server, "model": "tiny"}
    config.environment("TwentyQuestions", env_config={"num_objects": 16, "max_turns": 3, "oracle": oracle})
    config.num_envs_per_env_runner, config.env_threads = 8, 8
    runner = TextEnvRunner(config=config, worker_index=0)
    runner.attach(ScriptedEngine(chat, lambda prompt, weights: "Is it big?"))
    episodes = runner.sample(num_episodes=8)
    assert len(episodes) == 8 and "episodes_discarded" not in runner.get_metrics()
    desk = ServiceDesk(user={"kind": "endpoint", "base_url": real_server, "model": "tiny", "max_tokens": 20, "max_retries": 2})
    try:
        observation, _ = desk.reset(seed=0)
        assert observation.startswith("Customer: ")
    except EpisodeLost as lost:  # the small model reads 512 tokens, and may well say nothing
        assert lost.reason == "endpoint_failure" and ("without content" in lost.cause or "context" in lost.cause)
    with pytest.raises(EndpointError, match=r"NotFoundError.*does not exist"):
        Endpoint(real_server, "another model").ask(QUESTION)
