"""ProgressBar: on a real terminal, and without one."""

import os
import pty
import re
import select
import termios

import pytest
from forked import Forked, run_source
from tiny import Tiny, make_loader

import legato as lg
from legato.callbacks.progress_bar import ProgressDisplay

PROGRAM = """
import logging, sys, threading, time, torch
import legato as lg
from torch.utils.data import DataLoader, TensorDataset

class Task(lg.Task):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        if self.global_step == int(sys.argv[3]):
            raise RuntimeError("as planned")
        if self.global_step == 250:
            logging.getLogger("legato").warning("a message")
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, prog_bar=True)
        time.sleep(float(sys.argv[2]))
        return loss
    def validation_step(self, batch):
        time.sleep(float(sys.argv[2]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=2)
trainer = lg.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, default_root_dir=sys.argv[1], logger=False, log_every_n_steps=10,
    enable_model_summary=False, enable_checkpointing=False,
    callbacks=[lg.callbacks.ProgressBar(refresh_rate=int(sys.argv[5]), leave=sys.argv[4] == "leave")],
)
try:
    trainer.fit(Task(), data, data)
finally:
    assert threading.active_count() == 1, threading.enumerate()
    print("END", file=sys.stderr)
"""


def run_on_terminal(folder, seconds, fail_at=-1, leave="one", refresh_rate=1, columns=100):
    """Run the program with a terminal as its stderr; return its exit code and what it drew."""
    arguments = (folder, seconds, fail_at, leave, refresh_rate)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    process = Forked(run_source, PROGRAM, *map(str, arguments), stderr=os.ttyname(slave))
    while process.poll() is None and not select.select([master], [], [], 0.01)[0]:
        pass  # it has not opened the terminal yet
    os.close(slave)
    drawn = bytearray()
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the terminal's last user is gone
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    process.communicate(timeout=60)
    return process.returncode, drawn.decode()


def screen(drawn):
    """Return the lines that a terminal shows after `drawn`."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[A|[\r\n]|[^\x1b\r\n]+", drawn):
        if piece == "\x1b[A":
            row -= 1
        elif piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [100, 0])
def test_bars_on_a_terminal(tmp_path, columns):
    code, drawn = run_on_terminal(tmp_path, 0.002, columns=columns)
    assert code == 0, drawn
    frames = drawn.split("\r")
    assert any("epoch 0" in frame and "train/loss=" in frame for frame in frames)
    assert any(frame.startswith("validation") and "/200" in frame for frame in frames)
    assert any("sanity check: 100%" in frame for frame in frames)
    assert max(map(len, screen(drawn))) <= (columns or 80)
    assert 10 < sum("%" in frame for frame in frames) < 400  # ten a second, not one for each of the 800 batches
    last, end = screen(drawn)[-2:]
    assert "epoch 1: 100%" in last
    assert "200/200" in last
    assert end == "END"
    assert len(screen(drawn)) <= 4  # one bar stays of the sanity check's, training's and validation's
    assert "a message" in screen(drawn)


@pytest.mark.slow
def test_a_bar_for_each_epoch_can_stay(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0, leave="leave")
    assert code == 0, drawn
    left = [line[:13] for line in screen(drawn) if "200/200" in line]
    assert left == ["epoch 0: 100%", "epoch 1: 100%"]


@pytest.mark.slow
def test_an_exception_leaves_the_terminal_in_order(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0.002, fail_at=150)
    assert code == 1
    before, after = drawn.split("END")
    assert before.endswith("\n")
    assert "RuntimeError: as planned" in after
    assert "\r" not in after.replace("\r\n", "\n")


@pytest.mark.slow
def test_plain_lines_where_there_is_no_terminal(tmp_path):
    done = Forked(run_source, PROGRAM, str(tmp_path), "0", "-1", "one", "1")
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 0, errors
    assert "\r" not in errors
    lines = errors.splitlines()
    assert [line.split(" steps/s")[0].rsplit(" ", 1)[0] for line in lines[:-1]] == [
        "epoch 0 step 1/200",
        "epoch 0 step 200/200",
        "a",
        "epoch 1 step 200/200",
    ]
    assert "eta 0:0" in lines[0]
    assert "train/loss=" in lines[-2]


@pytest.mark.slow
def test_no_bar_when_refresh_rate_is_0(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0, refresh_rate=0)
    assert (code, drawn) == (0, "a message\r\nEND\r\n")


@pytest.mark.slow
def test_nothing_is_drawn_between_so_many_steps(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0.004, refresh_rate=100)
    assert code == 0
    shown = {int(found) for found in re.findall(r"epoch 0:.*?(\d+)/200", drawn)}
    assert len(shown) <= 5
    assert 200 in shown


def test_the_steps_of_an_epoch_are_those_that_the_run_goes(trainer, capsys):
    trainer(max_epochs=3, max_steps=6, enable_progress_bar=True).fit(Tiny(), make_loader(16))
    lines = [line.split(" steps/s")[0].rsplit(" ", 1)[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["epoch 0 step 1/4", "epoch 0 step 4/4", "epoch 1 step 2/2"]


def test_a_display_of_ones_own_stands_in_for_the_bar(trainer):
    class Steps(ProgressDisplay):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            self.steps = trainer.global_step

    display = Steps()
    made = trainer(callbacks=[display], enable_progress_bar=True, max_epochs=1)
    assert made.progress_bar_callback is display
    assert not any(isinstance(callback, lg.callbacks.ProgressBar) for callback in made.callbacks)
    made.fit(Tiny(), make_loader())
    assert display.steps == made.global_step > 0
