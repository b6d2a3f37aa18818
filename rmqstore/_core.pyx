"""The compiled core: with `_dispatch`, `_columns`, `_rows` and `message._read` the only code on RocketMQ bytes in place.

It owns the fence around mapped memory (`Region`), the layout constants, index files, the framing of records and queue
units.  Leaves that several of the six need stand in the declarations (`_record.pxd` and its like).  It knows bytes, not
files: no path, no clock, no logging, no policy; it answers with values and verdicts, and the classes above decide.  Two
tiers in every section: leaves that are ``noexcept nogil`` over a pointer and integers, and uniform ``def`` wrappers that
compute the extent, pin, call the leaf and unpin.

Invariants (ARCHITECTURE.md has them in full): a pointer never outlives the function that derived it and only `Region`
stores one (I1); a mapping never changes size or address (I2); one two-sided 64-bit bounds check and one pin per
operation before the first load (I3); every number read from a file is hostile, and index chains must strictly
decrease, so every walk ends (I4); payload, entry, slot and count are published in that order (I6).

Layouts: Apache RocketMQ 5.5.0 (docs/formats.md); every integer in a file is big-endian two's complement.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, INT64_MIN, int16_t, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport malloc
from libc.string cimport memchr, memcpy, strcmp

from rmqstore._bytes cimport (
    acquire_i16_at, acquire_i32_at, add_pins, atomic_load, atomic_or, atomic_take, before, check, difference_of, fastmod,
    get_i16, get_i32, get_i64, HAS_GIL, load_i32, load_i64, mod_magic, prefetch, publish_bytes, publish_i16_at, publish_i32,
    publish_i32_at, publish_i64, put_i16, put_i32, put_i64, store_i32, store_i64, sum_of, WATCHES_ADDRESSES,
    WATCHES_THREADS,
)
from rmqstore._crc32 cimport crc32_by, crc32_implementation_num, crc32_name, crc32_shifted, crc32_start, crc32_update
from rmqstore._java_text cimport hash_str, hash_text, hash_utf8, index_hash
from rmqstore._python cimport (
    clamped, PUT_COST, PyErr_SetFromErrno, PyList_GET_ITEM, PyUnicode_AsUTF8, PyUnicode_Check,
    WORTH_WAITING,
)
from rmqstore._record cimport (
    body_crc_ok, has_key, has_key_hash, has_prop_crc, judge_record, parse_record, prop_crc_ok, RecordView, stored_prop_crc,
    text_of,
)

import os

from rmqstore import _numpy as np
from rmqstore.errors import OffsetOutOfRangeError, ReadOnlyError, StoreChangedError, StoreClosedError

cdef extern from "<sys/mman.h>" nogil:
    int msync(void* addr, size_t length, int flags)
    int madvise(void* addr, size_t length, int advice)
    int PROT_READ, PROT_WRITE, MS_SYNC
    int MADV_SEQUENTIAL, MADV_RANDOM, MADV_NORMAL, MADV_WILLNEED, MADV_DONTNEED

cdef extern from "_mapping.h" nogil:
    # NULL on failure, with errno set.
    void* map_pages "rmq_map"(int fd, size_t size, size_t length, int prot)
    void unmap_pages "rmq_unmap"(void* base, size_t size)

cdef extern from *:
    """
    #include <errno.h>
    /* Linux 5.14; older headers lack the name, older kernels answer EINVAL. */
    #if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
    #define MADV_POPULATE_WRITE 23
    #endif
    /* 1: every page of the range can be written without a fault; 0: read-ahead was requested only. */
    static inline int rmq_populate(void *p, size_t size) {
    #if defined(MADV_POPULATE_WRITE) && !defined(RMQSTORE_PORTABLE)
        if (madvise(p, size, MADV_POPULATE_WRITE) == 0) return 1;
        if (errno != EINVAL) return 0;
    #endif
        madvise(p, size, MADV_WILLNEED);
        return 0;
    }
    """
    bint populate_pages "rmq_populate"(void* p, size_t size) noexcept nogil

cdef extern from "_fault.h" nogil:
    void catch_faults "rmq_catch_faults"()
    void* watch "rmq_watch"(unsigned char* base, size_t size, int prot, int64_t* state, int64_t* lent, int* lost)
    void unwatch "rmq_unwatch"(void* watched)

cdef extern from "<unistd.h>" nogil:
    long sysconf(int name)
    int _SC_PAGESIZE


# --------------------------------------------------------------------------------------------------- layout constants

# Numbers that do not fit an enumerator, as module attributes for tests and documents.
MAGIC_V1 = C_MAGIC_V1
MAGIC_V2 = C_MAGIC_V2
MAGIC_BLANK = C_MAGIC_BLANK
PRE_FILL_SIZE = PRE_FILL             # record size of a unit that only fills a queue file up to its first offset
EXT_ADDRESS_MAX = MAX_EXT_ADDRESS    # a tags code at or below is an address in the extension file
EXT_ADDRESS_BASE = EXT_BASE

assert RECORD_BORN_HOST + 8 + 8 + 8 + 4 + 8 + 4 + 1 + 2 == RECORD_FIXED_SIZE
assert UNIT_TAGS_CODE + 8 == UNIT_SIZE and BATCH_UNIT_RESERVED + 4 == BATCH_UNIT_SIZE
assert INDEX_COUNT + 4 == INDEX_HEADER_SIZE and ENTRY_PREV_INDEX + 4 == ENTRY_SIZE
assert EXT_UNIT_BITMAP_LENGTH + 2 == EXT_UNIT_MIN_SIZE
assert CHECKPOINT_LOGICS_PHYSICAL_OFFSET + 8 <= CHECKPOINT_SIZE


# ------------------------------------------------------------------------------------------------------------- Region

cdef int64_t PAGE_SIZE = sysconf(_SC_PAGESIZE)


cdef class Region:
    """The fence around one mapping: the only object that stores a pointer into a file.

    `Region.map` makes it.  The mapping is never resized or moved.  Every use pins it, so that `close`, also from another thread
    or a finalizer, unmaps only after the last use; a `view` holds a pin for as long as it lives.  Threads may share it.

    If the file was cut short or its disk fails, an operation that reads a lost page raises `StoreChangedError`, and so does every
    later one (docs/mmap.md).  A fault while other code reads a `view` ends the process.

    Attributes
    ----------
    path : str or None
        Name of the file in such an error.
    """

    def __cinit__(self):
        self.base = NULL
        self.size = 0
        self.writable = False
        self.state = CLOSED
        self.lent = 0
        self.is_lost = 0
        self.watched = NULL

    @staticmethod
    def map(int fd, int64_t size, bint writable=False, bint padded=False):
        """Map `size` bytes (the whole file) of the descriptor `fd`, shared; the descriptor may be closed afterwards.

        Parameters
        ----------
        padded : bool
            A file that was cut short reads as zeros from its end to `size`; only for reading.

        Raises
        ------
        ValueError
            `size` is not positive, or the file is shorter and not `padded`.
        OSError
            The system refused, with its errno.
        """
        if size <= 0:
            raise ValueError(f"cannot map {size} bytes")
        cdef int64_t length = os.fstat(fd).st_size
        if length < size and (writable or not padded):
            # Touching a page after the end of the file would end the process with SIGBUS.
            raise ValueError(f"cannot map {size} bytes of a file of {length}")
        cdef Region region = Region.__new__(Region)
        cdef int prot = PROT_READ | PROT_WRITE if writable else PROT_READ
        cdef void* base
        with nogil:
            base = map_pages(fd, <size_t>size, <size_t>length, prot)
        if base == NULL:
            PyErr_SetFromErrno(OSError)
        region.base = <unsigned char*>base
        region.size = size
        region.writable = writable
        region.state = 0
        catch_faults()
        region.watched = watch(region.base, <size_t>size, prot, &region.state, &region.lent, &region.is_lost)
        return region

    def __dealloc__(self):
        self.unmap()

    cdef void unmap(self) noexcept:
        # Only the first call unmaps.
        cdef unsigned char* base = atomic_take(&self.base)
        if base != NULL:
            unwatch(self.watched)
            unmap_pages(base, <size_t>self.size)

    cdef unsigned char* pin(self, int64_t pos, int64_t extent) except NULL:
        # The address of `pos`, valid until `unpin`; makes the one bounds check of the operation.
        cdef int64_t state = add_pins(&self.state, 1)
        if state & CLOSED:
            self.drop()
            raise StoreClosedError("the mapping is closed; open the store or file again")
        if pos < 0 or extent < 0 or pos > self.size - extent:
            self.drop()
            raise OffsetOutOfRangeError(
                f"{extent} bytes at position {pos} are outside the {self.size} bytes of the file", pos=pos)
        return self.base + pos

    cdef unsigned char* pin_writable(self, int64_t pos, int64_t extent) except NULL:
        if not self.writable:
            if self.closed:
                raise StoreClosedError("the mapping is closed; open the store or file again")
            raise ReadOnlyError("this file was opened read-only; open the store with read_only=False to write")
        return self.pin(pos, extent)

    cdef int unpin(self) except -1:
        # End an operation; raise if it may have read lost pages.
        if self.drop():
            self.raise_lost()
        return 0

    cdef int raise_lost(self) except -1:
        raise StoreChangedError(
            "the file was cut short by another process while it was mapped, or its disk failed; open the store again to "
            "read what is left", self.path)

    cdef bint drop(self) noexcept:
        # Release a pin; returns True if the mapping is lost.
        cdef int64_t state = add_pins(&self.state, -1)
        cdef bint is_lost = self.is_lost
        if state == CLOSED:
            self.unmap()
        return is_lost

    def close(self):
        """Close for new uses at once; the memory goes with the last pin.  Closing twice does nothing."""
        if atomic_or(&self.state, CLOSED) == 0:
            self.unmap()

    @property
    def lost(self):
        """True once an operation met a lost page, because the file was cut short or its disk failed."""
        return bool(self.is_lost)

    @property
    def closed(self):
        """True after `close`: no new use is possible."""
        return bool(atomic_load(&self.state) & CLOSED)

    @property
    def pins(self):
        """Count of the uses and views that hold the mapping now."""
        return atomic_load(&self.state) & ~CLOSED

    def __len__(self):
        return self.size

    def read(self, int64_t pos, int64_t size):
        """Copy `size` bytes at `pos`."""
        cdef unsigned char* p = self.pin(pos, size)
        try:
            return PyBytes_FromStringAndSize(<char*>p, size)
        finally:
            self.unpin()

    def view(self, int64_t pos, int64_t size):
        """Return `size` bytes at `pos` as a read-only memoryview, without a copy; it keeps the mapping until released."""
        self.pin(pos, size)
        self.unpin()
        return memoryview(RegionView(self, pos, size))

    def write(self, int64_t pos, const uint8_t[::1] data not None):
        """Copy `data` to `pos`."""
        cdef unsigned char* p = self.pin_writable(pos, data.shape[0])
        try:
            if data.shape[0]:
                memcpy(p, &data[0], data.shape[0])
        finally:
            self.unpin()

    def zero(self, int64_t pos, int64_t size):
        """Set `size` bytes at `pos` to zero, the last ones first, touching only pages that hold something else."""
        cdef unsigned char* p = self.pin_writable(pos, size)
        try:
            with nogil:
                zero_bytes(p, size)
        finally:
            self.unpin()

    def last_nonzero(self, int64_t pos, int64_t size):
        """Return the position after the last non-zero byte of the `size` bytes at `pos`, or `pos`."""
        cdef unsigned char* p = self.pin(pos, size)
        cdef int64_t n
        try:
            with nogil:
                n = nonzero_extent(p, size)
            return pos + n
        finally:
            self.unpin()

    def flush(self, int64_t pos=0, int64_t size=-1):
        """Force the bytes from `pos` (default: all) to the disk (`msync` with MS_SYNC).

        Raises
        ------
        OSError
            The system could not write; nothing is known about what reached the disk.
        """
        if size < 0:
            size = self.size - pos if 0 <= pos <= self.size else 0
        cdef unsigned char* p = self.pin(pos, size)
        cdef int64_t before = pos % PAGE_SIZE
        cdef int failed
        try:
            with nogil:
                failed = msync(p - before, <size_t>(size + before), MS_SYNC) if size > 0 else 0
            if failed:
                PyErr_SetFromErrno(OSError)
        finally:
            self.unpin()

    def advise(self, str how):
        """Tell the system how the mapping will be read: "normal", "sequential", "random" or "willneed"."""
        cdef int advice
        if how == "sequential":
            advice = MADV_SEQUENTIAL
        elif how == "random":
            advice = MADV_RANDOM
        elif how == "willneed":
            advice = MADV_WILLNEED
        elif how == "normal":
            advice = MADV_NORMAL
        else:
            raise ValueError(f"unknown advice {how!r}")
        cdef unsigned char* p = self.pin(0, self.size)
        try:
            madvise(p, <size_t>self.size, advice)
        finally:
            self.unpin()

    def populate(self, int64_t pos, int64_t size):
        """Make the pages of `size` bytes at `pos` ready to be written, so that the first write to each meets no fault.

        No byte changes, and other threads may write at the same time.  Allocate the file first, because holes are filled; a failure
        shows only at the next write.

        Returns
        -------
        bool
            False where the pages are only read ahead: before Linux 5.14, and on other systems.

        Raises
        ------
        ReadOnlyError, StoreClosedError, OffsetOutOfRangeError
        """
        cdef unsigned char* p = self.pin_writable(pos, size)
        cdef int64_t before = pos % PAGE_SIZE
        cdef bint done = True
        try:
            # The mapping begins on a page and ends with its last one, so that whole pages stay inside.
            if size > 0:
                with nogil:
                    done = populate_pages(p - before, <size_t>(size + before))
            return done
        finally:
            self.unpin()

    def release_pages(self, int64_t pos, int64_t size):
        """Let the whole pages among `size` bytes at `pos` go from this process; the file keeps what they hold."""
        cdef unsigned char* p = self.pin(pos, size)
        cdef int64_t start = (pos + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE
        cdef int64_t extent = (pos + size) // PAGE_SIZE * PAGE_SIZE - start
        try:
            if extent > 0:
                # Other threads of a scan continue.
                with nogil:
                    madvise(p + (start - pos), <size_t>extent, MADV_DONTNEED)
        finally:
            self.unpin()

    def get_i32(self, int64_t pos):
        """Read the signed 32-bit big-endian number at `pos`."""
        cdef unsigned char* p = self.pin(pos, 4)
        cdef int32_t value = get_i32(p)
        self.unpin()
        return value

    def get_i64(self, int64_t pos):
        """Read the signed 64-bit big-endian number at `pos`."""
        cdef unsigned char* p = self.pin(pos, 8)
        cdef int64_t value = get_i64(p)
        self.unpin()
        return value


# Deliberate errors for tests/core/test_sanitizers.py, in sanitizer builds only.
if WATCHES_ADDRESSES:
    def _read_outside(Region region not None, int64_t pos):
        """Read the byte at `pos`, which may be outside the region."""
        cdef unsigned char* p = region.pin(0, region.size)
        cdef int value = p[pos]
        region.unpin()
        return value

    def _add(int64_t a, int64_t b):
        """Add two numbers whose sum may overflow."""
        return a + b

    def _lose(int64_t size):
        """Leak `size` bytes; returns False if there was no memory."""
        return malloc(<size_t>size) != NULL

if WATCHES_THREADS:
    def _write_unordered(Region region not None, int64_t pos, int64_t num):
        """Write to `pos` `num` times without the GIL, unsynchronized."""
        cdef unsigned char* p = region.pin_writable(pos, 4)
        cdef int64_t i
        with nogil:
            for i in range(num):
                put_i32(p, <int32_t>i)
        region.unpin()


@cython.no_gc_clear  # The pin must be given back to the region, also when a cycle is collected.
cdef class RegionView:
    """A buffer over a part of a `Region`; it holds a pin from its making to its end, so the memory cannot go away."""

    cdef Region region
    cdef int64_t pos, size
    cdef bint pinned

    def __cinit__(self, Region region not None, int64_t pos, int64_t size):
        region.pin(pos, size)
        add_pins(&region.lent, 1)
        self.region, self.pos, self.size, self.pinned = region, pos, size, True

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef unsigned char* p = self.region.base + self.pos  # the pin of this object fences it
        PyBuffer_FillInfo(view, self, p, self.size, True, flags)

    def __dealloc__(self):
        if self.pinned:
            add_pins(&self.region.lent, -1)
            self.region.drop()


cdef int64_t nonzero_extent(const unsigned char* p, int64_t n) noexcept nogil:
    # Length up to and including the last non-zero byte.
    cdef uint64_t word
    while n >= 8:
        memcpy(&word, p + n - 8, 8)
        if word:
            break
        n -= 8
    while n > 0 and p[n - 1] == 0:
        n -= 1
    return n


cdef void zero_bytes(unsigned char* p, int64_t n) noexcept nogil:
    # Pages that are zero already are not touched: a sparse file stays sparse.  Words are cleared in descending order: a
    # killed process leaves whole records and units, or some without a size, but never a size without the bytes before it.
    cdef unsigned char nothing = 0
    cdef int64_t first
    while n > 0:
        first = (n - 1) & ~<int64_t>4095
        if not nonzero_extent(p + first, n - first):
            n = first
            continue
        while n > first and (n - first < 8 or (<size_t>(p + n)) & 7):
            n -= 1
            publish_bytes(p + n, &nothing, 1)
        while n - first >= 8:
            n -= 8
            publish_i64(p + n, 0)


# ---------------------------------------------------------------------------------------- Java string hash and CRC-32

def java_string_hash(str text not None):
    """Compute Java's ``String.hashCode`` over UTF-16 code units, signed 32 bit; lone surrogates hash as themselves."""
    return <int32_t>hash_str(0, text)


def java_string_hash_bytes(bytes data not None):
    """Compute Java's ``String.hashCode`` of UTF-8 bytes as Java decodes them (malformed parts become U+FFFD)."""
    return <int32_t>hash_utf8(0, <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


def index_key_hash(str topic not None, str key not None):
    """Compute the non-negative hash of ``topic#key`` in index files; no string is built."""
    return index_hash(hash_str(hash_str(0, topic) * 31u + 35u, key))


crc32_start()


def crc32(data not None):
    """Compute the CRC-32 of `data` with the top bit cleared, as a record stores it; 0 for empty data."""
    cdef Py_buffer view
    cdef uint32_t crc
    # Not a typed memoryview, whose making costs more than the CRC of a kilobyte.
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            crc = crc32_update(0, <const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return <int32_t>(crc & 0x7FFFFFFFu)


def crc32_implementations():
    """List the CRC-32 implementations that this machine can run, as a tuple of str; the last is the one in use."""
    return tuple([crc32_name(i).decode() for i in range(crc32_implementation_num)])


crc32_implementation = crc32_name(crc32_implementation_num - 1).decode()


def crc32_with(str name not None, data not None, uint32_t value=0):
    """Compute ``zlib.crc32(data, value)`` by the implementation `name`; ValueError for an unknown name."""
    cdef Py_buffer view
    cdef int i
    cdef const char* wanted = PyUnicode_AsUTF8(name)
    for i in range(crc32_implementation_num):
        if strcmp(crc32_name(i), wanted) == 0:
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
            try:
                with nogil:
                    value = crc32_by(i, value, <const uint8_t*>view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
            return value
    raise ValueError(f"no CRC-32 implementation {name!r} here, only {', '.join(crc32_implementations())}")


# --------------------------------------------------------------------------------------------------------- index file

cdef enum:
    PUT_AHEAD = 32


cdef struct IndexCounters:
    # The header fields that a put reads, kept in registers between the puts of one call; every put writes them.
    int64_t count
    int64_t begin_timestamp
    int32_t hash_slot_count


cdef inline int refuse_seconds(int64_t store_timestamp) except -1:
    # Seconds since the epoch from 2001 to 2065: as milliseconds they would be in January and February 1970.
    if 1_000_000_000 <= store_timestamp < 3_000_000_000:
        raise ValueError(f"store_timestamp is {store_timestamp}, which looks like seconds: give ms since epoch")
    return 0


cdef inline void load_counters(const unsigned char* base, IndexCounters* c) noexcept nogil:
    c.count = index_count_of(base)
    c.begin_timestamp = load_i64(base + INDEX_BEGIN_TIMESTAMP)
    c.hash_slot_count = load_i32(base + INDEX_HASH_SLOT_COUNT)


cdef inline void index_put_at(unsigned char* base, int64_t slot_num, int64_t slot, IndexCounters* c, int32_t key_hash,
                              int64_t phy_offset, int64_t store_timestamp) noexcept nogil:
    # One entry, for which there is room.  Crash safety and readers depend on the order of the stores (I6): a slot that is
    # ahead of the count for longer than this entry would hide its whole chain from readers.
    check(0 <= slot < slot_num and key_hash >= 0)
    cdef unsigned char* slot_at = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot
    cdef unsigned char* entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot_num + ENTRY_SIZE * c.count
    cdef int32_t prev = load_i32(slot_at)
    cdef int64_t diff = 0
    if prev <= 0 or prev > c.count:
        prev = 0
    if c.begin_timestamp > 0:
        # Java's subtraction wraps; the difference is against the begin time before this put.
        diff = <int64_t>(<uint64_t>store_timestamp - <uint64_t>c.begin_timestamp) // 1000
        if diff > 0x7FFFFFFF:
            diff = 0x7FFFFFFF
        elif diff < 0:
            diff = 0
    put_i32(entry + ENTRY_KEY_HASH, key_hash)
    put_i64(entry + ENTRY_PHY_OFFSET, phy_offset)
    put_i32(entry + ENTRY_TIME_DIFF, <int32_t>diff)
    put_i32(entry + ENTRY_PREV_INDEX, prev)
    publish_i32(slot_at, <int32_t>c.count)
    if c.count <= 1:
        publish_i64(base + INDEX_BEGIN_PHY_OFFSET, phy_offset)
        store_i64(base + INDEX_BEGIN_TIMESTAMP, store_timestamp)
        c.begin_timestamp = store_timestamp
    c.count += 1
    publish_i32(base + INDEX_COUNT, <int32_t>c.count)
    # After the count: one too few is seen by `relink`, one too many looks like a file of 4.7.0.
    c.hash_slot_count += prev == 0
    publish_i32(base + INDEX_HASH_SLOT_COUNT, c.hash_slot_count)
    publish_i64(base + INDEX_END_PHY_OFFSET, phy_offset)
    publish_i64(base + INDEX_END_TIMESTAMP, store_timestamp)


cdef inline bint index_put(unsigned char* base, uint64_t magic, int64_t slot_num, int64_t index_num, int32_t key_hash,
                           int64_t phy_offset, int64_t store_timestamp) noexcept nogil:
    cdef IndexCounters c
    load_counters(base, &c)
    if c.count >= index_num:
        return False
    index_put_at(base, slot_num, fastmod(<uint32_t>key_hash, magic, <uint32_t>slot_num), &c, key_hash, phy_offset,
                 store_timestamp)
    return True


cdef int64_t index_put_many(unsigned char* base, uint64_t magic, int64_t slot_num, int64_t index_num,
                            const int32_t* hashes, const int64_t* phy_offsets, const int64_t* store_timestamps,
                            int64_t n) noexcept nogil:
    # The slots of a key some steps ahead are asked for early: a slot is a cache miss, everything else is sequential.
    cdef uint32_t[PUT_AHEAD] slots
    cdef int64_t i, room
    cdef uint32_t slot
    cdef IndexCounters c
    load_counters(base, &c)
    room = index_num - c.count if c.count < index_num else 0
    if n > room:
        n = room
    for i in range(n if n < PUT_AHEAD else PUT_AHEAD):
        slots[i] = fastmod(<uint32_t>hashes[i], magic, <uint32_t>slot_num)
        prefetch(base + INDEX_HEADER_SIZE + SLOT_SIZE * <int64_t>slots[i])
    for i in range(n):
        slot = slots[i % PUT_AHEAD]
        if i + PUT_AHEAD < n:
            slots[i % PUT_AHEAD] = fastmod(<uint32_t>hashes[i + PUT_AHEAD], magic, <uint32_t>slot_num)
            prefetch(base + INDEX_HEADER_SIZE + SLOT_SIZE * <int64_t>slots[i % PUT_AHEAD])
        index_put_at(base, slot_num, slot, &c, hashes[i], phy_offsets[i], store_timestamps[i])
    return n


cdef int64_t index_select(const unsigned char* base, int64_t slot_num, int64_t* index, int32_t key_hash,
                          int64_t begin, int64_t end, int64_t* out, int64_t room) noexcept nogil:
    # RocketMQ's walk (5.5.0 IndexFile.selectPhyOffset) from entry *index, at most `room` hits; *index is left at the
    # entry to continue with, 0 at the end.  Chains must strictly decrease; Java would loop forever.
    cdef int64_t n = index[0], found = 0, prev, time, begin_timestamp = load_i64(base + INDEX_BEGIN_TIMESTAMP)
    cdef int32_t diff
    cdef const unsigned char* entry
    while n > 0 and found < room:
        entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot_num + ENTRY_SIZE * n
        diff = get_i32(entry + ENTRY_TIME_DIFF)
        if diff < 0:
            n = 0
            break
        time = <int64_t>(<uint64_t>begin_timestamp + <uint64_t>(<int64_t>diff * 1000))
        if get_i32(entry + ENTRY_KEY_HASH) == key_hash and begin <= time <= end:
            out[found] = get_i64(entry + ENTRY_PHY_OFFSET)
            found += 1
        prev = get_i32(entry + ENTRY_PREV_INDEX)
        n = 0 if prev <= 0 or prev >= n or time < begin else prev
    index[0] = n
    return found


cdef enum:
    SELECT_LANES = 128
    SELECT_HITS = 8192  # of one block together


cdef int64_t index_select_block(const unsigned char* base, uint64_t magic, int64_t slot_num, int64_t index_num,
                                const int32_t* hashes, int64_t num, int64_t max_num, int64_t begin, int64_t end,
                                int64_t* hits, int32_t* lanes, int64_t* nums) noexcept nogil:
    # `index_select` for up to SELECT_LANES keys side by side, a step of every chain in turn, so that the misses of
    # different chains overlap.  The hits come in the order in which they are met, each with the lane of its key; nums[i]
    # counts those of lane i.  Returns how many, or -1 when there are more than SELECT_HITS.
    cdef int32_t[SELECT_LANES] at, active
    cdef int64_t i, k, active_num = 0, kept, found = 0, head, prev, time, begin_timestamp
    cdef const unsigned char* slots = base + INDEX_HEADER_SIZE
    cdef const unsigned char* entries = slots + SLOT_SIZE * slot_num
    cdef const unsigned char* entry
    cdef int32_t diff
    for i in range(num):
        at[i] = <int32_t>fastmod(<uint32_t>hashes[i], magic, <uint32_t>slot_num)
        prefetch(slots + SLOT_SIZE * <int64_t>at[i])
        nums[i] = 0
    for i in range(num):
        head = index_head(base, magic, slot_num, index_num, hashes[i])
        if head > 0 and max_num > 0:
            at[i] = <int32_t>head
            ask_for_entry(entries + ENTRY_SIZE * head)
            active[active_num] = <int32_t>i
            active_num += 1
    begin_timestamp = load_i64(base + INDEX_BEGIN_TIMESTAMP)
    while active_num:
        kept = 0
        for k in range(active_num):
            i = active[k]
            entry = entries + ENTRY_SIZE * <int64_t>at[i]
            diff = get_i32(entry + ENTRY_TIME_DIFF)
            if diff < 0:
                continue
            time = <int64_t>(<uint64_t>begin_timestamp + <uint64_t>(<int64_t>diff * 1000))
            if get_i32(entry + ENTRY_KEY_HASH) == hashes[i] and begin <= time <= end:
                if found == SELECT_HITS:
                    return -1
                hits[found] = get_i64(entry + ENTRY_PHY_OFFSET)
                lanes[found] = <int32_t>i
                found += 1
                nums[i] += 1
            prev = get_i32(entry + ENTRY_PREV_INDEX)
            if prev <= 0 or prev >= at[i] or time < begin or nums[i] >= max_num:
                continue
            at[i] = <int32_t>prev
            ask_for_entry(entries + ENTRY_SIZE * prev)
            active[kept] = <int32_t>i
            kept += 1
        active_num = kept
    return found


cdef int64_t place_hits(const int64_t* hits, const int32_t* lanes, int64_t found, int64_t num, int64_t used,
                        int64_t* out, int64_t* nums) noexcept nogil:
    # Puts the hits of a block after out[used - 1], lane by lane, each lane's in the order in which they were met; nums
    # become the ends of the lanes.  Returns the end of the last.
    cdef int64_t i, n
    cdef int64_t[SELECT_LANES] next
    for i in range(num):
        next[i] = used
        used += nums[i]
        nums[i] = used
    for i in range(found):
        out[next[lanes[i]]] = hits[i]
        next[lanes[i]] += 1
    return used


cdef struct EntryTimes:
    # The store times that are asked for, and the begin time of the index file.
    int64_t first, begin, end


cdef EntryTimes entry_times(const unsigned char* base, int64_t begin, int64_t end) noexcept nogil:
    cdef EntryTimes times
    # The header gets its begin time before the first entry is counted.
    cdef bint has_first = index_count_of(base) > 1
    times.first, times.begin, times.end = load_i64(base + INDEX_BEGIN_TIMESTAMP), begin, end
    # Sums with a damaged time must not overflow.
    if not has_first or not 0 < times.first < INT64_MAX // 2:
        times.begin, times.end = INT64_MIN, INT64_MAX
    return times


cdef inline bint may_be_in(EntryTimes* times, const unsigned char* entry, int64_t n, bint* damaged) noexcept nogil:
    # False where the record of entry `n` was not stored in these times.  Entries have whole seconds after the begin time of their
    # file: 0 for all earlier times too, the greatest number for all later ones; entry 1 counts from the file before.
    cdef int64_t diff, time
    if times.begin == INT64_MIN and times.end == INT64_MAX:
        return True
    diff = get_i32(entry + ENTRY_TIME_DIFF)
    if diff < 0:
        damaged[0] = True
    if diff < 0 or n == 1:
        return True
    time = times.first + diff * 1000
    return (diff == 0 or time <= times.end) and (diff == 0x7FFFFFFF or time + 999 >= times.begin)


cdef int64_t index_chain(const unsigned char* base, uint64_t magic, int64_t slot_num, int64_t* index, int32_t key_hash,
                         EntryTimes* times, int64_t* out, int64_t room, bint* damaged) noexcept nogil:
    # Every entry of the chain with this hash that may be of these times.
    cdef int64_t n = index[0], found = 0
    cdef const unsigned char* entry
    while n > 0 and found < room:
        entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot_num + ENTRY_SIZE * n
        if get_i32(entry + ENTRY_KEY_HASH) == key_hash and may_be_in(times, entry, n, damaged):
            out[found] = get_i64(entry + ENTRY_PHY_OFFSET)
            damaged[0] |= out[found] < 0
            found += 1
        n = entry_before(entry, n, key_hash, magic, slot_num, damaged)
    index[0] = n
    return found


cdef enum:
    SELECT_ROUND = 128
    KEY_CHUNK = 131072
    WALKS = 32


cdef list arrow_or_list_chunks(object keys):
    # The parts of a key column: lists stay lists, Arrow arrays stay Arrow arrays (a chunked one gives its chunks).
    if isinstance(keys, (list, tuple)):
        return [keys if type(keys) is list else list(keys)]
    if hasattr(keys, "chunks") and hasattr(keys, "type"):
        return keys.chunks
    if hasattr(keys, "buffers") and hasattr(keys, "type"):
        return [keys]
    if isinstance(keys, np.ndarray):
        if keys.dtype.kind not in "OUT":
            raise TypeError(f"keys must be text, not an array of {keys.dtype}")
        return [keys.tolist()]
    return [list(keys)]


cdef object not_text(Py_ssize_t row, object key):
    return TypeError(f"key {row} is {type(key).__name__}, not str")


cdef object hash_keys(object part, Py_ssize_t start, Py_ssize_t n, object room=None):
    # The index hashes (int32) of `n` keys, beginning with number `start`, written to `room` if given; list items are hashed
    # under the GIL, Arrow text without it.
    cdef Py_ssize_t i
    cdef int32_t[::1] out
    cdef const uint8_t[::1] data
    cdef const int32_t[::1] offsets
    cdef const int64_t[::1] large_offsets
    cdef int64_t first
    cdef object array, buffers
    cdef PyObject* item
    array = np.empty(n, np.int32) if room is None else room[:n]
    if n == 0:
        return array
    out = array
    if type(part) is list:
        # Without a GIL another thread may change the list, whose items are borrowed.
        with cython.critical_section(part):
            if start + n > PyList_GET_SIZE(part):
                raise ValueError("the list of keys became shorter during the call")
            for i in range(n):
                if i + 16 < n:
                    prefetch(<char*>PyList_GET_ITEM(part, start + i + 16))
                item = <PyObject*>PyList_GET_ITEM(part, start + i)
                if not PyUnicode_Check(item):
                    raise not_text(start + i, <object>item)
                out[i] = index_hash(hash_text(0, item))
        return array
    kind = str(part.type)
    if kind not in ("string", "large_string"):
        raise TypeError(f"keys must be an Arrow string or large_string array, not {kind}")
    if part.null_count:
        raise ValueError("keys must not be null")
    buffers = part.buffers()
    first = part.offset + start
    data = np.frombuffer(buffers[2], np.uint8) if buffers[2] is not None and buffers[2].size else np.zeros(1, np.uint8)
    if kind == "string":
        offsets = np.frombuffer(buffers[1], np.int32)[first:first + n + 1]
        with nogil:
            for i in range(n):
                out[i] = index_hash(hash_utf8(0, &data[0] + offsets[i], offsets[i + 1] - offsets[i]))
    else:
        large_offsets = np.frombuffer(buffers[1], np.int64)[first:first + n + 1]
        with nogil:
            for i in range(n):
                out[i] = index_hash(hash_utf8(0, &data[0] + large_offsets[i], large_offsets[i + 1] - large_offsets[i]))
    return array


cdef object int64_column(object values, str name):
    array = np.asarray(values)
    if array.dtype != np.int64:
        if array.dtype.kind not in "iu" and not (array.size == 0):
            raise TypeError(f"{name} must be integers, not {array.dtype}")
        if array.dtype.kind == "u" and array.size and int(array.max()) > INT64_MAX:
            raise OverflowError(f"{name} does not fit 64 signed bits")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {array.ndim}")
    return np.ascontiguousarray(array, dtype=np.int64)


@cython.no_gc_clear  # A finalizer may still call it while a cycle is collected.
cdef class IndexRegion:
    """The bytes of one index file: header, slots, entries; `rmqstore.IndexFile` is this with a path.

    Attributes
    ----------
    slot_num, index_num : int
        Hash slots and entry places; entry 0 is never used, so ``index_num - 1`` entries fit.
    region : Region
        The mapping; its length is ``40 + 4 * slot_num + 20 * index_num``.
    damaged : bool
        An exact search met what cannot be: it has to be repeated in the log.
    is_distrusted : bool
        `damaged` was noted: exact searches go on without it.
    """

    def __cinit__(self, *args, **kwargs):
        self.region = Region.__new__(Region)
        self.slot_num = self.index_num = 1
        self.magic = 0

    def attach(self, Region region not None, int64_t slot_num, int64_t index_num):
        """Work on `region`, once; the geometry must fit its length exactly (ValueError otherwise)."""
        if self.magic:
            raise ValueError("this index works on a region already")
        if not 1 <= slot_num <= 0x7FFFFFFF or not 1 <= index_num <= 0x7FFFFFFF:
            raise ValueError(f"{slot_num} slots and {index_num} entries: both must be 1 to 2147483647")
        if INDEX_HEADER_SIZE + SLOT_SIZE * slot_num + ENTRY_SIZE * index_num != region.size:
            raise ValueError(f"{slot_num} slots and {index_num} entries do not make {region.size} bytes")
        self.region = region
        self.slot_num = slot_num
        self.index_num = index_num
        self.magic = mod_magic(<uint32_t>slot_num)

    cdef bint put_one(self, int32_t key_hash, int64_t phy_offset, int64_t store_timestamp) except -1:
        cdef Region region = self.region
        cdef unsigned char* base = region.pin_writable(0, region.size)
        cdef bint taken
        if HAS_GIL and self.long_puts == 0:
            taken = index_put(base, self.magic, self.slot_num, self.index_num, key_hash, phy_offset, store_timestamp)
        else:
            with self.mutex:
                taken = index_put(base, self.magic, self.slot_num, self.index_num, key_hash, phy_offset, store_timestamp)
        region.unpin()
        return taken

    def put_key(self, str key not None, int64_t phy_offset, int64_t store_timestamp):
        """Put one entry as RocketMQ's ``IndexFile.putKey`` (5.5.0) does.

        Parameters
        ----------
        key : str
            The whole key, ``topic#key``.
        phy_offset : int
            Absolute byte offset of the record in the commit log, not negative.
        store_timestamp : int
            ms since epoch.

        Returns
        -------
        bool
            False when the file is full; nothing was written then.

        Raises
        ------
        ValueError
            `store_timestamp` looks like seconds (2001 to 2065).
        """
        if phy_offset < 0:
            raise OffsetOutOfRangeError(f"phy_offset {phy_offset} is negative")
        refuse_seconds(store_timestamp)
        return self.put_one(index_hash(hash_str(0, key)), phy_offset, store_timestamp)

    def put_hash(self, int32_t key_hash, int64_t phy_offset, int64_t store_timestamp):
        """Put a key like `put_key`, by its index hash (not negative)."""
        if phy_offset < 0 or key_hash < 0:
            raise OffsetOutOfRangeError(f"phy_offset {phy_offset} or key hash {key_hash} is negative")
        return self.put_one(key_hash, phy_offset, store_timestamp)

    def put_keys(self, keys, phy_offsets, store_timestamps):
        """Put many entries in order; equal to `put_key` row by row.

        Parameters
        ----------
        keys : list of str, or Arrow string array
            Whole keys, ``topic#key``; shape (n,).
        phy_offsets, store_timestamps : array_like of int64, shape (n,)
            Absolute byte offsets, not negative, and store times in ms since epoch.  Like in `put_key` the first and the last
            must not look like seconds.

        Returns
        -------
        int
            How many were taken, less than n only when the file became full.
        """
        phy = int64_column(phy_offsets, "phy_offsets")
        time = int64_column(store_timestamps, "store_timestamps")
        parts = arrow_or_list_chunks(keys)
        cdef int64_t total = sum([len(part) for part in parts]), done = 0, n, start
        if time.shape[0]:
            refuse_seconds(time[0])
            refuse_seconds(time[time.shape[0] - 1])
        room = np.empty(total if total < KEY_CHUNK else KEY_CHUNK, np.int32)
        if phy.shape[0] != total or time.shape[0] != total:
            raise ValueError(f"{total} keys, {phy.shape[0]} phy_offsets and {time.shape[0]} store_timestamps")
        for part in parts:
            start = 0
            while start < len(part):
                n = len(part) - start if len(part) - start < KEY_CHUNK else KEY_CHUNK
                taken = self.put_hashes(hash_keys(part, start, n, room), phy[done:done + n], time[done:done + n])
                done += taken
                if taken < n:
                    return done
                start += n
        return done

    def put_hashes(self, const int32_t[::1] hashes not None, const int64_t[::1] phy_offsets not None,
                   const int64_t[::1] store_timestamps not None):
        """int: as `put_keys` with index hashes (int32, not negative) instead of texts; the GIL is released for many."""
        cdef int64_t n = hashes.shape[0], i, taken, bad = -1
        if phy_offsets.shape[0] != n or store_timestamps.shape[0] != n:
            raise ValueError(f"{n} hashes, {phy_offsets.shape[0]} phy_offsets, {store_timestamps.shape[0]} timestamps")
        if n == 0:
            return 0
        cdef Region region = self.region
        cdef unsigned char* base = region.pin_writable(0, region.size)
        try:
            for i in range(n):
                if phy_offsets[i] < 0 or hashes[i] < 0:
                    bad = i
                    break
            if bad >= 0:
                raise OffsetOutOfRangeError(f"row {bad}: phy_offset {phy_offsets[bad]} or key hash is negative")
            if HAS_GIL and self.long_puts == 0 and n * PUT_COST < WORTH_WAITING:
                return index_put_many(base, self.magic, self.slot_num, self.index_num, &hashes[0], &phy_offsets[0],
                                      &store_timestamps[0], n)
            self.long_puts += 1
            with nogil, self.mutex:
                taken = index_put_many(base, self.magic, self.slot_num, self.index_num, &hashes[0], &phy_offsets[0],
                                       &store_timestamps[0], n)
            self.long_puts -= 1
            return taken
        finally:
            region.unpin()

    def select_phy_offset(self, str key not None, int64_t max_num=64, int64_t begin=0, int64_t end=INT64_MAX):
        """Answer as RocketMQ's ``IndexFile.selectPhyOffset`` (5.5.0), quirks included.

        Times are compared by whole seconds after the file's begin time, other keys with the same hash are returned as well, and the
        walk stops at the first entry older than `begin`.

        Parameters
        ----------
        key : str
            The whole key, ``topic#key``.
        max_num : int
            The greatest number of offsets.
        begin, end : int
            Store time range, ms since epoch, inclusive.

        Returns
        -------
        list of int
            phy offsets, newest entry first.
        """
        return self.select_one(index_hash(hash_str(0, key)), max_num, begin, end)

    def select_hash(self, int32_t key_hash, int64_t max_num=64, int64_t begin=0, int64_t end=INT64_MAX):
        """Select like `select_phy_offset`, by the index hash."""
        return self.select_one(key_hash, max_num, begin, end)

    cdef list select_one(self, int32_t key_hash, int64_t max_num, int64_t begin, int64_t end):
        cdef int64_t[SELECT_ROUND] out
        cdef int64_t index, found, i, room
        cdef list hits = []
        cdef Region region = self.region
        cdef unsigned char* base = region.pin(0, region.size)
        try:
            if key_hash < 0:
                return hits
            index = index_head(base, self.magic, self.slot_num, self.index_num, key_hash)
            while index > 0 and max_num > 0:
                room = SELECT_ROUND if max_num > SELECT_ROUND else max_num
                found = index_select(base, self.slot_num, &index, key_hash, begin, end, out, room)
                for i in range(found):
                    hits.append(out[i])
                max_num -= found
            return hits
        finally:
            region.unpin()

    def select_phy_offsets(self, keys, int64_t max_num=64, int64_t begin=0, int64_t end=INT64_MAX):
        """Many keys at once, each answered as by `select_phy_offset`; the GIL is released.

        Returns
        -------
        offsets : numpy.ndarray of int64
            The phy offsets of all keys, one key after the other.
        row_offsets : numpy.ndarray of int64, shape (len(keys) + 1,)
            The hits of key i are ``offsets[row_offsets[i]:row_offsets[i + 1]]``.
        """
        hashes_array = [hash_keys(part, 0, len(part)) for part in arrow_or_list_chunks(keys)]
        return self.select_hashes(np.concatenate(hashes_array) if hashes_array else np.empty(0, np.int32), max_num, begin,
                                  end)

    def select_hashes(self, const int32_t[::1] hashes not None, int64_t max_num=64, int64_t begin=0,
                      int64_t end=INT64_MAX):
        """As `select_phy_offsets` with index hashes (int32; a negative one has no hits) instead of texts."""
        cdef int64_t n = hashes.shape[0], i = 0, used = 0, found, num, index, left, room, capacity
        cdef bint one_by_one = False
        row_array = np.zeros(n + 1, np.int64)
        out_array = np.empty(max(n * 2, 1024), np.int64)
        hit_array = np.empty(SELECT_HITS, np.int64)
        lane_array = np.empty(SELECT_HITS, np.int32)
        cdef int64_t[::1] rows = row_array
        cdef int64_t[::1] out = out_array
        cdef int64_t[::1] hits = hit_array
        cdef int32_t[::1] lanes = lane_array
        cdef Region region = self.region
        cdef unsigned char* base = region.pin(0, region.size)
        try:
            capacity = out.shape[0]
            index, left = -1, max_num
            while i < n:
                with nogil:
                    while i < n:
                        if not one_by_one:
                            num = n - i if n - i < SELECT_LANES else SELECT_LANES
                            found = index_select_block(base, self.magic, self.slot_num, self.index_num, &hashes[i], num,
                                                       max_num, begin, end, &hits[0], &lanes[0], &rows[i + 1])
                            if found > capacity - used:
                                break  # the answer array is full; the block is walked again
                            if found >= 0:
                                used = place_hits(&hits[0], &lanes[0], found, num, used, &out[0], &rows[i + 1])
                                i += num
                                continue
                            one_by_one = True
                        # More hits than a block has room for: this key is walked alone, as far as the answer has room.
                        if index < 0:
                            index = index_head(base, self.magic, self.slot_num, self.index_num, hashes[i])
                            left = max_num
                        room = capacity - used if capacity - used < left else left
                        if index > 0 and room > 0:
                            found = index_select(base, self.slot_num, &index, hashes[i], begin, end, &out[used], room)
                            used += found
                            left -= found
                        if index > 0 and left > 0:
                            break  # the answer array is full
                        rows[i + 1] = used
                        i += 1
                        index = -1
                        one_by_one = i % SELECT_LANES != 0
                if i < n:
                    out_array = np.concatenate([out_array, np.empty(capacity, np.int64)])
                    out = out_array
                    capacity = out.shape[0]
            return out_array[:used].copy(), row_array
        finally:
            region.unpin()

    def select_chain(self, int32_t key_hash, int64_t index=-1, int64_t max_num=SELECT_ROUND, int64_t begin=INT64_MIN,
                     int64_t end=INT64_MAX):
        """Read the entries with this hash a page at a time.

        Parameters
        ----------
        key_hash : int
            Index hash, not negative.
        index : int
            Entry number to go on with; -1 starts at the newest.
        max_num : int
            The greatest number of entries, 128 at the most.
        begin, end : int
            Skip entries whose records were not stored in this time range, ms since epoch, inclusive.  Entries have whole seconds:
            some that are returned are up to a second outside.

        Returns
        -------
        (list of int, int)
            phy offsets, newest entry first, and the entry number to go on with; 0 at the end of the chain.
        """
        cdef int64_t[SELECT_ROUND] out
        cdef int64_t found, i
        cdef bint damaged = False, asked = False
        cdef const unsigned char* entry
        cdef EntryTimes times
        cdef Region region = self.region
        if max_num < 1 or max_num > SELECT_ROUND:
            max_num = SELECT_ROUND
        cdef unsigned char* base = region.pin(0, region.size)
        try:
            if key_hash < 0:
                return [], 0
            if index < 0:
                index = index_head(base, self.magic, self.slot_num, self.index_num, key_hash)
                if index < 0:
                    index, damaged = 0, True
            elif index >= self.index_num:
                raise OffsetOutOfRangeError(f"entry {index} of {self.index_num}")
            else:
                entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * index
                # A caller's number may be that of no entry of this chain, which says nothing about the file.
                entry_before(entry, index, key_hash, self.magic, self.slot_num, &asked)
            times = entry_times(base, begin, end)
            found = index_chain(base, self.magic, self.slot_num, &index, key_hash, &times, out, max_num, &damaged)
            self.damaged |= damaged and not asked
            return [out[i] for i in range(found)], index
        finally:
            region.unpin()

    def read_header(self):
        """Read (begin_timestamp, end_timestamp, begin_phy_offset, end_phy_offset, hash_slot_count, index_count).

        The count is the stored one; readers take values below 1 as 1 (an empty file).
        """
        cdef Region region = self.region
        cdef unsigned char* p = region.pin(0, INDEX_HEADER_SIZE)
        try:
            return (load_i64(p), load_i64(p + INDEX_END_TIMESTAMP), load_i64(p + INDEX_BEGIN_PHY_OFFSET),
                    load_i64(p + INDEX_END_PHY_OFFSET), load_i32(p + INDEX_HASH_SLOT_COUNT), load_i32(p + INDEX_COUNT))
        finally:
            region.unpin()

    @property
    def is_full(self):
        """Return True if no further entry fits."""
        cdef Region region = self.region
        cdef unsigned char* p = region.pin(0, INDEX_HEADER_SIZE)
        cdef int32_t count = load_i32(p + INDEX_COUNT)
        region.unpin()
        return (count if count > 1 else 1) >= self.index_num

    def write_header(self, int64_t begin_timestamp, int64_t end_timestamp, int64_t begin_phy_offset,
                     int64_t end_phy_offset, int32_t hash_slot_count, int32_t index_count):
        """Write the six header fields, the count last."""
        cdef Region region = self.region
        cdef unsigned char* p = region.pin_writable(0, INDEX_HEADER_SIZE)
        try:
            store_i64(p + INDEX_BEGIN_TIMESTAMP, begin_timestamp)
            store_i64(p + INDEX_END_TIMESTAMP, end_timestamp)
            store_i64(p + INDEX_BEGIN_PHY_OFFSET, begin_phy_offset)
            store_i64(p + INDEX_END_PHY_OFFSET, end_phy_offset)
            store_i32(p + INDEX_HASH_SLOT_COUNT, hash_slot_count)
            publish_i32(p + INDEX_COUNT, index_count)
        finally:
            region.unpin()

    def read_slot(self, int64_t slot):
        """Read the entry number in hash slot `slot`, as stored."""
        if not 0 <= slot < self.slot_num:
            raise OffsetOutOfRangeError(f"slot {slot} of {self.slot_num}")
        cdef Region region = self.region
        cdef int32_t head = load_i32(region.pin(INDEX_HEADER_SIZE + SLOT_SIZE * slot, SLOT_SIZE))
        region.unpin()
        return head

    def entry_pos(self, int64_t index):
        """Return the position in the file of entry `index`."""
        return INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * index

    def read_entry(self, int64_t index):
        """Read (key_hash, phy_offset, time_diff in seconds, previous entry number) of entry `index`, as stored."""
        if not 0 <= index < self.index_num:
            raise OffsetOutOfRangeError(f"entry {index} of {self.index_num}")
        cdef Region region = self.region
        cdef unsigned char* p = region.pin(self.entry_pos(index), ENTRY_SIZE)
        try:
            return (get_i32(p), get_i64(p + ENTRY_PHY_OFFSET), get_i32(p + ENTRY_TIME_DIFF),
                    get_i32(p + ENTRY_PREV_INDEX))
        finally:
            region.unpin()

    def read_entries(self, int64_t index, int64_t count):
        """Read up to `count` entries, beginning with `index`: key hashes (int32), phy offsets (int64), time differences (int32, s)."""
        if index < 0 or count < 0:
            raise OffsetOutOfRangeError(f"{count} entries from {index}")
        cdef int64_t n = 0 if index >= self.index_num else self.index_num - index, i
        if n > count:
            n = count
        if self.region.closed:
            raise StoreClosedError("the mapping is closed; open the store or file again")
        hash_array, phy_array, diff_array = np.empty(n, np.int32), np.empty(n, np.int64), np.empty(n, np.int32)
        cdef int32_t[::1] hashes = hash_array
        cdef int64_t[::1] phy = phy_array
        cdef int32_t[::1] diffs = diff_array
        cdef Region region = self.region
        cdef unsigned char* p = region.pin(self.entry_pos(index if n else 0), ENTRY_SIZE * n)
        try:
            with nogil:
                for i in range(n):
                    hashes[i] = get_i32(p + ENTRY_SIZE * i)
                    phy[i] = get_i64(p + ENTRY_SIZE * i + ENTRY_PHY_OFFSET)
                    diffs[i] = get_i32(p + ENTRY_SIZE * i + ENTRY_TIME_DIFF)
            return hash_array, phy_array, diff_array
        finally:
            region.unpin()

    def survey(self, int64_t end_phy_offset=INT64_MAX, int64_t begin_phy_offset=0):
        """Judge entries, chains and slots as a crash may have left them; nothing is changed.

        Parameters
        ----------
        end_phy_offset, begin_phy_offset : int
            End of the log; last phy offset in the file before.

        Returns
        -------
        count : int
            Entries 1 … count-1 are as a writer leaves them: a hash above 0, a non-negative time, a previous entry below their own
            number, phy offsets that do not fall and lie between the two.  Hash 0 counts as one that never reached the disk: putting
            such a key again makes the same bytes.
        linked : bool
            `relink` has nothing to do.
        """
        cdef int64_t n = 1, ahead = 16, count, phy, last = begin_phy_offset, prev, slot, used = 0, entries
        cdef int32_t key_hash, head
        cdef bint linked = True
        cdef const unsigned char* entry
        heads_array = np.zeros(self.slot_num, np.int32)
        cdef int32_t[::1] heads = heads_array
        cdef Region region = self.region
        cdef unsigned char* base = region.pin(0, region.size)
        entries = INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num
        try:
            with nogil:
                count = index_count_of(base)
                if count > self.index_num:
                    count = self.index_num
                while n < count:
                    entry = base + entries + ENTRY_SIZE * n
                    if n + ahead < count:
                        slot = fastmod(<uint32_t>get_i32(entry + ENTRY_SIZE * ahead), self.magic, <uint32_t>self.slot_num)
                        prefetch(&heads[0] + slot)
                    key_hash = get_i32(entry)
                    phy = get_i64(entry + ENTRY_PHY_OFFSET)
                    prev = get_i32(entry + ENTRY_PREV_INDEX)
                    if (key_hash <= 0 or phy < last or phy >= end_phy_offset or get_i32(entry + ENTRY_TIME_DIFF) < 0
                            or prev < 0 or prev >= n):
                        break
                    slot = fastmod(<uint32_t>key_hash, self.magic, <uint32_t>self.slot_num)
                    head = heads[slot]
                    linked &= prev == head
                    used += head == 0
                    heads[slot] = <int32_t>n
                    last = phy
                    n += 1
                for slot in range(self.slot_num):
                    head = heads[slot]
                    prev = load_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * slot)
                    linked &= prev == head
                linked &= n == index_count_of(base) and load_i32(base + INDEX_HASH_SLOT_COUNT) == used
            return n, linked
        finally:
            region.unpin()

    def relink(self, int64_t count, bint erase=True):
        """Make slots, chains and both counts right for the entries 1 … count-1; erase entry `count` and all later ones.

        Parameters
        ----------
        erase : bool
            False leaves them as they are, as looking at all of them is slow.

        Returns
        -------
        int
            How many 4-byte numbers had to be changed.
        """
        if not 1 <= count <= self.index_num:
            raise OffsetOutOfRangeError(f"count {count} of {self.index_num}")
        cdef int64_t n, ahead = 16, changed = 0, used = 0, slot
        cdef unsigned char* entry
        heads_array = np.zeros(self.slot_num, np.int32)
        cdef int32_t[::1] heads = heads_array
        cdef Region region = self.region
        cdef unsigned char* base = region.pin_writable(0, region.size)
        self.long_puts += 1
        try:
            with nogil, self.mutex:
                for n in range(1, count):
                    entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * n
                    if n + ahead < count:
                        slot = fastmod(<uint32_t>get_i32(entry + ENTRY_SIZE * ahead), self.magic, <uint32_t>self.slot_num)
                        prefetch(&heads[0] + slot)
                    slot = fastmod(<uint32_t>get_i32(entry), self.magic, <uint32_t>self.slot_num)
                    if get_i32(entry + ENTRY_PREV_INDEX) != heads[slot]:
                        put_i32(entry + ENTRY_PREV_INDEX, heads[slot])
                        changed += 1
                    used += heads[slot] == 0
                    heads[slot] = <int32_t>n
                for slot in range(self.slot_num):
                    entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot
                    if load_i32(entry) != heads[slot]:
                        store_i32(entry, heads[slot])
                        changed += 1
                if erase:
                    zero_bytes(base + INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * count,
                               ENTRY_SIZE * (self.index_num - count))
                if load_i32(base + INDEX_COUNT) != count and not (count == 1 and load_i32(base + INDEX_COUNT) == 0):
                    publish_i32(base + INDEX_COUNT, <int32_t>count)
                    changed += 1
                # RocketMQ up to 4.7.0 counted every put here; nobody relies on it.
                if load_i32(base + INDEX_HASH_SLOT_COUNT) != used:
                    store_i32(base + INDEX_HASH_SLOT_COUNT, <int32_t>used)
                    changed += 1
            return changed
        finally:
            self.long_puts -= 1
            region.unpin()

    def tail_num(self, int64_t phy_offset):
        """Count the newest consecutive entries of the record at `phy_offset`."""
        cdef Region region = self.region
        cdef unsigned char* base = region.pin(0, region.size)
        cdef int64_t n, num = 0
        try:
            n = index_count_of(base)
            n = (n if n < self.index_num else self.index_num) - 1
            while n > 0 and get_i64(base + INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * n
                                    + ENTRY_PHY_OFFSET) == phy_offset:
                num += 1
                n -= 1
            return num
        finally:
            region.unpin()

    def check_links(self, int64_t end_phy_offset):
        """List (position, difference) of slots and chains that contradict the entries, at most about 1000."""
        cdef int64_t n, count, stored, slot, prev, more = 0, phy, last = 0, before = 0, odd, entries, used = 0
        cdef int32_t key_hash, diff
        cdef unsigned char* entry
        cdef list found = []
        heads_array = np.zeros(self.slot_num, np.int32)
        cdef int32_t[::1] heads = heads_array
        cdef Region region = self.region
        cdef unsigned char* base = region.pin(0, region.size)
        entries = INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num
        try:
            stored = load_i32(base + INDEX_COUNT)
            if stored < 0 or stored > self.index_num:
                found.append((INDEX_COUNT, f"indexCount {stored} is not within 0 to {self.index_num}"))
            count = index_count_of(base)
            if count > self.index_num:
                count = self.index_num
            with nogil:
                for n in range(1, count):
                    entry = base + entries + ENTRY_SIZE * n
                    if n + PUT_AHEAD < count:
                        key_hash = get_i32(entry + ENTRY_SIZE * PUT_AHEAD) & 0x7FFFFFFF
                        prefetch(&heads[0] + fastmod(<uint32_t>key_hash, self.magic, <uint32_t>self.slot_num))
                    key_hash = get_i32(entry)
                    phy = get_i64(entry + ENTRY_PHY_OFFSET)
                    diff = get_i32(entry + ENTRY_TIME_DIFF)
                    prev = get_i32(entry + ENTRY_PREV_INDEX)
                    slot = fastmod(<uint32_t>(key_hash & 0x7FFFFFFF), self.magic, <uint32_t>self.slot_num)
                    if key_hash < 0 or phy < last or phy >= end_phy_offset or diff < 0 or prev != heads[slot]:
                        if len_gil(found) < 1000:
                            with gil:
                                if key_hash < 0:
                                    found.append((entries + ENTRY_SIZE * n, f"entry {n}: key hash {key_hash} is negative"))
                                if before <= phy < last:
                                    # It goes on from the entry before the last one, which is the one that is too high.
                                    odd = entries + ENTRY_SIZE * (n - 1) + ENTRY_PHY_OFFSET
                                    found.append((odd, f"entry {n - 1}: phy offset {last} does not lie between the one "
                                                       f"before, {before}, and the one after, {phy}"))
                                elif phy < last or phy >= end_phy_offset:
                                    found.append((entries + ENTRY_SIZE * n + ENTRY_PHY_OFFSET,
                                                  f"entry {n}: phy offset {phy} does not lie between the one before, "
                                                  f"{last}, and the end of the log, {end_phy_offset}"))
                                if diff < 0:
                                    found.append((entries + ENTRY_SIZE * n + ENTRY_TIME_DIFF,
                                                  f"entry {n}: time {diff} s is negative"))
                                if prev != heads[slot]:
                                    found.append((entries + ENTRY_SIZE * n + ENTRY_PREV_INDEX,
                                                  f"entry {n}: previous entry is {prev}, the chain of slot {slot} "
                                                  f"needs {heads[slot]}"))
                        else:
                            more += 1
                    if before <= phy < end_phy_offset:
                        if phy >= last:
                            before = last
                        last = phy
                    used += heads[slot] == 0
                    heads[slot] = <int32_t>n
                for slot in range(self.slot_num):
                    if load_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * slot) != heads[slot]:
                        if len_gil(found) < 1000:
                            with gil:
                                found.append((INDEX_HEADER_SIZE + SLOT_SIZE * slot,
                                              f"slot {slot} holds {load_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * slot)}"
                                              f", the entries need {heads[slot]}"))
                        else:
                            more += 1
            stored = load_i32(base + INDEX_HASH_SLOT_COUNT)
            # From 4.7.1 the number of used slots, before that the number of entries.
            if not used <= stored <= count - 1 and not (stored == 0 and used == 0):
                found.append((INDEX_HASH_SLOT_COUNT, f"hashSlotCount is {stored}, {used} slots are used"))
            if more:
                found.append((0, f"and {more} more of the same kinds"))
            return found
        finally:
            region.unpin()


cdef int64_t len_gil(list found) noexcept nogil:
    # Asked only when something is wrong already.
    cdef int64_t n
    with gil:
        n = len(found)
    return n


def chain_entries(IndexRegion index not None, const int32_t[::1] hashes not None, int64_t[::1] cursors not None,
                  int64_t[::1] wanted not None, int64_t number=0, int64_t begin=INT64_MIN, int64_t end=INT64_MAX):
    """Find entries with these index hashes, of each at most as many as are wanted; the GIL is released.

    Parameters
    ----------
    hashes : array of int32
        A negative one has no entries.
    cursors : array of int64, shape (len(hashes),)
        The next entry of each hash: ``number << 32`` of a file plus the entry, 0 for the newest.  They are advanced, at the end
        of a chain to file ``number + 1``; hashes with the cursor of another file are skipped.
    wanted : array of int64, shape (len(hashes),)
        The number of entries, lowered by those that are found; a hash with 0 is skipped.
    number : int
        The number of this file in the cursors.
    begin, end : int
        See `IndexRegion.select_chain`.
    Returns
    -------
    (numpy.ndarray of int32, numpy.ndarray of int64)
        Number of the hash and phy offset of each entry; of one hash the newest entry first.
    """
    cdef Region region = index.region
    cdef int64_t n = hashes.shape[0], capacity = 2 * n + WALKS, used = 0, following = 0, active = 0, i, at, prev, key
    cdef bint damaged = False, outside = False
    cdef EntryTimes times
    cdef int64_t[WALKS] walk_at
    cdef int32_t[WALKS] walk_key
    cdef const unsigned char* entries
    cdef const unsigned char* entry
    cdef uint32_t slot
    if cursors.shape[0] != n or wanted.shape[0] != n:
        raise ValueError(f"{n} hashes, {cursors.shape[0]} cursors and {wanted.shape[0]} numbers of wanted entries")
    number_array, offset_array = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
    cdef int32_t[::1] numbers = number_array
    cdef int64_t[::1] offsets = offset_array
    cdef const unsigned char* base = region.pin(0, region.size)
    try:
        entries = base + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num
        times = entry_times(base, begin, end)
        while following < n or active > 0:
            if used + WALKS > capacity:
                number_array = np.concatenate([number_array, np.empty(capacity, np.int32)])
                offset_array = np.concatenate([offset_array, np.empty(capacity, np.int64)])
                numbers, offsets = number_array, offset_array
                capacity *= 2
            with nogil:
                # Each round takes one step of every walk, whose entry was asked for in the round before.
                while (following < n or active > 0) and used + WALKS <= capacity:
                    while active < WALKS and following < n:
                        if following + WALKS < n and hashes[following + WALKS] >= 0:
                            slot = fastmod(<uint32_t>hashes[following + WALKS], index.magic, <uint32_t>index.slot_num)
                            prefetch(base + INDEX_HEADER_SIZE + SLOT_SIZE * <int64_t>slot)
                        if wanted[following] > 0 and cursors[following] >> 32 == number:
                            at = cursors[following] - (number << 32)
                            if at >= index.index_num:
                                at, outside = 0, True
                            elif at == 0 and hashes[following] >= 0:
                                at = index_head(base, index.magic, index.slot_num, index.index_num, hashes[following])
                                damaged |= at < 0
                            if at > 0:
                                walk_at[active], walk_key[active] = at, <int32_t>following
                                ask_for_entry(entries + ENTRY_SIZE * at)
                                active += 1
                            else:
                                cursors[following] = (number + 1) << 32
                        following += 1
                    i = 0
                    while i < active:
                        at, key = walk_at[i], walk_key[i]
                        entry = entries + ENTRY_SIZE * at
                        if get_i32(entry + ENTRY_KEY_HASH) == hashes[key] and may_be_in(&times, entry, at, &damaged):
                            numbers[used], offsets[used] = <int32_t>key, get_i64(entry + ENTRY_PHY_OFFSET)
                            damaged |= offsets[used] < 0
                            used += 1
                            wanted[key] -= 1
                        prev = entry_before(entry, at, hashes[key], index.magic, index.slot_num, &damaged)
                        if prev == 0 or wanted[key] <= 0:
                            cursors[key] = number << 32 | prev if prev else (number + 1) << 32
                            active -= 1
                            walk_at[i], walk_key[i] = walk_at[active], walk_key[active]
                        else:
                            walk_at[i] = prev
                            ask_for_entry(entries + ENTRY_SIZE * prev)
                            i += 1
        if damaged:
            index.damaged = True
        if outside:
            raise OffsetOutOfRangeError(f"a cursor is at none of {index.index_num} entries")
        return number_array[:used], offset_array[:used]
    finally:
        region.unpin()


# --------------------------------------------------------------------------------------------------------- commit log

def decode_record(Region region not None, int64_t pos, int64_t limit=-1, int check_crc=1):
    """Decode the record at `pos` of a segment.

    Parameters
    ----------
    limit : int
        End of what may be read; -1 = the end of the segment.
    check_crc : int
        0: compare no CRC; 1: the body CRC and, where the record has one, the property CRC; 2: a record without property CRC
        fails as well (RocketMQ's forceVerifyPropCRC).

    Returns
    -------
    tuple or Verdict
        (total_size, version, body_crc, queue_id, flag, queue_offset, phy_offset, sys_flag, born_timestamp, born_host,
        store_timestamp, store_host, reconsume_times, prepared_transaction_offset, body, topic, properties, crc_ok):
        hosts are address bytes and a 4-byte port, body and properties the stored bytes.  The verdict where no whole record is.

    Raises
    ------
    OffsetOutOfRangeError
        `pos` is outside.
    """
    if limit < 0 or limit > region.size:
        limit = region.size
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, difference_of(limit, pos))
    cdef int verdict
    cdef bint ok = True
    try:
        verdict = parse_record(p, limit - pos, &r)
        if verdict == BAD_SIZE and r.magic == C_MAGIC_BLANK and r.total_size == region.size - pos:
            verdict = BLANK
        if verdict != RECORD:
            return Verdict(verdict)
        if check_crc:
            with nogil:
                ok = body_crc_ok(p, &r) and prop_crc_ok(p, &r) and (check_crc < 2 or has_prop_crc(p, &r))
        return (r.total_size, 1 if r.magic == C_MAGIC_V1 else 2, r.body_crc, r.queue_id, r.flag, r.queue_offset,
                r.phy_offset, r.sys_flag, r.born_timestamp,
                PyBytes_FromStringAndSize(<char*>p + RECORD_BORN_HOST, r.born_host_len), r.store_timestamp,
                PyBytes_FromStringAndSize(<char*>p + r.store_host_pos, r.store_host_len), r.reconsume_times,
                r.prepared_transaction_offset, PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len),
                text_of(p + r.topic_pos, r.topic_len),
                PyBytes_FromStringAndSize(<char*>p + r.properties_pos, r.properties_len), ok)
    finally:
        region.unpin()


def check_record(Region region not None, int64_t pos, int64_t base_offset, int check_crc=1):
    """Judge the bytes at `pos` for recovery: Verdict, total size (of a blank as stored), store timestamp or 0.

    The record must also state this place.
    """
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, difference_of(region.size, pos))
    cdef int verdict
    r.total_size = 0
    r.store_timestamp = 0
    try:
        with nogil:
            verdict = judge_record(p, region.size - pos, sum_of(base_offset, pos), check_crc, &r)
        return Verdict(verdict), r.total_size, r.store_timestamp
    finally:
        region.unpin()


cdef enum:
    # Bytes searched between two checks for signals.
    SEARCH_SLICE = 4 * 1024 * 1024
    # Bytes between two kept sums.
    SUM_BLOCK = 4096


cdef class RecordSearch:
    """A search for whole records in one segment at unknown positions.

    Possible headers can be nested, thousands in the body of one record, each with a CRC over nearly all that follows.  The sums
    over their common bytes are kept, so that the time is proportional to the bytes searched.  Make a new object after a write.

    Parameters
    ----------
    base_offset : int
        Absolute offset of the first byte of `region`, a commit-log segment.
    check_crc : int
        See `decode_record`.
    """

    cdef readonly Region region
    cdef int64_t base_offset
    cdef int check_crc
    # The CRC of the bytes from `sums_begin` up to each multiple of SUM_BLOCK after it; `sum_num` of them are known.
    cdef uint32_t[::1] sums
    cdef int64_t sums_begin, sum_num

    def __cinit__(self, Region region not None, int64_t base_offset, int check_crc=1):
        self.region, self.base_offset, self.check_crc = region, base_offset, check_crc
        self.sums = None
        self.sum_num = 0

    def find(self, int64_t pos, int64_t limit=-1):
        """Find the first whole record at or after `pos` (magic, lengths, own offset, CRC): its position, or -1.

        Its magic is before `limit` (-1 = the end of the segment).  Signals are handled every 4 MiB.
        """
        cdef Region region = self.region
        if limit < 0 or limit > region.size:
            limit = region.size
        if 0 <= pos <= region.size and pos + RECORD_MAGIC >= limit and not region.closed:
            return -1
        cdef unsigned char* base = region.pin(0, region.size)
        cdef int64_t at = pos, stop, answer = -1
        try:
            if pos < 0 or pos > region.size:
                raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
            if self.sums is None:
                self.sums = np.empty(region.size // SUM_BLOCK + 1, np.uint32)
            while answer < 0 and at + RECORD_MAGIC < limit:
                stop = at + SEARCH_SLICE if at + SEARCH_SLICE + RECORD_MAGIC < limit else limit - RECORD_MAGIC
                with nogil:
                    answer = self.find_before(base, at, stop)
                at = stop
                PyErr_CheckSignals()
            return answer
        finally:
            region.unpin()

    cdef int64_t find_before(self, const unsigned char* base, int64_t at, int64_t stop) noexcept nogil:
        # The first whole record that begins at or after `at` and before `stop`, or -1.
        cdef const unsigned char* found
        cdef RecordView r
        while at < stop:
            # The magic begins four bytes into the record.
            found = <const unsigned char*>memchr(base + at + RECORD_MAGIC, 0xDA, stop - at)
            if found == NULL:
                return -1
            at = found - base - RECORD_MAGIC
            if (judge_record(base + at, self.region.size - at, sum_of(self.base_offset, at), 0, &r) == RECORD
                    and self.sums_agree(base, at, &r)):
                return at
            at += 1
        return -1

    cdef bint sums_agree(self, const unsigned char* base, int64_t at, RecordView* r) noexcept nogil:
        # What `judge_record` asks of a record whose lengths are whole.
        cdef const unsigned char* p = base + at
        cdef int64_t begin = at + r.body_pos, wanted
        if self.check_crc == 0:
            return True
        if r.total_size <= 2 * SUM_BLOCK:
            if not body_crc_ok(p, r) or not prop_crc_ok(p, r):
                return False
        else:
            if <int32_t>(self.crc_of(base, begin, begin + r.body_len) & 0x7FFFFFFFu) != r.body_crc:
                return False
            if has_prop_crc(p, r):
                wanted = stored_prop_crc(p, r)
                if wanted != <int64_t>(self.crc_of(base, at, at + r.total_size - PROP_CRC_SIZE) & 0x7FFFFFFFu):
                    return False
        return self.check_crc < 2 or has_prop_crc(p, r)

    cdef uint32_t crc_of(self, const unsigned char* base, int64_t begin, int64_t end) noexcept nogil:
        # The CRC of a part from those of what ends where the part begins and where it ends.
        if self.sum_num == 0 or begin < self.sums_begin:
            self.sums_begin, self.sum_num = begin - begin % SUM_BLOCK, 1
            self.sums[0] = 0
        return self.crc_to(base, end) ^ crc32_shifted(self.crc_to(base, begin), end - begin)

    cdef uint32_t crc_to(self, const unsigned char* base, int64_t end) noexcept nogil:
        cdef int64_t block = (end - self.sums_begin) // SUM_BLOCK
        cdef const unsigned char* p = base + self.sums_begin
        while self.sum_num <= block:
            self.sums[self.sum_num] = crc32_update(self.sums[self.sum_num - 1], p + SUM_BLOCK * (self.sum_num - 1), SUM_BLOCK)
            # Not in place, which a debug build's check for None refuses without the GIL.
            self.sum_num = self.sum_num + 1
        return crc32_update(self.sums[block], p + SUM_BLOCK * block, end - self.sums_begin - SUM_BLOCK * block)


def find_record(Region region not None, int64_t pos, int64_t base_offset, int64_t limit=-1, int check_crc=1):
    """Search a segment once, like `RecordSearch.find`."""
    return RecordSearch(region, base_offset, check_crc).find(pos, limit)


def doubtful_entry(list regions not None, const int64_t[::1] base_offsets not None, const int32_t[::1] numbers not None,
                   const int64_t[::1] phy_offsets not None, const int32_t[::1] key_hashes not None, int64_t first=0):
    """Find the first place, from number `first`, whose record cannot have the key hash of its index entry; -1 if all can.

    Places are those of `ArrowColumns.fill_at`; a place in no region is skipped.
    """
    cdef int64_t i, pos, n = phy_offsets.shape[0], found = -1
    cdef const unsigned char* p
    cdef Region region
    cdef RecordView r
    if numbers.shape[0] != n or key_hashes.shape[0] != n or base_offsets.shape[0] != len(regions) or first < 0:
        raise ValueError(f"{n} places, {numbers.shape[0]} numbers, {key_hashes.shape[0]} hashes, {len(regions)} regions")
    for i in range(first, n):
        if not 0 <= numbers[i] < base_offsets.shape[0]:
            continue
        region = <Region?>regions[numbers[i]]
        pos = phy_offsets[i] - base_offsets[numbers[i]]
        p = region.pin(0, region.size)
        if 0 <= pos < region.size and (judge_record(p + pos, region.size - pos, phy_offsets[i], 0, &r) != RECORD
                                       or not has_key_hash(p + pos, &r, key_hashes[i])):
            found = i
        region.unpin()
        if found >= 0:
            return found
    return -1


def write_blank(Region region not None, int64_t pos):
    """Close a segment: write the blank record (the remaining length and its magic) at `pos`; the rest stays as it is."""
    cdef int64_t room = difference_of(region.size, pos)
    if room < BLANK_SIZE and not region.closed:
        raise OffsetOutOfRangeError(f"a blank record needs {BLANK_SIZE} bytes, {room} are left", pos=pos)
    cdef unsigned char* p = region.pin_writable(pos, BLANK_SIZE)
    try:
        publish_i32_at(p + RECORD_MAGIC, C_MAGIC_BLANK)
        publish_i32_at(p, <int32_t>(region.size - pos))
    finally:
        region.unpin()


# ------------------------------------------------------------------------------------------------ messages and streams

cdef class MessageFields:
    """The fields of a message to put; `rmqstore.Message` adds the rules."""



cdef class FileStream:
    """The end of a stream of files, and its file that was used last; `MappedFileQueue` adds the files.

    Threads may share it: one appends and moves `wrote_where`, others read.

    Attributes
    ----------
    wrote_where : int
        Offset after the last byte of the stream.
    file_offsets : list of int
        The begins of the files, ascending; replaced by a new list when a file is removed.
    """

    cdef list files(self):
        with cython.critical_section(self):
            return self.offsets

    @property
    def file_offsets(self):
        return self.files()

    @file_offsets.setter
    def file_offsets(self, list offsets):
        with cython.critical_section(self):
            self.offsets = offsets

    def remember(self, Region region not None, int64_t base, list offsets not None):
        """Note that the file which begins at `base` is mapped as `region`, found while `offsets` were the files."""
        with cython.critical_section(self):
            self.found, self.found_base, self.found_among = region, base, offsets

    cdef Region around(self, int64_t offset, int64_t* base):
        # The mapping that holds `offset`, and its first offset, as long as nothing can have changed since it was found; None
        # says to look again.
        cdef Region found
        with cython.critical_section(self):
            found, base[0] = self.found, self.found_base
            if found is not None and self.found_among is not self.offsets:
                found = None
        if (found is None or atomic_load(&found.state) & CLOSED or not base[0] <= offset < self.wrote_where
                or offset - base[0] >= found.size):
            return None
        return found

    def recent(self, offset not None):
        """Return `CommitLog.region_of` of `offset` if the file that was used last holds it, else None."""
        cdef int64_t base
        cdef Region region = self.around(clamped(offset), &base)
        return None if region is None else (region, base, base, self.wrote_where)


@cython.auto_pickle(False)
cdef class OpenedIndexes:
    """The index files of a store for compiled queries: `opened_files`, newest first, or None while not all are open."""

    cdef object known(self):
        with cython.critical_section(self):
            return self.files

    @property
    def opened_files(self):
        return self.known()

    @opened_files.setter
    def opened_files(self, files):
        with cython.critical_section(self):
            self.files = files


@cython.auto_pickle(False)
cdef class StateFields:
    """The state of a store that compiled calls need; `StoreState` adds the rest."""


# ------------------------------------------------------------------------------------------------------ consume queue

def write_unit(Region region not None, int64_t pos, int64_t phy_offset, int32_t size, int64_t tags_code):
    """Write one 20-byte unit at `pos`."""
    cdef unsigned char* p = region.pin_writable(pos, UNIT_SIZE)
    put_unit(p, phy_offset, size, tags_code)
    region.unpin()


def write_units(Region region not None, int64_t pos, const int64_t[::1] phy_offsets not None,
                const int32_t[::1] sizes not None, const int64_t[::1] tags_codes not None):
    """Write 20-byte units one after the other, beginning at `pos`; the three columns have the same length."""
    cdef int64_t n = phy_offsets.shape[0], i
    if sizes.shape[0] != n or tags_codes.shape[0] != n:
        raise ValueError(f"{n} offsets, {sizes.shape[0]} sizes, {tags_codes.shape[0]} tags codes")
    cdef unsigned char* p = region.pin_writable(pos, UNIT_SIZE * n)
    try:
        for i in range(n):
            put_unit(p + UNIT_SIZE * i, phy_offsets[i], sizes[i], tags_codes[i])
    finally:
        region.unpin()


def read_unit(Region region not None, int64_t pos):
    """Read (phy_offset, size, tags_code) of the unit at `pos`."""
    cdef unsigned char* p = region.pin(pos, UNIT_SIZE)
    cdef int32_t size = acquire_i32_at(p + UNIT_RECORD_SIZE)
    cdef int64_t phy_offset = get_i64(p), tags_code = get_i64(p + UNIT_TAGS_CODE)
    region.unpin()
    return phy_offset, size, tags_code


def read_units(Region region not None, int64_t pos, int64_t count):
    """Read `count` units at `pos`: phy offsets (int64), record sizes (int32), tags codes (int64), shape (count,) each."""
    cdef int64_t i
    cdef int64_t[::1] phy
    cdef int32_t[::1] size
    cdef int64_t[::1] tags
    if count < 0 or count > INT64_MAX // UNIT_SIZE:
        raise OffsetOutOfRangeError(f"{count} units", pos=pos)
    # Check the place before allocating memory.
    cdef unsigned char* p = region.pin(pos, UNIT_SIZE * count)
    try:
        phy_array, size_array, tags_array = np.empty(count, np.int64), np.empty(count, np.int32), np.empty(count, np.int64)
        phy, size, tags = phy_array, size_array, tags_array
        with nogil:
            for i in range(count):
                size[i] = acquire_i32_at(p + UNIT_SIZE * i + UNIT_RECORD_SIZE)
                phy[i] = get_i64(p + UNIT_SIZE * i)
                tags[i] = get_i64(p + UNIT_SIZE * i + UNIT_TAGS_CODE)
        return phy_array, size_array, tags_array
    finally:
        region.unpin()


def nonzero_size(const uint8_t[::1] data not None):
    """Return the length up to and including the last non-zero byte."""
    return nonzero_extent(&data[0], data.shape[0]) if data.shape[0] else 0


cdef inline const uint8_t* after_blanks(const uint8_t* at, const uint8_t* end) noexcept nogil:
    while at < end and (at[0] == b" " or at[0] == b"\t" or at[0] == b"\r" or at[0] == b"\n"):
        at += 1
    return at


cdef int64_t quote_numbers(const uint8_t* at, const uint8_t* end, uint8_t* out) noexcept nogil:
    # A new length; `out` has room for two quotes for each colon.
    cdef uint8_t* start = out
    cdef uint8_t last
    cdef const uint8_t* name
    cdef const uint8_t* digits
    cdef const uint8_t* stop
    cdef const uint8_t* colon
    while at < end:
        last = out[0] = at[0]
        out += 1
        at += 1
        if last != b"{" and last != b",":
            continue
        name = after_blanks(at, end)
        digits = stop = name + (name < end and name[0] == b"-")
        while stop < end and b"0" <= stop[0] <= b"9":
            stop += 1
        colon = after_blanks(stop, end)
        if stop == digits or colon == end or colon[0] != b":":
            continue
        at = colon
        out[0] = b'"'
        memcpy(out + 1, name, stop - name)
        out[stop - name + 1] = b'"'
        out += stop - name + 2
    return out - start


def quoted_numbers(const uint8_t[::1] text not None):
    """Quote whole numbers that are names in JSON: those after a brace or comma.  Strings are not recognized."""
    cdef int64_t colons = 0, size = text.shape[0], i
    for i in range(size):
        colons += text[i] == b":"
    cdef bytes quoted = PyBytes_FromStringAndSize(NULL, size + 2 * colons)
    if size == 0:
        return quoted
    size = quote_numbers(&text[0], &text[0] + size, <uint8_t*>PyBytes_AS_STRING(quoted))
    return quoted[:size]


def unit_ends(const uint8_t[::1] units not None, int64_t far):
    """Return the end of the record of the last of these units, and the greatest end of all, or None.

    A pre-fill unit counts as -1.  None if there are no units, or one was not written: its size is not positive, or its phy
    offset is not from 0 to `far`.
    """
    cdef int64_t n = units.shape[0] // UNIT_SIZE, i, phy_offset, end = -1, furthest = -1
    cdef int32_t size
    cdef const unsigned char* unit
    if n == 0:
        return None
    for i in range(n):
        unit = &units[0] + UNIT_SIZE * i
        phy_offset, size = get_i64(unit), get_i32(unit + UNIT_RECORD_SIZE)
        if size <= 0 or phy_offset < 0 or phy_offset > far:
            return None
        end = -1 if phy_offset == 0 and size == PRE_FILL else phy_offset + size
        furthest = end if end > furthest else furthest
    return end, furthest


def count_units(Region region not None, int64_t unit_size=UNIT_SIZE, int64_t first=0):
    """Count the units written since the start of the file; the first `first` are known to be."""
    if first < 0:
        raise OffsetOutOfRangeError(f"unit {first}")
    if unit_size != UNIT_SIZE and unit_size != BATCH_UNIT_SIZE:
        raise ValueError(f"unit_size {unit_size}; a unit has {UNIT_SIZE} or {BATCH_UNIT_SIZE} bytes")
    cdef unsigned char* p = region.pin(0, region.size)
    cdef int64_t n, room
    try:
        room = region.size // unit_size
        n = first if first < room else room
        with nogil:
            while n < room and acquire_i32_at(p + unit_size * n + UNIT_RECORD_SIZE) > 0 and get_i64(p + unit_size * n) >= 0:
                n += 1
        return n
    finally:
        region.unpin()


# How many units before the one that a search found are looked at: more than a sector of a disk holds.
cdef int64_t UNITS_LOOKED_BACK = 32


cdef inline bint leads_somewhere(const unsigned char* unit, int64_t unit_size) noexcept nogil:
    cdef int32_t size = acquire_i32_at(unit + UNIT_RECORD_SIZE)
    return size > 0 and not (unit_size == UNIT_SIZE and size == PRE_FILL and get_i64(unit) == 0)


def written_unit(Region region not None, int64_t first, int64_t stop, int64_t unit_size=UNIT_SIZE):
    """Find the first unit with a record, going from `first` towards `stop`, which may be below: its number, or -1."""
    if unit_size != UNIT_SIZE and unit_size != BATCH_UNIT_SIZE:
        raise ValueError(f"unit_size {unit_size}; a unit has {UNIT_SIZE} or {BATCH_UNIT_SIZE} bytes")
    if first < 0 or stop < -1 or first >= INT64_MAX // unit_size or stop > INT64_MAX // unit_size:
        raise OffsetOutOfRangeError(f"units {first} to {stop}")
    cdef int64_t step = 1 if stop > first else -1, number = first
    cdef unsigned char* p = region.pin(0, unit_size * (stop if stop > first else first + 1))
    try:
        with nogil:
            while number != stop and not leads_somewhere(p + unit_size * number, unit_size):
                number += step
        return number if number != stop else -1
    finally:
        region.unpin()


def unit_at_or_after(Region region not None, int64_t low, int64_t high, int64_t phy_offset, int64_t unit_size=UNIT_SIZE):
    """Find the first unit in [low, high) whose phy offset is at least `phy_offset`: its number, or `high`.

    Pre-fill units, which may be anywhere in a simple queue, and units without a record are skipped.  The others ascend; a few
    damaged units with smaller offsets do not hide those before them.
    """
    if unit_size != UNIT_SIZE and unit_size != BATCH_UNIT_SIZE:
        raise ValueError(f"unit_size {unit_size}; a unit has {UNIT_SIZE} or {BATCH_UNIT_SIZE} bytes")
    if low < 0 or high < low or high > INT64_MAX // unit_size:
        raise OffsetOutOfRangeError(f"units {low} to {high}")
    cdef unsigned char* p = region.pin(0, unit_size * high)
    cdef int64_t first = low, end = high, middle, at, found = high, looks = UNITS_LOOKED_BACK
    try:
        with nogil:
            while low < high:
                at = middle = low + (high - low) // 2
                while at < high and not leads_somewhere(p + unit_size * at, unit_size):
                    at += 1
                if at < high and get_i64(p + unit_size * at) < phy_offset:
                    low = at + 1
                    continue
                if at < high:
                    found = at
                high = middle
            # Damaged units that lead less far than they should hide those before them from such a search.
            at = low - 2
            while at >= first and looks:
                if leads_somewhere(p + unit_size * at, unit_size):
                    looks -= 1
                    if get_i64(p + unit_size * at) >= phy_offset:
                        found = first
                        while found < end and (not leads_somewhere(p + unit_size * found, unit_size)
                                               or get_i64(p + unit_size * found) < phy_offset):
                            found += 1
                        break
                at -= 1
        return found
    finally:
        region.unpin()


def write_batch_unit(Region region not None, int64_t pos, int64_t phy_offset, int32_t size, int64_t tags_code,
                     int64_t store_timestamp, int64_t base_offset, int16_t batch_num):
    """Write one 46-byte unit of a BatchCQ queue at `pos` (compacted offset -1, reserved 0, as RocketMQ leaves them)."""
    cdef unsigned char* p = region.pin_writable(pos, BATCH_UNIT_SIZE)
    put_i64(p, phy_offset)
    put_i64(p + BATCH_UNIT_TAGS_CODE, tags_code)
    put_i64(p + BATCH_UNIT_STORE_TIMESTAMP, store_timestamp)
    put_i64(p + BATCH_UNIT_BASE_OFFSET, base_offset)
    put_i16(p + BATCH_UNIT_BATCH_NUM, batch_num)
    put_i32(p + BATCH_UNIT_COMPACTED_OFFSET, -1)
    put_i32(p + BATCH_UNIT_RESERVED, 0)
    publish_i32_at(p + BATCH_UNIT_RECORD_SIZE, size)
    region.unpin()


def read_batch_unit(Region region not None, int64_t pos):
    """Read (phy_offset, size, tags_code, store_timestamp, base_offset, batch_num) of the 46-byte unit at `pos`."""
    cdef unsigned char* p = region.pin(pos, BATCH_UNIT_SIZE)
    # First the size, which is published last: a writer may be at this unit.
    cdef int32_t size = acquire_i32_at(p + BATCH_UNIT_RECORD_SIZE)
    try:
        return (get_i64(p), size, get_i64(p + BATCH_UNIT_TAGS_CODE),
                get_i64(p + BATCH_UNIT_STORE_TIMESTAMP), get_i64(p + BATCH_UNIT_BASE_OFFSET),
                get_i16(p + BATCH_UNIT_BATCH_NUM))
    finally:
        region.unpin()


def read_ext_unit(Region region not None, int64_t pos):
    """Read tags code, store timestamp (ms) and bitmap of a unit of a queue extension; None if it is not whole."""
    if (pos < 0 or pos > region.size - EXT_UNIT_MIN_SIZE) and not region.closed:
        return None
    cdef unsigned char* p = region.pin(pos, difference_of(region.size, pos))
    cdef int64_t size = acquire_i16_at(p), bitmap = get_i16(p + EXT_UNIT_BITMAP_LENGTH)
    try:
        if size < EXT_UNIT_MIN_SIZE or size > region.size - pos or bitmap < 0 or EXT_UNIT_MIN_SIZE + bitmap != size:
            return None
        return (get_i64(p + EXT_UNIT_TAGS_CODE), get_i64(p + EXT_UNIT_STORE_TIMESTAMP),
                PyBytes_FromStringAndSize(<char*>p + EXT_UNIT_MIN_SIZE, bitmap))
    finally:
        region.unpin()


def write_ext_unit(Region region not None, int64_t pos, int64_t tags_code, int64_t store_timestamp, bytes bitmap not None=b""):
    """Write a unit of a consume-queue extension file at `pos`; returns its size in bytes."""
    cdef int64_t size = EXT_UNIT_MIN_SIZE + PyBytes_GET_SIZE(bitmap)
    if size > 0x7FFF:
        raise ValueError(f"a bitmap of {len(bitmap)} bytes is too long")
    cdef unsigned char* p = region.pin_writable(pos, size)
    put_i64(p + EXT_UNIT_TAGS_CODE, tags_code)
    put_i64(p + EXT_UNIT_STORE_TIMESTAMP, store_timestamp)
    put_i16(p + EXT_UNIT_BITMAP_LENGTH, <int16_t>PyBytes_GET_SIZE(bitmap))
    memcpy(p + EXT_UNIT_MIN_SIZE, PyBytes_AS_STRING(bitmap), PyBytes_GET_SIZE(bitmap))
    publish_i16_at(p, <int16_t>size)
    region.unpin()
    return size
