"""Set-up of a run, in order: checks, processes, checkpoint, hooks, the placed task, loaders, optimizers, loggers."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import IterableDataset

from ...base.arguments import ARGUMENT_NAMES, LIMITS, LOADER_OPTIONS, TORCH_OPTIONS, TrainerArguments, problems
from ...base.environment import restart_count, slurm_job
from ...base.errors import CheckpointError, ConfigError, DataError, TaskError, describe_kind, did_you_mean
from ...base.messages import let_be_seen, mark_output
from ...base.quantities import parse_duration
from ...base.run_names import EVALUATIONS, identity_of, name_problem, require_local
from ...base.torch_private import spare_compiler
from ...callbacks.callback import Callback
from ...callbacks.checkpoint import Checkpoint
from ...callbacks.checkpoint_callback import CheckpointCallback
from ...callbacks.progress_bar import ProgressDisplay
from ...loggers.logger import Logger
from ...tasks.data_hooks import DataHooks
from ...tasks.data_module import DataModule
from ...tasks.task import Task
from ..accelerators import name_of
from ..checkpoints import find
from ..checkpoints.manifest import load_manifest
from ..closure import use_closures
from ..contention import Contention
from ..data.combined import combined, loaders_in, one_after_another
from ..data.dealing import DealtData, EvaluationData, TrainingData, training_data
from ..data.loaders import close_loaders, is_dealable, length_of, opened_loaders, require_iterable
from ..data.randomness import seed_generators
from ..data.sampling import Layout, mix
from ..data.shares import LOCKSTEP, are_shares, reads_share, unpadded
from ..data.steps import Dealing
from ..data.streams import StreamData, own_shares
from ..data.transfer import to_device, with_allocated_memory
from ..drift import DriftGuard
from ..hooks import (
    CALLBACK_HOOKS,
    STEP_NAMES,
    TASK_HOOKS,
    TASK_METHODS,
    Hooks,
    check_names,
    check_nones,
    count_arguments,
    counter_of,
    loop_part,
    overrides,
)
from ..metrics.torchmetrics import MetricStates
from ..optimization import kernels
from ..optimization.nonfinite import make_guard
from ..optimization.optimization import Optimization
from ..optimization.precision import Precision
from ..processes import garbage
from ..processes.collectives import SINGLE
from ..processes.environment import Place, deterministic_cublas, find_place
from ..processes.layout_report import check_place, report_layout
from ..processes.own_group import located
from ..processes.script_collectives import StepCollectives, gathers
from ..resume import contents, convert, fingerprint, restore
from ..resume.checkpoint_format import CheckpointFormat
from ..resume.saver import new_identity
from ..run import DOING_OF_STAGE, Call, JoinedCall, Request, Run
from ..runs import places
from ..runs import record as run_record
from ..runs.directory import is_run
from ..runs.places import FRESH, StoredRun
from ..runs.status import finite_only
from ..schedule import Schedule
from ..strategies import STRATEGIES
from ..strategies.strategy import Strategy
from .model_checks import require_dense_gradients, require_parameters, require_sendable

if TYPE_CHECKING:
    from ..trainer import Trainer

log = logging.getLogger("legato")

LOADERS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
LIMIT_OF = {
    "validation": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


def set_up(call: Call, request: Request) -> Run:
    """Take a call through its phases to a complete run; `trainer.run` is the newest of them, also for user's hooks."""
    joined, saved = join(call, request)
    call.trainer.run = joined
    run = make_run(joined, saved)
    call.trainer.run = run
    start(run, saved)
    return run


def join(call: Call, request: Request) -> tuple[JoinedCall, dict[str, Any] | None]:
    """Check what can be checked, join the other processes, and find the checkpoint, the run directory and the hooks.

    Also returns the checkpoint's contents; None where there is none to start from.
    """
    trainer, strategy, state, undo = call.trainer, call.strategy, call.state, call.undo
    undo.callback(close_loaders, opened_loaders())  # undone last, when signals end workers again
    undo.enter_context(call.preemption.handle_signals())
    # From here on a process may wait for others for minutes: signals end it, and the watchdog says what it waits for.
    membership = strategy.elastic.for_stage(call.stage).membership(trainer)
    call.watchdog.place = located(find_place(trainer.cluster) or Place())
    undo.enter_context(call.watchdog)
    place = membership.connect(call.watchdog.place)
    # after connecting, so that a mistake is told on every rank, and none waits for the others
    if not strategy.elastic.changes:
        check_place(trainer, lambda: strategy.local_processes(trainer.device_list), place)
    if trainer.deterministic or call.bitwise:
        undo.enter_context(deterministic_cublas(trainer.device_list[0].type))
    strategy.join(place, trainer.device_list, trainer.precision)
    report_layout(strategy.place, strategy.device, strategy.collectives, strategy.meeting)
    log.debug("Rank %d of %d: process %d on %s", place.rank, place.world_size, os.getpid(), strategy.device)
    if strategy.place.rank > 0:
        undo.callback(mark_output(strategy.place.rank))
    threads = trainer.threads or (1 if call.bitwise else None)
    undo.enter_context(kernels.settings(trainer.deterministic or call.bitwise, trainer.detect_anomaly, threads))
    undo.callback(strategy.teardown)
    # hooks of the set-up may draw weights (configure_model): the same on every rank, however often it has drawn before
    seed_generators(mix(trainer.seed))
    undo.callback(trainer.saver.release)
    source, goes_on, saved = find_directory(call, request)
    membership.adopt_settings()
    restore.start_state(trainer, saved if call.stage == "fit" else None)
    # the user's wish comes back: None again, so that the next run chooses for its own processes
    undo.callback(setattr, trainer, "replicas", trainer.replicas)
    trainer.replicas = state.replicas  # while the run lasts: configure_optimizers may want to know
    strategy.layout = Layout(state.replicas, strategy.data_ranks.size)
    call.metrics.join(strategy.data_ranks, call.layout.owned(strategy.data_ranks.rank), call.members_change)
    ranks, version = strategy.place.world_size, membership.version
    call.agreement.join(strategy.collectives, ranks, state.global_step, state.elapsed, version)
    call.agreement.newest = membership.newest
    # a shared lock of each process, for which the next holder waits: workers live up to a second longer than a launcher
    # that was killed
    trainer.saver.remember_run_dir(trainer.run_dir)
    if call.stage == "fit" and trainer.is_global_zero and trainer.run_dir is not None:
        places.write_identity(trainer.run_dir, trainer.saver.run_id)
    point = evaluated_point(call, saved)
    record_start(call, source, point)
    set_owners(call)
    parts = {**vars(call), "hooks": Hooks(trainer, call.task, trainer.callbacks)}
    return JoinedCall(**parts, membership=membership, source=source, goes_on=goes_on, evaluated_point=point), saved


def set_owners(call: Call) -> None:
    """Give task and data module their trainer, and callbacks the task, whose own ones are added. Raises TaskError."""
    trainer = call.trainer
    call.task.trainer = trainer
    if call.datamodule is not None:
        call.datamodule.trainer = trainer
    trainer.callbacks = with_callbacks_of(call.task, trainer.callbacks)
    for callback in trainer.callbacks:
        check_names(callback, Callback, CALLBACK_HOOKS, refuses_near_names=trainer.refuses_near_names)
        set_task = loop_part(callback, "set_task")
        set_task(call.task)
        call.undo.callback(set_task, None)


def evaluated_point(call: Call, saved: dict[str, Any] | None) -> tuple[int, int] | None:
    """Return step and epoch of the checkpoint that a new trainer evaluates; None where it has its own, or none."""
    if call.stage == "fit" or saved is None or call.state.global_step:
        return None
    return int(saved.get("global_step", 0)), int(saved.get("epoch", 0))


def record_start(call: Call, source: Path | None = None, evaluated: tuple[int, int] | None = None) -> None:
    """Record in the run directory, on rank 0, with what this call was started: command line, layout, versions, code.

    source: the checkpoint that it goes on from, or evaluates; evaluated: step and epoch of that.
    """
    trainer, strategy, directory = call.trainer, call.strategy, call.trainer.run_dir
    if directory is None or not trainer.is_global_zero or not trainer.records_starts:
        return
    device, (command, arguments) = strategy.device, trainer.command
    facts = {
        "stage": call.stage,
        "step": call.state.global_step if evaluated is None else evaluated[0],
        "checkpoint": None if source is None else str(source),
        "command": command,
        "arguments": arguments,
        "strategy": strategy.name,
        "replicas": call.state.replicas,
        "processes": strategy.place.world_size,
        "nodes": strategy.place.nodes,
        "slurm_job": slurm_job(),
        "device": name_of(device),
        "precision": str(trainer.precision),
        "reproducible": trainer.reproducible,
    }
    run_record.write_readme(directory)
    run_record.add_start(directory, facts, trainer.save_code, trainer.config_text if call.stage == "fit" else None)


def check_task(task: Any, request: Request, refuses_near_names: bool = True, is_sent: bool = False) -> None:
    """Raise TaskError for a task that lacks what the stage needs, or whose methods are named almost like hooks.

    refuses_near_names: False to warn of the latter only, and to look at no step that the stage does not call.
    is_sent: the task will be sent to other processes.
    """
    stage = request.stage
    if not isinstance(task, Task):
        base = "" if isinstance(task, type) else ": subclass lg.Task instead of nn.Module"
        raise TaskError(f"{stage} takes a legato Task, got {describe_kind(task)}{base}.")
    if is_sent:
        require_sendable(task)
    check_names(task, Task, TASK_HOOKS, TASK_METHODS, refuses_near_names)
    if request.datamodule is not None:
        hooks = ("setup", "teardown", "on_exception")
        check_names(request.datamodule, DataModule, hooks, TASK_METHODS, refuses_near_names)
    step = f"{DOING_OF_STAGE[stage] if stage != 'fit' else 'training'}_step"
    for name in (step, "configure_optimizers" if stage == "fit" else None):
        ready = name == "predict_step" and task.predict_step is not None
        if name is not None and not ready and not overrides(task, Task, name):
            raise TaskError(f"{lacking(task, name)}, which {stage} needs: define it.{nearest(task, name)}")
    if stage == "fit" and "validation" in request.loaders and not overrides(task, Task, "validation_step"):
        raise TaskError(
            f"fit was given validation loaders, but {lacking(task, 'validation_step')}: define it, or leave them out."
        )
    check_nones(task, Task, (*STEP_NAMES, *LOADERS.values(), *TASK_HOOKS, *vars(DataHooks)))
    called = (step, "validation_step") if stage == "fit" else (step,)
    for name in STEP_NAMES if refuses_near_names else called:
        if overrides(task, Task, name):
            count_arguments(task, name)


def lacking(task: Task, name: str) -> str:
    """Describe how a task lacks a method."""
    return (
        f"{type(task).__name__}.{name} is None"
        if getattr(task, name) is None
        else f"{type(task).__name__} has no {name}"
    )


def nearest(task: Task, name: str) -> str:
    """Return the method of the task that may be meant by `name`, as a question."""
    own = {one for kind in type(task).__mro__ if kind not in Task.__mro__ for one in vars(kind)}
    return did_you_mean(name, own - {name}, 0.8)


def find_directory(call: Call, request: Request) -> tuple[Path | None, bool, dict[str, Any] | None]:
    """Find the run directory; return the checkpoint to start from, whether it is of this run, and its contents.

    Rank 0 decides for all. If the newest checkpoint, which it has chosen, is damaged, it chooses the one before.
    """
    trainer, strategy, damaged = call.trainer, call.strategy, list[Path]()
    while True:
        decided = Decision()
        if strategy.place.rank == 0:
            try:
                decided.directory, decided.source = decide_directory(trainer, request, damaged)
                decided.config_from = request.resume.directory if isinstance(request.resume, StoredRun) else None
                decided.is_chosen = request.source_is_chosen
                decided.goes_on = is_same_run(decided.directory, decided.source)
                same = trainer.saver.run_id if trainer.fits_continue and trainer.global_step else ""
                decided.identity = same or identity_of(decided.directory) or new_identity()
            except (ConfigError, CheckpointError) as error:
                decided.problem = error
        decided = strategy.collectives.broadcast(decided)
        # an exception that rank 0 alone raised would leave the others waiting in the next collective
        if decided.problem is not None:
            raise decided.problem
        if decided.config_from is not None and request.resume == "auto":
            raise ConfigError(
                f"resume=auto takes the config of {decided.config_from} on rank 0, which is not there for rank "
                f"{strategy.place.rank}. Share the folder of the runs, or give each node a copy of that run's config."
            )
        trainer.run_dir, call.watchdog.token = decided.directory, decided.token
        if request.stage == "fit":
            trainer.saver.run_id = decided.identity  # unless the checkpoint to resume from has one
        if trainer.is_global_zero:
            log.debug("Run directory %s", decided.directory)
        if decided.source is None:
            return None, False, None
        try:
            saved = trainer.saver.format.read(
                decided.source,
                strategy.collectives,
                weight_names(call.task),
                strategy.state_dicts.read_in_parts,
            )
        except CheckpointError as error:
            if not decided.is_chosen:
                raise
            damaged.append(decided.source)
            if trainer.is_global_zero:
                log.warning("The checkpoint %s is passed over, it is not whole. %s", decided.source.name, error)
            trainer.run_dir = trainer.given_dir
        else:
            break
    if trainer.is_global_zero:
        log.info("%s from %s", "Going on" if request.stage == "fit" else "Weights", decided.source)
    return decided.source, decided.goes_on, saved


@dataclass
class Decision:
    """Rank 0's choice of run directory and checkpoint, which it broadcasts."""

    identity: str = ""
    directory: Path | None = None
    source: Path | None = None
    """The checkpoint to read."""
    goes_on: bool = False
    """Whether that is of the run in this directory."""
    is_chosen: bool = False
    """Whether an older one will do."""
    problem: Exception | None = None
    config_from: Path | None = None
    """The run whose config rank 0 has taken for `resume=auto`."""
    token: str = field(default_factory=new_identity)
    """A word that no other run has."""


def decide_directory(
    trainer: "Trainer", request: Request, damaged: Collection[Path] = ()
) -> tuple[Path | None, Path | None]:
    """Return the run directory, made if needed, and the checkpoint to start from, which is none of the `damaged` ones.

    The sizes of its files have been checked; their checksums are when they are read.
    """

    def check(path: Path) -> bool:
        return path not in damaged and bool(find.check_sizes(path))

    root, identity = Path(trainer.default_root_dir), ""
    stored = request.resume if isinstance(request.resume, StoredRun) else None
    if stored is not None and not stored.by_name:
        assert stored.directory is not None
        trainer.saver.hold(stored.directory, request.stage)
        found, source = stored.to_resume(check, folders_elsewhere(trainer, request.task))
        identity = identity_of(stored.directory)
        request.source_is_chosen = True
        if found is None:
            trainer.saver.release(stored.directory)
    else:
        named, folders = named_checkpoint(trainer, stored.word if stored else request.resume), list[Path]()
        if named == "auto":
            folders = folders_elsewhere(trainer, request.task)
            before = map(identity_of, reversed(places.versions_to_resume(root, trainer.run_name)))
            identity = next(filter(None, before), "")
        found, source = places.find(root, trainer.run_name, named, trainer.saver, check, folders)
        if stored is not None:
            stored.require(found)
        request.source_is_chosen = source is not None and source != Path(named or "")
    if request.weights is not None:  # before a directory is made: where there are none, nothing is left behind
        source = find_weights(trainer, request, check)
    directory = trainer.run_dir or found
    last = None if directory == trainer.given_dir else directory
    if source is not None and last is not None and last.parent.parent.name == EVALUATIONS:
        directory = None  # of the trainer's last evaluation, perhaps of another run's checkpoint
    if directory is None:
        directory = evaluation_directory(trainer, request.stage, source) or trainer.new_run_dir()
        # A run that starts again because it left no complete checkpoint is still that run, and may overwrite its files.
        if directory is not None and request.stage == "fit":
            places.write_identity(directory, identity or new_identity())
    if directory is not None and trainer.given_dir is None:  # a given one is locked by its owner, or it is a trial's
        trainer.saver.hold(directory, request.stage)
    return directory, source


def evaluation_directory(trainer: "Trainer", stage: str, source: Path | None) -> Path | None:
    """Make a directory for an evaluation in that of the run whose checkpoint it takes: RUN/evaluations/STAGE/version_N.

    None where that run is not below `default_root_dir`, where its directory is not writable, and where nothing is to be
    written.
    """
    writes = bool(trainer.loggers) or trainer.checkpoint_callback is not None
    if stage == "fit" or source is None or not trainer.records_starts or not writes:
        return None
    root = Path(trainer.default_root_dir).resolve()
    above = (one for one in source.resolve().parents if root in one.parents and is_run(one))
    elsewhere = (one for one in reversed(places.versions(root, trainer.run_name)) if is_same_run(one, source))
    run = next(above, None) or next(elsewhere, None)
    try:
        return None if run is None else places.create(run / EVALUATIONS, stage)
    except ConfigError as error:
        log.info("This evaluation has a directory of its own. %s", error)
        return None


def is_same_run(directory: Path | None, source: Path | None) -> bool:
    """Return whether a checkpoint is of the run in a run directory, in whatever folder it is."""
    if directory is None or source is None:
        return False
    if directory.resolve() in source.resolve().parents:
        return True
    identity = identity_of(directory)
    return bool(identity) and source.is_dir() and load_manifest(source).run == identity


def is_elsewhere(directory: Path | None, source: Path) -> bool:
    """Return whether a checkpoint is of the run in a run directory, but is in another folder."""
    return is_same_run(directory, source) and directory not in source.parents


def folders_elsewhere(trainer: "Trainer", task: Task) -> list[Path]:
    """Return the folders outside of the run directory with checkpoints from which a run can resume."""
    task.trainer = trainer  # which configure_callbacks may ask
    callbacks = [one for one in with_callbacks_of(task, trainer.callbacks) if isinstance(one, CheckpointCallback)]
    found = [one for one in callbacks if one.dirpath and loop_part(one, "is_elsewhere")]
    return [Path(str(one.dirpath)) for one in found if not one.save_weights_only]


def find_weights(trainer: "Trainer", request: Request, check: find.Check) -> Path:
    """Return the checkpoint that an evaluation takes its weights from."""
    if isinstance(request.weights, StoredRun):
        request.task.trainer = trainer  # which configure_callbacks may ask
        callbacks = with_callbacks_of(request.task, trainer.callbacks)
        return request.weights.weights([one for one in callbacks if isinstance(one, Checkpoint)])
    path = Path(named_checkpoint(trainer, request.weights) or "")
    require_local(path, "The checkpoint")
    if not path.exists():
        hint = did_you_mean(str(path), ("last", "best", "none")) or " Expected a path, 'last' or 'best'."
        raise CheckpointError(f"There is no checkpoint at {path}.{hint} From the command line {FRESH}")
    if path.is_file():
        return path
    found = find.resolve(path, check)
    request.source_is_chosen = found != path
    return found


def named_checkpoint(trainer: "Trainer", name: str | Path | None) -> str | Path | None:
    """Turn "last" and "best" into the paths that the Checkpoint callback knows."""
    if name not in ("last", "best"):
        return name
    callback = trainer.checkpoint_callback
    path = None if callback is None else callback.best_model_path if name == "best" else callback.last_model_path
    if not path and callback is not None and callback.last_model_path:
        raise CheckpointError(
            f"There is no 'best' checkpoint: none was saved with a finite value of {callback.monitor!r}. Say "
            f"ckpt_path='last', or give a path."
        )
    if not path:
        raise CheckpointError(f"There is no {name!r} checkpoint: this trainer has written none. Give a path.")
    return str(path)


def make_run(call: JoinedCall, saved: dict[str, Any] | None) -> Run:
    """Call the set-up hooks, place the task with the checkpoint's weights, and make loaders, optimizers and the run.

    `saved`: the checkpoint's contents, of which the weights are dropped once they are loaded.
    """
    trainer, task, stage, strategy = call.trainer, call.task, call.stage, call.strategy
    prepare_data(call)
    if call.datamodule is not None:
        call.datamodule.setup(stage)  # first, so that callbacks and the task may look at its data
    for hook in call.hooks.of_callbacks["setup"]:
        hook(stage)
    for hook in call.hooks.of_task["setup"]:
        hook(stage)
    # after the `setup` hooks, which may learn from the data what configure_model needs (the number of classes)
    strategy.build_model(task)
    if trainer.activation_checkpointing and stage == "fit":
        strategy.recomputing = kernels.Recomputing(task, trainer.activation_checkpointing)
    if trainer.sync_batchnorm and stage == "fit":
        call.undo.callback(strategy.sync_batch_norm(task, call.state.replicas))
    strategy.place_task(task)
    call.metrics.states = make_metric_states(call)
    other_dtypes: list[fingerprint.SettingChange] = []
    if saved is not None:
        show_checkpoint(call, saved)
        if stage == "fit" and convert.is_lightning(saved):
            convert.take_over(trainer, saved)
        other_dtypes = fingerprint.other_dtypes(task, saved)
        restore.load_task_weights(task, saved, task.strict_loading, strategy.state_dicts)
        del saved["state_dict"]  # before there are optimizers
    make_loaders(call, (saved.get("fingerprint") or {}).get("samples") if saved and call.goes_on else None)
    arity = count_arguments(task, "training_step") if stage == "fit" else 1
    optimization = make_optimizers(call) if stage == "fit" else Optimization(trainer, task, call.hooks, call.metrics)
    # Of settings as configure_optimizers returned them, before anything is restored: a learning rate of step 5,000 is
    # no difference to the one of the config.
    described = fingerprint.fingerprint_of(trainer, optimization) if stage == "fit" else {}
    transfer = make_transfer(call)
    one_order = call.bitwise or call.members_change
    by_replica = stage == "fit" and task.automatic_optimization and (call.local_replicas > 1 or one_order)
    strategy.setup(task, optimization.optimizers, call.layout, one_order and by_replica)
    numerics = find_numerics(call, optimization) if stage == "fit" else {}
    if not strategy.compiles_blocks:
        kernels.compile_in_place(task, trainer.compile)
    return Run(
        **vars(call),
        optimization=optimization,
        schedule=Schedule(call, optimization),
        transfer=transfer,
        by_replica=by_replica,
        arity=arity,
        gradient_scale=strategy.reducer.scale,
        fingerprint=described,
        other_dtypes=other_dtypes,
        numerics=numerics,
        drift=DriftGuard(task, strategy.weight_ranks if stage == "fit" and call.keyed else SINGLE),
        contention=Contention(strategy.device, strategy.place.rank),
    )


def make_metric_states(call: Call) -> MetricStates:
    """Find the metric objects of the task, which hold what they held before the run on the first rank alone."""
    owned, shares = call.layout.owned(call.strategy.data_ranks.rank), call.metrics.shares
    states = MetricStates(call.task, owned, by_replica=call.bitwise or shares, shared=shares)
    if owned.start > 0:  # else it would count once a rank
        for metric in states.by_path.values():
            metric.reset()
    return states


def find_numerics(call: JoinedCall, optimization: Optimization) -> dict[str, Any]:
    """Return the settings that results depend on bit by bit; under `bitwise` every rank must have the same."""
    numerics = contents.numerics_of(call.strategy, optimization.optimizers, call.trainer.compile)
    if call.bitwise:
        kernels.require_same_ranks(call.strategy.collectives.gather_objects(numerics))
    return numerics


def start(run: Run, saved: dict[str, Any] | None) -> None:
    """Load the rest of the checkpoint into a complete run, open its loggers, and start the watchdog."""
    trainer = run.trainer
    if saved is not None and run.stage == "fit":
        restore.load_rest(trainer, saved, resumes=True)
    elif saved is not None and trainer.evaluates_with_states:
        restore.load_saved_states(
            trainer, convert.find_states(trainer, saved) if convert.is_lightning(saved) else saved
        )
    open_loggers(run)
    if run.stage == "fit" and trainer.garbage_collection_seconds is not None:
        collector = garbage.GarbageCollector(trainer.garbage_collection_seconds)
        run.agreement.collect_garbage = collector.collect
        run.undo.callback(collector.close)
    if trainer.hang_timeout is not None:
        run.strategy.collectives.barrier()  # all are watched from the same moment: some may have had much to prepare
    run.watchdog.begin()  # last: a slow set-up (downloads, compilation) is no hang


def prepare_data(call: Call) -> None:
    """Prepare the data in one process of each machine (or one in all) while the others wait."""
    place = call.strategy.place
    if place.local_rank == 0 and (place.node_rank == 0 or getattr(call.datamodule, "prepare_data_per_node", True)):
        if call.datamodule is not None:
            call.datamodule.prepare_data()
        call.task.prepare_data()
    # the others wait while one process downloads, instead of reading half a file
    call.strategy.collectives.barrier()


def make_loaders(call: Call, begun: Mapping[str, Any] | None = None) -> None:
    """Get the loaders of this stage and deal them out; `begun`: the samples of the run's fingerprint at a resume."""
    trainer = call.trainer
    if call.loop.doing == "train":
        with epoch_of_loaders(call):
            make_training_data(call, begun)
            limit: int | float = trainer.overfit_batches or trainer.limit_val_batches
            if limit and overrides(call.task, Task, "validation_step"):
                make_evaluation_data(call, "validation", limit)
        require_same_lengths(call)
        plan_validation(call)
        return
    make_evaluation_data(call, call.loop.doing, getattr(trainer, LIMIT_OF[call.loop.doing]), required=True)
    require_same_lengths(call)


def plan_validation(call: Call) -> None:
    """Compute after how many batches of a replica, or seconds, validation is due; None: at the end of epochs."""
    trainer, interval = call.trainer, call.trainer.val_check_interval
    if isinstance(interval, (str, timedelta, Mapping)):
        if "validation" in call.data.evaluations:
            call.data.validation_seconds = parse_duration(interval).total_seconds()
        return
    if "validation" not in call.data.evaluations or (interval == 1.0 and isinstance(interval, float)):
        if trainer.check_val_every_n_epoch is None and "validation" in call.data.evaluations:
            raise ConfigError("check_val_every_n_epoch=None needs val_check_interval as a count of batches (int).")
        return
    rounds = call.training_data.rounds
    if isinstance(interval, float):
        if rounds is None:
            raise ConfigError(
                f"val_check_interval={interval} is a fraction of an epoch, but the training loader does not say "
                f"how long an epoch is; give a count of batches (int)."
            )
        call.data.validation_rounds = max(1, int(rounds * interval))
        return
    if rounds is not None and interval > rounds and trainer.check_val_every_n_epoch is not None:
        raise ConfigError(
            f"val_check_interval={interval} batches is more than the {rounds} batches of an epoch, so validation "
            f"would never run; lower it, or count over epochs with check_val_every_n_epoch=null."
        )
    call.data.validation_rounds = interval


def require_same_lengths(call: Call) -> None:
    """Raise DataError where data that is dealt out by position differs in length between ranks; every rank calls it.

    Such ranks would end an epoch after different steps, and wait for each other forever.
    """
    if call.strategy.place.world_size == 1:
        return
    own: dict[str, int | None] = {}
    if isinstance(call.data.training, DealtData):
        own["training"] = call.data.training.source.positions(0)
    for word, data in call.data.evaluations.items():
        for index, source in enumerate(data.sources):
            if isinstance(source, DealtData) and index not in data.shares:
                own[f"{word} (loader {index})"] = source.source.positions(0)
    every = call.strategy.collectives.gather_objects(own)
    for rank, other in enumerate(every):
        if other != every[0]:
            told = "; ".join(f"{name}: {every[0].get(name)} and {other.get(name)}" for name in {**every[0], **other})
            raise DataError(
                f"Rank 0 and rank {rank} have data of different lengths (samples, or batches of one's own sampler): "
                f"{told}. Each rank must be given all of it, which is then dealt out; where each brings its own share, "
                f"set trainer.use_distributed_sampler=false."
            )


@contextmanager
def epoch_of_loaders(call: Call) -> Iterator[None]:
    """Set `current_epoch` to the epoch in which an uninterrupted run asks for the loaders of this one."""
    state, every = call.state, call.trainer.reload_dataloaders_every_n_epochs
    epoch = state.epoch
    state.epoch = epoch - epoch % every if every else 0
    try:
        yield
    finally:
        state.epoch = epoch


def make_training_data(call: Call, begun: Mapping[str, Any] | None = None) -> None:
    """Get the training loader and deal it out; `begun`: see `make_loaders`."""
    trainer, given = call.trainer, find_loader(call, "train")
    loader = combined(given)
    if loader is None:
        raise DataError(
            "fit needs training data: give train_dataloaders, a data module, or the task a train_dataloader."
        )
    limit = trainer.overfit_batches or trainer.limit_train_batches
    require_iterable(loader, "The training loader")
    require_length(loader, "overfit_batches" if trainer.overfit_batches else "limit_train_batches", limit)
    whole = not call.task.automatic_optimization or trainer.sync_batchnorm
    left_out = samples_left_out(trainer.leave_out_samples, loader)
    shares = replace(dealing(call), whole_rounds=whole, padded=trainer.pads_shares, left_out=left_out)
    ranks = SINGLE if trainer.reads_streams_whole or call.members_change else call.strategy.collectives
    count = counter_of(call.task)
    data = training_data(loader, shares, limit, bool(trainer.overfit_batches), ranks, count)
    origin = origin_of_shares(call, data, begun)
    if origin:
        require_shares_fit(call, origin)
        samples_left_out(trainer.leave_out_samples, loader, is_share=True)
        if not (whole or trainer.pads_shares):
            call.undo.enter_context(unpadded(loader))
        data = own_shares(data, call.strategy.collectives, count, compares=not trainer.reads_streams_whole)
    call.data.loaders["train"] = given
    call.data.training = data
    call.trainer.lengths["train"] = call.data.training.rounds
    call.data.keys_forward = call.keyed and not call.data.training.forward_is_keyed
    call.data.samples = fingerprint.samples_of(
        trainer, loader, call.data.training.rounds, trainer.use_distributed_sampler and not origin
    )
    if trainer.is_global_zero:
        log.debug("Training data: %s, %s batches of each replica", type(loader).__name__, call.data.training.rounds)
    if call.data.training.rounds == 0 and limit:
        raise DataError(
            f"The training loader gives no step: {len(loader)} batches with limit_train_batches={limit} and "
            f"{call.state.replicas} replicas. With drop_last every replica needs a full batch."
        )


def samples_left_out(wanted: list[int] | None, loader: Any, is_share: bool = False) -> frozenset[int]:
    """Return the dataset indices to leave out. Raises ConfigError where the samples of the loader have none."""
    if not wanted:
        return frozenset()
    if is_share or not is_dealable(loader):
        raise ConfigError(
            f"trainer.leave_out_samples names indices of one training dataset, but {type(loader).__name__} is a "
            f"stream, several loaders, or one process's share of the data: leave the samples out in the dataset."
        )
    length = length_of(loader.dataset)
    if length is not None and max(wanted) >= length:
        raise ConfigError(f"trainer.leave_out_samples names {max(wanted)}, but the last index is {length - 1}.")
    return frozenset(wanted)


def make_evaluation_data(call: Call, word: str, limit: int | float, required: bool = False) -> None:
    """Get the loaders of an evaluation and deal them out."""
    overfit = word == "validation" and bool(call.trainer.overfit_batches)
    given = call.data.loaders
    found = find_loader(call, word)
    if found is None and required:
        raise DataError(f"{call.stage} needs data: give dataloaders, a data module, or the task a {LOADERS[word]}.")
    loaders = one_after_another(found)
    for index, loader in enumerate(loaders):
        name = f"The {word} loader" + (f" {index}" if len(loaders) > 1 else "")
        require_iterable(loader, name, refuses_empty=False)
        require_length(loader, "overfit_batches" if overfit else LIMIT_OF[word], limit)
    given[word] = found
    if loaders:
        shares = shares_of_evaluation(call, loaders)
        meeting = None if shares or word == "predict" else step_collectives(call, word)
        compares = not (call.trainer.reads_streams_whole or call.members_change)
        data = EvaluationData(
            loaders,
            dealing(call),
            limit,
            shares,
            step_collectives=meeting,
            ranks=call.strategy.collectives if compares else SINGLE,
            expects_shares=compares and not call.trainer.use_distributed_sampler,
            count=counter_of(call.task),
        )
        require_batches(data, "overfit_batches" if overfit else LIMIT_OF[word])
        call.trainer.lengths[word] = data.rounds()
        if any(call.trainer.lengths[word]):
            call.data.evaluations[word] = data


def weight_names(task: Task) -> set[str]:
    """Return the names of a task's weights, past a `state_dict` of its own, which may need what `setup` makes."""
    return set(nn.Module.state_dict(task))


def require_batches(data: EvaluationData, name: str) -> None:
    """Raise ConfigError for a limit that leaves none of a loader's batches, though it is not 0."""
    for index, length in enumerate(data.lengths):
        if length and data.limit and data.count(index) == 0:
            raise ConfigError(f"{name}={data.limit} of {length} batches is none: say 0 for none, or {1 / length:.2g}.")


def show_checkpoint(call: Call, saved: dict[str, Any]) -> None:
    """Call on_load_checkpoint of the task, which may turn the contents into what callbacks know; then theirs.

    Both find the weights that the trainer takes.
    """
    saved["state_dict"] = call.trainer.weights_of(saved)
    for hook in (*call.hooks.of_task["on_load_checkpoint"], *call.hooks.of_callbacks["on_load_checkpoint"]):
        hook(saved)


def step_collectives(call: Call, word: str) -> StepCollectives | None:
    """Return what tells whether steps of an evaluation call collectives, where samples are then repeated; else None.

    They are repeated also where a hook that ends it gathers what its steps have kept.
    """
    ranks = call.strategy.data_ranks
    pads = call.trainer.pads_shares and ranks.size > 1 and not call.strategy.lockstep
    if not pads or call.state.replicas % ranks.size:
        return None
    found = StepCollectives(counts=call.strategy.leaves_default_group)
    found.seen = gathers(call.task, (f"on_{word}_epoch_end", f"on_{word}_end"))
    return found


def find_loader(call: Call, word: str) -> Any:
    """Return the given loader, or the data module's, or the task's."""
    if word in call.given:
        return call.given[word]
    for source in (call.datamodule, call.task):
        method = getattr(source, LOADERS[word], None)
        found = method() if method is not None else None
        if found is not None:
            return found
    return None


def require_length(loader: Any, name: str, limit: int | float) -> None:
    """Raise ConfigError for a limit `name` that is a fraction of a loader of unknown length."""
    if isinstance(limit, float) and 0.0 < limit < 1.0 and length_of(loader) is None:
        raise ConfigError(
            f"trainer.{name}={limit} is a fraction, but the loader does not say how many batches it has; give a count "
            f"(int)."
        )


def origin_of_shares(call: Call, source: TrainingData, begun: Mapping[str, Any] | None) -> str:
    """Return why each process's loader is taken for its own share of the training data; "" where it is dealt out.

    begun: the samples of the run's fingerprint, where it resumes.
    """
    trainer, ranks = call.trainer, call.strategy.data_ranks
    if ranks.size > 1 and (is_read_whole(call, source.loader) or not trainer.use_distributed_sampler):
        return "use_distributed_sampler=False"
    if all(reads_share(part, ranks) for part in loaders_in(source.loader)):
        return "by its DistributedSampler"
    if trainer.reads_streams_whole:
        return ""
    # a stream that was opened for a look may not take the position that is restored
    if begun is not None and (ranks.size == 1 or isinstance(source, StreamData)):
        return "" if begun.get("use_distributed_sampler", True) else "as when the run began"
    if call.strategy.collectives.size == 1:
        return ""
    samples = source.read_samples(call.state.epoch)
    return "as they read different samples" if are_shares(samples, call.strategy.collectives, ranks.rank) else ""


def shares_of_evaluation(call: Call, loaders: Sequence[Any]) -> set[int]:
    """Return the numbers of evaluation loaders that are each process's own share without a look at what they read."""
    trainer, ranks = call.trainer, call.strategy.data_ranks
    several, lockstep = ranks.size > 1, call.strategy.lockstep
    if several and all(is_read_whole(call, loader) for loader in loaders):
        return set(range(len(loaders)))
    if several and trainer.reads_streams_whole and not trainer.use_distributed_sampler:
        if lockstep:
            raise ConfigError(LOCKSTEP)
        return set(range(len(loaders)))
    shares = {index for index, loader in enumerate(loaders) if reads_share(loader, ranks)}
    for index in shares if not trainer.pads_shares else ():
        call.undo.enter_context(unpadded(loaders[index]))
    return shares


def is_read_whole(call: Call, loader: Any) -> bool:
    """Return whether each process takes all that it reads of a stream, as under Lightning."""
    stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return call.trainer.reads_streams_whole and stream and not call.strategy.lockstep


def require_shares_fit(call: Call, origin: str) -> None:
    """Raise ConfigError where the run does not take shares that depend on the number of processes."""
    replicas, processes = call.state.replicas, call.strategy.data_ranks.size
    told = f"Each process's loader is its own share of the training data ({origin})"
    instead = "give each process all of the data, which Legato deals out"
    if call.strategy.lockstep:
        raise ConfigError(LOCKSTEP)
    if call.members_change:
        raise ConfigError(f"{told}, which an elastic run cannot deal to others when the process is gone: {instead}.")
    if call.bitwise:
        raise ConfigError(
            f"{told}, so the samples of a step depend on the number of processes, which reproducible='bitwise' does "
            f"not allow. Set reproducible='order', or {instead}."
        )
    if replicas != processes:
        begun = call.source is not None if isinstance(call, JoinedCall) else False
        ways = f"Start {replicas} processes, as the run began" if begun else f"Set trainer.replicas={processes}"
        raise ConfigError(
            f"{told}, the share of one replica, but there are {replicas} replicas on {processes} processes. {ways}; or "
            f"{instead}."
        )


def dealing(call: Call) -> Dealing:
    """Return how batches are dealt out to replicas and processes."""
    accumulate, seed = call.trainer.accumulate_grad_batches, call.state.seed
    return Dealing(
        call.layout,
        call.strategy.data_ranks.rank,
        accumulate,
        seed,
        keyed=call.keyed,
        lockstep=call.strategy.lockstep,
        loader_options=call.trainer.loader,
        counts_first_tensor=call.trainer.reads_streams_whole,
    )


def make_optimizers(call: JoinedCall) -> Optimization:
    """Ask the task for its optimizers, and check them against how the run uses them."""
    task, trainer, strategy = call.task, call.trainer, call.strategy
    spare_compiler()
    clips = trainer.gradient_clip_val is not None
    require_dense_gradients(task, ["reproducible=bitwise"] * call.bitwise + ["gradient_clip_val"] * clips)
    try:
        optimizers, schedulers = task.make_optimizers()
    except ValueError:
        require_parameters(task)
        raise
    for callback in trainer.callbacks:
        loop_part(callback, "extend_optimizers")(task, optimizers)
    for optimizer in optimizers:
        kernels.choose_fused(optimizer)
    # after the callbacks' parameter groups, which a wrapper such as zero1's deals out over ranks
    optimizers = [strategy.wrap_optimizer(optimizer) for optimizer in optimizers]
    optimization = Optimization(trainer, task, call.hooks, call.metrics, optimizers, schedulers)
    optimization.use_guard(make_guard(optimization, call))
    use_closures(call, optimization)
    if not task.automatic_optimization:
        strategy.precision.cast_anew()
    if not task.automatic_optimization and (call.local_replicas > 1 or trainer.accumulate_grad_batches > 1):
        raise ConfigError(
            f"Manual optimization takes one replica a process and accumulate_grad_batches=1, since training_step steps "
            f"the optimizers itself; here are {call.state.replicas} replicas on {strategy.data_ranks.size} "
            f"processes and accumulate_grad_batches={trainer.accumulate_grad_batches}."
        )
    if not task.automatic_optimization and trainer.gradient_clip_val is not None and trainer.is_global_zero:
        log.info(
            "Manual optimization: gradient_clip_val is what clip_gradients(optimizer) clips by, where it is called."
        )
    return optimization


def make_transfer(call: Call) -> Callable[[Any, int], Any] | None:
    """Return the function that moves batches, None if none is needed; the data module's hooks precede the task's."""
    owners: list[DataHooks | None] = []
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        sources = ((call.datamodule, DataModule), (call.task, Task))
        owners.append(next((source for source, kind in sources if source and overrides(source, kind, name)), None))
    before, move, after = owners
    device, precision = call.strategy.device, call.strategy.precision
    bitwise, copies = call.bitwise, None
    if call.trainer.prefetch_to_device:
        copies = call.strategy.copies = call.strategy.copy_stream()
    unchanged = device.type == "cpu" and precision.weights_dtype is None and not bitwise
    if owners == [None] * 3 and unchanged:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if copies is not None:
            copies.begin_batch()
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, dataloader_idx)
        else:
            batch = to_device(batch, device, copies)
        batch = precision.convert_batch(batch)
        # last, as any step before may return a view at an odd offset
        if bitwise:
            batch = with_allocated_memory(batch)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return transfer


def open_loggers(run: Run) -> None:
    """Open the loggers and store the config, on rank 0; tell the others' loggers where that is."""
    trainer, step = run.trainer, run.state.global_step
    if trainer.run_dir is None:
        return
    if not trainer.is_global_zero:
        for logger in trainer.loggers:
            loop_part(logger, "follow")(trainer.run_dir)
        return
    # of a run that goes on once there is a checkpoint with steps of this start: see `Saver.store_config`
    if trainer.config_text is not None and not run.goes_on:
        weights = run.source if run.stage != "fit" else None
        places.write_config(trainer.run_dir, trainer.config_text, trainer.given_config, weights)
    if run.stage == "fit" and trainer.records_starts:
        run.status.begin(trainer.run_dir, progress(trainer))
    # also where processes were started again before there was a checkpoint: what they had logged is void
    in_memory = step > 0 and not trainer.fits_continue  # else what was logged for later steps is void
    going_on = run.stage == "fit" and (run.source is not None or in_memory or restart_count() > 0)
    hyperparameters = None
    if trainer.logs_hyperparameters:
        hyperparameters = trainer.hyperparameters_to_log([one for one in (run.datamodule, run.task) if one is not None])
    if run.stage == "fit" and trainer.records_starts:
        hyperparameters = {**run_settings(run), **(hyperparameters or {})}
    for logger in trainer.loggers:
        loop_part(logger, "open")(trainer.run_dir, step if going_on else None)
        log.debug("%s writes to %s", type(logger).__name__, logger.log_dir or trainer.run_dir)
        if trainer.config_text is not None and type(logger).log_text is not Logger.log_text:
            logger.log_text("config", f"```yaml\n{trainer.config_text}```", step)
        if hyperparameters is not None:
            logger.log_hyperparams(hyperparameters)
        logger.log_graph(run.task)


def run_settings(run: Run) -> dict[str, Any]:
    """Return the settings that loggers show among the hyperparameters of every run."""
    trainer, place = run.trainer, run.strategy.place
    devices = place.world_size if place.world_size > 1 else trainer.num_devices
    found = {
        "batch_size": getattr(run.data.loaders.get("train"), "batch_size", None),
        "seed": run.state.seed,
        "precision": str(trainer.precision),
        "devices": f"{devices} {run.strategy.device.type}",
        "strategy": run.strategy.name,
    }
    return {name: value for name, value in found.items() if value is not None}


def progress(trainer: "Trainer") -> dict[str, Any]:
    """Return the progress of a run, for its record."""
    state, callback = trainer.state, trainer.checkpoint_callback
    found: dict[str, Any] = {"step": state.global_step, "elapsed": state.elapsed}
    found["epoch"] = state.epoch + (state.epoch_steps > 0)  # counted from 1, as the progress bar does
    found |= {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
    if getattr(callback, "monitor", None) is not None:
        score = getattr(callback, "best_model_score", None)
        best = {} if score is None else finite_only({"best": float(score)})
        path = Path(str(callback.best_model_path)).name
        found |= {
            "monitor": callback.monitor,
            "mode": getattr(callback, "mode", "min"),
            "best_checkpoint": path,
            **best,
        }
    return {**found, "metrics": finite_only(trainer.logged_metrics)}


def with_callbacks_of(task: Task, callbacks: list[Callback]) -> list[Callback]:
    """Return the trainer's callbacks and the task's, which replace those of the same class; those that save last."""
    brought = task.configure_callbacks() or []  # None: it has none, or has given them to the trainer itself
    own = list(brought) if isinstance(brought, (list, tuple)) else [brought]
    kinds = {type(callback) for callback in own}
    restored = [callback for callback in callbacks if type(callback) not in kinds or callback in own]
    added = [callback for callback in own if callback not in restored]
    return sorted(restored + added, key=lambda callback: isinstance(callback, CheckpointCallback))  # stable


NONE_FOR_DEFAULT = (
    *LIMITS[:4],
    *("val_check_interval", "num_sanity_val_steps", "log_every_n_steps", "gradient_clip_algorithm", "precision"),
    *("default_root_dir", "deterministic", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
)
"""Arguments for which None, Lightning's default, means the default here."""


def check_arguments(trainer: "Trainer") -> None:
    """Raise ConfigError for arguments that cannot work, and set those that follow from others."""
    let_be_seen()
    for name in NONE_FOR_DEFAULT:
        if getattr(trainer, name) is None:
            setattr(trainer, name, TrainerArguments.__dataclass_fields__[name].default)
    require_local(trainer.default_root_dir, "trainer.default_root_dir")
    root = os.path.abspath(trainer.default_root_dir)  # wherever the process goes later
    trainer.default_root_dir = root if isinstance(trainer.default_root_dir, str) else Path(root)
    given = {name: getattr(trainer, name) for name in ARGUMENT_NAMES}
    mistakes = [f"trainer.{key[1]}={given[str(key[1])]!r} {message}" for key, message in problems(given)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if isinstance(trainer.val_check_interval, (str, timedelta, Mapping)):
        try:
            parse_duration(trainer.val_check_interval)
        except ConfigError as error:
            raise ConfigError(f"trainer.val_check_interval, where it is no number, is a time. {error}") from None
    fault = name_problem(trainer.run_name)
    if fault is not None:
        raise ConfigError(f"trainer.run_name {fault}")
    for option in trainer.loader or ():
        if option not in LOADER_OPTIONS:
            hint = did_you_mean(option, LOADER_OPTIONS) or f" It takes {', '.join(LOADER_OPTIONS)}."
            raise ConfigError(f"trainer.loader has no option {option!r}.{hint}")
    if not isinstance(trainer.checkpoint_format, (CheckpointFormat, type(None))):
        raise ConfigError(
            f"trainer.checkpoint_format takes an object with the methods name, write, read and remove (see "
            f"legato.CheckpointFormat); got {describe_kind(trainer.checkpoint_format)}."
        )
    trainer.gradient_clip_val = trainer.gradient_clip_val or None
    Precision(trainer.precision, trainer.device_list[0].type)
    if trainer.fast_dev_run:
        _shorten(trainer, int(trainer.fast_dev_run))
    if trainer.max_epochs is None:
        trainer.max_epochs = 1000 if trainer.max_steps == -1 and trainer.max_time is None else -1


def _shorten(trainer: "Trainer", batches: int) -> None:
    """Set the arguments for fast_dev_run: a few batches of each stage, and nothing written."""
    for name in LIMITS[:4]:
        setattr(trainer, name, batches)
    trainer.max_epochs, trainer.max_steps, trainer.num_sanity_val_steps = 1, batches, 0
    trainer.val_check_interval, trainer.check_val_every_n_epoch, trainer.overfit_batches = 1.0, 1, 0.0
    trainer.logger, trainer.write_csv, trainer.enable_checkpointing = None, False, False


def make_strategy(trainer: "Trainer", wanted: Any) -> Strategy:
    """Return the strategy that a name, a mapping with `name`, or an object asks for."""
    if isinstance(wanted, Strategy):
        return wanted
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    name = options.pop("name", None)
    if name == "auto":
        place = find_place(trainer.cluster) or Place()
        several = len(trainer.device_list) * trainer.num_nodes > 1 or place.world_size > 1
        name = "ddp" if several else "single"
    if name not in STRATEGIES:
        known = ("auto", *STRATEGIES)
        hint = did_you_mean(str(name), known)
        if str(name).startswith("ddp_"):
            hint = " Options are given beside the name: {'name': 'ddp', 'find_unused_parameters': True}."
        raise ConfigError(f"trainer.strategy={name!r} is not known; there are {', '.join(known)}.{hint}")
    kind = trainer.strategy_class(name)
    try:
        found: Strategy = kind(**options)
    except TypeError as error:
        unknown = [option for option in options if option in TORCH_OPTIONS]
        instead = f" {TORCH_OPTIONS[unknown[0]]}" if unknown else ""
        raise ConfigError(f"trainer.strategy.{name}: {error}.{instead}") from error
    except ConfigError as error:
        raise ConfigError(f"trainer.strategy: {str(error).removeprefix('trainer.strategy: ')}") from error
    return found


def make_loggers(wanted: Any, write_csv: bool) -> list[Logger]:
    """Return the loggers that the arguments `logger` and `write_csv` ask for."""
    from ...loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger

    if wanted is True:
        wanted = [TensorBoardLogger(), JSONLinesLogger()]
    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted else []
    for logger in found:
        if not isinstance(logger, Logger):
            raise ConfigError(
                f"trainer.logger takes True, False, a legato Logger or a list of them; got {describe_kind(logger)}."
            )
    if write_csv and not any(isinstance(logger, CSVLogger) for logger in found):
        found.append(CSVLogger())
    return found


def make_callbacks(trainer: "Trainer", wanted: Any) -> list[Callback]:
    """Return the given callbacks and, after them, those that the trainer's other arguments ask for."""
    from ... import callbacks as known

    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted is not None else []
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(f"trainer.callbacks takes legato Callbacks; got {describe_kind(callback)}.")
    for wish, kind, options in trainer.default_callbacks():
        roles = (CheckpointCallback, ProgressDisplay, known.ModelSummary)
        role = next((base for base in roles if issubclass(kind, base)), kind)
        if wish and (kind is known.Timer or not any(isinstance(callback, role) for callback in found)):
            try:
                found.append(kind(**options))
            except ConfigError as error:
                raise ConfigError(f"trainer.max_time: {error}") from error
    savers = [
        callback for callback in found if not trainer.enable_checkpointing and isinstance(callback, CheckpointCallback)
    ]
    if savers and not trainer.fast_dev_run:
        raise ConfigError("enable_checkpointing=False, but callbacks has a Checkpoint; leave one of the two out.")
    return [callback for callback in found if callback not in savers]
