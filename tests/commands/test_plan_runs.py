"""`legato plan` against real runs in which the strategy cuts the model: what each process holds, and what it sees."""

import json
from functools import partial
from pathlib import Path

import pytest
from plan_cases import Cuttable, Rated, look

from legato.trainer.commands.plan.plan import Plan
from legato.trainer.commands.plan.sources import PlanArguments, make_plan
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
