"""Stands in for ViPE: the same arguments, the same files, and on demand the same ways to go wrong.

It reads the video as ViPE does (OpenCV, the header's count), finds out by its pictures which frames of the
clip it shows, and writes their true poses, seen from a world and in a unit of this video alone. $STANDIN_VIPE
names a JSON file: "table", an npz of the clip (picture [F], rotation [F, 3, 3], translation [F, 3]), "focal",
"log", a folder that gets the arguments and the process ids of every call, and "quirks": video -> names.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np


def pictures(path: Path) -> np.ndarray:
    """One number a picture, as OpenCV decodes it; uint32 [F]."""
    video = cv2.VideoCapture(str(path))
    count = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
    rows = []
    while len(rows) < count:
        good, picture = video.read()
        if not good:
            break
        rows.append(zlib.crc32(picture.tobytes()))
    return np.asarray(rows, np.uint32)


def place(shown: np.ndarray, clip: np.ndarray) -> int:
    """First frame of the clip from which on it shows just these pictures."""
    for start in np.flatnonzero(clip == shown[0]):
        if np.array_equal(clip[start : start + len(shown)], shown):
            return int(start)
    sys.exit("stand-in: these pictures are not in the clip")


def similarity(name: str) -> tuple[np.ndarray, float, np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    return turn * np.linalg.det(turn), float(np.exp(rng.uniform(-1.5, 1.5))), rng.normal(size=3)


def save(path: Path, data: np.ndarray, inds: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, data=data, inds=inds)


def main() -> None:
    settings = dict(a.partition("=")[::2] for a in sys.argv[1:])
    video, out = Path(settings["streams.base_path"]), Path(settings["pipeline.output.path"])
    about: dict[str, Any] = json.loads(Path(os.environ["STANDIN_VIPE"]).read_text())
    name = video.stem
    quirks = about["quirks"].get(name, [])
    said = {"settings": settings, "pid": os.getpid(), "environment": sorted(os.environ)}
    if "hang" in quirks:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        said["child"] = child.pid
    (Path(about["log"]) / f"{name}.json").write_text(json.dumps(said))
    if "noise" in quirks:
        for percent in range(20000):
            print(f"SLAM Pass (1/2): {percent}%", end="\r", file=sys.stderr)
        print("\nUserWarning: a warning\n", file=sys.stderr)
    if "hang" in quirks:
        time.sleep(300)
    if "crash" in quirks:
        raise RuntimeError("CUDA error: device-side assert triggered")
    if "silent" in quirks:
        return

    table = np.load(about["table"])
    shown = pictures(video)
    start = place(shown, table["picture"])
    part = slice(start, start + len(shown))
    turn, scale, shift = similarity(name)
    pose = np.tile(np.eye(4, dtype=np.float32), (len(shown), 1, 1))
    pose[:, :3, :3] = turn @ table["rotation"][part]
    pose[:, :3, 3] = scale * table["translation"][part] @ turn.T + shift
    inds = np.arange(len(shown))
    if "gaps" in quirks:
        inds = np.setdiff1d(inds, [20, 21, 22, 60])
    if "beyond" in quirks:
        inds = inds + 1
    if "twice" in quirks:
        inds[5] = 4
    if "nan" in quirks:
        pose[33] = np.nan
    if "sheared" in quirks:
        pose[40, 0, 1] += 0.2
    if "mirrored" in quirks:
        pose[:, :3, 0] *= -1
    if "torn" in quirks:
        (out / "pose").mkdir(parents=True)
        (out / "pose" / f"{name}.npz").write_bytes(b"PK\x03\x04 half a file")
    elif "no_pose" not in quirks:
        save(out / "pose" / f"{name}.npz", pose[:, :3] if "shape" in quirks else pose[inds % len(pose)], inds)
    focal = about["focal"] * (1.05 if "zoomed" in quirks else 1)
    rows = np.tile(np.float32([focal, focal, 320, 180]), (len(shown), 1))
    save(out / "intrinsics" / f"{name}.npz", rows, np.arange(len(shown)))
    kind = "MEI" if "fisheye" in quirks else "PINHOLE"
    lines = "".join(f"{i}: {kind}\n" for i in range(len(shown)))
    (out / "intrinsics" / f"{name}_camera.txt").write_text(lines)
    (out / "vipe").mkdir(exist_ok=True)
    (out / "vipe" / f"{name}_info.pkl").write_bytes(pickle.dumps({"ba_residual": 0.1}))
    (out / "rgb").mkdir(exist_ok=True)
    (out / "rgb" / f"{name}.mp4").write_bytes(video.read_bytes())


if __name__ == "__main__":
    main()
