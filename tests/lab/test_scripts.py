"""Runs that a script of one's own began: samples, replay and compare --bits run that script again up to its fit."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from forked import completed, run_module, run_program
from replayed_folder import RUN, json_lines, legato, make_folder, once, tree

from legato.base.errors import ConfigError, DataError
from legato.lab.study import history_of

pytestmark = pytest.mark.slow

TRAIN = """
import sys
from pathlib import Path

import legato as lg
from legato.callbacks import Checkpoint
from points import Net, Points
from torch.utils.data import DataLoader


class Again(Net):
    "A class of __main__."


def main(devices, reproducible="order", rate="0.05"):
    print("the script's own words")
    lg.seed_everything(3)
    threads = {"threads": 1} if reproducible == "bitwise" else {}
    trainer = lg.Trainer(
        max_epochs=3, log_every_n_steps=1, accelerator="cpu", devices=int(devices), reproducible=reproducible,
        strategy="ddp" if devices != "1" else "auto", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Checkpoint(every_n_train_steps=4, save_top_k=-1, dirpath=Path("kept") / devices)], **threads,
    )
    trainer.fit(Again(rate=float(rate)), DataLoader(Points(), 3, shuffle=True), DataLoader(Points(8), 3), resume="auto")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
PROCESSES = [("1", "order"), ("2", "bitwise")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_folder(tmp_path, monkeypatch)
    (made / "train.py").write_text(TRAIN)
    return made


def run(*words: str) -> str:
    done = completed(run_program, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def begun(*words: str) -> None:
    once(run, "train.py", *words)


def loss(run: Path, step: int) -> float:
    return next(
        value
        for point in json_lines(run / "metrics.jsonl")
        for value in [point.get("train/loss_step")]
        if point["step"] == step and value is not None
    )


@pytest.mark.parametrize(("processes", "reproducible"), PROCESSES)
def test_a_run_of_a_script_is_replayed_by_its_command(folder: Path, processes: str, reproducible: str) -> None:
    """From a checkpoint outside of the run's folder, and from the start; from any folder."""
    begun(processes, reproducible)
    before, kept = tree(RUN), tree(folder / "kept")
    done = legato("replay", str(RUN), "step=7", "until=8")
    assert f"Replayed steps 5 to 8 of {RUN.absolute()}, from the checkpoint of step 4" in done.stdout
    assert "bitwise identical" in done.stdout
    assert f"Step 7: loss {loss(RUN, 7):.9g}," in done.stdout
    assert "the script's own words" not in done.stdout
    shutil.move(folder / "kept", folder / "away")
    (folder / "elsewhere").mkdir()
    done = completed(run_module, "legato", "replay", str(RUN.absolute()), "step=3", cwd=folder / "elsewhere")
    assert "from the start of the run" in done.stdout
    assert "bitwise identical" in done.stdout
    assert (tree(RUN), sorted(path.name for path in RUN.parent.iterdir())) == (
        before,
        ["version_0", "version_0.replay-0", "version_0.replay-1"],
    )
    assert [content for content, _ in tree(folder / "away").values()] == [content for content, _ in kept.values()]
    assert list((folder / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(("processes", "reproducible"), PROCESSES)
def test_its_steps_have_the_samples_that_the_run_has_seen(processes: str, reproducible: str) -> None:
    """As the loader of the same step gives them under `legato fit`, which other tests compare with what a run saw."""
    begun(processes, reproducible)
    lines = legato("samples", str(RUN), "step=4").stdout.splitlines()
    batches = 10 // int(processes)
    assert re.search(rf"epoch 0, step 4 of {batches} in the epoch: {3 * int(processes)} samples", lines[0])
    assert len(lines) == 1 + int(processes)
    index = lines[-1].split()[-1]
    steps = legato("samples", str(RUN), f"index={index}").stdout
    assert "step 4  epoch 0" in steps
    assert "was seen 3 times" in steps
    replayed = legato("replay", str(RUN), "step=4").stdout
    assert "\n".join(lines[1:]) in replayed


@pytest.mark.parametrize(("processes", "reproducible"), PROCESSES)
def test_its_operations_are_recorded_and_compared(folder: Path, processes: str, reproducible: str) -> None:
    begun(processes, reproducible)
    legato("replay", str(RUN), "step=5", "--operations", "before.jsonl")
    assert "points.py:" in Path("before.jsonl").read_text()
    text = (folder / "points.py").read_text()
    (folder / "points.py").write_text(text.replace("nn.functional.mse_loss(", "1.01 * nn.functional.mse_loss("))
    legato("replay", str(RUN), "step=5", "--operations", "after.jsonl")
    same = legato("compare", "before.jsonl", "before.jsonl").stdout
    assert "No operation in this step differs" in same
    comparison = legato("compare", "before.jsonl", "after.jsonl").stdout
    assert "The first operation that differs is in the forward of replica 0" in comparison
    assert re.search(r"(?m)^  line .*points\.py:\d+$", comparison)


def test_the_first_difference_of_two_scripts_is_told_with_modules_of_one_name(folder: Path) -> None:
    begun("1", "order")
    (folder / "other").mkdir()
    (folder / "other" / "points.py").write_text((folder / "points.py").read_text())
    (folder / "other" / "train.py").write_text(TRAIN)
    run("train.py", "1")  # resume=auto: the same run goes on, and has no step left
    assert legato("replay", str(RUN), "step=9").returncode == 0
    same = completed(run_program, "train.py", "1", cwd=folder / "other")
    assert same.returncode == 0, same.stderr
    second_run = folder / "other" / RUN
    assert "bitwise identical up to step 30" in legato("compare", str(RUN), str(second_run), "--bits").stdout
    shutil.rmtree(folder / "other" / "runs")
    shutil.rmtree(folder / "other" / "kept")
    text = (folder / "points.py").read_text()
    (folder / "other" / "points.py").write_text(text.replace("nn.Dropout(0.2)", "nn.Dropout(0.1)"))
    completed(run_program, "train.py", "1", cwd=folder / "other")
    comparison = legato("compare", str(RUN), str(second_run), "--bits").stdout
    assert "The runs first differ at step 1." in comparison
    assert "no longer matches the run" not in comparison


def test_a_replay_on_two_processes_by_the_trainers_arguments() -> None:
    begun("2", "bitwise")
    done = legato("replay", str(RUN), "step=6", "trainer.devices=2", "trainer.strategy=ddp")
    assert "bitwise identical" in done.stdout
    for word, message in (
        ("task.rate=1", "a script started this run and creates its task, data and callbacks"),
        ("trainer.devcies=2", "Did you mean 'devices'?"),
    ):
        assert message in legato("replay", str(RUN), "step=6", word, fails=True).stderr


def test_each_fit_of_a_script_is_its_own_run(folder: Path) -> None:
    """A fit is told by the number of its Trainer and its number there; evaluations and fits before it do nothing."""
    text = TRAIN.replace("main(*sys.argv[1:])", "[main('1', 'order', rate) for rate in ('0.05', '0.01')]")
    text = text.replace(', resume="auto"', "").replace(', dirpath=Path("kept") / devices', "")
    text = text.replace("DataLoader(Points(),", "DataLoader(Points(30 if rate == '0.05' else 33),")
    before = "    trainer.validate(Again(), DataLoader(Points(8), 3), verbose=False)\n    trainer.fit("
    (folder / "several.py").write_text(text.replace("    trainer.fit(", before))
    run("several.py")
    runs = sorted(RUN.parent.iterdir())
    fits = [path for path in runs if (path / "checkpoints").is_dir()]
    assert (len(runs), len(fits)) == (4, 2)
    for path in fits:
        done = legato("replay", str(path), "step=6")
        assert "Skipped the script's earlier fits and evaluations" in done.stderr
        assert "bitwise identical" in done.stdout
    assert "does not record how training started" in legato("replay", str(runs[0]), "step=1", fails=True).stderr


def test_a_module_and_a_launcher(folder: Path) -> None:
    """`python -m`, with a relative import; each process of torchrun, which reads LOCAL_RANK."""
    (folder / "package").mkdir()
    (folder / "package" / "points.py").write_text((folder / "points.py").read_text())
    text = TRAIN.replace("from points", "from .points")
    (folder / "package" / "train.py").write_text(text)
    run("-m", "package.train", "2", "bitwise")
    assert "bitwise identical" in legato("replay", str(RUN), "step=7").stdout
    shutil.rmtree("runs")
    shutil.rmtree("kept")
    text = f"import os\nprint(os.environ['LOCAL_RANK'])\n{TRAIN}"
    (folder / "launched.py").write_text(text)
    run("-m", "torch.distributed.run", "--nproc-per-node=2", "launched.py", "2", "bitwise")
    assert "bitwise identical" in legato("replay", str(RUN), "step=7").stdout
    assert legato("samples", str(RUN), "step=7").stdout.count("replica") == 2


def test_what_has_changed_is_told(folder: Path) -> None:
    begun("1", "order")
    shutil.rmtree("kept")
    (folder / "train.py").write_text(TRAIN.replace("float(rate)", "2 * float(rate)"))
    done = legato("replay", str(RUN), "step=3", fails=True)
    assert f"{folder / 'train.py'} has changed since the run" in done.stderr
    assert "The replay differs from the run" in done.stderr
    (folder / "train.py").write_text(TRAIN.replace("    trainer.fit(", "    return\n    trainer.fit("))
    done = legato("replay", str(RUN), "step=7", fails=True)
    assert "train.py ended before fit call 1 on Trainer 1, which started the run" in done.stderr
    (folder / "train.py").write_text(TRAIN.replace("    trainer.fit(", "    1 / 0\n    trainer.fit("))
    done = legato("replay", str(RUN), "step=7", fails=True)
    assert "ZeroDivisionError" in done.stderr
    assert "train.py to rebuild the run's task and data" in done.stderr
    (folder / "train.py").unlink()
    done = legato("replay", str(RUN), "step=7", fails=True)
    assert "train.py does not exist" in done.stderr


def test_a_notebook_is_refused_with_the_way_out(folder: Path) -> None:
    run("-c", "import train; train.main('1')")
    for command in ("replay", "samples"):
        assert "legato.lab.replay(run, step, make=make)" in legato(command, str(RUN), "step=7", fails=True).stderr
    record = json.loads((RUN / "environment.json").read_text())
    record["starts"][0] |= {"script": "/bin/legato", "command": [sys.executable, "/bin/legato", "lightning", "x.py"]}
    (RUN / "environment.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="started with `legato lightning`"):
        history_of(RUN).make(7, 7)


def test_python_studies_runs_of_scripts_and_configs_by_one_door() -> None:
    """Also in another folder, which the process has afterwards as before, with its arguments and `__main__`."""
    begun("2", "bitwise")
    legato("fit", "points.yaml", "run.name=configured")
    runs = [RUN.absolute(), Path("runs/configured/version_0").absolute()]
    assert completed(study, *map(str, runs)).returncode == 0


def study(*paths: str) -> None:
    import legato as lg

    os.chdir("/")
    before = Path.cwd(), sys.argv, [*sys.path], sys.modules["__main__"]
    for path in paths:
        run = lg.runs.open(path)
        records = lg.lab.samples(run, 4)
        assert records == lg.lab.samples(path, 4)
        assert {record["loader"] for record in records} == {""}
        assert all(len(record["indices"]) == 3 for record in records)
        replayed = lg.lab.replay(run, 7, 8)
        assert [record["step"] for record in replayed.steps()] == [7, 8]
        assert replayed.holds
        verification = lg.lab.verify(run, 1, seed=2, out=f"{path}.proof")
        assert verification.is_proven
        assert {file.name for file in Path(f"{path}.proof").iterdir()} == {"certificate.json", "certificate.txt"}
        for wrong, error in ((0, ConfigError), ("7", ConfigError), (99, DataError)):
            with pytest.raises(error):
                lg.lab.replay(run, wrong)
    assert before == (Path.cwd(), sys.argv, sys.path, sys.modules["__main__"])
