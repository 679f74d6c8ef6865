"""litellm on a server. Arguments: URL, expected answer of a chat, expected continuation of a prompt."""

import sys

import litellm

_, url, answered, continued = sys.argv
base = f"{url}/v1"
ask = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 5, "temperature": 0}
answer = litellm.completion(model="hosted_vllm/tiny", api_base=base, **ask)
assert answer.choices[0].message.content == answered, answer
assert answer.usage.completion_tokens == 5
assert answer.usage.prompt_tokens_details.cached_tokens > 0  # clients.py has sent the same chat before
pieces = litellm.completion(model="hosted_vllm/tiny", api_base=base, stream=True, **ask)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answered
text = litellm.text_completion(
    model="text-completion-openai/tiny", api_base=base, api_key="none", prompt="Once upon a time", max_tokens=5,
    temperature=0,
)  # fmt: skip
assert text.choices[0].text == continued
for kind, wrong in ((litellm.NotFoundError, {"model": "hosted_vllm/other"}), (litellm.BadRequestError, {"top_p": 7})):
    try:
        litellm.completion(**{"model": "hosted_vllm/tiny", "api_base": base, **ask, **wrong})
    except kind as error:
        print("expected:", type(error).__name__)
    else:
        raise AssertionError(f"no {kind.__name__}")
