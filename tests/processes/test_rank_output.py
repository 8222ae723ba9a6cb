"""What ranks other than 0 print, and their messages, begin with the rank."""

import io

import pytest
from forked import completed, run_source

from legato.base.messages import STDERR, is_terminal
from legato.trainer.processes.rank_output import RankOutput

PROGRAM = """
import logging, sys, torch
import legato as lg
from torch.utils.data import DataLoader, TensorDataset

class Task(lg.Task):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def on_train_start(self):
        print("two", "lines\\nof output")
        print("no end", end="", file=sys.stderr)
        print(", now", file=sys.stderr, flush=True)
        logging.getLogger("legato").warning("a message")
    def training_step(self, batch):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
trainer = lg.Trainer(
    max_steps=1, accelerator="cpu", devices=2, strategy="ddp", default_root_dir=sys.argv[1], logger=False,
    save_code=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Task(), data)
print("after")
"""


@pytest.mark.slow
def test_lines_of_other_ranks_have_their_rank(tmp_path):
    done = completed(run_source, PROGRAM, str(tmp_path))
    output, errors = done.stdout, done.stderr
    assert done.returncode == 0, errors
    lines = output.splitlines()
    assert sorted(lines) == sorted(["two lines", "of output", "[rank 1] two lines", "[rank 1] of output", "after"])
    said = [line for line in errors.splitlines() if "now" in line or "message" in line]
    assert sorted(said) == sorted(["no end, now", "[rank 1] no end, now", "a message", "[rank 1] a message"])


def test_a_line_in_pieces_has_one_mark():
    found = io.StringIO()
    output = RankOutput(found, 3)
    for piece in ("a", "b\nc", "", "\n", "d\ne\n"):
        assert output.write(piece) == len(piece)
    output.writelines(["f\n", "g"])
    output.flush()
    assert found.getvalue() == "".join(f"[rank 3] {line}" for line in ("ab\n", "c\n", "d\n", "e\n", "f\n", "g"))
    assert output.getvalue() == found.getvalue()
    found.close()
    assert not is_terminal(found)
    assert not is_terminal(object())  # a stream of the user's own


def test_a_message_is_written_to_a_stream_that_does_not_count(monkeypatch):
    """Replacement of stderr, as some packages have it: `write` returns nothing."""

    class Uncounted(io.StringIO):
        def write(self, text):
            super().write(text)

    found = Uncounted()
    monkeypatch.setattr("sys.stderr", found)
    assert STDERR.write("a message\n") == len("a message\n")
    assert found.getvalue() == "a message\n"
