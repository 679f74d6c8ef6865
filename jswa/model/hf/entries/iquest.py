"""Entry of IQuest-Q1."""

from collections.abc import Mapping

from jswa.model.hf import iquest
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import Names

_NORMS = {
    "pre_attn": "attention_norm",
    "post_attn": "attn_out_norm",
    "pre_mlp": "feed_forward_norm",
    "post_mlp": "ffn_out_norm",
}
_NAMES = Names(norms=_NORMS, router="mlp.router.weight", stored="rows", expert_rows=("fc", "proj"))

IQUEST: Mapping[str, Family] = {
    "iquest_q1": Family(
        iquest.iquest_q1,
        Defaults(160000, 3072, 88, 48, 524288, 1536, num_key_value_heads=8, head_dim=128, sliding_window=4096),
        _NAMES,
        eos=0,
    ),
}
