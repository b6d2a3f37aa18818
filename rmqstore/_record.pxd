# A record of the commit log over a pointer and integers: parse, judge, compare with a key, encode, ask memory for it.
#
# Layout: Apache RocketMQ 5.5.0 (docs/formats.md).  Every number that is read is hostile.

from cpython.object cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t
from libc.string cimport memchr, memcmp, memcpy

from rmqstore._bytes cimport (
    acquire_i32_at, check, copy_exactly, get_i16, get_i32, get_i64, is_ascii, load_i32_at, prefetch, publish_i32_at,
    put_i16, put_i32, put_i64,
)
from rmqstore._core cimport (
    BAD_BODY_CRC, BAD_LENGTH, BAD_MAGIC, BAD_PHY_OFFSET, BAD_PROP_CRC, BAD_SIZE, BLANK, BLANK_SIZE, C_MAGIC_BLANK,
    C_MAGIC_V1, C_MAGIC_V2, EMPTY, KEYS_ONLY, PROP_CRC_SIZE, RECORD, RECORD_BODY_CRC, RECORD_BORN_HOST,
    RECORD_BORN_TIMESTAMP, RECORD_FIXED_SIZE, RECORD_FLAG, RECORD_MAGIC, RECORD_PHY_OFFSET, RECORD_QUEUE_ID,
    RECORD_QUEUE_OFFSET, RECORD_SYS_FLAG, SYS_BORN_V6, SYS_STORE_V6, TAG, UNIQUE_KEY,
)
from rmqstore._crc32 cimport crc32_update
from rmqstore._java_text cimport hash_utf8, is_utf8
from rmqstore._properties cimport find_properties, KnownProperties, parse_decimal, put_key_hashes, value_of
from rmqstore._python cimport PyUnicode_DATA, PyUnicode_DecodeUTF8, PyUnicode_New


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


cdef inline int parse_head(const unsigned char* p, int64_t room, RecordView* r) noexcept nogil:
    # Parse the fields before the hosts of a record at p with `room` bytes to the end of the segment; `parse_rest` follows.
    # All sums are in 64 bits, every part is checked against the total size before it is read.
    cdef int64_t total
    if room < BLANK_SIZE:
        return EMPTY
    r.total_size = acquire_i32_at(p)
    r.magic = load_i32_at(p + RECORD_MAGIC)
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
    return RECORD


cdef inline int parse_rest(const unsigned char* p, RecordView* r, int32_t born_host_len,
                           int32_t store_host_len) noexcept nogil:
    # Parse the hosts, of the given lengths, and the rest.
    cdef int64_t at, total = r.total_size
    r.born_host_len, r.store_host_len = born_host_len, store_host_len
    if total < RECORD_FIXED_SIZE - 16 + born_host_len + store_host_len:
        return BAD_LENGTH
    at = RECORD_BORN_HOST + born_host_len
    r.store_timestamp = get_i64(p + at)
    r.store_host_pos = <int32_t>(at + 8)
    at += 8 + store_host_len
    r.reconsume_times = get_i32(p + at)
    r.prepared_transaction_offset = get_i64(p + at + 4)
    r.body_len = get_i32(p + at + 12)
    r.body_pos = <int32_t>(at + 16)
    at += 16
    # After the body: the topic length (1 or 2 bytes) and the properties length (2).
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


cdef inline int parse_record(const unsigned char* p, int64_t room, RecordView* r) noexcept nogil:
    # One record at p with `room` bytes to the end of the segment.
    cdef int verdict = parse_head(p, room, r)
    if verdict != RECORD:
        return verdict
    return parse_rest(p, r, 20 if r.sys_flag & SYS_BORN_V6 else 8, 20 if r.sys_flag & SYS_STORE_V6 else 8)


cdef inline bint body_crc_ok(const unsigned char* p, RecordView* r) noexcept nogil:
    # An empty body has CRC 0 (RocketMQ 5.5.0 UtilAll.crc32); crc32_update gives 0 for it as well.
    return <int32_t>(crc32_update(0, p + r.body_pos, r.body_len) & 0x7FFFFFFFu) == r.body_crc


cdef inline bint ends_with_crc(const unsigned char* text, int64_t n) noexcept nogil:
    # `__CRC32#` 0x01 ten digits 0x02 as the last 20 bytes (enabledAppendPropCRC, RocketMQ 5.2.0 and later).
    return n >= PROP_CRC_SIZE and memcmp(text + n - PROP_CRC_SIZE, <const char*>b"__CRC32#\x01", 9) == 0


cdef inline bint has_prop_crc(const unsigned char* p, RecordView* r) noexcept nogil:
    return ends_with_crc(p + r.properties_pos, r.properties_len)


cdef inline int64_t stored_prop_crc(const unsigned char* p, RecordView* r) noexcept nogil:
    # The number of a property CRC, or -1 if its text is no number; its least significant digit is first.
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


cdef inline bint prop_crc_ok(const unsigned char* p, RecordView* r) noexcept nogil:
    # True also without a property CRC.
    return not has_prop_crc(p, r) or stored_prop_crc(p, r) == (
        <int64_t>(crc32_update(0, p, r.total_size - PROP_CRC_SIZE) & 0x7FFFFFFFu))


cdef inline int64_t unit_code_of(const unsigned char* p, RecordView* r, KnownProperties* k, int64_t tags_code, const int64_t* delays,
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


cdef inline object ascii_of(const unsigned char* p, int32_t n):
    cdef str text = PyUnicode_New(n, 127)
    copy_exactly(<unsigned char*>PyUnicode_DATA(<PyObject*>text), p, n)
    return text


cdef inline object wide_text_of(const unsigned char* p, int32_t n):
    # Of valid UTF-8 that is not ASCII; None where a character is beyond 16 bits.
    cdef int32_t i, num = 0
    cdef unsigned char widest = 0
    cdef uint16_t* to
    cdef str text
    for i in range(n):
        num += (p[i] & 0xC0) != 0x80
        widest = max(widest, p[i])
    if widest >= 0xF0 or widest < 0xC4:
        return None
    text = PyUnicode_New(num, 0xFFFF)
    to = <uint16_t*>PyUnicode_DATA(<PyObject*>text)
    i = 0
    while i < n:
        if p[i] < 0x80:
            to[0] = p[i]
            i += 1
        elif p[i] < 0xE0:
            to[0] = <uint16_t>((p[i] & 0x1F) << 6 | (p[i + 1] & 0x3F))
            i += 2
        else:
            to[0] = <uint16_t>((p[i] & 0x0F) << 12 | (p[i + 1] & 0x3F) << 6 | (p[i + 2] & 0x3F))
            i += 3
        to += 1
    return text


cdef inline object text_of(const unsigned char* p, int32_t n):
    if is_ascii(p, n):
        return ascii_of(p, n)
    if is_utf8(p, n):
        text = wide_text_of(p, n)
        if text is not None:
            return text
    # rmqstore.message.message registers the handler that replaces malformed parts as Java does.
    return PyUnicode_DecodeUTF8(<const char*>p, n, <const char*>b"rmqstore.java")


cdef inline int judge_record(const unsigned char* p, int64_t room, int64_t phy_offset, int check_crc,
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
    # Records ahead of the current one whose first cache lines are prefetched, and whose others; with records at random
    # places each line would be a cache miss of its own.
    HEAD_AHEAD = 16
    TAIL_AHEAD = 4
    # Records ahead whose first line alone is prefetched, TOUCHED in a row: a page walk takes as long as a cache miss, and
    # the processor overlaps only those that follow each other closely.
    TOUCH_AHEAD = 48
    TOUCHED = 32
    # Bytes of a record prefetched before its size is known: waiting for the size costs more than a useless prefetch.  The
    # hardware prefetches the rest of a long body.
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
    # Prefetch the bytes after the head.  A hostile size costs only useless prefetches.
    cdef int64_t total, at = HEAD
    if room < BLANK_SIZE:
        return
    total = load_i32_at(p)
    if total > room:
        return
    while at < total and at < FETCHED:
        prefetch(p + at)
        at += LINE
    # Records are not aligned to cache lines: the last bytes, with topic and properties, may be in one more.
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
        prefetch(p + at + LINE)
        at += 2 * LINE


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


cdef inline bint has_key(const unsigned char* p, int64_t room, RecordView* r, const unsigned char* topic,
                         Py_ssize_t topic_len, const unsigned char* wanted, Py_ssize_t n, int kind) noexcept nogil:
    # `room` bytes may be read at p.  KEYS is split at single spaces; empty pieces do not count.
    cdef const unsigned char* text = p + r.properties_pos
    cdef int32_t text_len = r.properties_len, at, len, start = 0, end
    if r.topic_len != topic_len or memcmp(p + r.topic_pos, topic, topic_len) != 0:
        return False
    if kind == TAG:
        at = value_of(text, text_len, room - r.properties_pos, <const unsigned char*>b"TAGS", 4, &len)
        return at >= 0 and len == n and memcmp(text + at, wanted, n) == 0
    if kind != UNIQUE_KEY and n > 0:
        at = value_of(text, text_len, room - r.properties_pos, <const unsigned char*>b"KEYS", 4, &len)
        if at >= 0 and len == n and memcmp(text + at, wanted, n) == 0 and memchr(wanted, 32, n) == NULL:
            return True
        while at >= 0 and start <= len:
            end = start
            while end < len and text[at + end] != 32:
                end += 1
            if end - start == n and memcmp(text + at + start, wanted, n) == 0:
                return True
            start = end + 1
    if kind == KEYS_ONLY:
        return False
    at = value_of(text, text_len, room - r.properties_pos, <const unsigned char*>b"UNIQ_KEY", 8, &len)
    return at >= 0 and len == n and memcmp(text + at, wanted, n) == 0


cdef struct RecordParts:
    # The parts of a record to encode; the pointers are into bytes objects that the caller keeps alive, never into a file.
    const unsigned char* topic
    const unsigned char* body
    const unsigned char* properties
    const unsigned char* born_host
    const unsigned char* store_host
    int32_t topic_len, body_len, properties_len, born_host_len, store_host_len
    int32_t queue_id, flag, sys_flag, reconsume_times, version
    int64_t queue_offset, born_timestamp, store_timestamp, prepared_transaction_offset


cdef inline int64_t encoded_properties_len(RecordParts* parts) noexcept nogil:
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


cdef inline void encode_into(unsigned char* p, int64_t total, int64_t phy_offset, RecordParts* parts, bint prop_crc) noexcept nogil:
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
    # An empty part may have a NULL address, which C forbids even for 0 bytes.
    if parts.body_len > 0:
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
    if parts.properties_len > 0:
        memcpy(p + at, parts.properties, parts.properties_len)
    at += parts.properties_len
    if prop_crc:
        if total - at > PROP_CRC_SIZE:
            p[at] = 2
            at += 1
        memcpy(p + at, <const char*>b"__CRC32#\x01", 9)
        # The CRC covers size and magic, which are not published yet and are passed separately.
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
        publish_i32_at(p + total, 0)
        publish_i32_at(p + total + RECORD_MAGIC, 0)
    publish_i32_at(p + RECORD_MAGIC, C_MAGIC_V2 if parts.version == 2 else C_MAGIC_V1)
    publish_i32_at(p, <int32_t>total)


cdef inline uint32_t crc_of_unpublished(const unsigned char* p, int64_t n, int32_t total, int32_t magic) noexcept nogil:
    cdef unsigned char[8] head
    put_i32(head, total)
    put_i32(head + 4, magic)
    return crc32_update(crc32_update(0, head, 8), p + 8, n - 8)


cdef enum:
    KEY_HASHES = 256  # of one record that are looked at


cdef inline bint has_key_hash(const unsigned char* p, RecordView* r, int32_t key_hash) noexcept nogil:
    # True if an entry with this hash may belong to this record; always for a record with very many keys.
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
