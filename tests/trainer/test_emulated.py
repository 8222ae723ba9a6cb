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


def start(place, case, variables=None, **arguments):
    """Start a case in a process that has the device; return it, and the file of its result."""
    site = place / "site"
    if not site.exists():
        emulated.install(site)
    result = place / f"{case}-{len(list(place.iterdir()))}.json"
    paths = [str(site), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(variables or {})}
    command = [sys.executable, str(TESTS / "emulated_cases.py"), case, json.dumps(arguments), str(result)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True), result


def finish(process, result):
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(result.read_text())


def run(place, case, **arguments):
    return finish(*start(place, case, **arguments))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    return run(folder, "fit", accelerator="cpu", folder=str(folder / "runs"))


@pytest.fixture(scope="module")
def on_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emul")
    return run(folder, "fit", accelerator="emul", folder=str(folder / "runs"))


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    return run(folder, "fit", accelerator="emul", folder=str(folder / "runs"), replicas=2)


@pytest.mark.slow
def test_it_is_found_and_named(tmp_path):
    answers = run(tmp_path, "choice")
    assert (answers["auto"], answers["emul"], answers["cpu"]) == ("emul:0", "emul:0", "cpu")
    assert answers["emul:0"] == "emul:0"
    assert (answers["name"], answers["backend"]) == ("Emulated accelerator", "cpu:gloo,emul:emulccl")
    assert answers["memory"] == [2**30, 2**20, False]
    assert "torch found no such device on this machine. Try accelerator=emul" in answers["error"]


@pytest.mark.slow
def test_its_generators_are_keyed_and_put_back(tmp_path):
    assert run(tmp_path, "generators") == {"states": 1, "calls": ["manual_seed_all", "set_rng_state"]}


@pytest.mark.slow
def test_a_tensor_elsewhere_is_refused(tmp_path):
    assert "tensors on cpu and on emul" in run(tmp_path, "mixed")["error"]


@pytest.mark.slow
def test_it_trains_as_the_cpu_does(on_cpu, on_device):
    assert (on_cpu["device"], on_device["device"]) == ("cpu", "emul:0")
    assert on_device["metrics"] == pytest.approx(on_cpu["metrics"], abs=1e-4)
    assert on_device["weights"] == pytest.approx(on_cpu["weights"], abs=1e-3)


@pytest.mark.slow
def test_batches_come_on_a_stream_of_their_own(on_device):
    assert {"stream", "record_stream", "wait_stream", "event.synchronize"} <= set(on_device["calls"])
    assert "copy non_blocking=True" in on_device["calls"]


@pytest.mark.slow
def test_its_generator_is_keyed_for_each_batch(on_device):
    assert "manual_seed_all" in on_device["calls"]


@pytest.mark.slow
def test_the_record_names_it(on_device):
    directory = Path(on_device["directory"])
    start = json.loads((directory / "environment.json").read_text())["starts"][0]
    assert (start["device"], start["device_memory"]) == ("Emulated accelerator", 2**30)
    assert '"DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current": 1024' in (
        directory / "metrics.jsonl"
    ).read_text().replace("1024.0", "1024")


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path, on_device):
    run(tmp_path, "fit", accelerator="emul", folder=str(tmp_path / "runs"), steps=3)
    resumed = run(tmp_path, "fit", accelerator="emul", folder=str(tmp_path / "runs"), resume="auto")
    assert resumed["weights"] == on_device["weights"]


@pytest.mark.slow
def test_ddp_trains_on_two_processes(tmp_path, two_replicas):
    """Started as two nodes, each with the device."""
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = {"accelerator": "emul", "folder": str(tmp_path / "runs"), "replicas": 2, "strategy": "ddp"}
    started = [
        start(tmp_path, "fit", {**shared, "MASTER_PORT": port, "RANK": rank, "GROUP_RANK": rank}, **arguments)
        for rank in ("0", "1")
    ]
    first, second = (finish(*each) for each in started)
    assert first["world_size"] == second["world_size"] == 2
    assert first["weights"] == second["weights"]
    assert "allreduce" in first["calls"]
    assert first["metrics"] == pytest.approx(two_replicas["metrics"], abs=1e-4)
    assert first["weights"] == pytest.approx(two_replicas["weights"], abs=1e-3)


@pytest.mark.slow
def test_two_processes_share_a_device(tmp_path, two_replicas):
    arguments = {"accelerator": "emul", "folder": str(tmp_path / "runs"), "devices": [0, 0], "strategy": "ddp"}
    process, result = start(tmp_path, "fit", **arguments)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    together = json.loads(result.read_text())
    assert "ranks 0-1 on emul:0 Emulated accelerator" in log
    assert log.count("Ranks on the same device share its memory and compute.") == 1
    assert together["metrics"] == pytest.approx(two_replicas["metrics"], abs=1e-4)
    assert together["weights"] == pytest.approx(two_replicas["weights"], abs=1e-3)


@pytest.mark.slow
def test_each_process_sees_the_one_device_that_a_launcher_gives_it(tmp_path, two_replicas):
    """As under SLURM's --gpus-per-task=1: two ranks of a node, each of which sees one device with index 0."""
    slurm = {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    slurm |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = {"accelerator": "emul", "folder": str(tmp_path / "runs"), "replicas": 2, "strategy": "ddp"}

    def fit(**variables):
        ranks = ({"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "EMUL_VISIBLE": f"{4 + int(rank)}"} for rank in "01")
        return [start(tmp_path, "fit", {**slurm, **rank, **variables}, **arguments) for rank in ranks]

    processes = fit()
    logs = [process.communicate(timeout=120)[1] for process, _ in processes]
    assert [process.returncode for process, _ in processes] == [0, 0], logs
    assert "rank 0 on emul:0 Emulated accelerator (4); rank 1 on emul:0 Emulated accelerator (5)" in logs[0]
    assert "share" not in logs[0]
    first, second = (json.loads(result.read_text()) for _, result in processes)
    assert (first["world_size"], first["device"]) == (2, "emul:0")
    assert first["weights"] == second["weights"] == pytest.approx(two_replicas["weights"], abs=1e-3)

    refused = [process.communicate(timeout=120)[1] for process, _ in fit(EMUL_VISIBLE="")]
    assert "runs 2 processes, but trainer.devices lists 1 emul devices. Start one process per device" in refused[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_it_trains_in_half_precision(tmp_path, precision):
    where = {"cpu": "cpu", "emul": "emul:0"}
    runs = {
        kind: run(tmp_path, "fit", accelerator=kind, folder=str(tmp_path / kind), precision=precision) for kind in where
    }
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


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The error of each of REFUSED, in order: one process makes all trainers."""
    trainers = [{"accelerator": "emul", **arguments} for arguments, _ in REFUSED]
    started = start(tmp_path_factory.mktemp("refused"), "refused", {"EMUL_AUTOCAST": "bfloat16"}, trainers=trainers)
    return finish(*started)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_it_cannot_do_is_refused(errors, index):
    assert REFUSED[index][1] in errors[index]


def test_without_one_there_is_the_cpu():
    assert accelerators.find_kind("auto") in accelerators.find_kinds()
    with pytest.raises(ConfigError, match="torch found no such device on this machine"):
        accelerators.find_kind("emul")
