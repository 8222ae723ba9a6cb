"""Random pairs of features, each held against the run without those of them that promise to change nothing.

python tests/together/pairs.py 2000 --seed 1          2000 pairs; each that fails is said with a line that does it again
python tests/together/pairs.py --pair "ema, sigterm" --seed 17
"""

import argparse
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from together.by_hand import MODELLED, check_by_hand
from together.features import DISTURBANCES, NAMED, NEUTRAL, STRATEGIES, Feature, can_meet, refusal
from together.play import Result, Unexpected, differences, play
from together.scene import Scene

from legato.base.errors import LegatoError
from legato.trainer.processes import launch

BF16 = 2e-2
WAITING: set[str] = set()
"""Features that are drawn only by name, until what they found is mended."""

LOST: set[str] = {"kill", "hooks log", "elastic"}
"""What a process logs in on_train_batch_end dies with it (docs/elastic.md), so these three are not drawn together."""


@dataclass(frozen=True)
class Pair:
    """Two features, a number that the moments of faults are drawn from, and a third that joins in where needed."""

    first: str
    second: str
    seed: int
    third: str | None = None

    @property
    def features(self) -> list[Feature]:
        return [NAMED[name] for name in (self.first, self.second, self.third) if name]

    def __str__(self) -> str:
        names = ", ".join(feature.name for feature in self.features)
        return f'python tests/together/pairs.py --pair "{names}" --seed {self.seed}'


def draw(seed: int, processes: bool = True) -> Pair:
    """Return the pair of a number. Two that only shape the run are disturbed by a third."""
    chance = random.Random(seed)
    usable = [name for name, feature in NAMED.items() if processes or not feature.processes]
    usable = [name for name in usable if name not in WAITING]
    while True:
        first, second = (NAMED[name] for name in chance.sample(usable, 2))
        if not can_meet(first, second):
            continue
        third = None
        if first.shapes and second.shapes:
            candidates = [
                feature
                for feature in (*NEUTRAL, *STRATEGIES, *DISTURBANCES)
                if feature.name in usable
                and can_meet(NAMED[feature.name], first)
                and can_meet(NAMED[feature.name], second)
            ]
            third = chance.choice(candidates).name
        pair = Pair(first.name, second.name, seed, third)
        if "kill" in (first.name, second.name, third) and not any(feature.processes for feature in pair.features):
            if third or not processes:
                continue
            pair = Pair(first.name, second.name, seed, chance.choice(["ddp", "elastic"]))
            if not all(can_meet(NAMED[pair.third], feature) for feature in (first, second)):
                continue
        if {feature.name for feature in pair.features} >= LOST:
            continue
        return pair


@dataclass
class Stage:
    """Where pairs are played; the runs that they are held against are kept."""

    folder: Path
    references: dict[tuple[str, ...], Result] = field(default_factory=dict)
    played: int = 0
    refused: int = 0

    def reference(self, features: list[Feature]) -> Result:
        """Return what the run comes to without the features that promise to change nothing."""
        kept = [feature for feature in features if feature.shapes]
        # the strategy decides how many replicas manual steps have
        if any(feature.name == "manual" for feature in kept):
            kept += [feature for feature in features if feature.group == "strategy"]
        key = tuple(sorted(feature.name for feature in kept))
        if key not in self.references:
            self.references[key] = play(scene_of(kept), self.folder / "reference" / "-".join(key).replace(" ", "_"), [])
            if MODELLED.issuperset(key):
                self.references[key].problems += check_by_hand(set(key), self.references[key])
            if self.references[key].problems:
                raise Unexpected(f"the undisturbed run: {self.references[key].problems}")
        return self.references[key]

    def check(self, pair: Pair) -> list[str]:
        """Play a pair; return what is wrong."""
        features = pair.features
        self.played += 1
        folder = self.folder / f"pair-{self.played}"
        folder.mkdir(parents=True)
        pattern = refusal(features)
        try:
            if pattern is not None:
                self.refused += 1
                return check_refusal(features, folder, pattern)
            expected = self.reference(features)
            chance = random.Random(pair.seed)
            last = max(1, expected.state["global_step"] - 1)
            steps = [chance.randint(1, last) for _ in range(4)]
            return differences(play(scene_of(features), folder, steps), expected, tolerance_of(features))
        except Unexpected as error:
            return [str(error), *traceback.format_exception(error)[-25:]]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def scene_of(features: list[Feature]) -> Scene:
    """Return a scene with these features."""
    scene = Scene()
    for feature in features:
        feature.add(scene)
    manual = any(feature.name == "manual" for feature in features)
    if manual and any(feature.processes for feature in features):
        scene.arguments["replicas"] = 2
    return scene


def tolerance_of(features: list[Feature]) -> float:
    """Return how far numbers may be from the reference's."""
    tolerance = max(feature.tolerance for feature in features)
    if tolerance and any(feature.name in ("bf16", "fp16") for feature in features):
        return BF16
    return tolerance


def check_refusal(features: list[Feature], folder: Path, pattern: str) -> list[str]:
    """Play what must be refused before its first step; say what is wrong."""
    scene = scene_of(features)
    scene.task["trained"] = str(folder / "trained")
    steps = [1] * 4
    try:
        play(scene, folder, steps)
    except Unexpected as error:
        cause = error.__cause__
        if not isinstance(cause, LegatoError):
            return [f"refused by {type(cause).__name__}, no LegatoError: {cause}"]
        problems = [] if re.search(pattern, str(cause)) else [f"the message has no {pattern!r}: {cause}"]
        return problems + (["refused after training had begun"] if (folder / "trained").exists() else [])
    return [f"must be refused with {pattern!r}, and was not"]


class TooLong(BaseException):
    """A pair has not come to its end."""


def give_up(number: int, frame: object) -> None:
    raise TooLong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=30, help="how many pairs")
    parser.add_argument("--seed", type=int, default=1, help="of the first pair; each further one has the next")
    parser.add_argument("--pair", help="the names of two or three features")
    parser.add_argument("--single", action="store_true", help="only pairs within one process")
    parser.add_argument("--only", help="only pairs with a feature of this name")
    parser.add_argument("--seconds", type=int, default=120, help="a pair that takes longer has failed")
    options = parser.parse_args()
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="pairs-")
    Finalize(None, shutil.rmtree, [tempfile.tempdir, True], exitpriority=-200)  # after multiprocessing's own folder
    prepare()
    signal.signal(signal.SIGALRM, give_up)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        for pair in pairs_of(options):
            start = time.monotonic()
            signal.alarm(options.seconds)
            try:
                problems = stage.check(pair)
            except TooLong:
                problems = [f"not done after {options.seconds} s", *traceback.format_exc().splitlines()[-30:]]
            except Exception:
                problems = traceback.format_exc().splitlines()
            finally:
                signal.alarm(0)
            if problems:
                failed += 1
                print(f"\nFAILED ({time.monotonic() - start:.1f} s): {pair}", *problems, sep="\n    ", flush=True)
            elif options.pair or time.monotonic() - start > 20:
                print(f"fine ({time.monotonic() - start:.1f} s): {pair}", flush=True)
        print(f"{stage.played} pairs, {stage.refused} of them to be refused: {failed} failed.", flush=True)
    sys.exit(failed > 0)


def pairs_of(options: argparse.Namespace) -> Iterator[Pair]:
    if options.pair:
        names = [name.strip() for name in options.pair.split(",")]
        yield Pair(names[0], names[1], options.seed, names[2] if len(names) > 2 else None)
        return
    number, left = options.seed, options.count
    while left:
        pair = draw(number, not options.single)
        number += 1
        if not options.only or options.only in [feature.name for feature in pair.features]:
            left -= 1
            yield pair


def load() -> None:
    """Import what every run needs: what an import leaves changed is not the run's doing."""
    import torch._dynamo  # noqa: F401
    import torchmetrics  # noqa: F401


def prepare() -> None:
    """Make this process and the server that workers are forked from ready for runs."""
    load()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    logging.getLogger("legato").setLevel(logging.ERROR)
    launch.PRELOAD += ["legato.trainer.setup.start", "tensorboard.summary.writer", "torchmetrics"]
    launch.warm_up()


if __name__ == "__main__":
    main()
