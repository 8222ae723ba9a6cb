"""Private names of torch and torchmetrics do what `torch_private` says of them, and lie in no other file."""

import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torchmetrics
from ddp_cases import flat
from mesh_cases import CNN, FEATURES, GPT, difference, fit, mesh, outcome
from shared_processes import run_cases
from torch import distributed, nn

import legato as lg
from legato.base import torch_private
from legato.trainer.strategies.strategy import Strategy

PACKAGE = Path(lg.__file__).resolve().parent


# --- process groups and sharded parameters ----------------------------------------------------------------------------
def groups_with_limits():
    """Return the limit of the default group and of another one, in seconds."""
    groups = [distributed.group.WORLD, distributed.new_group()]
    torch_private.set_group_timeouts(timedelta(seconds=50))
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def group_names():
    """Return a sum over a group that comes about after an attempt that only rank 0 has made."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    store = torch_private.default_store()
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        lost = distributed.PrefixStore("lost", store)
        with pytest.raises(RuntimeError):
            distributed.init_process_group("gloo", store=lost, rank=0, world_size=2, timeout=timedelta(seconds=0.2))
    torch_private.reset_group_names()
    met = distributed.PrefixStore("met", store)
    distributed.init_process_group("gloo", store=met, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    total = torch.ones(())
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return float(total)


class LeavingGPT(GPT):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 3) else None


def left_epochs():
    """Return the outcome of runs that leave an epoch within a step, in full and in mixed precision."""
    kind, options = FEATURES["an epoch that is left"]
    half = {**options, "strategy": mesh(shard=2), "precision": "bf16-mixed", "devices": 2}
    return [outcome(kind(), devices=2, **options), outcome(LeavingGPT(), **half)]


def sharded_twice():
    """Return the weights after two sharded runs of one task."""
    task = CNN(norm=False)
    for _ in range(2):
        fit(task, strategy=mesh(shard=2), devices=2, max_epochs=1)
    return flat(task)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes do, in the same ones."""
    work = (left_epochs, sharded_twice, groups_with_limits, group_names)
    return run_cases({function.__name__: function for function in work}, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
def test_limits_of_process_groups(two):
    assert two["groups_with_limits"] == [50, 50]


@pytest.mark.slow
def test_groups_meet_after_an_attempt_that_failed(two):
    assert two["group_names"] == 2.0


@pytest.mark.slow
def test_an_epoch_is_left_within_a_step(two):
    kind, options = FEATURES["an epoch that is left"]
    full, half = two["left_epochs"]
    assert difference(outcome(kind(), **{**options, "strategy": "single"}), full) < 2e-6
    single = {**options, "strategy": "single", "precision": "bf16-mixed"}
    assert difference(outcome(LeavingGPT(), **single), half) < 0.05


@pytest.mark.slow
def test_a_second_sharded_run_of_a_task(two):
    assert isinstance(two["sharded_twice"], torch.Tensor)


# --- tensors and modules ----------------------------------------------------------------------------------------------
def test_views():
    base = torch.ones(4)
    assert [torch_private.is_view(tensor) for tensor in (base, base[:2])] == [False, True]


class Parted(nn.Module):
    """Has a parameter, a buffer, one that is None, and a child, one of which is shared."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", None)
        self.inner = nn.LSTM(2, 2)
        self.again = self.inner

    def forward(self, inputs):
        return self.inner(inputs * self.weight + self.mean)[0]


def test_the_parts_of_a_module():
    module, second = Parted(), Parted()
    assert set(torch_private.own_buffers(module)) == {"mean", "late"}
    second.extra = nn.Linear(2, 2)
    del module.again
    torch_private.set_module_parts(module, torch_private.module_parts(second))
    assert module.extra is second.extra
    assert module.weight is second.weight
    assert module.late is None
    assert module.state_dict().keys() == second.state_dict().keys()


def test_a_copy_shares_what_is_no_tensor_and_has_the_tensors_given():
    module = Parted()
    module.notes = {"some": ["thing"]}
    tensors = {id(tensor): tensor * 2 for tensor in [*module.parameters(), *module.buffers()]}
    twin = torch_private.copy_modules(module, tensors)
    inputs = torch.ones(3, 1, 2)
    twin(inputs).sum().backward()
    doubled = Parted()
    doubled.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    assert torch.equal(twin(inputs), doubled(inputs))
    assert twin.notes is module.notes
    assert twin.inner is twin.again
    assert twin.inner is not module.inner
    assert module.weight.grad is not None
    assert module.inner.weight_ih_l0.grad is not None


def test_lists_of_tensors():
    tensors = [torch.full((2,), float(number)) for number in range(3)]
    torch_private.add_to_each(tensors, [torch.ones(2)] * 3)
    torch_private.multiply_each(tensors, 3.0)
    torch_private.divide_each(tensors, 2.0)
    assert [float(tensor[0]) for tensor in tensors] == [1.5, 3.0, 4.5]
    torch_private.copy_to_each(tensors, [torch.ones(2)] * 3)


# --- optimizers and backward ------------------------------------------------------------------------------------------
def test_a_step_of_an_optimizer_and_its_scheduler():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.mark_stepped(optimizer)
        scheduler.step()  # else it warns that the optimizer has made no step
    weight.grad = torch.ones(2)
    torch_private.step_of(optimizer)()
    assert torch.equal(weight, torch.full((2,), 0.95))


class Watched(torch.Tensor):
    """Overrides torch's functions, as tensors of other packages do."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, arguments, options or {})


def test_a_backward():
    weight, strategy = nn.Parameter(torch.ones(2)), Strategy()
    strategy.plain_backward, strategy.engine = True, torch_private.backward_engine()
    for dtype in (torch.float32, torch.float64, torch.float32):
        weight.grad = None
        strategy.backward((weight.to(dtype) * 3).sum())
        assert torch.equal(weight.grad, torch.full((2,), 3.0))
    Watched.seen.clear()
    strategy.backward((weight * 3).sum().as_subclass(Watched))
    assert torch.Tensor.backward in Watched.seen
    assert torch.equal(weight.grad, torch.full((2,), 6.0))


def test_a_backward_whose_nodes_are_logged_is_torch_s():
    log = logging.getLogger("torch.autograd.graph")
    log.setLevel(logging.DEBUG)
    try:
        assert torch_private.backward_engine() is None
    finally:
        log.setLevel(logging.NOTSET)


def test_schedulers_within_another_one():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))])
    inner = torch.optim.lr_scheduler.ConstantLR(optimizer)
    outer = torch.optim.lr_scheduler.ChainedScheduler([inner])
    assert list(torch_private.schedulers_within(outer)) == [inner]
    assert list(torch_private.schedulers_within(inner)) == []


# --- torchmetrics -----------------------------------------------------------------------------------------------------
def test_metrics():
    metric = torchmetrics.MeanMetric()
    metric(torch.tensor(3.0))
    assert not torch_private.is_computed(metric)
    metric.compute()
    assert torch_private.is_computed(metric)
    assert torch_private.newest_value_of(metric) == 3.0
    assert set(torch_private.reductions_of(metric)) == {"mean_value", "weight"}
    assert torch_private.set_synced(metric, False) is True
    torch_private.set_updates(metric, 4)
    assert metric.update_count == 4
