"""`legato samples` beside real runs whose dataset tells which of its samples a batch has."""

import json
import subprocess
from pathlib import Path

import pytest
from forked import completed, run_module

from legato.base.errors import DataError
from legato.lab.sample_lookup import SampleLookup
from legato.lab.study import history_of

pytestmark = pytest.mark.slow

TASK = '''
import json, os
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler
import legato as lg


class Numbers(Dataset):
    """Each sample is its own index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index)]) + torch.zeros(1).uniform_(0, 0.1)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).unsqueeze(1))


class Moody(Sampler):
    """Another order each time."""

    times = 0

    def __len__(self):
        return 23

    def __iter__(self):
        self.times += 1
        return iter((index + self.times) % 23 for index in range(23))


def numbers(value):
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items()}
    return [int(one) for one in value.flatten()]


class Sees(lg.Task):
    """Writes which samples each replica has in each step."""

    def __init__(self, kind: str = "plain", length: int = 23, batch_size: int = 2):
        super().__init__()
        self.kind, self.length, self.batch_size = kind, length, batch_size
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        record = [self.global_step + 1, self.trainer.metrics.replica, batch_idx, numbers(batch)]
        with open(f"{os.environ['SEEN']}.{os.getpid()}", "a") as file:
            file.write(json.dumps(record) + "\\n")
        return (self.weight - 1).square()

    def describe_batch(self, batch):
        return f"numbers {numbers(batch)}"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        data = Numbers(self.length)
        if self.kind == "several":
            other = DataLoader(Numbers(5), 3, shuffle=True)
            return {"long": DataLoader(data, self.batch_size, shuffle=True), "short": other}
        if self.kind == "stream":
            return DataLoader(Endless(), 2)
        sampler = {"weighted": WeightedRandomSampler(torch.arange(23.0), 19), "moody": Moody()}.get(self.kind)
        return DataLoader(data, self.batch_size, shuffle=sampler is None, sampler=sampler)
'''
CONFIG = """\
task: {_target_: sees.Sees}
seed: 5
trainer:
  max_epochs: 3
  accelerator: cpu
  threads: 1
  replicas: 2
  log_every_n_steps: 2
  num_sanity_val_steps: 0
  enable_progress_bar: false
  enable_model_summary: false
callbacks:
  checkpoint: {_target_: legato.callbacks.Checkpoint, every_n_train_steps: 4}
"""
TWO = ("trainer.devices=2", "trainer.strategy=ddp")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sees.py").write_text(TASK)
    (tmp_path / "sees.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path


def legato(*arguments: str) -> subprocess.CompletedProcess[str]:
    return completed(run_module, "legato", *arguments)


def trained(*overrides: str) -> Path:
    done = legato("fit", "sees.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    return Path("runs/default/version_0")


def recorded(folder: Path) -> dict[int, list[tuple[int, int, object]]]:
    """What the run has seen: by step, sorted (replica, batch_idx, indices)."""
    seen: dict[int, list[tuple[int, int, object]]] = {}
    for path in folder.glob("seen.*"):
        for line in path.read_text().splitlines():
            step, replica, batch_idx, indices = json.loads(line)
            seen.setdefault(step, []).append((replica, batch_idx, indices))
    return {step: sorted(batches) for step, batches in seen.items()}


def looked_up(run: Path, steps: int) -> dict[int, list[tuple[int, int, object]]]:
    history, batches = history_of(str(run)), {}
    lookup = SampleLookup(history, history.unstarted)
    for step in range(1, steps + 1):
        rows = [(item.replica, item.batch_idx, item.indices_by_loader) for item in lookup.at(step).batches]
        batches[step] = sorted((replica, batch_idx, indices.get("", indices)) for replica, batch_idx, indices in rows)
    return batches


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        TWO,
        ("trainer.accumulate_grad_batches=2", "trainer.replicas=3"),
        (*TWO, "trainer.replicas=3", "trainer.limit_train_batches=3"),
        ("task.kind=several",),
        ("task.kind=weighted",),
        ("trainer.overfit_batches=2",),
        ("trainer.replicas=3", "trainer.use_distributed_sampler=even"),
        ("callbacks.more={_target_: legato.callbacks.GradientAccumulationScheduler, scheduling: {1: 2}}",),
    ],
)
def test_each_step_has_the_samples_that_the_run_has_seen(folder: Path, overrides: tuple[str, ...]) -> None:
    """23 samples in batches of 2: the last round is short, and not every replica has a batch in it."""
    run = trained(*overrides)
    seen = recorded(folder)
    assert len(seen) >= 6
    assert looked_up(run, max(seen)) == seen


def test_also_after_resumes_on_other_processes_in_the_middle_of_an_epoch_and_with_other_batches(folder: Path) -> None:
    """4 steps in two processes, then one, then the next epoch with another batch size; old checkpoints are gone."""
    trained(*TWO, "trainer.max_steps=4")
    trained("resume=auto", "trainer.max_epochs=2", "trainer.max_steps=-1", "trainer.devices=1")
    run = trained("resume=auto", "trainer.max_epochs=4", "task.batch_size=3", "callbacks.checkpoint.save_top_k=3")
    seen = recorded(folder)
    assert max(seen) == 6 + 6 + 4 + 4
    assert looked_up(run, 20) == seen


def test_the_command_tells_a_step_a_replica_a_batch_and_when_a_sample_was_seen(folder: Path) -> None:
    run = trained()
    seen = recorded(folder)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
    done = legato("samples", str(run), "step=8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Step 8 of runs/default/version_0: epoch 1, step 2 of 6 in the epoch: 4 samples"
    assert [line.partition(": ")[2] for line in lines[1:]] == [" ".join(map(str, batch[2])) for batch in seen[8]]
    done = legato("samples", str(run / "config.yaml"), "step=8", "replica=1", "--show")
    assert done.stdout.splitlines()[-1].strip() == f"numbers {seen[8][1][2]}"
    assert "replica 0" not in done.stdout
    assert recorded(folder) == seen  # nothing was run
    done = legato("samples", str(run), "index=17")
    steps = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert steps == sorted(step for step, batches in seen.items() for batch in batches if 17 in batch[2])
    assert done.stdout.splitlines()[-1] == "Sample 17 was seen 3 times in 18 steps."
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()} == before


def test_what_cannot_be_known_is_said(folder: Path) -> None:
    run = trained("task.kind=moody")
    history = history_of(str(run))
    with pytest.raises(DataError, match="Moody draws a different order each time"):
        SampleLookup(history, history.unstarted).at(3)
    done = legato("samples", str(run), "step=0")
    assert (done.returncode, "steps are counted from 1" in done.stderr) == (2, True)
    done = legato("samples", str(run), "stpe=1")
    assert "Did you mean 'step='?" in done.stderr
    done = legato("samples", "runs")
    assert done.returncode == 2
    done = legato("samples", "nothing", "step=3")
    assert "There is no run 'nothing'" in done.stderr


def test_of_a_stream_it_tells_the_batches(folder: Path) -> None:
    run = trained("task.kind=stream")
    done = legato("samples", str(run), "step=2")
    assert "replica 1, batch 1: batch 3 of the stream" in done.stdout
    assert recorded(folder)[2][1][2] == [6, 7]
    done = legato("samples", str(run), "index=3")
    assert "is a stream" in done.stderr
