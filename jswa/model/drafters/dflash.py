"""DFlash (Chen et al. 2026, arXiv 2602.06036) and DSpark: a small decoder that drafts a block of tokens in one pass.

Its layers keep the K and V of all positions that the target has run. They are made of hidden states of some layers of
the target, fused, and not of the drafter's own hidden states: so a position's KV depends on the target only.
The block is the last token of the text and mask tokens after it. DFlash reads each draft at the mask in its place.
DSpark reads it one place before, and adds to its logits a bias that depends on the token before (Markov head).
DFlash2 adds convolutions over the places of a block, and a choice among the likeliest tokens by the token before (vLLM
0.33, models/qwen3_dflash2.py and models/beam/nvidia/dflash2.py).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.model.attention import Attend
from jswa.model.binding import bound, run_dtype
from jswa.model.collectives import lookup_rows, psum, shard_columns, top_columns
from jswa.model.drafters.layers import layer_inputs, scores
from jswa.model.drafters.seam import BlockAttend, Now, Ran
from jswa.model.layers import Normalize, linear, normed, rope_tables, zeros
from jswa.model.moe import Experts
from jswa.model.partition import shard_config
from jswa.model.transformer import Layer, LayerInputs, Params

MOST = 7  # tokens that a step verifies


@dataclass(frozen=True)
class Sight:
    """The keys that queries of a layer see; the layer keeps the KV of all positions.

    Attributes:
        window: keys up to a query's own position, its own included; None: all.
        causal: no later position of the block.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class DFlash2:
    """The sizes of what DFlash2 adds.

    Attributes:
        taps: places that a convolution adds up: a token's own, and those before it.
        group: neighbouring channels that have one computed weight for each tap.
        rank: of the selector.
        top: tokens among which it chooses.
    """

    taps: int
    group: int
    rank: int
    top: int


@dataclass(frozen=True)
class DFlash:
    """A DFlash or DSpark drafter; see `Drafter`.

    Attributes:
        model: its layers and norms, all of them full. Its vocabulary is the target's.
        taps: layers of the target.
        target_layers, target_width: number of the target's layers, and the size of its hidden states.
        sights: the keys that queries of each layer see.
        block: tokens of a block, as trained: the last token of the text is the first.
        mask: the mask token.
        draft_vocab: size of its head's vocabulary.
        own_embed: it has an embedding of its own, else it reads the target's; multiplied by `embed_scale`.
        own_mask: it has a vector in place of the mask token's embedding.
        own_head: it has a head of its own, else it uses the target's.
        subset: its head has some tokens of the vocabulary only; the parameter `tokens` names them.
        tap_norms: a norm of each tap before they are fused.
        norms_context: a layer's first norm is applied to the fused states too (Laguna).
        from_first: the first draft is read at the text's last token, each other one at the mask before its place.
        markov: rank of the Markov head; 0 without.
        dflash2: what DFlash2 adds; None without.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    target_layers: int
    target_width: int
    sights: tuple[Sight, ...]
    block: int
    mask: int
    draft_vocab: int
    own_embed: bool = False
    own_mask: bool = False
    own_head: bool = False
    subset: bool = False
    embed_scale: float = 1.0
    tap_norms: bool = False
    norms_context: bool = False
    from_first: bool = False
    markov: int = 0
    dflash2: DFlash2 | None = None

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The layers, which all keep the KV of every position."""
        return tuple(layer.attention for layer in self.model.layers)

    @property
    def first(self) -> tuple[int, ...]:
        """All positions are seen."""
        return (0,) * len(self.layers)

    @property
    def carry(self) -> int:
        """Nothing: all that it knows of the text is KV."""
        return 0

    @property
    def most(self) -> int:
        """The most tokens that `propose` gives."""
        return min(MOST, self.block - (not self.from_first))

    def shard(self, devices: int) -> "DFlash":
        """Return one device's part of the drafter. Raises ConfigError if it cannot be split so."""
        return dataclasses.replace(self, model=shard_config(self.model, devices))

    def absorb(self, params: Params, ran: Ran) -> None:
        """Write the KV of a step's tokens."""
        module = self._bind(params)
        fused = module.fuse(ran.taps)
        ropes = rope_tables({a.rope for a in self.layers if a.rope is not None}, ran.positions)
        for index, layer in enumerate(module.layers):
            read = normed(layer.pre_attn, fused) if self.norms_context else fused
            ran.store(self.target_layers + index, layer.attention.stored(read, ropes))

    def propose(self, params: Params, now: Now, count: int) -> Int[Array, "R count"]:
        """Return the next tokens of each row, as chosen from the head's logits; -1 beyond the block."""
        module, rows, drafts = self._bind(params), len(now.tokens), min(count, self.most)
        places = drafts + (not self.from_first)
        positions = jnp.concatenate([now.positions + step for step in range(places)])
        inputs = layer_inputs(self.model, positions, self._attend(now.block(places, drafts)))
        masks = jnp.full(rows * (places - 1), self.mask, jnp.int32)
        x = module.embedded(jnp.concatenate([now.tokens, masks]), now)
        for index, layer in enumerate(module.layers):
            convolutions = None if module.convolutions is None else module.convolutions[index]
            run = layer if convolutions is None else partial(convolutions.run, layer, rows=rows)
            x = run(x, index, inputs)
        read = jnp.split(module.final_norm(x), places)[places - drafts :]
        token, found = now.tokens, []
        for step, part in enumerate(read):
            token = self._token(module, part, token, now, step)
            found.append(token)
        found += [jnp.full(rows, -1, jnp.int32)] * (count - drafts)
        return jnp.stack(found, axis=1)

    def _token(
        self, module: "DFlashModule", out: Float[Array, "R M"], before: Int[Array, " R"], now: Now, step: int
    ) -> Int[Array, " R"]:
        head, cap = module.lm_head, self.model.final_softcap
        logits = now.logits(out) if head is None else scores(out, head, cap)
        if module.selector is not None:
            logits, ids = module.selector(logits, out, before, self.model.devices)
            return now.choose(logits, step, ids=ids)
        if module.markov is not None:
            logits = logits + shard_columns(module.markov(before), self.model.devices)
        return now.choose(logits, step, ids=None if module.tokens is None else module.tokens[...])

    def _attend(self, attend: BlockAttend) -> Attend:
        def attended(
            layer: int, q: Float[Array, "T H D"], kv: Float[Array, "T K E"] | None, sinks: Float[Array, " H"] | None
        ) -> Float[Array, "T H V"]:
            assert kv is not None
            sight = self.sights[layer]
            return attend(self.target_layers + layer, q, kv, sinks, window=sight.window, causal=sight.causal)

        return attended

    def _bind(self, params: Params) -> "DFlashModule":
        return bound(lambda: self.module(jnp.dtype(run_dtype(params))), params)

    def module(self, dtype: jnp.dtype) -> "DFlashModule":
        """Build the module, without values."""
        return DFlashModule(self, dtype)


class Markov(nnx.Module):
    """A bias of the draft vocabulary that depends on the token before: the product of two narrow matrices."""

    def __init__(self, rank: int, vocab: int, draft_vocab: int, dtype: jnp.dtype) -> None:
        self.before, self.after = zeros(vocab, rank, dtype=dtype), zeros(draft_vocab, rank, dtype=dtype)

    def __call__(self, tokens: Int[Array, " R"]) -> Float[Array, "R v"]:
        """Return the bias in float32."""
        columns = (((1,), (1,)), ((), ()))
        read, table = self.before[...][tokens], self.after[...]
        return lax.dot_general(read, table, columns, preferred_element_type=jnp.float32)


class Convolution(nnx.Module):
    """Sums of a channel over the last places of a block, before a part of a layer and after it.

    A weight is the sum of a learned one, by channel, and of one that is computed of the part's input, by group.
    """

    def __init__(self, config: DFlash2, width: int, dtype: jnp.dtype) -> None:
        self.config = config
        self.base = zeros(2, config.taps, width, dtype=dtype)
        self.kernel = zeros(width, 2 * config.taps * (width // config.group), dtype=dtype)

    def around(
        self, part: Callable[[Float[Array, "n M"]], Float[Array, "n M"]], x: Float[Array, "n M"], rows: int
    ) -> Float[Array, "n M"]:
        """Return the part's output after both convolutions; x has the first place of all rows first."""
        weights = linear(x, self.kernel, None).reshape(len(x), 2, self.config.taps, -1, 1)
        return self._summed(part(self._summed(x, weights[:, 0], 0, rows)), weights[:, 1], 1, rows)

    def _summed(
        self, x: Float[Array, "n M"], own: Float[Array, "n t G 1"], side: int, rows: int
    ) -> Float[Array, "n M"]:
        wide = x.astype(jnp.float32).reshape(len(x), -1, self.config.group)
        weights = self.base[...][side].reshape(1, self.config.taps, *wide.shape[1:]).astype(jnp.float32) + own
        out = weights[:, 0] * wide
        for tap in range(1, min(self.config.taps, len(x) // rows)):  # a block has nothing before its first place
            earlier = jnp.pad(wide[: -tap * rows], ((tap * rows, 0), (0, 0), (0, 0)))
            out += weights[:, tap] * earlier
        return out.reshape(x.shape).astype(x.dtype)


class Convolutions(nnx.Module):
    """The convolutions of a layer: one around its attention, one around its MLP."""

    def __init__(self, config: DFlash2, width: int, dtype: jnp.dtype) -> None:
        self.attention, self.mlp = Convolution(config, width, dtype), Convolution(config, width, dtype)

    def run(
        self, layer: Layer, x: Float[Array, "n M"], index: int, inputs: LayerInputs, rows: int
    ) -> Float[Array, "n M"]:
        """Return the residual stream after a layer with these convolutions."""

        def attend(read: Float[Array, "n M"]) -> Float[Array, "n M"]:
            return psum(layer.attention(read, index, inputs.positions, inputs.ropes, inputs.attend), layer.devices)

        def feed(read: Float[Array, "n M"]) -> Float[Array, "n M"]:
            return psum(layer.mlp(read), layer.devices)

        x = x + self.attention.around(attend, normed(layer.pre_attn, x), rows)
        return x + self.mlp.around(feed, normed(layer.pre_mlp, x), rows)


class Selector(nnx.Module):
    """Scores of the likeliest tokens of a place, each given the token before: a product of three narrow vectors."""

    def __init__(self, config: DFlash2, width: int, vocab: int, dtype: jnp.dtype) -> None:
        self.config = config
        self.before, self.after = zeros(vocab, config.rank, dtype=dtype), zeros(vocab, config.rank, dtype=dtype)
        self.hidden = zeros(width, config.rank, dtype=dtype)

    def __call__(
        self, logits: Float[Array, "R v"], hidden: Float[Array, "R M"], before: Int[Array, " R"], devices: int
    ) -> tuple[Float[Array, "R top"], Int[Array, "R top"]]:
        """Return scores and token ids, on all devices; `logits` is this device's share, `before` the tokens before."""
        found, ids = top_columns(logits, self.config.top, devices)
        weighted = self.before[...][before] * linear(hidden, self.hidden, None)
        edges = jnp.einsum("rk,rck->rc", weighted, self.after[...][ids], preferred_element_type=jnp.float32)
        return found + edges, ids


class DFlashModule(nnx.Module):
    """The parameters of a `DFlash`, by the names of a decoder's where it has the same."""

    def __init__(self, config: DFlash, dtype: jnp.dtype) -> None:
        self.config, model = config, config.model
        width, count, d = config.target_width, len(config.taps), model.d_model

        def norm(size: int) -> Normalize:
            return Normalize(model.final_norm, size, dtype)

        self.embed = zeros(model.vocab_size // model.devices, d, dtype=dtype) if config.own_embed else None
        self.mask_embed = zeros(d, dtype=dtype) if config.own_mask else None
        self.tap_norms = nnx.List([norm(width) for _ in range(count)]) if config.tap_norms else None
        self.fc = zeros(count * width, d, dtype=dtype)
        self.hidden_norm = norm(d)
        self.layers = nnx.List([Layer(model, layer, dtype, Experts()) for layer in model.layers])
        self.final_norm = norm(d)
        self.lm_head = zeros(d, config.draft_vocab // model.devices, dtype=dtype) if config.own_head else None
        self.tokens = zeros(config.draft_vocab, dtype=jnp.dtype(jnp.int32)) if config.subset else None
        sizes = config.markov, model.vocab_size, config.draft_vocab
        self.markov = Markov(*sizes, dtype) if config.markov else None
        added = config.dflash2
        self.convolutions = None if added is None else nnx.List([Convolutions(added, d, dtype) for _ in model.layers])
        self.selector = None if added is None else Selector(added, d, model.vocab_size, dtype)

    def fuse(self, taps: tuple[Float[Array, "T W"], ...]) -> Float[Array, "T M"]:
        """Return the target's hidden states as the layers read them."""
        if self.tap_norms is not None:
            taps = tuple(norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True))
        return self.hidden_norm(linear(jnp.concatenate(taps, axis=-1), self.fc, None))

    def embedded(self, tokens: Int[Array, " n"], now: Now) -> Float[Array, "n M"]:
        """Return the embedding of tokens."""
        config, table = self.config, self.embed
        if table is None:
            rows = now.rows(tokens)
        else:
            size, devices = config.model.vocab_size // config.model.devices, config.model.devices
            rows = lookup_rows(lambda ids: table[...][ids], size, tokens, devices)
        rows = rows * jnp.asarray(config.embed_scale, rows.dtype)
        if self.mask_embed is None:
            return rows
        return jnp.where((tokens == config.mask)[:, None], self.mask_embed[...][None].astype(rows.dtype), rows)
