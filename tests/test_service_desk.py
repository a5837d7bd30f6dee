"""The service desk: the expert settles every task, and every way to settle it wrongly scores 0."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_nlac.envs.service_desk.env import ServiceDesk, expert_script, facts, gold_writes
from rllib_nlac.envs.service_desk.store import TOOLS, WRITES, call_tool, make_store
from rllib_nlac.envs.service_desk.tasks import make_tasks
from rllib_nlac.envs.service_desk.users import brief, states
from rllib_nlac.envs.tools import ToolError, parse_tool_call

TASKS = make_tasks()
EVERY = [(split, name) for split in TASKS for name in TASKS[split]]


def call(name: str, /, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def run(split: str, task: str, script: list[str], **config) -> tuple[float, dict, list[str]]:
    env = ServiceDesk(split=split, **{"plain_text": True, **config})
    heard = [env.reset(seed=0, options={"task_id": task})[0]]
    total, info = 0.0, {}
    for action in script:
        observation, reward, terminated, truncated, info = env.step(action)
        heard.append(observation)
        total += reward
        if terminated or truncated:
            break
    return total, info, heard


def script_of(split: str, task: str) -> list[str]:
    return expert_script(make_store(), TASKS[split][task])


def is_write(action: str) -> bool:
    return action.startswith("{") and json.loads(action)["name"] in WRITES


def find(*kinds: str) -> tuple[str, str]:
    return next((s, n) for s, n in EVERY if tuple(r.kind for r in TASKS[s][n].requests) == kinds)


def test_there_are_30_and_15_tasks_of_all_kinds_and_none_is_in_both():
    assert (len(TASKS["train"]), len(TASKS["eval"])) == (30, 15)
    contents = {split: {repr(task.requests) for task in TASKS[split].values()} for split in TASKS}
    assert not contents["train"] & contents["eval"] and len(contents["train"]) == 30
    for split in TASKS:
        kinds = {request.kind for task in TASKS[split].values() for request in task.requests}
        assert kinds == {"cancel", "address", "return", "exchange", "price", "refused"}
    assert make_tasks.__wrapped__() == TASKS
    assert len(TOOLS) == 7 and len(make_store().orders) == 40 and len(make_store().products) == 15


@pytest.mark.parametrize(("split", "task"), EVERY)
def test_the_expert_settles_it_and_less_does_not(split, task):
    script = script_of(split, task)
    reward, info, heard = run(split, task, script)
    assert reward == 1.0 and info["success"] is True and not info["privileged"]["broken_rules"]
    assert not any(line.startswith("Tool error") for line in heard)
    for number, action in enumerate(script):
        if is_write(action):  # partial: one write left out
            assert run(split, task, [*script[:number], *script[number + 1 :]])[0] == 0.0
    without_yes = [action for action in script if "Do you confirm" not in action]
    if any(map(is_write, script)):
        reward, info, _ = run(split, task, without_yes)
        assert reward == 0.0 and "the customer had not confirmed" in info["privileged"]["broken_rules"]
        reward, info, _ = run(split, task, script[2:])
        assert reward == 0.0 and "the customer was not identified" in info["privileged"]["broken_rules"]
    if facts(TASKS[split][task]):
        silent = [action.replace(fact, "some") for action in script for fact in [facts(TASKS[split][task])[0]]]
        assert run(split, task, silent)[0] == 0.0


REFUSED = [(split, name) for split, name in EVERY if TASKS[split][name].requests[-1].kind == "refused"]


@pytest.mark.parametrize(("split", "task"), REFUSED)
def test_a_forbidden_request_must_be_declined_once_its_order_is_named(split, task):
    script, order = script_of(split, task), TASKS[split][task].requests[-1].order_id
    first = [] if len(TASKS[split][task].requests) == 1 else script[:-3]  # until the last request is told
    for message in (
        "Is there anything else?",
        "It is done.",
        "I have cancelled your order, the refund is 50 dollars. It is done.",
        f"I have cancelled order {order}, the refund is 50 dollars. It is done.",
    ):
        for before in (first, script[:-1]):
            reward, info, heard = run(split, task, [*before, message])
            assert (reward, info["success"]) == (0.0, False) and heard[-1].endswith("Goodbye."), message
    for words in (
        "That can’t be done.",
        "That isn't possible.",
        f"I am not able to do this for {order}.",
        "It can no longer be changed.",
    ):
        assert run(split, task, [*script[:-1], words])[0] == 1.0


def test_what_was_declined_before_says_nothing_of_it():
    split, name = find("refused")
    assert run(split, name, ["Orders cannot be cancelled."])[0] == 0.0  # whatever the order
    heard = run(split, name, ["I cannot find it. What is the order's number?"])[2]
    assert heard[-1] == f"Customer: {TASKS[split][name].requests[0].answers['order']}"
    split, name = find("return", "refused")
    script = script_of(split, name)
    write = next(number for number, action in enumerate(script) if is_write(action))
    early = [*script[:write], "I cannot see it yet.", *script[write:-1], "It is done."]
    assert run(split, name, early)[0] == 0.0 and run(split, name, [*early[:-1], script[-1]])[0] == 1.0


def test_what_the_policy_forbids_scores_0():
    split, name = find("return", "refused")
    script = script_of(split, name)
    order = TASKS[split][name].requests[0].order_id
    # The second change of an order is refused by the tool already, since the order is not "delivered" any more.
    again = [
        *script[:-1],
        f"I return it for order {order}. Do you confirm?",
        call("return_items", order_id=order, item_ids=["x"]),
    ]
    reward, _, heard = run(split, name, [*again, script[-1]])
    assert "Tool error" in heard[-2] and reward == 1.0  # nothing was changed, and the customer was declined in the end
    # A pending order, though, can be cancelled after its address was changed: two writes, and 0.
    split, name = find("address", "return")
    script = script_of(split, name)
    order = TASKS[split][name].requests[0].order_id
    done = next(number for number, action in enumerate(script) if is_write(action))
    extra = [f"Shall I cancel order {order}?", call("cancel_order", order_id=order, reason="no longer needed")]
    reward, info, _ = run(split, name, [*script[: done + 1], *extra, *script[done + 1 :]])
    assert reward == 0.0 and "the order had been changed before" in info["privileged"]["broken_rules"]


def test_somebody_elses_order_is_a_broken_rule():
    split, name = find("cancel")
    task = TASKS[split][name]
    store = make_store()
    pending = [key for key, order in store.orders.items() if order["status"] == "pending"]
    other = next(key for key in pending if store.users[store.orders[key]["user_id"]]["email"] != task.email)
    script = script_of(split, name)
    extra = [f"Shall I cancel order {other}?", call("cancel_order", order_id=other, reason="no longer needed")]
    reward, info, _ = run(split, name, [*script[:2], *extra, *script[2:]])
    assert reward == 0.0 and "the order is somebody else's" in info["privileged"]["broken_rules"]


def test_a_yes_counts_for_the_order_that_was_named_only():
    split, name = find("cancel")
    script = script_of(split, name)
    confirm = next(number for number, action in enumerate(script) if "Do you confirm" in action)
    vague = [*script]
    vague[confirm] = "I am going to cancel it. Do you confirm?"
    reward, info, heard = run(split, name, vague)
    assert reward == 0.0 and heard[confirm + 1].startswith("Customer: No.")
    assert info["privileged"]["broken_rules"] == ["the customer had not confirmed"]


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ('{"name": "get_order"', "must be one JSON object"),
        ('{"name": ["get_order"]}', "must look like"),
        ('{"name": "get_order", "arguments": [1]}', "must look like"),
        (call("drop_tables"), "there is no tool 'drop_tables'; tools are find_user, get_order"),
        (call("get_order"), "'order_id' is a required property"),
        (call("get_order", order_id=7), "7 is not of type 'string', at order_id"),
        (call("get_order", order_id="W1001", now=True), "Additional properties are not allowed"),
        (call("get_order", order_id="W9"), "there is no order 'W9'"),
        (call("cancel_order", order_id="W1001", reason="bored"), "'bored' is not one of"),
        (
            call("cancel_order", order_id="W1011", reason="no longer needed"),
            "W1011 is delivered, and this needs one that is pending",
        ),
        (call("return_items", order_id="W1011", item_ids=[]), "should be non-empty"),
        (call("return_items", order_id="W1011", item_ids=["nothing"]), "has no item 'nothing'"),
        (call("find_user", email="nobody@example.com"), "no user has the email"),
        (call("get_product", name="moon"), "no product is called 'moon'"),
        ("", "an empty message"),
    ],
)
@pytest.mark.parametrize("plain_text", [True, False])
def test_a_wrong_call_changes_nothing_and_its_error_reaches_the_agent(action, complaint, plain_text):
    env = ServiceDesk(plain_text=plain_text)
    env.reset(seed=0)
    before = env._store.copy()
    observation, reward, terminated, *_ = env.step(action)
    assert observation.startswith(("Tool error: ", "Error: ")) and complaint in observation
    assert reward == 0.0 and not terminated and env._store == before


def test_calls_are_read_in_their_usual_wrappings():
    wanted = ("get_order", {"order_id": "W1001"})
    plain = call(*wanted[:1], **wanted[1])
    tagged, fenced = f"<tool_call>\n{plain}\n</tool_call>", f"```json\n{plain}\n```"
    for text in (plain, tagged, fenced, f"<tool_call>{plain}", f"```\n{plain}```"):
        assert parse_tool_call(f"  {text}\n") == parse_tool_call(f"Let me look, {{dear}} user.\n{text}") == wanted
    for text in ('{"name": "done"}', '<tool_call>{"name": "done", "arguments": null}</tool_call>', 'Bye! {"name": "done"}'):
        assert parse_tool_call(text) == ("done", {})
    for text in ("What is the order's number?", "I see {curly} things", "```\nplain text\n```", ""):
        assert parse_tool_call(text) is None
    for text in (plain + plain, "<tool_call>null", "So: <tool_call>look()</tool_call>"):
        with pytest.raises(ToolError, match="a tool call must"):
            parse_tool_call(text)


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3),
    )
)
def test_no_json_breaks_a_tool(value):
    store = make_store().copy()
    for name in ("get_order", "return_items", "exchange_item"):
        arguments = value if isinstance(value, dict) else {"order_id": value}
        with pytest.raises(ToolError):
            call_tool(store, name, arguments)
    assert store == make_store()


def test_exchange_needs_an_available_variant_of_the_same_product():
    store = make_store().copy()
    order_id, item_id, gone = next(
        (order_id, item["item_id"], key)
        for order_id, order in store.orders.items()
        if order["status"] == "delivered"
        for item in order["items"]
        for key, variant in store.products[item["product"]]["variants"].items()
        if not variant["available"]
    )
    for new, complaint in (("999-red", "no variant"), (gone, "not available")):
        with pytest.raises(ToolError, match=complaint):
            call_tool(store, "exchange_item", {"order_id": order_id, "item_id": item_id, "new_item_id": new})
    assert store == make_store()


def test_amounts_are_found_however_they_are_written():
    assert states("It is $1,049.50 in all", "1049.50") and states("49.5 dollars", "49.50") and not states("49.55", "49.50")
    assert not states("no number", "49.50")


def test_a_model_that_plays_the_customer_is_told_what_it_wants_and_not_how_it_is_graded():
    for split, name in EVERY:
        task = TASKS[split][name]
        text = brief(task)
        assert task.email in text and all(request.opening in text for request in task.requests)
        assert not any(fact in text for fact in facts(task))
        assert not any(tool in text for tool, _ in gold_writes(task))
