"""`legato schema`: print the JSON schema of a config, for editors. No torch."""

import json
from collections.abc import Sequence

from .config.read import read_config
from .config.schema import config_schema, targets_in


def run_schema(arguments: Sequence[str]) -> None:
    """Print the schema; given a config, with the arguments of the classes that it names."""
    named = targets_in(read_config(arguments).values) if arguments else ()
    print(json.dumps(config_schema(named), indent=2))
