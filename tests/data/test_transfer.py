"""Transfer of batches to a device: copy stream, memory, hooks and errors."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simulated_devices import DEVICES, SimulatedDevices, device_of
from tiny import Tiny, Validated, assert_same_bits, make_loader
from torch import Tensor

from legato.base.tensors import require_samples
from legato.trainer.data.transfer import CopyStream, to_device
from legato.trainer.strategies.strategy import Strategy

COPYING, COMPUTING = 1.0, 2.0
"""Seconds that a batch takes."""
BATCH = 5, 3


class TimedStream(torch.Stream):
    """A stream that is busy until `free`."""

    def run(self, seconds):
        """Queue work; return when it begins and ends."""
        begin = max(self.free, self.clock.now)
        self.free = begin + seconds
        return begin, self.free

    def record_event(self):
        return SimpleNamespace(synchronize=lambda end=self.free: self.clock.wait(end))

    def wait_stream(self, stream):
        self.free = max(self.free, stream.free)

    def __enter__(self):
        self.clock.entered.append(self)

    def __exit__(self, *error):
        self.clock.entered.pop()


class Clock(SimulatedDevices):
    """A device whose streams take time: the host queues work at no cost, and streams run beside each other."""

    def __init__(self):
        super().__init__()
        self.now, self.streams = 0.0, []
        self.main, self.copies, self.computed, self.recorded = self.stream_of(DEVICES[0]), [], [], []
        self.entered = [self.main]

    def __enter__(self):
        self.real = torch.Stream, torch.accelerator.current_stream
        torch.Stream, torch.accelerator.current_stream = self.stream_of, lambda device: self.entered[-1]
        return super().__enter__()

    def __exit__(self, *error):
        torch.Stream, torch.accelerator.current_stream = self.real
        return super().__exit__(*error)

    def stream_of(self, device):
        self.streams.append(TimedStream(stream_id=len(self.streams), device_index=0, device_type=1))
        self.streams[-1].clock, self.streams[-1].free = self, 0.0
        return self.streams[-1]

    def wait(self, end):
        self.now = max(self.now, end)

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is Tensor.record_stream:
            return self.recorded.append(arguments[1])
        return super().__torch_function__(function, types, arguments, options)

    def move(self, function, tensor, *arguments, **options):
        before = len(self.moves)
        moved = super().move(function, tensor, *arguments, **options)
        if len(self.moves) > before and tensor.shape == BATCH:
            self.copies.append((self.now, *self.entered[-1].run(COPYING)))
        return moved


class OnClock(Strategy):
    """A process whose device is the clock's."""

    name = "on_clock"

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def join(self, place, devices, precision):
        super().join(place, devices, precision)
        self.device = DEVICES[0]


class Timed(Validated):
    """Keeps the device busy."""

    def training_step(self, batch, batch_idx):
        clock = self.trainer.strategy.clock
        assert device_of(batch[0]) == DEVICES[0]
        assert clock.entered[-1] is clock.main
        clock.computed.append(clock.main.run(COMPUTING))
        return super().training_step(batch, batch_idx)

    validation_step = training_step


def fit(trainer, task, batches=6, validation=None, **options):
    """Train on the clock's device; return the clock."""
    with Clock() as clock:
        made = trainer(strategy=OnClock(clock), **options)
        made.fit(task, make_loader(5 * batches, 5), validation and make_loader(5 * validation, 5))
    assert made.strategy.to_device is to_device
    return clock


def test_a_batch_is_copied_while_the_one_before_is_computed(trainer):
    ahead, behind = fit(trainer, Timed()), fit(trainer, Timed(), prefetch_to_device=False)
    assert behind.main.free == 6 * (COPYING + COMPUTING)
    assert ahead.main.free == COPYING + 6 * COMPUTING
    for (_, _, arrived), (began, _) in zip(ahead.copies, ahead.computed, strict=True):
        assert arrived <= began
    assert len(ahead.recorded) == 12  # inputs and targets
    assert {*ahead.recorded} == {ahead.main}


def test_it_changes_no_bit_and_no_random_number(trainer):
    tasks, states, read = (Timed(), Timed()), [], []
    for task, ahead in zip(tasks, (True, False), strict=True):
        clock = fit(trainer, task, max_steps=4, prefetch_to_device=ahead)
        states.append(torch.get_rng_state())
        read.append((len(task.seen), len(clock.copies), task.trainer.state.samples_seen))
    assert_same_bits(*tasks)
    assert torch.equal(*states)
    assert read == [(4, 4, 20)] * 2


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"replicas": 2, "reproducible": "bitwise"}])
def test_one_further_batch_fills_the_device(trainer, options):
    clock = fit(trainer, Timed(), validation=4, **options)
    assert len(clock.copies) == len(clock.computed) >= 10
    filled = [(copied, ended) for (copied, _, _), (_, ended) in zip(clock.copies, clock.computed, strict=True)]
    at_once = [sum(copied <= now < ended for copied, ended in filled) for now, _ in filled]
    assert max(at_once) == 2
    waits = [begin - end for (_, end), (begin, _) in pairwise(clock.computed)]
    assert max(waits) == 0  # the device is never left without work


def test_hooks_of_the_transfer_run_on_the_computing_stream(trainer):
    class Hooked(Timed):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert device_of(batch[0]).type == "cpu"
            return {"inputs": batch[0], "targets": batch[1], "name": "kept"}

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            assert batch.pop("name") == "kept"
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            clock = self.trainer.strategy.clock
            assert clock.entered[-1] is clock.main
            assert clock.main.free >= clock.copies[-1][2]
            return batch["inputs"], batch["targets"]

    class MovesItself(Timed):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [tensor.to(device) for tensor in batch]

    tasks = Timed(), Hooked(), MovesItself()
    clocks = [fit(trainer, task) for task in tasks]
    assert clocks[1].main.free == clocks[0].main.free
    assert clocks[2].main.free == 6 * (COPYING + COMPUTING)  # where it says, which is right as well
    assert_same_bits(tasks[0], tasks[1])
    assert_same_bits(tasks[0], tasks[2])


def test_what_is_no_plain_tensor_moves_as_before(trainer):
    class Sentence:
        def __init__(self, tokens):
            self.tokens = tokens

        def to(self, device):
            return Sentence(self.tokens.to(device))

    with Clock() as clock:
        copies = CopyStream(DEVICES[0])
        batch = {
            "custom": Sentence(torch.ones(5, 3)),
            "there": torch.ones(2).to(DEVICES[0]),
            "sparse": torch.eye(2).to_sparse(),
        }
        copies.begin_batch()
        moved = to_device(batch, DEVICES[0], copies)
        assert device_of(moved["custom"].tokens) == device_of(moved["sparse"]) == DEVICES[0]
        assert moved["there"] is batch["there"]
    assert clock.recorded == []
    assert clock.main.free == COPYING


def test_an_error_of_the_transfer_comes_at_its_step(trainer):
    class Fails(Timed):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            if len(self.seen) == 3:
                raise RuntimeError(f"at step {self.global_step}")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    task = Fails()
    with pytest.raises(RuntimeError, match="at step 3"):
        fit(trainer, task)
    assert len(task.seen) == 3


def test_the_cpu_has_no_stream(trainer):
    made = trainer()
    made.fit(Tiny(), make_loader())
    assert made.strategy.to_device is to_device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpu_trains_to_the_same_bits(trainer, pinned):
    """Large batches and a short computation, over which an early copy or reuse of memory would write."""

    class Large(Tiny):
        kept = None

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if self.kept is not None:  # longer than its step
                loss = loss + self.loss(self.kept)
            self.kept = batch
            return loss

    tasks = []
    for ahead in (True, False):
        tasks.append(Large())
        loader = make_loader(40 * 100_000, 100_000, pin_memory=pinned)
        trainer(accelerator="cuda", devices=1, prefetch_to_device=ahead).fit(tasks[-1], loader)
    assert_same_bits(*tasks)


@dataclass
class Labelled:
    names: list[str]
    values: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"count": 3, "names": ["a", "b", "c"], "values": torch.zeros(2, 4)}, 2),
        ([["a", "b", "c"], (np.zeros((4, 1)), torch.zeros(4))], 4),
        (Labelled(["a", "b"], torch.zeros(5)), 5),
        ({"text": "abc", "names": ["a", "b", "c"]}, 3),
        ([1, 2], 2),
        ({"value": torch.tensor(3.0)}, 1),
        ({"text": "abc", "nothing": None, "empty": []}, 1),
    ],
)
def test_samples_are_counted_by_tensors_and_without_any_by_the_first_list(batch, samples):
    assert require_samples(batch) == samples
