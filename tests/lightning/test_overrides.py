"""Attributes of Legato's Trainer that the Lightning Trainer overrides: Lightning's public names, and five more."""

import warnings

import legato as lg
import legato.compat.lightning as L

FOR_SUBCLASSES = {"new_state", "check", "end_epoch", "evaluate", "manual_optimizers"}
"""Names of Legato's Trainer that a subclass may override."""


def test_a_trainer_overrides_few_names_of_legatos():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as real

        made = real.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    of_lightning = {*dir(real.Trainer), *vars(made)}
    kinds = L.Trainer.__mro__
    above = kinds[: kinds.index(lg.Trainer)]
    names = {name for kind in above for name in vars(kind) if not name.startswith("__")}
    of_legato = {
        name for kind in lg.Trainer.__mro__[:-1] for name in (*vars(kind), *vars(kind).get("__annotations__", ()))
    }
    assert (names & of_legato) - of_lightning <= FOR_SUBCLASSES
