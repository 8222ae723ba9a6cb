"""Completion of the command line, in a real shell."""

import shutil
import subprocess
from pathlib import Path

import pytest

from legato.cli.main import main

pytest.importorskip("shtab")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("legato comp", {"compare", "completion"}),
        ("legato runs --st", {"--state"}),
        ("legato fit trainer.max_e", {"trainer.max_epochs="}),
        ("legato fit li", {"line.yaml"}),
    ],
)
def test_bash_completes(
    line: str, words: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("line.yaml").touch()
    assert main(["completion", "bash"]) == 0
    Path("complete.bash").write_text(capsys.readouterr().out)
    script = f"""
        shopt -s extglob; source complete.bash
        COMP_WORDS=({line}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        $(complete -p legato | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == words


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "legato" in capsys.readouterr().out
