"""Checkpoints in S3, on moto's server: real requests of s3fs over a socket, real processes, really killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer
from tiny import Tiny, assert_same_bits, make_loader, make_trainer

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.base.location import to_location
from legato.trainer.checkpoints import find, storage


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """Return the address of a new bucket."""
    settings = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


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
    answer = boto3.client("s3").list_objects_v2(Bucket=bucket.removeprefix("s3://"))
    return [entry["Key"] for entry in answer.get("Contents", ())]


def test_a_run_saves_and_goes_on_there(bucket: str, tmp_path: Path) -> None:
    place = f"{bucket}/run"
    fit(tmp_path / "first", place, 6, saves={"save_top_k": 2})
    assert names(place) == ["step-00000004", "step-00000006"]  # the newest two; older ones are deleted
    assert not [key for key in objects(bucket) if key.endswith((".writing", ".lock"))]
    assert find.verify(to_location(f"{place}/step-00000006"))

    _, resumed = fit(tmp_path / "second", place, 8, resume=place, saves={"asynchronous": True})
    _, whole = fit(tmp_path / "third", f"{bucket}/whole", 8)
    assert_same_bits(resumed, whole)
    assert_same_bits(Tiny.load_from_checkpoint(f"{place}/step-00000008"), whole)

    with pytest.raises(ConfigError, match=f"{place}' has checkpoints of another run, which would be overwritten"):
        fit(tmp_path / "fourth", place, 2)
    with pytest.raises(CheckpointError, match=f"There is no complete checkpoint at {bucket}/nothing"):
        fit(tmp_path / "fifth", f"{bucket}/other", 2, resume=f"{bucket}/nothing")


def test_weights_of_other_programs_are_read_there(bucket: str, tmp_path: Path) -> None:
    task = Tiny()
    torch.save(task.state_dict(), tmp_path / "weights.pt")
    boto3.client("s3").upload_file(str(tmp_path / "weights.pt"), bucket.removeprefix("s3://"), "weights.pt")
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
    _, one = fit(tmp_path / "one", f"{bucket}/next", 8, resume=place, **loose)
    _, whole = fit(tmp_path / "whole", f"{bucket}/whole", 8, **loose)
    if strategy == "ddp":
        assert_same_bits(one, whole)
    else:
        for ours, theirs in zip(one.parameters(), whole.parameters(), strict=True):
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
    _, whole = fit(tmp_path / "whole", f"{bucket}/whole", steps)
    assert_same_bits(resumed, whole)
    assert not [key for key in objects(bucket) if key.endswith(".writing")]


def test_a_bucket_that_is_not_there_is_named_before_the_first_step(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s3://no-such-bucket/run"):
        fit(tmp_path, "s3://no-such-bucket/run", 2)
