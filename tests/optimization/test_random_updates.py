"""Updates and hooks that draw random numbers: equal on all ranks, any number of processes, and after any resume."""

from functools import partial

import pytest
import torch
from random_updates import (
    NoiseAlone,
    Noisy,
    NoisyEvaluation,
    NoisyGradients,
    NoisyManual,
    NoisySteps,
    NoisyWeights,
    largest_difference,
    train,
)
from shared_processes import run_cases

import legato as lg
from legato.base.errors import ConfigError

KINDS = (Noisy, NoisyGradients, NoisyWeights, NoisySteps, NoisyEvaluation)


def of_each_kind(folder, processes):
    options = {"devices": processes, "strategy": "ddp" if processes > 1 else "single"}
    return {
        (kind.__name__, reproducible): partial(
            train, kind(), folder / f"{processes}", reproducible=reproducible, **options
        )
        for kind in KINDS
        for reproducible in ("order", "bitwise")
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `Ranks` gathered, by number of processes and (task, reproducible), or what else was trained."""
    folder = tmp_path_factory.mktemp("random")

    def manual(processes):
        options = {"devices": processes, "strategy": "ddp", "replicas": processes}
        return partial(train, NoisyManual(), folder / "manual", **options)

    cases = {
        2: {
            "manual": manual(2),
            "zero1": partial(train, Noisy(), folder, devices=2, strategy="zero1"),
            "zero1 bitwise": partial(train, Noisy(), folder, devices=2, strategy="zero1", reproducible="bitwise"),
            "fsdp": partial(train, NoiseAlone(), folder, max_steps=1, devices=2, strategy="fsdp"),
        },
        3: {**of_each_kind(folder, 3), "manual": manual(3)},
    }
    gathered = {
        processes: run_cases(each, processes, folder / f"cases {processes}") for processes, each in cases.items()
    }
    return gathered | {1: {name: case() for name, case in of_each_kind(folder, 1).items()}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reproducible", ["order", "bitwise"])
def test_what_is_drawn_does_not_depend_on_the_processes(results, kind, reproducible):
    alone = results[1][kind.__name__, reproducible]
    several = results[3][kind.__name__, reproducible]
    for rank in range(3):
        assert largest_difference(several.weights[0], several.weights[rank]) == 0.0
        assert several.logged[rank] == several.logged[0]
    difference = largest_difference(alone.weights[0], several.weights[0])
    assert difference == 0.0 if reproducible == "bitwise" else difference < 1e-5
    for name, value in alone.logged[0].items():
        torch.testing.assert_close(several.logged[0][name], value)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_manual_updates_draw_alike_and_their_replicas_do_not(results, processes):
    ranks = results[processes]["manual"]
    for rank in range(1, processes):
        assert largest_difference(ranks.weights[0], ranks.weights[rank]) == 0.0
        for mine, theirs in zip(ranks.drawn[0], ranks.drawn[rank], strict=True):
            assert all(first != second for first, second in zip(mine, theirs, strict=True))
    draws = [value for replica in ranks.drawn for call in replica for value in call]
    assert len(set(draws)) == len(draws)


@pytest.mark.slow
def test_zero1_has_equal_weights_on_all_ranks_and_no_bits_to_promise(results):
    ranks = results[2]["zero1"]
    assert largest_difference(ranks.weights[0], ranks.weights[1]) == 0.0
    with pytest.raises(
        ConfigError, match="Langevin draws random numbers, which under zero1 depend on the number of processes"
    ):
        vars(results[2]["zero1 bitwise"])


@pytest.mark.slow
def test_shards_draw_different_numbers(results):
    ranks = results[2]["fsdp"]
    assert largest_difference(ranks.weights[0], ranks.weights[1]) == 0.0
    noise = ranks.weights[0][0] - next(NoiseAlone().parameters()).detach()  # of 4 rows, two on each rank
    assert noise.abs().min() > 0.0
    assert float((noise[:2] - noise[2:]).abs().min()) > 1e-6


@pytest.mark.parametrize("kind", [*KINDS, NoisyManual])
def test_a_resume_draws_what_the_whole_run_does(tmp_path, kind):
    options = {"replicas": 1} if kind is NoisyManual else {}
    folder = tmp_path / "whole"
    checkpoints = lg.callbacks.Checkpoint(every_n_train_steps=1, save_top_k=-1)
    uninterrupted = train(kind(), folder, callbacks=[checkpoints], enable_checkpointing=True, **options)
    for step in (3, 7):
        task = kind()
        task.noised = step
        checkpoint = next(folder.rglob(f"checkpoints/step-{step:08d}"))
        resumed = train(task, tmp_path, checkpoint=checkpoint, **options)
        assert largest_difference(uninterrupted.weights[0], resumed.weights[0]) == 0.0
