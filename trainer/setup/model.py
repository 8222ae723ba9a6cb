"""Second part of setup: move the task to its devices, load its weights, and create the optimizers and the run."""

import logging
from typing import Any

from ...base.errors import ConfigError
from ...base.torch_private import spare_compiler
from ..closure import use_closures
from ..hooks import count_arguments
from ..optimization import kernels
from ..optimization.model_checks import require_dense_gradients, require_parameters
from ..optimization.optimization import Optimization
from ..recheck import use_recheck
from ..resume import fingerprint, restore
from ..resume.rebuild import averaged_weights
from ..run import Call, Run
from ..schedule import Schedule
from .data import make_loaders, make_transfer, prepare_data

log = logging.getLogger("legato")


def make_run(call: Call, saved: dict[str, Any] | None) -> Run:
    """Call the setup hooks, move the task to its devices and load its weights. Create loaders, optimizers and the run.

    Args:
        saved: the checkpoint's contents. Its weights are dropped after they are loaded.
    """
    trainer, task, stage, strategy = call.trainer, call.task, call.stage, call.strategy
    prepare_data(call)
    if call.datamodule is not None:
        call.datamodule.setup(stage)  # first, so that callbacks and the task may use its data
    for hook in (*call.hooks.of_callbacks["setup"], *call.hooks.of_task["setup"]):
        hook(stage)
    # after the `setup` hooks, which may read from the data what configure_model needs (the number of classes)
    strategy.build_model(task)
    if trainer.activation_checkpointing and stage == "fit":
        strategy.recomputed = kernels.recompute(task, trainer.activation_checkpointing)
    strategy.place_task(task)
    call.metrics.take_states(call.bitwise)
    if saved is not None:
        show_checkpoint(call, saved)
        restore.load_task_weights(task, saved, task.strict_loading, strategy.state_dicts)
        del saved["state_dict"]  # before optimizers take memory
    begun = fingerprint.section_of(saved.get("fingerprint"), "samples") if saved and call.resumes_same_run else None
    make_loaders(call, begun or None)
    arity = count_arguments(task, "training_step") if stage == "fit" else 1
    optimization = (
        make_optimizers(call, saved) if stage == "fit" else Optimization(trainer, task, call.hooks, call.metrics)
    )
    # before anything is restored, with the settings that configure_optimizers returned: a scheduled learning rate at
    # step 5,000 is not a change of the config
    run_fingerprint = fingerprint.fingerprint_of(trainer, optimization) if stage == "fit" else {}
    transfer = make_transfer(call)
    optimization.take_optimizers(strategy.prepare(task, optimization.optimizers))
    if stage == "fit" and call.keyed:
        call.drift.ranks = strategy.weight_ranks
    numerics = find_numerics(call, optimization) if stage == "fit" else {}
    if not strategy.compiles_blocks:
        kernels.compile_in_place(task, trainer.compile)
    return Run(
        **vars(call),
        optimization=optimization,
        schedule=Schedule(call, optimization),
        transfer=transfer,
        keys_hooks=call.keyed and (trainer.world_size > 1 or call.state.replicas > 1),
        arity=arity,
        gradient_scale=strategy.loss_scale,
        fingerprint=run_fingerprint,
        numerics=numerics,
    )


def find_numerics(call: Call, optimization: Optimization) -> dict[str, Any]:
    """Return the settings that affect the exact bits of results. Under `bitwise`, they must be equal on all ranks."""
    strategy, options = call.strategy, call.trainer.compile
    numerics = kernels.numerics(optimization.optimizers, strategy.precision.name, strategy.device, options)
    numerics |= {"micro_batches": strategy.micro_batches, "tensor_shards": strategy.tensor_shards}
    if call.bitwise:
        kernels.require_same_ranks(strategy.collectives.gather_objects(numerics))
    return numerics


def show_checkpoint(call: Call, saved: dict[str, Any]) -> None:
    """Call the on_load_checkpoint hooks: first the task's, which may convert the checkpoint, then the callbacks'.

    All hooks see the weights that the trainer loads.
    """
    if call.stage != "fit":  # the averaged ones, unless a callback of this run loads them itself
        saved["state_dict"] = averaged_weights(saved, [callback.state_key for callback in call.trainer.callbacks])
    for hook in (*call.hooks.of_task["on_load_checkpoint"], *call.hooks.of_callbacks["on_load_checkpoint"]):
        hook(saved)


def make_optimizers(call: Call, saved: dict[str, Any] | None) -> Optimization:
    """Get the task's optimizers and check that the run can use them."""
    task, trainer, strategy = call.task, call.trainer, call.strategy
    # the first optimizer would import torch's compiler, which takes 1.5 s of CPU time per process
    spare_compiler()
    clips = trainer.gradient_clip_val is not None
    require_dense_gradients(task, ["reproducible=bitwise"] * call.bitwise + ["gradient_clip_val"] * clips)
    try:
        optimizers, schedulers = task.make_optimizers()
    # torch's error only says that the parameter list is empty; the cause is in the task
    except ValueError:
        require_parameters(task)
        raise
    if saved is not None:
        restore.add_saved_groups(task, optimizers, saved)
    optimization = Optimization(trainer, task, call.hooks, call.metrics, optimizers, schedulers)
    use_closures(call, optimization)
    use_recheck(call, optimization)
    if not task.automatic_optimization:
        strategy.precision.cast_anew()
    if not task.automatic_optimization and (call.local_replicas > 1 or trainer.accumulate_grad_batches > 1):
        raise ConfigError(
            f"Manual optimization needs one replica per process and accumulate_grad_batches=1: each optimizer.step in "
            f"training_step needs the gradients of all replicas at once, but several replicas on a process run one "
            f"after the other. This run has {call.state.replicas} replicas on {strategy.data_ranks.size} processes and "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}."
        )
    if not task.automatic_optimization and trainer.gradient_clip_val is not None and trainer.is_global_zero:
        log.info("With manual optimization, gradient_clip_val has no effect unless you call clip_gradients(optimizer).")
    return optimization
