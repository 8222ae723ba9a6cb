"""The table of Lightning's public names: what each one is on Legato. Data alone; `tree.py` makes modules from it.

Modules are paths below `lightning`. An entry says of a name that is defined there what kind it is, where its
implementation lies ("module" or "module:name"; a leading dot is this package), and what differs, or, for a
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
    """What differs from Lightning; for a placeholder what to do instead."""


NAMES: dict[str, dict[str, Entry]] = {
    "fabric.accelerators.cuda": {
        "find_usable_cuda_devices": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.io.checkpoint_io": {
        "CheckpointIO": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.io.torch_io": {
        "TorchCheckpointIO": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.io.xla": {
        "XLACheckpointIO": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.throughput": {
        "measure_flops": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.fabric": {
        "Fabric": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.cluster_environment": {
        "ClusterEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.kubeflow": {
        "KubeflowEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.lightning": {
        "LightningEnvironment": Entry("placeholder", "", "Legato does without it."),
        "find_free_network_port": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.lsf": {
        "LSFEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.mpi": {
        "MPIEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.slurm": {
        "SLURMEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.torchelastic": {
        "TorchElasticEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.plugins.environments.xla": {
        "XLAEnvironment": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.apply_func": {
        "CONVERSION_DTYPES": Entry("placeholder", "", "Legato does without it."),
        "move_data_to_device": Entry("placeholder", "", "Legato does without it."),
        "convert_to_tensors": Entry("placeholder", "", "Legato does without it."),
        "convert_tensors_to_scalars": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.cloud_io": {
        "get_filesystem": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.data": {
        "has_iterable_dataset": Entry("placeholder", "", "Legato does without it."),
        "sized_len": Entry("placeholder", "", "Legato does without it."),
        "has_len": Entry("placeholder", "", "Legato does without it."),
        "suggested_max_num_workers": Entry("placeholder", "", "Legato does without it."),
        "AttributeDict": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.distributed": {
        "group": Entry("placeholder", "", "Legato does without it."),
        "is_shared_filesystem": Entry("placeholder", "", "Legato does without it."),
        "DistributedSamplerWrapper": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.exceptions": {
        "MisconfigurationException": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.enums": {
        "LightningEnum": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.rank_zero": {
        "rank_zero_deprecation": Entry("placeholder", "", "Legato does without it."),
        "rank_zero_info": Entry("placeholder", "", "Legato does without it."),
        "rank_zero_warn": Entry("placeholder", "", "Legato does without it."),
        "rank_zero_debug": Entry("placeholder", "", "Legato does without it."),
        "rank_zero_only": Entry("same", "legato.trainer.processes.environment", ""),
        "LightningDeprecationWarning": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.seed": {
        "max_seed_value": Entry("placeholder", "", "Legato does without it."),
        "min_seed_value": Entry("placeholder", "", "Legato does without it."),
        "seed_everything": Entry("adapter", ".utilities", ""),
        "reset_seed": Entry("placeholder", "", "Legato does without it."),
        "pl_worker_init_function": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.types": {
        "UntypedStorage": Entry("placeholder", "", "Legato does without it."),
        "RedOpType": Entry("placeholder", "", "Legato does without it."),
        "ProcessGroup": Entry("placeholder", "", "Legato does without it."),
        "ReduceOp": Entry("placeholder", "", "Legato does without it."),
        "CollectibleGroup": Entry("placeholder", "", "Legato does without it."),
        "Steppable": Entry("placeholder", "", "Legato does without it."),
        "Optimizable": Entry("placeholder", "", "Legato does without it."),
    },
    "fabric.utilities.warnings": {
        "disable_possible_user_warnings": Entry("placeholder", "", "Legato does without it."),
        "PossibleUserWarning": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch": {
        "LIGHTNING_LOGO": Entry("placeholder", "", "Legato does without it."),
        "cli_lightning_logo": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.accelerators": {
        "AcceleratorRegistry": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.accelerators.accelerator": {
        "Accelerator": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.accelerators.cpu": {
        "CPUAccelerator": Entry("placeholder", "", "Legato does without it."),
        "get_cpu_stats": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.accelerators.cuda": {
        "CUDAAccelerator": Entry("placeholder", "", "Legato does without it."),
        "get_nvidia_gpu_stats": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.accelerators.mps": {
        "MPSAccelerator": Entry("placeholder", "", "Legato does without it."),
        "get_device_stats": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.accelerators.xla": {
        "XLAAccelerator": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.batch_size_finder": {
        "BatchSizeFinder": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.callback": {
        "Callback": Entry("adapter", ".callbacks.callback", ""),
    },
    "pytorch.callbacks.checkpoint": {
        "Checkpoint": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.device_stats_monitor": {
        "DeviceStatsMonitor": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.early_stopping": {
        "EarlyStoppingReason": Entry("placeholder", "", "Legato does without it."),
        "EarlyStopping": Entry("adapter", ".callbacks.early_stopping", ""),
    },
    "pytorch.callbacks.finetuning": {
        "multiplicative": Entry("placeholder", "", "Legato does without it."),
        "BaseFinetuning": Entry("placeholder", "", "Legato does without it."),
        "BackboneFinetuning": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.gradient_accumulation_scheduler": {
        "GradientAccumulationScheduler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.lambda_function": {
        "LambdaCallback": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.lr_finder": {
        "LearningRateFinder": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.lr_monitor": {
        "LearningRateMonitor": Entry("same", "legato.callbacks", ""),
    },
    "pytorch.callbacks.model_checkpoint": {
        "ModelCheckpoint": Entry("adapter", ".callbacks.model_checkpoint", ""),
    },
    "pytorch.callbacks.model_summary": {
        "ModelSummary": Entry("same", "legato.callbacks", ""),
    },
    "pytorch.callbacks.on_exception_checkpoint": {
        "OnExceptionCheckpoint": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.prediction_writer": {
        "WriteInterval": Entry("placeholder", "", "Legato does without it."),
        "BasePredictionWriter": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.progress.progress_bar": {
        "ProgressBar": Entry("same", "legato.callbacks:ProgressBar", ""),
        "get_standard_metrics": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.progress.rich_progress": {
        "CustomBarColumn": Entry("placeholder", "", "Legato does without it."),
        "CustomInfiniteTask": Entry("placeholder", "", "Legato does without it."),
        "CustomProgress": Entry("placeholder", "", "Legato does without it."),
        "CustomTimeColumn": Entry("placeholder", "", "Legato does without it."),
        "BatchesProcessedColumn": Entry("placeholder", "", "Legato does without it."),
        "ProcessingSpeedColumn": Entry("placeholder", "", "Legato does without it."),
        "MetricsTextColumn": Entry("placeholder", "", "Legato does without it."),
        "RichProgressBarTheme": Entry("placeholder", "", "Legato does without it."),
        "RichProgressBar": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.progress.tqdm_progress": {
        "Tqdm": Entry("placeholder", "", "Legato does without it."),
        "TQDMProgressBar": Entry("same", "legato.callbacks:ProgressBar", ""),
        "convert_inf": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.pruning": {
        "ModelPruning": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.rich_model_summary": {
        "RichModelSummary": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.spike": {
        "SpikeDetection": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.stochastic_weight_avg": {
        "StochasticWeightAveraging": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.callbacks.throughput_monitor": {
        "ThroughputMonitor": Entry("same", "legato.callbacks", ""),
    },
    "pytorch.callbacks.timer": {
        "Interval": Entry("placeholder", "", "Legato does without it."),
        "Timer": Entry("same", "legato.callbacks", ""),
    },
    "pytorch.callbacks.weight_averaging": {
        "WeightAveraging": Entry("placeholder", "", "Legato does without it."),
        "EMAWeightAveraging": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.cli": {
        "ModuleType": Entry("placeholder", "", "Legato does without it."),
        "ReduceLROnPlateau": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerTypeTuple": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerTypeUnion": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerType": Entry("placeholder", "", "Legato does without it."),
        "ArgsType": Entry("placeholder", "", "Legato does without it."),
        "OptimizerCallable": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerCallable": Entry("placeholder", "", "Legato does without it."),
        "LightningArgumentParser": Entry("placeholder", "", "Legato does without it."),
        "SaveConfigCallback": Entry("placeholder", "", "Legato does without it."),
        "LightningCLI": Entry("placeholder", "", "Legato does without it."),
        "instantiate_class": Entry("placeholder", "", "Legato does without it."),
        "instantiate_module": Entry("placeholder", "", "Legato does without it."),
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
        "MODULE_OPTIMIZERS": Entry("placeholder", "", "Legato does without it."),
        "LightningModule": Entry("adapter", ".module", ""),
    },
    "pytorch.core.optimizer": {
        "do_nothing_closure": Entry("placeholder", "", "Legato does without it."),
        "LightningOptimizer": Entry("same", "legato.trainer.optimization.optimizers:ManualOptimizer", ""),
    },
    "pytorch.core.saving": {
        "CHECKPOINT_PAST_HPARAMS_KEYS": Entry("placeholder", "", "Legato does without it."),
        "update_hparams": Entry("placeholder", "", "Legato does without it."),
        "load_hparams_from_tags_csv": Entry("placeholder", "", "Legato does without it."),
        "save_hparams_to_tags_csv": Entry("placeholder", "", "Legato does without it."),
        "load_hparams_from_yaml": Entry("placeholder", "", "Legato does without it."),
        "save_hparams_to_yaml": Entry("placeholder", "", "Legato does without it."),
        "convert": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.comet": {
        "FRAMEWORK_NAME": Entry("placeholder", "", "Legato does without it."),
        "comet_experiment": Entry("placeholder", "", "Legato does without it."),
        "CometLogger": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.csv_logs": {
        "ExperimentWriter": Entry("placeholder", "", "Legato does without it."),
        "CSVLogger": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.litlogger": {
        "LitLogger": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.logger": {
        "Logger": Entry("adapter", ".loggers", ""),
        "DummyLogger": Entry("placeholder", "", "Legato does without it."),
        "merge_dicts": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.mlflow": {
        "LOCAL_FILE_URI_PREFIX": Entry("placeholder", "", "Legato does without it."),
        "MLFlowLogger": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.neptune": {
        "NeptuneLogger": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loggers.tensorboard": {
        "TensorBoardLogger": Entry("adapter", ".loggers", ""),
    },
    "pytorch.loggers.wandb": {
        "WandbLogger": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.evaluation_loop": {
        "RestartStage": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.fit_loop": {
        "RestartStage": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.optimization.automatic": {
        "ClosureResult": Entry("placeholder", "", "Legato does without it."),
        "Closure": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.optimization.closure": {
        "OutputResult": Entry("placeholder", "", "Legato does without it."),
        "AbstractClosure": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.optimization.manual": {
        "ManualResult": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.training_epoch_loop": {
        "RestartStage": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.loops.utilities": {
        "check_finite_loss": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.overrides.distributed": {
        "prepare_for_backward": Entry("placeholder", "", "Legato does without it."),
        "UnrepeatedDistributedSampler": Entry("placeholder", "", "Legato does without it."),
        "UnrepeatedDistributedSamplerWrapper": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.io.async_plugin": {
        "AsyncCheckpointIO": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.layer_sync": {
        "LayerSync": Entry("placeholder", "", "Legato does without it."),
        "TorchSyncBatchNorm": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.amp": {
        "MixedPrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.bitsandbytes": {
        "BitsandbytesPrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.deepspeed": {
        "DeepSpeedPrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.double": {
        "DoublePrecision": Entry("placeholder", "", "Legato does without it."),
        "LightningDoublePrecisionModule": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.fsdp": {
        "FSDPPrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.half": {
        "HalfPrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.precision": {
        "Precision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.transformer_engine": {
        "TransformerEnginePrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.plugins.precision.xla": {
        "XLAPrecision": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.profilers.advanced": {
        "AdvancedProfiler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.profilers.base": {
        "PassThroughProfiler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.profilers.profiler": {
        "Profiler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.profilers.pytorch": {
        "RegisterRecordFunction": Entry("placeholder", "", "Legato does without it."),
        "ScheduleWrapper": Entry("placeholder", "", "Legato does without it."),
        "PyTorchProfiler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.profilers.simple": {
        "SimpleProfiler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.profilers.xla": {
        "XLAProfiler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.serve.servable_module": {
        "ServableModule": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.serve.servable_module_validator": {
        "ServableModuleValidator": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies": {
        "StrategyRegistry": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.ddp": {
        "DDPStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.deepspeed": {
        "remove_module_hooks": Entry("placeholder", "", "Legato does without it."),
        "DeepSpeedStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.fsdp": {
        "FSDPStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.model_parallel": {
        "ModelParallelStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.parallel": {
        "ParallelStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.single_device": {
        "SingleDeviceStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.single_xla": {
        "SingleDeviceXLAStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.strategy": {
        "TBroadcast": Entry("placeholder", "", "Legato does without it."),
        "TReduce": Entry("placeholder", "", "Legato does without it."),
        "Strategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.strategies.xla": {
        "XLAStrategy": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.trainer.states": {
        "TrainerStatus": Entry("placeholder", "", "Legato does without it."),
        "TrainerFn": Entry("placeholder", "", "Legato does without it."),
        "RunningStage": Entry("placeholder", "", "Legato does without it."),
        "TrainerState": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.trainer.trainer": {
        "Trainer": Entry("adapter", ".trainer", ""),
    },
    "pytorch.tuner.tuning": {
        "Tuner": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities": {
        "FLOAT16_EPSILON": Entry("placeholder", "", "Legato does without it."),
        "FLOAT32_EPSILON": Entry("placeholder", "", "Legato does without it."),
        "FLOAT64_EPSILON": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.combined_loader": {
        "CombinedLoader": Entry("same", "legato.trainer.data.combined", ""),
    },
    "pytorch.utilities.compile": {
        "from_compiled": Entry("placeholder", "", "Legato does without it."),
        "to_uncompiled": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.data": {
        "BType": Entry("placeholder", "", "Legato does without it."),
        "extract_batch_size": Entry("placeholder", "", "Legato does without it."),
        "has_len_all_ranks": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.deepspeed": {
        "CPU_DEVICE": Entry("placeholder", "", "Legato does without it."),
        "ds_checkpoint_dir": Entry("placeholder", "", "Legato does without it."),
        "convert_zero_checkpoint_to_fp32_state_dict": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.enums": {
        "GradClipAlgorithmType": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.exceptions": {
        "SIGTERMException": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.grads": {
        "grad_norm": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.memory": {
        "recursive_detach": Entry("placeholder", "", "Legato does without it."),
        "is_oom_error": Entry("placeholder", "", "Legato does without it."),
        "is_cuda_out_of_memory": Entry("placeholder", "", "Legato does without it."),
        "is_cudnn_snafu": Entry("placeholder", "", "Legato does without it."),
        "is_out_of_cpu_memory": Entry("placeholder", "", "Legato does without it."),
        "garbage_collection_cuda": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.migration.utils": {
        "migrate_checkpoint": Entry("placeholder", "", "Legato does without it."),
        "pl_legacy_patch": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.model_helpers": {
        "is_overridden": Entry("placeholder", "", "Legato does without it."),
        "get_torchvision_model": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.model_registry": {
        "find_model_local_ckpt_path": Entry("placeholder", "", "Legato does without it."),
        "download_model_from_registry": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.model_summary.model_summary": {
        "PARAMETER_NUM_UNITS": Entry("placeholder", "", "Legato does without it."),
        "UNKNOWN_SIZE": Entry("placeholder", "", "Legato does without it."),
        "LEFTOVER_PARAMS_NAME": Entry("placeholder", "", "Legato does without it."),
        "NOT_APPLICABLE": Entry("placeholder", "", "Legato does without it."),
        "LayerSummary": Entry("placeholder", "", "Legato does without it."),
        "ModelSummary": Entry("placeholder", "", "Legato does without it."),
        "parse_batch_shape": Entry("placeholder", "", "Legato does without it."),
        "get_formatted_model_size": Entry("placeholder", "", "Legato does without it."),
        "get_human_readable_count": Entry("placeholder", "", "Legato does without it."),
        "summarize": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.model_summary.model_summary_deepspeed": {
        "deepspeed_param_size": Entry("placeholder", "", "Legato does without it."),
        "DeepSpeedLayerSummary": Entry("placeholder", "", "Legato does without it."),
        "DeepSpeedSummary": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.parameter_tying": {
        "find_shared_parameters": Entry("placeholder", "", "Legato does without it."),
        "set_shared_parameters": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.parsing": {
        "is_picklable": Entry("placeholder", "", "Legato does without it."),
        "clean_namespace": Entry("placeholder", "", "Legato does without it."),
        "parse_class_init_keys": Entry("placeholder", "", "Legato does without it."),
        "get_init_args": Entry("placeholder", "", "Legato does without it."),
        "collect_init_args": Entry("placeholder", "", "Legato does without it."),
        "save_hyperparameters": Entry("placeholder", "", "Legato does without it."),
        "AttributeDict": Entry("placeholder", "", "Legato does without it."),
        "lightning_hasattr": Entry("placeholder", "", "Legato does without it."),
        "lightning_getattr": Entry("placeholder", "", "Legato does without it."),
        "lightning_setattr": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.seed": {
        "isolate_rng": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.signature_utils": {
        "is_param_in_hook_signature": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.types": {
        "STEP_OUTPUT": Entry("placeholder", "", "Legato does without it."),
        "TRAIN_DATALOADERS": Entry("placeholder", "", "Legato does without it."),
        "EVAL_DATALOADERS": Entry("placeholder", "", "Legato does without it."),
        "DistributedDataParallel": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerTypeTuple": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerTypeUnion": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerType": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerPLType": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerConfig": Entry("placeholder", "", "Legato does without it."),
        "LRSchedulerConfigType": Entry("placeholder", "", "Legato does without it."),
        "OptimizerConfig": Entry("placeholder", "", "Legato does without it."),
        "OptimizerLRSchedulerConfig": Entry("placeholder", "", "Legato does without it."),
        "OptimizerLRScheduler": Entry("placeholder", "", "Legato does without it."),
    },
    "pytorch.utilities.upgrade_checkpoint": {
        "main": Entry("placeholder", "", "Legato does without it."),
    },
}

EXPORTS: dict[str, str] = {
    "": "Fabric seed_everything Callback LightningDataModule LightningModule Trainer",
    "pytorch": """
        seed_everything disable_possible_user_warnings Callback LightningDataModule LightningModule Trainer
    """,
    "pytorch.accelerators": """
        find_usable_cuda_devices Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator
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
    "pytorch.loggers": "CometLogger CSVLogger LitLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "pytorch.plugins": """
        CheckpointIO ClusterEnvironment TorchCheckpointIO XLACheckpointIO AsyncCheckpointIO LayerSync
        TorchSyncBatchNorm MixedPrecision BitsandbytesPrecision DeepSpeedPrecision DoublePrecision
        FSDPPrecision HalfPrecision Precision TransformerEnginePrecision XLAPrecision
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
        SingleDeviceStrategy SingleDeviceXLAStrategy Strategy XLAStrategy
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
    "pytorch.utilities.rank_zero": "rank_zero_only rank_zero_info rank_zero_warn rank_zero_debug rank_zero_deprecation",
}
