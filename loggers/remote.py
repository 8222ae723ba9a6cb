"""Common parts of tracking services' loggers: the id of a run, names with a prefix, checkpoints that are sent once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal


def kept_id(run_dir: Path, service: str) -> Path:
    """Return the file of a run directory that keeps the service's id of the run, so that a resume goes on in it."""
    return run_dir / f"{service}-id.txt"


def read_id(run_dir: Path, service: str) -> str | None:
    """Return the id in that file; None where there is none."""
    file = kept_id(run_dir, service)
    return file.read_text().strip() if file.exists() else None


def with_prefix(prefix: str, metrics: Mapping[str, Any], separator: str = "-") -> dict[str, Any]:
    """Return metrics named `prefix-name`, or as they are with an empty prefix."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


class CheckpointUploads:
    """Sends checkpoints, each once: all ("all"), the best and the last at the end (True), or none (False)."""

    def __init__(self, wanted: bool | Literal["all"], send: Callable[[Path, dict[str, Any]], None]) -> None:
        self.wanted, self.send = wanted, send
        self._callbacks: list[Any] = []
        self._sent: set[str] = set()

    def after_save(self, callback: Any) -> None:
        """Remember the callback, and send what it has saved, if all are wanted or it keeps all."""
        if not self.wanted:
            return
        if callback not in self._callbacks:
            self._callbacks.append(callback)
        if self.wanted == "all" or getattr(callback, "save_top_k", 1) == -1:
            self._send(callback)

    def finish(self) -> None:
        """Send what has not been sent."""
        for callback in self._callbacks:
            self._send(callback)

    def _send(self, callback: Any) -> None:
        best = str(callback.best_model_path or "")
        kept = map(str, getattr(callback, "best_k_models", ()))
        for path in dict.fromkeys((*kept, str(callback.last_model_path or ""), best)):
            if not path or path in self._sent or not Path(path).exists():  # a save in the background is not there yet
                continue
            score = callback.best_model_score if path == best else None
            details = {
                "score": None if score is None else float(score),
                "original_filename": Path(path).name,
                "aliases": ["latest", "best"] if path == best else ["latest"],
                **{name: getattr(callback, name, None) for name in ("monitor", "mode", "save_top_k")},
            }
            self.send(Path(path), details)
            self._sent.add(path)
