"""activation_checkpointing: backward recomputes the forward of blocks, and nothing else changes."""

import pytest
import torch
from ddp_cases import flat
from mesh_cases import Dropped, fit
from tiny import Tiny, assert_same_bits, make_loader
from torch import nn

from legato.base.errors import ConfigError


class Counted(Dropped):
    """Counts the forwards of its block with and without gradient."""

    def __init__(self):
        super().__init__()
        self.forwards = {True: 0, False: 0}
        self.blocks[0].attention.register_forward_hook(self.count)

    def count(self, module, inputs, output):
        self.forwards[torch.is_grad_enabled()] += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"strategy": "data_parallel", "devices": 2}, {"reproducible": "bitwise"}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_blocks_compute_twice_and_change_not_one_bit(options):
    once, twice = Counted(), Counted()
    options = {"strategy": "single", "replicas": 2, **options}
    kind = type(twice.blocks[0])
    fit(once, **options)
    trainer = fit(twice, **options, activation_checkpointing=["Block"])
    assert torch.equal(flat(once), flat(twice))
    if options["strategy"] == "single":  # of its copies for several devices the task does not hear
        assert twice.forwards[True] == 2 * once.forwards[True] == 2 * 2 * trainer.global_step
    assert twice.forwards[False] == once.forwards[False]  # nothing twice where there is no backward
    assert type(twice.blocks[0]) is kind
    assert twice.state_dict().keys() == once.state_dict().keys()


class Normed(Tiny):
    """Has buffers that its forward updates."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("options", [{}, {"replicas": 2, "reproducible": "bitwise"}], ids=str)
def test_batch_norm_counts_each_batch_once(trainer, options):
    tasks = []
    for more in ({}, {"activation_checkpointing": ["Sequential"]}):
        torch.manual_seed(0)
        tasks.append(Normed())
        trainer(strategy="single", **options, **more).fit(tasks[-1], make_loader())
    assert_same_bits(*tasks)
    assert tasks[1].model[1].num_batches_tracked > 0


def test_a_class_that_the_task_has_not_is_refused():
    with pytest.raises(
        ConfigError, match=r"activation_checkpointing: Dropped has no module of class 'Blok'\. Did you mean"
    ):
        fit(Dropped(), strategy="single", activation_checkpointing=["Blok"])
