"""`legato tune` with real trials, and what it decides by: pairs of blocks, and the settings that are worth a trial."""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import Forked, completed, run_module
from waiting import runs, wait_until

from legato.cli.main import main
from legato.cli.tune.measure import compare_in_turn, judge
from legato.cli.tune.settings import groups, larger_batches, last_group, of_workers, precisions
from legato.trainer.processes import environment

TASK = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
import legato as lg


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((1,), index / 400)


class Data(lg.DataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Slow(), self.batch_size)


class Line(lg.Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if torch.get_num_threads() == 1:
            raise ZeroDivisionError("not with one thread\\nmore of it")
        if len(batch) > 4:
            raise torch.OutOfMemoryError("out of memory: there is room for 4")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)
"""
CONFIG = """\
task: {_target_: slow.Line}
data: {_target_: slow.Data}
trainer: {accelerator: cpu, devices: 1, max_epochs: 1, threads: 2, limit_train_batches: 3, enable_progress_bar: false}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, and one for temporary files beside it."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user/slow.py").write_text(TASK)
    (tmp_path / "user/slow.yaml").write_text(CONFIG)
    temporary = tempfile.mkdtemp(prefix="lt-", dir="/tmp")  # a path of a socket is at most 108 characters long
    (tmp_path / "tmp").symlink_to(temporary)
    environment.warm_up()  # the server of processes keeps the folder for temporary files in which it began
    monkeypatch.setenv("TMPDIR", temporary)
    monkeypatch.chdir(tmp_path / "user")
    yield tmp_path
    shutil.rmtree(temporary)


def started(*words: str) -> Forked:
    return Forked(run_module, "legato", "tune", "slow.yaml", "--seconds", "3", *words)


TRIED = re.compile(r" \d+\.\d\d  (kept, (same bits|changes the result)|slower|no faster)")


# --- real trials ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_is_faster_is_kept_and_fit_takes_it(folder: Path) -> None:
    words = "--only", "trainer.threads", "--only", "trainer.loader.num_workers", "--out", "fast.yaml"
    process = started("trainer.limit_train_batches=200", *words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "failed: ZeroDivisionError: not with one thread" in rows["trainer.threads=1"]
    assert re.search(r"num_workers=[12] .* kept, same bits", out)
    assert not list((folder / "tmp").iterdir())
    assert sorted(path.name for path in Path().glob("*.*")) == ["fast.yaml", "slow.py", "slow.yaml"]
    text = Path("fast.yaml").read_text()
    assert "extends: [slow.yaml]" in text
    assert "limit_train_batches: 200" in text
    assert re.search(r"loader:\n +num_workers: [12]", text)
    assert main(["config", "fast.yaml"]) == 0
    fit = completed(run_module, "legato", "fit", "fast.yaml", "trainer.max_steps=2", "loggers=null")
    assert fit.returncode == 0, fit.stderr


@pytest.mark.slow
def test_gradients_as_views_and_precisions_are_tried_on_two_processes(folder: Path) -> None:
    """In blocks of a step, so that this takes seconds: which is faster is luck, and that each ran is what is tested."""
    words = "trainer.devices=2", "trainer.limit_train_batches=50", "--seconds", "0.1", "--precision"
    process = started(*words, "--only", "trainer.precision", "--only", "trainer.strategy.gradient_as_bucket_view")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    for name in ("strategy.gradient_as_bucket_view=true", "precision=bf16-mixed", "precision=bf16-true"):
        (row,) = [line for line in out.splitlines() if f"trainer.{name}" in line]
        assert TRIED.search(row), out
    assert main(["config", "slow.tuned.yaml"]) == 0


@pytest.mark.slow
def test_larger_batches_are_tried_on_two_processes(folder: Path) -> None:
    words = "trainer.devices=2", "trainer.strategy=ddp", "trainer.limit_train_batches=50", "--seconds", "0.5"
    process = started(*words, "--batch-size", "--only", "data.batch_size")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "2 x cpu" in rows["as"]
    assert TRIED.search(rows["data.batch_size=4"])


@pytest.mark.slow
def test_ctrl_c_leaves_the_table_so_far_and_nothing_else(folder: Path) -> None:
    process = started("--only", "trainer.loader", "trainer.limit_train_batches=200")
    said = process.folder / "stdout"
    assert wait_until(lambda: said.exists() and said.read_text().count("\n") > 1, 100)
    assert said.read_text().splitlines()[1].startswith("as it is")
    below = psutil.Process(process.pid).children(recursive=True)
    assert below
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Wrote slow.tuned.yaml, with nothing" in out
    assert wait_until(lambda: not any(runs(one.pid) for one in below), 60)
    assert not list((folder / "tmp").iterdir())
    assert sorted(path.name for path in Path().glob("*.*")) == ["slow.py", "slow.tuned.yaml", "slow.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["trainer.num_nodes=2"], "on this machine"),
        (["--out", "slow.yaml"], "slow.yaml is there, and not of `legato tune`"),
        (["--out", "nowhere/x.yaml"], "there is no folder nowhere"),
        (["trainer.thread=2"], "Did you mean 'threads'?"),
    ],
)
def test_mistakes_end_before_a_trial(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "slow.yaml", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list((folder / "tmp").iterdir())


# --- pairs of blocks ------------------------------------------------------------------------------------------------
def speeds(*values: float) -> Any:
    """Return a function that gives these values, then the last one."""
    found: Iterator[float] = iter(values)
    return lambda: next(found, values[-1])


def test_a_drift_of_the_machine_cancels() -> None:
    clock = iter(range(1000))

    def drifting(factor: float) -> Any:
        return lambda: factor * (100 + 5 * next(clock))

    result = compare_in_turn(drifting(1.0), drifting(1.0))
    assert not result.better
    assert abs(result.ratio - 1) < 0.005
    result = compare_in_turn(drifting(1.0), drifting(1.04))
    assert result.better
    assert result.ratio == pytest.approx(1.04, abs=0.005)


def test_only_what_is_better_than_the_noise_is_better() -> None:
    assert judge([1.05, 1.06, 1.04, 1.05, 1.05, 1.05]).better
    assert not judge([1.05, 1.06, 1.04]).better  # too few
    assert not judge([1.005] * 15).better  # too little
    assert not judge([1.5, 0.7, 1.3, 0.8, 1.2, 1.1, 0.9]).better  # too noisy


def test_what_is_clearly_worse_ends_early_and_what_is_undecided_late() -> None:
    for values, blocks in (((50.0,), 3), ((100.0,), 6), ((130.0, 80.0) * 15, 30)):
        count, candidate = [0], speeds(*values)

        def counted(count: list[int] = count, candidate: Any = candidate) -> float:
            count[0] += 1
            return float(candidate())

        compare_in_turn(speeds(100.0), counted)
        assert count == [blocks]


# --- settings -------------------------------------------------------------------------------------------------------
TRAINER = {
    "accumulate_grad_batches": 1,
    "reproducible": "order",
    "strategy": "ddp",
    "channels_last": False,
    "compile": False,
    "precision": 32,
}
FACTS = {
    "device": "cpu",
    "cores": 8,
    "threads": 4,
    "processes": 2,
    "strategy": "ddp",
    "loader": {"num_workers": 2, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False},
    "batch_size": 16,
    "optimizers": ["AdamW"],
    "kernels": ["foreach", "fused"],
    "blocks": (),
    "images": True,
    "batch_norm": False,
    "automatic": True,
}


def tried(facts: dict[str, Any] | None = None, **trainer: Any) -> list[str]:
    config = {"trainer": TRAINER | trainer, "data": {"batch_size": 16}}
    found = list(groups(config, FACTS | (facts or {})))
    return [f"{one.name}: {one.reason}" if one.reason else one.name for group in found for one in group]


def test_each_setting_is_tried_with_other_values_than_it_has() -> None:
    assert tried() == [
        "trainer.threads=1",
        "trainer.threads=2",
        "trainer.loader.num_workers=0",
        "trainer.loader.num_workers=1",
        "trainer.loader.num_workers=4",
        "trainer.optimizer_kernels=fused",
        "trainer.optimizer_kernels=foreach",
        "trainer.channels_last=true",
        "trainer.strategy.bucket_cap_mb=5",
        "trainer.strategy.bucket_cap_mb=100",
        "trainer.strategy.gradient_as_bucket_view=true",
        "data.batch_size=8 trainer.accumulate_grad_batches=2",
    ]
    assert tried(accumulate_grad_batches=4)[-2:] == [
        "data.batch_size=32 trainer.accumulate_grad_batches=2",
        "data.batch_size=8 trainer.accumulate_grad_batches=8",
    ]
    of_ddp = [one for one in tried(strategy="auto") if "strategy" in one]
    assert of_ddp[1:] == [
        "trainer.strategy.name=ddp trainer.strategy.bucket_cap_mb=100",
        "trainer.strategy.name=ddp trainer.strategy.gradient_as_bucket_view=true",
    ]
    given = {"name": "ddp", "bucket_cap_mb": 5, "gradient_as_bucket_view": True}
    assert [one for one in tried(strategy=given) if "strategy" in one] == ["trainer.strategy.bucket_cap_mb=100"]
    assert not any("strategy" in one for one in tried(strategy={"name": "ddp", "elastic": True}))
    assert "trainer.loader.pin_memory=true" in tried({"device": "cuda"})
    assert [setting.name for group in of_workers(FACTS) for setting in group] == [
        "trainer.loader.persistent_workers=true",
        "trainer.loader.prefetch_factor=4",
        "trainer.loader.prefetch_factor=8",
    ]


@pytest.mark.parametrize(
    ("facts", "trainer", "said"),
    [
        ({"batch_norm": True}, {}, "batch norm would see other batches"),
        ({}, {"reproducible": "bitwise"}, "reproducible: bitwise keeps the order"),
        ({"loader": None}, {}, "not a DataLoader that is dealt out by sample"),
    ],
)
def test_what_would_change_the_result_is_not_tried(facts: dict[str, Any], trainer: dict[str, Any], said: str) -> None:
    found = tried(facts, **trainer)
    assert sum(said in one for one in found) == 1
    if "bitwise" in said:
        assert not any("bucket" in one for one in found)


def test_equal_blocks_are_compiled_before_the_whole() -> None:
    names = [one.name for one in last_group({"trainer": TRAINER}, FACTS | {"blocks": ("Block",)})]
    assert names == ["trainer.compile={blocks: [Block]}", "trainer.compile=true"]
    assert [one.name for one in last_group({"trainer": TRAINER}, FACTS)] == ["trainer.compile=true"]
    assert last_group({"trainer": TRAINER | {"compile": True}}, FACTS) == []


def test_larger_batches_say_what_the_learning_rate_becomes() -> None:
    config = {"trainer": TRAINER, "task": {"batch_size": 16}}
    first, second = (setting for setting, _ in zip(larger_batches(config, FACTS), range(2), strict=False))
    assert (first.changes, second.changes) == ({"task.batch_size": 32}, {"task.batch_size": 64})
    assert "learning rate by 1.41 (square-root" in first.advice
    (setting, *_) = larger_batches(config, FACTS | {"optimizers": ["SGD"]})
    assert "learning rate by 2 (linear" in setting.advice
    assert [one.changes for one in precisions(config)] == [
        {"trainer.precision": "bf16-mixed"},
        {"trainer.precision": "bf16-true"},
    ]
