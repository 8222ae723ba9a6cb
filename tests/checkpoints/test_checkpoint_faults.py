"""A save or removal that dies or fails at any call loses only itself; real processes are killed."""

import json
import os
import select
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import commit, find, storage

DRIVER = Path(__file__).parents[1].joinpath("checkpoint_driver.py")
SCENARIOS = {  # calls into the file system that each makes, at least
    "first": 25,
    "next": 22,
    "overwrite": 30,
    "remove newest": 8,
    "remove oldest": 8,
    "first, background": 22,
    "next, background": 20,
    "overwrite, background": 28,
    "next, in parts": 28,
    "overwrite, in parts": 36,
    "next, in parts, background": 28,
    "sweep": 13,
    "save after a death": 36,
    "overwrite after a death": 40,
}


@pytest.fixture(scope="module")
def drive() -> Iterator[Callable[..., Any]]:
    """Send a command to the driver, a process that all tests share; only its forks die."""
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(DRIVER)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    driver = subprocess.Popen(command, env={**os.environ, **alone}, **pipes)

    def ask(mode: str, scenario: str, folder: Path) -> Any:
        driver.stdin.write(json.dumps([mode, scenario, str(folder)]) + "\n")
        assert select.select([driver.stdout], [], [], 300)[0], "the driver does not answer"
        result = json.loads(driver.stdout.readline())
        assert result is not None, "see the traceback in what was printed"
        return result

    yield ask
    driver.communicate()
    assert driver.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call(drive: Callable[..., Any], scenario: str, tmp_path: Path) -> None:
    result = drive("die", scenario, tmp_path)
    assert result["wrong"] == []
    assert result["faults"] >= SCENARIOS[scenario]


def test_the_calls_are_more_than_two_hundred() -> None:
    assert sum(SCENARIOS.values()) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["first", "overwrite", "next, background", "next, in parts"])
def test_killed_in_the_middle_of_every_write(drive: Callable[..., Any], scenario: str, tmp_path: Path) -> None:
    result = drive("torn", scenario, tmp_path)
    assert result["wrong"] == []
    assert result["faults"] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_disk_full_or_broken_at_every_call(drive: Callable[..., Any], scenario: str, tmp_path: Path) -> None:
    result = drive("fail", scenario, tmp_path)
    assert result["wrong"] == []
    assert result["faults"] >= SCENARIOS[scenario]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["first", "next", "overwrite", "overwrite, background", "save after a death"])
def test_everything_is_on_the_disk_before_what_builds_on_it(
    drive: Callable[..., Any], scenario: str, tmp_path: Path
) -> None:
    """For a power failure, a name or the commit mark must follow the sync of its contents."""
    unsynced: set[Path] = set()
    manifests = renames = 0
    for call, first, second in drive("record", scenario, tmp_path / "checkpoints"):
        path = Path(first)
        if call in ("create", "mkdir"):
            unsynced |= {path, path.parent} if call == "create" else {path.parent}
        elif call == "write":
            unsynced.add(path)
        elif call == "fsync":
            unsynced.discard(path)
        elif call == "rename":
            renames += 1
            below = {entry for entry in unsynced if path in (entry, *entry.parents)}
            assert not below, f"{first} got its name before {below} was synced"
            unsynced |= {path.parent, Path(second).parent}
        elif call == "unlink" and not path.parent.name.endswith(".partial"):
            assert path.parent.parent not in unsynced, f"{first} was deleted before its new name was synced"
        if call == "create" and path.name == "manifest.json":
            manifests += 1
            assert unsynced <= {path, path.parent, path.parent.parent}, f"the commit mark before {unsynced} was synced"
    assert not unsynced
    assert manifests == 1
    assert renames == 1 + ("overwrite" in scenario) + ("death" in scenario)


def test_a_disk_without_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"needs 1,000 PB in {tmp_path}, but only .*B is free"):
        storage.free_space_check(tmp_path, 10**18)
    storage.free_space_check(tmp_path, 1)
    huge = torch.zeros(1).expand(2**58)
    with pytest.raises(CheckpointError, match="Nothing was written"):
        commit.write(tmp_path / find.directory_name(1), {"huge": huge})
    assert not any(tmp_path.iterdir())


FULL_DISK = """
    import re
    import sys
    from pathlib import Path
    import torch
    from legato.trainer.checkpoints import background, commit, find, reading, storage
    from legato.base.errors import CheckpointError

    root = Path(sys.argv[1])
    saved = 0
    while True:  # until the check says that no more fits
        try:
            commit.write(root / find.directory_name(saved), {"w": torch.full((100_000,), float(saved))})
            saved += 1
        except CheckpointError as error:
            assert re.match(rf"A checkpoint needs 4.. kB in {root}", str(error)), error
            break
    assert saved >= 3, saved

    def fill(root, needed):  # another program fills the disk while the save is under way
        with (root / "others").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                pass

    storage.remove(root / find.directory_name(0))
    check, storage.free_space_check = storage.free_space_check, fill
    writer = background.Writer()
    for save in (commit.write, writer.save):
        try:
            save(root / find.directory_name(99), {"w": torch.ones(100_000)})
            writer.wait()
            raise SystemExit("the disk was never full")
        except CheckpointError as error:
            assert "No space left on device" in str(error) and str(root) in str(error), error
        (root / "others").unlink()
    storage.free_space_check = check
    assert sorted(path.name for path in root.iterdir()) == [find.directory_name(step) for step in range(1, saved)]
    assert reading.read_checkpoint(find.newest_complete(root))["w"][0] == saved - 1
    commit.write(root / find.directory_name(99), {"w": torch.ones(10)})
    print("good")
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    root, program = tmp_path / "small", tmp_path / "program.py"
    root.mkdir()
    program.write_text(textwrap.dedent(FULL_DISK))
    mount = f"mount -t tmpfs -o size=2m none {root}"
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, not even in a namespace")
    command = f"{mount} && exec {sys.executable} {program} {root}"
    done = subprocess.run([*private, command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "good\n"
