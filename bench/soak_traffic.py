"""The traffic of bench.soak: prompts that nobody ever sends again, conversations that come and go,
tenants, clients that leave, requests that are wrong. All of it from a seed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.lean_client import LeanClient

LEAVES = 0.02
"""Share of the requests whose client leaves in the middle."""
WRONG = 0.005
TURN = 0.3
"""Share that continues a conversation; as many begin one."""
CHAT = 0.03
"""Share of chats, whose text is rendered and tokenized."""
LIVE_SESSIONS = 200
MAX_TURNS = 8
PROMPT_TOKENS = (20, 100)
TURN_TOKENS = (16, 32)
NUM_IDS = 32_000


@dataclass(slots=True)
class Session:
    """A conversation: its prompts extend one another."""

    name: str
    key: str
    """Of its tenant."""
    token_ids: list[int]
    turns: int = 0


@dataclass(slots=True)
class Counts:
    """What the clients saw."""

    answered: int = 0
    left: int = 0
    wrong: int = 0
    """Requests that had to be refused, and were."""
    errors: Counter[str] = field(default_factory=Counter)
    """By the status that came instead of an answer, or what broke."""

    @property
    def requests(self) -> int:
        return self.answered + self.left + self.wrong + self.errors.total()


class Traffic:
    """Makes requests, as bytes."""

    def __init__(self, url: str, model: str, keys: Sequence[str], seed: int) -> None:
        """`keys`: API keys of the tenants."""
        self._host = urlsplit(url).netloc
        self._model = model
        self._keys = keys
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._sessions: deque[Session] = deque()

    def request(self) -> bytes:
        """The next request: a turn of a live conversation, a new conversation, or a prompt that
        stands alone."""
        chooser = self._random
        kind = chooser.random()
        if self._sessions and kind < TURN:
            return self._turn()
        key = chooser.choice(self._keys)
        if kind > 1 - CHAT:
            return self._chat(key)
        tokens = self._tokens(*PROMPT_TOKENS)
        if kind < 2 * TURN:
            session = Session(f"soak-{next(self._numbers)}", key, tokens)
            self._sessions.append(session)
            if len(self._sessions) > LIVE_SESSIONS:
                self._sessions.popleft()
            return self._http(tokens, key, session.name)
        return self._http(tokens, key, "")

    def wrong(self) -> bytes:
        """A request that is refused: another model, a broken body, no key."""
        key = self._random.choice(self._keys)
        kind = self._random.randrange(3)
        body = b'{"model": "nobody", "prompt": [1, 2, 3]}' if kind == 0 else b'{"model": '
        return self._head("/v1/completions", body, "" if kind == 2 else key, "") + body

    def leaves_after_s(self) -> float | None:
        """After how long the client of the next request leaves; None: it stays."""
        return self._random.random() * 0.004 if self._random.random() < LEAVES else None

    def is_wrong(self) -> bool:
        return self._random.random() < WRONG

    def _turn(self) -> bytes:
        session = self._sessions[self._random.randrange(len(self._sessions))]
        session.token_ids += self._tokens(*TURN_TOKENS)
        session.turns += 1
        if session.turns >= MAX_TURNS:
            self._sessions.remove(session)
        return self._http(session.token_ids, session.key, session.name)

    def _chat(self, key: str) -> bytes:
        words = " ".join(f"word{self._random.getrandbits(40):x}" for _ in range(30))
        fields = {
            "model": self._model, "messages": [{"role": "user", "content": words}],
            "max_tokens": 1, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        return self._post("/v1/chat/completions", fields, key, "")

    def _tokens(self, least: int, most: int) -> list[int]:
        chooser = self._random
        return chooser.choices(range(NUM_IDS), k=chooser.randint(least, most))

    def _http(self, token_ids: Sequence[int], key: str, session: str) -> bytes:
        fields = {
            "model": self._model, "prompt": token_ids, "max_tokens": 1, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        return self._post("/v1/completions", fields, key, session)

    def _post(self, path: str, fields: Mapping[str, Any], key: str, session: str) -> bytes:
        body = json.dumps(fields, separators=(",", ":")).encode()
        return self._head(path, body, key, session) + body

    def _head(self, path: str, body: bytes, key: str, session: str) -> bytes:
        more = f"Authorization: Bearer {key}\r\n" if key else ""
        more += f"x-headstart-session: {session}\r\n" if session else ""
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\n{more}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()


class SoakClients:
    """A closed loop of many clients over one source of traffic."""

    def __init__(self, url: str, traffic: Traffic, *, clients: int, requests: int) -> None:
        self._url = url
        self._traffic = traffic
        self._clients = clients
        self._requests = requests
        self.counts = Counts()
        self._begun = 0

    async def run(self) -> None:
        """Until all requests are sent, or cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._client())

    async def _client(self) -> None:
        client: LeanClient | None = None
        try:
            while self._begun < self._requests:
                self._begun += 1
                if client is None or client.closed:
                    client = await LeanClient.connect(self._url, first_token_event=1)
                if not await self._one(client):
                    client.close()
                    client = None
        finally:
            if client is not None:
                client.close()

    async def _one(self, client: LeanClient) -> bool:
        """One request; whether the connection can be used again."""
        traffic, counts = self._traffic, self.counts
        if traffic.is_wrong():
            counts.wrong += await _is_refused(client, traffic.wrong())
            return False
        leaves_s = traffic.leaves_after_s()
        try:
            if leaves_s is None:
                await client.ask(traffic.request())
            else:
                async with asyncio.timeout(leaves_s):
                    await client.ask(traffic.request())
        except TimeoutError:
            counts.left += 1
            return False
        except (OSError, RuntimeError) as error:
            counts.errors[_kind_of(error)] += 1
            return False
        counts.answered += 1
        return True


async def _is_refused(client: LeanClient, request: bytes) -> bool:
    try:
        await client.ask(request)
    except (OSError, RuntimeError):
        return True
    return False


def _kind_of(error: Exception) -> str:
    status = re.search(r"HTTP/1.1 (\d+)", str(error))
    return status[1] if status else type(error).__name__
