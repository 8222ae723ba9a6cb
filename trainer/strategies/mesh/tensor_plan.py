"""Tensor parallelism: layers cut over the processes of the tensor axis by a plan of the task, or of its models.

After Shoeybi et al. 2019, "Megatron-LM" (https://arxiv.org/abs/1909.08053), by torch.distributed.tensor.parallel.

    "column"     a Linear whose outputs are cut: its input is whole
    "row"        a Linear whose inputs are cut: its output is the sum over the processes, and whole
    "replicated" a module between a column and its row, such as a norm of heads: all of it is on each process, which
                 computes with its part of the activations, and its gradients are summed over the processes

Adapters of LoRA, as peft puts them around a Linear, are cut with it. Where the task has no plan, that of its models
counts: the property `tp_plan` of transformers, in whose words HUB_WORDS has what is done here.
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
"""A column whose output is gathered, such as a head's; a row whose input is whole, such as an embedding's."""
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
"""What the words of transformers mean here."""


def plan_of(task: "Task") -> dict[str, str]:
    """Return the task's plan, or where it has none those of its models, in the words of this module.

    Raises ConfigError for a model's word that is not done here.
    """
    plan = dict(task.tensor_plan() or {})
    modules = dict(task.named_modules())
    # by the class: an adapter passes on its base's attributes, whose names are not its own
    models = [name for name, module in modules.items() if not plan and hasattr(type(module), "tp_plan")]
    for model in models:
        if any(outer != model and f"{model}.".startswith(f"{outer}.") for outer in models):
            continue  # is in the plan of that one
        for pattern, word in (modules[model].tp_plan or {}).items():
            names = f"{model}.{pattern}"
            # rules for layers that this model lacks, as plans of families of models have them
            if not any(fnmatchcase(name, names) for name in (*modules, *dict(task.named_parameters()))):
                continue
            if word not in HUB_WORDS:
                raise ConfigError(
                    f"The tensor parallel plan of {type(modules[model]).__name__} says {word!r} for {names}, which "
                    f"Legato does not do; it knows {', '.join(HUB_WORDS)}. Cut other layers by a method tensor_plan() "
                    f"of {type(task).__name__}, or use shard in place of tensor."
                )
            if HUB_WORDS[word] != WHOLE:
                plan[names] = HUB_WORDS[word]
    return plan


def words_of(task: "Task", parts: int, in_shards: bool) -> dict[str, str]:
    """Return what the plan says of each layer. Raises ConfigError where it does not fit the task.

    `in_shards`: a head and an embedding stay whole, whose sums over a part have no order of their own.
    """
    words = read_plan(task, plan_of(task), parts)
    refuse_other_cuts(task, words)
    summed = [name for name, word in words.items() if in_shards and word == REPLICATED]
    if summed:
        raise ConfigError(
            f"tensor_shards: the gradient of {first_names(summed)} is one sum over tokens and heads, in another order "
            f"on another number of processes. Leave the layers around it out of the plan, or tensor_shards."
        )
    return {name: word for name, word in words.items() if word in ("column", "row")} if in_shards else words


def apply_plan(task: "Task", mesh: DeviceMesh, found: Mapping[str, str]) -> None:
    """Cut the task's layers over a mesh of one axis, as `words_of` says."""
    ties: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in task.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            ties.setdefault(parameter, []).append((module, name))
    frozen = [name for name, parameter in task.named_parameters() if not parameter.requires_grad]
    parallelize_module(task, mesh, {name: STYLES[word]() for name, word in found.items() if word in STYLES})
    for name in frozen:  # torch 2.10 makes new parameters that are all trained
        task.get_parameter(name).requires_grad_(False)
    for (first, first_name), *others in ties.values():
        for module, name in others:  # each module has been given a parameter of its own
            setattr(module, name, getattr(first, first_name))


def read_plan(task: nn.Module, plan: Mapping[str, str] | None, parts: int) -> dict[str, str]:
    """Return the word for each module that a plan's patterns name; `*` matches any part of a name.

    Raises ConfigError for a pattern that names nothing (with the nearest names), a word that is none, and a layer that
    cannot be cut into so many parts.
    """
    kind = type(task).__name__
    if not plan:
        raise ConfigError(
            f"tensor={parts} needs a plan: give {kind} a method tensor_plan() that returns name patterns and, for each,"
            f' "column" or "row", such as {{"blocks.*.up": "column", "blocks.*.down": "row"}}.'
        )
    modules = {name: module for name, module in task.named_modules() if name}
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in (*PLAN_WORDS, *STYLES):
            hint = did_you_mean(str(word), PLAN_WORDS)
            raise ConfigError(f"{kind}.tensor_plan: {pattern!r}: {word!r} is none of {', '.join(PLAN_WORDS)}.{hint}")
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                f"{kind}.tensor_plan: no module is named {pattern!r}.{did_you_mean(pattern, modules)} "
                f"There are {', '.join([*modules][:8])}{', ...' if len(modules) > 8 else ''}."
            )
        for name in names:
            for part in with_adapters(name, modules, word):
                # of the layer around it: an attention that says how wide a head is
                head = getattr(modules.get(name.removesuffix(".base_layer").rpartition(".")[0]), "head_dim", None)
                require_cuttable(f"{kind}.{part}", modules[part], word, parts, head)
                found[part] = word
    return found


def with_adapters(name: str, modules: Mapping[str, nn.Module], word: str) -> list[str]:
    """Return the Linears to cut for a module that the plan names: itself, or what peft has put around one.

    Of LoRA's product B A a "column" cuts the outputs of B, and a "row" the inputs of A. Raises ConfigError for adapters
    of another kind.
    """
    name = name.removesuffix(".base_layer")
    base = getattr(modules[name], "base_layer", None)
    if word not in STYLES or not isinstance(base, nn.Linear):
        return [name]
    outer, inner = ("lora_B", "lora_A") if is_column(word) else ("lora_A", "lora_B")
    prefixes = tuple(f"{name}.{part}." for part in ("base_layer", outer, inner))
    names = [f"{name}.{parameter}" for parameter, _ in modules[name].named_parameters()]
    odd = [parameter for parameter in names if not parameter.startswith(prefixes)]
    if odd or getattr(modules[name], "lora_variant", None):
        raise ConfigError(
            f"tensor_plan: {name} has an adapter that Legato cannot cut with its layer"
            f"{f' ({odd[0]})' if odd else ''}: only plain LoRA can be. Leave the layer out of the plan, or merge the "
            f"adapter into it."
        )
    adapters = [f"{name}.{outer}.{adapter}" for adapter in getattr(modules[name], outer)]
    return [f"{name}.base_layer", *adapters]


def require_cuttable(name: str, module: nn.Module, word: str, parts: int, head: int | None = None) -> None:
    """Raise ConfigError where a module cannot be what the plan says; `head`: numbers that belong together."""
    if word == REPLICATED:
        if not any(True for _ in module.parameters()):
            raise ConfigError(f"tensor_plan: {name} is {word!r}, but has no parameters with gradients to sum.")
        return
    if not isinstance(module, nn.Linear) and not (isinstance(module, nn.Embedding) and word == SPLIT):
        raise ConfigError(f"tensor_plan: {name} is a {type(module).__name__}; {word!r} is for Linear.")
    kind = "outputs" if is_column(word) else "inputs" if isinstance(module, nn.Linear) else "embeddings"
    size: Any = getattr(module, {"outputs": "out_features", "inputs": "in_features"}.get(kind, "num_embeddings"))
    if size % parts:  # torch would cut uneven parts, but heads and gates within a layer are equal ones
        raise ConfigError(
            f"tensor_plan: {name} has {size} {kind}, which tensor={parts} does not divide. Choose another width, or "
            f"fewer processes on the axis tensor."
        )
    if isinstance(head, int) and (size // parts) % head:
        raise ConfigError(
            f"tensor_plan: {name} has {size // head} heads of {head} numbers, which tensor={parts} does not divide. "
            f"Take fewer processes on the axis tensor, or leave the attention out of the plan."
        )


def is_column(word: str) -> bool:
    """Return whether a word cuts outputs."""
    return word in ("column", GATHERED)


def refuse_other_cuts(task: nn.Module, words: Mapping[str, str]) -> None:
    """Raise ConfigError for modules that share a weight and would cut it in different ways."""
    cuts: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, module in task.named_modules():
        word = words.get(name)
        dim = None if word not in STYLES else 0 if is_column(word) or isinstance(module, nn.Embedding) else 1
        for parameter in module.parameters(recurse=False):
            other, other_dim = cuts.setdefault(parameter, (name, dim))
            if parameter.ndim > 1 and other_dim != dim:
                raise ConfigError(
                    f"tensor_plan: {other} and {name} share a weight, of which the plan cuts one, or each otherwise. "
                    f"Leave both out of the plan, or untie them."
                )
