"""MkDocs hooks that generate pages from the code, link to repository files, and publish the source of each page."""

import atexit
import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from legato.base.arguments import TrainerArguments, argument_texts, argument_types, documented_arguments
from legato.base.values import name_of
from legato.base.version import __version__
from legato.callbacks import callback
from legato.cli.config.check import LAUNCHERS, class_path
from legato.cli.config.classes import load
from legato.cli.config.read import MOVED, SECTION_OF, SECTIONS
from legato.cli.main import COMMANDS, command_parser

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("base", "callbacks", "cli", "compat", "configs", "lab", "loggers", "tasks", "trainer")
PACKAGE = ("__init__.py", "py.typed", *ROOMS)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CHANGELOG = "CHANGELOG.md"
SHOWN_AS_TEXT = {".py": "python", ".yaml": "yaml", ".cfg": "ini", "": "text"}


@event_priority(100)  # before mkdocstrings takes its options
def on_config(config: Any) -> Any:
    """Make the repository root importable by mkdocstrings under the package name."""
    folder = Path(tempfile.mkdtemp(prefix="legato-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # the links in it, not what they lead to
    (folder / "legato").mkdir()
    for name in PACKAGE:
        (folder / "legato" / name).symlink_to(ROOT / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(folder)]
    config.site_name = f"Legato {__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add pages generated from the code, and pages for the repository files that other pages link to."""
    files.append(File.generated(config, "reference/config.md", content=config_page()))
    files.append(File.generated(config, "reference/command-line.md", content=command_line_page()))
    files.append(File.generated(config, "changelog.md", content=changelog_page()))
    linked = set()
    for file in files.documentation_pages():
        if file.abs_src_path is None:
            continue
        raw = Path(file.abs_src_path).read_text(encoding="utf-8")
        files.append(File.generated(config, f"source/docs/{file.src_uri}.txt", content=raw))
        if file.src_uri.startswith("reference/"):
            continue
        for link in LINK.finditer(raw):
            path = source_of(file.src_uri, link[2])
            if path is not None:
                linked.add(path)
    for path in sorted(linked - {CHANGELOG}):
        files.append(File.generated(config, f"source/{path}.md", content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to repository files, fill in placeholders, and append a link to the page's source."""
    folder = posixpath.dirname(page.file.src_uri) or "."

    def to_source(link: re.Match[str]) -> str:
        path = source_of(page.file.src_uri, link[2])
        if path is None:
            return link[0]
        target = "changelog.md" if path == CHANGELOG else f"source/{path}.md"
        return f"{link[1]}{posixpath.relpath(target, folder)}{link[4]}"

    markdown = LINK.sub(to_source, markdown)
    assert callback.__doc__ is not None
    markdown = markdown.replace("{{ drawing of hooks }}", callback.__doc__.split("\n", 2)[2])
    markdown = markdown.replace("{{ arguments of the Trainer }}", arguments_of_the_trainer())
    if page.file.abs_src_path is None:
        return markdown
    source = f"source/docs/{page.file.src_uri}.txt"
    return f"{markdown}\n\n[Source of this page]({posixpath.relpath(source, folder)}){{ .source }}\n"


def source_of(page: str, link: str) -> str | None:
    """Return the repository path of a linked file outside docs/; None for all other links."""
    if "://" in link or link.startswith("mailto:"):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path


def source_page(path: str) -> str:
    """Return a page that shows a repository file."""
    language = SHOWN_AS_TEXT.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"


# --- pages generated from the code ----------------------------------------------------------------------------------
def config_page() -> str:
    """Return the page of all config keys, with the same descriptions as in `legato fit --help`."""
    lines = [
        "# Config keys",
        "",
        "Reference for anyone who writes a config: all keys, with the same descriptions as in `legato fit --help`.",
        "To learn how files are merged, see [Write a config](../how-to/config.md).",
        "",
    ]
    lines += ["## Sections", "", "| key | |", "| --- | --- |"]
    lines += [f"| `{name}` | {escaped(doc)} |" for name, doc in SECTIONS.items()]
    types, texts = argument_types(), argument_texts()
    keys = {name: text for name, text in texts.items() if name not in MOVED and name not in SECTION_OF}
    lines += ["", "## trainer", "", "| key | type | |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {shown_values(types[name])} | {escaped(text)} |" for name, text in keys.items()]
    for name in LAUNCHERS:
        launcher = load(class_path("launcher", name))
        described = documented_arguments(launcher.__doc__) | documented_arguments(launcher.__init__.__doc__)
        lines += ["", f"## launcher: {name}", "", "| key | |", "| --- | --- |"]
        lines += [f"| `{key}` | {escaped(text)} |" for key, text in described.items()]
    return "\n".join(lines) + "\n"


def arguments_of_the_trainer() -> str:
    """Return tables of the Trainer's arguments, grouped as in docs/arguments.yaml."""
    types, texts = argument_types(), argument_texts()
    lines: list[str] = []
    for group, examples in yaml.safe_load((ROOT / "docs" / "arguments.yaml").read_text()).items():
        lines += [f"### {group}", "", "| argument | values; default | meaning | example |", "| --- | --- | --- | --- |"]
        for name, example in examples.items():
            default = TrainerArguments.__dataclass_fields__[name].default
            kind = "" if types[name] is Any else f"{shown_values(types[name])}; "
            lines.append(f"| `{name}` | {kind}`{default!r}` | {escaped(texts[name])} | `{name}={example}` |")
        lines.append("")
    return "\n".join(lines)


def changelog_page() -> str:
    """Return the changelog as a page."""
    text = (ROOT / CHANGELOG).read_text(encoding="utf-8")
    return text.replace("[changes/](changes/README.md)", "`changes/`")


def shown_values(kind: Any) -> str:
    """Return the values that a type allows, for a table cell."""
    return escaped(re.sub(r"anything( or null)?$", r"an object\1", name_of(kind)))


def command_line_page() -> str:
    """Return the page of all commands, with their `--help` output."""
    lines = [
        "# Command line",
        "",
        "Usage: `legato COMMAND CONFIG.yaml [MORE.yaml ...] [key=value ...]`, or `python -m legato COMMAND ...`.",
        "This page shows the output of `legato COMMAND --help`. See also [config keys](config.md),",
        "[exit codes](exit-codes.md), and examples in [Use the command line](../how-to/command-line.md).",
    ]
    for name in COMMANDS:
        text = command_parser(name).format_help().partition("\nexit codes:")[0].partition("\nA file may extend")[0]
        lines += ["", f"## legato {name}", "", "```text", text.strip(), "```"]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Escape a text for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
