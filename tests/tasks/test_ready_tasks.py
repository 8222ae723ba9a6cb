"""The ready task on digits, and its config."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import legato as lg
from legato.cli.config import build, check
from legato.tasks.digits import DigitImages, Digits, DigitsData

ROOT = Path(lg.__file__).parent


@pytest.fixture(scope="module")
def digits() -> DigitsData:
    data = DigitsData()
    data.setup("fit")
    return data


def trainer_for(tmp_path, **arguments):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lg.Trainer(devices=1, default_root_dir=tmp_path, num_sanity_val_steps=0, **(quiet | arguments))


def overfit(parameters, loss_of, steps, lr):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.slow
def test_digits_parts_are_all_images_once(digits):
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    dataset = load_digits()
    expected = Counter((image.tobytes(), label) for image, label in zip(dataset.images, dataset.target, strict=True))
    counts, per_digit = Counter(), {}
    for name in ("train", "val", "test"):
        plain = digits.parts[name]
        images = plain.images[..., 1:-1, 1:-1] if plain.shift else plain.images
        images = ((images.squeeze(1) + 1) * 8).double().numpy()
        counts += Counter((image.tobytes(), label) for image, label in zip(images, plain.labels.tolist(), strict=True))
        per_digit[name] = torch.bincount(plain.labels, minlength=10) / len(plain)
    assert counts == expected
    assert {name: len(images) for name, images in digits.parts.items()} == {"train": 1257, "val": 270, "test": 270}
    assert (per_digit["val"] - per_digit["train"]).abs().max() < 0.005
    assert (per_digit["test"] - per_digit["train"]).abs().max() < 0.005


@pytest.mark.slow
def test_digits_split_follows_its_seed(digits):
    same, another = DigitsData(), DigitsData(split_seed=1)
    same.setup("test")
    another.setup("test")
    assert torch.equal(same.parts["test"].images, digits.parts["test"].images)
    assert not torch.equal(another.parts["test"].images, digits.parts["test"].images)


@pytest.mark.slow
def test_digits_shapes(digits):
    images, labels = next(iter(digits.train_dataloader()))
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == (
        (32, 1, 8, 8),
        torch.float32,
        (32,),
        torch.int64,
    )
    assert images.min() == -1
    assert images.max() == 1
    assert Digits(channels=4)(images).shape == (32, 10)


@pytest.mark.slow
def test_digits_shift_draws_from_the_global_generator(digits):
    image = torch.full((1, 1, 8, 8), -1.0)
    image[0, 0, 3, 4] = 1.0
    moved = DigitImages(image, torch.tensor([5]), shift=1)

    def places(seed):
        torch.manual_seed(seed)
        return [divmod(int(moved[0][0].argmax()), 8) for _ in range(200)]

    assert places(0) == places(0)
    assert places(0) != places(1)
    assert set(places(0)) == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    before = torch.get_rng_state()
    assert torch.equal(digits.parts["val"][0][0], digits.parts["val"].images[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_digits_learns_one_batch_by_heart(digits):
    torch.manual_seed(0)
    images, labels = next(iter(digits.val_dataloader()))
    task = Digits(channels=8, dropout=0.0)
    assert overfit(task.parameters(), lambda: F.cross_entropy(task(images), labels), steps=80, lr=1e-2) < 0.01


@pytest.mark.slow
def test_digits_accuracy_is_a_ratio_of_counts(digits, tmp_path):
    torch.manual_seed(0)
    task, trainer = Digits(channels=8), trainer_for(tmp_path, max_epochs=3)
    trainer.fit(task, datamodule=DigitsData())
    validation = digits.parts["val"]
    with torch.no_grad():
        correct = int((task.eval()(validation.images).argmax(dim=1) == validation.labels).sum())
    assert trainer.callback_metrics["val/acc"].item() == pytest.approx(correct / 270, abs=1e-7)
    assert correct > 200
    assert trainer.optimizers[0].param_groups[0]["lr"] < 1e-3 * task.hparams.lr
    assert [len(batch) for batch in trainer.predict(task, datamodule=DigitsData())] == [32] * 8 + [14]
    assert trainer.test(task, datamodule=DigitsData())[0].keys() == {"test/loss", "test/acc"}


@pytest.mark.slow
def test_the_ready_config_is_found_by_name_and_builds(tmp_path):
    run = build.build_config(check.load_config(["digits.yaml", f"run.root={tmp_path}"]))
    assert run.trainer.run_name == "digits"
    assert run.data is not None
    assert run.task.hparams
