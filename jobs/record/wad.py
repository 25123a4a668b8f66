"""Doom map geometry, read from a WAD file.

Only what a route planner needs: lines with their two sectors, sector heights and specials.
Source: the classic WAD layout (little-endian; a directory of 16-byte entries, a map is the ten lumps after
its marker), checked against the sector heights that ViZDoom reports.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IMPASSIBLE = 0x0001
NO_SIDE = 0xFFFF

# DR/D1 doors that open on USE without a key (vanilla line specials).
DOOR_SPECIALS = (1, 31, 117, 118)
# Lines whose crossing changes nothing that a route depends on: scrolling walls and lights.
HARMLESS_SPECIALS = (0, 12, 13, 17, 35, 48, 79, 80, 81, 104, 138, 139, 156, 157)
# Sector specials that hurt the player (nukage, lava, end-of-level damage).
DAMAGE_SECTORS = (4, 5, 7, 11, 16)


@dataclass(frozen=True)
class MapGeometry:
    """Lines L, sectors S; map units. `right` and `left` are sector indices, -1 where a side is missing."""

    a: NDArray[np.float64]  # (L, 2) start of each line
    b: NDArray[np.float64]  # (L, 2) end
    right: NDArray[np.int64]  # (L,)
    left: NDArray[np.int64]  # (L,)
    flags: NDArray[np.int64]  # (L,)
    special: NDArray[np.int64]  # (L,)
    floor: NDArray[np.float64]  # (S,) heights at the start of the map
    ceiling: NDArray[np.float64]  # (S,)
    sector_special: NDArray[np.int64]  # (S,)

    def door_sectors(self) -> NDArray[np.int64]:
        """Sectors behind the left side of a USE door line."""
        doors = self.left[np.isin(self.special, DOOR_SPECIALS)]
        return np.unique(doors[doors >= 0])


def read_map(wad: Path, name: str) -> MapGeometry:
    """Geometry of the map `name` ("MAP01", "E1M1") in `wad`. Raises ValueError when it is not there."""
    blob = wad.read_bytes()
    magic, count, offset = struct.unpack_from("<4sii", blob, 0)
    if magic not in (b"IWAD", b"PWAD"):
        raise ValueError(f"{wad.name} is not a WAD file; give the path of one")
    directory = [struct.unpack_from("<ii8s", blob, offset + 16 * i) for i in range(count)]
    names = [entry[2].rstrip(b"\0").decode("ascii", "replace") for entry in directory]
    if name not in names:
        raise ValueError(f"map {name} is not in {wad.name}; choose one that is")
    start = names.index(name)
    lumps = {
        names[i]: blob[directory[i][0] : directory[i][0] + directory[i][1]]
        for i in range(start + 1, min(start + 11, count))
    }
    vertexes = np.frombuffer(lumps["VERTEXES"], "<i2").reshape(-1, 2).astype(np.float64)
    lines = np.frombuffer(lumps["LINEDEFS"], "<u2").reshape(-1, 7).astype(np.int64)
    side_type = np.dtype([("offset", "<i2", 2), ("textures", "S8", 3), ("sector", "<u2")])
    side_sector = np.append(np.frombuffer(lumps["SIDEDEFS"], side_type)["sector"].astype(np.int64), -1)
    sector_type = np.dtype(
        [
            ("floor", "<i2"),
            ("ceiling", "<i2"),
            ("flats", "S8", 2),
            ("light", "<i2"),
            ("special", "<u2"),
            ("tag", "<u2"),
        ]
    )
    sectors = np.frombuffer(lumps["SECTORS"], sector_type)
    sides = np.where(lines[:, 5:7] == NO_SIDE, -1, lines[:, 5:7])
    return MapGeometry(
        a=vertexes[lines[:, 0]],
        b=vertexes[lines[:, 1]],
        right=side_sector[sides[:, 0]],
        left=side_sector[sides[:, 1]],
        flags=lines[:, 2],
        special=lines[:, 3],
        floor=sectors["floor"].astype(np.float64),
        ceiling=sectors["ceiling"].astype(np.float64),
        sector_special=sectors["special"].astype(np.int64),
    )
