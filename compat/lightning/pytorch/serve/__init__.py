"""Legato's version of `lightning.pytorch.serve`."""

# fmt: off

from legato.compat.lightning.inner import alias_below, inner_name, placeholders

ServableModule, ServableModuleValidator = placeholders(
    __name__, "ServableModule ServableModuleValidator",
    "Serve the exported module: to_onnx, to_torchscript, or legato export.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    servable_module servable_module_validator
""")
