"""Checks of a tar against the index rows of its samples, used before a tar is published and by verify.

Source: DESIGN rule 2; spec/faults.md S1, S2, S11, V10.
"""

from __future__ import annotations

import hashlib
import itertools
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

from pipeline.shards.content import CHECKS
from pipeline.shards.inventory import FileEntry
from pipeline.shards.tar import CHUNK, END, Member, header, padding
from schemas.clip import ID_PATTERN
from schemas.sample import FAMILIES, OPTIONAL


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the file, the member where it lies in one (else ""), and what it is."""

    path: str
    member: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}{f' [{self.member}]' if self.member else ''}: {self.problem}"


class _Reader:
    """A file read once, front to back, hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self._file = file
        self._sha256 = hashlib.sha256()

    def chunks(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, or fewer at the end of the file."""
        while size > 0 and (chunk := self._file.read(min(CHUNK, size))):
            self._sha256.update(chunk)
            self.size += len(chunk)
            size -= len(chunk)
            yield chunk

    def read(self, size: int) -> bytes:
        return b"".join(self.chunks(size))

    def entry(self, path: str) -> FileEntry:
        """Size and digest of what was read, after reading whatever is left."""
        for _ in self.chunks(1 << 62):
            pass
        return FileEntry(path=path, bytes=self.size, sha256=self._sha256.hexdigest())


def check_tar(
    file: BinaryIO, path: str, family: str, rows: Sequence[Mapping[str, Any]]
) -> tuple[FileEntry, list[Finding]]:
    """Read a tar once and compare every byte of it with what the index rows of its samples say.

    rows: index rows as dicts, in tar order; `check_rows` holds for them.
    Returns the size and sha256 seen, and the findings: a member whose header, data or content is wrong, bytes
    between members, bytes at the end. Memory: one chunk, or one sample of a family with a form of its own.
    """
    check = CHECKS.get(family)
    reader = _Reader(file)
    findings: list[Finding] = []
    holders = {m["xxh64"]: m["name"] for row in rows for m in row[family]["members"]}
    for row in rows:
        whole: dict[str, bytes] = {}
        for member, suffix in zip(row[family]["members"], FAMILIES[family], strict=True):
            problem, data = _check_member(reader, member, holders, keep=check is not None)
            if problem:
                findings.append(Finding(path, member["name"], problem))
            else:
                whole[suffix] = data
        if check is not None and set(whole) == set(FAMILIES[family]):
            findings += [
                Finding(path, f"{row['sample_id']}.{suffix}", problem)
                for suffix, problem in check(row, whole)
            ]
    if reader.read(len(END)) != END:
        findings.append(Finding(path, "", "the end mark after the last member is missing or changed"))
    end = reader.size
    entry = reader.entry(path)
    if entry.bytes != end:
        findings.append(Finding(path, "", f"{entry.bytes - end} bytes follow the end mark"))
    return entry, findings


def _check_member(
    reader: _Reader, member: Member, holders: Mapping[int, str], keep: bool
) -> tuple[str, bytes]:
    """What is wrong with the next member ("" when nothing), and its data if it is to be kept."""
    want = header(member["name"], member["size"])
    head = reader.read(len(want))
    checksum, size, parts = xxhash.xxh64(), 0, []
    for chunk in reader.chunks(member["size"]):
        checksum.update(chunk)
        size += len(chunk)
        if keep:
            parts.append(chunk)
    gap = reader.read(padding(member["size"]))
    if size < member["size"]:
        return "the tar ends before it is complete", b""
    if checksum.intdigest() != member["xxh64"]:
        return _damage(checksum.intdigest(), holders), b""
    if head != want:
        return "its tar header is changed", b""
    if gap != bytes(padding(member["size"])):
        return "the bytes between members, after it, are changed", b""
    return "", b"".join(parts)


def _damage(checksum: int, holders: Mapping[int, str]) -> str:
    """Problem of a member whose checksum is not its own: another's content, or damage."""
    other = holders.get(checksum)
    return f"it holds the content of {other}" if other else "it is damaged (its checksum differs)"


def diagnose(file: BinaryIO, path: str, members: Sequence[Member], found: list[Finding]) -> list[Finding]:
    """Sharpen what `check_tar` found in a tar, which may have been taken apart and put together again.

    Walks the tar's own headers, over damaged ones too, and compares by name: names members that are missing,
    extra or hold another's content. What was found about a member that lies where the index says is kept;
    members that are whole but lie elsewhere are counted in one finding.
    """
    holders = {m["xxh64"]: m["name"] for m in members}
    actual = walk(file)
    kept: list[Finding] = []
    structure: list[Finding] = []
    moved: list[str] = []
    for member in members:
        own = [f for f in found if f.member == member["name"]]
        places = actual.get(member["name"], [])
        info = next((i for i in places if i.offset_data == member["offset"]), places[0] if places else None)
        if info is None:  # no header has its name: that header is damaged, or the member is gone
            if _checksum(file, member["offset"], member["size"]) == member["xxh64"]:
                kept += own
            else:
                structure.append(Finding(path, member["name"], "it is missing"))
        elif (info.offset_data, info.size) == (member["offset"], member["size"]):
            kept += own
        elif (checksum := _checksum(file, info.offset_data, info.size)) == member["xxh64"]:
            moved.append(member["name"])
        else:
            structure.append(Finding(path, member["name"], _damage(checksum, holders)))
    names = {m["name"] for m in members}
    for name, places in actual.items():
        if name not in names:
            structure.append(Finding(path, name, "it is extra: the index does not name it"))
        elif len(places) > 1:
            structure.append(Finding(path, name, f"it is there {len(places)} times"))
    if moved:
        some = ", ".join(moved[:3])
        structure.append(Finding(path, "", f"{len(moved)} members lie elsewhere than the index says: {some}"))
    return kept + (structure or [f for f in found if not f.member])


def walk(file: BinaryIO) -> dict[str, list[tarfile.TarInfo]]:
    """Members of a tar by name, from the headers that can be read, over damaged ones too."""
    found: dict[str, list[tarfile.TarInfo]] = {}
    file.seek(0)
    try:
        # ignore_zeros: go on behind a header that cannot be read instead of ending quietly there
        with tarfile.open(fileobj=file, mode="r:", ignore_zeros=True) as tar:
            for info in tar:
                found.setdefault(info.name, []).append(info)
    except tarfile.TarError:  # cut short: what was found so far is what is there
        return found
    return found


def _checksum(file: BinaryIO, offset: int, size: int) -> int:
    checksum = xxhash.xxh64()
    file.seek(offset)
    while size > 0 and (chunk := file.read(min(CHUNK, size))):
        checksum.update(chunk)
        size -= len(chunk)
    return checksum.intdigest()


def check_rows(rows: Sequence[Mapping[str, Any]], partition_tars: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with the rows of a partition in themselves, before any tar is read.

    partition_tars: paths of the partition's tars by family, in order. Ids legal, sorted, each once; members
    named and ordered as schemas.sample.FAMILIES says; places that fill each tar from its first byte; an
    optional family has places in every row, or in none and no tar.
    """
    problems = []
    ids = [row["sample_id"] for row in rows]
    problems += [f"sample id {i!r} is not legal" for i in ids if not ID_PATTERN.fullmatch(i)]
    problems += [f"sample {b} comes after {a}" for a, b in itertools.pairwise(ids) if b <= a]
    for family, suffixes in FAMILIES.items():
        tars: list[str] = []
        at = 0
        without = [row["sample_id"] for row in rows if row[family] is None]
        if without and (family not in OPTIONAL or len(without) < len(rows)):
            problems.append(f"sample {without[0]} has no place in {family}, where others have one")
            continue
        for row in rows if not without else ():
            place = row[family]
            if not tars or place["tar"] != tars[-1]:
                tars.append(place["tar"])
                at = 0
            start = at
            names = [m["name"] for m in place["members"]]
            if names != [f"{row['sample_id']}.{s}" for s in suffixes]:
                problems.append(f"sample {row['sample_id']} has {family} members {names}")
                break
            for member in place["members"]:
                at += len(header(member["name"], member["size"]))
                if member["offset"] != at:
                    problems.append(f"member {member['name']} should lie at {at}, not {member['offset']}")
                at += member["size"] + padding(member["size"])
            if (place["offset"], place["size"]) != (start, at - start):
                problems.append(f"the {family} place of sample {row['sample_id']} does not cover its members")
        if tars != list(partition_tars[family]):
            problems.append(
                f"rows lie in the {family} tars {tars}, the inventory has {partition_tars[family]}"
            )
    return problems
