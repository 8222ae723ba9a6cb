"""The places of processes that another launcher has started, and their rendezvous."""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from forked import Forked, completed, run_module, run_script
from waiting import free_port, own_lines

from legato.base.errors import ConfigError
from legato.base.place import Place, find_place
from legato.trainer import accelerators
from legato.trainer.processes.rendezvous import find_store, first_host, join_process_group

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = ("SLURM_", "OMPI_", "PMI_", "MPI_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "MASTER_", "RANK", "WORLD_SIZE")
    for name in list(os.environ):
        if name.startswith((*prefixes, "NODE_RANK", "LEGATO_WORKER")):
            monkeypatch.delenv(name)


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ("", None),
        ("RANK=1 WORLD_SIZE=2", Place(1, 1, 0, 2, 2, 1, "environment")),
        (
            "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 TORCHELASTIC_RUN_ID=x",
            Place(5, 1, 1, 8, 4, 2, "torchrun"),
        ),
        ("LEGATO_WORKER=1:0 RANK=0 WORLD_SIZE=2", None),  # started by a worker, and no member of its group
        ("SLURM_JOB_NAME=bash SLURM_PROCID=0 SLURM_NTASKS=1", None),  # an interactive shell
        ("SLURM_JOB_NAME=bash SLURM_PROCID=1 SLURM_NTASKS=2", Place(1, 1, 0, 2, 2, 1, "slurm")),
        ("SLURM_NTASKS=4", None),  # the shell of an allocation
        (
            "SLURM_PROCID=4 SLURM_NTASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_NNODES=3 SLURM_TASKS_PER_NODE=2(x2),1",
            Place(4, 0, 2, 5, 1, 3, "slurm"),
        ),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            Place(3, 1, 1, 4, 2, 2, "mpi"),
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", Place(1, 1, 0, 2, 2, 1, "mpi")),
    ],
)
def test_places_by_variables(variables: str, place: Place | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert find_place() == place
    assert find_place("off") is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=1", "RANK is set, but WORLD_SIZE is not.*trainer.cluster=off"),
        ("WORLD_SIZE=2", "WORLD_SIZE is set, but RANK is not"),
        ("RANK=one WORLD_SIZE=2", "RANK must be an integer, got 'one'"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2 must be less than WORLD_SIZE=2"),
        ("RANK=0 WORLD_SIZE=0", "RANK=0 must be less than WORLD_SIZE=0"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=3", "LOCAL_RANK=3 must be less than LOCAL_WORLD_SIZE=2"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4 must be at most WORLD_SIZE=2"),
        ("SLURM_PROCID=4 SLURM_NTASKS=4", "SLURM_PROCID=4 must be less than SLURM_NTASKS=4"),
        ("PMI_RANK=4 PMI_SIZE=4", "PMI_RANK=4 must be less than PMI_SIZE=4"),
    ],
)
def test_variables_that_do_not_fit_are_named(variables: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError, match=message):
        find_place()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-005,7],cpu1", "gpu003"),
        ("a1,a2", "a1"),
        ("n[7,9]-ib,x", "n7-ib"),
        ("host-1.example", "host-1.example"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


# --- joining what others have started -------------------------------------------------------------------------------

JOINER = """
import json, os, sys
from datetime import timedelta
import torch
from torch import distributed
from legato.base.place import find_place
from legato.trainer.processes.rendezvous import join_process_group, leave_process_group

for variables, init_method in json.loads(sys.argv[1]):
    os.environ.update(variables)
    place = find_place()
    join_process_group(place, "gloo", timedelta(seconds=30), init_method)
    total = torch.ones(1) * (place.rank + 1)
    distributed.all_reduce(total)
    leave_process_group()
    print(place.origin, place.rank, place.local_rank, place.world_size, place.nodes, total.item(), flush=True)
    for name in variables:
        del os.environ[name]
"""


@pytest.mark.slow
def test_the_steps_of_slurm_jobs_with_ids_in_a_row_meet_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO", "NCCL", "TP"):
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", "lo")
    met = []
    for job, step in ((5000, 0), (5000, 1), (5000, 2), (5001, 0), (5001, 1)):
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        monkeypatch.setenv("SLURM_STEP_ID", str(step))
        met.append(find_store(Place(origin="slurm"), TIMEOUT))  # kept open
    assert len({address for address, _ in met}) == 5


def test_two_terminals_slurm_and_mpi_join(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOINER)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    by_tcp, at_slurm, at_mpi = f"tcp://localhost:{free_port()}", free_port(), free_port()
    processes = []
    for rank in ("0", "1"):
        hand = {"RANK": rank, "WORLD_SIZE": "2"}
        slurm = {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        slurm |= {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu[003-004]", "MASTER_PORT": str(at_slurm)}
        mpi = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        mpi |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(at_mpi)}
        meetings = [(hand | address, None), (hand, by_tcp), (hand | address, "env://")]
        meetings += [(slurm, None), (mpi, None)]
        processes.append(Forked(run_script, script, json.dumps(meetings)))
    try:
        outputs = [own_lines(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, output in enumerate(outputs):
        origins = ["environment"] * 3 + ["slurm", "mpi"]
        assert output == [f"{origin} {rank} {rank} 2 1 3.0" for origin in origins]


TORCHRUN = """
import os, pathlib, signal, sys
from datetime import timedelta
import torch
from torch import distributed
from legato.base.environment import restart_count
from legato.base.place import find_place
from legato.trainer.processes.rendezvous import join_process_group, leave_process_group

place = find_place()
join_process_group(place, "gloo", timedelta(seconds=30))
total = torch.ones(1)
distributed.all_reduce(total)
if restart_count() == 0 and place.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
distributed.all_reduce(total)
line = f"{place.origin} {place.local_rank} {place.world_size} {restart_count()} {total.item()}"
(pathlib.Path(sys.argv[1]) / f"rank-{place.rank}").write_text(line)
leave_process_group()
"""


@pytest.mark.slow
def test_torchrun_is_joined_and_its_restart_as_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    words = "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script)
    done = completed(run_module, *words, str(tmp_path), env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == [
        f"torchrun {rank} 2 1 4.0" for rank in (0, 1)
    ]


# --- meeting --------------------------------------------------------------------------------------------------------

PAIR = Place(0, 0, 0, 2, 2, 1, "environment")


def test_a_port_in_use_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"The rendezvous port {port} on 127.0.0.1.*in use.*init_method"):
            join_process_group(PAIR, "gloo", TIMEOUT, f"tcp://127.0.0.1:{port}")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigError, match=rf"The rendezvous port {port} on localhost.*in use.*MASTER_PORT"):
            join_process_group(PAIR, "gloo", TIMEOUT)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named() -> None:
    short, port = timedelta(seconds=0.5), free_port()
    alone = Place(1, 1, 0, 2, 2, 1, "environment")
    with pytest.raises(ConfigError, match=rf"Rank 1 of 2 found no store at 127.0.0.1:{port} within 0.5 s"):
        join_process_group(alone, "gloo", short, f"tcp://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"waited 0.5 s at 127.0.0.1:{port} for 2 ranks; missing: 1\."):
        join_process_group(PAIR, "gloo", short, f"tcp://127.0.0.1:{port}")
    socket.create_server(("127.0.0.1", port)).close()  # the port is free again


@pytest.mark.parametrize(
    ("init_method", "message"),
    [
        ("tpc://localhost:1", "init_method must be 'env://' or 'tcp://HOST:PORT', got 'tpc"),
        ("tcp://localhost", "init_method must be"),
        ("tcp://localhost:99999", "init_method must be"),
        ("tcp://localhost:2000?rank=0", "init_method must be.*RANK and WORLD_SIZE"),
        ("file:///not/there/met", "init_method must be 'env://' or 'tcp://HOST:PORT'"),
        ("tcp://no-such-host.invalid:2000", "Unknown host 'no-such-host.invalid'"),
        ("env://", "MASTER_ADDR='' and MASTER_PORT=''"),
    ],
)
def test_meeting_places_that_are_none(init_method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        join_process_group(PAIR, "gloo", TIMEOUT, init_method)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch was built without 'nccc'"):
        join_process_group(PAIR, "nccc", TIMEOUT)


def test_a_workspace_of_cublas_that_leaves_the_order_open_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    wanted = "require CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8, but it is ':0:0'"
    with pytest.raises(ConfigError, match=wanted), accelerators.deterministic_cublas("cuda"):
        pass
    with accelerators.deterministic_cublas("cpu"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with accelerators.deterministic_cublas("cuda"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.slow
def test_workers_import_the_modules_beside_the_script_that_it_has_imported_for_their_effect(tmp_path):
    (tmp_path / "patches.py").write_text("import json\n\njson.patched = True\n")
    (tmp_path / "main.py").write_text(
        "import json\nimport sys\n\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import patches\n"
        "from legato.trainer.processes.launch import run_workers\n\n\n"
        "def look():\n    import json\n\n    return json.patched\n\n\n"
        "print(run_workers(look, 2))\n"
    )
    done = completed(run_script, tmp_path / "main.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True")
