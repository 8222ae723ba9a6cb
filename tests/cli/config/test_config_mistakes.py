"""Every kind of mistake in a config is refused, with its file, line and remedy; misspelt keys without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from config_folder import write

from legato.base.errors import ConfigError
from legato.cli.config import build, check

pytestmark = pytest.mark.usefixtures("config_folder")

# A mistake, as overrides or as the text of a second file, and words of the message.
MISTAKES: dict[str, tuple[list[str] | str, list[str]]] = {
    "unknown trainer argument": ("trainer: {max_epohcs: 3}", ["more.yaml:1: trainer.max_epohcs", "mean 'max_epochs'?"]),
    "prefix of an argument": ("\n\ntrainer:\n  max_epoch: 3", ["more.yaml:4: trainer.max_epoch ", "'max_epochs'?"]),
    "unknown section": ("trainr: {max_epochs: 3}", ["more.yaml:1: trainr", "Did you mean 'trainer'?"]),
    "trainer argument at the top": (["max_epochs=3"], ["override: max_epochs", "Did you mean 'trainer.max_epochs'?"]),
    "section of a callback argument": (["trainer.callbacks=[]"], ["`callbacks:`"]),
    "logger under trainer": (["trainer.logger=false"], ["`loggers:`"]),
    "unknown task argument": (["task.widht=3"], ["override: task.widht", "Did you mean 'width'?"]),
    "argument of a base that is passed on": (["task.dept=3"], ["task.dept", "Did you mean 'depth'?"]),
    "unknown callback argument": (["callbacks.note.txt=x"], ["callbacks.note.txt", "Did you mean 'text'?"]),
    "argument of a ready callback": (["callbacks.c={_target_: legato.callbacks.Checkpoint, montor: x}"], ["'monitor'"]),
    "misspelt callback": (["callbacks.nte.text=x"], ["callbacks.nte has no `_target_`", "Did you mean 'note'?"]),
    "removal of a misspelt callback": (["callbacks.nte=null"], ["'nte'", "Did you mean 'note'?"]),
    "unknown strategy": (["trainer.strategy=dpp"], ["trainer.strategy", "'dpp'", "Did you mean 'ddp'?"]),
    "unknown strategy in a mapping": (["trainer.strategy={name: dpp}"], ["'dpp'", "Did you mean 'ddp'?"]),
    "strategy without a name": ("trainer: {strategy: [ddp]}", ["single, data_parallel, ddp", "a list"]),
    "strategy option": (["trainer.strategy.bucket_cap_bm=25"], ["'ddp'", "Did you mean 'bucket_cap_mb'?"]),
    "type of a strategy option": (["trainer.strategy.find_unused_parameters=1"], ["unused_parameters must be bool"]),
    "word for an int": (["trainer.max_epochs=ten"], ["null, not the string 'ten'", "Stop after this many epochs"]),
    "quoted int": (["trainer.max_steps='3'"], ["least -1, not the string '3'. Write 3 without quotes."]),
    "quoted negative int": ("trainer: {max_steps: '-1'}", ["max_steps: '-1'  # incorrect", "max_steps: -1 "]),
    "float for an int": (["trainer.max_steps=1e5"], ["least -1, not the number 100000.0. Write 100000."]),
    "bool for an int": (["trainer.max_steps=true"], ["trainer.max_steps must be int of at least -1, not true"]),
    "yes for a bool": (["trainer.inference_mode=yes"], ["must be bool, not the string 'yes'. Write true."]),
    "int for a bool": (["task.deep=1"], ["task.deep must be bool, not the number 1"]),
    "int for a str": (["task.label=3"], ["task.label must be str, not the number 3. Put it in quotes."]),
    "str for a float": (["task.lr=high"], ["task.lr must be float, not the string 'high'"]),
    "null for a float": (["task.lr=null"], ["task.lr must be float, not null"]),
    "unknown literal": (["trainer.reproducible=bitwize"], ["'off', 'order', 'bitwise'", "Did you mean 'bitwise'?"]),
    "literal with a hyphen": (["trainer.precision=16-mixd"], ["precision=16-mixd ", "precision=16-mixed  # correct"]),
    "literal of another type": (["trainer.precision=32.0"], ["trainer.precision", "32.0"]),
    "literal through an alias": (["task.mode=fats"], ["task.mode must be one of 'fast', 'slow'", "mean 'fast'?"]),
    "scalar for a list": (["task.sizes=3"], ["task.sizes must be a list of int or null, not the number 3"]),
    "item of a list": (["task.sizes=[1, two]"], ["task.sizes.1 must be int, not the string 'two'"]),
    "value of a mapping": (["task.table={a: 1, b: x}"], ["task.table.b must be float, not the string 'x'"]),
    "length of a tuple": (["task.pair=[1]"], ["task.pair must be a list of 2 (int, str), not a list"]),
    "item of a tuple": (["task.pair=[1, 2]"], ["task.pair.1 must be str"]),
    "number for a path": (["task.folder=3"], ["task.folder must be a path or null"]),
    "time": (["task.every=soon"], ["'DD:HH:MM:SS'"]),
    "union": (["task.either=1.5"], ["task.either must be int or str, not the number 1.5"]),
    "class": (["trainer.max_time={days: x}"], ["trainer.max_time.days must be float"]),
    "missing task": (["task=null"], ["task is missing"]),
    "missing argument": (["task={_target_: models.Needy, one: 1}"], ["task.two is missing: Needy requires it (int)."]),
    "missing arguments": (["task={_target_: models.Needy}"], ["2 mistakes", "task.one is", "task.two is"]),
    "null trainer": ("trainer:", ["more.yaml:1: trainer must be a mapping", "null"]),
    "list for a mapping": ("callbacks: [{_target_: models.Note}]", ["callbacks must map names", "not a list"]),
    "scalar for a callback": (["callbacks.note=3"], ["callbacks.note must be a mapping with `_target_`"]),
    "task without target": ("task: models.Tiny", ["task must be a mapping with `_target_`"]),
    "target that is a number": (["task._target_=3"], ["task._target_ must be a dotted path"]),
    "target without module": (["task._target_=Tiny"], ["'package.module.Class'"]),
    "module that is not there": (["task._target_=modles.Tiny"], ["no module 'modles'. Did you mean 'models'?"]),
    "no such submodule": (["task._target_=legato.tasks.digit.Digits"], ["'legato.tasks.digit'. Did you mean"]),
    "class that is not there": (["task._target_=models.Tinny"], ["'models' has no 'Tinny'. Did you mean 'Tiny'?"]),
    "class that a package lacks": (["task._target_=legato.tasks.Digit"], ["has no 'Digit'. Did you mean 'Digits'?"]),
    "target that is a module": (["task._target_=legato.tasks"], ["is a module, not a class"]),
    "target that is a function": (["task._target_=models.make_task"], ["is a function, not a class"]),
    "target that is a value": (["task._target_=models.number"], ["is a value, not a class"]),
    "target of the wrong kind": (["task={_target_: models.Note, text: x}"], ["is not a subclass of Task"]),
    "task as data": (["data={_target_: models.Tiny, width: 3}"], ["is not a subclass of DataModule"]),
    "callback as logger": (["loggers.x={_target_: models.Note, text: x}"], ["is not a subclass of Logger"]),
    "the standard library": (["task={_target_: subprocess.Popen, args: ls}"], ["is not a subclass of Task"]),
    "nested program": (["task.free={_target_: os.system, command: ls}"], ["'os.system' is rejected"]),
    "nested target that is not there": (["task.free={_target_: models.Tinny}"], ["task.free._target_", "mean 'Tiny'?"]),
    "nested argument": (["task.free={_target_: models.Tiny, widht: 3}"], ["task.free.widht", "Did you mean 'width'?"]),
    "nested argument of a partial": (["task.free={_target_: models.Tiny, _partial_: true, widht: 3}"], ["'width'?"]),
    "nested in a list": (["task.free=[{a: {_target_: models.Tiny, width: x}}]"], ["task.free.0.a.width must be int"]),
    "nested function": (["task.free={_target_: models.make_net, width: 3, depht: 1}"], ["Did you mean 'depth'?"]),
    "nested and incomplete": (["task.free={_target_: models.make_net}"], ["width is missing", "write _partial_: true"]),
    "nearly a target": (["task.free={_tagret_: models.Tiny}"], ["task.free has '_tagret_'", "mean '_target_'?"]),
    "nearly a partial": (["task.free={_target_: models.Dynamic, _partial: true}"], ["Did you mean '_partial_'?"]),
    "LightningCLI's form": (["task.free={class_path: models.Tiny, init_args: {}}"], ["{_target_: models.Tiny}"]),
    "no bool": (["task.free={_target_: models.Tiny, _partial_: 1}"], ["task.free._partial_ must be bool"]),
    "partial task": (["task._partial_=true"], ["task._partial_ is not an argument of Tiny"]),
    "positional arguments of a task": (["task._args_=[3]"], ["task._args_ is not an argument of Tiny"]),
    "positional arguments": (["task.free={_target_: models.make_net, _args_: 3}"], ["_args_ must be a list"]),
    "Hydra's conversion": (["task.free={_target_: models.Tiny, width: 1, _convert_: all}"], ["always plain"]),
    "Hydra's recursion": (["task.free={_target_: models.Tiny, width: 1, _recursive_: no}"], ["is always built"]),
    "Hydra's defaults": (
        "defaults: [_self_, {data: mnist}, {override /model: net}, base2, {debug: null}]",
        ["more.yaml:1: defaults", "`extends: [base.yaml, net.yaml]`"],
    ),
    "Hydra's own settings": ("hydra: {run: {dir: x}}", ["run.root", "legato sweep"]),
    "no variable": ("task:\n  label: ${env:LEGATO_NO}\n", ["more.yaml:2: task.label", "LEGATO_NO is"]),
    "environment of a strange name": (["task.label='${env:A-B}'"], ["the environment variable A-B is not set"]),
    "vars that are a list": ("vars: [1]", ["more.yaml:1: vars must be a mapping"]),
    "misspelt use of vars": ("vars: {width: 3}\ntask: {width: '${vars.widht}'}", ["more.yaml:2", "'vars.width'?"]),
    "override of vars": (["vars.wdth=3", "task.width='${vars.width}'"], ["vars.wdth", "Did you mean 'width'?"]),
    "override of unused vars": (["vars.width=3"], ["vars.width has no effect"]),
    "target in plain data": (["task.table={a: {_target_: os.system}}"], ["task.table.a must not have a `_target_`"]),
    "target for another type": (["task.lr={_target_: models.Tiny}"], ["task.lr must not have a `_target_`"]),
    "seed that is no int": (["seed=1.5"], ["seed must be int from 0"]),
    "seed below zero": (["seed=-1"], ["seed must be int from 0"]),
    "seed of the trainer": (["trainer.seed=2"], ["trainer.seed has moved: write seed."]),
    "run key": (["run.nmae=x"], ["run.nmae", "Did you mean 'name'?"]),
    "run value": (["run.name=3"], ["run.name must be str"]),
    "resume": (["resume=true"], ["resume must be 'auto', a path or null, not true"]),
    "missing interpolation": (["task.width='${trainer.max_epoch}'"], ["task.width", "'trainer.max_epochs'"]),
    "circular interpolation": (["task.width='${task.width}'"], ["task.width", "cannot be resolved"]),
    "broken interpolation": (["task.width='${'"], ["task.width", "is not a valid interpolation"]),
    "interpolated wrong type": (["task.width='${task.label}'", "task.label=x"], ["task.width must be int"]),
    "override without =": (["trainer.max_epochs"], ["'trainer.max_epochs' is neither a YAML file nor key=value"]),
    "count below its least": ("trainer:\n  max_epochs: -5", ["more.yaml:2: trainer.max_epochs", "not the number -5"]),
    "fraction above one": (["trainer.limit_train_batches=1.5"], ["least 0 or float from 0.0 to 1.0, not the number"]),
    "not a number": (["trainer.gradient_clip_val=.nan"], ["must be float of at least 0 or null, not the number nan"]),
    "no device": (["trainer.devices=0"], ["must be a positive count, a list of indices, -1 or 'auto'"]),
    "a device below none": (["trainer.devices=[0, -1]"], ["a list of indices"]),
    "unknown accelerator": (["trainer.accelerator=cude"], ["must be one of 'auto', 'cpu'", "Did you mean 'cuda'?"]),
    "name that leaves the root": ("\nrun: {name: ../x}", ["more.yaml:2: run.name must be a relative", "'../x'"]),
    "name of Lightning's place": (["trainer.run_name=/x"], ["trainer.run_name has moved: write run.name."]),
    "name of several lines": (['run.name="a\\nb"'], ["run.name must be a relative folder name"]),
    "name that is too long": ([f"run.name={'é' * 128}"], ["run.name is too long", "has 256 bytes", "at most 255"]),
    "root that is too long": ([f"run.root=a/{'x' * 256}/b"], ["run.root is too long", "has 256 bytes"]),
    "root with a null byte": (['run.root="a\\0b"'], ["run.root contains a null byte"]),
    "file name that is too long": ([f"{'x' * 300}.yaml"], ["was not found"]),
    "misspelt option": (["--trainer.max_epocs=3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "option of two words": (["--trainer.max_epochs", "3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "option without its section": (["--max-epochs=3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "option that is a section": (["--run-name=x"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "Hydra's removal": (["~callbacks.note"], ["KEY=null removes an entry"]),
    "Hydra's addition": (["+trainer.max_steps=3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "spaces around =": (["trainer.max_epochs = 3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "colon for =": (["trainer.max_epochs: 3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "merge key": ("task: &t {width: 3}\ntrainer:\n  <<: *t\n", ["more.yaml:3: trainer.<<", "no merge keys", "extends"]),
    "override with dashes": (["--trainer.max_epochs=3"], ["neither a YAML file nor key=value. Write KEY=VALUE"]),
    "override without a key": (["=3"], ["'=3'"]),
    "override with an empty key": (["trainer..max_epochs=3"], ["'trainer..max_epochs' is not a valid key"]),
    "override into a scalar": (["trainer.max_epochs.x=3"], ["trainer.max_epochs (base.yaml:5) is a single value"]),
    "override that is not YAML": (["task.label=*.txt"], ["'task.label=*.txt' is not valid YAML", "Quote"]),
    "override of extends": (["extends=[x.yaml]"], ["only a file can extend"]),
    "broken YAML": ("trainer:\n  max_epochs: 3\n max_steps: 4\n", ["more.yaml:3 is not valid YAML"]),
    "unclosed bracket": ("trainer: {a: 1\n", ["more.yaml:2 is not valid YAML"]),
    "tab": ("trainer:\n\tmax_epochs: 3\n", ["more.yaml:2 is not valid YAML"]),
    "duplicate key": ("trainer:\n  nan: raise\n  nan: ignore\n", ["more.yaml:3: duplicate key 'nan'", "more.yaml:2"]),
    "duplicate section": ("trainer: {}\ntrainer: {}\n", ["more.yaml:2: duplicate key 'trainer'"]),
    "Python object": ("task: !!python/object/apply:os.system [ls]\n", ["1: the tag !!python/object/apply:os.system"]),
    "two documents": ("seed: 1\n---\nseed: 2\n", ["more.yaml:2 is not valid YAML"]),
    "no mapping": ("- 1\n", ["more.yaml:1: a config must be a mapping"]),
    "extends no file": ("extends: [bse.yaml]\n", ["more.yaml extends bse.yaml", "Did you mean 'base.yaml'?"]),
    "extends something else": ("extends: {a: 1}\n", ["more.yaml:1: extends must be a list of files"]),
    "alias of itself": ("task: &a {b: *a}\n", ["more.yaml:1"]),
}  # fmt: skip
# mistakes that only the imported class tells: types, missing arguments, targets that are not there
NEED_THE_CLASS = {
    "type of a strategy option", "int for a bool", "int for a str", "str for a float", "null for a float",
    "literal through an alias", "scalar for a list", "item of a list", "value of a mapping", "length of a tuple",
    "item of a tuple", "number for a path", "time", "union", "missing argument", "missing arguments",
    "target without module", "module that is not there", "no such submodule", "class that is not there",
    "class that a package lacks", "target that is a module", "target that is a function", "target that is a value",
    "target of the wrong kind", "task as data", "callback as logger", "the standard library", "nested program",
    "nested target that is not there", "nested in a list", "nested and incomplete", "nearly a target",
    "LightningCLI's form", "positional arguments", "target in plain data",
    "target for another type", "interpolated wrong type",
}  # fmt: skip


def mistaken(mistake: list[str] | str) -> list[str]:
    if isinstance(mistake, str):
        return ["base.yaml", write("more.yaml", mistake)]
    return ["base.yaml", *mistake]


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    mistake, words = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        check.load_config(mistaken(mistake))
    message = str(caught.value)
    assert len(message.splitlines()) <= 6
    for word in words:
        assert word in message


@pytest.mark.slow
def test_misspelt_keys_are_found_without_torch(config_folder: Path) -> None:
    """All mistakes run in one process, to start Python once; what has imported torch is forgotten in between."""
    cases = {}
    for index, (name, (mistake, _)) in enumerate(MISTAKES.items()):
        arguments = mistaken(mistake)
        if arguments[1] == "more.yaml":
            arguments[1] = str(Path("more.yaml").rename(f"more{index}.yaml"))
        cases[name] = arguments
    (config_folder / "cases.json").write_text(json.dumps(cases))
    script = """
import json, sys
sys.path.insert(0, "")
from legato.cli.config import check
from legato.base.errors import ConfigError

class Imported(Exception):
    pass

class Refused:
    def find_spec(self, name, *more):
        if name in ("torch", "numpy"):
            raise Imported(name)

sys.meta_path.insert(0, Refused())
late = []
for name, arguments in json.load(open("cases.json")).items():
    try:
        check.load_config(arguments)
        print(name, "was accepted")
    except ConfigError as error:
        if isinstance(error.__context__, Imported):
            late.append(name)
    except Imported:
        late.append(name)
print(json.dumps(late))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr == ""
    late = set(json.loads(done.stdout))
    assert late == NEED_THE_CLASS
    assert len(MISTAKES) - len(late) >= 91


def test_an_override_cannot_change_part_of_a_list() -> None:
    write("more.yaml", "task: {sizes: [1, 2]}\n")
    with pytest.raises(ConfigError, match=r"task\.sizes \(more\.yaml:1\) is a list; set the entire list"):
        check.load_config(["base.yaml", "more.yaml", "task.sizes.0=3"])


@pytest.mark.slow
def test_all_mistakes_are_found_at_once() -> None:
    nested = "task.free=[{_target_: models.Tiny, widht: 1}]"
    with pytest.raises(ConfigError) as caught:
        check.load_config(
            ["base.yaml", "trainer.a=1", "trainer.b=1", "task.c=1", "d=1", "callbacks.note.e=1", "seed=x", nested]
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "The config has 7 mistakes; the first 5:"
    assert len(lines) == 6


def test_a_missing_file_names_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"'bas\.yaml' was not found.*Did you mean 'base\.yaml'"):
        check.load_config(["bas.yaml"])
    with pytest.raises(ConfigError, match=r"'base' is neither .* Did you mean 'base\.yaml'"):
        check.load_config(["base"])
    with pytest.raises(ConfigError, match="No config file"):
        check.load_config(["seed=1"])
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"'folder\.yaml' was not found"):
        check.load_config(["folder.yaml"])
    Path("folder.yaml/config.yaml").touch()
    with pytest.raises(ConfigError, match=r"Did you mean 'folder\.yaml/config\.yaml'"):
        check.load_config(["folder.yaml"])
    Path("latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    with pytest.raises(ConfigError, match=r"latin\.yaml is not a UTF-8 text file \(byte 15\)"):
        check.load_config(["latin.yaml"])


def test_a_module_that_is_no_python_is_named_with_its_line() -> None:
    write("broken.py", "class Tiny:\n    def __init__(self:\n")
    with pytest.raises(ConfigError, match=r"task\._target_ cannot be imported: .*SyntaxError: .*broken\.py:2\)"):
        check.load_config(["base.yaml", "task._target_=broken.Tiny"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_like_this\n", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("raise RuntimeError('no\\nluck')\n", "RuntimeError: no luck"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_import_that_fails_says_why(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    write("failing.py", f"import legato\n{text}class Failing(legato.Task):\n    pass\n")
    with pytest.raises(ConfigError) as caught:
        check.load_config(["base.yaml", "task={_target_: failing.Failing}"])
    message = str(caught.value)
    assert message.startswith("override: task._target_ cannot be imported: importing 'failing' failed: ")
    assert words in message
    assert "failing.py:2)" in message


NMS = "operator torchvision::nms does not exist"


@pytest.mark.parametrize("when", ["at once", "at the first use"])
def test_a_broken_import_of_a_dependency_shows_its_cause(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers, which imports its models at their first use, says that torchvision does not fit torch."""
    monkeypatch.delitem(sys.modules, "depending", raising=False)
    text = f"""
def load(name):
    try:
        raise RuntimeError("{NMS}")
    except RuntimeError as error:
        raise ModuleNotFoundError(f"Could not import module {{name!r}}.") from error
"""
    text += "def __getattr__(name):\n    return None if name.startswith('__') else load(name)\n"
    write("depending.py", text + ("load('Net')\n" if when == "at once" else ""))
    cause = f"ModuleNotFoundError: Could not import module 'Net'., because of RuntimeError: {NMS} ("
    with pytest.raises(ConfigError, match="cannot be imported: importing 'depending") as caught:
        check.load_config(["base.yaml", "task={_target_: depending.Net}"])
    assert cause in str(caught.value)


@pytest.mark.slow
def test_hidden_classes_are_checked_by_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hidden", raising=False)
    text = """
import legato, typing
def make(base):
    class Made(base):
        def __init__(self, width: int, mode: typing.Literal["a", "b"] = "a", more: "int | None" = None):
            super().__init__()
    return Made
globals()["Task"] = make(legato.Task)
globals()["Other"] = make(object)
"""
    write("hidden.py", text)
    assert check.load_config(["base.yaml", "task={_target_: hidden.Task, width: 3}"]).values["task"]["mode"] == "a"
    for override, words in {
        "task={_target_: hidden.Task, wdth: 3}": "2 mistakes",
        "task={_target_: hidden.Task, width: x}": "task.width must be int",
        "task={_target_: hidden.Task, width: 3, mode: c}": "must be one of 'a', 'b'",
        "task={_target_: hidden.Task, width: 3, more: x}": "must be int or null",
        "task={_target_: hidden.Tusk, width: 3}": "module 'hidden' has no 'Tusk'. Did you mean 'Task'?",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check.load_config(["base.yaml", override])
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"'hidden\.Other' is not a subclass of Task"):
        check.load_config(["base.yaml", "task={_target_: hidden.Other, width: 3}"])


@pytest.mark.slow
def test_what_a_constructor_refuses_is_said_with_its_place() -> None:
    write("more.yaml", "callbacks:\n  c: {_target_: legato.callbacks.Checkpoint, save_top_k: -5}\n")
    with pytest.raises(ConfigError, match=r"^more\.yaml:2: callbacks\.c: Checkpoint: save_top_k must be"):
        build.build_config(check.load_config(["base.yaml", "more.yaml"]))
    write("more.yaml", "callbacks:\n  c: {_target_: legato.callbacks.EarlyStopping, monitor: x, patience: -1}\n")
    with pytest.raises(ConfigError, match=r"^more\.yaml:2: callbacks\.c: EarlyStopping: patience must be"):
        build.build_config(check.load_config(["base.yaml", "more.yaml"]))
    for text, words in {
        "max_time: 1h": "more.yaml:1: trainer.max_time: A duration must be",
        "max_time: {hours: -1}": "more.yaml:1: trainer.max_time: A duration must not be negative",
        "strategy: {name: ddp, timeout: -1}": "more.yaml:1: trainer.strategy: timeout=-1: expected",
    }.items():
        write("more.yaml", f"trainer: {{{text}}}\n")
        with pytest.raises(ConfigError) as caught:
            build.build_config(check.load_config(["base.yaml", "more.yaml"]))
        assert str(caught.value).startswith(words)


def test_a_nested_class_must_descend_from_the_annotation() -> None:
    nested = "task.head={_target_: %s}"
    with pytest.raises(ConfigError, match=r"is not a subclass of torch\.nn\.modules\.module\.Module"):
        check.load_config(["base.yaml", nested % "collections.OrderedDict"])
    filled = "torch.nn.init.constant_, tensor: {_target_: torch.ones, _args_: [2]}, val: 1"
    config = check.load_config(["base.yaml", nested % filled])
    with pytest.raises(
        ConfigError, match=r"'torch\.nn\.init\.constant_' returned Tensor, not torch\.nn\.modules\.module\.M"
    ):
        build.build_config(config)
    marker = Path("ran")
    with pytest.raises(
        ConfigError,
        match=r"'pathlib\.Path\.touch' is rejected: from the standard library, configs may use only collections",
    ):
        build.build_config(check.load_config(["base.yaml", "task.head={_target_: pathlib.Path.touch, self: ran}"]))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("legato.callbacks.SpikeWatch", "legato.lab.SpikeWatch"),
        ("legato.callbacks.microscope.Microscope", "legato.lab.Microscope"),
        ("legato.trainer.loggers.CSVLogger", "legato.loggers.CSVLogger"),
        ("legato.trainer.loggers.csv_file.CSVLogger", "legato.loggers.CSVLogger"),
    ],
)
def test_a_class_that_has_moved_is_suggested(path, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = "loggers" if "Logger" in path else "callbacks"
    with pytest.raises(ConfigError, match=rf"cannot be imported: .* Did you mean '{meant}'\?"):
        check.load_config(["digits.yaml", f"{section}.moved._target_={path}"])


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("model.lr=1", "model is not a config key. Write `task: "),
        ("seed_everything=3", "Write `seed`."),
        ("ckpt_path=x", "Write `resume` for fit, `checkpoint` for validate, test and predict."),
        ("run.csv=true", "is not an argument of run. Add legato.loggers.CSVLogger() to logger; in a config, add csv:"),
        ("trainer.write_csv=true", "Add legato.loggers.CSVLogger() to logger"),
        ("trainer.gpus=2", 'Write accelerator="gpu", devices=...'),
        ("trainer.profiler=simple", "Write callbacks=[legato.callbacks.Profile()]"),
        ("trainer.resume=auto", "It is a top-level key: write resume=..."),
        ("trainer.strategy={name: data_parallel, dim: 0}", "batches are scattered along their first dimension."),
        ("trainer.strategy={name: ddp, process_group: x}", "Call torch.distributed.init_process_group before fit"),
    ],
)
def test_lightnings_keys_are_answered_by_ours(word, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        check.load_config(["digits.yaml", word])
