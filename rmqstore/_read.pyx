"""Reading messages: `StoredMessage`, by place, by queue and by key.

Owns how a record becomes a message, the get of a run of units, and the search of a key's chains.  It opens no file: callers
give regions, or streams that know the file that was asked for last.  It never calls a message missing: it says that the
caller has to go the long way.  Invariants are those of `_core`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_Append, PyList_GET_SIZE
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.time cimport monotonic
from cpython.tuple cimport PyTuple_GET_SIZE
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t
from libc.string cimport memchr, memcmp, memcpy

from rmqstore._bytes cimport (
    acquire_i32_at, before, copy_bytes, difference_of, get_i32, get_i64, same_bytes_at, sum_of,
)
from rmqstore._core cimport (
    ANY_KEY, C_MAGIC_V1, entry_before, ENTRY_KEY_HASH, ENTRY_PHY_OFFSET, ENTRY_SIZE, FileStream, index_count_of,
    index_head, INDEX_HEADER_SIZE, IndexRegion, MAX_EXT_ADDRESS, MessageFields, OpenedIndexes, QueueFields, QueueTable,
    RECORD, RECORD_BORN_HOST, Region, short_way_first, SLOT_SIZE, StateFields, TAG, UNIT_RECORD_SIZE, UNIT_SIZE,
    UNIT_TAGS_CODE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._java_text cimport hash_str, index_hash
from rmqstore._properties cimport (
    fits, is_dispatched_to, KnownSpans, learn, PropertyLayout, PropertySpan, split_properties, value_of,
)
from rmqstore._python cimport (
    clamped, PyBytes_CheckExact, PyList_GET_ITEM, PyObject_GC_IsTracked, PyObject_GC_Track, PyObject_GenericSetAttr,
    PyTuple_GET_ITEM, PyUnicode_AsUTF8AndSize, PyUnicode_CheckExact, PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_IS_ASCII,
    PyUnicode_IS_COMPACT_ASCII, small_number,
)
from rmqstore._record cimport (
    body_crc_ok, has_key, has_key_hash, has_prop_crc, judge_record, prefetch_head, prop_crc_ok, RecordView,
    TAIL_AHEAD, text_of,
)

from sys import intern as _intern

from rmqstore._core import Verdict
from rmqstore.errors import OffsetOutOfRangeError

crc32_start()


cdef enum:
    # A CRC over more bytes than this takes long enough to let other threads run meanwhile; a shorter one would wait longer
    # for the GIL than it runs.
    LONG_BODY = 131072
    WALK_STEPS = 1024
    # What of an index file `KeyQuery` gathered: all that it has, not all, or nothing, as another file may follow a full one.
    IS_WHOLE = 0
    IS_LONG = 1
    IS_FULL = 2
    HOST_SIZE = 20        # the longer of the two forms
    SHORT_PROPERTIES = 128
    # A broker's own limit for a body.
    KEPT_BODY = 4 * 1024 * 1024
    # Properties that the index takes.
    THE_KEYS = 0
    THE_TAGS = 1
    THE_UNIQUE_KEY = 2
    TAGS_KEPT = 16
    TOPIC_KEPT = 128
    LAYOUTS = 16
    LAYOUT_PATIENCE = 16


cdef const char** PROPERTY_NAMES = [b"KEYS", b"TAGS", b"UNIQ_KEY"]


cdef extern from *:
    """
    /* How messages that are read are made and freed: as their type would, but without the way through its bases, each of
       which fills and clears its own part, and without an entry in the collector's lists.  The objects of a message stand
       first in it: the fields of MessageFields, then those of StoredMessage. */
    #include <structmember.h>
    #define RMQ_MESSAGE_OBJECTS 12
    typedef struct { PyObject_HEAD PyObject *objects[RMQ_MESSAGE_OBJECTS]; } rmq_message;

    /* Messages that are done with, for those to come: a program mostly holds a page of them at a time.  AddressSanitizer
       would not see that one is used after its end. */
    #define RMQ_MESSAGES_KEPT 64
    #if defined(Py_GIL_DISABLED) || RMQ_WATCHES_ADDRESSES
    #define RMQ_KEEPS_MESSAGES 0
    #else
    #define RMQ_KEEPS_MESSAGES 1
    #endif
    static PyObject *rmq_kept_messages[RMQ_MESSAGES_KEPT];
    static int rmq_kept_num = 0;
    static PyTypeObject *rmq_kept_kind = NULL;

    static PyObject *rmq_new_message(PyTypeObject *kind) {
        PyObject *made;
        int i;
        if (RMQ_KEEPS_MESSAGES && rmq_kept_num && kind == rmq_kept_kind) {
            made = rmq_kept_messages[--rmq_kept_num];
            PyObject_Init(made, kind);
        } else if (!(made = (PyObject *)PyObject_GC_New(PyObject, kind)))
            return NULL;
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) Py_INCREF(Py_None);
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) ((rmq_message *)made)->objects[i] = Py_None;
        return made;
    }

    static void rmq_free_message(PyObject *made) {
        PyTypeObject *kind = Py_TYPE(made);
        int i;
        if (kind->tp_finalize && PyObject_CallFinalizerFromDealloc(made) < 0) return;
        PyObject_GC_UnTrack(made);
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++) Py_DECREF(((rmq_message *)made)->objects[i]);
        if (RMQ_KEEPS_MESSAGES && kind == rmq_kept_kind && !kind->tp_finalize && rmq_kept_num < RMQ_MESSAGES_KEPT)
            rmq_kept_messages[rmq_kept_num++] = made;
        else
            kind->tp_free(made);
        Py_DECREF(kind);
    }

    /* An attribute of a message: what its type would find, but without the search for it, as long as nothing was
       changed about the type.  Names are interned, so that one is known by its address. */
    #define RMQ_ATTRIBUTES 128
    #define RMQ_ATTRIBUTE_OF(name) ((size_t)((uint64_t)(uintptr_t)(name) * rmq_attribute_factor >> 57))
    static struct { PyObject *name; getter get; void *closure; } rmq_attributes[RMQ_ATTRIBUTES];
    static uint64_t rmq_attribute_factor = 0x9E3779B97F4A7C15u;
    static unsigned int rmq_attributes_version = 0;

    static PyObject *rmq_get_attribute(PyObject *message, PyObject *name) {
        const size_t at = RMQ_ATTRIBUTE_OF(name);
        if (rmq_attributes[at].name == name && Py_TYPE(message) == rmq_kept_kind
                && rmq_kept_kind->tp_version_tag == rmq_attributes_version)
            return rmq_attributes[at].get(message, rmq_attributes[at].closure);
        return PyObject_GenericGetAttr(message, name);
    }

    /* Learns the attributes that `kind` has from compiled code, with a factor by which as few of their names as possible
       are in each other's way; those that are take the usual way. */
    static void rmq_learn_attributes(PyTypeObject *kind, PyObject *names) {
        uint64_t factor = rmq_attribute_factor;
        Py_ssize_t i, fewest = PY_SSIZE_T_MAX;
        int tried;
        if (kind->tp_getattro != PyObject_GenericGetAttr || rmq_attributes_version) return;
        for (tried = 0; tried < 256 && fewest; tried++) {
            const uint64_t best = rmq_attribute_factor;
            char taken[RMQ_ATTRIBUTES] = {0};
            Py_ssize_t clashes = 0;
            rmq_attribute_factor = factor;
            for (i = 0; i < PyTuple_GET_SIZE(names); i++) {
                char *place = &taken[RMQ_ATTRIBUTE_OF(PyTuple_GET_ITEM(names, i))];
                clashes += *place;
                *place = 1;
            }
            if (clashes < fewest) fewest = clashes;
            else rmq_attribute_factor = best;
            factor = factor * 6364136223846793005u + 1442695040888963407u;
            factor |= 1;
        }
        for (i = 0; i < PyTuple_GET_SIZE(names); i++) {
            PyObject *name = PyTuple_GET_ITEM(names, i), *found = PyObject_GetAttr((PyObject *)kind, name);
            const size_t at = RMQ_ATTRIBUTE_OF(name);
            if (!found) PyErr_Clear();
            if (found && Py_TYPE(found) == &PyGetSetDescr_Type && !rmq_attributes[at].name) {
                rmq_attributes[at].get = ((PyGetSetDescrObject *)found)->d_getset->get;
                rmq_attributes[at].closure = ((PyGetSetDescrObject *)found)->d_getset->closure;
                rmq_attributes[at].name = name;
                Py_INCREF(name);
            }
            Py_XDECREF(found);
        }
        /* 0 where the type has no number by which a change would show. */
        rmq_attributes_version = kind->tp_version_tag;
        if (rmq_attributes_version) kind->tp_getattro = rmq_get_attribute;
    }

    /* Where instances hold what their class has in __slots__, 0 for any other descriptor. */
    static Py_ssize_t rmq_place_of_slot(PyObject *descriptor) {
        PyMemberDef *member;
        if (Py_TYPE(descriptor) != &PyMemberDescr_Type) return 0;
        member = ((PyMemberDescrObject *)descriptor)->d_member;
        return member->type == T_OBJECT_EX ? member->offset : 0;
    }

    /* Of an instance that was just made of this class, whose slot is still empty. */
    static void rmq_set_slot(PyObject *made, Py_ssize_t at, PyObject *value) {
        Py_INCREF(value);
        *(PyObject **)((char *)made + at) = value;
    }

    /* Whether `kind` adds nothing to `stored` that would have to be made or freed, and `blank`, one as its type makes it,
       is laid out as is said above.  Then it is freed by `rmq_free_message` from now on. */
    static int rmq_adopt_message(PyTypeObject *kind, PyTypeObject *stored, PyObject *blank, PyObject *names) {
        int i;
        if (!(kind->tp_flags & Py_TPFLAGS_HEAPTYPE) || !PyType_IS_GC(kind) || kind->tp_basicsize != stored->tp_basicsize
                || (size_t)kind->tp_basicsize < sizeof(rmq_message) || kind->tp_itemsize || kind->tp_dictoffset
                || kind->tp_weaklistoffset || kind->tp_new != stored->tp_new || kind->tp_alloc != PyType_GenericAlloc
                || kind->tp_free != PyObject_GC_Del)
            return 0;
        for (i = 0; i < RMQ_MESSAGE_OBJECTS; i++)
            if (((rmq_message *)blank)->objects[i] != Py_None) return 0;
        kind->tp_dealloc = rmq_free_message;
        if (!rmq_kept_kind) {
            /* For good: others may have the address of a type that is gone. */
            Py_INCREF(kind);
            rmq_kept_kind = kind;
            rmq_learn_attributes(kind, names);
        }
        return 1;
    }
    """
    Py_ssize_t place_of_slot "rmq_place_of_slot"(object descriptor)
    void set_slot "rmq_set_slot"(object made, Py_ssize_t at, object value)
    object new_message "rmq_new_message"(PyTypeObject* kind)
    bint adopt_message "rmq_adopt_message"(PyTypeObject* kind, PyTypeObject* stored, object blank, tuple names)


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
    cdef uint32_t fitted        # the state of its layout (`layout_states`) that fits the properties, 0 while that is not known
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
        self.long_properties = None
        take_properties(self, <const unsigned char*>PyBytes_AS_STRING(properties), PyBytes_GET_SIZE(properties),
                        PyBytes_GET_SIZE(properties), properties)
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
            The body cannot be decompressed; `body_stored` has its bytes, and the message is `corrupt`.
        UnsupportedFormatError
            Likewise, of a compression type that RocketMQ does not define.
        MissingDependencyError
            As of `decompress_body`.
        """
        if not self.record.sys_flag & 1 or not self.crc_ok:
            return (<MessageFields>self).body
        cdef object sent = self.sent_body
        if sent is None or sent is True:
            sent = self._decompressed_body()
            # A few stored bytes may be a large body: a list of messages does not hold many, only that they are sound.
            self.sent_body = True if type(sent) is bytes and len(sent) > KEPT_BODY else sent
        if type(sent) is tuple:
            kind, text = sent
            raise kind(f"message at phy offset {self.record.phy_offset}: {text}")
        return sent

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
        cdef const unsigned char* stored
        cdef int32_t value, n
        cdef object text
        if (<MessageFields>self).properties is None:
            value = find_property(self, THE_KEYS, &stored, &n)
            # Most messages have one key: between several stand spaces.
            if value >= 0 and self.fitted and before(stored + value, 32, n, SHORT_PROPERTIES - value) == n:
                return [text_of(stored + value, n)]
        text = property_of(self, THE_KEYS)
        return [] if text is None else [text] if " " not in text else [key for key in text.split(" ") if key]

    @property
    def tags(self):
        """str or None: the TAGS property."""
        return tags_of(self)

    @property
    def unique_key(self):
        """str or None: the producer's id (property UNIQ_KEY)."""
        return property_of(self, THE_UNIQUE_KEY)

    @property
    def size(self):
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
        """bool: the stored body does not fit its CRC or is not what its compression flag says, or the record says that it
        is another message than its queue unit.

        Where the library of the compression is missing, that flag is not looked at; `body` raises then.
        """
        if not self.crc_ok:
            return True
        if not self.record.sys_flag & 1 or self.sent_body is True:
            return False
        return self._body_damage() is not None

    @property
    def crc_agrees(self):
        """bool: as not `corrupt`, without a look at the compression."""
        return bool(self.crc_ok)

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


cdef inline bint take_properties(StoredMessage m, const unsigned char* text, int64_t n, int64_t room,
                                 bytes held) except -1:
    # Short ones, as most are, stand in the message itself.  `room` bytes may be read.
    m.record.properties_len = <int32_t>n
    m.fitted = 0
    if n <= SHORT_PROPERTIES:
        copy_bytes(m.short_properties, text, n, room)
    else:
        m.long_properties = PyBytes_FromStringAndSize(<char*>text, n) if held is None else held
    return True


# Texts of messages are mostly taken apart as others of their length were before (`PropertyLayout`): that is soon seen.
cdef PropertyLayout[LAYOUTS] layouts
cdef int32_t[LAYOUTS] layout_patience   # so many texts have to differ from it before another is learnt
cdef uint32_t[LAYOUTS] layout_states    # another number each time that one was learnt, never 0


cdef inline int32_t find_property(StoredMessage m, int which, const unsigned char** text, int32_t* value_len) noexcept:
    # Where the value of a property that the index takes begins in the stored text; negative where there is none.
    cdef int32_t place = m.record.properties_len & (LAYOUTS - 1)
    if not m.fitted or m.fitted != layout_states[place]:
        return find_first_property(m, which, text, value_len)
    # It need not be compared with the layout again.
    text[0] = m.short_properties
    return value_in(&layouts[place], which, value_len)


cdef int32_t find_first_property(StoredMessage m, int which, const unsigned char** text, int32_t* value_len) noexcept:
    # As that, of a text of which nothing is known yet.
    cdef int32_t n = m.record.properties_len, place = n & (LAYOUTS - 1)
    if m.long_properties is not None:
        text[0] = <const unsigned char*>PyBytes_AS_STRING(m.long_properties)
        return find_value(text[0], n, n, which, value_len)
    text[0] = m.short_properties
    if fits(&layouts[place], text[0], n, SHORT_PROPERTIES):
        m.fitted = layout_states[place]
        layout_patience[place] = LAYOUT_PATIENCE
        return value_in(&layouts[place], which, value_len)
    return find_value(text[0], n, SHORT_PROPERTIES, which, value_len)


cdef inline int32_t value_in(const PropertyLayout* layout, int which, int32_t* value_len) noexcept:
    # Of a text that has this layout.
    cdef int32_t number = (layout.known.keys if which == THE_KEYS else layout.known.tags if which == THE_TAGS
                           else layout.known.unique_key)
    if number < 0:
        return -1
    value_len[0] = layout.spans[number].end - layout.spans[number].split - 1
    return layout.spans[number].split + 1


cdef inline int32_t find_value(const unsigned char* text, int32_t n, int64_t room, int which,
                               int32_t* value_len) noexcept:
    # As `value_of`; `room` bytes may be read.
    cdef int32_t place = n & (LAYOUTS - 1)
    cdef PropertyLayout* layout = &layouts[place]
    if not fits(layout, text, n, room):
        layout_patience[place] -= 1
        if n > SHORT_PROPERTIES or layout_patience[place] >= 0 or not learn_layout(place, text, n, room):
            return value_of(text, n, room, <const unsigned char*>PROPERTY_NAMES[which],
                            8 if which == THE_UNIQUE_KEY else 4, value_len)
    layout_patience[place] = LAYOUT_PATIENCE
    return value_in(layout, which, value_len)


cdef struct AskedKey:
    # A topic and a key in UTF-8, for as long as their texts live.
    const unsigned char* topic
    const unsigned char* key
    Py_ssize_t topic_len, key_len


cdef inline bint has_the_key(const unsigned char* p, int64_t room, RecordView* r, AskedKey* asked) noexcept:
    # As `has_key` of the core; most messages have one key, which is the one that was asked for.
    cdef const unsigned char* text = p + r.properties_pos
    cdef Py_ssize_t n = asked.key_len
    cdef int32_t value_len, at
    if r.topic_len == asked.topic_len and memcmp(p + r.topic_pos, asked.topic, asked.topic_len) == 0:
        at = find_value(text, r.properties_len, room - r.properties_pos, THE_KEYS, &value_len)
        if at >= 0 and value_len == n and same_bytes_at(text + at, asked.key, n) and memchr(asked.key, 32, n) == NULL:
            return True
    return has_key(p, room, r, asked.topic, asked.topic_len, asked.key, n, ANY_KEY)


cdef const unsigned char* utf8_of(PyObject* text, Py_ssize_t* n) except? NULL:
    # What a record holds a text as; NULL, without an error, of one that may stand for bytes that are no text.
    if PyUnicode_IS_COMPACT_ASCII(text):
        n[0] = PyUnicode_GET_LENGTH(text)
        return <const unsigned char*>PyUnicode_DATA(text)
    if "\ufffd" in <str><object>text:
        return NULL
    try:
        # Python keeps it for the next time.
        return <const unsigned char*>PyUnicode_AsUTF8AndSize(<object>text, n)
    except UnicodeEncodeError:
        return NULL


cdef bint learn_layout(int32_t place, const unsigned char* text, int32_t n, int64_t room) noexcept:
    # Whether the text has a layout now.
    cdef PropertySpan[SHORT_PROPERTIES] spans
    cdef KnownSpans known
    cdef int valid = False
    cdef int32_t num = split_properties(text, n, room, spans, &known, &valid)
    if not valid:
        return False
    learn(&layouts[place], text, n, spans, num, &known)
    layout_states[place] = layout_states[place] + 1 or 1
    return fits(&layouts[place], text, n, room)


cdef object property_of(StoredMessage m, int which):
    # The value of one property, None if there is none; what was parsed before stands, as its owner may have changed it.
    cdef const unsigned char* text
    cdef int32_t value, value_len
    if (<MessageFields>m).properties is not None:
        return (<MessageFields>m).properties.get(PROPERTY_NAMES[which].decode("ascii"))
    value = find_property(m, which, &text, &value_len)
    return text_of(text + value, value_len) if value >= 0 else None


cdef object tags_of(StoredMessage m):
    cdef const unsigned char* text
    cdef int32_t value, value_len
    if (<MessageFields>m).properties is not None:
        return (<MessageFields>m).properties.get("TAGS")
    value = find_property(m, THE_TAGS, &text, &value_len)
    return kept_tags(text + value, value_len) if value >= 0 else None


cdef inline object kept_tags(const unsigned char* text, int32_t value_len):
    # Many messages share few tags: those that were met last are kept as texts, by their length, first and last byte.
    cdef uint32_t mixed
    cdef Py_ssize_t place
    cdef object known
    mixed = <uint32_t>value_len * 3 + text[0] + text[value_len - 1]
    place = <Py_ssize_t>((mixed ^ mixed >> 4) & (TAGS_KEPT - 1))
    known = <object>PyList_GET_ITEM(last_tags, place)
    if PyUnicode_IS_COMPACT_ASCII(<PyObject*>known):
        if (PyUnicode_GET_LENGTH(<PyObject*>known) == value_len
                and same_bytes_at(<const unsigned char*>PyUnicode_DATA(<PyObject*>known), text, value_len)):
            return known
    elif is_kept(known, text, value_len):
        return known
    return new_tags(text, value_len, place)


cdef bint is_kept(object known, const unsigned char* text, int32_t value_len) except -1:
    # Of a text that is not ASCII, whose UTF-8 Python keeps.
    cdef Py_ssize_t n
    cdef const char* stored = PyUnicode_AsUTF8AndSize(known, &n)
    return n == value_len and same_bytes_at(<const unsigned char*>stored, text, value_len)


cdef object new_tags(const unsigned char* text, int32_t value_len, Py_ssize_t place):
    last_tags[place] = text_of(text, value_len)
    return last_tags[place]


cdef list last_tags = ["" for _ in range(TAGS_KEPT)]
cdef tuple NO_ARGUMENTS = ()
cdef unsigned char[TOPIC_KEPT] last_topic_bytes
cdef int32_t last_topic_len = 0
cdef str last_topic = ""
cdef type adopted = None


def adopt(type kind not None):
    """Make and free messages of this kind, a subclass of `StoredMessage`, and get their fields, in the shortest way.

    Nothing else about it changes.  A kind that adds fields of its own is left as it is.
    """
    global adopted
    message_type(kind)
    if adopt_message(<PyTypeObject*>kind, <PyTypeObject*>StoredMessage, StoredMessage.__new__(StoredMessage),
                     tuple(map(_intern, vars(StoredMessage)))):
        adopted = kind


cdef type message_type(type kind):
    # Makes sure that what is made of it is a message.
    if kind is None or (kind is not adopted and not issubclass(kind, StoredMessage)):
        raise TypeError(f"{kind!r} is not a kind of StoredMessage")
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


cdef StoredMessage message_of(type kind, const unsigned char* p, int64_t room, RecordView* r, int check_crc):
    # The caller holds a pin: allocations may run a finalizer that closes the file.  `room` bytes may be read.
    cdef StoredMessage m
    if kind is adopted:
        m = <StoredMessage>new_message(<PyTypeObject*>kind)
    else:
        m = <StoredMessage>(<PyTypeObject*>kind).tp_new(kind, <PyObject*>NO_ARGUMENTS, NULL)
    m.record = r[0]
    m.record.magic = 1 if r.magic == C_MAGIC_V1 else 2
    m.crc_ok = crcs_ok(p, r, check_crc)
    # After a host of 8 bytes there are more than 12 others of the record in any case: 20 are copied always, which is cheaper.
    memcpy(m.born_host_bytes, p + RECORD_BORN_HOST, HOST_SIZE)
    memcpy(m.store_host_bytes, p + r.store_host_pos, HOST_SIZE)
    (<MessageFields>m).body = PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len)
    take_properties(m, p + r.properties_pos, r.properties_len, room - r.properties_pos, None)
    if r.topic_len == last_topic_len and same_bytes_at(last_topic_bytes, p + r.topic_pos, r.topic_len):
        (<MessageFields>m).topic = last_topic
    else:
        (<MessageFields>m).topic = topic_of(p + r.topic_pos, r.topic_len)
    return m


cdef str topic_of(const unsigned char* p, int32_t n):
    # Of the message that was decoded last: the next one mostly has the same.
    global last_topic, last_topic_len
    cdef str topic = text_of(p, n)
    if n <= TOPIC_KEPT:
        last_topic, last_topic_len = topic, n
        memcpy(last_topic_bytes, p, n)
    return topic


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
    cdef unsigned char* p = region.pin(pos, difference_of(region.size, pos))
    cdef int verdict
    try:
        verdict = judge_record(p, region.size - pos, sum_of(base_offset, pos), 0, &r)
        if verdict != RECORD:
            return Verdict(verdict)
        return message_of(kind, p, region.size - pos, &r, check_crc)
    finally:
        region.unpin()


def read_messages(Region region not None, int64_t pos, int64_t limit, int64_t base_offset, type kind not None,
                  int64_t max_num, int64_t max_bytes, int check_crc=1):
    """Decode the records that lie one after the other from `pos` on.

    Parameters
    ----------
    limit : int
        Records that begin before this position.
    base_offset, kind, check_crc
        As of `read_message`.
    max_num, max_bytes : int
        At most so many; reading stops after the record with which there are so many bytes of records.

    Returns
    -------
    (list, int)
        Messages, none where no whole record begins at `pos`; the position after the last of them.
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
            if judge_record(base + pos, size - pos, sum_of(base_offset, pos), 0, &r) != RECORD:
                break
            prefetch_head(base + pos + r.total_size, size - pos - r.total_size)
            out.append(message_of(kind, base + pos, size - pos, &r, check_crc))
            pos += r.total_size
            max_num -= 1
        return out, pos
    finally:
        region.unpin()


cdef struct Pull:
    # How far a get has come: units that were dealt with, the last that was not a pre-fill unit, bytes and number of messages.
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
        unit_size = acquire_i32_at(unit + UNIT_RECORD_SIZE)
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
            message = message_of(kind, record, segment_size - (phy - base_offset), &r, check_crc)
            if ((<MessageFields>message).topic is not known or r.queue_id != queue_id
                    or r.queue_offset != first + at.done):
                if not is_of_queue(message, topic, queue_id, first + at.done):
                    message.crc_ok = False
                elif <str>(<MessageFields>message).topic == topic:
                    # Messages that follow mostly have the same text, which then need not be compared.
                    known = (<MessageFields>message).topic
            if tags is None or tags_of(message) in tags:
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
        return message_of(kind, p, room, &r, check_crc)
    finally:
        region.unpin()


@cython.no_gc_clear
cdef class QueueGets:
    """Answers the usual get in one call: all tags, from the file of units and the segment that were asked for last.

    `get_first` asks it.  Whatever it does not know, or should look for first, it leaves to its caller, who goes the
    long way.

    Parameters
    ----------
    queues : QueueTable
    queue_kind : type
        What a simple queue is an instance of, exactly; a subclass of `QueueFields`.
    log : FileStream
        The segments.
    kind, check_crc
        As of `read_message`.
    result_kind : type
        Whose instances have the attributes `status`, `messages`, `next_queue_offset`, `min_queue_offset` and
        `max_queue_offset`.
    status : object
        Of a result that has a message.
    num, max_bytes : int
        At most so many units are looked at, unless more messages are asked for, and bytes of records.
    interval : float
        So many seconds after its `refreshed_at`, by `time.monotonic`, a queue is looked at again before it is read:
        another process may have gone on.  Not asked for unless `looks_ahead`.
    looks_ahead : bool
        Another process may have gone on: what lies after the known end is not for this.

    Attributes
    ----------
    closed : bool
        Answer nothing more.
    """

    cdef public bint closed

    cdef QueueTable queues
    cdef type queue_kind, kind, result_kind
    cdef FileStream log
    cdef object status
    cdef int64_t num, max_bytes
    cdef double interval
    cdef int check_crc
    cdef bint looks_ahead
    cdef Py_ssize_t[5] places

    def __cinit__(self, QueueTable queues not None, type queue_kind not None, FileStream log not None,
                  type kind not None, int check_crc, type result_kind not None, status, int64_t num, int64_t max_bytes,
                  double interval, bint looks_ahead):
        if (<PyTypeObject*>result_kind).tp_new == NULL:
            raise TypeError(f"{result_kind!r} has no instances")
        if not issubclass(queue_kind, QueueFields):
            raise TypeError(f"{queue_kind!r} is not a kind of queue")
        self.queues, self.queue_kind, self.log, self.kind = queues, queue_kind, log, message_type(kind)
        self.result_kind, self.status, self.check_crc = result_kind, status, check_crc
        self.num, self.max_bytes, self.interval = num, max_bytes, interval
        self.looks_ahead = looks_ahead
        for i, name in enumerate(RESULT_FIELDS):
            self.places[i] = place_of_slot(result_kind.__dict__.get(name))

    def get(self, topic, queue_id, queue_offset, max_num):
        """result_kind or None: of `status`, with one message at least; None where the caller has to go the long way.

        That is where another file is needed, where nothing is found, and where the queue's first unit is not known.
        """
        cdef int64_t number, first, wanted
        if not (small_number(<PyObject*>queue_id, &number) and small_number(<PyObject*>queue_offset, &first)
                and small_number(<PyObject*>max_num, &wanted)):
            return None
        return self.answer(topic, queue_id, number, first, wanted)

    cdef object answer(self, object topic, object queue_id, int64_t number, int64_t first, int64_t wanted):
        cdef PyObject* known
        cdef QueueFields queue
        cdef FileStream units
        cdef Region region, segment
        cdef int64_t count, low, high, pos, room, min_phy
        cdef unsigned char* first_unit
        cdef unsigned char* base
        cdef Pull at
        cdef list out
        if (self.closed or not PyUnicode_CheckExact(<PyObject*>topic) or first < 0 or first > INT64_MAX // UNIT_SIZE
                or wanted < 0 or type(self.queues._queues) is not dict or not self.log.file_offsets):
            return None
        known = PyDict_GetItemWithError(self.queues._queues, (topic, queue_id))
        if known == NULL or type(<object>known) is not self.queue_kind:
            return None
        queue = <QueueFields><object>known
        if type(queue.min_for) is not tuple or not isinstance(queue.files, FileStream):
            return None
        units = <FileStream>queue.files
        min_phy, low = <tuple>queue.min_for
        high = units.wrote_where // UNIT_SIZE
        if self.looks_ahead and (wanted > high - first
                                 or (self.interval < INFINITY and monotonic() - queue.refreshed_at >= self.interval)):
            return None
        # The queue's first unit is known as long as the log begins where it did.
        if max(<int64_t>self.log.file_offsets[0], 0) != min_phy or not low <= first < high:
            return None
        region = units.around(first * UNIT_SIZE)
        if region is None:
            return None
        pos = first * UNIT_SIZE - units.found_base
        room = (region.size - pos) // UNIT_SIZE
        count = wanted if wanted > self.num else self.num
        if room > high - first:
            room = high - first
        if count > room:
            count = room
        if count <= 0:
            return None
        out = []
        at.done, at.last, at.size, at.taken, at.full, at.missing = 0, -1, 0, 0, False, False
        try:
            first_unit = region.pin(pos, UNIT_SIZE * count)
            try:
                segment = self.log.around(get_i64(first_unit))
                if segment is None:
                    return None
                base = segment.pin(0, segment.size)
                try:
                    pull(&at, first_unit, count, base, segment.size, self.log.found_base, self.log.found_base,
                         self.log.wrote_where, self.kind, out, wanted, self.max_bytes, self.check_crc, None, None,
                         topic, number, first)
                finally:
                    segment.unpin()
            finally:
                region.unpin()
        except OffsetOutOfRangeError:
            # A file is leaving just now.
            return None
        if at.taken == 0 or (at.done < count and not at.full):
            return None
        found = (<PyTypeObject*>self.result_kind).tp_new(self.result_kind, <PyObject*>NO_ARGUMENTS, NULL)
        self.set_field(found, 0, self.status)
        self.set_field(found, 1, out)
        self.set_field(found, 2, first + at.last + 1)
        self.set_field(found, 3, low)
        self.set_field(found, 4, high)
        return found

    cdef int set_field(self, object found, int i, object value) except -1:
        # Set as its class does that lets nobody else change it.
        if self.places[i] > 0:
            set_slot(found, self.places[i], value)
        else:
            PyObject_GenericSetAttr(found, RESULT_FIELDS[i], value)
        return 0


cdef tuple RESULT_FIELDS = ("status", "messages", "next_queue_offset", "min_queue_offset", "max_queue_offset")
cdef object ZERO = 0


cdef object get_in_short(StateFields state, PyObject** args, Py_ssize_t num, object store):
    # topic, and maybe queue_id, queue_offset and max_num.
    cdef int64_t number = 0, first = 0, wanted = 32
    if (type(state.queue_gets) is not QueueGets or (num > 1 and not small_number(args[1], &number))
            or (num > 2 and not small_number(args[2], &first)) or (num > 3 and not small_number(args[3], &wanted))):
        return None
    return (<QueueGets>state.queue_gets).answer(<object>args[0], <object>args[1] if num > 1 else ZERO, number, first,
                                                wanted)


def get_first(method not None):
    """The method of a store, `get_message` as it is written, with the usual get answered in one call."""
    return short_way_first(method, get_in_short, 2, 5)


cdef object stored_text(str text, object encode):
    # An ASCII text has the record's bytes itself.
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
        if not has_key(p, room, &r, topic, topic_len, key, key_len, self.key_kind):
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
        PyList_Append(self.messages, message_of(self.kind, p, room, &r, self.check_crc))
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
        raise TypeError(f"{kind!r} is not a kind of list")
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
    """Answers the usual query by key in one call: unique keys and keys, all times, while all index files are open.

    `query_first` asks it.  Whatever it does not know, or should look for first, it leaves to its caller, who goes the
    long way.

    Parameters
    ----------
    indexes : OpenedIndexes
    region_of, result_kind, kind, check_crc, encode, log
        As of `find_messages`.
    interval : float
        So many seconds after `looked_at`, and where the newest index file is full, a query goes the long way: another process
        may have begun a new one.  Infinite where this process is the one that would, which also knows when a file is full.

    Attributes
    ----------
    looked_at : float
        When somebody last looked whether the files are those that are there, by `time.monotonic`.
    closed : bool
        Answer nothing more.
    """

    cdef public double looked_at
    cdef public bint closed
    cdef OpenedIndexes indexes
    cdef object region_of, encode
    cdef Py_ssize_t truncated_at
    cdef object last_topic  # and the hash of what precedes a key of it
    cdef uint32_t last_hash
    cdef type result_kind, kind
    cdef int check_crc
    cdef FileStream log
    cdef double interval
    cdef type index_kind  # what an opened file was found to be an instance of

    def __cinit__(self, OpenedIndexes indexes not None, region_of not None, type result_kind not None,
                  type kind not None, int check_crc, encode, FileStream log not None, double interval):
        self.indexes, self.region_of, self.encode, self.interval = indexes, region_of, encode, interval
        self.result_kind, self.kind, self.check_crc, self.log = list_type(result_kind), message_type(kind), check_crc, log
        self.looked_at = -1.0
        self.truncated_at = place_of_slot(result_kind.__dict__.get("truncated"))

    def find(self, topic, key, max_num):
        """result_kind or None: the messages as `find_messages` gives them, None where the caller has to."""
        cdef int64_t num
        return self.answer(<PyObject*>topic, <PyObject*>key, num) if small_number(<PyObject*>max_num, &num) else None

    cdef object answer(self, PyObject* topic, PyObject* key, int64_t num):
        cdef int32_t key_hash
        cdef int64_t lowest = INT64_MAX
        cdef Py_ssize_t i, n
        cdef AskedKey asked
        cdef int gathered
        if self.closed or not PyUnicode_CheckExact(topic) or not PyUnicode_CheckExact(key) or num < 0:
            return None
        asked.topic, asked.key = utf8_of(topic, &asked.topic_len), utf8_of(key, &asked.key_len)
        if asked.topic == NULL or asked.key == NULL:
            return None
        indexes = self.indexes.opened_files
        if type(indexes) is not tuple or PyTuple_GET_SIZE(indexes) == 0:
            return None
        if self.interval < INFINITY and monotonic() - self.looked_at >= self.interval:
            return None
        if topic != <PyObject*>self.last_topic:
            self.last_topic, self.last_hash = <object>topic, hash_str(0, <object>topic) * 31u + 35u
        key_hash = index_hash(hash_str(self.last_hash, <object>key))
        found = (<PyTypeObject*>self.result_kind).tp_new(self.result_kind, <PyObject*>NO_ARGUMENTS, NULL)
        n = PyTuple_GET_SIZE(indexes)
        for i in range(n):
            if Py_TYPE(<object>PyTuple_GET_ITEM(indexes, i)) != <PyTypeObject*>self.index_kind:
                self.index_kind = type(<IndexRegion?><object>PyTuple_GET_ITEM(indexes, i))
            gathered = self.gather(<IndexRegion><object>PyTuple_GET_ITEM(indexes, i), key_hash, &asked, num, found,
                                   &lowest, i == 0 and self.interval < INFINITY)
            if gathered == IS_FULL:
                return None
            if gathered == IS_LONG:
                return messages_with_key(indexes, self.region_of, <str>topic, <str>key, ANY_KEY, INT64_MIN, INT64_MAX,
                                         num, self.result_kind, self.kind, self.check_crc, self.encode, self.log)
        if self.truncated_at > 0:
            set_slot(found, self.truncated_at, False)
        else:
            found.truncated = False
        return found

    cdef int gather(self, IndexRegion index, int32_t key_hash, AskedKey* asked, int64_t num,
                    object found, int64_t* lowest, bint may_be_followed) except -1:
        # Add the messages of one index file.  IS_LONG where that takes more than chain and segment at hand: a `KeySearch`
        # then begins again, and it knows what to make of whatever is odd.  IS_FULL where another file may follow.
        cdef Region region = index.region
        cdef unsigned char* entries
        cdef const unsigned char* entry
        cdef int64_t at, phy, steps = 0
        cdef bint damaged = False
        if index.damaged and not index.is_distrusted:
            return IS_LONG
        entries = region.pin(0, region.size)
        try:
            if may_be_followed and index_count_of(entries) >= index.index_num:
                return IS_FULL
            at = index_head(entries, index.magic, index.slot_num, index.index_num, key_hash)
            if at < 0:
                return IS_LONG
            while at > 0:
                entry = entries + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num + ENTRY_SIZE * at
                if get_i32(entry + ENTRY_KEY_HASH) == key_hash:
                    phy = get_i64(entry + ENTRY_PHY_OFFSET)
                    if phy >= lowest[0] or PyList_GET_SIZE(found) >= num or not self.add(phy, asked, found):
                        return IS_LONG
                    lowest[0] = phy
                at = entry_before(entry, at, key_hash, index.magic, index.slot_num, &damaged)
                steps += 1
                if damaged or steps >= WALK_STEPS:
                    return IS_LONG
            return IS_WHOLE
        finally:
            region.unpin()

    cdef bint add(self, int64_t phy, AskedKey* asked, object found) except -1:
        cdef Region segment = self.log.around(phy)
        cdef RecordView r
        cdef unsigned char* p
        cdef int64_t room
        if segment is None:
            return False
        room = segment.size - (phy - self.log.found_base)
        p = segment.pin(phy - self.log.found_base, room)
        try:
            prefetch_head(p, room)
            if judge_record(p, room, phy, 0, &r) != RECORD or not has_the_key(p, room, &r, asked):
                return False
            PyList_Append(found, message_of(self.kind, p, room, &r, self.check_crc))
            return True
        finally:
            segment.unpin()


cdef object query_in_short(StateFields state, PyObject** args, Py_ssize_t num, object store):
    # topic, key and maybe max_num.
    cdef int64_t max_num = 64
    if type(state.key_query) is not KeyQuery or (num > 2 and not small_number(args[2], &max_num)):
        return None
    return (<KeyQuery>state.key_query).answer(args[0], args[1], max_num)


def query_first(method not None):
    """The method of a store, `query_message` as it is written, with the usual query answered in one call."""
    return short_way_first(method, query_in_short, 3, 4)
