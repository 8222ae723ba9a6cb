"""Tasks of a few tensors that can be cut, and what the processes of a real run hold of them and see."""

import json
import weakref
from functools import partial
from pathlib import Path

import torch
from rpc_cases import Ratings
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.hooks import RemovableHandle

import legato as lg
from legato.trainer.processes.environment import find_place
from legato.trainer.strategies.ddp_rpc import remote
from legato.trainer.strategies.mesh.dtensors import local_bytes, local_of

SAMPLES, BATCH = 22, 2
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
    "threads": 1,
}


def ids():
    """Samples that say which they are."""
    return torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1)


class Shift(nn.Module):
    """Adds numbers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Buffer(torch.ones(7))

    def forward(self, inputs):
        return inputs + self.numbers


class Cuttable(lg.Task):
    """Blocks, with a frozen parameter and a buffer, and a parameter in none; widths that 2 does not divide."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 7), Shift(), nn.Linear(7, 4))
        self.net[2].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5))

    def configure_blocks(self):
        return list(self.net)

    def tensor_plan(self):
        return {"net.0": "column", "net.2": "row"}

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]).square().mean() * self.scale.mean()).square()

    def configure_optimizers(self):
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(ids()), BATCH, shuffle=True)


class Rated(Ratings):
    """Rates samples that say which they are, by the embeddings of servers."""

    def training_step(self, batch, batch_idx):
        numbers = batch[0].long().expand(-1, 2) % 9
        return self.rate(numbers).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(ids()), BATCH, shuffle=True)


class Looks(lg.Callback):
    """Notes which samples this process sees at each step and, in the end, the bytes that it holds."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}
        self.held: dict[str, int] = {}

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        self.seen.setdefault(trainer.global_step, []).extend(int(one) for one in batch[0].flatten())

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        self.held = held(task, trainer.optimizers[0])


def held(module, optimizer) -> dict[str, int]:
    """Return the bytes that this process holds; shapes alone, of what others hold, are none."""
    own = [one for one in module.parameters() if local_of(one).untyped_storage().nbytes() >= local_of(one).nbytes]
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "parameter_bytes": local_bytes(own),
        "buffer_bytes": local_bytes(module.buffers()),
        "gradient_bytes": local_bytes(one.grad for one in module.parameters() if one.grad is not None),
        "optimizer_bytes": local_bytes(states),
    }


def look(folder: Path, cases) -> None:
    """Run every case; each process writes what it saw and held."""
    torch.set_num_threads(1)
    for name, (kind, arguments, options) in cases.items():
        looks = Looks()
        lg.Trainer(**{**QUIET, **options}, callbacks=[looks]).fit(kind(**arguments))
        if not looks.held and remote.SERVER_STATE.optimizer is not None:  # a server, which runs no loop
            looks.held = held(nn.ModuleList(remote.SERVER_STATE.modules.values()), remote.SERVER_STATE.optimizer)
        write(folder, name, [looks.seen, looks.held])


class Stack(lg.Task):
    """Blocks of widths that 2 divides, a frozen layer, and a batch norm, whose buffers ddp broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.BatchNorm1d(8, track_running_stats=True)
        self.head = nn.Linear(8, 2)
        self.blocks[0].out.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        stream = batch[0].expand(-1, 8)
        for block in self.blocks:
            stream = block(stream)
        loss = self.head(self.norm(stream)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(64, 1)), BATCH, shuffle=True)


class Layer(nn.Module):
    """A perceptron with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, stream):
        return stream + self.out(torch.tanh(self.into(stream)))


class Pieces(Stack):
    """Blocks that can be cut over processes, and no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def configure_blocks(self):
        return list(self.blocks)

    def tensor_plan(self):
        return {"blocks.*.into": "column", "blocks.*.out": "row"}


class Damped(Pieces):
    """Blocks of two pairs of layers; recomputing them calls the first pair whole, since backward needs its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(3))

    def tensor_plan(self):
        return {"blocks.*.*.into": "column", "blocks.*.*.out": "row"}


class Twice(nn.Module):
    """Two perceptrons, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, stream):
        return self.second(torch.tanh(self.first(stream)))


class Stream(Pieces):
    """Blocks whose stream is cut along the sequence between the layers that are cut; one has frozen norms."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.blocks = nn.ModuleList(Normed() for _ in range(3))
        self.blocks[1].norm.requires_grad_(False)

    def tensor_plan(self):
        names = {"blocks.*.norm": "sequence", "enter": "split", "norm": "gather"}
        return names | {"blocks.*.into": "column", "blocks.*.gate": "column", "blocks.*.out": "row"}

    def training_step(self, batch, batch_idx):
        stream = self.enter(batch[0][:, None].expand(-1, 4, 1))
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream)).square().mean()


class Normed(nn.Module):
    """A gated perceptron behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.gate, self.out = (
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )

    def forward(self, stream):
        normed = self.norm(stream)
        return stream + self.out(torch.tanh(self.into(normed)) * self.gate(normed))


COLLECTIVES = {
    "allreduce_": ("all_reduce", 0), "all_reduce": ("all_reduce", 0), "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1), "send": ("send", 0),
    "alltoall_base_": ("all_to_all", 1), "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_gather_into_tensor": ("all_gather", 0),
}  # fmt: skip
"""By torch's name: what it is, and which of its arguments has the whole tensors; the last one's has a rank's part."""


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that torch's collectives are given, and how many begin within backward.

    The bytes are those of whole tensors, not of a rank's part. Objects (pickled, so of bytes) do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.begun: dict[str, list[int]] = {}
        """By kind: how many began within backward, and how many in all."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        namespace, _, name = function.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            kind, which = COLLECTIVES[name]
            given = arguments[which]
            tensors = [given] if isinstance(given, torch.Tensor) else given
            ranks = arguments[1] if name == "all_gather_into_tensor" else 1
            self.bytes[kind] = self.bytes.get(kind, 0) + ranks * sum(one.nbytes for one in tensors)
            begun = self.begun.setdefault(kind, [0, 0])
            begun[0] += torch._C._current_graph_task_id() != -1
            begun[1] += 1
        return function(*arguments, **(options or {}))


class CountsStep(lg.Callback):
    """Counts what the third step sends: in the second, ddp tells how it has arranged its buckets."""

    def __init__(self) -> None:
        self.counted, self.entered = CountedBytes(), False
        self.known: dict[int, torch.UntypedStorage] = {}
        self.saved = 0
        """Bytes that autograd saves, each memory once, with the batch."""

    def pack(self, tensor):
        storage = local_of(tensor).untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known[storage.data_ptr()] = storage
            self.saved += storage.nbytes()
        return tensor

    def on_train_start(self, trainer, task) -> None:
        for module in task.modules():
            if isinstance(module, remote.Remote):
                module.register_forward_hook(self.on_remote_call)

    def on_remote_call(self, module, given, output) -> None:
        """Count what goes to a server, which needs no gradient here, and what comes back, whose gradient goes there."""
        if self.entered:
            count = self.counted.bytes.get("remote call", 0)
            self.counted.bytes["remote call"] = count + given[0].nbytes + 2 * output.nbytes

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        if trainer.global_step == 2 and not self.entered:
            self.entered = True
            self.counted.__enter__()
            for tensor in (*task.parameters(), *task.buffers()):
                self.known[local_of(tensor).untyped_storage().data_ptr()] = local_of(tensor).untyped_storage()
            self.pack(batch[0])
            self.saving = saved_tensors_hooks(self.pack, lambda tensor: tensor)
            self.saving.__enter__()

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3 and self.entered and not trainer.should_stop:
            self.saving.__exit__(None, None, None)
            self.counted.__exit__(None, None, None)
            trainer.should_stop = True


def count_traffic(folder: Path, cases) -> None:
    """Run every case; each process writes the bytes of its collectives in a step, when they began, and saved bytes."""
    for name, counts in run_with(CountsStep, cases):
        write(folder, name, [counts.counted.bytes, counts.counted.begun, counts.saved])


def run_with(callback, cases):
    """Run every case with a callback of its own; yield its name and the callback."""
    torch.set_num_threads(1)
    for name, (kind, options) in cases.items():
        made = callback()
        lg.Trainer(**{**QUIET, "max_epochs": 9, **options}, callbacks=[made]).fit(kind())
        yield name, made


def write(folder: Path, name: str, found) -> None:
    """Write what this process found in a case."""
    place = find_place()
    assert place is not None
    (folder / f"{name} {place.rank}.json").write_text(json.dumps(found))


class Deep(Pieces):
    """Five blocks, and batches that are cut into several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(5))

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(64, 1)), 8, shuffle=True)


class Waiting(lg.Callback):
    """Counts the bytes that the stages of this process keep for backward in the third step: the most at one time."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.holders: dict[int, int] = {}
        self.bytes = self.most = self.given = 0
        self.hooks: list[RemovableHandle] = []

    def hold(self, holder, tensor) -> None:
        """Count the memory of a tensor as long as there is this holder, or another one of it."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.known:
            self.holders[place] = self.holders.get(place, 0) + 1
            self.bytes += size * (self.holders[place] == 1)
            self.most = max(self.most, self.bytes)
            weakref.finalize(holder, self.let_go, place, size)

    def let_go(self, place: int, size: int) -> None:
        self.holders[place] -= 1
        self.bytes -= size * (self.holders[place] == 0)

    def pack(self, tensor):
        kept = Kept(tensor)
        self.hold(kept, tensor)
        return kept

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        if trainer.global_step != 2:
            return
        known = [*task.parameters(), *task.buffers(), *batch]
        self.known = {local_of(one).untyped_storage().data_ptr() for one in known}
        self.given = sum(one.nbytes for one in batch)
        for number, stage in trainer.current_run.strategy.stages.modules.items():
            self.hooks.append(stage.register_forward_pre_hook(partial(self.on_input, number)))
            self.hooks.append(stage.register_forward_hook(lambda _, inputs, output: self.hold(output, output)))
        self.saving = saved_tensors_hooks(self.pack, lambda kept: kept.tensor)
        self.saving.__enter__()

    def on_input(self, number, stage, inputs) -> None:
        """Leave out what a stage is given: a buffer that it receives into, or the input of all pieces."""
        place = inputs[0].untyped_storage().data_ptr()
        if number == 0 and place not in self.known:
            self.given += inputs[0].untyped_storage().nbytes()
        self.known.add(place)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3:  # not the last one, perhaps: the ranks agree on the stop
            self.saving.__exit__(None, None, None)
            for hook in self.hooks:
                hook.remove()
            trainer.should_stop = True


class Kept:
    """A saved tensor, which can be referred to weakly."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor


def count_waiting(folder: Path, cases) -> None:
    """Run every case; each process writes the most bytes that its stages keep at one time, with batch and input."""
    for name, waiting in run_with(Waiting, cases):
        write(folder, name, waiting.most + waiting.given)
