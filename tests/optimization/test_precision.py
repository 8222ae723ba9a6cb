"""Each precision trains like the hand-written loop of PyTorch's AMP pages."""

import timeit
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from legato.base.errors import ConfigError
from legato.trainer.optimization.precision import Precision

Pair = namedtuple("Pair", "image label")


@dataclass
class Item:
    image: torch.Tensor
    label: torch.Tensor
    note: str = "kept"


def make_model(dtype=None):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model if dtype is None else model.to(dtype)


def make_batches(count=4):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(count)
    ]


def train_with(precision, model, batches, accumulate=1):
    precision.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for first in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for batch in batches[first : first + accumulate]:
            image, label = precision.convert_batch(batch)
            with precision.forward_context():
                loss = nn.functional.cross_entropy(model(image), label) / accumulate
            precision.scale(loss).backward()
            losses.append(loss.detach())
        precision.unscale(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        precision.step(optimizer)
        precision.update()
    return losses


def train_by_hand(name, model, batches, accumulate=1):
    """The loop of the AMP examples page: gradient clipping, gradient accumulation."""
    autocast = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(name)
    weights = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(name, torch.float32)
    model.to(weights)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "16-mixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for first in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for image, label in batches[first : first + accumulate]:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = nn.functional.cross_entropy(model(image.to(weights)), label) / accumulate
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true"])
def test_every_precision_trains_bit_for_bit_like_the_loop_written_by_hand(name, accumulate):
    batches = make_batches()
    ours, theirs = make_model(), make_model()
    losses = train_with(Precision(name, "cpu"), ours, batches, accumulate)
    expected = train_by_hand(name, theirs, batches, accumulate)
    assert all(torch.equal(loss, expected_loss) for loss, expected_loss in zip(losses, expected, strict=True))
    for (key, value), expected_value in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, expected_value), key
        assert value.dtype == expected_value.dtype


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (32, "32-true"),
        ("32", "32-true"),
        ("32-true", "32-true"),
        (64, "64-true"),
        ("64", "64-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
        ("16-true", "16-true"),
    ],
)
def test_short_and_long_names(precision, name):
    assert Precision(precision, "cpu").name == name


def test_what_a_device_cannot_do_is_said():
    with pytest.raises(ConfigError, match="mps devices do not support float64"):
        Precision("64", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="not support bfloat16"):
            Precision("bf16-mixed", "cuda")


def test_mixed_keeps_float32_weights_and_multiplies_in_half():
    for name, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        precision, layer = Precision(name, "cpu"), nn.Linear(4, 4)
        precision.place(layer)
        with precision.forward_context():
            assert layer(torch.ones(2, 4)).dtype == dtype
        assert layer.weight.dtype == torch.float32
        assert layer(torch.ones(2, 4)).dtype == torch.float32
        assert precision.weights_dtype is None
        assert (precision.scaler is not None) == (name == "16-mixed")


def test_true_precision_converts_what_floats_and_nothing_else():
    precision = Precision("bf16-true", "cpu")
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = model[0].weight
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    precision.place(model)
    assert model[0].weight is weight
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16, torch.int64, torch.complex64}

    image, label = torch.ones(2, 2), torch.ones(2, dtype=torch.int64)
    batch = {
        "pair": Pair(image, label),
        "item": Item(image, label),
        "more": [image, (label, None, "word")],
        "phase": torch.ones(1, dtype=torch.complex64),
    }
    converted = precision.convert_batch(batch)
    assert type(converted["pair"]) is Pair
    assert type(converted["item"]) is Item
    assert converted["item"].note == "kept"
    floating = [converted["pair"].image, converted["item"].image, converted["more"][0]]
    assert {tensor.dtype for tensor in floating} == {torch.bfloat16}
    assert converted["pair"].label is label
    assert converted["item"].label is label
    assert converted["more"][1] == (label, None, "word")
    assert converted["phase"].dtype == torch.complex64
    assert batch["pair"].image is image


def test_true_precision_makes_new_tensors_in_its_type_and_puts_the_default_back_after_an_error():
    for name, dtype in (("64-true", torch.float64), ("bf16-true", torch.bfloat16), ("16-true", torch.float16)):
        precision = Precision(name, "cpu")
        with precision.forward_context():
            assert torch.zeros(1).dtype == dtype
        with pytest.raises(KeyError), precision.forward_context():
            raise KeyError
        assert torch.zeros(1).dtype == torch.float32


def test_32_adds_nothing():
    precision, batch = Precision(32, "cpu"), [torch.ones(1, dtype=torch.float64)]
    loss = torch.ones((), requires_grad=True)
    assert precision.convert_batch(batch) is batch
    assert precision.scale(loss) is loss
    assert precision.forward_context is nullcontext  # by which strategies know that there is nothing to enter

    def enter():
        with precision.forward_context():
            pass

    fastest = min(timeit.repeat(enter, number=2000, repeat=20)) / 2000
    assert fastest < 2e-6  # 0.2 us on a quiet machine; the bound leaves room for a busy one


def test_an_infinite_gradient_skips_the_step_and_halves_the_scale():
    precision, model = Precision("16-mixed", "cpu"), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    image, label = make_batches(1)[0]

    def step(factor):
        optimizer.zero_grad()
        with precision.forward_context():
            loss = nn.functional.cross_entropy(model(image), label) * factor
        precision.scale(loss).backward()
        precision.unscale(optimizer)
        precision.step(optimizer)
        precision.update()

    step(1.0)
    scale, before = precision.scaler.get_scale(), [parameter.clone() for parameter in model.parameters()]
    step(float("inf"))
    assert precision.scaler.get_scale() == scale / 2
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    step(1.0)
    assert not torch.equal(before[0], next(model.parameters()))


def test_the_scalers_state_goes_round():
    batches = make_batches(6)

    def run(break_after):
        precision, model = Precision("16-mixed", "cpu"), make_model()
        precision.scaler.set_growth_interval(2)
        for index, batch in enumerate(batches):
            if index == break_after:
                state = precision.state_dict()
                assert all(type(value) in (int, float) for value in state.values())
                precision = Precision("16-mixed", "cpu")
                precision.load_state_dict(state)
            train_with(precision, model, [batch])
        return precision.state_dict(), model.state_dict()

    (straight, weights), (resumed, resumed_weights) = run(None), run(3)
    assert resumed == straight
    assert straight["scale"] != 65536
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)


def test_a_run_may_go_on_in_another_precision():
    assert Precision(32, "cpu").state_dict() == {}
    Precision(32, "cpu").load_state_dict(Precision("16-mixed", "cpu").state_dict())
    fresh = Precision("16-mixed", "cpu")
    fresh.load_state_dict({})
    assert fresh.scaler.get_scale() == 65536


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true"])
def test_every_precision_trains_on_a_gpu(name):
    precision, model = Precision(name, "cuda"), make_model().cuda()
    batches = [(image.cuda(), label.cuda()) for image, label in make_batches(20)]
    losses = train_with(precision, model, batches * 3)
    assert losses[-1] < losses[0]


def test_a_forward_under_no_grad_leaves_the_weights_of_the_next_one_trained():
    layer, batch = nn.Linear(4, 1), torch.ones(2, 4)
    with Precision("bf16-mixed", "cpu").forward_context():
        with torch.no_grad():
            layer(batch)  # until torch 2.11 autocast keeps what this has cast
        layer(batch).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0] * 4]


def test_weights_are_cast_anew_once_an_optimizer_may_step_within_a_step():
    layer, batch = nn.Linear(4, 1), torch.ones(2, 4)
    precision = Precision("bf16-mixed", "cpu")
    precision.cast_anew()
    for context in (precision.forward_context, precision.forward_context):
        with context():
            before = layer(batch)
            with torch.no_grad():
                layer.weight.mul_(2)
                layer.bias.mul_(2)
            assert torch.equal(layer(batch), before * 2)
        assert torch.is_autocast_cache_enabled()
