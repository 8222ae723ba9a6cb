"""Remote calls: run a call in worker processes, and copy the results into the caller's objects."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..base.environment import restart_count
from ..base.location import Location
from ..base.place import Place, find_place
from ..base.torch_private import ModuleParts, module_parts, set_module_parts
from .checkpoints.find import check_sizes
from .data.sampling import Layout
from .data.transfer import to_host
from .metrics.torchmetrics import load_states, states_of
from .processes.launch import find_node, run_workers, warm_up_for
from .processes.membership import RunFinished
from .processes.rendezvous import leave_process_group
from .processes.requeue import requeue_early
from .processes.signals import SignalWatch, handling_end_signals, raise_for_signal
from .request import Request
from .run import Run
from .runs import places, run_file
from .setup import directory
from .setup.checks import check_task
from .setup.parts import with_callbacks_of
from .setup.start import make_call

if TYPE_CHECKING:
    from ..base.contracts import Trainer
    from ..tasks.task import Task

log = logging.getLogger("legato")


RETURNED = (
    *("state", "run_dir", "should_stop", "lengths", "command"),
    *("agreed_metrics", "logged_metrics", "progress_bar_metrics"),
)
"""Attributes copied from rank 0's trainer to the caller's."""


@dataclass
class RunResult:
    """Results of a run, sent from rank 0 to the caller."""

    returned: Any
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    """Buffers that are not in the state dict."""
    metric_states: dict[str, dict[str, Any]]
    """States of the task's metric objects that were never logged, keyed by path."""
    parts: ModuleParts | None
    """Parameters, buffers and modules of the task, if the run created any that the caller's task lacks."""
    trainer: dict[str, Any]
    """Attributes of the trainer that are listed in RETURNED."""
    run_id: str
    callbacks: list[tuple[str, dict[str, Any]]]
    """Key and state of each callback."""


def needs_workers(trainer: "Trainer", request: Request) -> bool:
    """Return whether this process must start workers.

    This is necessary if the strategy needs multiple workers and no launcher started them. The result is also True if a
    launcher started this process to serve other processes rather than to run the loop.
    """
    place = find_place(trainer.cluster)
    if place is not None:
        return trainer.strategy.serve(place)
    elastic = trainer.strategy.elastic and request.stage == "fit"
    return elastic or trainer.strategy.local_processes(trainer.device_list) * trainer.num_nodes > 1


def _batch_holders(trainer: "Trainer") -> int:
    """Return the number of processes, or groups of processes, that will work on different batches."""
    strategy = trainer.strategy
    return strategy.state_dicts.parts(strategy.local_processes(trainer.device_list) * trainer.num_nodes).batches


def run_in_workers(trainer: "Trainer", request: Request) -> Any:
    """Run the request in workers and load the trained weights into the caller's task.

    Raises the error of the first worker that fails.
    """

    def end(number: int) -> None:
        requeue_early(number, trainer.requeue)
        raise_for_signal(number)

    with handling_end_signals(end, SignalWatch()):  # once workers have started, signals go to them
        return _run(trainer, request)


def _run(trainer: "Trainer", request: Request) -> Any:
    check_task(trainer, request.task, request, is_sent=True)
    place = find_place(trainer.cluster)
    if place is not None:  # this process only serves others (ddp_rpc), and returns when they exit
        trainer.strategy.serve(place, request.task, trainer.seed)
        return None if request.stage == "fit" else []
    source: Location | None = None
    elastic = trainer.strategy.elastic and request.stage == "fit"
    if request.stage == "fit":
        trainer.run_dir = trainer.assigned_dir
    node, began = find_node(trainer.num_nodes)[0], time.time()
    if trainer.replicas is not None and not elastic:
        # a wrong number of replicas fails here, before any process or run directory exists
        Layout(trainer.replicas, _batch_holders(trainer))
    before, trainer.run = trainer.assigned_dir, None  # the workers create the run
    try:
        if node > 0:  # node 0 selects the run directory and reports for all nodes
            trainer.strategy.place = Place(1, node_rank=node, world_size=2, nodes=trainer.num_nodes)
        else:
            start = directory.with_directory(trainer, request, directory.find_source(trainer, request))
            trainer.run_dir = start.directory
            source = places.folder_to_read(start.directory, start.source) if start.is_newest else start.source
        trainer.assigned_dir = trainer.run_dir
        warm_up_for(trainer.strategy.name, vars(trainer))
        task = partial(_run_request, trainer, request, source)
        outcome = _start_workers(trainer, task, elastic)
    except BaseException as error:
        if request.stage == "fit" and node == 0 and trainer.run_dir is not None:
            run_file.fail(trainer.run_dir, error, began)
        raise
    finally:
        trainer.assigned_dir = before
        trainer.saver.release()
    if outcome is None:  # another node's process returns the result
        return None
    take_results(request.task, outcome)
    request.task.trainer = trainer
    for name, value in outcome.trainer.items():
        setattr(trainer, name, value)
    trainer.saver.run_id = outcome.run_id
    # the workers' run has ended: properties such as trainer.task read this new run, which is closed from the start
    trainer.run = make_call(trainer, request)
    trainer.run.loop.open = False
    if trainer.run_dir is not None:
        for logger in trainer.loggers:
            logger.follow(trainer.run_dir)
    # the workers' states include those of callbacks that the task configures
    trainer.callbacks = with_callbacks_of(request.task, trainer.callbacks)
    for callback in trainer.checkpoint_callbacks:
        callback.find_folder(trainer)
    for callback in trainer.callbacks:
        pair = next((pair for pair in outcome.callbacks if pair[0] == callback.state_key), None)
        if pair is not None:
            outcome.callbacks.remove(pair)  # another callback with the same key takes the next pair
            callback.load_state_dict(pair[1])
    return outcome.returned


def _start_workers(trainer: "Trainer", function: Callable[[], RunResult | None], elastic: bool) -> RunResult | None:
    processes = trainer.strategy.local_processes(trainer.device_list)
    restarts, nodes = trainer.max_restarts, trainer.num_nodes
    if not elastic:
        return run_workers(function, processes, max_restarts=restarts, nodes=nodes)
    from .elastic.launcher import run_elastic_workers  # only if a config asks for it

    timeout = trainer.strategy.timeouts.limits["step"].total_seconds()
    return run_elastic_workers(function, processes, timeout, max_restarts=restarts, nodes=nodes)


def take_weights(task: "Task", weights: dict[str, Tensor]) -> None:
    """Load the trained weights, in the dtypes of the run's precision."""
    for name, tensor in task.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.dtype != weights[name].dtype:
            # load_state_dict would cast to the caller's dtype; in place, as a script may hold the Parameter
            tensor.data = tensor.data.to(weights[name].dtype)
    task.load_state_dict(weights)


def take_results(task: "Task", outcome: RunResult) -> None:
    """Copy the workers' final weights, buffers and metric states into the caller's task."""
    if outcome.parts is None and outcome.weights:
        take_weights(task, outcome.weights)
    elif outcome.parts is not None:
        set_module_parts(task, outcome.parts)
    for name, buffer in outcome.buffers.items():
        path, _, buffer_name = name.rpartition(".")
        setattr(task.get_submodule(path), buffer_name, buffer)
    for path, states in outcome.metric_states.items():
        load_states(task.get_submodule(path), states)


def _run_request(trainer: "Trainer", request: Request, source: Location | None) -> RunResult | None:
    """Run the request in a worker, from `source` or, after a restart, from the run's newest complete checkpoint."""
    if restart_count() > 0 and request.stage == "fit" and trainer.run_dir is not None:
        newest = places.newest_in(trainer.run_dir, check_sizes, directory.folders_elsewhere(trainer, request))
        source = places.folder_to_read(trainer.run_dir, newest) or source
    request.source = source
    task, names = request.task, directory.weight_names(request.task)
    try:
        returned = request.repeat(trainer)
    except RunFinished as error:
        log.warning("%s", error)
        return None
    finally:
        leave_process_group()
    if not isinstance(trainer.run, Run) or not trainer.run.membership.returns_result(trainer.global_rank):
        return None  # a server, or a worker whose result another worker returns
    emptied = any(parameter.is_meta for parameter in task.parameters())  # the weights are only in the checkpoints
    # on the host: the caller may lack the device, and device memory is freed when this process exits
    weights = {} if emptied else task.cpu().state_dict()
    buffers = {} if emptied else dict(task.cpu().named_buffers())
    metrics, logged = trainer.run.metrics.states.with_states, trainer.run.metrics.logged
    return RunResult(
        returned,
        weights,
        {name: buffer for name, buffer in buffers.items() if name not in weights},
        {path: states_of(metric) for path, metric in metrics.items() if path not in logged},
        None if emptied or directory.weight_names(task) == names else module_parts(task),
        {name: getattr(trainer, name) for name in RETURNED},
        trainer.saver.run_id,
        [(callback.state_key, to_host(state)) for callback in trainer.callbacks if (state := callback.state_dict())],
    )
