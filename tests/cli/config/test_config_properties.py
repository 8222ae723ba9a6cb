"""Any input makes a Config or a ConfigError, and values that are written are read back unchanged."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_folder import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legato.base.errors import ConfigError
from legato.cli.config import check, read
from legato.cli.config.read import Layer, dump_yaml, parse_yaml

pytestmark = pytest.mark.usefixtures("config_folder")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAMES = """
task data trainer callbacks loggers seed run name root resume extends _target_ models.Tiny models.Note models.Needy
models.Data legato.Callback legato.nothing.X os.system torch.nn.ReLU numpy.ndarray width text lr head max_epochs
max_time strategy ddp devices compile auto ${seed} ${trainer.max_epochs} ${ \\${x} ??? .. a.b off 1e3 ~
"""
words = st.sampled_from([*NAMES.split(), ""])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text | words
keys = words | text | st.integers() | st.booleans() | st.floats(allow_nan=False)


def grown(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=15
    )


plain = grown(scalars)
task = st.fixed_dictionaries(
    {"_target_": st.just("models.Tiny"), "width": st.integers()},
    optional={
        "lr": st.floats(),
        "label": text,
        "sizes": st.lists(st.integers()),
        "free": grown(text | st.integers()),
    },
)
nearly = st.fixed_dictionaries(
    {"task": task},
    optional={
        "seed": st.integers(-2, 5),
        "resume": text,
        "run": st.dictionaries(words, text, max_size=2),
        "trainer": st.dictionaries(words, plain, max_size=3),
        "callbacks": st.dictionaries(keys, st.dictionaries(words, plain, max_size=3), max_size=2),
    },
)
parts = ["trainer: ", "_target_: ", "extends: ", "max_epochs", "\n  ", *"ab:-[]{}#&*!|>'\"%@`,?. \n\t01e~${}=\\"]
yaml_like = st.lists(st.sampled_from(parts), max_size=40).map("".join)
bounded = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


def attempt(action: Callable[[], check.Config]) -> check.Config | None:
    """Any input makes a config or a ConfigError, which is short."""
    try:
        return action()
    except ConfigError as error:
        message = str(error)
    assert 1 <= len(message.splitlines()) <= 6
    return None


@pytest.mark.slow
@bounded
@given(nearly | st.dictionaries(keys, plain, max_size=5))
def test_any_values_make_a_config_or_a_config_error(values: dict[Any, Any]) -> None:
    result = attempt(lambda: check.check_config(Layer(values, {(): "file:1"})))
    if result is not None:
        Path("again.yaml").write_text(result.text(), newline="")
        assert repr(check.load_config(["again.yaml"]).values) == repr(result.values)


@pytest.mark.slow
@bounded
@given(
    yaml_like | st.text(max_size=30) | st.binary(max_size=30),
    st.lists(yaml_like.map("task.a=".__add__) | text, max_size=2),
)
def test_any_file_and_override_make_a_config_or_a_config_error(content: str | bytes, overrides: list[str]) -> None:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    Path("any.yaml").write_bytes(data)
    attempt(lambda: check.load_config(["base.yaml", "any.yaml", *overrides]))
    attempt(lambda: check.load_config(["any.yaml"]))


@pytest.mark.slow
@bounded
@given(st.dictionaries(text | words, plain, max_size=5))
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    Path("data.yaml").write_text(dump_yaml(values), newline="")
    assert repr(parse_yaml(Path("data.yaml").read_bytes().decode(), "data.yaml").values or {}) == repr(values)


@pytest.mark.slow
@bounded
@given(st.dictionaries(text, plain, max_size=5))
def test_what_is_escaped_is_no_interpolation(values: dict[str, Any]) -> None:
    values.pop("extends", None)
    Path("data.yaml").write_text(dump_yaml(read.escape(values)), newline="")
    assert repr(read.read_config(["data.yaml"]).values) == repr(values)


@pytest.mark.slow
@pytest.mark.parametrize("bomb", ["aliases", "interpolations", "brackets"])
def test_small_files_cannot_stand_for_large_data(bomb: str) -> None:
    names = "abcdefghijkl"
    lines = ["task:", f"  {names[0]}: {'&a ' if bomb == 'aliases' else ''}[x, x, x, x, x, x, x, x, x, x]"]
    for above, name in itertools.pairwise(names):
        item = f"*{above}" if bomb == "aliases" else f"'${{task.{above}}}'"
        lines.append(f"  {name}: {f'&{name} ' if bomb == 'aliases' else ''}[{', '.join([item] * 10)}]")
    write("bomb.yaml", "\n".join(lines) if bomb != "brackets" else "a: " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"more than 100000 values|recursion depth"):
        check.load_config(["bomb.yaml"])


@given(st.floats(allow_nan=False))
@settings(deadline=None, max_examples=100)
def test_numbers_keep_their_value(number: float) -> None:
    value = parse_yaml(dump_yaml({"a": number}), "x").values["a"]
    assert isinstance(value, float)
    assert value == number
    assert math.copysign(1, value) == math.copysign(1, number)
