"""Message files of RabbitMQ's classic queues as bytes, over raw pointers.

Owns the layout of N.rdq: the scans for its records, and the places of all messages (`LocationTable`), also as a node
writes them when it stops; and the check of a record of N.qs, version 2.  It knows no path, no clock and no policy, and
every number that it reads is hostile.  A pointer into a file comes from `Region.pin` and never outlives the function that
pinned it.  Facts: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from rmqstore._bytes cimport get_i32, get_i64, prefetch, put_i32
from rmqstore._core cimport Region
from rmqstore._crc32 cimport crc32_start, crc32_update
from rmqstore.rabbitmq._term cimport Fault, message_id, term_extent

import os

import numpy as np

from rmqstore.errors import CorruptionError, OffsetOutOfRangeError


# ------------------------------------------------------------------------------------------------------- message files

cpdef enum MessageRecordLayout:
    # A record of N.rdq (§8.1): size of what follows but the mark, message id, term, and the mark that it was written whole.
    MESSAGE_RECORD_SIZE = 0
    MESSAGE_RECORD_MSG_ID = 8
    MESSAGE_RECORD_TERM = 24
    MESSAGE_RECORD_EXTRA = 25  # bytes of a record beyond its term
    MESSAGE_RECORD_MARK = 255

cpdef enum MessageScan:
    # How to look for records.
    SCAN_SEQUENTIAL = 0  # RabbitMQ up to 3.12: from record to record
    SCAN_BYTEWISE = 1    # 3.13 and later: at every position, and only what is referred to
    SCAN_SALVAGE = 2     # at every position, and only if the term is well-formed, ends there and holds the same id

cpdef enum MessageStop:
    # The end of a scan.
    STOP_END = 0         # the file ends with a record, or all of it was scanned
    STOP_ZERO = 1        # a size of zero
    STOP_TORN = 2        # fewer bytes than a size needs, or than it says
    STOP_ROWS = 3        # as many records as were asked for
    STOP_WORK = 4        # more overlapping records than a real file has

cpdef enum MessageFlag:
    MESSAGE_WRITTEN = 1     # the mark is there
    MESSAGE_TOO_SHORT = 4   # the size leaves no place for an id; a node stops with an error if the mark is there

cdef enum:
    NOT_LOCATED = -1
    EMPTY_SLOT = -2
    AHEAD = 16

assert MESSAGE_RECORD_MSG_ID + 16 == MESSAGE_RECORD_TERM and MESSAGE_RECORD_TERM + 1 == MESSAGE_RECORD_EXTRA


cdef inline int64_t record_extent(const unsigned char* p, int64_t left) noexcept nogil:
    # Bytes of the record at p, its mark included; 0: a size of zero; -1: it does not fit.  A size is unsigned in the file.
    cdef int64_t size
    if left < 8:
        return -1
    size = get_i64(p)
    if size == 0:
        return 0
    if size < 0 or size > left - 9:
        return -1
    return size + 9


cdef inline bint holds_message(const unsigned char* p, int64_t extent) noexcept nogil:
    # The record's term is an external term of exactly its length, and names the id of the record.
    cdef int64_t size = 0
    cdef const unsigned char* msg_id = message_id(p + MESSAGE_RECORD_TERM, extent - MESSAGE_RECORD_EXTRA, &size)
    return msg_id != NULL and memcmp(msg_id, p + MESSAGE_RECORD_MSG_ID, 16) == 0


cdef inline int64_t zero_run(const unsigned char* p, int64_t n) noexcept nogil:
    # Zero bytes at the beginning of n.
    cdef int64_t i = 0
    cdef uint64_t word
    while i + 8 <= n:
        memcpy(&word, p + i, 8)
        if word != 0:
            break
        i += 8
    while i < n and p[i] == 0:
        i += 1
    return i


cdef inline int64_t next_candidate(const unsigned char* p, int64_t n, int64_t at) noexcept nogil:
    # The next position at or after `at` whose bytes may be a whole record with an id: size, end and mark fit.  n: none.
    cdef int64_t extent, run
    while at < n:
        if p[at] != 0:
            # The first byte of a size below 2**56 is zero.
            at += 1
            continue
        extent = record_extent(p + at, n - at)
        if extent == 0:
            # A size above zero may begin inside the run, at most seven bytes before its end.
            run = zero_run(p + at, n - at)
            at += run - 7 if run > 8 else 1
            continue
        if extent >= MESSAGE_RECORD_EXTRA and p[at + extent - 1] == MESSAGE_RECORD_MARK:
            return at
        at += 1
    return n


cdef int64_t scan_rows(const unsigned char* p, int64_t n, int64_t* at, int mode, int64_t* work, int64_t room,
                       unsigned char* ids, int64_t* pos, int64_t* size, uint8_t* flags, int* stop) noexcept nogil:
    cdef int64_t here = at[0], extent, row = 0
    stop[0] = STOP_END
    if mode == SCAN_SEQUENTIAL:
        while here < n:
            if row == room:
                stop[0] = STOP_ROWS
                break
            extent = record_extent(p + here, n - here)
            if extent <= 0:
                stop[0] = STOP_ZERO if extent == 0 else STOP_TORN
                break
            flags[row] = MESSAGE_WRITTEN if p[here + extent - 1] == MESSAGE_RECORD_MARK else 0
            pos[row] = here
            size[row] = extent - MESSAGE_RECORD_EXTRA
            if extent >= MESSAGE_RECORD_EXTRA:
                memcpy(ids + 16 * row, p + here + MESSAGE_RECORD_MSG_ID, 16)
            else:
                flags[row] |= MESSAGE_TOO_SHORT
                memset(ids + 16 * row, 0, 16)
            row += 1
            here += extent
        at[0] = here
        return row
    while True:
        here = next_candidate(p, n, here)
        if here >= n:
            here = n
            break
        if row == room:
            stop[0] = STOP_ROWS
            break
        extent = record_extent(p + here, n - here)
        work[0] -= extent
        if work[0] < 0:
            stop[0] = STOP_WORK
            break
        if not holds_message(p + here, extent):
            here += 1
            continue
        memcpy(ids + 16 * row, p + here + MESSAGE_RECORD_MSG_ID, 16)
        pos[row] = here
        size[row] = extent - MESSAGE_RECORD_EXTRA
        flags[row] = MESSAGE_WRITTEN
        row += 1
        here += extent
    at[0] = here
    return row


cdef int64_t work_limit(int64_t n) noexcept nogil:
    # Real records do not overlap, but a body may hold whole ones, which are looked at once more.
    return 16 * n + (1 << 20) if n < INT64_MAX // 32 else INT64_MAX


def scan_messages(Region region not None, int mode=SCAN_SEQUENTIAL):
    """Find the records of a message file, by SCAN_SEQUENTIAL or SCAN_SALVAGE.

    A tuple: msg_id (n, 16) uint8; position of the record (n,) int64, bytes; size of the term (n,) int64, bytes, negative
    where there is no place for an id; flags (n,) uint8 of `MessageFlag`; position where the pass ended; `MessageStop`.
    """
    cdef int64_t n = region.size, at = 0, rows, work = work_limit(n), room = 65536
    cdef int stop = STOP_ROWS
    cdef unsigned char* p
    cdef uint8_t[:, ::1] ids
    cdef int64_t[::1] positions, sizes
    cdef uint8_t[::1] flags
    if mode != SCAN_SEQUENTIAL and mode != SCAN_SALVAGE:
        raise ValueError(f"mode is {mode}, not SCAN_SEQUENTIAL or SCAN_SALVAGE")
    parts = []
    p = region.pin(0, n)
    try:
        while stop == STOP_ROWS:
            room = min(room, (n - at) // 9 + 1)
            columns = (np.empty((room, 16), np.uint8), np.empty(room, np.int64), np.empty(room, np.int64),
                       np.empty(room, np.uint8))
            ids, positions, sizes, flags = columns
            with nogil:
                rows = scan_rows(p, n, &at, mode, &work, room, &ids[0, 0], &positions[0], &sizes[0], &flags[0], &stop)
            parts.append([column[:rows] for column in columns])
    finally:
        region.unpin()
    return (*(np.concatenate(column) for column in zip(*parts)), at, stop)


cdef struct Location:
    unsigned char msg_id[16]
    int64_t pos
    int64_t size
    int32_t file
    int32_t refcount


cdef inline uint64_t hash_id(const unsigned char* msg_id, uint64_t seed) noexcept nogil:
    cdef uint64_t a, b
    memcpy(&a, msg_id, 8)
    memcpy(&b, msg_id + 8, 8)
    a = (a ^ seed) * <uint64_t>0x9E3779B97F4A7C15
    a ^= a >> 32
    a = (a + b) * <uint64_t>0xBF58476D1CE4E5B9
    return a ^ (a >> 29)


cdef inline int64_t find_slot(const Location* slots, uint64_t mask, uint64_t seed, const unsigned char* msg_id) noexcept nogil:
    # The slot of the id, or the empty slot for it: one is always empty.
    cdef uint64_t i = hash_id(msg_id, seed) & mask
    while slots[i].file != EMPTY_SLOT and memcmp(slots[i].msg_id, msg_id, 16) != 0:
        i = (i + 1) & mask
    return <int64_t>i


cdef Location* new_slots(int64_t capacity) noexcept nogil:
    cdef Location* slots
    cdef int64_t i
    if capacity > INT64_MAX // <int64_t>sizeof(Location):
        return NULL
    slots = <Location*>malloc(<size_t>capacity * sizeof(Location))
    if slots != NULL:
        for i in range(capacity):
            slots[i].file = EMPTY_SLOT
    return slots


cdef struct ScanSums:
    int64_t accepted
    int64_t last_end
    bint no_memory


cdef inline int64_t get_small_integer(const unsigned char* p, int64_t n, int64_t* value) noexcept nogil:
    # Bytes of the integer term at p; -1 for another term, a negative number, or one above 2**62.
    cdef int64_t i
    if n >= 2 and p[0] == 97:
        value[0] = p[1]
        return 2
    if n >= 5 and p[0] == 98:
        value[0] = get_i32(p + 1)
        return 5 if value[0] >= 0 else -1
    if n >= 3 and p[0] == 110 and p[1] <= 8 and p[2] == 0 and n >= 3 + p[1]:
        value[0] = 0
        for i in range(p[1] - 1, -1, -1):
            if value[0] >> 54:
                return -1
            value[0] = value[0] << 8 | p[3 + i]
        return 3 + p[1]
    return -1


@cython.final
cdef class LocationTable:
    """The places of messages by id: reference count, file, position and size, with room for `expected` ids.

    Open addressing, 40 bytes a slot, at most seven eighths full.  The file is -1 of a message that is referred to and was
    not found yet.  Long scans release the GIL: the owner must hold a lock.
    """

    cdef Location* slots
    cdef int64_t capacity, count
    cdef uint64_t seed

    def __cinit__(self, int64_t expected=0):
        self.slots = NULL
        self.capacity = 0
        self.count = 0
        # A file's ids are hostile: nobody shall be able to choose ones that all meet in one place.
        self.seed = int.from_bytes(os.urandom(8), "little")
        self.reserve(expected)

    def __dealloc__(self):
        free(self.slots)

    cdef bint grow(self, int64_t expected) noexcept nogil:
        # False: no memory; the table is as it was.
        cdef int64_t capacity = 16, i, at
        cdef Location* slots
        while capacity - capacity // 8 <= expected:
            if capacity > INT64_MAX // 128:
                return False
            capacity *= 2
        if capacity <= self.capacity:
            return True
        slots = new_slots(capacity)
        if slots == NULL:
            return False
        for i in range(self.capacity):
            if self.slots[i].file != EMPTY_SLOT:
                at = find_slot(slots, <uint64_t>(capacity - 1), self.seed, self.slots[i].msg_id)
                slots[at] = self.slots[i]
        free(self.slots)
        self.slots = slots
        self.capacity = capacity
        return True

    cdef Location* find(self, const unsigned char* msg_id) noexcept nogil:
        cdef int64_t i = find_slot(self.slots, <uint64_t>(self.capacity - 1), self.seed, msg_id)
        return NULL if self.slots[i].file == EMPTY_SLOT else &self.slots[i]

    cdef Location* make(self, const unsigned char* msg_id) noexcept nogil:
        # The entry of the id, which is new if the table had none (not located, no reference); NULL: no memory.
        cdef int64_t i = find_slot(self.slots, <uint64_t>(self.capacity - 1), self.seed, msg_id)
        if self.slots[i].file != EMPTY_SLOT:
            return &self.slots[i]
        if self.count >= self.capacity - self.capacity // 8 - 1:
            if not self.grow(self.count + 1):
                return NULL
            i = find_slot(self.slots, <uint64_t>(self.capacity - 1), self.seed, msg_id)
        memcpy(self.slots[i].msg_id, msg_id, 16)
        self.slots[i].file = NOT_LOCATED
        self.slots[i].pos = 0
        self.slots[i].size = 0
        self.slots[i].refcount = 0
        self.count = self.count + 1
        return &self.slots[i]

    cdef bint take_out(self, const unsigned char* msg_id) noexcept nogil:
        # Deletes the id and moves back what had to go past it, so that no search ends early.
        cdef uint64_t mask = <uint64_t>(self.capacity - 1), hole, i, home
        hole = <uint64_t>find_slot(self.slots, mask, self.seed, msg_id)
        if self.slots[hole].file == EMPTY_SLOT:
            return False
        i = hole
        while True:
            i = (i + 1) & mask
            if self.slots[i].file == EMPTY_SLOT:
                break
            home = hash_id(self.slots[i].msg_id, self.seed) & mask
            if ((i - home) & mask) >= ((i - hole) & mask):
                self.slots[hole] = self.slots[i]
                hole = i
        self.slots[hole].file = EMPTY_SLOT
        self.count = self.count - 1
        return True

    def __len__(self):
        return self.count

    def reserve(self, int64_t expected):
        """Make room for this many ids; MemoryError if there is no memory."""
        if not self.grow(max(expected, self.count)):
            raise MemoryError(f"no memory for the places of {expected} messages")

    def get(self, bytes msg_id not None):
        """tuple or None: (reference count, file, position, size of the record) of an id; the file is -1 if it is not located."""
        cdef Location* entry
        if PyBytes_GET_SIZE(msg_id) != 16:
            return None
        entry = self.find(<unsigned char*>PyBytes_AS_STRING(msg_id))
        if entry == NULL:
            return None
        return (entry.refcount, entry.file, entry.pos, entry.size)

    def put(self, bytes msg_id not None, int32_t refcount, int32_t file=NOT_LOCATED, int64_t pos=0, int64_t size=0):
        """Enter an id of 16 bytes, or change all that is known of it; ValueError for a negative number, MemoryError."""
        cdef Location* entry
        if PyBytes_GET_SIZE(msg_id) != 16:
            raise ValueError(f"a message id has 16 bytes, not {len(msg_id)}")
        if file < NOT_LOCATED or refcount < 0 or pos < 0 or size < 0:
            raise ValueError(f"reference count {refcount}, file {file}, position {pos}, size {size}: none may be negative")
        entry = self.make(<unsigned char*>PyBytes_AS_STRING(msg_id))
        if entry == NULL:
            raise MemoryError("no memory for the place of one more message")
        entry.refcount, entry.file, entry.pos, entry.size = refcount, file, pos, size

    def refer(self, const uint8_t[:, ::1] msg_ids not None, const int64_t[::1] counts=None):
        """Add references: one for each row of `msg_ids` (n, 16) uint8, or as many as `counts` (n,) int64 says.

        Raises
        ------
        ValueError
            The shapes do not fit, a count is negative, or a sum goes beyond 2**31 - 1.
        MemoryError
        """
        cdef int64_t i, n = msg_ids.shape[0], more = 1
        cdef int fault = 0
        cdef Location* entry
        if msg_ids.shape[1] != 16 or (counts is not None and counts.shape[0] != n):
            raise ValueError("msg_ids is of shape (n, 16) and counts of shape (n,)")
        cdef bint counted = counts is not None
        with nogil:
            for i in range(n):
                if i + AHEAD < n:
                    # A table of millions is in no cache: what is needed soon is asked for now.
                    prefetch(&self.slots[hash_id(&msg_ids[i + AHEAD, 0], self.seed) & <uint64_t>(self.capacity - 1)])
                if counted:
                    more = counts[i]
                entry = self.make(&msg_ids[i, 0])
                if entry == NULL:
                    fault = 1
                    break
                if more < 0 or more > 0x7fffffff - entry.refcount:
                    fault = 2
                    break
                entry.refcount += <int32_t>more
        if fault == 1:
            raise MemoryError(f"no memory for the places of {n} messages")
        if fault:
            raise ValueError(f"row {i}: a reference count is negative or above 2**31 - 1")

    cdef bint accept(self, const unsigned char* msg_id, int64_t at, int64_t extent, int32_t file, bint adopt, bint last_wins,
                     ScanSums* sums) noexcept nogil:
        # True if the message got its place here.
        cdef Location* entry = self.make(msg_id) if adopt else self.find(msg_id)
        cdef bint is_new
        if entry == NULL:
            sums.no_memory |= adopt
            return False
        is_new = entry.file == NOT_LOCATED
        if adopt and is_new and entry.refcount == 0:
            entry.refcount = 1
        if is_new:
            sums.accepted += 1
        elif entry.file != file or not last_wins:
            return False
        entry.file, entry.pos, entry.size = file, at, extent
        sums.last_end = max(sums.last_end, at + extent)
        return is_new

    def scan(self, Region region not None, int32_t file, int mode=SCAN_SEQUENTIAL, bint adopt=False):
        """Locate messages in a message file: those that are referred to and have no place yet (§8.5).

        With SCAN_SEQUENTIAL the last occurrence of an id in the file counts, else the first.  With `adopt` every message
        counts as referred to once, but for those that are known to have no reference; not for SCAN_BYTEWISE, which would
        take bytes of a body for a record.

        A tuple of int: messages that got their place here; end of the last of them; records without their mark; records
        too short for an id; position of the first of these two, or -1; where the pass ended; `MessageStop`.
        """
        cdef ScanSums sums
        cdef const uint8_t[:, ::1] ids
        cdef const int64_t[::1] positions, sizes
        cdef const uint8_t[::1] flags
        cdef int64_t i, rows, n, here = 0, extent
        cdef unsigned char* p
        memset(&sums, 0, sizeof(ScanSums))
        if mode == SCAN_BYTEWISE:
            if adopt:
                raise ValueError("a bytewise scan accepts only what is referred to")
            n = region.size
            p = region.pin(0, n)
            try:
                with nogil:
                    here = next_candidate(p, n, 0)
                    while here < n:
                        extent = record_extent(p + here, n - here)
                        here += extent if self.accept(p + here + MESSAGE_RECORD_MSG_ID, here, extent, file, False, False, &sums) else 1
                        here = next_candidate(p, n, here)
            finally:
                region.unpin()
            return sums.accepted, sums.last_end, 0, 0, -1, n, STOP_END
        *columns, end, stop = scan_messages(region, mode)
        ids, positions, sizes, flags = columns
        rows = flags.shape[0]
        with nogil:
            for i in range(rows):
                if i + AHEAD < rows:
                    prefetch(&self.slots[hash_id(&ids[i + AHEAD, 0], self.seed) & <uint64_t>(self.capacity - 1)])
                if flags[i] & (MESSAGE_WRITTEN | MESSAGE_TOO_SHORT) == MESSAGE_WRITTEN:
                    self.accept(&ids[i, 0], positions[i], sizes[i] + MESSAGE_RECORD_EXTRA, file, adopt, mode == SCAN_SEQUENTIAL, &sums)
        if sums.no_memory:
            raise MemoryError("no memory for the places of so many messages")
        short = columns[3] & MESSAGE_TOO_SHORT != 0
        unwritten = columns[3] & (MESSAGE_WRITTEN | MESSAGE_TOO_SHORT) == 0
        faults = columns[1][short | unwritten]
        first = int(faults[0]) if len(faults) else -1
        return sums.accepted, sums.last_end, int(unwritten.sum()), int(short.sum()), first, end, stop

    def entries(self, const uint8_t[:, ::1] msg_ids not None):
        """Reference count, file, position and size of ids (n, 16), each (n,) int64; the file is -1 of unknown ones."""
        cdef int64_t i, n = msg_ids.shape[0]
        cdef Location* entry
        found = np.zeros((4, n), np.int64)
        cdef int64_t[:, ::1] rows = found
        if msg_ids.shape[1] != 16:
            raise ValueError("msg_ids is of shape (n, 16)")
        with nogil:
            for i in range(n):
                entry = self.find(&msg_ids[i, 0])
                rows[1, i] = -1
                if entry != NULL:
                    rows[0, i], rows[1, i], rows[2, i], rows[3, i] = entry.refcount, entry.file, entry.pos, entry.size
        return tuple(found)

    def move(self, const uint8_t[:, ::1] msg_ids not None, int32_t file, const int64_t[::1] positions not None):
        """Change the place of known ids (n, 16) to `file` and `positions` (n,); their sizes stay."""
        cdef int64_t i
        cdef Location* entry
        if msg_ids.shape[1] != 16 or positions.shape[0] != msg_ids.shape[0]:
            raise ValueError("msg_ids is of shape (n, 16) and positions of shape (n,)")
        for i in range(msg_ids.shape[0]):
            entry = self.find(&msg_ids[i, 0])
            if entry != NULL:
                entry.file = file
                entry.pos = positions[i]

    def discard_many(self, const uint8_t[:, ::1] msg_ids not None):
        """Forget ids (n, 16)."""
        cdef int64_t i
        if msg_ids.shape[1] != 16:
            raise ValueError("msg_ids is of shape (n, 16)")
        for i in range(msg_ids.shape[0]):
            self.take_out(&msg_ids[i, 0])

    def columns(self, int file=EMPTY_SLOT):
        """All entries, or those of one file (-1: not located), as NumPy columns in no particular order.

        msg_id (n, 16) uint8, reference count (n,) int32, file (n,) int32, position (n,) int64, size (n,) int64.
        """
        cdef int64_t i, rows = 0, n = 0
        for i in range(self.capacity):
            if self.slots[i].file != EMPTY_SLOT and (file == EMPTY_SLOT or self.slots[i].file == file):
                n += 1
        found = (np.empty((n, 16), np.uint8), np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int64),
                 np.empty(n, np.int64))
        cdef uint8_t[:, ::1] ids = found[0]
        cdef int32_t[::1] refcounts = found[1], files = found[2]
        cdef int64_t[::1] positions = found[3], sizes = found[4]
        for i in range(self.capacity):
            if self.slots[i].file != EMPTY_SLOT and (file == EMPTY_SLOT or self.slots[i].file == file):
                memcpy(&ids[rows, 0], self.slots[i].msg_id, 16)
                refcounts[rows] = self.slots[i].refcount
                files[rows] = self.slots[i].file
                positions[rows] = self.slots[i].pos
                sizes[rows] = self.slots[i].size
                rows += 1
        return found

    def sums(self, const int64_t[::1] files not None, const int64_t[::1] file_sizes not None):
        """Bytes that are referred to in each file (n,) int64; how many located entries are in none, or beyond its end.

        `files`, ascending, and `file_sizes` are numbers and sizes (n,) int64.
        """
        cdef int64_t i, low, high, middle, wrong = 0, n = files.shape[0]
        cdef Location* entry
        if file_sizes.shape[0] != n:
            raise ValueError("files and file_sizes are of one length")
        valid = np.zeros(n, np.int64)
        cdef int64_t[::1] sums = valid
        for i in range(self.capacity):
            entry = &self.slots[i]
            if entry.file < 0:
                continue
            low, high = 0, n
            while low < high:
                middle = (low + high) // 2
                if files[middle] < entry.file:
                    low = middle + 1
                else:
                    high = middle
            if (low == n or files[low] != entry.file or entry.pos < 0 or entry.size < MESSAGE_RECORD_EXTRA
                    or entry.size > file_sizes[low] or entry.pos > file_sizes[low] - entry.size):
                wrong += 1
            elif entry.refcount > 0:
                sums[low] += entry.size
        return valid, wrong

    def load_ets_items(self, const uint8_t[::1] data not None, int64_t pos):
        """(int, int): how many objects of an msg_store_index.ets were entered from its items at `pos`; where they end.

        CorruptionError if an id comes twice, or a number is out of its range.
        """
        cdef int64_t n = data.shape[0], at = pos, size, left, used, loaded = 0, i
        cdef int64_t values[4]
        cdef const unsigned char* p
        cdef const unsigned char* atom
        cdef Location* entry
        if pos < 0 or pos > n:
            raise OffsetOutOfRangeError(f"position {pos} is not inside the {n} bytes", pos=pos)
        while n - at > 8:
            p = &data[at]
            size = <int64_t><uint32_t>get_i32(p)
            if size > n - at - 8 or size < 20 or memcmp(p + 4, b"bWLA", 4) != 0:
                break
            p += 8
            left = size
            if p[0] != 131 or p[1] != 104 or p[2] != 6:
                break
            # An atom of one or two bytes of length, whatever OTP wrote it.
            if (p[3] == 100 or p[3] == 118) and p[4] == 0 and p[5] == 12:
                atom = p + 6
            elif (p[3] == 115 or p[3] == 119) and p[4] == 12:
                atom = p + 5
            else:
                break
            left -= (atom - p) + 12
            p = atom + 12
            if left < 21 or memcmp(atom, b"msg_location", 12) != 0 or memcmp(p, b"m\x00\x00\x00\x10", 5) != 0:
                break
            atom = p + 5
            p += 21
            left -= 21
            for i in range(4):
                used = get_small_integer(p, left, &values[i])
                if used < 0:
                    raise CorruptionError("a number of a message's place is not an integer, or out of its range", pos=at)
                p += used
                left -= used
            if left != 0 or values[0] > 0x7fffffff or values[1] > 0x7fffffff:
                raise CorruptionError("a message's place has numbers out of their range, or bytes after them", pos=at)
            entry = self.make(atom)
            if entry == NULL:
                raise MemoryError("no memory for the places of so many messages")
            if entry.file != NOT_LOCATED:
                raise CorruptionError("a message has two places", pos=at)
            entry.refcount, entry.file = <int32_t>values[0], <int32_t>values[1]
            entry.pos, entry.size = values[2], values[3]
            loaded += 1
            at += 8 + size
        return loaded, at

# ------------------------------------------------------------------------------------------------------------ version 2

crc32_start()

cpdef enum QueueStoreVerdict:
    # What `check_queue_store` found at a place of an N.qs.
    QUEUE_STORE_OK = 0
    QUEUE_STORE_OUTSIDE = 1   # it does not lie inside the file
    QUEUE_STORE_SIZE = 2      # the record says another size
    QUEUE_STORE_CRC = 3       # its check sum does not agree


cdef int queue_store_verdict(const unsigned char* p, int64_t n, int64_t pos, int64_t size) noexcept nogil:
    if pos < 64 or size < 0 or pos > n - 8 or size > n - 8 - pos:
        return QUEUE_STORE_OUTSIDE
    p += pos
    if <int64_t><uint32_t>get_i32(p) != size:
        return QUEUE_STORE_SIZE
    # The flag says whether there is a check sum: the low half of the CRC-32 of the term.
    if p[4] & 1 and (crc32_update(0, p + 8, <size_t>size) & 0xffff) != (<uint32_t>p[5] << 8 | p[6]):
        return QUEUE_STORE_CRC
    return QUEUE_STORE_OK


def check_queue_store(const uint8_t[::1] data not None, const int64_t[::1] positions not None,
                      const int64_t[::1] sizes not None):
    """Check records of an N.qs, whose bytes are `data`, by the positions of their heads and the sizes of their terms.

    A tuple: (n,) uint8 of `QueueStoreVerdict`; (n,) int64, bytes of the terms without the zeros that 4.x may put after
    them; (n, 16) uint8, the message ids in the terms, zeros where there is none.
    """
    cdef int64_t i, n = data.shape[0], rows = positions.shape[0], size = 0
    if sizes.shape[0] != rows:
        raise ValueError("positions and sizes are of one length")
    found = np.empty(rows, np.uint8), np.array(sizes), np.zeros((rows, 16), np.uint8)
    cdef uint8_t[::1] verdicts = found[0]
    cdef int64_t[::1] terms = found[1]
    cdef uint8_t[:, ::1] ids = found[2]
    cdef const unsigned char* p = &data[0] if n else NULL
    cdef const unsigned char* msg_id
    cdef Fault fault
    with nogil:
        for i in range(rows):
            verdicts[i] = <uint8_t>queue_store_verdict(p, n, positions[i], sizes[i])
            if verdicts[i] != QUEUE_STORE_OK:
                continue
            # 4.x reserves the estimated size of a term.  Other bytes after it stay: then it is not one.
            size = term_extent(p + positions[i] + 8, sizes[i], &fault)
            if size > 0 and zero_run(p + positions[i] + 8 + size, sizes[i] - size) == sizes[i] - size:
                terms[i] = size
            msg_id = message_id(p + positions[i] + 8, terms[i], &size)
            if msg_id != NULL:
                memcpy(&ids[i, 0], msg_id, 16)
    return found
