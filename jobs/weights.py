"""What `wp2 weights` says of a checkpoint, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.model.adapters import RELEASE_LATENTS, Contents
from trainer.weights.checkpoint import Checkpoint, Expert
from trainer.weights.transfer import Difference

MOST = 20
"""Changed tensors that are listed; the rest is counted."""


def described(checkpoint: Checkpoint) -> Iterator[str]:
    """Lines of `inspect`: what it is, its sizes, and each expert's counts."""
    model, preset = checkpoint.preset.model, checkpoint.preset
    yield (
        f"{checkpoint.path}: {checkpoint.contents.words}; names: {checkpoint.naming}; sizes: {preset.name}"
    )
    yield (
        f"  width {model.dim}, {model.layers} layers, {model.heads} heads, feed-forward {model.ffn}, "
        f"{model.in_dim} channels in, {model.out_dim} out, text {model.text_len} x {model.text_dim}"
    )
    if checkpoint.contents is not Contents.BASE:
        yield f"  places at most {RELEASE_LATENTS} latents ({RELEASE_LATENTS // preset.chunk} chunks)"
    for expert in checkpoint.experts:
        yield f"  {_counts(expert)}"
    if len(checkpoint.experts) > 1:
        yield f"  together {size(sum(e.bytes for e in checkpoint.experts))}"


def _counts(expert: Expert) -> str:
    dtypes = ", ".join(f"{n} {dtype}" for dtype, n in expert.dtypes.items())
    files = "1 file" if len(expert.files) == 1 else f"{len(expert.files)} files"
    heads = f", {expert.found.heads} heads or blocks" if expert.found.heads > 1 else ""
    return (
        f"{expert.name}: {len(expert.entries)} tensors, {_amount(expert.parameters)} parameters, "
        f"{size(expert.bytes)} in {files}; {dtypes}{heads}"
    )


def _amount(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters:,}"


def size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count:,} bytes"


def compared(difference: Difference) -> Iterator[str]:
    """Lines of `diff` for one expert."""
    d = difference
    verdict = "equal" if d.equal else "different"
    yield f"{d.expert}: {verdict}; {d.compared} tensors compared, {len(d.changed)} changed"
    for side, only in (("left", d.only_left), ("right", d.only_right)):
        if only:
            yield f"  only {side}: {len(only)} ({', '.join(only[:3])}{', ..' if len(only) > 3 else ''})"
    for name, a, b in d.shapes:
        yield f"  {name}: {list(a)} and {list(b)}"
    ranked = sorted(d.changed.items(), key=lambda item: (-item[1], item[0]))
    for name, distance in ranked[:MOST]:
        yield f"  {name}: {distance:.6g}"
    if len(ranked) > MOST:
        yield f"  and {len(ranked) - MOST} that changed less"
