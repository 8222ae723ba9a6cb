"""Export of a trained task's `forward` as an ONNX file or a program of torch.export, each loaded again and compared."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, ConfigError, TaskError
from ..base.run_names import CONFIG
from ..tasks.task import Task
from ..trainer.checkpoints import find, reading
from ..trainer.resume.rebuild import averaged_weights
from .config.build import build_config
from .config.check import load_config

if TYPE_CHECKING:
    from .config.build import ConfiguredRun

TOLERANCE = 1e-4
"""Greatest difference of outputs, relative to the largest of them: other kernels round otherwise."""
LOADER_NAMES = ("predict_dataloader", "test_dataloader", "val_dataloader", "train_dataloader")
STAGE_OF = {"predict": "predict", "test": "test", "val": "validate", "train": "fit"}


def export_model(source: Path, partial: Path, words: Sequence[str]) -> str:
    """Write the model of a checkpoint to `partial`, by whose suffix it is an ONNX file or a program of torch.export.

    words: files and overrides of the config that names the task; without a file that of the checkpoint's run.

    Returns what was written. Raises ConfigError if no config is known or a package is missing, TaskError if the task's
    `forward` is missing or cannot be exported, CheckpointError if the file computes something else than the task.
    """
    task, run = trained_task(source, words)
    arguments, options = example_input(task, run)
    write, compute = WRITERS[partial.suffix]
    with torch.no_grad():
        expected = tensors_in(task(*arguments, **options))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the exporters, about themselves
                write(task, arguments, options, partial)
        except ImportError as error:
            raise ConfigError(f"{partial.suffix} needs {error.name}: pip install 'legato[onnx]'.") from error
        except Exception as error:  # the exporters raise many kinds
            lines = [line for line in str(error).splitlines() if line.strip()]
            told = f"{type(error).__name__}: {lines[0] if lines else ''}"
            raise TaskError(f"{type(task).__name__}.forward cannot be exported. {told}") from error
        found = compute(partial, arguments, options)
    compare_outputs(expected, found)
    shapes = ", ".join(str(tuple(one.shape)) for one in tensors_in((arguments, options)))
    return f"forward{shapes if shapes.startswith('(') else f'({shapes})'}, outputs compared"


def trained_task(source: Path, words: Sequence[str]) -> "tuple[Task, ConfiguredRun]":
    """Return the task with the weights of a checkpoint, in evaluation mode."""
    checkpoint = find.resolve(source)
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    own = checkpoint.parent.parent / CONFIG
    if not files and not own.is_file():
        raise ConfigError(
            f"There is no {CONFIG} beside {checkpoint}, which would name its task: give the config after the file."
        )
    run = build_config(load_config([*([] if files else [str(own)]), *words]))
    task: Any = run.task
    if type(task).forward is Task.forward:
        raise TaskError(f"{type(task).__name__} has no forward, which is what is exported: define forward(self, x).")
    task.configure_model()
    try:
        task.load_state_dict(averaged_weights(reading.read_checkpoint(checkpoint)))
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint} has other weights than the config's task: {error}") from error
    return task.eval(), run


def example_input(task: Task, run: "ConfiguredRun") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for forward: `example_input_array`, else the inputs of the data's first batch.

    A single sample is doubled, since a batch of one would be exported as the only size.
    """
    given = task.example_input_array
    if given is None:
        batch = first_batch(task, run)
        given = batch[0] if isinstance(batch, list | tuple) else batch
    found = doubled(given)
    positional, named = ((), dict(found)) if isinstance(found, Mapping) else ((found,), {})
    positional = tuple(found) if isinstance(found, tuple) else positional
    try:
        inspect.signature(task.forward).bind(*positional, **named)
    except TypeError as error:
        source = "example_input_array" if task.example_input_array is not None else "the first batch of the data"
        held = f"the keys {', '.join(map(repr, named))}" if named else f"{len(positional)} inputs"
        raise TaskError(
            f"{type(task).__name__}.forward does not take what {source} holds, {held}: {error}. Set "
            f"example_input_array in the task: a tensor, a tuple of forward's arguments, or a dict of them by name; an "
            f"argument that is a dict itself stands in a tuple, (dict,)."
        ) from error
    return positional, named


def first_batch(task: Task, run: "ConfiguredRun") -> Any:
    """Return the first batch of the data. Raises ConfigError if there is none."""
    for owner in filter(None, (run.data, task)):
        source: Any = owner
        source.prepare_data()
        for name in LOADER_NAMES:
            source.setup(STAGE_OF[name.partition("_")[0]])
            found: Any = getattr(source, name)
            loader = found() if callable(found) else None
            loader = loader[0] if isinstance(loader, list | tuple) and loader else loader
            if loader is not None:
                return next(iter(loader))
    raise ConfigError("There is no input to export with: set example_input_array in the task, or give it data.")


def doubled(given: Any) -> Any:
    """Return inputs with their first dimension repeated where it is 1 in all of them."""
    found = tensors_in(given)
    if not found or any(one.dim() == 0 or one.shape[0] != 1 for one in found):
        return given
    return mapped(given, lambda one: torch.cat([one, one]))


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return nested lists, tuples and mappings with a function called for each tensor; None in place of all else."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: mapped(one, function) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(one, function) for one in value)
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, in order."""
    found: list[Tensor] = []
    mapped(value, found.append)
    return found


def sizes_that_vary(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return for torch.export which sizes may be others: the first of each tensor, as far as forward allows."""
    auto = torch.export.Dim.AUTO

    def first(one: Tensor) -> Any:
        return {0: auto} if one.dim() else None

    return mapped(arguments, first) if not options else mapped(options, first)


def write_onnx(task: Task, arguments: tuple[Any, ...], options: dict[str, Any], path: Path) -> None:
    """Write an ONNX file."""
    import onnx  # noqa: F401  (named where it is missing)

    shapes = sizes_that_vary(arguments, options)
    found = torch.onnx.export(task, arguments, kwargs=options, dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert found is not None
    found.save(path)


def compute_onnx(path: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of an ONNX file, by onnxruntime where it is installed, else by onnx's own evaluator."""
    inputs = [one.numpy() for one in tensors_in((arguments, options))]
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(path))
        names = session.input_names
    return [torch.as_tensor(one) for one in session.run(None, dict(zip(names, inputs, strict=True)))]


def write_program(task: Task, arguments: tuple[Any, ...], options: dict[str, Any], path: Path) -> None:
    """Write a program of torch.export."""
    shapes = sizes_that_vary(arguments, options)
    torch.export.save(torch.export.export(task, arguments, options, dynamic_shapes=shapes, strict=False), path)


def compute_program(path: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of a program of torch.export."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch 2.10, of what it has read
        program = torch.export.load(path)
    return tensors_in(program.module()(*arguments, **options))


def compare_outputs(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raise CheckpointError if the file's outputs are not the task's."""
    if [tuple(one.shape) for one in expected] != [tuple(one.shape) for one in found]:
        shapes = [tuple(one.shape) for one in found], [tuple(one.shape) for one in expected]
        raise CheckpointError(f"The exported file returns shapes {shapes[0]}, the task {shapes[1]}. It was not kept.")
    for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        wanted = ours.double()
        limit = TOLERANCE * max(1.0, float(wanted.abs().max())) if wanted.numel() else 0.0
        worst = float((wanted - theirs.double()).abs().max()) if wanted.numel() else 0.0
        if not worst <= limit:
            raise CheckpointError(
                f"Output {index} of the exported file differs from the task's by {worst:.3g}, more than rounding "
                f"({limit:.3g}). It was not kept."
            )


WRITERS: dict[str, tuple[Callable[..., None], Callable[..., list[Tensor]]]] = {
    ".onnx": (write_onnx, compute_onnx),
    ".pt2": (write_program, compute_program),
}
"""Functions that write a file and compute its outputs, by suffix."""
