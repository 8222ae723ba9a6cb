"""KubernetesLauncher: runs a command as an Indexed Job with one pod per node. Each pod starts its node's processes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from ...base.errors import ConfigError
from ...trainer.processes.signals import GRACE, RESUME_ME
from .launcher import Launcher, Machines

if TYPE_CHECKING:
    from ..config.check import Config

_MOUNTED = "/etc/legato"
_USAGE = 2  # exit code for an invalid config, which a retry would not fix


class ManifestDumper(yaml.SafeDumper):
    """YAML dumper that writes multiline strings, such as the config, in block style."""


ManifestDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


@dataclass(kw_only=True)
class KubernetesLauncher(Launcher):
    """Applies a ConfigMap, a Service and a Job with kubectl. The Job has `trainer.num_nodes` pods.

    Args:
        image: Container image with Python, torch, Legato and the task's modules. Required.
        claim: PersistentVolumeClaim for run directories; must be ReadWriteMany for multiple nodes. None: run
            directories are lost with their pods.
        mount: Folder where the claim is mounted; becomes the run's `run.root`.
        namespace: Kubernetes namespace. None: kubectl's current namespace.
        job_name: Name of the Job. None: run.name.
        cpus_per_process: CPUs to reserve for each process, including its loader workers.
        memory: Memory per pod, such as "64Gi".
        gpu: Name of the cluster's GPU resource.
        node_selector: Labels of the nodes to run on, such as {cloud.google.com/gke-accelerator: nvidia-h100-80gb}.
        environment: Additional environment variables, such as {NCCL_SOCKET_IFNAME: eth0}.
        python: Python interpreter in the image.
        folder: Working directory in the container, which contains the task's modules. None: the image's default.
        port: Port on the first pod for the processes' rendezvous.
        retries: Number of failed pods after which the Job fails; preempted pods are not counted.
        dry_run: Print the manifests instead of applying them.

    Raises ConfigError if `image` is missing.
    """

    name = "kubernetes"

    image: str | None = None
    claim: str | None = None
    mount: str = "/runs"
    namespace: str | None = None
    job_name: str | None = None
    cpus_per_process: int = 1
    memory: str | None = None
    gpu: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = "python"
    folder: str | None = None
    port: int = 29500
    retries: int = 3
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError if `image` is missing."""
        if not self.image:
            raise ConfigError("launcher=kubernetes: set launcher.image to an image with torch, Legato and the task.")

    def start(self, command: str, config: "Config", machines: Machines) -> int:
        """Apply or print the manifests and return 0. Raises WorkerError if kubectl fails."""
        manifests = yaml.dump_all(self.manifests(command, config, machines), Dumper=ManifestDumper, sort_keys=False)
        if self.dry_run:
            print(manifests, end="")
            return 0
        print(self.call_tool("kubectl", "apply", "--filename=-", text=manifests), end="")
        return 0

    def manifests(self, command: str, config: "Config", machines: Machines) -> list[dict[str, Any]]:
        """Return the ConfigMap with the config, the Service through which pods find the first pod, and the Job."""
        run, resume = config.values["run"], config.values["resume"]
        # a replacement pod resumes the run
        pod_config = config.changed(
            run=run if self.claim is None else {**run, "root": self.mount},
            resume="auto" if command == "fit" else resume,
        )
        # 50 characters, since pod names add an index and a suffix, and a DNS label has at most 63
        name = re.sub(r"[^a-z0-9]+", "-", (self.job_name or run["name"]).lower()).strip("-")[:50] or "legato"
        metadata: dict[str, Any] = {"name": name, "labels": {"app": name}}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        # headless, so that each pod has a DNS name even before it is ready: pods look up the first pod early
        service = {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True}
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"run.yaml": pod_config.text()}},
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": metadata,
                "spec": self._job(name, machines, command),
            },
        ]

    def _job(self, name: str, machines: Machines, command: str) -> dict[str, Any]:
        """Return the spec of a Job that replaces pods when they exit with code 75 or lose their node."""
        rules = [
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [RESUME_ME]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_USAGE]}},
        ]
        return {
            "completions": machines.nodes,
            "parallelism": machines.nodes,
            "completionMode": "Indexed",
            "backoffLimit": self.retries,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": {"app": name}}, "spec": self._pod(name, machines, command)},
        }

    def _pod(self, name: str, machines: Machines, command: str) -> dict[str, Any]:
        """Return the spec of a pod. The command it runs starts the node's processes."""
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        place: list[dict[str, Any]] = [
            {"name": "NODE_RANK", "valueFrom": index},
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "MASTER_PORT", "value": str(self.port)},
        ]
        amounts: dict[str, Any] = {"cpu": machines.processes * self.cpus_per_process}
        amounts |= {"memory": self.memory} if self.memory else {}
        gpus = {self.gpu: machines.gpus} if machines.gpus else {}
        volumes: list[dict[str, Any]] = [
            {"name": "config", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # loader workers pass batches through it
        ]
        mounts = [{"name": "config", "mountPath": _MOUNTED}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
        if self.claim is not None:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}})
            mounts.append({"name": "runs", "mountPath": self.mount})
        container: dict[str, Any] = {
            "name": "legato",
            "image": self.image,
            "command": [self.python, "-m", __name__.partition(".")[0], command, *self.flags, f"{_MOUNTED}/run.yaml"],
            "env": [
                *(place if machines.nodes > 1 else []),
                *({"name": key, "value": str(value)} for key, value in self.environment.items()),
            ],
            # extended resources such as GPUs need a limit equal to the request; a CPU limit would throttle
            "resources": {"requests": {**amounts, **gpus}, "limits": {**gpus}},
            "volumeMounts": mounts,
        }
        if self.folder is not None:
            container["workingDir"] = self.folder
        return {
            # required by a podFailurePolicy
            "restartPolicy": "Never",
            "subdomain": name,
            # longer than the default of 30 s, in which a run must start its save but may not finish it
            "terminationGracePeriodSeconds": int(GRACE) + 30,
            "nodeSelector": dict(self.node_selector),
            "containers": [container],
            "volumes": volumes,
        }
