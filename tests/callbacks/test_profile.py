"""Profile: traces of real runs."""

import json

import pytest
import torch
from tiny import Tiny, make_loader, make_trainer

import legato as lg
from legato.base.errors import ConfigError
from legato.callbacks import Profile


def names_in(trace):
    return [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]


def test_traces_of_the_chosen_steps(tmp_path):
    profile = Profile(tmp_path / "traces", wait=1, warmup=1, active=2, repeat=2)
    task, plain = Tiny(), Tiny()
    make_trainer(tmp_path, callbacks=[profile], max_epochs=2).fit(task, make_loader())
    traces = sorted((tmp_path / "traces").glob("rank-0.*.pt.trace.json"))
    assert len(traces) == 2
    for trace in traces:
        names = names_in(trace)
        assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
        assert any("aten::addmm" in name or "aten::linear" in name for name in names)
    make_trainer(tmp_path, max_epochs=2).fit(plain, make_loader())
    assert all(map(torch.equal, task.parameters(), plain.parameters()))


def test_it_writes_to_the_run_directory_and_ends_with_an_error(tmp_path):
    class Broken(Tiny):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    trainer = lg.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", callbacks=[Profile(wait=0, warmup=1)]
    )
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), make_loader())
    assert len(list(trainer.run_dir.glob("profile/*.pt.trace.json"))) == 1
    assert not torch.autograd._profiler_enabled()


def test_a_run_without_a_directory_needs_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="dirpath"):
        make_trainer(tmp_path, callbacks=[Profile()]).fit(Tiny(), make_loader())


@pytest.mark.slow
def test_each_process_writes_a_trace(tmp_path):
    callbacks = [Profile(tmp_path / "traces", wait=0, warmup=1, active=2)]
    make_trainer(tmp_path, callbacks=callbacks, strategy="ddp", devices=2).fit(Tiny(), make_loader())
    assert sorted(path.name.split(".")[0] for path in (tmp_path / "traces").iterdir()) == ["rank-0", "rank-1"]
