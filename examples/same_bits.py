"""Trains on 1, 4 and 2 processes, and in a run that is killed three times. All runs print the same 64 hex digits."""

import hashlib
import os
import signal
import tempfile

import legato as lg
from legato.tasks import Digits, DigitsData

RUNS = {
    "1 process": [(1, None)],
    "4 processes": [(4, None)],
    "2 processes": [(2, None)],
    "4, killed, 2, killed, 3, killed, 1": [(4, 12), (2, 23), (3, 34), (1, None)],
}
"""For each launch of a run, the number of processes and the step at which SIGKILL ends one of them."""


class Kill(lg.Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, task):
        if trainer.global_step == self.step and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, processes, kill_at):
    task, checkpoint = Digits(channels=8), lg.callbacks.Checkpoint(every_n_train_steps=5)
    options = {"max_steps": 40, "replicas": 4, "reproducible": "bitwise", "accelerator": "cpu", "strategy": "ddp"}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 10}
    callbacks = [checkpoint, Kill(kill_at)]
    trainer = lg.Trainer(devices=processes, callbacks=callbacks, default_root_dir=folder, **options, **quiet)
    trainer.fit(task, DigitsData(batch_size=16), resume="auto")
    weights = b"".join(tensor.numpy().tobytes() for tensor in task.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    for name, starts in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            lg.seed_everything(0, verbose=False)
            for processes, kill_at in starts:
                try:
                    digest = train(folder, processes, kill_at)
                except RuntimeError as error:  # a process was killed: resume on the next number of processes
                    print(error)
            print(f"{name:36}{digest}", flush=True)
