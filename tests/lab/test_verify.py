"""`legato verify`: segments of a run computed again, and what was planted in between named."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from replayed_folder import CONFIG, TASK, TWO, json_lines, legato, make_folder, once, tree

from legato.trainer.checkpoints import commit, reading
from legato.trainer.runs.run_file import identity_of

pytestmark = pytest.mark.slow
BITWISE = ("trainer.reproducible=bitwise",)
ONE_AND_TWO = pytest.mark.parametrize("processes", [(), TWO], ids=["one", "two"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points that are read from a file, and a switch of torch that the environment sets."""
    made = make_folder(tmp_path, monkeypatch)
    text = TASK.replace("torch.randn(length, 4, generator=generator)", 'torch.load("points.pt")[:length]')
    text = f"import os\n{text}\nif os.environ.get('PLANTED'):\n    torch.backends.mkldnn.enabled = False\n"
    Path("points.py").write_text(text)
    Path("points.yaml").write_text(CONFIG.replace("every_n_train_steps: 4", "every_n_train_steps: 5"))
    write_points()
    return made


def write_points(changed: tuple[int, ...] = ()) -> None:
    import torch

    points = torch.randn(30, 4, generator=torch.Generator().manual_seed(3))
    for index in changed:
        points[index] += 1e-3
    torch.save(points, "points.pt")


def trained(*overrides: str, name: str = "default") -> Path:
    once(legato, "fit", "points.yaml", "trainer.max_epochs=2", f"run.name={name}", *overrides)
    return Path(f"runs/{name}/version_0")


def verified(run: Path, *words: str, fails: bool = False, **environment: str) -> tuple[str, dict[str, Any]]:
    """Verify a run, which stays as it is; return what is printed, and the certificate."""
    before, folders = tree(run), {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*")) if path.is_dir()}
    text = legato("verify", str(run), *words, fails=fails, **environment).stdout
    assert tree(run) == before
    assert {path: path.stat().st_mtime_ns for path in folders} == folders
    where = Path(re.findall(r"(?m)^Written +(\S+)/certificate.json", text)[0])
    # the replays are not left there
    assert sorted(path.name for path in where.iterdir()) == ["certificate.json", "certificate.txt"]
    assert (where / "certificate.txt").read_text() in text
    certificate = json.loads((where / "certificate.json").read_text())
    assert certificate["result"] == ("differs" if fails else "proven")
    return text, certificate


def causes(certificate: dict[str, Any]) -> str:
    return "\n".join(cause for segment in certificate["segments"] for cause in segment["causes"])


@pytest.mark.parametrize(
    ("options", "processes"),
    [((), 1), (BITWISE, 2), (TWO, 2), ((*TWO, *BITWISE), 1)],
    ids=["one", "one-bitwise", "two", "two-bitwise"],
)
def test_a_run_is_proven_to_the_bit_on_other_processes_where_that_is_promised(
    options: tuple[str, ...], processes: int
) -> None:
    run = trained(*options)
    text, certificate = verified(run)
    assert text.startswith("2 segments of 2 between checkpoints, seed ")
    assert re.search(r": 10 steps, [\d.]+ s at the speed of the run, [\d.]+ kB of disk", text)
    assert [segment["processes"] for segment in certificate["segments"]] == [processes] * 2
    assert text.count("bitwise identical") == 2
    assert [segment["from"] for segment in certificate["segments"]] == [None, "step-00000005"]
    manifest = json.loads((run / "checkpoints/step-00000010/manifest.json").read_text())
    stored = {name: file["sha256"] for name, file in manifest["files"].items()}
    assert certificate["checkpoints"]["step-00000010"] == stored
    assert f"{stored['model.safetensors']} step-00000010" in text
    assert certificate["data"]["step-00000005"][""]["hashes"]
    assert certificate["starts"][0]["versions"] == certificate["verified"]["versions"]


@pytest.mark.parametrize("options", [(), ("callbacks.checkpoint.save_on_train_epoch_end=true",)])
def test_a_checkpoint_is_compared_at_the_moment_at_which_the_run_saved(options: tuple[str, ...]) -> None:
    """After a validation, or at the end of an epoch; the last step of a replay is no point of the run's log."""
    best = ("callbacks.checkpoint.monitor=val/loss", "callbacks.checkpoint.every_n_train_steps=0")
    run = trained(*best, "callbacks.checkpoint.every_n_epochs=1", "trainer.log_every_n_steps=4", *options)
    assert len(verified(run, "segments=all")[1]["segments"]) == 2


def test_the_seed_draws_the_same_segments_again() -> None:
    run = trained("callbacks.checkpoint.every_n_train_steps=2")
    text, first = verified(run, "segments=2")
    seed = re.findall(r"seed (\d+)", text)[0]
    _, second = verified(run, "segments=2", f"seed={seed}", "--out", "elsewhere")
    assert Path("elsewhere/certificate.json").is_file()
    assert [each["to"] for each in first["segments"]] == [each["to"] for each in second["segments"]]


def test_another_number_of_processes_is_compared_up_to_rounding_under_order() -> None:
    text, certificate = verified(trained(), "devices=2", "segments=1", "seed=1")
    assert certificate["segments"][0]["processes"] == 2
    assert re.search(r"logged values are equal up to rounding, weights to \d", text)


@ONE_AND_TWO
def test_a_changed_line_of_the_task_is_named(processes: tuple[str, ...]) -> None:
    """Without git, by the hashes of the files that the run had loaded."""
    run = trained(*processes)
    Path("points.py").write_text(Path("points.py").read_text().replace("nn.Dropout(0.2)", "nn.Dropout(0.2001)"))
    text, certificate = verified(run, "segments=1", fails=True)
    assert "Code has changed since the run: points.py." in causes(certificate)
    assert "the first that differs is 'train/loss_step' of step" in text


@ONE_AND_TWO
def test_a_changed_data_file_is_told_by_its_first_batch_or_else_by_elimination(processes: tuple[str, ...]) -> None:
    run = trained(*processes)
    write_points(changed=tuple(range(30)))
    text, _ = verified(run, "segments=1", fails=True)
    assert "the samples in the dataset have changed" in text
    first = json.loads(Path("runs/default/version_0.verified-0/certificate.json").read_text())
    seen = next(iter(first["data"].values()))[""]["place"][2]
    write_points(changed=(next(index for index in range(30) if index not in seen),))
    _, certificate = verified(run, "segments=1", "seed=1", fails=True)
    assert "the data has changed" in causes(certificate)
    assert "legato samples RUN step=" in causes(certificate)


@ONE_AND_TWO
def test_a_changed_setting_of_a_library_is_named(processes: tuple[str, ...]) -> None:
    run = trained(*processes, *BITWISE)
    _, certificate = verified(run, fails=True, PLANTED="1")
    # from the start these bits are the same, which is proven, and told; a resume compares the settings
    assert "numerics.mkldnn True -> False" in certificate["segments"][0]["causes"][0]
    assert not certificate["segments"][0]["differences"]
    assert "mkldnn: True -> False" in certificate["segments"][1]["differences"][0]


@ONE_AND_TWO
def test_a_flipped_bit_in_a_checkpoint_is_named(processes: tuple[str, ...]) -> None:
    run = trained(*processes)
    file = run / "checkpoints/step-00000005/tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    text, _ = verified(run, fails=True)
    assert "tensors.safetensors is damaged: its SHA-256 differs from the manifest" in text
    file.write_bytes(data[:-1])
    text, certificate = verified(run, fails=True)
    assert "step-00000005" in certificate["not_verified"][0]
    assert "tensors.safetensors" in certificate["not_verified"][0]


def test_a_changed_value_of_the_log_and_a_checkpoint_with_new_hashes_are_told_apart() -> None:
    run = trained()
    text = (run / "metrics.jsonl").read_text()
    points = {point["step"]: point for point in json_lines(run / "metrics.jsonl")}
    points[3]["train/loss_step"] *= 1 + 1e-7
    del points[7]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, points.values())) + "\n")
    output, certificate = verified(run, fails=True)
    assert "the first that differs is 'train/loss_step' of step 3" in output
    assert "metrics.jsonl has no line for step 7" in output
    assert causes(certificate).count("metrics.jsonl was changed") == 2
    (run / "metrics.jsonl").write_text(text)
    path = run / "checkpoints/step-00000010"
    contents = reading.read_checkpoint(path)
    contents["optimizer_states"][0]["state"]["net.0.weight"]["exp_avg"][0, 0] += 1e-9
    commit.write(path, contents, run=identity_of(run))
    text, certificate = verified(run, fails=True)
    assert "the checkpoint of step 10 in optimizer_states.0.state.net.0.weight.exp_avg" in text
    assert "the checkpoint itself may have been replaced" in causes(certificate)


def test_another_version_of_a_library_is_named() -> None:
    run = trained()
    record = json.loads((run / "environment.json").read_text())
    record["starts"][0]["packages"]["fsspec"] = "1.0"
    (run / "environment.json").write_text(json.dumps(record))
    verified(run, "segments=1")
    write_points(changed=(0, 1, 2))
    assert "Versions changed since the run: fsspec 1.0 -> " in causes(verified(run, "segments=1", fails=True)[1])


def test_steps_that_do_not_repeat_their_own_bits_are_told() -> None:
    text = Path("points.py").read_text()
    noisy = "import time\n" + text.replace("return nn.functional", "return 1e-6 * (time.time() % 1) + nn.functional")
    Path("points.py").write_text(noisy)
    assert "an operation is not deterministic" in causes(verified(trained(), "segments=1", fails=True)[1])


def test_a_run_that_was_killed_and_resumed_and_one_whose_settings_changed() -> None:
    text = Path("points.py").read_text()
    killed = "loss = self.loss(batch)\n        os.environ.get('KILLED') and self.global_step == 7 and os._exit(1)\n"
    Path("points.py").write_text(text.replace("loss = self.loss(batch)\n", killed, 1))
    words = ("points.yaml", "trainer.max_epochs=2", "callbacks.checkpoint.save_top_k=1")
    legato("fit", *words, fails=True, KILLED="1")
    legato("fit", *words, "resume=auto")
    # the checkpoint from which it went on is not there any more
    _, certificate = verified(Path("runs/default/version_0"))
    assert [(each["from"], each["to"]) for each in certificate["segments"]] == [(None, "step-00000010")]
    assert [start["step"] for start in certificate["starts"]] == [0, 5]
    run = trained(name="second")
    changed = ("trainer.max_epochs=4", "trainer.leave_out_samples=[3]", "callbacks.checkpoint.every_n_train_steps=4")
    trained("resume=auto", *changed, name="second")
    assert [each["to"][-2:] for each in verified(run, "segments=all")[1]["segments"]] == ["05", "10", "12", "16", "20"]
    for step in (5, 10, 12):
        shutil.rmtree(run / f"checkpoints/step-000000{step:02}")
    text, certificate = verified(run)
    assert "Steps 1 to 16 cannot be verified. The config changed after step 10" in text
    assert [each["to"][-2:] for each in certificate["segments"]] == ["20"]


def test_runs_that_cannot_be_verified_are_refused_with_a_sentence() -> None:
    run = trained()
    (run / ".lock").write_text("held")
    assert "is still in progress" in legato("verify", str(run), fails=True).stderr
    (run / ".lock").unlink()
    for words, message in (
        (("segments=0",), "expected a number of segments"),
        (("devices=0",), "expected at least 1"),
        (("--out", str(run / "proof")), "is inside the run directory"),
        (("segment=3",), "Did you mean 'segments='?"),
    ):
        done = legato("verify", str(run), *words, fails=True)
        assert message in done.stderr
        assert done.returncode == 2
    run = trained("callbacks.checkpoint.save_weights_only=true", name="second")
    assert "has no complete checkpoint to compare with" in legato("verify", str(run), fails=True).stderr
    run = trained("trainer.reproducible=off", name="third")
    assert "numbers drawn with reproducible=off cannot be reproduced" in legato("verify", str(run), fails=True).stderr


BLOCKS = """
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, stream):
        return stream + self.outer(torch.tanh(self.inner(stream)))


class Net(lg.Task):
    def __init__(self, remote: bool = False, dies: bool = False):
        super().__init__()
        self.remote, self.dies = remote, dies
        if not remote:
            self.first = Block()
        self.blocks = nn.ModuleList([Block(), Block()])

    def remote_modules(self):
        return {"first": Block} if self.remote else {}

    def configure_blocks(self):
        return [self.first, *self.blocks]

    def tensor_plan(self):
        return {"blocks.*.inner": "column", "blocks.*.outer": "row"}

    def forward(self, stream):
        for block in self.configure_blocks():
            stream = block(stream)
        return stream

    def training_step(self, batch, batch_idx):
        if self.dies and self.global_step == 4 and self.global_rank == 1 and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(1)
        loss = (self(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        data = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), 4, shuffle=True)
"""
STRATEGIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "fsdp": ("{name: fsdp, shard_blocks: 40}", (), "2 processes: 9"),
    "fsdp, bitwise": ("{name: fsdp, shard_blocks: 40}", ("trainer.reproducible=bitwise",), "1 process: 9"),
    "tensor_shards": (
        "{name: mesh, tensor: 2, tensor_shards: 2}",
        ("trainer.reproducible=bitwise", "trainer.replicas=1"),
        "1 process: 9",
    ),
    "pipeline": ("{name: mesh, pipeline: 2}", ("trainer.replicas=1",), "2 processes: 9"),
    "ddp_model_parallel": (
        "{name: ddp_model_parallel, devices_per_replica: 2, micro_batches: 2}",
        ("trainer.devices=4", "trainer.reproducible=bitwise"),
        "1 process: 9",
    ),
    "data_parallel": ("data_parallel", ("trainer.replicas=1",), "1 process: 9"),
    "ddp_rpc": ("ddp_rpc", ("task.remote=true",), "2 processes: 9"),
    "elastic": ("{name: ddp, elastic: true}", ("task.dies=true",), "equal up to rounding"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_of_each_strategy_is_proven(name: str) -> None:
    """On one process, or on as many as it had; the elastic run has lost one."""
    strategy, options, expected = STRATEGIES[name]
    Path("blocks.py").write_text(BLOCKS)
    Path("points.yaml").write_text(CONFIG.replace("points.Net", "blocks.Net").replace("_steps: 4", "_steps: 3"))
    run = trained("trainer.max_epochs=1", "trainer.devices=2", f"trainer.strategy={strategy}", *options)
    assert (name == "elastic") == Path("died").exists()
    text, _ = verified(run, "segments=1")
    assert expected in text
    if name == "tensor_shards":
        assert "bitwise identical" in legato("replay", str(run), "step=2").stdout
        refused = legato("verify", str(run), "devices=3", fails=True)
        assert "The run's mesh has 2 processes. Set devices=2 or devices=1." in refused.stderr
        assert refused.returncode == 2
