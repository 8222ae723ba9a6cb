"""The calls made for each batch of an evaluation, and the results of validate, test and predict."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .data.transfer import to_host
from .hooks import Calls, count_arguments, fitted
from .metrics.reduce import by_loader

if TYPE_CHECKING:
    from .request import Request
    from .run import Run


def no_gradients(run: "Run") -> AbstractContextManager[Any]:
    """Return a context manager that disables gradients during an evaluation."""
    # inference mode is faster, but its tensors cannot join an autograd graph, as some strategies require later
    return (
        torch.inference_mode() if run.trainer.inference_mode and run.strategy.allows_inference_mode else torch.no_grad()
    )


def calls_of(run: "Run", stage: str) -> tuple[int, Calls, Calls]:
    """Return how many of (batch, batch_idx, dataloader_idx) the step accepts, and the hooks to call around a batch.

    A hook may omit `dataloader_idx`.
    """
    several = len(run.data.evaluations[stage].loaders) > 1
    start, end = run.hooks[f"on_{stage}_batch_start"], run.hooks[f"on_{stage}_batch_end"]
    arity = count_arguments(run.task, f"{stage}_step", several_loaders=several)
    return arity, tuple(fitted(hook, 3, several) for hook in start), tuple(fitted(hook, 4, several) for hook in end)


def kept(run: "Run", output: Any) -> Any:
    """Return a prediction in host memory, so that predictions for a dataset don't fill the device's memory."""
    return output if run.strategy.device.type == "cpu" else to_host(output)


def results(run: "Run", request: "Request") -> list[Any]:
    """Return the predictions, or each loader's metrics. Print the metrics if `verbose` is true."""
    if request.stage != "predict":
        return _report(run, request.verbose)
    return _predictions(run) if request.keep_outputs else []


def _predictions(run: "Run") -> list[Any]:
    """Return every rank's predictions in loader order; with multiple loaders, one list per loader."""
    outputs, run.loop.outputs = run.loop.outputs, []  # the run outlives the call, and outputs may be large
    ranks = run.strategy.data_ranks.gather_objects(outputs)
    # by loader, batch and replica only: outputs may not be comparable
    every = sorted((item for rank in ranks for item in rank), key=lambda item: item[:3])
    loaders = len(run.data.evaluations["predict"].loaders)
    lists = [[item[3] for item in every if item[0] == index] for index in range(loaders)]
    return lists[0] if loaders == 1 else lists


def _report(run: "Run", verbose: bool) -> list[dict[str, float]]:
    """Return an evaluation's metrics, one dict per loader. If `verbose` is true, print them on rank 0."""
    metrics = run.trainer.callback_metrics
    if verbose and metrics:
        width = max(map(len, metrics))
        rows = (f"{name:<{width}}  {float(value):.6g}" for name, value in sorted(metrics.items()))
        run.trainer.print("\n".join(rows), flush=True)
    owners: dict[str, set[int]] = {}
    # gathered, since a rank that had no batch from a loader does not know the names logged for it
    for rank in run.strategy.data_ranks.gather_objects(run.metrics.loaders_of):
        for name, loaders in rank.items():
            owners.setdefault(name, set()).update(loaders)
    return by_loader(metrics, len(run.data.evaluations[run.loop.doing].loaders), owners)
