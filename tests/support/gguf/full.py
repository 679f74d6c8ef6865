"""The metadata that llama.cpp's converter adds for models whose layers are all full."""

from collections.abc import Callable, Mapping
from typing import Any

from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

Config = Mapping[str, Any]
FULL_ARCHES = {
    "gemma": MODEL_ARCH.GEMMA,
    "granite": MODEL_ARCH.GRANITE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "glm4": MODEL_ARCH.GLM4,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "olmoe": MODEL_ARCH.OLMOE,
    "arcee": MODEL_ARCH.ARCEE,
    "nemotron": MODEL_ARCH.NEMOTRON,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "apertus": MODEL_ARCH.APERTUS,
}


def _drop(w: GGUFWriter, *keys: str) -> None:
    for key in keys:
        w.kv_data[0].pop(f"{w.arch}.{key}", None)


def _gemma(w: GGUFWriter, c: Config) -> None:
    _drop(w, "rope.freq_base")


def _granite(w: GGUFWriter, c: Config) -> None:
    _drop(w, "attention.key_length", "attention.value_length")
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"])
    w.add_attention_scale(c["attention_multiplier"])
    w.add_embedding_scale(c["embedding_multiplier"])
    w.add_residual_scale(c["residual_multiplier"])
    w.add_logit_scale(c["logits_scaling"])


def _glm4(w: GGUFWriter, c: Config) -> None:
    w.add_rope_dimension_count(int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]))


def _olmoe(w: GGUFWriter, c: Config) -> None:
    _drop(w, "attention.layer_norm_rms_epsilon")
    w.add_layer_norm_rms_eps(1e-5)


def _llama(w: GGUFWriter, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def _nemotron(w: GGUFWriter, c: Config) -> None:
    w.add_layer_norm_rms_eps(c["norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    w.add_layer_norm_eps(c["norm_eps"])
    share = c["rope_parameters"]["partial_rotary_factor"]
    w.add_rope_dimension_count(int(share * c["hidden_size"]) // c["num_attention_heads"])
    if "factor" not in c["rope_parameters"]:
        w.add_rope_scaling_type(RopeScalingType.NONE)


def _hunyuan(w: GGUFWriter, c: Config) -> None:
    table = c["rope_parameters"]
    if table["rope_type"] == "dynamic":
        _drop(w, "rope.freq_base", "context_length")
        size = c["head_dim"]
        w.add_rope_freq_base(table["rope_theta"] * table.get("alpha", 50) ** (size / (size - 2)))
        w.add_rope_scaling_type(RopeScalingType.NONE)
        w.add_rope_scaling_factor(1)
        w.add_rope_scaling_orig_ctx_len(256 * 1024)
        w.add_context_length(256 * 1024)


def write_numbers(w: GGUFWriter, c: Config, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write the numbers of Apertus' activation, which become no tensors."""
    if c["model_type"] == "apertus" and c["hidden_act"] == "xielu":
        for name, add in (
            ("alpha_n", w.add_xielu_alpha_n),
            ("alpha_p", w.add_xielu_alpha_p),
            ("beta", w.add_xielu_beta),
            ("eps", w.add_xielu_eps),
        ):
            keys = [f"model.layers.{index}.mlp.act_fn.{name}" for index in range(c["num_hidden_layers"])]
            add([tensors[key].item() for key in keys])


FULL_EXTRA: dict[str, Callable[[GGUFWriter, Config], None]] = {
    "gemma": _gemma,
    "granite": _granite,
    "granitemoe": _granite,
    "glm4": _glm4,
    "olmoe": _olmoe,
    "arcee": _llama,
    "nemotron": _nemotron,
    "hunyuan_v1_dense": _hunyuan,
    "apertus": _llama,
}
