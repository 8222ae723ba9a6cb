"""Parameters between sharded layers: the plan says which gradients are summed, and others are compared."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import ConfigError, TaskError

WIDTH, HEADS = 16, 4
CUT = {"blocks.*.wide": "column", "blocks.*.narrow": "row"}
SUMMED = CUT | {"blocks.*.head_norm": "replicated"}


class Block(nn.Module):
    """Normalizes each head between two layers, as the attention of some models does."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head_norm, self.narrow = nn.LayerNorm(WIDTH // HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, stream):
        heads = self.wide(self.norm(stream)).unflatten(-1, (-1, WIDTH // HEADS))
        return stream + self.narrow(self.head_norm(heads.sin()).flatten(-2))


class Heads(lg.Task):
    def __init__(self, plan=SUMMED):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(Block(), Block())
        self.plan = plan

    def tensor_plan(self):
        return self.plan

    def configure_blocks(self):
        return list(self.blocks)

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).pow(2).mean()

    def train_dataloader(self):
        return DataLoader(torch.randn(16, 3, WIDTH, generator=torch.Generator().manual_seed(4)), 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(trainer, task, **options):
    trainer(max_epochs=1, precision="64-true", **options).fit(task)
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()])


def mesh(**sizes):
    return {"strategy": {"name": "mesh", "tensor": 2, **sizes}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2, **mesh(), "accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"devices": 4, **mesh(shard=2, shard_blocks=["Block"]), "accumulate_grad_batches": 1, "replicas": 2},
        {"devices": 4, **mesh(pipeline=2), "accumulate_grad_batches": 2},
    ],
)
def test_a_replicated_module_has_the_gradient_of_one_process(trainer, options):
    clip = {name: value for name, value in options.items() if name == "gradient_clip_val"}
    alone = trained(trainer, Heads(), accumulate_grad_batches=2, **clip)
    # torch computes norms of parts in float32
    assert float((trained(trainer, Heads(), **options) - alone).abs().max()) < (1e-7 if clip else 1e-10)


@pytest.mark.slow
def test_partial_gradients_are_refused_by_name_before_the_first_update(trainer):
    with pytest.raises(TaskError, match=r'blocks.0.head_norm.weight.*differ.*{"blocks.\*.head_norm": "replicated"}'):
        trained(trainer, Heads(CUT), devices=2, **mesh())


@pytest.mark.slow
def test_full_gradients_are_not_summed(trainer):
    plan = SUMMED | {"blocks.*.norm": "replicated"}
    with pytest.raises(TaskError, match=r'marks blocks.0.norm.weight.* as "replicated", but .*equal on all processes'):
        trained(trainer, Heads(plan), devices=2, **mesh())


@pytest.mark.slow
def test_a_replicated_module_without_parameters_is_refused(trainer):
    class Plain(Heads):
        def __init__(self):
            super().__init__(SUMMED | {"activation": "replicated"})
            self.activation = nn.Tanh()

    with pytest.raises(ConfigError, match=r"marks Plain\.activation as 'replicated', but it has no parameters"):
        trained(trainer, Plain(), devices=2, **mesh())
