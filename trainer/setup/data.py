"""Loaders of a stage: found, checked, and dealt out to processes and replicas."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, DataError
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

# A stage, and what names of hooks and arguments call it
SHORT = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}
LOADERS = {word: f"{short}_dataloader" for word, short in SHORT.items()}
LIMIT_OF = {word: f"limit_{short}_batches" for word, short in SHORT.items()}


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
        state, every = call.state, trainer.reload_dataloaders_every_n_epochs
        epoch = state.epoch
        # for both loaders: a loader hook that reads current_epoch must find the epoch of the uninterrupted run
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
    """Compute after how many batches of a replica, or seconds, validation is due; None: at the end of epochs."""
    interval, over_epochs = call.trainer.val_check_interval, call.trainer.check_val_every_n_epoch is None
    if "validation" not in call.data.evaluations:
        return
    rounds = call.training_data.rounds
    if isinstance(interval, (str, timedelta, Mapping)):
        call.data.validation_seconds = parse_duration(interval).total_seconds()
    # 1.0 is the whole epoch, 1 is one batch
    elif isinstance(interval, float):
        if over_epochs and interval == 1.0:
            raise ConfigError("check_val_every_n_epoch=None needs val_check_interval as a count of batches (int).")
        if interval != 1.0 and rounds is None:
            raise ConfigError(
                f"val_check_interval={interval} is a fraction of an epoch, but the training loader does not say "
                f"how long an epoch is; give a count of batches (int)."
            )
        call.data.validation_rounds = None if interval == 1.0 else max(1, int((rounds or 0) * interval))
    else:
        if rounds is not None and interval > rounds and not over_epochs:
            raise ConfigError(
                f"val_check_interval={interval} batches is more than the {rounds} batches of an epoch, so validation "
                f"would never run; lower it, or count over epochs with check_val_every_n_epoch=null."
            )
        call.data.validation_rounds = interval


def require_same_lengths(call: Call) -> None:
    """Raise DataError where data that is dealt out by position differs in length between ranks; every rank calls it.

    Such ranks would end an epoch after different steps, and wait for each other forever.
    """
    sources: dict[str, Any] = {"training": call.data.training}
    for word, data in call.data.evaluations.items():
        sources |= {f"{word} (loader {n})": one for n, one in enumerate(data.sources) if n not in data.shares}
    lengths = {name: data.source.positions(0) for name, data in sources.items() if isinstance(data, DealtData)}
    # at set-up, since the first symptom later would be ranks that wait for each other at the end of an epoch
    every = call.strategy.collectives.gather_objects(lengths)
    for rank, other in enumerate(every):
        if other != every[0]:
            told = "; ".join(f"{name}: {every[0].get(name)} and {other.get(name)}" for name in {**every[0], **other})
            raise DataError(
                f"Rank 0 and rank {rank} have data of different lengths (samples, or batches of one's own sampler): "
                f"{told}. Each rank must be given all of it, which is then dealt out; where each brings its own share, "
                f"set trainer.use_distributed_sampler=false."
            )


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
    # members of an elastic run come and go, and a joiner has nobody to compare with at set-up
    ranks = SINGLE if call.members_change else call.strategy.collectives
    data = dealt_out(loader, dealing(call), trainer, call.task, ranks)
    whole, even = data.dealing.whole_rounds, data.dealing.padded
    origin = origin_of_shares(call, data, begun)
    if origin:
        require_shares_fit(call, origin)
        # a DistributedSampler's repeated samples would count twice
        if not (whole or even):
            call.undo.enter_context(unpadded(loader))
        data = own_shares(data, call.strategy.collectives, counter_of(call.task))
    elif even and isinstance(data, StreamData) and call.state.replicas > 1:
        raise ConfigError(
            f"trainer.use_distributed_sampler='even' (True in a Lightning script) repeats samples of data that can be "
            f"read at any position, which {name_of(loader)} cannot. Let its dataset yield each process its share: "
            f"itertools.islice(samples, torch.distributed.get_rank(), None, torch.distributed.get_world_size()) in "
            f"__iter__. Combine loaders by 'min_size' or 'max_size_cycle'. Outside of Lightning compatibility mode "
            f"use_distributed_sampler=true deals the batches out."
        )
    call.data.loaders["train"] = given
    call.data.training, trainer.lengths["train"], data.content = data, data.rounds, {}
    # 10 us a batch are saved where loading has just seeded the generators by the same key
    call.data.keys_forward = call.keyed and not data.forward_is_keyed
    call.data.samples = fingerprint.samples_of(
        trainer, loader, data.rounds, trainer.use_distributed_sampler and not origin
    )
    if trainer.is_global_zero:
        log.debug("Training data: %s, %s batches of each replica", type(loader).__name__, data.rounds)
    if data.rounds == 0 and limit:
        raise DataError(
            f"The training loader gives no step: {len(loader)} batches with limit_train_batches={limit} and "
            f"{call.state.replicas} replicas. With drop_last every replica needs a full batch."
        )


def dealt_out(loader: Any, dealing: Dealing, trainer: "Trainer", task: Task, ranks: Ranks = SINGLE) -> TrainingData:
    """Deal a training loader out as the trainer's arguments and the task want it; `ranks` compare what they read."""
    # both have collectives within the step, for which each replica needs a batch
    whole = not task.automatic_optimization or trainer.sync_batchnorm
    left_out = samples_left_out(trainer.leave_out_samples, loader)
    even = trainer.use_distributed_sampler == "even"
    dealing = replace(dealing, whole_rounds=whole, padded=even, left_out=left_out)
    limit = trainer.overfit_batches or trainer.limit_train_batches
    return training_data(loader, dealing, limit, bool(trainer.overfit_batches), ranks, counter_of(task))


def samples_left_out(wanted: list[int] | None, loader: Any) -> frozenset[int]:
    """Return the dataset indices to leave out. Raises ConfigError where the samples of the loader have none."""
    if not wanted:
        return frozenset()
    if not is_dealable(loader):
        raise ConfigError(
            f"trainer.leave_out_samples names indices of one training dataset, but {type(loader).__name__} is a "
            f"stream or several loaders: leave the samples out in the dataset."
        )
    length = length_of(loader.dataset)
    if length is not None and max(wanted) >= length:
        raise ConfigError(f"trainer.leave_out_samples names {max(wanted)}, but the last index is {length - 1}.")
    return frozenset(wanted)


def make_evaluation_data(call: Call, word: str) -> None:
    """Get the loaders of an evaluation and deal them out."""
    trainer, trains = call.trainer, call.loop.doing == "train"
    # as in Lightning, overfit_batches limits the validation of a fit too
    limit_name = "overfit_batches" if trains and trainer.overfit_batches else LIMIT_OF[word]
    limit: int | float = getattr(trainer, limit_name)
    if trains and not limit:
        return
    found = find_loader(call, word)
    if found is None and not trains:
        raise DataError(f"{call.stage} needs data: give dataloaders, a data module, or the task a {LOADERS[word]}.")
    loaders = one_after_another(found)
    for index, loader in enumerate(loaders):
        name = f"The {word} loader" + (f" {index}" if len(loaders) > 1 else "")
        require_iterable(loader, name, refuses_empty=False)
        require_length(loader, limit_name, limit)
    call.data.loaders[word] = found
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
            raise ConfigError(f"{limit_name}={limit} of {length} batches is none: say 0 for none, or {1 / length:.2g}.")
    trainer.lengths[word] = data.rounds()
    # without a batch there is no evaluation, and no hook of one is called
    if any(trainer.lengths[word]):
        call.data.evaluations[word] = data


def find_loader(call: Call, word: str) -> Any:
    """Return the given loader, or the data module's, or the task's."""
    if word in call.request_loaders:
        return call.request_loaders[word]
    # the data module first, as in Lightning
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
    if ranks.size > 1 and not trainer.use_distributed_sampler:
        return "use_distributed_sampler=False"
    # before the run looks at samples: the class says it, and reading may be expensive
    if all(reads_share(part, ranks) for part in loaders_in(source.loader)):
        return "by its DistributedSampler"
    # a stream that was opened for a look may not take the position that is restored
    if begun is not None and (ranks.size == 1 or isinstance(source, StreamData)):
        return "" if begun.get("use_distributed_sampler", True) else "as when the run began"
    if call.strategy.collectives.size == 1:
        return ""
    samples = source.read_samples(call.state.epoch)
    return "as they read different samples" if are_shares(samples, call.strategy.collectives, ranks.rank) else ""


def shares_of_evaluation(call: Call, loaders: Sequence[Any]) -> set[int]:
    """Return the numbers of evaluation loaders that are each process's own share without a look at what they read."""
    shares = {index for index, loader in enumerate(loaders) if reads_share(loader, call.strategy.data_ranks)}
    for index in shares:
        call.undo.enter_context(unpadded(loaders[index]))
    return shares


def require_shares_fit(call: Call, origin: str) -> None:
    """Raise ConfigError where the run does not take shares that depend on the number of processes."""
    replicas, processes = call.state.replicas, call.strategy.data_ranks.size
    if call.strategy.lockstep:
        raise ConfigError(LOCKSTEP)
    ways = (
        f"Start {replicas} processes, as the run began"
        if call.source is not None
        else f"Set trainer.replicas={processes}"
    )
    # a share belongs to its process, so whatever changes the processes changes the samples of a step
    reasons = {
        "which an elastic run cannot deal to others when the process is gone": call.members_change,
        "which has no indices for trainer.leave_out_samples": call.trainer.leave_out_samples,
        "but reproducible='bitwise' is the same on any number of processes": call.bitwise,
        f"that of one replica, but there are {replicas} replicas on {processes} processes. {ways}": replicas
        != processes,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(
            f"Each process's loader is its own share of the training data ({origin}), {reason}; or give each process "
            f"all of the data, which Legato deals out."
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
    )


def make_transfer(call: Call) -> Callable[[Any, int], Any] | None:
    """Return the function that moves batches, None if none is needed; the data module's hooks precede the task's."""
    owners: list[DataHooks | None] = []
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        sources = ((call.datamodule, DataModule), (call.task, Task))
        owners.append(next((source for source, kind in sources if source and overrides(source, kind, name)), None))
    before, move, after = owners
    device, precision = call.strategy.device, call.strategy.precision
    bitwise, copies = call.bitwise, None
    # a stream of its own for copies: they do not queue behind the computation of the batch before
    if call.trainer.prefetch_to_device:
        copies = CopyStream(device) if has_streams(device) else None
    call.strategy.to_device = move_all = partial(to_device, copies=copies)
    unchanged = device.type == "cpu" and precision.weights_dtype is None and not bitwise
    if owners == [None] * 3 and unchanged:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        # waits for room: at most one further batch fills the device
        if copies is not None:
            copies.begin_batch()
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, dataloader_idx)
        else:
            batch = move_all(batch, device)
        batch = precision.convert_batch(batch)
        # last, as any step before may return a view at an odd offset
        if bitwise:
            batch = with_allocated_memory(batch)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return transfer
