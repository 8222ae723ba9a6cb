"""Fine-tuning a Hugging Face Transformers model: first only the new head, then the last layers as well.

    legato fit transformers_finetuning.yaml

This example requires `pip install transformers` but no downloads: a tiny model with random weights stands in for
`AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)`, and generated sentences
stand in for your data. `BaseFinetuning` freezes everything below the head before the optimizer is created, and adds
layers to the optimizer later.
"""

import torch
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import legato as lg

WORDS, GOOD, BAD = 100, range(10, 20), range(20, 30)


class SentenceClassifier(lg.Task):
    def __init__(self, layers: int = 3, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        config = DistilBertConfig(
            vocab_size=WORDS, dim=width, hidden_dim=4 * width, n_layers=layers, n_heads=4, num_labels=2
        )
        self.model = DistilBertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("val/loss", output.loss, batch_size=len(batch["labels"]))
        right = (output.logits.argmax(dim=1) == batch["labels"]).float().mean()
        self.log("val/acc", right, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.lr)


class UnfreezeLayers(lg.callbacks.BaseFinetuning):
    """Trains the head and, from `at_epoch` on, also the last `layers` layers, with its learning rate / `slower`."""

    def __init__(self, at_epoch: int = 2, layers: int = 1, slower: float = 10.0):
        super().__init__()
        self.at_epoch, self.layers, self.slower = at_epoch, layers, slower

    def freeze_before_training(self, task):
        self.freeze(task.model.distilbert)

    def finetune_function(self, task, epoch, optimizer):
        if epoch == self.at_epoch:
            last = task.model.distilbert.transformer.layer[-self.layers :].train()  # unfreezing keeps the mode
            self.unfreeze_and_add_param_group(last, optimizer, initial_denom_lr=self.slower)


class Sentences(lg.DataModule):
    """Sentences of 12 words, some of them good or bad. The label is 1 if there are more good words than bad ones."""

    def __init__(self, count: int = 1000, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def loader(self, seed, shuffle=False):
        words = torch.randint(10, 40, (self.hparams.count, 12), generator=torch.Generator().manual_seed(seed))
        good, bad = (torch.isin(words, torch.tensor(some)).sum(dim=1) for some in (GOOD, BAD))
        rows = [{"input_ids": row, "labels": label} for row, label in zip(words, (good > bad).long(), strict=True)]
        return DataLoader(rows, self.hparams.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(seed=0, shuffle=True)

    def val_dataloader(self):
        return self.loader(seed=1)
