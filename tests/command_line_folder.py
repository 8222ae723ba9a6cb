"""What is in a user's folder in tests of the command line: a task with its data, and a config."""

TASK = '''
import torch
from torch.utils.data import DataLoader, TensorDataset
import legato as lg


class Line(lg.Task):
    """A line through points, with its own data."""

    def __init__(self, lr: float = 0.1, fault: str = "none"):
        super().__init__()
        self.layer, self.lr, self.fault = torch.nn.Linear(1, 1), lr, fault

    def training_step(self, batch, batch_idx):
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault == "graph":
            return torch.tensor(1.0)
        if self.fault == "bug":
            raise ZeroDivisionError("a bug of the user")
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(x), y))

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        x = torch.linspace(-1, 1, 12).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x), batch_size=4)

    val_dataloader = predict_dataloader = train_dataloader
'''
CONFIG = """\
task:
  _target_: line.Line
trainer:
  max_epochs: 2
  strategy: single
  accelerator: cpu
  devices: 1
  log_every_n_steps: 1
  enable_progress_bar: false
"""
