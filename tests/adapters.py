"""LoRA adapters with random weights, and an engine that serves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from live_stack import LiveStack
from safetensors.torch import save_file

RANK = 8


def make_adapter(path: Path, model: dict[str, Any], seed: int) -> Path:
    """Random weights for the queries and values of every layer, in PEFT's format."""
    random = torch.Generator().manual_seed(seed)
    hidden = model["hidden_size"]
    values = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, out in (("q_proj", hidden), ("v_proj", values)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (out, RANK))):
                tensors[f"{module}.{part}.weight"] = torch.randn(shape, generator=random) * 0.05
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return path


def make_adapters(root: Path, model_dir: Path) -> dict[str, Path]:
    """Three adapters, one of them a second time: names to directories. "touched" is for the test
    that changes its files, after which it is not stored any more."""
    model = json.loads((model_dir / "config.json").read_text())
    first = make_adapter(root / "first", model, 1)
    copy = Path(shutil.copytree(first, root / "copy"))
    return {
        "sql": first,
        "sql-v2": copy,
        "law": make_adapter(root / "other", model, 2),
        "touched": make_adapter(root / "touched", model, 3),
    }


def engine_with_adapters(model_dir: Path, root: Path, beside: LiveStack) -> LiveStack:
    """At the store of another stack, not started. Its files are below `root`."""
    adapters = make_adapters(root, model_dir)
    engine = {
        "id": "engine-1",
        "adapters": [{"name": name, "path": str(path)} for name, path in adapters.items()],
        # Only what the adapters change: the rest costs time.
        "extra_args": ["--lora-target-modules", "qkv_proj"],
    }
    return LiveStack(model_dir, engine, runtime_dir=Path(beside.config.runtime_dir))
