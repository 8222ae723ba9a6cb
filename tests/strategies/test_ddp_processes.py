"""DDP's processes: their rendezvous, and the end of a run in which one fails, hangs, disagrees or is interrupted."""

import os
import signal
import subprocess
import sys
import time
import traceback

import psutil
import pytest
import torch
from ddp_cases import TWO, Net, Spare, close, fit, in_one, trained
from forked import Forked, run_program
from waiting import children, free_port, runs, wait_until

import legato as lg
from legato.base.errors import ConfigError, DisagreementError, TaskError
from legato.trainer.checkpoints import reading
from legato.trainer.processes.launch import run_workers, warm_up

pytestmark = pytest.mark.slow


@pytest.fixture
def nothing_left(monkeypatch):
    """Fail if a process survives, or if the end takes long: 2 s alone, but tests share the machine."""
    warm_up()
    assert wait_until(lambda: len(children()) >= 2)  # the fork server and its resource tracker stay
    before, started = children(), time.monotonic()
    yield
    seconds = time.monotonic() - started
    assert wait_until(lambda: children() <= before), children() - before
    assert seconds < 120


# --- meeting ----------------------------------------------------------------------------------------------------------


def test_processes_meet_where_init_method_says():
    expected = in_one(Net())
    for method in (f"tcp://127.0.0.1:{free_port()}", "env://"):
        strategy = {"name": "ddp", "init_method": method, "process_group_backend": "gloo"}
        assert close(trained(Net(), devices=2, strategy=strategy), expected), method


SCRIPT = """
import sys, torch, legato as lg
from dataclasses import dataclass
from torch.utils.data import DataLoader

@dataclass
class Batch:
    x: torch.Tensor

class Line(lg.Task):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch):
        return (batch.x * self.slope - 2 * batch.x).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

print("script runs", flush=True)
task = Line()
trainer = lg.Trainer(max_epochs=3, devices=int(sys.argv[1]), strategy="ddp", accelerator="cpu", logger=False,
                     replicas=2, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
collate = lambda items: Batch(torch.stack(items))
trainer.fit(task, DataLoader(torch.linspace(0, 1, 7), 2, collate_fn=collate, num_workers=1))
line = f"slope {task.slope.item():.5f} after {trainer.global_step} steps on {trainer.world_size}"
sys.stdout.write(line + "\\n")  # at once: two ranks of torchrun share the pipe
sys.stdout.flush()
"""


def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def start():
    """Start processes that are killed at the end of the test."""
    started = []

    def start_one(*words, **environment):
        started.append(Forked(run_program, *words, env={**os.environ, **environment}))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def answers(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return [line.split(" on ")[0] for line in output.splitlines() if line.startswith("slope")]


def test_legatos_launcher_torchrun_and_two_terminals_give_the_same(tmp_path, start):
    path = script(tmp_path)
    port = str(free_port())
    terminals = [
        start(path, "2", RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)
    ]
    torchrun = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path, "2")
    legato = subprocess.Popen([sys.executable, path, "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    slope, samples = 0.0, [index / 6 for index in range(7)]
    for step in 3 * (samples[:4], samples[4:]):
        slope -= 0.1 * sum(2 * x * x * (slope - 2) for x in step) / len(step)
    expected = f"slope {slope:.5f} after 6 steps"
    assert answers(legato) == [expected]
    assert answers(torchrun) == [expected, expected]
    assert [answers(terminal) for terminal in terminals] == [[expected], [expected]]


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has MPI")
def test_a_backend_that_torch_lacks_is_named(nothing_left):
    with pytest.raises(ConfigError, match=r"built without 'mpi'\. Set process_group_backend=gloo"):
        fit(Net(), devices=2, strategy={"name": "ddp", "process_group_backend": "mpi"})


# --- failures ---------------------------------------------------------------------------------------------------------


def test_parameters_without_gradient_are_named(nothing_left):
    with pytest.raises(TaskError, match=r"spare.0.weight, spare.0.bias, .* and 6 more.*find_unused_parameters=true"):
        fit(Spare(), **TWO)


class LogsOnOneRank(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 2:
            self.log("train/extra", 1.0)
        return super().training_step(batch, batch_idx)


class ValidatesOnOneRank(Net):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("val/extra", 1.0)


def test_different_names_on_two_ranks_are_named(nothing_left):
    with pytest.raises(DisagreementError, match=r"train at step 3.*rank 1 also logged \['train/extra'\]"):
        fit(LogsOnOneRank(), **TWO)
    with pytest.raises(DisagreementError, match=r"validation.*rank 0 also logged \['val/extra'\]"):
        fit(ValidatesOnOneRank(), **TWO)


def test_only_values_that_rank_zero_logs_alone_are_shown():
    class Alone(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("alone", float(batch_idx), rank_zero_only=True, on_step=True, on_epoch=True)
            self.log("everywhere", float(self.global_rank), rank_zero_only=True)
            return super().training_step(batch, batch_idx)

    trainer = fit(Alone(), **TWO)
    assert trainer.logged_metrics["alone_epoch"] == 1.0  # of batches 0, 1, 2
    assert trainer.logged_metrics["everywhere"] == 0.0
    assert not {"alone", "everywhere"} & trainer.callback_metrics.keys()


def test_a_stop_request_of_one_rank_stops_all_after_the_same_step():
    class Wishes(lg.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            trainer.should_stop |= trainer.global_rank == 1 and trainer.global_step == 5

    def work():
        trainer = fit(Net(), **{**TWO, "max_epochs": 10000, "callbacks": [Wishes()], "log_every_n_steps": 10000})
        return trainer.strategy.collectives.gather_objects(trainer.global_step)

    first, second = run_workers(work, 2)
    assert first == second
    assert 5 <= first < 30000


def fails(name):
    """Return a task whose rank 1 fails in the method `name`."""

    def method(self, *arguments):
        if self.trainer.global_rank == 1:
            raise ValueError(f"rank 1 fails in {name}")
        return getattr(Net, name)(self, *arguments[:2])

    return type("Fails", (Net,), {name: method})()


@pytest.mark.parametrize("name", ["setup", "configure_optimizers", "training_step", "validation_step", "on_train_end"])
def test_the_error_of_the_failing_rank_is_shown(name, nothing_left):
    with pytest.raises(ValueError, match=f"^rank 1 fails in {name}$") as caught:
        fit(fails(name), **TWO)
    text = "".join(traceback.format_exception(caught.value)).rstrip()
    assert text.splitlines()[-1] == f"ValueError: rank 1 fails in {name}"
    assert "Rank 1 of 2 failed with ValueError." in text
    assert "in method\n" in str(caught.value.__cause__)
    assert "Connection closed" not in text


def test_a_rank_that_hangs_ends_the_run_after_the_timeout(nothing_left):
    class Hangs(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1:
                time.sleep(60)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"(?s)has waited 4 s .*rank 1 is in .*training_step"):
        fit(Hangs(), devices=2, strategy={"name": "ddp", "timeout": 4.0})  # which startup must not reach


INTERRUPTED = """
import pathlib, sys, time, torch, legato as lg
from torch.utils.data import DataLoader

class Slow(lg.Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        (pathlib.Path(sys.argv[1]) / f"started-{self.global_rank}").touch()
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

lg.Trainer(devices=2, strategy="ddp", accelerator="cpu", max_epochs=1000, default_root_dir=sys.argv[1],
           enable_progress_bar=False).fit(Slow(), DataLoader(torch.ones(400, 1), 4))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_a_run_and_leaves_nothing(tmp_path, start):
    (tmp_path / "script.py").write_text(INTERRUPTED)
    process = start(tmp_path / "script.py", str(tmp_path))
    assert wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2 or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[1]
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # of 1000 epochs
    assert process.returncode not in (0, None)
    assert errors.rstrip().splitlines()[-1].startswith("KeyboardInterrupt")
    assert wait_until(lambda: not any(runs(worker.pid) for worker in workers), 30)


# --- afterwards -------------------------------------------------------------------------------------------------------


def test_the_caller_can_save_after_workers_have_ended(tmp_path):
    """It has the weights; the rest is in the run's last checkpoint, if there is one."""
    for keeps in (True, False):
        task = Net()
        made = fit(task, **TWO, max_epochs=1, default_root_dir=tmp_path / str(keeps), enable_checkpointing=keeps)
        assert made.elapsed == made.state.elapsed > 0
        made.save_checkpoint(tmp_path / f"weights-{keeps}", weights_only=True)
        again = Net()
        again.load_state_dict(reading.read_checkpoint(tmp_path / f"weights-{keeps}")["state_dict"])
        assert all(map(torch.equal, again.parameters(), task.parameters()))
        if keeps:
            made.save_checkpoint(tmp_path / "whole")
            assert reading.read_checkpoint(tmp_path / "whole")["global_step"] == made.global_step
        else:
            with pytest.raises(TaskError, match="no complete checkpoint from the last step"):
                made.save_checkpoint(tmp_path / "whole-2")
