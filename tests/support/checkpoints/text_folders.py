"""Small checkpoint folders with tokenizer and chat template, in the formats of released families.

Vocabularies are trained on a few sentences. The parts of the tokenizer, the files that name special tokens and the
place of the chat template are those of the family's repository. Templates are our own, with the family's constructs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEXT = (
    "the cat sat on the mat and the dog ran in the park, as cats and dogs do",
    "Numbers like 12, 345 and 6789 are in 100 texts; so are names: Anna, Bob and Zoë.",
    "El niño comió naïve café über alles, 漢字 and 123 more.  Two spaces\n\nand a new paragraph.",
)
_WORDS = Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+| ?\p{L}+|\s+")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def special(text: str, **flags: bool) -> dict[str, Any]:
    """Return an added token as JSON."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


def write(folder: Path, files: Mapping[str, object]) -> Path:
    """Write files by name: a tokenizer, a string, or any other value as JSON. Return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, tokenizers.Tokenizer):
            content.save(str(path))
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def gemma3(folder: Path) -> Path:
    """Spaces as ▁, byte fallback, BOS from the post-processor; the template in tokenizer_config.json writes BOS too."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]
    backend = _sentencepiece([*names, "\n\n"])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = _leading("<bos>", 2)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.add_tokens([AddedToken("\n\n", normalized=False)])
    added = {str(i): special(name) for i, name in enumerate(names)} | {"8": special("\n\n", special=False)}
    template = (
        "{{ bos_token }}{%- for message in messages -%}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must take turns') }}{%- endif -%}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
        "{{ '<start_of_turn>' + role + '\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
        "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{ boi_token }}"
        "{%- else -%}{{ part['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{ '<end_of_turn>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    )
    config = {
        "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
        "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "boi_token": "<start_of_image>",
        "extra_special_tokens": {"boi_token": "<start_of_image>"}, "added_tokens_decoder": added,
        "sp_model_kwargs": None, "chat_template": template,
    }  # fmt: skip
    generation = {"bos_token_id": 2, "eos_token_id": [1, 6], "do_sample": True, "top_k": 64, "top_p": 0.95}
    return write(
        folder,
        {
            "tokenizer.json": backend, "tokenizer_config.json": config, "generation_config.json": generation,
            "special_tokens_map.json": {"bos_token": special("<bos>"), "eos_token": special("<eos>")},
            "config.json": {"model_type": "gemma3_text", "eos_token_id": 1},
        },
    )  # fmt: skip


def gpt_oss(folder: Path) -> Path:
    """Byte-level, no BOS; the template is a separate file with the date, macros and JSON."""
    names = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"]
    backend = _byte_level()
    first = backend.get_vocab_size()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    added = {str(first + i): special(name) for i, name in enumerate(names)}
    template = (
        "{%- macro turn(name) -%}<|start|>{{ name }}<|message|>{{ caller() }}<|end|>{%- endmacro -%}"
        "{%- call turn('system') -%}Year: {{ strftime_now('%Y') }}, effort: {{ effort | default('medium') }}"
        "{%- endcall -%}"
        "{%- if tools -%}{%- call turn('developer') -%}{{ tools | tojson(indent=2) }}{%- endcall -%}{%- endif -%}"
        "{%- set seen = namespace(turns=0) -%}"
        "{%- for message in messages -%}{%- set seen.turns = seen.turns + 1 -%}"
        "{%- if message.thinking is defined -%}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ message.thinking }}<|end|>{%- endif -%}"
        "{%- call turn(message.role) -%}{{ message.content }}{%- endcall -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|startoftext|>", "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>", "added_tokens_decoder": added, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    generation = {"do_sample": True, "eos_token_id": [first + 2, first + 1], "pad_token_id": first + 1}
    return write(
        folder,
        {
            "tokenizer.json": backend, "tokenizer_config.json": config, "chat_template.jinja": template,
            "generation_config.json": generation, "config.json": {"model_type": "gpt_oss", "eos_token_id": first + 2},
        },
    )  # fmt: skip


def llama3(folder: Path) -> Path:
    """Byte-level, BOS from the post-processor and from the template; tools in the user's turn."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = _byte_level()
    first = backend.get_vocab_size()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _leading("<|begin_of_text|>", first)]
    )
    backend.enable_truncation(24)
    backend.enable_padding(length=24, pad_id=first + 1, pad_token="<|end_of_text|>")
    template = (
        "{{- bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}\n"
        "        {%- continue %}\n"
        "    {%- endif %}\n"
        "    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}\n"
        "    {%- if tools is not none and loop.first %}{{- tools | tojson }}{%- endif %}\n"
        "    {{- message.content | trim if message.content is defined else '(nothing)' }}{{- '<|eot_id|>' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}\n"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
        "added_tokens_decoder": {str(first + i): special(name) for i, name in enumerate(names)},
        "chat_template": template, "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    generation = {"bos_token_id": first, "eos_token_id": [first + 1, first + 4], "temperature": 0.6, "top_p": 0.9}
    return write(
        folder,
        {
            "tokenizer.json": backend, "tokenizer_config.json": config, "generation_config.json": generation,
            "config.json": {"model_type": "llama", "eos_token_id": first + 1},
        },
    )  # fmt: skip


def mistral(folder: Path) -> Path:
    """sentencepiece as in Llama; special tokens in special_tokens_map.json only, one of them not in tokenizer.json."""
    backend = _sentencepiece(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = _leading("<s>", 1)
    backend.add_special_tokens([AddedToken("<unk>", normalized=False)])
    template = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
        "{{ '[INST] ' + message.content + ' [/INST]' }}{% elif message.role == 'assistant' %}"
        "{{ message.content + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
        "{% if loop.index > 8 %}{% break %}{% endif %}{% endfor %}"
    )
    return write(
        folder,
        {
            "tokenizer.json": backend,
            "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "chat_template": template},
            "special_tokens_map.json": {
                "bos_token": special("<s>"), "eos_token": "</s>", "unk_token": special("<unk>"),
                "additional_special_tokens": ["[TOOL_CALLS]"],
            },
            "generation_config.json": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
            "config.json": {"model_type": "mistral", "eos_token_id": 2},
        },
    )  # fmt: skip


def command_r(folder: Path) -> Path:
    """Byte-level with single digits; a list of named templates; one added token in tokenizer_config.json only."""
    names = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>"]
    turns = ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
    backend = _byte_level(names, pre_tokenizers.Digits(individual_digits=True))
    backend.normalizer = normalizers.NFC()
    backend.post_processor = _leading("<BOS_TOKEN>", 5)
    first = backend.get_vocab_size()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in [*names, turns[0]]])
    added = {str(i): special(name) for i, name in enumerate(names)}
    added |= {str(first): special(turns[0]), str(first + 1): special(turns[1])}
    body = (
        "{% for message in messages %}<|START_OF_TURN_TOKEN|>{{ message.role | upper }}: {{ message.content }}"
        "<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|>CHATBOT: {% endif %}"
    )
    templates = [
        {"name": "default", "template": "{{ bos_token }}" + body},
        {"name": "tool_use", "template": "{{ bos_token }}Tools: {{ tools | tojson(ensure_ascii=True) }}\n" + body},
        {"name": "rag", "template": "{{ bos_token }}{{ documents | map(attribute='text') | join(' / ') }}\n" + body},
    ]
    config = {
        "tokenizer_class": "CohereTokenizerFast", "add_bos_token": True, "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>", "unk_token": "<UNK>", "cls_token": "<CLS>",
        "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>", "added_tokens_decoder": added, "chat_template": templates,
    }  # fmt: skip
    return write(
        folder,
        {
            "tokenizer.json": backend, "tokenizer_config.json": config,
            "generation_config.json": {"bos_token_id": 5, "eos_token_id": first + 1},
            "config.json": {"model_type": "cohere2", "eos_token_id": first + 1},
        },
    )  # fmt: skip


def mimo(folder: Path) -> Path:
    """Byte-level, BOS is null, EOS is the end of a turn; {% generation %} around the answers."""
    backend = _byte_level()
    first = backend.get_vocab_size()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    added = {str(first + i): special(name) for i, name in enumerate(names)}
    added[str(first + 3)] = special("<think>", special=False)
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
        "{% generation %}{% if message.reasoning_content %}<think>{{ message.reasoning_content }}{% endif %}"
        "{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n{% endif %}{% endif %}"
    )
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "added_tokens_decoder": added, "chat_template": template,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "errors": "replace",
    }  # fmt: skip
    return write(
        folder,
        {
            "tokenizer.json": backend, "tokenizer_config.json": config, "config.json": {"model_type": "mimo_v2_flash"},
            "generation_config.json": {
                "eos_token_id": [first + 2, first], "temperature": 0.6, "top_k": 20, "top_p": 0.95,
            },
        },
    )  # fmt: skip


def reference_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder, without network access or the warning about torch."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    finally:
        logging.set_verbosity(before)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "gemma3": gemma3, "gpt_oss": gpt_oss, "llama3": llama3, "mistral": mistral, "command_r": command_r, "mimo": mimo,
}  # fmt: skip


@cache
def _trained_bytes() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train byte-level BPE; return vocabulary and merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return _model_of(trained)


@cache
def _trained_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train BPE over characters, with spaces as ▁; return vocabulary and merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    texts = [text.replace("漢字", "") for text in _TEXT]  # leaves characters that need byte fallback
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=180))
    return _model_of(trained)


def _model_of(trained: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _byte_level(first: Sequence[str] = (), *before: Any) -> tokenizers.Tokenizer:
    vocab, merges = _trained_bytes()
    ids = {text: i for i, text in enumerate([*first, *sorted(vocab, key=vocab.__getitem__)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    split = before or (pre_tokenizers.Split(_WORDS, "isolated"),)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(before))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _sentencepiece(first: list[str]) -> tokenizers.Tokenizer:
    vocab, merges = _trained_pieces()
    texts = dict.fromkeys([*first, *_BYTES, *sorted(vocab, key=vocab.__getitem__)])
    ids = {text: i for i, text in enumerate(texts)}
    return tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )


def _leading(token: str, token_id: int) -> Any:
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )
