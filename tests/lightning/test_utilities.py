"""Utilities of Lightning compatibility mode, compared with Lightning's."""

import importlib
import random
import subprocess
import sys
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import legato.compat.lightning.pytorch.utilities as ours
from legato.base.errors import ConfigError
from legato.compat.lightning.placeholders import Placeholder
from legato.compat.lightning.pytorch import LightningModule, seed_everything


@pytest.fixture(scope="module", autouse=True)
def no_warnings_at_the_import_of_lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("lightning.pytorch.cli")


def real(path):
    """Return a name of the real package."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"lightning.{module}"), name)


def both(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"legato.compat.lightning.{module}"), name), real(path)


Pair = namedtuple("Pair", "a b")


@dataclass
class Batch:
    x: torch.Tensor
    name: str


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(10, 256)
        self.net = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x)


def test_seeding_returns_and_keeps_the_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert seed_everything(None, verbose=False) == 17
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    assert real("pytorch.seed_everything")(17, verbose=False) == 17
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    assert seed_everything(5, workers=True, verbose=False) == 5
    from legato.base.environment import get_variable
    from legato.compat.lightning.fabric.utilities.seed import reset_seed

    assert (get_variable("PL_GLOBAL_SEED"), get_variable("PL_SEED_WORKERS")) == ("5", "1")
    first = random.random()
    reset_seed()
    assert random.random() == first
    monkeypatch.delenv("PL_GLOBAL_SEED")
    with pytest.warns(UserWarning, match="No seed found, seed set to 0"):
        assert seed_everything() == 0
    with pytest.raises(ValueError, match="not in bounds"):
        seed_everything(-1)


def test_isolated_random_numbers():
    from legato.compat.lightning.pytorch.utilities.seed import isolate_rng

    torch.manual_seed(1)
    with isolate_rng():
        inside = torch.rand(1), random.random(), np.random.rand()
    assert (torch.rand(1), random.random(), np.random.rand()) == inside


def test_rank_zero_only_has_a_rank_that_can_be_set():
    only = ours.rank_zero_only
    assert only.rank == 0
    assert cloudpickle.loads(cloudpickle.dumps(only)) is only

    @only
    def double(x):
        return 2 * x

    assert (double(2), double.__name__) == (4, "double")
    try:
        only.rank = 1
        assert double(2) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours.rank_zero_warn("not on this rank")
    finally:
        only.rank = 0
    assert double(2) == 4


def test_a_warning_names_the_line_that_it_is_about():
    def check():
        ours.rank_zero_warn("careful")

    def old():
        ours.rank_zero_deprecation("late")

    with pytest.warns(UserWarning, match="careful") as caught:
        check()
    assert caught[0].filename == __file__
    from legato.compat.lightning.pytorch.utilities.rank_zero import LightningDeprecationWarning, WarningCache

    with pytest.warns(LightningDeprecationWarning, match="late"):
        old()
    cache = WarningCache()
    with pytest.warns(UserWarning, match="once") as caught:
        [cache.warn("once") for _ in range(2)]
    assert len(caught) == 1


def test_misconfiguration_catches_our_own_errors():
    from legato.compat.lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException):
        raise ConfigError("no")
    with pytest.raises(Exception, match="theirs"):
        raise MisconfigurationException("theirs")


def test_collections_on_a_device():
    our, their = both("fabric.utilities.apply_func.move_data_to_device")
    data = OrderedDict(a=Pair(torch.ones(2), "word"), b=[torch.zeros(1), {"c": 3.5}], d=(True, 2, np.ones(2)))
    actual, expected = our(data, "cpu"), their(data, torch.device("cpu"))
    assert repr(actual) == repr(expected)
    assert our(Batch(torch.ones(1), "n"), "cpu").name == "n"


def test_apply_to_collection():
    our, their = both("fabric.utilities.apply_func.apply_to_collection")
    data = {"a": [1, 2.5, None], "b": Pair(3, "x"), "c": (4, {"d": 5})}
    for options in ({}, {"wrong_dtype": bool}, {"include_none": False}):
        assert our(data, int, lambda x: x * 2 or None, **options) == their(
            data, int, lambda x: x * 2 or None, **options
        )


def test_gradient_norms():
    model = Net()
    model(torch.randn(4, 256)).square().mean().backward()
    our, their = both("pytorch.utilities.grad_norm")
    for kind in (1, 2, "inf"):
        actual, expected = our(model, kind), their(model, kind)
        assert actual.keys() == expected.keys()
        assert all(torch.allclose(actual[name], expected[name]) for name in actual)
    with pytest.raises(ValueError, match="positive"):
        our(model, 0)
    assert our(nn.Linear(1, 1), 2) == {}


def test_a_summary_is_the_same_table():
    our, their = both("pytorch.utilities.model_summary.ModelSummary")

    model = Net()
    for depth in (-1, 0, 1, 2):
        actual = our(model, max_depth=depth)

        class Theirs(real("pytorch.LightningModule")):
            def forward(self, x):
                return self.net(x)

        theirs = Theirs()
        theirs.example_input_array, theirs.net, theirs.scale = model.example_input_array, model.net, model.scale
        Theirs.__name__ = "Net"
        expected = their(theirs, max_depth=depth)
        assert str(actual) == str(expected)
        names = ("layer_names", "in_sizes", "out_sizes", "param_nums", "total_parameters", "trainable_parameters")
        for name in (*names, "total_flops", "total_training_modes", "model_size", "total_layer_params"):
            assert getattr(actual, name) == getattr(expected, name), name
    with pytest.raises(ValueError, match="max_depth"):
        our(model, max_depth=-2)
    assert model.training


def test_readable_counts():
    our, their = both("pytorch.utilities.model_summary.get_human_readable_count")
    for count in (0, 1, 123, 999, 1000, 1234, 99_999, 123_456, 2_000_000, 3 * 10**9, 4 * 10**14, 5 * 10**15):
        assert our(count) == their(count)


def test_dicts_with_attributes():
    our, their = both("pytorch.utilities.AttributeDict")
    actual, expected = our({"a": 1}), their({"a": 1})
    for item in (actual, expected):
        item.update({"my-key": 3.14})
        item.b = 2
    assert (repr(actual), actual) == (repr(expected), dict(expected))
    with pytest.raises(AttributeError, match="c"):
        _ = actual.c
    del actual.b
    assert "b" not in actual


def test_enumerations_compare_without_case():
    algorithm = ours.GradClipAlgorithmType
    assert algorithm.NORM == "NORM"
    assert algorithm("value") is algorithm.VALUE
    assert {algorithm.NORM: 1}["norm"] == 1
    assert algorithm.from_str("Value") is algorithm.VALUE
    with pytest.raises(ValueError, match="Invalid match"):
        algorithm.from_str("other")


def test_overridden_methods():
    from legato.compat.lightning.pytorch import Callback
    from legato.compat.lightning.pytorch.utilities.model_helpers import is_overridden

    class Mine(Callback):
        def on_fit_start(self, trainer, pl_module):
            pass

    assert is_overridden("forward", Net())
    assert not is_overridden("training_step", Net())
    assert is_overridden("on_fit_start", Mine())
    assert not is_overridden("on_fit_end", Mine())
    assert not is_overridden("x", None)
    with pytest.raises(ValueError, match="parent"):
        is_overridden("x", 3)


def test_hyperparameters_in_files(tmp_path):
    from legato.compat.lightning.pytorch.core import saving

    values = {"lr": 0.1, "layers": [1, 2], "kind": nn.Linear, "name": "x"}
    saving.save_hparams_to_yaml(tmp_path / "h.yaml", values)
    assert {**saving.load_hparams_from_yaml(tmp_path / "h.yaml"), "kind": 0} == {**values, "kind": 0}
    assert saving.load_hparams_from_yaml(tmp_path / "none") == {}
    with pytest.raises(RuntimeError, match="Missing folder"):
        saving.save_hparams_to_yaml(tmp_path / "no" / "x", values)
    hparams = {"a": {"b": 1}, "c": 2}
    saving.update_hparams(hparams, {"a": {"d": 3}, "c": 4})
    assert hparams == {"a": {"b": 1, "d": 3}, "c": 4}


def test_memory():
    from legato.compat.lightning.pytorch.utilities import memory

    assert memory.is_oom_error(RuntimeError("CUDA error: out of memory"))
    assert memory.is_oom_error(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1"))
    assert not memory.is_oom_error(ValueError("CUDA out of memory"))
    x = torch.ones(1, requires_grad=True) * 2
    assert not memory.recursive_detach({"a": [x]})["a"][0].requires_grad
    memory.garbage_collection_cuda()


def test_operations_are_counted():
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    our, their = both("pytorch.utilities.measure_flops")
    for loss in (None, torch.sum):
        assert our(model, lambda: model(x), loss) == their(model, lambda: model(x), loss) > 0


def test_a_module_knows_its_device_and_dtype():
    our, their = both("fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin")
    for dtype in (torch.float32, torch.float64):
        modules = [type("Net", (kind,), {})() for kind in (our, their)]
        for module in modules:
            module.layer = nn.Linear(1, 1)
            module.to(dtype)
        assert (modules[0].device, modules[0].dtype) == (modules[1].device, modules[1].dtype)


ALIASES = """
import legato.compat.lightning
legato.compat.lightning.install()
from lightning.fabric.utilities.types import _PATH, _MAP_LOCATION_TYPE
from lightning_fabric.utilities.types import _DEVICE
from lightning.pytorch.utilities.types import _EVALUATE_OUTPUT, STEP_OUTPUT, OptimizerLRScheduler
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message
import pytorch_lightning as pl
from pytorch_lightning import *
assert pl.__version__ == "2.6.6" and not hasattr(pl, "__nothing__")
pl.utilities.rank_zero_info("said")
from lightning_utilities.core.rank_zero import rank_prefixed_message, rank_zero_only
assert rank_zero_only.rank == 0
"""


@pytest.mark.slow
def test_names_that_public_code_imports():
    done = subprocess.run([sys.executable, "-W", "error", "-c", ALIASES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


NO_SIGNATURE = ("MisconfigurationException", "DistributedDataParallel", "LRSchedulerConfig")


def test_arguments_are_lightnings():
    import inspect

    differ = []
    paths = [path for path in sys.modules if path.startswith(("lightning.pytorch.utilities", "lightning.fabric.util"))]
    for module in [path.removeprefix("lightning.") for path in [*paths, "lightning.pytorch.core.saving"]]:
        for name, value in vars(importlib.import_module(f"lightning.{module}")).items():
            if name not in ours.__all__ or isinstance(value, ModuleType) or name in NO_SIGNATURE:
                continue
            try:
                our, their = both(f"{module}.{name}")
                first, second = (list(inspect.signature(function).parameters) for function in (our, their))
            except (TypeError, ValueError, AttributeError, ModuleNotFoundError):
                continue  # not a function, a placeholder, or a re-export of Lightning
            if first != second and first != ["args", "kwargs"] and not isinstance(our, Placeholder):
                differ.append((f"{module}.{name}", first, second))
    assert len(paths) > 20
    assert differ == []
