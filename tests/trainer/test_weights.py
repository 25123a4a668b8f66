"""Files of weights: bit-identical round trips through real loaders, refusals, and a full-size expert."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.model_support import noisy_expert
from trainer.config import A14B, TINY
from trainer.model.adapters import FILE, INDEX, AdapterError, Contents, Found, Naming, manifest, names
from trainer.model.pdd_head import VelocityHead, bank_from_velocity, compact_from_bank
from trainer.model.wan import WanModel
from trainer.schedule import PddSchedule
from trainer.weights.checkpoint import open_checkpoint
from trainer.weights.tensorfile import WeightsError, read_header, read_tensor, write
from trainer.weights.transfer import convert, diff, load, save

VELOCITY = Found(Naming.NATIVE, Contents.VELOCITY, TINY)
EXPERTS = ("high_noise_model", "low_noise_model")


@pytest.fixture(scope="module")
def models() -> dict[str, WanModel]:
    torch.set_num_threads(1)
    return {name: noisy_expert(name) for name in ("high", "low")}


@pytest.fixture
def released(models: dict[str, WanModel], tmp_path: Path) -> Path:
    save(models, VELOCITY, tmp_path / "released")
    return tmp_path / "released"


@pytest.fixture
def base(released: Path, tmp_path: Path) -> Path:
    """The part of it that Wan2.2 has, as its authors publish it: in shards, with an index."""
    for expert in EXPERTS:
        state = load_file(released / expert / FILE)
        added = ("action_in_", "memory_compress.")
        state = {n: t for n, t in state.items() if not n.startswith(added) and "img_action_mlp" not in n}
        folder = tmp_path / "base" / expert
        folder.mkdir(parents=True)
        placed = {}
        for k, shard in enumerate((sorted(state)[:30], sorted(state)[30:])):
            file = f"diffusion_pytorch_model-0000{k + 1}-of-00002.safetensors"
            save_file({n: state[n] for n in shard}, folder / file)
            placed |= dict.fromkeys(shard, file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return tmp_path / "base"


# --- round trips ------------------------------------------------------------------------------------------


def test_written_weights_come_back_bit_by_bit(models: dict[str, WanModel], released: Path) -> None:
    checkpoint = open_checkpoint(released)
    assert [e.name for e in checkpoint.experts] == ["high", "low"]
    for expert in checkpoint.experts:
        loaded = load(expert, dtype=torch.bfloat16)
        assert loaded.config.max_latents == 1024
        for name, value in models[expert.name].state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name


def test_the_library_reads_our_file_and_we_read_the_librarys(released: Path, tmp_path: Path) -> None:
    ours = released / EXPERTS[0] / FILE
    theirs = load_file(ours)
    assert len(theirs) == len(read_header(ours))
    save_file(dict(theirs), tmp_path / "again.safetensors")
    for name, entry in read_header(tmp_path / "again.safetensors").items():
        assert torch.equal(read_tensor(entry), theirs[name])


@pytest.mark.parametrize("kind", [Contents.COMPACT, Contents.BANK])
def test_few_step_weights_keep_their_head(tmp_path: Path, kind: Contents) -> None:
    model = noisy_expert("high")
    assert isinstance(model.head, VelocityHead)
    bank, blocks = bank_from_velocity(model.head, 56), PddSchedule().blocks_of("high")
    model.head = bank if kind is Contents.BANK else compact_from_bank(bank, blocks)
    heads = 56 if kind is Contents.BANK else 2
    save({"single": model}, Found(Naming.NATIVE, kind, TINY, heads), tmp_path / "few")
    (expert,) = open_checkpoint(tmp_path / "few").experts
    assert (expert.found.contents, expert.found.heads) == (kind, heads)
    head = load(expert).head
    for mine, theirs in zip(head.bank(), model.head.bank()):
        assert torch.equal(mine, theirs.bfloat16().float())


def test_a_base_goes_through_diffusers_and_back_bit_by_bit(base: Path, tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    convert(open_checkpoint(base), tmp_path / "d", Naming.DIFFUSERS)
    folder = tmp_path / "d" / "transformer_2"
    loaded = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder))
    loaded.load_state_dict(load_file(folder / FILE), strict=True)
    low = open_checkpoint(base).experts[1]
    for ours, theirs in names(Found(Naming.DIFFUSERS, Contents.BASE, TINY)).items():
        value = loaded.state_dict()[theirs]
        assert torch.equal(value.bfloat16(), read_tensor(low.entries[ours])), theirs
    convert(open_checkpoint(tmp_path / "d"), tmp_path / "back", Naming.NATIVE)
    for expert in EXPERTS:
        shards = sorted((base / expert).glob("*.safetensors"))
        wanted = {n: t for shard in shards for n, t in load_file(shard).items()}
        given = load_file(tmp_path / "back" / expert / FILE)
        assert given.keys() == wanted.keys()
        assert all(torch.equal(given[n], wanted[n]) for n in wanted)


def test_full_precision_is_written_as_bf16(released: Path, tmp_path: Path) -> None:
    state = load_file(released / EXPERTS[0] / FILE)
    save_file({n: t.float() for n, t in state.items()}, tmp_path / "full.safetensors")
    convert(open_checkpoint(tmp_path / "full.safetensors"), tmp_path / "out", Naming.NATIVE)
    assert diff(open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "full.safetensors"))[0].equal
    assert open_checkpoint(tmp_path / "out").experts[0].dtypes == {"bfloat16": len(state)}


# --- adding to a base -------------------------------------------------------------------------------------


def test_fresh_actions_and_memory_leave_the_base_as_it_was(base: Path, tmp_path: Path) -> None:
    for seed in (1, 1, 2):
        convert(
            open_checkpoint(base), tmp_path / f"{seed}{len(list(tmp_path.iterdir()))}", Naming.NATIVE, seed
        )
    first, again, other = sorted(p for p in tmp_path.iterdir() if p.name[0] in "12")
    assert all(d.equal for d in diff(open_checkpoint(first), open_checkpoint(again)))
    change = diff(open_checkpoint(base), open_checkpoint(first))[0]
    assert not change.changed and not change.only_left
    assert len(change.only_right) == len(manifest(VELOCITY)) - change.compared
    changed = diff(open_checkpoint(first), open_checkpoint(other))[0].changed
    assert {n.split(".")[0] for n in changed} == {"action", "memory", "blocks"}
    high, low = open_checkpoint(first).experts
    mlp = "blocks.0.action_mlp.0.weight"
    assert not torch.equal(read_tensor(high.entries[mlp]), read_tensor(low.entries[mlp]))
    for name in ("blocks.1.action_mlp.2.weight", "memory.output_layer.weight"):
        assert not read_tensor(high.entries[name]).any()
    assert read_tensor(high.entries[mlp]).float().std() > 0.01


def test_a_base_is_no_world_model(base: Path) -> None:
    with pytest.raises(WeightsError, match="--fresh SEED"):
        load(open_checkpoint(base).experts[0])


def test_fresh_parts_are_not_added_twice(released: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has actions and memory already"):
        convert(open_checkpoint(released), tmp_path / "o", Naming.NATIVE, 1)
    with pytest.raises(AdapterError, match="no place for"):
        convert(open_checkpoint(released), tmp_path / "o", Naming.DIFFUSERS)
    assert not (tmp_path / "o").exists()


# --- differences ------------------------------------------------------------------------------------------


def test_a_difference_is_measured_in_our_names(released: Path, tmp_path: Path) -> None:
    state = load_file(released / EXPERTS[0] / FILE)
    state["blocks.1.img_action_mlp.0.bias"][3] += 0.5
    state["head.head.bias"][0] = float("nan")
    save_file(state, tmp_path / "other.safetensors")
    found = diff(open_checkpoint(tmp_path / "other.safetensors"), open_checkpoint(released / EXPERTS[0]))[0]
    assert found.changed.keys() == {"blocks.1.action_mlp.0.bias", "head.head.bias"}
    assert found.changed["blocks.1.action_mlp.0.bias"] == pytest.approx(0.5, rel=0.02)
    assert found.changed["head.head.bias"] == math.inf
    with pytest.raises(WeightsError, match="has 1 experts"):
        diff(open_checkpoint(tmp_path / "other.safetensors"), open_checkpoint(released))


# --- refusals ---------------------------------------------------------------------------------------------


def damaged(file: Path, how: str) -> Path:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first = next(n for n in header if n != "__metadata__")
    match how:
        case "cut":
            data = data[:-10]
        case "cut header":
            data = data[: length // 2]
        case "empty":
            data = b""
        case "longer":
            data += b"more"
        case "noise":
            data = data[:8] + b"\xff" * length + data[8 + length :]
        case "pickle":
            data = b"PK\x03\x04" + data
        case "length":
            data = (1 << 62).to_bytes(8, "little") + data[8:]
        case "dtype" | "shape" | "hole" | "offsets":
            entry = header[first]
            if how == "dtype":
                entry["dtype"] = "F8_E4M3"
            elif how == "shape":
                entry["shape"] = [7]
            elif how == "offsets":
                entry["data_offsets"] = [-4, "x"]
            else:
                entry["shape"], entry["data_offsets"] = [0], [0, 0]
            raw = json.dumps(header).encode()
            data = len(raw).to_bytes(8, "little") + raw + data[8 + length :]
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut", "is cut short: [0-9,]+ bytes of [0-9,]+; fetch it again"),
        ("cut header", "ends in its header"),
        ("empty", "no safetensors file"),
        ("longer", "4 bytes behind its last tensor"),
        ("noise", "damaged header"),
        ("length", "ends in its header"),
        ("pickle", "is a pickle, and opening one runs what it holds"),
        ("dtype", "of type F8_E4M3"),
        ("shape", r"is \[7\] of BF16, but has"),
        ("offsets", "entry of .* is damaged"),
        ("hole", "does not begin where the tensor before it ends"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(released: Path, how: str, says: str) -> None:
    damaged(released / EXPERTS[0] / FILE, how)
    with pytest.raises(WeightsError, match=says) as caught:
        open_checkpoint(released)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_named(released: Path) -> None:
    expert = open_checkpoint(released).experts[0]
    last = max(expert.entries.values(), key=lambda e: e.stop)
    os.truncate(last.path, last.stop - 2)
    with pytest.raises(WeightsError, match="cut short in"):
        read_tensor(last)


def test_what_is_not_whole_is_refused(released: Path, base: Path, tmp_path: Path) -> None:
    shard = next((base / EXPERTS[1]).glob("*-of-*"))
    shard.unlink()
    with pytest.raises(WeightsError, match="which is not there: fetch it"):
        open_checkpoint(base)
    (released / EXPERTS[1] / FILE).rename(released / EXPERTS[1] / "model.pt")
    with pytest.raises(WeightsError, match=r"holds neither .*; model.pt is a pickle"):
        open_checkpoint(released)
    (released / EXPERTS[1]).rename(tmp_path / "away")
    with pytest.raises(WeightsError, match="a model has both experts"):
        open_checkpoint(released)
    with pytest.raises(WeightsError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_index_that_lies_is_refused(base: Path) -> None:
    index = base / EXPERTS[0] / INDEX
    table = json.loads(index.read_text())
    names = sorted(table["weight_map"])
    table["weight_map"][names[0]] = table["weight_map"][names[-1]]
    index.write_text(json.dumps(table))
    with pytest.raises(WeightsError, match="is said to lie in"):
        open_checkpoint(base)
    table["weight_map"][names[0]] = "../../other.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(WeightsError, match="no index of shards"):
        open_checkpoint(base)


def test_nothing_is_overwritten_and_nothing_half_written_stays(released: Path, tmp_path: Path) -> None:
    source = open_checkpoint(released)
    with pytest.raises(WeightsError, match="is there already"):
        convert(source, released, Naming.NATIVE)
    file = tmp_path / "x" / "y.safetensors"
    with pytest.raises(WeightsError, match="never came"):
        write(file, {"a": (2,), "b": (2,)}, torch.float32, [("a", torch.ones(2))])
    with pytest.raises(WeightsError, match="came where"):
        write(file, {"a": (2,)}, torch.float32, [("a", torch.ones(3))])
    assert list(file.parent.iterdir()) == []


def test_a_disk_without_room_is_seen_before_anything_is_written(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(WeightsError, match=r"needs 0.0 GB and its disk has 0.0: make room"):
        convert(open_checkpoint(released), tmp_path / "o", Naming.NATIVE)
    assert not (tmp_path / "o").exists()


def test_what_a_kill_left_behind_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".a.safetensors.partial").write_bytes(b"x" * 1000)
    write(tmp_path / "a.safetensors", {"a": (2,)}, torch.float32, [("a", torch.ones(2))])
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert read_header(tmp_path / "a.safetensors")["a"].shape == (2,)


def test_zeros_take_no_room(tmp_path: Path) -> None:
    file = tmp_path / "z.safetensors"
    values = {"a": torch.zeros(64 << 20, dtype=torch.bfloat16), "b": torch.ones(5, dtype=torch.bfloat16)}
    write(file, {n: tuple(t.shape) for n, t in values.items()}, torch.bfloat16, values.items())
    assert file.stat().st_size > 128 << 20
    assert file.stat().st_blocks * 512 < 1 << 20
    assert torch.equal(read_tensor(read_header(file)["b"]), values["b"])


# --- full size --------------------------------------------------------------------------------------------

MEASURED = """
import resource, sys
from jobs.cli import main
sys.argv = ["wp2", *sys.argv[1:]]
main()
"""
PEAK = 8 << 30


def measured(*arguments: str) -> tuple[str, int]:
    """Output and peak resident bytes of a `wp2` command in a process of its own."""
    code = "import resource\ntry:\n" + "".join(f"    {line}\n" for line in MEASURED.strip().splitlines())
    code += "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
    code += "print('PEAK', 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    text, _, peak = done.stdout.rpartition("PEAK")
    return text, int(peak)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_full_size_expert_is_inspected_and_converted_in_8_gb(tmp_path: Path) -> None:
    found = Found(Naming.NATIVE, Contents.VELOCITY, A14B)
    shapes, table = manifest(found), names(found)
    file = tmp_path / FILE
    header: dict[str, object] = {}
    at = 0
    for ours in shapes:
        size = 2 * math.prod(shapes[ours])
        header[table[ours]] = {"dtype": "BF16", "shape": shapes[ours], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(file, 8 + len(raw) + at)
    try:
        text, peak = measured("weights", "inspect", str(file))
        assert "1305 tensors, 17.46 B parameters, 34.92 GB" in text
        assert peak < PEAK
        print(f"peak of inspect: {peak / 1e9:.2f} GB")
        text, peak = measured("weights", "convert", str(file), str(tmp_path / "out"))
        print(f"peak of convert: {peak / 1e9:.2f} GB")
        assert "1305 tensors, 17.46 B parameters, 34.92 GB" in text
        assert peak < PEAK
        out = tmp_path / "out" / FILE
        assert out.stat().st_size > 34.9e9
        assert out.stat().st_blocks * 512 < 1 << 24
    finally:
        file.unlink()
        (tmp_path / "out" / FILE).unlink(missing_ok=True)
