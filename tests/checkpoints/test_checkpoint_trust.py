"""A checkpoint's claims about other files are not trusted: its names, folders and numbers cannot harm another run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import CheckpointError
from legato.callbacks import Checkpoint
from legato.trainer.checkpoints import commit, find, manifest
from legato.trainer.checkpoints.hashed import file_sum


def train(folder: Path, callback: Checkpoint, epochs: int = 1, resume: Any = None, **options: Any) -> lg.Trainer:
    """Train with 5 steps in an epoch."""
    trainer = make_trainer(folder, enable_checkpointing=True, callbacks=[callback], max_epochs=epochs, **options)
    trainer.fit(Tiny(), make_loader(), resume=resume)
    return trainer


def forge_index(folder: Path, names: Iterable[str], step: int = 5) -> None:
    """Write names of checkpoints to an index, as an attacker would."""
    index = json.loads((folder / "index.json").read_bytes())
    index["checkpoints"] |= {name: {"step": step, "score": None, "elapsed": 1.0} for name in names}
    (folder / "index.json").write_text(json.dumps(index))


def forge(path: Path, **changes: Any) -> None:
    """Change the state of the Checkpoint callback in a checkpoint, as an attacker would."""
    state = json.loads((path / "state.json").read_bytes())
    (callback,) = state["callbacks"].values()
    callback.update(changes)
    (path / "state.json").write_text(json.dumps(state))
    files = {name: file_sum(path / name) for name in manifest.load_manifest(path).files}
    (path / "manifest.json").write_bytes(manifest.dump_manifest(files, manifest.load_manifest(path).run))
    find.verify(path)


@pytest.fixture
def victims(tmp_path: Path) -> list[Path]:
    """Folders that must not be deleted."""
    folders = [tmp_path / "precious", tmp_path / "runs" / "other" / "version_0" / "checkpoints" / "step-00000003"]
    for path in folders:
        commit.write(path, {"state_dict": {}})
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "manifest.json").write_text("{}")
    (bare / "thesis.tex").write_text("years")
    return [*folders, bare]


def names_of(victims: list[Path], folder: Path) -> dict[str, list[str]]:
    relative = [f"{'../' * len(folder.parts[1:])}{str(path)[1:]}" for path in victims]
    return {
        "absolute": [str(path) for path in victims],
        "upwards": relative,
        "through a checkpoint": [f"step-00000005/../{name}" for name in relative],
        "hidden in a name": [f"step-00000001/{name}" for name in relative] + ["step-00000001\n", "step-1"],
        "the folder itself": ["", ".", "..", "../.."],
    }


@pytest.mark.parametrize(
    "form", ["absolute", "upwards", "through a checkpoint", "hidden in a name", "the folder itself"]
)
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_names_from_elsewhere_delete_nothing(tmp_path: Path, victims: list[Path], form: str, resume: str) -> None:
    folder = tmp_path / "runs"
    first = train(folder, Checkpoint(), run_name="a")
    path = first.run_dir / "checkpoints" / "step-00000005"
    names = names_of(victims, path.parent)[form]
    forge_index(path.parent, names)
    callback = Checkpoint(save_top_k=1)
    trainer = train(folder, callback, 2, "auto" if resume == "auto" else path, run_name="a")
    assert sorted(callback.scores) == ["step-00000010"]
    assert [entry.name for entry in (trainer.run_dir / "checkpoints").glob("step-*")] == ["step-00000010"]
    for victim in victims:
        assert (victim / "manifest.json").exists(), victim
    assert (victims[-1] / "thesis.tex").exists()


def test_checkpoints_of_another_run_in_the_same_folder_stay(tmp_path: Path) -> None:
    """A checkpoint in this run's folder has one of Legato's names, but another run wrote it."""
    folder, checkpoints = tmp_path / "runs", tmp_path / "own"
    train(folder, Checkpoint(dirpath=checkpoints, save_top_k=-1))
    commit.write(checkpoints / "step-00000002", {"state_dict": {}})  # of the right form, from elsewhere
    (checkpoints / "step-00000003").symlink_to(checkpoints / "step-00000002")
    forge_index(checkpoints, [f"step-{step:08d}" for step in (2, 3)])
    callback = Checkpoint(dirpath=checkpoints)
    train(folder, callback, 2, checkpoints / "step-00000005")
    assert sorted(entry.name for entry in checkpoints.glob("step-*")) == [f"step-{step:08d}" for step in (2, 3, 10)]


@pytest.mark.parametrize("begun_step", ["7", None, {}, True])
def test_values_of_a_wrong_kind_are_named(tmp_path: Path, begun_step: Any) -> None:
    path = train(tmp_path, Checkpoint()).run_dir / "checkpoints" / "step-00000005"
    forge(path, begun_step=begun_step)
    with pytest.raises(CheckpointError, match=r"Checkpoint.*begun_step"):
        train(tmp_path, Checkpoint(), 2, path)


INDEXES = {
    "torn": '{"run": "',
    "list": "[]",
    "no entries": '{"run": "RUN", "monitor": null, "mode": "min", "checkpoints": []}',
    "text": '{"run": "RUN", "monitor": null, "mode": "min", "checkpoints": {"step-00000005": {"step": "5"}}}',
    "infinite": '{"run": "RUN", "monitor": null, "mode": "min", "checkpoints": '
    '{"step-00000005": {"step": 5, "score": Infinity, "elapsed": 0}}}',
    "deep": "[" * 100_000,
    "of another run": '{"run": "other", "monitor": null, "mode": "min", "checkpoints": {}}',
}


@pytest.mark.parametrize("form", INDEXES)
def test_a_run_goes_on_beside_an_index_that_is_not_its_own(tmp_path: Path, form: str) -> None:
    """Checkpoints that no index names are not deleted; the run writes a new index."""
    folder = train(tmp_path, Checkpoint()).run_dir / "checkpoints"
    run = json.loads((folder / "index.json").read_bytes())["run"]
    (folder / "index.json").write_text(INDEXES[form].replace("RUN", run))
    trainer = train(tmp_path, Checkpoint(), 2, "auto")
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000005", "step-00000010"]
    assert trainer.checkpoint_callback.last_model_path.endswith("step-00000010")
    assert list(json.loads((folder / "index.json").read_bytes())["checkpoints"]) == ["step-00000010"]


def test_a_step_that_never_comes_does_not_keep_a_run_from_saving(tmp_path: Path) -> None:
    folder = train(tmp_path, Checkpoint()).run_dir / "checkpoints"
    forge_index(folder, ["step-00000005", "step-00000009"], step=10**9)
    trainer = train(tmp_path, Checkpoint(), 2, "auto")
    assert trainer.checkpoint_callback.last_model_path.endswith("step-00000010")


def test_remove_takes_only_checkpoints_of_this_run(tmp_path: Path, victims: list[Path]) -> None:
    trainer = train(tmp_path / "runs", Checkpoint())
    for path in victims[:2]:
        with pytest.raises(CheckpointError, match=r"was not removed: another run wrote it"):
            trainer.remove_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"was not removed: .*manifest\.json"):
        trainer.remove_checkpoint(victims[2])
    best = Path(trainer.checkpoint_callback.best_model_path)
    (best / "notes.txt").write_text("the best so far")
    with pytest.raises(CheckpointError, match=r"was not removed: .*notes\.txt"):
        trainer.remove_checkpoint(best)
    (best / "notes.txt").unlink()
    trainer.remove_checkpoint(best)
    assert not best.exists()
    assert all(path.is_dir() for path in victims)
