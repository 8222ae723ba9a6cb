"""Microscope beside what the same numbers are by hand."""

import pytest
import torch
from tiny import Memory, Tiny, make_loader

import legato as lg
from legato.lab import Microscope


class Looks(lg.Callback):
    """Notes whether anything is attached in each step, and the weights and gradients after it."""

    def __init__(self):
        self.attached, self.weights, self.gradients = [], [], []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.attached.append(sum(len(module._forward_hooks) for module in task.modules()))

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.weights.append(task.model[0].weight.detach().clone())
        self.gradients.append(task.model[0].weight.grad.clone())


def kurtosis(values):
    return ((values - values.mean()) ** 4).mean() / ((values - values.mean()) ** 2).mean() ** 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_norms_and_the_moments_are_those_of_the_step(trainer, replicas):
    outputs, looks, memory = [], Looks(), Memory()
    task = Tiny()
    for parameter in (task.model[0].bias, task.model[2].bias):
        parameter.requires_grad_(False)
    task.model[1].register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    microscope = Microscope(2, modules="model")
    made = trainer(logger=memory, callbacks=[microscope, looks], replicas=replicas, log_every_n_steps=5)
    made.fit(task, make_loader(16, 4 // replicas))
    assert [step for step, _ in memory.of("weights/model.0")] == [2, 4]
    for step in (2, 4):
        before, after = looks.weights[replicas * (step - 1) - 1], looks.weights[replicas * step - 1]
        values = dict(next(values for at, values in memory.points if at == step and "weights/model.0" in values))
        assert values["weights/model.0"] == pytest.approx(after.norm().item())
        assert values["gradients/model.0"] == pytest.approx(looks.gradients[replicas * step - 1].norm().item())
        assert values["updates/model.0"] == pytest.approx((after - before).norm().item(), rel=1e-4)
        seen = torch.cat(outputs[replicas * (step - 1) : replicas * step]).flatten().double()
        assert values["activations/model.1.mean"] == pytest.approx(seen.mean().item())
        assert values["activations/model.1.std"] == pytest.approx(seen.std(correction=0).item())
        assert values["activations/model.1.largest"] == pytest.approx(seen.abs().max().item())
        assert values["activations/model.1.kurtosis"] == pytest.approx(kurtosis(seen).item(), rel=1e-5)
        assert not any("nothing" in name for name in values)
    assert microscope.newest is not None
    assert microscope.newest[0] == 4


def test_nothing_is_attached_in_the_steps_between_nor_after_an_error(trainer):
    looks, task = Looks(), Tiny()
    trainer(callbacks=[Microscope(2), looks]).fit(task, make_loader(20))
    assert [count > 0 for count in looks.attached] == [False, True, False, True, False]
    assert not any(module._forward_hooks for module in task.modules())

    class Fails(Tiny):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    task = Fails()
    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[Microscope(1)]).fit(task, make_loader(20))
    assert not any(module._forward_hooks for module in task.modules())


def test_a_run_with_it_has_the_same_bits(trainer):
    first, second = Tiny(), Tiny()
    trainer().fit(first, make_loader(20))
    trainer(callbacks=[Microscope(2)]).fit(second, make_loader(20))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first.parameters(), second.parameters(), strict=True))
