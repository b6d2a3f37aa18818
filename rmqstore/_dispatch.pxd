# Records as columns of numbers, which a put fills as well.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from rmqstore._bytes cimport get_i32, get_i64
from rmqstore._core cimport UNIT_RECORD_SIZE, UNIT_TAGS_CODE


@cython.final
cdef class TopicTable:
    cdef readonly list topics, queues, ends
    cdef uint8_t[::1] arena
    cdef int64_t[::1] starts
    cdef int32_t[::1] slots
    cdef int64_t mask
    cdef int32_t num
    cdef int64_t[::1] queue_codes
    cdef int32_t[::1] queue_slots
    cdef int64_t queue_mask
    cdef int32_t queue_num

    cdef int32_t look_up(self, uint32_t h, const unsigned char* p, int32_t n) noexcept nogil
    cdef void enter(self, uint32_t h, int32_t number) noexcept
    cdef int32_t look_up_queue(self, int32_t topic, int32_t queue_id) noexcept nogil
    cpdef int32_t add_queue(self, int32_t topic, int32_t queue_id) except -1
    cdef void enter_queue(self, int32_t number) noexcept


cdef class RecordColumns:
    cdef readonly TopicTable topics
    cdef readonly int64_t capacity
    cdef public int64_t count
    cdef readonly object phy_offset, size, queue_id, queue_offset, sys_flag, store_timestamp, tags_code, topic, queue
    cdef readonly object inner_base, inner_num, multi_dispatch, prop_crc, key_start, key_hash
    cdef int64_t[::1] c_phy_offset, c_queue_offset, c_store_timestamp, c_tags_code, c_inner_base, c_key_start
    cdef int32_t[::1] c_size, c_queue_id, c_sys_flag, c_topic, c_queue, c_inner_num, c_key_hash
    cdef uint8_t[::1] c_multi_dispatch, c_prop_crc


cdef inline bint unit_agrees(const unsigned char* unit, RecordColumns columns, int64_t row, bint tags) noexcept nogil:
    # The unit says what the record needs, but for its place.
    return (get_i64(unit) == columns.c_phy_offset[row] and get_i32(unit + UNIT_RECORD_SIZE) == columns.c_size[row]
            and (not tags or get_i64(unit + UNIT_TAGS_CODE) == columns.c_tags_code[row]))


cdef enum:
    # Results of scan_rows in addition to the verdicts.
    NEED_TOPIC = 100
    NEED_KEY_ROOM = 101
