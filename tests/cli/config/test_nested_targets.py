"""Objects within objects: `_target_` for arguments, `_partial_`, and what checkpoints hold of them."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from config_folder import write
from torch import nn

import legato as lg
from legato.base.errors import CheckpointError, ConfigError
from legato.cli.config import build, check

pytestmark = pytest.mark.usefixtures("config_folder")

ASSEMBLED = """\
task:
  _target_: models.Assembled
  net: {_target_: models.make_net, width: 3, depth: 2}
  optimizer:
    _target_: torch.optim.AdamW
    _partial_: true
    lr: 1e-2
    betas: [0.9, 0.95]
  scheduler: {_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1, gamma: 0.5}
trainer: {max_epochs: 2, accelerator: cpu, devices: 1, enable_progress_bar: false, log_every_n_steps: 1}
loggers: null
"""


def made(*overrides: str) -> Any:
    write("parts.yaml", ASSEMBLED)
    return build.build_config(check.load_config(["parts.yaml", *overrides])).task


def test_arguments_are_built_by_classes_and_functions() -> None:
    task = made(
        "task.activation={_target_: torch.nn.functional.leaky_relu, _partial_: true, negative_slope: 0.5}",
        "task.more={a: [{_target_: torch.nn.Sequential, _args_: [{_target_: torch.nn.ReLU}]}], b: 3}",
    )
    assert len(task.net) == 3
    optimizer = task.hparams.optimizer
    assert isinstance(optimizer, functools.partial)
    assert (optimizer.func, optimizer.keywords) == (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.95)})
    assert task.hparams.scheduler.func is torch.optim.lr_scheduler.StepLR
    assert task.hparams.activation(torch.tensor(-1.0)) == -0.5
    assert isinstance(task.hparams.more["a"][0][0], nn.ReLU)
    assert task.hparams.more["b"] == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.optimizer.lrr=1", "override: task.optimizer.lrr is not an argument of AdamW. Did you mean 'lr'?"),
        ("task.optimizer.lr=fast", "task.optimizer.lr must be"),
        ("task.optimizer._target_=torch.optim.AdmW", "'torch.optim' has no 'AdmW'. Did you mean 'AdamW'?"),
        ("task.optimizer._partial_=false", "task.optimizer.params is missing: AdamW requires it"),
        (
            "task.number={_target_: models.make_net, width: 3}",
            "task.number must not have a `_target_`: it must be int.",
        ),
    ],
)
def test_mistakes_within_are_found_before_anything_is_built(override: str, words: str) -> None:
    write("parts.yaml", ASSEMBLED)
    with pytest.raises(ConfigError) as caught:
        check.load_config(["parts.yaml", override])
    assert words in str(caught.value)


def test_a_mistake_within_is_named_with_its_line() -> None:
    write("parts.yaml", ASSEMBLED.replace("betas:", "beta:"))
    with pytest.raises(
        ConfigError, match=r"^parts\.yaml:8: task\.optimizer\.beta is not an argument of AdamW\. .*'betas'"
    ):
        check.load_config(["parts.yaml"])


def test_an_error_of_what_is_built_names_its_place() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        made("task.optimizer={_target_: torch.optim.SGD, lr: -1.0, params: []}")
    message = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))  # 3.10 has no notes
    assert "override: while building task.optimizer." in message.splitlines()


def fitted(*overrides: str) -> tuple[Any, Path]:
    write("parts.yaml", ASSEMBLED)
    run = build.build_config(check.load_config(["parts.yaml", *overrides]))
    run.trainer.fit(run.task, resume=run.resume)
    return run.task, Path(run.trainer.checkpoint_callback.last_model_path)  # type: ignore[union-attr,attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_holds_the_config_of_parts_and_rebuilds_them(
    devices: int, config_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, checkpoint = fitted(f"trainer.devices={devices}", "trainer.strategy=auto")
    assert "because they are code" not in caplog.text
    # in a process that has never seen the config
    script = f"""
import torch, models
task = models.Assembled.load_from_checkpoint({str(checkpoint)!r})
print(len(task.net), task.hparams.optimizer.keywords, task.hparams.scheduler.func.__name__)
torch.save(task.state_dict(), "weights.pt")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=config_folder, check=False
    )
    assert (done.stdout, done.stderr) == ("3 {'lr': 0.01, 'betas': (0.9, 0.95)} StepLR\n", "")
    weights = torch.load(config_folder / "weights.pt")
    assert all(torch.equal(weights[name], value) for name, value in task.state_dict().items())
    loaded = type(task).load_from_checkpoint(checkpoint, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
    assert loaded.hparams.optimizer.func is torch.optim.SGD
    uninterrupted, _ = fitted("trainer.max_epochs=4", "run.name=whole")
    resumed, _ = fitted("trainer.max_epochs=4", f"resume={checkpoint}", "run.name=resumed")
    if devices == 1:
        assert all(torch.equal(uninterrupted.state_dict()[name], value) for name, value in resumed.state_dict().items())


def test_a_checkpoint_has_nothing_called_that_is_not_a_part_of_a_model(config_folder: Path) -> None:
    from legato.base.targets import rebuild_targets

    kind = type(made())
    for path in ("os.system", "models.dataclass", "subprocess.Popen", "nowhere.Thing", "torch.load", "torch.hub.load"):
        with pytest.raises(CheckpointError, match=r"load_from_checkpoint\(path, net=\.\.\.\)"):
            rebuild_targets({"_target_": path, "command": "touch ran"}, kind, "net")
    assert not (config_folder / "ran").exists()
    assert isinstance(rebuild_targets({"_target_": "torch.nn.ReLU"}, lg.Task, "net"), nn.ReLU)
    assert rebuild_targets({"a": [1, (2,)]}, kind, "net") == {"a": [1, (2,)]}
