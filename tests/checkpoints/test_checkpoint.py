"""Checkpoints: search in folders, and background saves of the state at the time of the call."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import background, commit, find, reading, storage


def example(step: int = 0) -> dict[str, object]:
    """Return contents of every kind, different for each step."""
    return {
        "state_dict": {"layer.weight": torch.full((3, 4), float(step)), "layer.bias": torch.arange(3.0)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3, 4)}}}],
        "global_step": step,
        "rng": {"python": (3, (1, 2), None), "bits": 2**127 + 1},
    }


# ---------------------------------------------------------------------------------------------- places


def test_places_are_found_in_the_order_of_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (5, 100, 99_999_999, 1_000_000_000):
        commit.write(root / find.directory_name(step), example(step))
    (root / "step-12").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "step-00000999").symlink_to(root / "step-00000005")
    names = ["step-00000005", "step-00000100", "step-99999999", "step-1000000000"]
    assert [path.name for path in find.checkpoints_in(root)] == names
    for path in (tmp_path / "run", root, root / names[-1]):
        assert find.resolve(path) == root / names[-1]
    (root / names[-1] / "state.json").unlink()
    (root / names[-2] / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, logger="legato"):
        assert find.newest_complete(root) == root / "step-00000100"
    first, second = caplog.messages
    assert "step-1000000000" in first
    assert "state.json is missing" in first
    assert "step-99999999" in second
    assert "manifest.json is missing" in second
    assert [path.name for path in find.checkpoints_in(root)] == [*names[:2], names[-1]]


def test_resolve_tells_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint at .*manifest.json.*step-00001200.*checkpoints/"
    ):
        find.resolve(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; a Legato checkpoint is a directory"):
        find.resolve(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        reading.read_checkpoint(tmp_path / "gone")
    assert find.newest_complete(tmp_path / "gone") is None
    assert find.checkpoints_in(tmp_path / "gone") == []
    storage.folder_at(tmp_path / "gone").sweep()


def test_only_checkpoints_are_removed_or_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "results"
    precious.mkdir()
    (precious / "paper.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"was not removed: .*manifest\.json is missing"):
        storage.remove(precious)
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it will not be replaced"):
        commit.write(precious, example())
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it will not be replaced"):
        commit.write(precious / "paper.tex", example())
    target, link = tmp_path / "step-00000001", tmp_path / "step-00000002"
    commit.write(target, example())
    link.symlink_to(target)
    for refuse in (storage.remove, lambda path: commit.write(path, example())):
        with pytest.raises(CheckpointError):
            refuse(link)
    assert (precious / "paper.tex").read_text() == "years of work"
    find.verify(target)
    storage.remove(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "step-00000002"]


def test_sweep_touches_nothing_but_its_own_rests(tmp_path: Path) -> None:
    for name in (".step-00000001.partial", ".step-00000002.partial", ".step-00000003.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"torn")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (tmp_path / ".step-00000004.partial").symlink_to(outside)
    for name in (".mine.partial", ".step-1.partial", "step-00000001.partial", ".git"):
        (tmp_path / name).mkdir()
    storage.folder_at(tmp_path).sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".git", ".mine.partial", ".step-1.partial", "outside", "step-00000001.partial")
    ]
    assert (outside / "file").read_text() == "kept"


# ---------------------------------------------------------------------------------------------- background


def test_background_save_is_a_snapshot_and_reuses_its_memory(tmp_path: Path) -> None:
    weight, writer = torch.zeros(300_000), background.Writer()
    seen = []
    for step in range(4):
        weight.fill_(step)
        tied = weight.view(1000, 300)
        writer.save(tmp_path / find.directory_name(step), {"state_dict": {"a": tied, "b": tied}, "list": [step]})
        weight.fill_(-1)  # training goes on while the thread writes
        (memory,) = writer.memory.values()  # one copy, also of what has two names
        assert memory.nbytes == weight.nbytes
        seen.append(memory.data_ptr())
    writer.wait()
    assert len(set(seen)) == 1
    for step, path in enumerate(find.checkpoints_in(tmp_path)):
        back = reading.read_checkpoint(path)
        assert back["list"] == [step]
        assert torch.equal(back["state_dict"]["a"], torch.full((1000, 300), float(step)))
        assert torch.equal(back["state_dict"]["b"], back["state_dict"]["a"])


def test_background_memory_grows_and_keeps_views_and_kinds(tmp_path: Path) -> None:
    writer = background.Writer()
    for step, size in enumerate((1, 1000, 10)):
        contents = {
            "state_dict": {"t": torch.rand(size, 3).t(), "half": torch.rand(size).bfloat16(), "n": torch.empty(0)}
        }
        contents["numbers"] = {"c": torch.rand(size, dtype=torch.complex64), "array": np.arange(size)}
        writer.save(tmp_path / str(step), contents)
        writer.wait()
        back = reading.read_checkpoint(tmp_path / str(step))
        for file in contents:
            assert all(
                torch.equal(torch.as_tensor(back[file][name]), torch.as_tensor(value))
                for name, value in contents[file].items()
            )
    writer.wait()


def test_background_failure_surfaces_with_its_cause_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, started, looked, write = background.Writer(), threading.Event(), threading.Event(), os.write

    def slow(descriptor: int, data: bytes) -> int:
        if threading.current_thread() is threading.main_thread():
            return write(descriptor, data)
        started.set()
        looked.wait(60)
        raise OSError(5, "the disk came loose")

    monkeypatch.setattr(os, "write", slow)
    writer.save(tmp_path / "one", example())
    assert started.wait(60)
    writer.check()  # in flight is no failure
    looked.set()
    with pytest.raises(CheckpointError, match=r"Saving .*one in the background failed.*the disk came loose") as caught:
        writer.save(tmp_path / "two", example())
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert not any(tmp_path.iterdir())
    writer.check()
    monkeypatch.undo()
    writer.save(tmp_path / "two", example(7))
    writer.wait()
    assert reading.read_checkpoint(tmp_path / "two")["global_step"] == 7


def test_what_cannot_be_stored_is_refused_before_the_thread_starts(tmp_path: Path) -> None:
    writer = background.Writer()
    with pytest.raises(CheckpointError, match="a is a set_iterator"):
        writer.save(tmp_path / "one", {"a": iter(set())})
    writer.wait()


@pytest.mark.slow
def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    program = (
        "import os, sys, time, torch\nfrom pathlib import Path\nfrom legato.trainer.checkpoints import background\n"
        "write = os.write\nos.write = lambda *call: (time.sleep(0.1), write(*call))[1]\n"
        "background.Writer().save(Path(sys.argv[1]), {'a': torch.ones(9)})\nraise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "one")], timeout=120).returncode == 3
    assert torch.equal(reading.read_checkpoint(tmp_path / "one")["a"], torch.ones(9))


MEMORY = """
    import re, sys
    from pathlib import Path
    import torch
    from legato.trainer.checkpoints import background, commit, find, reading
    # not ru_maxrss: a new program inherits that of the process that started it
    most = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    state = {"state_dict": {str(place): torch.ones(1_000_000) for place in range(40)}, "ids": torch.arange(5_000_000)}
    writer, root = background.Writer(), Path(sys.argv[1])
    commit.write(root / "warm", {"a": torch.ones(3)})
    start = most()
    commit.write(root / "once", state)
    at_once = most() - start
    for step in range(3):
        writer.save(root / str(step), state)
    writer.wait()
    print(at_once / 200e6, (most() - start) / 200e6)
"""


@pytest.mark.slow
def test_host_memory_is_no_copy_at_once_and_one_in_the_background(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    at_once, behind = map(float, done.stdout.split())
    assert at_once < 0.1, done.stdout
    assert 0.9 < behind < 1.1, done.stdout


def test_a_replacement_that_died_between_its_names_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / find.directory_name(3)
    commit.write(path, example(3))
    aside = path.rename(tmp_path / f".{path.name}.replaced")
    assert find.resolve(path) == find.resolve(tmp_path) == aside
    assert find.checkpoints_in(tmp_path) == []
    storage.folder_at(tmp_path).sweep()
    assert find.checkpoints_in(tmp_path) == [path]
