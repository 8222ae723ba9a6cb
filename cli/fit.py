"""`legato fit`: train, then print where the results are."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..base.messages import STDOUT, is_quiet
from ..base.quantities import time_taken
from ..trainer.processes.requeue import requeue_early
from ..trainer.processes.signals import exit_at_once, handling_end_signals
from .load import build_run, load_or_launch

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


def run_fit(arguments: Sequence[str]) -> None:
    """Train the task of a config."""
    config = load_or_launch(arguments, "fit")

    def end(number: int) -> None:
        requeue_early(number, config.values["trainer"]["requeue"])
        exit_at_once(number)

    with handling_end_signals(end):  # until fit installs its own handlers
        found = build_run(config)
        resume: Any = found.to_resume()
        found.trainer.fit(found.task, datamodule=found.data, resume=resume)
        if found.trainer.is_global_zero:
            print((last_line if is_quiet() else summary)(found.trainer), file=STDOUT, flush=True)


def last_line(trainer: "Trainer") -> str:
    """Return the result in one line: run directory, steps and time, best value."""
    saved, where = trainer.checkpoint_callback, "" if trainer.run_dir is None else f"{trainer.run_dir}  "
    text = f"{where}step {trainer.global_step} in {time_taken(trainer.elapsed)}"
    score = getattr(saved, "best_model_score", None)
    return text if score is None else f"{text}, best {getattr(saved, 'monitor', '')} {float(score):.6g}"


def summary(trainer: "Trainer") -> str:
    """Return the final metrics, the run directory, the best checkpoint, and how to view them."""
    metrics = {name: f"{float(value):.6g}" for name, value in sorted(trainer.callback_metrics.items())}
    rows = [("Metric", "Final value"), *metrics.items()] if metrics else []
    saved = trainer.checkpoint_callback
    best = getattr(saved, "best_model_path", "")
    if trainer.run_dir is not None:
        rows += [("Run directory", str(trainer.run_dir))]
    if best:
        rows += [("Checkpoint" if getattr(saved, "monitor", None) is None else "Best checkpoint", str(best))]
    if trainer.run_dir is not None:
        rows += [("Look at it", f"tensorboard --logdir {shlex.quote(str(trainer.default_root_dir))}")]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
