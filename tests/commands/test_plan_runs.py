"""`legato plan` against real runs in which the strategy cuts the model: what each process holds, and what it sees."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from plan_cases import BATCH, Cuttable, Rated, Stack, count_traffic, look
from torch.autograd.graph import saved_tensors_hooks

from legato.trainer.commands.plan.plan import Plan, render
from legato.trainer.commands.plan.sources import PlanArguments, make_plan
from legato.trainer.optimization.kernels import Recomputing
from legato.trainer.processes.environment import run_workers
from legato.trainer.torch_private import public_only

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
TRAFFIC = {
    "ddp": {"devices": 2, "strategy": "ddp"},
    "accumulated": {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 2},
    "zero1": {"devices": 2, "strategy": "zero1"},
    "whole": {"devices": 2, "strategy": "fsdp"},
    "blocks": {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": ["Layer"]}, "accumulate_grad_batches": 2},
    "kept": {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": ["Layer"], "reshard_after_forward": False}},
    "dropped": {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": 100, "reshard_after_forward": True}},
}


def test_a_step_sends_what_was_planned(tmp_path: Path) -> None:
    run_workers(partial(count_traffic, tmp_path, TRAFFIC), 2, threads=1)
    for name, options in TRAFFIC.items():
        plan = plan_of(tmp_path, Stack, {}, options)
        assert plan.traffic is not None
        for rank in range(2):
            counted = json.loads((tmp_path / f"{name} {rank}.json").read_text())
            assert dict(plan.traffic.payloads) == counted, name
        assert plan.traffic.buffer_bytes > 0


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
