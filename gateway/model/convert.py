"""Turns a GGUF file into what vLLM loads: bf16 safetensors, config.json and the tokenizer.

Runs as a process of its own, since it needs torch and a gigabyte of memory for a moment:
`python -m gateway.model.convert FILE.gguf DIRECTORY`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

# Paths of the machine that converted, and what is only true of the quantized file.
_DROPPED = ("quantization_config", "_name_or_path", "_model_name_or_path")


def model_config(found: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json from what transformers read out of the GGUF file."""
    config = {key: value for key, value in found.items() if key not in _DROPPED}
    config["architectures"] = ["LlamaForCausalLM"]
    config["dtype"] = "bfloat16"
    return config


def convert(gguf: Path, target: Path) -> None:
    """Write the files of the model into the existing directory `target`."""
    import torch  # noqa: PLC0415  (only this process may load it)
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # lm_head.weight is the embedding (tied), and safetensors refuses shared tensors.
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    config = json.dumps(model_config(model.config.to_dict()), indent=2, default=str)
    (target / "config.json").write_text(config + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(**source).save_pretrained(str(target))


def main(argv: list[str]) -> int:
    """FILE.gguf DIRECTORY"""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    convert(Path(argv[1]), Path(argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
