"""`legato export`: writes a checkpoint's weights as safetensors, or the task's `forward` with ONNX or torch.export.

The command reloads the exported model and compares its outputs with those of the task. `--format hf` calls the
model's `save_pretrained`.
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
"""Maximum difference between outputs, relative to the largest output. Different kernels round differently."""


def run_export(arguments: Namespace) -> None:
    """Run `legato export`. The suffix of OUT selects the format. If OUT is a folder, copy the full checkpoint."""
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
        print(f"full checkpoint  {target}")
    else:
        print(f"{export_weights(source, target)} tensors  {target}")


def path_of(word: str) -> Location:
    """Return the location of a checkpoint or run directory. `word` may be a path, a URL or a run name."""
    path = to_location(word)
    if isinstance(path, Address):
        return path
    with suppress(ConfigError):
        return path if path.exists() else find_run(word).path
    return path


def export_weights(source: Location, target: Path) -> int:
    """Write a checkpoint's weights to a new safetensors file using the task's parameter names. Return the tensor count.

    Args:
        source: A checkpoint, or a run directory or other folder whose newest complete checkpoint is used.

    Raises CheckpointError if there is no checkpoint, if a weight is not a plain tensor, or if `target` exists or does
    not end in .safetensors.
    """
    if target.suffix != ".safetensors":
        raise CheckpointError(
            f"{target}: expected a file name ending in .safetensors for weights, "
            f"{' or '.join(MODELS)} for a model, or a folder, {target.stem}/, for a full checkpoint."
        )
    storage.require_new(target)
    # averaged weights if there are any, as in an evaluation
    weights = averaged_weights(reading.read_checkpoint(find.resolve(source)))
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source} has no weights ('state_dict').")
    # a quantized weight consists of several tensors, stored under their checkpoint names
    weights = {name: tensor for key, value in weights.items() for name, tensor in _inner_tensors(key, value).items()}
    # dtypes such as complex that older readers of safetensors do not support
    unsupported = [name for name, value in weights.items() if getattr(value, "dtype", None) not in DTYPE_NAMES]
    if unsupported:
        raise CheckpointError(
            f"{source}: safetensors files can only store plain tensors. Not supported: {', '.join(unsupported[:4])}."
        )
    with storage.whole_file(target) as partial:
        write_tensors(HashedFile(partial), {name: torch.as_tensor(value) for name, value in weights.items()})
    return len(weights)


def _inner_tensors(name: str, value: Any) -> dict[str, Any]:
    """Return a weight's tensors, keyed by name. A weight is a dict if its class has not been imported."""
    if hasattr(value, "__tensor_flatten__"):
        value = {inner: getattr(value, inner) for inner in value.__tensor_flatten__()[0]}
    if not isinstance(value, dict):
        return {name: value}
    return {key: item for inner, v in value.items() for key, item in _inner_tensors(f"{name}.{inner}", v).items()}


def export_model(source: Location, partial: Path, words: Sequence[str]) -> None:
    """Write a checkpoint's model to `partial`, whose suffix selects ONNX or torch.export.

    Args:
        words: Files and overrides for the config that specifies the task. If there is no file, the config of the
            checkpoint's run is used.

    Raises ConfigError if a config or required package is missing, TaskError if `forward` is missing or cannot
    be exported, and CheckpointError if the outputs of the exported model differ from the task's.
    """
    task = trained_task(source, words, check=require_forward)
    arguments, options = example_input(task)
    # the first dimension of each tensor is dynamic, as far as forward allows
    sizes = torch.export.ShapesCollection()
    for tensor in tensors_in((arguments, options)):
        if tensor.dim():
            sizes[tensor] = {0: torch.export.Dim.AUTO}
    shapes = sizes.dynamic_shapes(task, arguments, options)
    write, compute = MODELS[partial.suffix]
    with torch.no_grad(), warnings.catch_warnings():
        expected = tensors_in(task(*arguments, **options))
        warnings.simplefilter("ignore")  # warnings from the exporters
        try:
            write(task, arguments, options, shapes, partial)
        except ImportError as error:
            raise ConfigError(f"Export to {partial.suffix} needs {error.name}: pip install 'legato[onnx]'.") from error
        except Exception as error:  # the exporters raise many exception types
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            raise TaskError(f"{type(task).__name__}.forward cannot be exported. {reason}") from error
        compare_outputs(expected, compute(partial, arguments, options))


def trained_task(source: Location, words: Sequence[str], check: Callable[[Any], None] = lambda task: None) -> Any:
    """Return the task in evaluation mode with a checkpoint's weights. `check(task)` is called before they are read."""
    checkpoint = find.resolve(source)
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    run = checkpoint.parent.parent
    stored = (copy_of(run) if isinstance(run, Address) else run) / CONFIG
    if not files and not stored.is_file():
        raise ConfigError(
            f"The run that saved {checkpoint} has no {CONFIG} to specify its task. Pass a config after the output "
            f"file: legato export CHECKPOINT OUT CONFIG.yaml"
        )
    task: Any = build_config(load_config([*([] if files else [str(stored)]), *words])).task
    check(task)  # first, since reading weights may take minutes
    task.configure_model()
    try:
        task.load_state_dict(averaged_weights(reading.read_checkpoint(checkpoint)))
    except RuntimeError as error:
        raise CheckpointError(f"The weights in {checkpoint} do not match the config's task: {error}") from error
    return task.eval()


def require_forward(task: Task) -> None:
    """Raise TaskError if a task has no `forward` or no example input."""
    if type(task).forward is Task.forward or task.example_input_array is None:
        raise TaskError(
            f"{type(task).__name__} has no {'forward' if type(task).forward is Task.forward else 'example_input_array'}"
            f". Exporting a model requires forward and example_input_array (a tensor, or a tuple or dict of arguments)."
        )


def example_input(task: Task) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for forward. Raises TaskError if forward does not accept them."""
    example: Any = task.example_input_array
    named = dict(example) if isinstance(example, Mapping) else {}
    positional = () if named else tuple(example) if isinstance(example, tuple) else (example,)
    if {tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()} == {1}:
        # torch.export treats a size of 1 as constant
        raise TaskError("example_input_array has one sample, so the model would accept only one. Use two samples.")
    try:
        inspect.signature(task.forward).bind(*positional, **named)
    except TypeError as error:
        raise TaskError(
            f"{type(task).__name__}.forward does not accept example_input_array: {error}. If the only argument "
            f"is a dict, wrap it in a tuple: (argument,)."
        ) from error
    return positional, named


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, in order."""
    tensors: list[Tensor] = []
    # returns the tensors themselves, since custom containers are rebuilt and may require tensors
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def compare_outputs(expected: Sequence[Tensor], exported: Sequence[Tensor]) -> None:
    """Raise CheckpointError if the outputs of the exported model differ from the task's."""
    largest = max((float(output.double().abs().max()) for output in expected if output.numel()), default=0.0)
    # relative to the largest output, since relative differences near zero are meaningless
    limit = TOLERANCE * max(1.0, largest)
    try:
        torch.testing.assert_close(list(exported), list(expected), rtol=0.0, atol=limit, check_dtype=False)
    except AssertionError as error:
        difference = " ".join(str(error).split())
        raise CheckpointError(f"The exported outputs differ from the task's. No file was kept. {difference}") from error


# --- formats ----------------------------------------------------------------------------------------------------------
def write_onnx(task: Task, arguments: tuple[Any, ...], options: dict[str, Any], shapes: Any, path: Path) -> None:
    """Write a task as an ONNX file."""
    import onnx  # noqa: F401  (raises ImportError with its name)

    program = torch.onnx.export(task, arguments, kwargs=options, dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert program is not None
    program.save(path)


def compute_onnx(path: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of an ONNX model."""
    from onnx.reference import ReferenceEvaluator

    program = ReferenceEvaluator(str(path))
    inputs = [tensor.numpy() for tensor in tensors_in((arguments, options))]
    outputs: Any = program.run(None, dict(zip(program.input_names, inputs, strict=True)))
    return [torch.as_tensor(output) for output in outputs]


def write_program(task: Task, arguments: tuple[Any, ...], options: dict[str, Any], shapes: Any, path: Path) -> None:
    """Write a task as a torch.export program."""
    torch.export.save(torch.export.export(task, arguments, options, dynamic_shapes=shapes, strict=False), path)


def compute_program(path: Path, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of a torch.export program."""
    return tensors_in(torch.export.load(path).module()(*arguments, **options))


MODELS: dict[str, tuple[Callable[..., None], Callable[..., list[Tensor]]]] = {
    ".onnx": (write_onnx, compute_onnx),
    ".pt2": (write_program, compute_program),
}
"""Functions that write a model and compute its outputs, by file suffix."""
