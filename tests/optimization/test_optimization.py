"""Optimizers, learning rate schedulers and manual optimization match the same lines in a plain loop."""

import pytest
import torch
from tiny import Tiny, Two, Validated, assert_close, assert_same_bits, make_loader, train_by_hand, weights
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import legato as lg
from legato.base.errors import ConfigError, TaskError


# --- what configure_optimizers may return -----------------------------------------------------------------------------
def scheduler_of(optimizer):
    return StepLR(optimizer, step_size=1, gamma=0.5)


ONE_OPTIMIZER = {
    "an optimizer": lambda optimizer: optimizer,
    "a list": lambda optimizer: [optimizer],
    "a tuple": lambda optimizer: (optimizer,),
    "a dict": lambda optimizer: {"optimizer": optimizer},
    "a list of dicts": lambda optimizer: [{"optimizer": optimizer}],
    "a tuple of dicts": lambda optimizer: ({"optimizer": optimizer},),
    "two lists": lambda optimizer: ([optimizer], []),
    "a list of two lists": lambda optimizer: [[optimizer], []],
}
WITH_SCHEDULER = {
    "two lists": lambda optimizer: ([optimizer], [scheduler_of(optimizer)]),
    "a list and a scheduler": lambda optimizer: ([optimizer], scheduler_of(optimizer)),
    "two lists with a dict": lambda optimizer: ([optimizer], [{"scheduler": scheduler_of(optimizer)}]),
    "a list and a dict": lambda optimizer: ([optimizer], {"scheduler": scheduler_of(optimizer)}),
    "a dict": lambda optimizer: {"optimizer": optimizer, "lr_scheduler": scheduler_of(optimizer)},
    "a dict in a dict": lambda optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler_of(optimizer), "interval": "epoch", "name": "lr"},
    },
    "a list of dicts": lambda optimizer: [{"optimizer": optimizer, "lr_scheduler": scheduler_of(optimizer)}],
}


class Returns(Tiny):
    """Returns what `form` makes of its optimizer."""

    def __init__(self, form):
        super().__init__()
        self.form, self.rates = form, []

    def configure_optimizers(self):
        return self.form(SGD(self.parameters(), lr=0.1))

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("form", ONE_OPTIMIZER.values(), ids=ONE_OPTIMIZER)
def test_one_optimizer(trainer, form):
    task = Returns(form)
    trainer(max_epochs=2).fit(task, make_loader())
    assert_same_bits(task, train_by_hand(Tiny(), make_loader(), epochs=2))


@pytest.mark.parametrize("form", WITH_SCHEDULER.values(), ids=WITH_SCHEDULER)
def test_one_optimizer_and_a_scheduler(trainer, form):
    task = Returns(form)
    trainer(max_epochs=3).fit(task, make_loader(8))
    assert task.rates == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]


def test_no_optimizer_trains_nothing(trainer):
    task = Returns(lambda optimizer: None)
    task.on_train_batch_start = lambda batch, batch_idx: None
    trainer().fit(task, make_loader())
    assert_same_bits(task, Tiny())


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda optimizer: "adam", "It returned str"),
        (lambda optimizer: [optimizer, 3], "Expected an optimizer, got int: 3"),
        (lambda optimizer: ([optimizer], [3]), "must have a `step` method"),
        (lambda optimizer: ([3], []), "Expected an optimizer, got int"),
        (lambda optimizer: scheduler_of(optimizer), "It returned a StepLR"),
        (lambda optimizer: {"optimiser": optimizer}, "unknown key 'optimiser'. Did you mean 'optimizer'?"),
        (lambda optimizer: {"lr_scheduler": scheduler_of(optimizer)}, "has no key 'optimizer'"),
        (lambda optimizer: ([optimizer], [{"scheduler": scheduler_of(optimizer), "intervall": "step"}]), "'interval'"),
        (lambda optimizer: ([optimizer], [{"interval": "step"}]), "has no key 'scheduler'"),
        (lambda optimizer: ([optimizer], [{"scheduler": scheduler_of(optimizer), "interval": "batch"}]), "'batch'"),
        (lambda optimizer: ([optimizer], [{"scheduler": scheduler_of(optimizer), "frequency": 0}]), "frequency"),
        (lambda optimizer: ([optimizer], [ReduceLROnPlateau(optimizer)]), "needs a metric"),
        (lambda optimizer: ([SGD([nn.Parameter(torch.ones(1))])], [scheduler_of(optimizer)]), "did not return"),
    ],
)
def test_wrong_forms_are_refused_before_training(trainer, form, message):
    task = Returns(form)
    with pytest.raises(TaskError, match=message):
        trainer().fit(task, make_loader())
    assert task.seen == []


# --- several optimizers -----------------------------------------------------------------------------------------------
def two_by_hand(task, batches, accumulate=1):
    optimizers = task.configure_optimizers()
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        samples = sum(len(batch[0]) for batch in window)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in window:
            share = len(batch[0]) / samples
            for module, loss in zip((task.model, task.second), task.losses(batch), strict=True):
                loss = loss if share == 1.0 else loss * share
                loss.backward(inputs=list(module.parameters()), retain_graph=True)
        for optimizer in optimizers:
            optimizer.step()
    return task


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_loss_reaches_its_own_optimizer_only(trainer, as_dict, accumulate):
    task = Two(as_dict)
    made = trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    made.fit(task, make_loader(18))
    by_hand = Two()
    optimizers = None
    batches = list(make_loader(18))
    if accumulate == 1:
        two_by_hand(by_hand, batches * 2)
    else:
        # two epochs, so that no window reaches over the end of the first
        configure = by_hand.configure_optimizers
        optimizers = configure()
        by_hand.configure_optimizers = lambda: optimizers
        two_by_hand(by_hand, batches, accumulate)
        two_by_hand(by_hand, batches, accumulate)
    assert_same_bits(task, by_hand)
    assert made.global_step == 2 * -(-5 // accumulate)


def test_clipping_is_for_each_optimizer(trainer):
    norms = []

    class Clipped(Two):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
            norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())

    trainer(gradient_clip_val=0.01).fit(Clipped(), make_loader())
    assert norms == pytest.approx([0.01] * 10, rel=1e-3)


def test_a_parameter_may_be_frozen_and_thawed(trainer):
    class Thawing(Two):
        def on_train_epoch_start(self):
            self.second.requires_grad_(self.current_epoch == 1)

        def training_step(self, batch, batch_idx):
            if self.current_epoch == 0:
                assert weights(self.second) == weights(Two().second)
            return self.losses(batch)

    task = Thawing()
    trainer(max_epochs=2).fit(task, make_loader())
    assert weights(task.second) != weights(Two().second)


def test_own_backward_gets_every_loss(trainer):
    class Own(Two):
        calls = 0

        def backward(self, loss, **options):
            self.calls += 1
            super().backward(loss, **options)

    task = Own()
    trainer().fit(task, make_loader(20))
    assert task.calls == 10
    assert_same_bits(task, two_by_hand(Two(), list(make_loader(20))))


@pytest.mark.parametrize("choose", [lambda losses: losses[:1], lambda losses: [*losses, *losses]])
def test_one_loss_for_each_optimizer(trainer, choose):
    class Wrong(Two):
        def training_step(self, batch, batch_idx):
            return choose(self.losses(batch))

    with pytest.raises(TaskError, match="losses for 2 optimizers"):
        trainer().fit(Wrong(), make_loader())


class TwoKinds(Tiny):
    """Muon for the matrix that two processes share out evenly, AdamW for the rest, and one loss."""

    def configure_optimizers(self):
        first, *rest = self.parameters()
        return Muon([first], lr=0.05), AdamW(rest, lr=0.05)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"replicas": 2}])
def test_one_loss_trains_what_all_optimizers_have(trainer, options):
    task, by_hand = TwoKinds(), TwoKinds()
    trainer(**options).fit(task, make_loader(16))
    optimizers, batches = by_hand.configure_optimizers(), list(make_loader(16))
    size = 2 if options else 1
    for start in range(0, 4, size):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in batches[start : start + size]:
            (by_hand.loss(batch) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_close(task, by_hand)


def test_one_loss_of_two_optimizers_is_unscaled_for_both(trainer):
    task = TwoKinds()
    trainer(precision="16-mixed", gradient_clip_val=1.0).fit(task, make_loader(16))
    moved = [(now - then).abs().max() for now, then in zip(task.parameters(), TwoKinds().parameters(), strict=True)]
    assert all(0.01 < move < 0.5 for move in moved)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_one_loss_of_two_optimizers_on_two_processes(trainer, strategy):
    alone, two = TwoKinds(), TwoKinds()
    trainer(replicas=2).fit(alone, make_loader(18))
    trainer(devices=2, strategy=strategy).fit(two, make_loader(18))
    # Muon multiplies in bfloat16, over shards in another order
    assert weights(alone) == pytest.approx(weights(two), abs=5e-3 if strategy == "fsdp" else 1e-6)


@pytest.mark.slow
def test_fsdp_takes_one_loss_alone(refused):
    class Losses(TwoKinds):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return [loss, 2 * loss]

    assert "Return one loss" in refused(TaskError, Losses(), devices=2, strategy="fsdp")


class Counts:
    """A scheduler whose step needs a number."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, number):
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0 / number

    def state_dict(self):
        return {}


class Told(Tiny):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": Counts(optimizer), "interval": "step"}]


def test_a_scheduler_that_has_to_be_told_more_is_refused_unless_the_task_tells_it(trainer):
    with pytest.raises(TaskError, match=r"Counts.step requires number, .* Define lr_scheduler_step"):
        trainer().fit(Told(), make_loader())

    class Tells(Told):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step(number=self.global_step)

    made = trainer()
    made.fit(Tells(), make_loader(16))
    assert made.optimizers[0].param_groups[0]["lr"] == 1 / 4


# --- learning rates ---------------------------------------------------------------------------------------------------
class Scheduled(Validated):
    """Records the learning rate of each step."""

    def __init__(self, **options):
        super().__init__()
        self.options, self.rates = options, []

    def make(self, optimizer):
        return LambdaLR(optimizer, lambda count: 0.5**count)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.options}}

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.loss(batch) * 0


@pytest.mark.parametrize(
    ("options", "accumulate", "halvings"),
    [
        ({}, 1, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        ({"interval": "epoch", "frequency": 2}, 1, [0, 0, 0, 0, 0, 0, 1, 1, 1]),
        ({"interval": "step"}, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ({"interval": "step", "frequency": 2}, 1, [0, 0, 1, 1, 2, 2, 3, 3, 4]),
        ({"interval": "step"}, 2, [0, 0, 1, 2, 2, 3, 4, 4, 5]),
    ],
)
def test_schedulers_step_when_they_are_due(trainer, options, accumulate, halvings):
    task = Scheduled(**options)
    trainer(max_epochs=3, accumulate_grad_batches=accumulate).fit(task, make_loader(12))
    assert task.rates == [0.5**count for count in halvings]


class Plateau(Scheduled):
    """Halves the learning rate whenever the metric does not fall."""

    def make(self, optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def test_plateau_follows_a_validation_metric(trainer):
    class Rises(Plateau):
        def validation_step(self, batch, batch_idx):
            self.log("val", 1.0 if self.current_epoch < 2 else 2.0)

    task = Rises(monitor="val")
    trainer(max_epochs=4).fit(task, make_loader(8), make_loader(8))
    assert task.rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


class Every(Plateau):
    """Is validated with these values, one after the other."""

    def __init__(self, values):
        super().__init__(monitor="val", strict=False)
        self.values = values

    def validation_step(self, batch, batch_idx):
        self.log("val", self.values[self.current_epoch // 2])


def test_plateau_counts_a_value_once(trainer):
    task = Every([3.0, 2.0, 1.0])
    made = trainer(max_epochs=6, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    made.fit(task, make_loader(8), make_loader(8))
    assert task.rates == [1.0] * 12


def test_plateau_counts_the_value_of_a_validation_before_the_resume(trainer, tmp_path):
    def run(resume=None):
        saves = lg.callbacks.Checkpoint("val", dirpath=tmp_path / "saved", save_top_k=-1)
        options = {"max_epochs": 6, "check_val_every_n_epoch": 2, "callbacks": saves, "enable_checkpointing": True}
        task = Every([1.0, 2.0, 3.0])
        trainer(num_sanity_val_steps=0, **options).fit(task, make_loader(8), make_loader(8), resume=resume)
        return task.rates

    rates = run()
    assert rates == [1.0] * 8 + [0.5] * 4
    assert run(resume=tmp_path / "saved" / "step-00000008") == rates[8:]


def test_plateau_follows_a_training_metric_of_the_epoch(trainer):
    class Logs(Plateau):
        def training_step(self, batch, batch_idx):
            self.log("train", float(self.current_epoch), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    task = Logs(monitor="train")
    trainer(max_epochs=3).fit(task, make_loader(8))
    assert task.rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_plateau_by_steps_reads_the_metric_of_each_step(trainer):
    class Logs(Plateau):
        def training_step(self, batch, batch_idx):
            self.log("train", float(batch_idx))
            return super().training_step(batch, batch_idx)

    task = Logs(monitor="train", interval="step")
    trainer().fit(task, make_loader(16))
    assert task.rates == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_plateau_metric_that_is_never_logged_is_named_with_those_that_are(trainer, interval):
    class Misspelt(Plateau):
        def training_step(self, batch, batch_idx):
            self.log("train/loss", 1.0)
            return super().training_step(batch, batch_idx)

    made = trainer(log_every_n_steps=1)
    with pytest.raises(ConfigError, match=r"'train_loss', which was never logged.*'train/loss'.*Did you mean"):
        made.fit(Misspelt(monitor="train_loss", interval=interval), make_loader())
    assert made.global_step == (1 if interval == "step" else 5)


def test_what_was_trained_before_the_metric_was_missed_is_kept(trainer, tmp_path):
    made = trainer(callbacks=lg.callbacks.Checkpoint(), enable_checkpointing=True)
    with pytest.raises(ConfigError, match="never logged"):
        made.fit(Plateau(monitor="nowhere"), make_loader())
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-00000005"]


def test_strict_false_goes_on_without_the_metric(trainer):
    task = Plateau(monitor="nowhere", strict=False)
    trainer(max_epochs=2).fit(task, make_loader())
    assert task.rates == [1.0] * 10


def test_several_schedulers_each_have_their_own_interval(trainer):
    class Both(Two):
        def configure_optimizers(self):
            first, second = super().configure_optimizers()
            self.rates = []
            by_step = {"scheduler": StepLR(first, 1, 0.5), "interval": "step"}
            return [
                {"optimizer": first, "lr_scheduler": by_step},
                {"optimizer": second, "lr_scheduler": StepLR(second, 1)},
            ]

        def on_train_epoch_end(self):
            self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in self.trainer.optimizers])

    task = Both()
    trainer(max_epochs=2).fit(task, make_loader(8))
    assert task.rates == [pytest.approx([0.1 / 4, 0.001]), pytest.approx([0.1 / 16, 0.0001])]
