"""ProgressBar: on a real terminal, and without one."""

import os
import pty
import re
import select
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Forked, run_source
from tiny import Tiny, Validated, make_loader

import legato as lg
from legato.callbacks.progress_bar import ProgressDisplay, amount, duration

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
    save_code=False,
    callbacks=[lg.callbacks.ProgressBar(int(sys.argv[5]), leave=sys.argv[4] == "leave")],
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
    for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", drawn):
        if re.fullmatch(r"\x1b\[\d*A", piece):
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[J":
            lines[row] = lines[row][:column]
            lines[row + 1 :] = [""] * len(lines[row + 1 :])
        elif re.fullmatch(r"\x1b\[\d+G", piece):
            column = int(piece[2:-1]) - 1
        elif piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece[0] != "\x1b":
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


def plain(drawn):
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", drawn.replace("\x1b[1G", "\r"))


@pytest.mark.slow
def test_a_bar_on_a_terminal(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0.002)
    assert code == 0, drawn
    shown = plain(drawn)
    steps = [int(step) for step in re.findall(r"epoch 1/2  step (\d+)/200", shown)]
    assert steps == sorted(steps)
    assert 2 < len(set(steps)) < 100  # ten a second, not one for each of the 200 steps
    assert re.search(r"left, [\d.]+k? samples/s  train/loss", shown)
    assert re.search(r"epoch 1/2  validation  batch \d+/200", shown)
    assert re.search(r"sanity check  batch \d/2", shown)
    assert "█" in shown
    head, first, *printed, second, summary, end = screen(drawn)  # nothing else stays
    assert printed == ["a message"]
    assert head.split() == ["epoch", "train/loss", "lr", "time"]
    assert [row.split()[0] for row in (first, second)] == ["1", "2"]
    assert re.match(r"2 epochs, 400 steps in 0:00:\d\d, [\d.]+k? samples/s$", summary)
    assert end == "END"


@pytest.mark.slow
def test_the_line_of_each_epoch_can_stay(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0, leave="leave")
    assert code == 0, drawn
    assert len([line for line in screen(drawn) if "step 200/200" in line]) == 2


@pytest.mark.slow
def test_an_exception_leaves_the_terminal_in_order(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0.002, fail_at=150)
    assert code == 1
    before, after = drawn.split("END")
    assert screen(before)[-1:] != ["epoch"]
    assert not [line for line in screen(before) if "step" in line]
    assert "RuntimeError: as planned" in after
    assert "\r" not in after.replace("\r\n", "\n")


@pytest.mark.slow
def test_plain_lines_where_there_is_no_terminal(tmp_path):
    done = Forked(run_source, PROGRAM, str(tmp_path), "0", "-1", "one", "1")
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 0, errors
    assert "\r" not in errors
    assert "\x1b" not in errors
    first, blank, head, row, message, second, summary, end = errors.splitlines()
    assert re.match(r"epoch 1/2  step 1/200  .* samples/s  train/loss [\d.e-]+$", first)
    assert (blank, head.split()[:2], message) == ("", ["epoch", "train/loss"], "a message")
    assert [line.split()[0] for line in (row, second, summary, end)] == ["1", "2", "2", "END"]


@pytest.mark.slow
def test_no_bar_when_refresh_rate_is_0(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0, refresh_rate=0)
    assert (code, drawn) == (0, "a message\r\nEND\r\n")


@pytest.mark.slow
def test_nothing_is_drawn_between_so_many_steps(tmp_path):
    code, drawn = run_on_terminal(tmp_path, 0.004, refresh_rate=100)
    assert code == 0
    shown = {int(step) for step in re.findall(r"epoch 1/2  step (\d+)/200", plain(drawn))}
    assert 1 <= len(shown) <= 3


NOTEBOOK = """
import sys, legato as lg
sys.path.insert(0, TESTS)
from tiny import Tiny, make_loader
from tqdm import notebook

drawn, show = [], notebook.tqdm_notebook.display

def display(bar, *arguments, **options):
    show(bar, *arguments, **options)
    left, middle, right = bar.container.children
    drawn.append((middle.bar_style, left.value, right.value.replace("\u2007", " "), bar.container.comm is None))

notebook.tqdm_notebook.display = display

class Shown(Tiny):
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.loss(batch), prog_bar=True)
        return loss

trainer = lg.Trainer(max_epochs=2, accelerator="cpu", devices=1, default_root_dir=FOLDER, logger=False)
trainer.fit(Shown(), make_loader())
print(repr(drawn[0]), repr(drawn[-1]))
"""


@pytest.mark.slow
def test_a_notebook_has_a_bar_that_is_gone_at_the_end(tmp_path):
    """In a real kernel, where these packages are installed; ipywidgets draws the bar."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    tests = Path(__file__).parents[1]
    source = NOTEBOOK.replace("TESTS", repr(str(tests))).replace("FOLDER", repr(str(tmp_path)))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs if output.output_type != "stream"] == [
        "display_data"
    ]  # a single bar
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert [row["epoch"] for row in rows(text)] == ["1", "2"]
    assert re.search(r"\n2 epochs, \d+ steps in 0:00:\d\d", text)
    first, last = re.findall(r"\('(.*?)', '(.*?)', '(.*?)', (True|False)\)", text)
    assert first[:2] == last[:2] == ("", "")  # neither red nor with tqdm's own percentage
    assert re.match(r" .*left.*loss [\d.]+$", first[2])
    assert (first[3], last[3]) == ("False", "True")


def test_without_widgets_a_notebook_has_a_line_of_tqdm(play, monkeypatch, capsys):
    class ZMQInteractiveShell:
        config = {}  # noqa: RUF012

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell, version_info=(8,)))
    play(Rising(), enable_progress_bar=True)
    stdout, drawn = capsys.readouterr()
    assert [row["rising"] for row in rows(stdout)] == ["2.778"]  # the last batch is short
    assert re.search(r"epoch 1/1  step 1/5 .*rising 1", drawn)
    assert "it/s" not in drawn


class Rising(Tiny):
    """Logs 1, 2, 3, ... in training, and of each validation the next value of a list."""

    def __init__(self, values=()):
        super().__init__()
        self.values = iter(values)

    def training_step(self, batch, batch_idx):
        self.log("rising", float(batch_idx + 1), prog_bar=True)
        return self.loss(batch)


class RisingValidated(Rising):
    def on_validation_epoch_start(self):
        self.value = 9.0 if self.trainer.sanity_checking else next(self.values)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.value)


def rows(text):
    """Return the rows of the table, by column; the mark of the best is under "best"."""
    steps, head = [], []
    for line in text.splitlines():
        cells = line.split()
        if cells[:1] == ["epoch"] and "time" in cells:
            head = cells
        elif head and cells and cells[0].isdigit() and len(cells) in (len(head), len(head) + 1):
            steps.append(dict(zip([*head, "best"], cells, strict=False)))
    return steps


def test_the_table_has_means_of_the_epoch_and_marks_the_best(trainer, capsys):
    saved = lg.callbacks.Checkpoint(monitor="val/loss")
    options = {"max_epochs": 3, "enable_progress_bar": True, "enable_checkpointing": True, "callbacks": [saved]}
    trainer(**options).fit(RisingValidated([0.5, 0.25, 0.75]), make_loader(20), make_loader(4))
    text = capsys.readouterr().err
    table = rows(text)
    assert [row["rising"] for row in table] == ["3", "3", "3"]  # the mean of 1 to 5, not the newest
    assert [row["val/loss"] for row in table] == ["0.5", "0.25", "0.75"]
    assert [row.get("best") for row in table] == ["*", "*", None]
    assert {row["lr"] for row in table} == {"0.1"}
    assert text.splitlines()[-1].endswith("best val/loss 0.25 at step 10")
    assert text.splitlines()[-1].startswith("3 epochs, 15 steps in 0:00:0")


def test_a_resumed_run_tells_what_it_has_trained_itself(trainer, capsys):
    options = {"enable_progress_bar": True, "enable_checkpointing": True}
    trainer(max_epochs=4, max_steps=7, **options).fit(Tiny(), make_loader(20))
    for _ in range(2):
        trainer(max_epochs=4, **options).fit(Tiny(), make_loader(20), resume="auto")
    lines = [
        line for line in capsys.readouterr().err.splitlines() if " steps in " in line or "Nothing to train" in line
    ]
    assert [line.partition(" in ")[0] for line in lines[:2]] == ["1 epoch, 7 steps", "3 epochs, 13 steps"]
    assert lines[2].startswith("Nothing to train: the run already ended at step 20. To continue, raise max_epochs")


def test_an_epoch_that_was_saved_after_its_last_step_is_not_counted_again(trainer, capsys):
    for epochs in (2, 3):
        keep = lg.callbacks.Checkpoint(monitor="val_loss")  # it saves in the validation at the end of an epoch
        made = trainer(max_epochs=epochs, enable_progress_bar=True, enable_checkpointing=True, callbacks=[keep])
        made.fit(Validated(), make_loader(20), make_loader(20), resume="auto")
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if " steps in " in line]
    assert [line.partition(" in ")[0] for line in lines] == ["2 epochs, 10 steps", "1 epoch, 5 steps"]
    assert [row["epoch"] for row in rows(text)] == ["1", "2", "3"]


def test_the_newest_value_goes_to_the_loggers(play):
    made = play(Rising(), enable_progress_bar=True)
    assert [value for _, value in made.memory.of("rising")] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_steps_of_an_epoch_are_those_that_the_run_goes(trainer, capsys):
    class Shown(lg.callbacks.ProgressBar):
        def on_train_epoch_start(self, trainer, task):
            self.setup(trainer, task, "fit")  # the first step of each epoch is shown
            self.on_train_start(trainer, task)
            super().on_train_epoch_start(trainer, task)

    trainer(max_epochs=3, max_steps=6, callbacks=[Shown()]).fit(Tiny(), make_loader(16))
    lines = re.findall(r"epoch \d/\d  step \d+/\d+", capsys.readouterr().err)
    assert lines == ["epoch 1/3  step 1/4", "epoch 2/3  step 1/2"]


# --- text -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (amount(7), "7"),
        (amount(940), "940"),
        (amount(12345), "12.3k"),
        (amount(999999), "1M"),
        (duration(61.4), "0:01:01"),
        (duration(90061), "1d 1:01:01"),
    ],
)
def test_numbers_are_short(text, expected):
    assert text == expected


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
