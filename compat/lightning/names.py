"""The table of Lightning's public names: what each one is on Legato. Data alone; `tree.py` makes modules from it.

Modules are paths below `lightning`. An entry says of a name that is defined there what kind it is, where its
implementation is ("module" or "module:name"; a leading dot is this package), and what differs, or, for a
placeholder, the way out. EXPORTS lists the names that a module passes on from others.
"""

from typing import Literal, NamedTuple

Kind = Literal["same", "better", "adapter", "placeholder"]
"""same: as Lightning's; better: the same name with a better behaviour; adapter: Lightning's arguments on Legato."""


class Entry(NamedTuple):
    """One public name."""

    kind: Kind
    home: str
    """Module, or module:name, of the implementation; empty for a placeholder."""
    text: str = ""
    """Difference from Lightning; for a placeholder, the advice on what to do instead."""


VERSION = "2.6.6"
"""The version of Lightning whose names these are."""

NAMES: dict[str, dict[str, Entry]] = {
    "fabric.accelerators.cuda": {
        "CUDAAccelerator": Entry("adapter", ".accelerators"),
        "is_cuda_available": Entry("same", "torch.cuda:is_available"),
        "find_usable_cuda_devices": Entry("same", ".accelerators", ""),
        "num_cuda_devices": Entry("same", ".utilities"),
    },
    "fabric.plugins.io.checkpoint_io": {
        "CheckpointIO": Entry(
            "adapter",
            ".strategies",
            "A Trainer is given none: checkpoints are directories in Legato's format, written whole or not at all; "
            "subclass ModelCheckpoint to change where and when.",
        ),
    },
    "fabric.plugins.io.torch_io": {
        "TorchCheckpointIO": Entry(
            "adapter",
            ".strategies",
            "A Trainer is given none: checkpoints are directories in Legato's format, written whole or not at all; "
            "subclass ModelCheckpoint to change where and when.",
        ),
    },
    "fabric.plugins.io.xla": {
        "XLACheckpointIO": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "fabric.utilities.throughput": {
        "measure_flops": Entry("same", ".utilities"),
    },
    "fabric.fabric": {
        "Fabric": Entry(
            "placeholder",
            "",
            "A loop of one's own needs no Fabric: write the step as a LightningModule's training_step with "
            "automatic_optimization=False, and give it to a Trainer.",
        ),
    },
    "fabric.plugins.environments.cluster_environment": {
        "ClusterEnvironment": Entry(
            "adapter",
            ".plugins",
            "Answers where this process is; a subclass of one's own is refused, since the place is read from the "
            "launcher's variables.",
        ),
    },
    "fabric.plugins.environments.kubeflow": {
        "KubeflowEnvironment": Entry(
            "placeholder",
            "",
            "A launcher's place is read from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: let the "
            "cluster set these.",
        ),
    },
    "fabric.plugins.environments.lightning": {
        "LightningEnvironment": Entry("adapter", ".plugins", ""),
        "find_free_network_port": Entry("same", ".plugins", ""),
    },
    "fabric.plugins.environments.lsf": {
        "LSFEnvironment": Entry(
            "placeholder",
            "",
            "A launcher's place is read from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: let the "
            "cluster set these.",
        ),
    },
    "fabric.plugins.environments.mpi": {
        "MPIEnvironment": Entry("adapter", ".plugins", "The launcher's variables are read without mpi4py."),
    },
    "fabric.plugins.environments.slurm": {
        "SLURMEnvironment": Entry(
            "adapter", ".plugins", "SIGTERM and SIGUSR1 requeue; another requeue_signal is refused."
        ),
    },
    "fabric.plugins.environments.torchelastic": {
        "TorchElasticEnvironment": Entry("adapter", ".plugins", ""),
    },
    "fabric.plugins.environments.xla": {
        "XLAEnvironment": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "fabric.utilities.apply_func": {
        "CONVERSION_DTYPES": Entry("same", ".utilities"),
        "move_data_to_device": Entry("same", ".utilities"),
        "convert_to_tensors": Entry("same", ".utilities"),
        "convert_tensors_to_scalars": Entry("same", ".utilities"),
        "apply_to_collection": Entry("same", ".utilities"),
    },
    "fabric.utilities.cloud_io": {
        "_atomic_save": Entry("same", ".inner_functions:atomic_save"),
        "get_filesystem": Entry("same", ".utilities"),
        "_load": Entry("same", ".utilities:load_file"),
        "_is_local_file_protocol": Entry("same", ".utilities:is_local_file_protocol"),
        "_is_dir": Entry("same", ".utilities:is_dir"),
    },
    "fabric.utilities.data": {
        "_set_sampler_epoch": Entry("same", ".inner_functions:set_sampler_epoch"),
        "has_iterable_dataset": Entry("same", ".utilities"),
        "sized_len": Entry("same", ".utilities"),
        "has_len": Entry("same", ".utilities"),
        "suggested_max_num_workers": Entry("same", ".utilities"),
        "AttributeDict": Entry("same", ".module"),
    },
    "fabric.utilities.distributed": {
        "_sync_ddp": Entry("same", ".inner_functions:sync_ddp"),
        "_sync_ddp_if_available": Entry("same", ".inner_functions:sync_ddp_if_available"),
        "_all_gather_ddp_if_available": Entry("same", ".inner_functions:all_gather_ddp_if_available"),
        "_get_default_process_group_backend_for_device": Entry("same", ".inner_functions:default_backend"),
        "_suggested_max_num_threads": Entry("same", ".inner_functions:suggested_threads"),
        "_gather_all_tensors": Entry("same", "torchmetrics.utilities.distributed:gather_all_tensors"),
        "group": Entry("same", ".utilities"),
        "is_shared_filesystem": Entry("same", ".utilities"),
        "DistributedSamplerWrapper": Entry("same", ".utilities"),
        "_distributed_is_initialized": Entry("same", ".utilities:distributed_is_initialized"),
    },
    "fabric.utilities.registry": {
        "_register_classes": Entry("same", ".accelerators:register_classes"),
    },
    "fabric.utilities.exceptions": {
        "MisconfigurationException": Entry(
            "better",
            ".exceptions",
            "It is the base of all errors that Legato raises on purpose, so that catching it catches each "
            "of them; their message says what to do.",
        ),
    },
    "fabric.utilities.spike": {
        "TrainingSpikeException": Entry("same", ".callbacks.monitors"),
    },
    "fabric.utilities.enums": {
        "LightningEnum": Entry("same", ".utilities"),
    },
    "fabric.utilities.rank_zero": {
        "_get_rank": Entry("same", ".utilities:launched_rank"),
        "rank_zero_deprecation": Entry("same", ".rank_zero"),
        "rank_zero_info": Entry("same", ".rank_zero"),
        "rank_zero_warn": Entry("same", ".rank_zero"),
        "rank_zero_debug": Entry("same", ".rank_zero"),
        "rank_zero_only": Entry(
            "better",
            ".rank_zero",
            "Its rank is read from the process group or the launcher whenever it is asked for, also "
            "before there is a Trainer.",
        ),
        "LightningDeprecationWarning": Entry("same", ".rank_zero"),
        "rank_prefixed_message": Entry("same", ".rank_zero"),
        "WarningCache": Entry("same", ".rank_zero"),
    },
    "fabric.utilities.seed": {
        "_collect_rng_states": Entry("same", ".inner_functions:collect_rng_states"),
        "_set_rng_states": Entry("same", ".inner_functions:set_rng_states"),
        "max_seed_value": Entry("same", ".utilities"),
        "min_seed_value": Entry("same", ".utilities"),
        "seed_everything": Entry("same", ".utilities"),
        "reset_seed": Entry("same", ".utilities"),
        "pl_worker_init_function": Entry(
            "better",
            ".utilities",
            "Loader workers are seeded by the position of each batch, with any number of workers; called "
            "by hand this function seeds them by worker and rank.",
        ),
    },
    "fabric.utilities.types": {
        "UntypedStorage": Entry("same", ".types"),
        "RedOpType": Entry("same", ".types"),
        "ProcessGroup": Entry("same", ".types"),
        "ReduceOp": Entry("same", ".types"),
        "CollectibleGroup": Entry("same", ".types"),
        "Steppable": Entry("same", ".types"),
        "Optimizable": Entry("same", ".types"),
        "_PATH": Entry("same", ".types:PATH"),
        "_DEVICE": Entry("same", ".types:DEVICE"),
        "_MAP_LOCATION_TYPE": Entry("same", ".types:MAP_LOCATION"),
        "_PARAMETERS": Entry("same", ".types:PARAMETERS"),
        "_Stateful": Entry("same", ".types:Stateful"),
    },
    "fabric.utilities.warnings": {
        "disable_possible_user_warnings": Entry("same", ".rank_zero"),
        "PossibleUserWarning": Entry("same", ".rank_zero"),
    },
    "pytorch": {
        "LIGHTNING_LOGO": Entry("same", ".utilities"),
        "cli_lightning_logo": Entry("same", ".utilities"),
        "_logger": Entry("same", ".rank_zero:log"),
        "__version__": Entry("same", "legato.compat.lightning"),
    },
    "pytorch.accelerators": {
        "AcceleratorRegistry": Entry("adapter", ".accelerators", ""),
    },
    "pytorch.accelerators.accelerator": {
        "Accelerator": Entry("adapter", ".accelerators", "Kinds of devices of one's own are refused."),
    },
    "pytorch.accelerators.cpu": {
        "CPUAccelerator": Entry("adapter", ".accelerators", ""),
        "get_cpu_stats": Entry("same", ".accelerators", ""),
    },
    "pytorch.accelerators.cuda": {
        "CUDAAccelerator": Entry("adapter", ".accelerators", ""),
        "get_nvidia_gpu_stats": Entry(
            "adapter", ".accelerators", "Asks NVIDIA's library by torch, not nvidia-smi: use, memory and temperature."
        ),
    },
    "pytorch.accelerators.mps": {
        "MPSAccelerator": Entry("adapter", ".accelerators", ""),
        "get_device_stats": Entry("same", ".accelerators", ""),
    },
    "pytorch.accelerators.xla": {
        "XLAAccelerator": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "pytorch.callbacks.batch_size_finder": {
        "BatchSizeFinder": Entry(
            "adapter",
            ".callbacks.finders",
            "Searches by a copy of the trainer, before a run begins; on one process scale_batch_size does within it.",
        ),
    },
    "pytorch.callbacks.callback": {
        "Callback": Entry("adapter", ".callbacks.callback", ""),
    },
    "pytorch.callbacks.checkpoint": {
        "Checkpoint": Entry("adapter", ".callbacks.model_checkpoint", ""),
    },
    "pytorch.callbacks.device_stats_monitor": {
        "DeviceStatsMonitor": Entry(
            "adapter", ".callbacks.training", "Of rank 0; the processor by psutil, where it is installed."
        ),
    },
    "pytorch.callbacks.early_stopping": {
        "EarlyStoppingReason": Entry("same", ".callbacks.early_stopping", ""),
        "EarlyStopping": Entry("adapter", ".callbacks.early_stopping", ""),
    },
    "pytorch.callbacks.finetuning": {
        "multiplicative": Entry("same", ".callbacks.training", ""),
        "BaseFinetuning": Entry(
            "better",
            ".callbacks.training",
            "A resume restores which parameters are trained, and does not unfreeze twice in an epoch.",
        ),
        "BackboneFinetuning": Entry(
            "better",
            ".callbacks.training",
            "A resume restores which parameters are trained, and does not raise a rate twice in an epoch.",
        ),
    },
    "pytorch.callbacks.gradient_accumulation_scheduler": {
        "GradientAccumulationScheduler": Entry("same", ".callbacks.training", ""),
    },
    "pytorch.callbacks.lambda_function": {
        "LambdaCallback": Entry("same", ".callbacks.training", ""),
    },
    "pytorch.callbacks.lr_finder": {
        "LearningRateFinder": Entry(
            "adapter",
            ".callbacks.finders",
            "Sweeps by a copy of the trainer, before the run begins; on one process lr_find sweeps within it, too.",
        ),
    },
    "pytorch.callbacks.lr_monitor": {
        "LearningRateMonitor": Entry("adapter", ".callbacks.monitors", ""),
    },
    "pytorch.callbacks.model_checkpoint": {
        "ModelCheckpoint": Entry(
            "better",
            ".callbacks.model_checkpoint",
            "A checkpoint is a directory without pickle, under the same name; only what the run itself wrote is ever "
            "removed, and after an exception the last finished step is saved, from which a run can go on.",
        ),
    },
    "pytorch.callbacks.model_summary": {
        "ModelSummary": Entry("adapter", ".callbacks.model_summary", ""),
    },
    "pytorch.callbacks.on_exception_checkpoint": {
        "OnExceptionCheckpoint": Entry(
            "better",
            ".callbacks.training",
            "Saves the last finished step, from which a run goes on; with several processes nothing, since the "
            "others may be gone.",
        ),
    },
    "pytorch.callbacks.prediction_writer": {
        "WriteInterval": Entry("same", ".callbacks.training", ""),
        "BasePredictionWriter": Entry(
            "adapter",
            ".callbacks.training",
            "Each process writes its own predictions, every sample once; batch_indices are None for data without "
            "positions, such as streams.",
        ),
    },
    "pytorch.callbacks.progress.progress_bar": {
        "ProgressBar": Entry("adapter", ".callbacks.progress", ""),
        "get_standard_metrics": Entry("same", ".callbacks.progress", ""),
    },
    "pytorch.callbacks.progress.rich_progress": {
        "CustomBarColumn": Entry("same", ".callbacks.rich_progress", ""),
        "CustomInfiniteTask": Entry(
            "placeholder",
            "",
            "Bars of RichProgressBar end by themselves; override configure_columns to show them otherwise.",
        ),
        "CustomProgress": Entry("same", ".callbacks.rich_progress", ""),
        "CustomTimeColumn": Entry("same", ".callbacks.rich_progress", ""),
        "BatchesProcessedColumn": Entry("same", ".callbacks.rich_progress", ""),
        "ProcessingSpeedColumn": Entry("same", ".callbacks.rich_progress", ""),
        "MetricsTextColumn": Entry("same", ".callbacks.rich_progress", ""),
        "RichProgressBarTheme": Entry("same", ".callbacks.rich_progress", ""),
        "RichProgressBar": Entry(
            "adapter", ".callbacks.rich_progress", "Draws with rich's own thread, ten times a second."
        ),
    },
    "pytorch.callbacks.progress.tqdm_progress": {
        "Tqdm": Entry("same", ".callbacks.progress", ""),
        "TQDMProgressBar": Entry(
            "better",
            ".callbacks.progress",
            "Bars are drawn ten times a second at most, and once in ten seconds where standard output is no terminal.",
        ),
        "convert_inf": Entry("same", ".callbacks.progress", ""),
    },
    "pytorch.callbacks.pruning": {
        "ModelPruning": Entry(
            "placeholder",
            "",
            "Call torch.nn.utils.prune in on_train_epoch_end of a callback: prune.l1_unstructured(module, "
            "'weight', amount), and prune.remove when training ends.",
        ),
    },
    "pytorch.callbacks.rich_model_summary": {
        "RichModelSummary": Entry("adapter", ".callbacks.model_summary", ""),
    },
    "pytorch.callbacks.spike": {
        "SpikeDetection": Entry("same", ".callbacks.monitors"),
    },
    "pytorch.callbacks.stochastic_weight_avg": {
        "StochasticWeightAveraging": Entry(
            "better",
            ".callbacks.averaging",
            "The averages are in checkpoints, so that an interrupted run ends with the same weights; batch norms "
            "are measured by one pass without the hooks and logs of an epoch.",
        ),
    },
    "pytorch.callbacks.throughput_monitor": {
        "ThroughputMonitor": Entry(
            "adapter",
            ".callbacks.training",
            "Logs throughput/samples_per_second and throughput/steps_per_second over all processes; batch_size_fn"
            " is not called, since samples are counted.",
        ),
    },
    "pytorch.callbacks.timer": {
        "Interval": Entry("same", ".callbacks.monitors", ""),
        "Timer": Entry(
            "better",
            ".callbacks.monitors",
            "All ranks stop at the same step; time before a resume counts for each stage.",
        ),
    },
    "pytorch.callbacks.weight_averaging": {
        "WeightAveraging": Entry(
            "better",
            ".callbacks.averaging",
            "A validation before the first update measures the trained weights, not the first ones. A batch norm's "
            "count of batches is not averaged.",
        ),
        "EMAWeightAveraging": Entry(
            "better",
            ".callbacks.averaging",
            "A validation before the first update measures the trained weights, not the first ones. A batch norm's "
            "count of batches is not averaged.",
        ),
    },
    "pytorch.cli": {
        "ModuleType": Entry("same", ".instantiation"),
        "ReduceLROnPlateau": Entry("same", ".cli"),
        "LRSchedulerTypeTuple": Entry("same", ".cli"),
        "LRSchedulerTypeUnion": Entry("same", ".cli"),
        "LRSchedulerType": Entry("same", ".cli"),
        "ArgsType": Entry("same", ".cli"),
        "OptimizerCallable": Entry("same", ".cli"),
        "LRSchedulerCallable": Entry("same", ".cli"),
        "LightningArgumentParser": Entry("same", ".cli"),
        "SaveConfigCallback": Entry("same", ".cli"),
        "LightningCLI": Entry(
            "adapter",
            ".cli",
            "By jsonargparse, as with Lightning (without it, an error names the `legato fit` line that "
            "does the same); optimizers are made when a run asks for them, and hparams are what __init__ "
            "received.",
        ),
        "instantiate_class": Entry("same", ".cli"),
        "instantiate_module": Entry("same", ".cli"),
    },
    "pytorch.core.datamodule": {
        "LightningDataModule": Entry("adapter", ".module", ""),
    },
    "pytorch.core.hooks": {
        "ModelHooks": Entry("same", "legato.tasks.task_hooks:TaskHooks", ""),
        "DataHooks": Entry("same", "legato.tasks.data_hooks", ""),
        "CheckpointHooks": Entry("same", "legato.tasks.task_hooks:TaskHooks", ""),
    },
    "pytorch.core.mixins.hparams_mixin": {
        "HyperparametersMixin": Entry("same", "legato.tasks.hyperparameters:Hyperparameters", ""),
    },
    "pytorch.core.module": {
        "MODULE_OPTIMIZERS": Entry("same", ".optimizers", ""),
        "LightningModule": Entry(
            "adapter",
            ".module",
            "`log` reduces over batches and ranks by samples, so that sync_dist is not needed; "
            "load_from_checkpoint reads with weights_only=True.",
        ),
    },
    "pytorch.core.optimizer": {
        "_init_optimizers_and_lr_schedulers": Entry("same", ".inner_functions:init_optimizers"),
        "do_nothing_closure": Entry("same", ".optimizers", ""),
        "LightningOptimizer": Entry("same", ".optimizers", ""),
    },
    "pytorch.core.saving": {
        "_load_state": Entry("same", ".inner_functions:load_state"),
        "pl_load": Entry("same", ".utilities:load_file"),
        "CHECKPOINT_PAST_HPARAMS_KEYS": Entry("same", ".saving"),
        "update_hparams": Entry("same", ".saving"),
        "load_hparams_from_tags_csv": Entry("same", ".saving"),
        "save_hparams_to_tags_csv": Entry("same", ".saving"),
        "load_hparams_from_yaml": Entry("same", ".saving"),
        "save_hparams_to_yaml": Entry("same", ".saving"),
        "convert": Entry("same", ".saving"),
        "_load_from_checkpoint": Entry("same", ".saving:load_from_checkpoint"),
    },
    "pytorch.loggers.comet": {
        "FRAMEWORK_NAME": Entry(
            "placeholder",
            "",
            "Write a Logger of your own over the package (subclass lightning.pytorch.loggers.Logger with "
            "name, version, log_metrics and log_hyperparams), or use WandbLogger or MLFlowLogger.",
        ),
        "comet_experiment": Entry(
            "placeholder",
            "",
            "Write a Logger of your own over the package (subclass lightning.pytorch.loggers.Logger with "
            "name, version, log_metrics and log_hyperparams), or use WandbLogger or MLFlowLogger.",
        ),
        "CometLogger": Entry(
            "placeholder",
            "",
            "Write a Logger of your own over the package (subclass lightning.pytorch.loggers.Logger with "
            "name, version, log_metrics and log_hyperparams), or use WandbLogger or MLFlowLogger.",
        ),
    },
    "pytorch.loggers.csv_logs": {
        "ExperimentWriter": Entry("same", ".loggers"),
        "CSVLogger": Entry(
            "better",
            ".loggers",
            "Each row is written at once, and a resume removes the rows of later steps. What another run wrote under "
            "the same version is kept as metrics.1.csv, where Lightning deletes it.",
        ),
    },
    "pytorch.loggers.litlogger": {
        "LitLogger": Entry(
            "placeholder",
            "",
            "Write a Logger of your own over the package (subclass lightning.pytorch.loggers.Logger with "
            "name, version, log_metrics and log_hyperparams), or use WandbLogger or MLFlowLogger.",
        ),
    },
    "pytorch.loggers.logger": {
        "Logger": Entry("same", ".loggers"),
        "DummyLogger": Entry("same", ".loggers"),
        "merge_dicts": Entry("same", ".loggers"),
        "rank_zero_experiment": Entry("same", ".loggers"),
        "DummyExperiment": Entry("same", ".loggers"),
    },
    "pytorch.loggers.mlflow": {
        "LOCAL_FILE_URI_PREFIX": Entry("same", ".loggers"),
        "MLFlowLogger": Entry(
            "better",
            ".loggers",
            "A resume of the run goes on in the same run of the service, and writes no point twice; "
            "checkpoints are directories.",
        ),
    },
    "pytorch.loggers.neptune": {
        "NeptuneLogger": Entry("placeholder", "", "Neptune has been shut down; use WandbLogger or MLFlowLogger."),
    },
    "pytorch.loggers.tensorboard": {
        "TensorBoardLogger": Entry(
            "better",
            ".loggers",
            "A resume shows each point once; the HPARAMS tab has the final metrics.",
        ),
    },
    "pytorch.loggers.wandb": {
        "WandbLogger": Entry(
            "better",
            ".loggers",
            "A resume of the run goes on in the same run of the service, and writes no point twice; "
            "checkpoints are directories.",
        ),
        "_WANDB_AVAILABLE": Entry("same", ".loggers:WANDB_AVAILABLE"),
    },
    "pytorch.loops.evaluation_loop": {
        "_EvaluationLoop": Entry("adapter", ".loops:EvaluationLoop", "It runs nothing; _print_results is called."),
        "RestartStage": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
    },
    "pytorch.loops.fit_loop": {
        "_FitLoop": Entry("adapter", ".loops:FitLoop", "It has the progress to read, and runs nothing."),
        "RestartStage": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
    },
    "pytorch.loops.optimization.automatic": {
        "_AutomaticOptimization": Entry(
            "adapter", ".loops:Optimizing", "It has the progress to read, and runs nothing."
        ),
        "ClosureResult": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
        "Closure": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
    },
    "pytorch.loops.optimization.closure": {
        "OutputResult": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
        "AbstractClosure": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
    },
    "pytorch.loops.optimization.manual": {
        "_ManualOptimization": Entry("adapter", ".loops:Optimizing", "It has the progress to read, and runs nothing."),
        "ManualResult": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
    },
    "pytorch.loops.training_epoch_loop": {
        "_TrainingEpochLoop": Entry(
            "adapter", ".loops:TrainingEpochLoop", "It has the progress to read, and runs nothing."
        ),
        "RestartStage": Entry(
            "placeholder",
            "",
            "The loop is legato/trainer/trainer.py, one file; trainer.fit_loop has the progress to read, hooks "
            "change what happens.",
        ),
    },
    "pytorch.loops.utilities": {
        "_is_max_limit_reached": Entry("same", ".inner_functions:is_max_limit_reached"),
        "check_finite_loss": Entry("same", ".types_of_modules", ""),
    },
    "pytorch.overrides.distributed": {
        "prepare_for_backward": Entry(
            "placeholder", "", "Strategy ddp prepares for backward itself: return the loss, or call manual_backward."
        ),
        "UnrepeatedDistributedSampler": Entry("same", ".inner_functions"),
        "UnrepeatedDistributedSamplerWrapper": Entry("same", ".inner_functions"),
    },
    "pytorch.plugins.io.async_plugin": {
        "AsyncCheckpointIO": Entry(
            "placeholder",
            "",
            "Legato's callback Checkpoint(asynchronous=True) writes in the background; give it to callbacks.",
        ),
    },
    "pytorch.plugins.layer_sync": {
        "LayerSync": Entry("adapter", ".plugins", ""),
        "TorchSyncBatchNorm": Entry("adapter", ".plugins", ""),
    },
    "pytorch.plugins.precision.amp": {
        "MixedPrecision": Entry(
            "adapter", ".plugins", "A scaler of one's own is refused: trainer.scaler is the run's."
        ),
    },
    "pytorch.plugins.precision.bitsandbytes": {
        "BitsandbytesPrecision": Entry(
            "placeholder", "", "Put bitsandbytes' layers into the module in configure_model."
        ),
    },
    "pytorch.plugins.precision.deepspeed": {
        "DeepSpeedPrecision": Entry(
            "placeholder",
            "",
            "Strategy fsdp shards parameters, gradients and optimizer states as ZeRO stage 3 does: say "
            "Trainer(strategy='fsdp').",
        ),
    },
    "pytorch.plugins.precision.double": {
        "DoublePrecision": Entry("adapter", ".plugins", ""),
        "LightningDoublePrecisionModule": Entry(
            "placeholder", "", "Say Trainer(precision='64-true'), which converts the module and its batches."
        ),
    },
    "pytorch.plugins.precision.fsdp": {
        "FSDPPrecision": Entry("adapter", ".plugins", ""),
    },
    "pytorch.plugins.precision.half": {
        "HalfPrecision": Entry("adapter", ".plugins", ""),
    },
    "pytorch.plugins.precision.precision": {
        "Precision": Entry(
            "adapter",
            ".plugins",
            "A run knows a precision by its word, so that a subclass with other methods is refused.",
        ),
    },
    "pytorch.plugins.precision.transformer_engine": {
        "TransformerEnginePrecision": Entry(
            "placeholder",
            "",
            "Call transformer_engine's layers and fp8_autocast in the module, and say precision='bf16-true'.",
        ),
    },
    "pytorch.plugins.precision.xla": {
        "XLAPrecision": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "pytorch.profilers.advanced": {
        "AdvancedProfiler": Entry(
            "better",
            "legato.trainer.profiling",
            "Actions within actions are recorded too, each with its own functions.",
        ),
    },
    "pytorch.profilers.base": {
        "PassThroughProfiler": Entry("same", ".profilers"),
    },
    "pytorch.profilers.profiler": {
        "Profiler": Entry("same", ".profilers"),
    },
    "pytorch.profilers.pytorch": {
        "RegisterRecordFunction": Entry("same", ".profilers"),
        "ScheduleWrapper": Entry(
            "placeholder",
            "",
            "Give torch.profiler.schedule(wait=1, warmup=1, active=3) as `schedule`; it counts the steps of a stage.",
        ),
        "PyTorchProfiler": Entry(
            "adapter",
            "legato.trainer.profiling",
            "The report names what Legato calls: its strategy, its loaders and the hooks.",
        ),
    },
    "pytorch.profilers.simple": {
        "SimpleProfiler": Entry(
            "adapter",
            "legato.trainer.profiling",
            "The report names what Legato calls: its strategy, its loaders and the hooks.",
        ),
    },
    "pytorch.profilers.xla": {
        "XLAProfiler": Entry(
            "placeholder",
            "",
            'Legato runs on CPU, CUDA and MPS devices, not on XLA; profiler="pytorch" records a trace there.',
        ),
    },
    "pytorch.serve.servable_module": {
        "ServableModule": Entry(
            "placeholder", "", "Serve the exported module: to_onnx, to_torchscript, or legato export."
        ),
    },
    "pytorch.serve.servable_module_validator": {
        "ServableModuleValidator": Entry(
            "placeholder", "", "Serve the exported module: to_onnx, to_torchscript, or legato export."
        ),
    },
    "pytorch.strategies": {
        "StrategyRegistry": Entry("adapter", ".strategies", ""),
    },
    "pytorch.strategies.ddp": {
        "DDPStrategy": Entry(
            "adapter",
            ".strategies",
            "Processes are forked from a server whatever start_method says; every sample is evaluated once.",
        ),
    },
    "pytorch.strategies.deepspeed": {
        "remove_module_hooks": Entry(
            "placeholder",
            "",
            "Strategy fsdp shards parameters, gradients and optimizer states as ZeRO stage 3 does: say "
            "Trainer(strategy='fsdp').",
        ),
        "DeepSpeedStrategy": Entry(
            "placeholder",
            "",
            "Strategy fsdp shards parameters, gradients and optimizer states as ZeRO stage 3 does: say "
            "Trainer(strategy='fsdp').",
        ),
    },
    "pytorch.strategies.fsdp": {
        "FSDPStrategy": Entry(
            "adapter",
            ".strategies",
            "torch's fully_shard (FSDP2); a checkpoint is read on any number of processes, whatever "
            "state_dict_type says.",
        ),
    },
    "pytorch.strategies.model_parallel": {
        "ModelParallelStrategy": Entry(
            "adapter",
            ".strategies",
            "tensor_plan() of the module, or torch's parallelize_module in configure_model, splits layers.",
        ),
    },
    "pytorch.strategies.parallel": {
        "ParallelStrategy": Entry(
            "adapter",
            ".strategies",
            "To be named and asked; a strategy of one's own implements legato.trainer.strategies.Strategy.",
        ),
    },
    "pytorch.strategies.single_device": {
        "SingleDeviceStrategy": Entry("adapter", ".strategies", ""),
    },
    "pytorch.strategies.single_xla": {
        "SingleDeviceXLAStrategy": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "pytorch.strategies.strategy": {
        "TBroadcast": Entry("same", ".types_of_modules", ""),
        "TReduce": Entry("same", ".types_of_modules", ""),
        "Strategy": Entry(
            "adapter",
            ".strategies",
            "To be named and asked; a strategy of one's own implements legato.trainer.strategies.Strategy.",
        ),
    },
    "pytorch.strategies.xla": {
        "XLAStrategy": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "pytorch.trainer.connectors.accelerator_connector": {
        "_AcceleratorConnector": Entry(
            "adapter",
            ".accelerators:AcceleratorConnector",
            "It knows devices alone; methods that a package puts in its place are not called.",
        ),
        "_LITERAL_WARN": Entry("same", ".types:LITERAL_WARN"),
        "_PRECISION_INPUT": Entry("same", ".types:PRECISION_INPUT"),
    },
    "pytorch.trainer.states": {
        "TrainerStatus": Entry("same", ".states", ""),
        "TrainerFn": Entry("same", ".states", ""),
        "RunningStage": Entry("same", ".states", ""),
        "TrainerState": Entry("same", ".states", ""),
    },
    "pytorch.trainer.trainer": {
        "Trainer": Entry(
            "adapter",
            ".trainer",
            "The order of samples and random numbers is Legato's, the same on any number of processes; limits of "
            "evaluation batches count over all of them; files are read with weights_only=True.",
        ),
    },
    "pytorch.tuner.tuning": {
        "Tuner": Entry(
            "better",
            ".tuner",
            "Each trial trains a copy of the module with a copy of the trainer, so that weights, random "
            "numbers, callbacks and files stay as they were; several processes may search, too.",
        ),
    },
    "pytorch.utilities": {
        "FLOAT16_EPSILON": Entry("same", ".utilities"),
        "FLOAT32_EPSILON": Entry("same", ".utilities"),
        "FLOAT64_EPSILON": Entry("same", ".utilities"),
    },
    "pytorch.utilities.combined_loader": {
        "CombinedLoader": Entry(
            "better",
            "legato.trainer.data.combined",
            "Each loader keeps its own order and resume position, a mode or a loader that cannot work is "
            "refused at once, and it has a length before it is iterated.",
        ),
    },
    "pytorch.utilities.compile": {
        "from_compiled": Entry("same", ".utilities"),
        "to_uncompiled": Entry("same", ".utilities"),
    },
    "pytorch.utilities.data": {
        "_is_dataloader_shuffled": Entry("same", ".inner_functions:is_shuffled"),
        "BType": Entry("same", ".types"),
        "extract_batch_size": Entry("same", ".utilities"),
        "has_len_all_ranks": Entry(
            "better",
            ".utilities",
            "Lengths that differ between ranks are refused when the loaders are made, so this asks this rank alone.",
        ),
        "has_iterable_dataset": Entry("same", ".utilities"),
        "sized_len": Entry("same", ".utilities"),
    },
    "pytorch.utilities.deepspeed": {
        "CPU_DEVICE": Entry("same", ".utilities"),
        "ds_checkpoint_dir": Entry(
            "placeholder",
            "",
            "Legato has no DeepSpeed: its fsdp and zero1 strategies shard parameters and optimizer "
            "states, and their checkpoints are whole.",
        ),
        "convert_zero_checkpoint_to_fp32_state_dict": Entry(
            "placeholder",
            "",
            "Legato has no DeepSpeed: its fsdp and zero1 strategies shard parameters and optimizer "
            "states, and their checkpoints are whole.",
        ),
    },
    "pytorch.utilities.enums": {
        "GradClipAlgorithmType": Entry("same", ".utilities"),
    },
    "pytorch.utilities.exceptions": {
        "SIGTERMException": Entry(
            "adapter",
            ".exceptions",
            "Legato saves, runs the hooks that end a run and ends the process by SIGTERM itself; it "
            "raises no exception in the program.",
        ),
        "_TunerExitException": Entry("same", ".exceptions:TunerExitException"),
    },
    "pytorch.utilities.grads": {
        "grad_norm": Entry("same", ".utilities"),
    },
    "pytorch.utilities.memory": {
        "recursive_detach": Entry("same", ".utilities"),
        "is_oom_error": Entry("same", ".utilities"),
        "is_cuda_out_of_memory": Entry("same", ".utilities"),
        "is_cudnn_snafu": Entry("same", ".utilities"),
        "is_out_of_cpu_memory": Entry("same", ".utilities"),
        "garbage_collection_cuda": Entry("same", ".utilities"),
    },
    "pytorch.utilities.migration.utils": {
        "migrate_checkpoint": Entry(
            "placeholder",
            "",
            "Legato reads checkpoints of every Lightning 2 as they are; upgrade older ones with Lightning "
            "itself: python -m lightning.pytorch.utilities.upgrade_checkpoint FILE.",
        ),
        "pl_legacy_patch": Entry(
            "placeholder",
            "",
            "Legato reads checkpoints of every Lightning 2 as they are; upgrade older ones with Lightning "
            "itself: python -m lightning.pytorch.utilities.upgrade_checkpoint FILE.",
        ),
    },
    "pytorch.utilities.model_helpers": {
        "_ModuleMode": Entry("same", ".inner_functions:ModuleMode"),
        "_restricted_classmethod": Entry("same", ".module:OfClass"),
        "is_overridden": Entry("same", ".utilities"),
        "get_torchvision_model": Entry("same", ".utilities"),
    },
    "pytorch.utilities.model_registry": {
        "find_model_local_ckpt_path": Entry(
            "placeholder",
            "",
            "Legato has no model registry: download the checkpoint and give its path as ckpt_path.",
        ),
        "download_model_from_registry": Entry(
            "placeholder",
            "",
            "Legato has no model registry: download the checkpoint and give its path as ckpt_path.",
        ),
    },
    "pytorch.utilities.model_summary.model_summary": {
        "PARAMETER_NUM_UNITS": Entry("same", ".model_summary"),
        "UNKNOWN_SIZE": Entry("same", ".model_summary"),
        "LEFTOVER_PARAMS_NAME": Entry("same", ".model_summary"),
        "NOT_APPLICABLE": Entry("same", ".model_summary"),
        "LayerSummary": Entry("same", ".model_summary"),
        "ModelSummary": Entry("same", ".model_summary"),
        "parse_batch_shape": Entry("same", ".model_summary"),
        "get_formatted_model_size": Entry("same", ".model_summary"),
        "get_human_readable_count": Entry("same", ".model_summary"),
        "summarize": Entry("same", ".model_summary"),
    },
    "pytorch.utilities.model_summary.model_summary_deepspeed": {
        "deepspeed_param_size": Entry(
            "placeholder",
            "",
            "Legato has no DeepSpeed: its fsdp and zero1 strategies shard parameters and optimizer "
            "states, and their checkpoints are whole.",
        ),
        "DeepSpeedLayerSummary": Entry(
            "placeholder",
            "",
            "Legato has no DeepSpeed: its fsdp and zero1 strategies shard parameters and optimizer "
            "states, and their checkpoints are whole.",
        ),
        "DeepSpeedSummary": Entry(
            "placeholder",
            "",
            "Legato has no DeepSpeed: its fsdp and zero1 strategies shard parameters and optimizer "
            "states, and their checkpoints are whole.",
        ),
    },
    "pytorch.utilities.parameter_tying": {
        "find_shared_parameters": Entry("same", ".utilities"),
        "set_shared_parameters": Entry("same", ".utilities"),
    },
    "pytorch.utilities.parsing": {
        "is_picklable": Entry("same", ".utilities"),
        "clean_namespace": Entry("same", ".utilities"),
        "parse_class_init_keys": Entry("same", ".utilities"),
        "get_init_args": Entry("same", ".utilities"),
        "collect_init_args": Entry("same", ".utilities"),
        "save_hyperparameters": Entry("same", ".utilities"),
        "AttributeDict": Entry("same", ".module"),
        "lightning_hasattr": Entry("same", ".utilities"),
        "lightning_getattr": Entry("same", ".utilities"),
        "lightning_setattr": Entry("same", ".utilities"),
    },
    "pytorch.utilities.seed": {
        "isolate_rng": Entry("same", ".utilities"),
    },
    "pytorch.utilities.signature_utils": {
        "is_param_in_hook_signature": Entry("same", ".utilities"),
    },
    "pytorch.utilities.types": {
        "STEP_OUTPUT": Entry("same", ".types"),
        "TRAIN_DATALOADERS": Entry("same", ".types"),
        "EVAL_DATALOADERS": Entry("same", ".types"),
        "DistributedDataParallel": Entry("same", ".types"),
        "LRSchedulerTypeTuple": Entry("same", ".types"),
        "LRSchedulerTypeUnion": Entry("same", ".types"),
        "LRSchedulerType": Entry("same", ".types"),
        "LRSchedulerPLType": Entry("same", ".types"),
        "LRSchedulerConfig": Entry("same", ".types"),
        "LRSchedulerConfigType": Entry("same", ".types"),
        "OptimizerConfig": Entry("same", ".types"),
        "OptimizerLRSchedulerConfig": Entry("same", ".types"),
        "OptimizerLRScheduler": Entry("same", ".types"),
        "_NUMBER": Entry("same", ".types:NUMBER"),
        "_METRIC": Entry("same", ".types:METRIC"),
        "_EVALUATE_OUTPUT": Entry("same", ".types:EVALUATE_OUTPUT"),
        "_PREDICT_OUTPUT": Entry("same", ".types:PREDICT_OUTPUT"),
    },
    "pytorch.utilities.upgrade_checkpoint": {
        "main": Entry(
            "adapter",
            ".utilities",
            "There is nothing to upgrade: checkpoints of every Lightning 2 are read as they are.",
        ),
    },
    "fabric.utilities.imports": {
        "package_available": Entry("same", ".utilities"),
    },
    "pytorch.loops.prediction_loop": {
        "_PredictionLoop": Entry("adapter", ".loops:PredictionLoop", "It has the progress to read, and runs nothing."),
    },
    "pytorch.loops.loop": {
        "_Loop": Entry("adapter", ".loops:Loop", "It has the progress to read, and runs nothing."),
    },
    "pytorch.loops.progress": {
        "_BaseProgress": Entry("same", ".loops:Counts"),
        "_Progress": Entry("same", ".loops:Progress"),
        "_BatchProgress": Entry("same", ".loops:BatchProgress"),
        "_ReadyCompletedTracker": Entry("same", ".loops:Tracker"),
        "_StartedTracker": Entry("same", ".loops:Tracker"),
        "_ProcessedTracker": Entry("same", ".loops:Tracker"),
    },
    "fabric.utilities.optimizer": {
        "_optimizer_to_device": Entry("same", ".inner_functions:optimizer_to_device"),
        "_optimizers_to_device": Entry("same", ".inner_functions:optimizers_to_device"),
    },
    "fabric.utilities.init": {
        "_has_meta_device_parameters_or_buffers": Entry("same", ".inner_functions:has_meta_device"),
    },
    "fabric.plugins.precision.utils": {
        "_convert_fp_tensor": Entry("same", ".inner_functions:convert_fp_tensor"),
    },
    "fabric.accelerators.accelerator": {
        "Accelerator": Entry("adapter", ".accelerators", "Kinds of devices of one's own are refused."),
    },
    "fabric.accelerators.cpu": {
        "CPUAccelerator": Entry("adapter", ".accelerators"),
    },
    "fabric.accelerators.mps": {
        "MPSAccelerator": Entry("adapter", ".accelerators"),
    },
    "pytorch.trainer.call": {
        "_call_callback_hooks": Entry("same", ".inner_functions:call_callback_hooks"),
        "_call_lightning_module_hook": Entry("same", ".inner_functions:call_module_hook"),
        "_call_lightning_datamodule_hook": Entry("same", ".inner_functions:call_datamodule_hook"),
        "_call_strategy_hook": Entry("same", ".inner_functions:call_strategy_hook"),
        "_call_callbacks_state_dict": Entry("same", ".inner_functions:callbacks_state_dict"),
    },
    "pytorch.plugins.precision": {
        "PrecisionPlugin": Entry("adapter", ".plugins:Precision"),
        "MixedPrecisionPlugin": Entry("adapter", ".plugins:MixedPrecision"),
        "DoublePrecisionPlugin": Entry("adapter", ".plugins:DoublePrecision"),
        "HalfPrecisionPlugin": Entry("adapter", ".plugins:HalfPrecision"),
        "FSDPPrecisionPlugin": Entry("adapter", ".plugins:FSDPPrecision"),
        "FSDPMixedPrecisionPlugin": Entry("adapter", ".plugins:FSDPPrecision"),
    },
    "pytorch._graveyard.tpu": {
        "TPUAccelerator": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
        "SingleTPUStrategy": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on TPUs: say accelerator='auto'."
        ),
    },
    "pytorch._graveyard.hpu": {
        "HPUAccelerator": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on HPUs: say accelerator='auto'."
        ),
        "HPUParallelStrategy": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on HPUs: say accelerator='auto'."
        ),
        "SingleHPUStrategy": Entry(
            "placeholder", "", "Legato runs on CPU, CUDA and MPS devices, not on HPUs: say accelerator='auto'."
        ),
    },
    "pytorch.utilities.apply_func": {
        "apply_to_collection": Entry("same", ".utilities"),
        "move_data_to_device": Entry("same", ".utilities"),
    },
    "pytorch.utilities.imports": {
        "package_available": Entry("same", ".utilities"),
    },
    "pytorch.tuner.lr_finder": {
        "_LRFinder": Entry("same", "legato.trainer.tuning:LearningRateSweep"),
    },
    "pytorch.plugins": {
        "_PLUGIN_INPUT": Entry("same", ".types:PLUGIN_INPUT"),
    },
    "pytorch.loggers.utilities": {"_scan_checkpoints": Entry("same", ".loggers:scan_checkpoints")},
    "fabric.utilities.logger": {
        "_add_prefix": Entry("same", ".loggers:add_prefix"),
        "_convert_params": Entry("same", ".loggers:as_dict"),
        "_flatten_dict": Entry("same", ".loggers:flatten_dict"),
        "_sanitize_callable_params": Entry("same", ".loggers:sanitize_callables"),
        "_sanitize_params": Entry("same", ".loggers:sanitize_params"),
    },
    "fabric.loggers.logger": {
        "Logger": Entry("same", ".loggers:FabricLogger"),
        "rank_zero_experiment": Entry("same", ".loggers"),
    },
    "fabric.utilities.device_dtype_mixin": {
        "_DeviceDtypeModuleMixin": Entry("same", ".utilities:DeviceDtypeMixin"),
    },
}

EXPORTS: dict[str, str] = {
    "": "Fabric seed_everything Callback LightningDataModule LightningModule Trainer",
    "pytorch": """
        seed_everything disable_possible_user_warnings Callback LightningDataModule LightningModule Trainer
    """,
    "pytorch.accelerators": """
        find_usable_cuda_devices Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator
        TPUAccelerator HPUAccelerator
    """,
    "pytorch.callbacks": """
        BatchSizeFinder Callback Checkpoint DeviceStatsMonitor EarlyStopping BackboneFinetuning
        BaseFinetuning GradientAccumulationScheduler LambdaCallback LearningRateFinder LearningRateMonitor
        ModelCheckpoint ModelSummary OnExceptionCheckpoint BasePredictionWriter ProgressBar RichProgressBar
        TQDMProgressBar ModelPruning RichModelSummary SpikeDetection StochasticWeightAveraging
        ThroughputMonitor Timer EMAWeightAveraging WeightAveraging
    """,
    "pytorch.callbacks.progress": "ProgressBar RichProgressBar TQDMProgressBar",
    "pytorch.core": "LightningDataModule LightningModule",
    "pytorch.core.mixins": "HyperparametersMixin",
    "pytorch.loggers": """
        CometLogger CSVLogger LitLogger Logger MLFlowLogger TensorBoardLogger WandbLogger NeptuneLogger
    """,
    "pytorch.plugins": """
        CheckpointIO ClusterEnvironment TorchCheckpointIO XLACheckpointIO AsyncCheckpointIO LayerSync
        TorchSyncBatchNorm MixedPrecision BitsandbytesPrecision DeepSpeedPrecision DoublePrecision
        FSDPPrecision HalfPrecision Precision TransformerEnginePrecision XLAPrecision
        PrecisionPlugin MixedPrecisionPlugin DoublePrecisionPlugin HalfPrecisionPlugin FSDPPrecisionPlugin
        FSDPMixedPrecisionPlugin
    """,
    "pytorch.plugins.environments": """
        ClusterEnvironment KubeflowEnvironment LightningEnvironment LSFEnvironment MPIEnvironment
        SLURMEnvironment TorchElasticEnvironment XLAEnvironment
    """,
    "pytorch.plugins.io": "CheckpointIO TorchCheckpointIO XLACheckpointIO AsyncCheckpointIO",
    "pytorch.plugins.precision": """
        MixedPrecision BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision
        Precision TransformerEnginePrecision XLAPrecision
    """,
    "pytorch.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler XLAProfiler",
    "pytorch.serve": "ServableModule ServableModuleValidator",
    "pytorch.strategies": """
        DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy
        SingleDeviceStrategy SingleDeviceXLAStrategy Strategy XLAStrategy SingleTPUStrategy HPUParallelStrategy
        SingleHPUStrategy
    """,
    "pytorch.trainer": "seed_everything Trainer",
    "pytorch.tuner": "Tuner",
    "pytorch.utilities": """
        LightningEnum disable_possible_user_warnings is_shared_filesystem measure_flops move_data_to_device
        suggested_max_num_workers CombinedLoader GradClipAlgorithmType grad_norm find_shared_parameters
        set_shared_parameters AttributeDict is_picklable rank_zero_deprecation rank_zero_info rank_zero_only
        rank_zero_warn
    """,
    "pytorch.utilities.exceptions": "MisconfigurationException",
    "pytorch.utilities.migration": "migrate_checkpoint pl_legacy_patch",
    "pytorch.utilities.model_summary": """
        LayerSummary ModelSummary get_formatted_model_size get_human_readable_count parse_batch_shape
        summarize DeepSpeedSummary
    """,
    "pytorch.utilities.rank_zero": """
        rank_zero_only rank_zero_info rank_zero_warn rank_zero_debug rank_zero_deprecation
        LightningDeprecationWarning rank_prefixed_message WarningCache
    """,
    "fabric": "Fabric seed_everything disable_possible_user_warnings package_available",
    "fabric.accelerators": """
        Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices
        _register_classes
    """,
    "fabric.plugins": "CheckpointIO ClusterEnvironment TorchCheckpointIO XLACheckpointIO",
    "fabric.plugins.environments": """
        ClusterEnvironment KubeflowEnvironment LightningEnvironment LSFEnvironment MPIEnvironment
        SLURMEnvironment TorchElasticEnvironment XLAEnvironment
    """,
    "fabric.plugins.io": "CheckpointIO TorchCheckpointIO XLACheckpointIO",
    "pytorch.loops": "_EvaluationLoop _FitLoop _Loop _PredictionLoop _TrainingEpochLoop",
    "pytorch.loops.optimization": "_AutomaticOptimization _ManualOptimization",
    "pytorch.plugins.io.torch_plugin": "TorchCheckpointIO",
    "pytorch.plugins.io.checkpoint_plugin": "CheckpointIO",
    "fabric.utilities": """
        disable_possible_user_warnings is_shared_filesystem measure_flops move_data_to_device
        suggested_max_num_workers LightningEnum rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn
        apply_to_collection
    """,
    "pytorch.utilities.warnings": "PossibleUserWarning",
    "pytorch.utilities.seed": "seed_everything reset_seed pl_worker_init_function _collect_rng_states _set_rng_states",
    "pytorch.utilities.cloud_io": "get_filesystem _load _is_local_file_protocol",
    "pytorch.utilities.distributed": "rank_zero_only rank_zero_info rank_zero_warn rank_zero_deprecation",
    "pytorch.core.saving": "get_filesystem",
    "pytorch.callbacks.model_checkpoint": "_is_local_file_protocol",
    "fabric.loggers": "Logger CSVLogger TensorBoardLogger",
    "pytorch.utilities.cli": "LightningCLI LightningArgumentParser SaveConfigCallback",
}

INTERNAL = """
    fabric._graveyard fabric._graveyard.tpu fabric.utilities.consolidate_checkpoint pytorch._graveyard
    pytorch._graveyard._torchmetrics pytorch._graveyard.precision pytorch.utilities.consolidate_checkpoint
    pytorch.__about__ fabric.__about__
    fabric.accelerators.accelerator fabric.accelerators.cpu fabric.accelerators.mps fabric.accelerators.registry
    fabric.accelerators.xla fabric.cli fabric.connector fabric.loggers fabric.loggers.csv_logs fabric.loggers.logger
    fabric.loggers.tensorboard fabric.plugins.collectives fabric.plugins.collectives.collective
    fabric.plugins.collectives.single_device fabric.plugins.collectives.torch_collective fabric.plugins.precision
    fabric.plugins.precision.amp fabric.plugins.precision.bitsandbytes fabric.plugins.precision.deepspeed
    fabric.plugins.precision.double fabric.plugins.precision.fsdp fabric.plugins.precision.half
    fabric.plugins.precision.precision fabric.plugins.precision.transformer_engine fabric.plugins.precision.utils
    fabric.plugins.precision.xla fabric.strategies fabric.strategies.ddp fabric.strategies.deepspeed
    fabric.strategies.dp fabric.strategies.fsdp fabric.strategies.launchers fabric.strategies.launchers.launcher
    fabric.strategies.launchers.multiprocessing fabric.strategies.launchers.subprocess_script
    fabric.strategies.launchers.xla fabric.strategies.model_parallel fabric.strategies.parallel
    fabric.strategies.registry fabric.strategies.single_device fabric.strategies.single_xla
    fabric.strategies.strategy fabric.strategies.xla fabric.strategies.xla_fsdp
    fabric.utilities.device_parser fabric.utilities.init fabric.utilities.load fabric.utilities.logger
    fabric.utilities.optimizer fabric.utilities.registry fabric.utilities.testing
    fabric.utilities.testing._runif fabric.wrappers pytorch.loggers.utilities pytorch.loops.fetchers
    pytorch.loops.loop pytorch.loops.prediction_loop pytorch.loops.progress pytorch.plugins.io.checkpoint_plugin
    pytorch.plugins.io.torch_plugin pytorch.plugins.io.wrapper pytorch.plugins.io.xla_plugin
    pytorch.strategies.launchers pytorch.strategies.launchers.launcher pytorch.strategies.launchers.multiprocessing
    pytorch.strategies.launchers.subprocess_script pytorch.strategies.launchers.xla pytorch.trainer.call
    pytorch.trainer.configuration_validator pytorch.trainer.connectors pytorch.trainer.connectors.callback_connector
    pytorch.trainer.connectors.checkpoint_connector pytorch.trainer.connectors.data_connector
    pytorch.trainer.connectors.logger_connector pytorch.trainer.connectors.logger_connector.fx_validator
    pytorch.trainer.connectors.logger_connector.logger_connector pytorch.trainer.connectors.logger_connector.result
    pytorch.trainer.connectors.signal_connector pytorch.trainer.setup pytorch.tuner.batch_size_scaling
    pytorch.tuner.lr_finder pytorch.utilities._pytree pytorch.utilities.argparse
    pytorch.utilities.migration.migration pytorch.utilities.testing pytorch.utilities.testing._runif
"""
"""Modules of Lightning's inner workings: they can be imported, and each name in them is a placeholder."""

IMPORTED = {
    "": "argparse ast contextlib copy csv functools gc glob importlib inspect io itertools json logging math operator "
    "os pickle platform re shutil statistics subprocess sys tempfile threading time torch types warnings weakref yaml",
    "abc": "ABC abstractmethod",
    "argparse": "ArgumentParser Namespace",
    "collections": "ChainMap Counter OrderedDict defaultdict",
    "collections.abc": "Generator Iterable Iterator Mapping MutableMapping Sequence Sized",
    "contextlib": "AbstractContextManager contextmanager nullcontext suppress",
    "copy": "deepcopy",
    "dataclasses": "dataclass field fields is_dataclass",
    "datetime": "datetime timedelta timezone",
    "enum": "Enum",
    "functools": "lru_cache partial update_wrapper",
    "io": "BytesIO",
    "pathlib": "Path",
    "lightning_utilities.core.imports": "RequirementCache compare_version module_available",
    "rich": "get_console reconfigure",
    "rich.console": "Console",
    "rich.progress": "BarColumn Progress ProgressColumn Task TaskID TextColumn",
    "rich.style": "Style",
    "rich.text": "Text",
    "torch": "ScriptModule Tensor nn optim",
    "torch.nn": "Module ModuleDict Parameter",
    "torch.optim": "LBFGS Optimizer",
    "torch.optim.lr_scheduler": "LRScheduler",
    "torch.optim.swa_utils": "SWALR AveragedModel get_ema_avg_fn",
    "torch.utils.data": "BatchSampler DataLoader Dataset DistributedSampler IterableDataset RandomSampler Sampler "
    "SequentialSampler",
    "torchmetrics": "Metric MetricCollection",
    "tqdm": "tqdm",
    "typing": "TYPE_CHECKING Any Callable Concatenate Generic IO Literal Optional ParamSpec Protocol TextIO "
    "TypeGuard TypeVar Union cast get_args overload runtime_checkable",
    "typing_extensions": "NotRequired Required Self TypedDict override",
    "weakref": "proxy",
}
"""Names that modules of Lightning's have since they import them, by the module that defines them; "": modules.

Programs take them from there: `from lightning.pytorch.callbacks.callback import Tensor`.
"""
IMPORTED_BY = {"pytorch.cli": {"jsonargparse": "ActionConfigFile ArgumentParser Namespace class_from_function"}}
"""Names that one module of Lightning's has from elsewhere than the others."""
