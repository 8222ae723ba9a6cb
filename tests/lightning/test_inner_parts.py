"""Lightning's internals that public programs read: connectors, counts of loops, strategies, loggers, hooks."""

import pytest
import torch

import legato.compat.lightning as L
from legato.compat.lightning.loops import EvaluationLoop
from legato.compat.lightning.placeholders import UnsupportedError
from legato.compat.lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from legato.compat.lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from legato.compat.lightning.pytorch.plugins import MixedPrecision
from legato.compat.lightning.pytorch.strategies import DDPStrategy


class Linear(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)


def quiet(tmp_path, **options):
    kept = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": tmp_path}
    return L.Trainer(**{**defaults, **kept, **options})


def test_hooks_take_the_module_by_lightnings_name(tmp_path):
    called = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer=trainer, pl_module=pl_module)
            called.append("start")

    class Stop(EarlyStopping):
        def on_validation_end(self, trainer, pl_module):
            super().on_validation_end(trainer=trainer, pl_module=pl_module)
            called.append("validated")

        def on_fit_end(self, trainer, pl_module):
            super().on_fit_end(trainer=trainer, pl_module=pl_module)

    class Clock(Timer):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module=pl_module)
            called.append("clock")

    trainer = quiet(tmp_path, callbacks=[Watch(), Stop("val_loss"), Clock()], num_sanity_val_steps=0)
    trainer.fit(Linear(), loader(), loader())
    assert called == ["start", "clock", "validated"]


def test_a_mixed_in_hook_is_not_hidden():
    called = []

    class Ends(L.Callback):
        def on_fit_end(self, trainer, pl_module):
            called.append(self)

    class Both(EarlyStopping, Ends):
        pass

    callback = Both("loss")
    callback.on_fit_end(None, None)
    assert called == [callback]


def test_connectors_have_loaders_values_and_the_checkpoint(tmp_path):
    seen = {}

    class Reads(Linear):
        def setup(self, stage):
            source = self.trainer.fit_loop._data_source
            seen["batches"] = len(source.dataloader())
            seen["source"] = (source.is_defined(), source.is_module())

        def train_dataloader(self):
            return loader()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            values = self.trainer._logger_connector
            seen["loss"] = values.callback_metrics["loss"]
            seen.setdefault("logs", []).append(values.should_update_logs)

        def on_train_epoch_end(self):
            seen["saved"] = self.trainer._checkpoint_connector.dump_checkpoint()

    module = Reads()
    trainer = quiet(tmp_path, log_every_n_steps=2)
    trainer.fit(module)
    assert seen["batches"] == 4
    assert seen["source"] == (True, True)
    assert torch.equal(seen["saved"]["state_dict"]["layer.weight"], module.layer.weight)
    assert seen["saved"]["global_step"] == 4
    assert seen["loss"].item() == trainer.callback_metrics["loss"].item()
    assert trainer._accelerator_connector.use_distributed_sampler
    assert trainer._accelerator_connector.strategy is trainer.strategy
    with pytest.raises(AttributeError, match=r"hpc_save_path.*internal to Lightning"):
        trainer._checkpoint_connector.hpc_save_path()


def test_contents_that_a_program_holds_itself_are_written_and_read(tmp_path):
    module, trainer = Linear(), quiet(tmp_path)
    trainer.strategy.connect(module)
    assert trainer.strategy.lightning_module is trainer.strategy.model is module
    contents = {"state_dict": trainer.strategy.lightning_module_state_dict(), "own": 3}
    path = tmp_path / "own" / "one.ckpt"
    trainer.strategy.save_checkpoint(contents, path)
    loaded = trainer.strategy.load_checkpoint(path)
    assert loaded["own"] == 3
    assert torch.equal(loaded["state_dict"]["layer.weight"], module.layer.weight)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert trainer.strategy.checkpoint_io.load_checkpoint(tmp_path / "run.ckpt")["global_step"] == 4
    for checkpoint in (path, tmp_path / "run.ckpt"):
        trainer.strategy.remove_checkpoint(checkpoint)
        assert not checkpoint.exists()


def test_counts_of_a_run_cannot_be_set(tmp_path):
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Linear(), loader())
    loop = trainer.fit_loop
    assert loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed == 4
    with pytest.raises(UnsupportedError, match="resume, call fit\\(ckpt_path="):
        loop.epoch_progress.current.completed = 2
    assert loop.epoch_progress.current.completed == trainer.current_epoch == 1


def test_the_x_axis_may_be_ahead(tmp_path):
    written = CSVLogger(tmp_path, "ahead")
    trainer = quiet(tmp_path, logger=written, log_every_n_steps=2)
    trainer.fit_loop.epoch_loop._batches_that_stepped = 100
    trainer.fit(Linear(), loader())
    assert trainer.global_step == 4
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 104
    text = (tmp_path / "ahead" / "version_0" / "metrics.csv").read_text()
    assert ",101" in text
    assert ",103" in text


def test_accumulation_is_told_apart(tmp_path):
    seen = []

    class Watches(Linear):
        def training_step(self, batch, batch_idx):
            loop = self.trainer.fit_loop.epoch_loop
            seen.append((self.trainer.fit_loop._should_accumulate(), loop.is_last_batch))
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, accumulate_grad_batches=3).fit(Watches(), loader())
    # as in Lightning, where the epoch's last batch also steps
    assert seen == [(True, False)] * 2 + [(False, False), (False, True)]


def test_a_module_moves_a_batch_itself():
    class Moves(Linear):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch + 1

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch * 2

    module = Moves()
    assert module._apply_batch_transfer_handler(torch.ones(2)).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_a_logger_of_ones_own_reads_and_sets_its_folder(tmp_path, kind):
    class Own(kind):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self._version = "chosen" if self._version is None else self._version
            self._experiment = None

    logger = Own(tmp_path, "runs", prefix="p")
    assert (logger._save_dir, logger._name, logger._prefix) == (str(tmp_path), "runs", "p")
    assert logger._root_dir == str(tmp_path / "runs")
    assert logger.log_dir == str(tmp_path / "runs" / "chosen")
    assert logger._get_next_version() == 0
    assert not logger._fs.exists(logger.log_dir)


def test_whether_a_fit_validates_is_known_when_it_is_set_up(tmp_path):
    seen = []

    class Asks(Linear):
        def configure_callbacks(self):
            seen.append(self.trainer.enable_validation)
            return []

    trainer = quiet(tmp_path, limit_train_batches=1)
    assert not trainer.enable_validation
    trainer.fit(Asks(), loader(), loader())
    trainer.fit(Asks(), loader())
    assert seen == [True, False]


def test_a_module_may_set_its_dtype():
    module = Linear()
    assert module.dtype == torch.float32
    module.dtype = torch.float16
    assert module.dtype == torch.float16
    assert module.layer.weight.dtype == torch.float32


class Evaluated(Linear):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_counts_and_optimizers_of_a_fit_stay_in_later_calls(tmp_path):
    named, counts = [], {}

    class Looks(L.Callback):
        def setup(self, trainer, pl_module, stage):
            named.append(trainer.strategy.lightning_module is trainer.strategy.model is pl_module)

        def on_test_start(self, trainer, pl_module):
            counts["test"] = trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches
            counts["optimizers"] = trainer.optimizers, trainer.strategy.optimizers, len(trainer.lr_scheduler_configs)

    trainer, module = quiet(tmp_path, callbacks=[Looks()]), Evaluated()
    trainer.optimizers.append(None)  # a list that no trainer uses
    assert trainer.optimizers == []
    trainer.fit(module, loader(), torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2))
    optimizers = trainer.optimizers
    trainer.test(module, loader(), verbose=False)
    assert counts["test"] == (4, [3], [2])
    assert counts["optimizers"] == (optimizers, optimizers, 1)
    trainer.predict(module, loader())
    assert (trainer.num_val_batches, trainer.num_test_batches, trainer.num_predict_batches) == ([3], [4], [4])
    assert not trainer.enable_validation
    assert named == [True] * 3
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())  # without validation, so that the counts of the first fit stay visible
    assert trainer.num_val_batches == []


@pytest.mark.slow
def test_each_of_two_processes_counts_its_own_batches_of_an_evaluation(tmp_path, capfd):
    written = tmp_path / "seen"

    class Looks(L.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            if batch_idx == trainer.num_val_batches[dataloader_idx] - 1:
                with written.open("a") as file:
                    file.write(f"{trainer.global_rank} {trainer.num_sanity_val_batches} {trainer.sanity_checking}\n")

    options = {
        "devices": 2,
        "strategy": "ddp_spawn",
        "enable_progress_bar": True,
        "callbacks": [Looks(), TQDMProgressBar()],
    }
    trainer = quiet(tmp_path, **options)
    evaluated = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=2)
    trainer.fit(Evaluated(), loader(), evaluated)
    assert trainer.num_val_batches == [4]
    assert sorted(written.read_text().splitlines()) == ["0 [1] False", "1 [1] False"]
    bars = capfd.readouterr().out
    assert "Sanity Checking DataLoader 0: 100%" in bars
    assert "Validation DataLoader 0: 100%" in bars
    assert "4/4" in bars[bars.index("Validation DataLoader 0: 100%") :]


def test_methods_of_a_strategy_and_a_precision_that_programs_call(tmp_path):
    results = {}

    class Steps(Linear):
        """Four ways to compute the same gradient."""

        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            strategy, optimizer = self.trainer.strategy, self.optimizers()
            for name, backward in {
                "manual": self.manual_backward,
                "none": lambda loss: strategy.backward(loss, None),
                "optimizer": lambda loss: strategy.backward(loss, optimizer=optimizer),
                "graph": lambda loss: strategy.backward(loss, None, retain_graph=True),
            }.items():
                optimizer.zero_grad()
                backward(self.layer(batch).square().mean())
                results[name] = self.layer.weight.grad.clone()
            precision = self.trainer.precision_plugin
            precision.clip_gradients(optimizer, 1e-3)
            results["norm"] = torch.nn.utils.get_total_norm([item.grad for item in precision.main_params(optimizer)])
            precision.clip_gradients(optimizer, 1e-6, "value")
            results["value"] = self.layer.weight.grad.abs().max()
            optimizer.step()

    module, trainer = Steps(), quiet(tmp_path, max_steps=1)
    trainer.fit(module, loader())
    assert all(torch.equal(results[name], results["manual"]) for name in ("none", "optimizer", "graph"))
    assert results["norm"] <= 1.001e-3
    assert results["value"] <= 1.001e-6
    with pytest.raises(UnsupportedError, match=r"subclass legato\.strategies\.GroupStrategy"):
        DDPStrategy(ddp_comm_hook=lambda state, bucket: None)


@pytest.mark.parametrize(
    ("word", "dtype"), [("32", torch.float32), ("64-true", torch.float64), ("bf16-mixed", torch.bfloat16)]
)
def test_a_module_made_by_a_trainer_has_its_precision(tmp_path, word, dtype):
    with quiet(tmp_path, precision=word).init_module():
        layer = torch.nn.Linear(1, 1, dtype=torch.float32 if "mixed" in word else None)
        actual = layer(torch.zeros(1, 1)).dtype
    assert actual == dtype
    assert torch.get_default_dtype() == torch.float32


class Predicts(Linear):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return float(batch.sum()) + batch_idx

    def on_predict_epoch_end(self):
        self.seen = self.trainer.predict_loop.predictions, self.trainer.predict_loop.epoch_batch_indices


class Writes(BasePredictionWriter):
    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert list(trainer.predict_loop.current_batch_indices) == list(batch_indices)

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.written = predictions


class Empties(L.Callback):
    def on_predict_batch_end(self, trainer, *_):
        trainer.predict_loop._predictions = [[] for _ in range(trainer.predict_loop.num_dataloaders)]


@pytest.mark.parametrize("interval", ["epoch", "batch_and_epoch", None])
@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("loaders", [1, 2])
def test_a_prediction_can_be_read_while_it_is_under_way(tmp_path, interval, returned, loaders):
    model, writers = Predicts(), [Writes(interval)] if interval else []
    data = loader() if loaders == 1 else [loader(), loader()]
    trainer = quiet(tmp_path, callbacks=list(writers))
    result = trainer.predict(model, data, return_predictions=returned)
    values = [4.0, 5.0, 6.0, 7.0]
    every = values if loaders == 1 else [values, values]
    kept = returned or bool(writers)
    assert model.seen[0] == (every if kept else ([] if loaders == 1 else [[], []]))
    assert model.seen[1] == [[[0, 1], [2, 3], [4, 5], [6, 7]] if writers else []] * loaders
    assert [writer.written for writer in writers] == [every] * len(writers)
    assert result == (every if returned else None)
    assert trainer.predict_loop.predictions == (every if returned else [])


def test_a_program_can_empty_the_predictions_of_a_long_run(tmp_path):
    trainer = quiet(tmp_path, callbacks=[Empties()])
    assert trainer.predict(Predicts(), loader()) == [7.0]  # the latest batch is stored after its hooks, as in Lightning


def test_manual_optimization_by_its_private_name(tmp_path):
    class Manual(Linear):
        def __init__(self):
            super().__init__()
            self._automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().mean())
            optimizer.step()

    model = Manual()
    before = model.layer.weight.detach().clone()
    quiet(tmp_path).fit(model, loader())
    assert not model.automatic_optimization
    assert not model._automatic_optimization
    assert not torch.equal(model.layer.weight, before)


class OwnSetup(DDPStrategy):
    def setup(self, trainer):
        super().setup(trainer)


class OwnStep(MixedPrecision):
    def optimizer_step(self, optimizer, model, closure, **options):
        return optimizer.step(closure)


class Stage(L.Trainer):
    def _run_stage(self):
        return None


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        (lambda: L.Trainer(strategy=OwnSetup()), "OwnSetup.setup would never be called"),
        (lambda: L.Trainer(plugins=[OwnStep("bf16-mixed", "cpu")]), "OwnStep.optimizer_step would never be called"),
        (lambda: L.Trainer(strategy=DDPStrategy(precision_plugin=OwnStep("bf16-mixed", "cpu"))), "OwnStep"),
        (lambda: Stage(), "Stage._run_stage would never be called"),
    ],
)
def test_inner_methods_that_would_be_passed_over_are_refused(trainer, named):
    with pytest.raises(UnsupportedError, match=named):
        trainer()


def test_parts_of_a_programs_own_that_change_no_inner_method_are_taken(tmp_path):
    class Named(DDPStrategy):
        strategy_name = "named"

        def teardown(self):
            super().teardown()

    trainer = quiet(tmp_path, strategy=Named(find_unused_parameters=False), plugins=[])
    trainer.fit(Linear(), loader())
    assert trainer.global_step == 4


# --- what subclasses of a program's own read --------------------------------------------------------------------------
def test_a_checkpoint_keeps_what_a_hook_adds_as_none(tmp_path):
    class Adds(Linear):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["identity"] = None

    trainer = quiet(tmp_path)
    trainer.fit(Adds(), loader())
    assert trainer._checkpoint_connector.dump_checkpoint()["identity"] is None


def test_parts_of_the_table_of_a_test():
    keys, find = EvaluationLoop._get_keys, EvaluationLoop._find_value
    results = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert list(keys(results)) == [("a",), ("b", "c"), ("b", "d", "e")]
    assert [find(results, target) for target in keys(results)] == [1, 2, 3]
    assert find(results, ("b", "x")) is None


def test_the_source_of_an_evaluations_data(tmp_path):
    results, data = [], loader()

    class Asks(Linear):
        def on_validation_epoch_end(self):
            source = self.trainer.validate_loop._data_source
            results.append((source.instance, source.is_defined(), source.dataloader()))

    trainer, module = quiet(tmp_path), Asks()
    trainer.validate(module, data)
    assert results == [(data, True, data)]


def test_the_source_of_a_stream_given_as_a_loader(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(4, 2))

    results, data = [], torch.utils.data.DataLoader(Stream(), batch_size=2)  # a stream without a length

    class Asks(Linear):
        def on_train_epoch_start(self):
            results.append(self.trainer.fit_loop._data_source.dataloader())

    quiet(tmp_path).fit(Asks(), data)
    assert results == [data]


def test_averaging_by_several_weights_at_once(tmp_path):
    from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

    weights = []
    for options in ({"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": get_ema_avg_fn(0.5)}):
        torch.manual_seed(0)
        module = Linear()
        quiet(tmp_path, callbacks=[WeightAveraging(**options)], max_epochs=2).fit(module, loader())
        weights.append(module.layer.weight.detach().clone())
    torch.testing.assert_close(*weights)
    with pytest.raises(UnsupportedError, match="avg_fn"):
        WeightAveraging(avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())


def test_a_module_passes_on_lightnings_names_that_it_imports():
    from legato.compat.lightning.pytorch.callbacks.early_stopping import rank_zero_info
    from legato.compat.lightning.pytorch.trainer.connectors.accelerator_connector import _IS_INTERACTIVE
    from legato.compat.lightning.pytorch.utilities.rank_zero import rank_zero_info as same

    assert rank_zero_info is same
    assert _IS_INTERACTIVE is False
    with pytest.raises(ImportError):
        exec("from legato.compat.lightning.pytorch.loggers import EarlyStopping")
