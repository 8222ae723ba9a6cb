"""Names of Lightning's inner modules that public programs import, each beside the real package's."""

import importlib
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import legato.compat.lightning as L
from legato.compat.lightning.placeholders import UnsupportedError


@pytest.fixture(scope="module", autouse=True)
def no_warnings_at_the_import_of_lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("lightning.pytorch.cli")


def both(path):
    """Return a name of the room and of the real package."""
    module, _, name = path.rpartition(".")
    return [
        getattr(importlib.import_module(f"{root}.{module}"), name) for root in ("legato.compat.lightning", "lightning")
    ]


def test_states_of_the_generators():
    for collect, restore in zip(
        both("fabric.utilities.seed._collect_rng_states"), both("pytorch.utilities.seed._set_rng_states"), strict=True
    ):
        state = collect()
        drawn = torch.rand(2).tolist(), np.random.rand(), random.random()
        restore(state)
        assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == drawn
    assert collect(include_cuda=False).keys() == {"torch", "numpy", "python"}


def test_states_of_optimizers_go_to_a_device():
    for move in both("fabric.utilities.optimizer._optimizers_to_device"):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight])
        weight.sum().backward()
        optimizer.step()
        move([optimizer], "meta")
        assert {name: one.device.type for name, one in optimizer.state[weight].items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


def test_modes_of_a_modules_parts():
    for kind in both("pytorch.utilities.model_helpers._ModuleMode"):
        module, mode = nn.Sequential(nn.Linear(1, 1), nn.Dropout()), kind()
        module[1].eval()
        mode.capture(module)
        module.train()
        mode.restore(module)
        assert [part.training for part in module.modules()] == [True, True, False]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(4)),
        DataLoader(range(4), shuffle=True),
        DataLoader(Stream()),
        [1, 2],
        DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)),
    ],
)
def test_whether_a_loader_shuffles(loader):
    ours, theirs = both("pytorch.utilities.data._is_dataloader_shuffled")
    assert ours(loader) == theirs(loader)


def test_samplers_are_told_the_epoch():
    for tell in both("fabric.utilities.data._set_sampler_epoch"):
        loader = DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0))
        tell(loader, 3)
        assert loader.sampler.epoch == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_samplers_that_repeat_nothing(shuffle, rank):
    found = []
    for plain, wrapper in zip(
        both("pytorch.overrides.distributed.UnrepeatedDistributedSampler"),
        both("pytorch.overrides.distributed.UnrepeatedDistributedSamplerWrapper"),
        strict=True,
    ):
        options = {"num_replicas": 3, "rank": rank, "shuffle": shuffle}
        own, wrapped = plain(range(10), **options), wrapper([7, 5, 3, 1], **options)
        own.set_epoch(2)
        found.append((list(own), len(own), list(wrapped), len(wrapped)))
    assert found[0] == found[1]


def test_reductions_without_a_process_group():
    for reduce, gather in zip(
        both("fabric.utilities.distributed._sync_ddp_if_available"),
        both("fabric.utilities.distributed._all_gather_ddp_if_available"),
        strict=True,
    ):
        tensor = torch.ones(2)
        assert reduce(tensor, reduce_op="mean") is tensor
        assert gather(tensor) is tensor
    for backend in both("fabric.utilities.distributed._get_default_process_group_backend_for_device"):
        assert [backend(torch.device(kind)) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]


def test_reductions_with_a_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        for name in ("sum", "mean", "max"):
            for reduce in both("fabric.utilities.distributed._sync_ddp"):
                assert reduce(torch.full((2,), 3.0), reduce_op=name).tolist() == [3.0, 3.0]
        gather, _ = both(
            "fabric.utilities.distributed._all_gather_ddp_if_available"
        )  # Lightning's calls what torch warns of
        assert gather(torch.ones(2)).tolist() == [[1.0, 1.0]]
        with pytest.raises(UnsupportedError, match=r"self\.all_gather"):
            gather(torch.ones(2), sync_grads=True)
        for gather in both("fabric.utilities.distributed._gather_all_tensors"):
            assert [one.tolist() for one in gather(torch.ones(2))] == [[1.0, 1.0]]
    finally:
        torch.distributed.destroy_process_group()


def test_counts_that_a_program_keeps():
    found = []
    for progress, tracker in zip(
        both("pytorch.loops.progress._BatchProgress"), both("pytorch.loops.progress._ProcessedTracker"), strict=True
    ):
        counts = progress()
        for name in ("ready", "started", "processed", "ready", "completed"):
            getattr(counts, f"increment_{name}")()
        states = [counts.state_dict()]
        counts.reset_on_restart()
        states.append(counts.state_dict())
        counts.reset_on_run()
        counts.increment_by(2)
        states += [counts.state_dict(), progress.from_state_dict(states[0]).state_dict()]
        counts.reset()
        found.append([*states, counts.state_dict(), progress.from_defaults(tracker, ready=3).state_dict()])
    assert found[0] == found[1]


def test_versions_that_a_program_asks_for():
    ours = importlib.import_module("legato.compat.lightning.fabric.utilities.imports")
    theirs = importlib.import_module("lightning.fabric.utilities.imports")
    names = [name for name in vars(theirs) if "EQUAL" in name]
    assert len(names) > 5
    assert {name: bool(getattr(ours, name)) for name in names} == {name: bool(getattr(theirs, name)) for name in names}


class Net(L.LightningModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_hooks_called_by_name(tmp_path):
    from legato.compat.lightning.pytorch.trainer import call

    seen = []

    class Named(Net):
        def on_own(self, value):
            seen.append((self._current_fx_name, value))
            return value

        def on_train_epoch_end(self):
            assert call._call_lightning_module_hook(self.trainer, "on_own", 3) == 3
            call._call_callback_hooks(self.trainer, "on_own", 4)
            assert call._call_strategy_hook(self.trainer, "reduce", torch.ones(1)) == 1
            assert list(call._call_callbacks_state_dict(self.trainer)) == ["Called"]
            with pytest.raises(TypeError, match="No `LightningDataModule`"):
                call._call_lightning_datamodule_hook(self.trainer, "setup", "fit")

    class Called(L.Callback):
        state_key = "Called"

        def on_own(self, trainer, module, value):
            seen.append((module._current_fx_name, value))

        def state_dict(self):
            return {"seen": len(seen)}

    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Called()],
    )
    trainer.fit(Named(), DataLoader(torch.ones(4, 2)))
    assert seen == [("on_own", 3), ("on_own", 4)]


def test_files_and_states_of_ones_own(tmp_path):
    from legato.compat.lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from legato.compat.lightning.fabric.utilities.cloud_io import _atomic_save
    from legato.compat.lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
    from legato.compat.lightning.pytorch.core.saving import pl_load

    (load_state, _), net, files = both("pytorch.core.saving._load_state"), Net(3), TorchCheckpointIO()
    assert isinstance(files, CheckpointIO)
    contents = {"state_dict": net.state_dict(), "hyper_parameters": {"width": 3}}
    files.save_checkpoint(contents, tmp_path / "a.ckpt")
    _atomic_save(contents, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        assert torch.equal(load_state(Net, pl_load(tmp_path / name)).layer.weight, net.layer.weight)
    files.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    with pytest.raises(UnsupportedError, match="subclass its callback ModelCheckpoint"):
        L.Trainer(plugins=[files])
    optimizers, configs = _init_optimizers_and_lr_schedulers(net)
    assert (type(optimizers[0]), configs[0].interval) == (torch.optim.SGD, "epoch")


def test_a_loop_that_would_never_run_is_refused():
    from legato.compat.lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop

    class Own(_TrainingEpochLoop):
        def advance(self, data_fetcher):
            return None

    trainer = L.Trainer(accelerator="cpu", logger=False)
    assert isinstance(trainer.fit_loop, _FitLoop)
    with pytest.raises(UnsupportedError, match=r"Own\.advance would never be called"):
        Own(trainer)
