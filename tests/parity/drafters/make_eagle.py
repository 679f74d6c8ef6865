# mypy: disable-error-code="import-not-found"
"""Compute the fixtures of EAGLE-3 and P-EAGLE with the speculators package (`make parity-drafters`).

Training in that package runs a drafter behind every position of a text at once, which is what a fixture needs: the
tokens drafted behind each. It feeds later steps with the text's own tokens; here they get those that were drafted.

    python -m tests.parity.drafters.make_eagle [--check]
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3 import core as eagle
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from tests.parity.archive import Facts, Recipe, digest, remade, store
from tests.parity.drafters.load import (
    ARCHIVES,
    DRAFTS,
    POSITIONS,
    draft_tokens,
    drawn_hidden,
    drawn_text,
    whole_numbers,
)
from tests.parity.make_fixtures import made_with

_EXTEND = eagle.extend_dense_mask_for_draft_tokens
VOCAB, WIDTH, MARGIN = 96, 32, 2e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"layer": LlamaConfig(**SIZES), "draft_vocab": 40},
    "eagle3_gpt_oss": {
        "layer": LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64}),
        "draft_vocab": 40,
        "norm_before_residual": True,
        "norm_before_fc": True,
    },
    "eagle31_window": {
        "layer": Qwen3Config(
            **SIZES | {"num_hidden_layers": 2},
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "draft_vocab": VOCAB,
        "fc_norm": True,
        "norm_output": True,
    },
    "peagle": {
        "layer": LlamaConfig(**SIZES | {"num_hidden_layers": 2}, attention_bias=True),
        "draft_vocab": 40,
        "mask_token_id": 7,
        "norm_before_residual": True,
    },
}


def main(arguments: list[str]) -> None:
    """Make the fixtures anew, or compare them with the committed ones."""
    torch.set_num_threads(1)
    with remade(ARCHIVES, "eagle", check="--check" in arguments) as folder:
        for name, settings in CASES.items():
            make(name, dict(settings), folder / "eagle")


def make(name: str, settings: dict[str, Any], archive: Path) -> None:
    """Compute one fixture with the first seed whose drafts are no near ties, and store it."""
    model = build(settings)
    config, recipe = saved(model)
    for seed in range(1, 400):
        facts: Facts = {"seed": seed, "vocab": VOCAB, "config": config}
        if settings["draft_vocab"] != VOCAB:
            facts["draft_vocab"] = settings["draft_vocab"]
        tensors = whole_numbers(recipe, facts)
        drafts, margin = drafted(model, tensors, seed)
        if margin > MARGIN:
            break
    else:
        raise AssertionError(f"{name}: every seed has a near tie")
    facts |= {"digest": digest(tensors), "made_with": made_with() | {"speculators": version("speculators")}}
    store(archive, name, facts, recipe, {"drafts": drafts.astype(np.int32)})
    print(f"{name}: seed {seed}, margin {margin:.1e}, {len(np.unique(drafts))} tokens")


def build(settings: dict[str, Any]) -> Any:
    """Return a drafter without a target."""
    parallel = "mask_token_id" in settings
    common = SpeculatorsConfig(
        algorithm="peagle" if parallel else "eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    layer = settings.pop("layer")
    flags = {key: value for key, value in settings.items() if key != "draft_vocab"}
    kind, config = (
        (PEagleDraftModel, PEagleSpeculatorConfig) if parallel else (Eagle3DraftModel, Eagle3SpeculatorConfig)
    )
    return kind(
        config(
            transformer_layer_config=layer,
            draft_vocab_size=settings["draft_vocab"],
            eagle_aux_hidden_state_layer_ids=[1, 2, 4],
            speculators_config=common,
            **flags,
        )
    ).eval()


def saved(model: Any) -> tuple[dict[str, Any], Recipe]:
    """Return the config as the package saves it, and names, shapes and means of the tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    means: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            for key in sorted(file.keys()):
                if key not in ("d2t", "t2d"):
                    shapes[key] = tuple(file.get_tensor(key).shape)
                    means[key] = 1.0 if "norm" in key else 0.0
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config, Recipe(shapes, means)


def drafted(model: Any, tensors: dict[str, Any], seed: int) -> tuple[np.ndarray, float]:
    """Return the tokens drafted behind each position, and the least distance from a best logit to the second."""
    state = {key: torch.from_numpy(np.asarray(value)) for key, value in tensors.items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys, missing
    assert all(key.startswith("verifier") for key in missing.missing_keys), missing
    model = model.float()
    hidden = torch.from_numpy(drawn_hidden(3 * WIDTH, seed))[None, :-1]
    ids = torch.from_numpy(drawn_text(VOCAB, seed).astype(np.int64))[None, 1:]
    seen = _parallel(model, hidden, ids) if isinstance(model, PEagleDraftModel) else _chained(model, hidden, ids)
    best = seen.topk(2).values
    found = seen.argmax(-1).numpy()
    if "d2t" in tensors:
        found = draft_tokens(VOCAB, seen.shape[-1], seed)[found]
    # Nothing is drafted behind the first token, which has none before it.
    return np.concatenate([np.full((1, DRAFTS), -1), found]), float((best[..., 0] - best[..., 1]).min())


def _advance_windows(window: int | None) -> None:
    """Have windows advance with the drafts, as they do when a drafter runs; in training they stay where they began."""
    extend = _EXTEND

    def extended(mask: torch.Tensor, length: int) -> torch.Tensor:
        step, out = mask.shape[-1] // length, extend(mask, length)
        if window is not None and mask[0, 0, -1, 0] < 0:
            at = torch.arange(length)
            gone = at[None] <= at[:, None] + step - window
            out[..., :length] = out[..., :length].masked_fill(gone, float("-inf"))
        return out

    eagle.extend_dense_mask_for_draft_tokens = extended


def _chained(model: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T - 1, K, V] of drafts that read what was drafted before."""
    logits: list[torch.Tensor] = []
    _advance_windows(model.sliding_window if model.uses_sliding_window_attn else None)
    embed = model.embed_tokens.forward

    def own(read: torch.Tensor) -> torch.Tensor:
        if not logits:
            return embed(read)
        best = logits[-1].argmax(-1)
        return embed(best if model.d2t is None else best + model.d2t[best])

    hook = model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out))
    model.embed_tokens.forward = own
    with torch.no_grad():
        model(hidden, ids, document_ids=torch.zeros_like(ids), ttt_steps=DRAFTS)
    model.embed_tokens.forward = embed
    hook.remove()
    return torch.stack([one[0] for one in logits], dim=1)


def _every_position(*, seq_length: int, num_depths: int, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last true position of each chain and the depth behind it: all of them, where training draws some."""
    counts = [seq_length - depth for depth in range(num_depths)]
    depths = torch.repeat_interleave(torch.arange(num_depths), torch.tensor(counts))
    return torch.cat([torch.arange(count) for count in counts]), depths


def _parallel(model: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T - 1, K, V] of drafts that were made at once."""
    length = ids.shape[1]
    core.generate_cod_sample_indices = _every_position
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out))
    # The drafts of the last positions would be of texts that the forward pass does not have.
    padded = torch.nn.functional.pad(ids, (0, DRAFTS))
    wide = torch.nn.functional.pad(hidden, (0, 0, 0, DRAFTS))
    with torch.no_grad():
        model(
            wide,
            padded,
            document_ids=torch.zeros_like(padded),
            verifier_last_hidden_states=wide[..., :WIDTH],
            num_depths=DRAFTS,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    hook.remove()
    out, begin = [], 0
    for depth in range(DRAFTS):
        count = length + DRAFTS - depth
        out.append(logits[0][0, begin : begin + length])
        begin += count
    return torch.stack(out, dim=1)


if __name__ == "__main__":
    assert POSITIONS > 100
    main(sys.argv[1:])
