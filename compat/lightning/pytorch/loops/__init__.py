"""Legato's version of `lightning.pytorch.loops`."""

# fmt: off

from legato.compat.lightning.loops import (
    EvaluationLoop as _EvaluationLoop, FitLoop as _FitLoop, PredictionLoop as _PredictionLoop,
    TrainingEpochLoop as _TrainingEpochLoop,
)
from legato.compat.lightning.loops import check_finite_loss
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

(
    RestartStage, ClosureResult, Closure, OutputResult, AbstractClosure, ManualResult
) = placeholders(
    __name__, "RestartStage ClosureResult Closure OutputResult AbstractClosure ManualResult",
    "Legato's loop is legato/trainer/trainer.py. Read progress from trainer.fit_loop. Change a run with hooks.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    evaluation_loop fetchers fit_loop loop optimization optimization.automatic optimization.closure
    optimization.manual prediction_loop progress training_epoch_loop utilities
""")
