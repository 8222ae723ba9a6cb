"""Script with a run that gets a signal to end, under a parameter server; argument: FOLDER."""

import os
import signal
import sys

from rpc_cases import QUIET, RPC, Ratings, loader

import legato as lg


class Told(Ratings):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 4 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


options = {**QUIET, **RPC, "max_epochs": 4, "default_root_dir": sys.argv[1], "enable_checkpointing": True}
lg.Trainer(**options).fit(Told(), loader(shuffle=True), loader(10))
