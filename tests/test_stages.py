"""The three waves, run on a scripted engine: who is asked what, under which weights, and what becomes of the answers."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from scripted_engine import CutOff, Raw, ScriptedEngine, last_message
from scripted_roles import NO, SETTINGS, YES, script, transition

from rllib_nlac.ablations import Constant, Fresh, Frozen, Permuted, WhatCame
from rllib_nlac.language.backup_stage import _with_prompts
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.types import BellmanTarget, Generation, Message, Weights


@pytest.fixture()
def make(chat, compact):
    def make(answer, variant=NLAC_AS_IT_IS, **settings):
        engine = ScriptedEngine(chat, answer)
        stages = LanguageStages(engine, chat, lambda env: compact, replace(SETTINGS, **settings), 0, variant)
        return engine, stages

    return make


def test_a_batch_takes_three_full_engine_calls(make):
    engine, stages = make(script(), judge_weights=Weights.TARGET)
    _, _, report = stages.run([transition(i) for i in range(10)])
    assert [(weights, len(prompts)) for weights, prompts in engine.calls] == [
        (Weights.POLICY, 20),
        (Weights.TARGET, 20),
        (Weights.TARGET, 20),
    ]
    assert report.calls == 3


def test_d_prime_and_y_come_from_the_target_and_d_and_the_next_action_from_the_policy(make):
    engine, stages = make(script(), judge_weights=Weights.POLICY)
    stages.run([transition()])
    asked = {(weights, last_message(prompt).split(".")[0]) for weights, prompts in engine.calls for prompt in prompts}
    assert asked == {
        (Weights.POLICY, "No"),  # a': s' ends with the environment's reply
        (Weights.POLICY, "Predict"),
        (Weights.TARGET, "Predict"),
        (Weights.POLICY, "Evaluate"),
        (Weights.POLICY, "Refine"),
        (Weights.TARGET, "Backup"),
    }


def test_next_actions_whose_prompts_leave_old_turns_out_are_counted_as_encoded_again(make, chat):
    """Nothing of such a prompt is known from what was sampled, so that all of it comes from its text."""
    t = transition()
    generation = replace(t.generation, prompt_ids=chat.prompt_ids(t.state), token_ids=chat.encode(t.action))
    whole = replace(t, generation=generation)
    moved_on = replace(whole, next_messages=(Message("user", "No."),))
    counted = [make(script(), num_next_actions=3)[1].run([t])[2].counts["retokenised"] for t in (whole, moved_on)]
    assert counted == [0, 3]


def test_the_backup_follows_the_policys_next_action(make):
    """Fails on a backup that follows the behaviour policy: there is no stored next action to be found in its prompts."""
    engine, stages = make(script(policy="Is it found in water?"))
    targets, *_ = stages.run([transition()])
    (next_future_prompt,) = [p for w, prompts in engine.calls[1:2] for p in prompts if last_message(p) == "Predict."]
    assert "Is it big?<|end|><|user|>No.<|end|><|assistant|>Is it found in water?" in next_future_prompt
    assert targets[0].next_action == "Is it found in water?"


@pytest.mark.parametrize("end", [{"ended": True}, {"truncated": True}])
def test_nothing_is_bootstrapped_across_an_end(make, end):
    engine, stages = make(script())
    targets, *_ = stages.run([transition(**end)])
    prompts = [prompt for _, prompts in engine.calls for prompt in prompts]
    assert not any("Can it fly?" in prompt for prompt in prompts)
    assert sum(last_message(prompt) == "Predict." for prompt in prompts) == 1  # d of (s, a) alone
    (backup,) = [last_message(prompt) for prompt in prompts if last_message(prompt).startswith("Backup.")]
    assert "The end." in backup and "Next:" not in backup
    assert targets[0].next_action is None and targets[0].next_future is None and targets[0].generation is not None


@pytest.mark.parametrize("k", [1, 3])
def test_k_futures_enter_the_evaluators_prompt(make, k):
    engine, stages = make(script(), num_futures=k)
    _, refinements, _ = stages.run([transition()])
    (prompt,) = [last_message(p) for _, ps in engine.calls for p in ps if last_message(p).startswith("Evaluate.")]
    assert [line.split(".")[0] for line in prompt.splitlines()[1:]] == [str(i + 1) for i in range(k)]
    assert len(refinements[0].futures) == k


def test_m_rounds_judge_the_refined_action_again(make):
    turns = iter(["Is it alive?", "Can it fly?", "Can you eat it?"])
    engine, stages = make(
        lambda prompt, w: next(turns) if last_message(prompt).startswith("Refine.") else script()(prompt, w), num_refinements=3
    )
    _, refinements, report = stages.run([transition()])
    judged = [
        p.split("<|assistant|>")[1].split("<|end|>")[0]
        for _, ps in engine.calls
        for p in ps
        if last_message(p).startswith("Evaluate.")
    ]
    assert judged == ["Is it big?", "Is it alive?", "Can it fly?"]
    assert refinements[0].action == "Can you eat it?" and refinements[0].reason == "refined" and report.calls == 9


def test_without_refinement_the_critic_only_accepts_or_not(make):
    engine, stages = make(script(), num_refinements=0)
    _, (refused,), report = stages.run([transition()])
    assert refused.reason == "not_refined" and refused.generation is None and refused.critique is not None
    assert not any(last_message(p).startswith("Refine.") for _, ps in engine.calls for p in ps) and report.calls == 3
    _, stages = make(script(verdict=YES, future="Future: SUCCESS"), num_refinements=0)
    _, (accepted,), _ = stages.run([transition()])
    assert accepted.reason == "yes_success" and accepted.generation is not None


def test_n_steps_back_up_the_last_first_and_bootstrap_behind_it(make):
    """d' is asked for behind the last stored step, and each earlier target rests on the later one's text."""
    answers = iter(["Future: last. SUCCESS", "Future: middle. SUCCESS", "Future: first. SUCCESS"])
    engine, stages = make(
        lambda prompt, w: next(answers) if last_message(prompt).startswith("Backup.") else script()(prompt, w)
    )
    first, second, third = (transition(i, action=action) for i, action in enumerate(("a1", "a2", "a3")))
    (target,), *_ = stages.run([replace(first, following=(second, third))])
    backups = [p for w, ps in engine.calls for p in ps if last_message(p).startswith("Backup.")]
    assert [p.split("<|assistant|>")[1].split("<|end|>")[0] for p in backups] == ["a3", "a2", "a1"]
    assert [last_message(p).split("Next: ")[1].split(" Reward")[0] for p in backups] == [
        "No. few left. FAILURE",
        "last. SUCCESS",
        "middle. SUCCESS",
    ]
    assert target.future.text == "first. SUCCESS" and target.transition.action == "a1" and target.next_action == "Can it fly?"


def test_a_chain_whose_later_target_does_not_parse_is_dropped(make):
    answers = iter(["no label", "Future: first. SUCCESS"])
    _, stages = make(lambda prompt, w: next(answers) if last_message(prompt).startswith("Backup.") else script()(prompt, w))
    (target,), _, _ = stages.run([replace(transition(1), following=(transition(2),))])
    assert target.generation is None


def test_a_later_yes_keeps_the_former_rounds_action(make):
    verdicts = iter([NO, YES])
    _, stages = make(
        lambda prompt, w: next(verdicts) if last_message(prompt).startswith("Evaluate.") else script()(prompt, w),
        num_refinements=2,
    )
    _, refinements, _ = stages.run([transition()])
    assert refinements[0].action == "Is it alive?" and refinements[0].generation is not None


@pytest.mark.parametrize("verify", [False, True])
def test_a_refined_action_that_was_approved_of_is_not_judged_again(make, verify):
    """Each further question could only turn the yes into a no, and costs k futures and a critique."""
    verdicts = iter([NO, YES, NO, NO])
    engine, stages = make(
        lambda prompt, w: next(verdicts) if last_message(prompt).startswith("Evaluate.") else script()(prompt, w),
        num_refinements=4,
        rejected_weight=0.0 if verify else 1.0,
    )
    _, (refinement,), _ = stages.run([transition()])
    asked = [last_message(p).split(".")[0] for _, ps in engine.calls for p in ps]
    assert (asked.count("Evaluate"), asked.count("Refine")) == (2, 1)
    assert (refinement.action, refinement.reason) == ("Is it alive?", "refined") and refinement.generation is not None


def test_only_what_no_round_approved_of_is_verified(make):
    """Two transitions: one finds its yes in the second round, the other in none."""

    def answer(prompt: str, weights: Weights) -> str | None:
        if last_message(prompt).startswith("Evaluate."):
            return YES if "Is it alive?" in prompt.split("Evaluate.")[0] else NO
        if last_message(prompt).startswith("Refine."):
            return "Is it alive?" if "Is it big?" in prompt else "Can it fly?"
        return script()(prompt, weights)

    _, stages = make(answer, num_refinements=2, rejected_weight=0.0)
    _, (found, not_found), _ = stages.run([transition(1), transition(2, action="Is it found in water?")])
    assert (found.action, found.reason) == ("Is it alive?", "refined")
    assert (not_found.action, not_found.reason) == ("Can it fly?", "rejected")


@pytest.mark.parametrize(
    ("role", "answer", "booked"),
    [
        ("backup", "Future: No. few left. FAILURE", "target"),
        ("predict", "Future: No. few left. FAILURE", "future"),
        ("evaluate", NO, "critique"),
        ("refine", "Is it alive?", "refinement"),
    ],
)
def test_an_answer_that_goes_on_as_somebody_else_says_nothing(make, role, answer, booked):
    """Its ids would be trained on as they are, invented turn included."""
    for goes_on, lost in ((Raw(answer), 0), (Raw(answer + "<|user|> No.<|assistant|>"), 1)):
        _, stages = make(script(**{role: goes_on}))
        (target,), (refinement,), report = stages.run([transition()])
        assert bool(report.unparsed[booked]) is bool(lost)
        assert (target.generation is None) is (bool(lost) and role in ("backup", "predict"))
        assert (refinement.generation is None) is (bool(lost) and role != "backup")


def test_what_did_not_parse_is_shown_under_its_own_transition():
    """Two answers for each of two transitions."""
    answer, report = Generation((1,), (2,), np.zeros(0, np.float32), True, 0), StageReport()
    report.note("future", [(answer, text) for text in "abcd"], [1, None, None, 1], [7, 7, 8, 8])
    assert report.raw == {7: [("future", "b")], 8: [("future", "c")]}


@pytest.mark.parametrize(("beyond", "kept"), [(0, True), (1, False)])
def test_a_target_that_exceeds_the_context_with_its_prompt_is_not_trained_on(chat, compact, beyond, kept):
    own = transition()
    own = replace(own, generation=replace(own.generation, prompt_ids=(), token_ids=()))
    room = chat.max_context - len(chat.prompt_ids(compact.predict_messages(own.state, own.action)))
    said = Generation((3,), (5,) * (room + beyond), np.zeros(0, np.float32), True, 0)
    (made,) = _with_prompts([compact], [BellmanTarget(own, said, None, None, None)], chat, StageReport())
    assert (made.generation is not None) is kept


class TestWhatThePolicyLearns:
    def run(self, make, answer, item=None, **settings):
        _, stages = make(answer, **settings)
        _, (refinement,), report = stages.run([item or transition()])
        assert report.counts[f"refinement_{refinement.reason}"] == 1
        return refinement

    def test_no_trains_the_refined_action(self, make, chat):
        refinement = self.run(make, script())
        assert refinement.reason == "refined" and not refinement.kept
        assert chat.decode(refinement.generation.token_ids) == "Is it alive?"

    def test_an_unchanged_refinement_counts_as_kept(self, make):
        refinement = self.run(make, script(refine="Is it big?"))
        assert refinement.reason == "kept" and refinement.kept and refinement.generation is not None

    def test_the_same_action_under_another_thought_is_kept(self, make):
        turn = "Thought: {}\nAction: Is it big?"
        item = transition(action=turn.format("a"))
        refinement = self.run(make, script(refine=turn.format("b")), item, action_format="react")
        assert refinement.reason == "kept" and refinement.kept and refinement.generation is not None

    def test_a_turn_that_goes_on_as_the_environment_is_not_imitated(self, make, chat):
        ids = (*chat.tokenizer.encode("Is it big?<|user|>No.", add_special_tokens=False), chat.end_id)
        item = replace(transition(), generation=replace(transition().generation, token_ids=ids))
        refinement = self.run(make, script(verdict=YES, future="Future: SUCCESS"), item)
        assert refinement.reason == "unparsed_action" and refinement.generation is None

    def test_yes_with_predicted_success_trains_the_sampled_ids(self, make):
        item = transition()
        refinement = self.run(make, script(verdict=YES, future="Future: SUCCESS"), item)
        assert refinement.reason == "yes_success" and refinement.generation is item.generation

    def test_yes_with_predicted_failure_is_skipped(self, make):
        refinement = self.run(make, script(verdict=YES))
        assert refinement.reason == "yes_skipped" and refinement.generation is None

    @pytest.mark.parametrize(("train_on_yes", "trained"), [("always", True), ("never", False)])
    def test_the_switch(self, make, train_on_yes, trained):
        """A no whose refinement repeats the action is a yes as well: where none is learned, it is not either."""
        for answers, reason in (({"verdict": YES}, "yes"), ({"refine": "Is it big?"}, "kept")):
            refinement = self.run(make, script(**answers), train_on_yes=train_on_yes)
            assert (refinement.generation is not None) is trained and refinement.reason.startswith(reason)
        assert self.run(make, script(), train_on_yes=train_on_yes).generation is not None

    @pytest.mark.parametrize(
        ("role", "text", "reason"),
        [
            ("predict", "no label", "unparsed_future"),
            ("predict", None, "unparsed_future"),
            ("predict", CutOff("Future: No. SUCCESS, unless it is not. FAILURE"), "unparsed_future"),
            ("evaluate", "Optimal: perhaps", "unparsed_critique"),
            ("evaluate", None, "unparsed_critique"),
            ("evaluate", CutOff(NO), "unparsed_critique"),
            ("evaluate", CutOff(YES), "unparsed_critique"),
            ("refine", "", "unparsed_action"),
            ("refine", None, "unparsed_action"),
            ("refine", CutOff("Is it alive"), "unparsed_action"),
        ],
    )
    def test_what_does_not_parse_or_was_cut_off_is_dropped_and_counted(self, make, role, text, reason):
        refinement = self.run(make, script(**{role: text}))
        assert refinement.reason == reason and refinement.generation is None

    def test_react_needs_an_action_part(self, make):
        assert self.run(make, script(refine="Is it alive?"), action_format="react").reason == "unparsed_action"
        assert self.run(make, script(refine="Thought: x\nAction: y"), action_format="react").reason == "refined"

    def test_a_stored_turn_that_the_environment_could_not_read_is_not_learned(self, make):
        """Fails where the evaluator's yes, or a won game, is enough."""
        item = replace(transition(action="Is it alive?"), episode_success=True)
        for action_format, reason in (("react", "unparsed_action"), ("plain", "yes_success")):
            _, stages = make(
                script(verdict=YES, future="Future: No. SUCCESS"), action_format=action_format, train_on_yes="always"
            )
            _, (refinement,), _ = stages.run([item])
            assert (refinement.generation is None) is (action_format == "react") and refinement.reason == reason

    @pytest.mark.parametrize("critic_input", ["predicted", "backed_up"])
    def test_each_transition_keeps_its_own_refinement(self, make, critic_input):
        """Half are judged: the first is approved at once, the third once refined, and the others never."""

        def answer(prompt, weights):
            action = re.findall(r"Is it (?:new )?\d\?", prompt)[-1]
            verdict = YES if action in ("Is it 0?", "Is it new 4?") else NO
            return script(verdict=verdict, refine=f"Is it new {action[-2]}?")(prompt, weights)

        items = [transition(i, action=f"Is it {i}?") for i in range(8)]
        settings = {"judged_fraction": 0.5, "num_refinements": 2, "rejected_weight": 0.5, "train_on_yes": "always"}
        _, stages = make(answer, critic_input=critic_input, **settings)
        _, refinements, _ = stages.run(items)
        assert [r.transition.action for r in refinements] == [item.action for item in items]
        judged = {i: (r.reason, r.action) for i, r in enumerate(refinements) if r.reason != "not_judged"}
        assert judged == {
            0: ("yes_success", "Is it 0?"),
            2: ("rejected", "Is it new 2?"),
            4: ("refined", "Is it new 4?"),
            6: ("rejected", "Is it new 6?"),
        }


@pytest.mark.parametrize("backup", ["no label", None, CutOff("Future: No. FAILURE")])
def test_a_target_that_does_not_parse_is_dropped(make, backup):
    _, stages = make(script(backup=backup))
    (target,), _, _ = stages.run([transition()])
    assert target.generation is None and target.future is None


def test_a_transition_that_was_drawn_twice_is_backed_up_once(make):
    engine, stages = make(script())
    targets, *_ = stages.run([transition(1), transition(2), transition(1)])
    backups = [p for _, ps in engine.calls for p in ps if last_message(p).startswith("Backup.")]
    assert len(backups) == 2 and [t.transition.id for t in targets] == [1, 2, 1] and targets[0].future == targets[2].future


def test_a_target_knows_the_prompt_that_it_is_trained_under(make):
    """That of the prediction, not of the backup, which has seen what came."""
    _, stages = make(script())
    (target,), *_ = stages.run([transition()])
    prompt = stages.chat.decode(target.prompt_ids)
    item, compact = transition(), stages.prompts_for(transition().env)
    expected = stages.chat.prompt_ids(compact.predict_messages(item.state, item.action))
    assert target.prompt_ids == expected and "Backup." not in prompt
    (dropped,), *_ = make(script(backup="no label"))[1].run([transition()])
    assert dropped.generation is None and dropped.prompt_ids == ()


def test_permuted_futures_are_those_of_other_transitions(make):
    futures = {f"Is it {i}?": f"Future: {i} FAILURE" for i in range(12)}

    def answer(prompt: str, weights: Weights) -> str | None:
        if last_message(prompt) == "Predict." and weights is Weights.POLICY:
            return futures[prompt.split("<|assistant|>")[1].split("<|end|>")[0]]
        return script()(prompt, weights)

    items = [transition(i, ended=True, action=f"Is it {i}?") for i in range(12)]
    _, stages = make(answer)
    assert [r.futures[0].text for r in stages.run(items)[1]] == [f"{i} FAILURE" for i in range(12)]
    _, stages = make(answer, variant=Permuted())
    seen = [r.futures[0].text for r in stages.run(items)[1]]
    assert sorted(seen) == sorted(f"{i} FAILURE" for i in range(12)) and seen != [f"{i} FAILURE" for i in range(12)]


def test_a_stored_action_is_judged_by_its_target_and_a_refined_one_by_what_is_predicted(make):
    answers = script(future="Future: a guess. FAILURE", backup="Future: No. what came. FAILURE")
    engine, stages = make(answers, critic_input="backed_up", rejected_weight=0.0, num_futures=2)
    targets, refinements, _ = stages.run([transition(), transition(2, ended=True)])
    judged = [last_message(p) for _, ps in engine.calls for p in ps if last_message(p).startswith("Evaluate.")]
    assert judged[:2] == ["Evaluate.\n1. No. what came. FAILURE"] * 2
    assert judged[2:] == ["Evaluate.\n1. a guess. FAILURE\n2. a guess. FAILURE"] * 2
    assert [r.futures for r in refinements] == [(target.future,) for target in targets]


def test_without_a_target_a_stored_action_is_not_judged(make):
    _, stages = make(script(backup="many words"), critic_input="backed_up")
    _, (refinement,), _ = stages.run([transition()])
    assert refinement.generation is None and refinement.critique is None


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("critic_input", ["predicted", "backed_up"])
def test_with_hindsight_the_evaluator_reads_what_came_of_the_very_action(make, success, critic_input):
    """Fails where it reads a prediction, another transition's log, or the reply without what followed and the outcome."""
    later = replace(transition(9), observation="Yes, it can.", episode_success=success)
    items = [
        replace(transition(1), observation="No, said 1.", following=(later,), episode_success=success),
        replace(transition(2), observation="No, said 2.", episode_success=not success),
    ]
    engine, stages = make(script(future="Future: a guess. SUCCESS"), WhatCame(), critic_input=critic_input)
    targets, refinements, report = stages.run(items)
    judged = [last_message(p) for _, ps in engine.calls for p in ps if last_message(p).startswith("Evaluate.")]
    outcomes = ["SUCCESS" if came else "FAILURE" for came in (success, not success)]
    assert judged == [f"Evaluate.\n1. No, said 1. Yes, it can. {outcomes[0]}", f"Evaluate.\n1. No, said 2. {outcomes[1]}"]
    # No successor model: nothing is predicted, nothing backed up, and no next action asked for.
    asked = [last_message(p).split(".")[0] for _, ps in engine.calls for p in ps]
    assert asked == ["Evaluate"] * 2 + ["Refine"] * 2 and report.calls == 2
    assert [r.reason for r in refinements] == ["refined"] * 2 and [t.generation for t in targets] == [None, None]


def test_with_hindsight_a_refined_action_is_not_judged_as_nothing_came_of_it(make):
    """Fails where the log of the stored action is shown as the refined one's future, or where that is predicted."""
    engine, stages = make(script(), WhatCame(), num_refinements=3, rejected_weight=0.5)
    _, (refinement,), _ = stages.run([transition()])
    asked = [last_message(p).split(".")[0] for _, ps in engine.calls for p in ps]
    assert asked == ["Evaluate", "Refine"] and (refinement.reason, refinement.weight) == ("refined", 1.0)


def test_constant_futures_hide_the_critic(make):
    engine, stages = make(script(), variant=Constant())
    stages.run([transition()])
    (prompt,) = [last_message(p) for _, ps in engine.calls for p in ps if last_message(p).startswith("Evaluate.")]
    assert prompt == "Evaluate.\n1. FAILURE"


def test_a_prompt_beyond_the_context_drops_its_item_only(make):
    long = replace(transition(2), state=(Message("user", "word " * 600),))
    _, stages = make(script())
    targets, refinements, report = stages.run([transition(1), long])
    assert report.counts["prompt_too_long"] >= 2
    assert report.prompts["future"] == 2 and report.too_long["future"] == 1 and "refinement" not in report.too_long
    assert targets[0].generation is not None and refinements[0].generation is not None
    assert targets[1].generation is None and refinements[1].generation is None


def test_same_seed_same_requests(make):
    seeds = []
    for _ in range(2):
        engine, stages = make(script())
        generate, seen = engine.generate, []
        engine.generate = lambda requests, g=generate, s=seen: s.extend(r.seed for r in requests) or g(requests)
        stages.run([transition(i) for i in range(4)])
        seeds.append(seen)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == len(seeds[0])


def test_a_fresh_action_of_the_policy_is_judged_in_the_stored_ones_place(make):
    """State, target and what the critic is trained on stay those of the stored transition."""
    engine, stages = make(script(policy="Can you eat it?"), variant=Fresh())
    (target,), (refinement,), _ = stages.run([transition()])
    judged = [p for _, ps in engine.calls for p in ps if last_message(p).startswith(("Evaluate.", "Refine."))]
    assert len(judged) == 2 and all("<|assistant|>Can you eat it?<|end|>" in p and "Is it big?" not in p for p in judged)
    assert target.transition.action == "Is it big?" and refinement.transition.action == "Can you eat it?"
    _, stages = make(script(policy="Can you eat it?", verdict=YES, future="Future: SUCCESS"), variant=Fresh())
    _, (accepted,), _ = stages.run([transition()])
    assert accepted.reason == "yes_success" and stages.chat.decode(accepted.generation.token_ids) == "Can you eat it?"


def test_a_fresh_action_that_does_not_parse_leaves_the_stored_one_and_its_prompt_is_the_one_that_was_seen(make):
    engine, stages = make(script(policy=None), variant=Fresh())
    stored = transition()
    other = (*stored.generation.prompt_ids[:-1], 7, stored.generation.prompt_ids[-1])  # as no template writes it
    stored = replace(stored, generation=replace(stored.generation, prompt_ids=other))
    _, (refinement,), _ = stages.run([stored])
    assert refinement.transition.action == "Is it big?"
    assert other in [request.prompt_ids for _, request in engine.requests]


@pytest.mark.parametrize(("second", "reason"), [(YES, "refined"), (NO, "rejected"), ("nonsense", "rejected")])
def test_a_refined_action_that_is_verified_is_learned_with_a_yes_only(make, second, reason):
    def answer(prompt: str, weights: Weights) -> str | None:
        of_the_refined = "<|assistant|>Is it alive?<|end|>" in prompt
        return script(verdict=second if of_the_refined else NO)(prompt, weights)

    engine, stages = make(answer, rejected_weight=0.0, num_futures=2)
    _, (refinement,), _ = stages.run([transition()])
    assert refinement.reason == reason and (refinement.generation is not None) is (reason == "refined")
    predicted = [p for _, ps in engine.calls for p in ps if last_message(p) == "Predict." and "Is it alive?" in p]
    assert len(predicted) == 2  # k futures of its own
    _, stages = make(answer, rejected_weight=1.0)
    assert stages.run([transition()])[1][0].reason == "refined"
    _, stages = make(answer, rejected_weight=0.1)
    _, (weighted,), _ = stages.run([transition()])
    assert weighted.reason == reason and weighted.generation is not None
    assert weighted.weight == (1.0 if reason == "refined" else 0.1)


@pytest.mark.parametrize("good", [None, 0, 2])
def test_of_several_next_actions_the_backup_follows_the_first_that_is_approved_of(make, good):
    """Each a' is told apart by its number, d' by that of its a'; without a yes the backup rests on the first."""
    drawn = iter(range(100))

    def answer(prompt: str, weights: Weights) -> str | None:
        role = prompt.rsplit("<|user|>", 1)[-1]
        action = prompt.rsplit("<|assistant|>", 2)[-2].split("<|end|>")[0]
        if role.startswith("Predict.") and action.startswith("Next"):
            return f"Future: {action}. FAILURE"
        if role.startswith("Evaluate.") and action.startswith("Next"):
            return YES if action == f"Next {good}?" else NO
        if role.startswith(("Predict.", "Evaluate.", "Refine.", "Backup.")):
            return script()(prompt, weights)
        return f"Next {next(drawn)}?"

    engine, stages = make(answer, num_next_actions=3)
    (target,), _, _ = stages.run([transition()])
    assert target.next_action == f"Next {good or 0}?" and f"Next {good or 0}?" in target.next_future
    (backup,) = [p for _, prompts in engine.calls for p in prompts if last_message(p).startswith("Backup.")]
    assert f"Next {good or 0}?" in last_message(backup)


def test_a_next_action_whose_future_does_not_parse_is_not_taken_where_another_has_one(make):
    """Fails where the first one is taken though nothing is foreseen of it, and the target is lost."""
    drawn = itertools.count()

    def answer(prompt: str, weights: Weights) -> str | None:
        role = prompt.rsplit("<|user|>", 1)[-1]
        action = prompt.rsplit("<|assistant|>", 2)[-2].split("<|end|>")[0]
        if role.startswith("Predict.") and action.startswith("Next"):
            return "no label" if action == "Next 0?" else f"Future: {action}. FAILURE"
        if role.startswith("Evaluate."):
            return NO
        return script()(prompt, weights) if role.startswith(("Predict.", "Refine.", "Backup.")) else f"Next {next(drawn)}?"

    (target,), _, _ = make(answer, num_next_actions=2)[1].run([transition()])
    assert target.next_action == "Next 1?" and target.generation is not None


@pytest.mark.parametrize(("fraction", "judged"), [(1.0, range(10)), (0.25, (0, 4, 8)), (0.01, (0,))])
def test_a_fraction_is_judged_spread_over_the_batch_and_all_get_targets(make, fraction, judged):
    engine, stages = make(script(), judged_fraction=fraction)
    targets, refinements, _ = stages.run([transition(id=number) for number in range(10)])
    assert [i for i, r in enumerate(refinements) if r.reason == "refined"] == list(judged)
    assert all(r.reason == "not_judged" and r.generation is None for i, r in enumerate(refinements) if i not in judged)
    assert [r.transition.id for r in refinements] == list(range(10)) and all(t.generation for t in targets)
    asked = [last_message(p).split(".")[0] for _, prompts in engine.calls for p in prompts]
    assert asked.count("Evaluate") == asked.count("Refine") == len(judged) and asked.count("Backup") == 10


def test_the_initial_weights_criticise_and_refine_where_they_are_asked_to(make):
    engine, stages = make(script(), judge_weights=Weights.INITIAL)
    stages.run([transition()])
    roles = {last_message(p).split(".")[0]: weights for weights, prompts in engine.calls for p in prompts}
    assert roles["Evaluate"] is roles["Refine"] is roles["Backup"] is Weights.INITIAL


def test_a_frozen_critics_futures_all_come_from_the_initial_weights(make):
    engine, stages = make(script(), variant=Frozen())
    stages.run([transition()])
    predicted = [weights for weights, prompts in engine.calls for p in prompts if last_message(p).startswith("Predict")]
    assert predicted == [Weights.INITIAL] * 2  # d and d'
