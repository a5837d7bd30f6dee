"""The text house: it is as deep as asked, the treasure needs every lock, and sub-goals are reported."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from rllib_nlac.envs.text_house import COLOURS, MATERIALS, ROOMS, TREASURES, TextHouse, make_house
from rllib_nlac.sampling.env_runner import TextEnvRunner

seeds, depths = st.integers(0, 10**6), st.integers(1, 4)


def play(env: TextHouse, leave_out: str | None = None) -> tuple[float, dict, list[str]]:
    """The expert's game; with ``leave_out`` its commands that begin so are not given."""
    total, info, texts = 0.0, {}, []
    for _ in range(40):
        action = env.expert_action()
        text, reward, terminated, truncated, info = env.step("look" if leave_out and action.startswith(leave_out) else action)
        texts.append(text)
        total += reward
        if terminated or truncated:
            break
    return total, info, texts


@given(seeds, depths)
def test_a_house_is_as_deep_as_asked_and_all_in_it_is_reachable(seed, depth):
    house = make_house(seed, depth)
    lengths = [len(house.chain(chest)) for chest in range(len(MATERIALS))]
    assert max(lengths) == depth and set(range(1, depth + 1)) <= set(lengths)
    assert len(set(house.key_of_chest)) == len(MATERIALS) and sorted(house.treasure_of_chest) == list(range(len(TREASURES)))
    assert sum(place < 0 for place in house.key_places) == depth - 1 and len(house.key_places) == len(COLOURS)


@given(seeds, depths, st.booleans())
def test_the_treasure_takes_every_lock_and_is_paid_once(seed, depth, brief):
    env = TextHouse(depth=depth, brief=brief)
    env.reset(seed=seed)
    reward, info, texts = play(env)
    assert reward == 1.0 and info["subgoals"] == {f"chest_{n}": True for n in range(1, depth + 1)}
    assert sum("opens" in text for text in texts) == depth and len(texts) <= 5 * depth


def test_nothing_short_of_it_is_paid():
    for seed in range(20):
        env = TextHouse(depth=3, max_turns=20)
        for skipped in ("open", "take", "go"):
            env.reset(seed=seed)
            reward, info, _ = play(env, skipped)
            if skipped == "open" or not info["success"]:
                assert reward == 0.0 and info["success"] is False
        env.reset(seed=seed)
        for _ in range(5):
            env.step(env.expert_action())
        assert sum(env._info()["subgoals"].values()) < 3


def test_keys_are_needed_and_must_fit_where_one_is():
    env = TextHouse(depth=2, house=1, memory=True)
    env.reset(seed=0)
    house = env._current.task.house
    chest = house.chain(env._current.task.chest)[0]
    right = house.key_of_chest[chest]
    assert (
        f"do not have the {COLOURS[right]} key"
        in env.step(f"open the {MATERIALS[chest]} chest with the {COLOURS[right]} key")[0]
    )
    wrong = next(k for k, place in enumerate(house.key_places) if place >= 0 and k != right)
    env.position = replace(env.position, keys=frozenset({right, wrong}), room=(house.chest_rooms[chest] + 1) % 8)
    assert "There is no" in env.step(f"open the {MATERIALS[chest]} chest with the {COLOURS[right]} key")[0]
    env.position = replace(env.position, room=house.chest_rooms[chest])
    text = env.step(f"open the {MATERIALS[chest]} chest with the {COLOURS[wrong]} key")[0]
    assert "does not fit" in text and f"Failed here: {COLOURS[wrong]} on {MATERIALS[chest]}." in text
    assert "One chest and one key" in env.step("open oak iron chest with red key")[0]
    assert "opens" in env.step(f"use {COLOURS[right]} key on {MATERIALS[chest]} chest")[0]
    assert "open already" in env.step(f"use {COLOURS[right]} key on {MATERIALS[chest]} chest")[0]


def test_brief_and_full_texts_tell_the_same():
    for seed in range(30):
        envs = [TextHouse(depth=3, memory=True, brief=brief) for brief in (False, True)]
        firsts = [env.reset(seed=seed)[0] for env in envs]
        assert firsts[0].startswith("Find the ") and firsts[1].startswith("Find ") and len(firsts[1]) < len(firsts[0])
        for action in ("go kitchen", "take red", "try red oak", "nonsense", *[None] * 15):
            steps = [env.step(action or env.expert_action()) for env in envs]
            assert steps[0][1:4] == steps[1][1:4] and steps[0][4]["subgoals"] == steps[1][4]["subgoals"]
            assert {*COLOURS, *MATERIALS} & {*steps[1][0].replace(",", " ").replace(".", " ").split()} <= {
                *steps[0][0].replace(",", " ").replace(".", " ").split()
            }
            if steps[0][2]:
                break


def test_one_house_for_all_or_a_new_one_each_and_goals_that_vary():
    assert len({TextHouse(house=7).reset(seed=seed)[1]["task_id"] for seed in range(20)}) == 1
    varied = {TextHouse(house=7, depth=3, vary_goal=True).reset(seed=seed)[1]["task_id"] for seed in range(60)}
    assert varied == {f"house-7-goal-{goal}" for goal in range(4)}
    tasks = {
        split: {TextHouse(split=split).reset(seed=seed)[1]["task_id"] for seed in range(100)} for split in ("train", "eval")
    }
    assert len(tasks["train"]) > 90 and not tasks["train"] & tasks["eval"]
    env = TextHouse(depth=2)
    assert env.reset(options={"task_id": "house-5-goal-1"})[1]["task_id"] == "house-5-goal-1"
    for spec, complaint in (("house-5", "are called as in"), ("house-5-goal-4", "has the goals 0 to 3")):
        with pytest.raises(ValueError, match=complaint):
            env.reset(options={"task_id": spec})


@given(seeds, depths)
def test_every_treasure_is_a_goal_and_the_way_to_one_need_not_pass_another(seed, depth):
    env, won = TextHouse(depth=depth, vary_goal=True), {}
    for goal in range(len(MATERIALS)):
        env.reset(options={"task_id": f"house-{seed}-goal-{goal}"})
        reward, info, texts = play(env)
        assert reward == 1.0 and len(info["subgoals"]) == (goal + 1 if goal < depth else 1)
        won[goal] = texts[-1]
    assert len(set(won.values())) == len(MATERIALS)
    env.reset(options={"task_id": f"house-{seed}-goal-{depth - 1}"})
    _, _, texts = play(env)
    assert not {won[goal] for goal in range(depth, len(MATERIALS))} & set(texts)
    assert TextHouse(depth=depth).reset(seed=seed)[1]["task_id"].endswith(f"-goal-{depth - 1}")


def test_subgoals_are_reported_next_to_success(config, chat):
    config.env, config.env_config = "TextHouse", {"depth": 2, "house": 1, "max_turns": 2}
    runner = TextEnvRunner(config=config, worker_index=0)
    runner.attach(ScriptedEngine(chat, lambda prompt, weights: "go to the hall"))
    runner.sample(num_episodes=3)
    metrics = runner.get_metrics()
    assert {name: float(value) for name, value in metrics["subgoals"].items()} == {"chest_1": 0.0, "chest_2": 0.0}


def test_mistakes():
    with pytest.raises(ValueError, match="split is 'test'"):
        TextHouse(split="test")


no_numbers = st.sampled_from([math.nan, math.inf, -math.inf, "0.1", "x", True, None, [1]])
no_whole_ones = no_numbers | st.sampled_from([6.5, 2.0])
WRONG = {
    "depth": (no_whole_ones | st.integers(max_value=0) | st.integers(min_value=5), "whole number from 1 to 4"),
    "house": (
        no_whole_ones.filter(lambda value: value is not None) | st.integers(max_value=-1) | st.integers(min_value=10**7),
        "whole number from 0 to 9999999",
    ),
    "max_turns": (no_whole_ones | st.integers(max_value=0), "whole number of at least 1"),
    **dict.fromkeys(
        ("bonus", "key_bonus", "chest_bonus"), (no_numbers | st.floats(max_value=-1e-9), "finite number of at least 0")
    ),
}


@given(st.data())
@pytest.mark.parametrize("key", WRONG)
def test_a_number_that_it_cannot_use_is_refused_by_key_and_value(key, data):
    """Fails where it is found out in the first step that is paid, or never."""
    values, needed = WRONG[key]
    value = data.draw(values)
    with pytest.raises(ValueError) as raised:
        TextHouse(**{key: value})
    assert str(raised.value).startswith(f"env_config.{key} is {value!r:.80} and must be a {needed}")


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_whole_numbers_of_numpy_will_do(kind):
    env = TextHouse(depth=kind(2), house=kind(7), max_turns=kind(3), bonus=np.float32(0.5))
    assert env.reset(seed=0)[1]["task_id"] == "house-7-goal-1"


def test_a_bonus_is_paid_for_each_chest_on_the_way_and_for_no_other():
    env = TextHouse(depth=3, house=2, bonus=0.25)
    env.reset(seed=0)
    reward, info, _ = play(env)
    assert reward == 1.5 and info["success"]
    env.reset(seed=0)
    house, task = env._current.task.house, env._current.task
    other = next(chest for chest in range(len(MATERIALS)) if chest not in house.chain(task.chest))
    env.position = replace(env.position, keys=frozenset(range(len(COLOURS))), room=house.chest_rooms[other])
    text, reward, *_ = env.step(f"try {COLOURS[house.key_of_chest[other]]} {MATERIALS[other]}")
    assert "opens" in text and reward == 0.0


def test_progress_is_paid_once_for_each_key_taken_and_each_chest_opened():
    """What the evaluator of the small model approves of, of use or not, and nothing else."""
    env = TextHouse(depth=2, house=2, key_bonus=0.0625, chest_bonus=0.25, max_turns=30)
    env.reset(seed=0)
    house, task = env._current.task.house, env._current.task

    def paid(action: str) -> float:
        return env.step(action)[1]

    lying = [key for key, place in enumerate(house.key_places) if place >= 0]
    for key in lying:
        assert paid(f"take {COLOURS[key]}") == (0.0625 if house.key_places[key] == env.position.room else 0.0)
        if key not in env.position.keys:
            assert paid(f"go {ROOMS[house.key_places[key]]}") == 0.0 and paid(f"take {COLOURS[key]}") == 0.0625
        assert paid(f"take {COLOURS[key]}") == 0.0
    for chest in (c for c in range(len(MATERIALS)) if c not in house.chain(task.chest) and house.key_of_chest[c] in lying):
        env.position = replace(env.position, room=house.chest_rooms[chest])
        opens, wrong = (f"try {COLOURS[key]} {MATERIALS[chest]}" for key in (house.key_of_chest[chest], lying[0]))
        assert house.key_of_chest[chest] == lying[0] or paid(wrong) == 0.0
        assert [paid(opens), paid(opens)] == [0.25, 0.0]
    # On the way, too, and what lies in a chest is taken with it; the treasure is paid for by the win.
    first, last = house.chain(task.chest)
    for chest, reward in ((first, 0.25), (last, 1.0)):
        env.position = replace(env.position, room=house.chest_rooms[chest])
        assert paid(f"try {COLOURS[house.key_of_chest[chest]]} {MATERIALS[chest]}") == reward


def test_with_a_memory_the_last_observation_sums_up_the_dialogue():
    """Room, what is in it, keys in hand, open chests and failed tries here are a function of the position, not of the way."""
    env = TextHouse(depth=2, house=1, memory=True, brief=True)
    env.reset(seed=0)
    for action in ("go library", "take blue", "go hall", "try blue oak", "go kitchen"):
        said = env.step(action)[0]
    assert said == "kitchen: stone chest, black key. keys blue, yellow. open oak. tried none."
    env.reset(seed=0)
    for action in ("go library", "take blue", "take blue", "go hall", "what", "try blue oak", "go hall", "go kitchen"):
        again = env.step(action)[0]
    assert again == said
