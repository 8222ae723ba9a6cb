"""Launchers on the real programs: `make cluster` starts SLURM and Ray on this machine and runs this file."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("LEGATO_CLUSTER"), reason="needs SLURM and Ray: make cluster"),
]

SCRIPT = """
import os, sys, time
import legato as lg
from launched_task import Line

if os.environ["SLURM_PROCID"] == "1" and "fail" in sys.argv:
    Line.training_step = lambda self, batch: 1 / 0

class Slow(Line):
    def setup(self, stage):
        print("set up", flush=True)
        time.sleep(10 if "wait" in sys.argv and not int(os.environ.get("SLURM_RESTART_COUNT") or 0) else 0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.2 if "slow" in sys.argv else 0)
        print("step", self.global_step, flush=True)

options = {"devices": 1} if "one" in sys.argv else {}
trainer = lg.Trainer(accelerator="cpu", strategy="ddp", max_epochs=2, requeue=True, threads=1, run_name="own",
                     enable_progress_bar=False, **options)
trainer.fit(Slow(), resume="auto")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a script, a config and their task, which is the current one."""
    shutil.copy(Path(__file__).parents[2] / "launched_task.py", tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).parents[2] / "lightning_script.py", tmp_path)
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2, "replicas": 2, "threads": 1}
    config = {"task": {"_target_": "launched_task.Line"}, "run": {"name": "line", "root": "runs"}, "trainer": trainer}
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, **options)
    return done.returncode, done.stdout + done.stderr


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def state_of(job):
    return said("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")[1].strip()


def restarts_of(job):
    return int(re.search(r"Restarts=(\d+)", said("scontrol", "show", "job", job)[1])[1])


def start_now(job):
    """Start a requeued job, which SLURM would leave waiting for two minutes."""
    until(lambda: state_of(job) == "PENDING")
    code, out = said("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert code == 0, out


class Job:
    """A batch job that starts a script by srun in two processes."""

    def __init__(self, folder, *words, program="own.py"):
        self.output = folder / "job.out"
        (folder / "job.sh").write_text(f"#!/bin/bash\nsrun -n2 {sys.executable} {program} {' '.join(words)}\n")
        options = [
            "--parsable",
            "--requeue",
            "--ntasks=2",
            "--nodes=1",
            "--open-mode=append",
            f"--output={self.output}",
        ]
        code, out = said("sbatch", *options, "job.sh")
        assert code == 0, out
        self.number = out.strip()

    def says(self, text):
        return self.output.exists() and text in self.output.read_text()

    @property
    def state(self):
        return state_of(self.number)

    @property
    def restarts(self):
        return restarts_of(self.number)


@pytest.fixture
def job(folder):
    """Return a function that submits a job, which does not outlive the test."""
    jobs = []

    def submit(*words, **options):
        jobs.append(Job(folder, *words, **options))
        return jobs[-1]

    yield submit
    for submitted in jobs:
        said("scancel", submitted.number)


# --- slurm ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("nodes", "devices"), [(1, 2), (2, 1)])
def test_a_submitted_run_trains(folder, nodes, devices):
    layout = [f"trainer.num_nodes={nodes}", f"trainer.devices={devices}"]
    code, out = said(sys.executable, "-m", "legato", "fit", "line.yaml", "launcher=slurm", *layout)
    assert code == 0, out
    assert f", {nodes} x {devices} processes" in out
    output = Path(re.search(r"Output  (.*)", out)[1])
    until(lambda: output.exists() and output.read_text().count("after 12 steps") == 2)
    assert f"2 processes on {nodes} node" in output.read_text()


def submit(*words):
    """Submit line.yaml by Legato; return the job's number and its output's path."""
    code, out = said(sys.executable, "-m", "legato", "fit", "line.yaml", "launcher=slurm", *words)
    assert code == 0, out
    return re.search(r"Job     (\d+)", out)[1], Path(re.search(r"Output  (.*)", out)[1])


def steps_of(version):
    return [start["step"] for start in json.loads((version / "environment.json").read_text())["starts"]]


def weights_of(version):
    return max((version / "checkpoints").glob("step-*/model.safetensors")).read_bytes()


def test_a_requeued_job_goes_on_with_its_own_run_beside_another_of_that_name(folder):
    """Both are submitted before one runs, and need all processors, so that the other runs while one is requeued."""
    words = ["launcher.options={exclusive: true}", "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_epochs=200"]
    (first, _), (second, _) = (submit("task.at=7", "task.then=stop", *words), submit(*words))
    until(lambda: restarts_of(first) == 1)
    until(lambda: state_of(second) == "COMPLETED")
    start_now(first)
    until(lambda: state_of(first) == "COMPLETED")
    version_0, version_1 = (folder / "runs" / "line" / f"version_{number}" for number in (0, 1))
    began, again = steps_of(version_0)
    assert began == 0 < again < 1200
    assert steps_of(version_1) == [0]
    assert len(list((folder / "runs" / "line").glob("version_*"))) == 2
    assert weights_of(version_0) == weights_of(version_1)  # to the bit, although one was interrupted


def test_two_steps_of_one_allocation_train_at_once(folder):
    line = f"{sys.executable} -m legato fit line.yaml run.name="
    steps = "\n".join(f"srun --ntasks=2 --exact --output={name}.out {line}{name} &" for name in ("left", "right"))
    (folder / "job.sh").write_text(f"#!/bin/bash\n{steps}\nwait\n")
    code, out = said("sbatch", "--parsable", "--nodes=1", "--ntasks=4", "job.sh")
    assert code == 0, out
    until(lambda: state_of(out.strip()) == "COMPLETED")
    outputs = [(folder / f"{name}.out").read_text() for name in ("left", "right")]
    assert [text.count("after 12 steps") for text in outputs] == [2, 2], outputs
    addresses = {re.search(r"met at (\S+)", text)[1] for text in outputs}
    assert len(addresses) == 2


def test_a_job_of_a_higher_partition_takes_the_nodes_and_the_run_goes_on_after_it(folder):
    """SLURM sends SIGTERM and requeues the job itself; bits are those of a run that nobody disturbed."""
    words = ["launcher.options={exclusive: true}", "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_epochs=200"]
    job, output = submit(*words)
    until(lambda: output.exists() and "epoch 1/" in output.read_text())
    urgent, _ = submit(*words, "launcher.partition=urgent", "run.name=urgent")
    until(lambda: state_of(urgent) == "COMPLETED")
    assert restarts_of(job) == 1
    start_now(job)
    until(lambda: state_of(job) == "COMPLETED")
    first, undisturbed = folder / "runs" / "line" / "version_0", folder / "runs" / "urgent" / "version_0"
    began, again = steps_of(first)
    assert began == 0 < again < 1200
    assert "SIGTERM: stopped at step" in output.read_text()
    assert weights_of(first) == weights_of(undisturbed)


def test_a_cancelled_job_stays_cancelled(job):
    submitted = job("slow")
    until(lambda: submitted.says("step 3"))
    said("scancel", submitted.number)
    until(lambda: submitted.state == "CANCELLED")
    assert submitted.restarts == 0
    assert submitted.says(f"SLURM is ending job {submitted.number}")


def test_a_warning_requeues_a_job_in_its_start_up(job):
    submitted = job("wait")
    until(lambda: submitted.says("set up"))
    said("scancel", "--signal=USR1", submitted.number)
    until(lambda: submitted.restarts == 1)
    assert submitted.says("the job has been requeued")


def test_a_warning_requeues_a_job_that_has_saved(job):
    submitted = job("slow")
    until(lambda: submitted.says("step 3"))
    said("scancel", "--signal=USR1", submitted.number)
    until(lambda: submitted.restarts == 1)
    assert submitted.says("is complete. Exit code 75")


def test_a_program_for_lightning_goes_on_when_its_job_is_queued_again(folder, job):
    words = "-m", "legato", "lightning", "lightning_script.py", "two"
    code, out = said("srun", "-n2", "-N1", sys.executable, *words)
    assert code == 0, out
    submitted = job("slow", program=" ".join(words))
    until(lambda: submitted.says("step 3"))
    said("scancel", "--signal=USR1", submitted.number)
    until(lambda: submitted.restarts == 1)
    start_now(submitted.number)
    until(lambda: submitted.state == "COMPLETED")
    begun = {int(step) for step in re.findall(r"begins at (\d+)", submitted.output.read_text())}
    assert len(begun) == 2
    assert 0 in begun
    ends = re.findall(r"slope \S+ after \d+", submitted.output.read_text())
    assert ends == re.findall(r"slope \S+ after \d+", out)  # both ranks', and to the last digit
    assert not list(folder.rglob(".requeued-*"))


def test_the_rank_that_failed_first_is_named(folder):
    start = time.monotonic()
    code, out = said("srun", "-n2", "-N1", sys.executable, "own.py", "fail")
    assert code == 1, out
    assert "Rank 1 of 2 failed first: ZeroDivisionError" in out
    assert time.monotonic() < start + 100


def test_another_number_of_devices_is_refused(folder):
    code, out = said("srun", "-n2", "-N1", sys.executable, "own.py", "one")
    assert code == 1, out
    assert "devices=1 and num_nodes=1 request 1 process per node on 1 node, but slurm started 2 processes" in out


# --- ray --------------------------------------------------------------------------------------------------------------
def start_ray(*words):
    """Start a Ray node as in the background of a script, where Ctrl-C is ignored."""
    options = ["--block", "--num-cpus=2", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *options],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )


@pytest.fixture(scope="module")
def address():
    """A cluster of two nodes with token authentication, as `ray start` has it where there is a token."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("RAY_AUTH_MODE", "token")
        variables.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        nodes = [start_ray("--head", f"--port={port}", "--include-dashboard=false")]

        def answers():
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        until(answers)
        time.sleep(5)  # its node joins it
        nodes.append(start_ray(f"--address=127.0.0.1:{port}"))
        yield f"127.0.0.1:{port}"
        for node in reversed(nodes):
            node.terminate()
            node.wait(timeout=60)


def test_a_run_on_two_nodes_of_ray_trains(folder, address):
    layout = ["trainer.num_nodes=2", "trainer.devices=1"]
    code, out = said(
        sys.executable, "-m", "legato", "fit", "line.yaml", "launcher=ray", f"launcher.address={address}", *layout
    )
    assert code == 0, out
    assert "Ray  2 x 1 processes" in out
    assert "2 processes on 2 nodes, started by legato" in out
    # a set: on one machine the monitors of both nodes pass on the same log
    assert len({line for line in out.splitlines() if "after 12 steps" in line}) == 2


def test_a_missing_token_is_named(folder, address, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE")
    code, out = said(sys.executable, "-m", "legato", "fit", "line.yaml", "launcher=ray", f"launcher.address={address}")
    assert code == 1, out
    assert "RAY_AUTH_MODE=token" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_on_ray_saves_when_it_is_told_to_end(folder, address, number, code):
    more = ["launcher=ray", f"launcher.address={address}", "trainer.max_epochs=100000"]
    path = folder / "driver.log"
    with path.open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "legato", "fit", "line.yaml", *more],
            stdout=log,
            stderr=log,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def trains():
        assert driver.poll() is None, path.read_text()
        return re.search(r"epoch [1-9]", path.read_text())

    try:
        until(trains)
        driver.send_signal(number)
        assert driver.wait(timeout=90) == code, path.read_text()
    finally:
        driver.kill()
        driver.wait(timeout=10)
    assert "stopped at step" in path.read_text()
    assert list((folder / "runs" / "line" / "version_0" / "checkpoints").glob("step-*"))
