"""A process group that the script has made: joined if it fits, otherwise refused with both sizes; never destroyed."""

import os
import traceback

import pytest
import torch
import torch.distributed as dist
from ddp_cases import QUIET, Net, fit, flat, in_one, loader
from forked import Forked
from waiting import free_port

import legato as lg
from legato.base.errors import ConfigError

pytestmark = pytest.mark.slow


FITS = {
    "ddp": {"strategy": "ddp", "devices": 2},
    "auto": {},
    "fsdp": {"strategy": "fsdp", "devices": 2},
    "zero1": {"strategy": "zero1"},
}
REFUSED = {
    "more devices": {"strategy": "ddp", "devices": 3},
    "two nodes": {"strategy": "ddp", "devices": 2, "num_nodes": 2},
    "one device": {"strategy": "ddp", "devices": 1},
    "single": {"strategy": "single"},
    "elastic": {"strategy": {"name": "ddp", "elastic": True}, "devices": 2},
    "rpc": {"strategy": {"name": "ddp_rpc", "servers": 1}, "devices": 2},
    "backend": {"strategy": {"name": "ddp", "process_group_backend": "nccl"}, "devices": 2},
}


def worker(rank, folder, init_method):
    """The function that a tutorial passes to `mp.spawn`."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
        group = dist.group.WORLD
        outcomes = {name: outcome(folder / name, **options) for name, options in FITS.items()}
        for name, options in REFUSED.items():
            try:
                fit(Net(), default_root_dir=folder / name, **options)
            except ConfigError as error:
                outcomes[name] = str(error)
        outcomes["alone"] = fit(Net(), cluster="off").world_size
        total = torch.ones(1)
        dist.all_reduce(total)
        outcomes["alive"] = dist.group.WORLD is group and total.item() == 2
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"{init_method}-2", rank=rank, world_size=2)
        outcomes["again"] = flat(fitted(devices=2, strategy="ddp"))
        dist.destroy_process_group()
        torch.save(outcomes, folder / f"found-{rank}")
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise


def fitted(**options):
    task = Net()
    fit(task, **options)
    return task


def outcome(folder, **options):
    task = Net()
    trainer = fit(task, **{**options, "default_root_dir": folder, "logger": True})
    weights = flat(task)
    again = lg.Trainer(**{**QUIET, **options})
    measured = again.validate(task, loader(10), verbose=False), again.test(Measures(), loader(10), verbose=False)
    predicted = torch.cat(again.predict(Measures(), loader(10)))
    return {
        "weights": weights,
        "place": (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size, trainer.num_nodes),
        "measured": measured,
        "predicted": predicted,
        "run_dir": str(trainer.run_dir),
    }


class Measures(Net):
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.head(self.body(batch[0]))


def run_two(folder, *arguments, function=worker, env=lambda rank: os.environ):
    processes = [Forked(function, rank, folder, *arguments, env=env(rank)) for rank in range(2)]
    for rank, process in enumerate(processes):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"rank {rank}: {errors}"
    return [torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return folder, run_two(folder, f"file://{folder}/store")


@pytest.mark.parametrize("name", FITS)
def test_a_group_of_the_script_is_joined(ranks, name):
    folder, (first, second) = ranks
    expected = in_one(Net())
    alone = lg.Trainer(**QUIET)
    for rank, outcomes in enumerate((first[name], second[name])):
        assert outcomes["place"] == (rank, rank, 0, 2, 1)
        assert torch.allclose(outcomes["weights"], expected, atol=1e-6)
        assert outcomes["run_dir"] == str(folder / name / "default" / "version_0")
        assert torch.allclose(outcomes["predicted"], torch.cat(alone.predict(Measures(), loader(10))))
        validated, tested = outcomes["measured"]
        assert tested[0] == pytest.approx(alone.test(Measures(), loader(10), verbose=False)[0])
        assert validated[0].keys() == {"val/loss"}
    assert [path.name for path in (folder / name / "default").iterdir()] == ["version_0"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("more devices", ("has 2 processes", "devices=3", "request 3", "cluster=off")),
        ("two nodes", ("has 2 processes", "devices=2 and num_nodes=2 request 2 processes per node on 2 nodes")),
        ("one device", ("has 2 processes", "devices=1", "request 1")),
        ("single", ("strategy=single runs in one process", "this run has 2", "cluster=off")),
        ("elastic", ("elastic", "do not initialize a process group")),
        ("rpc", ("ddp_rpc creates separate process groups",)),
        ("backend", ("process_group_backend='nccl'", "gloo for cpu")),
    ],
)
def test_a_group_that_does_not_fit_is_refused(ranks, name, words):
    _, outcomes = ranks
    for rank in outcomes:
        for word in words:
            assert word in rank[name]


def test_the_group_is_left_alive_and_another_one_is_joined_too(ranks):
    _, outcomes = ranks
    for rank in outcomes:
        assert rank["alive"]
        assert rank["alone"] == 1
        assert torch.allclose(rank["again"], in_one(Net()), atol=1e-6)


def under_torchrun(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = Net()
    trainer = fit(task, strategy="ddp", devices=2, default_root_dir=folder, logger=True)
    dist.barrier()
    torch.save((flat(task), str(trainer.run_dir), trainer.strategy.place.origin), folder / f"found-{rank}")
    dist.destroy_process_group()


def test_with_torchruns_variables_too(tmp_path):
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_WORLD_SIZE": "1"}
    first, second = run_two(
        tmp_path,
        function=under_torchrun,
        env=lambda rank: {**os.environ, **common, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
    )
    expected = in_one(Net())
    for weights, directory, origin in (first, second):
        assert torch.allclose(weights, expected, atol=1e-6)
        assert (directory, origin) == (str(tmp_path / "default" / "version_0"), "torchrun")
