"""DataHooks: where batches come from and how they reach their device; of tasks and data modules alike."""

from typing import Any

import torch


class DataHooks:
    """Loaders and transfers. A data module's come before the task's."""

    def prepare_data(self) -> None:
        """Download or convert, in one process, before any process calls `setup`. Assign nothing to self here."""

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
        """Change a batch before it goes to its device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch of an own type to its device."""
        from ..trainer.data.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on its device."""
        return batch
