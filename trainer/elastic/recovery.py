"""State transfer in a new generation: the process with the latest state sends it to the others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkerError
from ...base.place import Place
from ..checkpoints.reading import broadcast_contents
from ..data.sampling import Layout
from ..resume import contents, restore
from .metrics import SharedMetrics

if TYPE_CHECKING:
    from ...base.contracts import Trainer
    from ..run import Run


class MetricSnapshot:
    """Snapshots of a task's metrics, taken before each step and validation run, because updates cannot be undone."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.saved: Any = None
        self.step = -1
        """Value of global_step when the snapshot was taken."""
        self.in_validation = False

    def start(self) -> None:
        """Register hooks that take a snapshot at the start of every step and validation run."""
        hooks = self.trainer.current_run.hooks
        if self.trainer.metrics.states.by_path:
            hooks["on_train_batch_start"] += (self._before_batch,)
            hooks["on_validation_start"] += (partial(self._take, in_validation=True),)

    def _before_batch(self, batch: Any, batch_idx: int) -> None:
        # only before the first batch, because an interrupted step is repeated from its start
        if self.trainer.metrics.batches_of_step == 1:
            self._take(in_validation=False)

    def _take(self, in_validation: bool) -> None:
        self.saved, self.step = self.trainer.metrics.states.snapshot(), self.trainer.state.global_step
        self.in_validation = in_validation

    def rewind(self, step: int, validating: bool) -> None:
        """Restore the snapshot if it was taken at the start of the step or validation run that will be repeated."""
        if self.saved is not None and self.step == step and self.in_validation == validating:
            self.trainer.metrics.states.restore(self.saved)
        self.saved = None


Progress = tuple[int, int, bool, int, int, int]
Point = tuple[int, dict[str, float]]


@dataclass
class MemberState:
    """Loop state of a process. Members compare their states to find the latest one."""

    consistent: bool
    """True if weights and loop state are consistent."""
    progress: Progress
    """Step, epoch, whether the epoch has ended, the steps of the latest validation and logging point, and the number of
    exchanges of logged values. A process that has completed one more exchange than others has all ranks' values."""
    epoch_steps: int
    elapsed: float
    stop: bool
    should_stop: bool
    point: Point | None
    """Latest logging point."""
    first_step: int
    """First step that these processes run."""

    @classmethod
    def of(cls, run: "Run", consistent: bool) -> "MemberState":
        """Return the state of this process."""
        state = run.state
        counted = state.global_step, state.epoch, state.epoch_ended
        progress = (*counted, state.validated_at, state.logged_at, shared_metrics(run).exchanges)
        elapsed, stop = run.agreement.now(), run.agreement.stop
        first_step = run.preemption.first_step
        return cls(
            consistent, progress, state.epoch_steps, elapsed, stop, run.trainer.should_stop, run.loop.point, first_step
        )


def shared_metrics(run: "Run") -> SharedMetrics:
    """Return the logged values of an elastic run."""
    assert isinstance(run.metrics, SharedMetrics)
    return run.metrics


def transfer_state(
    run: "Run", place: Place, snapshot: MetricSnapshot, consistent: bool, open_outputs: "Callable[[Run], None] | None"
) -> None:
    """Adopt the latest state held by any member. All members of the new group must call this.

    Args:
        consistent: see MemberState.
        open_outputs: function that opens the loggers if this process has become the writer; otherwise None.

    If a collective fails, the transfer can be repeated.
    """
    trainer, strategy, metrics = run.trainer, run.strategy, run.metrics
    validating = run.loop.doing != "train"
    if validating:
        run.preemption.leave_evaluation()
    layout = Layout(run.state.replicas, place.world_size)
    strategy.regroup(layout, place)
    before = MemberState.of(run, consistent)
    states: list[MemberState] = strategy.collectives.gather_objects(before)
    # prefer consistent weights, then the latest step, then the lowest rank; all ranks choose the same source
    source = max(range(len(states)), key=lambda rank: (states[rank].consistent, states[rank].progress, -rank))
    newest = states[source]
    if not newest.consistent:
        raise WorkerError("No remaining process has consistent weights. Resume from the newest checkpoint.")
    # rewind to the step to be repeated, before the state is compared with others or sent to them
    snapshot.rewind(newest.progress[0], validating)
    metrics.rewind(newest.progress[0])
    # values from another epoch, or logged before this epoch's first step, must not be counted in the continued epoch
    if before.progress[1:3] != newest.progress[1:3] or newest.progress[2] or newest.epoch_steps == 0:
        metrics.forget_epoch()
    behind = [state.progress != newest.progress or not state.consistent for state in states]
    saved = contents.contents(trainer, weights_only=False) if any(behind) and not behind[place.rank] else {}
    if any(behind):
        saved = broadcast_contents(saved, strategy.collectives, source)
    # no communication from here on, so every process can finish independently
    metrics.set_layout(place.world_size, layout.owned(place.rank))
    if behind[place.rank]:
        _load_state(run, saved)
    _continue_at(run, place, newest)
    if open_outputs is not None:
        open_outputs(run)
    # a newly opened logger has dropped points from this step on, as after a resume
    wrote = before.point == newest.point and open_outputs is None
    if place.rank == 0 and not wrote and newest.point is not None and newest.point[0] == run.state.global_step:
        for logger in trainer.loggers:  # the previous writer may have died before writing the point
            logger.log_metrics(newest.point[1], newest.point[0])


def _load_state(run: "Run", saved: dict[str, Any]) -> None:
    trainer = run.trainer
    saved["data"] = {}  # within a step, the state of a stream belongs to its process
    run.hooks.call("on_load_checkpoint", saved)
    restore.load_task_weights(run.task, saved, run.task.strict_loading)
    restore.start_state(trainer, saved)
    trainer.agreed_metrics.clear()
    restore.load_rest(trainer, saved, resumes=False)


def _continue_at(run: "Run", place: Place, newest: MemberState) -> None:
    """Adopt the latest loop state and this process's share of the data."""
    trainer, state = run.trainer, run.state
    run.agreement.join(run.strategy.collectives, state.global_step, newest.elapsed)
    run.agreement.stop = newest.stop
    run.drift.restart()
    trainer.should_stop |= newest.should_stop
    run.loop.point, run.preemption.first_step = newest.point, newest.first_step
    run.loop.epoch_skipped = False
    run.optimization.restart()
    if state.epoch_ended:
        run.schedule.count_epoch()
    sources = [run.training_data, *(source for data in run.data.evaluations.values() for source in data.sources)]
    for source in sources:
        source.dealing = replace(source.dealing, layout=run.layout, process=place.rank)
    shared_metrics(run).exchanges = newest.progress[-1]
    run.metrics.open("train", fresh=False)


def repeat_after_step(run: "Run") -> None:
    """Log the last step's values again, because a broken connection may have interrupted the first attempt.

    All members must call this.
    """
    trainer, state = run.trainer, run.state
    if state.global_step and state.global_step % trainer.log_every_n_steps == 0:
        trainer.log_step()
    run.hooks.call("on_processes_changed")
