"""The JSON schema of a config accepts what Legato accepts, and refuses the usual mistakes."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from config_folder import write

import legato
from legato.base.arguments import ARGUMENT_NAMES
from legato.cli.config.read import SECTIONS, parse_yaml
from legato.cli.config.schema import config_schema
from legato.cli.config.signatures import documented_arguments
from legato.cli.main import main

pytestmark = pytest.mark.usefixtures("config_folder")
SCHEMA = config_schema()
REPOSITORY = Path(legato.__file__).resolve().parent
SHIPPED = [*(REPOSITORY / "configs").glob("*.yaml"), *(REPOSITORY / "examples").rglob("*.yaml")]

RIGHT = [
    "extends: base.yaml",
    "trainer: {max_epochs: 3, devices: [0, 1], precision: bf16-mixed, strategy: ddp, max_time: 00:01:00:00}",
    "trainer: {strategy: {name: ddp, find_unused_parameters: true}, max_epochs: null, limit_train_batches: 0.5}",
    "trainer: {strategy: {_target_: my.Strategy, depth: 3}, seed: 3}",
    "seed: '${env:SEED,3}'\nvars: {a: 1}\nresume: auto\ncheckpoint: runs/x\nrun: {name: 'lr${task.lr}', root: there}",
    "task: {_target_: my.own.Task, anything: [1, {a: b}]}\ndata: null",
    "task: {lr: 1}",
    "callbacks: {checkpoint: {monitor: x}, other: {_target_: legato.callbacks.EarlyStopping, monitor: x}, no: null}",
    "callbacks: {c: {_target_: legato.callbacks.Checkpoint, save_top_k: '${vars.k}', train_time_interval: 1.5}}",
    "loggers: {tensorboard: {_target_: legato.loggers.TensorBoardLogger, flush_secs: 3}}\nlauncher: slurm",
    "launcher: {name: slurm, time: '10:00', options: {constraint: a100}}",
]
WRONG = {
    "trainr: {}": "trainr",
    "trainer: {max_epohcs: 3}": "max_epohcs",
    "trainer: {max_epochs: ten}": "ten",
    "trainer: {max_epochs: -5}": "-5",
    "trainer: {precision: bf17}": "bf17",
    "trainer: {strategy: dpp}": "dpp",
    "trainer: {strategy: {name: ddp, find_unused: true}}": "find_unused",
    "trainer: {callbacks: []}": "callbacks",
    "seed: -1": "-1",
    "resume: true": "True",
    "callbacks: [x]": "'x'",
    "callbacks: {c: {_target_: Checkpoint}}": "Checkpoint",
    "callbacks: {c: {_target_: legato.callbacks.Checkpoint, montor: x}}": "montor",
    "callbacks: {c: {_target_: legato.callbacks.Checkpoint, mode: mx}}": "mx",
    "task: {_target_: legato.tasks.digits.Digits, lr: fast}": "fast",
    "run: {nmae: x}": "nmae",
    "launcher: {name: slurm, tim: 3}": "tim",
}


def faults(text: str, schema: Any = SCHEMA) -> list[str]:
    """Return what a validator says of a config, all inner errors included."""
    said = []

    def collect(error: Any) -> None:
        said.append(error.message)
        for inner in error.context or ():
            collect(inner)

    for error in jsonschema.Draft7Validator(schema).iter_errors(parse_yaml(text, "x.yaml").values):
        collect(error)
    return said


def test_it_is_a_schema_and_has_every_key_with_its_meaning() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {"extends", *SECTIONS}
    trainer = SCHEMA["properties"]["trainer"]["anyOf"][0]["properties"]
    assert set(trainer) == set(ARGUMENT_NAMES) - {"callbacks", "logger"}
    assert all(one["description"] for one in trainer.values())
    assert trainer["max_steps"]["default"] == -1
    rules = SCHEMA["properties"]["callbacks"]["anyOf"][0]["additionalProperties"]["anyOf"][0]["allOf"]
    stopping = next(
        one["then"] for one in rules if "legato.callbacks.EarlyStopping" in one["if"]["properties"]["_target_"]["enum"]
    )
    assert stopping["properties"]["min_delta"]["description"] == "smallest change that counts as an improvement."


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize("text", RIGHT)
def test_right_ones_are_valid(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize("text", WRONG)
def test_wrong_ones_are_not(text: str) -> None:
    assert any(WRONG[text] in one for one in faults(text))


def test_the_command_adds_the_classes_that_a_config_names(capsys: pytest.CaptureFixture[str]) -> None:
    write("mine.yaml", "# yaml-language-server: $schema=legato.schema.json\nextends: base.yaml\n")
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["schema", "mine.yaml"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert faults("task: {_target_: models.Tiny, width: 3, sizes: [1, 2]}", schema) == []
    assert "'wide' is not of type 'integer'" in faults("task: {_target_: models.Tiny, width: wide}", schema)
    assert faults("task: {_target_: models.Tiny, width: wide}") == []


def test_arguments_are_read_out_of_a_docstring() -> None:
    text = "One.\n\nArgs:\n    a: first\n        and more.\n    b, c: second.\n\nMore: no.\n"
    assert documented_arguments(text) == {"a": "first and more.", "b": "second.", "c": "second."}
