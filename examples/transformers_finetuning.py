"""Fine-tuning a model of transformers: first its new head alone, then the last layers too.

    legato fit transformers_finetuning.yaml

It needs `pip install transformers`, and downloads nothing: a tiny model with random weights stands in for
`AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)`, and made sentences for
yours. `BaseFinetuning` freezes what the head is built on before the optimizer is made, and adds layers to it later.
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
    """Trains the head alone, and from `at_epoch` on also the last `layers` layers, at its rate over `slower`."""

    def __init__(self, at_epoch: int = 2, layers: int = 1, slower: float = 10.0):
        super().__init__()
        self.at_epoch, self.layers, self.slower = at_epoch, layers, slower

    def freeze_before_training(self, task):
        self.freeze(task.model.distilbert)

    def finetune_function(self, task, epoch, optimizer):
        if epoch == self.at_epoch:
            last = task.model.distilbert.transformer.layer[-self.layers :].train()  # a frozen model keeps its mode
            self.unfreeze_and_add_param_group(last, optimizer, initial_denom_lr=self.slower)


class Sentences(lg.DataModule):
    """Sentences of 12 words, of which some are good or bad ones; the label says which there are more of."""

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
