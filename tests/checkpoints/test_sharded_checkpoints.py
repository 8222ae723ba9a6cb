"""Sharded checkpoints: written by all processes, loaded on any layout, complete or absent."""

import errno
import itertools
import math
import os
from functools import partial

import pytest
import torch
from ddp_cases import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_cases import CNN, GPT, RUNS, fit, in_one, mesh
from safetensors.torch import load_file
from several_ranks import on_ranks
from shared_processes import run_cases

import legato as lg
from legato.base.errors import CheckpointError
from legato.callbacks import Checkpoint
from legato.cli.main import main
from legato.trainer.checkpoints import commit, reading
from legato.trainer.checkpoints.background import Writer
from legato.trainer.checkpoints.shards import ShardBlock


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
SOURCES = {
    **{name: tuple(LAYOUTS) for name in ("single", "ddp", "zero1", "tensor")},
    "shard": ("single", "tensor", "shard x tensor"),
    "data x shard": ("single", "tensor", "shard"),
    "shard x tensor": ("single", "tensor", "data x shard"),
}
"""Whose checkpoints each layout takes over: whole ones, and those that are cut in other ways."""
LEGS = {
    GPT: ("single", "tensor", "shard", "shard x tensor", "ddp"),
    CNN: ("single", "tensor", "shard", "ddp"),
}
"""One process, two with cut layers, four with sharded weights, four with both, and two with full copies."""
OPTIONS = {"max_epochs": 6, "limit_val_batches": 0}


class Looks(lg.Callback):
    """Saves the initial state of the training, reads it back in full, and stops."""

    def __init__(self, folder):
        self.folder, self.restored = folder, None

    def on_train_start(self, trainer, task):
        trainer.save_checkpoint(self.folder)
        if trainer.is_global_zero:
            saved = reading.read_checkpoint(self.folder)
            self.restored = saved["state_dict"], saved["optimizer_states"][0]["state"]
        trainer.should_stop = True


def options_of(name):
    processes, strategy = LAYOUTS[name]
    return {**OPTIONS, "strategy": strategy, "devices": processes}


def save(root, name):
    """Train one step."""
    fit(
        GPT("adamw"),
        **{**options_of(name), "replicas": 4, "max_steps": 1, "enable_checkpointing": True},
        default_root_dir=root / name,
        run_name="one",
    )


def take_over(root, name, source):
    """Return weights and optimizer states right after a resume."""
    looks = Looks(root / "taken" / f"{name}-{source}")
    options = {**options_of(name), "max_steps": 2, "logger": None}
    fit(GPT("adamw"), **options, callbacks=[looks], resume=of(root, source))
    return looks.restored


def leg(root, kind, name):
    """Train one step more, on the last layout all that is left; return the weights."""
    number = LEGS[kind].index(name)
    last = number == len(LEGS[kind]) - 1
    limit = {} if last else {"max_steps": number + 1}
    saver = Checkpoint(every_n_train_steps=1, asynchronous=number % 2 == 0)
    task, folder = kind("adamw"), root / "moves" / kind.__name__
    options = {**RUNS["adamw"], **options_of(name), **limit, "enable_checkpointing": True, "callbacks": [saver]}
    fit(task, **options, default_root_dir=folder, run_name="moves", resume="auto")
    return flat(task) if last else None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def results(saved):
    """All runs: each number of processes starts at most twice. Returns what `take_over` and `leg` return."""

    def cases(processes, *makers):
        names = [name for name in LAYOUTS if LAYOUTS[name][0] == processes]
        return {key: case for make in makers for name in names for key, case in make(name).items()}

    def saves(name):
        return {name: partial(save, saved, name)}

    def legs(name):
        return {(kind, name): partial(leg, saved, kind, name) for kind, names in LEGS.items() if name in names}

    def takes(name):
        return {(name, source): partial(take_over, saved, name, source) for source in SOURCES[name]}

    def first_two(name):
        return {**saves(name), **(legs(name) if name == "tensor" else {})}

    for case in cases(1, saves, legs).values():
        case()
    outcomes = run_cases(cases(2, first_two), 2, saved / "a")
    outcomes.update(run_cases(cases(4, saves, legs, takes), 4, saved / "b"))
    outcomes.update(run_cases(cases(2, takes, lambda name: legs(name) if name == "ddp" else {}), 2, saved / "c"))
    outcomes.update({name: case() for name, case in cases(1, takes).items()})
    return outcomes


def of(saved, name):
    return saved / name / "one" / "version_0" / "checkpoints" / "step-00000001"


@pytest.mark.slow
@pytest.mark.usefixtures("results")
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
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_over_the_checkpoints_of_others(saved, results, name):
    """Weights and optimizer states are equal to the last bit, whichever processes wrote them."""
    for source in SOURCES[name]:
        weights, moments = results[name, source]
        theirs = reading.read_checkpoint(of(saved, source))
        assert weights.keys() == theirs["state_dict"].keys()
        for key, value in theirs["state_dict"].items():
            assert torch.equal(weights[key], value), (source, key)
        for index, values in theirs["optimizer_states"][0]["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(moments[index][key]), torch.as_tensor(value)), source


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEGS)
def test_a_run_that_moves_from_layout_to_layout_is_the_run_of_one_process(results, kind):
    expected, _ = in_one(kind("adamw"), **{**RUNS["adamw"], "max_epochs": 6})
    assert float((results[kind, LEGS[kind][-1]] - expected).abs().max()) < 5e-6


@pytest.mark.slow
@pytest.mark.usefixtures("results")
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
