"""Strategies with one process for each device, in one process group."""

from collections.abc import Sequence

import torch

from ...base.errors import ConfigError
from ..accelerators import backend_for, make_current
from ..optimization.precision import Precision
from ..processes.place import Place, find_group
from ..processes.ranks import DEFAULT, Ranks, Timeout, Timeouts, legatos_group, require_backend
from ..processes.rendezvous import join_process_group
from .strategy import Strategy


class GroupStrategy(Strategy):
    """One process for each device, in one process group."""

    def __init__(
        self,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: Timeout = DEFAULT,
    ) -> None:
        """`timeout`: see `processes.ranks.Timeouts`; without a backend, torch's for the kind of device."""
        super().__init__()
        self.process_group_backend, self.init_method = process_group_backend, init_method
        self.timeouts = Timeouts(timeout)

    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return one process for each device."""
        return len(devices)

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group and take the device of the local rank."""
        self.place, self.devices = place, list(devices)
        if place.local_world_size > len(devices) and devices[0].type != "cpu":
            raise ConfigError(
                f"{place.local_world_size} processes on this machine, but {len(devices)} {devices[0].type} devices; "
                f"start as many processes as there are devices."
            )
        # there may be more processes than entries for the CPU only, whose entries are all the same device
        self.device = devices[place.local_rank % len(devices)]
        make_current(self.device)
        self.precision = Precision(precision, self.device.type)
        rank, group = place.rank, None
        if place.world_size > 1:
            limit, only = self.timeouts["startup"], self._only_device()
            self.meeting = join_process_group(place, self._backend(), limit, self.init_method, only)
            if find_group() is not None:
                require_backend(self.device, self.process_group_backend)
            # elastic groups come and go with their members; elsewhere the default group is left to the script, so that
            # a collective that the script calls once too often cannot pair with one of ours
            if not self.elastic.changes:
                group = legatos_group(self.timeouts["startup"])
            self.timeouts.enter("startup")
        else:
            rank = 0  # also of the process that is about to join an elastic run, whose place is not the first
        self.collectives = self.data_ranks = Ranks(rank, place.world_size, group)

    def _only_device(self) -> torch.device | None:
        """Return the one device of this process; None if it has several, or if its groups come and go."""
        return None if self.elastic.changes else self.device

    def _backend(self) -> str:
        """Return the backend of the process group."""
        return backend_for(self.device, self.process_group_backend)
