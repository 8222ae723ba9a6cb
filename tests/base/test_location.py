"""A place is a path of this machine or the address of a store, and both are walked alike."""

import pickle
from pathlib import Path

import pytest

from legato.base.errors import ConfigError
from legato.base.location import Address, to_absolute, to_location


def test_an_address_keeps_its_slashes():
    address = to_location("s3://bucket/run/checkpoints/")
    assert address == "s3://bucket/run/checkpoints"
    assert address / "step-00000001" == "s3://bucket/run/checkpoints/step-00000001"
    assert (address / "step-00000001").parent == address
    assert address.name == "checkpoints"
    assert address.parents == ["s3://bucket/run", "s3://bucket", "s3://"]
    assert address.parents[-1] / "bucket" == "s3://bucket"
    assert to_absolute(address) == to_location(Path("s3://bucket/run/checkpoints")) == address
    assert type(pickle.loads(pickle.dumps(address))) is Address


@pytest.mark.parametrize("text", ["runs/x", "/runs/x", "C:/runs", "a:b"])
def test_anything_else_is_a_path(text):
    assert to_location(text) == Path(text)
    assert to_absolute(text) == Path(text).absolute()


def test_an_address_of_this_machine_is_refused():
    with pytest.raises(ConfigError, match="Write it as a path: '/runs/x'"):
        to_location("file:///runs/x")
