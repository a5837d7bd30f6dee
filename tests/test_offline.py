"""Logged dialogues: what is written is read back, what is malformed is refused with its line, and a run learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from scripted_engine import ScriptedEngine

from rllib_nlac import NLACConfig
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.envs.rows import Row
from rllib_nlac.episode import ENVIRONMENT, GENERATION, MESSAGES
from rllib_nlac.replay.buffer import TextReplayBuffer, transition_at
from rllib_nlac.replay.conversations import parse_conversation
from rllib_nlac.replay.dialogues import DialogueData, as_row, parse_dialogue, to_episode, write_dialogues
from rllib_nlac.replay.messages import CALLING, TOO_LONG, notice
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Message


def row(**fields) -> Row:
    said = [("system", "s"), ("user", "o0"), ("assistant", "a0"), ("user", "o1"), ("assistant", "a1"), ("user", "o2")]
    messages = [{"role": role, "content": content} for role, content in said]
    return Row("log.jsonl, line 3", {"messages": messages, "rewards": [0.5, 1.0], **fields})


def say(*lines: str) -> list[dict[str, str]]:
    """Messages, each as "role: content"."""
    return [dict(zip(("role", "content"), line.split(": ", 1), strict=True)) for line in lines]


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


class TestRows:
    def test_a_row_is_an_episode(self):
        dialogue = parse_dialogue(row(success=True, task_id=7))
        assert (
            dialogue.system_prompt == "s" and dialogue.observations == ("o0", "o1", "o2") and dialogue.actions == ("a0", "a1")
        )
        assert dialogue.rewards == (0.5, 1.0) and (dialogue.terminated, dialogue.truncated) == (True, False)
        assert (dialogue.success, dialogue.task_id) == (True, "7")

    def test_an_end_that_the_environment_calls_both_is_written_as_one(self):
        """Fails where a log that was written here is refused here."""
        episode = SingleAgentEpisode(id_="both")
        episode.add_env_reset("o0", {})
        episode.add_env_step("o1", "a0", 1.0, {"success": True}, terminated=True, truncated=True)
        assert parse_dialogue(Row("", as_row(episode))).terminated

    def test_a_later_system_message_is_no_system_prompt(self):
        lines = say("system: s", "user: o", "system: later", "assistant: a")
        dialogue = parse_dialogue(row(messages=lines, rewards=[1.0]))
        assert (dialogue.system_prompt, dialogue.observations) == ("s", ("o\nlater", ""))

    def test_one_reward_is_paid_at_the_end(self):
        fields = {key: value for key, value in row().fields.items() if key != "rewards"}
        assert parse_dialogue(Row("", {**fields, "reward": 2})).rewards == (0.0, 2.0)

    def test_other_ways_to_write_a_dialogue(self):
        messages = [
            {"role": "assistant", "content": "a0"},
            {"role": "tool", "content": "x"},
            {"role": "user", "content": "y"},
            {"role": "assistant", "content": "a1"},
        ]
        dialogue = parse_dialogue(Row("", {"messages": messages, "reward": 1, "truncated": True, "success": None}))
        assert dialogue.observations == ("", "x\ny", "") and (dialogue.terminated, dialogue.truncated) == (False, True)

    @pytest.mark.parametrize(
        ("fields", "complaint"),
        [
            ({"messages": []}, "'messages' must be a list"),
            ({"messages": [{"role": "user", "content": "x"}]}, "no message is the assistant's"),
            ({"messages": [{"role": "human", "content": "x"}]}, "message 0 must have a role of system, user"),
            ({"messages": [{"role": "user"}]}, "message 0 must have a content"),
            ({"rewards": [1.0]}, "there are 2 actions, and 'rewards' is"),
            ({"rewards": [1.0, "x"]}, "a reward must be a number, and it is str 'x'"),
            ({"rewards": [1.0, float("nan")]}, "must be a finite number"),
            ({"rewards": [1.0, 10**400]}, "must be a finite number"),
            ({"rewards": None}, "either 'rewards', one for each action, or 'reward'"),
            ({"reward": 1.0}, "either 'rewards'"),
            ({"terminated": True, "truncated": True}, "this one is both"),
            ({"terminated": "yes"}, "'terminated' must be true or false"),
            ({"terminated": 0}, "'terminated' must be true or false, and it is 0"),
            ({"terminated": 1.0}, "'terminated' must be true or false, and it is 1.0"),
            ({"truncated": 1}, "'truncated' must be true or false, and it is 1"),
            ({"success": 0}, "'success' must be true or false, and it is 0"),
            ({"terminated": False}, "only episodes that have ended can be learned from"),
            ({"terminated": False, "truncated": False}, "'terminated' is false and 'truncated' is not true"),
        ],
    )
    def test_a_malformed_row_is_named_with_its_line(self, fields, complaint):
        with pytest.raises(ValueError, match=f"^log.jsonl, line 3: .*{complaint}"):
            parse_dialogue(row(**fields))

    @settings(max_examples=30)
    @given(
        st.lists(st.tuples(words, words, st.floats(-5, 5)), min_size=1, max_size=4),
        st.booleans(),
        st.sampled_from([None, True, False]),
    )
    def test_what_is_written_is_read_back(self, chat, compact, steps, terminated, success):
        messages = [{"role": "user", "content": "start"}]
        for action, observation, _ in steps:
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        fields = {
            "messages": messages,
            "rewards": [reward for *_, reward in steps],
            "terminated": terminated,
            "truncated": not terminated,
            "success": success,
            "task_id": "t",
        }
        dialogue = parse_dialogue(Row("", fields))
        again = as_row(to_episode(dialogue, "e", chat, compact, "plain", room=1))
        assert parse_dialogue(Row("", again)) == dialogue

    def test_which_environment_a_task_set_played_is_written_and_read(self, chat, compact):
        """Fails where a log is read as the task set's own: the critic would be asked by other prompts."""
        fields = {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "x"}], "reward": 1.0}
        for name in ("TwentyQuestions", None):
            dialogue = parse_dialogue(Row("", {**fields, ENVIRONMENT: name, "environment": ["another's"]}))
            episode = to_episode(dialogue, "e", chat, compact, "plain", room=1)
            assert transition_at("TaskSet", episode, 0).env == (name or "TaskSet")
            assert as_row(episode).get(ENVIRONMENT) == name and parse_dialogue(Row("", as_row(episode))) == dialogue

    def test_a_long_task_id_is_written_so_that_it_can_be_read(self, chat, compact):
        fields = {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "x"}], "reward": 1.0}
        ids = []
        for name in ("a" * 500 + "b", "a" * 500 + "c", "short"):
            episode = to_episode(parse_dialogue(Row("", fields)), "e", chat, compact, "plain", room=1)
            episode.infos[0]["task_id"] = name
            ids.append(parse_dialogue(Row("", as_row(episode))).task_id)
        assert len(set(ids)) == 3 and ids[2] == "short" and ids[0].startswith("aaa")


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]}
HEARD = {"role": "tool", "content": "A door.", "tool_call_id": "1", "name": "look"}


class TestTurnsThatAreNotLearnedFrom:
    """By either reader: logs for replay, and conversations for SFT."""

    MESSAGES = (
        *say("user: Go."),
        CALL,
        HEARD,
        {**CALL, "content": "I look again."},
        HEARD,
        *say("assistant: Open it.", "user: Won."),
    )

    def test_calls_and_weights_of_0_stay_in_the_history_and_are_not_learned_by_either_reader(self, chat, compact):
        """Fails where a call is the action "", or where one of the readers alone heeds a weight."""
        for more in ([], say("assistant: Bye.", "user: Over.")):
            messages = [*self.MESSAGES, *({**each, "weight": 0} if each["role"] == "assistant" else each for each in more)]
            given = Row("", {"messages": messages, "reward": 1.0})
            logged, conversation = parse_dialogue(given), parse_conversation(given)
            assert logged.actions == ("", "I look again.", "Open it.", *["Bye."] * bool(more))
            assert [action for action, learned in zip(logged.actions, logged.learned, strict=True) if learned] == ["Open it."]
            assert [conversation.messages[place].content for place in conversation.trained] == ["Open it."]
            assert logged.notes == conversation.notes and logged.notes[CALLING] == 2
            episode = to_episode(logged, "e", chat, compact, "plain", room=1)
            (place,) = conversation.trained
            assert episode.get_extra_model_outputs(MESSAGES, 2)[-place:] == conversation.messages[:place]
            again = parse_dialogue(Row("", as_row(episode)))
            assert (again.actions, again.learned) == (logged.actions, logged.learned)

    def test_the_buffer_keeps_them_and_draws_the_others(self, chat, compact, tmp_path):
        """Also from a checkpoint, and in a buffer of another capacity. Fails where a priority of 0 makes every weight 0."""
        dialogue = parse_dialogue(Row("", {"messages": list(self.MESSAGES), "reward": 1.0}))
        plain = parse_dialogue(row(truncated=True))
        buffer, smaller = (TextReplayBuffer(env="E", seed=0, capacity=capacity) for capacity in (100, 50))
        for number, each in enumerate((plain, dialogue, plain, dialogue)):
            buffer.add([to_episode(each, f"e{number}", chat, compact, "plain", room=1)])
        buffer.save(tmp_path / "saved")
        smaller.load(tmp_path / "saved")
        for each in (buffer, smaller):
            sample = each.sample_transitions(200, beta=0.4)
            assert {t.action for t in sample.transitions} == {"a0", "a1", "Open it."} and set(sample.weights) == {1.0}
            assert each.mean_priority == 1.0 and each.get_num_timesteps() == 6
            each.update_priorities_of(sample.nodes, np.ones(200))
        buffer.capacity = 5
        buffer.add([to_episode(plain, "last", chat, compact, "plain", room=1)])
        assert [len(episode) for episode in buffer.episodes] == [3, 2]
        assert {t.action for t in buffer.sample_transitions(50, 0.4).transitions} == {"a0", "a1", "Open it."}

    def test_a_reasoning_is_the_thought_of_a_model_that_thinks_and_counted_of_others(self, chat):
        """Fails where a prompt that opens the block itself is followed by a second mark."""
        turn = {"role": "assistant", "content": "Open it.", "reasoning_content": "A door opens."}
        given = Row("", {"messages": [*say("user: Go."), turn], "reward": 1.0})
        spoken = "<think>\nA door opens.\n</think>\n\nOpen it."
        assert (
            parse_dialogue(given, thinks=True).actions
            == (parse_conversation(given, thinks=True).messages[1].content,)
            == (spoken,)
        )
        assert not parse_dialogue(given, thinks=True).notes
        assert parse_dialogue(given).actions == ("Open it.",)
        assert notice(parse_dialogue(given).notes) == "config.input_: 1 messages have 'reasoning_content', which is not read"
        prompt = chat.prompt_ids((Message("user", "Go."),))
        opened = (*prompt, *chat.tokenizer.encode("<think>\n", add_special_tokens=False))
        assert chat.encode_turn(opened, spoken) == chat.encode(spoken.removeprefix("<think>\n"))
        assert chat.encode_turn(prompt, spoken) == chat.encode(spoken)

    def test_what_is_not_read_of_messages_is_named_and_counted(self):
        """Empty values, as parquet has them for every key of any row, are none. Fails where hostile names fill the screen."""
        messages = [*say("user: Go."), {**say("assistant: a")[0], "logprobs": [1], "name": None, "audio": ""}, HEARD, HEARD]
        assert parse_dialogue(Row("", {"messages": messages, "reward": 1.0})).notes == {
            "messages have 'logprobs', which is not read": 1,
            "messages have 'tool_call_id', which is not read": 2,
            "messages have 'name', which is not read": 2,
        }
        hostile = {**say("assistant: a")[0], **{f"\x1b[2J{n}" * 99: 1 for n in range(99)}}
        text = notice(parse_conversation(Row("", {"messages": [*say("user: Go."), hostile]})).notes)
        assert len(text) < 2000 and text.isprintable() and text.endswith("and 79 kinds more")


class TestEpisodes:
    def test_they_are_what_an_env_runner_would_have_recorded(self, config, chat, compact, tmp_path):
        """Episodes of a runner, written and read, differ only in what nobody logged: log-probabilities and versions."""
        runner = TextEnvRunner(config=config, worker_index=0)
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: "Is it a dog?"))
        played = runner.sample(num_episodes=6)
        write_dialogues(tmp_path / "log.jsonl", played)
        read = [parse_dialogue(Row("", json.loads(line))) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        for original, dialogue in zip(played, read, strict=True):
            episode = to_episode(dialogue, original.id_, chat, compact, "plain", config.model_defaults.max_action_tokens)
            for t in range(len(original)):
                a, b = transition_at("E", original, t), transition_at("E", episode, t)
                assert (a.state, a.action, a.observation, a.reward) == (b.state, b.action, b.observation, b.reward)
                assert (a.ended, a.terminated, a.truncated) == (b.ended, b.terminated, b.truncated)
                assert (a.episode_success, a.returns_to_go) == (b.episode_success, b.returns_to_go)
                assert (a.generation.prompt_ids, a.generation.token_ids) == (b.generation.prompt_ids, b.generation.token_ids)
                assert np.isnan(b.generation.logprobs).all()

    @pytest.mark.parametrize("changes", [{"history_turns": 1}, {"action_format": "react"}])
    def test_they_are_read_as_the_configuration_has_them_played(self, config, chat, compact, changes):
        """Fails where a window of turns, or the format of actions, holds for what is played alone."""
        for key, value in changes.items():
            setattr(config, key, value)
        runner = TextEnvRunner(config=config, worker_index=0)
        runner.attach(ScriptedEngine(chat, lambda prompt, weights: "Thought: t\nAction: Is it a dog?"))
        played = next(episode for episode in runner.sample(num_episodes=6) if len(episode) > 3)
        data = DialogueData(config)
        data.dialogues = lambda: [parse_dialogue(Row("", as_row(played)))]
        (logged,) = data.episodes(chat, compact)
        for t in range(len(played)):
            a, b = transition_at("E", played, t), transition_at("E", logged, t)
            assert (a.state, a.next_state, a.generation.prompt_ids) == (b.state, b.next_state, b.generation.prompt_ids)

    def test_they_begin_as_the_environment_that_was_played_begins(self, config, chat):
        """Fails where the run's own prompts open what a task set played of another environment."""
        config.prompts = {"extends": "compact", "name": "mine", "environments": {"House": {"react": "HOUSE REACT"}}}
        config.action_format, data = "react", DialogueData(config)
        data.dialogues = lambda: [parse_dialogue(row(**{ENVIRONMENT: name})) for name in ("House", None)]
        house, other = data.episodes(chat, config.prompts_for("TaskSet"))
        said = ["HOUSE REACT" in str(transition_at("TaskSet", each, 0).state) for each in (house, other)]
        assert said == [True, False]

    def test_a_dialogue_that_leaves_no_room_for_an_answer_is_left_out(self, config, chat, compact):
        config.max_action_tokens = 500
        data = DialogueData(config)
        data.dialogues = lambda: [parse_dialogue(row(messages=say("user: " + "word " * 40, "assistant: a"), rewards=[1.0]))]
        with pytest.raises(ValueError, match=r"no dialogue is left to learn from: config\.input_: 1 rows exceed"):
            data.episodes(chat, compact)

    def test_a_logged_answer_that_exceeds_the_context_is_left_out(self, config, chat, compact):
        """Fails where the room for an answer of today's is looked at alone: the learner would be given the whole of it."""
        data = DialogueData(config)
        answers = ["word", "word " * chat.max_context]
        messages = [say("user: a", f"assistant: {answer}") for answer in answers]
        data.dialogues = lambda: [parse_dialogue(row(messages=each, rewards=[1.0])) for each in messages]
        (kept,) = data.episodes(chat, compact)
        assert data.notes == {TOO_LONG: 1} and kept.get_actions() == [answers[0]]

    def test_the_fingerprint_is_of_all_that_a_dialogue_says(self, config, chat, compact):
        """Fails where a checkpoint goes on with the same actions and other rewards."""

        def fingerprint(**changes) -> str:
            data = DialogueData(config)
            fields = {"messages": say("user: o", "assistant: a", "user: e"), "rewards": [1.0], **changes}
            data.dialogues = lambda: [parse_dialogue(row(**fields))]
            data.episodes(chat, compact)
            return data.fingerprint

        others = [{"rewards": [0.0]}, {"truncated": True}, {"success": False}, {ENVIRONMENT: "House"}]
        others.append({"messages": say("user: x", "assistant: a", "user: e")})
        assert fingerprint() == fingerprint() and len({fingerprint(), *(fingerprint(**each) for each in others)}) == 6

    @pytest.mark.parametrize("trial", ["default", "ab12_00000"])
    def test_each_run_writes_files_of_its_own(self, tmp_path, trial):
        """Fails where runs without Tune, whose trials are all called default, write over each other's."""
        for number in range(2):
            name = trial if trial == "default" else f"{trial}_{number}"
            config = SimpleNamespace(output=str(tmp_path / "out"))
            run = SimpleNamespace(config=config, trial_id=name, logdir=str(tmp_path / f"{number}"), iteration=0)
            run._recorded = (-1, 0)
            for _ in range(2):
                LanguageAlgorithm._record_dialogues(run, [])
        assert len(list((tmp_path / "out").iterdir())) == 4

    def test_nothing_is_left_of_an_interrupted_write(self, tmp_path, monkeypatch):
        monkeypatch.setattr("rllib_nlac.replay.dialogues.as_row", lambda episode: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_dialogues(tmp_path / "log.jsonl", [None])
        assert not (tmp_path / "log.jsonl").exists()

    def test_the_dialogue_before_each_action_is_its_state(self, chat, compact):
        episode = to_episode(parse_dialogue(row()), "e", chat, compact, "plain", room=1)
        assert episode.get_extra_model_outputs(MESSAGES, 1) == (
            *compact.state("s", "o0"),
            Message("assistant", "a0"),
            Message("user", "o1"),
        )
        assert chat.decode(episode.get_extra_model_outputs(GENERATION, 1).token_ids) == "a1"


def write_log(path, count: int, win: bool = False) -> None:
    rows = []
    for number in range(count):
        questions = [("Is it alive?", "Yes."), ("Is it big?", "No."), ("Is it a dog?", "Correct!" if win else "No.")]
        messages = [{"role": "system", "content": f"You play {number}."}, {"role": "user", "content": "Guess my object."}]
        for action, reply in questions:
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": reply}]
        rows.append({"messages": messages, "reward": float(win), "success": win})
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)  # of nested texts, in several groups
    else:
        path.write_text("".join(json.dumps(fields) + "\n" for fields in rows))


class TestFiles:
    def load(self, config: NLACConfig, chat, compact, input_):
        return DialogueData(config.copy(copy_frozen=False).offline_data(input_=input_)).episodes(chat, compact)

    def test_jsonl_and_parquet(self, config, chat, compact, tmp_path):
        write_log(tmp_path / "a.jsonl", 5)
        write_log(tmp_path / "b.parquet", 4, win=True)
        for input_ in (str(tmp_path), [str(tmp_path / "a.jsonl"), str(tmp_path / "*.parquet")]):
            episodes = self.load(config, chat, compact, input_)
            assert [len(episode) for episode in episodes] == [3] * 9
            assert [episode.get_return() for episode in episodes] == [0.0] * 5 + [1.0] * 4
        buffer = TextReplayBuffer(env="E")
        buffer.add(episodes)
        assert {t.action for t in buffer.sample_transitions(100, 0.0).transitions} == {
            "Is it alive?",
            "Is it big?",
            "Is it a dog?",
        }

    def test_a_malformed_line_is_named(self, config, chat, compact, tmp_path):
        write_log(tmp_path / "a.jsonl", 2)
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"messages": 3}\n')
        with pytest.raises(ValueError, match=r"a.jsonl, line 3: 'messages' must be a list"):
            self.load(config, chat, compact, str(tmp_path / "a.jsonl"))

    def test_dialogues_that_do_not_fit_are_left_out_and_counted(self, config, chat, compact, tmp_path):
        write_log(tmp_path / "a.jsonl", 2)
        lines = (tmp_path / "a.jsonl").read_text()
        (tmp_path / "a.jsonl").write_text(lines + lines.replace("Guess my object.", "Guess. " * 600))
        data = DialogueData(config.offline_data(input_=str(tmp_path)))
        assert len(data.episodes(chat, compact)) == 2 and data.notes == {TOO_LONG: 2}
        (tmp_path / "a.jsonl").write_text(lines.replace("Guess my object.", "Guess. " * 600))
        with pytest.raises(ValueError, match="2 rows exceed the context and are left out; of those that are too long"):
            data.episodes(chat, compact)

    def test_mistakes(self, config, tmp_path):
        with pytest.raises(FileNotFoundError, match="no JSONL or parquet file at '/nowhere'"):
            config.copy(copy_frozen=False).offline_data(input_="/nowhere").validate()
        with pytest.raises(ValueError, match="offline_iterations is 3 and needs input_"):
            config.copy(copy_frozen=False).offline_data(offline_iterations=3).validate()
        for names in (Path("/nowhere"), ["/nowhere"], (Path("/nowhere"),)):
            with pytest.raises(FileNotFoundError, match="no JSONL or parquet file at '/nowhere'"):
                config.copy(copy_frozen=False).offline_data(input_=names).validate()
        for names in ([], [3], ["a", 3], 3, None):  # fails where it is left out without a word, and the run is an online one
            with pytest.raises(ValueError, match=r"config.input_ is .* and must name the dialogues"):
                config.copy(copy_frozen=False).offline_data(input_=names).validate()
        write_log(tmp_path / "a.jsonl", 1)
        alone = NLACConfig().offline_data(input_=str(tmp_path)).evaluation(evaluation_interval=2)
        with pytest.raises(ValueError, match="evaluation_interval is 2 and needs evaluation_config"):
            alone.validate()
        alone.evaluation(evaluation_interval=None).reporting(min_sample_timesteps_per_iteration=100)
        with pytest.raises(ValueError, match="min_sample_timesteps_per_iteration is 100 and is never reached"):
            alone.validate()
        grpo = GRPOConfig().environment("TwentyQuestions").offline_data(input_=str(tmp_path))
        with pytest.raises(ValueError, match="needs an algorithm with a replay buffer"):
            grpo.validate()


class TestTraining:
    def build(self, config: NLACConfig, tmp_path, **offline):
        write_log(tmp_path / "a.jsonl", 8, win=True)
        config.training(episodes_per_iteration=4, train_batch_size_per_learner=16, minibatch_size=16)
        config.num_envs_per_env_runner = 4
        return config.offline_data(input_=str(tmp_path), **offline).build_algo()

    def test_without_an_environment(self, ray_session, lent_engine, config, tmp_path):
        config.env, config.env_config = None, {}
        config.evaluation(
            evaluation_interval=2,
            evaluation_duration=8,
            evaluation_duration_unit="episodes",
            evaluation_config={"env": "TwentyQuestions", "env_config": {"num_objects": 16, "max_turns": 3}},
        )
        algorithm = self.build(config, tmp_path)
        try:
            before = algorithm.learner_group.get_weights()
            results = [algorithm.train() for _ in range(2)]
            after = algorithm.learner_group.get_weights()
            assert any((before["default_policy"][k] != after["default_policy"][k]).any() for k in before["default_policy"])
            losses = results[-1]["learners"]["default_policy"]
            assert np.isfinite(losses["critic_loss"]) and np.isfinite(losses["policy_loss"])
            assert "num_episodes" not in results[-1].get("env_runners", {}) and len(algorithm.local_replay_buffer.episodes) == 8
            assert results[-1]["evaluation"]["env_runners"]["num_episodes"] == 8
        finally:
            algorithm.stop()

    def test_logs_that_do_not_fit_are_refused(self, ray_session, lent_engine, config, tmp_path):
        """Fails where the oldest dialogues are left out without a word."""
        config.training(replay_buffer_config={"capacity": 5})
        with pytest.raises(ValueError, match=r"of 8 only the last [1-7] did\. Raise replay_buffer_config's capacity, 5 turns"):
            self.build(config, tmp_path)

    def test_before_going_online(self, ray_session, lent_engine, config, tmp_path):
        config.offline_data(output=str(tmp_path / "out"))
        algorithm = self.build(config, tmp_path, offline_iterations=2)
        try:
            sizes = []
            for _ in range(4):
                algorithm.train()
                sizes.append(len(algorithm.local_replay_buffer.episodes))
            assert sizes == [8, 8, 12, 16]
            written = sorted(path.name for path in (tmp_path / "out").iterdir())
            assert [name.split("_")[-2] for name in written] == ["00000003", "00000004"]
            rows = [json.loads(line) for name in written for line in (tmp_path / "out" / name).read_text().splitlines()]
            assert len(rows) == 8 and all(parse_dialogue(Row("", fields)).actions for fields in rows)
        finally:
            algorithm.stop()
