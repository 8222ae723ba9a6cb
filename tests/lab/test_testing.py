"""check_strategy: ready strategies and the example keep the rules; one that breaks a rule is told which."""

import importlib.util
from pathlib import Path

import pytest
import torch

import legato as lg
from legato.trainer.strategies import DDPStrategy

pytestmark = pytest.mark.slow


class OtherWeights(DDPStrategy):
    """Breaks rule 1."""

    name = "other_weights"

    def prepare(self, *arguments):
        prepared = super().prepare(*arguments)
        with torch.no_grad():
            for parameter in self.task.parameters():
                parameter += self.collectives.rank
        return prepared


class Twice(DDPStrategy):
    """Breaks rule 2: the gradient is twice as long."""

    name = "twice"

    def backward(self, loss, last=True, inputs=None, retain_graph=False):
        super().backward(2 * loss, last, inputs, retain_graph)


class Apart(DDPStrategy):
    """Breaks rule 3: each rank's gradient is its own, and it says that they are the same."""

    name = "apart"

    def training_step(self, arguments, replica, last):
        return super().training_step(arguments, replica, last=False)

    def leave_out(self, last, after_forward):
        pass


class Alone(DDPStrategy):
    """Breaks rule 4: a rank without a batch does not take part."""

    name = "alone"

    def leave_out(self, last, after_forward):
        pass


class Counts(DDPStrategy):
    """Breaks rule 5: what it does depends on a number that no checkpoint has."""

    name = "counts"
    steps = 0

    def optimizer_step(self, optimizer, closure=None, **options):
        self.steps += 1
        if self.steps == 3:
            with torch.no_grad():
                for parameter in self.task.parameters():
                    parameter.zero_()
        return super().optimizer_step(optimizer, closure, **options)


@pytest.mark.parametrize(("name", "processes"), [("ddp", [1, 2, 3]), ("zero1", [3]), ("fsdp", [3])])
def test_ready_strategies_keep_the_rules(name, processes):
    lg.testing.check_strategy(lambda: name, processes)


def test_one_flat_sum_keeps_the_rules():
    lg.testing.check_strategy(lg.strategies.GroupStrategy, [1, 3])


def test_the_example_keeps_the_rules():
    path = Path(__file__).parents[2] / "examples" / "local_sgd.py"
    spec = importlib.util.spec_from_file_location("local_sgd", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lg.testing.check_strategy(lambda: module.LocalSGD(every=2), [1, 3])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OtherWeights, "rule 1: the ranks start with different weights"),
        (Twice, "rule 2: the gradient of step 1 on rank 0 is not that of the mean over the step's samples"),
        (Apart, "rule 3: the ranks end with different weights"),
        (Alone, "rule 4: the ranks wait for each other"),
        (Counts, "rule 5: a resumed run ends with different weights"),
    ],
)
def test_a_broken_rule_is_named(kind, words):
    with pytest.raises(AssertionError, match=words):
        lg.testing.check_strategy(kind, processes=[2])
