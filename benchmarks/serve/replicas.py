"""Two replicas behind a router that follows their KV events, beside one engine with the memory of both.

    make .venv-clients/routers/installed
    python -m benchmarks.serve.replicas [--share 1] [--seed 8] [--policy sessions kv_aware cache_aware] [--json FILE]

The requests are those of live traffic (`benchmarks.cache.traces.Mix`) for `tiny`, over HTTP, with texts of one token;
a turn is sent after the turn before it has ended, and 8 requests are in progress. The router is vLLM's own, unchanged.
`sessions` is its policy kv_aware where each request names its session (`x-session-id`) and keeps its replica.

For each policy: the cached part of all prompt tokens, in % (`hits`), the difference to one engine, in points, and the
part of later turns that the replica of the turn before has answered (`stayed`).

At the end of the first policy one replica is killed amid 200 requests that are not streamed; `lost` are those without
an answer.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import result_file
from benchmarks.cache.traces import Mix, TraceRequest, expand

ROOT = Path(__file__).parents[2]
ROUTER = ROOT / ".venv-clients" / "routers" / "bin" / "vllm-router"
_PAGE, _PORTS = 16, 15_600
_AT_ONCE = 8
_MEMORY = 24  # MiB of KV in a replica
_POOL = 2 * _MEMORY * 2**20 // 3072  # tokens of both on all layers: 6 layers, keys and values of 2 x 32 float32
_IDS = 1_000  # token ids, after 10 special ones


@dataclass(frozen=True)
class Replica:
    """A server. `log`: the file of its messages; `events`: the port of its events, with that of replays after it."""

    url: str
    log: Path
    events: int
    process: subprocess.Popen[bytes]

    def answered(self) -> set[str]:
        """Return the ids of the requests that it has ended."""
        return set(re.findall(r"request_id=([\w-]+)", self.log.read_text(encoding="utf-8")))


@contextmanager
def replica(folder: Path, number: int, mebibytes: int) -> Iterator[Replica]:
    """Start `jswa serve tiny` with so much memory for KV; kill it at the end."""
    port = _PORTS + 10 * number
    events = {
        "enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1}",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "jswa", "serve", "tiny", "--port", "0", "--block-size", str(_PAGE),
        "--kv-cache-memory-bytes", f"{mebibytes}MiB", "--kv-events-config", json.dumps(events),
    ]  # fmt: skip
    log = folder / f"replica-{number}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=file)
    try:
        while (found := re.search(r"listening on (http://[\w.:]+)", log.read_text(encoding="utf-8"))) is None:
            if process.poll() is not None:
                raise SystemExit(f"a server ended before it listened:\n{log.read_text(encoding='utf-8')}")
            time.sleep(0.1)
        yield Replica(found[1], log, port, process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def router(folder: Path, policy: str, replicas: list[Replica]) -> Iterator[str]:
    """Start the router with a policy, wait until it answers, and yield its URL; kill it at the end."""
    url = f"http://127.0.0.1:{_PORTS}"
    known = "kv_aware" if policy == "sessions" else policy
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(_PORTS), "--policy", known, "--worker-urls"]
    command += [one.url for one in replicas]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(_PORTS + 1)]
    if policy == "sessions":
        command += ["--kv-aware-session-affinity-ttl-secs", "600"]
    if known == "kv_aware":
        command += ["--kv-event-block-size", str(_PAGE), "--kv-event-model", "tiny"]
        for one in replicas:
            command += ["--kv-event-source", f"{one.url}=tcp://127.0.0.1:{one.events}"]
            command += ["--kv-event-replay-source", f"{one.url}=tcp://127.0.0.1:{one.events + 1}"]
    with (folder / f"{policy}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not _answers(url):
            time.sleep(1)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.post(f"{url}/v1/completions", json=_body([5]), timeout=60).status_code == 200
    except httpx2.HTTPError:
        return False


def _body(prompt: list[int]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}


async def drive(url: str, requests: list[TraceRequest], names: str) -> tuple[int, int]:
    """Send the requests in order; return how many of their tokens were cached, and all of them."""
    slots = asyncio.Semaphore(_AT_ONCE)
    ended: dict[str, asyncio.Task[tuple[int, int]]] = {}  # by session: its last turn

    async def one(index: int, request: TraceRequest, before: asyncio.Task[tuple[int, int]] | None) -> tuple[int, int]:
        try:
            if before is not None:
                await before
            prompt = (10 + request.prompt % _IDS).tolist()
            # The router looks up no prompt whose body has a field that it does not know, such as `request_id`.
            headers = {"x-request-id": f"{names}-{index}", "x-session-id": request.session}
            answer = await client.post("/v1/completions", json=_body(prompt), headers=headers)
            answer.raise_for_status()
            usage = answer.json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        finally:
            slots.release()

    tasks = []
    async with httpx2.AsyncClient(base_url=url, timeout=300) as client:
        for index, request in enumerate(requests):
            await slots.acquire()
            task = asyncio.create_task(one(index, request, ended.get(request.session)))
            ended[request.session] = task
            tasks.append(task)
        found = await asyncio.gather(*tasks)
    return sum(cached for cached, _ in found), sum(tokens for _, tokens in found)


def stayed(replicas: list[Replica], requests: list[TraceRequest], names: str) -> float:
    """Return the part of later turns, in %, that the replica of the turn before has answered."""
    where = {name: place for place, one in enumerate(replicas) for name in one.answered()}
    last: dict[str, int] = {}
    same = []
    for index, request in enumerate(requests):
        place = where[f"{names}-{index}"]
        if request.session in last:
            same.append(last[request.session] == place)
        last[request.session] = place
    return 100 * sum(same) / len(same)


async def lost(url: str, victim: Replica) -> int:
    """Kill a replica amid 200 requests that are not streamed; return how many have no answer."""
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:

        async def one(index: int) -> bool:
            try:
                body = {**_body([11 + index, *range(20, 40)]), "max_tokens": 50}
                return (await client.post("/v1/completions", json=body)).status_code == 200
            except httpx2.HTTPError:
                return False

        tasks = [asyncio.create_task(one(index)) for index in range(200)]
        await asyncio.sleep(0.5)
        victim.process.kill()
        return sum(not found for found in await asyncio.gather(*tasks))


def measure(policies: list[str], mix: Mix, folder: Path) -> dict[str, Any]:
    """Return the figures of one engine, and of two replicas with each policy."""
    requests = expand(mix.lines())
    with replica(folder, 1, 2 * _MEMORY) as one:
        cached, tokens = asyncio.run(drive(one.url, requests, "one"))
    found: dict[str, Any] = {"requests": len(requests), "tokens": tokens, "one engine": {"hits": 100 * cached / tokens}}
    for policy in policies:
        with ExitStack() as stack:
            replicas = [stack.enter_context(replica(folder, number, _MEMORY)) for number in (2, 3)]
            url = stack.enter_context(router(folder, policy, replicas))
            cached, tokens = asyncio.run(drive(url, requests, policy))
            hits = 100 * cached / tokens
            row = {"hits": hits, "points": hits - found["one engine"]["hits"]}
            row["stayed"] = stayed(replicas, requests, policy)
            if policy == policies[0]:
                row["lost"] = asyncio.run(lost(url, replicas[1]))
        found[policy] = row
        print(policy, result_file.rounded(row), flush=True)
    return found


def main() -> None:
    """Print the figures, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--policy", nargs="+", default=["sessions", "kv_aware", "cache_aware"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    mix = Mix(args.share, args.seed, pool=_POOL, user=(32, 128), output=(8, 24))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.policy, mix, Path(folder))
    print(result_file.rounded(found))
    if args.json is not None:
        result_file.write(args.json, found)


if __name__ == "__main__":
    main()
