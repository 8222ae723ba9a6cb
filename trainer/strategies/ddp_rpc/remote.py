"""Remote modules: parts of a task that live in server processes, and what a server does for the trainers.

Trainers reach a module by torch's RemoteModule; what they do with it is recorded by distributed autograd. After
https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html ("Combining DDP with the Distributed RPC framework").
The server adds up the gradients of all trainers and updates its weights once a step, after
https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html ("batch-updating parameter server").
"""

import atexit
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, register_rendezvous_handler, rpc  # type: ignore[attr-defined]
from torch.optim import Optimizer

from ....base.errors import ConfigError
from ....base.torch_private import batch_norms, dropouts
from ..servers import make_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch itself still uses its own torch.jit.script
    from torch.distributed.nn.api.remote_module import RemoteModule
    from torch.distributed.optim import DistributedOptimizer

if TYPE_CHECKING:
    from ....tasks.task import Task

Gradients = dict[nn.Parameter, Tensor]
REFUSED = (*batch_norms(), *dropouts())
"""They compute something else in training than in evaluation; a server serves both at once."""


# --- a server ---------------------------------------------------------------------------------------------------------
class ServerState:
    """State of a server: its modules by name, an optimizer, and the gradients of the current step."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizer: Optimizer | None = None
        self.gradients: dict[int, Gradients] = {}
        """Gradients of each trainer, by its rank."""
        self.done = 0
        """Number of trainers that have brought all of theirs."""
        self.lock = threading.Lock()


SERVER_STATE = ServerState()
"""State of this process, if it is a server: calls from other processes find it by this name alone."""


class Collected:
    """Stand-in optimizer for DistributedOptimizer: it hands a trainer's gradients over and updates nothing yet."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.parameters, self.rank = parameters, rank

    def step(self) -> None:
        """Add the gradients of one backward of this trainer to those that it has brought."""
        with SERVER_STATE.lock:
            # apart for each trainer, and added up by rank in finish_step: in the order of arrival the sum would vary
            # from run to run
            own = SERVER_STATE.gradients.setdefault(self.rank, {})
            for parameter in self.parameters:
                if parameter.grad is not None:
                    own[parameter] = own[parameter] + parameter.grad if parameter in own else parameter.grad
                    # DistributedOptimizer has put this context's gradient there; the next trainer's would be added to
                    # it
                    parameter.grad = None


def served_module(name: str) -> nn.Module:
    """Return a module of this server."""
    return SERVER_STATE.modules[name]


def make_optimizer(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """Make this server's optimizer, like the trainers' own."""
    SERVER_STATE.optimizer, SERVER_STATE.gradients, SERVER_STATE.done = kind(served_parameters(), **options), {}, 0


def served_parameters() -> list[nn.Parameter]:
    """Return the parameters of this server's modules, in their order."""
    return [parameter for module in SERVER_STATE.modules.values() for parameter in module.parameters()]


def finish_step(trainers: int, scale: float, clip: float | None, options: dict[str, Any] | None) -> None:
    """Note that one of the trainers has brought all its gradients; with the last one, update the weights.

    `options` are the optimizer's of now: its learning rate may follow a schedule.
    """
    with SERVER_STATE.lock:
        assert SERVER_STATE.optimizer is not None
        if options is not None:
            for group in SERVER_STATE.optimizer.param_groups:
                group.update(options)
        SERVER_STATE.done += 1
        if SERVER_STATE.done < trainers:
            return
        brought, SERVER_STATE.gradients, SERVER_STATE.done = SERVER_STATE.gradients, {}, 0
        for parameter in served_parameters():
            found = [brought[rank][parameter] for rank in sorted(brought) if parameter in brought[rank]]
            parameter.grad = sum(found[1:], found[0]) * scale if found else None
            if clip is not None and parameter.grad is not None:
                values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                values.clamp_(-clip, clip)
        SERVER_STATE.optimizer.step()


def drop_gradients(rank: int) -> None:
    """Forget what a trainer has brought in a step that it leaves."""
    with SERVER_STATE.lock:
        SERVER_STATE.gradients.pop(rank, None)


def served_state_dict(name: str) -> dict[str, Tensor]:
    """Return the weights of a module of this server."""
    with SERVER_STATE.lock:
        return {key: tensor.detach().clone() for key, tensor in SERVER_STATE.modules[name].state_dict().items()}


def served_keys(name: str) -> list[str]:
    """Return the names in a module's state_dict."""
    return list(SERVER_STATE.modules[name].state_dict())


def load_served_module(name: str, state: Mapping[str, Tensor]) -> None:
    """Give a module of this server other weights."""
    with SERVER_STATE.lock:
        SERVER_STATE.modules[name].load_state_dict(state)


def served_optimizer_state() -> dict[str, Any]:
    """Return the state of this server's optimizer."""
    with SERVER_STATE.lock:
        assert SERVER_STATE.optimizer is not None
        return SERVER_STATE.optimizer.state_dict()


def load_served_optimizer(state: dict[str, Any]) -> None:
    """Give this server's optimizer another state."""
    with SERVER_STATE.lock:
        assert SERVER_STATE.optimizer is not None
        SERVER_STATE.optimizer.load_state_dict(state)


def build_served_modules(task: "Task", names: Sequence[str], seed: int) -> None:
    """Make this server's modules. Raises ConfigError for those that cannot be served."""
    makers = task.remote_modules()
    SERVER_STATE.modules = {name: make_module(name, makers[name], seed) for name in names}
    for name, module in SERVER_STATE.modules.items():
        for inner in module.modules():
            if isinstance(inner, REFUSED):
                raise ConfigError(
                    f"remote_modules: {name!r} has a {type(inner).__name__}, which computes something else in training "
                    f"than in evaluation; a server serves both. Keep it in the task."
                )


# --- a trainer --------------------------------------------------------------------------------------------------------
class Remote(nn.Module):
    """Proxy in a task for a module on a server, to which it sends calls and state dicts."""

    def __init__(self, name: str, server: str, leads: bool, device: torch.device) -> None:
        """`leads`: weights that are loaded go to the server from this trainer alone."""
        super().__init__()
        self.name, self.server, self.leads, self.device = name, server, leads, device
        with peers_gone(server):
            reference = rpc.remote(server, served_module, args=(name,))
            # in a list: nn.Module would take it for a part of the task, and RemoteModule refuses what is asked of one
            self.modules_there = [RemoteModule.init_from_module_rref(f"{server}/cpu", reference)]
        self.keys: list[str] = call(server, served_keys, name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Call the module on its server; tensors go there by the host."""
        here = [value.cpu() if isinstance(value, Tensor) else value for value in arguments]
        there = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
        with peers_gone(self.server):
            output = self.modules_there[0].forward(*here, **there)
        return output.to(self.device) if isinstance(output, Tensor) else output

    def parameters_there(self) -> list[Any]:
        """Return references to the parameters on the server."""
        with peers_gone(self.server):
            found: list[Any] = self.modules_there[0].remote_parameters()
        return found

    def fetch(self) -> dict[str, Tensor]:
        """Return the weights."""
        found: dict[str, Tensor] = call(self.server, served_state_dict, self.name)
        return found

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + key: tensor for key, tensor in self.fetch().items()})

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing, *_ = rest
        missing += [prefix + key for key in self.keys if prefix + key not in state]
        # every trainer loads a checkpoint, but one message a module is enough
        if self.leads and not missing:
            call(self.server, load_served_module, self.name, {key: state[prefix + key] for key in self.keys})


def remote_indices(task: nn.Module, remotes: Mapping[str, Remote]) -> list[tuple[str | None, int]]:
    """Return, for each parameter in the order that one process has, its server (None: here) and its index there."""
    ends: dict[str | None, int] = {None: 0}
    there: dict[str, range] = {}
    for name in remotes:
        one = remotes[name]
        start = ends.get(one.server, 0)
        ends[one.server] = start + len(one.parameters_there())
        there[name] = range(start, ends[one.server])
    found: list[tuple[str | None, int]] = []
    here: set[int] = set()
    for module in task.modules():
        if isinstance(module, Remote):
            found += [(module.server, index) for index in there[module.name]]
            continue
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in here:
                found.append((None, len(here)))
                here.add(id(parameter))
    return found


def collecting_optimizer(parameters: Sequence[Any], rank: int) -> DistributedOptimizer:
    """Return what takes the gradients of a trainer's contexts to the servers of these parameters."""
    loud = logging.getLogger("torch.distributed.optim.optimizer")
    level = loud.level
    loud.setLevel(logging.ERROR)  # it would say that our class is not compiled by TorchScript
    try:
        return DistributedOptimizer(Collected, parameters, rank=rank)
    finally:
        loud.setLevel(level)


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


def call(server: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file on a server, and return what it returns."""
    with peers_gone(server):
        return rpc.rpc_sync(server, function, args=arguments)


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
