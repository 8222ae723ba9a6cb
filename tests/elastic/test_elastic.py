"""Elastic runs: processes die, are replaced and join while the run continues, and the result stays the same."""

import itertools
import json
import os
import signal
import time

import event_files
import psutil
import pytest
import torch
from elastic_run import EPOCHS, REPLICAS, STEPS_PER_EPOCH, Killer, Net, digest, fit, loader, trainer_of
from waiting import leave, runs, wait_until

import legato as lg
from legato.base.errors import ConfigError
from legato.trainer.checkpoints import find
from legato.trainer.processes.agreement import Agreement
from legato.trainer.processes.launch import warm_up
from legato.trainer.processes.ranks import SINGLE
from legato.trainer.strategies.ddp import DDPStrategy

STEPS = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return task, trainer and points of the same run in one process."""
    task, trainer = fit(tmp_path_factory.mktemp("undisturbed"))
    return task, trainer, points(trainer)


@pytest.fixture
def folder(tmp_path):
    """Return a folder for messages of processes. Afterwards no process is left, nor a file outside the folder."""
    warm_up()
    path = tmp_path / "told"
    path.mkdir()
    yield path
    words = ("trained", "built", "validating", "loading")
    pids = [int(file.name.rsplit("-", 1)[1]) for word in words for file in path.glob(f"{word}-*")]
    assert wait_until(lambda: not any(runs(process) for process in pids))
    assert not [name for name in os.listdir("/dev/shm") for process in pids if f"_{process}_" in name]


def points(trainer):
    """Return the lines of metrics.jsonl by step, without times; each step must occur once, in order."""
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    timed = ("time", "throughput/")
    return {line["step"]: {name: value for name, value in line.items() if not name.startswith(timed)} for line in lines}


def assert_same(task, trainer, undisturbed):
    """Check that the result and every point of the log are those of the undisturbed run, bit for bit."""
    assert trainer.global_step == undisturbed[1].global_step
    assert trainer.state.samples_seen == undisturbed[1].state.samples_seen
    assert digest(task) == digest(undisturbed[0])
    assert points(trainer) == undisturbed[2]


# --- any process, any moment ------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills", "seed"), [(2, 3, 1), (4, 3, 3)])
def test_kills_at_random_moments_do_not_change_the_result(tmp_path, folder, undisturbed, processes, kills, seed):
    def plan(killer):
        killer.wait_for_members(processes)
        for _ in range(kills):
            time.sleep(killer.random.random() * 0.3)
            killer.kill(killer.random.choice(killer.wait_for_members(2)))
        killer.wait_for_members(1)

    with Killer(folder, plan, seed, kills) as killer:
        task, trainer = fit(tmp_path, folder, elastic=True, devices=processes, max_restarts=kills)
    assert len(killer.dead) == kills
    assert_same(task, trainer, undisturbed)


class DiesBeforeItsUpdate(Net):
    """Rank `victim` dies after the reduction of a step's gradients and buffers, before the next collective."""

    def __init__(self, folder, victim):
        super().__init__(folder)
        self.victim = victim

    def on_before_optimizer_step(self, optimizer):
        if (self.global_rank, self.global_step) == (self.victim, STEPS_PER_EPOCH - 1) and self.trainer.world_size > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.all_gather(torch.tensor(1.0))


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "missing"), [(2, 0), (0, 14)])
def test_a_step_is_repeated_from_its_start_after_a_death_after_backward(tmp_path, folder, victim, missing):
    """With 14 samples missing, only rank 0 has a batch in the step, and broadcasts its buffers to the others."""
    results, samples = [], STEPS_PER_EPOCH * REPLICAS * 4 - missing
    for where, options in ((None, {}), (folder, {"elastic": True, "devices": 3})):
        task, trainer = DiesBeforeItsUpdate(where, victim), trainer_of(tmp_path, max_epochs=2, **options)
        trainer.fit(task, loader(samples, shuffle=True))
        results.append((trainer.global_step, digest(task)))
    assert results[0] == results[1]
    assert results[0][0] == 2 * STEPS_PER_EPOCH


class MeetsAfterUpdate(DDPStrategy):
    """Averages weights after each update, as many strategies do; a process dies once before the average."""

    def optimizer_step(self, optimizer, closure=None, **options):
        returned = super().optimizer_step(optimizer, closure, **options)
        mark = self.task.folder / "died"
        if (self.place.rank, self.task.global_step) == (1, 17) and not mark.exists():
            leave(mark)
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in self.task.parameters():
            self.data_ranks.all_reduce(parameter.detach(), "sum").div_(self.data_ranks.size)
        return returned


@pytest.mark.slow
def test_an_update_is_not_repeated_after_a_death_right_after_it(tmp_path, folder, undisturbed):
    """No survivor can repeat that step, so all restart from the checkpoint of the previous epoch."""
    task = Net(folder)
    trainer = trainer_of(tmp_path, strategy=MeetsAfterUpdate(elastic=True), devices=2, max_restarts=2)
    trainer.fit(task, loader(shuffle=True), loader(32))
    assert (folder / "died").exists()
    assert_same(task, trainer, undisturbed)


@pytest.mark.slow
def test_two_killed_at_once_or_during_healing(tmp_path, folder, undisturbed):
    delays = [0.0, 0.01, 0.03]

    def plan(killer):
        for delay in delays:
            first, second, *_ = killer.random.sample(killer.wait_for_members(3), 3)
            killer.kill(first)
            time.sleep(delay)
            killer.kill(second)

    with Killer(folder, plan, kills=2 * len(delays)):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=4, max_restarts=2 * len(delays))
    assert_same(task, trainer, undisturbed)


@pytest.mark.slow
def test_another_process_writes_after_the_death_of_rank_zero(tmp_path, folder, undisturbed):
    def plan(killer):
        for _ in range(2):
            members = killer.wait_for_members(2)
            killer.wait(lambda: killer.step() % STEPS_PER_EPOCH == 6)
            killer.kill(members[0])  # ids increase, and new members are appended

    with Killer(folder, plan, kills=2):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=3)
    assert_same(task, trainer, undisturbed)
    shown = event_files.points(trainer.run_dir)
    for tag, first in (("loss_step", 4), ("val", STEPS_PER_EPOCH), ("loss_epoch", STEPS_PER_EPOCH)):
        steps = [step for step, _ in shown[tag]]
        assert steps == list(range(first, STEPS + 1, first)), tag


# --- validation and saving --------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_validation_is_repeated_after_a_death(tmp_path, folder, undisturbed, victim):
    def plan(killer):
        hold = folder / "hold-0.05"
        hold.touch()
        killer.kill(killer.wait_for_members(2, "validating")[victim])
        hold.unlink()

    with Killer(folder, plan):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=2)
    assert_same(task, trainer, undisturbed)


@pytest.mark.slow
def test_a_validation_saves_the_best_checkpoint_after_a_death_in_the_epoch(tmp_path, folder, undisturbed):
    def plan(killer):
        members = killer.wait_for_members(3)
        killer.wait(lambda: killer.step() % STEPS_PER_EPOCH == 4)
        killer.kill(members[2])

    best = lg.callbacks.Checkpoint(monitor="val", save_top_k=2)
    with Killer(folder, plan):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=3, callbacks=[best])
    assert_same(task, trainer, undisturbed)
    assert len(trainer.checkpoint_callback.best_k_models) == 2


class SlowSave(lg.Callback):
    """Signals that rank 0 is about to write a checkpoint, and waits."""

    def on_save_checkpoint(self, trainer, task, checkpoint):
        if trainer.is_global_zero and trainer.training and trainer.global_step == 20:
            task.tell("saving")
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rank_zero_dies_while_it_saves(tmp_path, folder, undisturbed, asynchronous):
    def plan(killer):
        killer.kill(killer.wait(lambda: killer.living("saving"))[0])

    saver = lg.callbacks.Checkpoint(every_n_train_steps=10, save_top_k=-1, asynchronous=asynchronous)
    with Killer(folder, plan):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=2, callbacks=[saver, SlowSave()])
    assert_same(task, trainer, undisturbed)
    kept = find.checkpoints_in(trainer.run_dir / "checkpoints")
    assert [path.name for path in kept] == [f"step-{step:08d}" for step in range(10, STEPS + 1, 10)]
    for path in kept:
        find.verify(path)


# --- who comes --------------------------------------------------------------------------------------------------------
class TellsShare(Net):
    """Writes the replicas that its process executes."""

    def on_train_batch_start(self, batch, batch_idx):
        self.tell("share", str(len(self.trainer.current_run.layout.owned(self.trainer.global_rank))))


@pytest.mark.slow
def test_a_replacement_takes_its_replicas_and_survivors_do_not_wait_for_it(tmp_path, folder, undisturbed):
    steps = []

    def plan(killer):
        members = killer.wait_for_members(2)
        killer.kill(members[1])
        steps.append(killer.step())
        (fresh,) = killer.wait(lambda: set(killer.living("share")) - set(members))
        steps.append(killer.step())
        killer.wait(lambda: all((folder / f"share-{member}").read_text() == "2" for member in (members[0], fresh)))

    with Killer(folder, plan, kills=2):
        task, trainer = fit(tmp_path, folder, task=TellsShare(folder), elastic=True, devices=2, max_restarts=1)
    assert steps[1] > steps[0]
    assert_same(task, trainer, undisturbed)


class UntilTold(TellsShare):
    """Trains until a file `enough` exists."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop |= (self.folder / "enough").exists()


@pytest.mark.slow
def test_a_replacement_joins_when_logging_is_more_frequent_than_agreement(tmp_path, folder):
    """A point is logged every 40 ms, and ranks agree every second: logging must not delay the agreement forever."""

    def plan(killer):
        members = killer.wait_for_members(2)
        killer.kill(members[1])
        (fresh,) = killer.wait(lambda: set(killer.living("share")) - set(members))
        killer.wait(lambda: all((folder / f"share-{member}").read_text() == "2" for member in (members[0], fresh)))
        (folder / "enough").touch()

    options = {"max_epochs": 1000, "log_every_n_steps": 1, "max_restarts": 1}
    with Killer(folder, plan, steps=10**9):
        fit(tmp_path, folder, task=UntilTold(folder), elastic=True, devices=2, **options)
    assert (folder / "enough").exists()


# --- all of them ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_restarts_from_its_newest_checkpoint_when_all_processes_die(tmp_path, folder, undisturbed):
    def plan(killer):
        members = killer.wait_for_members(2)
        killer.wait(lambda: killer.step() > STEPS_PER_EPOCH + 3)
        for process in members:
            killer.kill(process)
        killer.wait_for_members(2)

    with Killer(folder, plan, kills=4):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=2, max_restarts=3)
    assert_same(task, trainer, undisturbed)


# --- other trouble ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_process_that_hangs_is_killed_after_the_timeout_and_the_others_continue(tmp_path, folder, undisturbed):
    def plan(killer):
        members = killer.wait_for_members(3)
        killer.kill(members[1], signal.SIGSTOP)
        step = killer.step()
        killer.wait(lambda: killer.step() > step + 3)

    with Killer(folder, plan, kills=2):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=3, timeout=4.0)
    assert_same(task, trainer, undisturbed)


class Mistaken(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 7:
            raise KeyError("a mistake of the task")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_an_error_in_the_task_ends_the_run_at_once(tmp_path, folder):
    with pytest.raises(KeyError, match="a mistake of the task"):
        fit(tmp_path, folder, task=Mistaken(folder), elastic=True, devices=2)
    assert len(list(folder.glob("built-*"))) == 2  # no process was restarted
    assert all(int(path.read_text()) <= 7 for path in folder.glob("trained-*"))  # nor continued


class MistakenOnce(Net):
    def training_step(self, batch, batch_idx):
        mark = self.folder / f"mistaken-{self.global_step}"
        if self.global_rank == 1 and self.global_step in (7, 9) and not mark.exists():
            mark.touch()
            raise KeyError("a mistake of the task")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, 2])
def test_all_processes_restart_up_to_max_restarts_times_after_an_error_in_the_task(
    tmp_path, folder, undisturbed, restarts
):
    options = {"task": MistakenOnce(folder), "elastic": True, "devices": 2, "max_restarts": restarts}
    if restarts == 1:
        with pytest.raises(KeyError, match="a mistake of the task"):
            fit(tmp_path, folder, **options)
    else:
        assert_same(*fit(tmp_path, folder, **options), undisturbed)
    assert {path.name for path in folder.glob("mistaken-*")} == {"mistaken-7", "mistaken-9"}


@pytest.mark.slow
def test_a_signal_after_a_death_stops_the_survivors_for_a_resume(tmp_path, folder):
    def plan(killer):
        members = killer.wait_for_members(3)
        killer.kill(members[1])
        step = killer.step()
        killer.wait(lambda: killer.step() > step + 2)  # the launcher has recorded the death
        os.kill(os.getpid(), signal.SIGTERM)

    with Killer(folder, plan, kills=2), pytest.raises(SystemExit) as caught:
        fit(tmp_path, folder, elastic=True, devices=3)
    assert caught.value.code == 75


@pytest.mark.slow
def test_the_loader_workers_of_a_dead_process_end_with_it(tmp_path, folder, undisturbed):
    seen = {}

    def plan(killer):
        members = killer.wait_for_members(2)
        loading = killer.wait(lambda: psutil.Process(members[1]).children(recursive=True))
        killer.kill(members[1])
        killer.wait(lambda: not any(runs(process.pid) for process in loading))
        seen["step"] = killer.step()

    with Killer(folder, plan):
        task, trainer = fit(tmp_path, folder, elastic=True, devices=2, num_workers=1)
    assert seen["step"] < STEPS
    assert_same(task, trainer, undisturbed)


class Counts(Net):
    """Has torchmetrics objects that count batches of training and of validation."""

    def __init__(self, folder=None):
        import torchmetrics  # not with this module: each process of all runs would import it

        super().__init__(folder)
        self.trained, self.validated = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        self.trained.update(1.0)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.validated.update(1.0)
        self.log("validated", self.validated)


@pytest.mark.slow
def test_torchmetrics_count_a_repeated_step_once(tmp_path, folder):

    def plan(killer):
        hold = folder / "hold-0.05"
        killer.kill(killer.wait_for_members(3)[2])
        hold.touch()
        killer.kill(killer.wait_for_members(2, "validating")[1])
        hold.unlink()

    with Killer(folder, plan, kills=2):
        _, trainer = fit(tmp_path, folder, task=Counts(folder), elastic=True, devices=3)
    lines = [line for line in points(trainer).values() if "validated" in line]
    assert [line["validated"] for line in lines] == [8.0] * EPOCHS
    assert [line["trained"] for line in lines] == [float(REPLICAS * STEPS_PER_EPOCH)] * EPOCHS


# --- what was logged, and what is decided by it ----------------------------------------------------------------------
COMMUNICATION = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")


class Judged(Net):
    """Logs in every way, and dies as planned: member -> (collective or step, before or after)."""

    def __init__(self, folder=None, deaths=()):
        import torchmetrics

        super().__init__(folder)
        self.deaths = dict(deaths)
        self.error, self.unseen = torchmetrics.MeanSquaredError(), torchmetrics.SumMetric()
        self.kept = torchmetrics.CatMetric()

    def on_train_start(self):
        super().on_train_start()
        run = self.trainer.current_run
        member = getattr(run.membership, "member", None)
        if member is not None and member.id in self.deaths:
            nth, after = self.deaths[member.id]
            called = itertools.count(1)

            def deadly(function):
                def call(*arguments, **options):
                    here = next(called) == nth
                    if here and not after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    result = function(*arguments, **options)
                    if here:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return result

                return call

            for name in COMMUNICATION:
                setattr(torch.distributed, name, deadly(getattr(torch.distributed, name)))
            run.schedule.count = deadly(run.schedule.count)

    def on_train_epoch_start(self):
        self.log("begun", 1.0, reduce_fx="sum", rank_zero_only=True)
        self.log("epoch", self.current_epoch + 0.1)

    def training_step(self, batch, batch_idx):
        results = self.model(batch[0])
        loss = torch.nn.functional.mse_loss(results, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("greatest", batch[0].max(), on_epoch=True, reduce_fx="max")
        self.log("all", batch[0].sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.error(results.detach().squeeze(1), batch[1].squeeze(1))
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.kept.update(loss.detach())
        self.unseen.update(1.0)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]), on_epoch=True)

    def on_train_epoch_end(self):
        self.log("steps", self.unseen)
        self.log("closing", self.current_epoch + 0.1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}


def judged(root, folder=None, deaths=(), **options):
    """Train at most three epochs, with decisions that depend on logged training values; return task and trainer."""
    callbacks = [
        lg.callbacks.EarlyStopping("loss_epoch", patience=2, min_delta=0.5),
        lg.callbacks.Checkpoint(monitor="error_epoch", every_n_train_steps=7, save_top_k=2),
        lg.callbacks.LearningRateMonitor(),
    ]
    task = Judged(folder, deaths)
    trainer = trainer_of(root, max_epochs=4, log_every_n_steps=1, callbacks=callbacks, **options)
    trainer.fit(task, loader(shuffle=True), loader(32))
    return task, trainer


def decisions(trainer):
    stopping, saving = trainer.callbacks[0], trainer.checkpoint_callback
    return trainer.global_step, stopping.wait_count, stopping.best_score, saving.scores


@pytest.fixture(scope="module")
def unjudged(tmp_path_factory):
    """Return the result of `judged` without a death."""
    task, trainer = judged(tmp_path_factory.mktemp("judged"))
    assert trainer.global_step == 3 * STEPS_PER_EPOCH  # it was stopped
    return digest(task), points(trainer), decisions(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: (30, False), 1: (101, True)},  # rank 0 first
        {2: (60, True), 1: (60, True)},  # two at once
        {1: (95, False), 2: (96, False)},  # about the end of the first epoch
        {0: (139, True), 2: (158, True)},
    ],
)
def test_deaths_change_neither_logged_values_nor_decisions_based_on_them(tmp_path, folder, unjudged, deaths):
    task, trainer = judged(tmp_path, folder, deaths, elastic=True, devices=3)
    assert len(list(folder.glob("built-*"))) == 3
    assert (digest(task), points(trainer), decisions(trainer)) == unjudged


@pytest.mark.slow
def test_a_run_without_bitwise_survives_deaths_too(tmp_path, folder):
    def plan(killer):
        killer.kill(killer.wait_for_members(2)[0])

    with Killer(folder, plan):
        _, trainer = fit(tmp_path, folder, elastic=True, devices=2, reproducible="order")
    assert trainer.global_step == STEPS


class Spiky(Net):
    """Multiplies the loss of two steps by 100,000, which changes the direction of the gradient."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e5 if self.global_step in (31, 52) else loss


def watched(root, folder=None, **options):
    """Train with averaged weights and dropped spikes; return the results."""
    averages, spikes = lg.callbacks.ExponentialMovingAverage(0.9), lg.lab.SpikeWatch(50, 8, "skip")
    task, trainer = fit(root, task=Spiky(folder), callbacks=[averages, spikes], **options)
    averages, spikes = (callback for callback in trainer.callbacks if type(callback) in (type(averages), type(spikes)))
    assert spikes.spikes == [32, 53]
    results = averages.averaged_state_dict()
    records = [json.loads(line) for line in (trainer.run_dir / "spikes.jsonl").read_text().splitlines()]
    seen = [(record["step"], record["loss"], record["gradient_norm"]) for record in records]
    return digest(task), points(trainer), averages.updates, {n: v.tolist() for n, v in results.items()}, seen


@pytest.mark.slow
def test_survivors_have_the_weight_averages_and_the_spike_statistics(tmp_path, folder):
    def plan(killer):
        for _ in range(2):
            time.sleep(killer.random.random() * 0.3)
            killer.kill(killer.random.choice(killer.wait_for_members(2)))
        hold = folder / "hold-0.05"
        hold.touch()  # while the task holds its averages
        killer.kill(killer.wait_for_members(2, "validating")[0])
        hold.unlink()

    expected = watched(tmp_path / "alone")
    with Killer(folder, plan, kills=3) as killer:
        results = watched(tmp_path, folder, elastic=True, devices=3, max_restarts=3)
    assert len(killer.dead) == 3
    assert results == expected


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"join": "127.0.0.1:1"}, "join.*max_restarts replaces processes that die"),
        ({"min_processes": 2}, "min_processes.*continues with any number of processes"),
        ({"init_method": "tcp://127.0.0.1:7"}, "leave init_method out"),
    ],
)
def test_unsupported_options_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, elastic=True, **options)


def test_several_machines_are_refused(tmp_path, monkeypatch):
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="elastic=true runs on one machine only"):
        fit(tmp_path, elastic=True, num_nodes=2)


def test_processes_of_another_launcher_are_refused(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="requires Legato to start the processes"):
        fit(tmp_path, elastic=True, devices=1)


def test_a_generation_published_before_the_first_log_point_after_a_recovery_is_detected():
    agreement = Agreement(SINGLE, 0, 0.0)
    agreement.join(SINGLE, 5, 0.0)
    versions, agreed = [], []
    agreement.add(lambda: [3.0], lambda values: versions.append(values[0]) or values[0] > 2)
    for step in range(6, 20):
        agreement.apply(step, agreement.contribution(step, wants_stop=False))  # as each point of the log does
        if step >= agreement.next_step:
            agreement.agree(step, wants_stop=False)
            agreed.append(step)
    assert agreed[0] == 6
    assert set(versions) == {3.0}


class Hasty:
    """Another rank, which has measured its pace over a microsecond."""

    size = 2

    def all_reduce(self, tensor, operation):
        tensor[3] = max(float(tensor[3]), 1e6)
        return tensor


def test_a_pace_measured_over_a_moment_does_not_delay_the_next_agreement():
    agreement, met = Agreement(Hasty(), 0, 0.0), []
    for step in range(1, 100):
        if step >= agreement.next_step:
            agreement.agree(step, wants_stop=False)
            met.append(step)
    assert met == [1, 3, 7, 15, 31, 63]
