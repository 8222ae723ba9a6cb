"""Requeueing of SLURM jobs: for signals that announce an end, and not for those of a job that was cancelled."""

import logging
import signal
import subprocess

from ...base.environment import slurm_job
from ...base.place import current_rank

log = logging.getLogger("legato")

SLURM_ANSWERS = 60.0
"""Seconds in which squeue and scontrol must answer."""


def requeue_job(number: int) -> None:
    """Requeue this SLURM job after signal `number`; say so where that fails, or where the job was cancelled.

    SIGUSR1 is a warning. SIGTERM comes to a job that is to make room (it still runs), but also to one that was
    cancelled or has used up its time: that one is ending already, and SLURM would bring it back.
    """
    job = slurm_job()
    if job is None:
        log.warning("requeue=true: this is not a SLURM job (there is no SLURM_JOB_ID), so nothing is requeued.")
        return
    if number == signal.SIGTERM:
        # RUNNING: the job is to make room. CANCELLED, TIMEOUT and COMPLETING are ends that somebody has decided on
        state, problem = _call("squeue", "--noheader", "--format=%T", f"--jobs={job}")
        if problem or state.strip() != "RUNNING":
            log.warning(
                "requeue=true: SLURM is ending job %s (%s), so it is not requeued. To go on past a time limit, submit "
                "it with --signal=USR1@120.",
                job,
                problem or state.strip().lower() or "it is no longer listed",
            )
            return
    _, problem = _call("scontrol", "requeue", job)
    if problem:
        log.warning("scontrol requeue %s failed: %s. Start the job again by hand.", job, problem)
    else:
        log.warning("scontrol requeue %s: the job is in the queue again.", job)


def requeue_early(number: int, wanted: bool) -> None:
    """Requeue the job, on rank 0 and if `wanted`, for a signal that comes before there is anything to save."""
    if wanted and number != signal.SIGINT and current_rank() == 0:
        requeue_job(number)


def _call(*command: str) -> tuple[str, str]:
    """Run a command of SLURM; return its output, and what is wrong or ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_ANSWERS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
