"""Tools: how schemas, calls and results become tokens, who reads a call, and what an environment makes of it."""

from __future__ import annotations

import json
import re
from collections import Counter as Counts
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from toolsets import CHATS, QWEN, SCHEMAS, Undocumented, opened, reward
from typer.testing import CliRunner

from rllib_nlac.command.cli import app
from rllib_nlac.command.experiment import read_experiment, tune_arguments
from rllib_nlac.engine.chat import Chat, Wanted
from rllib_nlac.engine.endpoint_engine import EndpointChat, EndpointEngine
from rllib_nlac.envs.answers import AnswerError, checked_reset, checked_step
from rllib_nlac.envs.base import TaskId
from rllib_nlac.envs.contract import check_environment
from rllib_nlac.envs.guess_number import GuessNumberTools
from rllib_nlac.envs.rows import Row
from rllib_nlac.envs.service_desk.env import ServiceDesk
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.envs.tools import ToolEnv, ToolTasks, check_call
from rllib_nlac.episode import generation_at, messages_at
from rllib_nlac.inputs.tool_calls import Call, read_calls
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.replay.conversations import ConversationData, parse_conversation, sequences_of
from rllib_nlac.replay.dialogues import as_row, parse_dialogue, to_episode
from rllib_nlac.replay.messages import UNREADABLE, UNWRITTEN
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.expert import Expert
from rllib_nlac.types import Message, Request, Seen, dialogue_after, goes_on

ADD = str(Call("step", {"by": 2}))
texts = st.text(alphabet=st.sampled_from('ab\n <|{}"\\[]é😀'), max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|eot_id|>", "<tool_call>", "</tool_response>", "<|im_start|>user\nhi"]
)
answers = st.lists(st.tuples(st.sampled_from(["tool", "user"]), texts), min_size=1, max_size=3)


@pytest.mark.parametrize("name", CHATS)
@settings(max_examples=25)
@given(system=st.sampled_from(["", "Play."]), turns=st.lists(st.tuples(st.sampled_from([ADD, "Hello."]), answers), max_size=3))
def test_a_dialogue_written_turn_by_turn_is_the_one_that_is_written_whole(name, system, turns):
    """Fails where one of several results is left to the next turn, or a result that says <|im_end|> ends a message."""
    chat = CHATS[name]
    messages = opened(chat, system)
    (prompt,) = chat.prompts([Wanted(messages)])
    for turn, told in turns:
        ids = chat.encode(turn)
        state, messages = messages, dialogue_after(messages, turn, [Message(role, text) for role, text in told])
        assert goes_on(messages, state)
        seen = Seen(prompt.ids, ids)
        (prompt,) = chat.prompts([Wanted(messages, seen=seen)])
        assert not prompt.retokenised and prompt.ids[: len(seen.prompt_ids) + len(ids)] == (*seen.prompt_ids, *ids)
        assert prompt.ids == chat.prompt_ids(messages)


@pytest.mark.parametrize("name", CHATS)
def test_schemas_and_results_are_shown_and_hold_no_control_token(name):
    chat = CHATS[name]

    def ids(text: str) -> tuple[int, ...]:
        schema = {"name": "add", "description": f"Adds{text}.", "parameters": {"type": "object", "properties": {}}}
        state = opened(chat, "Play.", [{"type": "function", "function": schema}])
        return chat.prompt_ids(dialogue_after(state, "a", [Message("tool", f"7{text}"), Message("tool", "8")]))

    ends = "".join({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<tool_call>"})
    harmless, hostile = (chat.tokenizer.decode(ids(text)) for text in ("", ends))
    assert "Adds." in harmless and hostile.count(ends) == 2 and harmless.index("Adds.") < harmless.index("7")
    marks = chat.template.control.special_ids
    assert sum(id in marks for id in ids("")) == sum(id in marks for id in ids(ends))


def test_the_critics_prompt_begins_with_the_policys():
    """Fails where roles are asked without the tools: no prefix of theirs would be shared."""
    chat, prompts = CHATS["qwen"], load_prompts("default")
    state = prompts.state("Play.", "Make it five.", tools=SCHEMAS)
    policy, critic = chat.prompt_ids(state), chat.prompt_ids(prompts.predict_messages(state, ADD))
    assert critic[: len(policy)] == policy and "Adds to the count." in chat.tokenizer.decode(policy)
    assert prompts.state("Play.", "x", tools=[]) == prompts.state("Play.", "x")  # an empty list is none


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [("qwen", ""), ("llama", ""), ("knows none", "does not show the schemas"), ("no system", "does not show the schemas")],
)
def test_a_template_that_swallows_tools_is_found_out(name, obstacle):
    assert obstacle in CHATS[name].template.tools_obstacle and bool(obstacle) is bool(CHATS[name].template.tools_obstacle)


def test_one_that_shows_schemas_and_swallows_results_is_told_both_in_plain_text():
    swallows = QWEN.template.replace("'\\n<tool_response>\\n' + m.content + '\\n</tool_response>'", "''")
    chat = Chat(type(QWEN)(swallows, QWEN.special, QWEN.marks).tokenizer(), 8192)
    assert "does not show the results" in chat.template.tools_obstacle
    results = [Message("tool", "7"), Message("tool", "8"), Message("user", "Go on.")]
    text = chat.tokenizer.decode(chat.prompt_ids(dialogue_after(opened(chat, "Play."), ADD, results)))
    responses = "<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>\nGo on.<|im_end|>"
    assert text.startswith("<|im_start|>system\nPlay.\n\nYou may call") and "Adds to the count." in text and responses in text


def test_a_window_of_turns_keeps_the_tools_and_whole_turns():
    state: tuple[Message, ...] = opened(CHATS["qwen"], "Play.")
    for turn in "abc":
        state = dialogue_after(state, turn, [Message("tool", f"{turn}{n}") for n in range(2)], 2)
    assert [m.content for m in state[3:]] == ["b", "b0", "b1", "c", "c0", "c1"] and state[:3] == opened(CHATS["qwen"], "Play.")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I add. {ADD}\n{ADD}", "I add.", [Call("step", {"by": 2})] * 2),
        ('{"name": "step", "parameters": {"by": 2}}', "", [Call("step", {"by": 2})]),
        ('```json\n{"type": "function", "name": "step", "arguments": "{}"}\n```', "", [Call("step", {})]),
        ('[{"function": {"name": "a", "arguments": {}}}, {"name": "b"}]', "", [Call("a", {}), Call("b", {})]),
        ("Is it big?", "Is it big?", []),
        ('{"answer": 5}', '{"answer": 5}', []),
        ('I say {"name": "step"}', 'I say {"name": "step"}', []),
        ("", "", []),
    ],
)
def test_calls_are_read_from_a_turn(text, content, calls):
    assert read_calls(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{'name': 'step'}\n</tool_call>",
        '<tool_call>\n{"name": "step", "arguments": {"by": ',
        "<tool_call></tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "step", "arguments": [2]}</tool_call>',
        '{"name": "step", "arguments": "{"}',
        '{"name": "step"} and more',
        '{"name": ' + "[" * 5000,
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_and_no_text(text):
    (error,) = read_calls(text)[1]
    assert isinstance(error, str) and len(error) < 200


@given(st.text(max_size=60) | st.text(alphabet=st.sampled_from('<tool_call>/{}"name:[],'), max_size=80))
def test_no_text_breaks_the_reader(text):
    content, calls = read_calls(text)
    assert isinstance(content, str) and all(isinstance(call, (Call, str)) for call in calls)


def test_calls_in_a_form_of_the_models_own_reach_the_environment_in_ours():
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<function=(?P<name>\w+)>",
                "close": "</function>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
    chat = Chat(QWEN.tokenizer(), 8192, tool_template=template)
    engine = ScriptedEngine(chat, lambda prompt, weights: 'I add.<function=step>{"by": 2}</function>')
    (generation,) = engine.generate([Request(chat.prompt_ids(opened(chat, "")), 64)])
    assert read_calls(chat.with_calls(generation, "x")) == ("I add.", [Call("step", {"by": 2})])
    engine.answer = lambda prompt, weights: '<function=step>{"by"</function>'
    (generation,) = engine.generate([Request(chat.prompt_ids(opened(chat, "")), 64)])
    assert chat.with_calls(generation, "as it was") == "as it was"
    with pytest.raises(ValueError, match=r"tool_template: .*non-empty dict"):
        Chat(QWEN.tokenizer(), 8192, tool_template={"fields": {}})


def test_a_schema_that_refers_to_an_address_is_not_fetched(monkeypatch):
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *request: asked.append(request))
    with pytest.raises(Exception, match="Unresolvable"):
        check_call("add", {"a": 1}, {"add": {"properties": {"a": {"$ref": "http://127.0.0.1:9/secret"}, "b": True}}})
    assert not asked


@pytest.fixture()
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "Make it five.", "start": 3, "goal": 5}) + "\n")
    return partial(ToolTasks, toolset="toolsets:Counter", train_files=str(path))


class TestToolTasks:
    def test_a_class_written_for_trl_runs_as_it_is(self, tasks):
        env = tasks()
        observation, info = checked_reset(env.reset(seed=0))
        assert observation == "Make it five. It is 3 now."
        assert [tool["function"]["name"] for tool in info["tools"]] == ["name", "step"]
        assert info["tools"][1]["function"]["parameters"]["required"] == ["by"]
        observation, reward, terminated, truncated, info = checked_step(env.step(f"{ADD}\n{Call('name', {})}"))
        assert (observation, reward, terminated, truncated) == ("5\na counter", 0.0, False, False)
        assert info["new_messages"] == [
            {"role": "tool", "name": "step", "content": "5"},
            {"role": "tool", "name": "name", "content": "a counter"},
        ]
        assert env.step("It is five.")[1:3] == (1.0, True) and env._info()["success"] is True

    @pytest.mark.parametrize(
        ("turn", "error"),
        [
            (str(Call("jump", {})), "there is no tool 'jump'; tools are name, step"),
            (str(Call("reset", {})), "there is no tool 'reset'"),
            (str(Call("step", {"by": "2"})), "step: '2' is not of type 'integer', at by"),
            (str(Call("step", {})), "step: 'by' is a required property"),
            (str(Call("step", {"by": 1, "to": 2})), "TypeError: "),
            (str(Call("step", {"by": 13})), "RuntimeError: unlucky"),
            ("<tool_call>{", "a tool call must be one JSON object"),
        ],
    )
    def test_what_is_wrong_with_a_call_goes_back_and_the_episode_goes_on(self, tasks, turn, error):
        env = tasks()
        env.reset(seed=0)
        _, _, terminated, truncated, info = env.step(turn)
        (message,) = info["new_messages"]
        assert message["content"].startswith(f"Error: {error}") and message["error"] is True and not (terminated or truncated)
        assert env.step(str(Call("step", {"by": 2, "note": None})))[0] == "5"  # an argument that may be None

    def test_the_last_turn_pays_though_it_calls(self, tasks):
        env = tasks(max_turns=1)
        env.reset(seed=0)
        assert env.step(ADD)[1:4] == (1.0, True, False)
        env.reset(seed=0)
        assert env.step(str(Call("name", {})))[1:4] == (0.0, False, True)

    def test_a_reward_function_of_trls_kind(self, tasks):
        env = tasks(reward=reward)
        for answer, paid in (("It is 5.", 1.0), ("It is six.", 0.0)):
            env.reset(seed=0)
            env.step(ADD)
            assert env.step(answer)[1] == paid

    def test_a_public_method_without_a_docstring_is_named(self, tasks):
        with pytest.raises(ValueError, match=r"Undocumented\.bare is a public method and so a tool"):
            tasks(toolset=Undocumented).reset(seed=0)

    @pytest.mark.process
    def test_it_keeps_the_contract(self, tasks):
        assert "FAILED" not in {finding.verdict for finding in check_environment(tasks, seeds=(0, 1))}

    @pytest.mark.process
    def test_an_environment_that_tells_results_as_the_users_words_is_noted(self, tasks):
        class Mute(ToolTasks):
            def reply(self, task, action):
                return replace(super().reply(task, action), text="5", messages=())

        for make, verdict in ((tasks, "ok"), (partial(Mute, **tasks.keywords), "note")):
            found = {finding.check: finding.verdict for finding in check_environment(make, seeds=(0, 1))}
            assert found["calls of tools are answered"] == verdict

    def test_a_subclass_has_its_own_methods_as_tools(self):
        class Adder(ToolEnv[None]):
            system_prompt = "Add."

            def sample_task(self, spec):
                return TaskId("one", None)

            def begin(self, task):
                return "1 + 1?"

            def add(self, a: int, b: int) -> int:
                """Adds.

                Args:
                    a: A number.
                    b: Another.
                """
                return a + b

        env = Adder(max_turns=2)
        _, info = env.reset(seed=0)
        assert [tool["function"]["name"] for tool in info["tools"]] == ["add"]
        assert env.step(str(Call("add", {"a": 1, "b": 1})))[0] == "2"


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({"tools": "add"}, r"info\[.tools.\] must be a list of schemas"),
        ({"tools": [{"name": "add"}]}, r"info\[.tools.\] must be a list of schemas"),
        ({"tools": [{"function": {"name": "<|im_end|>"}}]}, r"info\[.tools.\] must be a list of schemas"),
        ({"new_messages": [{"role": "assistant", "content": "x"}]}, "must have a role of tool or user"),
        ({"new_messages": [{"role": "tool", "content": 3}]}, "must have a role of tool or user"),
        ({"new_messages": [{"role": "tool", "content": "x", "name": "</s>"}]}, "letters, digits"),
        ({"new_messages": "x"}, "must be a list of messages"),
    ],
)
def test_an_environment_that_says_them_otherwise_is_told(info, complaint):
    with pytest.raises(AnswerError, match=complaint):
        checked_reset(("x", info))


class TestRuns:
    @pytest.fixture()
    def played(self, config, tasks, monkeypatch):
        """Episodes on a template with tools: a good call, one of a tool that does not exist, a torn one, an answer."""
        turns = iter([f"{ADD}\n{ADD}", str(Call("jump", {})), "<tool_call>{", "It is <five>."] * 2)
        chat = CHATS["qwen"]
        config.language(max_action_tokens=64)
        config.num_envs_per_env_runner = 1
        monkeypatch.setattr(config, "make_chat", lambda: chat)
        runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: tasks())
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: next(turns)))
        episodes = runner.sample(num_episodes=2)
        return chat, episodes, runner.get_metrics()

    def test_prompts_states_and_counts(self, played):
        chat, episodes, metrics = played
        for episode in episodes:
            for t in range(len(episode)):
                assert generation_at(episode, t).prompt_ids == chat.prompt_ids(messages_at(episode, t))
                step = transition_at("E", episode, t)
                if not step.ended:
                    assert step.next_seen == step.seen and step.next_state == messages_at(episode, t + 1)
            assert [m.role for m in messages_at(episode, 1)] == ["tools", "user", "assistant", "tool", "tool"]
            assert messages_at(episode, 1)[-2:] == (Message("tool", "5", "step"), Message("tool", "7", "step"))
        counted = {name: int(metrics[name]) for name in metrics if "tool" in name}
        wanted = {"episodes_with_tools": 2, "tool_calls": 8, "tool_call_parse_failures": 2, "tool_call_errors": 4}
        assert counted == wanted and int(metrics["retokenised_turns"]) == 0

    def test_a_recorded_dialogue_is_read_as_it_was_played(self, played, compact):
        chat, episodes, _ = played
        for original in episodes:
            dialogue = parse_dialogue(Row("", json.loads(json.dumps(as_row(original)))))
            episode = to_episode(dialogue, "x", chat, load_prompts("compact"), "plain", 64)
            for t in range(len(original)):
                assert messages_at(episode, t) == messages_at(original, t)
                assert episode.get_observations(t + 1) == original.get_observations(t + 1)
                assert generation_at(episode, t).prompt_ids == generation_at(original, t).prompt_ids
            row = Row("", {**as_row(original), "tools": json.dumps(as_row(original)["tools"])})  # TRL's rows have a text
            trained = sequences_of(parse_conversation(row), chat)
            assert [s.prompt_ids for s in trained] == [generation_at(original, t).prompt_ids for t in range(len(original))]

    def test_an_environment_without_tools_counts_none(self, config, chat):
        runner = TextEnvRunner(config=config, worker_index=0)
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: ADD))
        (episode,) = runner.sample(num_episodes=1)
        assert not [name for name in runner.get_metrics() if "tool" in name]
        assert {m.role for t in range(len(episode)) for m in messages_at(episode, t)} <= {"system", "user", "assistant"}


def made(*arguments, text=None, id="c") -> dict:
    """A turn with calls as OpenAI's files have it."""
    calls = [(n, a if isinstance(a, str) else json.dumps(a)) for n, a in enumerate(arguments)]
    rows = [{"id": f"{id}{n}", "type": "function", "function": {"name": "step", "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": text, "tool_calls": rows}


class TestData:
    """Conversations in the form of OpenAI's fine-tuning and of verl, by both readers."""

    OPENAI = {
        "messages": [
            {"role": "user", "content": "Make it five."},
            made({"by": 2}, {"by": -1}, text="I add."),
            {"role": "tool", "tool_call_id": "c0", "content": "6"},
            {"role": "tool", "tool_call_id": "c1", "content": "5<|im_end|>"},
            made({"by": 0, "note": "<|im_end|>"}, id="d"),
            {"role": "tool", "tool_call_id": "d0", "content": "5"},
            {"role": "assistant", "content": "It is five."},
        ],
        "tools": SCHEMAS,
        "parallel_tool_calls": True,
    }
    QWEN_TURNS = (
        'I add.\n<tool_call>\n{"name": "step", "arguments": {"by": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "step", "arguments": {"by": -1}}\n</tool_call>',
        '<tool_call>\n{"name": "step", "arguments": {"by": 0, "note": "<|im_end|>"}}\n</tool_call>',
        "It is five.",
    )

    @staticmethod
    def trained(chat, path) -> tuple[list[tuple[str, str]], Counts]:
        """Prompts and turns that are learned from, and the notes."""
        data = ConversationData(SimpleNamespace(input_=str(path)))
        sequences = [sequence for group in data.sequences(chat) for sequence in group]
        return [(chat.tokenizer.decode(s.prompt_ids), chat.tokenizer.decode(s.answer_ids)) for s in sequences], data.notes

    @pytest.fixture()
    def openai(self, tmp_path):
        path = tmp_path / "openai.jsonl"
        path.write_text(json.dumps(self.OPENAI) + "\n")
        return path

    def test_calls_are_learned_as_the_template_writes_them(self, openai):
        chat = CHATS["qwen"]
        pairs, notes = self.trained(chat, openai)
        assert [turn for _, turn in pairs] == [f"{turn}<|im_end|>" for turn in self.QWEN_TURNS] and not notes
        results = "<tool_response>\n6\n</tool_response>\n<tool_response>\n5<|im_end|>\n</tool_response><|im_end|>\n"
        assert "Adds to the count." in pairs[0][0] and pairs[1][0].startswith(f"{pairs[0][0]}{pairs[0][1]}")
        assert pairs[1][0].endswith(f"<|im_end|>\n<|im_start|>user\n{results}<|im_start|>assistant\n")
        special = [id for id in chat.encode(self.QWEN_TURNS[1]) if id in chat.template.control.special_ids]
        assert special == [chat.end_id]  # not the one that the argument spells

    @pytest.mark.parametrize("in_place", [True, False])
    def test_verls_parquet_is_read_as_it_is(self, tmp_path, openai, in_place):
        """With arguments and schemas as JSON text or as objects, which parquet fills up with nulls."""
        row = json.loads(json.dumps(self.OPENAI))
        if in_place:
            for call in (call for message in row["messages"] for call in message.get("tool_calls") or ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        else:
            row["tools"] = json.dumps(SCHEMAS)
        row |= {"enable_thinking": False, "extra_info": {"index": 1, "split": "train"}}
        del row["parallel_tool_calls"]
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "verl.parquet")
        assert self.trained(CHATS["qwen"], tmp_path / "verl.parquet") == self.trained(CHATS["qwen"], openai)

    def test_what_a_template_cannot_write_is_left_out_and_named(self, openai):
        pairs, notes = self.trained(CHATS["llama"], openai)
        assert [turn.removesuffix("<|eot_id|>") for _, turn in pairs] == [
            '{"name": "step", "parameters": {"by": 0, "note": "<|im_end|>"}}',
            "It is five.",
        ]
        assert notes == {UNWRITTEN: 1} and "\n\nI add.<|eot_id|>" in pairs[0][0]
        pairs, notes = self.trained(CHATS["knows none"], openai)  # in the form that its prompt describes
        assert [read_calls(turn.removesuffix("<|eot_id|>"))[1] for _, turn in pairs[:2]] == [
            [Call("step", {"by": 2}), Call("step", {"by": -1})],
            [Call("step", {"by": 0, "note": "<|im_end|>"})],
        ]
        by_token = type(QWEN)(QWEN.template.replace("\\n<tool_call>", "[CALL]"), (*QWEN.special, "[CALL]"), QWEN.marks)
        pairs, notes = self.trained(Chat(by_token.tokenizer(), 8192), openai)
        assert [turn for _, turn in pairs] == ["It is five.<|im_end|>"] and notes == {UNWRITTEN: 2}

    @pytest.mark.parametrize("arguments", ["{", "[1]", "null"])
    def test_a_call_that_cannot_be_read_is_left_out_and_named(self, openai, arguments):
        row = {**self.OPENAI, "messages": [*self.OPENAI["messages"][:1], made(arguments), *self.OPENAI["messages"][5:]]}
        openai.write_text(json.dumps(row))
        pairs, notes = self.trained(CHATS["qwen"], openai)
        assert [turn for _, turn in pairs] == ["It is five.<|im_end|>"] and notes == {UNREADABLE: 1}

    @pytest.mark.parametrize("name", CHATS)
    def test_a_log_with_calls_is_an_episode_that_could_have_been_played(self, name):
        chat = CHATS[name]
        dialogue = parse_dialogue(Row("", {**self.OPENAI, "reward": 1.0}), False, chat.template.turn)
        episode = to_episode(dialogue, "x", chat, load_prompts("compact"), "plain", 64)
        assert dialogue.learned == (name != "llama", True, True)
        assert read_calls(episode.get_actions(1))[1] == [Call("step", {"by": 0, "note": "<|im_end|>"})]
        for t in range(3):
            assert generation_at(episode, t).prompt_ids == chat.prompt_ids(messages_at(episode, t))
        again = parse_dialogue(Row("", json.loads(json.dumps(as_row(episode)))), False, chat.template.turn)
        assert (again.actions, again.learned, again.answers[1]) == (dialogue.actions, dialogue.learned, dialogue.answers[1])


class TestExpert:
    """An environment of one's own with a tool and an expert, from its file of conversations to a run's configuration."""

    @pytest.fixture()
    def chats(self, tmp_path):
        out = tmp_path / "sums.jsonl"
        chosen = ["--skill", "1", "--roles", "policy", "--out", str(out)]
        result = CliRunner().invoke(app, ["env", "expert", "sum_task:SumTask", "--episodes", "3", *chosen])
        assert result.exit_code == 0 and "100% of the episodes were won" in result.output
        return out

    def test_its_calls_and_answers_are_what_is_learned(self, chats):
        pairs, notes = TestData.trained(CHATS["qwen"], chats)
        assert len(pairs) == 6 and not notes
        for (first, call), (second, answer) in zip(pairs[::2], pairs[1::2], strict=True):
            a, b = map(int, re.search(r"What is (\d+) \+ (\d+)\?", first).groups())
            assert "Adds two numbers." in first and read_calls(call.removesuffix("<|im_end|>"))[1] == [
                Call("add", {"a": a, "b": b})
            ]
            assert f"<tool_response>\n{a + b}\n</tool_response>" in second and answer == f"{a + b}<|im_end|>"

    def test_a_run_takes_it(self, chats, model_path):
        config = {"env_config": {"top": 99}, "input_": str(chats), "language_model": model_path, "max_action_tokens": 48}
        entry = {"run": "SFT", "env": "sum_task:SumTask", "stop": {"training_iteration": 1}, "config": config}
        assert tune_arguments(read_experiment("sums", entry, "sums"))
        entry["config"]["env_config"] = {"topp": 99}
        with pytest.raises(ValueError, match="topp"):
            read_experiment("sums", entry, "sums")


class TestServiceDesk:
    def test_its_expert_settles_a_task_by_calls(self):
        env = ServiceDesk()
        _, info = env.reset(seed=0)
        assert len(info["tools"]) == 7 and "Tools:" not in info["system_prompt"] and "JSON" not in info["system_prompt"]
        told: list[dict] = []
        while info["success"] is None:
            *_, info = env.step(env.expert_action())
            told += info.get("new_messages", [])
        assert info["success"] and {"find_user", "get_order"} <= {message["name"] for message in told}
        assert not any(message.get("error") for message in told)

    def test_a_task_file_that_plays_it_offers_its_tools(self, tmp_path):
        """Fails where a task set swallows them: the agent would not know what it can do."""
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"env_str": "ServiceDesk@{}"}) + "\n")
        env = TaskSet(train_files=str(file))
        _, info = env.reset(seed=0)
        assert len(info["tools"]) == 7
        *_, info = env.step(str(Call("get_order", {"order_id": "W1001"})))
        assert [message["role"] for message in info["new_messages"]] == ["tool"]


class TestEndpoints:
    def test_schemas_go_out_and_calls_come_back(self, serve):
        call = {"id": "c1", "type": "function", "function": {"name": "step", "arguments": '{"by": 2}'}}
        server = serve(say=lambda messages: {"content": "I add.", "tool_calls": [call]})
        chat = EndpointChat(CHATS["qwen"])
        engine = EndpointEngine(chat, server.url, "m")
        state = dialogue_after(opened(chat, "Play."), ADD, [Message("tool", "5", "step")])
        state = dialogue_after(state, "<tool_call>{", [Message("tool", "Error: no JSON")])
        (generation,) = engine.generate([Request((1,), 64, messages=state)])
        (asked,) = server.asked
        assert asked["tools"] == SCHEMAS
        _, _, made, result, torn, error = asked["messages"]
        assert made["content"] == "" and made["tool_calls"][0]["function"] == {"name": "step", "arguments": '{"by": 2}'}
        assert result == {"role": "tool", "content": "5", "name": "step", "tool_call_id": made["tool_calls"][0]["id"]}
        assert torn == {"role": "assistant", "content": "<tool_call>{"}
        assert error == {"role": "user", "content": "Error: no JSON"}
        assert read_calls(chat.decode(generation.token_ids)) == ("I add.", [Call("step", {"by": 2})])

    def test_without_tools_nothing_is_sent_of_them(self, serve):
        server = serve()
        EndpointEngine(EndpointChat(CHATS["qwen"]), server.url, "m").generate(
            [Request((1,), 64, messages=(Message("user", "x"),))]
        )
        assert "tools" not in server.asked[0] and server.asked[0]["messages"] == [{"role": "user", "content": "x"}]


class TestGuessNumberTools:
    def test_its_expert_finds_every_number_by_calls_within_the_turns(self):
        for top, max_turns in ((10, 8), (20, 10)):
            env = GuessNumberTools(top, max_turns)
            for number in range(1, top + 1):
                env.reset(options={"task_id": f"number-{number}"})
                ended = False
                while not ended:
                    _, reward, ended, truncated, info = checked_step(env.step(env.expert_action()))
                    assert not truncated and not any(message.get("error") for message in info["new_messages"])
                assert info["success"] and reward == 1.0

    def test_what_a_wrong_call_is_told(self):
        env = GuessNumberTools(top=10, max_turns=9)
        observation, _ = env.reset(options={"task_id": "number-7"})
        assert observation == "Guess my number. It is above 0. It is below 11."
        for turn, told in (
            (Call("guess", {"number": "seven"}), "Error: guess: 'seven' is not of type 'integer', at number"),
            (Call("guess", {}), "Error: guess: 'number' is a required property"),
            (Call("midle", {}), "Error: there is no tool 'midle'; tools are guess, middle"),
            (Call("middle", {"above": 5, "below": 6}), "Error: there is no number above 5 and below 6"),
            ('<tool_call>{"name": "guess"', "Error: a tool call must be one JSON object"),
            ("Is it 7?", "Call guess or middle."),
        ):
            text, reward, terminated, _, info = checked_step(env.step(str(turn)))
            assert text.startswith(told) and (reward, terminated, info["success"]) == (0.0, False, None)
        assert env.step(str(Call("guess", {"number": 3})))[0] == "It is above 3."

    def test_a_turn_has_one_guess(self):
        """Fails where many calls in a turn are many guesses: a policy would learn to try all numbers at once."""
        env = GuessNumberTools(top=10)
        env.reset(options={"task_id": "number-7"})
        text, reward, *_ = env.step("\n".join(str(Call("guess", {"number": number})) for number in range(1, 11)))
        assert reward == 0.0 and text.splitlines() == ["It is above 1.", *["Error: you have one guess each turn"] * 9]

    def test_the_expert_compares_calls(self):
        env = GuessNumberTools(top=10)
        env.reset(options={"task_id": "number-7"})
        middle, guess = Call("middle", {"above": 0, "below": 11}), Call("guess", {"number": 6})
        known = "It is above 0 and below 11, so {} is best, and {} was said."
        for said, good, reason in (
            (middle, True, known.format("middle 0 11", "middle 0 11")),
            (guess, True, known.format("guess 6", "guess 6")),
            (Call("guess", {"number": 9}), False, known.format("middle 0 11", "guess 9")),
            ("Is it 5?", False, known.format("middle 0 11", "no call")),
        ):
            assert env.expert_judgement(str(said)) == (good, reason)
        env.step(str(middle))
        assert env.expert_judgement(str(middle)) == (False, known.format("guess 5", "middle 0 11"))

    def test_an_engine_can_enforce_the_critiques_of_calls(self):
        """Fails where a fix begins with the tag of a call, which no field of an enforced answer may."""
        prompts = load_prompts("small", "GuessNumberTools")
        expert = Expert(GuessNumberTools(top=10, max_turns=8), "GuessNumberTools", prompts, skill=0.4)
        texts = [expert.critique(step) for episode in expert.episodes(20) for step in episode.steps]
        pattern = prompts.forms.critique.pattern(96)
        assert texts and all(re.fullmatch(pattern, text) for text in texts)
        fixes = [text.rpartition("Fix: ")[2] for text in texts if "Optimal: No" in text]
        assert fixes and all(isinstance(read_calls(fix)[1][0], Call) for fix in fixes)
