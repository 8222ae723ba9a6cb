"""Tensor parallelism: layers cut over the processes of the tensor axis by a plan of the task.

After Shoeybi et al. 2019, "Megatron-LM" (https://arxiv.org/abs/1909.08053), by torch.distributed.tensor.parallel.

    "column"     a Linear whose outputs are cut: its input is whole
    "row"        a Linear whose inputs are cut: its output is the sum over the processes, and whole
    "replicated" a module between a column and its row, such as a norm of heads: all of it is on each process, which
                 computes with its part of the activations, and its gradients are summed over the processes

Adapters of LoRA, as peft puts them around a Linear, are cut with it.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ....base.errors import ConfigError, did_you_mean

AXIS = "tensor"
REPLICATED = "replicated"
STYLES: dict[str, type[ParallelStyle]] = {"column": ColwiseParallel, "row": RowwiseParallel}
PLAN_WORDS = (*STYLES, REPLICATED)


def apply_plan(task: nn.Module, plan: Mapping[str, str] | None, mesh: DeviceMesh) -> None:
    """Cut the task's layers over a mesh of one axis. Raises ConfigError where the plan does not fit the task."""
    # read before anything is cut: a mistake in the last pattern must not leave half of the task cut
    found = read_plan(task, plan, mesh.size())
    frozen = [name for name, parameter in task.named_parameters() if not parameter.requires_grad]
    parallelize_module(task, mesh, {name: STYLES[word]() for name, word in found.items() if word in STYLES})
    for name in frozen:  # torch 2.10 makes new parameters that are all trained
        task.get_parameter(name).requires_grad_(False)


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
        if word not in PLAN_WORDS:
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
                require_cuttable(f"{kind}.{part}", modules[part], word, parts)
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
    outer, inner = ("lora_B", "lora_A") if word == "column" else ("lora_A", "lora_B")
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


def require_cuttable(name: str, module: nn.Module, word: str, parts: int) -> None:
    """Raise ConfigError where a module cannot be what the plan says."""
    if word == REPLICATED:
        if not any(True for _ in module.parameters()):
            raise ConfigError(f"tensor_plan: {name} is {word!r}, but has no parameters with gradients to sum.")
        return
    if not isinstance(module, nn.Linear):
        raise ConfigError(f"tensor_plan: {name} is a {type(module).__name__}; {word!r} is for Linear.")
    size = module.out_features if word == "column" else module.in_features
    if size % parts:  # torch would cut uneven parts, but heads and gates within a layer are equal ones
        raise ConfigError(
            f"tensor_plan: {name} has {size} {'outputs' if word == 'column' else 'inputs'}, which tensor={parts} does "
            f"not divide. Choose another width, or fewer processes on the axis tensor."
        )
