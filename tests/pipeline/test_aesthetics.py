"""Real loading of CLIP and the LAION head from weights on disk, with small random ones in the real
formats."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from drawn import flat_shapes, looked, pan
from pydantic import ValidationError

from pipeline.quality.aesthetics import PROXY, AestheticsConfig, LaionScorer, ScorerError, load_scorer
from pipeline.quality.axes import RAWS, score
from pipeline.quality.looks import JUDGED, Look

open_clip = pytest.importorskip("open_clip")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

MODEL, WIDTH = "wp2-tiny", 32
TINY = {
    "embed_dim": WIDTH,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def clip_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict of open_clip, random, as its checkpoints hold it."""
    folder = tmp_path_factory.mktemp("clip")
    (folder / f"{MODEL}.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder / f"{MODEL}.json")
    torch.manual_seed(0)
    model = open_clip.create_model(MODEL)
    safetensors.save_file(model.state_dict(), str(folder / "open_clip_model.safetensors"))
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder / "open_clip_model.safetensors"


def linear_head(path: Path, bias: float = 5.0) -> Path:
    """The published linear layout: one nn.Linear."""
    head = torch.nn.Linear(WIDTH, 1)
    torch.nn.init.constant_(head.bias, bias)
    torch.save(head.state_dict(), path)
    return path


def chain_head(path: Path) -> Path:
    """The published chain: linear layers with dropout between them, under `layers`."""
    sizes = (WIDTH, 16, 8, 4)
    steps = [s for a, b in pairwise(sizes) for s in (torch.nn.Linear(a, b), torch.nn.Dropout(0.2))]
    chain = torch.nn.Sequential(*steps, torch.nn.Linear(4, 1))
    torch.nn.init.constant_(chain[-1].bias, 6.0)
    torch.save({f"layers.{name}": value for name, value in chain.state_dict().items()}, path)
    return path


def picture(seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (90, 160, 3), np.uint8)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_the_score_is_what_the_parts_give(clip_weights: Path, tmp_path: Path, suffix: str) -> None:
    weights = (
        clip_weights if suffix == ".safetensors" else clip_weights.with_name("open_clip_pytorch_model.bin")
    )
    path = linear_head(tmp_path / "sa_0_4_vit_l_14_linear.pth")
    got = LaionScorer(MODEL, weights, path).judge(picture())
    model, _, prepare = open_clip.create_model_and_transforms(MODEL, pretrained=str(weights))
    head = torch.nn.Linear(WIDTH, 1)
    head.load_state_dict(torch.load(path, weights_only=True))
    from PIL import Image

    with torch.inference_mode():
        seen = model.eval().encode_image(prepare(Image.fromarray(picture()))[None])
        wanted = head(seen / seen.norm(dim=-1, keepdim=True))
    assert got == pytest.approx(float(wanted), abs=1e-5)


def test_a_chain_of_layers_is_read_in_order_and_dropout_is_off(clip_weights: Path, tmp_path: Path) -> None:
    scorer = LaionScorer(MODEL, clip_weights, chain_head(tmp_path / "sac+logos+ava1-l14-linearMSE.pth"))
    assert scorer.judge(picture()) == scorer.judge(picture()) != scorer.judge(picture(1))
    assert scorer.judge(picture()) == pytest.approx(6.0, abs=1.0)


def test_a_score_off_the_scale_stops_with_one_line(clip_weights: Path, tmp_path: Path) -> None:
    scorer = LaionScorer(MODEL, clip_weights, linear_head(tmp_path / "head.pth", bias=50.0))
    with pytest.raises(ScorerError, match=r"outside 1 to 10.*another scale") as caught:
        scorer.judge(picture())
    assert "\n" not in str(caught.value)


def test_a_clip_is_judged_in_every_window_and_the_column_says_by_whom(
    clip_weights: Path, tmp_path: Path
) -> None:
    config = AestheticsConfig(
        clip_model=MODEL,
        clip_weights=str(clip_weights),
        head_weights=str(linear_head(tmp_path / "head.pth")),
    )
    scorer = load_scorer(config)
    assert scorer is not None and scorer is load_scorer(config)
    looks = looked(pan(flat_shapes(), 200), look=Look(scorer))
    judged = looks.at[~np.isnan(looks.raws[:, RAWS.index("aesthetic")])]
    assert judged.tolist() == [0, JUDGED, 2 * JUDGED]
    axes = score(looks, 50, 200)
    assert axes.aesthetics_by == scorer.name and scorer.name.startswith(f"laion-{MODEL}-")
    raw = axes.raws["aesthetic"]
    assert raw is not None and axes.aesthetics == pytest.approx((raw - 1) / 9)


def test_without_weights_a_proxy_is_named_as_one() -> None:
    assert load_scorer(AestheticsConfig()) is None
    colour, grey = flat_shapes(), flat_shapes()
    grey[:] = grey.mean(axis=2, keepdims=True)
    looks, plain = looked(pan(colour, 20)), looked(pan(grey, 20))
    assert looks.aesthetics_by == PROXY == "proxy-colourfulness-contrast-1"
    assert 0 < score(plain, 0, 20).aesthetics < score(looks, 0, 20).aesthetics < 1


def test_what_does_not_fit_is_said_in_one_line(clip_weights: Path, tmp_path: Path) -> None:
    head = linear_head(tmp_path / "head.pth")
    wide = tmp_path / "wide.pth"
    torch.save(torch.nn.Linear(768, 1).state_dict(), wide)
    cases = {
        "no weights at": (MODEL, tmp_path / "missing.pt", head),
        "knows no model": ("ViT-Z-99", clip_weights, head),
        "no aesthetic head for embeddings 32 wide": (MODEL, clip_weights, wide),
        "does not fit wp2-tiny": (MODEL, wide, head),
    }
    for text, arguments in cases.items():
        with pytest.raises(ScorerError, match=text) as caught:
            LaionScorer(*arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError, match="give both or neither"):
        AestheticsConfig(clip_weights="clip.safetensors")
