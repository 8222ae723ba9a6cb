"""Run by test_emulated.py, with the emulated device in sight: cases, whose results are written as JSON."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks import Checkpoint, DeviceStatsMonitor
from legato.tasks.digits import DigitImages, Digits, DigitsData
from legato.trainer import accelerators
from legato.trainer.data.randomness import generator_states, seed_generators, set_generators
from legato.trainer.processes.devices import find_devices

accelerators.VISIBLE["emul"] = "EMUL_VISIBLE"


class Small(Digits):
    """Digits without dropout, whose random numbers a Python backend cannot draw on the device."""

    def __init__(self):
        super().__init__(channels=4, dropout=0.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class NoisyDigits(DigitsData):
    """Random images in place of the digits."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(320) % 10
        images = torch.randn(320, 1, 8, 8, generator=generator) + labels[:, None, None, None] / 5
        self.parts = {
            "train": DigitImages(images[:256], labels[:256], 1),
            "val": DigitImages(images[256:], labels[256:]),
        }


def fit(accelerator, folder, steps=6, resume=None, **options):
    """Train; return what is the same on every device, and where it was computed."""
    torch.manual_seed(3)
    task = Small()
    arguments = {"max_steps": steps, "limit_val_batches": 2, "val_check_interval": 3, "seed": 3, "log_every_n_steps": 3}
    arguments["save_code"] = False
    arguments["callbacks"] = [Checkpoint(asynchronous=True), DeviceStatsMonitor(cpu_stats=False)]
    trainer = lg.Trainer(
        accelerator=accelerator, default_root_dir=folder, enable_progress_bar=False, **arguments, **options
    )
    trainer.fit(task, NoisyDigits(), resume=resume)
    values = {name: round(float(value), 5) for name, value in trainer.callback_metrics.items()}
    return {
        "metrics": values,
        "weights": {name: tensor.detach().cpu().double().sum().item() for name, tensor in task.state_dict().items()},
        "device": str(next(task.parameters()).device),
        "world_size": trainer.world_size,
        "calls": sorted(set(torch.emul.calls)),
        "directory": str(trainer.run_dir),
    }


def choice():
    """Which device is found, and what is said where it is asked for wrongly."""
    answers = {wanted: str(find_devices(wanted, "auto")[0]) for wanted in ("auto", "emul", "emul:0", "cpu")}
    try:
        accelerators.find_kind("cuda")
    except ConfigError as error:
        answers["error"] = str(error)
    device = torch.device("emul", 0)
    answers["memory"] = accelerators.memory_of(device), accelerators.peak_memory(device), accelerators.pins_memory()
    return answers | {"name": accelerators.name_of(device), "backend": accelerators.backend_for(device)}


def refused(trainers):
    """Return, for the arguments of each trainer, why it is not made, or does not train."""
    return [refusal(arguments) for arguments in trainers]


def refusal(arguments):
    try:
        trainer = lg.Trainer(max_steps=1, logger=False, enable_checkpointing=False, **arguments)
        trainer.fit(Small(), NoisyDigits())
    except ConfigError as error:
        return str(error)
    return ""


def generators():
    """The device's generators are keyed and put back with the others."""
    states = generator_states()
    seed_generators(7)
    set_generators(states)
    return {"states": len(states[3]), "calls": list(torch.emul.calls)}


def mixed():
    """A tensor on the wrong device is refused by torch."""
    layer = nn.Linear(2, 2).to("emul")
    try:
        layer(torch.ones(1, 2))
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


CASES = {"fit": fit, "choice": choice, "refused": refused, "generators": generators, "mixed": mixed}


def result(name, arguments, variables):
    """Return what a case returns under these environment variables, and where it fails, why."""
    torch.emul.calls.clear()
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return {"result": CASES[name](**arguments)}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    cases, out = sys.argv[1:]
    results = {key: result(*case) for key, case in json.loads(cases).items()}
    Path(out).write_text(json.dumps(results))
    for each in results.values():
        print(each.get("error", ""), file=sys.stderr, end="")
    sys.exit(any("error" in each for each in results.values()))
