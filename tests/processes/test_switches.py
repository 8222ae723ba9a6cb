"""Switches that change bits: the page lists them, workers copy them, records store them, and a resume compares them."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.environment import NUMERIC_VARIABLES
from legato.base.errors import ConfigError
from legato.trainer.accelerators import built_with
from legato.trainer.optimization.kernels import numerics
from legato.trainer.switches import SWITCHES, read_switches, versions, write_switches

TWO = {"devices": 2, "strategy": "ddp"}
OTHER = {
    "default_dtype": "torch.float64",
    "deterministic_algorithms": "warn",
    "threads": 1,
    "matmul_precision": "medium",
    "opt_einsum_strategy": "greedy",
    "autocast_dtype_cpu": "torch.float16",
    "autocast_dtype_cuda": "torch.bfloat16",
    **dict.fromkeys(("fp32_precision_cudnn.conv", "fp32_precision_cudnn.rnn"), "ieee"),
}
FOLLOWS = (
    *("tf32_matmul", "fp32_precision_cuda.matmul", "fp32_precision_mkldnn.matmul", "opt_einsum_strategy"),
    *("fp16_split_k", "bf16_split_k"),
)
"""Those that follow from another one, need one, or need a package."""
OF_CUDA = ("blas_library", "linalg_library", "cudnn_benchmark_limit")
"""Those that torch has only where it was built with CUDA."""


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    before = read_switches()
    yield
    if "matmul_precision" not in read_switches():
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    write_switches(before)
    torch.set_num_threads(threads)
    assert read_switches() == before


def others():
    """Return a different value for each switch that can be set alone."""
    here = {name: value for name, value in read_switches().items() if name not in (*FOLLOWS, *OF_CUDA)}
    values = {name: OTHER.get(name, not value) for name, value in here.items()}
    return {name: value for name, value in values.items() if not name.startswith("fp32_precision_mkldnn")}


class Tells(Tiny):
    """Returns the switches of a worker."""

    def __init__(self):
        super().__init__()
        self.worker_switches = {}

    def on_train_start(self):
        for name, value in read_switches().items():
            self.register_buffer(name.replace(".", "_"), torch.tensor(list(repr(value).encode())))

    def switches(self):
        names = {name: name.replace(".", "_") for name in SWITCHES}
        buffers = dict(self.named_buffers())
        return {name: bytes(buffers[key].tolist()).decode() for name, key in names.items() if key in buffers}


def test_all_switches_travel_to_workers(tmp_path):
    wanted = others()
    write_switches(wanted)
    script = {name: repr(value) for name, value in read_switches().items()}
    assert {name: repr(value) for name, value in wanted.items()}.items() <= script.items()
    task = Tells()
    make_trainer(tmp_path, devices=2, strategy="ddp", precision="64-true").fit(task, make_loader())
    assert task.switches() == script


def test_the_newer_switches_of_matrix_products_travel(tmp_path):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    task = Tells()
    make_trainer(tmp_path, devices=2, strategy="ddp").fit(task, make_loader())
    assert task.switches()["fp32_precision_cuda.matmul"] == "'tf32'"
    assert "matmul_precision" not in task.switches()


def fit(folder, **options):
    made = make_trainer(folder, enable_checkpointing=True, reproducible="bitwise", threads=1, **options)
    made.fit(Tiny(), make_loader(), resume="auto")


CHOSEN = ("deterministic_algorithms", "cudnn_benchmark", "threads")
"""Those that `bitwise` sets by itself."""


@pytest.mark.parametrize("name", [name for name in others() if name not in CHOSEN])
def test_bitwise_refuses_a_resume_under_another_switch(tmp_path, name):
    fit(tmp_path, max_epochs=1)
    write_switches({name: others()[name]})
    with pytest.raises(ConfigError, match=f"would not stay bitwise identical:.*{name}: "):
        fit(tmp_path, max_epochs=2)


@pytest.mark.parametrize("name", ["MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "NCCL_ALGO"])
def test_bitwise_refuses_a_resume_under_another_variable(tmp_path, monkeypatch, name):
    fit(tmp_path, max_epochs=1)
    monkeypatch.setenv(name, "COMPATIBLE")
    assert name in NUMERIC_VARIABLES
    with pytest.raises(ConfigError, match=f"would not stay bitwise identical: {name}: None -> COMPATIBLE"):
        fit(tmp_path, max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, TWO])
def test_a_resume_lists_what_differs_and_bitwise_refuses_it(tmp_path, caplog, capfd, monkeypatch, layout):
    caplog.set_level("INFO", "legato")
    options = {"enable_checkpointing": True, **layout}
    make_trainer(tmp_path, max_epochs=1, threads=1, **options).fit(Tiny(), make_loader(), resume="auto")
    torch.backends.mkldnn.enabled = False
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "4")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_trainer(tmp_path, max_epochs=2, threads=2, **options).fit(Tiny(), make_loader(), resume="auto")
    output = caplog.text + capfd.readouterr().err
    as_set = "New values: mkldnn: True -> False, CUBLAS_WORKSPACE_CONFIG: None -> :16:8, NCCL_MAX_NCHANNELS: None -> 4."
    assert as_set in output
    assert "Low-order bits may now differ: threads: 1 -> 2." in output
    trainer = make_trainer(tmp_path / "exact", max_epochs=1, reproducible="bitwise", **options)
    trainer.fit(Tiny(), make_loader(), resume="auto")
    start = json.loads((Path(trainer.run_dir) / "environment.json").read_text())["starts"][0]
    values = {name: start["environment"][name] for name in ("mkldnn", "NCCL_MAX_NCHANNELS", "threads", "NCCL_ALGO")}
    assert values == {"mkldnn": False, "NCCL_MAX_NCHANNELS": "4", "threads": 1, "NCCL_ALGO": None}
    torch.backends.mkldnn.enabled = True
    monkeypatch.delenv("NCCL_MAX_NCHANNELS")
    with pytest.raises(ConfigError, match=r"bitwise identical: mkldnn: False -> True, NCCL_MAX_NCHANNELS: 4 -> None\."):
        make_trainer(tmp_path / "exact", max_epochs=2, reproducible="bitwise", **options).fit(
            Tiny(), make_loader(), resume="auto"
        )


def test_split_products_are_a_switch_of_their_own(tmp_path):
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    task, names = Tells(), ("fp16_reduced_precision", "fp16_split_k", "bf16_reduced_precision", "bf16_split_k")
    make_trainer(tmp_path, **TWO).fit(task, make_loader())
    assert [task.switches()[name] for name in names] == ["False", "True", "False", "False"]


@pytest.fixture
def built_for_cuda(monkeypatch):
    """Values that torch reports in builds for each vendor."""
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, "13.0")
    config = torch.__config__.show()
    shown = "  - CuDNN 91.3 (built against CUDA 13.0)\n    - Built with CuDNN 90.1\n"
    monkeypatch.setattr(torch.__config__, "show", lambda: config + shown)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: type("Package", (), {"version": "13.1.0.3"}))
    built_with.cache_clear()
    yield
    built_with.cache_clear()


def test_versions_of_libraries_that_pip_may_replace_are_read(built_for_cuda):
    assert (
        versions().items() >= {"cudnn_version": "91.3", "cublas": "13.1.0.3", "nccl": "2.28.3", "cuda": "13.0"}.items()
    )


def test_the_page_lists_what_is_recorded_and_nothing_else(built_for_cuda):
    page = Path(lg.__file__).parent / "docs/reference/bits.md"
    rows = re.findall(r"(?m)^\| (`[^|]*) \| ", page.read_text())
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(listed) == len(set(listed))
    recorded = (
        numerics([], "32-true", torch.device("cpu")).keys() | SWITCHES.keys() | {"micro_batches", "tensor_shards"}
    )
    assert set(listed) == recorded
