"""verify finds and names everything that changed after the corpus was written."""

from __future__ import annotations

import copy
import io
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards_corpus import CONFIG, PARTITION, put, samples, snapshot, write

from pipeline.shards.check import Finding
from pipeline.shards.inventory import ROOT, Inventory, file_entry, inventory_path, seal, unseal
from pipeline.shards.read import read_index
from pipeline.shards.verify import verify
from pipeline.shards.write import write_root
from pipeline.store import Store
from schemas.sample import FAMILIES, index_schema

MEDIA = [f"shards/media/{PARTITION}-{i:04d}.tar" for i in range(3)]
NOTES = [f"shards/annotations/{PARTITION}-{i:04d}.tar" for i in range(3)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Store:
    corpus = Store(str(tmp_path_factory.mktemp("verify") / "corpus"))
    write(corpus)
    return corpus


@pytest.fixture
def corpus(clean: Store, tmp_path: Path) -> Store:
    shutil.copytree(clean.url, tmp_path / "corpus")
    return Store(str(tmp_path / "corpus"))


def ranges(corpus: Store) -> dict[str, list[tuple[int, int, str]]]:
    """Data range and name of every member, by tar."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for row in read_index(corpus).to_pylist():
        for family in FAMILIES:
            for m in row[family]["members"]:
                place = (m["offset"], m["offset"] + m["size"], m["name"])
                found.setdefault(row[family]["tar"], []).append(place)
    return found


def retar(corpus: Store, path: str, change: Callable[[list[tuple[str, bytes]]], None]) -> None:
    """Take a tar apart, change the list of its members, and put it together again with plain tarfile."""
    with tarfile.open(corpus.full(path)) as tar:
        members = [(i.name, tar.extractfile(i).read()) for i in tar]
    change(members)
    with tarfile.open(corpus.full(path), "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def exchange(corpus: Store, a: str, b: str) -> None:
    first, second = corpus.read(a), corpus.read(b)
    corpus.write(a, second)
    corpus.write(b, first)


def test_a_clean_corpus_has_no_findings_and_progress_reaches_the_end(clean: Store) -> None:
    calls = []
    assert verify(clean, lambda done, total: calls.append((done, total))) == []
    assert calls[-1][0] == sum(len(d) for p, d in snapshot(clean).items() if p != ROOT)
    assert calls == sorted(calls)


@pytest.mark.parametrize("rounds", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_every_changed_byte_is_found_and_named(corpus: Store, rounds: int) -> None:
    rng = random.Random(rounds)
    files = snapshot(corpus)
    members = ranges(corpus)
    for _ in range(rounds):
        path = rng.choice(sorted(files))
        at = rng.randrange(len(files[path]))
        bad = bytearray(files[path])
        bad[at] ^= rng.randrange(1, 256)
        Path(corpus.full(path)).write_bytes(bad)
        want = next((name for a, b, name in members.get(path, []) if a <= at < b), None)
        findings = verify(corpus)
        assert {f.path for f in findings} == {path}, (path, at, findings)
        assert want is None or findings[0].member == want, (path, at, findings)
        Path(corpus.full(path)).write_bytes(files[path])
    assert verify(corpus) == []


def test_a_changed_header_and_changed_padding_name_the_member_beside_them(corpus: Store) -> None:
    start, end, name = ranges(corpus)[NOTES[1]][1]
    for at, match in ((start - 512, "header is changed"), (start - 300, "header"), (end, "between members")):
        data = bytearray(corpus.read(NOTES[1]))
        data[at] ^= 1
        good = corpus.read(NOTES[1])
        corpus.write(NOTES[1], bytes(data))
        (finding,) = verify(corpus)
        assert finding.member == name and match in finding.problem
        corpus.write(NOTES[1], good)


@pytest.mark.parametrize("path", ["clean", *MEDIA[:1], *NOTES[2:]])
def test_bytes_at_the_end_of_a_tar_are_found(corpus: Store, path: str) -> None:
    path = MEDIA[0] if path == "clean" else path
    corpus.write(path, corpus.read(path) + bytes(512))
    assert verify(corpus) == [Finding(path, "", "512 bytes follow the end mark")]


def test_every_deleted_file_is_named(corpus: Store) -> None:
    for path, data in snapshot(corpus).items():
        corpus.remove(path)
        assert Finding(path, "", "it is missing") in verify(corpus)
        corpus.write(path, data)
    assert verify(corpus) == []


@pytest.mark.parametrize(
    "path",
    ["shards/media/x.tar", f"shards/media/{PARTITION}-0003.tar", "shards/notes.txt", "index/a/b.json"]
    + ["catalogue/g0001.parquet", "statistics/x.json"],
)
def test_every_added_file_is_named(corpus: Store, path: str) -> None:
    corpus.write(path, b"more")
    (finding,) = verify(corpus)
    assert finding.path == path and "extra" in finding.problem


def test_a_partition_that_the_root_does_not_name_is_named(corpus: Store) -> None:
    put(corpus, "g0001-p00000", [], CONFIG)
    (finding,) = verify(corpus)
    assert finding.path == inventory_path("g0001-p00000") and "root does not name it" in finding.problem


def test_a_rewritten_partition_without_a_new_root_is_named(corpus: Store) -> None:
    put(corpus, PARTITION, samples()[:3], CONFIG)
    (finding,) = verify(corpus)
    assert finding.path == inventory_path(PARTITION)
    write_root(corpus)
    assert verify(corpus) == []


def test_a_deleted_member_is_named(corpus: Store) -> None:
    for path, names in {p: [n for _, _, n in r] for p, r in ranges(corpus).items()}.items():
        for at in {0, len(names) // 2, len(names) - 1}:
            good = corpus.read(path)
            retar(corpus, path, lambda members, at=at: members.pop(at))
            findings = verify(corpus)
            assert {f.path for f in findings} == {path}
            assert Finding(path, names[at], "it is missing") in findings
            assert {f.member for f in findings} <= {names[at], ""}
            corpus.write(path, good)


def test_an_added_member_is_named(corpus: Store) -> None:
    for at in (0, 5, 99):
        good = corpus.read(NOTES[0])
        retar(corpus, NOTES[0], lambda members, at=at: members.insert(at, ("stranger.json", b"{}")))
        findings = verify(corpus)
        assert {f.path for f in findings} == {NOTES[0]}
        assert "stranger.json" in {f.member for f in findings if "extra" in f.problem}
        assert {f.member for f in findings} <= {"stranger.json", ""}
        corpus.write(NOTES[0], good)


def test_a_repeated_member_is_named(corpus: Store) -> None:
    retar(corpus, NOTES[0], lambda members: members.append(members[2]))
    findings = verify(corpus)
    assert [(f.member, f.problem) for f in findings] == [
        (ranges(corpus)[NOTES[0]][2][2], "it is there 2 times")
    ]


@pytest.mark.parametrize("suffix", ["json", "poses.npy", "mp4"])
def test_exchanged_contents_of_two_members_are_both_named(corpus: Store, suffix: str) -> None:
    path = MEDIA[0] if suffix == "mp4" else NOTES[0]
    names = [n for _, _, n in ranges(corpus)[path] if n.endswith(f".{suffix}")][:2]

    def change(members: list[tuple[str, bytes]]) -> None:
        a, b = (next(i for i, m in enumerate(members) if m[0] == n) for n in names)
        members[a], members[b] = (names[0], members[b][1]), (names[1], members[a][1])

    retar(corpus, path, change)
    findings = verify(corpus)
    want = {n: f"it holds the content of {m}" for n, m in zip(names, reversed(names))}
    assert {f.member: f.problem for f in findings if f.member} == want
    assert {f.path for f in findings} == {path}


def test_members_in_another_order_are_named(corpus: Store) -> None:
    names = [n for _, _, n in ranges(corpus)[NOTES[0]]]
    retar(corpus, NOTES[0], lambda members: members.reverse())
    (finding,) = verify(corpus)
    assert finding.path == NOTES[0] and "lie elsewhere" in finding.problem and names[0] in finding.problem


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (MEDIA[0], MEDIA[1]),
        (MEDIA[0], NOTES[0]),
        (NOTES[1], NOTES[2]),
        (f"index/{PARTITION}.parquet", "index/g0000-p00001.parquet"),
        ("catalogue/g0000.parquet", "statistics/rotation-v0.json"),
        (inventory_path(PARTITION), inventory_path("g0000-p00001")),
    ],
)
def test_two_exchanged_files_are_both_named(corpus: Store, a: str, b: str) -> None:
    exchange(corpus, a, b)
    findings = verify(corpus)
    assert {f.path for f in findings} == {a, b}
    assert all("it holds the" in f.problem for f in findings)


def test_a_tar_cut_short_names_the_members_that_are_lost(corpus: Store) -> None:
    places = ranges(corpus)[NOTES[0]]
    corpus.write(NOTES[0], corpus.read(NOTES[0])[: places[4][0] + 10])
    lost = {f.member for f in verify(corpus) if f.member}
    assert lost == {name for _, _, name in places[4:]}


def test_a_file_that_is_no_tar_any_more_names_every_member(corpus: Store) -> None:
    corpus.write(MEDIA[0], bytes(300_000))
    assert {f.member for f in verify(corpus) if f.member} == {n for _, _, n in ranges(corpus)[MEDIA[0]]}


def test_a_sample_in_two_partitions_is_named(corpus: Store) -> None:
    put(corpus, "g0001-p00000", samples()[:1], CONFIG)
    write_root(corpus)
    (finding,) = verify(corpus)
    assert samples()[0].sample_id in finding.problem and "2 partitions" in finding.problem


def test_several_damages_are_all_named(corpus: Store) -> None:
    places = ranges(corpus)
    damaged = [
        (MEDIA[1], places[MEDIA[1]][0]),
        (NOTES[0], places[NOTES[0]][1]),
        (NOTES[0], places[NOTES[0]][5]),
    ]
    for path, (start, _, _) in damaged:
        data = bytearray(corpus.read(path))
        data[start] ^= 255
        corpus.write(path, bytes(data))
    corpus.remove("catalogue/g0000.parquet")
    corpus.write("shards/media/stray.tar", b"x")
    want = {(path, name) for path, (_, _, name) in damaged}
    want |= {("catalogue/g0000.parquet", ""), ("shards/media/stray.tar", "")}
    assert {(f.path, f.member) for f in verify(corpus)} == want


def test_an_index_that_lies_about_its_tars_is_named_although_every_digest_agrees(corpus: Store) -> None:
    """The digests are made again over a wrong index, as a faulty writer would."""
    rows = read_index(corpus).to_pylist()
    path = f"index/{PARTITION}.parquet"
    for change, match in (
        (lambda r: r[0].update(frames=r[0]["frames"] + 1), "the index says"),
        (lambda r: r[0]["annotations"]["members"][1].update(xxh64=1), "damaged"),
        (lambda r: r[0]["media"]["members"][0].update(offset=0), "should lie at 512"),
        (lambda r: r.reverse(), "comes after"),
    ):
        wrong = copy.deepcopy(rows)
        change(wrong)
        pq.write_table(pa.Table.from_pylist(wrong, schema=index_schema()), corpus.full(path))
        inventory = unseal(corpus.read(inventory_path(PARTITION)), Inventory, "")
        inventory = inventory.model_copy(update={"index": file_entry(corpus, path)})
        corpus.write(inventory_path(PARTITION), seal(inventory))
        write_root(corpus)
        assert any(match in f.problem for f in verify(corpus)), match
