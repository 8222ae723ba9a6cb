"""Models and optimizers of others, trained by Legato and by a loop written by hand."""

import pytest
import timm
import torch
from datasets import Dataset as Texts
from pytorch_optimizer import AdaBelief
from tiny import make_trainer
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import legato as lg
from legato.base.errors import ConfigError

BATCH, STEPS = 4, 5


class Samples(Dataset):
    """Samples by a function of their index."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 2 * BATCH * STEPS

    def __getitem__(self, index):
        return self.make(torch.Generator().manual_seed(index))


def tokens(generator):
    return torch.randint(32, (10,), generator=generator)


def image(generator):
    return torch.randn(3, 32, 32, generator=generator), torch.randint(5, (), generator=generator)


class Language(lg.Task):
    def __init__(self):
        super().__init__()
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.net = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **dropout))

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Vision(lg.Task):
    def __init__(self):
        super().__init__()
        self.net = timm.create_model("test_vit", num_classes=5, img_size=32, patch_size=8)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return AdaBelief(self.parameters(), lr=1e-3)


def train_by_hand(make_task, samples):
    """Return the weights after one epoch in which each step takes the batches of two replicas."""
    torch.manual_seed(0)
    task = make_task().train()
    optimizer = task.configure_optimizers()
    for batch in DataLoader(samples, 2 * BATCH):
        optimizer.zero_grad()
        task.training_step(batch, 0).backward()
        optimizer.step()
    return task.state_dict()


@pytest.mark.parametrize(("make_task", "make"), [(Language, tokens), (Vision, image)])
@pytest.mark.parametrize("layout", [{"replicas": 2}, {"strategy": "ddp", "devices": 2}], ids=["one", "two"])
def test_the_weights_are_those_of_a_loop_by_hand(tmp_path, make_task, make, layout):
    torch.manual_seed(0)
    task = make_task()
    make_trainer(tmp_path, **layout).fit(task, DataLoader(Samples(make), BATCH))
    expected = train_by_hand(make_task, Samples(make))
    for name, weight in task.state_dict().items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("layout", [{"replicas": 2}, {"strategy": "ddp", "devices": 2}], ids=["one", "two"])
def test_a_kernel_of_attention_that_was_switched_off_is_found(tmp_path, layout):
    """On texts of `datasets`, by a model of `transformers`, whose attention has other last bits then."""
    rows = [tokens(torch.Generator().manual_seed(index)) for index in range(2 * BATCH * STEPS)]
    texts = Texts.from_dict({"input_ids": [row.tolist() for row in rows]}).with_format("torch")
    options = {"enable_checkpointing": True, "reproducible": "bitwise", **layout}
    loader = DataLoader(texts, BATCH, collate_fn=lambda rows: torch.stack([row["input_ids"] for row in rows]))
    torch.manual_seed(0)
    make_trainer(tmp_path, **options).fit(Language(), loader, resume="auto")
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with pytest.raises(ConfigError, match=r"would not stay bitwise identical: flash_attention: True -> False\."):
            make_trainer(tmp_path, **{**options, "max_epochs": 2}).fit(Language(), loader, resume="auto")
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
