"""Strategies with Lightning's arguments and attributes, based on Legato's strategies."""

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
    """Base class for strategies with Lightning's attributes. A Trainer accepts only subclasses of this class."""

    strategy_name = ""
    """Lightning's name for the strategy."""
    trainer_arguments: dict[str, Any]
    """Trainer arguments that were passed to the strategy."""
    _lightning_module: Any = None
    """The module that a program set before a run. Private in Lightning; programs set it."""

    def store_arguments(
        self, accelerator: Any = None, cluster_environment: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        """Store Trainer arguments that the program passed to the strategy."""
        plugins = [item for item in (cluster_environment, checkpoint_io, precision) if item is not None]
        self.trainer_arguments = read_plugins(plugins)
        if accelerator is not None:
            self.trainer_arguments["accelerator"] = accelerator

    root_device, parallel_devices = alias("device"), alias("devices")

    @property
    def accelerator(self) -> Accelerator:
        """The device type."""
        return KINDS[self.device.type]()

    @property
    def precision_plugin(self) -> Precision:
        """The run's precision, including its gradient scaler."""
        precision = Precision()
        precision.precision, precision.scaler = self.precision.name, self.precision.scaler
        return precision

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        """This process's rank and node."""
        return ClusterEnvironment()

    @property
    def lightning_module(self) -> "LightningModule | None":
        """The run's module, or None before a run."""
        module: LightningModule | None = self.task or self._lightning_module  # type: ignore[assignment]
        return module

    @property
    def model(self) -> nn.Module | None:
        """The run's module, or None before a run."""
        return self.lightning_module

    def connect(self, model: Any) -> None:
        """Set the module before a run."""
        self._lightning_module = model

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state."""
        return {} if self.lightning_module is None else self.lightning_module.state_dict()

    @property
    def checkpoint_io(self) -> "TorchCheckpointIO":
        """The plugin that reads and writes files in Lightning's format."""
        return TorchCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On rank 0, write a dict as torch.save does, but atomically."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint in Lightning's format."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, None, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or checkpoint on rank 0."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run."""
        return [] if self.task is None else self.task.trainer.optimizers

    @optimizers.setter
    def optimizers(self, value: list[Optimizer]) -> None:
        self.task.trainer.optimizers = value  # type: ignore[union-attr, misc]

    # the place of this process; barriers and reductions include all processes
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
        # the common case; objects cannot be broadcast from other ranks
        if src == 0:
            return self.collectives.broadcast(obj)
        return self.collectives.gather_objects(obj if self.place.rank == src else None)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor across all ranks. Any other object is returned unchanged."""
        # Lightning returns other objects unchanged, and programs rely on this
        if not isinstance(tensor, Tensor) or self.place.world_size == 1:
            return tensor
        if group is not None:
            raise UnsupportedError("strategy.reduce(group=...) is not supported. Use torch.distributed.all_reduce.")
        word = str(getattr(reduce_op, "name", None) or reduce_op).rpartition(".")[2].lower()
        kind = {"mean": "sum", "avg": "sum"}.get(word, word)
        if kind not in ("sum", "max", "min", "product"):
            raise ConfigError(f"strategy.reduce(reduce_op={reduce_op!r}): expected mean, sum, max, min or product.")
        # on a copy, because Lightning does not change its argument
        reduced = self.collectives.all_reduce(tensor.clone(), kind)
        return reduced / self.place.world_size if word in ("mean", "avg") else reduced

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors from all ranks, stacked. If there is only one process, return `tensor` unchanged."""
        if self.place.world_size == 1 or self.task is None:
            return tensor
        return self.task.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks or, if `all` is False, on any rank."""
        return bool(self.reduce(torch.tensor(int(decision), device=self.device), reduce_op="min" if all else "max"))


class CheckpointIO(ABC):
    """Base class for checkpoint I/O plugins. The Trainer rejects them because Legato writes checkpoints itself."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the contents of a checkpoint."""

    @abstractmethod
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint."""

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint."""

    def teardown(self) -> None:  # noqa: B027 (a subclass may do without)
        """Do nothing."""


class TorchCheckpointIO(CheckpointIO):
    """Reads and writes files in Lightning's format, for programs that handle checkpoint contents themselves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a dict as torch.save does, but atomically."""
        write(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a file, such as a checkpoint in Lightning's format."""
        saved: dict[str, Any] = read(path, map_location, weights_only)
        return saved

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or checkpoint."""
        Path(path).unlink(missing_ok=True)


class OwnBackward(strategy.Strategy):
    """Mixin that also accepts `backward` calls from a program. It must be a strategy's first base class."""

    def backward(
        self,
        loss: Tensor,
        last: Any = True,
        inputs: Any = None,
        retain_graph: bool = False,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        """Compute gradients.

        `last` is a bool when a run calls this method, and an optimizer or None when a program calls it.
        """
        if isinstance(last, bool) and optimizer is None:
            super().backward(loss, last, inputs, retain_graph)
        elif self.task is not None:  # it raises an error under automatic optimization
            # not the task's method, because a program may have overridden it to call this one
            run = self.task.trainer.current_run
            run.optimization.manual_backward(loss, inputs=inputs, retain_graph=retain_graph, **options)


class ParallelStrategy(Strategy):
    """Base class for strategies with multiple processes."""

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
"""Methods of a strategy that control a run in Lightning but are not called in Legato."""
LAUNCHER = "_configure_launcher"
LAUNCHING = LAUNCHER, "setup_environment", "teardown"
"""Methods that a strategy overrides to start processes itself."""
OWN_STRATEGY = (
    "subclass legato.trainer.strategies.Strategy for a custom strategy, or pass SingleDeviceStrategy, DDPStrategy, "
    "FSDPStrategy or ModelParallelStrategy to Trainer."
)


class SingleDeviceStrategy(OwnBackward, Strategy, SingleStrategy):
    """A single process on a single device."""

    strategy_name = "single_device"

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        SingleStrategy.__init__(self)
        self.store_arguments(accelerator, None, checkpoint_io, precision_plugin)
        self.device = torch.device(device)
        if self.device.type != "cpu" or self.device.index is not None:
            self.trainer_arguments.setdefault("accelerator", self.device.type)
            self.trainer_arguments["devices"] = [self.device.index or 0]


class DDPStrategy(OwnBackward, DistributedDataParallel, ParallelStrategy):
    """Runs one process per device. `kwargs` are options for torch's DistributedDataParallel."""

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
                f"DDPStrategy({sorted(unknown)[0]}=...) is not supported. The supported options of torch's "
                f"DistributedDataParallel are {', '.join(signature(options_of_ddp).parameters)}."
            )
        if ddp_comm_hook is not None or model_averaging_period is not None:
            raise UnsupportedError(
                "DDPStrategy(ddp_comm_hook=..., model_averaging_period=...) is not supported: gradients are reduced "
                "in float32 at every step. For a different reduction, subclass legato.strategies.GroupStrategy."
            )
        super().__init__(
            **options_of_ddp(**kwargs),
            process_group_backend=process_group_backend,
            timeout=(timeout or DEFAULT_TIMEOUT).total_seconds(),
        )
        self.store_arguments(accelerator, cluster_environment, checkpoint_io, precision_plugin)
        self.start_method = start_method
        self.trainer_arguments |= _devices_of(parallel_devices)


def options_of_ddp(
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
) -> dict[str, Any]:
    """Return options for DistributedDataParallel. jsonargparse reads this signature to determine the config keys.

    `static_graph` has no effect, because in torch it only affects speed. After each step, all ranks have rank 0's
    buffers, regardless of `broadcast_buffers`.
    """
    options = dict(locals())
    del options["static_graph"], options["broadcast_buffers"]
    return options


class FSDPStrategy(OwnBackward, FullyShard, ParallelStrategy):
    """Shards parameters, gradients and optimizer states across all processes."""

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
        """Create the strategy.

        Args:
            auto_wrap_policy: Set of module classes to wrap. By default, Legato selects blocks by size.
            state_dict_type: Has no effect, because a checkpoint is a single file that any number of processes can read.
        """
        refused = {"mixed_precision": mixed_precision, "device_mesh": device_mesh, **kwargs}
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedError(f"FSDPStrategy({name}=...): {FSDP_INSTEAD.get(name, FSDP_INSTEAD[''])}")
        word = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
        if word not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise UnsupportedError(
                f"FSDPStrategy(sharding_strategy={word!r}): expected FULL_SHARD or SHARD_GRAD_OP. For HYBRID_SHARD, "
                f"use Legato's strategy {{'name': 'mesh', 'data': 2, 'shard': 4}}; for NO_SHARD, use 'ddp'."
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
        self.store_arguments(accelerator, cluster_environment, checkpoint_io, precision_plugin)
        self.trainer_arguments |= _devices_of(parallel_devices)
        types = activation_checkpointing if activation_checkpointing_policy is None else activation_checkpointing_policy
        if types is not None:
            self.trainer_arguments["activation_checkpointing"] = _class_names(types, "activation_checkpointing_policy")


FSDP_INSTEAD = {
    "mixed_precision": "pass Trainer(precision=...), which sets the dtypes.",
    "device_mesh": "pass strategy={'name': 'mesh', 'data': 2, 'shard': 4} to Legato's Trainer.",
    "": "torch's fully_shard, which this strategy uses, does not have this argument.",
}


class ModelParallelStrategy(OwnBackward, PipelineMeshStrategy, ParallelStrategy):
    """Combines data, sharded and tensor parallelism on a mesh. `configure_model` can apply torch's parallel styles."""

    strategy_name = "model_parallel"

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: Any = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        is_auto = data_parallel_size == "auto" and tensor_parallel_size == "auto"
        super().__init__(
            shard=data_parallel_size,
            tensor=1 if is_auto else tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=(timeout or DEFAULT_TIMEOUT).total_seconds(),
        )
        self.store_arguments()


DEEPSPEED = (
    "Pass strategy='fsdp', which shards parameters, gradients and optimizer states like ZeRO stage 3. Legato's zero1 "
    "strategy shards only the optimizer states."
)
XLA = "Legato runs on CPU, CUDA and MPS devices. Pass accelerator='auto'."
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
"""Legato's strategy and its options for each of Lightning's strategy names."""
CLASSES: dict[str, type[Strategy]] = {
    "single": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "mesh": ModelParallelStrategy,
}


def _check_overrides(wanted: Strategy) -> None:
    """Raise UnsupportedError if a strategy overrides methods that a run does not call."""
    launching = overridden(wanted, LAUNCHING)
    if LAUNCHER not in launching:
        refuse_overrides(wanted, CALLED_BY_LIGHTNING, OWN_STRATEGY)
        return
    refuse_overrides(wanted, set(CALLED_BY_LIGHTNING) - set(launching), OWN_STRATEGY)
    rank_zero_warn(
        f"{type(wanted).__name__}.{', '.join(launching)} would never be called, because Legato starts the processes "
        "itself. To use another launcher, start the program with torchrun or SLURM."
    )


StrategyRegistry = Registry(
    {word: partial(CLASSES[name], **options) for word, (name, options) in WORDS.items() if name != "auto"}
)


def read_strategy(wanted: Any) -> Any:
    """Convert the Trainer argument `strategy` to Legato's form. Raises an error for an unsupported name."""
    if isinstance(wanted, str) and wanted in StrategyRegistry.keys() - WORDS.keys():
        wanted = StrategyRegistry.get(wanted)
    if not isinstance(wanted, str):
        if isinstance(wanted, Strategy) and not isinstance(wanted, (SingleStrategy, GroupStrategy)):
            raise UnsupportedError(f"{type(wanted).__name__}: {OWN_STRATEGY}")
        if isinstance(wanted, Strategy):
            _check_overrides(wanted)
        if isinstance(wanted, (strategy.Strategy, dict)):
            return wanted
        raise ConfigError(f"Trainer(strategy=...): expected a name or a Strategy, got {type(wanted).__name__}.")
    word = wanted.lower()
    if word in WORDS:
        name, options = WORDS[word]
        return {"name": name, **options} if options else name
    if word.startswith("deepspeed"):
        raise UnsupportedError(f"strategy={wanted!r}: {DEEPSPEED}")
    if "xla" in word or word.startswith(("tpu", "hpu")):
        raise UnsupportedError(f"strategy={wanted!r}: {XLA}")
    if word == "dp":
        raise UnsupportedError(f"strategy={wanted!r} was removed in Lightning 2.0. Pass strategy='ddp'.")
    return wanted  # Legato's own names; unknown names raise an error later


def with_attributes(instance: strategy.Strategy, wanted: Any) -> Any:
    """If a strategy was created from a name or mapping, return an equivalent strategy with Lightning's attributes."""
    if instance is wanted or instance.name not in CLASSES:
        return instance
    options = {name: value for name, value in wanted.items() if name != "name"} if isinstance(wanted, dict) else {}
    return CLASSES[instance.name](**options)


def _devices_of(devices: list[torch.device] | None) -> dict[str, Any]:
    if not devices:
        return {}
    return {"accelerator": devices[0].type, "devices": [device.index or index for index, device in enumerate(devices)]}


def _class_names(policy: Any, argument: str) -> list[str] | None:
    """Return the names of the classes in a wrapping policy."""
    if policy is None:
        return None
    classes = [policy] if isinstance(policy, type) else policy
    if not isinstance(classes, (set, frozenset, list, tuple)):
        raise UnsupportedError(f"FSDPStrategy({argument}={type(policy).__name__}): expected a set of classes to wrap.")
    return sorted(kind.__name__ for kind in classes)
