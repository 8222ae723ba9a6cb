"""Streams of Lance: they read their share by rank, and have no state.

Lance is imported in processes of its own alone: it warns at every later fork of a process that has it.
"""

import pytest
from streams_of_others import BATCH, EPOCHS, SAMPLES, trained
from torch.utils.data import DataLoader

from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.filterwarnings(
    "ignore:Length of IterableDataset", "ignore:The given NumPy array", "ignore:lance is not fork-safe"
)


def write(folder):
    import lance
    import pyarrow

    table = pyarrow.table({"x": [float(index) for index in range(SAMPLES)]})
    lance.write_dataset(table, str(folder / "lance"), max_rows_per_file=10, max_rows_per_group=10)


def batches(folder):
    from lance.torch.data import LanceDataset

    return DataLoader(LanceDataset(folder / "lance", BATCH), None)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_reads_each_sample_of_lance_once(tmp_path, processes):
    run_workers(lambda: write(tmp_path), 1)

    def train(name, dies_in=0):
        def fit():
            return trained(tmp_path / name, batches, tmp_path, processes, dies_in)

        return run_workers(fit, 1, threads=1) if processes == 1 and not dies_in else fit()

    uninterrupted = train("whole")
    assert sorted(value for values in uninterrupted.values() for value in values) == sorted(
        [float(index) for index in range(SAMPLES)] * EPOCHS
    )
    killed = train("killed", dies_in=6)
    again = train("killed")
    assert min(again) > 0
    assert {step: uninterrupted[step] for step in again} == again
    assert killed | again == uninterrupted
