"""A run that was killed anywhere or moved to other processes equals the uninterrupted run."""

import logging
import os
import random
import signal
import threading
import time

import pytest
import torch
from resumed_run import (
    Net,
    everything,
    fit,
    lines,
    loaders,
    make_trainer,
    run_undisturbed,
    scalars,
    summary,
    tensors_of,
)
from torch import nn

import legato as lg
from legato.base.errors import ConfigError, WorkerError
from legato.trainer.processes.launch import run_workers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


# --- killed ---------------------------------------------------------------------------------------------------------


class Killer(lg.callbacks.CheckpointCallback):
    """Kills this process with SIGKILL in the n-th call of a hook."""

    def __init__(self, hook, count):
        self.left = count
        setattr(self, hook, self._count)

    def _count(self, *arguments):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


KILLS = [
    ("on_train_batch_start", 7),  # in the middle of a step, before the first checkpoint
    ("on_train_batch_end", 28),
    ("on_save_checkpoint", 3),
    ("on_validation_batch_end", 10),
    ("on_train_epoch_end", 2),
    ("on_train_epoch_start", 3),
    ("on_train_end", 1),
]


@pytest.mark.slow
def test_a_run_killed_anywhere_is_the_undisturbed_run(tmp_path, undisturbed):
    for number, (hook, count) in enumerate(KILLS):
        folder = tmp_path / str(number)
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            run_workers(lambda: fit(folder, [Killer(hook, count)]) and None, 1)  # noqa: B023
        has_checkpoint = any(folder.glob("*/*/checkpoints/step-*"))
        trainer, task = fit(folder, weights=6 if has_checkpoint else 0)
        assert torch.equal(everything(trainer, task), undisturbed["everything"]), (hook, count)
        assert summary(trainer, task) == undisturbed["summary"], (hook, count)
        directories = sorted(trainer.run_dir.parent.iterdir())
        assert lines(trainer.run_dir) == undisturbed["lines"], (hook, count)
        assert scalars(trainer.run_dir) == undisturbed["scalars"], (hook, count)
        # killed before its first checkpoint a run leaves a directory of its own, which is never touched again
        assert len(directories) == (1 if has_checkpoint else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "count"), [KILLS[0], KILLS[2], KILLS[6]])
def test_a_killed_run_that_saves_elsewhere_is_the_undisturbed_run(tmp_path, undisturbed, hook, count):
    """resume=auto finds the checkpoints elsewhere; the run directory has none."""
    elsewhere = {"dirpath": tmp_path / "own"}
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run_workers(lambda: fit(tmp_path / "runs", [Killer(hook, count)], **elsewhere) and None, 1)
    has_checkpoint = any(tmp_path.glob("own/step-*"))
    trainer, task = fit(tmp_path / "runs", weights=6 if has_checkpoint else 0, **elsewhere)
    assert torch.equal(everything(trainer, task), undisturbed["everything"])
    assert summary(trainer, task) == undisturbed["summary"]
    assert lines(trainer.run_dir) == undisturbed["lines"]
    assert scalars(trainer.run_dir) == undisturbed["scalars"]
    assert trainer.run_dir.name == ("version_0" if has_checkpoint else "version_1")
    assert not any((tmp_path / "runs").glob("*/*/checkpoints/step-*"))
    with pytest.raises(ConfigError, match="own' contains checkpoints from another run"):
        fit(tmp_path / "others", **elsewhere)


@pytest.mark.slow
def test_a_run_whose_checkpoints_elsewhere_cannot_be_gone_on_with_begins_anew(tmp_path, undisturbed, caplog):
    elsewhere = {"dirpath": tmp_path / "own"}
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run_workers(lambda: fit(tmp_path / "runs", [Killer(*KILLS[1])], **elsewhere) and None, 1)
    for path in tmp_path.glob("own/step-*/model.safetensors"):
        path.write_bytes(b"damaged" + path.read_bytes()[7:])
    trainer, task = fit(tmp_path / "runs", **elsewhere)
    assert "is damaged" in caplog.text
    assert torch.equal(everything(trainer, task), undisturbed["everything"])
    assert lines(trainer.run_dir) == undisturbed["lines"]
    assert trainer.run_dir.name == "version_1"


@pytest.mark.slow
def test_a_run_killed_at_random_moments_is_the_undisturbed_run(tmp_path, undisturbed):
    """Until the run completes; it is killed while it reads, computes, logs and writes."""
    chance = random.Random(time.time_ns())
    delays = [chance.uniform(0.02, 0.6) for _ in range(5)]

    def work(delay):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        trainer, task = fit(tmp_path)
        timer.cancel()
        return everything(trainer, task)

    for delay in delays:
        try:
            result = run_workers(lambda: work(delay), 1)  # noqa: B023
            assert torch.equal(result, undisturbed["everything"]), delays
            break
        except WorkerError:
            pass
    trainer, task = fit(tmp_path)
    assert torch.equal(everything(trainer, task), undisturbed["everything"]), delays
    assert lines(trainer.run_dir) == undisturbed["lines"], delays
    assert scalars(trainer.run_dir) == undisturbed["scalars"], delays


TWO = {"strategy": "ddp", "devices": 2}


@pytest.fixture(scope="module")
def undisturbed_ddp(tmp_path_factory):
    trainer, task = fit(tmp_path_factory.mktemp("ddp"), **TWO)
    return torch.cat(tensors_of(task.state_dict())), lines(trainer.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("elsewhere", "steps"), [(False, {3, 7}), (True, {7})])
def test_killed_processes_of_ddp_are_started_again(tmp_path, undisturbed_ddp, elsewhere, steps):
    """One rank is killed in step 4, the other in the validation after step 7; the result is unchanged."""

    class KillsRank(lg.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            self._kill(trainer, rank=1, step=3)

        def on_validation_batch_start(self, trainer, task, batch, batch_idx, dataloader_idx=0):
            self._kill(trainer, rank=0, step=7)

        def _kill(self, trainer, rank, step):
            mark = tmp_path / f"killed-{step}"
            if trainer.global_rank == rank and trainer.global_step == step and step in steps and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    folder = {"dirpath": tmp_path / "own"} if elsewhere else {}
    trainer, restarted = fit(tmp_path / "killed", [KillsRank()], max_restarts=2, **TWO, **folder)
    assert {path.name for path in tmp_path.glob("killed-*")} == {f"killed-{step}" for step in steps}
    weights, points = undisturbed_ddp
    assert torch.equal(torch.cat(tensors_of(restarted.state_dict())), weights)
    assert lines(trainer.run_dir) == points
    assert trainer.run_dir.name == "version_0"


@pytest.mark.slow
def test_an_evaluation_that_starts_again_keeps_to_its_checkpoint(tmp_path):
    class KillsRank(lg.Callback):
        def on_validation_start(self, trainer, task):
            if trainer.stage == "validate" and trainer.global_rank == 1 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    keep_all = lg.callbacks.Checkpoint(every_n_train_steps=2, save_top_k=-1)
    options = {"max_steps": 4, "max_restarts": 1, "checkpoint": False, "enable_checkpointing": True}
    trainer, task = fit(tmp_path, [KillsRank(), keep_all], **TWO, **options)
    first, newest = (trainer.run_dir / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    (again,) = trainer.validate(task, loaders()[1], ckpt_path=first)
    assert (tmp_path / "killed").exists()
    assert trainer.validate(task, loaders()[1], ckpt_path=first) == [again]
    assert trainer.validate(task, loaders()[1], ckpt_path=newest) != [again]


# --- moved ----------------------------------------------------------------------------------------------------------


class Noted(Net):
    """Records the samples of each step."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.net[1] = nn.Identity()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.global_step, self.trainer.metrics.replica, batch_idx, batch.tolist()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """From 1 to 3, to 2 and back to 1, in the middle of epochs: each step has the same samples and weights."""

    def leg(processes, folder, max_steps, workers=0):
        strategy = {"strategy": "ddp", "devices": processes} if processes > 1 else {}
        trainer = make_trainer(tmp_path / folder, **{**strategy, "replicas": 3, "max_steps": max_steps})
        task = Noted(seed=processes)
        trainer.fit(task, *loaders(workers), resume="auto")
        seen = [entry for rank in trainer.strategy.collectives.gather_objects(task.seen) for entry in rank]
        return seen, torch.cat(tensors_of(task.state_dict())), trainer.run_dir

    expected, weights, reference = leg(1, "whole", -1)
    seen = []
    for processes, max_steps in ((1, 2), (3, 5), (2, 7), (1, -1)):
        run = lambda p=processes, m=max_steps: leg(p, "moved", m, workers=p % 2)  # noqa: E731
        steps, result, run_dir = run_workers(run, processes) if processes > 1 else run()
        seen += steps
    assert sorted(seen) == sorted(expected)
    assert torch.allclose(result, weights, rtol=0, atol=1e-6)
    assert run_dir.name == "version_0"
    ours, theirs = lines(run_dir), lines(reference)
    assert ours.keys() == theirs.keys()
    for step, record in theirs.items():
        assert ours[step] == pytest.approx(record, abs=1e-6), step


@pytest.mark.slow
def test_replicas_that_take_turns_are_told_unless_they_were_asked_for(tmp_path, caplog):
    fit(tmp_path, max_steps=2)
    with caplog.at_level(logging.INFO, logger="legato"):
        fit(tmp_path, max_steps=3)
        assert "replicas, which take turns" not in caplog.text
        trainer, _ = fit(tmp_path, max_steps=4, replicas=None)
    assert trainer.state.replicas == 2
    (log_line,) = [message for message in caplog.messages if "replicas, which take turns" in message]
    assert log_line.startswith("The run keeps its 2 replicas, which take turns on 1 process, so each step has")


@pytest.mark.slow
def test_a_run_keeps_its_seed_and_says_so(tmp_path, caplog):
    expected, task = fit(tmp_path / "whole", max_steps=4)
    fit(tmp_path / "again", max_steps=2)
    with caplog.at_level(logging.INFO, logger="legato"):
        trainer, again = fit(tmp_path / "again", max_steps=4, seed=12)
    assert "keeps its original seed, 11; seed=12 is ignored" in caplog.text
    assert trainer.state.seed == 11
    assert torch.equal(everything(trainer, again), everything(expected, task))


@pytest.mark.slow
def test_what_a_run_keeps_cannot_be_changed(tmp_path):
    fit(tmp_path, max_steps=2)
    with pytest.raises(ConfigError, match="the run started with 2 replicas"):
        fit(tmp_path, replicas=3)
    with pytest.raises(ConfigError, match="Start at most 2 processes, or"):
        run_workers(lambda: fit(tmp_path, strategy="ddp", devices=3, replicas=None), 3)
