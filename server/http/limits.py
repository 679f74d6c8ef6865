"""The limits of a request, in one table. `docs/serving.md` shows it; tests try each limit and one beyond it.

A request beyond a limit is refused with status 400 (a body: 413) before anything is computed for it.
"""

MAX_BODY_BYTES = 16 * 2**20  # default of --max-body-size
MAX_VALUES = 50_000  # strings, numbers, objects and lists of a large body, besides token ids
MAX_DEPTH = 128  # levels of objects and lists of a body; a JSON Schema inside may have 100
MAX_HEADER_BYTES = 64 * 2**10  # all header fields and the request line
READ_SECONDS = 60.0  # for receiving a request, from its connection or its first byte to its end
WRITE_SECONDS = 60.0  # for a client to read a piece of an answer
MAX_N = 128  # texts per prompt
MAX_PROMPTS = 1_024  # prompts of one completions request
MAX_TEXTS = 1_024  # prompts x n
PIECE_BYTES = 64 * 2**10  # of a piece of an answer
MAX_STOPS = 16  # stop strings
MAX_STOP_CHARS = 1_024  # of one stop string, or one bad word
MAX_STOP_IDS = 1_024  # stop_token_ids
MAX_BIASES = 1_024  # entries of logit_bias
MAX_ALLOWED_IDS = 300_000  # allowed_token_ids
MAX_LISTED = 38_400_000  # (allowed_token_ids + entries of logit_bias) x texts of a request
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20  # logprobs, top_logprobs, prompt_logprobs
MAX_PROMPT_LOGPROBS = 4_194_304  # tokens of a request's prompts x n x (log probabilities asked for + 4)
MAX_GENERATED_LOGPROBS = 4_194_304  # generated tokens of a request x (log probabilities asked for + 4), if not streamed
MAX_BACKLOG_BYTES = 16 * 2**20  # of a stream that its client has not read
MAX_MESSAGES = 4_096  # of one conversation
MAX_PARTS = 1_024  # of the content of one message
MAX_TOOLS = 128
MAX_IMAGE_BYTES = 20 * 2**20  # of the file of an image; default of --max-image-size
MAX_URL_CHARS = 2_048  # of the URL of an image that the server fetches
MAX_DETOKENIZED = 1_000_000  # tokens of /detokenize
MAX_ID_CHARS = 128  # request_id, cache_salt, x-request-id
MAX_NAME_CHARS = 512  # model, lora_name
MAX_PATH_CHARS = 4_096  # lora_path
STORED_BYTES = 64 * 2**20  # of all conversations that previous_response_id may name, as JSON
STORED_SECONDS = 3_600  # for which they are kept
