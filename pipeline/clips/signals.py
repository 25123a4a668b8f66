"""What a recording shows, frame by frame: one strict pass, the game's log, and a table.

`watch` is the pass; `Signals` is the record behind the cuts and before the gates. What is seen and what the
log says are joined by "or": each knows menus that the other does not. Source: DESIGN 2; spec/faults.md C5.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.clips.cuts import Cuts
from pipeline.clips.stills import SHORTEST_BLACK, Card, Stills
from pipeline.frames import frame_pass
from pipeline.picture import Picture
from pipeline.store import Store, StoreError
from schemas import SCHEMA_VERSION
from schemas.clip import Clip

SIGNALS = "signals.parquet"
# Luma levels of mean change of gray@320. Lamps, screens and water around a player who stands still reach 3.1
# in single frames (4 sessions). Moving players are above in 75 % of frames, and press something in all.
IDLE_CHANGE = 3.5

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Signals:
    """One row a presented frame of a recording, or of the part of it that a clip is. F frames.

    time_base: seconds per tick. pts: int64 [F], the file's own. pixels: uint64 [F], as in a frame table.
    change: float32 [F], mean absolute difference of gray@320 to the frame before, in luma levels.
    bool [F]: key, a key frame has this PTS; cut, a hard cut lies before the frame; flash; still, the picture
    is that of the frame before but for a cursor; menu; dead; loading; idle.
    covered: float32 [F], share of the picture that a menu or card changes, 0 in play; from the picture alone.
    """

    time_base: Fraction
    pts: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.uint64]
    change: npt.NDArray[np.float32]
    key: Bools
    cut: Bools
    flash: Bools
    still: Bools
    menu: Bools
    dead: Bools
    loading: Bools
    idle: Bools
    covered: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if any(len(getattr(self, name)) != len(self.pts) for name in COLUMNS):
            raise ValueError("the columns of signals must have one length")

    def __len__(self) -> int:
        return len(self.pts)

    def part(self, start: int, stop: int) -> Signals:
        """Rows [start, stop)."""
        return replace(self, **{name: getattr(self, name)[start:stop] for name in COLUMNS})


COLUMNS = tuple(f.name for f in fields(Signals) if f.name != "time_base")


class _Change:
    """Observer: mean change of gray@320, and key frames."""

    def __init__(self) -> None:
        self.change: list[float] = []
        self.key: list[bool] = []
        self._last: npt.NDArray[np.uint8] | None = None

    def see(self, index: int, picture: Picture) -> None:
        gray = picture.gray
        self.change.append(0.0 if self._last is None else float(cv2.absdiff(gray, self._last).mean()))
        self.key.append(bool(picture.frame.key_frame))
        self._last = gray


def watch(path: Path) -> Signals:
    """One pass over a file: what its pictures show (`dead` and `idle` are not seen: False).

    Raises MediaError, as `frame_pass` does.
    """
    cv2.setNumThreads(1)
    change, cuts, stills = _Change(), Cuts(), Stills()
    decoded = frame_pass(path, [change, cuts, stills])
    cuts.finish()
    stills.finish()
    n = len(decoded)
    menu, loading, covered = np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.zeros(n, np.float32)
    cut = _marks(cuts.cut, n + 1)
    for shown in stills.cards:
        span = slice(shown.start, shown.stop)
        covered[span] = shown.covered
        if shown.card is Card.LOADING:
            loading[span] = True
            cut[[shown.start, shown.stop]] = True
        else:
            # A menu that fills the screen comes and goes like a scene, and is none.
            menu[span] = True
            cut[shown.start : shown.stop + shown.back] = False
    for start, stop in runs(np.asarray(stills.black, np.bool_)):
        if stop - start >= SHORTEST_BLACK:
            loading[start:stop], menu[start:stop], covered[start:stop] = True, False, 1.0
    return Signals(
        time_base=decoded.report.stream.time_base,
        pts=decoded.pts,
        pixels=decoded.pixels,
        change=np.asarray(change.change, np.float32),
        key=np.asarray(change.key, np.bool_),
        cut=cut[:n],
        flash=_marks(cuts.flash, n),
        still=np.asarray(stills.still, np.bool_),
        menu=menu,
        dead=np.zeros(n, np.bool_),
        loading=loading,
        idle=np.zeros(n, np.bool_),
        covered=covered,
    )


def with_log(seen: Signals, states: Mapping[str, Bools], free: Bools | None, idle_s: float) -> Signals:
    """Signals with what the log says, and the idle stretches.

    states: bool [F] for each of dead, menu and loading that the key map names. free: bool [F], the log knows
    that nothing is pressed; None where no log tells all inputs. Idle is more than idle_s in which nothing is
    pressed and next to nothing changes or, without a log, the picture stands still; and that is no card.
    What the log calls a death or a menu is no loading card, and a jump of the picture into or inside of it
    (red, a page) is no cut.
    """
    held = np.zeros(len(seen), np.bool_)
    for name in ("dead", "menu"):
        held |= states.get(name, held)
    seen = replace(seen, cut=seen.cut & ~held, loading=seen.loading & ~held)
    seen = replace(seen, **{name: getattr(seen, name) | state for name, state in states.items()})
    quiet = seen.still.copy() if free is None else free & (seen.change < IDLE_CHANGE)
    quiet &= ~(seen.menu | seen.loading | seen.dead)
    idle = np.zeros(len(seen), np.bool_)
    for start, stop in runs(quiet):
        first = max(0, start - 1)  # the frame that the stretch goes on showing
        if int(seen.pts[stop - 1] - seen.pts[first]) * seen.time_base > Fraction(idle_s):
            idle[start:stop] = True
    return replace(seen, idle=idle)


def runs(marks: Bools) -> list[tuple[int, int]]:
    """Half-open runs [start, stop) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marks, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _marks(frames: set[int], n: int) -> Bools:
    out = np.zeros(n, np.bool_)
    out[sorted(frames)] = True
    return out


# --- signals.parquet ---------------------------------------------------------------------------------------


def pack(signals: Signals) -> bytes:
    """signals.parquet: one row a frame; the same signals give the same bytes."""
    columns = {"frame": pa.array(np.arange(len(signals), dtype=np.int64))}
    columns |= {name: pa.array(getattr(signals, name)) for name in COLUMNS}
    base = f"{signals.time_base.numerator}/{signals.time_base.denominator}"
    metadata = {"schema_version": str(SCHEMA_VERSION), "time_base": base}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, metadata=metadata), sink, compression="zstd")
    return sink.getvalue()


def read_signals(corpus: Store, clip: Clip) -> Signals:
    """Signals of a clip's own frames. Raises StoreError when the file is damaged or of another schema."""
    if clip.signals is None:
        raise StoreError(f"clip {clip.clip_id} has no signals: it was catalogued without the cutting stage")
    remedy = "delete recordings/ledger/g* and run `wp2 curate`: it is made anew, and clips keep their frames"
    table = corpus.table(clip.signals.path, remedy)
    meta = table.schema.metadata or {}
    if meta.get(b"schema_version") != str(SCHEMA_VERSION).encode():
        raise StoreError(f"{clip.signals.path} has another schema than {SCHEMA_VERSION}: {remedy}")
    whole = Signals(
        time_base=Fraction(meta[b"time_base"].decode()),
        **{name: table[name].to_numpy() for name in COLUMNS},
    )
    return whole.part(clip.start, clip.stop or len(whole))
