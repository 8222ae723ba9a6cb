"""Requeues SLURM jobs after a signal that announces preemption or a time limit, but not after a cancellation."""

import logging
import signal
import subprocess

from ...base.environment import slurm_job
from ...base.place import current_rank

log = logging.getLogger("legato")

SLURM_ANSWERS = 60.0
"""Maximum time in seconds for squeue and scontrol to respond."""


def requeue_job(number: int) -> None:
    """Requeue this SLURM job after signal `number`.

    SIGUSR1 is an early warning. SLURM sends SIGTERM to a job that is being preempted (its state is RUNNING), but also
    to jobs that were canceled or have reached their time limit, which must not be requeued. Logs a warning if the job
    is not requeued.
    """
    job = slurm_job()
    if job is None:
        log.warning("requeue=true: this is not a SLURM job (SLURM_JOB_ID is not set), so nothing will be requeued.")
        return
    if number == signal.SIGTERM:
        # RUNNING: the job is preempted. CANCELLED, TIMEOUT and COMPLETING are final.
        state, problem = _call("squeue", "--noheader", "--format=%T", f"--jobs={job}")
        if problem or state.strip() != "RUNNING":
            log.warning(
                "requeue=true: SLURM is ending job %s (%s), so it is not requeued. To continue past a time limit, "
                "submit the job with --signal=USR1@120.",
                job,
                problem or state.strip().lower() or "it is no longer listed",
            )
            return
    _, problem = _call("scontrol", "requeue", job)
    if problem:
        log.warning("scontrol requeue %s failed: %s. Resubmit the job manually.", job, problem)
    else:
        log.warning("scontrol requeue %s: the job has been requeued.", job)


def requeue_early(number: int, wanted: bool) -> None:
    """If `wanted`, requeue the job from rank 0 after a signal that arrives before there is anything to save."""
    if wanted and number != signal.SIGINT and current_rank() == 0:
        requeue_job(number)


def _call(*command: str) -> tuple[str, str]:
    """Run a SLURM command. Return its output and its error message, which is "" on success."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_ANSWERS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
