"""TensorBoardLogger: real event files, read by TensorBoard's own reader; real processes that die."""

import json
import shutil
import time

import pytest
import torch
from event_files import accumulate, points
from forked import completed, run_source
from tiny import Validated, make_loader, make_trainer

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks import Checkpoint
from legato.loggers import CSVLogger, TensorBoardLogger


def scalars(folder, tag):
    return [(step, round(value, 4)) for step, value in points(folder)[tag]]


def run_python(code, *arguments):
    """Run code in a process of its own; return its exit code and what it wrote as errors."""
    done = completed(run_source, code, *map(str, arguments))
    return done.returncode, done.stderr


RUN = """
import os, sys
from pathlib import Path
from legato.loggers import TensorBoardLogger
run_dir, begin, end, resume = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
logger = TensorBoardLogger()
logger.open(run_dir, begin if resume else None)
if resume:
    logger.log_metrics({"val/loss": begin, "train/loss": begin, "late": begin}, begin)
for step in range(begin + 1, end + 1):
    logger.log_metrics({"train/loss": step, "lr": 0.1}, step)
    if step % 20 == 0:
        logger.log_metrics({"val/loss": step}, step)
    if step == 80:
        logger.save()
logger.save()
os._exit(9)
"""


@pytest.mark.slow
def test_a_killed_run_and_its_resumes_show_each_step_once(tmp_path):
    for begin, end, word in ((0, 100, "fresh"), (80, 120, "resume"), (120, 125, "resume"), (80, 160, "resume")):
        code, errors = run_python(RUN, tmp_path, begin, end, word)
        assert code == 9, errors
    folder = tmp_path
    assert len(list(folder.iterdir())) == 4
    assert scalars(folder, "train/loss") == [(step, float(step)) for step in range(1, 161)]
    assert scalars(folder, "lr") == [(step, 0.1) for step in range(1, 161)]
    assert scalars(folder, "val/loss") == [(step, float(step)) for step in range(20, 161, 20)]
    assert scalars(folder, "late") == [(80, 80.0)]


def test_one_point_is_one_event_and_a_repeated_value_is_none(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    logger = TensorBoardLogger()
    logger.open(tmp_path, None)
    logger.log_metrics({f"metric_{number}": number for number in range(7)}, 5)
    logger.log_metrics({"metric_1": 1, "metric_2": 2}, 5)
    logger.log_metrics({"metric_1": 9.0}, 5)
    logger.finalize("success")
    (path,) = tmp_path.iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.summary.value]
    assert [len(event.summary.value) for event in events] == [7, 1]


def test_files_of_one_second_sort_as_they_were_begun(tmp_path):
    """TensorBoard reads files by name, and one that is read too late voids points of the next."""
    earlier = tmp_path / f"events.out.tfevents.{int(time.time())}.zzz.9.9"
    earlier.touch()
    logger = TensorBoardLogger()
    logger.open(tmp_path, resume_step=3)
    logger.finalize("success")
    names = sorted(path.name for path in tmp_path.glob("events.*"))
    assert len(names) == 2
    assert names[0] == earlier.name


def test_texts_images_and_histograms(tmp_path):
    logger = TensorBoardLogger()
    logger.open(tmp_path, None)
    logger.log_text("config", "trainer:\n  max_epochs: 3", 0)
    logger.experiment.add_image("digit", torch.zeros(1, 4, 4), 1)
    logger.experiment.add_histogram("weights", torch.arange(10.0), 1)
    logger.finalize("success")
    logger.experiment.add_text("afterwards", "still works", 2)
    logger.save()
    events = accumulate(tmp_path)
    assert events.Tags()["images"] == ["digit"]
    assert events.Tags()["histograms"] == ["weights"]
    assert b"max_epochs: 3" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert events.Tensors("afterwards/text_summary")[0].step == 2


def hyperparameter_records(folder):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    metadata = accumulate(folder).summary_metadata
    return {
        tag.removeprefix("_hparams_/"): HParamsPluginData.FromString(metadata[tag].plugin_data.content)
        for tag in metadata
        if tag.startswith("_hparams_/")
    }


@pytest.mark.parametrize("status", ["success", "failed"])
def test_hyperparameters_stand_beside_the_final_metrics(tmp_path, status):
    from tensorboard.plugins.hparams.api_pb2 import Status

    logger = TensorBoardLogger()
    logger.open(tmp_path, None)
    logger.log_hyperparams({"lr": 0.5, "layers": [3, 4], "optimizer": {"name": "AdamW", "fused": True}, "none": None})
    logger.log_hyperparams({"seed": 7})
    logger.log_metrics({"val/acc": 0.5, "throughput": 12.0}, 10)
    logger.log_metrics({"val/acc": 0.75}, 20)
    logger.log_hyperparams({}, {"val/acc": 0.75, "best": 0.9})
    logger.finalize(status)
    folder = tmp_path
    assert [path.is_file() for path in folder.iterdir()] == [True]
    records = hyperparameter_records(folder)
    params = records["session_start_info"].session_start_info.hparams
    assert params["lr"].number_value == 0.5
    assert params["seed"].number_value == 7
    assert params["layers"].string_value == "[3, 4]"
    assert params["optimizer/name"].string_value == "AdamW"
    metrics = [info.name.tag for info in records["experiment"].experiment.metric_infos]
    assert sorted(metrics) == ["best", "val/acc"]
    if status == "success":
        assert records["session_end_info"].session_end_info.status == Status.Value("STATUS_SUCCESS")
    else:
        assert "session_end_info" not in records
    assert scalars(folder, "val/acc") == [(10, 0.5), (20, 0.75)]
    assert scalars(folder, "best") == [(20, 0.9)]


def test_a_run_that_was_killed_shows_its_hyperparameters(tmp_path):
    logger = TensorBoardLogger()
    logger.open(tmp_path, None)
    logger.log_hyperparams({"lr": 0.5})
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()
    records = hyperparameter_records(tmp_path)
    assert list(records) == ["session_start_info"]
    logger.finalize("failed")


def test_a_second_run_of_the_same_logger_starts_afresh(tmp_path):
    logger = TensorBoardLogger()
    logger.log_hyperparams({"seed": 0})
    for name in ("version_0", "version_1"):
        logger.open(tmp_path / name, None)
        logger.log_hyperparams({name: 1})
        logger.log_metrics({"lr": 0.1}, 50)
        logger.finalize("success")
    for name, expected in (("version_0", {"seed", "version_0"}), ("version_1", {"version_1"})):
        assert scalars(tmp_path / name, "lr") == [(50, 0.1)]
        records = hyperparameter_records(tmp_path / name)["session_start_info"]
        assert set(records.session_start_info.hparams) == expected


TRAINING = """
import os, sys, torch
import legato as lg
from torch.utils.data import DataLoader, TensorDataset

class Task(lg.Task):
    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        if self.global_step == int(sys.argv[2]):
            os._exit(9)
        self.log("step", float(self.global_step + 1))
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch):
        self.log("val/step", float(self.global_step))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)

data = DataLoader(TensorDataset(torch.ones(100, 4)), batch_size=2)
trainer = lg.Trainer(
    max_steps=160, accelerator="cpu", devices=1, default_root_dir=sys.argv[1], log_every_n_steps=1,
    val_check_interval=20, limit_val_batches=1, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[lg.callbacks.Checkpoint(every_n_train_steps=40)],
)
trainer.fit(Task(), data, data, resume="auto")
"""


@pytest.mark.slow
def test_a_training_that_was_killed_twice_shows_each_step_once(tmp_path):
    for die_at, code in ((100, 9), (141, 9), (-1, 0)):
        ended, errors = run_python(TRAINING, tmp_path, die_at)
        assert ended == code, errors
    run_dir = tmp_path / "default" / "version_0"
    every, validated = list(range(1, 161)), [20, 40, 70, 90, 120, 140]
    assert scalars(run_dir, "step") == [(step, float(step)) for step in every]
    assert scalars(run_dir, "~run/lr-SGD") == [(step, 0.1) for step in every]
    assert [step for step, _ in scalars(run_dir, "~run/epoch")] == every
    assert scalars(run_dir, "val/step") == [(step, float(step)) for step in validated]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == every
    assert [line["step"] for line in lines if "val/step" in line] == validated
    assert hyperparameter_records(run_dir).keys() == {
        "session_start_info",
        "experiment",
        "session_end_info",
    }


def test_arguments_of_lightnings_say_what_to_do_instead():
    with pytest.raises(ConfigError, match="default_root_dir and run_name"):
        TensorBoardLogger(save_dir="logs")
    with pytest.raises(ConfigError, match="add_graph"):
        TensorBoardLogger(log_graph=True)


def fitted(folder, **options):
    """Fit a task with a validation and hyperparameters; return the trainer, whose logs are TensorBoard's."""

    class Charted(Validated):
        def __init__(self, lr=0.1):
            super().__init__(lr)
            self.save_hyperparameters()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))

    saved = Checkpoint(monitor="val/loss")
    defaults = {"logger": True, "max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": True}
    made = make_trainer(folder, **{**defaults, "callbacks": [saved, *options.pop("callbacks", ())], **options})
    made.fit(Charted(), make_loader(), make_loader())
    return made


def test_ones_own_metrics_come_before_legatos(tmp_path):
    tags = accumulate(fitted(tmp_path).run_dir).Tags()["scalars"]
    of_task = [tag for tag in sorted(tags) if tag.startswith(("train/", "val/"))]
    assert sorted(tags)[: len(of_task)] == of_task
    assert {"~run/epoch", "~run/lr-SGD", "~run/samples_per_second"} <= set(tags)
    logger = TensorBoardLogger(own_metrics_last=False)
    logger.open(tmp_path / "other", None)
    logger.log_metrics({"epoch": 1, "lr-SGD": 0.1, "train/x": 1}, 1)
    logger.finalize("success")
    assert set(accumulate(tmp_path / "other").Tags()["scalars"]) == {"epoch", "lr-SGD", "train/x"}


def test_hyperparameters_name_the_settings_of_the_run_and_the_best_value(tmp_path):
    made = fitted(tmp_path, seed=7, precision="bf16-mixed")
    records = hyperparameter_records(made.run_dir)
    params = records["session_start_info"].session_start_info.hparams
    shown = {name: value.number_value or value.string_value for name, value in params.items()}
    assert shown == {
        "lr": 0.1,
        "batch_size": 4.0,
        "seed": 7.0,
        "precision": "bf16-mixed",
        "devices": "1 cpu",
        "strategy": "single",
    }
    names = {info.name.tag for info in records["experiment"].experiment.metric_infos}
    assert names == {"~best/val/loss", "train/loss_step", "train/loss_epoch", "val/loss"}
    best = min(value for _, value in scalars(made.run_dir, "val/loss"))
    assert [value for _, value in scalars(made.run_dir, "~best/val/loss")] == [best]


def test_pictures_are_the_services_own(tmp_path):
    for logger in (TensorBoardLogger(), CSVLogger()):
        with pytest.raises(AttributeError, match=r"has no attribute 'log_image'.*experiment.*add_image"):
            logger.log_image("image", torch.zeros(4, 4), 0)
        with pytest.raises(AttributeError, match=r"has no attribute 'log_metric'.$"):
            logger.log_metric({"x": 1.0}, 0)


@pytest.mark.filterwarnings("ignore:html5lib")
def test_the_config_is_shown_as_it_is_written(tmp_path):
    from tensorboard.plugin_util import markdown_to_safe_html

    class Configured(lg.Callback):
        def setup(self, trainer, task, stage):
            trainer.config_text = "task:\n  _target_: a.b.C_d_e\n"

    made = fitted(tmp_path, callbacks=[Configured()])
    event = accumulate(made.run_dir).Tensors("config/text_summary")[0]
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
    assert "_target_: a.b.C_d_e\n" in shown
    assert "<em>" not in shown


def test_a_deleted_folder_ends_the_run_with_a_plain_error(tmp_path):
    logger = TensorBoardLogger()
    logger.open(tmp_path / "run", None)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="was deleted or moved during the run"):
        logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("failed")
