"""CombinedLoader: several loaders as one, whose batches are made of a batch of each; or of one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from ..errors import ConfigError, DataError, did_you_mean
from .loader_workers import shielded
from .loaders import length_of, require_iterable
from .reading import read
from .transfer import count_samples

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
_END = object()


class CombinedLoader(Iterable[tuple[Any, int, int]]):
    """Loaders in a dict, a list, a tuple or any nesting of them; a batch has that same form.

    In `fit` the order of samples, resume and augmentation are those of each loader alone; a combined batch counts as
    the samples of all loaders in it.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        """Combine loaders, each of them any iterable of batches.

        mode: "min_size" ends with the shortest loader; "max_size_cycle" with the longest, while shorter ones begin
        anew; "max_size" with the longest, with None for those that are done; "sequential" takes the batches of one
        loader after the other, as they are.

        Raises ConfigError for another mode, DataError for what is no loader.
        """
        if mode not in get_args(Mode):
            raise ConfigError(
                f"CombinedLoader(mode={mode!r}): expected one of {get_args(Mode)}.{did_you_mean(mode, get_args(Mode))}"
            )
        self.iterables, self.mode = iterables, mode
        named = list(_leaves(iterables, ""))
        self.names = [name or "loader" for name, _ in named]
        """Where each loader stands, such as "text.0"."""
        self.flattened = [loader for _, loader in named]
        """The loaders, in the order in which the nesting is written."""
        if not named:
            raise DataError("A CombinedLoader needs at least one loader, got none.")
        for name, loader in zip(self.names, self.flattened, strict=True):
            if isinstance(loader, CombinedLoader):
                raise DataError(
                    f"The combined loader {name!r} is a CombinedLoader itself; put its loaders in its place."
                )
            require_iterable(loader, f"The combined loader {name!r}")

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx); with "sequential" both count by loader, else the second is 0."""
        if self.mode != "sequential":
            yield from ((batch, index, 0) for index, batch in enumerate(self.batches()))
            return
        for number, loader in enumerate(self.flattened):
            yield from ((batch, index, number) for index, batch in enumerate(_opened(loader)))

    def __len__(self) -> int:
        """Return the number of combined batches. Raises TypeError where a loader that counts does not say its own."""
        lengths = [length_of(loader) for loader in self.flattened]
        unknown = [name for name, length in zip(self.names, lengths, strict=True) if length is None]
        if unknown:
            raise TypeError(f"{', '.join(unknown)} of this CombinedLoader: no length.")
        return self.combine_lengths([length for length in lengths if length is not None])

    def combine_lengths(self, lengths: list[int]) -> int:
        """Return how many combined batches there are, given the loaders' own numbers."""
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def batches(self) -> Iterator[Any]:
        """Yield the combined batches."""
        if self.mode == "sequential":
            return (batch for batch, *_ in self)
        return map(self.fill, self._rows())

    def fill(self, pieces: Iterable[Any]) -> Any:
        """Return the nesting of the loaders, with a piece in the place of each."""
        return _fill(self.iterables, iter(pieces))

    def count_samples(self, batch: Any) -> int:
        """Return the samples of a combined batch: of all loaders together."""
        if self.mode == "sequential":
            return count_samples(batch)
        return sum(count_samples(piece) for piece in _pieces(self.iterables, batch) if piece is not None)

    def _rows(self) -> Iterator[list[Any]]:
        """Yield a batch of each loader."""
        iterators = [_opened(loader) for loader in self.flattened]
        done: set[int] = set()
        while True:
            row: list[Any] = []
            for number, loader in enumerate(self.flattened):
                piece = None if self.mode == "max_size" and number in done else next(iterators[number], _END)
                if piece is _END:
                    done.add(number)
                    if self.mode == "min_size" or len(done) == len(self.flattened):
                        return
                    piece = None
                    if self.mode == "max_size_cycle":
                        iterators[number] = _opened(loader)
                        piece = next(iterators[number], _END)
                    if piece is _END:
                        raise DataError(f"The combined loader {self.names[number]!r} yields no batch.")
                row.append(piece)
            yield row


def combined(loaders: Any) -> Any:
    """Return several loaders in a dict, list or tuple as a CombinedLoader, as `fit` takes them; else what was given.

    A list counts as several loaders where it has a DataLoader in it: without one it is a list of batches.
    """
    if isinstance(loaders, Mapping) or (isinstance(loaders, (list, tuple)) and _has_loader(loaders)):
        return CombinedLoader(loaders, "max_size_cycle")
    return loaders


def one_after_another(loaders: Any) -> list[Any]:
    """Return the loaders over which an evaluation passes one after the other, given a dict or list of them, or one."""
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return list(loaders)
    return [] if loaders is None else [loaders]


def sample_counter(loader: Any) -> Callable[[Any], int]:
    """Return what counts the samples in a batch of `loader`."""
    return loader.count_samples if isinstance(loader, CombinedLoader) else count_samples


def loaders_in(loader: Any) -> list[Any]:
    """Return the loaders that a loader is made of: itself, where it is not combined."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def _has_loader(loaders: Any) -> bool:
    parts = loaders.values() if isinstance(loaders, Mapping) else loaders
    return any(
        _has_loader(part)
        if isinstance(part, (Mapping, list, tuple))
        else isinstance(part, (DataLoader, CombinedLoader))
        for part in parts
    )


def _opened(loader: Any) -> Iterator[Any]:
    with shielded(loader):
        return read(iter(loader))


def _leaves(loaders: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each loader with its place in the nesting."""
    if not isinstance(loaders, (Mapping, list, tuple)):
        yield name, loaders
        return
    keys = loaders if isinstance(loaders, Mapping) else getattr(loaders, "_fields", range(len(loaders)))
    for key, part in zip(keys, loaders.values() if isinstance(loaders, Mapping) else loaders, strict=True):
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _fill(loaders: Any, pieces: Iterator[Any]) -> Any:
    if isinstance(loaders, Mapping):
        filled = {key: _fill(part, pieces) for key, part in loaders.items()}
        return filled if type(loaders) is dict else type(loaders)(filled)  # type: ignore[call-arg]
    if isinstance(loaders, tuple) and hasattr(loaders, "_fields"):
        return type(loaders)(*(_fill(part, pieces) for part in loaders))
    if isinstance(loaders, (list, tuple)):
        return type(loaders)(_fill(part, pieces) for part in loaders)
    return next(pieces)


def _pieces(loaders: Any, batch: Any) -> Iterator[Any]:
    """Yield each loader's piece of a combined batch."""
    if isinstance(loaders, Mapping):
        for key, part in loaders.items():
            yield from _pieces(part, batch[key])
    elif isinstance(loaders, (list, tuple)):
        for part, piece in zip(loaders, batch, strict=True):
            yield from _pieces(part, piece)
    else:
        yield batch
