"""The schema of GET /cache/stats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pieces import at_once
from pydantic import ValidationError

from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import Gauges, IndexGauges
from gateway.accounts.stats_schema import CacheStats

DOCS = Path(__file__).parents[4] / "docs" / "stats.md"


def fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    schema = CacheStats.model_json_schema()
    for name, model in {"CacheStats": schema, **schema["$defs"]}.items():
        for field, properties in model["properties"].items():
            yield name, field, properties


def sample() -> CacheStats:
    accounting = Accounting(["a"], model="m", version="1", block_size=32, clock=lambda: 0.0)
    index = IndexGauges(blocks=1, used_bytes=5, capacity_bytes=10)
    return at_once(accounting.snapshot(gauges=Gauges(in_flight=1, waiting=0, index=index)))


def test_every_field_is_described() -> None:
    """The exported JSON schema explains itself."""
    undescribed = [f"{model}.{field}" for model, field, p in fields() if not p.get("description")]
    assert undescribed == []


def test_the_schema_can_be_exported_and_read_back() -> None:
    """What is served validates against the model again."""
    text = sample().model_dump_json()
    assert CacheStats.model_validate_json(text) == sample()
    assert json.loads(text)["index"]["capacity_bytes"] == 10


def test_unknown_numbers_are_null_in_json() -> None:
    """Never NaN and never 0 in the place of "not known"."""
    served = json.loads(sample().model_dump_json())
    window = served["total"]["windows"]["last_1m"]
    assert window["hit_rates"]["by_token"] is None
    assert window["first_token"]["total"]["p99_s"] is None
    assert served["memo"] is None


def test_impossible_gauges_are_refused() -> None:
    """Negative sizes and unknown keys are mistakes of the caller."""
    with pytest.raises(ValidationError):
        IndexGauges(blocks=-1, used_bytes=0, capacity_bytes=0)
    with pytest.raises(ValidationError):
        Gauges.model_validate({"inflight": 1})


def test_the_documentation_names_every_field_of_a_window() -> None:
    """docs/stats.md and the schema do not drift apart."""
    text = DOCS.read_text(encoding="utf-8")
    schema = CacheStats.model_json_schema()
    names = {
        field
        for model in ("WindowStats", "PromptTokenCounts", "HitRates", "PrefillSaved", "CacheStats")
        for field in {"CacheStats": schema, **schema["$defs"]}[model]["properties"]
    }
    assert sorted(name for name in names if f"`{name}`" not in text) == []
