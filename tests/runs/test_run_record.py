"""The record of a run's starts in its directory: command, host, versions, code."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from command_line_folder import CONFIG, TASK
from forked import completed, run_module
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.lab.history import RunHistory
from legato.lab.origin import differences
from legato.trainer.runs import record as run_record
from legato.trainer.runs.record import RECORD, read_starts

CSV = "loggers={json: {_target_: legato.loggers.JSONLinesLogger}, csv: {_target_: legato.loggers.CSVLogger}}"


def git(folder, *words):
    who = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A git repository with one commit, as the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "work")
    (folder / ".gitignore").write_text("runs/\n")
    (folder / "net.py").write_text("width = 8\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder)
    return folder


def fit(folder, **options):
    made = make_trainer(folder / "runs", **{"logger": True, "save_code": True, **options})
    made.fit(Tiny(), make_loader())
    return made


def test_a_start_says_with_what_the_run_was_started(project):
    made = fit(project)
    (start,) = read_starts(made.run_dir)
    assert start["command"] == sys.orig_argv
    assert start["arguments"] == sys.argv
    assert start["working_directory"] == str(project)
    assert start["versions"]["torch"] == torch.__version__
    assert start["versions"]["legato"] == lg.__version__
    assert start["packages"]["safetensors"]
    assert start["host"]["name"] == os.uname().nodename
    assert start["host"]["cpus"] == os.cpu_count()
    assert (start["stage"], start["step"], start["processes"], start["device"]) == ("fit", 0, 1, "cpu")
    assert start["git"] == {
        "root": str(project),
        "commit": git(project, "rev-parse", "HEAD"),
        "branch": "work",
        "changed": [],
        "diff_bytes": 0,
        "diff_file": None,
    }
    assert not list(made.run_dir.glob("*.diff"))


def test_a_link_that_git_does_not_know_is_stored_as_a_link(project, tmp_path):
    (tmp_path / "private.py").write_text("password = 'hunter2'\n")
    (project / "linked.py").symlink_to(tmp_path / "private.py")
    made = fit(project)
    diff = (made.run_dir / "uncommitted.diff").read_bytes()
    assert b"hunter2" not in diff
    git(tmp_path, "clone", "-q", str(project), "copy")
    git(tmp_path / "copy", "apply", str(made.run_dir / "uncommitted.diff"))
    assert os.readlink(tmp_path / "copy" / "linked.py") == str(tmp_path / "private.py")
    assert list(differences(RunHistory(made.run_dir), 1)) == []
    git(project, "add", "-A")
    git(project, "commit", "-qm", "add the link")
    assert list(differences(RunHistory(made.run_dir), 1)) == []  # what is committed since is as it was
    (project / "linked.py").unlink()
    (project / "linked.py").symlink_to("elsewhere")
    assert "linked.py" in "".join(differences(RunHistory(made.run_dir), 1))


def test_the_diff_makes_of_the_commit_what_ran(project, tmp_path):
    (project / "net.py").write_text("width = 9")
    (project / "folder").mkdir()
    (project / "folder" / "new one.py").write_text("depth = 3\n\nprint(depth)")
    (project / "data.txt").write_text("not code\n")
    made = fit(project)
    (start,) = read_starts(made.run_dir)
    assert start["git"]["changed"] == ["folder/new one.py", "net.py"]
    git(tmp_path, "clone", "-q", str(project), "again")
    git(tmp_path / "again", "apply", str(made.run_dir / start["git"]["diff_file"]))
    for name in start["git"]["changed"]:
        assert (tmp_path / "again" / name).read_bytes() == (project / name).read_bytes()
    assert not (tmp_path / "again" / "data.txt").exists()


@pytest.mark.slow
def test_a_resume_adds_a_start_and_keeps_the_code_of_the_one_before(project):
    (project / "net.py").write_text("width = 9\n")
    run = {"enable_checkpointing": True, "max_steps": 2, "max_epochs": None}
    first = fit(project, **run)
    before = (first.run_dir / "uncommitted.diff").read_bytes()

    def resume(steps):
        made = make_trainer(project / "runs", **{**run, "logger": True, "save_code": True, "max_steps": steps})
        made.fit(Tiny(), make_loader(), resume="auto")
        assert made.run_dir == first.run_dir
        return read_starts(made.run_dir)

    resume(3)
    (project / "net.py").write_text("width = 10\n")
    starts = resume(4)
    assert [start["step"] for start in starts] == [0, 2, 3]
    files = [start["git"]["diff_file"] for start in starts]
    assert files == ["uncommitted.diff", "uncommitted.diff", "uncommitted-2.diff"]
    assert (first.run_dir / files[0]).read_bytes() == before
    assert b"+width = 10" in (first.run_dir / files[2]).read_bytes()


def test_a_record_can_be_left_without_code(project):
    (project / "net.py").write_text("secret = 9\n")
    made = fit(project, save_code=False)
    assert read_starts(made.run_dir)[0]["git"] is None
    assert not list(made.run_dir.glob("*.diff"))


def test_large_changes_are_named_and_not_stored(project, monkeypatch):
    monkeypatch.setattr(run_record, "LARGEST_DIFF", 1000)
    (project / "net.py").write_text("width = 9\n" * 1000)
    made = fit(project)
    repository = read_starts(made.run_dir)[0]["git"]
    assert repository["changed"] == ["net.py"]
    assert repository["diff_bytes"] > 1000
    assert repository["diff_file"] is None


@pytest.mark.parametrize("trouble", ["no git", "no repository", "no commit", "slow"])
def test_without_git_the_field_is_null(project, tmp_path, monkeypatch, trouble):
    if trouble == "no git":
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    elif trouble == "no repository":
        monkeypatch.chdir(tmp_path)
    elif trouble == "no commit":
        git(tmp_path, "init", "-q", "empty")
        monkeypatch.chdir(tmp_path / "empty")
    else:
        # a limit of 0 s would not do: git may have answered before anybody looks
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "git").write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / "bin" / "git").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(run_record, "GIT_SECONDS", 0.2)
    made = fit(tmp_path)
    assert read_starts(made.run_dir)[0]["git"] is None


def test_a_damaged_record_does_not_stop_a_run(project):
    run = {"enable_checkpointing": True, "max_steps": 2, "max_epochs": None}
    made = fit(project, **run)
    (made.run_dir / RECORD).write_text("{")
    made = make_trainer(project / "runs", **{**run, "max_steps": 3})
    made.fit(Tiny(), make_loader(), resume="auto")
    assert [start["step"] for start in read_starts(made.run_dir)] == [2]
    assert (made.run_dir / f"{RECORD}.damaged").read_text() == "{"


def test_each_file_of_a_run_has_its_line(project):
    made = fit(
        project,
        enable_checkpointing=True,
        logger=[lg.loggers.JSONLinesLogger(), lg.loggers.CSVLogger()],
        log_every_n_steps=1,
    )
    here = {path.name + "/" * path.is_dir() for path in made.run_dir.iterdir() if path.name[0] != "."}
    page = Path(__file__).parents[2] / "docs" / "reference" / "run-directory.md"
    lines = re.findall(r"(?m)^\| `(.*?)` \|", page.read_text())
    assert {name for name in here if not any(fnmatch(name, line) for line in lines)} == set()
    rows = (made.run_dir / "metrics.csv").read_text().splitlines()
    assert "step" in rows[0].split(",")
    assert json.loads((made.run_dir / RECORD).read_text())["starts"]


@pytest.mark.slow
def test_the_command_line_stores_the_config_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("line.py").write_text(TASK)
    Path("line.yaml").write_text(CONFIG)
    two = ("trainer.devices=2", "trainer.strategy=ddp")
    words = ("fit", "line.yaml", "trainer.max_epochs=1", CSV, "run.save_code=false", *two)
    done = completed(run_module, "legato", *words)
    assert done.returncode == 0, done.stderr
    folder = Path("runs/default/version_0")
    explicit = (folder / "config_given.yaml").read_text()
    assert "max_epochs: 1" in explicit
    assert next(line for line in explicit.splitlines() if "max_epochs" in line).endswith("# override")
    assert "line.yaml:" in explicit
    assert "gradient_clip_val" not in explicit
    assert "gradient_clip_val" in (folder / "config.yaml").read_text()
    (start,) = read_starts(folder)
    assert start["arguments"][1:] == list(words)
    assert (start["processes"], start["strategy"], start["git"]) == (2, "ddp", None)
    assert start["working_directory"] == str(tmp_path)
    assert (folder / "metrics.csv").exists()
    again = completed(run_module, "legato", "config", str(folder / "config_given.yaml"))
    assert again.returncode == 0
