"""An accelerator "emul", written in Python: a tensor on "emul:0" stands for memory of the host, where kernels run.

torch's Python backends forward the dispatch key, availability and the device module. What they lack, such as streams,
events and generators, are stand-ins here; CALLS holds the names of those that were asked for. The entry point
`torch.backends` (`install`) registers the device in every process that imports torch, fork servers included.
"""

import os
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME, HOST, CALLS = "emul", torch.device("cpu"), []
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
MEMORY = {}
"""The host's storage, by the address of the device storage that stands for it."""
BASES = {}
"""A device tensor, by the address of the host storage that it stands for: views share it."""
MIXES = ("copy_", "_to_copy", "_copy_from", "index", "_index_put_impl_", "index_put", "embedding")
"""Operations that take tensors of both devices."""
ENTERED, LIBRARIES = [], []


def install(folder):
    """Make `folder`, once it is on the path of modules, announce the device to torch."""
    info = folder / "emulated-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nemulated = emulated:register\n")


class DeviceModule:
    """torch.emul."""

    calls = CALLS

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        CALLS.append("set_device")

    def get_device_name(self, device=None):
        return "Emulated accelerator"

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        CALLS.append("manual_seed_all")

    def get_rng_state(self, device=NAME):
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state, device=NAME):
        CALLS.append("set_rng_state")

    def get_amp_supported_dtype(self):
        return [getattr(torch, name) for name in os.environ.get("EMUL_AUTOCAST", "float16,bfloat16").split(",")]

    def get_device_properties(self, device=None):
        return SimpleNamespace(total_memory=2**30)

    def max_memory_allocated(self, device=None):
        return 2**20

    def memory_stats(self, device=None):
        return {"allocated_bytes.all.current": 2**10}


class Event:
    """An event that has happened."""

    def record(self, stream=None):
        CALLS.append("record")

    def synchronize(self):
        CALLS.append("event.synchronize")

    def query(self):
        return True

    def elapsed_time(self, end_event):
        return 1.0


class Stream(torch.Stream):
    """A stream that has done all its work."""

    def __new__(cls, device=None, **options):
        return super().__new__(cls, device=torch.device(NAME, 0))

    def __enter__(self):
        ENTERED.append(self)
        CALLS.append("stream")

    def __exit__(self, *error):
        ENTERED.pop()

    def record_event(self, event=None):
        return Event()

    def wait_stream(self, stream):
        CALLS.append("wait_stream")

    def query(self):
        return True


def is_there(tensor):
    return tensor.device.type == NAME


def host_of(tensor):
    """Return the host's view of the memory that a device tensor stands for."""
    if not is_there(tensor):
        return tensor
    memory = MEMORY[tensor.untyped_storage()._cdata]
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def device_view(host):
    """Return a device tensor that stands for a tensor of the host; those of the same memory share a storage."""
    memory = host.untyped_storage()
    base = BASES.get(memory._cdata)
    # an address is used again once its storage is gone
    if base is None or base.dtype != host.dtype or MEMORY[base.untyped_storage()._cdata]._cdata != memory._cdata:
        with torch.inference_mode(False):  # tensors of training may share it later
            base = BASES[memory._cdata] = torch._C._acc.create_empty_tensor([0], host.dtype)
        MEMORY[base.untyped_storage()._cdata] = memory
    as_strided = torch.ops.aten.as_strided.default
    return as_strided.redispatch(META, base, host.size(), host.stride(), host.storage_offset())


def run_on_host(op, *args, **kwargs):
    """Run an operation on the host's memory; return what it returns, on the device."""
    name = op._schema.name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    mixed = any(map(is_there, tensors)) and any(tensor.dim() and not is_there(tensor) for tensor in tensors)
    if mixed and not name.startswith(MIXES):
        raise RuntimeError(f"aten::{name}: tensors on {HOST} and on {NAME}")
    args, kwargs = tree_map_only(Tensor, host_of, (args, kwargs))
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type != NAME
    if "device" in kwargs:
        kwargs["device"] = HOST
    kwargs.pop("pin_memory", None)
    output = op(*args, **kwargs)
    return output if to_host else tree_map_only(Tensor, device_view, output)


def kernel(op, *args, **kwargs):
    """Run any operation; one that writes into its arguments returns those."""
    output = run_on_host(op, *args, **kwargs)
    if not any(is_written(result) for result in op._schema.returns):
        return output
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    targets = [named[each.name] for each in op._schema.arguments if is_written(each) and each.name in named]
    several = isinstance(output, (tuple, list))
    for target, result in zip(targets, output if several else [output], strict=False):
        if target.size() != result.size():
            target.data = result
    return tuple(targets) if several else targets[0]


def is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def copy_from(source, target, non_blocking=False):
    CALLS.append(f"copy non_blocking={non_blocking}")
    host_of(target).copy_(host_of(source))
    return target


def on_host(function):
    return lambda *args: tree_map_only(Tensor, device_view, function(*tree_map_only(Tensor, host_of, args)))


def convolution_backward(gradient, inputs, weight, *rest):
    transposed, groups = rest[3], rest[5]
    biases = weight.shape[1] * groups if transposed else weight.shape[0]
    return torch.ops.aten.convolution_backward(gradient, inputs, weight, [biases], *rest)


def autocast_to(op, dtype=None):
    """Return what autocast does with an operation: tensors in this dtype, or in that of autocast."""

    def run(*args):
        to = dtype or torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            args = tree_map_only(Tensor, lambda tensor: tensor.to(to) if tensor.is_floating_point() else tensor, args)
            CALLS.append(f"{op.__name__} in {to}")
            return op(*args)

    return run


class Group(torch.distributed.ProcessGroup):
    """Collectives of device tensors, by gloo on the memory that they stand for."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo, self.name = torch.distributed.ProcessGroupGloo(store, rank, size, timeout), ""

    def getBackendName(self):
        return "emulccl"

    def _set_group_name(self, name):
        self.name = name

    def _set_group_desc(self, text):
        pass

    def _get_backend(self, device):
        return self.gloo

    def shutdown(self):
        pass

    @property
    def group_name(self):
        return self.name


def collective(name):
    """Return a method of Group that calls gloo's."""

    def call(self, *args):
        CALLS.append(name)
        getattr(self.gloo, name)(*tree_map_only(Tensor, host_of, args)).wait()
        future = torch.futures.Future()
        future.set_result(args[0])
        return torch._C._distributed_c10d._create_work_from_future(future)

    return call


for _name in ("broadcast", "allreduce", "allgather", "_allgather_base", "alltoall_base", "barrier"):
    setattr(Group, _name, collective(_name))


def make_group(store, rank, size, timeout):
    return Group(store, rank, size, timeout)


def register():
    """Register the device; torch calls it when it is imported."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(kernel, "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    aten.impl("convolution_overrideable", on_host(torch.ops.aten.convolution.default), "PrivateUse1")
    aten.impl("convolution_backward_overrideable", on_host(convolution_backward), "PrivateUse1")
    aten.impl("record_stream", lambda tensor, stream: CALLS.append("record_stream"), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("conv2d", "linear", "matmul", "cross_entropy_loss", "group_norm"):
        dtype = torch.float32 if name in ("cross_entropy_loss", "group_norm") else None
        aten.impl(name, autocast_to(getattr(torch.ops.aten, name).default, dtype), "AutocastPrivateUse1")
    LIBRARIES.extend([every, aten])  # what they register lives as long as they do
    torch.distributed.Backend.register_backend("emulccl", make_group, devices=[NAME])
    torch.Stream, torch.accelerator.current_stream = Stream, lambda device=None: (ENTERED or [Stream()])[-1]
    torch.accelerator.synchronize = lambda device=None: CALLS.append("synchronize")
