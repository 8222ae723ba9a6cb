"""Functions that split a model's blocks into consecutive parts, so that the largest part is as small as possible.

    blocks       embedding | layer 0 | layer 1 | layer 2 | layer 3 | head
    kilobytes           97 |     793 |     793 |     793 |     793 |   50
    two parts    `--------- 1,683 ----------´    `------- 1,636 -------´

model_parallel.py places the parts on different devices in one process. pipeline.py places them in different processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ....base.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from ....tasks.task import Task

Split = Literal["auto"] | list[int]
"""Number of blocks in each part; "auto" balances the parts by their size in bytes."""


@dataclass(frozen=True)
class PartBlock:
    """A block of the model. Every sample passes through all blocks in order."""

    name: str
    """Module path in the task."""
    module: nn.Module
    size: int
    """Size of the parameters and buffers in bytes."""


def find_part_blocks(task: "Task") -> list[PartBlock]:
    """Return the blocks from configure_blocks, or the children of an nn.Sequential that contains all parameters.

    Return an empty list if the task has neither. Raises TaskError if configure_blocks returns anything other than
    distinct modules of the task.
    """
    blocks: Any = task.configure_blocks()
    if blocks is None:
        # it must have all parameters, so that no part of the model is outside of it
        parameters = {id(parameter) for parameter in task.parameters()}
        candidates = [
            child
            for child in task.children()
            if isinstance(child, nn.Sequential) and parameters <= {id(parameter) for parameter in child.parameters()}
        ]
        blocks = candidates[0] if parameters and len(candidates) == 1 else []
    modules = list(blocks)
    names = {id(module): name for name, module in task.named_modules()}
    where = f"{type(task).__name__}.configure_blocks"
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module) or id(module) not in names or module is task:
            kind = type(module).__name__
            raise TaskError(
                f"{where} must return modules of the task, in forward order; entry {index} is a {kind}"
                f"{' outside of the task' if isinstance(module, nn.Module) else ''}."
            )
    # a module in two blocks would need to be on two devices
    inner = [id(child) for module in modules for child in module.modules()]
    if len(set(inner)) < len(inner):
        twice = next(names[child] for child in inner if inner.count(child) > 1)
        raise TaskError(f"{where} must return distinct modules that do not contain each other; {twice} appears twice.")
    return [PartBlock(names[id(module)], module, module_bytes(module)) for module in modules]


def describe_missing_blocks(task: "Task") -> str:
    """Return the error message for a task without blocks."""
    kind = type(task).__name__
    return (
        f"{kind} does not define how to split its model. Put all parameters into one nn.Sequential, or add a method\n"
        f"    def configure_blocks(self): return [self.embedding, *self.layers, self.head]\n"
        f"that returns the blocks in forward order."
    )


def module_bytes(module: nn.Module) -> int:
    """Return the total size of a module's parameters and buffers in bytes. Shared tensors are counted once."""
    tensors = {id(tensor): tensor for tensor in tensors_of(module)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def cut(blocks: Sequence[PartBlock], parts: int, split: Split = "auto") -> list[list[PartBlock]]:
    """Return the blocks in each part. Raises ConfigError if there are too few blocks or `split` does not match them."""
    if len(blocks) < parts:
        names = ", ".join(block.name for block in blocks)
        raise ConfigError(
            f"{len(blocks)} blocks ({names}) cannot be split into {parts} parts. Each part needs at least one block."
        )
    if split == "auto":
        # by bytes rather than measured time: known before the first batch, and equal on every rank
        counts = split_evenly([block.size for block in blocks], parts)
    else:
        counts = list(split)
        if sum(counts) != len(blocks):
            raise ConfigError(
                f"split={counts} adds up to {' + '.join(map(str, counts))} = {sum(counts)} blocks, but the task has "
                f"{len(blocks)}: {', '.join(block.name for block in blocks)}."
            )
    ends = [sum(counts[: index + 1]) for index in range(parts)]
    return [list(blocks[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def cut_task(task: "Task", parts: int, split: Split = "auto") -> list[list[PartBlock]]:
    """Return the blocks in each part of a task. Raises ConfigError if two parts would share a tensor."""
    blocks = find_part_blocks(task)
    if not blocks:
        raise ConfigError(describe_missing_blocks(task))
    blocks_of_parts = cut(blocks, parts, split)
    refuse_shared(task, blocks_of_parts)
    return blocks_of_parts


def refuse_idle(stages: Sequence[Sequence[PartBlock]]) -> None:
    """Raise ConfigError if a stage of a pipeline has no trainable parameters."""
    for place, stage in enumerate(stages):
        if not any(parameter.requires_grad for block in stage for parameter in block.module.parameters()):
            names = ", ".join(block.name for block in stage)
            raise ConfigError(f"Stage {place} of the pipeline ({names}) has no trainable parameters. Adjust the split.")


def check_counts(split: Any, parts: int) -> None:
    """Raise ConfigError if `split` is neither "auto" nor a list with the number of blocks in each part."""
    if split == "auto":
        return
    counts = list(split) if isinstance(split, Sequence) and not isinstance(split, str) else []
    if not counts or any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ConfigError(f"split={split!r}: expected 'auto', or the number of blocks in each part, as in [3, 5].")
    if len(counts) != parts:
        raise ConfigError(f"split={counts} has {len(counts)} numbers for {parts} parts. Use one number per part.")


def split_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """Divide `sizes` into consecutive non-empty parts so that the largest sum is minimal. Return the parts' lengths.

    Ties are broken by the sum of squares. This is the linear partition problem, which dynamic programming solves in
    parts x len(sizes)^2 steps (Skiena, The Algorithm Design Manual, section 10.7).
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    # best[n]: largest sum, sum of squares and counts of the best partition of the first n sizes
    best: list[tuple[int, int, tuple[int, ...]]] = [(end, end * end, (n,)) for n, end in enumerate(ends)]
    for part in range(1, parts):
        grown = []
        for n in range(len(ends)):
            ways = [
                # compared as tuples: first by the largest part, then by the sum of squares
                (max(best[m][0], last), best[m][1] + last * last, (*best[m][2], n - m))
                for m in range(part, n)
                for last in (ends[n] - ends[m],)
            ]
            grown.append(min(ways, default=(0, 0, ())))
        best = grown
    return list(best[len(sizes)][2])


def refuse_shared(task: nn.Module, parts: Sequence[Sequence[PartBlock]]) -> None:
    """Raise ConfigError if two parts share a parameter or buffer.

    Tensors outside of all blocks belong to the last part.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in [*task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    home: dict[int, int] = {}
    for index, part in enumerate(parts):
        tensors = [tensor for block in part for tensor in tensors_of(block.module)]
        for tensor in tensors if index + 1 < len(parts) else [*tensors, *tensors_outside(task, parts)]:
            if home.setdefault(id(tensor), index) != index:
                raise ConfigError(
                    f"{' and '.join(names[id(tensor)][:2])} are the same tensor, but they belong to parts "
                    f"{home[id(tensor)]} and {index}. Untie them, or use split to keep both in one part."
                )


def tensors_of(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(recurse), *module.buffers(recurse)]


def tensors_outside(task: nn.Module, parts: Iterable[Iterable[PartBlock]]) -> list[Tensor]:
    """Return the parameters and buffers outside of all blocks."""
    inside = {child for part in parts for block in part for child in block.module.modules()}
    return [tensor for module in task.modules() if module not in inside for tensor in tensors_of(module, False)]
