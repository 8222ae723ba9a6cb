"""DataLoaders over streams whose batches tell how many samples were collated, and where their reader stands then.

Workers read ahead of training, so that the dataset's state after a batch is known where the batch is made alone: it
travels with the batch, as in torchdata's StatefulDataLoader.
"""

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info

from ...base.torch_private import iterates_plainly
from .loaders import close_loaders, opened_loaders, read_loader
from .randomness import seed_generators
from .sampling import mix
from .shares import hashes_of


class Delivery(NamedTuple):
    """A batch on its way from its reader: a tuple, in which torch pins and sends what it knows."""

    batch: Any
    samples: int | None
    """How many items were collated; None where the dataset makes batches."""
    worker: int = 0
    state: dict[str, Any] | None = None
    """Where the reader stands after this batch; None for a dataset without a state."""


class TrackingCollate:
    """The collate_fn and worker_init_fn of a tracked loader, around those of the user."""

    def __init__(self, loader: "DataLoader[Any]", key: int | None, starts: Mapping[int, Any]) -> None:
        """Wrap the functions of `loader`.

        key: of the random numbers in workers, which a resumed worker could not draw anew otherwise.
        starts: the state from which a worker goes on; the main process is worker 0.
        """
        self.collate, self.then, self.dataset = loader.collate_fn, loader.worker_init_fn, loader.dataset
        self.has_items, self.has_state = loader.batch_size is not None, has_state(loader.dataset)
        self.starts, self.key, self.worker, self.batches = starts, key, 0, 0

    def begin(self, worker: int) -> None:
        """Set up a worker process."""
        if self.then is not None:
            self.then(worker)
        info = get_worker_info()
        assert info is not None
        self.dataset, self.worker = info.dataset, worker
        self.go_on()
        self.seed()

    def go_on(self) -> None:
        """Put the dataset where this reader is to begin."""
        state = self.starts.get(self.worker)
        if state is not None:
            self.key, self.batches = state["key"], state["batches"]
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]

    def seed(self) -> None:
        """Seed the generators for a worker's next batch; the main process does so by the position of a batch."""
        if self.has_state and self.key is not None and get_worker_info() is not None:
            seed_generators(mix(self.key, self.worker, self.batches))

    def __call__(self, items: Any) -> Delivery:
        """Collate a batch."""
        batch, samples, state = self.collate(items), len(items) if self.has_items else None, None
        if self.has_state:
            self.batches += 1
            dataset = self.dataset.state_dict()  # type: ignore[attr-defined]
            state = {"key": self.key, "batches": self.batches, "dataset": dataset}
            self.seed()
        return Delivery(batch, samples, self.worker, state)


class TrackedLoader:
    """What the deliveries of a loader have told so far in an epoch."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.loader = loader
        self.has_state = has_state(loader.dataset)
        # The states of each worker before and after its newest batch; the worker of the newest of all, and that batch
        self.states, self.newest, self.batch = dict[int, list[Any]](), 0, None

    def open(self, key: int | None, starts: Mapping[int, Any] | None = None) -> Iterator[Delivery]:
        """Return an iterator over deliveries; for the arguments see `TrackingCollate`."""
        loader, self.states, self.batch = self.loader, {}, None
        collate, before = TrackingCollate(loader, key, starts or {}), (loader.collate_fn, loader.worker_init_fn)
        if not loader.num_workers:
            collate.go_on()
        loader.collate_fn, loader.worker_init_fn = collate, collate.begin
        try:
            return read_loader(loader)
        finally:
            loader.collate_fn, loader.worker_init_fn = before

    def note(self, delivery: Delivery) -> None:
        """Note the state that came with the newest batch."""
        batch, _, worker, state = delivery
        self.states[worker] = [self.states[worker][1] if worker in self.states else None, state]
        self.newest, self.batch = worker, batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the readers stand after the newest batch that was noted; empty where nothing tells."""
        if not self.states:
            return {}
        states = [[worker, *pair] for worker, pair in sorted(self.states.items())]
        return {"states": states, "newest": self.newest, "hashes": list(hashes_of(self.batch))}

    def resume(self, key: int | None, saved: Mapping[str, Any], batch_key: int | None) -> Iterator[Delivery] | None:
        """Return an iterator that goes on after the batch that was newest in `saved`; None where that cannot be.

        batch_key: under which the main process has read that batch.

        Workers take turns, and the first turn is always worker 0's. So those before whom it is not begin a batch
        earlier, which is dropped. The newest must be read as it was: what lies in a shuffle buffer is in no state.
        """
        states = {worker: pair for worker, *pair in saved["states"]}
        newest, batches_open, delivery = saved["newest"], opened_loaders(), None
        starts = {worker: pair[0 if worker <= newest else 1] for worker, pair in states.items()}
        fresh = None if self.loader.num_workers else self.loader.dataset.state_dict()  # type: ignore[attr-defined]
        try:
            batches = self.open(key, starts)
            if batch_key is not None:
                seed_generators(batch_key)
            for _ in range(sum(worker <= newest for worker in states)):
                delivery = next(batches, None)
        except Exception:  # what is wrong with the data itself is raised where it is read from the beginning
            delivery = None
        if delivery is None or list(hashes_of(delivery.batch)) != saved["hashes"]:
            close_loaders(but=batches_open)
            if fresh is not None:
                self.loader.dataset.load_state_dict(fresh)  # type: ignore[attr-defined]
            return None
        self.states, self.newest, self.batch = states, newest, delivery.batch
        return batches


def has_state(dataset: Any) -> bool:
    """Return whether a stream says where it stands, by a state_dict without arguments, and can go on from there."""
    tell = getattr(dataset, "state_dict", None)
    if not isinstance(dataset, IterableDataset) or tell is None or not hasattr(dataset, "load_state_dict"):
        return False
    asked = signature(tell).parameters.values()
    return all(p.default is not Parameter.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in asked)


def tracked(loader: Any) -> TrackedLoader | None:
    """Return a DataLoader as one that is tracked; None for any other iterable, and for one that iterates in its way.

    Nor where there is nothing to tell: torch's own collate functions make tensors of as many samples as items.
    """
    if not isinstance(loader, DataLoader) or not iterates_plainly(loader):
        return None
    tells = loader.collate_fn not in (default_collate, default_convert) or has_state(loader.dataset)
    return TrackedLoader(loader) if tells else None
