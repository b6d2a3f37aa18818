"""Queue indexes of version 1 as bytes, journal and segments, over raw pointers.

Owns the layouts of journal.jif and N.idx: the scan of each, the encoding of each, and the map of both for an open queue
(`JournalMap`).  It knows no path, no clock and no policy, and every number that it reads is hostile.  A pointer into a
file comes from `Region.pin` and never outlives the function that pinned it.  Facts: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from rmqstore._bytes cimport get_i32, get_i64, prefetch, put_i16, put_i32, put_i64
from rmqstore._core cimport Region
from rmqstore.rabbitmq._term cimport message_id

import os

import numpy as np

from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError


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
    # Positions without a record.
    NOT_WHOLE = -1
    NO_RECORD = -2       # a journal's forty zero bytes, a segment's prefix 00
    NOT_A_TERM = -3
    # Reasons to refuse a call of the writer.
    REFUSED_UNKNOWN = -1
    REFUSED_ACKED = -2
    REFUSED_DELIVERED = -3
    REFUSED_UNDELIVERED = -4
    REFUSED_EXISTS = -5
    # Verdicts of parsing and salvaging.
    NEED_ROOM = 1
    GAVE_UP = -2

ENTRY_PUBLISH = W_PUBLISH
ENTRY_DELIVER = W_DELIVER
ENTRY_ACK = W_ACK
ENTRY_PERSISTENT = W_PERSISTENT
ENTRY_EMBEDDED = W_EMBEDDED
ENTRY_DAMAGED = W_DAMAGED

cdef enum:
    # In the order of `problem._DETAILS`.
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
    TORN_MARK

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
    bint malformed           # whole records may follow damage, or marks do not fit: nothing may be appended


cdef struct Rows:
    # `numbers` has six columns of `room` each: seq_id, size, expiry, segment, pos, term_size.
    int64_t* numbers
    uint8_t* flags
    uint8_t* msg_id
    int64_t room


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
    # The next certain publish record, from `at`: its term is well-formed for exactly its length and holds the record's
    # message id, or it has no term and consistent records follow to the end of the file.  -1: no record.
    cdef const unsigned char* p = scan.p
    cdef const unsigned char* term
    cdef const unsigned char* found
    cdef int64_t fixed = scan.head + BODY_FIXED, embedded, size = 0
    while at <= scan.n - fixed:
        if scan.budget < 0:
            return GAVE_UP
        if (p[at] & 0x80 != 0) == (scan.head == SEGMENT_HEAD):
            embedded = get_u32(p + at + scan.head + BODY_EMBEDDED)
            if embedded == 0:
                if not is_zero(p + at, fixed) and runs_to_the_end(scan, at):
                    return at
            elif 1 < embedded <= scan.n - at - fixed and p[at + fixed] == TERM_START:
                term = p + at + fixed
                scan.budget -= embedded
                if scan.entry_count == 0 or relative_id(p + at) < scan.entry_count:
                    found = message_id(term, embedded, &size)
                    if found != NULL and memcmp(found, p + at + scan.head, 16) == 0:
                        return at
        at += 1
    return -1


cdef int64_t after_damage(Scan* scan, int64_t at, int64_t verdict, Sink* sink) noexcept nogil:
    # Report the damage at `at`, and return the position at which reading continues, -1 if nothing whole follows.
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


cdef int64_t term_damage(const unsigned char* msg_id, const unsigned char* term, int64_t embedded) noexcept nogil:
    # BAD_TERM or MSG_ID_MISMATCH of an embedded term and the id of its record; -1 without damage.
    cdef const unsigned char* found
    cdef int64_t size = 0
    found = message_id(term, embedded, &size)
    if found == NULL:
        return BAD_TERM
    return -1 if memcmp(found, msg_id, 16) == 0 else MSG_ID_MISMATCH


cdef bint term_is_bad(Scan* scan, int64_t at, int64_t embedded, int64_t seq, Sink* sink) noexcept nogil:
    cdef const unsigned char* body = scan.p + at + scan.head
    cdef int64_t damage = term_damage(body, body + BODY_FIXED, embedded)
    if damage >= 0:
        note(sink, damage, at, seq, scan.head + BODY_FIXED + embedded)
    return damage >= 0


cdef inline bint is_torn_head(const unsigned char* p, int64_t at, int64_t n) noexcept nogil:
    # Only the head of a publish was written before zeros to the end; its number may be another entry's.
    cdef int64_t body = at + SEGMENT_HEAD
    return p[at] & 0x80 != 0 and body < n and p[body] == 0 and is_zero(p + body, n - body)


cdef void parse_segment(Scan* scan, int64_t* entries, int64_t base_seq, Sink* sink, int64_t* end) noexcept nogil:
    # Fill `entries` (zeros before) from a whole segment; `end` is the end of the readable part.
    cdef const unsigned char* p = scan.p
    cdef int64_t n = scan.n, at = 0, extent, rel, word, embedded, stride = 0
    if n > 0 and p[0] == 0 and is_zero(p, n):
        note(sink, NUL_FILE, 0, -1, n)
        end[0] = 0
        return
    while at < n:
        if is_torn_head(p, at, n):
            note(sink, TORN_RECORD, at, -1, n - at)
            break
        extent = segment_extent(p, n, at)
        if extent < 0:
            stride = after_damage(scan, at, extent, sink)
            if stride < 0:
                break
            at = stride
            continue
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
        # Records are mostly of one size: this is about the fourth from here.
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
    # Blocks of 64 are contiguous, for sequential ids; hostile ids cannot predict the place of a block.
    cdef uint64_t h = (<uint64_t>seq >> 6) ^ table.seed
    h = (h ^ (h >> 33)) * <uint64_t>0xFF51AFD7ED558CCDu
    h = (h ^ (h >> 33)) * <uint64_t>0xC4CEB9FE1A85EC53u
    h ^= h >> 33
    cdef int64_t i = <int64_t>(((h << 6) + (<uint64_t>seq & 63)) & <uint64_t>table.mask)
    cdef int step
    # A block that collides moves as a whole, up to eight times; then every slot is tried.
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


cdef inline int64_t publish_word(int64_t at, bint persistent, int64_t embedded) noexcept nogil:
    return (at << W_BITS) | W_PUBLISH | (W_PERSISTENT if persistent else 0) | (W_EMBEDDED if embedded else 0)


cdef int parse_journal(Scan* scan, int64_t* pos, Table* table, Sink* sink, int64_t* records) noexcept nogil:
    # Scan a journal from `pos` and keep the result of its actions; NEED_ROOM if the table has to grow first.
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
            table.words[slot] = publish_word(at, not p[at] & 0x40, embedded) | (word & W_DELIVER)
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


cdef bint is_remnant(const unsigned char* p, int64_t n, const unsigned char* whole, int64_t whole_size) noexcept nogil:
    # Does the body `p` of a publish end in zeros from its first difference to `whole`, as after a loss of power?
    cdef int64_t i = 0
    while i < n and i < whole_size and p[i] == whole[i]:
        i += 1
    return i < n and is_zero(p + i, n - i)


cdef int64_t copy_damage(const unsigned char* image, int64_t journal_word, const unsigned char* p, int64_t size,
                         int64_t segment_word) noexcept nogil:
    # The damage of the segment's publish, if it differs from the journal's and only the journal's can be genuine; else -1.
    cdef const unsigned char* a = image + (journal_word >> W_BITS) + JOURNAL_HEAD
    cdef const unsigned char* b = p + (segment_word >> W_BITS) + SEGMENT_HEAD
    cdef int64_t here = get_u32(a + BODY_EMBEDDED), there = get_u32(b + BODY_EMBEDDED), damage = -1
    if there > size - (segment_word >> W_BITS) - SEGMENT_PUBLISH_FIXED:
        # The file was changed since it was scanned.
        return -1
    if is_remnant(b, BODY_FIXED + there, a, BODY_FIXED + here):
        return TORN_RECORD
    if there:
        damage = term_damage(b, b + BODY_FIXED, there)
    if damage >= 0 and here and term_damage(a, a + BODY_FIXED, here) >= 0:
        return -1
    return damage


cdef int64_t torn_mark(const int64_t* entries, const unsigned char* p, int64_t size, int64_t base_seq,
                       const int64_t* seqs, const int64_t* words, int64_t count, const unsigned char* image,
                       int64_t end) noexcept nogil:
    # If only the first byte of a segment's last mark was written, perhaps with zeros after it: the entry that the mark
    # seems to belong to; else -1.  A flush writes the journal's entries from the highest number down, so that the mark
    # belongs to the first number that is not complete.
    cdef int64_t i = count - 1, rel, entry
    cdef bint begun = False
    if entries == NULL or end < SEGMENT_HEAD or p[end - 1] != 0 or p[end - 2] & 0xC0 != 0x40:
        return -1
    if not is_zero(p + end, size - end):
        return -1
    while i >= 0:
        entry = entries[seqs[i] - base_seq]
        if words[i] & entry & W_PUBLISH and not is_same_publish(image, words[i], p, entry):
            # Not written by a flush of this journal.
            return -1
        if words[i] & (W_PUBLISH | W_DELIVER | W_ACK) & ~entry != 0:
            break
        begun = True
        i -= 1
    if i < 0:
        return -1
    rel = seqs[i] - base_seq
    if rel & 0xFF == 0 or rel >> 8 != p[end - 2] & 0x3F or not entries[rel] & W_PUBLISH:
        return -1
    # Without zeros the mark may be an older one, unless this flush has written something else.
    return rel & ~<int64_t>0xFF if end < size or begun or words[i] & entries[rel] & W_PUBLISH else -1


cdef int64_t merge_segment(int64_t* entries, int64_t entry_count, const unsigned char* p, int64_t size,
                           int64_t base_seq, const int64_t* seqs, int64_t* words, int64_t count,
                           const unsigned char* image, Sink* sink, int64_t* unacked, int64_t* end,
                           bint* malformed) noexcept nogil:
    # Take from the journal's words of one segment what its file has (section 7.1, all cells); the number of changed words.
    # `end` moves before a last record that is only the beginning of the journal's.
    cdef int64_t i, rel, word, kept, other, pos, extent, damage, changed = 0, live = 0
    cdef int j, s
    # A third mark changed nothing that could be taken back, and is damage already.
    rel = -1 if malformed[0] else torn_mark(entries, p, size, base_seq, seqs, words, count, image, end[0])
    if rel >= 0 and entries[rel] & W_PUBLISH:
        end[0] -= SEGMENT_HEAD
        sink.segment = base_seq // entry_count
        note(sink, TORN_MARK, end[0], base_seq + rel, SEGMENT_HEAD)
        sink.segment = -1
        entries[rel] &= ~<int64_t>(W_ACK if entries[rel] & W_ACK else W_DELIVER)
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
                damage = copy_damage(image, word, p, size, other)
                if damage >= 0:
                    # The journal's entry replaces the segment's, which keeps its marks.
                    live -= (other & (W_PUBLISH | W_ACK | W_DAMAGED)) == W_PUBLISH
                    kept = word | (other & (W_DELIVER | W_ACK))
                    entries[seqs[i] - base_seq] = 0
                    pos = other >> W_BITS
                    extent = SEGMENT_PUBLISH_FIXED + get_u32(p + pos + SEGMENT_HEAD + BODY_EMBEDDED)
                    if not other & W_DAMAGED:
                        sink.segment = base_seq // entry_count
                        note(sink, damage, pos, seqs[i], extent)
                        sink.segment = -1
                    if damage == TORN_RECORD and pos + extent == end[0]:
                        end[0] = pos
                    else:
                        malformed[0] = True
                    other = 0
                else:
                    # Writing would empty the journal of a message that may be whole.
                    note(sink, DIFFERENT_PUBLISH, pos, seqs[i], 0)
                    malformed[0] = True
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
    # A message term ends with the atom of its persistence; for another end (a container) the record decides.
    if n >= 8 and memcmp(term + n - 5, b"false", 5) == 0:
        return True
    if n >= 8 and memcmp(term + n - 4, b"true", 4) == 0:
        return False
    return not persistent


cdef int64_t fill_rows(const int64_t* entries, int64_t entry_count, int64_t number, const unsigned char* p, int64_t n,
                       const int64_t* seqs, const int64_t* words, int64_t count, const unsigned char* image, int64_t used,
                       bint live, Rows* rows, int64_t at) noexcept nogil:
    # Append the segment's entries in the order of their ids; -1: the file is not the one that was read, -2: no room.
    cdef int64_t base_seq = number * entry_count, rel = 0, j = 0, fword, jword, pos, embedded, limit, seq, room = rows.room
    cdef int64_t* out
    cdef const unsigned char* body
    if entries == NULL:
        rel = entry_count
    while True:
        if rel < entry_count:
            # A mark whose publish is gone says nothing of the journal's.
            fword = entries[rel] if entries[rel] & W_PUBLISH else 0
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
        if live and (fword | jword) & (W_ACK | W_DAMAGED):
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
        rows.flags[at] = <uint8_t>((fword | jword) & ((1 << W_BITS) - 1))
        out = rows.numbers + at
        out[0] = seq
        out[room] = get_u32(body + BODY_SIZE)
        out[2 * room] = get_i64(body + BODY_EXPIRY)
        out[3 * room] = number if fword & W_PUBLISH else -1
        out[4 * room] = pos
        out[5 * room] = embedded
        at += 1


cdef int64_t encode_segment(const int64_t* seqs, const int64_t* words, int64_t count, int64_t base_seq, const unsigned char* image,
                            int64_t start, unsigned char* out, int64_t* entries) noexcept nogil:
    # The blob that a flush appends, from the highest id down, and its size.  Without `out` only the size, and the future
    # places in `entries`, unless that is NULL.
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
            elif entries != NULL:
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


cdef class Findings:
    """Damage that was met while reading: `count` rows, the first 16384 of `total`."""

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
    """One segment: the entries of its file, and the number of those without an ack, over file and journal (`unacked`).

    `size` is that of the file as read or written, -1 without a file; `end` is the end of its last readable record.  Nothing
    may be appended to a `malformed` file.
    """

    cdef readonly int64_t number
    cdef readonly int64_t unacked
    cdef public int64_t size
    cdef readonly int64_t end
    cdef readonly bint malformed
    cdef bint filled
    cdef int64_t[::1] entries

    def __init__(self, int64_t number):
        self.number = number
        self.unacked = 0
        self.size = -1
        self.end = 0
        self.malformed = False
        self.filled = False

    cdef int make_entries(self, int64_t entry_count) except -1:
        if not self.filled:
            self.entries = np.zeros(entry_count, dtype=np.int64)
            self.filled = True
        return 0

cdef int64_t salvage_budget(int64_t n) noexcept nogil:
    return 16 * n + (1 << 20)


cdef int check_entry_count(int64_t entry_count) except -1:
    if entry_count < 1 or entry_count > 16384:
        raise ValueError(f"{entry_count} entries a segment; at most 16384 have a number in its file")
    return 0


cdef const unsigned char* pin_source(source, int64_t* n) except? NULL:
    # The bytes of a Region, or of a buffer that the caller keeps, until `unpin_source`.
    cdef const uint8_t[::1] data
    cdef Region region
    if isinstance(source, Region):
        region = source
        n[0] = region.size
        return region.pin(0, region.size)
    n[0] = 0
    if source is None or not len(source):
        return NULL
    data = source
    n[0] = data.shape[0]
    return &data[0]


cdef int unpin_source(source) except -1:
    # Raises if the mapping was lost in between.
    if isinstance(source, Region):
        (<Region>source).unpin()
    return 0


def load_segment(source, Segment segment not None, int64_t entry_count, Findings findings not None, bint check_terms=False):
    """Read a segment file (a Region, bytes, or None) into a new `segment`; damage becomes findings and never an exception.

    With `check_terms` every embedded term has to be a message with the id of its record.
    """
    cdef Sink sink
    cdef Scan scan
    cdef int64_t base_seq = segment.number * entry_count, end = 0
    check_entry_count(entry_count)
    segment.make_entries(entry_count)
    memset(&scan, 0, sizeof(scan))
    scan.head = SEGMENT_HEAD
    scan.entry_count = entry_count
    scan.check_terms = check_terms
    findings.open_sink(&sink, segment.number)
    scan.p = pin_source(source, &scan.n)
    scan.budget = salvage_budget(scan.n)
    try:
        with nogil:
            parse_segment(&scan, &segment.entries[0], base_seq, &sink, &end)
    finally:
        unpin_source(source)
    findings.take(&sink)
    segment.size = scan.n
    segment.end = end
    segment.malformed = scan.malformed


def scan_journal(const uint8_t[::1] source not None):
    """List the whole records of a journal's bytes, in their order, as far as a node's parser reads.

    Arrays: type, uint8 (0 publish, persistent; 1 publish, transient; 2 deliver; 3 ack); sequence id, position and bytes
    of the record, int64.
    """
    cdef int64_t n = source.shape[0], at = 0, extent, count = 0
    cdef const unsigned char* p = &source[0] if n else NULL
    cdef uint8_t[::1] types = np.empty(n // JOURNAL_HEAD + 1, dtype=np.uint8)
    cdef int64_t[:, ::1] rows = np.empty((3, n // JOURNAL_HEAD + 1), dtype=np.int64)
    with nogil:
        while at < n:
            extent = journal_extent(p, n, at)
            if extent < 0:
                break
            types[count] = p[at] >> 6
            rows[0, count] = get_i64(p + at) & LAST_SEQ_ID
            rows[1, count] = at
            rows[2, count] = extent
            count += 1
            at += extent
    return (np.asarray(types)[:count].copy(), *np.asarray(rows)[:, :count].copy())


def terms_at(source not None, const int64_t[::1] starts not None, const int64_t[::1] sizes not None):
    """Copy stretches of a Region or buffer, as list of bytes; OffsetOutOfRangeError if one is not inside."""
    cdef int64_t i, count = starts.shape[0], n = 0
    cdef const unsigned char* p = pin_source(source, &n)
    cdef list out = [None] * count
    try:
        for i in range(count):
            if starts[i] < 0 or sizes[i] < 0 or starts[i] > n - sizes[i]:
                raise OffsetOutOfRangeError("a message lies outside its file; the file was changed, open the index again", pos=starts[i])
            out[i] = PyBytes_FromStringAndSize(<const char*>p + starts[i], sizes[i])
    finally:
        unpin_source(source)
    return out


cdef const unsigned char* checked_id(const unsigned char* p, int64_t n, const unsigned char* given, int64_t* size, int64_t i) except NULL:
    # The id of message number `i` (-1: the only one), which must be `given` unless that is NULL; the size of its body, or -1.
    cdef const unsigned char* found = message_id(p, n, size) if n <= <int64_t>0xFFFFFFFFu else NULL
    if found == NULL or (given != NULL and memcmp(found, given, 16) != 0):
        what = "the message" if i < 0 else f"message {i}"
        if found == NULL:
            raise InvalidMessageError(f"{what} is not a term of a message that says its id; give what Message(...).term is")
        raise InvalidMessageError(f"{what} has another id than the one given; a node would not boot with it")
    return found


def checked_ids(list terms not None, const uint8_t[:, ::1] ids):
    """Check message terms; InvalidMessageError if one is not a message, or has another id than the given one.

    Arrays: ids (n, 16) uint8; sizes of the bodies (n,) int64, -1 for a message of another protocol; persistent (n,)
    uint8, 0 for a term that ends with ``false``.
    """
    cdef int64_t i, count = len(terms), n
    cdef uint8_t[:, ::1] out = np.empty((count, 16), dtype=np.uint8)
    cdef int64_t[::1] sizes = np.empty(count, dtype=np.int64)
    cdef uint8_t[::1] persistent = np.empty(count, dtype=np.uint8)
    cdef const unsigned char* p
    for i in range(count):
        p = <const unsigned char*>PyBytes_AS_STRING(<bytes?>terms[i])
        n = PyBytes_GET_SIZE(<bytes>terms[i])
        memcpy(&out[i, 0], checked_id(p, n, &ids[i, 0] if ids is not None else NULL, &sizes[i], i), 16)
        persistent[i] = not says_transient(p, n, True)
    return np.asarray(out), np.asarray(sizes), np.asarray(persistent)


cdef int64_t MIN_SLOTS = 1024
# More than this is given back when the journal is emptied.
cdef int64_t KEPT_SLOTS = 1 << 18
cdef int64_t KEPT_IMAGE = 64 << 20


cdef class JournalMap:
    """The journal in memory: its bytes since the last flush, and per sequence id the state that has to be flushed.

    Owns that map with its cancelling (section 6.3), the known segments and the counters.  It writes no file.  The map is a
    table of open addressing: scattered ids cost no more than sequential ones.

    `used` bytes of the journal are new since the last flush, of which the file has `written`; `dirty_count` actions,
    cancelled ones included, and `depth` live entries; `published_end` follows the highest id that was published here.
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
        check_entry_count(segment_entry_count)
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
        if 2 * (self.filled + more) > self.slot_seq.shape[0]:
            self.replace(*self.collect(), more)
        return 0

    cdef int make_room(self, Table* table, int64_t size) except -1:
        # For one more action of `size` bytes; `table` may be another one then.
        if self.image.shape[0] - self.used < size or is_crowded(table, 1):
            self.filled = table.filled
            self.reserve_image(size)
            self.reserve_slots(1)
            self.open_table(table)
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
        """Load the file of a new map: the end of its readable bytes, and True if whole records may follow damage."""
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
        """Return the sequence ids to be flushed, in their order, and their words, as ndarrays of int64."""
        seqs, words = np.asarray(self.slot_seq), np.asarray(self.slot_word)
        used = np.flatnonzero((seqs != -1) & (words != 0))
        used = used[np.argsort(seqs[used], kind="stable")]
        return seqs[used], words[used]

    def replace(self, const int64_t[::1] seqs not None, const int64_t[::1] words not None, int64_t more=0):
        """Set the map to these words, with room for `more`; words of 0 are left out."""
        cdef int64_t i, j, count = MIN_SLOTS
        cdef Table table
        # Two thirds are free then, so that it rarely grows.
        while count < 3 * (seqs.shape[0] + more):
            count *= 2
        self.make_slots(count)
        self.open_table(&table)
        with nogil:
            for i in range(seqs.shape[0]):
                if words[i] != 0:
                    j = slot_for(&table, seqs[i])
                    table.words[j] = words[i]
        self.filled = table.filled

    def merge(self, Segment segment not None, source, int64_t[::1] seqs not None, int64_t[::1] words not None,
              Findings findings not None):
        """Merge the journal's words of one segment with its file, in place, and return the number of changed words.

        `segment` was loaded from `source` (a Region, bytes, or None); `seqs` and `words` are its part of `collect`.
        """
        cdef Sink sink
        cdef const unsigned char* p
        cdef int64_t* entries = &segment.entries[0] if segment.filled else NULL
        cdef int64_t count = seqs.shape[0], changed, unacked = 0, entry_count = self.segment_entry_count
        cdef int64_t end = segment.end, n = 0
        cdef bint malformed = segment.malformed
        cdef const int64_t* seq_at = &seqs[0] if count else NULL
        cdef int64_t* word_at = &words[0] if count else NULL
        cdef const unsigned char* image = &self.image[0]
        cdef int64_t base_seq = segment.number * entry_count
        findings.open_sink(&sink, -1)
        p = pin_source(source, &n)
        try:
            with nogil:
                changed = merge_segment(entries, entry_count, p, segment.size, base_seq, seq_at, word_at, count, image,
                                        &sink, &unacked, &end, &malformed)
        finally:
            unpin_source(source)
        findings.take(&sink)
        segment.end = end
        segment.malformed = malformed
        self.depth += unacked - segment.unacked
        segment.unacked = unacked
        return changed

    cdef bint is_used(self, int64_t seq):
        cdef Segment segment = self.segment_at(seq, False)
        cdef Table table
        cdef int64_t slot
        if segment is None:
            return False
        self.open_table(&table)
        slot = slot_of(&table, seq)
        return ((segment.filled and segment.entries[seq - self.last_first] & W_PUBLISH != 0)
                or (table.seqs[slot] == seq and table.words[slot] & W_PUBLISH != 0))

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
        """Deliver, or `ack`, all of `seqs` in their order, or none of them.

        Returns 0 and the count, or a negative reason and the number of the refused one.
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

    cdef int put_publish(self, Table* table, int64_t seq, const unsigned char* msg_id, int64_t expiry, int64_t size,
                         bint persistent, const unsigned char* term, int64_t embedded) except -1:
        # Room in the table and the image is there.
        cdef Segment segment = self.segment_at(seq, True)
        cdef unsigned char* p = &self.image[self.used]
        table.words[slot_for(table, seq)] = publish_word(self.used, persistent, embedded)
        put_i64(p, seq)
        if not persistent:
            p[0] |= 0x40
        p += JOURNAL_HEAD
        memcpy(p, msg_id, 16)
        put_i64(p + BODY_EXPIRY, expiry)
        put_i32(p + BODY_SIZE, <int32_t><uint32_t>size)
        put_i32(p + BODY_EMBEDDED, <int32_t><uint32_t>embedded)
        if embedded:
            memcpy(p + BODY_FIXED, term, <size_t>embedded)
        self.used += JOURNAL_PUBLISH_FIXED + embedded
        segment.unacked += 1
        self.depth += 1
        self.dirty_count += 1
        self.published_end = max(self.published_end, seq + 1)
        return 0

    def publish(self, int64_t first, int64_t count, const uint8_t[:, ::1] ids not None, const int64_t[::1] sizes not None,
                const int64_t[::1] expiries not None, const uint8_t[::1] persistent not None, list terms, bint deliver,
                int64_t start, int64_t max_entries, int64_t max_size):
        """Publish entries from `first`, each with its deliver if `deliver`, and return the number of actions done in all.

        The ids are free, every size is checked, and the columns have `count` rows: expiries in microseconds, 0 = none.
        `terms` are embedded, unless None.  `start` actions were done in earlier calls.  A call ends early when more actions
        than `max_entries`, or bytes than `max_size`, wait for a flush.
        """
        cdef int64_t step, steps = count * (2 if deliver else 1), i, seq, embedded, before = 0, verdict
        cdef const unsigned char* term
        cdef Table table
        self.open_table(&table)
        for step in range(start, steps):
            i = step >> 1 if deliver else step
            seq = first + i
            if deliver and step & 1:
                self.make_room(&table, JOURNAL_HEAD)
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
                self.make_room(&table, JOURNAL_PUBLISH_FIXED + embedded)
                self.put_publish(&table, seq, &ids[i, 0], expiries[i], sizes[i], persistent[i], term, embedded)
            if self.dirty_count > max_entries or self.used > max_size:
                self.filled = table.filled
                return step + 1
        self.filled = table.filled
        return steps

    def publish_one(self, int64_t seq, bytes msg_id, bytes term, int64_t size, int64_t expiry, int persistent, bint known_free):
        """Publish an entry; False if `size` is -1 and the term does not have it.

        `msg_id` may be None with a term; `persistent` is -1 to take it from the term.  An id that is `known_free` is not
        looked up.  InvalidMessageError as for `checked_ids`, or for a number that is impossible or in use.
        """
        cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(term) if term is not None else NULL
        cdef int64_t n = PyBytes_GET_SIZE(term) if term is not None else 0, found_size = -1
        cdef const unsigned char* found = NULL
        cdef const unsigned char* given = NULL
        cdef Table table
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
            found = checked_id(p, n, given, &found_size, -1)
            if size < 0:
                size = found_size
            if size < 0:
                return False
        if size > <int64_t>0xFFFFFFFFu:
            raise InvalidMessageError(f"a size of {size} bytes does not fit into 32 bits")
        if not known_free and self.is_used(seq):
            raise InvalidMessageError(f"sequence id {seq} is in use")
        if persistent < 0:
            persistent = p == NULL or not says_transient(p, n, True)
        self.open_table(&table)
        self.make_room(&table, JOURNAL_PUBLISH_FIXED + n)
        self.put_publish(&table, seq, given if given != NULL else found, expiry, size, persistent, p, n)
        self.filled = table.filled
        return True

    def unwritten(self):
        """Return the bytes that the journal file does not have yet."""
        return PyBytes_FromStringAndSize(<const char*>&self.image[0] + self.written, self.used - self.written)

    def image_view(self):
        """Return the journal's bytes since the last flush, as they are now, as ndarray of uint8."""
        return self.image_array[: self.used]

    def encode(self, Segment segment not None, const int64_t[::1] seqs not None, const int64_t[::1] words not None):
        """Encode what a flush appends to the segment for these words, in a node's order; makes room for them."""
        cdef int64_t count = seqs.shape[0], size
        cdef int64_t base_seq = segment.number * self.segment_entry_count
        cdef const unsigned char* image = &self.image[0]
        cdef unsigned char* p
        segment.make_entries(self.segment_entry_count)
        if count == 0:
            return b""
        with nogil:
            size = encode_segment(&seqs[0], &words[0], count, base_seq, image, 0, NULL, NULL)
        blob = PyBytes_FromStringAndSize(NULL, size)
        p = <unsigned char*>PyBytes_AS_STRING(blob)
        with nogil:
            encode_segment(&seqs[0], &words[0], count, base_seq, image, 0, p, NULL)
        return blob

    def applied(self, Segment segment not None, const int64_t[::1] seqs not None, const int64_t[::1] words not None):
        """Note that the blob of `encode` was appended to the segment's file."""
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
             bint live, int64_t[:, ::1] numbers not None, uint8_t[::1] flags not None, uint8_t[:, ::1] msg_id not None, int64_t at):
        """Append the segment's entries to columns from row `at`, in the order of ids, and return the first free row.

        -1: the file is not the one that was read; -2: the columns are full.  `source` is the segment's file, `seqs` and
        `words` its part of `collect`; without `live` also entries that are acked or damaged.  `numbers` (6, n) are seq_id,
        size, expiry_us, file, pos and term_size; `flags` (n,) and `msg_id` (n, 16) the other columns of `IndexColumns`.
        """
        cdef Rows out
        cdef int64_t count = seqs.shape[0], n = 0
        cdef const unsigned char* p
        cdef const int64_t* entries = NULL
        cdef const int64_t* seq_at = &seqs[0] if count else NULL
        cdef const int64_t* word_at = &words[0] if count else NULL
        cdef const unsigned char* image = &self.image[0]
        out.room = flags.shape[0]
        if numbers.shape[0] != 6 or numbers.shape[1] != out.room or msg_id.shape[0] != out.room or msg_id.shape[1] != 16:
            raise ValueError("columns of other shapes")
        if out.room == 0:
            return at if segment.unacked == 0 else -2
        out.numbers, out.flags, out.msg_id = &numbers[0, 0], &flags[0], &msg_id[0, 0]
        if segment.filled and source is not None:
            entries = &segment.entries[0]
        p = pin_source(source, &n)
        try:
            with nogil:
                at = fill_rows(entries, self.segment_entry_count, segment.number, p, n, seq_at, word_at, count, image,
                               self.used, live, &out, at)
        finally:
            unpin_source(source)
        return at
