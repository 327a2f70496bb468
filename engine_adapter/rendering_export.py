"""Reads a model's tokenizer and chat template with transformers, in a process of its own.

transformers decides how a tokenizer directory becomes a tokenizer (some classes rebuild what
tokenizer.json says), so it has to be asked. But it takes a hundred megabytes and pulls in torch
where that is installed. `export_tokenizer` therefore runs this file as a child that blocks torch
and prints what the gateway needs: the backend tokenizer, the templates and the special tokens.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from engine_adapter.base import RenderingError

EXPORT_TIMEOUT_S = 120.0

_OTHER_RENDERERS = frozenset(
    {"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling", "internlm2",
     "kimi_audio", "kimi_k3", "step3_vl", "step3p7", "unlimited-ocr", "unlimited_ocr",
     "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration",
     "DeepseekV41ForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration",
     "KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM"}
)  # fmt: skip
"""Model types and architectures for which vLLM 0.32 does not use the Hugging Face template and
tokenizer as they are (vllm/config/model.py, vllm/tokenizers/registry.py)."""


class ExportedTokenizer(msgspec.Struct, frozen=True):
    """What transformers made of a model directory."""

    backend: str
    """The `tokenizers` backend as JSON; empty when `problem` is set."""
    chat_templates: dict[str, str]
    """Jinja sources by name; a single template is called "default"."""
    special_tokens: dict[str, str]
    problem: str = ""
    """Why this model cannot be rendered here; empty when it can."""


def export_tokenizer(model_dir: Path) -> ExportedTokenizer:
    """Loads the tokenizer of `model_dir` in a child process (about 2 s).

    Raises RenderingError when it cannot be loaded or vLLM renders this model in another way.
    """
    if not (model_dir / "tokenizer_config.json").is_file():
        raise RenderingError(f"no tokenizer_config.json in {model_dir}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(model_dir)],
            env=environment, capture_output=True, check=False, timeout=EXPORT_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise RenderingError(f"loading the tokenizer of {model_dir} took too long") from e
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {child.returncode}"
        raise RenderingError(f"cannot load the tokenizer of {model_dir}: {reason}")
    exported = msgspec.json.decode(child.stdout, type=ExportedTokenizer)
    if exported.problem:
        raise RenderingError(f"cannot render prompts of {model_dir} exactly: {exported.problem}")
    return exported


def _problem(problem: str) -> ExportedTokenizer:
    return ExportedTokenizer(backend="", chat_templates={}, special_tokens={}, problem=problem)


def _config_problem(model_dir: Path) -> str:
    config = model_dir / "config.json"
    fields = msgspec.json.decode(config.read_bytes()) if config.is_file() else {}
    for name in (fields.get("model_type"), *(fields.get("architectures") or ())):
        if name in _OTHER_RENDERERS:
            return f"the engine has a renderer of its own for {name}"
    if any(model_dir.glob("tekken.json")) or any(model_dir.glob("tokenizer.model.v*")):
        return "the engine uses Mistral's own tokenizer for it"
    return ""


def _export(model_dir: Path) -> ExportedTokenizer:
    from transformers import (  # noqa: PLC0415  # only this child pays for transformers
        AutoTokenizer,
        PreTrainedTokenizerBase,
        TokenizersBackend,
    )

    if problem := _config_problem(model_dir):
        return _problem(problem)
    # The arguments are the engine's own (vllm/tokenizers/registry.py).
    tokenizer = AutoTokenizer.from_pretrained(
        str(model_dir), local_files_only=True, truncation_side="left", mistral_format=False
    )
    kind = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend):
        return _problem(f"{kind.__name__} is a tokenizer in Python without a fast backend")
    if kind.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return _problem(f"{kind.__name__} renders chats in its own way")
    if tokenizer.split_special_tokens:
        return _problem("it splits special tokens")
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    processor = model_dir / "chat_template.json"
    if processor.is_file():
        own = msgspec.json.decode(processor.read_bytes()).get("chat_template")
        if own != templates.get("default"):
            return _problem("its processor has a chat template that differs from the tokenizer's")
    return ExportedTokenizer(
        backend=tokenizer.backend_tokenizer.to_str(),
        chat_templates=templates,
        special_tokens={k: str(v) for k, v in tokenizer.special_tokens_map.items()},
    )


def _main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # a failing import is a missing torch
    with contextlib.redirect_stdout(sys.stderr):
        exported = _export(Path(sys.argv[1]))
    sys.stdout.buffer.write(msgspec.json.encode(exported))


if __name__ == "__main__":
    _main()
