"""Scripts that start workers: run once, stopped by Ctrl-C, killed, or started on each node."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, run_script
from waiting import free_port, own_lines, runs, wait_until

pytestmark = pytest.mark.slow


SCRIPT = """
from dataclasses import dataclass
import torch
from torch.utils.data import DataLoader, Dataset
from legato.trainer.processes.launch import run_workers

print("script runs")

@dataclass
class Batch:
    x: torch.Tensor

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return Batch(torch.tensor(index))

class Mistake(Exception):
    pass

collate = lambda items: Batch(torch.stack([item.x for item in items]))

def work():
    return list(DataLoader(Numbers(), batch_size=2, num_workers=1, collate_fn=collate))

def fail():
    raise Mistake("of the script")

batches = run_workers(lambda: work(), 1)
assert all(type(batch) is Batch for batch in batches)
print([batch.x.tolist() for batch in batches])
try:
    run_workers(fail, 1)
except Mistake as error:
    print("caught", error)
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """Its classes, its lambdas and the batches of its loader workers are sent anyway."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["script runs", "[[0, 1], [2, 3]]", "caught of the script"]


INTERRUPTED = """
import os, pathlib, signal, sys, time
from legato.trainer.processes.launch import run_workers
folder = pathlib.Path(sys.argv[1])

def save():
    told = []
    signal.signal(signal.SIGINT, lambda *_: told.append(1))
    (folder / ("ready-" + os.environ["RANK"])).touch()
    while len(told) < 2:
        if told:
            (folder / ("told-" + os.environ["RANK"])).touch()
        time.sleep(0.01)
    time.sleep(0.5)
    return "saved, told %d times" % len(told)

def sleep():
    (folder / ("asleep-" + os.environ["RANK"])).touch()
    time.sleep(60)

print(run_workers(save, 2), flush=True)
run_workers(sleep, 2)
"""


def test_ctrl_c_lets_workers_finish_and_a_second_one_breaks_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    process = Forked(run_script, script, str(tmp_path))
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        assert wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2, 60)
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until(lambda: len(list(tmp_path.glob("asleep-*"))) == 2, 60)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output == "saved, told 2 times\n"  # the second press is for processes that do not answer the first
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1


ORPHANS = """
import os, pathlib, sys, time
from datetime import timedelta
import torch
from torch import distributed
from legato.trainer.processes.launch import run_workers
from legato.base.place import find_place
from legato.trainer.processes.rendezvous import join_process_group
folder = pathlib.Path(sys.argv[1])

def work():
    place = find_place()
    join_process_group(place, "gloo", timedelta(seconds=60))
    (folder / ("ready-%d" % os.getpid())).touch()
    if place.rank == 0:
        distributed.all_reduce(torch.ones(1))
    while True:
        pass

run_workers(work, 2)
"""


def test_workers_die_with_their_caller(tmp_path: Path) -> None:
    """One waits in a collective, the other loops forever; the private folder is removed too."""
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    process = Forked(run_script, script, str(tmp_path), env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    orphans = [int(path.name.removeprefix("ready-")) for path in tmp_path.glob("ready-*")]
    assert wait_until(lambda: not any(runs(orphan) for orphan in orphans), 20)
    assert wait_until(lambda: not list(tmp_path.glob("legato-*")), 20)


NODE = """
import os
from datetime import timedelta
import torch
from torch import distributed
from legato.trainer.processes.launch import run_workers
from legato.base.place import find_place
from legato.trainer.processes.rendezvous import join_process_group

def work():
    place = find_place()
    join_process_group(place, "gloo", timedelta(seconds=30))
    total = torch.ones(1)
    distributed.all_reduce(total)
    return f"{place.rank} {place.local_rank} {place.node_rank} {place.world_size} {place.nodes} {total.item()}"

print(run_workers(work, 1, nodes=2))
"""


def test_one_launcher_a_node(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NODE)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [Forked(run_script, script, env=os.environ | address | {"NODE_RANK": node}) for node in ("0", "1")]
    try:
        outputs = [own_lines(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs == [["0 0 0 2 2 2.0"], ["1 0 1 2 2 2.0"]]
