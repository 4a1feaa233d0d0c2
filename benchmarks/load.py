"""Sends streaming completions, all at once or at a rate, and measures what a user sees."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_stream import HttpError, events


@dataclass(frozen=True)
class Load:
    """What to send, and when."""

    prompts: Sequence[str]
    max_tokens: int
    concurrency: int | None = None
    """Closed loop: this many at a time, the next when one ends. None = open loop."""
    rate: float | None = None
    """Open loop: Poisson arrivals, requests per second. None = all at once."""
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """More fields of each request's body."""


@dataclass
class Exchange:
    """One request as its sender saw it. Times are seconds of one clock."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text came."""
    done: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Summary:
    """Times in milliseconds, rates per second over the whole run."""

    requests: int
    errors: int
    first_error: str | None
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    itl_p99_ms: float
    output_tokens_per_s: float
    decode_tokens_per_s: float
    """Output tokens after the first ones, over the time from the first first one to the last one."""
    prompt_tokens_per_s: float
    server_cpu_s: float = math.nan
    """CPU time the server spent, where it is known."""


async def run_load(base_url: str, model: str, load: Load, seed: int = 0) -> Summary:
    """Send the load to an OpenAI-compatible server and summarise it."""
    exchanges = [Exchange() for _ in load.prompts]
    work = list(zip(load.prompts, exchanges, strict=True))
    started = time.perf_counter()
    if load.concurrency is not None:
        queue = iter(work)
        await asyncio.gather(*(_drain(base_url, model, load, queue) for _ in range(load.concurrency)))
    else:
        arrivals = random.Random(seed)
        async with asyncio.TaskGroup() as tasks:
            for prompt, exchange in work:
                tasks.create_task(_exchange(base_url, model, load, prompt, exchange))
                await asyncio.sleep(arrivals.expovariate(load.rate) if load.rate else 0.0)
    return summarise(exchanges, time.perf_counter() - started)


async def _drain(base_url: str, model: str, load: Load, queue: Any) -> None:
    for prompt, exchange in queue:
        await _exchange(base_url, model, load, prompt, exchange)


async def _exchange(base_url: str, model: str, load: Load, prompt: str, exchange: Exchange) -> None:
    asked = {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    body = {
        "model": model,
        "max_tokens": load.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked,
        **load.extra,
    }
    exchange.sent = time.perf_counter()
    try:
        async for arrived, event in events(f"{base_url}/v1/{'chat/' if load.chat else ''}completions", body):
            if any(_text(choice) for choice in event.get("choices") or ()):
                exchange.arrivals.append(arrived)
            if usage := event.get("usage"):
                exchange.prompt_tokens = usage["prompt_tokens"]
                exchange.output_tokens = usage["completion_tokens"]
                exchange.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not exchange.arrivals:
            exchange.error = "no text came"
    except (HttpError, OSError, TimeoutError) as error:
        exchange.error = str(error) or type(error).__name__
    exchange.done = time.perf_counter()


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""


def summarise(exchanges: Sequence[Exchange], wall_s: float) -> Summary:
    """Percentiles over the requests that went well."""
    good = [exchange for exchange in exchanges if exchange.error is None]
    first = [exchange.arrivals[0] - exchange.sent for exchange in good]
    gaps = [b - a for exchange in good for a, b in zip(exchange.arrivals, exchange.arrivals[1:], strict=False)]
    output = sum(exchange.output_tokens for exchange in good)
    decoding = [exchange for exchange in good if len(exchange.arrivals) > 1]
    decode_s = max((e.arrivals[-1] for e in decoding), default=0.0) - min(
        (e.arrivals[0] for e in decoding), default=0.0
    )
    prompt = sum(exchange.prompt_tokens for exchange in good)
    return Summary(
        requests=len(exchanges),
        errors=len(exchanges) - len(good),
        first_error=next((exchange.error for exchange in exchanges if exchange.error), None),
        wall_s=wall_s,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(exchange.cached_tokens for exchange in good),
        ttft_p50_ms=1e3 * percentile(first, 50),
        ttft_p99_ms=1e3 * percentile(first, 99),
        itl_p50_ms=1e3 * percentile(gaps, 50),
        itl_p95_ms=1e3 * percentile(gaps, 95),
        itl_p99_ms=1e3 * percentile(gaps, 99),
        output_tokens_per_s=output / wall_s,
        decode_tokens_per_s=(sum(e.output_tokens - 1 for e in decoding) / decode_s) if decode_s else math.nan,
        prompt_tokens_per_s=prompt / wall_s,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; not a number when there are no values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]
