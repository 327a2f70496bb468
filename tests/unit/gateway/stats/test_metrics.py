"""GET /metrics."""

from pieces import at_once
from prometheus_client.parser import text_string_to_metric_families

from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import (
    EventGauges,
    Gauges,
    IndexGauges,
    MemoGauges,
    PolicyGauges,
    ReplicaGauges,
    RoutingGauges,
    SideGauges,
    StoreGauges,
    TierGauges,
)
from gateway.accounts.record import FirstToken, Outcome, PromptTokens, RequestRecord
from gateway.stats.metrics import Metrics

STORE = StoreGauges(
    id="store-0",
    incarnation=1,
    uptime_s=9.0,
    engines=["a"],
    capacity_bytes=100,
    used_bytes=50,
    reserved_bytes=10,
    blocks=5,
    leases=1,
    leased_blocks=2,
    lookups=4,
    asked_blocks=40,
    matched_blocks=30,
    loads=3,
    failed_loads=1,
    loaded_tokens=960,
    loaded_bytes=1000,
    stored_blocks=12,
    duplicate_blocks=0,
    orphaned_blocks=0,
    refused_blocks=0,
    expired_leases=0,
    expired_reservations=0,
    evicted_blocks={"capacity": 7},
    tiers=[
        TierGauges(
            name="disk",
            capacity_bytes=1000,
            used_bytes=500,
            blocks=6,
            stored_blocks=8,
            refused_blocks=2,
            written_bytes=4,
            read_bytes=3,
            faults=1,
            evicted_blocks={"capacity": 2},
            latency_s=None,
            bandwidth_bytes_s=10.0,
            breaker="open",
        )
    ],
    policies=PolicyGauges(reloads=3, refused=2, error=None, needs_restart=["store.id"]),
)
GAUGES = Gauges(
    in_flight=3,
    waiting=2,
    loop_lag_s=0.25,
    store=STORE,
    store_events=EventGauges(connected=True, gaps=6),
    index=IndexGauges(blocks=8, used_bytes=80, capacity_bytes=800),
    outcomes=SideGauges(done=4, waiting=1, dropped=2, failed=3),
    memo=MemoGauges(tokens_from_memo=90, tokens_tokenized=10, used_bytes=5),
    replicas={"a": ReplicaGauges(in_flight=1, events=EventGauges(connected=True, lag_s=0.5))},
)


def ended(
    replica: str | None = "a", outcome: Outcome = Outcome.OK, tenant: str = "acme"
) -> RequestRecord:
    return RequestRecord(
        request_id="r-1",
        tenant=tenant,
        model="m",
        replica=replica,
        outcome=outcome,
        status=200,
        stream=True,
        started_at=0.0,
        duration_s=1.0,
        prompt=PromptTokens(1000, 640, 480, 320, 96, 32, 24, 8),
        first_token=FirstToken(0.3, 0.0001, None, 0.2, 0.002),
        output_tokens=5,
        rendering_mismatch=True,
    )


def scrape(*records: RequestRecord, gauges: Gauges = GAUGES) -> dict[str, float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    accounting = Accounting(["a", "b"], model="m", version="1", block_size=32)
    metrics = Metrics()
    for replica in ("a", "b"):
        metrics.add_replica(replica)
    for record in records:
        accounting.record(record)
        metrics.observe(record)
    page = at_once(metrics.exposing(at_once(accounting.snapshot(gauges=gauges))))
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_requests_are_counted_by_outcome_and_replica() -> None:
    """A request that reached no replica has its own label."""
    samples = scrape(ended(), ended(), ended("b", Outcome.ENGINE_ERROR), ended(None))
    assert samples["headstart_requests_total,outcome=ok,replica=a"] == 2
    assert samples["headstart_requests_total,outcome=engine_error,replica=b"] == 1
    assert samples["headstart_requests_total,outcome=ok,replica=none"] == 1


def test_prompt_tokens_by_kind_add_up() -> None:
    """The kinds are the waterfall, so their sum is the prompt."""
    samples = scrape(ended())
    kinds = {
        name.split("kind=")[1].split(",")[0]: value
        for name, value in samples.items()
        if name.startswith("headstart_prompt_tokens_total") and name.endswith("replica=a")
    }
    assert kinds == {
        "never_seen": 360,
        "evicted": 160,
        "elsewhere": 160,
        "not_delivered": 160,
        "device": 96,
        "memory": 32,
        "disk": 24,
        "redis": 8,
    }


def test_ttft_parts_are_histograms() -> None:
    """Unknown parts are not observed."""
    samples = scrape(ended())
    name = "headstart_first_token_seconds"
    assert samples[f"{name}_count,part=total,replica=a"] == 1
    assert samples[f"{name}_sum,part=prefill,replica=a"] == 0.2
    assert samples[f"{name}_bucket,le=0.2,part=prefill,replica=a"] == 1
    assert samples[f"{name}_bucket,le=0.1,part=prefill,replica=a"] == 0
    assert samples[f"{name}_count,part=queue,replica=a"] == 0


def test_state_is_exported_as_gauges() -> None:
    """In flight, waiting, loop lag, store, index, memo, events."""
    samples = scrape()
    assert samples["headstart_requests_in_flight"] == 3
    assert samples["headstart_requests_waiting"] == 2
    assert samples["headstart_event_loop_lag_seconds"] == 0.25
    assert samples["headstart_store_up"] == 1
    assert samples["headstart_store_used_bytes"] == 50
    assert samples["headstart_store_evicted_blocks_total,reason=capacity"] == 7
    assert samples["headstart_index_blocks"] == 8
    assert samples["headstart_rendered_tokens_total,source=memo"] == 90
    assert samples["headstart_events_connected,source=a"] == 1
    assert samples["headstart_events_lag_seconds,source=a"] == 0.5
    assert samples["headstart_events_gaps_total,source=store"] == 6
    assert samples["headstart_store_failed_loads_total"] == 1
    assert "headstart_events_connected,source=b" not in samples


def test_what_is_not_known_is_not_exported() -> None:
    """A store that does not answer is down, not empty."""
    samples = scrape(gauges=Gauges(in_flight=0, waiting=0))
    assert samples["headstart_store_up"] == 0
    assert not [name for name in samples if name.startswith("headstart_store_used")]
    assert "headstart_event_loop_lag_seconds" not in samples


def test_labels_stay_bounded() -> None:
    """Neither tenants nor replicas that are gone make new series."""
    before = scrape(ended())
    after = scrape(*[ended(f"ghost-{i}", tenant=f"tenant-{i}") for i in range(50)], ended())
    assert before.keys() == after.keys()
    assert after["headstart_first_token_seconds_count,part=total,replica=none"] == 0


def test_the_fleet_is_exported() -> None:
    """Each replica's condition, what is known of it, and where requests went."""
    routing = RoutingGauges(
        kind="least_ttft",
        by_evidence={"exact": 7, "fallback": 1},
        by_reason={"its turn": 8},
        retries={"EngineLostError": 2},
        joined=3,
        recent=[],
    )
    state = ReplicaGauges(
        condition="ejected", ejections=4, share=0.5, evidence="approximate", kv_free=0.25
    )
    gauges = GAUGES.model_copy(
        update={
            "routing": routing,
            "replicas": {"a": state},
            "remote_stores": {"store-1": EventGauges(connected=True)},
        }
    )
    samples = scrape(gauges=gauges)
    assert samples["headstart_replica_condition,condition=ejected,replica=a"] == 1
    assert samples["headstart_replica_condition,condition=ready,replica=a"] == 0
    assert samples["headstart_replica_exact,replica=a"] == 0
    assert samples["headstart_replica_ejections_total,replica=a"] == 4
    assert samples["headstart_replica_kv_free_ratio,replica=a"] == 0.25
    assert samples["headstart_routing_decisions_total,evidence=exact"] == 7
    assert samples["headstart_routing_retries_total,error=EngineLostError"] == 2
    assert samples["headstart_routing_joined_total"] == 3
    assert samples["headstart_events_connected,source=store-1"] == 1


def test_the_series_of_a_removed_replica_end() -> None:
    """And nothing else jumps."""
    accounting = Accounting(["a"], model="m", version="1", block_size=32)
    metrics = Metrics()
    metrics.add_replica("a")
    metrics.observe(ended())
    accounting.record(ended())
    metrics.remove_replica("a")
    accounting.remove_replica("a")
    stats = at_once(accounting.snapshot(gauges=Gauges(in_flight=0, waiting=0)))
    page = at_once(metrics.exposing(stats)).decode()
    assert 'replica="a"' not in page
    assert 'headstart_requests_total{outcome="ok",replica="none"} 0.0' in page


def test_two_instances_share_nothing() -> None:
    """No global registry: tests and several gateways in one process do not clash."""
    assert scrape(ended())["headstart_hit_requests_total,replica=a"] == 1
    assert scrape()["headstart_hit_requests_total,replica=a"] == 0


def test_tiers_below_memory_are_exported_by_name() -> None:
    """What was not measured yet has no sample."""
    samples = scrape()
    tier = "tier=disk"
    assert samples[f"headstart_store_tier_used_bytes,{tier}"] == 500
    assert samples[f"headstart_store_tier_up,{tier}"] == 0
    assert samples[f"headstart_store_tier_bytes_per_second,{tier}"] == 10
    assert samples[f"headstart_store_tier_refused_blocks_total,{tier}"] == 2
    assert samples[f"headstart_store_tier_evicted_blocks_total,reason=capacity,{tier}"] == 2
    assert f"headstart_store_tier_latency_seconds,{tier}" not in samples


def test_work_beside_the_requests_is_exported() -> None:
    """Of what there is: no request log here."""
    samples = scrape()
    assert samples["headstart_side_work_total,kind=outcomes,result=failed"] == 3
    assert not any("request_log" in name for name in samples)


def test_it_is_seen_when_the_newest_configuration_is_not_in_force() -> None:
    """Refused, or waiting for a restart as here."""
    samples = scrape()
    assert samples["headstart_store_policies_current"] == 0
    assert samples["headstart_store_policy_reloads_total,result=taken"] == 3
    assert samples["headstart_store_policy_reloads_total,result=refused"] == 2
