"""The page for people who come from Lightning, held against the table of names."""

from pathlib import Path

import legato as lg
from legato.compat.lightning.page import BEGIN, END, updated

PAGE = Path(lg.__file__).parent / "docs" / "from-lightning.md"


def test_the_page_lists_what_the_table_has():
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert updated(text) == text, "run python -m legato.compat.lightning.page"
