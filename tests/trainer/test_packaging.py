"""The source distribution: it has everything, a wheel can be built from it, and its tests run on that wheel."""

import configparser
import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from sources import ROOT, copy_sources

import legato as lg

pytestmark = pytest.mark.slow

NOT_NEEDED = {".gitignore"}
HANDFUL = ["tests/base/test_bad_arguments.py", "tests/data/test_sampling.py", "tests/cli/config/test_config.py"]


def run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, timeout=570, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    source = copy_sources(folder / "source")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (found,) = (folder / "unpacked").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(unpacked):
    """The wheel built from the source distribution."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", unpacked.parent, unpacked)
    (found,) = unpacked.parent.glob("*.whl")
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a repository")
def test_the_source_distribution_has_every_file_of_the_repository(unpacked):
    tracked = {Path(name) for name in run("git", "ls-files", cwd=ROOT).splitlines()}
    there = {path.relative_to(unpacked) for path in unpacked.rglob("*")}
    missing = {str(path) for path in tracked - there if (ROOT / path).exists()}
    assert missing <= NOT_NEEDED


@pytest.fixture(scope="module")
def installed(wheel):
    """The environment variables with which that wheel is the installed Legato."""
    site = wheel.parent / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel)
    return {"PYTHONPATH": str(site), "PATH": f"{site}/bin:/usr/bin:/bin", "HOME": str(wheel.parent)}


def test_tests_of_the_source_distribution_pass_on_the_wheel_built_from_it(unpacked, installed):
    shutil.rmtree(unpacked / "build", ignore_errors=True)
    words = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *HANDFUL]
    out = run(sys.executable, "-m", "pytest", *words, cwd=unpacked, env=installed)
    assert re.search(r"\d{2,} passed", out)
    code = "import legato; print(legato.__file__)"
    where = run(sys.executable, "-c", code, cwd=unpacked, env=installed).strip()
    assert where == f"{installed['PYTHONPATH']}/legato/__init__.py"


def test_the_wheel_has_what_the_first_commands_need(installed, tmp_path):
    """Templates and configs are no modules, and easily left out."""
    legato = (sys.executable, "-m", "legato")
    run(*legato, "new", "moons", cwd=tmp_path, env=installed)
    run(*legato, "fit", "configs/quick.yaml", "trainer.max_epochs=1", cwd=tmp_path / "moons", env=installed)
    assert run(*legato, "runs", cwd=tmp_path / "moons", env=installed).count("done") == 1
    assert "Digits" in run(*legato, "config", "digits.yaml", cwd=tmp_path, env=installed)


def test_the_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"legato-[^/]*/METADATA", name))
        found = email.message_from_bytes(archive.read(name))
    assert found["Version"] == lg.__version__
    assert found["Author"] == "Legato developers"
    assert found["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in found.get_all("Classifier")
    assert found["Keywords"]
    assert not found.get_all("Project-URL")  # there is no public host: nothing is made up
    assert "# Legato" in found.get_payload()


def test_the_version_is_written_down_once():
    version = re.escape(lg.__version__)
    files = [
        ROOT / "setup.cfg",
        ROOT / "pyproject.toml",
        *(ROOT / "cli").rglob("*.py"),
        *(ROOT / "trainer").rglob("*.py"),
        ROOT / "Makefile",
    ]
    pattern = re.compile(rf"version\W+{version}", re.IGNORECASE)
    assert [path for path in files if pattern.search(path.read_text())] == []


# --- other versions of what it needs ----------------------------------------------------------------------------------
def constraints(version):
    text = run(sys.executable, ROOT / ".ci" / "constraints.py", version)
    return dict(re.findall(r"^([\w-]+)[=>]=([^;\s]+)", text, re.MULTILINE))


def test_environments_of_other_versions_have_the_bounds_of_setup_cfg():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    needed = dict(re.findall(r"^([\w-]+)(.*)$", options["options"]["install_requires"], re.MULTILINE))
    lowest, newest, other = map(constraints, ("lowest", "newest", "2.12"))
    assert all(needed[name].startswith(f">={lowest[name]}") for name in needed)  # each has a bound, and it is taken
    assert lowest["torchmetrics"] == "1.3"  # older ones import distutils
    assert not {*needed, "torchmetrics", "onnx"} & newest.keys()
    assert other["torch"] == "2.12.*"
    assert other["omegaconf"] > lowest["omegaconf"]
    assert lowest["pytest"] == newest["pytest"] == other["pytest"]  # tools stay
