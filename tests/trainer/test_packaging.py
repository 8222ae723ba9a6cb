"""The source distribution is complete, its tests pass on the wheel built from it, and SECURITY.md is true."""

import configparser
import email
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
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
    (sources,) = (folder / "unpacked").iterdir()
    return sources


@pytest.fixture(scope="module")
def wheel(unpacked):
    """The wheel built from the source distribution."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", unpacked.parent, unpacked)
    (wheel,) = unpacked.parent.glob("*.whl")
    return wheel


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


def contents(wheel):
    """Return the files in a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_pip_builds_the_same_wheel_from_the_repository(wheel, tmp_path):
    sources = copy_sources(tmp_path / "source")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, sources)
    (built_by_pip,) = tmp_path.glob("*.whl")
    assert contents(built_by_pip) == contents(wheel)


def test_the_program_of_the_readme_runs_on_the_wheel(wheel, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # pip and what Legato requires are installed here
    (site / "installed.pth").write_text(sysconfig.get_paths()["purelib"])
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel)
    program = tmp_path / "same_bits.py"
    shutil.copy(ROOT / "examples" / "same_bits.py", program)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    assert run(python, "-c", "import legato; print(legato.__file__)", cwd=tmp_path, env=environment).startswith(
        str(site)
    )
    printed, row = run(python, program, cwd=tmp_path, env=environment), r"(?m)^(.*?)\s+([0-9a-f]{64})$"
    digests, shown = re.findall(row, printed), re.findall(row, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [name for name, _ in digests] == [name for name, _ in shown]
    assert len(digests) == 4
    assert len({digest for _, digest in digests}) == 1
    assert printed.count("was killed by SIGKILL") == 3


# --- what SECURITY.md promises ----------------------------------------------------------------------------------------
def test_a_wheel_runs_nothing_when_it_is_installed(wheel):
    files = contents(wheel)
    (info,) = {name.split("/")[0] for name in files if ".dist-info/" in name and name.startswith("legato-")}
    entry_points = files[f"{info}/entry_points.txt"].decode()
    files = [name for name in files if not name.startswith(f"{info}/")]
    assert {Path(name).suffix for name in files} - {""} == {".py", ".yaml", ".json", ".template", ".typed", ".gz"}
    assert [name for name in files if not name.startswith("legato/") or not Path(name).suffix] == [
        name for name in files if name.endswith("dist-info/METADATA")
    ]
    assert entry_points.split() == ["[console_scripts]", "legato", "=", "legato.cli.main:main"]


def test_security_lists_what_is_required():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    required = set(re.findall(r"^([\w-]+)", options["options"]["install_requires"], re.MULTILINE))
    table = (ROOT / "SECURITY.md").read_text().partition("| --- | --- |")[2].partition("\n\n")[0]
    listed = {name for row in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE) for name in row.split(", ")}
    assert listed == required


CONNECTS = """
import sys

events = []
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def watch(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        address = arguments[1]
        if isinstance(address, tuple) and address[0] not in LOOPBACK:
            events.append((event, address))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        if arguments[0] not in LOOPBACK:
            events.append((event, arguments[0]))
    elif event == "socket.__new__" and importing:
        events.append((event, arguments[1:]))


importing = True
sys.addaudithook(watch)
import legato as lg

for room in (lg, lg.callbacks, lg.tasks, lg.loggers, lg.strategies, lg.runs, lg.lab):
    for name in room.__all__:
        getattr(room, name)
print("importing", events)
importing = False
from legato.tasks import Digits, DigitsData

trainer = lg.Trainer(max_steps=2, accelerator="cpu", devices=1, enable_progress_bar=False, limit_val_batches=1)
trainer.fit(Digits(channels=8), DigitsData())
print("training", events)
"""


def test_importing_opens_no_socket_and_training_no_connection(tmp_path):
    printed = run(sys.executable, "-W", "ignore", "-c", CONNECTS, cwd=tmp_path)
    assert printed.splitlines()[0] == "importing []"
    assert "training []" in printed.splitlines()


def test_the_metadata(wheel):
    (text,) = (text for name, text in contents(wheel).items() if re.fullmatch(r"legato-[^/]*/METADATA", name))
    metadata = email.message_from_bytes(text)
    assert metadata["Version"] == lg.__version__
    assert metadata["Author"] == "Legato developers"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Keywords"]
    assert not metadata.get_all("Project-URL")  # there is no public host: nothing is made up
    assert "# Legato" in metadata.get_payload()


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
    lowest, newest, pinned = map(constraints, ("lowest", "newest", "2.12"))
    assert all(needed[name].startswith(f">={lowest[name]}") for name in needed)  # each has a bound, and it is taken
    assert lowest["torchmetrics"] == "1.3"  # older ones import distutils
    assert not {*needed, "torchmetrics", "onnx"} & newest.keys()
    assert pinned["torch"] == "2.12.*"
    assert pinned["omegaconf"] > lowest["omegaconf"]
    assert lowest["pytest"] == newest["pytest"] == pinned["pytest"]  # tools stay
