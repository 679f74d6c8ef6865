# mypy: disable-error-code="import-not-found,misc,no-any-return"
"""A reference of Rnj-1 in torch: Gemma 3 of transformers, whose local layers have another mask.

The facts are those of vLLM 0.33 (`Rnj1ForCausalLM`): a query of a chunked layer sees the keys of its chunk and of the
one before it, and a chunk is half of `sliding_window`; each layer type has a rotary embedding of its own.
`AutoModelForCausalLM` finds the class once this module has been imported.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig


class Rnj1Config(Gemma3TextConfig):
    """The config of Gemma 3's text part by another name."""

    model_type = "rnj1"


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    """Gemma 3 with the masks of Rnj-1."""

    config_class = Rnj1Config

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Return transformers' output for one whole text."""
        position, chunk = torch.arange(input_ids.shape[1]), self.config.sliding_window // 2
        query, key = position[:, None], position[None]
        near = query // chunk - key // chunk <= 1
        kinds = {"full_attention": key <= query, "chunked_attention": (key <= query) & near}
        least = torch.finfo(self.dtype).min
        masks = {kind: torch.where(seen, 0.0, least)[None, None].to(self.dtype) for kind, seen in kinds.items()}
        return super().forward(input_ids, attention_mask=masks, **options)


AutoConfig.register("rnj1", Rnj1Config)
AutoModelForCausalLM.register(Rnj1Config, Rnj1ForCausalLM)
