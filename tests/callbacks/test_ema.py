"""The average of the weights, against torch's AveragedModel and a loop written by hand; in checkpoints and resumes."""

import pytest
import torch
from ddp_cases import QUIET, TWO, Net, loader
from safetensors.torch import load_file
from tiny import Tiny, assert_same_bits, make_loader
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import legato as lg
from legato.base.errors import ConfigError, TaskError
from legato.callbacks import Checkpoint, ExponentialMovingAverage
from legato.cli.export import export_weights
from legato.trainer.checkpoints import reading
from legato.trainer.processes.launch import run_workers


def by_hand(task, loader, epochs, decay):
    """Train with a plain loop; return torch's average of the task."""
    average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = torch.optim.SGD(task.parameters(), lr=task.lr)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
            average.update_parameters(task)
    return average.module


class Seen(Tiny):
    """Remembers the weights with which it was validated, and those with which each step began."""

    def __init__(self):
        super().__init__()
        self.validated, self.began = [], []

    def training_step(self, batch, batch_idx):
        self.began.append(self.model[0].weight.detach().clone())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.model[0].weight.detach().clone())
        self.log("val_loss", self.loss(batch))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, False])
def test_the_average_is_torchs_and_validates(trainer, mode):
    task, plain, average = Seen(), Tiny(), ExponentialMovingAverage(0.9)
    made = trainer(callbacks=[average], max_epochs=3, inference_mode=mode)
    made.fit(task, make_loader(), make_loader(4))
    expected = by_hand(plain, make_loader(), 3, 0.9)
    for name, tensor in expected.named_parameters():
        assert torch.allclose(dict(task.named_parameters())[name], tensor, rtol=0, atol=1e-6), name
    assert average.updates == 15
    began = train_by_steps()
    assert torch.equal(torch.stack(task.began), torch.stack(began))  # the weights that are trained know nothing of it
    assert torch.equal(task.validated[-1], task.model[0].weight)
    assert not torch.equal(task.validated[-2], task.began[10])


def train_by_steps():
    task = Seen()
    optimizer = torch.optim.SGD(task.parameters(), lr=task.lr)
    for _ in range(3):
        for index, batch in enumerate(make_loader()):
            optimizer.zero_grad()
            task.training_step(batch, index).backward()
            optimizer.step()
    return task.began


def test_steps_that_are_left_out(trainer):
    average = ExponentialMovingAverage(0.5, every_n_steps=2, start_step=4)
    trainer(callbacks=[average], max_epochs=2, accumulate_grad_batches=1).fit(Tiny(), make_loader())
    assert average.updates == 4  # after steps 4, 6, 8, 10


def test_buffers_are_averaged_where_asked_for(trainer):
    for asked in (False, True):
        task, average = Net(norm=True), ExponentialMovingAverage(0.5, use_buffers=asked)
        trainer(callbacks=[average], max_epochs=2).fit(task, loader(16))
        assert ("body.1.running_mean" in average.averages) is asked
        assert "body.1.num_batches_tracked" not in average.averages


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_both(trainer, tmp_path):
    def run(epochs, resume=None):
        average = ExponentialMovingAverage(0.9)
        keep = Checkpoint(dirpath=tmp_path / "kept", save_top_k=-1)
        made = trainer(callbacks=[average, keep], max_epochs=epochs, enable_checkpointing=True)
        task = Seen()
        made.fit(task, make_loader(), make_loader(4), resume=resume)
        return task, average, made

    uninterrupted, whole_average, _ = run(4)
    step = tmp_path / "kept" / "step-00000010"
    assert step.is_dir()
    again, again_average, made = run(4, resume=step)
    assert_same_bits(uninterrupted, again)
    assert again_average.updates == whole_average.updates == 20
    assert torch.equal(torch.stack(again.began), torch.stack(uninterrupted.began)[10:])
    averaged = Seen()
    made.validate(averaged, make_loader(4), ckpt_path=step)
    assert torch.equal(averaged.validated[0], uninterrupted.validated[2])


def test_whoever_takes_weights_from_a_checkpoint_gets_those_that_were_scored(trainer, tmp_path):
    scores = []

    class Scored(Seen):
        def on_validation_epoch_end(self):
            scores.append(float(self.trainer.callback_metrics["val_loss"]))

        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.loss(batch))

    keep = Checkpoint(dirpath=tmp_path / "kept", save_top_k=-1)
    light = Checkpoint(dirpath=tmp_path / "light", save_top_k=-1, save_weights_only=True)
    options = {"max_epochs": 3, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    task = Scored()
    trainer(callbacks=[ExponentialMovingAverage(0.9), keep, light], **options).fit(task, make_loader(), make_loader(4))
    scored, step = scores[1], "step-00000010"
    for folder in ("kept", "light"):
        path = tmp_path / folder / step
        loaded = Scored.load_from_checkpoint(path)
        assert torch.equal(loaded.model[0].weight, task.validated[1])
        assert loaded.loss(next(iter(make_loader(4)))).item() == pytest.approx(scored, abs=1e-7)
        assert trainer().validate(Scored(), make_loader(4), ckpt_path=path)[0]["val_loss"] == pytest.approx(scored)
        assert trainer().test(Scored(), make_loader(4), ckpt_path=path)[0]["test_loss"] == pytest.approx(scored)
        export_weights(path, tmp_path / f"{folder}.safetensors")
        assert torch.equal(load_file(tmp_path / f"{folder}.safetensors")["model.0.weight"], task.validated[1])
    # what is trained is the model of the checkpoint, for a resume without the callback, too
    plain = Seen()
    trainer(max_epochs=3).fit(plain, make_loader(), resume=tmp_path / "kept" / step)
    assert torch.equal(plain.began[0], task.began[10])


@pytest.mark.slow
def test_two_processes_average_as_one(tmp_path):
    def run(**options):
        task, average = Net(dropout=0.2), ExponentialMovingAverage(0.8)
        made = lg.Trainer(**{**QUIET, "reproducible": "bitwise", "callbacks": [average], **options})
        made.fit(task, loader(22), loader(10))
        return task, average

    single, first = run(strategy="single", replicas=2)
    two, second = run(**TWO)
    assert_same_bits(single, two)
    assert first.updates == second.updates
    assert all(torch.equal(first.averaged_state_dict()[name], single.state_dict()[name]) for name in first.averages)


@pytest.mark.slow
def test_sharded_weights_are_averaged_in_parts(tmp_path):
    def work():
        torch.set_num_threads(1)
        weights, scores = [], []
        for strategy in ({"name": "fsdp"}, {"name": "ddp"}):
            task, average = Net(), ExponentialMovingAverage(0.8)
            keep = Checkpoint(dirpath=tmp_path / strategy["name"], save_top_k=-1)
            options = {**QUIET, **TWO, "strategy": strategy, "callbacks": [average, keep], "enable_checkpointing": True}
            made = lg.Trainer(**options)
            made.fit(task, loader(16), loader(8))
            weights.append(average.averaged_state_dict())
            resumed = Net()
            options["callbacks"] = [ExponentialMovingAverage(0.8)]
            made = lg.Trainer(**{**options, "enable_checkpointing": False})
            made.fit(resumed, loader(16), loader(8), resume=tmp_path / strategy["name"] / "step-00000002")
            weights.append(options["callbacks"][0].averaged_state_dict())
            options["callbacks"] = []
            made = lg.Trainer(**{**options, "enable_checkpointing": False})
            losses = made.validate(Net(), loader(8), ckpt_path=tmp_path / strategy["name"] / "step-00000002")
            scores.append(next(iter(losses[0].values())))
        return *weights, scores

    sharded, resumed, plain, also, scores = run_workers(work, 2, threads=1)
    loaded = Net.load_from_checkpoint(tmp_path / "fsdp" / "step-00000002")
    (state,) = [
        callback_state
        for callback_state in reading.read_checkpoint(tmp_path / "fsdp" / "step-00000002")["callbacks"].values()
        if "averages" in callback_state
    ]
    assert all(torch.equal(loaded.state_dict()[name], average) for name, average in state["averages"].items())
    made = lg.Trainer(**QUIET)
    assert scores == pytest.approx([next(iter(made.validate(loaded, loader(8))[0].values()))] * 2)
    for name in plain:
        assert torch.allclose(sharded[name], plain[name], rtol=0, atol=1e-6), name
        assert torch.equal(sharded[name], resumed[name]), name
        assert torch.equal(plain[name], also[name]), name


def test_half_precision_is_averaged_in_full(trainer):
    average = ExponentialMovingAverage(0.999)
    task = Tiny()
    trainer(callbacks=[average], precision="bf16-true").fit(task, make_loader())
    assert {tensor.dtype for tensor in average.averages.values()} == {torch.float32}
    assert task.model[0].weight.dtype == torch.bfloat16


def test_it_is_never_saved_in_the_place_of_the_weights(trainer, tmp_path):
    class Saves(Seen):
        def validation_step(self, batch, batch_idx):
            self.trainer.save_checkpoint(tmp_path / "within")

    made = trainer(callbacks=[ExponentialMovingAverage(0.9)], max_epochs=1, num_sanity_val_steps=0)
    task = Saves()
    with pytest.raises(TaskError, match="called during evaluation,"):
        made.fit(task, make_loader(), make_loader(4))
    plain = Tiny()
    optimizer = torch.optim.SGD(plain.parameters(), lr=plain.lr)
    for batch in make_loader():
        optimizer.zero_grad()
        plain.loss(batch).backward()
        optimizer.step()
    assert_same_bits(task.model, plain.model)  # and the task has them back


def test_what_cannot_be_is_refused():
    for options, message in (
        ({"decay": 1.0}, "got 1.0"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1 and start_step"),
    ):
        with pytest.raises(ConfigError, match=message):
            ExponentialMovingAverage(**options)
