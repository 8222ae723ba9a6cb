"""DataLoaders over streams. Each batch carries its number of samples and the dataset's state after the batch.

Workers read ahead of training, so only the worker that creates a batch knows the dataset's state at that point. The
worker sends that state with the batch, as in torchdata's StatefulDataLoader.
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
    """A batch, along with its number of samples and its worker's state.

    This class is a tuple so that torch can pin its tensors and send them between processes.
    """

    batch: Any
    samples: int | None
    """Number of collated items, or None if the dataset yields batches."""
    worker: int = 0
    state: dict[str, Any] | None = None
    """The reader's state after this batch, or None for a dataset without a state."""


class TrackingCollate:
    """The collate_fn and worker_init_fn of a tracked loader, which call the user's functions."""

    def __init__(self, loader: "DataLoader[Any]", key: int | None, starts: Mapping[int, Any]) -> None:
        """Wrap the collate_fn and worker_init_fn of `loader`.

        Args:
            key: key for the workers' random numbers, so that a resumed worker can reproduce them.
            starts: the state from which each worker continues; the main process is worker 0.
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
        """Restore the dataset to the state where this reader starts, if there is one."""
        state = self.starts.get(self.worker)
        if state is not None:
            self.key, self.batches = state["key"], state["batches"]
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]

    def seed(self) -> None:
        """Seed the generators for the next batch in a worker. In the main process, the batch's position seeds them."""
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
    """A loader that yields each batch as a `Delivery` and records the states in the current epoch's deliveries."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.loader = loader
        self.has_state = has_state(loader.dataset)
        # States of each worker before and after its latest batch; the worker of the latest batch of all, and that batch
        self.states, self.newest, self.batch = dict[int, list[Any]](), 0, None

    def open(self, key: int | None, starts: Mapping[int, Any] | None = None) -> Iterator[Delivery]:
        """Return an iterator over deliveries; see `TrackingCollate` for the arguments."""
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
        """Record the dataset state that came with the latest batch."""
        batch, _, worker, state = delivery
        self.states[worker] = [self.states[worker][1] if worker in self.states else None, state]
        self.newest, self.batch = worker, batch

    def state_dict(self) -> dict[str, Any]:
        """Return the readers' states after the latest batch recorded by `note`, or an empty dict if there are none."""
        if not self.states:
            return {}
        states = [[worker, *pair] for worker, pair in sorted(self.states.items())]
        return {"states": states, "newest": self.newest, "hashes": list(hashes_of(self.batch))}

    def resume(self, key: int | None, saved: Mapping[str, Any], batch_key: int | None) -> Iterator[Delivery] | None:
        """Return an iterator that continues after the latest batch in `saved`, or None if that is not possible.

        Args:
            batch_key: the key under which the main process read that batch.

        Workers take turns, always starting with worker 0, so all workers up to the one that created the latest
        batch start one batch earlier, and the extra batches are dropped. The latest batch must match the saved
        hashes. It does not match if the dataset keeps samples outside its state, as in a shuffle buffer.
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
        except Exception:  # faulty data raises its error again when the stream is read from the beginning
            delivery = None
        if delivery is None or list(hashes_of(delivery.batch)) != saved["hashes"]:
            close_loaders(keep=batches_open)
            if fresh is not None:
                self.loader.dataset.load_state_dict(fresh)  # type: ignore[attr-defined]
            return None
        self.states, self.newest, self.batch = states, newest, delivery.batch
        return batches


def has_state(dataset: Any) -> bool:
    """Return whether an iterable dataset has a `state_dict` without required arguments and a `load_state_dict`."""
    method = getattr(dataset, "state_dict", None)
    if not isinstance(dataset, IterableDataset) or method is None or not hasattr(dataset, "load_state_dict"):
        return False
    parameters = signature(method).parameters.values()
    return all(p.default is not Parameter.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def tracked(loader: Any) -> TrackedLoader | None:
    """Return a TrackedLoader, or None if `loader` is not a DataLoader or overrides torch's iteration.

    Also returns None if tracking is not needed: a batch from torch's own collate functions reveals its number of
    samples, so a loader that uses them is tracked only if its dataset has a state.
    """
    if not isinstance(loader, DataLoader) or not iterates_plainly(loader):
        return None
    is_useful = loader.collate_fn not in (default_collate, default_convert) or has_state(loader.dataset)
    return TrackedLoader(loader) if is_useful else None
