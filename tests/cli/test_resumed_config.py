"""`resume=auto`: the run's own config goes on, and is what each command says of the run."""

import os
from pathlib import Path

import pytest
from forked import Forked, completed, run_module
from replayed_folder import CONFIG, RUN, TWO, legato, make_folder, trained
from waiting import free_port

from legato.trainer.checkpoints import reading
from legato.trainer.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
BITWISE = "trainer.reproducible=bitwise"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def values(run: Path, *keys: str) -> list[object]:
    config = RunDirectory(run).config
    return [config[key] for key in keys]


def test_a_resume_keeps_the_config_of_the_run_and_changes_what_is_set_now() -> None:
    Path("points.yaml").write_text(CONFIG.replace("  replicas: 2\n", ""))
    trained("task.rate=0.02", BITWISE, "trainer.max_epochs=2", *TWO)
    done = legato("fit", "points.yaml", "resume=auto", "trainer.devices=1", "trainer.max_epochs=3")
    assert "continues with the config of" not in done.stderr  # the file says nothing else than the run
    keys = ("task.rate", "trainer.reproducible", "trainer.devices", "trainer.replicas", "trainer.max_epochs", "resume")
    assert values(RUN, *keys) == [0.02, "bitwise", 1, 2, 3, None]
    first = RunDirectory(RUN).path / "starts" / "0.yaml"
    assert "devices: 2" in first.read_text()
    assert "replicas: 2" in (RUN / "config_given.yaml").read_text()
    assert "gradient_clip_val" not in (RUN / "config_given.yaml").read_text()

    replayed = legato("replay", str(RUN), "step=1", "until=3").stdout  # a step of the first start
    assert "bitwise identical" in replayed
    assert "replica 1, batch 0" in legato("samples", str(RUN), "step=1").stdout

    legato("fit", str(RUN / "config.yaml"))  # the same again, on one process
    weights = [
        reading.read_checkpoint(run / "checkpoints" / "step-00000015")["state_dict"]
        for run in (RUN, RUN.with_name("version_1"))
    ]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])


def test_an_entry_that_only_the_run_has_is_changed_and_taken_off() -> None:
    stop = "callbacks.stop={_target_: legato.callbacks.EarlyStopping, monitor: val/loss}"
    trained(stop, "trainer.max_epochs=1")
    legato("fit", "points.yaml", "resume=auto", "trainer.max_epochs=2", "callbacks.stop.patience=9")
    assert values(RUN, "callbacks.stop.patience") == [9]
    legato("fit", "points.yaml", "resume=auto", "trainer.max_epochs=3", "callbacks.stop=null")
    assert "callbacks.stop.patience" not in RunDirectory(RUN).config
    for words in (["resume=auto", "callbacks.stop=null"], ["callbacks.stop=null"]):
        done = completed(run_module, "legato", "fit", "points.yaml", *words)
        assert "override 'callbacks.stop=null': callbacks has no 'stop' to remove" in done.stderr


def test_a_run_goes_on_by_a_file_that_says_so() -> None:
    Path("points.yaml").write_text(f"{CONFIG}resume: auto\n")
    for epochs in ("1", "2"):
        legato("fit", "points.yaml", f"trainer.max_epochs={epochs}")
    assert [run.name for run in RUN.parent.iterdir() if run.name.startswith("version")] == [RUN.name]
    lines = (RUN / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len({line.partition(",")[0] for line in lines})
    assert values(RUN, "trainer.max_epochs") == [2]


def test_a_key_of_the_file_that_differs_is_told_with_both_values() -> None:
    trained("task.rate=0.02", "trainer.max_epochs=1")
    Path("points.yaml").write_text(CONFIG.replace("seed: 5", "seed: 6").replace("points.Net", "points.Net, rate: 0.5"))
    done = legato("fit", "points.yaml", "resume=auto", "trainer.max_epochs=2")
    warnings = [line for line in done.stderr.splitlines() if "continues with the config of" in line]
    assert len(warnings) == 1
    assert "task.rate is 0.02 in the run, not 0.5 (points.yaml:1)" in warnings[0]
    assert "seed is 5 in the run, not 6 (points.yaml:2)" in warnings[0]
    assert "max_epochs" not in warnings[0]
    assert values(RUN, "task.rate", "seed", "trainer.max_epochs") == [0.02, 5, 2]
    shown = legato("config", "points.yaml", "resume=auto", "task.rate=0.1").stdout
    assert "rate: 0.1 " in shown


def test_a_start_that_ends_before_it_saves_leaves_the_config_of_the_weights() -> None:
    trained("trainer.max_epochs=2", "trainer.limit_train_batches=8", "trainer.max_steps=6")
    before = (RUN / "config.yaml").read_text()
    done = legato("fit", "points.yaml", "resume=auto", "trainer.accumulate_grad_batches=2", fails=True)
    assert "accumulate_grad_batches" in done.stderr
    assert (RUN / "config.yaml").read_text() == before
    assert "accumulate_grad_batches: 2" in (RUN / "starts" / "1.yaml").read_text()


def test_another_task_of_the_same_name_is_refused() -> None:
    trained("trainer.max_epochs=1")
    with Path("points.py").open("a") as file:
        file.write("\n\nclass Other(Net):\n    pass\n")
    Path("other.yaml").write_text(CONFIG.replace("points.Net", "points.Other"))
    done = legato("fit", "other.yaml", "resume=auto", fails=True)
    assert done.returncode == 2
    assert "which trains 'points.Net', but this config has 'points.Other'" in done.stderr


def test_a_damaged_run_whose_config_was_taken_is_named() -> None:
    trained("trainer.max_epochs=1")
    legato("fit", "points.yaml", "trainer.max_epochs=1", "task.rate=0.02")
    for path in RUN.with_name("version_1").glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    done = completed(run_module, "legato", "fit", "points.yaml", "resume=auto")
    assert done.returncode == 2
    assert "used the config of" in done.stderr
    assert "version_0" in done.stderr


def test_a_rank_that_does_not_see_the_run_is_refused() -> None:
    """It would train with the values of the file, and rank 0 with those of the run."""
    trained("trainer.max_epochs=1", "task.rate=0.02", *TWO)
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("legato", "fit", "points.yaml", *TWO, "resume=auto", "trainer.max_epochs=2")
    ranks = [
        Forked(run_module, *words, *more, env={**place, "RANK": rank, "LOCAL_RANK": rank})
        for rank, more in (("0", ()), ("1", ("run.root=not_here",)))
    ]
    printed = [rank.communicate(timeout=100) for rank in ranks]
    assert all(rank.returncode for rank in ranks), printed
    assert "but rank 1 cannot find that run. Share the runs folder" in printed[1][1]
