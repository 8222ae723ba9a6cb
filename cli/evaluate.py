"""`legato validate`, `legato test` and `legato predict`: evaluate the weights of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.messages import STDOUT
from .load import build_run, load_or_launch, weights_of


def run_validate(arguments: Sequence[str]) -> None:
    """Evaluate on the validation data."""
    _evaluate(arguments, "validate")


def run_test(arguments: Sequence[str]) -> None:
    """Evaluate on the test data."""
    _evaluate(arguments, "test")


def run_predict(arguments: Sequence[str]) -> None:
    """Write predictions to the run directory."""
    run, found = _evaluate(arguments, "predict")
    # every rank has all predictions, in the loader's order; one writes them
    if run.trainer.is_global_zero and found:
        from .predictions import write_predictions

        folder = run.trainer.run_dir or Path(run.trainer.default_root_dir) / run.trainer.run_name
        print(f"Predictions  {write_predictions(found, folder)}", file=STDOUT, flush=True)


def _evaluate(arguments: Sequence[str], stage: str) -> tuple[Any, Any]:
    run = build_run(load_or_launch(arguments, stage))
    return run, getattr(run.trainer, stage)(run.task, datamodule=run.data, ckpt_path=weights_of(run))
