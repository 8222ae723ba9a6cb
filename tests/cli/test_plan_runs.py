"""`legato plan` against real runs in which the strategy cuts the model: what each process holds, and what it sees."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import BATCH, Cuttable, Damped, Deep, Pieces, Rated, Stack, Stream, count_traffic, count_waiting, look
from torch.autograd.graph import saved_tensors_hooks

from legato.base.torch_private import public_only
from legato.cli.plan.plan import Plan, render
from legato.cli.plan.sources import PlanArguments, make_plan
from legato.trainer.optimization.kernels import Recomputing
from legato.trainer.processes.environment import run_workers

pytestmark = pytest.mark.slow


FIELDS = ("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes")


def mesh(**options):
    return {"devices": 4, "strategy": {"name": "mesh", **options}}


MESHES = {
    "pipeline": (Cuttable, {}, mesh(pipeline=4, split=[1, 2, 1, 2])),
    "split": (Cuttable, {}, {**mesh(pipeline=2, data=2, split=[1, 5]), "replicas": 3}),
    "interleaved": (Cuttable, {"optimizer": "SGD"}, mesh(pipeline=2, data="auto", schedule="interleaved")),
    "adagrad": (Cuttable, {"optimizer": "Adagrad"}, mesh(pipeline=2, tensor=2)),
    "sharded": (Cuttable, {}, {**mesh(pipeline=2, shard=2), "replicas": 3}),
    "tensor": (Cuttable, {}, {**mesh(tensor=2, data=2), "replicas": 2}),
    "both": (Cuttable, {}, mesh(tensor=2, shard=2, shard_blocks=["Linear"])),
    "fsdp": (Cuttable, {}, {"devices": 4, "strategy": "fsdp"}),
}
SERVERS = {
    "two servers": (Rated, {"kind": "AdamW"}, {"devices": 2, "strategy": {"name": "ddp_rpc", "servers": 2}}),
    "a server too many": (Rated, {"kind": "Adagrad"}, {"devices": 1, "strategy": {"name": "ddp_rpc", "servers": 3}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes of real runs wrote."""
    folder = tmp_path_factory.mktemp("looks")
    run_workers(partial(look, folder, MESHES), 4, threads=1)
    for name in SERVERS:  # remote calls are opened once in the life of a process
        run_workers(partial(look, folder, {name: SERVERS[name]}), 4, threads=1)
    return folder


def plan_of(folder: Path, kind, arguments, options) -> Plan:
    """Return the plan of a case, from a config as a user writes it."""
    config = {
        "task": {"_target_": f"plan_cases.{kind.__name__}", **arguments},
        "trainer": {"accelerator": "cpu", "max_epochs": 1, **options},
    }
    (folder / "plan.yaml").write_text(json.dumps(config))
    words, rest = PlanArguments.read([str(folder / "plan.yaml")])
    return make_plan(words, rest)


@pytest.mark.parametrize("name", [*MESHES, *SERVERS])
def test_ranks_hold_and_see_what_was_planned(folder: Path, name: str) -> None:
    plan = plan_of(folder, *{**MESHES, **SERVERS}[name])
    looks = [json.loads((folder / f"{name} {rank}.json").read_text()) for rank in range(4)]
    for rank, (seen, _) in enumerate(looks):
        planned = {str(step): plan.batches_at(rank, step, 0) for step in range(plan.deal.steps)}
        assert seen == {
            step: [one for _, found in batches for one in found] for step, batches in planned.items() if batches
        }
    assert [rank for share in plan.shares for rank in share.ranks] == [0, 1, 2, 3]
    for share in plan.shares:
        expected = {field: getattr(share.size, field) for field in FIELDS}
        of_ranks = [looks[rank][1] or dict.fromkeys(FIELDS, 0) for rank in share.ranks]
        assert {field: max(one[field] for one in of_ranks) for field in FIELDS} == expected
        assert share.at_most or all(one == expected for one in of_ranks)


# --- a step -----------------------------------------------------------------------------------------------------------
def two(strategy: Any, **options: Any) -> dict[str, Any]:
    return {"devices": 2, "strategy": strategy, **options}


BLOCKS = {"name": "fsdp", "shard_blocks": ["Layer"]}
PARTS = {"name": "ddp_model_parallel", "part_devices": ["cpu"] * 4, "devices_per_replica": 2}
BITWISE = {"reproducible": "bitwise", "replicas": 6}
TRAFFIC: dict[str, tuple[Any, dict[str, Any], dict[str, list[int]]]] = {
    "ddp": (Stack, two("ddp"), {"all_reduce": [1, 1]}),
    "accumulated": (Stack, two("ddp", accumulate_grad_batches=2), {"all_reduce": [1, 1]}),
    "ddp_model_parallel": (Pieces, two(PARTS), {"all_reduce": [1, 1]}),
    "bitwise": (Stack, two("ddp", **BITWISE), {"all_to_all": [1, 1], "all_gather": [0, 1]}),
    "zero1": (Stack, two("zero1"), {"all_reduce": [1, 1]}),
    "zero1, bitwise": (Stack, two("zero1", **BITWISE), {"all_to_all": [1, 1], "all_gather": [0, 1]}),
    "whole": (Stack, two("fsdp"), {"reduce_scatter": [1, 1]}),
    "blocks": (Stack, two(BLOCKS, accumulate_grad_batches=2), {"reduce_scatter": [4, 4]}),
    "kept": (Stack, two({**BLOCKS, "reshard_after_forward": False}), {"reduce_scatter": [4, 4]}),
    "dropped": (
        Stack,
        two({"name": "fsdp", "shard_blocks": 100, "reshard_after_forward": True}),
        {"reduce_scatter": [4, 4]},
    ),
    "fsdp, bitwise": (Stack, two(BLOCKS, **BITWISE), {"all_to_all": [4, 4]}),
    "data": (Stack, two({"name": "mesh", "data": 2}), {"all_reduce": [1, 1]}),
    "tensor": (Pieces, two({"name": "mesh", "tensor": 2}), {"all_reduce": [2, 5]}),
    "tensor, again": (
        Damped,
        two({"name": "mesh", "tensor": 2}, activation_checkpointing=["Twice"], accumulate_grad_batches=2),
        {"all_reduce": [16, 28]},
    ),
    "tensor, again up to a row": (
        Pieces,
        two({"name": "mesh", "tensor": 2}, activation_checkpointing=["Layer"]),
        {"all_reduce": [2, 5]},
    ),
    "sequence": (
        Stream,
        two({"name": "mesh", "tensor": 2}, accumulate_grad_batches=2),
        {"all_gather": [8, 22], "reduce_scatter": [12, 18], "all_reduce": [0, 4]},
    ),
    "one batch": (
        Stream,
        two({"name": "mesh", "tensor": 2}),
        {"all_gather": [4, 11], "reduce_scatter": [6, 9], "all_reduce": [0, 4]},
    ),
    "sequence, again": (
        Stream,
        two({"name": "mesh", "tensor": 2}, activation_checkpointing=["Normed"]),
        {"all_gather": [10, 17], "reduce_scatter": [6, 9], "all_reduce": [0, 4]},
    ),
    "pipeline": (Pieces, two({"name": "mesh", "pipeline": 2, "split": [1, 2]}), {"send": [0, 2]}),
}
"""The task, the options, and collectives of gradients: how many begin within backward, and how many there are."""
WITH_SERVER = {"ddp_rpc": (Rated, two("ddp_rpc"), {"all_reduce": [1, 2]})}


def test_a_step_sends_what_was_planned_and_gradients_travel_within_backward(tmp_path: Path) -> None:
    run_workers(partial(count_traffic, tmp_path, {name: case[:2] for name, case in TRAFFIC.items()}), 2, threads=1)
    run_workers(partial(count_traffic, tmp_path, {name: case[:2] for name, case in WITH_SERVER.items()}), 3, threads=1)
    for name, (kind, options, begun) in {**TRAFFIC, **WITH_SERVER}.items():
        plan = plan_of(tmp_path, kind, {}, options)
        assert plan.traffic is not None
        for rank in range(2):
            counted, when, saved = json.loads((tmp_path / f"{name} {rank}.json").read_text())
            # what a plan leaves out: the loss and what is logged, as objects; a barrier
            counted = {word: size for word, size in counted.items() if (name, word) != ("pipeline", "broadcast")}
            if name == "ddp_rpc":
                counted["all_reduce"] -= torch.zeros(1).nbytes
            assert {one.kind: one.bytes for one in plan.traffic.payloads} == counted, name
            assert when == {**when, **begun}, name
            if name in ("tensor", "one batch"):  # each rank has its part of what is cut
                assert plan.activations is not None
                assert plan.activations.plain == saved
        assert plan.traffic.buffer_bytes > 0


PIPELINES = {
    "1f1b": two({"name": "mesh", "pipeline": 2}),
    "two pieces": two({"name": "mesh", "pipeline": 2, "split": [4, 1], "micro_batches": 2}),
    "whole": two({"name": "mesh", "pipeline": 2, "micro_batches": 1}),
    "gpipe": two({"name": "mesh", "pipeline": 2, "schedule": "gpipe"}),
    "interleaved": two({"name": "mesh", "pipeline": 2, "schedule": "interleaved", "split": [1, 2, 1, 1]}),
    "recomputed": two({"name": "mesh", "pipeline": 2}, activation_checkpointing=["Layer"]),
}


def test_activations_of_a_pipeline_are_those_of_pieces_on_their_way(tmp_path: Path) -> None:
    cases = {name: (Deep, options) for name, options in PIPELINES.items()}
    run_workers(partial(count_waiting, tmp_path, cases), 2, threads=1)
    for name, options in PIPELINES.items():
        found = plan_of(tmp_path, Deep, {}, options).activations
        counted = [json.loads((tmp_path / f"{name} {rank}.json").read_text()) for rank in range(2)]
        assert found is not None
        if name == "recomputed":  # what backward computes again is not among what autograd keeps
            assert max(counted) < found.bytes < found.plain
        else:
            assert found.plain == max(counted), name
            assert f"at place {counted.index(max(counted))} of the pipeline" in found.where
    plan = plan_of(tmp_path, Deep, {}, two({"name": "mesh", "pipeline": 2, "schedule": "gpipe"}))
    assert "for a batch of 8, at place 1 of the pipeline, which keeps 4 forwards of its 4 pieces" in render(plan)


def test_activations_are_those_of_a_real_step(tmp_path: Path) -> None:
    task, batch = Stack(), [torch.ones(BATCH, 1)]
    task.log = lambda *_: None  # type: ignore[method-assign]
    own = {one.untyped_storage().data_ptr(): one.nbytes for one in (*task.parameters(), *task.buffers())}

    def of_step() -> int:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage
            return tensor

        found: dict[int, torch.UntypedStorage] = {}
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = task.training_step(batch, 0)
        del kept
        return sum(one.nbytes() for one in found.values()) + batch[0].nbytes * (batch[0].data_ptr() not in found)

    plain = of_step()
    recomputing = Recomputing(task, ["Layer"])
    kept = of_step()
    recomputing.undo()
    plan = plan_of(tmp_path, Stack, {}, {})
    assert plan.activations is not None
    assert plan.activations.plain == plain
    assert plan.activations.blocks == ("Layer",)
    assert plan.activations.recomputed is not None
    assert kept < plan.activations.recomputed < plain
    # the largest block saves its input, which is there in any case, and the output of tanh
    assert plan.activations.recomputed == kept + BATCH * 16 * 4
    assert "with activation_checkpointing: [Layer]" in render(plan)
    with public_only():  # there is no attention, whose kernel is another on the meta device
        assert plan_of(tmp_path, Stack, {}, {}).activations == plan.activations
    plan = plan_of(tmp_path, Stack, {}, {"activation_checkpointing": ["Layer"]})
    assert plan.activations is not None
    assert plan.activations.bytes == plan.activations.recomputed
