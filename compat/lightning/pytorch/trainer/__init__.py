"""Legato's version of `lightning.pytorch.trainer`."""

# fmt: off

from legato.compat.lightning.accelerators import AcceleratorConnector as _AcceleratorConnector
from legato.compat.lightning.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from legato.compat.lightning.trainer import Trainer
from legato.compat.lightning.types import LITERAL_WARN as _LITERAL_WARN, PRECISION_INPUT as _PRECISION_INPUT
from legato.compat.lightning.utilities import seed_everything
from legato.compat.lightning.inner import alias_below, inner_name

__getattr__ = inner_name(__name__)
alias_below(__name__, """
    call configuration_validator connectors connectors.accelerator_connector connectors.callback_connector
    connectors.checkpoint_connector connectors.data_connector connectors.logger_connector
    connectors.logger_connector.fx_validator connectors.logger_connector.logger_connector
    connectors.logger_connector.result connectors.signal_connector setup states trainer
""")
