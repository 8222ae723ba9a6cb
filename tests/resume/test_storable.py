"""A state that no checkpoint can hold is reported before the first step."""

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer

from legato.base.errors import CheckpointError
from legato.callbacks import Callback, Checkpoint


class Untold(torch.Tensor):
    """A wrapper tensor without __tensor_flatten__."""

    def __new__(cls, plain):
        made = torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0] if function is torch.ops.aten.detach.default else NotImplemented


class Odd(Tiny):
    """Has a value that no checkpoint can hold in one of several places."""

    def __init__(self, place):
        super().__init__()
        self.place, self.steps = place, 0
        if place == "buffer":
            self.register_buffer("odd", Untold(torch.zeros(2)))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.place == "late state":
            optimizer.register_step_post_hook(
                lambda *_: optimizer.state.update({self.model[0].weight: {"odd": object()}})
            )
        if self.place == "state":
            optimizer.state[next(self.parameters())]["odd"] = object()
        return optimizer


class OddCallback(Callback):
    def state_dict(self):
        return {"odd": object()}


@pytest.mark.parametrize(
    ("place", "message", "steps"),
    [
        ("buffer", r"state_dict\.odd is a .*Untold.* or train without checkpoints", 0),
        ("state", r"optimizer_states\.0\.state\..*weight\.odd is an object", 0),
        ("callback", r"callbacks\.OddCallback\.odd is an object", 0),
        ("late state", r"optimizer_states\.0\.state\..*odd is an object", 1),
    ],
)
def test_what_no_checkpoint_holds_is_told_before_training(tmp_path, place, message, steps):
    task, callbacks = Odd(place), [Checkpoint(dirpath=tmp_path), *[OddCallback()] * (place == "callback")]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(task, make_loader())
    assert task.steps == steps
    make_trainer(tmp_path, callbacks=callbacks[1:]).fit(Odd(place), make_loader())  # nothing is saved there
