"""Several nodes: two connected network namespaces, under torchrun and Legato's launcher; elastic nodes."""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, run_module, run_script
from torch.distributed import TCPStore
from waiting import kill_session

from legato.base.errors import ConfigError
from legato.base.place import Place
from legato.trainer.processes.layout import check_place, describe_layout

CABLE = """
set -e
unshare -n sleep 600 > /dev/null &
other=$!
trap 'kill $other' EXIT
for try in $(seq 1000); do
    [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ] && break
    sleep 0.02
done
ip link add left type veth peer name right
ip link set right netns $other
ip addr add 10.77.0.1/24 dev left
ip link set left up
ip link set lo up
nsenter -t $other -n sh -c 'ip addr add 10.77.0.2/24 dev right; ip link set right up; ip link set lo up'
echo $$ $other
read
"""
"""Holds two namespaces, which have each their own loopback and see each other through a veth pair only."""

TASK = """
import sys
import legato as lg
from launched_task import Line

trainer = lg.Trainer(accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, replicas=4, threads=1,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                     **dict(num_nodes=2, devices=2) if sys.argv[1:] == ["own"] else {})
trainer.fit(Line())
"""


CUT = """
import subprocess, sys, time
import legato as lg
from launched_task import Line

class Cut(Line):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 2 and self.global_rank == 0:
            subprocess.run(["ip", "link", "set", "left", "down"], check=True)
            print("cut", time.time(), flush=True)

limit = {"hang_timeout": 4.0} if sys.argv[1:] == ["hang"] else {}
strategy = "ddp" if limit else {"name": "ddp", "timeout": {"step": 4}}
trainer = lg.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, threads=1, num_nodes=2,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **limit)
try:
    trainer.fit(Cut())
finally:
    print("ended", time.time(), flush=True)
"""


@functools.cache
def alone():
    """The same four replicas in a single process."""
    import torch
    from launched_task import Line

    import legato as lg

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    task = Line()
    lg.Trainer(accelerator="cpu", strategy="single", replicas=4, max_epochs=1, **quiet).fit(task)
    assert torch.isfinite(task.slope).all()
    return f"slope {task.slope.item():.6f} after 3 steps"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copy(Path(__file__).parents[1] / "launched_task.py", tmp_path)
    (tmp_path / "script.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cable():
    """Return a process in each of two namespaces."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "nsenter", "ip", "bash"))):
        pytest.skip("network namespaces need Linux, unshare, nsenter, ip and bash")
    words = ["unshare", "-Urn", "bash", "-c", CABLE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        processes = holder.stdout.readline().split()
        if not processes:
            pytest.skip("network namespaces are not allowed here")
        yield processes
        holder.communicate("")


def run_there(cable, node, function, *arguments):
    """Call a function in the namespace of a node."""
    names = f"/proc/{cable[0]}/ns/user", f"/proc/{cable[node]}/ns/net"
    descriptors = [os.open(name, os.O_RDONLY) for name in names]
    for descriptor in descriptors:
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(descriptor)
    function(*arguments)


def ends_of(nodes):
    """Return the exit code of each process, its output and its errors."""
    try:
        ends = [node.communicate(timeout=240) for node in nodes]
        return [(node.returncode, *end) for node, end in zip(nodes, ends, strict=True)]
    finally:
        for node in nodes:
            kill_session(node.pid)


def on_two_nodes(cable, function, *words, interfaces=("left", "right")):
    """Run a program on both nodes: one that `function` runs by these words."""
    nodes = []
    for rank, interface in enumerate(interfaces):
        more = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400", "NODE_RANK": str(rank)}
        environment = {**os.environ, **more, "GLOO_SOCKET_IFNAME": interface}
        nodes.append(Forked(run_there, cable, rank, function, *words, env=environment))
    return ends_of(nodes)


def run_agent(script):
    """Run a script by torchrun, on the node of this process."""
    names = {"node-rank": "NODE_RANK", "master-addr": "MASTER_ADDR", "master-port": "MASTER_PORT"}
    where = [f"--{option}={os.environ[name]}" for option, name in names.items()]
    run_module("torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *where, script)


def assert_trained(first, second, launcher):
    """Check that both nodes have trained as one process does, and that rank 0 has said once who met."""
    assert first[0] == second[0] == 0, (first, second)
    assert [end[1].count(alone()) for end in (first, second)] == [2, 2]
    assert first[2].count(f"4 processes on 2 nodes, started by {launcher}, met at 10.77.0.1:29400") == 1
    assert "met at" not in "".join(second[1:])


@pytest.mark.slow
def test_two_nodes_with_torchrun(cable, folder):
    first, second = on_two_nodes(cable, run_agent, "script.py")
    assert_trained(first, second, "torchrun")
    assert "node 0 " in first[2]
    assert "node 1 " in first[2]


@pytest.mark.slow
def test_two_nodes_with_legatos_own_launcher(cable, folder):
    first, second = on_two_nodes(cable, run_script, "script.py", "own")
    assert_trained(first, second, "legato")
    assert "ranks 0-1 on cpu" in first[2]
    assert "ranks 2-3 on cpu" in first[2]


@pytest.mark.slow
def test_ranks_that_cannot_connect_end_with_one_sentence(cable, folder):
    for code, _, errors in on_two_nodes(cable, run_script, "script.py", "own", interfaces=("lo", "lo")):
        assert code == 1
        assert re.search(r"WorkerError: Rank \d of 4 cannot connect to the others", errors)
        assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that reaches the" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "head"),
    [
        ("step", "Rank 1 timed out: it has waited 4 s (trainer.strategy.timeout.step)"),
        ("hang", "No progress for 4 s (trainer.hang_t"),
    ],
)
def test_a_rank_that_has_lost_the_network_ends_after_its_limit(cable, folder, limit, head):
    """Rank 1 also loses the store, which is on rank 0's node, so it cannot read the other ranks' positions."""
    (folder / "cut.py").write_text(CUT)
    (code, *first), (other_code, *second) = on_two_nodes(cable, run_script, "cut.py", limit)
    out, second = "".join(first), "".join(second)
    assert code == other_code == 1, (out, second)
    assert "rank 1 is not responding: it was suspended, has exited, has no network" in out
    assert head in second
    assert "The positions of the other ranks are unknown: The ranks' shared store has not responded for 10 s." in second
    assert "rank 1 is waiting in backward for the other ranks' gradients" in second
    cut, ended = (float(re.search(rf"{word} ([\d.]+)", text)[1]) for word, text in (("cut", out), ("ended", second)))
    assert ended - cut < 60  # as long as it takes, it is not until the network is there again


@pytest.mark.slow
def test_torchruns_elastic_nodes(folder):
    """Two agents with one to two nodes, whose store survives the agent that ends first."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    words = ["torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=false,last_call_timeout=8"]
    words += ["--local-addr=127.0.0.1"]
    ends = ends_of([Forked(run_module, *words, "script.py") for _ in range(2)])
    assert [code for code, *_ in ends] == [0, 0], ends
    assert sum(out.count(alone()) for _, out, _ in ends) == 4
    assert sum(errors.count("4 processes on 2 nodes, started by torchrun") for *_, errors in ends) == 1


# --- the roll ---------------------------------------------------------------------------------------------------------
def test_the_roll_groups_ranks_by_node_and_device():
    entries = [(0, 0, "a", "cpu"), (1, 0, "a", "cpu"), (2, 1, "b", "cuda:0 H"), (3, 1, "b", "cuda:1 H")]
    assert describe_layout(entries, "slurm", "10.0.0.1:7").splitlines() == [
        "4 processes on 2 nodes, started by slurm, met at 10.0.0.1:7",
        "  node 0 a: ranks 0-1 on cpu",
        "  node 1 b: rank 2 on cuda:0 H; rank 3 on cuda:1 H",
    ]
    for origin, by in {"legato": "", "alone": "", "slurm": ", started by slurm"}.items():
        assert describe_layout(entries[:1], origin, "").splitlines()[0] == f"1 process on 1 node{by}"


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        (
            {"devices": 4},
            Place(0, 0, 0, 2, 2, 1, "torchrun"),
            "request 4 processes .*, but torchrun started 2",
        ),
        (
            {"devices": 1},
            Place(0, 0, 0, 2, 2, 1, "slurm"),
            "request 1 process .*, but slurm started 2",
        ),
        (
            {"devices": 2, "num_nodes": 2},
            Place(0, 0, 0, 2, 2, 1, "slurm"),
            "num_nodes=2 request .* 2 nodes, but slurm started 2",
        ),
        (
            {"devices": 2},
            Place(0, 0, 0, 8, 8, 1, "environment"),
            "num_nodes=1 request 2 .*, but WORLD_SIZE says 8",
        ),
        ({"devices": 2}, Place(0, 0, 0, 4, 2, 2, "torchrun"), None),
        ({"devices": "auto", "num_nodes": 2}, Place(0, 0, 0, 4, 2, 2, "slurm"), None),
        ({"devices": 2, "num_nodes": 4}, Place(0, 0, 0, 8, 8, 1, "environment"), None),
        ({"devices": 2}, Place(0, 0, 0, 2, 2, 1, "legato"), None),
    ],
)
def test_nodes_and_devices_must_agree_with_the_launcher(trainer, options, place, message):
    made = trainer(strategy="ddp", **options)
    if message is None:
        check_place(made, lambda: made.strategy.local_processes(made.device_list), place)
        return
    with pytest.raises(ConfigError, match=message):
        check_place(made, lambda: made.strategy.local_processes(made.device_list), place)
