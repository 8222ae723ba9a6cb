"""TensorBoardLogger: event files for TensorBoard, without repeated points after a resume."""

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
"""Metrics of Legato's own callbacks."""
LAST = "~run/"
"""The group of these metrics: TensorBoard sorts groups by name, and this comes after all letters."""
BEST = "~best/"
_FOLDER = (
    "It writes to the run directory: set default_root_dir and run_name of the Trainer (run.root, run.name in a config)."
)
INSTEAD = {
    **dict.fromkeys(("save_dir", "name", "version", "sub_dir"), _FOLDER),
    "prefix": "Put it into the names that you log.",
    "log_graph": "Call self.logger.experiment.add_graph(self, batch) in on_train_start.",
    "default_hp_metric": "Leave it out: HPARAMS shows the metrics that were logged.",
}
"""Arguments of Lightning's, and what to do instead."""


class TensorBoardLogger(Logger):
    """Writes scalars against `global_step`, texts, and hyperparameters with final metrics for the HPARAMS tab.

    Event files go to the run directory, whose name TensorBoard shows. `experiment` is torch's SummaryWriter, for
    pictures, histograms, graphs and the rest. TensorBoard is imported when the logger is opened.

    Args:
        own_metrics_last: show `epoch`, `lr-...`, `throughput/...`, `straggler/...` in a group `~run` below all others.
        writer_options: options of SummaryWriter, such as `flush_secs`.

    Raises ConfigError for Lightning's arguments, and says what to do instead.
    """

    def __init__(self, *, own_metrics_last: bool = True, **writer_options: Any) -> None:
        super().__init__()
        for name in writer_options.keys() & INSTEAD.keys():
            raise ConfigError(f"TensorBoardLogger has no argument {name}. {INSTEAD[name]}")
        self.own_metrics_last, self._writer_options = own_metrics_last, writer_options
        # The directory of the event files, once it was opened
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
        """Torch's SummaryWriter; a no-op object before `open`, and so on ranks other than 0."""
        return NoExperiment() if self._writer is None else self._writer

    def open(self, run_dir: Path, resume_step: int | None) -> None:
        """Start a new event file, which voids the points after `resume_step` in earlier ones."""
        if self._writer is not None:
            self._writer.close()
        super().open(run_dir, resume_step)
        before, self._events = self._events, Path(run_dir)
        # another run; hyperparameters given before the first `open` belong to the first run
        if before not in (None, self._events):
            self._params, self._final, self._points, self._best = {}, {}, {}, {}
        if resume_step is not None:  # points voided by the new file must be written again
            self._points = {name: point for name, point in self._points.items() if point[0] <= resume_step}
        self._events.mkdir(parents=True, exist_ok=True)
        self._session_started = False
        # TensorBoard voids steps >= purge_step. The point of the checkpoint's own step was written before it; what is
        # logged again at that step, such as a validation, is there twice.
        purge = None if resume_step is None else resume_step + 1
        wait_for_next_name(self._events)
        self._writer = self.make_writer(purge)

    def make_writer(self, purge_step: int | None) -> "SummaryWriter":
        """Return the writer of a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._events), purge_step=purge_step, **self._writer_options)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the scalars of one step as one event, at a quarter of the cost of five `add_scalar`; skip repeats."""
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
        """Record `params` for the first event and `metrics` for the end; without metrics all logged ones are shown."""
        self._params.update(flat_params(params))
        self._final.update({name: float(value) for name, value in (metrics or {}).items()})

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, which TensorBoard renders as Markdown."""
        if self._writer is not None:
            self._writer.add_text(tag, text, step)

    def log_best(self, name: str, value: float) -> None:
        """Record a value that the HPARAMS tab shows beside the newest ones, as `~best/name`."""
        self._best[f"{BEST}{name}"] = value

    def save(self) -> None:
        """Flush all events."""
        if self._writer is not None:
            self._require_folder()
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Write hyperparameters with final metrics and close the file; later use of `experiment` opens a new one."""
        if self._writer is None or self._events is None:
            return
        if self._writer.file_writer is None or not os.access(self._events, os.W_OK):
            return
        self._start_session()
        absent = {name: value for name, value in self._final.items() if name not in self._points}
        if absent or self._best:
            # not self.log_metrics: that of a subclass may change names, which these have behind them
            TensorBoardLogger.log_metrics(self, {**absent, **self._best}, self._step)
        if self._params:
            names = self._final or [name for name in self._points if not name.startswith(LAST)]
            # 0.0 stands for any value: HPARAMS takes names from this record, and values from the scalars of these names
            experiment, _, end = _hyperparameter_summaries(self._params, dict.fromkeys([*self._best, *names], 0.0))
            self._add(experiment.value)
            if status == "success":  # the end that torch makes says that it was one
                self._add(end.value)
        self._writer.close()

    def _require_folder(self) -> None:
        """Raise ConfigError if the folder is gone or not writable; TensorBoard would print a traceback on a thread."""
        if self._events is None or os.access(self._events, os.W_OK):
            return
        if self._events.is_dir():
            raise not_writable(self._events, f"no right to write to {self._events}")
        raise run_directory_gone(self._events)

    def _start_session(self) -> None:
        # Written before the first point, so that a killed run shows its hyperparameters too. TensorBoard reads only the
        # first such record of a folder, so it is not written in log_hyperparams, which may be called several times.
        if self._params and not self._session_started:
            self._add(_hyperparameter_summaries(self._params, {})[1].value)
        self._session_started = True

    def _add(self, values: Any, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.file_writer.add_event(Event(step=int(step), summary=Summary(value=values)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the writer when the logger is pickled to another process."""
        return {**super().__getstate__(), "_writer": None}


def wait_for_next_name(folder: Path) -> None:
    """Wait, for less than a second, until the name of a new event file sorts behind those in the folder.

    TensorBoard reads them by name, in which a process and a number follow the second: 10 sorts before 9, and a file
    that is read too late voids points of the one that goes on from it.
    """
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    if newest == int(time.time()):
        time.sleep(max(0.0, newest + 1 - time.time()))


def put_last(name: str) -> str:
    """Return the tag of a metric: one of Legato's own is in the group that is shown last."""
    return f"{LAST}{name.removeprefix('throughput/')}" if OWN_METRICS.match(name) else name


def _hyperparameter_summaries(params: Mapping[str, Any], metrics: Mapping[str, float]) -> Any:
    from torch.utils.tensorboard import summary

    build: Any = summary.hparams
    return build(dict(params), dict(metrics))
