"""litellm on a server: the arguments are its URL, and what it says to a chat and to a prompt."""

import sys

import litellm

_, url, said, continued = sys.argv
base = f"{url}/v1"
ask = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 5, "temperature": 0}
answer = litellm.completion(model="hosted_vllm/tiny", api_base=base, **ask)
assert answer.choices[0].message.content == said, answer
assert answer.usage.completion_tokens == 5
assert answer.usage.prompt_tokens_details.cached_tokens >= 0
pieces = litellm.completion(model="hosted_vllm/tiny", api_base=base, stream=True, **ask)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said
text = litellm.text_completion(
    model="text-completion-openai/tiny", api_base=base, api_key="none", prompt="Once upon a time", max_tokens=5,
    temperature=0,
)  # fmt: skip
assert text.choices[0].text == continued
for kind, wrong in ((litellm.NotFoundError, {"model": "hosted_vllm/other"}), (litellm.BadRequestError, {"top_p": 7})):
    try:
        litellm.completion(**{"model": "hosted_vllm/tiny", "api_base": base, **ask, **wrong})
    except kind as error:
        print("as it should:", type(error).__name__)
    else:
        raise AssertionError(f"no {kind.__name__}")
