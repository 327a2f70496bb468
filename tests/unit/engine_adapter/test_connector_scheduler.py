"""The connector's scheduling half against a real store: what is leased is released, what is not
exactly the block is a miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.connector_scheduler import SchedulerHalf
from engine_adapter.loaded_adapters import LoadedAdapters
from prefix_store.base import Namespace
from prefix_store.client import StoreClient
from prefix_store.hashing import as_token_ids, extend_chain, namespace_root
from prefix_store.link import StoreLink
from prefix_store.prompt_label import PromptLabel
from prefix_store.record import RecordShape, seal, write_header

NAMESPACE = Namespace("w", "", "bf16", "c", "bf16", "l", 4, 0, 1)
SHAPE = RecordShape(4, 256)


@dataclass
class FakeRequest:
    """The fields of vLLM's Request that the connector reads."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = "salt"
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class FakeStep:
    """The fields of vLLM's SchedulerOutput that the connector reads."""

    num_scheduled_tokens: dict[str, int]
    block_ids: list[int]

    @property
    def kv_connector_block_state(self) -> FakeStep:
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.block_ids,)


class FakeAdapters(LoadedAdapters):
    """A request's `lora_request` is the digest of its adapter, which may change."""

    def __init__(self) -> None:
        super().__init__(0)
        self.now: dict[str, str | None] = {}

    def identity(self, lora: Any) -> str | None:
        if lora is None:
            return ""
        digest = self.now.get(lora, lora)
        return None if digest is None else f"{digest}/bf16"


class Setting:
    """A store with the blocks of tokens 0..15, a linked scheduler half."""

    def __init__(self, socket: Path) -> None:
        self.link = StoreLink(socket, "engine-0/scheduler")
        self.link.wait_first_try(10)
        self.half = SchedulerHalf(self.link, 4, FakeAdapters(), model="m")
        self.half.introduce(NAMESPACE, SHAPE)
        self.client = StoreClient.connect(socket, timeout_s=5)
        self.root = namespace_root(NAMESPACE, "salt")
        tokens = as_token_ids(range(16))
        self.hashes = extend_chain(self.root, tokens, 4)
        reserved = self.client.reserve(self.root, True, self.hashes, SHAPE.num_bytes)
        places = [place for place in reserved.places if place is not None]
        self.offsets = [place.offset for place in places]
        for i, offset in enumerate(self.offsets):
            record = self.client.arena.view[offset : offset + SHAPE.num_bytes]
            parent = self.hashes[i - 1] if i else self.root
            write_header(record, self.hashes[i], parent, tokens[4 * i : 4 * i + 4].tobytes(), SHAPE)
            seal(record, self.hashes[i], SHAPE)
        self.client.commit([place.ticket for place in places], "salt")

    def stats(self) -> Any:
        """On the half's own connection: what it said before has been heard then."""
        client = self.link.client()
        assert client is not None
        return client.stats()

    def leases(self) -> int:
        return int(self.stats().leases)


@pytest.fixture
def setting(start_store: Callable[[], Any]) -> Any:
    made = Setting(start_store().socket)
    yield made
    made.client.close()
    made.link.close()


def test_a_prompt_of_whole_blocks_leaves_the_last_one_to_compute(setting: Any) -> None:
    """At least one token is always computed by the engine."""
    assert setting.half.num_matched_tokens(FakeRequest("a", list(range(16))), 0) == 12
    assert setting.half.num_matched_tokens(FakeRequest("b", list(range(17))), 0) == 16
    assert setting.half.num_matched_tokens(FakeRequest("c", list(range(17))), 8) == 8
    assert setting.half.num_matched_tokens(FakeRequest("d", list(range(17))), 16) == 0


def test_asking_again_and_again_takes_one_lease(setting: Any) -> None:
    """A request that cannot be scheduled is asked about at every step."""
    request = FakeRequest("a", list(range(17)))
    assert [setting.half.num_matched_tokens(request, 0) for _ in range(20)] == [16] * 20
    assert setting.leases() == 1
    assert setting.half.num_matched_tokens(request, 4) == 12
    assert setting.leases() == 1
    setting.half.finished(request)
    assert setting.leases() == 0


def test_a_load_that_the_scheduler_refuses_gives_its_lease_back(setting: Any) -> None:
    """No external tokens were taken."""
    request = FakeRequest("a", list(range(17)))
    setting.half.num_matched_tokens(request, 0)
    setting.half.allocated(request, [1, 2, 3, 4, 5], 0)
    assert setting.leases() == 0
    assert setting.half.orders(FakeStep({}, [])).loads == []


def test_a_load_order_names_blocks_records_and_lease(setting: Any) -> None:
    """Beyond what the engine has itself."""
    request = FakeRequest("a", list(range(17)))
    request.kv_transfer_params = {"headstart.request_id": "ours"}
    assert setting.half.num_matched_tokens(request, 4) == 12
    setting.half.allocated(request, [10, 11, 12, 13, 14], 12)
    (order,) = setting.half.orders(FakeStep({}, [])).loads
    assert (order.request_id, order.report_id) == ("a", "ours")
    assert order.block_ids == [11, 12, 13]
    assert order.offsets == setting.offsets[1:]
    assert order.hashes == setting.hashes[1:]
    assert setting.half.orders(FakeStep({}, [])).loads == []


def test_a_step_that_computes_nothing_says_so(setting: Any, tmp_path: Path) -> None:
    """With a store and without one."""
    link = StoreLink(tmp_path / "none", "engine-0/scheduler")
    for half in (setting.half, SchedulerHalf(link, 4, FakeAdapters())):
        assert half.orders(FakeStep({}, [])).is_idle
        assert not half.orders(FakeStep({"a": 1}, [0])).is_idle
    link.close()


def test_other_salts_and_images_are_misses(setting: Any) -> None:
    """What is not keyed by these token ids and this salt alone is not loaded."""
    assert setting.half.num_matched_tokens(FakeRequest("a", list(range(17)), "other"), 0) == 0
    assert setting.half.num_matched_tokens(FakeRequest("b", list(range(17)), None), 0) == 0
    image = FakeRequest("c", list(range(17)), mm_features=[object()])
    assert setting.half.num_matched_tokens(image, 0) == 0


def test_a_record_with_other_tokens_is_a_miss_and_is_dropped(setting: Any) -> None:
    """A hash collision, or a record that somebody overwrote."""
    setting.client.arena.view[setting.offsets[2] + 64] ^= 1
    request = FakeRequest("a", list(range(17)))
    assert setting.half.num_matched_tokens(request, 0) == 8
    assert setting.stats().evictions == {"corrupt": 2}


def test_only_known_and_computed_tokens_are_saved_and_only_once(setting: Any) -> None:
    """Draft tokens and placeholders of an asynchronous scheduler are not."""
    request = FakeRequest("a", [*range(16), 50, 51, 52, 53, 60])
    setting.half.num_matched_tokens(request, 0)
    setting.half.allocated(request, [1, 2, 3, 4, 5, 6], 16)
    request.num_computed_tokens = 16
    assert setting.half.orders(FakeStep({"a": 3}, [1, 2, 3, 4, 5, 6])).saves == []
    (save,) = setting.half.orders(FakeStep({"a": 9}, [1, 2, 3, 4, 5, 6])).saves
    assert (save.block_ids, save.parent, save.is_root) == ([5], setting.hashes[-1], False)
    assert save.tokens == [as_token_ids([50, 51, 52, 53]).tobytes()]
    assert setting.half.orders(FakeStep({"a": 9}, [1, 2, 3, 4, 5, 6])).saves == []


def test_placeholder_blocks_are_never_saved(setting: Any) -> None:
    """Block 0 stands for what the engine did not keep."""
    request = FakeRequest("a", list(range(100, 117)))
    setting.half.num_matched_tokens(request, 0)
    assert setting.half.orders(FakeStep({"a": 17}, [0, 0, 3, 4, 5])).saves == []
    (save,) = setting.half.orders(FakeStep({"a": 17}, [1, 2, 3, 4, 5])).saves
    assert save.block_ids == [1, 2, 3, 4]


def test_a_failed_load_is_not_tried_again_and_is_saved_again(setting: Any) -> None:
    """The engine computes from the first bad block on."""
    request = FakeRequest("a", list(range(17)))
    setting.half.num_matched_tokens(request, 0)
    setting.half.allocated(request, [1, 2, 3, 4, 5], 16)
    setting.half.orders(FakeStep({}, []))
    setting.client.drop(setting.hashes[2])  # as the worker does with a damaged block
    setting.client.stats()  # the answer says that it was heard
    setting.half.loaded({"a"}, {3, 4})
    assert setting.half.num_matched_tokens(request, 8) == 0
    request.num_computed_tokens = 8
    (save,) = setting.half.orders(FakeStep({"a": 9}, [1, 2, 3, 4, 5])).saves
    assert save.block_ids == [3, 4]


def test_without_a_store_everything_is_a_miss(tmp_path: Path) -> None:
    """And nothing waits."""
    link = StoreLink(tmp_path / "none.sock", "engine-0/scheduler")
    half = SchedulerHalf(link, 4, LoadedAdapters(0))
    half.introduce(NAMESPACE, SHAPE)
    request = FakeRequest("a", list(range(17)))
    assert half.num_matched_tokens(request, 0) == 0
    half.allocated(request, [1], 0)
    assert half.orders(FakeStep({"a": 17}, [1])).saves == []
    half.finished(request)
    link.close()


def save_of(setting: Any, request: FakeRequest) -> Any:
    """What the step that computes the prompt has saved."""
    step = FakeStep({request.request_id: request.num_tokens}, [1, 2, 3, 4, 5])
    saves = setting.half.orders(step).saves
    return saves[0] if saves else None


def test_adapters_and_the_base_model_are_kept_apart(setting: Any) -> None:
    """The blocks that are there are the base model's. An adapter has a root of its own, which its
    blocks are saved under, and events will say which one it is."""
    request = FakeRequest("a", list(range(17)), lora_request="x")
    assert setting.half.num_matched_tokens(request, 0) == 0
    save = save_of(setting, request)
    adapted = replace(NAMESPACE, adapter="x/bf16")
    assert save.parent == namespace_root(adapted, "salt")
    assert save.hashes == extend_chain(save.parent, as_token_ids(range(16)), 4)
    assert PromptLabel.decode(save.salt) == PromptLabel("salt", "x", "m")
    other = FakeRequest("b", list(range(17)), lora_request="y")
    assert setting.half.num_matched_tokens(other, 0) == 0
    assert save_of(setting, other).parent not in (save.parent, setting.root)
    plain = FakeRequest("c", list(range(17)))
    assert setting.half.num_matched_tokens(plain, 0) == 16


def test_an_adapter_that_is_uncertain_has_no_store(setting: Any) -> None:
    """Neither look-up nor save."""
    setting.half._adapters.now["x"] = None
    request = FakeRequest("a", list(range(17)), lora_request="x")
    assert setting.half.num_matched_tokens(request, 0) == 0
    assert save_of(setting, request) is None


def test_an_adapter_that_changes_under_a_request_ends_its_saving(setting: Any) -> None:
    """What the engine computes from now on may be the new one's."""
    request = FakeRequest("a", list(range(17)), lora_request="x")
    setting.half.num_matched_tokens(request, 0)
    setting.half._adapters.now["x"] = None
    assert save_of(setting, request) is None
    assert setting.half.num_matched_tokens(request, 0) == 0


def test_an_adapter_that_changes_before_the_load_gives_the_lease_back(setting: Any) -> None:
    """A request may wait for long."""
    setting.half._adapters.now["x"] = ""
    setting.half._namespace = replace(NAMESPACE, adapter="")
    request = FakeRequest("a", list(range(17)), lora_request="x")
    first = FakeRequest("b", list(range(17)))
    assert setting.half.num_matched_tokens(first, 0) == 16
    setting.half._tracked["a"] = setting.half._tracked.pop("b")
    setting.half._tracked["a"].request = request
    assert setting.leases() == 1
    assert setting.half.num_matched_tokens(request, 0) == 0
    assert setting.leases() == 0
