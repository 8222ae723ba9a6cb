"""What the configs of the config tests name; copied into each test's own folder and imported from there."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional

from torch import nn

import legato as lg
from legato.callbacks.callback import Callback as Watcher

Mode = Literal["fast", "slow"]


class Base(lg.Task):
    def __init__(self, depth: int = 2, mode: Mode = "fast"):
        super().__init__()
        self.depth, self.mode = depth, mode


class Tiny(Base):
    def __init__(
        self,
        width: int,
        lr: float = 1e-3,
        *,
        label: "str" = "tiny",
        deep: bool = False,
        sizes: Optional[list[int]] = None,  # noqa: UP045  (both ways of writing it are tested)
        folder: Path | None = None,
        every: timedelta | None = None,
        pair: tuple[int, str] = (1, "a"),
        head: nn.Module | None = None,
        parts: dict[str, nn.Module] | None = None,
        either: int | str = 3,
        table: dict[str, float] | None = None,
        odd: int = "five",
        free=None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.given = dict(locals())


class Needy(lg.Task):
    def __init__(self, one, two: int):
        super().__init__()


class Data(lg.DataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()


@dataclass
class Note(Watcher):
    text: str
    times: int = 1
    tags: list[str] = field(default_factory=list)


class Dynamic(lg.Task):
    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = kwargs.copy()


def make_task():
    return Tiny(3)


number = 3
Alias = Tiny
