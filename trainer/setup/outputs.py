"""Outputs of a run that is starting: the records in its run directory, its loggers and its progress."""

import logging
import math
from typing import Any

from ...base.environment import slurm_job
from ...base.location import Location, to_location
from ..accelerators import memory_of, name_of
from ..run import Call, Run
from ..runs import places
from ..runs import record as run_record
from ..runs.run_file import config_of, identity_of

log = logging.getLogger("legato")


def record_start(call: Call, source: Location | None = None, evaluated: tuple[int, int] | None = None) -> None:
    """On rank 0, record this launch in the run directory: command line, layout, versions and code.

    Args:
        source: the checkpoint the call resumes from or evaluates.
        evaluated: step and epoch of the checkpoint being evaluated.
    """
    trainer, strategy, directory = call.trainer, call.strategy, call.trainer.run_dir
    if directory is None or not trainer.is_global_zero or not identity_of(directory):
        return
    device = strategy.device
    facts = {
        "stage": call.stage,
        "step": call.state.global_step if evaluated is None else evaluated[0],
        "checkpoint": None if source is None else str(source),
        "checkpoint_folders": [str(each.dirpath) for each in trainer.checkpoint_callbacks if each.is_elsewhere],
        **trainer.command,
        "strategy": strategy.name,
        "replicas": call.state.replicas,
        "processes": strategy.place.world_size,
        "nodes": strategy.place.nodes,
        "launcher": strategy.place.origin,
        "slurm_job": slurm_job(),
        "device": name_of(device),
        "device_memory": memory_of(device),
        "precision": str(trainer.precision),
        "reproducible": trainer.reproducible,
    }
    run_record.add_start(directory, facts, trainer.save_code, trainer.config_text if call.stage == "fit" else None)


def note_epoch(run: Run) -> None:
    """On rank 0, record in the run directory the step after which an epoch starts."""
    trainer, state = run.trainer, run.state
    if trainer.is_global_zero and trainer.run_dir is not None:
        run_record.note_epoch(trainer.run_dir, state.epoch, state.global_step - state.epoch_steps)


def open_outputs(run: Run) -> None:
    """Record the start and open the loggers in a process that becomes rank 0 during the run."""
    record_start(run)
    open_loggers(run, run.state.global_step)


def open_loggers(run: Run, resume_step: int | None) -> None:
    """Open the loggers and store the config on rank 0. On other ranks, pass the run directory to the loggers.

    Args:
        resume_step: the step the run resumes from; existing logging points after that step are invalid. None if
            the run does not resume.
    """
    trainer, step = run.trainer, run.state.global_step
    if trainer.run_dir is None:
        return
    if not trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.follow(trainer.run_dir)
        return
    # a resumed run stores its config with the first checkpoint that includes steps of this launch: see `Saver.save`
    config = {} if run.resumes_same_run else config_of(trainer.config_text, trainer.explicit_config)
    if trainer.config_text is not None and not run.resumes_same_run:
        weights = to_location(run.source) if run.stage != "fit" and run.source is not None else None
        places.write_config(trainer.run_dir, trainer.config_text, trainer.explicit_config, weights)
    run.run_file.begin(trainer.run_dir, run.stage, {**progress(run), **config})
    owners = [owner for owner in (run.datamodule, run.task) if owner is not None]
    # the data module's first, so that the task's values take precedence
    logged = [values for owner in owners if (values := owner.logged_hyperparameters()) is not None]
    if run.stage == "fit" and identity_of(trainer.run_dir):
        logged.insert(0, run_settings(run))
    for logger in trainer.loggers:
        logger.open(trainer.run_dir, resume_step)
        log.debug("%s writes to %s", type(logger).__name__, logger.log_dir or trainer.run_dir)
        if trainer.config_text is not None:
            logger.log_text("config", f"```yaml\n{trainer.config_text}```", step)
        if logged:
            logger.log_hyperparams({name: value for values in logged for name, value in values.items()})
        logger.log_graph(run.task)


def run_settings(run: Run) -> dict[str, Any]:
    """Return the settings that loggers show among the hyperparameters of every run."""
    trainer, place = run.trainer, run.strategy.place
    # with a single process, the trainer's devices are those of the process
    devices = place.world_size if place.world_size > 1 else trainer.num_devices
    settings = {
        "batch_size": getattr(run.data.loaders.get("train"), "batch_size", None),
        "seed": run.state.seed,
        "precision": str(trainer.precision),
        "devices": f"{devices} {run.strategy.device.type}",
        "strategy": run.strategy.name,
    }
    return {name: value for name, value in settings.items() if value is not None}


def progress(call: Call) -> dict[str, Any]:
    """Return a run's progress for its `run.json`; for an evaluation, the step and epoch of its checkpoint."""
    trainer, state, callback = call.trainer, call.state, call.trainer.checkpoint_callback
    epoch = state.epoch + (state.epoch_steps > 0)  # counted from 1, as the progress bar does
    if call.stage != "fit":
        return dict(zip(("step", "epoch"), call.evaluated_point or (state.global_step, epoch), strict=True))
    values: dict[str, Any] = {"step": state.global_step, "epoch": epoch, "elapsed": state.elapsed}
    values |= {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
    if getattr(callback, "monitor", None) is not None:
        score = getattr(callback, "best_model_score", None)
        values |= {
            "monitor": callback.monitor,
            "mode": getattr(callback, "mode", "min"),
        }
        # JSON has no NaN
        if score is not None and math.isfinite(score):
            values["best"] = float(score)
    return values
