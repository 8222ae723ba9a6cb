"""The first operation that differs: between two runs, and between recordings before and after a change."""

import json
import re
from pathlib import Path

import pytest
from replayed_folder import CONFIG, TWO, legato, make_folder, trained

from legato.lab.operations import different_operation

pytestmark = pytest.mark.slow

TASK = '''
import os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import legato as lg


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2.0


class Net(lg.Task):
    """Convolution, attention and dropout; AdamW."""

    def __init__(self, quick: bool = True, quick_backward: bool = True, attention: bool = True):
        super().__init__()
        self.quick, self.quick_backward, self.attention = quick, quick_backward, attention
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        with torch.backends.mkldnn.flags(enabled=self.quick):
            features = self.net(batch[0])
        rows = features.flatten(2).transpose(1, 2).contiguous()
        kernel = nn.attention.SDPBackend.FLASH_ATTENTION if self.attention else nn.attention.SDPBackend.MATH
        with nn.attention.sdpa_kernel(kernel):
            rows = F.scaled_dot_product_attention(rows[:, None], rows[:, None], rows[:, None])[:, 0]
        rows = Twice.apply(rows)
        if self.global_rank == int(os.environ.get("BROKEN", "-1")):
            rows = rows * 1.0001
        loss = F.mse_loss(self.head(rows.mean(1)), batch[1])
        self.log("train/loss", loss)
        return loss

    def on_before_backward(self, loss):
        torch.backends.mkldnn.set_flags(self.quick_backward)

    def on_after_backward(self):
        torch.backends.mkldnn.set_flags(True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(24, 3, 8, 8, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs.mean((1, 2, 3))[:, None]), 3, shuffle=True)
'''
ACCUMULATED = ("trainer.accumulate_grad_batches=2", "trainer.replicas=3")
BITWISE = (*TWO, "trainer.reproducible=bitwise")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_folder(tmp_path, monkeypatch)
    (made / "points.py").write_text(TASK)
    (made / "points.yaml").write_text(CONFIG.replace("max_epochs: 4", "max_epochs: 2"))
    return made


def line_of(text: str) -> str:
    """Return the place of a line of the task."""
    return f"points.py:{Path('points.py').read_text().splitlines().index(text) + 1}"


def told(lines: list[str]) -> dict[str, str]:
    """Return what is told of the operation, by its heading."""
    begin = next(number for number, line in enumerate(lines) if line.startswith("The first operation"))
    rows = dict(re.match(r"  (input hash|output hash|\w+) +(.*)", line).groups() for line in lines[begin + 2 :][:7])
    return {"where": lines[begin], "verdict": lines[begin + 1].strip(), **rows}


def recorded(run: Path, name: str, *words: str, **environment: str) -> str:
    legato("replay", str(run), "step=5", "--operations", name, *words, **environment)
    return name


def between(first: str, second: str) -> dict[str, str]:
    return told(legato("compare", first, second).stdout.splitlines())


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("quick", ()),
        ("quick", BITWISE),
        ("quick", ACCUMULATED),
        ("quick_backward", BITWISE),
        ("attention", ()),
    ],
)
def test_another_setting_of_a_library_is_named_by_the_operation_that_it_changes(setting, options) -> None:
    """The kernels of a convolution, those of its backward, and those of attention."""
    trained(*options)
    legato("fit", "points.yaml", *options, f"task.{setting}=false")
    lines = legato("compare", "default/version_0", "default/version_1", "--bits").stdout.splitlines()
    assert "The runs first differ at step 1." in lines
    difference = told(lines)
    module, operation, line = {
        "quick": ("net.0", "aten.convolution.default", "features = self.net(batch[0])"),
        "quick_backward": ("net.0", "aten.convolution_backward.default", "features = self.net(batch[0])"),
        "attention": ("the task", "aten._scaled_dot_product_flash_attention_for_cpu.default | aten", "rows = F.scaled"),
    }[setting]
    assert (difference["module"], difference["operation"].startswith(operation)) == (module, True)
    source = next(text for text in Path("points.py").read_text().splitlines() if line in text)
    assert difference["line"] == line_of(source)
    phase = "backward" if setting == "quick_backward" else "forward"
    assert difference["where"].startswith(f"The first operation that differs is in the {phase} of replica 0, batch 0")
    if setting == "attention":
        assert "the two runs perform different operations" in difference["verdict"]
    else:
        assert "this operation causes the difference" in difference["verdict"]
        assert " | " not in difference["input hash"]
        assert " | " in difference["output hash"]
        assert "float32[3, 3, 8, 8]" in difference["inputs"]


def test_a_changed_line_is_named_by_recordings_before_and_after() -> None:
    """Also where other lines have moved, in a backward of one's own, and where an operation was added.

    A step after a checkpoint begins with its weights.
    """
    run = trained()
    before = recorded(run, "before.jsonl")
    assert legato("compare", before, recorded(run, "again.jsonl")).stdout.startswith("No operation in this step")
    text = Path("points.py").read_text()
    for old, new, operation, phase in (
        ("return gradient * 2.0", "return gradient * 2.5", "aten.mul.Tensor", "backward"),
        ("nn.Dropout(0.2)", "nn.Dropout(0.25)", "aten.bernoulli_.float", "forward"),
        (
            "rows = Twice.apply(rows)",
            "rows = Twice.apply(rows.tanh())",
            "aten.mul.Tensor | aten.tanh.default",
            "forward",
        ),
    ):
        Path("points.py").write_text("# one line more\n" + text.replace(old, new))
        difference = between(before, recorded(run, "after.jsonl"))
        assert (difference["operation"], phase in difference["where"]) == (operation, True)
        if "Dropout" in new:
            assert (difference["module"], difference["inputs"]) == (
                "net.2",
                "float32[3, 8, 8, 8], 0.8 | float32[3, 8, 8, 8], 0.75",
            )
        else:
            assert difference["line"].split(" | ")[-1] == line_of(
                next(t for t in Path("points.py").read_text().splitlines() if new in t)
            )
    rows = [json.loads(line) for line in Path(before).read_text().splitlines()]
    next(row for row in rows if row["phase"] == "update")["output_hash"] = "0"
    Path("after.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "in the update, on rank 0" in between(before, "after.jsonl")["where"]


def test_the_rank_that_differs_is_named_and_processes_may_be_others() -> None:
    run = trained(*BITWISE)
    single, two = recorded(run, "one.jsonl"), recorded(run, "two.jsonl", *TWO)
    ranks = {json.loads(line)["rank"] for line in Path(two).read_text().splitlines()}
    assert ranks == {0, 1}
    assert legato("compare", two, recorded(run, "same.jsonl", *TWO)).stdout.startswith("No operation in this step")
    difference = between(two, recorded(run, "broken.jsonl", *TWO, BROKEN="1"))
    assert "in the forward of replica 1, batch 0, on rank 1" in difference["where"]
    assert difference["line"].split(" | ")[-1] == line_of("            rows = rows * 1.0001")
    forwards = [
        "".join(
            line + "\n"
            for line in Path(name).read_text().splitlines()
            if '"phase": "forward"' in line and '"line": ""' not in line
        )
        for name in (single, two)
    ]
    assert next(different_operation(forwards)).startswith("No operation in this step")


def test_mistakes_are_named() -> None:
    assert "Expected two files" in legato("compare", "a.jsonl", "b.jsonl", fails=True).stderr
