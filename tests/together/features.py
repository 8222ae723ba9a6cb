"""The features that meet in pairs: what each adds to a run, what it promises, and what refuses it by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from together.scene import Counts, Draws, Logs, Reads, Saves, Says, Scene, Validates, Writes

from legato.callbacks import (
    BackboneFinetuning,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    ExponentialMovingAverage,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from legato.lab import Microscope, SpikeWatch, StragglerMonitor
from legato.loggers import JSONLinesLogger


@dataclass(frozen=True)
class Feature:
    """One thing that a run may have. Two of one `group` set the same and cannot meet."""

    name: str
    add: Callable[[Scene], None]
    shapes: bool = False
    """Whether it changes the result: then the run that it is compared with has it too."""
    group: str = ""
    tolerance: float = 0.0
    """How far numbers may be from those of the run without it; 0: every bit is the same."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """With which features or groups it is refused before the first step, and a pattern that the message has."""
    apart: tuple[str, ...] = ()
    """With which features or groups it makes no sense."""
    processes: bool = False
    """Whether its run has processes of its own."""
    slow: bool = False


def arguments(**values):
    """Return what adds arguments of the Trainer."""
    return lambda scene: scene.arguments.update(values)


def task(**values):
    """Return what adds options of the task."""
    return lambda scene: scene.task.update(values)


def data(**values):
    """Return what adds options of the loaders."""
    return lambda scene: scene.data.update(values)


def callback(make):
    """Return what adds a callback; `make` is given the run's folder."""
    return lambda scene: scene.callbacks.append(make)


def nothing(*arguments):
    """Do nothing, as a hook."""


def fault(kind):
    """Return what adds a fault."""
    return lambda scene: scene.faults.append(kind)


def around(word):
    """Return what adds a call before or after."""
    return lambda scene: scene.around.append(word)


def both(*parts):
    """Return what adds several."""

    def add(scene):
        for adder in parts:
            adder(scene)

    return add


ROUNDING = 2e-5
SHARDED = {"bitwise": "bitwise"}
LOCKSTEP = {"manual": "[Mm]anual", "two optimizers": "optimizer"}
NOT_HANDED_ON = {"manual": "[Mm]anual"}


def on_two(strategy, **more):
    return arguments(strategy=strategy, devices=2, **more)


WHOLE = {"pipeline": "needs all weights"}
LOOKS = {"pipeline": "needs all modules"}
SPIKES = LOOKS | {"manual": "checks each step before its update"}
SHAPING = [
    Feature("accumulation", arguments(accumulate_grad_batches=2), group="accumulation"),
    Feature("clip", arguments(gradient_clip_val=0.3)),
    Feature("clip by value", arguments(gradient_clip_val=0.05, gradient_clip_algorithm="value"), group="clip"),
    Feature(
        "nan skip",
        both(arguments(nan="skip"), data(bad=True)),
        apart=("metrics", "stop on train", "plateau", "anomaly"),
        refused={"manual": "[Mm]anual"},
    ),
    Feature("ema", callback(lambda folder: ExponentialMovingAverage(0.8))),
    Feature(
        "late ema", callback(lambda folder: ExponentialMovingAverage(0.8, start_step=3, use_buffers=True)), group="ema"
    ),
    Feature("weight averaging", callback(lambda folder: WeightAveraging()), group="ema", refused=WHOLE),
    Feature(
        "accumulation schedule",
        callback(lambda folder: GradientAccumulationScheduler({0: 1, 1: 2})),
        group="accumulation",
        apart=("manual",),
    ),
    Feature("stop on train", callback(lambda folder: EarlyStopping("train/loss_epoch", min_delta=0.02, patience=1))),
    Feature("stop on val", callback(lambda folder: EarlyStopping("val/loss", min_delta=0.02, patience=1))),
    Feature("manual", both(arguments(replicas=1), task(manual=True)), apart=("accumulation", "replicas")),
    Feature("several loaders", data(several=True), group="loaders"),
    Feature("stream", data(stream=True), group="loaders"),
    Feature("drop last", data(drop_last=True)),
    Feature("limit", arguments(limit_train_batches=3, limit_val_batches=2)),
    Feature("limit part", arguments(limit_train_batches=0.8, limit_val_batches=0.7), group="limit"),
    Feature("overfit", arguments(overfit_batches=2), group="limit"),
    Feature("val interval", arguments(val_check_interval=2), group="interval"),
    Feature(
        "val interval over epochs", arguments(val_check_interval=3, check_val_every_n_epoch=None), group="interval"
    ),
    Feature("val every second", arguments(check_val_every_n_epoch=2), group="interval"),
    Feature("bf16", arguments(precision="bf16-mixed"), group="precision"),
    Feature("float64", arguments(precision="64-true"), group="precision"),
    Feature("noise", both(task(dropout=True), data(noise=True))),
    Feature("norm", task(norm=True)),
    Feature("metrics", task(metrics=True)),
    Feature("plateau", task(scheduler="epoch plateau"), group="scheduler"),
    Feature("step scheduler", task(scheduler="step"), group="scheduler"),
    Feature("freeze", task(freeze=True)),
    Feature("backbone", callback(lambda folder: BackboneFinetuning(1, backbone_initial_ratio_lr=0.5)), group="freeze"),
    Feature("leave epoch", task(leave=True)),
    Feature("no loss", task(none=True)),
    Feature("max steps", arguments(max_steps=7, max_epochs=-1)),
    Feature("min epochs", arguments(min_epochs=2, max_steps=3, max_epochs=None), group="max steps"),
    Feature("three replicas", arguments(replicas=3), group="replicas"),
    Feature("reload", arguments(reload_dataloaders_every_n_epochs=1)),
    Feature("fp16", arguments(precision="16-mixed"), group="precision", apart=("anomaly",)),
    Feature("two optimizers", task(**{"two optimizers": True}), group="scheduler", apart=("manual",)),
    # a save writes the step's point first, so what a later callback logs for that step is in no point
    Feature("hooks log", callback(lambda folder: Logs()), apart=("saves itself",)),
    Feature("saves itself", callback(lambda folder: Saves())),
    # Sums of fourth powers are rounded by where a tensor lies in memory. Which modules are trained is asked before a
    # step begins: in the first step of a resumed run that is before a hook of the task freezes some of them.
    Feature("microscope", callback(lambda folder: Microscope(3)), refused=LOOKS, tolerance=1e-12, apart=("freeze",)),
    Feature(
        "spike skip",
        callback(lambda folder: SpikeWatch(2.0, 3, "skip")),
        group="spikes",
        refused=SPIKES | {"two optimizers": "needs 1 optimizer"},
    ),
    Feature(
        "left out",
        arguments(leave_out_samples=[1, 4, 5]),
        refused={"several loaders": "several loaders", "stream": "is a stream"},
    ),
    Feature("sparse log", arguments(log_every_n_steps=3)),
    Feature("save by steps", lambda scene: scene.checkpoint.update(every_n_train_steps=2), group="saves"),
    Feature("save all", lambda scene: scene.checkpoint.update(save_top_k=-1), group="saves"),
    Feature("save none but last", lambda scene: scene.checkpoint.update(save_top_k=0, monitor=None), group="saves"),
    Feature("save worst", lambda scene: scene.checkpoint.update(mode="max", save_last=False), group="saves"),
    Feature("save on train", lambda scene: scene.checkpoint.update(monitor="train/loss_epoch"), group="saves"),
]
NEUTRAL = [
    Feature("async save", lambda scene: scene.checkpoint.update(asynchronous=True)),
    Feature("second checkpoint", callback(lambda folder: Checkpoint(dirpath=folder / "second", every_n_train_steps=2))),
    Feature(
        "second async",
        callback(lambda folder: Checkpoint(dirpath=folder / "async", every_n_train_steps=1, asynchronous=True)),
    ),
    Feature(
        "weights only",
        callback(lambda folder: Checkpoint(dirpath=folder / "weights", every_n_train_steps=3, save_weights_only=True)),
    ),
    Feature("workers", data(workers=1), slow=True),
    Feature("persistent workers", data(workers=1, persistent=True), group="workers", slow=True),
    Feature("lambda", callback(lambda folder: LambdaCallback(on_train_batch_end=nothing))),
    Feature("exception checkpoint", callback(lambda folder: OnExceptionCheckpoint(folder / "after_error"))),
    Feature("device stats", callback(lambda folder: DeviceStatsMonitor(cpu_stats=False))),
    Feature("timer", callback(lambda folder: Timer("00:01:00:00"))),
    Feature("max time", arguments(max_time="00:02:00:00")),
    Feature("lr monitor", callback(lambda folder: LearningRateMonitor())),
    Feature("throughput", callback(lambda folder: ThroughputMonitor())),
    Feature("stragglers", callback(lambda folder: StragglerMonitor()), refused={"elastic": "StragglerMonitor"}),
    Feature("spike watch", callback(lambda folder: SpikeWatch(window=3)), group="spikes", refused=SPIKES),
    Feature("bar and summary", arguments(enable_progress_bar=True, enable_model_summary=True)),
    Feature("second log", lambda scene: scene.loggers.append(lambda folder: JSONLinesLogger(folder / "second.jsonl"))),
    Feature("sanity", arguments(num_sanity_val_steps=2)),
    Feature("deterministic", arguments(deterministic=True)),
    Feature("anomaly", arguments(detect_anomaly=True)),
    Feature(
        "recheck",
        arguments(recheck_every=2, deterministic=True),
        group="deterministic",
        apart=("compile",),  # torch warns of its compiler with deterministic kernels
        refused={"manual": "recheck_every", "elastic": "recheck_every"},
    ),
    Feature("hang timeout", arguments(hang_timeout=100.0)),
    Feature("recompute", arguments(activation_checkpointing=["Sequential"])),
    Feature("bitwise", arguments(reproducible="bitwise"), tolerance=ROUNDING),
    Feature("no inference mode", arguments(inference_mode=False)),
    Feature("draws", callback(lambda folder: Draws())),
    Feature("reads", callback(lambda folder: Reads())),
    Feature("says", callback(lambda folder: Says())),
    Feature("saves itself async", callback(lambda folder: Saves(asynchronous=True)), group="saves itself"),
    Feature("validates inside", callback(lambda folder: Validates()), apart=("strategy", "precision")),
    Feature("counts", callback(lambda folder: Counts())),
    Feature("fit before", around("fit before")),
    Feature("validate before", around("validate before")),
    Feature("evaluate after", around("evaluate after")),
    Feature("prediction writer", both(callback(Writes), around("predict after"))),
    Feature("compile", arguments(compile={"backend": "eager"}), tolerance=ROUNDING, slow=True),
]
STRATEGIES = [
    Feature(
        "data parallel",
        on_two("data_parallel"),
        group="strategy",
        tolerance=ROUNDING,
        refused={"manual": "automatic_optimization", "compile": "compiled steps"},
    ),
    Feature("ddp", on_two("ddp"), group="strategy", tolerance=ROUNDING, processes=True),
    Feature("zero1", on_two("zero1"), group="strategy", tolerance=ROUNDING, processes=True),
    Feature(
        "fsdp",
        on_two({"name": "fsdp", "shard_blocks": 40}),
        group="strategy",
        tolerance=ROUNDING,
        processes=True,
        refused=LOCKSTEP,
    ),
    Feature(
        "data mesh",
        on_two({"name": "mesh", "data": 2}),
        group="strategy",
        tolerance=ROUNDING,
        processes=True,
        refused=SHARDED | LOCKSTEP,
    ),
    Feature(
        "pipeline",
        on_two({"name": "mesh", "pipeline": 2}),
        group="strategy",
        tolerance=ROUNDING,
        processes=True,
        refused=SHARDED
        | LOCKSTEP
        | {"metrics": "only the last stage"}
        | {"ema": "ExponentialMovingAverage", "late ema": "ExponentialMovingAverage"},
    ),
    Feature(
        "elastic",
        on_two({"name": "ddp", "elastic": True}, max_restarts=3),
        group="strategy",
        tolerance=ROUNDING,
        processes=True,
        refused=NOT_HANDED_ON,
    ),
]
DISTURBANCES = [
    Feature("sigterm", fault("sigterm")),
    Feature("sigterm in validation", fault("sigterm in validation")),
    Feature("sigint", fault("sigint")),
    Feature("failing hook", fault("hook")),
    Feature("failing zero_grad hook", fault("zero_grad hook")),
    Feature("failing validation hook", fault("validation hook")),
    Feature("failing epoch hook", fault("epoch hook")),
    Feature("failing save", fault("save")),
    Feature("failing logger", fault("logger")),
    Feature("failing finalize", fault("finalize")),
    Feature("failing data", fault("data")),
    Feature("resume", lambda scene: scene.stops_at.append(0), apart=("max steps",)),
    Feature("kill", fault("kill"), apart=("data parallel",)),
]

NAMED: dict[str, Feature] = {}
for _features, _shapes in ((SHAPING, True), (NEUTRAL, False), (STRATEGIES, False), (DISTURBANCES, False)):
    for _feature in _features:
        NAMED[_feature.name] = replace(_feature, shapes=_shapes, group=_feature.group or _feature.name)


def can_meet(first: Feature, second: Feature) -> bool:
    """Return whether the two may be in one run, be it to be refused."""
    if first.group == second.group:
        return False
    names = {first.name, first.group}, {second.name, second.group}
    return not names[1] & set(first.apart) and not names[0] & set(second.apart)


def refusal(features: Iterable[Feature]) -> str | None:
    """Return the pattern of the message by which a run of these features is refused; None where it is not."""
    features = list(features)
    for feature in features:
        for partner in features:
            for name in (partner.name, partner.group):
                if name in feature.refused:
                    return feature.refused[name]
    return None
