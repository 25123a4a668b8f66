"""Latents and text of real clips: what is stored shows the clip's pictures, and the same clip gives the same.

Source: DESIGN 2 (Latents, Text); spec/worldplay2.md a.2, a.3, c.2, n.1, n.2.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from pipeline.frames import frame_pass
from pipeline.geometry import Cover, GeometryError
from pipeline.ingest import Ingest, IngestConfig
from pipeline.latents.fit import fit_codec
from pipeline.latents.members import members
from pipeline.latents.stage import CODEC, Latents, LatentsConfig
from pipeline.latents.text import Text, TextConfig
from pipeline.media import read_frames
from pipeline.picture import Picture
from pipeline.shards.content import check_latents, check_text
from pipeline.stage import Artefact, Receipt, Unit, is_fresh, run_unit
from pipeline.statistics import freeze
from pipeline.store import Store, StoreError, sha256_file
from schemas import timeline
from schemas.caption import SUBSETS, EventCategory, IntervalEvent, StructuredCaption, render, write_caption
from schemas.clip import Clip, Perspective
from schemas.latents import (
    ARRAYS,
    NEGATIVE,
    FittedCodec,
    LatentsNote,
    TextNote,
    prompt_key,
    segment_entries,
    segment_starts,
)
from schemas.quality import Status
from trainer.codec import lowres
from trainer.codec.base import to_pixels, to_rgb
from trainer.codec.condition import extend
from trainer.codec.linear import Linear
from trainer.codec.weights import CodecError

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
from tiny_codecs import short_clip, tiny_vae, write_tiny_umt5

SIZE = {"height": 64, "width": 128}
LINEAR = LatentsConfig.model_validate({"codec": {"kind": "linear"}, **SIZE})
MINILM = TextConfig(kind="minilm")
DONE = {"config": "", "inputs": "", "status": Status.OK, "content": "a"}


def ingested(path: Path, folder: Path) -> Unit:
    clip = Clip(
        clip_id="c0",
        recording_id="c0",
        game="doom",
        source_path=path.name,
        bytes=path.stat().st_size,
        sha256=sha256_file(path),
        perspective=Perspective.THIRD,
    )
    unit = Unit(clip, "g0000-p00000", Store(str(path.parent)), Store(str(folder / "corpus")))
    ingest = run_unit(Ingest(IngestConfig()), unit)
    assert ingest.status is Status.OK, ingest.reasons
    observe = Receipt(clip_id="c0", stage="observe", **DONE)
    return replace(unit, receipts={"ingest": ingest, "observe": observe})


@pytest.fixture(scope="module")
def unit(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Unit:
    """nav05 of the pack: 715 frames at 35 fps, 317 grid entries, 80 latents, 2 segments."""
    return ingested(footage / "nav05_keys_deathmatch.mp4", tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="module")
def codec(unit: Unit) -> FittedCodec:
    assert fit_codec([], LINEAR) is None
    found = fit_codec([unit], LINEAR)
    assert found is not None and found.clips == ("c0",) and found.groups == 12
    return found


@pytest.fixture(scope="module")
def made(unit: Unit, codec: FittedCodec) -> tuple[Receipt, dict[str, np.ndarray]]:
    receipt = run_unit(Latents(LINEAR, codec), unit)
    assert receipt.status is Status.OK, receipt.reasons
    with ExitStack() as held:
        done = replace(unit, receipts={**unit.receipts, "latents": receipt})
        files = members(done, "latents", held)
        assert {n for n in files if n.endswith(".npy")} == {n for n in ARRAYS if n != "text.npy"}
    return receipt, arrays(unit, receipt)


def arrays(unit: Unit, receipt: Receipt) -> dict[str, np.ndarray]:
    return {
        a.name.removesuffix(".npy"): np.load(io.BytesIO(unit.corpus.read(a.path)))
        for a in receipt.outputs
        if a.name.endswith(".npy")
    }


@pytest.fixture(scope="module")
def shown(unit: Unit, footage: Path) -> torch.Tensor:
    """The pictures that the grid names, by a decode of its own: float [1, 3, 317, 64, 128]."""
    # Frame k of this clip is at k/35 s; the grid takes the nearest to g/16 s, of two the earlier.
    wanted = [
        min(range(715), key=lambda k, g=g: (abs(Fraction(k, 35) - Fraction(g, 16)), k)) for g in range(317)
    ]
    cover = Cover.of(360, 640, 64, 128)
    with av.open(str(footage / "nav05_keys_deathmatch.mp4")) as container:
        pictures = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    return to_pixels(torch.from_numpy(np.stack([cover.apply(pictures[k]) for k in wanted])))


def as_latents(rows: np.ndarray) -> torch.Tensor:
    """float16 [T, 16, h, w] -> float32 [1, 16, T, h, w]."""
    return torch.from_numpy(rows.astype(np.float32)).transpose(0, 1).unsqueeze(0)


# --- latents ----------------------------------------------------------------------------------------------


def test_decoded_latents_show_the_pictures_of_the_grid(
    made: tuple[Receipt, dict[str, np.ndarray]], codec: FittedCodec, shown: torch.Tensor
) -> None:
    hr = made[1]["hr"]
    assert hr.shape == (80, 16, 8, 16) and hr.dtype == np.float16
    seen = Linear(codec).decode(as_latents(hr))[0]
    here = float((to_rgb(seen).float() - to_rgb(shown).float()).square().mean())
    one_late = float((to_rgb(seen)[:-1].float() - to_rgb(shown)[1:].float()).square().mean())
    assert 10 * np.log10(255**2 / here) > 26  # 27.3 dB
    assert one_late > 2 * here  # 3.1 times
    expected = Linear(codec).encode(shown)[0]
    torch.testing.assert_close(as_latents(hr), expected, rtol=2e-3, atol=2e-3)


def test_low_resolution_latents_are_those_that_a_rollout_builds(
    made: tuple[Receipt, dict[str, np.ndarray]], codec: FittedCodec, shown: torch.Tensor
) -> None:
    found, cache = [], None
    for chunk in range(20):
        start = max(0, 16 * chunk - 3)
        latents, cache = lowres.encode_chunk(Linear(codec), shown[:, :, start : 16 * chunk + 13], cache)
        found.append(latents)
    lr = made[1]["lr"]
    assert lr.shape == (40, 16, 2, 4)
    torch.testing.assert_close(as_latents(lr), torch.cat(found, 2), rtol=2e-3, atol=2e-3)


def test_segments_are_encoded_by_themselves(
    made: tuple[Receipt, dict[str, np.ndarray]], codec: FittedCodec, shown: torch.Tensor
) -> None:
    held = made[1]
    assert held["segments_at"].tolist() == [0, 48] and held["segments"].shape == (2, 32, 16, 8, 16)
    for at, segment, y in zip(held["segments_at"], held["segments"], held["segments_y"], strict=True):
        entries = segment_entries(int(at))
        expected, _ = Linear(codec).encode(shown[:, :, entries.start : entries.stop])
        torch.testing.assert_close(as_latents(segment), expected, rtol=2e-3, atol=2e-3)
        assert np.array_equal(y[0], segment[0])
    assert not np.allclose(held["segments"][1, 0], held["hr"][48], atol=0.1)  # a latent 0 of its own


def test_the_image_condition_is_stored_up_to_its_fixed_point(
    made: tuple[Receipt, dict[str, np.ndarray]], codec: FittedCodec, shown: torch.Tensor
) -> None:
    held = made[1]
    clip = torch.cat([shown[:, :, :1], torch.zeros(1, 3, 12, 64, 128)], 2)
    expected, _ = Linear(codec).encode(clip)
    torch.testing.assert_close(extend(as_latents(held["hr_y"]), 4), expected, rtol=2e-3, atol=2e-3)
    assert np.array_equal(held["hr_y"][0], held["hr"][0]) and len(held["hr_y"]) == 2
    small, _ = Linear(codec).encode(lowres.shrink(clip))
    torch.testing.assert_close(extend(as_latents(held["lr_y"]), 4), small, rtol=2e-3, atol=2e-3)


def test_the_same_clip_gives_the_same_bytes_and_never_more_than_a_chunk_at_once(
    made: tuple[Receipt, dict[str, np.ndarray]],
    unit: Unit,
    codec: FittedCodec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 0
    encode = Linear.encode

    def watched(self: Linear, pixels: torch.Tensor, cache: tuple[object, ...] | None = None) -> object:
        nonlocal most
        most = max(most, pixels.shape[2])
        return encode(self, pixels, cache)

    monkeypatch.setattr(Linear, "encode", watched)
    again = run_unit(Latents(LINEAR, codec), unit)
    assert again.outputs == made[0].outputs and again.content == made[0].content
    assert most == 16


def test_the_note_maps_the_source_onto_what_was_encoded(
    made: tuple[Receipt, dict[str, np.ndarray]], unit: Unit
) -> None:
    note = LatentsNote.model_validate_json(unit.corpus.read(made[0].output("latents.json").path))
    assert (note.latents, note.segments, note.height, note.width) == (80, 2, 64, 128)
    assert (note.scaled_height, note.scaled_width, note.top, note.left) == (72, 128, 4, 0)


ROW = {"latent_frames": 80, "height": 360, "width": 640}


def test_members_that_are_not_what_they_should_be_are_named(
    made: tuple[Receipt, dict[str, np.ndarray]], unit: Unit
) -> None:
    with ExitStack() as held:
        done = replace(unit, receipts={**unit.receipts, "latents": made[0]})
        good = {name: path.read_bytes() for name, path in members(done, "latents", held).items()}
    assert check_latents(ROW, good) == []
    arrays = made[1]
    nan = arrays["hr"].copy()
    nan[40, 3, 2, 1] = np.nan
    for suffix, data, says in (
        ("hr.npy", npy(nan), "not finite"),
        ("hr.npy", npy(arrays["hr"][:-4]), "must be float16 .80, 16, 8, 16."),
        ("lr.npy", npy(arrays["lr"].astype(np.float32)), "must be float16"),
        ("hr_y.npy", npy(arrays["hr_y"][:0]), "must be float16"),
        ("segments.npy", npy(arrays["segments"][:1]), "must be float16 .2, 32"),
        ("segments_at.npy", npy(np.array([0, 47], np.int32)), r"begin at \[0, 47\], not \[0, 48\]"),
        ("latents.json", good["latents.json"].replace(b'"top":4', b'"top":3'), "its crop is"),
        ("latents.json", good["latents.json"].replace(b'"latents":80', b'"latents":76'), "the index says 80"),
        ("latents.json", good["latents.json"].replace(b'"width":128', b'"width":100'), "multiples of 64"),
        ("latents.json", good["latents.json"].replace(b'"top":4', b'"top":null'), "strict LatentsNote"),
    ):
        assert data != good[suffix]
        found = check_latents(ROW, {**good, suffix: data})
        assert any(name == suffix and re.search(says, problem) for name, problem in found), (says, found)
    assert ("latents.json", "source_width is 640, the index says 854") in check_latents(
        ROW | {"width": 854}, good
    )


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_a_file_that_is_not_the_one_that_was_made_reaches_no_sample(
    made: tuple[Receipt, dict[str, np.ndarray]], unit: Unit
) -> None:
    done = replace(unit, receipts={**unit.receipts, "latents": made[0]})
    path = made[0].output("lr.npy").path
    data = unit.corpus.read(path)
    for bad, says in ((data[:-1], "cut short"), (data[:-1] + bytes([data[-1] ^ 1]), "is damaged")):
        unit.corpus.write(path, bad)
        with ExitStack() as held, pytest.raises(StoreError, match=f"{says}: run .* --from latents"):
            members(done, "latents", held)
    unit.corpus.write(path, data)


def test_a_new_version_of_the_codec_makes_latents_anew(
    made: tuple[Receipt, dict[str, np.ndarray]], unit: Unit, codec: FittedCodec
) -> None:
    receipts = {**unit.receipts, "latents": made[0]}
    assert is_fresh(Latents(LINEAR, codec), unit.clip, receipts)
    other = codec.model_copy(update={"clips": ("another",)})
    assert not is_fresh(Latents(LINEAR, other), unit.clip, receipts)
    larger = run_unit(Latents(LINEAR.model_copy(update={"height": 128}), codec), unit)
    assert larger.status is Status.FAILED and "fitted at 64x128, not at 128x128" in larger.reasons[0]
    unfitted = run_unit(Latents(LINEAR, None), unit)
    assert unfitted.status is Status.FAILED and "has not been fitted" in unfitted.reasons[0]


def test_a_worker_reads_the_codec_from_the_corpus_and_takes_no_other(
    made: tuple[Receipt, dict[str, np.ndarray]], unit: Unit, codec: FittedCodec
) -> None:
    """The record is 88 KB: more than a stage may weigh on its way to a worker."""
    sent = pickle.dumps(Latents(LINEAR, codec))
    assert len(sent) < 4096
    freeze(unit.corpus, CODEC, codec)
    assert run_unit(pickle.loads(sent), unit).outputs == made[0].outputs
    freeze(unit.corpus, CODEC, codec.model_copy(update={"clips": ("another",)}))
    other = run_unit(pickle.loads(sent), unit)
    assert other.status is Status.FAILED and "that of the run linear-" in other.reasons[0]


def test_wrong_settings_are_refused_by_name() -> None:
    for wrong, message in (
        ({"height": 100}, "multiples of 64, not 100x832"),
        ({"codec": {"kind": "wan"}}, "kind wan needs a path"),
        ({"codec": {"path": "x"}}, "none has none .kind is none"),
    ):
        with pytest.raises(ValidationError, match=message):
            LatentsConfig.model_validate(wrong)
    with pytest.raises(ValidationError, match="kind umt5 needs a path"):
        TextConfig.model_validate({"kind": "umt5"})
    with pytest.raises(ValidationError, match="kind none has no path"):
        TextConfig.model_validate({"path": "x"})


# --- geometry and segments --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(360, 640), (480, 640), (720, 406), (1080, 2560), (60, 80)])
def test_a_cover_keeps_the_middle_and_intrinsics_follow(size: tuple[int, int]) -> None:
    cover = Cover.of(*size, 64, 128)
    assert cover.scaled_height == 64 or cover.scaled_width == 128
    y, x = np.mgrid[: size[0], : size[1]].astype(np.float32)
    ramp = np.stack([x * 255 / size[1], y * 255 / size[0], 0 * x], -1).round().astype(np.uint8)
    out = cover.apply(ramp)
    assert out.shape == (64, 128, 3)
    fx, fy, cx, cy = cover.intrinsics(300.0, 310.0, size[1] / 2 - 0.5, size[0] / 2 - 0.5)
    # The optical axis shows the same point: the middle of the ramp lies under it.
    assert out[round(cy), round(cx), :2].astype(float) == pytest.approx([127, 127], abs=3.5)
    assert fx / fy == pytest.approx(300 / 310, rel=0.01)
    # A pixel to the right of it moves by the ratio of focal lengths.
    step = float(out[32, 100, 0]) - float(out[32, 28, 0])
    assert step == pytest.approx(72 * 300 / fx * 255 / size[1], abs=3)


def test_other_sizes_and_pictures_are_refused() -> None:
    with pytest.raises(GeometryError, match="multiples of 64, not 64x100"):
        Cover.of(360, 640, 64, 100)
    with pytest.raises(GeometryError, match="for a cover of"):
        Cover.of(360, 640, 64, 128).apply(np.zeros((64, 128, 3), np.uint8))


@pytest.mark.parametrize("latents", [4, 28, 32, 36, 64, 80, 240, 320])
def test_segments_lie_inside_the_clip_and_apart(latents: int) -> None:
    starts = segment_starts(latents, 4)
    assert len(starts) == min(4, latents // 32)
    spans = [segment_entries(a) for a in starts]
    assert all(len(s) == 125 and s.stop <= 4 * latents - 3 for s in spans)
    assert all(a.stop <= b.start for a, b in pairwise(spans))
    assert not starts or (starts[0] == 0 and (len(starts) == 1 or starts[-1] == latents - 32))


# --- text -------------------------------------------------------------------------------------------------

CAPTION = StructuredCaption(
    scene="a corridor with a door",
    character="a man in blue",
    ui="a status bar",
    events=(
        IntervalEvent(),
        IntervalEvent(category=EventCategory.OBJECT_CHANGE, text="the door opens"),
        IntervalEvent(),
    ),
    provenance="test",
)


def captioned(unit: Unit, caption: StructuredCaption) -> Unit:
    data = write_caption(caption)
    unit.corpus.write("work/caption/caption.json", data)
    held = Artefact(name="caption.json", path="work/caption/caption.json", bytes=len(data), sha256="0" * 64)
    receipt = Receipt(clip_id="c0", stage="caption", outputs=(held,), **DONE)
    return replace(unit, receipts={**unit.receipts, "caption": receipt})


def written(unit: Unit, receipt: Receipt) -> tuple[TextNote, np.ndarray]:
    assert receipt.status is Status.OK, receipt.reasons
    note = TextNote.model_validate_json(unit.corpus.read(receipt.output("text.json").path))
    return note, np.load(io.BytesIO(unit.corpus.read(receipt.output("text.npy").path)))


def test_every_prompt_that_training_can_draw_has_its_embeddings(unit: Unit) -> None:
    done = captioned(unit, CAPTION)
    note, rows = written(done, run_unit(Text(MINILM), done))
    drawn = {render(CAPTION, Perspective.THIRD, i, keep) for keep in SUBSETS for i in range(3)}
    assert set(note.prompts) == drawn | {"", NEGATIVE} and len(note.prompts) == 6
    assert rows.dtype == np.float16 and rows.shape == (sum(note.tokens), 384) and note.width == 384
    assert note.negative == prompt_key(NEGATIVE) and not any(note.cut)
    from trainer.codec import text

    encoder = text.load("minilm", None)
    for prompt in drawn | {""}:
        alone = encoder.encode(prompt).tokens
        assert np.array_equal(rows[note.rows(prompt)], alone.numpy().astype(np.float16))
    with pytest.raises(KeyError, match="no embeddings of the prompt"):
        note.rows("another prompt")
    # A real encoder: what means the same lies nearer than what does not.
    door, opened, cat = (
        torch.nn.functional.normalize(encoder.encode(p).tokens.mean(0), dim=0)
        for p in ("the door opens", "a gate is opening", "a cat sleeps on grass")
    )
    assert float(door @ opened) > float(door @ cat) + 0.3


def test_text_that_is_not_what_it_should_be_is_named(unit: Unit) -> None:
    done = captioned(unit, CAPTION)
    note, rows = written(done, run_unit(Text(MINILM), done))
    good = {"text.json": note.model_dump_json().encode(), "text.npy": npy(rows)}
    assert check_text({}, good) == []
    keys = (*note.keys[1:], "f" * 16)
    for wrong, says in (
        ({"text.npy": npy(rows[:-1])}, "must be float16"),
        ({"text.npy": npy(np.full_like(rows, np.inf))}, "not finite"),
        ({"text.json": changed(note, keys=keys, negative=keys[0])}, "a key is not that of its prompt"),
        ({"text.json": changed(note, starts=note.starts[::-1])}, "one behind the other"),
        ({"text.json": changed(note, tokens=(0, *note.tokens[1:]))}, "1 to 512 tokens"),
        ({"text.json": changed(note, prompts=tuple(p or "x" for p in note.prompts))}, "empty prompt"),
        ({"text.json": changed(note, keys=note.keys[::-1])}, "strict TextNote .*keys are sorted"),
    ):
        found = check_text({}, good | wrong)
        assert any(re.search(says, problem) for _, problem in found), (says, found)


def changed(note: TextNote, **values: object) -> bytes:
    return note.model_copy(update=values).model_dump_json().encode()


def test_a_prompt_longer_than_the_encoder_is_cut_and_said_so(unit: Unit) -> None:
    long = CAPTION.model_copy(update={"scene": "wall " * 600, "events": (IntervalEvent(),)})
    done = captioned(unit, long)
    receipt = run_unit(Text(MINILM), done)
    note, _ = written(done, receipt)
    assert receipt.facts["cut_prompts"] == sum(note.cut) == 2 and max(note.tokens) == 512


# --- weights as a user gives them -------------------------------------------------------------------------


def test_wan_and_umt5_from_disk_end_to_end(footage: Path, tmp_path: Path) -> None:
    vae = tiny_vae()
    vae.save_pretrained(tmp_path / "wan" / "vae")
    write_tiny_umt5(tmp_path / "umt5")
    unit = captioned(ingested(short_clip(footage, tmp_path), tmp_path), CAPTION)
    weights = {"kind": "wan", "path": str(tmp_path / "wan")}
    config = LatentsConfig.model_validate({"height": 64, "width": 64, "codec": weights})
    stage = Latents(config, None)
    receipt = run_unit(stage, unit)
    assert receipt.status is Status.OK, receipt.reasons
    held = arrays(unit, receipt)
    assert held["hr"].shape == (4, 16, 8, 8) and held["lr"].shape == (2, 16, 2, 2)
    assert held["segments"].shape == (0, 32, 16, 8, 8) and held["segments_at"].shape == (0,)

    # The same pictures through diffusers itself.
    table = read_frames(unit)
    grid = timeline.grid(table.pts, table.time_base).frames
    taken: list[np.ndarray] = []

    class Take:
        def see(self, index: int, picture: Picture) -> None:
            taken.append(Cover.of(360, 640, 64, 64).apply(picture.rgb))

    frame_pass(tmp_path / "short.mp4", [Take()])
    pixels = to_pixels(torch.from_numpy(np.stack([taken[k] for k in grid])))
    raw = vae.encode(pixels).latent_dist.mode()
    mean, std = (
        torch.tensor(v).view(1, 16, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    torch.testing.assert_close(as_latents(held["hr"]), (raw - mean) / std, rtol=2e-3, atol=2e-3)
    zero = vae.encode(torch.cat([pixels[:, :, :1], torch.zeros(1, 3, 12, 64, 64)], 2)).latent_dist.mode()
    y = extend(as_latents(held["hr_y"]), 4)
    torch.testing.assert_close(y, (zero - mean) / std, rtol=2e-3, atol=2e-3)

    text = TextConfig.model_validate({"kind": "umt5", "path": str(tmp_path / "umt5")})
    note, rows = written(unit, run_unit(Text(text), unit))
    assert len(note.prompts) == 6 and rows.shape == (sum(note.tokens), 32)

    # Other weights at the same path are another unit.
    receipts = {**unit.receipts, "latents": receipt}
    tiny_vae(seed=1).save_pretrained(tmp_path / "wan" / "vae")
    other = Latents(config, None)
    assert is_fresh(stage, unit.clip, receipts) and not is_fresh(other, unit.clip, receipts)
    # What was sent to a machine with other files fails there; the same files elsewhere are the same.
    mixed = run_unit(stage, unit)
    assert mixed.status is Status.FAILED and "give every machine the same files" in mixed.reasons[0]
    tiny_vae().save_pretrained(tmp_path / "elsewhere" / "vae")
    moved = {"kind": "wan", "path": str(tmp_path / "elsewhere"), "device": "cuda"}
    stage = Latents(LatentsConfig.model_validate({"height": 64, "width": 64, "codec": moved}), None)
    assert is_fresh(stage, unit.clip, receipts)
    with pytest.raises(CodecError, match=r"holds no config\.json"):
        Text(TextConfig(kind="umt5", path=str(tmp_path)))
