"""What a person sees: the real TensorBoard in a headless Chromium, driven by ChromeDriver over HTTP."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from browser import opened, wait_for
from tiny import Validated, make_loader, make_trainer
from waiting import free_port

import legato as lg

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("chromium") or not shutil.which("chromedriver"), reason="needs chromium"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of two epochs."""

    class Charted(Validated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.loss(batch))

        def on_train_end(self):
            weight = self.model[0].weight.detach().abs()
            self.logger.experiment.add_image("example", weight, self.global_step, dataformats="HW")

    class Configured(lg.Callback):
        def setup(self, trainer, task, stage):
            trainer.config_text = "task:\n  _target_: a.b.C_d_e\n"

    folder = tmp_path_factory.mktemp("runs")
    saved = lg.callbacks.Checkpoint(monitor="val/loss")
    options = {"logger": True, "max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": True}
    made = make_trainer(folder, **options, callbacks=[saved, Configured()])
    made.fit(Charted(), make_loader(), make_loader())
    return folder


@pytest.fixture(scope="module")
def board(runs):
    """TensorBoard's address."""
    port = free_port()
    words = ["-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port), "--host", "127.0.0.1"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while wait_for(f"http://127.0.0.1:{port}/data/runs").strip() == b"[]":
            time.sleep(0.1)  # it has not read the folder yet
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser, closed at the end."""
    with opened(tmp_path_factory.mktemp("chromium")) as page:
        yield page


PICTURES = os.environ.get("PICTURES")
"""A folder for screenshots, for a person to look at."""


def test_runs_have_their_own_names(board):
    assert json.loads(wait_for(f"{board}/data/runs")) == ["default/version_0"]


def test_ones_own_metrics_are_the_first_groups(board, browser):
    browser.open(f"{board}/#timeseries")
    groups = browser.texts("metrics-card-group-toolbar-component", lambda texts: len(texts) >= 5)
    if PICTURES:
        time.sleep(3)
        browser.picture(f"{PICTURES}/timeseries.png")
    assert [group.split()[0] for group in groups] == ["example", "train", "val", "~best", "~run"]


def test_the_config_keeps_its_underscores(board, browser):
    browser.open(f"{board}/#text")
    shown = browser.texts("code", lambda texts: any("_target_" in text for text in texts))
    if PICTURES:
        browser.picture(f"{PICTURES}/text.png")
    assert any("_target_: a.b.C_d_e" in text for text in shown)


def test_hyperparameters_have_the_settings_and_the_best_value(board, browser):
    browser.open(f"{board}/#hparams")
    (pane,) = browser.texts("tf-hparams-query-pane", lambda texts: "batch_size" in "".join(texts))
    if PICTURES:
        time.sleep(3)
        browser.picture(f"{PICTURES}/hparams.png")
    assert list(dict.fromkeys(word for word in pane.split() if word in NAMES)) == NAMES  # each in two of its lists


NAMES = ["batch_size", "devices", "precision", "seed", "strategy", "~best/val/loss"]
