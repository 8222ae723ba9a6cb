"""`legato fit`, `validate`, `test`, `predict` and `config`: run a config on this machine or through its launcher."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.arguments import read_strategy
from ..base.errors import ConfigError
from ..base.location import Address, local_folder, location_of, to_absolute, to_location
from ..base.messages import STDOUT, is_quiet, shown_options
from ..base.place import find_place
from ..base.quantities import time_taken
from ..trainer.processes.launch import warm_up_for
from ..trainer.processes.requeue import requeue_early
from ..trainer.processes.signals import exit_at_once, handling_end_signals
from ..trainer.runs.remote import upload
from .config.build import build_config
from .config.check import TRAINER, class_path, load_config, options_of
from .config.classes import load
from .config.resumed import load_to_fit

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
    from .config.build import ConfiguredRun
    from .config.check import Config


def run_config(options: Namespace) -> None:
    """Print the resolved config with the origin of each value."""
    print(load_to_fit(options.words).text(origins=True), end="")


def run_fit(options: Namespace) -> None:
    """Train a config's task, then print the result."""
    section = trainer_section({})

    def begin(values: Mapping[str, Any]) -> None:
        section.update(trainer_section(values))
        warm_up_if_several(values)

    def end(number: int) -> None:
        requeue_early(number, section["requeue"])
        exit_at_once(number)

    with handling_end_signals(end):  # needed until fit installs its handlers, since imports may take minutes
        config = load_to_fit(options.words, begin)
    launch_if_named(config, "fit")
    with handling_end_signals(end):
        run = build_run(config)
        resume: Any = run.to_resume()
        run.trainer.fit(run.task, datamodule=run.data, resume=resume)
        if run.trainer.is_global_zero:
            print((last_line if is_quiet() else summary)(run.trainer), file=STDOUT, flush=True)


def run_validate(options: Namespace) -> None:
    """Evaluate on the validation data."""
    _evaluate(options.words, "validate")


def run_test(options: Namespace) -> None:
    """Evaluate on the test data."""
    _evaluate(options.words, "test")


def run_predict(options: Namespace) -> None:
    """Write predictions to the run directory."""
    run, predictions = _evaluate(options.words, "predict")
    # every rank has all predictions in the loader's order, so rank 0 writes them
    if run.trainer.is_global_zero and predictions:
        from .predictions import write_predictions

        folder = run.trainer.run_dir or Path(run.trainer.default_root_dir) / run.trainer.run_name
        file = write_predictions(predictions, folder)
        upload(folder)
        print(f"Predictions  {location_of(file)}", file=STDOUT, flush=True)


def _evaluate(words: Sequence[str], stage: str) -> tuple[Any, Any]:
    config = load_config(words, warm_up_if_several)
    launch_if_named(config, stage)
    run = build_run(config)
    return run, getattr(run.trainer, stage)(run.task, datamodule=run.data, ckpt_path=weights_of(run))


# --- from a config to a run -------------------------------------------------------------------------------------------
def launch_if_named(config: "Config", command: str) -> None:
    """If the config has a launcher, run the command with it and exit."""
    if config.values.get("launcher") is None:
        return
    name, options = options_of(config.values["launcher"])
    launcher = load(class_path("launcher", name))(**options)
    # with resume=auto the job applies the overrides to the stored config of the run
    launcher.flags = (*shown_options(), *(config.override_words() if command == "fit" else ()))
    if config.directory is not None:
        _resolve_own_run(config, command)
    sys.exit(launcher.launch(command, config))


def trainer_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `trainer` section of a config with defaults filled in. Its keys must have been checked."""
    # the config check fills in defaults only later, with the values
    defaults = {name: parameter.default for name, parameter in TRAINER.parameters.items()}
    return defaults | dict(values.get("trainer") or {})


def warm_up_if_several(values: Mapping[str, Any]) -> None:
    """If the run has workers, start their fork server, so that it imports torch at the same time as this process."""
    trainer = trainer_section(values)
    devices = trainer["devices"]
    several = devices > 1 if isinstance(devices, int) else isinstance(devices, list) and len(devices) > 1
    # only if the config shows it without torch; almost all strategies with multiple devices have workers
    if several and values.get("launcher") is None and find_place(trainer["cluster"]) is None:
        warm_up_for(read_strategy(trainer)[0], trainer)


def build_run(config: "Config") -> "ConfiguredRun":
    """Build a config's objects. With --quiet, leave out callbacks that only show progress."""
    from ..callbacks.model_summary import ModelSummary
    from ..callbacks.progress_bar import ProgressDisplay

    run = build_config(config)
    if is_quiet():
        shown = (ModelSummary, ProgressDisplay)
        # by class, which includes the user's subclasses
        run.trainer.callbacks = [callback for callback in run.trainer.callbacks if not isinstance(callback, shown)]
    return run


def weights_of(run: "ConfiguredRun") -> Any:
    """Return the checkpoint to evaluate, by default the run's best one, or None to use untrained weights."""
    if run.checkpoint == "none":
        return None
    return run.stored(run.checkpoint or "") if run.checkpoint in (None, "best", "last") else run.checkpoint


def _resolve_own_run(config: "Config", command: str) -> None:
    """Resolve a stored config's references to its run directory. A launcher receives only the config's values.

    Raises ConfigError if `resume=auto` would resume a different run.
    """
    from ..trainer.runs.places import newest_to_resume

    values, run = config.values, build_config(config)
    if command == "fit" and values["resume"] == "auto":
        newest = newest_to_resume(to_location(run.trainer.default_root_dir), run.trainer.run_name)
        if newest is not None and not newest.samefile(config.directory or ""):
            raise ConfigError(
                f"resume=auto with a launcher resumes the newest run of {run.trainer.run_name!r}, {newest}, but this "
                f"config belongs to {config.directory}. Set resume=PATH, or remove the launcher."
            )
    elif command != "fit" and values["checkpoint"] in (None, "best", "last"):
        folders = [to_location(c.dirpath) for c in run.trainer.checkpoint_callbacks if c.dirpath is not None]
        values["checkpoint"] = str(to_absolute(weights_of(run).weights(folders)))


# --- the result -------------------------------------------------------------------------------------------------------
def last_line(trainer: "Trainer") -> str:
    """Return the result as one line: run directory, step count, time and best value."""
    saved, where = trainer.checkpoint_callback, "" if trainer.run_dir is None else f"{location_of(trainer.run_dir)}  "
    text = f"{where}step {trainer.global_step} in {time_taken(trainer.elapsed)}"
    score = getattr(saved, "best_model_score", None)
    return text if score is None else f"{text}, best {getattr(saved, 'monitor', '')} {float(score):.6g}"


def summary(trainer: "Trainer") -> str:
    """Return the final metrics, the run directory, the best checkpoint and the command to view the run."""
    metrics = {name: f"{float(value):.6g}" for name, value in sorted(trainer.callback_metrics.items())}
    rows = [("Metric", "Final value"), *metrics.items()] if metrics else []
    saved = trainer.checkpoint_callback
    best = getattr(saved, "best_model_path", "")
    if trainer.run_dir is not None:
        rows += [("Run directory", str(location_of(trainer.run_dir)))]
    if best:
        rows += [("Checkpoint" if getattr(saved, "monitor", None) is None else "Best checkpoint", str(best))]
    if trainer.run_dir is not None:
        place = to_location(trainer.default_root_dir)
        folder = local_folder(place) if isinstance(place, Address) else place
        rows += [("View it with", f"tensorboard --logdir {shlex.quote(str(folder))}")]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
