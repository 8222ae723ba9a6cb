"""Optimizers that evaluate the loss, optimizers of two kinds of groups, and schedulers that are told where they are."""

import pytest
import torch
from tiny import Tiny, Validated, assert_close, assert_same_bits, make_loader, make_trainer

from legato.base.errors import ConfigError, TaskError


# --- closures ---------------------------------------------------------------------------------------------------------
def sam(parameters):
    from pytorch_optimizer import SAM

    return SAM(parameters, torch.optim.SGD, lr=0.1)


def bsam(parameters):
    from pytorch_optimizer import BSAM

    torch.manual_seed(5)
    return BSAM(parameters, num_data=16, lr=0.1)


def alig(parameters):
    from pytorch_optimizer import AliG

    return AliG(parameters, max_lr=0.1)


class Made(Validated):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize("make", [sam, alig])
def test_an_optimizer_that_asks_for_a_closure_gets_it(tmp_path, make):
    task, by_hand = Made(make), Made(make)
    make_trainer(tmp_path).fit(task, make_loader(16))
    optimizer = by_hand.configure_optimizers()
    for batch in make_loader(16):

        @torch.enable_grad()
        def closure(batch=batch):
            optimizer.zero_grad()
            loss = by_hand.loss(batch)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    assert_same_bits(task, by_hand)


def test_of_bsam_too(tmp_path):
    task, before = Made(bsam), Tiny()
    make_trainer(tmp_path).fit(task, make_loader(16))
    assert all(not torch.equal(*pair) for pair in zip(task.parameters(), before.parameters(), strict=True))


def test_sam_is_refused_on_two_processes_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"^SAM evaluates the loss several times a step, which requires"):
        make_trainer(tmp_path, devices=2, strategy="ddp").fit(Made(sam), make_loader(16))


# --- two kinds of groups ----------------------------------------------------------------------------------------------
class Muon(Tiny):
    """Muon for matrices, AdamW for the rest, in one optimizer."""

    def configure_optimizers(self):
        from pytorch_optimizer import Muon

        groups = [
            [parameter for parameter in self.parameters() if (parameter.dim() == 2) is matrices]
            for matrices in (True, False)
        ]
        return Muon([{"params": group, "use_muon": kind} for group, kind in zip(groups, (True, False), strict=True)])


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_one_optimizer_of_two_kinds_of_groups(tmp_path, strategy):
    task, by_hand, two = Muon(), Muon(), Muon()
    make_trainer(tmp_path).fit(task, make_loader(16))
    optimizer = by_hand.configure_optimizers()
    for batch in make_loader(16):
        optimizer.zero_grad()
        by_hand.loss(batch).backward()
        optimizer.step()
    assert_same_bits(task, by_hand)
    alone = Muon()
    make_trainer(tmp_path, replicas=2).fit(alone, make_loader(18))
    make_trainer(tmp_path, devices=2, strategy=strategy).fit(two, make_loader(18))
    assert_close(alone, two)


# --- timm's schedulers ------------------------------------------------------------------------------------------------
class Scheduled(Validated):
    """A scheduler of timm's; notes the learning rate of each step."""

    def __init__(self, in_epochs, **options):
        super().__init__()
        self.in_epochs, self.options, self.rates = in_epochs, options, []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        from timm.scheduler import CosineLRScheduler

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        length = {"t_initial": 4, "warmup_t": 1, "warmup_lr_init": 0.01, "cycle_limit": 1}
        length |= {} if self.in_epochs else {"t_initial": 16, "warmup_t": 3}
        scheduler = CosineLRScheduler(optimizer, t_in_epochs=self.in_epochs, **length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}


@pytest.mark.parametrize("in_epochs", [True, False])
@pytest.mark.parametrize("processes", [1, 2])
def test_timms_schedulers_step_as_in_timms_script(tmp_path, in_epochs, processes):
    task, by_hand = Scheduled(in_epochs), Scheduled(in_epochs)
    options = {"devices": 2, "strategy": "ddp", "enable_checkpointing": True} if processes == 2 else {}
    make_trainer(tmp_path, max_epochs=4, **options).fit(task, make_loader(16 * processes))
    made = by_hand.configure_optimizers()
    scheduler, updates = made["lr_scheduler"]["scheduler"], 0
    for epoch in range(4):
        for _ in range(4):
            by_hand.rates.append(made["optimizer"].param_groups[0]["lr"])
            updates += 1
            scheduler.step_update(updates)
        scheduler.step(epoch + 1)
    if processes == 1:
        assert task.rates == by_hand.rates
    else:  # and a resume goes on with its rates
        resumed = Scheduled(in_epochs)
        checkpoint = next(tmp_path.rglob("checkpoints/step-*"))
        make_trainer(tmp_path, max_epochs=5, replicas=2).fit(resumed, make_loader(32), resume=checkpoint)
        assert resumed.rates[0] == made["optimizer"].param_groups[0]["lr"]


def test_an_interval_that_timms_scheduler_does_not_count_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"interval='epoch', but its CosineLRScheduler has t_in_epochs=False"):
        make_trainer(tmp_path).fit(Scheduled(False, interval="epoch"), make_loader(16))


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
def test_timms_plateau_takes_the_monitored_value(tmp_path):
    class Flat(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

        def configure_optimizers(self):
            from timm.scheduler import PlateauLRScheduler

            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = PlateauLRScheduler(optimizer, decay_rate=0.5, patience_t=0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

    made = make_trainer(tmp_path, max_epochs=3)
    made.fit(Flat(), make_loader(16), make_loader(8))
    assert made.optimizers[0].param_groups[0]["lr"] == 0.025
