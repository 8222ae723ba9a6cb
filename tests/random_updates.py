"""Tasks that draw random numbers where every rank must draw the same ones, and runs of them."""

import random
import warnings

import numpy as np
import torch
from tiny import Tiny, make_loader, make_trainer
from torch import nn

import legato as lg

REPLICAS = 6


class Langevin(torch.optim.Optimizer):
    """Stochastic gradient Langevin dynamics, whose step size is drawn too."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            scale = 0.01 * (1 + random.random() + np.random.rand())
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
                parameter.add_(torch.randn_like(parameter), alpha=scale)
        return loss


class Noisy(Tiny):
    """Dropout, and a Langevin optimizer."""

    def forward(self, inputs):
        return self.model(nn.functional.dropout(inputs, 0.2, self.training))

    def configure_optimizers(self):
        return Langevin(self.parameters(), self.lr)


class Plain(Noisy):
    """Dropout, and an optimizer that draws nothing."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class NoiseAlone(Noisy):
    """A Langevin optimizer that follows no gradient; torch warns of what DTensor draws on a CPU."""

    def __init__(self):
        super().__init__(lr=0.0)

    def configure_optimizers(self):
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support on cpu")
        return super().configure_optimizers()


class NoisyGradients(Plain):
    """Noise on the gradients, from each of the three libraries."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter) + random.random() * np.random.rand()


class NoisyWeights(Plain):
    """Noise on the weights after each step."""

    noised = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step > self.noised:  # of several replicas in one process the last one
            self.noised = self.global_step
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter += 0.01 * torch.randn_like(parameter)


class NoisySteps(Plain):
    """Noise on the weights in its own optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            self.model[0].weight += 0.01 * torch.randn_like(self.model[0].weight)


class NoisyEvaluation(Plain):
    """A draw that is logged when a validation ends, and one that moves the weights when an epoch does."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) + torch.rand(()))

    def on_validation_epoch_end(self):
        self.log("drawn", torch.rand(()) + random.random() + np.random.rand())

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.model[0].weight += 0.01 * torch.randn_like(self.model[0].weight)


class NoisyManual(Noisy):
    """Two updates in each training_step, by two optimizers, and a draw of each replica between them."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.drawn = []

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))

    def configure_optimizers(self):
        return Langevin(self.parameters(), self.lr), Langevin(self.model[2].parameters(), self.lr)


class Ranks(lg.callbacks.MonitoringCallback):
    """Gathers the weights of all ranks when training ends."""

    def on_train_end(self, trainer, task):
        weights = [parameter.detach() for parameter in task.parameters()]
        full_weights = [getattr(weight, "full_tensor", lambda weight=weight: weight)().clone() for weight in weights]
        self.weights = trainer.strategy.collectives.gather_objects(full_weights)
        self.logged = trainer.strategy.collectives.gather_objects(dict(trainer.callback_metrics))
        self.drawn = trainer.strategy.collectives.gather_objects(getattr(task, "drawn", None))


def train(task, folder, checkpoint=None, callbacks=(), samples=54, **options):
    """Train for two epochs in batches of 2; return what `Ranks` has gathered."""
    ranks = Ranks()
    made = make_trainer(folder, callbacks=[ranks, *callbacks], **{"max_epochs": 2, "replicas": REPLICAS, **options})
    validation = make_loader(20, 2) if isinstance(task, NoisyEvaluation) else None
    # every process has a batch in each step, or on_train_batch_end would not be called on all of them
    samples = 48 if isinstance(task, NoisyWeights) else samples
    made.fit(task, make_loader(samples, 2), validation, ckpt_path=checkpoint)
    return ranks


def largest_difference(first, second):
    """The largest difference between two lists of tensors."""
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(first, second, strict=True))
