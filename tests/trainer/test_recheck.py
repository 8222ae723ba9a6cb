"""Steps computed twice: a flipped bit is found and named, nothing else is, and the run's results don't change."""

import json
import re
from functools import partial
from itertools import product

import mesh_cases
import pytest
import torch
import torchmetrics
from bitwise_cases import Noisy
from ddp_cases import TWO, Net, fit, loader
from mesh_cases import CNN, FEATURES, GPT, LAYOUTS
from shared_processes import run_cases
from torch import nn
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import ConfigError, CorruptionError
from legato.lab import SpikeWatch

TWICE = {"recheck_every": 2, "deterministic": True}
ONE, THREE = {}, {"devices": 3, "strategy": "ddp"}
RANKS = {
    "one": ONE,
    "replicas": {"replicas": 3},
    "ddp": TWO,
    "three": THREE,
    "zero1": {"devices": 2, "strategy": "zero1"},
    "fsdp": {"devices": 2, "strategy": {"name": "fsdp", "shard_blocks": ["Sequential"]}},
}
WAYS = [("order", 0), ("bitwise", 1)]
"""Values of `reproducible`, each with the pass over a step that is computed wrong."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return the results of all runs on two and on three processes, from one start each, and where they are written."""
    folder = tmp_path_factory.mktemp("shared")
    cases = {2: {}, 3: {}}
    for name, (way, the_pass) in product(RANKS, WAYS):
        if "devices" in RANKS[name]:
            cases[RANKS[name]["devices"]][name, way] = partial(flip, name, way, the_pass, folder / name / way)
    for name, (make, options) in SHARED.items():
        cases[options["devices"]][name] = partial(train_both, make, folder / name, **options)
    cases[2] |= {name: partial(train_on_mesh, name) for name in MESHES}
    results = {}
    for processes, by_name in cases.items():
        results |= run_cases(by_name, processes, folder / str(processes))
    return results, folder


# --- a flipped bit ----------------------------------------------------------------------------------------------------
class Flip(torch.autograd.Function):
    """Flips a bit of a gradient on request."""

    @staticmethod
    def forward(context, value, flips):
        context.flips = flips
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        if context.flips:
            gradient = gradient.clone()
            gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 3)
        return gradient, None


class Faulty(Net):
    """Computes one gradient wrong in one bit, in one pass over a step, on one rank."""

    step, the_pass, rank = 4, 0, 0

    def __init__(self, rank=0, the_pass=0):
        super().__init__(dropout=0.2)
        self.rank, self.the_pass, self.passes = rank, the_pass, 0

    def training_step(self, batch, batch_idx):
        here = self.global_step + 1 == self.step and self.global_rank == self.rank
        weight = Flip.apply(self.head.weight, here and self.passes == self.the_pass)
        self.passes += here
        return nn.functional.cross_entropy(nn.functional.linear(self.body(batch[0]), weight, self.head.bias), batch[1])


def flip(name, reproducible, the_pass, folder):
    """Return the error of a run with a flipped bit on its last rank."""
    options = {**RANKS[name], "reproducible": reproducible}
    task = Faulty(options.get("devices", 1) - 1, the_pass)
    saves = lg.callbacks.Checkpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    options |= {"callbacks": [saves], "enable_checkpointing": True, "default_root_dir": folder, "save_code": False}
    with pytest.raises(CorruptionError) as caught:
        fit(task, **TWICE, **options)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("reproducible", "the_pass"), WAYS)
@pytest.mark.parametrize("name", RANKS)
def test_a_flipped_bit_is_found_before_the_update(name, reproducible, the_pass, request, tmp_path):
    rank = RANKS[name].get("devices", 1) - 1
    if rank:
        results, tmp_path = request.getfixturevalue("shared")
    folder = tmp_path / name / reproducible
    told = results[name, reproducible] if rank else flip(name, reproducible, the_pass, folder)
    wanted = (
        r"The two computations of step 4 differ: "
        r"the gradient of head.weight \((\w{16}), then (\w{16})\) on rank (\d) "
    )
    match = re.match(wanted, told)
    assert match, told
    assert abs(int(match[1], 16) - int(match[2], 16)) % 2**32 == 8  # of two gradients in a word
    assert int(match[3]) == rank
    assert "on rank" not in told[match.end() : match.end() + 40]  # and on no other
    assert "both passes of step 2 were equal" in told
    assert max(folder.glob("step-*")).name == "step-00000003"


@pytest.mark.parametrize("step", [1, 5])
def test_a_flipped_bit_is_found_in_the_first_step_and_not_between(step):
    task = Faulty()
    task.step = step
    if step == 5:
        fit(task, **TWICE)
        assert task.passes == 1
        return
    with pytest.raises(CorruptionError, match=r"step 1 .* head.weight .*Either training_step is not repeatable"):
        fit(task, **TWICE)


class BadSum(lg.strategies.DDPStrategy):
    """Adds gradients up wrong, in one pass over step 4: on all ranks alike, or on the last one alone in both."""

    name, alone = "bad", False

    def __init__(self, alone):
        super().__init__()
        self.alone, self.passes = alone, 0

    def end_step(self):
        super().end_step()
        if self.task.global_step == 3 and self.task.trainer.stage == "fit":
            if self.place.rank == 1 if self.alone else not self.passes:
                self.task.head.bias.grad.view(torch.int32).bitwise_xor_(1)
            self.passes += 1


@pytest.mark.slow
def test_a_sum_that_goes_wrong_on_its_way_is_told_apart():
    with pytest.raises(
        CorruptionError, match=r"the mean gradient of head.bias .* on rank 0 .*; .* the error is in their sum\."
    ):
        fit(Net(), **TWICE, devices=2, strategy=BadSum(alone=False))


@pytest.mark.slow
def test_sums_that_differ_between_ranks_are_found_before_the_weights_differ():
    with pytest.raises(CorruptionError, match=r"step 4 differ: the mean gradient of head.bias on rank 1\."):
        fit(Net(), **TWICE, devices=2, strategy=BadSum(alone=True))


@pytest.mark.slow
def test_wrong_hardware_is_not_tried_again():
    with pytest.raises(CorruptionError, match="step 4"):
        fit(Faulty(rank=1), **TWICE, **TWO, max_restarts=3)


# --- no false alarm, and the same run ---------------------------------------------------------------------------------
class Rich(Net):
    """Most of a step's effects: statistics, metrics, buffers, logged values."""

    def __init__(self, **options):
        super().__init__(dropout=0.3, norm=True)
        self.accuracy, self.mean = torchmetrics.classification.MulticlassAccuracy(3), torchmetrics.MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.options = options

    def training_step(self, batch, batch_idx):
        if self.options.get("leaves_out") and batch_idx == 1:
            return None
        self.seen += len(batch[0])
        logits = self.head(self.body(batch[0]))
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.mean.update(loss.detach())
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("train/mean", self.mean)
        self.log_dict({"train/loss": loss, "train/seen": self.seen}, on_step=True, on_epoch=True)
        return {"loss": loss, "weight": (batch[1] + 1).sum()} if self.options.get("weighs") else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Keeps(Rich):
    """Clears its gradients itself, every other step."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.global_step % 2:
            optimizer.zero_grad(set_to_none=False)


class Steps(Rich):
    """Steps its optimizer, and logs the loss that the closure returns."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(optimizer_closure)

    def on_after_backward(self):
        self.head.weight.grad.mul_(0.5)

    def on_train_batch_start(self, batch, batch_idx):
        batch[0].mul_(2.0)


class Sparse(Rich):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 8, sparse=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table(batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Adversaries(Rich):
    """A loss for each of two optimizers."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return [loss, self.head(self.body(batch[0])).square().mean()]

    def configure_optimizers(self):
        return [torch.optim.SGD(module.parameters(), 0.1) for module in (self.body, self.head)]


def noisy():
    return DataLoader(Noisy(22, (4,)), 4, shuffle=True)


ALONE = {
    "plain": (Rich, {}),
    "drawn while loading": (Rich, {"data": noisy}),
    "not keyed": (Rich, {"reproducible": "off"}),
    "replicas": (Rich, {"replicas": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bitwise": (Rich, {"replicas": 3, "reproducible": "bitwise"}),
    "16-mixed": (Rich, {"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "averaged": (Rich, {"callbacks": [lg.callbacks.WeightAveraging]}),
    "skips": (Rich, {"nan": "skip"}),
    "compiled": (Rich, {"compile": {"backend": "aot_eager"}}),
    "recomputed": (Rich, {"activation_checkpointing": ["Sequential"]}),
    "watched for spikes": (Rich, {"callbacks": [SpikeWatch], "replicas": 2}),
    "weighed": (lambda: Rich(weighs=True), {"replicas": 2}),
    "batches left out": (lambda: Rich(leaves_out=True), {"replicas": 2}),
    "own zero_grad": (Keeps, {}),
    "own step": (Steps, {}),
    "sparse": (Sparse, {}),
    "two optimizers": (Adversaries, {"replicas": 2}),
    "devices of one process": (Rich, {"strategy": "data_parallel", "devices": 2}),
}
SHARED = {
    "ddp": (Rich, TWO),
    "three": (Rich, THREE),
    "three, bitwise": (Rich, {**THREE, "reproducible": "bitwise", "replicas": 4}),
    "a rank without a batch": (Rich, {**THREE, "samples": 16}),
    "unused": (
        lambda: Rich(leaves_out=True),
        {"devices": 2, "strategy": {"name": "ddp", "find_unused_parameters": True}},
    ),
    "views": (Rich, {"devices": 2, "strategy": {"name": "ddp", "gradient_as_bucket_view": True}}),
    "statistics of all": (Rich, {**TWO, "sync_batchnorm": True}),
    "zero1": (Rich, {"devices": 2, "strategy": "zero1", "precision": "16-mixed"}),
}


def train(make, folder, data=None, samples=24, **options):
    """Return where a run has written its checkpoints and its log."""
    saves = lg.callbacks.Checkpoint(every_n_train_steps=1, save_top_k=-1)
    options = {"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **options}
    options["callbacks"] = [saves, *(make_one() for make_one in options.get("callbacks", ()))]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "save_code": False, "deterministic": True}
    trainer = lg.Trainer(**quiet, **options, default_root_dir=folder)
    trainer.fit(make(), data() if data else loader(samples, shuffle=True), loader(10))
    return trainer.run_dir


def train_both(make, folder, **options):
    """Train once without a recheck, and once with one."""
    return [train(make, folder / str(every), recheck_every=every, **options) for every in (None, 2)]


def read(folder):
    """Return all that a run leaves behind: the bytes of its checkpoints, the values of its log, and how it ended."""
    checkpoints = sorted(folder.glob("checkpoints/step-*"))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    states = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints]
    for state in states:
        del state["run_id"], state["state"]["elapsed"]
    assert len(checkpoints) >= 2
    return (
        [path.read_bytes() for checkpoint in checkpoints for path in sorted(checkpoint.glob("*.safetensors"))],
        states,
        [untimed(line) for line in lines],
    )


def untimed(line):
    return {key: value for key, value in line.items() if not key.startswith(("time", "throughput"))}


COMPILED = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler with deterministic kernels


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("name", [*ALONE, *SHARED])
def test_a_run_is_the_same_whether_its_steps_are_computed_twice_or_not(name, request, tmp_path):
    if name in SHARED:
        folders = request.getfixturevalue("shared")[0][name]
    else:
        make, options = ALONE[name]
        folders = train_both(make, tmp_path, **options)
    for before, after in zip(*map(read, folders), strict=True):
        assert before == after


class Draws(lg.Callback):
    """Draws between a forward and the second computation of its step, which does not call it."""

    def on_before_backward(self, trainer, task, loss):
        torch.rand(3)


def test_the_dropout_masks_after_a_recheck_are_those_of_a_run_without_it():
    """Without keyed generators, where each draw changes the following ones."""
    weights = []
    for every in (None, 1):
        task = Net(dropout=0.5)
        torch.manual_seed(3)
        fit(task, recheck_every=every, deterministic=True, reproducible="off", callbacks=[Draws()])
        weights.append((*task.parameters(), torch.get_rng_state()))
    for before, after in zip(*weights, strict=True):
        assert torch.equal(before, after)


MORE = {
    "tensor": (CNN, {"strategy": LAYOUTS[2]["tensor"]}),
    "no batch": (CNN, {"strategy": LAYOUTS[2]["shard"], "samples": 2}),
    "masked": (GPT, {"strategy": LAYOUTS[2]["shard"], "replicas": 3, "accumulate_grad_batches": 2}),
    "masked, bitwise": (GPT, {"strategy": LAYOUTS[2]["shard"], "replicas": 3, "reproducible": "bitwise"}),
    "copies": (GPT, {"strategy": LAYOUTS[2]["data"]}),
    "stages": (GPT, {"strategy": {"name": "mesh", "pipeline": 2, "micro_batches": 2}}),
    "layers on two devices": (
        GPT,
        {"strategy": {"name": "ddp_model_parallel", "devices_per_replica": 2}, "devices": 4},
    ),
}


OVER = ("built on rank 0", "built on rank 0 and cut", "clipped by value", "compiled blocks")
"""Features that act before the first step or after both computations, and blocks compiled to the same operations."""
MESHES = {name: case for name, case in {**FEATURES, **MORE}.items() if name not in OVER}


def train_on_mesh(name):
    """Return the weights and the log of a run without a recheck, and of one with it."""
    make, options = MESHES[name]
    options = {"devices": 2, "deterministic": True, **options}
    runs = [mesh_cases.fit(make(), **options, recheck_every=every) for every in (None, 2)]
    return [(run.task.state_dict(), [(step, untimed(line)) for step, line in run.memory.points]) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_run_on_a_mesh_is_the_same(name, shared):
    (first, points), (second, points_twice) = shared[0][name]
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert points == points_twice != []


# --- what cannot be computed twice ------------------------------------------------------------------------------------
class Counts(Net):
    """Computes something else each time."""

    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.loss(batch) * self.calls


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Searches(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


REFUSED = {
    "kernels may sum in a different order each time. Set trainer.deterministic=true": (Net, {"deterministic": "warn"}),
    "manual optimization updates weights within": (Manual, {}),
    "the optimizer itself computes the step again": (Searches, {}),
    "elastic=true repeats a step": (Net, {"devices": 2, "strategy": {"name": "ddp", "elastic": True}}),
}


@pytest.mark.parametrize("wanted", REFUSED)
def test_steps_that_cannot_be_computed_twice_are_refused_at_the_start(wanted):
    make, options = REFUSED[wanted]
    with pytest.raises(ConfigError, match=rf"recheck_every=2 .* {wanted}"):
        fit(make(), **{**TWICE, **options})


def test_a_step_that_is_never_the_same_is_told_before_its_first_update():
    task = Counts()
    before = task.head.weight.clone()
    with pytest.raises(CorruptionError, match=r"step 1 .* the loss \(.*Either training_step is not repeatable"):
        fit(task, **TWICE)
    assert torch.equal(task.head.weight, before)
    assert not any(parameter._backward_hooks for parameter in task.parameters())
