"""Remote modules: a task's modules on server processes, and the functions that servers run for trainers.

Trainers call a module through torch's RemoteModule and distributed autograd. See
https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html ("Combining DDP with the Distributed RPC framework").
A server sums the gradients of all trainers and updates its weights once per step. See
https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html ("batch-updating parameter server").
"""

import atexit
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, register_rendezvous_handler, rpc  # type: ignore[attr-defined]
from torch.optim import Optimizer

from ....base.errors import ConfigError
from ....base.tensors import BATCH_NORM
from ..servers import make_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # RemoteModule uses the deprecated torch.jit.script
    from torch.distributed.nn.api.remote_module import RemoteModule

if TYPE_CHECKING:
    from ....tasks.task import Task

REFUSED: tuple[Any, ...] = (BATCH_NORM, nn.Dropout.__base__)
"""Unsupported modules. They behave differently in training and evaluation, but a server handles both at once."""


# --- a server ---------------------------------------------------------------------------------------------------------
class ServedModule:
    """A module on a server, with its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer: Optimizer | None = None
        self.done = 0
        """Number of trainers that have finished the backward passes of the step."""

    def names(self) -> tuple[list[str], int]:
        """Return the keys of the module's state dict and the number of parameters in the module."""
        return list(self.module.state_dict()), len(list(self.module.parameters()))

    def make_optimizer(self, kind: type[Optimizer], options: dict[str, Any]) -> None:
        """Create the module's optimizer. It has the same class as the trainers' optimizer."""
        self.optimizer = kind(self.module.parameters(), **options)

    def finish_step(self, trainers: int, scale: float, clip: float | None, options: dict[str, Any] | None) -> None:
        """Record that a trainer has finished its backward passes. Once all trainers have done so, update the weights.

        Args:
            options: the optimizer's current options, such as a scheduled learning rate.
        """
        assert self.optimizer is not None
        # only rank 0 sends options, because schedulers compute the same values on all trainers
        if options is not None:
            for group in self.optimizer.param_groups:
                group.update(options)
        self.done += 1
        if self.done < trainers:
            return
        self.done = 0
        for parameter in self.module.parameters():
            # in the order of ranks: in order of arrival the sum would vary between runs
            gradients = [GRADIENTS[rank].pop(parameter) for rank in sorted(GRADIENTS) if parameter in GRADIENTS[rank]]
            parameter.grad = sum(gradients[1:], gradients[0]) * scale if gradients else None
            if clip is not None and parameter.grad is not None:
                values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                values.clamp_(-clip, clip)
        self.optimizer.step()


SERVED: dict[str, ServedModule] = {}
"""The modules of a server process, keyed by name."""
GRADIENTS: dict[int, dict[Tensor, Tensor]] = {}
"""Gradients of the current step, keyed by the rank of the trainer that computed them."""
LOCK = threading.Lock()
"""Lock held during remote calls, except for forward and backward passes."""


def build_served_modules(task: "Task", names: Sequence[str], seed: int) -> None:
    """Build this server's modules. Raises ConfigError for modules that a server does not support."""
    makers = task.remote_modules()
    SERVED.clear()
    GRADIENTS.clear()
    SERVED.update({name: ServedModule(make_module(name, makers[name], seed)) for name in names})
    for name, served in SERVED.items():
        for inner in served.module.modules():
            if isinstance(inner, REFUSED):
                raise ConfigError(
                    f"remote_modules: {name!r} contains a {type(inner).__name__}, which behaves differently in "
                    f"training and evaluation, but a server handles both at once. Move this module to the task."
                )


def module_named(name: str) -> nn.Module:
    """Return a module of this server."""
    return SERVED[name].module


def call_here(name: str, method: str, *arguments: Any) -> Any:
    """Call a method of a `ServedModule` or of one of its attributes, such as `optimizer.state_dict`."""
    with LOCK:
        return attrgetter(method)(SERVED[name])(*arguments)


def collect_gradients(context: int, rank: int) -> None:
    """Collect the gradients that a trainer's backward pass computed on this server."""
    with LOCK:
        sums = GRADIENTS.setdefault(rank, {})
        for parameter, gradient in dist_autograd.get_gradients(context).items():  # type: ignore[attr-defined]
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient


def drop_gradients(rank: int) -> None:
    """Drop a trainer's gradients from an unfinished step."""
    with LOCK:
        GRADIENTS.pop(rank, None)


# --- a trainer --------------------------------------------------------------------------------------------------------
class Remote(nn.Module):
    """Proxy that replaces a module in the task. The module itself runs on a server."""

    def __init__(self, name: str, server: str, leads: bool, device: torch.device) -> None:
        """Create the proxy for a module.

        Args:
            leads: True on the trainer that sends loaded weights to the server.
        """
        super().__init__()
        self.name, self.server, self.leads, self.device = name, server, leads, device
        with peers_gone(server):
            reference = rpc.remote(server, module_named, args=(name,))
            # in a list, so that nn.Module does not register it: RemoteModule lacks most methods of a module
            self.modules_there = [RemoteModule.init_from_module_rref(f"{server}/cpu", reference)]
        self.keys, self.count = self.call("names")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `ServedModule` asynchronously. Return the future."""
        return rpc.rpc_async(self.server, call_here, args=(self.name, method, *arguments))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `ServedModule` and wait for its result."""
        with peers_gone(self.server):
            return self.ask(method, *arguments).wait()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Call the module on its server. Arguments are moved to the CPU, and the output to this process's device."""
        args = [value.cpu() if isinstance(value, Tensor) else value for value in arguments]
        kwargs = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
        with peers_gone(self.server):
            output = self.modules_there[0].forward(*args, **kwargs)
        return output.to(self.device) if isinstance(output, Tensor) else output

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + key: tensor for key, tensor in self.call("module.state_dict").items()})

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing, *_ = rest
        missing += [prefix + key for key in self.keys if prefix + key not in state]
        # every trainer loads a checkpoint, but only one sends it
        if self.leads and not missing:
            self.call("module.load_state_dict", {key: state[prefix + key] for key in self.keys})


def parameter_places(task: nn.Module) -> list[tuple[Remote | None, int]]:
    """Return each parameter's remote module (None if it is local), and the parameter's index within that module.

    The parameters are in the same order as in a single process.
    """
    places: list[tuple[Remote | None, int]] = []
    local: dict[nn.Parameter, int] = {}
    for module in task.modules():
        if isinstance(module, Remote):
            places += [(module, index) for index in range(module.count)]
            continue
        for parameter in module.parameters(recurse=False):
            if parameter not in local:
                places.append((None, local.setdefault(parameter, len(local))))
    return places


# --- all processes ----------------------------------------------------------------------------------------------------
@contextmanager
def peers_gone(server: str) -> Iterator[None]:
    """Convert RPC errors about a lost peer to ConnectionError, which Legato never reports as the cause of a failure."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if text.startswith("eof") or any(phrase in text for phrase in LOST):
            raise ConnectionError(f"Process {server} of this run no longer responds: {text[:200]}") from error
        raise


# substrings of RPC's error messages for a lost connection
LOST = (
    "eof (this error originated",
    "connection reset",
    "Connection reset",
    "broken pipe",
    "no longer running",
    "RPCErr:",
)


SCHEME = "legato-store"
"""URL scheme for RPC's rendezvous through an existing store."""


def _meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, this process's rank and the world size, as torch requires of a rendezvous handler."""
    assert RpcSession.meeting is not None
    wanted = parse_qs(urlsplit(url).query)
    yield RpcSession.meeting, int(wanted["rank"][0]), int(wanted["world_size"][0])


register_rendezvous_handler(SCHEME, _meet)
FAREWELL = 5.0
"""Seconds that processes wait for each other at shutdown."""


class RpcSession:
    """RPC session of this process. torch allows one session per process, so all runs share it."""

    opened: "RpcSession | None" = None
    meeting: Store | None = None
    """Store for RPC's rendezvous."""

    def __init__(self, store: Store, rank: int, world_size: int, name: str, timeout: float) -> None:
        """Open the session after all processes have arrived."""
        from torch.distributed.rpc import TensorPipeRpcBackendOptions, backend_registry

        self.store, self.stage, self.whole = store, 0, True
        backend: Any = backend_registry.BackendType
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            options = TensorPipeRpcBackendOptions(rpc_timeout=timeout, init_method=f"{SCHEME}://")
            before: timedelta = store.timeout  # type: ignore[attr-defined]
            # a class attribute, because torch passes only the URL to a rendezvous handler
            RpcSession.meeting = PrefixStore("rpc", store)
            rpc.init_rpc(name, backend.TENSORPIPE, rank, world_size, options)
            store.set_timeout(before)  # torch sets it to RPC's timeout
        atexit.register(self.close)  # RPC's threads must not outlive the interpreter

    def begin_stage(self, servers: Sequence[str], timeout: timedelta, own: str | None = None) -> None:
        """Begin a run. A server announces that its modules are built, and a trainer waits for all servers.

        Args:
            own: name of this server; None on a trainer.
        """
        self.stage += 1
        if own is not None:
            self.store.set(f"open {self.stage} {own}", "yes")
        else:
            self.store.wait([f"open {self.stage} {server}" for server in servers], timeout)

    def end_stage(self, whole: bool) -> None:
        """End the run on all servers. `whole` is False if the run has failed."""
        self.whole &= whole
        with suppress(RuntimeError):  # the process that hosts the store may have exited
            self.store.set(f"over {self.stage}", "yes")

    def close(self) -> None:
        """Leave the session.

        After a successful run, wait for the other processes, so that none of them reports a lost connection.
        """
        if self.whole:
            with suppress(RuntimeError):
                rpc.shutdown(timeout=FAREWELL)
                return
        rpc.shutdown(graceful=False)

    def is_over(self) -> bool:
        """Return whether the trainers have ended the run or exited."""
        try:
            return bool(self.store.check([f"over {self.stage}"]))
        except RuntimeError:
            return True
