"""Fine-tuning with frozen bases of other libraries: adapters of PEFT, weights quantised by torchao."""

import pytest
import torch
from tiny import make_trainer
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import legato as lg
from legato.trainer.checkpoints import commit, reading

TWO = {"strategy": "ddp", "devices": 2}


class Quantized(lg.Task):
    """An int8 base with a head that is trained."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), nn.Linear(64, 64)
        quantize_(self.base.requires_grad_(False), Int8WeightOnlyConfig())

    def training_step(self, batch, batch_idx):
        return self.head(self.base(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), 1e-2)


def samples(count=16):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(count, 64)), 2)


def fit(folder, make_task, loader, epochs, resume=None, **options):
    """Train a new task; return it, and the path of its newest checkpoint."""
    torch.manual_seed(0)
    task, saves = make_task(), lg.callbacks.Checkpoint(dirpath=folder, save_top_k=-1)
    make_trainer(folder, **{"max_epochs": epochs, "callbacks": [saves], "enable_checkpointing": True, **options}).fit(
        task, loader, resume=resume
    )
    return task, saves.last_model_path


@pytest.mark.parametrize("layout", [{"replicas": 2}, TWO], ids=["one", "two"])
def test_a_quantized_base_is_saved_and_resumed_exactly(tmp_path, layout):
    loader = samples()
    whole, _ = fit(tmp_path / "whole", Quantized, loader, 4, **layout)
    first, path = fit(tmp_path / "cut", Quantized, loader, 2, **layout)
    second, _ = fit(tmp_path / "cut", Quantized, loader, 4, path, **layout)
    assert torch.equal(second.head.weight, whole.head.weight)
    assert not torch.equal(second.head.weight, first.head.weight)
    loaded = Quantized.load_from_checkpoint(path)
    for task in (second, loaded):
        assert type(task.base[0].weight) is type(whole.base[0].weight)
        assert torch.equal(task.base[0].weight.qdata, whole.base[0].weight.qdata)


def test_an_8_bit_state_of_an_optimizer_comes_back_as_it_was(tmp_path):
    state = OptimState8bit.zeros((64, 64), True, 256, "cpu")
    state.codes.copy_((torch.arange(4096) % 256).view(64, 64))
    commit.write(tmp_path / "one", {"optimizer_states": [{"state": {"w": {"exp_avg": state}}}]})
    back = reading.read_checkpoint(tmp_path / "one")["optimizer_states"][0]["state"]["w"]["exp_avg"]
    assert type(back) is OptimState8bit
    assert torch.equal(back.dequantize(), state.dequantize())
