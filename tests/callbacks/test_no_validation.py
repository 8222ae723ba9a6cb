"""Runs that end before the first validation, whose metric a callback, a sweep or a user waits for."""

import logging
from pathlib import Path

import pytest
from replayed_folder import CONFIG, legato, make_folder
from tiny import Tiny, make_loader

import legato as lg
from legato.base.quantities import first_validation


class Validated(Tiny):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", super().training_step(batch, batch_idx))


def warned(trainer, caplog, monitor="val/loss", loader=None, **options):
    """Fit on 6 steps an epoch with a Checkpoint that monitors a metric; return the warnings."""
    best = lg.callbacks.Checkpoint(monitor=monitor)
    made = trainer(**{"max_epochs": -1, "enable_checkpointing": True, "callbacks": [best], **options})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "legato"):
        made.fit(Validated(), make_loader(24, 4) if loader is None else loader, make_loader(8))
    return [
        record.getMessage()
        for record in caplog.records
        if "ends training before the first validation" in record.getMessage()
    ]


@pytest.mark.parametrize(
    ("options", "limit", "step"),
    [
        ({"max_steps": 3}, "max_steps=3", 6),
        ({"max_steps": 7, "check_val_every_n_epoch": 2}, "max_steps=7", 12),
        ({"max_epochs": 1, "check_val_every_n_epoch": 2}, "max_epochs=1", 12),
        ({"max_steps": 1, "val_check_interval": 4, "accumulate_grad_batches": 2}, "max_steps=1", 2),
        ({"max_steps": 2, "val_check_interval": 0.5}, "max_steps=2", 3),
        ({"max_steps": 7, "val_check_interval": 8, "check_val_every_n_epoch": None}, "max_steps=7", 8),
    ],
)
def test_a_run_says_before_its_first_step_that_it_ends_before_a_validation(trainer, caplog, options, limit, step):
    (text,) = warned(trainer, caplog, num_sanity_val_steps=1, **options)
    assert text.startswith(
        f"{limit} ends training before the first validation, at step {step}, so 'val/loss', which Checkpoint"
    )
    assert "unless" not in text
    (text,) = warned(trainer, caplog, num_sanity_val_steps=0, **options)
    assert "unless training logs it" in text
    longer = {"max_epochs": 2} if "max_epochs" in options else {"max_steps": step}
    assert warned(trainer, caplog, **{**options, **longer}) == []


def test_nothing_is_said_of_what_training_logs(trainer, caplog):
    assert warned(trainer, caplog, monitor="loss", max_steps=3, num_sanity_val_steps=1) == []
    assert warned(trainer, caplog, monitor=None, max_steps=3, num_sanity_val_steps=1) == []
    assert warned(trainer, caplog, max_steps=3, num_sanity_val_steps=1, limit_val_batches=0, monitor="loss") == []


def test_the_first_validation_follows_from_the_arguments():
    assert first_validation(1.0, 1, 1, 75) == 75
    assert first_validation(1.0, 3, 1, 75) == 225
    assert first_validation(0.25, 1, 4, 25) == 7
    assert first_validation(10, None, 4, float("inf")) == 3
    assert first_validation("00:00:10:00", 1, 1, 75) is None
    assert first_validation(1.0, 1, 1, float("inf")) is None


@pytest.mark.slow
def test_check_and_sweep_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)
    best = "best: {_target_: legato.callbacks.Checkpoint, monitor: val/loss, dirpath: best}\n"
    Path("points.yaml").write_text(f"{CONFIG}  {best}".replace("num_sanity_val_steps: 0", "num_sanity_val_steps: 1"))
    done = legato("check", "points.yaml", "trainer.max_steps=3", fails=True)
    assert (
        "max_steps=3 ends training before the first validation (step 5), which logs 'val/loss' (Checkpoint)"
        in done.stderr
    )
    assert "No problems found" in legato("check", "points.yaml", "trainer.max_steps=5").stdout
    assert "No problems found" in legato("check", "points.yaml", "trainer.max_steps=3", "callbacks.best=null").stdout
    legato("sweep", "points.yaml", "trainer.max_steps=3", "task.rate=0.1,0.2", fails=True)
    logs = [path.read_text() for path in Path("runs").rglob("log.txt")]
    assert [log.count("max_steps=3 ends training before the first validation, at step 5") for log in logs] == [1, 1]
