"""The tars as trainers read them: with plain webdataset, with Hugging Face datasets, with the own reader."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset
from shards_corpus import content, samples, write

from pipeline.shards.read import CorruptMember, read_index, read_sample
from pipeline.store import Store, StoreError
from schemas.sample import FAMILIES


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Store:
    corpus = Store(str(tmp_path_factory.mktemp("read") / "corpus"))
    write(corpus)
    return corpus


def tars(corpus: Store, family: str) -> list[str]:
    return [corpus.full(s.path) for s in corpus.list(f"shards/{family}")]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_webdataset_sees_every_sample_with_its_bytes(corpus: Store, family: str) -> None:
    seen = list(webdataset.WebDataset(tars(corpus, family), shardshuffle=False))
    assert [s["__key__"] for s in seen] == [s.sample_id for s in samples()]
    for got, want in zip(seen, samples(), strict=True):
        assert {k for k in got if not k.startswith("__")} == set(FAMILIES[family])
        for suffix in FAMILIES[family]:
            assert got[suffix] == content(want.members[suffix])


HF = """
import json, sys
import datasets

family, streaming, files = sys.argv[1], sys.argv[2] == "streaming", sys.argv[3:]
data = datasets.load_dataset("webdataset", data_files={"train": files}, split="train", streaming=streaming)
if family == "media":
    data = data.cast_column("mp4", datasets.Video(decode=False))
for row in data:
    if family == "media":
        row["mp4"] = row["mp4"]["bytes"].hex()
    print(json.dumps(row, default=lambda a: a.tolist()))
"""


@pytest.mark.parametrize("streaming", ["streaming", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_datasets_sees_every_sample(
    corpus: Store, tmp_path: Path, family: str, streaming: str
) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", HF, family, streaming, *tars(corpus, family)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [r["__key__"] for r in rows] == [s.sample_id for s in samples()]
    for row, want in zip(rows, samples(), strict=True):
        assert set(row) == {*FAMILIES[family], "__key__", "__url__"}
        if family == "media":
            assert bytes.fromhex(row["mp4"]) == content(want.members["mp4"])
            continue
        note, *arrays = FAMILIES[family]
        assert row[note] == json.loads(content(want.members[note]))
        for suffix in arrays:
            array = np.load(io.BytesIO(content(want.members[suffix])))
            np.testing.assert_array_equal(np.array(row[suffix], array.dtype).reshape(array.shape), array)


def test_the_index_finds_every_sample_by_one_read_a_family(corpus: Store, monkeypatch) -> None:
    reads = []
    plain = Store.read
    rows = read_index(corpus).to_pylist()
    monkeypatch.setattr(Store, "read", lambda *a, **k: (reads.append(a), plain(*a, **k))[1])
    for row, want in zip(rows, samples(), strict=True):
        assert row["sample_id"] == want.sample_id
        assert {k: row[k] for k in want.facts} == dict(want.facts)
        for family, suffixes in FAMILIES.items():
            members = read_sample(corpus, row[family])
            assert members == {s: content(want.members[s]) for s in suffixes}
    assert len(reads) == len(samples()) * len(FAMILIES)


def test_columns_can_be_chosen(corpus: Store) -> None:
    assert read_index(corpus, ["sample_id", "frames"]).column_names == ["sample_id", "frames"]


def copy(corpus: Store, tmp_path: Path) -> Store:
    other = Store(str(tmp_path / "copy"))
    write(other)
    return other


def test_a_changed_byte_is_a_named_error_on_the_hot_path(corpus: Store, tmp_path: Path) -> None:
    other = copy(corpus, tmp_path)
    row = read_index(other).to_pylist()[3]
    member = row["annotations"]["members"][2]
    tar = row["annotations"]["tar"]
    data = bytearray(other.read(tar))
    data[member["offset"] + member["size"] - 1] ^= 1
    other.write(tar, bytes(data))
    with pytest.raises(CorruptMember, match=rf"member {row['sample_id']}.grid.npy of {tar} .* `wp2 verify`"):
        read_sample(other, row["annotations"])
    assert "grid.npy" in read_sample(other, row["annotations"], check=False)


def test_a_tar_that_ends_early_is_a_named_error(corpus: Store, tmp_path: Path) -> None:
    other = copy(corpus, tmp_path)
    row = read_index(other).to_pylist()[-1]
    tar = row["media"]["tar"]
    other.write(tar, other.read(tar)[:-5000])
    with pytest.raises(CorruptMember, match="cut short"):
        read_sample(other, row["media"])
    other.remove(tar)
    with pytest.raises(StoreError, match="missing"):
        read_sample(other, row["media"])


def test_an_index_that_its_inventory_does_not_name_is_refused(corpus: Store, tmp_path: Path) -> None:
    other = copy(corpus, tmp_path)
    other.write("index/g0000-p00000.parquet", other.read("index/g0000-p00001.parquet"))
    with pytest.raises(StoreError, match="not what its inventory names"):
        read_index(other)
