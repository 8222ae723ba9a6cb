"""StochasticWeightAveraging: exact over a resume, its learning rates, its batch norm statistics."""

import pytest
import torch
from parts import Stop, run, weights

import legato as lg
from legato.base.errors import ConfigError
from legato.compat.lightning.pytorch.callbacks import StochasticWeightAveraging


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 5, 6])
def test_an_interrupted_run_equals_an_undisturbed_one(tmp_path, step):
    def make():
        return StochasticWeightAveraging(0.02, 2, annealing_epochs=2)

    _, full = run(tmp_path / "whole", make, False)
    first, _ = run(tmp_path, make, False, Stop(step, tmp_path / "stopped"))
    assert first.global_step == step
    trainer, task = run(tmp_path / "again", make, False, resume=tmp_path / "stopped")
    assert torch.equal(weights(task), weights(full))
    assert trainer.current_epoch == 4


def test_what_swa_refuses(tmp_path):
    for arguments in ((-0.1,), (0.1, 0), (0.1, 1.5), (0.1, 1, -1), (0.1, 1, 1, "sin"), ([],)):
        with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
            StochasticWeightAveraging(*arguments)
    with pytest.raises(ConfigError, match="one learning rate or one for each"):
        run(tmp_path, lambda: StochasticWeightAveraging([0.1, 0.2]), False)


def test_the_learning_rate_of_swa(tmp_path):
    rates = []

    class Rates(lg.Callback):
        def on_train_epoch_start(self, trainer, task):
            rates.append(round(trainer.optimizers[0].param_groups[0]["lr"], 6))

    run(tmp_path, Rates, False, StochasticWeightAveraging(0.02, 2, annealing_epochs=2, annealing_strategy="linear"))
    assert rates == [0.1, 0.1, 0.06, 0.02]


def test_batch_norms_of_averaged_weights_are_measured(tmp_path):
    trainer, task = run(tmp_path, lambda: StochasticWeightAveraging(0.02, 1), False)
    norm = task.backbone[1]
    inputs = task.backbone[0](trainer.train_dataloader.dataset.tensors[0])
    assert norm.num_batches_tracked == 4
    assert norm.momentum == 0.1
    assert torch.allclose(norm.running_mean, inputs.mean(0), atol=1e-6)
    assert len(task.seen) == 20  # 16 steps, and 4 batches without a step
