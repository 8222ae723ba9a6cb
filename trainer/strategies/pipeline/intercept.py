"""Intercepts calls to a task's blocks, which are in different processes.

    outside of training_step      the first block of a stage runs the stage on its process, and the last block returns
                                  the stage's output on all processes (for validation, prediction and generation)
    in a stage of the pipeline    blocks compute as usual
    first stage, training_step    the first block stops training_step, and its arguments become the pipeline's input
    last stage, training_step     blocks do nothing, except that the last block returns the pipeline's output; the rest
                                  of training_step computes the loss and logs values

A task therefore does not need a separate loss function. However, it must not compute anything between blocks, because
not every process has the blocks' outputs. If the task computes something there, the interceptor raises an error.
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
"""Receives a stage's index and, on the stage's process, the stage's output. Returns the output on all processes."""


class BlockInterceptor:
    """Intercepts calls to a task's blocks until `close` is called."""

    def __init__(self, stages: Sequence[Sequence[PartBlock]], place: int, stage: nn.Module, relay: BlockRelay) -> None:
        """Intercept calls to the blocks.

        Args:
            stage: module that runs this process's stage.
            place: index of this process's stage.
        """
        self.blocks = [block for stage in stages for block in stage]
        self.stage_of = [index for index, stage in enumerate(stages) for _ in stage]
        self.place, self.stage, self.relay = place, stage, relay
        self.result: Any = None
        """The output of this process's stage, until the task calls its last block."""
        self.call = self._relayed
        self.token: Any = None
        """The placeholder that the previous block returned."""
        self.next = 0
        self.kinds = [type(block.module) for block in self.blocks]
        self.calls = [partial(kind.__call__, block.module) for kind, block in zip(self.kinds, self.blocks, strict=True)]
        """The original `__call__` of each block."""
        for index, block in enumerate(self.blocks):
            block.module.__class__ = intercepted(self.kinds[index], partial(self._enter, index))

    def close(self) -> None:
        """Restore the blocks."""
        for block, kind in zip(self.blocks, self.kinds, strict=True):
            block.module.__class__ = kind

    # --- calls ------------------------------------------------------------------------------------------------------
    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the blocks compute as usual while a stage calls them."""
        with self._calling(self._computed):
            yield

    def input_of(self, step: Callable[[], Any]) -> tuple[Tensor, ...]:
        """Run `step` up to the first block, and return the tensors that `step` passes to the block.

        Raises TaskError if `step` passes no arguments or anything other than positional tensors, or if a tensor depends
        on parameters.
        """
        first = self.blocks[0].name
        try:
            with self._calling(self._stopped):
                step()
        except _Reached as reached:
            inputs, named = reached.args, reached.named
        else:
            raise TaskError(f"training_step did not call {first!r}, the first block of the task.")
        if named or not inputs or not all(isinstance(value, Tensor) for value in inputs):
            types = ", ".join([*(type(value).__name__ for value in inputs), *named]) or "nothing"
            raise TaskError(f"{first!r}, the first block of a pipeline, accepts only positional tensors, got {types}.")
        if any(tensor.requires_grad for tensor in inputs):
            raise TaskError(
                f"training_step uses parameters before {first!r}, the first block of the task, but a pipeline can only "
                f"train parameters in blocks. Move this computation into a block."
            )
        return tuple(inputs)

    def finish(self, step: Callable[[], Any], output: Any) -> Any:
        """Run `step` with `output` as the last block's output, and return the result of `step`."""
        with self._calling(partial(self._passed_through, output)):
            result = step()
        if self.next != len(self.blocks):
            raise TaskError(
                f"In a pipeline, training_step must call each block of the task once, but it called only {self.next} "
                f"of {len(self.blocks)} blocks."
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
        return self.calls[index](*args, **kwargs)

    def _stopped(self, index: int, args: Any, kwargs: Any) -> Any:
        if index > 0:
            raise self._out_of_order(index)
        raise _Reached(args, kwargs)

    def _passed_through(self, output: Any, index: int, args: Any, kwargs: Any) -> Any:
        if index == 0 and self.next == len(self.blocks):
            # a second call would return the output of the first call
            raise TaskError(
                f"In a pipeline, training_step must call each block of the task once, but it called "
                f"{self.blocks[0].name!r} again. Join both inputs, for example with torch.cat, and split the output."
            )
        self._require_chain(index, args, kwargs)
        self.next = index + 1
        # a new object per block, compared by identity, so that any operation between blocks is detected
        self.token = torch.empty(0)
        return output if self.next == len(self.blocks) else self.token

    def _relayed(self, index: int, args: Any, kwargs: Any) -> Any:
        stage = self.stage_of[index]
        if index and self.stage_of[index - 1] == stage:
            self._require_chain(index, args, kwargs)
        elif stage == self.place:
            self.result = self._compute(args, kwargs)
        # also on processes that do not compute, so that all of them check the order
        self.next, self.token = index + 1, torch.empty(0)
        if self.next < len(self.blocks) and self.stage_of[self.next] == stage:
            return self.token
        result, self.result = self.result, None
        return self.relay(stage, result)

    def _compute(self, args: Any, kwargs: Any) -> Tensor:
        if kwargs:
            raise TaskError(f"Pipeline blocks support only positional arguments, not {', '.join(kwargs)}.")
        with self.computing():
            result = self.stage(*args)
        if not isinstance(result, Tensor):
            first = self.blocks[self.stage_of.index(self.place)].name
            raise TaskError(
                f"A stage of a pipeline must return a single tensor, but the stage that starts with {first!r} returned "
                f"an object of type {type(result).__name__}."
            )
        return result

    def _require_chain(self, index: int, args: Any, kwargs: Any) -> None:
        if index == 0:
            return
        if index != self.next:
            raise self._out_of_order(index)
        if kwargs or len(args) != 1 or args[0] is not self.token:
            raise TaskError(
                f"In a pipeline, the only argument of a block is the output of the previous block. Move the "
                f"computation between {self.blocks[index - 1].name!r} and {self.blocks[index].name!r} into one of them."
            )

    def _out_of_order(self, index: int) -> TaskError:
        return TaskError(
            f"In a pipeline, blocks must be called in the order of configure_blocks, but training_step called "
            f"{self.blocks[index].name!r} instead of {self.blocks[min(self.next, len(self.blocks) - 1)].name!r}."
        )


def intercepted(kind: type[nn.Module], enter: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of `kind` whose `__call__` method calls `enter`.

    The subclass does not override `forward`, because doing so would run the block's hooks on every call.
    """
    members = {"__call__": lambda self, *args, **kwargs: enter(*args, **kwargs), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


class _Reached(BaseException):
    """Raised when the task calls the first block. As a BaseException, it bypasses `except Exception` in the task."""

    def __init__(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__(*args)
        self.named = named
