"""Legato's version of `lightning.pytorch.utilities`."""

# fmt: off

from legato.compat.lightning.exceptions import MisconfigurationException, SIGTERMException
from legato.compat.lightning.model_summary import (
    LEFTOVER_PARAMS_NAME, NOT_APPLICABLE, PARAMETER_NUM_UNITS, UNKNOWN_SIZE, LayerSummary, ModelSummary,
    get_formatted_model_size, get_human_readable_count, parse_batch_shape, summarize,
)
from legato.compat.lightning.module import AttributeDict
from legato.compat.lightning.overrides import is_overridden
from legato.compat.lightning.rank_zero import (
    LightningDeprecationWarning, PossibleUserWarning, WarningCache, disable_possible_user_warnings,
    rank_prefixed_message, rank_zero_debug, rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn,
)
from legato.compat.lightning.types import (
    EVALUATE_OUTPUT as _EVALUATE_OUTPUT, METRIC as _METRIC, NUMBER as _NUMBER, PREDICT_OUTPUT as _PREDICT_OUTPUT,
    EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS, BType, DistributedDataParallel, LRSchedulerConfig,
    LRSchedulerConfigType, LRSchedulerPLType, LRSchedulerType, LRSchedulerTypeTuple, LRSchedulerTypeUnion,
    OptimizerConfig, OptimizerLRScheduler, OptimizerLRSchedulerConfig,
)
from legato.compat.lightning.utilities import (
    CPU_DEVICE, FLOAT16_EPSILON, FLOAT32_EPSILON, FLOAT64_EPSILON, GradClipAlgorithmType, LightningEnum,
    apply_to_collection, garbage_collection_cuda, get_filesystem, get_init_args, grad_norm, has_iterable_dataset,
    is_local_file_protocol as _is_local_file_protocol,
    is_oom_error, isolate_rng, load_file as _load, main, measure_flops,
    move_data_to_device, package_available, recursive_detach, reset_seed, seed_everything, sized_len,
)
from legato import CombinedLoader
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

(
    DeepSpeedLayerSummary, DeepSpeedSummary, convert_zero_checkpoint_to_fp32_state_dict, deepspeed_param_size,
    ds_checkpoint_dir
) = placeholders(
    __name__, "DeepSpeedLayerSummary DeepSpeedSummary convert_zero_checkpoint_to_fp32_state_dict "
    "deepspeed_param_size ds_checkpoint_dir",
    "Legato has no DeepSpeed. Its fsdp and zero1 strategies shard the training state but write whole checkpoints.",
)
is_cuda_out_of_memory, is_cudnn_snafu, is_out_of_cpu_memory = placeholders(
    __name__, "is_cuda_out_of_memory is_cudnn_snafu is_out_of_cpu_memory", "Call is_oom_error, which detects all three."
)
extract_batch_size, = placeholders(
    __name__, "extract_batch_size", "Pass the batch size where you need it: self.log(..., batch_size=len(batch))."
)
suggested_max_num_workers, = placeholders(
    __name__, "suggested_max_num_workers", "Divide len(os.sched_getaffinity(0)) by the number of processes."
)
migrate_checkpoint, pl_legacy_patch = placeholders(
    __name__, "migrate_checkpoint pl_legacy_patch",
    "Legato reads checkpoints from all Lightning 2 versions. Upgrade older ones with Lightning: python -m "
    "lightning.pytorch.utilities.upgrade_checkpoint FILE.",
)
find_model_local_ckpt_path, download_model_from_registry = placeholders(
    __name__, "find_model_local_ckpt_path download_model_from_registry",
    "Legato has no model registry. Download the checkpoint and pass its path as ckpt_path.",
)
clean_namespace, collect_init_args, is_picklable, parse_class_init_keys, save_hyperparameters = placeholders(
    __name__, "clean_namespace collect_init_args is_picklable parse_class_init_keys save_hyperparameters",
    "Call self.save_hyperparameters(), which stores the arguments of __init__ that are data.",
)
lightning_getattr, lightning_hasattr, lightning_setattr = placeholders(
    __name__, "lightning_getattr lightning_hasattr lightning_setattr", "Get or set it on the module or its hparams."
)
find_shared_parameters, set_shared_parameters = placeholders(
    __name__, "find_shared_parameters set_shared_parameters", "Shared parameters stay shared in every run."
)
from_compiled, to_uncompiled = placeholders(
    __name__, "from_compiled to_uncompiled", "Trainer.fit accepts the result of torch.compile."
)
get_torchvision_model, has_len_all_ranks, is_param_in_hook_signature, is_shared_filesystem, pl_worker_init_function = (
    placeholders(
        __name__, "get_torchvision_model has_len_all_ranks is_param_in_hook_signature is_shared_filesystem "
        "pl_worker_init_function", "It is a helper for Lightning's loops. A run seeds its loader workers.",
    )
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    _pytree apply_func argparse cloud_io combined_loader compile consolidate_checkpoint data deepspeed distributed
    enums exceptions grads imports memory migration migration.migration migration.utils model_helpers model_registry
    model_summary model_summary.model_summary model_summary.model_summary_deepspeed parameter_tying parsing
    rank_zero seed signature_utils testing testing._runif types upgrade_checkpoint warnings
""")
