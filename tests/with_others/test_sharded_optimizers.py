"""Optimizers of other packages whose parameters are sharded."""

import pytest
import torch
from random_updates import train
from tiny import Tiny, assert_close

from legato.base.errors import ConfigError


class Quantized(Tiny):
    """torchao's AdamW with states of eight bits; the last bias has `outputs` numbers."""

    def __init__(self, outputs):
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self.model[2] = torch.nn.Linear(4, outputs)
        for parameter in self.model[2].parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def loss(self, batch):
        return (self(batch[0]).mean(dim=1, keepdim=True) - batch[1]).square().mean()

    def configure_optimizers(self):
        from torchao.optim import AdamW8bit

        torch.compiler.set_stance("force_eager")  # compiling it takes minutes
        return AdamW8bit(self.parameters(), 1e-2)


@pytest.mark.slow
def test_an_empty_part_is_refused_by_the_optimizers_name(tmp_path):
    expected = "torchao's AdamW8bit computes wrong updates .* strategy 'fsdp' of model.2.weight, model.2.bias"
    with pytest.raises(ConfigError, match=expected):
        train(Quantized(1), tmp_path, replicas=2, devices=2, strategy="fsdp")


@pytest.mark.slow
def test_without_empty_parts_it_trains_as_one_process_does(tmp_path):
    sharded, whole = Quantized(2), Quantized(2)
    train(sharded, tmp_path, replicas=2, devices=2, strategy="fsdp")
    train(whole, tmp_path, replicas=2)
    assert_close(sharded, whole)
