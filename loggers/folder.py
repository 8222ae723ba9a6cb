"""LogFolder: a logger's own folder, `save_dir/name/version`; and what loggers make of names and hyperparameters."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..base.run_names import require_local

HPARAMS_FILE = "hparams.yaml"


class LogFolder:
    """The folder `save_dir/name/version_N` or, with a version that is a text, `save_dir/name/version`.

    Without a version it is the next free `version_N`, which is chosen when it is first asked for.
    """

    def __init__(self, save_dir: str | Path, name: str | None, version: int | str | None) -> None:
        require_local(save_dir, "A logger's save_dir")
        self.save_dir, self.name = os.fspath(save_dir), name
        self._start = os.getcwd()  # wherever the process goes later
        self._version = version

    @property
    def root_dir(self) -> str:
        """The folder of all versions."""
        return os.path.join(self.save_dir, self.name) if self.name else self.save_dir

    @property
    def version(self) -> int | str:
        """The version."""
        if self._version is None:
            self._version = self.next_version()
        return self._version

    @property
    def log_dir(self) -> str:
        """The folder of this version."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.expanduser(os.path.expandvars(os.path.join(self.root_dir, version)))

    @property
    def path(self) -> Path:
        """The same, absolute."""
        return Path(self._start, self.log_dir)

    def choose(self, resume: bool) -> None:
        """Choose the version if there is none: on a resume the newest, else the next free one."""
        if self._version is None and resume:
            self._version = max(self._versions(), default=0)

    def follow(self, directory: Path) -> None:
        """Take the version of a folder that another process has chosen, if it is one of this logger's."""
        if self._version is None and directory.parent == self._root:
            number = directory.name.removeprefix("version_")
            self._version = int(number) if number.isdigit() and number != directory.name else directory.name

    def next_version(self) -> int:
        """Return the version after the newest one that there is."""
        return max(self._versions(), default=-1) + 1

    @property
    def _root(self) -> Path:
        return Path(self._start, os.path.expanduser(os.path.expandvars(self.root_dir)))

    def _versions(self) -> list[int]:
        return [int(path.name[8:]) for path in self._root.glob("version_*") if path.name[8:].isdigit()]


def write_hyperparameters(folder: Path, params: Mapping[str, Any]) -> None:
    """Write `hparams.yaml`; values that are neither numbers, texts, nor lists or mappings of these become text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HPARAMS_FILE).write_text(yaml.safe_dump(plain(params), sort_keys=False) if params else "{}\n")


def plain(value: Any) -> Any:
    """Return a value as YAML and JSON can write it."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)  # numpy.float64 is a float that YAML refuses
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return str(value)


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str]:
    """Return nested hyperparameters under "outer/inner" names; values that are not numbers become text."""
    flat: dict[str, int | float | str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (int, float, str)) else str(value)
    return flat


def with_prefix(prefix: str, metrics: Mapping[str, Any], separator: str = "-") -> dict[str, Any]:
    """Return metrics named `prefix-name`, or as they are with an empty prefix."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)
