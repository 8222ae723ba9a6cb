"""Logged values and losses are read at logging points, and a non-finite loss is found in time."""

import math

import pytest
import torch
from tiny import Memory, Says, Tiny, logs, make_loader
from torch.utils._python_dispatch import TorchDispatchMode

import legato as lg
from legato.base.errors import NonFiniteError


# --- reading late -----------------------------------------------------------------------------------------------------
class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device: every way from a tensor to a Python number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """Count the reads of a tensor's value, those too that torch does not dispatch."""
    mode = Reads()

    def counted(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            mode.count += 1
            return original(self, *args, **kwargs)

        return method

    for name in ("tolist", "numpy", "cpu", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    with mode:
        yield mode


def test_the_counter_sees_every_way_to_read(reads):
    value = torch.tensor(1.0)
    ways = [
        value.item,
        lambda: float(value),
        lambda: int(value),
        lambda: bool(value),
        value.tolist,
        value.cpu,
        value.numpy,
        lambda: f"{value:.2f}",
        lambda: value.isnan().any().item(),
    ]
    for way in ways:
        before = reads.count
        way()
        assert reads.count > before


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_is_read_between_logging_steps(trainer, reads, accumulate):
    by_step = []

    class Counts(Tiny):
        def training_step(self, batch, batch_idx):
            by_step.append((self.global_step, reads.count))
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            self.log("other", batch[0].mean())
            self.log("number", 3.0)
            return loss

    made = trainer(
        max_epochs=1, log_every_n_steps=20, gradient_clip_val=1.0, logger=Memory(), accumulate_grad_batches=accumulate
    )
    made.fit(Counts(), make_loader(240 * accumulate))
    within = dict(by_step)
    assert made.global_step == 60
    grew = [step for step in range(1, 60) if within[step] > within[step - 1]]
    assert {20, 40} <= set(grew) <= {1, 20, 40}  # the first step's loss may be looked at at once
    assert reads.count > 0


@pytest.mark.slow
def test_values_of_many_steps_wait_without_being_lost(trainer):
    task = Says(logs(on_step=False, on_epoch=True))
    made = trainer(max_epochs=1, log_every_n_steps=10**6)
    made.fit(task, make_loader(1100, batch_size=1))
    assert made.callback_metrics["x"].item() == pytest.approx(1099 / 2)


# --- losses that are not finite ---------------------------------------------------------------------------------------
class Breaks(Tiny):
    """Its loss is `value` in step `at`, and whatever follows in all later ones."""

    def __init__(self, at, value):
        super().__init__()
        self.at, self.value = at, value

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + (self.value if self.global_step + 1 >= self.at else 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("log_every", [1, 3, 50])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(trainer, value, log_every):
    made = trainer(max_epochs=3, log_every_n_steps=log_every)
    with pytest.raises(NonFiniteError, match=f"The loss of step 7 is {value}"):
        made.fit(Breaks(7, value), make_loader())
    assert made.global_step in (7, 9, 10)


def test_it_is_found_before_the_checkpoint_of_its_step(trainer, tmp_path):
    checkpoint = lg.callbacks.Checkpoint(every_n_train_steps=2, save_top_k=-1)
    made = trainer(max_epochs=3, callbacks=checkpoint, enable_checkpointing=True)
    with pytest.raises(NonFiniteError, match="step 7"):
        made.fit(Breaks(7, math.nan), make_loader())
    names = sorted(path.name for path in tmp_path.rglob("step-*"))
    assert names == ["step-00000002", "step-00000004", "step-00000006"]
    sound = Tiny.load_from_checkpoint(checkpoint.last_model_path)
    assert all(parameter.isfinite().all() for parameter in sound.parameters())


def test_it_is_found_before_a_validation(trainer):
    validated = []

    class Watched(Breaks):
        def validation_step(self, batch, batch_idx):
            validated.append(self.global_step)

    with pytest.raises(NonFiniteError):
        trainer(val_check_interval=2, num_sanity_val_steps=0).fit(Watched(2, math.nan), make_loader(), make_loader(4))
    assert validated == []


@pytest.mark.slow
def test_it_is_found_although_very_many_steps_lie_between_two_points(trainer):
    made = trainer(max_epochs=1, log_every_n_steps=10**6)
    with pytest.raises(NonFiniteError, match="step 3 is nan"):
        made.fit(Breaks(3, math.nan), make_loader(1100, batch_size=1))
    assert len(made.metrics.losses) < 1100


def test_it_may_be_ignored(trainer):
    made = trainer(nan="ignore", log_every_n_steps=1)
    made.fit(Breaks(2, math.nan), make_loader())
    assert made.global_step == 5


def test_manual_optimization_is_watched_too(trainer):
    class Manual(Breaks):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    with pytest.raises(NonFiniteError, match="step 4"):
        trainer().fit(Manual(4, math.nan), make_loader())
