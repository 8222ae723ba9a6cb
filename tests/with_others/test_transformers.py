"""Models of transformers and peft, trained as their users have them: loaded from a folder, padded, with adapters."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import legato as lg

warnings.filterwarnings("ignore", message="Failed to load image Python extension")  # torchvision, without libjpeg

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import DistilBertConfig, DistilBertForSequenceClassification  # noqa: E402


@pytest.fixture
def pretrained(tmp_path):
    """Return a folder with the weights of a tiny classifier, as `from_pretrained` reads them."""
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=32, dim=16, hidden_dim=32, n_layers=2, n_heads=2, num_labels=2)
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


class Classifier(lg.Task):
    """Fine-tunes a model that `from_pretrained` returned; notes which of its dropouts were on."""

    def __init__(self, folder):
        super().__init__()
        self.model = DistilBertForSequenceClassification.from_pretrained(folder)
        self.modes = {}

    def training_step(self, batch, batch_idx):
        self.modes = {name: one.training for name, one in self.named_modules() if isinstance(one, nn.Dropout)}
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def sentences():
    words = torch.randint(32, (12, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row[0] % 2} for row in words], batch_size=4)


def test_dropout_is_on_in_a_model_that_from_pretrained_returned(pretrained, trainer, caplog):
    caplog.set_level("INFO", "legato")
    task = Classifier(pretrained)
    assert not task.model.training  # as from_pretrained returns it
    trainer(max_epochs=1).fit(task, sentences())
    assert task.modes
    assert all(task.modes.values())
    assert [record.message for record in caplog.records if "came in evaluation mode" in record.message]
    assert "model came in evaluation mode" in caplog.text


def test_a_frozen_body_keeps_evaluation_mode(pretrained, trainer):
    task = Classifier(pretrained)
    task.model.distilbert.requires_grad_(False)
    trainer(max_epochs=1).fit(task, sentences())
    assert not any(mode for name, mode in task.modes.items() if "distilbert" in name)
    assert task.modes["model.dropout"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_dropout_of_adapters_is_on(pretrained, trainer):
    task = Classifier(pretrained)
    task.model = get_peft_model(task.model, LoraConfig(target_modules=["q_lin", "v_lin"], lora_dropout=0.1)).eval()
    trainer(max_epochs=1).fit(task, sentences())
    adapters = [mode for name, mode in task.modes.items() if "lora_dropout" in name]
    assert adapters
    assert all(adapters)
