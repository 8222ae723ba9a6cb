"""DriftGuard finds every difference between ranks' weights, and reports no other."""

import re
from functools import partial

import pytest
import torch
from ddp_cases import QUIET, TWO, Net, fit, loader
from shared_processes import run_cases

import legato as lg
from legato.base.errors import DisagreementError
from legato.trainer.optimization.drift import sums_of_bits


class Noisy(Net):
    """Moves one weight by what only its rank knows, after the first step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 1:
            with torch.no_grad():
                self.head.weight[0, 0] += 1e-6 * self.global_rank


STRATEGIES = {
    "ddp": "ddp",
    "zero1": "zero1",
    "copies of a mesh": {"name": "mesh", "data": 2},
    "model_parallel": {"name": "ddp_model_parallel", "devices_per_replica": 2},
}


class Blocks(Noisy):
    def configure_blocks(self):
        return [self.body, self.head]


def told(task, **options):
    """Return what the error says that ends the run, or "" without one."""
    try:
        fit(task, **options)
    except DisagreementError as error:
        return str(error)
    return ""


def saved(folder):
    saves = lg.callbacks.Checkpoint(dirpath=folder / "kept", every_n_train_steps=1, save_top_k=-1)
    quiet = {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1000}
    trainer = lg.Trainer(**{**quiet, **TWO}, default_root_dir=folder, callbacks=[saves])
    with pytest.raises(DisagreementError, match="after step 1"):
        trainer.fit(Noisy(), loader(22), loader(10))
    return sorted(path.name for path in (folder / "kept").glob("step*"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what each run of two processes was told, from one start."""
    folder = tmp_path_factory.mktemp("drift")
    cases = {
        name: partial(told, Blocks(), devices=4 if name == "model_parallel" else 2, strategy=strategy)
        for name, strategy in STRATEGIES.items()
    }
    cases["saved"] = partial(saved, folder)
    cases["end"] = partial(told, Noisy(), log_every_n_steps=1000, **TWO)
    cases["off"] = partial(told, Noisy(), reproducible="off", **TWO)
    for reproducible in ("order", "bitwise"):
        cases[reproducible] = partial(told, Net(norm=True), reproducible=reproducible, **TWO)
    cases["alone"] = lambda: told(Net(), devices=2, strategy=Alone())
    return run_cases(cases, 2, folder / "cases")


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_weight_that_differs_is_named_at_the_next_logging_point(results, name):
    assert re.search(r"after step 1,.*: head.weight on rank 1\. An optimizer", results[name])


def test_a_checkpoint_is_not_written_from_weights_that_differ(results):
    assert results["saved"] == []


def test_a_run_without_a_logging_point_is_compared_at_its_end(results):
    assert "after step 6" in results["end"]


def test_reproducible_off_compares_nothing(results):
    assert results["off"] == ""


@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_running_statistics_may_differ_between_steps(results, reproducible):
    """Rank 0's count; the others' own ones are in their buffers when the weights are compared."""
    assert results[reproducible] == ""


class Alone(lg.strategies.GroupStrategy):
    """Each process trains independently, as between two averages of local SGD."""

    def join(self, *arguments):
        super().join(*arguments)
        self.weight_ranks = lg.strategies.Strategy().weight_ranks

    def end_step(self):
        lg.strategies.Strategy.end_step(self)


def test_ranks_that_are_not_declared_to_be_equal_are_left_alone(results):
    assert results["alone"] == ""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(8, 3, dtype=torch.bfloat16).t(),
        torch.randn(()),
        torch.randn(9)[1:],
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.complex64),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_each_bit_of_a_weight_counts(tensor):
    before = sums_of_bits(tensor)[0].item()
    for index in range(tensor.numel()):
        flat = tensor.reshape(-1).clone()
        element = flat[index : index + 1].view(torch.uint8)
        element[0] ^= 1
        assert sums_of_bits(flat.reshape(tensor.shape))[0].item() != before
