"""Sets up the data: finds and checks a stage's loaders, and distributes their batches over processes and replicas."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, DataError, correction
from ...base.quantities import parse_duration
from ...tasks.data_hooks import DataHooks
from ...tasks.data_module import DataModule
from ...tasks.task import Task
from ..accelerators import has_streams
from ..data.combined import combined, loaders_in, one_after_another
from ..data.dealing import DealtData, EvaluationData, TrainingData, training_data
from ..data.loaders import is_dealable, length_of, require_iterable
from ..data.shares import LOCKSTEP, are_shares, name_of, reads_share, unpadded
from ..data.steps import Dealing
from ..data.streams import StreamData, own_shares
from ..data.transfer import CopyStream, to_device, with_allocated_memory
from ..hooks import counter_of, overrides
from ..processes.ranks import SINGLE, Ranks
from ..resume import fingerprint
from ..run import Call

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")

# Each stage's short name in hooks and arguments
SHORT = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}
LOADERS = {stage: f"{short}_dataloader" for stage, short in SHORT.items()}
LIMIT_OF = {stage: f"limit_{short}_batches" for stage, short in SHORT.items()}


def prepare_data(call: Call) -> None:
    """Call prepare_data in one process per machine, or in only one process overall, while the others wait."""
    place = call.strategy.place
    if place.local_rank == 0 and (place.node_rank == 0 or getattr(call.datamodule, "prepare_data_per_node", True)):
        if call.datamodule is not None:
            call.datamodule.prepare_data()
        call.task.prepare_data()
    # until the download is complete: the others must not read an incomplete file
    call.strategy.collectives.barrier()


def make_loaders(call: Call, begun: Mapping[str, Any] | None = None) -> None:
    """Get the loaders for this stage and distribute their batches.

    Args:
        begun: the samples section of the checkpoint's fingerprint, if the run resumes.
    """
    trainer = call.trainer
    if call.loop.doing == "train":
        state, every = call.state, trainer.reload_dataloaders_every_n_epochs
        epoch = state.epoch
        # for both loaders: a loader hook that reads current_epoch must see the epoch of an uninterrupted run
        state.epoch = epoch - epoch % every if every else 0
        try:
            make_training_data(call, begun)
            if overrides(call.task, Task, "validation_step"):
                make_evaluation_data(call, "validation")
        finally:
            state.epoch = epoch
        require_same_lengths(call)
        plan_validation(call)
        return
    make_evaluation_data(call, call.loop.doing)
    require_same_lengths(call)


def plan_validation(call: Call) -> None:
    """Set the interval between validation runs, in batches per replica or in seconds.

    If validation runs at the end of each epoch, neither interval is set.
    """
    interval, over_epochs = call.trainer.val_check_interval, call.trainer.check_val_every_n_epoch is None
    if "validation" not in call.data.evaluations:
        return
    rounds = call.training_data.rounds
    if isinstance(interval, (str, timedelta, Mapping)):
        call.data.validation_seconds = parse_duration(interval).total_seconds()
    # 1.0 is an epoch, 1 is one batch
    elif isinstance(interval, float):
        if over_epochs and interval == 1.0:
            raise ConfigError("check_val_every_n_epoch=None requires val_check_interval to be a number of batches.")
        if interval != 1.0 and rounds is None:
            raise ConfigError(
                f"val_check_interval={interval} is a fraction of an epoch, but the training loader has no length. Use "
                f"a number of batches (int)."
            )
        call.data.validation_rounds = None if interval == 1.0 else max(1, int((rounds or 0) * interval))
    else:
        if rounds is not None and interval > rounds and not over_epochs:
            raise ConfigError(
                f"val_check_interval={interval} batches is more than the {rounds} batches in an epoch, so validation "
                f"would never run. Lower it, or count across epochs with check_val_every_n_epoch=null."
            )
        call.data.validation_rounds = interval


def require_same_lengths(call: Call) -> None:
    """Raise DataError if data that is distributed by position differs in length between ranks.

    Such ranks would end an epoch after different numbers of steps and wait for each other forever.
    All ranks must call this.
    """
    sources: dict[str, Any] = {"training": call.data.training}
    for stage, data in call.data.evaluations.items():
        sources |= {f"{stage} (loader {n})": source for n, source in enumerate(data.sources) if n not in data.shares}
    lengths = {name: data.source.positions(0) for name, data in sources.items() if isinstance(data, DealtData)}
    # during setup, as the first later symptom would be ranks that wait for each other at the end of an epoch
    ranks = call.strategy.collectives.gather_objects(lengths)
    for rank, here in enumerate(ranks):
        if here != ranks[0]:
            pairs = "; ".join(f"{name}: {ranks[0].get(name)} and {here.get(name)}" for name in {**ranks[0], **here})
            raise DataError(
                f"Rank 0 and rank {rank} have data of different lengths (in samples, or in batches with a custom "
                f"sampler): {pairs}. Give each rank all of the data, so that Legato can distribute it. If each rank "
                f"reads its own share, set trainer.use_distributed_sampler=false."
            )


def make_training_data(call: Call, begun: Mapping[str, Any] | None = None) -> None:
    """Get the training loader and distribute its batches. For `begun`, see `make_loaders`."""
    trainer, loaders = call.trainer, find_loader(call, "train")
    loader = combined(loaders)
    if loader is None:
        raise DataError(
            "fit needs training data: pass train_dataloaders or a data module, or define the task's train_dataloader."
            + correction("trainer.fit(task)", "trainer.fit(task, train_loader)")
        )
    limit = trainer.overfit_batches or trainer.limit_train_batches
    require_iterable(loader, "The training loader")
    require_length(loader, "overfit_batches" if trainer.overfit_batches else "limit_train_batches", limit)
    # a process that joins an elastic run has no other rank to compare with during setup
    ranks = SINGLE if call.members_change else call.strategy.collectives
    data = distribute(loader, dealing(call), trainer, call.task, ranks)
    full_rounds, even = data.dealing.full_rounds, data.dealing.padded
    origin = origin_of_shares(call, data, begun)
    if origin:
        require_shares_fit(call, origin)
        # samples that a DistributedSampler repeats would count twice
        if not (full_rounds or even):
            call.undo.enter_context(unpadded(loader))
        data = own_shares(data, call.strategy.collectives, counter_of(call.task))
    elif even and isinstance(data, StreamData) and call.state.replicas > 1:
        raise ConfigError(
            f"trainer.use_distributed_sampler='even' (True in a Lightning script) repeats samples, but "
            f"{name_of(loader)} does not support random access. In the dataset's __iter__, let each process yield its "
            f"own share, with itertools.islice(samples, torch.distributed.get_rank(), None, "
            f"torch.distributed.get_world_size()). Combine loaders with 'min_size' or 'max_size_cycle'. Outside "
            f"Lightning compatibility mode, use_distributed_sampler=true distributes the batches."
        )
    call.data.loaders["train"] = loaders
    call.data.training, trainer.lengths["train"], data.content = data, data.rounds, {}
    # if loading has just seeded the generators by the same key, skipping that saves 10 us per batch
    call.data.keys_forward = call.keyed and not data.forward_is_keyed
    call.data.samples = fingerprint.samples_of(
        trainer, loader, data.rounds, trainer.use_distributed_sampler and not origin
    )
    if trainer.is_global_zero:
        log.debug("Training data: %s, %s batches per replica", type(loader).__name__, data.rounds)
    if data.rounds == 0 and limit:
        raise DataError(
            f"There is too little training data for a step: {len(loader)} batches with limit_train_batches={limit} and "
            f"{call.state.replicas} replicas. With drop_last, every replica needs a full batch."
        )


def distribute(loader: Any, dealing: Dealing, trainer: "Trainer", task: Task, ranks: Ranks = SINGLE) -> TrainingData:
    """Return a training loader's data, distributed according to the trainer's settings.

    Args:
        ranks: the ranks that verify that they are reading the same data.
    """
    # both have collectives within the step, which need a batch on each replica
    full_rounds = not task.automatic_optimization or trainer.sync_batchnorm
    left_out = samples_left_out(trainer.leave_out_samples, loader)
    even = trainer.use_distributed_sampler == "even"
    dealing = replace(dealing, full_rounds=full_rounds, padded=even, left_out=left_out)
    limit = trainer.overfit_batches or trainer.limit_train_batches
    return training_data(loader, dealing, limit, bool(trainer.overfit_batches), ranks, counter_of(task))


def samples_left_out(wanted: list[int] | None, loader: Any) -> frozenset[int]:
    """Return the dataset indices to leave out. Raises ConfigError if the loader's samples have no indices."""
    if not wanted:
        return frozenset()
    if not is_dealable(loader):
        raise ConfigError(
            f"trainer.leave_out_samples contains indices into one training dataset, but {type(loader).__name__} is a "
            f"stream or several loaders. Exclude these samples in the dataset itself."
        )
    length = length_of(loader.dataset)
    if length is not None and max(wanted) >= length:
        raise ConfigError(f"trainer.leave_out_samples contains {max(wanted)}, but the last index is {length - 1}.")
    return frozenset(wanted)


def make_evaluation_data(call: Call, stage: str) -> None:
    """Get the loaders for an evaluation and distribute their batches."""
    trainer, trains = call.trainer, call.loop.doing == "train"
    # as in Lightning, overfit_batches also limits a fit's validation
    limit_name = "overfit_batches" if trains and trainer.overfit_batches else LIMIT_OF[stage]
    limit: int | float = getattr(trainer, limit_name)
    if trains and not limit:
        return
    passed = find_loader(call, stage)
    if passed is None and not trains:
        raise DataError(f"{call.stage} needs data: pass dataloaders or a data module, or define {LOADERS[stage]}.")
    loaders = one_after_another(passed)
    for index, loader in enumerate(loaders):
        name = f"The {stage} loader" + (f" {index}" if len(loaders) > 1 else "")
        require_iterable(loader, name, refuses_empty=False)
        require_length(loader, limit_name, limit)
    call.data.loaders[stage] = passed
    if not loaders:
        return
    data = EvaluationData(
        loaders,
        dealing(call),
        limit,
        shares_of_evaluation(call, loaders),
        ranks=SINGLE if call.members_change else call.strategy.collectives,
        expects_shares=not (call.members_change or trainer.use_distributed_sampler),
        count=counter_of(call.task),
    )
    for length, count in zip(data.lengths, data.counts, strict=True):
        if length and limit and count == 0:
            raise ConfigError(
                f"{limit_name}={limit} of {length} batches is less than one batch. Use 0 or at least {1 / length:.2g}."
            )
    trainer.lengths[stage] = data.rounds()
    # without a batch there is no evaluation, and its hooks are not called
    if any(trainer.lengths[stage]):
        call.data.evaluations[stage] = data


def find_loader(call: Call, stage: str) -> Any:
    """Return the loader passed to the call, else the data module's, else the task's."""
    if stage in call.request_loaders:
        return call.request_loaders[stage]
    # the data module first, as in Lightning
    for source in (call.datamodule, call.task):
        method = getattr(source, LOADERS[stage], None)
        loader = method() if method is not None else None
        if loader is not None:
            return loader
    return None


def require_length(loader: Any, name: str, limit: int | float) -> None:
    """Raise ConfigError if the limit `name` is a fraction but the loader has no length."""
    if isinstance(limit, float) and 0.0 < limit < 1.0 and length_of(loader) is None:
        raise ConfigError(
            f"trainer.{name}={limit} is a fraction, but the loader has no length. Use a number of batches (int)."
        )


def origin_of_shares(call: Call, source: TrainingData, begun: Mapping[str, Any] | None) -> str:
    """Return why each process's training loader is assumed to yield its own shard, or "" if Legato does the sharding.

    Args:
        begun: the samples section of the checkpoint's fingerprint, if the run resumes.
    """
    trainer, ranks = call.trainer, call.strategy.data_ranks
    if ranks.size > 1 and not trainer.use_distributed_sampler:
        return "use_distributed_sampler=False"
    # before reading samples, which may be expensive: the sampler's class shows it
    if all(reads_share(part, ranks) for part in loaders_in(source.loader)):
        return "it has a DistributedSampler"
    # nothing is read when a run resumes: a stream that has been opened may not accept the restored position
    if begun is not None and (ranks.size == 1 or isinstance(source, StreamData)):
        return "" if begun.get("use_distributed_sampler", True) else "as when the run started"
    if call.strategy.collectives.size == 1:
        return ""
    samples = source.read_samples(call.state.epoch)
    return "they read different samples" if are_shares(samples, call.strategy.collectives, ranks.rank) else ""


def shares_of_evaluation(call: Call, loaders: Sequence[Any]) -> set[int]:
    """Return the indices of evaluation loaders whose DistributedSamplers yield a different shard in each process."""
    shares = {index for index, loader in enumerate(loaders) if reads_share(loader, call.strategy.data_ranks)}
    for index in shares:
        call.undo.enter_context(unpadded(loaders[index]))
    return shares


def require_shares_fit(call: Call, origin: str) -> None:
    """Raise ConfigError if this run does not support a different shard of the data in each process."""
    replicas, processes = call.state.replicas, call.strategy.data_ranks.size
    if call.strategy.lockstep:
        raise ConfigError(LOCKSTEP)
    remedy = (
        f"Start {replicas} processes, as many as when the run started"
        if call.source is not None
        else f"Set trainer.replicas={processes}"
    )
    # a share belongs to its process: with a different number of processes, a step has different samples
    reasons = {
        "An elastic run cannot give a process's share to the others when that process leaves": call.members_change,
        "A share has no sample indices for trainer.leave_out_samples": call.trainer.leave_out_samples,
        "Under reproducible='bitwise', results must not depend on the number of processes": call.bitwise,
        f"A share serves one replica, but there are {replicas} replicas on {processes} processes. {remedy}": replicas
        != processes,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(
            f"Each process's loader yields its own share of the training data ({origin}). {reason}. To let Legato "
            f"distribute the data, give each process all of the data."
        )


def dealing(call: Call) -> Dealing:
    """Return the settings that determine how batches are assigned to replicas and processes."""
    accumulate, seed = call.trainer.accumulate_grad_batches, call.state.seed
    return Dealing(
        call.layout,
        call.strategy.data_ranks.rank,
        accumulate,
        seed,
        keyed=call.keyed,
        lockstep=call.strategy.lockstep,
        loader_options=call.trainer.loader,
    )


def make_transfer(call: Call) -> Callable[[Any, int], Any] | None:
    """Return the function that moves batches, or None if none is needed. A data module's hooks override the task's."""
    owners: list[DataHooks | None] = []
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        sources = ((call.datamodule, DataModule), (call.task, Task))
        owners.append(next((source for source, kind in sources if source and overrides(source, kind, name)), None))
    before, move, after = owners
    device, precision = call.strategy.device, call.strategy.precision
    bitwise, copies = call.bitwise, None
    # a separate stream, so that copies do not queue behind the previous batch's computation
    if call.trainer.prefetch_to_device:
        copies = CopyStream(device) if has_streams(device) else None
    call.strategy.to_device = move_all = partial(to_device, copies=copies)
    unchanged = device.type == "cpu" and precision.weights_dtype is None and not bitwise
    if owners == [None] * 3 and unchanged:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        # waits for memory: at most one extra batch is on the device
        if copies is not None:
            copies.begin_batch()
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, dataloader_idx)
        else:
            batch = move_all(batch, device)
        batch = precision.convert_batch(batch)
        # last, because any of the above may return a view at an odd offset
        if bitwise:
            batch = with_allocated_memory(batch)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return transfer
