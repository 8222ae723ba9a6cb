"""Optimizers of other packages whose parameters are sharded."""

import pytest
import pytorch_optimizer as optimizers
import torch
from prodigyopt import Prodigy
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
    expected = "torchao's AdamW8bit computes wrong updates .* strategy=fsdp creates empty shards for model.2.weight"
    with pytest.raises(ConfigError, match=expected):
        train(Quantized(1), tmp_path, replicas=2, devices=2, strategy="fsdp")


@pytest.mark.slow
def test_without_empty_parts_it_trains_as_one_process_does(tmp_path):
    sharded, reference = Quantized(2), Quantized(2)
    train(sharded, tmp_path, replicas=2, devices=2, strategy="fsdp")
    train(reference, tmp_path, replicas=2)
    assert_close(sharded, reference)


# --- what DTensor does not know ---------------------------------------------------------------------------------------
def bitsandbytes(parameters):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2)


class Made(Tiny):
    """Notes that a step began."""

    def __init__(self, make, folder):
        super().__init__()
        self.make, self.folder = make, folder

    def training_step(self, batch, batch_idx):
        (self.folder / "began").touch()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.make(list(self.parameters()))


UNKNOWN = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "SOAP": lambda parameters: optimizers.SOAP(parameters, lr=1e-2),
    "Lookahead": lambda parameters: optimizers.Lookahead(torch.optim.SGD(parameters, lr=0.1)),
    "Prodigy": Prodigy,
    "AdamW8bit": bitsandbytes,
    # of the weight with one row, beside one with four
    "Muon": lambda parameters: torch.optim.Muon(
        [parameter for parameter in parameters if parameter.dim() == 2], lr=1e-2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_optimizer_that_dtensor_does_not_know_is_refused_before_the_first_step(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"^{name} does not work on the sharded parameters of .* Use strategy=zero1"):
        train(Made(UNKNOWN[name], tmp_path), tmp_path, replicas=2, devices=2, strategy="fsdp")
    assert not (tmp_path / "began").exists()


KNOWN = {
    "Lion": lambda parameters: optimizers.Lion(parameters, lr=1e-2),
    "Muon": lambda parameters: torch.optim.Muon(parameters[:1], lr=1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_one_that_it_knows_trains(tmp_path, name):
    sharded, alone = Made(KNOWN[name], tmp_path), Made(KNOWN[name], tmp_path)
    train(sharded, tmp_path, replicas=2, devices=2, strategy="fsdp")
    train(alone, tmp_path, replicas=2)
    for ours, theirs in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 if name == "Lion" else 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adafactor", "SOAP", "AdamW8bit"])
def test_zero1_takes_those(tmp_path, name):
    dealt_out, alone = Made(UNKNOWN[name], tmp_path), Made(UNKNOWN[name], tmp_path)
    train(dealt_out, tmp_path, replicas=2, devices=2, strategy="zero1")
    train(alone, tmp_path, replicas=2)
    assert_close(dealt_out, alone)


@pytest.mark.slow
def test_zero1_refuses_a_wrapper(tmp_path):
    with pytest.raises(ConfigError, match="Lookahead wraps another optimizer, which zero1 cannot shard"):
        train(Made(UNKNOWN["Lookahead"], tmp_path), tmp_path, replicas=2, devices=2, strategy="zero1")
