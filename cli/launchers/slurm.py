"""SlurmLauncher: submits a run as an sbatch script.

Shortly before the job reaches its time limit, the run saves a checkpoint and stops, and the job is requeued.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError
from ...base.run_names import address_problem, require_local
from ...trainer.processes.signals import RESUME_ME
from ...trainer.runs.record import RECORD
from .launcher import Launcher, Machines

if TYPE_CHECKING:
    from ..config.check import Config

_WAIT = 60
"""Seconds that srun waits for the other ranks after the first rank exits."""
_SET = ("nodes", "ntasks-per-node", "gpus-per-node", "signal", "output", "chdir", "requeue", "no-requeue", "ntasks")
"""The sbatch options that the script sets."""


@dataclass(kw_only=True)
class SlurmLauncher(Launcher):
    """Submits an sbatch script. The trainer's arguments determine the number of processes, nodes and GPUs.

    Args:
        time: Time limit in SLURM's format: minutes, "HH:MM:SS" or "D-HH:MM:SS". None: the partition's limit.
        partition: SLURM partition. None: the default partition.
        account: Account to charge.
        qos: SLURM quality of service.
        cpus_per_process: CPU cores per process, including its loader workers.
        memory: Memory per node, such as "64G".
        job_name: Name of the job. None: run.name.
        options: Additional options for sbatch: {constraint: a100, exclusive: true} becomes --constraint=a100
            --exclusive.
        setup: Shell commands to run first, such as `module load cuda`.
        python: Path of the Python interpreter on the nodes. None: this process's interpreter.
        requeue: Requeue a job that stops before the run is complete. The run resumes from its newest checkpoint.
        signal_seconds: Number of seconds before the time limit at which the run saves a checkpoint and stops.
        folder: Folder for the script, config and output. None: `slurm` next to the run directories.
        dry_run: Print the script instead of submitting it.

    Raises ConfigError for sbatch options that the script sets itself.
    """

    name = "slurm"

    time: str | int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_process: int | None = None
    memory: str | None = None
    job_name: str | None = None
    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    python: str | None = None
    requeue: bool = True
    signal_seconds: int = 120
    folder: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for options that would break the script. sbatch checks the other options."""
        require_local(self.folder, "launcher.folder")
        for option in self.options:
            if option in _SET or not re.fullmatch(r"[a-z][a-z0-9-]*", option):
                raise ConfigError(
                    f"launcher.options.{option}: expected a long sbatch option without the dashes, such as constraint. "
                    f"The launcher sets {', '.join(_SET)} itself."
                )

    def start(self, command: str, config: "Config", machines: Machines) -> int:
        """Submit the job or print the script and return 0. Raises WorkerError if sbatch fails."""
        values = config.values
        if (self.folder is None or values["resume"] != "auto") and address_problem(values["run"]["root"]):
            raise ConfigError(
                "With run.root in an object store, set launcher.folder=FOLDER to choose where to write the job "
                "script, and set resume=auto so that a requeued job finds its run."
            )
        runs = Path(values["run"]["root"]) / values["run"]["name"]
        folder = (Path(self.folder) if self.folder is not None else runs / "slurm").absolute()
        number = 1 + sum(1 for _ in folder.glob("job-*.sh"))
        stem = folder / f"job-{number:04d}"
        resume = self._resume(runs.absolute()) if command == "fit" and values["resume"] != "auto" else []
        script = self.script(command, machines, values["run"]["name"], stem, resume)
        if self.dry_run:
            print(script, end="")
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        # requeue=False, since the script requeues the job and a second request from the run would fail
        stem.with_suffix(".yaml").write_text(config.changed({"requeue": False}).text(), encoding="utf-8")
        path = stem.with_suffix(".sh")
        path.write_text(script, encoding="utf-8")
        job = self.call_tool("sbatch", "--parsable", str(path)).strip().partition(";")[0]
        print(f"Job     {job}, {machines.nodes} x {machines.processes} processes\nScript  {path}")
        print(f"Output  {folder / f'{job}.out'}")
        return 0

    def script(self, command: str, machines: Machines, name: str, stem: Path, resume: list[str]) -> str:
        """Return the sbatch script that runs the config `stem`.yaml. The shell lines in `resume` set `$resume`."""
        python = shlex.quote(self.python or sys.executable)
        config = shlex.quote(str(stem.with_suffix(".yaml")))
        words = shlex.join([command, *(flag for flag in self.flags if not flag.startswith("trainer.requeue="))])
        # without --kill-on-bad-exit, which would kill the other ranks once one exits with 75, and return 143
        run = f'srun --wait={_WAIT} {python} -m {__name__.partition(".")[0]} {words} {config} "${{resume[@]}}"'
        again = [f'if [ "$code" -eq {RESUME_ME} ]; then', '  scontrol requeue "$SLURM_JOB_ID"', "fi"]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in self._options(machines, name, stem.parent)),
            "",
            f"# On SIGUSR1 ({self.signal_seconds} s before the time limit) and on SIGTERM (preemption),",
            f"# the run saves a checkpoint and ends with exit code {RESUME_ME}.",
            *self.setup,
            "resume=()",
            *resume,
            run,
            "code=$?",
            *(again if self.requeue else []),
            'exit "$code"',
        ]
        return "\n".join(lines) + "\n"

    def _options(self, machines: Machines, name: str, folder: Path) -> Iterator[str]:
        options: dict[str, Any] = {
            "job-name": self.job_name or name.replace("/", "-"),
            "nodes": machines.nodes,
            "ntasks-per-node": machines.processes,
            "gpus-per-node": machines.gpus or None,
            "cpus-per-task": self.cpus_per_process,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "chdir": Path.cwd(),
            "output": folder / "%j.out",
            "open-mode": "append",
            "requeue" if self.requeue else "no-requeue": True,
            "signal": f"USR1@{self.signal_seconds}",
            **self.options,
        }
        for option, value in options.items():
            if value is True:  # a flag; None and False leave the partition's default
                yield f"--{option}"
            elif value is not None and value is not False:
                yield f"--{option}={shlex.quote(str(value))}"

    def _resume(self, runs: Path) -> list[str]:
        """Return the shell lines that make a requeued job resume the run it started, if any."""
        # uses grep, since Python takes seconds to start on a busy file system
        job = '"\\"slurm_job\\": \\"$SLURM_JOB_ID\\""'
        return [
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] &&',
            f"  grep -qs {job} {shlex.quote(str(runs))}/version_*/{RECORD}; then",
            "  resume=(resume=auto)",
            "fi",
        ]
