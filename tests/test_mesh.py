"""The mesh: on every layout the loss curve and the weights of one process, and what goes with sharded parameters."""

import warnings

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

from legato.trainer.processes.launch import run_workers

TOLERANCE = 2e-6
"""Of weights and losses near 1: what another order of additions changes in a few steps. 5e-7 was the most seen."""


def layouts(processes, kinds):
    """Return the outcome of every layout of so many processes, by layout, task and optimizer; in each process."""
    return {
        (layout, kind.__name__, optimizer): outcome(
            kind(optimizer), strategy=strategy, devices=processes, **RUNS[optimizer]
        )
        for layout, strategy in LAYOUTS[processes].items()
        for kind, optimizer in kinds
    }


def with_features():
    """Return the outcome of every feature, and the devices on which its task was built; in each of two processes."""
    found = {}
    # torch's compiler asks a block's input for its gradient, and hides the warning that comes of it where it is shown
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for name, (kind, options) in FEATURES.items():
        task = kind()
        trainer = fit(task, devices=2, **options)
        built = trainer.strategy.gather_objects(getattr(task, "devices_seen", []))
        found[name] = (flat(task), curve(trainer)), built
    return found


def half_gathered():
    options = {"devices": 2, "precision": "bf16-mixed"}
    return [outcome(GPT(), strategy=mesh(shard=2, half_traffic=half), **options)[1] for half in (False, True)]


@pytest.fixture(scope="module")
def two():
    """Everything that two processes do, in the same ones."""
    kinds = [(GPT, "adamw"), (CNN, "sgd"), (CNN, "adamw")]
    return run_workers(lambda: (layouts(2, kinds), with_features(), half_gathered()), 2)


@pytest.fixture(scope="module")
def alone():
    return {(kind.__name__, name): in_one(kind(name), **run) for kind in (GPT, CNN) for name, run in RUNS.items()}


def test_one_process_of_a_mesh_is_one_process(alone):
    for strategy in ("fsdp", "zero1", mesh(data="auto")):
        assert difference(outcome(GPT("adamw"), strategy=strategy, **RUNS["adamw"]), alone["GPT", "adamw"]) == 0.0


def test_every_layout_of_two_processes_is_one_process(two, alone):
    for (layout, *case), found in two[0].items():
        assert difference(found, alone[tuple(case)]) < TOLERANCE, (layout, case)


def test_every_layout_of_four_processes_is_one_process(alone):
    found = run_workers(lambda: layouts(4, [(GPT, "sgd"), (CNN, "adamw")]), 4)
    for (layout, *case), ours in found.items():
        assert difference(ours, alone[tuple(case)]) < TOLERANCE, (layout, case)


@pytest.mark.parametrize("name", FEATURES)
def test_with_every_feature_it_is_the_run_of_one_process(name, two):
    kind, options = FEATURES[name]
    alone = {"replicas": 2, **options, "strategy": "single", "compile": False}
    if "tensor" in options["strategy"] and "replicas" not in options:
        alone["replicas"] = 1
    ours, theirs = two[1][name][0], outcome(kind(), **alone)
    tolerance = {"bf16-true": 1e-2, "16-mixed, cut": 2e-3}.get(name, TOLERANCE)
    assert len(ours[1]) == len(theirs[1])
    assert difference(ours, theirs) < tolerance


def test_only_rank_0_builds_what_is_built_late(two):
    assert two[1]["built on rank 0"][1] == [["cpu"], ["meta"]]


def test_weights_gathered_in_half_precision_train_almost_the_same(two):
    exact, half = two[2]
    assert 0 < (exact - half).abs().max() < 0.02


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
    for name, found in run_workers(work, 2).items():
        assert difference(found, alone) < 1e-4, name
