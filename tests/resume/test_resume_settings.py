"""A resume with changed settings is refused, or lists or matches them; without changes it logs nothing."""

import re

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer
from torch.optim import SGD, AdamW, lr_scheduler

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.callbacks import Checkpoint

TOLD = "The run resumes with settings that differ"


class Rated(Tiny):
    """An optimizer with settings and, optionally, a scheduler."""

    def __init__(self, scheduler=None, kind=SGD, interval="step", dtype=None, order=None, **settings):
        super().__init__()
        self.scheduler, self.kind, self.interval, self.order = scheduler, kind, interval, order
        self.settings = {"lr": 0.1, **settings}
        if dtype is not None:
            self.to(dtype)
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step([text.to(self.dtype) for text in batch], batch_idx)

    def configure_optimizers(self):
        weights = self.parameters() if self.order is None else self.order(self)
        optimizer = self.kind(weights, **self.settings)
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": self.interval},
        }


class Run:
    """Runs in the same run directory, first until step `stop`, with other settings each time."""

    def __init__(self, folder, caplog):
        self.folder, self.caplog = folder, caplog

    def __call__(self, task=None, loader=None, resume="auto", **settings):
        self.caplog.clear()
        saves = Checkpoint(every_n_train_steps=1000)  # and when training ends
        trainer = make_trainer(
            self.folder, **{"max_epochs": 3, "callbacks": [saves], **settings, "enable_checkpointing": True}
        )
        self.task = task or Rated()
        trainer.fit(self.task, loader if loader is not None else make_loader(90, 10, shuffle=True), resume=resume)
        return trainer

    @property
    def message(self):
        """The message about changed settings, or None."""
        resumes = [message for message in self.caplog.messages if message.startswith(TOLD)]
        assert len(resumes) < 2
        return resumes[0] if resumes else None


@pytest.fixture
def run(tmp_path, caplog):
    return Run(tmp_path, caplog)


def shuffled(samples=90, batch_size=10, **options):
    return make_loader(samples, batch_size, **{"shuffle": True, **options})


def several(*names, batch_size=10):
    return {name: shuffled(batch_size=batch_size) for name in names}


# --- which samples make up a step -------------------------------------------------------------------------------------
SAMPLES = {
    "batch size": ({}, {"loader": shuffled(batch_size=14)}, ["batch_size: 10 -> 14"]),
    "accumulation": ({}, {"accumulate_grad_batches": 3}, ["accumulate_grad_batches: 1 -> 3"]),
    "data": ({}, {"loader": shuffled(120)}, ["dataset length: 90 -> 120"]),
    "limit": ({}, {"limit_train_batches": 5}, ["limit_train_batches: 1.0 -> 5"]),
    "order": ({}, {"loader": shuffled(shuffle=False)}, ["shuffle: True -> False"]),
    "drop_last": ({}, {"loader": shuffled(drop_last=True)}, ["drop_last: False -> True"]),
    "overfit": ({}, {"overfit_batches": 5}, ["overfit_batches: 0.0 -> 5"]),
    "loaders": ({"loader": several("a", "b")}, {"loader": several("a", "b", "c")}, ["loaders: 2 -> 3"]),
    "one": ({"loader": several("a", "b")}, {"loader": several("a", "b", batch_size=5)}, ["a.batch_size: 10 -> 5"]),
    "stream": ({"loader": list(shuffled())}, {"loader": list(shuffled(batch_size=5))}, ["batches: 9 -> 18"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_other_samples_in_a_step_are_refused_within_an_epoch_and_listed_at_its_end(run, name):
    before, now, expected = SAMPLES[name]

    class Task(Rated):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)

    first = run(Task(), max_steps=4, **before)
    with pytest.raises(ConfigError, match="in the middle of epoch 0 \\(after step 4\\)") as caught:
        run(Task(), **now)
    assert run.task.seen == []
    message = str(caught.value)
    assert all(text in message for text in [*expected, "trainer.resume_at=epoch", "resume=PATH"])
    assert len(message.splitlines()) <= 6
    # the way out, in the same run directory
    trainer = run(Task(), resume_at="epoch", max_epochs=2, **now)
    assert trainer.run_dir == first.run_dir
    assert trainer.current_epoch == 2
    assert trainer.global_step == 4 + len(run.task.seen) // now.get("accumulate_grad_batches", 1)
    assert all(text in run.message for text in [*expected, "epoch 0 ends here, after 4 steps"])
    # nothing has changed since then
    run(Task(), resume_at="epoch", **now)
    assert run.message is None
    # at the end of an epoch it is listed
    run(Task(), max_epochs=4, **before)
    assert "New values that change the samples in each step" in run.message
    assert "ends here" not in run.message


def test_the_epoch_that_ends_early_has_its_end(run):
    """Validation, hooks and schedulers run as after a hook that leaves the epoch, and only once, also with a save."""

    class Task(Rated):
        def __init__(self):
            super().__init__(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), interval="epoch")
            self.at = []

        def on_validation_end(self):
            self.at.append(("validation", self.current_epoch, self.global_step))

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.loss(batch))

        def on_train_epoch_end(self):
            self.at.append(("epoch", self.current_epoch, self.global_step))

    class Ends(lg.Callback):
        def on_validation_end(self, trainer, task):
            trainer.should_stop = True
            trainer.save_checkpoint(trainer.run_dir / "checkpoints" / "step-00000100")

    settings = {"num_sanity_val_steps": 0}

    class WithValidation:
        def __call__(self, loader, **more):
            task = Task()
            callbacks = [Checkpoint(every_n_train_steps=1, save_top_k=-1), *more.pop("callbacks", [])]
            trainer = make_trainer(run.folder, enable_checkpointing=True, callbacks=callbacks, **settings, **more)
            run.caplog.clear()
            trainer.fit(task, loader, shuffled(20), resume="auto")
            return trainer, task

    fit = WithValidation()
    fit(shuffled(), max_steps=4)
    # it is ended while the epoch is: what it saves then still knows how the epoch was dealt out
    fit(shuffled(batch_size=15), resume_at="epoch", max_epochs=2, callbacks=[Ends()])
    with pytest.raises(ConfigError, match="batch_size: 10 -> 15"):
        fit(shuffled(batch_size=15), max_epochs=2)
    _, task = fit(shuffled(batch_size=15), resume_at="epoch", max_epochs=2)
    assert task.at[0] == ("epoch", 0, 4)
    assert ("epoch", 1, 10) in task.at
    assert task.rates == [0.05] * 6


def test_a_path_begins_a_new_run_whose_epoch_ends_where_samples_differ(run):
    first = run(max_steps=4)
    path = first.checkpoint_callback.last_model_path
    trainer = run(loader=shuffled(batch_size=15), resume=path, max_epochs=2)
    assert trainer.run_dir != first.run_dir
    assert "batch_size: 10 -> 15" in run.message
    assert "epoch 0 ends here" in run.message
    assert (trainer.global_step, len(run.task.seen)) == (10, 6)


def test_it_works_under_bitwise_too(run):
    settings = {"reproducible": "bitwise"}
    run(max_steps=4, **settings)
    with pytest.raises(ConfigError, match="batch_size: 10 -> 15"):
        run(loader=shuffled(batch_size=15), **settings)
    run(loader=shuffled(batch_size=15), resume_at="epoch", **settings)
    assert "batch_size: 10 -> 15" in run.message


# --- what merely changes the training ---------------------------------------------------------------------------------
def cosine(steps):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, steps)


def milestones(*steps):
    return lambda optimizer: lr_scheduler.MultiStepLR(optimizer, steps)


def sequence(warm_up):
    def make(optimizer):
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, warm_up), lr_scheduler.CosineAnnealingLR(optimizer, 50)]
        return lr_scheduler.SequentialLR(optimizer, parts, [warm_up])

    return make


TRAINING = {
    "clipping": ({}, {"gradient_clip_val": 0.5}, "gradient_clip_val: None -> 0.5"),
    "algorithm": (
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        "gradient_clip_algorithm: norm -> value",
    ),
    "nan": ({}, {"nan": "skip"}, "nan: raise -> skip"),
    "precision": ({}, {"precision": "bf16-mixed"}, "precision: 32-true -> bf16-mixed"),
    "dtype": ({}, {"task": {"dtype": torch.float64}}, "dtypes: ['torch.float32'] -> ['torch.float64']"),
    "kernels": ({}, {"deterministic": True}, "deterministic_algorithms: False -> True"),
    "T_max": ({"task": {"scheduler": cosine(27)}}, {"task": {"scheduler": cosine(54)}}, "0.state.T_max: 27 -> 54"),
    "milestones": (
        {"task": {"scheduler": milestones(2, 20)}},
        {"task": {"scheduler": milestones(9, 20)}},
        "schedulers.0.state.milestones: {'2': 1, '20': 1} -> {'9': 1, '20': 1}",
    ),
    "sequence": ({"task": {"scheduler": sequence(2)}}, {"task": {"scheduler": sequence(8)}}, "total_iters: 2 -> 8"),
    "interval": (
        {"task": {"scheduler": cosine(27)}},
        {"task": {"scheduler": cosine(27), "interval": "epoch"}},
        "schedulers.0.interval: step -> epoch",
    ),
    "scheduler": (
        {"task": {"scheduler": cosine(27)}},
        {"task": {"scheduler": milestones(3)}},
        "schedulers.0.class: CosineAnnealingLR -> MultiStepLR",
    ),
    "decay": ({}, {"task": {"weight_decay": 0.5}}, "Values from the checkpoint: optimizers.0.groups.0.weight_dec"),
    "lr": ({}, {"task": {"lr": 0.3}}, "Values from the checkpoint: optimizers.0.groups.0.lr=0.1 (not 0.3)"),
}  # fmt: skip


def with_task(settings):
    return {**settings, "task": Rated(**settings.get("task", {}))}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_what_changes_the_training_is_listed_once_and_refused_by_bitwise(run, name):
    before, now, expected = TRAINING[name]
    run(max_steps=4, **with_task(before))
    run(max_steps=6, **with_task(before))
    assert run.message is None
    run(max_steps=8, **with_task(now))
    assert expected in run.message
    listed = run.message
    run(max_steps=9, **with_task(now))
    if "Values from the checkpoint" in expected:
        assert run.message == listed  # it still does not count
    else:
        assert run.message is None


@pytest.mark.parametrize("name", sorted(TRAINING.keys() - {"kernels"}))  # with bitwise they are deterministic anyway
def test_bitwise_refuses_what_changes_the_training(run, name):
    before, now, expected = TRAINING[name]
    run(max_steps=4, reproducible="bitwise", **with_task(before))
    with pytest.raises(ConfigError, match="bitwise would not stay bitwise identical") as caught:
        run(max_steps=5, reproducible="bitwise", **with_task(now))
    message = str(caught.value)
    assert len(message.splitlines()) <= 6
    assert expected.removeprefix("Values from the checkpoint: ").split("=")[0] in message
    run(max_steps=5, **with_task(now))
    assert "reproducible: bitwise -> order" in run.message
    run(max_steps=6, reproducible="bitwise", **with_task(now))
    assert "reproducible: order -> bitwise" in run.message


def test_flags_of_kernels_are_compared(run):
    run(max_steps=4)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        run(max_steps=5)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert "flash_attention: True -> False" in run.message
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run(max_steps=6)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert "matmul_precision: highest -> high" in run.message


# --- learning rate schedules ------------------------------------------------------------------------------------------
def one_cycle(steps):
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("make", [cosine, one_cycle, sequence], ids=lambda make: make.__name__)
@pytest.mark.parametrize("at", [10, 18])
def test_a_run_that_is_made_longer_follows_the_schedule_of_its_new_length(run, make, at):
    """As if the run had this length from the start; the message has the old and the new rate."""
    run(Rated(make(18)), max_steps=at, max_epochs=4)
    run(Rated(make(36)), max_epochs=4)
    rates, message = run.task.rates, run.message
    reference = Rated(make(36))
    make_trainer(run.folder / "whole", max_epochs=4).fit(reference, shuffled())
    assert rates == pytest.approx(reference.rates[at:], rel=1e-6)
    was, now = re.search(r"learning rate: (\S+) -> ([^,. ]+\.?[^,. ]*)", message).groups()
    assert float(now) == pytest.approx(rates[0])
    assert float(was) != pytest.approx(rates[0])


def test_what_cannot_be_replayed_goes_on_with_its_new_settings(run):
    def plateau(patience):
        return lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience)

    class Task(Rated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            made = super().configure_optimizers()
            made["lr_scheduler"]["monitor"] = "loss"
            return made

    first = run(Task(plateau(1000)), max_steps=6)
    best = first.lr_scheduler_configs[0].scheduler.best
    again = run(Task(plateau(2000)), max_steps=6)
    assert "schedulers.0.state.patience: 1000 -> 2000" in run.message
    scheduler = again.lr_scheduler_configs[0].scheduler
    assert (scheduler.patience, scheduler.best) == (2000, best)
    run(Rated(cosine(20)), max_steps=7)
    assert "ReduceLROnPlateau -> CosineAnnealingLR" in run.message
    with pytest.raises(
        CheckpointError, match="scheduler is CosineAnnealingLR, but the task now returns ReduceLROnPlateau"
    ):
        run(Task(plateau(1000)), max_steps=8)


def test_a_schedule_that_is_too_short_is_refused(run):
    run(Rated(one_cycle(27)), max_steps=12)
    with pytest.raises(ConfigError, match="OneCycleLR covers fewer than the 12 steps"):
        run(Rated(one_cycle(10)), max_epochs=4)


# --- parameters -------------------------------------------------------------------------------------------------------
class Equal(Rated):
    """Layers of equal shapes."""

    def __init__(self, order=None, kind=AdamW):
        super().__init__(order=order, kind=kind, lr=0.01)
        generator = torch.Generator().manual_seed(5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)), torch.nn.Linear(3, 1))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2


def grouped(backwards, names=("weight", "bias")):
    def order(task):
        groups = [[parameter for name, parameter in task.named_parameters() if name.endswith(end)] for end in names]
        if backwards:
            groups = [group[::-1] for group in groups[::-1]]
        return [{"params": group, "weight_decay": 0.1 * len(group[0].shape)} for group in groups]

    return order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "now"),
    [(None, lambda task: [*task.parameters()][::-1]), (grouped(False), grouped(True))],
    ids=["one group", "groups"],
)
def test_reordered_parameters_are_matched_by_name(run, was, now):
    run(Equal(was), max_steps=4)
    run(Equal(now), max_steps=9)
    assert "optimizers.0.params: saved order -> matched by name" in run.message
    assert "weight_decay" not in run.message
    reference = Equal(was)
    make_trainer(run.folder / "whole", max_steps=9).fit(reference, shuffled())
    for ours, theirs in zip(run.task.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_parameters_that_cannot_be_matched_are_refused_by_name(run):
    run(Equal(), max_steps=4)
    with pytest.raises(
        CheckpointError, match=r"do not match those of the task: it has unknown model\.3\.bias, model\.3\.weight"
    ):
        run(Equal(lambda task: [*task.parameters()][:-2]), max_steps=9)
    run(Equal(grouped(False)), resume=None, max_steps=4)
    with pytest.raises(CheckpointError, match=r"AdamW has different parameter groups"):
        run(
            Equal(
                grouped(False, ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"))
            )
        )
