"""Weights that training_step changes are an error with several replicas; on_step_end may change them."""

import copy

import pytest
import torch
from tiny import Tiny, make_data, make_loader, make_trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from legato.base.errors import TaskError

TWO = {"devices": 2, "strategy": "ddp"}


class Taught(Tiny):
    """Learns from its targets and from a frozen copy that follows it."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + nn.functional.mse_loss(self(batch[0]), self.teacher(batch[0]))

    @torch.no_grad()
    def teach(self):
        for ours, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            ours.lerp_(theirs, 0.3)


class TaughtInStep(Taught):
    def training_step(self, batch, batch_idx):
        self.teach()
        return super().training_step(batch, batch_idx)


class TaughtByData(TaughtInStep):
    """As MoCo's own code does; such a write has no version."""

    def teach(self):
        for ours, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            ours.data = 0.7 * ours.data + 0.3 * theirs.data


class TaughtByTorch(TaughtInStep):
    def __init__(self):
        super().__init__()
        self.teacher = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)

    def teach(self):
        self.teacher.update_parameters(self.model)


class Bounded(Tiny):
    """Its forward brings the rows of an embedding to a norm of at most 10, which none has at first."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(3, 3, max_norm=10.0)

    def training_step(self, batch, batch_idx):
        return self.loss((batch[0] + self.words(torch.arange(len(batch[0])) % 3), batch[1]))


CHANGING = {
    TaughtInStep: "teacher.0.weight, teacher.0.bias",
    TaughtByData: "teacher.0.weight, teacher.0.bias",
    TaughtByTorch: "teacher.module.0.weight",
    Bounded: "words.weight",
}


@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
@pytest.mark.parametrize("kind", CHANGING)
def test_a_step_that_changes_weights_is_refused_with_several_replicas(tmp_path, kind, reproducible):
    made = make_trainer(tmp_path, replicas=2, strategy="single", reproducible=reproducible)
    with pytest.raises(TaskError, match=f"{CHANGING[kind]}.*on_step_end"):
        made.fit(kind(), make_loader())


def test_it_is_refused_on_several_processes(tmp_path):
    with pytest.raises(TaskError, match=r"teacher\.0\.weight.*2 replicas.*on_step_end"):
        make_trainer(tmp_path, **TWO).fit(TaughtInStep(), make_loader())


@pytest.mark.parametrize("kind", CHANGING)
def test_under_one_replica_a_step_may_change_weights(tmp_path, kind):
    make_trainer(tmp_path, accumulate_grad_batches=2).fit(kind(), make_loader())


def test_running_statistics_are_no_weights(tmp_path, caplog):
    class Normalized(Tiny):
        def __init__(self):
            super().__init__()
            self.model.insert(1, nn.BatchNorm1d(4))
            nn.utils.parametrizations.spectral_norm(self.model[-1])

    make_trainer(tmp_path, replicas=2, strategy="single").fit(Normalized(), make_loader())
    assert "buffers" not in caplog.text


def test_buffers_of_the_first_replica_alone_are_told(tmp_path, caplog):
    class Centred(Tiny):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def training_step(self, batch, batch_idx):
            self.centre.lerp_(batch[0].mean(0), 0.1)
            return super().training_step(batch, batch_idx)

    make_trainer(tmp_path, replicas=2, strategy="single").fit(Centred(), make_loader())
    assert caplog.text.count("changes the buffers centre.") == 1


class TaughtRight(Taught):
    """Its last step of an epoch leaves one of two processes without a batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ends", torch.tensor(0))

    def on_step_end(self):
        assert self.global_step == int(self.ends) + 1
        self.ends += 1
        self.teach()


REPLICAS, BATCH, SAMPLES, EPOCHS = 3, 4, 26, 2


def by_hand():
    task = Taught()
    optimizer = task.configure_optimizers()
    inputs, targets = make_data(SAMPLES).tensors
    for _ in range(EPOCHS):
        for batch in zip(inputs.split(REPLICAS * BATCH), targets.split(REPLICAS * BATCH), strict=True):
            optimizer.zero_grad()
            task.training_step(batch, 0).backward()
            optimizer.step()
            task.teach()
    return task


def test_a_teacher_that_follows_in_on_step_end_is_that_of_a_loop_by_hand(tmp_path):
    """26 samples are 24 and 2: in the last step of an epoch the second process has none."""
    weights = []
    for layout in ({"strategy": "single"}, TWO):
        options = {**layout, "replicas": REPLICAS, "reproducible": "bitwise", "max_epochs": EPOCHS}
        task = TaughtRight()
        make_trainer(tmp_path, log_every_n_steps=1, **options).fit(task, make_loader(SAMPLES, BATCH))
        assert task.ends == 3 * EPOCHS
        weights.append(torch.cat([weight.flatten() for weight in task.parameters()]))
    assert torch.equal(*weights)
    theirs = torch.cat([weight.flatten() for weight in by_hand().parameters()])
    assert torch.allclose(weights[0], theirs, rtol=0, atol=1e-6)
