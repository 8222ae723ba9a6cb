"""Loggers, and metrics.jsonl: real files, real processes that die."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Tiny, make_loader, make_trainer

from legato.loggers import CSVLogger, JSONLinesLogger, Logger, NoExperiment, TensorBoardLogger


def read_lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def run_python(code, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


# --- what all loggers have in common ----------------------------------------------------------------------------------


def test_import_and_construction_load_no_tensorboard():
    code = (
        "import sys, legato.loggers as loggers\n"
        "loggers.TensorBoardLogger(); loggers.JSONLinesLogger(); loggers.Logger()\n"
        "assert not [name for name in sys.modules if name.startswith(('tensorboard', 'torch'))], list(sys.modules)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_logger_is_an_attribute_error():
    import legato.loggers as loggers

    with pytest.raises(AttributeError, match="WandB"):
        _ = loggers.WandB


@pytest.mark.parametrize("kind", [Logger, TensorBoardLogger, JSONLinesLogger, CSVLogger])
def test_a_logger_that_is_not_open_is_silent(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = kind()
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_text("note", "text", 1)
    logger.save()
    logger.finalize("success")
    assert (logger.name, logger.version, logger.save_dir, logger.log_dir) == (None,) * 4
    logger.experiment.add_image("image", None).anything(1)
    assert list(tmp_path.iterdir()) == []


def test_no_experiment_takes_every_call():
    with NoExperiment() as experiment:
        assert experiment.add_figure("tag", 1, step=2) is experiment
    assert cloudpickle.loads(cloudpickle.dumps(experiment)).add_text("tag", "text") is not None


class Asks(Tiny):
    def on_train_start(self):
        folders = self.trainer.strategy.collectives.gather_objects([logger.log_dir for logger in self.loggers])
        assert folders == [[str(self.trainer.run_dir)] * 3] * 2

    def training_step(self, batch, batch_idx):
        self.log("asked", 1.0, prog_bar=True)
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Drops(Tiny):
    def on_fit_start(self):
        self.trainer.loggers = []


@pytest.mark.slow
def test_every_process_knows_where_a_run_is_logged_and_how_it_ended(tmp_path):
    loggers = [TensorBoardLogger(), JSONLinesLogger(), CSVLogger()]
    trainer = make_trainer(tmp_path, logger=loggers, strategy="ddp", devices=2, max_epochs=5)
    trainer.fit(Asks(), make_loader())
    assert [logger.log_dir for logger in loggers] == [str(trainer.run_dir)] * 3
    assert {(logger.name, logger.version) for logger in loggers} == {(trainer.run_dir.parent.name, 0)}
    assert (trainer.progress_bar_metrics["asked"], trainer.should_stop, trainer.current_epoch) == (1.0, True, 0)
    trainer.fit(Drops(), make_loader())
    assert trainer.loggers == loggers


@pytest.mark.parametrize("kind", [TensorBoardLogger, JSONLinesLogger, CSVLogger])
def test_names_come_from_the_run_directory(kind, tmp_path):
    logger = kind()
    logger.open(tmp_path / "digits" / "version_3", None)
    assert (logger.name, logger.version, logger.save_dir) == ("digits", 3, str(tmp_path))
    assert Path(logger.log_dir).is_relative_to(tmp_path / "digits" / "version_3")
    logger.finalize("success")


@pytest.mark.parametrize("kind", [TensorBoardLogger, JSONLinesLogger, CSVLogger])
def test_an_open_logger_travels_closed(kind, tmp_path):
    logger = kind()
    logger.open(tmp_path / "run" / "version_0", None)
    logger.log_metrics({"loss": 1.0}, 1)
    twin = cloudpickle.loads(cloudpickle.dumps(logger))
    twin.log_metrics({"loss": 2.0}, 2)
    assert isinstance(twin.experiment, NoExperiment)
    logger.finalize("success")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1


# --- JSON lines -------------------------------------------------------------------------------------------------------


def test_each_step_is_one_line_of_strict_json(tmp_path):
    logger = JSONLinesLogger()
    logger.open(tmp_path, None)
    before = time.time()
    logger.log_metrics({"train/loss": 0.5, "epoch": 0}, 50)
    logger.log_metrics({"lr-AdamW": 1e-3}, 50)
    logger.log_metrics({"train/loss": math.nan, "a": math.inf, "b": -math.inf, "epoch": 1}, 100)
    logger.log_metrics({"val/acc": torch.tensor(0.25), "n": numpy.int64(3), "time": 7, "step": 8}, 100)
    logger.finalize("success")
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first.keys() == {"step", "time", "epoch", "train/loss", "lr-AdamW"}
    assert (first["step"], first["epoch"], first["train/loss"], first["lr-AdamW"]) == (50, 0, 0.5, 1e-3)
    assert before - 1 <= first["time"] <= time.time() + 1
    assert [second[name] for name in ("train/loss", "a", "b")] == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(float(second["train/loss"]))
    assert float(second["b"]) == -math.inf
    assert [second[name] for name in ("val/acc", "n", "time_", "step_", "step")] == [0.25, 3, 7, 8, 100]


def test_every_line_is_json_at_all_times_and_a_newline_makes_it_final(tmp_path):
    logger, path = JSONLinesLogger(), tmp_path / "metrics.jsonl"
    logger.open(tmp_path, None)
    final = b""
    for step in range(1, 6):
        for name in ("train/loss", "val/loss"):
            logger.log_metrics({name: step / 7}, step)
            content = path.read_bytes()
            assert [line["step"] for line in read_lines(path)] == list(range(1, step + 1))
            assert content.startswith(final)
            final = content[: content.rindex(b"\n") + 1] if b"\n" in content else b""
    logger.log_metrics({"train/loss": 0}, 5)  # shorter than what stood there
    assert read_lines(path)[-1]["train/loss"] == 0
    logger.finalize("success")
    assert path.read_bytes().endswith(b"}\n")


def test_a_killed_process_loses_no_line(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from legato.loggers import CSVLogger, JSONLinesLogger\n"
        "logger = JSONLinesLogger()\n"
        "logger.open(Path(sys.argv[1]), None)\n"
        "for step in range(1, 101): logger.log_metrics({'loss': 1 / step}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_python(code, tmp_path).returncode == -9
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 101))


def test_a_resume_cuts_later_steps_and_repeats_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JSONLinesLogger()
    logger.open(tmp_path, None)
    for step in range(10, 101, 10):
        logger.log_metrics({"loss": float(step)}, step)
    with path.open("ab") as file:
        file.write(b'\n{"step": 110, "lo')  # torn by a power cut
    logger = JSONLinesLogger()
    logger.open(tmp_path, 80)
    assert [line["step"] for line in read_lines(path)] == list(range(10, 81, 10))
    logger.log_metrics({"loss": -1.0, "val/acc": 0.5}, 80)  # the validation of step 80 is done again
    for step in range(90, 161, 10):
        logger.log_metrics({"loss": float(step)}, step)
    logger.finalize("success")
    lines = read_lines(path)
    assert [line["step"] for line in lines] == list(range(10, 161, 10))
    assert all(line["loss"] == line["step"] for line in lines)
    assert lines[7]["val/acc"] == 0.5
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_later_stage_adds_to_the_file(tmp_path):
    logger = JSONLinesLogger()
    for stage, step in (("train/loss", 10), ("test/acc", 10), ("test/acc", 20)):
        logger.open(tmp_path, None)
        logger.log_metrics({stage: 1.0}, step)
        logger.finalize("success")
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [10, 20]
    assert lines[0]["train/loss"] == lines[0]["test/acc"] == 1.0


def test_lines_that_are_no_records_are_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnull\n\x00\xff\n{"step": "2"}\n[1]\n{"step": 3}\n')
    logger = JSONLinesLogger()
    logger.open(tmp_path, None)
    logger.finalize("success")
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    assert "dropped 4 invalid line(s)" in caplog.text


def test_a_path_of_ones_own(tmp_path):
    logger = JSONLinesLogger(tmp_path / "deep" / "own.jsonl")
    logger.open(tmp_path / "run", None)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    assert [line["step"] for line in read_lines(tmp_path / "deep" / "own.jsonl")] == [1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=5),
    names=st.lists(st.sampled_from(["a", "b", "train/löss"]), min_size=1, max_size=3),
)
def test_any_row_of_deaths_and_resumes_leaves_each_step_once(tmp_path_factory, pieces, names):
    folder = tmp_path_factory.mktemp("run")
    path, at, expected = folder / "metrics.jsonl", 0, {}
    for number, (steps, saved, torn) in enumerate(pieces):
        logger = JSONLinesLogger()
        logger.open(folder, at if number else None)
        for step in range(at + 1, at + steps + 1):
            for name in names:
                logger.log_metrics({name: step + number / 10}, step)
                expected.setdefault(step, {})[name] = step + number / 10
        with path.open("ab") as file:  # the process dies in the middle of a line
            file.write(b'\n{"step": 12345, "time": 1.5, "a": 1234567890.1234567890}'[:torn])
        at = min(at + steps, saved)
        expected = {step: values for step, values in expected.items() if step <= at}
    logger = JSONLinesLogger()
    logger.open(folder, at)
    logger.finalize("success")
    values = {line["step"]: {name: line[name] for name in names} for line in read_lines(path)}
    assert len(values) == len(path.read_text().splitlines())
    assert values == expected
