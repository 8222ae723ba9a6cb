"""Models of transformers cut over processes and devices: by a plan, with norms of heads and adapters, and by blocks."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3ForCausalLM

import legato as lg
from legato.base.errors import ConfigError, TaskError
from legato.trainer.strategies.mesh.tensor_plan import plan_of

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
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2, eps=1e-3
        )


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
        with pytest.raises(ConfigError, match="q_proj has an adapter that Legato cannot split along with the layer"):
            trained(trainer, Qwen(adapter=adapter), **TENSOR)


# --- plans of the models ----------------------------------------------------------------------------------------------
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Hub(Qwen):
    """A model of transformers by its config, whose own plan cuts it."""

    def __init__(self, config, adapter=None):
        lg.Task.__init__(self)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config).double()
        if adapter is not None:
            self.model = get_peft_model(self.model, adapter).double()
        self.plan = {}


CONFIGS = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "tied": LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True),
    "qwen": Qwen3Config(**SIZES, **HEADS, head_dim=4),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_is_cut_by_its_own_plan(trainer, config):
    alone, task = trained(trainer, Hub(CONFIGS[config])), Hub(CONFIGS[config])
    words = plan_of(task)
    assert words["model.model.layers.*.self_attn.q_proj"] == "column"
    assert words["model.model.embed_tokens"] == "row, split"
    assert words["model.lm_head"] == "column, gathered"
    assert float((trained(trainer, task, **TENSOR) - alone).abs().max()) < 1e-8
    assert (task.model.lm_head.weight is task.model.model.embed_tokens.weight) is (config == "tied")


def test_an_adapter_around_a_model_is_cut_by_the_models_plan(trainer):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    alone = trained(trainer, Hub(CONFIGS["llama"], adapter))
    assert float((trained(trainer, Hub(CONFIGS["llama"], adapter), **TENSOR) - alone).abs().max()) < 1e-8


@pytest.mark.parametrize("name", ["llama", "tied", "adapter"])
def test_in_shards_a_model_has_the_same_bits_on_one_and_two_processes(trainer, name):
    """Queries share keys and values, and the head is whole; the weights are compared."""
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if name == "adapter" else None
    config, weights = CONFIGS["llama" if adapter else name], []
    for processes in (1, 2):
        strategy = {"name": "mesh", "tensor": processes, "tensor_shards": 2}
        options = {"devices": processes, "strategy": strategy, "reproducible": "bitwise", "gradient_clip_val": 0.1}
        weights.append(trained(trainer, Hub(config, adapter).float(), **options))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            MixtralConfig(**SIZES, **HEADS, num_local_experts=2),
            r"MixtralForCausalLM uses the '\w*' style for model.model",
        ),
        (LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1), r"4 outputs in heads of width 4"),
    ],
    ids=["experts", "heads"],
)
def test_what_a_plan_asks_and_legato_does_not_do_is_named_before_the_first_step(trainer, config, words):
    with pytest.raises(ConfigError, match=words):
        trained(trainer, Hub(config), **TENSOR)


# --- blocks, which take masks and rotary embeddings by keyword --------------------------------------------------------
PARTS = {"name": "ddp_model_parallel", "devices_per_replica": 2}


class Blocks(Hub):
    """Says what its blocks are; the norm and the head lie beside them, on the last device."""

    def configure_blocks(self):
        return [self.model.model.embed_tokens, *self.model.model.layers]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_over_two_devices_trains_as_on_one(trainer, processes, pieces):
    torch.manual_seed(0)
    alone = trained(trainer, Blocks(CONFIGS["llama"]), replicas=processes)
    strategy = PARTS | {"micro_batches": pieces}
    cut = trained(trainer, Blocks(CONFIGS["llama"]), strategy=strategy, devices=2 * processes)
    assert float((cut - alone).abs().max()) < 1e-8


def test_a_pipeline_says_why_it_does_not_take_it(trainer):
    strategy = {"name": "mesh", "pipeline": 2}
    with pytest.raises(TaskError, match=r"'model.model.layers.0' failed.*rotary embeddings"):
        trained(trainer, Blocks(CONFIGS["llama"]), strategy=strategy, devices=2)
