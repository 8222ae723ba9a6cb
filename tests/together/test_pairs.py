"""Pairs of features: thirty, a few drawn in each run; and those that were once found to break each other."""

import random

import pytest
from together.pairs import Pair, Stage, draw, load

pytestmark = pytest.mark.slow


SINGLE, SEVERAL, ANEW = range(20), range(100, 108), 2

FOUND = [
    Pair("validate before", "failing save", 1028),  # TensorBoard's logger held a point that a resume had voided
    Pair("float64", "ddp", 3),  # the caller's task was float32 after workers had trained it in float64
    Pair("lr monitor", "zero1", 3),  # the wrapped optimizer was not the one that the scheduler knows
    Pair("leave epoch", "bitwise", 3150),  # an epoch that a hook left early kept half a step's gradients in the tree
    Pair("leave epoch", "elastic", 3150),
    Pair("leave epoch", "step scheduler", 3),  # the rate of a step that was left had a point, before the step before it
    Pair(
        "save on train", "sigint", 60254
    ),  # a stop within an epoch was given the mean of the epoch before as its score
    Pair("compile", "microscope", 20848),  # the compiler traced the hook on outputs, and warned of what it did there
]
"""What failed once, and why."""


MET = [
    *(Pair("spike skip", name, 5) for name in ("nan skip", "fp16", "accumulation", "three replicas", "ddp")),
    *(Pair("recheck", name, 5, "sigterm") for name in ("accumulation", "ema", "nan skip")),
    Pair("recheck", "ddp", 5, "kill"),
    *(Pair("recheck", name, 5) for name in ("manual", "spike skip", "noise")),
    *(Pair("left out", name, 5) for name in ("three replicas", "accumulation", "ddp", "fsdp", "several loaders")),
]
"""What shares the update of a step, or the batches of one."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    load()
    return Stage(tmp_path_factory.mktemp("stage"))


def check(stage, pair):
    problems = stage.check(pair)
    assert not problems, "\n".join([str(pair), *problems])


@pytest.mark.parametrize("seed", SINGLE)
def test_two_features_in_one_process(stage, seed):
    check(stage, draw(seed, processes=False))


@pytest.mark.parametrize("seed", SEVERAL)
def test_two_features_of_which_one_has_processes(stage, seed):
    while not any(feature.processes for feature in draw(seed).features):
        seed += 1000
    check(stage, draw(seed))


@pytest.mark.parametrize("number", range(ANEW))
def test_two_features_drawn_anew(stage, number):
    check(stage, draw(random.SystemRandom().randrange(10**6), processes=False))


@pytest.mark.parametrize("pair", MET, ids=lambda pair: f"{pair.first} and {pair.second}")
def test_what_meets_within_a_step(stage, pair):
    check(stage, pair)


@pytest.mark.parametrize("pair", FOUND, ids=lambda pair: f"{pair.first} and {pair.second}")
def test_what_was_found_once(stage, pair):
    check(stage, pair)
