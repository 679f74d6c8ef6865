"""Chat templates in the manner of families: how they write the tools, reasoning, text and calls of an assistant.

They are our own, with the families' delimiters and ways of writing values. FAMILIES have a reader that ships with jswa.
The calls of FOREIGN ones have none, although their delimiters look like those of another family.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from tests.support.text.transcripts import tokenizer_of


@dataclass(frozen=True)
class Family:
    """A chat template.

    Attributes:
        reader: the response template that reads it.
        tokens: its delimiters that the tokenizer has as tokens.
    """

    source: str
    reader: str
    tokens: tuple[str, ...] = ()

    @property
    def template(self) -> ChatTemplate:
        """The template, as a checkpoint has it."""
        return ChatTemplate({"default": self.source}, {})

    @property
    def tokenizer(self) -> Tokenizer:
        """A tokenizer of bytes and the family's tokens."""
        return tokenizer_of(self.tokens)


# Values as Gemma writes them: keys without quotes, and strings between two marks.
_BARE = """
{%- macro bare(value, mark) -%}
{%- if value is string -%}{{ mark + value + mark }}
{%- elif value is mapping -%}{
{%- for key, one in value.items() -%}{{ key }}:{{ bare(one, mark) }}{{ "," if not loop.last }}{%- endfor -%} }
{%- elif value is sequence -%}[
{%- for one in value -%}{{ bare(one, mark) }}{{ "," if not loop.last }}{%- endfor -%}]
{%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
""".replace("%} }\n", "%}}\n")
_PYTHON = """
{%- macro python(call) -%}
{{ call.name }}({%- for key, value in call.arguments.items() -%}
{{ key }}={{ value | tojson }}{{ ", " if not loop.last }}{%- endfor -%})
{%- endmacro -%}
"""


def _turns(tools: str, begin: str, assistant: str, end: str, ask: str | None = None) -> str:
    """Return a template: the tools, then each message between `begin` and `end`.

    `assistant` writes the text behind the beginning of the assistant's message `m`; `c` is the function of a call.
    """
    return (
        "{%- if tools %}" + tools + "{% endif -%}{%- for m in messages -%}"
        "{%- set role = m.role -%}" + begin + "{%- if m.role == 'assistant' -%}" + assistant + "{%- else -%}"
        "{{ m.content }}{%- endif -%}" + end + "{%- endfor -%}{%- if add_generation_prompt -%}"
        "{%- set role = 'assistant' -%}" + (begin if ask is None else ask) + "{%- endif -%}"
    )


def _calls(text: str, between: str = "") -> str:
    """Return the part of a template that writes calls."""
    gap = "{%- if not loop.last -%}" + between + "{%- endif -%}" if between else ""
    return "{%- for call in m.tool_calls -%}{%- set c = call.function -%}" + text + gap + "{%- endfor -%}"


_TOOLS = "<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>"
_IM = "{{ '<|im_start|>' + role + '\n' }}"
_THINK = "{%- if m.reasoning_content -%}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif -%}"
_SAID = "{{ m.content }}"
_LINE = "{%- if m.content and m.tool_calls -%}{{ '\n' }}{%- endif -%}"
_HERMES = """{{ '<tool_call>\n{"name": "' + c.name + '", "arguments": ' + c.arguments | tojson + '}\n</tool_call>' }}"""
_XML = (
    "{{ '<tool_call>\n<function=' + c.name + '>\n' }}{%- for key, value in c.arguments.items() -%}"
    "{{ '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}"
    "{%- endfor -%}{{ '</function>\n</tool_call>' }}"
)
_PAIRS = (
    "{{ '<tool_call>' + c.name }}{%- for key, value in c.arguments.items() -%}{{ '<arg_key>' + key + '</arg_key>"
    "<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}{%- endfor -%}"
    "{{ '</tool_call>' }}"
)
_CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_QWEN = (*_CHAT, "<tool_call>", "</tool_call>")


def _chat(calls: str, between: str = "{{ '\n' }}") -> str:
    return _turns(_TOOLS, _IM, _THINK + _SAID + _LINE + _calls(calls, between), "{{ '<|im_end|>\n' }}")


_HARMONY = _turns(
    "<|start|>developer<|message|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>",
    "{{ '<|start|>' + role }}",
    "{%- if m.reasoning_content -%}{{ '<|channel|>analysis<|message|>' + m.reasoning_content }}<|end|>"
    "<|start|>assistant{%- endif -%}"
    "{%- if m.tool_calls -%}"
    "{%- if m.content -%}{{ '<|channel|>commentary<|message|>' + m.content }}<|end|><|start|>assistant{%- endif -%}"
    + _calls(
        "{{ ' to=functions.' + c.name + '<|channel|>commentary json<|message|>' + c.arguments | tojson + '<|call|>' }}",
        "<|start|>assistant",
    )
    + "{%- else -%}{{ '<|channel|>final<|message|>' + m.content }}{%- endif -%}",
    "{%- if m.role != 'assistant' -%}<|end|>{%- elif not m.tool_calls -%}<|return|>{%- endif -%}",
).replace("{{ m.content }}", "{{ '<|message|>' + m.content }}")
_GEMMA4 = _BARE + _turns(
    "<|turn>system\n{% for t in tools %}<|tool>{{ t | tojson }}<tool|>{% endfor %}<turn|>\n",
    "{{ '<|turn>' + ('model' if role == 'assistant' else role) + '\n' }}",
    "{%- if m.reasoning_content -%}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{%- endif -%}"
    + _SAID
    + _calls("""{{ '<|tool_call>call:' + c.name + bare(c.arguments, '<|"|>') + '<tool_call|>' }}"""),
    "{{ '<turn|>\n' }}",
)
_FUNCTION_GEMMA = _BARE + _turns(
    "<start_of_turn>developer\n{% for t in tools %}{{ t | tojson }}{% endfor %}<end_of_turn>\n",
    "{{ '<start_of_turn>' + ('model' if role == 'assistant' else role) + '\n' }}",
    _SAID
    + _calls("{{ '<start_function_call>call:' + c.name + bare(c.arguments, '<escape>') + '<end_function_call>' }}"),
    "{{ '<end_of_turn>\n' }}",
)
_GEMMA3 = _PYTHON + _turns(
    _TOOLS,
    "{{ '<start_of_turn>' + ('model' if role == 'assistant' else role) + '\n' }}",
    "{%- if m.tool_calls -%}{{ m.content }}{{ '\n' if m.content }}{{ '```tool_code\n[' }}"
    + _calls("{{ python(c) }}", "{{ ', ' }}")
    + "{{ ']\n```' }}{%- else -%}{{ m.content }}{%- endif -%}",
    "{{ '<end_of_turn>\n' }}",
)
_OLMO3 = _PYTHON + _turns(
    _TOOLS,
    _IM,
    _THINK
    + _SAID
    + "{%- if m.tool_calls -%}<function_calls>"
    + _calls("{{ python(c) }}", "{{ '\n' }}")
    + "</function_calls>{%- endif -%}",
    "{{ '<|im_end|>\n' }}",
)
_MISTRAL_TOOLS = "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
_USER = "{%- if role == 'user' -%}{{ '[INST]' }}{%- endif -%}"
_DONE = "{{ '[/INST]' if m.role == 'user' else '</s>' }}"
_MISTRAL = _turns(
    _MISTRAL_TOOLS,
    _USER,
    "{%- if m.reasoning_content -%}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif -%}"
    + _SAID
    + _calls("{{ '[TOOL_CALLS]' + c.name + '[ARGS]' + c.arguments | tojson }}"),
    _DONE,
    "",
)
_MISTRAL_LIST = _turns(
    _MISTRAL_TOOLS,
    _USER,
    "{%- if m.tool_calls -%}{{ '[TOOL_CALLS] [' }}"
    + _calls(
        """{{ '{"name": "' + c.name + '", "arguments": ' + c.arguments | tojson + ', "id": "abcdef123"}' }}""",
        "{{ ', ' }}",
    )
    + "]{%- else -%}{{ m.content }}{%- endif -%}",
    _DONE,
    "",
)
_HEADER = "{{ '<|header_start|>' + role + '<|header_end|>\n\n' }}"
_LLAMA4 = _turns(
    _TOOLS,
    _HEADER,
    "{%- if m.tool_calls -%}"
    + _calls("""{{ '{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + '}' }}""", "{{ '; ' }}")
    + "{%- else -%}{{ m.content }}{%- endif -%}",
    "<|eot|>",
)
_LLAMA3 = (
    _LLAMA4.replace("header_start", "start_header_id").replace("header_end", "end_header_id").replace("eot", "eot_id")
)
_LLAMA4_PYTHON = _PYTHON + _turns(
    _TOOLS,
    _HEADER,
    "{%- if m.tool_calls -%}<|python_start|>["
    + _calls("{{ python(c) }}", "{{ ', ' }}")
    + "]<|python_end|>{%- else -%}{{ m.content }}{%- endif -%}",
    "<|eot|>",
)
_COMMAND = _turns(
    _TOOLS,
    "{{ '<|START_OF_TURN_TOKEN|>' + ('<|CHATBOT_TOKEN|>' if role == 'assistant' else '<|USER_TOKEN|>') }}",
    "{%- if m.reasoning_content -%}{{ '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{%- endif -%}"
    "{%- if m.tool_calls -%}{{ '<|START_ACTION|>[\n' }}"
    + _calls(
        """{{ '    {"tool_call_id": "0", "tool_name": "' + c.name + '", "parameters": ' }}"""
        "{{ c.arguments | tojson + '}' }}",
        "{{ ',\n' }}",
    )
    + "{{ '\n]<|END_ACTION|>' }}{%- else -%}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif -%}",
    "<|END_OF_TURN_TOKEN|>",
)
_COMMAND_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "START_OF_TURN_TOKEN", "CHATBOT_TOKEN", "USER_TOKEN", "START_THINKING", "END_THINKING", "START_ACTION",
        "END_ACTION", "START_RESPONSE", "END_RESPONSE", "END_OF_TURN_TOKEN",
    )
)  # fmt: skip
_HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_GEMMA4_TOKENS = (
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|tool>", "<tool|>",
)  # fmt: skip
_GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>")
_CALL_TOKENS = ("<start_function_call>", "<end_function_call>", "<escape>")
_MISTRAL_TOKENS = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "</s>",
)
_LLAMA4_TOKENS = ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|python_start|>", "<|python_end|>")
FAMILIES: Mapping[str, Family] = {
    "harmony": Family(_HARMONY, "harmony", _HARMONY_TOKENS),
    "gemma4": Family(_GEMMA4, "gemma4", _GEMMA4_TOKENS),
    "function_gemma": Family(_FUNCTION_GEMMA, "function_gemma", _GEMMA_TOKENS + _CALL_TOKENS),
    "gemma3": Family(_GEMMA3, "gemma3", _GEMMA_TOKENS),
    "hermes": Family(_chat(_HERMES), "hermes", _QWEN),
    "hermes, marks as texts": Family(_chat(_HERMES), "hermes", _CHAT[:2]),
    "qwen_xml": Family(_chat(_XML), "qwen_xml", _QWEN),
    "qwen_xml, marks as texts": Family(_chat(_XML), "qwen_xml", _CHAT[:2]),
    "glm": Family(_chat(_PAIRS), "glm", _QWEN),
    "olmo3": Family(_OLMO3, "olmo3", _CHAT),
    "mistral": Family(_MISTRAL, "mistral", _MISTRAL_TOKENS),
    "mistral, a list": Family(_MISTRAL_LIST, "mistral", _MISTRAL_TOKENS),
    "llama4": Family(_LLAMA4, "llama4", _LLAMA4_TOKENS),
    "llama3": Family(_LLAMA3, "llama4", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")),
    "llama4, Python": Family(_LLAMA4_PYTHON, "llama4", _LLAMA4_TOKENS),
    "command": Family(_COMMAND, "command", _COMMAND_TOKENS),
}
_EACH = "{%- for k, v in c.arguments.items() -%}"
_TEXT = "(v if v is string else v | tojson)"
FOREIGN: Mapping[str, Family] = {
    "a name before JSON": Family(
        _chat("{{ '<tool_call>' + c.name + '\n' + c.arguments | tojson + '\n</tool_call>' }}"), "hermes", _QWEN
    ),
    "JSON alone": Family(
        _chat("""{{ '{"name": "' + c.name + '", "arguments": ' + c.arguments | tojson + '}' }}"""), "hermes", _QWEN
    ),
    "tags with attributes": Family(
        _chat(
            "{{ '<x:tool_call>\n<invoke name=\"' + c.name + '\">\n' }}" + _EACH
            + "{{ '<parameter name=\"' + k + '\">' + " + _TEXT + " + '</parameter>\n' }}{%- endfor -%}"
            "{{ '</invoke>\n</x:tool_call>' }}"
        ), "hermes", _QWEN,
    ),
    "marks of bars": Family(
        _chat(
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments | tojson"
            " + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
        ), "hermes", _QWEN,
    ),
    "numbered names": Family(
        _chat(
            "{{ '<|tool_call_begin|>functions.' + c.name + ':0<|tool_call_argument_begin|>' + c.arguments | tojson"
            " + '<|tool_call_end|>' }}"
        ), "hermes", _QWEN,
    ),
    "a list in tags": Family(
        _chat(
            """{{ '<tool_calls>[{"name": "' + c.name + '", "arguments": ' }}"""
            "{{ c.arguments | tojson + '}]</tool_calls>' }}"
        ), "hermes", _QWEN,
    ),
    "Python in marks": Family(
        _PYTHON + _chat("{{ '<|tool_call_start|>[' + python(c) + ']<|tool_call_end|>' }}"), "hermes", _QWEN
    ),
    "calls are left out": Family(
        _turns("Write <tool_call>." + _TOOLS, _IM, _THINK + _SAID, "{{ '<|im_end|>\n' }}"), "hermes", _QWEN
    ),
    "calls are refused": Family(
        _turns(
            "Write <tool_call>." + _TOOLS, _IM,
            "{%- if m.tool_calls -%}{{ raise_exception('no calls') }}{%- endif -%}" + _SAID, "{{ '<|im_end|>\n' }}",
        ), "hermes", _QWEN,
    ),
}  # fmt: skip
