"""`legato export`: a checkpoint's weights as safetensors, or its task's `forward` as ONNX or a program of torch.export.

Such a program is loaded again, and its outputs are compared with the task's. `--format hf` has a model of the Hub write
itself.
"""

import inspect
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, ConfigError, TaskError
from ..base.location import Address, Location, to_location
from ..base.pretrained import save_pretrained
from ..base.run_names import CONFIG
from ..base.tensors import map_tensors
from ..tasks.task import Task
from ..trainer.checkpoints import commit, find, reading, storage
from ..trainer.checkpoints.hashed import HashedFile
from ..trainer.checkpoints.tensors import DTYPE_NAMES, write_tensors
from ..trainer.resume.rebuild import averaged_weights
from ..trainer.runs.directory import find_run
from ..trainer.runs.remote import copy_of
from .config.build import build_config
from .config.check import load_config

TOLERANCE = 1e-4
"""Greatest difference of outputs, relative to the largest of them: other kernels round otherwise."""


def run_export(arguments: Namespace) -> None:
    """Run `legato export`: the suffix of the file says what it is; a folder is a whole checkpoint."""
    source, target = path_of(arguments.checkpoint), Path(arguments.out)
    if arguments.format == "hf":
        storage.require_new(target)
        task = trained_task(source, arguments.config)
        for folder in save_pretrained(task, target.absolute(), arguments.shard_size):
            print(f"{type(task).__name__} for from_pretrained  {folder}")
    elif target.suffix in MODELS:
        storage.require_new(target)
        with storage.whole_file(target) as partial:
            export_model(source, partial, arguments.config)
        print(f"forward, outputs compared  {target}")
    elif arguments.out.endswith("/") or not target.suffix:
        storage.require_new(target)
        commit.copy_whole(find.resolve(source), target.absolute())
        print(f"whole checkpoint  {target}")
    else:
        print(f"{export_weights(source, target)} tensors  {target}")


def path_of(word: str) -> Location:
    """Return the place of a checkpoint or run directory that a word is, or that of the run which is called so."""
    path = to_location(word)
    if isinstance(path, Address):
        return path
    with suppress(ConfigError):
        return path if path.exists() else find_run(word).path
    return path


def export_weights(source: Location, target: Path) -> int:
    """Write a checkpoint's weights to a new safetensors file under the task's own names; return the number of tensors.

    `source`: a checkpoint, or a run directory or folder, of which the newest complete one is taken; written by any
    number of processes. Raises CheckpointError if there is none, if weights are not plain tensors, or if `target`
    exists or has another suffix.
    """
    if target.suffix != ".safetensors":
        raise CheckpointError(
            f"{target}: the file is one of safetensors, and its name must end in .safetensors. The whole model is "
            f"written to {' or '.join(f'x{suffix}' for suffix in MODELS)}. A whole checkpoint goes "
            f"to a folder, {target.stem}/."
        )
    storage.require_new(target)
    # those of an averaging callback where there are some: they are what evaluation uses
    weights = averaged_weights(reading.read_checkpoint(find.resolve(source)))
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source} holds no weights ('state_dict').")
    # those of a quantized weight under the names that they have in a checkpoint
    weights = {name: part for key, value in weights.items() for name, part in _parts(key, value).items()}
    # types such as complex numbers that older readers of safetensors do not know
    odd = [name for name, value in weights.items() if getattr(value, "dtype", None) not in DTYPE_NAMES]
    if odd:
        raise CheckpointError(
            f"{source}: {', '.join(odd[:4])} cannot be stored in a safetensors file: not a plain tensor."
        )
    with storage.whole_file(target) as partial:
        write_tensors(HashedFile(partial), {name: torch.as_tensor(value) for name, value in weights.items()})
    return len(weights)


def _parts(name: str, value: Any) -> dict[str, Any]:
    """Return the tensors that a weight is made of, which are in a dict where its class is not imported."""
    if hasattr(value, "__tensor_flatten__"):
        value = {inner: getattr(value, inner) for inner in value.__tensor_flatten__()[0]}
    if not isinstance(value, dict):
        return {name: value}
    return {key: part for inner, each in value.items() for key, part in _parts(f"{name}.{inner}", each).items()}


def export_model(source: Location, partial: Path, words: Sequence[str]) -> None:
    """Write the model of a checkpoint to `partial`, by whose suffix it is an ONNX file or a program of torch.export.

    words: files and overrides of the config that names the task; without a file that of the checkpoint's run.

    Raises ConfigError if no config is known or a package is missing, TaskError if the task's `forward` is missing or
    cannot be exported, CheckpointError if the file computes something else than the task.
    """
    task = trained_task(source, words, check=require_forward)
    arguments, options = example_input(task)
    # the first size of each tensor may be another one, as far as forward allows
    sizes = torch.export.ShapesCollection()
    for tensor in tensors_in((arguments, options)):
        if tensor.dim():
            sizes[tensor] = {0: torch.export.Dim.AUTO}
    shapes = sizes.dynamic_shapes(task, arguments, options)
    write, compute = MODELS[partial.suffix]
    with torch.no_grad(), warnings.catch_warnings():
        expected = tensors_in(task(*arguments, **options))
        warnings.simplefilter("ignore")  # of the exporters, about themselves and about what they have read
        try:
            write(task, arguments, options, shapes, partial)
        except ImportError as error:
            raise ConfigError(f"{partial.suffix} needs {error.name}: pip install 'legato[onnx]'.") from error
        except Exception as error:  # the exporters raise many kinds
            lines = [line for line in str(error).splitlines() if line.strip()]
            told = f"{type(error).__name__}: {lines[0] if lines else ''}"
            raise TaskError(f"{type(task).__name__}.forward cannot be exported. {told}") from error
        compare_outputs(expected, compute(partial, arguments, options))


def trained_task(source: Location, words: Sequence[str], check: Callable[[Any], None] = lambda task: None) -> Any:
    """Return the task with the weights of a checkpoint, in evaluation mode; `check` sees it before these are read."""
    checkpoint = find.resolve(source)
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    run = checkpoint.parent.parent
    stored = (copy_of(run) if isinstance(run, Address) else run) / CONFIG
    if not files and not stored.is_file():
        raise ConfigError(
            f"There is no {CONFIG} beside {checkpoint}, which would name its task: give the config after the file."
        )
    task: Any = build_config(load_config([*([] if files else [str(stored)]), *words])).task
    check(task)  # before weights are read, which may take minutes
    task.configure_model()
    try:
        task.load_state_dict(averaged_weights(reading.read_checkpoint(checkpoint)))
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint} has other weights than the config's task: {error}") from error
    return task.eval()


def require_forward(task: Task) -> None:
    """Raise TaskError for a task without a forward, or without an input for it."""
    if type(task).forward is Task.forward or task.example_input_array is None:
        raise TaskError(
            f"{type(task).__name__} has no {'forward' if type(task).forward is Task.forward else 'example_input_array'}"
            f". Its forward is exported, with example_input_array as input: a tensor, a tuple of arguments, or a dict "
            f"of them."
        )


def example_input(task: Task) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments for forward. Raises TaskError where it does not take them."""
    example: Any = task.example_input_array
    named = dict(example) if isinstance(example, Mapping) else {}
    positional = () if named else tuple(example) if isinstance(example, tuple) else (example,)
    if {tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()} == {1}:
        # torch.export takes a size of 1 for the only one
        raise TaskError("example_input_array holds a single sample, and forward would take no other number: give two.")
    try:
        inspect.signature(task.forward).bind(*positional, **named)
    except TypeError as error:
        raise TaskError(
            f"{type(task).__name__}.forward does not take example_input_array: {error}. An argument that is a dict "
            f"itself stands in a tuple: (dict,)."
        ) from error
    return positional, named


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, in order."""
    tensors: list[Tensor] = []
    # containers of classes of their own are made anew, and may want tensors in them
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def compare_outputs(expected: Sequence[Tensor], exported: Sequence[Tensor]) -> None:
    """Raise CheckpointError if the file's outputs are not the task's."""
    largest = max((float(output.double().abs().max()) for output in expected if output.numel()), default=0.0)
    # of the largest output: near zero a relative difference says nothing
    limit = TOLERANCE * max(1.0, largest)
    try:
        torch.testing.assert_close(list(exported), list(expected), rtol=0.0, atol=limit, check_dtype=False)
    except AssertionError as error:
        told = " ".join(str(error).split())
        raise CheckpointError(f"The file computes something else than the task, and was not kept. {told}") from error


# --- formats ----------------------------------------------------------------------------------------------------------
def write_onnx(task: Task, arguments: tuple[Any, ...], options: dict[str, Any], shapes: Any, path: Path) -> None:
    """Write an ONNX file."""
    import onnx  # noqa: F401  (named where it is missing)

    program = torch.onnx.export(task, arguments, kwargs=options, dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert program is not None
    program.save(path)


def compute_onnx(path: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of an ONNX file."""
    from onnx.reference import ReferenceEvaluator

    program = ReferenceEvaluator(str(path))
    inputs = [tensor.numpy() for tensor in tensors_in((arguments, options))]
    outputs: Any = program.run(None, dict(zip(program.input_names, inputs, strict=True)))
    return [torch.as_tensor(output) for output in outputs]


def write_program(task: Task, arguments: tuple[Any, ...], options: dict[str, Any], shapes: Any, path: Path) -> None:
    """Write a program of torch.export."""
    torch.export.save(torch.export.export(task, arguments, options, dynamic_shapes=shapes, strict=False), path)


def compute_program(path: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of a program of torch.export."""
    return tensors_in(torch.export.load(path).module()(*arguments, **options))


MODELS: dict[str, tuple[Callable[..., None], Callable[..., list[Tensor]]]] = {
    ".onnx": (write_onnx, compute_onnx),
    ".pt2": (write_program, compute_program),
}
"""By suffix, functions that write a model and compute its outputs."""
