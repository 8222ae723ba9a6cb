"""neural-amp-modeler: a linear filter trained on made-up recordings; the best checkpoint is exported."""

import json
import wave
from pathlib import Path

import matplotlib
import numpy as np
from nam.train.full import main


def write(path, values):
    with wave.open(path, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(3)
        file.setframerate(48000)
        file.writeframes(b"".join(int(value * 2**22).to_bytes(3, "little", signed=True) for value in values))


matplotlib.use("Agg")
played = np.random.default_rng(0).uniform(-0.5, 0.5, 12000)
played[:50] = 0
write("played.wav", played)
write("heard.wav", np.tanh(2 * played) / 2)
data = {
    "train": {"start": None, "stop": -4000, "ny": 1024},
    "validation": {"start": -4000, "stop": None, "ny": None},
    "common": {"x_path": "played.wav", "y_path": "heard.wav", "delay": 0, "require_input_pre_silence": None},
}
model = {
    "net": {"name": "Linear", "config": {"receptive_field": 8}},
    "loss": {"val_loss": "esr"},
    "optimizer": {"lr": 0.01},
    "lr_scheduler": {"class": "ExponentialLR", "kwargs": {"gamma": 0.993}},
}
learning = {
    "train_dataloader": {"batch_size": 2, "drop_last": True},
    "val_dataloader": {},
    "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "enable_progress_bar": False},
}
folder = Path("out")
folder.mkdir()
main(data, model, learning, folder, no_show=True, make_plots=False)
exported = json.loads(next(folder.glob("*.nam")).read_text())
saved = sorted(path.name for path in folder.glob("lightning_logs/version_0/checkpoints/*"))
print(json.dumps({"exact": {"weights": exported["weights"], "saved": saved}}))
