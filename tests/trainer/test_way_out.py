"""Runs that fail: their changes to the process are reverted, and the caller gets the first error."""

import functools

import pytest
import way_out
from way_out import LOGGER_POINTS, ON_ALL_RANKS, POINTS, differences, run, say, state_of_process

from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.slow


AFTER_AN_ERROR = ("teardown", "on_exception", "finalize")
"""Hooks that are called also when the run has failed."""


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """What the first run imports (torch's compiler, for one) has set filters of warnings and variables before."""
    assert run(tmp_path_factory.mktemp("first"), "nothing", fails=False) is None


def check(point, fails, text, notes, changed):
    """The error of the user comes first, else the injected one; the other one is a note where its hook was called."""
    assert not changed
    name = point.rpartition(".")[2]
    if not fails:
        if name == "on_exception":
            assert text == ""
        elif point == "background save":
            assert text.startswith("CheckpointError")
            assert "is not a checkpoint" in text
        else:
            assert text == "Injected: injected"
    elif text != "Users: the user's":  # what failed before the user's step did
        assert text == "Injected: injected" or point == "background save"
        assert not any("Users" in note for note in notes)
        assert name not in AFTER_AN_ERROR
    elif name in AFTER_AN_ERROR:
        assert sum("Injected: injected" in note and name in note for note in notes) == 1
    assert len(notes) <= 1


@pytest.mark.parametrize("fails", [False, True], ids=["alone", "after the user's error"])
@pytest.mark.parametrize("point", [*POINTS, *LOGGER_POINTS])
def test_one_process(tmp_path, point, fails):
    before = state_of_process()
    error = run(tmp_path, point, fails)
    check(point, fails, *say(error), differences(before, state_of_process()))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What came of every case on rank 0 of two, which fail alike."""
    return run_workers(functools.partial(way_out.run_all, tmp_path_factory.mktemp("two")), 2)


@pytest.mark.parametrize("fails", [False, True], ids=["alone", "after the user's error"])
@pytest.mark.parametrize("point", ON_ALL_RANKS)
def test_two_processes(two_processes, point, fails):
    check(point, fails, *two_processes[point, fails])


@pytest.mark.parametrize(
    ("point", "fails"), [("logger.log_metrics", False), ("logger.finalize", False), ("logger.finalize", True)]
)
def test_what_only_rank_0_has_fails(tmp_path, point, fails):
    before = state_of_process()
    error = run(tmp_path, point, fails, (0,), strategy="ddp", devices=2)
    text, notes = say(error)
    assert text == ("Users: the user's" if fails else "Injected: injected")
    assert not differences(before, state_of_process())
    if fails:
        assert any("Injected: injected" in note for note in notes)
