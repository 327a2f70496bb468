"""Copies between a paged KV cache and records, on whatever device is there."""

from __future__ import annotations

import mmap

import pytest
import torch

from engine_adapter.device import PagedKV, UnsupportedLayoutError, block_mover

pytestmark = pytest.mark.filterwarnings("ignore")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 10, 2, 4, 8


def engine_cache(kernel_blocks: int = 1, device: str = DEVICE) -> dict[str, torch.Tensor]:
    """Per-layer views of one allocation, as vLLM registers them: layer 10 comes before layer 2 in
    the alphabet, not in the model."""
    page = BLOCKS * HEADS * TOKENS * WIDTH
    backing = torch.randint(-100, 100, (LAYERS * page,), dtype=torch.int16, device=device)
    backing = backing.view(torch.bfloat16)
    shape = (BLOCKS * kernel_blocks, HEADS, TOKENS // kernel_blocks, WIDTH)
    names = ["model.layers.1.attn", "model.layers.2.attn", "model.layers.10.attn"]
    return {name: backing[i * page : (i + 1) * page].view(shape) for i, name in enumerate(names)}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_a_payload_is_one_block_of_every_layer_in_the_models_order(kernel_blocks: int) -> None:
    """Also where the attention kernel splits a block into smaller ones."""
    caches = engine_cache(kernel_blocks)
    kv = PagedKV.of(caches, BLOCKS)
    arena = mmap.mmap(-1, 1 << 20)
    payload = memoryview(arena)[64 : 64 + kv.block_bytes]
    mover = block_mover(kv)
    mover.adopt(memoryview(arena))
    mover.gather([7], [payload]).wait()
    k = kernel_blocks
    expected = b"".join(raw(layer[7 * k : 7 * k + k]) for layer in caches.values())
    assert bytes(payload) == expected


def test_what_is_gathered_scatters_back_bit_for_bit_and_touches_nothing_else() -> None:
    """Other blocks keep their bytes."""
    source, target = engine_cache(), engine_cache()
    arena = mmap.mmap(-1, 1 << 20)
    size = PagedKV.of(source, BLOCKS).block_bytes
    payloads = [memoryview(arena)[i * 4096 : i * 4096 + size] for i in range(3)]
    out = block_mover(PagedKV.of(source, BLOCKS))
    out.adopt(memoryview(arena))
    out.gather([0, 9, 4], payloads).wait()
    before = {name: layer.clone() for name, layer in target.items()}
    into = block_mover(PagedKV.of(target, BLOCKS))
    into.mark()
    into.scatter(payloads, [5, 1, 2]).wait()
    for name, layer in target.items():
        for block, origin in ((5, 0), (1, 9), (2, 4)):
            assert raw(layer[block]) == raw(source[name][origin])
        for block in (0, 3, 4, 6, 7, 8, 9):
            assert raw(layer[block]) == raw(before[name][block])


def test_the_layout_fingerprint_tells_layouts_apart() -> None:
    """Other names, shapes or types mean other bytes."""
    caches = engine_cache()
    same = PagedKV.of(engine_cache(), BLOCKS).layout
    assert PagedKV.of(caches, BLOCKS).layout == same
    assert PagedKV.of(engine_cache(kernel_blocks=2), BLOCKS).layout != same
    renamed = {f"x.{name}": layer for name, layer in caches.items()}
    assert PagedKV.of(renamed, BLOCKS).layout != same
    other_type = {name: layer.view(torch.float16) for name, layer in caches.items()}
    assert PagedKV.of(other_type, BLOCKS).layout != same


def test_layouts_that_are_not_known_are_refused() -> None:
    """Separate allocations, uneven spacing, gaps inside a block, nothing at all."""
    with pytest.raises(UnsupportedLayoutError, match="no KV cache"):
        PagedKV.of({}, BLOCKS)
    separate = {str(i): torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH) for i in range(2)}
    with pytest.raises(UnsupportedLayoutError, match="one allocation"):
        PagedKV.of(separate, BLOCKS)
    gaps = {"0": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * WIDTH)[..., :WIDTH]}
    with pytest.raises(UnsupportedLayoutError, match="not contiguous"):
        PagedKV.of(gaps, BLOCKS)


def test_a_permuted_block_is_still_one_run_of_bytes() -> None:
    """Tokens before heads in memory, heads before tokens in the view."""
    permuted = {
        "0": torch.zeros(BLOCKS, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16).transpose(1, 2)
    }
    plain = {"0": torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)}
    one, other = PagedKV.of(permuted, BLOCKS), PagedKV.of(plain, BLOCKS)
    assert one.block_bytes == other.block_bytes
    assert one.layout != other.layout
