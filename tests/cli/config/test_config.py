"""Config: layers, interpolation, origins, the stored text, and building."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from config_folder import write

from legato.base.arguments import ARGUMENT_NAMES, argument_texts, documented_arguments
from legato.base.errors import ConfigError
from legato.cli.config import build, check

pytestmark = pytest.mark.usefixtures("config_folder")


# --- layers -------------------------------------------------------------------------------------------------------
def test_files_merge_left_to_right_and_overrides_win() -> None:
    write("more.yaml", "trainer: {max_epochs: 4, devices: [0, 1]}\ntask: {lr: 1e-2}\n")
    write("last.yaml", "trainer: {devices: [2]}\n")
    config = check.load_config(["base.yaml", "more.yaml", "last.yaml", "task.lr=0.5", "callbacks.note.times=2"])
    assert config.values["trainer"]["max_epochs"] == 4
    assert config.values["trainer"]["devices"] == [2]
    assert config.values["task"]["lr"] == 0.5
    assert config.values["task"]["width"] == 8
    assert config.values["callbacks"]["note"] == {"_target_": "models.Note", "text": "hello", "times": 2}


def test_extends_is_relative_to_the_file_that_names_it(config_folder: Path) -> None:
    (config_folder / "deep" / "er").mkdir(parents=True)
    write("deep/middle.yaml", "extends: ../base.yaml\ntask: {width: 9}\n")
    write("deep/er/top.yaml", "extends: [../middle.yaml, ../../base.yaml]\nseed: 5\n")
    config = check.load_config(["deep/er/top.yaml"])
    assert (config.values["task"]["width"], config.values["seed"]) == (8, 5)
    assert config.origin(("task", "width")) == "base.yaml:3"


def test_a_circle_of_extends_is_refused() -> None:
    write("a.yaml", "extends: [b.yaml]\n")
    write("b.yaml", "extends: [a.yaml]\n")
    with pytest.raises(ConfigError, match=r"a\.yaml extends itself: a\.yaml -> b\.yaml -> a\.yaml"):
        check.load_config(["a.yaml"])


def test_another_target_drops_the_arguments_of_the_old_one() -> None:
    write(
        "more.yaml", "callbacks: {note: {_target_: legato.callbacks.Checkpoint}}\ntrainer: {strategy: {name: single}}\n"
    )
    config = check.load_config(["base.yaml", "more.yaml", "task.depth=5", "task._target_=models.Base"])
    assert "text" not in config.values["callbacks"]["note"]
    assert config.values["trainer"]["strategy"] == {"name": "single"}
    assert config.values["task"] == {"_target_": "models.Base", "depth": 5, "mode": "fast"}


def test_options_may_be_added_to_a_strategy_given_by_name() -> None:
    config = check.load_config(["base.yaml", "trainer.strategy=ddp"])
    assert config.values["trainer"]["strategy"] == "ddp"
    write("more.yaml", "trainer: {strategy: ddp}\n")
    config = check.load_config(["base.yaml", "more.yaml", "trainer.strategy.gradient_as_bucket_view=true"])
    assert config.values["trainer"]["strategy"] == {"name": "ddp", "gradient_as_bucket_view": True}


@pytest.mark.slow
def test_null_removes_a_callback_and_the_last_logger() -> None:
    write("more.yaml", "loggers: {mine: {_target_: legato.loggers.logger.Logger}}\n")
    config = check.load_config(["base.yaml", "more.yaml", "callbacks.note=null", "loggers.mine=null"])
    assert config.values["callbacks"] == {}
    assert config.values["loggers"] == {}
    assert "loggers" not in check.load_config(["base.yaml"]).values
    assert check.load_config(["base.yaml", "loggers=null"]).values["loggers"] == {}


def test_interpolation() -> None:
    write(
        "more.yaml",
        "task: {width: '${trainer.max_epochs}', label: 'w${.width} \\${kept}', table: {a: 1, b: '${.a}'}}\n",
    )
    task = check.load_config(
        ["base.yaml", "more.yaml", "trainer.max_epochs=7", "task.sizes=[1, '${seed}']", "seed=2"]
    ).values["task"]
    assert (task["width"], task["label"], task["sizes"]) == (7, "w7 ${kept}", [1, 2])
    assert task["table"] == {"a": 1, "b": 1}


def test_scalars_are_those_of_yaml_1_2() -> None:
    write(
        "more.yaml",
        "trainer: {reproducible: off, cluster: off, max_time: 10:00:00:00}\n"
        "task: {lr: 1e-3, free: [yes, 010, 0x1F, 1_000, ~, .5]}\n",
    )
    values = check.load_config(["base.yaml", "more.yaml"]).values
    assert [values["trainer"][name] for name in ("reproducible", "cluster", "max_time")] == [
        "off",
        "off",
        "10:00:00:00",
    ]
    assert values["task"]["lr"] == 0.001
    assert values["task"]["free"] == ["yes", "010", 31, 1000, None, 0.5]


def test_seed_and_run_have_keys_of_their_own() -> None:
    config = check.load_config(["base.yaml", "seed=3", "run.name=x", "run.root=there"])
    assert config.values["seed"] == 3
    assert config.values["run"] == {"root": "there", "name": "x", "save_code": True}
    assert not config.values["trainer"].keys() & {"seed", "run_name", "default_root_dir", "callbacks", "logger"}


def test_an_interpolation_finds_defaults_of_legatos_own_keys() -> None:
    task = check.load_config(["base.yaml", "task.label='${trainer.precision} ${seed}'"]).values["task"]
    assert task["label"] == "32 0"
    beside = check.load_config(["base.yaml", "task.lr=0.1", "task.free='${.lr}'", "task.table={a: '${..lr}'}"])
    assert (beside.values["task"]["free"], beside.values["task"]["table"]) == (0.1, {"a": 0.1})
    assert check.load_config(["base.yaml", "task.folder='${run.root}/x'"]).values["task"]["folder"] == "runs/x"


def test_variables_of_the_environment_are_read_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": "12", "PLACE": "/data/${x}", "TEXT": "007", "EMPTY": "", "RATE": "1e-3"}.items():
        monkeypatch.setenv(name, value)
    write(
        "more.yaml",
        """
vars: {rate: "${env:RATE}"}
task:
  width: ${env:WIDTH}
  lr: ${vars.rate}
  folder: ${env:PLACE}/train
  label: ${env:TEXT}-${env:RATE}
  free: ["${env:NO_SUCH, 3}", "${env:NO_SUCH,''}", "${env:EMPTY,full}", "${env:NO_SUCH,${seed}}", "${env:NO_SUCH,'1'}",
         '\\${env:WIDTH}', "${env:NO_SUCH,[a, 1]}", "${env:NO_SUCH,null}"]
""",
    )
    config = check.load_config(["base.yaml", "more.yaml", "seed=5"])
    task = config.values["task"]
    assert (task["width"], task["lr"], task["folder"], task["label"]) == (12, 0.001, "/data/${x}/train", "007-1e-3")
    assert task["free"] == [3, "", "", 5, "1", "${env:WIDTH}", ["a", 1], None]
    assert config.origin(("task", "width")) == "more.yaml:4, from WIDTH"
    assert config.origin(("task", "free", 0)) == "more.yaml:8"
    write("stored.yaml", config.text())
    for name in ("WIDTH", "PLACE", "TEXT", "EMPTY", "RATE"):
        monkeypatch.delenv(name)
    assert check.load_config(["stored.yaml"]).values == config.values
    with pytest.raises(ConfigError, match=r"^more\.yaml:4: task\.width: .*: the environment variable WIDTH is not"):
        check.load_config(["base.yaml", "more.yaml"])


def test_shared_values_are_in_vars() -> None:
    write("more.yaml", "vars: {width: 3, part: {a: 1}}\ntask: {width: '${vars.width}', free: '${vars.part}'}\n")
    config = check.load_config(["base.yaml", "more.yaml", "vars.width=7"]).values
    assert (config["task"]["width"], config["task"]["free"]) == (7, {"a": 1})
    assert config["vars"] == {"width": 7, "part": {"a": 1}}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("e${trainer.max_epochs}-s${seed}", "e3-s0"),
        ("${task._target_}/w${task.width}", "models.Tiny/w8"),
        ("plain", "plain"),
    ],
)
def test_the_name_of_a_run_is_made_of_values(name: str, wanted: str) -> None:
    config = check.load_config(["base.yaml", f"run.name='{name}'"])
    assert config.values["run"]["name"] == wanted


# --- origins and the stored config ----------------------------------------------------------------------------------
def test_every_value_has_its_origin() -> None:
    write("more.yaml", "extends: base.yaml\n\ntrainer:\n  max_steps: 9\n")
    text = check.load_config(["more.yaml", "seed=3"]).text(origins=True)
    lines = [line.split("  # ") for line in text.splitlines()]
    origins = {line[0].strip(): line[1] for line in lines if len(line) == 2}
    assert origins["seed: 3"] == "override"
    assert origins["width: 8"] == "base.yaml:3"
    assert origins["max_steps: 9"] == "more.yaml:4"
    assert origins["find_unused_parameters: true"] == "base.yaml:6"
    assert (
        origins["name: default"]
        == origins["lr: 0.001"]
        == origins["depth: 2"]
        == origins["log_every_n_steps: 50"]
        == "default"
    )
    assert all(len(line) == 2 or line[0].endswith((":", "-")) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("origins", [False, True])
def test_the_text_of_a_config_is_a_config(origins: bool) -> None:
    write(
        "more.yaml", "task: {label: 'a \\${b} # c', free: {x: [1, {y: [z, 'off', 1.0, 1e-9]}], '1': \"two\\nlines\"}}\n"
    )
    first = check.load_config(["base.yaml", "more.yaml"])
    assert first.values["task"]["label"] == "a ${b} # c"
    write("stored.yaml", first.text(origins))
    again = check.load_config(["stored.yaml"])
    assert again.values == first.values
    assert again.text() == first.text()


def test_trainer_arguments_have_one_text() -> None:
    assert tuple(argument_texts()) == ARGUMENT_NAMES
    assert all(argument_texts().values())
    assert argument_texts()["max_steps"] == "Stop after this many optimizer steps. -1: no limit."


def test_arguments_are_read_out_of_a_docstring() -> None:
    text = "One.\n\nArgs:\n    a: first\n        and more.\n    b, c: second.\n\nMore: no.\n"
    assert documented_arguments(text) == {"a": "first and more.", "b": "second.", "c": "second."}


# --- what is accepted -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["task.lr=1", "task.odd=five", "task.sizes=[1,2]", "task.sizes=null", "task.either=x", "task.free={a: [1, {b: c}]}",
     "task.every='01:00:00:00'", "task.folder=x/y", "task.pair=[3, b]", "task.mode=slow", "task._target_=models.Alias",
     "task={_target_: models.Dynamic, what: ever}", "trainer.strategy=auto", "trainer.devices=[0,1]",
     "trainer.max_time={days: 1}", "trainer.limit_train_batches=3", "trainer.deterministic=warn",
     "data={_target_: models.Data}", "resume=auto", "checkpoint=best", "trainer.strategy={name: single}",
     "callbacks=null"],
)  # fmt: skip
def test_right_values_are_accepted(override: str) -> None:
    extra = ["task.width=3"] if override == "task._target_=models.Alias" else []
    check.load_config(["base.yaml", override, *extra])


# --- building -------------------------------------------------------------------------------------------------------
def test_build_makes_what_the_config_says(config_folder: Path) -> None:
    overrides = [
        "task.folder=a/b",
        "task.every='01:02:03:04'",
        "task.pair=[5, c]",
        "task.depth=7",
        "task.head={_target_: torch.nn.Linear, in_features: 2, out_features: 3}",
        "task.parts={a: {_target_: torch.nn.ReLU}}",
        "data={_target_: models.Data}",
        "trainer={strategy: single, devices: 1, accelerator: cpu, enable_checkpointing: false}",
        "loggers=null",
        "run.name=here",
        "resume=auto",
        "checkpoint=last",
        "seed=4",
    ]
    config = check.load_config(["base.yaml", *overrides])
    run = build.build_config(config)
    arguments: dict[str, Any] = run.task.init_arguments  # type: ignore[assignment]
    assert (arguments["folder"], arguments["pair"]) == (Path("a/b"), (5, "c"))
    assert arguments["every"] == timedelta(days=1, hours=2, minutes=3, seconds=4)
    assert (type(arguments["head"]).__name__, arguments["head"].out_features) == ("Linear", 3)
    assert type(arguments["parts"]["a"]).__name__ == "ReLU"
    assert run.task.depth == 7
    assert type(run.data).__name__ == "Data"
    assert (run.resume, run.checkpoint) == ("auto", "last")
    trainer = run.trainer
    assert (trainer.max_epochs, trainer.seed, trainer.run_name, trainer.loggers) == (3, 4, "here", [])
    assert [callback.text for callback in trainer.callbacks if type(callback).__name__ == "Note"] == ["hello"]
    assert trainer.config_text == config.to_run_again().text() == config.text().replace("resume: auto", "resume: null")


@pytest.mark.slow
def test_the_seed_alone_decides_the_first_weights() -> None:
    head = "task.head={_target_: torch.nn.Linear, in_features: 2, out_features: 3}"
    settled = ["base.yaml", head, "trainer.strategy=single", "trainer.accelerator=cpu", "loggers=null"]
    weights = [
        build.build_config(check.load_config([*settled, *more])).task.init_arguments["head"].weight.tolist()  # type: ignore[union-attr,operator]
        for more in (["seed=1"], ["seed=1", "data={_target_: models.Data}", "callbacks.note=null"], ["seed=2"])
    ]
    assert weights[0] == weights[1] != weights[2]
