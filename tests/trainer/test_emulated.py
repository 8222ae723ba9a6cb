"""Any accelerator: runs on a kind of device that Legato does not know (tests/emulated.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from waiting import free_port

from legato.base.errors import ConfigError
from legato.trainer import accelerators

TESTS = Path(__file__).parents[1]
TWO = {"replicas": 2, "strategy": "ddp"}
SLURM = {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "127.0.0.1"}


def slurm_rank(rank):
    return {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def start(place, cases, variables=None):
    """Start cases, each with its arguments and environment variables, in a process that has the device.

    Return it, and the file of results.
    """
    site = place / "site"
    if not site.exists():
        emulated.install(site)
    results = place / f"{len(list(place.iterdir()))}.json"
    paths = [str(site), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(variables or {})}
    command = [sys.executable, str(TESTS / "emulated_cases.py"), json.dumps(cases), str(results)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True), results


def start_fit(place, variables=None, **arguments):
    arguments = {"accelerator": "emul", "folder": str(place / "runs"), **arguments}
    return start(place, {"fit": ("fit", arguments, {})}, variables)


def finish(process, results):
    """Return what the case of a process returned, and what it wrote as errors."""
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(results.read_text())["fit"]["result"], errors


class Results(dict):
    """What each case returned, by name."""

    def __getitem__(self, name):
        returned = super().__getitem__(name)
        assert "error" not in returned, returned["error"]
        return returned["result"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the results of all cases of one process, from one start."""
    folder = tmp_path_factory.mktemp("alone")
    fits = {
        "cpu": {"accelerator": "cpu"},
        "emul": {},
        "two replicas": {"replicas": 2},
        "began": {"steps": 3},
        "resumed": {"resume": "auto", "folder": str(folder / "began")},
    }
    for precision in ("bf16-mixed", "16-mixed"):
        fits |= {f"{kind}, {precision}": {"accelerator": kind, "precision": precision} for kind in ("cpu", "emul")}
    cases = {name: (name, {}, {}) for name in ("choice", "generators", "mixed")}
    for name, arguments in fits.items():
        cases[name] = "fit", {"accelerator": "emul", "folder": str(folder / name), **arguments}, {}
    trainers = [{"accelerator": "emul", **arguments} for arguments, _ in REFUSED]
    cases["refused"] = "refused", {"trainers": trainers}, {"EMUL_AUTOCAST": "bfloat16"}
    trainers = [{"accelerator": "emul", **TWO}]
    cases["refused in SLURM"] = "refused", {"trainers": trainers}, {**SLURM, **slurm_rank(0), "EMUL_VISIBLE": ""}
    process, results = start(folder, cases)
    _, errors = process.communicate(timeout=300)
    assert results.exists(), errors
    return Results(json.loads(results.read_text()))


@pytest.mark.slow
def test_it_is_found_and_named(alone):
    answers = alone["choice"]
    assert (answers["auto"], answers["emul"], answers["cpu"]) == ("emul:0", "emul:0", "cpu")
    assert answers["emul:0"] == "emul:0"
    assert (answers["name"], answers["backend"]) == ("Emulated accelerator", "cpu:gloo,emul:emulccl")
    assert answers["memory"] == [2**30, 2**20, False]
    assert "torch found no such device on this machine. Try accelerator=emul" in answers["error"]


@pytest.mark.slow
def test_its_generators_are_keyed_and_put_back(alone):
    assert alone["generators"] == {"states": 1, "calls": ["manual_seed_all", "set_rng_state"]}


@pytest.mark.slow
def test_a_tensor_elsewhere_is_refused(alone):
    assert "tensors on cpu and on emul" in alone["mixed"]["error"]


@pytest.mark.slow
def test_it_trains_as_the_cpu_does(alone):
    on_cpu, on_device = alone["cpu"], alone["emul"]
    assert (on_cpu["device"], on_device["device"]) == ("cpu", "emul:0")
    assert on_device["metrics"] == pytest.approx(on_cpu["metrics"], abs=1e-4)
    assert on_device["weights"] == pytest.approx(on_cpu["weights"], abs=1e-3)


@pytest.mark.slow
def test_batches_come_on_a_stream_of_their_own(alone):
    calls = set(alone["emul"]["calls"])
    assert {"stream", "record_stream", "wait_stream", "event.synchronize", "copy non_blocking=True"} <= calls


@pytest.mark.slow
def test_its_generator_is_keyed_for_each_batch(alone):
    assert "manual_seed_all" in alone["emul"]["calls"]


@pytest.mark.slow
def test_the_record_names_it(alone):
    directory = Path(alone["emul"]["directory"])
    start = json.loads((directory / "environment.json").read_text())["starts"][0]
    assert (start["device"], start["device_memory"]) == ("Emulated accelerator", 2**30)
    assert '"DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current": 1024' in (
        directory / "metrics.jsonl"
    ).read_text().replace("1024.0", "1024")


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(alone):
    assert alone["began"]["weights"] != alone["resumed"]["weights"] == alone["emul"]["weights"]


@pytest.mark.slow
def test_ddp_trains_on_two_processes(tmp_path, alone):
    """Started as two nodes, each with the device."""
    port, two_replicas = str(free_port()), alone["two replicas"]
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    started = [
        start_fit(tmp_path, {**shared, "MASTER_PORT": port, "RANK": rank, "GROUP_RANK": rank}, **TWO)
        for rank in ("0", "1")
    ]
    (first, _), (second, _) = (finish(*each) for each in started)
    assert first["world_size"] == second["world_size"] == 2
    assert first["weights"] == second["weights"]
    assert "allreduce" in first["calls"]
    assert first["metrics"] == pytest.approx(two_replicas["metrics"], abs=1e-4)
    assert first["weights"] == pytest.approx(two_replicas["weights"], abs=1e-3)


@pytest.mark.slow
def test_two_processes_share_a_device(tmp_path, alone):
    two_replicas = alone["two replicas"]
    together, log = finish(*start_fit(tmp_path, devices=[0, 0], strategy="ddp"))
    assert "ranks 0-1 on emul:0 Emulated accelerator" in log
    assert log.count("Ranks on the same device share its memory and compute.") == 1
    assert together["metrics"] == pytest.approx(two_replicas["metrics"], abs=1e-4)
    assert together["weights"] == pytest.approx(two_replicas["weights"], abs=1e-3)


@pytest.mark.slow
def test_each_process_sees_the_one_device_that_a_launcher_gives_it(tmp_path, alone):
    """As under SLURM's --gpus-per-task=1: two ranks of a node, each of which sees one device with index 0."""
    slurm = {**SLURM, "MASTER_PORT": str(free_port())}
    started = [
        start_fit(tmp_path, {**slurm, **slurm_rank(rank), "EMUL_VISIBLE": f"{4 + rank}"}, **TWO) for rank in (0, 1)
    ]
    (first, log), (second, _) = (finish(*each) for each in started)
    assert "rank 0 on emul:0 Emulated accelerator (4); rank 1 on emul:0 Emulated accelerator (5)" in log
    assert "share" not in log
    assert (first["world_size"], first["device"]) == (2, "emul:0")
    assert first["weights"] == second["weights"] == pytest.approx(alone["two replicas"]["weights"], abs=1e-3)
    wanted = "runs 2 processes, but trainer.devices lists 1 emul devices. Start one process per device"
    assert wanted in alone["refused in SLURM"][0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_it_trains_in_half_precision(alone, precision):
    where = {"cpu": "cpu", "emul": "emul:0"}
    runs = {kind: alone[f"{kind}, {precision}"] for kind in where}
    assert {kind: result["device"] for kind, result in runs.items()} == where
    assert runs["emul"]["metrics"] == pytest.approx(runs["cpu"]["metrics"], abs=0.05)
    dtype = "torch.float16" if precision == "16-mixed" else "torch.bfloat16"
    assert f"conv2d.default in {dtype}" in runs["emul"]["calls"]


REFUSED = [
    ({"precision": "16-mixed"}, "torch doesn't support torch.float16 autocast on emul. Use 32-true."),
    (
        {"accelerator": "emul:0", "devices": 1},
        "selects one device, but trainer.devices=1 selects others. Set accelerator=emul",
    ),
    ({"devices": [1]}, "expected emul device indices below 1"),
    ({"devices": [0, 0], "strategy": "data_parallel"}, "To share a device, use several processes (strategy=ddp)"),
    (
        {"devices": [0, 0], "strategy": {"name": "ddp_model_parallel"}},
        "for one process, which needs distinct devices",
    ),
    ({"devices": [0, 0], "strategy": {"name": "ddp", "process_group_backend": "gloo"}}, "its gloo supports"),
]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_it_cannot_do_is_refused(alone, index):
    assert REFUSED[index][1] in alone["refused"][index]


def test_without_one_there_is_the_cpu():
    assert accelerators.find_kind("auto") in accelerators.find_kinds()
    with pytest.raises(ConfigError, match="torch found no such device on this machine"):
        accelerators.find_kind("emul")
