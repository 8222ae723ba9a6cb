"""Where a plan's numbers come from: words of the command line, the config, the training loader, the task.

What is given by hand is not looked for: with `length=`, `batch_size=` and `parameters=` nothing of the task or its data
is built and torch stays out; optimization is then taken to be automatic. The task is built on the meta device, so that
its size does not matter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...config.build import build_config
from ...config.check import Config, load_config
from ...config.read import SECTIONS
from ...data.sampling import EpochIndices, Layout
from ...errors import ConfigError, LegatoError, did_you_mean
from .plan import Plan
from .processes import Processes, count_parts, find_processes, read_strategy
from .state_size import VALUES_PER_PARAMETER, Share, StateSize, by_hand, measure

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ....tasks.data_module import DataModule
    from ....tasks.task import Task
    from ...trainer import Trainer

OVERRIDES = {"nodes": "trainer.num_nodes", "devices": "trainer.devices"}
"""Words that stand for a key of the config."""
WIDTHS = {"64": 8, "64-true": 8, "16-true": 2, "bf16-true": 2}
"""Bytes of a weight, where they are not 4."""


@dataclass(frozen=True)
class PlanArguments:
    """What stands on the command line of `legato plan` besides the config: numbers given by hand, and what to show."""

    length: int | None = None
    batch_size: int | None = None
    parameters: int | None = None
    optimizer: str | None = None
    drop_last: bool | None = None
    shuffle: bool | None = None
    rank: int | None = None
    step: int | None = None
    epoch: int | None = None

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "tuple[PlanArguments, list[str]]":
        """Return the words, and the arguments that are left for the config.

        Raises ConfigError for a word that is none, and for a value that is no count.
        """
        known = {field.name: str(field.type) for field in fields(cls)}
        found: dict[str, Any] = {}
        rest: list[str] = []
        for argument in arguments:
            word, equals, text = argument.partition("=")
            if word in OVERRIDES and equals:
                rest.append(f"{OVERRIDES[word]}={text}")
            elif word in known and equals:
                kind = known[word]
                found[word] = (
                    text if "str" in kind else _truth(word, text) if "bool" in kind else _parse_count(word, text)
                )
            elif equals and word.isidentifier() and word not in SECTIONS:
                words = (*known, *OVERRIDES)
                hint = did_you_mean(word, (*words, *SECTIONS)) or f" The words of plan are {', '.join(words)}."
                raise ConfigError(f"{argument!r}: {word!r} is no word of plan and no key of a config.{hint}")
            else:
                rest.append(argument)
        return cls(**found), rest


def _parse_count(word: str, text: str) -> int:
    """Read a count, written as 1000000, 1_000_000 or 1e6."""
    try:
        value = Decimal(text)
        if value == value.to_integral_value() and 0 <= value < 2**63:
            return int(value)
    except InvalidOperation:
        pass
    raise ConfigError(f"{word}={text}: expected a count, such as 1000000 or 1e6.")


def _truth(word: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{word}={text}: expected true or false.")
    return text == "true"


@dataclass(frozen=True)
class Positions:
    """What a training loader yields in an epoch, under the names of Plan's fields."""

    length: int
    batch_size: int
    drop_last: bool = False
    shuffle: bool = True
    unit: str = "sample"
    own_order: Callable[[int], EpochIndices] | None = None


def make(words: PlanArguments, arguments: Sequence[str]) -> Plan:
    """Return the plan of a config. Raises ConfigError, and what building the data module or the task raises."""
    config = load_config(arguments)
    trainer = config.values["trainer"]
    processes = find_processes(trainer)
    replicas = processes.data_size if trainer["replicas"] is None else trainer["replicas"]
    Layout(replicas, processes.data_size)  # refuses more processes than replicas before anything is built
    if not trainer["use_distributed_sampler"]:
        raise ConfigError(
            "use_distributed_sampler=False: each process's loader brings its own share, so there is nothing to plan."
        )
    parts = ConfigParts(config, processes)
    in_order = bool(trainer["overfit_batches"])
    if words.length is not None and words.batch_size is not None:
        positions = Positions(words.length, words.batch_size, shuffle=not in_order)
    else:
        positions = read_positions(parts, words, in_order)
    changes = {name: getattr(words, name) for name in ("drop_last", "shuffle") if getattr(words, name) is not None}
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
        whole_rounds=trainer["sync_batchnorm"] or (words.parameters is None and not parts.task.automatic_optimization),
    )
    state = find_state(parts, words, plan.deal.rounds)
    shares = shares_of_sources(parts, words, plan.deal.rounds)
    return replace(plan, state=state, parts=count_parts(trainer, processes), shares=shares)


def count_epochs(trainer: Mapping[str, Any]) -> int | None:
    """Return the epochs of the run, as the Trainer takes its arguments; None: no limit."""
    epochs: int | None = trainer["max_epochs"]
    if epochs is None and trainer["max_steps"] == -1 and trainer["max_time"] is None:
        return 1000
    return None if epochs == -1 else epochs


def read_positions(parts: "ConfigParts", words: PlanArguments, in_order: bool = False) -> Positions:
    """Ask the training loader, built as fit would build it, what it yields; raises ConfigError where it cannot say."""
    from ...data.combined import CombinedSource, combined, is_dealable_by_batch
    from ...data.loaders import MapLoader, is_dealable, length_of

    loader = combined(parts.loader)
    if not is_dealable(loader) or MapLoader(loader, 0).own_batches:
        if words.length is not None or words.batch_size is not None:
            raise ConfigError(
                "The training loader's batches are taken whole, so one of length= and batch_size= alone says nothing: "
                "give both, or neither."
            )
        batches = length_of(loader)
        if batches is None:
            raise ConfigError(
                f"The training loader ({type(loader).__name__}) does not say how long an epoch is: give length= and "
                f"batch_size= by hand."
            )
        if is_dealable_by_batch(loader):
            drop_last = CombinedSource(loader, parts.seed).drop_last
            return Positions(batches, 1, drop_last, unit="batch", own_order=_own_order)
        order = MapLoader(loader, parts.seed, in_order) if is_dealable(loader) else None
        return Positions(batches, 1, unit="batch", own_order=_own_order if order is None else _drawn(order))
    source = MapLoader(loader, parts.seed, in_order)
    length = source.positions(0) if words.length is None else words.length
    if length is None:  # only drawing the order tells
        length = source.order(0).length
    own = _drawn(source) if source.shuffled is None and words.length is None else None
    batch_size = source.batch_size if words.batch_size is None else words.batch_size
    return Positions(length, batch_size, source.drop_last, source.shuffled is not False and not in_order, own_order=own)


def _drawn(source: Any) -> Callable[[int], EpochIndices]:
    return lambda epoch: source.order(epoch).order


def _own_order(epoch: int) -> EpochIndices:
    return lambda positions: positions


def find_state(parts: "ConfigParts", words: PlanArguments, rounds: int) -> StateSize:
    """Return the state of the whole model, as one process has it: by hand, or measured on the task."""
    if words.parameters is not None:
        return by_hand(words.parameters, words.optimizer or "adamw", parts.width)
    return with_optimizer(parts.measure(rounds), words)


def shares_of_sources(parts: "ConfigParts", words: PlanArguments, rounds: int) -> tuple[Share, ...]:
    """Return what ranks hold where that is not all of it, measured on the task; nothing by hand."""
    if words.parameters is not None:
        return ()
    shares = parts.find_shares(rounds)
    return tuple(replace(share, size=with_optimizer(share.size, words)) for share in shares)


def with_optimizer(state: StateSize, words: PlanArguments) -> StateSize:
    """Return a state with the optimizer that was named by hand, if one was."""
    if words.optimizer is None:
        return state
    kept = by_hand(0, words.optimizer)  # refuses an unknown word
    values = int(words.optimizer) if words.optimizer.isdecimal() else VALUES_PER_PARAMETER[words.optimizer.lower()]
    return replace(state, optimizer=kept.optimizer, optimizer_bytes=values * state.gradient_bytes)


class ConfigParts:
    """What a config describes, built piece by piece when it is asked for, on no device and in no process group."""

    def __init__(self, config: Config, processes: Processes) -> None:
        self.processes, self.seed = processes, config.values["seed"]
        self.strategy_options = read_strategy(config.values["trainer"])[1]
        self.width = WIDTHS.get(str(config.values["trainer"]["precision"]), 4)
        anywhere = {"devices": 1, "num_nodes": 1, "strategy": "single", "accelerator": "cpu", "precision": 32}
        alone = {"cluster": "off", "fast_dev_run": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = {**config.values["trainer"], **anywhere, **alone}
        self.config = replace(config, values={**config.values, "trainer": trainer, "callbacks": {}, "loggers": {}})

    @cached_property
    def data(self) -> "DataModule | None":
        """The data module, beside a task that is nothing."""
        if self.config.values.get("data") is None:
            return None
        nothing = {"_target_": "legato.tasks.task.Task"}
        run = build_config(replace(self.config, values={**self.config.values, "task": nothing}))
        assert run.data is not None
        run.data.trainer = self.attach(run.trainer, run.task, 0)
        return run.data

    @cached_property
    def task(self) -> "Task":
        """The task on the meta device, its weights in the run's precision."""
        import torch

        from ...strategies.servers import build_remote_modules

        run = None
        values = {name: value for name, value in self.config.values.items() if name != "data"}
        # A task that computes with values when it is made (timm's drop rates: linspace().tolist()) fails on "meta".
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
        """The training loader: the data module's, or the task's. Raises ConfigError where there is none."""
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
        """Return the state of the whole task, with the optimizers that it makes for an epoch of so many rounds."""
        if not list(self.task.parameters()):
            kind = type(self.task).__name__
            raise ConfigError(f"{kind} has no parameters before setup(): give parameters= by hand.")
        return measure(self.task, *self.make_optimizers(rounds))

    def find_shares(self, rounds: int) -> tuple[Share, ...]:
        """Return what the ranks hold where the strategy cuts the task; nothing where each holds all of it."""
        from .shares import measure_shares

        return measure_shares(self.task, self.processes, self.strategy_options, lambda: self.make_optimizers(rounds))

    def make_optimizers(self, rounds: int) -> "tuple[Sequence[Optimizer], str]":
        """Return the task's optimizers for the parameters that it has now; where it cannot make them, none and why."""
        from ...optimization.optimizers import read_optimizers

        task = self.task
        self.attach(task.trainer, task, rounds)
        try:
            return read_optimizers(task.configure_optimizers(), task.automatic_optimization)[0], ""
        except Exception as error:  # whatever the user's code does without a run, or on the meta device
            return (), f"configure_optimizers: {type(error).__name__}; say optimizer=NAME"

    def attach(self, trainer: "Trainer", task: "Task", rounds: int) -> "Trainer":
        """Let the trainer answer as it would in the planned run: processes, steps of an epoch and of the whole run."""
        from ...processes.environment import Place

        nodes, world_size = self.processes.nodes, self.processes.count - self.processes.servers
        trainer.strategy.place = Place(world_size=world_size, local_world_size=world_size // nodes, nodes=nodes)
        trainer.num_nodes = nodes
        trainer.lengths = {"train": rounds}
        task.trainer = trainer
        return trainer
