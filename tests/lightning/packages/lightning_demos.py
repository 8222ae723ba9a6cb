"""Lightning's own demos: its boring models with their data modules, and its language models on a made-up text."""

import importlib.util
import json
import random
import sys
from importlib.metadata import distributions
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


def demo(name):
    """Return a module of the installed demos, which import whatever `lightning` means here."""
    files = (
        distribution.locate_file(f"lightning/pytorch/demos/{name}.py")
        for distribution in distributions(name="lightning")
    )
    path = next(Path(file) for file in files if Path(file).is_file())
    spec = importlib.util.spec_from_file_location(f"lightning.pytorch.demos.{name}", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def trainer(**options):
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(**{**quiet, "max_epochs": 1, "enable_checkpointing": False, "deterministic": True, **options})


def weights_of(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).double().norm().item()


def seeded(kind):
    """Return a class of data module or module that makes the same random data whatever has drawn numbers before."""

    class Seeded(kind):
        def __init__(self):
            torch.manual_seed(2)
            super().__init__()

        def setup(self, stage):
            torch.manual_seed(3)
            super().setup(stage)

        def train_dataloader(self):
            torch.manual_seed(4)
            return super().train_dataloader()

    return Seeded


sys.modules["lightning.pytorch.demos"] = type(sys)("lightning.pytorch.demos")
boring, transformer, lstm = demo("boring_classes"), demo("transformer"), demo("lstm")
words = random.Random(0).choices("abcdefghij", k=2000)
Path("data").mkdir()
Path("data/wikitext-2.txt").write_text("\n".join(" ".join(words[start : start + 20]) for start in range(0, 2000, 20)))
exact = {}
for kind, data in (
    (boring.BoringModel, None),
    (boring.BoringModel, seeded(boring.BoringDataModule)()),
    (boring.ManualOptimBoringModel, seeded(boring.BoringDataModule)()),
    (boring.DemoModel, DataLoader(torch.arange(320.0).reshape(10, 32) / 320, batch_size=2)),
):
    pl.seed_everything(1, verbose=False)
    model, made = seeded(kind)(), trainer(limit_train_batches=4, limit_val_batches=2, limit_test_batches=2)
    made.fit(model, data) if data is not None else made.fit(model)
    name = f"{kind.__name__} {data is not None}"
    exact[name] = [weights_of(model), made.global_step, made.current_epoch]
    if isinstance(data, pl.LightningDataModule):
        made.validate(model, data, verbose=False), made.test(model, data, verbose=False)
        exact[f"{name} predicts"] = float(torch.cat(made.predict(model, data)).double().sum())
model, made = boring.BoringModel(), trainer(limit_train_batches=3, limit_val_batches=2)
made.fit(model, boring.BoringDataModuleNoLen())
exact["stream"] = [made.global_step, made.current_epoch]
for kind, options in ((transformer.LightningTransformer, {"limit_train_batches": 2}), (lstm.LightningLSTM, {})):
    pl.seed_everything(1, verbose=False)
    model, made = kind(vocab_size=transformer.WikiText2().vocab_size), trainer(**options)
    model.eval()  # no dropout, which would draw other numbers: fit leaves modules as they are
    made.fit(model)
    exact[kind.__name__] = [weights_of(model), made.global_step, model.training]
print(json.dumps({"exact": exact}))
