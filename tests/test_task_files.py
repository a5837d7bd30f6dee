"""Tasks that strings name, task sets from files, and their reward styles in an environment."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium as gym
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rllib_nlac.envs import registry
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.guess_number import GuessNumber
from rllib_nlac.envs.rows import read_rows
from rllib_nlac.envs.service_desk.tasks import make_tasks
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.envs.task_strings import GymTask, agent_env, parse_env_str, row_env
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.episode import ENVIRONMENT
from rllib_nlac.rewards.sandbox import why_unavailable


def task(env_str: str) -> GymTask:
    """The task of a string that may set everything."""
    return row_env(env_str, trusted=True)


class TestOfficial:
    def test_an_episode_of_the_task(self):
        env = task('TwentyQuestions@{"num_objects": 16, "max_turns": 6, "task_id": "dog"}')
        assert env.prompt == "Guess my object." and "twenty questions" in env.system_prompt
        assert env.step("Is it alive?") == "Yes." and not env.finished
        assert env.step("Is it a dog?") == "Correct!" and env.finished and env.success and env.reward == 1.0
        assert task('MathReasoning@{"level": 1, "seed": 5}').prompt == task('MathReasoning@{"level": 1, "seed": 5}').prompt

    @pytest.mark.parametrize(
        ("env_str", "complaint"),
        [
            ("GuessNumber", "names no environment"),
            ("GuessNumber@{", r"after the '@': not valid JSON \(.* at column 2\)"),
            ("GuessNumber@[1]", "a JSON object must follow the '@', and it is a list"),
            ("GuesNumber@{}", "did you mean 'GuessNumber'"),
            ("Zzz@{}", "known are .*TwentyQuestions"),
            ('TwentyQuestions@{"max_trns": 1}', "did you mean 'max_turns'"),
        ],
    )
    def test_mistakes(self, env_str, complaint):
        with pytest.raises(ValueError, match=complaint):
            task(env_str)

    def test_the_first_at_splits(self):
        assert parse_env_str('A@{"b": "c@d"}') == ("A", {"b": "c@d"})


ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6 * 7?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
    },
    {
        "data_source": "lighteval/MATH",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1/2?"}],
        "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
    },
    {"prompt": "Double it.", "reward_model": {"style": "code-sandbox", "ground_truth": '{"inputs": ["2"], "outputs": ["4"]}'}},
    {"env_str": 'TwentyQuestions@{"num_objects": 16, "max_turns": 6, "task_id": "dog"}'},
    {"env_str": 'MathReasoning@{"level": 1}'},
]
ANSWERS = [["#### 42"], [r"\boxed{0.5}"], ["```python\nprint(2 * int(input()))\n```"], ["Is it big?", "Is it a dog?"]]


@pytest.fixture(params=["jsonl", "parquet"])
def files(request, tmp_path):
    path = tmp_path / f"tasks.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pq.write_table(
            pa.Table.from_pylist(
                [
                    {key: row.get(key) for key in ("data_source", "prompt", "reward_model", "env_str")}
                    for row in ROWS
                    if not isinstance(row.get("prompt"), str)
                ]
            ),
            path,
        )
    return str(path), [row for row in ROWS if request.param == "jsonl" or not isinstance(row.get("prompt"), str)]


def test_an_episode_that_a_rows_environment_loses_is_counted_by_that_environments_reason(monkeypatch, tmp_path):
    def gone(*_):
        raise EpisodeLost("browser_lost", "the browser is gone")

    monkeypatch.setattr(TextHouse, "reply", gone)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"env_str": "TextHouse@{}"}) + "\n")
    env = TaskSet(train_files=str(tmp_path / "rows.jsonl"))
    env.reset(seed=0)
    text, *_, truncated, info = env.step("look")
    assert (text, truncated, info["discard"], info["stop_reason"]) == ("the browser is gone", True, True, "browser_lost")


def named(monkeypatch, tmp_path, first: str, *rows: dict) -> TaskSet:
    """A task set of rows that name an environment of this first observation."""

    class Named(TextHouse):
        def begin(self, task):
            super().begin(task)
            return first

    monkeypatch.setitem(registry.ENVIRONMENTS, "Named", Named)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"env_str": "Named@{}", **row}) + "\n" for row in rows))
    return TaskSet(train_files=str(tmp_path / "rows.jsonl"))


def test_a_rows_own_prompt_stands_before_its_environments(monkeypatch, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A task of rooms."}]
    env = named(monkeypatch, tmp_path, "A room.", {"prompt": messages}, {"prompt": "A room."})
    text, info = env.reset(options={"task_id": "0"})
    assert (text, info["system_prompt"]) == ("A task of rooms.\n\nA room.", "Be brief.")
    text, info = env.reset(options={"task_id": "1"})
    assert text == "A room."  # once, where both say the same
    assert info["system_prompt"].startswith("Find the ")


def test_a_row_whose_agent_would_read_nothing_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: neither the row nor its environment has a prompt"):
        named(monkeypatch, tmp_path, "", {}).reset(seed=0)


def test_of_a_row_as_alone_a_reset_may_discard_and_a_positive_return_is_a_success(monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"env_str": "TextHouse@{}"}) + "\n")
    env = TaskSet(train_files=str(tmp_path / "rows.jsonl"))
    monkeypatch.setattr(TextHouse, "step", lambda self, action: ("Half.", 0.5, True, False, {}))
    env.reset(seed=0)
    *_, terminated, _, info = env.step("look")
    assert terminated and info["success"] is True
    reset = TextHouse.reset
    told = {"discard": True, "stop_reason": "user_failed"}
    monkeypatch.setattr(TextHouse, "reset", lambda self, **how: (reset(self, **how)[0], told))
    with pytest.raises(EpisodeLost) as lost:
        env.reset(seed=0)
    assert lost.value.reason == "user_failed"


def test_the_environments_of_rows_are_closed(monkeypatch, tmp_path):
    made, closed = [], []

    class House(TextHouse):
        def __init__(self, depth: int = 1) -> None:
            super().__init__(depth=depth)
            made.append(self)

        def begin(self, task):
            if len(made) == 3:
                raise EpisodeLost("browser_lost", "the browser is gone")
            return super().begin(task)

        def close(self):
            closed.append(self)

    monkeypatch.setitem(registry.ENVIRONMENTS, "House", House)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"env_str": "House@{}"}) + "\n")
    env = TaskSet(train_files=str(tmp_path / "rows.jsonl"), environments={"House": {}})
    for seed in range(2):
        env.reset(seed=seed)
    assert closed == made[:1]
    with pytest.raises(EpisodeLost):
        env.reset(seed=2)
    assert closed == made and len(made) == 3
    env.reset(seed=3)
    env.close()
    env.close()
    assert closed == made and len(made) == 4
    assert agent_env("look", "House@{}", trusted=True) == 0.0 and closed == made and len(made) == 5


class Picnic(gym.Env):
    """Ends by the weather, which is nobody's turn limit."""

    def __init__(self) -> None:
        self.observation_space, self.turn = TextSpace(), 0
        self.action_space = self.observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "Go out.", {"subgoals": {"out": False}}

    def step(self, action):
        self.turn += 1
        info = {"subgoals": {"out": True}, "success": False, "stop_reason": "rain" if self.turn == 3 else None}
        return "Out.", 0.5, False, self.turn == 3, info


class Bare(Picnic):
    """Says nothing of why it ends."""

    def step(self, action):
        return "Over.", 0.5, False, True, {}


class TestTaskSet:
    @pytest.mark.process
    @pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")
    def test_every_style_is_played(self, files):
        path, rows = files
        env = TaskSet(train_files=path)
        for number, row in enumerate(rows[:-1]):
            _, info = env.reset(seed=0, options={"task_id": str(number)})
            for action in ANSWERS[ROWS.index(row)]:
                _, reward, terminated, _, info = env.step(action)
            assert (reward, terminated, info["success"]) == (1.0, True, True), row
            env.reset(seed=0, options={"task_id": str(number)})
            assert env.step("#### 7 \\boxed{7}")[1] == 0.0

    def ended(self, folder: Path, env_str: str, actions: list[str]) -> tuple[float, bool]:
        """Return and success of a row's episode."""
        path = folder / f"{env_str.partition('@')[0]}.jsonl"
        path.write_text(json.dumps({"env_str": env_str}) + "\n")
        env = TaskSet(train_files=str(path))
        env.reset(seed=0)
        *_, (_, _, terminated, truncated, info) = steps = [env.step(action) for action in actions]
        assert terminated or truncated
        return sum(reward for _, reward, *_ in steps), info["success"]

    def test_whether_it_was_a_success_is_the_environments_own_word(self, tmp_path):
        """Fails where a return of 1 is taken for it."""
        game = 'TwentyQuestions@{"num_objects": 16, "task_id": "dog", "reward": "per_question"}'
        paid, success = self.ended(tmp_path, game, ["Is it big?", "Is it a dog?"])
        assert success is True and paid < 1
        house, actions = TextHouse(depth=1, house=1), []
        house.reset(seed=0)
        while not house.position.keys:
            actions.append(house.expert_action())
            house.step(actions[-1])
        row = {"depth": 1, "house": 1, "max_turns": len(actions), "key_bonus": 1}
        assert self.ended(tmp_path, f"TextHouse@{json.dumps(row)}", actions) == (1.0, False)

    @pytest.mark.parametrize(
        ("env_str", "actions"),
        [
            ('TextHouse@{"depth": 1, "house": 1, "max_turns": 2}', ["x", "y"]),
            ('TextHouse@{"depth": 1, "house": 1}', None),
            ('TwentyQuestions@{"num_objects": 16, "task_id": "dog"}', ["Is it big?", "Is it a dog?"]),
            ('TwentyQuestions@{"num_objects": 16, "task_id": "dog", "max_turns": 1}', ["Is it big?"]),
            ("Picnic@{}", ["Go."] * 3),
            ("Bare@{}", ["Go."]),
        ],
    )
    def test_a_row_ends_as_its_environment_does(self, monkeypatch, tmp_path, env_str, actions):
        monkeypatch.setitem(registry.ENVIRONMENTS, "Picnic", Picnic)
        monkeypatch.setitem(registry.ENVIRONMENTS, "Bare", Bare)
        (tmp_path / "rows.jsonl").write_text(json.dumps({"env_str": env_str}) + "\n")
        wrapped = TaskSet(train_files=str(tmp_path / "rows.jsonl"), environments={"Picnic": {}, "Bare": {}})
        name, config = parse_env_str(env_str)
        task = config.pop("task_id", None)
        env = registry.make(name, config)
        first = env.reset(seed=0, options={"task_id": task} if task else None)
        assert self.told(wrapped.reset(seed=0)) == self.told(first)
        for action in actions or iter(env.expert_action, None):
            direct = env.step(action)
            assert self.told(wrapped.step(action)) == self.told(direct)
            if direct[2] or direct[3]:
                break
        assert direct[2] or direct[3]

    def told(self, answer: tuple) -> tuple:
        """What an EnvRunner counts; an environment that gives no reason ends by a limit, or as its reward says."""
        *step, info = answer
        ended = len(step) > 1 and (step[2] or step[3])
        usual = ("turn_limit" if step[3] else "failure") if ended else None
        success = ended and bool(info.get("success", step[1] > 0))  # a positive return counts where there is no word
        return (*step, info.get("stop_reason") or usual, info.get("subgoals"), success)

    def test_rows_play_tasks_of_its_split_unless_something_says_another(self, tmp_path, monkeypatch):
        def drawn(row: str, split: str, **settings) -> set[str]:
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
            path.write_text(json.dumps({"env_str": row}) + "\n")
            env = TaskSet(**{"train_files" if split == "train" else "val_files": str(path)}, split=split, **settings)
            ids = set()
            for seed in range(50):
                env.reset(seed=seed)
                ids.add(env._inner.info["task_id"])
            return ids

        tasks = {split: set(own) for split, own in make_tasks().items()}
        for split in ("train", "eval"):
            assert drawn("ServiceDesk@{}", split) <= tasks[split]
        assert drawn('ServiceDesk@{"split": "train"}', "eval") <= tasks["train"]
        assert drawn("ServiceDesk@{}", "eval", environments={"ServiceDesk": {"split": "train"}}) <= tasks["train"]
        monkeypatch.setitem(registry.ENVIRONMENTS, "Own", lambda top=4: GuessNumber(top))
        assert drawn("Own@{}", "eval", trusted=True)  # has no splits

    def test_prompts_and_system_prompts(self, files):
        env = TaskSet(train_files=files[0])
        observation, info = env.reset(seed=0, options={"task_id": "1"})
        assert (observation, info["system_prompt"]) == ("1/2?", "Think.")
        observation, info = env.reset(seed=0, options={"task_id": str(len(files[1]) - 2)})
        assert observation == "Guess my object." and "twenty questions" in info["system_prompt"]
        assert info[ENVIRONMENT] == "TwentyQuestions"

    def test_the_seed_decides_also_inside_a_rows_environment(self, files):
        env, last = TaskSet(train_files=files[0]), str(len(files[1]) - 1)
        starts = [env.reset(seed=seed, options={"task_id": last})[0] for seed in range(10)]
        assert starts == [TaskSet(train_files=files[0]).reset(seed=seed, options={"task_id": last})[0] for seed in range(10)]
        assert len(set(starts)) > 5
        assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(50)}) == len(files[1])

    @pytest.mark.parametrize(
        ("row", "complaint"),
        [
            ({"prompt": "x"}, "line 2: no reward style"),
            (
                {"prompt": "x", "reward_model": {"style": "rule", "ground_truth": "1"}, "data_source": "openai/gsm9k"},
                "line 2: .*unknown data_source 'openai/gsm9k'; did you mean 'openai/gsm8k'.*data_sources: {openai/gsm9k: ",
            ),
            ({"prompt": "x", "reward_model": {"style": "code-sandbox"}}, "line 2: no ground_truth"),
            ({"prompt": "x", "reward_model": {"style": "rule"}}, "line 2: .*unknown data_source None; known are "),
            ({**ROWS[0], "images": [{"bytes": "iVBOR"}]}, "line 2: the column 'images' holds something"),
            ({**ROWS[3], "videos": ["a.mp4"]}, "line 2: the column 'videos' holds something"),
            (
                {"prompt": [{"role": "tool", "content": ""}], "reward_model": {"style": "code-sandbox", "ground_truth": "1"}},
                "line 2: 'prompt' must be a text, or one user message",
            ),
            ({"reward_model": {"style": "code-sandbox", "ground_truth": "1"}}, "line 2: no column 'prompt'"),
            ({"env_str": "TwentyQuestions"}, "line 2: 'TwentyQuestions' names no environment"),
            ({"prompt": "x", "reward_model": {"style": "agent_env"}}, "line 2: .* needs the environment's string"),
            ({"prompt": "x", "reward_model": "rule"}, "line 2: reward_model must be a dict"),
        ],
    )
    def test_a_malformed_row_is_named_with_its_line(self, tmp_path, row, complaint):
        path = tmp_path / "tasks.jsonl"
        path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=complaint):
            TaskSet(train_files=str(path))

    @pytest.mark.parametrize(("depth", "is_refused"), [(64, False), (65, True)])
    def test_what_is_nested_too_deeply_is_refused_in_parquet_too(self, tmp_path, depth, is_refused):
        """With objects, as Arrow itself refuses as many lists."""
        value = 1
        for _ in range(depth):
            value = {"x": value}
        path = tmp_path / "tasks.parquet"
        pq.write_table(pa.Table.from_pylist([{**ROWS[3], "extra": value}]), path)
        if is_refused:
            with pytest.raises(ValueError, match=r"tasks\.parquet, row 1: lists and objects within each other, deeper than 64"):
                list(read_rows(str(path)))
        else:
            assert [row.fields["extra"] for row in read_rows(str(path))] == [value]

    @pytest.mark.parametrize(
        ("source", "style", "answer", "truth"),
        [
            ("DigitalLearningGmbH/MATH-lighteval", "rule", r"\boxed{34}", "34"),
            ("HuggingFaceH4/MATH-500", "model", r"\boxed{34}", "34"),
            ("math_dapo", "rule-lighteval/MATH_v2", "Answer: 34", "34"),
            ("aime_2024", None, "Answer: 34", "34"),
            ("mine_sums", "rule", "#### 34", "34"),
            ("openai/gsm8k", "rule", r"\boxed{34}", "34"),
            ("openai/gsm8k", "rule-math_dapo", "Answer: 34", "34"),
        ],
    )
    def test_a_row_for_verl_is_graded_by_its_data_source(self, tmp_path, source, style, answer, truth):
        """What a configuration says of a data source goes first, and a style of ours that a row names before both."""
        model = {"style": style, "ground_truth": truth}
        row = {"data_source": source, "prompt": [{"role": "user", "content": "?"}], "ability": "math", "reward_model": model}
        path = tmp_path / "tasks.parquet"
        pq.write_table(pa.Table.from_pylist([{**row, "extra_info": {"index": 0, "split": "train"}, "images": []}]), path)
        own = {"mine_*": "rule-openai/gsm8k", "openai/gsm8k": "rule-lighteval/MATH"}
        for said, worth in ((answer, 1.0), (answer.replace("34", "35"), 0.0)):
            env = TaskSet(train_files=str(path), data_sources=own)
            assert env.reset(seed=0)[0] == "?" and env.step(said)[1] == worth

    def test_a_style_that_a_configuration_names_must_be_one(self, files):
        with pytest.raises(ValueError, match=r"env_config.data_sources, 'mine': .*did you mean 'code-sandbox'"):
            TaskSet(train_files=files[0], data_sources={"mine": "code_sandbox"})

    def test_splits(self, files, tmp_path):
        with pytest.raises(ValueError, match=r"env_config.val_files is empty, and the split is 'eval'"):
            TaskSet(train_files=files[0], split="eval")
        assert TaskSet(val_files=files[0], split="eval").reset(seed=0)[1]["split"] == "eval"
