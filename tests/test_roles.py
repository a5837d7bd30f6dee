"""Which weights answer each role, and how it samples, in every configuration: read off the requests that an engine got.

The first table is also in ``docs/paper_and_code.md``; a test keeps the two the same.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scripted_engine import ScriptedEngine
from scripted_roles import FRESH, NO, REFINED, role_of, script, transition
from scripted_roles import thinking as answers

from rllib_nlac import NLAC, NLACConfig
from rllib_nlac.ablations import ABLATIONS, NOTHING_KNOWN, Constant, FreshActions, FrozenCritic, Permuted
from rllib_nlac.baselines.nlql import BestOfStages, NLQLConfig
from rllib_nlac.baselines.nlrl import NLRLConfig
from rllib_nlac.baselines.self_distillation import SelfDistillationConfig
from rllib_nlac.diagnostics.examination import Examiner
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.sampling.refining import RefiningPolicy
from rllib_nlac.types import Message, Request

ROLES = ("a'", "d'", "y", "d", "critique", "a_r", "rethink")


def tuned(name: str) -> dict:
    """What a tuned example says of the roles and of training."""
    folder = Path(__file__).parent.parent / "tuned_examples"
    (experiment,) = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8")).values()
    return {key: value for key, value in experiment["config"].items() if key != "env_config"}


# Every structural switch, so that each role is asked in each of the places where it may be.
CONFIGURATIONS: dict[str, dict] = {
    "defaults": {},
    'judge_weights: "policy"': {"judge_weights": "policy"},
    'judge_weights: "initial"': {"judge_weights": "initial"},
    "n_step: 3": {"n_step": 3},
    "num_next_actions: 3": {"num_next_actions": 3},
    "num_refinements: 3": {"num_refinements": 3},
    "num_refinements: 0": {"num_refinements": 0},
    "rejected_weight: 0": {"rejected_weight": 0.0},
    'critic_input: "backed_up"': {"critic_input": "backed_up", "rejected_weight": 0.0},
    "judged_fraction: 0.5": {"judged_fraction": 0.5},
    "tuned example twenty_questions_nlac": tuned("twenty_questions_nlac"),
    "tuned example text_house_nlac": tuned("text_house_nlac"),
    **{f"run: {name}": {"variant": ablation.variant} for name, ablation in ABLATIONS.items()},
}


def asked_by(engine: ScriptedEngine) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for weights, prompts in engine.calls:
        for prompt in prompts:
            found.setdefault(role_of(prompt), set()).add(str(weights))
    return found


def run(chat, compact, config, items=None, variant=NLAC_AS_IT_IS) -> ScriptedEngine:
    engine = ScriptedEngine(chat, answers)
    kind = BestOfStages if isinstance(config, NLQLConfig) else LanguageStages
    second = transition(2)
    items = items or [replace(transition(1), following=(second,)), replace(transition(3), state=(Message("user", "Go."),))]
    kind(engine, chat, lambda env: compact, config.stage_settings, variant=variant).run(items)
    return engine


@pytest.fixture(scope="module")
def table(chat, compact) -> dict[str, dict[str, set[str]]]:
    """Role by configuration: the weights that answered."""
    rows = {}
    for name, settings in CONFIGURATIONS.items():
        config = NLACConfig().roles(max_reasoning_tokens=64)
        variant = settings.get("variant", NLAC_AS_IT_IS)
        config.update_from_dict({key: value for key, value in settings.items() if key != "variant"})
        rows[name] = asked_by(run(chat, compact, config, variant=variant))
    rows["run: NLQL"] = asked_by(run(chat, compact, NLQLConfig().roles(max_reasoning_tokens=64)))
    prompt = (Message("user", "Guess my object."),)
    for name, variant in (("the defaults", NLAC_AS_IT_IS), ("run: NLAC_FrozenCritic", FrozenCritic.variant)):
        engine = ScriptedEngine(chat, lambda prompt, w: answers(prompt, w))
        settings = NLACConfig().roles(max_reasoning_tokens=64).stage_settings
        refining = RefiningPolicy(engine, chat, lambda env: compact, settings, variant)
        refining.submit([Request(chat.prompt_ids(prompt), 24, messages=prompt)])
        refining.poll()
        rows[f"`rllib evaluate --refined`, {name}"] = asked_by(engine)
    for name, variant in (("the defaults", NLAC_AS_IT_IS), ("run: NLAC_FrozenCritic", FrozenCritic.variant)):
        engine = ScriptedEngine(chat, answers)
        settings = NLACConfig().roles(max_reasoning_tokens=64).stage_settings
        examiner = Examiner(
            LanguageStages(engine, chat, lambda env: compact, settings, variant=variant), "TwentyQuestions", seed=0, futures=4
        )
        examiner.predict([transition(1)])
        examiner.refine([transition(1)])
        rows[f"`evaluation/critic`, {name}"] = asked_by(engine)
    return rows


def test_the_policys_next_action_and_the_targets_are_whose_they_should_be(table):
    for name, row in table.items():
        frozen = "Frozen" in name
        plays = row.get("a'", set())
        assert plays <= {"policy"}, name  # the policy of today, never the target's or the stored action
        next_futures = {"initial"} if frozen else {"target"}
        assert row.get("d'", next_futures) == next_futures, name
        predicts = "Hindsight" not in name
        assert row.get("d", set()) == ({"initial"} if frozen else {"policy"} if predicts else set()), name
        backup = "initial" if '"initial"' in name or "tuned" in name else "target"
        assert row.get("y", {backup}) == {backup}, name
        judge = name.partition("judge_weights: ")[2].strip('"') or ("initial" if "tuned" in name else "target")
        assert row["critique"] == {judge}, name
        assert row.get("a_r", {judge}) == {judge}, name
        assert row.get("rethink", {"target"}) == {"target"}, name


def test_every_role_is_asked_by_default(table):
    assert table["defaults"].keys() == set(ROLES)
    assert table["num_refinements: 0"].keys() == set(ROLES) - {"a_r"}
    assert table["`rllib evaluate --refined`, the defaults"].keys() == {"a'", "d", "critique", "a_r", "rethink"}
    assert table["`evaluation/critic`, the defaults"].keys() == {"d", "critique", "a_r"}  # what was played is judged
    assert table["run: NLAC_Hindsight"].keys() == {"critique", "a_r", "rethink"}
    assert table["run: NLQL"].keys() == set(ROLES) - {"a_r"}


def as_markdown(table: dict[str, dict[str, set[str]]]) -> str:
    lines = ["| configuration | " + " | ".join(ROLES) + " |", "|---" * (len(ROLES) + 1) + "|"]
    for name, row in table.items():
        cells = [" and ".join(sorted(row[role])) if role in row else "-" for role in ROLES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_documentations_table_is_this_one(table):
    page = Path(__file__).parent.parent / "docs" / "paper_and_code.md"
    assert as_markdown(table) in page.read_text(encoding="utf-8"), f"put this into {page.name}:\n{as_markdown(table)}"


def test_without_target_weights_nothing_is_backed_up():
    for kind in (NLACConfig, NLQLConfig, NLRLConfig, SelfDistillationConfig):
        with pytest.raises(ValueError, match="tau is None and must be a number"):
            kind().environment("TwentyQuestions").training(tau=None).validate()


@pytest.mark.parametrize(
    ("settings", "variant", "kept"),
    [({}, NLAC_AS_IT_IS, False), ({"judge_weights": "initial"}, NLAC_AS_IT_IS, True), ({}, FrozenCritic.variant, True)],
)
def test_who_asks_for_the_initial_weights_has_them_kept(monkeypatch, settings, variant, kept):
    pushed = []
    monkeypatch.setattr("rllib_nlac.algorithm.algorithm.push_initial_weights", lambda *arguments: pushed.append(arguments))
    algorithm = SimpleNamespace(
        config=NLACConfig().training(**settings),
        engine=None,
        chat=None,
        prompts_for=None,
        learner_group=None,
        _with_learners=lambda work: work(),
    )
    NLAC.make_stages(algorithm, variant=variant)
    assert bool(pushed) is kept


class TestSampling:
    SETTINGS = {
        "action_temperature": 0.11,
        "action_top_p": 0.9,
        "judge_temperatures": {"critique": 0.44, "refine": 0.55},
        "max_action_tokens": 31,
        "max_future_tokens": 42,
        "max_critique_tokens": 53,
        "max_reasoning_tokens": 64,
    }
    EXPECTED = {
        "a'": (31, 0.11, 0.9),
        "d'": (42, 1.0, 1.0),
        "d": (42, 1.0, 1.0),
        "y": (42, 0.0, 1.0),
        "critique": (53, 0.44, 1.0),
        "a_r": (31, 0.55, 1.0),
        "rethink": (64, 0.0, 1.0),
    }

    @pytest.mark.parametrize(
        "structure",
        [
            {},
            {"num_next_actions": 2, "num_refinements": 2, "rejected_weight": 0.0, "num_futures": 2},
            {"critic_input": "backed_up", "rejected_weight": 0.0},
        ],
    )
    @pytest.mark.parametrize("kind", [NLACConfig, NLQLConfig])
    def test_each_role_samples_as_configured(self, chat, compact, kind, structure):
        """Fails where any role is sampled at another's temperature, nucleus or length, or all at temperature 1."""
        config = kind()
        for key, value in {**self.SETTINGS, **structure}.items():
            assert hasattr(config, key)
            setattr(config, key, value)
        engine = run(chat, compact, config)
        for weights, request in engine.requests:
            role = role_of(engine.text(request))
            assert (request.max_tokens, request.temperature, request.top_p) == self.EXPECTED[role], (role, weights)
        assert {role_of(engine.text(r)) for _, r in engine.requests} >= set(ROLES) - {"a_r"}

    def test_without_the_correction_of_reasoning_nobody_is_asked_for_one(self, chat, compact):
        config = NLACConfig().roles(max_reasoning_tokens=0)
        assert config.stage_settings.reasoning is None
        assert "rethink" not in asked_by(run(chat, compact, config))

    def test_every_request_has_a_seed_of_its_own(self, chat, compact):
        config = NLACConfig().training(num_futures=3, num_next_actions=2)
        seeds = [request.seed for _, request in run(chat, compact, config).requests]
        assert None not in seeds and len(set(seeds)) == len(seeds)


class TestRefiningPolicy:
    """One round at test time, whatever training does, and answers that do not depend on the company."""

    def refining(self, chat, compact, answer=answers, **settings):
        engine = ScriptedEngine(chat, answer)
        config = NLACConfig().roles(max_reasoning_tokens=64).training(**settings)
        return engine, RefiningPolicy(engine, chat, lambda env: compact, config.stage_settings)

    def test_the_prompts_are_those_of_the_environment_that_is_played(self, chat, compact):
        """As of a task set, whose rows are of several. Fails where they are those of the one that is configured."""
        asked = []
        engine, settings = ScriptedEngine(chat, answers), NLACConfig().stage_settings
        policy = RefiningPolicy(engine, chat, lambda env: asked.append(env) or compact, settings)
        prompt = (Message("user", "Guess my object."),)
        policy.submit([Request(chat.prompt_ids(prompt), 24, messages=prompt, env=env) for env in ("A", "B")])
        policy.poll()
        assert set(asked) == {"A", "B"}

    def ask(self, policy, chat, seeds, text="Guess my object."):
        prompt = (Message("user", text),)
        return policy.submit([Request(chat.prompt_ids(prompt), 24, 0.7, 0.8, seed, prompt) for seed in seeds])

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"num_refinements": 4},
            {"num_refinements": 0},
            {"rejected_weight": 0.0},
            {"rejected_weight": 0.5},
            {"judged_fraction": 0.01},
            {"critic_input": "backed_up"},
        ],
    )
    def test_the_turn_that_was_sampled_is_criticised_and_refined_once(self, chat, compact, settings):
        """Fails where training's rounds, fresh actions or verification go on at test time."""
        engine, policy = self.refining(chat, compact, **settings)
        tickets = self.ask(policy, chat, [1])
        ((ticket, played),) = policy.poll()
        asked = [role_of(prompt) for _, prompts in engine.calls for prompt in prompts]
        assert asked == ["a'", "d", "critique", "a_r", "rethink"] and [ticket] == tickets
        assert chat.decode(played.token_ids).endswith(REFINED)
        judged = [p for _, ps in engine.calls for p in ps if role_of(p) in ("d", "critique", "a_r")]
        assert all(f"<|assistant|>{FRESH}<|end|>" in p for p in judged)
        assert policy.poll() == []

    def test_it_is_criticised_where_training_judges_fresh_actions(self, chat, compact):
        """Fails where another action is judged at test time, and the one that is played is not."""
        engine = ScriptedEngine(chat, answers)
        settings = NLACConfig().roles(max_reasoning_tokens=64).stage_settings
        policy = RefiningPolicy(engine, chat, lambda env: compact, settings, FreshActions.variant)
        self.ask(policy, chat, [1])
        policy.poll()
        asked = [role_of(prompt) for _, prompts in engine.calls for prompt in prompts]
        assert asked == ["a'", "d", "critique", "a_r", "rethink"]

    @pytest.mark.parametrize(
        "wrong", [{"predict": "no label"}, {"evaluate": "Optimal: hm"}, {"refine": ""}, {"evaluate": "Optimal: Yes"}]
    )
    def test_where_nothing_is_to_be_refined_the_policys_own_turn_stands(self, chat, compact, wrong):
        answer = lambda p, w: FRESH if role_of(p) == "a'" else script(verdict=NO, **wrong)(p, w)  # noqa: E731
        _, policy = self.refining(chat, compact, answer)
        self.ask(policy, chat, [1])
        assert [chat.decode(g.token_ids) for _, g in policy.poll()] == [FRESH]

    def seeds_of(self, chat, compact, groups) -> dict[tuple[int | None, str], list[int]]:
        """By the turn's seed and role: the seeds of all requests about it."""
        engine, policy = self.refining(chat, compact, num_futures=2)
        found: dict = {}
        for group in groups:
            before = len(engine.requests)
            # The text tells whose request it is.
            prompts = [(Message("user", f"Guess object {seed}."),) for seed in group]
            policy.submit([Request(chat.prompt_ids(p), 24, 0.7, 0.8, s, p) for s, p in zip(group, prompts, strict=True)])
            policy.poll()
            for _, request in engine.requests[before:]:
                text = engine.text(request)
                owner = int(text.split("Guess object ")[1].split(".")[0])
                found.setdefault((owner, role_of(text)), []).append(request.seed)
        return found

    def test_a_task_is_answered_alike_whoever_plays_it_and_beside_whom(self, chat, compact):
        """Fails where seeds are drawn for the batch: then they depend on how tasks are divided among runners."""
        together = self.seeds_of(chat, compact, [[11, 12, 13]])
        apart = self.seeds_of(chat, compact, [[13], [12, 11]])
        assert together == apart
        seeds = list(itertools.chain.from_iterable(together.values()))
        assert len(set(seeds)) == len(seeds) == 3 * 6  # of turn, two futures, critique, refinement and its rethinking


def test_permuted_futures_leave_out_who_has_none(chat, compact):
    """The ablation exchanges futures, and takes none away: fails where the empty ones of items that are not asked about, or
    that did not parse, are dealt out, too."""
    from rllib_nlac.types import Future

    futures = [(Future(str(i), True),) if i % 3 else () for i in range(12)]
    seen = Permuted().shown(futures, np.random.default_rng(0))
    assert [bool(f) for f in seen] == [bool(f) for f in futures]
    assert sorted(map(repr, seen)) == sorted(map(repr, futures)) and seen != futures
    assert Permuted().shown([(), ()], np.random.default_rng(0)) == [(), ()]


def test_without_futures_each_evaluator_is_told_of_failure(chat, compact):
    from rllib_nlac.language.critique import predicts_success
    from rllib_nlac.types import Future

    futures = [(Future("a", True), Future("b", True)), (), (Future("c", False),)]
    assert Constant().shown(futures, np.random.default_rng(0)) == [(NOTHING_KNOWN,)] * 3
    assert not predicts_success((NOTHING_KNOWN,)) and not predicts_success(())
    engine = run(chat, compact, NLACConfig(), variant=Constant())
    judged = [p for _, prompts in engine.calls for p in prompts if role_of(p) == "critique"]
    assert len(judged) == 2 and all("FAILURE" in p.rsplit("Evaluate.", 1)[1] for p in judged)
