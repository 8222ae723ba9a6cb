"""Mistakes in arguments, paths, checkpoints and hyperparameters: the right error, before the first step."""

import pytest
import torch
from tiny import Tiny, Validated, assert_same_bits, make_loader
from torch import nn

import legato as lg
from legato.base.errors import CheckpointError, ConfigError, TaskError


# --- the arguments ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("accumulate_grad_batches", [0, -1, 1.5, True, "2"]),
        ("log_every_n_steps", [0, -3]),
        ("num_nodes", [0]),
        ("max_epochs", [-2, 1.5, "3"]),
        ("max_steps", [-2, None]),
        ("min_epochs", [-1]),
        ("min_steps", [-1]),
        ("num_sanity_val_steps", [-2]),
        ("check_val_every_n_epoch", [0, -1]),
        ("reload_dataloaders_every_n_epochs", [-1]),
        ("replicas", [0, -1, 1.5]),
        ("threads", [0]),
        ("fast_dev_run", [-1, "yes"]),
        ("limit_train_batches", [-1, 1.5, -0.5, True, "all", float("nan")]),
        ("limit_val_batches", [-1, 1.5]),
        ("limit_test_batches", [-1, 1.5]),
        ("limit_predict_batches", [-1, 1.5]),
        ("overfit_batches", [-1, 1.5]),
        ("val_check_interval", [0, -1, 0.0, 1.5, True, "daily"]),
        ("gradient_clip_val", [-1.0, "tight", True, float("nan")]),
        ("gradient_clip_algorithm", ["l2", "nrom"]),
        ("precision", ["8", "bf16-mixd", 31, True]),
        ("reproducible", ["yes", True]),
        ("nan", ["warn"]),
        ("cluster", ["slurm"]),
        ("accelerator", ["tpu", "cude"]),
        ("devices", [0, -2, "many", 1.5, True]),
        ("strategy", ["dpp", "fsdp3", 3]),
        ("max_time", ["one hour", {"fortnights": 1}, 5]),
        ("callbacks", [[3], "early"]),
        ("logger", ["tensorboard", [3]]),
    ],
)
def test_arguments_that_cannot_work(trainer, name, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            trainer(**{name: value})
        message = str(caught.value)
        assert name in message or name in ("max_time",), (value, message)
        shown = (
            type(value[0] if isinstance(value, list) else value).__name__ if name in ("callbacks", "logger") else value
        )
        assert str(shown) in message, (value, message)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("gradient_clip_algorithm", "nrom", "norm"),
        ("precision", "bf16-mixd", "bf16-mixed"),
        ("strategy", "dpp", "ddp"),
        ("accelerator", "cude", "cuda"),
        ("reproducible", "bitwize", "bitwise"),
    ],
)
def test_a_word_that_is_nearly_right(trainer, name, value, meant):
    with pytest.raises(ConfigError, match=f"Did you mean {meant!r}"):
        trainer(**{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["cuda", "gpu"])
def test_a_device_that_is_not_there(trainer, name):
    with pytest.raises(ConfigError, match=f"accelerator='{name}', but torch found no such device.*accelerator=cpu"):
        trainer(accelerator=name)


def test_an_option_that_a_strategy_does_not_have(trainer):
    with pytest.raises(ConfigError, match=r"ddp has no option 'bucket_cap'. Did you mean 'bucket_cap_mb'"):
        trainer(strategy={"name": "ddp", "bucket_cap": 3})
    with pytest.raises(ConfigError, match=r"single has no option 'elastic'. It is an option of ddp"):
        trainer(strategy={"name": "single", "elastic": True})
    with pytest.raises(ConfigError, match=r"ddp has no option 'static_graph'. Remove it"):
        trainer(strategy={"name": "ddp", "static_graph": True})
    with pytest.raises(ConfigError, match=r"trainer.strategy.fsdp: .*multiple values for keyword argument 'shard'"):
        trainer(strategy={"name": "fsdp", "shard": 2})
    with pytest.raises(ConfigError, match=r"ddp has no option 'tensor'. It is an option of mesh, fsdp"):
        trainer(strategy={"name": "ddp", "tensor": 2})


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "mesh", "shard": 2, "pipeline": 1, "timeout": 60},
        {"name": "fsdp", "cpu_offload": True},
        {"name": "zero1", "bucket_cap_mb": 3},
        {"name": "ddp_model_parallel", "find_unused_parameters": True},
    ],
)
def test_an_option_that_a_strategy_inherits(trainer, strategy):
    trainer(strategy=strategy)


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="max_epohcs"):
        lg.Trainer(max_epohcs=3)


def test_checkpointing_that_is_off_and_on(trainer):
    with pytest.raises(ConfigError, match="enable_checkpointing is False, but callbacks contains a Checkpoint"):
        trainer(callbacks=lg.callbacks.Checkpoint(), enable_checkpointing=False)


# --- where it is written ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["root", "name", "version"])
def test_a_file_in_the_way_of_the_run_directory(trainer, refused, tmp_path, where):
    root = tmp_path / "runs"
    blocked = {"root": root, "name": root / "digits", "version": root / "digits" / "version_0"}[where]
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("mine")
    message = refused(ConfigError, Tiny(), default_root_dir=root, run_name="digits", logger=True)
    assert str(blocked) in message
    assert "run.root" in message or "move it" in message
    assert blocked.read_text() == "mine"


@pytest.mark.parametrize("name", ["", "../elsewhere", "/absolute"])
def test_a_run_name_that_leads_elsewhere(refused, name):
    assert "must be a relative folder name" in refused(ConfigError, Tiny(), run_name=name, logger=True)


# --- going on from a checkpoint ---------------------------------------------------------------------------------------
@pytest.fixture
def saved(trainer, tmp_path):
    """A run of one epoch with its checkpoint."""
    trainer(callbacks=lg.callbacks.Checkpoint(), enable_checkpointing=True).fit(Tiny(), make_loader())
    return tmp_path / "default" / "version_0" / "checkpoints" / "step-00000005"


class Wider(Tiny):
    def __init__(self):
        super().__init__()
        self.model[2] = nn.Linear(4, 2)


class Longer(Tiny):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)


class Shorter(Tiny):
    def __init__(self):
        super().__init__()
        del self.model[2]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Wider, r"other shapes: model.2.bias: \(1,\) in the checkpoint, \(2,\) in the task, model.2.weight"),
        (Longer, "it lacks head.bias, head.weight"),
        (Shorter, "it has unknown model.2.bias, model.2.weight"),
    ],
)
def test_a_checkpoint_of_another_model(trainer, saved, task, message):
    with pytest.raises(CheckpointError, match=f"does not fit the model of {task.__name__}: {message}"):
        trainer(max_epochs=2).fit(task(), make_loader(), ckpt_path=saved)
    with pytest.raises(CheckpointError, match=message):
        task.load_from_checkpoint(saved)
    assert saved.is_dir()


def test_a_task_may_be_content_with_part_of_a_checkpoint(saved):
    Longer.load_from_checkpoint(saved, strict=False)


def test_a_run_keeps_its_replicas(trainer, saved):
    task = Tiny()
    with pytest.raises(ConfigError, match="replicas=2, but the run started with 1 replicas"):
        trainer(max_epochs=2, replicas=2).fit(task, make_loader(), resume="auto")
    assert task.seen == []
    assert saved.is_dir()


class NoOptimizer(Tiny):
    def configure_optimizers(self):
        return None


class Scheduled(Tiny):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoOptimizer, "1 optimizer, but the task returns 0"),
        (Scheduled, "0 learning rate schedulers, but the task returns 1"),
    ],
)
def test_other_optimizers_than_in_the_checkpoint(trainer, saved, task, message):
    with pytest.raises(CheckpointError, match=message):
        trainer(max_epochs=2).fit(task(), make_loader(), ckpt_path=saved)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_checkpoint_that_is_not_there(trainer, tmp_path, stage):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*nowhere"):
        getattr(trainer(), stage)(Validated(), make_loader(), ckpt_path=tmp_path / "nowhere")


def test_weights_alone_do_not_resume_a_run(trainer, tmp_path):
    made, task = trainer(), Tiny()
    made.fit(task, make_loader())
    made.save_checkpoint(tmp_path / "weights", weights_only=True)
    with pytest.raises(CheckpointError, match="only weights"):
        trainer(max_epochs=2).fit(Tiny(), make_loader(), ckpt_path=tmp_path / "weights")
    assert_same_bits(Tiny.load_from_checkpoint(tmp_path / "weights"), task)


# --- hyperparameters --------------------------------------------------------------------------------------------------
class Keeps(Tiny):
    def __init__(self, lr=0.1, thing=None, sizes=(1, 2)):
        super().__init__(lr)
        self.save_hyperparameters()


LIVE = [nn.Linear(1, 1), {"inner": [object()]}, len, lambda: 3]


@pytest.mark.parametrize("thing", LIVE, ids=lambda thing: type(thing).__name__)
def test_a_live_object_is_named_and_handed_over(thing, trainer, tmp_path, caplog):
    task, made = Keeps(0.2, thing), trainer()
    made.fit(task, make_loader())
    made.save_checkpoint(tmp_path / "one")
    made.save_checkpoint(tmp_path / "two")
    messages = [message for message in caplog.messages if "Checkpoints cannot store" in message]
    assert len(messages) == 1
    assert "Keeps.load_from_checkpoint(path, thing=...)" in messages[0]
    assert task.hparams.thing is thing
    again = Keeps.load_from_checkpoint(tmp_path / "one", thing=5)
    assert again.hparams.thing == 5
    with pytest.raises(
        CheckpointError,
        match=r"store these hyperparameters of .*, because they are code: thing.*load_from_checkpoint\(path, thing",
    ):
        Keeps.load_from_checkpoint(tmp_path / "two")


def test_what_was_left_out_is_handed_over_again(trainer, tmp_path):
    class Leaves(Tiny):
        def __init__(self, lr=0.1, thing=None):
            super().__init__(lr)
            self.save_hyperparameters(ignore=["thing"])
            self.thing = thing

    task, made = Leaves(0.2, len), trainer()
    made.fit(task, make_loader())
    made.save_checkpoint(tmp_path / "one")
    again = Leaves.load_from_checkpoint(tmp_path / "one", thing=len)
    assert (again.lr, again.thing, dict(again.hparams)) == (0.2, len, {"lr": 0.2})


def test_plain_hyperparameters_come_back(trainer, tmp_path):
    task, made = Keeps(0.2, {"a": [1.5, True, None]}, sizes=[3, 4]), trainer()
    made.fit(task, make_loader())
    made.save_checkpoint(tmp_path / "one")
    again = Keeps.load_from_checkpoint(tmp_path / "one", lr=0.5)
    assert again.hparams == {"lr": 0.5, "thing": {"a": [1.5, True, None]}, "sizes": [3, 4]}


def test_an_unknown_name_is_no_hyperparameter():
    class Keeps(lg.Task):
        def __init__(self, lr):
            super().__init__()
            self.save_hyperparameters("lrr")

    with pytest.raises(TaskError, match=r"'lrr' is not an argument of __init__, which takes lr"):
        Keeps(0.1)
