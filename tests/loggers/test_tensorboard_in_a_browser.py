"""What a person sees: the real TensorBoard in a headless Chromium, driven by ChromeDriver over HTTP."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tiny import Validated, make_loader, make_trainer
from waiting import free_port

import legato as lg

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("chromium") or not shutil.which("chromedriver"), reason="needs chromium"),
]

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1400,1000"),
)
TEXTS = r"""
const wanted = arguments[0], found = [];
const text = (node) => node.nodeType === 3 ? node.textContent : ['STYLE', 'SCRIPT'].includes(node.tagName) ? '' :
  [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes].map(text).join(' ');
const walk = (node) => {
  if (node.matches && node.matches(wanted)) found.push(text(node).split(/\s+/).join(' ').trim());
  if (node.shadowRoot) walk(node.shadowRoot);
  if (node.tagName === 'IFRAME' && node.contentDocument) walk(node.contentDocument);
  for (const child of node.children || []) walk(child);
};
walk(document);
return found;
"""
"""Script that returns the texts of all elements of a selector, also within shadow trees."""


class Browser:
    """A page in a headless Chromium."""

    def __init__(self, port, folder):
        self.at = f"http://127.0.0.1:{port}"
        options = {"args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.at += f"/session/{self.call('/session', wanted)['sessionId']}"

    def call(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.at + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        self.call("/url", {"url": "about:blank"})
        self.call("/url", {"url": url})

    def texts(self, selector, until=lambda texts: texts):
        """Return the texts of the elements of a selector, once `until` is true of them."""
        end = time.monotonic() + 60
        while True:
            found = self.call("/execute/sync", {"script": TEXTS, "args": [selector]})
            if until(found):
                return found
            assert time.monotonic() < end, (selector, found, self.texts("body", lambda texts: True))
            time.sleep(0.2)

    def picture(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("/screenshot", method="GET")))


def wait_for(url):
    end = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(url, timeout=10).read()
        except OSError:
            assert time.monotonic() < end, url
            time.sleep(0.1)


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
            self.logger.log_image("example", self.model[0].weight.detach().abs(), self.global_step)

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
        wait_for(f"http://127.0.0.1:{port}/data/runs")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser, closed at the end."""
    port = free_port()
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/status")
        page = Browser(port, tmp_path_factory.mktemp("chromium"))
        try:
            yield page
        finally:
            page.call("", method="DELETE")
    finally:
        process.kill()
        process.wait()


PICTURES = os.environ.get("PICTURES")
"""A folder for screenshots, for a person to look at."""


def test_ones_own_metrics_are_the_first_groups(board, browser):
    browser.open(f"{board}/#timeseries")
    groups = browser.texts("metrics-card-group-toolbar-component", lambda texts: len(texts) >= 5)
    if PICTURES:
        time.sleep(3)
        browser.picture(f"{PICTURES}/timeseries.png")
    assert [group.split()[0] for group in groups] == ["example", "train", "val", "~best", "~run"]


def test_training_and_validation_share_a_chart(board, browser):
    browser.open(f"{board}/#custom_scalars")
    browser.texts("span.category-name", lambda texts: "Training and validation" in texts)
    if PICTURES:
        time.sleep(5)
        browser.picture(f"{PICTURES}/custom_scalars.png")
    card = "tf-custom-scalar-multi-line-chart-card"
    (shown,) = browser.texts(card, lambda texts: "Matches(2)" in "".join(texts).replace(" ", ""))
    assert shown.startswith("loss")


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
