"""Callback, as programs for Lightning subclass it."""

from ....callbacks.callback import Callback as Callback
