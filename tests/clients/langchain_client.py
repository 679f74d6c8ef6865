"""langchain-openai on a server. Arguments: URL, expected answer of a chat, expected continuation of a prompt."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

_, url, answered, continued = sys.argv
chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
answer = chat.invoke("Once upon a time")
assert answer.content == answered, answer
assert answer.usage_metadata["output_tokens"] == 5
assert answer.usage_metadata["input_token_details"]["cache_read"] > 0  # clients.py has sent the same chat before
assert "".join(piece.content for piece in chat.stream("Once upon a time")) == answered
# langchain sends explicit nulls, and a list of one prompt.
text = OpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
assert text.invoke("Once upon a time") == continued
assert "".join(text.stream("Once upon a time")) == continued
assert text.batch(["Once upon a time"] * 3) == [continued] * 3
