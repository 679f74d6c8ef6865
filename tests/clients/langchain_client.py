"""langchain-openai on a server: the base URL is the argument."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

url = sys.argv[1]
chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
answer = chat.invoke("Once upon a time")
assert answer.content == ", the", answer
assert answer.usage_metadata["output_tokens"] == 5
assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0
assert "".join(piece.content for piece in chat.stream("Once upon a time")) == ", the"
# It sends explicit nulls, and a list of one prompt.
text = OpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
assert text.invoke("Once upon a time") == ", the"
assert "".join(text.stream("Once upon a time")) == ", the"
assert text.batch(["Once upon a time"] * 3) == [", the"] * 3
