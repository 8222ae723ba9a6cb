"""examples/finetune.py on the real libraries: packed documents, adapters, and the files that from_pretrained reads."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import legato as lg
from legato.base.errors import CheckpointError, ConfigError, TaskError
from legato.cli.main import main

STOP_AT = """
import os
import signal

import legato as lg


class StopAt(lg.Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer, task):
        if trainer.global_step == self.step and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)
"""
EXAMPLES = Path(lg.__file__).parent / "examples"
ONE, TWO = {}, {"devices": 2, "strategy": "fsdp"}
SAMPLE = {"input_ids": torch.tensor([[3, 4, 11, 5, 12]])}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def example(tmp_path, monkeypatch):
    """The example's module, in a folder with its config and eighty pairs."""
    lines = [json.dumps({"prompt": f"{n}+3=", "answer": f"{n + 3}"}) for n in range(80)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "stop_at.py").write_text(STOP_AT)
    (tmp_path / "finetune.yaml").write_text((EXAMPLES / "finetune.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    for folder in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    import finetune

    return finetune


@pytest.fixture
def base(example, tmp_path):
    """A folder with a model and its tokenizer."""
    torch.manual_seed(1)
    task = example.FineTuning()
    task.configure_model()
    task.model.save_pretrained(tmp_path / "base")
    task.tokenizer.save_pretrained(tmp_path / "base")
    return "base"


def fit(*words, layout=ONE):
    options = [f"trainer.{name}={value}" for name, value in layout.items()]
    small = ["data.file=pairs.jsonl", "trainer.max_epochs=2", "trainer.log_every_n_steps=1", "task.warmup=1"]
    assert main(["fit", "finetune.yaml", "--quiet", *small, *options, *words]) == 0


def output_of(model, sample=SAMPLE):
    with torch.no_grad():
        return model.eval()(**sample).logits


def points(name, run):
    rows = map(json.loads, Path("runs", "finetune", run, "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


# --- packed documents -------------------------------------------------------------------------------------------------
def test_a_document_sees_nothing_of_the_documents_beside_it(example):
    task, data = example.FineTuning(), example.Documents(length=6, batch_size=3, file="pairs.jsonl")
    task.configure_model()
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    assert len(starts) == 4
    together = output_of(task.model, {**batch, "use_cache": False})
    for document, first, end in zip(data.documents[::10], starts, starts[1:], strict=False):
        assert batch["input_ids"][0, first:end].tolist() == document["input_ids"]
        assert batch["labels"][0, first:end].tolist() == document["labels"]
        alone = output_of(task.model, {"input_ids": torch.tensor([document["input_ids"]])})
        torch.testing.assert_close(together[:, first:end], alone, rtol=1e-4, atol=1e-5)


def test_only_answers_have_a_loss_and_long_documents_are_cut(example):
    tokenizer = example.make_tokenizer(None)
    document = example.encode(tokenizer, 6, prompt="1+2=", answer="345")
    assert document == {"input_ids": [2, 11, 3, 12, 4, 5], "labels": [-100, -100, -100, -100, 4, 5]}


# --- a run, its resume, its export ------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [ONE, TWO], ids=["one", "two"])
def test_all_weights_are_trained_resumed_and_exported(base, layout, monkeypatch, capsys):
    words = [f"task.model={base}", "data.batch_size=2"]
    fit(*words, layout=layout)
    with pytest.raises(SystemExit, match="75"):
        fit(*words, "callbacks.stop={_target_: stop_at.StopAt, step: 2}", layout=layout)
    fit("resume=auto", "callbacks.stop={_target_: stop_at.StopAt, step: -1}", layout=layout)
    straight, resumed = points("train/loss", "version_0"), points("train/loss", "version_1")
    assert straight == resumed
    assert straight[-1] < straight[0]
    run = Path("runs", "finetune", "version_1")
    monkeypatch.setattr("finetune.AutoModelForCausalLM.from_config", None)  # the config is that of the run
    assert main(["export", str(run), "tuned", "--format", "hf", "--shard-size", "100KB"]) == 0
    assert Path("tuned", "model.safetensors.index.json").is_file()
    assert len(list(Path("tuned").glob("model-*.safetensors"))) > 1
    by_callback = AutoModelForCausalLM.from_pretrained(run / "pretrained", dtype=torch.float32)
    by_command = AutoModelForCausalLM.from_pretrained("tuned", dtype=torch.float32)
    assert torch.equal(output_of(by_callback), output_of(by_command))
    assert not torch.equal(output_of(by_callback), output_of(AutoModelForCausalLM.from_pretrained(base)))
    assert AutoTokenizer.from_pretrained("tuned")("12+3=").input_ids == [2, 3, 11, 4, 12]
    assert main(["export", str(run), "tuned", "--format", "hf"]) != 0
    assert "tuned already exists" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [ONE, TWO], ids=["one", "two"])
def test_an_adapter_is_written_as_peft_does_and_trained_further(base, example, layout):
    words = [f"task.model={base}", "task.lora_rank=4", "data.batch_size=2"]
    fit(*words, layout=layout)
    run = Path("runs", "finetune", "version_0")
    assert {path.name for path in (run / "pretrained").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert main(["export", str(run), "adapter", "--format", "hf"]) == 0
    # every part of every process is there: a file of rank 0's shards would leave zeros in lora_B
    trained = output_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "pretrained"))
    exported = output_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapter"))
    assert torch.equal(trained, exported)
    task = example.FineTuning(model=base, adapter="adapter")
    task.configure_model()
    assert all(weight.any() for name, weight in task.named_parameters() if "lora_B" in name)
    assert torch.equal(output_of(task.model), exported)


def test_an_adapter_goes_on_alike_on_one_and_two_processes(base):
    words = [f"task.model={base}", "trainer.precision=32-true", "data.batch_size=2"]
    fit(*words, "task.lora_rank=4", "trainer.replicas=2")
    Path("runs", "finetune", "version_0", "pretrained").rename("adapter")
    for layout in ({"replicas": 2}, TWO):
        fit(*words, "task.adapter=adapter", layout=layout)
    assert points("train/loss", "version_1") == pytest.approx(points("train/loss", "version_2"), abs=1e-5)
    before, after = points("train/loss", "version_0"), points("train/loss", "version_1")
    assert after[0] < before[0]
    assert after[0] == pytest.approx(points("val/loss", "version_0")[-1], abs=0.3)


# --- what cannot be written -------------------------------------------------------------------------------------------
class Plain(lg.Task):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_task_without_a_pretrained_model_is_refused_before_it_is_trained(trainer):
    made = trainer(callbacks=[lg.callbacks.ExportPretrained()])
    with pytest.raises(TaskError, match="Plain has no module with a save_pretrained"):
        made.fit(Plain(), DataLoader(torch.ones(4, 1)))
    assert made.global_step == 0


def test_weights_that_stay_in_parts_are_refused_before_they_are_trained(base, trainer, example):
    strategy = {"name": "fsdp", "whole_at_end": False}
    made = trainer(callbacks=[lg.callbacks.ExportPretrained()], strategy=strategy, devices=2)
    with pytest.raises(ConfigError, match="ExportPretrained needs the full weights when fit ends, but whole_at_end"):
        made.fit(example.FineTuning(model=base), example.Documents(model=base, file="pairs.jsonl"))
    assert made.global_step == 0


def test_an_adapter_is_no_checkpoint_to_resume_from(base, trainer, example):
    task = example.FineTuning(model=base)
    data = example.Documents(model=base, file="pairs.jsonl")
    with pytest.raises(CheckpointError, match=r"base .*from_pretrained\("):
        trainer(max_epochs=1).fit(task, datamodule=data, ckpt_path="base")
