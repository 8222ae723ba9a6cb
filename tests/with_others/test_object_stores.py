"""Checkpoints in stores, on servers of this machine: real requests over a socket, real processes, really killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from object_servers import STORES, new_bucket, serve
from tiny import Tiny, assert_same_bits, make_loader, make_trainer

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.base.location import to_location
from legato.trainer.checkpoints import find, storage
from legato.trainer.checkpoints.stores import connect
from legato.trainer.runs.object_lock import ObjectLock


@pytest.fixture(scope="module", params=STORES)
def server(request: Any) -> Iterator[tuple[str, dict[str, str]]]:
    with serve(request.param) as variables:
        yield request.param, variables


@pytest.fixture
def bucket(server: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a new bucket."""
    scheme, variables = server
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return new_bucket(scheme)


def fit(folder: Path, place: str, steps: int, *, processes: int = 1, **options: Any) -> tuple[lg.Trainer, Tiny]:
    task, resume = Tiny(), options.pop("resume", None)
    keeper = lg.callbacks.Checkpoint(dirpath=place, every_n_train_steps=2, **options.pop("saves", {}))
    strategy = {"strategy": options.pop("strategy", "ddp"), "devices": processes} if processes > 1 else {}
    arguments = {"callbacks": [keeper], "enable_checkpointing": True, "replicas": 2, "reproducible": "bitwise"}
    trainer = make_trainer(folder, **{**arguments, **strategy, "max_steps": steps, "max_epochs": 100, **options})
    trainer.fit(task, make_loader(), resume=resume)
    return trainer, task


def names(place: str) -> list[str]:
    return storage.folder_at(to_location(place)).names()


def objects(bucket: str) -> list[str]:
    return list(connect(bucket).find(bucket))


def test_a_run_saves_and_goes_on_there(bucket: str, tmp_path: Path) -> None:
    place = f"{bucket}/run"
    fit(tmp_path / "first", place, 6, saves={"save_top_k": 2})
    assert names(place) == ["step-00000004", "step-00000006"]  # the newest two; older ones are deleted
    assert not [key for key in objects(bucket) if key.endswith((".writing", ".lock"))]
    assert find.verify(to_location(f"{place}/step-00000006"))

    _, resumed = fit(tmp_path / "second", place, 8, resume=place, saves={"asynchronous": True})
    _, uninterrupted = fit(tmp_path / "third", f"{bucket}/whole", 8)
    assert_same_bits(resumed, uninterrupted)
    assert_same_bits(Tiny.load_from_checkpoint(f"{place}/step-00000008"), uninterrupted)

    with pytest.raises(
        ConfigError, match=f"{place}' contains checkpoints from another run, which this run would overwrite"
    ):
        fit(tmp_path / "fourth", place, 2)
    with pytest.raises(CheckpointError, match=f"There is no complete checkpoint at {bucket}/nothing"):
        fit(tmp_path / "fifth", f"{bucket}/other", 2, resume=f"{bucket}/nothing")


def test_weights_of_other_programs_are_read_there(bucket: str, tmp_path: Path) -> None:
    task = Tiny()
    torch.save(task.state_dict(), tmp_path / "weights.pt")
    connect(bucket).put_file(str(tmp_path / "weights.pt"), f"{bucket}/weights.pt")
    loaded = Tiny.load_from_checkpoint(f"{bucket}/weights.pt")
    assert_same_bits(loaded, task)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_save_and_one_goes_on(strategy: str, bucket: str, tmp_path: Path) -> None:
    place, loose = f"{bucket}/run", {"reproducible": "order"} if strategy == "fsdp" else {}
    fit(tmp_path / "two", place, 4, processes=2, strategy=strategy, **loose)
    files = [key.rpartition("/")[2] for key in objects(bucket) if "step-00000004" in key]
    # each rank of a sharded strategy has uploaded its files
    assert ("model-00001.safetensors" in files) == (strategy == "fsdp")
    _, resumed = fit(tmp_path / "one", f"{bucket}/next", 8, resume=place, **loose)
    _, uninterrupted = fit(tmp_path / "whole", f"{bucket}/whole", 8, **loose)
    if strategy == "ddp":
        assert_same_bits(resumed, uninterrupted)
    else:
        for ours, theirs in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


SCRIPT = """
import sys
from pathlib import Path

sys.path[:0] = {tests!r}
from test_object_stores import fit

if __name__ == "__main__":
    fit(Path({folder!r}), {place!r}, 10000, processes=2)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_on_another_number_of_processes(bucket: str, tmp_path: Path) -> None:
    place = f"{bucket}/run"
    script = tmp_path / "train.py"
    here = Path(__file__).parent
    folders = {"tests": [str(here), str(here.parent)], "folder": str(tmp_path / "killed"), "place": place}
    script.write_text(SCRIPT.format(**folders))
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True, env=dict(os.environ))
    try:
        end = time.monotonic() + 120
        while not [name for name in names(place) if name > "step-00000003"]:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    steps = find.checkpoint_step(find.checkpoints_in(to_location(place))[-1]) + 3
    _, resumed = fit(tmp_path / "resumed", place, steps, resume=place)
    _, uninterrupted = fit(tmp_path / "whole", f"{bucket}/whole", steps)
    assert_same_bits(resumed, uninterrupted)
    assert not [key for key in objects(bucket) if key.endswith(".writing")]


def test_of_several_at_once_one_has_the_lock_and_no_object_is_replaced(bucket: str) -> None:
    def take(lock: ObjectLock) -> bool:
        with suppress(ConfigError):
            lock.take()
        return bool(lock._released)

    locks = [ObjectLock(f"{bucket}/run", "fit") for _ in range(8)]
    with ThreadPoolExecutor(len(locks)) as threads:
        holders = [lock for lock, has_it in zip(locks, threads.map(take, locks), strict=True) if has_it]
    assert len(holders) == 1
    assert holders[0].holder()["token"] == holders[0].token
    with pytest.raises(FileExistsError):
        connect(bucket).pipe_file(f"{bucket}/run/.lock", b"of another", mode="create")
    holders[0].release()
    assert not objects(bucket)


def test_an_address_with_the_account_is_that_of_its_container(bucket: str, tmp_path: Path) -> None:
    if not bucket.startswith("az"):
        return
    place = f"abfs://{bucket.removeprefix('az://')}@devstoreaccount1.dfs.core.windows.net/run"
    fit(tmp_path / "first", place, 2)
    assert names(place) == names(f"{bucket}/run") == ["step-00000002"]
    _, resumed = fit(tmp_path / "second", place, 4, resume=f"{bucket}/run")
    _, uninterrupted = fit(tmp_path / "third", f"{bucket}/whole", 4)
    assert_same_bits(resumed, uninterrupted)


def test_a_bucket_that_is_not_there_is_named_before_the_first_step(bucket: str, tmp_path: Path) -> None:
    place = f"{bucket.rpartition('/')[0]}/no-such-bucket/run"
    with pytest.raises(ConfigError, match=place):
        fit(tmp_path, place, 2)
