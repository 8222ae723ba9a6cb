"""fit matches a hand-written loop, and stops exactly at its limits."""

import copy
import os
import pickle
from datetime import timedelta
from functools import wraps
from types import MethodType

import pytest
import torch
from tiny import Tiny, Validated, assert_close, assert_same_bits, make_data, make_loader, train_by_hand, weights
from torch import nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import legato as lg
from legato.base.errors import TaskError
from legato.trainer.data.sampling import epoch_key, permutation


# --- parity -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("samples", [20, 18])
def test_plain_fit_is_the_plain_loop(trainer, samples):
    task = Tiny()
    trainer(max_epochs=3).fit(task, make_loader(samples))
    assert_same_bits(task, train_by_hand(Tiny(), make_loader(samples), epochs=3))


def test_the_shuffled_order_is_the_keyed_permutation(trainer):
    task, data = Tiny(), make_data(18)
    trainer(max_epochs=2, seed=5).fit(task, make_loader(18, shuffle=True))
    by_hand = Tiny()
    for epoch in range(2):
        order = permutation(torch.arange(18).numpy(), 18, epoch_key(5, epoch))
        train_by_hand(by_hand, DataLoader(data, 4, sampler=order.tolist()))
    assert_same_bits(task, by_hand)


def test_a_step_that_wraps_the_bound_one_is_given_as_much(trainer):
    class Counts(Tiny):
        indices = ()

        def training_step(self, batch, batch_idx):
            self.indices += (batch_idx,)
            return super().training_step(batch, batch_idx)

    task = Counts()
    inner = task.training_step

    @wraps(inner)
    def guarded(self, *arguments):
        return inner(*arguments)

    task.training_step = MethodType(guarded, task)  # as callbacks put guards around it in setup
    trainer().fit(task, make_loader(18))
    assert task.indices == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("accumulate", [2, 3, 5, 7])
@pytest.mark.parametrize("samples", [20, 18])
def test_accumulation_weighs_by_samples_also_in_a_short_window(trainer, samples, accumulate):
    task = Tiny()
    made = trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    made.fit(task, make_loader(samples))
    assert_same_bits(task, train_by_hand(Tiny(), make_loader(samples), epochs=2, accumulate=accumulate))
    assert made.global_step == 2 * -(-5 // accumulate)


def test_a_last_window_of_one_batch_has_the_gradient_of_that_batch(trainer):
    """Ten batches in windows of four leave two: elsewhere their gradient is halved."""

    class Slope(lg.Task):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(1))
            self.gradients = []

        def training_step(self, batch):
            return (self.slope * batch[0]).mean()

        def on_before_optimizer_step(self, optimizer):
            self.gradients.append(self.slope.grad.item())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = Slope()
    trainer(accumulate_grad_batches=4).fit(task, DataLoader(TensorDataset(torch.ones(9, 1)), batch_size=1))
    assert task.gradients == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (3, 2), (8, 1)])
def test_replicas_on_one_process_have_the_gradient_of_the_big_batch(trainer, replicas, accumulate):
    task, size = Tiny(), 4 * replicas * accumulate
    trainer(max_epochs=2, replicas=replicas, accumulate_grad_batches=accumulate).fit(task, make_loader(50))
    assert_close(task, train_by_hand(Tiny(), make_loader(50, batch_size=size), epochs=2))


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"gradient_clip_val": 0.05}, lambda task: nn.utils.clip_grad_norm_(task.parameters(), 0.05)),
        (
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            lambda task: nn.utils.clip_grad_value_(task.parameters(), 0.01),
        ),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_clipping(trainer, options, clip, accumulate):
    task = Tiny()
    trainer(max_epochs=2, accumulate_grad_batches=accumulate, **options).fit(task, make_loader(18))
    by_hand = train_by_hand(Tiny(), make_loader(18), epochs=2, accumulate=accumulate, before_step=clip)
    assert_same_bits(task, by_hand)


@pytest.mark.parametrize("name", [64, "64-true", "bf16-true"])
def test_true_precision_is_the_loop_in_that_type(trainer, name):
    dtype = torch.bfloat16 if name == "bf16-true" else torch.float64
    task, data = Tiny(), make_data(18)
    trainer(max_epochs=2, precision=name).fit(task, DataLoader(data, 4))
    converted = TensorDataset(*(tensor.to(dtype) for tensor in data.tensors))
    assert_same_bits(task, train_by_hand(Tiny().to(dtype), DataLoader(converted, 4), epochs=2))
    assert next(task.parameters()).dtype is dtype
    assert torch.get_default_dtype() is torch.float32


def test_mixed_bfloat16_is_the_loop_under_autocast(trainer):
    class Autocast(Tiny):
        def loss(self, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().loss(batch)

    task = Tiny()
    trainer(max_epochs=2, precision="bf16-mixed").fit(task, make_loader(18))
    assert_same_bits(task, train_by_hand(Autocast(), make_loader(18), epochs=2))
    assert next(task.parameters()).dtype is torch.float32


@pytest.mark.parametrize("clip", [None, 0.05])
def test_mixed_float16_is_the_loop_with_a_scaler(trainer, clip):
    task = Tiny()
    trainer(max_epochs=2, precision="16-mixed", gradient_clip_val=clip).fit(task, make_loader(18))
    by_hand, scaler = Tiny(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for batch in [*make_loader(18), *make_loader(18)]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = by_hand.loss(batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    assert_same_bits(task, by_hand)


def test_mixed_float16_survives_an_overflow_and_a_batch_left_out(trainer):
    class Hard(Tiny):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else self.loss(batch) * (1e6 if batch_idx == 2 else 1.0)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    task, made = Hard(), trainer(precision="16-mixed")
    made.fit(task, make_loader(20))
    assert made.global_step == 5
    assert made.strategy.precision.scaler.get_scale() < 65536  # the step that overflowed was noticed
    assert all(parameter.isfinite().all() for parameter in task.parameters())


def test_the_first_step_may_overflow_under_a_scheduler_by_steps(trainer):
    class Overflow(Tiny):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1e4 if batch_idx == 0 else 1.0)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    task = Overflow()
    trainer(precision="16-mixed").fit(task, make_loader(20))
    assert weights(task) != weights(Tiny())


# --- what training_step takes and returns -----------------------------------------------------------------------------
def test_a_step_may_take_the_batch_alone(trainer):
    class Alone(Tiny):
        def training_step(self, batch):
            return self.loss(batch)

    task = Alone()
    trainer().fit(task, make_loader())
    assert_same_bits(task, train_by_hand(Tiny(), make_loader()))


def test_a_step_may_take_anything(trainer):
    class Anything(Tiny):
        def training_step(self, *arguments):
            assert len(arguments) == 2
            return self.loss(arguments[0])

    trainer().fit(Anything(), make_loader())


def test_a_step_may_return_a_dict_that_hooks_see_with_a_detached_loss(trainer):
    outputs = []

    class Dictionary(Tiny):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch), "index": batch_idx}

        def on_train_batch_end(self, outputs_, batch, batch_idx):
            outputs.append(outputs_)

    task = Dictionary()
    trainer().fit(task, make_loader())
    assert_same_bits(task, train_by_hand(Tiny(), make_loader()))
    assert [output["index"] for output in outputs] == [0, 1, 2, 3, 4]
    assert not any(output["loss"].requires_grad for output in outputs)


def test_none_leaves_a_batch_out(trainer):
    class Picky(Tiny):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 3) else self.loss(batch)

    task = Picky()
    made = trainer()
    made.fit(task, make_loader())
    kept = [batch for index, batch in enumerate(make_loader()) if index not in (0, 3)]
    assert_same_bits(task, train_by_hand(Tiny(), kept))


def test_none_in_every_batch_changes_nothing(trainer):
    class Never(Tiny):
        def training_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    task = Never()
    with pytest.raises(TaskError, match="returned None for every batch of epoch 0"):
        trainer().fit(task, make_loader())
    assert_same_bits(task, Tiny())


# --- how long ---------------------------------------------------------------------------------------------------------
def test_max_steps_ends_in_the_middle_of_an_epoch(trainer):
    task, made = Tiny(), trainer(max_epochs=None, max_steps=7)
    made.fit(task, make_loader())
    assert (made.global_step, made.current_epoch, len(task.seen)) == (7, 1, 7)


def test_max_steps_counts_optimizer_steps_and_reads_no_batch_more(trainer):
    task, made = Tiny(), trainer(max_epochs=-1, max_steps=3, accumulate_grad_batches=2, replicas=2)
    made.fit(task, make_loader(64))
    assert (made.global_step, len(task.seen)) == (3, 12)


def test_the_first_limit_counts(trainer):
    made = trainer(max_epochs=1, max_steps=100)
    made.fit(Tiny(), make_loader())
    assert (made.global_step, made.current_epoch) == (5, 1)


@pytest.mark.parametrize("limits", [{"max_epochs": 0}, {"max_epochs": None, "max_steps": 0}])
def test_nothing_to_do(trainer, limits):
    task, made = Tiny(), trainer(**limits)
    made.fit(task, make_loader())
    assert made.global_step == 0
    assert_same_bits(task, Tiny())


@pytest.mark.parametrize("limit", ["00:00:00:01", timedelta(seconds=1), {"seconds": 1}])
def test_max_time_ends_a_run_without_other_limits(trainer, clock, limit):
    class Slow(Tiny):
        def training_step(self, batch, batch_idx):
            clock(0.125)
            return self.loss(batch)

    made = trainer(max_epochs=None, max_time=limit)
    made.fit(Slow(), make_loader())
    assert 8 <= made.global_step <= 16  # ranks ask each other once a second


class Stopper(lg.Callback):
    """Asks for the end after the first step."""

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("limits", "steps"), [({}, 1), ({"min_steps": 3}, 3), ({"min_steps": 8}, 8), ({"min_epochs": 2}, 10)]
)
def test_a_wish_to_stop_waits_for_the_minimum(trainer, limits, steps):
    made = trainer(max_epochs=5, callbacks=Stopper(), **limits)
    made.fit(Tiny(), make_loader())
    assert made.global_step == steps


def test_a_second_fit_begins_anew_with_the_trained_task(trainer):
    task, made = Tiny(), trainer(max_epochs=2)
    made.fit(task, make_loader())
    made.fit(task, make_loader())
    assert made.global_step == 10
    by_hand = train_by_hand(Tiny(), make_loader(), epochs=4)
    assert_same_bits(task, by_hand)


def test_leaving_an_epoch_goes_on_with_the_next(trainer):
    class Leaves(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    task, made = Leaves(), trainer(max_epochs=3)
    made.fit(task, make_loader())
    assert (made.global_step, made.current_epoch) == (6, 3)
    assert_same_bits(task, train_by_hand(Tiny(), list(make_loader())[:2], epochs=3))


def test_leaving_the_first_batch_neither_trains_nor_validates_within_the_epoch(trainer):
    validated = []

    class Leaves(Validated):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

        def on_validation_start(self):
            validated.append(self.current_epoch)

    task, made = Leaves(), trainer(max_epochs=2, val_check_interval=2, num_sanity_val_steps=0, log_every_n_steps=1)
    made.fit(task, make_loader(), make_loader())
    assert (made.global_step, made.current_epoch, validated) == (0, 2, [])
    assert_same_bits(task, Tiny())


# --- switches of torch ------------------------------------------------------------------------------------------------
def test_deterministic_and_anomaly_mode_hold_for_the_run_only(trainer):
    seen = {}

    class Looks(Tiny):
        def training_step(self, batch, batch_idx):
            seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
            seen["warn"] = torch.is_deterministic_algorithms_warn_only_enabled()
            seen["anomaly"] = torch.is_anomaly_enabled()
            seen["cublas"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            return self.loss(batch)

    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    for setting, warn in ((True, False), ("warn", True)):
        trainer(deterministic=setting, detect_anomaly=True).fit(Looks(), make_loader())
        assert seen == {"deterministic": True, "warn": warn, "anomaly": True, "cublas": before or ":4096:8"}
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == before
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.is_anomaly_enabled()


def test_the_switches_are_put_back_after_an_error(trainer):
    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(deterministic=True, precision=64, threads=2).fit(Fails(), make_loader())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == 1


def test_anomaly_mode_names_the_operation(trainer):
    class Root(Tiny):
        def loss(self, batch):
            return (self(batch[0]) * 0).sqrt().mean() * 0  # the gradient is 0 * infinity

    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="SqrtBackward"):
        trainer(detect_anomaly=True).fit(Root(), make_loader())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_leaves_names_and_results_alone(trainer, backend):
    task = Validated()
    names = list(task.state_dict())
    trainer(max_epochs=2, compile={"backend": backend}).fit(task, make_loader(), make_loader())
    assert list(task.state_dict()) == names
    assert_close(task, train_by_hand(Tiny(), make_loader(), epochs=2))
    assert_same_bits(copy.deepcopy(task), task)
    assert_same_bits(pickle.loads(pickle.dumps(task)), task)
