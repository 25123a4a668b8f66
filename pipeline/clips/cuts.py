"""Hard cuts and flashes, seen in one pass with a fixed number of small pictures held.

PySceneDetect's adaptive detector, fed frame by frame, names steps that stand out from their neighbours; with
those that are large in themselves they are the suspects. A suspect is a cut when the scene behind it is
another one (`scene`), within a flash's length no later frame shows the old scene and no earlier one the new,
and its neighbours do not change as much: a turn that is too fast to follow, or an explosion, spreads over
several steps, a cut is one. Source: spec/faults.md C5.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
from scenedetect import AdaptiveDetector, FrameTimecode

from pipeline.clips.scene import ALIKE_LEVELS, SAME, SURELY_SAME, Gray, sameness, small
from pipeline.picture import Picture, native_planes

# Mean change of hue, saturation and value: a step that stands out 1.6-fold from its four neighbours is
# looked at from 6 on (hard cuts between dark rooms have 10). And any step of this mean change of luma.
STANDS_OUT = 1.6
STANDS_OUT_FROM = 6.0
LARGE = 25.0
# A flash lasts at most this many frames (a quarter of a second at 30 fps).
FLASH = 8
# A step alone: its change is this many times that of either neighbour. Where nothing at all of the scene is
# found again (of 14 true cuts 3 % of the blocks is the most, of the fastest turns 2 % have less) the quieter
# neighbour decides; where little is, a smaller step is enough if both neighbours can be followed.
ALONE = 2.0
BETWEEN = 1.3
NOTHING = 0.03
LITTLE = 0.06
# A coder that is starved of bits lets the picture creep, and catches up with a key frame (q_compress_crf51).
# No camera in motion changes so little, none at rest so much; film cuts have more on one side or the other.
CREEPS = (0.05, 0.5)
CATCHES_UP = 15.0
REPEATED = 0.05  # mean change of a picture that is shown again
TINT = 20.0  # levels of mean colour: a flash changes at least one channel by this much, and gives it back
BEFORE = FLASH + 2  # frames kept before a suspect
CLOCK = 30.0  # PySceneDetect wants a rate; frames are counted here, never timed


@dataclass(frozen=True, slots=True)
class _Seen:
    index: int
    small: Gray
    colour: npt.NDArray[np.float64]
    change: float  # of small, to the frame before


class Cuts:
    """Observer. `cut`: frames that a hard cut lies before; `flash`: frames of a flash."""

    def __init__(self) -> None:
        self.cut: set[int] = set()
        self.flash: set[int] = set()
        self._held: deque[_Seen] = deque(maxlen=BEFORE + FLASH + 2)
        self._suspects: set[int] = set()
        self._detector = AdaptiveDetector(
            adaptive_threshold=STANDS_OUT, min_scene_len=0, min_content_val=STANDS_OUT_FROM
        )

    def see(self, index: int, picture: Picture) -> None:
        look = small(picture.gray)
        change = float(cv2.absdiff(look, self._held[-1].small).mean()) if self._held else 0.0
        bgr = _bgr(picture, look)
        colour = np.asarray(cv2.mean(bgr)[:3])
        self._held.append(_Seen(index, look, colour, change))
        named = self._detector.process_frame(FrameTimecode(index, CLOCK), bgr)
        self._suspects |= {suspect.frame_num for suspect in named} | ({index} if change >= LARGE else set())
        self._settle(index - FLASH - 1)

    def finish(self) -> None:
        """The recording is over: judge the suspects that still waited for what follows."""
        if self._held:
            self._settle(self._held[-1].index)

    def _settle(self, until: int) -> None:
        ready = sorted(k for k in self._suspects if k <= until)
        self._suspects.difference_update(ready)
        for k in ready:
            self._judge(k)

    def _judge(self, k: int) -> None:
        """Is there a cut between frames k - 1 and k?"""
        frames = {s.index: s for s in self._held}
        before, here = frames.get(k - 1), frames[k]
        if before is None:
            return
        self._tint(k, frames)
        same = sameness(before.small, here.small)
        if k in self.flash or k - 1 in self.flash or same >= SAME:
            return
        for j in range(k + 1, k + FLASH + 1):
            if j in frames and sameness(before.small, frames[j].small) >= SURELY_SAME:
                self.flash.update(range(k, j))
                return
        for j in range(k - 2, k - FLASH - 2, -1):
            if j in frames and sameness(frames[j].small, here.small) >= SURELY_SAME:
                self.flash.update(range(j + 1, k))  # an explosion grows over some frames, and is gone at once
                return
        if self._stands_alone(k, frames, same) and not _catches_up(k, frames):
            self.cut.add(k)

    def _tint(self, k: int, frames: dict[int, _Seen]) -> None:
        """Mark a flash whose colour comes and goes; the scene may well be seen through it."""
        was = frames[k - 1].colour
        size = np.abs(frames[k].colour - was).max()
        if size < TINT:
            return
        for j in range(k + 1, k + FLASH + 1):
            if j in frames and np.abs(frames[j].colour - was).max() < 0.3 * size:
                sudden = np.abs(frames[j].colour - frames[j - 1].colour).max() > 0.5 * size
                if sudden and _is_alike(frames[k - 1].small, frames[j].small):
                    self.flash.update(range(k, j))
                return

    @staticmethod
    def _stands_alone(k: int, frames: dict[int, _Seen], same: float) -> bool:
        """Does so much change in this step alone? Repeated pictures are passed over: where every picture is
        shown three times, two steps of three are none."""
        shown = [frames[j] for j in sorted(frames) if j == k or frames[j].change > REPEATED]
        at = next(i for i, s in enumerate(shown) if s.index == k)
        beside = [shown[i] for i in (at - 1, at + 1) if 0 <= i < len(shown)]
        here, changes = shown[at].change, [s.change for s in beside]
        changes += [0.0] * (2 - len(beside))  # the picture stands still on that side
        if here >= ALONE * max(changes):
            return True
        followed = [_step(frames, s.index) for s in sorted(beside, key=lambda s: s.change)]
        if same <= NOTHING and here >= max(*changes, ALONE * min(changes)):
            return followed[-1] >= SAME  # a cut at the end of a turn, or at its beginning
        if same > LITTLE or here < BETWEEN * max(changes):
            return False
        return min(followed) >= SURELY_SAME


def _catches_up(k: int, frames: dict[int, _Seen]) -> bool:
    """Is the step a coder's that catches up: small, and the picture creeps on both sides?"""
    beside = [s.change for j, s in frames.items() if j != k and k - FLASH <= j <= k + FLASH]
    return frames[k].change < CATCHES_UP and all(CREEPS[0] < change < CREEPS[1] for change in beside)


def _step(frames: dict[int, _Seen], k: int) -> float:
    """How well the scene can be followed from frame k - 1 to k."""
    return sameness(frames[k - 1].small, frames[k].small) if k - 1 in frames else 0.0


def _is_alike(before: Gray, after: Gray) -> bool:
    """Do the pictures on both sides of a flash show one scene? Plain walls are hard to find again."""
    return sameness(before, after) >= SAME or float(cv2.absdiff(before, after).mean()) < ALIKE_LEVELS


def _bgr(picture: Picture, luma: Gray) -> npt.NDArray[np.uint8]:
    """uint8 [h, 160, 3] from the small luma and the chroma planes; colours are relative, not exact."""
    size = (luma.shape[1], luma.shape[0])
    planes = [luma]
    for plane in (2, 1):
        chroma = native_planes(picture.limited)[plane]
        # Every n-th sample: the mean of all of a 720p plane takes five times as long, and colour is coarse.
        step = max(1, chroma.shape[1] // size[0])
        thin = np.ascontiguousarray(chroma[::step, ::step])
        planes.append(np.asarray(cv2.resize(thin, size, interpolation=cv2.INTER_AREA), np.uint8))
    return np.asarray(cv2.cvtColor(cv2.merge(planes), cv2.COLOR_YCrCb2BGR), np.uint8)
