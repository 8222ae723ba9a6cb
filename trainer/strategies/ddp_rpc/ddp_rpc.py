"""DDP with parameter servers: every trainer has all dense layers, and server processes hold the large modules.

This strategy is for models with a module that is too large to replicate in every process, such as a recommender
system's embeddings. The task lists such modules in `remote_modules`. The first ranks of the run are trainers, and the
last ranks are servers. A step is equivalent to a step in a single process: DDP reduces the dense gradients, and each
server sums its modules' gradients and updates the modules once per step.
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

_SERVER_POLL = 0.05  # seconds between a server's checks for the end of the run


class DDPRPCStrategy(DDPStrategy):
    """One trainer per device, and `servers` additional processes for the modules in the task's `remote_modules`."""

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
        """Set the strategy's options.

        Args:
            servers: number of processes for the remote modules, in addition to trainer.devices.

        The other arguments are the same as for the ddp strategy. The timeout for the `step` phase also limits remote
        calls.
        """
        super().__init__(
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            init_method=init_method,
            timeout=timeout,
        )
        if isinstance(servers, bool) or servers < 1:
            raise ConfigError(f"strategy=ddp_rpc: expected servers >= 1, got {servers!r}.")
        self.servers = servers
        self.state_dicts = RemoteStateDicts(self)
        self.has_all_weights = False  # weights of remote modules are on servers
        self.session: RpcSession | None = None
        self.finished = False
        """True after a successful run."""
        self.remotes: dict[str, Remote] = {}
        self.makers: dict[str, Callable[[], nn.Module]] = {}
        self.context: tuple[Any, int] | None = None
        """The distributed autograd context of the current batch, and its id. A thread has at most one context."""
        self.held: dict[nn.Parameter, Tensor] = {}
        """Dense gradients on this process from all batches before the last one."""
        self.clip_value: float | None = None

    # --- processes --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return the number of processes: one trainer per device, plus the servers."""
        return len(devices) + self.servers

    def _trainers(self, place: Place) -> int:
        """Return the number of trainers, which have the lowest ranks.

        Raises ConfigError if there are no trainers, or if the strategy does not support this layout of processes.
        """
        trainers = place.world_size - self.servers
        if place.origin == "script":
            raise ConfigError(
                "strategy=ddp_rpc creates separate process groups for trainers and servers. Either remove the "
                "process group initialization from your script, or set trainer.cluster=off."
            )
        if place.nodes > 1:
            raise ConfigError(f"strategy=ddp_rpc runs on one node only, got {place.nodes} nodes. Set num_nodes=1.")
        if trainers < 1:
            raise ConfigError(
                f"strategy=ddp_rpc needs at least one trainer, but {place.world_size} processes minus "
                f"{self.servers} servers leaves {trainers} trainers. Start trainer.devices + servers processes."
            )
        return trainers

    def serve(self, place: Place, task: "Task | None" = None, seed: int = 0) -> bool:
        """Return whether this process is a server.

        If it is a server and `task` is given, build and serve its share of the remote modules until the run ends.
        """
        index = place.rank - self._trainers(place)
        if index >= 0 and task is not None:
            remote.build_served_modules(task, divided(task.remote_modules(), self.servers)[index], seed)
            # after building the modules, because this call tells the trainers that they can use them
            session = self._enter(place)
            with handling_end_signals(lambda number: None):  # a server must outlive trainers that save after a signal
                while not session.is_over():
                    time.sleep(_SERVER_POLL)
        return index >= 0

    def _enter(self, place: Place) -> RpcSession:
        """Open this process's RPC session, unless it is already open, and start a run in it."""
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
        """Join the RPC session, then the trainers' process group."""
        # RPC first: its rendezvous needs all processes, but only trainers are in the group
        self.session, self.finished = self._enter(place), False
        trainers = self._trainers(place)
        super().join(replace(place, world_size=trainers, local_world_size=trainers), devices, precision)
        if self.meeting:
            self.meeting += f"; plus {self.servers} with remote modules"

    # --- the task ---------------------------------------------------------------------------------------------------
    def build_model(self, task: "Task") -> None:
        """Build the task's modules, with proxies for the remote modules."""
        task.configure_model()
        self.makers, self.remotes = dict(task.remote_modules()), {}
        if not self.makers:
            raise ConfigError(
                f"strategy=ddp_rpc: {type(task).__name__} has no remote_modules, so the servers would have no modules. "
                f"Define remote_modules(), or use strategy=ddp."
            )
        homes = {
            name: f"server{index}" for index, names in enumerate(divided(self.makers, self.servers)) for name in names
        }
        for name in self.makers:
            trained = dict(task.named_children()).get(name)  # by an earlier run of this task
            self.remotes[name] = Remote(name, homes[name], self.place.rank == 0, self.device)
            setattr(task, name, self.remotes[name])
            if self.place.rank == 0 and trained is not None and not isinstance(trained, Remote):
                self.remotes[name].load_state_dict(trained.state_dict())
        # rank 0 loads weights on the servers before any other rank may call them
        self.collectives.barrier()

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Create the servers' optimizers. Raises ConfigError for settings that remote modules do not support."""
        if optimizers:
            self._refuse(task, optimizers)
        prepared = super().prepare(task, optimizers)
        self.context, self.held = None, {}
        if not optimizers:
            return prepared
        (optimizer,) = optimizers
        if self.place.rank == 0:
            for module in self.remotes.values():
                module.call("make_optimizer", type(optimizer), options_of(optimizer))
        self.collectives.barrier()
        return prepared

    def _refuse(self, task: "Task", optimizers: Sequence[Optimizer]) -> None:
        from ....tasks.task import Task

        trainer, groups = task.trainer, optimizers[0].param_groups
        parameters = [id(parameter) for parameter in task.parameters()]
        reasons = {
            "manual optimization, because the servers hold some of the gradients": not task.automatic_optimization,
            "reproducible=bitwise, because sums depend on the number of trainers": trainer.reproducible == "bitwise",
            f"precision={trainer.precision}": trainer.precision not in (32, "32", "32-true", "bf16-mixed"),
            "nan=skip, which checks all gradients, because no process has all of them": trainer.nan == "skip",
            "sync_batchnorm=true, whose sums distributed autograd does not reduce": trainer.sync_batchnorm,
            "recheck_every, because servers would add the gradients of the second pass": bool(trainer.recheck_every),
            "compile, because remote calls are recorded at run time": bool(trainer.compile),
            "an overridden backward, because the strategy runs its own": type(task).backward is not Task.backward,
            "gradient_clip_algorithm=norm, because no process has all gradients; clip by value": (
                trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
            ),
            f"{len(optimizers)} optimizers, because servers have only one": len(optimizers) > 1,
            "an optimizer with several groups or without some parameters, because servers copy its options; create it "
            "from self.parameters()": len(groups) > 1 or [id(weight) for weight in groups[0]["params"]] != parameters,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(f"strategy=ddp_rpc does not support {reason}.")

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step in a new distributed autograd context."""
        self._open_context()
        output = super().training_step(arguments, replica, last)
        if weight_of(output) is not None:
            raise TaskError(
                "training_step returned a 'weight' with its loss, but strategy=ddp_rpc sends gradients to its servers "
                "before it knows the weights of all batches. Return the loss alone, or use strategy=ddp."
            )
        return output

    def _open_context(self) -> int:
        # One context per batch, because a distributed autograd context supports only one backward pass, and a second
        # backward pass never returns. A thread can have only one context at a time.
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
        """Accumulate gradients of `loss` in this process and on the servers.

        If `last` is True, reduce the dense gradients over the trainers.
        """
        if loss.requires_grad is False or loss.numel() != 1:
            raise TaskError(describe_bad_loss(loss))
        context = self._open_context()
        with peers_gone("server"):
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            for waiting in self._ask_servers(remote.collect_gradients, context, self.place.rank):
                waiting.wait()
        # distributed autograd leaves gradients in the context, not in `grad`; DDP's hooks have reduced them there
        self._take(dist_autograd.get_gradients(context), last)  # type: ignore[attr-defined]
        self._close_context()

    def _ask_servers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function asynchronously on every server that has a module. Return the futures."""
        servers = sorted({module.server for module in self.remotes.values()})
        return [rpc.rpc_async(server, function, args=arguments) for server in servers]

    def _take(self, gradients: Mapping[Tensor, Tensor], last: bool) -> None:
        """Collect the dense gradients of a batch. DDP has already averaged the last batch's gradients."""
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
        """Reduce and add earlier batches' gradients, because DDP reduces only those of the last batch."""
        super().end_step()
        assert self.task is not None
        # the config decides, not this rank's gradients: all ranks must issue the same collectives
        if self.task.trainer.accumulate_grad_batches == 1 and self.layout.replicas <= self.layout.processes:
            return
        held, self.held = self.held, {}
        for parameter in trainable(self.task):
            before = held.get(parameter)
            before = torch.zeros_like(parameter) if before is None else before
            before = self.collectives.all_reduce(before, "sum").div_(self.place.world_size)
            parameter.grad = before if parameter.grad is None else parameter.grad + before

    def leave_out(self, last: bool, after_forward: bool) -> None:
        """Take part in the trainers' all-reduce with zero gradients."""
        if self.ddp is None or not last:
            self._close_context()
        else:
            self._open_context()
            self.backward(self._zero_loss(), last=True)

    def abandon_step(self) -> None:
        """Drop the gradients of an unfinished step in this process and on the servers."""
        super().abandon_step()
        self._close_context()
        self.held = {}
        for waiting in self._ask_servers(remote.drop_gradients, self.place.rank):
            waiting.wait()

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip gradients by value in this process and on the servers."""
        self.clip_value = limit
        return super().clip(optimizer, limit, algorithm)

    def optimizer_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Update this process's dense weights. Each server updates its weights once all trainers have called this."""
        scale, trainers = 1.0 / self.loss_scale, self.place.world_size
        changed = options_of(optimizer) if self.place.rank == 0 else None
        with peers_gone("server"):
            # asynchronous, to overlap with the dense update
            step = "finish_step", trainers, scale, self.clip_value, changed
            waiting = [module.ask(*step) for module in self.remotes.values()]
            returned = super().optimizer_step(optimizer, closure, **options)
            for future in waiting:
                future.wait()
        self.collectives.barrier()  # servers reply before the last trainer has called, so wait for all trainers
        return returned

    # --- the end ----------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Build the remote modules in the task, with trained weights on rank 0 and meta tensors on other ranks."""
        super().finish()
        if self.task is not None:
            is_kept = self.place.rank == 0
            for name, remote_module in self.remotes.items():
                # a proxy must not outlive the run, because the servers exit with the run
                with nullcontext() if is_kept else torch.device("meta"):
                    module = self.makers[name]()
                if is_kept:
                    module.load_state_dict(remote_module.call("module.state_dict"))
                setattr(self.task, name, module if is_kept else module.to("meta"))
        self.collectives.barrier()
        self.finished = True

    def teardown(self) -> None:
        """Tell the servers that the run has ended."""
        super().teardown()
        with suppress(RuntimeError):  # the servers may be gone
            self._close_context()
        self.held = {}
        if self.session is not None:
            self.session.end_stage(whole=self.finished)
        self.session = None


def divided(names: Iterable[str], servers: int) -> list[list[str]]:
    """Return the names of the remote modules on each server, assigned round-robin."""
    # not in contiguous blocks, because adjacent tables often have the same size
    listed = list(names)
    return [listed[server::servers] for server in range(servers)]


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer's only parameter group, for the servers' optimizers."""
    arguments = inspect.signature(type(optimizer)).parameters.values()
    has_kwargs = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    # not all defaults are arguments: Adam accepts decoupled_weight_decay, but AdamW does not
    names = optimizer.defaults.keys() if has_kwargs else optimizer.defaults.keys() & {item.name for item in arguments}
    return {name: value for name, value in optimizer.param_groups[0].items() if name in names}


class RemoteStateDicts(StateDicts):
    """State dicts for a task that keeps modules and optimizer states on servers."""

    def __init__(self, strategy: DDPRPCStrategy) -> None:
        super().__init__()
        self.strategy = strategy

    def parts(self, world_size: int) -> StateParts:
        """Return how a run is divided among processes.

        Only trainers process batches. The task determines how weights are sharded.
        """
        return StateParts(world_size - self.strategy.servers, weights=None)

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load weights. Rank 0 sends the weights of remote modules to their servers."""
        super().load_model(task, weights, strict)
        self.strategy.collectives.barrier()

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that `optimizer` would have in a single process.

        Only the result on rank 0 contains the states of remote modules.
        """
        local = optimizer.state_dict()
        if self.strategy.collectives.rank > 0:
            return local
        states: dict[Remote | None, Any] = {None: local["state"]}
        for remote_module in self.strategy.remotes.values():
            states[remote_module] = remote_module.call("optimizer.state_dict")["state"]
        # numbered as in a single process, where the parameters of remote modules are mixed with the others
        places = self._places()
        state = {
            position: states[module][index]
            for position, (module, index) in enumerate(places)
            if index in states[module]
        }
        return {"state": state, "param_groups": [{**local["param_groups"][0], "params": list(range(len(places)))}]}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state dict in the format of a single process, both in this process and on the servers."""
        places, group = self._places(), state["param_groups"][0]
        if len(places) != len(group["params"]):
            raise ValueError(f"expected states for {len(places)} parameters, got {len(group['params'])}")
        for module in (None, *self.strategy.remotes.values()):
            ids = {position: index for position, (home, index) in enumerate(places) if home is module}
            values = {index: state["state"][position] for position, index in ids.items() if position in state["state"]}
            module_state = {"state": values, "param_groups": [{**group, "params": list(range(len(ids)))}]}
            if module is None:
                optimizer.load_state_dict(module_state)
            elif module.leads:
                module.call("optimizer.load_state_dict", module_state)
        self.strategy.collectives.barrier()

    def parameter_names(self, task: "Task", optimizer: Optimizer) -> list[list[str]] | None:
        """Return None, because the names of parameters on servers are unknown."""
        return None

    def _places(self) -> list[tuple[Remote | None, int]]:
        assert self.strategy.task is not None
        return remote.parameter_places(self.strategy.task)
