"""The call path of a training step: its number of frames and calls, and that nothing on it waits for a device."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato as lg
from legato.callbacks import Checkpoint
from legato.loggers.tensorboard import TensorBoardLogger

PACKAGE = Path(lg.__file__).resolve().parent
OURS = tuple(str(PACKAGE / room) + "/" for room in ("base", "callbacks", "lab", "loggers", "tasks", "trainer"))
"""The tests lie in the package's folder too, where it is installed editable."""


def is_ours(code):
    return code.co_filename.startswith(OURS)


def our_path():
    """The names of our functions on the stack, outermost first."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        if is_ours(frame.f_code):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


# --- frames -----------------------------------------------------------------------------------------------------------
class Witness(torch.autograd.Function):
    """Passes its input on, and notes who ran backward."""

    @staticmethod
    def forward(context, value, notes):
        context.notes = notes
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        context.notes["backward"] = our_path()
        return gradient, None


class Witnessed(torch.optim.SGD):
    """Notes who made it step."""

    notes: dict

    def step(self, closure=None):
        self.notes["step"] = our_path()
        return super().step(closure)


class Small(lg.Task):
    """Two layers on 32 numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"replicas": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_three_of_our_frames_lie_between_fit_and_torch(trainer, options):
    notes = {}

    class Looking(Small):
        def training_step(self, batch, batch_idx):
            return Witness.apply(super().training_step(batch, batch_idx), notes)

        def configure_optimizers(self):
            optimizer = Witnessed(self.parameters(), lr=0.01)
            optimizer.notes = notes
            return optimizer

    trainer(**options).fit(Looking(), stream(4))
    assert notes.keys() == {"backward", "step"}
    for path in notes.values():
        # around fit lies what suggests the name of a misspelt argument
        between = path[path.index("fit") + 1 :]
        assert len(between) <= 3, " -> ".join(path)


# --- calls ------------------------------------------------------------------------------------------------------------
def batches(count):
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(count * 32, 32, generator=generator), torch.arange(count * 32) % 10
    return inputs, targets


def stream(count):
    """Ready batches from a DataLoader over an iterable dataset."""
    inputs, targets = batches(count)

    class Stream(IterableDataset):
        def __len__(self):
            return count

        def __iter__(self):
            yield from zip(inputs.split(32), targets.split(32), strict=True)

    return DataLoader(Stream(), batch_size=None)


def map_style(count):
    """Samples that are shuffled and collated."""
    return DataLoader(TensorDataset(*batches(count)), batch_size=32, shuffle=True)


class Counting(Small):
    """Counts the calls from the beginning of one step to that of a later one."""

    def __init__(self, first, last, say=lambda task, loss: None):
        super().__init__()
        self.first, self.last, self.say = first, last, say
        self.calls, self.ours = 0, Counter()
        self.ranges = 0
        """Ranges of torch's profiler that were opened."""

    def training_step(self, batch, batch_idx):
        if batch_idx == self.first:
            sys.setprofile(self.count)
        elif batch_idx == self.last:
            sys.setprofile(None)
        loss = super().training_step(batch, batch_idx)
        self.say(self, loss)
        return loss

    def count(self, frame, event, argument):
        self.calls += event in ("call", "c_call")
        self.ranges += event == "call" and frame.f_code is torch.autograd.profiler.record_function.__enter__.__code__
        if event == "call" and is_ours(frame.f_code):
            self.ours[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    def per_step(self, calls):
        return calls / (self.last - self.first)


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "most"), [(stream, 30), (map_style, 39)])
def test_a_bare_step_calls_python_few_times(trainer, loader, most):
    task = Counting(20, 276)  # two times 4,096 samples, for which the order is worked out at once
    trainer(log_every_n_steps=1000).fit(task, loader(280))
    calls = task.per_step(task.ours.total())
    shown = "\n".join(f"{task.per_step(count):6.2f} {name}" for name, count in task.ours.most_common())
    assert calls <= most, f"{calls} calls of our functions a step:\n{shown}"


@pytest.mark.slow
def test_a_bare_step_under_ddp_calls_python_few_times(trainer, tmp_path):
    class Written(Counting):
        def on_train_end(self):
            if self.global_rank == 0:
                (tmp_path / "calls.json").write_text(json.dumps([self.ours, self.ranges]))

    task = Written(20, 276)
    trainer(log_every_n_steps=1000, devices=2, strategy="ddp").fit(task, map_style(560))
    ours, ranges = json.loads((tmp_path / "calls.json").read_text())
    task.ours.update(ours)
    calls = sum(round(task.per_step(count)) for count in task.ours.values())  # not those once a second
    shown = "\n".join(f"{task.per_step(count):6.2f} {name}" for name, count in task.ours.most_common())
    assert 30 < calls <= 48, f"{calls} calls of our functions a step:\n{shown}"
    assert not ranges  # of torch's profiler


@pytest.mark.slow
def test_a_logged_scalar_costs_few_calls(trainer):
    """Of Python and C together, those of the logging steps spread over all."""

    def log(task, loss):
        task.log("loss", loss, on_step=True, on_epoch=True)

    silent, logging = Counting(25, 125), Counting(25, 125, log)
    for task in (silent, logging):
        trainer(max_steps=130).fit(task, stream(130))
    calls = logging.per_step(logging.calls - silent.calls)
    assert 5 < calls <= 40, f"{calls} calls for one logged scalar"


# --- waiting for a device ---------------------------------------------------------------------------------------------
WAITS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "is_nonzero"}
"""What reads a tensor from its device, and so waits until the device has computed it."""


class Asked(TorchFunctionMode):
    """Notes which methods that wait are asked for from Python."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_function__(self, function, types, arguments=(), options=None):
        if getattr(function, "__name__", "") in WAITS:
            self.note(function.__name__)
        return function(*arguments, **(options or {}))


class Dispatched(TorchDispatchMode):
    """Notes what waits inside of torch."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name, options = function._schema.name, options or {}
        # a copy in another type waits for nothing, one that names a device may
        if name == "aten::_local_scalar_dense" or (name == "aten::_to_copy" and options.get("device") is not None):
            self.note(name)
        return function(*arguments, **options)


class Open(Small):
    """Logs, and knows whether it is between two logging steps."""

    every = 10

    def __init__(self):
        super().__init__()
        self.between, self.waits = False, {True: Counter(), False: Counter()}

    def note(self, name):
        self.waits[self.between][name] += 1

    def on_train_batch_start(self, batch, batch_idx):
        self.between = self.global_step > 0  # the first loss is looked at at once

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"largest": batch[0].max(), "batch": batch_idx}, reduce_fx="max")
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.between = self.global_step > 1 and self.global_step % self.every != 0


class Weighs(Open):
    """Returns the weight of each batch."""

    def training_step(self, batch, batch_idx):
        weight = (batch[1] > 2).sum()
        self.log("weighted", weight.double(), batch_size=weight)
        return {"loss": super().training_step(batch, batch_idx), "weight": weight}


@pytest.mark.parametrize("kind", [Open, Weighs])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "nan": "ignore"},
        {"replicas": 2, "reproducible": "bitwise", "gradient_clip_val": 0.1},
    ],
)
def test_nothing_waits_for_the_device_between_logging_steps(trainer, kind, options):
    task = kind()
    made = trainer(
        max_steps=40,
        log_every_n_steps=task.every,
        logger=TensorBoardLogger(),
        enable_progress_bar=True,
        callbacks=[Checkpoint(every_n_train_steps=task.every)],
        enable_checkpointing=True,
        max_time="1:00:00:00",
        **options,
    )
    with Asked(task.note), Dispatched(task.note):
        made.fit(task, stream(80))
    assert task.waits[True] == {}
    assert (
        task.waits[False]["aten::_local_scalar_dense"] >= 4
    )  # in the logging steps they are read, or nothing was seen
    assert any(made.run_dir.glob("events*"))
    assert len(list(made.run_dir.glob("checkpoints/step-*"))) >= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
def test_nothing_waits_for_a_gpu_between_logging_steps(trainer, options):
    class Strict(Open):
        """Torch raises an error where anything waits."""

        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            torch.cuda.set_sync_debug_mode("error" if self.between else "default")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            torch.cuda.set_sync_debug_mode("error" if self.between else "default")

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    inputs, targets = batches(80)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, pin_memory=True)
    made = trainer(accelerator="cuda", devices=1, log_every_n_steps=Open.every, enable_progress_bar=True, **options)
    try:
        made.fit(Strict(), loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
