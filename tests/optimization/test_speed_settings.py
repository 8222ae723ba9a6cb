"""Settings that change only the speed of a run: options of loaders."""

import pytest
import torch
from tiny import Tiny
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks.callback import Callback

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def data(batch_size: int = 2, **options: object) -> DataLoader:
    inputs = torch.arange(36.0).view(12, 3) / 36
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size, shuffle=True, **options)


@pytest.mark.slow
def test_loader_options_change_who_loads_and_not_what() -> None:
    class Workers(Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):  # type: ignore[no-untyped-def]
            source = trainer.current_run.data.training.source
            self.seen = source.sibling.num_workers, source.sibling.persistent_workers, source.sibling.prefetch_factor

    seen = []
    for arguments, options in (
        ({}, None),
        ({}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}),
        ({"num_workers": 1, "prefetch_factor": 4, "timeout": 9}, {"num_workers": 0}),
    ):
        task, workers = Tiny(), Workers()
        trainer = lg.Trainer(max_epochs=2, loader=options, callbacks=[workers], **QUIET)
        trainer.fit(task, data(**arguments))
        seen.append((workers.seen, torch.cat(task.seen)))
    assert [settings for settings, _ in seen] == [(0, False, None), (1, True, 3), (0, False, None)]
    assert all(torch.equal(seen[0][1], samples) for _, samples in seen)


def test_an_unknown_loader_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.loader has no option 'workers'. Did you mean 'num_workers'"):
        lg.Trainer(loader={"workers": 1})
