"""What customers want: tasks made by a seed, each with the writes that settle it and the facts that must be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rllib_nlac.envs.service_desk.store import CANCEL_REASONS, DELIVERED, PENDING, Store, draw_address, make_store, total

NUM_TRAIN, NUM_EVAL = 30, 15
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """One thing that a customer wants.

    Attributes:
        kind: "cancel", "address", "return", "exchange", "price" or "refused".
        opening: How the customer says it.
        order_id: The order it is about.
        answers: What the customer says when asked for a slot: "order", "item", "colour", "reason" or "address".
        write: The call that settles it; None where nothing may be written.
        look_up: A product that the agent must look at first, or None.
        fact: What the agent must tell the customer, or None.
    """

    kind: str
    opening: str
    order_id: str
    answers: dict[str, str]
    write: Call | None = None
    look_up: str | None = None
    fact: str | None = None


@dataclass(frozen=True)
class DeskTask:
    """A customer with one request or two; the second is told when the first is settled."""

    id: str
    email: str
    requests: tuple[Request, ...]


@cache
def make_tasks() -> dict[str, dict[str, DeskTask]]:
    """The tasks of both splits by their ids, "train" and "eval"; no task of one has the requests of a task of the other."""
    store = make_store()
    rng = np.random.default_rng((0, 11))
    plans = (
        ("cancel",),
        ("return",),
        ("exchange",),
        ("address",),
        ("price", "cancel"),
        ("refused",),
        ("return", "refused_again"),
        ("address", "return"),
        ("exchange", "price"),
        ("cancel", "cancel"),
    )
    tasks: list[DeskTask] = []
    seen: set[str] = set()
    while len(tasks) < NUM_TRAIN + NUM_EVAL:
        plan = plans[len(tasks) % len(plans)]
        user_id = str(rng.choice(list(store.users)))
        requests: list[Request] = []
        for kind in plan:
            request = _make(kind, store, user_id, requests, rng)
            if request is not None:
                requests.append(request)
        if len(requests) == len(plan) and (key := repr([(r.opening, r.order_id, r.answers) for r in requests])) not in seen:
            seen.add(key)
            tasks.append(DeskTask(f"desk-{len(tasks):02d}", store.users[user_id]["email"], tuple(requests)))
    # Every third task is kept for evaluation, so that both splits have all kinds.
    held = [task for number, task in enumerate(tasks) if number % 3 == 2]
    kept = {task.id for task in held}
    return {"train": {t.id: t for t in tasks if t.id not in kept}, "eval": {t.id: t for t in held}}


def _make(kind: str, store: Store, user_id: str, before: list[Request], rng: np.random.Generator) -> Request | None:
    """A request of a kind about an order that no earlier one touches, None where the user has no such order."""
    if kind == "refused_again":
        return _second_write(store, before[0])
    taken = {request.order_id for request in before}
    status = {"cancel": PENDING, "address": PENDING, "return": DELIVERED, "exchange": DELIVERED, "refused": DELIVERED}.get(kind)
    orders = [
        order_id
        for order_id in store.users[user_id]["orders"]
        if order_id not in taken and (status is None or store.orders[order_id]["status"] == status)
    ]
    if not orders:
        return None
    order_id = str(rng.choice(orders))
    return _MAKERS[kind](store, order_id, rng)


def _cancel(store: Store, order_id: str, rng: np.random.Generator) -> Request:
    reason = str(rng.choice(CANCEL_REASONS))
    refund = f"{total(store.orders[order_id]['items']):.2f}"
    return Request(
        "cancel",
        "I want to cancel an order.",
        order_id,
        {"order": f"It is order {order_id}.", "reason": f"The reason is: {reason}."},
        ("cancel_order", {"order_id": order_id, "reason": reason}),
        fact=refund,
    )


def _address(store: Store, order_id: str, rng: np.random.Generator) -> Request:
    address = draw_address(rng)
    return Request(
        "address",
        "An order of mine should go to another address.",
        order_id,
        {"order": f"It is order {order_id}.", "address": f"The new address is: {address}."},
        ("change_address", {"order_id": order_id, "address": address}),
    )


def _return(store: Store, order_id: str, rng: np.random.Generator) -> Request:
    items = store.orders[order_id]["items"]
    chosen = items[: int(rng.integers(1, len(items) + 1))]
    names = " and the ".join(item["product"] for item in chosen)
    return Request(
        "return",
        "I want to send something back.",
        order_id,
        {"order": f"It is order {order_id}.", "item": f"I want to return the {names}, nothing else."},
        ("return_items", {"order_id": order_id, "item_ids": [item["item_id"] for item in chosen]}),
        fact=f"{total(chosen):.2f}",
    )


def _exchange(store: Store, order_id: str, rng: np.random.Generator) -> Request | None:
    item = store.orders[order_id]["items"][0]
    variants = store.products[item["product"]]["variants"]
    others = [key for key, variant in variants.items() if variant["available"] and key != item["item_id"]]
    if not others:
        return None
    new = str(rng.choice(others))
    return Request(
        "exchange",
        "I want another colour of something that I bought.",
        order_id,
        {
            "order": f"It is order {order_id}.",
            "item": f"It is the {item['product']}.",
            "colour": f"I want it in {variants[new]['colour']}.",
        },
        ("exchange_item", {"order_id": order_id, "item_id": item["item_id"], "new_item_id": new}),
        look_up=item["product"],
    )


def _price(store: Store, order_id: str, rng: np.random.Generator) -> Request:
    return Request(
        "price",
        "What did I pay for one of my orders, all items together?",
        order_id,
        {"order": f"It is order {order_id}."},
        fact=f"{total(store.orders[order_id]['items']):.2f}",
    )


def _refused(store: Store, order_id: str, rng: np.random.Generator) -> Request:
    return Request(
        "refused",
        "I want to cancel an order.",
        order_id,
        {"order": f"It is order {order_id}.", "reason": f"The reason is: {CANCEL_REASONS[0]}."},
    )


def _second_write(store: Store, first: Request) -> Request:
    answers = {"order": f"It is order {first.order_id} again.", "item": "All the items that are left."}
    return Request("refused", "I want to send back the rest of that order, too.", first.order_id, answers)


_MAKERS: dict[str, Callable[[Store, str, np.random.Generator], Request | None]] = {
    "cancel": _cancel,
    "address": _address,
    "return": _return,
    "exchange": _exchange,
    "price": _price,
    "refused": _refused,
}
