"""Prometheus families by our naming."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Without samples yet; its name ends with _total when it is exposed."""
    return CounterMetricFamily(f"headstart_{name}", text, labels=labels)


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """One value."""
    return GaugeMetricFamily(f"headstart_{name}", text, value=value)


def gauges(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Without samples yet."""
    return GaugeMetricFamily(f"headstart_{name}", text, labels=labels)
