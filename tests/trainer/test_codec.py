"""Streams of codecs: parts equal the whole, later frames never change earlier latents, and what a user sees
when weights are wrong. Source: spec/worldplay2.md a.1, a.3, c.2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_codecs import blobs, fitted, tiny_vae

from schemas.latents import FittedCodec
from trainer.codec import lowres, wan
from trainer.codec.base import Codec, to_pixels, to_rgb
from trainer.codec.condition import extend, image_condition, mask
from trainer.codec.linear import Fit, Linear
from trainer.codec.weights import VAE_FILE, CodecError, vae_identity


@pytest.fixture(scope="module", params=["linear", "wan"])
def codec(request: pytest.FixtureRequest) -> Codec:
    torch.set_num_threads(1)
    return Linear(fitted()) if request.param == "linear" else wan.Wan(tiny_vae(), "wan-tiny")


def pixels(frames: int, seed: int = 3, size: int = 64) -> torch.Tensor:
    return to_pixels(torch.from_numpy(blobs(frames, size, size, seed)))


# --- every codec ------------------------------------------------------------------------------------------


def test_parts_of_a_stream_equal_the_whole_and_leave_earlier_caches_as_they_were(codec: Codec) -> None:
    video = pixels(13)
    whole, _ = codec.encode(video)
    assert whole.shape == (1, 16, 4, 8, 8) and whole.dtype == torch.float32
    first, begun = codec.encode(video[:, :, :5])
    middle, later = codec.encode(video[:, :, 5:9], begun)
    last, _ = codec.encode(video[:, :, 9:], later)
    torch.testing.assert_close(torch.cat([first, middle, last], 2), whole, rtol=1e-5, atol=1e-5)
    again, _ = codec.encode(video[:, :, 5:9], begun)
    assert torch.equal(again, middle)

    shown, _ = codec.decode(whole)
    assert shown.shape == video.shape and float(shown.abs().max()) <= 1
    one, begun = codec.decode(whole[:, :, :2])
    two, _ = codec.decode(whole[:, :, 2:], begun)
    torch.testing.assert_close(torch.cat([one, two], 2), shown, rtol=1e-5, atol=1e-5)
    again, _ = codec.decode(whole[:, :, 2:], begun)
    assert torch.equal(again, two)


def test_a_changed_frame_changes_its_latent_and_none_before(codec: Codec) -> None:
    video = pixels(13)
    before, _ = codec.encode(video)
    for frame, latent in ((0, 0), (1, 1), (4, 1), (5, 2), (12, 3)):
        other = video.clone()
        other[:, :, frame] = -other[:, :, frame]
        after, _ = codec.encode(other)
        assert torch.equal(after[:, :, :latent], before[:, :, :latent])
        assert not torch.equal(after[:, :, latent], before[:, :, latent])
    latents = before.clone()
    latents[:, :, 2] += 1.0
    shown, changed = codec.decode(before)[0], codec.decode(latents)[0]
    assert torch.equal(shown[:, :, :5], changed[:, :, :5])
    assert not torch.equal(shown[:, :, 5:9], changed[:, :, 5:9])


def test_the_image_condition_is_a_zero_clip_for_any_horizon(codec: Codec) -> None:
    image = pixels(1)
    head = image_condition(codec, image)
    n = head.shape[2]
    zeros = torch.zeros(1, 3, 4 * (n + 5), 64, 64)
    whole, _ = codec.encode(torch.cat([image, zeros], 2))
    torch.testing.assert_close(extend(head, n + 6), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(head[:, :, :1], codec.encode(image)[0])
    assert torch.equal(extend(head, 2), head[:, :, :2])
    # The last is the tail, and the one before is not yet.
    assert n == 2 or not torch.equal(head[:, :, -1], head[:, :, -2])
    assert mask(3)[:, :, 0, 0].tolist() == [[1.0, 0.0, 0.0]] * 4


@pytest.mark.parametrize("frames", [2, 4, 12])
def test_a_stream_begins_with_one_frame_and_goes_on_in_fours(codec: Codec, frames: int) -> None:
    with pytest.raises(ValueError, match="4T-3 frames where the stream begins, not"):
        codec.encode(torch.zeros(1, 3, frames, 64, 64))
    with pytest.raises(ValueError, match="4T frames, not 5"):
        codec.encode(torch.zeros(1, 3, 5, 64, 64), codec.encode(torch.zeros(1, 3, 1, 64, 64))[1])


# --- low resolution ---------------------------------------------------------------------------------------


class Recorder:
    """A codec that remembers which frames it was given; a picture's brightness is its number."""

    identity = "recorder"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def encode(
        self, pixels: torch.Tensor, cache: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        assert pixels.shape[3:] == (16, 16)
        numbers = pixels[0, 0, :, 0, 0].round().int().tolist()
        groups = [numbers[:1], *(numbers[k : k + 4] for k in range(1, len(numbers), 4))]
        self.given += groups if cache is None else [numbers[k : k + 4] for k in range(0, len(numbers), 4)]
        return torch.zeros(1, 16, 2, 2, 2), ()


def test_low_resolution_latents_have_the_phase_of_inference() -> None:
    codec, cache = Recorder(), None
    numbered = torch.arange(13 + 3 * 16).float().view(1, 1, -1, 1, 1).expand(1, 3, -1, 64, 64)
    for start, stop in ((0, 13), (13, 29), (29, 45), (45, 61)):
        _, cache = lowres.encode_chunk(codec, numbered[:, :, start:stop], cache)  # type: ignore[arg-type]
    assert codec.given == [
        [0], [2, 4, 6, 8],  # 10 and 12 are left out
        [13, 15, 17, 19], [21, 23, 25, 27],
        [29, 31, 33, 35], [37, 39, 41, 43],
        [45, 47, 49, 51], [53, 55, 57, 59],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="a chunk has 16 frames, not 13"):
        lowres.encode_chunk(codec, numbered[:, :, :13], cache)  # type: ignore[arg-type]


def test_pictures_shrink_as_the_released_model_shrinks_them() -> None:
    ramp = torch.arange(64.0).expand(1, 3, 2, 64, 64)
    assert torch.allclose(lowres.shrink(ramp)[0, 0, 0, 0], torch.arange(16) * 4 + 1.5)
    edge = torch.zeros(1, 3, 1, 64, 64)
    edge[..., 0] = 1.0  # a bilinear without antialiasing sees columns 1 and 2 of every four
    assert not lowres.shrink(edge).any()


# --- wan --------------------------------------------------------------------------------------------------


def test_wan_gives_what_diffusers_gives_normalised(tmp_path: Path) -> None:
    vae = tiny_vae()
    vae.save_pretrained(tmp_path / "pipeline" / "vae")
    codec = wan.load(tmp_path / "pipeline")
    assert codec.identity == f"{vae_identity(tmp_path / 'pipeline' / 'vae')}-float32"
    video = pixels(13)
    latents, _ = codec.encode(video)
    mean = torch.tensor(vae.config.latents_mean).view(1, 16, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, 16, 1, 1, 1)
    expected = vae.encode(video).latent_dist.mode()
    torch.testing.assert_close(latents * std + mean, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(codec.decode(latents)[0], vae.decode(expected).sample, rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path / "cut")
    file = tmp_path / "cut" / VAE_FILE
    tensors = load_file(file)
    tensors.pop("encoder.conv_in.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CodecError, match=r"1 tensors, such as encoder\.conv_in\.weight"):
        wan.load(tmp_path / "cut")
    with pytest.raises(CodecError, match="holds no VAE: give a diffusers folder with"):
        wan.load(tmp_path)
    torch.save({"encoder.conv1.weight": torch.zeros(1)}, tmp_path / "Wan2.1_VAE.pth")
    with pytest.raises(CodecError, match=r"Wan2.1_VAE.pth is no Wan2.1_VAE.pth"):
        wan.load(tmp_path / "Wan2.1_VAE.pth")


# --- linear -----------------------------------------------------------------------------------------------


def test_a_fitted_codec_has_unit_variance_and_survives_its_file() -> None:
    record = fitted()
    assert FittedCodec.model_validate_json(record.model_dump_json()) == record
    assert record.identity() == fitted().identity()
    codec = Linear(record)
    seen = torch.cat([codec.encode(pixels(5, seed))[0][:, :, 1:] for seed in range(8)], 2)
    assert seen.std(dim=(0, 2, 3, 4)).tolist() == pytest.approx([1.0] * 16, abs=0.4)
    video = pixels(5, seed=2)
    shown = codec.decode(codec.encode(video)[0])[0]
    error = to_rgb(video).float() - to_rgb(shown).float()
    assert float(10 * torch.log10(255**2 / (error**2).mean())) > 20


def test_pictures_without_variety_make_no_codec() -> None:
    fit = Fit()
    with pytest.raises(CodecError, match="no picture was seen"):
        fit.record(())
    fit.see(torch.zeros(1, 3, 4, 64, 64))
    with pytest.raises(CodecError, match="fewer than 16 components"):
        fit.record(("black",))
