"""Description of a model's architecture: `ModelConfig`, one `LayerConfig` per layer, and their parts.

All classes are frozen and hashable, so they can be static arguments of a jitted function. This module imports no jax.
If a layer lacks a feature, its field is None, False or the neutral number, and the decoder skips the feature.
Units: every length, window and position is in tokens; a window includes the query token.
"""

from jswa.architecture.attention import (
    AttentionConfig as AttentionConfig,
)
from jswa.architecture.attention import (
    AttentionGate as AttentionGate,
)
from jswa.architecture.attention import (
    AttentionKind as AttentionKind,
)
from jswa.architecture.attention import (
    Norm as Norm,
)
from jswa.architecture.attention import (
    Rope as Rope,
)
from jswa.architecture.attention import (
    Temperature as Temperature,
)
from jswa.architecture.feed_forward import (
    Activation as Activation,
)
from jswa.architecture.feed_forward import (
    MlpConfig as MlpConfig,
)
from jswa.architecture.feed_forward import (
    MoeConfig as MoeConfig,
)
from jswa.architecture.feed_forward import (
    RouterConfig as RouterConfig,
)
from jswa.architecture.feed_forward import (
    SideExperts as SideExperts,
)
from jswa.architecture.model import (
    AltUp as AltUp,
)
from jswa.architecture.model import (
    LayerConfig as LayerConfig,
)
from jswa.architecture.model import (
    ModelConfig as ModelConfig,
)
from jswa.architecture.model import (
    PerLayerInput as PerLayerInput,
)
from jswa.architecture.model import (
    Residual as Residual,
)
from jswa.architecture.reach import Reach as Reach
