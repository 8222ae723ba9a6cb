"""Every example runs, small; a YAML beside it names it."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT, Reader

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
NEEDS = {"transformers_finetuning": "transformers", "finetune": "peft", "k_fold": "sklearn"}
SMALL = {
    "gan.py": ("10", "losses: train/critic_loss"),
    "iterable_stream.py": ("", "4100 samples seen in 300 steps; expected: 4100"),
    "k_fold.py": ("2 1", ""),
    "plain_script.py": ("1", "accuracy of the task in this process on new points: "),
    "recommender.py": ("single 1", ""),
}
"""Arguments that make a script short, and words that it prints."""
NAMED_BY_A_CONFIG = {"local_sgd.py", "html_logger.py"}
HAS_A_TEST = {
    "two_parts.py": "tests/tasks/test_two_parts_example.py",
    "same_bits.py": "tests/trainer/test_packaging.py",
}


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A reader in a copy of the folder."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    return Reader(tmp_path / "examples")


def test_every_example_is_on_the_page_and_tested() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\.\./examples/(\w+\.py)\)", page))
    there = {path.name for path in EXAMPLES.glob("*.py")}
    assert listed == there
    tested = {path.with_suffix(".py").name for path in EXAMPLES.glob("*.yaml")}
    assert there == {*tested, *SMALL, *NAMED_BY_A_CONFIG, *HAS_A_TEST}


@pytest.mark.parametrize("config", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_an_example_with_a_config_trains_and_resumes(config: str, reader: Reader) -> None:
    name = config.removesuffix(".yaml")
    if find_spec(NEEDS.get(name, "legato")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    reader.command(f"legato fit {config} trainer.log_every_n_steps=1")
    reader.command(f"legato fit {config} trainer.log_every_n_steps=1 resume=auto trainer.max_epochs=2")
    (run,) = (reader.folder / "runs" / name).iterdir()
    assert "train/loss" in (run / "metrics.jsonl").read_text()


@pytest.mark.parametrize("script", sorted(SMALL))
def test_a_script_runs(script: str, reader: Reader) -> None:
    arguments, words = SMALL[script]
    output = reader.command(f"python {script} {arguments}")
    assert output
    assert words in output


def test_a_strategy_of_ones_own_trains_on_two_processes(reader: Reader) -> None:
    strategy = "'trainer.strategy={_target_: local_sgd.LocalSGD, every: 3}'"
    reader.command(f"legato fit digits.yaml trainer.devices=2 {strategy} run.name=local")
    assert list((reader.folder / "runs" / "local").glob("version_0/checkpoints/*"))


def test_a_logger_of_ones_own_draws_each_point_once(reader: Reader) -> None:
    command = "legato fit digits.yaml 'loggers={page: {_target_: html_logger.HTMLLogger}}' trainer.log_every_n_steps=1"
    reader.command(command)
    reader.command(f"{command} resume=auto trainer.max_epochs=2")
    run = reader.folder / "runs" / "digits" / "version_0"
    assert "<polyline" in (run / "curves.html").read_text()
    lines = (run / "curves.jsonl").read_text().splitlines()
    assert len(lines) == len({re.sub(r'"value".*', "", line) for line in lines}) > 8
