"""Which weights `legato validate`, `test` and `predict` take: those of the run that the command line means."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line_folder import CONFIG, TASK
from forked import Forked, completed, run_module
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Validated, make_loader, make_trainer
from waiting import free_port

from legato.trainer.runs.directory import RunDirectory, find_runs

pytestmark = pytest.mark.slow


# Best is the highest loss, that of the first epoch: not the last step.
TASK = TASK.replace(
    "    val_dataloader = predict_dataloader = train_dataloader\n",
    """
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
    test_step = validation_step

    def prepare_data(self):
        open("touched", "w").close()

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            print(f"weights {float(self.layer.weight):.9f} {float(self.layer.bias):.9f}")

    on_test_start = on_validation_start

    def on_predict_start(self):
        self.on_validation_start()
""",
)
CONFIG = CONFIG.replace("max_epochs: 2", "max_epochs: 3") + (
    "callbacks:\n  checkpoint: {_target_: legato.callbacks.Checkpoint, monitor: val_loss, mode: max, save_top_k: 2}\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with three runs of one name, and one of another; each with weights of its own."""
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def legato(*arguments: str) -> subprocess.CompletedProcess[str]:
    return completed(run_module, "legato", *arguments)


def trained(*overrides: str) -> dict[str, list[str]]:
    """Fit; return the weights of each step that was validated, by the name of its checkpoint."""
    done = legato("fit", "line.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    printed = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("weights")]
    return {f"step-{3 * (index + 1):08d}": weights for index, weights in enumerate(printed)}


def evaluated(*arguments: str) -> list[str]:
    done = legato(*arguments)
    assert done.returncode == 0, done.stderr
    return next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("weights"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def break_checkpoint(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


BEST, NEXT, LAST = "step-00000003", "step-00000006", "step-00000009"


def test_a_runs_own_config_means_that_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through links, relative paths and in a copy of the folder; a copied config means the newest run."""
    (old, new), third = [trained(f"seed={seed}") for seed in (1, 2)], trained("run.name=other")
    assert old[BEST] != new[BEST] != third[BEST]
    stored = "runs/default/version_0/config.yaml"
    before = tree(folder / "runs")
    for words in ([], ["checkpoint=best"], ["checkpoint=null"]):
        assert evaluated("validate", stored, *words) == old[BEST]
    assert evaluated("validate", stored, "checkpoint=last") == old[LAST]
    assert evaluated("validate", str((folder / stored).resolve()), "trainer.enable_progress_bar=true") == old[BEST]
    (folder / "link.yaml").symlink_to(stored)
    (folder / "linked").symlink_to("runs/default/version_0")
    assert evaluated("test", "link.yaml") == evaluated("predict", "linked/config.yaml") == old[BEST]
    shutil.copytree("runs/default/version_0", "kept/good")
    assert evaluated("validate", "kept/good/config.yaml") == old[BEST]
    shutil.copy(stored, "copied.yaml")
    assert evaluated("validate", "copied.yaml") == new[BEST]
    assert evaluated("validate", stored, "run.name=other") == third[BEST]
    (folder / "tuned.yaml").write_text(f"extends: [{stored}]\n")
    assert evaluated("validate", "tuned.yaml") == new[BEST]
    assert evaluated("validate", stored, "checkpoint=runs/default/version_1") == new[LAST]
    (folder / "away").mkdir()
    shutil.copy("line.py", "away")
    monkeypatch.chdir("away")
    assert evaluated("validate", f"../{stored}", "run.root=written") == old[BEST]  # asked for elsewhere
    assert sorted(Path().glob("written/default/*/config.yaml"))
    monkeypatch.chdir(folder)
    after = tree(folder / "runs")
    assert {path: after[path] for path in before} == before  # what an evaluation writes disturbs no run


def test_an_evaluation_without_a_checkpoint_takes_the_newest_runs_best_and_says_so(folder: Path) -> None:
    trained("seed=1")
    weights = trained("seed=2")
    done = legato("validate", "line.yaml")
    assert weights[BEST] == done.stdout.splitlines()[0].split()[1:]
    lines = [line for line in done.stderr.splitlines() if BEST in line and "best" in line]
    assert len(lines) == 1
    assert "version_1" in lines[0]
    assert "checkpoint=none" in lines[0]
    # its own folder says what it took, so that it can be done again although other runs come after it
    stored = Path("runs/default/version_1/evaluations/validate/version_0/config.yaml")
    trained("seed=3")
    assert evaluated("validate", str(stored)) == weights[BEST]
    fresh = evaluated("predict", "line.yaml", "checkpoint=none")
    assert fresh == evaluated("test", "line.yaml", "checkpoint=none") != evaluated("test", "line.yaml")


def test_an_evaluation_lies_beside_its_run_at_the_step_of_its_checkpoint(folder: Path) -> None:
    """Two at once, too; nothing of the run changes, and no run directory is made."""
    trained()
    run = Path("runs/default/version_0")
    before = tree(run)
    processes = [Forked(run_module, "legato", "validate", "line.yaml") for _ in range(2)]
    assert [(process.communicate(timeout=100), process.returncode)[1] for process in processes] == [0, 0]
    evaluated("test", "line.yaml", f"checkpoint={run}", "run.name=other")  # of a run of another name, too
    evaluated("predict", str(run / "config.yaml"))
    after = tree(run)
    assert {path: after[path] for path in before} == before
    assert [path.name for path in Path("runs").glob("*/*")] == ["version_0"]
    evaluations = RunDirectory(run).evaluations
    assert sorted(evaluation.name for evaluation in evaluations) == [
        *("predict/version_0", "test/version_0", "validate/version_0", "validate/version_1")
    ]
    for evaluation in evaluations:
        assert evaluation.step == (9 if evaluation.name == "test/version_0" else 3)
        if "predict" not in evaluation.name:
            assert evaluation.last_point["step"] == evaluation.step
            assert evaluation.last_point["epoch"] == evaluation.step // 3 - 1
            events = EventAccumulator(str(evaluation.path)).Reload()
            assert [point.step for point in events.Scalars("val_loss")] == [evaluation.step]
    assert (run / "evaluations/predict/version_0/predictions.safetensors").exists()
    assert legato("export", "default", "out.safetensors").returncode == 0  # by a name, as show takes it
    assert load_file("out.safetensors").keys() == {"layer.weight", "layer.bias"}
    shown = legato("show", "default").stdout
    listed = legato("runs").stdout
    for evaluation in evaluations:
        values = f"val_loss {evaluation.last_point['val_loss']:.4g}" if evaluation.last_point else "logged nothing"
        assert re.search(rf"{evaluation.name} .* step {evaluation.step} +{values}\n", shown)
        assert re.search(rf"\n  {evaluation.name} +{evaluation.step} +{values}\n", listed)
    assert len([line for line in listed.splitlines() if line[0] != " "]) == 2
    assert [evaluation.path for evaluation in find_runs("runs")] == [run]


def test_an_evaluation_of_no_run_or_of_one_that_is_read_only_has_a_directory_of_its_own(folder: Path) -> None:
    trained()
    run = Path("runs/default/version_0")
    shutil.copy(run / "checkpoints" / BEST / "model.safetensors", "weights.safetensors")
    evaluated("validate", "line.yaml", "checkpoint=weights.safetensors")
    assert (folder / "runs/default/version_1/metrics.jsonl").exists()
    assert not (run / "evaluations").exists()
    (run / "evaluations").write_text("")  # nobody can make a folder here
    done = legato("validate", "line.yaml")
    assert done.returncode == 0, done.stderr
    assert "This evaluation uses a separate run directory. The run directory" in done.stderr
    assert (folder / "runs/default/version_2/metrics.jsonl").exists()


def test_a_trainer_that_evaluates_two_runs_writes_beside_each(tmp_path: Path) -> None:
    fitted = [make_trainer(tmp_path, logger=True, enable_checkpointing=True, max_steps=2) for _ in range(2)]
    for trainer in fitted:
        trainer.fit(Validated(), make_loader())
    runs = [tmp_path / "default" / f"version_{number}" for number in range(2)]
    trainer, task = make_trainer(tmp_path, logger=True), Validated()
    for run in (*runs, runs[0]):
        trainer.validate(task, make_loader(), ckpt_path=run, verbose=False)
    assert [[evaluation.name for evaluation in RunDirectory(run).evaluations] for run in runs] == [
        ["validate/version_0", "validate/version_1"],
        ["validate/version_0"],
    ]
    assert all(evaluation.last_point["step"] == 2 for run in runs for evaluation in RunDirectory(run).evaluations)
    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == ["version_0", "version_1"]


def test_without_a_best_it_is_the_last(folder: Path) -> None:
    weights = trained("callbacks.checkpoint.monitor=null")
    done = legato("test", "line.yaml")
    assert weights[LAST] == done.stdout.splitlines()[0].split()[1:]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_where_nothing_was_trained_that_is_an_error_before_data_is_touched(folder: Path, stage: str) -> None:
    for words in ([], ["checkpoint=best"], ["checkpoint=last"], ["checkpoint=bset"], ["checkpoint=runs/none"]):
        done = legato(stage, "line.yaml", *words)
        assert done.returncode == 1
        assert "checkpoint=none" in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 3
        assert ("Did you mean 'best'?" in done.stderr) == ("bset" in "".join(words))
    assert not (folder / "touched").exists()
    assert not list(folder.glob("runs/default/*"))


def test_a_run_without_a_checkpoint_does_not_stand_for_another(folder: Path) -> None:
    trained("seed=1")
    done = legato("fit", "line.yaml", "task.fault=bug")
    assert done.returncode == 1
    done = legato("validate", "runs/default/version_1/config.yaml", "task.fault=none")
    assert done.returncode == 1
    assert "runs/default/version_1" in done.stderr
    assert "version_0" not in done.stderr


def test_a_damaged_checkpoint_is_passed_over_with_a_word(folder: Path) -> None:
    weights = trained()
    checkpoints = Path("runs/default/version_0/checkpoints")
    assert {path.name for path in checkpoints.glob("step-*")} == {BEST, NEXT, LAST}
    for broken, taken in ((BEST, NEXT), (NEXT, LAST)):
        break_checkpoint(checkpoints / broken)
        for words in ([], ["checkpoint=best"]):
            done = legato("validate", "line.yaml", *words)
            assert done.returncode == 0, done.stderr
            assert weights[taken] == done.stdout.splitlines()[0].split()[1:], done.stderr
            assert f"{broken}" in done.stderr
            assert "damaged" in done.stderr
    break_checkpoint(checkpoints / LAST)
    done = legato("validate", "line.yaml")
    assert done.returncode == 1
    assert "no complete checkpoint" in done.stderr


def test_resume_auto_of_a_runs_own_config_goes_on_with_that_run(folder: Path) -> None:
    trained("seed=1")
    trained("seed=2")
    done = legato("fit", "runs/default/version_0/config.yaml", "resume=auto", "trainer.max_epochs=4")
    assert done.returncode == 0, done.stderr
    points = [
        json.loads(line)["step"] for line in Path("runs/default/version_0/metrics.jsonl").read_text().splitlines()
    ]
    assert max(points) == 12
    assert not Path("runs/default/version_2").exists()


def test_two_processes_take_the_same_run(folder: Path) -> None:
    """The choice is made once, before workers are started; under a launcher rank 0 makes it for all."""
    weights = trained()
    two = ["trainer.strategy=ddp", "trainer.devices=2"]
    done = legato("validate", "line.yaml", *two)
    assert done.returncode == 0, done.stderr
    assert " ".join(weights[BEST]) in done.stdout
    assert len(re.findall("checkpoint=none", done.stderr)) == 1
    assert len(list(Path("runs").glob("*/*/evaluations/validate/*"))) == 1  # the launcher's, which the workers write to
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Forked(run_module, "legato", "validate", *words, env={**environment, "RANK": rank, "LOCAL_RANK": rank})
        for rank, words in (("0", ["line.yaml", *two]), ("1", ["line.yaml", *two, "run.root=not_here"]))
    ]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all(" ".join(weights[BEST]) in out for out, _ in outputs)
    assert [err.count("checkpoint=none") for _, err in outputs] == [1, 0]


def test_a_launcher_is_told_the_checkpoint_of_the_run_that_is_meant(folder: Path) -> None:
    """What it sends to other machines are values: there nothing tells whose config they were."""
    for seed in (1, 2):
        trained(f"seed={seed}")
    (folder / "sbatch").write_text("#!/bin/sh\necho '7;cluster'\n")
    (folder / "sbatch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    stored = "runs/default/version_0/config.yaml"
    for command, words in (("test", []), ("fit", ["resume=auto"])):
        done = completed(run_module, "legato", command, stored, "launcher=slurm", *words, env=environment)
        errors = done.stderr
        if command == "fit":
            assert done.returncode == 2
            assert "resumes the newest run of 'default', " in errors
            assert "/runs/default/version_1, but this config" in errors
        else:
            assert done.returncode == 0, errors
            (sent,) = folder.rglob("slurm/*.yaml")
            assert f"version_0/checkpoints/{BEST}" in sent.read_text()
