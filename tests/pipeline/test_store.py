"""Files of a store are complete or absent, and stay inside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.store import Store, StoreError


def test_a_write_that_dies_leaves_no_file_at_the_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(RuntimeError), store._temporary("a/b.bin") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert store.list() == []
    assert not store.exists("a/b.bin")


def test_a_rewrite_is_the_old_content_or_the_new(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("a.bin", b"old")
    with store.open("a.bin") as reader:
        store.write("a.bin", b"newer")
        assert reader.read() == b"old"
    assert store.read("a.bin") == b"newer"


def test_a_short_file_is_an_error_not_a_short_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("a.bin", b"12345")
    assert store.read("a.bin", 1, 3) == b"234"
    with pytest.raises(StoreError, match="ends 2 bytes early"):
        store.read("a.bin", 3, 4)


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc/passwd"])
def test_no_path_leaves_the_store(tmp_path: Path, path: str) -> None:
    with pytest.raises(StoreError, match="leaves the store"):
        Store(str(tmp_path)).full(path)


def test_a_listing_shows_files_in_order_and_no_temporaries(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name in ("b/2", "a", "b/1"):
        store.write(name, name.encode())
    store.scratch("c").write_bytes(b"half")
    assert [s.path for s in store.list()] == ["a", "b/1", "b/2"]
    assert [s.path for s in store.list("b")] == ["b/1", "b/2"]
    assert store.list("nothing") == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"x\.bin is missing"):
        Store(str(tmp_path)).read("x.bin")
