"""Tensor parallelism: layers are sharded along the `tensor` axis according to a plan from the task or its models.

See Shoeybi et al. 2019, "Megatron-LM" (https://arxiv.org/abs/1909.08053) and torch.distributed.tensor.parallel.

    "column"     a Linear with a full input and sharded outputs
    "row"        a Linear with sharded inputs; its output is the full sum over the processes
    "replicated" a module between a column and its row, such as a norm over heads: each process has the full module and
                 computes with its shard of the activations; the gradients are summed over the processes

LoRA adapters that peft adds to a Linear are sharded together with the Linear. If a task has no plan, Legato uses the
`tp_plan` property of its Hugging Face Transformers models. HUB_WORDS translates the styles in these plans.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ....base.errors import ConfigError, did_you_mean, first_names

if TYPE_CHECKING:
    from ....tasks.task import Task

AXIS = "tensor"
REPLICATED, WHOLE = "replicated", "whole"
GATHERED, SPLIT = "column, gathered", "row, split"
"""A column layer with a gathered output, such as a head; a row layer with a full input, such as an embedding."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    GATHERED: lambda: ColwiseParallel(output_layouts=Replicate()),
    SPLIT: lambda: RowwiseParallel(input_layouts=Replicate()),
}
PLAN_WORDS = ("column", "row", REPLICATED)
HUB_WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise_split_input": SPLIT,
    "rowwise_rep": SPLIT,
    "embedding_rowwise": SPLIT,
    "replicated_with_grad_allreduce": REPLICATED,
    "replicate": WHOLE,
}
"""Maps the styles in Hugging Face Transformers to the words in this module."""


def plan_of(task: "Task") -> dict[str, str]:
    """Return the task's plan or, if there is none, the plans of its models, translated into this module's words.

    Raises ConfigError for a style that Legato does not support.
    """
    plan = dict(task.tensor_plan() or {})
    modules = dict(task.named_modules())
    # on the class, because an adapter forwards attributes from its base model, whose plan has other names
    models = [name for name, module in modules.items() if not plan and hasattr(type(module), "tp_plan")]
    for model in models:
        if any(outer != model and f"{model}.".startswith(f"{outer}.") for outer in models):
            continue  # the outer model's plan covers it
        for pattern, word in (modules[model].tp_plan or {}).items():
            names = f"{model}.{pattern}"
            # plans of model families have entries for layers that some models lack
            if not any(fnmatchcase(name, names) for name in (*modules, *dict(task.named_parameters()))):
                continue
            if word not in HUB_WORDS:
                raise ConfigError(
                    f"The tensor-parallel plan of {type(modules[model]).__name__} uses the {word!r} style for {names}, "
                    f"but Legato supports only {', '.join(HUB_WORDS)}. Define a tensor_plan() without these layers in "
                    f"{type(task).__name__}, or use shard instead of tensor."
                )
            if HUB_WORDS[word] != WHOLE:
                plan[names] = HUB_WORDS[word]
    return plan


def words_of(task: "Task", parts: int, in_shards: bool) -> dict[str, str]:
    """Return the plan's word ("column", ...) for each layer. Raises ConfigError if the plan does not fit the task.

    Args:
        in_shards: True if tensor_shards is set. Heads and embeddings are then left unsharded, because their sums have
            no fixed order.
    """
    words = read_plan(task, plan_of(task), parts)
    refuse_other_cuts(task, words)
    summed = [name for name, word in words.items() if in_shards and word == REPLICATED]
    if summed:
        raise ConfigError(
            f"tensor_shards: the gradient of {first_names(summed)} is a sum over tokens and heads, whose order depends "
            f"on the number of processes. Leave the layers around this module out of the plan, or omit tensor_shards."
        )
    return {name: word for name, word in words.items() if word in ("column", "row")} if in_shards else words


def apply_plan(task: "Task", mesh: DeviceMesh, words: Mapping[str, str]) -> None:
    """Shard the task's layers across a mesh with one axis. `words` is the result of `words_of`."""
    # every use of each parameter, to tie them again below
    ties: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in task.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            ties.setdefault(parameter, []).append((module, name))
    frozen = [name for name, parameter in task.named_parameters() if not parameter.requires_grad]
    parallelize_module(task, mesh, {name: STYLES[word]() for name, word in words.items() if word in STYLES})
    for name in frozen:  # in torch 2.10, all the new parameters require gradients
        task.get_parameter(name).requires_grad_(False)
    for (first, first_name), *duplicates in ties.values():
        for module, name in duplicates:  # parallelize_module unties parameters
            setattr(module, name, getattr(first, first_name))


def read_plan(task: nn.Module, plan: Mapping[str, str] | None, parts: int) -> dict[str, str]:
    """Return the plan's word for each module whose name matches a pattern in the plan. `*` matches any characters.

    Raises ConfigError if a pattern matches no module, if a word is unknown, or if a layer cannot be split into `parts`
    shards.
    """
    kind = type(task).__name__
    if not plan:
        raise ConfigError(
            f"tensor={parts} needs a plan: add a tensor_plan() method to {kind} that maps name patterns to "
            f'"column" or "row", as in {{"blocks.*.up": "column", "blocks.*.down": "row"}}.'
        )
    modules = {name: module for name, module in task.named_modules() if name}
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in (*PLAN_WORDS, *STYLES):
            hint = did_you_mean(str(word), PLAN_WORDS)
            raise ConfigError(f"{kind}.tensor_plan: {pattern!r}: {word!r} is not {' or '.join(PLAN_WORDS)}.{hint}")
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                f"{kind}.tensor_plan: no module matches {pattern!r}.{did_you_mean(pattern, modules)} "
                f"Modules: {', '.join([*modules][:8])}{', ...' if len(modules) > 8 else ''}."
            )
        for name in names:
            for layer in with_adapters(name, modules, word):
                # an attention layer stores the width of its heads
                head = getattr(modules.get(name.removesuffix(".base_layer").rpartition(".")[0]), "head_dim", None)
                require_cuttable(f"{kind}.{layer}", modules[layer], word, parts, head)
                words[layer] = word
    return words


def with_adapters(name: str, modules: Mapping[str, nn.Module], word: str) -> list[str]:
    """Return the names of the modules to shard: `name` itself or, if it has LoRA adapters, its base layer and adapters.

    For the LoRA product BA, "column" shards the outputs of B, and "row" shards the inputs of A. Raises ConfigError for
    other kinds of adapters.
    """
    name = name.removesuffix(".base_layer")
    base = getattr(modules[name], "base_layer", None)
    if word not in STYLES or not isinstance(base, nn.Linear):
        return [name]
    outer, inner = ("lora_B", "lora_A") if is_column(word) else ("lora_A", "lora_B")
    prefixes = tuple(f"{name}.{child}." for child in ("base_layer", outer, inner))
    names = [f"{name}.{parameter}" for parameter, _ in modules[name].named_parameters()]
    unknown = [parameter for parameter in names if not parameter.startswith(prefixes)]
    if unknown or getattr(modules[name], "lora_variant", None):
        raise ConfigError(
            f"tensor_plan: {name} has an adapter that Legato cannot split along with the layer"
            f"{f' ({unknown[0]})' if unknown else ''}. Only plain LoRA is supported. Leave the layer out of the plan, "
            f"or merge the adapter into the layer."
        )
    adapters = [f"{name}.{outer}.{adapter}" for adapter in getattr(modules[name], outer)]
    return [f"{name}.base_layer", *adapters]


def require_cuttable(name: str, module: nn.Module, word: str, parts: int, head: int | None = None) -> None:
    """Raise ConfigError if a module cannot be sharded as `word` specifies. `head` is the width of an attention head."""
    if word == REPLICATED:
        if not any(True for _ in module.parameters()):
            raise ConfigError(f"tensor_plan marks {name} as {word!r}, but it has no parameters.")
        return
    if not isinstance(module, nn.Linear) and not (isinstance(module, nn.Embedding) and word == SPLIT):
        raise ConfigError(f"tensor_plan: {word!r} needs a Linear, but {name} is a {type(module).__name__}.")
    kind = "outputs" if is_column(word) else "inputs" if isinstance(module, nn.Linear) else "embeddings"
    size: Any = getattr(module, {"outputs": "out_features", "inputs": "in_features"}.get(kind, "num_embeddings"))
    if size % parts:  # torch allows uneven shards, but heads and gates in a layer have equal sizes
        raise ConfigError(
            f"tensor_plan: {name} has {size} {kind}, which is not a multiple of tensor={parts}. Change the number, or "
            f"use fewer processes along the tensor axis."
        )
    if isinstance(head, int) and (size // parts) % head:
        raise ConfigError(
            f"tensor_plan: {name} has {size} {kind} in heads of width {head}, so tensor={parts} would split a head. "
            f"Use fewer processes along the tensor axis, or leave the attention layers out of the plan."
        )


def is_column(word: str) -> bool:
    """Return whether `word` specifies that outputs are sharded."""
    return word in ("column", GATHERED)


def refuse_other_cuts(task: nn.Module, words: Mapping[str, str]) -> None:
    """Raise ConfigError if modules share a weight but the plan shards it differently in each module."""
    cuts: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, module in task.named_modules():
        word = words.get(name)
        dim = None if word not in STYLES else 0 if is_column(word) or isinstance(module, nn.Embedding) else 1
        for parameter in module.parameters(recurse=False):
            first, first_dim = cuts.setdefault(parameter, (name, dim))
            if parameter.ndim > 1 and first_dim != dim:
                raise ConfigError(
                    f"tensor_plan: {first} and {name} share a weight, but the plan shards it differently in each "
                    f"module. Leave both modules out of the plan, or untie their weights."
                )
