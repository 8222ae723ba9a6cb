"""A summary of a module's layers, with parameters, shapes and operations, as an object and as a table."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from .utilities import move_data_to_device

PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]
UNKNOWN_SIZE = "?"
LEFTOVER_PARAMS_NAME = "other params"
NOT_APPLICABLE = "n/a"


class LayerSummary:
    """A layer: its type, its parameters and, after a call, the shapes of its input and output."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.in_size: str | list[Any] = UNKNOWN_SIZE
        self.out_size: str | list[Any] = UNKNOWN_SIZE
        scripted = isinstance(module, torch.jit.ScriptModule)
        self._hook = None if scripted else module.register_forward_hook(self._take_shapes, with_kwargs=True)

    def _take_shapes(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = (*args, *kwargs.values())
        self.in_size = parse_batch_shape(inputs[0] if len(inputs) == 1 else inputs)
        self.out_size = parse_batch_shape(output)
        self.detach_hook()

    def detach_hook(self) -> None:
        """Remove the hook that records the shapes during the forward pass."""
        if self._hook is not None:
            self._hook.remove()

    def __del__(self) -> None:
        self.detach_hook()

    @property
    def layer_type(self) -> str:
        """The name of the layer's class."""
        return type(self.module).__name__

    @property
    def num_parameters(self) -> int:
        """The number of parameters in the layer."""
        return sum(_count(parameter) for parameter in self.module.parameters())

    @property
    def training(self) -> bool:
        """Whether the layer is in training mode."""
        return self.module.training


class ModelSummary:
    """A module's layers down to depth `max_depth` (-1: all layers, 0: none). `str()` returns a table.

    A module with an `example_input_array` is called once with that input to record shapes and operations.
    """

    def __init__(self, model: Any, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"`max_depth` can be -1, 0 or > 0, got {max_depth}.")
        self.model, self.max_depth = model, max_depth
        self._counter = FlopCounterMode(display=False, depth=max_depth + 1)
        self._layers = self.summarize()

    def summarize(self) -> dict[str, LayerSummary]:
        """Return the layers by name."""
        layers = {name: LayerSummary(module) for name, module in self.named_modules}
        if self._example is not None:
            self._call_with_example()
        for layer in layers.values():
            layer.detach_hook()
        if self.max_depth >= 1:
            layers = {name: layer for name, layer in layers.items() if name.count(".") < self.max_depth}
        return layers

    @property
    def _example(self) -> Any:
        return getattr(self.model, "example_input_array", None)

    def _call_with_example(self) -> None:
        parameter = next(self.model.parameters(), None)
        example = self._example if parameter is None else move_data_to_device(self._example, parameter.device)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad(), self._counter:
            if isinstance(example, (list, tuple)):
                self.model(*example)
            elif isinstance(example, dict):
                self.model(**example)
            else:
                self.model(example)
        for module, mode in modes:
            module.training = mode

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Names and modules: none if `max_depth` is 0, the direct children if it is 1, otherwise all submodules."""
        if self.max_depth == 0:
            return []
        return list(self.model.named_children()) if self.max_depth == 1 else list(self.model.named_modules())[1:]

    @property
    def layer_names(self) -> list[str]:
        """The name of each layer."""
        return list(self._layers)

    @property
    def layer_types(self) -> list[str]:
        """The class of each layer."""
        return [layer.layer_type for layer in self._layers.values()]

    @property
    def in_sizes(self) -> list[Any]:
        """The shape of each layer's input."""
        return [layer.in_size for layer in self._layers.values()]

    @property
    def out_sizes(self) -> list[Any]:
        """The shape of each layer's output."""
        return [layer.out_size for layer in self._layers.values()]

    @property
    def param_nums(self) -> list[int]:
        """The number of parameters in each layer."""
        return [layer.num_parameters for layer in self._layers.values()]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each layer is in training mode."""
        return [layer.training for layer in self._layers.values()]

    @property
    def total_training_modes(self) -> dict[str, int]:
        """The number of modules in training mode and the number in evaluation mode."""
        modes = [module.training for module in self.model.modules()][1:]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def total_parameters(self) -> int:
        """The number of parameters."""
        return sum(_count(parameter) for parameter in self.model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """The number of parameters that require gradients."""
        return sum(_count(parameter) for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def total_layer_params(self) -> int:
        """The number of parameters in the layers that the table lists."""
        return sum(self.param_nums)

    @property
    def model_size(self) -> float:
        """The parameters' size in MB, in their current dtypes."""
        size: int = sum(_count(parameter) * parameter.element_size() for parameter in self.model.parameters())
        return size * 1e-6

    @property
    def total_flops(self) -> int:
        """The number of floating-point operations in a call with the example input; 0 if there is no example input."""
        return int(self._counter.get_total_flops())

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """The number of floating-point operations in each layer, by operation type."""
        counts, root = self._counter.get_flop_counts(), type(self.model).__name__
        return {name: dict(counts.get(f"{root}.{name}", {})) for name in self.layer_names}

    def columns(self) -> dict[str, list[str]]:
        """Return the columns of the table, keyed by header."""
        flops = [sum(counts.values()) for counts in self.flop_counts.values()]
        columns = {
            " ": [str(index) for index in range(len(self._layers))],
            "Name": self.layer_names,
            "Type": self.layer_types,
            "Params": [get_human_readable_count(count) for count in self.param_nums],
            "Mode": ["train" if mode else "eval" for mode in self.training_modes],
            "FLOPs": [get_human_readable_count(count) for count in flops],
        }
        if self._example is not None:
            columns["In sizes"] = [str(size) for size in self.in_sizes]
            columns["Out sizes"] = [str(size) for size in self.out_sizes]
        left = self.total_parameters - self.total_layer_params
        if left > 0:
            row = {" ": " ", "Name": LEFTOVER_PARAMS_NAME, "Params": get_human_readable_count(left)}
            for head, column in columns.items():
                column.append(row.get(head, NOT_APPLICABLE))
        return columns

    def __str__(self) -> str:
        counts = self.total_parameters, self.trainable_parameters, self.model_size
        return format_summary(self.columns(), shown_totals(*counts, self.total_training_modes, self.total_flops))

    __repr__ = __str__


def _count(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def parse_batch_shape(batch: Any) -> str | list[Any]:
    """Return the shape of a tensor or the shapes of a list or tuple of tensors. For other objects, return "?"."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    return [parse_batch_shape(item) for item in batch] if isinstance(batch, (list, tuple)) else UNKNOWN_SIZE


def get_formatted_model_size(total_model_size: float) -> str:
    """Format a size in MB."""
    return f"{total_model_size:,.3f}"


def get_human_readable_count(number: int) -> str:
    """Format a count with a unit, such as "1.2 K": thousand (K), million (M), billion (B) or trillion (T)."""
    if number < 0:
        raise AssertionError(f"Expected a count of at least 0, got {number}.")
    group = min(max(len(str(int(number))) - 1, 0) // 3, len(PARAMETER_NUM_UNITS) - 1)
    scaled = number / 1000**group
    shown = f"{int(scaled):,d}" if group == 0 or scaled >= 100 else f"{scaled:,.1f}"
    return f"{shown} {PARAMETER_NUM_UNITS[group]}"


def summarize(lightning_module: Any, max_depth: int = 1) -> ModelSummary:
    """Return the summary of a module."""
    return ModelSummary(lightning_module, max_depth=max_depth)


def shown_totals(
    total_parameters: int, trainable_parameters: int, model_size: float, modes: dict[str, int], total_flops: int
) -> dict[str, str]:
    """Return the labels and values for the lines below the table."""
    return {
        "Trainable params": get_human_readable_count(trainable_parameters),
        "Non-trainable params": get_human_readable_count(total_parameters - trainable_parameters),
        "Total params": get_human_readable_count(total_parameters),
        "Total estimated model params size (MB)": get_formatted_model_size(model_size),
        "Modules in train mode": str(modes["train"]),
        "Modules in eval mode": str(modes["eval"]),
        "Total Flops": get_human_readable_count(total_flops),
    }


def format_summary(columns: Mapping[str, list[str]], totals: Mapping[str, str]) -> str:
    """Format a table from columns keyed by header, with totals below the table."""
    widths = [max(map(len, (head, *column))) for head, column in columns.items()]
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    lines = [" | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * (sum(widths) + 3 * (len(widths) + 1))  # Lightning counts outer borders, which its table does not have
    return "\n".join([lines[0], rule, *lines[1:], rule, *(f"{value:<10}{name}" for name, value in totals.items())])
