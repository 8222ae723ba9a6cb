"""The site: built without a warning, with a version, sources and tabs, and a search that finds what people look for."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT

import legato as lg
from legato.base.arguments import ARGUMENT_NAMES, problems

EXAMPLES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docs" / "arguments.yaml").read_text())


class OneFile:
    """A format of checkpoints, as the reference names one."""


def test_every_argument_of_the_trainer_is_in_a_group() -> None:
    names = [name for group in EXAMPLES.values() for name in group]
    assert sorted(names) == sorted(ARGUMENT_NAMES)


@pytest.mark.parametrize("name", ARGUMENT_NAMES)
def test_the_example_of_an_argument_is_accepted(name: str) -> None:
    (example,) = (group[name] for group in EXAMPLES.values() if name in group)
    value = eval(example, {"lg": lg, "OneFile": OneFile}) if isinstance(example, str) else example
    assert problems({name: value}) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_it_has_the_reference_of_the_code(site: Path) -> None:
    trainer = (site / "reference" / "trainer.html").read_text()
    assert all(f"<code>{name}</code>" in trainer for name in ARGUMENT_NAMES)
    assert all(f">{group}<" in trainer for group in EXAMPLES)
    assert "on_before_optimizer_step" in (site / "reference" / "task.html").read_text()


@pytest.mark.slow
def test_pages_have_the_version_an_icon_tabs_and_their_source(site: Path) -> None:
    page = (site / "how-to" / "task.html").read_text()
    assert f"Legato {lg.__version__}" in page
    assert re.search(r'rel="icon" href="[./]*favicon.svg"', page)
    assert (site / "favicon.svg").exists()
    assert "md-tabs__link" in page
    (source,) = re.findall(r'class="source" href="([^"]+)"', page)
    assert (site / "how-to" / source).resolve().read_text() == (ROOT / "docs" / "how-to" / "task.md").read_text()
    assert f"[{lg.__version__}]" in re.sub(r"<[^>]+>", "", (site / "changelog.html").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("s3", "how-to/remote-storage.html"),
        ("docker", "how-to/batch-systems.html"),
        ("slurm", "how-to/batch-systems.html"),
        ("wandb", "how-to/wandb-sweeps.html"),
        ("hub", "how-to/fine-tuning.html"),
        ("replicas", "reference/trainer.html"),
        ("resume", "faq.html"),
    ],
)
def test_the_search_finds_it(site: Path, word: str, page: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    hits = [
        entry["location"]
        for entry in index["docs"]
        if word in separator.split(re.sub(r"<[^>]+>", " ", f"{entry['title']} {entry['text']}").lower())
    ]
    assert any(hit.partition("#")[0] == page for hit in hits), hits
