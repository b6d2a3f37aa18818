"""Records as columns of numbers, for dispatch, recovery and rebuild.

`RecordColumns` with its topics is filled by a scan or a put; queues and index files are compared with it.  The module
knows no file and has no policy: a verdict ends a scan.  Invariants are those of `_core`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcmp, memcpy

from rmqstore._bytes cimport difference_of, get_i16, get_i32, get_i64, load_i64
from rmqstore._core cimport (
    COLUMNS_FULL, ENTRY_PHY_OFFSET, ENTRY_SIZE, ENTRY_TIME_DIFF, EXT_BASE, EXT_UNIT_BITMAP_LENGTH, EXT_UNIT_MIN_SIZE,
    EXT_UNIT_STORE_TIMESTAMP, EXT_UNIT_TAGS_CODE, INDEX_BEGIN_TIMESTAMP, index_count_of, INDEX_HEADER_SIZE, IndexRegion,
    LIMIT, RECORD, Region, SLOT_SIZE, SYS_INNER_BATCH, SYS_PREPARED, SYS_ROLLBACK, SYS_TRANSACTION_MASK,
    UNIT_SIZE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._java_text cimport hash_utf8
from rmqstore._properties cimport find_properties, KnownProperties, parse_decimal, put_key_hashes, tags_code_in
from rmqstore._python cimport COPIED_BYTES, go_on, let_others_run, PyThreadState
from rmqstore._record cimport has_prop_crc, judge_record, prefetch_stream, RecordView, unit_code_of

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.errors import OffsetOutOfRangeError

crc32_start()


@cython.final
@cython.no_gc_clear
cdef class TopicTable:
    """Topics (`topics`, UTF-8) and queues (`queues`, topic number and queue id) of a scan, in order of appearance.

    `ends` has for each queue a `_rows.FileEnd`, where its reader or writer set one, else None.
    """

    def __cinit__(self):
        self.topics, self.queues, self.ends = [], [], []
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
        """Return the number of `topic`, which is added if new."""
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
        """Return the number of queue `queue_id` of topic number `topic`, which is added if new."""
        if not 0 <= topic < self.num:
            raise ValueError(f"topic {topic} of {self.num}")
        cdef int32_t number = self.look_up_queue(topic, queue_id)
        if number >= 0:
            return number
        if self.queue_num >= self.queue_codes.shape[0]:
            self.queue_codes = np.concatenate([self.queue_codes, np.zeros(self.queue_codes.shape[0], np.int64)])
        self.queue_codes[self.queue_num] = queue_code(topic, queue_id)
        self.queues.append((topic, queue_id))
        self.ends.append(None)
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
    """The fields of a run of records that dispatching needs, as reusable NumPy columns.

    Attributes
    ----------
    phy_offset, queue_offset, store_timestamp, tags_code, inner_base : numpy.ndarray of int64, shape (capacity,)
    size, queue_id, sys_flag, topic, queue, inner_num : numpy.ndarray of int32, shape (capacity,)
        `topic` numbers `topics.topics`, `queue` numbers `topics.queues`; `inner_num` is the number of messages of an inner
        batch, 0 where that is not within 1 to 32767, what a unit has room for, and 1 for other records.
    multi_dispatch, prop_crc : numpy.ndarray of uint8, shape (capacity,)
        1 where the record has INNER_MULTI_DISPATCH; 1 where it ends with a property CRC.
    key_start : numpy.ndarray of int64, shape (capacity + 1,)
        The index hashes of record i are ``key_hash[key_start[i]:key_start[i + 1]]``, in the order of RocketMQ 5.5.0: unique
        key, pieces of KEYS, tag.
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
        """Put the rows of the same queue together.

        Parameters
        ----------
        chosen : array of uint8 or bool, shape (count,)
            Which rows take part.

        Returns
        -------
        (list of (int, int, int), numpy.ndarray of int64)
            For each queue its number in `topics.queues`, ascending, and where its rows begin and end in the second value: the
            numbers of the chosen rows, which keep their order within a queue.
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
        # A counting sort, which takes hardly any time; everybody can write to the column, so its numbers are checked.
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
        """(numpy.ndarray of uint8, bool): which records get a unit, shape (count,): not prepared or rolled back ones.

        The second says whether one of them may be an inner batch or name further queues.
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
        """Return phy_offset, size (int32), tags_code and store_timestamp (int64 otherwise) of each of these rows."""
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
        """Return phy_offset and store_timestamp (int64) of the records of key hashes `begin` to `end`."""
        cdef int64_t i, at
        if not 0 <= begin <= end <= self.key_hash.shape[0]:
            raise OffsetOutOfRangeError(f"key hashes {begin} to {end} of {self.key_hash.shape[0]}")
        # Not np.zeros, which releases the GIL.
        phy_array, time_array = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        cdef int64_t[::1] phy_offset = phy_array, store_timestamp = time_array
        for at in range(end - begin):
            phy_offset[at] = store_timestamp[at] = 0
        for i in range(self.count):
            for at in range(max(self.c_key_start[i], begin), min(self.c_key_start[i + 1], end)):
                phy_offset[at - begin], store_timestamp[at - begin] = self.c_phy_offset[i], self.c_store_timestamp[i]
        return phy_array, time_array

    def run_length(self, const int64_t[::1] rows not None):
        """Count the rows at the start of `rows` whose queue offsets are consecutive."""
        cdef int64_t n = rows.shape[0], i, first
        for i in range(n):
            if not 0 <= rows[i] < self.capacity:
                raise OffsetOutOfRangeError(f"row {rows[i]} of {self.capacity}")
        if n == 0:
            return 0
        first = self.c_queue_offset[rows[0]]
        i = 1
        while i < n and difference_of(self.c_queue_offset[rows[i]], i) == first:
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
    """Fill `out`, from row 0, with the records of a commit-log segment, beginning at `pos`.

    Parameters
    ----------
    pos, limit : int
        The first position in the segment, and the one to stop at.
    base_offset : int
        Absolute offset of the segment's first byte; a record that states another place ends the scan.
    delays : array of int64
        Delay in ms of level 1, 2, … for the tags codes of ``SCHEDULE_TOPIC_XXXX``.
    check_crc : int
        See `decode_record`; a record that fails ends the scan.
    index_tags, keys : bool
        Compute index hashes of tags (RocketMQ 5.4.0 and later), and any at all.

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
    """Step over whole records without looking inside, over `max_num` at the most.

    Returns
    -------
    (int, Verdict, int, int)
        The position of what ended the walk, the verdict on it, how many records were passed, and where the last begins, or -1.
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
    # Count the units, one a row, up to the first that does not match its record; -1 - i for an invalid row number i.
    cdef int64_t n = rows.shape[0], i, row
    for i in range(n):
        row = rows[i]
        if row < 0 or row >= columns.capacity:
            return -1 - i
        if (columns.c_queue_offset[row] != queue_offset + i
                or not unit_agrees(units + UNIT_SIZE * i, columns, row, tags)):
            return i
    return n


cdef int64_t known_rows(int64_t agreed, RecordColumns columns, const int64_t[::1] rows) except -1:
    if agreed < 0:
        raise OffsetOutOfRangeError(f"row {rows[-1 - agreed]} of {columns.capacity}")
    return agreed


def agreeing_units(Region region not None, int64_t pos, RecordColumns columns not None, const int64_t[::1] rows not None,
                   int64_t queue_offset, bint tags=True):
    """Count the units at `pos`, the first with number `queue_offset`, up to the first that differs from its record in `rows`.

    Parameters
    ----------
    rows : array of int64
        Rows of one queue, in order, one for each unit.
    tags : bool
        Compare tags codes; in a queue with an extension they are addresses.
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
    """Count the entries, from number `first`, up to the first that differs from the key hashes from number `begin`.

    Hash, phy offset and time are compared; not the time of entry 1, which is relative to the file before.  Raises
    OffsetOutOfRangeError if `first` (at least 1) or `begin` is out of range.
    """
    # Held, as `grow_keys` may put another array in its place.
    cdef const int32_t[::1] hashes = columns.c_key_hash
    cdef int64_t num = columns.count
    cdef int64_t total = columns.c_key_start[num] if 0 <= num <= columns.capacity else -1
    if not 0 <= begin <= total <= hashes.shape[0] or first < 1:
        raise OffsetOutOfRangeError(f"entries from {first} and key hashes from {begin} of {total}")
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
    """Count `addresses` up to the first without a whole unit in this file of a queue extension.

    Parameters
    ----------
    base_offset : int
        Offset of the file's first byte among the extension's files.
    addresses : array of int64
        Tags codes of simple units.
    tags_codes, store_timestamps : array of int64, optional
        The values that the units must have.
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
