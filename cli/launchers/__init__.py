"""Launchers: start a run on a cluster from the command line."""

from typing import TYPE_CHECKING

from ...base.late_imports import importer

if TYPE_CHECKING:
    from .kubernetes import KubernetesLauncher as KubernetesLauncher
    from .launcher import Launcher as Launcher
    from .ray import RayLauncher as RayLauncher
    from .slurm import SlurmLauncher as SlurmLauncher

LAUNCHERS = {
    "slurm": ".slurm:SlurmLauncher",
    "ray": ".ray:RayLauncher",
    "kubernetes": ".kubernetes:KubernetesLauncher",
}
"""The class of each launcher, by its name in a config."""

_HOMES = {"Launcher": ".launcher", **{home.split(":")[1]: home.split(":")[0] for home in LAUNCHERS.values()}}
__all__ = list(_HOMES)
__all__ += ["LAUNCHERS"]

if not TYPE_CHECKING:  # else any name would do for a type checker
    __getattr__ = importer(__name__, _HOMES)
