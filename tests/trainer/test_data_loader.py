"""From a published corpus to batches: the right numbers, the same whoever reads, and named errors."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
import torch
from data_corpus import LATENTS, PRESET, actions, arrays, caption, name, npy, texts, write

from jobs import corpus_reader
from jobs.corpus_reader import Corpus, CorpusError
from pipeline.shards.read import CorruptMember
from pipeline.store import Store, StoreError
from schemas.caption import SENTENCES, SUBSETS, render
from schemas.clip import Perspective
from schemas.latents import NEGATIVE
from schemas.timeline import Span, chunk_latents, interval_of_latents
from trainer.config import Geometry
from trainer.curriculum import Stage, curriculum, select
from trainer.data.batch import Batch
from trainer.data.buffers import Buffers
from trainer.data.plan import Plan
from trainer.data.sample import FAMILIES, Members, SampleError, make_batch
from trainer.data.stream import Loader

DURATION = Fraction(4 * LATENTS - 3, 16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    store = Store(str(tmp_path_factory.mktemp("loader") / "corpus"))
    write(store, 17, events=3)
    return Corpus.open(store)


def stage(named: str, **changes: Any) -> Stage:
    kept: dict[str, Any] = {"text_drop": 0.0, "field_drop": 0.0, "batch": 4, "micro": 2} | changes
    return replace(select(curriculum("small"), named)[0], **kept)


def loader(corpus: Corpus, chosen: Stage, rank: int = 0, world: int = 1, threads: int = 2) -> Loader:
    plan = Plan(corpus.table, chosen, PRESET, 0)
    return Loader(plan, corpus.reader(chosen), chosen, PRESET, 0, rank, world, threads=threads)


def steps(of: Loader, first: int, count: int) -> list[list[Batch]]:
    stream = of.steps(first)
    out = list(islice(stream, count))
    stream.close()
    return out


def same(a: list[list[Batch]], b: list[list[Batch]]) -> bool:
    """Bit for bit, in the same micro-batches."""

    def equal(x: Batch, y: Batch) -> bool:
        held = ("positions", "samples", "history", "prompts")
        tensors = ("latents", "condition", "low", "actions", "text", "negative")
        return all(getattr(x, n) == getattr(y, n) for n in held) and all(
            torch.equal(getattr(x, n), getattr(y, n)) for n in tensors
        )

    return len(a) == len(b) and all(
        len(p) == len(q) and all(map(equal, p, q)) for p, q in zip(a, b, strict=True)
    )


def number(batch: Batch, slot: int) -> int:
    return int(batch.samples[slot], 16)


def stored(rows: np.ndarray) -> torch.Tensor:
    """[T, 16, h, w] as [16, T, h, w] float32."""
    return torch.from_numpy(rows.astype(np.float32)).transpose(0, 1)


def extended(head: np.ndarray, latents: int) -> torch.Tensor:
    rows = np.concatenate([head, np.repeat(head[-1:], max(0, latents - len(head)), 0)])[:latents]
    mask = np.zeros((latents, 4, *head.shape[2:]), np.float16)
    mask[0] = 1
    return stored(np.concatenate([mask, rows], 1))


# --- what is in a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["2a", "2b", "3"])
def test_stages_with_memory_read_from_the_first_latent_of_the_continuous_encode(
    corpus: Corpus, named: str
) -> None:
    chosen = stage(named, histories=(0, 2, 4) if named != "2a" else (4, 6))
    seen = set()
    for step in steps(loader(corpus, chosen), 0, 12):
        for batch in step:
            latents = 4 * batch.history + (chosen.target if named != "2a" else 0)
            seen.add(batch.history)
            assert batch.latents.shape == (2, 16, latents, 8, 8)
            for k in range(2):
                members = arrays(number(batch, k))
                assert torch.equal(batch.latents[k], stored(members["hr.npy"][:latents]))
                assert torch.equal(batch.condition[k], extended(members["hr_y.npy"], latents))
                low = stored(members["lr.npy"][: latents // 2])
                assert torch.equal(
                    batch.low[k], torch.cat([low, extended(members["lr_y.npy"], latents // 2)])
                )
                rows = torch.from_numpy(actions(number(batch, k))[:latents])
                assert torch.equal(batch.actions[k], rows)
    assert seen == set(chosen.histories)


def test_stage_1_reads_an_independent_encode_with_its_own_condition_and_an_idle_row(corpus: Corpus) -> None:
    (batch, _), *_ = steps(loader(corpus, stage("1")), 0, 1)
    for k in range(2):
        members = arrays(number(batch, k))
        assert torch.equal(batch.latents[k], stored(members["segments.npy"][0]))
        assert torch.equal(batch.condition[k], extended(members["segments_y.npy"][0], 32))
        assert torch.equal(batch.actions[k, 1:], torch.from_numpy(actions(number(batch, k))[1:32]))
        assert not batch.actions[k, 0].any()
    assert batch.low.shape == (2, 36, 0, 2, 2) and batch.history == 0


def test_the_idle_row_of_a_later_segment_keeps_the_perspective_and_unknown_segments_are_not_drawn(
    corpus: Corpus,
) -> None:
    rows = np.tile(np.float32([1, 2, 1, -1, 1, 1]), (LATENTS, 1))
    rows[40, 1] = np.nan  # in the last of three segments
    chosen, plan = stage("1", batch=64, micro=64), Plan(corpus.table, stage("1"), PRESET, 0)
    ramp = np.arange(3, dtype=np.float16)[:, None, None, None, None]
    parts = {
        "segments.npy": np.broadcast_to(ramp, (3, 32, 16, 8, 8)),
        "segments_y.npy": np.broadcast_to(ramp, (3, 1, 16, 8, 8)),
        "segments_at.npy": np.array([0, 8, 16], np.int32),
    }

    def read(row: int, families: tuple[str, ...]) -> Members:
        members = {family: dict(found) for family, found in corpus.read(row, families).items()}
        members["latents"] |= {suffix: npy(np.ascontiguousarray(a)) for suffix, a in parts.items()}
        members["annotations"]["actions.npy"] = npy(rows)
        return members

    draws = [d for step in range(16) for d in plan.batch(step)]
    batch = make_batch(draws, read, chosen, PRESET, 0)
    drawn = batch.latents[:, 0, 0, 0, 0]
    assert set(drawn.tolist()) == {0.0, 1.0}
    assert torch.equal(batch.condition[:, 4, 31, 0, 0], drawn)
    assert torch.equal(batch.actions[:, 0], torch.tensor([0.0, 0, 0, 0, 1, 0]).expand(64, 6))
    assert torch.equal(batch.actions[:, 1:], torch.tensor([1.0, 2, 1, -1, 1, 1]).expand(64, 31, 6))


def test_chunks_read_the_prompt_of_their_own_interval_and_whole_clips_that_of_their_middle(
    corpus: Corpus,
) -> None:
    def prompt(of: int, interval: int) -> torch.Tensor:
        note, rows = texts(of)
        said = render(caption(of), Perspective.THIRD, interval)
        return torch.from_numpy(rows[note.rows(said)].astype(np.float32))

    def reads(batch: Batch, k: int, p: int) -> torch.Tensor:
        rows = batch.text[k, p]
        return rows[: int(rows.any(dim=1).nonzero().max()) + 1]

    (batch, _), *_ = steps(loader(corpus, stage("3", histories=(6,))), 0, 1)
    want = [interval_of_latents(DURATION, chunk_latents(c)) for c in range(10)]
    assert batch.prompts == tuple(want) and set(want) == {0, 1}
    for interval in (0, 1):
        assert torch.equal(reads(batch, 1, interval), prompt(number(batch, 1), interval))
    for named, histories, middle in (("2b", (4,), Span(16, 48)), ("2a", (6,), Span(0, 24))):
        (batch, _), *_ = steps(loader(corpus, stage(named, histories=histories)), 0, 1)
        assert batch.text.shape[1] == 1 and set(batch.prompts) == {0}
        interval = interval_of_latents(DURATION, middle)
        assert torch.equal(reads(batch, 0, 0), prompt(number(batch, 0), interval))
    note, rows = texts(number(batch, 0))
    assert torch.equal(batch.negative, torch.from_numpy(rows[note.rows(NEGATIVE)].astype(np.float32)))


def test_a_tenth_of_the_texts_and_some_fields_are_dropped_by_position(corpus: Corpus) -> None:
    chosen = stage("1", batch=500, micro=500, text_drop=0.1, field_drop=0.4)
    plan = Plan(corpus.table, chosen, PRESET, 0)
    draws = plan.batch(0)
    batch = make_batch(draws, corpus.read, chosen, PRESET, 0)
    again = make_batch(draws[200:210], corpus.read, chosen, PRESET, 0)
    longest = again.text.shape[2]
    assert torch.equal(again.text, batch.text[200:210, :, :longest])  # whatever batch it lies in
    kept = []
    for k in range(len(batch)):
        note, rows = texts(number(batch, k))
        options = [render(caption(number(batch, k)), Perspective.THIRD, 0, keep) for keep in SUBSETS]
        padded = [np.zeros((batch.text.shape[2], 8), np.float32) for _ in (*options, NEGATIVE)]
        for out, said in zip(padded, (*options, NEGATIVE), strict=True):
            found = rows[note.rows(said)]
            out[: len(found)] = found
        kept.append(next(i for i, p in enumerate(padded) if np.array_equal(batch.text[k, 0].numpy(), p)))
    share = np.bincount(kept, minlength=5) / len(kept)
    assert SUBSETS[3] == SENTENCES
    assert share[4] == pytest.approx(0.1, abs=0.04)
    assert share[:3] == pytest.approx(0.9 * 0.4 / 3, abs=0.05)


# --- whoever reads ----------------------------------------------------------------------------------------


def test_a_run_that_stopped_after_step_7_goes_on_bit_for_bit_with_other_threads(corpus: Corpus) -> None:
    chosen = stage("3", text_drop=0.1, field_drop=0.2)
    unbroken = steps(loader(corpus, chosen, threads=1), 0, 20)
    resumed = steps(loader(corpus, chosen), 0, 7) + steps(loader(corpus, chosen, threads=3), 7, 13)
    assert same(resumed, unbroken)


def test_a_resume_exactly_at_the_end_of_an_epoch_begins_the_next(corpus: Corpus) -> None:
    chosen = stage("1", batch=7, micro=7)  # 14 navigation clips: an epoch is two steps
    unbroken = steps(loader(corpus, chosen), 0, 6)
    ids = [[s for b in step for s in b.samples] for step in unbroken]
    assert all(sorted(ids[k] + ids[k + 1]) == [name(n) for n in range(14)] for k in (0, 2, 4))
    assert same(steps(loader(corpus, chosen, threads=1), 4, 2), unbroken[4:])


def test_three_tars_on_four_ranks_give_every_sample_once_and_all_ranks_as_many_steps(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "corpus"))
    write(store, 16, tar_bytes=1_400_000)
    corpus = Corpus.open(store)
    assert len(corpus.places["latents"].tars) == 3
    chosen = stage("1", batch=8, micro=2)
    parts = [steps(loader(corpus, chosen, rank, 4), 0, 2) for rank in range(4)]
    assert [[len(b) for step in part for b in step] for part in parts] == [[2, 2]] * 4
    ids = [s for part in parts for step in part for b in step for s in b.samples]
    assert sorted(ids) == [name(n) for n in range(16)]


def test_an_object_store_gives_the_same_batches_by_one_range_read_a_family(
    corpus: Corpus, s3: dict[str, Any]
) -> None:
    s3fs.S3FileSystem(**s3).mkdir("loader")
    store = Store("s3://loader/corpus", s3)
    write(store, 17, events=3)
    remote = Corpus.open(store)
    chosen = stage("3")
    ranges: list[str] = []

    class Counted:
        def cat_file(self, path: str, **span: int) -> bytes:
            ranges.append(path.split("/")[-2])
            data: bytes = inside.cat_file(path, **span)
            return data

    inside, remote = remote.files, replace(remote, files=Counted())
    draws = Plan(remote.table, chosen, PRESET, 0).batch(0)
    got = make_batch(draws, remote.reader(chosen), chosen, PRESET, 0)
    assert sorted(ranges) == sorted(FAMILIES * 4)
    assert same([[got]], [[make_batch(draws, corpus.read, chosen, PRESET, 0)]])


# --- what goes wrong --------------------------------------------------------------------------------------


def test_a_damaged_member_ends_the_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_reader, "_WAITS_S", (0.0, 0.0))
    store = Store(str(tmp_path / "corpus"))
    write(store, 4)
    corpus = Corpus.open(store)
    places = corpus.places["latents"]
    path, at = Path(store.full(places.tars[0])), int(places.offset[2, places.suffixes.index("hr.npy")]) + 500
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    chosen = stage("3", events=0.0, batch=1, micro=1)
    stream = loader(corpus, chosen).steps(0)
    with pytest.raises(CorruptMember, match=f"{name(2)}.hr.npy"):
        list(islice(stream, 8))
    path.write_bytes(bytes(data[:at]))
    with pytest.raises(CorruptMember, match="cut short"):
        corpus.read(3, ("latents",))
    path.unlink()
    with pytest.raises(StoreError, match="is missing from"):
        corpus.read(0, ("latents",))


def test_a_read_that_fails_for_a_moment_is_tried_again(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_reader, "_WAITS_S", (0.0, 0.0))

    class Flaky:
        failures = 2

        def cat_file(self, path: str, start: int, end: int) -> bytes:
            if self.failures:
                self.failures -= 1
                raise ConnectionResetError("connection reset by peer")
            return Path(path).read_bytes()[start:end]

    files = Flaky()
    flaky = replace(corpus, files=files)
    monkeypatch.setattr(Store, "is_local", False)
    assert flaky.read(5, ("text",))["text"]["text.npy"] == npy(texts(5)[1])
    files.failures = 3
    with pytest.raises(StoreError, match="3 reads failed: connection reset"):
        flaky.read(5, ("text",))


def test_a_corpus_of_another_size_or_too_short_is_named(corpus: Corpus) -> None:
    chosen = stage("3", histories=(6,))
    draws = Plan(corpus.table, chosen, PRESET, 0).batch(0)
    wide = replace(PRESET, geometry=Geometry(64, 128))
    with pytest.raises(SampleError, match=f"sample {name(draws[0].row)} .* at 64x128: latents of"):
        make_batch(draws, corpus.read, chosen, wide, 0)
    far = [draws[0]._replace(history=9)]
    with pytest.raises(SampleError, match=r"its 52 latents .* latents of"):
        make_batch(far, corpus.read, chosen, PRESET, 0)
    other = replace(PRESET, model=replace(PRESET.model, text_dim=16))
    with pytest.raises(SampleError, match="embeddings of 8 numbers, the model reads 16"):
        make_batch(draws, corpus.read, chosen, other, 0)


def test_known_actions_come_from_the_index_and_longer_histories_are_not_drawn(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "corpus"))
    write(store, 6, events=2, known={1: 20, 2: 3})
    corpus = Corpus.open(store)
    assert corpus.table.actions_known.tolist() == [48, 20, 3, 48, 48, 48]
    assert corpus.table.kind.tolist() == ["navigation"] * 4 + ["event"] * 2
    chosen = stage("3", events=0.25, batch=2)
    for step in steps(loader(corpus, chosen), 0, 30):
        for batch in step:
            assert name(2) not in batch.samples and not batch.actions.isnan().any()
            assert batch.history <= 1 or name(1) not in batch.samples


def test_a_corpus_without_latents_is_refused(tmp_path: Path) -> None:
    empty = Store(str(tmp_path / "empty"))
    with pytest.raises(CorpusError, match="holds no sample"):
        Corpus.open(empty)


# --- memory -----------------------------------------------------------------------------------------------


def test_a_buffer_comes_back_when_its_last_view_is_gone_and_not_before() -> None:
    pool = Buffers()
    tensor = pool.tensor(4, 1000)
    tensor.fill_(7.0)
    address, part = tensor.data_ptr(), tensor[3, 10:20]
    del tensor
    other = pool.tensor(4, 1000)
    assert other.data_ptr() != address
    other.fill_(1.0)
    assert part.tolist() == [7.0] * 10
    view = memoryview(pool.bytes(100).data)[3:5]
    view[0] = 9
    pool.bytes(100)[:] = 0
    assert view[0] == 9
    del part
    assert pool.tensor(4, 1000).data_ptr() == address


def test_batches_that_are_kept_keep_their_content(corpus: Corpus) -> None:
    chosen = stage("2b", histories=(0, 2))
    kept = steps(loader(corpus, chosen), 0, 15)
    assert same(kept, [steps(loader(corpus, chosen, threads=1), k, 1)[0] for k in range(15)])
