"""What a loader's worker cannot send ends the loop with an error; torch's own loaders wait for it for ever."""

import subprocess
import sys
import threading

import pytest
import torch
from tiny import Tiny
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Locks:
    """Its third sample is what nobody can pickle, or an error of a class that nobody can import."""

    def __init__(self, raises):
        self.raises = raises

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            if self.raises:
                raise type("OfNoModule", (Exception,), {})("what went wrong")
            return threading.Lock()
        return torch.zeros(3), torch.zeros(1)


class Stream(IterableDataset):
    """The same samples without places."""

    def __init__(self, raises):
        self.samples = Locks(raises)

    def __iter__(self):
        return map(self.samples.__getitem__, range(8))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("loader", "kind"), [(DataLoader, Locks), (StatefulDataLoader, Stream)])
def test_what_cannot_be_sent_ends_the_run(trainer, loader, kind, raises):
    data = loader(kind(raises), 1, num_workers=1, collate_fn=lambda samples: samples[0])
    with pytest.raises(RuntimeError if raises else TypeError) as caught:
        trainer().fit(Tiny(), data)
    assert ("OfNoModule: what went wrong" if raises else "cannot pickle '_thread.lock' object") in str(caught.value)


QUEUE = """
import multiprocessing, threading, torch
from tiny import Tiny, make_data, make_trainer
from torch.utils.data import DataLoader

class Tells(torch.utils.data.Dataset):
    queue = multiprocessing.Queue()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        self.queue.put(threading.Lock() if index == 1 else index)
        return make_data(4)[index]

data = Tells()
make_trainer(".", max_epochs=1, enable_checkpointing=False).fit(Tiny(), DataLoader(data, 1, num_workers=1))
print(sorted(data.queue.get(timeout=20) for _ in range(3)))
"""


def test_a_queue_of_the_dataset_itself_is_left_alone(tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{QUEUE}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[0, 2, 3]\n", done.stderr
    assert "cannot pickle '_thread.lock' object" in done.stderr
