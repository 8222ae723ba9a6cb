"""A checkpoint returns the values that were saved, or refuses them with their paths."""

import argparse
import enum
import json
import random
import shutil
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import codec, commit, reading
from legato.trainer.checkpoints.hashed import HashedFile
from legato.trainer.checkpoints.tensors import read_tensors, write_tensors


def same(first: object, second: object) -> bool:
    """Return whether two nested values are equal in type and, bit for bit, in value."""
    if isinstance(first, dict):  # Counter too
        return (
            isinstance(second, dict)
            and list(first) == list(second)
            and [type(key) for key in first] == [type(key) for key in second]
            and all(same(first[key], second[key]) for key in first)
        )
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        assert isinstance(second, torch.Tensor)
        alike = first.dtype == second.dtype and first.shape == second.shape
        return alike and bits(first) == bits(second)
    if isinstance(first, (np.ndarray, np.generic)):
        assert isinstance(second, (np.ndarray, np.generic))
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, (list, tuple)):
        assert isinstance(second, (list, tuple))
        return len(first) == len(second) and all(map(same, first, second))
    return repr(first) == repr(second) if isinstance(first, (float, complex)) else first == second


def bits(tensor: torch.Tensor) -> bytes:
    alone = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # with strides of its own
    return bytes(alone.flatten().view(torch.uint8).tolist())


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.sampled_from([torch.float16, torch.bool, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])]),
    st.builds(timedelta, seconds=st.integers(-(10**9), 10**9)),
    st.sampled_from([Path("a/b"), Path("/c")]),
    st.builds(Counter, st.text("abc", max_size=4)),
)
dtypes = st.sampled_from(
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.bool),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    ]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    made = made.to(draw(dtypes))
    changes = st.sampled_from(["none", "transposed", "expanded", "parameter", "every second"])
    match draw(changes):
        case "transposed" if made.ndim > 1:
            return made.transpose(0, -1)
        case "every second" if made.ndim:
            return made[::2]
        case "expanded":
            return made.expand(2, *made.shape)
        case "parameter" if made.is_floating_point() or made.is_complex():
            return made.requires_grad_()
    return made


arrays = st.builds(
    lambda kind, shape: (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(kind),
    st.sampled_from(["f4", "f8", "f2", "c8", "c16", "i1", "u2", "u8", "i8", "?", ">f4"]),
    st.lists(st.integers(0, 3), max_size=2),
)
scalars = st.sampled_from([np.float32(0.1), np.float64(0.1), np.int64(7), np.uint32(7), np.bool_(True)])
hashable = st.one_of(
    st.text(max_size=6), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=2))
)
keys = st.one_of(hashable, st.sampled_from([codec.MARK, "value", "a.b", "a", "b", "__metadata__", "state_dict"]))
values = st.recursive(
    st.one_of(plain, tensors(), arrays, scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
    ),
    max_leaves=12,
)


names = st.one_of(st.sampled_from(["state_dict", codec.MARK]), st.text(max_size=5))


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(contents=st.dictionaries(names, values, max_size=3))
def test_whatever_is_taken_apart_is_put_together(contents: dict[str, object]) -> None:
    flat = codec.flatten(contents)
    state = json.loads(json.dumps(flat.tree, allow_nan=False))
    assert same(codec.unflatten(state, flat.tensors), native_order(contents))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(contents=st.dictionaries(names, values, max_size=3))
def test_whatever_goes_in_comes_out(contents: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("value")
    commit.write(folder / "one", contents)
    assert same(reading.read_checkpoint(folder / "one"), native_order(contents))
    shutil.rmtree(folder)


def native_order(value: object) -> object:
    """Return the value with its arrays in this machine's byte order, in which they are stored."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    if type(value) in (list, tuple):
        return type(value)(map(native_order, value))  # type: ignore[call-overload, operator]
    if type(value) is dict:
        return {key: native_order(item) for key, item in value.items()}
    return value


def test_real_training_state_survives(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    contents = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).state_dict(),
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
    }
    commit.write(tmp_path / "one", contents)
    back = reading.read_checkpoint(tmp_path / "one")
    assert all(torch.equal(back["state_dict"][name], value) for name, value in model.state_dict().items())
    optimizer.load_state_dict(back["optimizer"])
    for scheduler, state in zip(schedulers, back["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    assert schedulers[0].milestones == Counter({2: 2, 5: 1})
    assert back["plateau"]["best"] == float("inf")
    random.setstate(back["rng"]["python"])
    np.random.set_state(back["rng"]["numpy"])
    torch.set_rng_state(back["rng"]["torch"])
    with safetensors.safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:  # anybody's reader
        assert set(file.keys()) == set(model.state_dict())
        assert file.metadata() == {"format": "pt"}


def test_library_reads_every_tensor_and_aligned(tmp_path: Path) -> None:
    made = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "halves": torch.ones(3).bfloat16(),
        'é"\\\n': torch.ones(2, 2).t(),
    }
    write_tensors(
        HashedFile(tmp_path / "file.safetensors"), {**made, "empty": torch.empty(0, 2), "one": torch.tensor(2.0)}
    )
    library = safetensors.torch.load_file(tmp_path / "file.safetensors")
    assert same({name: library[name] for name in made}, {name: value.contiguous() for name, value in made.items()})
    assert library["empty"].shape == (0, 2)
    assert library["one"].item() == 2
    mapped = read_tensors(tmp_path / "file.safetensors")
    (tmp_path / "file.safetensors").write_bytes(b"")  # what was read does not depend on the file
    assert same({name: mapped[name] for name in made}, {name: value.contiguous() for name, value in made.items()})
    assert all(tensor.data_ptr() % 16 == 0 for tensor in mapped.values())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, r"callbacks\.Mine\.thing is a function, but a checkpoint stores JSON values and tensors"),
        (object(), r"callbacks\.Mine\.thing is an object"),
        (nn.Linear(1, 1), r"callbacks\.Mine\.thing is a Linear"),
        (argparse.Namespace(a=1), r"callbacks\.Mine\.thing is a Namespace"),
        (np.array([object()]), r"callbacks\.Mine\.thing is a numpy object"),
        (np.array(["a"]), r"callbacks\.Mine\.thing is a numpy <U1"),
        (torch.ones(2, 2).to_sparse(), r"callbacks\.Mine\.thing is a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), r"callbacks\.Mine\.thing is a meta tensor"),
        ({torch.ones(1): 1}, r"callbacks\.Mine\.thing\.a key is a Tensor"),
        ({object(): 1}, r"callbacks\.Mine\.thing\.a key is an object"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        commit.write(tmp_path / "one", {"callbacks": {"Mine": {"thing": value}}})
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="Does it contain itself"):
        commit.write(tmp_path / "one", {"a": endless})


class Scaled(torch.Tensor):
    """Integers with a scale, as in a quantized weight."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: object) -> "Scaled":
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale, made.settings = codes, scale, settings
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], self.settings

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict, settings: object, size: torch.Size, stride: tuple) -> "Scaled":
        return cls(tensors["codes"], tensors["scale"], settings)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError


class Step(enum.IntEnum):
    ONE = 1


def test_a_tensor_that_is_made_of_others_is_stored_as_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtype": torch.int8, "sizes": [1, (2, None)]}
    weight = Scaled(torch.arange(6, dtype=torch.int8).view(2, 3), torch.rand(2), options)
    commit.write(tmp_path / "one", {"state_dict": {"w": weight}})
    back = reading.read_checkpoint(tmp_path / "one")["state_dict"]["w"]
    assert type(back) is Scaled
    assert back.settings == options
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale, weight.scale)
    assert read_tensors(tmp_path / "one" / "model.safetensors").keys() == {"w.codes", "w.scale"}
    # a program that has not imported the class reads what it is made of, and imports nothing
    monkeypatch.delitem(globals(), "Scaled")
    back = reading.read_checkpoint(tmp_path / "one")["state_dict"]["w"]
    assert torch.equal(back["codes"], weight.codes)


@pytest.mark.parametrize("options", [Step.ONE, {"step": [Step.ONE]}, object()])
def test_a_tensor_whose_settings_would_come_back_as_others_is_refused(tmp_path: Path, options: object) -> None:
    weight = Scaled(torch.zeros(2, 3, dtype=torch.int8), torch.rand(2), options)
    with pytest.raises(CheckpointError, match=r"state_dict\.w is a .*Scaled, whose __tensor_flatten__ does"):
        commit.write(tmp_path / "one", {"state_dict": {"w": weight}})
