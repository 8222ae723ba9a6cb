"""DataHooks: loader and batch transfer hooks, shared by tasks and data modules."""

from typing import Any

import torch

from ..base.tensors import map_tensors


class DataHooks:
    """Loaders and batch transfer; a data module's take precedence over the task's."""

    def prepare_data(self) -> None:
        """Download or convert data, in one process, before any process calls `setup`. Do not assign to self here."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list or dict of them."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list or dict of them."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list or dict of them."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Modify a batch before it is moved to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for custom batch types.

        What is passed on to this method is copied while the device computes the batch before (prefetch_to_device).
        """
        # by `vars`: a task raises where it has no trainer, and a nn.Module looks through its modules first
        trainer = vars(self).get("_trainer") or vars(self).get("trainer")
        if trainer is None:
            return map_tensors(batch, lambda tensor: tensor.to(device), lambda other: other.to(device))
        return trainer.strategy.to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Modify a batch on its device."""
        return batch
