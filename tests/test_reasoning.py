"""The corrected chain of thought: what is rewritten, what is thrown away, and which ids are trained on."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, last_message
from scripted_roles import SETTINGS, script, transition

from rllib_nlac.engine.chat import Chat
from rllib_nlac.language import reasoning
from rllib_nlac.language.forms import FutureForm
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.types import BellmanTarget, Generation, Message

parse_future = FutureForm().parse

THINKING = SETTINGS.__class__(*[Sampling(128)] * 5, reasoning=Sampling(24))
CRITIQUE = "Optimal: No\nReason: it was asked before and nothing new would follow.\nFix: Can it fly?"


def generation(chat: Chat, text: str, prompt: tuple[int, ...] = (3,)) -> Generation:
    ids = chat.encode(text)
    return Generation(prompt, ids, np.zeros(len(ids), np.float32), True, 0)


def target(chat: Chat, text: str) -> BellmanTarget:
    return BellmanTarget(transition(), generation(chat, text), parse_future(text), None, None)


class TestLeaks:
    @given(st.text(alphabet="abcdefgh ijk.", min_size=30, max_size=60), st.text(max_size=10), st.integers(0, 20))
    @settings(max_examples=100)
    def test_any_span_of_8_tokens_is_found_however_it_is_written(self, chat, withheld, around, start):
        ids = chat.tokenizer.encode(withheld, add_special_tokens=False)
        span = chat.tokenizer.decode(ids[start : start + 8])
        if len(ids[start : start + 8]) == 8 and span.strip():
            assert reasoning.leaks(f"{around} {span.upper()}  {around}", (withheld,), chat)
            assert reasoning.leaks(span.replace(" ", "\n "), ("another text", withheld), chat)

    @given(st.text(max_size=40))
    @settings(max_examples=100)
    def test_shorter_texts_cannot_leak(self, chat, text):
        assert not reasoning.leaks(text, ("Yes.",), chat)
        ids = chat.tokenizer.encode("will it rain on monday", add_special_tokens=False)
        assert not reasoning.leaks(chat.tokenizer.decode(ids[:7]), ("will it rain on monday",), chat)


def opening_chat(chat: Chat) -> Chat:
    """With a template that opens the reasoning block itself."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.rstrip() + "<think>\n"
    return Chat(tokenizer, 512)


class TestTargets:
    def test_only_a_reasoning_block_is_corrected(self, chat, compact):
        assert reasoning.target_thought(compact, target(chat, "Future: Yes. SUCCESS"), chat) is None
        assert reasoning.target_thought(compact, dataclasses.replace(target(chat, "x"), generation=None), chat) is None
        thought = reasoning.target_thought(compact, target(chat, "<think>\nIt said No.\n</think>\nFuture: No. FAILURE"), chat)
        assert thought.final == "Future: No. FAILURE" and thought.withheld == ("No.",)
        instruction = thought.prompt[-1].content
        assert "It said No." in instruction and "Future: No. FAILURE" in instruction  # (s, a), the final text, the reasoning
        assert [m.content for m in thought.prompt[:-1]] == ["Guess my object.", "Is it big?"]

    def test_the_answer_s_ids_hold_the_new_reasoning_and_the_old_text(self, chat, compact):
        thought = reasoning.target_thought(compact, target(chat, "<think>old</think>Future: No. FAILURE"), chat)
        made = reasoning.with_reasoning(thought, "If no, few are left.", chat)
        assert chat.decode(made.token_ids) == "<think>\nIf no, few are left.\n</think>\n\nFuture: No. FAILURE"
        assert made.token_ids[-1] == chat.end_id and len(made.logprobs) == 0

    def test_a_template_that_opens_the_block_itself(self, chat, compact):
        opening = opening_chat(chat)
        prompt = opening.prompt_ids((Message("user", "Guess my object."),))
        assert opening.opens_thinking(prompt) and not chat.opens_thinking(chat.prompt_ids((Message("user", "Go."),)))
        sampled = "It may be.\n</think>\n\nFuture: Yes. SUCCESS"
        item = dataclasses.replace(target(chat, sampled), generation=generation(chat, sampled, prompt))
        thought = reasoning.target_thought(compact, item, opening)
        made = reasoning.with_reasoning(thought, "new", opening)
        assert opening.decode(made.token_ids) == "new\n</think>\n\nFuture: Yes. SUCCESS"

    @pytest.mark.parametrize("answer", ["Guess: the reply was blue like the old sea.", "a</think>b</think>c", None])
    def test_what_leaks_breaks_out_or_was_cut_off_leaves_the_reasoning_empty(self, chat, compact, answer):
        t = dataclasses.replace(transition(), observation="blue like the old sea")
        item = dataclasses.replace(target(chat, "<think>x</think>Future: y SUCCESS"), transition=t)
        thought = reasoning.target_thought(compact, item, chat)
        cut_off = dataclasses.replace(generation(chat, "x"), finished=False)
        answered = (generation(chat, answer), answer) if answer else (cut_off, "x")
        assert reasoning.accepted(thought, answered, chat) == ""
        assert chat.decode(reasoning.with_reasoning(thought, "", chat).token_ids) == "<think>\n\n</think>\n\nFuture: y SUCCESS"


class TestActions:
    def test_a_thinking_block_is_always_rewritten_and_a_clean_thought_of_react_never(self, chat, compact):
        critique = reasoning.Critique(CRITIQUE, False, "", "Can it fly?")
        make = lambda text: reasoning.action_thought(  # noqa: E731
            compact, transition().state, (generation(chat, text), text), (critique,), chat
        )
        assert make("<think>Birds can.</think>Can it fly?").final == "Can it fly?"
        assert make("Can it fly?") is None and make("Thought: Birds can.\nAction: Can it fly?") is None
        leaking = make("Thought: It was asked before and nothing new would follow.\nAction: Can it fly?")
        assert leaking.react and leaking.final == "Action: Can it fly?"
        made = chat.decode(reasoning.with_reasoning(leaking, "Birds can.", chat).token_ids)
        assert made == "Thought: Birds can.\nAction: Can it fly?" and parse_action(made, "react") == "Can it fly?"

    @pytest.mark.parametrize("leaks", [True, False])
    def test_a_thought_behind_the_block_that_leaks_goes(self, chat, compact, leaks):
        """Fails where only the block of a thinking model that answers in ReAct's form is looked at."""
        critique = reasoning.Critique(CRITIQUE, False, "", "Can it fly?")
        thought = "It was asked before and nothing new would follow." if leaks else "Birds can."
        text = f"<think>Hm.</think>Thought: {thought}\nAction: Can it fly?"
        found = reasoning.action_thought(compact, transition().state, (generation(chat, text), text), (critique,), chat)
        made = chat.decode(reasoning.with_reasoning(found, "Fine.", chat).token_ids)
        assert (thought in made) is not leaks and parse_action(made, "react") == "Can it fly?"

    def test_without_a_critique_there_is_nothing_to_withhold(self, chat, compact):
        text = "<think>x</think>y"
        assert reasoning.action_thought(compact, (), (generation(chat, text), text), (), chat) is None


class TestStages:
    def run(self, chat, compact, settings, **by_role):
        def answer(prompt, weights):
            if "Write only the reasoning." in last_message(prompt):
                return by_role["target" if "worded" in prompt or "this prediction" in last_message(prompt) else "action"]
            return script(verdict=CRITIQUE, **{k: v for k, v in by_role.items() if k in ("backup", "refine")})(prompt, weights)

        engine = ScriptedEngine(chat, answer)
        stages = LanguageStages(engine, chat, lambda env: compact, settings, seed=0)
        return engine, *stages.run([transition()])

    ROLES = {
        "backup": "<think>\nIt did say No.\n</think>\n\nFuture: No. few left. FAILURE",
        "refine": "<think>\nThe critic wants flying.\n</think>\n\nCan it fly?",
        "target": "If no, few are left.",
        "action": "Some animals fly.",
    }

    def test_both_halves_are_corrected_in_one_more_call(self, chat, compact):
        engine, (t,), (r,), report = self.run(chat, compact, THINKING, **self.ROLES)
        assert chat.decode(t.generation.token_ids) == "<think>\nIf no, few are left.\n</think>\n\nFuture: No. few left. FAILURE"
        assert chat.decode(r.generation.token_ids) == "<think>\nSome animals fly.\n</think>\n\nCan it fly?"
        assert t.future.text == "No. few left. FAILURE" and parse_action(r.action, "plain") == "Can it fly?"
        assert report.calls == 4 and len(engine.calls[3][1]) == 2 and report.counts["reasoning_rewritten"] == 2

    def test_what_is_longer_than_its_role_may_speak_is_emptied(self, chat, compact):
        """Fails where a role learns texts that it is cut off in when it writes them."""
        long = "Some animals fly, and others do not, as far as anybody knows, and so on and on and on."
        limit = len(chat.encode(f"<think>\n{long}\n</think>\n\nCan it fly?")) - 1
        settings = dataclasses.replace(THINKING, action=dataclasses.replace(THINKING.action, max_tokens=limit))
        _, _, (r,), report = self.run(chat, compact, settings, **{**self.ROLES, "action": long})
        assert chat.decode(r.generation.token_ids) == "<think>\n\n</think>\n\nCan it fly?"
        assert report.counts["reasoning_emptied"] == report.counts["reasoning_rewritten"] == 1

    def test_switched_off_the_sampled_ids_are_trained_on(self, chat, compact):
        _, (t,), (r,), report = self.run(chat, compact, SETTINGS, **self.ROLES)
        assert chat.decode(t.generation.token_ids) == self.ROLES["backup"] and report.calls == 3
        assert chat.decode(r.generation.token_ids) == self.ROLES["refine"]

    @pytest.mark.parametrize(
        ("never_closes", "reason"),
        [
            ((), "refined"),
            (("future",), "unparsed_future"),
            (("verdict",), "unparsed_critique"),
            (("refine",), "unparsed_action"),
        ],
    )
    def test_reasoning_that_is_never_closed_is_no_answer(self, chat, compact, never_closes, reason):
        """Where the template opens the block. Fails where all of a text that has no end of it is read as the answer."""
        opening = opening_chat(chat)
        answers = {"verdict": CRITIQUE, "future": "Future: x FAILURE", "refine": "Can it fly?"}
        ends = {role: "\n" if role in never_closes else "\n</think>\n\n" for role in answers}
        spoken = script(**{role: f"hm{ends[role]}{text}" for role, text in answers.items()})
        stages = LanguageStages(ScriptedEngine(opening, spoken), opening, lambda env: compact, SETTINGS, seed=0)
        (refinement,) = stages.run([transition()])[1]
        assert refinement.reason == reason and (refinement.generation is None) == (reason != "refined")

    def test_a_stored_turn_that_is_all_reasoning_is_not_imitated_for_a_yes(self, chat, compact):
        opening = opening_chat(chat)
        found = []
        for action in ("hm\n</think>\n\nIs it big?", "hm. Is it big?"):
            prompt = opening.prompt_ids(transition().state)
            t = dataclasses.replace(transition(), action=action, generation=generation(opening, action, prompt))
            yes = script(verdict="\n</think>\n\nOptimal: Yes\nReason: good.", future="\n</think>\n\nFuture: x SUCCESS")
            stages = LanguageStages(ScriptedEngine(opening, yes), opening, lambda env: compact, SETTINGS, seed=0)
            found += [r.reason for r in stages.run([t])[1]]
        assert found == ["yes_success", "unparsed_action"]

    def test_a_model_without_thoughts_costs_no_further_call(self, chat, compact):
        plain = {**self.ROLES, "backup": "Future: No. FAILURE", "refine": "Can it fly?"}
        _, (t,), (r,), report = self.run(chat, compact, THINKING, **plain)
        assert report.calls == 3 and chat.decode(t.generation.token_ids) == "Future: No. FAILURE"
        assert chat.decode(r.generation.token_ids) == "Can it fly?"


class TestWhatElseIsWithheld:
    """What the reasoning saw at second hand."""

    LATER = "and on the third day the parcel came back to the warehouse unopened"

    def test_the_replies_to_all_stored_steps_of_a_chain(self, chat, compact):
        """The first step's target rests on a text that was made with the later replies in view. Fails where only the first
        reply is withheld."""
        first, second = transition(1), dataclasses.replace(transition(2), observation=self.LATER)
        thinking = "<think>\nIt came back.\n</think>\n\nFuture: No. It comes back. FAILURE"

        def answer(prompt, weights):
            if "Write only the reasoning." in prompt:
                return f"Perhaps {self.LATER}."
            return script(backup=thinking)(prompt, weights)

        stages = LanguageStages(ScriptedEngine(chat, answer), chat, lambda env: compact, THINKING, seed=0)
        items = [dataclasses.replace(first, id=3), dataclasses.replace(first, following=(second,))]
        (alone, chain), _, report = stages.run(items)
        assert self.LATER not in chat.decode(chain.generation.token_ids)
        assert chat.decode(chain.generation.token_ids).startswith("<think>\n\n</think>")
        assert report.counts["reasoning_emptied"] == 1 and report.counts["reasoning_rewritten"] == 1
        assert self.LATER in chat.decode(alone.generation.token_ids)  # to one step that is no more than a guess

    def test_the_critiques_of_former_rounds(self, chat, compact):
        """A thought that quoted the first critique goes into the second round's prompt with its turn, and may be copied from
        there. Fails where only the last critique is withheld."""
        quoting = "Thought: It was asked before and nothing new would follow.\nAction: Can it fly?"
        verdicts = iter([CRITIQUE, "Optimal: No\nReason: it is too small a question.\nFix: Can it swim?"])

        def answer(prompt, weights):
            if "Write only the reasoning." in prompt:
                return "Some animals swim."
            if last_message(prompt).startswith("Evaluate."):
                return next(verdicts)
            return script(refine=quoting)(prompt, weights)

        settings = dataclasses.replace(THINKING, action_format="react", num_refinements=2)
        stages = LanguageStages(ScriptedEngine(chat, answer), chat, lambda env: compact, settings, seed=0)
        _, (refinement,), report = stages.run([transition()])
        assert chat.decode(refinement.generation.token_ids) == "Thought: Some animals swim.\nAction: Can it fly?"
        assert report.counts["reasoning_rewritten"] == 1

    @pytest.mark.parametrize("withheld", ["客户已经确认了订单的取消请求", "заказ был отменён вчера вечером", "🙂🙃🙂🙃🙂🙃🙂"])
    def test_scripts_whose_characters_are_several_tokens(self, chat, withheld):
        """A span that ends within a character decodes to what no text holds: fails where it is compared as it is."""
        tokens = chat.tokenizer.encode(withheld, add_special_tokens=False)
        assert len(tokens) > len(withheld)
        assert reasoning.leaks(f"I know that {withheld}.", (withheld,), chat)
        assert reasoning.leaks(withheld[1:-1], (withheld,), chat)
        assert not reasoning.leaks(withheld[:1], (withheld,), chat)


def test_the_words_of_a_rewriting_that_thinks_itself_are_those_behind_its_thought(chat, compact):
    thought = reasoning.target_thought(compact, target(chat, "<think>x</think>Future: y SUCCESS"), chat)
    for text, kept in (("<think>Hm.</think> Maybe.", "Maybe."), ("Maybe.", "Maybe."), ("<think>a</think>b</think>c", "")):
        assert reasoning.accepted(thought, (generation(chat, text), text), chat) == kept
    assert reasoning.accepted(thought, None, chat) == ""
