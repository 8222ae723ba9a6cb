"""Unsupported layouts raise the same error on every rank at once, and no rank waits for another.

All cases run in turn in the same processes, so a rank that hangs or continues alone breaks the next case.
"""

import json

import pytest
import torch
from ddp_cases import QUIET, Net, loader
from torch import nn

import legato as lg
from legato.base.errors import LegatoError
from legato.base.place import find_place
from legato.trainer.processes.launch import run_workers


class Planned(Net):
    """Net with a plan for tensor parallelism."""

    def __init__(self, **plan):
        super().__init__()
        self.plan = plan

    def tensor_plan(self):
        return {name.replace("_", "."): word for name, word in self.plan.items()}


class Blocks(Net):
    def configure_blocks(self):
        return [*self.body, self.head]


class Looked(Planned):
    """Net with an embedding whose gradients are sparse."""

    def __init__(self):
        super().__init__(body_0="column")
        self.table = nn.Embedding(4, 4, sparse=True)


class Narrow(Net):
    """Net whose head has another width than the saved one."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 5)


class Renamed(Net):
    def __init__(self):
        super().__init__()
        self.haed = self.head
        del self.head

    def loss(self, batch):
        return nn.functional.cross_entropy(self.haed(self.body(batch[0])), batch[1])


def named(name, **options):
    return {"strategy": {"name": name, **options}}


ANOTHER = "The checkpoint does not fit the model of"
CASES = {
    "a mesh of three": (Net, named("mesh", shard=3), "data 1 x shard 3 x tensor 1 x pipeline 1 = 3"),
    "a mesh of four": (Net, named("mesh", data=2, tensor=2), "= 4"),
    "two autos": (Net, named("mesh", data="auto", shard="auto"), "auto"),
    "an axis of none": (Net, named("mesh", shard=0), "shard=0"),
    "a plan for nothing": (lambda: Planned(blok_0="column"), named("mesh", tensor=2), "'blok.0'"),
    "a plan nearly": (lambda: Planned(hed="column"), named("mesh", tensor=2), "Did you mean 'head'?"),
    "a plan of other words": (lambda: Planned(head="colunm"), named("mesh", tensor=2), "Did you mean 'column'?"),
    "a width that is not even": (lambda: Planned(head="column"), named("mesh", tensor=2), "3"),
    "sparse gradients": (Looked, named("mesh", tensor=2), "cannot be used with the sparse gradients of table"),
    "blocks of no class": (Net, named("fsdp", shard_blocks=["Linaer"]), "Did you mean 'Linear'?"),
    "own shares": (
        Net,
        {**named("fsdp"), "use_distributed_sampler": False},
        "its own share of the data, which may be un",
    ),
    "a task of no blocks": (
        Net,
        {**named("ddp_model_parallel"), "devices": 4},
        "does not define how to split its model",
    ),
    "a split of others": (Blocks, {**named("ddp_model_parallel", split=[9, 1]), "devices": 4}, "split"),
    "stages of others": (Blocks, named("mesh", pipeline=2, split=[9, 1]), "split"),
    "replicas that do not go round": (Net, {"strategy": "ddp", "replicas": 1}, "more"),
    "servers alone": (Net, named("ddp_rpc", servers=2), "2 processes minus 2 servers leaves 0"),
    **{
        f"{kind} under {strategy}": (task, {"strategy": strategy, "resume": "other"}, message)
        for strategy in ("ddp", "zero1", "fsdp")
        for kind, task, message in (
            ("other shapes", Narrow, "head.weight: (3, 8) in the checkpoint, (5, 8) in the task"),
            ("other names", Renamed, "it lacks haed.bias, haed.weight; it has unknown head.bias, head.weight"),
        )
    },
}


def run(folder):
    """Run every case; return this rank's error for each."""
    torch.set_num_threads(1)
    place, errors = find_place(), {}
    arguments = {**QUIET, "default_root_dir": folder}
    for name, (make, options, _) in CASES.items():
        options = {**arguments, "devices": 2, **options}
        resume = folder / "saved" if options.pop("resume", None) else None
        try:
            lg.Trainer(**options).fit(make(), loader(16), loader(8), resume=resume)
            errors[name] = "nothing"
        except LegatoError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    (folder / f"errors-{place.rank}").write_text(json.dumps(errors))


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    trainer = lg.Trainer(**{**QUIET, "strategy": "single", "replicas": 2, "max_epochs": 1})
    task = Net()
    trainer.fit(task, loader(16))
    trainer.save_checkpoint(folder / "saved")
    run_workers(lambda: run(folder), 2, threads=1)
    return [json.loads((folder / f"errors-{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_the_same_error(errors, name):
    first, second = errors[0][name], errors[1][name]
    assert CASES[name][2] in first
    assert CASES[name][2] in second
    assert len(first.splitlines()) <= 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_missing_devices_are_refused(refused):
    from legato.base.errors import ConfigError

    with pytest.raises(ConfigError, match=r"torch found no such device on this machine\. Try accelerator=cpu"):
        lg.Trainer(**{**QUIET, "accelerator": "cuda", "devices": 2, "strategy": "ddp"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_too_few_devices():
    from legato.base.errors import ConfigError
    from legato.base.quantities import counted

    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"this machine has {counted(count, 'cuda device')}. Use at most {count}"):
        lg.Trainer(**{**QUIET, "accelerator": "cuda", "devices": count + 1, "strategy": "ddp"})
