"""Twenty questions; the contract that all environments keep is in ``test_contract.py``."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_nlac.envs import registry
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.envs.twenty_questions import (
    CORRECT,
    NO,
    YES,
    TwentyQuestions,
    candidates_after,
    first_answer,
    load_table,
    oracle_action,
)

SMALL = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}


def play(env: TwentyQuestions, spec: str) -> tuple[float, list[tuple[str, str]], dict]:
    env.reset(seed=0, options={"task_id": spec})
    dialogue: list[tuple[str, str]] = []
    total, ended, info = 0.0, False, {}
    while not ended:
        action = oracle_action(env, dialogue)
        observation, reward, terminated, truncated, info = env.step(action)
        dialogue.append((action, observation))
        total, ended = total + reward, terminated or truncated
    return total, dialogue, info


@pytest.mark.parametrize("world", [SMALL, {}])
def test_the_oracle_wins_every_game(world):
    env = TwentyQuestions(**world)
    for obj in env.table.objects:
        total, _, info = play(env, obj)
        assert total == 1.0 and info["success"] is True and info["stop_reason"] == "success", obj


def test_the_whole_table_is_of_full_size():
    table = load_table()
    assert len(table.objects) >= 160 and len(table.attributes) >= 60
    assert all(any(a in held for held in table.facts) for a in range(len(table.attributes)))
    assert all(table.meaning(attribute.question) == ("ask", a) for a, attribute in enumerate(table.attributes))
    assert all(table.meaning(table.guess(o)) == ("guess", o) for o in range(len(table.objects)))


def test_same_seed_same_task_and_seeds_differ():
    env = TwentyQuestions(**SMALL)
    tasks = [env.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert tasks == [env.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert len(set(tasks)) > 8


def test_interleaved_instances_do_not_disturb_each_other():
    alone = [play(TwentyQuestions(**SMALL), spec)[1] for spec in ("dog", "ship")]
    first, second = TwentyQuestions(**SMALL), TwentyQuestions(**SMALL)
    first.reset(seed=0, options={"task_id": "dog"})
    second.reset(seed=0, options={"task_id": "ship"})
    replies = [[], []]
    for turn in range(max(map(len, alone))):
        for env, own, heard in ((first, alone[0], replies[0]), (second, alone[1], replies[1])):
            if turn < len(own):
                heard.append((own[turn][0], env.step(own[turn][0])[0]))
    assert replies == alone


@settings(max_examples=60)
@given(st.text(max_size=300))
def test_no_text_crashes_it(text):
    env = TwentyQuestions(**SMALL)
    env.reset(seed=0)
    observation, reward, *_ = env.step(text)
    assert isinstance(observation, str) and reward in (0.0, 1.0)


@pytest.mark.parametrize("text", ["", "😀" * 10, "x " * 50_000, "dog ship " * 10_000])
def test_extreme_texts(text):
    env = TwentyQuestions(**SMALL)
    env.reset(seed=0)
    assert env.step(text)[0] == "I do not know."


def test_pickling_mid_episode_continues_identically():
    env = TwentyQuestions(**SMALL)
    env.reset(seed=3)
    env.step("Is it alive?")
    copy = pickle.loads(pickle.dumps(env))
    for action in ("Is it big?", "Is it a dog?"):
        assert env.step(action)[:4] == copy.step(action)[:4]
    assert env.reset()[1]["task_id"] == copy.reset()[1]["task_id"]


def test_the_hidden_answer_is_only_in_privileged_info():
    env = TwentyQuestions(**SMALL)
    for obj in env.table.objects:
        observation, info = env.reset(seed=0, options={"task_id": obj})
        assert info["privileged"] == {"answer": obj}
        assert obj not in observation and obj not in info["task_id"]


def test_turn_limit_truncates_and_says_so():
    env = TwentyQuestions(**SMALL)
    env.reset(seed=0, options={"task_id": "dog"})
    for _ in range(5):
        assert env.step("Is it a ship?")[2:4] == (False, False)
    observation, reward, terminated, truncated, info = env.step("Is it a ship?")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert observation == "No. No turns left." and info["stop_reason"] == "turn_limit" and info["success"] is False
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("Is it a dog?")


def test_winning_on_the_last_turn_terminates():
    env = TwentyQuestions(num_objects=16, num_attributes=8, max_turns=1)
    env.reset(seed=0, options={"task_id": "dog"})
    observation, reward, terminated, truncated, _ = env.step("Is it a dog?")
    assert (observation, reward, terminated, truncated) == (CORRECT, 1.0, True, False)


def test_reward_per_question():
    env = TwentyQuestions(**SMALL, reward="per_question")
    total, dialogue, _ = play(env, "kite")
    assert total == -len(dialogue)


def test_candidates_contain_the_truth_and_shrink():
    env = TwentyQuestions(**SMALL)
    for target, obj in enumerate(env.table.objects):
        _, dialogue, _ = play(env, obj)
        sizes = [candidates_after(env.table, dialogue[:t]).bit_count() for t in range(len(dialogue) + 1)]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
        assert candidates_after(env.table, dialogue) == 1 << target


@pytest.mark.parametrize(
    ("question", "meaning"),
    [
        ("Is it an EAGLE?", ("guess", 2)),
        ("I think it is the eagle, which can fly", ("guess", 2)),
        ("Does it live in the sea?", ("ask", 4)),
        ("Is it a dog or a horse?", None),
        ("Can it fly and can you eat it?", None),
        ("Hello", None),
    ],
)
def test_what_a_question_asks(question, meaning):
    assert load_table(None, 16, 8).meaning(question) == meaning


def test_first_answer_reads_through_the_turn_limit():
    assert [first_answer(t) for t in ("No. No turns left.", "Yes.", "Correct!", "I do not know.")] == [
        NO,
        YES,
        CORRECT,
        "I do not know.",
    ]


def test_text_space_contains_any_string_up_to_its_length():
    space = TextSpace(max_length=5)
    assert "" in space and "a b?é" in space
    assert "abcdef" not in space and 5 not in space
    assert len(pickle.dumps(TextSpace())) < 5_000
    assert all(sample in space for sample in (space.sample() for _ in range(20)))


SEVERAL = [{"kind": "endpoint", "base_url": "http://127.0.0.1:9/v1", "model": "org/large"}, {"kind": "table", "name": "facts"}]


def test_each_episode_draws_one_of_several_oracles_by_its_seed():
    """And no other task than with one oracle."""
    one, several = TwentyQuestions(**SMALL), TwentyQuestions(**SMALL, oracle=SEVERAL)
    drawn = []
    for seed in range(20):
        first = several.reset(seed=seed)[1]
        assert first["partner"] == several.reset(seed=seed)[1]["partner"]
        assert first["task_id"] == one.reset(seed=seed)[1]["task_id"]
        drawn.append(first["partner"])
    assert set(drawn) == {"large", "facts"}
    assert "partner" not in one.reset(seed=0)[1]
    several.reset(seed=drawn.index("facts"))
    assert several.step(several.expert_action())[0] in (YES, NO)


@pytest.mark.parametrize(
    ("oracle", "complaint"),
    [
        ([], "env_config.oracle is an empty list"),
        (["table"], "env_config.oracle must be a mapping, or a list of mappings, and it has 'table'"),
        ([{"kind": "table"}, {"kind": "table"}], "two that are called 'table': give each a name"),
        ([{"kind": "table", "name": "a/b"}], "has the name 'a/b', which becomes a metric's"),
    ],
)
def test_a_list_of_oracles_that_cannot_be(oracle, complaint):
    with pytest.raises(ValueError, match=complaint):
        TwentyQuestions(oracle=oracle)


class TestBadInput:
    def test_turn_limit_of_zero(self):
        with pytest.raises(ValueError, match="max_turns is 0"):
            TwentyQuestions(max_turns=0)

    def test_unknown_environment_names_the_nearest(self):
        with pytest.raises(ValueError, match="did you mean 'TwentyQuestions'"):
            registry.make("TwentyQuestion")

    def test_unknown_env_config_key_names_the_nearest(self):
        with pytest.raises(ValueError, match="did you mean 'max_turns'"):
            registry.make("TwentyQuestions", {"max_turn": 6})

    def test_unknown_task(self):
        with pytest.raises(ValueError, match="no task is called 'cow'"):
            TwentyQuestions(**SMALL).reset(options={"task_id": "cow"})

    def test_objects_that_no_question_tells_apart(self):
        with pytest.raises(ValueError, match="raise num_attributes"):
            load_table(None, 16, 2)

    def test_too_many_objects(self):
        with pytest.raises(ValueError, match="num_objects is 9999"):
            load_table(None, 9999)

    def test_malformed_table_names_the_line(self, tmp_path):
        table = tmp_path / "own.table"
        table.write_text("attribute red | Is it red? | red\nobject rose red\n")
        with pytest.raises(ValueError, match="line 2"):
            load_table(str(table))

    @pytest.mark.parametrize("name", ["café", "iphone5", "glass door", "-dog", ""])
    def test_an_object_that_no_guess_can_name(self, tmp_path, name):
        table = tmp_path / "own.table"
        table.write_text(f"attribute red | Is it red? | red\nobject Rose-bud | red\nobject {name} |\n")
        with pytest.raises(ValueError, match=rf"line 3: the object {name!r} .*one word.*'glass-door'.*env_config.words"):
            load_table(str(table))
        table.write_text("attribute red | Is it red? | red\nobject Rose-bud | red\n")
        assert play(TwentyQuestions(table=str(table)), "Rose-bud")[0] == 1.0

    @pytest.mark.parametrize(
        ("lines", "what"),
        [
            ("object bat | red\nobject Bat |", "the object 'bat'"),
            ("attribute red | Is it crimson? | crimson\nobject bat |", "the attribute 'red'"),
            ("attribute pink | Is it red? | red\nobject bat |", "the word 'red'"),
        ],
    )
    def test_a_name_of_two_things(self, tmp_path, lines, what):
        """Fails where the last one wins, and the right guess of the other is answered with no."""
        table = tmp_path / "own.table"
        table.write_text(f"attribute red | Is it red? | red\n{lines}\n")
        with pytest.raises(ValueError, match=f"{what} stands there twice"):
            load_table(str(table))

    def test_table_with_an_undefined_attribute(self, tmp_path):
        table = tmp_path / "own.table"
        table.write_text("attribute red | Is it red? | red\nobject rose | redd\n")
        with pytest.raises(ValueError, match="'redd', which the table does not define"):
            load_table(str(table))
