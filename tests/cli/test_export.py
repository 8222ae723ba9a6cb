"""`legato export` of models: files that other programs load, with the outputs of the task."""

from pathlib import Path

import pytest
import torch
from command_line_folder import CONFIG, TASK
from safetensors.torch import load_file

from legato.base.errors import CheckpointError
from legato.cli.export import compare_outputs
from legato.cli.main import main
from legato.trainer.checkpoints import commit

FORWARD = """
    def forward(self, x):
        return self.layer(x)


class WithExample(Line):
    def __init__(self, lr: float = 0.1, fault: str = "none"):
        super().__init__(lr, fault)
        self.example_input_array = torch.ones(2, 1)


class TwoInputs(WithExample):
    def __init__(self, lr: float = 0.1, fault: str = "none"):
        super().__init__(lr, fault)
        self.example_input_array = {"x": torch.ones(3, 1), "y": torch.zeros(3, 1)}

    def forward(self, x, y):
        return {"sum": self.layer(x) + y, "x": x * 2}


class Branches(WithExample):
    def forward(self, x):
        return x if x.sum().item() > 0 else self.layer(x)


class Batches(WithExample):
    def forward(self, batch):
        return self.layer(batch["x"])


class Named(Batches):
    def __init__(self, lr: float = 0.1, fault: str = "none"):
        super().__init__(lr, fault)
        self.example_input_array = {"x": torch.ones(3, 1), "y": torch.ones(3, 1)}


class AsOne(Batches):
    def __init__(self, lr: float = 0.1, fault: str = "none"):
        super().__init__(lr, fault)
        self.example_input_array = ({"x": torch.ones(3, 1)},)


class Alone(WithExample):
    def __init__(self, lr: float = 0.1, fault: str = "none"):
        super().__init__(lr, fault)
        self.example_input_array = torch.ones(1, 1)


class Random(WithExample):
    def forward(self, x):
        return self.layer(x) + torch.rand(())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a checkpoint of Line, whose weights are 2 and 1."""
    (tmp_path / "net.py").write_text(TASK + FORWARD)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = {"layer.weight": torch.tensor([[2.0]]), "layer.bias": torch.tensor([1.0])}
    commit.write(tmp_path / "run" / "checkpoints" / "step-00000001", {"state_dict": weights, "global_step": 1})
    return tmp_path


def use(folder: Path, name: str) -> None:
    """Store a config beside the checkpoint, as a run does."""
    (folder / "run" / "config.yaml").write_text(CONFIG.replace("line.Line", f"net.{name}"))


@pytest.mark.slow
def test_a_program_of_torch_export_computes_what_the_task_does_for_any_batch(folder: Path) -> None:
    use(folder, "WithExample")
    assert main(["export", "run", "net.pt2"]) == 0
    outputs = torch.export.load("net.pt2").module()(torch.tensor([[0.0], [1.0], [3.0], [5.0], [7.0]]))
    assert outputs.flatten().tolist() == [1.0, 3.0, 7.0, 11.0, 15.0]
    assert sorted(path.name for path in folder.glob("*net*")) == ["net.pt2", "net.py"]


@pytest.mark.slow
def test_a_dict_that_is_one_argument_stands_in_a_tuple(folder: Path) -> None:
    use(folder, "AsOne")
    assert main(["export", "run", "net.pt2"]) == 0
    assert torch.export.load("net.pt2").module()({"x": torch.tensor([[3.0], [5.0]])}).flatten().tolist() == [7.0, 11.0]


@pytest.mark.slow
def test_an_onnx_file_computes_what_the_task_does(folder: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    use(folder, "TwoInputs")
    assert main(["export", "run", "net.onnx"]) == 0
    session = runtime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    inputs = {"x": torch.ones(5, 1).numpy(), "y": torch.full((5, 1), 4.0).numpy()}
    assert [node_input.name for node_input in session.get_inputs()] == ["x", "y"]
    total, twice = session.run(None, inputs)
    assert total.flatten().tolist() == [7.0] * 5
    assert twice.flatten().tolist() == [2.0] * 5


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", "net.pt2"]) == 2
    assert "has no config.yaml to specify its task" in capsys.readouterr().err
    use(folder, "Branches")
    assert main(["export", "run", "net.pt2"]) == 1
    assert "Branches.forward cannot be exported. " in capsys.readouterr().err
    use(folder, "Alone")
    assert main(["export", "run", "net.pt2"]) == 1
    assert "example_input_array has one sample" in capsys.readouterr().err
    use(folder, "Random")
    assert main(["export", "run", "net.pt2"]) == 1
    assert "differ from the task's" in capsys.readouterr().err
    use(folder, "Named")
    assert main(["export", "run", "net.pt2"]) == 1
    assert "Named.forward does not accept example_input_array: " in capsys.readouterr().err
    use(folder, "Line")
    assert main(["export", "run", "net.pt2"]) == 1
    assert "Line has no example_input_array. Exporting a model requires forward" in capsys.readouterr().err
    (folder / "net.py").write_text(TASK)
    (folder / "plain.py").write_text(TASK)
    (folder / "run" / "config.yaml").write_text(CONFIG.replace("line.Line", "plain.Line"))
    assert main(["export", "run", "net.pt2"]) == 1
    assert "Line has no forward" in capsys.readouterr().err
    assert not list(folder.glob("*.pt2"))


@pytest.mark.slow
def test_weights_and_other_suffixes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "net.safetensors"]) == 0
    assert load_file("net.safetensors")["layer.weight"].item() == 2.0
    assert main(["export", "run", "net.bin"]) == 1
    assert "ending in .safetensors for weights, .onnx or .pt2 for a model" in capsys.readouterr().err


def test_outputs_are_compared_up_to_rounding() -> None:
    ones = torch.ones(2, 3)
    compare_outputs([ones], [ones + 1e-6])
    for outputs in (ones + 0.5, ones / 0 * 0, ones.T):
        with pytest.raises(CheckpointError, match=r"differ from the task's\. No file was kept"):
            compare_outputs([ones], [outputs])
