"""Continuous integration and releases: the workflows run targets of the Makefile, and a tag must fit the version."""

import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec

import pytest
import yaml
from sources import ROOT, copy_sources

import legato as lg

WORKFLOWS = ROOT / ".github" / "workflows"


def load(path):
    # YAML 1.1 reads the key `on` as true
    return yaml.safe_load(path.read_text())


def commands(workflow):
    """Yield each command of a workflow, once for each entry of its matrix."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        targets = [*matrix.get("target", []), *(entry["target"] for entry in matrix.get("include", []))]
        for step in job["steps"]:
            if "run" in step:
                yield from (step["run"].replace("${{ matrix.target }}", target) for target in targets or [""])


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    words = [command.split() for command in commands(load(path))]
    assert words
    for program, *arguments in words:
        assert program == "make"
        assert {word for word in arguments if word.isalpha()} <= targets


def test_continuous_integration_covers_what_contributors_run():
    workflow = load(WORKFLOWS / "ci.yml")
    run = {word for command in commands(workflow) for word in command.split()[1:]}
    assert run == {"lint", "size", "docs", "test", "demo", "others", "quick"}
    quick = {entry["python"] for entry in workflow["jobs"]["make"]["strategy"]["matrix"]["include"]}
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    assert quick == {classifiers[0], classifiers[-1]}  # the oldest and the newest


def test_the_demo_installs_no_extra():
    rule = re.search(r"^\$\(DEMO\):.*?\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"--editable (\S+)", rule[0]) == ["."]


def test_only_the_job_that_publishes_may_sign():
    workflow = load(WORKFLOWS / "release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert workflow["jobs"]["publish"]["environment"]["name"] == "pypi"
    assert "permissions" not in workflow["jobs"]["build"]
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_jobs_end_in_time_and_keep_no_credentials(path):
    for job in load(path)["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


def test_templates_and_hooks_are_valid():
    for form in ("bug.yml", "feature.yml"):
        fields = load(ROOT / ".github" / "ISSUE_TEMPLATE" / form)["body"]
        assert len({field["id"] for field in fields}) == len(fields)
    hooks = load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/lint-imports", ".ci/changes"}


# --- the changelog ----------------------------------------------------------------------------------------------------
def fragments(folder):
    return sorted((folder / "changes").glob("+*.md"))


def check_entries(folder):
    words = [sys.executable, ROOT / ".ci" / "changes", folder]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_entries_of_the_next_release_are_well_formed():
    assert check_entries(ROOT / "changes").stderr == ""


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("planted.fixed.md", "A planted entry.", "expected a name such as"),
        ("+planted.bug.md", "A planted entry.", "expected a name such as"),
        ("+planted.fixed.md", "A planted entry.\nIts second line.\n", "expected one sentence in one line"),
        ("+planted.fixed.md", "a planted entry", "expected one sentence in one line"),
    ],
)
def test_an_entry_that_is_not_is_refused(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    done = check_entries(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path / name}: {complaint}" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("towncrier") is None, reason="needs towncrier: make lint installs it")
def test_a_release_collects_its_entries(tmp_path):
    folder = copy_sources(tmp_path / "source")
    for entry in fragments(folder):
        entry.unlink()
    (folder / "changes" / "+planted.fixed.md").write_text("A planted entry.\n")
    words = [sys.executable, "-m", "towncrier", "build", "--keep", "--version", "99.0.0", "--date", "2026-12-01"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=60)
    changelog = (folder / "CHANGELOG.md").read_text()
    newest, previous = re.findall(r"^## .*", changelog, re.MULTILINE)[:2]
    assert newest == "## [99.0.0] - 2026-12-01"
    assert "### Fixed\n\n- A planted entry.\n" in changelog.partition(previous)[0]


def test_no_release_has_more_than_sixty_lines():
    for entry in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        assert re.match(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}\n", entry)
        assert len(entry.splitlines()) <= 60


# --- building ---------------------------------------------------------------------------------------------------------
def build(folder, tag):
    return subprocess.run(
        [folder / ".ci" / "distributions", sys.executable, tag], capture_output=True, text=True, timeout=300
    )


def test_a_tag_that_does_not_fit_builds_nothing(tmp_path):
    folder = copy_sources(tmp_path / "source")
    wrong = build(folder, "v99.0.0")
    assert wrong.returncode == 1
    assert (
        f"the tag is v99.0.0, and base/version.py says {lg.__version__}: expected the tag v{lg.__version__}"
        in wrong.stderr
    )
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(re.sub(rf"^## \[{lg.__version__}\].*", "## [1999]", changelog.read_text(), flags=re.MULTILINE))
    undated = build(folder, f"v{lg.__version__}")
    assert undated.returncode == 1
    assert f"run towncrier build --version {lg.__version__}" in undated.stderr
    assert not (folder / "dist").exists()


def test_a_release_leaves_no_entry_behind(tmp_path):
    folder = copy_sources(tmp_path / "source")
    (folder / "changes" / "+planted.fixed.md").write_text("A planted entry.\n")
    done = build(folder, f"v{lg.__version__}")
    assert done.returncode == 1
    assert "changes/ still has entries" in done.stderr


@pytest.mark.slow
def test_a_tag_that_fits_builds_both_distributions(tmp_path):
    folder = copy_sources(tmp_path / "source")
    for entry in fragments(folder):
        entry.unlink()
    done = build(folder, f"v{lg.__version__}")
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    assert len(list((folder / "dist").iterdir())) == 2
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith((".so", ".pth")) or ".data/scripts" in name]
