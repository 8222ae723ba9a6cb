"""DDP in real processes: a run on two of them is the run in one."""

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
        task.scale = lambda loss: 2 * loss  # travels
        task.training_step = lambda batch: task.scale(task.loss(batch))
        callbacks = [Checkpoint(monitor="val/loss", save_top_k=2), EarlyStopping("val/loss")]
        settings = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path / folder}
        trainer = lg.Trainer(**{**settings, "callbacks": callbacks, "logger": True, "max_epochs": 3, **arguments})
        trainer.fit(task, loader(22, shuffle=True), loader(10))
        return trainer, task

    (one, alone), (two, together) = run("one", replicas=2), run("two", **TWO)
    assert close(flat(alone), flat(together))
    assert two.callback_metrics.keys() == one.callback_metrics.keys()
    assert float(two.callback_metrics["val/loss"]) == pytest.approx(float(one.callback_metrics["val/loss"]), abs=1e-6)
    assert (two.global_step, two.current_epoch, two.state.samples_seen) == (9, 3, 66)
    best = Path(two.checkpoint_callback.best_model_path)
    assert best.is_dir()
    assert best.parent == two.run_dir / "checkpoints"
    assert best.name == Path(one.checkpoint_callback.best_model_path).name
    assert float(two.checkpoint_callback.best_model_score) == pytest.approx(
        float(one.checkpoint_callback.best_model_score), abs=1e-6
    )
    assert two.early_stopping_callback.best_score == pytest.approx(one.early_stopping_callback.best_score, abs=1e-6)
    assert not torch.distributed.is_initialized()
    assert two.validate(together, loader(10)) == two.validate(together, loader(10))
    two.fit(together, loader(22), resume="auto")  # nothing is left to do
    assert two.global_step == 9


class Halves(Net):
    """Calls backward twice for each batch."""

    def backward(self, loss, *arguments, **options):
        (loss / 4).backward(retain_graph=True)
        (loss * 3 / 4).backward()


def test_a_second_backward_of_the_tasks_own_counts_on_every_process():
    expected = in_one(Halves(), max_epochs=2)
    assert close(trained(Halves(), max_epochs=2, **TWO), expected)


class Keeps(Halves):
    """Clears gradients before every second step only."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.global_step % 2 == 0:
            optimizer.zero_grad()


def test_gradients_that_a_task_keeps_are_not_added_up_again():
    expected = in_one(Keeps(), max_epochs=2)
    assert close(trained(Keeps(), max_epochs=2, **TWO), expected)


def test_what_the_run_built_comes_back():
    class BuildsLater(Net):
        def configure_model(self):
            self.head = nn.Linear(8, 3)

        def setup(self, stage):
            if not hasattr(self, "scale"):
                self.scale = nn.ParameterList([nn.Parameter(torch.ones(1))])

        def loss(self, batch):
            return super().loss(batch) * self.scale[0]

    ours, theirs = BuildsLater(), BuildsLater()
    del ours.head, theirs.head
    assert close(trained(ours, **TWO), in_one(theirs))
    assert isinstance(ours.scale[0], nn.Parameter)


def test_callbacks_that_the_task_brings_keep_their_state():
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


def test_every_knob_of_ddp_trains_the_same_weights():
    """Also where a process has no batch in the last step (17 samples)."""

    def work():
        return [trained(Net(), samples=17, devices=2, strategy={"name": "ddp", **knobs}) for knobs in KNOBS]

    expected = in_one(Net(), samples=17)
    for knobs, weights in zip(KNOBS, run_workers(work, 2), strict=True):
        assert close(weights, expected), knobs


class Compressed(lg.strategies.DDPStrategy):
    """Sends gradients in half precision, by torch's own hook."""

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
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


def test_precision_accumulation_and_clipping_are_those_of_one_process():
    def work():
        found = {name: trained(Net(dropout=0.3, norm=True), **TWO, **options) for name, options in VARIANTS.items()}
        return {**found, "two optimizers": trained(TwoOptimizers(), **TWO, accumulate_grad_batches=2)}

    weights = run_workers(work, 2)
    for name, options in VARIANTS.items():
        ours, expected = weights[name], in_one(Net(dropout=0.3, norm=True), **options)
        assert close(ours, expected, 0.02 if name == "bf16-true" else 1e-5), name
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
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.critic, self.generator)]


def train_gan_by_hand(steps):
    task = Gan()
    optimizers = task.configure_optimizers()
    for start in range(0, 8 * steps, 8):
        halves = DATA.tensors[0][start : start + 4], DATA.tensors[0][start + 4 : start + 8]
        for part, optimizer, loss in zip(
            (task.critic, task.generator), optimizers, (task.critic_loss, task.generator_loss), strict=True
        ):
            gradients = [torch.autograd.grad(loss(half), list(part.parameters())) for half in halves]
            for parameter, *both in zip(part.parameters(), *gradients, strict=True):
                parameter.grad = sum(both) / 2
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            optimizer.step()
    return flat(task)


def test_a_gan_takes_the_mean_gradient_of_its_processes(capfd):
    """The last two batches are one too few for two processes and a step of both: left out, and said so."""
    task = Gan()
    trainer = lg.Trainer(**{**QUIET, **TWO, "max_epochs": 1})
    trainer.fit(task, loader(19))
    assert trainer.global_step == 2
    assert close(flat(task), train_gan_by_hand(2))
    assert "the last 3 samples of an epoch, too few for 2 replicas, are left out" in capfd.readouterr().err


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


def test_unused_parameters_and_left_out_batches_are_as_in_one_process():
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
    return len({one.untyped_storage().data_ptr() for one in gradients}) < len(gradients)


def test_gradients_as_views_of_buckets_have_the_same_bits():
    """Also with none for some parameters, in a step without a batch on a process, and added up over batches."""
    find = {"find_unused_parameters": True}
    cases = [
        (Net, {}, {}),
        (SometimesSpare, find, {}),
        (SometimesSpare, find, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ]

    def work():
        found = []
        for kind, knobs, options in cases:
            for views in (False, True):
                task, strategy = kind(), {"name": "ddp", "gradient_as_bucket_view": views, **knobs}
                weights = trained(task, samples=17, devices=2, strategy=strategy, **options)
                found.append((weights, share_memory([one.grad for one in task.parameters() if one.grad is not None])))
        return found

    found = run_workers(work, 2)
    for case, (plain, shared), (viewed, shared_views) in zip(cases, found[::2], found[1::2], strict=True):
        assert (shared, shared_views) == (False, True), case
        assert torch.equal(plain, viewed), case


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_by_name():
    def refused(**options):
        with pytest.raises(ConfigError) as caught:
            fit(Net(), devices=2, strategy={"name": "ddp", **options})
        return str(caught.value)

    assert "expected a positive number of seconds" in refused(timeout=0)
    assert "A subclass of DDPStrategy registers its hook" in refused(comm_hook="fp16_compress")
    assert "the graph of each step is taken as it comes" in refused(static_graph=True)
