"""DDP in real processes: a run on two processes equals the run in one."""

from pathlib import Path

import pytest
import torch
from ddp_cases import DATA, QUIET, TWO, Net, Spare, close, fit, flat, in_one, loader, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks import Checkpoint, EarlyStopping
from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.slow


# --- the same run -----------------------------------------------------------------------------------------------------


def test_the_caller_has_everything_after_fit(tmp_path):
    def run(folder, **arguments):
        task = Net()
        task.scale = lambda loss: 2 * loss  # is pickled with the task
        task.training_step = lambda batch: task.scale(task.loss(batch))
        callbacks = [Checkpoint(monitor="val/loss", save_top_k=2), EarlyStopping("val/loss")]
        settings = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path / folder}
        trainer = lg.Trainer(**{**settings, "callbacks": callbacks, "logger": True, "max_epochs": 3, **arguments})
        trainer.fit(task, loader(22, shuffle=True), loader(10))
        return trainer, task

    (solo, alone), (two, together) = run("one", replicas=2), run("two", **TWO)
    assert close(flat(alone), flat(together))
    assert two.callback_metrics.keys() == solo.callback_metrics.keys()
    assert float(two.callback_metrics["val/loss"]) == pytest.approx(float(solo.callback_metrics["val/loss"]), abs=1e-6)
    assert (two.global_step, two.current_epoch, two.state.samples_seen) == (9, 3, 66)
    best = Path(two.checkpoint_callback.best_model_path)
    assert best.is_dir()
    assert best.parent == two.run_dir / "checkpoints"
    assert best.name == Path(solo.checkpoint_callback.best_model_path).name
    assert float(two.checkpoint_callback.best_model_score) == pytest.approx(
        float(solo.checkpoint_callback.best_model_score), abs=1e-6
    )
    assert two.early_stopping_callback.best_score == pytest.approx(solo.early_stopping_callback.best_score, abs=1e-6)
    assert not torch.distributed.is_initialized()
    assert two.validate(together, loader(10)) == two.validate(together, loader(10))
    two.fit(together, loader(22), resume="auto")  # the run is already complete
    assert two.global_step == 9


class Halves(Net):
    """Calls backward twice per batch."""

    def backward(self, loss, *arguments, **options):
        (loss / 4).backward(retain_graph=True)
        (loss * 3 / 4).backward()


def test_a_second_backward_of_the_task_counts_on_every_process():
    expected = in_one(Halves(), max_epochs=2)
    assert close(trained(Halves(), max_epochs=2, **TWO), expected)


class Keeps(Halves):
    """Clears gradients only before every second step."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.global_step % 2 == 0:
            optimizer.zero_grad()


def test_gradients_that_a_task_keeps_are_not_reduced_again():
    expected = in_one(Keeps(), max_epochs=2)
    assert close(trained(Keeps(), max_epochs=2, **TWO), expected)


def test_modules_that_the_run_builds_return_to_the_caller():
    class BuildsLater(Net):
        def configure_model(self):
            self.head = nn.Linear(8, 3)

        def setup(self, stage):
            if not hasattr(self, "scale"):
                self.scale = nn.ParameterList([nn.Parameter(torch.ones(1))])

        def loss(self, batch):
            return super().loss(batch) * self.scale[0]

    actual, expected = BuildsLater(), BuildsLater()
    del actual.head, expected.head
    assert close(trained(actual, **TWO), in_one(expected))
    assert isinstance(actual.scale[0], nn.Parameter)


def test_callbacks_of_the_task_keep_their_state():
    class Brings(Net):
        def configure_callbacks(self):
            return EarlyStopping("val/loss", patience=7)

    trainer = fit(Brings(), callbacks=[EarlyStopping("train/loss")], **TWO)
    (stopping,) = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]
    assert stopping.monitor == "val/loss"
    assert stopping.best_score < 10


KNOBS = [
    {"bucket_cap_mb": 0.0001},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]


def test_every_option_of_ddp_trains_the_same_weights():
    """Also if a process has no batch in the last step (17 samples)."""

    def work():
        return [trained(Net(), samples=17, devices=2, strategy={"name": "ddp", **knobs}) for knobs in KNOBS]

    expected = in_one(Net(), samples=17)
    for knobs, weights in zip(KNOBS, run_workers(work, 2), strict=True):
        assert close(weights, expected), knobs


class Compressed(lg.strategies.DDPStrategy):
    """Sends gradients in half precision, with torch's hook."""

    name = "compressed"

    def regroup(self, *arguments):
        super().regroup(*arguments)
        if self.ddp is not None:
            self.ddp.register_comm_hook(self.collectives.group, default_hooks.fp16_compress_hook)


def test_a_subclass_registers_a_communication_hook():
    def work():
        return [
            trained(Net(), samples=17, devices=2, strategy=kind()) for kind in (lg.strategies.DDPStrategy, Compressed)
        ]

    plain, compressed = run_workers(work, 2)
    assert close(compressed, plain, 2e-3)
    assert not torch.equal(compressed, plain)


VARIANTS = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipped norm": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
    "clipped value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "16-mixed clipped": {"precision": "16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "64": {"precision": 64},
    "bf16-true": {"precision": "bf16-true"},
}


class TwoOptimizers(Net):
    def training_step(self, batch, batch_idx):
        image, label = batch
        hidden = self.body(image)
        return [hidden.pow(2).mean(), nn.functional.cross_entropy(self.head(hidden.detach()), label)]

    def configure_optimizers(self):
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.body, self.head)]


def test_precision_accumulation_and_clipping_match_one_process():
    def work():
        results = {name: trained(Net(dropout=0.3, norm=True), **TWO, **options) for name, options in VARIANTS.items()}
        return {**results, "two optimizers": trained(TwoOptimizers(), **TWO, accumulate_grad_batches=2)}

    weights = run_workers(work, 2)
    for name, options in VARIANTS.items():
        actual, expected = weights[name], in_one(Net(dropout=0.3, norm=True), **options)
        assert close(actual, expected, 0.02 if name == "bf16-true" else 1e-5), name
    assert close(weights["two optimizers"], in_one(TwoOptimizers(), accumulate_grad_batches=2))


# --- manual optimization ----------------------------------------------------------------------------------------------


class Gan(lg.Task):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def critic_loss(self, image):
        return self.critic(self.generator(image).detach()).mean() - self.critic(image).pow(2).mean()

    def generator_loss(self, image):
        return -self.critic(self.generator(image)).pow(3).mean()

    def training_step(self, batch, batch_idx):
        image, _ = batch
        for optimizer, loss in zip(self.optimizers(), (self.critic_loss, self.generator_loss), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(image))
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.critic, self.generator)]


def train_gan_by_hand(steps):
    task = Gan()
    optimizers = task.configure_optimizers()
    for start in range(0, 8 * steps, 8):
        halves = DATA.tensors[0][start : start + 4], DATA.tensors[0][start + 4 : start + 8]
        for network, optimizer, loss in zip(
            (task.critic, task.generator), optimizers, (task.critic_loss, task.generator_loss), strict=True
        ):
            gradients = [torch.autograd.grad(loss(half), list(network.parameters())) for half in halves]
            for parameter, *pair in zip(network.parameters(), *gradients, strict=True):
                parameter.grad = sum(pair) / 2
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    return flat(task)


def test_a_gan_takes_the_mean_gradient_of_its_processes(capfd):
    """The last two batches are too few for a step of two processes, so they are left out with a message."""
    task = Gan()
    trainer = lg.Trainer(**{**QUIET, **TWO, "max_epochs": 1})
    trainer.fit(task, loader(19))
    assert trainer.global_step == 2
    assert close(flat(task), train_gan_by_hand(2))
    assert "The last 3 samples of each epoch are left out because there are too few for 2" in capfd.readouterr().err


# --- parameters without gradient, batches left out ------------------------------------------------------------------


class SometimesSpare(Spare):
    def __init__(self, used_in=1):
        super().__init__()
        self.used_in = used_in

    def training_step(self, batch, batch_idx):
        extra = self.spare[0](batch[0][:, :2]).mean() if batch_idx == self.used_in else 0
        return super().training_step(batch, batch_idx) + extra


class Skips(Net):
    def training_step(self, batch, batch_idx):
        label = batch[1]
        return None if int(label[0]) == 1 else super().training_step(batch, batch_idx)


def test_unused_parameters_and_skipped_batches_match_one_process():
    find = {"name": "ddp", "find_unused_parameters": True}

    def work():
        return [
            trained(SometimesSpare(), devices=2, strategy=find),
            trained(Skips(), **TWO, accumulate_grad_batches=2),
            trained(Skips(), devices=2, strategy=find),
        ]

    sometimes, *skips = run_workers(work, 2)
    assert close(sometimes, in_one(SometimesSpare()))
    assert close(skips[0], in_one(Skips(), accumulate_grad_batches=2))
    assert close(skips[1], in_one(Skips()))


def share_memory(gradients):
    return len({gradient.untyped_storage().data_ptr() for gradient in gradients}) < len(gradients)


def test_gradients_as_views_of_buckets_have_the_same_bits():
    """Also with unused parameters, in a step without a batch on a process, and accumulated over batches."""
    find = {"find_unused_parameters": True}
    cases = [
        (Net, {}, {}),
        (SometimesSpare, find, {}),
        (SometimesSpare, find, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ]

    def work():
        results = []
        for kind, knobs, options in cases:
            for views in (False, True):
                task, strategy = kind(), {"name": "ddp", "gradient_as_bucket_view": views, **knobs}
                weights = trained(task, samples=17, devices=2, strategy=strategy, **options)
                results.append(
                    (
                        weights,
                        share_memory([parameter.grad for parameter in task.parameters() if parameter.grad is not None]),
                    )
                )
        return results

    results = run_workers(work, 2)
    for case, (plain, shared), (viewed, shared_views) in zip(cases, results[::2], results[1::2], strict=True):
        assert (shared, shared_views) == (False, True), case
        assert torch.equal(plain, viewed), case


# --- refused ----------------------------------------------------------------------------------------------------------


def test_unsupported_options_are_refused_by_name():
    def refused(**options):
        with pytest.raises(ConfigError) as caught:
            fit(Net(), devices=2, strategy={"name": "ddp", **options})
        return str(caught.value)

    assert "expected a positive number of seconds" in refused(timeout=0)
    assert "Register the hook in a subclass of DDPStrategy" in refused(comm_hook="fp16_compress")
    assert "Legato does not assume that the graph stays the same" in refused(static_graph=True)
