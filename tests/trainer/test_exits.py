"""sys.exit within a run is reported with its location and is never a success; after training it ends the program."""

import sys

import pytest
from tiny import Validated, make_loader

from legato.base.errors import WorkerError


class Exits(Validated):
    """Exits in a hook."""

    def __init__(self, hook, code):
        super().__init__()
        self.hook, self.code = hook, code

    def reach(self, hook):
        if hook == self.hook:
            sys.exit(self.code)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 4:
            self.reach("step")

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.reach("validation")

    def test_step(self, batch, batch_idx):
        self.reach("test")

    def on_train_end(self):
        self.reach("end of training")

    def teardown(self, stage):
        self.reach("teardown")


@pytest.mark.parametrize("code", [0, None])
@pytest.mark.parametrize(("hook", "step"), [("step", 4), ("validation", 8)])
def test_an_exit_with_code_0_fails_a_run_that_was_not_done(trainer, hook, step, code):
    made = trainer(max_epochs=3)
    with pytest.raises(WorkerError) as caught:
        made.fit(Exits(hook, code), make_loader(32), make_loader(8))
    line = caught.value.__cause__.__traceback__
    while line.tb_next is not None:
        line = line.tb_next
    assert str(caught.value) == (
        f"sys.exit({code!r}) in reach ({__file__}:{line.tb_lineno}) ended fit at step {step}, before it was complete. "
        f"To stop training early, set trainer.should_stop = True."
    )


def test_an_exit_with_code_0_fails_an_evaluation(trainer):
    with pytest.raises(WorkerError, match=r"sys.exit\(0\) in reach .* ended test at step 0"):
        trainer().test(Exits("test", 0), make_loader(8))


@pytest.mark.parametrize("code", [3, "no data"])
def test_another_code_stays_and_its_place_is_told(trainer, caplog, code):
    with pytest.raises(SystemExit) as caught:
        trainer(max_epochs=3).fit(Exits("step", code), make_loader(32))
    assert caught.value.code == code
    assert f"sys.exit({code!r}) in reach ({__file__}:" in caplog.text
    assert "ended fit at step 4, before it was complete." in caplog.text


@pytest.mark.parametrize("hook", ["end of training", "teardown"])
def test_an_exit_after_training_ends_the_program(trainer, caplog, hook):
    with pytest.raises(SystemExit) as caught:
        trainer(max_epochs=1).fit(Exits(hook, 0), make_loader(32))
    assert caught.value.code == 0
    assert "ended fit" not in caplog.text
