"""Private names of torch, torchmetrics and CPython: each is used in one file, and the public way does the same."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ddp_cases import flat
from mesh_cases import CNN, FEATURES, GPT, difference, fit, mesh, outcome
from tiny import Tiny, make_loader
from torch import distributed

import legato as lg
from legato.trainer import torch_private
from legato.trainer.arguments import TrainerArguments
from legato.trainer.check import check
from legato.trainer.processes import launch
from legato.trainer.torch_private import SHORTCUTS, Shortcut, public_only


class TinyData(lg.DataModule):
    def train_dataloader(self):
        return make_loader()


PACKAGE = Path(lg.__file__).resolve().parent


# --- the switch -------------------------------------------------------------------------------------------------------
def test_this_torch_has_every_name():
    assert [shortcut.names for shortcut in SHORTCUTS if not shortcut.is_there] == []
    assert torch_private.remarks() == []


def test_a_name_that_is_missing_or_has_another_signature_is_not_used():
    before = list(SHORTCUTS)
    try:
        for probe in (lambda: torch._no_such_name, lambda: torch_private._takes(torch.nn.Module.train, "self")):
            assert not Shortcut("torch._no_such_name", "it is slower", probe).usable
        expected = f"torch._no_such_name is not in torch {torch.__version__} as expected: it is slower."
        assert torch_private.remarks() == [expected] * 2
    finally:
        SHORTCUTS[:] = before


def test_the_switch_takes_every_public_way_and_back():
    with public_only():
        assert not any(shortcut.usable for shortcut in SHORTCUTS)
        assert all("is switched off by LEGATO_PUBLIC_TORCH: " in remark for remark in torch_private.remarks())
        assert len(torch_private.remarks()) == len(SHORTCUTS)
    assert all(shortcut.usable for shortcut in SHORTCUTS)


def test_the_environment_sets_the_switch_and_check_says_so(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEGATO_PUBLIC_TORCH", "1")
    try:
        report = check(TrainerArguments(accelerator="cpu", max_epochs=1), Tiny(), TinyData())
        assert report.ok
        assert torch_private.remarks() == report.remarks
        assert len(report.remarks) == len(SHORTCUTS)
    finally:
        torch_private.take_public_ways(False)


# --- process groups and sharded parameters ----------------------------------------------------------------------------
def groups_with_limits():
    """Return the limit of the default group and of another one, set both ways, in seconds."""
    found, other = [], distributed.new_group()
    for seconds in (50, 60):
        torch_private.set_group_timeouts(timedelta(seconds=seconds))
        backends = [group._get_backend(torch.device("cpu")) for group in (distributed.group.WORLD, other)]
        found.append([backend.options._timeout.total_seconds() for backend in backends])
        torch_private.take_public_ways()
    torch_private.take_public_ways(False)
    return found


def group_names():
    """Return whether a group comes about after an attempt that only this rank has made, both ways."""
    rank, world, found = distributed.get_rank(), distributed.get_world_size(), []
    store = torch_private.default_store()
    distributed.barrier()
    distributed.destroy_process_group()
    for way in ("private", "public"):
        torch_private.take_public_ways(way == "public")
        if rank == 0:
            lost = distributed.PrefixStore(f"{way} lost", store)
            with pytest.raises(RuntimeError):
                distributed.init_process_group("gloo", store=lost, rank=0, world_size=2, timeout=timedelta(seconds=0.2))
        torch_private.reset_group_names()
        met = distributed.PrefixStore(way, store)
        distributed.init_process_group("gloo", store=met, rank=rank, world_size=world, timeout=timedelta(seconds=20))
        total = torch.ones(())
        distributed.all_reduce(total)
        found.append(float(total))
        distributed.destroy_process_group()
    torch_private.take_public_ways(False)
    return found


class LeavingGPT(GPT):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 3) else None


def left_epochs():
    """Return the outcome of runs that leave an epoch within a step: by the public way; in half precision by both."""
    kind, options = FEATURES["an epoch that is left"]
    half = {**options, "strategy": mesh(shard=2, half_traffic=True), "precision": "bf16-mixed", "devices": 2}
    with public_only():
        found = [outcome(kind(), devices=2, **options), outcome(LeavingGPT(), **half)]
    return [*found, outcome(LeavingGPT(), **half)]


def sharded_twice():
    """Return what a second sharded run of one task raises by the public ways, and what it comes to otherwise."""
    found = []
    for way in (True, False):
        torch_private.take_public_ways(way)
        task = CNN(norm=False)
        fit(task, strategy=mesh(shard=2), devices=2, max_epochs=1)
        try:
            fit(task, strategy=mesh(shard=2), devices=2, max_epochs=1)
            found.append(flat(task))
        except AssertionError as error:
            found.append(str(error))
    torch_private.take_public_ways(False)
    return found


@pytest.fixture(scope="module")
def two():
    """What two processes do, in the same ones."""
    work = (left_epochs, sharded_twice, groups_with_limits, group_names)
    return launch.run_workers(lambda: {one.__name__: one() for one in work}, 2)


def test_limits_of_process_groups(two):
    private, public = two["groups_with_limits"]
    assert private == [50, 50]
    assert public[0] == (60 if hasattr(distributed, "set_timeout") else 50)


def test_groups_meet_after_an_attempt_that_failed(two):
    assert two["group_names"] == [2.0, 2.0]


def test_an_epoch_is_left_within_a_step(two):
    kind, options = FEATURES["an epoch that is left"]
    whole, by_public, by_private = two["left_epochs"]
    assert difference(whole, outcome(kind(), **{**options, "strategy": "single"})) < 2e-6
    assert difference(by_public, by_private) == 0.0


def test_a_second_sharded_run_of_a_task(two):
    by_public, by_private = two["sharded_twice"]
    assert "more than once" in by_public
    assert isinstance(by_private, torch.Tensor)


def test_an_output_may_be_a_view():
    whole = torch.ones(4)
    assert [torch_private.may_be_view(one) for one in (whole, whole[:2])] == [False, True]
    with public_only():
        assert [torch_private.may_be_view(one) for one in (whole, whole[:2])] == [True, True]
