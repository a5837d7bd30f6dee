"""A web shop in text, after WebShop: search, results in pages, items with features and options, and one graded purchase.

It is generated and needs neither data nor a browser: 500 products of 20 kinds, of which no two are alike, and 250 wishes.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv

NUM_PRODUCTS, NUM_TRAIN, NUM_EVAL = 500, 200, 50
PAGE = 10  # results on a page
COLOURS = ("black", "white", "red", "blue", "green", "grey", "yellow", "brown")
BRANDS = ("Alder", "Birk", "Cobalt", "Dovetail", "Ember", "Fennel", "Gannet", "Harrow", "Ivory", "Juniper", "Kestrel", "Lumen")
SIZES = ("small", "medium", "large", "extra large")
# Each department with its kinds, its features, and what else than a colour can be chosen.
DEPARTMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, tuple[str, ...]]]] = {
    "clothing": (
        ("jacket", "shirt", "sweater", "raincoat", "scarf"),
        (
            "waterproof",
            "machine washable",
            "hooded",
            "quick drying",
            "wool lined",
            "reflective",
            "wrinkle free",
            "organic cotton",
        ),
        ("size", SIZES),
    ),
    "kitchen": (
        ("kettle", "mug", "frying pan", "lunch box", "water bottle"),
        (
            "dishwasher safe",
            "stainless steel",
            "insulated",
            "leakproof",
            "non stick",
            "stackable",
            "heat resistant",
            "lightweight",
        ),
        ("capacity", ("half a litre", "one litre", "two litres")),
    ),
    "electronics": (
        ("headphones", "speaker", "keyboard", "lamp", "alarm clock"),
        ("wireless", "rechargeable", "noise cancelling", "foldable", "dimmable", "splash proof", "low power", "fast charging"),
        ("plug", ("european", "british", "american")),
    ),
    "outdoors": (
        ("backpack", "tent", "sleeping bag", "camping chair", "hammock"),
        ("ultralight", "tear resistant", "windproof", "easy to carry", "mosquito proof", "padded", "compact", "all season"),
        ("model", ("for one", "for two", "for four")),
    ),
}
USAGE = "Say search[words] on the search page, or click[button]."


@dataclass(frozen=True)
class Product:
    """Something that can be bought.

    Attributes:
        id: As in "P0042".
        department: What its kind belongs to.
        kind: What it is.
        title: Brand, one feature and kind: the others stand on the page of its features.
        features: All of them.
        options: What must be chosen, each with its values.
        cents: Its price.
    """

    id: str
    department: str
    kind: str
    title: str
    features: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    cents: int


@dataclass(frozen=True)
class Wish:
    """What somebody wants, and a product that is just that.

    Attributes:
        product: Its id.
        department: Department of the product.
        kind: What it must be.
        features: What it must have.
        options: What must be chosen, as values by the option's name.
        most_cents: What it may cost.
    """

    product: str
    department: str
    kind: str
    features: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    most_cents: int

    def text(self) -> str:
        """In words."""
        chosen = ", ".join(f"{name}: {value}" for name, value in self.options)
        return f"{self.kind}, which must be {' and '.join(self.features)}. {chosen}. For at most {_price(self.most_cents)}."


def _price(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


@lru_cache(maxsize=1)
def shop() -> Shop:
    """The shop, which is the same for everybody."""
    return Shop(random.Random(17))


class Shop:
    """Products, wishes, and a search over all that is said of a product.

    Args:
        rng: Everything is drawn from it.
    """

    def __init__(self, rng: random.Random) -> None:
        kinds = [(department, kind) for department, (kinds, *_) in DEPARTMENTS.items() for kind in kinds]
        self.products = {}
        for number in range(NUM_PRODUCTS):
            product = self._draw(rng, f"P{number:04d}", *kinds[number % len(kinds)])
            self.products[product.id] = product
        self._words = {product.id: Counter(_words_of(product)) for product in self.products.values()}
        self._holders: dict[str, list[str]] = defaultdict(list)
        for name, words in self._words.items():
            for word in words:
                self._holders[word].append(name)
        wanted = rng.sample(sorted(self.products), NUM_TRAIN + NUM_EVAL)
        self.wishes = tuple(self._wish(rng, self.products[name]) for name in wanted)

    def _draw(self, rng: random.Random, name: str, department: str, kind: str) -> Product:
        _, features, (choice, values) = DEPARTMENTS[department]
        has = tuple(rng.sample(features, 4))
        options = (
            ("colour", tuple(sorted(rng.sample(COLOURS, rng.randint(2, 4))))),
            (choice, tuple(sorted(rng.sample(values, rng.randint(2, len(values))), key=values.index))),
        )
        title = f"{rng.choice(BRANDS)} {has[0]} {kind}"
        return Product(name, department, kind, title, has, options, 100 * rng.randint(5, 120) + 99)

    def _wish(self, rng: random.Random, product: Product) -> Wish:
        options = tuple((name, rng.choice(values)) for name, values in product.options)
        most = 1000 * math.ceil((product.cents + 500) / 1000)
        features = tuple(rng.sample(product.features, 2))
        return Wish(product.id, product.department, product.kind, features, options, most)

    def search(self, text: str) -> tuple[str, ...]:
        """Ids of what fits, the best first: words count by how rare they are."""
        scores: dict[str, float] = defaultdict(float)
        for word in dict.fromkeys(re.findall(r"[a-z]+", text.lower()[:500])):
            holders = self._holders.get(word, ())
            for name in holders:
                scores[name] += math.log(1 + NUM_PRODUCTS / len(holders))
        return tuple(sorted(scores, key=lambda name: (-scores[name], name))[:50])


def _words_of(product: Product) -> list[str]:
    said = [product.title, product.department, *product.features, *(v for _, values in product.options for v in values)]
    return re.findall(r"[a-z]+", " ".join(said).lower())


def grade(wish: Wish, product: Product, chosen: dict[str, str]) -> float:
    """How good a purchase is, from 0 to 1: the part of the wish that it meets, half of it where it is another kind of the same
    department, and nothing where it is something else altogether. 1 is all that was wanted."""
    of_kind = 1.0 if product.kind == wish.kind else 0.5 if product.department == wish.department else 0.0
    met = sum(feature in product.features for feature in wish.features)
    met += sum(chosen.get(name) == value for name, value in wish.options)
    met += product.cents <= wish.most_cents
    return of_kind * met / (len(wish.features) + len(wish.options) + 1)


@dataclass(frozen=True)
class Place:
    """Where a customer stands.

    Attributes:
        results: What the last search found; None on the search page.
        page: Page of the results, from 0.
        item: The product that is looked at.
        features: Whether its features are shown.
        chosen: Its options as they are chosen, as pairs.
    """

    results: tuple[str, ...] | None = None
    page: int = 0
    item: str | None = None
    features: bool = False
    chosen: tuple[tuple[str, str], ...] = ()


class TextShop(TextEnv[Wish]):
    """Buying what somebody wants in a web shop: searching, reading, choosing options, and buying once.

    Actions are ``search[waterproof jacket]`` and ``click[...]`` with a button that the page shows. The reward comes with the
    purchase, from 0 to 1: see ``grade``. 1 is a success. ``info["subgoals"]`` says whether the item that is looked at is of the
    right kind.

    Args:
        max_turns: Actions per episode.
        split: "train", 200 wishes, or "eval", 50 others.

    Raises:
        ValueError: An argument is out of range.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {"max_turns": MAX_TURNS, "split": SPLIT}

    def __init__(self, max_turns: int = 15, split: str = "train") -> None:
        super().__init__(max_turns=max_turns, split=split)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; TextShop knows 'train' and 'eval'")
        self.place = Place()

    @property
    def system_prompt(self) -> str:
        return (
            "You buy in a web shop what a customer wants. Take one action a turn: search[words] on the search page, or "
            "click[button] with one of the buttons in brackets. Titles name one feature of a product; click[Features] shows "
            "all. Choose every option that the customer asks for before click[Buy Now], which ends the visit."
        )

    def sample_task(self, spec: str | None) -> TaskId[Wish]:
        wishes = shop().wishes
        if spec is None:
            first, count = (0, NUM_TRAIN) if self.split == "train" else (NUM_TRAIN, NUM_EVAL)
            number = first + int(self.np_random.integers(count))
        else:
            match = re.fullmatch(r"wish-(\d{1,4})", spec)
            if match is None or int(match[1]) >= len(wishes):
                raise ValueError(f"no task is called {spec!r:.80}; tasks are called wish-0 to wish-{len(wishes) - 1}")
            number = int(match[1])
        return TaskId(f"wish-{number}", wishes[number], {"product": wishes[number].product})

    def begin(self, task: Wish) -> str:
        self.place = Place()
        return self._look(task)

    def reply(self, task: Wish, action: str) -> Reply:
        match = re.fullmatch(r"[`\s]*(search|click)\s*\[([^\[\]]{0,300})\][`\s.;]*", action[:1000], re.IGNORECASE)
        if match is None or len(action) > 1000:
            return Reply(f"That is no action. {USAGE} {self._look(task)}")
        said = " ".join(match[2].split())
        if match[1].lower() == "search":
            if self.place.results is not None:
                return Reply(f"There is no search box on this page. {self._look(task)}")
            self.place = Place(results=shop().search(said))
            return Reply(self._look(task))
        button = next((name for name in self._buttons() if name.lower() == said.lower()), None)
        if button is None:
            return Reply(f"There is no button [{said[:60]}] on this page. {self._look(task)}")
        if button == "Buy Now":
            return self._buy(task)
        self.place = self._click(button)
        return Reply(self._look(task))

    def _buy(self, task: Wish) -> Reply:
        assert self.place.item is not None
        reward = grade(task, shop().products[self.place.item], dict(self.place.chosen))
        return Reply(
            "You have bought it: " + ("it is what was wanted." if reward == 1.0 else "not quite."), reward, reward == 1.0
        )

    def _buttons(self) -> list[str]:
        """What can be clicked here."""
        at = self.place
        if at.results is None:
            return []
        if at.item is None:
            shown = at.results[at.page * PAGE : (at.page + 1) * PAGE]
            more = ["Next >"] if (at.page + 1) * PAGE < len(at.results) else []
            return ["Back to Search", *(["< Prev"] if at.page else []), *more, *shown]
        if at.features:
            return ["Back to Search", "< Prev"]
        values = [value for _, choices in shop().products[at.item].options for value in choices]
        return ["Back to Search", "< Prev", "Features", "Buy Now", *values]

    def _click(self, button: str) -> Place:
        at = self.place
        if button == "Back to Search":
            return Place()
        if at.item is None:
            if button in ("Next >", "< Prev"):
                return replace(at, page=at.page + (1 if button == "Next >" else -1))
            return replace(at, item=button)
        if button == "< Prev":
            return replace(at, features=False) if at.features else replace(at, item=None, chosen=())
        if button == "Features":
            return replace(at, features=True)
        name = next(name for name, values in shop().products[at.item].options if button in values)
        return replace(at, chosen=(*((key, value) for key, value in at.chosen if key != name), (name, button)))

    def _look(self, task: Wish) -> str:
        """The page, with the wish on top of it."""
        at, lines = self.place, [f"Wish: {task.text()}"]
        buttons = " ".join(f"[{name}]" for name in self._buttons() if name in _NAVIGATION)
        if at.results is None:
            lines.append("Search page. search[words]")
        elif at.item is None:
            pages = max(1, math.ceil(len(at.results) / PAGE))
            lines.append(f"Results, page {at.page + 1} of {pages}. {buttons}" if at.results else f"Nothing found. {buttons}")
            for name in at.results[at.page * PAGE : (at.page + 1) * PAGE]:
                lines.append(f"[{name}] {shop().products[name].title} {_price(shop().products[name].cents)}")
        else:
            product = shop().products[at.item]
            lines.append(f"{product.title} {_price(product.cents)}. {buttons}")
            if at.features:
                lines.append(f"Features: {', '.join(product.features)}.")
            else:
                for name, values in product.options:
                    chosen = dict(at.chosen).get(name, "none")
                    lines.append(f"{name}: {' '.join(f'[{value}]' for value in values)} (chosen: {chosen})")
        return "\n".join(lines)

    def _info(self) -> dict[str, Any]:
        info = super()._info()
        assert self._current is not None
        item = self.place.item
        info["subgoals"] = {"right_kind": item is not None and shop().products[item].kind == self._current.task.kind}
        return info

    def expert_action(self) -> str:
        """Searches for what is wanted, turns pages until the product is there, and buys it with its options."""
        assert self._current is not None
        task, at = self._current.task, self.place
        if at.results is None:
            return f"search[{task.kind} {' '.join(task.features)} {' '.join(value for _, value in task.options)}]"
        if at.item is None:
            if task.product not in at.results:
                return "click[Back to Search]"
            here = at.results.index(task.product) // PAGE
            return f"click[{task.product if here == at.page else 'Next >' if here > at.page else '< Prev'}]"
        if at.item != task.product or at.features:
            return "click[< Prev]"
        return next((f"click[{v}]" for name, v in task.options if dict(at.chosen).get(name) != v), "click[Buy Now]")


_NAVIGATION: Sequence[str] = ("Back to Search", "< Prev", "Next >", "Features", "Buy Now")
