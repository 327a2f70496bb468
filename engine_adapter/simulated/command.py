"""The command line of the simulated engines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import uvloop

from engine_adapter.simulated.engine import SimulatedEngine, running
from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.timing import StepTiming
from engine_adapter.simulated.words import HashedWords, Words
from prefix_store.event_publisher import EndpointInUseError

GARBAGE_OBJECTS = 50_000
"""New objects between two looks for garbage."""

_DEFAULTS = SimulationOptions(model="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM; the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        ports = [int(port) for port in parsed.ports.split(",")]
        options = [_options(parsed, port, index) for index, port in enumerate(ports)]
    except ValueError as error:
        sys.stderr.write(f"simulated engines: {error}\n")
        return 2
    status = 0
    # Blocks live long and are many; looking through them for garbage would stop the clock.
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 50, 100)
    try:
        uvloop.run(_serve(parsed.url_host, ports, options))
    except* (OSError, EndpointInUseError) as errors:
        sys.stderr.write(f"simulated engines: {errors.exceptions[0]}\n")
        status = 1
    return status


async def _serve(host: str, ports: Sequence[int], options: Sequence[SimulationOptions]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with contextlib.closing(words_for(options[0])) as words:
        engines = [
            SimulatedEngine(each, words, host=host, port=port)
            for each, port in zip(options, ports, strict=True)
        ]
        async with running(engines):
            sys.stdout.write(f"simulated engines: {' '.join(each.url for each in engines)}\n")
            sys.stdout.flush()
            await stop.wait()


def words_for(options: SimulationOptions) -> Words:
    """Token ids as these options want them. Raises RenderingError for a model without a tokenizer
    that can be used."""
    if options.model_path is None:
        return HashedWords()
    # Loads transformers, which scale tests do without.
    from engine_adapter.simulated.tokenizer import TokenizedWords  # noqa: PLC0415

    return TokenizedWords.load(options.model_path, block_size=options.block_size)


def _options(parsed: argparse.Namespace, port: int, index: int) -> SimulationOptions:
    def endpoint(template: str | None) -> str | None:
        return None if template is None else template.format(port=port, index=index)

    timing = {field.name: getattr(parsed, field.name) for field in fields(StepTiming)}
    return SimulationOptions(
        model=parsed.model,
        adapters=tuple(parsed.adapters.split(",")) if parsed.adapters else (),
        block_size=parsed.block_size,
        kv_tokens=parsed.kv_tokens,
        max_model_len=parsed.max_model_len,
        max_batched_tokens=parsed.max_num_batched_tokens,
        max_sequences=parsed.max_num_seqs,
        tokens_per_wire_token=parsed.tokens_per_wire_token,
        by_priority=parsed.scheduling_policy == "priority",
        timing=StepTiming(**timing),
        speed=parsed.speed,
        seed=parsed.seed,
        min_chunk_s=parsed.min_chunk_ms / 1000.0,
        answer_tokens=parsed.answer_tokens,
        events=endpoint(parsed.events),
        replay=endpoint(parsed.replay),
        replay_bytes=parsed.replay_bytes,
        model_path=parsed.model_path,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.simulated",
        description="Simulated engines, for scale tests only: vLLM's protocol without a model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, old = parser.add_argument, _DEFAULTS
    add("--url-host", default="127.0.0.1", help="address to listen on")
    add("--ports", required=True, help="one replica each, separated by commas")
    add("--model", required=True, help="served model name")
    add("--adapters", default="", help="names of LoRA adapters, separated by commas")
    add("--model-path", type=Path, help="directory of a model whose tokenizer is used")
    add("--events", help="endpoint of the KV events; {port} and {index} are filled in")
    add("--replay", help="endpoint of their replay")
    add("--replay-bytes", type=int, default=old.replay_bytes, help="bound of the replay buffer")
    add("--seed", type=int, default=old.seed, help="of the answers")
    add("--speed", type=float, default=old.speed, help="simulated seconds in a real second")
    add("--min-chunk-ms", type=float, default=0.0, help="real time between pieces of a stream")
    add("--answer-tokens", type=int, default=old.answer_tokens, help="mean without max_tokens")
    add("--block-size", type=int, default=old.block_size, help="tokens on the wire")
    add("--kv-tokens", type=int, default=old.kv_tokens, help="tokens of KV that fit")
    add("--max-model-len", type=int, default=old.max_model_len, help="tokens on the wire")
    add("--max-num-batched-tokens", type=int, default=old.max_batched_tokens, help="in a step")
    add("--max-num-seqs", type=int, default=old.max_sequences, help="in a step")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="as of vLLM")
    add("--tokens-per-wire-token", type=int, default=1, help="in time and memory")
    for field in fields(StepTiming):
        flag = "--" + field.name.removesuffix("_s").replace("_", "-") + "-s"
        add(flag, dest=field.name, type=float, default=field.default, help="seconds")
    return parser
