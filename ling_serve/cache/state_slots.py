"""The KDA state of every running sequence: convolution history and recurrent state, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ling_serve.cache.layout import CacheLayout
from ling_serve.errors import InvariantViolated


@dataclass(frozen=True)
class KdaState:
    """The state of R sequences in one layer."""

    conv: mx.array
    """[R, conv_taps, conv_width] conv_dtype: the last inputs of the short convolutions, channels q ‖ k ‖ v."""
    recurrent: mx.array
    """[R, num_heads, value_dim, key_dim] float32."""

    def rows(self, rows: Sequence[int]) -> KdaState:
        """The state of some rows; a run of neighbours is a slice."""
        first, count = rows[0], len(rows)
        if list(rows) == list(range(first, first + count)):
            return KdaState(self.conv[first : first + count], self.recurrent[first : first + count])
        index = mx.array(list(rows), dtype=mx.int32)
        return KdaState(self.conv[index], self.recurrent[index])

    def dense(self) -> KdaState:
        """The same values in buffers of their own: a slice would keep the whole array it was cut from alive."""
        return KdaState(mx.contiguous(self.conv), mx.contiguous(self.recurrent))


class _Group:
    """Rows that were written together, and which slot each belongs to now (None = to nobody any more)."""

    def __init__(self, state: KdaState, slots: Sequence[int]) -> None:
        self.state = state
        self.slots: list[int | None] = list(slots)


@dataclass(frozen=True)
class _Place:
    group: _Group
    row: int


class StateSlotPool:
    """Slot → state, where the rows of a batch stay together in the arrays the model returned.

    Decoding reads the slots it wrote a step earlier, in the same order, and gets those very arrays: nothing is copied.
    Any other choice of slots is gathered. A group of which some rows were overwritten elsewhere or reset is cut down to
    the others, so that the bytes held are those of the slots in use.
    """

    def __init__(self, layout: CacheLayout, num_slots: int) -> None:
        self.num_slots = num_slots
        self.zero_slot = num_slots
        """Reads as zeros; never written."""
        self.scratch_slot = num_slots + 1
        """Swallows what is written to it."""
        self._row_shapes = (
            (layout.conv_taps, layout.conv_width),
            (layout.num_heads, layout.value_dim, layout.key_dim),
        )
        conv_shape, recurrent_shape = self._row_shapes
        self._zeros = KdaState(
            mx.zeros((1, *conv_shape), layout.conv_dtype),
            mx.zeros((1, *recurrent_shape), mx.float32),
        )
        self._places: dict[int, dict[int, _Place]] = {layer: {} for layer in layout.kda_layers}

    def read(self, layer: int, slots: Sequence[int]) -> KdaState:
        """The state of `slots`, in this order; repeats allowed. A slot never written since its reset reads as zeros."""
        places = self._places[layer]
        first = places.get(slots[0])
        if first is not None and first.group.slots == list(slots):
            return first.group.state
        parts = [self._gather(run, places) for run in _runs(slots, places)]
        if len(parts) == 1:
            return parts[0]
        return KdaState(
            mx.concatenate([part.conv for part in parts]),
            mx.concatenate([part.recurrent for part in parts]),
        )

    def write(self, layer: int, slots: Sequence[int], state: KdaState) -> None:
        """Replace the state of `slots` by the rows of `state`; a row for the scratch slot is dropped."""
        self._check(slots, state)
        kept = [row for row, slot in enumerate(slots) if slot != self.scratch_slot]
        for row in kept:
            self._leave(layer, slots[row])
        if not kept:
            return
        held = state if len(kept) == len(slots) else state.rows(kept)
        group = _Group(held.dense(), [slots[row] for row in kept])
        for row, slot in enumerate(slots[row] for row in kept):
            self._places[layer][slot] = _Place(group, row)
        self._compact(layer)

    def reset(self, slot: int) -> None:
        """Back to zeros in every layer; its memory is free with the next evaluation."""
        for layer in self._places:
            self._leave(layer, slot)
            self._compact(layer)

    def arrays(self) -> list[mx.array]:
        """Every array held, for the runner to evaluate."""
        groups = {id(place.group): place.group for places in self._places.values() for place in places.values()}
        return [array for group in groups.values() for array in (group.state.conv, group.state.recurrent)]

    def _gather(self, slots: Sequence[int], places: dict[int, _Place]) -> KdaState:
        """A run of slots that lie in one group, or of which none was ever written."""
        found = [places[slot] for slot in slots if slot in places]
        if found:
            return found[0].group.state.rows([place.row for place in found])
        shapes = [(len(slots), *shape) for shape in self._row_shapes]
        return KdaState(mx.broadcast_to(self._zeros.conv, shapes[0]), mx.broadcast_to(self._zeros.recurrent, shapes[1]))

    def _leave(self, layer: int, slot: int) -> None:
        place = self._places[layer].pop(slot, None)
        if place is not None:
            place.group.slots[place.row] = None

    def _compact(self, layer: int) -> None:
        """Cut groups down to the rows in use. Lazy: a group that the same step overwrites is never copied."""
        places = self._places[layer]
        for group in {id(place.group): place.group for place in places.values()}.values():
            if None in group.slots:
                rows = [row for row, slot in enumerate(group.slots) if slot is not None]
                slots = [slot for slot in group.slots if slot is not None]
                group.state = group.state.rows(rows).dense()
                group.slots = list(slots)
                for row, slot in enumerate(slots):
                    places[slot] = _Place(group, row)

    def _check(self, slots: Sequence[int], state: KdaState) -> None:
        owned = [slot for slot in slots if slot != self.scratch_slot]
        if len(set(owned)) != len(owned) or any(not 0 <= slot < self.num_slots for slot in owned):
            raise InvariantViolated(
                f"states were written to slots {list(slots)}; expected distinct slots below {self.num_slots}"
            )
        expected = [(len(slots), *shape) for shape in self._row_shapes]
        if [state.conv.shape, state.recurrent.shape] != expected:
            raise InvariantViolated(
                f"states of shapes {state.conv.shape} and {state.recurrent.shape} were written to {len(slots)} slots; "
                f"expected {expected[0]} and {expected[1]}"
            )


def _runs(slots: Sequence[int], places: dict[int, _Place]) -> list[list[int]]:
    """Cut `slots` where the group changes; slots without a state form runs of their own."""
    runs: list[list[int]] = []
    previous: object = runs  # equal to no group
    for slot in slots:
        place = places.get(slot)
        group = place.group if place is not None else None
        if group is not previous:
            runs.append([])
            previous = group
        runs[-1].append(slot)
    return runs
