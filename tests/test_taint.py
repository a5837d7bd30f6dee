"""Whether success, return or privileged information reaches any prompt: no.

Two worlds say and pay the same and differ in everything that no prompt may show: the answer, the task's id, success, sub-goals,
why the episode stopped, and whatever else an environment puts into its info. Everything that is ever asked of an engine must
then be the same, to the last token, in every role, configuration and baseline. This finds what comes through by any way.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from scripted_engine import ScriptedEngine, last_message
from scripted_roles import NEXT, NO, role_of, thinking

from rllib_nlac.ablations import Constant, Fresh, Permuted, WhatCame
from rllib_nlac.baselines.nlql import BestOfStages
from rllib_nlac.baselines.nlrl import NLRL, NLRLConfig
from rllib_nlac.baselines.rollouts import RolloutCritic
from rllib_nlac.baselines.self_distillation import SelfDistillation, SelfDistillationConfig
from rllib_nlac.diagnostics.examination import Examiner, forks_of
from rllib_nlac.diagnostics.notices import Notices
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.envs.rows import read_rows
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.replay.buffer import TextReplayBuffer
from rllib_nlac.replay.dialogues import parse_dialogue, to_episode, write_dialogues
from rllib_nlac.sampling.env_runner import TextEnvRunner

REWARDS = (0.1, 0.02, 0.003)
RETURNS = ("0.123", "0.023")  # of the whole episode, and from its second step on
SECRET = "XYZZY"  # with the world's number behind it


class TwoWorlds(gym.Env[str, str]):
    """Ends after three replies."""

    observation_space = action_space = TextSpace()

    def __init__(self, world: int) -> None:
        self.world, self.turn = world, 0

    def info(self) -> dict:
        secret = f"{SECRET}{self.world}"
        return {
            "system_prompt": "You play.",
            "task_id": f"{secret} task",
            "privileged": {"answer": f"{secret} answer"},
            "hint": f"{secret} hint",
            "subgoals": {f"{secret} goal": bool(self.world)},
            "stop_reason": f"{secret} stop",
            "success": bool(self.world),
            "tools": [],
            "turn": self.turn,
            "split": f"{secret} split",
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "Guess my object.", self.info()

    def step(self, action):
        self.turn += 1
        done = self.turn == len(REWARDS)
        return "No.", REWARDS[self.turn - 1], done, False, self.info()


def runner_of(config, chat, world: int, answer=thinking) -> TextEnvRunner:
    runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: TwoWorlds(world))
    runner.attach(ScriptedEngine(chat, answer))
    return runner


def prompts_of(engine: ScriptedEngine) -> list[str]:
    return [engine.text(request) for _, request in engine.requests]


def compared(make_prompts) -> list[str]:
    """What both worlds ask, which is the same and holds no secret."""
    first, second = make_prompts(0), make_prompts(1)
    assert first == second and first
    assert not any(secret in prompt for prompt in first for secret in (SECRET, *RETURNS))
    return first


@pytest.fixture()
def own_config(config):
    own = config.copy(copy_frozen=False).roles(max_reasoning_tokens=48)
    own.language(max_action_tokens=24, prompts="compact")
    own.num_envs_per_env_runner = 2
    return own


STRUCTURES: list[dict] = [
    {},
    {"n_step": 3},
    {"num_futures": 2, "num_next_actions": 2, "num_refinements": 2, "rejected_weight": 0.0},
    {"critic_input": "backed_up", "n_step": 2, "rejected_weight": 0.5},
    {"variant": Permuted()},
    {"variant": Fresh()},
    {"variant": Constant(), "train_on_yes": "always"},
    {"num_refinements": 0, "judged_fraction": 0.5},
]


class TestPrompts:
    @pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: "-".join(s) or "defaults")
    @pytest.mark.parametrize("kind", [LanguageStages, BestOfStages])
    def test_of_all_roles_in_every_configuration(self, own_config, chat, compact, structure, kind):
        variant = structure.get("variant", NLAC_AS_IT_IS)
        own_config.training(**{key: value for key, value in structure.items() if key != "variant"})

        def ask(world: int) -> list[str]:
            runner = runner_of(own_config, chat, world)
            buffer = TextReplayBuffer(env="TwentyQuestions", seed=0)
            buffer.add(runner.sample(num_episodes=3))
            assert {e.get_infos(-1)["success"] for e in buffer.episodes} == {bool(world)}
            drawn = buffer.sample_transitions(20, 0.4, own_config.n_step).transitions
            stages = kind(runner.engine, chat, lambda env: compact, own_config.stage_settings, variant=variant)
            targets, refinements, _ = stages.run(drawn)
            trained = [chat.tokenizer.decode(t.prompt_ids) for t in targets]
            trained += [chat.tokenizer.decode(r.transition.generation.prompt_ids) for r in refinements]
            return prompts_of(runner.engine) + trained

        prompts = compared(ask)
        assert {role_of(prompt) for prompt in prompts} >= {"a'", "d'", "y", "critique"}
        # The reward of a step is the backup's to see, and nobody else's.
        for prompt in prompts:
            shown = [r for r in map(str, REWARDS) if f"Reward: {r}." in prompt]
            assert bool(shown) == (role_of(prompt) == "y")

    def test_of_the_policy_with_one_refinement(self, own_config, chat):
        def ask(world: int) -> list[str]:
            runner = runner_of(own_config, chat, world)
            runner.sample_tasks(range(3), attempts=2, refined=True)
            return prompts_of(runner.engine)

        assert {role_of(prompt) for prompt in compared(ask)} == {"a'", "d'", "d", "critique", "a_r", "rethink"}

    def test_of_what_an_evaluation_asks_the_critic(self, own_config, chat, compact):
        """It knows how its episodes ended, and asks about them."""

        def ask(world: int) -> list[str]:
            episodes = runner_of(own_config, chat, world).sample_tasks(range(3))
            engine = ScriptedEngine(chat, thinking)
            stages = LanguageStages(engine, chat, lambda env: compact, own_config.stage_settings)
            examiner = Examiner(stages, "TwentyQuestions", seed=0, futures=4)
            places = examiner.draw(episodes, 6)
            turns = examiner.transitions(places)
            assert {t.episode_success for t in turns} == {bool(world)}
            examiner.predict(turns)
            forks_of(places, examiner.refine(turns), 2)
            return prompts_of(engine)

        # The actions that the policy played in s' are judged as well, by which ``role_of`` tells d' from d.
        assert {role_of(prompt) for prompt in compared(ask)} == {"d", "d'", "critique", "a_r"}

    def test_of_dialogues_that_were_logged(self, own_config, chat, compact, tmp_path):
        """The log holds success and the task's id beside the dialogue."""

        def ask(world: int) -> list[str]:
            file = tmp_path / f"{world}.jsonl"
            write_dialogues(file, runner_of(own_config, chat, world).sample(num_episodes=3))
            assert SECRET in file.read_text() and json.loads(file.read_text().splitlines()[0])["success"] is bool(world)
            episodes = [
                to_episode(parse_dialogue(row), str(i), chat, compact, "plain", 24)
                for i, row in enumerate(read_rows(str(file)))
            ]
            buffer = TextReplayBuffer(env="TwentyQuestions", seed=0)
            buffer.add(episodes)
            engine = ScriptedEngine(chat, thinking)
            LanguageStages(engine, chat, lambda env: compact, own_config.stage_settings).run(
                buffer.sample_transitions(12, 0.4).transitions
            )
            return prompts_of(engine)

        compared(ask)


class TestRolloutCritics:
    """NLRL and self-distillation judge by rollouts."""

    def ask(self, kind: type[RolloutCritic], config, chat, compact, world: int) -> list[str]:
        runner = runner_of(config, chat, world)
        algorithm = kind.__new__(kind)
        algorithm.config, algorithm.rng, algorithm.notices = config, np.random.default_rng(0), Notices()
        algorithm.env_runner_group = SimpleNamespace(num_remote_env_runners=lambda: 0, local_env_runner=runner)
        algorithm.watch = Watch(algorithm)
        algorithm.metrics = SimpleNamespace(aggregate=lambda *a, **k: None, log_value=lambda *a, **k: None)
        algorithm.stages = LanguageStages(runner.engine, chat, lambda env: compact, config.stage_settings)
        assert algorithm.training_sequences(runner.sample(num_episodes=3))
        return prompts_of(runner.engine)

    def configured(self, config, own_config):
        own = config().environment("TwentyQuestions").debugging(seed=0).language(max_action_tokens=24, prompts="compact")
        own.num_envs_per_env_runner = 2
        return own.roles(max_reasoning_tokens=48, max_future_tokens=24, max_critique_tokens=32)

    def test_nlrls(self, own_config, chat, compact):
        config = self.configured(NLRLConfig, own_config)
        compared(lambda world: self.ask(NLRL, config, chat, compact, world))

    def test_self_distillations_show_how_a_rollout_ended_and_nothing_else(self, own_config, chat, compact):
        """Its evaluator reads real rollouts to their end: the one word that says how they ended is what differs."""
        config = self.configured(SelfDistillationConfig, own_config)
        lost, won = (self.ask(SelfDistillation, config, chat, compact, world) for world in (0, 1))
        differing = [(a, b) for a, b in zip(lost, won, strict=True) if a != b]
        assert differing and [a.replace("No. FAILURE", "No. SUCCESS") for a in lost] == won
        assert all(role_of(a) == "critique" for a, _ in differing)
        assert not any(secret in prompt for prompt in lost + won for secret in (SECRET, *RETURNS))


def test_hindsights_evaluator_reads_how_it_ended_and_nobody_else(own_config, chat, compact):
    own_config.training(n_step=3)

    def ask(world: int) -> list[str]:
        runner = runner_of(own_config, chat, world)
        buffer = TextReplayBuffer(env="TwentyQuestions", seed=0)
        buffer.add(runner.sample(num_episodes=3))
        settings = own_config.stage_settings
        stages = LanguageStages(runner.engine, chat, lambda env: compact, settings, variant=WhatCame())
        _, refinements, _ = stages.run(buffer.sample_transitions(20, 0.4, own_config.n_step).transitions)
        assert any(r.generation for r in refinements)
        trained = [chat.tokenizer.decode(r.transition.generation.prompt_ids) for r in refinements]
        return prompts_of(runner.engine) + trained

    lost, won = ask(0), ask(1)
    differing = [(a, b) for a, b in zip(lost, won, strict=True) if a != b]
    assert differing and all(role_of(a) == "critique" and a.replace("No. FAILURE", "No. SUCCESS") == b for a, b in differing)
    assert not any(secret in prompt for prompt in lost + won for secret in (SECRET, *RETURNS))


def test_the_rest_of_a_refined_turn_is_no_way_round(own_config, chat, compact):
    """With thoughts: what is refined a second time shows the first refined turn, its thought included, and no critique but its
    own round's."""
    own_config.training(num_refinements=2)
    runner = runner_of(own_config, chat, 0)
    buffer = TextReplayBuffer(env="TwentyQuestions", seed=0)
    buffer.add(runner.sample(num_episodes=1))
    stages = LanguageStages(runner.engine, chat, lambda env: compact, own_config.stage_settings)
    before = len(runner.engine.requests)
    stages.run(buffer.sample_transitions(2, 0.4).transitions)
    refined = [p for p in prompts_of(runner.engine)[before:] if role_of(p) == "a_r"]
    assert len(refined) == 4 and all(p.count(NO) == 1 and last_message(p) == f"Refine.\n{NO}" for p in refined)
    assert NEXT not in "".join(last_message(p) for p in refined)
