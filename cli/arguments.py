"""Arguments of each command, for argparse; apart from the commands, many of which import torch."""

from argparse import ArgumentParser

from ..base.arguments import argument_texts
from ..base.errors import ConfigError, did_you_mean
from .config.read import MOVED, SECTION_OF, SECTIONS, ready_configs

A_RUN = "a run directory, or a name below runs/, such as digits for its newest run"
STATES = ("running", "done", "failed", "preempted")
SORTS = ("time", "name", "best", "step", "duration")
CONFIGURED = ("fit", "validate", "test", "predict", "config", "sweep", "check", "plan")
"""Commands that take the files and keys of a config."""
WITHOUT = {"fit": ("checkpoint",), **dict.fromkeys(("validate", "test", "predict"), ("resume",))}
"""Sections of a config that mean nothing to a command."""
MORE = {
    "sweep": "legato sweep digits.yaml task.lr=1e-3,1e-2 task.channels=range(8,33,8) --jobs 2",
    "samples": "step=N: which samples this optimizer step had, replica=R: of this replica only\n"
    "index=N: in which steps this sample was seen, until=N: up to this step\n"
    "SECTION.KEY=VALUE: an override of the run's config",
    "replay": "step=N until=M: the first and the last step to compute again, replica=R: tell of this replica only\n"
    "save=DIR: where to write a checkpoint of the end\nSECTION.KEY=VALUE: an override of the run's config",
    "verify": "segments=N: how many segments between checkpoints to compute again (5), or segments=all\n"
    "seed=N: draw the segments of another verification; devices=N: on so many processes\n"
    "SECTION.KEY=VALUE: an override of the run's config",
    "export": "A model is the task's forward, with example_input_array as its input, whose first dimension may vary. "
    "The file is loaded again, and its outputs compared with the task's.",
    "clean": "empty: runs without a step, a checkpoint or a logged value; failed: runs that ended with an error;\n"
    "checkpoints: of other runs all but the best and the newest. A run that is under way is left alone.",
    "completion": 'bash: eval "$(legato completion bash)"\nzsh:  eval "$(legato completion zsh)"',
    "help": "legato help trainer.accumulate_grad_batches\nlegato help EarlyStopping",
}
"""What a command's help ends with: examples, and words in its own grammar."""


def add_arguments(parser: ArgumentParser, name: str) -> None:
    """Add the arguments of a command."""
    add = parser.add_argument
    if name in CONFIGURED:
        words = add(
            "words", nargs="*", metavar="CONFIG.yaml|KEY=VALUE", help="files, merged left to right, then values"
        )
        words.complete = {"bash": "_legato_config_words", "zsh": "_files"}  # type: ignore[attr-defined] # read by shtab
    if name in ("runs", "clean"):
        add("dir", metavar="DIR", nargs="?", default="runs", help="the folder with runs below it (runs)")
    if name in ("samples", "replay", "verify"):
        add("run", metavar="RUN", help=A_RUN)
        add("words", nargs="*", metavar="KEY=VALUE", help="steps, and overrides of the run's config")
    if name == "new":
        add("name", metavar="NAME", help="the folder to write, whose name becomes that of the project's package")
    elif name == "sweep":
        add("--random", type=int, metavar="N", help="N trials with random values")
        add("--optuna", type=int, metavar="N", help="N trials with values that Optuna chooses")
        add("--jobs", type=int, default=1, metavar="N", help="trials at a time (1), each with its GPUs")
        add("--metric", metavar="NAME", help="what is compared (what a callback monitors)")
        add("--mode", choices=("min", "max"), help="whether less or more of it is better")
    elif name == "plan":
        add("--memory", metavar="SIZE", help="tell whether it fits into a device, such as 80GB")
    elif name == "samples":
        add("--show", action="store_true", help="the batches, too, loaded again")
        add("--blame", action="store_true", help="loss and gradient norm of each sample of the step, the largest first")
    elif name == "replay":
        add("--debug", action="store_true", help="stop in pdb within the step")
        add("--operations", metavar="FILE.jsonl", help="record each operation of the first step, for legato compare")
    elif name == "verify":
        add("--out", metavar="DIR", help="where to write the certificate (beside the run)")
    elif name == "export":
        add("checkpoint", metavar="CHECKPOINT", help=f"a checkpoint, or the newest one of {A_RUN}")
        out = "the file to write: x.safetensors, x.onnx or x.pt2, or a folder, for a whole checkpoint or --format"
        add("out", metavar="OUT", help=out)
        add("config", metavar="CONFIG", nargs="*", default=[], help="config and overrides of the model (the run's own)")
        add("--format", choices=("hf",), help="hf: a folder that from_pretrained reads, not a file")
        add("--shard-size", metavar="SIZE", help="of hf: weights above it go into several files, such as 5GB")
    elif name == "convert":
        add("source", metavar="SOURCE", help=f"a checkpoint, or the newest one of {A_RUN}")
        add("target", metavar="TARGET", help="the file of Lightning's to write: x.ckpt")
    elif name == "completion":
        add("shell", metavar="SHELL", choices=["bash", "zsh", "tcsh"], help="bash, zsh or tcsh")
    elif name == "help":
        add("topic", metavar="TOPIC", help="a key, a class that a config may name, or a command")
    else:
        _add_of_runs(parser, name)


def _add_of_runs(parser: ArgumentParser, name: str) -> None:
    add = parser.add_argument
    if name == "runs":
        add("--all", action="store_true", help="all runs, not the newest 50")
        add("--state", choices=STATES, help="only runs in this state")
        add("--sort", choices=SORTS, default="time", help="order; the newest, best or longest comes last (time)")
    elif name == "show":
        add("run", metavar="RUN", nargs="?", default="runs", help=f"{A_RUN} (the newest below runs/)")
    elif name == "compare":
        add(
            "runs", metavar="RUN", nargs="+", help=f"two or more of these: {A_RUN}; or two files of operations, x.jsonl"
        )
        add("--bits", action="store_true", help="find the first step, tensor and operation at which two runs differ")
    elif name == "clean":
        kinds = ["empty", "failed", "checkpoints"]
        add("--only", action="append", choices=kinds, help="only this kind; may be given again")
        add("--dry-run", action="store_true", help="only list what would be deleted")
        add("--yes", action="store_true", help="delete without a question")


def epilog(name: str) -> str:
    """Return what the help of a command ends with."""
    if name not in CONFIGURED:
        return MORE.get(name, "")
    sections = [f"  {key:<12}{text}" for key, text in SECTIONS.items() if key not in WITHOUT.get(name, ())]
    keys = [f"  {key}\n      {text}" for key, text in argument_texts().items() if key not in (*MOVED, *SECTION_OF)]
    return "\n".join([
        "A file may extend others: extends: [base.yaml]. ${trainer.max_epochs} is replaced by that value.",
        f"Ready configs, found from any folder: {', '.join(ready_configs()) or 'none'}.",
        *(["", MORE[name]] if name in MORE else []),
        "", "keys of a config (legato help KEY tells more of one):", *sections, "", "keys under trainer:", *keys,
    ])  # fmt: skip


def read_words(words: list[str], counts: tuple[str, ...], texts: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Split words such as step=3 from overrides such as task.lr=1, and return both; those of `counts` are numbers.

    Raises ConfigError for other words.
    """
    values: dict[str, str] = {}
    overrides: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in counts and not text.replace("_", "").isdecimal():
            raise ConfigError(f"{word}: expected a whole number, such as {name}=1234.")
        if equals and name in (*counts, *texts):
            values[name] = text
        elif equals and "." in name:
            overrides.append(word)
        else:
            keys = [f"{key}=" for key in (*counts, *texts)]
            hint = did_you_mean(f"{name}=", keys)
            raise ConfigError(f"{word!r} is neither one of {', '.join(keys)} nor a key of the config.{hint}")
    return values, overrides
