"""Sizes of the networks, and the four presets: `tiny`, `small`, `wan1_3b`, `a14b`.

A preset is everything that shapes depend on: the network, the picture, how latents are cut into chunks, and
where the two experts part. Nothing here is read from a checkpoint; `model/adapters.py` refuses weights that
do not have these shapes. Source: spec/worldplay2.md a.1, a.5, b, c.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PIXELS_PER_LATENT = 8
LOW_RESOLUTION = 4  # the low-resolution stream has a quarter of the height and of the width
LATENTS_PER_PAIR = 2  # latents of the full-resolution stream that one compressed latent stands for
PIXEL_MULTIPLE = 64  # low-resolution latents must fill whole patches: 4 * 8 * 2


class ConfigError(ValueError):
    """Sizes that no network of this kind can have."""


@dataclass(frozen=True)
class Grid:
    """Tokens of one latent: rows x cols."""

    rows: int
    cols: int

    @property
    def tokens(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Geometry:
    """A picture size in pixels, and the sizes that follow from it. Source: spec/worldplay2.md a.1, a.3."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height % PIXEL_MULTIPLE or self.width % PIXEL_MULTIPLE or min(self.height, self.width) <= 0:
            raise ConfigError(
                f"picture of {self.height}x{self.width} pixels: use positive multiples of {PIXEL_MULTIPLE}"
            )

    @property
    def latent(self) -> tuple[int, int]:
        """(H, W) of a full-resolution latent."""
        return self.height // PIXELS_PER_LATENT, self.width // PIXELS_PER_LATENT

    @property
    def low_latent(self) -> tuple[int, int]:
        """(H, W) of a low-resolution latent."""
        return self.latent[0] // LOW_RESOLUTION, self.latent[1] // LOW_RESOLUTION


@dataclass(frozen=True)
class MemoryConfig:
    """The fine branch of the compressor. Its folds (time 2, space 8 of latents) are part of its structure.

    stem: channels after the input layer. down: channels of the three blocks that halve space (the first also
    halves time). flat: channels of the three that keep the grid. Source: spec/worldplay2.md c.1.
    """

    stem: int = 64
    down: tuple[int, int, int] = (64, 128, 256)
    flat: tuple[int, int, int] = (256, 512, 512)
    heads: int = 8
    attention_blocks: int = 2


@dataclass(frozen=True)
class ModelConfig:
    """One expert. dim: width D of a token. in_dim: 16 noisy + 4 mask + 16 image channels.

    action_hidden: widths inside the MLP of pitch and yaw. max_latents: the horizon that the weights can
    place, where they have one (the released ones: 1024); None for any.
    """

    dim: int
    ffn: int
    heads: int
    layers: int
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    in_dim: int = 36
    out_dim: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    theta: float = 10000.0
    eps: float = 1e-6
    action_hidden: tuple[int, int] = (256, 1024)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    max_latents: int | None = None

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.head_dim % 2 or self.head_dim < 6:
            raise ConfigError(f"width {self.dim} with {self.heads} heads: heads of an even width >= 6 needed")
        if self.patch[0] != 1:
            raise ConfigError(f"patch {self.patch}: a token belongs to one latent, so the first must be 1")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def patch_out(self) -> int:
        """Values that the head predicts for a token: patch positions first, then channels."""
        return self.out_dim * self.patch[0] * self.patch[1] * self.patch[2]


@dataclass(frozen=True)
class Preset:
    """A world model: its experts, its picture, and its chunks.

    boundary: noise level sigma at and above which the expert "high" works, below it "low"; None for a model
    with one network. chunk, sink, temporal: in latents. Source: spec/worldplay2.md a.1, a.5.
    """

    name: str
    model: ModelConfig
    geometry: Geometry
    boundary: float | None = 0.9
    chunk: int = 4
    sink: int = 1
    temporal: int = 1

    def __post_init__(self) -> None:
        if self.chunk % LATENTS_PER_PAIR:
            raise ConfigError(
                f"chunk of {self.chunk} latents: the compressor folds pairs, use an even number"
            )
        if not (1 <= self.sink <= self.chunk and 1 <= self.temporal <= self.chunk):
            raise ConfigError(f"sink {self.sink}, temporal {self.temporal}: 1 to {self.chunk} latents each")

    @property
    def experts(self) -> tuple[str, ...]:
        return ("single",) if self.boundary is None else ("high", "low")

    def expert(self, sigma: float) -> str:
        """The expert of a noise level."""
        if not 0.0 <= sigma <= 1.0:
            raise ConfigError(f"noise level {sigma}: sigma lies in [0, 1] (a timestep is 1000 sigma)")
        if self.boundary is None:
            return "single"
        return "high" if sigma >= self.boundary else "low"

    @property
    def grid(self) -> Grid:
        """Tokens of a full-resolution latent: 28 x 52 at 448x832."""
        rows, cols = self.geometry.latent
        return Grid(rows // self.model.patch[1], cols // self.model.patch[2])

    @property
    def low_grid(self) -> Grid:
        """Tokens of a compressed latent: 7 x 13 at 448x832."""
        rows, cols = self.geometry.low_latent
        return Grid(rows // self.model.patch[1], cols // self.model.patch[2])


# Text of 384 channels and at most 256 tokens is what the small encoder that a package ships gives.
TINY = Preset(
    "tiny",
    ModelConfig(
        dim=64,
        ffn=160,
        heads=4,
        layers=2,
        text_dim=384,
        text_len=256,
        freq_dim=64,
        action_hidden=(16, 32),
        memory=MemoryConfig(stem=8, down=(8, 16, 16), flat=(16, 32, 32), heads=2),
    ),
    Geometry(64, 128),
)
SMALL = Preset(
    "small",
    ModelConfig(
        dim=128,
        ffn=352,
        heads=4,
        layers=4,
        text_dim=384,
        text_len=256,
        freq_dim=128,
        action_hidden=(32, 128),
        memory=MemoryConfig(stem=16, down=(16, 32, 32), flat=(32, 64, 64), heads=4),
    ),
    Geometry(64, 128),
)
WAN1_3B = Preset(
    "wan1_3b",
    ModelConfig(dim=1536, ffn=8960, heads=12, layers=30),
    Geometry(448, 832),
    boundary=None,
)
A14B = Preset("a14b", ModelConfig(dim=5120, ffn=13824, heads=40, layers=40), Geometry(448, 832))

PRESETS = {preset.name: preset for preset in (TINY, SMALL, WAN1_3B, A14B)}


def preset(name: str) -> Preset:
    """The preset of a name; ConfigError with the names there are."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}: one of {', '.join(PRESETS)}")
    return PRESETS[name]
