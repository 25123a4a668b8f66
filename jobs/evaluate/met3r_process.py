"""Runs in an environment that has the `met3r` package, never in ours: pairs on stdin, scores on stdout.

A request is a line of JSON with the shape [B, 2, H, W, 3] and then its bytes; the answer a line of JSON with
B numbers. Source: spec/worldplay2.md j (MEt3R: 256 pixels in [-1, 1], MASt3R point maps, DINO features).
"""

import json
import sys

SIDE = 256


def main() -> None:
    sys.path.pop(0)  # our own modules beside this file are not meant by anything that is imported here
    import numpy as np
    import torch
    from met3r import MEt3R  # type: ignore[import-not-found]

    device = sys.argv[1]
    answers = sys.stdout
    sys.stdout = sys.stderr  # what packages print is no answer
    metric = MEt3R(
        img_size=SIDE,
        use_norm=True,
        backbone="mast3r",
        feature_backbone="dino16",
        feature_backbone_weights="mhamilton723/FeatUp",
        upsampler="featup",
        distance="cosine",
        freeze=True,
    ).to(device)
    requests = sys.stdin.buffer
    while line := requests.readline():
        shape = json.loads(line)["shape"]
        size = int(np.prod(shape))
        pixels = np.frombuffer(requests.read(size), np.uint8).reshape(shape)
        scores = []
        for pair in pixels:
            images = torch.from_numpy(pair.copy()).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
            side = min(images.shape[-2:])
            top, left = (images.shape[-2] - side) // 2, (images.shape[-1] - side) // 2
            square = images[..., top : top + side, left : left + side]
            square = torch.nn.functional.interpolate(square, (SIDE, SIDE), mode="bilinear", antialias=True)
            with torch.no_grad():
                found = metric(
                    images=square.clamp(-1, 1)[None],
                    return_overlap_mask=False,
                    return_score_map=False,
                    return_projections=False,
                )
            scores.append(float((found[0] if isinstance(found, (tuple, list)) else found).mean()))
        answers.write(json.dumps(scores) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
