"""Checkpoints: something loads after every kind of death, and older state is never taken unasked."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer import checkpoint_kills
from trainer import checkpoint, checkpoint_files
from trainer.checkpoint import Checkpoints, Saved
from trainer.checkpoint_files import CheckpointError, Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((30, 40), value), "b/step": torch.full((), value)}


def values(saved: Saved | None) -> list[float]:
    """The one value that each tensor of a checkpoint is full of."""
    assert saved is not None
    found = tensors(0.0)
    saved.read(found)
    assert all((t == t.flatten()[0]).all() for t in found.values())
    return [t.flatten()[0].item() for t in found.values()]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def place(tmp_path: Path, said: list[str]) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2, say=said.append)


def fill(place: Checkpoints, *steps: int) -> None:
    for step in steps:
        place.save(step, tensors(float(step)), {"step": step})
    place.wait()


def flip(path: Path, at: int = -200) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def names(place: Checkpoints) -> list[str]:
    return sorted(p.name for p in place.folder.iterdir())


# --- saving -----------------------------------------------------------------------------------------------


def test_what_changes_after_the_call_is_not_saved(
    place: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    write = Writer.write_data
    monkeypatch.setattr(Writer, "write_data", lambda *a: (held.wait(20), write(*a))[1])
    given = tensors(1.0)
    place.save(100, given, {"seed": 7})
    for tensor in given.values():
        tensor.fill_(2.0)  # the next step of training, while the file is not yet begun
    held.set()
    saved = place.newest()
    assert values(saved) == [1.0, 1.0]
    assert saved is not None and (saved.step, saved.note) == (100, {"seed": 7})
    assert names(place) == ["latest", "step-00000100"]
    assert sorted(p.name for p in saved.path.iterdir()) == [".metadata", "__0_0.distcp", "complete.json"]


def test_old_ones_go_and_the_newest_stays(place: Checkpoints, tmp_path: Path) -> None:
    fill(place, 100, 200, 300)
    assert names(place) == ["latest", "step-00000200", "step-00000300"]
    one = Checkpoints(tmp_path / "one", keep=1)
    fill(one, 1, 2)
    assert names(one) == ["latest", "step-00000002"] and values(one.newest()) == [2.0, 2.0]
    with pytest.raises(CheckpointError, match="keep at least 1"):
        Checkpoints(tmp_path / "none", keep=0)


def test_a_step_is_written_once_and_never_before_a_later_one(place: Checkpoints) -> None:
    fill(place, 100)
    place.save(100, tensors(5.0), {})
    assert values(place.newest()) == [100.0, 100.0]
    with pytest.raises(CheckpointError, match=r"has step 100, later than 50: give --step"):
        place.save(50, tensors(5.0), {})


def test_a_full_disk_is_told_and_the_older_one_stays(
    place: Checkpoints, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    fill(place, 100)

    def full(self: object, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files._HashedFile, "write", full)
        place.save(200, tensors(2.0), {})
        with pytest.raises(CheckpointError, match=r"step-00000200 was not written .*No space left on device"):
            place.save(300, tensors(3.0), {})  # the error of the earlier save is not lost
    assert (place.folder / "latest").read_text() == "step-00000100\n"
    assert values(place.newest()) == [100.0, 100.0]
    assert any("step-00000200 is skipped: its save was cut off" in line for line in said)
    fill(place, 300)
    assert any("step-00000200 is removed: its save was cut off" in line for line in said)
    assert names(place) == ["latest", "step-00000100", "step-00000300"]


def test_a_file_that_reads_otherwise_than_written_is_not_complete(
    place: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place, 100)
    finish = Writer.finish

    def spoilt(self: Writer, **given: Any) -> None:
        flip(Path(self.path) / "__0_0.distcp")
        finish(self, **given)

    monkeypatch.setattr(Writer, "finish", spoilt)
    place.save(200, tensors(2.0), {})
    with pytest.raises(CheckpointError, match=r"__0_0.distcp reads otherwise than it was written"):
        place.wait()
    assert values(place.newest()) == [100.0, 100.0]


def test_a_save_that_hangs_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    write = Writer.write_data
    monkeypatch.setattr(Writer, "write_data", lambda *a: (held.wait(20), write(*a))[1])
    place = Checkpoints(tmp_path, wait_s=0.2)
    place.save(100, tensors(1.0), {})
    with pytest.raises(CheckpointError, match=r"is not complete after 0.2 s: is the disk slow or full"):
        place.save(200, tensors(2.0), {})
    held.set()


# --- choosing ---------------------------------------------------------------------------------------------


def test_resume_says_what_it_chose(place: Checkpoints, said: list[str]) -> None:
    assert place.newest() is None
    assert said == [f"{place.folder} has no complete checkpoint"]
    fill(place, 100, 200)
    (place.folder / "step-00000300").mkdir()  # a save that was cut off
    (place.folder / "step-00000300" / "__0_0.distcp").write_bytes(b"half")
    said.clear()
    assert values(place.newest()) == [200.0, 200.0]
    assert said == [
        f"{place.folder / 'step-00000300'} is skipped: its save was cut off",
        f"step 200 of {place.folder}, the newest complete one; complete are 100, 200",
    ]
    assert values(place.at(100)) == [100.0, 100.0]
    assert said[-1] == f"step 100 of {place.folder}, as asked; complete are 100, 200"
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 300: there are 100, 200"):
        place.at(300)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "complete.json"])
def test_a_flipped_bit_is_named_and_the_earlier_one_proposed(place: Checkpoints, file: str) -> None:
    fill(place, 100, 200)
    flip(place.folder / "step-00000200" / file)
    with pytest.raises(CheckpointError) as error:
        place.newest()
    assert f"step-00000200/{file} is damaged" in str(error.value)
    assert "give --step 100 to go on from the checkpoint before it" in str(error.value)
    assert "\n" not in str(error.value)
    assert values(place.at(100)) == [100.0, 100.0]  # only when asked
    flip(place.folder / "step-00000100" / file)
    with pytest.raises(CheckpointError, match=r"restore it from a copy; there is no earlier checkpoint"):
        place.at(100)


def test_a_short_or_absent_file_is_named(place: Checkpoints) -> None:
    fill(place, 100, 200)
    data = place.folder / "step-00000200" / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointError, match=rf"__0_0.distcp has {len(whole) - 1:,} bytes of {len(whole):,}"
    ):
        place.newest()
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is gone"):
        place.newest()


def test_older_state_is_not_taken_when_the_latest_is_gone(place: Checkpoints) -> None:
    fill(place, 100, 200)
    (place.folder / "step-00000200" / "complete.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"latest names step 200, .* give --step 100 to go on from there"
    ):
        place.newest()


def test_going_back_sets_later_ones_aside(place: Checkpoints, said: list[str]) -> None:
    fill(place, 100, 200)
    place.rewind(100)
    assert names(place) == ["latest", "set-aside-step-00000200", "step-00000100"]
    assert values(place.newest()) == [100.0, 100.0]
    fill(place, 150, 200)
    assert values(place.newest()) == [200.0, 200.0]
    assert names(place) == ["latest", "set-aside-step-00000200", "step-00000150", "step-00000200"]
    place.rewind(0)
    aside = [f"set-aside-step-00000{step}" for step in ("150", "200", "200-2")]  # what was there is kept
    assert names(place) == aside and place.newest() is None


def test_of_folders_that_belong_together_the_newest_common_steps_stay(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("high", "low")]
    high, low = (Checkpoints(p, 1, say=lambda line: None, beside=places[::-1]) for p in places)
    fill(high, 1, 2)
    fill(low, 1)
    assert [checkpoint.list_steps(p)[0] for p in places] == [[1, 2], [1]]
    fill(low, 2)
    assert [checkpoint.list_steps(p)[0] for p in places] == [[2], [2]]


# --- killed -----------------------------------------------------------------------------------------------


def kill(folder: Path, keep: int, points: tuple[str, ...], seconds: float) -> dict[str, int]:
    """Step that was loaded after a kill at each point."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.checkpoint_kills", str(folder), str(keep)]
    done = subprocess.run(
        [*command, *points], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr
    return {name: int(step) for name, step in (line.split() for line in done.stdout.splitlines())}


def test_a_kill_anywhere_in_a_save_leaves_one_that_loads(tmp_path: Path) -> None:
    draw = random.Random(8)
    timed = tuple(str(draw.randrange(100, 900)) for _ in range(2))
    loaded = kill(tmp_path, 1, (*checkpoint_kills.POINTS, *timed), 120)
    loaded.pop("timed", None)
    before = dict.fromkeys(("data", "metadata", "marker", "marker-rename"), 2)
    assert loaded == before | dict.fromkeys(("latest", "old-marker", "old-files"), 3)


@pytest.mark.soak
def test_twenty_kills_of_one_run(tmp_path: Path) -> None:
    draw = random.Random(9)
    points = tuple(str(draw.randrange(200, 2500)) for _ in range(20))
    assert kill(tmp_path, 1, points, 600)["timed"] > 20


# --- the format -------------------------------------------------------------------------------------------


def test_only_tensors_are_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"a": torch.zeros(2), "b": {"lr": 1.0}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"b.lr is no tensor"):
        Reader(tmp_path).entries()


def test_folders_of_large_steps_are_found(tmp_path: Path) -> None:
    (tmp_path / checkpoint.folder_name(123_456_789)).mkdir()
    assert checkpoint.list_steps(tmp_path)[1] == [tmp_path / "step-123456789"]
