"""The theory of NLAC as tests: known numbers, reached by the package's own backup, critique, refine, replay and target code.

The world is the corridor of ``corridor.py`` behind an exact scripted language model. Each ``check_...`` is one statement of
the theory; ``WRONG_VERSIONS`` lists for each the plausible wrong implementations, and
``test_the_check_fails_on_the_wrong_version`` puts every one of them into the package and sees the check fail.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from corridor import (
    ACTIONS,
    DYNAMICS,
    ENDS,
    GAMMA,
    OPTIMAL,
    PAIRS,
    PROMPTS,
    ROOMS,
    UNIFORM,
    Corridor,
    ExactModel,
    Successor,
    engine_for,
    largest_difference,
    q,
    read,
    solve,
    step,
    write,
)
from scipy import stats
from scripted_engine import last_message

from rllib_nlac import NLACConfig
from rllib_nlac.ablations import Permuted
from rllib_nlac.engine.chat import Chat
from rllib_nlac.language import backup, critique, reasoning, refine, stages
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import Variant
from rllib_nlac.learner import learner as learner_module
from rllib_nlac.learner.batch import CRITIC, TrainingSequence, to_multi_agent_batch
from rllib_nlac.learner.target import TargetWeights
from rllib_nlac.replay.buffer import TextReplayBuffer
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Message, Request, Transition, Weights

SETTINGS = StageSettings(*[Sampling(1)] * 5, train_on_yes="always")
# From the design's theory section, computed there with plain arrays.
Q_UNIFORM = {
    ("A", "right"): 0.320221,
    ("A", "left"): 0.261999,
    ("B", "right"): 0.283950,
    ("B", "left"): 0.506719,
    ("C", "right"): 1.0,
    ("C", "left"): 0.261999,
}
Q_OPTIMAL = {
    ("A", "right"): 0.6827,
    ("A", "left"): 0.6145,
    ("B", "left"): 0.8429,
    ("B", "right"): 0.45,
    ("C", "right"): 1.0,
    ("C", "left"): 0.6145,
}
ZERO: Successor = {pair: {} for pair in PAIRS}


class World:
    """The corridor behind the package's stages.

    Args:
        tokenizer: Tokenizer of the small model; any that keeps text will do.
        runner: Makes an EnvRunner on the corridor.
        learner: Makes a learner on the small model.
        engine: Real vLLM.
    """

    def __init__(self, tokenizer, runner: Callable, learner: Callable, engine) -> None:
        self.chat = Chat(tokenizer, max_context=1_000_000)
        self.runner, self.learner, self.engine = runner, learner, engine
        self.data: TextReplayBuffer | None = None
        self.stored_actions: dict[int, str | None] = {}

    def stages(self, successor: Successor, next_action: Callable[[str], str] = lambda room: "right", **settings):
        engine = engine_for(self.chat, ExactModel(successor, next_action))
        return engine, LanguageStages(engine, self.chat, lambda env: PROMPTS, dataclasses.replace(SETTINGS, **settings))

    def sweep(self, successor: Successor, policy) -> Successor:
        """The Bellman operator on the whole of ψ: every outcome and every a', each by the package's backup."""
        items: list[tuple[tuple[str, str], float, Transition]] = []
        planned: list[str] = []
        for room, action in PAIRS:
            for outcome, chance in DYNAMICS[room, action].items():
                for following, probability in policy.get(outcome, {None: 1.0}).items():
                    items.append(((room, action), chance * probability, step(room, action, outcome, id=len(items))))
                    planned += [following] if following else []
        remaining = iter(planned)
        _, language = self.stages(successor, lambda room: next(remaining))
        targets, _, _ = language.run([t for _, _, t in items])
        swept: dict[tuple[str, str], Counter] = {pair: Counter() for pair in PAIRS}
        for (pair, weight, _), target in zip(items, targets, strict=True):
            assert target.future is not None
            for name, value in read(target.future.text).items():
                swept[pair][name] += weight * value
        return {pair: dict(features) for pair, features in swept.items()}


@pytest.fixture(scope="module")
def world(chat, session_engine) -> World:
    def runner(answer) -> TextEnvRunner:
        config = NLACConfig().environment("Corridor").debugging(seed=0).language(prompts=dataclasses.asdict(PROMPTS))
        config.num_envs_per_env_runner = 16
        runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: Corridor())
        runner.chat = Chat(chat.tokenizer, max_context=1_000_000)
        runner.attach(engine_for(runner.chat, answer))
        return runner

    def learner(**settings):
        from rllib_nlac.envs.spaces import TextSpace

        config = NLACConfig().environment("TwentyQuestions").language(prompts="compact").training(lr=1e-3)
        for key, value in settings.items():
            setattr(config, key, value)
        spec = config.get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        learner = learner_module.LanguageLearner(config=config, module_spec=spec)
        learner.build()
        return learner

    return World(chat.tokenizer, runner, learner, session_engine)


# The statements.


def check_fixed_point(world: World) -> None:
    """Evaluation converges to the successor features of the policy, geometrically: the reference values, 64 sweeps to 1e-9."""
    exact, successor, errors = solve(UNIFORM), ZERO, []
    for pair, value in Q_UNIFORM.items():
        assert exact[pair]["WIN"] == pytest.approx(value, abs=1e-6)
    for _ in range(64):
        successor = world.sweep(successor, UNIFORM)
        errors.append(largest_difference(successor, exact))
    assert errors[-1] < 1e-9
    ratios = np.array(errors[1:]) / np.array(errors[:-1])
    assert ratios.max() <= GAMMA + 1e-9  # a contraction in the sup norm, by γ at worst
    assert np.mean(ratios[20:40]) == pytest.approx(0.71, abs=0.01)
    known = {"A": 1.3761, "B": 0.5573, "C": 1.1260, "WIN": 0.5067, "LOSE": 0.1873}
    assert successor["B", "left"] == pytest.approx(known, abs=1e-4)


def check_order_of_critiques(world: World) -> None:
    """In every state the critiques' values are in the order of Q, and equal to it: g is monotone."""
    exact = solve(UNIFORM)
    _, language = world.stages(exact)
    _, refinements, _ = language.run([step(room, action, next(iter(DYNAMICS[room, action]))) for room, action in PAIRS])
    values = {pair: float(r.critique.reason.removeprefix("value ")) for pair, r in zip(PAIRS, refinements, strict=True)}
    for room in ROOMS:
        by_critique = sorted(ACTIONS, key=lambda action: values[room, action])
        assert by_critique == sorted(ACTIONS, key=lambda action: Q_UNIFORM[room, action])
    assert values == pytest.approx(Q_UNIFORM, abs=1e-6)


def check_policy_improvement(world: World) -> None:
    """One refinement from any action reaches the greedy policy, which is optimal, and a second one changes nothing."""
    policy = improved(world, solve(UNIFORM))
    assert policy == {room: next(iter(OPTIMAL[room])) for room in ROOMS}
    successor = ZERO
    for _ in range(64):
        successor = world.sweep(successor, {room: {action: 1.0} for room, action in policy.items()})
    assert {pair: successor[pair]["WIN"] for pair in PAIRS} == pytest.approx(Q_OPTIMAL, abs=1e-4)
    assert improved(world, successor) == policy


def improved(world: World, successor: Successor) -> dict[str, str]:
    """The policy that is trained after one round of refinement of every action; refinement never lowers Q."""
    _, language = world.stages(successor)
    _, refinements, _ = language.run([step(room, action, next(iter(DYNAMICS[room, action]))) for room, action in PAIRS])
    learned: dict[str, set[str]] = {room: set() for room in ROOMS}
    for (room, action), refinement in zip(PAIRS, refinements, strict=True):
        assert refinement.generation is not None and refinement.action is not None
        learned[room].add(refinement.action)
        assert q(write(successor[room, refinement.action])) >= q(write(successor[room, action]))
    assert all(len(actions) == 1 for actions in learned.values())
    return {room: actions.pop() for room, actions in learned.items()}


def behaviour_data(world: World, n_step: int) -> list[Transition]:
    """Uniformly random play by the real EnvRunner, and draws from the real replay buffer."""
    if world.data is None:
        rng = np.random.default_rng(0)
        runner = world.runner(lambda prompt, weights: str(rng.choice(ACTIONS)))
        world.data = TextReplayBuffer(env="Corridor", alpha=0.0, seed=0)
        world.data.add(runner.sample(num_episodes=4000))
    return world.data.sample_transitions(30_000, beta=0.0, n_step=n_step).transitions


def check_off_policy(world: World) -> None:
    """TD on uniformly random data, with a' of the target policy, is within 0.01 of Q* where the data's own Q is 0.36 off.

    Beside that it is exactly the solution of the world that the data show, whatever the luck of the draw.
    """
    # What differs in a drawn transition is the room, the action, the outcome and the stored action after it.
    groups: dict[tuple, list[Transition]] = {}
    for t in behaviour_data(world, n_step=2):
        stored = t.following[0].action if t.following else None
        groups.setdefault((t.state[-1].content, t.action, t.observation, stored), []).append(t)
    items = [dataclasses.replace(members[0], id=i, following=()) for i, members in enumerate(groups.values())]
    world.stored_actions = {i: stored for i, (_, _, _, stored) in enumerate(groups)}
    totals: Counter = Counter()
    for (room, action, _, _), members in groups.items():
        totals[room, action] += len(members)
    seen: dict[tuple[str, str], Counter] = {pair: Counter() for pair in PAIRS}
    for (room, action, outcome, _), members in groups.items():
        seen[room, action][outcome] += len(members) / totals[room, action]
    successor = ZERO
    for _ in range(60):
        _, language = world.stages(successor, next_action=lambda room: next(iter(OPTIMAL[room])))
        targets, _, _ = language.run(items)
        learned: dict[tuple[str, str], Counter] = {pair: Counter() for pair in PAIRS}
        for ((room, action, _, _), members), target in zip(groups.items(), targets, strict=True):
            for name, value in read(target.future.text).items():
                learned[room, action][name] += value * len(members) / totals[room, action]
        before, successor = successor, {pair: dict(features) for pair, features in learned.items()}
        if largest_difference(before, successor) < 1e-6:
            break
    assert largest_difference(successor, solve(OPTIMAL, seen)) < 1e-4
    assert {pair: successor[pair]["WIN"] for pair in PAIRS} == pytest.approx(Q_OPTIMAL, abs=0.01)


def check_monte_carlo(world: World) -> None:
    """With n steps as long as episodes the target is the data's own return: 0.36 below Q* in the first room."""
    drawn = behaviour_data(world, n_step=1000)
    first = list({t.id: t for t in drawn if (t.state[-1].content, t.action) == ("A", "right")}.values())[:1500]
    _, language = world.stages(ZERO, next_action=lambda room: next(iter(OPTIMAL[room])))
    targets, _, _ = language.run(first)
    value = np.mean([read(target.future.text)["WIN"] for target in targets])
    assert value == pytest.approx(Q_UNIFORM["A", "right"], abs=0.03)
    assert Q_OPTIMAL["A", "right"] - value == pytest.approx(0.36, abs=0.04)
    for t, target in list(zip(first, targets, strict=True))[:50]:  # and each is exactly its own episode's discounted return
        won = [i for i, s in enumerate((t, *t.following)) if s.observation == "WIN"]
        assert read(target.future.text)["WIN"] == pytest.approx(GAMMA ** won[0] if won else 0.0)


def check_ends(world: World) -> None:
    """Nothing is bootstrapped across an end, be it the task's or the turn limit's: y holds the last room and nothing else."""
    hopeful = {**solve(OPTIMAL), **{(end, action): {"WIN": 1.0} for end in ENDS for action in ACTIONS}}
    cut_off = dataclasses.replace(step("A", "left", "A", id=1), truncated=True)
    _, language = world.stages(hopeful)
    targets, _, _ = language.run([step("A", "right", "LOSE", id=0), cut_off, step("C", "right", "WIN", id=2)])
    rooms = [{name: value for name, value in read(t.future.text).items() if value} for t in targets]
    assert rooms == [{"LOSE": 1.0}, {"A": 1.0}, {"WIN": 1.0}]


def check_both_branches_survive(world: World) -> None:
    """A future that comes true half of the time keeps both branches when a real model is trained on it, as vLLM samples it."""
    chat = Chat(world.chat.tokenizer, 512)
    prompt = chat.prompt_ids(PROMPTS_TINY)
    branches = [
        chat.encode(f"Future: {text}") for text in ("Yes. one left, then won. SUCCESS", "No. many left, then few left. FAILURE")
    ]
    learner = world.learner(lr=2e-3)
    for number in range(60):
        sequences = [TrainingSequence(prompt, y, CRITIC, i, 0, 0.5) for i, y in enumerate(branches)]
        learner.update(batch=to_multi_agent_batch(sequences, 2), timesteps={"num_env_steps_sampled_lifetime": number})
    logprobs = [float(values.sum()) for values in learner.logprobs_of([prompt] * 2, branches)]
    assert min(np.exp(logprobs)) > 0.35
    world.engine.set_weights(Weights.POLICY, 1000, learner.export_weights()[Weights.POLICY])
    requests = [Request(prompt, 24, temperature=1.0, seed=seed) for seed in range(200)]
    sampled = Counter(generation.token_ids for generation in world.engine.generate(requests))
    assert all(60 <= sampled[y] <= 140 for y in branches)


PROMPTS_TINY = PromptSet(
    name="tiny",
    version=1,
    system="",
    predict="Predict.",
    backup="{next_future}{observation}{reward}",
    backup_end="{observation}{reward}",
    evaluate="{futures}",
    refine="{critique}",
).predict_messages((Message("user", "Guess my object."),), "Is it big?")


def check_target(world: World) -> None:
    """τ = 0 freezes the target weights and τ = 1 copies the policy's, through the learner's own gradient steps."""
    chat = Chat(world.chat.tokenizer, 512)
    batch = to_multi_agent_batch(
        [TrainingSequence(chat.prompt_ids(PROMPTS_TINY), chat.encode("Future: SUCCESS"), CRITIC, 0, 0, 1.0)], 1
    )
    for tau, like in ((0.0, "before"), (1.0, "after")):
        learner = world.learner(tau=tau)
        before = copy.deepcopy(learner.export_weights()[Weights.POLICY])
        learner.update(batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0})
        after = learner.export_weights()
        assert any(not torch.equal(before[name], after[Weights.POLICY][name]) for name in before)
        expected = before if like == "before" else after[Weights.POLICY]
        assert all(torch.equal(expected[name], after[Weights.TARGET][name]) for name in before)


def check_proportional_sampling(world: World) -> None:
    """P(i) = p_i^α / Σ p^α, by a chi-square test over 40,000 draws."""
    rng = np.random.default_rng(1)
    runner = world.runner(lambda prompt, weights: str(rng.choice(ACTIONS)))
    buffer = TextReplayBuffer(env="Corridor", alpha=0.6, seed=0)
    buffer.add(runner.sample(num_episodes=12))
    known = {node: i for i, node in enumerate(sorted(set(buffer.sample_transitions(20_000, beta=0.0).nodes)))}
    p = np.linspace(0.1, 5.0, len(known))
    buffer.update_priorities_of(list(known), p)
    drawn = Counter(buffer.sample_transitions(40_000, beta=0.0).nodes)
    expected = p**0.6 / (p**0.6).sum() * 40_000
    assert stats.chisquare([drawn[node] for node in known], expected).pvalue > 1e-3


def check_k_futures(world: World) -> None:
    """k futures are drawn, and all of them are in the evaluator's prompt."""
    futures = iter([{"WIN": value} for value in (0.1, 0.2, 0.6)])
    engine, language = world.stages(ZERO, num_futures=3)
    exact = engine.answer
    engine.answer = lambda prompt, w: (
        f"Future: {write(next(futures))}" if last_message(prompt) == "PREDICT" else exact(prompt, w)
    )
    _, (refinement,), _ = language.run([step("C", "right", "WIN")])
    assert [q(future.text) for future in refinement.futures] == [0.1, 0.2, 0.6]
    assert float(refinement.critique.reason.removeprefix("value ")) == pytest.approx(0.3)


def played(world: World, t: Transition) -> Transition:
    """A transition with the ids that an engine would have seen and sampled, on which further rounds rest."""
    ids = (*world.chat.encode(t.action), world.chat.end_id)
    return dataclasses.replace(
        t, generation=dataclasses.replace(t.generation, prompt_ids=world.chat.prompt_ids(t.state), token_ids=ids)
    )


def check_m_rounds(world: World) -> None:
    """Each further round judges what the round before it proposed."""
    engine, language = world.stages(solve(UNIFORM), num_refinements=3)
    verdicts = iter(
        ["Optimal: No\nReason: r\nFix: right", "Optimal: No\nReason: r\nFix: left", "Optimal: No\nReason: r\nFix: right"]
    )
    judged: list[str] = []
    exact = engine.answer

    def answer(prompt: str, weights: Weights) -> str:
        if last_message(prompt).startswith("EVALUATE"):
            judged.append(prompt.split("<|assistant|>")[-2].split("<|end|>")[0])
            return next(verdicts)
        return exact(prompt, weights)

    engine.answer = answer
    _, (refinement,), _ = language.run([played(world, step("B", "left", "C"))])
    assert judged == ["left", "right", "left"] and refinement.action == "right"


def check_no_leak(world: World) -> None:
    """No span of 8 tokens of the withheld observation is left in the reasoning that a target is trained with."""
    observation = "the parcel left the warehouse on monday morning and will arrive two days later"
    t = dataclasses.replace(step("A", "left", "WIN"), observation=observation)
    thinking = f"<think>\nSince {observation}, the user is content.\n</think>\n\nFuture: the user is content. SUCCESS"
    for rewritten, kept in (("Maybe a good reply, maybe a bad one.", True), (f"Perhaps {observation}.", False)):
        replies = {"END": thinking, "Somebody": f"<think>hm</think>{rewritten}"}
        engine, language = world.stages(solve(UNIFORM), future=Sampling(99), reasoning=Sampling(1))
        exact = engine.answer
        engine.answer = lambda prompt, w, r=replies, e=exact: (
            next((a for word, a in r.items() if word in last_message(prompt)), None) or e(prompt, w)
        )
        (target,), _, report = language.run([t])
        trained = world.chat.decode(target.generation.token_ids)
        ids = world.chat.tokenizer.encode(observation)
        spans = [world.chat.tokenizer.decode(ids[i : i + 8]).strip() for i in range(len(ids) - 7)]
        assert not any(span in trained for span in spans)
        assert trained.endswith("</think>\n\nFuture: the user is content. SUCCESS") and trained.startswith("<think>")
        assert (rewritten in trained) is kept
        assert report.counts["reasoning_rewritten"] == kept and report.counts["reasoning_emptied"] == (not kept)


# The wrong versions.


def bootstraps_across_ends(patch) -> None:
    patch.setattr(Transition, "ended", property(lambda t: False))


def takes_the_turn_limit_for_a_state(patch) -> None:
    patch.setattr(Transition, "ended", property(lambda t: t.terminated))


def predicts_again_from_the_same_state(patch) -> None:
    patch.setattr(backup, "next_future_prompt", lambda p, t, a: None if t.ended else p.predict_messages(t.state, t.action))


def forgets_what_came_next(patch) -> None:
    right = backup.target_prompt
    patch.setattr(
        backup,
        "target_prompt",
        lambda p, t, d: right(p, t if t.ended else dataclasses.replace(t, observation=t.state[-1].content), d),
    )


def permutes_the_futures(patch) -> None:
    patch.setattr(Variant, "shown", Permuted.shown)


def refines_what_was_accepted(patch) -> None:
    patch.setattr(
        refine,
        "refine_prompt",
        lambda p, s, a, c: p.refine_messages(s, a, f"{c.text}\nFix: {a}") if c and c.optimal else None,
    )


def trains_on_the_stored_action(patch) -> None:
    right = refine.decide
    patch.setattr(
        refine,
        "decide",
        lambda attempt, *rest: dataclasses.replace(right(attempt, *rest), action=attempt.transition.action),
    )


def follows_the_behaviour_policy(patch, world: World) -> None:
    """a' is what the episode's own next step did."""
    patch.setattr(
        backup,
        "next_future_prompt",
        lambda p, t, a: None if t.ended else p.predict_messages(t.next_state, world.stored_actions[t.id]),
    )


def bootstraps_after_one_step(patch) -> None:
    right = stages.backup_stage
    patch.setattr(
        stages,
        "backup_stage",
        lambda ts, *rest: right([dataclasses.replace(t, following=()) for t in ts], *rest),
    )


def seeks_one_mode(patch) -> None:
    """The other order of the KL's arguments: what is likely already gets likelier."""

    def loss(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        likelihood = (logprobs * mask).sum(-1).detach()
        return -(logprobs * mask).sum(-1) / mask.sum(-1) * torch.softmax(4 * likelihood, 0) * len(likelihood)

    patch.setattr(learner_module, "successor_loss", loss)


def averages_the_wrong_way(patch) -> None:
    def update(self: TargetWeights, parts: Iterable[dict[str, torch.Tensor]]) -> None:
        for part in parts:
            for name, tensor in part.items():
                self.state[name].lerp_(tensor.detach().to(torch.float32), 1 - self.tau)

    patch.setattr(TargetWeights, "update", update)


def ignores_alpha(patch) -> None:
    right = TextReplayBuffer.__init__
    patch.setattr(TextReplayBuffer, "__init__", lambda self, **k: right(self, **{**k, "alpha": 1.0}))


def samples_uniformly(patch) -> None:
    right = TextReplayBuffer.__init__
    patch.setattr(TextReplayBuffer, "__init__", lambda self, **k: right(self, **{**k, "alpha": 0.0}))


def shows_one_future_only(patch) -> None:
    right = PromptSet.evaluate_messages
    patch.setattr(PromptSet, "evaluate_messages", lambda self, s, a, futures: right(self, s, a, futures[:1]))


def judges_the_first_action_again(patch) -> None:
    right = critique.evaluate_prompt
    patch.setattr(critique, "evaluate_prompt", lambda p, s, a, d: right(p, s, "left", d))


def stops_after_one_round(patch) -> None:
    right = stages.improvement_stage
    patch.setattr(
        stages,
        "improvement_stage",
        lambda ts, p, settings, *rest: right(ts, p, dataclasses.replace(settings, num_refinements=1), *rest),
    )


def trusts_every_rewriting(patch) -> None:
    patch.setattr(reasoning, "leaks", lambda text, withheld, chat: False)


def trains_on_hindsight(patch) -> None:
    patch.setattr(reasoning, "target_thought", lambda *arguments: None)


WRONG_VERSIONS: dict[Callable, list[Callable]] = {
    check_fixed_point: [bootstraps_across_ends, predicts_again_from_the_same_state, forgets_what_came_next],
    check_order_of_critiques: [permutes_the_futures],
    check_policy_improvement: [refines_what_was_accepted, trains_on_the_stored_action],
    check_off_policy: [follows_the_behaviour_policy],
    check_monte_carlo: [bootstraps_after_one_step],
    check_ends: [bootstraps_across_ends, takes_the_turn_limit_for_a_state],
    check_both_branches_survive: [seeks_one_mode],
    check_target: [averages_the_wrong_way],
    check_proportional_sampling: [ignores_alpha, samples_uniformly],
    check_k_futures: [shows_one_future_only],
    check_m_rounds: [judges_the_first_action_again, stops_after_one_round],
    check_no_leak: [trusts_every_rewriting, trains_on_hindsight],
}


@pytest.mark.parametrize("check", WRONG_VERSIONS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_theory(world, check):
    """Each statement holds; what each would catch is the next test's."""
    check(world)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [(check, wrong) for check, versions in WRONG_VERSIONS.items() for wrong in versions],
    ids=lambda function: function.__name__.removeprefix("check_"),
)
def test_the_check_fails_on_the_wrong_version(world, monkeypatch, check, wrong):
    """Every check above fails where the package does the plausible wrong thing instead."""
    wrong(monkeypatch, world) if wrong is follows_the_behaviour_policy else wrong(monkeypatch)
    with pytest.raises(AssertionError):
        check(world)
