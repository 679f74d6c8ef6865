"""Fuzzing of a server by schemathesis, with requests that its OpenAPI schema allows, and many that it forbids."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance"
CHECKS += ",unsupported_method"

# Fields whose values depend on other fields or on the vocabulary, or that accept one value only.
REFUSED = {
    "response_format", "structured_outputs", "use_beam_search", "best_of", "suffix", "tools", "tool_choice",
    "functions", "function_call", "modalities", "audio", "web_search_options", "chat_template", "documents",
    "chat_template_kwargs", "stream_options", "min_tokens", "allowed_token_ids", "logit_bias", "stop_token_ids",
    "truncate_prompt_tokens", "top_logprobs", "prompt_logprobs", "continue_final_message", "max_tokens",
    "max_completion_tokens",
}  # fmt: skip


def fuzz(url: str, schema: str, examples: int, folder: Path, key: str = "none") -> None:
    """Fail if a response has status 5xx or an undocumented status, or takes longer than 20 s."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", schema, "--url", url, "--max-examples", str(examples)]
    # The server accepts more than a narrowed schema allows.
    checks = CHECKS + (",negative_data_rejection" if schema.startswith("http") else "")
    command += ["--checks", checks, "--mode", "all", "--request-timeout", "20", "--no-color", "--seed", "1"]
    command += ["--exclude-path-regex", "^/(pause|sleep)$"]  # a server that rests would answer nothing in 20 s
    command += ["--suppress-health-check", "all", "--continue-on-failure", "--header", f"Authorization: Bearer {key}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def narrowed(url: str, model: str, folder: Path) -> str:
    """Write the server's schema to a file, without most fields that are always refused, and return the file's path.

    More requests are valid then: the schema allows only the served model, small token ids, and messages of text.
    """
    schema: dict[str, Any] = httpx2.get(url + "/openapi.json").json()
    for name, body in schema["components"]["schemas"].items():
        fields = body["properties"]
        for field in set(fields) & REFUSED:
            del fields[field]
        if "model" in fields:
            fields["model"] = {"enum": [model, None]}
        if name == "CompletionRequest":
            ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 258}, "minItems": 1}
            fields["prompt"] = {"anyOf": [{"type": "string"}, ids, {"type": "array", "items": ids, "minItems": 1}]}
            body["required"] = ["prompt"]
        if name == "ChatRequest":
            item = {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}}
            message = {"type": "object", "required": list(item), "properties": item}
            fields["messages"] = {"type": "array", "items": message, "minItems": 1}
    for path in [path for path in schema["paths"] if "{model}" in path]:
        schema["paths"][path]["get"]["parameters"][0]["schema"] = {"enum": [model]}
    file = folder / "schema.json"
    file.write_text(json.dumps(schema))
    return str(file)
