"""launcher=slurm and launcher=ray, as the command line has them, up to the end of the run that they started."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import yaml
from tiny import Tiny, make_loader

import legato as lg
from legato.base.errors import ConfigError
from legato.cli.config.check import load_config
from legato.cli.launchers.launcher import Machines, machines_of
from legato.cli.launchers.ray import RayNode
from legato.cli.launchers.slurm import SlurmLauncher
from legato.cli.main import main
from legato.trainer.runs.record import read_starts

SLURM = """#!{python}
# Stands for SLURM on one machine: runs the script at once, and again as often as it asks to be queued again.
import os, subprocess, sys, time
from pathlib import Path

name, arguments, here = Path(sys.argv[0]).name, sys.argv[1:], Path(sys.argv[0]).parent
if name == "scontrol":
    (here / "requeued").write_text(" ".join(arguments))
elif name == "srun":
    command = [word for word in arguments if not word.startswith("--")]
    count = int(os.environ["SLURM_NTASKS"])
    ranks = [
        subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
        for rank in range(count)
    ]
    while "--kill-on-bad-exit=1" in arguments and any(rank.poll() is None for rank in ranks):
        time.sleep(0.02)
        if any(rank.poll() for rank in ranks):  # as SLURM's srun does it: the others end by SIGTERM, the job with 143
            [rank.terminate() for rank in ranks]
    sys.exit(max(code if code >= 0 else 128 - code for code in [rank.wait() for rank in ranks]))
else:
    (script,) = [word for word in arguments if not word.startswith("--")]
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in Path(script).read_text().splitlines() if line.startswith("#SBATCH")
    )
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    restarts = 0
    while True:
        job = {{"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": str(tasks), "SLURM_NODEID": "0",
               "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": str(tasks), "SLURM_RESTART_COUNT": str(restarts)}}
        with open(options["output"].replace("%j", "7"), "a") as output:
            code = subprocess.call(["bash", script], env={{**os.environ, **job}}, stdout=output, stderr=output,
                                   cwd=options["chdir"])
        if not (here / "requeued").exists():
            break
        assert (here / "requeued").read_text() == "requeue " + str(os.getpid())
        (here / "requeued").unlink()
        restarts += 1
    print("7;cluster")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and its task, which is the current one."""
    shutil.copy(Path(__file__).parents[2] / "launched_task.py", tmp_path)
    config = {
        "task": {"_target_": "launched_task.Line"},
        "run": {"name": "line", "root": "runs"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp",
            "max_epochs": 2,
            "replicas": 2,
            "threads": 1,
        },
    }
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def launch(*words):
    """Run the command line; return its exit code, which a launcher ends it with."""
    try:
        return main(["fit", "line.yaml", *words])
    except SystemExit as end:
        return end.code


# --- the config -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "launcher=slrum",
            "launcher must be one of slurm, ray, kubernetes, not the string 'slrum'. Did you mean 'slurm'?",
        ),
        ("launcher=slurm launcher.partion=a", "not an argument of the launcher 'slurm'. Did you mean 'partition'?"),
        ("launcher=ray launcher.cpus_per_process=two", "launcher.cpus_per_process must be int"),
        ("launcher=slurm launcher.options={signal: USR2}", "launcher.options.signal: expected a long sbatch option"),
        ("launcher=slurm launcher.options={-p: gpu}", "expected a long sbatch option without the dashes"),
        (
            "launcher=slurm trainer.devices=auto",
            "devices='auto' .* Set trainer.devices to the number of devices per node",
        ),
        ("launcher=slurm trainer.accelerator=auto", "accelerator='auto', .* trainer.accelerator to gpu or cpu"),
        ("launcher=ray trainer.num_nodes=2", "Ray has one machine, but trainer.num_nodes=2"),
        (
            "launcher=slurm trainer.strategy.elastic=true",
            "cannot be combined with an elastic run",
        ),
        ("lancher=slurm", "lancher is not a config key. Did you mean 'launcher'?"),
    ],
)
def test_mistakes_are_refused(folder, capsys, words, message):
    first, *rest = words.split(" launcher.")
    assert launch(*first.split(" "), *(f"launcher.{word}" for word in rest)) == 2
    error = capsys.readouterr().err
    assert __import__("re").search(message, error) or message in error
    assert not (folder / "runs").exists()


# --- slurm ------------------------------------------------------------------------------------------------------------
def test_a_dry_run_shows_the_script_and_writes_nothing(folder, capsys):
    words = ["launcher=slurm", "launcher.dry_run=true", "launcher.time=1-00:00:00", "launcher.memory=8G"]
    more = ["launcher.options={constraint: a 100, exclusive: true}", "launcher.setup=[module load x]"]
    gpus = ["trainer.num_nodes=3", "trainer.accelerator=cuda", "trainer.devices=[0, 1, 2, 3]"]
    assert launch(*words, *more, *gpus) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")}
    assert options == {
        *("job-name=line", "nodes=3", "ntasks-per-node=4", "gpus-per-node=4", "time=1-00:00:00", "mem=8G"),
        *(f"chdir={folder}", f"output={folder}/runs/line/slurm/%j.out", "open-mode=append", "requeue"),
        *("signal=USR1@120", "constraint='a 100'", "exclusive"),
    }
    assert lines.index("module load x") < next(i for i, line in enumerate(lines) if line.startswith("srun "))
    assert not (folder / "runs").exists()
    assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, timeout=60).returncode == 0


def test_processes_that_share_a_device_are_given_one(folder, capsys):
    words = ["launcher=slurm", "launcher.dry_run=true", "trainer.accelerator=cuda", "trainer.devices=[0, 0]"]
    assert launch(*words) == 0
    script = capsys.readouterr().out
    assert "--ntasks-per-node=2" in script
    assert "--gpus-per-node=1" in script


def test_what_sbatch_says_is_passed_on(folder, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    assert launch("launcher=slurm") == 1
    assert "cannot run sbatch (No such file or directory)" in capsys.readouterr().err
    (folder / "sbatch").write_text("#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    assert launch("launcher=slurm") == 1
    assert "job-0002.sh` failed: invalid partition." in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_that_is_preempted_is_queued_again_and_goes_on(folder, capsys, monkeypatch):
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        ranks_fork = f" {forked.__file__}" if name == "srun" else ""
        (tools / name).write_text(SLURM.format(python=f"{sys.executable}{ranks_fork}"))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    earlier = folder / "runs" / "line" / "version_0" / "checkpoints"
    earlier.mkdir(parents=True)  # an earlier run, with which a job that is queued again must not go on
    assert launch("launcher=slurm", "task.at=3", "task.then=stop", "task.rank=1", "trainer.requeue=true") == 0
    out = capsys.readouterr().out
    assert "Job     7, 1 x 2 processes" in out
    assert (folder / "noted").exists()
    output = (folder / "runs" / "line" / "slurm" / "7.out").read_text()
    assert "SIGUSR1: stopped at step" in output
    assert "scontrol" not in output  # the script asks for a new start, and the run does not besides
    assert output.count("2 processes on 1 node, started by slurm, met at 127.0.0.1:") == 2
    assert output.count("after 12 steps") == 2  # of each rank, once: the first run did not get there
    assert sorted(path.name for path in (folder / "runs" / "line").iterdir()) == ["slurm", "version_0", "version_1"]
    stored = yaml.safe_load((folder / "runs" / "line" / "slurm" / "job-0001.yaml").read_text())
    assert "launcher" not in stored
    assert stored["trainer"]["requeue"] is False


def start_in_job(monkeypatch, root, job, restarts=0, **options):
    """Train, or go on, as a process of a SLURM job of one task; return the trainer."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    options = {"default_root_dir": root, "run_name": "line", "accelerator": "cpu", "devices": 1, **options}
    trainer = lg.Trainer(enable_progress_bar=False, enable_model_summary=False, **options)
    trainer.fit(Tiny(), make_loader(32), resume="auto" if restarts else None)
    return trainer


@pytest.mark.slow
def test_a_job_that_is_queued_again_goes_on_with_the_run_that_it_has_begun(tmp_path, monkeypatch):
    """Another job's run of the same name is newer, and further."""
    began = start_in_job(monkeypatch, tmp_path, "70", max_steps=3)
    second = start_in_job(monkeypatch, tmp_path, "71", max_steps=9)
    again = start_in_job(monkeypatch, tmp_path, "70", restarts=1, max_steps=5)
    assert [Path(trainer.run_dir).name for trainer in (began, second, again)] == ["version_0", "version_1", "version_0"]
    assert again.global_step == 5
    assert [start["step"] for start in read_starts(again.run_dir)] == [0, 3]
    unknown = start_in_job(monkeypatch, tmp_path, "72", restarts=1, max_steps=11)  # as a job's first start would do
    assert unknown.run_dir == second.run_dir


def test_a_job_that_is_queued_again_without_a_checkpoint_begins_anew(tmp_path, monkeypatch):
    empty = start_in_job(monkeypatch, tmp_path, "70", max_steps=3, enable_checkpointing=False)
    second = start_in_job(monkeypatch, tmp_path, "71", max_steps=9)
    again = start_in_job(monkeypatch, tmp_path, "70", restarts=1, max_steps=5)
    assert again.run_dir not in (empty.run_dir, second.run_dir)
    assert [start["step"] for start in read_starts(again.run_dir)] == [0]


@pytest.mark.parametrize(("job", "restarts", "resumes"), [("70", 0, False), ("70", 1, True), ("7", 1, False)])
def test_the_script_resumes_only_a_run_of_its_own_job(folder, monkeypatch, capsys, job, restarts, resumes):
    assert launch("launcher=slurm", "launcher.dry_run=true", "run.root=other runs") == 0
    script = capsys.readouterr().out
    start_in_job(monkeypatch, folder / "other runs", "70", max_steps=1)
    (folder / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "srun").chmod(0o755)
    variables = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts), "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" resume=auto\n") == resumes


DOCS = Path(__file__).parents[3] / "docs" / "launching.md"


@pytest.mark.parametrize("name", ["slurm", "ray", "kubernetes"])
def test_the_command_of_the_docs_fits_its_config(name, capsys, monkeypatch):
    text = DOCS.read_text().replace("\\\n", " ")
    (command,) = (
        line.split() for line in text.splitlines() if line.startswith(f"legato fit digits.yaml launcher={name}")
    )
    monkeypatch.chdir(DOCS.parents[1])
    if name == "ray":
        config = load_config(command[2:])
        assert machines_of(config, name) == Machines(2, 4, 4)
        return
    with pytest.raises(SystemExit) as end:
        main([*command[1:], "launcher.dry_run=true"])
    assert end.value.code == 0, capsys.readouterr().err


# --- kubernetes -------------------------------------------------------------------------------------------------------
def manifests(capsys, *words):
    more = ["launcher=kubernetes", "launcher.image=me/train:1", "launcher.dry_run=true", *words]
    assert launch(*more) == 0
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(capsys.readouterr().out)}


GPUS = ["trainer.num_nodes=3", "trainer.accelerator=cuda", "trainer.devices=4", "launcher.claim=runs"]


def test_an_indexed_job_has_a_pod_for_each_node(folder, capsys):
    documents = manifests(capsys, *GPUS, "launcher.memory=64Gi", "launcher.environment={A: x}", "run.name=My Run")
    job = documents["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    overrides = ["trainer.accelerator=cuda", "trainer.devices=4", "trainer.num_nodes=3"]  # for a resume in the pod
    assert container["command"][:4] == ["python", "-m", "legato", "fit"]
    assert sorted(container["command"][4:-1]) == overrides
    assert container["command"][-1] == "/etc/legato/run.yaml"
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables == {"NODE_RANK": None, "MASTER_ADDR": "my-run-0.my-run", "MASTER_PORT": "29500", "A": "x"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"] == "my-run"
    config = yaml.safe_load(documents["ConfigMap"]["data"]["run.yaml"])
    assert (config["resume"], config["run"]["root"], "launcher" in config) == ("auto", "/runs", False)
    assert not (folder / "runs").exists()


def test_one_pod_meets_nobody(folder, capsys):
    assert manifests(capsys)["Job"]["spec"]["template"]["spec"]["containers"][0]["env"] == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], GPUS])
def test_the_manifests_fit_the_published_schema(folder, capsys, words):
    validator = pytest.importorskip("kubernetes_validate")
    documents = manifests(capsys, *words)
    for document in documents.values():
        validator.validate(document, validator.latest_version(), strict=True)
    documents["Job"]["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validator.ValidationError):
        validator.validate(documents["Job"], validator.latest_version(), strict=True)


def test_what_kubectl_says_is_passed_on(folder, capsys, monkeypatch):
    words = ["launcher=kubernetes", "launcher.image=me/train:1"]
    assert launch("launcher=kubernetes") == 2
    assert "set launcher.image" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(folder))
    assert launch(*words) == 1
    assert "cannot run kubectl (No such file or directory)" in capsys.readouterr().err
    (folder / "kubectl").write_text("#!/bin/sh\necho no such namespace >&2\nexit 1\n")
    (folder / "kubectl").chmod(0o755)
    assert launch(*words) == 1
    assert "`kubectl apply --filename=-` failed: no such namespace" in capsys.readouterr().err
    (folder / "kubectl").write_text('#!/bin/sh\n/bin/cat > applied.yaml\necho "$@"\n')
    assert launch(*words) == 0
    assert capsys.readouterr().out == "apply --filename=-\n"
    assert len(list(yaml.safe_load_all((folder / "applied.yaml").read_text()))) == 3


def test_a_launcher_can_be_made_by_hand():
    assert SlurmLauncher(time="4:00:00", partition="gpu").requeue is True


# --- ray --------------------------------------------------------------------------------------------------------------
RAY = """
import os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster
from legato.cli.main import main

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
words = ["fit", "line.yaml", "launcher=ray", "launcher.address=" + cluster.address, "trainer.devices=1"]
def run(*more):
    try:
        print("@@", main([*words, *more]), flush=True)
    except SystemExit as end:
        print("@@", end.code, flush=True)
run("trainer.num_nodes=2")
run("trainer.num_nodes=2", "task.at=3", "task.then=fail", "task.rank=1", "task.noted=failed")
run("trainer.num_nodes=2", "task.at=3", "task.then=stop", "task.rank=0", "task.noted=stopped")
run("trainer.num_nodes=3", "launcher.placement_timeout=1")
cluster.shutdown()
"""


class FakeRay:
    """Ray as its launcher calls it first: joining takes over SIGTERM, as Ray's does, and fails where told to."""

    class exceptions:
        RayError = type("RayError", (Exception,), {})

    def __init__(self, error=None):
        self.error, self.handlers = error, []

    def init(self, **options):
        if self.error is not None:
            raise self.error
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def reserve(self, bundles, strategy):
        self.handlers.append(signal.getsignal(signal.SIGTERM))
        raise ConfigError("far enough")

    def shutdown(self):
        pass


@pytest.fixture
def fake_ray(monkeypatch):
    """Return a function that replaces Ray by a FakeRay."""
    before = signal.getsignal(signal.SIGTERM)

    def put(error=None):
        fake = FakeRay(error)
        monkeypatch.setitem(sys.modules, "ray", fake)
        for name, attributes in (
            ("ray.exceptions", {"GetTimeoutError": TimeoutError}),
            ("ray.util.placement_group", {"placement_group": fake.reserve}),
        ):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attributes))
        return fake

    yield put
    signal.signal(signal.SIGTERM, before)


def test_the_handler_of_sigterm_is_not_the_one_that_ray_sets(folder, fake_ray):
    ray = fake_ray()
    assert launch("launcher=ray") == 2
    (handler,) = ray.handlers
    assert "handling_end_signals" in handler.__qualname__


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            "launcher.address=127.0.0.1:1",
            None,
            "cannot connect to launcher.address=127.0.0.1:1 (ConnectionRefusedError",
        ),
        ("launcher.address=auto", ConnectionError("Could not find any running Ray"), "Check that `ray start --head`"),
        ("launcher.address=auto", RuntimeError("InvalidAuthToken: x"), "RAY_AUTH_MODE=token"),
        ("launcher.address=auto", ConnectionError("Failed to connect"), "RAY_AUTH_MODE=token"),
        ("launcher.python=null", FakeRay.exceptions.RayError("no room"), "cannot start a cluster (RayError"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_told_in_a_line(folder, fake_ray, capsys, words, error, message):
    fake_ray(error)
    assert launch("launcher=ray", words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


HEARS = """
import os, signal
from launched_task import Line as Hears
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_a_node_hears_ctrl_c_where_ray_ignores_it(folder):
    """A program that a shell starts in the background ignores SIGINT, and so does what it starts."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        (folder / "hears.py").write_text(HEARS)
        config = "{task: {_target_: hears.Hears}, trainer: {accelerator: cpu, devices: 1}}"
        code, error = RayNode(sys.executable, str(folder)).run(["fit"], config, 1, 0, "127.0.0.1", 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130, error


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_its_launcher_says_so(folder, capsys):
    assert launch("launcher=ray") == 2
    assert "launcher=ray needs Ray" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_two_nodes_of_a_ray_cluster(folder):
    done = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    runs = done.stdout.split("@@ ")
    codes = [run.split("\n")[0] for run in runs[1:]]
    assert codes == ["0", "1", "75", "1"], done.stdout + done.stderr
    assert "Ray  2 x 1 processes, node 0 is" in runs[0]
    assert runs[0].count("after 12 steps") == 2
    assert "Node 1 of the run ended with exit code 1" in done.stderr
    assert "RuntimeError: rank 1 does as it was told" in done.stderr
    assert "had no 3 nodes" in done.stderr
    versions = sorted(path.name for path in (folder / "runs" / "line").iterdir())
    assert versions == ["version_0", "version_1", "version_2"]  # one a run, whichever nodes it has
