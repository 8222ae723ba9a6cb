"""Large files of a checkpoint: past the page cache, hashed and written by two threads beside each other."""

import fcntl
import hashlib
import os
import resource
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints.background import Writer
from legato.trainer.checkpoints.format import HashedFile, read_verified, write_tensors
from legato.trainer.runs import store

pytestmark = pytest.mark.slow

SIZE = (64 << 20) + 12_345
"""No multiple of a page, nor of a block."""


@pytest.fixture
def writes(monkeypatch):
    """Bytes of each write, and whether it passed by the page cache."""
    real, found = os.write, []

    def write(descriptor, data):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        count = real(descriptor, data)
        if count > 4096:
            found.append((count, direct))
        return count

    monkeypatch.setattr(os, "write", write)
    return found


def takes_direct(folder):
    """Return whether the file system of a folder writes past the page cache."""
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        (folder / "probe").unlink(missing_ok=True)
    return True


def test_a_large_file_passes_by_the_page_cache_but_for_its_end(tmp_path, writes):
    tensors = {"a": torch.arange(SIZE // 8), "b": torch.arange(7, dtype=torch.uint8)}
    written = write_tensors(tmp_path / "large", tensors)
    found = load_file(tmp_path / "large")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert read_verified(tmp_path / "large", written).keys() == tensors.keys()
    assert sum(count for count, _ in writes) > 0.99 * SIZE
    if takes_direct(tmp_path):
        assert [direct for _, direct in writes] == [True] * (len(writes) - 1) + [False]
    writes.clear()
    write_tensors(tmp_path / "small", {"a": tensors["a"][:9999]})
    assert [direct for _, direct in writes] == [False]


@pytest.mark.parametrize("folder", [None, "/dev/shm"], ids=["disk", "memory"])
def test_pieces_of_any_size_are_hashed_in_order(tmp_path, folder):
    path = tmp_path / "pieces" if folder is None else type(tmp_path)(folder) / f"legato-pieces-{os.getpid()}"
    data = torch.randint(256, (SIZE,), dtype=torch.uint8).numpy().tobytes()
    ends = [0, 1, 4097, 9 << 20, 20 << 20, (20 << 20) + 3, SIZE]
    try:
        with HashedFile(path, SIZE) as file:
            for start, end in pairwise(ends):
                file.write(data[start:end])
        assert path.read_bytes() == data
    finally:
        path.unlink()
    assert file.sum == (SIZE, hashlib.sha256(data).hexdigest())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the whole process")
def test_only_a_background_save_gives_way_to_training(tmp_path, monkeypatch):
    real, found = os.write, list[int]()

    def write(descriptor, data):
        if len(data) > 4096:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    own, contents = os.getpriority(os.PRIO_PROCESS, 0), {"state_dict": {"a": torch.zeros(SIZE // 4)}}
    store.write(tmp_path / "step-00000001", contents)
    assert set(found) == {own}
    found.clear()
    writer = Writer()
    writer.save(tmp_path / "step-00000002", contents)
    writer.close()
    assert found.count(min(own + 15, 19)) == SIZE // (8 << 20)  # but for the rest, smaller than a block
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_write_that_fails_ends_the_save(tmp_path):
    store.write(tmp_path / "step-00000001", {"state_dict": {"a": torch.ones(3)}})
    before, threads = resource.getrlimit(resource.RLIMIT_FSIZE), threading.active_count()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            store.write(tmp_path / "step-00000001", {"state_dict": {"a": torch.zeros(SIZE // 4)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(store.read_checkpoint(tmp_path / "step-00000001")["state_dict"]["a"], torch.ones(3))
    assert threading.active_count() == threads


ENDS_AT_ONCE = """
import sys
from pathlib import Path
import torch
from legato.trainer.checkpoints.background import Writer
Writer().save(Path(sys.argv[1]), {"state_dict": {"a": torch.ones(20 << 20)}})
raise SystemExit(3)
"""


def test_a_program_that_ends_finishes_a_large_save(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, tmp_path / "step-00000001"], check=False)
    assert done.returncode == 3
    assert store.read_checkpoint(tmp_path / "step-00000001")["state_dict"]["a"].sum() == 20 << 20
