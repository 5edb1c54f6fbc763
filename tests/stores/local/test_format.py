"""The bytes of the local store's files: what is written is read back, what is damaged is not."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.errors import DamagedStore
from quackmq.model.log_transactions import Marker, TransactionBoundary
from quackmq.model.producer_state import RememberedBatch
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Buffer
from quackmq.stores import limits as stores_limits
from quackmq.stores.core.chunk import ProducerBatch
from quackmq.stores.local.files import format
from quackmq.stores.local.files.format import (
    AppendEntry,
    ChangeEntry,
    Descriptor,
    Entry,
    Region,
    Sync,
    TrimEntry,
)
from tests.kit.tables import each

SALT = 4711
KEY = PartitionKey(uuid.UUID(int=7), 3)
REGION = Region(10, 20, 512, 100, 77, 1_000, 2_000, 3_000, 5)


def descriptor(
    length: int = 5, producers: int = 0, boundaries: tuple[TransactionBoundary, ...] = ()
) -> Descriptor:
    batches = tuple(
        ProducerBatch(number, 1, RememberedBatch(0, 4, 10, 15, 1_000))
        for number in range(producers)
    )
    return Descriptor(
        KEY, format.CONTINUES, 8, 512, 10, 15, 1_000, -1, length, 99, 2, batches, boundaries
    )


STEPS = (
    TransactionBoundary(2**62, 32_767, 10, 1_000, None),
    TransactionBoundary(7, 0, 11, 1_000, Marker.ABORT),
    TransactionBoundary(8, 1, 12, 1_000, Marker.COMMIT),
)


def frame(*parts: Buffer, number: int = 9) -> bytearray:
    return format.encode_frame(Sync.ALWAYS, 3, number, 8, parts, SALT)


def as_payload(entry: Entry) -> list[Buffer]:
    match entry:
        case AppendEntry(where, data):
            return format.encode_append(where, data)
        case ChangeEntry(change):
            return format.encode_change(change)
        case TrimEntry(key, first_offset):
            return format.encode_trim(key, first_offset)


ENTRIES: list[Entry] = [
    AppendEntry(descriptor(producers=2), memoryview(b"12345")),
    AppendEntry(descriptor(length=2**32 - 1), None),
    AppendEntry(descriptor(producers=1, boundaries=STEPS), memoryview(b"12345")),
    ChangeEntry(b'["topic-deleted","07"]'),
    TrimEntry(KEY, 2**63 - 1),
]

# --- frames ----------------------------------------------------------------------------------


def test_a_frame_is_read_back_as_it_was_written() -> None:
    data = frame(b"pay", b"load")
    read = format.parse_frame(data, 0, SALT)
    assert read is not None
    assert (read.sync, read.run, read.number, read.synced_through) == (Sync.ALWAYS, 3, 9, 8)
    assert (bytes(read.payload), read.size) == (b"payload", len(data))


@each("payload", [0, 1, 471, 472, 473, 5_000])
def test_a_frame_ends_on_a_boundary_and_its_size_is_known_beforehand(payload: int) -> None:
    data = frame(bytes(payload))
    assert len(data) == format.frame_bytes(payload)
    assert len(data) % stores_limits.JOURNAL_ALIGNMENT == 0


def test_a_frame_is_found_at_its_position_and_nowhere_else() -> None:
    data = bytes(512) + frame(b"payload")
    assert format.parse_frame(data, 512, SALT) is not None
    assert all(format.parse_frame(data, position, SALT) is None for position in range(512))


def test_no_flipped_bit_of_a_frame_goes_unnoticed() -> None:
    data = frame(b"payload")
    for position in range(format.FRAME_HEADER_BYTES + len(b"payload")):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            assert format.parse_frame(damaged, 0, SALT) is None, (position, bit)


def test_a_frame_that_is_cut_off_is_none() -> None:
    data = frame(b"payload")
    whole = format.FRAME_HEADER_BYTES + len(b"payload")
    assert all(format.parse_frame(data[:end], 0, SALT) is None for end in range(whole))
    assert format.parse_frame(data[:whole], 0, SALT) is not None


def test_a_frame_of_another_store_is_none() -> None:
    assert format.parse_frame(frame(b"payload"), 0, SALT + 1) is None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    assert format.parse_frame(format.FRAME_MAGIC + data, 0, SALT) is None


# --- entries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_is_read_back_as_it_was_written(entry: Entry) -> None:
    assert list(format.entries(memoryview(b"".join(as_payload(entry))))) == [entry]


def test_entries_of_all_kinds_lie_behind_each_other() -> None:
    payload = b"".join(part for entry in ENTRIES for part in as_payload(entry))
    assert list(format.entries(memoryview(payload))) == ENTRIES


def test_the_size_of_an_entry_is_known_beforehand() -> None:
    sizes = [len(b"".join(as_payload(entry))) for entry in ENTRIES]
    assert sizes == [
        format.append_bytes(1, 2, 5),
        format.append_bytes(1, 0, 0),
        format.append_bytes(1, 1, 5, 3),
        format.change_bytes(22),
        format.TRIM_BYTES,
    ]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_is_cut_off_is_damage(entry: Entry) -> None:
    payload = b"".join(as_payload(entry))
    for end in range(1, len(payload)):
        with pytest.raises(DamagedStore, match="is invalid"):
            list(format.entries(memoryview(payload[:end])))


def test_an_entry_of_an_unknown_kind_is_damage() -> None:
    with pytest.raises(DamagedStore, match="unknown kind of entry 9"):
        list(format.entries(memoryview(b"\x09\x00\x00\x00\x00")))


def test_batches_of_another_length_than_announced_are_damage() -> None:
    payload = b"".join(format.encode_append(descriptor(length=6), b"12345"))
    with pytest.raises(DamagedStore, match="5 bytes of batches instead of 6"):
        list(format.entries(memoryview(payload)))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_entries_or_damage(data: bytes) -> None:
    try:
        list(format.entries(memoryview(data)))
    except DamagedStore:
        return


# --- index entries ---------------------------------------------------------------------------


def test_regions_are_read_back_by_their_number() -> None:
    other = REGION._replace(base_offset=20, next_offset=30, max_timestamp_ms=-1)
    index = format.encode_region(REGION) + format.encode_region(other)
    assert len(index) == 2 * format.REGION_ENTRY_BYTES
    assert [format.parse_region(index, number) for number in (0, 1)] == [REGION, other]
    assert format.base_offset_at(index, 1) == 20


def test_no_flipped_bit_of_an_index_entry_goes_unnoticed() -> None:
    entry = format.encode_region(REGION)
    for position in range(len(entry)):
        for bit in range(8):
            damaged = bytearray(entry)
            damaged[position] ^= 1 << bit
            assert format.parse_region(damaged, 0) is None, (position, bit)


def test_zeros_are_no_index_entry() -> None:
    assert format.parse_region(bytes(format.REGION_ENTRY_BYTES), 0) is None


# --- checkpoints -----------------------------------------------------------------------------


def test_a_checkpoint_is_read_back_as_it_was_written() -> None:
    content = {"run": 1, "catalog": [["state", "key", None, 2]]}
    assert format.decode_checkpoint(format.encode_checkpoint(content)) == content


def test_a_flipped_bit_of_a_checkpoint_is_noticed_wherever_it_means_something() -> None:
    data = format.encode_checkpoint({"run": 1})
    padding = range(5, 8)
    for position in set(range(len(data))) - set(padding):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(DamagedStore):
            format.decode_checkpoint(damaged)


def test_a_checkpoint_that_is_cut_off_or_too_long_is_damage() -> None:
    data = format.encode_checkpoint({"run": 1})
    for wrong in [data[:end] for end in range(len(data))] + [data + b" "]:
        with pytest.raises(DamagedStore):
            format.decode_checkpoint(wrong)
