"""The plot of docs/how-to/notebooks.md, drawn by docs/plot_runs.py with the page's own lines."""

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT


@pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")
def test_the_three_lines_of_the_page_plot_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "svg")
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(ROOT / "docs" / "plot_runs.py"))
    script["train_runs"]()
    script["plot_runs"](tmp_path / "runs.svg")
    from matplotlib import pyplot

    axes = pyplot.gca()
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"slow/version_0", "fast/version_0"}
    assert [list(line.get_xdata()) for line in axes.lines] == [list(range(5, 101, 5))] * 2
    pyplot.close("all")
    assert b"<svg" in (tmp_path / "runs.svg").read_bytes()
    assert (ROOT / "docs" / "images" / "runs.svg").is_file()
