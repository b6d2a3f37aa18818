# How parsed records become the columns of Arrow: the buffers of one batch (`ColumnSink`), and what writes each column
# into them (`write_...`), as copies or as views.  It asks for no memory: a row that does not fit says what it lacks.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from rmqstore._bytes cimport (
    before, copy_ascii, copy_bytes, get_i32, put_hex, put_hex_8_8, put_view, VIEW_INLINE,
)
from rmqstore._core cimport RECORD, RECORD_BORN_HOST, RECORD_PHY_OFFSET
from rmqstore._java_text cimport hash_units8, is_utf8, put_java_utf8
from rmqstore._properties cimport (
    KnownSpans, names_may_repeat, PropertyLayout, PropertySpan, put_name_view, put_value_view,
)
from rmqstore._record cimport RecordView


cdef enum:
    # In the order of `COLUMN_NAMES`.
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


cdef enum:
    HAS_OFFSETS = (1 << COL_TOPIC | 1 << COL_MSG_ID | 1 << COL_KEYS | 1 << COL_TAGS | 1 << COL_BODY | 1 << COL_PROPERTIES
                   | 1 << COL_BORN_HOST | 1 << COL_STORE_HOST | 1 << COL_UNIQUE_KEY | 1 << COL_BODY_STORED)
    HAS_CHILD = 1 << COL_KEYS | 1 << COL_PROPERTIES | 1 << COL_VALUES
    HAS_NULLS = 1 << COL_TAGS | 1 << COL_UNIQUE_KEY
    IS_INT64 = (1 << COL_QUEUE_OFFSET | 1 << COL_PHY_OFFSET | 1 << COL_BORN_TIMESTAMP | 1 << COL_STORE_TIMESTAMP
                | 1 << COL_PREPARED_TRANSACTION_OFFSET)
    IS_INT32 = 1 << COL_QUEUE_ID | 1 << COL_SIZE | 1 << COL_FLAG | 1 << COL_SYS_FLAG | 1 << COL_RECONSUME_TIMES
    HAS_TEXT = (1 << COL_TOPIC | 1 << COL_MSG_ID | 1 << COL_KEYS | 1 << COL_TAGS | 1 << COL_PROPERTIES | 1 << COL_BORN_HOST
                | 1 << COL_STORE_HOST | 1 << COL_UNIQUE_KEY)
    # Columns of texts or bytes: with views each value takes VIEW_SIZE bytes of `main`, likewise each text of a child.
    HAS_VIEWS = HAS_OFFSETS & ~(1 << COL_KEYS | 1 << COL_PROPERTIES)
    VIEW_SIZE = 16
    # Groups of columns, tested first if few are requested.
    IN_BODY = 1 << COL_BODY | 1 << COL_BODY_STORED
    IN_HEAD = 1 << COL_TOPIC | 1 << COL_MSG_ID | 1 << COL_BORN_HOST | 1 << COL_STORE_HOST
    # The columns of a scan that names none.
    USUAL_COLUMNS = (1 << COL_NUM) - 1 & ~(1 << COL_UNIQUE_KEY | 1 << COL_BODY_STORED) | 1 << COL_VALUES
    NEEDS_PROPERTIES = 1 << COL_KEYS | 1 << COL_TAGS | 1 << COL_PROPERTIES | 1 << COL_UNIQUE_KEY
    SYS_COMPRESSED = 0x1
    # Spare bytes after a text, so that it is copied in whole steps.
    TEXT_SLACK = 64
    MAX_SPANS = 8200         # of a properties text of 32767 bytes
    SPAN_ROOM = 2 * MAX_SPANS
    STAGED_ROWS = 64         # records that are parsed before their columns are written, one column after the other
    NAME_SLOTS = 32768       # also enough bytes for any properties text after its decoding
    HOST_SLOTS = 256         # of each kind: born or stored, IPv4 or IPv6
    HOST_ROOM = 96           # length of the address bytes, these, length of the text, the text
    HOST_KEY = 1
    HOST_TEXT_LEN = 24
    HOST_POS = 28            # position of the text in the data of a batch with views, if it was copied there
    HOST_TEXT = 32
    LAYOUTS = 32             # slots, chosen by the lengths of properties text and topic
    LAYOUT_PATIENCE = 32     # texts in a row that must differ from a layout before it is replaced, which is slow
    ID_SIZE = 32             # digits of a message id with an IPv4 host
    MAX_REGIONS = 64
    # Limits of the memory kept for later batches; blocks below SMALL_ROOM are left to malloc.
    POOL_ROOMS = 256
    POOL_BYTES = 16 * 1024 * 1024
    SMALL_ROOM = 4096
    # Results of stage_row and write_rows in addition to the verdicts.
    NEED_ROOM = 110
    NEED_BODY = 111
    NEED_HOST = 112
    SKIPPED = 113
    WRITE_FIRST = 114
    NO_WRITER = 115          # a column without a writer: a bug


ctypedef uint8_t Copies
ctypedef uint64_t Views


cdef struct StagedRow:
    # A parsed record that becomes a row; valid while its segment stays pinned.
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
    PropertyLayout* layout  # NULL for a text that was split without a known layout
    KnownSpans known
    int32_t span_num
    int valid
    bint ok
    RecordView r


cdef struct ColumnSink:
    # The output of one pass: addresses in the arrays of one ArrowColumns.
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
    # The result of `split_usual`, in the first spans.
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
    # Records that are parsed and not written yet, and the sums of their sizes.
    StagedRow rows[STAGED_ROWS]
    int64_t row_num
    int64_t span_used
    int64_t topic_need
    int64_t properties_need
    int64_t body_need
    int64_t body_stored_need
    # The decompressed body of the row that needs it; NULL if it cannot be decompressed.
    const unsigned char* body
    int64_t body_len
    bint body_ready
    # The column that is too small for the next row, and the bytes that it needs.
    int32_t wanting
    int64_t wanted
    # In lookups: the record that needs something.
    int32_t number
    int64_t pos
    # The topic of the previous record or NULL, whether it is selected, and its view if it is UTF-8.
    const unsigned char* topic
    int32_t topic_len
    bint topic_wanted
    bint topic_valid
    unsigned char topic_view[VIEW_SIZE]
    # The hosts of the previous row, if it was written in one pass: bytes and views; digits of the second.
    bint host_known[2]
    uint64_t host[2]
    unsigned char host_view[2][VIEW_SIZE]
    unsigned char store_digits[VIEW_SIZE]


cdef inline int64_t put_text(unsigned char* to, const unsigned char* p, int64_t n, int64_t room, bint valid) noexcept nogil:
    # Returns the number of bytes written; `room` bytes may be read at p.
    if valid:
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
    # Bits are written once a column has its first null: a column without nulls has no bitmap.
    cdef int64_t k
    if not valid:
        if s.null_num[column] == 0:
            memset(s.valid[column], 0xFF, i >> 3)
            for k in range(i & ~<int64_t>7, i):
                set_bit(s.valid[column], k)
        s.null_num[column] += 1
    elif s.null_num[column]:
        set_bit(s.valid[column], i)


cdef inline int put_decimal(unsigned char* to, int64_t value) noexcept nogil:
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
    # Each kind has its own slots, so that the hosts of one record do not evict each other.
    cdef uint64_t a, b = 0
    memcpy(&a, host, 8)
    if n == 20:
        memcpy(&b, host + 12, 8)
    a = ((a ^ b * 31) * 0x9E3779B97F4A7C15u) >> 56
    return hosts + HOST_ROOM * (a + (HOST_SLOTS if column == COL_STORE_HOST else 0) + (2 * HOST_SLOTS if n == 20 else 0))


cdef inline bint lacks_host(ColumnSink* s, int column, const unsigned char* host, int32_t n) noexcept nogil:
    # The text of an IPv6 address is made by the caller.
    cdef unsigned char* slot
    if n == 8:
        return False
    slot = host_slot(s.hosts, column, host, n)
    if slot[0] == n and memcmp(slot + HOST_KEY, host, n) == 0:
        return False
    s.wanting = column
    return True


cdef inline unsigned char* host_text(ColumnSink* s, int column, const unsigned char* host, int32_t n) noexcept nogil:
    # The slot with the text "a.b.c.d:port", cached because stores have few hosts.
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


cdef inline bint repeats(ColumnSink* s, const int32_t* offsets, int64_t n) noexcept nogil:
    # True if two of the `n` names at `offsets` are equal.  Equal names are resolved as in a dict: first place, last value.
    # chosen[k] becomes the number of the property that gives the k-th its value, -1 for a repeated name.
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


ctypedef fused Form:
    # Compile-time flag: texts and bytes are copied, or are views of the records.
    Copies
    Views


cdef struct TextOut:
    # The output of a column of texts or bytes, or of a child: ends or views, and the data.
    unsigned char* main
    unsigned char* data
    int64_t used


cdef inline TextOut text_out(ColumnSink* s, int column, Form form) noexcept nogil:
    # The output for the staged rows.
    cdef TextOut out
    out.main = s.main[column] + (VIEW_SIZE * s.count if Form is Views else <int64_t>sizeof(int32_t) * (s.count + 1))
    out.data, out.used = s.data[column], s.data_used[column]
    return out


cdef inline TextOut child_out(ColumnSink* s, int column, Form form) noexcept nogil:
    # The output for the texts of lists; number 0 is the first of the batch.
    cdef TextOut out
    out.main = <unsigned char*>s.child[column] + (0 if Form is Views else <int64_t>sizeof(int32_t))
    out.data, out.used = s.data[column], s.data_used[column]
    return out


cdef inline void put_own(TextOut* out, int64_t i, int64_t n, Form form) noexcept nogil:
    # The `n` bytes that were just written after the data: as the text of row `i`.
    if Form is Copies:
        out.used += n
        (<int32_t*>out.main)[i] = <int32_t>out.used
    else:
        put_view(out.main + VIEW_SIZE * i, out.data + out.used, n, n + TEXT_SLACK, 0, out.used)
        if n > VIEW_INLINE:
            out.used += n


cdef inline void put_value(TextOut* out, int64_t i, StagedRow* row, const unsigned char* p, int64_t n, int64_t room,
                           bint valid, Form form) noexcept nogil:
    # A text of the record.  With views only malformed UTF-8 is copied, as Java decodes it.
    cdef int64_t taken
    if Form is Copies:
        put_own(out, i, put_text(out.data + out.used, p, n, room, valid), form)
    else:
        if not valid:
            taken = put_java_utf8(out.data + out.used, p, n)
            if taken != n or memcmp(out.data + out.used, p, n) != 0:
                put_own(out, i, taken, form)
                return
        put_view(out.main + VIEW_SIZE * i, p, n, room, row.buffer, p - row.origin)


cdef inline void put_bytes(TextOut* out, int64_t i, StagedRow* row, const unsigned char* p, int64_t n, int64_t room,
                           Form form) noexcept nogil:
    if Form is Views:
        put_view(out.main + VIEW_SIZE * i, p, n, room, row.buffer, p - row.origin)
    else:
        copy_bytes(out.data + out.used, p, n, room)
        put_own(out, i, n, form)


cdef inline void write_topics(ColumnSink* s, Form form) noexcept nogil:
    cdef TextOut out = text_out(s, COL_TOPIC, form)
    cdef int64_t i, room
    cdef StagedRow* row
    cdef const unsigned char* text
    for i in range(s.row_num):
        row = s.rows + i
        text, room = row.p + row.r.topic_pos, row.room - row.r.topic_pos
        if Form is Copies and copy_ascii(out.data + out.used, text, row.r.topic_len, room):
            put_own(&out, i, row.r.topic_len, form)
        else:
            put_value(&out, i, row, text, row.r.topic_len, room, is_utf8(text, row.r.topic_len), form)
    s.data_used[COL_TOPIC] = out.used


cdef inline int64_t put_message_id(unsigned char* to, StagedRow* row) noexcept nogil:
    # Write the upper-case hexadecimal digits of store host and phy offset; returns their number.
    if row.r.store_host_len == 8:
        put_hex_8_8(to, row.p + row.r.store_host_pos, row.p + RECORD_PHY_OFFSET)
        return 32
    put_hex(to, row.p + row.r.store_host_pos, 20)
    put_hex(to + 40, row.p + RECORD_PHY_OFFSET, 8)
    return 56


cdef inline void write_message_ids(ColumnSink* s, Form form) noexcept nogil:
    cdef TextOut out = text_out(s, COL_MSG_ID, form)
    cdef int64_t i
    for i in range(s.row_num):
        put_own(&out, i, put_message_id(out.data + out.used, s.rows + i), form)
    s.data_used[COL_MSG_ID] = out.used


cdef inline void put_host(TextOut* out, int64_t i, unsigned char* slot, Form form) noexcept nogil:
    # With views the text of a host is written once a batch, unless another host takes its slot.
    cdef int64_t length = slot[HOST_TEXT_LEN]
    cdef int32_t pos
    if Form is Views:
        memcpy(&pos, slot + HOST_POS, sizeof(pos))
        if 0 <= pos <= out.used - length and memcmp(out.data + pos, slot + HOST_TEXT, length) == 0:
            put_view(out.main + VIEW_SIZE * i, slot + HOST_TEXT, length, 64, 0, pos)
            return
        pos = <int32_t>out.used
        memcpy(slot + HOST_POS, &pos, sizeof(pos))
    memcpy(out.data + out.used, slot + HOST_TEXT, 64)
    put_own(out, i, length, form)


cdef inline void view_host(ColumnSink* s, int column, unsigned char* to, const unsigned char* host, int32_t n) noexcept nogil:
    # Write the view of one host to `to`.
    cdef TextOut out = text_out(s, column, <Views>0)
    out.main = to
    put_host(&out, 0, host_text(s, column, host, n), <Views>0)
    s.data_used[column] = out.used


cdef inline void write_hosts(ColumnSink* s, int column, Form form) noexcept nogil:
    cdef TextOut out = text_out(s, column, form)
    cdef int64_t i
    cdef int32_t n, last_n = 0
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
        # Usually the host of the previous row.
        if n != 8 or last_n != 8 or here != last:
            slot = host_text(s, column, host, n)
        elif Form is Views:
            memcpy(out.main + VIEW_SIZE * i, out.main + VIEW_SIZE * (i - 1), VIEW_SIZE)
            continue
        put_host(&out, i, slot, form)
        last, last_n = here, n
    s.data_used[column] = out.used


cdef inline void write_nullable(ColumnSink* s, int column, Form form) noexcept nogil:
    cdef TextOut out = text_out(s, column, form)
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
            put_value(&out, i, row, text + span.split + 1, span.end - span.split - 1,
                      row.room - row.r.properties_pos - span.split - 1, row.valid, form)
        elif Form is Views:
            memset(out.main + VIEW_SIZE * i, 0, VIEW_SIZE)
        else:
            put_own(&out, i, 0, form)
        mark_valid(s, column, s.count + i, number >= 0)
    s.data_used[column] = out.used


cdef inline void write_bodies(ColumnSink* s, Form form) noexcept nogil:
    cdef TextOut out = text_out(s, COL_BODY, form)
    cdef int64_t i
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        if Form is Views and row.body_lent:
            copy_bytes(out.data + out.used, row.body, row.body_len, row.body_room)
            put_own(&out, i, row.body_len, form)
        else:
            put_bytes(&out, i, row, row.body, row.body_len, row.body_room, form)
    s.data_used[COL_BODY] = out.used


cdef inline void write_stored_bodies(ColumnSink* s, Form form) noexcept nogil:
    cdef TextOut out = text_out(s, COL_BODY_STORED, form)
    cdef int64_t i
    cdef StagedRow* row
    for i in range(s.row_num):
        row = s.rows + i
        put_bytes(&out, i, row, row.p + row.r.body_pos, row.r.body_len, row.room - row.r.body_pos, form)
    s.data_used[COL_BODY_STORED] = out.used


cdef inline void write_keys(ColumnSink* s, Form form) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_KEYS] + s.count + 1
    cdef TextOut out = child_out(s, COL_KEYS, form)
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
                    put_value(&out, num, row, text + start, end - start, room, row.valid, form)
                    num += 1
                start = end + 1
        ends[i] = <int32_t>num
    s.data_used[COL_KEYS], s.child_used[COL_KEYS] = out.used, num


cdef inline bint names_repeat(ColumnSink* s, TextOut* out, StagedRow* row, const unsigned char* text,
                              int64_t room) noexcept nogil:
    # `repeats` for the names of a row, which are written to the free space after the data.
    cdef int64_t used = out.used, k
    cdef PropertySpan* span
    s.name_ends[0] = <int32_t>used
    for k in range(row.span_num):
        span = row.spans + k
        used += put_text(out.data + used, text + span.start, span.split - span.start, room - span.start, row.valid)
        s.name_ends[k + 1] = <int32_t>used
    return repeats(s, s.name_ends, row.span_num)


cdef inline int64_t put_property_views(ColumnSink* s, int64_t num, const PropertyLayout* layout,
                                       const unsigned char* text, int32_t buffer, int64_t pos) noexcept nogil:
    # Write names and values of a text that matches `layout`, at `pos` of a buffer, beginning with number `num`; returns
    # the number after the last.
    cdef unsigned char* names = <unsigned char*>s.child[COL_PROPERTIES] + VIEW_SIZE * num
    cdef unsigned char* values = <unsigned char*>s.child[COL_VALUES] + VIEW_SIZE * num
    cdef int32_t k, span_num = layout.span_num
    for k in range(span_num):
        put_name_view(names + VIEW_SIZE * k, layout, k, text, buffer, pos)
        put_value_view(values + VIEW_SIZE * k, layout, k, text, buffer, pos)
    return num + span_num


cdef inline void put_layout_names(TextOut* out, int64_t num, StagedRow* row) noexcept nogil:
    # The names of a text whose layout is known; `num` is the number of the first.
    cdef int32_t k
    copy_bytes(out.data + out.used, row.layout.names, row.layout.names_len, row.layout.names_len + TEXT_SLACK)
    for k in range(row.span_num):
        (<int32_t*>out.main)[num + k] = <int32_t>out.used + row.layout.name_ends[k]
    out.used += row.layout.names_len


cdef inline void write_properties(ColumnSink* s, Form form) noexcept nogil:
    cdef int32_t* ends = <int32_t*>s.main[COL_PROPERTIES] + s.count + 1
    cdef TextOut names = child_out(s, COL_PROPERTIES, form), values = child_out(s, COL_VALUES, form)
    cdef int64_t num = s.child_used[COL_PROPERTIES], i, k, room
    cdef StagedRow* row
    cdef PropertySpan* span
    cdef const unsigned char* text
    cdef bint chosen, named
    for i in range(s.row_num):
        row = s.rows + i
        text, room = row.p + row.r.properties_pos, row.room - row.r.properties_pos
        if Form is Views and row.layout != NULL and row.r.properties_len + VIEW_SIZE <= room:
            num = put_property_views(s, num, row.layout, text, row.buffer, text - row.origin)
            ends[i] = <int32_t>num
            continue
        named = Form is Copies and row.layout != NULL
        if named:
            put_layout_names(&names, num, row)
        # Different malformed names may be read as the same text; those of a layout are known to differ.
        chosen = (row.layout == NULL and row.span_num > 1
                  and (not row.valid or names_may_repeat(text, row.spans, row.span_num))
                  and names_repeat(s, &names, row, text, room))
        for k in range(row.span_num):
            if chosen and s.chosen[k] < 0:
                continue
            span = row.spans + k
            if not named:
                put_value(&names, num, row, text + span.start, span.split - span.start, room - span.start, row.valid, form)
            if chosen:
                span = row.spans + s.chosen[k]
            put_value(&values, num, row, text + span.split + 1, span.end - span.split - 1, room - span.split - 1, row.valid,
                      form)
            num += 1
        ends[i] = <int32_t>num
    s.data_used[COL_PROPERTIES], s.data_used[COL_VALUES] = names.used, values.used
    s.child_used[COL_PROPERTIES] = s.child_used[COL_VALUES] = num


cdef inline int write_int64s(ColumnSink* s, int column) noexcept nogil:
    cdef int64_t* out = <int64_t*>s.main[column] + s.count
    cdef RecordView* r = &s.rows[0].r
    # The field of the first row; that of the next one lies a StagedRow after it.
    cdef int64_t* field
    cdef int64_t i
    if column == COL_QUEUE_OFFSET:
        field = &r.queue_offset
    elif column == COL_PHY_OFFSET:
        field = &r.phy_offset
    elif column == COL_BORN_TIMESTAMP:
        field = &r.born_timestamp
    elif column == COL_STORE_TIMESTAMP:
        field = &r.store_timestamp
    elif column == COL_PREPARED_TRANSACTION_OFFSET:
        field = &r.prepared_transaction_offset
    else:
        return NO_WRITER
    for i in range(s.row_num):
        out[i] = (<int64_t*>(<char*>field + i * sizeof(StagedRow)))[0]
    return RECORD


cdef inline int write_int32s(ColumnSink* s, int column) noexcept nogil:
    cdef int32_t* out = <int32_t*>s.main[column] + s.count
    cdef RecordView* r = &s.rows[0].r
    cdef int32_t* field
    cdef int64_t i
    if column == COL_QUEUE_ID:
        field = &r.queue_id
    elif column == COL_SIZE:
        field = &r.total_size
    elif column == COL_FLAG:
        field = &r.flag
    elif column == COL_SYS_FLAG:
        field = &r.sys_flag
    elif column == COL_RECONSUME_TIMES:
        field = &r.reconsume_times
    else:
        return NO_WRITER
    for i in range(s.row_num):
        out[i] = (<int32_t*>(<char*>field + i * sizeof(StagedRow)))[0]
    return RECORD


cdef inline int write_texts(ColumnSink* s, int column, Form form) noexcept nogil:
    if column == COL_TOPIC:
        write_topics(s, form)
    elif column == COL_MSG_ID:
        write_message_ids(s, form)
    elif column == COL_KEYS:
        write_keys(s, form)
    elif column == COL_PROPERTIES:
        write_properties(s, form)
    elif column == COL_BODY:
        write_bodies(s, form)
    elif column == COL_BODY_STORED:
        write_stored_bodies(s, form)
    elif column == COL_TAGS or column == COL_UNIQUE_KEY:
        write_nullable(s, column, form)
    elif column == COL_BORN_HOST or column == COL_STORE_HOST:
        write_hosts(s, column, form)
    else:
        return NO_WRITER
    return RECORD


cdef inline int write_bits(ColumnSink* s, int column) noexcept nogil:
    cdef int64_t i
    if column != COL_CORRUPT:
        return NO_WRITER
    for i in range(s.row_num):
        if not s.rows[i].ok:
            set_bit(s.main[COL_CORRUPT], s.count + i)
    return RECORD


cdef inline bint lack_room(ColumnSink* s) noexcept nogil:
    # True if the staged rows may not fit.  A text of malformed bytes triples.
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


cdef inline int write_rows(ColumnSink* s) noexcept nogil:
    # Write the staged rows, one column after the other: all of them, or none if a column lacks room.
    cdef int64_t mask = s.mask
    cdef int column, verdict
    if s.row_num == 0:
        return RECORD
    if mask & HAS_OFFSETS and lack_room(s):
        return NEED_ROOM
    for column in range(COL_NUM):
        if not mask >> column & 1:
            continue
        if IS_INT64 >> column & 1:
            verdict = write_int64s(s, column)
        elif IS_INT32 >> column & 1:
            verdict = write_int32s(s, column)
        elif not HAS_OFFSETS >> column & 1:
            verdict = write_bits(s, column)
        else:
            verdict = write_texts(s, column, <Views>0) if s.views else write_texts(s, column, <Copies>0)
        if verdict != RECORD:
            s.wanting = column
            return verdict
    s.count += s.row_num
    s.block_num += 1
    s.row_num = s.span_used = 0
    s.topic_need = s.properties_need = s.body_need = s.body_stored_need = 0
    return RECORD
