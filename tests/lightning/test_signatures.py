"""Signatures of Lightning's hooks and methods equal those of compatibility mode, parameter by parameter."""

import functools
import importlib
import inspect
import warnings

import pytest
import torch

import legato.compat.lightning as L
from legato.base.errors import ConfigError
from legato.compat.lightning.placeholders import Placeholder

BASES = ("Callback", "LightningModule", "LightningDataModule", "loggers.Logger")


@pytest.fixture(scope="module")
def real():
    """Return the real package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("lightning.pytorch.loggers")
        return importlib.import_module("lightning.pytorch")


def both(real, path):
    module, _, name = path.rpartition(".")
    ours = importlib.import_module(f"legato.compat.lightning.pytorch{module and '.' + module}")
    return getattr(ours, name), getattr(importlib.import_module(f"{real.__name__}{module and '.' + module}"), name)


def parameters(method):
    """Return names, kinds and defaults, without the class parameter of class methods."""
    parameters = inspect.signature(method).parameters.values()
    return [(item.name, item.kind, item.default) for item in parameters if item.name != "cls"]


def methods(theirs):
    """Return the public methods that Lightning defines, by name, from the class."""
    for name, _ in inspect.getmembers(theirs, callable):
        method = getattr(theirs, name)
        if not name.startswith("_") and str(getattr(method, "__module__", "")).startswith("lightning."):
            yield name, method


@pytest.mark.parametrize("path", BASES)
def test_base_classes_have_lightnings_signatures(real, path):
    ours, theirs = both(real, path)
    compared = dict(methods(theirs))
    assert len(compared) > 5
    differing = {
        name: (parameters(method), parameters(getattr(ours, name)))
        for name, method in compared.items()
        if parameters(method) != parameters(getattr(ours, name))
    }
    assert differing == {}


def test_callbacks_of_the_package_take_what_lightnings_take(real):
    """If Lightning's hook takes `*args`, it is called with the parameters of the base class."""
    compared = 0
    for name in importlib.import_module(f"{real.__name__}.callbacks").__all__:
        ours, theirs = both(real, f"callbacks.{name}")
        if isinstance(ours, Placeholder):
            continue
        for hook in (hook for hook in dir(L.Callback) if hook.startswith("on_") or hook in ("setup", "teardown")):
            if not hasattr(theirs, hook):
                continue
            named = [item for item in inspect.signature(getattr(theirs, hook)).parameters.values() if item.kind < 2]
            if len(named) < len(inspect.signature(getattr(theirs, hook)).parameters):
                named = list(inspect.signature(getattr(real.Callback, hook)).parameters.values())
            inspect.signature(getattr(ours, hook)).bind(**{parameter.name: None for parameter in named})
            compared += 1
    assert compared > 500


class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


OF_MODULES = {f"on_{word}_model_{mode}": 1 for word in ("validation", "test", "predict") for mode in ("eval", "train")}
"""Hooks of every module, with the number of their calls."""


def test_a_run_calls_a_wrapped_hook_and_none_that_does_nothing():
    def counted(hook):
        @functools.wraps(hook)
        def call(self, trainer, pl_module):
            called.append(hook.__name__)
            return hook(self, trainer, pl_module)

        return call

    class Counts(L.Callback):
        on_fit_end = counted(L.Callback.on_fit_end)

    class Looks(L.Callback):
        def on_train_end(self, trainer, pl_module):
            hooks = trainer.current_run.hooks
            seen.update({name: len(calls) for name, calls in hooks.items() if calls})

    called, seen = [], {}
    Counts().on_fit_end(trainer=None, pl_module=None)
    assert called == ["on_fit_end"]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(**quiet, max_steps=1, enable_model_summary=False, callbacks=[Counts(), Looks()])
    trainer.fit(Small(), torch.utils.data.DataLoader(torch.ones(2, 2)))
    assert called == ["on_fit_end"] * 2
    # hooks of the base class, which are wrapped only for Lightning's parameter names, are not called
    first = {"setup": 1, "on_fit_start": 2, "on_sanity_check_start": 1, "on_sanity_check_end": 1, "on_train_start": 1}
    assert seen == {**first, "on_train_epoch_start": 1, "on_train_end": 1, "on_fit_end": 1, **OF_MODULES}


def test_an_older_name_of_configure_model():
    class Sharded(L.LightningModule):
        def configure_sharded_model(self):
            self.layer = torch.nn.Linear(2, 1)

    module = Sharded()
    module.configure_model()
    assert module.layer.weight.shape == (1, 2)
    with pytest.raises(ConfigError, match=r"also defines configure_model. Remove configure_sharded_model"):
        type("Both", (Sharded,), {"configure_model": lambda self: None, "configure_sharded_model": lambda self: None})
