"""llama-index's OpenAILike on a server: the base URL is the argument."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

options = {"model": "tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 5, "temperature": 0}
chat, text = (OpenAILike(is_chat_model=is_chat, **options) for is_chat in (True, False))
message = ChatMessage(role="user", content="Once upon a time")
assert chat.chat([message]).message.content == ", the"
assert "".join(piece.delta or "" for piece in chat.stream_chat([message])) == ", the"
assert text.complete("Once upon a time").text == ", the"
assert "".join(piece.delta or "" for piece in text.stream_complete("Once upon a time")) == ", the"
