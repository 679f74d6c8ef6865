"""Cases of routing as plain data, for tests and compilation.

`CASES` are small, and the kernels must choose, sort and cut as plain JAX does. `LAYERS` are routers of released
models, to be compiled with `TOKENS` per step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pallas_kernels.experts.groups import Tiling
from pallas_kernels.experts.routing.arguments import Router


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        logits: their kind; see `make_logits`.
        parts: into which the product is split.
        bias, selection, scale: whether the router has them.
        tilings: of the grouped products.
        quick: whether it is interpreted in every run of the tests.
        width: of the tokens that the kernel copies to their rows; 0: it copies none.
        scaled: whether they are multiplied by their weights.
    """

    name: str
    router: Router
    tokens: int = 5
    experts: int = 8
    logits: str = "wide"
    parts: int = 1
    bias: bool = False
    selection: bool = False
    scale: bool = False
    tilings: tuple[Tiling, ...] = (Tiling(8, 12),)
    quick: bool = True
    width: int = 0
    scaled: bool = False


GPT_OSS = Router("top_k_softmax", 4)
MIMO = Router("sigmoid", 8, normalize=True, eps=1e-20)
LLAMA_4 = Router("top_k_sigmoid", 1)
QWEN = Router("softmax", 8, normalize=True)
KINDS = ("wide", "flat", "ties", "huge", "one expert", "broken")
CASES = (
    *(
        Case(f"gpt-oss, {kind}", GPT_OSS, 7, 32, kind, parts=3, bias=True, quick=kind in ("wide", "broken"))
        for kind in KINDS
    ),
    *(Case(f"softmax, {kind}", Router("softmax", 2), 6, 8, kind, quick=kind == "ties") for kind in KINDS),
    Case("sigmoid, normalised, selection", MIMO, 9, 48, selection=True, tilings=(Tiling(16, 70), Tiling(8, 80))),
    Case("sigmoid of one", LLAMA_4, 3, 16, scale=True),
    Case("all experts", Router("softmax", 5, normalize=True, scale=2.5), 4, 5),
    Case("a factor, a cap", Router("softmax", 3, factor=0.5, softcap=3.0), 4, 6),
    Case("one token, no tiles", GPT_OSS, 1, 32, parts=5, tilings=()),
    Case("tiles of all rows", Router("top_k_softmax", 2), 4, 4, tilings=(Tiling(32, 5),), quick=False),
    Case("three blocks", GPT_OSS, 600, 32, parts=2, bias=True, tilings=(Tiling(128, 52), Tiling(64, 73))),
    Case("two blocks, one expert", Router("softmax", 1), 300, 32, "one expert", tilings=(Tiling(64, 40),), quick=False),
    Case("many experts, blocks", MIMO, 40, 256, selection=True, tilings=(Tiling(8, 500),), quick=False),
)


def make_logits(kind: str, tokens: int, experts: int, rng: np.random.Generator) -> Float[np.ndarray, "T E"]:
    """Return logits of a certain kind."""
    noise = rng.standard_normal((tokens, experts))
    makers: dict[str, Callable[[], np.ndarray]] = {
        "wide": lambda: 3 * noise,
        "flat": lambda: np.zeros_like(noise),
        "ties": lambda: rng.integers(1, 4, noise.shape),
        "huge": lambda: 1e30 * noise,
        "one expert": lambda: np.where(np.arange(experts) == experts // 2, 50.0, noise),
        "broken": lambda: np.where((np.arange(tokens) % 2 == 1)[:, None], np.nan, noise),
    }
    return np.asarray(makers[kind](), np.float32)


# Experts, and what else the router of a released model has.
LAYERS = (
    Case("gpt-oss-20b", GPT_OSS, 0, 32, parts=5, bias=True, width=2_880),
    Case("gpt-oss-120b", GPT_OSS, 0, 128, parts=5, bias=True, width=2_880),
    Case("MiMo-V2-Flash", MIMO, 0, 256, parts=8, selection=True, width=4_096),
    Case("Llama-4-Scout", LLAMA_4, 0, 16, parts=8, width=5_120, scaled=True),
    Case("Qwen3-30B-A3B", QWEN, 0, 128, parts=8, width=2_048),
)
TOKENS = (1, 64, 256, 2_048)
