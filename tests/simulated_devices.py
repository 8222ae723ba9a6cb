"""Devices that are not there: tensors on the CPU that know which device they are meant to be on.

Inside of `SimulatedDevices()` a tensor can be moved to `DEVICES[0]` or `DEVICES[1]` and says that it is there, and an
operation on tensors of two devices fails as it does on real ones. What is computed is the same as on the CPU, to the
bit. Only what is called from Python is seen; autograd runs backward on its own.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
DEVICES = torch.device("privateuseone", 0), torch.device("privateuseone", 1)
READS_ANY = {
    "__get__",
    "__set__",
    "__repr__",
    "detach",
    "item",
    "tolist",
    "__setstate__",
    "_has_compatible_shallow_copy_type",
}


class SimulatedDevices(TorchFunctionMode):
    """While it is entered there are two more devices. `moves` notes where tensors went: (from, to, shape)."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        name = getattr(function, "__name__", "")
        if function == Tensor.device.__get__:
            return device_of(arguments[0])
        if function == Tensor.data.__set__:
            put(arguments[0], device_of(arguments[1]))
            return function(*arguments)
        if function == Tensor.grad.__get__:
            return put(function(*arguments), device_of(arguments[0]))
        if function in (Tensor.to, Tensor.cpu, Tensor.copy_):
            return self.move(function, *arguments, **options)
        if name.startswith("_foreach"):  # each pair of tensors for itself, as torch does where devices differ
            output = function(*arguments, **options)
            return [
                put(result, device_of(tensor)) for result, tensor in zip(output or (), arguments[0], strict=False)
            ] or output
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        wanted = options.get("device")
        if wanted is not None and torch.device(wanted) in DEVICES:
            options = {**options, "device": "cpu"}
            return mark(function(*arguments, **options), torch.device(wanted))
        devices = {device_of(tensor) for tensor in tensors if tensor.ndim}
        if len(devices) > 1 and name not in READS_ANY:
            raise RuntimeError(
                f"{name}: expected all tensors on the same device, but found {sorted(map(str, devices))}"
            )
        home = next(iter(devices), None) or next((device_of(tensor) for tensor in tensors), CPU)
        return mark(function(*arguments, **options), home)

    def move(self, function, tensor, *arguments, **options):
        if function is Tensor.copy_:
            return function(tensor, *arguments, **options)
        places = [
            argument for argument in [*arguments, options.get("device")] if isinstance(argument, (torch.device, str))
        ]
        target = CPU if function is Tensor.cpu else torch.device(places[0]) if places else device_of(tensor)
        kinds = [argument for argument in [*arguments, options.get("dtype")] if isinstance(argument, torch.dtype)]
        if target == device_of(tensor):
            return put(tensor.to(*kinds) if kinds and tensor.dtype != kinds[0] else tensor, target)
        self.moves.append((device_of(tensor), target, tuple(tensor.shape)))
        moved = torch.clone(tensor)
        return put(moved.type(kinds[0]) if kinds else moved, target)


def device_of(tensor):
    """Return where a tensor is meant to be."""
    return tensor.__dict__.get("simulated", CPU)


def put(tensor, device):
    """Say that a tensor is on a device."""
    if tensor is not None:
        tensor.__dict__["simulated"] = device
    return tensor


def mark(output, device):
    """Say that all tensors of an output are on a device."""
    return tree_map(lambda leaf: put(leaf, device) if isinstance(leaf, Tensor) else leaf, output)
