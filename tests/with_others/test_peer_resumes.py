"""The reproducers of peers' resumes run, and tell a lost sample from a complete epoch."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from benchmarks import peer_resumes


def note(folder, phase, numbers, epoch=0, rank=0):
    (folder / f"{phase}-{rank}").write_text("".join(f"{epoch} {number}\n" for number in numbers))


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (range(12), range(12, 64), "each of 64 samples was read once"),
        (range(12), range(52), "of 64 samples 12 were read twice and 12 never"),
        (range(12), [], "of 64 samples 0 were read twice and 52 never"),
    ],
)
def test_the_verdict_counts_samples(tmp_path, before, after, sentence):
    note(tmp_path, "before", before)
    note(tmp_path, "after", after)
    assert peer_resumes.verdict(tmp_path) == (sentence.startswith("each"), sentence)


def test_a_loader_with_a_state_goes_on_in_legato_and_begins_anew_in_lightning():
    assert peer_resumes.run("state", "legato") == (True, "each of 64 samples was read once")
    if find_spec("lightning") and version("lightning") == "2.6.6":
        assert peer_resumes.run("state", "peer") == (False, "of 64 samples 12 were read twice and 12 never")
