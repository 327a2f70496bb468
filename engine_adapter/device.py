"""Copies between an engine's paged KV cache and block records. The only device-specific code.

A record's payload is one block of every layer: shape (layers, bytes_per_layer), so what is one
contiguous run per layer on the device is one row in the payload.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from engine_adapter.base import EngineAdapterError
from prefix_store.hashing import digest
from prefix_store.prefault import prefault, use_large_pages


class UnsupportedLayoutError(EngineAdapterError):
    """The engine's KV cache is laid out in a way that is not known here."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """An engine's KV cache as bytes: `tensor` is uint8 of shape (layers, blocks, bytes_per_layer),
    a view of the engine's memory."""

    tensor: torch.Tensor
    layout: str
    """Fingerprint: equal for two engines exactly when a block's bytes mean the same."""

    @property
    def hardware(self) -> str:
        """What may decide how attention packs its cache: the instruction set or the device."""
        if self.tensor.device.type == "cuda":
            return str(torch.cuda.get_device_capability(self.tensor.device))
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return f"{platform.machine()} {flags.partition(':')[2]}"

    @property
    def block_bytes(self) -> int:
        return int(self.tensor.shape[0] * self.tensor.shape[2])

    @classmethod
    def of(cls, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> PagedKV:
        """View the per-layer tensors that vLLM registers (each `[kernel blocks, ...]`, all in one
        allocation). Raises UnsupportedLayoutError."""
        layers = [kv_caches[name] for name in sorted(kv_caches, key=_layer_order)]
        if not layers:
            raise UnsupportedLayoutError("the engine registered no KV cache")
        first = layers[0]
        size = first.element_size()
        per_block, rest = divmod(first.shape[0], num_blocks)
        page = first[0].numel()
        row_bytes = per_block * page * size
        if rest or not _is_dense(first[0]) or (per_block > 1 and first.stride(0) != page):
            raise UnsupportedLayoutError(f"blocks are not contiguous: {_describe(first)}")
        starts = [layer.data_ptr() for layer in layers]
        strides = {b - a for a, b in itertools.pairwise(starts)} or {row_bytes}
        same = all(
            layer.shape == first.shape
            and layer.stride() == first.stride()
            and layer.dtype == first.dtype
            and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            for layer in layers
        )
        if not same or len(strides) != 1 or min(strides) <= 0:
            raise UnsupportedLayoutError(
                "the layers differ in shape or are not evenly spaced in one allocation"
            )
        view = torch.empty(0, dtype=torch.uint8, device=first.device).set_(
            first.untyped_storage(),
            starts[0] - first.untyped_storage().data_ptr(),
            (len(layers), num_blocks, row_bytes),
            (strides.pop(), first.stride(0) * size * per_block, 1),
        )
        meaning = [
            ",".join(sorted(kv_caches, key=_layer_order)), str(first.dtype), str(per_block),
            str(tuple(first.shape[1:])), str(first.stride()[1:]),
        ]  # fmt: skip
        return cls(view, digest("headstart-layout-1", *meaning).hex())


class Transfer(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Block until the bytes are there."""


class Stamp(Protocol):
    """A moment in the engine's work."""

    def seconds_since(self, earlier: Stamp) -> float:
        """Waits until both have come; never call it in the engine's own thread. `earlier` is of
        the same mover."""


class BlockMover(Protocol):
    """Copies whole blocks. Payloads are writable views of the arena, one for each block id."""

    batch_blocks: int
    """Blocks that are best scattered at once."""

    num_threads: int
    """Threads that may scatter at the same time, and gain by it."""

    def gather(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Transfer:
        """Device to payloads. Later work of the engine waits for it; the caller need not."""

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int]) -> Transfer:
        """Payloads to device, after the work that the engine had under way at `mark`."""

    def mark(self) -> None:
        """Remember what the engine has under way now; called in the engine's own thread."""

    def stamp(self) -> Stamp:
        """The end of what the engine has under way now; called in the engine's own thread."""

    def adopt(self, arena: memoryview) -> None:
        """Make copies from and to this arena fast. May take seconds; never in the engine's own
        thread, and before anything of the arena is copied. Raises EngineAdapterError."""


def block_mover(kv: PagedKV) -> BlockMover:
    """The mover for the device that the KV cache is on."""
    if kv.tensor.device.type == "cuda":
        return CudaMover(kv)
    return HostMover(kv)


class _Done:
    def wait(self) -> None:
        return


class _HostStamp:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def seconds_since(self, earlier: Stamp) -> float:
        assert isinstance(earlier, _HostStamp)
        return self.at - earlier.at


class _CudaStamp:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Stamp) -> float:
        assert isinstance(earlier, _CudaStamp)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class HostMover:
    """The KV cache is host memory: one strided copy for each block, in the calling thread. A
    record that was just checked is copied while it is in the processor's cache, so one at a time.
    """

    batch_blocks = 1
    num_threads = min(4, os.cpu_count() or 1)

    def __init__(self, kv: PagedKV) -> None:
        self._rows = kv.tensor.numpy()
        self._storage = kv.tensor.untyped_storage()

    def gather(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Transfer:
        shape = (self._rows.shape[0], self._rows.shape[2])
        for block_id, payload in zip(block_ids, payloads, strict=True):
            target = np.frombuffer(payload, dtype=np.uint8).reshape(shape)
            target[...] = self._rows[:, block_id]
        return _Done()

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int]) -> Transfer:
        shape = (self._rows.shape[0], self._rows.shape[2])
        for block_id, payload in zip(block_ids, payloads, strict=True):
            self._rows[:, block_id] = np.frombuffer(payload, dtype=np.uint8).reshape(shape)
        return _Done()

    def mark(self) -> None:
        return

    def stamp(self) -> Stamp:
        return _HostStamp()

    def adopt(self, arena: memoryview) -> None:
        # The KV cache, not the arena: the first load into each block would pay for its pages.
        use_large_pages(self._storage.data_ptr(), self._storage.nbytes())
        prefault(self._storage.data_ptr(), self._storage.nbytes())


class CudaMover:
    """The KV cache is on a CUDA device. Blocks go through two staging buffers on the device, one
    for each direction and each on a stream of its own: one gather or scatter kernel for all layers
    of a batch of blocks, one asynchronous copy for each block from or to pinned memory. The order
    on a stream is what keeps a staging buffer from being overwritten too early."""

    num_threads = 1

    def __init__(self, kv: PagedKV) -> None:
        wide = _widest(kv.tensor)
        rows = kv.tensor.view(wide) if wide is not torch.uint8 else kv.tensor
        self._blocks = rows.transpose(0, 1)  # (blocks, layers, width)
        self._dtype = wide
        self._device = kv.tensor.device
        self.batch_blocks = max(1, min(64, _STAGING_BYTES // kv.block_bytes))
        shape = (self.batch_blocks, *self._blocks.shape[1:])
        self._out = torch.empty(shape, dtype=wide, device=self._device)
        self._in = torch.empty(shape, dtype=wide, device=self._device)
        self._out_stream = torch.cuda.Stream(self._device)
        self._in_stream = torch.cuda.Stream(self._device)
        self._engine_work: Any = None
        self._pinned: Any = None

    def gather(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Transfer:
        engine = torch.cuda.current_stream(self._device)
        self._out_stream.wait_stream(engine)
        with torch.cuda.stream(self._out_stream):
            for start in range(0, len(block_ids), self.batch_blocks):
                batch = payloads[start : start + self.batch_blocks]
                ids = self._ids(block_ids[start : start + self.batch_blocks])
                torch.index_select(self._blocks, 0, ids, out=self._out[: len(batch)])
                # The blocks may be freed and overwritten by the engine's next step, not sooner.
                copied = torch.cuda.Event()
                copied.record(self._out_stream)
                for staged, payload in zip(self._out, batch, strict=False):
                    self._host(payload).copy_(staged.view(-1), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._out_stream)
        engine.wait_event(copied)
        return _CudaTransfer(done)

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int]) -> Transfer:
        with torch.cuda.device(self._device), torch.cuda.stream(self._in_stream):
            if self._engine_work is not None:
                self._in_stream.wait_event(self._engine_work)
            for start in range(0, len(block_ids), self.batch_blocks):
                batch = payloads[start : start + self.batch_blocks]
                ids = self._ids(block_ids[start : start + self.batch_blocks])
                for staged, payload in zip(self._in, batch, strict=False):
                    staged.view(-1).copy_(self._host(payload), non_blocking=True)
                self._blocks.index_copy_(0, ids, self._in[: len(batch)])
            done = torch.cuda.Event()
            done.record(self._in_stream)
        return _CudaTransfer(done)

    def mark(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._engine_work = event

    def stamp(self) -> Stamp:
        return _CudaStamp(self._device)

    def adopt(self, arena: memoryview) -> None:
        cuda = torch.cuda.cudart()
        if self._pinned is not None:
            self._out_stream.synchronize()
            self._in_stream.synchronize()
            cuda.cudaHostUnregister(ctypes.addressof(self._pinned))
        # This object keeps the mapping alive for as long as the driver knows its pages.
        self._pinned = ctypes.c_char.from_buffer(arena)
        status = int(cuda.cudaHostRegister(ctypes.addressof(self._pinned), len(arena), 0))
        if status not in (0, _ALREADY_REGISTERED):
            self._pinned = None
            raise EngineAdapterError(
                f"CUDA cannot pin the store's arena (error {status}), so copies are slow; raise "
                "the limit of locked memory (ulimit -l, or `ulimits: memlock` in a container)"
            )

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        pinned = torch.tensor(block_ids, device="cpu").pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _host(self, payload: memoryview) -> torch.Tensor:
        return torch.frombuffer(payload, dtype=self._dtype)


class _CudaTransfer:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.synchronize()


_STAGING_BYTES = 64 * 1024**2
_ALREADY_REGISTERED = 712


def _widest(rows: torch.Tensor) -> torch.dtype:
    """The widest integer type in which all offsets and lengths are whole."""
    units = [rows.shape[2], rows.stride(0), rows.stride(1), rows.data_ptr()]
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if all(unit % size == 0 for unit in units):
            return dtype
    return torch.uint8


def _layer_order(name: str) -> tuple[object, ...]:
    parts = name.split(".")
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def _is_dense(block: torch.Tensor) -> bool:
    """Whether a block's elements fill one run of memory, in whatever order."""
    pairs = zip(block.stride(), block.shape, strict=True)
    expected = 1
    for stride, length in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _describe(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"
