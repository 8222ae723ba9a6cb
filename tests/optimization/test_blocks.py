"""Changes to a task's modules during a run: batch norm over all processes, compiled blocks."""

import pickle

import pytest
import torch
from ddp_cases import DATA, QUIET, Net, flat, loader
from tiny import Tiny, make_loader
from torch import nn
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import ConfigError, TaskError
from legato.trainer.processes.launch import run_workers
from legato.trainer.strategies.batch_norm import synchronize


# --- batch norm -------------------------------------------------------------------------------------------------------
class Halved(nn.BatchNorm2d):
    """A batch norm with a custom forward."""

    def forward(self, input):
        return super().forward(input) / 2


class Images(Net):
    """Batch norm over images and over features."""

    def __init__(self, leave_out=-1, norm=nn.BatchNorm2d, **options):
        super().__init__(norm=True)
        self.start = nn.Sequential(nn.Conv2d(1, 2, 2), norm(2, **options), nn.Flatten(), nn.Linear(2, 4))
        self.leave_out = leave_out

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return None if self.global_step == self.leave_out and self.trainer.global_rank else output

    def loss(self, batch):
        image, label = batch
        return super().loss((self.start(image.view(-1, 1, 2, 2)), label))


def train(task, samples=24, batch_size=4, **options):
    arguments = {**QUIET, "max_epochs": 3, "sync_batchnorm": True, "devices": 2, "strategy": "ddp", **options}
    lg.Trainer(**arguments).fit(task, loader(samples, batch_size), loader(10))
    kinds = {type(module) for module in task.modules()}
    assert {kind for kind in kinds if issubclass(kind, nn.modules.batchnorm._BatchNorm)} <= {
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        Halved,
    }
    return flat(task)


def cases():
    """Everything that needs two processes, in the two of one start."""
    torch.set_num_threads(1)
    weights = {"plain": train(Images()), "uneven": train(Images(), samples=28)}
    weights["cumulative"] = train(Images(momentum=None))
    weights["not followed"] = train(Images(track_running_stats=False, affine=False))
    weights["own forward"] = train(Images(norm=Halved))
    weights["zero1"] = train(Images(), strategy="zero1")
    weights["half"] = train(Images(), precision="bf16-mixed")
    weights["apart"] = train(Images(), sync_batchnorm=False)
    refused = {}
    for name, options in {
        "turns": {"replicas": 4},
        "bitwise": {"reproducible": "bitwise"},
        "elsewhere": {"strategy": "fsdp"},
    }.items():
        with pytest.raises(ConfigError) as caught:
            train(Images(), **options)
        refused[name] = str(caught.value)
    return weights, refused


@pytest.fixture(scope="module")
def results():
    return run_workers(cases, 2, threads=1)


def in_one(samples=24, **options):
    return train(Images(**options), samples, 8, devices=1, strategy="single")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("zero1", {}),
        ("cumulative", {"momentum": None}),
        ("not followed", {"track_running_stats": False, "affine": False}),
        ("own forward", {"norm": Halved}),
    ],
)
def test_two_processes_normalise_as_one_with_both_batches(results, name, options):
    assert torch.allclose(results[0][name], in_one(**options), rtol=0, atol=2e-6)
    if not options:
        assert not torch.allclose(results[0]["apart"], in_one(), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_round_that_is_not_whole_is_left_out_and_half_precision_works(results):
    """The last four of 28 samples are one replica's, whose process would wait for the other in its forward."""
    assert torch.equal(results[0]["uneven"], results[0]["plain"])
    assert torch.allclose(results[0]["half"], results[0]["plain"], rtol=0, atol=0.05)


@pytest.mark.slow
def test_what_cannot_be_synchronized_is_refused(results, refused):
    messages = results[1]
    assert "4 replicas on 2 processes. Start 4 processes under strategy=ddp, or start a new run" in messages["turns"]
    assert "Set reproducible=order, or leave" in messages["bitwise"]
    assert "strategy=fsdp does not support this. Use ddp, zero1 or" in messages["elsewhere"]
    message = refused(ConfigError, Net(norm=True), sync_batchnorm=True, replicas=2)
    assert "2 replicas on 1 process. Start 2 processes" in message


@pytest.mark.slow
def test_a_batch_that_is_left_out_after_its_forward_ends_the_run():
    with pytest.raises(TaskError, match=r"returned None in step 2, .* Return the loss times 0\.0"):
        train(Images(leave_out=1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_is_torchs_own(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        task, plain = Net(norm=True).cuda(), Net(norm=True).cuda()
        undo = synchronize(task, torch.device("cuda"), dist.group.WORLD)
        batch = [tensor[:8].cuda() for tensor in DATA.tensors]
        for net in (task, plain):
            net.loss(batch).backward()
        assert isinstance(task.body[1], nn.SyncBatchNorm)
        undo()
        assert type(task.body[1]) is nn.BatchNorm1d
        torch.testing.assert_close(flat(task), flat(plain), rtol=0, atol=1e-6)
        for ours, theirs in zip(task.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    finally:
        dist.destroy_process_group()


# --- compiled blocks --------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs):
        return torch.tanh(self.linear(inputs)) + inputs


class Deep(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def loss(self, batch):
        inputs, label = batch
        for block in self.blocks:
            inputs = block(inputs)
        return super().loss((inputs, label))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_are_compiled_by_class_and_compute_the_same(trainer, backend):
    plain, compiled = Deep(), Deep()
    trainer().fit(plain, loader(20))
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    names = set(compiled.state_dict())
    chosen = backend if backend != "eager" else counting
    trainer(compile={"blocks": ["Block"], "backend": chosen}).fit(compiled, loader(20))
    torch.testing.assert_close(flat(compiled), flat(plain), rtol=0, atol=1e-6)
    assert set(compiled.state_dict()) == names
    assert [block._compiled_call_impl is not None for block in compiled.blocks] == [True] * 3
    assert compiled.head._compiled_call_impl is None
    if backend == "eager":
        assert 1 <= len(graphs) <= 2  # the three share one: their code is the same


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
@pytest.mark.parametrize(("sizes", "count"), [((4, 4, 4), 2), ((4, 4, 3), 4), ((5, 7, 3, 6, 8), 4)])
def test_a_smaller_last_batch_and_sequences_of_many_lengths_compile_once_more(trainer, sizes, count):
    """Two graphs for each: of blocks whose input needs a gradient, and of the one whose input does not."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    batches = [(torch.ones(size, 4), torch.zeros(size, dtype=torch.int64)) for size in sizes]
    trainer(max_epochs=2, compile={"blocks": ["Block"], "backend": counting}).fit(Deep(), DataLoader(batches, None))
    assert len(graphs) == count


def test_compile_options_that_are_none_are_refused(refused):
    message = refused(ConfigError, Deep(), loader(8), compile={"blocks": ["Blok"]})
    assert "trainer.compile.blocks: Deep has no module of class 'Blok'. Did you mean 'Block'?" in message
    message = refused(ConfigError, Deep(), loader(8), compile={"block": ["Block"]})
    assert "trainer.compile has no option 'block'. Did you mean 'blocks'?" in message
    message = refused(ConfigError, Deep(), make_loader(8), compile={"backed": "eager"})
    assert "Did you mean 'backend'?" in message


class Stack(Tiny):
    """Calls a Sequential, and layers in a list, from its step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(12))

    def loss(self, batch):
        outputs = self.model(batch[0])
        for layer in self.more:
            outputs = layer(outputs)
        return nn.functional.mse_loss(outputs, batch[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
@pytest.mark.parametrize(("blocks", "count"), [({}, 2), ({"blocks": ["Linear"]}, 3)])
def test_modules_of_torchs_own_classes_are_compiled(trainer, blocks, count):
    """The list of equal layers shares one graph."""
    plain, compiled, graphs = Stack(), Stack(), []
    trainer().fit(plain, make_loader(20))

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    trainer(compile={"backend": counting, **blocks}).fit(compiled, make_loader(20))
    assert len(graphs) == count
    torch.testing.assert_close(flat(compiled), flat(plain), rtol=0, atol=1e-6)
    pickle.dumps(compiled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
def test_a_run_that_compiles_nothing_says_so(trainer, caplog):
    class Inside(Tiny):
        """Calls the parts of a module that it never calls itself."""

        def loss(self, batch):
            inputs = batch[0]
            for layer in self.model:
                inputs = layer(inputs)
            return nn.functional.mse_loss(inputs, batch[1])

    torch.compiler.reset()
    trainer(max_epochs=2, compile={"backend": "eager"}).fit(Inside(), make_loader(8))
    assert caplog.text.count("trainer.compile compiled nothing") == 1
    caplog.clear()
    trainer(compile={"backend": "eager", "blocks": ["Linear"]}).fit(Inside(), make_loader(8))
    assert "compiled nothing" not in caplog.text
