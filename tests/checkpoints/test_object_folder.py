"""A checkpoint in an object store is complete or absent, even if requests fail, processes die or others write."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from faulty_store import STORE, Killed, some_fail
from several_ranks import on_ranks

from legato.base.errors import CheckpointError, ConfigError
from legato.base.location import Address
from legato.trainer.checkpoints import background, commit, find, manifest, reading, storage, stores
from legato.trainer.checkpoints.shards import ShardBlock

ROOT = Address("faulty://bucket/run/checkpoints")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.0)
    STORE.reset()
    yield
    STORE.reset()


def example(step: int, flavour: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((4, 30), float(10 * step + flavour))}, "at": [step, flavour]}


def save(step: int, flavour: int = 0, *, in_parts: bool = False, run: str = "me") -> None:
    def work(rank: Any) -> None:
        contents = example(step, flavour)
        if in_parts:
            rows = slice(2 * rank.rank, 2 * rank.rank + 2)
            contents["state_dict"]["w"] = ShardBlock(contents["state_dict"]["w"][rows], (4, 30), (rows.start, 0))
        commit.write(ROOT / find.directory_name(step), contents, **({"ranks": rank} if in_parts else {}), run=run)

    on_ranks(2, work) if in_parts else work(None)


def read(name: str) -> tuple[int, int]:
    contents = reading.read_checkpoint(ROOT / name)
    step, flavour = contents["at"]
    assert torch.equal(contents["state_dict"]["w"], example(step, flavour)["state_dict"]["w"])
    return step, flavour


def whole() -> dict[str, tuple[int, int]]:
    return {name: read(name) for name in storage.folder_at(ROOT).names()}


def left_over() -> set[str]:
    """Return the objects that no manifest names."""
    named = set()
    for name in storage.folder_at(ROOT).names():
        content, above = find.load_manifest(ROOT / name), f"bucket/run/checkpoints/{name}/"
        named |= {above + manifest.MANIFEST, *(above + content.path(file) for file in content.files)}
    return STORE.objects.keys() - named


def remove(step: int) -> None:
    storage.remove(ROOT / find.directory_name(step), "me")


def problem_of(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except (Killed, CheckpointError) as error:
        return error
    return None


def two() -> None:
    save(1)
    save(2)


def dead() -> None:
    two()
    STORE.set_fault(lambda number: "killed before" if number >= 8 else "")
    with pytest.raises(Killed):
        save(3, 7)
    STORE.set_fault()


def replaced() -> None:
    two()
    save(2, 1)


SCENARIOS: dict[str, tuple[Callable[[], None], Callable[[], None], int]] = {  # before, what is disturbed, step touched
    "first": (lambda: None, lambda: save(1), 1),
    "next": (two, lambda: save(3), 3),
    "overwrite": (two, lambda: save(2, 1), 2),
    "overwrite twice": (replaced, lambda: save(2, 2), 2),
    "remove": (two, lambda: remove(1), 1),
    "remove a replaced one": (replaced, lambda: remove(2), 2),
    "in parts": (two, lambda: save(3, in_parts=True), 3),
    "overwrite in parts": (two, lambda: save(2, 1, in_parts=True), 2),
    "after a death": (dead, lambda: save(3), 3),
    "sweep": (dead, lambda: storage.folder_at(ROOT).sweep(), 3),
}


@pytest.mark.parametrize("kind", ["killed before", "killed after", "down"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_process_that_dies_at_any_request_leaves_the_old_or_the_new_one(scenario: str, kind: str) -> None:
    prepare, work, touched = SCENARIOS[scenario]
    for count in itertools.count(1):
        STORE.reset()
        prepare()
        before = whole()
        # from then on nothing happens any more: the process is dead, or the store is gone
        STORE.set_fault(
            lambda number, count=count: (
                "" if number < count else "failed" if kind == "down" else kind if number == count else "killed before"
            )
        )
        problem = problem_of(work)
        if problem is None and STORE.requests < count:
            break
        assert isinstance(problem, Killed | None) or "faulty://bucket/run/checkpoints" in str(problem)
        STORE.set_fault()
        now = whole()  # reads all: each is whole
        name = find.directory_name(touched)
        assert {key: now[key] for key in now if key != name} == {key: before[key] for key in before if key != name}
        assert name in now or name not in before or scenario.startswith("remove")
        storage.folder_at(ROOT).sweep()
        assert whole() == now, count
        assert not left_over(), count
        save(9)
        assert read("step-00000009") == (9, 0)
        assert not [path for path in STORE.overwritten if not path.endswith((manifest.MANIFEST, ".writing"))]
    assert count > 3


def test_a_sweep_of_the_folder_above_leaves_checkpoints_alone() -> None:
    """A run directory is swept like a folder of checkpoints, and may be inside another one."""
    dead()
    before = whole()
    assert before
    storage.folder_at(ROOT.parent).sweep()
    assert whole() == before
    storage.folder_at(ROOT).sweep()
    assert not left_over()


def test_two_hundred_random_faults_cost_nothing() -> None:
    faults = 0
    for seed in itertools.count():
        draws = random.Random(seed)
        STORE.set_fault(some_fail(seed))
        step = seed % 5
        save(step, seed, in_parts=draws.random() < 0.3)
        assert read(find.directory_name(step)) == (step, seed)
        if draws.random() < 0.3:
            remove(step)
        storage.folder_at(ROOT).sweep()
        faults += STORE.faults
        if faults >= 200:
            break
    STORE.set_fault()
    assert not left_over()
    assert not [path for path in STORE.overwritten if not path.endswith(manifest.MANIFEST)]


def test_an_upload_that_breaks_off_is_given_up_and_begun_again() -> None:
    for count in itertools.count(1):
        STORE.reset()
        STORE.set_fault(lambda number, count=count: "failed" if number == count else "")
        save(1, count)
        if not STORE.faults:
            break
        assert read("step-00000001") == (1, count)
        assert not STORE.uploads  # their parts would be paid for
    assert count > 15


def test_of_two_writers_neither_tears_what_is_read() -> None:
    problems = list[object]()

    def write(run: str, flavour: int) -> None:
        for number in range(30):
            try:
                save(1, 2 * number + flavour, run=run)
            except CheckpointError as error:
                problems.append(error)

    writers = [threading.Thread(target=write, args=(run, flavour)) for flavour, run in enumerate(("a", "b"))]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        problem = problem_of(lambda: read("step-00000001"))
        # it was replaced meanwhile, which the reader is told
        assert problem is None or "missing" in str(problem)
    assert read("step-00000001")[0] == 1
    assert not problems, problems[0]
    assert not [path for path in STORE.overwritten if not path.endswith(manifest.MANIFEST)]


def test_a_writer_that_was_thought_dead_changes_nothing() -> None:
    dead()
    late = [path for path in STORE.objects if "step-00000003" in path]
    save(3)
    before = read("step-00000003")
    assert late
    for file in late:
        if file not in STORE.objects:  # the later one has tidied up, and may have files of these names
            STORE.objects[file] = b"late"
    assert read("step-00000003") == before


def test_a_manifest_whose_answer_is_lost_is_no_failed_save() -> None:
    save(1)
    # all requests from the manifest's on: the store has it, and does not answer any more
    for count in range(5, 40):
        STORE.set_fault(lambda number, count=count: "lost" if number >= count else "")
        problem_of(lambda: save(1, 5))
        STORE.set_fault()
        assert read("step-00000001")[0] == 1


def test_a_manifest_that_arrives_after_its_sender_has_given_up_tears_nothing() -> None:
    arrived = set()
    for count in range(5, 40):
        save(1)
        STORE.set_fault(lambda number, count=count: "late" if count <= number < count + stores.TRIES else "")
        problem_of(lambda: save(1, 5))
        STORE.set_fault()
        assert read("step-00000001")[0] == 1
        for act in STORE.late:  # the store goes on with what it has been sent
            with suppress(FileExistsError, FileNotFoundError):
                act()
        STORE.late.clear()
        arrived.add(read("step-00000001")[1])
    assert len(arrived) == 2  # the older one, or that of the late manifest


def test_what_is_no_checkpoint_is_neither_replaced_nor_removed() -> None:
    STORE.objects["bucket/run/checkpoints/data/train.csv"] = b"1,2"
    with pytest.raises(CheckpointError, match=r"data contains train.csv, so it is not a checkpoint"):
        commit.write(ROOT / "data", example(1, 0))
    save(1)
    STORE.objects["bucket/run/checkpoints/step-00000001/notes.txt"] = b"good"
    with pytest.raises(CheckpointError, match=r"was not removed: it contains notes.txt"):
        remove(1)
    with pytest.raises(CheckpointError, match="another run wrote it"):
        storage.remove(ROOT / "step-00000001", "other")
    assert read("step-00000001") == (1, 0)


def test_damage_is_found_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        save(step)
    flipped = "bucket/run/checkpoints/step-00000003/model.safetensors"
    STORE.objects[flipped] = STORE.objects[flipped][:-1] + b"x"
    del STORE.objects["bucket/run/checkpoints/step-00000002/state.json"]
    assert find.newest_complete(ROOT) == ROOT / "step-00000001"
    assert "Skipping the incomplete checkpoint step-00000003" in caplog.text
    assert "step-00000002: state.json is missing" in caplog.text
    assert find.resolve(ROOT.parent) == ROOT / "step-00000001"


def test_a_replaced_checkpoint_can_be_copied_to_a_disk(tmp_path: Any) -> None:
    replaced()
    assert find.load_manifest(ROOT / "step-00000002").prefix
    above = "bucket/run/checkpoints/"
    for path, data in STORE.objects.items():
        file = tmp_path / path.removeprefix(above)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    assert find.newest_complete(tmp_path) == tmp_path / "step-00000002"
    assert reading.read_checkpoint(tmp_path / "step-00000002")["at"] == [2, 1]
    storage.remove(tmp_path / "step-00000002", "me")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_saves_in_the_background_and_their_errors() -> None:
    writer = background.Writer()
    writer.save(ROOT / "step-00000001", example(1, 0), run="me")
    writer.wait()
    STORE.set_fault(lambda number: "failed")
    writer.save(ROOT / "step-00000002", example(2, 0), run="me")
    with pytest.raises(CheckpointError, match=r"Saving faulty://bucket/run/checkpoints/step-00000002 .*Read timeout"):
        writer.wait()
    STORE.set_fault()
    assert whole() == {"step-00000001": (1, 0)}


def test_a_repository_of_the_hub_is_not_written_to() -> None:
    with pytest.raises(ConfigError, match=r"hf://user/repo is a repository, .* \(hf://buckets/USER/NAME\)"):
        stores.require_writable("hf://user/repo")
    stores.require_writable("hf://buckets/user/name")


def test_a_missing_package_is_named() -> None:
    import importlib.util

    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(ConfigError, match=r"pip install 'legato\[gs\]'"):
        storage.folder_at(Address("gs://bucket/run"))


# --- weights that are stored once -------------------------------------------------------------------------------------
def save_adapted(step: int) -> dict[str, torch.Tensor]:
    weights = {"base": torch.arange(4096.0), "head": torch.full((4,), float(step))}
    commit.write(ROOT / find.directory_name(step), {"state_dict": weights}, run="me", frozen={"base"})
    return weights


def bases() -> list[str]:
    return [path for path in STORE.objects if "/checkpoints/base/" in path]


def test_a_base_is_uploaded_once_and_goes_with_the_last_checkpoint() -> None:
    for step in (1, 2):
        weights = save_adapted(step)
        back = reading.read_checkpoint(ROOT / find.directory_name(step))["state_dict"]
        assert all(torch.equal(back[name], value) for name, value in weights.items())
    (base,) = bases()
    assert len(storage.folder_at(ROOT).bases()) == 1
    assert sum(len(data) for path, data in STORE.objects.items() if path != base) < 6000 < len(STORE.objects[base])
    remove(1)
    assert bases() == [base]
    data = STORE.objects[base]
    STORE.objects[base] = data[:-1] + b"\1"
    with pytest.raises(CheckpointError, match=r"base/.*is damaged"):
        reading.read_checkpoint(ROOT / "step-00000002")
    del STORE.objects[base]
    with pytest.raises(CheckpointError, match=r"base/.* beside them, but this file is missing"):
        reading.read_checkpoint(ROOT / "step-00000002")
    save_adapted(3)  # uploads it again
    remove(2)
    reading.read_checkpoint(ROOT / "step-00000003")
    remove(3)
    assert STORE.objects == {}


def test_nothing_torn_is_read_where_requests_fail_while_a_base_is_shared() -> None:
    for step in range(1, 60):
        STORE.set_fault(some_fail(step))
        problem = problem_of(lambda step=step: save_adapted(step))  # type: ignore[misc]
        assert problem is None or isinstance(problem, CheckpointError)
        STORE.set_fault()
        for name in storage.folder_at(ROOT).names():
            assert reading.read_checkpoint(ROOT / name)["state_dict"]["base"].sum() == torch.arange(4096.0).sum()
        if step > 2 and find.directory_name(step - 2) in storage.folder_at(ROOT).names():
            remove(step - 2)
        assert len(bases()) <= 1
