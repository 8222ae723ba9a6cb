"""Parses and checks training_step's output."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...base.errors import TaskError, correction


def losses_of(output: Any, optimizers: int) -> Sequence[Tensor]:
    """Return one loss for all optimizers, one per optimizer, or none if the step returned None to skip the batch.

    Raises TaskError for any other output.
    """
    # the most common case first, as this runs in every step
    if isinstance(output, Tensor):
        return (output,)
    if output is None:
        return ()
    result = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and "loss" not in output:
        example = correction('return {"losses": loss}', 'return {"loss": loss}')
        keys = sorted(map(str, output))
        raise TaskError(f"training_step returned a dict without 'loss'; its keys are {keys}.{example}")
    is_list = isinstance(result, (list, tuple))
    losses: Sequence[Any] = result if is_list else (result,)  # type: ignore[assignment]  # checked by isinstance
    for loss in losses:
        if not isinstance(loss, Tensor):
            example = correction("return loss.item()", "return loss") if isinstance(loss, float) else ""
            raise TaskError(
                f"training_step must return a scalar loss tensor, a dict with 'loss', or None to skip the batch; it "
                f"returned {type(loss).__name__}.{example}"
            )
    if is_list and len(losses) != optimizers:
        raise TaskError(
            f"training_step returned {len(losses)} losses for {optimizers} optimizers. Return one loss, which trains "
            f"the parameters of all optimizers, or a list with one loss per optimizer, in the order of "
            f"configure_optimizers (not supported with fsdp or mesh), or set automatic_optimization = False."
        )
    return losses


def as_outputs(output: Any) -> dict[str, Any]:
    """Return a step's output for hooks: a dict with a detached "loss", or an empty dict if the batch was skipped."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if output is None:
        return {}
    # a copy, since hooks may add keys to it
    values = dict(output) if isinstance(output, Mapping) else {"loss": output}
    loss = values.get("loss")
    if isinstance(loss, Tensor):
        values["loss"] = loss.detach()
    return values


def describe_bad_loss(loss: Tensor) -> str:
    """Explain why the backward pass cannot start from `loss`."""
    # torch's error mentions neither training_step nor a remedy
    if loss.numel() != 1:
        return (
            f"training_step must return a scalar loss; it returned a tensor of shape {tuple(loss.shape)}. "
            f"Reduce it.{correction('return losses', 'return losses.mean()')}"
        )
    return (
        "training_step returned a loss without a graph: it does not depend on any parameter that requires a gradient. "
        "Check that it is not detached or computed under torch.no_grad, and that not all parameters are frozen."
        + correction("return loss.detach()", "return loss")
    )
