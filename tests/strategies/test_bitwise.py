"""`reproducible: bitwise`: the same bits on any number of processes and after any interruption."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import bitwise_cases
import pytest
import torch
import torch.distributed as dist
from bitwise_cases import CASES, Case, Noisy, run, run_all
from torch import nn
from torch.nn import functional

from legato.base.errors import ConfigError, TaskError, WorkerError
from legato.base.place import find_place
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.rendezvous import leave_process_group

NAMES = list(CASES)
UNUSED = {"name": "ddp", "find_unused_parameters": True}
FULL = MLP, CNN, GPT = "mlp sgd accumulate clip", "cnn adamw", "gpt adamw clip"
BF16 = [name for name in NAMES if "bf16" in name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the fingerprints of each case from an uninterrupted run in one process."""
    return run_all(tmp_path_factory.mktemp("alone"), NAMES, 1, strategy="single")


def start(function, processes, *arguments, **options):
    """Call `function` in a number of processes."""
    return run_workers(partial(function, *arguments, processes, **options), processes, threads=1)


def assert_same(results, expected):
    for name in results:
        differing = [key for key in results[name] if results[name][key] != expected[name][key]]
        actual, reference = results[name]["metrics"], expected[name]["metrics"]
        points = [pair for pair in zip_longest(actual, reference) if pair[0] != pair[1]]
        assert not differing, f"{name}: other {', '.join(differing)}; other points: {points}"


# --- on any number of processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cases_differ(undisturbed):
    for name, results in undisturbed.items():
        steps, epochs, samples = results["counts"]
        assert steps >= 4, name
        assert epochs == 2, name
        assert samples == 2 * len(CASES[name].data), name
        assert sum("val/loss" in line for line in results["metrics"]) >= 2, name
    assert {"train/mean", "val/error", "val/correct"} < undisturbed[MLP]["callback_metrics"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "names"), [(2, NAMES), (3, FULL), (5, BF16)])  # 3 and 2 replicas; 2, 2 and 1
def test_any_number_of_processes_has_the_bits_of_one(processes, names, undisturbed, tmp_path):
    assert_same(start(run_all, processes, tmp_path, names), undisturbed)


@pytest.mark.slow
def test_under_order_only_the_last_bits_depend_on_the_number_of_processes(tmp_path):
    # not with AdamW: it makes a full step for the gradient of a bias before batch norm, which is only rounding
    names, options = [MLP, "cnn sgd bf16 clip"], {"reproducible": "order", "precision": 32}
    alone = run_all(tmp_path / "alone", names, 1, **options)
    two = start(run_all, 2, tmp_path / "two", names, **options, strategy=UNUSED)
    for name in names:
        actual, expected = two[name], alone[name]
        assert actual["counts"] == expected["counts"]
        assert actual["weights"] != expected["weights"]
        numbers = [
            {key: float.fromhex(value) for key, value in results["callback_metrics"].items()}
            for results in (actual, expected)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


# --- through any break ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_resumes_with_another_number_of_processes_and_loader_workers(undisturbed, tmp_path):
    # max_steps for two of them; a learning rate schedule that spans the run is none of max_steps's, so GPT is stopped
    start(stop_early, 2, tmp_path, [MLP, CNN], max_steps=2, workers=1)
    stopped = run(CASES[GPT], tmp_path / GPT, workers=2, checkpoints=True, stop_after=1)
    assert stopped["counts"][:2] == [1, 0]
    stop_early(tmp_path, [MLP], 1, max_steps=4, workers=2)
    results = start(stop_early, 3, tmp_path, FULL)
    # a run that stops within an epoch validates before it ends, and the resumed run does not count that
    (cut,) = (line for line in results[GPT]["metrics"] if line["step"] == 1)
    for name in ("val/loss", "val/bits_per_character"):
        del cut[name]
    assert_same(results, undisturbed)


def stop_early(root, names, processes, **options):
    return run_all(root, names, processes, checkpoints=True, **options)


@pytest.mark.slow
def test_a_killed_run_resumes_with_another_number_of_processes(undisturbed, tmp_path):
    # in the second batch of a window of two, and in the validation after the step that follows
    for processes, die in ((3, ("train", 1, 3)), (2, ("validation", 2, 1))):
        with pytest.raises(WorkerError, match="SIGKILL"):
            start(stop_early, processes, tmp_path, [MLP], die=die)
    newest = max((tmp_path / MLP).glob("default/version_0/checkpoints/step-*"))
    assert newest.name == "step-00000002"
    assert_same(run_all(tmp_path, [MLP], 1, checkpoints=True, workers=2), undisturbed)


# --- what would break it --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_arithmetic_is_refused_on_resume(tmp_path):
    case = CASES["mlp fused adamw bf16"]
    run(case, tmp_path, checkpoints=True, stop_after=1)
    with pytest.raises(ConfigError, match=r"threads: 1 -> 2\. .*reproducible=order"):
        run(case, tmp_path, threads=2)
    assert torch.get_num_threads() == 1
    with pytest.raises(ConfigError, match=r"optimizers: .*'fused': True.* -> .*'fused': False"):
        run(Case(partial(bitwise_cases.Perceptron, "adamw"), case.data, case.options, 3), tmp_path)
    with pytest.raises(ConfigError, match="precision: bf16-mixed -> 32-true"):
        run(case, tmp_path, precision=32)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ConfigError, match="matmul_precision: highest -> medium"):
            run(case, tmp_path)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert run(case, tmp_path, reproducible="order")["counts"][1] == 2


OTHER_CPU = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from bitwise_cases import CASES, run
run(CASES[sys.argv[2]], Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_another_instruction_set_is_refused_on_resume(tmp_path):
    """A real start of Python: torch reads the variable once."""
    run(CASES[CNN], tmp_path, checkpoints=True, stop_after=1)
    script = tmp_path / "script.py"
    script.write_text(OTHER_CPU)
    done = subprocess.run(
        [sys.executable, script, Path(bitwise_cases.__file__).parent, CNN, tmp_path],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "cpu_capability: " in done.stderr


class Clamped(bitwise_cases.Convolutions):
    """Changes the gradients of each backward, which a reduction within backward would already have summed."""

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)


class Halves(bitwise_cases.Convolutions):
    """Calls backward twice per batch."""

    def backward(self, loss, *arguments, **options):
        (loss / 4).backward(retain_graph=True)
        (loss * 3 / 4).backward()


def own_backwards(root, processes):
    """Return the fingerprints of tasks that see, or make, the gradients of each replica."""
    try:
        cases = {kind.__name__: Case(kind, Noisy(21, (2, 6, 6))) for kind in (Clamped, Halves)}
        options = {"strategy": "ddp" if processes > 1 else "single", "devices": processes}
        return {name: run(case, root / f"{name} {processes}", **options) for name, case in cases.items()}
    finally:
        leave_process_group()


@pytest.mark.slow
def test_a_task_may_change_the_gradients_of_each_replica(tmp_path):
    assert_same(start(own_backwards, 2, tmp_path), own_backwards(tmp_path, 1))


def unlike_ranks(root, processes):
    """Only rank 1 has a fused optimizer."""
    place = find_place()
    case = Case(partial(bitwise_cases.Convolutions, "fused adamw" if place.rank else "adamw"), Noisy(16, (2, 6, 6)))
    try:
        run(case, root, strategy="ddp", devices=processes)
    except ConfigError as error:
        return str(error)
    finally:
        leave_process_group()


@pytest.mark.slow
def test_processes_that_compute_different_bits_are_refused(tmp_path):
    ranks = start(unlike_ranks, 2, tmp_path)
    assert "on rank 1, optimizers is" in ranks
    assert "'fused': True" in ranks


def out_of_line(samples):
    """Collate to inputs that start 4 bytes after an aligned address."""
    inputs = torch.stack([sample for sample, _ in samples])
    room = torch.empty(inputs.numel() + 1)
    view = room[1:].view(inputs.shape).copy_(inputs)
    assert view.data_ptr() % 64
    return view, torch.tensor([label for _, label in samples])


class OutOfLine(Case):
    def loader(self, workers=0, shuffle=True):
        loader = super().loader(workers, shuffle)
        loader.collate_fn = out_of_line
        return loader

    def make_out_of_line(self):
        """Return a task whose weights start 4 bytes after an aligned address, as weights in a mapped file may."""
        task = self.make()
        for parameter in task.parameters():
            room = torch.empty(parameter.numel() + 1)
            parameter.data = room[1:].view(parameter.shape).copy_(parameter.data)
        return task


@pytest.mark.slow
@pytest.mark.parametrize("name", [MLP, CNN])
def test_results_do_not_depend_on_the_memory_alignment_of_batches_and_weights(name, undisturbed, tmp_path):
    case = CASES[name]
    batches = OutOfLine(case.make, case.data, case.options, case.batch_size)
    weights = replace(case, make=batches.make_out_of_line)
    for index, kind in enumerate((batches, weights)):
        assert_same({name: run(kind, tmp_path / str(index))}, undisturbed)


# --- parameters and optimizer states in parts ------------------------------------------------------------------------
FSDP = {"name": "fsdp", "shard_blocks": 40}
SHARDED_CASES = {
    2: {"zero1": BF16[:1], "fsdp": BF16[1:], "ddp_model_parallel": [GPT]},
    3: {"zero1": [MLP], "fsdp": [CNN, GPT], "ddp_model_parallel": [GPT]},
}
"""By the number of processes."""


def run_sharded(root, processes):
    results = {}
    for name, cases in SHARDED_CASES[processes].items():
        strategy = FSDP if name == "fsdp" else name
        results[name] = run_all(root / name, cases, processes, strategy=strategy)
    return results, sent_by_fsdp(root / "sent", processes) if processes == 2 else None


def sent_by_fsdp(root, processes):
    """Return the bytes that a process sends for the gradients of a step, and those of a ring all-reduce."""
    rank, sent, real = find_place().rank, [], dist.all_to_all_single

    def counted(output, source, to_receive, to_send, **options):
        sent.append((sum(to_send) - to_send[rank]) * source.element_size())
        return real(output, source, to_receive, to_send, **options)

    dist.all_to_all_single = counted
    try:
        steps = run_all(root, [CNN], processes, strategy=FSDP, replicas=4)[CNN]["counts"][0]
    finally:
        dist.all_to_all_single = real
    padded = sum(
        -(-len(weight) // processes) * processes * weight[0].numel()
        for weight in bitwise_cases.Convolutions().parameters()
    )
    return sum(sent) / steps, padded * 4 * (processes - 1) / processes


def without_optimizer(results):
    return {name: {key: case[key] for key in case if key != "optimizer"} for name, case in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("processes", SHARDED_CASES)
def test_sharded_runs_have_the_bits_of_one_process(processes, undisturbed, tmp_path):
    """Uneven last batches, accumulation, clipping by norm and by value, dropout, batch norm, shared weights."""
    results, sent = start(run_sharded, processes, tmp_path)
    for case in results.values():
        assert_same(without_optimizer(case), undisturbed)
    assert sent is None or sent[0] == sent[1]  # each process has a complete subtree


@pytest.mark.slow
def test_a_sharded_run_resumes_under_other_strategies(undisturbed, tmp_path):
    start(stop_early, 2, tmp_path, [CNN], strategy=FSDP, max_steps=1)
    start(stop_early, 3, tmp_path, [CNN], strategy="zero1", max_steps=3)
    assert_same(run_all(tmp_path, [CNN], 1, checkpoints=True), undisturbed)


class Seldom(bitwise_cases.Convolutions):
    """Uses a layer only in every second batch of a replica."""

    def __init__(self):
        super().__init__()
        self.seldom = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return functional.cross_entropy(logits if batch_idx % 2 else self.seldom(logits), batch[1])


class OwnOptimizer(torch.optim.SGD):
    pass


class Owned(bitwise_cases.Convolutions):
    def configure_optimizers(self):
        return OwnOptimizer(self.parameters(), 0.1)


def refusals(root, processes):
    """Return the errors of runs that cannot have the same bits."""
    messages, images = {}, Noisy(32, (2, 6, 6))
    cases = {
        "fused": (partial(bitwise_cases.Convolutions, "fused adamw"), FSDP, {}),
        "own": (Owned, FSDP, {}),
        "axis": (bitwise_cases.Convolutions, {"name": "mesh", "data": 2}, {}),
        "seldom": (Seldom, {**FSDP, "shard_blocks": 10_000}, {"accumulate_grad_batches": 2}),
        "seldom block": (Seldom, FSDP, {"accumulate_grad_batches": 2}),
    }
    for name, (make, strategy, options) in cases.items():
        try:
            run(Case(make, images), root / name, strategy=strategy, devices=processes, replicas=processes, **options)
        except (ConfigError, TaskError) as error:
            messages[name] = str(error)
    leave_process_group()
    return messages


@pytest.mark.slow
def test_settings_that_would_change_the_bits_of_sharded_runs_are_refused(tmp_path):
    errors = start(refusals, 2, tmp_path)
    patterns = {
        "fused": "fused optimizers round",
        "own": "OwnOptimizer may combine several elements",
        "axis": "along the data axis, torch chooses the summation order",
        "seldom": "left parameters unused",
        "seldom block": "left parameters unused",
    }
    assert {name: pattern in errors.get(name, "") for name, pattern in patterns.items()} == dict.fromkeys(
        patterns, True
    )
