"""Set-up of a run, in order: checks, processes, checkpoint, hooks, the placed task, loaders, optimizers, loggers."""

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import Callback
from ..callbacks.checkpoint import Checkpoint
from ..tasks.data_hooks import DataHooks
from ..tasks.data_module import DataModule
from ..tasks.task import Task
from .arguments import ACCELERATORS, ARGUMENT_NAMES, CHOICES, LIMITS, TrainerArguments, wanted
from .checkpoints import contents, fingerprint, restore, store
from .checkpoints.manifest import load_manifest
from .checkpoints.reading import read_for_all
from .checkpoints.run_names import name_problem
from .checkpoints.saver import new_identity
from .checkpoints.store import FRESH, StoredRun
from .data.combined import combined, one_after_another
from .data.dealing import DealtData, EvaluationData, training_data
from .data.loaders import close_loaders, length_of, opened_loaders, require_iterable
from .data.randomness import seed_generators
from .data.sampling import Layout, mix
from .data.steps import Dealing
from .data.transfer import to_device, with_allocated_memory
from .errors import CheckpointError, ConfigError, DataError, TaskError, did_you_mean
from .hooks import (
    CALLBACK_HOOKS,
    STEP_NAMES,
    TASK_HOOKS,
    TASK_METHODS,
    Hooks,
    check_names,
    check_nones,
    count_arguments,
    overrides,
)
from .loggers.logger import Logger
from .messages import let_be_seen
from .metrics.log import Metrics
from .metrics.torchmetrics import MetricStates
from .optimization import kernels
from .optimization.nonfinite import make_guard
from .optimization.optimization import Optimization
from .optimization.optimizers import read_optimizers
from .optimization.precision import Precision
from .processes.environment import Place, find_place, restart_count, wants_public_torch
from .processes.layout_report import check_place, report_layout
from .processes.own_group import located
from .processes.script_collectives import ScriptCollectives
from .processes.sync import Agreement
from .run import DOING_OF_STAGE, Request, Run
from .strategies import STRATEGIES
from .strategies import __getattr__ as strategy_class
from .strategies.strategy import Strategy
from .torch_private import take_public_ways

if TYPE_CHECKING:
    from .trainer import Trainer

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


def join(run: Run, request: Request) -> None:
    """Check what can be checked, join the other processes, find the checkpoint and the run directory."""
    trainer, strategy, state = run.trainer, run.strategy, run.state
    if wants_public_torch():
        take_public_ways()
    run.undo.callback(close_loaders, opened_loaders())  # last, when signals end workers again
    run.undo.enter_context(run.preemption.handle_signals())
    run.membership = strategy.elastic.for_stage(run.stage).membership(run)
    run.watchdog.place = located(find_place(trainer.cluster) or Place())
    run.undo.enter_context(run.watchdog)
    place = run.membership.connect(run.watchdog.place)
    check_place(trainer, place)
    strategy.join(place, trainer.device_list, trainer.precision)
    report_layout(strategy)
    threads = trainer.threads or (1 if run.bitwise else None)
    run.undo.enter_context(kernels.settings(trainer.deterministic or run.bitwise, trainer.detect_anomaly, threads))
    run.undo.callback(strategy.teardown)
    seed_generators(mix(trainer.seed))
    run.undo.callback(trainer.saver.release)
    find_directory(run, request)
    run.membership.adopt_settings()
    restore.start_state(trainer, run.checkpoint if run.stage == "fit" else None)
    run.undo.callback(setattr, trainer, "replicas", trainer.replicas)
    trainer.replicas = state.replicas  # while the run lasts: configure_optimizers may want to know
    strategy.layout = Layout(state.replicas, strategy.data_ranks.size)
    run.metrics = Metrics(strategy.data_ranks, strategy.data_ranks.size, run.task, run.membership.changes)
    run.metrics.describe_place = run.describe_place
    run.metrics.first_replica = run.metrics.replica = run.layout.owned(strategy.data_ranks.rank).start
    newest = run.membership.newest
    run.agreement = Agreement(strategy.collectives, strategy.place.world_size, state.global_step, state.elapsed, newest)
    if strategy.leaves_default_group:
        script = run.script_collectives = ScriptCollectives(strategy)
        run.agreement.count, run.agreement.require_same = lambda: script.count, script.require_same


def check_task(task: Any, request: Request) -> None:
    """Raise TaskError for a task that lacks what the stage needs, or whose methods are named almost like hooks."""
    stage = request.stage
    if not isinstance(task, Task):
        raise TaskError(
            f"{stage} takes a legato Task, got {type(task).__name__}: subclass lg.Task instead of nn.Module."
        )
    check_names(task, Task, TASK_HOOKS, TASK_METHODS)
    if request.datamodule is not None:
        check_names(request.datamodule, DataModule, ("setup", "teardown", "on_exception"), TASK_METHODS)
    for owner in (task, request.datamodule):
        if owner is not None:
            owner.require_hyperparameters()
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
    for name in STEP_NAMES:
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
    own = {one for kind in type(task).__mro__ if not issubclass(Task, kind) for one in vars(kind)}
    return did_you_mean(name, (one for one in own if not one.startswith("__")), 0.8)


def find_directory(run: Run, request: Request) -> None:
    """Find and read the checkpoint to resume from, and find the run directory.

    Rank 0 decides for all. If the newest checkpoint, which it has chosen, is damaged, it chooses the one before.
    """
    trainer, damaged = run.trainer, list[Path]()
    while True:
        decided = Decision()
        if run.strategy.place.rank == 0:
            try:
                decided.directory, decided.source = decide_directory(trainer, request, damaged)
                decided.is_chosen = request.source_is_chosen
                decided.goes_on = is_same_run(decided.directory, decided.source)
                decided.identity = store.identity_of(decided.directory) or new_identity()
            except (ConfigError, CheckpointError) as error:
                decided.problem = error
        decided = run.strategy.collectives.broadcast(decided)
        if decided.problem is not None:
            raise decided.problem
        trainer.run_dir, run.source, run.watchdog.token = decided.directory, decided.source, decided.token
        if request.stage == "fit":
            trainer.saver.run_id = decided.identity  # unless the checkpoint to go on from has one
        if run.source is None:
            return
        run.goes_on = decided.goes_on
        try:
            run.checkpoint = read_for_all(
                run.strategy.collectives,
                run.source,
                run.task.state_dict().keys(),
                run.strategy.state_dicts.read_in_parts,
            )
        except CheckpointError as error:
            if not decided.is_chosen:
                raise
            damaged.append(run.source)
            if trainer.is_global_zero:
                log.warning("The checkpoint %s is passed over, it is not whole. %s", run.source.name, error)
            trainer.run_dir = trainer.given_dir
        else:
            break
    if trainer.is_global_zero:
        log.info("%s from %s", "Going on" if request.stage == "fit" else "Weights", run.source)


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
    token: str = field(default_factory=new_identity)
    """A word that no other run has."""


def decide_directory(
    trainer: "Trainer", request: Request, damaged: Collection[Path] = ()
) -> tuple[Path | None, Path | None]:
    """Return the run directory, made if needed, and the checkpoint to start from, which is none of the `damaged` ones.

    The sizes of its files have been checked; their checksums are when they are read.
    """

    def check(path: Path) -> bool:
        return path not in damaged and bool(store.check_sizes(path))

    root, identity = Path(trainer.default_root_dir), ""
    if isinstance(request.resume, StoredRun):
        assert request.resume.directory is not None
        trainer.saver.hold(request.resume.directory, request.stage)
        found, source = request.resume.to_resume(check, folders_elsewhere(trainer, request.task))
        identity = store.identity_of(request.resume.directory)
        request.source_is_chosen = True
        if found is None:
            trainer.saver.release(request.resume.directory)
    else:
        named, folders = named_checkpoint(trainer, request.resume), list[Path]()
        if named == "auto":
            folders = folders_elsewhere(trainer, request.task)
            before = map(store.identity_of, reversed(store.versions(root, trainer.run_name)))
            identity = next(filter(None, before), "")
        found, source = store.find(root, trainer.run_name, named, trainer.saver, check, folders)
        request.source_is_chosen = source is not None and source != Path(named or "")
    if request.weights is not None:  # before a directory is made: where there are none, nothing is left behind
        source = find_weights(trainer, request, check)
    directory = trainer.run_dir or found
    if directory is None and (trainer.loggers or trainer.checkpoint_callback is not None):
        directory = store.create(root, trainer.run_name)
        # one that begins anew for want of a whole checkpoint is the run that left none, and may write over its files
        if request.stage == "fit":
            store.write_identity(directory, identity or new_identity())
    if directory is not None and trainer.given_dir is None:  # a given one is locked by its owner, or it is a trial's
        trainer.saver.hold(directory, request.stage)
    return directory, source


def is_same_run(directory: Path | None, source: Path | None) -> bool:
    """Return whether a checkpoint is of the run in a run directory, wherever it lies."""
    if directory is None or source is None:
        return False
    if directory.resolve() in source.resolve().parents:
        return True
    identity = store.identity_of(directory)
    return bool(identity) and source.is_dir() and load_manifest(source).run == identity


def is_elsewhere(directory: Path | None, source: Path) -> bool:
    """Return whether a checkpoint is of the run in a run directory, but lies in another folder."""
    return is_same_run(directory, source) and directory not in source.parents


def folders_elsewhere(trainer: "Trainer", task: Task) -> list[Path]:
    """Return where else than in the run directory checkpoints are saved from which a run can go on."""
    task.trainer = trainer  # which configure_callbacks may ask
    callbacks = [one for one in with_callbacks_of(task, trainer.callbacks) if isinstance(one, Checkpoint)]
    return [one.dirpath for one in callbacks if one.dirpath and one.is_elsewhere and not one.save_weights_only]


def find_weights(trainer: "Trainer", request: Request, check: store.Check) -> Path:
    """Return the checkpoint that an evaluation takes its weights from."""
    if isinstance(request.weights, StoredRun):
        request.task.trainer = trainer  # which configure_callbacks may ask
        callbacks = with_callbacks_of(request.task, trainer.callbacks)
        return request.weights.weights([one for one in callbacks if isinstance(one, Checkpoint)])
    path = Path(named_checkpoint(trainer, request.weights) or "")
    if not path.exists():
        hint = did_you_mean(str(path), ("last", "best", "none")) or " Expected a path, 'last' or 'best'."
        raise CheckpointError(f"There is no checkpoint at {path}.{hint} From the command line {FRESH}")
    if path.is_file():
        return path
    found = store.resolve(path, check)
    request.source_is_chosen = found != path
    return found


def named_checkpoint(trainer: "Trainer", name: str | Path | None) -> str | Path | None:
    """Turn "last" and "best" into the paths that the Checkpoint callback knows."""
    if name not in ("last", "best"):
        return name
    callback = trainer.checkpoint_callback
    path = None if callback is None else callback.best_model_path if name == "best" else callback.last_model_path
    if not path:
        raise CheckpointError(f"There is no {name!r} checkpoint: this trainer has written none. Give a path.")
    return str(path)


def set_up(run: Run) -> None:
    """Call the set-up hooks, place the task, make loaders and optimizers, and load the checkpoint."""
    trainer, task, stage, strategy = run.trainer, run.task, run.stage, run.strategy
    trainer.saver.join(trainer.run_dir)
    if stage == "fit" and trainer.is_global_zero and trainer.run_dir is not None:
        store.write_identity(trainer.run_dir, trainer.saver.run_id)
    task.trainer = trainer
    if run.datamodule is not None:
        run.datamodule.trainer = trainer
    trainer.callbacks = with_callbacks_of(task, trainer.callbacks)
    for callback in trainer.callbacks:
        check_names(callback, Callback, CALLBACK_HOOKS)
    run.hooks = Hooks(trainer, task, trainer.callbacks)
    prepare_data(run)
    for hook in run.hooks.of_callbacks["setup"]:
        hook(stage)
    if run.datamodule is not None:
        run.datamodule.setup(stage)
    for hook in run.hooks.of_task["setup"]:
        hook(stage)
    strategy.build_model(task)
    if trainer.activation_checkpointing and stage == "fit":
        strategy.recomputing = kernels.Recomputing(task, trainer.activation_checkpointing)
    if trainer.sync_batchnorm and stage == "fit":
        run.undo.callback(strategy.sync_batch_norm(task, run.state.replicas))
    strategy.place_task(task)
    owned, shares = run.layout.owned(strategy.data_ranks.rank), run.metrics.shares
    run.metrics.states = MetricStates(task, owned, by_replica=run.bitwise or shares, shared=shares)
    if run.checkpoint is not None:
        run.hooks.call("on_load_checkpoint", run.checkpoint)
        run.other_dtypes = fingerprint.other_dtypes(task, run.checkpoint)
        restore.load_task_weights(task, run.checkpoint, task.strict_loading, strategy.state_dicts)
        del run.checkpoint["state_dict"]  # before there are optimizers
    make_loaders(run)
    if stage == "fit":
        make_optimizers(run)
    choose_transfer(run)
    one_order = run.bitwise or run.membership.changes
    run.by_replica = stage == "fit" and task.automatic_optimization and (run.local_replicas > 1 or one_order)
    strategy.setup(task, run.optimization.optimizers, run.layout, one_order and run.by_replica)
    run.gradient_scale = strategy.reducer.scale
    if stage == "fit":
        run.numerics = contents.numerics_of(trainer)
    if run.bitwise and stage == "fit":
        kernels.require_same_ranks(strategy.collectives.gather_objects(run.numerics))
    if not strategy.compiles_blocks:
        kernels.compile_in_place(task, trainer.compile)
    if run.checkpoint is not None and stage == "fit":
        restore.load_rest(trainer, run.checkpoint)
    run.checkpoint = None
    run.complete()
    open_loggers(run)
    if trainer.hang_timeout is not None:
        strategy.collectives.barrier()  # all are watched from the same moment: some may have had much to prepare
    run.watchdog.begin()


def prepare_data(run: Run) -> None:
    """Prepare the data in one process of each machine (or one in all) while the others wait."""
    place = run.strategy.place
    if place.local_rank == 0 and (place.node_rank == 0 or getattr(run.datamodule, "prepare_data_per_node", True)):
        if run.datamodule is not None:
            run.datamodule.prepare_data()
        run.task.prepare_data()
    run.strategy.collectives.barrier()


def make_loaders(run: Run) -> None:
    """Get the loaders of this stage and deal them out."""
    trainer = run.trainer
    if run.loop.doing == "train":
        with epoch_of_loaders(run):
            make_training_data(run)
            limit: int | float = trainer.overfit_batches or trainer.limit_val_batches
            if limit and overrides(run.task, Task, "validation_step"):
                make_evaluation_data(run, "validation", limit)
        require_same_lengths(run)
        run.plan_validation()
        return
    make_evaluation_data(run, run.loop.doing, getattr(trainer, LIMIT_OF[run.loop.doing]), required=True)
    require_same_lengths(run)


def require_same_lengths(run: Run) -> None:
    """Raise DataError where data that is dealt out by position differs in length between ranks; every rank calls it.

    Such ranks would end an epoch after different steps, and wait for each other forever.
    """
    if run.strategy.place.world_size == 1 or not run.trainer.use_distributed_sampler:
        return
    own: dict[str, int | None] = {}
    if isinstance(run.data.training, DealtData):
        own["training"] = run.data.training.source.positions(0)
    for word, data in run.data.evaluations.items():
        for index, source in enumerate(data.sources):
            if isinstance(source, DealtData):
                own[f"{word} (loader {index})"] = source.source.positions(0)
    every = run.strategy.collectives.gather_objects(own)
    for rank, other in enumerate(every):
        if other != every[0]:
            told = "; ".join(f"{name}: {every[0].get(name)} and {other.get(name)}" for name in {**every[0], **other})
            raise DataError(
                f"Rank 0 and rank {rank} have data of different lengths (samples, or batches of one's own sampler): "
                f"{told}. Each rank must be given all of it, which is then dealt out; where each brings its own share, "
                f"set trainer.use_distributed_sampler=false."
            )


@contextmanager
def epoch_of_loaders(run: Run) -> Iterator[None]:
    """Set `current_epoch` to the epoch in which an uninterrupted run asks for the loaders of this one."""
    state, every = run.state, run.trainer.reload_dataloaders_every_n_epochs
    epoch = state.epoch
    state.epoch = epoch - epoch % every if every else 0
    try:
        yield
    finally:
        state.epoch = epoch


def make_training_data(run: Run) -> None:
    """Get the training loader and deal it out."""
    trainer, given = run.trainer, find_loader(run, "train")
    loader = combined(given)
    if loader is None:
        raise DataError(
            "fit needs training data: give train_dataloaders, a data module, or the task a train_dataloader."
        )
    limit = trainer.overfit_batches or trainer.limit_train_batches
    require_iterable(loader, "The training loader")
    require_length(loader, "overfit_batches" if trainer.overfit_batches else "limit_train_batches", limit)
    shares = replace(dealing(run), whole_rounds=not run.task.automatic_optimization or trainer.sync_batchnorm)
    ranks = run.strategy.collectives if brings_own_shares(run) else None
    run.data.loaders["train"] = given
    run.data.training = training_data(loader, shares, limit, bool(trainer.overfit_batches), ranks)
    run.trainer.lengths["train"] = run.data.training.rounds
    run.data.keys_forward = run.keyed and not run.data.training.forward_is_keyed
    run.data.samples = fingerprint.samples_of(run)
    if run.data.training.rounds == 0:
        raise DataError(
            f"The training loader gives no step: {len(loader)} batches with limit_train_batches={limit} and "
            f"{run.state.replicas} replicas. With drop_last every replica needs a full batch."
        )


def make_evaluation_data(run: Run, word: str, limit: int | float, required: bool = False) -> None:
    """Get the loaders of an evaluation and deal them out."""
    overfit = word == "validation" and bool(run.trainer.overfit_batches)
    found = [combined(run.data.loaders["train"])] if overfit and "train" in run.data.loaders else find_loader(run, word)
    if found is None and required:
        raise DataError(f"{run.stage} needs data: give dataloaders, a data module, or the task a {LOADERS[word]}.")
    loaders = one_after_another(found)
    for index, loader in enumerate(loaders):
        require_iterable(loader, f"The {word} loader" + (f" {index}" if len(loaders) > 1 else ""))
        require_length(loader, "overfit_batches" if overfit else LIMIT_OF[word], limit)
    run.data.loaders[word] = found
    if loaders:
        run.data.evaluations[word] = EvaluationData(
            loaders, dealing(run), limit, brings_own_shares(run), in_order=overfit
        )
        run.trainer.lengths[word] = run.data.evaluations[word].counts()


def find_loader(run: Run, word: str) -> Any:
    """Return the given loader, or the data module's, or the task's."""
    if word in run.given:
        return run.given[word]
    for source in (run.datamodule, run.task):
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


def brings_own_shares(run: Run) -> bool:
    """Return whether each process's loader yields its own share already."""
    own = not run.trainer.use_distributed_sampler and run.strategy.data_ranks.size > 1
    if own and run.strategy.lockstep:
        raise ConfigError(
            f"use_distributed_sampler=False: the shares that processes bring may be uneven, but under strategy "
            f"{run.strategy.name!r} all must take equally many turns. Let Legato deal the samples out, or use ddp."
        )
    return own


def dealing(run: Run) -> Dealing:
    """Return how batches are dealt out to replicas and processes."""
    accumulate, seed = run.trainer.accumulate_grad_batches, run.state.seed
    return Dealing(
        run.layout, run.strategy.data_ranks.rank, accumulate, seed, keyed=run.keyed, lockstep=run.strategy.lockstep
    )


def make_optimizers(run: Run) -> None:
    """Ask the task for its optimizers, and check them against how the run uses them."""
    task, trainer = run.task, run.trainer
    run.arity = count_arguments(task, "training_step")
    optimizers, schedulers = read_optimizers(task.configure_optimizers(), task.automatic_optimization)
    optimizers = [run.strategy.wrap_optimizer(optimizer) for optimizer in optimizers]
    run.optimization = Optimization(run, optimizers, schedulers)
    run.fingerprint = fingerprint.fingerprint_of(run)
    run.watches_losses |= run.optimization.own_optimizer_step  # which is given the loss
    run.optimization.guard = guard = make_guard(run)
    run.watches_losses |= guard is not None and guard.needs_losses
    if not task.automatic_optimization and (run.local_replicas > 1 or trainer.accumulate_grad_batches > 1):
        raise ConfigError(
            f"Manual optimization takes one replica a process and accumulate_grad_batches=1, since training_step steps "
            f"the optimizers itself; here are {run.state.replicas} replicas on {run.strategy.data_ranks.size} "
            f"processes and accumulate_grad_batches={trainer.accumulate_grad_batches}."
        )
    if not task.automatic_optimization and trainer.gradient_clip_val is not None and trainer.is_global_zero:
        log.info(
            "Manual optimization: gradient_clip_val is what clip_gradients(optimizer) clips by, where it is called."
        )


def choose_transfer(run: Run) -> None:
    """Choose the function that moves batches, if any is needed: the data module's hooks come before the task's."""
    owners: list[DataHooks | None] = []
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        sources = ((run.datamodule, DataModule), (run.task, Task))
        owners.append(next((source for source, kind in sources if source and overrides(source, kind, name)), None))
    before, move, after = owners
    device, precision = run.strategy.device, run.strategy.precision
    bitwise = run.bitwise
    if owners == [None] * 3 and device.type == "cpu" and precision.weights_dtype is None and not bitwise:
        return

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, dataloader_idx)
        else:
            batch = to_device(batch, device)
        batch = precision.convert_batch(batch)
        if bitwise:
            batch = with_allocated_memory(batch)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    run.transfer = transfer


def open_loggers(run: Run) -> None:
    """Open the loggers and store the config, on rank 0."""
    trainer, step = run.trainer, run.state.global_step
    if not trainer.is_global_zero or trainer.run_dir is None:
        return
    if trainer.config_text is not None:
        weights = run.source if run.stage != "fit" else None
        store.write_config(trainer.run_dir, trainer.config_text, weights)
    # also where processes were started again before there was a checkpoint: what they had logged is void
    going_on = run.stage == "fit" and (run.source is not None or step > 0 or restart_count() > 0)
    hyperparameters = {
        name: value
        for source in (run.datamodule, run.task)
        if source is not None and source.__dict__.get("_log_hyperparams", True)
        for name, value in contents.hyperparameters_of(source)["hyper_parameters"].items()
    }
    for logger in trainer.loggers:
        logger.open(trainer.run_dir, step if going_on else None)
        if trainer.config_text is not None:
            logger.log_text("config", trainer.config_text, step)
        if hyperparameters:
            logger.log_hyperparams(hyperparameters)


def with_callbacks_of(task: Task, callbacks: list[Callback]) -> list[Callback]:
    """Return the trainer's callbacks and the task's; the task's replace those of the same class."""
    brought = task.configure_callbacks()
    own = list(brought) if isinstance(brought, (list, tuple)) else [brought]
    kinds = {type(callback) for callback in own}
    restored = [callback for callback in callbacks if type(callback) not in kinds or callback in own]
    return restored + [callback for callback in own if callback not in restored]


NONE_FOR_DEFAULT = (
    *LIMITS[:4],
    *("val_check_interval", "num_sanity_val_steps", "log_every_n_steps", "gradient_clip_algorithm", "precision"),
    *("default_root_dir", "deterministic", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
)
"""Where None is Lightning's default, and so may be given without a wish."""


def check_arguments(trainer: "Trainer") -> None:
    """Raise ConfigError for arguments that cannot work, and set those that follow from others."""
    let_be_seen()
    for name in NONE_FOR_DEFAULT:
        if getattr(trainer, name) is None:
            setattr(trainer, name, TrainerArguments.__dataclass_fields__[name].default)
    root = os.path.abspath(trainer.default_root_dir)  # wherever the process goes later
    trainer.default_root_dir = root if isinstance(trainer.default_root_dir, str) else Path(root)
    for name in ARGUMENT_NAMES:
        value = getattr(trainer, name)
        expected = wanted(name, value)
        if expected is not None:
            hint = did_you_mean(str(value), (*CHOICES.get(name, ()), *(ACCELERATORS if name == "accelerator" else ())))
            raise ConfigError(f"trainer.{name}={value!r}: expected {expected}.{hint}")
    fault = name_problem(trainer.run_name)
    if fault is not None:
        raise ConfigError(f"trainer.run_name {fault}")
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
    trainer.logger, trainer.enable_checkpointing = None, False


def make_strategy(trainer: "Trainer", wanted: Any) -> Strategy:
    """Return the strategy that a name, a mapping with `name`, or an object asks for."""
    if isinstance(wanted, Strategy):
        return wanted
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    name = options.pop("name", None)
    if name == "auto":
        name = "ddp" if len(trainer.device_list) * trainer.num_nodes > 1 else "single"
        name = "ddp" if delegate_place(trainer) > 1 else name
    if name not in STRATEGIES:
        known = ("auto", *STRATEGIES)
        hint = did_you_mean(str(name), known)
        if str(name).startswith("ddp_"):
            hint = " Options stand beside the name: {'name': 'ddp', 'find_unused_parameters': True}."
        raise ConfigError(f"trainer.strategy={name!r} is not known; there are {', '.join(known)}.{hint}")
    kind = strategy_class(STRATEGIES[name].split(":")[1])
    try:
        found: Strategy = kind(**options)
    except TypeError as error:
        raise ConfigError(f"trainer.strategy.{name}: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"trainer.strategy: {str(error).removeprefix('trainer.strategy: ')}") from error
    return found


def delegate_place(trainer: "Trainer") -> int:
    """Return how many processes a launcher has started us among; 1 where none has."""
    from .processes.environment import find_place

    place = find_place(trainer.cluster)
    return 1 if place is None else place.world_size


def make_loggers(wanted: Any) -> list[Logger]:
    """Return the loggers that the argument `logger` asks for."""
    if wanted is True:
        from .loggers.json_lines import JSONLinesLogger
        from .loggers.tensorboard import TensorBoardLogger

        return [TensorBoardLogger(), JSONLinesLogger()]
    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted else []
    for logger in found:
        if not isinstance(logger, Logger):
            raise ConfigError(
                f"trainer.logger takes True, False, a legato Logger or a list of them; got {type(logger).__name__}."
            )
    return found


def make_callbacks(trainer: "Trainer", wanted: Any) -> list[Callback]:
    """Return the given callbacks and, after them, those that the trainer's other arguments ask for."""
    from .. import callbacks as known

    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted is not None else []
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(f"trainer.callbacks takes legato Callbacks; got {type(callback).__name__}.")
    logs = bool(trainer.loggers)
    wishes: list[tuple[bool, str, dict[str, Any]]] = [
        (trainer.enable_progress_bar, "ProgressBar", {}),
        (trainer.enable_model_summary, "ModelSummary", {}),
        (logs, "LearningRateMonitor", {}),
        (logs, "ThroughputMonitor", {}),
        (trainer.max_time is not None, "Timer", {"duration": trainer.max_time}),
        (trainer.enable_checkpointing, "Checkpoint", {}),
    ]
    for wish, name, options in wishes:
        if wish and (name == "Timer" or not any(isinstance(callback, getattr(known, name)) for callback in found)):
            try:
                found.append(getattr(known, name)(**options))
            except ConfigError as error:
                raise ConfigError(f"trainer.max_time: {error}") from error
    savers = [
        callback for callback in found if not trainer.enable_checkpointing and isinstance(callback, known.Checkpoint)
    ]
    if savers and not trainer.fast_dev_run:
        raise ConfigError("enable_checkpointing=False, but callbacks has a Checkpoint; leave one of the two out.")
    return [callback for callback in found if callback not in savers]
