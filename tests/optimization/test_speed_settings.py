"""Settings that change the speed of a run: loader options, optimizer kernels, channels_last."""

import pytest
import torch
from tiny import Tiny
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks.callback import Callback

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def data(batch_size: int = 2, **options: object) -> DataLoader:
    inputs = torch.arange(36.0).view(12, 3) / 36
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size, shuffle=True, **options)


class Adam(Tiny):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.parameters(), 0.1)
        return self.optimizer


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
def test_optimizers_take_the_kernels_asked_for(kernels: str) -> None:
    plain, task = Adam(), Adam()
    lg.Trainer(max_epochs=1, **QUIET).fit(plain, data())
    lg.Trainer(max_epochs=1, optimizer_kernels=kernels, **QUIET).fit(task, data())
    (group,) = task.optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (kernels == "fused", kernels == "foreach")
    for one, other in zip(plain.parameters(), task.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_resumed_run_keeps_its_kernels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    saving = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
    for epochs, kernels in enumerate(("fused", "foreach", None), 1):
        task = Adam()
        lg.Trainer(max_epochs=epochs, optimizer_kernels=kernels, **saving).fit(task, data(), resume="auto")
        (group,) = task.optimizer.param_groups
        assert (group["fused"], group["foreach"]) == (True, False)


def test_an_optimizer_without_such_kernels_is_refused() -> None:
    class Rprop(Tiny):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Rprop(self.parameters())

    with pytest.raises(ConfigError, match="Rprop has no such kernels"):
        lg.Trainer(max_steps=1, optimizer_kernels="fused", **QUIET).fit(Rprop(), data())


@pytest.mark.slow
def test_loader_options_change_who_loads_and_not_what() -> None:
    class Workers(Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):  # type: ignore[no-untyped-def]
            source = trainer.current_run.data.training.source
            self.seen = source.sibling.num_workers, source.sibling.persistent_workers, source.sibling.prefetch_factor

    seen = []
    for given, options in (
        ({}, None),
        ({}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}),
        ({"num_workers": 1, "prefetch_factor": 4, "timeout": 9}, {"num_workers": 0}),
    ):
        task, workers = Tiny(), Workers()
        trainer = lg.Trainer(max_epochs=2, loader=options, callbacks=[workers], **QUIET)
        trainer.fit(task, data(**given))
        seen.append((workers.seen, torch.cat(task.seen)))
    assert [one for one, _ in seen] == [(0, False, None), (1, True, 3), (0, False, None)]
    assert all(torch.equal(seen[0][1], one) for _, one in seen)


def test_an_unknown_loader_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.loader has no option 'workers'. Did you mean 'num_workers'"):
        lg.Trainer(loader={"workers": 1})


def test_channels_last_reaches_weights_batches_and_checkpoints(tmp_path) -> None:  # type: ignore[no-untyped-def]
    class Images(lg.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(2, 3, 3)
            self.strides: list[bool] = []

        def training_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
            tensors = batch[0], self.layer.weight
            self.strides += [one.is_contiguous(memory_format=torch.channels_last) for one in tensors]
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    images = DataLoader(TensorDataset(torch.randn(4, 2, 5, 5)), 2)
    torch.manual_seed(1)
    plain = Images()
    torch.manual_seed(1)
    task = Images()
    lg.Trainer(max_epochs=1, **QUIET).fit(plain, images)
    trainer = lg.Trainer(max_epochs=1, channels_last=True, **QUIET)
    trainer.fit(task, images)
    assert all(task.strides)
    assert not any(plain.strides)
    torch.testing.assert_close(plain.layer.weight, task.layer.weight)
    saving = {**QUIET, "enable_checkpointing": True}
    first = lg.Trainer(max_epochs=1, channels_last=True, default_root_dir=tmp_path, **saving)
    first.fit(Images(), images)
    again = Images()
    lg.Trainer(max_epochs=2, channels_last=True, default_root_dir=tmp_path, **saving).fit(again, images, resume="auto")
    assert len(again.strides) == 4
    assert all(again.strides)
