"""Rows to put, from messages and Arrow tables: checked, laid out and encoded.

`RowBatch` has the rules of a plain row, `TableRows` the columns of a table, `PlacedRows` the places of rows, `Appender`
puts one message with its unit and index entries, and `settle` writes the units of many records at their queues' ends.
Callers choose files, places and times.  A row that is not plain is left to `store/writing.py`, which has all rules and
errors.  Payload, unit, entry and count are published in that order (I6).
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, int32_t, int64_t, uint32_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport clock_gettime, CLOCK_REALTIME, timespec

from rmqstore._bytes cimport check, difference_of, get_i64, load_i64, put_hex, put_i64, sum_of
from rmqstore._core cimport (
    BLANK_SIZE, COLUMNS_FULL, FileStream, index_count_of, INDEX_END_PHY_OFFSET, INDEX_END_TIMESTAMP, INDEX_HEADER_SIZE,
    IndexRegion, LIMIT, MessageFields, PROP_CRC_SIZE, put_unit, Region, StateFields, SYS_BORN_V6, SYS_PLAIN_MASK,
    SYS_STORE_V6, UNIT_SIZE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._dispatch cimport NEED_KEY_ROOM, RecordColumns, TopicTable, unit_agrees
from rmqstore._java_text cimport hash_utf8
from rmqstore._properties cimport has_separator, IndexedProperties, put_key_hashes
from rmqstore._python cimport (
    COPIED_BYTES, go_on, let_others_run, PyBytes_CheckExact, PyDict_CheckExact, PyDict_Next, PyObject_GC_UnTrack,
    PyThreadState, PyTuple_SET_ITEM, PyType_GenericAlloc, PyUnicode_CheckExact, PyUnicode_DATA,
    PyUnicode_GET_LENGTH, PyUnicode_IS_COMPACT_ASCII, PyUnicode_New, ROW_COST, small_number,
)
from rmqstore._record cimport encode_into, encoded_properties_len, encoded_size, ends_with_crc, RecordParts

from array import array as stdlib_array

from rmqstore import _numpy as np

crc32_start()

cdef object ZERO = 0
# Made at import, when there is no NumPy yet.
cdef int64_t[::1] EMPTY_TIMESTAMPS = stdlib_array("q")

cdef enum:
    APPEND_KEYS = 64

# No unit has a higher queue offset: its place in bytes fits 64 bits.
cdef int64_t MAX_UNIT = INT64_MAX // UNIT_SIZE - 1


cdef enum:
    # Results of taking a row; for those below zero the caller must use `store/writing.py`.
    TAKEN = 0
    NOT_PLAIN = -1
    NEW_QUEUE = -2
    UNSOUND = -3    # an Arrow array with offsets outside its data


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


cdef inline bint number_of(PyObject* value, int64_t* out) noexcept:
    # As `small_number`.  Most numbers of a message are the one object that 0 is.
    if value == <PyObject*>ZERO:
        out[0] = 0
        return True
    return small_number(value, out)


@cython.final
@cython.no_gc_clear
cdef class TextColumn:
    """Texts or bytes of an Arrow array, or without `offsets` (int32 or int64) one for all rows.

    Bit `first` of `validity`, Arrow's bitmap, belongs to row 0.
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
    """Lists of texts: Arrow's list or map `offsets` (int64) over a `TextColumn`; without them every row has `num` texts."""

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
    """Numbers of a column (int64), or one for all rows; null where `valid` is False, everywhere without `given`."""

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
        # False, and 0, for null.
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
    properties, values : ListColumn, TextColumn
        The names, and the values to them.
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

    It takes plain rows: simple flags, properties without a meaning for the writer, texts of UTF-8.  `take_messages` or
    `take_columns` come first, then `number`, `encode`; rows that are not plain come by `take_prepared`.

    Parameters
    ----------
    topics : TopicTable
        Numbers the topics and queues.
    store_host : bytes
        8 or 20 bytes, for rows that name none.
    hosts : dict of str to bytes
        Hosts that were looked at before.
    max_body_size, max_topic_size : int
        In bytes; a topic above 127 bytes makes a record of version 2.
    prop_crc : bool
        Append the property CRC.
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
    cdef readonly bint prepared     # rows that are not plain
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
        self.prepared = False

    cdef inline void start_text(self, Row* row) noexcept nogil:
        # Begin the properties of a row.
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
        # A property that is not ASCII.  Both are held, because the caller's are borrowed and encoding may run code that
        # changes the dict.
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
        cdef object properties
        with cython.critical_section(m):
            properties = m.properties
        # Without a GIL the fields that are borrowed below, and the dict that is walked, need their owners' locks.
        with cython.critical_section(m, properties):
            return self.take_fields(m, properties, queue_id)

    cdef int take_fields(self, MessageFields m, object properties, int64_t queue_id) except -10:
        cdef Row* row = &self.rows[self.count]
        cdef int64_t number
        cdef int32_t topic
        cdef object text
        cdef PyObject* name
        cdef PyObject* value
        cdef Py_ssize_t at = 0
        cdef object body = m.body
        if not (PyUnicode_CheckExact(<PyObject*>m.topic) and PyBytes_CheckExact(<PyObject*>body)
                and PyDict_CheckExact(<PyObject*>properties)):
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
        if not number_of(<PyObject*>m.flag, &number) or number != <int32_t>number:
            return NOT_PLAIN
        row.parts.flag = <int32_t>number
        if not number_of(<PyObject*>m.sys_flag, &number) or number & ~<int64_t>SYS_PLAIN_MASK:
            return NOT_PLAIN
        row.parts.sys_flag = <int32_t>number
        if not number_of(<PyObject*>m.reconsume_times, &number) or number != <int32_t>number:
            return NOT_PLAIN
        row.parts.reconsume_times = <int32_t>number
        if not number_of(<PyObject*>m.prepared_transaction_offset, &row.parts.prepared_transaction_offset):
            return NOT_PLAIN
        row.born_now = m.born_timestamp is None
        if not row.born_now and not number_of(<PyObject*>m.born_timestamp, &row.parts.born_timestamp):
            return NOT_PLAIN
        row.parts.queue_id = <int32_t>queue_id
        row.parts.body = <const unsigned char*>PyBytes_AS_STRING(body)
        row.parts.body_len = <int32_t>PyBytes_GET_SIZE(body)
        if m.born_host is None and m.store_host is None:
            self.default_hosts(row)
        elif self.set_host(row, m.born_host, m.store_host) != TAKEN:
            return NOT_PLAIN
        self.start_text(row)
        while PyDict_Next(properties, &at, &name, &value):
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
        """Take messages as rows, beginning with number `first`.

        Parameters
        ----------
        queue_ids : int or list of int
            One for all, or one for each.
        kind : type
            The exact type of a plain message.

        Returns
        -------
        (int, int)
            The number of the message that could not be taken, and why: -1 = it is not plain, -2 = its topic or queue is not in
            the table; ``len(messages)`` and 0 when all are taken.
        """
        cdef Py_ssize_t i, n = len(messages)
        cdef int64_t each = -1
        cdef int64_t used
        cdef int taken
        cdef list many = queue_ids if type(queue_ids) is list else None
        if many is None:
            if not number_of(<PyObject*>queue_ids, &each):
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
                if not number_of(<PyObject*>number, &each):
                    return i, NOT_PLAIN
            used = self.arena_used
            taken = self.take_message(<MessageFields>message, each)
            if taken != TAKEN:
                self.arena_used = used
                return i, taken
        return n, TAKEN

    def take_columns(self, TableRows table not None, int64_t first):
        """Take rows of a table, like `take_messages`; -3 = an Arrow array is not sound."""
        cdef int64_t i = first
        cdef int taken
        cdef PyThreadState* state
        if first < 0 or first > table.num:
            raise ValueError(f"row {first} of {table.num}")
        self.reserve_rows(self.count + table.num - first)
        state = let_others_run((table.num - first) * ROW_COST)
        taken = take_rows(self, table, &i)
        go_on(state)
        return i, taken

    def take_prepared(self, list rows not None):
        """Take rows that the caller has checked and numbered, in place of those that are there; for `encode` and `placed`.

        Parameters
        ----------
        rows : list of tuple
            (topic, body, properties, born_host, store_host: bytes; queue_id, flag, sys_flag, reconsume_times, version,
            queue_offset, born_timestamp, store_timestamp, prepared_transaction_offset: int); an error where no record can hold
            it.
        """
        cdef RecordParts parts
        cdef Row* row
        # The rows are held here: the caller's list may change while they are read.
        cdef list kept = list(rows)
        self.clear()
        self.prepared = True
        self.held.append(kept)
        self.reserve_rows(len(kept))
        for i in range(len(kept)):
            fill_parts(kept[i], &parts, self.prop_crc)
            # Making numbers of what was given may have run anything.
            if self.count != i or not self.prepared:
                raise RuntimeError("rows were taken while others were")
            row = &self.rows[i]
            row.parts, row.size = parts, encoded_size(&parts, self.prop_crc)
            row.topic = row.queue = -1
            self.count += 1

    cdef void seal(self, int64_t store_timestamp, const int64_t[::1] timestamps) noexcept nogil:
        # Buffers may have moved while later rows were taken.
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

    cdef int count_queues(self) except -1:
        # Notes the queues of the rows, and how many rows each has.
        cdef int64_t i
        cdef int32_t queue
        check(not self.prepared)
        if self.touched:
            return 0
        if self.queue_num.shape[0] < self.topics.queue_num:
            self.queue_num = np.zeros(2 * self.topics.queue_num, np.int64)
        for i in range(self.count):
            queue = self.rows[i].queue
            check(0 <= queue < self.queue_num.shape[0])
            if self.queue_num[queue] == 0:
                self.touched.append(queue)
            self.queue_num[queue] += 1
        return 0

    def queues(self):
        """List the queues of the rows, as numbers in `topics.queues`, each with its number of rows.

        Queues whose file has room for their rows are left out, see `TopicTable.ends`.
        """
        cdef int32_t each
        cdef int64_t pos
        cdef FileEnd end
        cdef list found = []
        self.count_queues()
        for each in self.touched:
            end = self.topics.ends[each]
            if end is None or end.region_for(UNIT_SIZE * self.queue_num[each], &pos) is None:
                found.append((each, self.queue_num[each]))
        return found

    def number(self, dict following not None, int64_t store_timestamp, const int64_t[::1] timestamps not None):
        """Set the queue offset and the store time (ms since epoch) of every row.

        `following` has the next queue offset of every queue of `queues`; `timestamps`, if not empty, has a time for each row.
        """
        cdef int64_t i, offset
        cdef int32_t each
        cdef FileEnd end
        cdef list numbers = []
        if timestamps.shape[0] != 0 and timestamps.shape[0] != self.count:
            raise ValueError(f"{timestamps.shape[0]} timestamps for {self.count} rows")
        self.count_queues()
        for each in self.touched:
            given = following.get(each)
            if given is None:
                end = self.topics.ends[each]
                given = end.stream.wrote_where // UNIT_SIZE
            numbers.append(given)
        cdef int64_t[::1] next_offset = self.queue_num
        for each, offset in zip(self.touched, numbers):
            next_offset[each] = offset
        for i in range(self.count):
            self.rows[i].parts.queue_offset = next_offset[self.rows[i].queue]
            next_offset[self.rows[i].queue] += 1
        self.seal(store_timestamp, timestamps)
        # The array counts again.
        for each, offset in zip(self.touched, numbers):
            next_offset[each] -= offset

    def room(self, int64_t left, int64_t segment_size, bint together=False):
        """Return the number of new segments that the rows need, the size of the largest row, and the free bytes after the rows.

        The current segment has `left` free bytes; with `together` all rows count as one.
        """
        cdef int64_t i, size = 0, largest = 0, rolls = 0
        for i in range(self.count):
            size = self.rows[i].size + (size if together else 0)
            if together and i + 1 < self.count:
                continue
            if size > largest:
                largest = size
            if size + BLANK_SIZE > left:
                rolls += 1
                left = segment_size
            left -= size
        return rolls, largest, left

    def encode(self, Region region not None, int64_t pos, int64_t base_offset, int64_t first):
        """Encode rows, beginning with `first`, into a segment at `pos`, as many as fit with 8 bytes left after each.

        Returns the number of the first row that does not fit, and the position after the last; `base_offset` is that of the
        segment.
        """
        cdef PyThreadState* state = NULL
        if first < 0:
            raise ValueError(f"first is {first}")
        cdef unsigned char* p = region.pin_writable(pos, difference_of(region.size, pos))
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
            row.phy_offset = sum_of(base_offset, pos[0])
            encode_into(p + (pos[0] - start), row.size, row.phy_offset, &row.parts, self.prop_crc)
            pos[0] += row.size
            first[0] += 1

    def placed(self):
        """Return the places of the rows as bytes for `PlacedRows` of this process."""
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
        """Fill `columns` like a `scan` of the rows' records, beginning with number `first`; the log is not read.

        Returns the number of the first row that does not fit into `columns`.
        """
        cdef int verdict = NEED_KEY_ROOM
        cdef PyThreadState* state
        if not 0 <= first <= self.count or self.encoded < self.count:
            raise ValueError(f"row {first} of {self.count}, of which {self.encoded} are encoded")
        check(not self.prepared)
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
            # A plain row is not an inner batch and names no further queues.
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


cdef int fill_parts(object row, RecordParts* parts, bint prop_crc) except -1:
    # Of one row of `RowBatch.take_prepared`.
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


cdef int take_rows(RowBatch self, TableRows table, int64_t* i) noexcept nogil:
    cdef int64_t used
    cdef int taken = TAKEN
    while i[0] < table.num:
        used = self.arena_used
        taken = take_row(self, table, i[0])
        if taken != TAKEN:
            self.arena_used = used
            break
        i[0] = i[0] + 1
    return taken


cdef int take_row(RowBatch self, TableRows table, int64_t i) noexcept nogil:
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
    there = add_texts(self, table, row, i)
    if there != TAKEN:
        return there
    there = self.finish_row(row)
    if there == TAKEN:
        self.count = self.count + 1
    return there


cdef int add_texts(RowBatch self, TableRows table, Row* row, int64_t i) noexcept nogil:
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


cdef struct Placed:
    # The place of a row, see `RowBatch.placed`.
    int64_t phy_offset, queue_offset, store_timestamp, size
    int32_t host_len
    unsigned char[20] host


cdef class PlacedRows:
    """Named tuples for placed rows, in order; each is made on access.

    Equal to a list of the same tuples; slices and sums are lists.
    """

    # All rows once they were made, else None; till then `placed` holds `num` of them, to become of `kind`.
    cdef list made
    cdef bytes placed
    cdef type kind
    cdef int64_t num

    __hash__ = None  # like a list

    def __init__(self, rows=()):
        self.made = list(rows)
        self.num = len(self.made)

    @classmethod
    def of(cls, bytes placed not None, type kind not None, int64_t num):
        """Make the first `num` rows of the result of `RowBatch.placed` into named tuples of five, of type `kind`."""
        cdef PlacedRows rows = cls()
        if not issubclass(kind, tuple) or len(kind._fields) != 5:
            raise TypeError("a named tuple of five is needed")
        if not 0 <= num <= PyBytes_GET_SIZE(placed) // <int64_t>sizeof(Placed):
            raise ValueError(f"{num} rows of {PyBytes_GET_SIZE(placed) // <int64_t>sizeof(Placed)}")
        rows.made, rows.placed, rows.kind, rows.num = None, placed, kind, num
        return rows

    def __class_getitem__(cls, kind):
        return cls

    cdef list make(self, int64_t first, int64_t num):
        cdef int64_t i, last_time = 0, last_size = -1
        cdef object time = None, size = None
        cdef list made = []
        cdef Placed* row
        for i in range(first, first + num):
            row = <Placed*>PyBytes_AS_STRING(self.placed) + i
            if not 0 <= row.host_len <= 20:
                raise ValueError(f"a host of {row.host_len} bytes")
            # Neighbours are of one time, and often of one size: one object serves them.
            if i == first or row.store_timestamp != last_time:
                last_time = row.store_timestamp
                time = last_time
            if i == first or row.size != last_size:
                last_size = row.size
                size = last_size
            made.append(put_result(self.kind, row.phy_offset, row.queue_offset, row.host, row.host_len, time, size))
        return made

    cdef list all(self):
        if self.made is None:
            self.made = self.make(0, self.num)
        return self.made

    def __len__(self):
        return self.num

    def __getitem__(self, place):
        if self.made is not None or isinstance(place, slice):
            return self.all()[place]
        # Whoever wants one of them, say the last, needs no others.
        return self.make(range(self.num)[place], 1)[0]

    def __iter__(self):
        return iter(self.all())

    def __eq__(self, other):
        if not isinstance(other, (list, PlacedRows)):
            return NotImplemented
        return self.all() == ((<PlacedRows>other).all() if isinstance(other, PlacedRows) else other)

    # There is no __radd__: Python would ask it for `some_list += rows` too, and make another list of it.
    def __add__(self, other):
        if not isinstance(other, (list, PlacedRows)):
            return NotImplemented
        return self.all() + list(other)

    def __repr__(self):
        return repr(self.all())

    def __reduce__(self):
        return type(self), (self.all(),)


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
    """The file in which a stream goes on, as compiled code compares its units with records and writes to it.

    Only the part of the file that has space on disk when it is learned, its `reserved`, is written to.  Its `_region` is None
    while it is not mapped, which its pool decides.

    Attributes
    ----------
    mapped_file : MappedFile or None
        The file; None for no file.
    following : int
        Of a queue: the queue offset of the unit after the last one that was compared or written, -1 for any.
    """

    cdef FileStream stream
    cdef readonly object mapped_file
    cdef set dirty
    cdef int64_t base_offset, reserved
    cdef readonly int64_t following
    # The last batch of `settle` with records of this queue, and the queue offset after them; they do not follow each other
    # where it is -1.
    cdef int64_t batch, expected
    cdef bint left      # a record was left to the caller since the file was learned

    def __cinit__(self, FileStream stream not None, mapped_file=None):
        self.stream = stream
        self.learn(mapped_file)

    def learn(self, mapped_file, int64_t following=-1):
        """Take the file that has, or will have, the unit at queue offset `following`; None for no file."""
        self.mapped_file, self.following, self.left = mapped_file, following, False
        self.base_offset = self.reserved = 0
        if mapped_file is not None:
            self.base_offset, self.reserved = mapped_file.file_from_offset, mapped_file.reserved
            self.dirty = mapped_file.pool.dirty

    cdef Region mapped(self):
        return None if self.mapped_file is None else self.mapped_file._region

    cdef Region region_for(self, int64_t size, int64_t* pos):
        # The mapping that takes `size` bytes, and where in it; None if this is not the file for them any more.
        cdef Region region = self.mapped()
        pos[0] = self.stream.wrote_where - self.base_offset
        return region if region is not None and 0 <= pos[0] <= self.reserved - size else None

    cdef void expect(self, int64_t queue_offset, int64_t batch):
        # A record of `batch` has this queue offset.
        if self.batch != batch:
            self.batch = batch
            self.expected = queue_offset if self.following < 0 else self.following
        self.expected = queue_offset + 1 if 0 <= queue_offset == self.expected < MAX_UNIT else -1

    cdef int settle(self, RecordColumns columns, int64_t row, bint append) except -1:
        # RIGHT or WRITTEN, see `settle`; what follows a record that is left is left too.
        cdef int answer = LEFT
        cdef Region region
        cdef int64_t pos, end
        cdef unsigned char* unit
        if self.left or self.expected < 0:
            self.left = True
            return LEFT
        region = self.mapped()
        pos = columns.c_queue_offset[row] * UNIT_SIZE - self.base_offset
        end = self.stream.wrote_where - self.base_offset
        if region is None or pos < 0:
            answer = LEFT
        elif pos < end and pos <= region.size - UNIT_SIZE:
            unit = region.pin(pos, UNIT_SIZE)
            if unit_agrees(unit, columns, row, True):
                answer = RIGHT
            region.unpin()
        elif append and pos == end and UNIT_SIZE <= pos <= self.reserved - UNIT_SIZE:
            self.dirty.add(self.mapped_file)
            unit = region.pin_writable(pos - UNIT_SIZE, 2 * UNIT_SIZE)
            # Anything else than a record after that of the last unit is for the caller to judge.
            if get_i64(unit) < columns.c_phy_offset[row]:
                put_unit(unit + UNIT_SIZE, columns.c_phy_offset[row], columns.c_size[row], columns.c_tags_code[row])
                self.stream.wrote_where += UNIT_SIZE
                answer = WRITTEN
            region.unpin()
        if answer == LEFT:
            self.left = True
        else:
            self.following = columns.c_queue_offset[row] + 1
        return answer


cdef enum:
    # Results for a record in `settle`.
    LEFT = 0
    RIGHT
    WRITTEN


cdef int64_t settled_batches = 0


def settle(RecordColumns columns not None, uint8_t[::1] chosen not None, bint append):
    """Take the records out of `chosen` whose unit is in its place, and those whose unit is the next one and is written now.

    `columns.topics.ends` has the known ends of queues.  The records of a queue are settled if they are consecutive, up to the
    first whose unit differs or has no place in the known file; it and all after it are left to the caller.

    Parameters
    ----------
    chosen : array of uint8, shape (count,)
        1 for each record that needs a unit of 20 bytes.
    append : bool
        Write units as well.

    Returns
    -------
    (int, int, int)
        The numbers of records left and of units written, and the phy offset of the first of these or -1.
    """
    global settled_batches
    cdef int64_t n = columns.count, i, left = 0, written = 0, first = -1
    cdef int32_t queue
    cdef int answer
    cdef list ends = columns.topics.ends
    cdef FileEnd end
    if n < 0 or n > columns.capacity or chosen.shape[0] != n:
        raise ValueError(f"{chosen.shape[0]} marks for {n} rows of {columns.capacity}")
    settled_batches += 1
    for i in range(n):
        queue = columns.c_queue[i]
        if chosen[i] and 0 <= queue < len(ends):
            end = ends[queue]
            if end is not None:
                end.expect(columns.c_queue_offset[i], settled_batches)
    for i in range(n):
        if not chosen[i]:
            continue
        queue = columns.c_queue[i]
        end = ends[queue] if 0 <= queue < len(ends) else None
        answer = LEFT if end is None else end.settle(columns, i, append)
        if answer == LEFT:
            left += 1
            continue
        chosen[i] = 0
        if answer == WRITTEN:
            if not written:
                first = columns.c_phy_offset[i]
            written += 1
    return left, written, first


@cython.no_gc_clear
cdef class Appender:
    """Appends one plain message, its unit and its index entries in one call.

    It knows the ends of the log and of the index from `learn`, those of queues from the `ends` of the batch's topics, and leaves
    what does not fit there to its caller.

    Parameters
    ----------
    state : StateFields
        Messages are put only while this is its `appender`.
    batch : RowBatch
        Used for the one row.
    kind, result : type
        The exact type of a plain message; named tuple of (phy_offset, queue_offset, msg_id, store_timestamp, size).
    clock : callable or None
        Returns the store time, ms since epoch; called when nothing else can stop the put.  None = the system clock.
    after_put : callable
        Called without the lock, with the end of the log and the result, if a reader or a flush waits for it.
    indexed, index_tags : bool
        Index keys; index tags.

    Attributes
    ----------
    writing : bool
        A put began to write and did not finish.
    asked : int or None
        The result of `clock` for a put that was left to the caller, which clears it: a clock is called once a put.
    """

    cdef readonly bint writing
    cdef public object asked
    cdef RowBatch batch
    cdef StateFields state
    cdef object clock, after_put
    cdef type kind, result
    cdef bint indexed, index_tags
    cdef FileEnd log
    cdef IndexRegion index

    def __cinit__(self, StateFields state not None, RowBatch batch not None, type kind not None, type result not None, clock, after_put not None,
                  bint indexed, bint index_tags):
        if not issubclass(result, tuple) or len(result._fields) != 5:
            raise TypeError("a named tuple of five is needed")
        self.state, self.batch, self.kind, self.result = state, batch, kind, result
        self.indexed, self.index_tags, self.clock = indexed, index_tags, clock
        self.after_put = after_put
        batch.reserve_rows(1)

    def learn(self, FileEnd log not None, IndexRegion index):
        """Take the end of the log, and the newest index file."""
        self.log, self.index = log, index

    def put(self, message, queue_id=0):
        """Append the message; its `result`, or None if nothing was written and the caller has to put it."""
        cdef StateFields state = self.state
        put = None
        with state.lock:
            try:
                if state.appender is self:
                    put = self.append(message, queue_id)
            except BaseException as error:
                if self.writing:
                    state.fail(error)
                raise
        if put is not None and (state.waiting or state.sync_flush):
            self.after_put(put.phy_offset + put.size, (message,))
        return put

    cdef object append(self, object message, object queue_id):
        # The caller holds the append lock.
        cdef RowBatch batch = self.batch
        cdef Row* row
        cdef FileEnd log = self.log, end
        cdef Region log_region, end_region
        cdef int64_t number = 0, pos, unit_pos, keys, i, code, now, latest = 0
        cdef int32_t[APPEND_KEYS] hashes
        cdef unsigned char* p
        cdef unsigned char* unit
        if (log is None or type(message) is not self.kind or not number_of(<PyObject*>queue_id, &number)
                or (self.indexed and self.index is None)):
            return None
        # An earlier row may have been left behind.
        batch.clear()
        if batch.take_message(<MessageFields?>message, number) != TAKEN:
            return None
        row = &batch.rows[0]
        end = batch.topics.ends[row.queue]
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
        if keys < 0 or (self.indexed and not index_takes(self.index, keys, row.phy_offset, &latest)):
            return None
        if self.clock is None:
            now = system_time()
        else:
            now = self.clock()
            # Asking the clock may have run anything, even a put.
            if row != &batch.rows[0] or batch.count != 1 or row.phy_offset != log.stream.wrote_where:
                raise RuntimeError("the clock of the store put a message itself")
        if keys > 0 and self.indexed and now < latest:
            # The clock was set back.  The caller knows what that takes.
            self.asked = None if self.clock is None else now
            return None
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
                end.following = row.parts.queue_offset + 1
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
        if now > self.state.last_store_timestamp:
            self.state.last_store_timestamp = now
        return made


cdef inline int64_t system_time() noexcept nogil:
    # Milliseconds since the epoch.
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <int64_t>now.tv_sec * 1000 + now.tv_nsec // 1000000


cdef bint index_takes(IndexRegion index, int64_t num, int64_t phy_offset, int64_t* latest) except -1:
    # The entries fit and leave the file not full, and the record is not there yet; also the time of the entry before.
    cdef Region region = index.region
    cdef unsigned char* base
    cdef bint takes
    if region.closed:
        return False
    base = region.pin(0, INDEX_HEADER_SIZE)
    takes = (index_count_of(base) + num < index.index_num
             and phy_offset >= load_i64(base + INDEX_END_PHY_OFFSET))
    latest[0] = load_i64(base + INDEX_END_TIMESTAMP)
    region.unpin()
    return takes
