"""Ranks: the processes in a group, with their collectives and timeouts.

All ranks must call collectives in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import ConfigError, LegatoError, did_you_mean
from ...base.tensors import plain_tensors
from ...base.torch_private import set_group_timeout, set_group_timeouts
from . import connections

T = TypeVar("T")

PIECE = 25 << 20
"""Number of bytes to broadcast at a time, as in torch's DDP. A copy of these bytes is the only additional memory."""


class Ranks:
    """The ranks of a process group, and its collectives. By default, a single process that does not communicate."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        """Wrap a process group.

        Args:
            group: the process group; None selects the default process group, which need not exist for a single rank.
        """
        self.rank, self.size, self.group = rank, size, group

    def move(self, rank: int, size: int) -> None:
        """Switch to a new default group, where this process may have a different rank."""
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        # not dist.barrier, which chooses a device on its own under NCCL
        self.all_reduce(torch.zeros(1), "sum")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of rank `source` on every rank. The value must be picklable."""
        if self.size == 1:
            return value
        values = [value]
        # explicit, because torch would choose the device by the group's backends, which may include an accelerator's
        dist.broadcast_object_list(values, group_src=source, device=torch.device("cpu"), group=self.group)
        return values[0]

    def from_first(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0; return its result, or raise its LegatoError, on every rank."""
        # an exception on rank 0 alone would leave the other ranks waiting in the next collective
        result: tuple[Any, LegatoError | None] = None, None
        if self.rank == 0:
            try:
                result = action(), None
            except LegatoError as error:
                result = None, error
        value, problem = self.broadcast(result)
        if problem is not None:
            raise problem
        return value  # type: ignore[no-any-return]

    def broadcast_tensors(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite every rank's tensors with those of rank `source`, in chunks of about PIECE bytes."""
        if self.size == 1:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        plain = [inner for tensor in tensors for inner in plain_tensors(tensor)]
        for tensor in sorted(plain, key=torch.Tensor.element_size, reverse=True):  # widest first keeps all aligned
            by_device.setdefault(tensor.device, []).append(tensor.detach())
        for device_tensors in by_device.values():
            ends = list(accumulate((tensor.nbytes for tensor in device_tensors), initial=0))
            # group tensors by the pieces where they start and end: a large tensor is alone and is sent without a copy
            numbers = [(start // PIECE, end // PIECE) for start, end in pairwise(ends)]
            for _, piece in groupby(zip(numbers, device_tensors, strict=True), key=itemgetter(0)):
                self._broadcast_piece([tensor for _, tensor in piece], source)

    def _broadcast_piece(self, tensors: Sequence[Tensor], source: int) -> None:
        rows = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]  # every backend takes bytes
        flat = torch.cat(rows) if len(rows) > 1 else rows[0]
        if flat.nbytes:
            dist.broadcast(flat, group_src=source, group=self.group)
        for tensor, row in zip(tensors, flat.split([row.numel() for row in rows]), strict=True):
            tensor.copy_(row.view(tensor.dtype).view_as(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which must have equal shapes, stacked into shape (size, *shape)."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return torch.stack(gathered)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order. The values must be picklable."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduce `tensor` over ranks in place by "sum", "max", "min" or "product", and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper()), group=self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.tensor([float(flag)]), "max").item())


SINGLE = Ranks()
"""A single process."""


# --- groups ----------------------------------------------------------------------------------------------------------
_groups: dict[Any, Any] = {}
"""Process groups for Legato's collectives, keyed by default group."""


def legatos_group(limit: timedelta | None = None) -> Any:
    """Return the process group for Legato's collectives, which includes all ranks. All ranks must call this.

    The default group is left to the script, so an extra collective call that one rank makes in the default group is
    never matched with one of Legato's collectives. Unlike a group from `init_process_group("nccl")`, Legato's group
    also supports CPU tensors.

    Args:
        limit: timeout for the group's collectives.
    """
    world = dist.group.WORLD
    # a new default group has new ranks; an earlier run's groups are closed when the last reference to them is dropped
    if world not in _groups:
        _groups.clear()
        backends = ",".join(f"{device}:{name}" for device, name in devices_of_group().items())
        backend = None if serves_host() else f"cpu:gloo,{backends}"
        with connections.noting(more=True):
            _groups[world] = dist.new_group(timeout=limit, backend=backend)
    elif limit is not None and dist.get_backend() != "mpi":
        set_group_timeout(limit, _groups[world])
    return _groups[world]


def serves_host() -> bool:
    """Return whether the default group supports CPU tensors."""
    return "cpu" in devices_of_group() or dist.get_backend() == "mpi"


def devices_of_group() -> dict[str, str]:
    """Return the default group's backend for each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config()
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def require_backend(device: torch.device, wanted: str | None) -> None:
    """Raise ConfigError if the default group's backend for `device` is missing or differs from `wanted`."""
    backends = devices_of_group()
    backend = backends.get(device.type)
    if dist.get_backend() != "mpi" and (backend is None or wanted not in (None, backend)):
        described = ", ".join(f"{backend} for {kind}" for kind, backend in backends.items())
        raise ConfigError(
            f"The existing process group uses {described}, but this run uses {device.type}"
            f"{f' with process_group_backend={wanted!r}' if wanted else ''}. Call init_process_group() without a "
            f"backend, or set trainer.accelerator and process_group_backend to match the group."
        )


# --- timeouts --------------------------------------------------------------------------------------------------------
Phase = Literal["startup", "step", "checkpoint"]
Timeout = float | Mapping[Phase, float]
"""Seconds for all phases, or for each phase."""
PHASES: tuple[Phase, ...] = ("startup", "step", "checkpoint")
DEFAULT = 1800.0
"""Default seconds for a phase, as in torch."""


class Timeouts:
    """Timeouts for collectives in each phase, and the current phase.

    `startup` lasts from the rendezvous to the first step, which compiles kernels and fills loaders; `step` covers
    training, including validation runs; `checkpoint` covers a save, during which other ranks wait for rank 0.
    """

    def __init__(self, wanted: Timeout) -> None:
        """Set the timeouts. Raises ConfigError for an unknown phase or a value that is not a positive number."""
        limits: Mapping[Phase, float] = wanted if isinstance(wanted, Mapping) else dict.fromkeys(PHASES, wanted)
        for phase, seconds in limits.items():
            if phase not in PHASES:
                raise ConfigError(
                    f"timeout has no phase {phase!r}: expected seconds, or a mapping from {', '.join(PHASES)} to "
                    f"seconds.{did_you_mean(str(phase), PHASES)}"
                )
            # `not >` also rejects NaN
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
                place = f"timeout.{phase}" if isinstance(wanted, Mapping) else "timeout"
                raise ConfigError(f"{place}={seconds!r}: expected a positive number of seconds.")
        self.limits = {phase: timedelta(seconds=limits.get(phase, DEFAULT)) for phase in PHASES}
        self.phase: Phase = "startup"

    def enter(self, phase: Phase) -> None:
        """Switch every process group to the timeout of `phase`, starting with the next collective."""
        # only if the timeout changes, because it must be set on every process group
        changes, self.phase = self.limits[phase] != self.limits[self.phase], phase
        if changes and dist.is_initialized():
            set_group_timeouts(self.limits[phase])

    def end_startup(self) -> None:
        """Enter the phase `step` if the current phase is `startup`. During a save, the phase remains `checkpoint`."""
        if self.phase == "startup":
            self.enter("step")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` for the duration of this context."""
        previous = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(previous)
