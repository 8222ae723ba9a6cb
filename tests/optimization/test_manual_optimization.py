"""Manual optimization matches the plain loop that it looks like."""

import copy

import pytest
import torch
from tiny import Tiny, Two, assert_same_bits, make_data, make_loader, train_by_hand, weights
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import ConfigError, TaskError


# --- manual optimization ----------------------------------------------------------------------------------------------
class Adversaries(Two):
    """A generator and a critic that train against each other, by hand."""

    automatic_optimization = False

    def first_loss(self, batch):
        return self.second(self.model(batch[0])).mean()

    def second_loss(self, batch):
        return (self.second(self.model(batch[0]).detach()) - self.second(batch[1])).mean() ** 2

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        assert not any(parameter.requires_grad for parameter in self.second.parameters())
        loss = self.first_loss(batch)
        self.log("generator", loss)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            assert not any(parameter.requires_grad for parameter in self.model.parameters())
            second.zero_grad()
            self.manual_backward(self.second_loss(batch))
            self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            second.step()
        assert all(parameter.requires_grad for parameter in self.parameters())
        if batch_idx % 2:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        first, second = super().configure_optimizers()
        return [first, second], [StepLR(first, 1, gamma=0.5)]


def test_manual_optimization_is_the_plain_loop(trainer):
    task, made = Adversaries(), trainer(max_epochs=2, log_every_n_steps=1)
    made.fit(task, make_loader())
    by_hand = Adversaries()
    (first, second), (scheduler,) = by_hand.configure_optimizers()
    for batch_idx, batch in [*enumerate(make_loader()), *enumerate(make_loader())]:
        first.zero_grad()
        loss = by_hand.first_loss(batch)
        loss.backward(inputs=list(by_hand.model.parameters()))
        first.step()
        second.zero_grad()
        by_hand.second_loss(batch).backward(inputs=list(by_hand.second.parameters()))
        nn.utils.clip_grad_norm_(by_hand.second.parameters(), 0.05)
        second.step()
        if batch_idx % 2:
            scheduler.step()
    assert_same_bits(task, by_hand)
    assert made.global_step == 10  # steps of the loop, not of every optimizer
    assert made.callback_metrics["generator"].item() == loss.item()


class Stepping(Tiny):
    """Makes each step itself, the optimizer's with these options."""

    automatic_optimization = False

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step(**self.options)


def test_manual_backward_fires_the_hooks_and_uses_an_own_backward(trainer):
    fired = []

    class Hooked(Stepping):
        def on_before_backward(self, loss):
            fired.append("before")

        def backward(self, loss):
            fired.append("backward")
            loss.backward()

        def on_after_backward(self):
            fired.append("after")

        def on_before_optimizer_step(self, optimizer):
            fired.append("step")

    task = Hooked()
    trainer().fit(task, make_loader(8))
    assert fired == ["before", "backward", "after", "step"] * 2
    assert_same_bits(task, train_by_hand(Tiny(), make_loader(8)))


def test_a_scheduler_is_made_of_the_optimizer_that_a_step_is_given(trainer):
    class Warm(Stepping):
        def on_train_start(self):
            optimizer = self.optimizers()
            assert isinstance(optimizer, SGD)
            self.scheduler = StepLR(optimizer, 1, gamma=0.5)

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.scheduler.step()

    task, by_hand, rates = Warm(), Tiny(), []
    made = trainer()
    made.fit(task, make_loader(8))
    optimizer = by_hand.configure_optimizers()
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    for batch in make_loader(8):
        optimizer.zero_grad()
        by_hand.loss(batch).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert made.optimizers[0].param_groups[0]["lr"] == rates[-1]
    assert_same_bits(task, by_hand)


def test_manual_optimization_under_float16_scales_and_unscales(trainer):
    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.05)
            optimizer.step()

    manual, automatic = Manual(), Tiny()
    trainer(precision="16-mixed").fit(manual, make_loader())
    trainer(precision="16-mixed", gradient_clip_val=0.05).fit(automatic, make_loader())
    assert_same_bits(manual, automatic)
    assert weights(manual) != weights(Tiny())


class OneOverflows(lg.Task):
    """Of two losses the first overflows while the scale is large; both backward come before both steps, or in turn."""

    def __init__(self, in_turn):
        super().__init__()
        self.automatic_optimization, self.in_turn = False, in_turn
        self.big, self.small = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def training_step(self, batch, batch_idx):
        big, small = self.optimizers()
        big.zero_grad()
        small.zero_grad()
        self.manual_backward((self.big * 3e34).sum())
        if self.in_turn:
            big.step()
        self.manual_backward((self.small * 0.5).sum())
        if not self.in_turn:
            big.step()
        small.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([self.big], lr=1e-38), torch.optim.SGD([self.small], lr=0.1)]


@pytest.mark.parametrize("in_turn", [True, False])
def test_gradients_of_one_scale_are_all_used_before_the_next_scale(trainer, in_turn):
    task = OneOverflows(in_turn)
    made = trainer(precision="16-mixed", max_epochs=1)
    made.fit(task, make_loader(8))
    assert made.global_step == 2
    assert made.strategy.precision.scaler.get_scale() == 65536.0 / 4  # it overflowed twice
    assert float(task.small.detach()) == pytest.approx(1 - 2 * 0.1 * 0.5, abs=1e-6)


def test_lbfgs_with_a_closure(trainer):
    returned = []

    class Newton(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            returned.append(optimizer.step(closure))

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)

    task, by_hand = Newton(), Newton()
    trainer().fit(task, make_loader())
    optimizer = by_hand.configure_optimizers()
    for index, batch in enumerate(make_loader()):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = by_hand.loss(batch)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == returned[index].item()
    assert_same_bits(task, by_hand)


def test_a_plateau_in_manual_optimization_needs_no_monitor(trainer):
    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.lr_schedulers().step(1.0)

        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]

    task, made = Manual(), trainer()
    made.fit(task, make_loader(16))
    assert made.optimizers[0].param_groups[0]["lr"] == 0.125


def test_wrappers_behave_as_the_optimizer_itself(trainer):
    class Looks(Tiny):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            wrapped, plain = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            assert isinstance(plain, SGD)
            assert wrapped.optimizer is plain
            assert wrapped.param_groups is plain.param_groups
            assert wrapped.state_dict() == plain.state_dict()
            assert isinstance(wrapped, SGD)
            assert type(wrapped) is wrapped.__class__
            assert type(wrapped) is type(self.optimizers())
            assert copy.copy(wrapped).optimizer is plain
            assert self.lr_schedulers() is None
            with pytest.raises(AttributeError):
                _ = wrapped.nothing
            wrapped.load_state_dict(plain.state_dict())
            wrapped.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            assert len(plain.param_groups) == 2
            assert not vars(wrapped).keys() & {"state", "param_groups"}
            plain.param_groups.pop()

    trainer().fit(Looks(), make_loader())


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"replicas": 2}])
def test_manual_optimization_refuses_what_it_cannot_do(trainer, options):
    task = Adversaries()
    with pytest.raises(ConfigError, match="Manual optimization needs one replica per process"):
        trainer(**options).fit(task, make_loader())
    assert_same_bits(task, Adversaries())


def test_manual_backward_needs_manual_optimization_and_a_graph(trainer):
    class Automatic(Tiny):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))

    with pytest.raises(TaskError, match="automatic_optimization = False"):
        trainer().fit(Automatic(), make_loader())

    class Detached(Automatic):
        automatic_optimization = False

        def loss(self, batch):
            return super().loss(batch).detach()

    with pytest.raises(TaskError, match="without a graph"):
        trainer().fit(Detached(), make_loader())


def test_the_optimizer_of_a_subset_leaves_the_rest_alone(trainer):
    class Head(Tiny):
        def configure_optimizers(self):
            return SGD(self.model[2].parameters(), lr=0.1)

    task, before = Head(), Tiny()
    trainer(gradient_clip_val=1.0).fit(task, DataLoader(make_data(), 4))
    assert_same_bits(task.model[0], before.model[0])
    assert weights(task.model[2]) != weights(before.model[2])


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_options_of_a_step_reach_the_optimizer(trainer, precision):
    class Halved(SGD):
        def step(self, closure=None, share=1.0):
            for group in self.param_groups:
                group["lr"] = 0.1 * share
            return super().step(closure)

    class Manual(Stepping):
        def configure_optimizers(self):
            return Halved(self.parameters(), lr=0.1)

    task = Manual(share=0.5)
    trainer(precision=precision).fit(task, make_loader())
    assert task.trainer.optimizers[0].param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_forward_after_an_update_within_the_step_has_the_new_weights(trainer, precision):
    class TwiceAStep(lg.Task):
        def __init__(self):
            super().__init__()
            self.layer, self.automatic_optimization, self.losses = nn.Linear(4, 1), False, []

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for _ in range(2):
                loss = self.layer(batch).float().square().mean()
                self.losses.append(loss.item())
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=0.1)

    task = TwiceAStep()
    trainer(max_steps=1, precision=precision).fit(task, DataLoader(torch.ones(4, 4), batch_size=4))
    assert task.losses[1] < 0.5 * task.losses[0]
