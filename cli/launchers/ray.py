"""RayLauncher: runs a command on a Ray cluster with one actor per node. Each actor starts its node's processes."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, WorkerError
from ...trainer.processes.signals import INTERRUPTED, RESUME_ME, handling_end_signals
from ...trainer.processes.transport import is_communication
from .launcher import Launcher, Machines

if TYPE_CHECKING:
    from ..config.check import Config

_SETTLE, _GRACE = 10.0, 20.0
"""Seconds from a node's failure until the other nodes receive SIGTERM and SIGKILL. Most nodes exit earlier."""
_ANSWER = 10.0  # seconds within which a cluster's port must answer
_RAY_POLL = 0.5  # seconds between polls of the nodes
_LAST_LINES = 40  # number of lines of a failed node's output to repeat at the end
# Ray ignores Ctrl-C if a script starts it in the background, and so do its processes
_COMMAND = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from {__name__.partition(".")[0]}.cli.main import main
sys.exit(main())
"""


@dataclass(kw_only=True)
class RayLauncher(Launcher):
    """Runs a command on `trainer.num_nodes` nodes of a Ray cluster with `trainer.devices` devices each. Requires ray.

    Args:
        address: Address of the cluster: "host:port", "ray://host:port", or "auto" for the cluster on this machine.
            None: a temporary cluster on this machine.
        cpus_per_process: CPUs to reserve for each process.
        resources: Other resources to reserve on each node, such as {"accelerator_type:A100": 0.001}.
        placement_timeout: Seconds to wait for free nodes.
        python: Path of the Python interpreter on the nodes. None: this process's interpreter.

    Raises ConfigError if Ray is not installed, and WorkerError if the cluster is too small or a node fails.
    """

    name = "ray"

    address: str | None = None
    cpus_per_process: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    placement_timeout: float = 600.0
    python: str | None = None

    def start(self, command: str, config: "Config", machines: Machines) -> int:
        """Run the command on the cluster, wait for it, and return its exit code.

        Raises ConfigError if Ray is not installed, and WorkerError if the cluster is too small or a node fails.
        """
        if self.address is None and machines.nodes > 1:  # Ray would wait forever for more nodes
            raise ConfigError(
                f"Ray has one machine, but trainer.num_nodes={machines.nodes}. Set launcher.address, or num_nodes=1."
            )
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"launcher=ray needs Ray ({error}): pip install 'legato[ray]'.") from error
        self._connect(ray)
        signals: list[int] = []
        try:
            with handling_end_signals(signals.append):  # after ray.init, which installs a SIGTERM handler
                group = self._reserve(machines)
                return self._run(group, machines, command, config.text(), signals)
        finally:
            ray.shutdown()

    def _connect(self, ray: Any) -> None:
        """Connect to the cluster, or start one. Raises WorkerError on failure."""
        host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
        try:
            if host and port.isdecimal():  # Ray would try for two minutes and then exit the process
                socket.create_connection((host, int(port)), timeout=_ANSWER).close()
            ray.init(address=self.address, log_to_driver=True, include_dashboard=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
            target = f"connect to launcher.address={self.address}" if self.address else "start a cluster"
            reason = " ".join(str(error).split())[:300]
            # a missing token raises the same error, which does not mention it
            remedy = (
                "Check that `ray start --head` has run there, that `ray status` works here, that both machines have "
                "the same versions of Ray and Python, and, if `ray start` mentioned token authentication, that "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) are set here."
            )
            raise WorkerError(f"launcher=ray cannot {target} ({type(error).__name__}: {reason}). {remedy}") from error

    def _reserve(self, machines: Machines) -> Any:
        """Return a scheduled placement group with one bundle per node."""
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util.placement_group import placement_group

        bundle: dict[str, float] = {"CPU": machines.processes * self.cpus_per_process, **self.resources}
        if machines.gpus:
            bundle["GPU"] = machines.gpus
        group = placement_group([bundle] * machines.nodes, strategy="STRICT_SPREAD")
        try:
            ray.get(group.ready(), timeout=self.placement_timeout)
        except GetTimeoutError as error:
            raise WorkerError(
                f"The Ray cluster did not provide {machines.nodes} nodes with {bundle} within "
                f"{self.placement_timeout:g} s. Run `ray status`, or reduce num_nodes, devices or cpus_per_process."
            ) from error
        return group

    def _run(self, group: Any, machines: Machines, command: str, config: str, signals: list[int]) -> int:
        """Start an actor in each bundle and wait until all have exited."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # two concurrent calls, so that one can forward signals while the other waits for the command
        actor = ray.remote(max_concurrency=2, max_restarts=0)(RayNode)
        nodes = []
        for index, bundle in enumerate(group.bundle_specs):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": place}
            nodes.append(actor.options(**options).remote(self.python or sys.executable, str(Path.cwd())))
        host, port = ray.get(nodes[0].meeting_place.remote())
        print(f"Ray  {machines.nodes} x {machines.processes} processes, node 0 is {host}", flush=True)
        running = {
            node.run.remote([command, *self.flags], config, machines.nodes, index, host, port): index
            for index, node in enumerate(nodes)
        }
        return _wait(nodes, running, signals)


def _wait(nodes: list[Any], running: dict[Any, int], signals: list[int]) -> int:
    """Wait for all nodes and return the run's exit code. If a node fails, stop the others."""
    import ray
    from ray.exceptions import RayActorError

    codes: dict[int, int] = {}
    failures: list[tuple[int, str]] = []
    passed, failed_at = 0, None
    while running:
        for number in signals[passed:]:
            _send_to_nodes(nodes, number)
        passed = len(signals)
        done, _ = ray.wait(list(running), timeout=_RAY_POLL)
        for reference in done:
            index = running.pop(reference)
            try:
                codes[index], last = ray.get(reference)
            except RayActorError as error:
                codes[index], last = 1, f"Ray lost the node: {' '.join(str(error).split())[:300]}"
            if codes[index] not in (0, RESUME_ME, INTERRUPTED):
                failures.append((index, last))
                failed_at = failed_at or time.monotonic()
        waited = 0.0 if failed_at is None else time.monotonic() - failed_at
        if waited > _SETTLE:
            _send_to_nodes(nodes, signal.SIGTERM if waited < _GRACE else signal.SIGKILL)
    if failures:
        # prefers the root cause to lost connections, which other nodes may report first
        index, last = min(failures, key=lambda failure: is_communication(RuntimeError(failure[1])))
        raise WorkerError(f"Node {index} of the run ended with exit code {codes[index]}:\n{last}")
    return max(codes.values())


def _send_to_nodes(nodes: list[Any], number: int) -> None:
    for node in nodes:
        node.send.remote(int(number))


class RayNode:
    """Actor on a node. It runs a Legato command that starts the node's processes."""

    def __init__(self, python: str, folder: str) -> None:
        self.python, self.folder = python, folder
        self.process: subprocess.Popen[str] | None = None

    def meeting_place(self) -> tuple[str, int]:
        """Return this machine's address and a free port."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.create_server(("", 0)) as server:
            return host, server.getsockname()[1]

    def run(self, command: list[str], config: str, nodes: int, rank: int, host: str, port: int) -> tuple[int, str]:
        """Run a command with options as node `rank` of `nodes`, and return its exit code and last lines of output."""
        if not Path(self.folder).is_dir():
            return 1, f"The folder {self.folder} does not exist. All nodes must share the folder where the run starts."
        with tempfile.TemporaryDirectory(prefix="legato-") as folder:
            path = Path(folder) / "run.yaml"
            path.write_text(config, encoding="utf-8")
            # uses the program env, since only base/environment.py may set environment variables
            place = [f"NODE_RANK={rank}", f"MASTER_ADDR={host}", f"MASTER_PORT={port}"] if nodes > 1 else []
            words = ["env", *place, self.python, "-c", _COMMAND, *command, str(path)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.process = subprocess.Popen(words, cwd=self.folder, **pipes)
            last: list[str] = []
            assert self.process.stdout is not None
            with self.process.stdout as lines:
                for line in lines:
                    print(line, end="", flush=True)
                    last = [*last[-_LAST_LINES:], line]
            return self.process.wait(), "".join(last)

    def send(self, number: int) -> None:
        """Send a signal to the command."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
