"""Non-finite numbers: named, dropped on all ranks alike, or ignored; never saved over a good checkpoint."""

import json
import logging

import pytest
import torch
from tiny import Tiny, assert_same_bits, make_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import ConfigError, NonFiniteError
from legato.trainer.checkpoints import find, reading
from legato.trainer.optimization.finite import are_finite


class Hurt(Tiny):
    """Its loss, or only its gradient, is not finite in some batches of some rank."""

    def __init__(self, batches=(), rank=None, only_gradient=False, by=float("nan"), norm=False):
        super().__init__()
        self.batches, self.rank, self.only_gradient, self.by = batches, rank, only_gradient, by
        if norm:
            self.model.insert(1, nn.BatchNorm1d(4))
        self.steps = 0

    def training_step(self, batch, batch_idx):
        hit = batch_idx in self.batches and self.rank in (None, self.global_rank)
        loss = self.loss(batch)
        if hit and self.only_gradient:
            weight = self.model[0].weight
            return loss + torch.sqrt((weight - weight.detach()).abs().sum())  # 0, with a slope of infinity times 0
        return loss * self.by if hit else loss


def fit(made, task, samples=20, loader=None):
    made.fit(task, make_loader(samples) if loader is None else loader)
    return made


# --- raise ------------------------------------------------------------------------------------------------------------
def test_the_first_step_is_checked_at_once(trainer):
    made = trainer(log_every_n_steps=1000)
    task = Hurt(batches=[0])
    with pytest.raises(NonFiniteError, match=r"^The loss of step 1 is nan\."):
        fit(made, task)
    assert made.global_step == 0
    assert_same_bits(task, Tiny())


def test_others_are_found_where_a_point_is_logged(trainer):
    made = trainer(log_every_n_steps=4)
    with pytest.raises(NonFiniteError, match=r"^The loss of step 2 is inf\."):
        fit(made, Hurt(batches=[1], by=float("inf")))
    assert made.global_step == 4


def test_the_error_names_parameters_and_gradients(trainer):
    class Sees(Hurt):
        def on_after_backward(self):
            self.model[0].weight.grad[0, 0] = float("inf")

    with pytest.raises(NonFiniteError) as caught:
        fit(trainer(log_every_n_steps=2), Sees(batches=[1]))
    message = str(caught.value)
    assert "4 of 4 parameters (model.0.weight, model.0.bias, model.2.weight, model.2.bias)" in message
    assert "4 of 4 gradients" in message


class Logarithm(nn.Module):
    def forward(self, inputs):
        return inputs.clamp(max=0).log()


def test_the_error_names_the_first_module_whose_output_is_not_finite(trainer):
    task = Tiny()
    task.model.insert(2, Logarithm())
    pattern = (
        r"first non-finite output came from model\.2 \(Logarithm\), given finite input\. Not finite: \d of 4 gradients"
    )
    with pytest.raises(NonFiniteError, match=pattern):
        fit(trainer(), task)


def test_the_error_names_a_batch_that_is_not_finite_itself(trainer):
    inputs = torch.randn(8, 3)
    inputs[5, 1] = float("nan")
    with pytest.raises(
        NonFiniteError, match=r"latest batch \(batch_idx 1\) itself contains non-finite values: batch\[0\]"
    ):
        fit(trainer(log_every_n_steps=2), Tiny(), loader=DataLoader(TensorDataset(inputs, torch.randn(8, 1)), 4))


def test_a_module_whose_parameters_are_to_blame_is_said_to_be(trainer):
    task = Tiny()
    task.model[2].bias.data[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"model\.2 \(Linear\), whose parameters are not finite"):
        fit(trainer(), task)


def test_the_post_mortem_outlives_a_step_that_fails(trainer):
    class Once(Hurt):
        def training_step(self, batch, batch_idx):
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("not twice")
            return super().training_step(batch, batch_idx)

    with pytest.raises(NonFiniteError, match=r"The loss of step 2 is nan\..*parameters"):
        fit(trainer(log_every_n_steps=2), Once(batches=[1]))


# --- checkpoints ------------------------------------------------------------------------------------------------------
def test_lost_weights_are_not_saved(trainer, tmp_path):
    """The loss of the second step is finite, its gradient is not."""
    callback = lg.callbacks.Checkpoint(every_n_train_steps=1)
    made = trainer(enable_checkpointing=True, callbacks=[callback], log_every_n_steps=1000)
    with pytest.raises(NonFiniteError, match=r"weights after step 2 are not finite: model\.0\.weight"):
        fit(made, Hurt(batches=[1], only_gradient=True))
    kept = find.checkpoints_in(made.run_dir / "checkpoints")
    assert [path.name for path in kept] == ["step-00000001"]
    assert all(value.isfinite().all() for value in reading.read_checkpoint(kept[0])["state_dict"].values())


def test_ignore_trains_on_but_keeps_the_last_good_checkpoint(trainer, caplog):
    made = trainer(nan="ignore", callbacks=[lg.callbacks.Checkpoint(every_n_train_steps=1)], enable_checkpointing=True)
    with caplog.at_level(logging.WARNING, "legato"):
        fit(made, Hurt(batches=[2]))
        made.save_checkpoint(made.run_dir / "asked")
    assert made.global_step == 5
    assert [path.name for path in find.checkpoints_in(made.run_dir / "checkpoints")] == ["step-00000002"]
    assert "Step 3 was not saved" in caplog.text
    assert "weights after step 5 are not finite" in caplog.text
    assert reading.read_checkpoint(made.run_dir / "asked")["global_step"] == 5


def test_frozen_parameters_and_buffers_may_be_infinite(trainer):
    class Masked(Tiny):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((3,), -float("inf")))
            self.frozen = nn.Parameter(torch.full((3,), float("inf")), requires_grad=False)

    made = trainer(callbacks=[lg.callbacks.Checkpoint(every_n_train_steps=1)], enable_checkpointing=True)
    fit(made, Masked())
    assert find.checkpoints_in(made.run_dir / "checkpoints")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_may_be_large(dtype):
    assert are_finite([torch.full((100,), torch.finfo(dtype).max, dtype=dtype)])  # whose sum is not finite
    for bad in ([float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]):
        tensor = torch.ones(50, dtype=dtype)
        tensor[7 : 7 + len(bad)] = torch.tensor(bad)
        assert not are_finite([torch.ones(3), tensor])
    assert are_finite([])
    assert are_finite([torch.zeros(0), torch.ones(3, dtype=torch.int64), torch.tensor(0.0, requires_grad=True)])


# --- skip -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"replicas": 2}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("only_gradient", [False, True])
def test_skip_drops_exactly_the_bad_steps(trainer, options, only_gradient):
    """As if those steps had no batch; with momentum, a scheduler by steps and batch norm."""

    class Scheduled(Hurt):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    class Knows(Scheduled):
        """Restores everything."""

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            if self.trainer.global_step not in (0, 2):
                optimizer.step()
            else:
                optimizer.optimizer._opt_called = True  # lest the scheduler warns
                self.load_state_dict({**self.state_dict(), **self.kept})

        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.metrics.batches_of_step == 1:
                self.kept = {name: value.clone() for name, value in self.named_buffers()}

    every = options.get("accumulate_grad_batches", 1)
    bad = [0, 2 * every]
    skipping, knowing = Scheduled(bad, None, only_gradient, norm=True), Knows(norm=True)
    made = fit(trainer(nan="skip", **options), skipping, samples=80)
    fit(trainer(nan="ignore", **options), knowing, samples=80)
    assert made.state.skipped_steps == 2
    assert made.state.skipped_in_a_row == 0
    assert_same_bits(skipping, knowing)


def test_skip_looks_at_parameters_that_an_optimizer_got_later(trainer):
    class Unfreezing(Hurt):
        def configure_optimizers(self):
            return torch.optim.SGD([self.model[-1].bias], lr=0.1)

        def on_train_epoch_start(self):
            self.optimizers().add_param_group({"params": [self.model[0].weight]})

    made = fit(trainer(nan="skip"), task := Unfreezing(batches=[1], only_gradient=True))
    assert made.state.skipped_steps == 1
    assert all(value.isfinite().all() for value in task.state_dict().values())


def test_what_a_skipped_step_logged_is_dropped(trainer):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Logs(Hurt):
        def __init__(self):
            super().__init__(batches=[1, 4])
            self.error = torchmetrics.MeanMetric(nan_strategy="ignore")

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            self.error(float(batch_idx))
            self.log("mean_idx", self.error, on_step=False, on_epoch=True)
            self.log("idx", float(batch_idx), on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("late", outputs["loss"], on_step=True, on_epoch=True)

        def on_train_epoch_end(self):
            self.log("at_end", 3.0)

    for every in (1, 3):
        made = fit(trainer(nan="skip", log_every_n_steps=every, logger=True), Logs())
        assert made.callback_metrics["idx"] == pytest.approx((0 + 2 + 3) / 3)
        assert made.callback_metrics["mean_idx"] == pytest.approx((0 + 2 + 3) / 3)
        assert made.callback_metrics["at_end"] == 3.0
        assert made.callback_metrics["skipped_steps"] == 2
        assert all(value.isfinite() for value in made.callback_metrics.values())
        points = [json.loads(line) for line in (made.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert all(value == value for point in points for value in point.values())
        skips = {point["step"]: point["skipped_steps"] for point in points if "skipped_steps" in point}
        assert skips == ({1: 0, 2: 1, 3: 1, 4: 1, 5: 2} if every == 1 else {3: 1, 5: 2})


@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_in_a_row_end_the_run(trainer, limit):
    made, task = trainer(nan="skip", nan_skips=limit, max_epochs=2), Hurt(batches=[1, 2, 3])
    with pytest.raises(
        NonFiniteError, match=rf"^{limit + 1} steps in a row, up to step {limit + 2}, .*weights are from step"
    ):
        fit(made, task)
    assert made.global_step == limit + 1
    assert all(parameter.isfinite().all() for parameter in task.parameters())


def test_as_many_as_allowed_do_not(trainer):
    assert fit(trainer(nan="skip", nan_skips=3, max_epochs=2), Hurt(batches=[1, 2, 3])).state.skipped_steps == 6


def test_the_counts_are_saved(trainer):
    options = {"nan": "skip", "nan_skips": 3, "enable_checkpointing": True}
    fit(trainer(max_steps=3, **options), Hurt(batches=[1, 2]))
    made = trainer(max_steps=4, **options)
    made.fit(Hurt(batches=[3]), make_loader(), resume="auto")
    assert made.state.skipped_steps == 3
    with pytest.raises(NonFiniteError, match="4 steps in a row, up to step 5"):
        trainer(max_epochs=2, **options).fit(Hurt(batches=[4]), make_loader(), resume="auto")


def test_skip_needs_automatic_optimization(trainer):
    class Manual(Tiny):
        automatic_optimization = False

    with pytest.raises(ConfigError, match=r"trainer\.nan=skip .*manual optimization"):
        fit(trainer(nan="skip"), Manual())


# --- float16 ----------------------------------------------------------------------------------------------------------
def test_an_overflow_of_scaling_is_no_nan(trainer):
    made = fit(trainer(nan="skip", nan_skips=0, precision="16-mixed"), Hurt(batches=[0, 1], by=1e6))
    assert made.state.skipped_steps == 0
    assert made.strategy.precision.scaler.get_scale() < 65536


def test_a_nan_under_scaling_is_skipped_and_leaves_the_scale(trainer):
    options = {"precision": "16-mixed", "gradient_clip_val": 1.0}
    before = fit(trainer(max_steps=4, **options), Tiny())
    made = fit(trainer(nan="skip", **options), Hurt(batches=[4]))
    assert made.state.skipped_steps == 1
    assert made.strategy.precision.scaler.get_scale() == before.strategy.precision.scaler.get_scale()


def test_raise_under_scaling(trainer):
    with pytest.raises(NonFiniteError, match="The loss of step 1 is nan"):
        fit(trainer(precision="16-mixed"), Hurt(batches=[0]))
    fit(trainer(precision="16-mixed"), Hurt(batches=[0], by=1e6))


# --- two processes ----------------------------------------------------------------------------------------------------
TWO = {"devices": 2, "strategy": "ddp"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reproducible": "bitwise"}, {"precision": "16-mixed"}])
def test_a_nan_on_one_rank_is_skipped_on_both(trainer, options):
    class Checked(Hurt):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            return loss

        def on_train_end(self):
            every = self.trainer.strategy.collectives.gather_objects([p.tolist() for p in self.parameters()])
            assert every[0] == every[1]
            states = self.trainer.strategy.collectives.gather_objects(self.trainer.state.to_dict())
            assert [state["skipped_steps"] for state in states] == [2, 2]

    task = Checked(batches=[1, 3], rank=1, norm=True)
    made = fit(trainer(nan="skip", log_every_n_steps=2, logger=True, **TWO, **options), task, samples=48)
    assert made.state.skipped_steps == 2
    assert made.global_step == 6
    assert all(value.isfinite().all() for value in task.state_dict().values())
    assert made.callback_metrics["loss_epoch"].isfinite()
    assert made.callback_metrics["skipped_steps"] == 2


@pytest.mark.slow
def test_two_processes_skip_as_one_does(trainer):
    options = {"nan": "skip", "reproducible": "bitwise", "replicas": 2}

    class ByReplica(Hurt):
        def training_step(self, batch, batch_idx):
            bad = batch_idx in (1, 3) and self.trainer.metrics.replica == 1
            return self.loss(batch) * (float("nan") if bad else 1.0)

    alone, together = ByReplica(norm=True), ByReplica(norm=True)
    fit(trainer(**options), alone, samples=48)
    fit(trainer(**options, **TWO), together, samples=48)
    assert_same_bits(alone, together)


@pytest.mark.slow
def test_the_rank_that_is_to_blame_tells_its_findings(trainer):
    with pytest.raises(NonFiniteError) as caught:
        fit(trainer(log_every_n_steps=2, **TWO), Hurt(batches=[1], rank=1), samples=48)
    assert "The loss of step 2 is" in str(caught.value)
    assert "Rank 1: " in str(caught.value)


@pytest.mark.slow
def test_all_ranks_are_told_of_weights_that_one_of_them_has_lost(trainer):
    class Lost(Tiny):
        def on_step_end(self):
            if self.trainer.global_step == 1:
                with torch.no_grad():
                    self.model[0].weight.mul_(float("inf") if self.global_rank == 1 else 1.0)
                names = self.trainer.current_run.bad_weights()
                every = self.trainer.strategy.collectives.gather_objects(names)
                assert every == [["model.0.weight"], ["model.0.weight"]]

    fit(trainer(nan="ignore", reproducible="off", max_steps=1, **TWO), Lost(), samples=48)
