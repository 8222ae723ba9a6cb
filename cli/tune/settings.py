"""Settings that `legato tune` tries: which, in what order, and what each of them changes besides the speed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SAME, LAST_BITS, RESULT = "same bits", "last bits differ", "changes the result"
"""Effects of a setting on the result of a run, compared to a run without it."""
LINEAR_RULE = "multiply the learning rate by {0:g} (linear rule for SGD, Goyal et al. 2017, arxiv.org/abs/1706.02677)"
SQUARE_ROOT_RULE = (
    "multiply the learning rate by {1:.3g} (square-root rule for Adam and its like, "
    "Malladi et al. 2022, arxiv.org/abs/2205.10287)"
)
OF_VIEWS = "gradients are views of buckets: what keeps a parameter's grad beyond its step must clone it"
LARGEST_BATCH = 2**20


@dataclass(frozen=True)
class Setting:
    """One candidate: keys of the config and their values, and what they do to the result."""

    changes: Mapping[str, Any]
    effect: str = SAME
    advice: str = ""
    """Change that the user should make as well, where the setting is kept."""
    reason: str = ""
    """Why it is not tried."""

    @property
    def name(self) -> str:
        """Text of the setting on a command line."""
        return " ".join(key if self.reason else f"{key}={_word(value)}" for key, value in self.changes.items())


Group = list[Setting]
"""Values of one setting, tried in this order until one is clearly slower than the one before."""


def groups(config: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Group]:
    """Yield what changes the speed of a run and not its samples: first what changes others' best values."""
    trainer, loader = config["trainer"], facts["loader"]
    cores = max(1, facts["cores"] // facts["processes"])
    counts = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    if facts["device"] == "cpu":
        yield [Setting({"trainer.threads": one}, LAST_BITS) for one in counts if one != facts["threads"]]
    if loader is None:
        yield _skipped("trainer.loader", "the training data is not a DataLoader that is dealt out by sample")
    else:
        workers = [one for one in (0, *counts[:4]) if one != loader["num_workers"]]
        yield [Setting({"trainer.loader.num_workers": one}) for one in workers]
        if facts["device"] == "cuda" and not loader["pin_memory"]:
            yield [Setting({"trainer.loader.pin_memory": True})]
    has = facts["kernels"]
    now = trainer.get("optimizer_kernels")
    yield [
        Setting({"trainer.optimizer_kernels": one}, LAST_BITS)
        for one in ("fused", "foreach")
        if one in has and one != now
    ]
    if facts["images"] and not trainer["channels_last"]:
        yield [Setting({"trainer.channels_last": True}, LAST_BITS)]
    if facts["strategy"] == "ddp" and facts["processes"] > 1 and trainer["reproducible"] != "bitwise":
        yield from _of_ddp(trainer["strategy"])
    yield from _micro_batches(config, facts)


def _of_ddp(strategy: Any) -> Iterator[Group]:
    """Yield what changes how DistributedDataParallel sends gradients; an elastic run sends them by itself."""
    given = strategy if isinstance(strategy, Mapping) else {"name": strategy}
    if given.get("elastic"):
        return
    named = {} if given.get("name", "ddp") == "ddp" else {"trainer.strategy.name": "ddp"}
    sizes = [one for one in (5, 100) if one != given.get("bucket_cap_mb")]
    yield [Setting({**named, "trainer.strategy.bucket_cap_mb": one}, LAST_BITS) for one in sizes]
    if not given.get("gradient_as_bucket_view"):
        yield [Setting({**named, "trainer.strategy.gradient_as_bucket_view": True}, advice=OF_VIEWS)]


def of_workers(facts: Mapping[str, Any]) -> Iterator[Group]:
    """Yield what is worth a trial only where workers load the data."""
    loader = facts["loader"]
    if loader is not None and loader["num_workers"]:
        if not loader["persistent_workers"]:
            yield [Setting({"trainer.loader.persistent_workers": True})]
        yield [Setting({"trainer.loader.prefetch_factor": one}) for one in (4, 8) if one != loader["prefetch_factor"]]


def _micro_batches(config: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the same step in smaller or larger batches: the sum of its gradient is in another order."""
    trainer, key, size = config["trainer"], batch_size_key(config), facts["batch_size"]
    batches, name = trainer["accumulate_grad_batches"], "trainer.accumulate_grad_batches"
    if key is None or size is None or not facts["automatic"]:
        yield _skipped(name, "neither data nor task has a key batch_size" if key is None else "not dealt out by sample")
    elif facts["batch_norm"]:
        yield _skipped(name, "batch norm would see other batches")
    elif trainer["reproducible"] == "bitwise":
        yield _skipped(name, "reproducible: bitwise keeps the order in which a gradient is summed up")
    else:
        pairs = [(size * 2, batches // 2)] if batches % 2 == 0 else []
        pairs += [(size // 2, batches * 2)] if size % 2 == 0 and size > 2 else []
        yield [
            Setting({key: each, "trainer.accumulate_grad_batches": count}, f"{LAST_BITS}, and dropout")
            for each, count in pairs
        ]


def last_group(config: Mapping[str, Any], facts: Mapping[str, Any]) -> Group:
    """Return what comes last, since it takes long to start: equal blocks compiled as one, then the whole."""
    ways: list[Any] = [{"blocks": list(facts["blocks"])}] if facts["blocks"] else []
    return [Setting({"trainer.compile": way}, LAST_BITS) for way in [*ways, True] if not config["trainer"]["compile"]]


def precisions(config: Mapping[str, Any]) -> Group:
    """Return the precisions to try, where that is asked for."""
    given = str(config["trainer"]["precision"])
    advice = "compare the metrics of a run with and without it"
    wanted = [one for one in ("bf16-mixed", "bf16-true") if one != given and given.startswith("32")]
    return [Setting({"trainer.precision": one}, RESULT, advice) for one in wanted]


def larger_batches(config: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield doubled batch sizes, where that is asked for, with what the learning rate is to become."""
    key, size = batch_size_key(config), facts["batch_size"]
    if key is None or size is None:
        yield from _skipped("data.batch_size", "neither data nor task has a key batch_size")
        return
    rule = LINEAR_RULE if all(one == "SGD" for one in facts["optimizers"]) else SQUARE_ROOT_RULE
    factor = 2
    while size * factor <= LARGEST_BATCH:
        yield Setting({key: size * factor}, RESULT, rule.format(factor, math.sqrt(factor)) + ", and adapt max_steps")
        factor *= 2


def batch_size_key(config: Mapping[str, Any]) -> str | None:
    """Return the key of the batch size; None where neither data nor task has one of this name."""
    return next((f"{part}.batch_size" for part in ("data", "task") if "batch_size" in (config.get(part) or {})), None)


def _skipped(key: str, reason: str) -> Group:
    return [Setting({key: None}, reason=reason)]


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_word(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
