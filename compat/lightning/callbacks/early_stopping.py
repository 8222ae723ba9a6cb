"""EarlyStopping, with Lightning's arguments."""

from ....callbacks.early_stopping import EarlyStopping as EarlyStopping
