# The properties text of a message taken apart (_properties.h), and what RocketMQ makes of it: keys, tags, further queues.

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memchr, memcmp

from rmqstore._bytes cimport before
from rmqstore._java_text cimport hash_ascii, hash_joined, hash_utf8, index_hash, JOINED_UNITS, same_text


cdef extern from "_properties.h":
    ctypedef struct IndexedProperties "rmq_indexed":
        int32_t keys_pos, keys_len, tags_pos, tags_len, unique_key_pos, unique_key_len
    ctypedef struct KnownProperties "rmq_found":
        IndexedProperties indexed  # the values that the index takes
        int32_t delay_pos, delay_len, inner_num_pos, inner_num_len, inner_base_pos, inner_base_len
        int32_t multi_dispatch_pos, multi_dispatch_len
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
        int32_t n, span_num, names_len, misses
        # The block of rows that refers to this layout, which must not change before they are written.
        int64_t used_by
    void find_properties "rmq_find_properties"(const unsigned char* text, int32_t n, int64_t room,
                                               KnownProperties* found) noexcept nogil
    int32_t split_properties "rmq_split_properties"(const unsigned char* text, int32_t n, int64_t room, PropertySpan* out,
                                                    KnownSpans* known, int* valid) noexcept nogil
    bint fits "rmq_fits"(const PropertyLayout* layout, const unsigned char* text, int32_t n, int64_t room) noexcept nogil
    # The views of the name and of the value of piece k; 16 bytes after the text may be read.
    void put_name_view "rmq_put_name_view"(unsigned char* to, const PropertyLayout* layout, int32_t k,
                                           const unsigned char* text, int32_t buffer, int64_t pos) noexcept nogil
    void put_value_view "rmq_put_value_view"(unsigned char* to, const PropertyLayout* layout, int32_t k,
                                             const unsigned char* text, int32_t buffer, int64_t pos) noexcept nogil
    void learn "rmq_learn"(PropertyLayout* layout, const unsigned char* text, int32_t n, const PropertySpan* spans, int32_t num,
                           const KnownSpans* known) noexcept nogil
    bint names_may_repeat "rmq_names_may_repeat"(const unsigned char* text, const PropertySpan* spans,
                                                 int32_t num) noexcept nogil
    int32_t value_of "rmq_value_of"(const unsigned char* text, int32_t n, int64_t room, const unsigned char* name, int32_t name_len,
                                    int32_t* len) noexcept nogil
    # 0x01 and 0x02 part names, values and pairs.
    bint has_separator "rmq_has_separator"(const unsigned char* p, int64_t n, bint space) noexcept nogil


cdef inline int64_t parse_decimal(const unsigned char* p, int32_t n, int64_t otherwise) noexcept nogil:
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


cdef inline int64_t put_key_hashes(int32_t* out, int64_t at, int64_t room, uint32_t topic_hash, const unsigned char* text,
                            IndexedProperties* k, bint index_tags, int64_t* tags_code) noexcept nogil:
    # Write the index hashes of one record at `at`, in RocketMQ's order; returns their end, -1 if they do not fit.  Also sets
    # the tags code.
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
        # Tags are hashed alone and after the topic; the second follows from the first where they are short and ASCII.
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


cdef inline bint is_dispatched_to(unsigned char* scratch, const unsigned char* text, int64_t room, int32_t n,
                           const unsigned char* topic, int64_t topic_size, int64_t queue_offset) noexcept nogil:
    # True if the multi-dispatch properties name queue 0 of this topic with this offset.
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
