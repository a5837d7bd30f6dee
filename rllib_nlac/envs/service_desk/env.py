"""A service desk in the manner of τ-bench: find out what a customer wants, keep to the policy, change the database rightly."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId
from rllib_nlac.envs.partners import Partners
from rllib_nlac.envs.service_desk.store import TOOLS, WRITES, Store, call_tool, make_store
from rllib_nlac.envs.service_desk.tasks import DeskTask, Request, make_tasks
from rllib_nlac.envs.service_desk.users import EndpointUser, ScriptedUser, User, names, refuses, states
from rllib_nlac.envs.tools import ToolEnv, ToolError, parse_tool_call
from rllib_nlac.inputs.endpoint import endpoint_from
from rllib_nlac.inputs.tool_calls import read_calls

POLICY = """\
You work at the service desk of a shop. Each turn you either write to the customer, in plain text, or call a tool.

Policy:
- First ask the customer for the email address and find the user. Nothing is changed, or told about an order, before that.
- You serve this one customer. Orders of others are none of the customer's business.
- Only a pending order can be cancelled or sent to another address. The reason of a cancellation is 'no longer needed' or \
'ordered by mistake'; ask for it.
- Only items of a delivered order can be returned or exchanged. An exchange is for an available variant of the same product.
- Each order can be changed once. If the customer wants a second change of the same order, decline.
- Before every change say what you are going to do, name the order's id, ask the customer to confirm, and wait for a yes.
- After a cancellation or a return tell the customer the refund, in dollars.
- Decline what the policy does not allow, and do not change anything then.
- Do one thing at a time. When it is settled, ask whether there is anything else."""


IN_PLAIN_TEXT = (
    ' A tool call is one JSON object and nothing else, as in {"name": "get_order", "arguments": {"order_id": "W1001"}}.\n\n'
    "Policy:"
)


class ServiceDesk(ToolEnv[DeskTask]):
    """Customers of a shop, their wishes, a policy to keep to, and seven tools on the shop's database.

    The reward is 1 at the end if the database is as it should be, no rule was broken and what had to be said was said.

    Everything else is 0: half of a request, a forbidden one that was not declined once its order was named, a write without the
    customer's yes, a second write to an order, a write to somebody else's order or before the customer is known. A call that
    does not fit its schema changes nothing and is answered with its error.

    Args:
        max_turns: Messages and tool calls per episode.
        split: "train" (30 tasks) or "eval" (15 others).
        user: None is the scripted customer; ``{kind: endpoint, base_url: ..., model: ...}`` lets a language model play it.
            Of a list each episode draws one.
        plain_text: Whether tools are described in the system prompt and their results are texts of the user's, for models that
            were trained so; else both go into the places that the model's chat template has for them.

    Raises:
        ValueError: An argument is out of range.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {
        "max_turns": MAX_TURNS,
        "split": SPLIT,
        "plain_text": {"type": "boolean"},
    }

    partners: Partners[User]

    def __init__(
        self,
        max_turns: int = 30,
        split: str = "train",
        user: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        plain_text: bool = False,
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; ServiceDesk knows 'train' and 'eval'")
        self._world = make_store()
        self._tasks = make_tasks()[split]
        self.partners = Partners(user, make_user, "user")
        self._plain_text = plain_text
        self._store = Store()
        self._known: str | None = None  # the id of the user that was found
        self._confirmed: set[str] = set()
        self._written: set[str] = set()
        self._broken: list[str] = []
        self._told: list[str] = []
        self._named: set[str] = set()  # the task's orders that one of the two has named
        self._declined: set[str] = set()  # those that the agent declined to change, or to change again

    @property
    def _user(self) -> User:
        return self.partners.current

    @property
    def system_prompt(self) -> str:
        if not self._plain_text:
            return POLICY
        told = POLICY.replace("\n\nPolicy:", IN_PLAIN_TEXT)
        return f"{told}\n\nTools:\n" + "\n".join(json.dumps(tool["function"]) for tool in TOOLS)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [] if self._plain_text else TOOLS

    def sample_task(self, spec: str | None) -> TaskId[DeskTask]:
        known = list(self._tasks)
        name = known[int(self.np_random.integers(len(known)))] if spec is None else spec
        if name not in self._tasks:
            raise ValueError(f"no task is called {spec!r}; the split {self.split!r} has {', '.join(known)}")
        task = self._tasks[name]
        return TaskId(name, task, {"writes": gold_writes(task), "facts": facts(task)})

    def begin(self, task: DeskTask) -> str:
        self._store = self._world.copy()
        self._known = None
        self._confirmed, self._written, self._broken, self._told = set(), set(), [], []
        self._named, self._declined = set(), set()
        return f"Customer: {self._user.begin(task)}"

    def reply(self, task: DeskTask, action: str) -> Reply:
        if not self._plain_text:
            return super().reply(task, action)
        try:
            call = parse_tool_call(action)
            return Reply(f"Tool: {json.dumps(self.call(*call))}") if call is not None else self.answer(task, action)
        except ToolError as error:
            return Reply(f"Tool error: {error}")

    def answer(self, task: DeskTask, action: str) -> Reply:
        """What the customer says to a turn without a call."""
        if not action.strip():
            return Reply("Tool error: an empty message; write to the customer or call a tool")
        self._told.append(action)
        self._named |= _orders(task, action)
        self._declined |= self._named if refuses(action) else set()
        answer = self._user.answer(task, action)
        self._named |= _orders(task, answer)
        if re.match(r"\W*yes\b", answer.lower()):
            self._confirmed |= {order_id for order_id in self._world.orders if names(action, order_id)}
        if not self._user.is_over:
            return Reply(f"Customer: {answer}")
        success = self._is_settled(task)
        return Reply(f"Customer: {answer}", float(success), success=success)

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Changes the database, and takes note of what the policy forbids."""
        result = call_tool(self._store, name, arguments)
        if name == "find_user":
            self._known = result["user_id"]
        elif name in WRITES:
            order_id = arguments["order_id"]
            rules = {
                "the customer was not identified": self._known is None,
                "the order is somebody else's": self._store.orders[order_id]["user_id"] != self._known,
                "the customer had not confirmed": order_id not in self._confirmed,
                "the order had been changed before": order_id in self._written,
            }
            self._broken += [rule for rule, broken in rules.items() if broken]
            self._written.add(order_id)
            self._confirmed.discard(order_id)
            self._declined.discard(order_id)
        return result

    def _is_settled(self, task: DeskTask) -> bool:
        if self._store != final_store(self._world, task) or self._broken:
            return False
        if any(request.kind == "refused" and request.order_id not in self._declined for request in task.requests):
            return False
        return all(any(states(text, fact) for text in self._told) for fact in facts(task))

    def _info(self) -> dict[str, Any]:
        info = super()._info()
        info["privileged"]["broken_rules"] = list(self._broken)
        return info

    def expert_action(self) -> str:
        assert self._current is not None
        task = self._current.task
        script = expert_script(self._world, task)
        said = script[min(self._turn, len(script) - 1)]
        calls = [] if self._plain_text else read_calls(said)[1]
        return str(calls[0]) if calls else said


def make_user(config: Mapping[str, Any] | None) -> User:
    """The customer that a configuration asks for.

    Raises:
        ValueError: The kind or a key is unknown.
    """
    given = dict(config or {"kind": "scripted"})
    kind = given.pop("kind", None)
    if kind == "scripted" and not given:
        return ScriptedUser()
    if kind == "endpoint":
        return EndpointUser(endpoint_from({"temperature": 0.7, **given}, "env_config.user"))
    raise ValueError(f"env_config.user is {config!r}; it must have kind: scripted, or kind: endpoint with base_url and model")


def gold_writes(task: DeskTask) -> list[Any]:
    """The calls that settle a task."""
    return [list(request.write) for request in task.requests if request.write is not None]


def _orders(task: DeskTask, text: str) -> set[str]:
    """Those of a task's orders that a text names."""
    return {request.order_id for request in task.requests if names(text, request.order_id)}


def facts(task: DeskTask) -> list[str]:
    """What has to be said."""
    return [request.fact for request in task.requests if request.fact is not None]


def final_store(world: Store, task: DeskTask) -> Store:
    """The database as it should be in the end."""
    store = world.copy()
    for name, arguments in gold_writes(task):
        call_tool(store, name, arguments)
    return store


def expert_script(world: Store, task: DeskTask) -> list[str]:
    """What an agent that keeps to the policy does when it meets the scripted customer."""
    script = ["Could you tell me your email address?", _call_text("find_user", email=task.email)]
    for request in task.requests:
        script += _settle(world, request)
    return script


def _settle(world: Store, request: Request) -> list[str]:
    script = ["What is the order's number?", _call_text("get_order", order_id=request.order_id)]
    questions = {
        "item": "Which item?",
        "colour": "Which colour?",
        "reason": "What is the reason?",
        "address": "What is the new address?",
    }
    if request.write is None:
        if request.fact is not None:
            return [*script, f"You paid {request.fact} dollars. Is there anything else?"]
        return [*script, f"I am sorry, this is not possible for order {request.order_id}. Is there anything else?"]
    script += [question for slot, question in questions.items() if slot in request.answers]
    if request.look_up is not None:
        script.append(_call_text("get_product", name=request.look_up))
    name, arguments = request.write
    doing = name.replace("_", " ")
    script.append(f"I am going to do this for order {request.order_id}: {doing}, {json.dumps(arguments)}. Do you confirm?")
    script.append(_call_text(name, **arguments))
    refund = f" Your refund is {request.fact} dollars." if request.fact is not None else ""
    return [*script, f"This is done.{refund} Is there anything else?"]


def _call_text(name: str, /, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})
