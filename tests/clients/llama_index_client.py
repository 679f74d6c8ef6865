"""llama-index's OpenAILike on a server. Arguments: URL, expected chat answer, expected continuation of a prompt."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

_, url, answered, continued = sys.argv
options = {"model": "tiny", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 5, "temperature": 0}
chat, text = (OpenAILike(is_chat_model=is_chat, **options) for is_chat in (True, False))
message = ChatMessage(role="user", content="Once upon a time")
assert chat.chat([message]).message.content == answered
assert "".join(piece.delta or "" for piece in chat.stream_chat([message])) == answered
assert text.complete("Once upon a time").text == continued
assert "".join(piece.delta or "" for piece in text.stream_complete("Once upon a time")) == continued
