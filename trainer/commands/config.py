"""`legato config`, and the help of commands, which documents every key of a config. No torch."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..config.check import launcher_arguments, load_config, trainer_arguments
from ..config.read import MOVED, SECTION_OF, SECTIONS, ready_configs
from ..launchers import LAUNCHERS


def show_config(arguments: Sequence[str]) -> None:
    """Print the resolved config with the origin of each value."""
    print(load_config(arguments).text(origins=True), end="")


def help_text(command: str, summary: str) -> str:
    """Return the text of `legato COMMAND --help`."""
    if command == "export":
        return f"legato export CHECKPOINT OUT.safetensors\n\n{summary}"
    lines = [
        f"legato {command} CONFIG.yaml [MORE.yaml ...] [key=value ...]",
        "",
        summary,
        "",
        "Files are merged left to right, then overrides such as trainer.max_epochs=3 and callbacks.NAME=null.",
        "A file may extend others: extends: [base.yaml]. ${trainer.max_epochs} is replaced by that value.",
        f"Ready configs, found from any folder: {', '.join(ready_configs()) or 'none'}.",
        "",
        "Keys of a config:",
        *(f"  {name:<12}{doc}" for name, doc in SECTIONS.items()),
        "",
        "Keys under trainer:",
        *_documented(one for one in trainer_arguments() if one.name not in MOVED and one.name not in SECTION_OF),
    ]
    for name in LAUNCHERS:
        lines += ["", f"Keys under launcher: with name={name}:", *_documented(launcher_arguments(name))]
    return "\n".join(lines)


def _documented(arguments: Iterable[Any]) -> Iterable[str]:
    for one in arguments:
        yield f"  {one}"
        yield from (f"      {line}" for line in one.doc.splitlines())
