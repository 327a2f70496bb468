"""The configuration model: defaults, units, refusals."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from policies.config import HeadstartConfig


def test_an_empty_file_is_valid() -> None:
    """Every key has a default."""
    config = HeadstartConfig.model_validate({})
    assert (config.host, config.port) == ("127.0.0.1", 8080)
    assert config.store is not None


def test_sizes_and_durations_take_units() -> None:
    """4GiB and 30s mean what they say."""
    config = HeadstartConfig.model_validate(
        {"store": {"memory": {"capacity": "4GiB"}, "lease": "1m"}, "limits": {"max_wait": 2}}
    )
    assert config.store is not None
    assert config.store.memory.capacity == 4 * 2**30
    assert config.store.lease == 60.0
    assert config.limits.max_wait == 2.0


def test_the_yaml_chooses_the_eviction_policy() -> None:
    """The validated model is the policy object."""
    config = HeadstartConfig.model_validate({"store": {"memory": {"eviction": {"kind": "fifo"}}}})
    assert config.store is not None
    assert config.store.memory.eviction.kind == "fifo"
    assert len(config.store.memory.eviction.queue()) == 0


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"listen": "127.0.0.1:99999"}, "listen"),
        ({"engines": []}, "engines"),
        ({"engines": [{"url": "ftp://x"}]}, "engines.0.vllm.url"),
        ({"engines": [{}, {}]}, ""),
        ({"store": {"memory": {"capcity": 1}}}, "store.memory.capcity"),
        ({"store": {"memory": {"eviction": {"kind": "lrux"}}}}, "store.memory.eviction"),
        ({"store": {"lease": "soon"}}, "store.lease"),
        ({"limits": {"max_body": 3}}, "limits.max_body"),
        ({"limits": {"max_body": "1GiB"}}, "limits"),
    ],
)
def test_impossible_values_are_refused_with_their_path(data: object, path: str) -> None:
    """Unknown keys and impossible values name the key."""
    with pytest.raises(ValidationError) as caught:
        HeadstartConfig.model_validate(data)
    found = {".".join(str(part) for part in error["loc"]) for error in caught.value.errors()}
    assert path in found or path.replace(".vllm", "") in found
