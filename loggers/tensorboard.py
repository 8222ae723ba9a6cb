"""TensorBoardLogger: writes event files for TensorBoard, without duplicate points after a resume."""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..base.run_names import not_writable, run_directory_gone
from .hyperparameters import flat_params
from .logger import Logger, NoExperiment

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("legato")


OWN_METRICS = re.compile(r"epoch$|lr-|throughput/|straggler/")
"""Names of metrics that Legato's callbacks log."""
LAST = "~run/"
"""Group for metrics that Legato's callbacks log. TensorBoard sorts groups by name, and "~" sorts after all letters."""
BEST = "~best/"
_FOLDER = "It writes to the run directory: set default_root_dir and run_name, or run.root and run.name in a config."
INSTEAD = {
    **dict.fromkeys(("save_dir", "name", "version", "sub_dir"), _FOLDER),
    "prefix": "Add the prefix to the names you log.",
    "log_graph": "Call self.logger.experiment.add_graph(self, batch) in on_train_start.",
    "default_hp_metric": "Remove it: the HPARAMS tab shows the logged metrics.",
}
"""Alternatives to arguments of Lightning's TensorBoardLogger."""


class TensorBoardLogger(Logger):
    """Writes event files with scalars, text and, for the HPARAMS tab, hyperparameters and final metrics.

    Event files are written to the run directory, and the x-axis is `global_step`. To log images, histograms and graphs,
    use `experiment`, which is torch's SummaryWriter.

    Args:
        own_metrics_last: Show `epoch`, `lr-...`, `throughput/...` and `straggler/...` in a `~run` group below all
            other groups.
        writer_options: Options for SummaryWriter, such as `flush_secs`.

    Raises ConfigError for arguments of Lightning's TensorBoardLogger. The message suggests an alternative.
    """

    def __init__(self, *, own_metrics_last: bool = True, **writer_options: Any) -> None:
        super().__init__()
        for name in writer_options.keys() & INSTEAD.keys():
            raise ConfigError(f"TensorBoardLogger has no argument `{name}`. {INSTEAD[name]}")
        self.own_metrics_last, self._writer_options = own_metrics_last, writer_options
        # directory of the event files; None before `open`
        self._events: Path | None = None
        self._writer: Any = None
        self._params: dict[str, Any] = {}
        self._final: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._points: dict[str, tuple[int, float]] = {}
        self._step = 0
        self._session_started = False

    @property
    def experiment(self) -> "SummaryWriter | NoExperiment":
        """torch's SummaryWriter, or a no-op object before `open` and on ranks other than 0."""
        return NoExperiment() if self._writer is None else self._writer

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start a new event file, which invalidates points after `resume_step` in earlier files."""
        if self._writer is not None:
            self._writer.close()
        super().open(run_dir, resume_step)
        before, self._events = self._events, Path(run_dir)
        # reset for another run; hyperparameters recorded before the first `open` belong to the first run
        if before not in (None, self._events):
            self._params, self._final, self._points, self._best = {}, {}, {}, {}
        if resume_step is not None:  # invalidated points must be written again
            self._points = {name: point for name, point in self._points.items() if point[0] <= resume_step}
        self._events.mkdir(parents=True, exist_ok=True)
        self._session_started = False
        # TensorBoard drops steps >= purge_step. The point at the checkpoint's step was written before the checkpoint,
        # so values logged again at that step, such as those of a validation run, appear twice.
        purge = None if resume_step is None else resume_step + 1
        wait_for_next_name(self._events)
        self._writer = self.make_writer(purge)

    def make_writer(self, purge_step: int | None) -> "SummaryWriter":
        """Return a SummaryWriter with a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._events), purge_step=purge_step, **self._writer_options)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a step's scalars as a single event, in a quarter of the time that five `add_scalar` calls take."""
        if self._writer is None:
            return
        self._require_folder()
        if not self._session_started:
            self._start_session()
        tag_of = put_last if self.own_metrics_last else str
        points = {tag_of(name): (step, float(value)) for name, value in metrics.items()}
        values = [
            {"tag": name, "simple_value": point[1]} for name, point in points.items() if self._points.get(name) != point
        ]
        self._step = step
        self._points.update(points)
        if values:
            self._add(values, step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Record hyperparameters, which are written before the first point, and final metrics (all by default)."""
        self._params.update(flat_params(params))
        self._final.update({name: float(value) for name, value in (metrics or {}).items()})

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a Markdown text."""
        if self._writer is not None:
            self._writer.add_text(tag, text, step)

    def log_best(self, name: str, value: float) -> None:
        """Record the best value of a metric, which the HPARAMS tab shows as `~best/name`."""
        self._best[f"{BEST}{name}"] = value

    def save(self) -> None:
        """Flush all events."""
        if self._writer is not None:
            self._require_folder()
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Write hyperparameters and final metrics, then close the file. Using `experiment` later opens a new file."""
        if self._writer is None or self._events is None:
            return
        if self._writer.file_writer is None or not os.access(self._events, os.W_OK):
            return
        self._start_session()
        absent = {name: value for name, value in self._final.items() if name not in self._points}
        if absent or self._best:
            # not self.log_metrics, since a subclass's override would rename the metrics a second time
            TensorBoardLogger.log_metrics(self, {**absent, **self._best}, self._step)
        if self._params:
            names = self._final or [name for name in self._points if not name.startswith(LAST)]
            # 0.0 is a placeholder: HPARAMS reads names from the record and values from the scalars
            experiment, _, end = _hyperparameter_summaries(self._params, dict.fromkeys([*self._best, *names], 0.0))
            self._add(experiment.value)
            if status == "success":  # torch's session end always has the status success
                self._add(end.value)
        self._writer.close()

    def _require_folder(self) -> None:
        """Raise ConfigError if the folder is missing or not writable, before TensorBoard can print a traceback."""
        if self._events is None or os.access(self._events, os.W_OK):
            return
        if self._events.is_dir():
            raise not_writable(self._events, f"no permission to write to {self._events}")
        raise run_directory_gone(self._events)

    def _start_session(self) -> None:
        # Before the first point, so that a killed run shows its hyperparameters too. Not in log_hyperparams, which may
        # be called several times: TensorBoard reads only the first such record in a folder.
        if self._params and not self._session_started:
            self._add(_hyperparameter_summaries(self._params, {})[1].value)
        self._session_started = True

    def _add(self, values: Any, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.file_writer.add_event(Event(step=int(step), summary=Summary(value=values)))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the logger without its writer."""
        return {**super().__getstate__(), "_writer": None}


def wait_for_next_name(folder: Path) -> None:
    """Wait up to a second so that the new event file's name will sort after those in the folder.

    TensorBoard reads files in order of their names, which consist of the time in seconds, the process id and a
    counter. Within the same second, 10 sorts before 9, so TensorBoard would read the older file last and invalidate the
    newer points.
    """
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    if newest == int(time.time()):
        time.sleep(max(0.0, newest + 1 - time.time()))


def put_last(name: str) -> str:
    """Return the tag for a metric. Tags of metrics from Legato's callbacks sort into the last group."""
    return f"{LAST}{name.removeprefix('throughput/')}" if OWN_METRICS.match(name) else name


def _hyperparameter_summaries(params: Mapping[str, Any], metrics: Mapping[str, float]) -> Any:
    from torch.utils.tensorboard import summary

    build: Any = summary.hparams
    return build(dict(params), dict(metrics))
