"""Bytes of RabbitMQ's classic queues: journal, segments and message files, over raw pointers.

Owns the layouts of journal.jif, N.idx, N.rdq, N.qi and N.qs: one pass that goes over each, and the encoding of each.  It
knows no path, no clock and no policy, and every number that it reads is hostile.  A pointer into a file comes from
`Region.pin` and never outlives the function that asked for it.  Facts: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from rmqstore._bytes cimport get_i32, get_i64, prefetch, put_i16, put_i32, put_i64
from rmqstore._core cimport Region
from rmqstore._crc32 cimport crc32_start, crc32_update
from rmqstore.rabbitmq._term cimport message_id, term_extent

import os

import numpy as np

from rmqstore.errors import CorruptionError, InvalidMessageError, OffsetOutOfRangeError


# ------------------------------------------------------------------------------------------------ journal and segments
#
# A journal record begins with a word of 64 bits (type, sequence id), a segment record with one of 16 (kind, place in the
# segment); the body of a publish is the same in both: message id 16, expiry 8, size 4, embedded length 4, term.

cdef enum:
    JOURNAL_HEAD = 8
    SEGMENT_HEAD = 2
    BODY_EXPIRY = 16
    BODY_SIZE = 24
    BODY_EMBEDDED = 28
    BODY_FIXED = 32
    JOURNAL_PUBLISH_FIXED = 40
    SEGMENT_PUBLISH_FIXED = 34
    TERM_START = 131
    # An entry is one word: where its publish record begins, times 64, and these bits.
    W_PUBLISH = 1
    W_DELIVER = 2
    W_ACK = 4
    W_PERSISTENT = 8
    W_EMBEDDED = 16
    W_DAMAGED = 32       # the term is not what the record says; without W_PUBLISH: a mark that has no publish
    W_BITS = 6
    # What stands at a position instead of a record.
    NOT_WHOLE = -1
    NO_RECORD = -2       # a journal's forty zero bytes, a segment's prefix 00
    NOT_A_TERM = -3
    # Why a call of the writer was refused.
    REFUSED_UNKNOWN = -1
    REFUSED_ACKED = -2
    REFUSED_DELIVERED = -3
    REFUSED_UNDELIVERED = -4
    REFUSED_EXISTS = -5
    # What parsing and salvaging did.
    NEED_ROOM = 1
    GAVE_UP = -2

ENTRY_PUBLISH = W_PUBLISH
ENTRY_DELIVER = W_DELIVER
ENTRY_ACK = W_ACK
ENTRY_PERSISTENT = W_PERSISTENT
ENTRY_EMBEDDED = W_EMBEDDED
ENTRY_DAMAGED = W_DAMAGED

cdef enum:
    TORN_RECORD
    BAD_PREFIX
    ZERO_STRETCH
    BAD_TERM
    ZERO_TAIL
    NUL_FILE
    REL_OUT_OF_RANGE
    DUPLICATE_PUBLISH
    DIFFERENT_PUBLISH
    PUBLISH_AFTER_ACK
    PUBLISH_AFTER_DELIVER
    DELIVER_WITHOUT_PUBLISH
    DUPLICATE_DELIVER
    DELIVER_AFTER_ACK
    ACK_WITHOUT_PUBLISH
    ACK_WITHOUT_DELIVER
    THIRD_MARK
    MSG_ID_MISMATCH
    SALVAGE_GIVEN_UP

# In the order of the enumeration above; users see these names.
PROBLEM_KINDS = (
    "torn_record", "bad_prefix", "zero_stretch", "bad_term", "zero_tail", "nul_file", "rel_out_of_range",
    "duplicate_publish", "different_publish", "publish_after_ack", "publish_after_deliver", "deliver_without_publish",
    "duplicate_deliver", "deliver_after_ack", "ack_without_publish", "ack_without_deliver", "third_mark",
    "msg_id_mismatch", "salvage_given_up",
)

# A file with more findings than this is reported by their number.
cdef int64_t MAX_FINDINGS = 1 << 14
MAX_SEQ_ID = (1 << 62) - 1
cdef int64_t LAST_SEQ_ID = MAX_SEQ_ID

assert BODY_EMBEDDED + 4 == BODY_FIXED and JOURNAL_HEAD + BODY_FIXED == JOURNAL_PUBLISH_FIXED
assert SEGMENT_HEAD + BODY_FIXED == SEGMENT_PUBLISH_FIXED and W_DAMAGED << 1 == 1 << W_BITS


cdef struct Sink:
    # Rows of five: kind, position, sequence id, extent, segment (-1: the journal).
    int64_t* rows
    int64_t room
    int64_t count
    int64_t total
    int64_t segment


cdef struct Table:
    # Sequence id -> word, open addressing; -1 marks a free slot.  A word of 0 is an entry that was cancelled.
    int64_t* seqs
    int64_t* words
    int64_t mask
    int64_t filled
    uint64_t seed


cdef struct Scan:
    const unsigned char* p
    int64_t n
    int64_t head             # JOURNAL_HEAD or SEGMENT_HEAD
    int64_t entry_count      # entries a segment, 0 for a journal
    int64_t lo               # what sequence ids a journal's salvaged run without terms may have
    int64_t hi
    int64_t budget           # bytes that salvaging may still look at, so that no input makes it quadratic
    bint check_terms
    bint malformed           # whole records may lie after damage, or marks do not fit: nobody should append here


cdef struct Rows:
    int64_t* seq_id
    int64_t* size
    uint8_t* flags
    int64_t* expiry
    uint8_t* msg_id
    int64_t* segment
    int64_t* pos
    int64_t* term_size


cdef inline int64_t get_u32(const unsigned char* p) noexcept nogil:
    return <int64_t><uint32_t>get_i32(p)


cdef inline int64_t relative_id(const unsigned char* p) noexcept nogil:
    return (<int64_t>(p[0] & 0x3F) << 8) | p[1]


cdef inline void note(Sink* sink, int64_t kind, int64_t pos, int64_t seq, int64_t extent) noexcept nogil:
    cdef int64_t* row
    sink.total += 1
    if sink.count < sink.room:
        row = sink.rows + 5 * sink.count
        row[0] = kind
        row[1] = pos
        row[2] = seq
        row[3] = extent
        row[4] = sink.segment
        sink.count += 1


cdef bint is_zero(const unsigned char* p, int64_t n) noexcept nogil:
    if n <= 0:
        return True
    # Equal to itself moved by one byte, and the first is zero.
    return p[0] == 0 and (n == 1 or memcmp(p, p + 1, <size_t>(n - 1)) == 0)


cdef inline int64_t journal_extent(const unsigned char* p, int64_t n, int64_t at) noexcept nogil:
    cdef int64_t left = n - at, embedded
    if left < JOURNAL_HEAD:
        return NOT_WHOLE
    if p[at] & 0x80:
        return JOURNAL_HEAD
    if left < JOURNAL_PUBLISH_FIXED:
        return NOT_WHOLE
    embedded = get_u32(p + at + JOURNAL_HEAD + BODY_EMBEDDED)
    if embedded == 0:
        return NO_RECORD if is_zero(p + at, JOURNAL_PUBLISH_FIXED) else JOURNAL_PUBLISH_FIXED
    if embedded > left - JOURNAL_PUBLISH_FIXED:
        return NOT_WHOLE
    if p[at + JOURNAL_PUBLISH_FIXED] != TERM_START:
        return NOT_A_TERM
    return JOURNAL_PUBLISH_FIXED + embedded


cdef inline int64_t segment_extent(const unsigned char* p, int64_t n, int64_t at) noexcept nogil:
    cdef int64_t left = n - at, embedded
    if left < SEGMENT_HEAD:
        return NOT_WHOLE
    if not p[at] & 0x80:
        return SEGMENT_HEAD if p[at] & 0x40 else NO_RECORD
    if left < SEGMENT_PUBLISH_FIXED:
        return NOT_WHOLE
    embedded = get_u32(p + at + SEGMENT_HEAD + BODY_EMBEDDED)
    if embedded == 0:
        return SEGMENT_PUBLISH_FIXED
    if embedded > left - SEGMENT_PUBLISH_FIXED:
        return NOT_WHOLE
    if p[at + SEGMENT_PUBLISH_FIXED] != TERM_START:
        return NOT_A_TERM
    return SEGMENT_PUBLISH_FIXED + embedded


cdef inline bint is_plausible(Scan* scan, int64_t at) noexcept nogil:
    # May the record at `at` belong here, by its number?
    cdef int64_t seq
    if scan.head == SEGMENT_HEAD:
        return relative_id(scan.p + at) < scan.entry_count
    seq = get_i64(scan.p + at) & LAST_SEQ_ID
    return scan.lo <= seq <= scan.hi


cdef bint runs_to_the_end(Scan* scan, int64_t at) noexcept nogil:
    # Do records that may belong here follow each other from `at` to the last byte?
    cdef int64_t extent
    while at < scan.n:
        extent = segment_extent(scan.p, scan.n, at) if scan.head == SEGMENT_HEAD else journal_extent(scan.p, scan.n, at)
        scan.budget -= 16
        if extent < 0 or not is_plausible(scan, at) or scan.budget < 0:
            return False
        at += extent
    return True


cdef int64_t salvage(Scan* scan, int64_t at) noexcept nogil:
    # The next publish record from `at` on that is certainly one: its term is well-formed for exactly its length and holds the
    # record's message id, or it has none and consistent records follow to the end of the file.  -1: there is none.
    cdef const unsigned char* p = scan.p
    cdef const unsigned char* term
    cdef const unsigned char* found
    cdef int64_t fixed = scan.head + BODY_FIXED, embedded
    while at <= scan.n - fixed:
        if scan.budget < 0:
            return GAVE_UP
        if (p[at] & 0x80 != 0) == (scan.head == SEGMENT_HEAD):
            embedded = get_u32(p + at + scan.head + BODY_EMBEDDED)
            if embedded == 0:
                if not is_zero(p + at, fixed) and runs_to_the_end(scan, at):
                    return at
            elif 1 < embedded <= scan.n - at - fixed and p[at + fixed] == TERM_START and p[at + fixed + 1] != 80:
                term = p + at + fixed
                scan.budget -= embedded
                if (scan.entry_count == 0 or relative_id(p + at) < scan.entry_count) and term_extent(term, embedded) == embedded:
                    found = message_id(term, embedded)
                    if found != NULL and memcmp(found, p + at + scan.head, 16) == 0:
                        return at
        at += 1
    return -1


cdef int64_t after_damage(Scan* scan, int64_t at, int64_t verdict, Sink* sink) noexcept nogil:
    # Say what is wrong at `at`; the answer is where reading goes on, or -1 where nothing whole follows.
    cdef int64_t found, kind
    if is_zero(scan.p + at, scan.n - at) and (scan.head == SEGMENT_HEAD or scan.n - at >= JOURNAL_PUBLISH_FIXED):
        note(sink, ZERO_TAIL, at, -1, scan.n - at)
        return -1
    if verdict == NOT_A_TERM:
        kind = BAD_TERM
    elif verdict == NOT_WHOLE:
        kind = TORN_RECORD
    else:
        kind = BAD_PREFIX if scan.head == SEGMENT_HEAD else ZERO_STRETCH
    found = salvage(scan, at + 1)
    if found < 0:
        note(sink, kind, at, -1, scan.n - at)
        if found == GAVE_UP:
            note(sink, SALVAGE_GIVEN_UP, at, -1, scan.n - at)
        # Only a record that the file's end cut is what a crash leaves behind.
        if kind != TORN_RECORD or found == GAVE_UP:
            scan.malformed = True
        return -1
    note(sink, kind, at, -1, found - at)
    scan.malformed = True
    return found


cdef inline int64_t after_atom(const unsigned char* p, int64_t pos, int64_t n, const char* name, int64_t size) noexcept nogil:
    # The position after the atom `name`, or -1 if another value is here.
    if pos < 0 or n - pos < size + 3:
        return -1
    if p[pos] == 100 and p[pos + 1] == 0 and p[pos + 2] == size:
        pos += 3
    elif p[pos] == 119 and p[pos + 1] == size:
        pos += 2
    else:
        return -1
    return pos + size if memcmp(p + pos, name, <size_t>size) == 0 else -1


cdef inline int64_t after_binary(const unsigned char* p, int64_t pos, int64_t n) noexcept nogil:
    if pos < 0 or n - pos < 5 or p[pos] != 109:
        return -1
    cdef int64_t size = get_u32(p + pos + 1)
    return pos + 5 + size if size <= n - pos - 5 else -1


cdef inline int64_t after_bytes(const unsigned char* p, int64_t pos, int64_t n, const char* wanted, int64_t size) noexcept nogil:
    if pos < 0 or n - pos < size or memcmp(p + pos, wanted, <size_t>size) != 0:
        return -1
    return pos + size


cdef inline int64_t after_binaries(const unsigned char* p, int64_t pos, int64_t n, int64_t* total) noexcept nogil:
    # After a proper list of binaries; `total` are their bytes.
    cdef int64_t count, before
    total[0] = 0
    if pos < 0 or n - pos < 6:
        return -1
    if p[pos] == 106:
        return pos + 1
    if p[pos] != 108:
        return -1
    count = get_u32(p + pos + 1)
    pos += 5
    while count > 0:
        before = pos
        pos = after_binary(p, pos, n)
        if pos < 0:
            return -1
        total[0] += pos - before - 5
        count -= 1
    return pos + 1 if pos < n and p[pos] == 106 else -1


cdef const unsigned char* plain_message(const unsigned char* p, int64_t n, int64_t* body_size) noexcept nogil:
    # The id in a term that is exactly what a node writes of a published message, or NULL for all others: most terms are, and
    # this is ten times as fast as looking at any term (`_term`).
    cdef int64_t pos, size = 0, id_pos
    pos = after_bytes(p, 0, n, b"\x83h\x06", 3)
    pos = after_atom(p, pos, n, b"basic_message", 13)
    pos = after_bytes(p, pos, n, b"h\x04", 2)
    pos = after_atom(p, pos, n, b"resource", 8)
    pos = after_binary(p, pos, n)
    pos = after_atom(p, pos, n, b"exchange", 8)
    pos = after_binary(p, pos, n)
    pos = after_binaries(p, pos, n, &size)
    pos = after_bytes(p, pos, n, b"h\x06", 2)
    pos = after_atom(p, pos, n, b"content", 7)
    pos = after_bytes(p, pos, n, b"a\x3c", 2)
    pos = after_atom(p, pos, n, b"none", 4)
    pos = after_binary(p, pos, n)
    pos = after_atom(p, pos, n, b"rabbit_framing_amqp_0_9_1", 25)
    pos = after_binaries(p, pos, n, body_size)
    id_pos = pos
    pos = after_binary(p, pos, n)
    if pos - id_pos != 21:
        return NULL
    size = after_atom(p, pos, n, b"true", 4)
    if size < 0:
        size = after_atom(p, pos, n, b"false", 5)
    return p + id_pos + 5 if size == n else NULL


cdef bint term_is_bad(Scan* scan, int64_t at, int64_t embedded, int64_t seq, Sink* sink) noexcept nogil:
    cdef const unsigned char* term = scan.p + at + scan.head + BODY_FIXED
    cdef const unsigned char* found
    cdef int64_t size = 0
    if embedded > 1 and term[1] == 80:
        # A compressed term says its id, and whether it is whole, only to those who inflate it.
        return False
    found = plain_message(term, embedded, &size)
    if found == NULL and term_extent(term, embedded) == embedded:
        found = message_id(term, embedded)
    if found == NULL:
        note(sink, BAD_TERM, at, seq, scan.head + BODY_FIXED + embedded)
        return True
    if memcmp(found, scan.p + at + scan.head, 16) != 0:
        note(sink, MSG_ID_MISMATCH, at, seq, scan.head + BODY_FIXED + embedded)
        return True
    return False


cdef void parse_segment(Scan* scan, int64_t* entries, int64_t base_seq, Sink* sink, int64_t* end, int64_t* records) noexcept nogil:
    # Fill `entries` (zeros before) from a whole segment; `end` is where what could be read ends.
    cdef const unsigned char* p = scan.p
    cdef int64_t n = scan.n, at = 0, extent, rel, word, embedded, stride = 0
    records[0] = 0
    if n > 0 and p[0] == 0 and is_zero(p, n):
        note(sink, NUL_FILE, 0, -1, n)
        end[0] = 0
        return
    while at < n:
        extent = segment_extent(p, n, at)
        if extent < 0:
            stride = after_damage(scan, at, extent, sink)
            if stride < 0:
                break
            at = stride
            continue
        records[0] += 1
        rel = relative_id(p + at)
        if extent == SEGMENT_HEAD:
            if rel >= scan.entry_count:
                note(sink, REL_OUT_OF_RANGE, at, -1, extent)
                scan.malformed = True
            else:
                word = entries[rel]
                if word & W_PUBLISH:
                    if not word & W_DELIVER:
                        entries[rel] = word | W_DELIVER
                    elif not word & W_ACK:
                        entries[rel] = word | W_ACK
                    else:
                        note(sink, THIRD_MARK, at, base_seq + rel, extent)
                        scan.malformed = True
                else:
                    note(sink, ACK_WITHOUT_PUBLISH if word & W_DAMAGED else DELIVER_WITHOUT_PUBLISH, at, base_seq + rel, extent)
                    entries[rel] = W_DAMAGED
                    scan.malformed = True
            at += extent
            continue
        # Records are mostly of one size: the fourth from here begins about where this guess says.
        prefetch(p + at + 4 * (extent + SEGMENT_HEAD))
        embedded = extent - SEGMENT_PUBLISH_FIXED
        if rel >= scan.entry_count:
            note(sink, REL_OUT_OF_RANGE, at, -1, extent)
            scan.malformed = True
        elif entries[rel] & W_PUBLISH:
            stride = entries[rel] >> W_BITS
            note(sink, DUPLICATE_PUBLISH if segment_extent(p, n, stride) == extent and memcmp(p + at, p + stride, <size_t>extent) == 0
                 else DIFFERENT_PUBLISH, at, base_seq + rel, extent)
            scan.malformed = True
        else:
            word = (at << W_BITS) | W_PUBLISH
            if p[at] & 0x40:
                word |= W_PERSISTENT
            if embedded:
                word |= W_EMBEDDED
                if scan.check_terms and term_is_bad(scan, at, embedded, base_seq + rel, sink):
                    word |= W_DAMAGED
                    scan.malformed = True
            entries[rel] = word
        at += extent
    end[0] = at


cdef inline int64_t slot_of(Table* table, int64_t seq) noexcept nogil:
    # Blocks of 64 lie together, so that a queue's sequential ids are; where a block lies nobody outside can foretell.
    cdef uint64_t h = (<uint64_t>seq >> 6) ^ table.seed
    h = (h ^ (h >> 33)) * <uint64_t>0xFF51AFD7ED558CCDu
    h = (h ^ (h >> 33)) * <uint64_t>0xC4CEB9FE1A85EC53u
    h ^= h >> 33
    cdef int64_t i = <int64_t>(((h << 6) + (<uint64_t>seq & 63)) & <uint64_t>table.mask)
    cdef int step
    # A block that meets another one gives way as a whole.  Where that does not end, every slot is looked at.
    for step in range(8):
        if table.seqs[i] == seq or table.seqs[i] == -1:
            return i
        i = (i + 64) & table.mask
    while table.seqs[i] != seq and table.seqs[i] != -1:
        i = (i + 1) & table.mask
    return i


cdef inline int64_t slot_for(Table* table, int64_t seq) noexcept nogil:
    cdef int64_t i = slot_of(table, seq)
    if table.seqs[i] == -1:
        table.seqs[i] = seq
        table.words[i] = 0
        table.filled += 1
    return i


cdef inline bint is_crowded(Table* table, int64_t more) noexcept nogil:
    return 2 * (table.filled + more) > table.mask + 1


cdef inline int64_t publish_word(const unsigned char* p, int64_t at, bint persistent, int64_t embedded) noexcept nogil:
    return (at << W_BITS) | W_PUBLISH | (W_PERSISTENT if persistent else 0) | (W_EMBEDDED if embedded else 0)


cdef int parse_journal(Scan* scan, int64_t* pos, Table* table, Sink* sink, int64_t* records) noexcept nogil:
    # Go over a journal from `pos` on and keep what its actions leave; NEED_ROOM where the table has to grow first.
    cdef const unsigned char* p = scan.p
    cdef int64_t n = scan.n, at = pos[0], extent, seq, slot, word, other, embedded
    while at < n:
        if is_crowded(table, 1):
            pos[0] = at
            return NEED_ROOM
        extent = journal_extent(p, n, at)
        if extent < 0:
            other = after_damage(scan, at, extent, sink)
            if other < 0:
                break
            at = other
            continue
        records[0] += 1
        seq = get_i64(p + at) & LAST_SEQ_ID
        # Salvaged records without a term must have a number about as those before.
        if seq - 65536 < scan.lo:
            scan.lo = seq - 65536
        if seq + 65536 > scan.hi:
            scan.hi = seq + 65536
        slot = slot_for(table, seq)
        word = table.words[slot]
        if extent == JOURNAL_HEAD:
            if p[at] & 0x40:
                if word & W_ACK:
                    note(sink, THIRD_MARK, at, seq, extent)
                elif word & W_PUBLISH:
                    if not word & W_DELIVER:
                        note(sink, ACK_WITHOUT_DELIVER, at, seq, extent)
                    table.words[slot] = 0
                else:
                    table.words[slot] = (word if word else at << W_BITS) | W_ACK
            elif word & W_ACK:
                note(sink, DELIVER_AFTER_ACK, at, seq, extent)
            elif word & W_DELIVER:
                note(sink, DUPLICATE_DELIVER, at, seq, extent)
            else:
                table.words[slot] = (word if word else at << W_BITS) | W_DELIVER
        elif word & W_PUBLISH:
            other = word >> W_BITS
            note(sink, DUPLICATE_PUBLISH if journal_extent(p, n, other) == extent and memcmp(p + at, p + other, <size_t>extent) == 0
                 else DIFFERENT_PUBLISH, at, seq, extent)
        elif word & W_ACK:
            note(sink, PUBLISH_AFTER_ACK, at, seq, extent)
        else:
            embedded = extent - JOURNAL_PUBLISH_FIXED
            if word & W_DELIVER:
                note(sink, PUBLISH_AFTER_DELIVER, at, seq, extent)
            table.words[slot] = publish_word(p, at, not p[at] & 0x40, embedded) | (word & W_DELIVER)
            if embedded and scan.check_terms and term_is_bad(scan, at, embedded, seq, sink):
                table.words[slot] |= W_DAMAGED
                scan.malformed = True
        at += extent
    pos[0] = at
    return 0


cdef bint is_same_publish(const unsigned char* image, int64_t journal_word, const unsigned char* p, int64_t segment_word) noexcept nogil:
    # The bodies are equal to the last byte and so is the persistence.
    cdef const unsigned char* a = image + (journal_word >> W_BITS) + JOURNAL_HEAD
    cdef const unsigned char* b = p + (segment_word >> W_BITS) + SEGMENT_HEAD
    cdef int64_t embedded = get_u32(a + BODY_EMBEDDED)
    return ((journal_word ^ segment_word) & W_PERSISTENT == 0 and embedded == get_u32(b + BODY_EMBEDDED)
            and memcmp(a, b, <size_t>(BODY_FIXED + embedded)) == 0)


cdef int64_t merge_segment(const int64_t* entries, int64_t entry_count, const unsigned char* p, int64_t base_seq,
                           const int64_t* seqs, int64_t* words, int64_t count, const unsigned char* image, Sink* sink,
                           int64_t* unacked) noexcept nogil:
    # Take from the journal's words of one segment what its file has (section 7.1, all cells); how many words changed.
    cdef int64_t i, word, kept, other, pos, changed = 0, live = 0
    cdef int j, s
    if entries != NULL:
        for i in range(entry_count):
            live += (entries[i] & (W_PUBLISH | W_ACK | W_DAMAGED)) == W_PUBLISH
    for i in range(count):
        word = words[i]
        other = entries[seqs[i] - base_seq] if entries != NULL else 0
        j = word & (W_PUBLISH | W_DELIVER | W_ACK)
        s = other & (W_PUBLISH | W_DELIVER | W_ACK) if other & W_PUBLISH else 0
        pos = word >> W_BITS
        kept = word
        if word & W_DAMAGED:
            kept = 0
        elif s == 0:
            if j == W_DELIVER:
                note(sink, DELIVER_WITHOUT_PUBLISH, pos, seqs[i], JOURNAL_HEAD)
                kept = 0
            elif not j & W_PUBLISH:
                # The segment was deleted: these acks were its last.
                kept = 0
        elif j & W_PUBLISH:
            if not is_same_publish(image, word, p, other):
                note(sink, DIFFERENT_PUBLISH, pos, seqs[i], 0)
                kept = 0
            elif s & W_ACK or (j == W_PUBLISH and s & W_DELIVER):
                note(sink, DUPLICATE_PUBLISH, pos, seqs[i], 0)
                kept = 0
            elif j == W_PUBLISH or s & W_DELIVER:
                kept = 0
            else:
                kept = (word & ~<int64_t>((1 << W_BITS) - 1)) | W_DELIVER
        elif j == W_DELIVER:
            if s & W_ACK:
                note(sink, DELIVER_AFTER_ACK, pos, seqs[i], JOURNAL_HEAD)
            if s & W_DELIVER:
                kept = 0
        elif s & W_ACK:
            kept = 0
        elif j == W_ACK:
            if not s & W_DELIVER:
                note(sink, ACK_WITHOUT_DELIVER, pos, seqs[i], JOURNAL_HEAD)
                kept = word | W_DELIVER
        elif s & W_DELIVER:
            kept = word & ~<int64_t>W_DELIVER
        if kept != word:
            words[i] = kept
            changed += 1
        if kept & W_PUBLISH:
            live += 1
        if kept & W_ACK and not other & W_DAMAGED:
            live -= 1
    unacked[0] = live
    return changed


cdef inline bint says_transient(const unsigned char* term, int64_t n, bint persistent) noexcept nogil:
    # A message term ends with the atom of its persistence; what ends otherwise (a container) is as its record says.
    if n >= 8 and memcmp(term + n - 5, b"false", 5) == 0:
        return True
    if n >= 8 and memcmp(term + n - 4, b"true", 4) == 0:
        return False
    return not persistent


cdef int64_t fill_rows(const int64_t* entries, int64_t entry_count, int64_t number, const unsigned char* p, int64_t n,
                       const int64_t* seqs, const int64_t* words, int64_t count, const unsigned char* image, int64_t used,
                       int which, Rows* rows, int64_t at, int64_t room) noexcept nogil:
    # Append the segment's entries in the order of their ids; -1: the file is not the one that was read, -2: no room.
    cdef int64_t base_seq = number * entry_count, rel = 0, j = 0, fword, jword, pos, embedded, limit, seq
    cdef const unsigned char* body
    if entries == NULL:
        rel = entry_count
    while True:
        if rel < entry_count:
            fword = entries[rel]
            jword = 0
            seq = base_seq + rel
            if j < count and seqs[j] == seq:
                jword = words[j]
                j += 1
            rel += 1
            # Files are written from the highest id down, so going up jumps back by whole records.
            if rel + 6 < entry_count and entries[rel + 6] & W_PUBLISH:
                if (entries[rel + 6] >> W_BITS) < n:
                    prefetch(p + (entries[rel + 6] >> W_BITS))
        elif j < count:
            fword = 0
            jword = words[j]
            seq = seqs[j]
            j += 1
        else:
            return at
        if not (fword | jword) & W_PUBLISH:
            continue
        if which > 0 and (fword | jword) & (W_ACK | W_DAMAGED):
            continue
        if which == 2 and ((fword | jword) & (W_PERSISTENT | W_EMBEDDED)) != W_PERSISTENT:
            continue
        if fword & W_PUBLISH:
            pos = fword >> W_BITS
            limit = n - pos - SEGMENT_PUBLISH_FIXED
            body = p + pos + SEGMENT_HEAD
        else:
            pos = jword >> W_BITS
            limit = used - pos - JOURNAL_PUBLISH_FIXED
            body = image + pos + JOURNAL_HEAD
        if limit < 0:
            return -1
        embedded = get_u32(body + BODY_EMBEDDED)
        if embedded > limit:
            return -1
        if at >= room:
            return -2
        memcpy(rows.msg_id + 16 * at, body, 16)
        if which != 2:
            rows.seq_id[at] = seq
            rows.size[at] = get_u32(body + BODY_SIZE)
            rows.flags[at] = <uint8_t>((fword | jword) & ((1 << W_BITS) - 1))
            rows.expiry[at] = get_i64(body + BODY_EXPIRY)
            rows.segment[at] = number if fword & W_PUBLISH else -1
            rows.pos[at] = pos
            rows.term_size[at] = embedded
        at += 1


cdef int64_t encoded_size(const int64_t* words, int64_t count, const unsigned char* image) noexcept nogil:
    cdef int64_t i, size = 0, word
    for i in range(count):
        word = words[i]
        if word & W_PUBLISH:
            size += SEGMENT_PUBLISH_FIXED + get_u32(image + (word >> W_BITS) + JOURNAL_HEAD + BODY_EMBEDDED)
        size += (SEGMENT_HEAD if word & W_DELIVER else 0) + (SEGMENT_HEAD if word & W_ACK else 0)
    return size


cdef int64_t encode_segment(const int64_t* seqs, const int64_t* words, int64_t count, int64_t base_seq, const unsigned char* image,
                            int64_t start, unsigned char* out, int64_t* entries) noexcept nogil:
    # The blob that a flush appends, from the highest id down; with `entries` instead of `out` only where each will lie.
    cdef int64_t i, at = 0, word, rel, embedded, marks
    cdef const unsigned char* body
    for i in range(count - 1, -1, -1):
        word = words[i]
        rel = seqs[i] - base_seq
        if word & W_PUBLISH:
            body = image + (word >> W_BITS) + JOURNAL_HEAD
            embedded = get_u32(body + BODY_EMBEDDED)
            if out != NULL:
                put_i16(out + at, <int16_t>(0x8000 | (0x4000 if word & W_PERSISTENT else 0) | rel))
                memcpy(out + at + SEGMENT_HEAD, body, <size_t>(BODY_FIXED + embedded))
            else:
                entries[rel] = ((start + at) << W_BITS) | (word & ((1 << W_BITS) - 1))
            at += SEGMENT_PUBLISH_FIXED + embedded
        elif entries != NULL:
            entries[rel] |= word & (W_DELIVER | W_ACK)
        marks = (1 if word & W_DELIVER else 0) + (1 if word & W_ACK else 0)
        while marks:
            if out != NULL:
                put_i16(out + at, <int16_t>(0x4000 | rel))
            at += SEGMENT_HEAD
            marks -= 1
    return at


cdef extern from *:
    """
    #include <stdlib.h>
    typedef struct { int64_t seq, word; } rmq_entry;
    static int rmq_by_seq(const void *a, const void *b) {
        int64_t x = ((const rmq_entry *)a)->seq, y = ((const rmq_entry *)b)->seq;
        return (x > y) - (x < y);
    }
    static void rmq_sort_entries(rmq_entry *e, size_t n) {
        for (size_t i = 1; i < n; i++)
            if (e[i].seq < e[i - 1].seq) { qsort(e, n, sizeof *e, rmq_by_seq); return; }
    }
    """
    ctypedef struct SortedEntry "rmq_entry":
        int64_t seq
        int64_t word
    void sort_entries "rmq_sort_entries"(SortedEntry* entries, size_t n) noexcept nogil


cdef class Findings:
    """What was met while reading that no writer leaves: rows of kind, position, sequence id, extent, segment.

    Attributes
    ----------
    count : int
        Rows that are kept, the first 16384.
    total : int
        Findings in all.
    """

    cdef object array
    cdef int64_t[:, ::1] rows
    cdef readonly int64_t count
    cdef readonly int64_t total

    def __init__(self):
        self.array = np.empty((MAX_FINDINGS, 5), dtype=np.int64)
        self.rows = self.array
        self.count = 0
        self.total = 0

    cdef void open_sink(self, Sink* sink, int64_t segment) noexcept:
        sink.rows = &self.rows[0, 0]
        sink.room = MAX_FINDINGS
        sink.count = self.count
        sink.total = self.total
        sink.segment = segment

    cdef void take(self, Sink* sink) noexcept:
        self.count = sink.count
        self.total = sink.total

    def table(self):
        """ndarray (count, 5) of int64: a copy of the rows; segment -1 is the journal, sequence id -1 is not known."""
        return self.array[: self.count].copy()


cdef class Segment:
    """What is known of one segment: its file's entries by their place, and how many live ones it has with the journal.

    Attributes
    ----------
    number : int
    unacked : int
        Entries without an ack, over file and memory.
    size : int
        Of the file as far as it was read or written; -1 where there is none.
    malformed : bool
        The file has damage after which nobody should append.
    end : int
        Where the last record that could be read ends.
    records : int
        How many records were read.
    """

    cdef readonly int64_t number
    cdef readonly int64_t unacked
    cdef readonly int64_t size
    cdef readonly int64_t end
    cdef readonly int64_t records
    cdef readonly bint malformed
    cdef bint filled
    cdef int64_t[::1] entries

    def __init__(self, int64_t number):
        self.number = number
        self.unacked = 0
        self.size = -1
        self.end = 0
        self.records = 0
        self.malformed = False
        self.filled = False

    cdef int make_entries(self, int64_t entry_count) except -1:
        if not self.filled:
            self.entries = np.zeros(entry_count, dtype=np.int64)
            self.filled = True
        return 0

    def cut(self, int64_t size):
        """Note that the file was cut to `size`, the end of its last record."""
        self.size = size


cdef int64_t salvage_budget(int64_t n) noexcept nogil:
    return 16 * n + (1 << 20)


def load_segment(source not None, Segment segment not None, int64_t entry_count, Findings findings not None, bint check_terms=False):
    """Read a whole segment file into `segment`; damage becomes findings and never an exception.

    Parameters
    ----------
    source : Region, bytes-like or None
        The file; None is an empty one.
    segment : Segment
        Without entries so far.
    entry_count : int
        Entries a segment.
    findings : Findings
    check_terms : bool
        Look at every embedded term: well-formed, and of the message id that its record says.
    """
    cdef Sink sink
    cdef Scan scan
    cdef const uint8_t[::1] data
    cdef Region region
    cdef const unsigned char* p
    cdef int64_t base_seq = segment.number * entry_count, end = 0, records = 0
    if entry_count < 1 or entry_count > 16384:
        raise ValueError(f"{entry_count} entries a segment; at most 16384 have a number in its file")
    segment.make_entries(entry_count)
    memset(&scan, 0, sizeof(scan))
    scan.head = SEGMENT_HEAD
    scan.entry_count = entry_count
    scan.check_terms = check_terms
    findings.open_sink(&sink, segment.number)
    if isinstance(source, Region):
        region = source
        scan.n = region.size
        scan.budget = salvage_budget(scan.n)
        p = region.pin(0, scan.n)
        try:
            scan.p = p
            with nogil:
                parse_segment(&scan, &segment.entries[0], base_seq, &sink, &end, &records)
        finally:
            region.unpin()
    elif source is not None:
        data = source
        scan.n = data.shape[0]
        scan.budget = salvage_budget(scan.n)
        if scan.n:
            scan.p = &data[0]
            with nogil:
                parse_segment(&scan, &segment.entries[0], base_seq, &sink, &end, &records)
    findings.take(&sink)
    segment.size = scan.n
    segment.end = end
    segment.records = records
    segment.malformed = scan.malformed


def scan_journal(source not None):
    """The whole records of a journal's bytes, in their order, as a node's parser meets them and no further.

    Parameters
    ----------
    source : bytes-like

    Returns
    -------
    type : ndarray of uint8
        0 publish, persistent; 1 publish, transient; 2 deliver; 3 ack.
    seq_id, pos, extent : ndarray of int64
        The id, where the record begins, and its bytes.
    """
    cdef const uint8_t[::1] data = source
    cdef int64_t n = data.shape[0], at = 0, extent, count = 0, pass_number
    cdef const unsigned char* p = &data[0] if n else NULL
    cdef uint8_t[::1] types = np.empty(1, dtype=np.uint8)
    cdef int64_t[::1] seqs = np.empty(1, dtype=np.int64), places = seqs, extents = seqs
    for pass_number in range(2):
        at = 0
        count = 0
        with nogil:
            while at < n:
                extent = journal_extent(p, n, at)
                if extent < 0:
                    break
                if pass_number:
                    types[count] = p[at] >> 6
                    seqs[count] = get_i64(p + at) & LAST_SEQ_ID
                    places[count] = at
                    extents[count] = extent
                count += 1
                at += extent
        if not pass_number:
            types = np.empty(max(count, 1), dtype=np.uint8)
            seqs = np.empty(max(count, 1), dtype=np.int64)
            places = np.empty(max(count, 1), dtype=np.int64)
            extents = np.empty(max(count, 1), dtype=np.int64)
    return (np.asarray(types)[:count], np.asarray(seqs)[:count], np.asarray(places)[:count], np.asarray(extents)[:count])


def terms_at(source not None, const int64_t[::1] starts not None, const int64_t[::1] sizes not None):
    """list of bytes: copies of the stretches of a Region or of bytes.

    Raises
    ------
    OffsetOutOfRangeError
        A stretch is not inside; the file was changed since it was read.
    """
    cdef int64_t i, count = starts.shape[0], n
    cdef const uint8_t[::1] data
    cdef Region region = None
    cdef const unsigned char* p
    cdef list out = [None] * count
    if isinstance(source, Region):
        region = source
        n = region.size
        p = region.pin(0, n)
    else:
        data = source
        n = data.shape[0]
        p = &data[0] if n else NULL
    try:
        for i in range(count):
            if starts[i] < 0 or sizes[i] < 0 or starts[i] > n - sizes[i]:
                raise OffsetOutOfRangeError("a message lies outside its file; the file was changed, open the index again", pos=starts[i])
            out[i] = PyBytes_FromStringAndSize(<const char*>p + starts[i], sizes[i])
    finally:
        if region is not None:
            region.unpin()
    return out


def checked_ids(list terms, const uint8_t[::1] data, const int64_t[::1] offsets, const uint8_t[:, ::1] ids):
    """Message ids of message terms, or the check that given ids are theirs; the sizes of the bodies; the persistence.

    Parameters
    ----------
    terms : list of bytes or None
    data, offsets : ndarray or None
        Instead of `terms`: number `i` lies from ``offsets[i]`` to ``offsets[i + 1]``.
    ids : ndarray (n, 16) of uint8 or None

    Returns
    -------
    ids : ndarray (n, 16) of uint8
    sizes : ndarray (n,) of int64
        -1 for a term that is not exactly as a node writes a published message; who wants its size has to decode it.
    persistent : ndarray (n,) of uint8
        What the terms end with; 1 for those that end otherwise.

    Raises
    ------
    InvalidMessageError
        One is not a well-formed message term, has another id than the given one, or is compressed and none was given.
    """
    cdef int64_t i, count = len(terms) if terms is not None else offsets.shape[0] - 1, n
    cdef uint8_t[:, ::1] out = np.empty((count, 16), dtype=np.uint8)
    cdef int64_t[::1] sizes = np.empty(count, dtype=np.int64)
    cdef uint8_t[::1] persistent = np.empty(count, dtype=np.uint8)
    cdef const unsigned char* found
    cdef const unsigned char* p
    cdef bytes term
    for i in range(count):
        if terms is not None:
            term = terms[i]
            p = <const unsigned char*>PyBytes_AS_STRING(term)
            n = PyBytes_GET_SIZE(term)
        else:
            n = offsets[i + 1] - offsets[i]
            if offsets[i] < 0 or n < 0 or offsets[i + 1] > data.shape[0]:
                raise InvalidMessageError(f"message {i} lies outside the buffer")
            p = &data[offsets[i]] if n else NULL
        found = plain_message(p, n, &sizes[i]) if 2 <= n <= <int64_t>0xFFFFFFFFu else NULL
        if found == NULL:
            sizes[i] = -1
            if n < 2 or n > <int64_t>0xFFFFFFFFu or term_extent(p, n) != n:
                raise InvalidMessageError(f"message {i} is not a well-formed external term; give what Message(...).term is")
            found = message_id(p, n)
            if found == NULL and (ids is None or p[1] != 80):
                raise InvalidMessageError(
                    f"message {i} is not a term of a message that says its id; give what Message(...).term is")
            if found == NULL:
                found = &ids[i, 0]
        if ids is not None and memcmp(found, &ids[i, 0], 16) != 0:
            raise InvalidMessageError(f"message {i} has another id than msg_ids says; a node would not boot with it")
        memcpy(&out[i, 0], found, 16)
        persistent[i] = not says_transient(p, n, True)
    return np.asarray(out), np.asarray(sizes), np.asarray(persistent)


def says_persistent(source not None, const int64_t[::1] starts not None, const int64_t[::1] sizes not None, bint persistent):
    """ndarray of bool: whether message terms end with the atom of a persistent message; others are as `persistent` says."""
    cdef int64_t i, count = starts.shape[0], n
    cdef uint8_t[::1] out = np.empty(count, dtype=np.uint8)
    cdef const uint8_t[::1] data
    cdef Region region = None
    cdef const unsigned char* p
    if isinstance(source, Region):
        region = source
        n = region.size
        p = region.pin(0, n)
    else:
        data = source
        n = data.shape[0]
        p = &data[0] if n else NULL
    try:
        with nogil:
            for i in range(count):
                if starts[i] < 0 or sizes[i] < 0 or starts[i] > n - sizes[i]:
                    out[i] = persistent
                else:
                    out[i] = not says_transient(p + starts[i], sizes[i], persistent)
    finally:
        if region is not None:
            region.unpin()
    return np.asarray(out).astype(bool)


cdef int64_t MIN_SLOTS = 1024
cdef int64_t KEPT_SLOTS = 1 << 18
cdef int64_t KEPT_IMAGE = 64 << 20


cdef class JournalMap:
    """The journal in memory: its bytes since the last flush, and per sequence id what they left to be flushed.

    Owns the map with its cancelling (section 6.3), the segments that are known and the counters.  It writes no file.  Words
    lie in one table of open addressing, 32 bytes an entry at most, so a journal with ids from all over the range costs no
    more than one with sequential ids.

    Attributes
    ----------
    segment_entry_count : int
    segments : dict
        Segment by its number.
    used, written : int
        Bytes of the journal since the last flush, and how many of them the file has.
    dirty_count : int
        Actions since the last flush, cancelled ones included.
    depth : int
        Live entries.
    published_end : int
        After the highest sequence id that was published here.
    """

    cdef readonly int64_t segment_entry_count
    cdef readonly int64_t published_end
    cdef readonly int64_t used
    cdef public int64_t written
    cdef readonly int64_t dirty_count
    cdef readonly int64_t depth
    cdef readonly dict segments
    cdef object image_array
    cdef uint8_t[::1] image
    cdef int64_t[::1] slot_seq
    cdef int64_t[::1] slot_word
    cdef int64_t filled
    cdef uint64_t seed
    cdef Segment last
    cdef int64_t last_first

    def __init__(self, int64_t segment_entry_count):
        if segment_entry_count < 1 or segment_entry_count > 16384:
            raise ValueError(f"{segment_entry_count} entries a segment; at most 16384 have a number in its file")
        self.segment_entry_count = segment_entry_count
        self.used = self.written = self.dirty_count = self.depth = self.filled = self.published_end = 0
        self.segments = {}
        self.image_array = np.empty(4096, dtype=np.uint8)
        self.image = self.image_array
        self.seed = <uint64_t>int.from_bytes(os.urandom(8), "little")
        self.last = None
        self.last_first = -1
        self.make_slots(MIN_SLOTS)

    cdef int make_slots(self, int64_t count) except -1:
        # Both first: where memory is short the map stays as it was.
        seqs = np.full(count, -1, dtype=np.int64)
        words = np.zeros(count, dtype=np.int64)
        self.slot_seq = seqs
        self.slot_word = words
        self.filled = 0
        return 0

    cdef void open_table(self, Table* table) noexcept:
        table.seqs = &self.slot_seq[0]
        table.words = &self.slot_word[0]
        table.mask = self.slot_seq.shape[0] - 1
        table.filled = self.filled
        table.seed = self.seed

    cdef int reserve_slots(self, int64_t more) except -1:
        cdef int64_t count = self.slot_seq.shape[0], i, j
        cdef int64_t[::1] seqs, words
        cdef Table table
        if 2 * (self.filled + more) <= count:
            return 0
        while 2 * (self.filled + more) > count:
            count *= 2
        seqs, words = self.slot_seq, self.slot_word
        self.make_slots(count)
        self.open_table(&table)
        with nogil:
            for i in range(seqs.shape[0]):
                if seqs[i] != -1:
                    j = slot_for(&table, seqs[i])
                    table.words[j] = words[i]
        self.filled = table.filled
        return 0

    cdef int reserve_image(self, int64_t more) except -1:
        cdef int64_t size = self.image.shape[0]
        if self.used + more <= size:
            return 0
        while size < self.used + more:
            size *= 2
        grown = np.empty(size, dtype=np.uint8)
        grown[: self.used] = self.image_array[: self.used]
        self.image_array = grown
        self.image = grown
        return 0

    cdef Segment segment_at(self, int64_t seq, bint make):
        cdef int64_t number
        cdef Segment found
        if self.last is not None and 0 <= seq - self.last_first < self.segment_entry_count:
            return self.last
        number = seq // self.segment_entry_count
        found = self.segments.get(number)
        if found is None:
            if not make:
                return None
            found = Segment(number)
            self.segments[number] = found
        self.last = found
        self.last_first = number * self.segment_entry_count
        return found

    def load(self, data not None, Findings findings not None, bint check_terms=False):
        """Take a journal file's bytes; nothing may have happened before.

        Returns
        -------
        (int, bool)
            Where what could be read ends, and whether whole records may lie after damage.
        """
        cdef const uint8_t[::1] source = data
        cdef int64_t n = source.shape[0], pos = 0, records = 0
        cdef Sink sink
        cdef Scan scan
        cdef Table table
        cdef int verdict = NEED_ROOM
        if self.used or self.filled:
            raise ValueError("the journal was loaded already")
        if n == 0:
            return 0, False
        self.reserve_image(n)
        memcpy(&self.image[0], &source[0], <size_t>n)
        memset(&scan, 0, sizeof(scan))
        scan.p = &self.image[0]
        scan.n = n
        scan.head = JOURNAL_HEAD
        scan.lo = LAST_SEQ_ID
        scan.budget = salvage_budget(n)
        scan.check_terms = check_terms
        findings.open_sink(&sink, -1)
        while verdict == NEED_ROOM:
            self.reserve_slots(1)
            self.open_table(&table)
            with nogil:
                verdict = parse_journal(&scan, &pos, &table, &sink, &records)
            self.filled = table.filled
        findings.take(&sink)
        self.used = self.written = pos
        self.dirty_count = records
        return pos, bool(scan.malformed)

    def collect(self):
        """Tuple of ndarray of int64: sequence ids in their order, and the words of what is to be flushed."""
        cdef int64_t i, count = 0
        cdef int64_t[:, ::1] pairs = np.empty((max(self.filled, 1), 2), dtype=np.int64)
        with nogil:
            for i in range(self.slot_seq.shape[0]):
                if self.slot_seq[i] != -1 and self.slot_word[i] != 0:
                    pairs[count, 0] = self.slot_seq[i]
                    pairs[count, 1] = self.slot_word[i]
                    count += 1
            sort_entries(<SortedEntry*>&pairs[0, 0], <size_t>count)
        both = np.asarray(pairs)[:count]
        return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])

    def replace(self, const int64_t[::1] seqs not None, const int64_t[::1] words not None):
        """Set the map to these words after merging; words of 0 are left out."""
        cdef int64_t i, j
        cdef Table table
        self.make_slots(MIN_SLOTS)
        self.reserve_slots(seqs.shape[0])
        self.open_table(&table)
        with nogil:
            for i in range(seqs.shape[0]):
                if words[i] != 0:
                    j = slot_for(&table, seqs[i])
                    table.words[j] = words[i]
        self.filled = table.filled

    def merge(self, Segment segment not None, source, int64_t[::1] seqs not None, int64_t[::1] words not None,
              Findings findings not None):
        """Merge the journal's words of one segment (changed in place) with its file, and count what is unacked.

        Parameters
        ----------
        segment : Segment
            Loaded from `source`, or without a file.
        source : Region, bytes-like or None
        seqs, words : ndarray of int64
            The part of `collect` that belongs to the segment.

        Returns
        -------
        int
            How many words changed.
        """
        cdef Sink sink
        cdef Region region = None
        cdef const uint8_t[::1] data
        cdef const unsigned char* p = NULL
        cdef const int64_t* entries = &segment.entries[0] if segment.filled else NULL
        cdef int64_t count = seqs.shape[0], changed, unacked = 0, entry_count = self.segment_entry_count
        cdef const int64_t* seq_at = &seqs[0] if count else NULL
        cdef int64_t* word_at = &words[0] if count else NULL
        cdef const unsigned char* image = &self.image[0]
        cdef int64_t base_seq = segment.number * entry_count
        findings.open_sink(&sink, -1)
        if isinstance(source, Region):
            region = source
            p = region.pin(0, segment.size)
        elif source is not None:
            data = source
            p = &data[0] if data.shape[0] else NULL
        try:
            with nogil:
                changed = merge_segment(entries, entry_count, p, base_seq, seq_at, word_at, count, image, &sink, &unacked)
        finally:
            if region is not None:
                region.unpin()
        findings.take(&sink)
        self.depth += unacked - segment.unacked
        segment.unacked = unacked
        return changed

    def add_segment(self, Segment segment not None):
        """Make a segment known."""
        self.segments[segment.number] = segment

    def check_unused(self, int64_t first, int64_t count):
        """int: the first of `count` sequence ids from `first` on that has an entry, or -1."""
        cdef int64_t i
        cdef Table table
        cdef Segment segment
        self.open_table(&table)
        for i in range(first, first + count):
            segment = self.segment_at(i, False)
            if segment is None:
                continue
            if segment.filled and segment.entries[i - self.last_first] & W_PUBLISH:
                return i
            if table.words[slot_of(&table, i)] & W_PUBLISH and table.seqs[slot_of(&table, i)] == i:
                return i
        return -1

    cdef int64_t mark(self, Table* table, int64_t seq, int bit, int64_t* before) except -100:
        # One deliver or ack, if the entry's state allows it.
        cdef Segment segment = self.segment_at(seq, False)
        cdef int64_t slot, word, state
        cdef unsigned char* p
        if segment is None:
            return REFUSED_UNKNOWN
        slot = slot_of(table, seq)
        word = table.words[slot] if table.seqs[slot] == seq else 0
        state = word | (segment.entries[seq - self.last_first] if segment.filled else 0)
        if not state & W_PUBLISH:
            return REFUSED_UNKNOWN
        if state & W_ACK:
            return REFUSED_ACKED
        if bit == W_DELIVER and state & W_DELIVER:
            return REFUSED_DELIVERED
        if bit == W_ACK and not state & W_DELIVER:
            return REFUSED_UNDELIVERED
        slot = slot_for(table, seq)
        before[0] = word
        table.words[slot] = 0 if bit == W_ACK and word & W_PUBLISH else (word if word else self.used << W_BITS) | bit
        if bit == W_ACK:
            segment.unacked -= 1
            self.depth -= 1
        p = &self.image[self.used]
        put_i64(p, seq)
        p[0] |= 0xC0 if bit == W_ACK else 0x80
        self.used += JOURNAL_HEAD
        self.dirty_count += 1
        return 0

    def marks(self, const int64_t[::1] seqs not None, bint ack):
        """Deliver, or ack, all of `seqs` in their order, or none of them.

        Parameters
        ----------
        seqs : ndarray of int64
        ack : bool
            Ack instead of deliver.

        Returns
        -------
        (int, int)
            0, or the negative reason why the number `i` was refused, and `i`.
        """
        cdef int64_t i, count = seqs.shape[0], verdict = 0, slot, used = self.used, dirty = self.dirty_count
        cdef int bit = W_ACK if ack else W_DELIVER
        cdef int64_t[::1] before = np.empty(max(count, 1), dtype=np.int64)
        cdef Table table
        cdef Segment segment
        self.reserve_slots(count)
        self.reserve_image(JOURNAL_HEAD * count)
        self.open_table(&table)
        i = 0
        while i < count:
            verdict = self.mark(&table, seqs[i], bit, &before[i]) if 0 <= seqs[i] <= LAST_SEQ_ID else REFUSED_UNKNOWN
            if verdict < 0:
                break
            i += 1
        self.filled = table.filled
        if verdict == 0:
            return 0, count
        refused = i
        while i > 0:
            i -= 1
            slot = slot_of(&table, seqs[i])
            table.words[slot] = before[i]
            if ack:
                segment = self.segment_at(seqs[i], False)
                segment.unacked += 1
                self.depth += 1
        self.used = used
        self.dirty_count = dirty
        return verdict, refused

    def publish(self, int64_t first, int64_t count, const uint8_t[:, ::1] ids not None, const int64_t[::1] sizes not None,
                const int64_t[::1] expiries not None, const uint8_t[::1] persistent not None, list terms,
                const uint8_t[::1] data, const int64_t[::1] offsets, bint deliver, int64_t start, int64_t max_entries,
                int64_t max_size):
        """Publish entries `first` to `first + count - 1`, each followed by its deliver if `deliver`.

        The caller has checked that the ids are free and every size, and that the columns have `count` rows.

        Parameters
        ----------
        ids : ndarray (count, 16) of uint8
        sizes, expiries : ndarray of int64
            Body sizes; expiries in microseconds, 0 = none.
        persistent : ndarray of uint8
        terms : list of bytes or None
            The embedded terms; None: `data` from ``offsets[i]`` to ``offsets[i + 1]``, or none are embedded.
        start : int
            How many actions were done in earlier calls.
        max_entries, max_size : int
            The call ends when more actions, or bytes, than these wait for a flush.

        Returns
        -------
        int
            How many actions are done in all; fewer than there are where a flush is due.
        """
        cdef int64_t step, steps = count * (2 if deliver else 1), i, seq, slot, embedded, before = 0, verdict
        cdef const unsigned char* term
        cdef unsigned char* p
        cdef Table table
        cdef Segment segment
        self.open_table(&table)
        for step in range(start, steps):
            i = step >> 1 if deliver else step
            seq = first + i
            if deliver and step & 1:
                if self.image.shape[0] - self.used < JOURNAL_HEAD or is_crowded(&table, 1):
                    self.filled = table.filled
                    self.reserve_image(JOURNAL_HEAD)
                    self.reserve_slots(1)
                    self.open_table(&table)
                verdict = self.mark(&table, seq, W_DELIVER, &before)
                if verdict < 0:
                    self.filled = table.filled
                    raise RuntimeError(f"sequence id {seq} could not be delivered ({verdict})")
            else:
                embedded = 0
                term = NULL
                if terms is not None:
                    term = <const unsigned char*>PyBytes_AS_STRING(<bytes>terms[i])
                    embedded = PyBytes_GET_SIZE(<bytes>terms[i])
                elif offsets is not None:
                    embedded = offsets[i + 1] - offsets[i]
                    if embedded:
                        term = &data[offsets[i]]
                if self.image.shape[0] - self.used < JOURNAL_PUBLISH_FIXED + embedded or is_crowded(&table, 1):
                    self.filled = table.filled
                    self.reserve_image(JOURNAL_PUBLISH_FIXED + embedded)
                    self.reserve_slots(1)
                    self.open_table(&table)
                segment = self.segment_at(seq, True)
                slot = slot_for(&table, seq)
                table.words[slot] = publish_word(NULL, self.used, persistent[i], embedded)
                p = &self.image[self.used]
                put_i64(p, seq)
                if not persistent[i]:
                    p[0] |= 0x40
                p += JOURNAL_HEAD
                memcpy(p, &ids[i, 0], 16)
                put_i64(p + BODY_EXPIRY, expiries[i])
                put_i32(p + BODY_SIZE, <int32_t><uint32_t>sizes[i])
                put_i32(p + BODY_EMBEDDED, <int32_t><uint32_t>embedded)
                if embedded:
                    memcpy(p + BODY_FIXED, term, <size_t>embedded)
                self.used += JOURNAL_PUBLISH_FIXED + embedded
                segment.unacked += 1
                self.depth += 1
                self.dirty_count += 1
                if seq >= self.published_end:
                    self.published_end = seq + 1
            if self.dirty_count > max_entries or self.used > max_size:
                self.filled = table.filled
                return step + 1
        self.filled = table.filled
        return steps

    def publish_one(self, int64_t seq, bytes msg_id, bytes term, int64_t size, int64_t expiry, int persistent, bint known_free):
        """Publish one entry with little ado, for those who have one at a time.

        Parameters
        ----------
        msg_id : bytes or None
            None: the one of `term`.
        term : bytes or None
        size : int
            -1: the one that `term` says.
        expiry : int
            In microseconds, 0 = none.
        persistent : int
            -1: as `term` says.
        known_free : bool
            The id need not be looked up.

        Returns
        -------
        bool
            False: the term says its size only to those who decode it; nothing was done.

        Raises
        ------
        InvalidMessageError
            As of `checked_ids`, or a number is impossible or in use.
        """
        cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(term) if term is not None else NULL
        cdef int64_t n = PyBytes_GET_SIZE(term) if term is not None else 0, found_size = -1
        cdef const unsigned char* found = NULL
        cdef const unsigned char* given = NULL
        cdef unsigned char* out
        cdef Table table
        cdef Segment segment
        if msg_id is not None:
            if PyBytes_GET_SIZE(msg_id) != 16:
                raise InvalidMessageError("a message id has 16 bytes")
            given = <const unsigned char*>PyBytes_AS_STRING(msg_id)
        if seq < 0 or seq > LAST_SEQ_ID:
            raise InvalidMessageError(f"sequence id {seq} does not fit into 62 bits")
        if term is None:
            if given == NULL or size < 0:
                raise InvalidMessageError("a message that lies in a store needs its id and its size")
        else:
            found = plain_message(p, n, &found_size) if 2 <= n <= <int64_t>0xFFFFFFFFu else NULL
            if found == NULL:
                found_size = -1
                if n < 2 or n > <int64_t>0xFFFFFFFFu or term_extent(p, n) != n:
                    raise InvalidMessageError("the message is not a well-formed external term; give what Message(...).term is")
                found = message_id(p, n)
                if found == NULL and (given == NULL or p[1] != 80):
                    raise InvalidMessageError("the message is not a term that says its id; give what Message(...).term is")
            if found != NULL and given != NULL and memcmp(found, given, 16) != 0:
                raise InvalidMessageError("the message has another id than msg_id says; a node would not boot with it")
            if size < 0:
                size = found_size
            if size < 0:
                return False
        if size > <int64_t>0xFFFFFFFFu:
            raise InvalidMessageError(f"a size of {size} bytes does not fit into 32 bits")
        if not known_free and self.check_unused(seq, 1) >= 0:
            raise InvalidMessageError(f"sequence id {seq} is in use")
        if persistent < 0:
            persistent = p == NULL or not says_transient(p, n, True)
        self.reserve_image(JOURNAL_PUBLISH_FIXED + n)
        self.reserve_slots(1)
        self.open_table(&table)
        segment = self.segment_at(seq, True)
        table.words[slot_for(&table, seq)] = publish_word(NULL, self.used, persistent, n)
        self.filled = table.filled
        out = &self.image[self.used]
        put_i64(out, seq)
        if not persistent:
            out[0] |= 0x40
        out += JOURNAL_HEAD
        memcpy(out, given if given != NULL else found, 16)
        put_i64(out + BODY_EXPIRY, expiry)
        put_i32(out + BODY_SIZE, <int32_t><uint32_t>size)
        put_i32(out + BODY_EMBEDDED, <int32_t><uint32_t>n)
        if n:
            memcpy(out + BODY_FIXED, p, <size_t>n)
        self.used += JOURNAL_PUBLISH_FIXED + n
        segment.unacked += 1
        self.depth += 1
        self.dirty_count += 1
        if seq >= self.published_end:
            self.published_end = seq + 1
        return True

    def unwritten(self):
        """bytes: what the journal file does not have yet."""
        return PyBytes_FromStringAndSize(<const char*>&self.image[0] + self.written, self.used - self.written)

    def image_view(self):
        """ndarray of uint8: the journal's bytes since the last flush, as they are now."""
        return self.image_array[: self.used]

    def encode(self, Segment segment not None, const int64_t[::1] seqs not None, const int64_t[::1] words not None):
        """bytes: what a flush appends to the segment for these words, in a node's order."""
        cdef int64_t count = seqs.shape[0], size
        cdef int64_t base_seq = segment.number * self.segment_entry_count
        cdef const unsigned char* image = &self.image[0]
        cdef unsigned char* p
        if count == 0:
            return b""
        with nogil:
            size = encoded_size(&words[0], count, image)
        blob = PyBytes_FromStringAndSize(NULL, size)
        p = <unsigned char*>PyBytes_AS_STRING(blob)
        with nogil:
            encode_segment(&seqs[0], &words[0], count, base_seq, image, 0, p, NULL)
        return blob

    def prepare(self, Segment segment not None):
        """Make room for the entries of a segment that gets its file, before anything is written."""
        segment.make_entries(self.segment_entry_count)

    def applied(self, Segment segment not None, const int64_t[::1] seqs not None, const int64_t[::1] words not None):
        """Note that the blob of `encode` was appended to the segment's file; `prepare` came before."""
        cdef int64_t start = segment.size if segment.size > 0 else 0
        if seqs.shape[0]:
            start += encode_segment(&seqs[0], &words[0], seqs.shape[0], segment.number * self.segment_entry_count, &self.image[0],
                                    start, NULL, &segment.entries[0])
        segment.size = segment.end = start

    def forget(self, Segment segment not None):
        """Drop a segment without unacked entries."""
        self.segments.pop(segment.number, None)
        if self.last is segment:
            self.last = None
            self.last_first = -1

    def clear(self):
        """Empty the map and the journal's bytes, after all words were applied."""
        if self.slot_seq.shape[0] > KEPT_SLOTS:
            self.make_slots(MIN_SLOTS)
        else:
            self.slot_seq[:] = -1
            self.filled = 0
        if self.image.shape[0] > KEPT_IMAGE:
            self.image_array = np.empty(4096, dtype=np.uint8)
            self.image = self.image_array
        self.used = self.written = self.dirty_count = 0

    def rows(self, Segment segment not None, source, const int64_t[::1] seqs not None, const int64_t[::1] words not None,
             int which, columns not None, int64_t at):
        """Append a segment's entries to columns, in the order of their ids.

        Parameters
        ----------
        source : Region, bytes-like or None
            The segment's file.
        seqs, words : ndarray of int64
            The part of `collect` that belongs to the segment.
        which : int
            0 all with a publish, 1 the live ones, 2 of these the message ids of persistent ones that are not embedded.
        columns : tuple of ndarray
            seq_id, size, flags, expiry_us, msg_id, segment, pos, term_size; for `which` 2 only msg_id.
        at : int
            The first free row.

        Returns
        -------
        int
            The first free row after them; -1: the file is not the one that was read; -2: the columns are full.
        """
        cdef Rows out
        cdef Region region = None
        cdef const uint8_t[::1] data
        cdef int64_t[::1] seq_id, size, expiry, numbers, pos, term_size
        cdef uint8_t[::1] flags
        cdef uint8_t[:, ::1] msg_id
        cdef int64_t room, count = seqs.shape[0], n = 0
        cdef const unsigned char* p = NULL
        cdef const int64_t* entries = NULL
        cdef const int64_t* seq_at = &seqs[0] if count else NULL
        cdef const int64_t* word_at = &words[0] if count else NULL
        cdef const unsigned char* image = &self.image[0]
        memset(&out, 0, sizeof(out))
        if which == 2:
            msg_id = columns
            room = msg_id.shape[0]
        else:
            seq_id, size, flags, expiry, msg_id, numbers, pos, term_size = columns
            room = min(seq_id.shape[0], size.shape[0], flags.shape[0], expiry.shape[0], msg_id.shape[0], numbers.shape[0],
                       pos.shape[0], term_size.shape[0])
        if msg_id.shape[1] != 16:
            raise ValueError("msg_id has 16 columns")
        if room == 0:
            # Nothing to point to; whatever there is does not fit.
            return at if segment.unacked == 0 else -2
        out.msg_id = &msg_id[0, 0]
        if which != 2:
            out.seq_id = &seq_id[0]
            out.size = &size[0]
            out.flags = &flags[0]
            out.expiry = &expiry[0]
            out.segment = &numbers[0]
            out.pos = &pos[0]
            out.term_size = &term_size[0]
        if segment.filled and isinstance(source, Region):
            region = source
            entries = &segment.entries[0]
            n = region.size
            p = region.pin(0, n)
        elif segment.filled and source is not None:
            data = source
            entries = &segment.entries[0]
            n = data.shape[0]
            p = &data[0] if n else NULL
        try:
            with nogil:
                at = fill_rows(entries, self.segment_entry_count, segment.number, p, n, seq_at, word_at, count, image,
                               self.used, which, &out, at, room)
        finally:
            if region is not None:
                region.unpin()
        return at


# ------------------------------------------------------------------------------------------------------- message files

cpdef enum MessageRecordLayout:
    # A record of N.rdq (§8.1): size of what follows but the mark, message id, term, and the mark that it was written whole.
    MESSAGE_RECORD_SIZE = 0
    MESSAGE_RECORD_MSG_ID = 8
    MESSAGE_RECORD_TERM = 24
    MESSAGE_RECORD_EXTRA = 25  # bytes of a record beyond its term
    MESSAGE_RECORD_MARK = 255

cpdef enum MessageScan:
    # How to look for records.
    SCAN_SEQUENTIAL = 0  # RabbitMQ up to 3.12: from record to record
    SCAN_BYTEWISE = 1    # 3.13 and later: at every position, and only what is referred to
    SCAN_SALVAGE = 2     # at every position, and only if the term is well-formed, ends there and holds the same id

cpdef enum MessageStop:
    # Why a pass over a file ended.
    STOP_END = 0         # the file ends with a record, or the pass goes over all of it
    STOP_ZERO = 1        # a size of zero
    STOP_TORN = 2        # fewer bytes than a size needs, or than it says
    STOP_ROWS = 3        # as many records as were asked for
    STOP_WORK = 4        # so many overlapping records that only a made-up file has them

cpdef enum MessageFlag:
    MESSAGE_WRITTEN = 1     # the mark is there
    MESSAGE_TERM_OK = 2     # the term is well-formed, of that length, and holds the id of the record (only if asked for)
    MESSAGE_TOO_SHORT = 4   # the size leaves no place for an id; a node stops with an error if the mark is there

cdef enum:
    NOT_LOCATED = -1
    EMPTY_SLOT = -2
    AHEAD = 16

assert MESSAGE_RECORD_MSG_ID + 16 == MESSAGE_RECORD_TERM and MESSAGE_RECORD_TERM + 1 == MESSAGE_RECORD_EXTRA


cdef inline int64_t record_extent(const unsigned char* p, int64_t left) noexcept nogil:
    # Bytes of the record at p, its mark included; 0: a size of zero; -1: it does not fit.  A size is unsigned in the file.
    cdef int64_t size
    if left < 8:
        return -1
    size = get_i64(p)
    if size == 0:
        return 0
    if size < 0 or size > left - 9:
        return -1
    return size + 9


cdef inline bint holds_message(const unsigned char* p, int64_t extent) noexcept nogil:
    # The record's term is an external term of exactly its length, and names the id of the record.
    cdef int64_t size = extent - MESSAGE_RECORD_EXTRA
    cdef const unsigned char* msg_id
    if size < 2 or p[<int>MESSAGE_RECORD_TERM] != 131 or term_extent(p + MESSAGE_RECORD_TERM, size) != size:
        return False
    msg_id = message_id(p + MESSAGE_RECORD_TERM, size)
    return msg_id != NULL and memcmp(msg_id, p + MESSAGE_RECORD_MSG_ID, 16) == 0


cdef inline int64_t zero_run(const unsigned char* p, int64_t n) noexcept nogil:
    # Zero bytes at the beginning of n.
    cdef int64_t i = 0
    cdef uint64_t word
    while i + 8 <= n:
        memcpy(&word, p + i, 8)
        if word != 0:
            break
        i += 8
    while i < n and p[i] == 0:
        i += 1
    return i


cdef inline int64_t next_candidate(const unsigned char* p, int64_t n, int64_t at) noexcept nogil:
    # The next position at or after `at` whose bytes may be a whole record with an id: size, end and mark fit.  n: none.
    cdef int64_t extent, run
    while at < n:
        if p[at] != 0:
            # The first byte of a size below 2**56 is zero.
            at += 1
            continue
        extent = record_extent(p + at, n - at)
        if extent == 0:
            # A size above zero may begin inside the run, at most seven bytes before its end.
            run = zero_run(p + at, n - at)
            at += run - 7 if run > 8 else 1
            continue
        if extent >= MESSAGE_RECORD_EXTRA and p[at + extent - 1] == MESSAGE_RECORD_MARK:
            return at
        at += 1
    return n


cdef int64_t scan_rows(const unsigned char* p, int64_t n, int64_t* at, int mode, bint check_terms, int64_t* work, int64_t room,
                       unsigned char* ids, int64_t* pos, int64_t* size, uint8_t* flags, int* stop) noexcept nogil:
    cdef int64_t here = at[0], extent, row = 0
    stop[0] = STOP_END
    if mode == SCAN_SEQUENTIAL:
        while here < n:
            if row == room:
                stop[0] = STOP_ROWS
                break
            extent = record_extent(p + here, n - here)
            if extent <= 0:
                stop[0] = STOP_ZERO if extent == 0 else STOP_TORN
                break
            flags[row] = MESSAGE_WRITTEN if p[here + extent - 1] == MESSAGE_RECORD_MARK else 0
            pos[row] = here
            size[row] = extent - MESSAGE_RECORD_EXTRA
            if extent >= MESSAGE_RECORD_EXTRA:
                memcpy(ids + 16 * row, p + here + MESSAGE_RECORD_MSG_ID, 16)
                if check_terms and holds_message(p + here, extent):
                    flags[row] |= MESSAGE_TERM_OK
            else:
                flags[row] |= MESSAGE_TOO_SHORT
                memset(ids + 16 * row, 0, 16)
            row += 1
            here += extent
        at[0] = here
        return row
    while True:
        here = next_candidate(p, n, here)
        if here >= n:
            here = n
            break
        if row == room:
            stop[0] = STOP_ROWS
            break
        extent = record_extent(p + here, n - here)
        work[0] -= extent
        if work[0] < 0:
            stop[0] = STOP_WORK
            break
        if not holds_message(p + here, extent):
            here += 1
            continue
        memcpy(ids + 16 * row, p + here + MESSAGE_RECORD_MSG_ID, 16)
        pos[row] = here
        size[row] = extent - MESSAGE_RECORD_EXTRA
        flags[row] = MESSAGE_WRITTEN | MESSAGE_TERM_OK
        row += 1
        here += extent
    at[0] = here
    return row


cdef int64_t work_limit(int64_t n) noexcept nogil:
    # Real records do not overlap, but a body may hold whole ones, which are looked at once more.
    return 16 * n + (1 << 20) if n < INT64_MAX // 32 else INT64_MAX


def scan_messages(Region region not None, int64_t pos=0, int mode=SCAN_SEQUENTIAL, int64_t end=-1, bint check_terms=False):
    """Go over the records of a message file.

    Parameters
    ----------
    region : Region
        The whole file.
    pos, end : int
        Where to begin and to end (default: the end of the file).
    mode : MessageScan
        SCAN_SEQUENTIAL or SCAN_SALVAGE; what SCAN_BYTEWISE accepts depends on references, so it is a method of
        `LocationTable`.
    check_terms : bool
        Tell of every record whether its term is whole and holds its id (`MESSAGE_TERM_OK`); always so with SCAN_SALVAGE.

    Returns
    -------
    tuple
        msg_id (n, 16) uint8; position of the record (n,) int64, bytes; size of the term (n,) int64, bytes, negative where
        there is no place for an id; flags (n,) uint8 of `MessageFlag`; position where the pass ended; `MessageStop`.

    Raises
    ------
    OffsetOutOfRangeError
        `pos` or `end` lies outside the file.
    """
    cdef int64_t n = region.size if end < 0 else end, at, rows, work, room = 65536
    cdef int stop = STOP_ROWS
    cdef unsigned char* p
    cdef uint8_t[:, ::1] ids
    cdef int64_t[::1] positions, sizes
    cdef uint8_t[::1] flags
    if mode != SCAN_SEQUENTIAL and mode != SCAN_SALVAGE:
        raise ValueError(f"mode is {mode}, not SCAN_SEQUENTIAL or SCAN_SALVAGE")
    if pos < 0 or pos > n:
        raise OffsetOutOfRangeError(f"position {pos} is not inside the {n} bytes of the file", pos=pos)
    parts = []
    at, work = pos, work_limit(n)
    p = region.pin(0, n)
    try:
        while stop == STOP_ROWS:
            room = min(room, (n - at) // 9 + 1)
            columns = (np.empty((room, 16), np.uint8), np.empty(room, np.int64), np.empty(room, np.int64),
                       np.empty(room, np.uint8))
            ids, positions, sizes, flags = columns
            with nogil:
                rows = scan_rows(p, n, &at, mode, check_terms, &work, room, &ids[0, 0], &positions[0], &sizes[0], &flags[0], &stop)
            parts.append([column[:rows] for column in columns])
    finally:
        region.unpin()
    if len(parts) == 1:
        # A small answer must not keep the whole room.
        found = [column.copy() if rows < room // 2 else column for column in parts[0]]
    else:
        found = [np.concatenate(column) for column in zip(*parts)]
    return (*found, at, stop)


def encode_message_record(bytes msg_id not None, const uint8_t[::1] term not None):
    """bytes: the record of a message in an N.rdq.

    Raises
    ------
    ValueError
        `msg_id` is not of 16 bytes.
    """
    cdef int64_t n = term.shape[0]
    if PyBytes_GET_SIZE(msg_id) != 16:
        raise ValueError(f"a message id has 16 bytes, not {len(msg_id)}")
    cdef bytes record = PyBytes_FromStringAndSize(NULL, n + MESSAGE_RECORD_EXTRA)
    cdef unsigned char* p = <unsigned char*>PyBytes_AS_STRING(record)
    put_i64(p, n + 16)
    memcpy(p + MESSAGE_RECORD_MSG_ID, PyBytes_AS_STRING(msg_id), 16)
    if n:
        memcpy(p + MESSAGE_RECORD_TERM, &term[0], n)
    p[MESSAGE_RECORD_TERM + n] = MESSAGE_RECORD_MARK
    return record


cdef struct Location:
    unsigned char msg_id[16]
    int64_t pos
    int64_t size
    int32_t file
    int32_t refcount


cdef inline uint64_t hash_id(const unsigned char* msg_id, uint64_t seed) noexcept nogil:
    cdef uint64_t a, b
    memcpy(&a, msg_id, 8)
    memcpy(&b, msg_id + 8, 8)
    a = (a ^ seed) * <uint64_t>0x9E3779B97F4A7C15
    a ^= a >> 32
    a = (a + b) * <uint64_t>0xBF58476D1CE4E5B9
    return a ^ (a >> 29)


cdef inline int64_t find_slot(const Location* slots, uint64_t mask, uint64_t seed, const unsigned char* msg_id) noexcept nogil:
    # Where the id is, or the empty slot where it would go.  There is always an empty one.
    cdef uint64_t i = hash_id(msg_id, seed) & mask
    while slots[i].file != EMPTY_SLOT and memcmp(slots[i].msg_id, msg_id, 16) != 0:
        i = (i + 1) & mask
    return <int64_t>i


cdef Location* new_slots(int64_t capacity) noexcept nogil:
    cdef Location* slots
    cdef int64_t i
    if capacity > INT64_MAX // <int64_t>sizeof(Location):
        return NULL
    slots = <Location*>malloc(<size_t>capacity * sizeof(Location))
    if slots != NULL:
        for i in range(capacity):
            slots[i].file = EMPTY_SLOT
    return slots


cdef struct ScanSums:
    int64_t at
    int64_t records
    int64_t accepted
    int64_t accepted_bytes
    int64_t last_end
    int64_t unwritten
    int64_t too_short
    int64_t first_fault
    int stop
    bint no_memory


cdef inline int64_t put_small_integer(unsigned char* p, int64_t value) noexcept nogil:
    # As OTP 25 writes an integer that is not negative.
    cdef int64_t n = 0
    if value < 256:
        p[0] = 97
        p[1] = <unsigned char>value
        return 2
    if value <= 0x7fffffff:
        p[0] = 98
        put_i32(p + 1, <int32_t>value)
        return 5
    p[0] = 110
    p[2] = 0
    while value:
        p[3 + n] = <unsigned char>(value & 255)
        value >>= 8
        n += 1
    p[1] = <unsigned char>n
    return 3 + n


cdef inline int64_t get_small_integer(const unsigned char* p, int64_t n, int64_t* value) noexcept nogil:
    # Bytes of the integer term at p, or -1 if it is none, negative or above 2**62.
    cdef int64_t i
    if n >= 2 and p[0] == 97:
        value[0] = p[1]
        return 2
    if n >= 5 and p[0] == 98:
        value[0] = get_i32(p + 1)
        return 5 if value[0] >= 0 else -1
    if n >= 3 and p[0] == 110 and p[1] <= 8 and p[2] == 0 and n >= 3 + p[1]:
        value[0] = 0
        for i in range(p[1] - 1, -1, -1):
            if value[0] >> 54:
                return -1
            value[0] = value[0] << 8 | p[3 + i]
        return 3 + p[1]
    return -1


@cython.final
cdef class LocationTable:
    """Where messages lie and how often they are referred to: message id to reference count, file, position, size.

    A table of open addressing in memory of its own, 40 bytes a slot, at most seven eighths full.  A message that was only
    referred to so far has the file -1.  Long passes release the GIL; another call meanwhile raises RuntimeError, so its
    owner holds a lock.

    Parameters
    ----------
    expected : int, optional
        How many ids will come.
    """

    cdef Location* slots
    cdef int64_t capacity, count
    cdef uint64_t seed
    cdef bint busy

    def __cinit__(self, int64_t expected=0):
        self.slots = NULL
        self.capacity = 0
        self.count = 0
        self.busy = False
        # A file's ids are hostile: nobody shall be able to choose ones that all meet in one place.
        self.seed = int.from_bytes(os.urandom(8), "little")
        self.reserve(expected)

    def __dealloc__(self):
        free(self.slots)

    cdef int begin(self) except -1:
        if self.busy:
            raise RuntimeError("another thread is at work in this table; its owner's lock was not held")
        return 0

    cdef bint grow(self, int64_t expected) noexcept nogil:
        # False: no memory; the table is as it was.
        cdef int64_t capacity = 16, i, at
        cdef Location* slots
        while capacity - capacity // 8 <= expected:
            if capacity > INT64_MAX // 128:
                return False
            capacity *= 2
        if capacity <= self.capacity:
            return True
        slots = new_slots(capacity)
        if slots == NULL:
            return False
        for i in range(self.capacity):
            if self.slots[i].file != EMPTY_SLOT:
                at = find_slot(slots, <uint64_t>(capacity - 1), self.seed, self.slots[i].msg_id)
                slots[at] = self.slots[i]
        free(self.slots)
        self.slots = slots
        self.capacity = capacity
        return True

    cdef Location* find(self, const unsigned char* msg_id) noexcept nogil:
        cdef int64_t i = find_slot(self.slots, <uint64_t>(self.capacity - 1), self.seed, msg_id)
        return NULL if self.slots[i].file == EMPTY_SLOT else &self.slots[i]

    cdef Location* make(self, const unsigned char* msg_id) noexcept nogil:
        # The entry of the id, new (not located, no reference) if there was none; NULL: no memory.
        cdef int64_t i = find_slot(self.slots, <uint64_t>(self.capacity - 1), self.seed, msg_id)
        if self.slots[i].file != EMPTY_SLOT:
            return &self.slots[i]
        if self.count >= self.capacity - self.capacity // 8 - 1:
            if not self.grow(self.count + 1):
                return NULL
            i = find_slot(self.slots, <uint64_t>(self.capacity - 1), self.seed, msg_id)
        memcpy(self.slots[i].msg_id, msg_id, 16)
        self.slots[i].file = NOT_LOCATED
        self.slots[i].pos = 0
        self.slots[i].size = 0
        self.slots[i].refcount = 0
        self.count = self.count + 1
        return &self.slots[i]

    cdef bint take_out(self, const unsigned char* msg_id) noexcept nogil:
        # Deletes the id and moves back what had to go past it, so that no search ends early.
        cdef uint64_t mask = <uint64_t>(self.capacity - 1), hole, i, home
        hole = <uint64_t>find_slot(self.slots, mask, self.seed, msg_id)
        if self.slots[hole].file == EMPTY_SLOT:
            return False
        i = hole
        while True:
            i = (i + 1) & mask
            if self.slots[i].file == EMPTY_SLOT:
                break
            home = hash_id(self.slots[i].msg_id, self.seed) & mask
            if ((i - home) & mask) >= ((i - hole) & mask):
                self.slots[hole] = self.slots[i]
                hole = i
        self.slots[hole].file = EMPTY_SLOT
        self.count = self.count - 1
        return True

    def __len__(self):
        return self.count

    def __contains__(self, bytes msg_id not None):
        return self.get(msg_id) is not None

    def reserve(self, int64_t expected):
        """Make room for so many ids.

        Raises
        ------
        MemoryError
            There is not so much memory.
        """
        self.begin()
        if not self.grow(max(expected, self.count)):
            raise MemoryError(f"no memory for the places of {expected} messages")

    @property
    def allocated(self):
        """int: bytes that the table takes."""
        return self.capacity * <int64_t>sizeof(Location)

    def get(self, bytes msg_id not None):
        """tuple or None: (reference count, file, position, size of the record) of an id; the file is -1 if it is not located."""
        cdef Location* entry
        self.begin()
        if PyBytes_GET_SIZE(msg_id) != 16:
            return None
        entry = self.find(<unsigned char*>PyBytes_AS_STRING(msg_id))
        if entry == NULL:
            return None
        return (entry.refcount, entry.file, entry.pos, entry.size)

    def put(self, bytes msg_id not None, int32_t refcount, int32_t file=NOT_LOCATED, int64_t pos=0, int64_t size=0):
        """Enter an id, or change all that is known of it.

        Raises
        ------
        ValueError
            `msg_id` is not of 16 bytes, or a number is negative that cannot be.
        MemoryError
            There is no memory for one more.
        """
        cdef Location* entry
        self.begin()
        if PyBytes_GET_SIZE(msg_id) != 16:
            raise ValueError(f"a message id has 16 bytes, not {len(msg_id)}")
        if file < NOT_LOCATED or refcount < 0 or pos < 0 or size < 0:
            raise ValueError(f"reference count {refcount}, file {file}, position {pos}, size {size}: none may be negative")
        entry = self.make(<unsigned char*>PyBytes_AS_STRING(msg_id))
        if entry == NULL:
            raise MemoryError("no memory for the place of one more message")
        entry.refcount, entry.file, entry.pos, entry.size = refcount, file, pos, size

    def discard(self, bytes msg_id not None):
        """bool: the id was there; now it is not."""
        self.begin()
        return PyBytes_GET_SIZE(msg_id) == 16 and self.take_out(<unsigned char*>PyBytes_AS_STRING(msg_id))

    def refer(self, const uint8_t[:, ::1] msg_ids not None, const int64_t[::1] counts=None):
        """Add references: one for each row of `msg_ids` (n, 16) uint8, or as many as `counts` (n,) int64 says.

        Raises
        ------
        ValueError
            The shapes do not fit, a count is negative, or a sum goes beyond 2**31 - 1.
        MemoryError
            There is no memory for so many.
        """
        cdef int64_t i, n = msg_ids.shape[0], more = 1
        cdef int fault = 0
        cdef Location* entry
        self.begin()
        if msg_ids.shape[1] != 16 or (counts is not None and counts.shape[0] != n):
            raise ValueError("msg_ids is of shape (n, 16) and counts of shape (n,)")
        cdef bint counted = counts is not None
        self.busy = True
        with nogil:
            for i in range(n):
                if i + AHEAD < n:
                    # A table of millions is in no cache: what is needed soon is asked for now.
                    prefetch(&self.slots[hash_id(&msg_ids[i + AHEAD, 0], self.seed) & <uint64_t>(self.capacity - 1)])
                if counted:
                    more = counts[i]
                entry = self.make(&msg_ids[i, 0])
                if entry == NULL:
                    fault = 1
                    break
                if more < 0 or more > 0x7fffffff - entry.refcount:
                    fault = 2
                    break
                entry.refcount += <int32_t>more
        self.busy = False
        if fault == 1:
            raise MemoryError(f"no memory for the places of {n} messages")
        if fault:
            raise ValueError(f"row {i}: a reference count is negative or above 2**31 - 1")

    cdef void accept(self, const unsigned char* p, int64_t at, int64_t extent, int32_t file, bint adopt, bint last_wins,
                     ScanSums* sums) noexcept nogil:
        cdef Location* entry
        if adopt:
            entry = self.make(p + at + MESSAGE_RECORD_MSG_ID)
            if entry == NULL:
                sums.no_memory = True
                return
            if entry.file == NOT_LOCATED and entry.refcount == 0:
                entry.refcount = 1
        else:
            entry = self.find(p + at + MESSAGE_RECORD_MSG_ID)
            if entry == NULL:
                return
        if entry.file == NOT_LOCATED:
            sums.accepted += 1
        elif entry.file == file and last_wins:
            sums.accepted_bytes -= entry.size
        else:
            return
        sums.accepted_bytes += extent
        entry.file = file
        entry.pos = at
        entry.size = extent
        if at + extent > sums.last_end:
            sums.last_end = at + extent

    cdef void scan_file(self, const unsigned char* p, int64_t n, int32_t file, int mode, bint adopt,
                        ScanSums* sums) noexcept nogil:
        cdef int64_t here = sums.at, extent, before, work = work_limit(n), rows, i
        cdef int64_t places[AHEAD]
        cdef int64_t extents[AHEAD]
        sums.stop = STOP_END
        if mode == SCAN_SEQUENTIAL:
            while here < n and sums.stop == STOP_END and not sums.no_memory:
                # So many records at a time, that their slots are under way when they are looked up.
                rows = 0
                while rows < AHEAD and here < n:
                    extent = record_extent(p + here, n - here)
                    if extent <= 0:
                        sums.stop = STOP_ZERO if extent == 0 else STOP_TORN
                        break
                    places[rows] = here
                    extents[rows] = extent
                    rows += 1
                    if extent >= MESSAGE_RECORD_EXTRA:
                        prefetch(&self.slots[hash_id(p + here + MESSAGE_RECORD_MSG_ID, self.seed) & <uint64_t>(self.capacity - 1)])
                    here += extent
                for i in range(rows):
                    extent = extents[i]
                    if extent < MESSAGE_RECORD_EXTRA or p[places[i] + extent - 1] != MESSAGE_RECORD_MARK:
                        if sums.unwritten + sums.too_short == 0:
                            sums.first_fault = places[i]
                        if extent < MESSAGE_RECORD_EXTRA:
                            sums.too_short += 1
                        else:
                            sums.unwritten += 1
                    else:
                        sums.records += 1
                        # In each file a node meets the last occurrence of an id first.
                        self.accept(p, places[i], extent, file, adopt, True, sums)
            sums.at = here
            return
        while not sums.no_memory:
            here = next_candidate(p, n, here)
            if here >= n:
                here = n
                break
            extent = record_extent(p + here, n - here)
            if mode == SCAN_SALVAGE:
                work -= extent
                if work < 0:
                    sums.stop = STOP_WORK
                    break
                if not holds_message(p + here, extent):
                    here += 1
                    continue
                sums.records += 1
                self.accept(p, here, extent, file, adopt, False, sums)
                here += extent
            else:
                before = sums.accepted
                self.accept(p, here, extent, file, False, False, sums)
                sums.records += sums.accepted - before
                here += extent if sums.accepted != before else 1
        sums.at = here

    def scan(self, Region region not None, int32_t file, int mode=SCAN_SEQUENTIAL, bint adopt=False, int64_t pos=0):
        """Locate messages in a message file: those that are referred to and have no place yet (§8.5).

        Parameters
        ----------
        region : Region
            The whole file.
        file : int
            Its number.
        mode : MessageScan
            With SCAN_SEQUENTIAL the last occurrence of an id in the file counts, else the first.
        adopt : bool
            Every message counts as referred to once, but for those that are known to have no reference.  Not for
            SCAN_BYTEWISE, which would take bytes of a body for a record.
        pos : int
            Where to begin.

        Returns
        -------
        tuple of int
            records that were met; messages that got their place here; bytes of their records; end of the last of them;
            records without their mark; records too short for an id; position of the first of these two, or -1; where the
            pass ended; `MessageStop`.

        Raises
        ------
        OffsetOutOfRangeError
            `pos` lies outside the file.
        MemoryError
            There is no memory for so many.
        """
        cdef ScanSums sums
        cdef unsigned char* p
        self.begin()
        if not SCAN_SEQUENTIAL <= mode <= SCAN_SALVAGE or (adopt and mode == SCAN_BYTEWISE):
            raise ValueError(f"mode is {mode}, which is none, or does not go with adopt")
        if file < 0 or pos < 0 or pos > region.size:
            raise OffsetOutOfRangeError(f"file {file}, position {pos}: not inside the file", pos=pos)
        memset(&sums, 0, sizeof(ScanSums))
        sums.first_fault = -1
        sums.at = pos
        p = region.pin(0, region.size)
        self.busy = True
        try:
            with nogil:
                self.scan_file(p, region.size, file, mode, adopt, &sums)
        finally:
            self.busy = False
            region.unpin()
        if sums.no_memory:
            raise MemoryError("no memory for the places of so many messages")
        return (sums.records, sums.accepted, sums.accepted_bytes, sums.last_end, sums.unwritten, sums.too_short,
                sums.first_fault, sums.at, sums.stop)

    def live(self, Region region not None, int32_t file):
        """What of a message file is in use, by going over its records.

        Returns
        -------
        tuple
            msg_id (n, 16) uint8, position (n,) int64 and size (n,) int64 of the records that are referred to, ascending;
            msg_id (m, 16) uint8 of those of this file whose reference count is 0; where the pass ended.
        """
        cdef int64_t n = region.size, here, extent, rows = 0, dead = 0, room = n // MESSAGE_RECORD_EXTRA + 1
        cdef unsigned char* p
        cdef Location* entry
        self.begin()
        found = (np.empty((room, 16), np.uint8), np.empty(room, np.int64), np.empty(room, np.int64),
                 np.empty((room, 16), np.uint8))
        cdef uint8_t[:, ::1] ids = found[0], dead_ids = found[3]
        cdef int64_t[::1] positions = found[1], sizes = found[2]
        here = 0
        p = region.pin(0, n)
        self.busy = True
        try:
            with nogil:
                while here < n:
                    extent = record_extent(p + here, n - here)
                    if extent <= 0:
                        break
                    if extent >= MESSAGE_RECORD_EXTRA and p[here + extent - 1] == MESSAGE_RECORD_MARK:
                        entry = self.find(p + here + MESSAGE_RECORD_MSG_ID)
                        if entry != NULL and entry.file == file and entry.pos == here and entry.size == extent:
                            if entry.refcount > 0:
                                memcpy(&ids[rows, 0], entry.msg_id, 16)
                                positions[rows] = here
                                sizes[rows] = extent
                                rows += 1
                            else:
                                memcpy(&dead_ids[dead, 0], entry.msg_id, 16)
                                dead += 1
                    here += extent
        finally:
            self.busy = False
            region.unpin()
        return (found[0][:rows].copy(), found[1][:rows].copy(), found[2][:rows].copy(), found[3][:dead].copy(), here)

    def move(self, const uint8_t[:, ::1] msg_ids not None, int32_t file, const int64_t[::1] positions not None):
        """Change the place of known ids (n, 16) to `file` and `positions` (n,); their sizes stay."""
        cdef int64_t i
        cdef Location* entry
        self.begin()
        if msg_ids.shape[1] != 16 or positions.shape[0] != msg_ids.shape[0]:
            raise ValueError("msg_ids is of shape (n, 16) and positions of shape (n,)")
        for i in range(msg_ids.shape[0]):
            entry = self.find(&msg_ids[i, 0])
            if entry != NULL:
                entry.file = file
                entry.pos = positions[i]

    def discard_many(self, const uint8_t[:, ::1] msg_ids not None):
        """Forget ids (n, 16)."""
        cdef int64_t i
        self.begin()
        if msg_ids.shape[1] != 16:
            raise ValueError("msg_ids is of shape (n, 16)")
        for i in range(msg_ids.shape[0]):
            self.take_out(&msg_ids[i, 0])

    def columns(self, int file=EMPTY_SLOT):
        """All entries, or those of one file (-1: not located), as NumPy columns in no particular order.

        Returns
        -------
        tuple
            msg_id (n, 16) uint8, reference count (n,) int32, file (n,) int32, position (n,) int64, size (n,) int64.
        """
        cdef int64_t i, rows = 0, n = 0
        self.begin()
        for i in range(self.capacity):
            if self.slots[i].file != EMPTY_SLOT and (file == EMPTY_SLOT or self.slots[i].file == file):
                n += 1
        found = (np.empty((n, 16), np.uint8), np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int64),
                 np.empty(n, np.int64))
        cdef uint8_t[:, ::1] ids = found[0]
        cdef int32_t[::1] refcounts = found[1], files = found[2]
        cdef int64_t[::1] positions = found[3], sizes = found[4]
        for i in range(self.capacity):
            if self.slots[i].file != EMPTY_SLOT and (file == EMPTY_SLOT or self.slots[i].file == file):
                memcpy(&ids[rows, 0], self.slots[i].msg_id, 16)
                refcounts[rows] = self.slots[i].refcount
                files[rows] = self.slots[i].file
                positions[rows] = self.slots[i].pos
                sizes[rows] = self.slots[i].size
                rows += 1
        return found

    def sums(self, const int64_t[::1] files not None, const int64_t[::1] file_sizes not None):
        """Hold the table against files.

        Parameters
        ----------
        files, file_sizes : numpy.ndarray
            Numbers (n,) int64, ascending, and sizes (n,) int64 of the files that there are.

        Returns
        -------
        tuple
            bytes that are referred to, of each file (n,) int64; how many located entries lie in no file or beyond its end.
        """
        cdef int64_t i, low, high, middle, wrong = 0, n = files.shape[0]
        cdef Location* entry
        self.begin()
        if file_sizes.shape[0] != n:
            raise ValueError("files and file_sizes are of one length")
        valid = np.zeros(n, np.int64)
        cdef int64_t[::1] sums = valid
        for i in range(self.capacity):
            entry = &self.slots[i]
            if entry.file < 0:
                continue
            low, high = 0, n
            while low < high:
                middle = (low + high) // 2
                if files[middle] < entry.file:
                    low = middle + 1
                else:
                    high = middle
            if (low == n or files[low] != entry.file or entry.pos < 0 or entry.size < MESSAGE_RECORD_EXTRA
                    or entry.size > file_sizes[low] or entry.pos > file_sizes[low] - entry.size):
                wrong += 1
            elif entry.refcount > 0:
                sums[low] += entry.size
        return valid, wrong

    def ets_items(self):
        """bytes: the objects of an msg_store_index.ets, as items of its disk log, by file and position (§9.3)."""
        cdef int64_t i, n
        cdef unsigned char* p
        cdef unsigned char* item
        cdef bytes items
        ids, refcounts, files, positions, sizes = self.columns()
        order = np.lexsort((positions, files))
        cdef const int64_t[::1] rows = order
        cdef const uint8_t[:, ::1] c_ids = ids
        cdef const int32_t[::1] c_refcounts = refcounts, c_files = files
        cdef const int64_t[::1] c_positions = positions, c_sizes = sizes
        # Four integers of at most eleven bytes each.
        cdef bytes room = PyBytes_FromStringAndSize(NULL, rows.shape[0] * (8 + 18 + 21 + 44) + 1)
        p = item = <unsigned char*>PyBytes_AS_STRING(room)
        for n in range(rows.shape[0]):
            i = rows[n]
            if c_files[i] < 0:
                continue
            memcpy(p + 4, b"bWLA", 4)
            memcpy(p + 8, b"\x83h\x06d\x00\x0cmsg_location", 18)
            memcpy(p + 26, b"m\x00\x00\x00\x10", 5)
            memcpy(p + 31, &c_ids[i, 0], 16)
            item = p
            p += 47
            p += put_small_integer(p, c_refcounts[i])
            p += put_small_integer(p, c_files[i])
            p += put_small_integer(p, c_positions[i])
            p += put_small_integer(p, c_sizes[i])
            put_i32(item, <int32_t>(p - item - 8))
        items = PyBytes_FromStringAndSize(PyBytes_AS_STRING(room), p - <unsigned char*>PyBytes_AS_STRING(room))
        return items

    def load_ets_items(self, const uint8_t[::1] data not None, int64_t pos):
        """Enter the objects of an msg_store_index.ets from its items at `pos` on.

        Returns
        -------
        tuple of int
            How many were entered, and the position of the first item that is none of them (the last item of a whole file).

        Raises
        ------
        CorruptionError
            An id comes twice, or a number is out of its range.
        """
        cdef int64_t n = data.shape[0], at = pos, size, left, used, loaded = 0, i
        cdef int64_t values[4]
        cdef const unsigned char* p
        cdef const unsigned char* atom
        cdef Location* entry
        self.begin()
        if pos < 0 or pos > n:
            raise OffsetOutOfRangeError(f"position {pos} is not inside the {n} bytes", pos=pos)
        while n - at > 8:
            p = &data[at]
            size = <int64_t><uint32_t>get_i32(p)
            if size > n - at - 8 or size < 20 or memcmp(p + 4, b"bWLA", 4) != 0:
                break
            p += 8
            left = size
            if p[0] != 131 or p[1] != 104 or p[2] != 6:
                break
            # An atom of one or two bytes of length, whatever OTP wrote it.
            if (p[3] == 100 or p[3] == 118) and p[4] == 0 and p[5] == 12:
                atom = p + 6
            elif (p[3] == 115 or p[3] == 119) and p[4] == 12:
                atom = p + 5
            else:
                break
            left -= (atom - p) + 12
            p = atom + 12
            if left < 21 or memcmp(atom, b"msg_location", 12) != 0 or memcmp(p, b"m\x00\x00\x00\x10", 5) != 0:
                break
            atom = p + 5
            p += 21
            left -= 21
            for i in range(4):
                used = get_small_integer(p, left, &values[i])
                if used < 0:
                    raise CorruptionError("a number of a message's place is not an integer, or out of its range", pos=at)
                p += used
                left -= used
            if left != 0 or values[0] > 0x7fffffff or values[1] > 0x7fffffff:
                raise CorruptionError("a message's place has numbers out of their range, or bytes after them", pos=at)
            entry = self.make(atom)
            if entry == NULL:
                raise MemoryError("no memory for the places of so many messages")
            if entry.file != NOT_LOCATED:
                raise CorruptionError("a message has two places", pos=at)
            entry.refcount, entry.file = <int32_t>values[0], <int32_t>values[1]
            entry.pos, entry.size = values[2], values[3]
            loaded += 1
            at += 8 + size
        return loaded, at

# ------------------------------------------------------------------------------------------------------------ version 2

crc32_start()

cpdef enum QueueStoreVerdict:
    # What `check_queue_store` found at a place of an N.qs.
    QUEUE_STORE_OK = 0
    QUEUE_STORE_OUTSIDE = 1   # it does not lie inside the file
    QUEUE_STORE_SIZE = 2      # the record says another size
    QUEUE_STORE_CRC = 3       # its check sum does not agree


cdef int queue_store_verdict(const unsigned char* p, int64_t n, int64_t pos, int64_t size) noexcept nogil:
    if pos < 64 or size < 0 or pos > n - 8 or size > n - 8 - pos:
        return QUEUE_STORE_OUTSIDE
    p += pos
    if <int64_t><uint32_t>get_i32(p) != size:
        return QUEUE_STORE_SIZE
    # The flag says whether there is a check sum: the low half of the CRC-32 of the term.
    if p[4] & 1 and (crc32_update(0, p + 8, <size_t>size) & 0xffff) != (<uint32_t>p[5] << 8 | p[6]):
        return QUEUE_STORE_CRC
    return QUEUE_STORE_OK


def check_queue_store(const uint8_t[::1] data not None, const int64_t[::1] positions not None,
                      const int64_t[::1] sizes not None):
    """Look at records of an N.qs (§11.2).

    Parameters
    ----------
    data : buffer
        The whole file.
    positions, sizes : numpy.ndarray
        Places (n,) int64 of the records' heads and sizes (n,) int64 of their terms, bytes, as an N.qi says them.

    Returns
    -------
    numpy.ndarray
        (n,) uint8 of `QueueStoreVerdict`.
    """
    cdef int64_t i, n = data.shape[0], rows = positions.shape[0]
    if sizes.shape[0] != rows:
        raise ValueError("positions and sizes are of one length")
    found = np.empty(rows, np.uint8)
    cdef uint8_t[::1] verdicts = found
    cdef const unsigned char* p = &data[0] if n else NULL
    with nogil:
        for i in range(rows):
            verdicts[i] = <uint8_t>queue_store_verdict(p, n, positions[i], sizes[i])
    return found
