import pytest

from ling_serve.cache.allocator import OutOfBlocks
from ling_serve.cache.sequence_memory import ReleaseLedger, SequenceMemory
from ling_serve.errors import InvariantViolated


def test_a_release_waits_for_the_last_launched_step_that_names_the_owner() -> None:
    ledger, freed = ReleaseLedger(), list[str]()
    ledger.launch(["a", "b"])
    ledger.launch(["b"])
    ledger.release("a", lambda: freed.append("a"))
    ledger.release("b", lambda: freed.append("b"))
    ledger.release("idle", lambda: freed.append("idle"))
    assert freed == ["idle"]
    ledger.collect()
    assert freed == ["idle", "a"]
    ledger.collect()
    assert freed == ["idle", "a", "b"]


def test_a_resumed_owner_holds_something_else() -> None:
    """Released while launched, taken again, launched again: the first holding is free after the first step."""
    ledger, freed = ReleaseLedger(), list[str]()
    ledger.launch(["a"])
    ledger.release("a", lambda: freed.append("first"))
    ledger.launch(["a"])
    ledger.release("a", lambda: freed.append("second"))
    ledger.collect()
    assert freed == ["first"]
    ledger.collect()
    assert freed == ["first", "second"]


def test_a_sequence_holds_blocks_and_one_slot() -> None:
    resets = list[int]()
    memory = SequenceMemory(num_blocks=4, block_size=16, num_slots=2, on_slot_freed=resets.append)
    memory.hold("a", 17)
    memory.hold("a", 33)
    assert len(memory.blocks("a")) == 3
    assert (memory.num_free_blocks, memory.num_free_slots) == (1, 1)
    assert memory.fits("a", 64)
    assert not memory.fits("b", 17)
    with pytest.raises(OutOfBlocks):
        memory.hold("b", 17)
    assert memory.num_free_slots == 1  # the refused sequence took no slot either
    slot = memory.slot("a")
    memory.release("a")
    assert resets == [slot]
    memory.audit()
    assert (memory.num_free_blocks, memory.num_free_slots) == (4, 2)


def test_a_launched_step_keeps_blocks_and_slot_from_a_new_owner() -> None:
    memory = SequenceMemory(num_blocks=2, block_size=16, num_slots=1)
    memory.hold("a", 32)
    memory.ledger.launch(["a"])
    memory.release("a")
    assert not memory.fits("b", 1)
    with pytest.raises(InvariantViolated, match=r"0 free \+ 0 owned of 2.*1 releases wait"):
        memory.audit()
    memory.ledger.collect()
    assert memory.fits("b", 32)
    memory.audit()


def test_the_audit_sees_a_leak() -> None:
    memory = SequenceMemory(num_blocks=2, block_size=16, num_slots=1)
    memory.hold("a", 1)
    memory._table.detach("a")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(InvariantViolated, match=r"blocks: 1 free \+ 0 owned of 2"):
        memory.audit()
