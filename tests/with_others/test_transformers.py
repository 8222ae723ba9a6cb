"""Models of transformers and peft, trained as their users have them: loaded from a folder, padded, with adapters."""

import pytest
import torch
import torchvision
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import legato as lg


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
        self.modes = {name: module.training for name, module in self.named_modules() if isinstance(module, nn.Dropout)}
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)


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
    assert [record.message for record in caplog.records if "started in evaluation mode" in record.message]
    assert "model started in evaluation mode" in caplog.text


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


# --- means over tokens ------------------------------------------------------------------------------------------------
PADDED = -100
RATE, BATCH, ACCUMULATED = 0.1, 2, 4


class CausalModel(lg.Task):
    """Fine-tunes a language model on padded texts, as docs/how-to/from-transformers.md has it."""

    def __init__(self):
        super().__init__()
        self.model = causal_model()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        tokens = (batch["labels"][:, 1:] != PADDED).sum()
        self.log("train/loss", loss, batch_size=tokens)
        return {"loss": loss, "weight": tokens}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def causal_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).double()


def texts():
    """Texts of 2 to 10 tokens, padded; the first token of each is given, so that everyone counts the same tokens."""
    generator, rows = torch.Generator().manual_seed(1), []
    for length in torch.randint(2, 11, (22,), generator=generator).tolist():
        tokens, mask = torch.randint(32, (10,), generator=generator), torch.arange(10) < length
        labels = tokens.masked_fill(~mask | (torch.arange(10) == 0), PADDED)
        rows.append({"input_ids": tokens, "attention_mask": mask.long(), "labels": labels})
    return rows


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def texts_by_hand():
    """Return the weights after an epoch in which each step is one batch whose loss is a mean over its tokens."""
    model = causal_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in DataLoader(texts(), BATCH * ACCUMULATED):
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:]).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": ACCUMULATED},
        {"replicas": ACCUMULATED},
        {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": ACCUMULATED // 2},
        {"devices": 2, "strategy": "fsdp", "accumulate_grad_batches": ACCUMULATED // 2},
    ],
)
def test_padded_texts_are_trained_by_their_tokens(trainer, options):
    task = CausalModel()
    trainer(max_epochs=1, **options).fit(task, DataLoader(texts(), BATCH))
    assert float((weights_of(task.model) - texts_by_hand()).abs().max()) < 1e-8


def test_padded_texts_are_trained_as_by_transformers(trainer, tmp_path):
    torchvision.disable_beta_transforms_warning()  # transformers.Trainer imports them

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, BATCH)

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    model, task = causal_model(), CausalModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    InOrder(model, arguments, train_dataset=texts(), optimizers=(optimizer, None)).train()
    trainer(max_epochs=1, accumulate_grad_batches=ACCUMULATED).fit(task, DataLoader(texts(), BATCH))
    assert float((weights_of(task.model) - weights_of(model)).abs().max()) < 1e-8
