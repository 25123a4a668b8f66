"""The Wan 2.1 VAE: diffusers' AutoencoderKLWan, weights from a path, as a stream with carried caches.

Source: spec/worldplay2.md a.1, i.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.codec.base import CHANNELS, SPACE_STRIDE, TIME_STRIDE, Cache, check_latents, latents_in
from trainer.codec.weights import CodecError, Precision, vae_file, vae_identity

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Wan:
    """An AutoencoderKLWan on a device, in the precision that it was loaded in. Encoding takes the mean of the
    posterior: the same pixels give the same latents. diffusers drives the same modules, but forgets their
    caches at the end of every call."""

    def __init__(self, vae: Any, identity: str, device: str = "cpu") -> None:
        config = vae.config
        strides = config.get("scale_factor_temporal", 4), config.get("scale_factor_spatial", 8)
        if (
            config.z_dim != CHANNELS
            or strides != (TIME_STRIDE, SPACE_STRIDE)
            or config.patch_size is not None
        ):
            raise CodecError(
                f"this VAE has {config.z_dim} channels and strides {strides}; the model is made for "
                f"{CHANNELS} channels and ({TIME_STRIDE}, {SPACE_STRIDE}): take the VAE of Wan 2.1"
            )
        self.identity = identity
        self.device = torch.device(device)
        self._dtype = vae.dtype
        self._vae = vae.to(self.device).eval().requires_grad_(False)
        counts = vae._cached_conv_counts  # how long the lists are that the modules keep their caches in
        self._encoder_caches, self._decoder_caches = int(counts["encoder"]), int(counts["decoder"])
        shape = (1, CHANNELS, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=self.device).view(shape)
        self._std = torch.tensor(config.latents_std, device=self.device).view(shape)

    @torch.no_grad()
    def encode(self, pixels: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        latents_in(pixels, cache is None)
        pixels = pixels.to(self.device, self._dtype)
        held: list[Any] = [None] * self._encoder_caches if cache is None else list(cache)
        ends = range(1 if cache is None else TIME_STRIDE, pixels.shape[2] + 1, TIME_STRIDE)
        # The modules replace entries of the list and never write into a tensor: the caller's cache stays.
        hidden = [
            self._vae.encoder(pixels[:, :, max(0, end - TIME_STRIDE) : end], feat_cache=held, feat_idx=[0])
            for end in ends
        ]
        moments = self._vae.quant_conv(torch.cat(hidden, 2))
        return (moments[:, :CHANNELS].float() - self._mean) / self._std, tuple(held)

    @torch.no_grad()
    def decode(self, latents: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        check_latents(latents)
        raw = latents.to(self.device, torch.float32) * self._std + self._mean
        hidden = self._vae.post_quant_conv(raw.to(self._dtype))
        held: list[Any] = [None] * self._decoder_caches if cache is None else list(cache)
        out = [
            self._vae.decoder(
                hidden[:, :, k : k + 1], feat_cache=held, feat_idx=[0], first_chunk=cache is None and k == 0
            )
            for k in range(hidden.shape[2])
        ]
        return torch.cat(out, 2).float().clamp(-1.0, 1.0), tuple(held)


def load(path: Path, device: str = "cpu", precision: Precision = "float32") -> Wan:
    """The VAE of a diffusers folder (its own, or a pipeline's with `vae/`), or of a Wan2.1_VAE.pth file.

    Nothing is fetched. Raises CodecError on a path that holds no such weights.
    """
    import diffusers

    kind: Any = diffusers.AutoencoderKLWan
    file = vae_file(path)
    if file.suffix == ".pth":
        vae = _from_pth(file, kind, _DTYPES[precision])
    else:
        try:
            vae, info = kind.from_pretrained(
                file.parent,
                torch_dtype=_DTYPES[precision],
                local_files_only=True,
                low_cpu_mem_usage=False,  # the default, without the advice to install accelerate
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())[:160]
            raise CodecError(f"{file.parent} is no AutoencoderKLWan: {why}") from None
        # diffusers only warns, and leaves random numbers where a tensor is missing.
        if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
            raise CodecError(f"{file} does not fit its config.json: {len(wrong)} tensors, such as {wrong[0]}")
    return Wan(vae, f"{vae_identity(path)}-{precision}", device)


def _from_pth(file: Path, kind: Any, dtype: torch.dtype) -> Any:
    from diffusers.loaders import single_file_utils

    convert: Any = single_file_utils.convert_wan_vae_to_diffusers
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    with torch.device("meta"):
        vae = kind()
    try:
        found = {name: value.to(dtype) for name, value in convert(state).items()}
        vae.load_state_dict(found, strict=True, assign=True)
    except RuntimeError as error:
        raise CodecError(f"{file} is no Wan2.1_VAE.pth: {' '.join(str(error).split())[:160]}") from None
    return vae
