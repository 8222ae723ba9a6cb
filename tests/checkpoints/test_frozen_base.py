"""Frozen weights are stored once beside the checkpoints, by content, and deleted with the last checkpoint."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from several_ranks import on_ranks

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import commit, find, reading
from legato.trainer.checkpoints.shards import ShardBlock
from legato.trainer.checkpoints.storage import folder_at
from legato.trainer.checkpoints.tensors import read_tensors

RUN = "a run"


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = {f"base.{number}": torch.randn(64, 64, generator=generator) for number in range(3)}
    return {**base, "head": torch.randn(4, 4, generator=generator)}


def save(path: Path, weights: dict, trained: tuple[str, ...] = ("head",), **options: object) -> None:
    frozen = weights.keys() - set(trained)
    commit.write(path, {"state_dict": weights, "global_step": 1}, run=RUN, frozen=frozen, **options)


def bases(folder: Path) -> list[Path]:
    return sorted((folder / "base").glob("*"))


def assert_holds(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Assert that a checkpoint holds these weights."""
    back = reading.read_checkpoint(path)["state_dict"]
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())


def test_what_is_not_trained_is_written_once(tmp_path: Path) -> None:
    weights = make_weights()
    for step in (1, 2, 3):
        weights["head"] = weights["head"] + step
        save(tmp_path / find.directory_name(step), weights)
        assert_holds(tmp_path / find.directory_name(step), weights)
    (base,) = bases(tmp_path)
    assert read_tensors(base).keys() == {"base.0", "base.1", "base.2"}
    assert read_tensors(tmp_path / "step-00000003" / "model.safetensors").keys() == {"head"}
    assert sum(file.stat().st_size for file in (tmp_path / "step-00000003").iterdir()) < 3000


@pytest.mark.parametrize("change", ["data", "type", "shape", "new", "trained", "gone"])
def test_a_frozen_weight_that_changes_all_the_same_is_stored_again(tmp_path: Path, change: str) -> None:
    weights, trained = make_weights(), ("head",)
    save(tmp_path / "step-00000001", weights)
    before = {name: value.clone() for name, value in weights.items()}
    if change == "data":  # which counts as no change of the tensor
        version = weights["base.1"]._version
        weights["base.1"].data[3, 3] += 1
        assert weights["base.1"]._version == version
    elif change == "type":
        weights["base.1"] = weights["base.1"].view(torch.int32)
    elif change == "shape":
        weights["base.1"] = weights["base.1"].view(32, 128)
    elif change == "new":
        weights["base.9"] = torch.ones(3)
    elif change == "trained":
        trained = ("head", "base.1")
    else:
        del weights["base.1"]
    save(tmp_path / "step-00000002", weights, trained)
    assert_holds(tmp_path / "step-00000001", before)
    assert_holds(tmp_path / "step-00000002", weights)
    assert len(bases(tmp_path)) == (2 if change == "gone" else 1)


def test_a_base_of_which_little_is_left_gives_way(tmp_path: Path) -> None:
    weights = make_weights()
    save(tmp_path / "step-00000001", weights)
    for name in ("base.0", "base.1"):
        weights[name].data += 1
    save(tmp_path / "step-00000002", weights)
    assert_holds(tmp_path / "step-00000002", weights)
    assert len(bases(tmp_path)) == 2
    folder_at(tmp_path).remove("step-00000001", RUN)
    assert_holds(tmp_path / "step-00000002", weights)
    assert len(bases(tmp_path)) == 1


def test_a_base_in_use_stays_and_goes_with_the_last_checkpoint(tmp_path: Path) -> None:
    weights = make_weights()
    for step in (1, 2):
        save(tmp_path / find.directory_name(step), weights)
    folder = folder_at(tmp_path)
    folder.remove("step-00000001", RUN)
    assert_holds(tmp_path / "step-00000002", weights)
    (tmp_path / ".step-00000003.partial").mkdir()  # of a save that may have taken the base already
    folder.remove("step-00000002", RUN)
    assert len(bases(tmp_path)) == 1
    folder.sweep()
    assert list(tmp_path.iterdir()) == []


def test_a_base_stays_beside_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / find.directory_name(step), make_weights())
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    folder_at(tmp_path).remove("step-00000002", RUN)
    assert len(bases(tmp_path)) == 1


def test_a_checkpoint_that_was_copied_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save(tmp_path / "run" / "step-00000001", make_weights())
    shutil.copytree(tmp_path / "run" / "step-00000001", tmp_path / "step-00000001")
    (base,) = bases(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=rf"in base/{base.name} beside them, but this file is missing.*legato export RUN DIR/"
    ):
        reading.read_checkpoint(tmp_path / "step-00000001")
    commit.copy_whole(tmp_path / "run" / "step-00000001", tmp_path / "whole")
    assert_holds(tmp_path / "whole", make_weights())
    assert read_tensors(tmp_path / "whole" / "model.safetensors").keys() == make_weights().keys()
    assert not (tmp_path / "base").exists()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert_holds(tmp_path / "copy" / "step-00000001", make_weights())


def test_damage_of_a_base_is_found_and_the_next_save_writes_it_anew(tmp_path: Path) -> None:
    weights = make_weights()
    save(tmp_path / "step-00000001", weights)
    (base,) = bases(tmp_path)
    data = base.read_bytes()
    for damaged in (data[:-4] + b"\0\0\0\1", data[:-4]):
        base.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"base.*(damaged|were written)"):
            reading.read_checkpoint(tmp_path / "step-00000001")
    save(tmp_path / "step-00000002", weights)
    assert_holds(tmp_path / "step-00000002", weights)
    assert_holds(tmp_path / "step-00000001", weights)


def test_a_link_is_no_base(tmp_path: Path) -> None:
    save(tmp_path / "step-00000001", make_weights())
    (base,) = bases(tmp_path)
    base.rename(tmp_path / "elsewhere")
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        reading.read_checkpoint(tmp_path / "step-00000001")


def _save_at_once(folder: Path, number: int, barrier: "multiprocessing.Barrier") -> None:
    barrier.wait()
    save(folder / find.directory_name(number), make_weights())


def _die_within(folder: Path) -> None:
    folder_at(folder).add_base(lambda file: os.kill(os.getpid(), signal.SIGKILL))


def test_processes_write_the_same_base_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_save_at_once, args=(tmp_path, number, barrier)) for number in range(4)]
    for process in processes:
        process.start()
    for number, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0
        assert_holds(tmp_path / find.directory_name(number), make_weights())
    assert len(bases(tmp_path)) == 1


def test_a_death_while_a_base_is_written_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die_within, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(bases(tmp_path)) == 1
    save(tmp_path / "step-00000001", make_weights())
    assert_holds(tmp_path / "step-00000001", make_weights())
    folder_at(tmp_path).sweep()
    assert len(bases(tmp_path)) == 1
    assert_holds(tmp_path / "step-00000001", make_weights())


def test_each_rank_writes_its_shards_once(tmp_path: Path) -> None:
    weights = make_weights()

    def work(ranks):
        for step in (1, 2):
            parts = {
                name: ShardBlock(value.chunk(2)[ranks.rank] + (step if name == "head" else 0), tuple(value.shape),
                                 (ranks.rank * len(value) // 2, 0))
                for name, value in weights.items()
            }  # fmt: skip
            save(tmp_path / find.directory_name(step), parts, ranks=ranks)

    on_ranks(2, work)
    assert len(bases(tmp_path)) == 2
    assert_holds(tmp_path / "step-00000002", {**weights, "head": weights["head"] + 2})
    commit.copy_whole(tmp_path / "step-00000002", tmp_path / "whole")
    assert_holds(tmp_path / "whole", {**weights, "head": weights["head"] + 2})
    assert not any("base" in name for name in json.loads((tmp_path / "whole" / "manifest.json").read_text())["files"])
