"""A model of transformers whose steps are computed twice: a flipped bit is named, and the run stays the same."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import legato as lg
from legato.base.errors import CorruptionError

GUILTY = "model.model.layers.1.mlp.up_proj.weight"
LAYOUTS = {
    "one": {},
    "ddp": {"devices": 2, "strategy": "ddp"},
    "fsdp": {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": ["LlamaDecoderLayer"]}},
}


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(context, output):
        return output.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        return gradient


class Llama(lg.Task):
    """Computes the gradient of one layer wrong, the first time that `step` is computed, on one rank."""

    def __init__(self, rank=None):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)
        self.model, self.rank, self.passes = LlamaForCausalLM(config), rank, 0
        self.model.model.layers[1].mlp.up_proj.register_forward_hook(self.flip)

    def flip(self, module, inputs, output):
        return Flip.apply(output) if self.is_wrong else output

    def training_step(self, batch, batch_idx):
        is_here = self.global_step == 3 and self.global_rank == self.rank
        self.is_wrong = is_here and not self.passes
        self.passes += is_here
        loss = self.model(**batch).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(task, trainer, **options):
    words = torch.randint(32, (24, 6), generator=torch.Generator().manual_seed(1))
    made = trainer(max_epochs=1, deterministic=True, log_every_n_steps=1, **options)
    made.fit(task, DataLoader([{"input_ids": row, "labels": row} for row in words], batch_size=2, shuffle=True))
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wrong_layer_of_one_rank_is_named(name, trainer):
    rank = LAYOUTS[name].get("devices", 1) - 1
    with pytest.raises(CorruptionError, match=rf"step 4 .* the gradient of {GUILTY} \(.*\) on rank {rank} \(cpu of"):
        fit(Llama(rank), trainer, recheck_every=2, **LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_the_same_with_steps_that_are_computed_twice(name, trainer):
    once, twice = (fit(Llama(), trainer, recheck_every=every, **LAYOUTS[name]) for every in (None, 2))
    first, second = (run.task.state_dict() for run in (once, twice))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert once.logged_metrics == twice.logged_metrics
