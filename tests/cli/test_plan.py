"""`legato plan`: its figures against what a run does, and its command line."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import legato as lg
from legato.base.errors import ConfigError
from legato.base.quantities import format_bytes
from legato.cli.config.check import load_config
from legato.cli.main import main
from legato.cli.plan import Plan, measure_activations, measure_state, parse_memory
from legato.trainer.optimization.precision import Precision

CONFIG = """\
task: {_target_: checked_task.Line}
data: {_target_: checked_task.Points}
trainer: {max_epochs: 3, accelerator: cpu}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task with its data, and a config."""
    shutil.copy(Path(__file__).parents[1].joinpath("checked_task.py"), tmp_path)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_task", raising=False)
    return tmp_path


def rows(*words: str, memory: int | None = None) -> dict[str, str]:
    return dict(Plan(load_config(["line.yaml", *words])).rows(memory))


# --- steps ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("trainer.accumulate_grad_batches=2",),
        ("data.kind=drop", "trainer.replicas=3"),
        ("data.kind=weighted",),
        ("trainer.overfit_batches=2",),
        ("trainer.replicas=4", "trainer.use_distributed_sampler=even"),
        ("trainer.limit_train_batches=0.5", "trainer.max_steps=9"),
        ("task._target_=checked_task.Manual", "trainer.replicas=4"),
        ("trainer.fast_dev_run=true",),
    ],
    ids=" ".join,
)
def test_a_plan_has_the_steps_of_the_run(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(load_config(["line.yaml", "trainer.devices=1", *words]))
    if plan.run.task.automatic_optimization:
        assert main(["fit", "line.yaml", "loggers=null", *words, "trainer.devices=1", "--quiet"]) == 0
        assert f"step {plan.total_steps} in" in capsys.readouterr().out
    else:
        assert plan.steps == 3  # the last round, in which some replica has no batch, is dropped


def test_a_plan_asks_a_strategy_of_ones_own_for_its_processes() -> None:
    shape = ("trainer.devices=2", "trainer.strategy={_target_: legato.strategies.GroupStrategy}")
    assert rows(*shape)["Processes"] == "2"


def test_a_plan_of_a_config() -> None:
    shape = ("trainer.num_nodes=2", "trainer.devices=2", "trainer.replicas=5", "trainer.accumulate_grad_batches=2")
    plan = rows(*shape)
    assert plan["Processes"] == "4 on 2 nodes, 2 each"
    assert plan["Replicas"] == "5: each process has 1 or 2 replicas"
    assert plan["A step"] == "40 samples: 5 replicas x 2 batches; the last step of an epoch has 10"
    assert (plan["Steps per epoch"], plan["Total steps"]) == ("2", "6")
    assert (
        plan["State per rank"] == "176 B: parameters 40 B, gradients 40 B, optimizer 96 B (AdamW)"
    )  # with a step count for each tensor


def test_a_stream_has_the_steps_that_its_length_says() -> None:
    assert rows("data.kind=stream")["A step"] == "1 replica, each with one batch of the stream"
    assert rows("data.kind=endless")["Steps per epoch"] == "unknown: the loader has no length"
    assert rows("trainer.max_epochs=-1")["Total steps"] == "unknown"


# --- state ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        *((kind, {}) for kind in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop", "Adagrad", "Adadelta")),
        *((kind, {}) for kind in ("ASGD", "RMSprop", "Muon")),
    ],
)
def test_optimizer_state_is_that_after_a_real_step(kind: str, options: dict[str, Any]) -> None:
    real = torch.nn.Parameter(torch.randn(64, 64))
    real.grad = torch.randn(64, 64)
    optimizer = getattr(torch.optim, kind)([real], lr=0.1, **options)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[real].values() if isinstance(value, torch.Tensor))
    task = lg.Task()
    task.weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    state = measure_state(task, lambda: [getattr(torch.optim, kind)(task.parameters(), lr=0.1, **options)])
    assert (state.weights, state.gradients, state.optimizer) == (64 * 64 * 4, 64 * 64 * 4, kept)


@pytest.mark.slow
def test_a_checkpoint_is_as_large_as_was_said(folder: Path) -> None:
    plan = Plan(load_config(["line.yaml", "task.hidden=3000"]))
    assert plan.state.parameters == 9001
    assert main(["fit", "line.yaml", "task.hidden=3000", "trainer.max_steps=1", "loggers=null"]) == 0
    (directory,) = (folder / "runs/default/version_0/checkpoints").glob("step-*")
    written = sum(file.stat().st_size for file in directory.iterdir())
    assert 0 <= written - plan.state.checkpoint < 12_000  # state.json records torch's switches, too


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("fsdp", (4, 4, 4, 1)),
        ("zero1", (4, 1, 4, 1)),
        ("{name: mesh, data: 2, shard: auto}", (4, 2, 2, 1)),
        ("{name: mesh, data: 4}", (4, 1, 1, 1)),
        ("{name: mesh, data: 2, pipeline: 2}", (2, 2, 2, 2)),
        ("{name: mesh, tensor: 2, pipeline: 2}", (1, 4, 4, 4)),
        ("ddp", (4, 1, 1, 1)),
        ("data_parallel", (1, 1, 1, 1)),
        ("{name: ddp_model_parallel, devices_per_replica: 2}", (2, 1, 1, 1)),
        ("{name: ddp_rpc, servers: 2}", (4, None, 1, 1)),
    ],
)
def test_a_rank_holds_its_parts_of_the_state(strategy: str, parts: tuple[int | None, ...]) -> None:
    plan = Plan(load_config(["line.yaml", "trainer.devices=4", f"trainer.strategy={strategy}"]))
    batches, weights, optimizer, layers = parts
    assert plan.run.parts == (batches, weights, optimizer, layers)
    if weights is not None:
        rank = plan.state.of_rank(weights, optimizer or 1)
        assert rank.weights == rank.gradients == 40 // weights
        assert format_bytes(rank.total) in dict(plan.rows(None))["State per rank"]


def test_what_cannot_be_measured_is_said(folder: Path) -> None:
    plan = rows("task.fault=values", "task.optimizer=Adafactor", "trainer.precision=bf16-true")
    assert "parameters 20 B" in plan["State per rank"]
    assert "(Adafactor)" in plan["State per rank"]
    plan = rows("task.optimizer=LBFGS", memory=10**9)
    assert "LBFGS cannot be measured without data" in plan["State per rank"]
    assert "without the optimizer's state" in plan["Memory"]


def test_a_huge_task_needs_no_memory() -> None:
    plan = rows("task.hidden=100_000_000_000")
    assert plan["State per rank"] == "4.8 TB: parameters 1.2 TB, gradients 1.2 TB, optimizer 2.4 TB (AdamW)"


# --- activations ------------------------------------------------------------------------------------------------------
class Deep(lg.Task):
    """Four equal blocks, of which each keeps its input and the input of its ReLU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).sum()


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu())


def test_activations_are_what_autograd_keeps() -> None:
    row = 64 * 4 * 32  # bytes of a batch of 32 at a block's border
    plain = measure_activations(Deep(), torch.zeros(32, 64), (), Precision(32, "cpu"))
    assert plain == 4 * row + 4 * 4 * row  # borders with the batch itself, and the output of each ReLU
    recomputed = measure_activations(Deep(), torch.zeros(32, 64), ("Block",), Precision(32, "cpu"))
    assert recomputed == 4 * row  # borders: what a block keeps inside is computed again


def test_activations_that_need_values_are_unknown(folder: Path) -> None:
    source = (folder / "checked_task.py").read_text()
    reads = "    def training_step(self, batch, batch_idx):\n        return float(next(self.parameters()).sum())\n"
    (folder / "checked_task.py").write_text(f"{source}\n\nclass Reads(Line):\n{reads}")
    assert "training_step fails on fake tensors: " in rows("task._target_=checked_task.Reads")["Activations"]
    assert "the loader creates its own batches" in rows("data.kind=stream")["Activations"]


# --- the command line -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "verdict"),
    [("80GB", "of 80 GB: fits"), ("400MB", "of 400 MB: may not fit"), ("9MB", "of 9 MB: does not fit")],
)
def test_a_plan_says_whether_it_fits(size: str, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "line.yaml", "task.hidden=6_000_000", "--memory", size]) == 0
    assert verdict in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("size", ["80", "H100", "lots"])
def test_a_memory_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="expected a size such as 80GB or 40GiB"):
        parse_memory(size)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory=80GB"], "memory is not a config key"),
        (["devices=3"], "Did you mean 'trainer.devices'?"),
        (["trainer.devices=3", "trainer.replicas=2", "trainer.strategy=ddp"], "more processes than replicas"),
        (["trainer.devices=0"], "trainer.devices must be a positive count"),
        (["trainer.devices=3", "trainer.strategy={name: mesh, pipeline: 2}"], "pipeline 2 = 2, but there are 3"),
        (["trainer.use_distributed_sampler=false"], "legato plan cannot count steps"),
    ],
)
def test_mistakes_end_with_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "line.yaml", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in " ".join(shown.err.split())


@pytest.mark.slow
def test_a_run_without_a_step_is_refused_as_by_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["line.yaml", "data.kind=drop", "loggers=null", "trainer.strategy=single", "trainer.replicas=13"]
    for command in ("plan", "fit"):
        assert main([command, *words]) == 1
        output = capsys.readouterr()
        assert ("no steps" if command == "plan" else "too little training data for a step") in output.err
        assert ("Steps per epoch 0" in output.out) == (command == "plan")
