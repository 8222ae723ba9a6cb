"""A copy of the repository's sources, so that builds leave nothing in it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(
    *("__pycache__", "build", "dist", "lightning_logs", "*.egg-info"),
    *(".git", ".venv*", ".matrix", ".cluster", ".hypothesis", ".*_cache", ".coverage*"),
)


def copy_sources(target: Path) -> Path:
    """Copy everything but what tools and runs have left behind, and the history."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        runs = {"runs"} if Path(folder) == ROOT else set()  # cli/runs and trainer/runs are rooms
        return LEFT_OUT(folder, names) | runs

    shutil.copytree(ROOT, target, ignore=left_out, symlinks=True)
    return target
