"""Defines the arguments of each command. The commands' own modules are separate, because many of them import torch."""

from argparse import ArgumentParser

from ..base.arguments import argument_texts
from ..base.errors import ConfigError, did_you_mean
from .config.read import MOVED, SECTION_OF, SECTIONS, ready_configs

A_RUN = "a run directory, or a run name such as digits for the newest run with this name in runs/"
STATES = ("running", "done", "failed", "preempted")
SORTS = ("time", "name", "best", "step", "duration")
CONFIGURED = ("fit", "validate", "test", "predict", "config", "sweep", "check", "plan")
"""Commands that accept config files and overrides."""
WITHOUT = {"fit": ("checkpoint",), **dict.fromkeys(("validate", "test", "predict"), ("resume",))}
"""Config sections that each command ignores."""
MORE = {
    "sweep": "legato sweep digits.yaml task.lr=1e-3,1e-2 task.channels=range(8,33,8) --jobs 2",
    "samples": "step=N: list the samples used in this optimizer step; replica=R: only those of this replica\n"
    "index=N: list the steps that used this sample; until=N: up to this step\n"
    "SECTION.KEY=VALUE: override a key of the run's config",
    "replay": "step=N until=M: the first and last steps to recompute; replica=R: report only this replica\n"
    "save=DIR: save a checkpoint there after the last step\nSECTION.KEY=VALUE: override a key of the run's config",
    "verify": "segments=N: number of segments between checkpoints to recompute (default: 5), or segments=all\n"
    "seed=N: random seed for choosing the segments; devices=N: number of processes\n"
    "SECTION.KEY=VALUE: override a key of the run's config",
    "export": "An exported model is the task's forward. The first dimension of example_input_array may vary. The "
    "command loads the written file and compares its outputs with the task's.",
    "clean": "empty: runs without steps, checkpoints or logged values\nfailed: runs that ended with an error\n"
    "checkpoints: in other runs, all checkpoints except the best and the newest\nRuns in progress are not touched.",
    "completion": 'bash: eval "$(legato completion bash)"\nzsh:  eval "$(legato completion zsh)"',
    "help": "legato help trainer.accumulate_grad_batches\nlegato help EarlyStopping",
}
"""Text at the end of each command's help: examples, and the KEY=VALUE arguments that it accepts."""


def add_arguments(parser: ArgumentParser, name: str) -> None:
    """Add the arguments of the command `name`."""
    add = parser.add_argument
    if name in CONFIGURED:
        words = add(
            "words",
            nargs="*",
            metavar="CONFIG.yaml|KEY=VALUE",
            help="config files, merged left to right, and overrides",
        )
        words.complete = {"bash": "_legato_config_words", "zsh": "_files"}  # type: ignore[attr-defined] # read by shtab
    if name in ("runs", "clean"):
        add("dir", metavar="DIR", nargs="?", default="runs", help="folder that contains the runs (default: runs)")
    if name in ("samples", "replay", "verify"):
        add("run", metavar="RUN", help=A_RUN)
        add("words", nargs="*", metavar="KEY=VALUE", help="steps and config overrides, explained below")
    if name == "new":
        add("name", metavar="NAME", help="folder to create; the project's package gets the same name")
    elif name == "sweep":
        add("--random", type=int, metavar="N", help="run N trials with random values")
        add("--optuna", type=int, metavar="N", help="run N trials with values chosen by Optuna")
        add(
            "--jobs",
            type=int,
            default=1,
            metavar="N",
            help="trials at a time, each on its own GPUs (default: 1)",
        )
        add("--metric", metavar="NAME", help="metric to rank trials by (default: the one monitored by a callback)")
        add("--mode", choices=("min", "max"), help="whether smaller or larger values are better")
    elif name == "plan":
        add("--memory", metavar="SIZE", help="check whether the run fits in this much device memory, such as 80GB")
    elif name == "samples":
        add("--show", action="store_true", help="also load and print the batches")
        add("--blame", action="store_true", help="print the loss and gradient norm of each sample, sorted")
    elif name == "replay":
        add("--debug", action="store_true", help="stop in pdb during the step")
        add("--operations", metavar="FILE.jsonl", help="record every operation of the first step for legato compare")
    elif name == "verify":
        add("--out", metavar="DIR", help="folder for the certificate (default: beside the run)")
    elif name == "export":
        add("checkpoint", metavar="CHECKPOINT", help=f"a checkpoint, or a run whose newest checkpoint is used: {A_RUN}")
        out = "file to write (x.safetensors, x.onnx or x.pt2), or folder for a full checkpoint or --format hf"
        add("out", metavar="OUT", help=out)
        add("config", metavar="CONFIG", nargs="*", default=[], help="config of the model (default: the run's config)")
        add("--format", choices=("hf",), help="hf: write a folder for from_pretrained")
        add("--shard-size", metavar="SIZE", help="with --format hf: maximum size of a weights file, such as 5GB")
    elif name == "convert":
        add("source", metavar="SOURCE", help=f"a checkpoint, or a run whose newest checkpoint is used: {A_RUN}")
        add("target", metavar="TARGET", help="Lightning file to write, x.ckpt")
    elif name == "completion":
        add("shell", metavar="SHELL", choices=["bash", "zsh", "tcsh"], help="bash, zsh or tcsh")
    elif name == "help":
        add("topic", metavar="TOPIC", help="a config key, a class that a config may name, or a command")
    else:
        _add_run_arguments(parser, name)


def _add_run_arguments(parser: ArgumentParser, name: str) -> None:
    add = parser.add_argument
    if name == "runs":
        add("--all", action="store_true", help="list all runs (default: the newest 50)")
        add("--state", choices=STATES, help="list only runs in this state")
        add("--sort", choices=SORTS, default="time", help="sort order; newest, best or longest last (default: time)")
    elif name == "show":
        add("run", metavar="RUN", nargs="?", default="runs", help=f"{A_RUN} (default: the newest run in runs/)")
    elif name == "compare":
        add("runs", metavar="RUN", nargs="+", help=f"two or more runs, each {A_RUN}; or two operation files, x.jsonl")
        add("--bits", action="store_true", help="find the first step, tensor and operation at which two runs differ")
    elif name == "clean":
        kinds = ["empty", "failed", "checkpoints"]
        add("--only", action="append", choices=kinds, help="delete only this kind; may be repeated")
        add("--dry-run", action="store_true", help="only list the folders to delete")
        add("--yes", action="store_true", help="delete without asking")


def epilog(name: str) -> str:
    """Return the text at the end of a command's help."""
    if name not in CONFIGURED:
        return MORE.get(name, "")
    sections = [f"  {key:<12}{text}" for key, text in SECTIONS.items() if key not in WITHOUT.get(name, ())]
    keys = [f"  {key}\n      {text}" for key, text in argument_texts().items() if key not in (*MOVED, *SECTION_OF)]
    return "\n".join([
        "A file may extend others: extends: [base.yaml]. ${trainer.max_epochs} refers to the value of that key.",
        f"Configs that come with Legato: {', '.join(ready_configs()) or 'none'}.",
        *(["", MORE[name]] if name in MORE else []),
        "", "config keys (legato help KEY explains a key):", *sections, "", "keys under trainer:", *keys,
    ])  # fmt: skip


def read_words(words: list[str], counts: tuple[str, ...], texts: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Split arguments into a dict of words such as step=3 and a list of overrides such as task.lr=1.

    Args:
        counts: Names of words whose values are integers.
        texts: Names of words whose values are text.

    Raises ConfigError for any other argument.
    """
    values: dict[str, str] = {}
    overrides: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in counts and not text.replace("_", "").isdecimal():
            raise ConfigError(f"{word}: expected an integer, such as {name}=1234.")
        if equals and name in (*counts, *texts):
            values[name] = text
        elif equals and "." in name:
            overrides.append(word)
        else:
            keys = [f"{key}=" for key in (*counts, *texts)]
            hint = did_you_mean(f"{name}=", keys)
            raise ConfigError(f"{word!r} is neither one of {', '.join(keys)} nor a config key.{hint}")
    return values, overrides
