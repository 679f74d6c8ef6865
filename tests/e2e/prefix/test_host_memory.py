"""The second prefix cache in host memory, on the embedded model: answers are those of cold runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jswa.errors import ConfigError
from jswa.llm import LLM
from tests.e2e.prefix.test_conversations import OPTIONS, alone, cold_engine
from tests.support.prefix.talk import Talk

pytestmark = pytest.mark.optimized


def test_conversations_that_went_to_host_memory_go_on_as_if_alone() -> None:
    """Random conversations on an arena that is far too small for them, with aborts, edits and preemptions."""
    with LLM("tiny", deterministic=True, host_kv_bytes=8_000_000, **OPTIONS) as llm:
        turns = Talk(llm, 5, 16).run()
        stats = llm.cache_stats()
        assert stats.host_tokens > 100
        assert stats.host_read_slots > 0
        assert 0 < stats.host_usage <= 1
        restored = [turn for turn in turns if turn.prefix is not None and turn.prefix.host_tokens]
        assert all(turn.prefix and turn.prefix.host_tokens <= turn.hit for turn in restored)
        engine = cold_engine(llm)
        for turn in restored:
            assert turn.tokens == alone(engine, turn)[: len(turn.tokens)]


def test_conversations_that_went_to_the_disk_go_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations begin again with the texts of an engine that has ended; one of its files is torn."""
    options = {**OPTIONS, "host_kv_bytes": 8_000_000, "disk_kv": f"{tmp_path}/kv:50000000"}
    with LLM("tiny", deterministic=True, **options) as llm:
        Talk(llm, 5, 16).run()
        assert llm.cache_stats().disk_written_bytes > 0
    torn, *others = sorted((tmp_path / "kv").glob("*.kv"))
    assert others
    torn.write_bytes(torn.read_bytes()[:-1])
    with LLM("tiny", deterministic=True, **options) as llm:
        turns = Talk(llm, 5, 16).run()
        stats = llm.cache_stats()
        assert stats.disk_tokens > 0
        assert stats.disk_read_bytes > 0
        assert 0 < stats.disk_usage <= 1
        restored = [turn for turn in turns if turn.prefix is not None and turn.prefix.disk_tokens]
        assert all(turn.prefix and turn.prefix.disk_tokens <= turn.prefix.host_tokens for turn in restored)
        engine = cold_engine(llm)  # flushes the cache
        for turn in restored:
            assert turn.tokens == alone(engine, turn)[: len(turn.tokens)]
        monkeypatch.setattr("jswa.building.parts.load_checkpoint", None)  # the folder is refused before
        with pytest.raises(ConfigError, match="another engine"):
            LLM("tiny", **options)
    assert not list((tmp_path / "kv").glob("*.kv"))


def test_plans_that_need_host_memory_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not be replayed."""
    monkeypatch.setenv("JSWA_DUMP_PLANS", str(tmp_path / "plans"))
    with pytest.raises(ConfigError, match="host_kv_bytes"):
        LLM("tiny", host_kv_bytes=8_000_000, **OPTIONS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mimo_v2_flash", "llama4", "gpt_oss+context"])
def test_texts_of_several_devices_come_back_to_each_of_them(name: str, tmp_path: Path) -> None:
    """With tensor parallelism, also if devices share tokens: answers from host and disk are those of cold runs."""
    environ = {**os.environ, "PJRT_NPROC": "16"}  # each device that waits for others blocks a thread
    command = [sys.executable, "-m", "tests.support.prefix.shared_tiers", str(tmp_path), name]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first["devices"] == second["devices"] == (4 if name.endswith("+context") else 2)
    assert first["host"] > 0
    assert first["written"] > 0
    assert second["disk"] > 0
    cold = first["answers"][0]
    for answers in (first["answers"][1], *second["answers"]):
        for found, expected in zip(answers, cold, strict=True):
            assert [token for token, _, _ in found] == [token for token, _, _ in expected]
            np.testing.assert_allclose(found, expected, atol=1e-4)
