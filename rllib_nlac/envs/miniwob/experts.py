"""Scripts that do the tasks: each reads the page that an agent reads, and says the next action. So all tasks can be done."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from rllib_nlac.envs.miniwob.actions import Action, click, select, type_into
from rllib_nlac.envs.miniwob.page import Item, Page

Expert = Callable[[Page, Sequence[Action]], Action]
EXPERTS: dict[str, Expert] = {}
FIELDS = ("text", "password", "textarea", "number", "date", "time", "search", "email")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def _does(*names: str) -> Callable[[Expert], Expert]:
    def add(expert: Expert) -> Expert:
        EXPERTS.update(dict.fromkeys(names, expert))
        return expert

    return add


def _all(page: Page, *, kind: str | Sequence[str] | None = None, name: str | None = None, id: str | None = None) -> list[Item]:
    kinds = (kind,) if isinstance(kind, str) else kind
    return [
        item
        for item in page.items()
        if item.ref is not None
        and (kinds is None or item.kind in kinds)
        and (name is None or item.name == name)
        and (id is None or item.id == id)
    ]


def _ref(page: Page, **wanted: str) -> int:
    """The number of the first such item.

    Raises:
        LookupError: There is none.
    """
    for item in _all(page, **wanted):
        assert item.ref is not None
        return item.ref
    raise LookupError(f"{wanted} is not on this page:\n{page.text()}")


def _words(pattern: str, page: Page) -> tuple[str, ...]:
    match = re.search(pattern, page.instruction)
    if match is None:
        raise LookupError(f"the instruction reads otherwise: {page.instruction}")
    return match.groups()


def _fill(page: Page, texts: Sequence[str], then: int) -> Action:
    """Puts texts into the fields in their order, and clicks when all are in."""
    for field, text in zip(_all(page, kind=FIELDS), texts, strict=False):
        if field.value != text:
            assert field.ref is not None
            return type_into(field.ref, text)
    return click(then)


def _submit(page: Page) -> int:
    return _ref(page, id="subbtn") if _all(page, id="subbtn") else _all(page, kind="button")[-1].ref or 0


@_does("click-test")
def _only(page: Page, done: Sequence[Action]) -> Action:
    return click(_ref(page, kind="button"))


@_does("click-test-2")
def _one(page: Page, done: Sequence[Action]) -> Action:
    return click(_ref(page, name="ONE"))


@_does("click-button", "click-link")
def _quoted(page: Page, done: Sequence[Action]) -> Action:
    return click(_ref(page, name=_words(r'"(.*)"', page)[0]))


@_does("click-button-sequence")
def _sequence(page: Page, done: Sequence[Action]) -> Action:
    return click(_ref(page, name="TWO" if done else "ONE"))


@_does("click-dialog", "click-dialog-2")
def _dialog(page: Page, done: Sequence[Action]) -> Action:
    (name,) = _words(r'"(.*)"', page)
    return click(_ref(page, kind="button", name="Close" if name == "x" else name))


@_does("click-checkboxes", "click-checkboxes-large", "click-option")
def _boxes(page: Page, done: Sequence[Action]) -> Action:
    wanted = _words(r"Select (.*) and click", page)[0].split(", ")
    for box in _all(page, kind=("checkbox", "radio")):
        if (box.name in wanted) != ("checked" in box.states):
            assert box.ref is not None
            return click(box.ref)
    return click(_submit(page))


@_does("click-tab")
def _tab(page: Page, done: Sequence[Action]) -> Action:
    return click(_ref(page, name=_words(r"(Tab #\d)", page)[0]))


@_does("click-tab-2", "click-collapsible-2")
def _search_sections(page: Page, done: Sequence[Action]) -> Action:
    (wanted,) = _words(r'the link "(.*)"', page)
    links = [item for item in _all(page, name=wanted) if item.kind == "link"]
    if links:
        return click(links[0].ref or 0)
    sections = [item for item in _all(page) if re.fullmatch(r"(Tab|Section) #\d", item.name)]
    clicked = {action.ref for action in done}
    return click(next(item.ref or 0 for item in sections if item.ref not in clicked and not {"selected"} & {*item.states}))


@_does("click-widget")
def _widget(page: Page, done: Sequence[Action]) -> Action:
    return click(_ref(page, kind=_words(r'"(.*)"', page)[0]))


@_does("click-collapsible")
def _collapsible(page: Page, done: Sequence[Action]) -> Action:
    return click(_submit(page) if done else next(i.ref or 0 for i in _all(page) if i.name.startswith("Section")))


@_does("enter-text", "enter-text-dynamic")
def _text(page: Page, done: Sequence[Action]) -> Action:
    return _fill(page, _words(r'"(.*)"', page), _submit(page))


@_does("enter-text-2")
def _case(page: Page, done: Sequence[Action]) -> Action:
    text, case = _words(r'"(.*)" in all (upper|lower)', page)
    return _fill(page, [text.upper() if case == "upper" else text.lower()], _submit(page))


@_does("enter-password")
def _password(page: Page, done: Sequence[Action]) -> Action:
    return _fill(page, _words(r'"(.*)"', page) * 2, _submit(page))


@_does("login-user", "login-user-popup")
def _login(page: Page, done: Sequence[Action]) -> Action:
    if cancel := _all(page, kind="button", name="Cancel"):
        return click(cancel[0].ref or 0)
    return _fill(page, _words(r'"(.*)" and the password "(.*)"', page), _submit(page))


@_does("enter-date")
def _date(page: Page, done: Sequence[Action]) -> Action:
    month, day, year = _words(r"(\d+)/(\d+)/(\d+)", page)
    return _fill(page, [f"{year}-{month}-{day}"], _submit(page))


@_does("enter-time")
def _time(page: Page, done: Sequence[Action]) -> Action:
    hour, minute, half = _words(r"(\d+):(\d+)\s*([AP])M", page)
    return _fill(page, [f"{int(hour) % 12 + 12 * (half == 'P'):02d}:{minute}"], _submit(page))


@_does("focus-text", "focus-text-2")
def _focus(page: Page, done: Sequence[Action]) -> Action:
    match = re.search(r"the (\d)(?:st|nd|rd)", page.instruction)
    return click(_all(page, kind="text")[int(match[1]) - 1 if match else 0].ref or 0)


@_does("choose-list", "click-scroll-list")
def _choose(page: Page, done: Sequence[Action]) -> Action:
    (box,) = _all(page, kind="select")
    (wanted,) = _words(r"Select (.*) from the", page)
    options = wanted.split(", ") if box.many else [wanted]
    if sorted((box.value or "").split(", ")) != sorted(wanted.split(", ")):
        return select(box.ref or 0, *options)
    return click(_submit(page))


@_does("choose-date")
def _pick_date(page: Page, done: Sequence[Action]) -> Action:
    month, day, year = map(int, _words(r"(\d+)/(\d+)/(\d+)", page))
    return _in_calendar(page, month, day, year, _ref(page, id="datepicker"), click(_submit(page)))


def _in_calendar(page: Page, month: int, day: int, year: int, field: int, then: Action) -> Action:
    """Opens the calendar, turns its pages back or forth, and picks the day."""
    if any(item.ref == field and item.value == f"{month:02d}/{day:02d}/{year}" for item in page.items()):
        return then
    shown = " ".join(item.name for item in page.items())
    match = re.search(rf"({'|'.join(MONTHS)}) (\d{{4}})", shown)
    if match is None:
        return click(field)
    at, wanted = int(match[2]) * 12 + MONTHS.index(match[1]) + 1, year * 12 + month
    if at != wanted:
        return click(_ref(page, name="Prev" if wanted < at else "Next"))
    return click(_ref(page, kind="link", name=str(day)))


@_does("use-autocomplete")
def _autocomplete(page: Page, done: Sequence[Action]) -> Action:
    (start,) = _words(r'starts with "([^"]*)"', page)
    match = re.search(r'ends with "([^"]*)"', page.instruction)
    (field,) = _all(page, kind="text")

    def fits(text: str) -> bool:
        return text.startswith(start) and text.endswith(match[1] if match else "")

    if field.value and field.value != start and fits(field.value):
        return click(_submit(page))
    offered = [item for item in _all(page, kind="") if fits(item.name)]
    return click(offered[0].ref or 0) if offered else type_into(field.ref or 0, start)


@_does("simple-arithmetic")
def _arithmetic(page: Page, done: Sequence[Action]) -> Action:
    match = re.search(r"(\d) ([-+x]) (\d) =", page.text())
    assert match is not None
    a, b = int(match[1]), int(match[3])
    return _fill(page, [str({"+": a + b, "-": a - b, "x": a * b}[match[2]])], _submit(page))


@_does("simple-algebra")
def _algebra(page: Page, done: Sequence[Action]) -> Action:
    match = re.search(r"(x|\d+) ([-+]) (x|\d+) = (\d+)", page.text())
    assert match is not None
    known, total = int(match[3] if match[1] == "x" else match[1]), int(match[4])
    sums = total - known if match[2] == "+" else total + known if match[1] == "x" else known - total
    return _fill(page, [str(sums)], _submit(page))


@_does("odd-or-even")
def _parity(page: Page, done: Sequence[Action]) -> Action:
    items = list(page.items())
    for odd, number, even in zip(items, items[1:], items[2:], strict=False):
        if odd.name == "Odd":
            wanted = odd if int(number.name) % 2 else even
            if "selected" not in wanted.states:
                return click(wanted.ref or 0)
    return click(_ref(page, name="Submit"))


@_does("guess-number")
def _guess(page: Page, done: Sequence[Action]) -> Action:
    (field,) = _all(page, kind="number")
    match = re.search(r"The number is (lower|higher) than (\d)", page.text())
    last: list[int] = [int(action.texts[0]) for action in done if action.kind == "type"]
    heard = match is not None and bool(last) and match[2] == str(last[-1])
    if last and not heard:
        return click(_submit(page))
    low, high = 0, 9
    for guess, after in pairwise([*last, None]):
        assert guess is not None and match is not None
        is_higher = after > guess if after is not None else match[1] == "higher"
        low, high = (guess + 1, high) if is_higher else (low, guess - 1)
    return type_into(field.ref or 0, str((low + high) // 2))


@_does("find-word")
def _word(page: Page, done: Sequence[Action]) -> Action:
    (place,) = _words(r"the (\d+)(?:st|nd|rd|th) word", page)
    paragraph = max((item.name for item in page.items()), key=len)
    return _fill(page, [re.sub(r"[^a-zA-Z]", "", paragraph.split()[int(place) - 1])], _submit(page))


@_does("read-table")
def _table(page: Page, done: Sequence[Action]) -> Action:
    (key,) = _words(r"the value of (.*) into", page)
    names = [item.name for item in page.items()]
    return _fill(page, [names[names.index(key) + 1]], _submit(page))


@_does("read-table-2")
def _form_of_table(page: Page, done: Sequence[Action]) -> Action:
    names = [item.name for item in page.items()]
    asked = [name[:-1] for name in names if name.endswith(":")]
    return _fill(page, [names[names.index(key) + 1] for key in asked], _submit(page))


@_does("search-engine")
def _search(page: Page, done: Sequence[Action]) -> Action:
    name, place = _words(r'enter "(.*)" and press "Search", then find and click the (\d)', page)
    (field,) = _all(page, kind="text")
    if field.value != name:
        return type_into(field.ref or 0, name)
    pages = [item for item in _all(page, kind="link") if re.fullmatch(r"[123]", item.name)]
    if not pages:
        return click(_ref(page, id="search"))
    wanted, row = divmod(int(place) - 1, 3)
    if "active" not in pages[wanted].states:
        return click(pages[wanted].ref or 0)
    results = [item for item in _all(page, kind="link") if not re.fullmatch(r"[123<>]", item.name)]
    return click(results[row].ref or 0)


@_does("navigate-tree")
def _tree(page: Page, done: Sequence[Action]) -> Action:
    (wanted,) = _words(r'named "(.*)"', page)
    if found := _all(page, name=wanted):
        return click(found[0].ref or 0)
    clicked = {action.ref for action in done}
    return click(next(item.ref or 0 for item in _all(page) if item.ref not in clicked and "expandable-hitarea" in item.name))


@_does("email-inbox")
def _mail(page: Page, done: Sequence[Action]) -> Action:
    (sender,) = _words(r"the email by (.*?) and", page)
    names = [item.name for item in page.items()]
    if "to me" not in names and not _all(page, kind="textarea"):
        mails = [item for item in page.items() if item.name == sender and item.ref is not None]
        return click(mails[0].ref or 0)
    if "trash icon" in page.instruction:
        return click(_ref(page, name="trash"))
    if "star icon" in page.instruction:
        return click(_ref(page, name="star"))
    if match := re.search(r'with the text "(.*)"', page.instruction):
        if not _all(page, kind="textarea"):
            return click(_ref(page, name="Reply"))
        return _fill(page, [match[1]], _ref(page, name="send-reply") if _all(page, name="send-reply") else 0)
    (receiver,) = _words(r"forward that email to (.*)\.", page)
    if not _all(page, kind="textarea"):
        return click(_ref(page, name="Forward"))
    return _fill(page, [receiver], _ref(page, name="send-forward"))


@_does("social-media")
def _social(page: Page, done: Sequence[Action]) -> Action:
    user, button = _words(r'the user (@\S+), click on the "(.*)" button', page)
    seen = False
    for item in page.items():
        seen = item.name == user if item.name.startswith("@") else seen
        if seen and item.ref is not None and item.name.lower().startswith(button.lower()):
            return click(item.ref)
    more = next(index for index, item in enumerate(page.items()) if item.name == user)
    return click(next(item.ref or 0 for item in list(page.items())[more:] if item.ref is not None and item.name == "more"))


@_does("social-media-some")
def _social_some(page: Page, done: Sequence[Action]) -> Action:
    button, count, user = _words(r'the "(.*)" button on (\d+) posts? by (@\S+)', page)
    seen, left = False, int(count)
    for item in page.items():
        seen = item.name == user if item.name.startswith("@") else seen
        if seen and item.ref is not None and item.name.split()[0].lower() == button.lower() and left:
            left -= 1
            if "active" not in item.states:
                return click(item.ref)
    return click(_ref(page, name="Submit"))


@_does("phone-book")
def _phone(page: Page, done: Sequence[Action]) -> Action:
    name, what = _words(r"Find (\S+) in the contact book and click on their (phone|email|address)", page)
    names = [item.name for item in page.items()]
    if name not in names:
        return click(_ref(page, kind="link", name=">"))
    key = names.index(f"{what.capitalize()}:")
    return click(next(item.ref or 0 for item in list(page.items())[key:] if item.ref is not None))


@_does("multi-layouts")
def _layouts(page: Page, done: Sequence[Action]) -> Action:
    genre, director, year = _layout_values(page)
    values = {"Genre": genre, "Director": director, "Year": year, "Released": year}
    labels = [next(values[key] for key in values if key in item.name) for item in page.items() if _is_label(item, values)]
    buttons = [item for item in _all(page) if item.kind not in FIELDS]
    return _fill(page, labels, buttons[-1].ref or 0)


def _is_label(item: Item, values: dict[str, str]) -> bool:
    return item.ref is None and any(key in item.name for key in values)


def _layout_values(page: Page) -> tuple[str, ...]:
    return _words(r"(?i)for (?:an? )?(.*?) movies? directed by (.*?) from (?:year )?(\d{4})", page)


@_does("book-flight")
def _flight(page: Page, done: Sequence[Action]) -> Action:
    wish, start, end, month, day, year = _words(
        r"the (cheapest|shortest) one-way flight from: (.*) to: (.*) on (\d+)/(\d+)/(\d+)", page
    )
    if booking := [item for item in _all(page, kind="button") if item.name.startswith("Book flight")]:
        return click(booking[_best_flight(page, booking, wish)].ref or 0)
    for field, wanted in zip(_all(page, kind="text"), (start, end), strict=False):
        offered = [item for item in _all(page, kind="") if wanted in item.name]
        if not field.value:
            return type_into(field.ref or 0, wanted)
        if field.value == wanted:
            return click(offered[0].ref or 0)
    field = _all(page, kind="text")[2]
    return _in_calendar(page, int(month), int(day), int(year), field.ref or 0, click(_ref(page, id="search")))


def _best_flight(page: Page, booking: Sequence[Item], wish: str) -> int:
    if wish == "cheapest":
        costs = [int(item.name.rpartition("$")[2]) for item in booking]
    else:
        times = [re.fullmatch(r"(\d+)h (\d+)m", item.name) for item in page.items()]
        costs = [int(match[1]) * 60 + int(match[2]) for match in times if match]
    return costs.index(min(costs))
