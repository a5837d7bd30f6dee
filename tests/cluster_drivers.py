"""Drivers of clusters of several nodes, each in a process of its own: in that of the tests Ray knows one machine.

``run`` starts one, and gives what it printed as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune

TESTS = Path(__file__).parent
ANSWER = "answer: "
WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}


def run(name: str, *arguments: Any, timeout_s: float = 900) -> Any:
    """What a function of this file returns in a process of its own, whose temporary files are removed.

    Ray writes the address of a cluster where every other Ray of this machine looks for one, so its files are put elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="cl") as scratch:  # short, or sockets in it have names too long
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "RAY_TMPDIR": scratch, "PYTHONPATH": paths, "RAY_worker_niceness": "0"}
        environment.pop("RAY_ADDRESS", None)
        code = "import sys, cluster_drivers; cluster_drivers.main(*sys.argv[1:])"
        ended = subprocess.run(
            [sys.executable, "-c", code, name, *map(str, arguments)],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert ended.returncode == 0, f"{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
        said = [line for line in ended.stdout.splitlines() if line.startswith(ANSWER)]  # Ray may say something after it
    return json.loads(said[-1].removeprefix(ANSWER))


def main(name: str, *arguments: str) -> None:
    print("\n" + ANSWER + json.dumps(globals()[name](*arguments)))


def cluster_of(*nodes: dict[str, Any]) -> Any:
    """A cluster on this machine, whose first node is the driver's."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for node in nodes:
        cluster.add_node(object_store_memory=256 * 2**20, include_dashboard=False, **node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def place(*_: Any) -> dict[str, Any]:
    """The node of this process, what it was given there, and the bundles that this was reserved as."""
    from ray._private.worker import global_worker

    named = {key: re.fullmatch(r"(\w+)_group_(\d+)_\w+", key) for key in global_worker.core_worker.resource_ids()}
    return {
        "node": ray.get_runtime_context().get_node_id(),
        "takes": ray.get_runtime_context().get_assigned_resources(),
        "bundles": sorted({int(match[2]) for match in named.values() if match}),
    }


class Idle:
    """In the place of a learner, an EnvRunner or an engine: it takes their resources and does nothing."""

    Settings = dict
    mixes_sets = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def build(self) -> None:
        pass

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(self, *args, **kwargs)

    def assert_healthy(self) -> None:
        pass

    def _set_learner_index_and_placement_group(self, **_: Any) -> None:
        pass


class Reserved(tune.Trainable):
    """The processes of a trial, made as an algorithm makes them, but idle: says where each of them is."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        from rllib_nlac import NLAC

        return NLAC.default_resource_request(config["keys"])

    def setup(self, config: dict[str, Any]) -> None:
        from ray.rllib.core.learner import learner_group
        from ray.rllib.env.env_runner_group import EnvRunnerGroup
        from ray.train.backend import BackendConfig

        from rllib_nlac import NLACConfig
        from rllib_nlac.engine import make

        learner_group._get_backend_config = lambda _: BackendConfig()  # no process group, which on a GPU would be NCCL's
        make.ENGINES["vllm"] = Idle
        resolved = NLACConfig().update_from_dict(config["keys"])
        resolved.env_runner_cls = resolved._learner_class = Idle
        spec, chat = resolved.engine_spec, resolved.make_chat()
        self.runners = EnvRunnerGroup(config=resolved, local_env_runner=False)
        self.learners = resolved.build_learner_group(rl_module_spec=resolved.get_default_rl_module_spec())
        self.engines = make.make_engine(spec, chat)

    def step(self) -> dict[str, Any]:
        asked = {
            "EnvRunner": [actor.__ray_call__.remote(place) for actor in self.runners._worker_manager.actors().values()],
            "learner": [actor.__ray_call__.remote(place) for actor in self.learners._workers],
            "engine": [actor.__ray_call__.remote(place) for actor in self.engines._actors],
        }
        waited = [each for calls in asked.values() for each in calls]
        _, waiting = ray.wait(waited, num_returns=len(waited), timeout=300)
        places = {kind: [None if call in waiting else ray.get(call) for call in calls] for kind, calls in asked.items()}
        return {"places": places, "done": True}


def reserved() -> Any:
    """What finds no place, and a trial that does. Only the learners fit the second machine, which is not the trial's own."""
    cluster_of({"num_cpus": 3, "num_gpus": 2, "resources": {"first": 1}}, {"num_cpus": 0, "num_gpus": 2})
    keys = {
        "env": "TwentyQuestions",
        "custom_resources_for_main_process": {"first": 1},
        "num_env_runners": 1,
        "num_learners": 2,
        "num_gpus_per_learner": 1,
        "num_engines": 1,
        "num_gpus_per_engine": 2,
    }

    def trial(**changes: Any) -> dict[str, Any]:
        (result,) = tune.Tuner(Reserved, param_space={"keys": {**keys, **changes}}).fit()
        return result.metrics["places"]

    return {
        "too large": _refusal(lambda: trial(num_gpus_per_engine=4)),
        "too many": _refusal(lambda: trial(num_engines=2)),
        "too many, without Tune": _refusal(lambda: _build(keys | {"num_engines": 2})),
        "no folder": _refusal(lambda: _build(keys | {"language_model": _folder_of_the_driver_alone()})),
        "placed": trial(),
    }


class Worker:
    """A process with a part of a GPU, or none, on a machine where torch sees GPUs."""

    def has_gpu(self) -> bool:
        from rllib_nlac.engine import places

        places.torch.cuda.is_available = lambda: True
        return places.has_gpu()

    def gpus(self) -> list[Any]:
        return ray.get_gpu_ids()

    def sees(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def start_engine(self) -> tuple[float, float]:
        """When it began and ended."""
        from rllib_nlac.engine.places import alone_on_shared_gpu

        with alone_on_shared_gpu():
            began = time.monotonic()
            time.sleep(1)
            return began, time.monotonic()


def gpus() -> Any:
    """Who may use which of two GPUs, under the ``rllib`` command."""
    import rllib_nlac.command.cli  # noqa: F401

    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    from rllib_nlac.algorithm.placement import Kind, hold_own_gpu
    from rllib_nlac.baselines.stock import TextPPOConfig
    from rllib_nlac.engine.places import has_gpu

    def start(num_gpus: float) -> Any:
        return ray.remote(num_cpus=0, num_gpus=num_gpus)(Worker).remote()

    def hold(**keys: Any) -> Any:
        config = TextPPOConfig().update_from_dict({"num_gpus_per_learner": 1, **keys})
        return hold_own_gpu(config, [Kind("engine", {"GPU": 1}, keys.get("num_env_runners", 1), "num_gpus_per_engine")])

    none, halves = start(0), [start(0.5), start(0.5)]
    has = ray.get([worker.has_gpu.remote() for worker in (none, halves[0])])
    starts = ray.get([worker.start_engine.remote() for worker in halves])
    on = ray.get([worker.gpus.remote() for worker in halves])
    answer = {"has": has, "starts": starts, "on": on, "elsewhere": _refusal(hold)}
    # In the place of the two comes who holds the first one.
    for worker in halves:
        ray.kill(worker)
    while ray.available_resources().get("GPU") != 2:
        time.sleep(0.1)
    held = hold()
    engine = start(1)
    answer |= {"held": ray.get(held.gpu.remote()), "engine": ray.get(engine.gpus.remote())}
    answer["too many"] = _refusal(lambda: hold(num_env_runners=2))
    answer["nothing to hold"] = [hold(num_learners=1), hold(num_gpus_per_learner=0)]
    answer |= {"in the driver": has_gpu(), "hidden": ray.get(none.sees.remote())}
    return answer


def _build(keys: dict[str, Any]) -> None:
    from rllib_nlac import NLACConfig

    NLACConfig().update_from_dict(keys).build_algo().stop()


def _refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _folder_of_the_driver_alone() -> str:
    """A model below a path that means another folder in every process that was started elsewhere."""
    from rllib_nlac import NLACConfig

    shutil.copytree(NLACConfig().model_path, "elsewhere/model")
    os.chdir("elsewhere")
    return "/proc/self/cwd/model"


class Lose(tune.Callback):
    """Takes a node away while an iteration goes on, and adds another. Tune pickles it, but not what its class holds."""

    cluster: Any = None
    results: Any = None

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        Lose.results.append(result)
        if len(Lose.results) == 2:
            (player,) = self.cluster.worker_nodes
            threading.Timer(0.3, self.cluster.remove_node, (player,), {"allow_graceful": False}).start()
            self.cluster.add_node(num_cpus=2, resources={"player": 1}, object_store_memory=256 * 2**20, include_dashboard=False)


def lost_node(model: str, storage: str) -> Any:
    """A run on two nodes, of which the one with the EnvRunners and the engine is lost in the middle; another is there."""
    from rllib_nlac import NLAC, NLACConfig

    cluster = cluster_of({"num_cpus": 2, "resources": {"trainer": 2}}, {"num_cpus": 2, "resources": {"player": 1}})
    config = (
        NLACConfig()
        .environment("TwentyQuestions", env_config=WORLD)
        .language(language_model=model, prompts="compact", max_action_tokens=12)
        .roles(max_future_tokens=24, max_critique_tokens=32)
        .env_runners(num_env_runners=1, custom_resources_per_env_runner={"player": 1})
        .env_runners(num_envs_per_env_runner=8, episodes_per_iteration=16)
        .resources(custom_resources_for_main_process={"trainer": 1})
        .learners(num_learners=1, custom_resources_per_learner={"trainer": 1})
        .engines(num_engines=1, engine_config={"cpu_kv_cache_gib": 0.25, "timeout_s": 300})
        .training(lr=1e-3, train_batch_size_per_learner=32, minibatch_size=16)
        .callbacks(on_train_result=_say_where)
        .debugging(seed=0)
    )
    Lose.cluster, Lose.results = cluster, (results := [])
    ended = tune.Tuner(
        NLAC,
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=storage,
            name="lost",
            stop={"training_iteration": 4},
            callbacks=[Lose()],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    ).fit()
    return {
        "error": str(ended[0].error or ""),
        "checkpoint": ended[0].checkpoint and ended[0].checkpoint.path,
        "driver": ray.get_runtime_context().get_node_id(),
        "results": [
            {
                "where": result["where"],
                "episodes": int(result["env_runners"]["num_episodes_lifetime"]),
                "gradient_steps": int(result["learners"]["default_policy"]["num_gradient_steps"]),
                "logprob_gap": float(result["logprob_gap"]),
                "faults": {key: int(value) for key, value in {**result["faults"], **result["fault_tolerance"]}.items()},
            }
            for result in results
        ],
    }


def _say_where(*, algorithm: Any, result: dict[str, Any], **_: Any) -> None:
    """The nodes of an algorithm's processes, in its results."""
    engines = [actor.__ray_call__.remote(place) for actor in algorithm.engine._actors]
    learners = [worker.apply.remote(place) for worker in algorithm.learner_group._workers]
    runners = algorithm.env_runner_group.foreach_env_runner(place, local_env_runner=False, timeout_seconds=300)
    result["where"] = {
        "EnvRunner": [each["node"] for each in runners],
        "engine": [each["node"] for each in ray.get(engines)],
        "learner": [each["node"] for each in ray.get(learners)],
    }
