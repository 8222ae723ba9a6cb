"""Interception of calls to blocks, when the blocks of a task are spread over processes.

    outside of a training step    the first block of a stage has its owner compute the stage, the last one returns the
                                  output to all processes: validation, prediction, generation go on everywhere
    in a stage of the pipeline    the block computes
    first stage, training_step    the first block stops the step: what it was given is the pipeline's input
    last stage, training_step     blocks hand through, and the last one returns the output of the pipeline; the rest of
                                  the step makes of it a loss, and logs

So training_step is the task's own, whole: it needs no loss apart from its forward. The price is that nothing may be
computed between two blocks, since a process has no value there; the interceptor sees that and says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....base.errors import TaskError
from ..model_parallel.parts import PartBlock

BlockRelay = Callable[[int, Tensor | None], Tensor]
"""Takes the number of a stage and, on its process, its output; returns the output everywhere."""


class BlockInterceptor:
    """Intercepts the calls of a task's blocks, until `close`."""

    def __init__(self, stages: Sequence[Sequence[PartBlock]], place: int, stage: nn.Module, relay: BlockRelay) -> None:
        """`stage`: what runs the stage of this process, which is the one at `place`."""
        self.blocks = [block for stage in stages for block in stage]
        self.stage_of = [index for index, stage in enumerate(stages) for _ in stage]
        self.place, self.stage, self.relay = place, stage, relay
        self.result: Any = None
        """The output of a stage whose last block has not been called yet."""
        self.call = self._relayed
        self.token: Any = None
        """The placeholder that the block before has returned, where this process has no value."""
        self.next = 0
        self.kinds = [type(block.module) for block in self.blocks]
        self.own = [partial(kind.__call__, block.module) for kind, block in zip(self.kinds, self.blocks, strict=True)]
        """The original call of each block."""
        for index, block in enumerate(self.blocks):
            block.module.__class__ = intercepted(self.kinds[index], partial(self._enter, index))

    def close(self) -> None:
        """Restore the blocks."""
        for block, kind in zip(self.blocks, self.kinds, strict=True):
            block.module.__class__ = kind

    # --- what a call does -------------------------------------------------------------------------------------------
    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let blocks compute: a stage of the pipeline calls them."""
        with self._calling(self._computed):
            yield

    def input_of(self, step: Callable[[], Any]) -> tuple[Tensor, ...]:
        """Return what `step` gives to the first block, without going on from there; all of it tensors.

        Raises TaskError where that is nothing, or something else, or depends on parameters.
        """
        first = self.blocks[0].name
        try:
            with self._calling(self._stopped):
                step()
        except _Reached as reached:
            given, named = reached.args, reached.named
        else:
            raise TaskError(f"training_step never called {first!r}, the first of the task's blocks.")
        if named or not given or not all(isinstance(one, Tensor) for one in given):
            came = ", ".join([*(type(one).__name__ for one in given), *named]) or "nothing"
            raise TaskError(
                f"{first!r}, the first block of a pipeline, takes tensors by position; it was given {came}."
            )
        if any(one.requires_grad for one in given):
            raise TaskError(
                f"What training_step computes before {first!r}, the first of the task's blocks, depends on parameters, "
                f"which would not be trained there. Put it into a block."
            )
        return tuple(given)

    def finish(self, step: Callable[[], Any], output: Any) -> Any:
        """Return what `step` returns where the blocks turn its input into `output`."""
        with self._calling(partial(self._handed_through, output)):
            result = step()
        if self.next != len(self.blocks):
            raise TaskError(
                f"A pipeline's training_step calls each of the task's blocks once; it went on after "
                f"{self.next} of {len(self.blocks)}."
            )
        return result

    @contextmanager
    def _calling(self, call: Callable[..., Any]) -> Iterator[None]:
        before, self.call, self.next, self.token = self.call, call, 0, None
        try:
            yield
        finally:
            self.call = before

    def _enter(self, index: int, *args: Any, **kwargs: Any) -> Any:
        return self.call(index, args, kwargs)

    def _computed(self, index: int, args: Any, kwargs: Any) -> Any:
        return self.own[index](*args, **kwargs)

    def _stopped(self, index: int, args: Any, kwargs: Any) -> Any:
        if index > 0:
            raise self._out_of_order(index)
        raise _Reached(args, kwargs)

    def _handed_through(self, output: Any, index: int, args: Any, kwargs: Any) -> Any:
        if index == 0 and self.next == len(self.blocks):
            # there is one output: a second call would pass for the first one's
            raise TaskError(
                f"A pipeline's training_step calls each of the task's blocks once; it called {self.blocks[0].name!r} "
                f"again. Join the inputs of both calls, as by torch.cat, and split the output."
            )
        self._require_chain(index, args, kwargs)
        self.next = index + 1
        # a new object for each block, compared by identity: the same values through another operation are noticed
        self.token = torch.empty(0)
        return output if self.next == len(self.blocks) else self.token

    def _relayed(self, index: int, args: Any, kwargs: Any) -> Any:
        stage = self.stage_of[index]
        if index and self.stage_of[index - 1] == stage:
            self._require_chain(index, args, kwargs)
        elif stage == self.place:
            self.result = self._compute(args, kwargs)
        # on every process alike, whether it computes or not, so that the order is checked everywhere
        self.next, self.token = index + 1, torch.empty(0)
        if self.next < len(self.blocks) and self.stage_of[self.next] == stage:
            return self.token
        result, self.result = self.result, None
        return self.relay(stage, result)

    def _compute(self, args: Any, kwargs: Any) -> Tensor:
        if kwargs:
            raise TaskError(f"The blocks of a pipeline take what they are given by position, not {', '.join(kwargs)}.")
        with self.computing():
            result = self.stage(*args)
        if not isinstance(result, Tensor):
            first = self.blocks[self.stage_of.index(self.place)].name
            raise TaskError(
                f"A stage of a pipeline must end with one tensor; that of {first!r} ended with a "
                f"{type(result).__name__}."
            )
        return result

    def _require_chain(self, index: int, args: Any, kwargs: Any) -> None:
        if index == 0:
            return
        if index != self.next:
            raise self._out_of_order(index)
        if kwargs or len(args) != 1 or args[0] is not self.token:
            raise TaskError(
                f"Under a pipeline each block is given what the block before has returned, and nothing else. Between "
                f"{self.blocks[index - 1].name!r} and {self.blocks[index].name!r} the task does something: put it into "
                f"one of the two."
            )

    def _out_of_order(self, index: int) -> TaskError:
        return TaskError(
            f"A pipeline's blocks are called in the order of configure_blocks; {self.blocks[index].name!r} came where "
            f"{self.blocks[min(self.next, len(self.blocks) - 1)].name!r} was due."
        )


def intercepted(kind: type[nn.Module], enter: Callable[..., Any]) -> type[nn.Module]:
    """Return the class `kind` whose call is `enter`; not its forward, as hooks must not run where nothing computes."""
    members = {"__call__": lambda self, *args, **kwargs: enter(*args, **kwargs), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


class _Reached(BaseException):
    """The first block was called; no error, so that no `except Exception` of the task's keeps it."""

    def __init__(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__(*args)
        self.named = named
