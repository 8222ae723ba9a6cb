"""Damaged and hostile files: each raises CheckpointError or is read correctly."""

import hashlib
import json
import logging
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.base.errors import CheckpointError
from legato.trainer.checkpoints import codec, commit, find, foreign, manifest, reading
from legato.trainer.checkpoints.hashed import FileSum, file_sum
from legato.trainer.checkpoints.tensors import read_tensors

FILES = ("model.safetensors", "tensors.safetensors", "state.json", "manifest.json")


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two complete checkpoints in a folder, older first."""
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        contents = {"state_dict": {"w": torch.full((8, 8), float(step))}, "m": torch.ones(9), "at": (step, None)}
        commit.write(root / find.directory_name(step), contents)
    return root / "step-00000001", root / "step-00000002"


def reseal(directory: Path) -> None:
    """Rewrite the manifest to match the changed files, as an attacker would."""
    files = {name: file_sum(directory / name) for name in FILES[:3]}
    (directory / "manifest.json").write_bytes(manifest.dump_manifest(files))


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_every_cut_is_found(
    name: str, two: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = two
    file = newer / name
    original = file.read_bytes()
    offsets = range(len(original)) if name == "manifest.json" else {0, 7, 8, 20, len(original) // 2, len(original) - 1}
    damaged = [
        original[:place] + bytes([original[place] ^ 1 << bit]) + original[place + 1 :]
        for place in offsets
        for bit in (0, 3, 5, 7)
    ]
    lengths = (0, 1, 8, len(original) // 2, len(original) - 1)
    damaged += [*(original[:length] for length in lengths), original + b"\0", original * 2]
    for data in damaged:
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            find.verify(newer)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        reading.read_checkpoint(newer)
    with caplog.at_level(logging.WARNING, logger="legato"):
        assert find.newest_complete(newer.parent) == older
    assert "Skipping the incomplete checkpoint step-00000002" in caplog.text
    assert name in caplog.text


def test_what_is_no_file_of_its_own_is_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    _, newer = two
    for name in FILES:
        kept = tmp_path / name
        shutil.move(newer / name, kept)
        with pytest.raises(CheckpointError, match=rf"{name} is missing"):
            reading.read_checkpoint(newer)
        (newer / name).symlink_to(kept)
        with pytest.raises(CheckpointError, match=rf"{name} is a link"):
            reading.read_checkpoint(newer)
        (newer / name).unlink()
        os.mkfifo(newer / name)  # opening it would wait for ever
        with pytest.raises(CheckpointError, match=rf"{name} is not a regular file"):
            reading.read_checkpoint(newer)
        (newer / name).unlink()
        (newer / name).mkdir()
        with pytest.raises(CheckpointError, match=rf"{name} is not a regular file"):
            reading.read_checkpoint(newer)
        (newer / name).rmdir()
        shutil.move(kept, newer / name)
    find.verify(newer)


# ---------------------------------------------------------------------------------------------- hostile


def good_manifest() -> dict[str, object]:
    entry = FileSum(3, "ab" * 32)
    loaded = json.loads(manifest.dump_manifest(dict.fromkeys(FILES[:3], entry)))
    assert isinstance(loaded, dict)
    return loaded


def sealed(body: dict[str, object]) -> bytes:
    """Return the text of a manifest with a matching sum, as an attacker would write it."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "sha256": hashlib.sha256(text).hexdigest()}).encode()


OTHERS = "was not written by Legato"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(format=6), "this version of Legato reads formats up to"),
        (
            lambda body: body.update(format=2),
            "from an older Legato. The last commit that can read it is [0-9a-f]{7}",
        ),
        (lambda body: body.update(format=True), OTHERS),
        (lambda body: body.update(format=0), OTHERS),
        (lambda body: body.update(format=4.0), OTHERS),
        (lambda body: body.pop("legato"), OTHERS),
        (lambda body: body.update(pickle="yes"), OTHERS),
        (lambda body: body.update(legato=3), OTHERS),
        (lambda body: body.update(run=3), OTHERS),
        (lambda body: body.update(files=[]), OTHERS),
        (lambda body: body["files"].pop("state.json"), OTHERS),
        *(
            (lambda body, name=name: body["files"].update({name: {"size": 3, "sha256": "ab" * 32}}), OTHERS)
            for name in ("../../etc/passwd", "/etc/passwd", "a/b", "..", "", "a\n", "manifest.json")
        ),
        (lambda body: body["files"].update({"model-00001.safetensors": 3}), OTHERS),
        (lambda body: body["files"].update({"model-00001.safetensors": {"size": 3}}), OTHERS),
        (lambda body: body["files"]["state.json"].update(size=-1), OTHERS),
        (lambda body: body["files"]["state.json"].update(size=10**300), OTHERS),
        (lambda body: body["files"]["state.json"].update(size=3.0), OTHERS),
        (lambda body: body["files"]["state.json"].update(size=True), OTHERS),
        (lambda body: body["files"]["state.json"].update(sha256="AB" * 32), OTHERS),
    ],
)
def test_a_manifest_of_other_fields_is_refused(change: Callable[[dict[str, object]], object], words: str) -> None:
    body = good_manifest()
    manifest.parse_manifest(sealed(body))
    change(body)
    with pytest.raises(CheckpointError, match=words):
        manifest.parse_manifest(sealed(body))


def test_a_manifest_with_another_run_size_or_version_is_damaged() -> None:
    for change in ({"run": "another"}, {"legato": "1.0"}, {"files": {}}):
        with pytest.raises(CheckpointError, match="does not match its SHA-256"):
            manifest.parse_manifest(json.dumps({**good_manifest(), **change}).encode())


HOSTILE_JSON = [
    b"", b"\xff\xfe", b"nul", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"NaN", b"[Infinity]", b"-Infinity",
    b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b'"\\ud800', b"1e", b"{}{}", b"\0",
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE_JSON)
def test_hostile_json_is_refused(data: bytes, two: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        manifest.parse_manifest(data)
    _, newer = two
    (newer / "state.json").write_bytes(data)
    reseal(newer)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        reading.read_checkpoint(newer)


def test_deep_but_valid_json_is_refused() -> None:
    nested: object = 1
    for _ in range(3000):
        nested = {"a": [nested]}
    with pytest.raises(CheckpointError, match="too deeply"):
        codec.unflatten({"a": nested}, {})


MARKS: list[object] = [
    {"__legato__": "int", "value": "zz"}, {"__legato__": "int", "value": 3}, {"__legato__": "float", "value": "x"},
    {"__legato__": "no such", "value": 1}, {"__legato__": ["tuple"], "value": []}, {"__legato__": {}},
    {"__legato__": None},    {"__legato__": "tuple"},
    {"__legato__": "tuple", "value": {}, "more": 1}, {"__legato__": "tuple", "value": "abc"},
    {"__legato__": "bytes", "value": "%%"}, {"__legato__": "bytes", "value": "é"},
    {"__legato__": "complex", "value": ["1"]},
    {"__legato__": "set", "value": [[]]}, {"__legato__": "size", "value": ["a"]},
    {"__legato__": "size", "value": [True]},
    {"__legato__": "items", "value": [[1]]}, {"__legato__": "items", "value": [[1, 2], [1, 3]]},
    {"__legato__": "items", "value": [[[], 1]]}, {"__legato__": "items", "value": 5},
    {"__legato__": "counter", "value": [[1, 2, 3]]}, {"__legato__": "dtype", "value": "__class__"},
    {"__legato__": "dtype", "value": "_inductor"}, {"__legato__": "device", "value": "evil"},
    {"__legato__": "timedelta", "value": [10**30, 0, 0]}, {"__legato__": "timedelta", "value": [1]},
    {"__legato__": "path", "value": 3}, {"__legato__": "tensor", "file": "tensors", "name": "no such"},
    {"__legato__": "tensor", "file": "../x", "name": "w"}, {"__legato__": "tensor", "file": ["a"], "name": {}},
    {"__legato__": "tensor", "name": "w"}, {"__legato__": "tensor", "file": "model", "name": "w", "code": "x"},
    {"__legato__": "tensor", "file": "model", "name": "w", "dtype": "complex64", "shape": [10**20]},
    {"__legato__": "tensor", "file": "model", "name": "w", "dtype": "uint64", "shape": [-1, "a"]},
    {"__legato__": "tensor", "file": "model", "name": "w", "dtype": "uint64"},
    {"__legato__": "tensor", "file": "model", "name": "w", "dtype": "bits8", "shape": [1, 1, 1, 1, 1, 1]},
    {"__legato__": "scalar", "file": "model", "name": "w"},
]  # fmt: skip


@pytest.mark.parametrize("mark", MARKS, ids=str)
def test_hostile_marks_are_refused_with_their_place(mark: object) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json is damaged at outer\.1"):
        codec.unflatten({"outer": [0, mark]}, {"model": {"w": torch.ones(3)}, "tensors": {}})


def test_each_tensor_is_used_exactly_once() -> None:
    mark = {"__legato__": "tensor", "file": "model", "name": "w"}
    weights = {"model": {"w": torch.ones(3)}}
    assert torch.equal(codec.unflatten({"a": mark}, weights)["a"], torch.ones(3))
    with pytest.raises(CheckpointError, match="mentions it twice"):
        codec.unflatten({"a": mark, "b": mark}, weights)
    with pytest.raises(CheckpointError, match=r"model\.safetensors contains 'w', which state\.json does not mention"):
        codec.unflatten({}, weights)
    with pytest.raises(CheckpointError, match="must contain an object"):
        codec.unflatten([], {})


def lying(header: object, body: bytes = b"\0" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


LIES = [
    lying({"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 16]}}),
    lying({"w": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 16]}}),
    lying({"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}),
    lying({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 10**18]}}),
    lying({"w": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}),
    lying({"w": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}),
    lying({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"}),
    lying(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}'),
    lying(b"{" * 5000), lying([]), lying({}), b"", b"\xff" * 8, struct.pack("<Q", 2**63) + b"{}",
]  # fmt: skip


@pytest.mark.parametrize("data", LIES, ids=range(len(LIES)))
def test_a_tensor_header_that_lies_is_refused(data: bytes, two: tuple[Path, Path]) -> None:
    _, newer = two
    (newer / "model.safetensors").write_bytes(data)
    reseal(newer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        reading.read_checkpoint(newer)


# ---------------------------------------------------------------------------------------------- fuzz

SPLICES = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"-",
        b"1e999",
        b"null",
        b"true",
        b"NaN",
        b"\\u0000",
        b"\\ud800",
        b"\0",
    ),
    *(
        b"9" * 5000,
        b"[" * 2000,
        b'{"__legato__":"tuple","value":[]}',
        b'"__legato__":',
        b"../",
        b"-1",
        b"0.5",
        b'"tensor"',
    ),
]


def mutated(seed: bytes, generator: random.Random) -> bytes:
    """Return the seed after one to four small changes."""
    data = bytearray(seed)
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(data) + 1)
        end = min(len(data), place + generator.choice([0, 1, 1, 2, 8, 40]))
        match generator.randrange(4):
            case 0:
                data[place:end] = generator.choice(SPLICES)
            case 1:
                data[place:end] = bytes(generator.randrange(256) for _ in range(end - place))
            case 2:
                del data[place:end]
            case 3:
                position = generator.randrange(len(data) + 1)
                data[place:place] = data[position : position + generator.randint(1, 60)]
    return bytes(data)


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except CheckpointError:
        return "refused"
    return "works"


def test_fuzz_manifest() -> None:
    generator, seed = random.Random(0), json.dumps(good_manifest()).encode()
    outcomes = [outcome(lambda: manifest.parse_manifest(mutated(seed, generator))) for _ in range(6000)]
    assert outcomes.count("refused") > 5500


def test_fuzz_state() -> None:
    everything = {
        "state_dict": {
            "w": torch.ones(3),
            "z": torch.ones(2, dtype=torch.complex64),
            "u": torch.ones(2).to(torch.uint16),
        },
        "a": [1, 2.5, float("nan"), (None, True), {1: "x", (2, "y"): b"z"}, {3, 4}, torch.Size([1]), torch.float16],
        "b": {"__legato__": 5, "device": torch.device("cpu"), "path": Path("p"), "big": 2**100, "c": 1 + 2j},
    }
    flat, generator = codec.flatten(everything), random.Random(1)
    seed = json.dumps(flat.tree).encode()
    codec.unflatten(manifest.parse_json(seed, "state.json"), flat.tensors)
    outcomes = [
        outcome(lambda: codec.unflatten(manifest.parse_json(mutated(seed, generator), "state.json"), flat.tensors))
        for _ in range(6000)
    ]
    assert outcomes.count("refused") > 3000
    assert outcomes.count("works") > 10


@pytest.mark.slow
def test_fuzz_tensor_files(tmp_path: Path) -> None:
    generator, path = random.Random(2), tmp_path / "file.safetensors"
    seed = safetensors.torch.save({"w": torch.ones(3), "b": torch.ones(2, 2).bool()})
    for _ in range(1500):
        path.write_bytes(mutated(seed, generator))
        outcome(lambda: read_tensors(path))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(sorted(codec.KINDS)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([codec.MARK, "value", "file", "name", "size", "sha256", "files"]), inner, max_size=4
        )
        | st.builds(lambda kind, value: {codec.MARK: kind, "value": value}, st.sampled_from(sorted(codec.KINDS)), inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(value=json_values)
def test_any_json_value_is_read_or_refused(value: object) -> None:
    outcome(lambda: codec.unflatten({"a": value}, {}))
    outcome(lambda: manifest.parse_manifest(json.dumps(value).encode()))


@pytest.mark.slow
def test_fuzz_foreign_files(tmp_path: Path) -> None:
    generator, path = random.Random(3), tmp_path / "file.pt"
    for old in (False, True):
        torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=not old)
        seed = path.read_bytes()
        for _ in range(300):
            path.write_bytes(mutated(seed, generator))
            outcome(lambda: foreign.read_contents(path))
