"""Batches that are split over devices, and combined outputs."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.base.errors import TaskError
from legato.trainer.strategies.pieces import chunk_sizes, combine, split

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


@dataclass
class Item:
    image: torch.Tensor
    names: list


def test_sizes_are_those_of_torch_chunk():
    for samples in range(1, 30):
        for devices in range(1, 9):
            assert chunk_sizes(samples, devices) == [len(chunk) for chunk in torch.arange(samples).chunk(devices)]


def test_every_kind_of_batch_is_split():
    image, label = torch.arange(10).reshape(5, 2), torch.arange(5)
    batch = {
        "image": image,
        "pair": Pair(image, label),
        "nested": [label, (image, "word")],
        "item": Item(image, list("abcde")),
        "array": np.arange(5),
        "names": tuple("abcde"),
        "scale": torch.tensor(2.0),
        "shared": torch.ones(3, 4),
        "number": 7,
        "nothing": None,
        "empty": [],
    }
    first, second = split(batch, [3, 2], [CPU, CPU])
    for piece, rows in ((first, slice(0, 3)), (second, slice(3, 5))):
        assert torch.equal(piece["image"], image[rows])
        assert type(piece["pair"]) is Pair
        assert torch.equal(piece["pair"].label, label[rows])
        assert torch.equal(piece["nested"][0], label[rows])
        assert torch.equal(piece["nested"][1][0], image[rows])
        assert piece["nested"][1][1] == "word"
        assert type(piece["item"]) is Item
        assert piece["item"].names == list("abcde")[rows]
        assert piece["array"].tolist() == label[rows].tolist()
        assert piece["names"] == tuple("abcde")[rows]
        assert piece["scale"] == 2.0
        assert piece["shared"].shape == (3, 4)
        assert (piece["number"], piece["nothing"], piece["empty"]) == (7, None, [])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 20),
    devices=st.integers(1, 6),
    shape=st.recursive(
        st.sampled_from(["tensor", "wide", "word", "names"]),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(), inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    ),
)
def test_combine_inverts_split(samples, devices, shape):
    def build(shape):
        if isinstance(shape, list):
            return [torch.zeros(samples), *map(build, shape)]
        if isinstance(shape, dict):
            return {key: build(value) for key, value in shape.items()}
        leaves = {"wide": torch.randn(samples, 2), "word": "word", "names": [str(i) for i in range(samples)]}
        return leaves.get(shape, torch.arange(samples))

    def same(left, right):
        if isinstance(left, torch.Tensor):
            return torch.equal(left, right)
        if isinstance(left, dict):
            return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        if isinstance(left, list):
            return len(left) == len(right) and all(map(same, left, right))
        return left == right

    batch = [torch.arange(samples), build(shape)]
    sizes = chunk_sizes(samples, devices)
    assert same(combine(split(batch, sizes, [CPU] * len(sizes)), sizes, CPU), batch)


def test_outputs_that_differ_are_refused():
    for outputs, difference in (([1.0, "a"], "types"), ([{"a": 1.0}, {"b": 1.0}], "keys")):
        with pytest.raises(TaskError, match=f"outputs with different {difference}"):
            combine(outputs, [1, 1], CPU)
    with pytest.raises(TaskError, match="outputs with different lengths"):
        combine([[torch.ones(1)], [torch.ones(1)] * 2], [1, 1], CPU)


def test_scalars_are_averaged_by_samples_counts_added_and_the_rest_kept():
    first = {"mean": torch.tensor(1.0), "float": 1.0, "count": 2, "hits": torch.tensor(1), "same": "x", "other": "a"}
    second = {"mean": torch.tensor(4.0), "float": 4.0, "count": 1, "hits": torch.tensor(1), "same": "x", "other": "b"}
    combined = combine([first, second], [2, 1], CPU)
    assert combined.pop("mean") == pytest.approx(2.0)
    assert combined == {"float": pytest.approx(2.0), "count": 3, "hits": 2, "same": "x", "other": ["a", "b"]}
    item = combine([Item(torch.ones(2), ["a", "b"]), Item(torch.ones(1), ["c"])], [2, 1], CPU)
    assert item.names == ["a", "b", "c"]
    assert combine([np.arange(2), np.arange(1)], [2, 1], CPU).tolist() == [0, 1, 0]
