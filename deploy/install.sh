#!/usr/bin/env bash
# Makes the environment: install.sh PYTHON VENV. Called by make; run `make venv`.
# TORCH_INDEX: an extra index that has the CPU build of torch, used only when plain pip fails.
set -euo pipefail

python=${1:?usage: install.sh PYTHON VENV}
venv=${2:?usage: install.sh PYTHON VENV}
extras='.[cpu,dev]'

say() { printf 'headstart: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "needs Python 3.11 or newer, found '$("$python" --version 2>&1 || echo none)';" \
       "run make with PYTHON=/path/to/python3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "this Python has no venv module; on Debian and Ubuntu: apt install python3-venv"

say "making the environment in $venv with $("$python" --version 2>&1)"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  say "note: the engine was tried with Python 3.11"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade 'pip>=24,<27'

say "installing the gateway, the CPU engine and the tools (about 2 GB the first time)"
# What is there already, and indexes that lack a package, are no news.
quieter() { grep -vE '^(Requirement already satisfied|Looking in |WARNING: Location )' || true; }
if ! "${pip[@]}" install --editable "$extras" 2>&1 | quieter; then
  [ -n "${TORCH_INDEX:-}" ] || fail \
    "pip could not install everything. If it misses torch==...+cpu: give the CPU wheel index that" \
    "PyTorch publishes (see the installation page of PyTorch) as TORCH_INDEX=URL and run make again"
  say "trying again with the extra index of TORCH_INDEX"
  "${pip[@]}" install --extra-index-url "$TORCH_INDEX" --editable "$extras" 2>&1 | quieter
fi

# A torchvision that does not fit this torch keeps transformers from loading any model; the engine
# needs none of the three for text.
works() { "$venv/bin/python" -W ignore -c "$1" >/dev/null 2>&1; }
has_torchvision="import importlib.util as u, sys; sys.exit(u.find_spec('torchvision') is None)"
if works "$has_torchvision" && ! works "import torchvision"; then
  say "removing a torchvision that does not fit this torch"
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
works "from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM" || {
  say "transformers cannot load models yet; removing torchvision, torchaudio and torchcodec"
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$venv/bin/python" -c "from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM" ||
    fail "transformers cannot load model classes (see above)"
}
say "the environment is ready"
