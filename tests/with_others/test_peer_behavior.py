"""The programs of peer_behavior run, in Legato and in Lightning, with the results that docs/comparison.md states."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from benchmarks import peer_behavior


@pytest.mark.parametrize(("case", "lightning"), [("window", "weight -1.25"), ("nan", "weight nan")])
def test_each_side_has_its_result(case, lightning):
    *_, is_right = peer_behavior.CASES[case]
    assert is_right(peer_behavior.run(case, "legato"))
    if find_spec("lightning") and version("lightning") == "2.6.6":
        assert peer_behavior.run(case, "lightning") == lightning
