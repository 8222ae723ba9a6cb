"""Runs with settings drawn at random are the same under Lightning and in its room: hooks, values, points, files."""

import lightning.pytorch as real
import pytest

import legato.compat.lightning.pytorch as room

from .random_runs import draw, make_run

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


@pytest.mark.parametrize("seed", range(40))
def test_a_run_is_the_same_under_both(seed, tmp_path, monkeypatch):
    how, found = draw(seed), {}
    for package in (real, room):
        folder = tmp_path / package.__name__
        folder.mkdir()
        monkeypatch.chdir(folder)
        found[package] = make_run(package, how, folder)
    expected, came = found[real], found[room]
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, list):
            for one, other in zip(came[name], value, strict=False):
                assert one == other, (name, how)
        assert came[name] == value, (name, how)
