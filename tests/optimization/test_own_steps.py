"""A task may override every part of the step."""

import pytest
from tiny import Tiny, assert_same_bits, make_loader, train_by_hand
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR


# --- overridden parts of the step -------------------------------------------------------------------------------------
def test_own_optimizer_step_with_warm_up_and_a_closure_that_returns_the_loss(trainer):
    losses = []

    class WarmUp(Tiny):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (self.global_step + 1)
            losses.append(optimizer_closure())
            optimizer.step(closure=optimizer_closure)

    for nan in ("raise", "ignore"):
        task = WarmUp()
        trainer(nan=nan).fit(task, make_loader())
        by_hand, optimizer = Tiny(), None
        optimizer = SGD(by_hand.parameters(), lr=0.1)
        for index, batch in enumerate(make_loader()):
            optimizer.param_groups[0]["lr"] = 0.1 * (index + 1)
            optimizer.zero_grad()
            loss = by_hand.loss(batch)
            assert losses[index].item() == loss.item()
            loss.backward()
            optimizer.step()
        assert_same_bits(task, by_hand)
        losses.clear()


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_own_optimizer_step_may_leave_steps_out(trainer, precision):
    class Lazy(Tiny):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx % 2:
                optimizer.step(optimizer_closure)

    task = Lazy()
    trainer(precision=precision, gradient_clip_val=100.0).fit(task, make_loader())
    if precision == "32":
        assert_same_bits(task, train_by_hand(Tiny(), list(make_loader())[1::2]))


def test_own_zero_grad(trainer):
    class Keeps(Tiny):
        """Never drops its gradients, so that they add up."""

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            assert self.trainer.optimizers == [optimizer]

    task, by_hand = Keeps(), Tiny()
    trainer().fit(task, make_loader())
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    for batch in make_loader():
        by_hand.loss(batch).backward()
        optimizer.step()
    assert_same_bits(task, by_hand)


def test_own_backward(trainer):
    class Doubled(Tiny):
        def backward(self, loss, *args, **kwargs):
            (2 * loss).backward(*args, **kwargs)

    task = Doubled()
    trainer().fit(task, make_loader())

    def double(by_hand):
        for parameter in by_hand.parameters():
            parameter.grad *= 2

    assert_same_bits(task, train_by_hand(Tiny(), make_loader(), before_step=double))


def test_own_gradient_clipping(trainer):
    class Signs(Tiny):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            assert (gradient_clip_val, gradient_clip_algorithm) == (None, "norm")
            for parameter in self.parameters():
                parameter.grad.sign_()

    task = Signs()
    trainer().fit(task, make_loader())
    by_hand = train_by_hand(
        Tiny(), make_loader(), before_step=lambda t: [parameter.grad.sign_() for parameter in t.parameters()]
    )
    assert_same_bits(task, by_hand)


def test_own_lr_scheduler_step(trainer):
    calls = []

    class Own(Tiny):
        def __init__(self):
            super().__init__()
            self.rates = []

        def training_step(self, batch, batch_idx):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return self.loss(batch)

        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=1.0)
            scheduler = LambdaLR(optimizer, lambda count: 0.5**count)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def lr_scheduler_step(self, scheduler, metric):
            calls.append(metric)
            scheduler.step(epoch=len(calls) + 1)

    task = Own()
    with pytest.warns(UserWarning, match="epoch parameter"):
        trainer().fit(task, make_loader(12))
    assert (calls, task.rates) == ([None] * 3, [1.0, 0.25, 0.125])
