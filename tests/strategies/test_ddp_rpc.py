"""DDP with parameter servers, compared with one process that has all batches; checkpoints, refusals, failures."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import completed, run_module, run_script
from rpc_cases import QUIET, RPC, Ratings, fit, flat, in_one, loader, on_server
from shared_processes import run_cases
from torch import nn

import legato as lg
from legato.base.errors import ConfigError, TaskError, WorkerError
from legato.base.place import Place, find_place
from legato.callbacks import Checkpoint, ExponentialMovingAverage
from legato.trainer.strategies import DDPRPCStrategy


def assert_close(actual, expected, tolerance=1e-6):
    assert list(actual) == list(expected)
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


# --- the same as one process ------------------------------------------------------------------------------------------
CASES = {
    "uneven": ({}, {"samples": 22}),
    "adam": ({"kind": "Adam", "lr": 0.05, "schedule": True}, {"accumulate_grad_batches": 2, "samples": 46}),
    "sparse": ({"sparse": True}, {}),
    "computed twice": ({}, {"activation_checkpointing": ["Sequential"]}),
    "turns": ({"kind": "Adagrad"}, {"replicas": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


def run_on_server(name):
    torch.set_num_threads(1)
    task, options = CASES[name]
    return on_server(Ratings(**task), **options)


def refusal(name):
    task, options, _ = REFUSED[name]
    try:
        fit(task(), **{**RPC, **options})
    except (ConfigError, TaskError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of two trainers and a server: of runs, and then of refusals, all in the same processes."""
    cases = {name: partial(run_on_server, name) for name in CASES} | {
        ("refused", name): partial(refusal, name) for name in REFUSED
    }
    return run_cases(cases, 3, tmp_path_factory.mktemp("results"), threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_trainers_and_servers_match_one_process(results, name):
    task, options = CASES[name]
    assert_close(results[name], in_one(Ratings(**task), **options))


def weights_of_each_trainer():
    task = Ratings()
    fit(task, **RPC)
    if find_place().rank < RPC["devices"]:
        Path(f"trainer{find_place().rank}").write_text(
            json.dumps({key: tensor.is_meta for key, tensor in flat(task).items()})
        )


@pytest.mark.slow
def test_no_trainer_calls_a_server_after_the_run(tmp_path, monkeypatch):
    """Weights of remote modules are back on rank 0; other trainers have modules without values, and no proxy."""
    monkeypatch.chdir(tmp_path)
    run_cases({"fit": weights_of_each_trainer}, 3, tmp_path / "cases", threads=1)["fit"]
    on_servers = {key: key.startswith(("users", "items")) for key in in_one(Ratings())}
    assert json.loads((tmp_path / "trainer0").read_text()) == dict.fromkeys(on_servers, False)
    assert json.loads((tmp_path / "trainer1").read_text()) == on_servers


@pytest.mark.slow
def test_two_servers_share_the_modules():
    two = {"strategy": {"name": "ddp_rpc", "servers": 2}}
    assert_close(on_server(Ratings(kind="Adam", lr=0.05), **two), in_one(Ratings(kind="Adam", lr=0.05)))


@pytest.mark.slow
def test_a_trained_task_is_trained_further_and_evaluated(tmp_path):
    """Its remote modules are part of the caller's task again between two runs."""
    actual, expected = Ratings(), Ratings()
    for task, options in ((actual, RPC), (expected, {"strategy": "single", "replicas": 2})):
        fit(task, **options)
        assert type(task.users) is nn.Embedding
        fit(task, **options)
    assert_close(flat(actual), flat(expected))
    remote, alone = lg.Trainer(**{**QUIET, **RPC}), lg.Trainer(**QUIET)
    first, second = remote.validate(actual, loader(), verbose=False), alone.validate(expected, loader(), verbose=False)
    assert first[0]["val_loss"] == pytest.approx(second[0]["val_loss"], abs=1e-6)
    predictions = torch.cat(remote.predict(actual, loader(22)))
    torch.testing.assert_close(predictions, torch.cat(alone.predict(expected, loader(22))), rtol=0, atol=1e-6)


# --- checkpoints ------------------------------------------------------------------------------------------------------
LAYOUTS = {"rpc": RPC, "one": {"strategy": "single", "replicas": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [("rpc", "rpc"), ("rpc", "one"), ("one", "rpc")])
def test_a_run_resumes_from_a_checkpoint_on_any_layout(tmp_path, saved, resumed):
    def run(layout, resume=None):
        task = Ratings(kind="Adam", lr=0.05)
        kept = {"callbacks": [Checkpoint(dirpath=tmp_path / "kept", save_top_k=-1)], "enable_checkpointing": True}
        fit(task, resume=resume, **{**LAYOUTS[layout], **({} if resume else kept)})
        return flat(task)

    uninterrupted = run(saved)
    step = tmp_path / "kept" / "step-00000003"
    assert_close(run(resumed, resume=step), uninterrupted)
    evaluated = lg.Trainer(**{**QUIET, **LAYOUTS[resumed]}).validate(Ratings(), loader(), ckpt_path=step, verbose=False)
    expected = lg.Trainer(**QUIET).validate(Ratings(), loader(), ckpt_path=step, verbose=False)
    assert evaluated[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-6)


# --- what does not go -------------------------------------------------------------------------------------------------
class Manual(Ratings):
    automatic_optimization = False


class OwnBackward(Ratings):
    def backward(self, loss):
        loss.backward()


class Grouped(Ratings):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Dropping(Ratings):
    def remote_modules(self):
        return {**super().remote_modules(), "noise": lambda: nn.Sequential(nn.Dropout(0.5))}


class Nothing(Ratings):
    def remote_modules(self):
        return {}


class Made(Ratings):
    def remote_modules(self):
        return {"users": nn.Embedding(2, 2)}


REFUSED = {
    "manual": (Manual, {}, "does not support manual optimization"),
    "bitwise": (Ratings, {"reproducible": "bitwise"}, "does not support reproducible=bitwise"),
    "norm": (Ratings, {"gradient_clip_val": 1.0}, "no process has all gradients; clip by value"),
    "half": (Ratings, {"precision": "16-mixed"}, "does not support precision=16-mixed"),
    "skip": (Ratings, {"nan": "skip"}, "does not support nan=skip"),
    "sync": (Ratings, {"sync_batchnorm": True}, "strategy=ddp_rpc does not support sync_batchnorm=true"),
    "compile": (Ratings, {"compile": True}, "does not support compile"),
    "twice": (Ratings, {"recheck_every": 5, "deterministic": True}, "does not support recheck_every"),
    "backward": (OwnBackward, {}, "an overridden backward"),
    "averages": (Ratings, {"callbacks": [ExponentialMovingAverage()]}, "ExponentialMovingAverage needs all weights"),
    "grouped": (Grouped, {}, "create it from self.parameters"),
    "nothing": (Nothing, {}, "Nothing has no remote_modules"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_by_name(results, name):
    assert REFUSED[name][2] in results["refused", name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        (Dropping, ConfigError, "'noise' contains a Dropout, which behaves differently in training"),
        (Made, TaskError, "functions that return a module"),
    ],
)
def test_modules_that_cannot_be_served_are_refused(task, kind, message):
    with pytest.raises(kind, match=message):
        fit(task(), **{**RPC, "devices": 1})


def test_too_few_processes_or_several_nodes_are_refused():
    strategy = DDPRPCStrategy(servers=2)
    assert [strategy.serve(Place(rank, world_size=4)) for rank in range(4)] == [False, False, True, True]
    with pytest.raises(ConfigError, match="2 processes minus 2 servers leaves 0 trainers"):
        strategy.serve(Place(0, world_size=2))
    with pytest.raises(ConfigError, match="runs on one node only, got 2"):
        strategy.serve(Place(0, world_size=4, nodes=2))
    with pytest.raises(ConfigError, match="expected servers >= 1, got 0"):
        DDPRPCStrategy(servers=0)


# --- how it ends ------------------------------------------------------------------------------------------------------
class Falls(Ratings):
    """Rank 0 kills the process of rank `rank` in the third step."""

    def __init__(self, folder, rank):
        super().__init__()
        self.folder, self.rank = folder, rank

    def remote_modules(self):
        (self.folder / f"process-{os.getpid()}").touch()  # a server makes the modules
        return super().remote_modules()

    def on_fit_start(self):
        (self.folder / f"rank-{self.global_rank}").write_text(str(os.getpid()))

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.global_rank == 0:
            trainers = {int((self.folder / f"rank-{rank}").read_text()) for rank in range(2)}
            everyone = {int(path.name.partition("-")[2]) for path in self.folder.glob("process-*")}
            (server,) = everyone - trainers
            victim = server if self.rank == 2 else int((self.folder / f"rank-{self.rank}").read_text())
            os.kill(victim, signal.SIGKILL)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_a_peer_that_is_killed_ends_the_run_with_the_cause(tmp_path, rank):
    with pytest.raises(WorkerError, match=f"Rank {rank} of 3 was killed by SIGKILL") as caught:
        fit(Falls(tmp_path, rank), **RPC)
    assert caught.value.rank == rank


class Beyond(Ratings):
    def remote_modules(self):
        return {**super().remote_modules(), "items": lambda: nn.Sequential(nn.Embedding(2, 4))}


@pytest.mark.slow
def test_an_error_on_the_server_is_raised_by_the_calling_trainer():
    with pytest.raises(Exception, match="index out of range in self"):
        fit(Beyond(), **RPC)


@pytest.mark.slow
def test_a_run_that_ends_by_a_signal_saves_the_weights_of_the_servers(tmp_path):
    done = completed(run_script, Path(__file__).parents[1] / "rpc_preempted.py", tmp_path)
    assert done.returncode == 75, done.stderr
    assert "is complete. Exit code 75 requests a restart" in done.stderr
    *_, saved = sorted((tmp_path / "default" / "version_0" / "checkpoints").glob("step-*"))
    resumed = Ratings()
    fit(resumed, resume=saved, **{**LAYOUTS["one"], "max_epochs": 4})
    assert_close(flat(resumed), in_one(Ratings(), max_epochs=4))


SCRIPT = """
import json, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from rpc_cases import QUIET, RPC, Ratings, loader
import legato as lg

task = Ratings()
trainer = lg.Trainer(**{**QUIET, **RPC})
trainer.fit(task, loader(shuffle=True), loader(10))
results = trainer.test(task, loader(), verbose=False)
pathlib.Path(__file__).with_name(f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))
"""


@pytest.mark.slow
def test_torchrun_starts_trainers_and_servers_and_several_stages_share_them(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    agent = "torch.distributed.run", "--standalone", "--nproc-per-node", "3"
    done = completed(run_module, *agent, str(tmp_path / "script.py"), str(Path(__file__).parents[1]), timeout=200)
    assert done.returncode == 0, done.stderr
    task = Ratings()
    in_one(task)
    (expected,) = lg.Trainer(**QUIET).test(task, loader(), verbose=False)
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("results-*.json"))]
    assert sorted(map(len, results)) == [0, 1, 1]  # the server has none
    values = [of_rank[0]["val_loss"] for of_rank in results if of_rank]
    assert values == pytest.approx([expected["val_loss"]] * 2, abs=1e-6)
