"""Students, scores and a played rollout of the tiny preset, for the tests of Stable Forcing."""

from __future__ import annotations

import torch

from tests.trainer.model_support import PRESET, action_rows, draw, noisy_expert
from tests.trainer.tiny_codecs import blobs, fitted
from trainer.codec.base import to_pixels
from trainer.codec.linear import Linear
from trainer.model.pdd_head import VelocityHead, bank_from_velocity
from trainer.model.wan import WanModel
from trainer.rollout import Scene
from trainer.schedule import PddSchedule
from trainer.stable.played import Played, play

SCHEDULE = PddSchedule()
WIDTH = PRESET.model.text_dim


def students() -> dict[str, WanModel]:
    """Both experts with banks whose heads differ."""
    made = {}
    for name in PRESET.experts:
        model = noisy_expert(name)
        assert isinstance(model.head, VelocityHead)
        bank = bank_from_velocity(model.head, SCHEDULE.heads(name))
        with torch.no_grad():
            bank.bank_weight.add_(0.05 * draw(1, *bank.bank_weight.shape))
        model.head = bank
        made[name] = model
    return made


def scene(chunks: int, videos: int = 2) -> Scene:
    image = torch.cat([to_pixels(torch.from_numpy(blobs(1, 64, 128, k))) for k in range(videos)])
    actions = torch.cat([action_rows(k, chunks * PRESET.chunk) for k in range(videos)])
    texts = (draw(2, videos, 7, WIDTH), draw(3, videos, 9, WIDTH))
    prompts = tuple(c * 2 // chunks for c in range(chunks))
    return Scene(image, actions, texts, prompts, draw(4, 5, WIDTH), tuple(range(10, 10 + videos)))


def played(models: dict[str, WanModel], chunks: int, videos: int = 2, step: int = 0) -> Played:
    return play(PRESET, models, Linear(fitted()), scene(chunks, videos), SCHEDULE, seed=0, step=step)
