"""Precision: dtype of the weights, autocast and gradient scaling.

The design follows PyTorch's automatic mixed precision (https://docs.pytorch.org/docs/stable/amp.html, with examples at
https://docs.pytorch.org/docs/stable/notes/amp_examples.html):

    32-true, 64-true       everything in that dtype
    bf16-true, 16-true     weights, inputs and arithmetic in half precision, no scaling
    bf16-mixed             weights in float32, autocast to bfloat16 for matrix products
    16-mixed               like bf16-mixed, but with float16, whose narrow range needs loss scaling
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.tensors import map_tensors
from ...base.torch_private import mark_stepped
from ..accelerators import autocasts, has_bfloat16, widest_float

_SHORT_NAMES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_WEIGHTS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_CAST = {torch.float64: nn.Module.double, torch.bfloat16: nn.Module.bfloat16, torch.float16: nn.Module.half}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Whether autocast may cache the weights that it casts. Before torch 2.12 it also caches casts without a gradient, so
# that after a forward pass under no_grad, a later one in the same step does not train these weights.
_KEEPS_CASTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


class Precision:
    """Dtypes, autocast and gradient scaler for a run on one device type.

    Raises ConfigError for a precision that the device does not support.
    """

    def __init__(self, name: str | int, device_type: str) -> None:
        self.name = _SHORT_NAMES.get(str(name), str(name))
        self.device_type = device_type
        _require_support(self.name, device_type)
        # Dtype of parameters, buffers and input; None keeps their dtypes
        self.weights_dtype: torch.dtype | None = _WEIGHTS.get(self.name)
        self.autocast_dtype: torch.dtype | None = _AUTOCAST.get(self.name)
        # float16 has 5 exponent bits: gradients below 6e-8 would become zero. bfloat16 has float32's range.
        self.scaler: torch.amp.GradScaler | None = (
            torch.amp.GradScaler(device_type) if self.name == "16-mixed" else None
        )
        self._used = self._is_ready = False
        # Returns the context manager for a forward pass: no-op, autocast (per thread), or a default dtype for new
        # tensors (per process)
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self.autocast_dtype is not None:
            dtype, kept = self.autocast_dtype, _KEEPS_CASTS
            self.forward_context = partial(torch.autocast, device_type, dtype=dtype, cache_enabled=kept)
        elif self.weights_dtype is not None:
            self.forward_context = partial(_default_dtype, self.weights_dtype)

    def cast_anew(self) -> None:
        """Make autocast cast the weights each time, because an update within training_step makes cached casts stale."""
        if self.autocast_dtype is not None:
            self.forward_context = partial(_cast_anew, self.forward_context)

    def place(self, module: nn.Module) -> None:
        """Convert floating-point parameters and buffers of `module` in place, for a true precision other than 32-true.

        The parameters remain the same objects, so existing optimizers remain valid.
        """
        if self.weights_dtype is not None:
            # Module.double() and similar methods convert only floating-point tensors, not indices in buffers
            _CAST[self.weights_dtype](module)

    def convert_batch(self, batch: Any) -> Any:
        """Return `batch` with floating-point tensors in the weights' dtype, unless precision is 32-true or mixed."""
        dtype = self.weights_dtype
        return batch if dtype is None else map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss for the backward pass. The scale is constant within a step."""
        if self.scaler is None:
            return loss
        self._is_ready = True
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale before clipping, at most once per step.

        Raises RuntimeError if called twice in the same step.
        """
        if self.scaler is not None and self._has_gradient(optimizer):
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        """Step the optimizer. With gradient scaling, skip the step if a gradient is infinite or NaN."""
        if self.scaler is None:
            optimizer.step(**options)
        elif self._has_gradient(optimizer):
            self.scaler.step(optimizer, **options)
        # otherwise, if the first step overflows, a learning rate scheduler warns that it ran before the optimizer
        mark_stepped(optimizer)

    def update(self) -> None:
        """Choose the next scale after all optimizers have stepped."""
        if self.scaler is not None and self._used:
            self.scaler.update()
            self._used = False

    def _has_gradient(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether there is a gradient to unscale. The scaler raises an error if there is none."""
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        gradient = next((gradient for gradient in gradients if gradient is not None), None)
        self._used |= gradient is not None
        if gradient is not None and not self._is_ready:
            self.scale(gradient.new_zeros(()))  # the scaler initializes at its first loss, which this rank did not have
        return gradient is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state as plain numbers, or an empty dict if there is no scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler's state.

        An empty state leaves the scaler unchanged. If there is no scaler, the state is ignored, so a run can resume
        with a different precision.
        """
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))


@contextmanager
def _cast_anew(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with context():
        kept = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(kept)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _require_support(name: str, device_type: str) -> None:
    if name == "64-true" and widest_float(torch.device(device_type)) is not torch.float64:
        raise ConfigError(
            f"trainer.precision 64-true: {device_type} devices do not support float64. Use 32-true or accelerator=cpu."
        )
    if name.startswith("bf16") and not has_bfloat16(device_type):
        raise ConfigError(
            f"trainer.precision {name}: this {device_type} device does not support bfloat16. Use "
            f"{name.replace('bf16', '16')} or 32-true."
        )
    if name in _AUTOCAST and not autocasts(device_type, _AUTOCAST[name]):
        raise ConfigError(
            f"trainer.precision {name}: torch doesn't support {_AUTOCAST[name]} autocast on {device_type}. Use 32-true."
        )
