"""The axis `pipeline` of a mesh: a model whose layers are on several processes trains as in one process."""

import re
from functools import partial
from itertools import pairwise

import pytest
import torch
from ddp_cases import QUIET, close, flat
from model_parallel_cases import DATA, Chain, digits, run, text
from shared_processes import run_cases
from torch import nn
from torch.utils.data import DataLoader, Subset

import legato as lg
from legato.base.errors import ConfigError, TaskError
from legato.callbacks import Checkpoint
from legato.trainer.processes.launch import run_workers


class Text(type(text())):
    """The character GPT under SGD: Adam would make full-size steps from gradients that are zero up to rounding."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def sgd_text():
    torch.manual_seed(2)
    return Text(n_layer=2, n_head=2, n_embd=16, block_size=8, sample_length=2)


def with_norm():
    return Chain(norm=True)


class Deep(Chain):
    """Seven blocks, which four stages do not divide evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        widths = (4, 8, 8, 8, 3)
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        self.net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh(), layers[3])


def piped(**options):
    return {"name": "mesh", "pipeline": 2, **options}


class Freezes(Chain):
    """Freezes the parameters of its first blocks, or of its last, after the second step."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.net[self.blocks].requires_grad_(False)


def freezes_first():
    return Freezes(slice(0, 3))


def freezes_last():
    return Freezes(slice(3, 7))


OF_TWO = [
    *((make, 1e-6, {}, {}) for make in (digits, sgd_text)),
    (with_norm, 1e-6, {"micro_batches": 1}, {}),
    (Chain, 1e-6, {"split": [2, 5], "micro_batches": 2}, {"replicas": 3}),
    (Chain, 1e-6, {"micro_batches": 2}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    (Chain, 1e-6, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (freezes_first, 1e-6, {}, {"gradient_clip_val": 0.05}),
    (freezes_last, 1e-6, {}, {"gradient_clip_val": 0.05}),
    (sgd_text, 1e-6, {}, {"activation_checkpointing": ["Block"]}),
    (Chain, 1e-3, {}, {"precision": "bf16-mixed"}),
    (Chain, 1e-3, {}, {"precision": "16-mixed", "gradient_clip_val": 0.5}),
    (Chain, 1e-9, {}, {"precision": "64-true"}),
]
OF_FOUR = [
    (sgd_text, 1e-6, {"data": 2}, {"replicas": 2}),
    (with_norm, 1e-6, {"data": 2, "micro_batches": 1}, {"replicas": 2}),
    (Chain, 1e-6, {"data": "auto"}, {"replicas": 3, "gradient_clip_val": 0.05}),
    (Deep, 1e-6, {"pipeline": 4}, {"accumulate_grad_batches": 2}),
    (sgd_text, 1e-6, {"pipeline": 4}, {"gradient_clip_val": 0.05}),
    (sgd_text, 1e-6, {"shard": 2, "shard_blocks": ["Block"]}, {"replicas": 3, "gradient_clip_val": 0.05}),
    (digits, 1e-6, {"shard": 2, "shard_blocks": 1000}, {"replicas": 2, "accumulate_grad_batches": 2}),
    (sgd_text, 1e-6, {"tensor": 2}, {"gradient_clip_val": 0.05}),
]
"""What makes the task, how far its weights may be from those of one process, the strategy's options, the trainer's."""


def in_stages(processes, case):
    """Return weights and metrics."""
    make, _, options, arguments = case
    task = make()
    trainer = run(task, devices=processes, strategy=piped(**options), **{"max_epochs": 1, **arguments})
    return flat(task), {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Return the results of all cases; cases with the same number of processes share a start."""
    return {
        processes: run_cases(
            {index: partial(in_stages, processes, case) for index, case in enumerate(cases)},
            processes,
            tmp_path_factory.mktemp("spread"),
        )
        for processes, cases in ((2, OF_TWO), (4, OF_FOUR))
    }


def named(case):
    make, _, options, arguments = case
    return f"{make.__name__} {options} {arguments}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "index", "case"),
    [
        pytest.param(processes, index, case, id=f"{processes} {named(case)}")
        for processes, cases in ((2, OF_TWO), (4, OF_FOUR))
        for index, case in enumerate(cases)
    ],
)
def test_stages_train_as_one_process(processes, index, case, spread):
    (make, tolerance, _, arguments), (actual, metrics) = case, spread[processes][index]
    task = make()
    trainer = run(task, **{"max_epochs": 1, "replicas": 1, **arguments})
    assert close(actual, flat(task), tolerance), (actual - flat(task)).abs().max()
    assert metrics.keys() == trainer.callback_metrics.keys()
    for name, value in trainer.callback_metrics.items():
        assert metrics[name] == pytest.approx(float(value), abs=max(tolerance, 1e-5)), name


@pytest.mark.slow
def test_batch_norm_sees_micro_batches_and_its_buffers_return():
    pipe, parts = with_norm(), with_norm()
    run(pipe, 16, devices=2, strategy=piped(micro_batches=2))
    run(parts, 16, devices=2, replicas=1, strategy={"name": "ddp_model_parallel", "micro_batches": 2})
    assert int(pipe.net[3].num_batches_tracked) == 16
    assert close(flat(pipe), flat(parts))


# --- the rest of the task ---------------------------------------------------------------------------------------------
class Busy(Chain):
    """Prepares its batch, returns more than a loss, skips micro-batches, logs sometimes, and counts its calls."""

    def __init__(self, leaves_out=False):
        super().__init__()
        self.leaves_out = leaves_out
        self.weight = nn.Buffer(torch.tensor([1.0, 2.0, 3.0]))
        self.scale = nn.Parameter(torch.ones(()))

    def configure_blocks(self):
        return list(self.net)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch["inputs"] * 0.5 + torch.rand(()) * 0, batch["label"][0]
        loss = nn.functional.cross_entropy(self(inputs), labels, weight=self.weight, reduction="none").mean()
        if batch_idx % 2:
            self.log("odd", loss, on_step=False, on_epoch=True)
        self.log_dict({"size": float(len(labels)), "largest": inputs.max()}, reduce_fx="max", on_epoch=True)
        if self.leaves_out and inputs[0, 0] < 0:
            return None
        return {"loss": loss * self.scale, "labels": labels}

    def validation_step(self, batch, batch_idx):
        logits = self(batch["inputs"])
        again = self(batch["inputs"].flip(0))  # as often as it likes
        self.log("val/loss", nn.functional.cross_entropy(logits, batch["label"][0]) + again.mean())


def busy_loader(samples, size=4):
    def collate(items):
        return {"inputs": torch.stack([x for x, _ in items]), "label": [torch.stack([y for _, y in items])], "n": 7}

    return DataLoader(Subset(DATA, range(samples)), size, collate_fn=collate)


class Notes(lg.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]) if outputs else None)  # empty for a skipped batch

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def busy(leaves_out=False, **arguments):
    task, notes = Busy(leaves_out), Notes()
    trainer = lg.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [notes], **arguments})
    trainer.fit(task, busy_loader(22), busy_loader(10))
    return flat(task), {name: float(value) for name, value in trainer.callback_metrics.items()}, notes.losses


@pytest.mark.slow
def test_a_step_may_prepare_its_batch_log_and_return_other_values():
    actual, metrics, losses = busy(devices=2, strategy=piped(micro_batches=1))
    reference, expected, curve = busy()
    assert close(actual, reference)
    assert metrics == pytest.approx(expected, abs=1e-6)
    assert {"odd", "size_epoch", "largest_step"} <= metrics.keys()
    assert losses == pytest.approx(curve, abs=1e-6)


@pytest.mark.slow
def test_skipped_micro_batches_count_as_zero():
    parts = {"name": "ddp_model_parallel", "micro_batches": 2}
    actual, _, losses = busy(leaves_out=True, devices=2, strategy=piped(micro_batches=2))
    expected, _, curve = busy(leaves_out=True, devices=2, strategy=parts)
    assert close(actual, expected)
    assert [loss is None for loss in losses] == [loss is None for loss in curve]
    assert None in curve


def evaluations():
    task, loader = Chain().requires_grad_(False), DataLoader(Subset(DATA, range(10)), 4)
    trainer = lg.Trainer(**QUIET, devices=2, strategy=piped())
    results = [trainer.validate(task, loader, verbose=False), trainer.test(task, loader, verbose=False)]
    return results, torch.cat(trainer.predict(task, loader)), flat(task)


@pytest.mark.slow
def test_validate_test_and_predict_through_the_stages():
    task, loader = Chain(), DataLoader(Subset(DATA, range(10)), 4)
    trainer = lg.Trainer(**QUIET)
    measured, predicted, after = run_workers(evaluations, 2)
    assert measured == [trainer.validate(task, loader, verbose=False), trainer.test(task, loader, verbose=False)]
    assert torch.equal(predicted, torch.cat(trainer.predict(task, loader)))
    assert torch.equal(after, flat(task))  # whole again, untouched


@pytest.mark.slow
def test_metrics_of_a_validation_and_text_of_a_model_in_stages(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Chain):
        def __init__(self):
            super().__init__()
            self.right = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

        def validation_step(self, batch, batch_idx):
            self.right.update(self(batch[0]), batch[1])
            self.log("val/right", self.right)

    single, two = run(Measured()), run(Measured(), devices=2, strategy=piped())
    assert float(two.callback_metrics["val/right"]) == pytest.approx(float(single.callback_metrics["val/right"]))
    writer = sgd_text()
    trainer = run(writer, 8, devices=2, strategy=piped(), logger=True, default_root_dir=tmp_path, max_epochs=1)
    assert any(trainer.run_dir.rglob("events*"))  # with a sample that all processes made together


LEGS = [{"data": 2}, {"shard": 2, "shard_blocks": ["Block"]}, {"tensor": 2}, {"data": 2, "micro_batches": 1}]


class Remembers(Chain):
    """An optimizer with a state for each parameter from the start."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def go_on(folder, path, steps, make=sgd_text, **arguments):
    """Resume from a checkpoint up to a number of steps; return the newest checkpoint and the weights."""
    task = make()
    saver = Checkpoint(every_n_train_steps=1, save_top_k=-1)
    settings = {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [saver]}
    trainer = run(task, resume=path, max_steps=steps, **settings, **arguments)
    return trainer.checkpoint_callback.last_model_path, flat(task)


@pytest.mark.slow
def test_a_run_resumes_with_stages_and_back(tmp_path):
    def legs_of_four(path):
        for leg, steps in zip(LEGS, (2, 3, 4, 5), strict=True):
            path, _ = go_on(tmp_path, path, steps, devices=4, strategy=piped(**leg))
        return path

    uninterrupted = sgd_text()
    run(uninterrupted, replicas=2)
    begun, _ = go_on(tmp_path, None, 1, replicas=2)
    path, weights = go_on(tmp_path, run_workers(lambda: legs_of_four(begun), 4), -1)
    assert path.endswith("6")
    assert close(weights, flat(uninterrupted))


@pytest.mark.slow
def test_a_checkpoint_has_the_optimizer_states_of_each_stage(tmp_path):
    uninterrupted = Remembers()
    run(uninterrupted)
    path, _ = go_on(tmp_path, None, 2, Remembers, devices=2, strategy=piped())
    _, weights = go_on(tmp_path, path, -1, Remembers)
    assert close(weights, flat(uninterrupted))


@pytest.mark.slow
def test_a_process_holds_only_its_stage():
    class Weighs(Chain):
        def __init__(self):
            super().__init__(width=64)

        def on_train_end(self):
            held = {parameter.untyped_storage().nbytes() for parameter in self.parameters()}
            held_bytes = sum(held_by.untyped_storage().nbytes() for held_by in self.parameters())
            assert 4 in held  # a single number for parameters of another stage
            sizes = self.trainer.strategy.collectives.gather_objects(held_bytes)
            total_bytes = sum(parameter.numel() * 4 for parameter in self.parameters())
            assert sum(sizes) == pytest.approx(total_bytes, rel=0.01)
            states = self.trainer.optimizers[0].state
            assert {parameter.untyped_storage().nbytes() > 4 for parameter in states} == {True}

    run(Weighs(), 8, devices=2, strategy=piped(), max_epochs=1)


@pytest.mark.slow
def test_a_process_holds_no_shards_of_layers_in_other_stages():
    class Weighs(Chain):
        def __init__(self):
            super().__init__(width=64)

        def tensor_plan(self):
            return {"net.0": "column", "net.2": "row"}

        def on_train_end(self):
            cut = [parameter for parameter in self.parameters() if hasattr(parameter, "to_local")]
            held = [parameter.to_local().untyped_storage().nbytes() for parameter in cut]
            # each stage has a weight and a bias, and a single number for each parameter of the other stage
            assert sorted(size > 4 for size in held) == [False, False, True, True]

    run(Weighs(), 8, devices=4, strategy=piped(tensor=2), max_epochs=1)


# --- what is refused --------------------------------------------------------------------------------------------------
class Between(Chain):
    def forward(self, inputs):
        return self.net[3:](self.net[:3](inputs) * 2)


class Backwards(Chain):
    def forward(self, inputs):
        return self.net[6](self.net[2](self.net[0](inputs)))


class Before(Chain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def configure_blocks(self):
        return list(self.net)

    def forward(self, inputs):
        return self.net(inputs * self.scale)


class Never(Chain):
    def forward(self, inputs):
        return inputs[:, :3] * self.net[0].weight.sum()


class Twice(Chain):
    """Calls its model for two views of a batch."""

    def forward(self, inputs):
        return super().forward(inputs) + super().forward(inputs + 1.0)


class Fails(Chain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ValueError("the last stage fails")
        return loss


class Unsaid(Chain):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)


class Several(Chain):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2:].parameters(), 0.1)]


class Own(Chain):
    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)


STOPPED = [
    (Between, {"split": [1, 6]}, TaskError, "computation between 'net.2' and 'net.3'"),
    (
        Backwards,
        {},
        TaskError,
        "order of configure_blocks, but training_step called 'net.2' instead of 'net.1'|between 'net.0'",
    ),
    (Before, {}, TaskError, "uses parameters before 'net.0', the first block"),
    (Never, {}, TaskError, "did not call 'net.0', the first"),
    (Twice, {}, TaskError, r"must call each block of the task once, but it called 'net.0' again\. Join both inputs"),
    (Fails, {}, ValueError, "the last stage fails"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options", "kind", "message"), STOPPED)
def test_an_error_in_one_stage_ends_the_run_with_that_error(make, options, kind, message):
    with pytest.raises(kind, match=message):
        run(make(), devices=2, max_epochs=1, strategy=piped(**options))


class Nothing(Chain):
    """Its second stage is an activation without parameters."""

    def configure_blocks(self):
        return [self.net[0], self.net[1]]


REFUSED = [
    (Several, {}, {}, "only one optimizer, got 2"),
    (Own, {}, {}, "runs each stage's backward pass"),
    (Nothing, {}, {}, r"Stage 1 of the pipeline \(net.1\) has no trainable parameters"),
    (Unsaid, {}, {}, "does not define how to split its model"),
    (Chain, {"micro_batches": 0}, {}, "expected micro_batches to be positive or null, got 0"),
    (Chain, {"split": [3, 5]}, {}, r"3 \+ 5 = 8 blocks, but the task has 7"),
    (Chain, {"split": [3, 2, 2]}, {}, "has 3 numbers for 2 parts"),
    (Chain, {}, {"reproducible": "off"}, "reproducible=order"),
    (Chain, {}, {"reproducible": "bitwise", "replicas": 2}, "bitwise"),
    (Chain, {"tensor": 2, "pipeline": 1}, {}, "needs a plan"),
    (Chain, {"data": 2, "pipeline": 1, "micro_batches": 4}, {}, "require a pipeline. Set pipeline"),
    (Chain, {"data": 2}, {}, "= 4, but there are 2"),
    (Chain, {}, {"callbacks": [lg.callbacks.ExponentialMovingAverage()]}, "needs all weights"),
    (Chain, {"meta_init": True}, {}, "meta_init and pipeline cannot be combined"),
    (with_norm, {}, {"replicas": 2, "sync_batchnorm": True}, "sync_batchnorm"),
]


def refusals():
    results = []
    for make, options, arguments, _ in REFUSED:
        try:
            run(make(), devices=2, max_epochs=1, strategy=piped(**options), **arguments)
            results.append("")
        except ConfigError as error:
            results.append(str(error))
    return results


@pytest.mark.slow
def test_settings_that_a_pipeline_does_not_support_are_refused_on_every_rank():
    """All cases run in turn in the same processes: a rank that does not refuse hangs or fails in the next case."""
    for (*case, message), results in zip(REFUSED, run_workers(refusals, 2), strict=True):
        assert re.search(message, results), (case, results)
        assert len(results.splitlines()) <= 6


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", [{}, {"micro_batches": 1}])
def test_stages_on_two_gpus(options):
    actual, alone = sgd_text(), sgd_text()
    run(actual, accelerator="cuda", devices=2, strategy=piped(**options), gradient_clip_val=0.05)
    run(alone, accelerator="cuda", devices=1, gradient_clip_val=0.05)
    assert close(flat(actual), flat(alone), 1e-4)
