"""Clusters of several nodes: who takes which bundle, what is refused before anything waits, and a node that is lost.

Nodes are ``ray.cluster_utils.Cluster``'s, on this machine; GPUs are declared, and nobody computes on them.
"""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from pathlib import Path

import cluster_drivers
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.algorithms.algorithm import Algorithm

from rllib_nlac import NLACConfig
from rllib_nlac.algorithm.placement import PlacementError, check_room, kinds_of, reader, with_engines
from rllib_nlac.engine.places import Node, fit_together, fits, shown, total
from rllib_nlac.learner import placed


def kinds(**keys):
    """What a trial with these keys consists of, and what it asks of Tune."""
    config = NLACConfig().environment("TwentyQuestions").update_from_dict(keys)
    request = with_engines(Algorithm.default_resource_request.__func__(config.algo_class, config), config)
    return kinds_of(request, config), request


class TestBundles:
    def test_each_process_has_its_own_in_rllibs_order_and_the_engines_are_last(self):
        keys = {"num_env_runners": 2, "num_learners": 3, "num_gpus_per_learner": 1, "num_engines": 2, "num_gpus_per_engine": 4}
        own, request = kinds(**keys, evaluation_interval=1, evaluation_num_env_runners=1)
        runner, learner, engine = {"CPU": 1.0}, {"GPU": 1.0}, {"CPU": 1.0, "GPU": 4.0}
        assert request.bundles == [{"CPU": 1.0}, *[runner] * 3, *[learner] * 3, *[engine] * 2]
        assert [(kind.name, kind.count) for kind in own] == [
            ("engine", 2),
            ("learner", 3),
            ("EnvRunner", 3),
            ("trial's own process", 1),
        ]

    def test_an_empty_bundle_of_the_trial_itself_shifts_none(self):
        """Tune drops it; the engines are not taken for the trial's own."""
        own, request = kinds(num_cpus_for_main_process=0, num_learners=1, num_engines=1)
        assert request.head_bundle_is_empty and request.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
        assert [(kind.name, kind.count) for kind in own] == [("engine", 1), ("learner", 1)]
        with pytest.raises(
            PlacementError, match=r"num_cpus_for_main_process is 0: RLlib then puts.*Set it to a number above 0"
        ):
            kinds(num_cpus_for_main_process=0, num_env_runners=1, num_learners=1, num_engines=1)

    @pytest.mark.parametrize(
        ("bundles", "nodes", "strategy", "possible"),
        [
            ([{"GPU": 2}, {"GPU": 2}], [{"GPU": 4}], "PACK", True),
            ([{"GPU": 2}, {"GPU": 2}], [{"GPU": 3}, {"GPU": 1}], "PACK", False),  # of four in all
            ([{"CPU": 3}, {"CPU": 3}, {"CPU": 2}, {"CPU": 2}, {"CPU": 2}], [{"CPU": 6}, {"CPU": 6}], "PACK", True),
            ([{"CPU": 3}, {"CPU": 3}, {"CPU": 2}, {"CPU": 2}, {"CPU": 3}], [{"CPU": 6}, {"CPU": 6}], "PACK", False),
            (
                [{"CPU": 3}, {"CPU": 3}, {"CPU": 2}, {"CPU": 2}, {"CPU": 2}],
                [{"CPU": 7}, {"CPU": 5}],
                "PACK",
                True,
            ),  # not both 3 on one
            ([{"CPU": 1}, {"CPU": 1}], [{"CPU": 1}, {"CPU": 1}], "STRICT_PACK", False),
            ([{"CPU": 1}, {"CPU": 1}], [{"CPU": 2}], "STRICT_SPREAD", False),
            ([{}, {}], [{"CPU": 1}], "STRICT_SPREAD", False),
            ([{"CPU": 1, "player": 1}], [{"CPU": 9}], "PACK", False),
            ([{"CPU": 0.1}] * 10, [{"CPU": 1}], "PACK", True),  # ten times a tenth
            ([{"CPU": 1}] * 400, [{"CPU": 1}] * 399 + [{"GPU": 9}], "PACK", False),
            ([{"CPU": 1}] * 3000, [{"CPU": 64}] * 50, "PACK", True),  # more than Python's calls may be nested
        ],
    )
    def test_what_fits(self, bundles, nodes, strategy, possible):
        assert fit_together(bundles, nodes, strategy) is possible

    @given(
        st.lists(st.fixed_dictionaries({"CPU": st.integers(0, 3), "GPU": st.integers(0, 2)}), max_size=5),
        st.lists(st.fixed_dictionaries({"CPU": st.integers(0, 5), "GPU": st.integers(0, 3)}), min_size=1, max_size=3),
        st.sampled_from(["PACK", "STRICT_PACK", "STRICT_SPREAD"]),
    )
    def test_it_is_what_trying_all_gives(self, bundles, nodes, strategy):
        def holds(where: tuple[int, ...]) -> bool:
            if (strategy == "STRICT_PACK" and len({*where}) > 1) or (
                strategy == "STRICT_SPREAD" and len({*where}) < len(where)
            ):
                return False
            parts = [[bundle for bundle, at in zip(bundles, where, strict=True) if at == i] for i in range(len(nodes))]
            return all(fits(total(part), node) for part, node in zip(parts, nodes, strict=True))

        possible = any(map(holds, itertools.product(range(len(nodes)), repeat=len(bundles))))
        assert fit_together(bundles, nodes, strategy) is possible


def test_each_file_of_a_model_is_read_on_every_node(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text("{}")
    look = reader(str(tmp_path))
    (tmp_path / "README.md").unlink()
    assert look() == ""
    (tmp_path / "model.safetensors").unlink()
    assert look() == f"No such file or directory: {tmp_path / 'model.safetensors'}"
    (tmp_path / "config.json").unlink()
    assert "config.json" in look() and "config.json" in reader(str(tmp_path))()


@pytest.mark.parametrize("bundles", [[], [-1], [-1, -1]])
def test_who_takes_any_bundle_waits_for_nobody(bundles):
    """Fails where a start that hangs keeps every later group of learners of this process from starting."""
    with placed._one_at_a_time:
        entered = threading.Event()

        def enter() -> None:
            with placed.learners_in(bundles):
                entered.set()

        threading.Thread(target=enter, daemon=True).start()
        assert entered.wait(5)


class TestRoom:
    LARGE = Node("a (10.0.0.1)", {"CPU": 16, "GPU": 4, "memory": 9e9, "node:10.0.0.1": 1})
    SMALL = Node("b (10.0.0.2)", {"CPU": 4})

    def refused(self, match: str, *nodes: Node, **keys) -> None:
        own, request = kinds(**keys)
        with pytest.raises(PlacementError, match=match):
            check_room(own, nodes, request.strategy)

    def test_an_engine_that_no_node_holds(self):
        keys = {"num_engines": 1, "num_gpus_per_engine": 8, "engine_config": {"tensor_parallel_size": 8}}
        has = r"a \(10\.0\.0\.1\): 16 CPUs, 4 GPUs; b \(10\.0\.0\.2\): 4 CPUs"
        match = (
            rf"each engine takes 1 CPU, 8 GPUs on one node, and no node.*\({has}\): lower num_gpus_per_engine and .*parallel"
        )
        self.refused(match, self.LARGE, self.SMALL, **keys)

    def test_more_engines_than_the_cluster_holds(self):
        match = r"takes 3 x engine \(1 CPU, 2 GPUs\), 1 x trial's own.*cannot hold them together.*4 GPUs.*lower num_engines"
        self.refused(match, self.LARGE, self.SMALL, num_engines=3, num_gpus_per_engine=2)

    def test_a_resource_of_ones_own_that_nobody_has(self):
        match = r"each EnvRunner takes 1 CPU, 1 player on one node, and no node.*custom_resources_per_env_runner"
        keys = {"num_env_runners": 1, "num_engines": 1, "custom_resources_per_env_runner": {"player": 1}}
        self.refused(match, self.LARGE, **keys)
        self.refused("no node that Ray knows has as much", **keys)  # no node at all

    def test_all_on_one_node(self):
        keys = {"num_engines": 3, "num_gpus_per_engine": 1, "num_learners": 2, "num_gpus_per_learner": 1}
        own, request = kinds(**keys)
        other = Node("c", {"CPU": 8, "GPU": 2})
        check_room(own, [self.LARGE, other], request.strategy)
        match = r"all on one node \(placement_strategy\), and Ray's nodes cannot hold"
        self.refused(match, self.LARGE, other, **keys, placement_strategy="STRICT_PACK")

    def test_what_a_node_has_is_told_without_rays_own_entries(self):
        assert shown({**self.LARGE.resources, "player": 2.0}) == "16 CPUs, 4 GPUs, 2 player" and shown({}) == "nothing"


@pytest.mark.process
def test_whose_a_gpu_is():
    """Ray gives an actor the first GPU that is free, also if a learner in the driver is on it."""
    seen = cluster_drivers.run("gpus")
    assert seen["has"] == [False, True] and seen["hidden"] == ""  # were it not hidden, torch would see two in both
    (first, second), ids = sorted(seen["starts"]), seen["on"]
    assert ids[0] == ids[1] and first[1] <= second[0]
    assert re.match(
        r"PlacementError: Ray gives GPU 1 to the learner.*would take number 0: set local_gpu_idx to 1", seen["elsewhere"]
    )
    assert seen["held"] == "0" and [str(gpu) for gpu in seen["engine"]] == ["1"]
    assert re.match(r"PlacementError: one trial takes 1 x learner in this process \(1 GPU\), 2 x engine", seen["too many"])
    assert seen["nothing to hold"] == [None, None] and seen["in the driver"] is False


@pytest.fixture(scope="module")
def seen():
    """A trial with two learners that take a GPU each, and an engine that takes two; two machines have two each."""
    return cluster_drivers.run("reserved")


@pytest.mark.process
@pytest.mark.long
class TestReserved:
    def test_nobody_takes_what_was_reserved_for_another(self, seen):
        """Without the names of bundles two learners share one, and the engine takes the CPU of the trial's own."""
        places = seen["placed"]
        assert [[place["bundles"] for place in places[kind]] for kind in ("EnvRunner", "learner", "engine")] == [
            [[1]],
            [[2], [3]],
            [[4]],
        ]
        assert [place["takes"]["GPU"] for kind in ("learner", "engine") for place in places[kind]] == [1, 1, 2]
        assert places["engine"][0]["node"] not in {place["node"] for place in places["learner"]}

    def test_what_finds_no_place_is_refused_before_anything_starts(self, seen):
        assert re.match(r"PlacementError: each engine takes 1 CPU, 4 GPUs on one node, and no node", seen["too large"])
        for how in ("too many", "too many, without Tune"):
            assert re.match(r"PlacementError: one trial takes 2 x engine \(1 CPU, 2 GPUs\), 2 x learner \(1 GPU\)", seen[how])
        assert "trial's own process" in seen["too many"] and "own process" not in seen["too many, without Tune"]

    def test_a_model_folder_that_a_node_lacks_is_named_with_the_node(self, seen):
        said = seen["no folder"]
        assert "PlacementError: config.language_model is the folder '/proc/self/cwd/model'" in said
        assert re.search(r"\(node \S+ \([\d.]+\): No such file or directory: /proc/self/cwd/model/config.json", said)
        assert "copy it to the same path there, put it on a storage that all nodes mount" in said


@pytest.mark.process
@pytest.mark.long
def test_a_node_that_is_lost_in_the_middle_is_made_good(tmp_path, model_path):
    """EnvRunners and the engine go to another one, the learner stays, and no episode is lost."""
    shutil.copytree(model_path, tmp_path / "model")
    seen = cluster_drivers.run("lost_node", tmp_path / "model", tmp_path / "storage")
    assert not seen["error"] and len(seen["results"]) == 4
    before, after = (seen["results"][i]["where"] for i in (1, -1))
    for kind in ("EnvRunner", "engine"):
        assert len({*before[kind], *before["engine"]}) == 1  # together on one node
        assert not set(before[kind]) & set(after[kind])
    assert before["learner"] == after["learner"] == [seen["driver"]] and seen["driver"] not in {
        *before["engine"],
        *after["engine"],
    }
    assert len(after["EnvRunner"]) == 1
    assert [result["episodes"] for result in seen["results"]] == [16, 32, 48, 64]
    assert all(result["gradient_steps"] >= 1 and result["logprob_gap"] < 1e-3 for result in seen["results"])
    assert seen["results"][-1]["faults"]["num_engine_restarts"] == 1
    assert (
        Path(seen["checkpoint"]).is_relative_to(tmp_path / "storage")
        and (Path(seen["checkpoint"]) / "rllib_nlac.json").exists()
    )
