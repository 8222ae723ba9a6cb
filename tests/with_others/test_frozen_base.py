"""Fine-tuning with frozen bases of other libraries: adapters of PEFT, weights quantised by torchao."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import make_trainer
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

import legato as lg
from legato.base.errors import ConfigError
from legato.trainer.checkpoints import commit, reading

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
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


class Adapter(lg.Task):
    """A causal language model with an adapter of PEFT."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), LORA)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], 1e-2)


def words():
    return torch.utils.data.DataLoader(torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(1)), 2)


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
    uninterrupted, _ = fit(tmp_path / "whole", Quantized, loader, 4, **layout)
    first, path = fit(tmp_path / "cut", Quantized, loader, 2, **layout)
    second, _ = fit(tmp_path / "cut", Quantized, loader, 4, path, **layout)
    assert torch.equal(second.head.weight, uninterrupted.head.weight)
    assert not torch.equal(second.head.weight, first.head.weight)
    loaded = Quantized.load_from_checkpoint(path)
    for task in (second, loaded):
        assert type(task.base[0].weight) is type(uninterrupted.base[0].weight)
        assert torch.equal(task.base[0].weight.qdata, uninterrupted.base[0].weight.qdata)


def test_a_quantized_base_that_cannot_be_cut_is_refused_by_name(tmp_path):
    with pytest.raises(
        ConfigError, match=r"fsdp shards each weight.*base\.0\.weight \(Int8Tensor\).*Use strategy=ddp or zero1"
    ):
        fit(tmp_path, Quantized, samples(), 1, **{**TWO, "strategy": "fsdp"})


def test_an_8_bit_state_of_an_optimizer_comes_back_as_it_was(tmp_path):
    state = OptimState8bit.zeros((64, 64), True, 256, "cpu")
    state.codes.copy_((torch.arange(4096) % 256).view(64, 64))
    commit.write(tmp_path / "one", {"optimizer_states": [{"state": {"w": {"exp_avg": state}}}]})
    back = reading.read_checkpoint(tmp_path / "one")["optimizer_states"][0]["state"]["w"]["exp_avg"]
    assert type(back) is OptimState8bit
    assert torch.equal(back.dequantize(), state.dequantize())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("layout", [{"replicas": 2}, TWO, {**TWO, "strategy": "fsdp"}], ids=["one", "two", "fsdp"])
def test_a_checkpoint_of_an_adapter_is_as_large_as_what_is_trained(tmp_path, layout):
    uninterrupted, _ = fit(tmp_path / "whole", Adapter, words(), 3, **layout)
    first, path = fit(tmp_path / "cut", Adapter, words(), 2, **layout)
    first.model.save_pretrained(tmp_path / "peft")
    adapter = (tmp_path / "peft" / "adapter_model.safetensors").stat().st_size
    kept = {name: file.stat().st_size for file in Path(path).iterdir() for name in [file.name]}
    trained = {name for name, weight in first.named_parameters() if weight.requires_grad}
    held = [load_file(file).keys() for file in Path(path).glob("model*.safetensors")]
    assert set().union(*held) == trained
    assert sum(size for name, size in kept.items() if name.startswith("model")) < 1.5 * adapter
    assert sum(kept.values()) < 8 * adapter  # with two moments of AdamW, and JSON
    (base,) = [path.stat().st_size for path in (tmp_path / "cut" / "base").iterdir()][-1:]
    assert base > 8 * adapter
    second, _ = fit(tmp_path / "cut", Adapter, words(), 3, path, **layout)
    for name, weight in uninterrupted.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight)
    loaded = Adapter.load_from_checkpoint(path)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in first.state_dict().items())
