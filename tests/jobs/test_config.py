"""The config file: every key explained, wrong ones refused in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from jobs.config import ConfigError, CurateConfig, load, parse, render
from pipeline import strict_yaml


def test_the_printed_config_reads_back_as_itself() -> None:
    config = parse({"gates": {"min_frames": 300}, "source": {"licence": "CC BY: 4.0"}}, "test")
    assert parse(yaml.safe_load(render(config)), "printed") == config


def test_every_key_has_a_meaning() -> None:
    lines = render(CurateConfig()).splitlines()
    keys = [i for i, line in enumerate(lines) if not line.lstrip().startswith("#")]
    assert keys and all(lines[i - 1].lstrip().startswith("# ") for i in keys)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"ingst": {}}, "unknown key 'ingst'; did you mean 'ingest'?"),
        ({"run": {"cpu": 2}}, "unknown key 'run.cpu'; did you mean 'cpus'?"),
        ({"gates": {"min_frames": "many"}}, "gates.min_frames: Input should be a valid integer"),
        ({"gates": {"min_frames": 0}}, "gates.min_frames: Input should be greater than or equal to 1"),
        ({"clips": {"margin_s": math.inf}}, "clips.margin_s is not a finite number"),
        ({"serve": {"prices": {"engine_hour": math.nan}}}, "serve.prices.engine_hour is not a finite number"),
        ([1, 2], "must hold sections such as 'ingest:', not a list"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(data: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(data, "my.yaml")
    assert says in str(error.value) and "my.yaml" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_no_yaml_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read config"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "bad.yaml")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(tmp_path / "empty.yaml") == CurateConfig()


def test_the_printed_config_keeps_the_order_of_the_tiers() -> None:
    printed = strict_yaml.load(render(CurateConfig()))
    assert list(parse(printed, "printed").select.tiers) == list(CurateConfig().select.tiers)
