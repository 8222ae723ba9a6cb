"""Profilers with Lightning's names. They profile a run's actions or its torch operators.

`Trainer(profiler=)` adds the callback `Profiling`. During a run, the callback wraps the functions that the loop calls.
Runs without a profiler are not affected.
"""

import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function, tensorboard_trace_handler

from ...base.errors import ConfigError, did_you_mean
from ...callbacks.callback import Callback

if TYPE_CHECKING:
    from ... import Trainer
    from ...tasks.task import Task

log = logging.getLogger("legato")

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Profiler(ABC):
    """Base class for profilers. `start` is called before each action and `stop` after it; `summary` returns the report.

    Args:
        dirpath: Folder for the profiler's files. None: the run directory.
        filename: Prefix for file names. None: log the report instead of writing a file.
    """

    # class attributes, for a program's profilers that do not call this constructor
    dirpath: str | Path | None = None
    filename: str | None = None
    stage: str | None = None
    """The profiled stage: "fit", "validate", "test" or "predict"."""
    rank: int | None = None
    """The local rank of this process; None for a single process."""

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = dirpath, filename

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Start recording an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """Stop recording an action."""

    def summary(self) -> str:
        """Return the report."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Record an action within this context."""
        try:
            self.start(action_name)
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called when a run starts."""
        self.stage, self.rank, self.dirpath = stage, local_rank, self.dirpath or log_dir

    def teardown(self, stage: str | None) -> None:  # noqa: B027 (a hook, not an abstract method)
        """Called at the end of a run, after `describe`."""

    def describe(self) -> None:
        """Write the report to the file, or log it on local rank 0."""
        report = self.summary()
        if report and self.filename and self.dirpath:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
            with Path(self.dirpath, self.file_name()).open("a") as file:
                file.write(report)
        elif report and not self.rank:
            log.info("%s", report)

    @property
    def local_rank(self) -> int:
        """The local rank of this process."""
        return self.rank or 0

    def file_name(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """Return a file name composed of the stage, `filename`, the local rank and the action, if they are set."""
        parts = (self.stage, self.filename, None if self.rank is None else str(self.rank), action_name)
        name = re.sub(r'[\\/:*?"<>|\n\r\t_]+', "_", "-".join(word for word in parts if word)).strip()
        return (name or "profile") + extension

    def title(self) -> str:
        """Return the first line of the report."""
        return f"{self.stage.upper()} Profiler Report" if self.stage else "Profiler Report"


class PassThroughProfiler(Profiler):
    """Measures nothing."""

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


class SimpleProfiler(Profiler):
    """Measures the duration of each action.

    The report lists each action's mean and total duration in seconds, number of calls, and percentage of the
    profiler's lifetime. `extended=False` omits the number of calls and the percentage. Raises ValueError if an action
    is started while it is already running, or stopped while it is not running.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        """Start the clock of an action."""
        if action_name in self.current_actions:
            raise ValueError(f"Attempted to start {action_name} which has already started.")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Stop the clock of an action."""
        now = time.perf_counter()
        if action_name not in self.current_actions:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        self.recorded_durations[action_name].append(now - self.current_actions.pop(action_name))

    def summary(self) -> str:
        """Return a table of actions, sorted by total time."""
        elapsed = time.perf_counter() - self.start_time
        durations = sorted(((math.fsum(times), len(times), name) for name, times in self.recorded_durations.items()))
        rows = [("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")]
        if self.extended:
            rows.append(("Total", "-", str(sum(count for _, count, _ in durations)), f"{elapsed:.5}", "100 %"))
        for total, count, action in reversed(durations):
            rows.append((action, f"{total / count:.5}", str(count), f"{total:.5}", f"{100 * total / elapsed:.5}"))
        columns = [
            column for number, column in enumerate(zip(*rows, strict=True)) if self.extended or number not in (2, 4)
        ]
        padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
        lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title(), rule, lines[0], rule, *lines[1:], rule, ""])


class PyTorchProfiler(Profiler):
    """Records torch operators and writes `*.pt.trace.json` traces for TensorBoard and Perfetto.

    Args:
        group_by_input_shapes: Show a row for each combination of input shapes. Requires `record_shapes=True`.
        emit_nvtx: Mark operators for Nsight instead of recording them. The program must run under `nsys profile`.
        export_to_chrome: Write the trace.
        row_limit: Maximum number of rows in the table. -1: all.
        sort_by_key: Column to sort by. None: the total time on the GPU or, without a GPU, on the CPU.
        record_module_names: Show the name of each module in the trace.
        table_kwargs: Additional arguments for the table.
        profiler_kwargs: Arguments for `torch.profiler.profile`. By default, steps 3 to 5 of each stage are recorded,
            after one wait step and one warmup step. If a stage has fewer than 5 steps, every step is recorded. To
            select other steps, pass `schedule`.

    Raises ConfigError for an unknown `sort_by_key` or a `schedule` that is not callable, and KeyError for unknown
    `table_kwargs`.
    """

    SORT_KEYS = (
        *("cpu_time", "cuda_time", "cpu_time_total", "cuda_time_total", "cpu_memory_usage", "cuda_memory_usage"),
        *("self_cpu_memory_usage", "self_cuda_memory_usage", "count"),
    )
    TABLE_ARGUMENTS = (
        *("max_src_column_width", "max_name_column_width", "max_shapes_column_width"),
        *("header", "top_level_events_only", "time_unit"),
    )

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self._group, self._nvtx, self._export = group_by_input_shapes, emit_nvtx, export_to_chrome
        self._row_limit, self._names, self._table = row_limit, record_module_names, dict(table_kwargs or {})
        self._sort = sort_by_key or ("cuda_time_total" if torch.cuda.is_available() else "cpu_time_total")
        self._options = profiler_kwargs
        if self._sort not in self.SORT_KEYS:
            hint = did_you_mean(self._sort, self.SORT_KEYS)
            raise ConfigError(f"sort_by_key={self._sort!r}: expected one of {', '.join(self.SORT_KEYS)}.{hint}")
        for name in self._table.keys() - set(self.TABLE_ARGUMENTS):
            raise KeyError(f"Found invalid table_kwargs key: {name}.")
        if not callable(profiler_kwargs.get("schedule") or callable):
            raise ConfigError(f"`schedule` must be a function of the step, got {profiler_kwargs['schedule']!r}.")
        self.module: torch.nn.Module | None = None
        """The module whose submodules are named in the trace."""
        self.steps: float = math.inf
        """Expected number of steps."""
        self.profiler: Any = None
        self._actions: dict[str, record_function] = {}
        self._marks: RegisterRecordFunction | None = None

    def start(self, action_name: str) -> None:
        """Mark the start of an action. The first action also starts the recording."""
        if self.profiler is None:
            self.profiler = self._make()
            self.profiler.__enter__()
            # marks add overhead to each module call, so add them only when recording begins
            if self._names and self.module is not None:
                self._marks = RegisterRecordFunction(self.module)
                self._marks.__enter__()
        if action_name not in self._actions:
            self._actions[action_name] = record_function(f"[profile]{action_name}")
            self._actions[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """Mark the end of an action. After a step, also advance the schedule."""
        mark = self._actions.pop(action_name, None)
        if mark is not None:
            mark.__exit__(None, None, None)
        if self.profiler is not None and not self._nvtx and action_name.endswith(STEPS):
            self.profiler.step()

    def _make(self) -> Any:
        if self._nvtx:
            return torch.autograd.profiler.emit_nvtx()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        schedule = None if self.steps < 5 else torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        # without acc_events, torch discards a cycle of the schedule when the next one begins, and the table would show
        # only the last cycle
        options = {"activities": activities, "schedule": schedule, "acc_events": True, **self._options}
        if "on_trace_ready" not in options and self._export and self.dirpath:
            options["on_trace_ready"] = tensorboard_trace_handler(str(self.dirpath), self.file_name(extension=""))
        return torch.profiler.profile(**options)

    def summary(self) -> str:
        """Stop recording and return the table of operators."""
        profiler = self._end()
        events = None if profiler is None or self._nvtx else profiler.key_averages(group_by_input_shape=self._group)
        if not events:
            return ""
        table = events.table(sort_by=self._sort, row_limit=self._row_limit, **self._table)
        return f"{self.title()}\nProfile stats for: records\n{table}\n"

    def _end(self) -> Any:
        finished, self.profiler = self.profiler, None
        for context in (*self._actions.values(), self._marks, finished):
            if context is not None:
                context.__exit__(None, None, None)
        self._actions, self._marks = {}, None
        return finished

    def teardown(self, stage: str | None) -> None:
        """Stop recording if it is still running."""
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without values that cannot be pickled."""
        return {**self.__dict__, "module": None, "profiler": None, "_actions": {}, "_marks": None}


class RegisterRecordFunction:
    """A context manager that labels each call to a submodule in a torch trace with the submodule's name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._running: dict[str, record_function] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                label = f"{type(module).__module__}.{type(module).__name__}: {name}"
                self._handles.append(module.register_forward_pre_hook(partial(self._start, label)))
                # always_call: if a module raises, its mark would stay open, and all later marks would appear within it
                self._handles.append(module.register_forward_hook(partial(self._stop, label), always_call=True))

    def _start(self, label: str, *_: Any) -> None:
        self._running[label] = record_function(label)
        self._running[label].__enter__()

    def _stop(self, label: str, *_: Any) -> None:
        mark = self._running.pop(label, None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


PROFILERS: dict[str, type[Profiler]] = {"simple": SimpleProfiler, "pytorch": PyTorchProfiler}
"""Profilers by name."""


def make_profiler(wanted: str | Profiler | None) -> Profiler:
    """Return the profiler of that name. A Profiler object is returned unchanged; None becomes a PassThroughProfiler.

    Raises ConfigError for an unknown name.
    """
    if not isinstance(wanted, str):
        return wanted or PassThroughProfiler()
    if wanted not in PROFILERS:
        raise ConfigError(f"profiler={wanted!r}: expected {', '.join(PROFILERS)}.{did_you_mean(wanted, PROFILERS)}")
    return PROFILERS[wanted]()


class Profiling(Callback):
    """Measures data loading, steps, backward passes, optimizer steps and all hooks with a profiler.

    At the end of each stage, the profiler writes a report.
    """

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler
        self._undo = ExitStack()

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Notify the profiler of the stage."""
        rank = trainer.local_rank if trainer.world_size > 1 else None
        self.profiler.setup(stage, rank, trainer.log_dir)

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start measuring."""
        self._begin(trainer, task, trainer.num_training_batches)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start measuring unless validation is part of fit, which is already being measured."""
        if trainer.stage == "validate":
            self._begin(trainer, task, sum(trainer.num_val_batches))

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start measuring."""
        self._begin(trainer, task, sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start measuring."""
        self._begin(trainer, task, sum(trainer.num_predict_batches))

    def _begin(self, trainer: "Trainer", task: "Task", steps: float) -> None:
        if isinstance(self.profiler, PyTorchProfiler):
            self.profiler.module, self.profiler.steps = task, steps
        run, strategy = trainer.current_run, trainer.strategy
        kind = type(strategy).__name__
        for name in ("training_step", "backward", "optimizer_step", "align_buffers"):
            self._replace(strategy, name, self._timed(f"{kind}.{name}", getattr(strategy, name)))
        # wrapped separately, because the name of its action depends on its argument
        evaluation_step = strategy.evaluation_step

        def timed_evaluation_step(step: str, arguments: Any) -> Any:
            with self.profiler.profile(f"{kind}.{step}"):
                return evaluation_step(step, arguments)

        self._replace(strategy, "evaluation_step", timed_evaluation_step)
        if run.data.training is not None:
            training = run.data.training
            self._replace(training, "epoch", self._timed_items("train_dataloader_next", training.epoch))
        for word, data in run.data.evaluations.items():
            self._replace(data, "batches", self._timed_items(f"{word}_dataloader_next", data.batches))
        self._undo.callback(run.hooks.update, dict(run.hooks))
        for name, calls in run.hooks.items():
            run.hooks[name] = tuple(self._timed(f"{owner_of(call)}.{name}", call) for call in calls)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        # set on the object, where it shadows the class's method until it is deleted
        setattr(owner, name, value)
        self._undo.callback(delattr, owner, name)

    def _timed(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.profiler.profile(action):
                return function(*arguments, **options)

        return timed

    def _timed_items(self, action: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def items(*arguments: Any, **options: Any) -> Iterator[Any]:
            source, end = iter(function(*arguments, **options)), object()
            while True:
                with self.profiler.profile(action):
                    item = next(source, end)
                if item is end:
                    return
                yield item

        return items

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Stop measuring and write the report."""
        self._undo.close()
        try:
            self.profiler.describe()
        finally:
            self.profiler.teardown(stage)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the undo stack, which cannot be sent to another process."""
        return {**self.__dict__, "_undo": ExitStack()}


def add_profiler(wanted: str | Profiler | None, callbacks: list[Callback]) -> Profiler:
    """Return the profiler from `make_profiler`. If a profiler was requested, add a callback that runs it."""
    profiler = make_profiler(wanted)
    if wanted is not None:
        callbacks.append(Profiling(profiler))
    return profiler


def owner_of(call: Any) -> str:
    """Return the name of the class that a hook call belongs to."""
    function = call.func if isinstance(call, partial) else call
    return type(getattr(function, "__self__", function)).__name__
