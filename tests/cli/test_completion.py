"""Completion of the command line: what may follow, and real shells that ask for it."""

import os
import pty
import re
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line_folder import CONFIG, TASK

from legato.cli.completion import Completer
from legato.cli.main import COMMANDS, main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder, with a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(CONFIG + "callbacks:\n  stop: {_target_: legato.callbacks.EarlyStopping}\n")
    (tmp_path / "runs" / "night" / "version_0").mkdir(parents=True)
    (tmp_path / "runs" / "night" / "version_0" / "status.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("legato comp", ["compare ", "completion "]),
        ("legato --v", ["--version "]),
        ("legato fit li", ["line.yaml "]),
        ("legato fit dig", ["digits.yaml "]),
        ("legato fit line.yaml trainer.max_e", ["trainer.max_epochs="]),
        ("legato fit line.yaml trainer.nan=", ["trainer.nan=ignore ", "trainer.nan=raise ", "trainer.nan=skip "]),
        ("legato fit line.yaml trainer.nan=s", ["trainer.nan=skip "]),
        ("legato fit line.yaml trainer.detect_anomaly=t", ["trainer.detect_anomaly=true "]),
        ("legato fit line.yaml trainer.strategy=ddp_r", ["trainer.strategy=ddp_rpc "]),
        ("legato fit line.yaml trainer.strategy.find_u", ["trainer.strategy.find_unused_parameters="]),
        ("legato fit line.yaml task.", ["task._target_=", "task.fault=", "task.lr="]),
        ("legato fit line.yaml callbacks.st", ["callbacks.stop."]),
        ("legato fit line.yaml callbacks.stop.pat", ["callbacks.stop.patience="]),
        ("legato fit line.yaml callbacks.stop.mode=m", ["callbacks.stop.mode=max ", "callbacks.stop.mode=min "]),
        ("legato fit line.yaml callbacks.stop=", ["callbacks.stop=null "]),
        ("legato fit task._target_=lin", ["task._target_=line.Line "]),
        ("legato fit task._target_=legato.tasks.D", ["task._target_=legato.tasks.Digits "]),
        ("legato fit callbacks.x._target_=legato.callbacks.Tim", ["callbacks.x._target_=legato.callbacks.Timer "]),
        ("legato fit resume=", ["resume=auto ", "resume=null "]),
        ("legato show ni", ["night/version_0 "]),
        ("legato show runs/ni", ["runs/night/", "runs/night/version_0 "]),
        ("legato runs --st", ["--state "]),
        ("legato runs --state f", ["failed "]),
        ("legato help trainer.accum", ["trainer.accumulate_grad_batches "]),
        ("legato help EarlyS", ["EarlyStopping "]),
        ("legato help trainer.accumulate_grad_batches lin", ["line.yaml "]),
        ("legato lightning li", ["line.py ", "line.yaml "]),
        ("legato sweep line.yaml task.l", ["task.lr="]),
        ("legato completion b", ["bash "]),
        ("legato nothing li", ["line.py ", "line.yaml "]),
        ("legato fit broken.yaml 'trainer.max_e", []),  # an open quote
        ("legato fit \0", []),
    ],
)  # fmt: skip
def test_what_may_complete_a_line(line, words):
    assert Completer(COMMANDS).complete(line) == words


def test_every_command_and_key_can_be_completed():
    complete = Completer(COMMANDS).complete
    assert {f"{name} " for name in COMMANDS} < set(complete("legato "))
    assert {"trainer.", "task.", "seed=", "line.yaml ", "digits.yaml ", "resume="} < set(complete("legato fit "))


@pytest.mark.slow
def test_a_completion_takes_little_time_and_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "legato", "completion", "--line", "legato fit line.yaml task."]
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "task.lr=" in done.stdout
    assert not re.search(r"\| +(torch|numpy|omegaconf)$", done.stderr, re.M)
    assert min(spent) < 0.5  # 0.2 on a quiet machine


# --- shells -----------------------------------------------------------------------------------------------------------
TYPED = "legato fit line.yaml trainer.nan=sk\t\n"


def typed_in(command, start, typed):
    """Start a shell on a terminal, run `start` in it, type a line with tabs, and return what was on the screen."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}
    own, other = pty.openpty()
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
    )
    os.close(other)
    screen = ""

    def read_until(mark, seconds):
        nonlocal screen
        deadline = time.monotonic() + seconds
        while mark not in screen and time.monotonic() < deadline:
            if select.select([own], [], [], 0.1)[0]:
                screen += os.read(own, 65536).decode(errors="replace")

    try:
        shown = 'legato() { if [ "$1" = fit ]; then echo GOT "$@" END; else command legato "$@"; fi }'
        os.write(own, f"{start}; {shown}; echo RE''ADY\n".encode())
        read_until("READY", 30)
        os.write(own, typed.encode())
        read_until("END\r", 30)
    finally:
        process.kill()
        process.wait()
        os.close(own)
    return screen


@pytest.mark.slow
def test_bash_completes_a_value():
    screen = typed_in(["bash", "--norc", "-i"], 'eval "$(legato completion bash)"', TYPED)
    assert "GOT fit line.yaml trainer.nan=skip END" in screen


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_a_value():
    start = 'autoload -U compinit; compinit -u -D; eval "$(legato completion zsh)"'
    screen = typed_in(["zsh", "-f", "-i"], start, TYPED)
    assert "GOT fit line.yaml trainer.nan=skip END" in screen


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_a_value():
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    code = "legato completion fish | source; complete -C 'legato fit line.yaml trainer.nan=sk'"
    done = subprocess.run(["fish", "-N", "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["trainer.nan=skip"]


def test_a_script_for_each_shell(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "legato completion --line" in capsys.readouterr().out
    assert main(["completion"]) == 2
    assert "Which shell? legato completion bash|zsh|fish" in capsys.readouterr().err
