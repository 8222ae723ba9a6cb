"""Strategies with Lightning's arguments and attributes, on Legato's."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.errors import ConfigError
from ...trainer.strategies import strategy
from ...trainer.strategies.ddp import DDPStrategy as DistributedDataParallel
from ...trainer.strategies.group import GroupStrategy
from ...trainer.strategies.mesh.mesh import FSDPStrategy as FullyShard
from ...trainer.strategies.pipeline.pipeline import PipelineMeshStrategy
from ...trainer.strategies.strategy import SingleStrategy
from .accelerators import KINDS, Accelerator, Registry
from .aliases import alias
from .checkpoint import read, write
from .placeholders import UnsupportedError, overridden, refuse_overrides
from .plugins import ClusterEnvironment, Precision, read_plugins
from .rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from .module import LightningModule

StrategyOfLegato = strategy.Strategy
DEFAULT_TIMEOUT = timedelta(minutes=30)


class Strategy(strategy.Strategy):
    """Base of the strategies: has what programs read, under Lightning's names. Give a Trainer one of the subclasses."""

    strategy_name = ""
    """Lightning's word for it."""
    given: dict[str, Any]
    """The arguments of Trainer that came as arguments of the strategy."""
    _lightning_module: Any = None
    """The module that a program has named before a run; private in Lightning, and set by programs."""

    def take_parts(
        self, accelerator: Any = None, cluster_environment: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        """Keep what was given to the strategy instead of to the Trainer, for `Trainer` to read."""
        self.given = read_plugins([one for one in (cluster_environment, checkpoint_io, precision) if one is not None])
        if accelerator is not None:
            self.given["accelerator"] = accelerator

    root_device, parallel_devices = alias("device"), alias("devices")

    @property
    def accelerator(self) -> Accelerator:
        """The kind of the devices."""
        return KINDS[self.device.type]()

    @property
    def precision_plugin(self) -> Precision:
        """The precision, with the scaler of the run."""
        found = Precision()
        found.precision, found.scaler = self.precision.name, self.precision.scaler
        return found

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        """The place of this process."""
        return ClusterEnvironment()

    @property
    def lightning_module(self) -> "LightningModule | None":
        """The module of the run; None before one."""
        found: LightningModule | None = self.task or self._lightning_module  # type: ignore[assignment]
        return found

    @property
    def model(self) -> nn.Module | None:
        """The module of the run; None before one."""
        return self.lightning_module

    def connect(self, model: Any) -> None:
        """Name a module before a run."""
        self._lightning_module = model

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state."""
        return {} if self.lightning_module is None else self.lightning_module.state_dict()

    @property
    def checkpoint_io(self) -> "TorchCheckpointIO":
        """Reads and writes files in Lightning's form."""
        return TorchCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a dict as torch.save does, whole or not at all, on rank 0."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what Lightning's file of a checkpoint holds."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, None, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or checkpoint, on rank 0."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run."""
        return [] if self.task is None else self.task.trainer.optimizers

    @optimizers.setter
    def optimizers(self, value: list[Optimizer]) -> None:
        self.task.trainer.optimizers = value  # type: ignore[union-attr, misc]

    # the place of this process; barriers and reductions are over all of them
    global_rank, local_rank, node_rank = alias("place.rank"), alias("place.local_rank"), alias("place.node_rank")
    world_size, num_nodes = alias("place.world_size"), alias("place.nodes")

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank."""
        # the common case; of another rank there is no broadcast of objects
        if src == 0:
            return self.collectives.broadcast(obj)
        return self.collectives.gather_objects(obj if self.place.rank == src else None)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction of a tensor over all ranks; anything else is returned as it is."""
        # Lightning passes on what is no tensor, and programs rely on it
        if not isinstance(tensor, Tensor) or self.place.world_size == 1:
            return tensor
        if group is not None:
            raise UnsupportedError("strategy.reduce(group=...): torch.distributed.all_reduce reduces over a group.")
        word = str(getattr(reduce_op, "name", None) or reduce_op).rpartition(".")[2].lower()
        kind = {"mean": "sum", "avg": "sum"}.get(word, word)
        if kind not in ("sum", "max", "min", "product"):
            raise ConfigError(f"strategy.reduce(reduce_op={reduce_op!r}): expected mean, sum, max, min or product.")
        # of a copy: Lightning leaves the tensor that it is given as it is
        found = self.collectives.all_reduce(tensor.clone(), kind)
        return found / self.place.world_size if word in ("mean", "avg") else found

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every rank's tensor, stacked; on one process the tensor itself."""
        if self.place.world_size == 1 or self.task is None:
            return tensor
        return self.task.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any rank, say yes."""
        return bool(self.reduce(torch.tensor(int(decision), device=self.device), reduce_op="min" if all else "max"))


class CheckpointIO(ABC):
    """Base of what reads and writes files; a Trainer is given none, since Legato writes its checkpoints itself."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint's contents."""

    @abstractmethod
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint's contents."""

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint."""

    def teardown(self) -> None:  # noqa: B027 (a subclass may do without)
        """Leave nothing behind."""


class TorchCheckpointIO(CheckpointIO):
    """Reads and writes files in Lightning's form, for programs that hold a checkpoint's contents themselves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a dict as torch.save does, whole or not at all."""
        write(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what a file holds, or what Lightning's file of a checkpoint would hold."""
        saved: dict[str, Any] = read(path, map_location, weights_only)
        return saved

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, or a checkpoint."""
        Path(path).unlink(missing_ok=True)


class OwnBackward(strategy.Strategy):
    """Takes a backward of a program's own, beside those of the run; the first base of the strategies."""

    def backward(
        self,
        loss: Tensor,
        last: Any = True,
        inputs: Any = None,
        retain_graph: bool = False,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        """Compute gradients; a program gives an optimizer or None in the place of `last`, which is True or False."""
        if isinstance(last, bool) and optimizer is None:
            super().backward(loss, last, inputs, retain_graph)
        elif self.task is not None:  # which refuses it under automatic optimization
            # not by the task's own method, which a program may have overridden to call this one
            run = self.task.trainer.current_run
            run.optimization.manual_backward(loss, inputs=inputs, retain_graph=retain_graph, **options)


class ParallelStrategy(Strategy):
    """Base of the strategies with several processes."""

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if not isinstance(self, GroupStrategy):
            raise UnsupportedError(f"{type(self).__name__}: {OWN_STRATEGY}")
        super().__init__()


CALLED_BY_LIGHTNING = (
    *("setup", "setup_environment", "setup_optimizers", "setup_distributed", "configure_ddp", "pre_configure_ddp"),
    *("_setup_model", "_setup_optimizer", "_setup_model_and_optimizers", "_configure_launcher"),
    *("optimizer_step", "training_step", "validation_step", "test_step", "predict_step"),
    *("pre_backward", "post_backward", "post_training_step", "process_dataloader", "batch_to_device"),
)
"""Methods of a strategy that make a run what it is under Lightning, and that a run of Legato's does not call."""
LAUNCHER = "_configure_launcher"
LAUNCHING = LAUNCHER, "setup_environment", "teardown"
"""Methods of a strategy that starts processes in its own way."""
OWN_STRATEGY = (
    "a strategy of one's own implements legato.trainer.strategies.Strategy; else give Trainer SingleDeviceStrategy, "
    "DDPStrategy, FSDPStrategy or ModelParallelStrategy."
)


class SingleDeviceStrategy(OwnBackward, Strategy, SingleStrategy):
    """One process, one device."""

    strategy_name = "single_device"

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        SingleStrategy.__init__(self)
        self.take_parts(accelerator, None, checkpoint_io, precision_plugin)
        self.device = torch.device(device)
        if self.device.type != "cpu" or self.device.index is not None:
            self.given.setdefault("accelerator", self.device.type)
            self.given["devices"] = [self.device.index or 0]


class DDPStrategy(OwnBackward, DistributedDataParallel, ParallelStrategy):
    """One process for each device; `kwargs` are those of torch's DistributedDataParallel."""

    strategy_name = "ddp"

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: Any = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        unknown = kwargs.keys() - signature(options_of_ddp).parameters.keys()
        if unknown:
            raise UnsupportedError(
                f"DDPStrategy({sorted(unknown)[0]}=...) is not passed on to torch's DistributedDataParallel; there are "
                f"{', '.join(signature(options_of_ddp).parameters)}."
            )
        if ddp_comm_hook is not None or model_averaging_period is not None:
            raise UnsupportedError(
                "DDPStrategy(ddp_comm_hook=..., model_averaging_period=...): gradients meet in each step, in float32. "
                "Another reduction is a strategy of its own, a subclass of legato.strategies.GroupStrategy."
            )
        super().__init__(
            **options_of_ddp(**kwargs),
            process_group_backend=process_group_backend,
            timeout=(timeout or DEFAULT_TIMEOUT).total_seconds(),
        )
        self.take_parts(accelerator, cluster_environment, checkpoint_io, precision_plugin)
        self.start_method = start_method
        self.given |= _devices_of(parallel_devices)


def options_of_ddp(
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
) -> dict[str, Any]:
    """Return options of DistributedDataParallel; jsonargparse reads from this signature what a config may name.

    `static_graph` only makes torch faster; Legato takes the graph of each step as it comes. With `broadcast_buffers` or
    without, buffers are those of rank 0 after each step.
    """
    options = dict(locals())
    del options["static_graph"], options["broadcast_buffers"]
    return options


class FSDPStrategy(OwnBackward, FullyShard, ParallelStrategy):
    """Parameters, gradients and optimizer states sharded over all processes."""

    strategy_name = "fsdp"

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: Any = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        """`auto_wrap_policy`: a set of classes; without one, blocks go by their size.

        `state_dict_type` is accepted: a checkpoint holds one file for each rank and is read on any number of them.
        """
        refused = {"mixed_precision": mixed_precision, "device_mesh": device_mesh, **kwargs}
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedError(f"FSDPStrategy({name}=...): {FSDP_INSTEAD.get(name, FSDP_INSTEAD[''])}")
        word = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
        if word not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise UnsupportedError(
                f"FSDPStrategy(sharding_strategy={word!r}): there are FULL_SHARD and SHARD_GRAD_OP. Legato's strategy "
                f"{{'name': 'mesh', 'data': 2, 'shard': 4}} is HYBRID_SHARD, 'ddp' is NO_SHARD."
            )
        blocks = _class_names(auto_wrap_policy, "auto_wrap_policy")
        offload = getattr(cpu_offload, "offload_params", bool(cpu_offload))
        super().__init__(
            shard_blocks=1_000_000 if blocks is None else blocks,
            reshard_after_forward=False if word == "SHARD_GRAD_OP" else None,
            cpu_offload=bool(offload),
            process_group_backend=process_group_backend,
            timeout=(timeout or DEFAULT_TIMEOUT).total_seconds(),
        )
        self.take_parts(accelerator, cluster_environment, checkpoint_io, precision_plugin)
        self.given |= _devices_of(parallel_devices)
        recomputed = (
            activation_checkpointing if activation_checkpointing_policy is None else (activation_checkpointing_policy)
        )
        if recomputed is not None:
            self.given["activation_checkpointing"] = _class_names(recomputed, "activation_checkpointing_policy")


FSDP_INSTEAD = {
    "mixed_precision": "say Trainer(precision=...), which decides the types.",
    "device_mesh": "say Trainer(strategy={'name': 'mesh', 'data': 2, 'shard': 4}) with Legato's Trainer.",
    "": "torch's fully_shard, which this strategy uses, has no such argument.",
}


class ModelParallelStrategy(OwnBackward, PipelineMeshStrategy, ParallelStrategy):
    """Data, sharding and tensor parallelism over one mesh; `configure_model` may apply torch's parallel styles."""

    strategy_name = "model_parallel"

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: Any = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        both = data_parallel_size == "auto" and tensor_parallel_size == "auto"
        super().__init__(
            shard=data_parallel_size,
            tensor=1 if both else tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=(timeout or DEFAULT_TIMEOUT).total_seconds(),
        )
        self.take_parts()


DEEPSPEED = (
    "Strategy fsdp shards parameters, gradients and optimizer states as ZeRO stage 3 does, Legato's zero1 the "
    "optimizer states alone: say strategy='fsdp'."
)
XLA = "Legato runs on CPU, CUDA and MPS devices: say accelerator='auto'."
WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "single_device": ("single", {}),
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp_cpu_offload": ("fsdp", {"cpu_offload": True}),
    "model_parallel": ("mesh", {}),
    **{
        word + ending: ("ddp", options)
        for word in ("ddp", "ddp_fork", "ddp_notebook", "ddp_spawn", "ddp_forkserver")
        for ending, options in (
            ("", {}),
            ("_find_unused_parameters_true", {"find_unused_parameters": True}),
            ("_find_unused_parameters_false", {"find_unused_parameters": False}),
        )
    },
}
"""Lightning's words for strategies: Legato's name of it, and options."""
CLASSES: dict[str, type[Strategy]] = {
    "single": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "mesh": ModelParallelStrategy,
}


def _check_overrides(wanted: Strategy) -> None:
    """Refuse a strategy whose methods would not be called; one that starts processes in its own way is told so."""
    launching = overridden(wanted, LAUNCHING)
    if LAUNCHER not in launching:
        refuse_overrides(wanted, CALLED_BY_LIGHTNING, OWN_STRATEGY)
        return
    refuse_overrides(wanted, set(CALLED_BY_LIGHTNING) - set(launching), OWN_STRATEGY)
    rank_zero_warn(
        f"{type(wanted).__name__}.{', '.join(launching)}: Legato starts the processes itself, so that these are not "
        f"called. To start them otherwise use torchrun, or SLURM."
    )


StrategyRegistry = Registry(
    {word: partial(CLASSES[name], **options) for word, (name, options) in WORDS.items() if name != "auto"}
)


def read_strategy(wanted: Any) -> Any:
    """Return Trainer's `strategy` as Legato takes it. Raises for words of strategies that there are not."""
    if isinstance(wanted, str) and wanted in StrategyRegistry.keys() - WORDS.keys():
        wanted = StrategyRegistry.get(wanted)
    if not isinstance(wanted, str):
        if isinstance(wanted, Strategy) and not isinstance(wanted, (SingleStrategy, GroupStrategy)):
            raise UnsupportedError(f"{type(wanted).__name__}: {OWN_STRATEGY}")
        if isinstance(wanted, Strategy):
            _check_overrides(wanted)
        if isinstance(wanted, (strategy.Strategy, dict)):
            return wanted
        raise ConfigError(f"Trainer(strategy=...) takes a word or a Strategy, got {type(wanted).__name__}.")
    word = wanted.lower()
    if word in WORDS:
        name, options = WORDS[word]
        return {"name": name, **options} if options else name
    if word.startswith("deepspeed"):
        raise UnsupportedError(f"strategy={wanted!r}: {DEEPSPEED}")
    if "xla" in word or word.startswith(("tpu", "hpu")):
        raise UnsupportedError(f"strategy={wanted!r}: {XLA}")
    if word == "dp":
        raise UnsupportedError(f"strategy={wanted!r} went out with Lightning 2.0: say strategy='ddp'.")
    return wanted  # Legato's own names, and the message about one that is not known


def with_attributes(made: strategy.Strategy, wanted: Any) -> Any:
    """Return the strategy that was made for a word or a mapping as a class with Lightning's attributes."""
    if made is wanted or made.name not in CLASSES:
        return made
    options = {name: value for name, value in wanted.items() if name != "name"} if isinstance(wanted, dict) else {}
    return CLASSES[made.name](**options)


def _devices_of(devices: list[torch.device] | None) -> dict[str, Any]:
    if not devices:
        return {}
    return {"accelerator": devices[0].type, "devices": [device.index or index for index, device in enumerate(devices)]}


def _class_names(policy: Any, argument: str) -> list[str] | None:
    """Return the names of the classes in a set."""
    if policy is None:
        return None
    classes = [policy] if isinstance(policy, type) else policy
    if not isinstance(classes, (set, frozenset, list, tuple)):
        raise UnsupportedError(f"FSDPStrategy({argument}={type(policy).__name__}): give the set of classes to wrap.")
    return sorted(one.__name__ for one in classes)
