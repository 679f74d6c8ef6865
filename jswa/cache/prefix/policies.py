"""The policies by their names (`EngineConfig.radix_eviction_policy`); nothing else names them."""

from collections.abc import Callable, Mapping

from jswa.cache.prefix.learned.policy import Learned
from jswa.cache.prefix.lru import LRU
from jswa.cache.prefix.policy import Policy
from jswa.cache.prefix.radix import RadixTree
from jswa.config import EvictionPolicy

MakePolicy = Callable[[RadixTree], Policy]
POLICIES: Mapping[EvictionPolicy, MakePolicy] = {"learned": Learned, "lru": LRU}
