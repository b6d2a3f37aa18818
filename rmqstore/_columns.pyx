"""Records as columns of Apache Arrow, for reading many messages.

`ArrowColumns` parses records into the buffers of Arrow arrays (`_column_sink` writes the columns), `Room` is the memory
of these, and `KeyTexts` the keys of a batch lookup.  The module knows no file and has no policy: damage is a verdict or a
mark in the column `corrupt`.  Invariants are those of `_core`; the address of an array is taken in every pass, and memory
is reused only when nothing holds it.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, memset

from rmqstore._bytes cimport (
    atomic_or, before, get_i32, get_i64, prefetch, put_hex_8, put_view, release, same_bytes_at,
)
from rmqstore._column_sink cimport (
    BUFFER_NUM, COL_BODY, COL_BODY_STORED, COL_BORN_HOST, COL_BORN_TIMESTAMP, COL_CORRUPT, COL_FLAG, COL_KEYS,
    COL_MSG_ID, COL_NUM, COL_PHY_OFFSET, COL_PREPARED_TRANSACTION_OFFSET, COL_PROPERTIES, COL_QUEUE_ID,
    COL_QUEUE_OFFSET, COL_RECONSUME_TIMES, COL_SIZE, COL_STORE_HOST, COL_STORE_TIMESTAMP, COL_SYS_FLAG, COL_TAGS,
    COL_TOPIC, COL_UNIQUE_KEY, COL_VALUES, ColumnSink, HAS_CHILD, HAS_NULLS, HAS_OFFSETS, HAS_TEXT, HAS_VIEWS,
    HOST_KEY, HOST_ROOM, host_slot, HOST_SLOTS, HOST_TEXT, HOST_TEXT_LEN, ID_SIZE, IN_BODY, IN_HEAD, IS_INT64,
    lacks_host, lacks_room, LAYOUT_PATIENCE, LAYOUTS, mark_valid, MAX_REGIONS, MAX_SPANS, NAME_SLOTS, NEED_BODY,
    NEED_HOST, NEED_ROOM, NEEDS_PROPERTIES, NO_WRITER, SKIPPED, POOL_BYTES, POOL_ROOMS, put_property_views, set_bit,
    SMALL_ROOM, SPAN_ROOM, STAGED_ROWS, StagedRow, SYS_COMPRESSED, TEXT_SLACK, USUAL_COLUMNS, view_host, VIEW_SIZE,
    WRITE_FIRST, write_rows,
)
from rmqstore._core cimport (
    BAD_PHY_OFFSET, COLUMNS_FULL, LIMIT, RECORD, RECORD_BORN_HOST, RECORD_BORN_TIMESTAMP, RECORD_FLAG,
    RECORD_PHY_OFFSET, RECORD_QUEUE_ID, RECORD_QUEUE_OFFSET, Region, SYS_BORN_V6, SYS_STORE_V6,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._dispatch cimport TopicTable
from rmqstore._java_text cimport hash_utf8, index_hash, is_utf8, put_java_utf8, same_text
from rmqstore._properties cimport (
    fits, is_dispatched_to, KnownSpans, learn, names_may_repeat, PropertyLayout, PropertySpan, put_value_view,
    split_properties,
)
from rmqstore._python cimport (
    PyTuple_GET_ITEM, PyUnicode_CheckExact, PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_IS_COMPACT_ASCII,
)
from rmqstore._record cimport (
    body_crc_ok, has_prop_crc, judge_record, parse_head, parse_record, parse_rest, prefetch_places, prefetch_stream,
    prop_crc_ok, RecordView,
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

COLUMN_NAMES = (
    "topic", "queue_id", "queue_offset", "phy_offset", "size", "msg_id", "keys", "tags", "body", "properties",
    "born_timestamp", "store_timestamp", "born_host", "store_host", "flag", "sys_flag", "reconsume_times",
    "prepared_transaction_offset", "corrupt", "unique_key", "body_stored",
)

assert len(COLUMN_NAMES) == COL_NUM

cdef dict COLUMN_NUMBERS = {name: number for number, name in enumerate(COLUMN_NAMES)}


cdef int stage_row(ColumnSink* s, StagedRow* row) noexcept nogil:
    # Takes the parsed record of the next staged row in, or says what has to come first; `row.ok` says what is known of it.
    cdef int64_t mask = s.mask, weight = 0
    cdef RecordView* r = &row.r
    cdef const unsigned char* p = row.p
    if row.ok and (mask & 1 << COL_CORRUPT or (mask & 1 << COL_BODY and r.sys_flag & SYS_COMPRESSED)):
        row.ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (s.check_crc < 2 or has_prop_crc(p, r))
    row.body, row.body_len, row.body_room, row.body_lent = p + r.body_pos, r.body_len, row.room - r.body_pos, False
    if mask & (1 << COL_BODY | 1 << COL_CORRUPT) and r.sys_flag & SYS_COMPRESSED and row.ok and r.body_len > 0:
        if s.row_num > 0:
            return WRITE_FIRST
        if not s.body_ready:
            return NEED_BODY
        # A body that is not what its flag says is damage, like one that does not fit its CRC: it stays as it is stored.
        row.ok = s.body != NULL
        if row.ok:
            row.body, row.body_len, row.body_room, row.body_lent = s.body, s.body_len, s.body_len, True
    if mask & 1 << COL_BODY and (row.body_lent or not s.views):
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
    if mask & 1 << COL_BODY and (row.body_lent or not s.views):
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
    # True if a text that does not match the layout replaces it.
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
        row.layout, row.spans, row.span_num, row.known, row.valid = layout, layout.spans, layout.span_num, layout.known, True
        return
    row.spans = s.spans + s.span_used
    row.span_num = split_properties(text, n, room, row.spans, &row.known, &row.valid)
    if row.valid and layout.used_by != s.block_num and is_to_be_learnt(layout):
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
    # The output position of rows that are written in one pass.
    int64_t count, id_used, key_num, property_num
    # Limits of rows, keys and properties.
    int64_t row_room, key_room, property_room
    # The buffer that the views point into, and its first byte.
    int32_t buffer
    const unsigned char* origin
    # The end of the last written record, or NULL.
    const unsigned char* end


cdef bint split_usual(ColumnSink* s, PropertyLayout* layout, const unsigned char* text, int32_t n,
                      int64_t room) noexcept nogil:
    # Takes a text apart that does not fit its layout, into the first spans; False where it is not UTF-8 or names may
    # repeat.
    cdef int valid = False
    s.split_num = split_properties(text, n, room, s.spans, &s.split_known, &valid)
    if not valid or names_may_repeat(text, s.spans, s.split_num):
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
            # Other columns copy their texts from these.
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
    # True if the properties of the next row surely fit; each key takes at least one byte of them.
    return not ((mask & 1 << COL_KEYS and run.key_num + properties_len > run.key_room)
                or (mask & 1 << COL_PROPERTIES and run.property_num + span_num > run.property_room))


cdef int lend(ColumnSink* s, bytes body) except -1:
    # The caller keeps `body` until the row is written.
    if body is None:
        s.body, s.body_len = NULL, 0
    else:
        s.body, s.body_len = <const unsigned char*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body)
    s.body_ready = True
    return 0


cdef bint has_text(ColumnSink* s, TopicTable table, const unsigned char* p, int32_t n) noexcept nogil:
    # The hash is that of the text that Java reads, and malformed bytes are compared as that text.
    cdef uint32_t h = hash_utf8(0, p, n)
    cdef unsigned char* decoded = <unsigned char*>s.name_slots
    if is_utf8(p, n):
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
                                bint valid, unsigned char* scratch, const unsigned char* key, int64_t size,
                                int kinds) noexcept nogil:
    # kinds: 1 = unique key, 2 = pieces of KEYS, 4 = tag.  `room` bytes may be read at the text.
    cdef int64_t start, end
    cdef PropertySpan* span
    if kinds & 1 and known.unique_key >= 0:
        span = spans + known.unique_key
        if same_text(scratch, text + span.split + 1, span.end - span.split - 1, key, size, valid):
            return True
    if kinds & 4 and known.tags >= 0:
        span = spans + known.tags
        if same_text(scratch, text + span.split + 1, span.end - span.split - 1, key, size, valid):
            return True
    if kinds & 2 and known.keys >= 0:
        span = spans + known.keys
        start = span.split + 1
        while start < span.end:
            end = start + before(text + start, 32, span.end - start, room - start)
            if end > start and same_text(scratch, text + start, end - start, key, size, valid):
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
    # The key that the record at a place must have, and the number of rows of its run of places.
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

        ValueError where offsets lead outside the data.
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
        release(&self.busy)
        return p

    cdef void give_back(self, unsigned char* p, int64_t size) noexcept:
        if not atomic_or(&self.busy, 1):
            if not self.closed and self.num < POOL_ROOMS and SMALL_ROOM <= size <= POOL_BYTES - self.bytes:
                self.rooms[self.num], self.sizes[self.num] = p, size
                self.num += 1
                self.bytes += size
                p = NULL
            release(&self.busy)
        PyMem_RawFree(p)

    cdef void close(self) noexcept:
        cdef int64_t i
        if not atomic_or(&self.busy, 1):
            self.closed = True
            for i in range(self.num):
                PyMem_RawFree(self.rooms[i])
            self.num = self.bytes = 0
            release(&self.busy)

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
        Bytes of bodies and properties of a batch, which has one row in any case.
    check_crc : int
        See `decode_record`; a record that fails is marked as corrupt.  CRCs are computed for ``corrupt``, and before a body
        is decompressed.
    decompress : callable, optional
        Takes the stored body and the sysFlag of a record whose body is compressed; returns bytes, or None for a body that is
        not what its flag says: the row is marked as corrupt and has the body as stored.  Without it bodies stay as they are.
    host_text : callable
        Takes the 20 bytes of an IPv6 host; returns its text in ASCII, at most 64 bytes.
    views : bool
        Texts and bytes are not copied: each value is a view (`rmq_put_view`), into the segment itself or into data of the
        batch.

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
    # For each column a `Room` or None; `valid` and bits are arrays.
    cdef list main, valid, data, child
    cdef RoomPool pool
    cdef object hosts, spans, layouts, chosen, name_ends, name_slots
    cdef readonly bint views
    # The parts of segments that the views of this batch point into, as positions; an end is relative to its begin, 0 before
    # the first view.
    cdef list lent
    cdef int64_t[MAX_REGIONS] lent_begins
    cdef int64_t[MAX_REGIONS] lent_ends
    cdef int64_t[BUFFER_NUM] data_used
    cdef int64_t[BUFFER_NUM] child_used
    cdef int64_t[BUFFER_NUM] null_num
    cdef int64_t[BUFFER_NUM] data_size
    cdef int64_t[BUFFER_NUM] child_size
    # The conditions that a row must meet.
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
        # None after wrong arguments.
        if self.pool is not None:
            self.pool.close()

    def choose(self, topics=None, queue_ids=None, tags=None, int64_t begin_timestamp=-INT64_MAX - 1,
               int64_t end_timestamp=INT64_MAX):
        """Choose the records that become rows; None = any.

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
        # Set the output of a column's texts, and its size.
        s.data[i] = address_of(self.data[i])
        s.child[i] = <int32_t*>address_of(self.child[i])
        # A position in the data has 32 bits.
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
        # The number of the buffer that holds `region` beginning at or before `begin`; 0 if a batch can hold no more.
        # `taken` are the bits of buffers that the caller has already.
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
        s.topic_valid = is_utf8(topic, n)
        put_view(s.topic_view, topic, n, room, buffer, topic - origin if s.views else 0)

    cdef int64_t view_rows(self, ColumnSink* s, const unsigned char* base, int64_t at, int64_t size, int64_t limit,
                           int64_t base_offset, const int32_t* ids, int64_t id_num, int32_t buffer,
                           const unsigned char* origin) noexcept nogil:
        # Writes rows as views in one pass, where no row is staged: from record to record for as long as these are of
        # the usual kind, with hosts of IPv4, texts of UTF-8 and no body to be decompressed.  Where the first other one
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
            return SKIPPED
        if not self.any_queue and not self.wants_queue(ids, id_num, r.queue_id):
            return SKIPPED
        if self.topics is not None:
            if not is_known_topic(s, p, r):
                self.know_topic(s, p + r.topic_pos, r.topic_len, row.room - r.topic_pos, row.buffer, row.origin)
            if not s.topic_wanted:
                return SKIPPED
        if wanted != NULL and not same_text(<unsigned char*>s.name_slots, p + r.topic_pos, r.topic_len, wanted.view.topic,
                                            wanted.view.topic_size):
            return SKIPPED
        row.span_num, row.layout = 0, NULL
        if s.mask & NEEDS_PROPERTIES or wanted != NULL or self.tags is not None:
            split_row(s, row, text)
        if wanted != NULL and not spans_have_key(text, row.room - r.properties_pos, row.spans, &row.known,
                                                 row.valid, <unsigned char*>s.name_slots, wanted.view.key, wanted.view.key_size,
                                                 wanted.kinds):
            return SKIPPED
        if self.tags is not None:
            span = row.spans + row.known.tags
            if row.known.tags < 0 or not has_text(s, self.tags, text + span.split + 1, span.end - span.split - 1):
                return SKIPPED
        return stage_row(s, row)

    cdef int fill_rows(self, ColumnSink* s, const unsigned char* base, int64_t* pos, int64_t size, int64_t limit,
                       int64_t base_offset, const int32_t* ids, int64_t id_num, int32_t buffer,
                       const unsigned char* origin) noexcept nogil:
        cdef StagedRow* row
        cdef int verdict, written
        cdef int64_t at, before_run, most = 1
        cdef bint in_one_pass = s.views and self.tags is None
        # The rows that lacked room last time.
        written = write_rows(s)
        if written != RECORD:
            return written
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
                if verdict == RECORD or verdict == SKIPPED:
                    pos[0] = at + row.r.total_size
                    continue
            written = write_rows(s)
            if written != RECORD:
                return written
            if verdict != WRITE_FIRST:
                return verdict

    cdef bytes body_of(self, const unsigned char* p, int64_t room):
        # The decompressed body of the record at p, None if it is not what its flag says or not a record any more.
        cdef RecordView r
        if parse_record(p, room, &r) != RECORD:
            return None
        stored = PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len)
        return stored if self.decompress is None else self.decompress(stored, r.sys_flag)

    cdef bint provide(self, ColumnSink* s, int verdict, const unsigned char* p, int64_t room) except -1:
        # Provide what the record at p lacks to become a row; False for other verdicts.
        cdef RecordView r
        cdef unsigned char* slot
        cdef const unsigned char* host
        cdef int32_t n
        if verdict == NEED_ROOM:
            self.grow(s)
            return True
        if verdict == NO_WRITER:
            raise SystemError(f"nothing writes the column {COLUMN_NAMES[s.wanting]}: _column_sink.pxd has no branch for it")
        if verdict != NEED_HOST:
            return False
        if parse_record(p, room, &r) != RECORD:
            # The record changed; the next pass judges it.
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
        """Append rows for the chosen records, beginning at `pos`; the GIL is released.

        Parameters
        ----------
        region : Region
            A commit-log segment.
        pos, limit : int
            The first position in the segment, and the one to stop at.
        base_offset : int
            Absolute offset of the segment's first byte; a record with another offset ends the pass.

        Returns
        -------
        (int, Verdict)
            The position of the first record that was not read and the reason; COLUMNS_FULL: call `take` and continue.  A
            record whose CRC fails becomes a row.
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
        cdef int verdict, written
        written = write_rows(s)
        if written != RECORD:
            return written
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
                verdict = SKIPPED
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
                if verdict == RECORD or verdict == SKIPPED:
                    if verdict == RECORD:
                        taken[at[0]] = 1
                        if wanted != NULL:
                            wanted.row_num += 1
                    at[0] += 1
                    continue
            written = write_rows(s)
            if written != RECORD:
                return written
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
            For each place the number of its region; -1 has no row.
        phy_offsets : array of int64
        sizes : array of int32
            Total sizes in bytes that the records must have; empty for any.
        taken : array of uint8
            Becomes 1 for each place that has a row, else 0.
        first : int
            The place to begin with.
        topic, queue_id : bytes, int, optional
            The queue (UTF-8) whose units lead to the places: another message is marked as corrupt, as by `read_queued`.
        queue_offsets : array of int64
            The queue offset of each unit.

        Returns
        -------
        int
            The first place that was not read, because the columns are full; the number of places at the end.
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
        """Append rows as `fill_at` does, for records that have the topic and the key that was asked for.

        Parameters
        ----------
        key_numbers : array of int32
            For each place the number of its key in `texts`.
        kinds : int
            A sum of 1 = the unique key, 2 = the pieces of KEYS, 4 = the tag.
        max_num : int
            The largest number of rows for a run of places with the same key.
        row_num : int
            The number of rows already taken from the run that `first` belongs to.
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
        # Set number and address of each region's buffer; False if this batch can hold no more.
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
        cdef Region lost = None
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
                if region.drop():
                    lost = region
            self.leave()
            if lost is not None:
                lost.raise_lost()

    cdef int enter(self) except -1:
        if atomic_or(&self.busy, 1):
            raise RuntimeError("these columns are being filled by another thread")
        return 0

    cdef void leave(self) noexcept:
        release(&self.busy)

    def take(self):
        """Hand over the rows and begin again.

        Returns
        -------
        (int, dict, list)
            How many rows, and for each column (values, valid, null_num, data, child, data 2, child 2): NumPy arrays in the
            layout of Arrow's buffers.  `values` are the numbers (``corrupt``: bits), or for text, lists and maps the offsets;
            `valid` bits are None where nothing is null; `data` are the bytes of the text; `child` are the offsets of the texts
            in a list, or of a map's names, and the last two those of its values.  With `views`, offsets of text are views,
            buffer 0 is the column's data, and the others are those of the list: read-only bytes of the segments, which stay
            mapped as long as these live.

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

        Parameters
        ----------
        import_array : callable
            Takes the address of an ``ArrowArray``, which it moves from, and a type (`pyarrow.Array._import_from_c`).
        types : sequence
            The type of each column.

        Returns
        -------
        list
            What `import_array` returned for each column.
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
    cdef int32_t span_num = 0, unusual = SYS_BORN_V6 | SYS_STORE_V6 | (
        SYS_COMPRESSED if mask & (1 << COL_BODY | 1 << COL_CORRUPT) else 0)
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
                    (mask & 1 << COL_TOPIC and not s.topic_valid)
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
        What `chain_entries` returned for the same `num` hashes, the newest file first.

    Returns
    -------
    (numpy.ndarray of int32, numpy.ndarray of int64, bool)
        Number of the hash and phy offset of each entry, of one hash in the order in which they came; an entry for the same
        record as the one before is left out.  The last says whether the offsets of every hash fall.
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
    """(int32, uint8 array) or None: the offsets and bytes of ASCII texts as a text column; None for others, or above 2 GiB."""
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
