"""Legato's version of `lightning.fabric.utilities`."""

# fmt: off

from legato.compat.lightning.accelerators import register_classes as _register_classes
from legato.compat.lightning.exceptions import MisconfigurationException
from legato.compat.lightning.loggers import add_prefix as _add_prefix
from legato.compat.lightning.module import AttributeDict
from legato.compat.lightning.rank_zero import (
    LightningDeprecationWarning, PossibleUserWarning, WarningCache, disable_possible_user_warnings,
    rank_prefixed_message, rank_zero_debug, rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn,
)
from legato.compat.lightning.types import (
    DEVICE as _DEVICE, MAP_LOCATION as _MAP_LOCATION_TYPE, PARAMETERS as _PARAMETERS, PATH as _PATH,
    CollectibleGroup, Optimizable, ProcessGroup, RedOpType, ReduceOp, Stateful as _Stateful, Steppable,
    UntypedStorage,
)
from legato.compat.lightning.utilities import (
    DeviceDtypeMixin as _DeviceDtypeModuleMixin, LightningEnum, apply_to_collection,
    distributed_is_initialized as _distributed_is_initialized, get_filesystem, group, has_iterable_dataset,
    is_local_file_protocol as _is_local_file_protocol,
    load_file as _load, max_seed_value, measure_flops, min_seed_value, move_data_to_device, package_available,
    reset_seed, seed_everything, sized_len,
)
from legato.compat.lightning.inner import alias_below, inner_name

__getattr__ = inner_name(__name__)
alias_below(__name__, """
    apply_func cloud_io consolidate_checkpoint data device_dtype_mixin device_parser distributed enums exceptions
    imports init load logger optimizer rank_zero registry seed spike testing testing._runif throughput types
    warnings
""")
