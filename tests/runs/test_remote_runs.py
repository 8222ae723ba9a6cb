"""Runs whose run.root is an address are mirrored, resumed and listed; with fsspec's in-memory store."""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import ConfigError
from legato.base.location import Address, checkpoints_of, local_folder, location_of, place_problem
from legato.callbacks import Checkpoint
from legato.cli.main import main
from legato.trainer.checkpoints import stores
from legato.trainer.runs import lock, remote


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local cache, with short waits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(lock, "END_WAIT", 0.2)
    return tmp_path / "cache"


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}/runs"


def names(root: str) -> list[str]:
    objects = MemoryFileSystem().find(root)
    return [name.removeprefix(f"/{root.partition('://')[2]}/") for name in objects]


def train(root: str, steps: int, stop: Callable[[int], object] = lambda step: None) -> lg.Trainer:
    """Train with a checkpoint every second step; resume an existing run."""

    class Stop(lg.Callback):
        def on_train_batch_end(self, trainer: lg.Trainer, *rest: Any) -> None:
            stop(trainer.global_step)

    chosen: dict[str, Any] = {
        "logger": True,
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
        "max_steps": steps,
        "max_epochs": 9,
    }
    trainer = make_trainer(root, run_name="tiny", callbacks=[Checkpoint(every_n_train_steps=2), Stop()], **chosen)
    trainer.fit(Tiny(), make_loader(), resume="auto")
    return trainer


def weights(trainer: lg.Trainer) -> list[float]:
    return [float(parameter.detach().double().sum()) for parameter in trainer.task.parameters()]


def test_a_folder_here_stands_for_a_run_in_a_store(cache: Path) -> None:
    run = Address("s3://bucket/runs/tiny/version_3")
    folder = local_folder(run)
    assert folder == cache.resolve() / "legato/runs/s3/bucket/runs/tiny/version_3"
    assert location_of(folder) == run
    assert checkpoints_of(folder) == f"{run}/checkpoints"
    assert location_of(Path("runs/tiny")) == Path("runs/tiny")


def test_all_of_a_run_is_in_the_store(root: str) -> None:
    trainer = train(root, 4)
    kept = {name.removeprefix("tiny/version_0/") for name in names(root)}
    assert {"run.json", "environment.json", "metrics.jsonl", "epochs.jsonl", "checkpoints/index.json"} <= kept
    assert "checkpoints/step-00000004/manifest.json" in kept
    assert not [name for name in kept if name.startswith(".") or name.endswith(".partial")]
    run = lg.runs.open(f"{root}/tiny")
    assert (run.name, run.state, run.step, run.location) == ("version_0", "done", 4, f"{root}/tiny/version_0")
    assert list(run.metrics["step"]) == [1, 2, 3, 4]
    assert [entry.path for entry in run.checkpoints] == [trainer.checkpoint_callback.last_model_path]
    assert [run.name for run in lg.runs.list(root)] == ["tiny/version_0"]
    assert lg.runs.open("tiny", root).location == run.location


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["same", "other"])
def test_a_run_that_died_goes_on(root: str, cache: Path, machine: str) -> None:
    class Killed(Exception):
        pass

    def die(step: int) -> None:
        if step == 5:
            raise Killed

    undisturbed = train(f"{root}/whole", 8)
    with pytest.raises(Killed):
        train(root, 8, die)
    if machine == "other":
        shutil.rmtree(cache)
    resumed = train(root, 8)
    assert location_of(resumed.run_dir) == f"{root}/tiny/version_0"
    assert weights(resumed) == weights(undisturbed)
    assert list(lg.runs.open(f"{root}/tiny").metrics["step"]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_of_two_runs_one_is_refused(root: str) -> None:
    def second(step: int) -> None:
        if step == 3:
            with pytest.raises(ConfigError, match=r"/tiny/version_0 is in use by process \d+ on"):
                train(root, 8)

    train(root, 4, second)


def test_a_run_goes_on_when_only_its_files_cannot_be_uploaded(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = MemoryFileSystem.pipe_file

    def fail(self: Any, path: str, *rest: Any, **options: Any) -> None:
        if path.endswith("metrics.jsonl"):
            raise TimeoutError("Slow down")
        put(self, path, *rest, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    trainer = train(root, 6)
    assert trainer.global_step == 6
    warnings = [record.message for record in caplog.records if "Slow down" in record.message]
    assert len(warnings) == 2
    assert "cannot be uploaded" in warnings[0]
    assert all(str(trainer.run_dir) in message and f"{root}/tiny/version_0" in message for message in warnings)
    assert "tiny/version_0/checkpoints/step-00000006/manifest.json" in names(root)


def test_a_store_that_fails_now_and_then_changes_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def failing(method: Any) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 5 == 0:
                raise ConnectionError("reset by peer")
            return method(self, *arguments, **options)

        return call

    for name in ("pipe_file", "cat_file", "find", "ls", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, failing(getattr(MemoryFileSystem, name)))
    train(root, 4)
    resumed = train(root, 8)
    assert calls > 50
    assert [entry.step for entry in lg.runs.open(f"{root}/tiny").checkpoints] == [8]
    assert location_of(resumed.run_dir) == f"{root}/tiny/version_0"


def test_the_last_minute_of_a_run_that_was_killed_here_is_kept(root: str) -> None:
    folder = local_folder(Address(f"{root}/tiny/version_0"))
    for name, here, there in [
        ("ahead", b"1\n2\n", b"1\n"),
        ("behind", b"1\n", b"1\n2\n"),
        ("other", b"1\n3\n", b"1\n2\n"),
    ]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(here)
        MemoryFileSystem().pipe_file(f"{root}/tiny/version_0/{name}", there)
    remote.refresh(folder)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert kept == {"ahead": b"1\n2\n", "behind": b"1\n2\n", "other": b"1\n2\n"}


def test_commands_take_addresses(
    root: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    train(root, 4)
    train(root.replace("/runs", "/more"), 2)
    capsys.readouterr()
    assert main(["runs", root]) == 0
    assert "tiny/version_0" in capsys.readouterr().out
    assert main(["show", f"{root}/tiny"]) == 0
    assert f"({root}/tiny/version_0)" in capsys.readouterr().out
    assert main(["compare", f"{root}/tiny", f"{root.replace('/runs', '/more')}/tiny"]) == 0
    assert "step" in capsys.readouterr().out
    assert main(["export", f"{root}/tiny/version_0", "here.safetensors"]) == 0
    assert (tmp_path / "here.safetensors").is_file()
    assert main(["clean", root]) == 2
    assert main(["show", f"{root}/none"]) == 2
    assert f"There is no run '{root}/none'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("s3:/x/y", "an address needs two slashes, 's3://x/y'"),
        ("hf://user/repo", "creates a commit"),
        ("hf://user/repo/run", "hf://buckets/USER/NAME"),
        ("file:///tmp/x", "Write it as a path: '/tmp/x'"),
        ("s4://bucket/x", "which has an unknown scheme"),
        ("memory://", "has no bucket"),
        ("memory://b/x", None),
        ("runs", None),
    ],
)
def test_places_are_checked(place: str, problem: str | None) -> None:
    objects = place_problem(place)
    assert objects is None if problem is None else problem in str(objects)


@pytest.mark.parametrize(
    "word", ["run.root=s3:/b/runs", "resume=s3:/b/r", "checkpoint=s3:/b/r", "callbacks.note.dirpath=s3:/b/r"]
)
def test_a_config_is_checked_before_torch_is_imported(config_folder: Path, word: str, capsys: Any) -> None:
    assert main(["fit", "base.yaml", word]) == 2
    assert "an address needs two slashes, 's3://b/r" in capsys.readouterr().err
