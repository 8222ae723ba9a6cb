"""The order of set-up, and its last phase: the rest of the checkpoint is restored, and the watch begins."""

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
    """Make the parts of a requested call; nothing is started or opened yet."""
    loop = LoopState(DOING_OF_STAGE[request.stage])
    # Hooks of callbacks come later: configure_callbacks may ask about ranks, which are not there yet.
    # Both learn of the other ranks in `setup.join`: a signal, or `self.log` in a hook, may come before.
    agreement = Agreement(SINGLE, 0, trainer.state.elapsed)
    metrics = Metrics(SINGLE, 1, request.task)
    if trainer.strategy.elastic and request.stage == "fit":
        from ..elastic.metrics import SharedMetrics  # only where a config asks for it

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
    """Make a complete run of a call; `trainer.run` is the newest of them, also for user's hooks."""
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
    # also where processes were started again before there was a checkpoint: what they had logged is void
    goes_on = run.stage == "fit" and (run.source is not None or restart_count() > 0)
    open_loggers(run, run.state.global_step if goes_on else None)
    run.membership.open_outputs = open_outputs
    if run.stage == "fit":
        collector = GarbageCollector()
        run.agreement.add(list, lambda _: collector.collect(run.agreement.elapsed))
        run.undo.callback(collector.close)
    if trainer.hang_timeout is not None:
        run.strategy.collectives.barrier()  # all are watched from the same moment: some may have had much to prepare
    run.watchdog.begin()  # last: a slow set-up (downloads, compilation) is no hang
