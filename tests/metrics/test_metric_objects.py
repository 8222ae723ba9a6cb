"""torchmetrics objects have the value over all samples of their stage."""

from functools import partial

import pytest
import torch
import torchmetrics
from shared_processes import run_cases
from tiny import Tiny, make_data, make_loader, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from legato.base.errors import TaskError
from legato.tasks.task import Task


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return all results of two processes, from one start."""
    folder = tmp_path_factory.mktemp("two")
    correlate(folder, save_to=folder / "one", max_steps=1, replicas=2)
    options = {"strategy": "ddp", "devices": 2}
    cases = {
        ("correlated", 2): partial(correlate, folder, 2, replicas=2),
        ("correlated", 4): partial(correlate, folder, 2, replicas=4),
        ("stopped", 2): partial(correlate, folder, 2, save_to=folder / "two", max_steps=1, replicas=2),
        ("stopped", 4): partial(correlate, folder, 2, save_to=folder / "four", max_steps=1, replicas=4),
        ("resumed", 2): partial(correlate, folder, 2, folder / "one"),
        ("resumed", 4): partial(correlate, folder, 2, folder / "four"),
        "without a batch": lambda: make_trainer("unused", **options).validate(Computes(), make_loader(4)),
    }
    for reproducible in ("order", "bitwise"):
        more = {**options, "reproducible": reproducible, "replicas": 2}
        cases["means", reproducible] = partial(measure_means, (1, 2, 3, 5), **more)
        cases["composed", reproducible] = partial(measure_composed, **more)
    results = run_cases(cases, 2, folder / "cases")
    results["folder"] = folder
    return results


# --- torchmetrics -----------------------------------------------------------------------------------------------------
class Median(torchmetrics.Metric):
    """Keeps everything that it saw."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, values):
        self.seen.append(values.flatten())

    def compute(self):
        return torch.cat(self.seen).median()


class Metered(Tiny):
    """Logs metrics of three kinds: a weighted mean, sums, and everything it ever saw."""

    def __init__(self, on_step=False):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.auroc = torchmetrics.classification.BinaryAUROC()
        self.val_auroc = torchmetrics.classification.BinaryAUROC()
        self.on_step = on_step

    def training_step(self, batch, batch_idx):
        outputs, truth = self(batch[0]).flatten().sigmoid(), (batch[1] > 0).flatten().int()
        self.mean(batch[0])
        self.accuracy(outputs, truth)
        self.auroc.update(outputs, truth)
        self.log_dict(
            {"mean": self.mean, "accuracy": self.accuracy, "auroc": self.auroc}, on_step=self.on_step, on_epoch=True
        )
        return self.loss(batch) * 0

    def validation_step(self, batch, batch_idx):
        outputs, truth = self(batch[0]).flatten().sigmoid(), (batch[1] > 0).flatten().int()
        self.val_auroc.update(outputs, truth)
        self.log("val_auroc", self.val_auroc)


def expected_metrics(task):
    inputs, targets = make_data(18).tensors
    with torch.no_grad():
        outputs = task(inputs).flatten().sigmoid()
    truth = (targets > 0).flatten().int()
    return {
        "mean": inputs.mean().item(),
        "accuracy": ((outputs > 0.5) == truth).float().mean().item(),
        "auroc": torchmetrics.functional.auroc(outputs, truth, task="binary").item(),
    }


def test_the_values_of_an_evaluation_are_in_the_order_of_logging(tmp_path):
    class Mixed(Metered):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val_loss", self.loss(batch))

    (values,) = make_trainer(tmp_path).validate(Mixed(), make_loader())
    assert list(values) == ["val_auroc", "val_loss"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_metric_objects_have_the_value_over_all_samples_of_each_epoch(play, replicas, reproducible):
    task = Metered()
    made = play(task, max_epochs=2, replicas=replicas, reproducible=reproducible)
    for name, value in expected_metrics(task).items():
        assert made.memory.of(name) == [
            (made.global_step // 2, pytest.approx(value)),
            (made.global_step, pytest.approx(value)),
        ]
    assert [value for _, value in made.memory.of("val_auroc")] == [pytest.approx(expected_metrics(task)["auroc"])] * 2
    assert task.auroc.preds == []  # nothing of the epoch is kept


def test_metric_objects_by_step_have_the_value_of_the_batch(play):
    task = Metered(on_step=True)
    made = play(task)
    means = [batch[0].mean().item() for batch in make_loader(18)]
    assert [value for _, value in made.memory.of("mean_step")] == pytest.approx(means)
    assert made.memory.of("mean_epoch") == [(5, pytest.approx(expected_metrics(task)["mean"]))]


def test_metric_objects_logged_by_step_only_do_not_grow_over_epochs(play):
    class Steps(Tiny):
        def __init__(self):
            super().__init__()
            self.median = Median()

        def training_step(self, batch, batch_idx):
            self.median(batch[0])
            self.log("median", self.median)
            return self.loss(batch)

    task = Steps()
    made = play(task, max_epochs=3)
    medians = [batch[0].median().item() for batch in make_loader(18)]
    assert [value for _, value in made.memory.of("median")] == medians * 3
    assert task.median.seen == []


def test_a_collection_of_metrics(play):
    class Collects(Tiny):
        def __init__(self):
            super().__init__()
            self.metrics = torchmetrics.MetricCollection(
                {"low": torchmetrics.MinMetric(), "high": torchmetrics.MaxMetric(), "all": torchmetrics.SumMetric()}
            )

        def training_step(self, batch, batch_idx):
            self.metrics.update(batch[0])
            self.log_dict(self.metrics, on_step=False, on_epoch=True)
            return self.loss(batch)

    made, inputs = play(Collects()), make_data(18).tensors[0]
    values = {name: made.callback_metrics[name].item() for name in ("low", "high", "all")}
    assert values == pytest.approx(
        {"low": inputs.min().item(), "high": inputs.max().item(), "all": inputs.sum().item()}
    )


def test_a_metric_of_two_stages_is_warned_of(play, caplog):
    class Shares(Metered):
        def validation_step(self, batch, batch_idx):
            self.accuracy.update(torch.ones(1), torch.ones(1).int())
            self.log("val", self.accuracy)

    play(Shares())
    messages = [record.getMessage() for record in caplog.records if "same BinaryAccuracy" in record.getMessage()]
    assert len(messages) == 1
    assert "is logged in train and in validation" in messages[0]


def test_a_metric_of_several_numbers_says_how_to_log_it(play):
    class Curve(Tiny):
        def __init__(self):
            super().__init__()
            self.classes = torchmetrics.classification.MulticlassAccuracy(2, average=None)

        def training_step(self, batch, batch_idx):
            self.classes.update((batch[1] > 0).flatten().int(), (batch[1] > 0).flatten().int())
            self.log("classes", self.classes, on_step=False, on_epoch=True)
            return self.loss(batch)

    with pytest.raises(TaskError, match=r"MulticlassAccuracy.compute\(\).*log_dict"):
        play(Curve())


# --- states that cannot be merged before they are read ----------------------------------------------------------------
class Correlated(Tiny):
    """Logs correlations, whose states have no reduction, beside a mean."""

    def __init__(self):
        super().__init__()
        self.correlation, self.validated = torchmetrics.PearsonCorrCoef(), torchmetrics.PearsonCorrCoef()
        self.mean = torchmetrics.MeanMetric()
        self.values, self.pairs = {}, []

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.correlation.update(outputs[:, 0].detach(), batch[1][:, 0])
        self.mean.update(batch[0])
        self.log_dict({"correlation": self.correlation, "mean": self.mean}, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(outputs, batch[1])

    def validation_step(self, batch, batch_idx):
        self.pairs.append((self(batch[0])[:, 0], batch[1][:, 0]))

    def on_validation_epoch_end(self):
        """Update outside of all batches."""
        self.validated.update(*map(torch.cat, zip(*self.pairs, strict=True)))
        self.pairs.clear()
        self.log("validated", self.validated)

    def on_train_epoch_end(self):
        for name, value in self.trainer.callback_metrics.items():
            self.values[f"{name} {self.current_epoch}"] = value.item()


def correlate(folder, processes=1, resume=None, save_to=None, **options):
    """Return the epochs' values; the run, or its rest, is that of two epochs of three steps with two replicas."""
    task, strategy = Correlated(), "single" if processes == 1 else "ddp"
    made = make_trainer(folder, strategy=strategy, devices=processes, max_epochs=2, num_sanity_val_steps=0, **options)
    made.fit(task, make_loader(18), make_loader(18), resume=resume)
    if save_to is not None:
        made.save_checkpoint(save_to)
    return task.values


@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_metric_without_reduction_goes_on_in_the_middle_of_an_epoch(tmp_path, replicas, reproducible):
    options = {"replicas": replicas, "reproducible": reproducible}
    uninterrupted = correlate(tmp_path, **options)
    assert uninterrupted.keys() >= {"correlation 0", "correlation 1", "validated 1", "mean 1"}
    for stop in (1, 2, 4):
        correlate(tmp_path, save_to=tmp_path / f"{stop}", max_steps=stop, **options)
        resumed = correlate(tmp_path, resume=tmp_path / f"{stop}", **options)
        assert resumed == {name: uninterrupted[name] for name in resumed}
        assert "correlation 1" in resumed


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "replicas"), [(2, 1, 2), (1, 2, 2), (2, 2, 4)])
def test_a_metric_without_reduction_goes_on_with_other_processes(two, before, after, replicas):
    """Also in the epochs after: what swaps states for the sake of the resumed epoch does so no longer."""
    folder = two["folder"]
    uninterrupted = two["correlated", replicas] if before == 2 else correlate(folder, replicas=replicas)
    resumed = two["resumed", replicas] if after == 2 else correlate(folder, resume=folder / "two")
    assert "correlation 1" in resumed
    assert resumed == pytest.approx(uninterrupted, rel=1e-4)


# --- states reduced by "mean" -----------------------------------------------------------------------------------------
class Running(torchmetrics.Metric):
    """The mean of all updates, in a state merged by "mean", and a state that is no valid number at first."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(float("inf")), dist_reduce_fx="mean")
        self.add_state("stacked", torch.tensor(float("nan")), dist_reduce_fx=None)

    def update(self, value):
        before = self.mean if self._update_count > 1 else torch.tensor(0.0)
        self.mean = before + (value - before) / self._update_count
        self.stacked = value * 1.0

    def compute(self):
        return self.mean + 0 * self.stacked.sum()


class Averaging(Tiny):
    def __init__(self):
        super().__init__()
        self.running = Running()

    def validation_step(self, batch, batch_idx):
        self.running.update(batch[0].sum())
        self.log("mean", self.running)


def measure_means(batches, **options):
    made = make_trainer("unused", **options)
    loaders = [
        torch.utils.data.DataLoader([(torch.tensor([float(3 * i)]), 0) for i in range(1, n + 1)], 1) for n in batches
    ]
    return [made.validate(Averaging(), loader, verbose=False)[0]["mean"] for loader in loaders]


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_a_mean_over_ranks_counts_updates_and_not_ranks(two, reproducible):
    """One batch leaves a rank without any; three are two and one."""
    expected = measure_means((1, 2, 3, 5), reproducible=reproducible, replicas=2)
    assert expected == pytest.approx([3.0, 4.5, 6.0, 9.0])
    assert two["means", reproducible] == pytest.approx(expected)


class Composed(Tiny):
    """Logs a sum of two metrics, one of which it also logs alone, and a mean state within a sum."""

    def __init__(self):
        super().__init__()
        self.mean, self.total, self.running = torchmetrics.MeanMetric(), torchmetrics.SumMetric(), Running()
        self.summed, self.twice = self.mean + self.total, self.running * 2

    def validation_step(self, batch, batch_idx):
        for metric in (self.mean, self.total, self.running):
            metric.update(batch[0].sum())
        self.log_dict({"both": self.summed, "mean": self.mean, "twice": self.twice})


def measure_composed(**options):
    made, measured = make_trainer("unused", **options), []
    for count in (1, 3):
        loader = torch.utils.data.DataLoader([(torch.tensor([float(i)]), 0) for i in range(1, count + 1)], 1)
        measured.append(made.validate(Composed(), loader, verbose=False)[0])
    return measured


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_a_metric_made_of_others_is_that_of_one_process(two, reproducible):
    alone = measure_composed(reproducible=reproducible, replicas=2)
    assert alone == [{"both": 2.0, "mean": 1.0, "twice": 2.0}, {"both": 8.0, "mean": 2.0, "twice": 4.0}]
    assert two["composed", reproducible] == alone


def test_an_epoch_that_a_fit_ended_within_is_not_in_the_next_fit_but_in_a_checkpoint(tmp_path, trainer):
    class Mean(Task):
        def __init__(self):
            super().__init__()
            self.layer, self.mean = nn.Linear(1, 1), torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean(batch.mean())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task, loader = Mean(), DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)
    cut = trainer(max_steps=2)
    cut.fit(task, loader)
    cut.save_checkpoint(tmp_path / "cut")
    full = trainer(max_epochs=1)
    full.fit(task, loader)
    assert float(full.callback_metrics["mean"]) == 3.5
    resumed = trainer(max_epochs=1)
    resumed.fit(Mean(), loader, resume=tmp_path / "cut")
    assert float(resumed.callback_metrics["mean"]) == 3.5


# --- never logged -----------------------------------------------------------------------------------------------------
class Gathers(Tiny):
    """Counts samples in metrics that it never logs, and steps in buffers."""

    def __init__(self, computes=False):
        super().__init__()
        self.computes = computes
        self.counted, self.kept = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("own_steps", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        self.counted.update(len(batch[0]))
        self.kept.update(batch[0].sum())
        self.steps += 1
        self.own_steps += 1
        return self.loss(batch)

    def on_train_epoch_end(self):
        if self.computes:
            self.counted.compute()
            self.kept.compute()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reproducible": "bitwise"}])
def test_what_a_task_gathers_itself_comes_back(trainer, capfd, options):
    alone, two, computed = Gathers(), Gathers(), Gathers(computes=True)
    trainer(replicas=2, **options).fit(alone, make_loader(37))
    assert alone.counted.compute() == 37
    assert "neither logged nor computed" not in capfd.readouterr().err
    for task in (two, computed):
        trainer(strategy="ddp", devices=2, **options).fit(task, make_loader(37))
        unread = capfd.readouterr().err.count("were never reduced across processes: counted, kept. Log them")
        assert unread == (task is two)
        assert task.counted.compute() == 37
        assert sorted(task.kept.compute().tolist()) == pytest.approx(sorted(alone.kept.compute().tolist()))
        assert task.steps == task.own_steps == 5
    if not options:  # bitwise begins each run with empty states
        trainer(strategy="ddp", devices=2, **options).fit(two, make_loader(37))
        assert two.counted.compute() == 74
        assert two.own_steps == 10


# --- a rank without a batch -------------------------------------------------------------------------------------------
class Computes(Tiny):
    """Computes metrics in a hook, whose list states are matrices, integers and one number."""

    def __init__(self):
        super().__init__()
        self.auroc = torchmetrics.classification.MulticlassAUROC(num_classes=3)
        self.kept, self.mean = torchmetrics.CatMetric(), torchmetrics.MeanMetric()

    def validation_step(self, batch, batch_idx):
        labels = torch.arange(len(batch[0])) % 3
        self.auroc.update((batch[0][:, :1] * (labels.unsqueeze(1) + torch.arange(3))).softmax(1), labels)
        self.kept.update(batch[0].sum())
        self.mean.update(batch[0])

    def on_validation_epoch_end(self):
        self.log_dict({"auroc": self.auroc.compute(), "kept": self.kept.compute().sum(), "mean": self.mean.compute()})


@pytest.mark.slow
def test_a_hook_computes_metrics_though_a_rank_had_no_batch(two, trainer):
    (expected,) = trainer().validate(Computes(), make_loader(4))
    (values,) = two["without a batch"]
    assert values == pytest.approx(expected)


# --- where a metric comes from ----------------------------------------------------------------------------------------
class Late(Tiny):
    """Logs a metric created in a hook, or one that is not a module of the task."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = [torchmetrics.MeanMetric()] if hidden else []

    def on_train_start(self):
        self.late = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        metric = self.hidden[0] if self.hidden else self.late
        metric.update(batch[0])
        self.log("mean", metric, on_step=False, on_epoch=True)
        return self.loss(batch)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_a_metric_that_a_hook_made_counts_all_replicas(play, replicas, reproducible):
    made = play(Late(hidden=False), replicas=replicas, reproducible=reproducible)
    assert made.callback_metrics["mean"].item() == pytest.approx(make_data(18).tensors[0].mean().item())


def test_a_metric_that_is_no_module_of_the_task_is_refused(play):
    with pytest.raises(TaskError, match=r"log\('mean'\): the MeanMetric is not a module of the task.*self.metric ="):
        play(Late(hidden=True))
