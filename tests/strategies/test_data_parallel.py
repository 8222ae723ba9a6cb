"""Data parallelism in one process: a batch that is split over devices trains like the undivided batch."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import legato as lg
from legato.base.arguments import TrainerArguments
from legato.base.errors import ConfigError, DataError
from legato.base.place import Place
from legato.trainer.data.sampling import Layout
from legato.trainer.data.transfer import to_device
from legato.trainer.metrics.log import Metrics
from legato.trainer.strategies.data_parallel.data_parallel import DataParallelStrategy
from legato.trainer.strategies.strategy import SingleStrategy

CPU = torch.device("cpu")
OTHER_CPU = torch.device("cpu", 1)  # stands for a second device: the same memory, but not equal to the device "cpu"


class Classifier(lg.Task):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(5, 8),
            nn.BatchNorm1d(8) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 3),
        )

    def training_step(self, batch, batch_idx):
        image, label = batch
        return nn.functional.cross_entropy(self.model(image), label)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Run(TrainerArguments):
    """The attributes of a trainer that a strategy and `Task.log` use."""

    running, global_step, stage = False, 0, ""


@contextmanager
def attached(task, devices, replicas=1, strategy=None, **arguments):
    strategy = strategy or DataParallelStrategy()
    devices = [CPU] * devices if isinstance(devices, int) else devices
    run = Run(**arguments)
    task.trainer = run
    strategy.join(Place(), devices, run.precision)
    run.metrics = Metrics(strategy.collectives, 1, task)
    try:
        strategy.place_task(task)
        strategy.layout = Layout(replicas, 1)
        strategy.prepare(task, [task.configure_optimizers()])
        yield strategy
    finally:
        strategy.teardown()


def make_batch(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def gradients(task):
    return {name: parameter.grad for name, parameter in task.named_parameters()}


def same_bits(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


# --- loss and gradient ----------------------------------------------------------------------------------------------
@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(samples=st.integers(1, 13), devices=st.integers(1, 5), reproducible=st.sampled_from(["off", "order"]))
def test_loss_and_gradient_are_those_of_the_undivided_batch(samples, devices, reproducible):
    batch = make_batch(samples, seed=samples)
    plain = Classifier()
    expected = plain.training_step(batch, 0)
    expected.backward()
    task = Classifier()
    with attached(task, devices, reproducible=reproducible) as strategy:
        loss = strategy.training_step((batch, 0), 0, last=True)
        strategy.backward(loss)
    torch.testing.assert_close(loss, expected)
    for name, gradient in gradients(task).items():
        torch.testing.assert_close(gradient, gradients(plain)[name], msg=name)


def test_gradients_of_several_batches_add_up():
    batches = [make_batch(7, seed=1), make_batch(4, seed=2)]
    plain, task = Classifier(), Classifier()
    for batch in batches:
        plain.training_step(batch, 0).backward()
    with attached(task, 3) as strategy:
        for batch in batches:
            strategy.backward(strategy.training_step((batch, 0), 0, last=False))
    for name, gradient in gradients(task).items():
        torch.testing.assert_close(gradient, gradients(plain)[name], msg=name)


@pytest.mark.parametrize("reproducible", ["off", "order"])
def test_repeated_steps_have_the_same_bits(reproducible):
    def run():
        task = Classifier(dropout=0.5 if reproducible == "order" else 0.0, norm=True)
        optimizer = task.configure_optimizers()
        with attached(task, 3, reproducible=reproducible) as strategy:
            for step in range(4):
                torch.manual_seed(step)
                optimizer.zero_grad()
                strategy.backward(strategy.training_step((make_batch(11, seed=step), step), 0, last=True))
                strategy.optimizer_step(optimizer)
        return task.state_dict()

    first = run()
    assert all(same_bits(first, run()) for _ in range(4))


def test_recurrent_tied_frozen_and_unused_weights():
    class Recurrent(Classifier):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(5, 4, batch_first=True)
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.frozen, self.unused = nn.Linear(4, 3).requires_grad_(False), nn.Linear(2, 2)
            self.more = nn.ParameterList([nn.Parameter(torch.ones(4))])

        def training_step(self, batch, batch_idx):
            image, label = batch
            hidden = self.cell(image.unsqueeze(1))[0][:, 0] * self.more[0]
            return nn.functional.cross_entropy(self.frozen(self.second(self.first(hidden))), label)

    batch, plain, task = make_batch(7), Recurrent(), Recurrent()
    plain.training_step(batch, 0).backward()
    with attached(task, 3) as strategy:
        strategy.backward(strategy.training_step((batch, 0), 0, last=True))
    for name, gradient in gradients(plain).items():
        if gradient is None:
            assert gradients(task)[name] is None, name
        else:
            torch.testing.assert_close(gradients(task)[name], gradient, msg=name)
    assert gradients(plain)["frozen.weight"] is gradients(plain)["unused.weight"] is None
    assert all(type(parameter) is nn.Parameter for parameter in task.parameters())


def test_a_skipped_chunk_adds_nothing_and_several_losses_stay_separate():
    class Two(Classifier):
        def training_step(self, batch, batch_idx):
            image, _ = batch
            if image[0, 0] < 0:
                return None
            output = self.model(image)
            return {"loss": [output.mean(), output.pow(2).mean()], "count": torch.tensor(len(image)), "output": output}

    image, task = torch.ones(5, 5), Two()
    with attached(task, 2) as strategy:
        undivided = strategy.training_step(((image, None), 0), 0, last=True)
        half = strategy.training_step(((torch.cat([image[:3], -image[:2]]), None), 0), 0, last=True)
        assert strategy.training_step(((-image, None), 0), 0, last=True) is None
    assert undivided["count"] == 5
    assert half["count"] == 3
    torch.testing.assert_close(half["loss"][1], undivided["loss"][1] * 3 / 5)
    assert undivided["output"].shape == (5, 3)
    first, second = task.model[0].weight, task.model[4].weight
    undivided["loss"][0].backward(inputs=[first], retain_graph=True)
    assert first.grad is not None
    assert second.grad is None
    undivided["loss"][1].backward(inputs=[second])
    assert second.grad is not None


# --- buffers --------------------------------------------------------------------------------------------------------
def test_buffers_follow_the_first_device():
    batch, task, plain = make_batch(7), Classifier(norm=True), Classifier(norm=True)
    plain.training_step((batch[0][:4], batch[1][:4]), 0)
    buffers = dict(task.named_buffers())
    with attached(task, 2) as strategy:
        strategy.training_step((batch, 0), 0, last=True)
    for name, buffer in task.named_buffers():
        torch.testing.assert_close(buffer, dict(plain.named_buffers())[name])
        assert buffer is buffers[name]
    assert task.model[1].num_batches_tracked == 1


def test_a_buffer_that_a_step_replaces_is_kept():
    class Counting(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("largest", None)

        def training_step(self, batch, batch_idx):
            self.seen = self.seen + len(batch[0])
            self.largest = self.model(batch[0]).max()
            return super().training_step(batch, batch_idx)

    task = Counting()
    with attached(task, 2) as strategy:
        strategy.training_step((make_batch(7), 0), 0, last=True)
    assert task.seen == 4
    assert not task.largest.requires_grad


def test_a_value_assigned_to_a_copy_is_lost_with_a_warning():
    class Forgetful(Classifier):
        total = 0

        def training_step(self, batch, batch_idx):
            self.total += len(batch[0])
            return super().training_step(batch, batch_idx)

    with attached(Forgetful(), 2) as strategy:
        with pytest.warns(UserWarning, match=r"training_step assigned self.total, .*drops them after each batch"):
            strategy.training_step((make_batch(4), 0), 0, last=True)
        strategy.training_step((make_batch(4), 0), 0, last=True)  # warns once


# --- what a batch may be --------------------------------------------------------------------------------------------
def test_a_batch_without_tensors_is_refused():
    with attached(Classifier(), 2) as strategy, pytest.raises(DataError, match="of type object has no tensor"):
        strategy.training_step((object(), 0), 0, last=True)


# --- turns ----------------------------------------------------------------------------------------------------------
class Witness(Classifier):
    def __init__(self):
        super().__init__()
        self.events = []

    def training_step(self, batch, batch_idx):
        self.events.append((self.trainer.strategy.device, len(batch[0])))
        return super().training_step(batch, batch_idx)


def test_a_chunk_computes_on_its_device():
    task = Witness()
    with attached(task, [CPU, OTHER_CPU]) as strategy:
        task.trainer.strategy = strategy
        strategy.training_step((make_batch(5), 0), 0, last=True)
        assert strategy.device == CPU
    assert task.events == [(CPU, 3), (OTHER_CPU, 2)]


def test_each_chunk_runs_in_the_modes_of_the_caller():
    class Modes(Classifier):
        def training_step(self, batch, batch_idx):
            output = self.model(batch[0])
            self.seen.append((output.dtype, torch.zeros(1).dtype, torch.is_grad_enabled(), output.is_inference()))
            return output.float().mean()

    task = Modes()
    task.seen = []
    with attached(task, 2, precision="bf16-mixed") as strategy:
        strategy.training_step((make_batch(4), 0), 0, last=True)
        with torch.no_grad():
            strategy.training_step((make_batch(4), 0), 0, last=True)
        with torch.inference_mode():
            strategy.training_step((make_batch(4), 0), 0, last=True)
    half, single = torch.bfloat16, torch.float32
    modes = [(half, single, True, False), (half, single, False, False), (half, single, False, True)]
    assert task.seen == [mode for mode in modes for _ in range(2)]

    task = Modes()
    task.seen = []
    with attached(task, 2, precision="bf16-true", reproducible="off") as strategy:
        strategy.training_step((strategy.precision.convert_batch(make_batch(4)), 0), 0, last=True)
    assert task.seen == [(half, half, True, False)] * 2
    assert torch.zeros(1).dtype == single


def test_one_device_needs_no_copies():
    task = Classifier()
    with attached(task, 1) as strategy:
        task.training_step = lambda batch, batch_idx: task
        assert strategy.training_step((make_batch(3), 0), 0, last=True) is task


# --- evaluation -----------------------------------------------------------------------------------------
def test_evaluation_outputs_come_in_the_order_of_the_samples():
    class Predicting(Classifier):
        def predict_step(self, batch, batch_idx):
            return {"output": self.model(batch[0]), "names": [f"sample {int(i)}" for i in batch[1]]}

    task, batch = Predicting(), (make_batch(7)[0], torch.arange(7))
    with attached(task, 3) as strategy, torch.inference_mode():
        predicted = strategy.evaluation_step("predict_step", (batch, 0))
        torch.testing.assert_close(predicted["output"], task.model(batch[0]))
    assert predicted["names"] == [f"sample {i}" for i in range(7)]
    assert predicted["output"].is_inference()


# --- refusals -------------------------------------------------------------------------------------------------------
def test_settings_that_copies_do_not_support_are_refused():
    manual = Classifier()
    manual.automatic_optimization = False
    compiled = Classifier()
    compiled.model.compile(backend="eager")
    for task, options, message in (
        (manual, {}, "automatic_optimization=False"),
        (compiled, {}, "cannot run compiled steps"),
        (Classifier(), {"compile": True}, "cannot run compiled steps"),
        (Classifier(), {"reproducible": "bitwise"}, "splits each batch, so the bits"),
    ):
        with pytest.raises(ConfigError, match=message), attached(task, 2, **options):
            pass
        with attached(task, 1, **options):  # all are allowed on one device
            pass
    with pytest.raises(ConfigError, match="this run has 2"):
        DataParallelStrategy().join(Place(rank=0, world_size=2), [CPU], 32)


# --- GPUs -----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("replicas", [1, 3])
def test_gpus_train_like_one_cpu(replicas):
    def run(strategy, devices):
        task = Classifier()
        optimizer = task.configure_optimizers()
        with attached(task, devices, replicas=replicas, strategy=strategy):
            for step in range(3):
                optimizer.zero_grad()
                for replica in range(replicas):
                    batch = to_device(make_batch(7, seed=10 * step + replica), strategy.device)
                    strategy.backward(strategy.training_step((batch, 0), replica, last=True))
                strategy.end_step()
                strategy.optimizer_step(optimizer)
        return {name: tensor.cpu() for name, tensor in task.state_dict().items()}

    actual = run(DataParallelStrategy(), [torch.device("cuda", 0), torch.device("cuda", 1)])
    for name, tensor in run(SingleStrategy(), [CPU]).items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5)
