"""What the command `headstart` understands. Each subcommand names the module that runs it."""

from __future__ import annotations

import argparse
from importlib import metadata
from typing import NoReturn, TypeAlias

USER_ERROR = 2
DEFAULT_CONFIG_HELP = (
    "configuration; default: ./headstart.yaml where it exists, else built-in defaults"
)
WINDOWS = ("since_start", "1m", "10m", "1h")
REPLICA_ACTIONS = ("list", "add", "drain", "undrain", "remove")


class _Parser(argparse.ArgumentParser):
    """Mistakes at the command line are one sentence, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"headstart: {message}; see `{self.prog} --help`\n")


def build_parser() -> _Parser:
    """The whole command line."""
    parser = _Parser(
        prog="headstart",
        description="A gateway that reuses prompt prefixes for self-hosted LLMs on vLLM.",
        epilog="Start with `headstart demo`. Everything is configured by one file: --config.",
    )
    parser.add_argument("--version", action="version", version=metadata.version("headstart"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _serve,
        _store,
        _engine,
        _demo,
        _stats,
        _pins,
        _replicas,
        _simulate,
        _doctor,
        _model,
    ):
        add(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # argparse has no public name for it


def _command(
    commands: _Commands,
    name: str,
    module: str,
    text: str,
    example: str,
    *,
    config: str = DEFAULT_CONFIG_HELP,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(module=module)
    parser.add_argument("--config", metavar="FILE", help=config)
    return parser


def _log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )


def _serve(commands: _Commands) -> None:
    parser = _command(
        commands,
        "serve",
        "gateway.cli.serve",
        "run the gateway, with a store and an engine of its own when no engines are configured",
        "examples:\n"
        "  headstart serve                           gateway, store and engine on this machine\n"
        "  headstart serve --config headstart.yaml   the gateway in front of the engines listed\n"
        "  headstart serve --config headstart.yaml --with-store --with-engine",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="where clients connect")
    parser.add_argument("--with-store", action="store_true", help="start the store server too")
    parser.add_argument("--with-engine", action="store_true", help="start the engines listed too")
    _log_level(parser)


def _store(commands: _Commands) -> None:
    parser = _command(
        commands,
        "store",
        "gateway.cli.store",
        "run the store server of this host, which keeps KV blocks in shared memory",
        "example:\n  headstart store --config headstart.yaml",
    )
    _log_level(parser)


def _engine(commands: _Commands) -> None:
    parser = _command(
        commands,
        "engine",
        "gateway.cli.engine",
        "start vLLM with the flags and the connector that Headstart needs",
        "examples:\n"
        "  headstart engine --print                       only show the command\n"
        "  headstart engine --config headstart.yaml --id engine-1\n"
        "  headstart engine -- --max-num-seqs 64          more arguments for vLLM",
    )
    parser.add_argument("--id", metavar="ID", help="which engine of the configuration (the first)")
    parser.add_argument("--host", metavar="HOST", help="address to listen on (that of its url)")
    parser.add_argument("--print", action="store_true", help="show the command, start nothing")
    parser.add_argument(
        "--dev-mode",
        action="store_true",
        help="vLLM's development endpoints, such as POST /reset_prefix_cache: not for production",
    )
    parser.add_argument("vllm_args", nargs="*", metavar="-- ARGS", help="more arguments for vLLM")


def _demo(commands: _Commands) -> None:
    parser = _command(
        commands,
        "demo",
        "gateway.demo.demo",
        "show on this machine how a stored prefix is reused, also after the engine restarted",
        "examples:\n"
        "  headstart demo           show it, then keep serving until Ctrl-C\n"
        "  headstart demo --exit    show it and end; exit code 0 only if the reuse really happened",
    )
    parser.add_argument("--exit", action="store_true", help="end after the conversation")


def _stats(commands: _Commands) -> None:
    parser = _command(
        commands,
        "stats",
        "gateway.cli.stats",
        "show what the cache did: hits, tokens saved, time to first token",
        "examples:\n  headstart stats\n  headstart stats --window 1m --watch\n"
        "  headstart stats --json | python -m json.tool",
    )
    parser.add_argument("--url", metavar="URL", help="the gateway (http:// and `listen`)")
    parser.add_argument("--window", choices=WINDOWS, default="since_start")
    parser.add_argument("--json", action="store_true", help="as the gateway sends it")
    parser.add_argument("--watch", action="store_true", help="again every two seconds")


def _pins(commands: _Commands) -> None:
    parser = _command(
        commands,
        "pins",
        "gateway.cli.pins",
        "list the pinned blocks of this host's store, or end their pins",
        "Blocks are pinned by rules: store.retention in the configuration.\n\n"
        "examples:\n  headstart pins\n  headstart pins --tenant acme --json\n"
        "  headstart pins --release --prefix contract-4711",
    )
    parser.add_argument("--tenant", metavar="NAME", help="only those of this tenant")
    parser.add_argument("--session", metavar="ID", help="only those of this session")
    parser.add_argument("--prefix", metavar="NAME", help="only those of this prompt_cache_key")
    parser.add_argument("--release", action="store_true", help="end these pins")
    parser.add_argument("--all", action="store_true", help="with --release: every pin")
    parser.add_argument("--json", action="store_true", help="for programs")


def _replicas(commands: _Commands) -> None:
    parser = _command(
        commands,
        "replicas",
        "gateway.cli.replicas",
        "list the replicas of a running gateway, and add, drain or remove them",
        "actions:\n"
        "  list         all of them, with their state (what is done when nothing is said)\n"
        "  add URL      one more engine, which must be running; it gets requests when it answers\n"
        "  drain ID     no new requests; running answers end\n"
        "  undrain ID   new requests again, also for one that was to be removed\n"
        "  remove ID    drain it, then forget it; --force: at once\n\n"
        "states:\n"
        "  starting     has not answered yet\n"
        "  ready        gets requests; a share below 100% is a slow start\n"
        "  ejected      does not answer, answers errors, or hangs; comes back by itself\n"
        "  draining     gets no new requests\n\n"
        "What is changed here lasts until the gateway ends, or its discovery says otherwise: what\n"
        "shall stay belongs into the configuration. Each gateway has a list of its own.\n\n"
        "examples:\n"
        "  headstart replicas\n"
        "  headstart replicas add http://10.0.0.7:8000 --id engine-7 --set max_running=64\n"
        "  headstart replicas drain engine-7\n"
        "  headstart replicas remove engine-7 --url http://gateway:8080 --key-file admin-key",
    )
    parser.add_argument("action", nargs="?", choices=REPLICA_ACTIONS, default="list")
    parser.add_argument("replica", nargs="?", metavar="URL|ID", help="of the engine")
    parser.add_argument("--id", metavar="ID", help="of the new one; default: host:port of its URL")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append",
        help="of the new one, as in `engines` of the configuration; may be given several times",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="with remove: wait for no answer")
    parser.add_argument("--url", metavar="URL", help="the gateway (http:// and `listen`)")
    parser.add_argument(
        "--key-file", metavar="FILE", help="with an admin key (admin.key_file); from elsewhere"
    )
    parser.add_argument("--json", action="store_true", help="as the gateway sends it")


def _simulate(commands: _Commands) -> None:
    parser = _command(
        commands,
        "simulate",
        "gateway.cli.simulate",
        "replay a request trace against the cache policies, to choose one on evidence",
        "The trace holds JSON lines, plain or .gz: timestamp (ms), input_length, output_length,\n"
        "hash_ids; optional block_size (512), session_id, stop, api_time (s), tenant, model. The\n"
        "gateway writes such a file of your own traffic: see request_log in the configuration.\n\n"
        "A block counts as a hit when it and all blocks before it are there. The optimum knows\n"
        "the future: no policy can hit more. So does belady, but it may refuse nothing.\n\n"
        "examples:\n"
        "  headstart simulate --trace FILE --capacity 1M,3M,10M --policy lru --policy gdsf\n"
        "  headstart simulate --trace FILE --capacity 16GiB --token-bytes 128KiB --plot hits.svg\n"
        "  headstart simulate --trace FILE --config headstart.yaml    the tiers of that file",
        config="replay the tiers of this configuration; --capacity and --policy then replace those "
        "of its memory tier",
    )
    parser.add_argument("--trace", metavar="FILE", required=True, help="what was asked for")
    parser.add_argument(
        "--capacity", metavar="SIZES", action="append",
        help="of the cache, in tokens such as 300k,1M or in bytes such as 16GiB",
    )  # fmt: skip
    parser.add_argument(
        "--policy", metavar="KIND", action="append",
        help="an eviction: a kind, or a mapping as in the configuration ({kind: ...}); may be "
        "given several times; default: lru",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", metavar="SHARE", type=float, default=0.5,
        help="share of the requests that only fill the cache; default: 0.5",
    )  # fmt: skip
    parser.add_argument(
        "--token-bytes", metavar="SIZE", default="128KiB",
        help="bytes of KV per token; default: 128KiB, as of an 8B model in 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-curve", metavar="CURVE",
        help="seconds for u tokens after c reused ones are base + linear*u + quadratic*u*(c+u/2): "
        "these three numbers with commas between, or a JSON file with a list of measured "
        '{"tokens": u, "context": c, "seconds": s}; default: 0.005,4e-5,1.3e-9, computed for an '
        "8B model at 400 TFLOP/s",
    )  # fmt: skip
    parser.add_argument("--no-optimum", action="store_true", help="leave the optimum out")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--plot", metavar="FILE", help="draw hit rates there: .png or .svg")
    parser.add_argument("--jobs", metavar="N", type=int, help="processes; default: one per core")


def _doctor(commands: _Commands) -> None:
    _command(
        commands,
        "doctor",
        "gateway.doctor.doctor",
        "check every handshake between gateway, engines and store and say what to change",
        "example:\n  headstart doctor --config headstart.yaml",
    )


def _model(commands: _Commands) -> None:
    parser = _command(
        commands,
        "model",
        "gateway.cli.model",
        "fetch the demo model once and print the directory where it is",
        'examples:\n  ls "$(headstart model)"\n'
        "  headstart model digest DIR   what a LoRA adapter is, for engines[].adapters[].digest",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    digest = actions.add_parser(
        "digest",
        help="print the digest of a LoRA adapter's content",
        description="Print the digest of a LoRA adapter's weights and of the settings that count. "
        "Copies have the same, whatever they are called.",
    )
    digest.add_argument("dir", metavar="DIR", help="with adapter_config.json and the weights")
