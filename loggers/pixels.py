"""Pictures as loggers take them, arrays of bytes of shape (height, width, channels); and the values of histograms."""

from typing import TYPE_CHECKING, Any

from ..base.errors import TaskError

if TYPE_CHECKING:
    import numpy

CHANNELS = (1, 3, 4)


def to_pixels(image: Any) -> "numpy.ndarray[Any, Any]":
    """Return a picture as bytes of shape (H, W, C).

    image: a tensor or array of shape (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels; bytes, or floats from 0.0
    to 1.0, of which what is outside is cut off.

    Raises TaskError for another shape.
    """
    import numpy

    pixels = as_array(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif pixels.ndim == 3 and pixels.shape[2] not in CHANNELS and pixels.shape[0] in CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in CHANNELS:
        raise TaskError(
            f"log_image takes one picture of shape (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels; got "
            f"{tuple(getattr(image, 'shape', ()))}. torchvision.utils.make_grid puts several into one."
        )
    if pixels.dtype.kind == "f":
        pixels = (numpy.nan_to_num(pixels).clip(0.0, 1.0) * 255).round()
    elif pixels.dtype.kind == "b":
        pixels = pixels * 255
    return pixels.astype(numpy.uint8)


def as_array(values: Any) -> "numpy.ndarray[Any, Any]":
    """Return a tensor, of any device and dtype, or a sequence as an array of numpy's."""
    import numpy
    from torch import Tensor

    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return numpy.asarray(values.float() if values.is_floating_point() else values)
    return numpy.asarray(values)


def finite_values(values: Any) -> "numpy.ndarray[Any, Any]":
    """Return the numbers of a tensor or sequence that a histogram can hold: NaN and infinities have no place in it."""
    import numpy

    found = as_array(values)
    return numpy.extract(numpy.isfinite(found), found)
