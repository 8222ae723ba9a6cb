"""A strategy of one's own: local SGD. Processes take steps by themselves, and average their weights now and then.

    legato fit digits.yaml trainer.devices=2 'trainer.strategy={_target_: local_sgd.LocalSGD, every: 8}'

With every=16 it has a sixteenth of the traffic of `ddp`, for slow networks (Stich 2019, arXiv:1805.09767). Between two
averages the processes have different weights, so save checkpoints at multiples of `every`
(`callbacks.checkpoint.every_n_train_steps`).
"""

from legato.trainer.strategies import DDPStrategy
from legato.trainer.strategies.reducers import Reducer


class LocalSGD(DDPStrategy):
    """As DDP, but gradients stay on their process; every `every` steps all have the mean of their weights."""

    name = "local_sgd"

    def __init__(self, every: int = 8, timeout: float = 1800.0):
        super().__init__(timeout=timeout)
        self.every = every

    def make_reducer(self):
        """Leave gradients where they are, and begin with the weights of rank 0."""
        self.reducer.close()
        self.reducer = Reducer(self.task.parameters())
        # a loss weighs its samples' share of the step, which has one such part for each process
        self.reducer.scale = float(self.data_ranks.size)
        self.collectives.broadcast_tensors([*self.task.parameters(), *self.task.buffers()])

    def optimizer_step(self, optimizer, closure=None):
        """Take a step of this process's own; after the last of `every` steps average the weights."""
        output = super().optimizer_step(optimizer, closure)
        if (self.task.global_step + 1) % self.every == 0:
            self.average_weights()
        return output

    def finish(self):
        """End with one result on all ranks."""
        self.average_weights()
        super().finish()

    def average_weights(self):
        """Give every rank the mean of all ranks' weights; every rank calls it."""
        for parameter in self.task.parameters():
            self.data_ranks.all_reduce(parameter.detach(), "sum").div_(self.data_ranks.size)
