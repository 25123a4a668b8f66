"""Benchmarks are not run here, but the samples that they write are those of today's schemas."""

from __future__ import annotations

from pathlib import Path

from benchmarks import loader, shards
from pipeline.store import Store
from trainer.config import SMALL


def test_benchmarks_write_samples_of_the_schema(tmp_path: Path) -> None:
    made = shards.make(1, 1, tmp_path)
    assert made[0].facts["latent_frames"] == shards.LATENTS
    loader.write(Store(str(tmp_path / "corpus"), {}), SMALL, loader.PARTITIONS)
    assert len(list((tmp_path / "corpus" / "index").glob("*.parquet"))) == loader.PARTITIONS
