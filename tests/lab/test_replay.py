"""`legato replay`: steps of a run, computed again from its directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, completed, run_module, run_program
from replayed_folder import RUN, TWO, json_lines, legato, make_folder, trained, tree
from resumed_run import scalars

from legato.trainer.checkpoints import reading

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"(?m)^Step (\d+): loss ([\d.e+-]+)", text)}


@pytest.mark.parametrize(
    ("options", "to_the_bit"), [((), True), (TWO, False), ((*TWO, "trainer.reproducible=bitwise"), True)]
)
def test_a_replay_has_the_losses_of_the_run_and_leaves_it_as_it_is(options: tuple[str, ...], to_the_bit: bool) -> None:
    """On one process, whatever the run had; from a checkpoint, and from the start."""
    run = trained(*options)
    before, times = tree(run), {path: path.stat().st_mtime_ns for path in (run, run / "checkpoints")}
    points = {point["step"]: point.get("train/loss_step") for point in json_lines(run / "metrics.jsonl")}
    done = legato("replay", str(run), "step=11", "until=14")
    assert "Replayed steps 9 to 14 of runs/default/version_0, from the checkpoint of step 8" in done.stdout
    replayed = losses(done.stdout)
    assert sorted(replayed) == [11, 12, 13, 14]
    for step, loss in replayed.items():
        assert loss == pytest.approx(points[step], rel=1e-6)
    assert "bitwise identical" in done.stdout or (not to_the_bit and "equal up to rounding" in done.stdout)
    assert "largest gradients: net." in done.stdout
    samples = legato("samples", str(run), "step=12").stdout.splitlines()[1:]
    assert "\n".join(samples) in done.stdout
    done = legato("replay", str(run), "step=3")
    assert "from the start of the run" in done.stdout
    assert losses(done.stdout)[3] == pytest.approx(points[3], rel=1e-6)
    assert tree(run) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert sorted(path.name for path in run.parent.iterdir()) == [
        "version_0",
        "version_0.replay-0",
        "version_0.replay-1",
    ]


def test_a_checkpoint_of_any_step_is_that_which_the_run_would_have_written() -> None:
    run = trained()
    legato("replay", str(run), "step=16", "save=saved")
    legato("replay", str(run), "step=10", "save=saved")
    ours, theirs = (reading.read_checkpoint(path / "step-00000016") for path in (Path("saved"), run / "checkpoints"))
    assert all(bool((ours["state_dict"][name] == value).all()) for name, value in theirs["state_dict"].items())
    same = {name for name in ours["state"] if name not in ("elapsed",)}
    assert {name: ours["state"][name] for name in same} == {name: theirs["state"][name] for name in same}
    legato("fit", "points.yaml", "resume=saved/step-00000010", "run.name=second")
    first, second = (json_lines(Path(f"runs/{name}/version_0/metrics.jsonl"))[-1] for name in ("default", "second"))
    assert first["train/loss_epoch"] == second["train/loss_epoch"]


def test_other_code_than_the_run_had_is_named_and_told_by_the_proof() -> None:
    identity = ["-c", "user.name=user", "-c", "user.email=user@host"]
    Path("helper.py").write_text("A = 1\n")
    for words in (["init", "-q"], ["add", "points.py", "points.yaml"], [*identity, "commit", "-qm", "begin"]):
        subprocess.run(["git", *words], check=True)
    text = Path("points.py").read_text()
    text = text.replace("0.01 *", "0.02 *")
    Path("points.py").write_text(text)  # not committed when the run begins
    run = trained()
    assert "Code has changed" not in legato("replay", str(run), "step=7").stderr
    Path("points.py").write_text(text.replace("nn.Dropout(0.2)", "nn.Dropout(0.25)"))
    done = legato("replay", str(run), "step=7", fails=True)
    assert re.search(r"Code has changed since the run \(commit \w{12}\): points.py\.", done.stderr)
    assert "The replay differs from the run" in done.stderr
    assert "the first that differs is 'train/loss_step' of step 5" in done.stderr
    Path("points.py").write_text(text.replace("0.02 *", "0.03 *"))
    done = legato("replay", str(run), "step=7", fails=True)
    assert "The replay differs from the run: the samples in the dataset have changed." in done.stderr


@pytest.mark.parametrize("options", [(), (*TWO, "trainer.reproducible=bitwise")])
def test_another_environment_than_the_run_had_is_named(options: tuple[str, ...]) -> None:
    """From the start of the run by its record, from a checkpoint by that."""
    run = trained(*options)
    text = Path("points.py").read_text()
    Path("points.py").write_text(
        text.replace("import torch\n", "import torch\ntorch.backends.mkldnn.enabled = False\n", 1)
    )
    # its bits may be those of the run, or not
    first = completed(run_module, "legato", "replay", str(run), "step=2", env={**os.environ, "NCCL_ALGO": "Ring"})
    warning = (
        "The environment differs from the run's: mkldnn True -> False, NCCL_ALGO None -> Ring. Results may differ."
    )
    assert warning in first.stderr
    later = completed(run_module, "legato", "replay", str(run), "step=7", env={**os.environ, "NCCL_ALGO": "Ring"})
    assert "mkldnn: True -> False, NCCL_ALGO: None -> Ring" in later.stderr
    assert ("would not stay bitwise identical" in later.stderr) == bool(options)


def test_a_run_that_was_resumed_with_another_config_is_replayed_in_parts() -> None:
    trained("trainer.max_epochs=2")
    run = trained("resume=auto", "trainer.max_epochs=4", "trainer.gradient_clip_val=0.1")
    done = legato("replay", str(run), "step=9", "until=12", fails=True)
    assert "The config changed after step 10" in done.stderr
    assert "(until=10)" in done.stderr
    for words in (("step=9", "until=10"), ("step=11", "until=12")):
        assert "bitwise identical" in legato("replay", str(run), *words).stdout


def test_further_callbacks_see_a_run_afterwards() -> None:
    """Their values stand beside the run's, under the name of the replay, for each step asked for."""
    run = trained(*TWO, "trainer.reproducible=bitwise")
    before = tree(run)
    extra = ("callbacks.extra._target_=legato.lab.Microscope", "callbacks.extra.every_n_steps=2")
    assert "bitwise identical" in legato("replay", str(run), "step=6", "until=20", *extra).stdout
    replay = run.with_name("version_0.replay-0")
    points = {point["step"]: point for point in json_lines(replay / "metrics.jsonl")}
    name = "gradients/net.0"
    assert [step for step in points if name in points[step]] == list(range(6, 21, 2))
    assert [event for tag, event in scalars(replay) if tag == name] == list(range(6, 21, 2))
    assert tree(run) == before


def test_the_debugger_opens_in_training_step() -> None:
    run = trained()
    process = Forked(run_debugged, str(run), "step=6", "--debug", "replica=1")
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, None), err
    assert "-> loss = self.loss(batch)" in out
    assert "('seen', 5, 0)" in out
    assert "bitwise identical" in out


def run_debugged(*arguments: str) -> None:
    """Answer the debugger's questions from a pipe."""
    import io

    sys.stdin = io.StringIO("p ('seen', self.global_step, batch_idx)\nc\n")
    run_module("legato", "replay", *arguments)


def test_mistakes_are_named() -> None:
    run = str(trained("trainer.max_epochs=1"))
    for words, message in (
        (("step=0",), "Expected 1 <= first step"),
        (("stpe=3",), "Did you mean 'step='?"),
        (("step=3", "jobs=2"), "'jobs=2' is neither one of"),
        (("steps=3",), "Did you mean 'step='?"),
        ((), "legato replay needs a run and a step"),
        (("step=9",), "The replay ended after step 5"),
    ):
        assert message in legato("replay", run, *words, fails=True).stderr
    assert "There is no run" in legato("replay", str(RUN / "nothing"), "step=1", fails=True).stderr


def test_a_replay_writes_into_no_run() -> None:
    run = trained("trainer.max_epochs=1")
    before = tree(run)
    Path("link").symlink_to(run)
    for words in (f"save={run}", "save=link/again"):
        done = legato("replay", str(run), "step=5", words, fails=True)
        assert f"is inside the run directory {run.absolute()}" in done.stderr
    assert tree(run) == before
    legato("replay", str(run), "step=5", "save=elsewhere")
    assert (Path("elsewhere") / "step-00000005").is_dir()


def test_steps_beyond_the_end_of_a_run_are_refused() -> None:
    run = trained("trainer.max_epochs=1")
    error = legato("replay", str(run), "step=5", "until=9", fails=True).stderr
    assert "The replay ended after step 5, because the run has no step 9" in error


def test_a_damaged_checkpoint_is_named_by_the_replay_that_begins_earlier() -> None:
    run = trained()
    (run / "checkpoints/step-00000016/state.json").write_text("{}")
    done = legato("replay", str(run), "step=18")
    assert "Skipping the incomplete checkpoint step-00000016" in done.stderr
    assert "from the checkpoint of step 12" in done.stdout


SCRIPT = """
import sys
import torch
import legato as lg
from legato.callbacks import Checkpoint
from torch.utils.data import DataLoader
from points import Net, Points

def make(**more):
    task = Net()
    keeps = [Checkpoint(every_n_train_steps=4, save_top_k=-1, dirpath="kept")]
    trainer = lg.Trainer(max_epochs=3, log_every_n_steps=1, accelerator="cpu", callbacks=keeps, **more)
    return trainer, task, DataLoader(Points(), 3, shuffle=True), DataLoader(Points(8), 3)

if __name__ == "__main__":
    trainer, task, training, validation = make(devices=int(sys.argv[1]), reproducible=sys.argv[2])
    trainer.fit(task, training, validation)
"""
AGAIN = """
import sys
import legato as lg
from legato.base.errors import ConfigError
from script import make
again = lambda: make(devices=1, reproducible=sys.argv[2])
found = lg.lab.replay("runs/default/version_0", 7, 8, make=again)
print([(one["step"], one["loss"]) for one in found.steps()])
assert lg.lab.replay("runs/default/version_0", 7, 8, make=again).steps() == found.steps()
used = again()
lg.lab.replay("runs/default/version_0", 8, make=lambda: used)
for wrong in (used[0], lambda: used, lambda: None):
    try:
        lg.lab.replay("runs/default/version_0", 3, make=wrong)
    except ConfigError as error:
        assert "needs a function that creates a new trainer" in str(error)
    else:
        raise AssertionError(wrong)
"""


@pytest.mark.parametrize(("processes", "reproducible"), [("1", "order"), ("2", "bitwise")])
def test_a_run_of_ones_own_script_is_replayed_by_what_the_script_makes(
    folder: Path, processes: str, reproducible: str
) -> None:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "again.py").write_text(AGAIN)
    run_script(folder, "script.py", processes, reproducible)
    before, kept = tree(RUN), tree(folder / "kept")
    points = {point["step"]: point.get("train/loss_step") for point in json_lines(RUN / "metrics.jsonl")}
    done = run_script(folder, "again.py", processes, reproducible)
    assert "bitwise identical" in done
    printed = dict(re.findall(r"\((\d+), ([\d.e+-]+)\)", done))
    assert [float(printed[step]) for step in ("7", "8")] == pytest.approx([points[7], points[8]], rel=1e-6)
    assert (tree(RUN), tree(folder / "kept")) == (before, kept)


def run_script(folder: Path, *words: str) -> str:
    done = completed(run_program, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replay_crosses_a_resume_on_other_processes() -> None:
    """The bits of a run that went from two processes to one, by one config or the other."""
    trained(*TWO, "trainer.reproducible=bitwise", "trainer.min_steps=6", "trainer.max_time=00:00:00:00")
    step = json_lines(RUN / "metrics.jsonl")[-1]["step"]
    run = trained("resume=auto", "trainer.devices=1", "trainer.max_time=null", "trainer.min_steps=null")
    assert 5 < step < 20
    done = legato("replay", str(run), f"step={step}", f"until={step + 2}")
    assert "bitwise identical" in done.stdout


def test_a_replay_tells_where_it_begins_and_how_many_steps_it_takes() -> None:
    run = trained()
    for path in (run / "checkpoints").glob("step-*"):
        if path.name < "step-00000016":
            shutil.rmtree(path)
    done = legato("replay", str(run), "step=7")
    assert (
        "The replay starts from the start of the run, as there is no earlier checkpoint, and computes 7 steps."
        in done.stderr
    )
    done = legato("replay", str(run), "step=18")
    assert "The replay starts from the checkpoint of step 16 and computes 2 steps" in done.stderr


def test_a_replay_that_is_stopped_does_not_advise_to_resume() -> None:
    run = trained()
    hook = (
        "    def on_train_batch_end(self, outputs, batch, batch_idx):\n        signal.raise_signal(signal.SIGTERM)\n\n"
    )
    text = Path("points.py").read_text().replace("    def loss(self", f"{hook}    def loss(self")
    Path("points.py").write_text(f"import signal\n{text}")
    done = legato("replay", str(run), "step=7", fails=True)
    assert "SIGTERM: stopped at step" in done.stderr
    assert "there is nothing to save." in done.stderr
    assert "resume=auto" not in done.stderr
    assert not list(run.parent.glob("*.replay-*/checkpoints"))


def test_pieces_of_batches_on_several_devices_are_replayed_to_the_bit() -> None:
    text = Path("points.py").read_text().replace("nn.BatchNorm1d(6), ", "").replace("bad), 3", "bad), 6")
    Path("points.py").write_text(text)
    pieces = "trainer.strategy={name: ddp_model_parallel, micro_batches: 2, split: [2, 2]}"
    run = trained(pieces, "trainer.devices=4", "trainer.reproducible=bitwise")
    assert "bitwise identical" in legato("replay", str(run), "step=7").stdout
    assert "bitwise identical" in legato("replay", str(run), "step=7", pieces, "trainer.devices=2").stdout
