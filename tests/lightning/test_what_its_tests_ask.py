"""Objects of Lightning's own tests, compared with Lightning: hooks, states, rates and attributes of small runs."""

import lightning.pytorch as real
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import legato.compat.lightning.pytorch as room
from legato.base.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's warnings

SILENT = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loader(count=8, batch_size=2):
    return DataLoader(torch.arange(2.0 * count).reshape(count, 2) / max(1, count), batch_size=batch_size)


def module_of(package, **methods):
    """Return a module of a package with data and additional methods."""

    class Small(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            return self.layer(batch).mean()

        test_step = predict_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return loader(4)

        test_dataloader = predict_dataloader = val_dataloader

    return type("Small", (Small,), methods)()


def trainer_of(package, **options):
    return package.Trainer(**{**SILENT, "max_epochs": 1, **options})


def memory(package):
    """Return a logger that stores its points, and counts its saves."""

    class Memory(package.loggers.Logger):
        name, version, save_dir = "memory", 0, None

        def __init__(self):
            super().__init__()
            self.points, self.saved = [], 0

        def log_hyperparams(self, params, *args, **kwargs):
            pass

        def log_metrics(self, metrics, step=None):
            self.points.append((step, sorted(metrics)))

        def save(self):
            self.saved = len(self.points)

    return Memory()


def both(seen):
    """Return the observations of each package, which must be equal."""
    results = [seen(package) for package in (real, room)]
    assert results[0] == results[1]
    return results[0]


# --- evaluations ------------------------------------------------------------------------------------------------------
def counting(package):
    """Return a callback with a state."""

    class Counting(package.Callback):
        count = 0

        def on_train_batch_end(self, *arguments):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state_dict):
            self.count = state_dict["count"]

    return Counting()


def data_of(package):
    """Return a data module with a state."""

    class Data(package.LightningDataModule):
        state = 0

        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return loader(4)

        test_dataloader = predict_dataloader = val_dataloader

        def state_dict(self):
            return {"state": 7}

        def load_state_dict(self, state_dict):
            self.state = state_dict["state"]

    return Data()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_gives_callbacks_and_data_their_states(stage):
    def seen(package):
        trainer, path = trainer_of(package, callbacks=[counting(package)]), f"{package.__name__}.ckpt"
        trainer.fit(module_of(package), datamodule=data_of(package))
        trainer.save_checkpoint(path)
        counts, data = counting(package), data_of(package)
        evaluate = getattr(trainer_of(package, callbacks=[counts]), stage)
        evaluate(module_of(package), datamodule=data, ckpt_path=path)
        return counts.count, data.state

    assert both(seen) == (4, 7)


def test_an_evaluation_gives_them_the_states_of_a_file_of_lightnings():
    trainer = trainer_of(real, callbacks=[counting(real)])
    trainer.fit(module_of(real), datamodule=data_of(real))
    trainer.save_checkpoint("saved.ckpt")
    counts, data = counting(room), data_of(room)
    trainer_of(room, callbacks=[counts]).test(module_of(room), datamodule=data, ckpt_path="saved.ckpt")
    assert (counts.count, data.state) == (4, 7)


def test_the_last_checkpoint_of_none_leaves_an_evaluation_the_module_as_it_is():
    def seen(package):
        module = module_of(package)
        trainer_of(package).test(module, ckpt_path="last", verbose=False)
        return module.layer.weight.tolist()

    assert both(seen) == module_of(room).layer.weight.tolist()
    with pytest.raises(CheckpointError, match="best"):
        trainer_of(room).test(module_of(room), ckpt_path="best")


@pytest.mark.parametrize("several", [False, True])
def test_a_hook_with_any_arguments_gets_the_loaders_index_where_there_are_several(several):
    def seen(package):
        calls = []

        def note(*arguments):
            calls.append([item for item in arguments if isinstance(item, int)])

        class Noting(package.Callback):
            on_validation_batch_start = on_validation_batch_end = note

        methods = {"on_test_batch_start": note, "on_test_batch_end": note}
        methods |= {"validation_step": lambda self, batch, batch_idx, dataloader_idx=0: None}
        methods |= {"test_step": methods["validation_step"]}
        trainer, data = trainer_of(package, callbacks=[Noting()]), [loader(2), loader(2)][: 1 + several]
        for evaluate in (trainer.validate, trainer.test):
            evaluate(module_of(package, **methods), data, verbose=False)
        return calls

    assert both(seen)[:2] == ([[0, 0], [0, 0]] if several else [[0], [0]])


@pytest.mark.parametrize(
    ("hook", "refused"),
    [("training_epoch_end", "fit"), ("validation_epoch_end", "fit validate"), ("test_epoch_end", "test")],
)
def test_hooks_of_the_first_lightning_are_refused_where_they_would_be_called(hook, refused):
    def seen(package):
        results = []
        for method in ("fit", "validate", "test"):
            try:
                getattr(trainer_of(package), method)(module_of(package, **{hook: lambda self, outputs: None}))
            except NotImplementedError:
                results.append(method)
        return results

    assert both(seen) == refused.split()


# --- data and resumes -------------------------------------------------------------------------------------------------
class Endless(IterableDataset):
    """Never ends, whatever its length."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(lambda: torch.ones(2), None)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 0.5}, {"limit_train_batches": 9}], ids=str
)
def test_an_epoch_ends_at_the_length_of_a_stream(options):
    def seen(package):
        trainer, batches = trainer_of(package, max_epochs=2, **options), []
        module = module_of(package, on_train_batch_start=lambda self, batch, index: batches.append((len(batch), index)))
        trainer.fit(module, DataLoader(Endless(8), batch_size=2), loader(2))
        return batches, trainer.global_step, trainer.num_training_batches

    assert both(seen)[2] in (2, 4)


@pytest.mark.parametrize(("epochs", "raises"), [(1, True), (2, False), (3, False)])
def test_a_run_does_not_go_on_to_an_epoch_before_its_checkpoint(epochs, raises):
    def seen(package):
        trainer, path = trainer_of(package, max_epochs=2), f"{package.__name__}.ckpt"
        trainer.fit(module_of(package))
        trainer.save_checkpoint(path)
        trainer = trainer_of(package, max_epochs=epochs)
        try:
            trainer.fit(module_of(package), ckpt_path=path)
        except package.utilities.exceptions.MisconfigurationException:
            return None
        return trainer.global_step

    assert (both(seen) is None) is raises


@pytest.mark.parametrize(
    ("kind", "first", "second", "raises"),
    [
        ("ModelCheckpoint", {"monitor": "a"}, {"monitor": "b"}, False),
        ("ModelCheckpoint", {}, {}, True),
        ("EarlyStopping", {"monitor": "a"}, {"monitor": "a"}, True),
        ("LearningRateMonitor", {}, {}, False),
    ],
)
def test_states_of_callbacks_have_keys_of_their_own(kind, first, second, raises):
    def seen(package):
        callbacks = [getattr(package.callbacks, kind)(**arguments) for arguments in (first, second)]
        try:
            trainer_of(package, callbacks=callbacks, enable_checkpointing=True, logger=True)
        except RuntimeError:
            return True
        return False

    assert both(seen) is raises


# --- the end of a run -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 0.5}, {"val_check_interval": 3}, {"check_val_every_n_epoch": 2}, {"min_epochs": 2}],
    ids=str,
)
def test_a_run_that_is_asked_to_stop_validates_before_it_ends(options, after):
    def seen(package):
        calls = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = self.trainer.should_stop or batch_idx == after

        methods = {
            "on_train_batch_end": on_train_batch_end,
            "on_train_epoch_end": lambda self: calls.append(("epoch ends", self.trainer.global_step)),
            "on_validation_epoch_end": lambda self: calls.append(("validated", self.trainer.global_step)),
        }
        trainer = trainer_of(package, max_epochs=3, **options)
        trainer.fit(module_of(package, **methods))
        return calls, trainer.current_epoch, trainer.global_step

    assert both(seen)[0]


# --- optimizers and schedulers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("logged_in", ["training_step", "validation_step"])
def test_schedulers_step_by_batches_and_those_of_a_metric_after_a_validation(frequency, accumulated, logged_in):
    def seen(package):
        rates = []

        def log(self, batch, batch_idx):
            self.log("metric", float(batch_idx), on_epoch=True)
            rates.append([group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups])
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            times = {"interval": "step", "frequency": frequency}
            watching = {"scheduler": plateau, "monitor": "metric", "strict": False, **times}
            return [optimizer], [{"scheduler": steps, **times}, watching]

        methods = {"configure_optimizers": configure_optimizers, logged_in: log}
        options = {"max_epochs": 3, "accumulate_grad_batches": accumulated, "val_check_interval": 2}
        trainer = trainer_of(package, **options)
        trainer.fit(module_of(package, **methods))
        return [[round(rate, 7) for rate in item] for item in rates], trainer.global_step

    assert len(both(seen)[0]) > 5


def test_optimizers_may_be_replaced_by_way_of_the_strategy():
    def seen(package):
        def on_train_start(self):
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.5)]

        module, trainer = module_of(package, on_train_start=on_train_start), trainer_of(package)
        trainer.fit(module)
        return [round(value, 4) for value in module.layer.weight[0].tolist()], len(trainer.optimizers)

    assert both(seen)[1] == 1


@pytest.mark.parametrize(
    ("of_trainer", "value", "algorithm", "raises"),
    [
        (0.2, 0.5, "value", True),
        (0.2, None, "other", True),
        (0.2, 0.2, "norm", False),
        (None, 0.01, "value", False),
        (None, None, None, False),
    ],
)
def test_gradients_are_clipped_by_one_value(of_trainer, value, algorithm, raises):
    def seen(package):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

        trainer = trainer_of(package, gradient_clip_val=of_trainer, max_steps=1)
        module = module_of(package, configure_gradient_clipping=configure_gradient_clipping)
        try:
            trainer.fit(module)
        except package.utilities.exceptions.MisconfigurationException:
            return None
        return [round(value, 4) for value in module.layer.weight[0].tolist()]

    assert (both(seen) is None) is raises


# --- loggers and attributes -------------------------------------------------------------------------------------------
def test_a_logger_of_ones_own_is_saved_with_each_point_and_a_logged_step_has_no_epoch():
    def seen(package):
        def training_step(self, batch, batch_idx):
            self.log_dict({"value": 1.0, "step": 10.0 * batch_idx})
            return self.layer(batch).pow(2).mean()

        saved, logger = [], memory(package)
        methods = {"training_step": training_step, "on_train_batch_start": lambda self, *_: saved.append(logger.saved)}
        trainer_of(package, logger=logger).fit(module_of(package, **methods))
        return logger.points, saved

    points, saved = both(seen)
    assert points == [(0, ["value"]), (10, ["value"]), (20, ["value"]), (30, ["value"])]
    assert saved == [0, 1, 2, 3]


def test_a_fast_dev_run_has_the_callback_and_a_logger_that_takes_every_call():
    def seen(package):
        def training_step(self, batch, batch_idx):
            self.logger.log_metrics({"value": 1.0})
            self.logger.experiment.add_image("name", batch)
            return self.layer(batch).pow(2).mean()

        options = {"logger": True, "enable_checkpointing": None, "fast_dev_run": True}
        trainer = trainer_of(package, **options)
        trainer.fit(module_of(package, training_step=training_step))
        checkpoint = package.callbacks.ModelCheckpoint(monitor="never")
        trainer_without = trainer_of(package, **options, callbacks=[checkpoint])
        trainer_without.fit(module_of(package))
        results = type(trainer.logger).__name__, trainer.checkpoint_callback.best_model_path
        return *results, trainer_without.checkpoint_callback is checkpoint, len(trainer_without.checkpoint_callbacks)

    assert both(seen) == ("DummyLogger", "", True, 1)


def test_attributes_of_a_sanity_check_and_of_an_overfit():
    def seen(package):
        evaluating = []
        methods = {"on_validation_start": lambda self: evaluating.append(self.trainer.evaluating)}
        methods |= {"on_train_start": lambda self: evaluating.append(self.trainer.evaluating)}
        trainer = trainer_of(package, overfit_batches=2, num_sanity_val_steps=1)
        trainer.fit(module_of(package, **methods))
        return evaluating, trainer.evaluating, trainer.limit_train_batches, trainer.limit_val_batches

    assert both(seen) == ([True, False, True], False, 2, 2)
