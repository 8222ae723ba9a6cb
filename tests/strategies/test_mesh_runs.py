"""Runs on a mesh: checkpoints between strategies, every sample evaluated once, refusals."""

import re

import pytest
import torch
from ddp_cases import QUIET, flat
from mesh_cases import CNN, GPT, IMAGES, LAYOUTS, LateGPT, Tied, data_of, difference, fit, mesh
from shared_processes import run_cases
from torch import distributed, nn
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

import legato as lg
from legato.base.errors import CheckpointError, ConfigError, NonFiniteError, TaskError
from legato.trainer.optimization.kernels import modules_named
from legato.trainer.strategies.mesh.mesh import MeshStrategy
from legato.trainer.strategies.mesh.sharding import find_sharded_blocks
from legato.trainer.strategies.mesh.sizes import fit_sizes, read_sizes
from legato.trainer.strategies.mesh.tensor_plan import read_plan


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return all results of two processes, from one start."""
    folder = tmp_path_factory.mktemp("mesh")
    legs(folder, 1, ["single"], 1)
    fit(CNN(norm=False), strategy="single").save_checkpoint(folder / "other")

    def saved():
        task = CNN("adamw")
        fit(task, strategy=SHARD, devices=2).save_checkpoint(folder / "two")
        return flat(task)

    ways = [mesh(shard=2), "zero1", mesh(tensor=2), "ddp", mesh(shard=2, cpu_offload=True)]
    cases = {
        "legs": lambda: legs(folder, 2, ways, 2),
        "weights": saved,
        "evaluations": lambda: all_evaluations(2),
        "refusals": refusals,
        "left out": left_out,
        "emptied": emptied,
        "another model": lambda: read_another_model(folder / "other"),
        "diverged": lambda: (diverged("batch"), diverged("weights", max_steps=1)),
    }
    results = run_cases(cases, 2, folder / "cases")
    results["folder"] = folder
    return results


@pytest.fixture(scope="module")
def four(two):
    """Return all results of four processes, from one start."""
    folder = two["folder"]

    def more_legs():
        return legs(folder, 8, [mesh(data=2, shard=2), mesh(shard=2, tensor=2)], 4)

    if (folder / "step-6").exists():  # else the test of two's legs tells why
        legs(folder, 7, ["single"], 1)
    results = run_cases({"weights": more_legs, "evaluations": lambda: all_evaluations(4)}, 4, folder / "four")
    results["folder"] = folder
    return results


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Scheduled(GPT):
    def __init__(self):
        super().__init__("adamw")

    def configure_optimizers(self):
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Saves(lg.callbacks.MonitoringCallback):
    """Writes a checkpoint after a step, in the middle of the run."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


RUN = {**QUIET, "replicas": 4, "max_epochs": -1, "gradient_clip_val": 0.3}


def legs(folder, first, strategies, devices):
    """Train for a step with each strategy in turn, each from the checkpoint of the previous one."""
    task, start = None, None
    for step, strategy in enumerate(strategies, first):
        task = Scheduled()
        start = str(folder / f"step-{step - 1}") if step > 1 else None
        saves = Saves(folder / f"step-{step}", step)
        where = {"strategy": strategy, "devices": devices, "callbacks": [saves], "default_root_dir": folder}
        trainer = lg.Trainer(**RUN, **where, max_steps=step)
        trainer.fit(task, DataLoader(data_of(task, 19), 2, shuffle=True), ckpt_path=start)
    return flat(task)


@pytest.mark.slow
def test_a_run_goes_from_strategy_to_strategy(two, four):
    assert two["legs"] is not None
    folder, last = four["folder"], four["weights"]
    results = legs(folder, 10, ["single"], 1)
    alone = Scheduled()
    trainer = lg.Trainer(**RUN, max_steps=10, strategy="single")
    trainer.fit(alone, DataLoader(data_of(alone, 19), 2, shuffle=True))
    assert difference([results], [flat(alone)]) < 2e-6
    assert difference([last], [results]) > 1e-4  # the last step changed the weights


# --- evaluation -------------------------------------------------------------------------------------------------------


class Measured(CNN):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.accuracy(self.narrow(self.wide(self.body(batch[0]).flatten(1)).tanh()), batch[1])
        self.log("val/accuracy", self.accuracy)

    test_step = validation_step


def evaluations(strategy, devices):
    task, results = Measured(), []
    trainer = lg.Trainer(**QUIET, strategy=strategy, devices=devices, replicas=None if devices > 1 else 4)
    for samples in (7, 1):  # of four processes one has a short batch; all but one have none
        loader = DataLoader(Subset(IMAGES, range(samples)), 2)
        results.append(trainer.validate(task, loader, verbose=False))
        results.append(trainer.test(task, [loader, loader], verbose=False))
        results.append(trainer.predict(task, loader))
    return results


def emptied():
    """Return for each rank whether a run has left a task without values, which other runs refuse."""
    task = CNN()
    strategy = mesh(shard=2, whole_at_end=False)
    trainer = fit(task, strategy=strategy, devices=2)
    results = trainer.strategy.collectives.gather_objects(all(parameter.is_meta for parameter in task.parameters()))
    if trainer.global_rank == 0:
        with pytest.raises(TaskError, match=r"body.0.weight of CNN has no values.*whole_at_end=false"):
            MeshStrategy.place_task(trainer.strategy, task)
    return results


def all_evaluations(processes):
    layouts = {name: LAYOUTS[processes][name] for name in ("shard", "tensor" if processes == 2 else "shard x tensor")}
    return {name: evaluations(layout, processes) for name, layout in layouts.items()}


@pytest.mark.slow
def test_every_sample_is_evaluated_once(two, four):
    expected = evaluations("single", 1)
    assert [sum(map(len, results)) for results in expected[2::3]] == [7, 1]
    for results in (two["evaluations"], four["evaluations"]):
        for name, actual in results.items():
            for batch, expected_batch in zip(actual, expected, strict=True):
                assert batch == expected_batch if isinstance(batch[0], list) else alike(batch, expected_batch), name


def alike(actual, expected):
    return all(
        batch.keys() == expected_batch.keys()
        and all(batch[key] == pytest.approx(expected_batch[key], abs=1e-6) for key in batch)
        for batch, expected_batch in zip(actual, expected, strict=True)
    )


# --- started by Legato ------------------------------------------------------------------------------------------------


class Asks(CNN):
    """Calls itself in hooks, outside of a step."""

    def forward(self, image):
        return self.narrow(self.wide(self.body(image).flatten(1)).tanh())

    def on_train_epoch_end(self):
        self.asked = self(IMAGES[:2][0]).detach().clone()
        self.log("asked", self.asked.sum())


@pytest.mark.slow
def test_the_callers_task_has_the_trained_weights_and_nothing_else():
    task = Asks()
    trainer = fit(task, strategy="fsdp", devices=2)
    alone = Asks()
    expected = fit(alone, strategy="single", replicas=2)
    assert difference([flat(task)], [flat(alone)]) < 1e-6
    assert trainer.callback_metrics["asked"] == pytest.approx(float(expected.callback_metrics["asked"]), abs=1e-6)
    assert type(task.body) is nn.Sequential
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in task.modules())
    assert all(type(parameter) is nn.Parameter for parameter in task.parameters())


@pytest.mark.slow
def test_weights_may_stay_in_the_checkpoint(two, tmp_path):
    assert two["emptied"] == [True, True]
    task = CNN()
    before = flat(task).clone()
    trainer = lg.Trainer(
        **QUIET, strategy={"name": "fsdp", "whole_at_end": False}, devices=2, callbacks=[Saves(tmp_path / "end", 3)]
    )
    trainer.fit(task, DataLoader(data_of(task, 12), 2, shuffle=True))
    assert torch.equal(flat(task), before)  # the caller's task is unchanged
    trainer = lg.Trainer(**QUIET, strategy="single")
    trainer.validate(task, DataLoader(data_of(task, 4), 2), ckpt_path=tmp_path / "end")
    alone = fit(CNN(), strategy="single", replicas=2, samples=12, max_steps=3, max_epochs=-1).task
    assert difference([flat(task)], [flat(alone)]) < 1e-6


# --- what is refused --------------------------------------------------------------------------------------------------


class LeavesOut(CNN):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class ByHand(CNN):
    automatic_optimization = False


class Planned(CNN):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def tensor_plan(self):
        return self.plan


class Foreach(CNN):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=True)


class OwnZero(CNN):
    def configure_optimizers(self):
        from legato.trainer.strategies.zero1 import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


SHARD, TENSOR = mesh(shard=2), mesh(tensor=2)
REFUSED = {
    r"data 2 x shard 2 x tensor 1 x pipeline 1 = 4, but there are 2 processes": (CNN, mesh(data=2, shard=2), {}),
    r"data auto x shard 1 x tensor 3 .* multiple of 3 processes, but there are 2": (
        CNN,
        mesh(data="auto", tensor=3),
        {},
    ),
    r"strategy=mesh cannot be bitwise reproducible.*use strategy=ddp": (
        CNN,
        mesh(data=2),
        {"reproducible": "bitwise"},
    ),
    r"needs automatic optimization": (ByHand, SHARD, {}),
    r"cannot be compiled, but the blocks between them can": (CNN, SHARD, {"compile": True}),
    r"compiler fails on layers that are split": (CNN, TENSOR, {"compile": {"blocks": ["Linear"]}}),
    r"its own share of the data, .* the same number of batches": (CNN, SHARD, {"use_distributed_sampler": False}),
    r"CNN has no module of class 'Conv3d'. Did you mean 'Conv2d'": (CNN, mesh(shard=2, shard_blocks=["Conv3d"]), {}),
    r"a Embedding shares a parameter": (Tied, mesh(shard=2, shard_blocks=["Embedding"]), {}),
    r"tensor=2 needs a plan: add a tensor_plan\(\) method": (lambda: Planned({}), TENSOR, {}),
    r"no module matches 'wid'. Did you mean 'wide'": (lambda: Planned({"wid": "column"}), TENSOR, {}),
    r"'columns' is not column .*Did you mean 'column'": (lambda: Planned({"wide": "columns"}), TENSOR, {}),
    r"'row' needs a Linear, but Planned.body.0 is a Conv2d": (lambda: Planned({"body.0": "row"}), TENSOR, {}),
    r"narrow has 3 outputs, which is not a multiple of tensor=2": (lambda: Planned({"narrow": "column"}), TENSOR, {}),
    r"foreach=True.*are on multiple meshes": (Foreach, TENSOR, {}),
    r"returned a ZeroRedundancyOptimizer": (OwnZero, "zero1", {}),
}


def refusals():
    """Return each rank's error for each of REFUSED."""
    results = {}
    for message, (kind, strategy, options) in REFUSED.items():
        try:
            fit(kind(), strategy=strategy, devices=2, **options)
            results[message] = "no error"
        except ConfigError as error:
            results[message] = str(error)
    ranks = [None, None]
    distributed.all_gather_object(ranks, results)
    return ranks


@pytest.mark.slow
def test_unsupported_settings_are_refused_on_every_rank_before_the_first_step(two):
    for rank in two["refusals"]:
        for message, came in rank.items():
            assert re.search(message, came), (message, came)
            assert len(came.splitlines()) <= 6


def left_out():
    with pytest.raises(TaskError) as caught:
        fit(LeavesOut(), strategy=SHARD, devices=2)
    return str(caught.value)


@pytest.mark.slow
def test_a_skipped_batch_ends_the_run_with_the_reason(two):
    assert re.search(r"returned None.*Return the loss times 0.0", two["left out"])


def test_axis_sizes_without_a_layout_are_refused():
    with pytest.raises(ConfigError, match="zero1 does not support elastic"):
        fit(CNN(), strategy={"name": "zero1", "elastic": True})
    with pytest.raises(ConfigError, match="expected a positive number of processes or 'auto', got shard=0"):
        fit(CNN(), strategy=mesh(shard=0))
    with pytest.raises(ConfigError, match="data and shard are 'auto', but only one"):
        read_sizes({"data": "auto", "shard": "auto", "tensor": 1, "pipeline": 1})
    with pytest.raises(ConfigError, match=r"= 4, but there are 6 processes \(3 machines x 2\)"):
        fit_sizes({"data": 2, "shard": 2, "tensor": 1, "pipeline": 1}, 6, machines=3)
    assert fit_sizes({"data": "auto", "shard": 4, "tensor": 2, "pipeline": 1}, 16) == (1, 2, 4, 2)


class Diverges(CNN):
    """Has non-finite weights in one rank's shard after the first step, or a non-finite batch on one rank."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        bad = (self.where, self.global_step, self.global_rank) == ("batch", 1, 1)
        return [batch[0] * float("nan") if bad else batch[0], batch[1]]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (self.where, self.global_rank) == ("weights", 1):
            self.narrow.weight.detach().to_local().fill_(float("nan"))


def diverged(where, **options):
    try:
        fit(Diverges(where), strategy=SHARD, devices=2, **options).save_checkpoint("never")
    except NonFiniteError as error:
        return str(error)


@pytest.mark.slow
def test_a_non_finite_value_on_one_rank_ends_all_ranks_with_its_name(two):
    batch, weights = two["diverged"]
    assert re.search(r"The loss of step 2 is not finite on another rank.* Rank 1: ", batch)
    assert "Rank 1: In the latest batch (batch_idx 1)" in batch
    assert "The weights after step 1 are not finite: narrow.weight" in weights


def read_another_model(path):
    trainer = lg.Trainer(**QUIET, strategy=SHARD, devices=2)
    try:
        trainer.validate(GPT(), DataLoader(data_of(GPT(), 4), 2), ckpt_path=path)
    except CheckpointError as error:
        return str(error)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_named(two):
    assert "the model of GPT: it lacks blocks.0" in two["another model"]


# --- plans and blocks -------------------------------------------------------------------------------------------------


def test_a_plan_names_modules_by_patterns():
    task = GPT()
    results = read_plan(task, task.tensor_plan(), 4)
    assert results["blocks.0.attention.query_key_value"] == "column"
    assert sorted(set(results.values())) == ["column", "row"]
    with pytest.raises(ConfigError, match="has 48 outputs, which is not a multiple of tensor=5"):
        read_plan(task, task.tensor_plan(), 5)


def test_blocks_are_found_by_class_and_by_size():
    task = GPT()

    def names_of_blocks(blocks, task=task):
        return [type(block).__name__ for block in find_sharded_blocks(task, blocks)]

    assert names_of_blocks(["Block"]) == ["Block"]
    assert names_of_blocks(["Block", "LayerNorm"])[-2:] == ["LayerNorm", "Block"]  # inner ones first
    assert names_of_blocks(1000) == ["Embedding", "Attention", "Perceptron", "Sequential"]
    assert names_of_blocks(3000) == ["Block"]
    assert names_of_blocks(10**9) == []
    assert names_of_blocks(1000, Tied()) == ["Attention", "Perceptron"]
    assert modules_named(task, "Module", "x")[0] is task.embedding


@pytest.mark.slow
def test_one_process_reads_what_two_wrote(two):
    """The same YAML works on a laptop: a mesh of one process is plain training."""
    task = CNN("adamw")
    trainer = lg.Trainer(**QUIET, strategy="fsdp")
    trainer.validate(task, DataLoader(data_of(task, 4), 2), ckpt_path=two["folder"] / "two")
    assert torch.equal(flat(task), two["weights"])


@pytest.mark.slow
def test_a_model_that_each_process_built_is_restored():
    task = LateGPT()
    fit(task, strategy=SHARD, devices=2)
    task.load_state_dict(task.state_dict())  # by hooks of its own, and no longer by those of FSDP
    assert {parameter.shape for parameter in task.parameters()} == {parameter.shape for parameter in GPT().parameters()}
