"""Optimizers that evaluate the loss themselves, through a closure."""

import pytest
import torch
from tiny import Tiny, assert_close, assert_same_bits, make_loader, train_by_hand
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from legato.base.errors import ConfigError, TaskError


class Newton(Tiny):
    evaluations = 0

    def __init__(self, line_search=None):
        super().__init__()
        self.line_search = line_search

    def training_step(self, batch, batch_idx):
        self.evaluations += 1
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn=self.line_search)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])  # the latter compares all values with the first one
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lbfgs_evaluates_the_whole_step(trainer, accumulate, line_search):
    task, by_hand = Newton(line_search), Newton(line_search)
    made = trainer(accumulate_grad_batches=accumulate)
    made.fit(task, make_loader(16))
    optimizer, batches, first = by_hand.configure_optimizers(), list(make_loader(16)), []
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]

        def closure(window=window, start=start):
            optimizer.zero_grad()
            losses = [by_hand.loss(batch) for batch in window]
            for loss in losses:
                (loss / len(window)).backward()
            first.append(start) if first[-1:] != [start] else None
            return sum(loss.detach() / len(window) for loss in losses)

        optimizer.step(closure)
    assert_same_bits(task, by_hand)
    assert task.evaluations > 2 * len(batches)  # several a batch
    assert made.global_step == len(first)
    assert made.callback_metrics["loss"].isfinite()


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"replicas": 2}])
def test_a_closure_returns_the_loss_of_the_whole_step(trainer, options):
    class Asking(Tiny):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            self.value = optimizer_closure().item()
            optimizer.step()

    task, by_hand = Asking(), Tiny()
    trainer(limit_train_batches=1 if "replicas" in options else 2, **options).fit(task, make_loader())
    first, second = list(make_loader())[:2]
    if options:
        expected = (by_hand.loss(first) + by_hand.loss(second)) / 2
    else:
        train_by_hand(by_hand, [first])
        expected = by_hand.loss(second)
    assert task.value == pytest.approx(expected.item(), rel=1e-6)


class Values(torch.optim.SGD):
    """Evaluates the loss three times."""

    def step(self, closure):
        self.values = [closure().item() for _ in range(3)]


def test_each_evaluation_has_the_same_random_numbers(trainer):
    """Of a stream too, whose first forward draws on where loading its batch has left the generators."""

    class Dropping(Tiny):
        def training_step(self, batch, batch_idx):
            return self.loss([nn.functional.dropout(batch[0], 0.5), batch[1]])

        def configure_optimizers(self):
            return Values(self.parameters(), self.lr)

    made = trainer()
    made.fit(Dropping(), list(make_loader()))
    assert len(set(made.optimizers[0].values)) == 1


def test_values_are_logged_once_a_batch(play):
    task = Newton()
    memory = play(task).memory
    assert len([point for point in memory.points if "loss_step" in point[1]]) == 5  # 18 samples in batches of 4


class Sharp(torch.optim.SGD):
    """Sharpness-aware minimization as it is commonly written; its step refuses its default argument."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "requires closure"
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [0.1 * parameter.grad for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        self.zero_grad()
        closure()
        torch._foreach_sub_(parameters, moves)
        return super().step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_that_refuses_none_is_given_a_closure(trainer, accumulate):
    class Minimizing(Tiny):
        def configure_optimizers(self):
            return Sharp(self.parameters(), lr=0.1)

    task, by_hand = Minimizing(), Minimizing()
    trainer(accumulate_grad_batches=accumulate).fit(task, make_loader(16))
    optimizer, batches = by_hand.configure_optimizers(), list(make_loader(16))
    for start in range(0, 4, accumulate):

        @torch.enable_grad()
        def closure(start=start):
            for batch in batches[start : start + accumulate]:
                (by_hand.loss(batch) / accumulate).backward()

        optimizer.zero_grad()
        closure()
        optimizer.step(closure)
    assert_same_bits(task, by_hand)
    with pytest.raises(ConfigError, match="Sharp evaluates the loss several times a step"):
        trainer(replicas=2).fit(Minimizing(), make_loader())


@pytest.mark.parametrize("options", [{"replicas": 2}, {"nan": "skip"}])
def test_where_there_can_be_no_closure(trainer, options):
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times a step"):
        trainer(**options).fit(Newton(), make_loader())


SCHEDULERS = {
    "step": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 4),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=100, cycle_momentum=False),
    "plateau": lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"},
}


class Scheduled(Newton):
    """LBFGS with a learning rate scheduler, which replaces the optimizer's `step`."""

    def __init__(self, scheduler):
        super().__init__()
        self.scheduler = scheduler

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [SCHEDULERS[self.scheduler](optimizer)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_lbfgs_with_a_scheduler(trainer, scheduler):
    task, by_hand = Scheduled(scheduler), Newton()
    trainer(max_epochs=2).fit(task, make_loader())
    optimizer = by_hand.configure_optimizers()
    stepped = SCHEDULERS[scheduler](optimizer)
    stepped = stepped["scheduler"] if isinstance(stepped, dict) else stepped
    for _ in range(2):
        for batch in make_loader():

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = by_hand.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        if scheduler != "plateau":  # which keeps the rate for ten epochs
            stepped.step()
    assert_same_bits(task, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "data_parallel"])
def test_lbfgs_is_refused_on_several_processes(refused, strategy):
    message = refused(ConfigError, Scheduled("step"), devices=2, strategy=strategy)
    assert message.startswith("LBFGS evaluates the loss several times a step")
    assert "strategy=ddp" in message
    assert "zero1" not in message or strategy == "zero1"


class ByHand(Newton):
    """LBFGS under manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.slow
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_a_closure_of_manual_optimization_averages_over_processes(trainer, line_search):
    task, by_hand = ByHand(line_search), Newton(line_search)
    trainer(devices=2, strategy="ddp").fit(task, make_loader(16))
    optimizer, batches = by_hand.configure_optimizers(), list(make_loader(16))
    for pair in (batches[:2], batches[2:]):

        def closure(pair=pair):
            optimizer.zero_grad()
            loss = sum(by_hand.loss(batch) for batch in pair) / 2
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_close(task, by_hand)


class Observes(Tiny):
    """Notes what happens around its own optimizer_step, and whether gradients are there when a batch begins."""

    def __init__(self):
        super().__init__()
        self.events, self.kept = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.kept.append(next(self.parameters()).grad is not None)

    def training_step(self, batch, batch_idx):
        self.events.append("forward")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer):
        self.events.append("zero_grad")

    def on_before_optimizer_step(self, optimizer):
        self.events.append("before")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.events.append("step")
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_into_zero_grad_see_the_gradients_of_the_step_before(trainer, accumulate):
    """As in Lightning: the gradients are cleared after the first forward; without such hooks before it."""
    task, usual = Observes(), Tiny()
    options = {"accumulate_grad_batches": accumulate, "limit_train_batches": 4}
    trainer(**options).fit(task, make_loader())
    trainer(**options).fit(usual, make_loader())
    assert_same_bits(task, usual)
    forwards = ["forward", "zero_grad", *["forward"] * (accumulate - 1)]
    assert task.events == [*forwards, "before", "step"] * (4 // accumulate)
    assert task.kept == [False, True, True, True]


def test_gradients_are_cleared_first_where_a_process_runs_several_replicas(trainer):
    task = Observes()
    trainer(limit_train_batches=2, replicas=2).fit(task, make_loader())
    assert task.events[:2] == ["zero_grad", "forward"]


# --- a task's own optimizer_step, which may call its closure several times --------------------------------------------
class Calling(Tiny):
    """Clears its gradients before or between calls of the closure."""

    def __init__(self, clears, calls=1):
        super().__init__()
        self.clears, self.calls, self.losses_seen = clears, calls, []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for _ in range(self.calls):
            if self.clears is not None:
                optimizer.zero_grad(set_to_none=self.clears)
            self.losses_seen.append(optimizer_closure().item())
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}])
@pytest.mark.parametrize("clears", [None, True, False])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_closure_computes_cleared_gradients_again(trainer, clears, calls, options):
    """Also where they are set to zero rather than to None, which looks like gradients that are there."""
    task, usual = Calling(clears, calls), Tiny()
    trainer(**options).fit(task, make_loader())
    trainer(**options).fit(usual, make_loader())
    assert_same_bits(task, usual)
    assert len(set(task.losses_seen[:calls])) == 1


def test_a_closure_of_weighted_batches(trainer):
    class Weighted(Calling):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch), "weight": float(batch_idx + 1)}

    repeating, once = Weighted(True, 2), Weighted(None)
    for task in (repeating, once):
        trainer(accumulate_grad_batches=2).fit(task, make_loader())
    assert_same_bits(repeating, once)
    assert repeating.losses_seen[::2] == once.losses_seen


def test_sharpness_aware_steps(trainer):
    """The second call of the closure evaluates the loss at other weights."""

    class Sharp(Tiny):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            with torch.no_grad():
                steps = [0.1 * parameter.grad for parameter in self.parameters()]
                for parameter, step in zip(self.parameters(), steps, strict=True):
                    parameter += step
            optimizer_closure()
            with torch.no_grad():
                for parameter, step in zip(self.parameters(), steps, strict=True):
                    parameter -= step
            optimizer.step()

    task, by_hand = Sharp(), Tiny()
    trainer().fit(task, make_loader())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=by_hand.lr)
    for batch in make_loader():
        optimizer.zero_grad()
        by_hand.loss(batch).backward()
        steps = [0.1 * parameter.grad for parameter in by_hand.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, step in zip(by_hand.parameters(), steps, strict=True):
                    parameter += sign * step
            if sign == 1:
                optimizer.zero_grad()
                by_hand.loss(batch).backward()
        optimizer.step()
    assert_same_bits(task, by_hand)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"precision": "16-mixed"}])
def test_where_a_closure_cannot_run_the_step_again(trainer, options):
    with pytest.raises(TaskError, match="Call the closure only once"):
        trainer(**options).fit(Calling(True), make_loader())
