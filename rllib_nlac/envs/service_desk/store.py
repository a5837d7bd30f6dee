"""The shop's database, made by a seed, and the seven tools that an agent has on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from rllib_nlac.envs.tools import ToolError, check_call

FIRST_NAMES = ("Ada", "Bruno", "Clara", "Dario", "Edith", "Farid", "Greta", "Hugo", "Ines", "Jonas")
LAST_NAMES = ("Abel", "Brandt", "Costa", "Dupont", "Evans", "Fischer", "Garcia", "Haas", "Ito", "Jensen")
STREETS = ("Mill Lane", "Park Road", "Station Street", "Harbour Way", "Garden Row", "Church Hill", "Bridge Street", "Lake View")
CITIES = ("Oxford", "Lyon", "Graz", "Porto", "Bergen", "Gent", "Turin", "Cork")
PRODUCTS = (
    "kettle",
    "lamp",
    "backpack",
    "desk chair",
    "headphones",
    "jacket",
    "water bottle",
    "keyboard",
    "blanket",
    "running shoes",
    "camera",
    "toaster",
    "notebook",
    "umbrella",
    "bicycle helmet",
)
COLOURS = ("black", "white", "red", "blue", "green")
CANCEL_REASONS = ("no longer needed", "ordered by mistake")
PENDING, DELIVERED, CANCELLED = "pending", "delivered", "cancelled"


@dataclass
class Store:
    """Users, products and orders by their ids; everything in it is JSON.

    Attributes:
        users: ``name, email, address, orders``.
        products: ``name`` and ``variants``: item id to ``colour, price, available``.
        orders: ``user_id, status, address, payment, items``: a list of ``item_id, product, colour, price``.
    """

    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    products: dict[str, dict[str, Any]] = field(default_factory=dict)
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)

    def copy(self) -> Store:
        """An independent copy."""
        return copy.deepcopy(self)

    # Reading.

    def find_user(self, email: str) -> dict[str, Any]:
        for user_id, user in self.users.items():
            if user["email"] == email.strip().lower():
                return {"user_id": user_id, **user}
        raise ToolError(f"no user has the email {email!r}")

    def get_order(self, order_id: str) -> dict[str, Any]:
        return {"order_id": order_id, **self._order(order_id)}

    def get_product(self, name: str) -> dict[str, Any]:
        if name not in self.products:
            raise ToolError(f"no product is called {name!r}; products are {', '.join(self.products)}")
        return {"name": name, **self.products[name]}

    # Writing.

    def cancel_order(self, order_id: str, reason: str) -> dict[str, Any]:
        order = self._order(order_id, PENDING)
        order |= {"status": CANCELLED, "cancel_reason": reason}
        return {"order_id": order_id, "status": CANCELLED, "refund": total(order["items"]), "refund_to": order["payment"]}

    def change_address(self, order_id: str, address: str) -> dict[str, Any]:
        order = self._order(order_id, PENDING)
        order["address"] = " ".join(address.split())
        return {"order_id": order_id, "address": order["address"]}

    def return_items(self, order_id: str, item_ids: list[str]) -> dict[str, Any]:
        order = self._order(order_id, DELIVERED)
        items = [self._item(order, order_id, item_id) for item_id in item_ids]
        if len(set(item_ids)) < len(item_ids):
            raise ToolError("an item is named twice")
        order |= {"status": "return requested", "return_items": sorted(item_ids)}
        return {"order_id": order_id, "status": order["status"], "refund": total(items), "refund_to": order["payment"]}

    def exchange_item(self, order_id: str, item_id: str, new_item_id: str) -> dict[str, Any]:
        order = self._order(order_id, DELIVERED)
        item = self._item(order, order_id, item_id)
        variants = self.products[item["product"]]["variants"]
        if new_item_id not in variants:
            raise ToolError(f"{new_item_id!r} is no variant of {item['product']!r}; see get_product")
        if not variants[new_item_id]["available"]:
            raise ToolError(f"{new_item_id!r} is not available")
        order |= {"status": "exchange requested", "exchange": [item_id, new_item_id]}
        difference = round(variants[new_item_id]["price"] - item["price"], 2)
        return {"order_id": order_id, "status": order["status"], "price_difference": difference}

    def _order(self, order_id: str, status: str | None = None) -> dict[str, Any]:
        if order_id not in self.orders:
            raise ToolError(f"there is no order {order_id!r}; ids are as in 'W1001'")
        order = self.orders[order_id]
        if status is not None and order["status"] != status:
            raise ToolError(f"order {order_id} is {order['status']}, and this needs one that is {status}")
        return order

    def _item(self, order: dict[str, Any], order_id: str, item_id: str) -> dict[str, Any]:
        for item in order["items"]:
            if item["item_id"] == item_id:
                return item
        raise ToolError(f"order {order_id} has no item {item_id!r}; it has {', '.join(i['item_id'] for i in order['items'])}")


WRITES = ("cancel_order", "change_address", "return_items", "exchange_item")
_TEXT = {"type": "string", "minLength": 1, "maxLength": 200}


def _tool(name: str, description: str, /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    _tool("find_user", "The user with an email address, with the ids of the orders.", email=_TEXT),
    _tool("get_order", "Status, address, payment and items of an order.", order_id=_TEXT),
    _tool("get_product", "The variants of a product: item ids, colours, prices, availability.", name=_TEXT),
    _tool("cancel_order", "Cancels a pending order.", order_id=_TEXT, reason={"type": "string", "enum": list(CANCEL_REASONS)}),
    _tool("change_address", "Changes the delivery address of a pending order.", order_id=_TEXT, address=_TEXT),
    _tool(
        "return_items",
        "Requests the return of items of a delivered order.",
        order_id=_TEXT,
        item_ids={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 10},
    ),
    _tool(
        "exchange_item",
        "Exchanges an item of a delivered order for another variant of the same product.",
        order_id=_TEXT,
        item_id=_TEXT,
        new_item_id=_TEXT,
    ),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def call_tool(store: Store, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Validates a call against its schema and makes it.

    Raises:
        ToolError: There is no such tool, an argument is missing, unknown or of the wrong kind, or the tool refuses.
    """
    check_call(name, arguments, SCHEMAS)
    tool: Callable[..., dict[str, Any]] = getattr(store, name)
    return tool(**arguments)


def total(items: list[dict[str, Any]]) -> float:
    """What items cost together, in dollars."""
    return round(sum(item["price"] for item in items), 2)


@cache
def make_store() -> Store:
    """Ten users, 15 products with three variants each, 40 orders. Shared: copy it before writing."""
    rng = np.random.default_rng((0, 7))
    store = Store()
    for number, name in enumerate(PRODUCTS):
        colours = rng.choice(COLOURS, size=3, replace=False)
        base = int(rng.integers(12, 140))
        store.products[name] = {
            "variants": {
                f"{100 + number}-{colour}": {
                    "colour": str(colour),
                    "price": base + 0.5 * int(rng.integers(0, 20)),
                    "available": True,
                }
                for colour in colours
            }
        }
        if number % 3 == 0:
            store.products[name]["variants"][f"{100 + number}-{colours[2]}"]["available"] = False
    for number, (first, last) in enumerate(zip(FIRST_NAMES, LAST_NAMES, strict=True)):
        store.users[f"user_{number + 1}"] = {
            "name": f"{first} {last}",
            "email": f"{first}.{last}@example.com".lower(),
            "address": draw_address(rng),
            "orders": [],
        }
    for number in range(40):
        user_id = f"user_{number % len(store.users) + 1}"
        order_id = f"W{1001 + number}"
        names = rng.choice(PRODUCTS, size=int(rng.integers(1, 4)), replace=False)
        items = []
        for name in map(str, names):
            variants = store.products[name]["variants"]
            item_id = list(variants)[int(rng.integers(2))]
            items.append(
                {
                    "item_id": item_id,
                    "product": name,
                    "colour": variants[item_id]["colour"],
                    "price": variants[item_id]["price"],
                }
            )
        store.orders[order_id] = {
            "user_id": user_id,
            "status": (PENDING, DELIVERED)[number // len(store.users) % 2],
            "address": store.users[user_id]["address"],
            "payment": str(rng.choice(["credit card", "gift card"])),
            "items": items,
        }
        store.users[user_id]["orders"].append(order_id)
    return store


def draw_address(rng: np.random.Generator) -> str:
    """A street, a number and a city."""
    return f"{int(rng.integers(1, 90))} {rng.choice(STREETS)}, {rng.choice(CITIES)}"
