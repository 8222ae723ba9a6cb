"""Sharded checkpoints: written by all processes, loaded on any layout, complete or absent."""

import errno
import itertools
import math
import os

import pytest
import torch
from ddp_cases import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_cases import CNN, GPT, RUNS, fit, in_one, mesh
from safetensors.torch import load_file
from several_ranks import on_ranks

import legato as lg
from legato.base.errors import CheckpointError
from legato.callbacks import Checkpoint
from legato.cli.main import main
from legato.trainer.checkpoints import commit, reading
from legato.trainer.checkpoints.background import Writer
from legato.trainer.checkpoints.shards import ShardBlock
from legato.trainer.processes.launch import run_workers


# --- parts ------------------------------------------------------------------------------------------------------------
def cut(sizes, counts):
    """Cut a box of these sizes into a grid of these counts, like torch.chunk; yield slices, some of them empty."""
    sides = []
    for size, count in zip(sizes, counts, strict=True):
        step = -(-size // count)
        sides.append([slice(min(size, i * step), min(size, (i + 1) * step)) for i in range(count)])
    return list(itertools.product(*sides))


boxes = st.integers(1, 3).flatmap(
    lambda ndim: st.tuples(
        st.tuples(*[st.integers(0, 7)] * ndim),
        st.tuples(*[st.integers(1, 3)] * ndim),
        st.tuples(*[st.integers(1, 3)] * ndim),
    )
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(box=boxes, copies=st.integers(1, 2))
def test_any_block_is_read_from_the_parts_of_any_grid(tmp_path_factory, box, copies):
    sizes, written, wanted = box
    tensor = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)
    places = cut(sizes, written) * copies  # several ranks may have the same block
    directory = tmp_path_factory.mktemp("parts") / "step-00000001"

    def save(rank):
        place = places[rank.rank]
        block = ShardBlock(tensor[place].clone(), sizes, tuple(side.start for side in place))
        contents = {"state_dict": {"w": block, "plain": torch.ones(2)}, "moments": [block], "rank": rank.rank}
        commit.write(directory, contents, ranks=rank)

    on_ranks(len(places), save)
    stored = reading.read_checkpoint(directory, in_parts=("state_dict",))
    assert stored["rank"] == 0
    assert torch.equal(stored["state_dict"]["plain"], torch.ones(2))
    assert torch.equal(stored["moments"][0], tensor)
    for place in cut(sizes, wanted):
        assert torch.equal(stored["state_dict"]["w"][place], tensor[place])
    sizes_of_files = sum((directory / name.name).stat().st_size for name in directory.glob("model-*"))
    assert sizes_of_files < tensor.nbytes + 200 * len(places)  # each block once


def test_parts_that_do_not_make_up_the_whole_are_refused(tmp_path):
    def save(rank):
        block = ShardBlock(torch.ones(2), (5,), (rank.rank * 2,))  # the last number is missing
        commit.write(tmp_path / "a", {"state_dict": {"w": block}}, ranks=rank)

    on_ranks(2, save)
    with pytest.raises(CheckpointError, match=r"state_dict\.w: the shards of 'w' do not make up a tensor of shape"):
        reading.read_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "model-00001.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors has 1 bytes"):
        reading.read_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_spoils_it_for_all_and_leaves_nothing(tmp_path, monkeypatch, background):
    def save(rank, step):
        contents = {"state_dict": {"w": ShardBlock(torch.ones(2) * step, (4,), (rank.rank * 2,))}}
        if not background:
            commit.write(tmp_path / f"step-{step:08d}", contents, ranks=rank)
            return
        writer = Writer()
        writer.save(tmp_path / f"step-{step:08d}", contents, ranks=rank)
        writer.wait()

    on_ranks(2, lambda rank: save(rank, 1))
    really = os.open

    def full(path, *arguments, **named):
        if str(path).endswith("model-00001.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(path, *arguments, **named)

    monkeypatch.setattr(os, "open", full)
    messages = []

    def fails(rank):
        with pytest.raises(CheckpointError) as caught:
            save(rank, 2)
        messages.append((rank.rank, str(caught.value)))

    on_ranks(2, fails)
    messages = dict(messages)
    assert "Rank 1 could not write its part of the checkpoint" in messages[0]
    assert "No space left on device" in messages[0]
    assert "No space left on device" in messages[1]
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert torch.equal(reading.read_checkpoint(tmp_path / "step-00000001")["state_dict"]["w"], torch.ones(4))


# --- runs -------------------------------------------------------------------------------------------------------------
LAYOUTS = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "zero1": (2, "zero1"),
    "tensor": (2, mesh(tensor=2)),
    "shard": (4, mesh(shard=4)),
    "data x shard": (4, mesh(data=2, shard=2)),
    "shard x tensor": (4, mesh(shard=2, tensor=2)),
}
"""Processes and strategy."""
OPTIONS = {**RUNS["adamw"], "max_epochs": 6, "enable_checkpointing": True, "limit_val_batches": 0}


def grouped():
    """Group the layouts by their number of processes, so that each number starts once."""
    results = {}
    for name, (processes, strategy) in LAYOUTS.items():
        results.setdefault(processes, {})[name] = strategy
    return results


class Looks(lg.Callback):
    """Saves the initial state of the training, reads it back in full, and stops."""

    def __init__(self, folder):
        self.folder, self.restored = folder, None

    def on_train_start(self, trainer, task):
        trainer.save_checkpoint(self.folder)
        saved = reading.read_checkpoint(self.folder)
        self.restored = saved["state_dict"], saved["optimizer_states"][0]["state"]
        trainer.should_stop = True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train two steps on every layout; return the folder with a checkpoint of each layout."""
    root = tmp_path_factory.mktemp("saved")

    def work(processes, layouts):
        for name, strategy in layouts.items():
            fit(
                GPT("adamw"),
                **{**OPTIONS, "max_steps": 2, "strategy": strategy, "devices": processes},
                default_root_dir=root / name,
                run_name="one",
            )

    for processes, layouts in grouped().items():
        run_workers(lambda p=processes, group=layouts: work(p, group), processes)
    return root


def of(saved, name):
    return saved / name / "one" / "version_0" / "checkpoints" / "step-00000002"


@pytest.mark.slow
def test_each_process_writes_its_part_and_nothing_is_gathered(saved):
    sizes = {}
    for name in ("shard", "shard x tensor", "single"):
        files = {path.name: path.stat().st_size for path in of(saved, name).iterdir()}
        assert all(f"model-{rank:05d}.safetensors" in files for rank in range(4)) or name == "single"
        sizes[name] = files
    total = sizes["single"]["model.safetensors"] + sizes["single"]["tensors.safetensors"]
    for name in ("shard", "shard x tensor"):
        for rank in range(4):
            share = sum(size for file, size in sizes[name].items() if f"-{rank:05d}." in file)
            assert share < total / 2  # headers of the tiny model included
        assert sizes[name]["model.safetensors"] + sizes[name]["tensors.safetensors"] < total / 3


@pytest.mark.slow
def test_every_layout_takes_over_the_checkpoint_of_every_other(saved, tmp_path):
    """Weights and optimizer states are equal to the last bit, whichever processes wrote them."""

    def work(processes, layouts):
        results = {}
        for (name, strategy), source in itertools.product(layouts.items(), LAYOUTS):
            looks = Looks(tmp_path / f"{name}-{source}")
            fit(
                GPT("adamw"),
                **{**OPTIONS, "max_steps": 3, "strategy": strategy, "devices": processes},
                default_root_dir=tmp_path / "runs",
                run_name=f"{name}-{source}".replace(" ", ""),
                callbacks=[looks],
                resume=of(saved, source),
            )
            results[name, source] = looks.restored
        return results

    wanted = {name: reading.read_checkpoint(of(saved, name)) for name in LAYOUTS}
    for processes, layouts in grouped().items():
        results = run_workers(lambda p=processes, group=layouts: work(p, group), processes)
        for (name, source), (weights, moments) in results.items():
            theirs = wanted[source]
            assert weights.keys() == theirs["state_dict"].keys()
            for key, value in theirs["state_dict"].items():
                assert torch.equal(weights[key], value), (name, source, key)
            for index, values in theirs["optimizer_states"][0]["state"].items():
                for key, value in values.items():
                    assert torch.equal(torch.as_tensor(moments[index][key]), torch.as_tensor(value)), (name, source)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GPT, CNN])
def test_a_run_that_moves_from_layout_to_layout_is_the_run_of_one_process(tmp_path, kind):
    """Four processes with sharded weights, two with cut layers, one, two with full copies, and four again."""
    legs = ["shard", "tensor", "single", "ddp", "shard x tensor"]

    def leg(number, name):
        processes, strategy = LAYOUTS[name]
        options = {**OPTIONS, "strategy": strategy, "devices": processes}
        if number < len(legs) - 1:
            options["max_steps"] = number + 1
        asynchronous = [Checkpoint(every_n_train_steps=1, asynchronous=number % 2 == 0)]
        task = kind("adamw")
        fit(task, **options, default_root_dir=tmp_path, run_name="moves", callbacks=asynchronous, resume="auto")
        return flat(task)

    for number, name in enumerate(legs):
        weights = run_workers(lambda n=number, layout=name: leg(n, layout), LAYOUTS[name][0])
    expected, _ = in_one(kind("adamw"), **{**RUNS["adamw"], "max_epochs": 6})
    assert float((weights - expected).abs().max()) < 5e-6


@pytest.mark.slow
def test_export(saved, tmp_path, capsys):
    target = tmp_path / "out.safetensors"
    assert main(["export", str(of(saved, "shard x tensor")), str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    expected = reading.read_checkpoint(of(saved, "shard x tensor"))["state_dict"]
    results = load_file(target)
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], expected[name]) for name in results)
    assert main(["export", str(of(saved, "single")), str(target)]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "b.safetensors")]) == 1
    assert main(["export", "x"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]
