"""Turns under RLlib's PPO and APPO: probabilities, values, advantages and losses against plain torch. No engine, no Ray."""

from __future__ import annotations

import copy
import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing

from rllib_nlac.baselines.stock import TextAPPOConfig, TextPPOConfig
from rllib_nlac.baselines.token_module import PAD, TextToTokens, TokenSequence
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import GENERATION, MESSAGES
from rllib_nlac.types import Generation, Message, dialogue_after

GAMMA, LAMBDA, TEMPERATURE = 0.9, 0.8, 0.7


def configured(config, **training):
    config.environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
    config.language(
        language_model="tiny", prompts="compact", max_action_tokens=6, action_temperature=TEMPERATURE, max_context=128
    )
    config.learners(num_learners=0).training(gamma=GAMMA, lambda_=LAMBDA, **training)
    return config


@pytest.fixture(scope="module")
def ppo_config():
    return configured(TextPPOConfig(), entropy_coeff=0.03, kl_coeff=0.4, clip_param=0.2, vf_loss_coeff=0.5, vf_clip_param=2.0)


@pytest.fixture(scope="module")
def learner(ppo_config):
    """RLlib's PPO learner around our module, with a head that says something."""
    spec = ppo_config.get_multi_rl_module_spec(spaces={DEFAULT_MODULE_ID: (TextSpace(), TextSpace())})
    made = ppo_config.get_default_learner_class()(config=ppo_config, module_spec=spec)
    made.build()
    torch.manual_seed(0)
    torch.nn.init.normal_(made.module[DEFAULT_MODULE_ID].model.head.weight, std=0.2)
    return made


def test_a_loss_turns_no_dropout_on(ppo_config, model_path, tmp_path):
    """RLlib puts a module into training mode before each loss. Fails where the model's own dropout is at work from then on."""
    folder = tmp_path / "with_dropout"
    shutil.copytree(model_path, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
    own = ppo_config.copy(copy_frozen=False).language(language_model=str(folder))
    module = own.get_multi_rl_module_spec(spaces={DEFAULT_MODULE_ID: (TextSpace(), TextSpace())}).build()[DEFAULT_MODULE_ID]
    batch = {Columns.OBS: torch.tensor([[3, 10, 11]] * 4), Columns.ACTIONS: torch.tensor([[20, 21, 1]] * 4)}
    before = module.compute_values(batch)
    said = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
    assert torch.equal(said, said[:1].expand_as(said)) and torch.equal(module.compute_values(batch), before)


def dialogue(chat, rewards, end: str, sizes, seed: int) -> SingleAgentEpisode:
    """Sampled turns of given sizes, by the chat template's own prompts; ``end`` is terminated, truncated or open."""
    rng = np.random.default_rng(seed)
    result = SingleAgentEpisode(id_=f"dialogue-{seed}")
    result.add_env_reset("Guess my object.", {})
    messages: tuple[Message, ...] = (Message("user", "Guess my object."),)
    for t, (reward, size) in enumerate(zip(rewards, sizes, strict=True)):
        ids, reply = tuple(int(i) for i in rng.integers(20, 500, size)), ("Yes.", "No.")[seed % 2]
        generation = Generation(chat.prompt_ids(messages), ids, rng.normal(-6, 0.2, size).astype(np.float32), True, 0)
        turn, last = chat.decode(ids), t == len(rewards) - 1
        result.add_env_step(
            reply,
            turn,
            reward,
            {},
            terminated=last and end == "terminated",
            truncated=last and end == "truncated",
            extra_model_outputs={GENERATION: generation, MESSAGES: messages},
        )
        messages = dialogue_after(messages, turn, reply)
    return result


@pytest.fixture()
def episodes(chat):
    return [
        dialogue(chat, [0.0, -0.5, 1.0], "terminated", [3, 1, 5], 1),
        dialogue(chat, [0.25, 0.5], "truncated", [2, 6], 2),
        dialogue(chat, [2.0], "terminated", [4], 3),
        dialogue(chat, [0.0, 1.0], "open", [1, 2], 4),
    ]


def batch_of(learner, episodes):
    """What RLlib's whole pipeline of connectors makes of episodes."""
    made = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=copy.deepcopy(episodes), shared_data={}, metrics=learner.metrics
    )
    return made[DEFAULT_MODULE_ID]


def module_of(learner):
    return learner.module[DEFAULT_MODULE_ID]


def run(module, prompt, turn=()) -> tuple[torch.Tensor, float]:
    """Log-softmax at the temperature before each token of a turn, and the value at the prompt's end, without padding."""
    out = module.lm(input_ids=torch.tensor([[*prompt, *turn]]), output_hidden_states=True)
    value = module.model.head(out.hidden_states[-1][0, len(prompt) - 1]).item()
    return (out.logits[0, len(prompt) - 1 : len(prompt) - 1 + len(turn)] / TEMPERATURE).log_softmax(-1), value


def prompts_of(chat, episode) -> list[tuple[int, ...]]:
    """Prompt of every state, the one after the end included: last prompt, sampled turn, and what follows it."""
    generations = episode.get_extra_model_outputs(GENERATION)
    follows = f"<|end|><|user|>{episode.get_observations(-1)}<|end|><|assistant|>"
    last = generations[-1]
    assert chat.end_id not in last.token_ids
    after = (*last.prompt_ids, *last.token_ids, *chat.tokenizer.encode(follows, add_special_tokens=False))
    return [g.prompt_ids for g in generations] + [after]


def unpadded(row) -> tuple[int, ...]:
    return tuple(int(i) for i in row if i != PAD)


class TestDistribution:
    def test_the_kl_estimate_is_k3_of_self_against_other(self):
        """For p = 1/2 and q = 1/4: q/p - 1 - log(q/p)."""
        p, q = (TokenSequence(torch.tensor([[[math.log(x), 0.0]]])) for x in (0.5, 0.25))
        assert p.kl(q).item() == pytest.approx(0.5 - 1 + math.log(2))
        assert q.kl(p).item() == pytest.approx(2 - 1 - math.log(2))

    def test_its_gradient_is_that_of_the_kl(self):
        """On average over samples of p: the gradient of KL(p || q) by q's logits, q - p."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(5, generator=generator).requires_grad_()
        p = torch.randn(5, generator=generator).softmax(0)
        q = logits.log_softmax(0)
        of = lambda logp: TokenSequence(torch.stack([logp, torch.zeros(5)], -1)[:, None])  # noqa: E731
        (p * of(p.log()).kl(of(q))).sum().backward()
        torch.testing.assert_close(logits.grad, (q.exp() - p).detach(), atol=1e-5, rtol=1e-4)

    def test_a_turn_is_a_product_over_its_tokens(self):
        made = TokenSequence.from_logits(torch.tensor([[[-1.0, 0.5], [-2.0, 0.25], [0.0, 0.0]]]))
        assert made.logp(torch.zeros(1, 3)).tolist() == [-3.0] and made.entropy().tolist() == [0.75]
        other = TokenSequence(torch.tensor([[[-1.5, 0.0], [-1.0, 0.0], [0.0, 0.0]]]))
        expected = sum(math.exp(d) - 1 - d for d in (-0.5, 1.0))
        assert made.kl(other).tolist() == pytest.approx([expected])
        assert TokenSequence.required_input_dim(TextSpace()) == 2
        with pytest.raises(NotImplementedError):
            made.sample()


class TestColumns:
    def test_they_hold_what_the_engine_saw_and_sampled(self, learner, ppo_config, episodes, chat):
        batch = batch_of(learner, episodes)
        row = 0
        for episode in episodes:
            generations = episode.get_extra_model_outputs(GENERATION)
            for t, (generation, prompt) in enumerate(zip([*generations, None], prompts_of(chat, episode), strict=True)):
                assert bool(batch[Columns.LOSS_MASK][row]) == (generation is not None)
                last = generation is None
                if not last or not episode.is_terminated:  # behind a real end the prompt stands for nothing
                    assert unpadded(batch[Columns.OBS][row]) == prompt
                if not last:
                    size = len(generation.token_ids)
                    assert unpadded(batch[Columns.ACTIONS][row]) == generation.token_ids
                    inputs = batch[Columns.ACTION_DIST_INPUTS][row]
                    np.testing.assert_array_equal(inputs[:size, 0], generation.logprobs)
                    assert not inputs[size:].any() and not inputs[:, 1].any() and inputs.shape == (6, 2)
                    assert batch[Columns.ACTION_LOGP][row].item() == pytest.approx(float(generation.logprobs.sum()), rel=1e-6)
                    assert batch[Columns.REWARDS][row].item() == pytest.approx(episode.get_rewards(t))
                row += 1
        assert len(batch[Columns.OBS]) == row == 12 and batch[Columns.OBS].shape == (12, 128)

    def test_a_state_that_outgrows_the_context_has_the_value_of_the_one_before(self, chat):
        episode = dialogue(chat, [0.0, 0.0], "truncated", [2, 2], 5)
        prompts = prompts_of(chat, episode)
        room = type(chat)(chat.tokenizer, len(prompts[-1]) - 1)
        tight, wide = (
            TextToTokens(None, None, chat=c, max_prompt_tokens=9, max_action_tokens=6, history_turns=None) for c in (room, chat)
        )
        assert tight._after_the_end(episode) == prompts[-2] and wide._after_the_end(episode) == prompts[-1]
        episode.is_terminated, episode.is_truncated = True, False
        assert wide._after_the_end(episode) == prompts[-2]

    def test_old_turns_are_left_out_behind_the_end_too(self, chat):
        episode = dialogue(chat, [0.0] * 3, "truncated", [2] * 3, 6)
        piece = TextToTokens(None, None, chat=chat, max_prompt_tokens=9, max_action_tokens=6, history_turns=1)
        messages = episode.get_extra_model_outputs(MESSAGES, -1)
        expected = dialogue_after(messages, episode.get_actions(-1), episode.get_observations(-1), 1)
        assert piece._after_the_end(episode) == chat.prompt_ids(expected) and len(expected) == 3


class TestAdvantages:
    def expected(self, module, chat, episode) -> tuple[list[float], list[float]]:
        """Advantages and value targets by the sums of GAE's definition."""
        values = [run(module, prompt)[1] for prompt in prompts_of(chat, episode)]
        if episode.is_terminated:
            values[-1] = 0.0
        rewards = list(episode.get_rewards())
        errors = [r + GAMMA * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        advantages = [
            sum((GAMMA * LAMBDA) ** (later - t) * errors[later] for later in range(t, len(errors))) for t in range(len(errors))
        ]
        return advantages, [a + v for a, v in zip(advantages, values, strict=False)]

    def test_gae_over_turns_bootstraps_where_an_episode_is_cut_off_and_never_behind_an_end(
        self, learner, ppo_config, episodes, chat
    ):
        batch, module = batch_of(learner, episodes), module_of(learner)
        mask = batch[Columns.LOSS_MASK]
        expected = [self.expected(module, chat, episode) for episode in episodes]
        targets = batch[Postprocessing.VALUE_TARGETS][mask].tolist()
        assert targets == pytest.approx([v for _, of_episode in expected for v in of_episode], abs=1e-4)
        # RLlib standardises them, by mean and deviation that count the steps behind the ends, too: the order and relation stay.
        mine, plain = batch[Postprocessing.ADVANTAGES][mask].numpy(), np.array([a for of, _ in expected for a in of])
        slope, offset = np.polyfit(plain, mine, 1)
        assert slope > 0 and np.allclose(mine, slope * plain + offset, atol=1e-3)

    def test_the_turn_limit_is_an_end_unless_told_otherwise(self, ppo_config):
        assert TextPPOConfig().truncation_ends and TextAPPOConfig().truncation_ends
        assert (TextPPOConfig().gamma, TextPPOConfig().lambda_, TextPPOConfig().entropy_coeff) == (1.0, 0.95, 0.0)


class TestModule:
    @given(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=5),
        st.integers(1, 60),
        st.integers(0, 99),
    )
    @settings(max_examples=25)
    def test_probabilities_entropies_and_values_row_by_row(self, learner, shapes, budget, seed):
        module, rng = module_of(learner), np.random.default_rng(seed)
        module.model_config["max_tokens_per_micro_batch"] = budget
        rows = [(rng.integers(2, 500, p).tolist(), rng.integers(0, 500, t).tolist()) for p, t in shapes]
        pad = lambda ids, width: ids + [PAD] * (width - len(ids))  # noqa: E731
        batch = {
            Columns.OBS: torch.tensor([pad(p, 14) for p, _ in rows], dtype=torch.int32),
            Columns.ACTIONS: torch.tensor([pad(t, 7) for _, t in rows], dtype=torch.int32),
        }
        with torch.no_grad():
            out = module.forward_train(batch)
            values = module.compute_values(batch)
            for i, (prompt, turn) in enumerate(rows):
                logprobs, value = run(module, prompt, turn)
                inputs = out[Columns.ACTION_DIST_INPUTS][i]
                torch.testing.assert_close(inputs[: len(turn), 0], logprobs[range(len(turn)), turn], atol=1e-4, rtol=1e-4)
                entropies = torch.distributions.Categorical(logits=logprobs).entropy()
                torch.testing.assert_close(inputs[: len(turn), 1], entropies, atol=1e-4, rtol=1e-4)
                assert not inputs[len(turn) :].any()
                assert values[i].item() == out[Columns.EMBEDDINGS][i].item() == pytest.approx(value, abs=1e-4)
        assert set(module.forward_inference(batch)) == {Columns.ACTION_DIST_INPUTS}

    def test_values_carry_a_gradient_in_training_only(self, learner, ppo_config, episodes):
        batch, module = batch_of(learner, episodes), module_of(learner)
        out = module.forward_train(batch)
        assert out[Columns.EMBEDDINGS].requires_grad and out[Columns.ACTION_DIST_INPUTS].requires_grad
        assert module.compute_values(batch, out[Columns.EMBEDDINGS]) is out[Columns.EMBEDDINGS]
        assert not module.compute_values(batch).requires_grad

    def test_the_target_network_is_a_copy_that_answers_for_itself(self, ppo_config, learner, episodes):
        config = configured(TextAPPOConfig())
        spec = config.get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        module = spec.build()
        module.make_target_networks()
        batch = batch_of(learner, episodes)
        ((model, target),) = module.get_target_network_pairs()
        assert model is module.model and target is module.target_model
        before = module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS]
        torch.testing.assert_close(before, module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].detach())
        with torch.no_grad():
            for parameter in module.model.parameters():
                parameter.mul_(1.1)
        torch.testing.assert_close(module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS], before)
        assert not before.requires_grad


class TestLoss:
    def test_ppos_loss_takes_the_ratio_of_whole_turns(self, learner, ppo_config, episodes):
        """RLlib's own loss on our columns, against its formula written out turn by turn."""
        batch, module = batch_of(learner, episodes), module_of(learner)
        out = module.forward_train(batch)
        loss = learner.compute_loss_for_module(module_id=DEFAULT_MODULE_ID, config=ppo_config, batch=batch, fwd_out=out).item()
        turns, terms = [g for e in episodes for g in e.get_extra_model_outputs(GENERATION)], []
        for g, row in zip(turns, batch[Columns.LOSS_MASK].nonzero()[:, 0], strict=True):
            logprobs, value = run(module, g.prompt_ids, g.token_ids)
            now = logprobs[range(len(g.token_ids)), g.token_ids].detach().numpy()
            ratio, advantage = math.exp(now.sum() - g.logprobs.sum()), batch[Postprocessing.ADVANTAGES][row].item()
            surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            error = min((value - batch[Postprocessing.VALUE_TARGETS][row].item()) ** 2, 2.0)
            entropy = torch.distributions.Categorical(logits=logprobs).entropy().sum().item()
            difference = now - g.logprobs
            kl = (np.exp(difference) - 1 - difference).sum()
            terms.append(-surrogate + 0.5 * error - 0.03 * entropy + 0.4 * kl)
        assert loss == pytest.approx(np.mean(terms), rel=1e-3)

    def test_settings_reach_the_module(self, ppo_config):
        assert ppo_config.model_settings["temperature"] == TEMPERATURE
