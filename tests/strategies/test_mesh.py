"""The mesh: on every layout the loss curve and the weights of one process, and features with sharded parameters."""

import warnings
from functools import partial

import pytest
import torch
from ddp_cases import flat
from mesh_cases import (
    CNN,
    FEATURES,
    GPT,
    LAYOUTS,
    RUNS,
    curve,
    difference,
    fit,
    in_one,
    mesh,
    outcome,
)
from shared_processes import run_cases

from legato.trainer.processes.launch import run_workers

TOLERANCE = 2e-6
"""Of weights and losses near 1: what another order of additions changes in a few steps. 5e-7 was the most seen."""


CASES = {
    2: [(layout, *made) for layout in LAYOUTS[2] for made in ((GPT, "adamw"), (CNN, "sgd"))],
    4: [
        ("shard", CNN, "adamw"),  # a weight has 3 rows, so one process has none
        ("data x shard", GPT, "sgd"),
        ("tensor", GPT, "sgd"),
        ("shard x tensor", GPT, "sgd"),
        ("shard x tensor", CNN, "adamw"),
        ("data x tensor", CNN, "adamw"),
        ("zero1", GPT, "sgd"),
        ("zero1", CNN, "adamw"),
    ],
}
"""Every layout of so many processes, with the tasks and optimizers that it trains."""


def with_layout(processes, layout, kind, optimizer):
    """Return the outcome, in each process."""
    return outcome(kind(optimizer), strategy=LAYOUTS[processes][layout], devices=processes, **RUNS[optimizer])


def with_feature(name):
    """Return the outcome of a feature, and the devices on which its task was built; in each of two processes."""
    # torch's compiler reads the gradient of a block's input, and suppresses the warning about it
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    kind, options = FEATURES[name]
    task = kind()
    trainer = fit(task, devices=2, **options)
    built = trainer.strategy.collectives.gather_objects(getattr(task, "devices_seen", []))
    return (flat(task), curve(trainer)), built


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return the outcomes of all layouts and features of two processes, from one start."""
    cases = {case: partial(with_layout, 2, *case) for case in CASES[2]}
    cases |= {name: partial(with_feature, name) for name in FEATURES}
    return run_cases(cases, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Return the outcomes of all layouts of four processes, from one start."""
    return run_cases({case: partial(with_layout, 4, *case) for case in CASES[4]}, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone():
    return {(kind.__name__, name): in_one(kind(name), **run) for kind in (GPT, CNN) for name, run in RUNS.items()}


@pytest.mark.slow
def test_one_process_of_a_mesh_is_one_process(alone):
    for strategy in ("fsdp", "zero1", mesh(data="auto")):
        assert difference(outcome(GPT("adamw"), strategy=strategy, **RUNS["adamw"]), alone["GPT", "adamw"]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[2], ids=str)
def test_every_layout_of_two_processes_is_one_process(case, two, alone):
    assert difference(two[case], alone[case[1].__name__, case[2]]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[4], ids=str)
def test_every_layout_of_four_processes_is_one_process(case, four, alone):
    assert difference(four[case], alone[case[1].__name__, case[2]]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_matches_one_process(name, two):
    kind, options = FEATURES[name]
    alone = {"replicas": 2, **options, "strategy": "single", "compile": False}
    if "tensor" in options["strategy"] and "replicas" not in options:
        alone["replicas"] = 1
    actual, expected = two[name][0], outcome(kind(), **alone)
    tolerance = {"bf16-true": 1e-2, "16-mixed, cut": 2e-3}.get(name, TOLERANCE)
    assert len(actual[1]) == len(expected[1])
    assert difference(actual, expected) < tolerance


@pytest.mark.slow
def test_only_rank_0_builds_the_modules_of_configure_model(two):
    assert two["built on rank 0"][1] == [["cpu"], ["meta"]]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_are_one():
    def work():
        layouts = {**LAYOUTS[2], "parts on the host": mesh(shard=2, cpu_offload=True)}
        return {
            name: outcome(GPT("adamw"), strategy=layout, accelerator="cuda", devices=2, **RUNS["adamw"])
            for name, layout in layouts.items()
        }

    alone = in_one(GPT("adamw"), accelerator="cuda", devices=1, **RUNS["adamw"])
    for name, results in run_workers(work, 2).items():
        assert difference(results, alone) < 1e-4, name
