"""Other people's environments. TextArena is played for real; τ-bench and τ²-bench against stand-ins of their signatures."""

from __future__ import annotations

import enum
import json
import random
import sys
import threading
import types
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import openai
import pytest
from chat_server import ChatServer

from rllib_nlac.envs import contract, registry
from rllib_nlac.envs.adapters import reasoning_gym_child
from rllib_nlac.envs.adapters.gymnasium_text import GymnasiumText
from rllib_nlac.envs.adapters.reasoning_gym import ReasoningGym
from rllib_nlac.envs.adapters.tau2_bench import Tau2Bench
from rllib_nlac.envs.adapters.tau_bench import TauBench
from rllib_nlac.envs.adapters.text_arena import TextArena
from rllib_nlac.envs.answers import checked_reset
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.math_reasoning import is_held_out
from rllib_nlac.envs.spaces import TextSpace


class TestTextArena:
    def play(self, env: TextArena, seed: int) -> tuple[list[str], dict]:
        """Plays guess the number by halves."""
        texts, low, high, over, info = [env.reset(seed=seed)[0]], 1, 20, False, {}
        while not over:
            guess = (low + high) // 2
            text, _, terminated, truncated, info = env.step(f"[{guess}]")
            texts.append(text)
            low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
            over = terminated or truncated
        return texts, info

    def test_a_game_is_won_and_seeds_make_games(self):
        games = [self.play(TextArena(), seed) for seed in range(6)]
        assert all(info["success"] for _, info in games) and "between 1 and 20" in games[0][0][0]
        assert games == [self.play(TextArena(), seed) for seed in range(6)] and len({str(texts) for texts, _ in games}) > 1

    def test_no_game_touches_the_random_state_of_others(self):
        alone = self.play(TextArena(), 1)
        random.seed(7)
        np.random.seed(7)
        states = random.getstate(), np.random.get_state()[1].tolist()
        assert self.play(TextArena(), 1) == alone
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states

    def test_moves_that_draw_in_the_middle_of_a_game_stay_reproducible(self):
        """2048-like: the opponent draws from the global state in every move."""
        config = {
            "game": "TicTacToe-v0",
            "num_players": 2,
            "opponents": {"kind": "function", "function": f"{__name__}:any_cell"},
        }
        games = []
        for noise in (1, 2):
            random.seed(noise)
            env, texts = TextArena(**config), []
            texts.append(env.reset(seed=3)[0])
            for move in ("[4]", "[0]", "[8]", "[2]", "[6]"):
                text, _, terminated, truncated, _ = env.step(move)
                texts.append(text)
                if terminated or truncated:
                    break
            games.append(texts)
        assert games[0] == games[1] and len(games[0]) > 2

    def test_a_game_that_waits_for_an_endpoint_keeps_no_other_waiting(self, monkeypatch):
        """Fails where the lock of the global random states is held while somebody is asked."""
        config = {"kind": "endpoint", "base_url": "http://127.0.0.1:9", "model": "m"}
        waiting, other, asked = TextArena("TicTacToe-v0", 2, opponents=config), TextArena(), threading.Event()
        answer = threading.Event()

        def ask(messages):
            asked.set()
            assert answer.wait(60)
            return SimpleNamespace(text="[0]")

        waiting.reset(seed=0)
        monkeypatch.setattr(waiting.partners.current, "_endpoint", SimpleNamespace(ask=ask))
        thread = threading.Thread(target=waiting.step, args=("[4]",))
        thread.start()
        try:
            assert asked.wait(60)
            played = threading.Thread(target=lambda: other.reset(seed=1), daemon=True)
            played.start()
            played.join(30)
            assert not played.is_alive()
        finally:
            answer.set()
            thread.join(60)

    def test_an_endpoint_plays_the_others_and_reads_the_whole_game(self):
        """Fails where a request holds only what is new: its third move would be made without the rules."""
        moves = ["[0]", "[1]", "[2]"]
        server = ChatServer(say=lambda messages: moves.pop(0))
        try:
            env = TextArena("TicTacToe-v0", 2, opponents={"kind": "endpoint", "base_url": server.url, "model": "m"})
            for _ in range(2):  # the second game knows nothing of the first one
                env.reset(seed=0)
                observation, *_ = env.step("[4]")
                assert "[Player 1] [0]" in observation and "[4]\n" not in observation
                env.step("[8]")
                first, second = [asked["messages"][0]["content"] for asked in server.asked]
                assert first.startswith("[GAME] You are Player 1 in Tic Tac Toe") and first.count("[Player 0]") == 1
                assert second.startswith(first) and "[Player 1] [0]" in second and "[Player 0] [8]" in second
                moves[:] = ["[0]", "[1]", "[2]"]
                server.asked.clear()
        finally:
            server.shutdown()
            server.server_close()

    def test_each_message_names_its_speaker_where_several_play(self):
        opponents = {"kind": "function", "function": f"{__name__}:polite"}
        env = TextArena("ThreePlayerIPD-v0", 3, player=0, opponents=opponents)
        assert env.reset(seed=0)[0].startswith("[GAME] You are Player 0")
        assert env.step("Hello.")[0].startswith(
            "[Player 1] As you say, Player 0.\n[Player 2] As you say, Player 1.\n[GAME] Chat"
        )

    def test_a_move_is_put_into_the_form_that_the_package_gives_it(self):
        bare, raw, train = TextArena(), TextArena("GuessTheNumber-v0-raw"), TextArena("GuessTheNumber-v0-train")
        for env in (bare, raw, train):
            env.reset(seed=0)
        assert bare.step("1")[0] == raw.step("[1]")[0] == train.step("1")[0]
        assert "invalid move" in raw.step("2")[0] and "invalid move" not in bare.step("2")[0]

    def test_a_game_that_an_opponent_ends_at_once_is_lost_and_not_the_agents(self):
        env = TextArena("TicTacToe-v0", 2, player=1, opponents={"kind": "function", "function": f"{__name__}:polite"})
        with pytest.raises(EpisodeLost, match="was over before the agent's first move"):
            env.reset(seed=0)

    def test_invalid_moves_are_answered(self):
        env = TextArena("TowerOfHanoi-v0")
        env.reset(seed=0)
        assert "invalid move" in env.step("over there")[0]

    def test_mistakes(self, monkeypatch):
        with pytest.raises(ValueError, match="'Chess-v9'"):
            TextArena("Chess-v9")
        with pytest.raises(ValueError, match=r"is played by 2: set env_config.opponents"):
            TextArena("TicTacToe-v0", 2)
        with pytest.raises(ValueError, match=r"num_players is 1, and TicTacToe-v0 refuses it: .* has to be 2.* opponents"):
            TextArena("TicTacToe-v0")
        with pytest.raises(ValueError, match="players are 0 to 0"):
            TextArena(player=1)
        monkeypatch.setitem(sys.modules, "textarena", None)
        with pytest.raises(ValueError, match=r"pip install 'rllib_nlac\[textarena\]'"):
            TextArena()


def any_cell(observation: str) -> str:
    return f"[{random.randrange(9)}]"


def polite(observation: str) -> str:
    speakers = [line.partition("]")[0].removeprefix("[") for line in observation.splitlines() if line.startswith("[Player")]
    return f"As you say, {speakers[-1] if speakers else 'nobody'}."


@pytest.mark.process
class TestReasoningGym:
    def test_attempts_and_the_score_of_the_last_answer(self):
        env = ReasoningGym("chain_sum", {"max_terms": 2, "max_digits": 1}, attempts=3)
        question, info = env.reset(seed=4)
        left, sign, right = question.split(": ")[1].removesuffix(" =").split()
        truth = int(left) + int(right) * (1 if sign == "+" else -1)
        assert env.step(f"<answer>{truth + 1}</answer>")[:4] == ("Not correct. Try again.", 0.0, False, False)
        assert env.step(str(truth))[:4] == ("There is no <answer> in it. Try again.", 0.0, False, False)
        near = f"{truth} or so"
        text, reward, terminated, _, last = env.step(f"<answer>{near}</answer>")
        assert (text, terminated, last["success"]) == ("Not correct.", True, False)
        assert reward == pytest.approx(len(str(truth)) / len(near))
        assert env.reset(options={"task_id": info["task_id"]})[0] == question
        step = env.step(f"No, <answer>7000</answer>, I mean <answer>\n{truth}.0 </answer>.")
        assert step[:3] == ("Correct.", 1.0, True) and step[4]["success"]

    def test_evaluation_asks_what_was_never_trained(self):
        config = {"max_terms": 2, "max_digits": 1}  # so few questions that indices alone would not keep them apart
        envs = [ReasoningGym("chain_sum", config, split=split) for split in ("train", "eval")]
        train, evaluation = ({env.reset(seed=s)[0] for s in range(60)} for env in envs)
        assert len(train) > 20 and len(evaluation) > 3 and not train & evaluation
        assert all(map(is_held_out, evaluation))

    def test_answers_that_are_programs(self, monkeypatch):
        """spiral_matrix evaluates answers, and pays 0.1 for a list of the right numbers."""
        env = ReasoningGym("spiral_matrix")
        _, info = env.reset(seed=0)
        truth = info["privileged"]["answer"].split()
        monkeypatch.setattr(reasoning_gym_child, "SCORE_S", 0.5)
        rewards = []
        for answer in ("entry['answer'].split()", "[9**9**9]"):
            env.reset(options={"task_id": info["task_id"]})
            rewards.append(env.step(f"<answer>{answer}</answer>")[1])
        monkeypatch.undo()
        for answer in (f"[{', '.join(truth)}]", " ".join(truth)):  # answered by another process
            env.reset(options={"task_id": info["task_id"]})
            rewards.append(env.step(f"<answer>{answer}</answer>")[1])
        assert rewards == [0.0, 0.0, 0.1, 1.0]

    def test_mistakes(self, monkeypatch):
        with pytest.raises(ValueError, match=r"dataset 'boxnet': reasoning-gym gives no reference answer"):
            ReasoningGym("boxnet")
        with pytest.raises(ValueError, match=r"dataset 'chain_sun': .*not registered"):
            ReasoningGym("chain_sun")
        with pytest.raises(ValueError, match=r"dataset 'chain_sum': .*unexpected keyword argument 'max_term'"):
            ReasoningGym("chain_sum", {"max_term": 3})
        with pytest.raises(ValueError, match=r"dataset_config has 'seed'"):
            ReasoningGym("chain_sum", {"seed": 3})
        with pytest.raises(ValueError, match="they are chain_sum/0 to chain_sum/19999"):
            ReasoningGym("chain_sum").reset(options={"task_id": "gcd/1"})
        with pytest.raises(ValueError, match="no task is called 'chain_sum/20000'"):
            ReasoningGym("chain_sum").reset(options={"task_id": "chain_sum/20000"})
        monkeypatch.setattr("rllib_nlac.envs.adapters.reasoning_gym.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"pip install 'rllib_nlac\[reasoning-gym\]'"):
            ReasoningGym()


# τ-bench v1: tau_bench.envs.get_env, tau_bench.envs.user, tau_bench.types.Action, and an Env with reset, step, tasks,
# tools_info, wiki and user. A user that a model plays speaks as soon as it is made; parse_response reads what the model says.


@dataclass
class Action:
    name: str
    kwargs: dict


class TauStandIn:
    tools_info = [{"type": "function", "function": {"name": "cancel", "description": "Cancels.", "parameters": {}}}]
    wiki = "Be kind."
    tasks = ["first", "second"]

    def __init__(self, **settings):
        self.settings, self.actions, self.asked, self.fault, self.says = settings, [], [], None, "Go on."

    def reset(self, task_index=None):
        self.actions = []
        return SimpleNamespace(observation=self.user.reset(instruction=self.tasks[task_index]), info=None)

    def step(self, action: Action):
        self.actions.append((action.name, action.kwargs))
        if action.name == "respond":
            said = self.user.step(action.kwargs["content"])
            done = "###STOP###" in said
            reward = float(("cancel", {"id": 1}) in self.actions) if done else 0.0
            return SimpleNamespace(observation=said, reward=reward, done=done, info=None)
        return SimpleNamespace(observation="cancelled", reward=0, done=False, info=None)


@pytest.fixture()
def tau(monkeypatch):
    made = []

    class User:
        def __init__(self, *arguments):
            self.arguments = arguments
            self.speak("")

        def speak(self, said):
            if made[-1].fault:
                raise made[-1].fault
            made[-1].asked.append(self.arguments)
            return self.parse_response(said) if said else said

        def reset(self, instruction=None):
            return self.speak(made[-1].says and f"Hello, {instruction}. {made[-1].says}")

        def step(self, content):
            return self.speak("###STOP###" if content == "Bye." else made[-1].says)

        def parse_response(self, response):
            return response.rpartition("Thought:")[2].strip()

    def get_env(env_name, user_strategy, user_model, task_split, user_provider=None, task_index=None):
        assert user_strategy == "human"
        made.append(TauStandIn(env_name=env_name, user_model=user_model, task_split=task_split, task_index=task_index))
        return made[-1]

    user = {"UserStrategy": enum.Enum("UserStrategy", {"HUMAN": "human", "LLM": "llm", "REACT": "react"}), "load_user": User}
    modules = {
        "tau_bench": {},
        "tau_bench.envs": {"get_env": get_env},
        "tau_bench.envs.user": user,
        "tau_bench.types": {"Action": Action},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return made


class TestTauBench:
    def test_contract_with_its_signatures(self, tau):
        env = TauBench("retail", user_model="u")
        assert not tau[0].asked  # a run that is only looked at costs nothing
        assert tau[0].settings == {"env_name": "retail", "user_model": "u", "task_split": "train", "task_index": 0}
        observation, info = env.reset(seed=0, options={"task_id": "1"})
        assert observation == "Hello, second. Go on." and "Be kind." in info["system_prompt"]
        assert info["tools"] == TauStandIn.tools_info and "cancel" not in info["system_prompt"]
        info = env.step('{"name": "cancel", "arguments": {"id": 1}}')[4]
        assert info["new_messages"] == [{"role": "tool", "name": "cancel", "content": "cancelled"}]
        *step, info = env.step("Done.")
        assert step == ["Go on.", 0.0, False, False] and "new_messages" not in info
        observation, *_, info = env.step('<tool_call>{"name": "cancel"')
        assert observation.startswith("Error: a tool call must be")
        assert info["new_messages"] == [{"role": "tool", "content": observation, "error": True}]
        for mute in ('{"name": "respond"}', " "):
            assert env.step(mute)[0] == "Error: respond needs a text under 'content'"
        assert env.step("Bye.")[1:4] == (1.0, True, False)
        assert tau[0].actions == [("cancel", {"id": 1}), ("respond", {"content": "Done."}), ("respond", {"content": "Bye."})]
        env.reset(seed=0)
        assert env.step("Bye.")[1:3] == (0.0, True)
        for unknown in ("2", "-1", "x"):
            with pytest.raises(ValueError, match="has 0 to 1"):
                env.reset(options={"task_id": unknown})

    @pytest.mark.parametrize("name", ["cancel", "cancel it"])  # the other is a name that no info["tools"] may have
    def test_in_plain_text_the_prompt_lists_the_tools_and_a_result_is_the_users_text(self, tau, monkeypatch, name):
        tool = {"type": "function", "function": {"name": name, "description": "Cancels.", "parameters": {}}}
        monkeypatch.setattr(TauStandIn, "tools_info", [tool])
        env = TauBench("retail", plain_text=name == "cancel")
        info = checked_reset(env.reset(seed=0))[1]
        assert info["tools"] == [] and info["system_prompt"].count(f'"name": "{name}"') == 1
        assert "A tool call is one JSON object" in info["system_prompt"]
        observation, *_, info = env.step(json.dumps({"name": "cancel"}))
        assert observation == "cancelled" and "new_messages" not in info

    def test_without_its_user_an_episode_is_lost_and_the_next_one_is_played(self, tau):
        env = TauBench("retail", user_model="u")
        tau[0].fault = openai.OpenAIError("nobody answers")
        with pytest.raises(EpisodeLost, match="τ-bench's user: OpenAIError: nobody answers") as lost:
            env.reset(seed=0)
        assert lost.value.reason == "endpoint_failure"
        tau[0].fault = None
        env.reset(seed=0)
        assert tau[0].asked == [("llm", "u", "openai")] * 2  # when it was made, and for the first words
        tau[0].fault = openai.OpenAIError("nobody answers")
        _, _, terminated, truncated, info = env.step("Hello.")
        assert (terminated, truncated, info["discard"], info["stop_reason"]) == (False, True, True, "endpoint_failure")
        tau[0].fault = None
        env.reset(seed=0)
        answer = SimpleNamespace(request=None, status_code=400, headers={})
        tau[0].fault = openai.BadRequestError("too long", response=answer, body=None)
        assert env.step("So much to say.")[1:4] == (0.0, True, False)  # what the agent wrote is no way out of a task
        with pytest.raises(EpisodeLost, match="τ-bench's user: BadRequestError: too long"):
            env.reset(seed=0)  # here the agent wrote nothing

    @pytest.mark.parametrize("nothing", [None, ""])
    def test_a_user_that_says_nothing_loses_the_episode(self, tau, nothing):
        env = TauBench("retail")
        env.reset(seed=0)
        tau[0].says = nothing
        observation, *_, info = env.step("Hello.")
        assert info["discard"] and observation == f"τ-bench's user: ValueError: its answer is {nothing!r}"
        with pytest.raises(EpisodeLost, match="its answer is"):
            env.reset(seed=0)

    def test_the_agent_never_reads_what_the_user_thinks(self, tau):
        env = TauBench("retail", user_strategy="react")
        tau[0].says = "Thought:\nI must not say ###STOP### yet.\n\nUser Response:\nMy id is 7."
        assert env.reset(seed=0)[0] == env.step("Your id?")[0] == "My id is 7."
        tau[0].says = "Thought: my secret is 42."
        assert "has no 'User Response:'" in env.step("Well?")[0]

    def test_mistakes(self, tau):
        with pytest.raises(ValueError, match="user_strategy is 'robot'; τ-bench knows human, llm"):
            TauBench(user_strategy="robot")
        for config in ({"domain": "airline"}, {"domain": "moon"}, {"task_split": "eval"}):
            with pytest.raises(ValueError, match="τ-bench has retail: train, dev, test; airline: test"):
                TauBench(**config)

    @pytest.mark.skipif(find_spec("tau_bench") is not None, reason="τ-bench is installed")
    def test_without_it_the_error_says_how_to_install_it(self):
        with pytest.raises(ValueError, match=r"needs τ-bench: pip install .*--no-deps .*github.com/sierra-research/tau-bench"):
            TauBench()

    @pytest.mark.skipif(find_spec("tau_bench") is None, reason="τ-bench is not installed")
    def test_the_real_one_has_these_signatures(self):
        env = TauBench("retail", user_strategy="human")
        assert len(env._inner.tasks) == 500 and env.tools


# τ²-bench: tau2.registry.registry, tau2.gym.gym_agent.AgentGymEnv. Its simulation runs in a thread, which waits for the agent;
# where it fails, its log says why, and info has no run.


class Tau2StandIn:
    is_down = False

    def __init__(self, domain, task_id, max_steps=100, user_llm=None, user_llm_args=None):
        self.task_id, self.max_steps, self.user_llm, self.actions = task_id, max_steps, user_llm, []
        self._agent, self._orchestrator = None, None

    def _log(self, message, level="INFO"):
        pass

    def reset(self, seed=None, options=None):
        acted = threading.Event()
        self._orchestrator = SimpleNamespace(max_steps=self.max_steps)
        self._agent = SimpleNamespace(is_agent_turn=True, set_action=lambda message: acted.set())
        self.thread = threading.Thread(target=acted.wait, daemon=True)
        self.thread.start()
        if self.is_down:
            self._log("Orchestrator error: nobody answers", "ERROR")
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        info = {"policy": "Be brief.", "tools": [SimpleNamespace(openai_schema=tool)], "simulation_run": "{}"}
        return "" if self.is_down else f"user: I am {self.task_id}", info

    def step(self, action):
        self.actions.append(action)
        if action == "Grade me." and self.is_down:
            raise openai.OpenAIError("no judge")
        if self.is_down:
            self._log("Orchestrator error: nobody answers", "ERROR")
            return "", 0.0, True, False, {"simulation_run": "{}"}
        ending = {"Bye.": "user_stop", "Err.": "too_many_errors", "Long.": "max_steps"}.get(action)
        info = {"simulation_run": json.dumps({"termination_reason": ending} if ending else {})}
        said = "tool: a door" if action.startswith("{") else "user: and?"
        return said, float(action == "Bye."), ending is not None, False, info


@pytest.fixture()
def tau2(monkeypatch):
    class Registry:
        def get_tasks_loader(self, domain):
            if domain == "unread":
                raise FileNotFoundError("tasks.json")
            if domain != "retail":
                raise KeyError(domain)
            splits = {"base": ["train", "test"]}
            return lambda split="base": [SimpleNamespace(id=f"{s}-{i}") for s in splits.get(split, [split]) for i in range(3)]

    monkeypatch.setattr(Tau2StandIn, "is_down", False)
    modules = {
        "loguru": {"logger": SimpleNamespace(disable=lambda name: None)},
        "tau2": {},
        "tau2.data_model": {},
        "tau2.data_model.message": {"AssistantMessage": SimpleNamespace},
        "tau2.gym": {},
        "tau2.gym.gym_agent": {"AgentGymEnv": Tau2StandIn},
        "tau2.registry": {"registry": Registry()},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


class TestTau2Bench:
    def test_contract_with_its_signatures(self, tau2):
        env = Tau2Bench("retail", user_llm="m", max_turns=7)
        observation, info = env.reset(seed=0, options={"task_id": "train-2"})
        assert observation == "I am train-2" and [tool["function"]["name"] for tool in info["tools"]] == ["look"]
        assert "Be brief." in info["system_prompt"] and "look" not in info["system_prompt"]
        assert (env._inner.max_steps, env._inner.user_llm) == (28, "m")
        assert env.step("hm")[:4] == ("and?", 0.0, False, False)
        assert env.step("Bye.")[1:4] == (1.0, True, False)
        with pytest.raises(ValueError, match="no tasks for domain 'moon'"):
            Tau2Bench("moon")
        with pytest.raises(ValueError, match=r"set TAU2_DATA_DIR .*tasks\.json"):
            Tau2Bench("unread")
        with pytest.raises(ValueError, match="lacks tasks of 'retail', split 'small': take 'train', 'test' or 'base'"):
            Tau2Bench("retail", "small")

    def test_a_call_is_made_however_it_is_written(self, tau2):
        env = Tau2Bench()
        env.reset(seed=0)
        as_user = '{"name": "look", "requestor": "user"}'  # which τ²-bench would let act for the user
        for action in ('<tool_call>{"name": "look"}</tool_call>', 'Let me look.\n```json\n{"name": "look"}\n```', as_user):
            assert env.step(action)[4]["new_messages"] == [{"role": "tool", "name": "look", "content": "a door"}]
        assert env._inner.actions == ['{"name": "look", "arguments": {}}'] * 3
        assert "one call at a time" in env.step('[{"name": "look"}, {"name": "look"}]')[4]["new_messages"][0]["content"]
        assert len(env._inner.actions) == 3
        env = Tau2Bench(plain_text=True)
        observation, info = env.reset(options={"task_id": "train-2"})
        assert (observation, info["tools"]) == ("user: I am train-2", []) and '{"name": "look"' in info["system_prompt"]
        observation, *_, info = env.step('{"name": "look"}')
        assert observation == "tool: a door" and "new_messages" not in info

    def test_without_user_or_judge_an_episode_is_lost_and_the_next_one_is_played(self, tau2, monkeypatch):
        env = Tau2Bench()
        for action, cause in (("Hello.", "Orchestrator error: nobody answers"), ("Grade me.", "OpenAIError: no judge")):
            env.reset(seed=0)
            monkeypatch.setattr(Tau2StandIn, "is_down", True)
            observation, _, terminated, truncated, info = env.step(action)
            assert (terminated, truncated, info["discard"], info["stop_reason"]) == (False, True, True, "endpoint_failure")
            assert cause in observation
            with pytest.raises(EpisodeLost, match="nobody answers"):
                env.reset(seed=0)
            monkeypatch.setattr(Tau2StandIn, "is_down", False)

    @pytest.mark.parametrize(
        ("action", "reason", "truncated"), [("Err.", "too_many_errors", False), ("Long.", "max_steps", True)]
    )
    def test_an_end_that_is_not_graded_says_why(self, tau2, action, reason, truncated):
        env = Tau2Bench()
        env.reset(seed=0)
        observation, _, *ends, info = env.step(action)
        assert ends == [not truncated, truncated] and (info["success"], info["stop_reason"]) == (False, reason)
        assert observation == f"and?\nThe dialogue was ended: {reason.replace('_', ' ')}."

    def test_an_episode_that_is_cut_off_leaves_no_thread(self, tau2):
        env = Tau2Bench(max_turns=1)
        for end in (lambda: env.reset(seed=1), env.close):
            env.reset(seed=0)
            thread, orchestrator = env._inner.thread, env._inner._orchestrator
            assert env.step("hm")[3] and thread.is_alive()
            end()
            thread.join(5)
            assert not thread.is_alive() and orchestrator.max_steps == 0

    @pytest.mark.skipif(find_spec("tau2") is not None, reason="τ²-bench is installed")
    def test_without_it_the_error_says_how_to_install_it(self):
        with pytest.raises(ValueError, match=r"needs τ²-bench: git clone .*tau2-bench; pip install .*Python 3.12"):
            Tau2Bench()


class Corridor(gym.Env):
    """A stock environment: text in a dict, moves by number."""

    def __init__(self, length: int = 3, space=None):
        self.observation_space = gym.spaces.Dict({"text": TextSpace(), "n": gym.spaces.Discrete(9)})
        self.action_space, self.length = space or gym.spaces.Discrete(2), length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return {"text": "You are at 0.", "n": 0}, {}

    def step(self, action):
        self.at += 1 if action == 1 else -1
        return {"text": f"You are at {self.at}.", "n": 0}, float(self.at == self.length), self.at == self.length, False, {}


class TestGymnasiumText:
    @pytest.fixture(autouse=True)
    def registered(self):
        gym.register("Corridor-v0", Corridor, max_episode_steps=50)
        yield
        del gym.registry["Corridor-v0"]

    def test_a_name_that_begins_as_another_does(self):
        """Fails where every name that a text holds counts: who goes back would never be understood."""
        env = registry.make("GymnasiumText", {**self.CONFIG, "actions": ["go", "go back"]})
        env.reset(seed=0)
        assert env.step("I go back.")[0] == "You are at 1." and env.step("Go, go!")[0] == "You are at 0."
        assert env.step("go or go back")[0] == "Say one of: go, go back."
        with pytest.raises(ValueError, match=r"env_config\.actions has '\+', and a name needs a letter or digit"):
            registry.make("GymnasiumText", {**self.CONFIG, "actions": ["-1", "+"]})
        with pytest.raises(ValueError, match=r"'\+1' and '-1' have the same words"):
            registry.make("GymnasiumText", {**self.CONFIG, "actions": ["+1", "-1"]})

    CONFIG = {"id": "Corridor-v0", "observation_key": "text", "actions": ["go left", "go right"], "system_prompt": "Walk."}

    def test_named_actions_and_a_field_of_the_observation(self):
        env = registry.make("GymnasiumText", {**self.CONFIG, "kwargs": {"length": 2}})
        observation, info = env.reset(seed=0)
        assert (observation, info["system_prompt"]) == ("You are at 0.", "Walk.")
        assert env.step("Go right!")[0] == "You are at 1."
        assert env.step("left or right?")[0] == "Say one of: go left, go right."
        observation, reward, terminated, _, info = env.step("I will go right")
        assert (observation, reward, terminated, info["success"]) == ("You are at 2.", 1.0, True, True)

    def test_its_own_limit_of_turns_says_what_the_return_came_to(self):
        """The last turn names no action, so that the inner environment is not asked."""
        for success_return in (0.0, 1.0):
            env = GymnasiumText(**self.CONFIG, max_turns=2, success_return=success_return)
            env.reset(seed=0)
            assert "success" not in env.step("hm")[4]
            _, _, _, truncated, info = env.step("hm")
            assert truncated and info["success"] is (success_return == 0.0)

    def test_numbers_of_actions_that_do_not_begin_at_0(self):
        env = GymnasiumText(**self.CONFIG, kwargs={"space": gym.spaces.Discrete(2, start=1)})
        env.reset(seed=0)
        assert env.step("go left")[0] == "You are at 1."  # its first action, which is its number 1

    def test_observations_that_are_no_text_are_worded_by_a_function(self):
        lake = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
        env = registry.make("GymnasiumText", {**lake, "describe": lambda tile: f"You stand on tile {tile}."})
        assert env.reset(seed=0)[0] == "You stand on tile 0." and env.step("go down")[0] == "You stand on tile 4."
        env = registry.make("GymnasiumText", {**lake, "describe": "builtins:str"})
        assert env.reset(seed=0)[0] == "0"
        with pytest.raises(ValueError, match=r"env_config\.describe 'builtins:strr'"):
            registry.make("GymnasiumText", {**lake, "describe": "builtins:strr"})

    def test_discrete_observations_and_actions_are_numbers_without_further_keys(self):
        env = registry.make("GymnasiumText", {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}})
        observation, info = env.reset(seed=0)
        assert (observation, info["system_prompt"]) == ("0", "Say one of: 0, 1, 2, 3.")
        assert env.step("I take 1.")[0] == "4" and env.step("4")[0] == "Say one of: 0, 1, 2, 3."
        assert env.step("2")[:4] == ("5", 0.0, True, False)  # a hole in the ice
        shifted = GymnasiumText("Corridor-v0", {"space": gym.spaces.Discrete(2, start=1)}, observation_key="n")
        assert shifted.reset(seed=0)[0] == "0" and shifted.step("0")[0] == "Say one of: 1, 2."

    @pytest.mark.process
    @pytest.mark.parametrize("config", [CONFIG, {"id": "FrozenLake-v1", "max_turns": 20}])
    def test_it_keeps_the_contract(self, config):
        findings = list(contract.check_environment(lambda: GymnasiumText(**config)))
        assert [f for f in findings if f.verdict == "FAILED"] == []

    def test_mistakes(self):
        with pytest.raises(ValueError, match=r"set env_config\.observation_key to one of \['n', 'text'\], or set env_con"):
            GymnasiumText("Corridor-v0")
        for stock in ("CartPole-v1", "Blackjack-v1"):  # a Box, and a Tuple
            with pytest.raises(ValueError, match=rf"{stock} has the .* text or a number is needed: set env_config\.describe"):
                GymnasiumText(stock)
        with pytest.raises(ValueError, match="without a field 'txt'"):
            GymnasiumText("Corridor-v0", observation_key="txt")
        with pytest.raises(ValueError, match="has 2 actions; name them"):
            GymnasiumText("Corridor-v0", observation_key="text", actions=["left"])
        for space in (gym.spaces.Box(0, 1), gym.spaces.MultiBinary((2, 2))):
            with pytest.raises(ValueError, match=r"register a gymnasium\.ActionWrapper"):
                GymnasiumText("Corridor-v0", {"space": space}, observation_key="text")
        with pytest.raises(ValueError, match="'Nothing-v0'"):
            GymnasiumText("Nothing-v0")
        with pytest.raises(ValueError, match=r"env_config\.actions has True, and a name is a text: YAML reads yes, no"):
            GymnasiumText("Corridor-v0", observation_key="text", actions=[True, False])
        with pytest.raises(ValueError, match=r"env_config.max_turns is nan and must be a whole number of at least 1"):
            GymnasiumText("Corridor-v0", max_turns=float("nan"), observation_key="text", actions=["left", "right"])
