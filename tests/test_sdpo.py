"""SDPO: its gradient in closed form, who teaches, what the teacher sees, and what the policy is trained on."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from micro import GRADIENT, VOCABULARY, build_learner, gradient_of, played, save_micro_model, update
from scripted_engine import last_message

from rllib_nlac.baselines.sdpo import SDPO, SDPOConfig, feedback
from rllib_nlac.engine.chat import Prompt, PromptTooLong
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.learner.batch import POLICY, TrainingSequence
from rllib_nlac.learner.losses import sampled_kl_loss
from rllib_nlac.replay.buffer import transition_at

TEMPERATURE = 0.5


class TestLoss:
    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        policy = torch.randn(6, generator=generator, requires_grad=True)
        return policy, torch.randn(6, generator=generator).log_softmax(-1)

    def expected(self, policy: torch.Tensor, loss_of_tokens: torch.Tensor) -> torch.Tensor:
        """Gradient of the loss of each token there is, weighed by how often the policy samples it."""
        return torch.autograd.grad((policy.softmax(-1).detach() * loss_of_tokens).sum(), policy)[0]

    def test_its_gradient_over_the_policys_own_samples_is_that_of_the_kl(self):
        """Fails with the sign turned, with the KL's arguments exchanged, and with a gradient into the advantage alone."""
        policy, teacher = self.logits()
        own = policy.log_softmax(-1)
        loss = sampled_kl_loss(own[:, None], teacher[:, None], torch.ones(6, 1))  # one answer of each of the six tokens
        exact = (own.exp() * (own - teacher)).sum()
        torch.testing.assert_close((own.exp() * loss).sum(), exact)
        gradient = torch.autograd.grad(exact, policy, retain_graph=True)[0]
        assert gradient.abs().max() > 0.05
        torch.testing.assert_close(self.expected(policy, loss), gradient)

    def test_it_is_the_mean_over_an_answers_own_tokens_and_moves_by_their_advantages(self):
        """By hand: δ = log π - log q is 1, -0.5 and, behind the answer, whatever."""
        logprobs = torch.tensor([[-1.0, -2.0, -9.0]], requires_grad=True)
        loss = sampled_kl_loss(logprobs, torch.tensor([[-2.0, -1.5, -1.0]]), torch.tensor([[True, True, False]]))
        assert loss.item() == pytest.approx((1.0 - 0.5) / 2)
        loss.sum().backward()
        # Down where the teacher likes the token less, up where more.
        assert logprobs.grad.tolist() == [[0.5, -0.25, 0.0]]

    def test_a_teacher_that_agrees_moves_nothing(self):
        logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        sampled_kl_loss(logprobs, logprobs.detach(), torch.ones(1, 2)).sum().backward()
        assert logprobs.grad.tolist() == [[0.0, 0.0]]


@pytest.fixture(scope="module")
def micro_model(tmp_path_factory) -> str:
    return save_micro_model(tmp_path_factory.mktemp("micro"))


@pytest.fixture()
def learner_of(micro_model):
    def learner_of(**changes):
        return build_learner(SDPOConfig(), language_model=micro_model, action_temperature=TEMPERATURE, **changes)

    return learner_of


def sequences(count: int = 6) -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt, answer = (tuple(rng.integers(2, VOCABULARY, rng.integers(1, 8)).tolist()) for _ in range(2))
        teacher = rng.normal(-3.0, 1.0, len(answer)).astype(np.float32)
        made.append(TrainingSequence(prompt, answer, POLICY, i, 0, float(rng.uniform(0.005, 0.02)), logprobs=teacher))
    return made


def logprobs_of(learner, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of one text, at the temperature that it was sampled at; no padding."""
    logits = learner.lm(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)[range(len(answer)), answer]


class TestLearner:
    @pytest.mark.parametrize("budget", [1, 8192])
    def test_a_step_follows_the_gradient_of_plain_torch(self, learner_of, budget):
        learner, made = learner_of(max_tokens_per_micro_batch=budget, **GRADIENT), sequences()
        losses = []
        for s in made:
            own = logprobs_of(learner, s.prompt_ids, s.answer_ids)
            delta = own.detach() - torch.from_numpy(s.logprobs)
            losses.append(s.weight * (delta * own).mean())
        parameters = list(learner.trained.parameters())
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(torch.stack(losses).sum(), parameters)])
        assert float(expected.norm()) > 0.1
        assert float((gradient_of(learner, made) - expected).norm() / expected.norm()) < 2e-3

    def test_the_teacher_has_the_averaged_weights_and_the_policys_temperature(self, learner_of):
        """Fails where the teacher is the policy of today, or is asked at temperature 1."""
        learner, made = learner_of(tau=0.0, lr=0.05), sequences()
        prompts, answers = [s.prompt_ids for s in made], [s.answer_ids for s in made]
        with torch.no_grad():
            before = [logprobs_of(learner, p, a).numpy() for p, a in zip(prompts, answers, strict=True)]
        update(learner, made)
        for own, first, s in zip(learner.teacher_logprobs(prompts, answers), before, made, strict=True):
            np.testing.assert_allclose(own, first, rtol=1e-4, atol=1e-4)
            today = logprobs_of(learner, s.prompt_ids, s.answer_ids).detach().numpy()
            assert np.abs(own - today).max() > 1e-2

    def test_in_bfloat16_the_teacher_answers_too(self, learner_of):
        learner = learner_of(learner_model={"dtype": "bfloat16"})
        (own,) = learner.teacher_logprobs([(3, 4)], [(5, 6, 7)])
        assert own.dtype == np.float32 and own.shape == (3,)
        np.testing.assert_allclose(own, learner.logprobs_of([(3, 4)], [(5, 6, 7)], TEMPERATURE)[0], atol=0.05)


class TestFeedback:
    def turn(self, success: bool):
        return transition_at("E", played([0.0, float(success)], success=success), 0, n_step=2)

    def test_says_what_came_and_names_what_a_sibling_did(self):
        assert feedback(self.turn(True), None) == "Optimal: Yes\nReason: reply 0 reply 1 SUCCESS"
        assert feedback(self.turn(False), None) == "Optimal: No\nReason: reply 0 reply 1 FAILURE"
        assert feedback(self.turn(False), "Go left.") == "Optimal: No\nReason: reply 0 reply 1 FAILURE\nFix: Go left."


class TestSequences:
    """With a chat and a teacher of ours in the place of tokens and weights."""

    def algorithm(self, room: int = 10_000):
        asked: list[tuple] = []

        class Learner:
            def teacher_logprobs(self, prompts, answers):
                asked.append((prompts, answers))
                return [np.full(len(answer), -0.1 * (1 + place), np.float32) for place, answer in enumerate(answers)]

        def prompts(wanted):
            seen.extend(wanted)
            return [Prompt((9, len(w.messages))) if len(w.messages) <= room else PromptTooLong() for w in wanted]

        seen: list = []
        logged: dict = {}
        metrics = SimpleNamespace(log_value=lambda name, value, **_: logged.__setitem__(name, value))
        a = SDPO.__new__(SDPO)
        a.config = SimpleNamespace(env="TwentyQuestions", minibatch_size=100, num_epochs=1)
        a.metrics, a.rng, a.chat = metrics, np.random.default_rng(0), SimpleNamespace(prompts=prompts)
        a.prompts_for = functools.cache(lambda env: load_prompts("compact", env))
        a.learner_group = SimpleNamespace(is_local=True, _learner=Learner())
        a._with_learners = lambda work: work()
        return a, asked, seen, logged

    def episodes(self):
        return [
            played([0.0, 0.0, 0.0], task=5, success=False, name="lost"),
            played([0.0, 1.0], task=5, lengths=[1, 3], success=True, name="won"),
            played([0.0], task=6, success=False, name="alone"),
        ]

    def test_the_teacher_judges_the_turns_that_were_said_with_room_for_each(self):
        """Fails where a turn without a token counts, so that the teacher reads another turn than it judges."""
        a, _, seen, _ = self.algorithm()
        SDPO.training_sequences(a, [played([0.0, 0.0, 1.0], lengths=[0, 3, 2], success=True)])
        assert [(wanted.messages[-2].content, wanted.room) for wanted in seen] == [("turn 1", 3), ("turn 2", 2)]

    def test_the_teacher_reads_what_the_policy_did_not_know_and_no_other_tasks_success(self):
        """Fails where the teacher has no feedback, where a lost game's end is told as won, and where any success will do."""
        a, asked, seen, logged = self.algorithm()
        episodes = self.episodes()
        made = SDPO.training_sequences(a, episodes)
        told = [w.messages[-1].content for w in seen]
        assert told == [
            "Refine.\nOptimal: No\nReason: reply 0 reply 1 reply 2 FAILURE\nFix: turn 0",
            "Refine.\nOptimal: No\nReason: reply 1 reply 2 FAILURE\nFix: turn 1",
            "Refine.\nOptimal: No\nReason: reply 2 FAILURE\nFix: turn 1",  # the sibling was shorter: its last
            "Refine.\nOptimal: Yes\nReason: reply 0 reply 1 SUCCESS",
            "Refine.\nOptimal: Yes\nReason: reply 1 SUCCESS",
            "Refine.\nOptimal: No\nReason: reply 0 FAILURE",
        ]
        assert [w.messages[-2].content for w in seen] == ["turn 0", "turn 1", "turn 2", "turn 0", "turn 1", "turn 0"]
        ((prompts, answers),) = asked
        assert all(ids[0] == 9 for ids in prompts) and [len(ids) for ids in answers] == [2, 2, 2, 1, 3, 2]
        # The policy itself is trained under the prompts that it played under, by the teacher's words on its own tokens.
        by_item = {s.item: s for s in made}
        for place, s in by_item.items():
            assert s.prompt_ids[:3] == (2, 3, 4) and s.answer_ids == answers[place]
            np.testing.assert_allclose(s.logprobs, -0.1 * (1 + place))
        weights = [by_item[i].weight for i in range(6)]
        assert weights == pytest.approx([w / 3 for w in (1 / 3, 1 / 3, 1 / 3, 1 / 4, 3 / 4, 1)])
        assert logged["demonstrated_rate"] == 0.5 and logged["taught_rate"] == 1.0
        played_ = np.concatenate([g for e in episodes for g in (x.logprobs for x in e.get_extra_model_outputs("generation"))])
        teacher = np.concatenate([np.full(len(ids), -0.1 * (1 + i)) for i, ids in enumerate(answers)])
        assert logged["kl_to_teacher"] == pytest.approx(float(np.mean(played_ - teacher)), rel=1e-5)

    def test_each_success_of_the_task_may_be_the_one_that_is_shown(self):
        a, *_ = self.algorithm()
        won = [played([1.0], task=5, success=True, name=name) for name in "abc"]
        lost = [played([0.0], task=5, success=False, name=f"lost {i}") for i in range(50)]
        found = a.siblings([*won, *lost])
        assert found[:3] == [None] * 3 and {e.id_ for e in found[3:]} == {"a", "b", "c"}

    def test_a_teachers_prompt_beyond_the_context_leaves_its_turn_out(self):
        a, asked, _, logged = self.algorithm(room=3)
        made = SDPO.training_sequences(a, self.episodes())
        assert len(made) == len(asked[0][0]) == 3 and logged["taught_rate"] == 0.5
        assert [len(s.answer_ids) for s in sorted(made, key=lambda s: s.item)] == [2, 1, 2]
        a, asked, _, _ = self.algorithm(room=1)
        assert SDPO.training_sequences(a, self.episodes()) == [] and not asked


def test_settings():
    config = SDPOConfig().environment("TwentyQuestions").language(language_model="tiny")
    config.validate()
    assert (config.tau, config.episodes_per_task) == (0.05, 8)
    with pytest.raises(ValueError, match="tau is None and must be a number"):
        config.copy(copy_frozen=False).training(tau=None).validate()
    with pytest.raises(ValueError, match=r"action_top_p is 0\.9 and must be 1"):
        config.copy(copy_frozen=False).language(action_top_p=0.9).validate()
    with pytest.raises(ValueError, match=r"must have a zero_optimization\.stage below 3: the teacher needs whole parameters"):
        config.deepspeed(deepspeed_config={"zero_optimization": {"stage": 3}}).validate()


def test_the_teachers_prompt_is_the_policys_and_more(chat, compact):
    """In real tokens: the state as the engine saw it, the turn as it was sampled, and behind it the feedback."""
    turn = chat.encode("Is it big?")
    episode = played([0.0], success=False)
    t = transition_at("TwentyQuestions", episode, 0)
    prompt = chat.prompt_ids(t.state)
    t = replace(t, action="Is it big?", generation=replace(t.generation, prompt_ids=prompt, token_ids=turn))
    a = SDPO.__new__(SDPO)
    a.prompts_for = lambda env: compact
    (made,) = chat.prompts([a.privileged(t, "Is it alive?")])
    assert made.ids[: len(prompt) + len(turn)] == (*prompt, *turn) and not made.retokenised
    text = chat.tokenizer.decode(made.ids)
    assert last_message(text) == "Refine.\nOptimal: No\nReason: reply 0 FAILURE\nFix: Is it alive?"
