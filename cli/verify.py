"""`legato verify RUN [segments=5] [seed=N] [devices=N]`: computes parts of a run again, and writes a certificate."""

from argparse import Namespace

from ..base.errors import ConfigError, LegatoError
from ..base.messages import STDERR, STDOUT, shown_from
from ..base.quantities import time_taken
from ..lab.replay_steps import new_directory
from ..lab.study import history_of
from ..lab.verification import VERIFIED, Verification
from .arguments import read_words
from .replay import outside_of_runs


def run_verify(options: Namespace) -> None:
    """Run `legato verify`. Raises LegatoError where the run differs."""
    values, overrides = read_words(options.words, ("seed", "devices"), ("segments",))
    segments = values.get("segments", "5")
    if segments != "all" and not (segments.isdecimal() and int(segments)):
        raise ConfigError(f"segments={segments}: expected a number of segments, such as segments=5, or segments=all.")
    seed, devices = (int(values[name]) if name in values else None for name in ("seed", "devices"))
    if devices == 0:
        raise ConfigError("devices=0: expected at least 1.")
    out = None if options.out is None else outside_of_runs(options.out, "--out ")
    history = history_of(options.run, overrides)
    verification = Verification(history, None if segments == "all" else int(segments), seed, devices)
    print(verification.cost(), file=STDOUT, flush=True)
    directory = new_directory(history.directory, VERIFIED) if out is None else out
    directory.mkdir(parents=True, exist_ok=True)
    # what each replay says of itself is in the certificate
    with shown_from(options.level or "--quiet"):
        for segment in verification.compute(directory):
            first, last = segment.steps
            print(f"Steps {first:,} to {last:,} computed in {time_taken(segment.seconds)}", file=STDERR, flush=True)
    print(verification.write_certificate(directory), file=STDOUT)
    print(f"Written   {directory}/certificate.json and .txt", file=STDOUT, flush=True)
    if not verification.is_proven:
        raise LegatoError(f"The run is not what its config gives here; {directory}/certificate.txt tells what differs.")
