"""The model families that jswa runs: one entry per model_type. docs/adding-a-model.md says how to add one.

Each entry names the function that parses the family's config.json; that function is in the module given by its prefix,
for example `gemma.gemma3` in jswa/model/hf/gemma.py. If a key is absent, the default is that of transformers 5.23's
config class, because checkpoints on the hub omit such keys.
"""

from collections.abc import Mapping

from jswa.model.hf.entries.blocks import BLOCKS
from jswa.model.hf.entries.dense import DENSE
from jswa.model.hf.entries.gated import GATED
from jswa.model.hf.entries.gemma import GEMMA
from jswa.model.hf.entries.grug import GRUG
from jswa.model.hf.entries.iquest import IQUEST
from jswa.model.hf.entries.mixtures import MIXTURES
from jswa.model.hf.entries.plain import PLAIN
from jswa.model.hf.family import Family

FAMILIES: Mapping[str, Family] = {**DENSE, **PLAIN, **GEMMA, **BLOCKS, **MIXTURES, **GATED, **IQUEST, **GRUG}
