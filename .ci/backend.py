"""The build backend: setuptools', but with an editable install that type checkers see.

The repository root is the package `legato`, whatever the name of its folder. setuptools makes such a package importable
through a hook, which mypy and pyright do not run. This backend keeps the hook, so that modules and tracebacks have
their real paths, and adds a folder with the link `legato -> repository` to the path, which type checkers read.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import build_sdist as build_sdist
from setuptools.build_meta import build_wheel as build_wheel
from setuptools.build_meta import get_requires_for_build_editable as get_requires_for_build_editable
from setuptools.build_meta import get_requires_for_build_sdist as get_requires_for_build_sdist
from setuptools.build_meta import get_requires_for_build_wheel as get_requires_for_build_wheel
from setuptools.build_meta import prepare_metadata_for_build_editable as prepare_metadata_for_build_editable
from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare_metadata_for_build_wheel

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / "build" / "editable"
HOOK = f'''"""Lets `import legato` find the repository from which it was installed, at its own place."""

import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "legato":
            return None
        spec = PathFinder.find_spec(name, path)  # PYTHONPATH may name another Legato
        linked = spec is None or (spec.origin or "").startswith({str(LINKS)!r})
        return spec_from_file_location(name, {str(ROOT / "__init__.py")!r}) if linked else spec


sys.meta_path.insert(0, Finder)
'''
WHEEL = "Wheel-Version: 1.0\nGenerator: legato\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Write a wheel that makes this folder the installed package, and return its name."""
    with TemporaryDirectory() as temporary:
        info = Path(temporary, build_meta.prepare_metadata_for_build_editable(temporary, config_settings))
        inside = [path for path in sorted(info.rglob("*")) if path.is_file() and path.name != "RECORD"]
        files = {f"{info.name}/{path.relative_to(info)}": path.read_bytes() for path in inside}
        name = info.name.removesuffix(".dist-info")
    paths = ["import _legato_import_hook", *([str(LINKS)] if make_link() else [])]
    files["_legato_import_hook.py"] = HOOK.encode()  # no name on _editable: readers of sources expect other content
    files["_legato_import_hook.pth"] = "".join(f"{path}\n" for path in paths).encode()
    files[f"{info.name}/WHEEL"] = WHEEL.encode()
    record = f"{info.name}/RECORD"
    wheel = f"{name}-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(record, "".join(record_of(*file) for file in files.items()) + f"{record},,\n")
    return wheel


def make_link() -> bool:
    """Make the link for type checkers; return whether this system has links."""
    link = LINKS / "legato"
    LINKS.mkdir(parents=True, exist_ok=True)
    try:
        if not link.is_symlink():
            link.symlink_to("../..", target_is_directory=True)
    except OSError as error:
        print(f"Type checkers will not see this install: {error}", file=sys.stderr)
        return False
    return True


def record_of(path: str, content: bytes) -> str:
    """Return a file's line in the list of the wheel's files."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"
