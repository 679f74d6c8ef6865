"""Events of an engine about its cached KV, over ZeroMQ."""

import time
from pathlib import Path

import msgspec
import pytest
import zmq

from jswa.llm import LLM
from jswa.types import SamplingParams
from tests.support.prefix.subscriber import Followed, Subscriber

PAGE = 4


@pytest.mark.parametrize("windows", [False, True])
def test_a_router_knows_which_prompts_are_cached(tmp_path: Path, windows: bool) -> None:
    """After each answer the blocks of its text are known; nothing is after a flush; the address is free at the end.

    Windows are announced only where the option asks for them: a router that does not tell groups apart would drop a
    text whose window has moved on.
    """
    address = f"ipc://{tmp_path}/events"
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.connect(address)
    sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
    events = {"enable_kv_cache_events": True, "endpoint": address, "topic": "kv", "windows": windows}
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": PAGE}
    subscriber = Subscriber()

    def follow(until: int | None) -> None:
        """Follow events until so many blocks of full layers are known; None: until the cache was cleared."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            while sub.poll(50):
                for event in msgspec.msgpack.decode(sub.recv_multipart()[2])[1]:
                    subscriber.apply(event)
            if len([one for one in subscriber.held if one[1] == 0]) == (until or 0):
                return
        raise AssertionError(f"{len(subscriber.held)} blocks are known")

    with LLM("tiny", kv_events_config=events, **options) as llm:
        time.sleep(0.5)  # the subscription must arrive first
        prompt = list(range(10, 23))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([prompt], params)
        text = [*prompt, *answer.outputs[0].token_ids]
        follow((len(text) - 1) // PAGE)  # the last token's KV was not computed
        longest = max(subscriber.texts.values(), key=lambda one: len(one[1]))
        assert longest == ("", tuple(text[: (len(text) - 1) // PAGE * PAGE]))
        assert subscriber.groups[0] == ("full_attention", None)
        assert [subscriber.groups[group][0] for group in subscriber.groups if group] == ["sliding_window"] * windows
        llm.flush_cache()
        follow(None)
        assert not subscriber.held
    with LLM("tiny", kv_events_config=events, **options):
        pass
    context.destroy(linger=0)


def test_a_router_follows_host_memory_too() -> None:
    """What the device evicts is known to be in host memory."""
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": PAGE}
    with LLM("tiny", host_kv_bytes=4_000_000, kv_cache_memory_bytes=300_000, **options) as llm:
        cache = llm.engine.scheduler.cache
        assert cache.host is not None
        device, host = Followed(cache.prefix.tree), Followed(cache.host.tier.prefix.tree, "CPU")
        for number in range(12):
            llm.generate([[number + 5, *range(10, 50)]], SamplingParams(temperature=0, max_tokens=4))
            device.check()
            host.check()
        assert host.subscriber.held
