"""`headstart engine`: becomes vLLM, or shows the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine_adapter.launcher import LaunchOptions, build_command, check_launch, exec_engine
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import check_demo_model, config_of, model_dir_of, say
from gateway.fleet.discovery.engine_list import read_engines
from gateway.fleet.discovery.template import to_launch
from gateway.model.fetch import demo_model_dir
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.fleet import DnsDiscovery, FileDiscovery, KubernetesDiscovery
from prefix_store.runtime_dir import RuntimePaths


def choose_engine(config: HeadstartConfig, wanted: str | None) -> EngineConfig:
    """The engine with this id; the first one when none is named. Of replicas that are discovered
    by their address, one as the gateway expects it."""
    engines, listed_in = config.engines, "the configuration"
    match config.fleet.discovery:
        case DnsDiscovery() | KubernetesDiscovery() as discovery:
            return to_launch(discovery.engine, discovery.port, wanted)
        case FileDiscovery() as discovery:
            listed_in = discovery.path
            engines = read_engines(Path(discovery.path).expanduser(), config, discovery.engine)
    if wanted is None and engines:
        return engines[0]
    for engine in engines:
        if engine.id == wanted:
            return engine
    ids = ", ".join(engine.id for engine in engines) or "none"
    lacking = "there is no engine" if wanted is None else f"no engine has the id {wanted!r}"
    raise UserError(f"{lacking}; {listed_in} lists: {ids}")


def run(args: argparse.Namespace) -> int:
    """Show the command (`--print`) or replace this process by the engine."""
    config = config_of(args)
    engine = choose_engine(config, args.id)
    engine = engine.model_copy(update={"extra_args": (*engine.extra_args, *args.vllm_args)})
    paths = RuntimePaths.of(config)
    options = LaunchOptions(host=args.host, dev_mode=args.dev_mode)
    build = installed_build()
    if args.print:
        model = config.model_of(engine)
        check_demo_model(model)
        model_dir = Path(model.path or demo_model_dir()).expanduser().absolute()
        say(
            build_command(config, engine, paths, model_dir, build.platform, options=options).shell()
        )
        return 0
    build.check_tested()
    model_dir = model_dir_of(config, engine)
    command = build_command(config, engine, paths, model_dir, build.platform, options=options)
    check_launch(command, build, model_dir)
    paths.create()
    return exec_engine(command)
