# Rows that are to be put, which `_append` takes one of by itself.

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from rmqstore._core cimport MessageFields
from rmqstore._dispatch cimport RecordColumns, TopicTable
from rmqstore._properties cimport IndexedProperties
from rmqstore._python cimport small_number
from rmqstore._record cimport RecordParts


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


@cython.final
cdef class RowBatch:
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

    cdef int reserve_rows(self, int64_t num) except -1
    cdef bint reserve_arena(self, int64_t size) noexcept nogil
    cdef bint grow_arena(self, int64_t size) noexcept nogil
    cpdef clear(self)
    cdef void start_text(self, Row* row) noexcept nogil
    cdef int add_property(self, Row* row, const unsigned char* name, int64_t name_len, const unsigned char* value,
                          int64_t value_len) noexcept nogil
    cdef int32_t topic_number(self, const unsigned char* p, int64_t n) noexcept nogil
    cdef int finish_row(self, Row* row) noexcept nogil
    cdef void default_hosts(self, Row* row) noexcept nogil
    cdef int add_hosts(self, Row* row, const unsigned char* born, int64_t born_len, const unsigned char* store,
                       int64_t store_len) noexcept nogil
    cdef int set_host(self, Row* row, object born_host, object store_host) except -10
    cdef int add_encoded(self, Row* row, object name, object value) except -10
    cdef int take_message(self, MessageFields m, int64_t queue_id) except -10
    cdef void seal(self, int64_t store_timestamp, const int64_t[::1] timestamps) noexcept nogil
    cdef void encode_rows(self, unsigned char* p, int64_t* pos, int64_t size, int64_t base_offset, int64_t* first) noexcept nogil
    cdef int fill_rows(self, RecordColumns out, int64_t* first, bint index_tags) noexcept nogil


cdef object put_result(type kind, int64_t phy_offset, int64_t queue_offset, const unsigned char* host, int32_t host_len,
                       object store_timestamp, object size)

cdef object ZERO


cdef inline bint number_of(PyObject* value, int64_t* out) noexcept:
    # As `small_number`.  Most numbers of a message are the one object that 0 is.
    if value == <PyObject*>ZERO:
        out[0] = 0
        return True
    return small_number(value, out)
