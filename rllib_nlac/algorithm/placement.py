"""Where the processes of an algorithm go: what Tune reserves for a trial, and whether a cluster has room for it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_nlac.engine.places import Bundle, Node, fit_together, fits, is_of_ray, nodes_of_cluster, reserved, shown
from rllib_nlac.learner.placed import learners_in

CHECK_S = 120.0  # for a node to look at a folder; one that takes longer is not waited for
FREE_GPU_S = 60.0  # until Ray has one
OWN = "trial's own process"
HOW = {
    "STRICT_PACK": ", all on one node (placement_strategy)",
    "STRICT_SPREAD": ", each on a node of its own (placement_strategy)",
}


class PlacementError(ValueError):
    """A process, or all of them together, find no place in the cluster; or a node lacks what they read there."""


@dataclass(frozen=True)
class Kind:
    """The processes of a trial that do the same.

    Attributes:
        name: What a person calls one of them.
        bundle: What each takes, on one node.
        count: How many there are.
        keys: The keys of the configuration that say so.
    """

    name: str
    bundle: Bundle
    count: int
    keys: str


def with_engines(request: PlacementGroupFactory, config: Any) -> PlacementGroupFactory:
    """RLlib's request and a bundle for each engine actor, behind all others.

    Raises:
        PlacementError: The trial's own process takes nothing, and RLlib would miscount.
    """
    if request.head_bundle_is_empty and config.num_env_runners + config.evaluation_num_env_runners:
        raise PlacementError(
            "config.num_cpus_for_main_process is 0: RLlib then puts each EnvRunner into the place of the next one. Set it to a "
            "number above 0, such as 0.1"
        )
    own: list[Bundle] = [{}] if request.head_bundle_is_empty else []
    engines = [config.engine_spec.bundle] * config.num_engines
    return PlacementGroupFactory([*own, *request.bundles, *engines], strategy=request.strategy)


def trial_request(request: PlacementGroupFactory, config: Any) -> PlacementGroupFactory:
    """What Tune is to reserve for a trial: RLlib's request and the engines'.

    Raises:
        PlacementError: Ray is there already, and no node, or not all of them, have as much.
    """
    whole = with_engines(request, config)
    if ray.is_initialized() and ray.util.get_current_placement_group() is None:
        check_room(kinds_of(whole, config), nodes_of_cluster(), whole.strategy)
    return whole


class Holder:
    """Takes a GPU from Ray for a process that Ray did not start."""

    def gpu(self) -> str:
        """Which one it is."""
        return str(ray.get_gpu_ids()[0])


def hold_own_gpu(config: Any, others: Sequence[Kind]) -> Any:
    """Takes the GPU of a learner that is in this process, so that Ray gives it to no other one.

    In a trial of Tune Ray knows of it. In a script, or under ``rllib evaluate``, it does not: RLlib's learner takes the device
    ``local_gpu_idx``, and the first actor that asked for a GPU would be given the same.

    Args:
        config: The algorithm's configuration.
        others: The processes that it will start.

    Returns:
        What holds it as long as somebody refers to it; None where there is nothing to hold.

    Raises:
        PlacementError: There is no GPU for it, or Ray has another one for it than RLlib.
    """
    share = config.num_gpus_per_learner
    if is_of_ray() or not share or config.num_learners or not any(kind.bundle.get("GPU") for kind in others):
        return None
    if not ray.is_initialized():
        ray.init()  # as the first process would
    here = Kind("learner in this process", {"GPU": share}, 1, "num_gpus_per_learner")
    check_room([here, *others], nodes_of_cluster())
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    holder = ray.remote(num_cpus=0, num_gpus=share, scheduling_strategy=node)(Holder).remote()
    try:
        given = ray.get(holder.gpu.remote(), timeout=FREE_GPU_S)
    except RayError as error:
        raise PlacementError(
            f"Ray has no free GPU on this machine for the learner in this process ({type(error).__name__}): end what has them, "
            "or set num_learners to 1, and Ray finds a place for it"
        ) from error
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count() or int(given) + 1)]
    if given in names and names.index(given) != config.local_gpu_idx:
        raise PlacementError(
            f"Ray gives GPU {given} to the learner in this process, which would take number {config.local_gpu_idx}: set "
            f"local_gpu_idx to {names.index(given)}, or num_learners to 1"
        )
    return holder


def check_cluster(rllibs_request: Callable[[Any], PlacementGroupFactory], config: Any) -> Any:
    """Looks at the cluster before an algorithm starts its first process; one without any others needs no look.

    Args:
        rllibs_request: Gives RLlib's part of what Tune would reserve.
        config: The algorithm's configuration.

    Returns:
        As ``hold_own_gpu``.

    Raises:
        PlacementError: A process finds no place, or not the model's folder where it is put.
    """
    if not (config.num_env_runners or config.num_learners or config.num_engines or config.evaluation_num_env_runners):
        return None
    if not ray.is_initialized():
        ray.init()  # as the first process would
    try:
        request = with_engines(rllibs_request(config), config)
    except FileNotFoundError as error:  # the driver, which has looked too, may be another machine
        raise PlacementError(f"node {platform.node()}, on which the trial runs: {error}, and put it there, too") from error
    others = [kind for kind in kinds_of(request, config) if kind.name != OWN]
    if ray.util.get_current_placement_group() is None:
        check_room(others, nodes_of_cluster())  # a trial of Tune has its room
    if Path(config.model_path).is_dir():  # and no hub's name
        check_model_folder(config.model_path, others)
    return hold_own_gpu(config, others)


def kinds_of(request: PlacementGroupFactory, config: AlgorithmConfig) -> list[Kind]:
    """What a request for a trial consists of."""
    bundles, engines = list(request.bundles), getattr(config, "num_engines", 0)
    learners = min(config.num_learners, len(bundles) - engines)
    own = 0 if request.head_bundle_is_empty else 1
    first_learner, first_engine = len(bundles) - engines - learners, len(bundles) - engines
    places = {
        "engine": bundles[first_engine:],
        "learner": bundles[first_learner:first_engine],
        "EnvRunner": bundles[own:first_learner],
        OWN: bundles[:own],
    }
    keys = {
        "engine": "num_gpus_per_engine and engine_config's tensor_parallel_size, or num_engines",
        "learner": "num_gpus_per_learner, num_cpus_per_learner and custom_resources_per_learner, or num_learners",
        "EnvRunner": (
            "num_cpus_per_env_runner, num_gpus_per_env_runner and custom_resources_per_env_runner, or num_env_runners and "
            "evaluation_num_env_runners"
        ),
        OWN: "num_cpus_for_main_process and custom_resources_for_main_process"
        + ("" if config.num_learners else ", num_cpus_per_learner and num_gpus_per_learner"),
    }
    kinds = []
    for name, bundles_of in places.items():
        distinct = list({tuple(sorted(bundle.items())): bundle for bundle in bundles_of}.values())
        kinds += [Kind(name, bundle, bundles_of.count(bundle), keys[name]) for bundle in distinct]
    return kinds


def check_room(kinds: Sequence[Kind], nodes: Sequence[Node], strategy: str = "PACK") -> None:
    """Says at once what Tune or an actor would wait for, for ever.

    Raises:
        PlacementError: A process fits no node, or all of them together do not fit the cluster, were nothing else in it.
    """
    has = "; ".join(f"{node.name}: {shown(node.resources)}" for node in nodes)
    for kind in kinds:
        if not any(fits(kind.bundle, node.resources) for node in nodes):
            which = "the" if kind.name == OWN else "each"
            raise PlacementError(
                f"{which} {kind.name} takes {shown(kind.bundle)} on one node, and no node that Ray knows has as much ({has}): "
                f"lower {kind.keys}, or add a larger node"
            )
    bundles = [kind.bundle for kind in kinds for _ in range(kind.count)]
    if not fit_together(bundles, [node.resources for node in nodes], strategy):
        asked = ", ".join(f"{kind.count} x {kind.name} ({shown(kind.bundle)})" for kind in kinds)
        raise PlacementError(
            f"one trial takes {asked}{HOW.get(strategy, '')}, and Ray's nodes cannot hold them together ({has}): lower "
            "num_engines, num_env_runners or num_learners, or what each takes, or add a node"
        )


@contextmanager
def placed_learners(config: Any) -> Iterator[None]:
    """While it lasts, the learners that RLlib starts take the bundles that the trial reserved for learners."""
    gpus = config.num_gpus_per_learner
    cpus = config.num_cpus_per_learner if config.num_cpus_per_learner != "auto" else int(not gpus)
    need = {"CPU": cpus, "GPU": gpus, **(config.custom_resources_per_learner or {})}
    with learners_in(reserved(config.num_learners, config.num_engines, need)):
        yield


def check_model_folder(model: str, kinds: Sequence[Kind]) -> None:
    """Has every node on which processes of this trial may run look whether a model's folder is there.

    Raises:
        PlacementError: A node cannot read it.
    """
    nodes = nodes_of_cluster()
    group = ray.util.get_current_placement_group()
    if group is not None:
        chosen = set(placement_group_table(group)["bundles_to_node_id"].values())
    else:
        chosen = {node.id for node in nodes if any(fits(kind.bundle, node.resources) for kind in kinds)}
    here, folder = ray.get_runtime_context().get_node_id(), str(Path(model).absolute())
    asked = {_ask(node, folder): node for node in nodes if node.id in chosen and node.id != here}
    if not asked:
        return
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=CHECK_S)
    troubles = {asked[reference].name: f"no answer within {CHECK_S:g} s" for reference in late}
    for reference in ready:
        try:
            troubles[asked[reference].name] = ray.get(reference)
        except RayError as error:
            troubles[asked[reference].name] = f"{type(error).__name__}: {error}"
    if wrong := [f"node {name}: {trouble}" for name, trouble in sorted(troubles.items()) if trouble]:
        raise PlacementError(
            f"config.language_model is the folder {folder!r}, and not every node on which this trial may run can read it "
            f"({'; '.join(wrong)}): copy it to the same path there, put it on a storage that all nodes mount, or name a model "
            "of the Hugging Face hub"
        )


def _ask(node: Node, folder: str) -> ray.ObjectRef[str]:
    """What is wrong with a folder on a node, an empty text where nothing is."""
    alone = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(num_cpus=0, max_retries=1, scheduling_strategy=alone)(reader(folder)).remote()


def reader(folder: str) -> Callable[[], str]:
    """A function that reads the first byte of each file of a model that is in this folder here, wherever it is called.

    It says what cannot be read, and an empty text where all can be.
    """
    suffixes = (".json", ".safetensors", ".bin", ".jinja", ".model")
    names = ["config.json", *sorted(path.name for path in Path(folder).iterdir() if path.suffix in suffixes)]

    def look() -> str:  # within a function it needs nothing that a node may lack
        try:
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    file.read(1)
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return ""

    return look
