"""DriftGuard finds every difference between ranks' weights, and reports no other."""

import pytest
import torch
from ddp_cases import QUIET, TWO, Net, fit, loader

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


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_weight_that_differs_is_named_at_the_next_logging_point(name):
    devices = 4 if name == "model_parallel" else 2
    wanted = r"after step 1,.*: head.weight on rank 1\. An optimizer"
    with pytest.raises(DisagreementError, match=wanted):
        fit(Blocks(), devices=devices, strategy=STRATEGIES[name])


def test_a_checkpoint_is_not_written_from_weights_that_differ(tmp_path):
    saves = lg.callbacks.Checkpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    quiet = {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1000}
    trainer = lg.Trainer(**{**quiet, **TWO}, default_root_dir=tmp_path, save_code=False, callbacks=[saves])
    with pytest.raises(DisagreementError, match="after step 1"):
        trainer.fit(Noisy(), loader(22), loader(10))
    assert sorted(path.name for path in (tmp_path / "kept").glob("step*")) == []


def test_a_run_without_a_logging_point_is_compared_at_its_end():
    with pytest.raises(DisagreementError, match="after step 6"):
        fit(Noisy(), log_every_n_steps=1000, **TWO)


def test_reproducible_off_compares_nothing():
    fit(Noisy(), reproducible="off", **TWO)


@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_running_statistics_may_differ_between_steps(reproducible):
    """Rank 0's count; the others' own ones are in their buffers when the weights are compared."""
    fit(Net(norm=True), reproducible=reproducible, **TWO)


class Alone(lg.strategies.GroupStrategy):
    """Each process trains independently, as between two averages of local SGD."""

    def join(self, *arguments):
        super().join(*arguments)
        self.weight_ranks = lg.strategies.Strategy().weight_ranks

    def end_step(self):
        lg.strategies.Strategy.end_step(self)


def test_ranks_that_are_not_declared_to_be_equal_are_left_alone():
    fit(Net(), devices=2, strategy=Alone())


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
