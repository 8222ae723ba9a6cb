"""The list of names in docs/from-lightning.md, written from the table: `python -m legato.compat.lightning.page`."""

from pathlib import Path

from .names import NAMES

BEGIN, END = "<!-- names: written by python -m legato.compat.lightning.page -->\n", "<!-- end of names -->\n"


def names_section() -> str:
    """Return Markdown that lists every name that differs from Lightning's, and counts the others."""
    same = sum(entry.kind == "same" and not entry.text for entries in NAMES.values() for entry in entries.values())
    lines = [f"{same} public names are as in Lightning. These are not:\n\n"]
    for title, wanted in (("differ", True), ("are placeholders: they can be imported, and say this when used", False)):
        found: dict[str, list[str]] = {}
        for module, entries in NAMES.items():
            for name, entry in entries.items():
                if not name.startswith("_") and entry.text and bool(entry.home) == wanted:
                    found.setdefault(entry.text, []).append(f"`{module.removeprefix('pytorch.')}.{name}`")
        lines.append(f"### Names that {title}\n\n| Lightning | Legato |\n| --- | --- |\n")
        lines += [f"| {', '.join(names)} | {text} |\n" for text, names in found.items()]
        lines.append("\n")
    return "".join(lines)


def updated(page: str) -> str:
    """Return the page with its list of names as the table has it."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{names_section()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "from-lightning.md"
    path.write_text(updated(path.read_text()))
