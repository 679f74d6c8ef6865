"""The second prefix cache in host memory, on the embedded model: answers are those of cold runs."""

from pathlib import Path

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


def test_plans_that_need_host_memory_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not be replayed."""
    monkeypatch.setenv("JSWA_DUMP_PLANS", str(tmp_path / "plans"))
    with pytest.raises(ConfigError, match="host_kv_bytes"):
        LLM("tiny", host_kv_bytes=8_000_000, **OPTIONS)
