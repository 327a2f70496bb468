"""The doctor's checks of one engine: reachable, right model, right flags, right version."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine_adapter.vllm_build import TESTED_VLLM, is_tested
from gateway.doctor.finding import Finding, fail, ok, warn
from gateway.local.local_http import HttpError, is_healthy, request
from policies.config import HeadstartConfig, ModelConfig
from policies.engine import EngineConfig
from prefix_store.runtime_dir import RuntimePaths

DOCTOR_SALT = "headstart-doctor"
RESTART = "start the engine with `headstart engine`, or add"


@dataclass(frozen=True, slots=True)
class EngineDoctor:
    """Asks one engine over HTTP."""

    config: HeadstartConfig
    engine: EngineConfig
    paths: RuntimePaths

    @property
    def model(self) -> ModelConfig:
        """The one that the engine should serve."""
        return self.config.model_of(self.engine)

    def is_reachable(self) -> Finding:
        """Its health and its version."""
        name, url = f"{self.engine.id} reachable", self.engine.url
        if not is_healthy(f"{url}/health"):
            return fail(
                name,
                f"no healthy engine at {url}; start it with `headstart engine --id "
                f"{self.engine.id}` or mend engines[].url",
            )
        try:
            version = str(request(f"{url}/version").json()["version"])
        except (HttpError, LookupError, TypeError) as error:
            return fail(name, f"{url} is not vLLM ({error}); mend engines[].url")
        if not is_tested(version):
            tried = ", ".join(TESTED_VLLM)
            return warn(
                name, f"vLLM {version} was never tried with this Headstart (tried: {tried})"
            )
        return ok(name, f"vLLM {version} at {url}")

    def serves_model(self) -> Finding:
        """Under the configured name, with the configured context length and adapters."""
        name = f"{self.engine.id} model"
        try:
            cards = request(f"{self.engine.url}/v1/models").json()["data"]
            lengths = {str(card["id"]): card.get("max_model_len") for card in cards}
        except (HttpError, LookupError, TypeError) as error:
            return fail(name, f"the models cannot be listed: {error}")
        wanted = self.model
        if wanted.name not in lengths:
            return fail(
                name,
                f"serves {', '.join(lengths)}, not {wanted.name}; mend model.name or {RESTART} "
                f"--served-model-name {wanted.name}",
            )
        missing = [each.name for each in self.engine.adapters if each.name not in lengths]
        if missing:
            return fail(
                name,
                f"does not serve the adapter {missing[0]}; mend engines[].adapters or {RESTART} "
                f"--lora-modules {missing[0]}=DIR",
            )
        length = lengths[wanted.name]
        if length is not None and length != wanted.max_model_len:
            return warn(
                name,
                f"its context is {length} tokens, model.max_model_len says {wanted.max_model_len}",
            )
        return ok(name, f"{wanted.name}, context of {length} tokens")

    def announces_events(self) -> Finding:
        """KV events are on and go where the gateway listens."""
        name = f"{self.engine.id} events configured"
        try:
            sources = request(f"{self.engine.url}/kv_event_sources").json()
        except HttpError as error:
            return fail(name, f"no KV events ({error}); {RESTART} --kv-events-config")
        source = next(iter(sources.values()), None) if isinstance(sources, dict) else None
        if not source or not source.get("enable_kv_cache_events"):
            return fail(name, f"KV events are off; {RESTART} --kv-events-config")
        wanted = (self.paths.engine_events(self.engine), self.paths.engine_replay(self.engine))
        actual = (source.get("endpoint"), source.get("replay_endpoint"))
        if actual[1] is None:
            return fail(name, f"no replay endpoint; {RESTART} replay_endpoint to its events")
        if actual != wanted:
            return warn(
                name,
                f"the engine says {actual[0]} and {actual[1]}, the gateway uses {wanted[0]} and "
                f"{wanted[1]}: right only when both name the same place; else mend events and "
                "events_replay",
            )
        return ok(name, f"published on {actual[0]}")

    def reports_usage(self, body: dict[str, Any]) -> Iterator[Finding]:
        """One small request shows which flags are on."""
        name = f"{self.engine.id} flags"
        try:
            answer = request(f"{self.engine.url}/v1/completions", body, timeout_s=60.0).json()
        except HttpError as error:
            yield fail(name, f"a small request failed: {error}")
            return
        details = (answer.get("usage") or {}).get("prompt_tokens_details")
        if details is None:
            yield fail(name, f"reuse is not reported; {RESTART} --enable-prompt-tokens-details")
        else:
            yield ok(name, "reused tokens are reported in usage")
        if answer.get("metrics") is None:
            yield warn(
                name,
                "queue and prefill times are unknown, so savings are too; "
                f"{RESTART} --enable-per-request-metrics",
            )
        else:
            yield ok(name, "queue and prefill times are reported")

    def has_connector(self) -> Finding:
        """Its metrics know an external prefix cache as soon as a connector was asked."""
        name = f"{self.engine.id} connector loaded"
        try:
            text = request(f"{self.engine.url}/metrics").body.decode("utf-8", errors="replace")
        except HttpError as error:
            return warn(name, f"the metrics cannot be read: {error}")
        for line in text.splitlines():
            if line.startswith("vllm:external_prefix_cache_queries_total"):
                if float(line.rpartition(" ")[2]) > 0:
                    return ok(name, "the engine asks it for stored blocks")
                break
        return fail(name, f"the engine never asked a connector; {RESTART} --kv-transfer-config")


def probe_body(model: str, block_size: int) -> dict[str, Any]:
    """A request of three blocks and a bit that nobody sent before, for one token."""
    # One number is about 4 tokens with any tokenizer; more than enough for three full blocks.
    words = " ".join(str(1000 + n) for n in range(block_size))
    return {
        "model": model,
        "prompt": f"Headstart doctor {uuid.uuid4()}: {words}",
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": DOCTOR_SALT,
    }
