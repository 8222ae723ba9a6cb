"""Manual optimization with two optimizers: a GAN that generates handwritten digits.

    python examples/gan.py [EPOCHS]

With `automatic_optimization = False`, `training_step` itself runs the backward passes and steps the optimizers.
Generated digits are logged to TensorBoard every ten epochs, and a few are printed at the end.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import legato as lg
from legato.tasks import DigitsData


class DigitsGAN(lg.Task):
    automatic_optimization = False

    def __init__(self, noise: int = 32, hidden: int = 256, lr: float = 5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(noise, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(hidden, hidden), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, noise):
        """Return images (n, 1, 8, 8) for noise (n, noise)."""
        return self.generator(noise)

    def training_step(self, batch, batch_idx):
        images, _ = batch
        generator_optimizer, critic_optimizer = self.optimizers()
        drawn = self(torch.randn(len(images), self.hparams.noise, device=self.device))

        self.toggle_optimizer(critic_optimizer)
        real, fake = self.critic(images), self.critic(drawn.detach())
        critic_loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()
        self.untoggle_optimizer(critic_optimizer)

        self.toggle_optimizer(generator_optimizer)
        generator_loss = F.softplus(-self.critic(drawn)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.log_dict({"train/critic_loss": critic_loss, "train/generator_loss": generator_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        if self.current_epoch % 10 == 9:
            sheet = self.draw(64).reshape(8, 8, 8, 8).permute(0, 2, 1, 3).reshape(1, 64, 64)
            self.logger.experiment.add_image("drawn", (sheet + 1) / 2, self.global_step)

    @torch.no_grad()
    def draw(self, count):
        """Return images (count, 1, 8, 8) generated from the same noise every time."""
        noise = torch.randn(count, self.hparams.noise, generator=torch.Generator().manual_seed(0))
        self.eval()
        images = self(noise.to(self.device))
        self.train()
        return images

    def configure_optimizers(self):
        generator = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        critic = torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [generator, critic]


task = DigitsGAN()
epochs = int(sys.argv[1]) if sys.argv[1:] else 60
trainer = lg.Trainer(max_epochs=epochs, devices=1, run_name="gan", enable_progress_bar=False)
trainer.fit(task, datamodule=DigitsData(batch_size=64, shift=0))

print(f"losses: {', '.join(f'{name} {value:.2f}' for name, value in trainer.logged_metrics.items())}")
shades = torch.tensor([ord(shade) for shade in " .:-=+*#@"])
for row in torch.cat(list(task.draw(8)[:, 0]), dim=1):  # eight digits side by side
    print("".join(chr(shades[int((pixel + 1) * 4.49)]) * 2 for pixel in row))
