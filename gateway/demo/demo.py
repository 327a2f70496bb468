"""`headstart demo`: store, engine and gateway on this machine, and a conversation that reuses."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from engine_adapter.launcher import port_is_free
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import with_model
from gateway.demo.conversation import (
    FIRST_CUSTOMER,
    SECOND_CUSTOMER,
    Conversations,
    Turn,
    system_prompt,
)
from gateway.demo.request import Measured, full_block_tokens, measure
from gateway.demo.table import DemoResult, table
from gateway.local.children import Child, Children, ChildSpec
from gateway.local.local_http import is_healthy
from gateway.local.stack import Stack
from gateway.settings.config_file import load_config
from gateway.settings.user_dirs import state_dir
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig, StoreConfig
from prefix_store.base import StoreError
from prefix_store.client import StoreClient
from prefix_store.protocol import StoreStats

HOST = "127.0.0.1"
GATEWAY_READY_S = 60.0
SAVED_WITHIN_S = 30.0


def run(args: argparse.Namespace) -> int:
    """Show it; with --exit the code is 0 only if every reuse really happened."""
    build = installed_build()
    base = load_config(Path(args.config) if args.config else None)
    config = with_model(base)
    console = Console()
    with runtime_dir() as directory:
        config = demo_config(config, directory)
        notice = console.print
        demo = Demo(Stack(config, build, state_dir() / "demo-logs", notice), console)
        try:
            return asyncio.run(demo.run(keep_serving=not args.exit))
        except asyncio.CancelledError:
            console.print("stopped before it was done")
            return 128 + signal.SIGINT


def demo_config(config: HeadstartConfig, directory: Path) -> HeadstartConfig:
    """One engine and a store, on free ports and with sockets of their own."""
    engine = config.engines[0].model_copy(
        update={"url": f"http://{HOST}:{free_port(8000)}", "events": None, "events_replay": None}
    )
    store = config.store or StoreConfig()
    store = store.model_copy(update={"socket": None, "events": None, "events_replay": None})
    return config.model_copy(
        update={
            "listen": f"{HOST}:{free_port(8080)}",
            "engines": (engine,),
            "store": store,
            "tenants": {},
            "runtime_dir": str(directory),
        }
    )


def free_port(preferred: int) -> int:
    """The usual port where nothing listens, else any free one."""
    if port_is_free(HOST, preferred):
        return preferred
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def runtime_dir() -> Iterator[Path]:
    """A directory of this process alone; those of killed demos are removed too."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    for old in base.glob("headstart-demo-*"):
        pid = old.name.rpartition("-")[2]
        if pid.isdigit() and old.stat().st_uid == os.getuid() and not _is_running(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    directory = base / f"headstart-demo-{os.getpid()}"
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Demo:
    """The demo's course of events."""

    def __init__(self, stack: Stack, console: Console) -> None:
        self._stack = stack
        self._config = stack.config
        self._engine = stack.config.engines[0]
        self._gateway_url = f"http://{stack.config.listen}"
        self._console = console
        self._conversations = Conversations()

    async def run(self, *, keep_serving: bool) -> int:
        """The exit code."""
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            if task is not None:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await asyncio.to_thread(self._stack.check_engine, self._engine)
        async with Children() as children:
            store = await self._start_store(children)
            engine = await self._start_engine(children, "starting vLLM (about half a minute)")
            gateway = await self._start_gateway(children)
            self._console.print("\n(a tiny model: look at the reuse, not at the wisdom)\n")
            measured = [await self._ask(turn) for turn in (*FIRST_CUSTOMER, SECOND_CUSTOMER)]
            system_tokens = await asyncio.to_thread(self._system_tokens)
            await self._wait_until_saved(system_tokens)
            await children.stop(engine)
            self._console.print("the engine was stopped; its cache is gone, the store's is not")
            engine = await self._start_engine(children, "starting a new vLLM")
            again = Turn(f"{SECOND_CUSTOMER.label}, new engine", 3, SECOND_CUSTOMER.question)
            measured.append(await self._ask(again))
            ok = self._report(DemoResult(measured, system_tokens))
            if keep_serving:
                await self._serve((store, engine, gateway))
        return 0 if ok or keep_serving else 1

    async def _start_store(self, children: Children) -> Child:
        with self._console.status("starting the store"):
            child = await self._stack.start_store(children)
        size = self._config.store.memory.capacity if self._config.store else 0
        self._console.print(f"store    ready, {size / 2**30:.1f} GiB of shared memory")
        return child

    async def _start_engine(self, children: Children, text: str) -> Child:
        loop = asyncio.get_running_loop()
        started = loop.time()
        with self._console.status(text):
            if not self._console.is_terminal:
                self._console.print(text)
            child = await self._stack.start_engine(children, self._engine)
            await self._stack.engine_ready(child, self._engine)
        took_s = loop.time() - started
        self._console.print(f"engine   ready at {self._engine.url} after {took_s:.0f} s")
        return child

    async def _start_gateway(self, children: Children) -> Child:
        argv = (sys.executable, "-m", "gateway.cli", "serve", "--config")
        path = str(self._stack.write_config())
        spec = ChildSpec("gateway", (*argv, path), self._stack.log_dir / "gateway.log")
        with self._console.status("starting the gateway"):
            child = await children.start(spec)
            probe_url = f"{self._gateway_url}/readyz"
            await child.ready(
                lambda: asyncio.to_thread(is_healthy, probe_url), timeout_s=GATEWAY_READY_S
            )
        self._console.print(f"gateway  ready at {self._gateway_url}")
        return child

    async def _ask(self, turn: Turn) -> Measured:
        messages = self._conversations.messages(turn)
        with self._console.status(turn.label):
            measured = await asyncio.to_thread(
                measure, self._gateway_url, self._config.model.name, turn.label, messages
            )
        self._conversations.answered(turn, measured.answer.text)
        self._console.print(f"[bold]{turn.label}[/bold]: {turn.question}")
        answer = " ".join(measured.answer.text.split())
        self._console.print(f"  {answer}", markup=False, highlight=False)
        return measured

    def _system_tokens(self) -> int:
        return full_block_tokens(
            self._engine.url, self._config.model.name, system_prompt(), self._engine.block_size
        )

    async def _wait_until_saved(self, num_tokens: int) -> None:
        """Saving goes on behind the answer; do not stop the engine in the middle of it."""
        socket_path = self._stack.paths.store_socket(self._config)
        deadline = asyncio.get_running_loop().time() + SAVED_WITHIN_S
        previous: StoreStats | None = None
        while asyncio.get_running_loop().time() < deadline:
            stats = await asyncio.to_thread(_store_stats, socket_path)
            settled = previous is not None and previous.blocks_stored == stats.blocks_stored
            enough = stats.blocks * self._engine.block_size >= num_tokens
            if settled and enough and stats.reserved_bytes == 0:
                break
            previous = stats
            await asyncio.sleep(0.25)
        self._console.print()

    def _report(self, result: DemoResult) -> bool:
        self._console.print()
        self._console.print(table(result))
        missing = result.missing()
        for sentence in missing:
            self._console.print(f"[red]missing:[/red] {sentence}")
        if not missing:
            self._console.print(
                f"The new engine never computed the system prompt's {result.system_tokens} tokens: "
                "the store had them."
            )
        return not missing

    async def _serve(self, children: tuple[Child, ...]) -> None:
        """Until Ctrl-C. UserError when a child ends by itself."""
        body = {
            "model": self._config.model.name,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            "max_tokens": 32,
        }
        say = self._console.out
        say(f"\ngateway  {self._gateway_url}/v1  (OpenAI API)")
        say(
            f"stats    {self._gateway_url}/cache/stats  (headstart stats --url {self._gateway_url})"
        )
        say(f"logs     {self._stack.log_dir}")
        say(f"try      curl -s {self._gateway_url}/v1/chat/completions \\")
        say(f"           -H 'content-type: application/json' -d '{json.dumps(body)}'")
        say("Ctrl-C stops everything.")
        waits = [asyncio.create_task(child.wait()) for child in children]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            say("stopping")
            return
        finally:
            for wait in waits:
                wait.cancel()
        ended = next(child for child in children if child.exit_code is not None)
        raise UserError(ended.failure(ended.ending))


def _store_stats(socket_path: Path) -> StoreStats:
    try:
        client = StoreClient.connect(socket_path, client="demo", timeout_s=2.0)
    except StoreError as error:
        raise UserError(str(error)) from error
    try:
        return client.stats()
    finally:
        client.close()
