"""The contract of strategies: its size, the public names of every strategy, and a custom strategy."""

import inspect

import pytest
import torch
from tiny import Tiny, make_loader

import legato as lg
from legato.trainer.processes.ranks import SINGLE, Ranks
from legato.trainer.strategies import STRATEGIES
from legato.trainer.strategies.strategy import Strategy

MOST_METHODS = 19


def methods_of(kind):
    """Return the public methods and properties that a class defines itself."""
    named = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return {name for name, value in named.items() if inspect.isfunction(value) or isinstance(value, property)}


def test_a_strategy_has_few_methods():
    assert len(methods_of(Strategy)) <= MOST_METHODS, sorted(methods_of(Strategy))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_adds_nothing_public(name):
    """All public methods are in the contract, so that no caller depends on a particular strategy."""
    kind = STRATEGIES[name].split(":")[1]
    contract = set(dir(Strategy()))
    for parent in getattr(lg.strategies, kind).__mro__:
        if parent is Strategy:
            break
        added = methods_of(parent)
        assert added <= contract, f"{parent.__name__} adds {sorted(added - contract)}"


def test_collectives_of_one_process_return_their_arguments():
    for ranks in (SINGLE, Ranks(0, 1)):
        value = torch.arange(3)
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.broadcast("text") == "text"
        assert ranks.gather_objects({"a": 1}) == [{"a": 1}]
        assert torch.equal(ranks.all_gather(value), value[None])
        assert ranks.all_reduce(value, "sum") is value
        ranks.barrier()
        ranks.broadcast_tensors([value])
        assert value.tolist() == [0, 1, 2]


class InDouble(lg.strategies.SingleStrategy):
    """Trains in double precision: the example of docs/strategies.md."""

    name = "in_double"

    def place_task(self, task):
        super().place_task(task)
        task.double()

    def training_step(self, arguments, replica, last):
        (inputs, targets), *rest = arguments
        return super().training_step(((inputs.double(), targets.double()), *rest), replica, last)


def test_a_custom_strategy(trainer):
    task, plain = Tiny(), Tiny()
    made = trainer(strategy=InDouble(), max_epochs=1)
    made.fit(task, make_loader(18))
    trainer(max_epochs=1).fit(plain, make_loader(18))
    assert made.global_step > 0
    for parameter, expected in zip(task.parameters(), plain.parameters(), strict=True):
        assert parameter.dtype == torch.float64
        torch.testing.assert_close(parameter.float(), expected)
