"""Optimizers that evaluate by other weights than they train, and change over by their methods `train` and `eval`."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import Tiny, Validated, assert_close, assert_same_bits, make_loader, make_trainer

from legato.base.errors import ConfigError
from legato.callbacks import Checkpoint, ExponentialMovingAverage, OnExceptionCheckpoint


def schedulefree(parameters):
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(parameters, lr=0.05)


def pytorch_optimizer(parameters):
    from pytorch_optimizer import SPlus

    return SPlus(parameters, lr=0.05)


def heavyball(parameters):
    import heavyball

    heavyball.utils.compile_mode = None
    return heavyball.SFAdamW(parameters, lr=0.05)


class Free(Validated):
    """Notes the loss of each validation."""

    def __init__(self, make=schedulefree, manual=False):
        super().__init__()
        self.make, self.automatic_optimization, self.losses = make, not manual, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_validation_end(self):
        self.losses.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        return self.make(self.parameters())


def by_hand(make, epochs=2):
    task = Free(make)
    optimizer = task.configure_optimizers()
    for _ in range(epochs):
        optimizer.train()
        for batch in make_loader(32):
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            task.losses.append(sum(task.loss(batch).item() for batch in make_loader(8)) / 2)
    return task


def fit(task, folder, resume=None, **options):
    made = make_trainer(folder, max_epochs=2, **options)
    made.fit(task, make_loader(32), make_loader(8), resume=resume)
    return made


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("make", [schedulefree, pytorch_optimizer, heavyball])
def test_the_loop_changes_over_as_one_does_by_hand(tmp_path, make, manual):
    task, expected = Free(make, manual), by_hand(make)
    fit(task, tmp_path, num_sanity_val_steps=0)
    assert_close(task, expected)  # by hand each validation moves the last digits of the trained weights
    assert task.losses == pytest.approx(expected.losses, rel=1e-5)
    alone = by_hand(make, epochs=1)
    once = Free(make, manual)
    make_trainer(tmp_path, max_epochs=1).fit(once, make_loader(32))
    assert_same_bits(once, alone)


@pytest.mark.parametrize("make", [schedulefree, pytorch_optimizer, heavyball])
def test_neither_validations_nor_saves_nor_a_resume_change_a_bit(tmp_path, make):
    plain, often, resumed = Free(make), Free(make), Free(make)
    fit(plain, tmp_path / "plain", limit_val_batches=0)
    saves = Checkpoint(every_n_train_steps=3, save_top_k=-1)
    fit(often, tmp_path / "often", callbacks=[saves], enable_checkpointing=True, val_check_interval=2)
    assert_same_bits(plain, often)
    checkpoint = next(tmp_path.rglob("checkpoints/step-00000006"))  # right after a validation
    fit(resumed, tmp_path / "resumed", resume=checkpoint, val_check_interval=2)
    assert_same_bits(plain, resumed)
    assert resumed.losses == often.losses[-len(resumed.losses) :]


def test_a_checkpoint_holds_the_weights_to_evaluate_by(tmp_path):
    saves = Checkpoint(every_n_train_steps=8, save_top_k=-1)
    fit(Free(), tmp_path, callbacks=[saves], enable_checkpointing=True)
    weights = load_file(next(tmp_path.rglob("step-00000008/model.safetensors")))
    for name, value in by_hand(schedulefree, epochs=1).state_dict().items():
        torch.testing.assert_close(weights[name], value)


class Breaking(Free):
    def validation_step(self, batch, batch_idx):
        if self.global_step == 8 and batch_idx == 1 and not self.trainer.sanity_checking:
            raise RuntimeError("in the middle")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("averages", [False, True])
def test_an_exception_within_a_validation_leaves_a_checkpoint_to_go_on_from(tmp_path, averages):
    def callbacks():
        return [ExponentialMovingAverage(0.5)] if averages else []

    plain, resumed = Free(), Free()
    fit(plain, tmp_path / "plain", callbacks=callbacks())
    saves = OnExceptionCheckpoint(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(Breaking(), tmp_path / "broken", callbacks=[*callbacks(), saves], enable_checkpointing=True)
    fit(resumed, tmp_path / "resumed", resume=tmp_path / "saved/on_exception", callbacks=callbacks())
    assert_same_bits(plain, resumed)
    assert resumed.losses == plain.losses[-2:]


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "16-mixed"}, {"replicas": 2}])
def test_with_other_features_a_validation_changes_nothing(tmp_path, options):
    plain, often = Free(), Free()
    fit(plain, tmp_path, limit_val_batches=0, **options)
    fit(often, tmp_path, val_check_interval=4, **options)
    assert_same_bits(plain, often)
    assert plain.model[0].weight.isfinite().all()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_and_resume_as_one_does(tmp_path, strategy):
    alone, two, resumed = Free(), Free(), Free()
    fit(alone, tmp_path / "alone", replicas=2)
    options = {"devices": 2, "strategy": strategy, "enable_checkpointing": True}
    fit(two, tmp_path / "two", callbacks=[Checkpoint(every_n_train_steps=3, save_top_k=-1)], **options)
    assert_close(alone, two)
    checkpoint = next(tmp_path.rglob("two/**/checkpoints/step-00000003"))
    fit(resumed, tmp_path / "resumed", resume=checkpoint, replicas=2)
    assert_close(alone, resumed)


def test_zero1_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"AdamWScheduleFree swaps all weights .* Use strategy=ddp or fsdp"):
        fit(Free(), tmp_path, devices=2, strategy="zero1")


def test_an_optimizer_without_the_methods_is_left_alone(tmp_path):
    task = Tiny()
    make_trainer(tmp_path).fit(task, make_loader())
    assert not any("trained_weights" in state for state in task.trainer.optimizers[0].state.values())
