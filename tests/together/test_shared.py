"""For each thing that features share: its users two at a time, and with a failure in the middle."""

import signal
import warnings

import pytest
import torch
from together.pairs import Pair, Stage, load
from together.play import fit
from together.scene import Fault, Scene, make_trainer

pytestmark = pytest.mark.slow


SHARED = {
    "process group": [
        ("fsdp", "second async", "failing save"),
        ("zero1", "async save", "sigterm"),
        ("ddp", "metrics", "failing validation hook"),
    ],
    "checkpoint folder": [
        ("save by steps", "saves itself async", "failing save"),
        ("async save", "second async", "failing hook"),
    ],
    "run directory": [("second log", "fit before", "failing logger"), ("save all", "counts", "sigint")],
    "signal handlers": [("validates inside", "timer", "sigterm"), ("persistent workers", "max time", "sigint")],
    "generators": [
        ("draws", "noise", "resume"),
        ("reads", "noise", "failing data"),
        ("validates inside", "noise", "sigterm in validation"),
    ],
    "epoch sums": [
        ("hooks log", "metrics", "resume"),
        ("hooks log", "val interval", "sigterm in validation"),
        ("metrics", "accumulation", "failing epoch hook"),
    ],
    "loader": [("reads", "persistent workers", "failing data"), ("reads", "stream", "failing hook")],
    "streams": [("says", "bar and summary", "failing validation hook")],
    "trainer": [("fit before", "evaluate after", "failing epoch hook")],
    "settings of torch": [("deterministic", "anomaly", "failing finalize")],
    "shared memory": [("workers", "several loaders", "failing data")],
}
TRIPLES = [
    pytest.param(names, id=f"{subject}: {', '.join(names)}") for subject, every in SHARED.items() for names in every
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    load()
    return Stage(tmp_path_factory.mktemp("stage"))


@pytest.mark.parametrize("names", TRIPLES)
def test_two_users_and_a_failure_in_the_middle(stage, names):
    first, second, failure = names
    for pair in (Pair(first, second, 5), Pair(first, second, 7, failure)):
        problems = stage.check(pair)
        assert not problems, "\n".join([str(pair), *problems])


@pytest.mark.parametrize("kind", ["hook", "finalize", "sigterm", "sigint", "data", "save", ""])
def test_what_the_caller_has_set_is_left_alone(kind, tmp_path):
    """`fit` of play.py compares; here the caller's settings are none of the defaults."""
    load()
    scene = Scene(arguments={"threads": 1, "deterministic": True, "detect_anomaly": True, "save_code": True})
    trainer = make_trainer(scene, tmp_path, [fault := Fault(kind, 6, tmp_path)] if kind else [])
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a warning of the caller's")
            fit(trainer, scene, [fault] if kind else [])
        ended_by = None
    except BaseException as error:
        ended_by = error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    assert fault.explains(ended_by) if kind else ended_by is None, ended_by
