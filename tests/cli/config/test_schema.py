"""The schema of a config for editors: made from the signatures, and true of the configs that Legato ships."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import legato as lg

TOP = Path(lg.__file__).resolve().parent
SCHEMA = json.loads((TOP / "configs" / "legato.schema.json").read_text())
SHIPPED = [*sorted((TOP / "configs").glob("*.yaml")), *sorted((TOP / "examples").glob("*.yaml"))]


def mistakes(config):
    errors = jsonschema.Draft202012Validator(SCHEMA).iter_errors(config)
    return {".".join(map(str, error.absolute_path)): error.message for error in errors}


def test_the_file_is_what_the_signatures_say(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOP / "docs"), *sys.path])
    import make_schema

    assert make_schema.make_schema() == SCHEMA, "run: python docs/make_schema.py"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_it_accepts_the_shipped_configs(path):
    assert mistakes(yaml.safe_load(path.read_text())) == {}


def test_it_accepts_references_null_and_classes_of_others():
    config = {
        "task": {"_target_": "mine.Model", "width": 3},
        "callbacks": {
            "checkpoint": {"_target_": "legato.callbacks.Checkpoint", "monitor": "${vars.metric}"},
            "early_stopping": None,
        },
        "trainer": {
            "max_epochs": "${vars.epochs}",
            "devices": [0, 1],
            "strategy": {"name": "ddp"},
            "max_time": "00:01:00:00",
        },
    }
    assert mistakes(config) == {}


@pytest.mark.parametrize(
    ("config", "place", "words"),
    [
        ({"trainer": {"max_epohcs": 3}}, "trainer", "max_epohcs"),
        ({"trainer": {"max_steps": "ten"}}, "trainer.max_steps", "ten"),
        ({"trainer": {"limit_val_batches": 2.5}}, "trainer.limit_val_batches", "2.5"),
        ({"callbacks": {"top": {"_target_": "legato.callbacks.Checkpoint", "montor": "a"}}}, "callbacks.top", "montor"),
        ({"data": {"_target_": "legato.tasks.digits.DigitsData", "batchsize": 3}}, "data", "batchsize"),
        ({"trainr": {}}, "", "trainr"),
    ],
)  # fmt: skip
def test_it_refuses_misspelt_keys_and_wrong_types(config, place, words):
    messages = mistakes(config)
    assert list(messages) == [place]
    assert words in messages[place]
