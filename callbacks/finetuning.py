"""BaseFinetuning and BackboneFinetuning: parts of a task that are frozen at first and trained later."""

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
    """Return the factor by which BackboneFinetuning raises the learning rate in an epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze modules before training, and unfreeze them at the beginning of epochs.

    Override `freeze_before_training` and `finetune_function`. A resume restores which parameters are trained; parameter
    groups that were added to optimizers come back with the optimizers' states.
    """

    def __init__(self) -> None:
        self._trained: list[str] = []
        """Names of the parameters that were trained when the checkpoint was saved; empty in a new run."""
        self._newest_epoch = -1
        """The newest epoch for which `finetune_function` was called."""

    # --- to override ------------------------------------------------------------------------------------------------
    def freeze_before_training(self, task: "Task") -> None:
        """Freeze modules, for example by `self.freeze(task.backbone)`."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training.")

    def finetune_function(self, task: "Task", epoch: int, optimizer: "Optimizer") -> None:
        """Unfreeze modules at the beginning of an epoch; called for each optimizer."""
        raise NotImplementedError(f"{type(self).__name__} must define finetune_function.")

    # --- modules ----------------------------------------------------------------------------------------------------
    @staticmethod
    def flatten_modules(modules: "Modules") -> "list[nn.Module]":
        """Return the modules below that have no children, or parameters of their own."""
        from torch import nn

        if isinstance(modules, nn.Module):
            every: Iterable[nn.Module] = modules.modules()
        else:
            every = [module for part in modules for module in BaseFinetuning.flatten_modules(part)]
        return [one for one in every if not list(one.children()) or list(one.parameters(recurse=False))]

    @staticmethod
    def filter_params(
        modules: "Modules", train_bn: bool = True, requires_grad: bool = True
    ) -> "Iterator[nn.Parameter]":
        """Yield the parameters that are trained, or those that are not; without `train_bn` none of batch norms."""
        from ..base.tensors import BATCH_NORM

        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, BATCH_NORM):
                yield from (one for one in module.parameters(recurse=False) if one.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: "Modules") -> None:
        """Let all parameters be trained."""
        for module in BaseFinetuning.flatten_modules(modules):
            BaseFinetuning._set(module, True)

    @staticmethod
    def freeze_module(module: "nn.Module") -> None:
        """Freeze a module's own parameters."""
        BaseFinetuning._set(module, False)

    @staticmethod
    def freeze(modules: "Modules", train_bn: bool = True) -> None:
        """Freeze all parameters but, with `train_bn`, those of batch norms."""
        from ..base.tensors import BATCH_NORM

        for module in BaseFinetuning.flatten_modules(modules):
            BaseFinetuning._set(module, train_bn and isinstance(module, BATCH_NORM))

    @staticmethod
    def _set(module: "nn.Module", trained: bool) -> None:
        from ..base.tensors import BATCH_NORM

        if isinstance(module, BATCH_NORM):
            norm: Any = module
            # its running statistics stay as they are; in training mode it still normalises by those of its batch
            norm.track_running_stats = trained
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = trained

    @staticmethod
    def filter_on_optimizer(optimizer: "Optimizer", params: "Iterable[nn.Parameter]") -> "list[nn.Parameter]":
        """Return the parameters that the optimizer does not have yet; warn of the others."""
        known = {id(one) for group in optimizer.param_groups for one in group["params"]}
        params = list(params)
        found = [one for one in params if id(one) not in known]
        if len(found) < len(params):
            log.warning(
                "%d of the parameters to unfreeze are in a group of the optimizer already, and stay there. In "
                "configure_optimizers give it the trained ones only: filter(lambda p: p.requires_grad, ...).",
                len(params) - len(found),
            )
        return found

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: "Modules",
        optimizer: "Optimizer",
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Let modules be trained, as a new parameter group at `lr`, or the first group's over `initial_denom_lr`."""
        BaseFinetuning.make_trainable(modules)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        params = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        found = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if found:
            optimizer.add_param_group({"params": found, "lr": rate})

    # --- the run ----------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Freeze."""
        if stage == "fit":
            self._trained, self._newest_epoch = [], -1
            # before configure_optimizers, which may give its optimizer only what is trained
            self.freeze_before_training(task)

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Train what the saved run had trained."""
        from ..base.tensors import BATCH_NORM

        # not when it is loaded: configure_optimizers may give its optimizer the parameters that are trained at first
        trained, self._trained = self._trained, []
        for module_name, module in task.named_modules() if trained else ():
            for name, parameter in module.named_parameters(module_name, recurse=False):
                parameter.requires_grad = name in trained
            norm: Any = module
            if isinstance(module, BATCH_NORM) and norm.weight is not None and norm.running_mean is not None:
                norm.track_running_stats = norm.weight.requires_grad

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Train what the others train, in a process that joins them."""
        self.on_fit_start(trainer, task)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Unfreeze, once in an epoch."""
        # a second call would add the same parameters to the optimizer again
        if trainer.current_epoch <= self._newest_epoch:
            return  # the epoch goes on after a resume
        self._newest_epoch = trainer.current_epoch
        for optimizer in trainer.optimizers:
            self.finetune_function(task, trainer.current_epoch, optimizer)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Record which parameters are trained."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        # here, as state_dict is not given the task; a checkpoint of weights alone has no state of callbacks
        if state is not None:
            state["trained"] = [name for name, parameter in task.named_parameters() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """Return the newest epoch that was begun; which parameters are trained is added when a checkpoint is saved."""
        return {"trained": self._trained, "newest_epoch": self._newest_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore which epoch was begun, and remember what was trained."""
        self._trained, self._newest_epoch = state_dict["trained"], state_dict["newest_epoch"]


class BackboneFinetuning(BaseFinetuning):
    """Freezes `task.backbone`, and trains it from an epoch on at a learning rate that rises to that of the rest.

    Args:
        unfreeze_backbone_at_epoch: the first epoch in which it is trained.
        lambda_func: returns the factor of the learning rate for an epoch, counted from 1.
        backbone_initial_ratio_lr: share of the first group's learning rate to begin with.
        backbone_initial_lr: the learning rate to begin with, in place of that.
        should_align: never go beyond the first group's learning rate.
        train_bn: train batch norms too.
        verbose: log the learning rates.
        rounding: digits of logged learning rates.
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
        """Freeze. Raises ConfigError for a task without a backbone."""
        from torch import nn

        if stage == "fit" and not isinstance(getattr(task, "backbone", None), nn.Module):
            raise ConfigError(f"BackboneFinetuning: {type(task).__name__} has no module `backbone`.")
        super().setup(trainer, task, stage)

    def freeze_before_training(self, task: "Task") -> None:
        """Freeze the backbone."""
        self.freeze(task.backbone)

    def finetune_function(self, task: "Task", epoch: int, optimizer: "Optimizer") -> None:
        """Unfreeze the backbone when it is time, and raise its learning rate from then on."""
        rate = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            given = self.backbone_initial_lr
            own = rate * self.backbone_initial_ratio_lr if given is None else given
            backbone: Any = task.backbone
            self.unfreeze_and_add_param_group(backbone, optimizer, own, self.initial_denom_lr, self.train_bn)
        # None where the run passed that epoch without this callback: no group was added whose rate could rise
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            own = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            own = min(own, rate) if self.should_align else own
            # the group that was added at that epoch; the callback takes for granted that no other came after it
            optimizer.param_groups[-1]["lr"] = own
        else:
            return
        self.previous_backbone_lr = own
        if self.verbose:
            log.info("Current lr: %s, Backbone lr: %s", round(rate, self.rounding), round(own, self.rounding))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and the backbone's learning rate."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
