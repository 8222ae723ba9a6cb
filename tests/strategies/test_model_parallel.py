"""ddp_model_parallel: a model that is split over devices trains as on one device."""

from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
from ddp_cases import QUIET, close, flat
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from model_parallel_cases import DATA, Chain, Placed, data_of, differs, digits, parts, run, text
from simulated_devices import CPU, DEVICES, SimulatedDevices, device_of
from tiny import ManualUpdate
from torch import nn
from torch.utils.data import DataLoader, Subset

import legato as lg
from legato.base.errors import ConfigError, LegatoError, TaskError
from legato.callbacks import Checkpoint
from legato.trainer.processes.launch import run_workers
from legato.trainer.strategies.model_parallel.model_parallel import DDPModelParallelStrategy, move_inputs
from legato.trainer.strategies.model_parallel.parts import split_evenly


# --- cutting ----------------------------------------------------------------------------------------------------------
def every_split(blocks, parts):
    for ends in combinations(range(1, blocks), parts - 1):
        yield [end - start for start, end in zip((0, *ends), (*ends, blocks), strict=True)]


def largest(sizes, counts):
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return max(sum(sizes[start : start + count]) for start, count in zip(starts, counts, strict=True))


@pytest.mark.slow
@examples(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_the_largest_part_is_minimal(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))
    counts = split_evenly(sizes, parts)
    assert len(counts) == parts
    assert sum(counts) == len(sizes)
    assert min(counts) >= 1
    assert largest(sizes, counts) == min(largest(sizes, split) for split in every_split(len(sizes), parts))


# --- devices that differ ----------------------------------------------------------------------------------------------
class OnSimulated(DDPModelParallelStrategy):
    def join(self, place, devices, precision):
        super().join(place, devices, precision)
        self.parts = self.devices = list(DEVICES)
        self.device = DEVICES[-1]


def simulated(task, devices=2, **options):
    arguments = {"replicas": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "prefetch_to_device": False}
    with SimulatedDevices() as there:
        trainer = run(task, devices=devices, strategy=OnSimulated(**options), **arguments)
        return trainer, there


@pytest.fixture(scope="module")
def clipped():
    """Return a Chain that was trained on one device, as `simulated` trains it."""
    task = Chain()
    run(task, replicas=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    return task


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Chain, Placed])
def test_parts_on_two_devices_train_as_on_one_to_the_bit(kind, clipped):
    task = kind()
    trainer, there = simulated(task)
    assert torch.equal(flat(task), flat(clipped))
    crossed = [(start, end) for start, end, shape in there.moves if shape == (4, 8)]
    assert crossed.count((DEVICES[0], DEVICES[1])) >= trainer.global_step  # activations
    if kind is Chain:  # Legato has split it, and restores it
        assert {device_of(parameter) for parameter in task.parameters()} == {CPU}
        assert torch.equal(task(DATA[:4][0]), clipped(DATA[:4][0]))


def test_each_part_is_on_its_device_during_a_run():
    class Looks(Chain):
        def __init__(self):
            super().__init__()
            self.weight = nn.Buffer(torch.ones(3))

        def training_step(self, batch, batch_idx):
            homes = {name: device_of(value) for name, value in self.state_dict(keep_vars=True).items()}
            assert homes.pop("net.0.weight") == homes.pop("net.0.bias") == homes.pop("net.2.weight") == DEVICES[0]
            assert homes.pop("net.2.bias") == DEVICES[0]
            assert set(homes.values()) == {DEVICES[1]}  # the last block, and modules outside of all blocks
            assert self.devices == list(DEVICES)
            assert self.device == batch[0].device == batch[1].device == DEVICES[1]
            return super().training_step(batch, batch_idx) * self.weight.mean()

    simulated(Looks(), split=[3, 4])


@pytest.mark.slow
def test_a_gpt_in_two_parts_learns_and_writes_as_it_does_on_one_device():
    alone, spread, in_pieces = text(), text(), text()
    run(alone, replicas=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    simulated(spread)
    simulated(in_pieces, micro_batches=2)
    assert torch.equal(flat(spread), flat(alone))
    assert not differs(in_pieces, alone, 1e-4)  # AdamW amplifies the last bits of small gradients
    generator = torch.Generator().manual_seed(1)
    assert spread.generate("a", 5, generator) == alone.generate("a", 5, generator.manual_seed(1))


@pytest.mark.parametrize("stray", ["net.0", "net.6"])
def test_a_part_that_the_task_has_not_placed_is_named(stray):
    class Forgets(Placed):
        def configure_model(self):
            super().configure_model()
            self.get_submodule(stray).cpu()

    with pytest.raises(ConfigError, match=rf"{stray}.weight \(cpu\), {stray}.bias \(cpu\). Move these tensors"):
        simulated(Forgets())


def test_inputs_of_all_kinds_move_between_parts():
    class Takes(nn.Module):
        def forward(self, pair, *, mask, extra):
            assert {device_of(tensor) for tensor in (*pair["a"], mask)} == {DEVICES[1]}
            return pair["a"][0] * mask + extra

    block = Takes()
    with SimulatedDevices() as there:
        handle = move_inputs(block, DEVICES[1])
        weight = torch.ones(2, requires_grad=True)
        out = block({"a": [weight, torch.ones(2)]}, mask=torch.ones(2), extra=1.0)
        assert device_of(out) == DEVICES[1]
        assert [end for _, end, _ in there.moves] == [DEVICES[1]] * 3
        block({"a": [out, out]}, mask=out, extra=1.0)
        assert len(there.moves) == 3  # all of it was there
    out.sum().backward()
    assert torch.equal(weight.grad, torch.ones(2))
    handle.remove()
    assert not block._forward_pre_hooks


# --- the same run -----------------------------------------------------------------------------------------------------
def with_norm(dropout=0.0):
    return Chain(norm=True, dropout=dropout)


BITWISE = {"reproducible": "bitwise", "replicas": 4}
CASES = [
    *((make, 1e-5, {}, {}) for make in (Chain, Placed, with_norm, digits, text)),
    (Chain, 1e-6, {"micro_batches": 2}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    (Chain, 1e-3, {"micro_batches": 2}, {"precision": "bf16-mixed"}),
    (Chain, 1e-3, {}, {"precision": "16-mixed", "gradient_clip_val": 0.5}),
    (Chain, 1e-9, {"micro_batches": 2}, {"precision": "64-true"}),
    (Chain, 1e-6, {"split": [1, 6], "micro_batches": 3}, {"replicas": 5}),
    (digits, 1e-5, {"devices_per_replica": 3, "micro_batches": 2}, {"devices": 6}),
    (partial(with_norm, 0.5), 0.0, {}, BITWISE),
    (Chain, 1e-6, {"micro_batches": 2}, {"activation_checkpointing": ["Linear"]}),
    (Placed, 0.0, {}, {**BITWISE, "gradient_clip_val": 0.05}),
]
"""What makes the task, how far its weights may be from those of one device, options of the strategy, of the trainer."""


def in_parts():
    """Run every case with a split model; return the weights."""
    results = []
    for make, _, options, arguments in CASES:
        task = make()
        trainer = run(task, strategy=parts(**options), **{"devices": 4, "max_epochs": 1, **arguments})
        assert len(task.devices) == 1  # the run is over
        assert trainer.world_size == 2
        results.append(flat(task))
    return results


@pytest.mark.slow
def test_two_processes_of_two_parts_are_one_process():
    spread = run_workers(in_parts, 2)
    for (make, tolerance, options, arguments), actual in zip(CASES, spread, strict=True):
        task = make()
        run(task, **{"replicas": 2, "max_epochs": 1, **arguments, "strategy": "single", "devices": 1})
        assert close(actual, flat(task), tolerance), (type(task), options, arguments, (actual - flat(task)).abs().max())


@pytest.mark.slow
def test_loss_curves_and_metrics_are_those_of_one_device():
    single, two = run(Chain(), replicas=2), run(Chain(), replicas=2, devices=2, strategy=parts())
    three = run(Chain(), replicas=2, devices=2, strategy=parts(micro_batches=3))
    assert single.callback_metrics == two.callback_metrics
    for name, value in single.callback_metrics.items():
        assert float(three.callback_metrics[name]) == pytest.approx(float(value), abs=1e-6), name
    assert {"train/loss_epoch", "val/acc"} <= single.callback_metrics.keys()


def test_validate_test_and_predict_through_the_parts():
    task, loader = Chain(), DataLoader(Subset(DATA, range(10)), 4)
    single, two = lg.Trainer(**QUIET), lg.Trainer(**QUIET, devices=2, strategy=parts(micro_batches=2))
    assert two.validate(task, loader, verbose=False) == single.validate(task, loader, verbose=False)
    assert two.test(task, loader, verbose=False) == single.test(task, loader, verbose=False)
    assert torch.equal(torch.cat(two.predict(task, loader)), torch.cat(single.predict(task, loader)))


def test_predictions_leave_the_device_batch_by_batch():
    task, loader = Chain(), DataLoader(Subset(DATA, range(10)), 4)
    with SimulatedDevices() as there:
        results = lg.Trainer(**QUIET, devices=2, strategy=OnSimulated(), prefetch_to_device=False).predict(task, loader)
        assert [device_of(tensor) for tensor in results] == [CPU] * 3
    assert [shape for source, target, shape in there.moves if target == CPU][:3] == [tensor.shape for tensor in results]


# --- micro-batches ----------------------------------------------------------------------------------------------------
class Counted(Chain):
    """Records the sizes of its batches; may skip batches that start with a negative number."""

    def __init__(self, norm=True, leaves_out=False):
        super().__init__(norm)
        self.sizes, self.leaves_out = [], leaves_out

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        return None if self.leaves_out and batch[0][0, 0] < 0 else {"loss": loss, "logits": self(batch[0])}


def test_a_batch_is_split_and_its_outputs_are_combined():
    shapes = []

    class Looks(lg.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            shapes.append(tuple(outputs["logits"].shape))

    task = Counted(norm=False)
    trainer = run(task, 14, devices=2, strategy=parts(micro_batches=3), callbacks=[Looks()], max_epochs=1)
    assert task.sizes == [2, 2, 2, 2, 2, 2, 1, 1]  # 4, 4, 4 and 2 samples in at most three pieces
    assert shapes == [(4, 3)] * 3 + [(2, 3)]
    assert trainer.state.samples_seen == 14


def test_batch_norm_computes_statistics_over_micro_batches():
    task = Counted()
    run(task, 16, devices=2, strategy=parts(micro_batches=2), max_epochs=1)
    assert task.sizes == [2] * 8
    assert int(task.net[3].num_batches_tracked) == 2 * 8  # each piece goes through twice


def test_a_skipped_micro_batch_counts_as_zero():
    task, by_hand = Counted(leaves_out=True), Counted(leaves_out=True)
    run(task, 8, devices=2, strategy=parts(micro_batches=2), max_epochs=1, seed=1)
    batches = []

    class Notes(lg.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            batches.append(batch)

    run(Chain(norm=True), 8, max_epochs=1, callbacks=[Notes()], seed=1)
    optimizer = by_hand.configure_optimizers()
    by_hand.log = lambda *args, **kwargs: None
    for inputs, labels in batches:
        optimizer.zero_grad()
        for piece in zip(inputs.split(2), labels.split(2), strict=True):
            output = by_hand.training_step(piece, 0)
            if output is not None:
                (output["loss"] / 2).backward()
        optimizer.step()
    assert any(inputs[start, 0] < 0 for inputs, _ in batches for start in (0, 2))
    assert close(flat(task), flat(by_hand))


# --- checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_resumes_with_a_split_model_and_back(tmp_path):
    uninterrupted = Chain()
    run(uninterrupted, replicas=2, max_epochs=3)
    legs = [
        {"strategy": "single", "replicas": 2},
        {"strategy": parts(micro_batches=2), "devices": 4},
        {"strategy": parts(split=[2, 5]), "devices": 2},
        {"strategy": "single"},
    ]
    path, names = None, []
    for leg, steps in zip(legs, (2, 4, 7, -1), strict=True):
        saver = Checkpoint(every_n_train_steps=1, save_top_k=-1)
        settings = {"enable_checkpointing": True, "default_root_dir": tmp_path, "callbacks": [saver], "max_epochs": 3}
        task = Chain()
        trainer = run(task, resume=path, max_steps=steps, **settings, **leg)
        path = trainer.checkpoint_callback.last_model_path
        names.append(sorted(file.name for file in Path(path).iterdir()))
    assert trainer.global_step == 9
    assert not differs(task, uninterrupted)
    assert all(files == names[0] for files in names)


def test_bitwise_refuses_other_micro_batches(tmp_path):
    saver = Checkpoint(every_n_train_steps=1)
    settings = {"enable_checkpointing": True, "default_root_dir": tmp_path, "callbacks": [saver]}
    trainer = run(Chain(), devices=2, strategy=parts(), reproducible="bitwise", max_steps=1, **settings)
    with pytest.raises(ConfigError, match="micro_batches: 1 -> 2"):
        run(
            Chain(),
            devices=2,
            strategy=parts(micro_batches=2),
            reproducible="bitwise",
            resume=trainer.checkpoint_callback.last_model_path,
        )


# --- what is refused --------------------------------------------------------------------------------------------------
class Unsaid(Chain):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)


class Tied(Chain):
    def __init__(self):
        super().__init__()
        self.net[2].weight = self.net[6].weight = nn.Parameter(torch.ones(8, 8))


class Outside(Chain):
    """Uses a block's weight in the loss, too, under another name."""

    def __init__(self):
        super().__init__()
        self.first = self.net[0].weight


def returns(make):
    return type("Returns", (Chain,), {"configure_blocks": make})


BAD = [
    (Chain, 3, {}, r"trainer.devices lists 3 \(1 x 2 \+ 1\). Use 2 or 4 devices"),
    (Chain, 1, {}, r"trainer.devices lists 1 \(0 x 2 \+ 1\). Use 2 devices\."),
    (Chain, 4, {"devices_per_replica": 3}, r"lists 4 \(1 x 3 \+ 1\). Use 3 or 6 devices"),
    (Chain, 2, {"devices_per_replica": 1}, "expected devices_per_replica >= 2, got 1"),
    (Chain, 2, {"split": [3, 5]}, r"3 \+ 5 = 8 blocks, but the task has 7: net.0, .*net.6"),
    (Chain, 2, {"split": [3, 2, 2]}, "has 3 numbers for 2 parts"),
    (Chain, 2, {"split": "even"}, "expected 'auto'"),
    (Chain, 2, {"split": [0, 7]}, "expected 'auto'"),
    (Chain, 8, {"devices_per_replica": 8}, "7 blocks .* cannot be split into 8 parts"),
    (Chain, 2, {"micro_batches": 0}, "expected micro_batches >= 1, got 0"),
    (Chain, 2, {"elastic": True}, "elastic=true needs strategy=ddp"),
    (Placed, 2, {"split": [3, 4]}, None),
    (Unsaid, 2, {}, r"def configure_blocks\(self\): return"),
    (Tied, 2, {}, "net.2.weight and net.6.weight are the same tensor, but they belong to parts 0 and 1"),
    (Outside, 2, {}, "(first|net.0.weight) and (first|net.0.weight) are the same tensor"),
    (returns(lambda self: [self.net, nn.Linear(1, 1)]), 2, {}, "entry 1 is a Linear outside of the task"),
    (returns(lambda self: [self.net, "head"]), 2, {}, "entry 1 is a str"),
    (returns(lambda self: [self.net[0], self.net]), 2, {}, "net.0 appears twice"),
]


@pytest.mark.parametrize(("make", "devices", "options", "message"), BAD)
def test_mistakes_are_found_before_the_run(make, devices, options, message):
    if message is None:  # blocks that the task could have placed itself on one and the same device
        run(make(), devices=devices, strategy=parts(**options), max_steps=1)
        return
    with pytest.raises((ConfigError, TaskError), match=f"(?s){message}") as caught:
        run(make(), devices=devices, strategy=parts(**options))
    assert isinstance(caught.value, LegatoError)
    assert len(str(caught.value).splitlines()) <= 6


def test_manual_optimization_takes_no_micro_batches():
    class Manual(ManualUpdate, Chain):
        pass

    actual, alone = Manual(), Manual()
    run(actual, devices=2, strategy=parts())
    run(alone)
    assert torch.equal(flat(actual), flat(alone))
    with pytest.raises(ConfigError, match="micro_batches=2 calls training_step for each micro-batch"):
        run(Manual(), devices=2, strategy=parts(micro_batches=2))


@pytest.mark.slow
def test_batch_norm_over_all_processes_takes_whole_batches():
    with pytest.raises(ConfigError, match="but micro_batches splits them"):
        run(Chain(norm=True), devices=4, strategy=parts(micro_batches=2), sync_batchnorm=True)


def test_a_task_may_have_another_attribute_named_devices():
    class Own(Chain):
        def __init__(self):
            super().__init__()
            self.devices = 3

    task = Own()
    run(task, max_epochs=1)
    assert task.devices == 3
    assert Chain().devices == [torch.device("cpu")]


def test_too_many_processes_for_the_devices_of_a_machine():
    strategy = DDPModelParallelStrategy(devices_per_replica=2)
    from legato.base.place import Place

    with pytest.raises(ConfigError, match="need 3 x 2 = 6 devices on this machine, but there are 4"):
        strategy.join(Place(0, 0, 0, 3, 3), [torch.device("cuda", index) for index in range(4)], 32)


# --- GPUs -------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("knobs", [{}, {"precision": "bf16-mixed"}, {"precision": "16-mixed"}, {"micro_batches": 2}])
def test_two_gpus_share_a_model(knobs):
    micro = {"micro_batches": knobs["micro_batches"]} if "micro_batches" in knobs else {}
    settings = {**{name: value for name, value in knobs.items() if name not in micro}, "gradient_clip_val": 0.1}
    for make in (Chain, text):
        actual, alone = make(), make()
        trainer = run(actual, strategy=parts(**micro), accelerator="cuda", devices=2, **settings)
        run(alone, **settings)
        assert trainer.world_size == 1
        assert not differs(actual, alone, 2e-2 if "precision" in settings else 1e-4)
        assert len(data_of(actual)) > 0
