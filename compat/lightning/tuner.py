"""Tuner: searches for a learning rate and for a batch size, with Lightning's arguments."""

from typing import Any

from ...base.errors import ConfigError
from ...trainer.tuning import LearningRateSweep, find_batch_size, holders_of, set_attribute, sweep_learning_rates
from .rank_zero import rank_zero_warn

METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Searches for the learning rate and the batch size of a trainer's next run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def scale_batch_size(  # noqa: PLR0913
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Return the largest batch size that memory holds, and set it where it was found: see `find_batch_size`.

        Raises MisconfigurationException for loaders, whose batch size is fixed.
        """
        data = _data_of(method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        if any(hasattr(one, "__iter__") for one in data.values()):
            raise ConfigError(
                "The batch size cannot be searched for with loaders that were made already: give a data module, or "
                "give the module a train_dataloader that reads its batch size."
            )
        if self._trainer.fast_dev_run:
            rank_zero_warn("Skipping batch size scaler since `fast_dev_run` is enabled.")
            return None
        return find_batch_size(
            self._trainer,
            model,
            stage=method,
            attribute=batch_arg_name,
            mode=mode,
            steps=steps_per_trial,
            start=init_val,
            trials=max_trials,
            margin=margin,
            largest=max_val,
            **data,
        )

    def lr_find(  # noqa: PLR0913
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateSweep | None:
        """Return the losses of rising learning rates, and set the suggested one where it was found.

        Raises MisconfigurationException for several optimizers, AttributeError where no learning rate is found.
        """
        if method != "fit":
            raise ConfigError("method='fit' is the only valid configuration to run lr finder.")
        data = _data_of(method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        if self._trainer.fast_dev_run:
            rank_zero_warn("Skipping learning rate finder since `fast_dev_run` is enabled.")
            return None
        name = learning_rate_name(model, attr_name) if update_attr else ""
        sweep = sweep_learning_rates(
            self._trainer,
            model,
            mode=mode,
            lr_min=min_lr,
            lr_max=max_lr,
            steps=num_training,
            epochs=-1 if self._trainer.max_epochs is None else self._trainer.max_epochs,
            diverges_at=early_stop_threshold,
            **data,
        )
        found = sweep.suggestion() if update_attr else None
        if found is not None:
            set_attribute(name, found, model)
        return sweep


def learning_rate_name(model: Any, name: str = "") -> str:
    """Return the name under which a module or its hparams keep the learning rate. Raises AttributeError."""
    for one in (name,) if name else ("lr", "learning_rate"):
        try:
            holders_of(one, model)
        except ConfigError:
            continue
        return one
    raise AttributeError(
        f"When using the learning rate finder, either `model` or `model.hparams` should have one of these fields: "
        f"{[name] if name else ['lr', 'learning_rate']}. If your model has a different name for the learning rate, "
        f"set it with `.lr_find(attr_name=...)`."
    )


def _data_of(method: str, train: Any, val: Any, evaluation: Any, datamodule: Any) -> dict[str, Any]:
    """Return the data as the trainer's method takes it."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is invalid. Should be one of {METHODS}.")
    if method == "fit" and evaluation is not None:
        raise ConfigError("Tuning with method='fit' takes train_dataloaders and val_dataloaders, not dataloaders.")
    if method != "fit" and (train is not None or val is not None):
        raise ConfigError(f"Tuning with method={method!r} takes dataloaders, not train_dataloaders or val_dataloaders.")
    names = {"train_dataloaders": train, "val_dataloaders": val, "dataloaders": evaluation, "datamodule": datamodule}
    return {name: value for name, value in names.items() if value is not None}
