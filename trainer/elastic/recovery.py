"""What torchmetrics objects held before a step or a validation that may have to be done again."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import build
from ..checkpoints import contents, restore
from ..checkpoints.reading import broadcast_contents
from ..data.sampling import Layout
from ..errors import WorkerError
from ..optimization.nonfinite import make_guard
from ..processes.environment import Place

if TYPE_CHECKING:
    from ..run import Run
    from ..strategies.strategy import Strategy


class MetricSnapshot:
    """Keeps the states of a task's metrics, where it has some: an update cannot be taken back from them."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.saved: Any = None
        self.step = -1
        """The step in which, or the validation after which, they were kept."""
        self.in_validation = False

    def start(self) -> None:
        """From now on keep the states whenever a step or a validation begins."""
        hooks = self.run.hooks
        if self.run.metrics.states.by_path:
            hooks["on_train_batch_start"] += (self._begin_turn,)
            hooks["on_validation_start"] += (self._begin_validation,)

    def _begin_turn(self, batch: Any, batch_idx: int) -> None:
        if self.run.metrics.turns_of_step == 1:
            self._keep(in_validation=False)
            if self.run.metrics.states.taking_turns:
                self.run.metrics.states.open_replica(self.run.metrics.replica)

    def _begin_validation(self) -> None:
        self._keep(in_validation=True)

    def _keep(self, in_validation: bool) -> None:
        self.saved, self.step = self.run.metrics.states.snapshot(), self.run.state.global_step
        self.in_validation = in_validation

    def rewind(self, step: int, validating: bool) -> None:
        """Put the states back, where the run goes on with the step or the validation before which they were kept."""
        if self.saved is not None and self.step == step and self.in_validation == validating:
            self.run.metrics.states.restore(self.saved)
        self.saved = None


Progress = tuple[int, int, bool, int, int, int]
Point = tuple[int, dict[str, float]]


@dataclass
class MemberState:
    """Where a process stands."""

    whole: bool
    """Whether its weights and its loop state belong together."""
    progress: Progress
    """Step, epoch, whether the epoch has ended, the steps of the newest validation and of the newest point, and how
    often logged values were shared: who did that once more has them, also those of ranks that did not come so far."""
    epoch_steps: int
    elapsed: float
    stop: bool
    should_stop: bool
    point: Point | None
    """The newest point of the log."""
    first_step: int
    """The step with which the run began in these processes."""

    @classmethod
    def of(cls, run: "Run", whole: bool) -> "MemberState":
        """Look where this process stands."""
        state = run.state
        counted = state.global_step, state.epoch, state.epoch_ended
        progress = (*counted, state.validated_at, state.logged_at, run.metrics.exchanges)
        elapsed, stop = run.agreement.now(), run.agreement.stop
        first_step = run.preemption.first_step
        return cls(
            whole, progress, state.epoch_steps, elapsed, stop, run.trainer.should_stop, run.loop.point, first_step
        )


def release(strategy: "Strategy") -> None:
    """Drop what uses the process group: only then do its connections close, and the others see that this one left."""
    strategy.reducer.release()
    strategy.buffers.rewind()


def regroup(strategy: "Strategy", place: Place, layout: Layout) -> None:
    """Put this process at its place in a new process group, with its replicas."""
    strategy.place, strategy.layout = place, layout
    strategy.collectives.move(place.rank, place.world_size)
    strategy.reducer.move(layout, place.rank)


def transfer_state(run: "Run", place: Place, snapshot: MetricSnapshot, whole: bool, opens_loggers: bool) -> None:
    """Find out who is the newest, and stand where it stands; every member of the new group calls it.

    `whole`: see MemberState. An error in here leaves this process as it was.
    """
    trainer, strategy, metrics = run.trainer, run.strategy, run.metrics
    validating = run.loop.doing != "train"
    if validating:
        run.preemption.leave_evaluation()
    layout = Layout(run.state.replicas, place.world_size)
    regroup(strategy, place, layout)
    own = MemberState.of(run, whole)
    states: list[MemberState] = strategy.collectives.gather_objects(own)
    source = max(range(len(states)), key=lambda rank: (states[rank].whole, states[rank].progress, -rank))
    newest = states[source]
    if not newest.whole:
        raise WorkerError("No process is left whose weights are whole; go on from the newest checkpoint.")
    snapshot.rewind(newest.progress[0], validating)
    metrics.rewind(newest.progress[0])
    if own.progress[1:3] != newest.progress[1:3] or newest.progress[2] or newest.epoch_steps == 0:
        metrics.forget_epoch()
    behind = [one.progress != newest.progress or not one.whole for one in states]
    saved = contents.contents(trainer, weights_only=False) if any(behind) and not behind[place.rank] else {}
    if any(behind):
        saved = broadcast_contents(saved, source, place.rank)
    # Nothing is communicated from here on, until all of it is taken over.
    metrics.set_layout(place.world_size, layout.owned(place.rank))
    if behind[place.rank]:
        _load_state(run, saved)
    _continue_at(run, place, newest)
    if opens_loggers:
        build.open_loggers(run)
    wrote = own.point == newest.point and not opens_loggers
    if place.rank == 0 and not wrote and newest.point is not None and newest.point[0] == run.state.global_step:
        for logger in trainer.loggers:  # the one that wrote them may have gone before it did
            logger.log_metrics(newest.point[1], newest.point[0])


def _load_state(run: "Run", saved: dict[str, Any]) -> None:
    """Take over another process's state."""
    trainer = run.trainer
    saved["data"] = {}  # a stream's own state is that of a process in the middle of a step
    run.hooks.call("on_load_checkpoint", saved)
    restore.load_task_weights(run.task, saved, run.task.strict_loading)
    restore.start_state(trainer, saved)
    trainer.callback_metrics.clear()
    restore.load_rest(trainer, saved)


def _continue_at(run: "Run", place: Place, newest: MemberState) -> None:
    """Let the loop go on where the newest member stands, with this process's share of the data."""
    trainer, state = run.trainer, run.state
    run.agreement.restart(place.world_size, state.global_step, newest.elapsed)
    run.agreement.stop = newest.stop
    trainer.should_stop |= newest.should_stop
    run.loop.point, run.preemption.first_step = newest.point, newest.first_step
    run.loop.epoch_skipped = False
    run.optimization.guard = make_guard(run)  # one looks at the first step of its process, and the ranks must agree
    if state.epoch_ended:
        run.count_epoch()
    sources = [run.training_data, *(source for data in run.data.evaluations.values() for source in data.sources)]
    for source in sources:
        source.dealing = replace(source.dealing, layout=run.layout, process=place.rank)
    run.metrics.exchanges = newest.progress[-1]
    run.metrics.open("train", fresh=False)


def repeat_after_step(run: "Run") -> None:
    """Do again what the break may have prevented after the newest step; every member calls it."""
    trainer, state = run.trainer, run.state
    if state.global_step and state.global_step % trainer.log_every_n_steps == 0:
        trainer.log_step()
    run.hooks.call("on_processes_changed")
