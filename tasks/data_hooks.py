"""DataHooks: hooks for loaders and batch transfer, shared by tasks and data modules."""

from typing import Any

import torch

from ..base.tensors import map_tensors


class DataHooks:
    """Hooks for loaders and batch transfer. A data module's hooks take precedence over the task's."""

    def prepare_data(self) -> None:
        """Download or convert data. One process per machine calls this before `setup`. Do not set attributes here."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list or dict of loaders."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list or dict of loaders."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list or dict of loaders."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device. By default, the batch is returned unchanged."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to `device`. Override this method for custom batch types.

        With `prefetch_to_device`, a batch that you pass to `super()` is copied while the previous batch is processed.
        """
        # through `vars`: a task's property raises an error without a trainer, and nn.Module searches its modules first
        trainer = vars(self).get("_trainer") or vars(self).get("trainer")
        if trainer is None:
            return map_tensors(batch, lambda tensor: tensor.to(device), lambda movable: movable.to(device))
        return trainer.strategy.to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step. `batch` is already on the device. By default, it is returned unchanged."""
        return batch
