"""Optimizers of other packages that draw random numbers draw the same on all ranks, and on any number of processes."""

from functools import partial

import pytest
import torch
from random_updates import Noisy, largest_difference, train
from shared_processes import run_cases

import legato as lg


class Rounding(Noisy):
    """torchao's AdamW, whose weights in bf16 are rounded up or down at random."""

    def configure_optimizers(self):
        from torchao.optim import _AdamW

        torch.compiler.set_stance("force_eager")  # compiling it takes a minute
        return _AdamW(self.parameters(), 1e-2, bf16_stochastic_round=True)


class Muon(Noisy):
    """heavyball's Muon, which rounds at random too."""

    def configure_optimizers(self):
        import heavyball

        heavyball.utils.compile_mode = None
        return heavyball.Muon(self.parameters(), lr=1e-2)


class Balancing(Noisy):
    """pytorch_optimizer's Kron, which draws from torch's and NumPy's generators."""

    def configure_optimizers(self):
        from pytorch_optimizer import Kron

        return Kron(self.parameters(), lr=1e-3, balance_prob=0.5)


KINDS = (Rounding, Muon, Balancing)


def optimized(kind, processes, folder, reproducible):
    strategy = "ddp" if processes > 1 else "single"
    options = {"devices": processes, "strategy": strategy, "reproducible": reproducible, "precision": "bf16-true"}
    return train(kind(), folder, **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    gathered = {}
    for processes in (1, 2, 3):
        cases = {
            (kind.__name__, reproducible): partial(optimized, kind, processes, folder, reproducible)
            for kind in KINDS
            for reproducible in ("order", "bitwise")
        }
        gathered[processes] = run_cases(cases, processes, folder / f"{processes}")
    return gathered


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_an_optimizer_that_draws_is_the_same_on_any_number_of_processes(results, kind, reproducible):
    alone = results[1][kind.__name__, reproducible]
    for processes in (2, 3):
        several = results[processes][kind.__name__, reproducible]
        for rank in range(processes):
            assert largest_difference(several.weights[0], several.weights[rank]) == 0.0
        if reproducible == "bitwise":
            assert largest_difference(alone.weights[0], several.weights[0]) == 0.0


# Under bf16 the states of the other two do not survive Optimizer.load_state_dict, which casts them, by hand either.
@pytest.mark.parametrize(("kind", "precision"), [(Rounding, "bf16-true"), (Muon, "32"), (Balancing, "32")])
def test_a_resume_draws_what_the_whole_run_does(tmp_path, kind, precision):
    checkpoints = lg.callbacks.Checkpoint(every_n_train_steps=1, save_top_k=-1)
    options = {"precision": precision, "replicas": 2, "max_epochs": 1, "samples": 32}
    uninterrupted = train(kind(), tmp_path / "whole", callbacks=[checkpoints], enable_checkpointing=True, **options)
    checkpoint = next(tmp_path.rglob("checkpoints/step-00000003"))
    resumed = train(kind(), tmp_path, checkpoint=checkpoint, **options)
    assert largest_difference(uninterrupted.weights[0], resumed.weights[0]) == 0.0
