"""Conversations of `jswa bench serve` on a server: who asks when, what each request has, and what is counted."""

import itertools
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jswa.bench import cli
from jswa.bench.config import BenchConfig
from jswa.bench.conversations import conversations
from jswa.errors import ConfigError
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving

CLIENTS, ROUNDS = 4, 3
SHAPE = ["--clients", "4", "--rounds", "3", "--request", "5", "--output", "6"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class Log:
    """What a server is asked, in the order of what happens: bodies when they arrive, and the ends of their answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.events: list[tuple[str, int]] = []
        self.refused = -1  # the number of a request to refuse; tests may set it
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget what was asked, and refuse nothing."""
        self.bodies.clear()
        self.events.clear()
        self.refused = -1

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the application with this log."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            parts: list[Message] = [await receive()]
            while parts[-1].get("more_body"):
                parts.append(await receive())
            with self._lock:
                number = len(self.bodies)
                self.bodies.append(json.loads(b"".join(part["body"] for part in parts)))
                self.events.append(("begin", number))
            if number == self.refused:
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b"busy"})
                return
            left = iter(parts)

            async def again() -> Message:
                return next(left, None) or await receive()

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    with self._lock:
                        self.events.append(("end", number))
                await send(message)

            await app(scope, again, noted)

        return logged


class Run(NamedTuple):
    """A run: the server's log without the warm-up, and what the client wrote."""

    log: Log
    client: Client

    def main(self, file: Path, *flags: str, status: int = 0, warmup: int = 0) -> dict[str, Any]:
        """Run the load with these options and return its figures."""
        shared = ["--base-url", self.client.url, "--warmup", str(warmup), "--json", str(file)]
        assert cli.main([*shared, *SHAPE, *flags]) == status
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def talks(self, **options: Any) -> list[list[int]]:
        """Return for each client the numbers of its requests, told by its first message."""
        config = BenchConfig(clients=CLIENTS, rounds=ROUNDS, input_words=5, output_tokens=6, **options)
        firsts = [talk.turns[0].message for talk in conversations(CLIENTS, config.lengths, config.seed)]
        assert len(set(firsts)) == CLIENTS
        found = defaultdict[int, list[int]](list)
        for number, body in enumerate(self.log.bodies):
            said = body.get("prompt") or "\n".join(m["content"] for m in body["messages"] if m["role"] == "user")
            found[next(client for client, first in enumerate(firsts) if first in said)].append(number)
        return [found[client] for client in range(CLIENTS)]


@pytest.fixture(scope="module")
def server() -> Iterator[Run]:
    """A server with steps of 2 ms that runs 3 requests at a time, and a log."""
    log, engine = Log(), FakeEngine(max_rows=3, max_model_len=4096)
    engine.delay = 0.002
    with serving(engine, template=TEMPLATE, wrap=log.wrap) as client:
        yield Run(log, client)


@pytest.fixture
def run(server: Run) -> Run:
    """The server, which has been asked nothing."""
    server.log.clear()
    server.client.engine.seen.clear()
    return server


def letters(tokens: int) -> str:
    """The answer of six tokens that the fake engine gives to a prompt of so many."""
    return "".join(chr(97 + (tokens + position) % 26) for position in range(6))


def test_a_text_is_the_one_before_its_answer_and_a_message(run: Run, tmp_path: Path) -> None:
    run.main(tmp_path / "f")
    for numbers in run.talks():
        prompts = [run.log.bodies[number]["prompt"] for number in numbers]
        assert len(prompts) == ROUNDS
        for before, after in itertools.pairwise(prompts):
            old, _, message = after.rpartition("\n")
            assert old == before + letters(1 + len(before)), "the tokenizer puts a token before it"
            assert len(message.split()) == 5


def test_messages_are_those_before_their_answer_and_a_message(run: Run, tmp_path: Path) -> None:
    run.main(tmp_path / "f", "--endpoint", "chat", "--prefix-words", "4")
    for numbers in run.talks(prefix_words=4):
        asked = [run.log.bodies[number]["messages"] for number in numbers]
        assert [[m["role"] for m in messages] for messages in asked] == [
            ["system", "user"] + ["assistant", "user"] * turn for turn in range(ROUNDS)
        ]
        for before, after in itertools.pairwise(asked):
            prompt = "".join(f"[{m['role']}]{m['content']}" for m in before)
            assert after[:-1] == [*before, {"role": "assistant", "content": letters(len(prompt))}]
            assert len(after[-1]["content"].split()) == 5


@pytest.mark.parametrize("flags", [[], ["--enable-round-barrier"], ["--request-rate", "100"]])
def test_no_client_has_two_requests_at_once_and_no_more_are_in_flight_than_asked(
    run: Run, flags: list[str], tmp_path: Path
) -> None:
    run.main(tmp_path / "f", "--max-concurrency", "2", *flags)
    client_of = {number: client for client, numbers in enumerate(run.talks()) for number in numbers}
    assert len(client_of) == CLIENTS * ROUNDS
    running, most = Counter[int](), 0
    for kind, number in run.log.events:
        running[client_of[number]] += 1 if kind == "begin" else -1
        assert set(running.values()) <= {0, 1}
        most = max(most, running.total())
    assert most == 2 or flags[:1] == ["--request-rate"]


def rounds_overlap(run: Run) -> bool:
    """Whether a request began while one of an earlier round had not ended."""
    round_of = {number: turn for numbers in run.talks() for turn, number in enumerate(numbers)}
    ended = Counter[int]()
    for kind, number in run.log.events:
        turn = round_of[number]
        if kind == "end":
            ended[turn] += 1
        elif any(ended[before] < CLIENTS for before in range(turn)):
            return True
    return False


def test_a_round_begins_after_all_of_the_round_before_only_with_the_barrier(run: Run, tmp_path: Path) -> None:
    """Without it, a client of three in flight has its second turn before the fourth has ended its first."""
    shared = ["--max-concurrency", "3", "--ready-queue-policy", "fifo"]
    run.main(tmp_path / "f", *shared)
    assert rounds_overlap(run)
    run.log.clear()
    run.main(tmp_path / "f", *shared, "--enable-round-barrier")
    assert not rounds_overlap(run)


def test_the_next_client_is_the_one_that_has_waited_longest_or_any(run: Run, tmp_path: Path) -> None:
    orders = []
    for policy in ("fifo", "random"):
        run.log.clear()
        run.main(tmp_path / "f", "--max-concurrency", "1", "--ready-queue-policy", policy)
        client_of = {number: client for client, numbers in enumerate(run.talks()) for number in numbers}
        orders.append([client_of[number] for number in range(CLIENTS * ROUNDS)])
    assert orders[0] == [*range(CLIENTS)] * ROUNDS
    assert orders[1] != orders[0]


def test_no_turn_is_sent_before_its_arrival(run: Run, tmp_path: Path) -> None:
    records = run.main(tmp_path / "f", "--request-rate", "30", "--seed", "5")["records"]
    chance = random.Random(5)
    dues = itertools.accumulate((chance.expovariate(30) for _ in records[1:]), initial=0.0)
    times = sorted(record["arrival"] for record in records)
    assert all(time >= due for time, due in zip(times, dues, strict=True))


def test_hits_of_rounds_add_up_and_are_those_of_the_server(run: Run, tmp_path: Path) -> None:
    """The fake engine finds half of every prompt."""
    found = run.main(tmp_path / "f")
    rounds, records = found["rounds"], found["records"]
    assert [one["round"] for one in rounds] == [1, 2, 3]
    for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "repeated_tokens"):
        assert sum(one[name] for one in rounds) == found[name], name
    assert found["cached_tokens"] == sum(len(request.prompt) // 2 for request in run.client.engine.seen)
    assert found["hit_rate"] == found["cached_tokens"] / found["prompt_tokens"]
    assert found["completion_tokens"] == CLIENTS * ROUNDS * 6
    tokens = {(one["client"], one["round"]): one for one in records}
    for client, turn in tokens:
        before = tokens.get((client, turn - 1), {"prompt_tokens": 0, "completion_tokens": 0})
        assert tokens[client, turn]["repeated_tokens"] == before["prompt_tokens"] + before["completion_tokens"]
    assert found["input_throughput"] == pytest.approx(found["prompt_tokens"] / found["seconds"])
    assert (found["turns"], found["turns_without_answer"], found["short_answers"]) == (12, 0, 0)
    assert "text" not in records[0]


def test_a_conversation_ends_at_its_error_and_the_others_go_on(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log.refused = 2
    found = run.main(tmp_path / "f", "--enable-round-barrier", status=1)
    printed = capsys.readouterr().out
    assert (found["requests"], found["failed"], found["turns_without_answer"]) == (10, 1, 3)
    assert [one["requests"] for one in found["rounds"]] == [4, 3, 3]
    assert "3 of 12 turns have no answer" in printed
    assert "error: status 503" in printed


@pytest.mark.parametrize("given", [True, False])
def test_a_conversation_ends_before_the_limit_of_the_options_or_of_the_server(
    given: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    with serving(FakeEngine(max_model_len=4096 if given else 90), wrap=log.wrap) as client:
        run = Run(log, client)
        found = run.main(tmp_path / "f", *(["--max-model-len", "90"] if given else []))
        sent = [len(numbers) for numbers in run.talks()]
    assert sent == [2] * CLIENTS
    assert all(1 + len(body["prompt"]) + 6 <= 90 for body in log.bodies)
    assert (found["failed"], found["turns_without_answer"], found["max_model_len"]) == (0, 0, 90)
    assert (found["full_conversations"], found["turns_beyond_context"]) == (CLIENTS, CLIENTS)
    assert "the next request might exceed 90 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "5k"], "max_model_len = 5000: must be at most the server's, 4096"),
        (["--prefix-words", "5000"], "max_model_len = 4096: must be at least 5011"),
    ],
)
def test_limits_that_no_conversation_can_keep_are_refused(
    run: Run, flags: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run.main(tmp_path / "f", *flags)
    assert not run.log.bodies


def test_the_warm_up_says_nothing_that_a_conversation_says(run: Run, tmp_path: Path) -> None:
    run.main(tmp_path / "f", "--prefix-words", "3", warmup=2)
    warm, measured = run.log.bodies[:2], run.log.bodies[2:]
    assert len(measured) == CLIENTS * ROUNDS
    for body in warm:
        assert not any(one["prompt"].startswith(body["prompt"][:10]) for one in measured)


async def other_server(scope: Scope, receive: Receive, send: Send) -> None:
    """A server of OpenAI's API that counts no cached tokens, answers with reasoning first, and heeds no ignore_eos."""
    if scope["type"] == "lifespan":
        return
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"reasoning_content": "so"}}]}]
    chunks += [{"choices": [{"delta": {"content": "yes"}}]}]
    chunks += [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}}]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    body = json.dumps({"data": [{"id": "m"}]}) if scope["method"] == "GET" else events
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})


async def unlisted_server(scope: Scope, receive: Receive, send: Send) -> None:
    """The same server without a list of models."""
    if scope["type"] == "http" and scope["method"] == "GET":
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await other_server(scope, receive, send)


def test_a_server_need_not_list_a_model_that_is_named(tmp_path: Path) -> None:
    log = Log()
    with serving(wrap=lambda app: log.wrap(unlisted_server)) as client:
        run = Run(log, client)
        with pytest.raises(ConfigError, match="answers GET /models with status 404"):
            run.main(tmp_path / "f")
        found = run.main(tmp_path / "f", "--endpoint", "chat", "--model", "m")
    assert (found["requests"], found["failed"], found["max_model_len"]) == (12, 0, None)
    assert {body["model"] for body in log.bodies} == {"m"}


def test_a_server_that_counts_no_hits_has_unknown_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    with serving(wrap=lambda app: log.wrap(other_server)) as client:
        found = Run(log, client).main(tmp_path / "f", "--endpoint", "chat", status=0)
    printed = capsys.readouterr().out
    assert (found["hit_rate"], found["cached_tokens"], found["short_answers"]) == (None, None, 12)
    assert [one["hit_rate"] for one in found["rounds"]] == [None] * ROUNDS
    assert printed.count("unknown") == 2 + ROUNDS + 1, "in the figures of all, and in a line of each round and of all"
    assert "12 answers are shorter than asked" in printed
    answers = [m["content"] for m in log.bodies[-1]["messages"] if m["role"] == "assistant"]
    assert set(answers) == {"yes"}, "the reasoning is not sent back"
