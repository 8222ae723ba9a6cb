"""The Dockerfile is built and run if Docker is available; otherwise its steps run in a clean environment."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pages import ROOT

FIT = ["fit", "digits.yaml", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.limit_val_batches=1"]


def instructions():
    """Return the instructions of the Dockerfile, each as its keyword and its arguments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    steps = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(step.split(None, 1)) for step in steps if step.strip()]


def left_out(folder, names):
    """Return the names that .dockerignore excludes from a copy of the repository."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    kept = {line[1:] for line in lines if line.startswith("!")}
    at_top = Path(folder) == ROOT
    patterns = [line.removeprefix("**/") for line in lines if at_top or line.startswith("**/")]
    return {name for name in names if name not in kept and any(fnmatch(name, pattern) for pattern in patterns)}


class Container:
    """A folder with the paths of the image and an environment for pip, in which the instructions run."""

    def __init__(self, folder):
        self.folder, self.place, self.entry, self.command = folder, folder, [], []
        venv.create(folder / "venv", symlinks=True)
        # with the packages of this environment, pip among them, which the image downloads
        site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        (site / "installed.pth").write_text(sysconfig.get_paths()["purelib"])
        path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.variables = {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}

    def take(self, word, rest):
        """Run an instruction."""
        if word == "WORKDIR":
            self.place = self.folder / rest.lstrip("/")
            self.place.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            assert rest == ". ."
            shutil.copytree(ROOT, self.place, ignore=left_out, dirs_exist_ok=True)
        elif word == "RUN":
            done = subprocess.run(rest, shell=True, cwd=self.place, env=self.variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        elif word == "ENV":
            self.variables.update(pair.split("=", 1) for pair in shlex.split(rest))
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(self, {"ENTRYPOINT": "entry", "CMD": "command"}[word], json.loads(rest))
        else:  # the only ARG is pip's index, which tests leave as it is
            assert (word, rest.partition("=")[0]) in (("FROM", "python:3.11-slim"), ("ARG", "PIP_EXTRA_INDEX_URL"))

    def start(self, *words):
        """Start the image with a command."""
        command = [shutil.which(self.entry[0], path=self.variables["PATH"]), *self.entry[1:], *(words or self.command)]
        return subprocess.Popen(command, cwd=self.place, env=self.variables, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    container = Container(tmp_path_factory.mktemp("image"))
    for step in instructions():
        container.take(*step)
    return container


@pytest.mark.slow
def test_its_steps_make_an_environment_with_the_package(container):
    assert "usage: legato" in container.start().communicate(timeout=60)[0]
    # the package that was copied and installed, and not the one of this environment
    where = [str(container.folder / "venv" / "bin" / "python"), "-c", "import legato; print(legato.__file__)"]
    location = subprocess.run(
        where, cwd="/", env=container.variables, capture_output=True, text=True, check=True
    ).stdout
    assert location.startswith(str(container.folder))
    assert not (container.folder / "opt" / "legato" / "tests").exists()


@pytest.mark.slow
def test_a_container_that_is_stopped_saves_and_another_goes_on(container):
    """`docker stop` and an evicted pod send SIGTERM to the entry point."""
    words = [*FIT, "run.name=spot", "resume=auto", "trainer.max_epochs=-1"]
    first = container.start(*words, "trainer.max_steps=100000")
    deadline = time.monotonic() + 100
    while not list((container.place / "runs" / "spot").rglob("metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 75
    (saved,) = (container.place / "runs" / "spot").rglob("manifest.json")
    step = int(saved.parent.name.removeprefix("step-"))
    second = container.start(*words, f"trainer.max_steps={step + 2}")
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert "tensorboard --logdir" in out
    newest = max(path.parent.name for path in (container.place / "runs" / "spot" / "version_0").rglob("manifest.json"))
    assert int(newest.removeprefix("step-")) == step + 2


def has_docker():
    program = shutil.which("docker")
    return program and subprocess.run([program, "info"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_docker(), reason="needs Docker")
def test_it_is_built():
    subprocess.run(["docker", "build", "--quiet", "--tag", "legato-test", str(ROOT)], check=True)
    run = ["docker", "run", "--rm", "--init", "legato-test", *FIT, "trainer.max_steps=2"]
    assert "tensorboard --logdir" in subprocess.run(run, check=True, capture_output=True, text=True).stdout


def test_it_has_the_python_of_the_tests():
    assert ("FROM", "python:3.11-slim") in instructions()
    assert sys.version_info >= (3, 10)
