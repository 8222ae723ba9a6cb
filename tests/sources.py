"""A copy of the repository's sources, so that builds leave nothing in it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "build", "dist", "runs", "lightning_logs", "*.egg-info", ".[!c]*")


def copy_sources(target: Path) -> Path:
    """Copy everything but what tools and runs have left behind, and the history."""
    shutil.copytree(ROOT, target, ignore=LEFT_OUT, symlinks=True)
    return target
