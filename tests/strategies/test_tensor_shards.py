"""Layers with a fixed number of shards: the same bits on any number of processes along the tensor axis."""

from functools import partial

import pytest
import torch
from bitwise_cases import Case, Text, run
from mesh_cases import CNN
from torch import nn

from examples.characters import CharacterGPT
from legato.base.errors import ConfigError, TaskError
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.ranks import SINGLE
from legato.trainer.processes.rendezvous import leave_process_group
from legato.trainer.strategies.mesh.tensor_shards import TensorShards

SHARDS = 4


def gpt(heads=4, dropout=0.0, layers=1):
    """Return the GPT of the examples with heads of width 5, so that CPU vectors end within a shard."""
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": 5 * heads, "block_size": 8}
    return CharacterGPT(**sizes, dropout=dropout, warmup_steps=2, sample_length=2)


CASES = {
    "adamw clip accumulate": Case(
        partial(gpt, layers=2), Text(16), {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "replicas": 3}
    ),
    "adamw bf16 recomputed": Case(
        gpt, Text(10), {"precision": "bf16-mixed", "activation_checkpointing": ["Block"], "replicas": 3}
    ),
    "one replica": Case(gpt, Text(13), {"replicas": 1}),  # 14 steps
}
SIX = {"six heads": Case(partial(gpt, 6), Text(8), {"replicas": 2})}


def run_cut(root, cases, shards, processes, sizes, **options):
    """Return the fingerprints of cases on a number of processes."""
    strategy = {"name": "mesh", "tensor_shards": shards, "shard_blocks": 40, **sizes}
    try:
        return {
            name: run(case, root / name, strategy=strategy, devices=processes, **options)
            for name, case in cases.items()
        }
    finally:
        leave_process_group()


def cut(processes, root, cases, shards=SHARDS, sizes=None, **options):
    sizes = {"tensor": processes} if sizes is None else sizes
    if processes == 1:
        return run_cut(root, cases, shards, 1, sizes, **options)
    return run_workers(partial(run_cut, root, cases, shards, processes, sizes, **options), processes, threads=1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return cut(1, tmp_path_factory.mktemp("alone"), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_has_the_bits_of_one(processes, alone, tmp_path):
    """Weights, optimizer states, each logged loss and norm, validation; 3 replicas in turn, and a run of 14 steps."""
    assert alone["one replica"]["counts"][0] == 14
    assert cut(processes, tmp_path, CASES) == alone


@pytest.mark.slow
def test_tensor_shards_work_with_sharded_weights(alone, tmp_path):
    cases = {name: case for name, case in CASES.items() if name != "one replica"}
    assert cut(4, tmp_path, cases, sizes={"tensor": 2, "shard": 2}) == {name: alone[name] for name in cases}


@pytest.mark.slow
def test_a_process_may_have_an_incomplete_subtree(tmp_path):
    expected = cut(1, tmp_path / "1", SIX, 6)
    for processes in (2, 3):  # three shards each, and two
        assert cut(processes, tmp_path / str(processes), SIX, 6) == expected


@pytest.mark.slow
def test_without_shards_the_bits_depend_on_the_number_of_processes(tmp_path):
    case = {"one replica": CASES["one replica"]}
    single = cut(1, tmp_path / "1", case, None, reproducible="order")
    two = cut(2, tmp_path / "2", case, None, reproducible="order")
    assert single["one replica"]["weights"] != two["one replica"]["weights"]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes_and_the_same_shards(alone, tmp_path):
    case = {"one replica": CASES["one replica"]}
    for processes, steps in ((4, 3), (1, 9), (2, 12)):
        cut(processes, tmp_path, case, checkpoints=True, stop_after=steps)
    results = cut(1, tmp_path, case, checkpoints=True)["one replica"]
    for name in ("weights", "optimizer", "counts"):
        assert results[name] == alone["one replica"][name], name
    with pytest.raises(ConfigError, match="tensor_shards: 4 -> 2"):
        cut(1, tmp_path, case, 2, max_epochs=3)


def test_shards_add_up_to_the_layer():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    inputs = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layers(inputs).square().sum(), [inputs, *layers.parameters()])
    TensorShards(SHARDS, SINGLE).attach(layers, {"0": "column", "2": "row"})
    results = torch.autograd.grad(layers(inputs).square().sum(), [inputs, *layers.parameters()])
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


def test_random_numbers_between_sharded_layers_are_refused(tmp_path):
    with pytest.raises(TaskError, match="drawn between a column layer and its row layer, as in attention"):
        cut(1, tmp_path, {"dropout": Case(partial(gpt, dropout=0.1), Text())})


class Summed(CNN):
    """Has a plan that sums the gradients of batch norm."""

    def tensor_plan(self):
        return super().tensor_plan() | {"body.1": "replicated"}


@pytest.mark.parametrize(
    ("kind", "shards", "message"),
    [
        (Summed, 2, "the gradient of body.1 is a sum over tokens and heads"),
        (CNN, 3, "8 outputs, which is not a multiple of tensor=3"),
        (CNN, 0, "tensor_shards=0 is not a multiple of tensor=1"),
    ],
)
def test_layers_that_cannot_be_sharded_are_refused(kind, shards, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        cut(1, tmp_path, {"cnn": Case(kind, Text())}, shards)
    assert not getattr(caught.value, "__notes__", ()), "teardown failed after the error"


@pytest.mark.slow
def test_bitwise_without_shards_names_the_setting(tmp_path):
    for shards, message in (
        (None, r"without tensor_shards \(such as tensor_shards=2\)"),
        (3, "is not a multiple of tensor=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            cut(2, tmp_path, CASES, shards)
