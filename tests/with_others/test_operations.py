"""The place where a transformer with another attention computes something else, on texts of `datasets`."""

import datasets
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import legato as lg
from legato.lab.operations import Operations, different_operation, read_operations


class Writes(lg.Task):
    """A language model; the eager attention is written out in transformers, the other is one operation."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = LlamaForCausalLM._from_config(config, attn_implementation=attention)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def texts():
    rows = datasets.Dataset.from_list([{"input_ids": [(n * 7 + k) % 32 for k in range(6)]} for n in range(16)])
    return DataLoader(rows.with_format("torch"), batch_size=4)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_attention_that_differs_is_named(processes, trainer, tmp_path):
    sides = []
    for name, attention in (("first", "eager"), ("again", "eager"), ("other", "sdpa")):
        options = {"strategy": "ddp", "devices": 2} if processes == 2 else {"replicas": 2}
        made = trainer(max_steps=2, callbacks=[Operations(1)], reproducible="bitwise", **options)
        made.assigned_dir = tmp_path / name
        made.fit(Writes(attention), texts())
        sides.append(read_operations(tmp_path / name))
    assert next(different_operation(sides[:2])).startswith("No operation in this step differs")
    lines = "\n".join(different_operation(sides[1:]))
    assert "in the forward of replica 0, batch 0, on rank 0" in lines
    assert "  module      model.model | model.model.rotary_emb" in lines  # eager attention makes a mask before
    assert "transformers/masking_utils.py" in lines
