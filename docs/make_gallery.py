"""Draws docs/images/examples/NAME.png for docs/examples.md: python docs/make_gallery.py [--runs FOLDER].

Without a folder, it first trains the examples, which takes a few minutes. It needs matplotlib, and transformers and
peft for the two language model examples.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import legato

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "images" / "examples"
CURVES = {
    "image_classification": ("val/acc", "accuracy"),
    "characters": ("train/loss", "loss"),
    "contrastive": ("train/loss", "loss"),
    "tabular": ("val/f1", "F1 of the rare class"),
    "reinforcement": ("play/moves_until_fall", "moves until it falls"),
    "finetune": ("val/loss", "validation loss"),
    "transformers_finetuning": ("val/acc", "accuracy"),
}
"""The metric to plot for each example, and its axis label."""
DRAWINGS = {"masked_autoencoder": "drawn", "gan": "drawn"}
"""Examples that log images, and the TensorBoard tag of the images."""


def train(folder: Path) -> None:
    """Train each example in a copy of the examples folder."""
    shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
    for name in (*CURVES, *DRAWINGS):
        config = [f"{name}.yaml", "trainer.log_every_n_steps=5", "trainer.devices=1"]
        words = ["-m", "legato", "fit", *config] if (folder / f"{name}.yaml").exists() else [f"{name}.py"]
        subprocess.run([sys.executable, *words], cwd=folder, check=True)


def draw(run: Path, name: str) -> None:
    """Draw and save the picture for a run."""
    figure, axes = pyplot.subplots(figsize=(3.2, 2.2), layout="constrained")
    if name in DRAWINGS:
        events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload()
        newest = events.Images(DRAWINGS[name])[-1].encoded_image_string
        axes.imshow(pyplot.imread(io.BytesIO(newest)), cmap="gray", interpolation="nearest")
        axes.axis("off")
    else:
        metric, label = CURVES[name]
        metrics = legato.runs.open(run).metrics
        logged = numpy.isfinite(metrics[metric])
        axes.plot(metrics["step"][logged], metrics[metric][logged], color="#3f51b5")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
    figure.savefig(OUT / f"{name}.png", dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Train the examples if necessary, and draw their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder with a run of each example")
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.runs is None:
            train(Path(folder))
        runs = options.runs or Path(folder) / "runs"
        for name in (*CURVES, *DRAWINGS):
            draw(runs / name / "version_0", name)


if __name__ == "__main__":
    main()
