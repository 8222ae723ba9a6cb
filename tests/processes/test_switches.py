"""Global switches of torch: what the script has set holds in workers, is recorded, and is compared at a resume."""

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer

from legato.base.environment import NUMERIC_VARIABLES
from legato.base.errors import ConfigError
from legato.trainer.switches import SWITCHES, read_switches, write_switches

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
FOLLOWS = ("tf32_matmul", "fp32_precision_cuda.matmul", "fp32_precision_mkldnn.matmul", "opt_einsum_strategy")
"""Those that follow from another one, or need a package."""


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
    """Another value for each switch that can be set by itself."""
    values = {name: OTHER.get(name, not value) for name, value in read_switches().items() if name not in FOLLOWS}
    return {name: value for name, value in values.items() if not name.startswith("fp32_precision_mkldnn")}


class Tells(Tiny):
    """Brings back the switches of a worker."""

    def __init__(self):
        super().__init__()
        self.worker_switches = {}

    def on_train_start(self):
        for name, value in read_switches().items():
            self.register_buffer(name.replace(".", "_"), torch.tensor(list(repr(value).encode())))

    def told(self):
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
    assert task.told() == script


def test_the_newer_switches_of_matrix_products_travel(tmp_path):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    task = Tells()
    make_trainer(tmp_path, devices=2, strategy="ddp").fit(task, make_loader())
    assert task.told()["fp32_precision_cuda.matmul"] == "'tf32'"
    assert "matmul_precision" not in task.told()


def fit(folder, **options):
    made = make_trainer(folder, enable_checkpointing=True, reproducible="bitwise", threads=1, **options)
    made.fit(Tiny(), make_loader(), resume="auto")


CHOSEN = ("deterministic_algorithms", "cudnn_benchmark", "threads")
"""Those that `bitwise` sets by itself."""


@pytest.mark.parametrize("name", [name for name in others() if name not in CHOSEN])
def test_bitwise_refuses_a_resume_under_another_switch(tmp_path, name):
    fit(tmp_path, max_epochs=1)
    write_switches({name: others()[name]})
    with pytest.raises(ConfigError, match=f"cannot go on with the same bits here:.*{name}: "):
        fit(tmp_path, max_epochs=2)


@pytest.mark.parametrize("name", ["MKL_CBWR", "ONEDNN_MAX_CPU_ISA"])
def test_bitwise_refuses_a_resume_under_another_variable(tmp_path, monkeypatch, name):
    fit(tmp_path, max_epochs=1)
    monkeypatch.setenv(name, "COMPATIBLE")
    assert name in NUMERIC_VARIABLES
    with pytest.raises(ConfigError, match=f"cannot go on with the same bits here: {name}: None -> COMPATIBLE"):
        fit(tmp_path, max_epochs=2)


def test_order_tells_of_another_switch(tmp_path, caplog):
    options = {"enable_checkpointing": True, "reproducible": "order"}
    make_trainer(tmp_path, max_epochs=1, **options).fit(Tiny(), make_loader(), resume="auto")
    torch.backends.mkldnn.enabled = False
    make_trainer(tmp_path, max_epochs=2, **options).fit(Tiny(), make_loader(), resume="auto")
    assert "mkldnn: True -> False" in caplog.text
