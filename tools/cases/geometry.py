"""KV geometries of released models, for benchmarks and tests of the host part, which depend on nothing else."""

from dataclasses import replace

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm, Reach
from jswa.cache.layout import KVLayout

# Full layers, local layers, window, and (KV heads, head size, value size) of full and of local layers.
GEOMETRIES = {
    "gemma-3-27b": (10, 52, 1024, (16, 128, 128), (16, 128, 128)),
    "gemma-4-31B": (10, 50, 1024, (4, 512, 512), (16, 256, 256)),
    "gpt-oss-20b": (12, 12, 128, (8, 64, 64), (8, 64, 64)),
    "MiMo-V2-Flash": (9, 39, 128, (4, 192, 128), (8, 192, 128)),
}


def model_of(name: str, *, hybrid: bool = True) -> ModelConfig:
    """Return the model. If not `hybrid`, every layer keeps full-length KV, as in an engine that ignores windows."""
    num_full, num_local, window, full, local = GEOMETRIES[name]
    norm, mlp = Norm(1e-6), MlpConfig(1, "silu")
    layers = []
    for count, (kv_heads, head_dim, v_head_dim), reach in ((num_full, full, None), (num_local, local, Reach(window))):
        attention = AttentionConfig(kv_heads, kv_heads, head_dim, v_head_dim, 1.0, None)
        attention = replace(attention, reach=reach if hybrid else None)
        layers += [LayerConfig(attention, mlp, norm, None, norm, None)] * count
    return ModelConfig(name, 262_144, 64, 2**20, tuple(layers), norm, True)


def slabs_of_tokens(name: str, layout: KVLayout, tokens: int) -> int:
    """Return the slabs that have the bytes of `tokens` tokens kept on all layers of the model."""
    num_full, num_local, _, full, local = GEOMETRIES[name]
    elems = sum(count * heads * (k + v) for count, (heads, k, v) in ((num_full, full), (num_local, local)))
    return tokens * elems // (layout.num_lanes * layout.slab_elems)
