"""Conversations of an expert or of a larger model: what each role is shown and says, and that nothing else is learned."""

from __future__ import annotations

import itertools
import json

import pytest
from chat_server import ChatServer, vllm_server
from typer.testing import CliRunner

from rllib_nlac.command.cli import app
from rllib_nlac.envs.guess_number import GuessNumber, GuessNumberTools
from rllib_nlac.envs.math_reasoning import MathReasoning
from rllib_nlac.envs.rows import Row
from rllib_nlac.envs.service_desk.env import ServiceDesk
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.inputs.endpoint import Endpoint
from rllib_nlac.inputs.pretrained import SMOLLM2, prepare
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.replay.conversations import parse_conversation
from rllib_nlac.sampling.expert import ROLES, Expert, Teacher
from rllib_nlac.types import Message

ENVS = {
    "GuessNumber": GuessNumber,
    "GuessNumberTools": GuessNumberTools,
    "TwentyQuestions": lambda: TwentyQuestions(num_objects=16, num_attributes=8, max_turns=6),
    "TextHouse": TextHouse,
    "ServiceDesk": ServiceDesk,
    "MathReasoning": MathReasoning,
}


def written(name: str, skill: float, count: int = 12, seed: int = 0):
    """Episodes and their rows."""
    expert = Expert(ENVS[name](), name, load_prompts("small", name), skill, seed)
    episodes = list(expert.episodes(count))
    rows = [expert.rows(episode, other=other) for episode, other in zip(episodes, [None, *episodes], strict=False)]
    return expert, episodes, rows


@pytest.mark.parametrize("skill", [1.0, 0.5])
@pytest.mark.parametrize("name", ENVS)
def test_every_row_is_a_conversation_whose_answer_parses(name, skill):
    expert, episodes, rows = written(name, skill)
    forms = expert.prompts.forms
    kinds = {row["kind"] for row in itertools.chain(*rows)}
    assert kinds >= {"policy", "predict", "backup", "evaluate"} and len(episodes) == 12
    for row in itertools.chain(*rows):
        conversation = parse_conversation(Row("here", row))
        answer = conversation.messages[-1].content
        if row["kind"] == "policy":
            turns = [place for place, message in enumerate(conversation.messages) if message.role == "assistant"]
            assert list(conversation.trained) == turns
            continue
        assert conversation.trained == (len(conversation.messages) - 1,)
        if row["kind"] in ("predict", "backup"):
            assert forms.future.parse(answer) is not None, answer
        elif row["kind"] == "evaluate":
            assert forms.critique.parse(answer) is not None, answer
    if skill == 1.0:
        assert expert.counts["refine"] == 0 and expert.counts["won"] >= 9  # every turn is the best one
    else:
        assert "refine" in kinds  # and some worlds forgive mistakes


def test_the_same_seed_writes_the_same():
    assert written("GuessNumber", 0.5, seed=3)[2] == written("GuessNumber", 0.5, seed=3)[2]
    assert written("GuessNumber", 0.5, seed=3)[2] != written("GuessNumber", 0.5, seed=4)[2]


def test_a_future_says_what_really_came_and_no_prompt_of_it_shows_it():
    expert, episodes, _ = written("GuessNumber", 0.5)
    for episode in episodes:
        for t, step in enumerate(episode.steps):
            row = expert.predict(episode, t, None)
            answer, shown = row["messages"][-1]["content"], row["messages"][:-2]
            assert answer.startswith(f"Future: {step.reply.split('.')[0]}.")
            assert answer.endswith("SUCCESS" if episode.success else "FAILURE")
            said = [*step.state, Message("assistant", step.action)]
            assert [Message(each["role"], each["content"]) for each in shown] == said
            assert all(each["weight"] == 0 for each in shown if each["role"] == "assistant")


def test_a_backup_follows_the_future_that_it_is_shown_also_a_foreign_one():
    """Fails where the target's outcome is the episode's, which the role cannot see."""
    expert, episodes, _ = written("GuessNumber", 0.5, count=40)
    form, foreign = expert.prompts.forms.future, 0
    for episode, other in itertools.pairwise(episodes):
        for t, step in enumerate(episode.steps):
            row = expert.backup(episode, t, other)
            answer = form.parse(row["messages"][-1]["content"])
            assert answer.text.startswith(step.reply.split(".")[0])
            if not step.ended:
                shown = row["messages"][-2]["content"].partition("This may follow:\n| ")[2].splitlines()[0]
                assert answer.success is shown.endswith("SUCCESS")
                foreign += answer.success is not episode.success
    assert foreign


def test_guess_number_is_halved_and_judged_by_what_is_known():
    env = GuessNumber(top=20, max_turns=5)
    for number in range(1, 21):
        env.reset(options={"task_id": f"number-{number}"})
        over = False
        while not over:
            *_, terminated, truncated, info = env.step(env.expert_action())
            over = terminated or truncated
        assert info["success"]
    env.reset(options={"task_id": "number-17"})
    env.step("10")
    assert env.left() == (11, 20)
    for said, good in (("15", True), ("16", True), ("12", False), ("3", False)):
        assert env.expert_judgement(said) == (good, f"It is above 10 and below 21, so 15 is best, and {said} was said.")
    assert env.expert_judgement("no idea") == (False, "It is above 10 and below 21, so 15 is best, and no number was said.")
    assert env.step("3 or 4")[0] == "Say a number." and env.step("12")[0] == "It is above 12."


def test_twenty_questions_is_judged_by_how_the_objects_are_divided():
    env = ENVS["TwentyQuestions"]()
    env.reset(seed=1)
    good, reason = env.expert_judgement(env.expert_action())
    assert good and reason.startswith("Left: 16 objects. This fits ") and reason.count(",") == 6
    assert env.expert_judgement("hello") == (False, "Left: 16 objects. This asks for none.")
    assert env.expert_judgement(env.table.say(("guess", 0)))[0] is False  # fifteen would be left


def test_the_command_writes_a_whole_file_or_none(tmp_path):
    out = tmp_path / "chats.jsonl"
    result = CliRunner().invoke(app, ["env", "expert", "GuessNumber", "--episodes", "5", "--out", str(out)])
    assert result.exit_code == 0 and "5 of" not in result.output and "conversations" in result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["group"] for row in rows} == {1, 2, 3, 4, 5}
    for arguments, complaint in (
        (["--out", str(tmp_path / "x.csv")], "must be a file that ends in .jsonl"),
        (["--out", str(out), "--roles", "predikt"], "did you mean 'predict'"),
        (["--out", str(out), "--prompts", "smal"], "no prompt set is called"),
        (["--out", str(out), "--teacher", "{base_url: http://127.0.0.1:9/v1}"], "--teacher: model is missing"),
    ):
        result = CliRunner().invoke(app, ["env", "expert", "GuessNumber", "--episodes", "2", *arguments])
        assert result.exit_code == 2 and complaint in result.output, result.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    result = CliRunner().invoke(app, ["env", "expert", "LoggedDialogues", "--out", str(out)])
    assert result.exit_code == 2 and "has no scripted expert: give --teacher" in result.output


class TestTeacher:
    def teacher(self, say) -> tuple[Teacher, ChatServer]:
        server = ChatServer(say=say)
        return Teacher(GuessNumber(), "GuessNumber", load_prompts("small", "GuessNumber"), Endpoint(server.url, "m")), server

    def say(self, messages) -> str:
        asked = messages[-1]["content"]
        if "You know what really came:" in asked or "as in:\nFuture" in asked:
            return "Future: Lower. Then: Correct. SUCCESS"
        if "Optimal:" in asked and "Was it" in asked:
            return "Optimal: No\nReason: It is too high.\nFix: 4"
        return "4" if "better answer" in asked else "9"

    def test_it_plays_and_writes_all_roles_with_hindsight_for_futures_only(self):
        teacher, server = self.teacher(self.say)
        (episode,) = teacher.episodes(1)
        rows = {row["kind"]: row for row in teacher.rows(episode)}
        assert set(rows) == set(ROLES) and rows["refine"]["messages"][-1]["content"] == "4"
        assert [step.action for step in episode.steps] == ["9"] * len(episode.steps)
        hindsight = [each for each in server.asked if "You know what really came" in each["messages"][-1]["content"]]
        assert len(hindsight) == 1 and "You know" not in json.dumps(list(rows.values()))
        enforced = [each["structured_outputs"]["regex"] for each in server.asked if "structured_outputs" in each]
        assert teacher.prompts.forms.future.pattern(256) in enforced and teacher.prompts.forms.critique.pattern(256) in enforced

    @pytest.mark.long
    @pytest.mark.process
    def test_a_real_server_of_a_pretrained_model_plays_and_writes_what_parses(self, tmp_path):
        """smollm2 is as it comes, so its words may be wrong; their form is enforced, and what is read of it is whole."""
        out = tmp_path / "chats.jsonl"
        with vllm_server(str(prepare(SMOLLM2)), tmp_path / "server.log") as url:
            teacher = json.dumps({"base_url": url, "model": "tiny"})
            arguments = ["--episodes", "4", "--config", "{top: 10, max_turns: 4}", "--teacher", teacher, "--out", str(out)]
            result = CliRunner().invoke(app, ["env", "expert", "GuessNumber", *arguments])
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        counted = {kind: sum(row["kind"] == kind for row in rows) for kind in ROLES}
        assert counted["policy"] == 4 and counted["predict"] >= 3 and counted["evaluate"] >= 3, counted
        forms = load_prompts("small", "GuessNumber").forms
        for row in rows:
            form = {"predict": forms.future, "backup": forms.future, "evaluate": forms.critique}.get(row["kind"])
            assert form is None or form.parse(row["messages"][-1]["content"])

    def test_what_does_not_parse_is_left_out_and_counted(self):
        teacher, _ = self.teacher(lambda messages: "nonsense")
        (episode,) = teacher.episodes(1)
        assert [row["kind"] for row in teacher.rows(episode)] == ["policy"]
        assert teacher.counts["predict: not parsed"] == teacher.counts["evaluate: not parsed"] == 1
