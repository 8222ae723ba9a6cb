"""Tests on packages that others wrote: `make others` installs them all, and no test here may be skipped."""

import warnings
from importlib.util import find_spec

import pytest

from legato.trainer.processes import launch

PACKAGES = [
    "bitsandbytes",
    "datasets",
    "heavyball",
    "litdata",
    "moto",
    "peft",
    "prodigyopt",
    "pytorch_optimizer",
    "s3fs",
    "schedulefree",
    "streaming",
    "timm",
    "torch_geometric",
    "torchao",
    "torchdata",
]
PACKAGES += ["transformers", "webdataset"]
MISSING = [package for package in PACKAGES if find_spec(package) is None]

collect_ignore_glob = ["test_*.py"] if MISSING else []

if not MISSING:
    with warnings.catch_warnings():  # its compiled parts do not load beside the CPU build of torch; see .ci/others
        warnings.filterwarnings("ignore", "Failed to load image Python extension", UserWarning)
        import torchvision  # noqa: F401 - before a test does
    launch.PRELOAD += ["torchvision", "transformers", "peft"]  # before warnings are errors there too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a skipped test as a failure: a package that cannot be tried here is not tried at all."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, which no test in this folder may be: {report.longrepr}"
    return report
