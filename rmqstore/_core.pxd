# Declarations of the core for the other compiled modules: layouts, `Region`, index files, streams.

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from rmqstore._bytes cimport acquire_i32, fastmod, get_i32, prefetch, publish_i32_at, put_i64

# --------------------------------------------------------------------------------------------------- layout constants

cpdef enum RecordLayout:
    # Positions of the fields whose place does not depend on the host lengths; RECORD_FIXED_SIZE is everything but
    # body, topic and properties for IPv4 hosts and the one-byte topic length of V1.
    RECORD_TOTAL_SIZE = 0
    RECORD_MAGIC = 4
    RECORD_BODY_CRC = 8
    RECORD_QUEUE_ID = 12
    RECORD_FLAG = 16
    RECORD_QUEUE_OFFSET = 20
    RECORD_PHY_OFFSET = 28
    RECORD_SYS_FLAG = 36
    RECORD_BORN_TIMESTAMP = 40
    RECORD_BORN_HOST = 48
    RECORD_FIXED_SIZE = 91
    RECORD_HOST_V6_EXTRA = 12
    BLANK_SIZE = 8
    PROP_CRC_SIZE = 20

cpdef enum UnitLayout:
    UNIT_PHY_OFFSET = 0
    UNIT_RECORD_SIZE = 8
    UNIT_TAGS_CODE = 12
    UNIT_SIZE = 20

cpdef enum BatchUnitLayout:
    BATCH_UNIT_PHY_OFFSET = 0
    BATCH_UNIT_RECORD_SIZE = 8
    BATCH_UNIT_TAGS_CODE = 12
    BATCH_UNIT_STORE_TIMESTAMP = 20
    BATCH_UNIT_BASE_OFFSET = 28
    BATCH_UNIT_BATCH_NUM = 36
    BATCH_UNIT_COMPACTED_OFFSET = 38
    BATCH_UNIT_RESERVED = 42
    BATCH_UNIT_SIZE = 46

cpdef enum ExtUnitLayout:
    EXT_UNIT_LENGTH = 0
    EXT_UNIT_TAGS_CODE = 2
    EXT_UNIT_STORE_TIMESTAMP = 10
    EXT_UNIT_BITMAP_LENGTH = 18
    EXT_UNIT_MIN_SIZE = 20

cpdef enum IndexLayout:
    INDEX_BEGIN_TIMESTAMP = 0
    INDEX_END_TIMESTAMP = 8
    INDEX_BEGIN_PHY_OFFSET = 16
    INDEX_END_PHY_OFFSET = 24
    INDEX_HASH_SLOT_COUNT = 32
    INDEX_COUNT = 36
    INDEX_HEADER_SIZE = 40
    SLOT_SIZE = 4
    ENTRY_KEY_HASH = 0
    ENTRY_PHY_OFFSET = 4
    ENTRY_TIME_DIFF = 12
    ENTRY_PREV_INDEX = 16
    ENTRY_SIZE = 20

cpdef enum CheckpointLayout:
    CHECKPOINT_PHYSIC_MSG_TIMESTAMP = 0
    CHECKPOINT_LOGICS_MSG_TIMESTAMP = 8
    CHECKPOINT_INDEX_MSG_TIMESTAMP = 16
    CHECKPOINT_MASTER_FLUSHED_OFFSET = 24
    CHECKPOINT_CONFIRM_PHY_OFFSET = 32
    CHECKPOINT_LOGICS_PHYSICAL_OFFSET = 40
    CHECKPOINT_SIZE = 4096

cpdef enum Verdict:
    # Results of `scan`, `decode_record` and similar functions at a position; negative = bytes that no writer leaves.
    EMPTY = 0            # eight zero bytes, or fewer than eight bytes left: not written
    RECORD = 1
    BLANK = 2            # the record that closes a segment
    COLUMNS_FULL = 3
    LIMIT = 4            # the end that the caller gave
    BAD_MAGIC = -1
    BAD_SIZE = -2        # the total size is negative, too small, or goes beyond the segment; a blank's is not the rest of it
    BAD_LENGTH = -3      # the parts do not add up to the total size
    BAD_PHY_OFFSET = -4  # the record has the phy offset of another place
    BAD_BODY_CRC = -5
    BAD_PROP_CRC = -6

cpdef enum KeyKind:
    # The text of a record that is compared with the key.
    ANY_KEY = 0     # the unique key, or a piece of KEYS
    TAG = 1         # the whole TAGS value
    UNIQUE_KEY = 2
    KEYS_ONLY = 3

cdef extern from *:
    """
    /* Signed; an enumerator above INT_MAX would wrap silently. */
    #define RMQ_MAGIC_V1 ((int32_t)0xDAA320A7u)
    #define RMQ_MAGIC_V2 ((int32_t)0xDAA320ABu)
    #define RMQ_MAGIC_BLANK ((int32_t)0xCBD43194u)
    #define RMQ_PRE_FILL ((int32_t)0x7FFFFFFF)
    #define RMQ_EXT_BASE INT64_MIN
    #define RMQ_MAX_EXT_ADDRESS ((int64_t)-2147483649)
    """
    const int32_t C_MAGIC_V1 "RMQ_MAGIC_V1"
    const int32_t C_MAGIC_V2 "RMQ_MAGIC_V2"
    const int32_t C_MAGIC_BLANK "RMQ_MAGIC_BLANK"
    const int32_t PRE_FILL "RMQ_PRE_FILL"
    const int64_t EXT_BASE "RMQ_EXT_BASE"
    const int64_t MAX_EXT_ADDRESS "RMQ_MAX_EXT_ADDRESS"
    # A bit of `Region.state`.
    const int64_t CLOSED "RMQ_CLOSED"

cdef enum:
    SYS_TRANSACTION_MASK = 0xC
    SYS_PREPARED = 0x4
    SYS_ROLLBACK = 0xC
    SYS_BORN_V6 = 0x10
    SYS_STORE_V6 = 0x20
    SYS_INNER_BATCH = 0x80
    # The flags that a plain row may have: compression, its type, several tags.
    SYS_PLAIN_MASK = 0x703


# ------------------------------------------------------------------------------------------------------------ classes

cdef class Region:
    cdef unsigned char* base
    cdef readonly int64_t size
    cdef readonly bint writable
    cdef int64_t state, lent
    cdef int is_lost
    cdef void* watched
    cdef public object path
    cdef object __weakref__

    cdef unsigned char* pin(self, int64_t pos, int64_t extent) except NULL
    cdef unsigned char* pin_writable(self, int64_t pos, int64_t extent) except NULL
    cdef int unpin(self) except -1
    cdef bint drop(self) noexcept
    cdef int raise_lost(self) except -1
    cdef void unmap(self) noexcept


cdef class IndexRegion:
    cdef readonly Region region
    cdef public bint damaged, is_distrusted
    cdef readonly int64_t slot_num, index_num
    cdef uint64_t magic
    cdef cython.pymutex mutex
    cdef int64_t long_puts  # calls that write without the GIL now; at 0 the GIL is the lock

    cdef bint put_one(self, int32_t key_hash, int64_t phy_offset, int64_t store_timestamp) except -1
    cdef list select_one(self, int32_t key_hash, int64_t max_num, int64_t begin, int64_t end)


cdef class MessageFields:
    cdef public object topic, body, properties, flag, born_timestamp, born_host, sys_flag, reconsume_times
    cdef public object prepared_transaction_offset, store_host


cdef class FileStream:
    cdef public int64_t wrote_where
    cdef list offsets
    cdef Region found
    cdef list found_among
    cdef int64_t found_base

    cdef list files(self)
    cdef Region around(self, int64_t offset, int64_t* base)


cdef class OpenedIndexes:
    cdef object files

    cdef object known(self)


cdef class StateFields:
    cdef public object lock, appender, key_query
    cdef public int64_t last_store_timestamp, waiting
    cdef public bint sync_flush


# ------------------------------------------------------------------------------------------------------------- leaves

cdef inline int64_t index_count_of(const unsigned char* base) noexcept nogil:
    # Number of the next entry; 0 in a new file means 1.  Slots and count are published after the entries that they point
    # to, so that readers that follow them may read entries as plain bytes.
    cdef int64_t count = acquire_i32(base + INDEX_COUNT)
    return count if count > 0 else 1


cdef inline int64_t index_head(const unsigned char* base, uint64_t magic, int64_t slot_num, int64_t index_num,
                               int32_t key_hash) noexcept nogil:
    # The newest entry of the key's chain, 0 for an empty chain, -1 for a slot with an impossible value.
    cdef int64_t count = index_count_of(base)
    cdef uint32_t slot = fastmod(<uint32_t>key_hash, magic, <uint32_t>slot_num)
    cdef int64_t head = acquire_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * <int64_t>slot)
    if head > count:
        # A writer may have gone on since the count was read.
        count = index_count_of(base)
    if head == 0 or count <= 1 or key_hash < 0:
        return 0
    return head if 0 < head <= count and head < index_num else -1


cdef inline int64_t entry_before(const unsigned char* entry, int64_t at, int32_t key_hash, uint64_t magic, int64_t slot_num,
                                 bint* damaged) noexcept nogil:
    # The entry after entry `at` in the chain of `key_hash`, 0 at the end.  A chain has entries of one slot, each older than
    # the one before.
    cdef int64_t prev = get_i32(entry + ENTRY_PREV_INDEX)
    cdef int32_t own = get_i32(entry + ENTRY_KEY_HASH)
    if own != key_hash and (own < 0 or fastmod(<uint32_t>own, magic, <uint32_t>slot_num)
                            != fastmod(<uint32_t>key_hash, magic, <uint32_t>slot_num)):
        damaged[0] = True
    if 0 <= prev < at:
        return prev
    damaged[0] = True
    return 0


cdef inline void ask_for_entry(const unsigned char* entry) noexcept nogil:
    # An entry may cross two cache lines.
    prefetch(entry)
    prefetch(entry + ENTRY_SIZE - 1)


cdef inline void put_unit(unsigned char* p, int64_t phy_offset, int32_t size, int64_t tags_code) noexcept nogil:
    # Size last: readers ignore a unit of size 0.
    put_i64(p + UNIT_TAGS_CODE, tags_code)
    put_i64(p, phy_offset)
    publish_i32_at(p + UNIT_RECORD_SIZE, size)
