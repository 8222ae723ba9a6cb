"""DDP with parameter servers: dense layers in every trainer, large modules on server processes.

For models of which one part, such as the embeddings of a recommender, is too large for each process to have: the task
names it in `remote_modules`. Trainers are the first processes of the run, servers the last ones. A step is that of one
process with all batches: dense gradients meet in DDP, remote ones on their server, which updates once a step.
"""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from ....base.errors import ConfigError, TaskError
from ....base.place import Place
from ...optimization.batch_weights import weight_of
from ...optimization.outputs import describe_bad_loss
from ...processes.ranks import Phase
from ...processes.rendezvous import find_store
from ...processes.signals import handling_end_signals
from ..ddp import DDPStrategy
from ..state_dicts import StateDicts, StateParts
from ..strategy import trainable
from . import remote
from .remote import Remote, RpcSession, peers_gone

if TYPE_CHECKING:
    from ....tasks.task import Task

_SERVER_POLL = 0.05  # seconds between two looks of a server at whether the run is over


class DDPRPCStrategy(DDPStrategy):
    """One trainer for each device, and `servers` more processes that hold what the task names in `remote_modules`."""

    name = "ddp_rpc"

    def __init__(
        self,
        *,
        servers: int = 1,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: float | Mapping[Phase, float] = 1800.0,
    ) -> None:
        """`servers`: processes that share the remote modules out among them, besides those of trainer.devices. The
        others are strategy ddp's; the limit of the phase `step` is that of a remote call, too.
        """
        super().__init__(
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            init_method=init_method,
            timeout=timeout,
        )
        if isinstance(servers, bool) or servers < 1:
            raise ConfigError(f"servers={servers!r}: expected at least 1 process for the remote modules.")
        self.servers = servers
        self.state_dicts = RemoteStateDicts(self)
        self.has_all_weights = False  # those of remote modules are on servers
        self.session: RpcSession | None = None
        self.finished = False
        """Whether the run has come to its end, for good."""
        self.remotes: dict[str, Remote] = {}
        self.makers: dict[str, Callable[[], nn.Module]] = {}
        self.context: tuple[Any, int] | None = None
        """The distributed autograd context of the batch that is under way, and its number; a thread has one at most."""
        self.held: dict[nn.Parameter, Tensor] = {}
        """Dense gradients of the batches before the last one, of this process."""
        self.clip_value: float | None = None

    # --- processes --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return one trainer for each device, and the servers."""
        return len(devices) + self.servers

    def _trainers(self, place: Place) -> int:
        """Return the number of trainers, which are the first processes; raises ConfigError where there is none."""
        trainers = place.world_size - self.servers
        if place.origin == "script":
            raise ConfigError(
                "strategy ddp_rpc makes process groups of its own, for trainers and servers; call it without a process "
                "group, or set trainer.cluster=off."
            )
        if place.nodes > 1:
            raise ConfigError(
                f"strategy ddp_rpc runs on one node, here are {place.nodes}: remote calls between nodes are not "
                f"supported yet. Set num_nodes to 1."
            )
        if trainers < 1:
            raise ConfigError(
                f"strategy ddp_rpc needs a trainer besides its servers: {place.world_size} processes - {self.servers} "
                f"servers = {trainers}. Start trainer.devices + servers processes."
            )
        return trainers

    def serve(self, place: Place, task: "Task | None" = None, seed: int = 0) -> bool:
        """Return whether this process is a server; hold its modules until the trainers have ended the run."""
        index = place.rank - self._trainers(place)
        if index >= 0 and task is not None:
            remote.build_served_modules(task, dealt(task.remote_modules(), self.servers)[index], seed)
            # the modules first: entering tells the trainers, by the store, that they can be called
            session = self._enter(place)
            with handling_end_signals(lambda number: None):  # trainers that are told to end save what is here
                while not session.is_over():
                    time.sleep(_SERVER_POLL)
        return index >= 0

    def _enter(self, place: Place) -> RpcSession:
        """Open this process's part in remote calls, where it is not open yet, and begin a run there."""
        trainers, limit = self._trainers(place), self.timeouts.limits["startup"]
        name = f"trainer{place.rank}" if place.rank < trainers else f"server{place.rank - trainers}"
        if RpcSession.opened is None:
            _, store = find_store(place, limit, self.init_method)
            seconds = self.timeouts.limits["step"].total_seconds()
            RpcSession.opened = RpcSession(store, place.rank, place.world_size, name, seconds)
        servers = [f"server{index}" for index in range(self.servers)]
        RpcSession.opened.begin_stage(servers, limit, own=name if name in servers else None)
        return RpcSession.opened

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open remote calls to the servers, then the trainers' own process group."""
        # RPC before the process group: its rendezvous needs all processes, the group has the trainers only
        self.session, self.finished = self._enter(place), False
        trainers = self._trainers(place)
        super().join(replace(place, world_size=trainers, local_world_size=trainers), devices, precision)
        if self.meeting:
            self.meeting += f"; besides them {self.servers} with remote modules"

    # --- the task ---------------------------------------------------------------------------------------------------
    def build_model(self, task: "Task") -> None:
        """Build the task's modules, with proxies that call the servers for those that it names as remote."""
        task.configure_model()
        self.makers, self.remotes = dict(task.remote_modules()), {}
        if not self.makers:
            raise ConfigError(
                f"strategy ddp_rpc: {type(task).__name__} names no remote_modules, so the servers would have nothing "
                f"to hold. Define them, or use strategy ddp."
            )
        homes = {
            name: f"server{index}" for index, names in enumerate(dealt(self.makers, self.servers)) for name in names
        }
        for name in self.makers:
            before = dict(task.named_children()).get(name)
            self.remotes[name] = Remote(name, homes[name], self.place.rank == 0, self.device)
            setattr(task, name, self.remotes[name])
            if self.place.rank == 0 and before is not None and not isinstance(before, Remote):
                self.remotes[name].load_state_dict(before.state_dict())  # of an earlier run of this task
        # rank 0 loads weights on the servers; no other may call a module before that
        self.collectives.barrier()

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Make the servers' optimizers. Raises ConfigError for what does not go with remote modules."""
        if optimizers:
            self._refuse(task, optimizers)
        prepared = super().prepare(task, optimizers)
        self.context, self.held = None, {}
        if not optimizers:
            return prepared
        (optimizer,) = optimizers
        if self.place.rank == 0:
            for one in self.remotes.values():
                one.call("make_optimizer", type(optimizer), options_of(optimizer))
        self.collectives.barrier()
        return prepared

    def _refuse(self, task: "Task", optimizers: Sequence[Optimizer]) -> None:
        from ....tasks.task import Task

        trainer, groups = task.trainer, optimizers[0].param_groups
        parameters = [id(parameter) for parameter in task.parameters()]
        reasons = {
            "manual optimization: the gradients on servers are no optimizer's here": not task.automatic_optimization,
            "reproducible: bitwise: sums on a server depend on the trainers": trainer.reproducible == "bitwise",
            f"precision={trainer.precision}": trainer.precision not in (32, "32", "32-true", "bf16-mixed"),
            "nan=skip: a step is dropped by looking at all gradients, which no process has": trainer.nan == "skip",
            "sync_batchnorm=true: the gradients of its sums would meet in distributed autograd": trainer.sync_batchnorm,
            "recheck_every: the gradients of a second pass would be added up on servers": bool(trainer.recheck_every),
            "compile: remote calls are recorded as they are made": bool(trainer.compile),
            "a backward of the task's own: distributed autograd has its own": type(task).backward is not Task.backward,
            "gradient_clip_algorithm=norm: no process has all gradients. Clip by value": (
                trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
            ),
            f"{len(optimizers)} optimizers: the servers have one": len(optimizers) > 1,
            "several groups or a part of the parameters: the servers make theirs by an optimizer of one group with "
            "self.parameters()": len(groups) > 1 or [id(one) for one in groups[0]["params"]] != parameters,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(f"strategy ddp_rpc does not go with {reason}.")

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step in a distributed autograd context of its own."""
        self._open_context()
        output = super().training_step(arguments, replica, last)
        if weight_of(output) is not None:
            raise TaskError(
                "training_step returned a 'weight' beside its loss: strategy ddp_rpc sends gradients to its servers "
                "before the weights of all batches are known. Return the loss alone, or use strategy ddp."
            )
        return output

    def _open_context(self) -> int:
        # A context of its own for each batch: a second backward in the same context waits for ever (a distributed
        # autograd context holds one), and a thread can have one context at a time.
        if self.context is None:
            context = dist_autograd.context()
            self.context = context, context.__enter__()
        return self.context[1]

    def _close_context(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            context[0].__exit__(None, None, None)

    def backward(
        self, loss: Tensor, last: bool = True, inputs: Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss` here and on the servers; with the `last`, dense ones meet over the trainers."""
        if loss.requires_grad is False or loss.numel() != 1:
            raise TaskError(describe_bad_loss(loss))
        context = self._open_context()
        with peers_gone("server"):
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            for waiting in self._ask_servers(remote.collect_gradients, context, self.place.rank):
                waiting.wait()
        # distributed backward leaves gradients in the context and not in `grad`; DDP's hooks have reduced them there
        self._take(dist_autograd.get_gradients(context), last)  # type: ignore[attr-defined]
        self._close_context()

    def _ask_servers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every server that has a module; return what to wait for."""
        servers = sorted({one.server for one in self.remotes.values()})
        return [rpc.rpc_async(server, function, args=arguments) for server in servers]

    def _take(self, gradients: Mapping[Tensor, Tensor], last: bool) -> None:
        """Take the dense gradients of a batch; those of the last one are means over the trainers already."""
        assert self.task is not None
        for parameter in self.task.parameters():
            gradient, before = gradients.get(parameter), self.held.get(parameter)
            if gradient is None:
                continue
            if last:
                parameter.grad = gradient.clone()
            else:
                self.held[parameter] = gradient.clone() if before is None else before.add_(gradient)

    def end_step(self) -> None:
        """Add the gradients of the batches before the last one: in its context DDP reduces that one's alone."""
        super().end_step()
        assert self.task is not None
        # asked of the configuration and not of what this rank has held: all of them must meet in the same collectives
        if self.task.trainer.accumulate_grad_batches == 1 and self.layout.replicas <= self.layout.processes:
            return
        held, self.held = self.held, {}
        for parameter in trainable(self.task):
            before = held.get(parameter)
            before = torch.zeros_like(parameter) if before is None else before
            before = self.collectives.all_reduce(before, "sum").div_(self.place.world_size)
            parameter.grad = before if parameter.grad is None else parameter.grad + before

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in the trainers' reduction without a gradient."""
        if self.ddp is None or not last:
            self._close_context()
        else:
            self._open_context()
            self.backward(self._zero_loss(), last=True)

    def abandon_step(self) -> None:
        """Drop the gradients of a step that ends before its last batch, here and on the servers."""
        super().abandon_step()
        self._close_context()
        self.held = {}
        for waiting in self._ask_servers(remote.drop_gradients, self.place.rank):
            waiting.wait()

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip by value, here and on the servers."""
        self.clip_value = limit
        return super().clip(optimizer, limit, algorithm)

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Update the dense weights here, and let the servers update theirs once all trainers have come."""
        scale, trainers = 1.0 / self.loss_scale, self.place.world_size
        changed = options_of(optimizer) if self.place.rank == 0 else None
        with peers_gone("server"):
            # asynchronously, since a server answers when the last trainer has come, and the dense update can run
            # meanwhile
            step = "finish_step", trainers, scale, self.clip_value, changed
            waiting = [one.ask(*step) for one in self.remotes.values()]
            returned = super().optimizer_step(optimizer, closure, **options)
            for one in waiting:
                one.wait()
        self.collectives.barrier()  # no trainer looks at weights that are not updated yet
        return returned

    # --- the end ----------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Put the remote modules back on the task: with their weights on rank 0, without values on other trainers."""
        super().finish()
        if self.task is not None:
            is_kept = self.place.rank == 0
            for name, remote_module in self.remotes.items():
                # a proxy that outlives the run would call a server that has left it
                with nullcontext() if is_kept else torch.device("meta"):
                    module = self.makers[name]()
                if is_kept:
                    module.load_state_dict(remote_module.call("module.state_dict"))
                setattr(self.task, name, module if is_kept else module.to("meta"))
        self.collectives.barrier()
        self.finished = True

    def teardown(self) -> None:
        """Tell the servers that the run is over."""
        super().teardown()
        with suppress(RuntimeError):  # all servers may have gone
            self._close_context()
        self.held = {}
        if self.session is not None:
            self.session.end_stage(whole=self.finished)
        self.session = None


def dealt(names: Iterable[str], servers: int) -> list[list[str]]:
    """Return the names of the remote modules of each server: they are dealt out in turn."""
    # in turn and not in blocks: tables listed side by side are often alike in size
    listed = list(names)
    return [listed[server::servers] for server in range(servers)]


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer's only group, with which the servers make theirs."""
    known = inspect.signature(type(optimizer)).parameters.values()
    any_name = any(one.kind is one.VAR_KEYWORD for one in known)
    taken = optimizer.defaults.keys() if any_name else optimizer.defaults.keys() & {one.name for one in known}
    # AdamW has the default decoupled_weight_decay, which it gives to Adam and does not take itself
    return {name: value for name, value in optimizer.param_groups[0].items() if name in taken}


class RemoteStateDicts(StateDicts):
    """State dicts of a task whose remote modules, and their optimizers' states, are on servers."""

    def __init__(self, strategy: DDPRPCStrategy) -> None:
        super().__init__()
        self.strategy = strategy

    def parts(self, world_size: int) -> StateParts:
        """Return the trainers, which have the batches; what is remote, the task decides."""
        return StateParts(world_size - self.strategy.servers, weights=None)

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load weights, those of remote modules from rank 0 to their servers."""
        super().load_model(task, weights, strict)
        self.strategy.collectives.barrier()

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer` and the servers' as one process would have it; rank 0's is complete."""
        own = optimizer.state_dict()
        if self.strategy.collectives.rank > 0:
            return own
        states: dict[Remote | None, Any] = {None: own["state"]}
        for one in self.strategy.remotes.values():
            states[one] = one.call("optimizer.state_dict")["state"]
        # renumbered as in one process, where remote modules' parameters lie among the others
        places = self._places()
        state = {
            position: states[module][index]
            for position, (module, index) in enumerate(places)
            if index in states[module]
        }
        return {"state": state, "param_groups": [{**own["param_groups"][0], "params": list(range(len(places)))}]}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the state dict that one process would have: each part here or on its server."""
        places, group = self._places(), state["param_groups"][0]
        if len(places) != len(group["params"]):
            raise ValueError(f"it is of {len(group['params'])} parameters, here are {len(places)}")
        for module in (None, *self.strategy.remotes.values()):
            own = {position: index for position, (one, index) in enumerate(places) if one is module}
            values = {index: state["state"][position] for position, index in own.items() if position in state["state"]}
            part = {"state": values, "param_groups": [{**group, "params": list(range(len(own)))}]}
            if module is None:
                optimizer.load_state_dict(part)
            elif module.leads:
                module.call("optimizer.load_state_dict", part)
        self.strategy.collectives.barrier()

    def parameter_names(self, task: "Task", optimizer: Optimizer) -> list[list[str]] | None:
        """Return None: parameters on servers have no names here."""
        return None

    def _places(self) -> list[tuple[Remote | None, int]]:
        assert self.strategy.task is not None
        return remote.parameter_places(self.strategy.task)
