"""Two ranks that load and save checkpoints: `torchrun --nproc-per-node 2 .. FOLDER`.

FOLDER/one holds a checkpoint of one process at step 2. Writes FOLDER/found.json, and FOLDER/two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer.state_support import COMPRESSOR, begin, equal, gradients, in_eight_bits, run, save, whole
from trainer.checkpoint import Checkpoints
from trainer.checkpoint_files import CheckpointError, Writer
from trainer.distributed.mesh import Mesh, Parallel, end_rank, make_mesh
from trainer.model.layout import clip
from trainer.parameters import local


def loaded_at_two(folder: Path, mesh: Mesh) -> dict[str, object]:
    """A checkpoint of one process on two ranks, and on."""
    state = begin(expert="low", mesh=mesh)
    place = Checkpoints(folder / "one", say=lambda line: None)
    saved = place.newest()
    assert saved is not None
    back = state.load(saved)
    losses = run(state, range(2, 5))
    place.close()
    out = Checkpoints(folder / "two", say=lambda line: None)
    save(state, out, 5)
    again = begin(expert="low", mesh=mesh)
    same = again.load(out.at(5)).moments == 127 and equal(whole(again), whole(state))
    wanted, more = run(state, range(5, 8)), run(again, range(5, 8))
    out.close()
    return {
        "moments": back.moments,
        "losses": losses,
        "round trip": same,
        "goes on": wanted == more and equal(whole(again), whole(state)),
    }


def saved_before_a_step(folder: Path, mesh: Mesh) -> dict[str, object]:
    """Part frozen, gradients set, no step made; then all trained."""
    state = begin(COMPRESSOR, mesh=mesh)
    gradients(state, 0)
    place = Checkpoints(folder / "before", say=lambda line: None)
    save(state, place, 0)
    other = begin(COMPRESSOR, expert="low", mesh=mesh)
    first = other.load(place.at(0))
    state.optimizer.zero_grad()
    same = run(state, range(3)) == run(other, range(3)) and equal(whole(state), whole(other))
    save(other, place, 3)
    thawed = begin(mesh=mesh)
    back = thawed.load(place.at(3))
    run(thawed, range(3, 4))
    place.close()
    return {"fresh": len(first.fresh), "same": same, "thawed": len(back.fresh), "kept": back.moments}


def in_blocks(folder: Path, mesh: Mesh) -> bool:
    """8-bit moments of pieces: saved, and back in the same shards, code by code."""
    state = in_eight_bits(begin(mesh=mesh), seed=3)
    place = Checkpoints(folder / "eight", say=lambda line: None)
    save(state, place, 3)
    other = in_eight_bits(begin(expert="low", mesh=mesh), seed=None)
    back = other.load(place.at(3))
    place.close()
    return back.moments == 127 and equal(whole(other), whole(state))


def averaged_after_a_look(mesh: Mesh) -> bool:
    """A pass without gradients leaves the root gathered: averages and weights must still change places."""
    from tests.trainer.model_support import PRESET, Video

    state = begin(mesh=mesh)
    run(state, range(1))
    inputs = Video(3).inputs(clip(PRESET, 2, 1))
    with torch.no_grad():
        own = state.model(inputs).velocity
        with state.ema.swapped(state.model):
            average = state.model(inputs).velocity
        again = state.model(inputs).velocity
    return bool(torch.equal(own, again) and not torch.equal(own, average))


def failed_on_one_rank(folder: Path, mesh: Mesh) -> str:
    """What every rank is told when a file of the second spoils on its way to the disk."""
    place = Checkpoints(folder / "failed", say=lambda line: None)
    state = begin(mesh=mesh)
    read_back = Writer.read_back
    if mesh.rank == 1:
        Writer.read_back = lambda self: (read_back(self)[0], ["__1_0.distcp reads otherwise"])  # type: ignore[method-assign]
    place.save(1, state.tensors(), {"state": state.note()})
    try:
        place.wait()
        told = ""
    except CheckpointError as error:
        told = str(error)
    Writer.read_back = read_back  # type: ignore[method-assign]
    assert place.newest() is None
    place.close()
    return told


def damaged(folder: Path) -> str:
    """A flipped bit in the second rank's file, told on every rank."""
    place = Checkpoints(folder / "two", say=lambda line: None)
    if place.rank == 0:
        path = folder / "two" / "step-00000005" / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.with_name("spoilt").write_bytes(data)
        path.rename(path.with_name("sound"))
        path.with_name("spoilt").rename(path)
    dist.barrier()
    try:
        place.newest()
        told = ""
    except CheckpointError as error:
        told = str(error)
    dist.barrier()
    if place.rank == 0:
        path.with_name("sound").rename(path)
    place.close()
    return told


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    mesh = make_mesh(Parallel(), "cpu")
    found = {
        "two": loaded_at_two(folder, mesh),
        "before": saved_before_a_step(folder, mesh),
        "look": averaged_after_a_look(mesh),
        "eight": in_blocks(folder, mesh),
        "failed": failed_on_one_rank(folder, mesh),
        "damaged": damaged(folder),
    }
    shards = sum(local(p).numel() for p in begin(mesh=mesh).model.parameters())
    all_found: list[object] = [None, None]
    dist.all_gather_object(all_found, found | {"numel": shards})
    if mesh.rank == 0:
        (folder / "found.json").write_text(json.dumps(all_found))
    mesh.meet("the end")
    end_rank()


if __name__ == "__main__":
    main()
