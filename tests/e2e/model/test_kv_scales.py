"""KV of 8 bits with scales per layer and head, for keys and values beyond the type's range.

Keys that are 2^n times as large, with queries that are 2^n times as small, give the same model. With the scale 2^n its
KV has the same bits, and so have its logits; without scales KV is clipped at 448.
"""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import ModelConfig
from jswa.model.attention import scales_name
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import canonical_name
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from tests.parity.load import load_fixture
from tests.parity.sketch import sketch
from tests.parity.weights import write_checkpoint
from tests.support.nights import sample
from tests.support.paged import FLOAT32, Device, Logits, Session, Text

FLOAT8 = jnp.dtype("float8_e4m3fn")
Tensors = dict[str, np.ndarray]


def grown(model: ModelConfig, stored: Mapping[str, np.ndarray]) -> Tensors:
    """Return the same model with larger keys: other powers of two in each layer, and in each head if keys have no norm.

    Values without a norm grow too, and output projections shrink. The scales are added by head, under the names of
    compressed-tensors.
    """
    tensors = {name: value.copy() for name, value in stored.items()}
    ours = {canonical_name(name): name for name in tensors}
    for index, layer in enumerate(model.layers):
        a, owner = layer.attention, layer.attention.kv_from
        own = index if owner is None else owner

        def scale(key: str, factor: np.ndarray, axis: int = 0, index: int = index) -> None:
            for end in ("weight", "bias") if axis == 0 else ("weight",):
                name = ours.get(f"model.layers.{index}.self_attn.{key}.{end}")
                if name is not None:
                    shape = [-1 if i == axis else 1 for i in range(tensors[name].ndim)]
                    tensors[name] = tensors[name] * factor.reshape(shape).astype(np.float32)

        heads, group = a.num_kv_heads, a.num_heads // a.num_kv_heads
        keys, values = 2.0 ** (9 + own + np.zeros(heads)), np.full(heads, 2.0**-4)
        if a.qk_norm is not None:
            scale("q_norm", 1 / keys[:1].repeat(a.head_dim))
            scale("k_norm", keys[:1].repeat(a.head_dim))
        else:
            keys, values = keys * 4.0 ** np.arange(heads), 2.0 ** (12 - own - 2 * np.arange(heads))
            scale("q_proj", 1 / keys.repeat(group * a.head_dim))
            scale("k_proj", keys.repeat(a.head_dim))
            scale("v_proj", values.repeat(a.v_head_dim))
            scale("o_proj", 1 / values.repeat(group * a.v_head_dim), axis=1)
        prefix = ours["model.embed_tokens.weight"].removesuffix("embed_tokens.weight")
        if owner is None:
            for which, found in (("k", keys), ("v", values)):
                tensors[f"{prefix}layers.{index}.self_attn.{which}_scale"] = found.reshape(-1, 1, 1).astype(np.float32)
    return tensors


@pytest.mark.parametrize("name", sample(["mistral_layer_types", "gemma4_text_mix"], 2))
def test_scales_bring_keys_and_values_into_range(name: str, tmp_path: Path) -> None:
    """In full and local layers; in gemma-4 K and V overlap, and the last layers share the KV of others."""
    fixture = load_fixture(name)
    model = parse_config(fixture.config)
    write_checkpoint(tmp_path / "grown", fixture.config, grown(model, fixture.tensors))
    write_checkpoint(tmp_path / "plain", fixture.config, fixture.tensors)
    _, plain = load_checkpoint(tmp_path / "plain", FLOAT32)
    model, params = load_checkpoint(tmp_path / "grown", FLOAT32)
    scales = {name: value for name, value in params.items() if name not in plain}
    owners = [index for index, layer in enumerate(model.layers) if layer.attention.kv_from is None]
    assert scales.keys() == set(map(scales_name, owners))
    # The plain model, with scales of V alone if V has not grown.
    ones = {
        name: jnp.ones_like(value).at[1].set(jnp.where(value[1] < 1, value[1], 1)) for name, value in scales.items()
    }
    device = Device(model, params, 4, decode=True, kv_dtype=FLOAT8)

    def run(params: Params) -> Logits:
        device.params = params
        session = Session(device, chunk=7)
        session.run(Text("main", fixture.tokens, len(fixture.prompt)))
        return session.logits["main"]

    wanted, found, cut = run({**plain, **ones}), run(params), run({**params, **ones})
    assert len(wanted) > 20  # from chunks of the prompt and from decode steps
    places = sorted(wanted)
    exact = fixture.sketch[places].ravel()
    near, grown_near, cut_near = (
        sketch(np.array([one[place] for place in places])).ravel() for one in (wanted, found, cut)
    )
    np.testing.assert_allclose(grown_near, near, atol=1e-5)
    assert np.abs(near - exact).max() > 1e-3  # the model did run in 8 bits
    assert np.corrcoef(near, exact)[0, 1] > 0.9 > np.corrcoef(cut_near, exact)[0, 1]
