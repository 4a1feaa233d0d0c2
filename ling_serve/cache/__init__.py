"""Latents and states of running sequences, and the laws that keep them right.

1. Only `LatentPool` and `StateSlotPool` hold cache arrays. A latent array is one dense `mx.zeros` per layer, allocated
   once; what a pool keeps is never a view of something larger.
2. A step evaluates every cache array along with its tokens, also when it samples nothing: otherwise its last writes
   would never happen, and the next step would not depend on them.
3. On a CPU no pool is copied per step: a layer writes its latents before it reads them, steps are evaluated before
   the next one is built, and states are replaced whole. Peak memory proves it; active memory would not show a copy.
4. Blocks and slots that no sequence owns keep their values, bit for bit, whatever runs beside them.
5. A slot starts from zeros when it changes owner. A state counts exactly the tokens it has absorbed.
6. Blocks and slots are freed when the last launched step that names them has been collected, not before.
7. With nothing running, free + owned = all, for blocks and for slots, or the engine stops.
"""

from ling_serve.cache.caches import Caches
from ling_serve.cache.latent_pool import LatentPool
from ling_serve.cache.layout import CacheLayout
from ling_serve.cache.sequence_memory import SequenceMemory
from ling_serve.cache.state_slots import KdaState, StateSlotPool

__all__ = ["CacheLayout", "Caches", "KdaState", "LatentPool", "SequenceMemory", "StateSlotPool"]
