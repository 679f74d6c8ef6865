"""langchain-openai on a server: the arguments are its URL, and what it says to a chat and to a prompt."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

_, url, said, continued = sys.argv
chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
answer = chat.invoke("Once upon a time")
assert answer.content == said, answer
assert answer.usage_metadata["output_tokens"] == 5
assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0
assert "".join(piece.content for piece in chat.stream("Once upon a time")) == said
# It sends explicit nulls, and a list of one prompt.
text = OpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
assert text.invoke("Once upon a time") == continued
assert "".join(text.stream("Once upon a time")) == continued
assert text.batch(["Once upon a time"] * 3) == [continued] * 3
