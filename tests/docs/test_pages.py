"""The blocks of every page run, its links have targets, and its figures equal those of their source."""

import re
from pathlib import Path

import pytest
import yaml
from pages import ROOT, TRAINS, Block, Reader, blocks, pages, prose, read

from legato.base.errors import ConfigError
from legato.cli.config.check import check_config
from legato.cli.config.read import SECTIONS, read_config
from legato.cli.main import COMMANDS

PAGES = pages()
NOT_RUN = {
    "make ": "a target of the Makefile; CI runs demo, test and lint, by themselves",
    "pip install": "the package is installed already, and a test does not change its environment",
    "tensorboard ": "serves until it is stopped",
    "git clone": "needs a network",
    "torchrun ": "starts several machines",
    "srun ": "needs SLURM",
    "ray ": "needs Ray",
    "kubectl ": "needs Kubernetes",
    "docker ": "needs Docker; tests/docs/test_image.py",
    ".venv/bin/python examples/same_bits.py": "tests/trainer/test_packaging.py",
    "python -m benchmarks": "takes minutes; tests/ has each benchmark's own test",
    "mypy": "does not find an editable install that is not its own; tests/cli/test_new.py",
}
"""Prefixes of commands that a test does not run, with the reason."""
LEFT_OUT = {
    "legato fit digits.yaml launcher=slurm": "needs SLURM; tests/cli/launchers/ runs it",
    "legato fit digits.yaml launcher=ray": "needs Ray; tests/cli/launchers/ runs it",
    "legato lightning train.py": "the reader's own program; tests/lightning/ runs some",
    "legato convert": "needs a checkpoint; tests/lightning/test_checkpoints.py converts some",
}
"""Single commands that a test does not run, with the reason."""


def page_id(page: str) -> str:
    return page.removesuffix(".md")


TESTED_ELSEWHERE = {
    "docs/how-to/replay.md": "test_replay_page.py, which also reads what is printed",
    "docs/how-to/spike.md": "test_replay_page.py, which also reads what is printed",
    "docs/start/tutorial.md": "test_tutorial.py, which also reads what is printed",
    "docs/start/whole-program.md": "test_whole_program.py, which also reads what is printed",
}
RUNS = [
    page
    for page in PAGES
    if page not in TESTED_ELSEWHERE
    and any(block.language in ("python", "yaml", "bash", "console") for block in blocks(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNS, ids=page_id)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader = Reader(tmp_path)
    page_blocks = list(blocks(page))
    scripts = [block for block in page_blocks if block.language == "python" and not block.title]
    for block in page_blocks:
        if block.title:
            reader.write(block.title, block.text)
        elif block is (scripts[-1] if scripts else None):
            reader.script("\n".join(script.text for script in scripts))
        elif block.language == "yaml":
            monkeypatch.syspath_prepend(reader.folder)
            check_part(block)
        for command in block.commands:
            if not_run(command) is None:
                reader.command(command)


def check_part(block: Block) -> None:
    """Check a part of a config; a complete config supplies the rest."""
    values = yaml.safe_load(block.text)
    assert isinstance(values, dict), f"{block} is not a mapping"
    assert set(values) <= {*SECTIONS, "extends", "vars"}, f"{block} has keys that no config has"
    if "extends" in values:
        return
    try:
        layer = read_config(["digits.yaml"])
        merged = {**layer.values, **values}
        merged["trainer"] = {**layer.values["trainer"], **values.get("trainer", {})}
        check_config(type(layer)(merged, layer.origins))
    except ConfigError as error:
        raise AssertionError(f"{block}: {error}") from error


def not_run(command: str) -> str | None:
    """Return why a test does not run the command, or None if it does."""
    listed = {**NOT_RUN, **LEFT_OUT}
    return next((reason for beginning, reason in listed.items() if command.startswith(beginning)), None)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_says_what_it_is(page: str) -> None:
    """A block without a language is not tested; output and drawings are `text`."""
    languages = {"bash", "console", "diff", "ini", "json", "python", "text", "toml", "xml", "yaml"}
    assert [str(block) for block in blocks(page) if block.language not in languages] == []


def test_every_exception_is_needed() -> None:
    commands = [command for page in PAGES for block in blocks(page) for command in block.commands]
    assert [prefix for prefix in LEFT_OUT if not any(command.startswith(prefix) for command in commands)] == []


def test_every_command_that_a_page_names_is_one() -> None:
    named = {
        (page, word)
        for page in PAGES
        for word in re.findall(r"`legato ([a-z]+)", read(page))
        + re.findall(r"^legato ([a-z]+)", read(page), re.MULTILINE)
    }
    assert [(page, word) for page, word in sorted(named) if word not in (*COMMANDS, "help")] == []
    assert set(TRAINS) <= set(COMMANDS)


# --- links ----------------------------------------------------------------------------------------------------------
LINK = re.compile(r"\]\(([^)\s]+)\)")


def slug(heading: str) -> str:
    """Return the anchor that GitHub and mkdocs generate for a heading."""
    words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_link_is_dead(page: str) -> None:
    dead = []
    for link in LINK.findall(re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() and not generated(path.resolve()):
            dead.append(link)
        elif anchor and path.suffix == ".md" and path.exists():
            heads = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug, heads):
                dead.append(link)
    assert dead == []


def generated(path: Path) -> bool:
    """Return whether the site generates the page (docs/site.py)."""
    return str(path.relative_to(ROOT / "docs")) in ("changelog.md", "reference/config.md", "reference/command-line.md")


# --- figures --------------------------------------------------------------------------------------------------------
BENCHMARKS, COMPARISON = "docs/benchmarks.md", "docs/comparison.md"
FIGURES = {
    "takes 1.03 times as long as a hand-written step": {BENCHMARKS: ["| +10 us (1.03) |"]},
    "Lightning takes 3.72 times as long": {BENCHMARKS: ["| +1,029 us (3.72) |"]},
    "SHA-256": {"examples/same_bits.py": ["hashlib.sha256"]},
    "Python >= 3.10": {"setup.cfg": ["python_requires = >=3.10"]},
}
"""Every sentence of the README with a figure, and the source of the figure."""
COMPARED = {
    "bare | 0.97 | 2.08 | 1.81 | - | 1.09 |": {
        BENCHMARKS: ["| -12 us (0.97) |", "| +456 us (2.08) |", "| +343 us (1.81) |", "| +40 us (1.09) |"],
    },
    "TensorBoard | 1.03 | 3.72 | - | - | 1.64 |": {
        BENCHMARKS: ["| +10 us (1.03) |", "| +1,029 us (3.72) |", "| +243 us (1.64) |"],
    },
}
"""Rows of the comparison with a figure, and the source of the figure."""


def plain(page: str) -> str:
    """Return the prose of a page in one line, with the text of its links."""
    return " ".join(re.sub(r"\[([^\]]*)\]", r"\1", prose(page)).split())


@pytest.mark.parametrize(("page", "figures"), [("README.md", FIGURES), (COMPARISON, COMPARED)], ids=["readme", "table"])
def test_figures_are_those_of_their_sources(page: str, figures: dict[str, dict[str, list[str]]]) -> None:
    text = plain(page)
    for sentence, sources in figures.items():
        assert sentence in text, sentence
        for source, wanted in sources.items():
            there = " ".join(read(source).split())
            assert [phrase for phrase in wanted if phrase not in there] == [], f"{sentence}: not in {source}"


def test_no_figure_of_the_readme_lacks_a_source() -> None:
    text = plain("README.md")
    for sentence in FIGURES:
        text = text.replace(sentence, "")
    assert re.findall(r"(?<![\w.])\d[\d.]*", text) == []


# --- the site -------------------------------------------------------------------------------------------------------
def test_every_page_is_in_the_navigation() -> None:
    text = read("mkdocs.yml")
    listed = set(re.findall(r"(?:- |: )([\w/-]+\.md)", text))
    there = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert there - listed == set()
    assert [page for page in listed - there if not generated(ROOT / "docs" / page)] == []
