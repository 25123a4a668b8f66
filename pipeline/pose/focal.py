from dataclasses import dataclass

from pipeline.pose.vo_fit import Look


@dataclass(frozen=True)
class Camera:
    focal: float
    look: Look
    aspect: float = 1.0
