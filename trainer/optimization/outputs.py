"""Parsing and checking of what training_step returns."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...base.errors import TaskError


def losses_of(output: Any, optimizers: int) -> Sequence[Tensor]:
    """Return the loss of all optimizers, or one for each; empty if the step returned None to skip the batch.

    Raises TaskError for any other output.
    """
    # the usual case first: this is in every step
    if isinstance(output, Tensor):
        return (output,)
    if output is None:
        return ()
    found = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and "loss" not in output:
        raise TaskError(f"The dict that training_step returned has no 'loss'; its keys are {sorted(map(str, output))}.")
    is_list = isinstance(found, (list, tuple))
    losses: Sequence[Any] = found if is_list else (found,)  # type: ignore[assignment]  # a list, as asked
    for loss in losses:
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"training_step must return a scalar loss tensor, a dict with 'loss', or None to leave the batch out; "
                f"it returned {type(loss).__name__}."
            )
    if is_list and len(losses) != optimizers:
        raise TaskError(
            f"training_step returned {len(losses)} losses for {optimizers} optimizers; return one loss, which trains "
            f"what all of them have, or a list with one for each, in the order of configure_optimizers (not under fsdp "
            f"and mesh), or set automatic_optimization = False."
        )
    return losses


def as_outputs(output: Any) -> dict[str, Any]:
    """Return the output of a step as passed to hooks: a dict with a detached "loss", empty for a skipped batch."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if output is None:
        return {}
    # a copy, since hooks may add to it what is not the task's
    values = dict(output) if isinstance(output, Mapping) else {"loss": output}
    loss = values.get("loss")
    if isinstance(loss, Tensor):
        values["loss"] = loss.detach()
    return values


def describe_bad_loss(loss: Tensor) -> str:
    """Explain why backward cannot start from `loss`."""
    # torch names neither training_step nor what to write instead
    if loss.numel() != 1:
        return (
            f"training_step must return a scalar loss; it returned a tensor of shape {tuple(loss.shape)}. "
            f"Reduce it, for instance with loss.mean()."
        )
    return (
        "training_step returned a loss without a graph: it does not depend on any parameter that requires a gradient. "
        "Was it detached, computed under torch.no_grad, or are all parameters frozen?"
    )
