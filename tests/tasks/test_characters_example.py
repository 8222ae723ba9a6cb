"""The example of a language model: its text, its model, its samples."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import legato as lg
from examples.characters import ALPHABET, CharacterGPT, PydocText, decode, encode
from legato.base.errors import TaskError

UNKNOWN = ALPHABET[-1]


@pytest.fixture(scope="module")
def text() -> PydocText:
    data = PydocText(block_size=64)
    data.setup("fit")
    return data


def trainer_for(tmp_path, **arguments):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lg.Trainer(devices=1, default_root_dir=tmp_path, num_sanity_val_steps=0, **(quiet | arguments))


def small_gpt(**arguments):
    torch.manual_seed(0)
    return CharacterGPT(**({"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16} | arguments))


def overfit(parameters, loss_of, steps, lr):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
    return loss.item()


@given(st.text())
@settings(deadline=None)
def test_every_text_has_tokens(text):
    tokens = encode(text)
    assert tokens.dtype == torch.int64
    assert decode(tokens) == "".join(character if character in ALPHABET else UNKNOWN for character in text)


@pytest.mark.slow
def test_pydoc_text_is_whole_and_the_same_every_time(text):
    from pydoc_data.topics import topics

    again = PydocText(block_size=64)
    again.setup("validate")
    train, val = text.parts["train"].tokens, text.parts["val"].tokens
    assert torch.equal(again.parts["train"].tokens, train)
    text = "\n".join(topics[name] for name in sorted(topics))
    assert torch.equal(torch.cat([train, val]), encode(text))
    assert 0.899 < len(train) / len(text) <= 0.9
    assert len(text) > 300_000
    assert (encode(text) == len(ALPHABET) - 1).float().mean() < 0.01


def test_pydoc_windows(text):
    train, val = text.parts["train"], text.parts["val"]
    assert len(train) == len(train.tokens) - 64
    for index in (0, 1, len(train) - 1):
        tokens, targets = train[index]
        assert torch.equal(tokens, train.tokens[index : index + 64])
        assert torch.equal(targets, train.tokens[index + 1 : index + 65])
    # Side by side, every character but the first and a rest shorter than a window is a target once.
    targets = torch.cat([val[index][1] for index in range(len(val))])
    assert torch.equal(targets, val.tokens[1 : len(targets) + 1])
    assert len(val.tokens) - len(targets) <= 64


def test_gpt_looks_at_no_later_token():
    task, tokens = small_gpt().eval(), torch.randint(len(ALPHABET), (3, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % len(ALPHABET)
    logits, changed_logits = task(tokens), task(changed)
    assert logits.shape == (3, 16, len(ALPHABET))
    assert torch.equal(logits[:, :9], changed_logits[:, :9])
    assert not torch.allclose(logits[:, 9:], changed_logits[:, 9:])


def test_gpt_begins_knowing_nothing():
    task = small_gpt(n_embd=64)
    tokens = torch.randint(len(ALPHABET), (8, 16))
    assert task.loss((tokens, tokens.roll(1, 0))).item() == pytest.approx(math.log(len(ALPHABET)), abs=0.5)
    assert sum(parameter.numel() for parameter in CharacterGPT().parameters()) == pytest.approx(0.8e6, rel=0.1)
    assert isinstance(task.blocks, torch.nn.ModuleList)


def test_gpt_refuses_wrong_sizes():
    with pytest.raises(TaskError, match="takes at most 16 characters, but the batch has 17"):
        small_gpt()(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(TaskError, match="n_embd must be a multiple of n_head"):
        CharacterGPT(n_embd=30, n_head=4)


@pytest.mark.slow
def test_gpt_learns_one_batch_by_heart(text):
    task = small_gpt()
    windows = [text.parts["train"][index * 1000] for index in range(4)]
    batch = (torch.stack([w[0][:16] for w in windows]), torch.stack([w[1][:16] for w in windows]))
    assert overfit(task.parameters(), lambda: task.loss(batch), steps=150, lr=1e-2) < 0.1


def test_samples_are_reproducible_and_leave_the_run_alone():
    task = small_gpt(dropout=0.5)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, third = (task.generate("def ", 40, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert task.training
    assert first == second != third
    assert first.startswith("def ")
    assert len(first) == 44


@pytest.mark.slow
def test_gpt_trains_with_decay_on_matrices_only_and_writes_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    task = small_gpt(warmup_steps=4, sample_length=20, lr=3e-3)
    trainer = trainer_for(tmp_path, max_steps=24, val_check_interval=12, limit_val_batches=4)
    trainer.fit(task, datamodule=PydocText(block_size=16, batch_size=8))

    decayed, plain = trainer.optimizers[0].param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    matrices = {name for name, parameter in task.named_parameters() if parameter.ndim >= 2}
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    assert {names[id(parameter)] for parameter in decayed["params"]} == matrices
    assert sorted(names[id(parameter)] for parameter in decayed["params"] + plain["params"]) == sorted(names.values())

    factor = trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0]
    factors = [factor(step) for step in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert decayed["lr"] == pytest.approx(0.1 * 3e-3)

    metrics = trainer.callback_metrics
    assert metrics["val/bits_per_character"].item() == pytest.approx(metrics["val/loss"].item() / math.log(2))
    events = EventAccumulator(str(trainer.run_dir)).Reload()
    samples = events.Tensors("sample/text_summary")
    assert [event.step for event in samples] == [12, 24]
    assert len(samples[-1].tensor_proto.string_val[0].decode()) == len("```\n\n\n```") + 20
