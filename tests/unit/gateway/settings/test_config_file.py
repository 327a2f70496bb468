"""Mistakes in headstart.yaml are named with line, key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gateway.settings.config_file import (
    MAX_BYTES,
    ConfigError,
    find_config,
    load_config,
    parse_config,
)
from policies.config import HeadstartConfig
from policies.eviction import Eviction

EVICTIONS = ", ".join(
    sorted(kind.model_fields["kind"].default for kind in get_args(get_args(Eviction)[0]))
)


def errors(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="f")
    return str(caught.value).splitlines()


MISTAKES = {
    "typo": (
        "store:\n  memory:\n    capcity: 4GiB\n",
        'f line 3: store.memory.capcity: unknown key; did you mean "capacity"?',
    ),
    "unknown key far from any": (
        "tenants: {acme: {key_file: k, zzz: 1}}",
        "f line 1: tenants.acme.zzz: unknown key; known here: key_file",
    ),
    "in a list": (
        "engines:\n  - id: a\n  - id: b\n    block_sise: 3\n",
        'f line 4: engines[1].block_sise: unknown key; did you mean "block_size"?',
    ),
    "below a policy": (
        "store: {memory: {eviction: {kind: lru, ways: 4}}}",
        "f line 1: store.memory.eviction.ways: unknown key; known here: kind",
    ),
    "below a policy of another kind": (
        "store: {memory: {eviction: {kind: s3_fifo, ways: 4}}}",
        "f line 1: store.memory.eviction.ways: unknown key; known here: kind, small",
    ),
    "unknown policy": (
        "store:\n memory:\n  eviction:\n   kind: lfuu\n",
        f"f line 4: store.memory.eviction.kind: 'lfuu' is unknown; use one of: {EVICTIONS}",
    ),
    "policy without kind": (
        "store: {memory: {eviction: {}}}",
        f"f line 1: store.memory.eviction.kind: is missing; use one of: {EVICTIONS}",
    ),
    "wrong type": (
        "engines: [{block_size: many}]",
        "f line 1: engines[0].block_size: must be a whole number, not 'many'",
    ),
    "out of range": (
        "limits:\n  max_concurrent_requests: 0\n",
        "f line 2: limits.max_concurrent_requests: must be at least 1, not 0",
    ),
    "size": (
        "store: {memory: {capacity: 4 Gigs}}",
        "f line 1: store.memory.capacity: must be a size such as 512MiB or 4GiB, not '4 Gigs'",
    ),
    "duration": (
        "store: {lease: 1y}",
        "f line 1: store.lease: '1y' is not a duration; write 250ms, 30s, 5m, 1h or 2d",
    ),
    "missing": ("tenants: {acme: {}}", "f line 1: tenants.acme.key_file: is missing"),
    "scalar for a mapping": (
        "model: smollm",
        "f line 1: model: must be a mapping of keys to values, not 'smollm'",
    ),
    "mapping for a list": (
        "engines: {url: 1}",
        "f line 1: engines: must be a list, not {'url': 1}",
    ),
    "empty list": ("engines: []", "f line 1: engines: needs at least 1 entry, not []"),
    "same id twice": (
        "engines: [{id: a}, {id: a}]",
        "f line 1: the file: engines: the id 'a' stands twice; ids must differ",
    ),
    "key twice": (
        "listen: a:1\nstore: {}\nlisten: b:2\n",
        "f line 3: listen: stands twice (first in line 1); remove one",
    ),
    "key twice inside": (
        "store:\n  lease: 1s\n  lease: 2s\n",
        "f line 3: store.lease: stands twice (first in line 2); remove one",
    ),
    "not yaml": ("store: [1", "f line 1: not valid YAML: expected ',' or ']'"),
    "disk without a path": (
        "store:\n  disk:\n    capacity: 1GiB\n",
        "f line 2: store.disk.path: is missing",
    ),
    "disk with an empty path": (
        "store:\n  disk:\n    path: ''\n",
        "f line 3: store.disk.path: must be text that is not empty, not ''",
    ),
    "when to write": (
        "store:\n  disk:\n    path: /a\n    write: always\n",
        "f line 4: store.disk.write: must be 'on_eviction' or 'on_save', not 'always'",
    ),
    "no redis url": (
        "store:\n  redis:\n    url: http://u:secret@h\n",
        "f line 3: store.redis.url: not a Redis URL, such as redis://127.0.0.1:6379/0, rediss://,",
    ),
    "redis database by name": (
        "store:\n  redis:\n    url: redis://h:6379/one\n",
        "f line 3: store.redis.url: not a Redis URL",
    ),
    "duration out of range": (
        "store: {redis: {timeout: 1m}}",
        "f line 1: store.redis.timeout: must be at most 10s, not '1m'",
    ),
    "size out of range": (
        "store:\n  memory:\n    capacity: 4KiB\n",
        "f line 3: store.memory.capacity: must be at least 1MiB, not '4KiB'",
    ),
    "pins larger than the tier": (
        "store:\n  disk:\n    path: /a\n    capacity: 1GiB\n    pin_budget: 2GiB\n",
        "f line 2: store.disk: pin_budget is larger than capacity",
    ),
    "pin without ttl": (
        "store:\n  retention:\n    - {ttl: 1h}\n    - match: {tenant: a}\n      pin: true\n",
        "f line 4: store.retention[1]: pin needs a ttl: pins that never end",
    ),
    "rule that says nothing": (
        "store: {retention: [{match: {tenant: a}}]}",
        "f line 1: store.retention[0]: the rule says nothing: give ttl, priority or pin",
    ),
    "typo in a match": (
        "store:\n  retention:\n    - ttl: 1h\n      match:\n        tenants: a\n",
        'f line 5: store.retention[0].match.tenants: unknown key; did you mean "tenant"?',
    ),
    "rule without a list": (
        "store: {retention: {ttl: 1h}}",
        "f line 1: store.retention: must be a list, not {'ttl': '1h'}",
    ),
    "unknown loading": (
        "store:\n  loading:\n    kind: fastest\n",
        "f line 3: store.loading.kind: 'fastest' is unknown; use one of: always, "
        "faster_than_recompute, never",
    ),
    "unknown admission": (
        "store:\n  memory:\n    admission:\n      kind: secnd_use\n",
        "f line 4: store.memory.admission.kind: 'secnd_use' is unknown; use one of: always, "
        "min_tokens, never, second_use",
    ),
    "unknown admission in a list": (
        "store:\n  memory:\n    admission:\n      - {kind: always}\n      - kind: min_token\n",
        "f line 5: store.memory.admission[1].kind: 'min_token' is unknown; use one of: always",
    ),
    "typo in an admission": (
        "store: {memory: {admission: {kind: second_use, rember: 4}}}",
        'f line 1: store.memory.admission.rember: unknown key; did you mean "remember"?',
    ),
    "typo in an admission in a list": (
        "store:\n  memory:\n    admission:\n      - kind: second_use\n        rember: 4\n",
        'f line 5: store.memory.admission[0].rember: unknown key; did you mean "remember"?',
    ),
    "admission out of range in a list": (
        "store: {memory: {admission: [{kind: second_use, remember: 20000000}]}}",
        "f line 1: store.memory.admission[0].remember: must be at most 10,000,000, not 20000000",
    ),
    "admission without kind": (
        "store: {memory: {admission: {}}}",
        "f line 1: store.memory.admission.kind: is missing; use one of: always",
    ),
    "no admission": (
        "store: {memory: {admission: []}}",
        "f line 1: store.memory.admission: needs at least 1 entry, not []",
    ),
    "kind without its key": (
        "store: {memory: {admission: [second_use]}}",
        "f line 1: store.memory.admission[0]: needs a kind: write {kind: second_use}, not 's",
    ),
    "unknown kind without its key": (
        "store:\n  memory:\n    eviction: lfu\n",
        "f line 3: store.memory.eviction: needs a kind: write {kind: arc}, not 'lfu'",
    ),
    "engine as text": (
        "engines: [vllm]",
        "f line 1: engines[0]: must be a mapping of keys to values, not 'vllm'",
    ),
    "python object": (
        "listen: !!python/object/apply:os.system [x]",
        "f line 1: not valid YAML: could not determine a constructor",
    ),
    "no mapping": ("- 1", "f: must be a mapping of keys to values"),
    "refers to itself": ("a: &x [*x]", "f line 1: refers to itself"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence_with_its_place(name: str) -> None:
    """Line, full key, and what would be right."""
    text, sentence = MISTAKES[name]
    found = errors(text)
    assert len(found) == 1
    assert found[0].startswith(sentence)


def test_all_mistakes_come_at_once_in_the_order_of_the_file() -> None:
    """Nobody has to start five times to find five typos."""
    text = "listen: 8080\nlimits:\n  max_body: x\n  max_wait: -1\nstoer: {}\n"
    assert [line.split(":")[0] for line in errors(text)] == [f"f line {n}" for n in (1, 3, 4, 5)]


def test_wrong_entries_of_a_list_are_not_also_called_too_few() -> None:
    """Only what is to be mended is said."""
    assert len(errors("engines: [{url: x}]")) == 1


def test_values_arrive_in_the_model() -> None:
    """Sizes, durations and lists are read as documented."""
    config = parse_config(
        "store: {memory: {capacity: 4GiB}, lease: 1m}\nengines: [{id: a}, {id: b}]\n", source="f"
    )
    assert config.store is not None
    assert config.store.memory.capacity == 4 * 2**30
    assert config.store.lease == 60.0
    assert [engine.id for engine in config.engines] == ["a", "b"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_empty_file_gives_the_defaults(text: str) -> None:
    """Every key has a default."""
    assert parse_config(text, source="f") == HeadstartConfig()


def test_own_dump_can_be_read_again() -> None:
    """Children get the configuration as JSON, which is YAML."""
    config = HeadstartConfig(listen="127.0.0.1:1234")
    assert parse_config(config.model_dump_json(), source="f") == config


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """A wrong --config is one sentence."""
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"listen: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text \(byte 8\)"):
        load_config(tmp_path / "latin.yaml")
    (tmp_path / "big.yaml").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_config(tmp_path / "big.yaml")


def test_default_file_is_used_only_where_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--config wins, then ./headstart.yaml, then the built-in defaults."""
    monkeypatch.chdir(tmp_path)
    assert find_config(None) is None
    assert load_config(None) == HeadstartConfig()
    Path("headstart.yaml").write_text("{}")
    assert find_config(None) == Path("headstart.yaml")
    assert find_config("other.yaml") == Path("other.yaml")
