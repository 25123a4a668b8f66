"""The ledger: later receipts win, seals lose nothing, and a kill between two steps changes no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.ledger import Ledger
from pipeline.stage import Artefact, Receipt
from pipeline.status import corpus_status
from pipeline.store import Store
from schemas.quality import Status


def receipt(clip: str, stage: str = "ingest", status: Status = Status.OK, content: str = "c") -> Receipt:
    reasons = () if status is Status.OK else ("too_short: 3 frames",)
    outputs = (Artefact(name="a.parquet", path=f"work/{clip}", bytes=3, sha256="0" * 64),)
    return Receipt(
        clip_id=clip, stage=stage, config="k", inputs="i", status=status, reasons=reasons, outputs=outputs,
        facts={"frames": 3, "fps": 29.97, "why": "", "ok": True}, content=content, attempts=2, seconds=0.5,
    )  # fmt: skip


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(Store(str(tmp_path)))


def test_receipts_come_back_as_they_were_appended(ledger: Ledger) -> None:
    made = [receipt("a"), receipt("b", status=Status.REJECTED)]
    ledger.append("g0000-p00000", made)
    ledger.flush()
    again = Ledger(ledger.corpus).load("g0000-p00000")
    assert [again["a"]["ingest"], again["b"]["ingest"]] == made


def test_a_later_receipt_overrules_an_earlier_one_before_and_after_sealing(ledger: Ledger) -> None:
    for content in ("first", "second"):
        ledger.append("p", [receipt("a", content=content)])
        ledger.flush()
    assert Ledger(ledger.corpus).load("p")["a"]["ingest"].content == "second"
    ledger.seal("p", ledger.load("p"), None)
    ledger.append("p", [receipt("a", content="third")])
    ledger.flush()
    assert Ledger(ledger.corpus).load("p")["a"]["ingest"].content == "third"


def test_sealing_leaves_one_file_and_keeps_every_receipt(ledger: Ledger) -> None:
    for i in range(5):
        ledger.append("p", [receipt(f"clip{i}"), receipt(f"clip{i}", "gates")])
        ledger.flush()
    before = ledger.load("p")
    ledger.seal("p", before, "mark")
    assert len(ledger.corpus.list("ledger/p")) == 1
    assert Ledger(ledger.corpus).load("p") == before


def test_a_kill_between_sealing_and_cleaning_up_changes_nothing(ledger: Ledger) -> None:
    """The merged file is written first: what it replaces may still lie there, and is overruled by number."""
    ledger.append("p", [receipt("a", content="old")])
    ledger.flush()
    segment = ledger.corpus.list("ledger/p")[0].path
    data = ledger.corpus.read(segment)
    ledger.append("p", [receipt("a", content="new")])
    ledger.seal("p", ledger.load("p"), "mark")
    ledger.corpus.write(segment, data)
    again = Ledger(ledger.corpus)
    assert again.load("p")["a"]["ingest"].content == "new"
    assert again.files()["p"].mark == "mark"


def test_a_completion_mark_ends_with_the_next_receipt(ledger: Ledger) -> None:
    ledger.append("p", [receipt("a")])
    ledger.seal("p", ledger.load("p"), "mark")
    assert ledger.files()["p"].mark == "mark"
    ledger.append("p", [receipt("a", "gates")])
    ledger.flush()
    assert ledger.files()["p"].mark is None


def test_status_counts_sealed_and_open_partitions_alike(ledger: Ledger) -> None:
    ledger.append("g0000-p00000", [receipt("a"), receipt("b", status=Status.REJECTED)])
    ledger.seal("g0000-p00000", ledger.load("g0000-p00000"), "mark")
    ledger.append("g0000-p00001", [receipt("c"), receipt("d", status=Status.FAILED)])
    ledger.flush()
    ledger.append("g0000-p00001", [receipt("d")])  # tried again, and it went
    ledger.flush()
    found = corpus_status(ledger.corpus)
    assert found.stages == {("ingest", Status.OK): 3, ("ingest", Status.REJECTED): 1}
    assert found.reasons == {("ingest", Status.REJECTED, "too_short"): 1}
    assert found.marked == 1


def test_half_a_segment_is_never_read(ledger: Ledger) -> None:
    """A writer killed while it wrote leaves a temporary, which no listing shows."""
    ledger.append("p", [receipt("a")])
    ledger.flush()
    temporary = ledger.corpus.scratch("ledger/p/segment-00000002.parquet")
    temporary.write_bytes(b"PAR1 half")
    assert set(Ledger(ledger.corpus).load("p")) == {"a"}
    assert ledger.corpus.sweep() == 1
