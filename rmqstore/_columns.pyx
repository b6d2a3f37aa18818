"""Records as columns: numbers for whoever dispatches, recovers and rebuilds, and Arrow arrays for whoever reads many.

Owns `RecordColumns` with its topics, which a scan and a put fill, the comparison of queues and index files with them, and
`ArrowColumns`, which takes records apart into the buffers of Arrow arrays, with the memory of these (`Room`).  It knows
no file and decides nothing: damage is a verdict or a mark in the column `corrupt`.  Invariants are those of `_core`;
the address of an array is asked for in every pass, and memory is used again only when nobody holds it.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset

from rmqstore._bytes cimport (
    atomic_or, before, copy_ascii, copy_bytes, get_i16, get_i32, get_i64, is_ascii, load_i64, prefetch, put_hex, put_hex_8,
    put_hex_8_8, put_view, same_bytes_at, VIEW_INLINE,
)
from rmqstore._core cimport (
    BAD_PHY_OFFSET, COLUMNS_FULL, ENTRY_PHY_OFFSET, ENTRY_SIZE, ENTRY_TIME_DIFF, EXT_BASE, EXT_UNIT_BITMAP_LENGTH,
    EXT_UNIT_MIN_SIZE, EXT_UNIT_STORE_TIMESTAMP, EXT_UNIT_TAGS_CODE, INDEX_BEGIN_TIMESTAMP, index_count_of,
    INDEX_HEADER_SIZE, IndexRegion, LIMIT, RECORD, RECORD_BORN_HOST, RECORD_BORN_TIMESTAMP, RECORD_FLAG,
    RECORD_PHY_OFFSET, RECORD_QUEUE_ID, RECORD_QUEUE_OFFSET, Region, SLOT_SIZE,
    SYS_BORN_V6, SYS_INNER_BATCH, SYS_PREPARED, SYS_ROLLBACK, SYS_STORE_V6, SYS_TRANSACTION_MASK, UNIT_RECORD_SIZE,
    UNIT_SIZE, UNIT_TAGS_CODE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._java_text cimport hash_units8, hash_utf8, index_hash, put_java_utf8, same_text
from rmqstore._properties cimport (
    find_properties, fits, is_dispatched_to, KnownProperties, KnownSpans, learn, names_may_repeat, parse_decimal,
    PropertyLayout, PropertySpan, put_key_hashes, put_name_view, put_value_view, split_properties, tags_code_in,
)
from rmqstore._python cimport (
    COPIED_BYTES, go_on, let_others_run, PyThreadState, PyTuple_GET_ITEM, PyUnicode_CheckExact, PyUnicode_DATA,
    PyUnicode_GET_LENGTH, PyUnicode_IS_COMPACT_ASCII,
)
from rmqstore._record cimport (
    body_crc_ok, has_prop_crc, judge_record, parse_head, parse_record, parse_rest, prefetch_places, prefetch_stream,
    prop_crc_ok, RecordView, unit_code_of,
)

cdef extern from "_arrow.h":
    ctypedef struct ArrowArray "struct ArrowArray":
        const void** buffers
        ArrowArray** children
    # An array of memory that belongs to `owner`; -1: no memory.  `drop_array` lets go of it, where nobody else took
    # it over.
    int make_array "rmq_arrow_make"(ArrowArray* array, object owner, int64_t length, int64_t null_num,
                                    int64_t buffer_num, int64_t size_num, int64_t child_num)
    void drop_array "rmq_arrow_drop"(ArrowArray* array)

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.errors import OffsetOutOfRangeError, StoreClosedError

crc32_start()


# ------------------------------------------------------------------------------------------------- records as columns

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
            begin_timestamp = load_i64(base + INDEX_BEGIN_TIMESTAMP)
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


# ------------------------------------------------------------------------------------------------------ Arrow columns

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
    # After the columns: the values of the properties, whose names are COL_PROPERTIES.
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
    # Columns of texts or bytes: with views each value takes VIEW_SIZE bytes of `main`, likewise each text of a child.
    HAS_VIEWS = HAS_OFFSETS & ~(1 << COL_KEYS | 1 << COL_PROPERTIES)
    VIEW_SIZE = 16
    # Columns that are told apart by these where few are asked for.
    IN_BODY = 1 << COL_BODY | 1 << COL_BODY_STORED
    IN_HEAD = 1 << COL_TOPIC | 1 << COL_MSG_ID | 1 << COL_BORN_HOST | 1 << COL_STORE_HOST
    # Those of a scan that names none.
    USUAL_COLUMNS = (1 << COL_NUM) - 1 & ~(1 << COL_UNIQUE_KEY | 1 << COL_BODY_STORED) | 1 << COL_VALUES
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
    HOST_POS = 28            # where the text stands in the data of a batch with views, if it does
    HOST_TEXT = 32
    LAYOUTS = 32             # one for each length of a properties text and of a topic, as far as their sum goes
    LAYOUT_PATIENCE = 32     # so many texts in a row have to differ from one before another is learnt, which takes long
    ID_SIZE = 32             # digits of the message id of a record with an IPv4 host
    MAX_REGIONS = 64
    # What is kept of the memory of batches before: so many rooms and bytes at most, and none that malloc has at hand.
    POOL_ROOMS = 64
    POOL_BYTES = 8 * 1024 * 1024
    SMALL_ROOM = 4096
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
    # With views: the number of the record's buffer and the address of its first byte.
    int32_t buffer
    const unsigned char* origin
    const unsigned char* body
    int64_t body_len
    int64_t body_room
    bint body_lent
    PropertySpan* spans
    PropertyLayout* layout  # NULL for a text that was taken apart by itself
    KnownSpans known
    int32_t span_num
    int ascii
    bint ok
    RecordView r


cdef struct ColumnSink:
    # Where the next row goes: addresses in the arrays of one ArrowColumns, asked for in every pass.
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
    # What `split_usual` found, in the first spans.
    KnownSpans split_known
    int32_t split_num
    PropertyLayout* layouts
    int64_t block_num
    int32_t* chosen
    int32_t* name_ends
    int32_t* name_slots
    int check_crc
    bint views
    int64_t* lent_ends
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
    # The topic of the record before, NULL where there is none, whether it is one of those that are asked for, and its
    # view where it is ASCII.
    const unsigned char* topic
    int32_t topic_len
    bint topic_wanted
    bint topic_ascii
    unsigned char topic_view[VIEW_SIZE]
    # The hosts of the row before, if that was written in one pass: their eight bytes and views, and the digits of the
    # second.
    bint host_known[2]
    uint64_t host[2]
    unsigned char host_view[2][VIEW_SIZE]
    unsigned char store_digits[VIEW_SIZE]


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


cdef inline bint same_name(const unsigned char* data, const int32_t* offsets, int64_t a, int64_t b) noexcept nogil:
    cdef int32_t n = offsets[a + 1] - offsets[a]
    return offsets[b + 1] - offsets[b] == n and memcmp(data + offsets[a], data + offsets[b], n) == 0


cdef bint repeats(ColumnSink* s, const int32_t* offsets, int64_t n) noexcept nogil:
    # Whether two of the `n` names are equal that were just written; `offsets` are theirs in the data.  chosen[k] becomes the
    # number of the property whose value the k-th takes, -1 where an earlier one has the same name: a dict's first place and
    # last value.
    cdef int64_t k, at
    cdef const unsigned char* data = s.data[COL_PROPERTIES]
    cdef bint found = False
    cdef uint32_t h
    memset(s.name_slots, 0, NAME_SLOTS * sizeof(int32_t))
    for k in range(n):
        s.chosen[k] = <int32_t>k
        h = hash_units8(0, data + offsets[k], offsets[k + 1] - offsets[k])
        at = (h * 0x9E3779B1u) >> 17
        while s.name_slots[at] > 0 and not same_name(data, offsets, s.name_slots[at] - 1, k):
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
            chosen = repeats(s, s.child[COL_PROPERTIES] + first, row.span_num)
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


cdef inline int64_t put_message_id(unsigned char* to, StagedRow* row) noexcept nogil:
    # Upper-case hexadecimal digits of the store host and the phy offset; how many.
    if row.r.store_host_len == 8:
        put_hex_8_8(to, row.p + row.r.store_host_pos, row.p + RECORD_PHY_OFFSET)
        return 32
    put_hex(to, row.p + row.r.store_host_pos, 20)
    put_hex(to + 40, row.p + RECORD_PHY_OFFSET, 8)
    return 56


cdef void write_message_ids(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_MSG_ID] + s.count + 1
    cdef unsigned char* data = s.data[COL_MSG_ID]
    cdef int64_t i, used = s.data_used[COL_MSG_ID]
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        used += put_message_id(data + used, row)
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
    # The field of the first row; that of the next one lies a StagedRow after it.
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


cdef inline void view_text(ColumnSink* s, int column, unsigned char* to, StagedRow* row, const unsigned char* p, int64_t n,
                           int64_t room, bint ascii) noexcept nogil:
    # A view of a text of the record; one that is not the UTF-8 of what Java reads goes to the column's own data.
    cdef int64_t used, taken
    if not ascii:
        used = s.data_used[column]
        taken = put_java_utf8(s.data[column] + used, p, n)
        if taken != n or memcmp(s.data[column] + used, p, n) != 0:
            view_own(s, column, to, taken)
            return
    put_view(to, p, n, room, row.buffer, p - row.origin)


cdef inline void view_own(ColumnSink* s, int column, unsigned char* to, int64_t n) noexcept nogil:
    # A view of the `n` bytes that were just written after the column's own data, which keeps them where the view does not.
    cdef int64_t used = s.data_used[column]
    put_view(to, s.data[column] + used, n, n + TEXT_SLACK, 0, used)
    if n > VIEW_INLINE:
        s.data_used[column] = used + n


cdef void view_topics(ColumnSink* s) noexcept nogil:
    cdef unsigned char* to = s.main[COL_TOPIC] + VIEW_SIZE * s.count
    cdef int64_t i
    cdef StagedRow* row
    cdef const unsigned char* text
    for i in range(s.row_num):
        row = s.rows + i
        text = row.p + row.r.topic_pos
        view_text(s, COL_TOPIC, to + VIEW_SIZE * i, row, text, row.r.topic_len, row.room - row.r.topic_pos,
                  is_ascii(text, row.r.topic_len))


cdef void view_message_ids(ColumnSink* s) noexcept nogil:
    cdef unsigned char* to = s.main[COL_MSG_ID] + VIEW_SIZE * s.count
    cdef unsigned char* text
    cdef int64_t i
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        text = s.data[COL_MSG_ID] + s.data_used[COL_MSG_ID]
        view_own(s, COL_MSG_ID, to + VIEW_SIZE * i, put_message_id(text, row))


cdef void view_host(ColumnSink* s, int column, unsigned char* to, const unsigned char* host, int32_t n) noexcept nogil:
    # The text of a host is written once for a batch, as long as nobody else takes its slot.
    cdef unsigned char* slot = told_host(s, column, host, n)
    cdef int64_t length = slot[HOST_TEXT_LEN], used = s.data_used[column]
    cdef int32_t pos
    memcpy(&pos, slot + HOST_POS, sizeof(pos))
    if pos < 0 or pos > used - length or memcmp(s.data[column] + pos, slot + HOST_TEXT, length) != 0:
        pos = <int32_t>used
        memcpy(s.data[column] + used, slot + HOST_TEXT, 64)
        memcpy(slot + HOST_POS, &pos, sizeof(pos))
        view_own(s, column, to, length)
    else:
        put_view(to, slot + HOST_TEXT, length, 64, 0, pos)


cdef void view_hosts(ColumnSink* s, int column) noexcept nogil:
    cdef unsigned char* to = s.main[column] + VIEW_SIZE * s.count
    cdef int64_t i
    cdef int32_t n, last_n = 0
    cdef uint64_t here, last = 0
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
        if n == 8 and last_n == 8 and here == last:
            memcpy(to + VIEW_SIZE * i, to + VIEW_SIZE * (i - 1), VIEW_SIZE)
        else:
            view_host(s, column, to + VIEW_SIZE * i, host, n)
        last, last_n = here, n


cdef void view_nullable(ColumnSink* s, int column) noexcept nogil:
    cdef unsigned char* to = s.main[column] + VIEW_SIZE * s.count
    cdef int64_t i
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
            view_text(s, column, to + VIEW_SIZE * i, row, text + span.split + 1, span.end - span.split - 1,
                      row.room - row.r.properties_pos - span.split - 1, row.ascii)
        else:
            memset(to + VIEW_SIZE * i, 0, VIEW_SIZE)
        mark_valid(s, column, s.count + i, number >= 0)


cdef void view_bodies(ColumnSink* s) noexcept nogil:
    cdef unsigned char* to = s.main[COL_BODY] + VIEW_SIZE * s.count
    cdef int64_t i, used
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        if row.body_len < 0:
            memset(to + VIEW_SIZE * i, 0, VIEW_SIZE)
        elif row.body_lent:
            used = s.data_used[COL_BODY]
            copy_bytes(s.data[COL_BODY] + used, row.body, row.body_len, row.body_room)
            view_own(s, COL_BODY, to + VIEW_SIZE * i, row.body_len)
        else:
            put_view(to + VIEW_SIZE * i, row.body, row.body_len, row.body_room, row.buffer, row.body - row.origin)
        mark_valid(s, COL_BODY, s.count + i, row.body_len >= 0)


cdef void view_stored_bodies(ColumnSink* s) noexcept nogil:
    cdef unsigned char* to = s.main[COL_BODY_STORED] + VIEW_SIZE * s.count
    cdef int64_t i
    cdef StagedRow* row
    cdef const unsigned char* body
    for i in range(s.row_num):
        row = s.rows + i
        body = row.p + row.r.body_pos
        put_view(to + VIEW_SIZE * i, body, row.r.body_len, row.room - row.r.body_pos, row.buffer, body - row.origin)


cdef void view_keys(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_KEYS] + s.count + 1
    cdef unsigned char* views = <unsigned char*>s.child[COL_KEYS]
    cdef int64_t i, num = s.child_used[COL_KEYS], start, end, room
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
                    view_text(s, COL_KEYS, views + VIEW_SIZE * num, row, text + start, end - start, room, row.ascii)
                    num += 1
                start = end + 1
        ends[i] = <int32_t>num
    s.child_used[COL_KEYS] = num


cdef bint names_repeat(ColumnSink* s, StagedRow* row, const unsigned char* text, int64_t room) noexcept nogil:
    # `repeats` of the names of a row, which are written after the names' data for that and left there for nobody.
    cdef int64_t used = s.data_used[COL_PROPERTIES], k
    cdef PropertySpan* span
    s.name_ends[0] = <int32_t>used
    for k in range(row.span_num):
        span = row.spans + k
        used += put_text(s.data[COL_PROPERTIES] + used, text + span.start, span.split - span.start, room - span.start, row.ascii)
        s.name_ends[k + 1] = <int32_t>used
    return repeats(s, s.name_ends, row.span_num)


cdef inline int64_t put_property_views(ColumnSink* s, int64_t num, const PropertyLayout* layout,
                                       const unsigned char* text, int32_t buffer, int64_t pos) noexcept nogil:
    # The names and values of a text that fits and stands at `pos` of a buffer, as those from `num` on; how many there
    # are then.
    cdef unsigned char* names = <unsigned char*>s.child[COL_PROPERTIES] + VIEW_SIZE * num
    cdef unsigned char* values = <unsigned char*>s.child[COL_VALUES] + VIEW_SIZE * num
    cdef int32_t k, span_num = layout.span_num
    for k in range(span_num):
        put_name_view(names + VIEW_SIZE * k, layout, k, text, buffer, pos)
        put_value_view(values + VIEW_SIZE * k, layout, k, text, buffer, pos)
    return num + span_num


cdef void view_properties(ColumnSink* s) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_PROPERTIES] + s.count + 1
    cdef unsigned char* names = <unsigned char*>s.child[COL_PROPERTIES]
    cdef unsigned char* values = <unsigned char*>s.child[COL_VALUES]
    cdef int64_t num = s.child_used[COL_PROPERTIES], i, k, room
    cdef StagedRow* row
    cdef PropertySpan* span
    cdef const unsigned char* text
    cdef bint chosen
    for i in range(s.row_num):
        row = s.rows + i
        text, room = row.p + row.r.properties_pos, row.room - row.r.properties_pos
        if row.layout != NULL and row.r.properties_len + VIEW_SIZE <= room:
            num = put_property_views(s, num, row.layout, text, row.buffer, text - row.origin)
            ends[i] = <int32_t>num
            continue
        chosen = (row.layout == NULL and row.span_num > 1
                  and (not row.ascii or names_may_repeat(text, row.spans, row.span_num)) and names_repeat(s, row, text, room))
        for k in range(row.span_num):
            if chosen and s.chosen[k] < 0:
                continue
            span = row.spans + k
            view_text(s, COL_PROPERTIES, names + VIEW_SIZE * num, row, text + span.start, span.split - span.start,
                      room - span.start, row.ascii)
            if chosen:
                span = row.spans + s.chosen[k]
            view_text(s, COL_VALUES, values + VIEW_SIZE * num, row, text + span.split + 1, span.end - span.split - 1,
                      room - span.split - 1, row.ascii)
            num += 1
        ends[i] = <int32_t>num
    s.child_used[COL_PROPERTIES] = s.child_used[COL_VALUES] = num


cdef void write_views(ColumnSink* s, int column) noexcept nogil:
    if column == COL_TOPIC:
        view_topics(s)
    elif column == COL_MSG_ID:
        view_message_ids(s)
    elif column == COL_KEYS:
        view_keys(s)
    elif column == COL_PROPERTIES:
        view_properties(s)
    elif column == COL_BODY:
        view_bodies(s)
    elif column == COL_BODY_STORED:
        view_stored_bodies(s)
    elif column == COL_TAGS or column == COL_UNIQUE_KEY:
        view_nullable(s, column)
    else:
        view_hosts(s, column)


cdef bint lack_room(ColumnSink* s) noexcept nogil:
    # Whether the staged rows do not fit, at their largest.  Text triples where every byte is malformed.
    cdef int64_t mask = s.mask, texts = 3 * s.properties_need + TEXT_SLACK, hosts = TEXT_SLACK * s.row_num
    return ((mask & 1 << COL_BODY and lacks_room(s, COL_BODY, s.body_need + TEXT_SLACK))
            or (mask & 1 << COL_BODY_STORED and not s.views and lacks_room(s, COL_BODY_STORED, s.body_stored_need + TEXT_SLACK))
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
        elif s.views:
            write_views(s, column)
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
        row.body, row.body_len, row.body_room, row.body_lent = p + r.body_pos, r.body_len, row.room - r.body_pos, False
        if r.sys_flag & SYS_COMPRESSED and row.ok and r.body_len > 0:
            if s.row_num > 0:
                return WRITE_FIRST
            if not s.body_ready:
                return NEED_BODY
            row.body, row.body_len, row.body_room, row.body_lent = s.body, s.body_len, s.body_len, True
        if row.body_len > 0 and (row.body_lent or not s.views):
            weight += row.body_len
    if mask & 1 << COL_BODY_STORED and not s.views:
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
    if mask & 1 << COL_BODY and row.body_len > 0 and (row.body_lent or not s.views):
        s.body_need += row.body_len
    if s.views and p - row.origin + r.total_size > s.lent_ends[row.buffer - 1]:
        s.lent_ends[row.buffer - 1] = p - row.origin + r.total_size
    s.span_used += row.span_num
    s.row_num += 1
    s.body_ready = False
    return RECORD


cdef inline PropertyLayout* layout_of(ColumnSink* s, int32_t topic_len, int32_t properties_len) noexcept nogil:
    # Messages of one kind have one topic.
    return s.layouts + (<uint32_t>(properties_len + 5 * topic_len) & (LAYOUTS - 1))


cdef inline bint is_to_be_learnt(PropertyLayout* layout) noexcept nogil:
    # Whether a text that does not fit takes the place of the one that the layout is of.
    layout.misses += 1
    if layout.n > 0 and layout.misses < LAYOUT_PATIENCE:
        return False
    layout.misses = 0
    return True


cdef inline void split_row(ColumnSink* s, StagedRow* row, const unsigned char* text) noexcept nogil:
    # Messages of one kind have the same properties, mostly of the same lengths, one after the other.
    cdef int32_t n = row.r.properties_len
    cdef int64_t room = row.room - row.r.properties_pos
    cdef PropertyLayout* layout = layout_of(s, row.r.topic_len, n)
    if fits(layout, text, n, room):
        layout.used_by, layout.misses = s.block_num, 0
        row.layout, row.spans, row.span_num, row.known, row.ascii = layout, layout.spans, layout.span_num, layout.known, True
        return
    row.spans = s.spans + s.span_used
    row.span_num = split_properties(text, n, room, row.spans, &row.known, &row.ascii)
    if row.ascii and layout.used_by != s.block_num and is_to_be_learnt(layout):
        learn(layout, text, n, row.spans, row.span_num, &row.known)


cdef inline bint is_known_topic(ColumnSink* s, const unsigned char* p, RecordView* r) noexcept nogil:
    return s.topic != NULL and r.topic_len == s.topic_len and same_bytes_at(p + r.topic_pos, s.topic, r.topic_len)


# Two functions each are made of those below: one for the columns of a scan that names none, which asks for no column
# while it writes, and one for any.
ctypedef fused Asked:
    uint8_t
    uint64_t


cdef inline int64_t mask_of(ColumnSink* s, Asked asked) noexcept nogil:
    if Asked is uint8_t:
        return USUAL_COLUMNS
    else:
        return s.mask


cdef struct ViewRun:
    # Where the next row goes of those that are written in one pass.
    int64_t count, id_used, key_num, property_num
    # How many rows, keys and properties there may be.
    int64_t row_room, key_room, property_room
    # The buffer that the views lead into, and its first byte.
    int32_t buffer
    const unsigned char* origin
    # Where the last record ends that was written, NULL where none was.
    const unsigned char* end


cdef bint split_usual(ColumnSink* s, PropertyLayout* layout, const unsigned char* text, int32_t n,
                      int64_t room) noexcept nogil:
    # Takes a text apart that does not fit its layout, into the first spans; False where it is not ASCII or names may
    # repeat.
    cdef int ascii = False
    s.split_num = split_properties(text, n, room, s.spans, &s.split_known, &ascii)
    if not ascii or names_may_repeat(text, s.spans, s.split_num):
        return False
    if is_to_be_learnt(layout):
        learn(layout, text, n, s.spans, s.split_num, &s.split_known)
    return True


cdef void put_split_value(ColumnSink* s, int column, int64_t i, int32_t number, const unsigned char* text, int64_t room,
                          int32_t buffer, int64_t pos) noexcept nogil:
    # The value of that piece in row i, a null where there is no such piece.
    cdef unsigned char* to = s.main[column] + VIEW_SIZE * i
    cdef int64_t start
    if number >= 0:
        start = s.spans[number].split + 1
        put_view(to, text + start, s.spans[number].end - start, room - start, buffer, pos + start)
    else:
        memset(to, 0, VIEW_SIZE)
    mark_valid(s, column, i, number >= 0)


cdef int64_t put_split_texts(ColumnSink* s, int64_t mask, int64_t i, int64_t key_num, int64_t property_num,
                             const unsigned char* text, int64_t room, int32_t buffer,
                             const unsigned char* origin) noexcept nogil:
    # The columns of the properties of row i, which `split_usual` took apart; how many keys there are then.
    cdef PropertySpan* span
    cdef int64_t start, end, k, pos = text - origin
    if mask & 1 << COL_PROPERTIES:
        for k in range(s.split_num):
            span = s.spans + k
            put_view(<unsigned char*>s.child[COL_PROPERTIES] + VIEW_SIZE * (property_num + k), text + span.start,
                     span.split - span.start, room - span.start, buffer, pos + span.start)
            start = span.split + 1
            put_view(<unsigned char*>s.child[COL_VALUES] + VIEW_SIZE * (property_num + k), text + start,
                     span.end - start, room - start, buffer, pos + start)
    if mask & 1 << COL_KEYS and s.split_known.keys >= 0:
        span = s.spans + s.split_known.keys
        start = span.split + 1
        while start < span.end:
            end = start + before(text + start, 32, span.end - start, room - start)
            if end > start:
                put_view(<unsigned char*>s.child[COL_KEYS] + VIEW_SIZE * key_num, text + start, end - start,
                         room - start, buffer, pos + start)
                key_num += 1
            start = end + 1
    if mask & 1 << COL_TAGS:
        put_split_value(s, COL_TAGS, i, s.split_known.tags, text, room, buffer, pos)
    if mask & 1 << COL_UNIQUE_KEY:
        put_split_value(s, COL_UNIQUE_KEY, i, s.split_known.unique_key, text, room, buffer, pos)
    return key_num


cdef bint know_host(ColumnSink* s, int column, const unsigned char* host) noexcept nogil:
    # Makes this IPv4 host the one of the row before; False where its text finds no room.
    cdef int which = 0 if column == COL_BORN_HOST else 1
    if s.mask & 1 << column:
        if lacks_room(s, column, TEXT_SLACK):
            return False
        view_host(s, column, s.host_view[which], host, 8)
    if which:
        put_hex_8(s.store_digits, host)
    memcpy(&s.host[which], host, 8)
    s.host_known[which] = True
    return True


cdef inline bint is_known_host(ColumnSink* s, int column, const unsigned char* host) noexcept nogil:
    cdef int which = 0 if column == COL_BORN_HOST else 1
    cdef uint64_t here
    memcpy(&here, host, 8)
    return (s.host_known[which] and here == s.host[which]) or know_host(s, column, host)


cdef inline void put_numbers(ColumnSink* s, Asked asked, int64_t i, const unsigned char* p,
                             RecordView* r) noexcept nogil:
    # The columns of numbers of row i, most of them out of the record itself.  Those that few ask for are asked for
    # together, as each question takes its time.
    cdef int64_t mask = mask_of(s, asked)
    cdef const unsigned char* consumed = p + r.store_host_pos + r.store_host_len
    if mask & 1 << COL_QUEUE_ID:
        (<int32_t*>s.main[COL_QUEUE_ID])[i] = get_i32(p + RECORD_QUEUE_ID)
    if mask & 1 << COL_QUEUE_OFFSET:
        (<int64_t*>s.main[COL_QUEUE_OFFSET])[i] = get_i64(p + RECORD_QUEUE_OFFSET)
    if mask & 1 << COL_STORE_TIMESTAMP:
        (<int64_t*>s.main[COL_STORE_TIMESTAMP])[i] = get_i64(p + r.store_host_pos - 8)
    if mask & (1 << COL_PHY_OFFSET | 1 << COL_SIZE):
        if mask & 1 << COL_PHY_OFFSET:
            (<int64_t*>s.main[COL_PHY_OFFSET])[i] = r.phy_offset
        if mask & 1 << COL_SIZE:
            (<int32_t*>s.main[COL_SIZE])[i] = r.total_size
    if mask & (1 << COL_BORN_TIMESTAMP | 1 << COL_FLAG | 1 << COL_SYS_FLAG | 1 << COL_RECONSUME_TIMES
               | 1 << COL_PREPARED_TRANSACTION_OFFSET):
        if mask & 1 << COL_BORN_TIMESTAMP:
            (<int64_t*>s.main[COL_BORN_TIMESTAMP])[i] = get_i64(p + RECORD_BORN_TIMESTAMP)
        if mask & 1 << COL_FLAG:
            (<int32_t*>s.main[COL_FLAG])[i] = get_i32(p + RECORD_FLAG)
        if mask & 1 << COL_SYS_FLAG:
            (<int32_t*>s.main[COL_SYS_FLAG])[i] = r.sys_flag
        if mask & 1 << COL_RECONSUME_TIMES:
            (<int32_t*>s.main[COL_RECONSUME_TIMES])[i] = get_i32(consumed)
        if mask & 1 << COL_PREPARED_TRANSACTION_OFFSET:
            (<int64_t*>s.main[COL_PREPARED_TRANSACTION_OFFSET])[i] = get_i64(consumed + 4)


cdef inline void put_id_view(ColumnSink* s, ViewRun* run, const unsigned char* p) noexcept nogil:
    # As `put_message_id`, with the digits of the store host that are known; they are in the column's own data.
    cdef unsigned char* text = s.data[COL_MSG_ID] + run.id_used
    memcpy(text, s.store_digits, VIEW_SIZE)
    put_hex_8(text + VIEW_SIZE, p + RECORD_PHY_OFFSET)
    put_view(s.main[COL_MSG_ID] + VIEW_SIZE * run.count, s.store_digits, ID_SIZE, ID_SIZE, 0, run.id_used)
    run.id_used += ID_SIZE


cdef inline void put_known_view(unsigned char* to, ViewRun* run, const PropertyLayout* layout, int32_t k,
                                const unsigned char* text, const unsigned char* values) noexcept nogil:
    # The view of the value of piece k, which is among `values` where these are written already.
    if values != NULL:
        memcpy(to, values + VIEW_SIZE * k, VIEW_SIZE)
    else:
        put_value_view(to, layout, k, text, run.buffer, text - run.origin)


cdef inline void put_key_views(ColumnSink* s, ViewRun* run, const PropertyLayout* layout, const unsigned char* text,
                               int64_t room, const unsigned char* values) noexcept nogil:
    # As `view_keys` for one row.  Most messages have one key, which is the whole value.
    cdef unsigned char* to = <unsigned char*>s.child[COL_KEYS]
    cdef const PropertySpan* span = layout.spans + layout.known.keys
    cdef int64_t start = span.split + 1, end, stop = span.end
    if layout.known.keys < 0:
        return
    end = start + before(text + start, 32, stop - start, room - start)
    if end == stop:
        put_known_view(to + VIEW_SIZE * run.key_num, run, layout, layout.known.keys, text, values)
        run.key_num += 1
        return
    while start < stop:
        if end > start:
            put_view(to + VIEW_SIZE * run.key_num, text + start, end - start, room - start, run.buffer,
                     text - run.origin + start)
            run.key_num += 1
        start = end + 1
        if start < stop:
            end = start + before(text + start, 32, stop - start, room - start)


cdef inline void put_nullable_view(ColumnSink* s, ViewRun* run, int column, const PropertyLayout* layout, int32_t k,
                                   const unsigned char* text, const unsigned char* values) noexcept nogil:
    # The value of piece k, a null where there is no such piece.
    cdef unsigned char* to = s.main[column] + VIEW_SIZE * run.count
    if k >= 0:
        put_known_view(to, run, layout, k, text, values)
    else:
        memset(to, 0, VIEW_SIZE)
    mark_valid(s, column, run.count, k >= 0)


cdef inline void put_texts(ColumnSink* s, Asked asked, ViewRun* run, const PropertyLayout* layout,
                           const unsigned char* p, int64_t room, RecordView* r) noexcept nogil:
    # The columns of texts and bytes of a row whose topic and hosts are known; without a layout `split_usual` has
    # taken its properties apart, if they are asked for.
    cdef const unsigned char* text = p + r.properties_pos
    cdef const unsigned char* body = p + r.body_pos
    cdef const unsigned char* values = NULL
    cdef int64_t mask = mask_of(s, asked), i = run.count
    if mask & IN_BODY:
        if mask & 1 << COL_BODY:
            put_view(s.main[COL_BODY] + VIEW_SIZE * i, body, r.body_len, room - r.body_pos, run.buffer,
                     body - run.origin)
            mark_valid(s, COL_BODY, i, True)
        if mask & 1 << COL_BODY_STORED:
            put_view(s.main[COL_BODY_STORED] + VIEW_SIZE * i, body, r.body_len, room - r.body_pos, run.buffer,
                     body - run.origin)
    if mask & IN_HEAD:
        if mask & 1 << COL_TOPIC:
            memcpy(s.main[COL_TOPIC] + VIEW_SIZE * i, s.topic_view, VIEW_SIZE)
        if mask & 1 << COL_MSG_ID:
            put_id_view(s, run, p)
        if mask & 1 << COL_BORN_HOST:
            memcpy(s.main[COL_BORN_HOST] + VIEW_SIZE * i, s.host_view[0], VIEW_SIZE)
        if mask & 1 << COL_STORE_HOST:
            memcpy(s.main[COL_STORE_HOST] + VIEW_SIZE * i, s.host_view[1], VIEW_SIZE)
    if mask & NEEDS_PROPERTIES and layout == NULL:
        run.key_num = put_split_texts(s, mask, i, run.key_num, run.property_num, text, room - r.properties_pos,
                                      run.buffer, run.origin)
        if mask & 1 << COL_KEYS:
            (<int32_t*>s.main[COL_KEYS])[i + 1] = <int32_t>run.key_num
        if mask & 1 << COL_PROPERTIES:
            run.property_num += s.split_num
            (<int32_t*>s.main[COL_PROPERTIES])[i + 1] = <int32_t>run.property_num
    elif mask & NEEDS_PROPERTIES:
        if mask & 1 << COL_PROPERTIES:
            # What other columns hold of it is a copy of these.
            values = <unsigned char*>s.child[COL_VALUES] + VIEW_SIZE * run.property_num
            run.property_num = put_property_views(s, run.property_num, layout, text, run.buffer, text - run.origin)
            (<int32_t*>s.main[COL_PROPERTIES])[i + 1] = <int32_t>run.property_num
        if mask & 1 << COL_KEYS:
            put_key_views(s, run, layout, text, room - r.properties_pos, values)
            (<int32_t*>s.main[COL_KEYS])[i + 1] = <int32_t>run.key_num
        if mask & 1 << COL_TAGS:
            put_nullable_view(s, run, COL_TAGS, layout, layout.known.tags, text, values)
        if mask & 1 << COL_UNIQUE_KEY:
            put_nullable_view(s, run, COL_UNIQUE_KEY, layout, layout.known.unique_key, text, values)


cdef inline bint has_room_for(int64_t mask, ViewRun* run, int32_t span_num, int32_t properties_len) noexcept nogil:
    # Whether the properties of the next row surely fit; each key takes a byte of them.
    return not ((mask & 1 << COL_KEYS and run.key_num + properties_len > run.key_room)
                or (mask & 1 << COL_PROPERTIES and run.property_num + span_num > run.property_room))


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


@cython.final
@cython.no_gc
cdef class RoomPool:
    # Memory of columns that nobody holds on to any more, for the next batch: asking the system for it again would
    # take longer than filling it.  It ends with the `ArrowColumns` that it is for, and keeps little.
    cdef int64_t busy, num, bytes
    cdef bint closed
    cdef unsigned char* rooms[POOL_ROOMS]
    cdef int64_t[POOL_ROOMS] sizes

    cdef unsigned char* take(self, int64_t* size) noexcept:
        # The smallest room of at least `size` bytes that is not much larger, of which `size` becomes the size; NULL
        # for none.
        cdef int64_t i, best = -1
        cdef unsigned char* p = NULL
        # Whoever finds it busy, where there is no GIL, does without it.
        if atomic_or(&self.busy, 1):
            return NULL
        for i in range(self.num):
            if size[0] <= self.sizes[i] <= 2 * size[0] and (best < 0 or self.sizes[i] < self.sizes[best]):
                best = i
        if best >= 0:
            p, size[0] = self.rooms[best], self.sizes[best]
            self.bytes -= size[0]
            self.num -= 1
            self.rooms[best], self.sizes[best] = self.rooms[self.num], self.sizes[self.num]
        self.busy = 0
        return p

    cdef void give_back(self, unsigned char* p, int64_t size) noexcept:
        if not atomic_or(&self.busy, 1):
            if not self.closed and self.num < POOL_ROOMS and SMALL_ROOM <= size <= POOL_BYTES - self.bytes:
                self.rooms[self.num], self.sizes[self.num] = p, size
                self.num += 1
                self.bytes += size
                p = NULL
            self.busy = 0
        PyMem_RawFree(p)

    cdef void close(self) noexcept:
        cdef int64_t i
        if not atomic_or(&self.busy, 1):
            self.closed = True
            for i in range(self.num):
                PyMem_RawFree(self.rooms[i])
            self.num = self.bytes = 0
            self.busy = 0

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self.num):
            PyMem_RawFree(self.rooms[i])


@cython.final
@cython.no_gc
cdef class Room:
    # Memory of one column of a batch, which goes back to the pool with the last one who holds on to it.
    cdef unsigned char* p
    cdef int64_t size
    cdef RoomPool pool

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.p, self.size, False, flags)

    def __dealloc__(self):
        if self.p != NULL:
            self.pool.give_back(self.p, self.size)


cdef Room room_of(RoomPool pool, int64_t size):
    # At least `size` bytes with anything in them.
    cdef Room room = Room.__new__(Room)
    cdef int64_t step = 64
    cdef unsigned char* p
    # An eighth more at most, so that rooms of about the same size fit each other.
    while size >= 16 * step:
        step *= 2
    room.pool, room.size = pool, max((size + step - 1) // step * step, 64)
    p = pool.take(&room.size)
    if p == NULL:
        p = <unsigned char*>PyMem_RawMalloc(room.size)
        if p == NULL:
            raise MemoryError
    room.p = p
    return room


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
    views : bool
        Texts and bytes are not copied: each value is a view (`rmq_put_view`), into the segment itself where the segment
        holds it as it is, else into data of the batch.

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
    # Of each column `Room`s, but for `valid` and for bits, which are arrays; None where there is none.
    cdef list main, valid, data, child
    cdef RoomPool pool
    cdef object hosts, spans, layouts, chosen, name_ends, name_slots
    cdef readonly bint views
    # The stretches of segments that the views of this batch lead into, as phy positions; the end counts from the begin on,
    # and is 0 where no view leads into it yet.
    cdef list lent
    cdef int64_t[MAX_REGIONS] lent_begins
    cdef int64_t[MAX_REGIONS] lent_ends
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
                  host_text=None, bint views=False):
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
        self.decompress, self.host_text, self.views = decompress, host_text, views
        self.pool = RoomPool()
        self.hosts = np.zeros(4 * HOST_SLOTS * HOST_ROOM, np.uint8)
        self.spans = np.empty(SPAN_ROOM * 3, np.int32)
        # With room to begin at a multiple of 64.
        self.layouts = np.zeros(LAYOUTS * sizeof(PropertyLayout) + 64, np.uint8)
        self.chosen = np.empty(MAX_SPANS, np.int32)
        self.name_ends = np.empty(MAX_SPANS + 1, np.int32)
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

    def __dealloc__(self):
        # There is none where the arguments were wrong.
        if self.pool is not None:
            self.pool.close()

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
        self.count, self.bytes, self.ready, self.lent = 0, 0, True, []
        self.main, self.valid = [None] * BUFFER_NUM, [None] * BUFFER_NUM
        self.data, self.child = [None] * BUFFER_NUM, [None] * BUFFER_NUM
        for i in range(BUFFER_NUM):
            self.data_used[i] = self.child_used[i] = self.null_num[i] = 0
            if not self.mask >> i & 1:
                continue
            if i == COL_CORRUPT:
                self.main[i] = np.zeros((rows + 7) // 8, np.uint8)
            elif i < COL_NUM:
                if self.views and HAS_VIEWS >> i & 1:
                    self.main[i] = room_of(self.pool, rows * VIEW_SIZE)
                elif HAS_OFFSETS >> i & 1:
                    self.main[i] = self.new_offsets(rows + 1)
                else:
                    self.main[i] = room_of(self.pool, rows * (8 if IS_INT64 >> i & 1 else 4))
            if HAS_NULLS >> i & 1:
                self.valid[i] = np.zeros((rows + 7) // 8, np.uint8)
            if HAS_OFFSETS >> i & 1 or i == COL_VALUES:
                self.data[i] = room_of(self.pool, self.data_size[i] + TEXT_SLACK)
            if HAS_CHILD >> i & 1:
                self.child[i] = (room_of(self.pool, self.child_size[i] * VIEW_SIZE) if self.views
                                 else self.new_offsets(self.child_size[i] + 1))

    cdef Room new_offsets(self, int64_t n):
        cdef Room room = room_of(self.pool, n * sizeof(int32_t))
        (<int32_t*>room.p)[0] = 0
        return room

    cdef Room grown(self, Room room, int64_t used, int64_t size):
        # Room for `size` bytes with what is used.
        cdef Room fresh = room_of(self.pool, size)
        memcpy(fresh.p, room.p, used)
        return fresh

    cdef void grow(self, ColumnSink* s):
        # Room for what the staged rows want, and as much more as a whole batch takes if its rows are like those before, or a
        # little more than that, as every growth copies.
        cdef int column = s.wanting, unit
        cdef int64_t used = self.data_used[column], size = used + s.wanted, whole = 0
        if size > (<Room>self.data[column]).size:
            if s.count >= STAGED_ROWS:
                whole = used * self.capacity // s.count
                whole = min(whole + whole // 16, self.byte_limit) + s.wanted
            self.data[column] = self.grown(self.data[column], used, min(max(2 * size, whole, 4096), INT32_MAX))
        if HAS_CHILD >> column & 1:
            used = self.child_used[column] + 1
            size, unit = used + s.wanted, VIEW_SIZE if self.views else sizeof(int32_t)
            if size * unit > (<Room>self.child[column]).size:
                if s.count >= STAGED_ROWS:
                    whole = used * self.capacity // s.count
                    whole = min(whole + whole // 16, self.byte_limit) + s.wanted
                self.child[column] = self.grown(self.child[column], (used - self.views) * unit,
                                                max(2 * size, whole) * unit)
        self.aim_column(s, column)

    cdef int aim_column(self, ColumnSink* s, int i) except -1:
        # Where the text of a column goes, and how much of it.
        s.data[i] = address_of(self.data[i])
        s.child[i] = <int32_t*>address_of(self.child[i])
        # Where a position in the data has 32 bits, more of it is of no use.
        s.data_room[i] = 0 if self.data[i] is None else min((<Room>self.data[i]).size, INT32_MAX)
        s.child_room[i] = 0 if self.child[i] is None else (<Room>self.child[i]).size // (
            VIEW_SIZE if self.views else sizeof(int32_t))
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
        s.layouts = <PropertyLayout*>(<uintptr_t>(address_of(self.layouts) + 63) & ~<uintptr_t>63)
        s.chosen = <int32_t*>address_of(self.chosen)
        s.name_ends = <int32_t*>address_of(self.name_ends)
        s.views, s.lent_ends = self.views, self.lent_ends
        s.name_slots = <int32_t*>address_of(self.name_slots)
        s.topic = NULL
        s.host_known[0] = s.host_known[1] = False
        if s.row_num == 0:
            s.span_used = s.topic_need = s.properties_need = s.body_need = s.body_stored_need = 0
        return 0

    cdef void keep(self, ColumnSink* s) noexcept:
        cdef int i
        self.count, self.bytes = s.count, s.bytes
        for i in range(BUFFER_NUM):
            self.data_used[i], self.child_used[i] = s.data_used[i], s.child_used[i]
            self.null_num[i] = s.null_num[i]

    cdef int lend_region(self, Region region, int64_t begin, uint64_t taken) except -1:
        # The number of the buffer that holds `region` from `begin` on, or an earlier place; 0 where a batch can lead into no
        # more.  `taken` are the bits of those that the caller has asked for already.
        cdef int i, num = len(self.lent), unused = -1
        for i in range(num):
            if self.lent[i] is region and self.lent_begins[i] <= begin:
                return i + 1
            if self.lent_ends[i] == 0 and not taken >> i & 1:
                unused = i
        if region.size - begin > INT32_MAX:
            raise ValueError(f"views reach 2 GiB far, and the segment has {region.size} bytes")
        if unused < 0:
            if num == MAX_REGIONS:
                return 0
            self.lent.append(None)
            unused = num
        self.lent[unused] = region
        self.lent_begins[unused], self.lent_ends[unused] = begin, 0
        return unused + 1

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

    cdef void know_topic(self, ColumnSink* s, const unsigned char* topic, int32_t n, int64_t room, int32_t buffer,
                         const unsigned char* origin) noexcept nogil:
        # Makes this topic that of the record before.
        s.topic, s.topic_len = topic, n
        s.topic_wanted = self.topics is None or has_text(s, self.topics, topic, n)
        s.topic_ascii = is_ascii(topic, n)
        put_view(s.topic_view, topic, n, room, buffer, topic - origin if s.views else 0)

    cdef int64_t view_rows(self, ColumnSink* s, const unsigned char* base, int64_t at, int64_t size, int64_t limit,
                           int64_t base_offset, const int32_t* ids, int64_t id_num, int32_t buffer,
                           const unsigned char* origin) noexcept nogil:
        # Writes rows as views in one pass, where no row is staged: from record to record for as long as these are of
        # the usual kind, with hosts of IPv4, ASCII texts and no body to be decompressed.  Where the first other one
        # begins is the answer.
        cdef ViewRun run
        run.count, run.id_used = s.count, s.data_used[COL_MSG_ID]
        run.key_num, run.property_num = s.child_used[COL_KEYS], s.child_used[COL_PROPERTIES]
        run.row_room = s.capacity
        if s.mask & 1 << COL_MSG_ID:
            run.row_room = min(run.row_room, s.count + (s.data_room[COL_MSG_ID] - run.id_used) // ID_SIZE)
        run.key_room = s.child_room[COL_KEYS] - 1
        run.property_room = min(s.child_room[COL_PROPERTIES], s.child_room[COL_VALUES]) - 1
        run.buffer, run.origin, run.end = buffer, origin, NULL
        if s.mask == USUAL_COLUMNS:
            at = view_rows_of(self, s, <uint8_t>0, &run, base, at, size, limit, base_offset, ids, id_num)
        else:
            at = view_rows_of(self, s, <uint64_t>0, &run, base, at, size, limit, base_offset, ids, id_num)
        if run.end != NULL and run.end - origin > s.lent_ends[buffer - 1]:
            s.lent_ends[buffer - 1] = run.end - origin
        s.count, s.data_used[COL_MSG_ID] = run.count, run.id_used
        s.child_used[COL_KEYS], s.child_used[COL_PROPERTIES] = run.key_num, run.property_num
        s.child_used[COL_VALUES] = run.property_num
        return at

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
            if not is_known_topic(s, p, r):
                self.know_topic(s, p + r.topic_pos, r.topic_len, row.room - r.topic_pos, row.buffer, row.origin)
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
                       int64_t base_offset, const int32_t* ids, int64_t id_num, int32_t buffer,
                       const unsigned char* origin) noexcept nogil:
        cdef StagedRow* row
        cdef int verdict
        cdef int64_t at, before_run, most = 1
        cdef bint in_one_pass = s.views and self.tags is None
        # What found no room last time.
        if write_rows(s) != RECORD:
            return NEED_ROOM
        while True:
            if in_one_pass and s.row_num == 0:
                before_run = s.count
                pos[0] = self.view_rows(s, base, pos[0], size, limit, base_offset, ids, id_num, buffer, origin)
                # A record of another kind is on its own after many of the usual one, and one of many after others.
                most = 1 if s.count - before_run >= STAGED_ROWS else min(2 * most, STAGED_ROWS)
            at = pos[0]
            row = s.rows + s.row_num
            if s.count + s.row_num >= s.capacity:
                verdict = COLUMNS_FULL
            elif at >= limit:
                verdict = LIMIT
            elif s.row_num == (most if in_one_pass else STAGED_ROWS) or s.span_used > SPAN_ROOM - MAX_SPANS:
                verdict = WRITE_FIRST
            else:
                row.p, row.room = base + at, size - at
                verdict = parse_record(row.p, row.room, &row.r)
                if verdict == RECORD and row.r.phy_offset != base_offset + at:
                    verdict = BAD_PHY_OFFSET
                if verdict == RECORD:
                    prefetch_stream(row.p, row.r.total_size, row.room)
                    row.ok, row.buffer, row.origin = True, buffer, origin
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
        cdef unsigned char* origin = NULL
        cdef int32_t buffer = 0
        self.enter()
        try:
            base = region.pin(0, region.size)
            try:
                if pos < 0 or pos > region.size:
                    raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
                s.body_ready, s.row_num, s.block_num = False, 0, 1
                self.aim(&s)
                if self.views:
                    buffer = self.lend_region(region, pos, 0)
                    if not buffer:
                        return at, Verdict(COLUMNS_FULL)
                    origin = base + self.lent_begins[buffer - 1]
                while True:
                    with nogil:
                        verdict = self.fill_rows(&s, base, &at, region.size, limit, base_offset, ids, id_num, buffer, origin)
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
                         WantedKey* wanted, const int32_t* key_numbers, KeyTexts texts, PlacesQueue* queue,
                         const int32_t* buffers, unsigned char** origins) noexcept nogil:
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
                            row.ok, row.buffer, row.origin = True, buffers[number], origins[number]
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

    cdef bint lend_places(self, list regions, const int64_t[::1] base_offsets, const int32_t[::1] numbers,
                          const int64_t[::1] phy_offsets, int64_t first, unsigned char** bases, int32_t* buffers,
                          unsigned char** origins) except -1:
        # For each region the number of its buffer, and the buffer's address; False where this batch can lead into no more.
        cdef int64_t[MAX_REGIONS] begins
        cdef int64_t i, pos, num = len(regions)
        cdef uint64_t taken = 0
        for i in range(num):
            buffers[i], origins[i], begins[i] = 0, NULL, -1
        if not self.views:
            return True
        for i in range(first, phy_offsets.shape[0]):
            if 0 <= numbers[i] < num:
                pos = phy_offsets[i] - base_offsets[numbers[i]]
                if pos >= 0 and (begins[numbers[i]] < 0 or pos < begins[numbers[i]]):
                    begins[numbers[i]] = pos
        for i in range(num):
            if 0 <= begins[i] < (<Region>regions[i]).size:
                buffers[i] = self.lend_region(<Region>regions[i], begins[i], taken)
                if not buffers[i]:
                    return False
                taken |= <uint64_t>1 << (buffers[i] - 1)
                origins[i] = bases[i] + self.lent_begins[buffers[i] - 1]
        return True

    cdef int64_t fill_from(self, list regions, const int64_t[::1] base_offsets, const int32_t[::1] numbers,
                           const int64_t[::1] phy_offsets, const int32_t* sizes, uint8_t[::1] taken, int64_t first,
                           WantedKey* wanted, const int32_t* key_numbers, KeyTexts texts, PlacesQueue* queue) except -1:
        cdef unsigned char* bases[MAX_REGIONS]
        cdef int64_t[MAX_REGIONS] room
        cdef int32_t[MAX_REGIONS] buffers
        cdef unsigned char* origins[MAX_REGIONS]
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
            if not self.lend_places(regions, base_offsets, numbers, phy_offsets, first, bases, buffers, origins):
                return at
            while True:
                with nogil:
                    verdict = self.fill_places(&s, bases, room, region_num, base_offsets, numbers, phy_offsets, sizes, taken,
                                               &at, ids, id_num, wanted, key_numbers, texts, queue, buffers, origins)
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
        """Hand over the rows and begin again.

        Returns
        -------
        (int, dict, list)
            How many rows, and for each column (values, valid, null_num, data, child, data 2, child 2): NumPy arrays in the
            layout of Arrow's buffers.  `values` are the numbers (``corrupt``: bits), or for text, lists and maps the
            offsets; `valid` bits are None where nothing is null; `data` are the bytes of the text; `child` are the offsets
            of the texts in a list, or of a map's names, and the last two those of its values.  With `views`, what were
            offsets of text are views, their buffer 0 is the column's data, and the others are those of the list: read-only
            bytes of the segments, which stay mapped for as long as these live.

        Raises
        ------
        StoreClosedError
            With `views`: a segment was closed since its rows were filled in; they are gone.
        """
        cdef dict parts = {}
        cdef int i
        cdef int64_t n
        self.enter()
        try:
            if not self.ready:
                self.renew()
            n = self.count
            lent = self.lent_views()
            for name, i in zip(self.columns, self.numbers):
                parts[name] = (
                    self.main_array(i, n),
                    self.valid[i][:(n + 7) // 8] if self.null_num[i] else None,
                    self.null_num[i],
                    None if self.data[i] is None else self.data_array(i),
                    None if self.child[i] is None else self.child_array(i),
                    self.data_array(COL_VALUES) if i == COL_PROPERTIES else None,
                    self.child_array(COL_VALUES) if i == COL_PROPERTIES else None,
                )
            self.end_batch()
            return n, parts, lent
        finally:
            self.leave()

    cdef object main_array(self, int i, int64_t n):
        cdef object main = self.main[i]
        if i == COL_CORRUPT:
            return main[:(n + 7) // 8]
        if self.views and HAS_VIEWS >> i & 1:
            return np.frombuffer(main, np.uint8)[:n * VIEW_SIZE].reshape(n, VIEW_SIZE)
        if HAS_OFFSETS >> i & 1:
            return np.frombuffer(main, np.int32)[:n + 1]
        return np.frombuffer(main, np.int64 if IS_INT64 >> i & 1 else np.int32)[:n]

    cdef object data_array(self, int i):
        return np.frombuffer(self.data[i], np.uint8)[:self.data_used[i]]

    cdef object child_array(self, int i):
        cdef int64_t n = self.child_used[i]
        if self.views:
            return np.frombuffer(self.child[i], np.uint8)[:n * VIEW_SIZE].reshape(n, VIEW_SIZE)
        return np.frombuffer(self.child[i], np.int32)[:n + 1]

    def take_arrays(self, import_array not None, types not None):
        """Hand over the rows as `take` does, as arrays of an Arrow library, by Arrow's C data interface.

        Each array has memory of its own, and holds on to that and, where it has views, to the segments.

        Parameters
        ----------
        import_array : callable
            Takes the address of an ``ArrowArray``, which it moves from, and a type (`pyarrow.Array._import_from_c`).
        types : sequence
            The type of each column.

        Returns
        -------
        list
            What `import_array` gave for each column.

        Raises
        ------
        StoreClosedError
            As of `take`.
        """
        cdef ArrowArray array
        cdef int i
        cdef list made = []
        self.enter()
        try:
            if not self.ready:
                self.renew()
            lent = self.lent_views()
            try:
                for i, kind in zip(self.numbers, types):
                    self.lend_column(&array, i, lent)
                    try:
                        made.append(import_array(<uintptr_t>&array, kind))
                    finally:
                        drop_array(&array)
            finally:
                self.end_batch()
            return made
        finally:
            self.leave()

    cdef list lent_views(self):
        # The stretches of segments that the views of this batch lead into.
        cdef int i
        cdef int64_t size
        cdef list lent = []
        for i, region in enumerate(self.lent):
            size = self.lent_ends[i]
            try:
                lent.append((<Region>region).view(self.lent_begins[i], size) if size else b"")
            except StoreClosedError:
                self.count, self.ready = 0, False
                raise
        self.lent = []
        return lent

    cdef void end_batch(self):
        cdef int i
        for i in range(BUFFER_NUM):
            # An eighth more than this batch took, or much less room if that was a lot more.
            if self.data_used[i]:
                self.data_size[i] = self.data_used[i] + self.data_used[i] // 8 + 4096
            if self.child_used[i]:
                self.child_size[i] = self.child_used[i] + self.child_used[i] // 8 + 64
        # Nothing is held on to that was handed over; most columns are not filled again.
        self.main = self.valid = self.data = self.child = None
        self.count, self.ready = 0, False

    cdef int lend_texts(self, ArrowArray* array, int64_t n, int i, object places, list lent) except -1:
        # `n` texts of column i (or COL_VALUES): `places` are views, or offsets in the column's data.
        cdef object valid = self.valid[i] if self.null_num[i] else None
        cdef int64_t lent_num = len(lent), k
        cdef int64_t* sizes
        cdef tuple owner = (places, self.data[i], valid, lent if self.views else None)
        # No child has nulls.
        if make_array(array, owner, n, self.null_num[i], 4 + lent_num if self.views else 3,
                      1 + lent_num if self.views else 0, 0):
            raise MemoryError
        array.buffers[0], array.buffers[1] = address_of(valid), address_of(places)
        array.buffers[2] = address_of(self.data[i])
        if self.views:
            sizes = <int64_t*>array.buffers[3 + lent_num]
            sizes[0] = self.data_used[i]
            for k in range(lent_num):
                array.buffers[3 + k] = address_of(lent[k])
                sizes[1 + k] = len(lent[k])
        return 0

    cdef int lend_column(self, ArrowArray* array, int i, list lent) except -1:
        # Makes the array of a column; the types are those of `store.columns`.
        cdef object main = self.main[i]
        cdef ArrowArray* entries
        cdef int64_t num
        if HAS_OFFSETS >> i & 1 and not HAS_CHILD >> i & 1:
            return self.lend_texts(array, self.count, i, main, lent)
        if make_array(array, main, self.count, 0, 2, 0, 1 if HAS_CHILD >> i & 1 else 0):
            raise MemoryError
        array.buffers[1] = address_of(main)
        try:
            if i == COL_KEYS:
                self.lend_texts(array.children[0], self.child_used[i], i, self.child[i], lent)
            elif i == COL_PROPERTIES:
                entries, num = array.children[0], self.child_used[i]
                if make_array(entries, main, num, 0, 1, 0, 2):
                    raise MemoryError
                self.lend_texts(entries.children[0], num, i, self.child[i], lent)
                self.lend_texts(entries.children[1], num, COL_VALUES, self.child[COL_VALUES], lent)
        except:
            drop_array(array)
            raise
        return 0


cdef int64_t view_rows_of(ArrowColumns self, ColumnSink* s, Asked asked, ViewRun* to, const unsigned char* base,
                          int64_t at, int64_t size, int64_t limit, int64_t base_offset, const int32_t* ids,
                          int64_t id_num) noexcept nogil:
    # As `ArrowColumns.view_rows`, of the columns that are asked for.
    cdef RecordView r
    cdef ViewRun run = to[0]
    cdef PropertyLayout* layout = NULL
    cdef const unsigned char* p
    cdef int64_t mask = mask_of(s, asked), room, weight, bytes = s.bytes
    cdef int32_t span_num = 0, unusual = SYS_BORN_V6 | SYS_STORE_V6 | (SYS_COMPRESSED if mask & 1 << COL_BODY else 0)
    cdef bint chooses = (self.topics is not None or not self.any_queue or self.begin_timestamp != -INT64_MAX - 1
                         or self.end_timestamp != INT64_MAX)
    while run.count < run.row_room and at < limit:
        p, room = base + at, size - at
        if (parse_head(p, room, &r) != RECORD or r.phy_offset != base_offset + at or r.sys_flag & unusual
                or parse_rest(p, &r, 8, 8) != RECORD):
            break
        prefetch_stream(p, r.total_size, room)
        if (chooses or mask & 1 << COL_TOPIC) and not is_known_topic(s, p, &r):
            # No function that is not inlined is given the parsed record, which would have to stand in memory for it.
            self.know_topic(s, p + r.topic_pos, r.topic_len, room - r.topic_pos, run.buffer, run.origin)
        if chooses and (not s.topic_wanted or not self.begin_timestamp <= r.store_timestamp <= self.end_timestamp
                        or not (self.any_queue or self.wants_queue(ids, id_num, r.queue_id))):
            at += r.total_size
            continue
        weight = 0
        if mask & HAS_TEXT:
            weight = TEXT_SLACK + r.topic_len
        if mask & NEEDS_PROPERTIES:
            weight += r.properties_len
            layout = layout_of(s, r.topic_len, r.properties_len)
            if (r.properties_pos + r.properties_len + VIEW_SIZE <= room
                    and fits(layout, p + r.properties_pos, r.properties_len, room - r.properties_pos)):
                layout.misses, span_num = 0, layout.span_num
            elif split_usual(s, layout, p + r.properties_pos, r.properties_len, room - r.properties_pos):
                layout, span_num = NULL, s.split_num
            else:
                break
        if ((bytes + weight > s.byte_limit and run.count > 0)
                or not has_room_for(mask, &run, span_num, r.properties_len)
                or (mask & IN_HEAD and (
                    (mask & 1 << COL_TOPIC and not s.topic_ascii)
                    or (mask & 1 << COL_BORN_HOST and not is_known_host(s, COL_BORN_HOST, p + RECORD_BORN_HOST))
                    or (mask & (1 << COL_STORE_HOST | 1 << COL_MSG_ID)
                        and not is_known_host(s, COL_STORE_HOST, p + r.store_host_pos))))):
            break
        if mask & 1 << COL_CORRUPT and not (body_crc_ok(p, &r) and prop_crc_ok(p, &r)
                                            and (s.check_crc < 2 or has_prop_crc(p, &r))):
            set_bit(s.main[COL_CORRUPT], run.count)
        put_numbers(s, asked, run.count, p, &r)
        put_texts(s, asked, &run, layout, p, room, &r)
        run.count += 1
        bytes += weight
        at += r.total_size
        run.end = base + at
    s.bytes, to[0] = bytes, run
    return at


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
    if type(array) is Room:
        return (<Room>array).p
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    p = <unsigned char*>view.buf
    PyBuffer_Release(&view)
    return p


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
    """Lay texts out as a text column: the offsets, and the bytes one after the other.

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
