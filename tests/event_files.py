"""What TensorBoard shows of a folder of event files."""

import os
from typing import Any


def accumulate(folder: str | os.PathLike[str]) -> Any:
    """Return all that TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()


def points(folder: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values by tag; those that a resume has written again, equal to the bit, stand there once."""
    accumulator = accumulate(folder)
    shown = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }
    return {tag: list({repr(point): point for point in line}.values()) for tag, line in shown.items()}
