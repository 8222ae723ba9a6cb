"""Python's garbage collections: when they run, what they free, and that the settings are restored.

They visit every object, and a process that has collected all tests has a million. So collections run in workers.
"""

import gc
import inspect
import time
import weakref
from functools import partial

import pytest
import torch
from tiny import Tiny, assert_same_bits, make_loader, make_trainer

from legato.trainer.processes import agreement
from legato.trainer.processes.agreement import COLLECTION_SECONDS, GarbageCollector
from legato.trainer.processes.launch import run_workers


class Node:
    """Refers to itself, so that only the garbage collector can free it."""

    def __init__(self):
        self.itself = self


class Littering(Tiny):
    """Makes many lasting objects in each step, and one that is garbage; notes full collections and where they ran."""

    def __init__(self, objects=60_000, pause=0.0):
        super().__init__()
        self.objects, self.pause, self.kept = objects, pause, []
        self.within, self.places, self.garbage, self.frozen = False, [], [], []

    def on_fit_start(self):
        gc.callbacks.append(self.note)

    def teardown(self, stage):
        gc.callbacks.remove(self.note)

    def note(self, phase, details):
        if phase == "start" and details["generation"] == 2:
            ours = inspect.currentframe().f_back.f_code is GarbageCollector.collect.__code__
            self.places.append((self.within, self.global_step, ours))

    def training_step(self, batch, batch_idx):
        self.within = True
        self.kept.append([[] for _ in range(self.objects)])
        node = Node()
        self.garbage.append(weakref.ref(node))
        del node
        time.sleep(self.pause)
        loss = super().training_step(batch, batch_idx)
        self.within = False
        self.frozen.append(gc.get_freeze_count() > 0)
        return loss


def in_worker(work):
    """Run a function of a folder as a test in a new process, which must return collections to Python."""

    def test(tmp_path):
        run_workers(partial(restoring, work, tmp_path), 1)

    return test


def often(seconds):
    """Collect at a short interval in this worker."""
    agreement.FIRST_COLLECTION = agreement.COLLECTION_SECONDS = seconds


def light():
    """Let collections in this worker visit only what it makes from now on, as often as they are asked for."""
    gc.freeze()
    gc.unfreeze, gc.get_freeze_count = lambda: None, lambda: 0


def restoring(work, folder):
    before = gc.get_threshold()
    work(folder)
    assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == (before, 0, True)


@pytest.mark.slow
@in_worker
def test_full_collections_run_between_steps(folder):
    steady, as_ever = Littering(pause=0.03), Littering(objects=120_000)  # a quarter of all objects is new, if not more
    make_trainer(folder).fit(as_ever, make_loader(32, 4))
    as_ever.kept.clear()
    often(0.05)
    make_trainer(folder).fit(steady, make_loader(32, 4))
    begun = [place for place in steady.places if place[2]]
    assert any(steady.frozen)
    assert begun
    assert not any(within for within, _, _ in begun)
    assert any(within for within, _, _ in as_ever.places)
    assert not any(as_ever.frozen)
    assert_same_bits(steady, as_ever)


@pytest.mark.slow
@in_worker
def test_garbage_of_steps_is_freed_on_the_way(folder):
    task = Littering(objects=10, pause=0.02)
    alive = []
    task.on_train_end = lambda: alive.extend(reference() is not None for reference in task.garbage)
    before = gc.get_threshold()
    gc.set_threshold(10**8, *before[1:])  # nothing but what is asked for
    try:
        often(0.2)
        make_trainer(folder, max_epochs=2).fit(task, make_loader(48, 4))
    finally:
        gc.set_threshold(*before)
    assert len(alive) == 24
    assert sum(alive) < 18


@in_worker
def test_a_short_run_pays_nothing(folder):
    task = Littering(objects=10)
    make_trainer(folder).fit(task, make_loader())
    assert not any(task.frozen)


@in_worker
def test_what_is_frozen_is_looked_at_again(folder):
    node, collector = Node(), GarbageCollector()
    seen = weakref.ref(node)
    collector.collect(3.0)
    assert gc.get_freeze_count() == 0
    collector.collect(11.0)
    assert gc.get_freeze_count() > 1000
    del node
    collector.collect(25.0)
    assert seen() is not None  # frozen
    collector.collect(11.0 + COLLECTION_SECONDS)
    assert seen() is None
    collector.close()


@in_worker
def test_ranks_that_join_later_collect_when_the_others_do(folder):
    often(10.0)
    light()
    when = {}
    for name, start in {"first": 0, "later": 18}.items():
        collector = GarbageCollector()
        for elapsed in range(start, 60, 3):
            before = []
            gc.callbacks.append(lambda phase, details, before=before: before.append(details["generation"]))
            collector.collect(float(elapsed))
            gc.callbacks.pop()
            if 2 in before:
                when.setdefault(name, []).append(elapsed)
        collector.close()
    assert when == {"first": [12, 21, 30, 42, 51], "later": [21, 30, 42, 51]}


def put_back(how, folder):
    class Ends(Littering):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if not gc.get_freeze_count():
                return
            before = gc.get_threshold()
            if how == "within another run":
                inner = make_trainer(folder / "inner")
                inner.fit(Littering(objects=10, pause=0.02), make_loader())
                assert gc.get_threshold() == before
                assert gc.get_freeze_count() > 1000
            if how == "error":
                raise ValueError("a mistake")
            self.trainer.should_stop = how != "in an evaluation"

        def validation_step(self, batch, batch_idx):
            if how == "in an evaluation" and gc.get_freeze_count():
                raise ValueError("a mistake")

    often(0.05)
    made = make_trainer(folder, max_epochs=50)
    task = Ends(objects=10, pause=0.01)
    if how == "within another run":
        made.fit(task, make_loader(), make_loader())
    else:
        with pytest.raises(ValueError, match="a mistake"):
            made.fit(task, make_loader(), make_loader())
    assert any(task.frozen)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "within another run", "in an evaluation"])
def test_it_is_put_back(tmp_path, how):
    in_worker(partial(put_back, how))(tmp_path)


@in_worker
def test_what_a_user_has_chosen_stays(folder):
    often(0.01)
    for choose, undo in ((gc.disable, gc.enable), (gc.freeze, gc.unfreeze)):
        choose()
        try:
            before, task = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0), Littering(10, pause=0.02)
            make_trainer(folder).fit(task, make_loader())
            assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0) == before
            assert set(task.frozen) == {before[2]}
        finally:
            undo()


@pytest.mark.slow
def test_all_ranks_pause_at_the_same_steps(tmp_path):
    def work():
        task = Littering(objects=10, pause=0.01)
        often(0.1)
        light()
        options = {"strategy": "ddp", "devices": 2, "log_every_n_steps": 5}
        made = make_trainer(tmp_path, **options, max_epochs=2)
        made.fit(task, make_loader(80))
        mine = torch.zeros(made.global_step + 1)
        mine[[step for _, step, ours in task.places if ours]] = 1
        return [item.tolist() for item in made.strategy.collectives.gather_objects(mine)]

    first, second = run_workers(work, 2)
    assert first == second
    assert 0 < sum(first) < len(first)
