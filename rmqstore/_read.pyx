"""Reading messages: `StoredMessage`, by place, by queue and by key.

Owns how a record becomes a message, the get of a run of units, and the search of a key's chains.  It opens no file: callers
give regions, or streams that know the file that was asked for last.  It never calls a message missing: it says that the
caller has to go the long way.  Invariants are those of `_core`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_Append, PyList_GET_SIZE
from cpython.object cimport PyObject, PyTypeObject
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t
from libc.string cimport memchr, memcmp, memcpy

from rmqstore._bytes cimport acquire_fence, get_i32, get_i64
from rmqstore._core cimport (
    ANY_KEY, C_MAGIC_V1, entry_before, ENTRY_KEY_HASH, ENTRY_PHY_OFFSET, ENTRY_SIZE, FileStream, index_head,
    INDEX_HEADER_SIZE, IndexRegion, MAX_EXT_ADDRESS, MessageFields, RECORD, RECORD_BORN_HOST, Region, SLOT_SIZE,
    TAG, UNIT_RECORD_SIZE, UNIT_SIZE, UNIT_TAGS_CODE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._java_text cimport hash_str, index_hash
from rmqstore._properties cimport is_dispatched_to, value_of
from rmqstore._python cimport (
    clamped, PyBytes_CheckExact, PyObject_GC_IsTracked, PyObject_GC_Track, PyObject_GenericSetAttr, PyUnicode_CheckExact,
    PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_IS_ASCII, PyUnicode_IS_COMPACT_ASCII, small_number,
)
from rmqstore._record cimport (
    body_crc_ok, has_key, has_key_hash, has_prop_crc, judge_record, prefetch_head, prop_crc_ok, RecordView,
    TAIL_AHEAD, text_of,
)

from rmqstore._core import Verdict
from rmqstore.errors import OffsetOutOfRangeError

crc32_start()


cdef enum:
    # A CRC over more bytes than this takes long enough to let other threads run meanwhile; a shorter one would wait longer
    # for the GIL than it runs.
    LONG_BODY = 131072
    WALK_STEPS = 1024
    HOST_SIZE = 20        # the longer of the two forms
    SHORT_PROPERTIES = 112


cdef extern from *:
    """
    /* How messages that are read are made and freed: as their type would, but without the way through its bases, each of
       which fills and clears its own part, and without an entry in the collector's lists.  The objects of a message stand
       first in it: the fields of MessageFields, then those of StoredMessage. */
    #define RMQ_MESSAGE_OBJECTS 12
    typedef struct { PyObject_HEAD PyObject *objects[RMQ_MESSAGE_OBJECTS]; } rmq_message;

    static PyObject *rmq_new_message(PyTypeObject *kind) {
        rmq_message *made = (rmq_message *)PyObject_GC_New(PyObject, kind);
        int i;
        if (!made) return NULL;
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) Py_INCREF(Py_None);
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) made->objects[i] = Py_None;
        return (PyObject *)made;
    }

    static void rmq_free_message(PyObject *made) {
        PyTypeObject *kind = Py_TYPE(made);
        int i;
        if (kind->tp_finalize && PyObject_CallFinalizerFromDealloc(made) < 0) return;
        PyObject_GC_UnTrack(made);
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) Py_XDECREF(((rmq_message *)made)->objects[i]);
        kind->tp_free(made);
        Py_DECREF(kind);
    }

    /* Whether `kind` adds nothing to `stored` that would have to be made or freed, and `blank`, one as its type makes it,
       is laid out as is said above.  Then it is freed by `rmq_free_message` from now on. */
    static int rmq_adopt_message(PyTypeObject *kind, PyTypeObject *stored, PyObject *blank) {
        int i;
        if (!(kind->tp_flags & Py_TPFLAGS_HEAPTYPE) || !PyType_IS_GC(kind) || kind->tp_basicsize != stored->tp_basicsize
                || (size_t)kind->tp_basicsize < sizeof(rmq_message) || kind->tp_itemsize || kind->tp_dictoffset
                || kind->tp_weaklistoffset || kind->tp_new != stored->tp_new || kind->tp_alloc != PyType_GenericAlloc
                || kind->tp_free != PyObject_GC_Del)
            return 0;
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++)
            if (((rmq_message *)blank)->objects[i] != Py_None) return 0;
        kind->tp_dealloc = rmq_free_message;
        return 1;
    }
    """
    object new_message "rmq_new_message"(PyTypeObject* kind)
    bint adopt_message "rmq_adopt_message"(PyTypeObject* kind, PyTypeObject* stored, object blank)


@cython.auto_pickle(False)
cdef class StoredMessage(MessageFields):
    """A record as a message that cannot be changed; `rmqstore.MessageExt` is this with what needs no speed.

    Numbers, hosts, body and properties are copied from the record when it is read; texts are decoded when they are asked for.

    Parameters
    ----------
    record : tuple
        The 18 fields of `decode_record`.
    """

    # Of the fields of MessageFields the topic, the stored body, and the properties once they are parsed; the others stay None.
    cdef object sent_body
    cdef bytes long_properties  # None where they are short
    cdef RecordView record      # with the version in place of the magic; its positions mean nothing here
    cdef unsigned char[HOST_SIZE] born_host_bytes
    cdef unsigned char[HOST_SIZE] store_host_bytes
    cdef unsigned char[SHORT_PROPERTIES] short_properties
    cdef bint crc_ok

    def __init__(self, tuple record not None):
        cdef bytes born_host, store_host, body, properties
        cdef str topic
        (self.record.total_size, self.record.magic, self.record.body_crc, self.record.queue_id, self.record.flag,
         self.record.queue_offset, self.record.phy_offset, self.record.sys_flag, self.record.born_timestamp, born_host,
         self.record.store_timestamp, store_host, self.record.reconsume_times, self.record.prepared_transaction_offset,
         body, topic, properties, self.crc_ok) = record
        if born_host is None or store_host is None or body is None or topic is None or properties is None:
            raise TypeError("topic, body, properties and hosts must not be None")
        if PyBytes_GET_SIZE(born_host) > HOST_SIZE or PyBytes_GET_SIZE(store_host) > HOST_SIZE:
            raise ValueError(f"a host takes 8 or 20 bytes, not {len(born_host)} and {len(store_host)}")
        self.record.born_host_len = <int32_t>PyBytes_GET_SIZE(born_host)
        self.record.store_host_len = <int32_t>PyBytes_GET_SIZE(store_host)
        memcpy(self.born_host_bytes, PyBytes_AS_STRING(born_host), self.record.born_host_len)
        memcpy(self.store_host_bytes, PyBytes_AS_STRING(store_host), self.record.store_host_len)
        take_properties(self, <const unsigned char*>PyBytes_AS_STRING(properties), PyBytes_GET_SIZE(properties), properties)
        (<MessageFields>self).topic, (<MessageFields>self).body = topic, body
        (<MessageFields>self).properties = self.sent_body = None

    @property
    def _record(self):
        cdef RecordView* r = &self.record
        return (r.total_size, r.magic, r.body_crc, r.queue_id, r.flag, r.queue_offset, r.phy_offset, r.sys_flag,
                r.born_timestamp, self._born_host_stored, r.store_timestamp, self._store_host_stored, r.reconsume_times,
                r.prepared_transaction_offset, (<MessageFields>self).body, (<MessageFields>self).topic,
                self.properties_stored, bool(self.crc_ok))

    @property
    def _born_host_stored(self):
        return PyBytes_FromStringAndSize(<char*>self.born_host_bytes, self.record.born_host_len)

    @property
    def _store_host_stored(self):
        return PyBytes_FromStringAndSize(<char*>self.store_host_bytes, self.record.store_host_len)

    @property
    def topic(self):
        return (<MessageFields>self).topic

    @property
    def body(self):
        """bytes: the body as it was sent: decompressed on first use.  That of a `corrupt` message stays as it is stored.

        Raises
        ------
        CorruptionError
            The body cannot be decompressed; `body_stored` has its bytes.
        UnsupportedFormatError, MissingDependencyError
            As of `decompress_body`.
        """
        if not self.record.sys_flag & 1 or not self.crc_ok:
            return (<MessageFields>self).body
        if self.sent_body is None:
            self.sent_body = self._decompressed_body()
        return self.sent_body

    @property
    def body_stored(self):
        """bytes: the body as the record holds it, maybe compressed."""
        return (<MessageFields>self).body

    @property
    def properties(self):
        """dict of str to str: the properties, parsed on first use with `parse_properties`."""
        if (<MessageFields>self).properties is None:
            (<MessageFields>self).properties = self._parsed_properties()
            # From now on its owner can put something into it that leads back here.
            if not PyObject_GC_IsTracked(self):
                PyObject_GC_Track(self)
        return (<MessageFields>self).properties

    @property
    def properties_stored(self):
        """bytes: the properties text as the record holds it."""
        if self.long_properties is not None:
            return self.long_properties
        return PyBytes_FromStringAndSize(<char*>self.short_properties, self.record.properties_len)

    @property
    def keys(self):
        """list of str: the pieces of the KEYS property, split at spaces."""
        text = property_of(self, b"KEYS", 4)
        if text is None:
            return []
        if PyUnicode_IS_COMPACT_ASCII(<PyObject*>text):
            several = memchr(PyUnicode_DATA(<PyObject*>text), 32, PyUnicode_GET_LENGTH(<PyObject*>text)) != NULL
        else:
            several = " " in text
        return [key for key in text.split(" ") if key] if several else [text]

    @property
    def tags(self):
        """str or None: the TAGS property."""
        return property_of(self, b"TAGS", 4)

    @property
    def unique_key(self):
        """str or None: the producer's id (property UNIQ_KEY)."""
        return property_of(self, b"UNIQ_KEY", 8)

    @property
    def store_size(self):
        """int: size of the whole record in the log, bytes."""
        return self.record.total_size

    @property
    def version(self):
        """int: 1, or 2 for a record with a 16-bit topic length (RocketMQ since 5.1.0)."""
        return self.record.magic

    @property
    def crc(self):
        """int: the stored CRC-32 of the stored body, top bit clear."""
        return self.record.body_crc

    def check_queue(self, str topic not None, int64_t queue_id, int64_t queue_offset):
        """bool: its record says that it is the one with this place in this queue; if not, it is marked as corrupt."""
        cdef bint ours = is_of_queue(self, topic, queue_id, queue_offset)
        if not ours:
            self.crc_ok = False
        return ours

    @property
    def corrupt(self):
        """bool: the stored body does not fit its CRC, or the record says that it is another message than its queue unit."""
        return not self.crc_ok

    @property
    def queue_id(self):
        return self.record.queue_id

    @property
    def queue_offset(self):
        return self.record.queue_offset

    @property
    def phy_offset(self):
        """int: absolute position of the record in the commit log."""
        return self.record.phy_offset

    @property
    def flag(self):
        return self.record.flag

    @property
    def sys_flag(self):
        return self.record.sys_flag

    @property
    def born_timestamp(self):
        return self.record.born_timestamp

    @property
    def store_timestamp(self):
        return self.record.store_timestamp

    @property
    def reconsume_times(self):
        return self.record.reconsume_times

    @property
    def prepared_transaction_offset(self):
        return self.record.prepared_transaction_offset


cdef void take_properties(StoredMessage m, const unsigned char* text, int64_t n, bytes held):
    # Short ones, as most are, stand in the message itself.
    m.record.properties_len = <int32_t>n
    if n <= SHORT_PROPERTIES:
        memcpy(m.short_properties, text, n)
        m.long_properties = None
    else:
        m.long_properties = PyBytes_FromStringAndSize(<char*>text, n) if held is None else held


cdef object property_of(StoredMessage m, const char* name, Py_ssize_t name_len):
    # The value of one property, None if there is none; what was parsed before stands, as its owner may have changed it.
    cdef const unsigned char* text
    cdef int32_t value, value_len, n = m.record.properties_len
    cdef int64_t room = SHORT_PROPERTIES
    if (<MessageFields>m).properties is not None:
        return (<MessageFields>m).properties.get(name[:name_len].decode("ascii"))
    if m.long_properties is None:
        text = m.short_properties
    else:
        text, room = <const unsigned char*>PyBytes_AS_STRING(m.long_properties), n
    value = value_of(text, n, room, <const unsigned char*>name, <int32_t>name_len, &value_len)
    return text_of(text + value, value_len) if value >= 0 else None


cdef tuple NO_ARGUMENTS = ()
# Of the message that was decoded last: the next one mostly has the same.
cdef bytes last_topic_bytes = b""
cdef str last_topic = ""
cdef type adopted = None


cdef inline bint same_bytes(bytes known, const unsigned char* p, int64_t n):
    return PyBytes_GET_SIZE(known) == n and memcmp(PyBytes_AS_STRING(known), p, n) == 0


def adopt(type kind not None):
    """Make and free messages of this kind, a subclass of `StoredMessage`, in the shortest way from now on.

    Nothing else about it changes.  A kind that adds fields of its own is left as it is.
    """
    global adopted
    message_type(kind)
    if adopt_message(<PyTypeObject*>kind, <PyTypeObject*>StoredMessage, StoredMessage.__new__(StoredMessage)):
        adopted = kind


cdef type message_type(type kind):
    # Makes sure that what is made of it is a message.
    if kind is None or (kind is not adopted and not issubclass(kind, StoredMessage)):
        raise TypeError(f"{kind!r} is no kind of StoredMessage")
    return kind


cdef bint crcs_ok(const unsigned char* p, RecordView* r, int check_crc):
    cdef bint ok = True
    if check_crc:
        if r.total_size > LONG_BODY:
            with nogil:
                ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (check_crc < 2 or has_prop_crc(p, r))
        else:
            ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (check_crc < 2 or has_prop_crc(p, r))
    return ok


cdef StoredMessage message_of(type kind, const unsigned char* p, RecordView* r, int check_crc):
    # The caller holds a pin: allocations may run a finalizer that closes the file.
    global last_topic_bytes, last_topic
    cdef StoredMessage m
    cdef bytes topic_bytes
    cdef str topic
    if kind is adopted:
        m = <StoredMessage>new_message(<PyTypeObject*>kind)
    else:
        m = <StoredMessage>(<PyTypeObject*>kind).tp_new(kind, <PyObject*>NO_ARGUMENTS, NULL)
    m.record = r[0]
    m.record.magic = 1 if r.magic == C_MAGIC_V1 else 2
    m.crc_ok = crcs_ok(p, r, check_crc)
    # Behind a host of 8 bytes there are more than 12 others of the record in any case: 20 are copied always, which is cheaper.
    memcpy(m.born_host_bytes, p + RECORD_BORN_HOST, HOST_SIZE)
    memcpy(m.store_host_bytes, p + r.store_host_pos, HOST_SIZE)
    (<MessageFields>m).body = PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len)
    take_properties(m, p + r.properties_pos, r.properties_len, None)
    if same_bytes(last_topic_bytes, p + r.topic_pos, r.topic_len):
        (<MessageFields>m).topic = last_topic
    else:
        topic = text_of(p + r.topic_pos, r.topic_len)
        topic_bytes = PyBytes_FromStringAndSize(<char*>p + r.topic_pos, r.topic_len)
        last_topic, last_topic_bytes = topic, topic_bytes
        (<MessageFields>m).topic = topic
    return m


def read_message(Region region not None, int64_t pos, int64_t base_offset, type kind not None, int check_crc=1):
    """Decode the record at `pos` of a segment as a message.

    Parameters
    ----------
    base_offset : int
        Absolute offset of the segment's first byte; the record must say that it lies here.
    kind : type
        What the message shall be, a subclass of `StoredMessage`.
    check_crc : int
        As of `decode_record`; a CRC that fails marks the message as corrupt.

    Returns
    -------
    StoredMessage or Verdict
        Anything that is not a whole record gives the verdict.
    """
    message_type(kind)
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, region.size - pos)
    cdef int verdict
    try:
        verdict = judge_record(p, region.size - pos, base_offset + pos, 0, &r)
        if verdict != RECORD:
            return Verdict(verdict)
        return message_of(kind, p, &r, check_crc)
    finally:
        region.unpin()


def read_messages(Region region not None, int64_t pos, int64_t limit, int64_t base_offset, type kind not None,
                  int64_t max_num, int64_t max_bytes, int check_crc=1):
    """Decode the records that lie one behind the other from `pos` on.

    Parameters
    ----------
    limit : int
        Records that begin before this position.
    base_offset, kind, check_crc
        As of `read_message`.
    max_num, max_bytes : int
        At most so many; reading stops behind the record with which there are so many bytes of records.

    Returns
    -------
    (list, int)
        Messages, none where no whole record begins at `pos`; the position behind the last of them.
    """
    message_type(kind)
    cdef RecordView r
    cdef list out = []
    cdef int64_t size = region.size, begin = pos
    cdef unsigned char* base = region.pin(0, size)
    try:
        if pos < 0 or pos > size:
            raise OffsetOutOfRangeError(f"position {pos} is outside the segment", pos=pos)
        if limit > size:
            limit = size
        while pos < limit and max_num > 0 and pos - begin < max_bytes:
            if judge_record(base + pos, size - pos, base_offset + pos, 0, &r) != RECORD:
                break
            prefetch_head(base + pos + r.total_size, size - pos - r.total_size)
            out.append(message_of(kind, base + pos, &r, check_crc))
            pos += r.total_size
            max_num -= 1
        return out, pos
    finally:
        region.unpin()


cdef struct Pull:
    # How far a get has come: units that were dealt with, the last that was no pre-fill unit, bytes and number of messages.
    int64_t done, last, size, taken
    bint full, missing


cdef bint is_of_queue(StoredMessage message, str topic, int64_t queue_id, int64_t queue_offset) except -1:
    # Whether the record says that it is this message of this queue, or one of its further queues (RocketMQ's LMQ).
    if (message.record.queue_id == queue_id and message.record.queue_offset == queue_offset
            and <str>(<MessageFields>message).topic == topic):
        return True
    if queue_id != 0:
        return False
    cdef bytes wanted = topic.encode("utf-8", "replace"), text = message.properties_stored
    cdef bytes scratch = PyBytes_FromStringAndSize(NULL, 3 * PyBytes_GET_SIZE(text))
    return is_dispatched_to(<unsigned char*>PyBytes_AS_STRING(scratch), <const unsigned char*>PyBytes_AS_STRING(text),
                            PyBytes_GET_SIZE(text), <int32_t>PyBytes_GET_SIZE(text),
                            <const unsigned char*>PyBytes_AS_STRING(wanted), PyBytes_GET_SIZE(wanted), queue_offset)


cdef int pull(Pull* at, const unsigned char* units, int64_t num, const unsigned char* base, int64_t segment_size,
              int64_t base_offset, int64_t low, int64_t high, type kind, list out, int64_t max_num, int64_t max_bytes,
              int check_crc, frozenset tags_codes, frozenset tags, str topic, int64_t queue_id, int64_t first) except -1:
    # The caller holds pins on both.  `first` is the queue offset of the first unit.
    cdef int64_t phy, following, tags_code
    cdef int32_t unit_size
    cdef StoredMessage message
    cdef const unsigned char* unit
    cdef const unsigned char* record
    cdef RecordView r
    cdef object known = None
    if low < base_offset:
        low = base_offset
    if high > base_offset + segment_size:
        high = base_offset + segment_size
    while at.done < num:
        unit = units + UNIT_SIZE * at.done
        unit_size = get_i32(unit + UNIT_RECORD_SIZE)
        acquire_fence()
        phy = get_i64(unit)
        if phy == 0 and unit_size == 0x7FFFFFFF:
            at.done += 1
            continue
        if at.taken and (at.taken >= max_num or at.size + unit_size > max_bytes):
            at.full = True
            break
        if tags_codes is not None:
            tags_code = get_i64(unit + UNIT_TAGS_CODE)
            if tags_code > MAX_EXT_ADDRESS and (tags_code & 0xFFFFFFFF) not in tags_codes:
                at.last = at.done
                at.done += 1
                continue
        if not low <= phy < high:
            break
        if at.done + TAIL_AHEAD < num:
            following = get_i64(unit + UNIT_SIZE * TAIL_AHEAD)
            if low <= following < high:
                prefetch_head(base + (following - base_offset), segment_size - (following - base_offset))
        record = base + (phy - base_offset)
        if (judge_record(record, segment_size - (phy - base_offset), phy, 0, &r) != RECORD
                or r.total_size != unit_size):
            at.missing |= at.taken == 0
        else:
            message = message_of(kind, record, &r, check_crc)
            if ((<MessageFields>message).topic is not known or r.queue_id != queue_id
                    or r.queue_offset != first + at.done):
                if not is_of_queue(message, topic, queue_id, first + at.done):
                    message.crc_ok = False
                elif <str>(<MessageFields>message).topic == topic:
                    # Messages that follow mostly have the same text, which then need not be compared.
                    known = (<MessageFields>message).topic
            if tags is None or property_of(message, b"TAGS", 4) in tags:
                out.append(message)
                at.taken += 1
                at.size += unit_size
        at.last = at.done
        at.done += 1
    return 0


def read_queued(Region units not None, int64_t pos, int64_t num, Region segment not None, int64_t base_offset,
                int64_t low, int64_t high, type kind not None, list out not None, int64_t size, int64_t max_num,
                int64_t max_bytes, int check_crc, frozenset tags_codes, frozenset tags, str topic not None, int64_t queue_id,
                int64_t first):
    """Decode the messages to which consecutive 20-byte units lead, as long as they lie in one segment.

    Parameters
    ----------
    units : Region
        A file of a simple queue.
    pos, num : int
        Where the first unit lies, and how many there are.
    segment, base_offset : Region, int
        A segment and the absolute offset of its first byte.
    low, high : int
        The phy offsets, of those in the segment, that a unit may lead to here.
    kind, check_crc
        As of `read_message`.
    out : list
        The messages so far; those that are read are appended.
    size, max_num, max_bytes : int
        Sum of the record sizes so far; reading stops before there are more messages, or more bytes, than these, but not
        before the first message.
    tags_codes, tags : frozenset of int, frozenset of str, optional
        Only messages with one of these tags; units whose tags code has other low 32 bits are passed over unread.  A tags code
        that is an address in an extension is not looked up and passes.
    topic, queue_id, first : str, int, int
        The queue, and the queue offset of the first unit.  A record that says that it is another message is marked as
        corrupt.

    Returns
    -------
    done : int
        How many units were dealt with; one that does not lead to a record of its size is passed over.
    last : int
        The number of the last of them that was no pre-fill unit, -1 if there was none.
    size : int
        Sum of the record sizes.
    full : bool
        A limit stopped it.
    missing : bool
        A unit led to no record before there was any message.
    """
    message_type(kind)
    if num < 0 or num > INT64_MAX // UNIT_SIZE:
        raise OffsetOutOfRangeError(f"{num} units", pos=pos)
    cdef Pull at
    at.done, at.last, at.size, at.taken, at.full, at.missing = 0, -1, size, len(out), False, False
    cdef unsigned char* first_unit = units.pin(pos, UNIT_SIZE * num)
    cdef unsigned char* base
    try:
        base = segment.pin(0, segment.size)
        try:
            pull(&at, first_unit, num, base, segment.size, base_offset, low, high, kind, out, max_num, max_bytes, check_crc,
                 tags_codes, tags, topic, queue_id, first)
        finally:
            segment.unpin()
    finally:
        units.unpin()
    return at.done, at.last, at.size, at.full, at.missing


def read_recent(FileStream stream not None, phy_offset not None, type kind not None, int check_crc):
    """StoredMessage or None: the record at `phy_offset`, if it lies in the file that was asked for last and is whole."""
    cdef int64_t offset = clamped(phy_offset)
    cdef Region region = stream.around(offset)
    cdef RecordView r
    cdef int64_t room
    cdef unsigned char* p
    if region is None:
        return None
    message_type(kind)
    room = region.size - (offset - stream.found_base)
    p = region.pin(offset - stream.found_base, room)
    try:
        prefetch_head(p, room)
        if judge_record(p, room, offset, 0, &r) != RECORD:
            return None
        return message_of(kind, p, &r, check_crc)
    finally:
        region.unpin()


def read_recent_queued(FileStream units not None, FileStream log not None, tuple known not None, queue_offset, num, max_num,
                       int64_t max_bytes, type kind not None, int check_crc, type result_kind not None, status, str topic not None,
                       int64_t queue_id):
    """As `read_queued`, of the file of units (this stream) and the segment that were asked for last: what most gets come to.

    Parameters
    ----------
    log : FileStream
        The segments.
    known : tuple of (int, int)
        A first phy offset of the log, and the first queue offset that goes with it.
    queue_offset, num : int
        Of the first unit; at most so many are looked at.
    result_kind : type
        Whose instances have the attributes `status`, `messages`, `next_queue_offset`, `min_queue_offset` and
        `max_queue_offset`.
    status : object

    Returns
    -------
    result_kind or None
        Of `status`, with one message at least.  None where another file is needed, where nothing is found, or where
        `known` is not of the log as it is: the caller goes the long way.
    """
    cdef int64_t first = clamped(queue_offset), count = clamped(num), wanted = clamped(max_num), low, high, pos, room, min_phy
    message_type(kind)
    if first < 0 or first > INT64_MAX // UNIT_SIZE or wanted < 0 or not log.file_offsets:
        return None
    min_phy, low = known
    high = units.wrote_where // UNIT_SIZE
    if (<int64_t>log.file_offsets[0] if <int64_t>log.file_offsets[0] > 0 else 0) != min_phy or not low <= first < high:
        return None
    cdef Region region = units.around(first * UNIT_SIZE), segment
    if region is None:
        return None
    pos = first * UNIT_SIZE - units.found_base
    room = (region.size - pos) // UNIT_SIZE
    if room > high - first:
        room = high - first
    if count > room:
        count = room
    if count <= 0:
        return None
    cdef list out = []
    cdef Pull at
    at.done, at.last, at.size, at.taken, at.full, at.missing = 0, -1, 0, 0, False, False
    cdef unsigned char* first_unit = region.pin(pos, UNIT_SIZE * count)
    cdef unsigned char* base
    try:
        segment = log.around(get_i64(first_unit))
        if segment is None:
            return None
        base = segment.pin(0, segment.size)
        try:
            pull(&at, first_unit, count, base, segment.size, log.found_base, log.found_base, log.wrote_where, kind, out,
                 wanted, max_bytes, check_crc, None, None, topic, queue_id, first)
        finally:
            segment.unpin()
    finally:
        region.unpin()
    if at.taken == 0 or (at.done < count and not at.full):
        return None
    if (<PyTypeObject*>result_kind).tp_new == NULL:
        raise TypeError(f"{result_kind!r} has no instances")
    # Set as its class does that lets nobody else change it.
    cdef object found = (<PyTypeObject*>result_kind).tp_new(result_kind, <PyObject*>NO_ARGUMENTS, NULL)
    PyObject_GenericSetAttr(found, "status", status)
    PyObject_GenericSetAttr(found, "messages", out)
    PyObject_GenericSetAttr(found, "next_queue_offset", first + at.last + 1)
    PyObject_GenericSetAttr(found, "min_queue_offset", low)
    PyObject_GenericSetAttr(found, "max_queue_offset", high)
    return found


cdef object stored_text(str text, object encode):
    # Of ASCII the text has the record's bytes itself.
    cdef bytes encoded
    if PyUnicode_IS_ASCII(text):
        return text
    encoded = encode(text)
    if encoded is None:
        raise TypeError("encode gave None, not bytes")
    return encoded


cdef inline const unsigned char* bytes_of(object text, Py_ssize_t* n) noexcept:
    # Of what `stored_text` gave.
    if PyBytes_CheckExact(<PyObject*>text):
        n[0] = PyBytes_GET_SIZE(text)
        return <const unsigned char*>PyBytes_AS_STRING(text)
    n[0] = PyUnicode_GET_LENGTH(<PyObject*>text)
    return <const unsigned char*>PyUnicode_DATA(<PyObject*>text)


@cython.freelist(4)
@cython.no_gc_clear
cdef class KeySearch:
    """The messages with one key, gathered from index files and segments that the caller gives.

    Parameters
    ----------
    topic, key : str
    key_kind : KeyKind
    begin, end : int
        Store times, ms since epoch, inclusive.
    max_num : int
        At most so many messages.
    messages : list
        Empty; takes the messages in the order in which they are met, each once.
    kind, check_crc
        As of `read_message`.
    encode : callable
        Gives the bytes in which a record holds a text that is not ASCII.
    log : FileStream, optional
        The segments; the one that was asked for last is not asked for again.

    Attributes
    ----------
    truncated : bool
        There are more than `max_num`; nothing more is taken.
    descending : bool
        `messages` is in the order of falling phy offsets.
    """

    cdef object topic, key  # as of `stored_text`
    cdef int32_t key_hash
    cdef int key_kind, check_crc
    cdef int64_t begin, end, max_num, lowest
    cdef Region segment
    cdef FileStream log
    cdef int64_t base_offset, low, high
    cdef type kind
    cdef set seen
    cdef object messages  # a list, maybe of a subclass
    cdef readonly bint truncated, descending

    def __init__(self, str topic not None, str key not None, int key_kind, int64_t begin, int64_t end, int64_t max_num,
                 messages not None, type kind not None, int check_crc, encode, FileStream log=None):
        self.prepare(topic, key, key_kind, begin, end, max_num, messages, kind, check_crc, encode, log)

    cdef int prepare(self, str topic, str key, int key_kind, int64_t begin, int64_t end, int64_t max_num, messages, type kind,
                     int check_crc, encode, FileStream log) except -1:
        if not isinstance(messages, list):
            raise TypeError(f"messages is {type(messages).__name__}, not a list")
        cdef uint32_t h = hash_str(0, topic) * 31u + 35u
        if key_kind == TAG:
            # A tag is indexed as a key of the form T#tag.
            h = (h * 31u + 84u) * 31u + 35u
        self.key_hash = index_hash(hash_str(h, key))
        self.topic, self.key, self.key_kind = stored_text(topic, encode), stored_text(key, encode), key_kind
        self.begin, self.end, self.max_num = begin, end, max_num
        self.kind, self.check_crc = message_type(kind), check_crc
        self.messages = messages
        self.log = log
        self.segment = None
        self.seen = None
        self.truncated = False
        self.descending = True
        self.lowest = INT64_MAX

    cpdef int64_t walk(self, IndexRegion index, int64_t at, region_of) except -1:
        """Take the messages of an index file's chain.

        Parameters
        ----------
        at : int
            Entry number to begin with; -1 begins at the newest.
        region_of : callable
            Gives for a phy offset the segment that holds it: (Region, offset of its first byte, and the bounds of what the
            log holds), or None if there is none.

        Returns
        -------
        int
            The entry to go on with, as a long chain is walked in parts, so that it does not keep others waiting; 0 when
            the chain is at its end, or `truncated`.
        """
        if index is None or region_of is None:
            raise TypeError("index and region_of must not be None")
        if self.messages is None or at >= index.index_num:
            raise OffsetOutOfRangeError(f"entry {at} of {index.index_num}")
        cdef Region region = index.region
        cdef unsigned char* entries = region.pin(0, region.size)
        cdef const unsigned char* entry
        cdef int64_t phy, steps = 0
        cdef bint damaged = False
        try:
            if at < 0:
                at = index_head(entries, index.magic, index.slot_num, index.index_num, self.key_hash)
                damaged = at < 0
            while at > 0 and not self.truncated and steps < WALK_STEPS:
                entry = entries + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num + ENTRY_SIZE * at
                phy = get_i64(entry + ENTRY_PHY_OFFSET)
                if get_i32(entry + ENTRY_KEY_HASH) == self.key_hash:
                    damaged |= phy < 0 or self.look_at(phy, region_of)
                at = entry_before(entry, at, self.key_hash, index.magic, index.slot_num, &damaged)
                steps += 1
            if damaged:
                index.damaged = True
            return 0 if self.truncated or at < 0 else at
        finally:
            region.unpin()

    cdef int look_at(self, int64_t phy, object region_of) except -1:
        # In the segment of the record before, or else in the one that the caller finds.  1 where an entry cannot lead there.
        cdef object found
        cdef Region segment
        cdef unsigned char* p
        if self.segment is None or not self.low <= phy < self.high:
            segment = None if self.log is None else self.log.around(phy)
            if segment is not None:
                self.segment, self.base_offset = segment, self.log.found_base
                self.low, self.high = self.base_offset, self.log.wrote_where
            else:
                found = region_of(phy)
                if found is None:
                    # Retention took it, its segment is lost, or the log does not go so far.
                    return self.log is not None and phy >= self.log.wrote_where
                self.segment, self.base_offset, self.low, self.high = found
            if self.segment is None:
                return 0
            if self.low < self.base_offset:
                self.low = self.base_offset
            if self.high > self.base_offset + self.segment.size:
                self.high = self.base_offset + self.segment.size
            if not self.low <= phy < self.high:
                return phy >= self.high
        segment = self.segment
        p = segment.pin(phy - self.base_offset, segment.size - (phy - self.base_offset))
        prefetch_head(p, segment.size - (phy - self.base_offset))
        try:
            return self.take(p, segment.size - (phy - self.base_offset), phy)
        finally:
            segment.unpin()

    cdef int take(self, const unsigned char* p, int64_t room, int64_t phy) except -1:
        cdef RecordView r
        cdef Py_ssize_t topic_len, key_len
        if judge_record(p, room, phy, 0, &r) != RECORD:
            return 1
        cdef const unsigned char* topic = bytes_of(self.topic, &topic_len)
        cdef const unsigned char* key = bytes_of(self.key, &key_len)
        if not has_key(p, &r, topic, topic_len, key, key_len, self.key_kind):
            return not has_key_hash(p, &r, self.key_hash)
        if not self.begin <= r.store_timestamp <= self.end:
            return 0
        if phy >= self.lowest:
            # A key that was indexed twice; only where offsets rise the others have to be asked.
            if self.seen is None:
                self.seen = {each.phy_offset for each in self.messages}
            if phy in self.seen:
                return 0
            self.descending = False
        if PyList_GET_SIZE(self.messages) >= self.max_num:
            self.truncated = True
            return 0
        PyList_Append(self.messages, message_of(self.kind, p, &r, self.check_crc))
        if self.seen is not None:
            self.seen.add(phy)
        if phy < self.lowest:
            self.lowest = phy
        return 0


def find_messages(indexes, region_of not None, str topic not None, str key not None, int key_kind, int64_t begin, int64_t end,
                  int64_t max_num, type result_kind not None, type kind not None, int check_crc, encode, FileStream log=None):
    """The messages with one key, as `KeySearch` finds them in the index files `indexes`, newest first.

    Parameters
    ----------
    indexes : iterable of IndexRegion
    result_kind : type
        A kind of list whose instances have an attribute `truncated`.
    others
        As of `KeySearch` and its `walk`.

    Returns
    -------
    result_kind or None
        None where the chain of a file is long or damaged, or its offsets do not fall: the caller goes on with a `KeySearch` of
        its own.
    """
    return messages_with_key(indexes, region_of, topic, key, key_kind, begin, end, max_num, list_type(result_kind), kind,
                             check_crc, encode, log)


cdef type list_type(type kind):
    # Makes sure that what is made of it is a list.
    if kind is None or not issubclass(kind, list):
        raise TypeError(f"{kind!r} is no kind of list")
    return kind


cdef object messages_with_key(indexes, object region_of, str topic, str key, int key_kind, int64_t begin, int64_t end,
                              int64_t max_num, type result_kind, type kind, int check_crc, object encode, FileStream log):
    cdef object found = (<PyTypeObject*>result_kind).tp_new(result_kind, <PyObject*>NO_ARGUMENTS, NULL)
    cdef KeySearch search = KeySearch.__new__(KeySearch)
    cdef IndexRegion index
    search.prepare(topic, key, key_kind, begin, end, max_num, found, kind, check_crc, encode, log)
    for index in indexes:
        if search.walk(index, -1, region_of) != 0 or (index.damaged and not index.is_distrusted):
            return None
        if search.truncated:
            break
    if not search.descending:
        return None
    found.truncated = search.truncated
    return found


@cython.no_gc_clear
cdef class KeyQuery:
    """Answers the usual query by key in one call: ASCII, unique keys and keys, all times, while all index files are open.

    Whatever it does not know, or should look for first, it leaves to its caller, who goes the long way.

    Parameters
    ----------
    indexes : object
        With `opened_files`: a tuple of `IndexRegion`, newest first, or None.
    region_of, result_kind, kind, check_crc, encode, log
        As of `find_messages`.
    clock : callable
        Gives seconds.
    interval : float
        So many seconds after `looked_at`, and where the newest index file is full, a query goes the long way: another process
        may have begun a new one.  Infinite where this process is the one that would, which also knows when a file is full.

    Attributes
    ----------
    looked_at : float
        When somebody last looked whether the files are those that are there, by `clock`.
    closed : bool
        Answer nothing more.
    """

    cdef public double looked_at
    cdef public bint closed
    cdef object indexes, region_of, encode, clock
    cdef type result_kind, kind
    cdef int check_crc
    cdef FileStream log
    cdef double interval

    def __cinit__(self, indexes, region_of not None, type result_kind not None, type kind not None, int check_crc, encode,
                  FileStream log not None, clock not None, double interval):
        self.indexes, self.region_of, self.encode, self.clock, self.interval = indexes, region_of, encode, clock, interval
        self.result_kind, self.kind, self.check_crc, self.log = list_type(result_kind), message_type(kind), check_crc, log
        self.looked_at = -1.0

    def find(self, topic, key, max_num):
        """result_kind or None: the messages as `find_messages` gives them, None where the caller has to."""
        cdef int64_t num
        if (self.closed or not PyUnicode_CheckExact(<PyObject*>topic) or not PyUnicode_CheckExact(<PyObject*>key)
                or not PyUnicode_IS_COMPACT_ASCII(<PyObject*>topic) or not PyUnicode_IS_COMPACT_ASCII(<PyObject*>key)
                or not small_number(<PyObject*>max_num, &num) or num < 0):
            return None
        indexes = self.indexes.opened_files
        if not indexes:
            return None
        if self.interval < INFINITY and ((<IndexRegion?>indexes[0]).full() or self.clock() - self.looked_at >= self.interval):
            return None
        return messages_with_key(indexes, self.region_of, topic, key, ANY_KEY, INT64_MIN, INT64_MAX, num, self.result_kind,
                                 self.kind, self.check_crc, self.encode, self.log)
