"""What every test starts from: one thread, and nothing of an earlier test."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.util import Finalize, get_temp_dir

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes that tests start

import pytest
import torch
from config_folder import config_folder as config_folder
from tiny import Memory, Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import LegatoError
from legato.trainer.processes import launch

torch.set_num_threads(1)
# What workers import of tests: once, in the server they are forked from, instead of in each of them. Of torchmetrics
# only the slow parts: when it is imported, it looks up which rank it is in.
launch.PRELOAD += [
    "legato.trainer.setup.start",
    "matplotlib.pyplot",
    "pytest",
    "scipy.signal",
    "tensorboard.summary.writer",
]
launch.PRELOAD += ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint", "yaml"]
launch.PRELOAD += ["torch._dynamo"]  # for tests that compile, or are bitwise
launch.PRELOAD += ["hypothesis", "packaging.requirements", "tensorboard.backend.event_processing.event_accumulator"]
launch.PRELOAD += ["torch.distributed.optim"]  # compiles ten optimizers


FIRST = ("test_preemption", "test_pages", "test_sharded_checkpoints", "test_bitwise", "test_two_nodes", "test_sweep")
FIRST += ("test_tune", "test_tuning", "test_typing", "test_new", "test_stored_runs")
FIRST += ("test_unanswered_signals",)  # it waits for most of its time, as test_hangs does: not both at once
"""Files that take a minute, though they have few tests."""


def pytest_configure(config):
    """Leave to `pytest_collection_modifyitems` which files come first; hear Ctrl-C, which tests send, in any shell."""
    # pytest-xdist's order is by number of tests
    config.option.loadscopereorder = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `pytest &` of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, so that at the end no process waits for another."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.stem not in FIRST, -slow[item.path]))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Freeze what collecting the tests has made: a million objects, 0.6 s of each full collection that follows."""
    gc.disable()  # until then: next to nothing of it is garbage
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Collect what thousands of tests left once; pytest does so five times, a second each."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Free all at exit again where triton is loaded, torch's CUDA builds: it prints a page on what is left frozen."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory):
    """Remove what torchrun and killed processes leave in the folder for temporary files, too."""
    tmp_path_factory.getbasetemp()  # made now, and not in the folder below
    folder = tempfile.mkdtemp(prefix="legato-")  # not below pytest's: a socket's path has 107 bytes at most
    Finalize(None, shutil.rmtree, [folder, True], exitpriority=-200)  # multiprocessing removes its own at -100
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        get_temp_dir()  # multiprocessing keeps the first one that it makes
        yield


@pytest.fixture
def clock(monkeypatch):
    """Let time pass where this is called with seconds, and nowhere else: so a busy machine does not show in it."""
    now = [1000.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[-1])
    return lambda seconds: now.append(now[-1] + seconds)


@pytest.fixture
def trainer(tmp_path):
    """Make trainers that write below tmp_path, and by default nothing at all."""

    def make(**options):
        return make_trainer(tmp_path, **options)

    return make


@pytest.fixture
def play(trainer):
    """Fit a task on 18 samples in batches of 4; return the trainer, with the logger `memory`."""

    def run(task, **options):
        memory = Memory()
        defaults = {"log_every_n_steps": 1, "num_sanity_val_steps": 0}
        made = trainer(logger=memory, **{**defaults, **options})
        made.memory = memory
        validates = type(task).validation_step is not lg.Task.validation_step
        made.fit(task, make_loader(18), make_loader(18) if validates else None)
        return made

    return run


@pytest.fixture
def refused(trainer):
    """Fit, and expect an error before anything was trained; return its message."""

    def run(kind, task, *loaders, stage="fit", **options):
        before = [parameter.detach().clone() for parameter in task.parameters()] if isinstance(task, Tiny) else []
        with pytest.raises(kind) as caught:
            getattr(trainer(**options), stage)(task, *(loaders or (make_loader(),)))
        assert isinstance(caught.value, LegatoError)
        assert all(map(torch.equal, before, task.parameters())) if before else True
        assert getattr(task, "seen", []) == []
        message = str(caught.value)
        assert len(message.splitlines()) <= 6
        return message

    return run
