"""The shop: its oracle gets what is wanted, purchases are graded as they say, and pages say what is true."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_nlac.envs.miniwob.env import MiniWoB
from rllib_nlac.envs.text_shop import NUM_EVAL, NUM_TRAIN, Shop, TextShop, Wish, grade, shop

wishes = st.integers(0, NUM_TRAIN + NUM_EVAL - 1).map(lambda number: shop().wishes[number])


def play(env: TextShop, task: str) -> tuple[float, dict, int]:
    env.reset(options={"task_id": task})
    for turn in range(1, env.max_turns + 1):
        _, reward, terminated, truncated, info = env.step(env.expert_action())
        if terminated or truncated:
            return reward, info, turn
    raise AssertionError


def test_the_oracle_gets_what_every_customer_wants():
    env, turns = TextShop(), []
    for number in range(NUM_TRAIN + NUM_EVAL):
        reward, info, turn = play(env, f"wish-{number}")
        assert reward == 1.0 and info["success"] is True
        turns.append(turn)
    assert max(turns) < env.max_turns and min(turns) > 3


def test_a_step_takes_less_than_2_ms():
    env = TextShop()
    env.reset(seed=0)
    shop().search("warm up")
    started = time.process_time()
    for number in range(200):
        play(env, f"wish-{number % NUM_TRAIN}")
    assert time.process_time() - started < 200 * 5 * 0.002


def test_500_products_no_two_alike_and_the_same_for_everybody():
    products = shop().products.values()
    assert len(products) == 500 == len({(p.title, p.features, p.options, p.cents) for p in products})
    assert len({p.kind for p in products}) == 20 and len(set(shop().wishes)) == NUM_TRAIN + NUM_EVAL
    assert Shop(random.Random(17)).wishes == shop().wishes


def test_training_and_evaluation_have_customers_of_their_own():
    drawn = {
        split: {TextShop(split=split).reset(seed=seed)[1]["task_id"] for seed in range(300)} for split in ("train", "eval")
    }
    assert not drawn["train"] & drawn["eval"] and len(drawn["eval"]) > 40 and len(drawn["train"]) > 100


@given(wishes)
def test_a_purchase_is_graded_by_what_it_meets(wish: Wish):
    product, chosen = shop().products[wish.product], dict(wish.options)
    assert grade(wish, product, chosen) == 1.0
    assert grade(wish, product, {}) == 3 / 5  # two features and the price
    assert grade(wish, replace(product, cents=wish.most_cents + 1), chosen) == 4 / 5
    assert grade(wish, replace(product, features=()), chosen) == 3 / 5
    assert grade(wish, replace(product, kind="something else"), chosen) == 1 / 2
    assert grade(wish, replace(product, kind="something else", department="elsewhere"), chosen) == 0.0


@given(
    wishes,
    st.sampled_from(sorted(shop().products)),
    st.lists(st.sampled_from(("black", "red", "large", "for two")), max_size=3),
)
def test_no_purchase_is_graded_beyond_0_and_1_and_1_is_all(wish: Wish, name: str, values: list[str]):
    product = shop().products[name]
    chosen = {key: value for key, choices in product.options for value in choices if value in values}
    reward = grade(wish, product, chosen)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (
        product.kind == wish.kind
        and set(wish.features) <= set(product.features)
        and all(chosen.get(key) == value for key, value in wish.options)
        and product.cents <= wish.most_cents
    )


def test_pages_are_turned_and_left():
    env = TextShop(max_turns=50)
    env.reset(options={"task_id": "wish-0"})
    first = env.step("search[backpack]")[0]
    assert "Results, page 1 of 3." in first and first.count("[P") == 10 and "[< Prev]" not in first
    second = env.step("click[Next >]")[0]
    assert "page 2 of 3" in second and not set(first.split("\n")[2:]) & set(second.split("\n")[2:])
    assert "page 3 of 3" in env.step("click[next >]")[0]
    assert "no button [Next >]" in env.step("click[Next >]")[0]
    assert env.step("click[< Prev]")[0] == second
    product = second.split("\n")[2][1:6]
    assert "(chosen: none)" in env.step(f"click[{product}]")[0]
    assert all(feature in env.step("click[Features]")[0] for feature in shop().products[product].features[:1])
    assert "Buy Now" in env.step("click[< Prev]")[0]
    colours = shop().products[product].options[0][1]
    env.step(f"click[{colours[0]}]")
    assert f"(chosen: {colours[1]})" in env.step(f"click[{colours[1].upper()}]")[0]
    assert env.step("click[< Prev]")[0] == second
    assert "(chosen: none)" in env.step(f"click[{product}]")[0]  # what was chosen is forgotten with the page
    assert "Search page" in env.step("click[Back to Search]")[0]


@pytest.mark.parametrize("action", ["", "buy", "search", "click[]", "search[[x]]", "click[Buy Now]", "search[a] search[b]"])
def test_what_cannot_be_done_is_answered_in_words(action):
    env = TextShop()
    first, _ = env.reset(seed=1)
    text, reward, terminated, *_ = env.step(action)
    assert ("That is no action" in text or "no button" in text) and first in text and (reward, terminated) == (0.0, False)


def test_what_stands_around_an_action_does_not_matter():
    env, other = TextShop(), TextShop()
    for each in (env, other):
        each.reset(options={"task_id": "wish-0"})
    for action, plain in ((" `Search [backpack]`. ", "search[backpack]"), ("```\nclick[Next >];\n```", "click[Next >]")):
        assert env.step(action)[0] == other.step(plain)[0] and "That is no action" not in env.dialogue[-1][1]
    assert "That is no action" in env.step("I click[Next >]")[0]


@pytest.mark.parametrize("make", [TextShop, lambda: MiniWoB.__new__(MiniWoB)], ids=["TextShop", "MiniWoB"])
def test_a_system_prompt_leaves_room_for_a_thought(make):
    """Fails where an action is to be all that is said, and the format of actions then asks for a thought before it."""
    prompt = make().system_prompt
    assert "one action a turn" in prompt and "nothing else" not in prompt


def test_a_search_that_finds_nothing_and_one_where_there_is_no_box():
    env = TextShop()
    env.reset(seed=1)
    assert "Nothing found." in env.step("search[zzz 123]")[0]
    assert "no search box" in env.step("search[mug]")[0]


def test_mistakes():
    with pytest.raises(ValueError, match="split is 'test'"):
        TextShop(split="test")
    for task in ("wish-250", "mug"):
        with pytest.raises(ValueError, match="wish-0 to wish-249"):
            TextShop().reset(options={"task_id": task})
