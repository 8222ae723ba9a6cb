"""Checkpoints, which are directories, in programs that take them as files: copied, renamed, removed, looked for."""

import errno
import glob
import os
import pickle
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forked import completed, run_module, run_script

import legato.compat.lightning as L
from legato.cli.convert import convert_checkpoint
from legato.compat.lightning.checkpoint_files import open_directories
from legato.compat.lightning.file_functions import give_back_files, is_complete, take_files, taken
from legato.trainer.checkpoints.find import checkpoint_step, verify

COPIES = ("copy", "copy2", "copyfile")


class Linear(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with the checkpoints of steps 1 and 2, as 1.ckpt and 2.ckpt."""
    folder = tmp_path_factory.mktemp("saved")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    keep = L.pytorch.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = L.Trainer(accelerator="cpu", max_steps=2, default_root_dir=folder, callbacks=[keep], **quiet)
    trainer.fit(Linear(), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))
    assert sorted(os.listdir(folder)) == ["1.ckpt", "2.ckpt"]
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """Go to a copy of that folder; the functions take checkpoints as files."""
    shutil.copytree(saved, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    take_files()
    yield tmp_path / "here"
    give_back_files()


def holds(path, step):
    """Return whether a path is a whole checkpoint of this step, and nothing is left over beside it."""
    verify(Path(path))
    left = [name for name in os.listdir(Path(path).absolute().parent) if name.startswith(".")]
    return checkpoint_step(Path(path)) == step and not left


@pytest.mark.parametrize("name", COPIES)
def test_a_checkpoint_is_copied(folder, name):
    copy = getattr(shutil, name)
    assert copy("1.ckpt", "best.ckpt") == "best.ckpt"
    assert holds("best.ckpt", 1)
    assert copy("2.ckpt", Path("best.ckpt")) == Path("best.ckpt")  # in place of the older one, not into it
    assert holds("best.ckpt", 2)
    assert holds("2.ckpt", 2)
    Path("note.ckpt").write_text("a file")
    copy("1.ckpt", "note.ckpt")
    assert holds("note.ckpt", 1)
    Path("plain.txt").write_text("a file")
    copy("plain.txt", "note.ckpt")
    assert Path("note.ckpt").read_text() == "a file"
    os.symlink("1.ckpt", "link.ckpt")
    copy("2.ckpt", "link.ckpt")
    assert holds("link.ckpt", 2)
    assert holds("1.ckpt", 1)
    with pytest.raises(shutil.SameFileError):
        copy("1.ckpt", "./1.ckpt")
    with pytest.raises(FileNotFoundError):
        copy("1.ckpt", "nowhere/best.ckpt")
    assert not Path("nowhere").exists()
    assert torch.equal(Linear.load_from_checkpoint("best.ckpt").layer.weight, load("2.ckpt"))


def test_a_checkpoint_is_saved_over(folder, monkeypatch):
    monkeypatch.setattr(torch, "load", torch.load)
    monkeypatch.setattr(torch, "save", torch.save)
    open_directories()
    contents = torch.load("1.ckpt", weights_only=True)
    del contents["optimizer_states"]
    with pytest.raises(AttributeError):
        torch.save({"function": lambda: None}, "1.ckpt")
    assert holds("1.ckpt", 1)  # as it was
    torch.save(contents, Path("1.ckpt"))
    assert os.path.isfile("1.ckpt")
    assert not is_complete("1.ckpt")
    assert "optimizer_states" not in torch.load("1.ckpt", weights_only=True)
    assert torch.equal(Linear.load_from_checkpoint("1.ckpt").layer.weight, contents["state_dict"]["layer.weight"])
    torch.save(contents, "2.ckpt")
    torch.save(contents, "2.ckpt")
    with open("2.ckpt", "wb") as file:
        torch.save(contents, file)
    assert sorted(os.listdir()) == ["1.ckpt", "2.ckpt"]


def load(path):
    return torch.load(path, weights_only=True)["state_dict"]["layer.weight"]


def test_a_checkpoint_is_copied_into_a_folder(folder):
    os.mkdir("kept")
    assert shutil.copy("1.ckpt", "kept") == os.path.join("kept", "1.ckpt")
    assert holds("kept/1.ckpt", 1)
    with pytest.raises(IsADirectoryError):
        shutil.copyfile("1.ckpt", "kept")


def test_processes_that_copy_at_once_leave_one_checkpoint(folder):
    shutil.copy("1.ckpt", "best.ckpt")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: shutil.copy("2.ckpt", "best.ckpt"), range(40))) == {"best.ckpt"}
    assert holds("best.ckpt", 2)


MOVES = {
    "os.rename": os.rename,
    "os.replace": os.replace,
    "shutil.move": shutil.move,
    "Path.rename": lambda source, target: Path(source).rename(target),
    "Path.replace": lambda source, target: Path(source).replace(target),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_checkpoint_is_renamed(folder, name):
    owner, _, function = name.rpartition(".")
    move = MOVES[name] if owner == "Path" else getattr({"os": os, "shutil": shutil}[owner], function)
    shutil.copy("2.ckpt", "other.ckpt")
    move("1.ckpt", "best.ckpt")
    assert holds("best.ckpt", 1)
    assert not Path("1.ckpt").exists()
    move("2.ckpt", "best.ckpt")
    assert holds("best.ckpt", 2)
    Path("plain.ckpt").write_text("a file")
    move("best.ckpt", "plain.ckpt")
    assert holds("plain.ckpt", 2)
    with pytest.raises(FileNotFoundError):
        move("1.ckpt", "other.ckpt")
    assert holds("other.ckpt", 2)


def test_a_checkpoint_is_removed(folder):
    os.symlink("1.ckpt", "last.ckpt")
    os.remove("last.ckpt")
    assert holds("1.ckpt", 1)
    os.remove("1.ckpt")
    Path("2.ckpt").unlink(missing_ok=True)
    assert os.listdir(".") == []
    with pytest.raises(FileNotFoundError):
        os.unlink("1.ckpt")
    Path("1.ckpt").unlink(missing_ok=True)


def test_a_checkpoint_is_found_and_measured(folder):
    assert os.path.isfile("1.ckpt")
    assert Path("1.ckpt").is_file()
    assert os.path.exists("1.ckpt")
    assert sorted(glob.glob("*.ckpt")) == ["1.ckpt", "2.ckpt"]
    assert os.path.getsize("1.ckpt") == len(Path("1.ckpt").read_bytes())
    assert os.path.isdir("1.ckpt")  # which it is: an upload of folders takes it


def test_wandb_is_given_a_file(folder, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    entry = wandb.Artifact("model", "model").add_file("1.ckpt")
    assert Path(entry.local_path).read_bytes() == Path("1.ckpt").read_bytes()
    assert entry.size == os.path.getsize("1.ckpt")
    assert load(entry.local_path).shape == (1, 2)


def test_a_checkpoint_is_read(folder, tmp_path):
    """It is read as the file that `legato convert` writes, and nothing is left beside it."""
    convert_checkpoint(Path("1.ckpt"), tmp_path / "converted.ckpt")
    with open("1.ckpt", "rb") as file:
        assert (file.name, file.mode, file.readable(), file.writable()) == ("1.ckpt", "rb", True, False)
        content, size = file.read(), os.fstat(file.fileno()).st_size
    assert len(content) == size == os.path.getsize("1.ckpt")
    assert Path("1.ckpt").read_bytes() == content  # each time the same, so that sums of it can be compared
    with Path("1.ckpt").open("rb", buffering=0) as file:
        assert file.read(4) == content[:4]
    assert Path("1.ckpt").read_text("latin-1")[:2] == "PK"
    with zipfile.ZipFile("1.ckpt") as archive, zipfile.ZipFile(tmp_path / "converted.ckpt") as converted:
        assert archive.testzip() is None
        assert {one.file_size for one in archive.filelist} == {one.file_size for one in converted.filelist}
    with open("1.ckpt", "rb") as file:
        saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["state_dict"]["layer.weight"], load("1.ckpt"))
    for mode in ("wb", "r+b", "a"):
        with pytest.raises(IsADirectoryError), open("1.ckpt", mode):
            pass
    assert sorted(os.listdir()) == ["1.ckpt", "2.ckpt"]
    assert holds("1.ckpt", 1)


def test_anything_else_is_what_it_was(folder):
    """A damaged checkpoint, and a folder of another program that has a manifest.json, are folders."""
    os.remove("1.ckpt/model.safetensors")
    os.mkdir("other")
    Path("other/manifest.json").write_text("{}")
    for path in ("1.ckpt", "other"):
        assert not is_complete(path)
        assert not os.path.isfile(path)
        assert not Path(path).is_file()
        with pytest.raises(OSError, match="directory") as raised:
            os.remove(path)
        assert raised.value.errno in (errno.EISDIR, errno.EPERM)
        with pytest.raises(IsADirectoryError):
            shutil.copyfile(path, "new")
        with pytest.raises(IsADirectoryError):
            Path(path).read_bytes()
    shutil.copy("2.ckpt", "other")
    assert holds("other/2.ckpt", 2)
    shutil.rmtree("2.ckpt")
    assert not os.path.exists("2.ckpt")
    with pytest.raises(TypeError):
        os.path.isfile([])


def test_the_package_itself_sees_directories(folder):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    module = Linear()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2), ckpt_path="2.ckpt")
    assert trainer.global_step == 2000


def test_the_functions_are_given_back():
    before = [
        (owner, name, getattr(owner, name)) for owner, name in ((os, "remove"), (shutil, "copy"), (Path, "is_file"))
    ]
    take_files()
    try:
        assert all(getattr(owner, name) is not function for owner, name, function in before)
        assert pickle.loads(pickle.dumps(os.remove)) is os.remove  # as a pool of processes is given it
        assert os.path.isfile is pickle.loads(pickle.dumps(os.path.isfile))
        take_files()
    finally:
        give_back_files()
    assert all(getattr(owner, name) is function for owner, name, function in before)
    assert not taken


PROGRAM = """
import os, sys
from shutil import copyfile
import torch
import pytorch_lightning as pl


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Copies(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        best = trainer.checkpoint_callback.best_model_path
        if trainer.is_global_zero:
            assert os.path.isfile(best)
            copyfile(best, "in_worker.ckpt")


if __name__ == "__main__":
    quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(**quiet, devices=2, strategy="ddp_spawn", max_epochs=1, callbacks=[Copies()])
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
    best = trainer.checkpoint_callback.best_model_path
    copyfile(best, "best.ckpt")
    os.remove(best)
    print(sorted(name for name in os.listdir() if name.endswith(".ckpt")), torch.load("best.ckpt")["global_step"])
    print(open("best.ckpt", "rb").read(2))
    open("best.ckpt", "ab")
"""


@pytest.mark.slow
def test_a_program_and_its_workers_copy_checkpoints(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = completed(run_module, "legato", "lightning", "train.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["['best.ckpt', 'in_worker.ckpt'] 2", "b'PK'"], done.stderr
    assert done.returncode == 1
    assert "IsADirectoryError" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "legato: best.ckpt is a checkpoint, and a checkpoint is a directory. torch.load and open(PATH, 'rb') read it; "
        "`legato convert best.ckpt out.ckpt` writes it as a file (docs/from-lightning.md)."
    )
    assert os.listdir(tmp_path / "checkpoints") == []


IMPORTS = """
import sys, torch
before = torch.load, torch.save
import legato.compat.lightning as L
from legato.compat.lightning.pytorch.callbacks import ModelCheckpoint
if sys.argv[1:] == ["install"]:
    L.install()
L.Trainer, L.LightningModule
print([now is old for now, old in zip((torch.load, torch.save), before)])
"""


@pytest.mark.slow
def test_importing_a_name_leaves_torchs_functions_alone_until_install(tmp_path):
    (tmp_path / "imports.py").write_text(IMPORTS)
    for words, kept in (([], "[True, True]"), (["install"], "[False, False]")):
        done = completed(run_script, tmp_path / "imports.py", *words)
        assert done.stdout.strip() == kept, done.stderr
