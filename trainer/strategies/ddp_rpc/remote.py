"""Remote modules: parts of a task that live in server processes, and what a server does for the trainers.

Trainers reach a module by torch's RemoteModule; what they do with it is recorded by distributed autograd. After
https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html ("Combining DDP with the Distributed RPC framework").
The server adds up the gradients of all trainers and updates its weights once a step, after
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
    warnings.simplefilter("ignore", DeprecationWarning)  # torch itself still uses its own torch.jit.script
    from torch.distributed.nn.api.remote_module import RemoteModule

if TYPE_CHECKING:
    from ....tasks.task import Task

REFUSED: tuple[Any, ...] = (BATCH_NORM, nn.Dropout.__base__)
"""They compute something else in training than in evaluation; a server serves both at once."""


# --- a server ---------------------------------------------------------------------------------------------------------
class ServedModule:
    """A module of a server, and its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer: Optimizer | None = None
        self.done = 0
        """Number of trainers that have brought all gradients of the step."""

    def names(self) -> tuple[list[str], int]:
        """Return the names in the module's state_dict, and the number of its parameters."""
        return list(self.module.state_dict()), len(list(self.module.parameters()))

    def make_optimizer(self, kind: type[Optimizer], options: dict[str, Any]) -> None:
        """Make the module's optimizer, like the trainers' own."""
        self.optimizer = kind(self.module.parameters(), **options)

    def finish_step(self, trainers: int, scale: float, clip: float | None, options: dict[str, Any] | None) -> None:
        """Note that one of the trainers has brought all its gradients; with the last one, update the weights.

        `options` are the optimizer's of now: its learning rate may follow a schedule.
        """
        assert self.optimizer is not None
        if options is not None:
            for group in self.optimizer.param_groups:
                group.update(options)
        self.done += 1
        if self.done < trainers:
            return
        self.done = 0
        for parameter in self.module.parameters():
            # by rank: in the order of arrival the sum would vary from run to run
            brought = [BROUGHT[rank].pop(parameter) for rank in sorted(BROUGHT) if parameter in BROUGHT[rank]]
            parameter.grad = sum(brought[1:], brought[0]) * scale if brought else None
            if clip is not None and parameter.grad is not None:
                values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                values.clamp_(-clip, clip)
        self.optimizer.step()


SERVED: dict[str, ServedModule] = {}
"""The modules of this process by name, if it is a server: calls from other processes find them by this name alone."""
BROUGHT: dict[int, dict[Tensor, Tensor]] = {}
"""Gradients of the step under way that each trainer has brought, by its rank."""
LOCK = threading.Lock()
"""Held by calls from other processes, but for forward and backward."""


def build_served_modules(task: "Task", names: Sequence[str], seed: int) -> None:
    """Make this server's modules. Raises ConfigError for those that cannot be served."""
    makers = task.remote_modules()
    SERVED.clear()
    BROUGHT.clear()
    SERVED.update({name: ServedModule(make_module(name, makers[name], seed)) for name in names})
    for name, served in SERVED.items():
        for inner in served.module.modules():
            if isinstance(inner, REFUSED):
                raise ConfigError(
                    f"remote_modules: {name!r} has a {type(inner).__name__}, which computes something else in training "
                    f"than in evaluation; a server serves both. Keep it in the task."
                )


def module_named(name: str) -> nn.Module:
    """Return a module of this server."""
    return SERVED[name].module


def call_here(name: str, method: str, *arguments: Any) -> Any:
    """Call a method of a served module, or of a part of it: `optimizer.state_dict`."""
    with LOCK:
        return attrgetter(method)(SERVED[name])(*arguments)


def collect_gradients(context: int, rank: int) -> None:
    """Take over the gradients that a backward of a trainer has left on this server."""
    with LOCK:
        own = BROUGHT.setdefault(rank, {})
        for parameter, gradient in dist_autograd.get_gradients(context).items():  # type: ignore[attr-defined]
            own[parameter] = own[parameter] + gradient if parameter in own else gradient


def drop_gradients(rank: int) -> None:
    """Forget what a trainer has brought in a step that it leaves."""
    with LOCK:
        BROUGHT.pop(rank, None)


# --- a trainer --------------------------------------------------------------------------------------------------------
class Remote(nn.Module):
    """Proxy in a task for a module on a server, to which it sends calls and state dicts."""

    def __init__(self, name: str, server: str, leads: bool, device: torch.device) -> None:
        """`leads`: weights that are loaded go to the server from this trainer alone."""
        super().__init__()
        self.name, self.server, self.leads, self.device = name, server, leads, device
        with peers_gone(server):
            reference = rpc.remote(server, module_named, args=(name,))
            # in a list: nn.Module would take it for a part of the task, and RemoteModule refuses what is asked of one
            self.modules_there = [RemoteModule.init_from_module_rref(f"{server}/cpu", reference)]
        self.keys, self.count = self.call("names")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `ServedModule` there; return what to wait for."""
        return rpc.rpc_async(self.server, call_here, args=(self.name, method, *arguments))

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the `ServedModule` there returns."""
        with peers_gone(self.server):
            return self.ask(method, *arguments).wait()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Call the module on its server; tensors go there by the host."""
        here = [value.cpu() if isinstance(value, Tensor) else value for value in arguments]
        there = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
        with peers_gone(self.server):
            output = self.modules_there[0].forward(*here, **there)
        return output.to(self.device) if isinstance(output, Tensor) else output

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + key: tensor for key, tensor in self.call("module.state_dict").items()})

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing, *_ = rest
        missing += [prefix + key for key in self.keys if prefix + key not in state]
        # every trainer loads a checkpoint, but one message a module is enough
        if self.leads and not missing:
            self.call("module.load_state_dict", {key: state[prefix + key] for key in self.keys})


def parameter_places(task: nn.Module) -> list[tuple[Remote | None, int]]:
    """Return, for each parameter in the order that one process has, its module there (None: here) and its index."""
    places: list[tuple[Remote | None, int]] = []
    here: dict[nn.Parameter, int] = {}
    for module in task.modules():
        if isinstance(module, Remote):
            places += [(module, index) for index in range(module.count)]
            continue
        for parameter in module.parameters(recurse=False):
            if parameter not in here:
                places.append((None, here.setdefault(parameter, len(here))))
    return places


# --- all of them ------------------------------------------------------------------------------------------------------
@contextmanager
def peers_gone(server: str) -> Iterator[None]:
    """Turn what RPC says of a peer that has gone into ConnectionError, which is never taken for the cause of an end."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if said.startswith("eof") or any(word in said for word in LOST):
            raise ConnectionError(f"The process {server} of this run does not answer any more: {said[:200]}") from error
        raise


LOST = (
    "eof (this error originated",
    "connection reset",
    "Connection reset",
    "broken pipe",
    "no longer running",
    "RPCErr:",
)


SCHEME = "legato-store"
"""Scheme of the address of RPC's rendezvous, for a store that exists already."""


def _meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield what torch asks of a rendezvous handler: the store, this process's rank, and how many there are."""
    assert RpcSession.meeting is not None
    wanted = parse_qs(urlsplit(url).query)
    yield RpcSession.meeting, int(wanted["rank"][0]), int(wanted["world_size"][0])


register_rendezvous_handler(SCHEME, _meet)
FAREWELL = 5.0
"""Seconds that processes wait for each other at their end."""


class RpcSession:
    """RPC session of this process. torch allows one in the life of a process, so it serves all its runs."""

    opened: "RpcSession | None" = None
    meeting: Store | None = None
    """Store at which processes meet for RPC."""

    def __init__(self, store: Store, rank: int, world_size: int, name: str, timeout: float) -> None:
        """Wait until all processes have come."""
        from torch.distributed.rpc import TensorPipeRpcBackendOptions, backend_registry

        self.store, self.stage, self.whole = store, 0, True
        backend: Any = backend_registry.BackendType
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            options = TensorPipeRpcBackendOptions(rpc_timeout=timeout, init_method=f"{SCHEME}://")
            before: timedelta = store.timeout  # type: ignore[attr-defined]
            # a class attribute, since torch hands a rendezvous handler nothing but the URL
            RpcSession.meeting = PrefixStore("rpc", store)
            rpc.init_rpc(name, backend.TENSORPIPE, rank, world_size, options)
            store.set_timeout(before)  # torch gives it that of RPC
        atexit.register(self.close)  # its threads must not outlive the interpreter

    def begin_stage(self, servers: Sequence[str], timeout: timedelta, own: str | None = None) -> None:
        """Begin a run: a server, `own`, says that its modules are built; a trainer waits until all have said so."""
        self.stage += 1
        if own is not None:
            self.store.set(f"open {self.stage} {own}", "yes")
        else:
            self.store.wait([f"open {self.stage} {server}" for server in servers], timeout)

    def end_stage(self, whole: bool) -> None:
        """Let the servers go on to what comes after this run, which has come to its end or (not `whole`) has failed."""
        self.whole &= whole
        with suppress(RuntimeError):  # the process with the store has gone
            self.store.set(f"over {self.stage}", "yes")

    def close(self) -> None:
        """Leave, where all is well once the others leave as well, so that none of them has to say that others went."""
        if self.whole:
            with suppress(RuntimeError):
                rpc.shutdown(timeout=FAREWELL)
                return
        rpc.shutdown(graceful=False)

    def is_over(self) -> bool:
        """Return whether the trainers have ended the run, or have gone altogether."""
        try:
            return bool(self.store.check([f"over {self.stage}"]))
        except RuntimeError:
            return True
