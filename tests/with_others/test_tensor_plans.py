"""Layers of other people's models cut over processes: norms of heads, and adapters."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

import legato as lg
from legato.base.errors import ConfigError, TaskError

TENSOR = {"devices": 2, "strategy": {"name": "mesh", "tensor": 2}}
LAYERS = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
}
NORMS = {"*.q_norm": "replicated", "*.k_norm": "replicated"}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Qwen(lg.Task):
    """A tiny Qwen3, whose attention normalises heads between the layers that are cut."""

    def __init__(self, plan=LAYERS | NORMS, adapter=None):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
        self.model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).double()
        if adapter is not None:
            self.model = get_peft_model(self.model, adapter).double()
        self.plan = plan

    def tensor_plan(self):
        return self.plan

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2, eps=1e-3)


def texts():
    return DataLoader(torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(1)), batch_size=4)


def trained(trainer, task, **options):
    trainer(max_epochs=1, **options).fit(task, texts())
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()])


LORA = {"r": 4, "target_modules": ["q_proj", "o_proj", "down_proj"], "init_lora_weights": False}


@pytest.mark.parametrize("adapter", [None, LoraConfig(**LORA)])
def test_cut_layers_train_as_one_process_does(trainer, adapter):
    alone = trained(trainer, Qwen(adapter=adapter))
    assert float((trained(trainer, Qwen(adapter=adapter), **TENSOR) - alone).abs().max()) < 1e-8


def test_norms_of_heads_that_the_plan_forgets_are_named(trainer):
    with pytest.raises(TaskError, match=r"The gradients of .*q_norm.weight.* differ.*q_norm\": \"replicated\""):
        trained(trainer, Qwen(LAYERS), **TENSOR)


def test_adapters_of_another_kind_are_refused_by_name(trainer):
    kinds = IA3Config(target_modules=["q_proj"], feedforward_modules=[]), LoraConfig(**LORA, use_dora=True)
    for adapter in kinds:
        with pytest.raises(ConfigError, match="q_proj has an adapter that Legato cannot cut with its layer"):
            trained(trainer, Qwen(adapter=adapter), **TENSOR)
