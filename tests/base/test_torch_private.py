"""Private names of torch, torchmetrics and CPython: each is used in one file, and the public way does the same."""

import ast
import logging
import random
import re
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from ddp_cases import flat
from mesh_cases import CNN, FEATURES, GPT, difference, fit, mesh, outcome
from shared_processes import run_cases
from tiny import Tiny, make_loader
from torch import distributed, nn
from torch.utils.tensorboard import SummaryWriter

import legato as lg
from legato.base import torch_private
from legato.base.arguments import TrainerArguments
from legato.base.errors import ConfigError, TaskError
from legato.base.torch_private import SHORTCUTS, Shortcut, public_only
from legato.cli.check.check import try_run
from legato.loggers.logger import NoExperiment
from legato.trainer.strategies.strategy import Strategy


class TinyData(lg.DataModule):
    def train_dataloader(self):
        return make_loader()


PACKAGE = Path(lg.__file__).resolve().parent


# --- the switch -------------------------------------------------------------------------------------------------------
def test_this_torch_has_every_name():
    assert [shortcut.names for shortcut in SHORTCUTS if not shortcut.is_there] == []
    assert torch_private.remarks() == []


def test_a_name_that_is_missing_or_has_another_signature_is_not_used():
    before = list(SHORTCUTS)
    try:
        for probe in (lambda: torch._no_such_name, lambda: torch_private.takes(torch.nn.Module.train, "self")):
            assert not Shortcut("torch._no_such_name", "it is slower", probe).usable
        expected = f"torch._no_such_name is not in torch {torch.__version__} as expected: it is slower."
        assert torch_private.remarks() == [expected] * 2
    finally:
        SHORTCUTS[:] = before


def test_to_look_for_a_name_draws_no_number_of_the_task_s():
    """Names are looked for at their first use: within an epoch, after its random numbers were set."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for shortcut in SHORTCUTS:
        shortcut.__dict__.pop("is_there", None)
        assert shortcut.is_there
    drawing = Shortcut("a probe that draws", "", lambda: bool(torch.rand(1) < 2))
    try:
        assert drawing.is_there
    finally:
        SHORTCUTS.remove(drawing)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_the_switch_takes_every_public_way_and_back():
    with public_only():
        assert not any(shortcut.usable for shortcut in SHORTCUTS)
        assert all("is switched off by LEGATO_PUBLIC_TORCH: " in remark for remark in torch_private.remarks())
        assert len(torch_private.remarks()) == len(SHORTCUTS)
    assert all(shortcut.usable for shortcut in SHORTCUTS)


@pytest.mark.slow
def test_the_environment_sets_the_switch_and_check_says_so(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEGATO_PUBLIC_TORCH", "1")
    try:
        report = try_run(TrainerArguments(accelerator="cpu", max_epochs=1), Tiny(), TinyData())
        assert report.ok
        assert torch_private.remarks() == report.remarks
        assert len(report.remarks) == len(SHORTCUTS)
    finally:
        torch_private.take_public_ways(False)


# --- process groups and sharded parameters ----------------------------------------------------------------------------
def groups_with_limits():
    """Return the limit of the default group and of another one, set both ways, in seconds."""
    found, other = [], distributed.new_group()
    for seconds in (50, 60):
        torch_private.set_group_timeouts(timedelta(seconds=seconds))
        backends = [group._get_backend(torch.device("cpu")) for group in (distributed.group.WORLD, other)]
        found.append([backend.options._timeout.total_seconds() for backend in backends])
        torch_private.take_public_ways()
    torch_private.take_public_ways(False)
    return found


def group_names():
    """Return whether a group comes about after an attempt that only this rank has made, both ways."""
    rank, world, found = distributed.get_rank(), distributed.get_world_size(), []
    store = torch_private.default_store()
    distributed.barrier()
    distributed.destroy_process_group()
    for way in ("private", "public"):
        torch_private.take_public_ways(way == "public")
        if rank == 0:
            lost = distributed.PrefixStore(f"{way} lost", store)
            with pytest.raises(RuntimeError):
                distributed.init_process_group("gloo", store=lost, rank=0, world_size=2, timeout=timedelta(seconds=0.2))
        torch_private.reset_group_names()
        met = distributed.PrefixStore(way, store)
        distributed.init_process_group("gloo", store=met, rank=rank, world_size=world, timeout=timedelta(seconds=20))
        total = torch.ones(())
        distributed.all_reduce(total)
        found.append(float(total))
        distributed.destroy_process_group()
    torch_private.take_public_ways(False)
    return found


class LeavingGPT(GPT):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 3) else None


def left_epochs():
    """Return the outcome of runs that leave an epoch within a step: by the public way; in half precision by both."""
    kind, options = FEATURES["an epoch that is left"]
    half = {**options, "strategy": mesh(shard=2, half_traffic=True), "precision": "bf16-mixed", "devices": 2}
    with public_only():
        found = [outcome(kind(), devices=2, **options), outcome(LeavingGPT(), **half)]
    return [*found, outcome(LeavingGPT(), **half)]


def sharded_twice():
    """Return what a second sharded run of one task raises by the public ways, and what it comes to otherwise."""
    found = []
    for way in (True, False):
        torch_private.take_public_ways(way)
        task = CNN(norm=False)
        fit(task, strategy=mesh(shard=2), devices=2, max_epochs=1)
        try:
            fit(task, strategy=mesh(shard=2), devices=2, max_epochs=1)
            found.append(flat(task))
        except AssertionError as error:
            found.append(str(error))
    torch_private.take_public_ways(False)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes do, in the same ones."""
    work = (left_epochs, sharded_twice, groups_with_limits, group_names)
    return run_cases({one.__name__: one for one in work}, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
def test_limits_of_process_groups(two):
    private, public = two["groups_with_limits"]
    assert private == [50, 50]
    assert public[0] == (60 if hasattr(distributed, "set_timeout") else 50)


@pytest.mark.slow
def test_groups_meet_after_an_attempt_that_failed(two):
    assert two["group_names"] == [2.0, 2.0]


@pytest.mark.slow
def test_an_epoch_is_left_within_a_step(two):
    kind, options = FEATURES["an epoch that is left"]
    whole, by_public, by_private = two["left_epochs"]
    assert difference(whole, outcome(kind(), **{**options, "strategy": "single"})) < 2e-6
    assert difference(by_public, by_private) == 0.0


@pytest.mark.slow
def test_a_second_sharded_run_of_a_task(two):
    by_public, by_private = two["sharded_twice"]
    assert "more than once" in by_public
    assert isinstance(by_private, torch.Tensor)


def test_an_output_may_be_a_view():
    whole = torch.ones(4)
    assert [torch_private.may_be_view(one) for one in (whole, whole[:2])] == [False, True]
    with public_only():
        assert [torch_private.may_be_view(one) for one in (whole, whole[:2])] == [True, True]


# --- one process, both ways -------------------------------------------------------------------------------------------
@pytest.fixture(params=["private", "public"])
def way(request):
    with public_only() if request.param == "public" else nullcontext():
        yield request.param


class Parted(nn.Module):
    """Has a parameter, a buffer, one that is None, and a child, one of which is shared."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", None)
        self.inner = nn.LSTM(2, 2)
        self.again = self.inner

    def forward(self, given):
        return self.inner(given * self.weight + self.mean)[0]


def test_the_parts_of_a_module(way):
    module, other = Parted(), Parted()
    assert set(torch_private.own_parameters(module)) == {"weight"}
    buffers = torch_private.own_buffers(module)
    assert set(buffers) == {"mean", "late"}
    buffers["late"] = torch.ones(3)
    assert torch.equal(module.late, torch.ones(3))
    assert "late" in module.state_dict()
    other.extra = nn.Linear(2, 2)
    del module.again
    torch_private.set_module_parts(module, torch_private.module_parts(other))
    assert module.extra is other.extra
    assert module.weight is other.weight
    assert module.late is None
    assert module.state_dict().keys() == other.state_dict().keys()


def test_a_copy_shares_what_is_no_tensor_and_has_the_tensors_given(way):
    module = Parted()
    module.notes = {"some": ["thing"]}
    tensors = {id(one): one * 2 for one in [*module.parameters(), *module.buffers()]}
    twin = torch_private.copy_modules(module, tensors)
    given = torch.ones(3, 1, 2)
    twin(given).sum().backward()
    doubled = Parted()
    doubled.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    assert torch.equal(twin(given), doubled(given))
    assert twin.notes is module.notes
    assert twin.inner is twin.again
    assert twin.inner is not module.inner
    assert module.weight.grad is not None
    assert module.inner.weight_ih_l0.grad is not None


def test_a_child_that_is_no_module(way):
    module = nn.Sequential()
    module.child = nn.Linear(1, 1)
    torch_private.put_child(module, "child", "anything")
    assert module.child == "anything"
    if way == "public":
        with pytest.raises(ConfigError, match=r"cannot share 'child' of a ModuleDict .* use strategy ddp"):
            torch_private.put_child(nn.ModuleDict({"child": nn.Linear(1, 1)}), "child", "anything")


def test_calls_are_intercepted_before_hooks_and_no_longer(way):
    module, seen = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: seen.append("hook"))
    given = torch.ones(1, 2)
    expected = module(given)
    own, undo = torch_private.intercept_calls(module, lambda *_: "instead")
    assert module(given) == "instead"
    assert isinstance(module, nn.Linear)
    assert torch.equal(own(given), expected)
    assert seen == ["hook", "hook"]
    undo()
    assert torch.equal(module(given), expected)
    assert type(module) is nn.Linear


def test_classes_of_layers(way):
    norms, dropouts = torch_private.batch_norms(), torch_private.dropouts()
    assert all(isinstance(one, norms) for one in (nn.BatchNorm1d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1)))
    assert all(isinstance(one, dropouts) for one in (nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()))
    assert not isinstance(nn.Linear(1, 1), (*norms, *dropouts))
    norm = nn.BatchNorm2d(2)
    torch_private.check_input(norm, norm.forward, torch.ones(1, 2, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        torch_private.check_input(norm, norm.forward, torch.ones(1, 2, 1))
    assert norm.training
    assert norm.num_batches_tracked == 0


def test_lists_of_tensors(way):
    tensors = [torch.full((2,), float(number)) for number in range(3)]
    torch_private.add_to_each(tensors, [torch.ones(2)] * 3)
    torch_private.multiply_each(tensors, 3.0)
    torch_private.divide_each(tensors, 2.0)
    assert [float(one[0]) for one in tensors] == [1.5, 3.0, 4.5]
    torch_private.copy_to_each(tensors, [torch.ones(2)] * 3)
    found = torch.zeros(())
    torch_private.unscale_each(tensors, found, torch.tensor(0.5))
    assert [float(one[0]) for one in tensors] == [0.5] * 3
    assert found == 0.0
    torch_private.unscale_each([torch.tensor([1.0, float("inf")])], found, torch.tensor(0.5))
    assert found == 1.0


def test_a_step_of_an_optimizer_and_its_scheduler(way):
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


def test_a_backward(way):
    weight, strategy = nn.Parameter(torch.ones(2)), Strategy()
    strategy.plain_backward, strategy.engine = True, torch_private.backward_engine()
    assert (strategy.engine is not None) == (way == "private")
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


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loader(way, workers):
    from legato.trainer.data.loaders import iterate_loader

    loader = make_loader(10, num_workers=workers)
    assert len(list(iterate_loader(iter(loader)))) == len(loader)
    batches = iter(loader)
    assert len(torch_private.loader_workers(batches)) == (workers if way == "private" else 0)
    torch_private.end_loader_workers(batches)


def test_metrics(way):
    metric = torchmetrics.MeanMetric()
    metric(torch.tensor(3.0))
    assert torch_private.updates_of(metric) == 1
    assert torch_private.is_computed(metric) is (way != "private")
    metric.compute()
    assert torch_private.is_computed(metric)
    if way == "private":
        assert torch_private.newest_value_of(metric) == 3.0
        assert set(torch_private.reductions_of(metric)) == {"mean_value", "weight"}
        assert torch_private.set_synced(metric, False) is True
        torch_private.set_updates(metric, 4)
        assert torch_private.updates_of(metric) == 4
    else:
        assert torch_private.newest_value_of(metric) is None
        with pytest.raises(TaskError, match=r"how the states of a MeanMetric are merged .* Log the number"):
            torch_private.reductions_of(metric)


def test_schedulers_within_another_one(way):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))])
    inner = torch.optim.lr_scheduler.ConstantLR(optimizer)
    outer = torch.optim.lr_scheduler.ChainedScheduler([inner])
    assert list(torch_private.schedulers_within(outer)) == ([inner] if way == "private" else [])
    assert list(torch_private.schedulers_within(inner)) == []


def test_events_that_can_be_written_no_more(way, tmp_path):
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("some", 1.0)
    assert torch_private.drop_events(writer, NoExperiment()) == (way == "private")
    writer.close()


def test_a_run_by_public_ways_is_the_same(trainer):
    results = []
    for context in (nullcontext(), public_only()):
        with context:
            task = Tiny()
            trainer(max_epochs=2).fit(task, make_loader(18))
            results.append(flat(task))
    assert torch.equal(*results)


# --- nobody else ------------------------------------------------------------------------------------------------------
PUBLIC = {"_exit", "_getframe", "_current_frames", "_fields", "_extra_state"}
"""Documented, for all that their names say."""

MODULES = {"_modules", "_parameters", "_buffers"}
"""Are torch's, but in a file whose class has such an attribute of its own."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names(trees):
    """The private names that Legato's own classes and modules give."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # an attribute of a class
                found.add(node.target.id)
            elif isinstance(node, ast.keyword) and node.arg:  # self.__dict__.update(_name=...)
                found.add(node.arg)
    return found


def borrowed(tree, own):
    """Yield the private names of others that a file reads, writes or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            names = [*(getattr(node, "module", "") or "").split("."), *(alias.name for alias in node.names)]
            if any(is_private(part) for name in names for part in name.split(".")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own:
                yield node.lineno, ast.unparse(node)


@pytest.mark.slow
def test_private_names_of_others_are_in_one_file():
    folders = ("trainer", "callbacks", "tasks", "configs", "compat")
    files = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = own_names([tree for path, tree in trees.items() if path.name != "torch_private.py"]) - MODULES
    found = {
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path, tree in trees.items()
        if path.name != "torch_private.py"
        for line, text in borrowed(tree, own | own_names([tree]))
    }
    assert found == set(), "use a function of base/torch_private.py, with a public way beside it"
    words = r"torch\._C\b|\._call_impl|_set_pg_timeout|_next_data|_get_fsdp_state|_module_state_mapping|_unscale_grads_"
    named = [path for path in files if re.search(words, path.read_text())]
    assert [path.name for path in named] == ["torch_private.py"]
