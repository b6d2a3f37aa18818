"""Put one message in one call, with its unit and its index entries.

Owns the order in which a plain message is appended (`Appender`); what makes it plain is `_rows`'.  It never chooses a file,
and knows no clock but the system's: callers set where a stream goes on, and put themselves what does not fit there.
Payload, unit, entry and count are published in that order (I6).
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t
from posix.time cimport clock_gettime, CLOCK_REALTIME, timespec

from rmqstore._bytes cimport load_i64
from rmqstore._core cimport (
    BLANK_SIZE, FileStream, index_count_of, INDEX_END_PHY_OFFSET, INDEX_END_TIMESTAMP, INDEX_HEADER_SIZE, IndexRegion,
    MessageFields, put_unit, Region, StateFields, UNIT_SIZE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._java_text cimport hash_utf8
from rmqstore._properties cimport put_key_hashes
from rmqstore._record cimport encode_into
from rmqstore._rows cimport number_of, put_result, Row, RowBatch, TAKEN

from array import array as stdlib_array

crc32_start()


@cython.no_gc_clear
cdef class FileEnd:
    """The file in which a stream goes on, as `Appender` writes to it.

    Parameters
    ----------
    stream : FileStream
        Whose `wrote_where` says where.
    mapped_file : object
        With `_region` (None while it is not mapped, which the pool decides), `file_from_offset` and `pool`; it must be
        allocated on disk.
    """

    cdef FileStream stream
    cdef object mapped_file
    cdef set dirty
    cdef int64_t base_offset

    def __cinit__(self, FileStream stream not None, mapped_file not None):
        self.stream, self.mapped_file, self.base_offset = stream, mapped_file, mapped_file.file_from_offset
        self.dirty = mapped_file.pool.dirty

    cdef Region region_for(self, int64_t size, int64_t* pos):
        # The mapping that takes `size` bytes, and where in it; None if this is not the file for them any more.
        cdef Region region = self.mapped_file._region
        pos[0] = self.stream.wrote_where - self.base_offset
        return region if region is not None and 0 <= pos[0] <= region.size - size else None


@cython.no_gc_clear
cdef class Appender:
    """Appends one plain message, its unit and its index entries in one call.

    It knows the ends of the log, of queues and of the index from `learn`, and leaves what does not fit there to its caller,
    which then lets it learn.

    Parameters
    ----------
    state : StateFields
        Messages are put only while this is its `appender`.
    batch : RowBatch
        Used for the one row.
    kind : type
        What a plain message is an instance of, exactly.
    result : type
        Named tuple of (phy_offset, queue_offset, msg_id, store_timestamp, size).
    clock : callable or None
        Gives the store time, ms since epoch; asked when nothing else can stop a put any more.  None = the system's.
    after_put : callable
        Told where the log ends and what was put, without the lock, where somebody waits for messages, or a put for the
        disk.
    indexed, index_tags : bool
        Whether keys, and tags, are indexed.
    max_ends : int
        How many queues are kept in mind.

    Attributes
    ----------
    writing : bool
        A put began to write and did not come to its end.
    asked : int or None
        What `clock` said for a put that was then left to the caller, who takes it away: no clock is asked twice for one.
    """

    cdef readonly bint writing
    cdef public object asked
    cdef RowBatch batch
    cdef StateFields state
    cdef object clock, after_put
    cdef int64_t max_ends
    cdef type kind, result
    cdef bint indexed, index_tags
    cdef FileEnd log
    cdef dict ends       # queue number: FileEnd
    cdef IndexRegion index

    def __cinit__(self, StateFields state not None, RowBatch batch not None, type kind not None, type result not None, clock, after_put not None,
                  bint indexed, bint index_tags, int64_t max_ends=1024):
        if not issubclass(result, tuple) or len(result._fields) != 5:
            raise TypeError("a named tuple of five is needed")
        self.state, self.batch, self.kind, self.result = state, batch, kind, result
        self.indexed, self.index_tags, self.clock, self.max_ends = indexed, index_tags, clock, max_ends
        self.after_put = after_put
        self.ends = {}
        batch.reserve_rows(1)

    def learn(self, FileEnd log not None, IndexRegion index, int queue=-1, FileEnd end=None):
        """Take the ends of the log and of one queue, and the newest index file; few queues are kept."""
        self.log, self.index = log, index
        if end is not None:
            if len(self.ends) >= self.max_ends:
                self.ends.clear()
            self.ends[queue] = end

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
        end = self.ends.get(row.queue)
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


cdef enum:
    APPEND_KEYS = 64
# Made at import, when there is no NumPy yet.
cdef int64_t[::1] EMPTY_TIMESTAMPS = stdlib_array("q")
