"""Attributes that a run in workers has set on a program's objects: they come back to the script."""

import threading

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato.compat.lightning as L
from legato.compat.lightning import returned


class Data(L.LightningDataModule):
    def setup(self, stage):
        self.numbers = self._same = TensorDataset(torch.ones(8, 2))
        self.lock = threading.Lock()  # which cannot be pickled

    def train_dataloader(self):
        return DataLoader(self.numbers, batch_size=2)

    def val_dataloader(self):
        return DataLoader(self.numbers, batch_size=4)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(2),)] * 4)


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.losses, self.seen, self.newest = [], {}, None

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean() * 0
        self.losses.append(loss.item() + batch_idx)
        return loss

    def on_validation_epoch_end(self):
        self.seen[self.current_epoch] = self.global_step
        self.newest = torch.tensor([float(self.global_step)])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class History(L.Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(trainer.current_epoch)
        self.module, self.trainer, self.data, self._hidden = pl_module, trainer, [trainer.datamodule], 1


class Own(L.Trainer):
    """A Trainer of the program's own, whose attributes stay."""

    def fit(self, *arguments, **options):
        self.calls = getattr(self, "calls", 0) + 1
        return super().fit(*arguments, **options)


@pytest.mark.slow
def test_attributes_come_back_from_workers(tmp_path):
    epochs, module, data = [], Keeps(), Data()
    history, losses = History(epochs), module.losses
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Own(
        **quiet,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[history],
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    assert losses is module.losses
    assert losses == [0.0, 1.0] * 2
    assert module.seen == {0: 2, 1: 4}
    assert module.newest.tolist() == [4.0]
    assert epochs is history.epochs
    assert epochs == [0, 1]
    assert history.module is module
    assert history.trainer is trainer
    assert history.data == [data]
    assert history._hidden == 1
    assert len(data._same) == 8
    assert trainer.train_dataloader.dataset is data.numbers  # made again: those of the run ended with its processes
    assert trainer.train_dataloader is trainer.train_dataloader
    trainer.max_epochs, given = 3, DataLoader(Stream(), batch_size=2)  # whose length is not known
    trainer.fit(module, given)
    assert trainer.train_dataloader is given
    assert len(data.numbers) == 8
    assert not hasattr(data, "lock")
    assert trainer.calls == 2


def test_names_are_read_of_functions_alone():
    class Anything:
        def __getattr__(self, name):  # as `unittest.mock.call` has it, which is wrapped in itself for ever
            return self

    class Odd:
        anything = Anything()

        def first(self):
            self._one = 1

        @staticmethod
        def second(other):
            other._two = 2

        @property
        def third(self):
            return self._three

    assert returned.names_used_by(Odd) >= {"_one", "_two", "_three"}


def test_what_is_too_large_or_leads_to_another_run_stays(monkeypatch):
    assert returned.packed([1, 2]) is not None
    assert returned.packed(L.Trainer(logger=False, enable_progress_bar=False)) is None
    assert returned.packed([Keeps()]) is None
    assert returned.packed(lambda: 1) is None
    monkeypatch.setattr(returned, "LIMIT", 1000)
    assert returned.packed(torch.ones(10)) is not None
    assert returned.packed(torch.ones(1000)) is None


def test_an_attribute_whose_class_is_unknown_here_stays_as_it_was():
    history = History([1])
    sent = [("History", {"epochs": b"cnowhere\nClass\n.", "more": returned.packed(2)}), ("Other", {"more": b""})]
    returned.take_attributes([history, None], sent)
    assert (history.epochs, history.more) == ([1], 2)


@pytest.mark.parametrize("before", [[0], {0: 0}, {0}, None, (0,)])
@pytest.mark.parametrize("after", [[1], {1: 1}, {1}, None, (1,)])
def test_containers_are_changed_in_place(before, after):
    history = History(before)
    returned.take_attributes([history], [("History", {"epochs": returned.packed(after)})])
    assert history.epochs == after
    assert (history.epochs is before) is (type(before) is type(after) and not isinstance(after, tuple))


class Scheduled(Keeps):
    configured = 0

    def configure_optimizers(self):
        self.configured += 1
        first = torch.optim.Adam(self.layer.parameters(), lr=0.1)
        return [first], [{"scheduler": torch.optim.lr_scheduler.StepLR(first, 1, 0.5), "interval": "step"}]


@pytest.mark.slow
def test_optimizers_of_a_fit_in_workers_are_made_when_asked_for(tmp_path):
    found = []
    for strategy, devices in (("ddp_spawn", 2), ("auto", 1)):
        trainer = L.Trainer(
            max_steps=4,
            accelerator="cpu",
            strategy=strategy,
            devices=devices,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
        )
        model = Scheduled()
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(8 * devices, 2)), batch_size=2))
        assert model.configured == 1
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        state = trainer.optimizers[0].state[model.layer.weight]
        config = trainer.lr_scheduler_configs[0]
        found.append((rate, float(state["step"]), config.scheduler.last_epoch, config.interval))
        assert config.scheduler.optimizer is trainer.optimizers[0] is model.optimizers().optimizer
        assert model.lr_schedulers() is config.scheduler
        assert model.configured == (2 if devices == 2 else 1)
    assert found == [(0.1 / 16, 4.0, 4, "step")] * 2


def test_states_that_are_large_stay_and_settings_come_back(monkeypatch):
    model = Scheduled()
    model.layer(torch.ones(2)).sum().backward()
    optimizers, configs = model.make_optimizers()
    optimizers[0].step()
    optimizers[0].param_groups[0]["lr"] = 0.25
    for limit, kept in ((2**26, 2), (1500, 0)):
        monkeypatch.setattr(returned, "LIMIT", limit)
        states = returned.pack_optimizers(optimizers, configs)
        again, _ = returned.rebuild_optimizers(model, states)
        assert (again[0].param_groups[0]["lr"], len(again[0].state)) == (0.25, kept)
