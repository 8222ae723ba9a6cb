"""Complete runs under strategy data_parallel."""

import traceback

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import DataError


class Classifier(lg.Task):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_data(samples):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 5, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def make_trainer(folder, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lg.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=folder, **quiet, **options)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"replicas": 3}, {"precision": "64-true"}])
def test_a_run_has_the_results_of_one_device(options, tmp_path):
    def run(strategy, devices):
        task, data = Classifier(), make_data(61)
        trainer = make_trainer(tmp_path, strategy=strategy, devices=devices, **options)
        trainer.fit(task, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=9))
        predictions = trainer.predict(task, DataLoader(data, batch_size=9))
        return task.state_dict(), trainer.callback_metrics, {"predictions": torch.cat(predictions)}

    for actual, expected in zip(run("data_parallel", 2), run("single", 1), strict=True):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, msg=name)


def test_an_error_names_its_device_and_keeps_its_traceback(tmp_path):
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if (batch[1] == 2).any():
                self.stumble()
            return super().training_step(batch, batch_idx)

        def stumble(self):
            raise KeyError("the step's own error")

    data = TensorDataset(torch.zeros(6, 5), torch.tensor([0, 0, 0, 0, 2, 2]))
    trainer = make_trainer(tmp_path, strategy="data_parallel", devices=3)
    with pytest.raises(KeyError, match="the step's own error") as caught:
        trainer.fit(Failing(), DataLoader(data, batch_size=6))
    text = "".join(traceback.format_exception(caught.value))
    assert "in stumble" in text
    assert "on device 2 of 3 (cpu)" in text


def test_logged_values_are_those_of_the_undivided_batches(tmp_path):
    class Logging(Classifier):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
            self.inner = nn.ModuleDict({"more": torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])})

        def validation_step(self, batch, batch_idx):
            image, label = batch
            output = self.model(image)
            self.log("loss", nn.functional.cross_entropy(output, label))
            self.log_dict({"worst": output.max()}, reduce_fx="max")
            self.log("count", len(image), reduce_fx="sum")
            self.log("own", float(image[0, 0]), batch_size=1)
            self.accuracy(output, label)
            self.log("accuracy", self.accuracy)
            self.inner["more"].update(output[:, 0], label.float())
            self.log_dict(self.inner["more"])

    def evaluate(strategy, devices):
        trainer = make_trainer(tmp_path, strategy=strategy, devices=devices)
        return trainer.validate(Logging(), DataLoader(make_data(20), batch_size=7))[0]

    expected, actual = evaluate("single", 1), evaluate("data_parallel", 3)
    images = make_data(20).tensors[0]
    first_of_chunks = images[[0, 3, 6, 7, 10, 13, 14, 16, 18], 0].mean().item()
    assert actual.pop("own") == pytest.approx(first_of_chunks, rel=1e-5)
    expected.pop("own")
    assert actual == pytest.approx(expected)
    assert actual["count"] == 20


class TwoLoaders(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["labelled"]) + self.model(batch["plain"][0]).square().mean()


def test_batches_of_loaders_that_differ_in_length_are_refused_with_a_remedy(tmp_path):
    """Splitting only the first loader's batch, and sending the other's to each device, would give a wrong mean."""
    loaders = {"labelled": DataLoader(make_data(16), 4), "plain": DataLoader(make_data(24), 6)}
    with pytest.raises(DataError, match=r"first dimension differ \(4, 6\).*Define count_samples"):
        make_trainer(tmp_path, strategy="data_parallel", devices=2).fit(TwoLoaders(), loaders)


def test_a_batch_that_starts_with_a_table_is_split_by_samples(tmp_path):
    class WithTable(Classifier):
        def training_step(self, batch, batch_idx):
            return (batch["table"].sum() + self.model(batch["points"])).square().mean()

        def count_samples(self, batch):
            return len(batch["points"])

    def run(strategy, devices):
        task, data = WithTable(), DataLoader(make_data(12), 4, collate_fn=with_table)
        make_trainer(tmp_path, strategy=strategy, devices=devices).fit(task, data)
        return task.state_dict()

    actual, expected = run("data_parallel", 2), run("single", 1)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=name)


def with_table(samples):
    return {"table": torch.arange(9.0), "points": torch.stack([point for point, _ in samples])}
