"""Runs whose run.root is an address, on a server that speaks S3: killed, and gone on with to the same bits."""

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from forked import Forked, completed, run_module
from object_servers import STORES, new_bucket, serve
from safetensors import safe_open
from waiting import wait_until

from legato.trainer.checkpoints.stores import connect

TASK = """\
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Model(lg.Task):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if self.global_step == 7 and os.path.exists("stand"):
            open("stands", "w").close()
            time.sleep(600)
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        data = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data[:, :4], data[:, 4:]), batch_size=4, shuffle=True)

    def predict_dataloader(self):
        return self.train_dataloader()
"""
CONFIG = """\
task: {_target_: model.Model}
trainer: {max_steps: 12, accelerator: cpu, replicas: 2, reproducible: bitwise, log_every_n_steps: 1}
callbacks:
  checkpoint: {_target_: legato.callbacks.Checkpoint, every_n_train_steps: 3, save_top_k: -1}
run: {name: digits}
resume: auto
"""


@pytest.fixture(scope="module")
def server(request: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """The scheme of a store, and the variables by which programs talk to its server."""
    scheme = getattr(request, "param", "s3")
    with serve(scheme) as variables:
        yield scheme, variables


@pytest.fixture
def root(server: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of runs in a bucket of its own; the current folder has a task and a config."""
    scheme, variables = server
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "model.py").write_text(TASK)
    (tmp_path / "base.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return f"{new_bucket(scheme)}/runs"


def store() -> Any:
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def environment(cache: str) -> dict[str, str]:
    """The variables of a machine with a cache of its own."""
    return {**os.environ, "XDG_CACHE_HOME": str(Path(cache).absolute())}


def fit(root: str, cache: str, *words: str) -> subprocess.CompletedProcess[str]:
    return completed(run_module, "legato", "fit", "base.yaml", f"run.root={root}", *words, env=environment(cache))


def begin(root: str, *words: str) -> Forked:
    """Start a run on a machine, and wait until it stands in its eighth step."""
    Path("stand").touch()
    run = Forked(
        run_module, "legato", "fit", "base.yaml", f"run.root={root}", *words, env=environment("first"), cwd=Path()
    )
    if not wait_until(Path("stands").exists, 60):
        run.kill()
        raise AssertionError(run.communicate(10))
    Path("stand").unlink()
    return run


def weights(path: str) -> dict[str, bytes]:
    with fsspec.open(f"{path}/model.safetensors", "rb", skip_instance_cache=True) as file:
        Path("weights").write_bytes(file.read())
    with safe_open("weights", "numpy") as tensors:
        return {name: tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("server", STORES, indirect=True)
def test_a_killed_run_goes_on_elsewhere_to_the_same_bits(root: str, before: int, after: int) -> None:
    files = connect(root)
    undisturbed = fit("runs", "none", "trainer.devices=1")
    assert undisturbed.returncode == 0, undisturbed.stderr
    run = begin(root, f"trainer.devices={before}")
    try:
        second = fit(root, "second", "trainer.devices=1")
        assert second.returncode == 2, second.stderr
        assert f"{root}/digits/version_0 is in use by process" in second.stderr
    finally:
        run.kill()
    resumed = fit(root, "second", f"trainer.devices={after}")
    assert resumed.returncode == 0, resumed.stderr
    saved = "digits/version_0/checkpoints/step-00000012"
    assert f"Resuming from {root}/digits/version_0/checkpoints/step-00000006" in resumed.stdout + resumed.stderr
    assert weights(f"{root}/{saved}") == weights(str(Path("runs", saved).absolute()))
    lines = files.cat_file(f"{root}/digits/version_0/metrics.jsonl").decode().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f'{{"step": {step}' for step in range(1, 13)]
    shown = completed(run_module, "legato", "show", f"{root}/digits", env=environment("third"))
    assert shown.returncode == 0, shown.stderr
    assert f"version_0  ({root}/digits/version_0)" in shown.stdout
    assert "done, step 12" in shown.stdout
    assert not files.exists(f"{root}/digits/version_0/.lock")


def test_a_run_is_evaluated_replayed_and_verified_elsewhere(root: str) -> None:
    trained = fit(root, "first")
    assert trained.returncode == 0, trained.stderr
    run = f"{root}/digits/version_0"

    def command(*words: str) -> str:
        done = completed(run_module, "legato", *words, env=environment("second"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    predictions = command("predict", "base.yaml", f"run.root={root}", "resume=null").split()[-1]
    assert predictions.startswith(f"{run}/evaluations/predict/version_0/")
    assert store().exists(predictions)
    assert f"Step 5 of {run}: epoch 0" in command("samples", run, "step=5")
    replayed = command("replay", run, "step=5")
    assert f"Replayed steps 4 to 5 of {run}, from the checkpoint of step 3" in replayed
    assert "are bitwise identical" in replayed
    assert "logged values and all" in command("verify", run, "segments=1")
    assert not store().glob(f"{root}/*replay*") + store().glob(f"{root}/*verified*")


def test_killed_at_any_moment_on_machine_after_machine(root: str) -> None:
    """The command of docs/how-to/batch-systems.md, at each start, on machines that go away without a warning."""
    words = ["trainer.max_steps=60", "callbacks.checkpoint.every_n_train_steps=5"]
    undisturbed = fit("runs", "none", "trainer.devices=1", *words)
    assert undisturbed.returncode == 0, undisturbed.stderr
    moments, output = random.Random(29), []
    for start in range(3):
        run = Forked(
            *(run_module, "legato", "fit", "base.yaml", f"run.root={root}", f"trainer.devices={1 + start % 2}", *words),
            env=environment(f"machine-{start}"),
            cwd=Path(),
        )
        before = len(store().find(root))
        wait_until(lambda before=before: len(store().find(root)) > before + 8, 30)  # it has begun, and may have saved
        time.sleep(moments.uniform(0.0, 2.0))
        run.kill()
        output += run.communicate(10)
    last = fit(root, "last", "trainer.devices=1", *words)
    assert last.returncode == 0, last.stderr
    assert "".join([*output, last.stdout, last.stderr]).count("Resuming from") > 1
    saved = "checkpoints/step-00000060"
    (done,) = (path for path in store().glob(f"{root}/digits/version_*") if store().exists(f"{path}/{saved}"))
    assert weights(f"s3://{done}/{saved}") == weights(str(Path("runs/digits/version_0", saved).absolute()))
    lines = store().cat_file(f"{done}/metrics.jsonl").decode().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f'{{"step": {step}' for step in range(1, 61)]
