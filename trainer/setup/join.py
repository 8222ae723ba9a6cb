"""First part of setup: join the other processes, and find the run directory and the checkpoint to start from."""

import logging
import os
from dataclasses import replace
from typing import Any

from ...base.place import Place, find_place
from ..accelerators import deterministic_cublas
from ..data.loaders import close_loaders, opened_loaders
from ..data.randomness import seed_generators
from ..data.sampling import Layout, mix
from ..hooks import Hooks
from ..processes.layout import check_place, located, report_layout
from ..processes.membership import Membership
from ..request import Request
from ..resume import restore
from ..run import Call
from ..runs import run_file
from ..switches import settings
from .directory import find_start
from .outputs import record_start
from .parts import with_callbacks_of

log = logging.getLogger("legato")


def join(call: Call, request: Request) -> tuple[Call, dict[str, Any] | None]:
    """Join the other processes, and find the checkpoint, the run directory and the hooks.

    Also returns the checkpoint's contents, or None if there is no checkpoint.
    """
    trainer, strategy, state, undo = call.trainer, call.strategy, call.state, call.undo
    undo.callback(close_loaders, opened_loaders())  # undone last, when signals terminate workers again
    undo.enter_context(call.preemption.handle_signals())
    # From here on, this process may wait minutes for others: signals terminate it, and the watchdog reports the wait.
    membership = make_membership(call)
    call.watchdog.place = located(find_place(trainer.cluster) or Place())
    undo.enter_context(call.watchdog)
    place = membership.connect(call.watchdog.place)
    # after connecting, so that all ranks raise the same error and none waits for the others
    if not strategy.elastic:
        check_place(trainer, lambda: strategy.local_processes(trainer.device_list), place)
    if trainer.deterministic or call.bitwise:
        undo.enter_context(deterministic_cublas(trainer.device_list[0].type))
    strategy.join(place, trainer.device_list, trainer.precision)
    report_layout(strategy.place, strategy.device, strategy.collectives, strategy.meeting)
    log.debug("Rank %d of %d: process %d on %s", place.rank, place.world_size, os.getpid(), strategy.device)
    threads = trainer.threads or (1 if call.bitwise else None)
    undo.enter_context(settings(trainer.deterministic or call.bitwise, trainer.detect_anomaly, threads))
    undo.callback(call.errors.attempt, strategy.teardown)  # `attempt` notes the method's name
    # setup hooks (configure_model) may draw weights, which must be equal on all ranks regardless of earlier draws
    seed_generators(mix(trainer.seed))
    undo.callback(trainer.saver.release)
    start, saved = find_start(call, request)
    membership.adopt_settings()
    restore.start_state(trainer, saved if call.stage == "fit" else None)
    # restore the user's value: if it is None, the next run uses its number of processes
    undo.callback(setattr, trainer, "replicas", trainer.replicas)
    trainer.replicas = state.replicas  # during the run, for configure_optimizers and others
    strategy.layout = Layout(state.replicas, strategy.data_ranks.size)
    call.metrics.join(strategy.data_ranks, call.layout.owned(strategy.data_ranks.rank))
    call.agreement.join(strategy.collectives, state.global_step, state.elapsed)
    trainer.saver.remember_run_dir(trainer.run_dir)
    if call.stage == "fit" and trainer.is_global_zero and trainer.run_dir and run_file.identity_of(trainer.run_dir):
        run_file.create(trainer.run_dir, trainer.saver.run_id, "fit")
    point = evaluated_point(call, saved)
    record_start(call, start.source, point)
    set_owners(call)
    hooks = Hooks(trainer, call.task, trainer.callbacks)
    joined = replace(call, hooks=hooks, membership=membership, source=start.source)
    return replace(joined, resumes_same_run=start.same_run, evaluated_point=point), saved


def make_membership(call: Call) -> Membership:
    """Return this process's membership in the run."""
    if not call.members_change:
        return Membership()
    from ..elastic.members import ElasticMembership  # only if a config asks for it

    return ElasticMembership(call.trainer)


def set_owners(call: Call) -> None:
    """Attach the trainer to the task and the data module, and add the task's callbacks.

    Raises TaskError for misspelled hooks.
    """
    trainer = call.trainer
    call.task.trainer = trainer
    if call.datamodule is not None:
        call.datamodule.trainer = trainer
    trainer.callbacks = with_callbacks_of(call.task, trainer.callbacks)
    trainer.check(*trainer.callbacks)


def evaluated_point(call: Call, saved: dict[str, Any] | None) -> tuple[int, int] | None:
    """Return the evaluated checkpoint's step and epoch, or None for a fit or if this trainer has already trained."""
    if call.stage == "fit" or saved is None or call.state.global_step:
        return None
    return int(saved.get("global_step", 0)), int(saved.get("epoch", 0))
