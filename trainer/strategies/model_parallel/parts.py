"""Parts: the blocks of a task, cut into runs of neighbours whose largest has the fewest bytes of parameters.

    blocks       embedding | layer 0 | layer 1 | layer 2 | layer 3 | head
    kilobytes           97 |     793 |     793 |     793 |     793 |   50
    two parts    `--------- 1,683 ----------´    `------- 1,636 -------´

model_parallel.py puts each part on a device of one process, pipeline.py each on a process of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ....base.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from ....tasks.task import Task

Split = Literal["auto"] | list[int]
"""Cut by parameter bytes, or the number of blocks of each part."""


@dataclass(frozen=True)
class PartBlock:
    """A module of the task through which every sample goes, after the block before it."""

    name: str
    """Path in the task."""
    module: nn.Module
    size: int
    """Bytes of its parameters and buffers."""


def find_part_blocks(task: "Task") -> list[PartBlock]:
    """Return the blocks that the task's configure_blocks gives, or those of its nn.Sequential that has all parameters.

    An empty list where there is neither. Raises TaskError where configure_blocks returns something else than modules
    of the task, or one of them twice.
    """
    given: Any = task.configure_blocks()
    if given is None:
        # only where it has all parameters can nothing of the model happen outside of it
        own = {id(parameter) for parameter in task.parameters()}
        whole = [
            child
            for child in task.children()
            if isinstance(child, nn.Sequential) and own <= {id(parameter) for parameter in child.parameters()}
        ]
        given = whole[0] if own and len(whole) == 1 else []
    modules = list(given)
    names = {id(module): name for name, module in task.named_modules()}
    where = f"{type(task).__name__}.configure_blocks"
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module) or id(module) not in names or module is task:
            came = type(module).__name__
            raise TaskError(
                f"{where} must return modules of the task, in forward order; entry {index} is a {came}"
                f"{' that is no part of the task' if isinstance(module, nn.Module) else ''}."
            )
    # a module within two blocks would have to be on two devices
    inner = [id(child) for module in modules for child in module.modules()]
    if len(set(inner)) < len(inner):
        twice = next(names[one] for one in inner if inner.count(one) > 1)
        raise TaskError(f"{where} must return each module once, and none within another; {twice} comes twice.")
    return [PartBlock(names[id(module)], module, module_bytes(module)) for module in modules]


def no_blocks(task: "Task") -> str:
    """Say what a task without blocks has to do."""
    kind = type(task).__name__
    return (
        f"{kind} does not say how its model can be cut. Give it one nn.Sequential with all parameters, or a method\n"
        f"    def configure_blocks(self): return [self.embedding, *self.layers, self.head]\n"
        f"that returns the blocks in forward order."
    )


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a module; what is shared within it counts once."""
    tensors = {id(tensor): tensor for tensor in tensors_of(module)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def cut(blocks: Sequence[PartBlock], parts: int, split: Split = "auto") -> list[list[PartBlock]]:
    """Return the blocks of each part. Raises ConfigError, with the sums, where they cannot be cut so."""
    if len(blocks) < parts:
        names = ", ".join(block.name for block in blocks)
        raise ConfigError(
            f"{len(blocks)} blocks ({names}) cannot make {parts} parts; each part needs a block at least."
        )
    if split == "auto":
        # by bytes and not by measured time: known before the first batch, and alike on every rank
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
    """Return the blocks of each part of a task, none of which needs a tensor of another; raises ConfigError."""
    blocks = find_part_blocks(task)
    if not blocks:
        raise ConfigError(no_blocks(task))
    found = cut(blocks, parts, split)
    refuse_shared(task, found)
    return found


def refuse_idle(stages: Sequence[Sequence[PartBlock]]) -> None:
    """Raise ConfigError where a stage of a pipeline has nothing to train."""
    for place, stage in enumerate(stages):
        if not any(parameter.requires_grad for block in stage for parameter in block.module.parameters()):
            names = ", ".join(block.name for block in stage)
            raise ConfigError(f"Stage {place} of the pipeline ({names}) has nothing to train; take another split.")


def check_counts(split: Any, parts: int) -> None:
    """Raise ConfigError where `split` is neither "auto" nor one count of blocks for each part."""
    if split == "auto":
        return
    counts = list(split) if isinstance(split, Sequence) and not isinstance(split, str) else []
    if not counts or any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ConfigError(f"split={split!r}: expected 'auto', or for each part how many blocks it has, as in [3, 5].")
    if len(counts) != parts:
        raise ConfigError(f"split={counts} has {len(counts)} counts, but there are {parts} parts; give one for each.")


def split_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """Return how many of `sizes` each part takes so that the largest sum is as small as can be; none is left empty.

    Of the ways that are equal in this, one whose sums differ little. The linear partition problem, by dynamic
    programming (Skiena, The Algorithm Design Manual, section 10.7): parts x len(sizes)^2 steps.
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    # best[n]: largest sum, sum of squares and counts of the best cut of the first n sizes
    best: list[tuple[int, int, tuple[int, ...]]] = [(end, end * end, (n,)) for n, end in enumerate(ends)]
    for part in range(1, parts):
        grown = []
        for n in range(len(ends)):
            ways = [
                # compared as tuples: the largest part first, the sum of squares where that is equal
                (max(best[m][0], last), best[m][1] + last * last, (*best[m][2], n - m))
                for m in range(part, n)
                for last in (ends[n] - ends[m],)
            ]
            grown.append(min(ways, default=(0, 0, ())))
        best = grown
    return list(best[len(sizes)][2])


def refuse_shared(task: nn.Module, parts: Sequence[Sequence[PartBlock]]) -> None:
    """Raise ConfigError, with its names, where a parameter or buffer would have to be in two parts at once.

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
                    f"{' and '.join(names[id(tensor)][:2])} are one tensor, which parts {home[id(tensor)]} and {index} "
                    f"would both need. Untie them, or keep both in one part with split."
                )


def tensors_of(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(recurse), *module.buffers(recurse)]


def tensors_outside(task: nn.Module, parts: Iterable[Iterable[PartBlock]]) -> list[Tensor]:
    """Return the parameters and buffers that belong to no block."""
    inside = {child for part in parts for block in part for child in block.module.modules()}
    return [tensor for module in task.modules() if module not in inside for tensor in tensors_of(module, False)]
