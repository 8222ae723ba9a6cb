"""Reinforcement learning: Q-learning for the cart-pole problem, with a growing buffer that all processes share.

    legato fit reinforcement.yaml

Before each epoch, every process plays its share of the carts, `all_gather` shares the results with all processes, and
the epoch is one pass over the buffer. A cart's random numbers depend on its index and not on the process that plays it,
so the run is the same on any number of processes.
"""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class CartPole(lg.Task):
    def __init__(self, carts: int = 8, moves: int = 250, hidden: int = 64, lr: float = 1e-3, discount: float = 0.98):
        super().__init__()
        self.save_hyperparameters()
        layers = nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        self.net = nn.Sequential(*layers)  # the value of each move
        self.target = deepcopy(self.net).requires_grad_(False)  # the network at the start of the epoch
        self.buffer, self.epochs_played = [torch.empty(0, 10)], 0  # state (4), move, next state (4), fell

    def train_dataloader(self):
        """Play, then load the whole buffer. Called before each epoch (reload_dataloaders_every_n_epochs)."""
        if self.epochs_played <= self.current_epoch:  # don't play again after a resume in the middle of an epoch
            self.buffer.append(self.all_gather(self.play()).flatten(0, 1).cpu())
            self.epochs_played += 1
        states, moves, after, fell = torch.cat(self.buffer).split([4, 1, 4, 1], dim=1)
        return DataLoader(TensorDataset(states, moves.squeeze(1).long(), after, fell.squeeze(1)), 64, shuffle=True)

    @torch.no_grad()
    def play(self):
        """Return what this process's carts see in `moves` moves: (local carts x moves, 10)."""
        carts, random = self.hparams.carts, torch.Generator().manual_seed(self.current_epoch)
        noise = torch.rand(self.hparams.moves, carts, 6, generator=random).tensor_split(self.trainer.world_size, dim=1)
        noise = noise[self.global_rank].to(self.device)
        explore = max(0.05, 0.9**self.current_epoch)
        states, seen = 0.1 * noise[0, :, :4] - 0.05, []
        for dice in noise:
            moves = torch.where(dice[:, 4] < explore, (dice[:, 5] > 0.5).long(), self.net(states).argmax(dim=1))
            after, fell = move(states, moves)
            seen.append(torch.cat([states, moves.unsqueeze(1), after, fell.unsqueeze(1)], dim=1))
            states = torch.where(fell.unsqueeze(1), 0.1 * dice[:, :4] - 0.05, after)
        return torch.stack(seen, dim=1).flatten(0, 1)

    def on_train_epoch_start(self):
        self.target.load_state_dict(self.net.state_dict())
        newest = self.buffer[-1]
        self.log("play/moves_until_fall", len(newest) / (newest[:, 9].sum() + 1.0), prog_bar=True)

    def training_step(self, batch, batch_idx):
        states, moves, after, fell = batch
        with torch.no_grad():
            worth = 1.0 + self.hparams.discount * (1.0 - fell) * self.target(after).amax(dim=1)
        loss = F.smooth_l1_loss(self.net(states).gather(1, moves.unsqueeze(1)).squeeze(1), worth)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["buffer"] = torch.cat(self.buffer)

    def on_load_checkpoint(self, checkpoint):
        self.buffer = list(checkpoint["buffer"].split(self.hparams.carts * self.hparams.moves))
        self.epochs_played = len(self.buffer)


def move(states, moves):
    """Return the states (n, 4) after pushing the carts left (0) or right (1), and whether their poles fell (n,)."""
    _, speed, angle, turn = states.unbind(dim=1)
    push = (torch.where(moves == 1, 10.0, -10.0) + 0.05 * turn**2 * angle.sin()) / 1.1
    turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    pushing = push - 0.05 * turning * angle.cos() / 1.1
    after = states + 0.02 * torch.stack([speed, pushing, turn, turning], dim=1)
    return after, (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)
