"""validate, test and predict count every sample once and return its metrics."""

import pytest
import torch
from tiny import Tiny, Validated, make_data, make_loader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

import legato as lg
from legato.base.errors import CheckpointError, DataError


class Measured(Validated):
    """Logs the mean of the first input under `mean`, and counts batches and samples."""

    def __init__(self):
        super().__init__()
        self.sizes, self.loaders_seen = [], []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.sizes.append(len(batch[0]))
        self.loaders_seen.append((dataloader_idx, batch_idx))
        self.log("mean", batch[0].mean())
        self.log("samples", float(len(batch[0])), reduce_fx="sum")

    test_step = validation_step


def mean_of(samples):
    return make_data(samples).tensors[0].mean().item()


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_mean_is_over_samples_also_with_a_short_last_batch(trainer, stage, replicas):
    made = trainer(replicas=replicas)
    results = getattr(made, stage)(Measured(), make_loader(18))
    assert results == [{"mean": pytest.approx(mean_of(18), rel=1e-6), "samples": 18.0}]
    assert {name: value.item() for name, value in made.callback_metrics.items()} == results[0]


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_several_loaders_have_a_result_each(trainer, stage):
    task, made = Measured(), trainer()
    results = getattr(made, stage)(task, [make_loader(18), make_loader(7)])
    assert results == [
        {
            f"mean/dataloader_idx_{index}": pytest.approx(mean_of(samples), rel=1e-6),
            f"samples/dataloader_idx_{index}": float(samples),
        }
        for index, samples in enumerate((18, 7))
    ]
    assert task.loaders_seen == [*((0, batch) for batch in range(5)), (1, 0), (1, 1)]


def test_a_name_may_do_without_the_loader(trainer):
    class Shared(Validated):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("all", float(len(batch[0])), reduce_fx="sum", add_dataloader_idx=False)
            self.log("both", 1.0 + dataloader_idx, on_step=True, on_epoch=True)

        def on_validation_epoch_end(self):
            self.log("end", 5.0)

    results = trainer().validate(Shared(), [make_loader(18), make_loader(7)])
    shared = {"all": 25.0, "end": 5.0}
    assert results == [
        {**shared, f"both/dataloader_idx_{i}": 1.0 + i, f"both_epoch/dataloader_idx_{i}": 1.0 + i} for i in range(2)
    ]


@pytest.mark.slow
def test_nothing_of_an_earlier_run_is_returned(trainer):
    class Logs(Measured):
        def training_step(self, batch, batch_idx):
            self.log("train", 1.0)
            return self.loss(batch)

    made, task = trainer(log_every_n_steps=1), Logs()
    made.fit(task, make_loader(), make_loader())
    assert set(made.callback_metrics) == {"train", "mean", "samples"}
    assert [set(result) for result in made.test(task, make_loader())] == [{"mean", "samples"}]


def test_validation_in_fit_is_what_validate_finds(trainer):
    task, made = Measured(), trainer(max_epochs=2)
    made.fit(task, make_loader(), make_loader(18))
    within = made.callback_metrics["mean"].item()
    assert made.validate(task, make_loader(18))[0]["mean"] == within


def test_a_default_that_is_no_loaders_index_stays(trainer):
    scales = []

    class Scaled(Tiny):
        def validation_step(self, batch, batch_idx, scale=2.5):
            scales.append(scale)

    trainer().validate(Scaled(), make_loader(4))
    trainer().validate(Scaled(), [make_loader(4), make_loader(4)])
    assert scales == [2.5, 0, 1]


@pytest.mark.parametrize("steps", ["validation_step", "test_step", "predict_step"])
@pytest.mark.parametrize("arity", [1, 2, 3])
def test_a_step_takes_as_much_as_it_wants(trainer, steps, arity):
    calls = []
    functions = {
        1: lambda self, batch: calls.append(1),
        2: lambda self, batch, batch_idx: calls.append(2),
        3: lambda self, batch, batch_idx, dataloader_idx: calls.append(3),
    }
    task = type("Some", (Tiny,), {steps: functions[arity]})()
    stage = {"validation_step": "validate", "test_step": "test", "predict_step": "predict"}[steps]
    getattr(trainer(), stage)(task, make_loader(8))
    assert calls == [arity, arity]


# --- predict ----------------------------------------------------------------------------------------------------------
class Predicts(Tiny):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0], batch_idx, dataloader_idx


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_predictions_come_in_the_order_of_the_data(trainer, replicas):
    predictions = trainer(replicas=replicas).predict(Predicts(), make_loader(18))
    assert torch.equal(torch.cat([inputs for inputs, _, _ in predictions]), make_data(18).tensors[0])
    assert [len(inputs) for inputs, _, _ in predictions] == [4, 4, 4, 4, 2]


def test_several_loaders_give_a_list_each(trainer):
    predictions = trainer().predict(Predicts(), [make_loader(18), make_loader(7)])
    assert [len(of_loader) for of_loader in predictions] == [5, 2]
    for samples, of_loader, index in zip((18, 7), predictions, (0, 1), strict=True):
        assert torch.equal(torch.cat([inputs for inputs, _, _ in of_loader]), make_data(samples).tensors[0])
        assert [place for _, *place in of_loader] == [[batch, index] for batch in range(len(of_loader))]


def test_without_a_predict_step_forward_is_called(trainer):
    task, inputs = Tiny(), make_data(18).tensors[0]
    predictions = trainer().predict(task, DataLoader(inputs, batch_size=4))
    with torch.no_grad():
        assert all(map(torch.equal, predictions, map(task, inputs.split(4))))  # other sizes may have other last bits


def test_predictions_may_be_left_out(trainer):
    calls = []

    class Counts(Tiny):
        def predict_step(self, batch, batch_idx):
            calls.append(batch_idx)

    assert trainer().predict(Counts(), make_loader(), return_predictions=False) == []
    assert calls == [0, 1, 2, 3, 4]


# --- how much ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("limit", "sizes"), [(1.0, [4, 4, 4, 4, 2]), (2, [4, 4]), (0.5, [4, 4]), (9, [4, 4, 4, 4, 2])])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_limits(trainer, stage, limit, sizes, replicas):
    task = Measured()
    task.predict_step = lambda batch, batch_idx: task.sizes.append(len(batch[0]))
    name = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
    getattr(trainer(replicas=replicas, **{name: limit}), stage)(task, make_loader(18))
    assert task.sizes == sizes


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_drop_last_drops_the_short_batch_and_no_other(trainer, replicas):
    task = Measured()
    made = trainer(replicas=replicas)
    made.validate(task, make_loader(22, drop_last=True))
    assert task.sizes == [4] * 5


class Stream(IterableDataset):
    def __iter__(self):
        data = make_data(18)
        yield from (data[index] for index in range(18))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: make_loader(18, sampler=SequentialSampler(range(18))),
        lambda: make_loader(18, sampler=DistributedSampler(range(18), num_replicas=4, rank=1, shuffle=False)),
        lambda: DataLoader(make_data(18), batch_sampler=[[0, 1, 2], list(range(3, 18))]),
        lambda: make_loader(18, shuffle=True),
        lambda: make_loader(18, num_workers=1),
    ],
    ids=["stream", "sampler", "distributed", "batches", "shuffled", "worker"],
)
def test_any_loader_is_counted_once(trainer, loader, replicas):
    results = trainer(replicas=replicas).validate(Measured(), loader())
    assert results == [{"mean": pytest.approx(mean_of(18), rel=1e-5), "samples": 18.0}]


def test_a_list_of_batches_within_a_list_is_a_loader(trainer):
    results = trainer().validate(Measured(), [list(make_loader(18))])
    assert results[0]["samples"] == 18.0


def test_validation_with_augmentation_is_the_same_every_time(trainer):
    class Noisy(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("noise", torch.rand(()))

    first = trainer().validate(Noisy(), make_loader())
    torch.rand(3)
    assert trainer().validate(Noisy(), make_loader()) == first


# --- modes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("stage", ["validate", "test", "predict", "fit"])
def test_inference_mode(trainer, stage, inference):
    seen = []

    class Looks(Measured):
        def validation_step(self, batch, batch_idx):
            assert not torch.is_grad_enabled()
            seen.append(torch.is_inference_mode_enabled())

        test_step = predict_step = validation_step

    made = trainer(inference_mode=inference)
    getattr(made, stage)(Looks(), *([make_loader()] * (2 if stage == "fit" else 1)))
    assert set(seen) == {inference}
    assert torch.is_grad_enabled()


def test_a_gradient_may_be_wanted_in_a_test(trainer):
    class Needs(Tiny):
        def test_step(self, batch, batch_idx):
            with torch.enable_grad():
                inputs = batch[0].clone().requires_grad_()
                self(inputs).sum().backward()
            self.log("slope", inputs.grad.abs().mean())

    assert trainer(inference_mode=False).test(Needs(), make_loader())[0]["slope"] > 0


def test_the_mode_of_every_module_is_put_back(trainer):
    task = Measured()
    task.model[0].eval()
    trainer().validate(task, make_loader())
    assert [module.training for module in task.model] == [False, True, True]
    assert task.training


def test_batch_norm_is_left_alone(trainer):
    class Norm(Validated):
        def __init__(self):
            super().__init__()
            self.model.append(nn.BatchNorm1d(1))

    task = Norm()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    trainer().validate(task, make_loader())
    assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())


@pytest.mark.parametrize("name", ["64-true", "bf16-mixed", "bf16-true"])
def test_precision_holds_in_evaluation_too(trainer, name):
    types = set()

    class Looks(Tiny):
        def predict_step(self, batch, batch_idx):
            types.add(self(batch[0]).dtype)

    trainer(precision=name).predict(Looks(), make_loader())
    assert types == {torch.float64 if name == "64-true" else torch.bfloat16}


# --- where the weights come from --------------------------------------------------------------------------------------
def test_a_path_best_and_last_name_the_weights(trainer):
    class Drifts(Measured):
        """The smaller its weight, the better; it grows with every epoch."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def on_train_epoch_end(self):
            with torch.no_grad():
                self.weight += 1

        def validation_step(self, batch, batch_idx):
            self.log("val", self.weight)

        test_step = validation_step

    checkpoint = lg.callbacks.Checkpoint(monitor="val", save_top_k=3)
    made, task = trainer(max_epochs=3, callbacks=checkpoint, enable_checkpointing=True), Drifts()
    made.fit(task, make_loader(), make_loader())
    assert made.test(task, make_loader()) == [{"val": 3.0}]
    best = made.test(task, make_loader(), ckpt_path="best")[0]["val"]
    assert best < 2.0
    path = sorted(checkpoint.best_k_models)[1]
    assert best < made.validate(task, make_loader(), ckpt_path=path)[0]["val"] < 3.0
    assert made.validate(Drifts(), make_loader(), ckpt_path="last")[0]["val"] > best
    assert Drifts.load_from_checkpoint(path).weight > 0


def test_there_is_no_best_where_no_value_was_finite(trainer):
    class Bad(Measured):
        def validation_step(self, batch, batch_idx):
            self.log("val", float("nan"))

    saving = lg.callbacks.Checkpoint("val")
    made = trainer(callbacks=saving, enable_checkpointing=True)
    made.fit(Bad(), make_loader(), make_loader())
    with pytest.raises(CheckpointError, match=r"none was saved with a finite value of 'val'\. Pass ckpt_path='last'"):
        made.test(Measured(), make_loader(), ckpt_path="best")


def test_there_is_no_best_before_a_fit(trainer):
    with pytest.raises(CheckpointError, match="not written one"):
        trainer().test(Measured(), make_loader(), ckpt_path="best")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_data_is_needed(trainer, stage):
    with pytest.raises(DataError, match=f"{stage} needs data"):
        getattr(trainer(), stage)(Measured())


def test_the_task_may_bring_its_loaders(trainer):
    class Brings(Measured):
        def val_dataloader(self):
            return [make_loader(18), make_loader(7)]

        def predict_dataloader(self):
            return DataLoader(make_data(7).tensors[0], batch_size=4)

    assert len(trainer().validate(Brings())) == 2
    assert len(trainer().predict(Brings())) == 2


def test_each_loader_has_the_names_that_it_logged(trainer):
    class Names(Validated):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log(f"own{dataloader_idx}", 1.0 + dataloader_idx, add_dataloader_idx=False)
            if dataloader_idx:
                self.log("late", 2.0, add_dataloader_idx=False, on_step=True, on_epoch=True)
            self.log("shared", 3.0, add_dataloader_idx=False)

        def on_test_epoch_end(self):
            self.log("end", 5.0)

    results = trainer().test(Names(), [make_loader(18), make_loader(7)])
    shared = {"shared": 3.0, "end": 5.0}
    assert results == [{"own0": 1.0, **shared}, {"own1": 2.0, "late": 2.0, "late_epoch": 2.0, **shared}]


def test_predictions_are_returned_unless_they_are_not_wanted(trainer):
    assert len(trainer().predict(Predicts(), make_loader(), return_predictions=None)) == 5
    assert trainer().predict(Predicts(), make_loader(), return_predictions=False) == []


@pytest.mark.parametrize(("loaders", "count"), [(1, 2), (2, 3)])
def test_a_step_of_any_arguments_is_given_the_index_of_the_loader_where_there_are_several(trainer, loaders, count):
    seen = set()

    class Takes(Tiny):
        def predict_step(self, *arguments):
            seen.add(len(arguments))

    trainer().predict(Takes(), [make_loader()] * loaders)
    assert seen == {count}


def test_an_evaluation_without_a_batch_calls_no_hook(trainer):
    class Silent(Predicts):
        def on_test_start(self):
            raise AssertionError("there is nothing to test")

        def test_step(self, batch):
            raise AssertionError("there is nothing to test")

        on_predict_start = on_test_start

    assert trainer(limit_test_batches=0).test(Silent(), make_loader()) == []
    assert trainer(limit_predict_batches=0).predict(Silent(), make_loader()) == []
