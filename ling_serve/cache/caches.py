"""What a forward pass reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ling_serve.cache.latent_pool import LatentPool
from ling_serve.cache.layout import CacheLayout
from ling_serve.cache.state_slots import StateSlotPool


@dataclass(frozen=True)
class Caches:
    latents: LatentPool
    states: StateSlotPool

    @staticmethod
    def allocate(layout: CacheLayout, *, num_blocks: int, block_size: int, num_slots: int) -> Caches:
        return Caches(LatentPool(layout, num_blocks, block_size), StateSlotPool(layout, num_slots))

    def arrays(self) -> list[mx.array]:
        """Every cache array, for the runner to evaluate each step."""
        return [*self.latents.arrays(), *self.states.arrays()]
