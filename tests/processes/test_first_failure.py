"""Ranks of another launcher end within seconds, and each error names the rank that failed first."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import Forked, run_module
from waiting import free_port

pytestmark = pytest.mark.slow

MODULE = """
import os
from launched_task import Line

WHO, WHEN = os.environ["WHO"], os.environ["WHEN"]
if os.environ["RANK"] == WHO and WHEN == "import":
    raise OSError("no data on this node")

class Failing(Line):
    def __init__(self):
        super().__init__()
        if os.environ["RANK"] == WHO and WHEN == "init":
            raise RuntimeError("no room on this node")

    def training_step(self, batch):
        if os.environ["RANK"] == WHO and self.global_step == 2:
            if WHEN == "step":
                raise ValueError("a bad sample")
            if WHEN == "kill":
                os.kill(os.getpid(), 9)
            if WHEN == "exit":
                raise SystemExit(3)
        return super().training_step(batch)
"""


@pytest.fixture
def ended(tmp_path):
    """Return a function that runs two ranks and returns their exit codes and outputs."""
    shutil.copy(Path(__file__).parents[1] / "launched_task.py", tmp_path)
    (tmp_path / "failing.py").write_text(MODULE)
    trainer = {"accelerator": "cpu", "strategy": "ddp", "max_epochs": 1, "threads": 1, "enable_progress_bar": False}
    config = {"task": {"_target_": "failing.Failing"}, "run": {"root": "runs"}, "trainer": trainer}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def run(who, when):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        environment = {**os.environ, **address, "WHO": str(who), "WHEN": when}
        words = ("legato", "fit", "config.yaml")

        def start(rank):
            options = {"cwd": tmp_path, "env": {**environment, "RANK": str(rank)}}
            if (when, who) != ("step", rank):
                return Forked(run_module, *words, **options)
            # how an interpreter lets go of its connections at its end is part of it
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen([sys.executable, "-m", *words], **pipes, **options)

        ranks = [start(rank) for rank in range(2)]
        try:
            outputs = ["".join(rank.communicate(timeout=120)) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [rank.returncode for rank in ranks], outputs

    return run


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("when", "code", "words"),
    [("import", 2, "OSError: no data on this node"), ("init", 1, "no room on this node")],
)
def test_a_rank_that_fails_before_the_rendezvous_ends_the_others(ended, who, when, code, words):
    codes, outputs = ended(who, when)
    assert codes == [code, code], outputs
    assert words in outputs[who]
    assert f"legato: Rank {who} of 2 failed before the rendezvous: " in outputs[1 - who]
    assert words in outputs[1 - who]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_is_named_by_the_others(ended, who):
    codes, outputs = ended(who, "step")
    assert codes == [1, 1], outputs
    assert "ValueError: a bad sample" in outputs[who]
    last = outputs[1 - who].strip().splitlines()[-1]
    assert last.startswith(f"legato: Rank {who} of 2 failed first: ValueError: a bad sample (")
    assert "failing.py:" in last


def test_a_rank_that_exits_is_named_by_the_others(ended):
    codes, outputs = ended(1, "exit")
    assert codes == [1, 3], outputs
    assert "legato: Rank 1 of 2 failed first: SystemExit: 3 (" in outputs[0]


@pytest.mark.parametrize(
    ("who", "words"), [(0, "has exited without an error message"), (1, "no rank has reported an error")]
)
def test_a_rank_that_was_killed_is_suspected(ended, who, words):
    codes, outputs = ended(who, "kill")
    assert codes[who] == -signal.SIGKILL
    assert codes[1 - who] == 1
    assert words in outputs[1 - who].strip().splitlines()[-1]
