"""Runs setup. Its last part restores the rest of the checkpoint, opens the loggers and starts the watchdog."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...base.environment import restart_count
from ...base.errors import Errors
from ..hooks import Hooks
from ..metrics.log import Metrics
from ..optimization.drift import DriftGuard
from ..preemption import Preemption
from ..processes.agreement import Agreement, GarbageCollector
from ..processes.hang import Watchdog
from ..processes.ranks import SINGLE
from ..request import DOING_OF_STAGE, Request
from ..resume import restore
from ..run import Call, LoopState, Run, RunData
from ..runs.run_file import RunFile
from .join import join
from .model import make_run
from .outputs import open_loggers, open_outputs

if TYPE_CHECKING:
    from ...base.contracts import Trainer


def make_call(trainer: "Trainer", request: Request) -> Call:
    """Create the parts of a requested call, without starting processes or opening files."""
    loop = LoopState(DOING_OF_STAGE[request.stage])
    # Callbacks' hooks are added later, because configure_callbacks may ask for ranks, which are not known yet.
    # `setup.join` adds the other ranks to both; a signal, or `self.log` in a hook, may come before that.
    agreement = Agreement(SINGLE, 0, trainer.state.elapsed)
    metrics = Metrics(SINGLE, 1, request.task)
    if trainer.strategy.elastic and request.stage == "fit":
        from ..elastic.metrics import SharedMetrics  # only if a config asks for it

        metrics = SharedMetrics(SINGLE, 1, request.task)
    call = Call(
        trainer=trainer,
        stage=request.stage,
        task=request.task,
        datamodule=request.datamodule,
        request_loaders=request.loaders,
        state=trainer.state,
        strategy=trainer.strategy,
        loop=loop,
        data=RunData(keys_forward=trainer.reproducible != "off"),
        errors=Errors(),
        undo=ExitStack(),
        hooks=Hooks(trainer, request.task, []),
        agreement=agreement,
        metrics=metrics,
        preemption=Preemption(trainer, request.stage, agreement),
        watchdog=Watchdog(trainer, loop, metrics),
        run_file=RunFile(),
        drift=DriftGuard(request.task, SINGLE),
    )
    metrics.describe_place = call.describe_place
    return call


def set_up(call: Call, request: Request) -> Run:
    """Build a complete run from a call. Hooks may read `trainer.run`, which contains the parts built so far."""
    joined, saved = join(call, request)
    call.trainer.run = joined
    run = call.trainer.run = make_run(joined, saved)
    start(run, saved)
    return run


def start(run: Run, saved: dict[str, Any] | None) -> None:
    """Load the rest of the checkpoint into a complete run, open its loggers, and start the watchdog."""
    trainer = run.trainer
    if saved is not None and run.stage == "fit":
        restore.load_rest(trainer, saved, resumes=True)
    if run.stage == "fit":
        trainer.saver.require_storable()
    # also after a restart before the first checkpoint: earlier logging points are invalid
    resumes = run.stage == "fit" and (run.source is not None or restart_count() > 0)
    open_loggers(run, run.state.global_step if resumes else None)
    run.membership.open_outputs = open_outputs
    if run.stage == "fit":
        collector = GarbageCollector()
        run.agreement.add(list, lambda _: collector.collect(run.agreement.elapsed))
        run.undo.callback(collector.close)
    if trainer.hang_timeout is not None:
        run.strategy.collectives.barrier()  # so that all ranks are watched from the same time, even after a slow setup
    run.watchdog.begin()  # last: a slow setup (downloads, compilation) is not a hang
