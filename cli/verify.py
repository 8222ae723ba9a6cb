"""`legato verify RUN [segments=5] [seed=N] [devices=N]`: recomputes parts of a run and writes a certificate."""

from argparse import Namespace

from ..base.errors import ConfigError, LegatoError
from ..base.messages import shown_from
from ..lab.study import history_of, verify
from .arguments import read_words
from .replay import outside_of_runs


def run_verify(options: Namespace) -> None:
    """Run `legato verify`. Raises LegatoError if the recomputed results differ from the run's."""
    values, overrides = read_words(options.words, ("seed", "devices"), ("segments",))
    segments = values.get("segments", "5")
    if segments != "all" and not (segments.isdecimal() and int(segments)):
        raise ConfigError(f"segments={segments}: expected a number of segments, such as segments=5, or segments=all.")
    seed, devices = (int(values[name]) if name in values else None for name in ("seed", "devices"))
    if devices == 0:
        raise ConfigError("devices=0: expected at least 1.")
    out = None if options.out is None else outside_of_runs(options.out, "--out ")
    history, count = history_of(options.run, overrides), None if segments == "all" else int(segments)
    # the certificate contains what each replay would print
    with shown_from(options.level or "--quiet"):
        verification = verify(history, count, seed=seed, devices=devices, out=out)
    if not verification.is_proven:
        raise LegatoError("Recomputing the run on this machine gave different results, which the certificate lists.")
