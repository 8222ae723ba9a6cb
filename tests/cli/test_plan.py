"""`legato plan`: its arithmetic against what training deals out, its figures against real state, its command line."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import ConfigError
from legato.base.quantities import format_bytes
from legato.cli.main import main
from legato.cli.plan.plan import Plan, render, render_batches, replicas_by_rank
from legato.cli.plan.sources import PlanArguments, make_plan
from legato.cli.plan.state_size import VALUES_PER_PARAMETER, from_parameters, measure
from legato.trainer.data.dealing import Dealing, DealtData
from legato.trainer.data.sampling import Layout
from legato.trainer.strategies.mesh.sizes import Sizes

CONFIG = """\
task: {_target_: checked_task.Line}
data: {_target_: checked_task.Points}
trainer: {max_epochs: 3, accelerator: cpu}
"""
BY_HAND = ("length=1e12", "batch_size=64", "parameters=7e9")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task with its data, and a config."""
    shutil.copy(Path(__file__).parents[1].joinpath("checked_task.py"), tmp_path)
    (tmp_path / "line.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_task", raising=False)
    return tmp_path


def planned(*arguments: str) -> Plan:
    words, rest = PlanArguments.read(["line.yaml", *arguments])
    return make_plan(words, rest)


# --- arithmetic -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    replicas=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    limit=st.sampled_from([1.0, 0.5, 2]),
    data=st.data(),
)
def test_a_plan_is_what_training_deals_out(
    length: int,
    batch_size: int,
    replicas: int,
    accumulate: int,
    drop_last: bool,
    shuffle: bool,
    limit: Any,
    data: st.DataObject,
) -> None:
    processes, whole = data.draw(st.integers(1, replicas)), data.draw(st.booleans())
    epoch, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9))
    plan = Plan(
        length, batch_size, replicas, processes, accumulate=accumulate, drop_last=drop_last, limit=limit,
        seed=seed, shuffle=shuffle, whole_rounds=whole,
    )  # fmt: skip
    loader = DataLoader(range(length), batch_size, shuffle=shuffle, drop_last=drop_last)  # type: ignore[arg-type]
    layout, sizes = Layout(replicas, processes), {}
    for rank in range(processes):
        source = DealtData(loader, Dealing(layout, rank, accumulate, seed, whole), limit)
        assert source.rounds == plan.deal.rounds
        steps = list(source.epoch(epoch))
        assert len(steps) == plan.deal.steps
        for step, dealt in enumerate(steps):
            seen = plan.batches_at(rank, step, epoch)
            assert [(item.replica, item.round, found) for item, found in seen] == [
                (item.replica, item.batch_idx, item.batch.tolist()) for item in dealt.batches
            ]
            sizes[step] = dealt.samples
    last = plan.deal.steps - 1
    assert all(size == plan.step_samples for step, size in sizes.items() if step < last)
    assert plan.last_step_samples == (sizes[last] if sizes else 0)


@pytest.mark.parametrize(
    ("epochs", "steps", "total"),
    [(3, None, 21), (None, 10, 10), (3, 10, 10), (1, 10, 7), (None, None, None)],
)
def test_total_steps_are_the_first_limit(epochs: int | None, steps: int | None, total: int | None) -> None:
    assert Plan(50, 4, 2, 2, max_epochs=epochs, max_steps=steps).total_steps == total


def test_layouts_are_told_in_few_words() -> None:
    words = "ranks 0-1: 3 replicas each (0-5), rank 2: 2 replicas (6-7)"
    assert replicas_by_rank(Layout(8, 3)) == words
    assert replicas_by_rank(Layout(4, 4)) == "ranks 0-3: 1 replica each (0-3)"
    assert replicas_by_rank(Layout(1, 1)) == "rank 0: 1 replica (0)"
    assert f"8: {words}" in " ".join(render(Plan(100, 1, 8, 3)).split())


def test_ranks_that_share_replicas_and_ranks_without() -> None:
    plan = Plan(100, 2, 3, 16, nodes=2, sizes=Sizes(data=2, shard=1, tensor=2, pipeline=4))
    assert [list(plan.ranks.owned(rank, plan.layout)) for rank in range(5)] == [[0, 1], [0, 1], [2], [2], [0, 1]]
    assert plan.batches_at(2, 3, 0) == plan.batches_at(3, 3, 0) == plan.batches_at(6, 3, 0) != plan.batches_at(0, 3, 0)
    text = " ".join(render(plan).split())
    assert "16 on 2 nodes, 8 each: pipeline 4 x data 2 x tensor 2" in text
    assert "ranks 0-1: 2 replicas together (0-1), ranks 2-3: 1 replica together (2); ranks 4-15: the same, 4" in text
    assert replicas_by_rank(Layout(4, 2), 2) == "ranks 0-3: 2 replicas for every 2 (0-3)"
    plan = Plan(100, 2, 4, 5, servers=2)
    assert [len(plan.ranks.owned(rank, plan.layout)) for rank in range(5)] == [2, 1, 1, 0, 0]
    assert (plan.batches_at(3, 0, 0), plan.step_samples) == ([], 8)
    text = " ".join(render(plan).split())
    assert "5: 3 trainers, 2 servers" in text
    assert "ranks 3-4: none, servers of remote modules" in text
    assert "0 samples, as it is a server" in render_batches(plan, 3, 0, 0)
    with pytest.raises(ConfigError, match="more processes than replicas"):
        Plan(100, 2, 2, 5, servers=2)


def test_the_largest_layout_is_a_matter_of_arithmetic() -> None:
    plan = Plan(10**12, 64, 16_384, 16_384, nodes=2048, accumulate=8, max_epochs=10, state=from_parameters(10**12))
    text = render(plan)
    (item, first), *_ = plan.batches_at(16_383, plan.deal.steps // 2, 9)
    assert "16,384 on 2,048 nodes, 8 each" in text
    assert (item.replica, len(set(first))) == (16_383, 64)
    assert plan.deal.steps == -(-(10**12) // (16_384 * 8 * 64))


def test_what_there_is_not_is_refused() -> None:
    plan = Plan(50, 4, 2, 2, max_epochs=3)
    for name, arguments in (("rank", (2, 0, 0)), ("step", (0, 7, 0)), ("epoch", (0, 0, 3)), ("rank", (-1, 0, 0))):
        with pytest.raises(ConfigError, match=f"{name}="):
            plan.batches_at(*arguments)
    assert plan.batches_at(1, 6, 2) == []  # the last step has two samples, which go to replica 0
    with pytest.raises(ConfigError, match="more processes than replicas"):
        Plan(50, 4, 2, 3)
    with pytest.raises(ConfigError, match="batch_size"):
        Plan(50, 0, 2, 2)


# --- state ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "kind", "options"),
    [
        ("sgd", "SGD", {}),
        ("sgd_momentum", "SGD", {"momentum": 0.9}),
        ("adam_amsgrad", "Adam", {"amsgrad": True}),
        *((word, kind, {}) for word, kind in (("adam", "Adam"), ("adamw", "AdamW"), ("adamax", "Adamax"))),
        *((word, kind, {}) for word, kind in (("nadam", "NAdam"), ("radam", "RAdam"), ("rprop", "Rprop"))),
        *((word, kind, {}) for word, kind in (("adagrad", "Adagrad"), ("adadelta", "Adadelta"), ("asgd", "ASGD"))),
        *((word, kind, {}) for word, kind in (("rmsprop", "RMSprop"), ("muon", "Muon"))),
    ],
)
def test_optimizer_state_is_what_a_real_step_leaves(word: str, kind: str, options: dict[str, Any]) -> None:
    """By hand and on the meta device, against the optimizer's state after a step on real memory."""
    width = 64
    real = torch.nn.Parameter(torch.randn(width, width))
    real.grad = torch.randn(width, width)
    optimizer = getattr(torch.optim, kind)([real], lr=0.1, **options)
    optimizer.step()
    kept = [value for value in optimizer.state[real].values() if isinstance(value, torch.Tensor)]
    large = sum(value.nbytes for value in kept if value.numel() > 1)
    assert from_parameters(width**2, word).optimizer_bytes == large
    task = lg.Task()
    task.weight = torch.nn.Parameter(torch.empty(width, width, device="meta"))
    found = measure(task, [getattr(torch.optim, kind)(task.parameters(), lr=0.1, **options)])
    assert found.optimizer_bytes == sum(value.nbytes for value in kept)


def test_every_word_for_an_optimizer_was_tried() -> None:
    (marks,) = (mark for mark in test_optimizer_state_is_what_a_real_step_leaves.pytestmark)  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == set(VALUES_PER_PARAMETER)


def test_state_by_hand() -> None:
    state = from_parameters(7_000_000_000, "adamw", 2)
    assert (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes) == (14 * 10**9, 14 * 10**9, 28 * 10**9)
    assert (format_bytes(state.process_bytes), format_bytes(state.checkpoint_bytes)) == ("56 GB", "42 GB")
    assert from_parameters(10, "3").optimizer_bytes == 120
    with pytest.raises(ConfigError, match="Did you mean 'adamw'"):
        from_parameters(10, "adamww")
    assert [format_bytes(count) for count in (12, 1500, 2 * 10**17)] == ["12 B", "1.5 kB", "200 PB"]


@pytest.mark.slow
def test_a_checkpoint_is_as_large_as_was_said(folder: Path) -> None:
    plan = planned("task.hidden=3000")
    assert plan.state is not None
    assert plan.state.parameters == 9001
    assert main(["fit", "line.yaml", "task.hidden=3000", "trainer.max_steps=1", "loggers=null"]) == 0
    (directory,) = (folder / "runs/default/version_0/checkpoints").iterdir()
    written = sum(file.stat().st_size for file in directory.iterdir())
    assert 0 <= written - plan.state.checkpoint_bytes < 10_000  # state.json records torch's switches, too


# --- from a config --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("fsdp", (4, 4)),
        ("zero1", (1, 4)),
        ("{name: mesh, data: 2, shard: auto}", (2, 2)),
        ("{name: mesh, data: 4}", (1, 1)),
        ("{name: mesh, data: 2, pipeline: 2}", (2, 2)),
        ("{name: mesh, tensor: 2, pipeline: 2}", (4, 4)),
        ("ddp", (1, 1)),
    ],
)
def test_a_rank_holds_its_parts_of_the_state(strategy: str, parts: tuple[int, int]) -> None:
    plan = planned("devices=4", f"trainer.strategy={strategy}", "parameters=1000", "optimizer=adamw")
    assert plan.parts == parts
    assert plan.state is not None
    own = plan.state.of_rank(*parts)
    assert own.parameter_bytes == own.gradient_bytes == 4000 // parts[0]
    assert own.optimizer_bytes == 8000 // parts[1]
    assert f"State of a rank {format_bytes(own.process_bytes)}" in render(plan)
    assert f"A checkpoint    {format_bytes(12_000)}" in render(plan)
    assert ("parameters= does not say where it is cut" in " ".join(render(plan).split())) == ("pipeline" in strategy)


@pytest.mark.slow
def test_the_state_of_each_stage_is_told() -> None:
    text = " ".join(render(planned("devices=4", "trainer.strategy={name: mesh, pipeline: 2, data: auto}")).split())
    assert "104 B on ranks 0-1 (stage 0: layer.0): parameters 24 B, gradients 24 B, optimizer 56 B (AdamW)" in text


@pytest.mark.slow
def test_what_trainers_and_servers_hold_is_not_known_by_hand() -> None:
    plan = planned("devices=2", "trainer.strategy={name: ddp_rpc, servers: 2}", "parameters=1000")
    assert (plan.processes, plan.replicas, plan.servers, plan.parts) == (4, 2, 2, None)
    assert "State of a rank unknown: parameters= does not tell" in render(plan)
    assert "A checkpoint    12 kB" in render(plan)


@pytest.mark.slow
def test_remote_modules_count_where_every_process_has_them(folder: Path) -> None:
    source = (folder / "checked_task.py").read_text()
    remote = "    def remote_modules(self):\n        return {'table': lambda: nn.Embedding(10, 4)}\n"
    (folder / "checked_task.py").write_text(f"{source}\n\nclass Remote(Line):\n{remote}")
    plan = planned("task._target_=checked_task.Remote", "devices=2")
    assert plan.state is not None
    assert (plan.state.parameters, plan.shares) == (50, ())
    plan = planned("task._target_=checked_task.Remote", "devices=2", "trainer.strategy=ddp_rpc", "optimizer=sgd")
    assert [share.size.parameters for share in plan.shares] == [10, 40]
    assert [share.size.optimizer_bytes for share in plan.shares] == [0, 0]
    assert "server 0: table" in render(plan)


@pytest.mark.slow
def test_a_plan_of_a_config() -> None:
    plan = planned("nodes=2", "devices=2", "trainer.replicas=5", "trainer.accumulate_grad_batches=2", "seed=4")
    assert (plan.processes, plan.nodes, plan.replicas, plan.length, plan.batch_size) == (4, 2, 5, 50, 4)
    assert (plan.step_samples, plan.deal.steps, plan.last_step_samples, plan.total_steps) == (40, 2, 10, 6)
    assert (plan.seed, plan.shuffle, plan.drop_last) == (4, True, False)
    assert plan.state is not None
    assert (plan.state.parameters, plan.state.optimizer) == (10, "AdamW")
    assert plan.state.parameter_bytes == plan.state.gradient_bytes == 40
    assert plan.state.optimizer_bytes == 80 + 4 * 4  # and a step count for each tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.kind=in_order", {"shuffle": False, "length": 50}),
        ("data.kind=drop", {"drop_last": True}),
        ("data.kind=weighted", {"length": 100}),
        ("data.kind=batches", {"unit": "batch", "length": 3, "batch_size": 1}),
        ("data.kind=stream", {"unit": "batch", "length": 50}),
        ("data.kind=two", {"unit": "batch", "length": 13, "batch_size": 1}),
        ("trainer.overfit_batches=2", {"shuffle": False, "limit": 2}),
        ("trainer.fast_dev_run=true", {"limit": 1, "max_epochs": 1, "max_steps": 1}),
        ("trainer.strategy=data_parallel", {"processes": 1, "replicas": 1}),
        ("trainer.strategy=fsdp", {"processes": 1, "parts": (1, 1)}),
        ("trainer.max_steps=9", {"max_steps": 9, "max_epochs": 3}),
        ("trainer.max_epochs=null", {"max_epochs": 1000}),
        ("trainer.max_epochs=-1", {"max_epochs": None}),
        ("task._target_=checked_task.Manual", {"whole_rounds": True}),
        ("batch_size=7", {"length": 50, "batch_size": 7}),
        ("length=1_000", {"length": 1000, "batch_size": 4}),
    ],
)
def test_a_plan_follows_its_config(override: str, expected: dict[str, Any]) -> None:
    devices = "1" if "data_parallel" not in override else "4"
    plan = planned(override, f"devices={devices}")
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.slow
def test_a_users_own_order_is_what_training_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from checked_task import Points  # type: ignore[import-not-found]

    for kind in ("weighted", "batches"):
        plan = planned(f"data.kind={kind}", "devices=2")
        source = DealtData(Points(kind=kind).train_dataloader(), Dealing(Layout(2, 2), 1, 1, 0))
        source.source.loader = DataLoader(range(50), batch_sampler=source.source.loader.batch_sampler)  # type: ignore[arg-type, assignment]
        (_, found), *_ = plan.batches_at(1, 0, 1)
        item = next(source.epoch(1)).batches[0]
        assert (found[0] if kind == "batches" else found) == item.batch.tolist()
    assert main(["plan", "line.yaml", "data.kind=batches", "devices=2", "rank=1"]) == 0
    assert "replica 1, batch 0, positions 1: [2]" in capsys.readouterr().out


@pytest.mark.slow
def test_a_task_that_needs_values_is_measured_all_the_same() -> None:
    plan = planned("task.fault=values", "task.optimizer=Adafactor", "trainer.precision=bf16-true")
    assert plan.state is not None
    assert plan.state.parameter_bytes == 20
    assert plan.state.optimizer_bytes is not None
    assert plan.state.optimizer == "Adafactor"


@pytest.mark.slow
def test_a_huge_task_needs_no_memory() -> None:
    plan = planned("task.hidden=100_000_000_000")
    assert plan.state is not None
    assert plan.state.parameters == 3 * 10**11 + 1
    assert "State of a rank 4.8 TB: parameters 1.2 TB, gradients 1.2 TB, optimizer 2.4 TB (AdamW)" in render(plan)


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_asked_is_said_so_and_can_be_named() -> None:
    plan = planned("task.optimizer=LBFGS")
    assert plan.state is not None
    assert plan.state.optimizer_bytes is None
    assert "give optimizer=NAME" in render(plan)
    plan = planned("task.optimizer=LBFGS", "optimizer=sgd_momentum")
    assert plan.state is not None
    assert plan.state.optimizer_bytes == 40


# --- the command line -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_by_hand_nothing_is_built_and_torch_stays_out(folder: Path) -> None:
    source = (folder / "checked_task.py").read_text()
    (folder / "checked_task.py").write_text(f"{source}\nraise SystemExit('imported')\n")
    words = ["nodes=2048", "devices=8", *BY_HAND, "rank=16000", "step=5", "epoch=2", "trainer.precision=bf16-true"]
    command = [sys.executable, "-X", "importtime", "-m", "legato", "plan", "line.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "Steps an epoch  953,675; the last has 331,776 samples" in done.stdout
    assert "State of a rank 56 GB: parameters 14 GB, gradients 14 GB, optimizer 28 GB (adamw)" in done.stdout
    assert "Rank 16000 at step 5 of epoch 2 (global_step 1,907,355 to 1,907,356): 64 samples" in done.stdout
    numbers = done.stdout.partition("positions 6266880-6266943: ")[2].split()
    assert [int(one) for one in numbers] == Plan(10**12, 64, 16_384, 16_384).batches_at(16_000, 5, 2)[0][1]
    assert not list(folder.glob("runs*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnak=3"], "Did you mean 'rank'?"),
        (["rank=two"], "rank=two: expected a count"),
        (["drop_last=yes"], "expected true or false"),
        (["devices=3", "trainer.replicas=2", "trainer.strategy=ddp"], "more processes than replicas"),
        (["devices=2", "rank=2"], "rank=2: there are 0 to 1."),
        (["devices=1", "nodes=2", "trainer.strategy=single"], "runs in one process, but trainer.num_nodes=2"),
        (["devices=0"], "trainer.devices must be a positive count"),
        (["devices=4", "trainer.strategy={name: mesh, pipeline: 4}"], "cannot make 4 parts"),
        (["devices=2", "trainer.strategy={name: mesh, pipeline: 2, split: [1, 2]}"], "adds up to 1 + 2 = 3"),
        (["devices=2", "trainer.strategy={name: mesh, pipeline: 2, schedule: 1fb}"], "Did you mean '1f1b'?"),
        (["devices=2", "trainer.strategy={name: mesh, tensor: 2}"], "tensor=2 needs a plan: give Line a method"),
        (["devices=2", "trainer.strategy={name: mesh, pipeline: 4}"], "pipeline 4 = 4, but there are 2 processes"),
        (["devices=2", "trainer.strategy=ddp_rpc"], "Line names no remote_modules"),
        (["devices=2", "nodes=2", "trainer.strategy=ddp_rpc"], "runs on one node, but trainer.num_nodes=2"),
        (["devices=2", "trainer.strategy={name: ddp_rpc, servers: 0}"], "servers=0: expected at least 1 process"),
        (["devices=two"], "trainer.devices must be a positive count"),
        (["nodes=two"], "override: trainer.num_nodes must be int"),
        (["data.kind=endless"], "has no length: give length= and batch_size="),
        (["data.kind=stream", "length=5"], "give both, or neither"),
        (["trainer.use_distributed_sampler=false"], "there is nothing to plan"),
        ([*BY_HAND, "optimizer=adamww"], "optimizer='adamww' is not known. Did you mean 'adamw'?"),
        (["length=5", "batch_size=0"], "expected batch_size to be at least 1"),
    ],
)
def test_mistakes_end_with_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "line.yaml", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in " ".join(shown.err.split())


@pytest.mark.slow
@pytest.mark.parametrize("words", [["trainer.replicas=13"], ["trainer.limit_train_batches=0"]])
def test_a_run_without_a_step_is_refused_as_by_fit(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "fit"):
        assert main([command, "line.yaml", "data.kind=drop", "loggers=null", "trainer.strategy=single", *words]) == 1
        said = capsys.readouterr()
        assert "no step" in said.err
        assert ("Steps an epoch  0" in said.out) == (command == "plan")


# --- a device ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("80GB", "of 80 GB: fits"),
        ("t4", "of 16.1 GB: fits"),
        ("400MB", "of 400 MB: may not fit"),
        ("9MB", "does not fit"),
    ],
)
def test_a_plan_says_whether_it_fits(memory: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "line.yaml", "task.hidden=6_000_000", f"memory={memory}"]) == 0
    assert said in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["80", "H10", "lots"])
def test_a_memory_that_is_none_is_refused(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "line.yaml", f"memory={memory}"]) == 2
    assert "expected a size such as 80GB or 40GiB, or a device." in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["data.kind=stream"], "the loader's batches are kept whole"),
        (["length=100", "batch_size=4"], "length= and batch_size= are given"),
        (["task._target_=checked_task.Reads"], "training_step without values: "),
    ],
)
def test_what_is_unknown_of_a_step_is_said(folder: Path, words: list[str], why: str) -> None:
    source = (folder / "checked_task.py").read_text()
    reads = "    def training_step(self, batch, batch_idx):\n        return float(next(self.parameters()).sum())\n"
    (folder / "checked_task.py").write_text(f"{source}\n\nclass Reads(Line):\n{reads}")
    assert why in " ".join(render(planned(*words)).split())
