"""Inputs of a plan: options of the command line, the config, the training loader and the task.

Values given as options are not computed: with `length=`, `batch_size=` and `parameters=` no task or data module is
built and torch is not imported; optimization is then assumed to be automatic. The task is built on the meta device, so
its size does not matter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, LegatoError, did_you_mean
from ...trainer.data.sampling import EpochIndices, Layout
from ..config.build import build_config
from ..config.check import Config, load_config
from ..config.read import SECTIONS, read_strategy
from .memory import Activations, Traffic, parse_memory
from .plan import Plan
from .processes import Processes, count_parts, find_processes
from .state_size import VALUES_PER_PARAMETER, Share, StateSize, from_parameters, measure

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...tasks.data_module import DataModule
    from ...tasks.task import Task
    from ...trainer.trainer import Trainer

OVERRIDES = {"nodes": "trainer.num_nodes", "devices": "trainer.devices"}
"""Options that are short for a key of the config."""
WIDTHS = {"64": 8, "64-true": 8, "16-true": 2, "bf16-true": 2}
"""Bytes per weight, where not 4."""


@dataclass(frozen=True)
class PlanArguments:
    """Options of `legato plan`: values to use instead of computed ones, and the step to show."""

    length: int | None = None
    batch_size: int | None = None
    parameters: int | None = None
    optimizer: str | None = None
    memory: str | None = None
    drop_last: bool | None = None
    shuffle: bool | None = None
    rank: int | None = None
    step: int | None = None
    epoch: int | None = None

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "tuple[PlanArguments, list[str]]":
        """Return the options, and the remaining arguments for the config.

        Raises ConfigError for an unknown option or an invalid value.
        """
        known = {field.name: str(field.type) for field in fields(cls)}
        found: dict[str, Any] = {}
        rest: list[str] = []
        for argument in arguments:
            name, equals, text = argument.partition("=")
            if name in OVERRIDES and equals:
                rest.append(f"{OVERRIDES[name]}={text}")
            elif name in known and equals:
                kind = known[name]
                found[name] = (
                    text if "str" in kind else _truth(name, text) if "bool" in kind else _parse_count(name, text)
                )
            elif equals and name.isidentifier() and name not in SECTIONS:
                options = (*known, *OVERRIDES)
                hint = did_you_mean(name, (*options, *SECTIONS)) or f" The options of plan are {', '.join(options)}."
                raise ConfigError(f"{argument!r}: {name!r} is neither an option of plan nor a key of a config.{hint}")
            else:
                rest.append(argument)
        return cls(**found), rest


def _parse_count(name: str, text: str) -> int:
    """Parse a count, written as 1000000, 1_000_000 or 1e6."""
    try:
        value = Decimal(text)
        if value == value.to_integral_value() and 0 <= value < 2**63:
            return int(value)
    except InvalidOperation:
        pass
    raise ConfigError(f"{name}={text}: expected a count, such as 1000000 or 1e6.")


def _truth(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={text}: expected true or false.")
    return text == "true"


@dataclass(frozen=True)
class Positions:
    """Positions of an epoch of a training loader, with the field names of Plan."""

    length: int
    batch_size: int
    drop_last: bool = False
    shuffle: bool = True
    unit: str = "sample"
    own_order: Callable[[int], EpochIndices] | None = None


def make_plan(options: PlanArguments, arguments: Sequence[str]) -> Plan:
    """Return the plan of a config. Raises ConfigError, and any error of building the data module or the task."""
    config = load_config(arguments)
    memory = None if options.memory is None else parse_memory(options.memory)
    trainer = config.values["trainer"]
    processes = find_processes(trainer)
    replicas = processes.data_size if trainer["replicas"] is None else trainer["replicas"]
    Layout(replicas, processes.data_size)  # raises for more processes than replicas, before anything is built
    if not trainer["use_distributed_sampler"]:
        raise ConfigError(
            "use_distributed_sampler=False: each process's loader brings its own share, so there is nothing to plan."
        )
    parts = ConfigParts(config, processes)
    in_order = bool(trainer["overfit_batches"])
    if options.length is not None and options.batch_size is not None:
        positions = Positions(options.length, options.batch_size, shuffle=not in_order)
    else:
        positions = read_positions(parts, options, in_order)
    changes = {name: getattr(options, name) for name in ("drop_last", "shuffle") if getattr(options, name) is not None}
    positions = replace(positions, **changes)
    quick = int(trainer["fast_dev_run"])
    epochs, steps = count_epochs(trainer), None if trainer["max_steps"] == -1 else trainer["max_steps"]
    plan = Plan(
        **vars(positions),
        replicas=replicas,
        processes=processes.count,
        nodes=processes.nodes,
        sizes=processes.sizes,
        servers=processes.servers,
        accumulate=trainer["accumulate_grad_batches"],
        limit=quick or trainer["overfit_batches"] or trainer["limit_train_batches"],
        max_epochs=1 if quick else epochs,
        max_steps=quick or steps,
        seed=config.values["seed"],
        whole_rounds=trainer["sync_batchnorm"]
        or (options.parameters is None and not parts.task.automatic_optimization),
    )
    state = find_state(parts, options, plan.deal.rounds)
    shares = shares_of_sources(parts, options, plan.deal.rounds)
    plan = replace(plan, state=state, parts=count_parts(trainer, processes), shares=shares, memory=memory)
    if options.parameters is not None:
        return plan
    return replace(plan, activations=find_activations(parts, options), traffic=find_traffic(parts, options, plan))


def find_activations(parts: "ConfigParts", options: PlanArguments) -> Activations:
    """Return the activations of a batch of the first sample, repeated; or why they are unknown."""
    from .shares import cut_layers, cut_stream
    from .stage_activations import Pipeline
    from .step_size import measure_activations

    names, sizes = tuple(parts.config.values["trainer"]["activation_checkpointing"] or ()), parts.processes.sizes
    try:
        measure_them: Callable[[Task, Any, tuple[str, ...], bool], Activations] = measure_activations
        if sizes is not None and sizes.pipeline > 1:
            measure_them = Pipeline.of(parts.task, sizes.pipeline, parts.strategy_options).measure
        with as_config_errors():
            batch = read_batch(parts, options)
            tensor = 1 if sizes is None else sizes.tensor
            with cut_layers(parts.task, tensor), cut_stream(parts.task, tensor):
                found = measure_them(parts.task, batch, names, parts.mixed)
    except ConfigError as error:
        return Activations(0, unknown=str(error))
    return replace(found, recomputes=bool(names))


def read_batch(parts: "ConfigParts", options: PlanArguments) -> Any:
    """Return a batch of the first sample, repeated. Raises ConfigError where the data is not known by sample."""
    from ...trainer.data.combined import combined
    from ...trainer.data.loaders import MapLoader, is_dealable

    if options.length is not None and options.batch_size is not None:
        raise ConfigError("the data is not built where length= and batch_size= are given")
    loader = combined(parts.loader)
    if not is_dealable(loader) or MapLoader(loader, 0).own_batches:
        raise ConfigError("the loader's batches are kept whole")
    return loader.collate_fn([loader.dataset[0]] * (options.batch_size or MapLoader(loader, 0).batch_size))


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turn errors of a training_step on tensors without memory into ConfigErrors: it may need values, or a run."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"training_step without values: {type(error).__name__}: {reason:.100}") from error


def find_traffic(parts: "ConfigParts", options: PlanArguments, plan: Plan) -> Traffic:
    """Return what the strategy sends in a step, or why that is unknown."""
    from .shares import cut_layers
    from .step_size import fake_step, run_recomputing
    from .traffic import PlannedStep, traffic_of

    def run_step() -> None:
        with as_config_errors(), fake_step(parts.task, read_batch(parts, options), parts.mixed) as (step, _):
            step()

    def run_again() -> None:
        with as_config_errors(), fake_step(parts.task, read_batch(parts, options), parts.mixed) as (step, _):
            run_recomputing(parts.task, step, recomputed)

    trainer, sizes = parts.config.values["trainer"], parts.processes.sizes
    recomputed = tuple(trainer["activation_checkpointing"] or ())
    batches = trainer["accumulate_grad_batches"] * -(-plan.replicas // plan.ranks.data_size)
    own_tree = trainer["reproducible"] == "bitwise" or bool(parts.strategy_options.get("elastic"))
    planned = PlannedStep(
        parts.task, parts.strategy, parts.strategy_options, parts.processes, plan.layout, plan.shares, batches,
        own_tree, run_step, run_again if recomputed else None,
    )  # fmt: skip
    try:
        with cut_layers(parts.task, 1 if sizes is None or sizes.pipeline > 1 else sizes.tensor):
            return traffic_of(planned)
    except ConfigError as error:
        return Traffic(unknown=str(error))


def count_epochs(trainer: Mapping[str, Any]) -> int | None:
    """Return the epochs of the run under the Trainer's defaults; None: no limit."""
    epochs: int | None = trainer["max_epochs"]
    if epochs is None and trainer["max_steps"] == -1 and trainer["max_time"] is None:
        return 1000
    return None if epochs == -1 else epochs


def read_positions(parts: "ConfigParts", options: PlanArguments, in_order: bool = False) -> Positions:
    """Return the positions of the training loader, built as in fit. Raises ConfigError if its length is unknown."""
    from ...trainer.data.combined import CombinedSource, combined, is_dealable_by_batch
    from ...trainer.data.loaders import MapLoader, is_dealable, length_of

    loader = combined(parts.loader)
    if not is_dealable(loader) or MapLoader(loader, 0).own_batches:
        if options.length is not None or options.batch_size is not None:
            raise ConfigError(
                "The training loader's batches are kept whole, so length= and batch_size= need each other: give "
                "both, or neither."
            )
        batches = length_of(loader)
        if batches is None:
            raise ConfigError(
                f"The training loader ({type(loader).__name__}) has no length: give length= and batch_size=."
            )
        if is_dealable_by_batch(loader):
            drop_last = CombinedSource(loader, parts.seed).drop_last
            return Positions(batches, 1, drop_last, unit="batch", own_order=_own_order)
        order = MapLoader(loader, parts.seed, in_order) if is_dealable(loader) else None
        return Positions(batches, 1, unit="batch", own_order=_own_order if order is None else _drawn(order))
    source = MapLoader(loader, parts.seed, in_order)
    length = source.positions(0) if options.length is None else options.length
    if length is None:  # known only from drawing the order
        length = source.order(0).length
    own = _drawn(source) if source.shuffled is None and options.length is None else None
    batch_size = source.batch_size if options.batch_size is None else options.batch_size
    return Positions(length, batch_size, source.drop_last, source.shuffled is not False and not in_order, own_order=own)


def _drawn(source: Any) -> Callable[[int], EpochIndices]:
    return lambda epoch: source.order(epoch).order


def _own_order(epoch: int) -> EpochIndices:
    return lambda positions: positions


def find_state(parts: "ConfigParts", options: PlanArguments, rounds: int) -> StateSize:
    """Return the state of the whole model in one process, from options or measured on the task."""
    if options.parameters is not None:
        return from_parameters(options.parameters, options.optimizer or "adamw", parts.width)
    return with_optimizer(parts.measure(rounds), options)


def shares_of_sources(parts: "ConfigParts", options: PlanArguments, rounds: int) -> tuple[Share, ...]:
    """Return the measured state by rank; () if options give the size or every rank holds everything."""
    if options.parameters is not None:
        return ()
    shares = parts.shares(rounds)
    return tuple(replace(share, size=with_optimizer(share.size, options)) for share in shares)


def with_optimizer(state: StateSize, options: PlanArguments) -> StateSize:
    """Return a state with the optimizer given as an option, if any."""
    if options.optimizer is None:
        return state
    kept = from_parameters(0, options.optimizer)  # raises for an unknown name
    values = (
        int(options.optimizer) if options.optimizer.isdecimal() else VALUES_PER_PARAMETER[options.optimizer.lower()]
    )
    return replace(state, optimizer=kept.optimizer, optimizer_bytes=values * state.gradient_bytes)


class ConfigParts:
    """The objects of a config, each built when first used, on no device and in no process group."""

    def __init__(self, config: Config, processes: Processes) -> None:
        self.processes, self.seed = processes, config.values["seed"]
        self.strategy, self.strategy_options = read_strategy(config.values["trainer"])
        self.precision = str(config.values["trainer"]["precision"])
        self.width = WIDTHS.get(self.precision, 4)
        self.mixed = self.width == 4 and self.precision.endswith(("mixed", "bf16", "16"))
        anywhere = {"devices": 1, "num_nodes": 1, "strategy": "single", "accelerator": "cpu", "precision": 32}
        alone = {"cluster": "off", "fast_dev_run": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = {**config.values["trainer"], **anywhere, **alone}
        self.config = replace(config, values={**config.values, "trainer": trainer, "callbacks": {}, "loggers": {}})

    @cached_property
    def data(self) -> "DataModule | None":
        """The data module, built beside an empty task."""
        if self.config.values.get("data") is None:
            return None
        nothing = {"_target_": "legato.tasks.task.Task"}
        run = build_config(replace(self.config, values={**self.config.values, "task": nothing}))
        assert run.data is not None
        run.data.trainer = self.attach(run.trainer, run.task, 0)
        return run.data

    @cached_property
    def task(self) -> "Task":
        """The task on the meta device, in the run's precision."""
        import torch

        from ...trainer.strategies.servers import build_remote_modules

        run = None
        values = {name: value for name, value in self.config.values.items() if name != "data"}
        # A task whose __init__ reads tensor values (timm's drop rates: linspace().tolist()) fails on "meta".
        for device in ("meta", "cpu"):
            try:
                with torch.device(device):
                    run = build_config(replace(self.config, values=values))
                    self.attach(run.trainer, run.task, 0)
                    run.task.configure_model()
                    build_remote_modules(run.task, self.seed)
                break
            except LegatoError:
                raise
            except Exception:
                if device == "cpu":
                    raise
        assert run is not None
        task = run.task.to("meta")
        if self.width != 4:
            task = task.to(torch.float64 if self.width == 8 else torch.bfloat16)
        return task

    @cached_property
    def loader(self) -> Any:
        """The training loader of the data module, or else of the task. Raises ConfigError if there is none."""
        loader = None if self.data is None else self._loader_of(self.data)
        if loader is None:
            loader = self._loader_of(self.task)
        if loader is None:
            raise ConfigError(
                "Neither the data module nor the task has a train_dataloader: give length= and batch_size=."
            )
        return loader

    @staticmethod
    def _loader_of(source: "DataModule | Task") -> Any:
        source.prepare_data()
        source.setup("fit")
        return source.train_dataloader()

    def measure(self, rounds: int) -> StateSize:
        """Return the state of the whole task, with its optimizers for epochs of `rounds` rounds."""
        if not list(self.task.parameters()):
            kind = type(self.task).__name__
            raise ConfigError(f"{kind} has no parameters before setup(): give parameters=.")
        return measure(self.task, *self.make_optimizers(rounds))

    def shares(self, rounds: int) -> tuple[Share, ...]:
        """Return the state by rank if the strategy splits the task, else ()."""
        from .shares import measure_shares

        return measure_shares(self.task, self.processes, self.strategy_options, lambda: self.make_optimizers(rounds))

    def make_optimizers(self, rounds: int) -> "tuple[Sequence[Optimizer], str]":
        """Return the task's optimizers for its current parameters, or none and the reason."""
        from ...trainer.optimization.optimizers import read_optimizers

        task = self.task
        self.attach(task.trainer, task, rounds)
        try:
            return read_optimizers(task.configure_optimizers(), task.automatic_optimization)[0], ""
        except Exception as error:  # user code may fail in any way without a run, or on the meta device
            return (), f"configure_optimizers: {type(error).__name__}; give optimizer=NAME"

    def attach(self, trainer: "Trainer", task: "Task", rounds: int) -> "Trainer":
        """Make the trainer report the processes, and the steps per epoch and in total, of the planned run."""
        from ...trainer.processes.environment import Place

        nodes, world_size = self.processes.nodes, self.processes.count - self.processes.servers
        trainer.strategy.place = Place(world_size=world_size, local_world_size=world_size // nodes, nodes=nodes)
        trainer.num_nodes = nodes
        trainer.lengths = {"train": rounds}
        task.trainer = trainer
        return trainer
