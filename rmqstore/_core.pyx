"""The compiled core: the only code that touches RocketMQ bytes in place.

It owns the fence around mapped memory (`Region`), the layout constants, and the leaf functions that hash, frame, encode,
decode and walk.  It knows bytes, not files: no path, no clock, no logging, no policy; it answers with values and
verdicts, and the classes above decide.  Two tiers in every section: leaves that are ``noexcept nogil`` over a pointer
and integers, and uniform ``def`` wrappers that compute the extent, pin, call the leaf and unpin.

Invariants (ARCHITECTURE.md has them in full): a pointer never outlives the function that derived it and only `Region`
stores one (I1); a mapping never changes size or address (I2); one two-sided 64-bit bounds check and one pin per
operation before the first load (I3); every number read from a file is hostile, and index chains must strictly
decrease, so every walk ends (I4); payload, entry, slot and count are published in that order (I6).

Layouts: Apache RocketMQ 5.5.0 (docs/formats.md); every integer in a file is big-endian two's complement.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_Append, PyList_GET_SIZE
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.errno cimport errno
from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy, memset, strcmp

import os
from array import array as stdlib_array

from rmqstore import _numpy as np
from rmqstore.errors import OffsetOutOfRangeError, ReadOnlyError, StoreClosedError

cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, int64_t offset)
    int munmap(void* addr, size_t length)
    int msync(void* addr, size_t length, int flags)
    int madvise(void* addr, size_t length, int advice)
    int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MAP_FIXED, MS_SYNC
    int MADV_SEQUENTIAL, MADV_RANDOM, MADV_NORMAL, MADV_WILLNEED, MADV_DONTNEED
    void* MAP_FAILED

cdef extern from *:
    """
    #include <errno.h>
    /* Linux 5.14; older headers lack the name, older kernels answer EINVAL. */
    #if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
    #define MADV_POPULATE_WRITE 23
    #endif
    /* 1: every page of the range can be written without a fault; 0: the system was asked to read them ahead, or declined. */
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

cdef extern from "<unistd.h>" nogil:
    long sysconf(int name)
    int _SC_PAGESIZE

cdef extern from "Python.h":
    ctypedef struct PyThreadState
    PyThreadState* PyEval_SaveThread()
    void PyEval_RestoreThread(PyThreadState* state)
    # Declared over borrowed pointers, so that hashing a list touches no reference count.
    int PyUnicode_KIND(PyObject* s)
    void* PyUnicode_DATA(PyObject* s)
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject* s)
    bint PyUnicode_Check(PyObject* s)
    bint PyUnicode_IS_ASCII(object s)
    PyObject* PyList_GET_ITEM(object items, Py_ssize_t i)
    PyObject* PyTuple_GET_ITEM(object items, Py_ssize_t i)
    str PyUnicode_DecodeUTF8(const char* s, Py_ssize_t size, const char* errors)
    object PyErr_SetFromErrno(object type)
    bint PyUnicode_IS_COMPACT_ASCII(PyObject* s)
    bint PyUnicode_CheckExact(PyObject* made)
    bint PyBytes_CheckExact(PyObject* made)
    bint PyDict_CheckExact(PyObject* made)
    bint PyLong_CheckExact(PyObject* made)
    str PyUnicode_New(Py_ssize_t size, uint32_t max_char)
    bint PyDict_Next(object mapping, Py_ssize_t* at, PyObject** key, PyObject** value)
    int64_t PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow)
    object PyType_GenericAlloc(type kind, Py_ssize_t num)
    int PyObject_GenericSetAttr(object made, object name, object value) except -1
    void PyObject_GC_Track(object made)
    void PyObject_GC_UnTrack(object made)
    bint PyObject_GC_IsTracked(object made)
    void PyTuple_SET_ITEM(object made, Py_ssize_t i, object value)
    const char* PyUnicode_AsUTF8(object text) except NULL

cdef extern from *:
    """
    /* a mod d for 32-bit a and d by two multiplications (D. Lemire et al., "Faster remainder by direct computation"). */
    static inline uint64_t rmq_mod_magic(uint32_t d) { return UINT64_MAX / d + 1; }
    static inline uint32_t rmq_fastmod(uint32_t a, uint64_t magic, uint32_t d) {
        uint64_t low = magic * a;
        return (uint32_t)(((__uint128_t)low * d) >> 64);
    }
    """
    uint64_t mod_magic "rmq_mod_magic"(uint32_t d) noexcept nogil
    uint32_t fastmod "rmq_fastmod"(uint32_t a, uint64_t magic, uint32_t d) noexcept nogil

cdef extern from *:
    """
    #include <string.h>
    #if defined(__SSE2__) && defined(__x86_64__)
    #include <emmintrin.h>
    #endif

    /* Whether one of n bytes is 1 or 2, which part names, values and pairs of properties, or, if that is asked for, a space.
       Most texts are short: pieces that overlap cover them, and no function of the C library is called. */
    static inline int rmq_has_separator(const unsigned char *p, int64_t n, int space) {
    #if defined(__SSE2__) && defined(__x86_64__)
        const __m128i one = _mm_set1_epi8(1), two = _mm_set1_epi8(2), third = _mm_set1_epi8(space ? 32 : 2);
        __m128i found = _mm_setzero_si128(), v;
        uint64_t first, last;
        uint32_t low, high;
        int64_t i;
    #define RMQ_LOOK(v) \
        (found = _mm_or_si128(_mm_or_si128(found, _mm_cmpeq_epi8(v, one)), _mm_or_si128(_mm_cmpeq_epi8(v, two), _mm_cmpeq_epi8(v, third))))
        if (n >= 16) {
            for (i = 0; i < n - 16; i += 16) {
                v = _mm_loadu_si128((const __m128i *)(p + i));
                RMQ_LOOK(v);
            }
            v = _mm_loadu_si128((const __m128i *)(p + n - 16));
        } else if (n >= 8) {
            memcpy(&first, p, 8);
            memcpy(&last, p + n - 8, 8);
            v = _mm_set_epi64x((long long)last, (long long)first);
        } else if (n >= 4) {
            memcpy(&low, p, 4);
            memcpy(&high, p + n - 4, 4);
            v = _mm_cvtsi64_si128((long long)((uint64_t)high << 32 | low));
        } else {
            v = _mm_cvtsi32_si128(n > 0 ? p[0] << 16 | p[n >> 1] << 8 | p[n - 1] : 0);
        }
        RMQ_LOOK(v);
    #undef RMQ_LOOK
        return _mm_movemask_epi8(found) != 0;
    #else
        return memchr(p, 1, (size_t)n) || memchr(p, 2, (size_t)n) || (space && memchr(p, 32, (size_t)n));
    #endif
    }
    """
    # 0x01 and 0x02 part names, values and pairs.
    bint has_separator "rmq_has_separator"(const unsigned char* p, int64_t n, bint space) noexcept nogil

cdef extern from "_java_hash.h":
    uint32_t hash_units8 "rmq_java_hash_8"(uint32_t h, const uint8_t* p, int64_t n) noexcept nogil
    uint32_t hash_units16 "rmq_java_hash_16"(uint32_t h, const uint16_t* p, int64_t n) noexcept nogil
    bint hash_ascii "rmq_java_hash_ascii"(uint32_t* h, const uint8_t* p, int64_t n) noexcept nogil
    uint32_t hash_joined "rmq_java_hash_joined"(uint32_t h, uint32_t after, int64_t n) noexcept nogil
    enum: JOINED_UNITS "RMQ_JAVA_HASH_JOINED"

cdef extern from "_crc32.h":
    void crc32_start "rmq_crc32_start"() noexcept
    uint32_t crc32_update "rmq_crc32_update"(uint32_t crc, const uint8_t* p, size_t n) noexcept nogil
    uint32_t crc32_shifted "rmq_crc32_shifted"(uint32_t crc, uint64_t n) noexcept nogil
    uint32_t crc32_by "rmq_crc32_by"(int i, uint32_t crc, const uint8_t* p, size_t n) noexcept nogil
    const char* crc32_name "rmq_crc32_name"(int i) noexcept
    int crc32_implementation_num "rmq_crc32_implementation_num"


# ---------------------------------------------------------------------------------------------- layout constants

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
    # What `scan`, `decode_record` and their like found at a position; negative = bytes that no writer leaves.
    EMPTY = 0            # eight zero bytes, or fewer than eight bytes left: nothing was written here
    RECORD = 1
    BLANK = 2            # the record that closes a segment
    COLUMNS_FULL = 3
    LIMIT = 4            # the end that the caller gave
    BAD_MAGIC = -1
    BAD_SIZE = -2        # the total size is negative, too small, or goes beyond the segment; a blank's is not the rest of it
    BAD_LENGTH = -3      # the parts do not add up to the total size
    BAD_PHY_OFFSET = -4  # the record says that it lies elsewhere
    BAD_BODY_CRC = -5
    BAD_PROP_CRC = -6

# Signed, as an enumerator above INT_MAX would wrap silently.  They are module attributes for tests and documents.
cdef int32_t C_MAGIC_V1 = <int32_t>0xDAA320A7u
cdef int32_t C_MAGIC_V2 = <int32_t>0xDAA320ABu
cdef int32_t C_MAGIC_BLANK = <int32_t>0xCBD43194u
MAGIC_V1 = C_MAGIC_V1
MAGIC_V2 = C_MAGIC_V2
MAGIC_BLANK = C_MAGIC_BLANK
PRE_FILL_SIZE = 0x7FFFFFFF           # record size of a unit that only fills a queue file up to its first offset
EXT_ADDRESS_MAX = -2147483649        # a tags code at or below is an address in the extension file
EXT_ADDRESS_BASE = -2**63
cdef int64_t EXT_BASE = EXT_ADDRESS_BASE
cdef int32_t PRE_FILL = PRE_FILL_SIZE
cdef int64_t MAX_EXT_ADDRESS = EXT_ADDRESS_MAX

cdef enum:
    SYS_TRANSACTION_MASK = 0xC
    SYS_PREPARED = 0x4
    SYS_ROLLBACK = 0xC
    SYS_BORN_V6 = 0x10
    SYS_STORE_V6 = 0x20
    SYS_INNER_BATCH = 0x80
    # What a plain row may say: compressed, how, several tags.
    SYS_PLAIN_MASK = 0x703

assert RECORD_BORN_HOST + 8 + 8 + 8 + 4 + 8 + 4 + 1 + 2 == RECORD_FIXED_SIZE
assert UNIT_TAGS_CODE + 8 == UNIT_SIZE and BATCH_UNIT_RESERVED + 4 == BATCH_UNIT_SIZE
assert INDEX_COUNT + 4 == INDEX_HEADER_SIZE and ENTRY_PREV_INDEX + 4 == ENTRY_SIZE
assert EXT_UNIT_BITMAP_LENGTH + 2 == EXT_UNIT_MIN_SIZE
assert CHECKPOINT_LOGICS_PHYSICAL_OFFSET + 8 <= CHECKPOINT_SIZE


# --------------------------------------------------------------------------------------------------------- Region

cdef int64_t CLOSED = <int64_t>1 << 62
cdef int64_t PAGE_SIZE = sysconf(_SC_PAGESIZE)


cdef void* map_pages(int fd, int64_t size, int64_t length, int prot) noexcept nogil:
    # `size` bytes of address space.  Where the file has only `length` of them, pages of zeros that belong to no file lie
    # behind those of the file; the system fills the file's last page with zeros itself.
    cdef void* base
    if length >= size:
        return mmap(NULL, <size_t>size, prot, MAP_SHARED, fd, 0)
    base = mmap(NULL, <size_t>size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if base == MAP_FAILED or length == 0:
        return base
    if mmap(base, <size_t>length, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED:
        munmap(base, <size_t>size)
        return MAP_FAILED
    return base


cdef class Region:
    """The fence around one mapping: the only object that stores a pointer into a file.

    Made by `Region.map`.  The mapping is of the whole length and is never resized or moved.  Every use pins it, so
    that `close` (also from another thread, a finalizer or under an iterator) unmaps only after the last use; views
    from `view` hold a pin for as long as they live.
    """

    def __cinit__(self):
        self.base = NULL
        self.size = 0
        self.writable = False
        self.state = CLOSED

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
            # Touching a page behind the end of the file would end the process with SIGBUS.
            raise ValueError(f"cannot map {size} bytes of a file of {length}")
        cdef Region region = Region.__new__(Region)
        cdef int prot = PROT_READ | PROT_WRITE if writable else PROT_READ
        cdef void* base
        with nogil:
            base = map_pages(fd, size, length, prot)
        if base == MAP_FAILED:
            PyErr_SetFromErrno(OSError)
        region.base = <unsigned char*>base
        region.size = size
        region.writable = writable
        region.state = 0
        return region

    def __dealloc__(self):
        cdef unsigned char* base = atomic_take(&self.base)
        if base != NULL:
            munmap(base, <size_t>self.size)

    cdef unsigned char* pin(self, int64_t pos, int64_t extent) except NULL:
        # The address of `pos`, good until `unpin`, after the one bounds check of the operation.
        cdef int64_t state = add_pins(&self.state, 1)
        if state & CLOSED:
            self.unpin()
            raise StoreClosedError("the mapping is closed; open the store or file again")
        if pos < 0 or extent < 0 or pos > self.size - extent:
            self.unpin()
            raise OffsetOutOfRangeError(
                f"{extent} bytes at position {pos} do not lie inside the {self.size} bytes of the file", pos=pos)
        return self.base + pos

    cdef unsigned char* pin_writable(self, int64_t pos, int64_t extent) except NULL:
        if not self.writable:
            if self.closed:
                raise StoreClosedError("the mapping is closed; open the store or file again")
            raise ReadOnlyError("this file was opened read-only; open the store with read_only=False to write")
        return self.pin(pos, extent)

    cdef void unpin(self) noexcept:
        cdef int64_t state = add_pins(&self.state, -1)
        cdef unsigned char* base
        if state == CLOSED:
            base = atomic_take(&self.base)
            if base != NULL:
                munmap(base, <size_t>self.size)

    def close(self):
        """Close for new uses at once; the memory goes with the last pin.  Closing twice does nothing."""
        cdef int64_t before = atomic_or(&self.state, CLOSED)
        cdef unsigned char* base
        if before == 0:
            base = atomic_take(&self.base)
            if base != NULL:
                munmap(base, <size_t>self.size)

    @property
    def closed(self):
        """bool: no new use is possible."""
        return bool(atomic_load(&self.state) & CLOSED)

    @property
    def pins(self):
        """int: uses and views that hold the mapping now."""
        return atomic_load(&self.state) & ~CLOSED

    def __len__(self):
        return self.size

    def read(self, int64_t pos, int64_t size):
        """bytes: a copy of `size` bytes at `pos`."""
        cdef unsigned char* p = self.pin(pos, size)
        try:
            return PyBytes_FromStringAndSize(<char*>p, size)
        finally:
            self.unpin()

    def view(self, int64_t pos, int64_t size):
        """memoryview: `size` bytes at `pos` without a copy, read-only; it keeps the mapping until it is released."""
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
        """Set `size` bytes at `pos` to zero, touching only pages that hold something else."""
        cdef unsigned char* p = self.pin_writable(pos, size)
        try:
            with nogil:
                zero_bytes(p, size)
        finally:
            self.unpin()

    def last_nonzero(self, int64_t pos, int64_t size):
        """int: the position after the last byte that is not zero in the `size` bytes at `pos`, or `pos` if none is."""
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
            size = self.size - pos
        if pos < 0:
            raise OffsetOutOfRangeError(f"position {pos} is negative", pos=pos)
        cdef int64_t start = pos - pos % PAGE_SIZE
        cdef unsigned char* p = self.pin(start, size + pos - start)
        cdef int failed
        try:
            with nogil:
                failed = msync(p, <size_t>(size + pos - start), MS_SYNC) if size > 0 else 0
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
        """Make the pages that hold `size` bytes at `pos` ready to be written, so that the first write to each meets no fault.

        No byte changes, and others may write there meanwhile.  Pages that were not in memory become dirty, and holes of a
        sparse file are filled: the file should be allocated (`MappedFile.populate` sees to that).  Nothing that goes wrong
        raises or ends the process; a write then meets it.

        Returns
        -------
        bool
            False where the system did not do it: before Linux 5.14 and elsewhere the pages are only read ahead.

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
        """Let the whole pages among `size` bytes at `pos` go from this process; what they hold stays in the file.

        A scan calls it behind itself, so that its working set stays small however long the file is.
        """
        cdef int64_t start = (pos + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE
        cdef int64_t extent = (pos + size) // PAGE_SIZE * PAGE_SIZE - start
        cdef unsigned char* p = self.pin(pos, size)
        try:
            if extent > 0:
                madvise(p + (start - pos), <size_t>extent, MADV_DONTNEED)
        finally:
            self.unpin()

    def get_i16(self, int64_t pos):
        """int: the signed 16-bit big-endian number at `pos`."""
        cdef unsigned char* p = self.pin(pos, 2)
        cdef int16_t value = get_i16(p)
        self.unpin()
        return value

    def get_i32(self, int64_t pos):
        """int: the signed 32-bit big-endian number at `pos`."""
        cdef unsigned char* p = self.pin(pos, 4)
        cdef int32_t value = get_i32(p)
        self.unpin()
        return value

    def get_i64(self, int64_t pos):
        """int: the signed 64-bit big-endian number at `pos`."""
        cdef unsigned char* p = self.pin(pos, 8)
        cdef int64_t value = get_i64(p)
        self.unpin()
        return value


@cython.no_gc_clear  # The pin must be given back to the region, also when a cycle is collected.
cdef class RegionView:
    """A buffer over a part of a `Region`; it holds a pin from its making to its end, so the memory cannot go away."""

    cdef Region region
    cdef int64_t pos, size
    cdef bint pinned

    def __cinit__(self, Region region not None, int64_t pos, int64_t size):
        region.pin(pos, size)
        self.region, self.pos, self.size, self.pinned = region, pos, size, True

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef unsigned char* p = self.region.base + self.pos  # the pin of this object fences it
        PyBuffer_FillInfo(view, self, p, self.size, True, flags)

    def __dealloc__(self):
        if self.pinned:
            self.region.unpin()


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
    # Pages that are zero already stay untouched: a sparse file stays sparse.
    cdef int64_t step
    while n > 0:
        step = n if n < 4096 else 4096
        if nonzero_extent(p, step):
            memset(p, 0, step)
        p += step
        n -= step


# --------------------------------------------------------------------------------------- Java string hash and CRC-32

cdef inline uint32_t hash_units32(uint32_t h, const uint32_t* p, int64_t n) noexcept nogil:
    # A character outside the BMP contributes its two surrogates, the high one first.
    cdef int64_t i
    cdef uint32_t c
    for i in range(n):
        c = p[i]
        if c >= 0x10000:
            c -= 0x10000
            h = h * 31u + (0xD800u + (c >> 10))
            h = h * 31u + (0xDC00u + (c & 0x3FFu))
        else:
            h = h * 31u + c
    return h


cdef inline uint32_t hash_str(uint32_t h, object text):
    return hash_text(h, <PyObject*>text)


cdef inline uint32_t hash_text(uint32_t h, PyObject* text):
    cdef int kind = PyUnicode_KIND(text)
    cdef void* data = PyUnicode_DATA(text)
    cdef Py_ssize_t n = PyUnicode_GET_LENGTH(text)
    if kind == 1:
        return hash_units8(h, <const uint8_t*>data, n)
    if kind == 2:
        return hash_units16(h, <const uint16_t*>data, n)
    return hash_units32(h, <const uint32_t*>data, n)


cdef uint32_t hash_utf8(uint32_t h, const uint8_t* p, int64_t n) noexcept nogil:
    # The hash of the UTF-16 text that Java 17's `new String(bytes, UTF_8)` makes of these bytes: every malformed part
    # counts as U+FFFD, and the lengths of malformed parts are the JDK's (java.lang.String, sun.nio.cs.UTF_8).
    cdef int64_t i = 0
    cdef uint32_t b1, b2, b3, b4, c
    # Nearly all keys, tags and topics are ASCII, whose hash takes no decoding.
    if hash_ascii(&h, p, n):
        return h
    while i < n:
        b1 = p[i]
        if b1 < 0x80:
            h = h * 31u + b1
            i += 1
        elif 0xC2 <= b1 <= 0xDF:
            if i + 1 < n and (p[i + 1] & 0xC0) == 0x80:
                h = h * 31u + (((b1 & 0x1F) << 6) | (p[i + 1] & 0x3F))
                i += 2
            else:
                h = h * 31u + 0xFFFDu
                i += 1
        elif 0xE0 <= b1 <= 0xEF:
            if i + 2 < n:
                b2, b3 = p[i + 1], p[i + 2]
                if (b1 == 0xE0 and (b2 & 0xE0) == 0x80) or (b2 & 0xC0) != 0x80:
                    h = h * 31u + 0xFFFDu
                    i += 1
                elif (b3 & 0xC0) != 0x80:
                    h = h * 31u + 0xFFFDu
                    i += 2
                else:
                    c = ((b1 & 0x0F) << 12) | ((b2 & 0x3F) << 6) | (b3 & 0x3F)
                    h = h * 31u + (0xFFFDu if 0xD800 <= c <= 0xDFFF else c)
                    i += 3
            else:
                h = h * 31u + 0xFFFDu
                if i + 1 < n and ((b1 == 0xE0 and (p[i + 1] & 0xE0) == 0x80) or (p[i + 1] & 0xC0) != 0x80):
                    i += 1
                else:
                    return h
        elif 0xF0 <= b1 <= 0xF7:
            if i + 3 < n:
                b2, b3, b4 = p[i + 1], p[i + 2], p[i + 3]
                c = ((b1 & 0x07) << 18) | ((b2 & 0x3F) << 12) | ((b3 & 0x3F) << 6) | (b4 & 0x3F)
                if ((b2 & 0xC0) != 0x80 or (b3 & 0xC0) != 0x80 or (b4 & 0xC0) != 0x80 or c < 0x10000 or c > 0x10FFFF):
                    h = h * 31u + 0xFFFDu
                    if (b1 > 0xF4 or (b1 == 0xF0 and (b2 < 0x90 or b2 > 0xBF)) or (b1 == 0xF4 and (b2 & 0xF0) != 0x80)
                            or (b2 & 0xC0) != 0x80):
                        i += 1
                    elif (b3 & 0xC0) != 0x80:
                        i += 2
                    else:
                        i += 3
                else:
                    c -= 0x10000
                    h = h * 31u + (0xD800u + (c >> 10))
                    h = h * 31u + (0xDC00u + (c & 0x3FFu))
                    i += 4
            else:
                h = h * 31u + 0xFFFDu
                if b1 > 0xF4:
                    i += 1
                elif i + 1 < n and ((b1 == 0xF0 and (p[i + 1] < 0x90 or p[i + 1] > 0xBF))
                                    or (b1 == 0xF4 and (p[i + 1] & 0xF0) != 0x80) or (p[i + 1] & 0xC0) != 0x80):
                    i += 1
                elif i + 2 < n and (p[i + 2] & 0xC0) != 0x80:
                    i += 2
                else:
                    return h
        else:
            h = h * 31u + 0xFFFDu
            i += 1
    return h


cdef inline int32_t index_hash(uint32_t h) noexcept nogil:
    # abs() as Java has it; -2**31 stays negative there, and the index file maps it to 0 (RocketMQ IndexFile).
    cdef int32_t signed_hash = <int32_t>h
    if signed_hash >= 0:
        return signed_hash
    if h == 0x80000000u:
        return 0
    return -signed_hash


def java_string_hash(str text not None):
    """int: Java's ``String.hashCode`` over UTF-16 code units, signed 32 bit; lone surrogates hash as themselves."""
    return <int32_t>hash_str(0, text)


def java_string_hash_bytes(bytes data not None):
    """int: Java's ``String.hashCode`` of UTF-8 bytes as Java decodes them (malformed parts become U+FFFD)."""
    return <int32_t>hash_utf8(0, <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


def index_key_hash(str topic not None, str key not None):
    """int: the non-negative hash under which the index files hold ``topic#key``; no string is built."""
    return index_hash(hash_str(hash_str(0, topic) * 31u + 35u, key))


crc32_start()


def crc32(data not None):
    """int: CRC-32 of `data` with the top bit cleared, as a record stores it; 0 for empty data."""
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
    """tuple of str: the names of the CRC-32 implementations that this machine can run; the last is the one in use."""
    return tuple([crc32_name(i).decode() for i in range(crc32_implementation_num)])


crc32_implementation = crc32_name(crc32_implementation_num - 1).decode()


def crc32_with(str name not None, data not None, uint32_t value=0):
    """int: CRC-32 of `data` by the implementation `name`, all 32 bits, as ``zlib.crc32(data, value)`` gives it.

    Raises
    ------
    ValueError
        This machine has no implementation of that name.
    """
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


# ----------------------------------------------------------------------------------------------------------- the GIL

cdef enum:
    # Nanoseconds.  Whoever lets go of the GIL beside a thread that computes waits for it up to 5 ms, Python's switch interval;
    # a batch of a thousand messages would do so ten times.  Less work than this keeps it.
    WORTH_WAITING = 500_000
    # About what work takes where memory is near: nanoseconds for an index entry, and for a row beside its bytes; and how
    # many bytes are copied, or looked at, in one.
    PUT_COST = 50
    ROW_COST = 100
    COPIED_BYTES = 4


cdef inline PyThreadState* let_others_run(int64_t nanoseconds):
    # For work of about so many nanoseconds that touches no Python object; `go_on` ends it.
    return PyEval_SaveThread() if nanoseconds > WORTH_WAITING else NULL


cdef inline void go_on(PyThreadState* state) noexcept:
    if state != NULL:
        PyEval_RestoreThread(state)


# ------------------------------------------------------------------------------------------------------ index file

cdef inline int64_t index_count_of(const unsigned char* base) noexcept nogil:
    # Number of the next entry; a brand-new file holds 0 and means 1.
    cdef int64_t count = get_i32(base + INDEX_COUNT)
    acquire_fence()
    return count if count > 0 else 1


cdef enum:
    PUT_AHEAD = 32


cdef struct IndexCounters:
    # What a put reads of the header, held in registers between the puts of one call; every put still writes it out.
    int64_t count
    int64_t begin_timestamp
    int32_t hash_slot_count


cdef inline void load_counters(const unsigned char* base, IndexCounters* c) noexcept nogil:
    c.count = index_count_of(base)
    c.begin_timestamp = get_i64(base + INDEX_BEGIN_TIMESTAMP)
    c.hash_slot_count = get_i32(base + INDEX_HASH_SLOT_COUNT)


cdef inline void index_put_at(unsigned char* base, int64_t slot_num, int64_t slot, IndexCounters* c, int32_t key_hash,
                              int64_t phy_offset, int64_t store_timestamp) noexcept nogil:
    # One entry, for which there is room.  The order of the stores is what a crash and a reader rely on (I6): a slot that
    # were ahead of the count for longer than this one entry would hide its whole chain from readers.
    check(0 <= slot < slot_num and key_hash >= 0)
    cdef unsigned char* slot_at = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot
    cdef unsigned char* entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot_num + ENTRY_SIZE * c.count
    cdef int32_t prev = get_i32(slot_at)
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
    release_fence()
    put_i32(slot_at, <int32_t>c.count)
    release_fence()
    if c.count <= 1:
        put_i64(base + INDEX_BEGIN_PHY_OFFSET, phy_offset)
        put_i64(base + INDEX_BEGIN_TIMESTAMP, store_timestamp)
        c.begin_timestamp = store_timestamp
        release_fence()
    c.count += 1
    put_i32(base + INDEX_COUNT, <int32_t>c.count)
    release_fence()
    # Behind the count: one too few is seen by `relink`, one too many looks like a file of 4.7.0.
    c.hash_slot_count += prev == 0
    put_i32(base + INDEX_HASH_SLOT_COUNT, c.hash_slot_count)
    put_i64(base + INDEX_END_PHY_OFFSET, phy_offset)
    put_i64(base + INDEX_END_TIMESTAMP, store_timestamp)


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


cdef inline int64_t index_head(const unsigned char* base, uint64_t magic, int64_t slot_num, int64_t index_num,
                               int32_t key_hash) noexcept nogil:
    # Newest entry of the key's chain, 0 if there is none, -1 where the slot says what cannot be.
    cdef int64_t count = index_count_of(base)
    cdef uint32_t slot = fastmod(<uint32_t>key_hash, magic, <uint32_t>slot_num)
    cdef int64_t head = get_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * <int64_t>slot)
    acquire_fence()
    if head > count:
        # A writer may have gone on since the count was read.
        count = index_count_of(base)
    if head == 0 or count <= 1 or key_hash < 0:
        return 0
    return head if 0 < head <= count and head < index_num else -1


cdef inline int64_t entry_before(const unsigned char* entry, int64_t at, int32_t key_hash, uint64_t magic, int64_t slot_num,
                                 bint* damaged) noexcept nogil:
    # The entry that entry `at` of the chain of `key_hash` leads to, 0 at the end.  Only entries of one slot make a chain, and
    # each leads to one that was made before it.
    cdef int64_t prev = get_i32(entry + ENTRY_PREV_INDEX)
    cdef int32_t own = get_i32(entry + ENTRY_KEY_HASH)
    if own != key_hash and (own < 0 or fastmod(<uint32_t>own, magic, <uint32_t>slot_num)
                            != fastmod(<uint32_t>key_hash, magic, <uint32_t>slot_num)):
        damaged[0] = True
    if 0 <= prev < at:
        return prev
    damaged[0] = True
    return 0


cdef int64_t index_select(const unsigned char* base, int64_t slot_num, int64_t* index, int32_t key_hash,
                          int64_t begin, int64_t end, int64_t* out, int64_t room) noexcept nogil:
    # RocketMQ's walk (5.5.0 IndexFile.selectPhyOffset) from entry *index, at most `room` hits; *index is left at the
    # entry to go on with, 0 at the end.  Chains must strictly decrease, where Java would go round for ever.
    cdef int64_t n = index[0], found = 0, prev, time, begin_timestamp = get_i64(base + INDEX_BEGIN_TIMESTAMP)
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


cdef inline void ask_for_entry(const unsigned char* entry) noexcept nogil:
    # An entry may lie across two cache lines.
    prefetch(entry)
    prefetch(entry + ENTRY_SIZE - 1)


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
    begin_timestamp = get_i64(base + INDEX_BEGIN_TIMESTAMP)
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
    # Puts the hits of a block behind out[used - 1], lane by lane, each lane's in the order in which they were met; nums
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


cdef int64_t index_chain(const unsigned char* base, uint64_t magic, int64_t slot_num, int64_t* index, int32_t key_hash,
                         int64_t* out, int64_t room, bint* damaged) noexcept nogil:
    # Every entry of the chain with this hash, whatever its time.
    cdef int64_t n = index[0], found = 0
    cdef const unsigned char* entry
    while n > 0 and found < room:
        entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * slot_num + ENTRY_SIZE * n
        if get_i32(entry + ENTRY_KEY_HASH) == key_hash:
            out[found] = get_i64(entry + ENTRY_PHY_OFFSET)
            damaged[0] |= out[found] < 0
            found += 1
        n = entry_before(entry, n, key_hash, magic, slot_num, damaged)
    index[0] = n
    return found


cdef enum:
    SELECT_ROUND = 128
    KEY_CHUNK = 131072
    KEY_HASHES = 256  # of one record


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


cdef object hash_keys(object part, Py_ssize_t start, Py_ssize_t n, object room=None):
    # int32 array of the index hashes of `n` keys from `start` on, in `room` if that is given; list items are hashed under
    # the GIL, Arrow text from its buffers without it.
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
        if start + n > PyList_GET_SIZE(part):
            raise ValueError("the list of keys became shorter meanwhile")
        for i in range(n):
            if i + 16 < n:
                prefetch(<char*>PyList_GET_ITEM(part, start + i + 16))
            item = <PyObject*>PyList_GET_ITEM(part, start + i)
            if not PyUnicode_Check(item):
                raise TypeError(f"key {start + i} is {type(<object>item).__name__}, not str")
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
        Geometry: hash slots and entry places (entry 0 is never used, so ``index_num - 1`` entries fit).
    region : Region
        The mapping; its length is ``40 + 4 * slot_num + 20 * index_num``.
    damaged : bool
        An exact search met what cannot be: a slot or an entry that leads nowhere or into another chain, or an entry whose
        record is not there or has no such key.  What it hides is to be looked for in the log.
    is_distrusted : bool
        Somebody took note of this: exact searches go on without saying it again.
    """

    cdef readonly Region region
    cdef public bint damaged, is_distrusted
    cdef readonly int64_t slot_num, index_num
    cdef uint64_t magic
    cdef cython.pymutex mutex
    cdef int64_t long_puts  # calls that write without the GIL now; while there are none the GIL is lock enough

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
            The record's store time, ms since epoch.

        Returns
        -------
        bool
            False when the file is full; nothing was written then.
        """
        if phy_offset < 0:
            raise OffsetOutOfRangeError(f"phy_offset {phy_offset} is negative")
        return self.put_one(index_hash(hash_str(0, key)), phy_offset, store_timestamp)

    def put_hash(self, int32_t key_hash, int64_t phy_offset, int64_t store_timestamp):
        """bool: as `put_key` with the index hash (not negative) instead of the text."""
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
            Absolute byte offsets, not negative, and store times in ms since epoch.

        Returns
        -------
        int
            How many were taken, less than n only when the file became full.
        """
        phy = int64_column(phy_offsets, "phy_offsets")
        time = int64_column(store_timestamps, "store_timestamps")
        parts = arrow_or_list_chunks(keys)
        cdef int64_t total = sum([len(part) for part in parts]), done = 0, n, start
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
        """What RocketMQ's ``IndexFile.selectPhyOffset`` (5.5.0) answers, quirks included.

        Times are compared at the resolution of whole seconds after the file's begin time, other keys with the same
        hash are returned as well, and the walk stops at the first entry older than `begin`.

        Parameters
        ----------
        key : str
            The whole key, ``topic#key``.
        max_num : int
            At most so many.
        begin, end : int
            Store time range, ms since epoch, inclusive.

        Returns
        -------
        list of int
            phy offsets, newest entry first.
        """
        return self.select_one(index_hash(hash_str(0, key)), max_num, begin, end)

    def select_hash(self, int32_t key_hash, int64_t max_num=64, int64_t begin=0, int64_t end=INT64_MAX):
        """list of int: as `select_phy_offset` with the index hash instead of the text."""
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

    def select_chain(self, int32_t key_hash, int64_t index=-1, int64_t max_num=SELECT_ROUND):
        """Entries with this hash, whatever their time, a page at a time.

        Parameters
        ----------
        key_hash : int
            Index hash, not negative.
        index : int
            Entry number to go on with; -1 starts at the newest.
        max_num : int
            At most so many, 128 at the most.

        Returns
        -------
        (list of int, int)
            phy offsets, newest entry first, and the entry number to go on with (0 = the chain is at its end).
        """
        cdef int64_t[SELECT_ROUND] out
        cdef int64_t found, i
        cdef bint damaged = False, asked = False
        cdef const unsigned char* entry
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
            found = index_chain(base, self.magic, self.slot_num, &index, key_hash, out, max_num, &damaged)
            self.damaged |= damaged and not asked
            return [out[i] for i in range(found)], index
        finally:
            region.unpin()

    def read_header(self):
        """tuple: (begin_timestamp, end_timestamp, begin_phy_offset, end_phy_offset, hash_slot_count, index_count).

        The count is the stored one; readers take values below 1 as 1 (an empty file).
        """
        cdef Region region = self.region
        cdef unsigned char* p = region.pin(0, INDEX_HEADER_SIZE)
        try:
            return (get_i64(p), get_i64(p + INDEX_END_TIMESTAMP), get_i64(p + INDEX_BEGIN_PHY_OFFSET),
                    get_i64(p + INDEX_END_PHY_OFFSET), get_i32(p + INDEX_HASH_SLOT_COUNT), get_i32(p + INDEX_COUNT))
        finally:
            region.unpin()

    @property
    def is_full(self):
        """bool: no further entry fits."""
        return self.full()

    cdef bint full(self) except -1:
        cdef Region region = self.region
        cdef unsigned char* p = region.pin(0, INDEX_HEADER_SIZE)
        cdef int32_t count = get_i32(p + INDEX_COUNT)
        region.unpin()
        return (count if count > 1 else 1) >= self.index_num

    def write_header(self, int64_t begin_timestamp, int64_t end_timestamp, int64_t begin_phy_offset,
                     int64_t end_phy_offset, int32_t hash_slot_count, int32_t index_count):
        """Write the six header fields, the count last."""
        cdef Region region = self.region
        cdef unsigned char* p = region.pin_writable(0, INDEX_HEADER_SIZE)
        try:
            put_i64(p + INDEX_BEGIN_TIMESTAMP, begin_timestamp)
            put_i64(p + INDEX_END_TIMESTAMP, end_timestamp)
            put_i64(p + INDEX_BEGIN_PHY_OFFSET, begin_phy_offset)
            put_i64(p + INDEX_END_PHY_OFFSET, end_phy_offset)
            put_i32(p + INDEX_HASH_SLOT_COUNT, hash_slot_count)
            release_fence()
            put_i32(p + INDEX_COUNT, index_count)
        finally:
            region.unpin()

    def read_slot(self, int64_t slot):
        """int: the entry number that hash slot `slot` holds, as stored."""
        if not 0 <= slot < self.slot_num:
            raise OffsetOutOfRangeError(f"slot {slot} of {self.slot_num}")
        return self.region.get_i32(INDEX_HEADER_SIZE + SLOT_SIZE * slot)

    def entry_pos(self, int64_t index):
        """int: position in the file of entry `index`."""
        return INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * index

    def read_entry(self, int64_t index):
        """tuple: (key_hash, phy_offset, time_diff in seconds, previous entry number) of entry `index`, as stored."""
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
        """Entries from `index` on as columns, as stored.

        Returns
        -------
        (int32 array, int64 array, int32 array)
            Key hashes, phy offsets and time differences in seconds, shape (n,) with n at most `count`.
        """
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
        end_phy_offset : int
            Where the log ends.
        begin_phy_offset : int
            The last offset in the file before.

        Returns
        -------
        count : int
            The count up to which the entries are as a writer leaves them: entries 1 … count-1 have a hash above 0, a
            non-negative time, phy offsets that do not fall and lie from `begin_phy_offset` to below `end_phy_offset`, and a
            previous entry below their own number.  Hash 0 is taken for one that never reached the disk, although a key may
            have it; putting it again gives the same bytes.
        linked : bool
            Slots, chains and the counts in the header are what these entries make of them: `relink` has nothing to do.
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
                    prev = get_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * slot)
                    linked &= prev == head
                linked &= n == index_count_of(base) and get_i32(base + INDEX_HASH_SLOT_COUNT) == used
            return n, linked
        finally:
            region.unpin()

    def relink(self, int64_t count, bint erase=True):
        """Make slots, chains, both counts right for the entries 1 … count-1 and erase all entries from `count` on.

        Parameters
        ----------
        erase : bool
            False leaves them as they are, for whoever knows which pages hold anything; looking at all is slow.

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
                    if get_i32(entry) != heads[slot]:
                        put_i32(entry, heads[slot])
                        changed += 1
                if erase:
                    zero_bytes(base + INDEX_HEADER_SIZE + SLOT_SIZE * self.slot_num + ENTRY_SIZE * count,
                               ENTRY_SIZE * (self.index_num - count))
                if get_i32(base + INDEX_COUNT) != count and not (count == 1 and get_i32(base + INDEX_COUNT) == 0):
                    put_i32(base + INDEX_COUNT, <int32_t>count)
                    changed += 1
                # RocketMQ up to 4.7.0 counted every put here; nobody relies on it.
                if get_i32(base + INDEX_HASH_SLOT_COUNT) != used:
                    put_i32(base + INDEX_HASH_SLOT_COUNT, <int32_t>used)
                    changed += 1
            return changed
        finally:
            self.long_puts -= 1
            region.unpin()

    def tail_num(self, int64_t phy_offset):
        """int: how many of the newest entries, without a gap, are of the record at `phy_offset`."""
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
        """Compare slots and chains with what the entries require.

        Returns
        -------
        list of (int, str)
            Position in the file and what is wrong there; at most 1000, then one that says how many more.
        """
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
            stored = get_i32(base + INDEX_COUNT)
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
                    if get_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * slot) != heads[slot]:
                        if len_gil(found) < 1000:
                            with gil:
                                found.append((INDEX_HEADER_SIZE + SLOT_SIZE * slot,
                                              f"slot {slot} holds {get_i32(base + INDEX_HEADER_SIZE + SLOT_SIZE * slot)}"
                                              f", the entries need {heads[slot]}"))
                        else:
                            more += 1
            stored = get_i32(base + INDEX_HASH_SLOT_COUNT)
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


@cython.no_gc_clear
cdef class SlotHeads:
    """The newest entry of every hash slot, for whoever makes the entries of an index file elsewhere than in the file.

    Entries are numbered as in the file.  What several of these were told of consecutive entries is put together with
    `merge`, in order, and then is what one would have been told of all of them.

    Parameters
    ----------
    slot_num : int
        Hash slots of the file; 4 bytes of memory each.
    """

    cdef readonly int64_t slot_num
    cdef uint64_t magic
    cdef object array
    cdef int32_t[::1] heads

    def __cinit__(self, int64_t slot_num):
        if not 1 <= slot_num <= 0x7FFFFFFF:
            raise ValueError(f"{slot_num} slots; there must be 1 to 2147483647")
        self.slot_num = slot_num
        self.magic = mod_magic(<uint32_t>slot_num)
        self.array = np.zeros(slot_num, np.int32)
        self.heads = self.array

    cdef int64_t check_entries(self, const int32_t[::1] hashes, int64_t first) except -1:
        cdef int64_t i, n = hashes.shape[0], bad = -1
        if first < 1 or first + n > 0x7FFFFFFF:
            raise OffsetOutOfRangeError(f"{n} entries from number {first} on")
        with nogil:
            for i in range(n):
                if hashes[i] < 0:
                    bad = i
                    break
        if bad >= 0:
            raise OffsetOutOfRangeError(f"row {bad}: key hash {hashes[bad]} is negative")
        return n

    def note(self, const int32_t[::1] hashes not None, int64_t first):
        """Take note of the entries `first`, +1, … with these index hashes (int32, not negative); the GIL is released."""
        cdef int64_t i, n = self.check_entries(hashes, first)
        with nogil:
            for i in range(n):
                if i + PUT_AHEAD < n:
                    prefetch(&self.heads[0] + fastmod(<uint32_t>hashes[i + PUT_AHEAD], self.magic, <uint32_t>self.slot_num))
                self.heads[fastmod(<uint32_t>hashes[i], self.magic, <uint32_t>self.slot_num)] = <int32_t>(first + i)

    def merge(self, const int32_t[::1] slots not None, const int32_t[::1] entries not None):
        """Take over `used` of another one that was told of the entries behind those known here."""
        cdef int64_t i, n = slots.shape[0], bad = -1
        if entries.shape[0] != n:
            raise ValueError(f"{n} slots and {entries.shape[0]} entries")
        with nogil:
            for i in range(n):
                if not (0 <= slots[i] < self.slot_num and entries[i] > self.heads[slots[i]]):
                    bad = i
                    break
                self.heads[slots[i]] = entries[i]
        if bad >= 0:
            raise ValueError(f"row {bad}: slot {slots[bad]} with entry {entries[bad]} does not follow what is known")

    def used(self):
        """(int32 array, int32 array): the slots that have an entry, ascending, and the newest entry of each."""
        slots = np.flatnonzero(self.array).astype(np.int32)
        return slots, self.array[slots]

    @property
    def used_num(self):
        """int: how many slots have an entry."""
        return int(np.count_nonzero(self.array))

    def table(self):
        """numpy.ndarray of uint8, shape (4 * slot_num,): the slots as the file holds them."""
        return self.array.astype(">i4").view(np.uint8)

    def encode(self, const int32_t[::1] hashes not None, const int64_t[::1] phy_offsets not None,
               const int64_t[::1] store_timestamps not None, int64_t first, int64_t begin_timestamp,
               int64_t begin_before=0):
        """The bytes of the entries `first`, +1, …, as `IndexRegion.put_hashes` would write them, and take note of them.

        Parameters
        ----------
        hashes : int32 array, shape (n,)
            Index hashes, not negative.
        phy_offsets, store_timestamps : int64 arrays, shape (n,)
        first : int
            Number of the first entry, at least 1.
        begin_timestamp : int
            The file's begin time in ms since epoch: the store time of its entry 1.
        begin_before : int
            What the header gave as begin time before entry 1 was put: the end time of the file before, 0 in the first file.

        Returns
        -------
        numpy.ndarray of uint8, shape (20 * n,)
        """
        cdef int64_t i, n = self.check_entries(hashes, first), begin, diff, slot
        cdef unsigned char* entry
        if phy_offsets.shape[0] != n or store_timestamps.shape[0] != n:
            raise ValueError(f"{n} hashes, {phy_offsets.shape[0]} phy_offsets, {store_timestamps.shape[0]} timestamps")
        out_array = np.empty(ENTRY_SIZE * n, np.uint8)
        if n == 0:
            return out_array
        cdef uint8_t[::1] out = out_array
        with nogil:
            for i in range(n):
                if i + PUT_AHEAD < n:
                    prefetch(&self.heads[0] + fastmod(<uint32_t>hashes[i + PUT_AHEAD], self.magic, <uint32_t>self.slot_num))
                slot = fastmod(<uint32_t>hashes[i], self.magic, <uint32_t>self.slot_num)
                begin = begin_before if first + i == 1 else begin_timestamp
                diff = 0
                if begin > 0:
                    diff = <int64_t>(<uint64_t>store_timestamps[i] - <uint64_t>begin) // 1000
                    if diff > 0x7FFFFFFF:
                        diff = 0x7FFFFFFF
                    elif diff < 0:
                        diff = 0
                entry = &out[0] + ENTRY_SIZE * i
                put_i32(entry + ENTRY_KEY_HASH, hashes[i])
                put_i64(entry + ENTRY_PHY_OFFSET, phy_offsets[i])
                put_i32(entry + ENTRY_TIME_DIFF, <int32_t>diff)
                put_i32(entry + ENTRY_PREV_INDEX, self.heads[slot])
                self.heads[slot] = <int32_t>(first + i)
        return out_array


# ------------------------------------------------------------------------------------------------------ commit log

cdef struct RecordView:
    # A parsed record as positions relative to its start; plain numbers, no pointer.
    int32_t total_size
    int32_t magic
    int32_t body_crc
    int32_t queue_id
    int32_t flag
    int32_t sys_flag
    int32_t reconsume_times
    int32_t born_host_len
    int32_t store_host_len
    int32_t store_host_pos
    int32_t body_pos
    int32_t body_len
    int32_t topic_pos
    int32_t topic_len
    int32_t properties_pos
    int32_t properties_len
    int64_t queue_offset
    int64_t phy_offset
    int64_t born_timestamp
    int64_t store_timestamp
    int64_t prepared_transaction_offset


cdef extern from *:
    """
    /* Where in a properties text the values stand that matter beside the whole of it; a position of -1 says that there is
       none.  As in Java a later one of equal name counts. */
    typedef struct { int32_t keys_pos, keys_len, tags_pos, tags_len, unique_key_pos, unique_key_len; } rmq_indexed;
    typedef struct {
        rmq_indexed indexed;
        int32_t delay_pos, delay_len, inner_num_pos, inner_num_len, inner_base_pos, inner_base_len;
        int32_t multi_dispatch_pos, multi_dispatch_len;
    } rmq_found;
    """
    ctypedef struct IndexedProperties "rmq_indexed":
        int32_t keys_pos, keys_len, tags_pos, tags_len, unique_key_pos, unique_key_len
    ctypedef struct KnownProperties "rmq_found":
        IndexedProperties indexed  # the values that the index takes
        int32_t delay_pos, delay_len, inner_num_pos, inner_num_len, inner_base_pos, inner_base_len
        int32_t multi_dispatch_pos, multi_dispatch_len


cdef int parse_record(const unsigned char* p, int64_t room, RecordView* r) noexcept nogil:
    # One record at p with `room` bytes to the end of the segment.  All sums are in 64 bits, every part is checked
    # against the total size before it is read.
    cdef int64_t at, total
    if room < BLANK_SIZE:
        return EMPTY
    r.total_size = get_i32(p)
    acquire_fence()
    r.magic = get_i32(p + RECORD_MAGIC)
    total = r.total_size
    if r.magic != C_MAGIC_V1 and r.magic != C_MAGIC_V2 and r.magic != C_MAGIC_BLANK:
        return EMPTY if total == 0 and r.magic == 0 else BAD_MAGIC
    if total == 0:
        return EMPTY  # the size is published last, so this record is being written
    if r.magic == C_MAGIC_BLANK:
        # Every writer since RocketMQ 3 gives a blank all bytes that are left; one that says otherwise was a record.
        return BLANK if total == room else BAD_SIZE
    if total < RECORD_FIXED_SIZE or total > room:
        return BAD_SIZE
    r.body_crc = get_i32(p + RECORD_BODY_CRC)
    r.queue_id = get_i32(p + RECORD_QUEUE_ID)
    r.flag = get_i32(p + RECORD_FLAG)
    r.queue_offset = get_i64(p + RECORD_QUEUE_OFFSET)
    r.phy_offset = get_i64(p + RECORD_PHY_OFFSET)
    r.sys_flag = get_i32(p + RECORD_SYS_FLAG)
    r.born_timestamp = get_i64(p + RECORD_BORN_TIMESTAMP)
    r.born_host_len = 20 if r.sys_flag & SYS_BORN_V6 else 8
    r.store_host_len = 20 if r.sys_flag & SYS_STORE_V6 else 8
    if total < RECORD_FIXED_SIZE - 16 + r.born_host_len + r.store_host_len:
        return BAD_LENGTH
    at = RECORD_BORN_HOST + r.born_host_len
    r.store_timestamp = get_i64(p + at)
    r.store_host_pos = <int32_t>(at + 8)
    at += 8 + r.store_host_len
    r.reconsume_times = get_i32(p + at)
    r.prepared_transaction_offset = get_i64(p + at + 4)
    r.body_len = get_i32(p + at + 12)
    r.body_pos = <int32_t>(at + 16)
    at += 16
    # Behind the body: the topic length (1 or 2 bytes) and the properties length (2).
    if r.body_len < 0 or at + r.body_len + 3 > total:
        return BAD_LENGTH
    at += r.body_len
    if r.magic == C_MAGIC_V1:
        r.topic_len = <int32_t>(<signed char>p[at])
        at += 1
    else:
        if at + 4 > total:
            return BAD_LENGTH
        r.topic_len = get_i16(p + at)
        at += 2
    r.topic_pos = <int32_t>at
    if r.topic_len < 0 or at + r.topic_len + 2 > total:
        return BAD_LENGTH
    at += r.topic_len
    r.properties_len = get_i16(p + at)
    r.properties_pos = <int32_t>(at + 2)
    if r.properties_len < 0 or at + 2 + r.properties_len != total:
        return BAD_LENGTH
    return RECORD


cdef inline bint body_crc_ok(const unsigned char* p, RecordView* r) noexcept nogil:
    # An empty body has CRC 0 (RocketMQ 5.5.0 UtilAll.crc32); crc32_update gives 0 for it as well.
    return <int32_t>(crc32_update(0, p + r.body_pos, r.body_len) & 0x7FFFFFFFu) == r.body_crc


cdef inline bint ends_with_crc(const unsigned char* text, int64_t n) noexcept nogil:
    # `__CRC32#` 0x01 ten digits 0x02 as the last 20 bytes (enabledAppendPropCRC, RocketMQ 5.2.0 and later).
    return n >= PROP_CRC_SIZE and memcmp(text + n - PROP_CRC_SIZE, <const char*>b"__CRC32#\x01", 9) == 0


cdef bint has_prop_crc(const unsigned char* p, RecordView* r) noexcept nogil:
    return ends_with_crc(p + r.properties_pos, r.properties_len)


cdef int64_t stored_prop_crc(const unsigned char* p, RecordView* r) noexcept nogil:
    # The number that the text of a property CRC says, -1 if it is none.  The digits stand least significant first.
    cdef const unsigned char* tail = p + r.total_size - PROP_CRC_SIZE
    cdef int64_t value = 0
    cdef int32_t i
    for i in range(9, 19):
        if not 48 <= tail[i] <= 57:
            return -1
    if tail[19] != 2:
        return -1
    for i in range(18, 8, -1):
        value = value * 10 + (tail[i] - 48)
    return value


cdef bint prop_crc_ok(const unsigned char* p, RecordView* r) noexcept nogil:
    # True as well when there is none.
    return not has_prop_crc(p, r) or stored_prop_crc(p, r) == (
        <int64_t>(crc32_update(0, p, r.total_size - PROP_CRC_SIZE) & 0x7FFFFFFFu))


cdef int64_t parse_decimal(const unsigned char* p, int32_t n, int64_t otherwise) noexcept nogil:
    # Java's Integer/Long.parse for ASCII digits with a sign; anything it would refuse gives `otherwise`.
    cdef int32_t i = 0
    cdef bint minus = False
    cdef int64_t value = 0
    if n > 0 and (p[0] == 45 or p[0] == 43):
        minus = p[0] == 45
        i = 1
    if i >= n or n - i > 18:
        return otherwise
    while i < n:
        if not 48 <= p[i] <= 57:
            return otherwise
        value = value * 10 + (p[i] - 48)
        i += 1
    return -value if minus else value


cdef inline int64_t tags_code_in(const unsigned char* text, IndexedProperties* k) noexcept nogil:
    return <int32_t>hash_utf8(0, text + k.tags_pos, k.tags_len) if k.tags_pos >= 0 else 0


cdef int64_t unit_code_of(const unsigned char* p, RecordView* r, KnownProperties* k, int64_t tags_code, const int64_t* delays,
                          int64_t delay_num) noexcept nogil:
    # The third field of a consume-queue unit: hash of the whole TAGS value, or the time of delivery for a delayed
    # record (RocketMQ 5.5.0 CommitLog.checkMessageAndReturnSize).
    cdef int64_t level
    if k.delay_pos >= 0 and r.topic_len == 19 and memcmp(p + r.topic_pos, <const char*>b"SCHEDULE_TOPIC_XXXX", 19) == 0:
        level = parse_decimal(p + r.properties_pos + k.delay_pos, k.delay_len, 0)
        if level > delay_num:
            level = delay_num
        if level > 0:
            return r.store_timestamp + delays[level - 1]
    return tags_code


cdef object text_of(const unsigned char* p, int32_t n):
    cdef str text
    if is_ascii(p, n):
        text = PyUnicode_New(n, 127)
        memcpy(PyUnicode_DATA(<PyObject*>text), p, n)
        return text
    # rmqstore.message.message registers the handler that replaces malformed parts as Java does.
    return PyUnicode_DecodeUTF8(<const char*>p, n, <const char*>b"rmqstore.java")


def decode_record(Region region not None, int64_t pos, int64_t limit=-1, int check_crc=1):
    """Decode the record at `pos` of a segment.

    Parameters
    ----------
    region : Region
        A commit-log segment.
    pos : int
        Position in the segment.
    limit : int
        End of what may be read; -1 = the end of the segment.
    check_crc : int
        0: compare no CRC; 1: the body CRC and, where the record carries one, the property CRC; 2: a record without property
        CRC fails as well (RocketMQ's forceVerifyPropCRC).

    Returns
    -------
    tuple or Verdict
        (total_size, version, body_crc, queue_id, flag, queue_offset, phy_offset, sys_flag, born_timestamp, born_host,
        store_timestamp, store_host, reconsume_times, prepared_transaction_offset, body, topic, properties, crc_ok):
        hosts are address bytes and a 4-byte port, body and properties the stored bytes.  Anything that is not a whole
        record gives the verdict instead.

    Raises
    ------
    OffsetOutOfRangeError
        `pos` lies outside.
    """
    if limit < 0 or limit > region.size:
        limit = region.size
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, limit - pos)
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
    """Judge the bytes at `pos` as recovery does, and more: the record must also say that it lies here.

    Returns
    -------
    (Verdict, int, int)
        The verdict, the total size (of a blank: as stored), and the store timestamp (0 unless a record was parsed).
    """
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, region.size - pos)
    cdef int verdict
    r.total_size = 0
    r.store_timestamp = 0
    try:
        with nogil:
            verdict = judge_record(p, region.size - pos, base_offset + pos, check_crc, &r)
        return Verdict(verdict), r.total_size, r.store_timestamp
    finally:
        region.unpin()


cdef int judge_record(const unsigned char* p, int64_t room, int64_t phy_offset, int check_crc,
                      RecordView* r) noexcept nogil:
    cdef int verdict = parse_record(p, room, r)
    if verdict != RECORD:
        return verdict
    if r.phy_offset != phy_offset:
        return BAD_PHY_OFFSET
    if check_crc:
        if not body_crc_ok(p, r):
            return BAD_BODY_CRC
        if not prop_crc_ok(p, r) or (check_crc > 1 and not has_prop_crc(p, r)):
            return BAD_PROP_CRC
    return RECORD


cdef enum:
    # How many records ahead of the one that is read its first lines are asked for, and the others; where records lie at
    # random places, each of their lines is a wait for memory of its own otherwise.
    HEAD_AHEAD = 16
    TAIL_AHEAD = 4
    # How many records ahead their first line alone is asked for, so many records in a row: finding a page in memory takes the
    # processor as long as a line does, and only requests that follow each other closely have it look for several at once.
    TOUCH_AHEAD = 48
    TOUCHED = 32
    # Bytes of a record that are asked for before its size is known: a whole one of usual size, as waiting for the size costs
    # more than asking in vain.  Of a long body the processor foresees the rest by itself.
    HEAD = 448
    STREAM_AHEAD = 2048
    FETCHED = 1024
    LINE = 64


cdef inline void prefetch_head(const unsigned char* p, int64_t room) noexcept nogil:
    cdef int64_t at = 0
    if room < HEAD:
        return
    while at < HEAD:
        prefetch(p + at)
        at += LINE


cdef inline void prefetch_tail(const unsigned char* p, int64_t room) noexcept nogil:
    # What lies behind the head, which was asked for before; its size is hostile, and a wrong one asks for lines in vain.
    cdef int64_t total, at = HEAD
    if room < BLANK_SIZE:
        return
    total = get_i32(p)
    if total > room:
        return
    while at < total and at < FETCHED:
        prefetch(p + at)
        at += LINE
    # A record does not begin with a line, so that its last bytes may lie in one more; topic and properties are there.
    if total > 0:
        prefetch(p + total - 1)
    if total > FETCHED:
        prefetch(p + total - 2 * LINE)
        prefetch(p + total - LINE)


cdef inline void prefetch_stream(const unsigned char* p, int64_t size, int64_t room) noexcept nogil:
    # For a loop that goes from record to record and has come to one of `size` bytes: as many bytes, some way ahead.  The
    # processor foresees a stream by itself only up to the end of a page.
    cdef int64_t at = STREAM_AHEAD, end = STREAM_AHEAD + (size if size < FETCHED else FETCHED)
    if end > room:
        return
    while at < end:
        prefetch(p + at)
        at += LINE


cdef inline void prefetch_places(unsigned char** bases, const int64_t* room, int64_t region_num, const int64_t[::1] base_offsets,
                                 const int32_t[::1] numbers, const int64_t[::1] phy_offsets, int64_t i) noexcept nogil:
    # For a loop over records at given places (`ArrowColumns.fill_at`) that has come to place i.
    cdef int64_t n = phy_offsets.shape[0], pos, k
    cdef int32_t number
    if i % TOUCHED == 0:
        for k in range(i + TOUCH_AHEAD if i > 0 else 0, min(i + TOUCH_AHEAD + TOUCHED, n)):
            number = numbers[k]
            if 0 <= number < region_num:
                pos = phy_offsets[k] - base_offsets[number]
                if 0 <= pos < room[number]:
                    prefetch(bases[number] + pos)
    if i + HEAD_AHEAD < n:
        number = numbers[i + HEAD_AHEAD]
        if 0 <= number < region_num:
            pos = phy_offsets[i + HEAD_AHEAD] - base_offsets[number]
            if 0 <= pos < room[number]:
                prefetch_head(bases[number] + pos, room[number] - pos)
    if i + TAIL_AHEAD < n:
        number = numbers[i + TAIL_AHEAD]
        if 0 <= number < region_num:
            pos = phy_offsets[i + TAIL_AHEAD] - base_offsets[number]
            if 0 <= pos < room[number]:
                prefetch_tail(bases[number] + pos, room[number] - pos)


cdef enum:
    # How many bytes a search goes on before it asks whether somebody wants it to stop.
    SEARCH_SLICE = 4 * 1024 * 1024
    # A sum is kept for every so many bytes.
    SUM_BLOCK = 4096


cdef class RecordSearch:
    """Looks for whole records in one segment, where it is not known at which place one begins.

    The headers of what might be records can be nested, thousands in the body of one, each with a CRC of its own over nearly
    all that follows.  The sums over the bytes that are common to them are computed once, so a search takes time in proportion
    to the bytes that it passes, and many searches with the same object do so together.  Bytes that changed since they were
    summed up are taken for what they were: whoever looks again at a segment that is written to makes a new object.

    Parameters
    ----------
    region : Region
        A commit-log segment.
    base_offset : int
        Absolute offset of its first byte.
    check_crc : int
        As of `decode_record`.
    """

    cdef readonly Region region
    cdef int64_t base_offset
    cdef int check_crc
    # The CRC of the bytes from `sums_begin` up to each multiple of SUM_BLOCK behind it; `sum_num` of them are known.
    cdef uint32_t[::1] sums
    cdef int64_t sums_begin, sum_num

    def __cinit__(self, Region region not None, int64_t base_offset, int check_crc=1):
        self.region, self.base_offset, self.check_crc = region, base_offset, check_crc
        self.sums = None
        self.sum_num = 0

    def find(self, int64_t pos, int64_t limit=-1):
        """int: position of the first whole record at or after `pos` (magic, lengths, own offset, CRC), -1 if none.

        Its magic lies before `limit` (-1 = the end of the segment); the record may go on after that, as it may end with zeros.
        A signal that came meanwhile is handled every 4 MiB, so Ctrl-C ends a long search.
        """
        cdef Region region = self.region
        if limit < 0 or limit > region.size:
            limit = region.size
        if pos + RECORD_MAGIC >= limit and 0 <= pos <= region.size and not region.closed:
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
        # The first whole record that begins at or after `at` and before `stop`, -1 if there is none.
        cdef const unsigned char* found
        cdef RecordView r
        while at < stop:
            # The magic's first byte lies four bytes into the record.
            found = <const unsigned char*>memchr(base + at + RECORD_MAGIC, 0xDA, stop - at)
            if found == NULL:
                return -1
            at = found - base - RECORD_MAGIC
            if (judge_record(base + at, self.region.size - at, self.base_offset + at, 0, &r) == RECORD
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
    """int: as `RecordSearch.find`, for one search in a segment."""
    return RecordSearch(region, base_offset, check_crc).find(pos, limit)


cpdef enum KeyKind:
    # Which text of a record is compared with the one that is looked for.
    ANY_KEY = 0     # the unique key, or a piece of KEYS
    TAG = 1         # the whole TAGS value
    UNIQUE_KEY = 2
    KEYS_ONLY = 3


cdef bint has_key(const unsigned char* p, RecordView* r, const unsigned char* topic, Py_ssize_t topic_len,
                  const unsigned char* wanted, Py_ssize_t n, int kind) noexcept nogil:
    # KEYS is cut at single spaces; an empty piece is none.
    cdef KnownProperties k
    cdef const unsigned char* text = p + r.properties_pos
    cdef int32_t start = 0, end
    if r.topic_len != topic_len or memcmp(p + r.topic_pos, topic, topic_len) != 0:
        return False
    find_properties(text, r.properties_len, r.properties_len, &k)
    if kind == TAG:
        return k.indexed.tags_pos >= 0 and k.indexed.tags_len == n and memcmp(text + k.indexed.tags_pos, wanted, n) == 0
    if (kind != KEYS_ONLY and k.indexed.unique_key_pos >= 0 and k.indexed.unique_key_len == n
            and memcmp(text + k.indexed.unique_key_pos, wanted, n) == 0):
        return True
    if kind == UNIQUE_KEY or k.indexed.keys_pos < 0 or n == 0:
        return False
    while start <= k.indexed.keys_len:
        end = start
        while end < k.indexed.keys_len and text[k.indexed.keys_pos + end] != 32:
            end += 1
        if end - start == n and memcmp(text + k.indexed.keys_pos + start, wanted, n) == 0:
            return True
        start = end + 1
    return False


def record_matches(Region region not None, int64_t pos, int64_t phy_offset, bytes topic not None, bytes key not None,
                   bint by_tag=False):
    """Tell whether the record at `pos` has this topic and key, without decoding it.

    Parameters
    ----------
    phy_offset : int
        What the record must say of its own place.
    topic, key : bytes
        UTF-8.
    by_tag : bool
        Compare the whole TAGS value instead of the unique key and the pieces of KEYS (split at single spaces).

    Returns
    -------
    (bool, int)
        Whether it matches, and its store timestamp (ms since epoch; 0 where no record lies).
    """
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, region.size - pos)
    try:
        if judge_record(p, region.size - pos, phy_offset, 0, &r) != RECORD:
            return False, 0
        return has_key(p, &r, <const unsigned char*>PyBytes_AS_STRING(topic), PyBytes_GET_SIZE(topic),
                       <const unsigned char*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key),
                       TAG if by_tag else ANY_KEY), r.store_timestamp
    finally:
        region.unpin()


def record_size(int64_t topic_size, int64_t body_size, int64_t properties_size, int sys_flag, int version):
    """int: total size in bytes of a record with these parts (properties with everything that is appended to them)."""
    return (RECORD_FIXED_SIZE + topic_size + body_size + properties_size + (RECORD_HOST_V6_EXTRA if sys_flag & SYS_BORN_V6 else 0)
            + (RECORD_HOST_V6_EXTRA if sys_flag & SYS_STORE_V6 else 0) + (1 if version == 2 else 0))


cdef struct RecordParts:
    # What is to be encoded; the pointers are into bytes objects that the caller's list keeps alive, never into a file.
    const unsigned char* topic
    const unsigned char* body
    const unsigned char* properties
    const unsigned char* born_host
    const unsigned char* store_host
    int32_t topic_len, body_len, properties_len, born_host_len, store_host_len
    int32_t queue_id, flag, sys_flag, reconsume_times, version
    int64_t queue_offset, born_timestamp, store_timestamp, prepared_transaction_offset


cdef int64_t encoded_properties_len(RecordParts* parts) noexcept nogil:
    # With the property CRC and the separator that it may need.
    cdef bint separator = parts.properties_len > 0 and parts.properties[parts.properties_len - 1] != 2
    return parts.properties_len + PROP_CRC_SIZE + separator


cdef inline int64_t encoded_size(RecordParts* parts, bint prop_crc) noexcept nogil:
    return (RECORD_FIXED_SIZE - 16 + parts.born_host_len + parts.store_host_len + parts.body_len + parts.topic_len
            + (encoded_properties_len(parts) if prop_crc else parts.properties_len) + (1 if parts.version == 2 else 0))


cdef inline void copy_host(unsigned char* to, const unsigned char* host, int32_t n) noexcept nogil:
    # Nearly every host is of eight bytes, which are one load and one store.
    if n == 8:
        memcpy(to, host, 8)
    else:
        memcpy(to, host, n)


cdef void encode_into(unsigned char* p, int64_t total, int64_t phy_offset, RecordParts* parts, bint prop_crc) noexcept nogil:
    # The size and the magic are written last: until then a reader sees an unwritten place (I6).
    cdef int64_t at = RECORD_BORN_HOST
    cdef uint32_t crc
    cdef int32_t i, properties_len = <int32_t>(
        total - (RECORD_FIXED_SIZE - 16 + parts.born_host_len + parts.store_host_len + parts.body_len + parts.topic_len
                 + (1 if parts.version == 2 else 0)))
    put_i32(p + RECORD_BODY_CRC, <int32_t>(crc32_update(0, parts.body, parts.body_len) & 0x7FFFFFFFu))
    put_i32(p + RECORD_QUEUE_ID, parts.queue_id)
    put_i32(p + RECORD_FLAG, parts.flag)
    put_i64(p + RECORD_QUEUE_OFFSET, parts.queue_offset)
    put_i64(p + RECORD_PHY_OFFSET, phy_offset)
    put_i32(p + RECORD_SYS_FLAG, parts.sys_flag)
    put_i64(p + RECORD_BORN_TIMESTAMP, parts.born_timestamp)
    copy_host(p + at, parts.born_host, parts.born_host_len)
    at += parts.born_host_len
    put_i64(p + at, parts.store_timestamp)
    at += 8
    copy_host(p + at, parts.store_host, parts.store_host_len)
    at += parts.store_host_len
    put_i32(p + at, parts.reconsume_times)
    put_i64(p + at + 4, parts.prepared_transaction_offset)
    put_i32(p + at + 12, parts.body_len)
    at += 16
    memcpy(p + at, parts.body, parts.body_len)
    at += parts.body_len
    if parts.version == 2:
        put_i16(p + at, <int16_t>parts.topic_len)
        at += 2
    else:
        p[at] = <unsigned char>parts.topic_len
        at += 1
    memcpy(p + at, parts.topic, parts.topic_len)
    at += parts.topic_len
    put_i16(p + at, <int16_t>properties_len)
    at += 2
    memcpy(p + at, parts.properties, parts.properties_len)
    at += parts.properties_len
    if prop_crc:
        if total - at > PROP_CRC_SIZE:
            p[at] = 2
            at += 1
        memcpy(p + at, <const char*>b"__CRC32#\x01", 9)
        # The CRC covers the size and the magic, which a reader may not see yet: it is computed with them beside.
        crc = crc_of_unpublished(p, total - PROP_CRC_SIZE, <int32_t>total,
                                 C_MAGIC_V2 if parts.version == 2 else C_MAGIC_V1) & 0x7FFFFFFFu
        for i in range(10):
            p[at + 9 + i] = <unsigned char>(48 + crc % 10)
            crc //= 10
        p[at + 19] = 2
        at += PROP_CRC_SIZE
    check(at == total)
    # Old bytes of a truncated log must not be taken for the next record (RocketMQ issue 10666).
    if get_i64(p + total) != 0:
        put_i64(p + total, 0)
    release_fence()
    put_i32(p + RECORD_MAGIC, C_MAGIC_V2 if parts.version == 2 else C_MAGIC_V1)
    release_fence()
    put_i32(p, <int32_t>total)


cdef uint32_t crc_of_unpublished(const unsigned char* p, int64_t n, int32_t total, int32_t magic) noexcept nogil:
    cdef unsigned char[8] head
    put_i32(head, total)
    put_i32(head + 4, magic)
    return crc32_update(crc32_update(0, head, 8), p + 8, n - 8)


cdef int fill_parts(object row, RecordParts* parts, bint prop_crc) except -1:
    if type(row) is not tuple or len(row) != 14:
        raise TypeError("a row is a tuple of fourteen")
    for part in row[:5]:
        if type(part) is not bytes:
            raise TypeError("topic, body, properties and hosts are bytes")
    cdef bytes topic = row[0], body = row[1], properties = row[2], born_host = row[3], store_host = row[4]
    if prop_crc and PyBytes_GET_SIZE(properties) + PROP_CRC_SIZE + 1 > 0x7FFF and (
            PyBytes_GET_SIZE(properties) + PROP_CRC_SIZE + (0 if properties.endswith(b"\x02") else 1) > 0x7FFF):
        raise ValueError("the properties and their CRC are longer than 32767 bytes")
    if PyBytes_GET_SIZE(topic) > 0x7FFF or PyBytes_GET_SIZE(properties) > 0x7FFF:
        raise ValueError("topic or properties are longer than 32767 bytes")
    if PyBytes_GET_SIZE(body) > 0x7FFFFFFF - 0x20000:
        raise ValueError("the body does not fit a record")
    if PyBytes_GET_SIZE(born_host) not in (8, 20) or PyBytes_GET_SIZE(store_host) not in (8, 20):
        raise ValueError("a host is 4 or 16 address bytes and a 4-byte port")
    parts.topic = <const unsigned char*>PyBytes_AS_STRING(topic)
    parts.topic_len = <int32_t>PyBytes_GET_SIZE(topic)
    parts.body = <const unsigned char*>PyBytes_AS_STRING(body)
    parts.body_len = <int32_t>PyBytes_GET_SIZE(body)
    parts.properties = <const unsigned char*>PyBytes_AS_STRING(properties)
    parts.properties_len = <int32_t>PyBytes_GET_SIZE(properties)
    if prop_crc and encoded_properties_len(parts) > 0x7FFF:
        raise ValueError("the properties and their CRC are longer than 32767 bytes")
    parts.born_host = <const unsigned char*>PyBytes_AS_STRING(born_host)
    parts.born_host_len = <int32_t>PyBytes_GET_SIZE(born_host)
    parts.store_host = <const unsigned char*>PyBytes_AS_STRING(store_host)
    parts.store_host_len = <int32_t>PyBytes_GET_SIZE(store_host)
    parts.queue_id = row[5]
    parts.flag = row[6]
    parts.sys_flag = row[7] & ~(SYS_BORN_V6 | SYS_STORE_V6)
    if parts.born_host_len == 20:
        parts.sys_flag |= SYS_BORN_V6
    if parts.store_host_len == 20:
        parts.sys_flag |= SYS_STORE_V6
    parts.reconsume_times = row[8]
    parts.version = row[9]
    if parts.version != 1 and parts.version != 2:
        raise ValueError(f"version {row[9]}; a record has version 1 or 2")
    parts.queue_offset = row[10]
    parts.born_timestamp = row[11]
    parts.store_timestamp = row[12]
    parts.prepared_transaction_offset = row[13]
    if parts.version == 1 and parts.topic_len > 127:
        raise ValueError("a topic above 127 bytes needs version 2")
    return 0


cdef enum:
    ENCODE_ROUND = 64


def encode_records(Region region not None, int64_t pos, int64_t base_offset, list rows not None, int64_t first=0,
                   bint prop_crc=False):
    """Encode records one behind the other into a segment, as many as fit with 8 bytes left behind each.

    Parameters
    ----------
    region : Region
        A writable segment.
    pos : int
        Where the first one goes.
    base_offset : int
        Absolute offset of the segment's first byte.
    rows : list of tuple
        (topic, body, properties, born_host, store_host: bytes; queue_id, flag, sys_flag, reconsume_times, version,
        queue_offset, born_timestamp, store_timestamp, prepared_transaction_offset: int).
    first : int
        Row to begin with.
    prop_crc : bool
        Append the property CRC (enabledAppendPropCRC).

    Returns
    -------
    list of int
        The total sizes of the records written.
    """
    cdef RecordParts[ENCODE_ROUND] parts
    cdef int64_t[ENCODE_ROUND] sizes
    cdef Py_ssize_t n, i, done, num = len(rows)
    cdef bint full = False
    cdef int64_t start = pos
    cdef list out = [], held
    if first < 0:
        raise ValueError(f"first is {first}")
    cdef unsigned char* p = region.pin_writable(pos, region.size - pos)
    try:
        while first < num and not full:
            n = num - first if num - first < ENCODE_ROUND else ENCODE_ROUND
            # The rows of this round are held here: the caller's list may change while they are read.
            held = rows[first:first + n]
            n = len(held)
            if n == 0:
                break
            for i in range(n):
                fill_parts(held[i], &parts[i], prop_crc)
            done = 0
            with nogil:
                while done < n:
                    sizes[done] = encoded_size(&parts[done], prop_crc)
                    if sizes[done] + BLANK_SIZE > region.size - pos:
                        full = True
                        break
                    encode_into(p + (pos - start), sizes[done], base_offset + pos, &parts[done], prop_crc)
                    pos += sizes[done]
                    done += 1
            for i in range(done):
                out.append(sizes[i])
            first += done
        return out
    finally:
        region.unpin()


def write_blank(Region region not None, int64_t pos):
    """Close a segment: write the blank record (the remaining length and its magic) at `pos`; the rest stays as it is."""
    if region.size - pos < BLANK_SIZE and not region.closed:
        raise OffsetOutOfRangeError(f"a blank record needs {BLANK_SIZE} bytes, {region.size - pos} are left", pos=pos)
    cdef unsigned char* p = region.pin_writable(pos, BLANK_SIZE)
    try:
        put_i32(p + RECORD_MAGIC, C_MAGIC_BLANK)
        release_fence()
        put_i32(p, <int32_t>(region.size - pos))
    finally:
        region.unpin()


# ------------------------------------------------------------------------------------------- records as columns

@cython.final
@cython.no_gc_clear
cdef class TopicTable:
    """Topics and queues seen by a scan, numbered in order of appearance.

    Attributes
    ----------
    topics : list of bytes
        UTF-8 as stored.
    queues : list of (int, int)
        Number of the topic, queue id.
    """

    cdef readonly list topics, queues
    cdef uint8_t[::1] arena
    cdef int64_t[::1] starts
    cdef int32_t[::1] slots
    cdef int64_t mask
    cdef int32_t num
    cdef int64_t[::1] queue_codes
    cdef int32_t[::1] queue_slots
    cdef int64_t queue_mask
    cdef int32_t queue_num

    def __cinit__(self):
        self.topics, self.queues = [], []
        self.queue_codes = np.zeros(32, np.int64)
        self.queue_slots = np.zeros(64, np.int32)
        self.queue_mask = 63
        self.queue_num = 0
        self.arena = np.zeros(1, np.uint8)
        self.starts = np.zeros(1, np.int64)
        self.slots = np.zeros(64, np.int32)
        self.mask = 63
        self.num = 0

    cdef int32_t look_up(self, uint32_t h, const unsigned char* p, int32_t n) noexcept nogil:
        cdef int64_t at = h & self.mask
        cdef int32_t number
        while self.slots[at] > 0:
            number = self.slots[at] - 1
            if (self.starts[number + 1] - self.starts[number] == n
                    and memcmp(&self.arena[0] + self.starts[number], p, n) == 0):
                return number
            at = (at + 1) & self.mask
        return -1

    def add(self, bytes topic not None):
        """int: the number of `topic`, which is added if it is new."""
        cdef const unsigned char* p = <const unsigned char*>PyBytes_AS_STRING(topic)
        cdef int64_t n = PyBytes_GET_SIZE(topic), used = self.starts[self.num]
        cdef uint32_t h = hash_utf8(0, p, n)
        cdef int32_t number = self.look_up(h, p, <int32_t>n)
        if number >= 0:
            return number
        # Everything grows by doubling, so that many topics take time in proportion to their number.
        if used + n + 1 > self.arena.shape[0]:
            self.arena = np.concatenate([self.arena, np.zeros(self.arena.shape[0] + n + 1, np.uint8)])
        if self.num + 2 > self.starts.shape[0]:
            self.starts = np.concatenate([self.starts, np.zeros(self.starts.shape[0] + 1, np.int64)])
        memcpy(&self.arena[used], p, n)
        self.starts[self.num + 1] = used + n
        self.topics.append(topic)
        self.num += 1
        if self.num * 2 > self.mask + 1:
            self.mask = (self.mask + 1) * 4 - 1
            self.slots = np.zeros(self.mask + 1, np.int32)
            for number in range(self.num - 1):
                self.enter(hash_utf8(0, &self.arena[self.starts[number]],
                                     self.starts[number + 1] - self.starts[number]), number)
        self.enter(h, self.num - 1)
        return self.num - 1

    cdef void enter(self, uint32_t h, int32_t number) noexcept:
        cdef int64_t at = h & self.mask
        while self.slots[at] > 0:
            at = (at + 1) & self.mask
        self.slots[at] = number + 1

    cdef int32_t look_up_queue(self, int32_t topic, int32_t queue_id) noexcept nogil:
        cdef int64_t code = queue_code(topic, queue_id)
        cdef int64_t at = queue_hash(code) & self.queue_mask
        cdef int32_t number
        while self.queue_slots[at] > 0:
            number = self.queue_slots[at] - 1
            if self.queue_codes[number] == code:
                return number
            at = (at + 1) & self.queue_mask
        return -1

    cpdef int32_t add_queue(self, int32_t topic, int32_t queue_id) except -1:
        """int: the number of the queue `queue_id` of topic number `topic`, which is added if it is new."""
        if not 0 <= topic < self.num:
            raise ValueError(f"topic {topic} of {self.num}")
        cdef int32_t number = self.look_up_queue(topic, queue_id)
        if number >= 0:
            return number
        if self.queue_num >= self.queue_codes.shape[0]:
            self.queue_codes = np.concatenate([self.queue_codes, np.zeros(self.queue_codes.shape[0], np.int64)])
        self.queue_codes[self.queue_num] = queue_code(topic, queue_id)
        self.queues.append((topic, queue_id))
        self.queue_num += 1
        if self.queue_num * 2 > self.queue_mask + 1:
            self.queue_mask = (self.queue_mask + 1) * 4 - 1
            self.queue_slots = np.zeros(self.queue_mask + 1, np.int32)
            for number in range(self.queue_num - 1):
                self.enter_queue(number)
        self.enter_queue(self.queue_num - 1)
        return self.queue_num - 1

    cdef void enter_queue(self, int32_t number) noexcept:
        cdef int64_t at = queue_hash(self.queue_codes[number]) & self.queue_mask
        while self.queue_slots[at] > 0:
            at = (at + 1) & self.queue_mask
        self.queue_slots[at] = number + 1


cdef inline int64_t queue_code(int32_t topic, int32_t queue_id) noexcept nogil:
    return <int64_t>(<uint64_t>topic << 32 | <uint64_t>(<uint32_t>queue_id))


cdef inline int64_t queue_hash(int64_t code) noexcept nogil:
    return <int64_t>((<uint64_t>code * 0x9E3779B97F4A7C15u) >> 33)


@cython.no_gc_clear
cdef class RecordColumns:
    """What dispatching needs of a run of records, as NumPy columns that are filled again and again.

    Attributes
    ----------
    phy_offset, queue_offset, store_timestamp, tags_code, inner_base : numpy.ndarray of int64, shape (capacity,)
    size, queue_id, sys_flag, topic, queue, inner_num : numpy.ndarray of int32, shape (capacity,)
        `topic` numbers `topics.topics`, `queue` numbers `topics.queues`; `inner_num` is 1 unless the record is an inner batch, of which it is the number of
        messages; 0 where that is missing or not within 1 to 32767, what a unit has room for.
    multi_dispatch, prop_crc : numpy.ndarray of uint8, shape (capacity,)
        1 where the record carries INNER_MULTI_DISPATCH; 1 where it ends with a property CRC.
    key_start : numpy.ndarray of int64, shape (capacity + 1,)
        The index hashes of record i are ``key_hash[key_start[i]:key_start[i + 1]]``, in the order in which RocketMQ
        5.5.0 indexes them: unique key, pieces of KEYS, tag.
    count : int
        Rows that the last scan filled.
    """

    cdef readonly TopicTable topics
    cdef readonly int64_t capacity
    cdef public int64_t count
    cdef readonly object phy_offset, size, queue_id, queue_offset, sys_flag, store_timestamp, tags_code, topic, queue
    cdef readonly object inner_base, inner_num, multi_dispatch, prop_crc, key_start, key_hash
    cdef int64_t[::1] c_phy_offset, c_queue_offset, c_store_timestamp, c_tags_code, c_inner_base, c_key_start
    cdef int32_t[::1] c_size, c_queue_id, c_sys_flag, c_topic, c_queue, c_inner_num, c_key_hash
    cdef uint8_t[::1] c_multi_dispatch, c_prop_crc

    def __cinit__(self, int64_t capacity=8192, TopicTable topics=None):
        if not 1 <= capacity <= 1 << 32:
            raise ValueError(f"capacity {capacity}; give 1 to 2**32 rows")
        self.topics = TopicTable() if topics is None else topics
        self.capacity = capacity
        self.phy_offset, self.queue_offset, self.store_timestamp, self.tags_code, self.inner_base = (
            np.zeros(capacity, np.int64) for _ in range(5))
        self.size, self.queue_id, self.sys_flag, self.topic, self.queue, self.inner_num = (
            np.zeros(capacity, np.int32) for _ in range(6))
        self.multi_dispatch, self.prop_crc = np.zeros(capacity, np.uint8), np.zeros(capacity, np.uint8)
        self.key_start = np.zeros(capacity + 1, np.int64)
        self.key_hash = np.zeros(capacity * 4 + 64, np.int32)
        self.c_phy_offset, self.c_queue_offset = self.phy_offset, self.queue_offset
        self.c_store_timestamp, self.c_tags_code = self.store_timestamp, self.tags_code
        self.c_inner_base, self.c_key_start = self.inner_base, self.key_start
        self.c_size, self.c_queue_id, self.c_sys_flag = self.size, self.queue_id, self.sys_flag
        self.c_topic, self.c_queue = self.topic, self.queue
        self.c_inner_num, self.c_key_hash = self.inner_num, self.key_hash
        self.c_multi_dispatch, self.c_prop_crc = self.multi_dispatch, self.prop_crc

    def grow_keys(self):
        """Double the room for index hashes."""
        self.key_hash = np.concatenate([self.key_hash, np.zeros_like(self.key_hash)])
        self.c_key_hash = self.key_hash

    def by_queue(self, const uint8_t[::1] chosen not None):
        """Put rows of the same queue together.

        Parameters
        ----------
        chosen : array of uint8 or bool, shape (count,)
            Which rows take part.

        Returns
        -------
        (list of (int, int, int), numpy.ndarray of int64)
            For each queue, in order of its number in `topics.queues`: the number, and where its rows begin and end in the
            second value, which holds the numbers of the chosen rows; within a queue they keep their order.
        """
        cdef int64_t n = self.count, i, at, queue_num = self.topics.queue_num
        cdef int32_t queue
        if n < 0 or n > self.capacity or chosen.shape[0] != n:
            raise ValueError(f"{chosen.shape[0]} marks for {n} rows of {self.capacity}")
        starts_array = np.zeros(queue_num + 1, np.int64)
        order_array = np.empty(n, np.int64)
        cdef int64_t[::1] starts = starts_array
        cdef int64_t[::1] order = order_array
        cdef list groups = []
        # A counting sort, over in no time; the column is open to everybody, so its numbers are checked.
        for i in range(n):
            queue = self.c_queue[i]
            if chosen[i] and 0 <= queue < queue_num:
                starts[queue] += 1
        at = 0
        for i in range(queue_num):
            at += starts[i]
            starts[i] = at
        starts[queue_num] = at
        for i in range(n - 1, -1, -1):
            queue = self.c_queue[i]
            if chosen[i] and 0 <= queue < queue_num:
                starts[queue] -= 1
                order[starts[queue]] = i
        for i in range(queue_num):
            if starts[i + 1] > starts[i]:
                groups.append((i, starts[i], starts[i + 1]))
        return groups, order_array[:at]

    def queued(self):
        """Which records get a unit in a queue: all but prepared and rolled back transactional ones.

        Returns
        -------
        (numpy.ndarray of uint8, bool)
            Of shape (count,); and whether one of them may be an inner batch or names further queues.
        """
        cdef int64_t i
        cdef bint odd = False
        chosen_array = np.empty(self.count, np.uint8)
        cdef uint8_t[::1] chosen = chosen_array
        for i in range(self.count):
            chosen[i] = (self.c_sys_flag[i] & SYS_TRANSACTION_MASK) != SYS_PREPARED and (
                self.c_sys_flag[i] & SYS_TRANSACTION_MASK) != SYS_ROLLBACK
            if chosen[i] and (self.c_sys_flag[i] & SYS_INNER_BATCH or self.c_multi_dispatch[i]):
                odd = True
        return chosen_array, odd

    def units(self, const int64_t[::1] rows not None):
        """What the units of these rows are made of.

        Returns
        -------
        tuple of numpy.ndarray
            phy_offset int64, size int32, tags_code int64, store_timestamp int64, one for each row.

        Raises
        ------
        OffsetOutOfRangeError
            A row that there is not.
        """
        cdef int64_t n = rows.shape[0], i, row
        phy_array, size_array = np.empty(n, np.int64), np.empty(n, np.int32)
        tags_array, time_array = np.empty(n, np.int64), np.empty(n, np.int64)
        cdef int64_t[::1] phy_offset = phy_array, tags_code = tags_array, store_timestamp = time_array
        cdef int32_t[::1] size = size_array
        for i in range(n):
            row = rows[i]
            if not 0 <= row < self.capacity:
                raise OffsetOutOfRangeError(f"row {row} of {self.capacity}")
            phy_offset[i], size[i] = self.c_phy_offset[row], self.c_size[row]
            tags_code[i], store_timestamp[i] = self.c_tags_code[row], self.c_store_timestamp[row]
        return phy_array, size_array, tags_array, time_array

    def key_records(self, int64_t begin, int64_t end):
        """(int64 array, int64 array): phy_offset and store_timestamp of the record of each key hash from `begin` to before `end`.

        Raises
        ------
        OffsetOutOfRangeError
            There are not so many key hashes.
        """
        cdef int64_t i, at
        if not 0 <= begin <= end <= self.key_hash.shape[0]:
            raise OffsetOutOfRangeError(f"key hashes {begin} to {end} of {self.key_hash.shape[0]}")
        # Not np.zeros, which lets go of the GIL.
        phy_array, time_array = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        cdef int64_t[::1] phy_offset = phy_array, store_timestamp = time_array
        for at in range(end - begin):
            phy_offset[at] = store_timestamp[at] = 0
        for i in range(self.count):
            for at in range(max(self.c_key_start[i], begin), min(self.c_key_start[i + 1], end)):
                phy_offset[at - begin], store_timestamp[at - begin] = self.c_phy_offset[i], self.c_store_timestamp[i]
        return phy_array, time_array

    def run_length(self, const int64_t[::1] rows not None):
        """int: how many of these rows, from the first on, have queue offsets that go on by one."""
        cdef int64_t n = rows.shape[0], i, first
        for i in range(n):
            if not 0 <= rows[i] < self.capacity:
                raise OffsetOutOfRangeError(f"row {rows[i]} of {self.capacity}")
        if n == 0:
            return 0
        first = self.c_queue_offset[rows[0]]
        i = 1
        while i < n and self.c_queue_offset[rows[i]] - i == first:
            i += 1
        return i


cdef enum:
    # A unit of a batch queue has 16 bits for the number of its messages.
    MAX_INNER_NUM = 0x7FFF


cdef enum:
    # Inner answers of scan_rows beside the verdicts.
    NEED_TOPIC = 100
    NEED_KEY_ROOM = 101


cdef int64_t put_key_hashes(int32_t* out, int64_t at, int64_t room, uint32_t topic_hash, const unsigned char* text,
                            IndexedProperties* k, bint index_tags, int64_t* tags_code) noexcept nogil:
    # The index hashes of one record from `at` on, in RocketMQ's order, and where they end; -1 when they do not fit.  The tags
    # code comes with them.
    cdef uint32_t h = topic_hash * 31u + 35u, tags = 0
    cdef int64_t start, end, stop
    cdef const unsigned char* found
    cdef bint joined
    tags_code[0] = 0
    if k.unique_key_pos >= 0:
        if at >= room:
            return -1
        out[at] = index_hash(hash_utf8(h, text + k.unique_key_pos, k.unique_key_len))
        at += 1
    if k.keys_pos >= 0:
        start, stop = k.keys_pos, <int64_t>k.keys_pos + k.keys_len
        while start < stop:
            found = <const unsigned char*>memchr(text + start, 32, stop - start)
            end = found - text if found != NULL else stop
            if end > start:
                if at >= room:
                    return -1
                out[at] = index_hash(hash_utf8(h, text + start, end - start))
                at += 1
            start = end + 1
    if k.tags_pos >= 0:
        # Tags are hashed alone and behind the topic; the second follows from the first where they are short and ASCII.
        joined = k.tags_len <= JOINED_UNITS and hash_ascii(&tags, text + k.tags_pos, k.tags_len)
        if not joined:
            tags = hash_utf8(0, text + k.tags_pos, k.tags_len)
        tags_code[0] = <int32_t>tags
        if index_tags:
            if at >= room:
                return -1
            h = (h * 31u + 84u) * 31u + 35u  # topic#T#tags
            out[at] = index_hash(hash_joined(h, tags, k.tags_len) if joined
                                 else hash_utf8(h, text + k.tags_pos, k.tags_len))
            at += 1
    return at


cdef int scan_rows(const unsigned char* base, int64_t* pos, int64_t size, int64_t limit, int64_t base_offset,
                   RecordColumns out, const int64_t* delays, int64_t delay_num, int check_crc,
                   bint index_tags, bint keys, RecordView* unknown) noexcept nogil:
    # `unknown` becomes the record whose topic or queue has no number yet (NEED_TOPIC).  It is not parsed a second time: its
    # writer, or whoever damages the file, may have changed it by then.
    cdef RecordView r
    cdef KnownProperties k
    cdef int64_t i, at, code
    cdef int verdict
    cdef int32_t topic = -1, queue = -1, topic_len = -1, queue_id = 0
    cdef uint32_t topic_hash = 0
    cdef const unsigned char* p
    cdef const unsigned char* topic_text = NULL
    while True:
        i = out.count
        if i >= out.capacity:
            return COLUMNS_FULL
        if pos[0] >= limit:
            return LIMIT
        p = base + pos[0]
        verdict = judge_record(p, size - pos[0], base_offset + pos[0], check_crc, &r)
        if verdict != RECORD:
            return verdict
        prefetch_stream(p, r.total_size, size - pos[0])
        # Records of one queue come in runs, those of one topic in longer ones.
        if r.topic_len != topic_len or memcmp(topic_text, p + r.topic_pos, topic_len) != 0:
            topic_text, topic_len = p + r.topic_pos, r.topic_len
            topic_hash = hash_utf8(0, topic_text, topic_len)
            topic = out.topics.look_up(topic_hash, topic_text, topic_len)
            queue = -1
        if queue < 0 or r.queue_id != queue_id:
            queue_id = r.queue_id
            queue = out.topics.look_up_queue(topic, queue_id) if topic >= 0 else -1
            if queue < 0:
                unknown[0] = r
                return NEED_TOPIC
        find_properties(p + r.properties_pos, r.properties_len, size - pos[0] - r.properties_pos, &k)
        at = out.c_key_start[i]
        if keys and r.sys_flag & SYS_TRANSACTION_MASK != SYS_ROLLBACK:
            at = put_key_hashes(&out.c_key_hash[0], at, out.c_key_hash.shape[0], topic_hash, p + r.properties_pos,
                                &k.indexed, index_tags, &code)
            if at < 0:
                return NEED_KEY_ROOM
        else:
            code = tags_code_in(p + r.properties_pos, &k.indexed)
        out.c_key_start[i + 1] = at
        out.c_phy_offset[i] = base_offset + pos[0]
        out.c_size[i] = r.total_size
        out.c_queue_id[i] = r.queue_id
        out.c_queue_offset[i] = r.queue_offset
        out.c_sys_flag[i] = r.sys_flag
        out.c_store_timestamp[i] = r.store_timestamp
        out.c_tags_code[i] = unit_code_of(p, &r, &k, code, delays, delay_num)
        out.c_topic[i] = topic
        out.c_queue[i] = queue
        out.c_multi_dispatch[i] = k.multi_dispatch_pos >= 0
        out.c_prop_crc[i] = has_prop_crc(p, &r)
        out.c_inner_num[i] = 1
        out.c_inner_base[i] = r.queue_offset
        if r.sys_flag & SYS_INNER_BATCH:
            out.c_inner_num[i] = 0
            if k.inner_num_pos >= 0:
                code = parse_decimal(p + r.properties_pos + k.inner_num_pos, k.inner_num_len, 0)
                if 0 < code <= MAX_INNER_NUM:
                    out.c_inner_num[i] = <int32_t>code
            if k.inner_base_pos >= 0:
                out.c_inner_base[i] = parse_decimal(p + r.properties_pos + k.inner_base_pos, k.inner_base_len,
                                                    r.queue_offset)
        out.count = i + 1
        pos[0] += r.total_size


def scan(Region region not None, int64_t pos, int64_t limit, int64_t base_offset, RecordColumns out not None,
         const int64_t[::1] delays not None, int check_crc=1, bint index_tags=True, bint keys=True):
    """Fill `out` with the records from `pos` on.

    Parameters
    ----------
    region : Region
        A commit-log segment.
    pos, limit : int
        Where to begin and where to stop, positions in the segment.
    base_offset : int
        Absolute offset of the segment's first byte; a record that says otherwise ends the scan.
    out : RecordColumns
        Filled from row 0.
    delays : array of int64
        Delay in ms of level 1, 2, … for the tags codes of ``SCHEDULE_TOPIC_XXXX``.
    check_crc : int
        As of `decode_record`; a record that fails ends the scan.
    index_tags : bool
        Whether tags are indexed (RocketMQ 5.4.0 and later).
    keys : bool
        Compute index hashes; without them the columns say that no record has any.

    Returns
    -------
    (int, Verdict)
        The position after the last row and why the scan ended there.
    """
    if limit > region.size:
        limit = region.size
    cdef unsigned char* base = region.pin(0, region.size)
    cdef int verdict
    cdef int64_t at = pos
    cdef int64_t delay_num = delays.shape[0]
    cdef const int64_t* delay_at = &delays[0] if delay_num else NULL
    cdef RecordView r
    cdef PyThreadState* state
    out.count = 0
    try:
        if pos < 0 or pos > region.size:
            raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
        out.c_key_start[0] = 0
        while True:
            state = let_others_run((limit - at) // COPIED_BYTES)
            verdict = scan_rows(base, &at, region.size, limit, base_offset, out, delay_at, delay_num, check_crc,
                                index_tags, keys, &r)
            go_on(state)
            if verdict == NEED_TOPIC:
                out.topics.add_queue(
                    out.topics.add(PyBytes_FromStringAndSize(<char*>base + at + r.topic_pos, r.topic_len)), r.queue_id)
            elif verdict == NEED_KEY_ROOM:
                out.grow_keys()
            else:
                return at, Verdict(verdict)
    finally:
        region.unpin()


def walk(Region region not None, int64_t pos, int64_t limit, int64_t base_offset, int check_crc=0,
         int64_t max_num=INT64_MAX):
    """Step over whole records without looking inside, at most `max_num` of them.

    Returns
    -------
    (int, Verdict, int, int)
        The position of what ended the walk, the verdict on it, how many records were passed, and the position of the
        last of them (-1 if none).
    """
    if limit > region.size:
        limit = region.size
    cdef unsigned char* base = region.pin(0, region.size)
    cdef RecordView r
    cdef int verdict = LIMIT
    cdef int64_t num = 0, last = -1
    try:
        if pos < 0 or pos > region.size:
            raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
        with nogil:
            while pos < limit and num < max_num:
                verdict = judge_record(base + pos, region.size - pos, base_offset + pos, check_crc, &r)
                if verdict != RECORD:
                    break
                prefetch_stream(base + pos, r.total_size, region.size - pos)
                last = pos
                pos += r.total_size
                num += 1
                verdict = LIMIT
        return pos, Verdict(verdict), num, last
    finally:
        region.unpin()


# ------------------------------------------------------------------------------------------------------- appending

cdef class MessageFields:
    """What a message to put consists of; `rmqstore.Message` is this with its rules."""

    cdef public object topic, body, properties, flag, born_timestamp, born_host, sys_flag, reconsume_times
    cdef public object prepared_transaction_offset, store_host


cdef int64_t clamped(offset) except? -1:
    # -1, where nothing lies, for a number of more than 64 bits.
    try:
        return offset
    except OverflowError:
        return -1


cdef class FileStream:
    """Where a stream of files ends, and its file that was asked for last; `MappedFileQueue` is this with the files.

    Attributes
    ----------
    wrote_where : int
        Offset behind the last byte of the stream.
    file_offsets : list of int
        Where the files begin, ascending; another list as soon as one of them leaves.
    """

    cdef public int64_t wrote_where
    cdef public list file_offsets
    cdef Region found
    cdef list found_among
    cdef int64_t found_base

    def remember(self, Region region not None, int64_t base, list offsets not None):
        """Note that the file which begins at `base` is mapped as `region`, found while `offsets` were the files."""
        self.found, self.found_base, self.found_among = region, base, offsets

    cdef Region around(self, int64_t offset):
        # The mapping that holds `offset`, as long as nothing can have changed since it was found; None says to look again.
        if (self.found is None or self.found_among is not self.file_offsets or atomic_load(&self.found.state) & CLOSED
                or not self.found_base <= offset < self.wrote_where or offset - self.found_base >= self.found.size):
            return None
        return self.found

    def recent(self, offset not None):
        """(Region, int, int, int) or None: as of `CommitLog.region_of`, if the file that was asked for last holds `offset`."""
        cdef Region region = self.around(clamped(offset))
        return None if region is None else (region, self.found_base, self.found_base, self.wrote_where)

    def read_recent(self, phy_offset not None, type kind not None, int check_crc):
        """StoredMessage or None: the record at `phy_offset`, if it lies in the file that was asked for last and is whole."""
        cdef int64_t offset = clamped(phy_offset)
        cdef Region region = self.around(offset)
        cdef RecordView r
        cdef int64_t room
        cdef unsigned char* p
        if region is None:
            return None
        message_type(kind)
        room = region.size - (offset - self.found_base)
        p = region.pin(offset - self.found_base, room)
        try:
            prefetch_head(p, room)
            if judge_record(p, room, offset, 0, &r) != RECORD:
                return None
            return message_of(kind, p, &r, check_crc)
        finally:
            region.unpin()

    def read_recent_queued(self, FileStream log not None, tuple known not None, queue_offset, num, max_num, int64_t max_bytes,
                           type kind not None, int check_crc, type result_kind not None, status, str topic not None,
                           int64_t queue_id):
        """As `read_queued`, of the file of units (this stream) and the segment that were asked for last: what most gets come to.

        Parameters
        ----------
        log : FileStream
            The segments.
        known : tuple of (int, int)
            A first phy offset of the log, and the first queue offset that goes with it.
        queue_offset, num : int
            Of the first unit; at most so many are looked at.
        result_kind : type
            Whose instances have the attributes `status`, `messages`, `next_queue_offset`, `min_queue_offset` and
            `max_queue_offset`.
        status : object

        Returns
        -------
        result_kind or None
            Of `status`, with one message at least.  None where another file is needed, where nothing is found, or where
            `known` is not of the log as it is: the caller goes the long way.
        """
        cdef int64_t first = clamped(queue_offset), count = clamped(num), wanted = clamped(max_num), low, high, pos, room, min_phy
        message_type(kind)
        if first < 0 or first > INT64_MAX // UNIT_SIZE or wanted < 0 or not log.file_offsets:
            return None
        min_phy, low = known
        high = self.wrote_where // UNIT_SIZE
        if (<int64_t>log.file_offsets[0] if <int64_t>log.file_offsets[0] > 0 else 0) != min_phy or not low <= first < high:
            return None
        cdef Region region = self.around(first * UNIT_SIZE), segment
        if region is None:
            return None
        pos = first * UNIT_SIZE - self.found_base
        room = (region.size - pos) // UNIT_SIZE
        if room > high - first:
            room = high - first
        if count > room:
            count = room
        if count <= 0:
            return None
        cdef list out = []
        cdef Pull at
        at.done, at.last, at.size, at.taken, at.full, at.missing = 0, -1, 0, 0, False, False
        cdef unsigned char* first_unit = region.pin(pos, UNIT_SIZE * count)
        cdef unsigned char* base
        try:
            segment = log.around(get_i64(first_unit))
            if segment is None:
                return None
            base = segment.pin(0, segment.size)
            try:
                pull(&at, first_unit, count, base, segment.size, log.found_base, log.found_base, log.wrote_where, kind, out,
                     wanted, max_bytes, check_crc, None, None, topic, queue_id, first)
            finally:
                segment.unpin()
        finally:
            region.unpin()
        if at.taken == 0 or (at.done < count and not at.full):
            return None
        if (<PyTypeObject*>result_kind).tp_new == NULL:
            raise TypeError(f"{result_kind!r} has no instances")
        # Set as its class does that lets nobody else change it.
        cdef object found = (<PyTypeObject*>result_kind).tp_new(result_kind, <PyObject*>NO_ARGUMENTS, NULL)
        PyObject_GenericSetAttr(found, "status", status)
        PyObject_GenericSetAttr(found, "messages", out)
        PyObject_GenericSetAttr(found, "next_queue_offset", first + at.last + 1)
        PyObject_GenericSetAttr(found, "min_queue_offset", low)
        PyObject_GenericSetAttr(found, "max_queue_offset", high)
        return found


cdef enum:
    # What taking a row comes to; below zero it cannot be taken this way, and the caller goes the long way, which has the
    # rules and the errors.
    TAKEN = 0
    NOT_PLAIN = -1
    NEW_QUEUE = -2
    UNSOUND = -3    # an Arrow array whose offsets lead outside


cdef struct Row:
    RecordParts parts
    int64_t text_at     # place of the properties in the arena
    int64_t host_at     # place of the hosts in the arena, -1 = those of the batch
    int64_t size
    int64_t phy_offset
    IndexedProperties indexed
    int32_t topic       # number in the topic table
    int32_t queue
    bint born_now


cdef enum:
    # Names of properties that the index takes, and all others that a plain row may have.
    OTHER_NAME = 1
    KEYS_NAME
    TAGS_NAME
    UNIQUE_KEY_NAME


cdef inline int judge_name(const unsigned char* name, int64_t n) noexcept nogil:
    # Properties that mean something to the writer are the long way's.
    if n == 4:
        if memcmp(name, <const char*>b"KEYS", 4) == 0:
            return KEYS_NAME
        if memcmp(name, <const char*>b"TAGS", 4) == 0:
            return TAGS_NAME
    elif n == 8:
        if memcmp(name, <const char*>b"UNIQ_KEY", 8) == 0:
            return UNIQUE_KEY_NAME
        if memcmp(name, <const char*>b"__CRC32#", 8) == 0:
            return NOT_PLAIN
    if (n == 0 or (n == 5 and memcmp(name, <const char*>b"DELAY", 5) == 0)
            or (n > 6 and memcmp(name, <const char*>b"INNER_", 6) == 0) or has_separator(name, n, False)):
        return NOT_PLAIN
    return OTHER_NAME


cdef inline bint holds_a_key(const unsigned char* p, int64_t n) noexcept nogil:
    # Not only spaces.
    cdef int64_t i
    for i in range(n):
        if p[i] != 32:
            return True
    return False


@cython.final
@cython.no_gc_clear
cdef class TextColumn:
    """Texts or bytes of an Arrow array, or one for all rows.

    Parameters
    ----------
    offsets : memoryview or numpy.ndarray of int32 or int64, or None
        Where each begins and the last ends, from the array's first on; None = `data` is the value of every row.
    data : buffer
    validity : buffer or None
        Arrow's bitmap.
    first : int
        Bit of the bitmap that belongs to row 0.
    """

    cdef const uint8_t[::1] data, validity
    cdef const int32_t[::1] offsets
    cdef const int64_t[::1] large_offsets
    cdef int64_t first, length
    cdef bint nullable
    cdef int kind   # 0: none is there; 1: one for all; 4, 8: size of an offset

    def __cinit__(self, offsets=None, data=None, validity=None, int64_t first=0):
        self.kind = 0
        if data is None:
            return
        self.data = data if len(data) else b"\0"
        self.length = len(data)
        self.first = first
        self.kind = 1
        if offsets is not None:
            self.kind = offsets.dtype.itemsize
            if self.kind == 4:
                self.offsets = offsets
            else:
                self.large_offsets = offsets
        if validity is not None:
            self.validity = validity
            self.nullable = True

    cdef inline int get(self, int64_t i, const uint8_t** p, int64_t* n) noexcept nogil:
        # 1: there; 0: null (the value is then empty); -1: the array is not sound.
        cdef int64_t start, end
        p[0], n[0] = NULL, 0
        if self.kind == 0:
            return 0
        if self.kind == 1:
            p[0], n[0] = &self.data[0], self.length
            return 1
        if self.nullable and not bit_of(self.validity, self.first + i):
            return 0
        if self.kind == 4:
            if i < 0 or i + 1 >= self.offsets.shape[0]:
                return -1
            start, end = self.offsets[i], self.offsets[i + 1]
        else:
            if i < 0 or i + 1 >= self.large_offsets.shape[0]:
                return -1
            start, end = self.large_offsets[i], self.large_offsets[i + 1]
        if start < 0 or end < start or end > self.length:
            return -1
        p[0], n[0] = &self.data[0] + start, end - start
        return 1


cdef inline bint bit_of(const uint8_t[::1] bits, int64_t i) noexcept nogil:
    return 0 <= i < 8 * bits.shape[0] and (bits[i >> 3] >> (i & 7)) & 1


@cython.final
@cython.no_gc_clear
cdef class ListColumn:
    """Lists of texts: Arrow's list or map offsets over a `TextColumn`; without offsets every row has all of it.

    Parameters
    ----------
    texts : TextColumn
    offsets : numpy.ndarray of int64, or None
        Counted from the first text.
    validity, first
        As of `TextColumn`.
    num : int
        How many texts every row has when there are no offsets.
    """

    cdef TextColumn texts
    cdef const int64_t[::1] offsets
    cdef const uint8_t[::1] validity
    cdef int64_t first, num
    cdef bint listed, nullable

    def __cinit__(self, TextColumn texts not None, offsets=None, validity=None, int64_t first=0, int64_t num=0):
        self.texts, self.first, self.num = texts, first, num
        if offsets is not None:
            self.offsets = offsets
            self.listed = True
        if validity is not None:
            self.validity = validity
            self.nullable = True

    cdef inline int bounds(self, int64_t i, int64_t* start, int64_t* end) noexcept nogil:
        start[0], end[0] = 0, self.num
        if not self.listed:
            return self.num > 0
        end[0] = 0
        if self.nullable and not bit_of(self.validity, self.first + i):
            return 0
        if i < 0 or i + 1 >= self.offsets.shape[0]:
            return -1
        start[0], end[0] = self.offsets[i], self.offsets[i + 1]
        return -1 if start[0] < 0 or end[0] < start[0] else 1


@cython.final
@cython.no_gc_clear
cdef class NumberColumn:
    """Numbers of a column, or one for all rows.

    Parameters
    ----------
    values : numpy.ndarray of int64, or int
    valid : numpy.ndarray of bool, or None
        False where there is none.
    given : bool
        Whether one for all is there at all.
    """

    cdef const int64_t[::1] values
    cdef const uint8_t[::1] valid
    cdef int64_t constant
    cdef bint given, nullable, many

    def __cinit__(self, values=0, valid=None, bint given=True):
        self.given = given
        self.constant = 0
        if isinstance(values, int):
            self.constant = values
        else:
            self.values = values
            self.many = True
        if valid is not None:
            self.valid = valid.view(np.uint8)
            self.nullable = True

    cdef inline bint get(self, int64_t i, int64_t* value) noexcept nogil:
        # False, and 0, where there is none.
        value[0] = 0
        if not self.given or (self.nullable and not (0 <= i < self.valid.shape[0] and self.valid[i])):
            return False
        if not self.many:
            value[0] = self.constant
        elif 0 <= i < self.values.shape[0]:
            value[0] = self.values[i]
        return True

    cdef inline bint fits(self, int64_t i, int64_t low, int64_t high, int32_t* value) noexcept nogil:
        cdef int64_t number
        self.get(i, &number)
        value[0] = <int32_t>number
        return low <= number <= high


@cython.final
@cython.no_gc_clear
cdef class TableRows:
    """The columns of a table that is to be put, as `RowBatch.take_columns` reads them.

    Parameters
    ----------
    num : int
        Rows.
    topic, body, tags : TextColumn
    keys, properties : ListColumn
        `properties` lists the names.
    values : TextColumn
        Values to the names.
    queue_id, flag, sys_flag, reconsume_times, prepared_transaction_offset, born_timestamp : NumberColumn
    hosts : list of bytes
        Distinct hosts of 8 or 20 bytes.
    born_host, store_host : NumberColumn
        Places in `hosts`.
    keys_joined : bool
        A key may hold spaces: it is the whole KEYS text.
    """

    cdef readonly int64_t num
    cdef TextColumn topic, body, tags, values
    cdef ListColumn keys, properties
    cdef NumberColumn queue_id, flag, sys_flag, reconsume_times, prepared_transaction_offset, born_timestamp
    cdef NumberColumn born_host, store_host
    cdef TextColumn hosts
    cdef bint keys_joined
    cdef int64_t last_row
    cdef int32_t last_number

    def __cinit__(self, int64_t num, *, TextColumn topic not None, TextColumn body not None, TextColumn tags not None,
                  ListColumn keys not None, ListColumn properties not None, TextColumn values not None,
                  NumberColumn queue_id not None, NumberColumn flag not None, NumberColumn sys_flag not None,
                  NumberColumn reconsume_times not None, NumberColumn prepared_transaction_offset not None,
                  NumberColumn born_timestamp not None, list hosts not None, NumberColumn born_host not None,
                  NumberColumn store_host not None, bint keys_joined=False):
        for host in hosts:
            if type(host) is not bytes or len(host) not in (8, 20):
                raise ValueError("a host is 4 or 16 address bytes and a 4-byte port")
        self.num, self.topic, self.body, self.tags, self.values = num, topic, body, tags, values
        self.keys, self.properties, self.queue_id, self.flag, self.sys_flag = keys, properties, queue_id, flag, sys_flag
        self.reconsume_times, self.prepared_transaction_offset = reconsume_times, prepared_transaction_offset
        self.born_timestamp, self.born_host, self.store_host = born_timestamp, born_host, store_host
        self.keys_joined = keys_joined
        self.hosts = TextColumn(np.cumsum([0] + [len(host) for host in hosts], dtype=np.int64), b"".join(hosts))
        self.last_row = -1

    cdef int host_of(self, RowBatch batch, Row* row, int64_t i) noexcept nogil:
        cdef int64_t number, n, store_n
        cdef const uint8_t* born
        cdef const uint8_t* store
        cdef bint has_born = self.born_host.get(i, &number), has_store
        if has_born and self.hosts.get(number, &born, &n) != 1:
            return NOT_PLAIN
        has_store = self.store_host.get(i, &number)
        if not has_born and not has_store:
            batch.default_hosts(row)
            return TAKEN
        store, store_n = batch.store_host_bytes, batch.store_host_len
        if has_store and self.hosts.get(number, &store, &store_n) != 1:
            return NOT_PLAIN
        if not has_born:
            born, n = store, store_n
        return batch.add_hosts(row, born, n, store, store_n)


@cython.final
@cython.no_gc_clear
cdef class RowBatch:
    """Rows that are to become records: checked, laid out and numbered before anything is written.

    It takes plain rows only: simple flags, properties without a meaning for the writer, texts that UTF-8 can hold.
    Filled by `take_messages` or `take_columns`, then `number`, `encode`; used again and again.

    Parameters
    ----------
    topics : TopicTable
        Numbers the topics and queues.
    store_host : bytes
        8 or 20 bytes, for rows that name none.
    hosts : dict of str to bytes
        Hosts that were looked at before.
    max_body_size : int
        Largest body in bytes.
    max_topic_size : int
        Largest topic in bytes, 127 or 255; above 127 the record is of version 2.
    prop_crc : bool
        Append the property CRC.

    Attributes
    ----------
    count : int
        Rows that were taken.
    """

    cdef readonly TopicTable topics
    cdef readonly int64_t count
    cdef Row* rows
    cdef int64_t capacity
    cdef unsigned char* arena
    cdef int64_t arena_used, arena_size
    cdef bytes store_host
    cdef unsigned char[20] store_host_bytes
    cdef int32_t store_host_len
    cdef dict hosts
    cdef list held          # objects that rows point into
    cdef int64_t max_body_size, max_topic_size, max_text_size
    cdef bint prop_crc
    cdef int64_t encoded    # rows that were written to the log
    cdef object last_topic
    cdef int32_t last_number
    cdef int32_t last_queue_topic, last_queue_id, last_queue
    cdef int64_t[::1] queue_num     # rows of each queue that was touched, else 0
    cdef list touched

    def __cinit__(self, TopicTable topics not None, bytes store_host not None, dict hosts not None,
                  int64_t max_body_size, int64_t max_topic_size=255, bint prop_crc=False):
        if PyBytes_GET_SIZE(store_host) not in (8, 20):
            raise ValueError("a host is 4 or 16 address bytes and a 4-byte port")
        if not 0 <= max_body_size <= 0x7FFFFFFF - 0x20000 or not 0 <= max_topic_size <= 0x7FFF:
            raise ValueError(f"max_body_size {max_body_size}, max_topic_size {max_topic_size}")
        self.topics, self.store_host, self.hosts = topics, store_host, hosts
        self.store_host_len = <int32_t>PyBytes_GET_SIZE(store_host)
        memcpy(self.store_host_bytes, PyBytes_AS_STRING(store_host), self.store_host_len)
        self.max_body_size, self.max_topic_size, self.prop_crc = max_body_size, max_topic_size, prop_crc
        self.max_text_size = 0x7FFF
        self.held, self.touched = [], []
        self.queue_num = np.zeros(16, np.int64)
        self.last_topic = None
        self.last_queue_topic = -1

    def __dealloc__(self):
        free(self.rows)
        free(self.arena)

    cdef int reserve_rows(self, int64_t num) except -1:
        cdef void* grown
        if num > self.capacity:
            num = num if num > 2 * self.capacity else 2 * self.capacity
            grown = realloc(self.rows, <size_t>num * sizeof(Row))
            if grown == NULL:
                raise MemoryError
            self.rows = <Row*>grown
            self.capacity = num
        return 0

    cdef inline bint reserve_arena(self, int64_t size) noexcept nogil:
        # False when there is no memory.
        return self.arena_used + size <= self.arena_size or self.grow_arena(size)

    cdef bint grow_arena(self, int64_t size) noexcept nogil:
        cdef void* grown
        if self.arena_used + size > self.arena_size:
            grown = realloc(self.arena, <size_t>(2 * self.arena_size + size + 4096))
            if grown == NULL:
                return False
            self.arena = <unsigned char*>grown
            self.arena_size = 2 * self.arena_size + size + 4096
        return True

    cpdef clear(self):
        """Forget the rows."""
        cdef int32_t queue
        for queue in self.touched:
            self.queue_num[queue] = 0
        self.touched.clear()
        self.held.clear()
        self.count = self.arena_used = self.encoded = 0

    cdef inline void start_text(self, Row* row) noexcept nogil:
        # Properties of this row are added from here on.
        row.text_at = self.arena_used
        row.indexed.keys_pos = row.indexed.tags_pos = row.indexed.unique_key_pos = -1

    cdef int add_property(self, Row* row, const unsigned char* name, int64_t name_len, const unsigned char* value,
                          int64_t value_len) noexcept nogil:
        cdef unsigned char* p
        cdef int64_t at
        cdef int which = judge_name(name, name_len)
        if which < 0 or value_len > 0x7FFF or name_len > 0x7FFF or has_separator(value, value_len, False):
            return NOT_PLAIN
        if which == KEYS_NAME and not holds_a_key(value, value_len):
            return NOT_PLAIN
        if not self.reserve_arena(name_len + value_len + 2):
            return NOT_PLAIN
        p = self.arena + self.arena_used
        if name_len == 4:
            memcpy(p, name, 4)
        else:
            memcpy(p, name, name_len)
        p[name_len] = 1
        memcpy(p + name_len + 1, value, value_len)
        p[name_len + value_len + 1] = 2
        at = self.arena_used + name_len + 1 - row.text_at
        self.arena_used = self.arena_used + name_len + value_len + 2
        # A value of no length counts as none; a text that is too long is refused when the row is finished.
        if which != OTHER_NAME and value_len > 0 and at <= self.max_text_size:
            if which == KEYS_NAME:
                row.indexed.keys_pos, row.indexed.keys_len = <int32_t>at, <int32_t>value_len
            elif which == TAGS_NAME:
                row.indexed.tags_pos, row.indexed.tags_len = <int32_t>at, <int32_t>value_len
            else:
                row.indexed.unique_key_pos, row.indexed.unique_key_len = <int32_t>at, <int32_t>value_len
        return TAKEN

    cdef int32_t topic_number(self, const unsigned char* p, int64_t n) noexcept nogil:
        if n > self.max_topic_size:
            return NOT_PLAIN
        cdef int32_t number = self.topics.look_up(hash_utf8(0, p, n), p, <int32_t>n)
        return number if number >= 0 else NEW_QUEUE

    cdef int finish_row(self, Row* row) noexcept nogil:
        # The parts are set; what is left is the properties' length and what follows from it.
        cdef int64_t text = self.arena_used - row.text_at
        if text > self.max_text_size:
            return NOT_PLAIN
        row.parts.properties = self.arena + row.text_at
        row.parts.properties_len = <int32_t>text
        if self.prop_crc and text + PROP_CRC_SIZE > self.max_text_size:
            return NOT_PLAIN
        row.parts.topic_len = <int32_t>(self.topics.starts[row.topic + 1] - self.topics.starts[row.topic])
        row.parts.version = 2 if row.parts.topic_len > 127 else 1
        row.size = encoded_size(&row.parts, self.prop_crc)
        # Neighbours are mostly of one queue.
        if row.topic != self.last_queue_topic or row.parts.queue_id != self.last_queue_id:
            row.queue = self.topics.look_up_queue(row.topic, row.parts.queue_id)
            if row.queue < 0:
                return NEW_QUEUE
            self.last_queue_topic, self.last_queue_id, self.last_queue = row.topic, row.parts.queue_id, row.queue
        row.queue = self.last_queue
        return TAKEN

    cdef void default_hosts(self, Row* row) noexcept nogil:
        row.host_at = -1
        row.parts.born_host_len = row.parts.store_host_len = self.store_host_len
        if self.store_host_len == 20:
            row.parts.sys_flag |= SYS_BORN_V6 | SYS_STORE_V6

    cdef int add_hosts(self, Row* row, const unsigned char* born, int64_t born_len, const unsigned char* store,
                       int64_t store_len) noexcept nogil:
        if not self.reserve_arena(born_len + store_len):
            return NOT_PLAIN
        row.host_at = self.arena_used
        row.parts.born_host_len, row.parts.store_host_len = <int32_t>born_len, <int32_t>store_len
        memcpy(self.arena + row.host_at, born, born_len)
        memcpy(self.arena + row.host_at + born_len, store, store_len)
        self.arena_used = self.arena_used + born_len + store_len
        if born_len == 20:
            row.parts.sys_flag |= SYS_BORN_V6
        if store_len == 20:
            row.parts.sys_flag |= SYS_STORE_V6
        return TAKEN

    cdef int set_host(self, Row* row, object born_host, object store_host) except -10:
        # At least one is given.  They must have been looked at before; a born host that is missing is the store host.
        cdef bytes born, store
        if (born_host is not None and type(born_host) is not str) or (store_host is not None and type(store_host) is not str):
            return NOT_PLAIN
        store = self.store_host if store_host is None else self.hosts.get(store_host)
        born = store if born_host is None else self.hosts.get(born_host)
        if born is None or store is None:
            return NOT_PLAIN
        return self.add_hosts(row, <const unsigned char*>PyBytes_AS_STRING(born), PyBytes_GET_SIZE(born),
                              <const unsigned char*>PyBytes_AS_STRING(store), PyBytes_GET_SIZE(store))

    cdef int add_encoded(self, Row* row, object name, object value) except -10:
        # A property that is not ASCII.  Both are held, as a caller's borrowed ones are not: whatever runs meanwhile may
        # change the dict.
        cdef str held_name = name, held_value = value
        cdef bytes name_bytes, value_bytes
        try:
            name_bytes, value_bytes = held_name.encode("utf-8"), held_value.encode("utf-8")
        except UnicodeEncodeError:
            return NOT_PLAIN
        return self.add_property(row, <const unsigned char*>PyBytes_AS_STRING(name_bytes), PyBytes_GET_SIZE(name_bytes),
                                 <const unsigned char*>PyBytes_AS_STRING(value_bytes), PyBytes_GET_SIZE(value_bytes))

    cdef int take_message(self, MessageFields m, int64_t queue_id) except -10:
        # Row `count` becomes this message; there must be room for it.  The message may be changed by another thread as soon
        # as this returns, so that what it holds is copied, or kept in `held`.
        cdef Row* row = &self.rows[self.count]
        cdef int64_t number
        cdef int32_t topic
        cdef object text
        cdef PyObject* name
        cdef PyObject* value
        cdef Py_ssize_t at = 0
        cdef object body = m.body
        if not (PyUnicode_CheckExact(<PyObject*>m.topic) and PyBytes_CheckExact(<PyObject*>body)
                and PyDict_CheckExact(<PyObject*>m.properties)):
            return NOT_PLAIN
        if not 0 <= queue_id <= 0x7FFFFFFF or PyBytes_GET_SIZE(body) > self.max_body_size:
            return NOT_PLAIN
        if m.topic is not self.last_topic:
            text = m.topic
            if not PyUnicode_IS_COMPACT_ASCII(<PyObject*>text):
                return NOT_PLAIN
            topic = self.topic_number(<const unsigned char*>PyUnicode_DATA(<PyObject*>text), PyUnicode_GET_LENGTH(<PyObject*>text))
            if topic < 0:
                return topic
            self.last_topic, self.last_number = text, topic
        row.topic = self.last_number
        if not small_number(<PyObject*>m.flag, &number) or number != <int32_t>number:
            return NOT_PLAIN
        row.parts.flag = <int32_t>number
        if not small_number(<PyObject*>m.sys_flag, &number) or number & ~<int64_t>SYS_PLAIN_MASK:
            return NOT_PLAIN
        row.parts.sys_flag = <int32_t>number
        if not small_number(<PyObject*>m.reconsume_times, &number) or number != <int32_t>number:
            return NOT_PLAIN
        row.parts.reconsume_times = <int32_t>number
        if not small_number(<PyObject*>m.prepared_transaction_offset, &row.parts.prepared_transaction_offset):
            return NOT_PLAIN
        row.born_now = m.born_timestamp is None
        if not row.born_now and not small_number(<PyObject*>m.born_timestamp, &row.parts.born_timestamp):
            return NOT_PLAIN
        row.parts.queue_id = <int32_t>queue_id
        row.parts.body = <const unsigned char*>PyBytes_AS_STRING(body)
        row.parts.body_len = <int32_t>PyBytes_GET_SIZE(body)
        if m.born_host is None and m.store_host is None:
            self.default_hosts(row)
        elif self.set_host(row, m.born_host, m.store_host) != TAKEN:
            return NOT_PLAIN
        self.start_text(row)
        text = m.properties
        while PyDict_Next(text, &at, &name, &value):
            if not (PyUnicode_CheckExact(name) and PyUnicode_CheckExact(value)):
                return NOT_PLAIN
            if PyUnicode_IS_COMPACT_ASCII(name) and PyUnicode_IS_COMPACT_ASCII(value):
                if self.add_property(row, <const unsigned char*>PyUnicode_DATA(name), PyUnicode_GET_LENGTH(name),
                                     <const unsigned char*>PyUnicode_DATA(value), PyUnicode_GET_LENGTH(value)) != TAKEN:
                    return NOT_PLAIN
            elif self.add_encoded(row, <object>name, <object>value) != TAKEN:
                return NOT_PLAIN
        topic = self.finish_row(row)
        if topic != TAKEN:
            return topic
        self.held.append(body)
        self.count += 1
        return TAKEN

    def take_messages(self, list messages not None, queue_ids, Py_ssize_t first, kind not None):
        """Take messages as rows, from number `first` on.

        Parameters
        ----------
        messages : list
        queue_ids : int or list of int
            For all, or one for each.
        first : int
        kind : type
            What a plain message is an instance of, exactly.

        Returns
        -------
        (int, int)
            The number of the message that could not be taken, and why: -1 = it is not plain, -2 = its topic or queue is not
            in the table; ``len(messages)`` and 0 when all are taken.
        """
        cdef Py_ssize_t i, n = len(messages)
        cdef int64_t each = -1
        cdef int64_t used
        cdef int taken
        cdef list many = queue_ids if type(queue_ids) is list else None
        if many is None:
            if not small_number(<PyObject*>queue_ids, &each):
                return first, NOT_PLAIN
        elif len(many) != n:
            raise ValueError(f"{n} messages, {len(many)} queue ids")
        self.reserve_rows(self.count + n - first)
        for i in range(first, n):
            # The caller's lists may change while this runs.
            if i >= len(messages) or (many is not None and i >= len(many)):
                raise ValueError("the list of messages became shorter meanwhile")
            message = messages[i]
            if type(message) is not kind or not isinstance(message, MessageFields):
                return i, NOT_PLAIN
            if many is not None:
                number = many[i]
                if not small_number(<PyObject*>number, &each):
                    return i, NOT_PLAIN
            used = self.arena_used
            taken = self.take_message(<MessageFields>message, each)
            if taken != TAKEN:
                self.arena_used = used
                return i, taken
        return n, TAKEN

    def take_columns(self, TableRows table not None, int64_t first):
        """Take rows of a table, from number `first` on; the GIL is released for many.

        Returns
        -------
        (int, int)
            As of `take_messages`; -3 = an Arrow array is not sound there.
        """
        cdef int64_t i = first
        cdef int taken
        cdef PyThreadState* state
        if first < 0 or first > table.num:
            raise ValueError(f"row {first} of {table.num}")
        self.reserve_rows(self.count + table.num - first)
        state = let_others_run((table.num - first) * ROW_COST)
        taken = self.take_rows(table, &i)
        go_on(state)
        return i, taken

    cdef int take_rows(self, TableRows table, int64_t* i) noexcept nogil:
        cdef int64_t used
        cdef int taken = TAKEN
        while i[0] < table.num:
            used = self.arena_used
            taken = self.take_row(table, i[0])
            if taken != TAKEN:
                self.arena_used = used
                break
            i[0] = i[0] + 1
        return taken

    cdef int take_row(self, TableRows table, int64_t i) noexcept nogil:
        cdef Row* row = &self.rows[self.count]
        cdef RecordParts* parts = &row.parts
        cdef const uint8_t* p
        cdef const uint8_t* last
        cdef int64_t n, last_n
        cdef int there
        # One topic is for all rows, or neighbours are mostly of one.
        if table.last_row < 0 or table.topic.kind != 1:
            there = table.topic.get(i, &p, &n)
            if there != 1 or n > self.max_topic_size:
                return UNSOUND if there < 0 else NOT_PLAIN
            if table.last_row < 0 or table.topic.get(table.last_row, &last, &last_n) != 1 or n != last_n or memcmp(p, last, n) != 0:
                there = self.topic_number(p, n)
                if there < 0:
                    return there
                table.last_row, table.last_number = i, there
        row.topic = table.last_number
        if not (table.queue_id.fits(i, 0, 0x7FFFFFFF, &parts.queue_id) and table.flag.fits(i, INT32_MIN, INT32_MAX, &parts.flag)
                and table.sys_flag.fits(i, 0, INT32_MAX, &parts.sys_flag)
                and table.reconsume_times.fits(i, INT32_MIN, INT32_MAX, &parts.reconsume_times)):
            return NOT_PLAIN
        if parts.sys_flag & ~SYS_PLAIN_MASK:
            return NOT_PLAIN
        table.prepared_transaction_offset.get(i, &parts.prepared_transaction_offset)
        row.born_now = not table.born_timestamp.get(i, &parts.born_timestamp)
        there = table.body.get(i, &p, &n)
        if there < 0 or n > self.max_body_size:
            return UNSOUND if there < 0 else NOT_PLAIN
        parts.body, parts.body_len = p, <int32_t>n
        if table.host_of(self, row, i) != TAKEN:
            return NOT_PLAIN
        self.start_text(row)
        there = self.add_texts(table, row, i)
        if there != TAKEN:
            return there
        there = self.finish_row(row)
        if there == TAKEN:
            self.count = self.count + 1
        return there

    cdef int add_texts(self, TableRows table, Row* row, int64_t i) noexcept nogil:
        # KEYS, TAGS, then the properties in their order, as `Message` lays them out.
        cdef int64_t start, end, n, value_n, at = self.arena_used, keys_at, keys_len = -1, tags_len = -1, seen, k
        cdef int64_t j
        cdef const uint8_t* p
        cdef const uint8_t* value
        cdef const uint8_t* tags = NULL
        cdef const uint8_t* out_p
        cdef int there = table.keys.bounds(i, &start, &end)
        if there < 0 or end - start > 0x7FFF:
            return UNSOUND if there < 0 else NOT_PLAIN
        keys_at = at + 5
        if there and end > start:
            if not self.reserve_arena(6):
                return NOT_PLAIN
            memcpy(self.arena + at, <const char*>b"KEYS\x01", 5)
            self.arena_used = self.arena_used + 5
            for j in range(start, end):
                there = table.keys.texts.get(j, &p, &n)
                if there != 1 or n == 0 or n > 0x7FFF:
                    return UNSOUND if there < 0 else NOT_PLAIN
                if has_separator(p, n, not table.keys_joined):
                    return NOT_PLAIN
                if not self.reserve_arena(n + 2):
                    return NOT_PLAIN
                if j > start:
                    self.arena[self.arena_used] = 32
                    self.arena_used = self.arena_used + 1
                memcpy(self.arena + self.arena_used, p, n)
                self.arena_used = self.arena_used + n
            keys_len = self.arena_used - keys_at
            if not holds_a_key(self.arena + keys_at, keys_len) or keys_len > self.max_text_size:
                return NOT_PLAIN
            row.indexed.keys_pos, row.indexed.keys_len = 5, <int32_t>keys_len
            self.arena[self.arena_used] = 2
            self.arena_used = self.arena_used + 1
        there = table.tags.get(i, &tags, &tags_len)
        if there < 0:
            return UNSOUND
        if there == 0 or tags_len == 0:
            tags_len = -1
        elif self.add_property(row, <const unsigned char*>b"TAGS", 4, tags, tags_len) != TAKEN:
            return NOT_PLAIN
        there = table.properties.bounds(i, &start, &end)
        if there < 0 or end - start > 0x2000:
            return UNSOUND if there < 0 else NOT_PLAIN
        if not there:
            return TAKEN
        for j in range(start, end):
            there = table.properties.texts.get(j, &p, &n)
            if there != 1:
                return UNSOUND if there < 0 else NOT_PLAIN
            there = table.values.get(j, &value, &value_n)
            if there < 0:
                return UNSOUND
            if there == 0:
                continue
            # A mapping has each name once.
            for k in range(start, j):
                if table.properties.texts.get(k, &out_p, &seen) == 1 and seen == n and memcmp(out_p, p, n) == 0:
                    return NOT_PLAIN
            if keys_len >= 0 and n == 4 and memcmp(p, <const char*>b"KEYS", 4) == 0:
                if value_n != keys_len or memcmp(value, self.arena + keys_at, keys_len) != 0:
                    return NOT_PLAIN
                continue
            if tags_len >= 0 and n == 4 and memcmp(p, <const char*>b"TAGS", 4) == 0:
                if value_n != tags_len or memcmp(value, tags, tags_len) != 0:
                    return NOT_PLAIN
                continue
            if self.add_property(row, p, n, value, value_n) != TAKEN:
                return NOT_PLAIN
        return TAKEN

    cdef void seal(self, int64_t store_timestamp, const int64_t[::1] timestamps) noexcept nogil:
        # What rows point to may have moved while others were taken.
        cdef int64_t i
        cdef Row* row
        for i in range(self.count):
            row = &self.rows[i]
            row.parts.topic = &self.topics.arena[0] + self.topics.starts[row.topic]
            row.parts.properties = self.arena + row.text_at
            if row.host_at >= 0:
                row.parts.born_host = self.arena + row.host_at
                row.parts.store_host = self.arena + row.host_at + row.parts.born_host_len
            else:
                row.parts.born_host = row.parts.store_host = self.store_host_bytes
            row.parts.store_timestamp = timestamps[i] if timestamps.shape[0] else store_timestamp
            if row.born_now:
                row.parts.born_timestamp = row.parts.store_timestamp

    def queues(self):
        """list of (int, int): the queues of the rows, as numbers in `topics.queues`, and how many rows each has."""
        cdef int64_t i
        cdef int32_t queue, each
        if self.touched:
            return [(each, self.queue_num[each]) for each in self.touched]
        if self.queue_num.shape[0] < self.topics.queue_num:
            self.queue_num = np.zeros(2 * self.topics.queue_num, np.int64)
        for i in range(self.count):
            queue = self.rows[i].queue
            check(0 <= queue < self.queue_num.shape[0])
            if self.queue_num[queue] == 0:
                self.touched.append(queue)
            self.queue_num[queue] += 1
        return [(each, self.queue_num[each]) for each in self.touched]

    def number(self, dict following not None, int64_t store_timestamp, const int64_t[::1] timestamps not None):
        """Give every row its place in its queue and its time.

        Parameters
        ----------
        following : dict of int to int
            For every queue of `queues` the queue offset of its next message.
        store_timestamp : int
            ms since epoch.
        timestamps : array of int64
            One a row instead, or empty.
        """
        cdef int64_t i, offset
        cdef int32_t each
        if timestamps.shape[0] != 0 and timestamps.shape[0] != self.count:
            raise ValueError(f"{timestamps.shape[0]} timestamps for {self.count} rows")
        numbers = [(each, following[each]) for each, _ in self.queues()]
        cdef int64_t[::1] next_offset = self.queue_num
        for each, offset in numbers:
            next_offset[each] = offset
        for i in range(self.count):
            self.rows[i].parts.queue_offset = next_offset[self.rows[i].queue]
            next_offset[self.rows[i].queue] += 1
        self.seal(store_timestamp, timestamps)
        # The array counts again.
        for each, offset in numbers:
            next_offset[each] -= offset

    def room(self, int64_t left, int64_t segment_size):
        """How the rows fall into segments.

        Parameters
        ----------
        left : int
            Bytes that are left in the current segment.
        segment_size : int

        Returns
        -------
        (int, int)
            How many new segments they take, and the largest row in bytes.
        """
        cdef int64_t i, size, largest = 0, rolls = 0
        for i in range(self.count):
            size = self.rows[i].size
            if size > largest:
                largest = size
            if size + BLANK_SIZE > left:
                rolls += 1
                left = segment_size
            left -= size
        return rolls, largest

    def encode(self, Region region not None, int64_t pos, int64_t base_offset, int64_t first):
        """Encode the rows from `first` on into a segment, as many as fit with 8 bytes left behind each.

        Parameters
        ----------
        region : Region
            A writable segment.
        pos : int
            Where the first one goes.
        base_offset : int
            Absolute offset of the segment's first byte.

        Returns
        -------
        (int, int)
            The number of the first row that does not fit any more, and the position behind the last that was written.
        """
        cdef PyThreadState* state = NULL
        if first < 0:
            raise ValueError(f"first is {first}")
        cdef unsigned char* p = region.pin_writable(pos, region.size - pos)
        try:
            if first < self.count:
                state = let_others_run((self.count - first) * (ROW_COST + self.rows[first].size // COPIED_BYTES))
            self.encode_rows(p, &pos, region.size, base_offset, &first)
            go_on(state)
            self.encoded = first
            return first, pos
        finally:
            region.unpin()

    cdef void encode_rows(self, unsigned char* p, int64_t* pos, int64_t size, int64_t base_offset, int64_t* first) noexcept nogil:
        cdef Row* row
        cdef int64_t start = pos[0]
        while first[0] < self.count:
            row = &self.rows[first[0]]
            if row.size + BLANK_SIZE > size - pos[0]:
                break
            row.phy_offset = base_offset + pos[0]
            encode_into(p + (pos[0] - start), row.size, row.phy_offset, &row.parts, self.prop_crc)
            pos[0] += row.size
            first[0] += 1

    def placed(self):
        """bytes: where the rows went, for `put_results` of this process."""
        cdef int64_t i
        cdef Row* row
        cdef Placed* out
        if self.encoded < self.count:
            raise ValueError(f"{self.encoded} of {self.count} rows are encoded")
        cdef bytes made = PyBytes_FromStringAndSize(NULL, self.count * <int64_t>sizeof(Placed))
        out = <Placed*>PyBytes_AS_STRING(made)
        for i in range(self.count):
            row = &self.rows[i]
            out[i].phy_offset, out[i].queue_offset = row.phy_offset, row.parts.queue_offset
            out[i].store_timestamp, out[i].size = row.parts.store_timestamp, row.size
            out[i].host_len = row.parts.store_host_len
            memset(out[i].host, 0, sizeof(out[i].host))
            memcpy(out[i].host, row.parts.store_host, row.parts.store_host_len)
        return made

    def fill_columns(self, RecordColumns columns not None, int64_t first, bint index_tags=True):
        """Fill `columns` as a `scan` of the records would that the rows from number `first` on became; the log is not read.

        Parameters
        ----------
        columns : RecordColumns
            Filled from row 0; it must share the table of topics.
        first : int
        index_tags : bool
            As of `scan`.

        Returns
        -------
        int
            The number of the first row that has no place in `columns` any more; `count` if all have.

        Raises
        ------
        ValueError
            `first` is no row, a row is not encoded yet, or the tables of topics differ.
        """
        cdef int verdict = NEED_KEY_ROOM
        cdef PyThreadState* state
        if not 0 <= first <= self.count or self.encoded < self.count:
            raise ValueError(f"row {first} of {self.count}, of which {self.encoded} are encoded")
        if columns.topics is not self.topics:
            raise ValueError("the columns number topics by another table")
        columns.count = 0
        columns.c_key_start[0] = 0
        while verdict == NEED_KEY_ROOM:
            state = let_others_run((self.count - first) * ROW_COST)
            verdict = self.fill_rows(columns, &first, index_tags)
            go_on(state)
            if verdict == NEED_KEY_ROOM:
                columns.grow_keys()
        return first

    cdef int fill_rows(self, RecordColumns out, int64_t* first, bint index_tags) noexcept nogil:
        cdef Row* row
        cdef int64_t i, at
        cdef int32_t topic = -1
        cdef uint32_t topic_hash = 0
        cdef const unsigned char* text
        while first[0] < self.count:
            i = out.count
            if i >= out.capacity:
                return COLUMNS_FULL
            row = &self.rows[first[0]]
            if row.topic != topic:
                topic = row.topic
                topic_hash = hash_utf8(0, &self.topics.arena[0] + self.topics.starts[topic], row.parts.topic_len)
            text = self.arena + row.text_at
            at = put_key_hashes(&out.c_key_hash[0], out.c_key_start[i], out.c_key_hash.shape[0], topic_hash, text,
                                &row.indexed, index_tags, &out.c_tags_code[i])
            if at < 0:
                return NEED_KEY_ROOM
            out.c_key_start[i + 1] = at
            out.c_phy_offset[i] = row.phy_offset
            out.c_size[i] = <int32_t>row.size
            out.c_queue_id[i] = row.parts.queue_id
            out.c_queue_offset[i] = out.c_inner_base[i] = row.parts.queue_offset
            out.c_sys_flag[i] = row.parts.sys_flag
            out.c_store_timestamp[i] = row.parts.store_timestamp
            out.c_topic[i] = topic
            out.c_queue[i] = row.queue
            # A plain row is no inner batch and names no further queues.
            out.c_inner_num[i] = 1
            out.c_multi_dispatch[i] = 0
            out.c_prop_crc[i] = self.prop_crc or ends_with_crc(text, row.parts.properties_len)
            out.count = i + 1
            first[0] += 1
        return LIMIT

    def columns(self):
        """tuple of numpy.ndarray: phy_offset, queue_offset, store_timestamp, size of the rows, int64, shape (count,)."""
        cdef int64_t i
        out_array = np.empty((4, self.count), np.int64)
        cdef int64_t[:, ::1] out = out_array
        for i in range(self.count):
            out[0, i], out[1, i] = self.rows[i].phy_offset, self.rows[i].parts.queue_offset
            out[2, i], out[3, i] = self.rows[i].parts.store_timestamp, self.rows[i].size
        return tuple(out_array)


cdef struct Placed:
    # Where a row went, as `RowBatch.placed` says.
    int64_t phy_offset, queue_offset, store_timestamp, size
    int32_t host_len
    unsigned char[20] host


def put_results(bytes placed not None, type kind not None, int64_t first, int64_t num):
    """list: a `kind`, a named tuple of (phy_offset, queue_offset, msg_id, store_timestamp, size), for each of `num` rows.

    Parameters
    ----------
    placed : bytes
        What `RowBatch.placed` gave.
    kind : type
    first, num : int
        Which of its rows.
    """
    cdef int64_t i, last_time = 0, last_size = -1
    cdef object time = None, size = None
    cdef list made = []
    cdef Placed* row
    if not issubclass(kind, tuple) or len(kind._fields) != 5:
        raise TypeError("a named tuple of five is needed")
    if first < 0 or num < 0 or first > PyBytes_GET_SIZE(placed) // <int64_t>sizeof(Placed) - num:
        raise ValueError(f"{num} rows from number {first} on of {PyBytes_GET_SIZE(placed) // <int64_t>sizeof(Placed)}")
    for i in range(first, first + num):
        row = <Placed*>PyBytes_AS_STRING(placed) + i
        if not 0 <= row.host_len <= 20:
            raise ValueError(f"a host of {row.host_len} bytes")
        # Neighbours are of one time, and often of one size: one object serves them.
        if i == first or row.store_timestamp != last_time:
            last_time = row.store_timestamp
            time = last_time
        if i == first or row.size != last_size:
            last_size = row.size
            size = last_size
        made.append(put_result(kind, row.phy_offset, row.queue_offset, row.host, row.host_len, time, size))
    return made


cdef object put_result(type kind, int64_t phy_offset, int64_t queue_offset, const unsigned char* host, int32_t host_len,
                       object store_timestamp, object size):
    # A named tuple of (phy_offset, queue_offset, msg_id, store_timestamp, size), made as its class would.
    cdef object made = PyType_GenericAlloc(kind, 5)
    set_item(made, 0, phy_offset)
    set_item(made, 1, queue_offset)
    set_item(made, 2, message_id_of(host, host_len, phy_offset))
    set_item(made, 3, store_timestamp)
    set_item(made, 4, size)
    # Numbers and a text: a collection has nothing to look for in it.
    PyObject_GC_UnTrack(made)
    return made


cdef inline void set_item(object made, Py_ssize_t i, object value) noexcept:
    Py_INCREF(value)
    PyTuple_SET_ITEM(made, i, value)


cdef object ZERO = 0


cdef inline bint small_number(PyObject* value, int64_t* out) noexcept:
    # False for what is no int, or does not fit 64 bits.  Most numbers of a message are the one object that 0 is.
    cdef int overflow = 0
    if value == <PyObject*>ZERO:
        out[0] = 0
        return True
    if not PyLong_CheckExact(value):
        return False
    out[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return overflow == 0


cdef str message_id_of(const unsigned char* host, int32_t host_len, int64_t phy_offset):
    # Upper-case hex of the host and the offset (RocketMQ MessageDecoder.createMessageId).
    cdef str text = PyUnicode_New(2 * (host_len + 8), 127)
    cdef unsigned char[28] id_bytes
    memcpy(id_bytes, host, host_len)
    put_i64(id_bytes + host_len, phy_offset)
    put_hex(<unsigned char*>PyUnicode_DATA(<PyObject*>text), id_bytes, host_len + 8)
    return text


@cython.no_gc_clear
cdef class FileEnd:
    """The file in which a stream goes on, as `Appender` writes to it.

    Parameters
    ----------
    stream : FileStream
        Whose `wrote_where` says where.
    mapped_file : object
        With `_region` (None while it is not mapped, which the pool decides), `file_from_offset` and `pool`; it must be
        allocated on disk.
    """

    cdef FileStream stream
    cdef object mapped_file
    cdef set dirty
    cdef int64_t base_offset

    def __cinit__(self, FileStream stream not None, mapped_file not None):
        self.stream, self.mapped_file, self.base_offset = stream, mapped_file, mapped_file.file_from_offset
        self.dirty = mapped_file.pool.dirty

    cdef Region region_for(self, int64_t size, int64_t* pos):
        # The mapping that takes `size` bytes, and where in it; None if this is not the file for them any more.
        cdef Region region = self.mapped_file._region
        pos[0] = self.stream.wrote_where - self.base_offset
        return region if region is not None and 0 <= pos[0] <= region.size - size else None


@cython.no_gc_clear
cdef class Appender:
    """Appends one plain message, its unit and its index entries in one call.

    It knows the ends of the log, of queues and of the index from `learn`; whatever it does not know, or does not fit
    there, it leaves to its caller, who goes the long way and lets it learn.  The caller holds the append lock.

    Parameters
    ----------
    batch : RowBatch
        Used for the one row.
    kind : type
        What a plain message is an instance of, exactly.
    result : type
        Named tuple of (phy_offset, queue_offset, msg_id, store_timestamp, size).
    clock : callable
        Gives the store time, ms since epoch; asked when nothing else can stop a put any more.
    indexed, index_tags : bool
        Whether keys, and tags, are indexed.
    max_ends : int
        How many queues are kept in mind.

    Attributes
    ----------
    writing : bool
        A put began to write and did not come to its end.
    """

    cdef readonly bint writing
    cdef RowBatch batch
    cdef object clock
    cdef int64_t max_ends
    cdef type kind, result
    cdef bint indexed, index_tags
    cdef FileEnd log
    cdef dict ends       # queue number: FileEnd
    cdef IndexRegion index

    def __cinit__(self, RowBatch batch not None, type kind not None, type result not None, clock not None, bint indexed,
                  bint index_tags, int64_t max_ends=1024):
        if not issubclass(result, tuple) or len(result._fields) != 5:
            raise TypeError("a named tuple of five is needed")
        self.batch, self.kind, self.result = batch, kind, result
        self.indexed, self.index_tags, self.clock, self.max_ends = indexed, index_tags, clock, max_ends
        self.ends = {}
        batch.reserve_rows(1)

    def learn(self, FileEnd log not None, IndexRegion index, int queue=-1, FileEnd end=None):
        """Take the ends of the log and of one queue, and the newest index file; few queues are kept."""
        self.log, self.index = log, index
        if end is not None:
            if len(self.ends) >= self.max_ends:
                self.ends.clear()
            self.ends[queue] = end

    def put(self, message, queue_id):
        """Append the message; its `result`, or None if it has to go the long way: nothing is written then."""
        cdef RowBatch batch = self.batch
        cdef Row* row
        cdef FileEnd log = self.log, end
        cdef Region log_region, end_region
        cdef int64_t number = 0, pos, unit_pos, keys, i, code, now
        cdef int32_t[APPEND_KEYS] hashes
        cdef unsigned char* p
        cdef unsigned char* unit
        if (log is None or type(message) is not self.kind or not small_number(<PyObject*>queue_id, &number)
                or (self.indexed and self.index is None)):
            return None
        # An earlier row may have been left behind.
        batch.clear()
        if batch.take_message(<MessageFields?>message, number) != TAKEN:
            return None
        row = &batch.rows[0]
        end = self.ends.get(row.queue)
        if end is None:
            return None
        log_region, end_region = log.region_for(row.size + BLANK_SIZE, &pos), end.region_for(UNIT_SIZE, &unit_pos)
        if log_region is None or end_region is None:
            return None
        row.phy_offset = log.base_offset + pos
        row.parts.queue_offset = end.stream.wrote_where // UNIT_SIZE
        batch.seal(0, EMPTY_TIMESTAMPS)
        keys = put_key_hashes(hashes, 0, APPEND_KEYS, hash_utf8(0, row.parts.topic, row.parts.topic_len), row.parts.properties,
                              &row.indexed, self.index_tags, &code)
        if keys < 0 or (self.indexed and not index_takes(self.index, keys, row.phy_offset)):
            return None
        now = self.clock()
        # Asking the clock may have run anything, even a put.
        if row != &batch.rows[0] or batch.count != 1 or row.phy_offset != log.stream.wrote_where:
            raise RuntimeError("the clock of the store put a message itself")
        batch.seal(now, EMPTY_TIMESTAMPS)
        p = log_region.pin_writable(pos, row.size + BLANK_SIZE)
        try:
            unit = end_region.pin_writable(unit_pos, UNIT_SIZE)
            self.writing = True
            try:
                log.dirty.add(log.mapped_file)
                end.dirty.add(end.mapped_file)
                encode_into(p, row.size, row.phy_offset, &row.parts, batch.prop_crc)
                log.stream.wrote_where += row.size
                put_unit(unit, row.phy_offset, <int32_t>row.size, code)
                end.stream.wrote_where += UNIT_SIZE
            finally:
                end_region.unpin()
        finally:
            log_region.unpin()
        if self.indexed:
            for i in range(keys):
                if not self.index.put_one(hashes[i], row.phy_offset, now):
                    raise RuntimeError("the index file became full while a message was being put")
        made = put_result(self.result, row.phy_offset, row.parts.queue_offset, row.parts.store_host, row.parts.store_host_len,
                          row.parts.store_timestamp, row.size)
        self.writing = False
        batch.clear()
        return made


cdef bint index_takes(IndexRegion index, int64_t num, int64_t phy_offset) except -1:
    # The entries fit and leave the file not full, and the record is not there yet.
    cdef Region region = index.region
    cdef unsigned char* base
    cdef bint takes
    if region.closed:
        return False
    base = region.pin(0, INDEX_HEADER_SIZE)
    takes = (index_count_of(base) + num < index.index_num
             and phy_offset >= get_i64(base + INDEX_END_PHY_OFFSET))
    region.unpin()
    return takes


cdef enum:
    APPEND_KEYS = 64

# Made at import, when there is no NumPy yet.
cdef int64_t[::1] EMPTY_TIMESTAMPS = stdlib_array("q")


# -------------------------------------------------------------------------------------------------- consume queue

cdef inline void put_unit(unsigned char* p, int64_t phy_offset, int32_t size, int64_t tags_code) noexcept nogil:
    # The size goes last: a unit with size 0 does not exist for a reader.
    put_i64(p + UNIT_TAGS_CODE, tags_code)
    put_i64(p, phy_offset)
    release_fence()
    put_i32(p + UNIT_RECORD_SIZE, size)


def write_unit(Region region not None, int64_t pos, int64_t phy_offset, int32_t size, int64_t tags_code):
    """Write one 20-byte unit at `pos`."""
    cdef unsigned char* p = region.pin_writable(pos, UNIT_SIZE)
    put_unit(p, phy_offset, size, tags_code)
    region.unpin()


def write_units(Region region not None, int64_t pos, const int64_t[::1] phy_offsets not None,
                const int32_t[::1] sizes not None, const int64_t[::1] tags_codes not None):
    """Write 20-byte units one behind the other from `pos` on; the three columns have the same length."""
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
    """tuple: (phy_offset, size, tags_code) of the unit at `pos`."""
    cdef unsigned char* p = region.pin(pos, UNIT_SIZE)
    cdef int32_t size = get_i32(p + UNIT_RECORD_SIZE)
    acquire_fence()
    cdef int64_t phy_offset = get_i64(p), tags_code = get_i64(p + UNIT_TAGS_CODE)
    region.unpin()
    return phy_offset, size, tags_code


def read_units(Region region not None, int64_t pos, int64_t count):
    """Read `count` units from `pos` on.

    Returns
    -------
    (numpy.ndarray of int64, numpy.ndarray of int32, numpy.ndarray of int64)
        phy offsets, record sizes, tags codes; shape (count,) each.
    """
    cdef int64_t i
    cdef int64_t[::1] phy
    cdef int32_t[::1] size
    cdef int64_t[::1] tags
    if count < 0 or count > INT64_MAX // UNIT_SIZE:
        raise OffsetOutOfRangeError(f"{count} units", pos=pos)
    # The place is checked before memory is asked for.
    cdef unsigned char* p = region.pin(pos, UNIT_SIZE * count)
    try:
        phy_array, size_array, tags_array = np.empty(count, np.int64), np.empty(count, np.int32), np.empty(count, np.int64)
        phy, size, tags = phy_array, size_array, tags_array
        with nogil:
            for i in range(count):
                size[i] = get_i32(p + UNIT_SIZE * i + UNIT_RECORD_SIZE)
                phy[i] = get_i64(p + UNIT_SIZE * i)
                tags[i] = get_i64(p + UNIT_SIZE * i + UNIT_TAGS_CODE)
        return phy_array, size_array, tags_array
    finally:
        region.unpin()


cdef int64_t agreeing(const unsigned char* units, RecordColumns columns, const int64_t[::1] rows, int64_t queue_offset,
                      bint tags) noexcept nogil:
    # How many of as many units as there are rows, from the first on, say what their record needs; -1 - i if row i is none.
    cdef int64_t n = rows.shape[0], i, row
    cdef const unsigned char* unit
    for i in range(n):
        row = rows[i]
        if row < 0 or row >= columns.capacity:
            return -1 - i
        unit = units + UNIT_SIZE * i
        if (columns.c_queue_offset[row] != queue_offset + i or get_i64(unit) != columns.c_phy_offset[row]
                or get_i32(unit + UNIT_RECORD_SIZE) != columns.c_size[row]
                or (tags and get_i64(unit + UNIT_TAGS_CODE) != columns.c_tags_code[row])):
            return i
    return n


cdef int64_t known_rows(int64_t agreed, RecordColumns columns, const int64_t[::1] rows) except -1:
    if agreed < 0:
        raise OffsetOutOfRangeError(f"row {rows[-1 - agreed]} of {columns.capacity}")
    return agreed


def agreeing_units(Region region not None, int64_t pos, RecordColumns columns not None, const int64_t[::1] rows not None,
                   int64_t queue_offset, bint tags=True):
    """Compare the units from `pos` on with the records in `rows`; nothing is changed.

    Parameters
    ----------
    columns : RecordColumns
    rows : array of int64
        Rows of one queue, in order; as many units are looked at.
    queue_offset : int
        The number that the first of these units has.
    tags : bool
        Compare tags codes as well; they are addresses where a queue has an extension.

    Returns
    -------
    int
        How many, from the first on, say what the record needs, which also has the number that follows.
    """
    cdef int64_t agreed
    cdef unsigned char* p = region.pin(pos, UNIT_SIZE * rows.shape[0])
    try:
        with nogil:
            agreed = agreeing(p, columns, rows, queue_offset, tags)
    finally:
        region.unpin()
    return known_rows(agreed, columns, rows)


def agreeing_unit_bytes(const uint8_t[::1] units not None, RecordColumns columns not None, const int64_t[::1] rows not None,
                        int64_t queue_offset):
    """As `agreeing_units` with the bytes of the units, of which there must be as many as rows (ValueError)."""
    if units.shape[0] != UNIT_SIZE * rows.shape[0]:
        raise ValueError(f"{units.shape[0]} bytes of units for {rows.shape[0]} rows")
    if rows.shape[0] == 0:
        return 0
    return known_rows(agreeing(&units[0], columns, rows, queue_offset, True), columns, rows)


def unit_ends(const uint8_t[::1] units not None, int64_t far):
    """Where the records end that units point at.

    Parameters
    ----------
    units : buffer
        The bytes of whole units.
    far : int
        The greatest phy offset that a unit may have.

    Returns
    -------
    (int, int) or None
        For the last unit, and the greatest of all; a pre-fill unit counts as -1.  None if there are no units, or one of them
        was not written: its size is not positive, or its phy offset is not from 0 to `far`.
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


def agreeing_entries(IndexRegion index not None, int64_t first, RecordColumns columns not None, int64_t begin):
    """Compare the entries `first`, +1, … with the key hashes of the records in `columns`; nothing is changed.

    Parameters
    ----------
    index : IndexRegion
    first : int
        Number of an entry, at least 1.
    columns : RecordColumns
    begin : int
        Number of the key hash with which the entry `first` is compared.

    Returns
    -------
    int
        How many entries, from the first on, have the hash, the phy offset and the time that the record of this hash gives
        them.  The time of entry 1 is not looked at: it counts from the file before.  0 if there is no such entry.

    Raises
    ------
    OffsetOutOfRangeError
        `first` or `begin` is no such number.
    """
    # Held, as `grow_keys` may put another array in its place.
    cdef const int32_t[::1] hashes = columns.c_key_hash
    cdef int64_t num = columns.count
    cdef int64_t total = columns.c_key_start[num] if 0 <= num <= columns.capacity else -1
    if not 0 <= begin <= total <= hashes.shape[0] or first < 1:
        raise OffsetOutOfRangeError(f"entries from {first} on and key hashes from {begin} on of {total}")
    cdef Region region = index.region
    cdef unsigned char* base = region.pin(0, region.size)
    cdef const unsigned char* entry = base + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num
    cdef int64_t n, i = first, row, at, begin_timestamp, diff
    cdef bint same = True
    try:
        with nogil:
            n = index_count_of(base)
            n = n if n < index.index_num else index.index_num
            begin_timestamp = get_i64(base + INDEX_BEGIN_TIMESTAMP)
            for row in range(num):
                # The columns are open to everybody, so that what they say of themselves may be wrong.
                if columns.c_key_start[row + 1] <= begin:
                    continue
                diff = 0
                if begin_timestamp > 0:
                    diff = <int64_t>(<uint64_t>columns.c_store_timestamp[row] - <uint64_t>begin_timestamp)
                    diff = 0 if diff < 0 else diff // 1000
                    diff = 0x7FFFFFFF if diff > 0x7FFFFFFF else diff
                at = columns.c_key_start[row]
                at = begin if at < begin else at
                while at < columns.c_key_start[row + 1] and at < total and i < n:
                    same = (get_i32(entry + ENTRY_SIZE * i) == hashes[at]
                            and get_i64(entry + ENTRY_SIZE * i + ENTRY_PHY_OFFSET) == columns.c_phy_offset[row]
                            and (i == 1 or get_i32(entry + ENTRY_SIZE * i + ENTRY_TIME_DIFF) == diff))
                    if not same:
                        break
                    at += 1
                    i += 1
                if not same or i >= n:
                    break
        return i - first
    finally:
        region.unpin()


def count_units(Region region not None, int64_t unit_size=UNIT_SIZE, int64_t first=0):
    """int: how many units from the start of the file are written (phy offset not negative, size above 0).

    The first `first` of them are known to be.
    """
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
            while n < room and get_i32(p + unit_size * n + UNIT_RECORD_SIZE) > 0 and get_i64(p + unit_size * n) >= 0:
                n += 1
        return n
    finally:
        region.unpin()


def unit_at_or_after(Region region not None, int64_t low, int64_t high, int64_t phy_offset, int64_t unit_size=UNIT_SIZE):
    """int: number of the first unit in [low, high) whose phy offset is not below `phy_offset`, or `high`."""
    if unit_size != UNIT_SIZE and unit_size != BATCH_UNIT_SIZE:
        raise ValueError(f"unit_size {unit_size}; a unit has {UNIT_SIZE} or {BATCH_UNIT_SIZE} bytes")
    if low < 0 or high < low or high > INT64_MAX // unit_size:
        raise OffsetOutOfRangeError(f"units {low} to {high}")
    cdef unsigned char* p = region.pin(0, unit_size * high)
    cdef int64_t middle
    try:
        with nogil:
            while low < high:
                middle = low + (high - low) // 2
                if get_i64(p + unit_size * middle) < phy_offset:
                    low = middle + 1
                else:
                    high = middle
        return low
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
    release_fence()
    put_i32(p + BATCH_UNIT_RECORD_SIZE, size)
    region.unpin()


def read_batch_unit(Region region not None, int64_t pos):
    """tuple: (phy_offset, size, tags_code, store_timestamp, base_offset, batch_num) of the 46-byte unit at `pos`."""
    cdef unsigned char* p = region.pin(pos, BATCH_UNIT_SIZE)
    try:
        return (get_i64(p), get_i32(p + BATCH_UNIT_RECORD_SIZE), get_i64(p + BATCH_UNIT_TAGS_CODE),
                get_i64(p + BATCH_UNIT_STORE_TIMESTAMP), get_i64(p + BATCH_UNIT_BASE_OFFSET),
                get_i16(p + BATCH_UNIT_BATCH_NUM))
    finally:
        region.unpin()


def read_ext_unit(Region region not None, int64_t pos):
    """Read a unit of a consume-queue extension file.

    Returns
    -------
    (int, int, bytes) or None
        Tags code, store timestamp (ms since epoch) and bitmap; None where no whole unit lies.
    """
    if (pos < 0 or pos > region.size - EXT_UNIT_MIN_SIZE) and not region.closed:
        return None
    cdef unsigned char* p = region.pin(pos, region.size - pos)
    cdef int64_t size = get_i16(p), bitmap = get_i16(p + EXT_UNIT_BITMAP_LENGTH)
    try:
        if size < EXT_UNIT_MIN_SIZE or size > region.size - pos or bitmap < 0 or EXT_UNIT_MIN_SIZE + bitmap != size:
            return None
        return (get_i64(p + EXT_UNIT_TAGS_CODE), get_i64(p + EXT_UNIT_STORE_TIMESTAMP),
                PyBytes_FromStringAndSize(<char*>p + EXT_UNIT_MIN_SIZE, bitmap))
    finally:
        region.unpin()


def agreeing_ext_units(Region region not None, int64_t base_offset, const int64_t[::1] addresses not None,
                       tags_codes=None, store_timestamps=None):
    """Look at the units of a consume-queue extension file to which `addresses` lead; nothing is changed.

    Parameters
    ----------
    base_offset : int
        Offset of the file's first byte among the extension's files.
    addresses : array of int64
        As tags codes of simple units hold them.
    tags_codes, store_timestamps : array of int64, optional
        What the units should say; without them they only have to be whole.

    Returns
    -------
    int
        How many, from the first on, lead to a whole unit in this file that says so.
    """
    cdef int64_t n = addresses.shape[0], i = 0, pos, size, bitmap
    cdef bint compare = tags_codes is not None and store_timestamps is not None
    cdef const int64_t[::1] tags = tags_codes if compare else addresses
    cdef const int64_t[::1] times = store_timestamps if compare else addresses
    if tags.shape[0] != n or times.shape[0] != n:
        raise ValueError(f"{n} addresses, {tags.shape[0]} tags codes, {times.shape[0]} timestamps")
    cdef unsigned char* base = region.pin(0, region.size)
    cdef const unsigned char* unit
    try:
        with nogil:
            while i < n:
                # The unsigned difference is the offset, whatever the address.
                pos = <int64_t>(<uint64_t>addresses[i] - <uint64_t>EXT_BASE - <uint64_t>base_offset)
                if pos < 0 or pos > region.size - EXT_UNIT_MIN_SIZE:
                    break
                unit = base + pos
                size = get_i16(unit)
                bitmap = get_i16(unit + EXT_UNIT_BITMAP_LENGTH)
                if size > region.size - pos or bitmap < 0 or EXT_UNIT_MIN_SIZE + bitmap != size:
                    break
                if compare and (get_i64(unit + EXT_UNIT_TAGS_CODE) != tags[i]
                                or get_i64(unit + EXT_UNIT_STORE_TIMESTAMP) != times[i]):
                    break
                i += 1
        return i
    finally:
        region.unpin()


def write_ext_unit(Region region not None, int64_t pos, int64_t tags_code, int64_t store_timestamp, bytes bitmap not None=b""):
    """int: write a unit of a consume-queue extension file at `pos`; its size in bytes."""
    cdef int64_t size = EXT_UNIT_MIN_SIZE + PyBytes_GET_SIZE(bitmap)
    if size > 0x7FFF:
        raise ValueError(f"a bitmap of {len(bitmap)} bytes is too long")
    cdef unsigned char* p = region.pin_writable(pos, size)
    put_i64(p + EXT_UNIT_TAGS_CODE, tags_code)
    put_i64(p + EXT_UNIT_STORE_TIMESTAMP, store_timestamp)
    put_i16(p + EXT_UNIT_BITMAP_LENGTH, <int16_t>PyBytes_GET_SIZE(bitmap))
    memcpy(p + EXT_UNIT_MIN_SIZE, PyBytes_AS_STRING(bitmap), PyBytes_GET_SIZE(bitmap))
    release_fence()
    put_i16(p, <int16_t>size)
    region.unpin()
    return size


# ------------------------------------------------------------------------------------------------- messages as read

cdef enum:
    # A CRC over more bytes than this takes long enough to let other threads run meanwhile; a shorter one would wait longer
    # for the GIL than it runs.
    LONG_BODY = 131072
    WALK_STEPS = 1024
    HOST_SIZE = 20        # the longer of the two forms
    SHORT_PROPERTIES = 112


cdef extern from *:
    """
    /* How messages that are read are made and freed: as their type would, but without the way through its bases, each of
       which fills and clears its own part, and without an entry in the collector's lists.  The objects of a message stand
       first in it: the fields of MessageFields, then those of StoredMessage. */
    #define RMQ_MESSAGE_OBJECTS 12
    typedef struct { PyObject_HEAD PyObject *objects[RMQ_MESSAGE_OBJECTS]; } rmq_message;

    static PyObject *rmq_new_message(PyTypeObject *kind) {
        rmq_message *made = (rmq_message *)PyObject_GC_New(PyObject, kind);
        int i;
        if (!made) return NULL;
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) Py_INCREF(Py_None);
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) made->objects[i] = Py_None;
        return (PyObject *)made;
    }

    static void rmq_free_message(PyObject *made) {
        PyTypeObject *kind = Py_TYPE(made);
        int i;
        if (kind->tp_finalize && PyObject_CallFinalizerFromDealloc(made) < 0) return;
        PyObject_GC_UnTrack(made);
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) Py_XDECREF(((rmq_message *)made)->objects[i]);
        kind->tp_free(made);
        Py_DECREF(kind);
    }

    /* Whether `kind` adds nothing to `stored` that would have to be made or freed, and `blank`, one as its type makes it,
       is laid out as is said above.  Then it is freed by `rmq_free_message` from now on. */
    static int rmq_adopt_message(PyTypeObject *kind, PyTypeObject *stored, PyObject *blank) {
        int i;
        if (!(kind->tp_flags & Py_TPFLAGS_HEAPTYPE) || !PyType_IS_GC(kind) || kind->tp_basicsize != stored->tp_basicsize
                || (size_t)kind->tp_basicsize < sizeof(rmq_message) || kind->tp_itemsize || kind->tp_dictoffset
                || kind->tp_weaklistoffset || kind->tp_new != stored->tp_new || kind->tp_alloc != PyType_GenericAlloc
                || kind->tp_free != PyObject_GC_Del)
            return 0;
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++)
            if (((rmq_message *)blank)->objects[i] != Py_None) return 0;
        kind->tp_dealloc = rmq_free_message;
        return 1;
    }
    """
    object new_message "rmq_new_message"(PyTypeObject* kind)
    bint adopt_message "rmq_adopt_message"(PyTypeObject* kind, PyTypeObject* stored, object blank)


@cython.auto_pickle(False)
cdef class StoredMessage(MessageFields):
    """A record as a message that cannot be changed; `rmqstore.MessageExt` is this with what needs no speed.

    Numbers, hosts, body and properties are copied from the record when it is read; texts are decoded when they are asked for.

    Parameters
    ----------
    record : tuple
        The 18 fields of `decode_record`.
    """

    # Of the fields of MessageFields the topic, the stored body, and the properties once they are parsed; the others stay None.
    cdef object sent_body
    cdef bytes long_properties  # None where they are short
    cdef RecordView record      # with the version in place of the magic; its positions mean nothing here
    cdef unsigned char[HOST_SIZE] born_host_bytes
    cdef unsigned char[HOST_SIZE] store_host_bytes
    cdef unsigned char[SHORT_PROPERTIES] short_properties
    cdef bint crc_ok

    def __init__(self, tuple record not None):
        cdef bytes born_host, store_host, body, properties
        cdef str topic
        (self.record.total_size, self.record.magic, self.record.body_crc, self.record.queue_id, self.record.flag,
         self.record.queue_offset, self.record.phy_offset, self.record.sys_flag, self.record.born_timestamp, born_host,
         self.record.store_timestamp, store_host, self.record.reconsume_times, self.record.prepared_transaction_offset,
         body, topic, properties, self.crc_ok) = record
        if born_host is None or store_host is None or body is None or topic is None or properties is None:
            raise TypeError("topic, body, properties and hosts must not be None")
        if PyBytes_GET_SIZE(born_host) > HOST_SIZE or PyBytes_GET_SIZE(store_host) > HOST_SIZE:
            raise ValueError(f"a host takes 8 or 20 bytes, not {len(born_host)} and {len(store_host)}")
        self.record.born_host_len = <int32_t>PyBytes_GET_SIZE(born_host)
        self.record.store_host_len = <int32_t>PyBytes_GET_SIZE(store_host)
        memcpy(self.born_host_bytes, PyBytes_AS_STRING(born_host), self.record.born_host_len)
        memcpy(self.store_host_bytes, PyBytes_AS_STRING(store_host), self.record.store_host_len)
        take_properties(self, <const unsigned char*>PyBytes_AS_STRING(properties), PyBytes_GET_SIZE(properties), properties)
        (<MessageFields>self).topic, (<MessageFields>self).body = topic, body
        (<MessageFields>self).properties = self.sent_body = None

    @property
    def _record(self):
        cdef RecordView* r = &self.record
        return (r.total_size, r.magic, r.body_crc, r.queue_id, r.flag, r.queue_offset, r.phy_offset, r.sys_flag,
                r.born_timestamp, self._born_host_stored, r.store_timestamp, self._store_host_stored, r.reconsume_times,
                r.prepared_transaction_offset, (<MessageFields>self).body, (<MessageFields>self).topic,
                self.properties_stored, bool(self.crc_ok))

    @property
    def _born_host_stored(self):
        return PyBytes_FromStringAndSize(<char*>self.born_host_bytes, self.record.born_host_len)

    @property
    def _store_host_stored(self):
        return PyBytes_FromStringAndSize(<char*>self.store_host_bytes, self.record.store_host_len)

    @property
    def topic(self):
        return (<MessageFields>self).topic

    @property
    def body(self):
        """bytes: the body as it was sent: decompressed on first use.  That of a `corrupt` message stays as it is stored.

        Raises
        ------
        CorruptionError
            The body cannot be decompressed; `body_stored` has its bytes.
        UnsupportedFormatError, MissingDependencyError
            As of `decompress_body`.
        """
        if not self.record.sys_flag & 1 or not self.crc_ok:
            return (<MessageFields>self).body
        if self.sent_body is None:
            self.sent_body = self._decompressed_body()
        return self.sent_body

    @property
    def body_stored(self):
        """bytes: the body as the record holds it, maybe compressed."""
        return (<MessageFields>self).body

    @property
    def properties(self):
        """dict of str to str: the properties, parsed on first use with `parse_properties`."""
        if (<MessageFields>self).properties is None:
            (<MessageFields>self).properties = self._parsed_properties()
            # From now on its owner can put something into it that leads back here.
            if not PyObject_GC_IsTracked(self):
                PyObject_GC_Track(self)
        return (<MessageFields>self).properties

    @property
    def properties_stored(self):
        """bytes: the properties text as the record holds it."""
        if self.long_properties is not None:
            return self.long_properties
        return PyBytes_FromStringAndSize(<char*>self.short_properties, self.record.properties_len)

    @property
    def keys(self):
        """list of str: the pieces of the KEYS property, split at spaces."""
        text = property_of(self, b"KEYS", 4)
        if text is None:
            return []
        if PyUnicode_IS_COMPACT_ASCII(<PyObject*>text):
            several = memchr(PyUnicode_DATA(<PyObject*>text), 32, PyUnicode_GET_LENGTH(<PyObject*>text)) != NULL
        else:
            several = " " in text
        return [key for key in text.split(" ") if key] if several else [text]

    @property
    def tags(self):
        """str or None: the TAGS property."""
        return property_of(self, b"TAGS", 4)

    @property
    def unique_key(self):
        """str or None: the producer's id (property UNIQ_KEY)."""
        return property_of(self, b"UNIQ_KEY", 8)

    @property
    def store_size(self):
        """int: size of the whole record in the log, bytes."""
        return self.record.total_size

    @property
    def version(self):
        """int: 1, or 2 for a record with a 16-bit topic length (RocketMQ since 5.1.0)."""
        return self.record.magic

    @property
    def crc(self):
        """int: the stored CRC-32 of the stored body, top bit clear."""
        return self.record.body_crc

    def check_queue(self, str topic not None, int64_t queue_id, int64_t queue_offset):
        """bool: its record says that it is the one with this place in this queue; if not, it is marked as corrupt."""
        cdef bint ours = is_of_queue(self, topic, queue_id, queue_offset)
        if not ours:
            self.crc_ok = False
        return ours

    @property
    def corrupt(self):
        """bool: the stored body does not fit its CRC, or the record says that it is another message than its queue unit."""
        return not self.crc_ok

    @property
    def queue_id(self):
        return self.record.queue_id

    @property
    def queue_offset(self):
        return self.record.queue_offset

    @property
    def phy_offset(self):
        """int: absolute position of the record in the commit log."""
        return self.record.phy_offset

    @property
    def flag(self):
        return self.record.flag

    @property
    def sys_flag(self):
        return self.record.sys_flag

    @property
    def born_timestamp(self):
        return self.record.born_timestamp

    @property
    def store_timestamp(self):
        return self.record.store_timestamp

    @property
    def reconsume_times(self):
        return self.record.reconsume_times

    @property
    def prepared_transaction_offset(self):
        return self.record.prepared_transaction_offset


cdef void take_properties(StoredMessage m, const unsigned char* text, int64_t n, bytes held):
    # Short ones, as most are, stand in the message itself.
    m.record.properties_len = <int32_t>n
    if n <= SHORT_PROPERTIES:
        memcpy(m.short_properties, text, n)
        m.long_properties = None
    else:
        m.long_properties = PyBytes_FromStringAndSize(<char*>text, n) if held is None else held


cdef object property_of(StoredMessage m, const char* name, Py_ssize_t name_len):
    # The value of one property, None if there is none; what was parsed before stands, as its owner may have changed it.
    cdef const unsigned char* text
    cdef int32_t value, value_len, n = m.record.properties_len
    cdef int64_t room = SHORT_PROPERTIES
    if (<MessageFields>m).properties is not None:
        return (<MessageFields>m).properties.get(name[:name_len].decode("ascii"))
    if m.long_properties is None:
        text = m.short_properties
    else:
        text, room = <const unsigned char*>PyBytes_AS_STRING(m.long_properties), n
    value = value_of(text, n, room, <const unsigned char*>name, <int32_t>name_len, &value_len)
    return text_of(text + value, value_len) if value >= 0 else None


cdef tuple NO_ARGUMENTS = ()
# Of the message that was decoded last: the next one mostly has the same.
cdef bytes last_topic_bytes = b""
cdef str last_topic = ""
cdef type adopted = None


cdef inline bint same_bytes(bytes known, const unsigned char* p, int64_t n):
    return PyBytes_GET_SIZE(known) == n and memcmp(PyBytes_AS_STRING(known), p, n) == 0


def adopt(type kind not None):
    """Make and free messages of this kind, a subclass of `StoredMessage`, in the shortest way from now on.

    Nothing else about it changes.  A kind that adds fields of its own is left as it is.
    """
    global adopted
    message_type(kind)
    if adopt_message(<PyTypeObject*>kind, <PyTypeObject*>StoredMessage, StoredMessage.__new__(StoredMessage)):
        adopted = kind


cdef type message_type(type kind):
    # Makes sure that what is made of it is a message.
    if kind is None or (kind is not adopted and not issubclass(kind, StoredMessage)):
        raise TypeError(f"{kind!r} is no kind of StoredMessage")
    return kind


cdef bint crcs_ok(const unsigned char* p, RecordView* r, int check_crc):
    cdef bint ok = True
    if check_crc:
        if r.total_size > LONG_BODY:
            with nogil:
                ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (check_crc < 2 or has_prop_crc(p, r))
        else:
            ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (check_crc < 2 or has_prop_crc(p, r))
    return ok


cdef StoredMessage message_of(type kind, const unsigned char* p, RecordView* r, int check_crc):
    # The caller holds a pin: allocations may run a finalizer that closes the file.
    global last_topic_bytes, last_topic
    cdef StoredMessage m
    cdef bytes topic_bytes
    cdef str topic
    if kind is adopted:
        m = <StoredMessage>new_message(<PyTypeObject*>kind)
    else:
        m = <StoredMessage>(<PyTypeObject*>kind).tp_new(kind, <PyObject*>NO_ARGUMENTS, NULL)
    m.record = r[0]
    m.record.magic = 1 if r.magic == C_MAGIC_V1 else 2
    m.crc_ok = crcs_ok(p, r, check_crc)
    # Behind a host of 8 bytes there are more than 12 others of the record in any case: 20 are copied always, which is cheaper.
    memcpy(m.born_host_bytes, p + RECORD_BORN_HOST, HOST_SIZE)
    memcpy(m.store_host_bytes, p + r.store_host_pos, HOST_SIZE)
    (<MessageFields>m).body = PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len)
    take_properties(m, p + r.properties_pos, r.properties_len, None)
    if same_bytes(last_topic_bytes, p + r.topic_pos, r.topic_len):
        (<MessageFields>m).topic = last_topic
    else:
        topic = text_of(p + r.topic_pos, r.topic_len)
        topic_bytes = PyBytes_FromStringAndSize(<char*>p + r.topic_pos, r.topic_len)
        last_topic, last_topic_bytes = topic, topic_bytes
        (<MessageFields>m).topic = topic
    return m


def read_message(Region region not None, int64_t pos, int64_t base_offset, type kind not None, int check_crc=1):
    """Decode the record at `pos` of a segment as a message.

    Parameters
    ----------
    base_offset : int
        Absolute offset of the segment's first byte; the record must say that it lies here.
    kind : type
        What the message shall be, a subclass of `StoredMessage`.
    check_crc : int
        As of `decode_record`; a CRC that fails marks the message as corrupt.

    Returns
    -------
    StoredMessage or Verdict
        Anything that is not a whole record gives the verdict.
    """
    message_type(kind)
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, region.size - pos)
    cdef int verdict
    try:
        verdict = judge_record(p, region.size - pos, base_offset + pos, 0, &r)
        if verdict != RECORD:
            return Verdict(verdict)
        return message_of(kind, p, &r, check_crc)
    finally:
        region.unpin()


def read_messages(Region region not None, int64_t pos, int64_t limit, int64_t base_offset, type kind not None,
                  int64_t max_num, int64_t max_bytes, int check_crc=1):
    """Decode the records that lie one behind the other from `pos` on.

    Parameters
    ----------
    limit : int
        Records that begin before this position.
    base_offset, kind, check_crc
        As of `read_message`.
    max_num, max_bytes : int
        At most so many; reading stops behind the record with which there are so many bytes of records.

    Returns
    -------
    (list, int)
        Messages, none where no whole record begins at `pos`; the position behind the last of them.
    """
    message_type(kind)
    cdef RecordView r
    cdef list out = []
    cdef int64_t size = region.size, begin = pos
    cdef unsigned char* base = region.pin(0, size)
    try:
        if pos < 0 or pos > size:
            raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
        if limit > size:
            limit = size
        while pos < limit and max_num > 0 and pos - begin < max_bytes:
            if judge_record(base + pos, size - pos, base_offset + pos, 0, &r) != RECORD:
                break
            prefetch_head(base + pos + r.total_size, size - pos - r.total_size)
            out.append(message_of(kind, base + pos, &r, check_crc))
            pos += r.total_size
            max_num -= 1
        return out, pos
    finally:
        region.unpin()


cdef struct Pull:
    # How far a get has come: units that were dealt with, the last that was no pre-fill unit, bytes and number of messages.
    int64_t done, last, size, taken
    bint full, missing


cdef bint is_of_queue(StoredMessage message, str topic, int64_t queue_id, int64_t queue_offset) except -1:
    # Whether the record says that it is this message of this queue, or one of its further queues (RocketMQ's LMQ).
    if (message.record.queue_id == queue_id and message.record.queue_offset == queue_offset
            and <str>(<MessageFields>message).topic == topic):
        return True
    if queue_id != 0:
        return False
    cdef bytes wanted = topic.encode("utf-8", "replace"), text = message.properties_stored
    cdef bytes scratch = PyBytes_FromStringAndSize(NULL, 3 * PyBytes_GET_SIZE(text))
    return is_dispatched_to(<unsigned char*>PyBytes_AS_STRING(scratch), <const unsigned char*>PyBytes_AS_STRING(text),
                            PyBytes_GET_SIZE(text), <int32_t>PyBytes_GET_SIZE(text),
                            <const unsigned char*>PyBytes_AS_STRING(wanted), PyBytes_GET_SIZE(wanted), queue_offset)


cdef int pull(Pull* at, const unsigned char* units, int64_t num, const unsigned char* base, int64_t segment_size,
              int64_t base_offset, int64_t low, int64_t high, type kind, list out, int64_t max_num, int64_t max_bytes,
              int check_crc, frozenset tags_codes, frozenset tags, str topic, int64_t queue_id, int64_t first) except -1:
    # The caller holds pins on both.  `first` is the queue offset of the first unit.
    cdef int64_t phy, following, tags_code
    cdef int32_t unit_size
    cdef StoredMessage message
    cdef const unsigned char* unit
    cdef const unsigned char* record
    cdef RecordView r
    cdef object known = None
    if low < base_offset:
        low = base_offset
    if high > base_offset + segment_size:
        high = base_offset + segment_size
    while at.done < num:
        unit = units + UNIT_SIZE * at.done
        unit_size = get_i32(unit + UNIT_RECORD_SIZE)
        acquire_fence()
        phy = get_i64(unit)
        if phy == 0 and unit_size == 0x7FFFFFFF:
            at.done += 1
            continue
        if at.taken and (at.taken >= max_num or at.size + unit_size > max_bytes):
            at.full = True
            break
        if tags_codes is not None:
            tags_code = get_i64(unit + UNIT_TAGS_CODE)
            if tags_code > MAX_EXT_ADDRESS and (tags_code & 0xFFFFFFFF) not in tags_codes:
                at.last = at.done
                at.done += 1
                continue
        if not low <= phy < high:
            break
        if at.done + TAIL_AHEAD < num:
            following = get_i64(unit + UNIT_SIZE * TAIL_AHEAD)
            if low <= following < high:
                prefetch_head(base + (following - base_offset), segment_size - (following - base_offset))
        record = base + (phy - base_offset)
        if (judge_record(record, segment_size - (phy - base_offset), phy, 0, &r) != RECORD
                or r.total_size != unit_size):
            at.missing |= at.taken == 0
        else:
            message = message_of(kind, record, &r, check_crc)
            if ((<MessageFields>message).topic is not known or r.queue_id != queue_id
                    or r.queue_offset != first + at.done):
                if not is_of_queue(message, topic, queue_id, first + at.done):
                    message.crc_ok = False
                elif <str>(<MessageFields>message).topic == topic:
                    # Messages that follow mostly have the same text, which then need not be compared.
                    known = (<MessageFields>message).topic
            if tags is None or property_of(message, b"TAGS", 4) in tags:
                out.append(message)
                at.taken += 1
                at.size += unit_size
        at.last = at.done
        at.done += 1
    return 0


def read_queued(Region units not None, int64_t pos, int64_t num, Region segment not None, int64_t base_offset,
                int64_t low, int64_t high, type kind not None, list out not None, int64_t size, int64_t max_num,
                int64_t max_bytes, int check_crc, frozenset tags_codes, frozenset tags, str topic not None, int64_t queue_id,
                int64_t first):
    """Decode the messages to which consecutive 20-byte units lead, as long as they lie in one segment.

    Parameters
    ----------
    units : Region
        A file of a simple queue.
    pos, num : int
        Where the first unit lies, and how many there are.
    segment, base_offset : Region, int
        A segment and the absolute offset of its first byte.
    low, high : int
        The phy offsets, of those in the segment, that a unit may lead to here.
    kind, check_crc
        As of `read_message`.
    out : list
        The messages so far; those that are read are appended.
    size, max_num, max_bytes : int
        Sum of the record sizes so far; reading stops before there are more messages, or more bytes, than these, but not
        before the first message.
    tags_codes, tags : frozenset of int, frozenset of str, optional
        Only messages with one of these tags; units whose tags code has other low 32 bits are passed over unread.  A tags code
        that is an address in an extension is not looked up and passes.
    topic, queue_id, first : str, int, int
        The queue, and the queue offset of the first unit.  A record that says that it is another message is marked as
        corrupt.

    Returns
    -------
    done : int
        How many units were dealt with; one that does not lead to a record of its size is passed over.
    last : int
        The number of the last of them that was no pre-fill unit, -1 if there was none.
    size : int
        Sum of the record sizes.
    full : bool
        A limit stopped it.
    missing : bool
        A unit led to no record before there was any message.
    """
    message_type(kind)
    if num < 0 or num > INT64_MAX // UNIT_SIZE:
        raise OffsetOutOfRangeError(f"{num} units", pos=pos)
    cdef Pull at
    at.done, at.last, at.size, at.taken, at.full, at.missing = 0, -1, size, len(out), False, False
    cdef unsigned char* first_unit = units.pin(pos, UNIT_SIZE * num)
    cdef unsigned char* base
    try:
        base = segment.pin(0, segment.size)
        try:
            pull(&at, first_unit, num, base, segment.size, base_offset, low, high, kind, out, max_num, max_bytes, check_crc,
                 tags_codes, tags, topic, queue_id, first)
        finally:
            segment.unpin()
    finally:
        units.unpin()
    return at.done, at.last, at.size, at.full, at.missing


cdef object stored_text(str text, object encode):
    # Of ASCII the text has the record's bytes itself.
    cdef bytes encoded
    if PyUnicode_IS_ASCII(text):
        return text
    encoded = encode(text)
    if encoded is None:
        raise TypeError("encode gave None, not bytes")
    return encoded


cdef inline const unsigned char* bytes_of(object text, Py_ssize_t* n) noexcept:
    # Of what `stored_text` gave.
    if PyBytes_CheckExact(<PyObject*>text):
        n[0] = PyBytes_GET_SIZE(text)
        return <const unsigned char*>PyBytes_AS_STRING(text)
    n[0] = PyUnicode_GET_LENGTH(<PyObject*>text)
    return <const unsigned char*>PyUnicode_DATA(<PyObject*>text)


@cython.freelist(4)
@cython.no_gc_clear
cdef class KeySearch:
    """The messages with one key, gathered from index files and segments that the caller gives.

    Parameters
    ----------
    topic, key : str
    key_kind : KeyKind
    begin, end : int
        Store times, ms since epoch, inclusive.
    max_num : int
        At most so many messages.
    messages : list
        Empty; takes the messages in the order in which they are met, each once.
    kind, check_crc
        As of `read_message`.
    encode : callable
        Gives the bytes in which a record holds a text that is not ASCII.
    log : FileStream, optional
        The segments; the one that was asked for last is not asked for again.

    Attributes
    ----------
    truncated : bool
        There are more than `max_num`; nothing more is taken.
    descending : bool
        `messages` is in the order of falling phy offsets.
    """

    cdef object topic, key  # as of `stored_text`
    cdef int32_t key_hash
    cdef int key_kind, check_crc
    cdef int64_t begin, end, max_num, lowest
    cdef Region segment
    cdef FileStream log
    cdef int64_t base_offset, low, high
    cdef type kind
    cdef set seen
    cdef object messages  # a list, maybe of a subclass
    cdef readonly bint truncated, descending

    def __init__(self, str topic not None, str key not None, int key_kind, int64_t begin, int64_t end, int64_t max_num,
                 messages not None, type kind not None, int check_crc, encode, FileStream log=None):
        self.prepare(topic, key, key_kind, begin, end, max_num, messages, kind, check_crc, encode, log)

    cdef int prepare(self, str topic, str key, int key_kind, int64_t begin, int64_t end, int64_t max_num, messages, type kind,
                     int check_crc, encode, FileStream log) except -1:
        if not isinstance(messages, list):
            raise TypeError(f"messages is {type(messages).__name__}, not a list")
        cdef uint32_t h = hash_str(0, topic) * 31u + 35u
        if key_kind == TAG:
            # A tag is indexed as a key of the form T#tag.
            h = (h * 31u + 84u) * 31u + 35u
        self.key_hash = index_hash(hash_str(h, key))
        self.topic, self.key, self.key_kind = stored_text(topic, encode), stored_text(key, encode), key_kind
        self.begin, self.end, self.max_num = begin, end, max_num
        self.kind, self.check_crc = message_type(kind), check_crc
        self.messages = messages
        self.log = log
        self.segment = None
        self.seen = None
        self.truncated = False
        self.descending = True
        self.lowest = INT64_MAX

    cpdef int64_t walk(self, IndexRegion index, int64_t at, region_of) except -1:
        """Take the messages of an index file's chain.

        Parameters
        ----------
        at : int
            Entry number to begin with; -1 begins at the newest.
        region_of : callable
            Gives for a phy offset the segment that holds it: (Region, offset of its first byte, and the bounds of what the
            log holds), or None if there is none.

        Returns
        -------
        int
            The entry to go on with, as a long chain is walked in parts, so that it does not keep others waiting; 0 when
            the chain is at its end, or `truncated`.
        """
        if index is None or region_of is None:
            raise TypeError("index and region_of must not be None")
        if self.messages is None or at >= index.index_num:
            raise OffsetOutOfRangeError(f"entry {at} of {index.index_num}")
        cdef Region region = index.region
        cdef unsigned char* entries = region.pin(0, region.size)
        cdef const unsigned char* entry
        cdef int64_t phy, steps = 0
        cdef bint damaged = False
        try:
            if at < 0:
                at = index_head(entries, index.magic, index.slot_num, index.index_num, self.key_hash)
                damaged = at < 0
            while at > 0 and not self.truncated and steps < WALK_STEPS:
                entry = entries + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num + ENTRY_SIZE * at
                phy = get_i64(entry + ENTRY_PHY_OFFSET)
                if get_i32(entry + ENTRY_KEY_HASH) == self.key_hash:
                    damaged |= phy < 0 or self.look_at(phy, region_of)
                at = entry_before(entry, at, self.key_hash, index.magic, index.slot_num, &damaged)
                steps += 1
            if damaged:
                index.damaged = True
            return 0 if self.truncated or at < 0 else at
        finally:
            region.unpin()

    cdef int look_at(self, int64_t phy, object region_of) except -1:
        # In the segment of the record before, or else in the one that the caller finds.  1 where an entry cannot lead there.
        cdef object found
        cdef Region segment
        cdef unsigned char* p
        if self.segment is None or not self.low <= phy < self.high:
            segment = None if self.log is None else self.log.around(phy)
            if segment is not None:
                self.segment, self.base_offset = segment, self.log.found_base
                self.low, self.high = self.base_offset, self.log.wrote_where
            else:
                found = region_of(phy)
                if found is None:
                    # Retention took it, its segment is lost, or the log does not go so far.
                    return self.log is not None and phy >= self.log.wrote_where
                self.segment, self.base_offset, self.low, self.high = found
            if self.segment is None:
                return 0
            if self.low < self.base_offset:
                self.low = self.base_offset
            if self.high > self.base_offset + self.segment.size:
                self.high = self.base_offset + self.segment.size
            if not self.low <= phy < self.high:
                return phy >= self.high
        segment = self.segment
        p = segment.pin(phy - self.base_offset, segment.size - (phy - self.base_offset))
        prefetch_head(p, segment.size - (phy - self.base_offset))
        try:
            return self.take(p, segment.size - (phy - self.base_offset), phy)
        finally:
            segment.unpin()

    cdef int take(self, const unsigned char* p, int64_t room, int64_t phy) except -1:
        cdef RecordView r
        cdef Py_ssize_t topic_len, key_len
        if judge_record(p, room, phy, 0, &r) != RECORD:
            return 1
        cdef const unsigned char* topic = bytes_of(self.topic, &topic_len)
        cdef const unsigned char* key = bytes_of(self.key, &key_len)
        if not has_key(p, &r, topic, topic_len, key, key_len, self.key_kind):
            return not has_key_hash(p, &r, self.key_hash)
        if not self.begin <= r.store_timestamp <= self.end:
            return 0
        if phy >= self.lowest:
            # A key that was indexed twice; only where offsets rise the others have to be asked.
            if self.seen is None:
                self.seen = {each.phy_offset for each in self.messages}
            if phy in self.seen:
                return 0
            self.descending = False
        if PyList_GET_SIZE(self.messages) >= self.max_num:
            self.truncated = True
            return 0
        PyList_Append(self.messages, message_of(self.kind, p, &r, self.check_crc))
        if self.seen is not None:
            self.seen.add(phy)
        if phy < self.lowest:
            self.lowest = phy
        return 0


def find_messages(indexes, region_of not None, str topic not None, str key not None, int key_kind, int64_t begin, int64_t end,
                  int64_t max_num, type result_kind not None, type kind not None, int check_crc, encode, FileStream log=None):
    """The messages with one key, as `KeySearch` finds them in the index files `indexes`, newest first.

    Parameters
    ----------
    indexes : iterable of IndexRegion
    result_kind : type
        A kind of list whose instances have an attribute `truncated`.
    others
        As of `KeySearch` and its `walk`.

    Returns
    -------
    result_kind or None
        None where the chain of a file is long or damaged, or its offsets do not fall: the caller goes on with a `KeySearch` of
        its own.
    """
    return messages_with_key(indexes, region_of, topic, key, key_kind, begin, end, max_num, list_type(result_kind), kind,
                             check_crc, encode, log)


cdef type list_type(type kind):
    # Makes sure that what is made of it is a list.
    if kind is None or not issubclass(kind, list):
        raise TypeError(f"{kind!r} is no kind of list")
    return kind


cdef object messages_with_key(indexes, object region_of, str topic, str key, int key_kind, int64_t begin, int64_t end,
                              int64_t max_num, type result_kind, type kind, int check_crc, object encode, FileStream log):
    cdef object found = (<PyTypeObject*>result_kind).tp_new(result_kind, <PyObject*>NO_ARGUMENTS, NULL)
    cdef KeySearch search = KeySearch.__new__(KeySearch)
    cdef IndexRegion index
    search.prepare(topic, key, key_kind, begin, end, max_num, found, kind, check_crc, encode, log)
    for index in indexes:
        if search.walk(index, -1, region_of) != 0 or (index.damaged and not index.is_distrusted):
            return None
        if search.truncated:
            break
    if not search.descending:
        return None
    found.truncated = search.truncated
    return found


@cython.no_gc_clear
cdef class KeyQuery:
    """Answers the usual query by key in one call: ASCII, unique keys and keys, all times, while all index files are open.

    Whatever it does not know, or should look for first, it leaves to its caller, who goes the long way.

    Parameters
    ----------
    indexes : object
        With `opened_files`: a tuple of `IndexRegion`, newest first, or None.
    region_of, result_kind, kind, check_crc, encode, log
        As of `find_messages`.
    clock : callable
        Gives seconds.
    interval : float
        So many seconds after `looked_at`, and where the newest index file is full, a query goes the long way: another process
        may have begun a new one.  Infinite where this process is the one that would, which also knows when a file is full.

    Attributes
    ----------
    looked_at : float
        When somebody last looked whether the files are those that are there, by `clock`.
    closed : bool
        Answer nothing more.
    """

    cdef public double looked_at
    cdef public bint closed
    cdef object indexes, region_of, encode, clock
    cdef type result_kind, kind
    cdef int check_crc
    cdef FileStream log
    cdef double interval

    def __cinit__(self, indexes, region_of not None, type result_kind not None, type kind not None, int check_crc, encode,
                  FileStream log not None, clock not None, double interval):
        self.indexes, self.region_of, self.encode, self.clock, self.interval = indexes, region_of, encode, clock, interval
        self.result_kind, self.kind, self.check_crc, self.log = list_type(result_kind), message_type(kind), check_crc, log
        self.looked_at = -1.0

    def find(self, topic, key, max_num):
        """result_kind or None: the messages as `find_messages` gives them, None where the caller has to."""
        cdef int64_t num
        if (self.closed or not PyUnicode_CheckExact(<PyObject*>topic) or not PyUnicode_CheckExact(<PyObject*>key)
                or not PyUnicode_IS_COMPACT_ASCII(<PyObject*>topic) or not PyUnicode_IS_COMPACT_ASCII(<PyObject*>key)
                or not small_number(<PyObject*>max_num, &num) or num < 0):
            return None
        indexes = self.indexes.opened_files
        if not indexes:
            return None
        if self.interval < INFINITY and ((<IndexRegion?>indexes[0]).full() or self.clock() - self.looked_at >= self.interval):
            return None
        return messages_with_key(indexes, self.region_of, topic, key, ANY_KEY, INT64_MIN, INT64_MAX, num, self.result_kind,
                                 self.kind, self.check_crc, self.encode, self.log)


# --------------------------------------------------------------------------------------------------- Arrow columns

cdef extern from *:
    """
    #if defined(__SSE2__)
    #include <emmintrin.h>
    #endif

    typedef struct { int32_t start, split, end; } rmq_span;
    /* Numbers of the pieces with these names, -1 where there is none; of equal names the last one counts. */
    typedef struct { int32_t keys, tags, unique_key; } rmq_known;

    static inline void rmq_know(rmq_known *known, const unsigned char *name, int32_t n, int32_t num) {
        if (n == 4) {
            if (memcmp(name, "KEYS", 4) == 0) known->keys = num;
            else if (memcmp(name, "TAGS", 4) == 0) known->tags = num;
        } else if (n == 8 && memcmp(name, "UNIQ_KEY", 8) == 0) known->unique_key = num;
    }

    /* Bits of the bytes among 64 that are 1, that are 2, and that are not ASCII. */
    static inline void rmq_marks(const unsigned char *p, uint64_t *ones, uint64_t *twos, uint64_t *high) {
        uint64_t one = 0, two = 0, top = 0;
        int i;
    #if defined(__SSE2__)
        for (i = 0; i < 4; i++) {
            __m128i v = _mm_loadu_si128((const __m128i *)(p + 16 * i));
            one |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_set1_epi8(1))) << (16 * i);
            two |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_set1_epi8(2))) << (16 * i);
            top |= (uint64_t)(uint32_t)_mm_movemask_epi8(v) << (16 * i);
        }
    #else
        for (i = 0; i < 64; i++) {
            one |= (uint64_t)(p[i] == 1) << i;
            two |= (uint64_t)(p[i] == 2) << i;
            top |= (uint64_t)(p[i] >> 7) << i;
        }
    #endif
        *ones = one; *twos = two; *high = top;
    }

    /* Those of the bytes from `at` on of a text of n bytes; `room` bytes may be read from its begin on. */
    static inline void rmq_marks_at(const unsigned char *text, int32_t at, int32_t n, int64_t room, uint64_t *ones,
                                    uint64_t *twos, uint64_t *high) {
        const unsigned char *p = text + at;
        unsigned char last[64];
        if (at + (int64_t)64 > room) {
            memset(last, 0, sizeof last);
            memcpy(last, p, (size_t)(n - at < 64 ? n - at : 64));
            p = last;
        }
        rmq_marks(p, ones, twos, high);
        if (n - at < 64) {
            uint64_t keep = ((uint64_t)1 << (n - at)) - 1;
            *ones &= keep; *twos &= keep; *high &= keep;
        }
    }

    /* The pieces of a properties text that have a name and a value: cut at 2, the first 1 of a piece ends the name (Java's
       MessageDecoder.string2messageProperties).  `room` bytes may be read; `out` takes n / 4 + 1 pieces. */
    static int32_t rmq_split_properties(const unsigned char *text, int32_t n, int64_t room, rmq_span *out, rmq_known *known,
                                        int *ascii) {
        int32_t at = 0, start = 0, split = -1, num = 0, here;
        uint64_t ones, twos, high, both, any = 0;
        known->keys = known->tags = known->unique_key = -1;
        while (at < n) {
            rmq_marks_at(text, at, n, room, &ones, &twos, &high);
            any |= high;
            for (both = ones | twos; both; both &= both - 1) {
                int bit = __builtin_ctzll(both);
                here = at + bit;
                if (ones >> bit & 1) {
                    if (split < 0) split = here;
                } else {
                    if (split > start && here > split + 1) {
                        rmq_know(known, text + start, split - start, num);
                        out[num].start = start; out[num].split = split; out[num].end = here; num++;
                    }
                    start = here + 1;
                    split = -1;
                }
            }
            at += 64;
        }
        if (split > start && n > split + 1) {
            rmq_know(known, text + start, split - start, num);
            out[num].start = start; out[num].split = split; out[num].end = n; num++;
        }
        *ascii = any == 0;
        return num;
    }

    /* What texts of one length have in common that were taken apart into the same pieces: names and separators, byte by byte,
       and where values are, any ASCII byte above both separators.  A text that fits need not be taken apart again. */
    #define RMQ_LAYOUT_ROOM 256
    #define RMQ_LAYOUT_SPANS 24
    typedef struct {
        signed char above[RMQ_LAYOUT_ROOM], equal[RMQ_LAYOUT_ROOM];  /* a byte fits that is above the one, or equal to the other */
        unsigned char names[RMQ_LAYOUT_ROOM + 64];  /* one behind the other; more may be read than they are */
        int32_t name_ends[RMQ_LAYOUT_SPANS];
        rmq_span spans[RMQ_LAYOUT_SPANS];
        rmq_known known;
        int32_t n, span_num, names_len;  /* n: length of the text, 0 for no layout */
        int64_t used_by;
    } rmq_layout;

    static inline int rmq_fits(const rmq_layout *l, const unsigned char *text, int32_t n, int64_t room) {
        int32_t i = 0;
        if (l->n != n || n <= 0) return 0;
    #if defined(__SSE2__)
        if (((int64_t)n + 15 & ~(int64_t)15) <= room) {
            __m128i fit = _mm_set1_epi8(-1);
            for (; i < n; i += 16) {
                __m128i v = _mm_loadu_si128((const __m128i *)(text + i));
                __m128i above = _mm_cmpgt_epi8(v, _mm_loadu_si128((const __m128i *)(l->above + i)));
                fit = _mm_and_si128(fit, _mm_or_si128(above, _mm_cmpeq_epi8(v, _mm_loadu_si128((const __m128i *)(l->equal + i)))));
            }
            return _mm_movemask_epi8(fit) == 0xFFFF;
        }
    #endif
        {
            int wrong = 0;
            for (; i < n; i++) wrong |= !(((signed char)text[i] > l->above[i]) | ((signed char)text[i] == l->equal[i]));
            return !wrong;
        }
    }

    static inline void rmq_find(rmq_found *found, const unsigned char *text, int32_t start, int32_t split, int32_t end) {
        const unsigned char *name = text + start;
        const int32_t pos = split + 1, len = end - split - 1;
        /* A piece needs at least one byte on either side of its first 1. */
        if (split <= start || len <= 0) return;
        switch (split - start) {
        case 4:
            if (memcmp(name, "KEYS", 4) == 0) found->indexed.keys_pos = pos, found->indexed.keys_len = len;
            else if (memcmp(name, "TAGS", 4) == 0) found->indexed.tags_pos = pos, found->indexed.tags_len = len;
            break;
        case 5:
            if (memcmp(name, "DELAY", 5) == 0) found->delay_pos = pos, found->delay_len = len;
            break;
        case 8:
            if (memcmp(name, "UNIQ_KEY", 8) == 0) found->indexed.unique_key_pos = pos, found->indexed.unique_key_len = len;
            break;
        case 9:
            if (memcmp(name, "INNER_NUM", 9) == 0) found->inner_num_pos = pos, found->inner_num_len = len;
            break;
        case 10:
            if (memcmp(name, "INNER_BASE", 10) == 0) found->inner_base_pos = pos, found->inner_base_len = len;
            break;
        case 20:
            if (memcmp(name, "INNER_MULTI_DISPATCH", 20) == 0)
                found->multi_dispatch_pos = pos, found->multi_dispatch_len = len;
            break;
        }
    }

    /* The pieces of `rmq_split_properties` of which only these are wanted; `room` bytes may be read. */
    static void rmq_find_properties(const unsigned char *text, int32_t n, int64_t room, rmq_found *found) {
        int32_t at = 0, start = 0, split = -1, here;
        uint64_t ones, twos, high, both;
        memset(found, 0xFF, sizeof *found);
        while (at < n) {
            rmq_marks_at(text, at, n, room, &ones, &twos, &high);
            for (both = ones | twos; both; both &= both - 1) {
                here = at + __builtin_ctzll(both);
                if (both & -both & ones) {
                    if (split < 0) split = here;
                } else {
                    rmq_find(found, text, start, split, here);
                    start = here + 1;
                    split = -1;
                }
            }
            at += 64;
        }
        rmq_find(found, text, start, split, n);
    }

    /* Copies n bytes; where the source has 16 more bytes of room in steps of 16, of which the last goes beyond the end.  The
       target always has that room. */
    static inline void rmq_copy(unsigned char *to, const unsigned char *from, int64_t n, int64_t room) {
    #if defined(__SSE2__)
        if (n <= 128 && n + 16 <= room) {
            int64_t i = 0;
            do {
                _mm_storeu_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
                i += 16;
            } while (i < n);
            return;
        }
    #endif
        memcpy(to, from, (size_t)n);
    }

    /* Whether n bytes are equal.  Keys and topics are short: two words that overlap cover them without a call. */
    static inline int rmq_same(const unsigned char *p, const unsigned char *q, int64_t n) {
        uint64_t a, b, c, d;
        if (n >= 4 && n < 8) {
            uint32_t first, other, last, other_last;
            memcpy(&first, p, 4);
            memcpy(&other, q, 4);
            memcpy(&last, p + n - 4, 4);
            memcpy(&other_last, q + n - 4, 4);
            return ((first ^ other) | (last ^ other_last)) == 0;
        }
        if (n < 8 || n > 16) return memcmp(p, q, (size_t)n) == 0;
        memcpy(&a, p, 8);
        memcpy(&b, q, 8);
        memcpy(&c, p + n - 8, 8);
        memcpy(&d, q + n - 8, 8);
        return ((a ^ b) | (c ^ d)) == 0;
    }

    static inline int rmq_is_ascii(const unsigned char *p, int64_t n) {
        uint64_t word, any = 0;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) { memcpy(&word, p + i, 8); any |= word; }
        for (; i < n; i++) any |= (uint64_t)p[i] << 56;
        return (any & 0x8080808080808080u) == 0;
    }

    /* Where the value of one property begins in a properties text, and its length; -1 where there is none.  The rules are those
       of `rmq_find_properties` for a name without 1 and 2; `room` bytes may be read. */
    static int32_t rmq_value_of(const unsigned char *text, int32_t n, int64_t room, const unsigned char *name, int32_t name_len,
                                int32_t *len) {
        int32_t at = 0, start = 0, value = -1, here;
        uint64_t ones, twos = 0, high;
        for (;;) {
            /* The end of the text ends a piece as well. */
            while (!twos && at < n) {
                rmq_marks_at(text, at, n, room, &ones, &twos, &high);
                at += 64;
            }
            here = twos ? at - 64 + __builtin_ctzll(twos) : n;
            if (here - start > name_len + 1 && text[start + name_len] == 1 && rmq_same(text + start, name, name_len)) {
                value = start + name_len + 1;
                *len = here - value;
            }
            if (!twos) return value;
            twos &= twos - 1;
            start = here + 1;
        }
    }

    static const char rmq_digits[] = "0123456789ABCDEF";

    #if defined(__SSE2__)
    static inline void rmq_put_hex_16(unsigned char *to, __m128i v) {
        __m128i low = _mm_set1_epi8(15), nine = _mm_set1_epi8(9);
        __m128i a = _mm_and_si128(_mm_srli_epi16(v, 4), low), b = _mm_and_si128(v, low), x, y;
        x = _mm_unpacklo_epi8(a, b);
        y = _mm_unpackhi_epi8(a, b);
        x = _mm_add_epi8(_mm_add_epi8(x, _mm_set1_epi8('0')), _mm_and_si128(_mm_cmpgt_epi8(x, nine), _mm_set1_epi8(7)));
        y = _mm_add_epi8(_mm_add_epi8(y, _mm_set1_epi8('0')), _mm_and_si128(_mm_cmpgt_epi8(y, nine), _mm_set1_epi8(7)));
        _mm_storeu_si128((__m128i *)to, x);
        _mm_storeu_si128((__m128i *)(to + 16), y);
    }
    #endif

    /* Upper-case hexadecimal digits of n bytes, 2 * n of them. */
    static inline void rmq_put_hex(unsigned char *to, const unsigned char *from, int n) {
        int i = 0;
    #if defined(__SSE2__)
        for (; i + 16 <= n; i += 16) rmq_put_hex_16(to + 2 * i, _mm_loadu_si128((const __m128i *)(from + i)));
    #endif
        for (; i < n; i++) { to[2 * i] = rmq_digits[from[i] >> 4]; to[2 * i + 1] = rmq_digits[from[i] & 15]; }
    }

    /* Those of 8 bytes and of 8 more from elsewhere; put together in memory they would have to be waited for. */
    static inline void rmq_put_hex_8_8(unsigned char *to, const unsigned char *first, const unsigned char *second) {
    #if defined(__SSE2__)
        rmq_put_hex_16(to, _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)first), _mm_loadl_epi64((const __m128i *)second)));
    #else
        rmq_put_hex(to, first, 8);
        rmq_put_hex(to + 16, second, 8);
    #endif
    }

    /* The same, and whether all of it is ASCII. */
    static inline int rmq_copy_ascii(unsigned char *to, const unsigned char *from, int64_t n, int64_t room) {
    #if defined(__SSE2__)
        if (n <= 128 && n + 16 <= room) {
            int64_t i = 0;
            int high = 0;
            for (; i + 16 <= n; i += 16) {
                __m128i v = _mm_loadu_si128((const __m128i *)(from + i));
                _mm_storeu_si128((__m128i *)(to + i), v);
                high |= _mm_movemask_epi8(v);
            }
            if (i < n) {
                __m128i v = _mm_loadu_si128((const __m128i *)(from + i));
                _mm_storeu_si128((__m128i *)(to + i), v);
                high |= _mm_movemask_epi8(v) & ((1 << (n - i)) - 1);
            }
            return high == 0;
        }
    #endif
        memcpy(to, from, (size_t)n);
        return rmq_is_ascii(to, n);
    }

    /* Whether two names may be equal: false says that no two are. */
    static inline int rmq_names_may_repeat(const unsigned char *text, const rmq_span *spans, int32_t num) {
        uint64_t seen = 0, bit;
        int32_t k;
        for (k = 0; k < num; k++) {
            const unsigned char *name = text + spans[k].start;
            int32_t n = spans[k].split - spans[k].start;
            bit = (uint64_t)1 << ((name[0] * 7 + name[n - 1] * 3 + name[n / 2] + n) & 63);
            if (seen & bit) return 1;
            seen |= bit;
        }
        return 0;
    }

    /* Makes the layout that of a text that is ASCII, or none of a text that is too long or whose names may repeat. */
    static void rmq_learn(rmq_layout *l, const unsigned char *text, int32_t n, const rmq_span *spans, int32_t num,
                          const rmq_known *known) {
        int32_t k, used = 0;
        l->n = 0;
        if (n > RMQ_LAYOUT_ROOM || num < 1 || num > RMQ_LAYOUT_SPANS || rmq_names_may_repeat(text, spans, num)) return;
        memset(l->above, 127, (size_t)n);
        memcpy(l->equal, text, (size_t)n);
        /* What follows the text in its last 16 bytes is anything. */
        memset(l->above + n, -128, (size_t)(RMQ_LAYOUT_ROOM - n));
        memset(l->equal + n, -128, (size_t)(RMQ_LAYOUT_ROOM - n));
        for (k = 0; k < num; k++) {
            int32_t name = spans[k].split - spans[k].start, value = spans[k].end - spans[k].split - 1;
            memset(l->above + spans[k].split + 1, 2, (size_t)value);
            memset(l->equal + spans[k].split + 1, 3, (size_t)value);
            memcpy(l->names + used, text + spans[k].start, (size_t)name);
            used += name;
            l->name_ends[k] = used;
        }
        memcpy(l->spans, spans, (size_t)num * sizeof *spans);
        l->known = *known;
        l->span_num = num; l->names_len = used; l->n = n;
    }

    /* Number of bytes before the first that is `wanted`, n if there is none; `room` bytes may be read. */
    static inline int64_t rmq_before(const unsigned char *p, int wanted, int64_t n, int64_t room) {
        const unsigned char *found;
    #if defined(__SSE2__)
        if (n <= 64 && n + 16 <= room) {
            int64_t i;
            for (i = 0; i < n; i += 16) {
                int bits = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(p + i)), _mm_set1_epi8((char)wanted)));
                if (bits) {
                    i += __builtin_ctz((unsigned)bits);
                    break;
                }
            }
            return i < n ? i : n;
        }
    #endif
        found = n > 0 ? (const unsigned char *)memchr(p, wanted, (size_t)n) : NULL;
        return found != NULL ? found - p : n;
    }
    """
    ctypedef struct PropertySpan "rmq_span":
        # Positions in the properties text: where the name begins, where it ends, where the value ends.
        int32_t start, split, end
    ctypedef struct KnownSpans "rmq_known":
        int32_t keys, tags, unique_key
    ctypedef struct PropertyLayout "rmq_layout":
        const unsigned char* names
        int32_t* name_ends
        PropertySpan* spans
        KnownSpans known
        int32_t span_num, names_len
        # The block of rows that refers to this layout, which must not change before they are written.
        int64_t used_by
    void find_properties "rmq_find_properties"(const unsigned char* text, int32_t n, int64_t room,
                                               KnownProperties* found) noexcept nogil
    int32_t split_properties "rmq_split_properties"(const unsigned char* text, int32_t n, int64_t room, PropertySpan* out,
                                                    KnownSpans* known, int* ascii) noexcept nogil
    bint fits "rmq_fits"(const PropertyLayout* layout, const unsigned char* text, int32_t n, int64_t room) noexcept nogil
    void learn "rmq_learn"(PropertyLayout* layout, const unsigned char* text, int32_t n, const PropertySpan* spans, int32_t num,
                           const KnownSpans* known) noexcept nogil
    int64_t before "rmq_before"(const unsigned char* p, int wanted, int64_t n, int64_t room) noexcept nogil
    void copy_bytes "rmq_copy"(unsigned char* to, const unsigned char* source, int64_t n, int64_t room) noexcept nogil
    bint copy_ascii "rmq_copy_ascii"(unsigned char* to, const unsigned char* source, int64_t n, int64_t room) noexcept nogil
    bint names_may_repeat "rmq_names_may_repeat"(const unsigned char* text, const PropertySpan* spans,
                                                 int32_t num) noexcept nogil
    bint same_bytes_at "rmq_same"(const unsigned char* p, const unsigned char* q, int64_t n) noexcept nogil
    bint is_ascii "rmq_is_ascii"(const unsigned char* p, int64_t n) noexcept nogil
    int32_t value_of "rmq_value_of"(const unsigned char* text, int32_t n, int64_t room, const unsigned char* name, int32_t name_len,
                                    int32_t* len) noexcept nogil
    void put_hex "rmq_put_hex"(unsigned char* to, const unsigned char* source, int n) noexcept nogil
    void put_hex_8_8 "rmq_put_hex_8_8"(unsigned char* to, const unsigned char* first, const unsigned char* second) noexcept nogil

COLUMN_NAMES = (
    "topic", "queue_id", "queue_offset", "phy_offset", "size", "msg_id", "keys", "tags", "body", "properties",
    "born_timestamp", "store_timestamp", "born_host", "store_host", "flag", "sys_flag", "reconsume_times",
    "prepared_transaction_offset", "corrupt", "unique_key", "body_stored",
)

cdef enum:
    COL_TOPIC = 0
    COL_QUEUE_ID
    COL_QUEUE_OFFSET
    COL_PHY_OFFSET
    COL_SIZE
    COL_MSG_ID
    COL_KEYS
    COL_TAGS
    COL_BODY
    COL_PROPERTIES
    COL_BORN_TIMESTAMP
    COL_STORE_TIMESTAMP
    COL_BORN_HOST
    COL_STORE_HOST
    COL_FLAG
    COL_SYS_FLAG
    COL_RECONSUME_TIMES
    COL_PREPARED_TRANSACTION_OFFSET
    COL_CORRUPT
    COL_UNIQUE_KEY
    COL_BODY_STORED
    COL_NUM
    # Behind the columns: the values of the properties, whose names are COL_PROPERTIES.
    COL_VALUES = COL_NUM
    BUFFER_NUM

assert len(COLUMN_NAMES) == COL_NUM
cdef dict COLUMN_NUMBERS = {name: number for number, name in enumerate(COLUMN_NAMES)}

cdef enum:
    HAS_OFFSETS = (1 << COL_TOPIC | 1 << COL_MSG_ID | 1 << COL_KEYS | 1 << COL_TAGS | 1 << COL_BODY | 1 << COL_PROPERTIES
                   | 1 << COL_BORN_HOST | 1 << COL_STORE_HOST | 1 << COL_UNIQUE_KEY | 1 << COL_BODY_STORED)
    HAS_CHILD = 1 << COL_KEYS | 1 << COL_PROPERTIES | 1 << COL_VALUES
    HAS_NULLS = 1 << COL_TAGS | 1 << COL_UNIQUE_KEY | 1 << COL_BODY
    IS_INT64 = (1 << COL_QUEUE_OFFSET | 1 << COL_PHY_OFFSET | 1 << COL_BORN_TIMESTAMP | 1 << COL_STORE_TIMESTAMP
                | 1 << COL_PREPARED_TRANSACTION_OFFSET)
    HAS_TEXT = (1 << COL_TOPIC | 1 << COL_MSG_ID | 1 << COL_KEYS | 1 << COL_TAGS | 1 << COL_PROPERTIES | 1 << COL_BORN_HOST
                | 1 << COL_STORE_HOST | 1 << COL_UNIQUE_KEY)
    NEEDS_PROPERTIES = 1 << COL_KEYS | 1 << COL_TAGS | 1 << COL_PROPERTIES | 1 << COL_UNIQUE_KEY
    SYS_COMPRESSED = 0x1
    # What a text may take beyond its bytes, so that it is copied in whole steps.
    TEXT_SLACK = 64
    MAX_SPANS = 8200         # of a properties text of 32767 bytes
    SPAN_ROOM = 2 * MAX_SPANS
    STAGED_ROWS = 64         # so many records are parsed before their columns are written, one column after the other
    NAME_SLOTS = 32768       # also enough bytes for any properties text after its decoding
    HOST_SLOTS = 256         # of each kind: born or stored, IPv4 or IPv6
    HOST_ROOM = 96           # length of the address bytes, these, length of the text, the text
    HOST_KEY = 1
    HOST_TEXT_LEN = 24
    HOST_TEXT = 32
    LAYOUTS = 16             # one for each length of a properties text, modulo this
    MAX_REGIONS = 64
    WALKS = 32
    # Inner answers of stage_row and write_rows beside the verdicts.
    NEED_ROOM = 110
    NEED_BODY = 111
    NEED_HOST = 112
    PASSED_OVER = 113
    WRITE_FIRST = 114


cdef struct StagedRow:
    # A parsed record that becomes a row; good for as long as its segment stays pinned.
    const unsigned char* p
    int64_t room
    const unsigned char* body
    int64_t body_len
    int64_t body_room
    PropertySpan* spans
    PropertyLayout* layout  # NULL for a text that was taken apart by itself
    KnownSpans known
    int32_t span_num
    int ascii
    bint ok
    RecordView r


cdef struct ColumnSink:
    # Where the next row goes: addresses in the arrays of one ArrowColumns, derived anew for every pass.
    int64_t mask
    int64_t count
    int64_t capacity
    int64_t bytes
    int64_t byte_limit
    unsigned char* main[BUFFER_NUM]
    unsigned char* valid[BUFFER_NUM]
    unsigned char* data[BUFFER_NUM]
    int32_t* child[BUFFER_NUM]
    int64_t data_room[BUFFER_NUM]
    int64_t data_used[BUFFER_NUM]
    int64_t child_room[BUFFER_NUM]
    int64_t child_used[BUFFER_NUM]
    int64_t null_num[BUFFER_NUM]
    unsigned char* hosts
    PropertySpan* spans
    PropertyLayout* layouts
    int64_t block_num
    int32_t* chosen
    int32_t* name_slots
    int check_crc
    # Records that are parsed and not written yet, and what they need in sum.
    StagedRow rows[STAGED_ROWS]
    int64_t row_num
    int64_t span_used
    int64_t topic_need
    int64_t properties_need
    int64_t body_need
    int64_t body_stored_need
    # The decompressed body of the row that asked for it; NULL with a length of -1: it cannot be decompressed.
    const unsigned char* body
    int64_t body_len
    bint body_ready
    # What the row that does not fit needs.
    int32_t wanting
    int64_t wanted
    # The record that asked for something, where records are looked up.
    int32_t number
    int64_t pos
    # The topic of the record before, and whether it is one of those that are asked for.
    const unsigned char* topic
    int32_t topic_len
    bint topic_wanted


cdef int64_t put_java_utf8(unsigned char* to, const unsigned char* p, int64_t n) noexcept nogil:
    # Valid UTF-8 of the text that Java makes of these bytes, at most 3 * n of them; the steps are those of `hash_utf8`.
    cdef int64_t i = 0, used = 0, step
    cdef uint32_t b1, b2, b3, b4, c
    cdef bint good, ends
    while i < n:
        b1 = p[i]
        good, ends, step = True, False, 1
        if b1 < 0x80:
            pass
        elif 0xC2 <= b1 <= 0xDF:
            if i + 1 < n and (p[i + 1] & 0xC0) == 0x80:
                step = 2
            else:
                good = False
        elif 0xE0 <= b1 <= 0xEF:
            if i + 2 < n:
                b2, b3 = p[i + 1], p[i + 2]
                if (b1 == 0xE0 and (b2 & 0xE0) == 0x80) or (b2 & 0xC0) != 0x80:
                    good = False
                elif (b3 & 0xC0) != 0x80:
                    good, step = False, 2
                else:
                    c = ((b1 & 0x0F) << 12) | ((b2 & 0x3F) << 6) | (b3 & 0x3F)
                    good, step = not 0xD800 <= c <= 0xDFFF, 3
            else:
                good = False
                ends = not (i + 1 < n and ((b1 == 0xE0 and (p[i + 1] & 0xE0) == 0x80) or (p[i + 1] & 0xC0) != 0x80))
        elif 0xF0 <= b1 <= 0xF7:
            if i + 3 < n:
                b2, b3, b4 = p[i + 1], p[i + 2], p[i + 3]
                c = ((b1 & 0x07) << 18) | ((b2 & 0x3F) << 12) | ((b3 & 0x3F) << 6) | (b4 & 0x3F)
                if ((b2 & 0xC0) != 0x80 or (b3 & 0xC0) != 0x80 or (b4 & 0xC0) != 0x80 or c < 0x10000 or c > 0x10FFFF):
                    good = False
                    if (b1 > 0xF4 or (b1 == 0xF0 and (b2 < 0x90 or b2 > 0xBF)) or (b1 == 0xF4 and (b2 & 0xF0) != 0x80)
                            or (b2 & 0xC0) != 0x80):
                        step = 1
                    elif (b3 & 0xC0) != 0x80:
                        step = 2
                    else:
                        step = 3
                else:
                    step = 4
            else:
                good = False
                if b1 > 0xF4:
                    step = 1
                elif i + 1 < n and ((b1 == 0xF0 and (p[i + 1] < 0x90 or p[i + 1] > 0xBF))
                                    or (b1 == 0xF4 and (p[i + 1] & 0xF0) != 0x80) or (p[i + 1] & 0xC0) != 0x80):
                    step = 1
                elif i + 2 < n and (p[i + 2] & 0xC0) != 0x80:
                    step = 2
                else:
                    ends = True
        else:
            good = False
        if good:
            memcpy(to + used, p + i, step)
            used += step
        else:
            to[used] = 0xEF
            to[used + 1] = 0xBF
            to[used + 2] = 0xBD
            used += 3
        if ends:
            break
        i += step
    return used


cdef inline int64_t put_text(unsigned char* to, const unsigned char* p, int64_t n, int64_t room, bint ascii) noexcept nogil:
    # The bytes that the text took; `room` bytes may be read from p on.
    if ascii:
        copy_bytes(to, p, n, room)
        return n
    return put_java_utf8(to, p, n)


cdef inline bint lacks_room(ColumnSink* s, int column, int64_t need) noexcept nogil:
    if s.data_used[column] + need > s.data_room[column]:
        s.wanting = column
        s.wanted = need
        return True
    return False


cdef inline bint lacks_child_room(ColumnSink* s, int column, int64_t need) noexcept nogil:
    if s.child_used[column] + need + 1 > s.child_room[column]:
        s.wanting = column
        s.wanted = need
        return True
    return False


cdef inline void set_bit(unsigned char* bits, int64_t i) noexcept nogil:
    bits[i >> 3] |= <unsigned char>(1 << (i & 7))


cdef inline void mark_valid(ColumnSink* s, int column, int64_t i, bint valid) noexcept nogil:
    # Bits are written from the first null on: a column without one is handed over without them.
    cdef int64_t k
    if not valid:
        if s.null_num[column] == 0:
            memset(s.valid[column], 0xFF, i >> 3)
            for k in range(i & ~<int64_t>7, i):
                set_bit(s.valid[column], k)
        s.null_num[column] += 1
    elif s.null_num[column]:
        set_bit(s.valid[column], i)


cdef int put_decimal(unsigned char* to, int64_t value) noexcept nogil:
    cdef unsigned char[20] digits
    cdef int n = 0, used = 0
    cdef uint64_t rest = <uint64_t>value
    if value < 0:
        to[0] = 45
        used = 1
        rest = 0 - rest
    while True:
        digits[n] = <unsigned char>(48 + rest % 10)
        rest //= 10
        n += 1
        if rest == 0:
            break
    while n > 0:
        n -= 1
        to[used] = digits[n]
        used += 1
    return used


cdef inline unsigned char* host_slot(unsigned char* hosts, int column, const unsigned char* host, int32_t n) noexcept nogil:
    # Each kind has slots of its own: the hosts of one record must not drive each other out.
    cdef uint64_t a, b = 0
    memcpy(&a, host, 8)
    if n == 20:
        memcpy(&b, host + 12, 8)
    a = ((a ^ b * 31) * 0x9E3779B97F4A7C15u) >> 56
    return hosts + HOST_ROOM * (a + (HOST_SLOTS if column == COL_STORE_HOST else 0) + (2 * HOST_SLOTS if n == 20 else 0))


cdef inline bint lacks_host(ColumnSink* s, int column, const unsigned char* host, int32_t n) noexcept nogil:
    # The text of an IPv6 address comes from outside.
    cdef unsigned char* slot
    if n == 8:
        return False
    slot = host_slot(s.hosts, column, host, n)
    if slot[0] == n and memcmp(slot + HOST_KEY, host, n) == 0:
        return False
    s.wanting = column
    return True


cdef inline unsigned char* told_host(ColumnSink* s, int column, const unsigned char* host, int32_t n) noexcept nogil:
    # The slot with the text "a.b.c.d:port"; the same few hosts come again and again.
    cdef unsigned char* slot = host_slot(s.hosts, column, host, n)
    cdef unsigned char* text = slot + HOST_TEXT
    cdef int used, k
    if n == 8 and (slot[0] != n or memcmp(slot + HOST_KEY, host, 8) != 0):
        used = 0
        for k in range(4):
            used += put_decimal(text + used, host[k])
            text[used] = 46 if k < 3 else 58
            used += 1
        used += put_decimal(text + used, get_i32(host + 4))
        slot[0] = <unsigned char>n
        memcpy(slot + HOST_KEY, host, n)
        slot[HOST_TEXT_LEN] = <unsigned char>used
    return slot


cdef bint same_name(ColumnSink* s, int64_t a, int64_t b) noexcept nogil:
    # Of two names that were just written, by their numbers among all names.
    cdef int32_t* offsets = s.child[COL_PROPERTIES]
    cdef unsigned char* data = s.data[COL_PROPERTIES]
    cdef int32_t n = offsets[a + 1] - offsets[a]
    return offsets[b + 1] - offsets[b] == n and memcmp(data + offsets[a], data + offsets[b], n) == 0


cdef bint repeats(ColumnSink* s, int64_t first, int64_t n) noexcept nogil:
    # Whether two of the `n` names from `first` on are equal.  chosen[k] becomes the number of the property whose value the
    # k-th takes, -1 where an earlier one has the same name: a dict's first place and last value.
    cdef int64_t k, at
    cdef int32_t* offsets = s.child[COL_PROPERTIES]
    cdef bint found = False
    cdef uint32_t h
    memset(s.name_slots, 0, NAME_SLOTS * sizeof(int32_t))
    for k in range(n):
        s.chosen[k] = <int32_t>k
        h = hash_units8(0, s.data[COL_PROPERTIES] + offsets[first + k], offsets[first + k + 1] - offsets[first + k])
        at = (h * 0x9E3779B1u) >> 17
        while s.name_slots[at] > 0 and not same_name(s, first + s.name_slots[at] - 1, first + k):
            at = (at + 1) & (NAME_SLOTS - 1)
        if s.name_slots[at] > 0:
            found = True
            s.chosen[s.name_slots[at] - 1] = <int32_t>k
            s.chosen[k] = -1
        else:
            s.name_slots[at] = <int32_t>(k + 1)
    return found


cdef void write_names(ColumnSink* s, StagedRow* row, const unsigned char* text, int64_t room, bint chosen) noexcept nogil:
    cdef int64_t used = s.data_used[COL_PROPERTIES], num = s.child_used[COL_PROPERTIES], k
    cdef unsigned char* data = s.data[COL_PROPERTIES]
    cdef int32_t* offsets = s.child[COL_PROPERTIES]
    cdef PropertySpan* span
    if row.layout != NULL:
        copy_bytes(data + used, row.layout.names, row.layout.names_len, row.layout.names_len + TEXT_SLACK)
        for k in range(row.span_num):
            offsets[num + 1 + k] = <int32_t>used + row.layout.name_ends[k]
        s.data_used[COL_PROPERTIES], s.child_used[COL_PROPERTIES] = used + row.layout.names_len, num + row.span_num
        return
    for k in range(row.span_num):
        if chosen and s.chosen[k] < 0:
            continue
        span = row.spans + k
        used += put_text(data + used, text + span.start, span.split - span.start, room - span.start, row.ascii)
        num += 1
        offsets[num] = <int32_t>used
    s.data_used[COL_PROPERTIES], s.child_used[COL_PROPERTIES] = used, num


cdef void write_values(ColumnSink* s, StagedRow* row, const unsigned char* text, int64_t room, bint chosen) noexcept nogil:
    cdef int64_t used = s.data_used[COL_VALUES], num = s.child_used[COL_VALUES], k
    cdef unsigned char* data = s.data[COL_VALUES]
    cdef int32_t* offsets = s.child[COL_VALUES]
    cdef PropertySpan* span
    for k in range(row.span_num):
        span = row.spans + k
        if chosen:
            if s.chosen[k] < 0:
                continue
            span = row.spans + s.chosen[k]
        used += put_text(data + used, text + span.split + 1, span.end - span.split - 1, room - span.split - 1, row.ascii)
        num += 1
        offsets[num] = <int32_t>used
    s.data_used[COL_VALUES], s.child_used[COL_VALUES] = used, num


cdef void write_properties(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_PROPERTIES] + s.count + 1
    cdef int64_t i, first, used, room
    cdef StagedRow* row
    cdef const unsigned char* text
    cdef bint chosen
    for i in range(s.row_num):
        row = s.rows + i
        text, room = row.p + row.r.properties_pos, row.room - row.r.properties_pos
        first, used = s.child_used[COL_PROPERTIES], s.data_used[COL_PROPERTIES]
        write_names(s, row, text, room, False)
        chosen = False
        # Different malformed names may be read as the same text; those of a layout are known to differ.
        if row.layout == NULL and row.span_num > 1 and (not row.ascii or names_may_repeat(text, row.spans, row.span_num)):
            chosen = repeats(s, first, row.span_num)
            if chosen:
                s.child_used[COL_PROPERTIES], s.data_used[COL_PROPERTIES] = first, used
                write_names(s, row, text, room, True)
        write_values(s, row, text, room, chosen)
        ends[i] = <int32_t>s.child_used[COL_PROPERTIES]


cdef void write_nullable(ColumnSink* s, int column) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[column] + s.count + 1
    cdef unsigned char* data = s.data[column]
    cdef int64_t i, used = s.data_used[column]
    cdef StagedRow* row
    cdef const unsigned char* text
    cdef PropertySpan* span
    cdef int32_t number
    for i in range(s.row_num):
        row = s.rows + i
        text = row.p + row.r.properties_pos
        number = row.known.tags if column == COL_TAGS else row.known.unique_key
        if number >= 0:
            span = row.spans + number
            used += put_text(data + used, text + span.split + 1, span.end - span.split - 1,
                             row.room - row.r.properties_pos - span.split - 1, row.ascii)
        mark_valid(s, column, s.count + i, number >= 0)
        ends[i] = <int32_t>used
    s.data_used[column] = used


cdef void write_keys(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_KEYS] + s.count + 1
    cdef int32_t* offsets = s.child[COL_KEYS]
    cdef unsigned char* data = s.data[COL_KEYS]
    cdef int64_t i, used = s.data_used[COL_KEYS], num = s.child_used[COL_KEYS], start, end, room
    cdef StagedRow* row
    cdef const unsigned char* text
    cdef PropertySpan* span
    for i in range(s.row_num):
        row = s.rows + i
        text = row.p + row.r.properties_pos
        if row.known.keys >= 0:
            span = row.spans + row.known.keys
            start = span.split + 1
            while start < span.end:
                room = row.room - row.r.properties_pos - start
                end = start + before(text + start, 32, span.end - start, room)
                if end > start:
                    used += put_text(data + used, text + start, end - start, room, row.ascii)
                    num += 1
                    offsets[num] = <int32_t>used
                start = end + 1
        ends[i] = <int32_t>num
    s.data_used[COL_KEYS], s.child_used[COL_KEYS] = used, num


cdef void write_topics(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_TOPIC] + s.count + 1
    cdef unsigned char* data = s.data[COL_TOPIC]
    cdef int64_t i, used = s.data_used[COL_TOPIC]
    cdef StagedRow* row
    cdef const unsigned char* text
    for i in range(s.row_num):
        row = s.rows + i
        text = row.p + row.r.topic_pos
        if copy_ascii(data + used, text, row.r.topic_len, row.room - row.r.topic_pos):
            used += row.r.topic_len
        else:
            used += put_java_utf8(data + used, text, row.r.topic_len)
        ends[i] = <int32_t>used
    s.data_used[COL_TOPIC] = used


cdef void write_message_ids(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_MSG_ID] + s.count + 1
    cdef unsigned char* data = s.data[COL_MSG_ID]
    cdef int64_t i, used = s.data_used[COL_MSG_ID]
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        if row.r.store_host_len == 8:
            put_hex_8_8(data + used, row.p + row.r.store_host_pos, row.p + RECORD_PHY_OFFSET)
            used += 32
        else:
            put_hex(data + used, row.p + row.r.store_host_pos, 20)
            put_hex(data + used + 40, row.p + RECORD_PHY_OFFSET, 8)
            used += 56
        ends[i] = <int32_t>used
    s.data_used[COL_MSG_ID] = used


cdef void write_hosts(ColumnSink* s, int column) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[column] + s.count + 1
    cdef unsigned char* data = s.data[column]
    cdef int64_t i, used = s.data_used[column]
    cdef int32_t n
    cdef uint64_t here, last = 0
    cdef unsigned char* slot = NULL
    cdef const unsigned char* host
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        if column == COL_BORN_HOST:
            host, n = row.p + RECORD_BORN_HOST, row.r.born_host_len
        else:
            host, n = row.p + row.r.store_host_pos, row.r.store_host_len
        memcpy(&here, host, 8)
        # Mostly that of the row before.
        if slot == NULL or n != 8 or slot[0] != 8 or here != last:
            slot, last = told_host(s, column, host, n), here
        memcpy(data + used, slot + HOST_TEXT, 64)
        used += slot[HOST_TEXT_LEN]
        ends[i] = <int32_t>used
    s.data_used[column] = used


cdef void write_bodies(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_BODY] + s.count + 1
    cdef unsigned char* data = s.data[COL_BODY]
    cdef int64_t i, used = s.data_used[COL_BODY]
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        if row.body_len >= 0:
            copy_bytes(data + used, row.body, row.body_len, row.body_room)
            used += row.body_len
        mark_valid(s, COL_BODY, s.count + i, row.body_len >= 0)
        ends[i] = <int32_t>used
    s.data_used[COL_BODY] = used


cdef void write_stored_bodies(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_BODY_STORED] + s.count + 1
    cdef unsigned char* data = s.data[COL_BODY_STORED]
    cdef int64_t i, used = s.data_used[COL_BODY_STORED]
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        copy_bytes(data + used, row.p + row.r.body_pos, row.r.body_len, row.room - row.r.body_pos)
        used += row.r.body_len
        ends[i] = <int32_t>used
    s.data_used[COL_BODY_STORED] = used


cdef void write_int64s(ColumnSink* s, int column) noexcept nogil:
    cdef int64_t* out = <int64_t*>s.main[column] + s.count
    cdef RecordView* r = &s.rows[0].r
    # The field of the first row; that of the next one lies a StagedRow behind it.
    cdef int64_t* field = &r.prepared_transaction_offset
    cdef int64_t i
    if column == COL_QUEUE_OFFSET:
        field = &r.queue_offset
    elif column == COL_PHY_OFFSET:
        field = &r.phy_offset
    elif column == COL_BORN_TIMESTAMP:
        field = &r.born_timestamp
    elif column == COL_STORE_TIMESTAMP:
        field = &r.store_timestamp
    for i in range(s.row_num):
        out[i] = (<int64_t*>(<char*>field + i * sizeof(StagedRow)))[0]


cdef void write_int32s(ColumnSink* s, int column) noexcept nogil:
    cdef int32_t* out = <int32_t*>s.main[column] + s.count
    cdef RecordView* r = &s.rows[0].r
    cdef int32_t* field = &r.reconsume_times
    cdef int64_t i
    if column == COL_QUEUE_ID:
        field = &r.queue_id
    elif column == COL_SIZE:
        field = &r.total_size
    elif column == COL_FLAG:
        field = &r.flag
    elif column == COL_SYS_FLAG:
        field = &r.sys_flag
    for i in range(s.row_num):
        out[i] = (<int32_t*>(<char*>field + i * sizeof(StagedRow)))[0]


cdef bint lack_room(ColumnSink* s) noexcept nogil:
    # Whether the staged rows do not fit, at their largest.  Text triples where every byte is malformed.
    cdef int64_t mask = s.mask, texts = 3 * s.properties_need + TEXT_SLACK, hosts = TEXT_SLACK * s.row_num
    return ((mask & 1 << COL_BODY and lacks_room(s, COL_BODY, s.body_need + TEXT_SLACK))
            or (mask & 1 << COL_BODY_STORED and lacks_room(s, COL_BODY_STORED, s.body_stored_need + TEXT_SLACK))
            or (mask & 1 << COL_TOPIC and lacks_room(s, COL_TOPIC, 3 * s.topic_need + TEXT_SLACK))
            or (mask & 1 << COL_MSG_ID and lacks_room(s, COL_MSG_ID, hosts))
            or (mask & 1 << COL_BORN_HOST and lacks_room(s, COL_BORN_HOST, hosts))
            or (mask & 1 << COL_STORE_HOST and lacks_room(s, COL_STORE_HOST, hosts))
            or (mask & 1 << COL_TAGS and lacks_room(s, COL_TAGS, texts))
            or (mask & 1 << COL_UNIQUE_KEY and lacks_room(s, COL_UNIQUE_KEY, texts))
            or (mask & 1 << COL_KEYS and (lacks_room(s, COL_KEYS, texts)
                                          or lacks_child_room(s, COL_KEYS, s.properties_need)))
            or (mask & 1 << COL_PROPERTIES and (lacks_room(s, COL_PROPERTIES, texts) or lacks_room(s, COL_VALUES, texts)
                                                or lacks_child_room(s, COL_PROPERTIES, s.span_used)
                                                or lacks_child_room(s, COL_VALUES, s.span_used))))


cdef int write_rows(ColumnSink* s) noexcept nogil:
    # The staged rows, one column after the other; all of them or, where there is no room, none.
    cdef int64_t mask = s.mask, i
    cdef int column
    if s.row_num == 0:
        return RECORD
    if mask & HAS_OFFSETS and lack_room(s):
        return NEED_ROOM
    for column in range(COL_NUM):
        if not mask >> column & 1:
            continue
        if IS_INT64 >> column & 1:
            write_int64s(s, column)
        elif not HAS_OFFSETS >> column & 1:
            if column == COL_CORRUPT:
                for i in range(s.row_num):
                    if not s.rows[i].ok:
                        set_bit(s.main[COL_CORRUPT], s.count + i)
            else:
                write_int32s(s, column)
        elif column == COL_TOPIC:
            write_topics(s)
        elif column == COL_MSG_ID:
            write_message_ids(s)
        elif column == COL_KEYS:
            write_keys(s)
        elif column == COL_PROPERTIES:
            write_properties(s)
        elif column == COL_BODY:
            write_bodies(s)
        elif column == COL_BODY_STORED:
            write_stored_bodies(s)
        elif column == COL_TAGS or column == COL_UNIQUE_KEY:
            write_nullable(s, column)
        else:
            write_hosts(s, column)
    s.count += s.row_num
    s.block_num += 1
    s.row_num = s.span_used = 0
    s.topic_need = s.properties_need = s.body_need = s.body_stored_need = 0
    return RECORD


cdef int stage_row(ColumnSink* s, StagedRow* row) noexcept nogil:
    # Takes the parsed record of the next staged row in, or says what has to come first; `row.ok` says what is known of it.
    cdef int64_t mask = s.mask, weight = 0
    cdef RecordView* r = &row.r
    cdef const unsigned char* p = row.p
    if row.ok and (mask & 1 << COL_CORRUPT or (mask & 1 << COL_BODY and r.sys_flag & SYS_COMPRESSED)):
        row.ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (s.check_crc < 2 or has_prop_crc(p, r))
    if mask & 1 << COL_BODY:
        row.body, row.body_len, row.body_room = p + r.body_pos, r.body_len, row.room - r.body_pos
        if r.sys_flag & SYS_COMPRESSED and row.ok and r.body_len > 0:
            if s.row_num > 0:
                return WRITE_FIRST
            if not s.body_ready:
                return NEED_BODY
            row.body, row.body_len, row.body_room = s.body, s.body_len, s.body_len
        if row.body_len > 0:
            weight += row.body_len
    if mask & 1 << COL_BODY_STORED:
        weight += r.body_len
    if mask & HAS_TEXT:
        weight += TEXT_SLACK + r.topic_len
        if mask & NEEDS_PROPERTIES:
            weight += r.properties_len
    if s.bytes + weight > s.byte_limit and s.count + s.row_num > 0:
        return COLUMNS_FULL
    if r.sys_flag & (SYS_BORN_V6 | SYS_STORE_V6):
        if ((mask & 1 << COL_BORN_HOST and lacks_host(s, COL_BORN_HOST, p + RECORD_BORN_HOST, r.born_host_len))
                or (mask & 1 << COL_STORE_HOST and lacks_host(s, COL_STORE_HOST, p + r.store_host_pos, r.store_host_len))):
            return NEED_HOST if s.row_num == 0 else WRITE_FIRST
    s.bytes += weight
    s.topic_need += r.topic_len
    s.properties_need += r.properties_len
    s.body_stored_need += r.body_len
    if mask & 1 << COL_BODY and row.body_len > 0:
        s.body_need += row.body_len
    s.span_used += row.span_num
    s.row_num += 1
    s.body_ready = False
    return RECORD


cdef inline void split_row(ColumnSink* s, StagedRow* row, const unsigned char* text) noexcept nogil:
    # Messages of one kind have the same properties, mostly of the same lengths, one after the other.
    cdef int32_t n = row.r.properties_len
    cdef int64_t room = row.room - row.r.properties_pos
    cdef PropertyLayout* layout = s.layouts + (n & (LAYOUTS - 1))
    if fits(layout, text, n, room):
        layout.used_by = s.block_num
        row.layout, row.spans, row.span_num, row.known, row.ascii = layout, layout.spans, layout.span_num, layout.known, True
        return
    row.spans = s.spans + s.span_used
    row.span_num = split_properties(text, n, room, row.spans, &row.known, &row.ascii)
    if row.ascii and layout.used_by != s.block_num:
        learn(layout, text, n, row.spans, row.span_num, &row.known)


cdef int lend(ColumnSink* s, bytes body) except -1:
    # The caller keeps `body` until the row is written.
    if body is None:
        s.body, s.body_len = NULL, -1
    else:
        s.body, s.body_len = <const unsigned char*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body)
    s.body_ready = True
    return 0


cdef bint has_text(ColumnSink* s, TopicTable table, const unsigned char* p, int32_t n) noexcept nogil:
    # The hash is that of the text that Java reads, and malformed bytes are compared as that text.
    cdef uint32_t h = hash_utf8(0, p, n)
    cdef unsigned char* decoded = <unsigned char*>s.name_slots
    if is_ascii(p, n):
        return table.look_up(h, p, n) >= 0
    return table.look_up(h, decoded, <int32_t>put_java_utf8(decoded, p, n)) >= 0


cdef inline bint same_text(unsigned char* scratch, const unsigned char* p, int64_t n, const unsigned char* wanted,
                           int64_t size, bint ascii=False) noexcept nogil:
    # Whether Java reads `wanted`, which is valid UTF-8, at p.  `ascii` says that nothing else is there, if that is known.
    if n == size and same_bytes_at(p, wanted, n):
        return True
    return not ascii and not is_ascii(p, n) and put_java_utf8(scratch, p, n) == size and memcmp(scratch, wanted, size) == 0


cdef struct PlacesQueue:
    # The queue whose units lead to the places, and the queue offset of each.
    const unsigned char* topic
    int64_t topic_size
    int32_t queue_id
    const int64_t* queue_offsets
    bint shows  # in `corrupt`, and not only by how a compressed body is given


cdef bint is_otherwise_of_queue(unsigned char* scratch, const unsigned char* p, int64_t room, RecordView* r,
                                PlacesQueue* queue, int64_t queue_offset) noexcept nogil:
    # As `is_of_queue`: its topic is malformed and reads as the queue's, or the queue is one of its further ones.
    if (r.queue_id == queue.queue_id and r.queue_offset == queue_offset
            and same_text(scratch, p + r.topic_pos, r.topic_len, queue.topic, queue.topic_size)):
        return True
    return queue.queue_id == 0 and is_dispatched_to(scratch, p + r.properties_pos, room - r.properties_pos, r.properties_len,
                                                    queue.topic, queue.topic_size, queue_offset)


cdef bint is_dispatched_to(unsigned char* scratch, const unsigned char* text, int64_t room, int32_t n,
                           const unsigned char* topic, int64_t topic_size, int64_t queue_offset) noexcept nogil:
    # Whether the properties name queue 0 of this topic, with this offset in it, as one of the further ones.
    cdef unsigned char[20] digits
    cdef int32_t names_len, numbers_len
    cdef int32_t name = value_of(text, n, room, <const unsigned char*>b"INNER_MULTI_DISPATCH", 20, &names_len)
    cdef int32_t number = value_of(text, n, room, <const unsigned char*>b"INNER_MULTI_QUEUE_OFFSET", 24, &numbers_len)
    cdef int64_t name_end, number_end, names_end = name + names_len, numbers_end = number + numbers_len, left = queue_offset
    cdef int first = 20
    if name < 0 or number < 0 or queue_offset < 0:
        return False
    while first == 20 or left:
        first -= 1
        digits[first] = <unsigned char>(48 + left % 10)
        left //= 10
    while name <= names_end and number <= numbers_end:
        name_end = name + before(text + name, 44, names_end - name, room - name)
        number_end = number + before(text + number, 44, numbers_end - number, room - number)
        if (number_end - number == 20 - first and memcmp(text + number, digits + first, 20 - first) == 0
                and same_text(scratch, text + name, name_end - name, topic, topic_size)):
            return True
        name, number = <int32_t>(name_end + 1), <int32_t>(number_end + 1)
    return False


cdef inline bint spans_have_key(const unsigned char* text, int64_t room, PropertySpan* spans, KnownSpans* known,
                                bint ascii, unsigned char* scratch, const unsigned char* key, int64_t size,
                                int kinds) noexcept nogil:
    # kinds: 1 = unique key, 2 = pieces of KEYS, 4 = tag.  `room` bytes may be read from the text's begin on.
    cdef int64_t start, end
    cdef PropertySpan* span
    if kinds & 1 and known.unique_key >= 0:
        span = spans + known.unique_key
        if same_text(scratch, text + span.split + 1, span.end - span.split - 1, key, size, ascii):
            return True
    if kinds & 4 and known.tags >= 0:
        span = spans + known.tags
        if same_text(scratch, text + span.split + 1, span.end - span.split - 1, key, size, ascii):
            return True
    if kinds & 2 and known.keys >= 0:
        span = spans + known.keys
        start = span.split + 1
        while start < span.end:
            end = start + before(text + start, 32, span.end - start, room - start)
            if end > start and same_text(scratch, text + start, end - start, key, size, ascii):
                return True
            start = end + 1
    return False


cdef struct KeyView:
    # One key and its topic, for as long as nobody gives up the `KeyTexts`.
    const unsigned char* key
    const unsigned char* topic
    int64_t key_size
    int64_t topic_size


cdef struct WantedKey:
    # What the record at a place must have, and how many of a run of places with this key became rows.
    KeyView view
    int64_t number, row_num, max_num
    int kinds
    bint there


@cython.final
cdef class KeyTexts:
    """Many keys and their topics, as the offsets and bytes of text columns.

    Parameters
    ----------
    key_offsets : array of int32, shape (n + 1,)
        Key i is ``key_data[key_offsets[i]:key_offsets[i + 1]]``, valid UTF-8.
    key_data : array of uint8
    topic_offsets : array of int32, shape (n + 1,) or (2,)
        Likewise; two offsets are one topic for all keys.
    topic_data : array of uint8
    """

    cdef const int32_t[::1] key_offsets, topic_offsets
    cdef const uint8_t[::1] key_data, topic_data
    cdef readonly int64_t num

    def __cinit__(self, const int32_t[::1] key_offsets not None, const uint8_t[::1] key_data not None,
                  const int32_t[::1] topic_offsets not None, const uint8_t[::1] topic_data not None):
        self.num = key_offsets.shape[0] - 1
        if self.num < 0 or topic_offsets.shape[0] not in (2, self.num + 1):
            raise ValueError(f"{key_offsets.shape[0]} offsets of keys, {topic_offsets.shape[0]} of topics")
        self.key_offsets, self.key_data = key_offsets, key_data
        self.topic_offsets, self.topic_data = topic_offsets, topic_data

    cdef inline bint look(self, int64_t i, KeyView* view) noexcept nogil:
        # False for a key that is not there, or whose offsets lead outside the data.
        cdef int64_t start, end
        if not 0 <= i < self.num:
            return False
        start, end = self.key_offsets[i], self.key_offsets[i + 1]
        if not 0 <= start <= end <= self.key_data.shape[0]:
            return False
        view.key, view.key_size = (&self.key_data[start] if end > start else NULL), end - start
        i = 0 if self.topic_offsets.shape[0] == 2 else i
        start, end = self.topic_offsets[i], self.topic_offsets[i + 1]
        if not 0 <= start <= end <= self.topic_data.shape[0]:
            return False
        view.topic, view.topic_size = (&self.topic_data[start] if end > start else NULL), end - start
        return True

    def hashes(self, bint by_tag=False):
        """numpy.ndarray of int32: the index hash of each ``topic#key``, or with `by_tag` of ``topic#T#key``.

        Raises
        ------
        ValueError
            Offsets lead outside the data.
        """
        cdef int64_t i
        cdef uint32_t h = 0, topic_hash = 0
        cdef KeyView view
        array = np.empty(self.num, np.int32)
        cdef int32_t[::1] out = array
        cdef bint one_topic = self.topic_offsets.shape[0] == 2
        cdef int64_t bad = -1
        with nogil:
            for i in range(self.num):
                if not self.look(i, &view):
                    bad = i
                    break
                if i == 0 or not one_topic:
                    topic_hash = hash_utf8(0, view.topic, view.topic_size) * 31u + 35u
                    if by_tag:
                        topic_hash = (topic_hash * 31u + 84u) * 31u + 35u
                h = hash_utf8(topic_hash, view.key, view.key_size)
                out[i] = index_hash(h)
        if bad >= 0:
            raise ValueError(f"the offsets of key {bad} lead outside the data")
        return array


@cython.no_gc_clear
cdef class ArrowColumns:
    """Messages as columns in the layout of Apache Arrow, filled from the log and handed over without a copy.

    Parameters
    ----------
    columns : sequence of str
        Names of `COLUMN_NAMES`; only these are decoded.
    capacity : int
        Rows of a batch, at least 1.
    byte_limit : int
        A batch ends before its bodies and properties take more bytes than this, but never before its first row.
    check_crc : int
        How a record is judged that is marked as corrupt, as of `decode_record`.  CRCs are computed where they show: for
        ``corrupt``, and before a body is decompressed.
    decompress : callable, optional
        Takes the stored body and the sysFlag of a record whose body is compressed; gives bytes, or None for a null.
        Without it bodies stay as they are stored.
    host_text : callable
        Takes the 20 bytes of an IPv6 host and gives its text in ASCII, at most 64 bytes.

    Attributes
    ----------
    count : int
        Rows since the last `take`.
    """

    cdef readonly int64_t count, capacity, byte_limit
    cdef readonly tuple columns
    cdef tuple numbers
    cdef int64_t mask, bytes, busy
    cdef bint ready
    cdef int check_crc
    cdef object decompress, host_text
    cdef list main, valid, data, child
    cdef object hosts, spans, layouts, chosen, name_slots
    cdef int64_t[BUFFER_NUM] data_used
    cdef int64_t[BUFFER_NUM] child_used
    cdef int64_t[BUFFER_NUM] null_num
    cdef int64_t[BUFFER_NUM] data_size
    cdef int64_t[BUFFER_NUM] child_size
    # What a row must have to be taken.
    cdef TopicTable topics, tags
    cdef object queue_ids
    cdef int64_t begin_timestamp, end_timestamp
    cdef bint any_queue

    def __cinit__(self, columns, int64_t capacity=8192, int64_t byte_limit=1 << 26, int check_crc=1, decompress=None,
                  host_text=None):
        if not 1 <= capacity <= 1 << 30:
            raise ValueError(f"a batch of {capacity} rows; give 1 to 2**30")
        if not 1 <= byte_limit <= 1 << 28:
            # Text triples at most, and Arrow's offsets have 32 bits.
            raise ValueError(f"a batch of {byte_limit} bytes; give 1 to 2**28")
        cdef int i
        self.columns = tuple(columns)
        for name in self.columns:
            if name not in COLUMN_NUMBERS:
                raise ValueError(f"there is no column {name!r}; there are {', '.join(COLUMN_NAMES)}")
        self.numbers = tuple([COLUMN_NUMBERS[name] for name in self.columns])
        for i in self.numbers:
            self.mask |= <int64_t>1 << i
        if self.mask & 1 << COL_PROPERTIES:
            self.mask |= 1 << COL_VALUES
        self.capacity, self.byte_limit, self.check_crc = capacity, byte_limit, check_crc
        self.decompress, self.host_text = decompress, host_text
        self.hosts = np.zeros(4 * HOST_SLOTS * HOST_ROOM, np.uint8)
        self.spans = np.empty(SPAN_ROOM * 3, np.int32)
        self.layouts = np.zeros(LAYOUTS * sizeof(PropertyLayout), np.uint8)
        self.chosen = np.empty(MAX_SPANS, np.int32)
        self.name_slots = np.empty(NAME_SLOTS, np.int32)
        self.topics = self.tags = None
        self.queue_ids = np.zeros(1, np.int32)
        self.any_queue = True
        self.begin_timestamp, self.end_timestamp = -INT64_MAX - 1, INT64_MAX
        for i in range(BUFFER_NUM):
            # Enough for a few rows; what the others take shows by then.
            self.data_size[i] = min(16 * capacity, 16384) + 1024
            self.child_size[i] = 2 * capacity + 64
        self.count, self.ready = 0, False

    def choose(self, topics=None, queue_ids=None, tags=None, int64_t begin_timestamp=-INT64_MAX - 1,
               int64_t end_timestamp=INT64_MAX):
        """Say which records become rows; what is None is not asked.

        Parameters
        ----------
        topics, tags : sequence of bytes, optional
            UTF-8; compared as the texts that Java reads.
        queue_ids : sequence of int, optional
        begin_timestamp, end_timestamp : int
            Store times in ms since epoch, both inclusive.
        """
        self.enter()
        try:
            self.topics, self.tags = table_of(topics), table_of(tags)
            self.any_queue = queue_ids is None
            self.queue_ids = np.sort(np.array([] if queue_ids is None else queue_ids, np.int32))
            self.begin_timestamp, self.end_timestamp = begin_timestamp, end_timestamp
        finally:
            self.leave()

    cdef void renew(self):
        # New arrays for the next batch, sized by the one before.
        cdef int i
        cdef int64_t rows = self.capacity
        self.count, self.bytes, self.ready = 0, 0, True
        self.main, self.valid = [None] * BUFFER_NUM, [None] * BUFFER_NUM
        self.data, self.child = [None] * BUFFER_NUM, [None] * BUFFER_NUM
        for i in range(BUFFER_NUM):
            self.data_used[i] = self.child_used[i] = self.null_num[i] = 0
            if not self.mask >> i & 1:
                continue
            if i == COL_CORRUPT:
                self.main[i] = np.zeros((rows + 7) // 8, np.uint8)
            elif i < COL_NUM:
                if HAS_OFFSETS >> i & 1:
                    self.main[i] = np.empty(rows + 1, np.int32)
                    self.main[i][0] = 0
                else:
                    self.main[i] = np.empty(rows, np.int64 if IS_INT64 >> i & 1 else np.int32)
            if HAS_NULLS >> i & 1:
                self.valid[i] = np.zeros((rows + 7) // 8, np.uint8)
            if HAS_OFFSETS >> i & 1 or i == COL_VALUES:
                self.data[i] = np.empty(self.data_size[i] + TEXT_SLACK, np.uint8)
            if HAS_CHILD >> i & 1:
                self.child[i] = np.empty(self.child_size[i] + 1, np.int32)
                self.child[i][0] = 0

    cdef void grow(self, ColumnSink* s):
        # Room for what the staged rows want, and as much more as a whole batch takes if its rows are like those before, or a
        # little more than that, as every growth copies.
        cdef int column = s.wanting
        cdef int64_t used = self.data_used[column], size = used + s.wanted, whole = 0
        if size > self.data[column].shape[0]:
            if s.count >= STAGED_ROWS:
                whole = used * self.capacity // s.count
                whole = min(whole + whole // 16, self.byte_limit) + s.wanted
            fresh = np.empty(min(max(2 * size, whole, 4096), 0x7FFFFFFF), np.uint8)
            fresh[:used] = self.data[column][:used]
            self.data[column] = fresh
        used = self.child_used[column] + 1
        size = used + s.wanted
        if HAS_CHILD >> column & 1 and size > self.child[column].shape[0]:
            if s.count >= STAGED_ROWS:
                whole = used * self.capacity // s.count
                whole = min(whole + whole // 16, self.byte_limit) + s.wanted
            fresh = np.empty(max(2 * size, whole), np.int32)
            fresh[:used] = self.child[column][:used]
            self.child[column] = fresh
        self.aim_column(s, column)

    cdef int aim_column(self, ColumnSink* s, int i) except -1:
        # Where the text of a column goes, and how much of it.
        s.data[i] = address_of(self.data[i])
        s.child[i] = <int32_t*>address_of(self.child[i])
        s.data_room[i] = 0 if self.data[i] is None else len(self.data[i])
        s.child_room[i] = 0 if self.child[i] is None else len(self.child[i])
        return 0

    cdef int aim(self, ColumnSink* s) except -1:
        # Takes the addresses of the arrays; they hold until the next `renew`, and those of a column until it grows.
        cdef int i
        if not self.ready:
            self.renew()
        s.mask, s.count, s.capacity, s.bytes, s.byte_limit = self.mask, self.count, self.capacity, self.bytes, self.byte_limit
        s.check_crc = self.check_crc
        for i in range(BUFFER_NUM):
            s.data_used[i], s.child_used[i] = self.data_used[i], self.child_used[i]
            s.null_num[i] = self.null_num[i]
            s.main[i] = address_of(self.main[i])
            s.valid[i] = address_of(self.valid[i])
            self.aim_column(s, i)
        s.hosts = address_of(self.hosts)
        s.spans = <PropertySpan*>address_of(self.spans)
        s.layouts = <PropertyLayout*>address_of(self.layouts)
        s.chosen = <int32_t*>address_of(self.chosen)
        s.name_slots = <int32_t*>address_of(self.name_slots)
        s.topic = NULL
        if s.row_num == 0:
            s.span_used = s.topic_need = s.properties_need = s.body_need = s.body_stored_need = 0
        return 0

    cdef void keep(self, ColumnSink* s) noexcept:
        cdef int i
        self.count, self.bytes = s.count, s.bytes
        for i in range(BUFFER_NUM):
            self.data_used[i], self.child_used[i] = s.data_used[i], s.child_used[i]
            self.null_num[i] = s.null_num[i]

    cdef bint wants_queue(self, const int32_t* ids, int64_t n, int32_t queue_id) noexcept nogil:
        cdef int64_t low = 0, middle
        while low < n:
            middle = low + (n - low) // 2
            if ids[middle] == queue_id:
                return True
            if ids[middle] < queue_id:
                low = middle + 1
            else:
                n = middle
        return False

    cdef inline int take_row(self, ColumnSink* s, StagedRow* row, const int32_t* ids, int64_t id_num,
                             WantedKey* wanted) noexcept nogil:
        # Stages a parsed record, if it is one of those that are asked for; `wanted` is NULL where no key is.
        cdef RecordView* r = &row.r
        cdef const unsigned char* p = row.p
        cdef const unsigned char* text = p + r.properties_pos
        cdef PropertySpan* span
        if not self.begin_timestamp <= r.store_timestamp <= self.end_timestamp:
            return PASSED_OVER
        if not self.any_queue and not self.wants_queue(ids, id_num, r.queue_id):
            return PASSED_OVER
        if self.topics is not None:
            if s.topic == NULL or r.topic_len != s.topic_len or memcmp(p + r.topic_pos, s.topic, r.topic_len) != 0:
                s.topic, s.topic_len = p + r.topic_pos, r.topic_len
                s.topic_wanted = has_text(s, self.topics, p + r.topic_pos, r.topic_len)
            if not s.topic_wanted:
                return PASSED_OVER
        if wanted != NULL and not same_text(<unsigned char*>s.name_slots, p + r.topic_pos, r.topic_len, wanted.view.topic,
                                            wanted.view.topic_size):
            return PASSED_OVER
        row.span_num, row.layout = 0, NULL
        if s.mask & NEEDS_PROPERTIES or wanted != NULL or self.tags is not None:
            split_row(s, row, text)
        if wanted != NULL and not spans_have_key(text, row.room - r.properties_pos, row.spans, &row.known,
                                                 row.ascii, <unsigned char*>s.name_slots, wanted.view.key, wanted.view.key_size,
                                                 wanted.kinds):
            return PASSED_OVER
        if self.tags is not None:
            span = row.spans + row.known.tags
            if row.known.tags < 0 or not has_text(s, self.tags, text + span.split + 1, span.end - span.split - 1):
                return PASSED_OVER
        return stage_row(s, row)

    cdef int fill_rows(self, ColumnSink* s, const unsigned char* base, int64_t* pos, int64_t size, int64_t limit,
                       int64_t base_offset, const int32_t* ids, int64_t id_num) noexcept nogil:
        cdef StagedRow* row
        cdef int verdict
        cdef int64_t at
        # What found no room last time.
        if write_rows(s) != RECORD:
            return NEED_ROOM
        while True:
            at = pos[0]
            row = s.rows + s.row_num
            if s.count + s.row_num >= s.capacity:
                verdict = COLUMNS_FULL
            elif at >= limit:
                verdict = LIMIT
            elif s.row_num == STAGED_ROWS or s.span_used > SPAN_ROOM - MAX_SPANS:
                verdict = WRITE_FIRST
            else:
                row.p, row.room = base + at, size - at
                verdict = parse_record(row.p, row.room, &row.r)
                if verdict == RECORD and row.r.phy_offset != base_offset + at:
                    verdict = BAD_PHY_OFFSET
                if verdict == RECORD:
                    prefetch_stream(row.p, row.r.total_size, row.room)
                    row.ok = True
                    verdict = self.take_row(s, row, ids, id_num, NULL)
                if verdict == RECORD or verdict == PASSED_OVER:
                    pos[0] = at + row.r.total_size
                    continue
            if write_rows(s) != RECORD:
                return NEED_ROOM
            if verdict != WRITE_FIRST:
                return verdict

    cdef bytes body_of(self, const unsigned char* p, int64_t room):
        # The decompressed body of the record at p, None if it cannot be decompressed or is no record any more.
        cdef RecordView r
        if parse_record(p, room, &r) != RECORD:
            return None
        stored = PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len)
        return stored if self.decompress is None else self.decompress(stored, r.sys_flag)

    cdef bint provide(self, ColumnSink* s, int verdict, const unsigned char* p, int64_t room) except -1:
        # What the record at p needs to become a row; False if it was not that.
        cdef RecordView r
        cdef unsigned char* slot
        cdef const unsigned char* host
        cdef int32_t n
        if verdict == NEED_ROOM:
            self.grow(s)
            return True
        if verdict != NEED_HOST:
            return False
        if parse_record(p, room, &r) != RECORD:
            # It changed meanwhile; the next look at it says what it is.
            return True
        host = p + RECORD_BORN_HOST if s.wanting == COL_BORN_HOST else p + r.store_host_pos
        n = r.born_host_len if s.wanting == COL_BORN_HOST else r.store_host_len
        text = self.host_text(PyBytes_FromStringAndSize(<char*>host, n)).encode("ascii")
        slot = host_slot(s.hosts, s.wanting, host, n)
        slot[0] = <unsigned char>n
        memcpy(slot + HOST_KEY, host, n)
        slot[HOST_TEXT_LEN] = <unsigned char>min(len(text), HOST_ROOM - HOST_TEXT)
        memcpy(slot + HOST_TEXT, PyBytes_AS_STRING(text), slot[HOST_TEXT_LEN])
        return True

    def fill(self, Region region not None, int64_t pos, int64_t limit, int64_t base_offset):
        """Append rows for the chosen records from `pos` on; the GIL is released.

        Parameters
        ----------
        region : Region
            A commit-log segment.
        pos, limit : int
            Where to begin and where to stop, positions in the segment.
        base_offset : int
            Absolute offset of the segment's first byte; a record that says otherwise ends the pass.

        Returns
        -------
        (int, Verdict)
            The position of the first record that was not looked at and why the pass ended there; COLUMNS_FULL: call
            `take` and go on.  A record whose CRC fails becomes a row.
        """
        if limit > region.size:
            limit = region.size
        cdef const int32_t[::1] id_column = self.queue_ids
        cdef const int32_t* ids = &id_column[0] if id_column.shape[0] else NULL
        cdef int64_t id_num = id_column.shape[0], at = pos
        cdef ColumnSink s
        cdef int verdict
        cdef unsigned char* base
        self.enter()
        try:
            base = region.pin(0, region.size)
            try:
                if pos < 0 or pos > region.size:
                    raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
                s.body_ready, s.row_num, s.block_num = False, 0, 1
                self.aim(&s)
                while True:
                    with nogil:
                        verdict = self.fill_rows(&s, base, &at, region.size, limit, base_offset, ids, id_num)
                    self.keep(&s)
                    if verdict == NEED_BODY:
                        body = self.body_of(base + at, region.size - at)
                        lend(&s, body)
                    elif not self.provide(&s, verdict, base + at, region.size - at):
                        return at, Verdict(verdict)
            finally:
                region.unpin()
        finally:
            self.leave()

    cdef int fill_places(self, ColumnSink* s, unsigned char** bases, const int64_t* room, int64_t region_num,
                         const int64_t[::1] base_offsets, const int32_t[::1] numbers, const int64_t[::1] phy_offsets,
                         const int32_t* sizes, uint8_t[::1] taken, int64_t* at, const int32_t* ids, int64_t id_num,
                         WantedKey* wanted, const int32_t* key_numbers, KeyTexts texts, PlacesQueue* queue) noexcept nogil:
        # `sizes`, `wanted` and `queue` may be NULL: no sizes, no keys are asked for, no queue leads here.
        cdef StagedRow* row
        cdef int64_t n = phy_offsets.shape[0], pos
        cdef int32_t number
        cdef int verdict
        if write_rows(s) != RECORD:
            return NEED_ROOM
        while True:
            row = s.rows + s.row_num
            if s.count + s.row_num >= s.capacity:
                verdict = COLUMNS_FULL
            elif at[0] >= n:
                verdict = LIMIT
            elif s.row_num == STAGED_ROWS or s.span_used > SPAN_ROOM - MAX_SPANS:
                verdict = WRITE_FIRST
            else:
                prefetch_places(bases, room, region_num, base_offsets, numbers, phy_offsets, at[0])
                number = numbers[at[0]]
                taken[at[0]] = 0
                if wanted != NULL:
                    if key_numbers[at[0]] != wanted.number:
                        wanted.number, wanted.row_num = key_numbers[at[0]], 0
                        wanted.there = texts.look(wanted.number, &wanted.view)
                    if not wanted.there or wanted.row_num >= wanted.max_num:
                        number = -1
                verdict = PASSED_OVER
                if 0 <= number < region_num:
                    pos = phy_offsets[at[0]] - base_offsets[number]
                    if 0 <= pos < room[number]:
                        row.p, row.room = bases[number] + pos, room[number] - pos
                        if (judge_record(row.p, row.room, phy_offsets[at[0]], 0, &row.r) == RECORD
                                and (sizes == NULL or sizes[at[0]] == row.r.total_size)):
                            s.number, s.pos = number, pos
                            row.ok = True
                            if (queue != NULL and (queue.shows or row.r.sys_flag & SYS_COMPRESSED)
                                    and (row.r.queue_offset != queue.queue_offsets[at[0]] or row.r.queue_id != queue.queue_id
                                         or row.r.topic_len != queue.topic_size
                                         or not same_bytes_at(row.p + row.r.topic_pos, queue.topic, queue.topic_size))):
                                row.ok = is_otherwise_of_queue(<unsigned char*>s.name_slots, row.p, row.room, &row.r, queue,
                                                               queue.queue_offsets[at[0]])
                            verdict = self.take_row(s, row, ids, id_num, wanted)
                if verdict == RECORD or verdict == PASSED_OVER:
                    if verdict == RECORD:
                        taken[at[0]] = 1
                        if wanted != NULL:
                            wanted.row_num += 1
                    at[0] += 1
                    continue
            if write_rows(s) != RECORD:
                return NEED_ROOM
            if verdict != WRITE_FIRST:
                return verdict

    def fill_at(self, list regions not None, const int64_t[::1] base_offsets not None, const int32_t[::1] numbers not None,
                const int64_t[::1] phy_offsets not None, const int32_t[::1] sizes not None, uint8_t[::1] taken not None,
                int64_t first=0, bytes topic=None, int32_t queue_id=0, const int64_t[::1] queue_offsets=None):
        """Append rows for the chosen records at these places, in their order; the GIL is released.

        Parameters
        ----------
        regions : list of Region
            Commit-log segments, at most 64.
        base_offsets : array of int64
            Absolute offset of the first byte of each.
        numbers : array of int32
            For each place the number of its region; one that there is not (-1) has no row.
        phy_offsets : array of int64
        sizes : array of int32
            What the records must have for a total size in bytes; an empty array does not ask.
        taken : array of uint8
            Becomes 1 for each place that has a row, 0 where no such record begins or it was not chosen.
        first : int
            The place to begin with.
        topic : bytes, optional
            UTF-8.  The places are those of the units of a queue of this topic: a row whose record says that it is another
            message is marked as corrupt, as by `read_queued`.
        queue_id : int
        queue_offsets : array of int64
            The queue offset of each unit.

        Returns
        -------
        int
            The first place that was not looked at, because the columns are full; the number of places at the end.
        """
        if sizes.shape[0] not in (0, phy_offsets.shape[0]):
            raise ValueError(f"{phy_offsets.shape[0]} places, {sizes.shape[0]} sizes")
        cdef PlacesQueue queue
        cdef bint asks = topic is not None and phy_offsets.shape[0] > 0
        if asks:
            if queue_offsets is None or queue_offsets.shape[0] != phy_offsets.shape[0]:
                raise ValueError(f"give a queue offset for each of {phy_offsets.shape[0]} places")
            queue.topic, queue.topic_size = <const unsigned char*>PyBytes_AS_STRING(topic), PyBytes_GET_SIZE(topic)
            queue.queue_id, queue.queue_offsets = queue_id, &queue_offsets[0]
            queue.shows = (self.mask & 1 << COL_CORRUPT) != 0
        return self.fill_from(regions, base_offsets, numbers, phy_offsets, &sizes[0] if sizes.shape[0] else NULL, taken, first,
                              NULL, NULL, None, &queue if asks and self.mask & (1 << COL_CORRUPT | 1 << COL_BODY) else NULL)

    def fill_matching(self, list regions not None, const int64_t[::1] base_offsets not None,
                      const int32_t[::1] numbers not None, const int64_t[::1] phy_offsets not None,
                      uint8_t[::1] taken not None, const int32_t[::1] key_numbers not None, KeyTexts texts not None,
                      int kinds, int64_t max_num, int64_t first=0, int64_t row_num=0):
        """Append rows as `fill_at` does, for those records only that have the topic and the key that was asked for.

        Parameters
        ----------
        regions, base_offsets, numbers, phy_offsets, taken, first
            As of `fill_at`.
        key_numbers : array of int32
            For each place the number of its key in `texts`.
        texts : KeyTexts
        kinds : int
            Where to look for the key: 1 = the unique key, 2 = the pieces of KEYS, 4 = the tag; or a sum.
        max_num : int
            At most so many rows for a run of places with the same key; the others are passed over without a look.
        row_num : int
            How many rows the run that `first` is in the middle of has had.

        Returns
        -------
        int
            As of `fill_at`.
        """
        cdef WantedKey wanted
        if key_numbers.shape[0] != phy_offsets.shape[0]:
            raise ValueError(f"{phy_offsets.shape[0]} places, {key_numbers.shape[0]} key numbers")
        wanted.kinds, wanted.max_num, wanted.row_num = kinds, max_num, row_num
        wanted.number, wanted.there = 0, False
        if 0 <= first < key_numbers.shape[0]:
            wanted.number = key_numbers[first]
            wanted.there = texts.look(wanted.number, &wanted.view)
        return self.fill_from(regions, base_offsets, numbers, phy_offsets, NULL, taken, first, &wanted,
                              &key_numbers[0] if key_numbers.shape[0] else NULL, texts, NULL)

    cdef int64_t fill_from(self, list regions, const int64_t[::1] base_offsets, const int32_t[::1] numbers,
                           const int64_t[::1] phy_offsets, const int32_t* sizes, uint8_t[::1] taken, int64_t first,
                           WantedKey* wanted, const int32_t* key_numbers, KeyTexts texts, PlacesQueue* queue) except -1:
        cdef unsigned char* bases[MAX_REGIONS]
        cdef int64_t[MAX_REGIONS] room
        cdef int64_t n = phy_offsets.shape[0], region_num = len(regions), pinned = 0, at = first, i
        cdef const int32_t[::1] id_column = self.queue_ids
        cdef const int32_t* ids = &id_column[0] if id_column.shape[0] else NULL
        cdef int64_t id_num = id_column.shape[0]
        cdef const unsigned char* p
        cdef Region region
        cdef ColumnSink s
        cdef int verdict
        if region_num > MAX_REGIONS or base_offsets.shape[0] != region_num:
            raise ValueError(f"{region_num} regions with {base_offsets.shape[0]} offsets; at most {MAX_REGIONS} at once")
        if numbers.shape[0] != n or taken.shape[0] != n or not 0 <= first <= n:
            raise ValueError(f"{n} places from {first} on, {numbers.shape[0]} numbers, {taken.shape[0]} marks")
        self.enter()
        try:
            for each in regions:
                region = <Region?>each
                bases[pinned] = region.pin(0, region.size)
                room[pinned] = region.size
                pinned += 1
            s.body_ready, s.row_num, s.block_num = False, 0, 1
            self.aim(&s)
            while True:
                with nogil:
                    verdict = self.fill_places(&s, bases, room, region_num, base_offsets, numbers, phy_offsets, sizes, taken,
                                               &at, ids, id_num, wanted, key_numbers, texts, queue)
                self.keep(&s)
                if verdict == LIMIT or verdict == COLUMNS_FULL:
                    return at
                p = bases[s.number] + s.pos
                if verdict == NEED_BODY:
                    body = self.body_of(p, room[s.number] - s.pos)
                    lend(&s, body)
                else:
                    self.provide(&s, verdict, p, room[s.number] - s.pos)
        finally:
            for i in range(pinned):
                region = regions[i]
                region.unpin()
            self.leave()

    cdef int enter(self) except -1:
        if atomic_or(&self.busy, 1):
            raise RuntimeError("these columns are being filled by another thread")
        return 0

    cdef void leave(self) noexcept:
        self.busy = 0

    def take(self):
        """Hand over the rows and begin anew.

        Returns
        -------
        (int, dict)
            How many rows, and for each column (values, valid, null_num, data, child, data 2, child 2): NumPy arrays in the
            layout of Arrow's buffers.  `values` are the numbers (``corrupt``: bits), or for text, lists and maps the
            offsets; `valid` bits are None where nothing is null; `data` are the bytes of the text; `child` are the offsets
            of the texts in a list, or of a map's names, and the last two those of its values.
        """
        cdef dict parts = {}
        cdef int i
        cdef int64_t n
        self.enter()
        try:
            if not self.ready:
                self.renew()
            n = self.count
            for name, i in zip(self.columns, self.numbers):
                main = self.main[i]
                if i == COL_CORRUPT:
                    main = main[:(n + 7) // 8]
                else:
                    main = main[:n + 1 if HAS_OFFSETS >> i & 1 else n]
                parts[name] = (
                    main,
                    self.valid[i][:(n + 7) // 8] if self.null_num[i] else None,
                    self.null_num[i],
                    None if self.data[i] is None else self.data[i][:self.data_used[i]],
                    None if self.child[i] is None else self.child[i][:self.child_used[i] + 1],
                    self.data[COL_VALUES][:self.data_used[COL_VALUES]] if i == COL_PROPERTIES else None,
                    self.child[COL_VALUES][:self.child_used[COL_VALUES] + 1] if i == COL_PROPERTIES else None,
                )
            for i in range(BUFFER_NUM):
                # An eighth more than this batch took, or much less room if that was a lot more.
                if self.data_used[i]:
                    self.data_size[i] = self.data_used[i] + self.data_used[i] // 8 + 4096
                if self.child_used[i]:
                    self.child_size[i] = self.child_used[i] + self.child_used[i] // 8 + 64
            # Nothing is held on to that was handed over; most columns are not filled again.
            self.main = self.valid = self.data = self.child = None
            self.count, self.ready = 0, False
            return n, parts
        finally:
            self.leave()


cdef TopicTable table_of(object texts):
    cdef TopicTable table
    if texts is None:
        return None
    table = TopicTable()
    for each in texts:
        table.add(each)
    return table


cdef unsigned char* address_of(object array) except? NULL:
    # The array must outlive the use; nothing here resizes one.
    cdef Py_buffer view
    cdef unsigned char* p
    if array is None:
        return NULL
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    p = <unsigned char*>view.buf
    PyBuffer_Release(&view)
    return p


def chain_entries(IndexRegion index not None, const int32_t[::1] hashes not None):
    """Every entry with one of these index hashes, whatever its time; the GIL is released.

    Parameters
    ----------
    hashes : array of int32
        A negative one has no entries.

    Returns
    -------
    (numpy.ndarray of int32, numpy.ndarray of int64)
        Number of the hash and phy offset of each entry; of one hash the newest entry first.
    """
    cdef Region region = index.region
    cdef int64_t n = hashes.shape[0], capacity = 2 * n + WALKS, used = 0, following = 0, active = 0, i, at, prev
    cdef bint damaged = False
    cdef int64_t[WALKS] walk_at
    cdef int32_t[WALKS] walk_key
    cdef const unsigned char* entries
    cdef const unsigned char* entry
    cdef uint32_t slot
    number_array, offset_array = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
    cdef int32_t[::1] numbers = number_array
    cdef int64_t[::1] offsets = offset_array
    cdef const unsigned char* base = region.pin(0, region.size)
    try:
        entries = base + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num
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
                        at = 0
                        if hashes[following] >= 0:
                            at = index_head(base, index.magic, index.slot_num, index.index_num, hashes[following])
                        damaged |= at < 0
                        if at > 0:
                            walk_at[active], walk_key[active] = at, <int32_t>following
                            ask_for_entry(entries + ENTRY_SIZE * at)
                            active += 1
                        following += 1
                    i = 0
                    while i < active:
                        at = walk_at[i]
                        entry = entries + ENTRY_SIZE * at
                        if get_i32(entry + ENTRY_KEY_HASH) == hashes[walk_key[i]]:
                            numbers[used], offsets[used] = walk_key[i], get_i64(entry + ENTRY_PHY_OFFSET)
                            damaged |= offsets[used] < 0
                            used += 1
                        prev = entry_before(entry, at, hashes[walk_key[i]], index.magic, index.slot_num, &damaged)
                        if prev == 0:
                            active -= 1
                            walk_at[i], walk_key[i] = walk_at[active], walk_key[active]
                        else:
                            walk_at[i] = prev
                            ask_for_entry(entries + ENTRY_SIZE * prev)
                            i += 1
        if damaged:
            index.damaged = True
        return number_array[:used], offset_array[:used]
    finally:
        region.unpin()


cdef bint has_key_hash(const unsigned char* p, RecordView* r, int32_t key_hash) noexcept nogil:
    # Whether an entry with this hash may lead to this record; of one with very many keys it is taken for granted.
    cdef int32_t[KEY_HASHES] hashes
    cdef KnownProperties k
    cdef int64_t i, num, code
    find_properties(p + r.properties_pos, r.properties_len, r.properties_len, &k)
    num = put_key_hashes(hashes, 0, KEY_HASHES, hash_utf8(0, p + r.topic_pos, r.topic_len), p + r.properties_pos, &k.indexed,
                         True, &code)
    for i in range(num):
        if hashes[i] == key_hash:
            return True
    return num < 0


def doubtful_entry(list regions not None, const int64_t[::1] base_offsets not None, const int32_t[::1] numbers not None,
                   const int64_t[::1] phy_offsets not None, const int32_t[::1] key_hashes not None, int64_t first=0):
    """int: the first place, from `first` on, to which an index entry with its key hash cannot lead; -1 if there is none.

    Parameters
    ----------
    regions, base_offsets, numbers, phy_offsets
        As of `ArrowColumns.fill_at`; a place in no region is not judged.
    key_hashes : array of int32
        The hash of each entry.
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


def entries_by_key(list parts not None, int64_t num):
    """Put the entries of several index files in the order of their keys; the GIL is released.

    Parameters
    ----------
    parts : list of (array of int32, array of int64)
        What `chain_entries` gives for the same hashes, the newest file first.
    num : int
        How many hashes there are.

    Returns
    -------
    (numpy.ndarray of int32, numpy.ndarray of int64, bool)
        Number of the hash and phy offset of each entry; of one hash in the order in which they came, where one that leads to
        the same record as the entry before it is left out.  The last says whether the offsets of every hash fall.

    Raises
    ------
    ValueError
        A number of no hash, or arrays of different lengths.
    """
    cdef const int32_t[::1] numbers
    cdef const int64_t[::1] offsets
    cdef int64_t i, n, total = 0, at, start = 0, kept = 0
    cdef int32_t number
    cdef bint wrong = num < 0, falling = True
    cdef tuple fixed = tuple(parts)
    next_array = np.zeros(max(num, 0), np.int64)
    cdef int64_t[::1] following = next_array
    for numbers, offsets in fixed:
        n = numbers.shape[0]
        if offsets.shape[0] != n:
            raise ValueError(f"{n} numbers with {offsets.shape[0]} offsets")
        total += n
        with nogil:
            for i in range(n):
                if not 0 <= numbers[i] < num:
                    wrong = True
                    break
                following[numbers[i]] += 1
        if wrong:
            raise ValueError(f"an entry of none of the {num} hashes")
    number_array, offset_array = np.empty(total, np.int32), np.empty(total, np.int64)
    cdef int32_t[::1] out_numbers = number_array
    cdef int64_t[::1] out_offsets = offset_array
    with nogil:
        for i in range(num):
            n = following[i]
            following[i] = start
            start += n
    for numbers, offsets in fixed:
        n = numbers.shape[0]
        with nogil:
            for i in range(n):
                number = numbers[i]
                # Looked at again: somebody else may have written to the parts since they were counted.
                if not 0 <= number < num or following[number] >= total:
                    wrong = True
                    break
                at = following[number]
                following[number] = at + 1
                out_numbers[at], out_offsets[at] = number, offsets[i]
    if wrong:
        raise ValueError(f"an entry of none of the {num} hashes")
    with nogil:
        for i in range(total):
            if kept > 0 and out_numbers[i] == out_numbers[kept - 1]:
                if out_offsets[i] == out_offsets[kept - 1]:
                    continue
                if out_offsets[i] > out_offsets[kept - 1]:
                    falling = False
            out_numbers[kept], out_offsets[kept] = out_numbers[i], out_offsets[i]
            kept += 1
    return number_array[:kept], offset_array[:kept], falling


def text_arrays(tuple texts not None):
    """Lay texts out as a text column: the offsets, and the bytes one behind the other.

    Returns
    -------
    (numpy.ndarray of int32, numpy.ndarray of uint8) or None
        None where one is not `str` or not ASCII, or where all are longer than the offsets reach.
    """
    cdef Py_ssize_t n = len(texts), i, length
    cdef int64_t size = 0
    cdef PyObject* text
    cdef const unsigned char* p
    offset_array = np.empty(n + 1, np.int32)
    cdef int32_t[::1] offsets = offset_array
    offsets[0] = 0
    for i in range(n):
        if i + 16 < n:
            prefetch(<char*>PyTuple_GET_ITEM(texts, i + 16))
        text = PyTuple_GET_ITEM(texts, i)
        if not PyUnicode_CheckExact(text) or not PyUnicode_IS_COMPACT_ASCII(text):
            return None
        size += PyUnicode_GET_LENGTH(text)
        if size > 0x7FFFFFFF:
            return None
        offsets[i + 1] = <int32_t>size
    data_array = np.empty(size, np.uint8)
    cdef unsigned char* to = address_of(data_array)
    for i in range(n):
        text = PyTuple_GET_ITEM(texts, i)
        p, length = <const unsigned char*>PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text)
        if 8 <= length <= 16:
            memcpy(to, p, 8)
            memcpy(to + length - 8, p + length - 8, 8)
        else:
            memcpy(to, p, length)
        to += length
    return offset_array, data_array
