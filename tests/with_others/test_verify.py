"""`legato verify` of a transformer that reads a dataset from disk, in one process and in two."""

import json

import datasets
import pytest

from legato.cli.main import main

MODULE = """
import datasets
import torch
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import legato as lg


class Scores(lg.Task):
    def __init__(self):
        super().__init__()
        config = DistilBertConfig(vocab_size=32, dim=16, hidden_dim=32, n_layers=1, n_heads=2, num_labels=1)
        self.model = DistilBertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        data = datasets.load_from_disk("texts").with_format("torch")
        return DataLoader(data, batch_size=4, shuffle=True)
"""
CONFIG = """
run: {name: scores}
task: {_target_: scored_texts.Scores}
trainer: {max_epochs: 1, accelerator: cpu, threads: 1, replicas: 2, log_every_n_steps: 1, enable_progress_bar: false}
callbacks:
  checkpoint: {_target_: legato.callbacks.Checkpoint, every_n_train_steps: 2, save_top_k: -1}
"""


def write_texts(labels):
    rows = [{"input_ids": [1 + (n * 7 + k) % 31 for k in range(6)], "labels": label} for n, label in enumerate(labels)]
    datasets.Dataset.from_list(rows).save_to_disk("texts")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "scored_texts.py").write_text(MODULE)
    (tmp_path / "scores.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_texts([n / 32 for n in range(32)])
    return tmp_path


@pytest.mark.parametrize("processes", [1, 2])
def test_a_transformer_is_proven_and_its_changed_dataset_is_told(processes, folder, capfd):
    two = ["trainer.devices=2", "trainer.strategy=ddp"] if processes == 2 else ["trainer.devices=1"]
    assert main(["fit", "scores.yaml", "--quiet", *two]) == 0
    words = ["verify", "scores", "segments=1", "seed=2", "--out"]
    assert main([*words, "proof"]) == 0
    assert "logged values and all" in capfd.readouterr().out
    write_texts([n / 32 + 0.01 for n in range(32)])
    assert main([*words, "again"]) == 1
    certificate = json.loads((folder / "again/certificate.json").read_text())
    assert certificate["segments"][0]["processes"] == processes
    assert "the samples in the dataset have changed" in certificate["segments"][0]["differences"][0]
