"""The guilty sample of a step of a transformer on padded texts of `datasets`, by `Blame` in one process and in two."""

import json

import datasets
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import legato as lg
from legato.lab.blame import BLAME, Blame, shown_blame

BAD = 21


class Scores(lg.Task):
    """Gives a text a score; dropout is on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = DistilBertConfig(vocab_size=32, dim=16, hidden_dim=32, n_layers=1, n_heads=2, num_labels=1)
        self.model = DistilBertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def padded(rows):
    """Pad with 0, as a tokenizer does."""
    length = max(len(row["input_ids"]) for row in rows)
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows]),
        "attention_mask": torch.tensor([[n < len(row["input_ids"]) for n in range(length)] for row in rows]).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def texts():
    rows = [{"input_ids": [1 + (n * 7 + k) % 31 for k in range(3 + n % 5)], "label": n / 32} for n in range(32)]
    rows[BAD]["label"] = 1e3
    return DataLoader(datasets.Dataset.from_list(rows), batch_size=8, collate_fn=padded)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_guilty_text_comes_first(processes, trainer, tmp_path):
    options = {"strategy": "ddp", "devices": 2} if processes == 2 else {"replicas": 2}
    made = trainer(max_steps=2, callbacks=[Blame(2)], **options)
    made.assigned_dir = tmp_path / "run"
    made.fit(Scores(), texts())
    rows = [json.loads(line) for line in (tmp_path / "run" / BLAME).read_text().splitlines()]
    assert [row["sample"] for row in rows] == [f"sample {index}" for index in range(16, 32)]
    lines = list(shown_blame(tmp_path / "run", 2, rows))
    assert lines[1].split()[:2] == ["sample", str(BAD)]
    assert rows[BAD - 16]["gradient_norm"] > 10 * sorted(row["gradient_norm"] for row in rows)[-2]
