"""What web pages cost, and whether they can be relied on: ``python -m benchmarks.browser``

Prints what scripted episodes of MiniWoB make of four browsers, and of one with four windows; what is left of processes and open
files after 200 episodes; what becomes of a rollout whose browsers are killed; and how often the script of each task succeeds.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from benchmarks.figures import BROWSER_STEPS, BROWSER_TASKS, LEFT_BEHIND, Figure, add_option, hand_over
from rllib_nlac.envs.miniwob.env import MiniWoB
from rllib_nlac.envs.miniwob.pool import close_all, pool_of
from rllib_nlac.envs.miniwob.tasks import TASKS

THREADS = 4


def play(env: MiniWoB, task: str | None = None, seed: int | None = None) -> tuple[int, dict]:
    """One scripted episode; its steps and its last info."""
    env.reset(seed=seed, options={"task_id": task})
    steps, over, info = 0, False, {}
    while not over:
        *_, terminated, truncated, info = env.step(env.expert_action())
        steps, over = steps + 1, terminated or truncated
    return steps, info


def cpu_seconds() -> float:
    """Processor time of this process and all below it: what a step costs, however busy the machine is."""
    own = psutil.Process()
    return sum(times.user + times.system for times in (each.cpu_times() for each in [own, *own.children(recursive=True)]))


def speed(num_browsers: int, episodes: int) -> tuple[float, str]:
    """Steps a second of four threads, each with an environment, which share so many browsers; and the line that says so."""
    envs = [MiniWoB(num_browsers=num_browsers) for _ in range(THREADS)]
    for number, env in enumerate(envs):
        play(env, seed=number)

    def work(number: int) -> int:
        return sum(play(envs[number], seed=1000 * number + episode)[0] for episode in range(episodes // THREADS))

    started, busy = time.perf_counter(), cpu_seconds()
    with ThreadPoolExecutor(THREADS) as threads:
        steps = sum(threads.map(work, range(THREADS)))
    rate = steps / (time.perf_counter() - started)
    cost = 1000 * (cpu_seconds() - busy) / steps
    memory = sum(child.memory_full_info().pss for child in psutil.Process().children(recursive=True)) / 2**20
    started_now = len(pool_of(envs[0]._programs, num_browsers).browsers())
    for env in envs:
        env.close()
    close_all()
    return rate, (
        f"{rate:6.1f} steps/s and {cost:4.0f} ms of processor time a step, resets among them "
        f"({episodes // THREADS * THREADS} episodes, {steps} steps, {started_now} browsers, {memory:.0f} MiB)"
    )


def left_behind(episodes: int) -> tuple[int, str]:
    """Processes and open files before and after so many episodes of environments that are made, and dropped without a close.

    Returns:
        How many more there are after than before, and the line that says so.
    """
    own = psutil.Process()
    play(MiniWoB(), seed=0)
    close_all()
    gc.collect()
    before = len(own.children(recursive=True)), own.num_fds()
    env = MiniWoB()
    most = 0
    for episode in range(episodes):
        if episode % 20 == 0:
            env = MiniWoB()
        play(env, seed=episode)
        most = max(most, pool_of(env._programs, 1).num_windows())
    close_all()
    del env
    gc.collect()
    after = len(own.children(recursive=True)), own.num_fds()
    return sum(max(later - earlier, 0) for earlier, later in zip(before, after, strict=True)), (
        f"{episodes} episodes: processes {before[0]} before, {after[0]} after; open files {before[1]} before, {after[1]} "
        f"after; at most {most} windows at a time"
    )


def main_process(env: MiniWoB) -> psutil.Process:
    """The browser's own process: the driver's child; those that it starts are of some type."""
    assert env._window is not None
    below = psutil.Process(env._window.browser.process).children(recursive=True)
    (driver,) = [each for each in below if "driver" in each.name()]
    own = [each for each in driver.children(recursive=True) if "crashpad" not in each.name()]
    (browser,) = [each for each in own if not any(part.startswith("--type=") for part in each.cmdline())]
    return browser


def killed(episodes: int) -> str:
    """What comes of episodes whose browser is killed in every tenth."""
    env, kills, lost, won, reasons = MiniWoB("login-user"), 0, 0, 0, set()
    for episode in range(episodes):
        while True:
            env.reset(seed=episode)
            if episode % 10 == 9 and lost <= episode // 10:
                main_process(env).kill()
                kills += 1
            over, info = False, {}
            while not over:
                *_, terminated, truncated, info = env.step(env.expert_action())
                over = terminated or truncated
            if not info.get("discard"):
                break
            lost += 1
            reasons.add(info["stop_reason"])
        won += info["success"]
    env.close()
    return f"{kills} browsers killed in {episodes} episodes: {lost} lost ({', '.join(sorted(reasons))}), {won} won in the end"


def success(seeds: int) -> int:
    """Prints how often the script of each task succeeds; returns how many tasks are always done."""
    env, done = MiniWoB(), 0
    for task in TASKS:
        results = [play(env, f"{task}/{2 * seed}") for seed in range(seeds)]
        won = sum(info["success"] is True for _, info in results)
        done += won == seeds
        steps = sorted(steps for steps, _ in results)
        print(f"  {task:<24} {won:3} of {seeds}, {steps[0]} to {steps[-1]} steps")
    print(f"  {done} of {len(TASKS)} tasks are always done")
    return done


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200, help="of each part")
    parser.add_argument("--seeds", type=int, default=20, help="of each task")
    add_option(parser)
    return parser


def main() -> None:
    """Prints all of it."""
    parser = options()
    arguments = parser.parse_args()
    if arguments.episodes < THREADS:
        parser.error(f"--episodes is {arguments.episodes} and must be at least {THREADS}, one for each thread")
    print(f"{THREADS} threads on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    for num_browsers, what, goal in ((4, "four browsers", BROWSER_STEPS), (1, "one browser, four windows", ())):
        rate, line = speed(num_browsers, arguments.episodes)
        print(f"  {what:25}  {line}", flush=True)
        hand_over(arguments.figures, Figure(f"MiniWoB, {what}", rate, "steps/s", *goal))
    count, line = left_behind(arguments.episodes)
    print(line, flush=True)
    hand_over(arguments.figures, Figure("MiniWoB, processes and open files left behind", count, "", *LEFT_BEHIND))
    print(killed(min(arguments.episodes, 50)), flush=True)
    print("the script of each task")
    done = success(arguments.seeds)
    hand_over(arguments.figures, Figure("MiniWoB, tasks that are always done", done, f"of {len(TASKS)}", *BROWSER_TASKS))


if __name__ == "__main__":
    main()
