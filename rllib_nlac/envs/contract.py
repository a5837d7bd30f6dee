"""What an environment must do so that agents can be trained on it, as checks that anyone's environment can be put through."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env

from rllib_nlac.envs.answers import AnswerError, checked_reset, checked_step
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.spaces import check_text_env
from rllib_nlac.inputs.tool_calls import Call
from rllib_nlac.types import ANSWER

Answer = TypeVar("Answer")

ODD_TEXTS = ("", " ", "😀🙈 ünïcödé \u202e \x00", "x " * 50_000, '{"name": "x"}', "{" * 2000, "1/0", "%s {0} \\boxed{")
PLAIN_TEXTS = ("Hello.", "Yes.", "Is it big?", "1", "I do not know.")
MAX_STEPS = 2000
SLOW_EPISODE_S = 0.05
HANGS_S = 60.0  # a call that takes longer is said to hang


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at.
        verdict: "ok", "note" or "FAILED".
        detail: What was seen, and what to do about it.
    """

    check: str
    verdict: str
    detail: str = ""


class Broken(Exception):
    """A check failed; the text says what was seen and what to do."""


class Noted(Exception):
    """Nothing is wrong, and yet somebody should know."""


class Fresh:
    """Builds environments. Each call closes those before, since a server or a process of its own may stand behind each."""

    def __init__(self, make: Callable[[], gym.Env]) -> None:
        self._make = make
        self._open: list[gym.Env] = []

    def __call__(self) -> gym.Env:
        self.close()
        return self.another()

    def another(self) -> gym.Env:
        """One more, beside those that are open."""
        self._open.append(env := self._make())
        return env

    def close(self) -> None:
        for env in self._open:
            with contextlib.suppress(Exception):  # that close() can be called is a check of its own
                env.close()
        self._open = []


def check_environment(make: Callable[[], gym.Env], seeds: Sequence[int] = tuple(range(8))) -> Iterator[Finding]:
    """Puts an environment through all checks, one finding a check.

    Args:
        make: Builds a fresh one.
        seeds: Seeds of the episodes played.
    """
    checks: list[tuple[str, Callable[[Fresh, Sequence[int]], None]]] = [
        ("can be built, and its spaces are text", _spaces),
        ("gymnasium's own checker", _gymnasium),
        ("what it returns can be read", _answers),
        ("info holds what agents need", _info),
        ("calls of tools are answered", _tools),
        ("the same seed gives the same task", _seeds),
        ("instances do not disturb each other", _interleaved),
        ("global random states are left alone", _global_states),
        ("no text crashes it", _odd_texts),
        ("episodes end", _ends),
        ("what is hidden stays hidden", _hidden),
        ("pickled in mid-episode it goes on the same", _pickled),
        ("the scripted expert gets the largest return", _expert),
        ("an episode takes less than 50 ms", _speed),
    ]
    for name, check in checks:
        finding, fresh = Finding(name, "ok"), Fresh(make)
        try:
            check(fresh, seeds)
        except Noted as note:
            finding = Finding(name, "note", str(note))
        except Broken as broken:
            finding = Finding(name, "FAILED", str(broken))
        except Exception as error:
            finding = Finding(name, "FAILED", f"it raised {type(error).__name__}: {error}")
        finally:
            fresh.close()
        yield finding
        if check in (_spaces, _answers) and finding.verdict == "FAILED":
            return  # nothing else can be asked of it


def _spaces(make: Fresh, seeds: Sequence[int]) -> None:
    try:
        check_text_env(make(), "it")
    except ValueError as error:
        raise Broken(str(error)) from error


def _answers(make: Fresh, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for use_expert in (False, True):
            play(make(), seed, use_expert)


def _tools(make: Fresh, seeds: Sequence[int]) -> None:
    """Each tool is called without arguments, and one that does not exist: a call that fails is answered, too."""
    _, info = make().reset(seed=seeds[0])
    names = [tool["function"]["name"] for tool in info.get("tools") or ()]
    for name in (*names, "no_such_tool") if names else ():
        env = make()
        env.reset(seed=seeds[0])
        call = str(Call(name, {}))
        told = _checked(checked_step, env.step(call))[4].get(ANSWER)
        if not told:
            raise Noted(
                f"step({call!r}) has no info[{ANSWER!r}], so the result reaches the model as a user's message: put the results "
                'there, as {"role": "tool", "name": ..., "content": ...}, or derive from ToolEnv'
            )


def _gymnasium(make: Fresh, seeds: Sequence[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_env(make(), skip_render_check=True)
        except AssertionError as error:
            raise Broken(str(error)) from error


def _info(make: Fresh, seeds: Sequence[int]) -> None:
    _, info = make().reset(seed=seeds[0])
    last = play(make(), seeds[0]).infos[-1]
    if info.get("system_prompt") is None:
        raise Noted("info of reset() has no 'system_prompt': the agent is told nothing before the first observation")
    if "success" not in last:
        raise Noted(
            "the last info has no 'success', so a return above 0 counts as one, also where a lost game pays something: put "
            "'success': True or False into the info of the last step"
        )


def _seeds(make: Fresh, seeds: Sequence[int]) -> None:
    env = make()
    first = [play(env, seed).summary() for seed in seeds]
    for seed, episode in zip(seeds, first, strict=True):
        if play(make(), seed).summary() != episode:
            raise Broken(f"reset(seed={seed}) led to another episode the second time: draw from self.np_random, nothing else")
    if len(set(first)) == 1 and len(seeds) > 1:
        raise Noted(f"{len(seeds)} seeds gave the same episode each: is there only one task?")


def _interleaved(make: Fresh, seeds: Sequence[int]) -> None:
    pair = seeds[0], seeds[-1]
    alone = [play(make(), seed).summary() for seed in pair]
    players = [_steps(env, seed) for env, seed in zip((make(), make.another()), pair, strict=True)]
    together: list[Episode | None] = [None, None]
    try:
        while not all(together):
            for number, player in enumerate(players):
                if together[number] is None:
                    together[number] = next(player)
    except EpisodeLost as lost:
        raise Noted(f"two could not play at once: {lost.cause}. A run needs room for num_envs_per_env_runner of them") from None
    if [episode.summary() for episode in together if episode is not None] != alone:
        raise Broken("two instances played in turn behave differently than alone: they share state, such as a class attribute")


def _global_states(make: Fresh, seeds: Sequence[int]) -> None:
    states = random.getstate(), np.random.get_state()
    try:
        summaries = []
        for noise in (1, 2):
            random.seed(noise)
            np.random.seed(noise)
            before = random.getstate(), pickle.dumps(np.random.get_state())
            summaries.append(play(make(), seeds[0]).summary())
            if (random.getstate(), pickle.dumps(np.random.get_state())) != before:
                raise Broken("it changes the global random state of random or numpy.random: draw from self.np_random")
        if summaries[0] != summaries[1]:
            raise Broken("it depends on the global random state of random or numpy.random: draw from self.np_random")
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _odd_texts(make: Fresh, seeds: Sequence[int]) -> None:
    # A child process says what it is about to do, so that what kills or stops it has a name. It is forked, because `make` may
    # be a function that cannot be pickled.
    context = multiprocessing.get_context("fork")
    reports, ours = context.Pipe(duplex=False)
    child = context.Process(target=_try_odd_texts, args=(ours, make, seeds[0]))
    child.start()
    ours.close()
    doing, complaint = "the constructor", ""
    try:
        try:
            while doing and reports.poll(HANGS_S):
                doing, complaint = reports.recv()
        except EOFError:
            child.join(HANGS_S)
        if doing:
            code = child.exitcode
            if code is None:
                complaint = f"{doing} did not return within {HANGS_S:g} s: env_step_timeout_s ends such a wait in a run"
            else:
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                complaint = f"{doing} ended the process ({how}): a run would lose the EnvRunner with all its episodes"
    finally:
        child.kill()
        child.join()
        reports.close()
    if complaint:
        raise Broken(complaint)


def _try_odd_texts(reports: Connection, make: Callable[[], gym.Env], seed: int) -> None:
    """Reports each call before it is made; in the end an empty one, with what was wrong if anything was."""
    call, complaint = "the constructor", ""
    try:
        env = make()
        for text in ODD_TEXTS:
            reports.send((call := f"reset(seed={seed})", ""))
            env.reset(seed=seed)
            shown = repr(text[:20]) + (f" and so on, {len(text)} characters" if len(text) > 20 else "")
            reports.send((call := f"step({shown})", ""))
            observation = env.step(text)[0]
            if not isinstance(observation, str):
                complaint = f"{call} gave an observation of type {type(observation).__name__}, and it must be a str"
                break
        reports.send((call := "close()", complaint))
        env.close()
    except Exception as error:
        complaint = f"{call} raised {type(error).__name__}: {error}; answer it in words instead"
    reports.send(("", complaint))


def _ends(make: Fresh, seeds: Sequence[int]) -> None:
    for seed in seeds[:3]:
        episode = play(make(), seed, use_expert=False)
        if not episode.ended:
            raise Broken(f"an episode was not over after {MAX_STEPS} steps: set truncated at a limit of turns")


def _hidden(make: Fresh, seeds: Sequence[int]) -> None:
    for seed in seeds:
        observation, info = make().reset(seed=seed)
        for key, value in (info.get("privileged") or {}).items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            telling = len(text) >= 4 and any(letter.isalpha() for letter in text)
            if telling and text in observation:
                raise Broken(f"the first observation shows info['privileged'][{key!r}]: {text!r:.60}")
            if telling and text == str(info.get("task_id")):
                raise Broken(f"info['task_id'] is info['privileged'][{key!r}], and task ids are shown in logs: {text!r:.60}")


def _pickled(make: Fresh, seeds: Sequence[int]) -> None:
    env = make()
    env.reset(seed=seeds[0])
    if any(env.step(PLAIN_TEXTS[0])[2:4]):
        env.reset(seed=seeds[0])  # over in one step, so there is only a beginning
    try:
        copy = pickle.loads(pickle.dumps(env))
    except Exception as error:
        raise Noted(f"it cannot be pickled ({type(error).__name__}: {error}); nothing here needs that") from error
    for text in PLAIN_TEXTS:
        answers = [_plain(one.step(text)) for one in (env, copy)]
        if answers[0] != answers[1]:
            raise Broken(f"after step({text!r}) a pickled copy answers {answers[1]!r:.80} instead of {answers[0]!r:.80}")
        if answers[0][2] or answers[0][3]:
            break


def _expert(make: Fresh, seeds: Sequence[int]) -> None:
    if not _has_expert(make(), seeds[0]):
        raise Noted(
            "it has no expert_action(), which says what a scripted policy would do: with one, this check can prove it solvable"
        )
    for seed in seeds:
        episode = play(make(), seed)
        if episode.infos[-1].get("success") is not True:
            raise Broken(
                f"with seed {seed} the expert does not succeed: return {sum(episode.rewards):g}, {episode.infos[-1]!r:.200}"
            )


def _speed(make: Fresh, seeds: Sequence[int]) -> None:
    env, times = make(), []
    for seed in seeds:
        started = time.perf_counter()
        play(env, seed)
        times.append(time.perf_counter() - started)
    median = float(np.median(times))
    if median > SLOW_EPISODE_S:
        raise Noted(
            f"the median episode took {1000 * median:.0f} ms: with slow environments set env_threads or more EnvRunners"
        )


@dataclass
class Episode:
    """What happened in one episode."""

    observations: list[str]
    rewards: list[float]
    infos: list[dict[str, Any]]
    ended: bool = False

    def summary(self) -> tuple[Any, ...]:
        """What must be the same when the episode is played again."""
        return tuple(self.observations), tuple(self.rewards), str(self.infos[0].get("task_id"))


def play(env: gym.Env, seed: int, use_expert: bool = True) -> Episode:
    """Plays an episode, with the expert's actions where there are any, else with plain texts in turn."""
    *_, episode = _steps(env, seed, use_expert)
    return episode


def _steps(env: gym.Env, seed: int, use_expert: bool = True) -> Iterator[Any]:
    """Plays step by step; yields None after each and the episode in the end.

    Raises:
        Broken: An answer would cost an EnvRunner the episode.
    """
    observation, info = _checked(checked_reset, env.reset(seed=seed))
    episode = Episode([observation], [], [info])
    expert = getattr(env, "expert_action", None) if use_expert else None
    for number in range(MAX_STEPS):
        action = PLAIN_TEXTS[number % len(PLAIN_TEXTS)]
        if expert is not None:
            try:
                action = expert()
            except NotImplementedError:
                expert = None
        observation, reward, terminated, truncated, info = _checked(checked_step, env.step(action))
        if not isinstance(observation, str):
            place = "the last observation" if terminated or truncated else "an observation"
            raise Broken(f"{place} is of type {type(observation).__name__}, and it must be a str. A run would lose the episode")
        episode.observations.append(observation)
        episode.rewards.append(reward)
        episode.infos.append(info)
        episode.ended = terminated or truncated
        if episode.ended:
            break
        yield None
    yield episode


def _checked(read: Callable[[Any], Answer], answer: Any) -> Answer:
    try:
        return read(answer)
    except AnswerError as error:
        raise Broken(f"{error}. A run would lose the episode") from error


def _has_expert(env: gym.Env, seed: int) -> bool:
    env.reset(seed=seed)
    try:
        env.expert_action()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError):
        return False
    return True


def _plain(step: tuple[Any, ...]) -> tuple[str, float, bool, bool]:
    return str(step[0]), float(step[1]), bool(step[2]), bool(step[3])
