"""Load generator for OpenAI-compatible servers, and the comparison of ling-serve with mlx_lm.server.

    python benchmarks/serve.py compare --same-blas --rounds 3 --out results.json
    python benchmarks/serve.py load --url http://127.0.0.1:8000 --requests 100 --rate 4
    python benchmarks/serve.py load --url http://127.0.0.1:8000 --requests 100 --concurrency 16

`compare` starts each server by itself, one after the other, several rounds over, and reports medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this file's own folder would be there

import ling_serve.blas  # noqa: E402, F401  (must come before MLX)
from benchmarks import report  # noqa: E402
from benchmarks.load import Load, Summary, run_load  # noqa: E402
from benchmarks.random_checkpoint import write_random_checkpoint  # noqa: E402
from benchmarks.scenarios import SCENARIOS, WARM_UP, Scenario  # noqa: E402
from benchmarks.servers import LING_SERVE, MLX_LM, MLX_LM_OPENBLAS, Contender, serving  # noqa: E402

_COMMON_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "they")


def main() -> None:
    arguments = _parser().parse_args()
    print("$ python benchmarks/serve.py", *sys.argv[1:], flush=True)
    result = asyncio.run(arguments.run(arguments))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every server, every scenario, round after round."""
    contenders = [LING_SERVE, MLX_LM, *([MLX_LM_OPENBLAS] if arguments.same_blas else [])]
    if arguments.only:
        contenders = [c for c in (LING_SERVE, MLX_LM, MLX_LM_OPENBLAS) if c.name in arguments.only]
    scenarios = [s for s in SCENARIOS if not arguments.scenario or s.name in arguments.scenario]
    machine = report.machine()
    print(json.dumps(machine, indent=2), flush=True)
    measured: dict[str, dict[str, list[Summary]]] = {s.name: {c.name: [] for c in contenders} for s in scenarios}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint or write_random_checkpoint(Path(scratch) / "random")
        for number in range(arguments.rounds):
            # Every other round goes backwards, so that a drift of the machine favours nobody.
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                for scenario, summary in (
                    await _measure(contender, checkpoint, scenarios, number, arguments.log)
                ).items():
                    measured[scenario][contender.name].append(summary)
    for scenario in scenarios:
        print("\n" + report.comparison(scenario, measured[scenario.name], LING_SERVE.name), flush=True)
    return {
        "machine": machine,
        "command": sys.argv[1:],
        "scenarios": {
            scenario: {name: [asdict(s) for s in summaries] for name, summaries in by_server.items()}
            for scenario, by_server in measured.items()
        },
    }


async def _measure(
    contender: Contender, checkpoint: Path, scenarios: list[Scenario], number: int, log: Path
) -> dict[str, Summary]:
    """One round of one server."""
    found: dict[str, Summary] = {}
    model = contender.served_name(checkpoint)
    async with serving(contender, checkpoint, log) as server:
        await run_load(server.url, model, WARM_UP)
        for scenario in scenarios:
            spent = server.cpu_seconds()
            summary = await run_load(server.url, model, scenario.load(number))
            summary = replace(summary, server_cpu_s=server.cpu_seconds() - spent)
            found[scenario.name] = summary
            line = f"round {number + 1}  {contender.name:24}  {scenario.name:24}"
            print(f"{line}  {scenario.rate(summary):9.1f}  {summary.server_cpu_s:6.1f} CPU s", flush=True)
            if summary.errors:
                print(
                    f"    {summary.errors} of {summary.requests} failed, the first: {summary.first_error}", flush=True
                )
            elif summary.output_tokens != scenario.expected_output_tokens:
                raise RuntimeError(
                    f"{contender.name} wrote {summary.output_tokens} tokens in {scenario.name!r}; "
                    f"expected {scenario.expected_output_tokens}, so the servers did different work"
                )
    return found


async def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """One load against a server that already runs."""
    source = random.Random(arguments.seed)
    texts = [
        f"{source.randrange(10**9)} " + " ".join(source.choices(_COMMON_WORDS, k=arguments.prompt_words))
        for _ in range(arguments.requests)
    ]
    asked = Load(
        texts,
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        chat=arguments.chat,
        extra=arguments.extra,
    )
    summary = await run_load(arguments.url.rstrip("/"), arguments.model, asked, arguments.seed)
    print(report.single(summary), flush=True)
    return {"machine": report.machine(), "command": sys.argv[1:], "summary": asdict(summary)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    comparing = commands.add_parser("compare", help="start ling-serve and mlx_lm.server and compare them")
    comparing.set_defaults(run=compare)
    comparing.add_argument("--checkpoint", type=Path, help="a folder both load; default: a small random one")
    comparing.add_argument("--rounds", type=int, default=3)
    comparing.add_argument("--same-blas", action="store_true", help="also mlx_lm.server with OpenBLAS preloaded")
    comparing.add_argument("--only", action="append", help="a server's name; may be repeated")
    comparing.add_argument("--scenario", action="append", help="a scenario's name; may be repeated")
    comparing.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "serve-benchmark.log")

    loading = commands.add_parser("load", help="send a load to a server that already runs")
    loading.set_defaults(run=load)
    loading.add_argument("--url", default="http://127.0.0.1:8000")
    loading.add_argument("--model", default="default_model")
    loading.add_argument("--requests", type=int, default=32)
    loading.add_argument("--prompt-words", type=int, default=64)
    loading.add_argument("--max-tokens", type=int, default=64)
    loading.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    loading.add_argument("--extra", type=json.loads, default={}, help="more fields of each body, as JSON")
    loading.add_argument("--seed", type=int, default=0)
    pace = loading.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=int, help="closed loop with this many requests at a time")
    pace.add_argument("--rate", type=float, help="open loop with Poisson arrivals, requests per second")

    for command in (comparing, loading):
        command.add_argument("--out", type=Path, help="write everything measured as JSON")
    return parser


if __name__ == "__main__":
    main()
