"""Kinds of devices that this machine lacks, and the rule that a single file names kinds."""

import io
import re
import tokenize
from types import SimpleNamespace

import pytest
import torch
from pages import ROOT
from tiny import Tiny, make_loader

import legato as lg
from legato.base.errors import ConfigError
from legato.trainer import accelerators
from legato.trainer.optimization.precision import Precision
from legato.trainer.processes.layout import describe_layout
from legato.trainer.strategies.strategy import refuse_duplicates

KINDS = r"\b(cuda|mps|xpu|npu|hpu|mtia|privateuse\w*|is_cuda|is_mps|is_xpu|nccl|xccl|hccl|rocm|hip)\b"
NAMED = {
    "base/arguments.py": r'AcceleratorName = Literal\[.*|"devices": .*',  # the words of a config, known without torch
    "trainer/switches.py": r"backends\.cuda|cuda\.matmul",  # where torch keeps the switches of its libraries
}
MPS, XPU, GPU = torch.device("mps", 0), torch.device("xpu", 0), torch.device("cuda", 0)


def code_of(path):
    """Return the source without comments, docstrings and other strings that stand alone."""
    text = path.read_text()
    lines, before = text.splitlines(keepends=True), tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        stands_alone = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.COMMENT or stands_alone:
            for row in range(token.start[0], token.end[0] + 1):
                begin = token.start[1] if row == token.start[0] else 0
                end = token.end[1] if row == token.end[0] else len(lines[row - 1])
                lines[row - 1] = lines[row - 1][:begin] + lines[row - 1][end:]
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type
    return "".join(lines)


def test_one_file_names_kinds_of_devices():
    """What a strategy or callback asks of a device it asks accelerators.py, which asks torch."""
    places = []
    for room in ("base", "callbacks", "tasks", "trainer", "lab"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            code = re.sub(NAMED.get(name, "$^"), "", code_of(path))
            if name != "trainer/accelerators.py":
                places += [f"{name}: {word}" for word in re.findall(KINDS, code)]
    assert places == []


def test_exceptions_are_needed():
    assert [name for name, pattern in NAMED.items() if not re.search(pattern, (ROOT / name).read_text())] == []


def test_the_kinds_of_a_device_that_computes_in_float32():
    assert [accelerators.widest_float(device) for device in (MPS, GPU)] == [torch.float32, torch.float64]
    with pytest.raises(ConfigError, match="mps devices do not support float64"):
        Precision("64-true", "mps")


def test_a_device_of_xpu_is_asked(monkeypatch):
    class Properties:
        has_fp64 = False

    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: Properties)
    accelerators.widest_float.cache_clear()
    try:
        with pytest.raises(ConfigError, match="xpu devices do not support float64"):
            Precision("64-true", "xpu")
    finally:
        accelerators.widest_float.cache_clear()


@pytest.mark.parametrize(
    ("device", "options", "backend"),
    [
        (GPU, {}, "cpu:gloo,cuda:nccl"),
        (GPU, {"shared": True}, "gloo"),  # NCCL takes a device for each rank
        (GPU, {"chosen": "gloo"}, "gloo"),
        (XPU, {}, "cpu:gloo,xpu:xccl"),
        (SimpleNamespace(type="npu"), {"chosen": "hccl"}, "cpu:gloo,npu:hccl"),
        (torch.device("cpu"), {"shared": True}, "gloo"),
    ],
    ids=str,
)
def test_backends(device, options, backend):
    assert accelerators.backend_for(device, **options) == backend


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (
            MPS,
            {},
            "Multiple processes on mps need a process group for mps tensors, but torch has none: its gloo supports",
        ),
        (XPU, {"chosen": "gloo"}, "its gloo supports only cpu and cuda"),
        (torch.device("mtia", 0), {}, "it has no backend for them"),
        (GPU, {"chosen": "nccl", "shared": True}, "process_group_backend=nccl needs one device per process"),
    ],
)
def test_backends_that_torch_lacks_are_refused(device, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        accelerators.backend_for(device, **options)


def test_a_kind_without_streams_or_autocast():
    assert [accelerators.has_streams(device) for device in (MPS, XPU, GPU)] == [False, True, True]
    assert accelerators.autocasts("cpu", torch.bfloat16)
    assert not accelerators.autocasts("meta", torch.bfloat16)
    assert not accelerators.autocasts("mps", torch.float64)


@pytest.mark.parametrize(
    ("wanted", "variables", "answer"),
    [
        ("xpu", {"ZE_AFFINITY_MASK": "0, 1", "CUDA_VISIBLE_DEVICES": "7"}, ("ZE_AFFINITY_MASK", "0,1")),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "6,7"}, ("CUDA_VISIBLE_DEVICES", "6,7")),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "3"}, ("ASCEND_RT_VISIBLE_DEVICES", "3")),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "6,7"}, ("", "")),
        ("mps", {}, ("", "")),
    ],
)
def test_the_variable_that_shares_devices_out(monkeypatch, wanted, variables, answer):
    for name in accelerators.VISIBLE.values():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert accelerators.visible_devices(wanted) == answer


def test_one_process_does_not_take_a_device_twice():
    refuse_duplicates([torch.device("cpu")] * 2)
    refuse_duplicates([GPU, torch.device("cuda", 1)])
    with pytest.raises(ConfigError, match="lists cuda:0, cuda:0 for one process"):
        refuse_duplicates([GPU, GPU])


def test_a_layout_says_once_that_a_device_is_shared():
    shared = describe_layout([(rank, 0, "host", f"cuda:{rank // 2} H100") for rank in range(4)], "legato", "here")
    assert shared.count("share its memory") == 1
    apart = describe_layout([(rank, rank, f"host-{rank}", "cuda:0 H100") for rank in range(4)], "torchrun", "here")
    assert "share" not in apart + describe_layout([(rank, 0, "host", "cpu") for rank in range(4)], "legato", "here")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_share_a_gpu(tmp_path):
    def weights(**options):
        task = Tiny()
        lg.Trainer(accelerator="cuda", max_steps=4, default_root_dir=tmp_path, logger=False, **options).fit(
            task, make_loader()
        )
        return torch.cat([parameter.detach().cpu().flatten() for parameter in task.parameters()])

    torch.testing.assert_close(weights(devices=[0, 0]), weights(devices=[0], replicas=2))
