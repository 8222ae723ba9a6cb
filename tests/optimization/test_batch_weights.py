"""A step's gradient is the mean weighted by training_step's weights, on any number of processes."""

import json

import pytest
import torch
from tiny import Memory
from torch import nn
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import TaskError
from legato.lab.watchers import STEPS_FILE, StepReport

SAMPLES, LENGTH, WORDS = 22, 6, 16
generator = torch.Generator().manual_seed(3)
INPUTS = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
LENGTHS = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]
TARGETS = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator).masked_fill(PADDING, -100)


class Words(lg.Task):
    """Predicts words of padded sentences; its loss is a mean over words."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, WORDS))

    def tensor_plan(self):
        return {"model.1": "column", "model.3": "row"}

    def loss(self, batch, reduction="mean"):
        return nn.functional.cross_entropy(self.model(batch[0]).transpose(1, 2), batch[1], reduction=reduction)

    def training_step(self, batch, batch_idx):
        loss, words = self.loss(batch), (batch[1] != -100).sum()
        self.log("train/loss", loss, batch_size=words, on_step=True, on_epoch=True)
        return {"loss": loss, "weight": words}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class TwoLosses(Words):
    """Trains two networks, each with a loss and an optimizer."""

    def __init__(self):
        super().__init__()
        self.second_model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))

    def losses(self, batch, reduction="mean"):
        second_loss = nn.functional.cross_entropy(
            self.second_model(batch[0]).transpose(1, 2), batch[1], reduction=reduction
        )
        return [self.loss(batch, reduction), second_loss]

    def training_step(self, batch, batch_idx):
        return {"loss": self.losses(batch), "weight": int((batch[1] != -100).sum())}

    def configure_optimizers(self):
        return [torch.optim.SGD(model.parameters(), lr=0.5) for model in (self.model, self.second_model)]


def flat(task):
    return torch.cat([parameter.detach().flatten().double() for parameter in task.parameters()])


def sentences(samples=SAMPLES, batch_size=2):
    return DataLoader(list(zip(INPUTS[:samples], TARGETS[:samples], strict=True)), batch_size)


def by_hand(samples_of_step, task=None, clip=None, samples=SAMPLES, scaler=None):
    """Return the weights after two epochs of steps whose loss is the sum over their words divided by their number."""
    task = (task or Words()).to(torch.float32 if scaler else torch.float64)
    optimizers = task.configure_optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    steps = [slice(start, min(start + samples_of_step, samples)) for start in range(0, samples, samples_of_step)]
    for place in [*steps, *steps]:
        batch = INPUTS[place], TARGETS[place]
        task.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            losses = task.losses(batch, "sum") if isinstance(task, TwoLosses) else [task.loss(batch, "sum")]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss = loss / (batch[1] != -100).sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(task.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
    return flat(task)


def trained(trainer, task=None, samples=SAMPLES, **options):
    task = task or Words()
    trainer(**{"max_epochs": 2, "precision": "64-true", **options}).fit(task, sentences(samples))
    return flat(task)


def assert_equal_weights(weights, expected, most=1e-12):
    assert float((weights - expected).abs().max()) < most


# --- one process ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batches", "options"),
    [
        (4, {"accumulate_grad_batches": 4}),
        (4, {"accumulate_grad_batches": 2, "replicas": 2}),
        (3, {"replicas": 3}),
        (3, {"replicas": 3, "reproducible": "bitwise"}),
        (4, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}),
        (4, {"accumulate_grad_batches": 4, "nan": "skip"}),
        (4, {"accumulate_grad_batches": 2, "strategy": "data_parallel", "devices": 2, "replicas": 2}),
    ],
)
def test_a_step_is_the_mean_over_its_words(trainer, batches, options):
    expected = by_hand(2 * batches, clip=options.get("gradient_clip_val"))
    assert_equal_weights(trained(trainer, **options), expected)


def test_chunks_of_a_batch_weigh_as_many_as_their_words(trainer):
    options = {"strategy": "data_parallel", "devices": 2, "accumulate_grad_batches": 2}
    assert_equal_weights(trained(trainer, **options), by_hand(4))
    options = {"strategy": {"name": "ddp_model_parallel", "micro_batches": 2}, "devices": 2}
    assert_equal_weights(trained(trainer, **options, accumulate_grad_batches=2), by_hand(4))


def test_each_of_several_losses_is_weighted(trainer):
    weights = trained(trainer, TwoLosses(), accumulate_grad_batches=4)
    assert_equal_weights(weights, by_hand(8, TwoLosses()))


def test_a_scaler_sees_weighted_means(trainer):
    weights = trained(trainer, accumulate_grad_batches=4, precision="16-mixed")
    assert_equal_weights(weights, by_hand(8, scaler=torch.amp.GradScaler("cpu")), 1e-3)  # half precision has 11 bits


def test_closures_evaluate_weighted_means(trainer):
    class Closures(Words):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    task = Closures().double()
    optimizer = task.configure_optimizers()
    batch = INPUTS[:4], TARGETS[:4]

    def closure():
        task.zero_grad()
        loss = task.loss(batch, "sum") / (batch[1] != -100).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    weights = trained(trainer, Closures(), samples=4, accumulate_grad_batches=2, max_epochs=1)
    assert_equal_weights(weights, flat(task), 1e-6)


def test_sparse_gradients_are_divided(trainer):
    class Sparse(Words):
        def __init__(self):
            super().__init__()
            self.model[0].sparse = True

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    assert_equal_weights(trained(trainer, Sparse(), accumulate_grad_batches=4), by_hand(8, Sparse()))


def test_batches_that_are_left_out_weigh_nothing(trainer):
    class LeavesOut(Words):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    task = Words().double()
    optimizer = task.configure_optimizers()
    batch = INPUTS[[0, 1, 4, 5]], TARGETS[[0, 1, 4, 5]]
    (task.loss(batch, "sum") / (batch[1] != -100).sum()).backward()
    optimizer.step()
    weights = trained(trainer, LeavesOut(), samples=6, accumulate_grad_batches=3, max_epochs=1)
    assert_equal_weights(weights, flat(task))


def test_batches_without_words_change_nothing(trainer):
    class Padded(Words):
        def training_step(self, batch, batch_idx):
            batch = batch[0], torch.full_like(batch[1], -100)
            return {"loss": self.loss(batch).nan_to_num(), "weight": 0}

    assert_equal_weights(trained(trainer, Padded()), flat(Words()))


def test_weights_that_are_all_equal_are_no_weights(trainer):
    class Plain(Words):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    class Equal(Words):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch), "weight": len(batch[0])}

    weights = [trained(trainer, kind(), accumulate_grad_batches=3) for kind in (Plain, Equal)]
    assert_equal_weights(*weights)


def test_logged_values_take_the_same_weight(trainer):
    memory, task = Memory(), Words().double()
    words = (TARGETS[:8] != -100).sum()
    expected = (task.loss((INPUTS[:8], TARGETS[:8]), "sum") / words).item()
    options = {"precision": "64-true", "logger": memory, "log_every_n_steps": 1}
    trainer(max_epochs=1, accumulate_grad_batches=4, **options).fit(Words(), sentences(8))
    for name in ("train/loss_step", "train/loss_epoch"):
        assert memory.of(name) == [(1, pytest.approx(expected, abs=1e-12))]


def test_a_replayed_step_reports_the_mean_over_words(trainer):
    options = {"precision": "64-true", "logger": Memory(), "callbacks": [StepReport(1, 2)]}
    made = trainer(max_epochs=2, accumulate_grad_batches=4, **options)
    made.fit(Words(), sentences(8))
    first, second = map(json.loads, (made.run_dir / STEPS_FILE).read_text().splitlines())
    batch = INPUTS[:8], TARGETS[:8]
    expected = (Words().double().loss(batch, "sum") / (batch[1] != -100).sum()).item()
    assert first["loss"] == pytest.approx(expected, abs=1e-12)
    assert second["loss"] < first["loss"]


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_a_resumed_run_has_the_bits_of_one_without_a_break(trainer, tmp_path, precision):
    weights = trained(trainer, accumulate_grad_batches=4, precision=precision)
    task = Words()
    made = trainer(max_steps=2, accumulate_grad_batches=4, precision=precision)
    made.fit(task, sentences())
    made.save_checkpoint(tmp_path / "middle")
    assert made.state.weight_scale > 0.0
    resumed, options = Words(), {"accumulate_grad_batches": 4, "precision": precision}
    trainer(max_epochs=2, **options).fit(resumed, sentences(), ckpt_path=tmp_path / "middle")
    assert torch.equal(flat(resumed), weights)


# --- several processes ------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "options"),
    [
        (4, {"strategy": "ddp", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (3, {"strategy": "ddp", "replicas": 3}),
        (4, {"strategy": "zero1", "accumulate_grad_batches": 2}),
        (3, {"strategy": "fsdp", "replicas": 3}),  # with masked turns
        (4, {"strategy": {"name": "mesh", "tensor": 2}, "accumulate_grad_batches": 4}),
        (4, {"strategy": {"name": "mesh", "pipeline": 2}, "accumulate_grad_batches": 4}),
        (4, {"strategy": {"name": "mesh", "pipeline": 2, "data": 2}, "devices": 4, "accumulate_grad_batches": 2}),
        (4, {"strategy": {"name": "mesh", "pipeline": 2, "shard": 2}, "devices": 4, "accumulate_grad_batches": 2}),
        (4, {"strategy": {"name": "ddp", "elastic": True}, "accumulate_grad_batches": 2}),
    ],
)
def test_every_strategy_has_the_mean_over_words(trainer, batches, options):
    expected = by_hand(2 * batches, clip=options.get("gradient_clip_val"))
    assert_equal_weights(trained(trainer, **{"devices": 2, **options}), expected)


@pytest.mark.slow
def test_norms_of_shards_clip_the_mean_over_words(trainer):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    weights = trained(trainer, devices=2, strategy="fsdp", **options)
    assert_equal_weights(weights, by_hand(8, clip=0.1), 1e-7)  # torch computes norms of shards in float32


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 3), ("fsdp", 2)])  # fsdp with masked turns
def test_bitwise_has_the_bits_of_one_process(trainer, strategy, devices):
    options = {"replicas": 3, "reproducible": "bitwise", "gradient_clip_val": 0.1, "precision": "32"}
    alone = trained(trainer, **options)
    assert torch.equal(trained(trainer, devices=devices, strategy=strategy, **options), alone)


@pytest.mark.slow
def test_a_rank_without_a_batch_in_the_first_step_learns_of_weights(trainer):
    weights = trained(trainer, samples=2, devices=2, strategy="ddp")
    assert_equal_weights(weights, by_hand(2, samples=2))
    assert_equal_weights(trained(trainer, samples=10, devices=2, strategy="ddp"), by_hand(4, samples=10))


# --- mistakes ---------------------------------------------------------------------------------------------------------
class Sometimes(Words):
    """Returns a weight with some batches."""

    def __init__(self, weighted):
        super().__init__()
        self.weighted = weighted

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output if self.weighted(batch_idx, self.global_rank) else output["loss"]


@pytest.mark.parametrize("weighted", [{1}, {0, 1, 2, 3}, {4, 5, 6, 7, 8, 9, 10}])
def test_a_weight_for_some_batches_only_is_refused(trainer, weighted):
    with pytest.raises(TaskError, match="for every batch, or for none"):
        trained(trainer, Sometimes(lambda index, rank: index in weighted), accumulate_grad_batches=2)


@pytest.mark.slow
def test_a_weight_on_some_ranks_only_is_refused(trainer):
    with pytest.raises(TaskError, match="for every batch, or for none"):
        trained(trainer, Sometimes(lambda index, rank: rank == 0), devices=2, strategy="ddp")


@pytest.mark.parametrize(
    ("weight", "came"),
    [
        (-1, "-1"),
        (float("nan"), "nan"),
        ("many", "'many'"),
        (torch.ones(3), r"shape \(3,\)"),
        (torch.tensor(-2.0), "-"),
    ],
)
def test_what_is_no_weight_is_refused(trainer, weight, came):
    class Wrong(Words):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch), "weight": weight}

    with pytest.raises(TaskError, match=f"{came}.*expected a nonnegative number"):
        trained(trainer, Wrong())


@pytest.mark.slow
def test_servers_have_no_weights(trainer):
    class Remote(Words):
        def remote_modules(self):
            return {"words": lambda: nn.Embedding(WORDS, 8)}

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.model[1:](self.words(batch[0])).transpose(1, 2), batch[1])
            return {"loss": loss + self.model[0].weight.sum() * 0.0, "weight": 1}

    with pytest.raises(TaskError, match="ddp_rpc sends gradients to its servers before it knows the weights"):
        trained(trainer, Remote(), devices=1, strategy={"name": "ddp_rpc", "servers": 1}, precision="32")
