"""BaseFinetuning and BackboneFinetuning: freeze modules of a task and unfreeze them later."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ..base.contracts import Task, Trainer

    Modules = nn.Module | Iterable["Modules"]

log = logging.getLogger("legato")


def multiplicative(epoch: int) -> float:
    """Return the factor by which BackboneFinetuning multiplies the backbone's learning rate in `epoch`."""
    return 2.0


class BaseFinetuning(Callback):
    """Base class for callbacks that freeze modules before training and unfreeze them at the start of chosen epochs.

    Override `freeze_before_training` and `finetune_function`. When a run resumes, the set of trained parameters and the
    parameter groups that were added to optimizers are restored.
    """

    def __init__(self) -> None:
        self._trained: list[str] = []
        """Names of the trained parameters in the checkpoint; empty for a new run."""
        self._newest_epoch = -1
        """Last epoch for which `finetune_function` was called."""

    # --- to override ------------------------------------------------------------------------------------------------
    def freeze_before_training(self, task: "Task") -> None:
        """Freeze modules, for example with `self.freeze(task.backbone)`."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training(self, task).")

    def finetune_function(self, task: "Task", epoch: int, optimizer: "Optimizer") -> None:
        """Unfreeze modules at the beginning of `epoch`, counted from 0. This is called once per optimizer."""
        raise NotImplementedError(f"{type(self).__name__} must define finetune_function(self, task, epoch, optimizer).")

    # --- modules ----------------------------------------------------------------------------------------------------
    @staticmethod
    def flatten_modules(modules: "Modules") -> "list[nn.Module]":
        """Return the leaf modules in `modules`, and any other modules that have parameters of their own."""
        from torch import nn

        if isinstance(modules, nn.Module):
            every: Iterable[nn.Module] = modules.modules()
        else:
            every = [module for item in modules for module in BaseFinetuning.flatten_modules(item)]
        return [module for module in every if not list(module.children()) or list(module.parameters(recurse=False))]

    @staticmethod
    def filter_params(
        modules: "Modules", train_bn: bool = True, requires_grad: bool = True
    ) -> "Iterator[nn.Parameter]":
        """Yield parameters with the given `requires_grad`. If `train_bn` is False, skip batch norm parameters."""
        from ..base.tensors import BATCH_NORM

        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, BATCH_NORM):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: "Modules") -> None:
        """Set `requires_grad` to True for all parameters."""
        for module in BaseFinetuning.flatten_modules(modules):
            BaseFinetuning._set(module, True)

    @staticmethod
    def freeze_module(module: "nn.Module") -> None:
        """Freeze a module's own parameters, but not those of its submodules."""
        BaseFinetuning._set(module, False)

    @staticmethod
    def freeze(modules: "Modules", train_bn: bool = True) -> None:
        """Freeze all parameters or, if `train_bn` is true, all except batch norm parameters."""
        from ..base.tensors import BATCH_NORM

        for module in BaseFinetuning.flatten_modules(modules):
            BaseFinetuning._set(module, train_bn and isinstance(module, BATCH_NORM))

    @staticmethod
    def _set(module: "nn.Module", trained: bool) -> None:
        from ..base.tensors import BATCH_NORM

        if isinstance(module, BATCH_NORM):
            norm: Any = module
            # a frozen batch norm keeps its running statistics, but in training mode still uses batch statistics
            norm.track_running_stats = trained
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = trained

    @staticmethod
    def filter_on_optimizer(optimizer: "Optimizer", params: "Iterable[nn.Parameter]") -> "list[nn.Parameter]":
        """Return the parameters that `optimizer` does not contain yet, and warn about the others."""
        present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        params = list(params)
        new_params = [parameter for parameter in params if id(parameter) not in present]
        if len(new_params) < len(params):
            log.warning(
                "%d parameters to unfreeze are already in one of the optimizer's parameter groups and remain there. "
                "In configure_optimizers, pass only trainable parameters: filter(lambda p: p.requires_grad, ...).",
                len(params) - len(new_params),
            )
        return new_params

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: "Modules",
        optimizer: "Optimizer",
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and add their parameters to `optimizer` as a new group.

        The group's learning rate is `lr`. Default: the first group's learning rate divided by `initial_denom_lr`.
        """
        BaseFinetuning.make_trainable(modules)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        params = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        new_params = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if new_params:
            optimizer.add_param_group({"params": new_params, "lr": rate})

    # --- the run ----------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Freeze modules."""
        if stage == "fit":
            self._trained, self._newest_epoch = [], -1
            # before configure_optimizers, which may select the trainable parameters
            self.freeze_before_training(task)

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Unfreeze the parameters that were trained when the checkpoint was saved."""
        from ..base.tensors import BATCH_NORM

        # not in load_state_dict: configure_optimizers must see the parameters that were trained initially
        trained, self._trained = self._trained, []
        for module_name, module in task.named_modules() if trained else ():
            for name, parameter in module.named_parameters(module_name, recurse=False):
                parameter.requires_grad = name in trained
            norm: Any = module
            if isinstance(module, BATCH_NORM) and norm.weight is not None and norm.running_mean is not None:
                norm.track_running_stats = norm.weight.requires_grad

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """In a process that joins the run, unfreeze the parameters that the other processes are training."""
        self.on_fit_start(trainer, task)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Call `finetune_function` once per epoch."""
        # a second call would add the same parameters to the optimizer again
        if trainer.current_epoch <= self._newest_epoch:
            return  # the resumed run continues the epoch
        self._newest_epoch = trainer.current_epoch
        for optimizer in trainer.optimizers:
            self.finetune_function(task, trainer.current_epoch, optimizer)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Record which parameters are trained."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        # not in state_dict, which has no access to the task; a weights-only checkpoint has no callback states
        if state is not None:
            state["trained"] = [name for name, parameter in task.named_parameters() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """Return the latest epoch that has started. `on_save_checkpoint` adds the names of trained parameters."""
        return {"trained": self._trained, "newest_epoch": self._newest_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the latest epoch and the names of trained parameters."""
        self._trained, self._newest_epoch = state_dict["trained"], state_dict["newest_epoch"]


class BackboneFinetuning(BaseFinetuning):
    """Freezes `task.backbone`, then unfreezes it with its own learning rate, which increases every epoch.

    Args:
        unfreeze_backbone_at_epoch: First epoch in which the backbone is trained, counted from 0.
        lambda_func: Function of the epoch (counted from 1) that returns the factor for the backbone's learning rate.
        backbone_initial_ratio_lr: Initial learning rate of the backbone as a fraction of the first group's.
        backbone_initial_lr: Initial learning rate of the backbone; overrides `backbone_initial_ratio_lr`.
        should_align: Never let the backbone's learning rate exceed the first group's.
        train_bn: Also train the backbone's batch norms.
        verbose: Log the learning rates.
        rounding: Number of decimal places in logged learning rates.

    Raises ConfigError if the task has no `backbone` module.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Freeze the backbone. Raises ConfigError if the task has none."""
        from torch import nn

        if stage == "fit" and not isinstance(getattr(task, "backbone", None), nn.Module):
            raise ConfigError(f"BackboneFinetuning requires {type(task).__name__} to have a `backbone` module.")
        super().setup(trainer, task, stage)

    def freeze_before_training(self, task: "Task") -> None:
        """Freeze the backbone."""
        self.freeze(task.backbone)

    def finetune_function(self, task: "Task", epoch: int, optimizer: "Optimizer") -> None:
        """Unfreeze the backbone at the configured epoch and increase its learning rate in every subsequent epoch."""
        rate = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            initial_lr = self.backbone_initial_lr
            backbone_lr = rate * self.backbone_initial_ratio_lr if initial_lr is None else initial_lr
            backbone: Any = task.backbone
            self.unfreeze_and_add_param_group(backbone, optimizer, backbone_lr, self.initial_denom_lr, self.train_bn)
        # None if the run did not have this callback in that epoch, so the optimizer has no group for the backbone
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            backbone_lr = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            backbone_lr = min(backbone_lr, rate) if self.should_align else backbone_lr
            # the last group is the backbone's, unless something else has added a group since
            optimizer.param_groups[-1]["lr"] = backbone_lr
        else:
            return
        self.previous_backbone_lr = backbone_lr
        if self.verbose:
            log.info("Current lr: %s, Backbone lr: %s", round(rate, self.rounding), round(backbone_lr, self.rounding))

    def state_dict(self) -> dict[str, Any]:
        """Return the base class's state and the backbone's learning rate."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
