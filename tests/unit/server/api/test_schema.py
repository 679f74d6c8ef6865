"""The OpenAPI schema at /openapi.json, and requests generated from it."""

from pathlib import Path

import pytest

from tests.support.attacks.fuzz import fuzz, narrowed
from tests.support.server.harness import serving


@pytest.mark.nightly  # tests/unit/server/http/test_odd_bodies.py has bodies of any kind
@pytest.mark.parametrize("requests", ["of any kind", "mostly valid"])
def test_requests_generated_from_the_schema_are_answered_properly(requests: str, tmp_path: Path) -> None:
    with serving(template="{% for m in messages %}{{ m.content }}{% endfor %}", admin_api_key="root") as client:
        if requests == "mostly valid":
            fuzz(client.url, narrowed(client.url, "fake", tmp_path), 6, tmp_path, "root")
            assert len(client.engine.seen) > 50, "hardly any request was valid"
        else:
            fuzz(client.url, client.url + "/openapi.json", 5, tmp_path, "root")
        assert not client.service.jobs
        assert not client.engine.has_work()
        assert client.service.local.admission.texts == 0


def test_the_schema_lists_all_status_codes() -> None:
    with serving() as client:
        schema = client.get("/openapi.json").json()
    assert "422" not in str(schema["paths"])
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert set(responses) == {"200", "400", "401", "404", "413", "429", "500", "503", "504"}
