"""The checkpoint tensors that each parameter of the decoder is made of: names, shapes and layout.

`sources` is the table {parameter name: Source}; `assemble` reads a parameter according to its Source.
"""

import re
from collections.abc import Collection, Iterable

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm
from jswa.errors import CheckpointError
from jswa.model.hf.families import FAMILIES
from jswa.model.hf.feed_tensors import mlp_tensors, moe_tensors
from jswa.model.hf.source import Fold, Source, TensorPart, bias, matrix, vector
from jswa.model.hf.tensor_names import Names

# Prefixes of the text model in checkpoints, most specific first, and what replaces them in canonical names.
_PREFIXES = (
    ("model.layers.layers.", "model.layers."),  # plamo3
    ("model.embedding.", "model.embed_tokens."),  # spark2_5
    ("language_model.model.", "model."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
_BARE = re.compile(r"^(embed_tokens|embed_tokens_per_layer|layers|norm)\.")
_NOT_TEXT = re.compile(
    r"(^|\.)(vision_\w+|\w*_vision|multi_modal_projector|multimodal_projector|vit_\w+|visual|audio_\w+|\w*_audio|mtp|mtp_layers)\."
    r"|\.rotary_emb\.inv_freq$"
    r"|(^|\.)(embed_tokens_extend|speech_embeddings)\."
)
_ADAPTER = re.compile(r"\.lora_[AB]\.(\w+)\.weight$")


def canonical_name(key: str) -> str | None:
    """Return a tensor name as in a text-only checkpoint; None if the text decoder does not need the tensor."""
    if _NOT_TEXT.search(key):
        return None
    key = key.replace(".base_layer.", ".")  # as PEFT names a matrix that has adapters beside it
    for prefix, replacement in _PREFIXES:
        if key.startswith(prefix):
            return replacement + key.removeprefix(prefix)
    return f"model.{key}" if _BARE.match(key) else key


def unused_names(config: ModelConfig, keys: Iterable[str]) -> set[str]:
    """Return the canonical names of regular tensors that the decoder never reads.

    These are k and v tensors of layers that read another layer's KV, layers for multi-token prediction after the last,
    and adapters of images and speech.
    """
    names = FAMILIES[config.family].names
    found = set()
    own = ("k_proj", "v_proj", "k_norm", "v_norm")
    for key in keys:
        adapter = _ADAPTER.search(key)
        if adapter is not None and adapter[1] in names.adapters:
            found.add(key)
        layer, _, rest = key.removeprefix("model.layers.").partition(".")
        if not key.startswith("model.layers.") or not layer.isdecimal() or len(layer) > 9:
            continue
        if int(layer) >= len(config.layers):
            if names.extra_layers:
                found.add(key)
        elif config.layers[int(layer)].attention.kv_from is not None and rest.split(".")[:2][-1] in own:
            found.add(key)
    return found


def rank_slices(config: ModelConfig) -> int:
    """Return the slices in which MiMo's fused projections are saved, full or not: one for each KV head of a full layer.

    SGLang's configs/model_config.py has the same rule (attention_projection_layout = fused_qkv).
    """
    full = [layer.attention for layer in config.layers if layer.attention.reach is None]
    return (full or [config.layers[0].attention])[0].num_kv_heads


def sources(config: ModelConfig, found: Collection[str] = (), slices: int | None = None) -> dict[str, Source]:
    """Return the source of every parameter of the decoder by parameter name.

    Args:
        found: canonical names in the checkpoint; they decide between layouts if a family has more than one.
        slices: as `rank_slices` returns it, for layers of another model; None: for the config's own.
    """
    d, vocab, names = config.d_model, config.vocab_size, FAMILIES[config.family].names
    slices = rank_slices(config) if slices is None else slices
    table = {"embed": Source((TensorPart("model.embed_tokens.weight", (vocab, d)),))}
    table |= _norm("final_norm", config.final_norm.weighted, config.final_norm.bias, "model.norm", d)
    table |= _norm_gate("final_norm", config.final_norm, "model.final_gated_norm", d)
    if config.embed_norm is not None:
        table |= _norm("embed_norm", config.embed_norm.weighted, config.embed_norm.bias, "model.embed_norm", d)
        table |= _norm_gate("embed_norm", config.embed_norm, "model.embed_gated_norm", d)
    if not config.tie_embeddings:
        table["lm_head"] = matrix({"lm_head": vocab}, d)
    if config.head_bias:
        table["head_bias"] = vector("lm_head.bias", vocab)
    table |= _per_layer_input(config) | _streams(config)
    for index, layer in enumerate(config.layers):
        theirs = f"model.layers.{index}"
        parts = _norms(layer, d, theirs, names)
        prefix = f"{theirs}.{names.attention}"
        sliced = not (names.fused or names.qkv) and f"{prefix}.qkv_proj.weight" in found
        parts |= _attention(layer.attention, d, prefix, names, slices=slices if sliced else None)
        if isinstance(layer.mlp, MlpConfig):
            parts |= mlp_tensors("mlp", layer.mlp, d, f"{theirs}.{names.mlp}", names)
        else:
            parts |= moe_tensors("mlp", layer.mlp, d, theirs, names, found)
        if layer.side is not None:
            parts |= moe_tensors("side.moe", layer.side.moe, d, theirs, names, found)
        if layer.scalar:
            parts["scalar"] = vector(f"{theirs}.layer_scalar", 1)
        parts |= _per_layer_mix(config, theirs) | _stream_layer(config, theirs)
        table |= {f"layers.{index}.{name}": source for name, source in parts.items()}
    return table


def _norms(layer: LayerConfig, d: int, theirs: str, names: Names) -> dict[str, Source]:
    side = layer.side
    norms = {
        "pre_attn": layer.pre_attn,
        "post_attn": layer.post_attn,
        "pre_mlp": layer.pre_mlp,
        "post_mlp": layer.post_mlp,
    } | ({"side.pre": side.pre, "side.post": side.post, "side.post_dense": side.post_dense} if side else {})
    table: dict[str, Source] = {}
    for ours, norm in norms.items():
        if norm is not None:
            table |= _norm(ours, norm.weighted, norm.bias, f"{theirs}.{names.norms[ours]}", d)
            table |= _norm_gate(ours, norm, f"{theirs}.{names.norm_gates.get(ours)}", d)
    return table


def _norm(ours: str, weighted: bool, bias: bool, theirs: str, size: int) -> dict[str, Source]:
    table = {f"{ours}.weight": vector(f"{theirs}.weight", size)} if weighted else {}
    return table | ({f"{ours}.bias": vector(f"{theirs}.bias", size)} if bias else {})


def _norm_gate(ours: str, norm: Norm, theirs: str, d: int) -> dict[str, Source]:
    rank = norm.gate_rank
    if not rank:
        return {}
    low, high = matrix({f"{theirs}.down_proj": rank}, d), matrix({f"{theirs}.up_proj": d}, rank)
    return {f"{ours}.low": low, f"{ours}.high": high}


def _fused_qkv(key: str, rows: dict[str, int], d: int, slices: int | None) -> Source:
    """Return the source of q, k and v that are one tensor, as it is or in slices. Raises CheckpointError."""
    if slices is None:
        return Source((TensorPart(key, (sum(rows.values()), d)),), "matrix")
    if any(n % slices for n in rows.values()):
        raise CheckpointError(f"{key}: rows = {rows}: must be multiples of {slices}, the number of slices")
    part = TensorPart(key, (sum(rows.values()), d), slices)
    return Source((part,), "rank_slices", rows=tuple(rows.values()), slices=slices)


def _attention(a: AttentionConfig, d: int, prefix: str, names: Names, *, slices: int | None) -> dict[str, Source]:
    rows = {"q_proj": a.num_heads * a.head_dim}
    if a.kv_from is None:
        rows["k_proj"] = a.num_kv_heads * a.head_dim
        rows |= {} if a.keys_as_values else {"v_proj": a.num_kv_heads * a.v_head_dim}
    queries, values = Fold(a.head_dim, a.stored_head_dim, True), Fold(a.head_dim, a.stored_head_dim, False)
    folds = (queries, values) if a.folded_keys else ()
    named = {f"{prefix}.{name}": n for name, n in rows.items()}
    out = {f"{prefix}.{names.out}": d}
    table = {
        "attention.qkv": matrix(named, d)._replace(folds=folds),
        "attention.out": matrix(out, a.num_heads * a.v_head_dim),
    }
    if folds:
        table["attention.out"] = table["attention.out"]._replace(layout="columns", folds=folds[1:])
    if names.fused or names.qkv or slices is not None:
        table["attention.qkv"] = _fused_qkv(f"{prefix}.{names.qkv or 'qkv_proj'}.weight", rows, d, slices)
    if a.qkv_bias:
        table["attention.qkv_bias"] = bias(named)._replace(folds=folds)
    if a.out_bias:
        table["attention.out_bias"] = bias(out)
    table |= _qk_norms(a, prefix, folds, names) | _sinks(a, prefix, names)
    if a.gate is not None:
        width = a.num_heads * (1 if a.gate.per_head else a.v_head_dim)
        table["attention.gate"] = matrix({f"{prefix}.{names.gate}": width}, d)
        if a.gate.bias:
            table["attention.gate_bias"] = vector(f"{prefix}.gate_bias", a.num_heads)
    return table


def _sinks(a: AttentionConfig, prefix: str, names: Names) -> dict[str, Source]:
    table = {"attention.sinks": vector(f"{prefix}.{names.sinks}", a.num_heads)} if a.sinks else {}
    if a.key_sinks and a.kv_from is None:
        table["attention.sink_key"] = Source((TensorPart(f"{prefix}.sink_k", (a.num_kv_heads, a.head_dim)),))
    return table


def _qk_norms(a: AttentionConfig, prefix: str, folds: tuple[Fold, ...], names: Names) -> dict[str, Source]:
    if a.qk_norm is None or not a.qk_norm.weighted:
        return {}
    wide = a.qk_norm_all_heads
    q = TensorPart(f"{prefix}.{names.q_norm}.weight", (a.head_dim * (a.num_heads if wide else 1),))
    k = TensorPart(f"{prefix}.{names.k_norm}.weight", (a.head_dim * (a.num_kv_heads if wide else 1),))
    table = {"attention.q_norm.weight": Source((q,))}
    if folds:
        owner = k if a.kv_from is None else TensorPart(f"model.layers.{a.kv_from}.self_attn.k_norm.weight", k.shape)
        table = {"attention.q_norm.weight": Source((q, owner), "product", folds=(folds[0], folds[0]))}
    return table if a.kv_from is not None else table | {"attention.k_norm.weight": Source((k,), folds=folds[1:])}


def _per_layer_input(config: ModelConfig) -> dict[str, Source]:
    own, layers = config.per_layer_input, len(config.layers)
    if own is None:
        return {}
    return {
        "per_layer.embed": Source(
            (TensorPart("model.embed_tokens_per_layer.weight", (own.vocab_size, layers * own.dim)),)
        ),
        "per_layer.project": matrix({"model.per_layer_model_projection": layers * own.dim}, config.d_model),
        "per_layer.norm.weight": vector("model.per_layer_projection_norm.weight", own.dim),
    }


def _per_layer_mix(config: ModelConfig, layer: str) -> dict[str, Source]:
    own, d = config.per_layer_input, config.d_model
    if own is None:
        return {}
    return {
        "per_layer.gate": matrix({f"{layer}.per_layer_input_gate": own.dim}, d),
        "per_layer.project": matrix({f"{layer}.per_layer_projection": d}, own.dim),
        "per_layer.norm.weight": vector(f"{layer}.post_per_layer_input_norm.weight", d),
    }


def _streams(config: ModelConfig) -> dict[str, Source]:
    d = config.d_model
    if config.altup is None:
        return {}

    def all_of(name: str) -> Source:
        count = range(config.altup.streams - 1 if config.altup else 0)
        return Source(tuple(TensorPart(f"model.{name}.{i}.weight", (d, d)) for i in count), "experts")

    return {"streams.begin": all_of("altup_projections"), "streams.end": all_of("altup_unembed_projections")}


def _stream_layer(config: ModelConfig, layer: str) -> dict[str, Source]:
    d, altup = config.d_model, config.altup
    if altup is None:
        return {}
    n, rank = altup.streams, altup.laurel_rank
    return {
        "streams.router": matrix({f"{layer}.altup.modality_router": n}, d),
        "streams.router_norm.weight": vector(f"{layer}.altup.router_norm.weight", d),
        "streams.predict_by": matrix({f"{layer}.altup.prediction_coefs": n * n}, n),
        "streams.correct_by": matrix({f"{layer}.altup.correction_coefs": n}, n),
        "streams.output_scale": vector(f"{layer}.altup.correct_output_scale", d),
        "streams.laurel_left": matrix({f"{layer}.laurel.linear_left": rank}, d),
        "streams.laurel_right": matrix({f"{layer}.laurel.linear_right": d}, rank),
        "streams.laurel_norm.weight": vector(f"{layer}.laurel.post_laurel_norm.weight", d),
    }
