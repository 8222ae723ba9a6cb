"""As in Lightning, a job that receives a signal writes hpc_ckpt_N.ckpt, and resumes from it after a requeue."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from forked import Forked, run_module
from waiting import wait_until

SCRIPT = Path(__file__).parents[1] / "lightning_script.py"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_was_told_to_end_goes_on_when_it_is_queued_again(tmp_path, number):
    job = {**os.environ, "SLURM_JOB_ID": "7"}

    def run(*words, **more):
        return Forked(run_module, "legato", "lightning", str(SCRIPT), *words, cwd=tmp_path, env={**job, **more})

    def said(program):
        path = program.folder / "stdout"
        return path.read_text() if path.exists() else ""

    full = run()
    wait_until(lambda: full.poll() is not None, 120)
    first = run("slow")
    wait_until(lambda: "step 3" in said(first), 120)
    os.kill(first.pid, number)
    wait_until(lambda: first.poll() is not None, 120)
    (path,) = (tmp_path / "here").glob("hpc_ckpt_*.ckpt")
    step = torch.load(path, weights_only=True)["global_step"]
    assert path.name == f"hpc_ckpt_{step}.ckpt"
    assert 3 <= step < 48
    assert "slope" not in said(first)
    second = run(SLURM_RESTART_COUNT="1")
    wait_until(lambda: second.poll() is not None, 120)
    assert re.findall(r"begins at (\d+)", said(second)) == [str(step)]
    assert said(second).splitlines()[-1] == said(full).splitlines()[-1]
    assert not list((tmp_path / "here").glob(".requeued-*"))
