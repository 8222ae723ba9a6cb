"""ScriptHistory: a run started by a script, which Legato reruns up to the fit call to recreate the task and data."""

import json
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from ..base.arguments import ARGUMENT_NAMES
from ..base.environment import all_variables, replace_variables, set_default
from ..base.errors import ConfigError, add_note, did_you_mean
from ..base.place import Place, variables_of
from ..trainer.request import Request
from ..trainer.runs.record import command_of_process, hash_of
from ..trainer.trainer import Trainer
from .history import StudiedRun
from .replay_steps import Make, on_processes
from .sample_lookup import load_loader

BY_HAND = "call legato.lab.replay(run, step, make=make), where make() returns a new (trainer, task, loader)"
log = logging.getLogger("legato")
_imported: set[str] = set()
"""Modules of scripts that were rerun in this process."""


class ScriptHistory(StudiedRun):
    """A run started by a script. Each step uses the command that computed it, because resuming may change the command.

    Args:
        overrides: Trainer arguments that replace the script's, such as "trainer.devices=2".
    """

    def __init__(self, directory: Path, overrides: Sequence[str] = ()) -> None:
        super().__init__(directory.absolute())  # the script changes the working directory
        self.settings = dict(map(read_setting, overrides))

    def make(self, first: int, last: int, processes: int = 1) -> Make:
        """Return a function that creates the trainer, task and data for a replay. Raises ConfigError for a notebook."""
        runnable(self.start_of(first)[1])
        return partial(self._make, first, processes)

    def make_unstarted(self, step: int) -> "UnstartedScript":
        """Return the unstarted run that the script created for a step."""
        return UnstartedScript(self._make(step), self.start_of(step)[1])

    def _make(self, step: int, processes: int = 1) -> list[Any]:
        return run_to_fit(self.start_of(step)[1], self.settings, processes)


class UnstartedScript:
    """Task and training data of a script, outside any process group."""

    def __init__(self, made: Sequence[Any], start: Mapping[str, Any]) -> None:
        trainer, self.task, train, _, data, _ = made
        request = Request.of("fit", self.task, data)
        request.take_loaders(train=train)
        self.seed, self.loader = trainer.seed, request.loaders.get("train")
        nodes, processes = int(start["nodes"]), int(start["processes"])
        # loaders may read the run's replicas and ranks
        trainer.strategy.place = Place(world_size=processes, local_world_size=processes // nodes, nodes=nodes)
        self.owners = [owner for owner in (request.datamodule, self.task) if owner is not None]
        for owner in self.owners:
            owner.trainer = trainer

    def load_loader(self, epoch: int = 0) -> Any:
        """Return the training loader for an epoch. Raises ConfigError if there is none."""
        return load_loader(self.owners, epoch) if self.loader is None else self.loader


class _Reached(BaseException):
    """Stops a script at the call to fit. An `except Exception` in the script does not catch it."""


def run_to_fit(start: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> list[Any]:
    """Rerun a script up to the call to fit that started the run, and return the trainer and fit's arguments.

    Args:
        settings: Trainer arguments that replace the script's.

    Raises ConfigError if there is no script, or if the script does not reach that call.
    """
    script, module = runnable(start)
    folder = start["working_directory"] if module else str(Path(script).parent)
    if hash_of(script) != start["script_hash"]:
        log.warning("%s has changed since the run.", script)
    if start["launcher"] not in ("alone", "legato"):  # the script may read its rank and create a process group
        for name, value in {**variables_of(Place()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            set_default(name, value)
    for name in _imported:  # load the current files, not modules of another script
        sys.modules.pop(name, None)
    before = set(sys.modules)
    os.chdir(start["working_directory"])
    sys.argv = list(start["arguments"])
    sys.path.insert(0, folder)
    with stopping_at_fit(start, settings, processes) as made:
        try:
            with redirect_stdout(sys.stderr):  # stdout is for the output of the command
                if module:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script, run_name="__main__")
        except (Exception, SystemExit, _Reached) as error:
            if not made and not isinstance(error, SystemExit):
                add_note(error, f"Legato reran {script} to rebuild the run's task and data, and skipped earlier fits.")
                raise
        finally:
            files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
            local = {name for name, file in files.items() if file.startswith(folder) and "site-packages" not in file}
            _imported.update(name for name in local if name.partition(".")[0] != __package__.partition(".")[0])
    if not made:
        raise ConfigError(
            f"{script} ended before fit call {start['fit']} on Trainer {start['trainer']}, which started the run. "
            f"Change the script so that it makes this call with the run's arguments, or {BY_HAND}."
        )
    # pickle looks up classes of the script there
    sys.modules["__main__"] = made.pop()
    return made


@contextmanager
def stopping_at_fit(start: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> Iterator[list[Any]]:
    """Stop the script at the recorded call to fit, and yield a list that receives fit's arguments and `__main__`.

    Trainers in the script receive `processes` and `settings`. Earlier fits and evaluations are skipped.
    """
    made, asked, begun = list[Any](), (start["trainer"], start["fit"]), int(command_of_process()["trainer"])
    kind: Any = Trainer
    post_init, fit, evaluate_alone = kind.__post_init__, kind.fit, kind.evaluate_alone

    def begin(trainer: Any) -> None:
        vars(trainer).update({} if trainer.sync_batchnorm else on_processes(processes, vars(trainer)))
        vars(trainer).update(settings)
        post_init(trainer)

    def stop(
        trainer: Any, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None,
        datamodule: Any = None, ckpt_path: Any = None, resume: Any = None,
    ) -> Any:  # fmt: skip
        trainer.command["fit"] += 1
        if (trainer.command["trainer"] - begun, trainer.command["fit"]) != asked:
            return pass_over()
        source = None if "auto" in (resume, ckpt_path) else resume or ckpt_path
        made[:] = trainer, model, train_dataloaders, val_dataloaders, datamodule, source, sys.modules["__main__"]
        raise _Reached

    def pass_over(*_: Any, **__: Any) -> list[Any]:
        log.warning(
            "Skipped the script's earlier fits and evaluations. This does not affect steps replayed from a checkpoint."
        )
        return []

    kind.__post_init__, kind.fit, kind.evaluate_alone = begin, stop, pass_over
    try:
        yield made
    finally:
        kind.__post_init__, kind.fit, kind.evaluate_alone = post_init, fit, evaluate_alone


@contextmanager
def restoring_process() -> Iterator[None]:
    """On exit, restore the process state that a script may change, such as the working directory of a notebook."""
    folder, arguments, path, main, variables = (
        os.getcwd(),
        sys.argv,
        [*sys.path],
        sys.modules["__main__"],
        all_variables(),
    )
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv, sys.path[:], sys.modules["__main__"] = arguments, path, main
        replace_variables(variables)


def runnable(start: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the script and module of a launch. Raises ConfigError for a notebook, or if the script does not exist."""
    script, module = start.get("script"), start.get("module")
    if not start:
        raise ConfigError("The run's environment.json does not record how training started.")
    if not script:
        raise ConfigError(f"The run was started in a notebook or shell, which Legato cannot rerun. Instead, {BY_HAND}.")
    if "lightning" in start["arguments"][1:2] or "lightning" in start["command"][2:4]:
        raise ConfigError(f"The run was started with `legato lightning`, which cannot be rerun. Instead, {BY_HAND}.")
    for path in (script, start["working_directory"]):
        if not Path(path).exists():
            raise ConfigError(
                f"The run was started by {script} in {start['working_directory']}, but {path} does not exist."
            )
    return script, module


def read_setting(word: str) -> tuple[str, Any]:
    """Return the name and value of an override. Raises ConfigError if it is not a Trainer argument."""
    key, _, text = word.partition("=")
    if not key.startswith("trainer.") or key.count(".") > 1:
        raise ConfigError(
            f"{word}: a script started this run and creates its task, data and callbacks, so you can override "
            f"only Trainer arguments, with trainer.NAME=VALUE."
        )
    if (name := key.removeprefix("trainer.")) not in ARGUMENT_NAMES:
        raise ConfigError(f"{word}: the Trainer has no argument {name!r}.{did_you_mean(name, ARGUMENT_NAMES)}")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
