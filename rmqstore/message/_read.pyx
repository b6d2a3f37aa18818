"""`MessageExt`, a stored message, and reading it: by place, by queue and by key.

The module opens no file: callers give regions, or streams that know the file that was used last.  It never reports a
message as missing: None means that the caller has to search further.  Invariants are those of `_core`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.time cimport monotonic
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from rmqstore._bytes cimport acquire_i32_at, before, difference_of, get_i32, get_i64, same_bytes_at, sum_of
from rmqstore._core cimport (
    ANY_KEY, C_MAGIC_V1, entry_before, ENTRY_KEY_HASH, ENTRY_PHY_OFFSET, ENTRY_SIZE, FileStream, index_count_of,
    index_head, INDEX_HEADER_SIZE, IndexRegion, MAX_EXT_ADDRESS, OpenedIndexes, RECORD, RECORD_BORN_HOST, Region,
    SLOT_SIZE, StateFields, TAG, UNIT_RECORD_SIZE, UNIT_SIZE, UNIT_TAGS_CODE,
)
from rmqstore._crc32 cimport crc32_start
from rmqstore._java_text cimport hash_str, index_hash
from rmqstore._properties cimport find_properties, IndexedProperties, is_dispatched_to, KnownProperties
from rmqstore._python cimport (
    clamped, PyUnicode_CheckExact, PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_IS_COMPACT_ASCII, small_number,
)
from rmqstore._record cimport (
    body_crc_ok, has_key, has_key_hash, has_prop_crc, judge_record, prefetch_head, prop_crc_ok, RecordView,
    TAIL_AHEAD, text_of,
)

import re

from rmqstore import arguments as _arguments
from rmqstore._core import Verdict, crc32
from rmqstore.errors import (
    CorruptionError, MissingDependencyError, OffsetOutOfRangeError, UnsupportedFormatError,
)
from rmqstore.message.codec import (
    encode_java_utf8, host_from_bytes, offset_message_id, parse_properties, split_client_form,
)
from rmqstore.message.compression import SysFlag, decompress_body
from rmqstore.message.shown import BodyText, body_text, message_html, messages_html, shown_body
from rmqstore.texts import format_time

crc32_start()

OTHER_MESSAGE = "its topic, queue or queue offset is not that of its queue unit"
_PROPERTIES_CRC = re.compile(rb"(?:\A|\x02)__CRC32#\x01([0-9]{10})\x02?\Z")

cdef enum:
    # A CRC over more bytes than this takes long enough to let other threads run; a shorter one would wait longer for the
    # GIL than it runs.
    LONG_BODY = 131072
    WALK_STEPS = 1024
    HOST_SIZE = 20        # the longer of the two forms
    SHORT_PROPERTIES = 128
    # A broker's own limit for a body.
    KEPT_BODY = 4 * 1024 * 1024


@cython.final
@cython.auto_pickle(False)
@cython.embedsignature(False)
cdef class MessageExt:
    """A message that was read from a store.  It cannot be changed, and threads may share it.

    Sizes are in bytes, timestamps in milliseconds since the epoch.

    It is made of the 18 fields of `_core.decode_record`: total size, version (1 or 2), CRC of the body, queue id, flag, queue
    offset, phy offset, sysFlag, born timestamp, born host (8 or 20 bytes), store timestamp, store host (likewise), reconsume
    times, prepared transaction offset, body (as stored), topic, properties (bytes), and whether the CRCs agree.

    Attributes
    ----------
    topic : str
    queue_id : int
    queue_offset : int
        Its number in the queue.
    phy_offset : int
        Absolute position of the record in the commit log.
    size : int
        Of the whole record in the log.
    version : int
        1, or 2 for a record with a 16-bit topic length (RocketMQ since 5.1.0).
    store_timestamp, born_timestamp : int
        When the broker stored it and when the producer made it.
    flag, sys_flag : int
        The producer's flag; the broker's bits (`SysFlag`).
    reconsume_times : int
        The number of redeliveries.
    prepared_transaction_offset : int
        The place of the half message, in a message that ends a transaction.
    body_stored : bytes
        The body in the record, possibly compressed.
    crc : int
        The stored CRC-32 of the stored body, top bit clear.
    crc_agrees : bool
        The CRCs agree, and the record is the message of its queue unit; the compression is not checked.
    """

    cdef readonly str topic
    cdef readonly bytes body_stored
    cdef readonly int32_t size, version, crc, queue_id, flag, sys_flag, reconsume_times
    cdef readonly int64_t queue_offset, phy_offset, born_timestamp, store_timestamp, prepared_transaction_offset
    cdef readonly bint crc_agrees
    cdef bytes long_properties  # the properties text where it is not in `short_properties`
    cdef dict parsed            # the properties
    cdef object sent_body       # decompressed; True for a large one that is sound; a tuple for what is wrong with it
    cdef IndexedProperties indexed
    cdef bint is_indexed        # `indexed` is known
    cdef int32_t properties_len, born_host_len, store_host_len
    cdef unsigned char[SHORT_PROPERTIES] short_properties
    cdef unsigned char[HOST_SIZE] born_host_bytes
    cdef unsigned char[HOST_SIZE] store_host_bytes

    def __init__(self, tuple record not None):
        cdef bytes born_host, store_host, properties
        (self.size, self.version, self.crc, self.queue_id, self.flag, self.queue_offset, self.phy_offset, self.sys_flag,
         self.born_timestamp, born_host, self.store_timestamp, store_host, self.reconsume_times,
         self.prepared_transaction_offset, self.body_stored, self.topic, properties, self.crc_agrees) = record
        if (born_host is None or store_host is None or self.body_stored is None or self.topic is None
                or properties is None):
            raise TypeError("topic, body, properties and hosts must not be None")
        if PyBytes_GET_SIZE(born_host) > HOST_SIZE or PyBytes_GET_SIZE(store_host) > HOST_SIZE:
            raise ValueError(f"a host takes 8 or 20 bytes, not {len(born_host)} and {len(store_host)}")
        self.born_host_len = <int32_t>PyBytes_GET_SIZE(born_host)
        self.store_host_len = <int32_t>PyBytes_GET_SIZE(store_host)
        memcpy(self.born_host_bytes, PyBytes_AS_STRING(born_host), self.born_host_len)
        memcpy(self.store_host_bytes, PyBytes_AS_STRING(store_host), self.store_host_len)
        take_properties(self, <const unsigned char*>PyBytes_AS_STRING(properties), PyBytes_GET_SIZE(properties))
        self.parsed = self.sent_body = None

    @property
    def _record(self):
        return (self.size, self.version, self.crc, self.queue_id, self.flag, self.queue_offset, self.phy_offset,
                self.sys_flag, self.born_timestamp, self._born_host_stored, self.store_timestamp,
                self._store_host_stored, self.reconsume_times, self.prepared_transaction_offset, self.body_stored,
                self.topic, self.properties_stored, self.crc_agrees)

    @property
    def _born_host_stored(self):
        return PyBytes_FromStringAndSize(<char*>self.born_host_bytes, self.born_host_len)

    @property
    def _store_host_stored(self):
        return PyBytes_FromStringAndSize(<char*>self.store_host_bytes, self.store_host_len)

    @property
    def body(self):
        """The body as it was sent, as bytes: decompressed on first use.  That of a `corrupt` message stays as stored.

        Raises
        ------
        CorruptionError
            The body cannot be decompressed; `body_stored` has its bytes, and the message is `corrupt`.
        UnsupportedFormatError
            Likewise, of a compression type that RocketMQ does not define.
        MissingDependencyError
            See `decompress_body`.
        """
        if not self.sys_flag & 1 or not self.crc_agrees:
            return self.body_stored
        with cython.critical_section(self):
            sent = self.sent_body
        if sent is None or sent is True:
            try:
                sent = decompress_body(self.body_stored, self.sys_flag)
            except (CorruptionError, UnsupportedFormatError) as error:
                sent = type(error), error.message
            with cython.critical_section(self):
                # A few stored bytes may be a large body: a list of messages does not hold many, only that they are sound.
                self.sent_body = True if type(sent) is bytes and len(sent) > KEPT_BODY else sent
        if type(sent) is tuple:
            kind, text = sent
            raise kind(f"message at phy offset {self.phy_offset}: {text}")
        return sent

    @property
    def properties(self):
        """The properties, a dict of str to str, parsed on first use with `parse_properties`."""
        if self.parsed is None:
            parsed = parse_properties(self.properties_stored)
            with cython.critical_section(self):
                if self.parsed is None:
                    self.parsed = parsed
        return self.parsed

    @property
    def properties_stored(self):
        """The properties text in the record, as bytes."""
        if self.long_properties is not None:
            return self.long_properties
        return PyBytes_FromStringAndSize(<char*>self.short_properties, self.properties_len)

    @property
    def keys(self):
        """The pieces of the KEYS property, split at spaces; a list of str."""
        if self.parsed is not None:
            return [key for key in self.parsed.get("KEYS", "").split(" ") if key]
        find_indexed(self)
        return keys_of(self)

    @property
    def tags(self):
        """The TAGS property, or None."""
        return tags_of(self)

    @property
    def unique_key(self):
        """The producer's id (property UNIQ_KEY), or None."""
        if self.parsed is not None:
            return self.parsed.get("UNIQ_KEY")
        find_indexed(self)
        return text_at(self, self.indexed.unique_key_pos, self.indexed.unique_key_len)

    @property
    def properties_crc(self):
        """The CRC-32 in the record's last property `__CRC32#`, top bit clear, or None.

        It covers the record up to the 20 bytes of that property (RocketMQ since 5.2.0, enabledAppendPropCRC).
        """
        match = _PROPERTIES_CRC.search(self.properties_stored)
        # The ten digits are stored least significant first.
        return int(match.group(1)[::-1]) if match else None

    @property
    def corrupt(self):
        """True if the body does not match its CRC or compression flag, or the record is not the message of its queue unit.

        Without the library of the compression, that flag is not checked; `body` raises then.
        """
        if not self.crc_agrees:
            return True
        return self.sys_flag & 1 != 0 and self.sent_body is not True and body_damage(self) is not None

    @property
    def damage(self):
        """The reason why this message is `corrupt`, or None."""
        if self.crc_agrees:
            return body_damage(self)
        if (crc32(self.body_stored) & 0x7FFFFFFF if self.body_stored else 0) != self.crc:
            return "CRC"
        return OTHER_MESSAGE if self.properties_crc is None else f"CRC of its properties, or {OTHER_MESSAGE}"

    @property
    def transaction_type(self):
        """SysFlag: the transaction bits of the sysFlag; `SysFlag(0)` for an ordinary message."""
        return SysFlag(self.sys_flag & SysFlag.TRANSACTION_MASK.value)

    @property
    def born_host(self):
        """The producer's address, "ip:port" or "[v6]:port"."""
        return host_from_bytes(self._born_host_stored)

    @property
    def store_host(self):
        """The address of the broker that stored it, "ip:port" or "[v6]:port"."""
        return host_from_bytes(self._store_host_stored)

    @property
    def msg_id(self):
        """The offset message id."""
        return offset_message_id(self._store_host_stored, self.phy_offset)

    @property
    def is_inner_batch(self):
        """True if the body holds the messages of an inner batch (a topic of queue type BatchCQ)."""
        return bool(self.sys_flag & SysFlag.INNER_BATCH.value)

    def check_queue(self, str topic not None, int64_t queue_id, int64_t queue_offset):
        """Return True if its record has this place in this queue; otherwise mark it as corrupt."""
        cdef bint ours = is_of_queue(self, topic, queue_id, queue_offset)
        if not ours:
            self.crc_agrees = False
        return ours

    def inner_messages(self):
        """The messages of an inner batch, in order; ``[self]`` when the record is not one.

        Each has the record's topic, queue, times, hosts and phy offset, its own body, flag and properties, and the
        queue offset INNER_BASE + i (the record's own queue offset when the property is missing).  `size` is the
        size of its part of the body.

        Raises
        ------
        CorruptionError
            The record is corrupt, or a length in its body is impossible.
        """
        if not self.is_inner_batch:
            return [self]
        if not self.crc_agrees:
            raise CorruptionError(f"the batch at phy offset {self.phy_offset} does not fit its CRC")
        base_text = self.properties.get("INNER_BASE", "")
        base = int(base_text) if re.fullmatch("[0-9]{1,18}", base_text) else self.queue_offset
        sys_flag = self.sys_flag & ~(SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | SysFlag.COMPRESSED).value & ~0x700
        messages = []
        for size, flag, body, properties in split_client_form(self.body, self.phy_offset):
            messages.append(MessageExt((
                size, self.version, crc32(body) if body else 0, self.queue_id, flag, base + len(messages),
                self.phy_offset, sys_flag, self.born_timestamp, self._born_host_stored, self.store_timestamp,
                self._store_host_stored, self.reconsume_times, self.prepared_transaction_offset, body, self.topic,
                properties, self.crc_agrees,
            )))
        return messages

    def as_dict(self):
        """All of the message as values that JSON can hold.

        `body` is text when it is UTF-8, else base64 with `body_encoding` = "base64".  A body that cannot be
        decompressed is given as it is stored, with the reason in `body_error`.
        """
        return {name: str(value) if type(value) is BodyText else value for name, value in self.json_row().items()}

    def json_row(self, str form="text"):
        """Like `as_dict`, for `json_pieces`: the text of a large body is a `BodyText`.

        Parameters
        ----------
        form : {"text", "hex", "none"}
            How to show the body.
        """
        error = None
        try:
            body = self.body
        except (CorruptionError, UnsupportedFormatError, MissingDependencyError) as problem:
            body, error = self.body_stored, problem.message
        result = {
            name: getattr(self, name)
            for name in (
                "topic", "queue_id", "queue_offset", "phy_offset", "size", "msg_id", "unique_key", "keys", "tags",
                "properties", "born_timestamp", "store_timestamp", "born_host", "store_host", "flag", "sys_flag",
                "reconsume_times", "prepared_transaction_offset", "version", "crc", "corrupt",
            )
        }
        result["properties"] = dict(self.properties)
        if self.corrupt:
            result["damage"] = self.damage
        if error is not None:
            result["body_error"] = error
        result["body_size"] = len(body)
        if form != "none":
            result["body"], result["body_encoding"] = body_text(body, form)
        return result

    def __eq__(self, other):
        return self._record == other._record if isinstance(other, MessageExt) else NotImplemented

    def __hash__(self):
        return hash((self.phy_offset, self.queue_offset, self.store_timestamp))

    def __reduce__(self):
        return MessageExt, (self._record,)

    def _repr_html_(self):
        fields = [
            ("queue", self.queue_id),
            ("queue offset", self.queue_offset),
            ("phy offset", self.phy_offset),
            ("stored", format_time(self.store_timestamp)),
            ("size", f"{self.size} bytes"),
        ]
        # A look does not decompress.
        damage = "" if self.crc_agrees else f", corrupt: {self.damage}"
        body = shown_body(self.body_stored, self.sys_flag, not self.crc_agrees)
        return message_html(self, f"MessageExt of {self.topic}{damage}", fields, body)

    def __repr__(self):
        corrupt = "" if self.crc_agrees else ", corrupt"
        return (
            f"<MessageExt {self.topic}/{self.queue_id} queue_offset={self.queue_offset} phy_offset={self.phy_offset} "
            f"keys={self.keys!r} tags={self.tags!r} {len(self.body_stored)} bytes stored{corrupt}>"
        )


cdef object body_damage(MessageExt m):
    # The fault of the compressed body of a message whose CRC agrees, or None.
    try:
        m.body
    except (CorruptionError, UnsupportedFormatError) as error:
        return error.message.removeprefix(f"message at phy offset {m.phy_offset}: ")
    except MissingDependencyError:
        pass
    return None


cdef inline int take_properties(MessageExt m, const unsigned char* text, int64_t n) except -1:
    # Short ones, as most are, are in the message itself.
    m.properties_len = <int32_t>n
    if n <= SHORT_PROPERTIES:
        memcpy(m.short_properties, text, n)
    else:
        m.long_properties = PyBytes_FromStringAndSize(<char*>text, n)
    return 0


cdef inline const unsigned char* text_start(MessageExt m) noexcept:
    if m.long_properties is None:
        return m.short_properties
    return <const unsigned char*>PyBytes_AS_STRING(m.long_properties)


cdef inline int find_indexed(MessageExt m) except -1:
    cdef KnownProperties known
    with cython.critical_section(m):
        if not m.is_indexed:
            find_properties(text_start(m), m.properties_len, max(m.properties_len, SHORT_PROPERTIES), &known)
            m.indexed, m.is_indexed = known.indexed, True
    return 0


cdef inline object text_at(MessageExt m, int32_t pos, int32_t n):
    # A part of the properties text, None where it has none.
    return None if pos < 0 else text_of(text_start(m) + pos, n)


cdef list keys_of(MessageExt m):
    # Of its text that was looked for.
    cdef list keys = []
    cdef int32_t start = 0, end, n = m.indexed.keys_len
    cdef const unsigned char* text = text_start(m) + m.indexed.keys_pos
    if m.indexed.keys_pos < 0:
        return keys
    while start < n:
        end = start + <int32_t>before(text + start, 32, n - start, n - start)
        if end > start:
            keys.append(text_of(text + start, end - start))
        start = end + 1
    return keys


cdef object tags_of(MessageExt m):
    # Once the properties are parsed, the dict's, as its owner may have changed it.
    if m.parsed is not None:
        return m.parsed.get("TAGS")
    find_indexed(m)
    return text_at(m, m.indexed.tags_pos, m.indexed.tags_len)


cdef bint crcs_ok(const unsigned char* p, RecordView* r, int check_crc):
    cdef bint ok = True
    if check_crc:
        if r.total_size > LONG_BODY:
            with nogil:
                ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (check_crc < 2 or has_prop_crc(p, r))
        else:
            ok = body_crc_ok(p, r) and prop_crc_ok(p, r) and (check_crc < 2 or has_prop_crc(p, r))
    return ok


cdef MessageExt message_of(const unsigned char* p, RecordView* r, int check_crc, str known):
    # `known` is the topic that it probably has, or None.  The caller holds a pin: allocations may run a finalizer that closes
    # the file.
    cdef MessageExt m = MessageExt.__new__(MessageExt)
    m.size, m.version, m.crc = r.total_size, 1 if r.magic == C_MAGIC_V1 else 2, r.body_crc
    m.queue_id, m.flag, m.sys_flag, m.reconsume_times = r.queue_id, r.flag, r.sys_flag, r.reconsume_times
    m.queue_offset, m.phy_offset, m.prepared_transaction_offset = r.queue_offset, r.phy_offset, r.prepared_transaction_offset
    m.born_timestamp, m.store_timestamp = r.born_timestamp, r.store_timestamp
    m.crc_agrees = crcs_ok(p, r, check_crc)
    # After a host of 8 bytes there are more than 12 others of the record in any case: 20 are copied always, which is cheaper.
    m.born_host_len, m.store_host_len = r.born_host_len, r.store_host_len
    memcpy(m.born_host_bytes, p + RECORD_BORN_HOST, HOST_SIZE)
    memcpy(m.store_host_bytes, p + r.store_host_pos, HOST_SIZE)
    m.body_stored = PyBytes_FromStringAndSize(<char*>p + r.body_pos, r.body_len)
    take_properties(m, p + r.properties_pos, r.properties_len)
    if (known is not None and PyUnicode_IS_COMPACT_ASCII(<PyObject*>known)
            and PyUnicode_GET_LENGTH(<PyObject*>known) == r.topic_len
            and same_bytes_at(<const unsigned char*>PyUnicode_DATA(<PyObject*>known), p + r.topic_pos, r.topic_len)):
        m.topic = known
    else:
        m.topic = <str>text_of(p + r.topic_pos, r.topic_len)
    return m


def read_message(Region region not None, int64_t pos, int64_t base_offset, int check_crc=1):
    """Read the record at `pos` of a segment as a MessageExt; returns the Verdict if there is no whole record.

    The record must have the offset of this place (`base_offset` is that of the segment's first byte).  A CRC that fails, see
    `check_crc` of `decode_record`, marks the message as corrupt.
    """
    cdef RecordView r
    cdef unsigned char* p = region.pin(pos, difference_of(region.size, pos))
    cdef int verdict
    try:
        verdict = judge_record(p, region.size - pos, sum_of(base_offset, pos), 0, &r)
        return message_of(p, &r, check_crc, None) if verdict == RECORD else Verdict(verdict)
    finally:
        region.unpin()


def read_messages(Region region not None, int64_t pos, int64_t limit, int64_t base_offset, int64_t max_num,
                  int64_t max_bytes, int check_crc=1):
    """Read records like `read_message`, beginning at `pos`; returns a list of MessageExt and the position after the last.

    They begin before `limit`; reading stops at `max_num` messages, or after the record that reaches `max_bytes` bytes.
    """
    cdef RecordView r
    cdef list out = []
    cdef int64_t size = region.size, begin = pos
    cdef str topic = None
    cdef MessageExt message
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
            message = message_of(base + pos, &r, check_crc, topic)
            topic = message.topic
            out.append(message)
            pos += r.total_size
            max_num -= 1
        return out, pos
    finally:
        region.unpin()


cdef struct Pull:
    # How far a get has come: units that were dealt with, the last that was not a pre-fill unit, bytes and number of messages.
    int64_t done, last, size, taken
    bint full, missing


cdef inline bint is_of_queue(MessageExt message, str topic, int64_t queue_id, int64_t queue_offset) except -1:
    # The record states that it is this message of this queue, or of one of its further queues (RocketMQ's LMQ).
    if (message.queue_id == queue_id and message.queue_offset == queue_offset
            and (message.topic is topic or message.topic == topic)):
        return True
    return queue_id == 0 and is_of_light_queue(message, topic, queue_offset)


cdef bint is_of_light_queue(MessageExt message, str topic, int64_t queue_offset) except -1:
    cdef bytes wanted = topic.encode("utf-8", "replace"), text = message.properties_stored
    cdef bytes scratch = PyBytes_FromStringAndSize(NULL, 3 * PyBytes_GET_SIZE(text))
    return is_dispatched_to(<unsigned char*>PyBytes_AS_STRING(scratch), <const unsigned char*>PyBytes_AS_STRING(text),
                            PyBytes_GET_SIZE(text), <int32_t>PyBytes_GET_SIZE(text),
                            <const unsigned char*>PyBytes_AS_STRING(wanted), PyBytes_GET_SIZE(wanted), queue_offset)


cdef int pull(Pull* at, const unsigned char* units, int64_t num, const unsigned char* base, int64_t segment_size,
              int64_t base_offset, int64_t low, int64_t high, list out, int64_t max_num, int64_t max_bytes,
              int check_crc, frozenset tags_codes, frozenset tags, str topic, int64_t queue_id, int64_t first) except -1:
    # The caller holds pins on both.  `first` is the queue offset of the first unit.
    cdef int64_t phy, following, tags_code
    cdef int32_t unit_size
    cdef MessageExt message
    cdef const unsigned char* unit
    cdef const unsigned char* record
    cdef RecordView r
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
            message = message_of(record, &r, check_crc, topic)
            if not is_of_queue(message, topic, queue_id, first + at.done):
                message.crc_agrees = False
            if tags is None or tags_of(message) in tags:
                out.append(message)
                at.taken += 1
                at.size += unit_size
        at.last = at.done
        at.done += 1
    return 0


def read_queued(Region units not None, int64_t pos, int64_t num, Region segment not None, int64_t base_offset,
                int64_t low, int64_t high, list out not None, int64_t size, int64_t max_num,
                int64_t max_bytes, int check_crc, frozenset tags_codes, frozenset tags, str topic not None, int64_t queue_id,
                int64_t first):
    """Decode the messages to which consecutive 20-byte units lead, as long as they are in one segment.

    Parameters
    ----------
    units, pos, num : Region, int, int
        A file of a simple queue, where the first unit is, and how many there are.
    segment, base_offset : Region, int
        A segment and the absolute offset of its first byte.
    low, high : int
        The phy offsets that a unit may lead to here.
    out : list
        The messages so far; those that are read are appended.
    size, max_num, max_bytes : int
        Sum of the record sizes so far; reading stops before there are more messages, or more bytes, than these, but not before
        the first message.
    tags_codes, tags : frozenset of int, frozenset of str, optional
        Only messages with one of these tags; units whose tags code has other low 32 bits are skipped unread, except
        addresses in an extension.
    topic, queue_id, first : str, int, int
        The queue, and the queue offset of the first unit.  The record of another message is marked as corrupt.

    Returns
    -------
    done, last : int
        The number of units handled; the number of the last that was no pre-fill unit, or -1.
    size : int
        Sum of the record sizes.
    full : bool
        A limit stopped it.
    missing : bool
        A unit led to no record before there was any message.
    """
    if num < 0 or num > INT64_MAX // UNIT_SIZE:
        raise OffsetOutOfRangeError(f"{num} units", pos=pos)
    cdef Pull at
    at.done, at.last, at.size, at.taken, at.full, at.missing = 0, -1, size, len(out), False, False
    cdef unsigned char* first_unit = units.pin(pos, UNIT_SIZE * num)
    cdef unsigned char* base
    try:
        base = segment.pin(0, segment.size)
        try:
            pull(&at, first_unit, num, base, segment.size, base_offset, low, high, out, max_num, max_bytes, check_crc,
                 tags_codes, tags, topic, queue_id, first)
        finally:
            segment.unpin()
    finally:
        units.unpin()
    return at.done, at.last, at.size, at.full, at.missing


def read_recent(FileStream stream not None, phy_offset not None, int check_crc):
    """Read the record at `phy_offset` if it is whole and in the file that was used last, else return None."""
    cdef int64_t offset = clamped(phy_offset)
    cdef int64_t base, room
    cdef Region region = stream.around(offset, &base)
    cdef RecordView r
    cdef unsigned char* p
    if region is None:
        return None
    room = region.size - (offset - base)
    p = region.pin(offset - base, room)
    try:
        prefetch_head(p, room)
        if judge_record(p, room, offset, 0, &r) != RECORD:
            return None
        return message_of(p, &r, check_crc, None)
    finally:
        region.unpin()


@cython.final
@cython.auto_pickle(False)
@cython.embedsignature(False)
cdef class GetMessageResult:
    """The result of a get.

    Attributes
    ----------
    status : GetMessageStatus
    messages : list of MessageExt
        In queue order.
    next_queue_offset : int
        The queue offset to continue at.
    min_queue_offset, max_queue_offset : int
        Bounds of the queue; max is the offset of the next message to come.
    """

    cdef readonly object status
    cdef readonly list messages
    cdef readonly int64_t next_queue_offset, min_queue_offset, max_queue_offset

    def __init__(self, status, list messages not None, int64_t next_queue_offset, int64_t min_queue_offset,
                 int64_t max_queue_offset):
        self.status, self.messages, self.next_queue_offset = status, messages, next_queue_offset
        self.min_queue_offset, self.max_queue_offset = min_queue_offset, max_queue_offset

    def __iter__(self):
        return iter(self.messages)

    def __len__(self):
        return len(self.messages)

    def __eq__(self, other):
        return self.__reduce__() == other.__reduce__() if isinstance(other, GetMessageResult) else NotImplemented

    def __reduce__(self):
        return GetMessageResult, (self.status, self.messages, self.next_queue_offset, self.min_queue_offset,
                                  self.max_queue_offset)

    def __repr__(self):
        return (
            f"GetMessageResult(status={self.status!r}, messages={self.messages!r}, "
            f"next_queue_offset={self.next_queue_offset}, min_queue_offset={self.min_queue_offset}, "
            f"max_queue_offset={self.max_queue_offset})"
        )

    def _repr_html_(self):
        caption = (
            f"{self.status.value}: {len(self.messages)} messages, next queue offset {self.next_queue_offset}, "
            f"the queue has {self.min_queue_offset} to {self.max_queue_offset}"
        )
        return messages_html(self.messages, caption)


@cython.no_gc_clear
cdef class QueueGets:
    """Answers the usual get: all tags, from the file of units and the segment that were asked for last, or None.

    Parameters
    ----------
    queue_kind : type
        The exact type of a simple queue.
    status : GetMessageStatus
        The status of a result with a message.
    num, max_bytes : int
        The largest number of units to read, unless more messages are requested, and of bytes of records.
    interval : float
        Seconds after its `refreshed_at`, by `time.monotonic`, in which a queue is read without a refresh.
    looks_ahead : bool
        Another process may be writing: `interval` applies, and gets beyond the known end return None.
    """

    cdef public bint closed

    cdef object queues, status
    cdef type queue_kind
    cdef FileStream log
    cdef int64_t num, max_bytes
    cdef double interval
    cdef int check_crc
    cdef bint looks_ahead

    def __cinit__(self, queues not None, type queue_kind not None, FileStream log not None, int check_crc, status,
                  int64_t num, int64_t max_bytes, double interval, bint looks_ahead):
        self.queues, self.queue_kind, self.log, self.check_crc, self.status = queues, queue_kind, log, check_crc, status
        self.num, self.max_bytes, self.interval, self.looks_ahead = num, max_bytes, interval, looks_ahead

    def get(self, topic, queue_id, queue_offset, max_num):
        """Return a GetMessageResult with at least one message, or None.

        None means that another file is needed, nothing was found, or the queue's first unit is not known.
        """
        cdef int64_t number, first, wanted, count, low, high, pos, room, min_phy, units_base, log_base
        cdef FileStream units
        cdef Region region, segment
        cdef unsigned char* first_unit
        cdef unsigned char* base
        cdef Pull at
        cdef list out
        cdef GetMessageResult found
        if (self.closed or not PyUnicode_CheckExact(<PyObject*>topic)
                or not (small_number(<PyObject*>queue_id, &number) and small_number(<PyObject*>queue_offset, &first)
                        and small_number(<PyObject*>max_num, &wanted))
                or first < 0 or first > INT64_MAX // UNIT_SIZE or wanted < 0):
            return None
        offsets = self.log.files()
        if not offsets:
            return None
        queue = (<dict?>self.queues._queues).get((topic, queue_id))
        if type(queue) is not self.queue_kind:
            return None
        known = queue.min_for
        if known is None:
            return None
        min_phy, low = known
        units = <FileStream?>queue.files
        high = units.wrote_where // UNIT_SIZE
        if self.looks_ahead and (wanted > high - first
                                 or (self.interval < INFINITY and monotonic() - queue.refreshed_at >= self.interval)):
            return None
        # The queue's first unit is known as long as the log begins where it did.
        if max(<int64_t>offsets[0], 0) != min_phy or not low <= first < high:
            return None
        region = units.around(first * UNIT_SIZE, &units_base)
        if region is None:
            return None
        pos = first * UNIT_SIZE - units_base
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
                segment = self.log.around(get_i64(first_unit), &log_base)
                if segment is None:
                    return None
                base = segment.pin(0, segment.size)
                try:
                    pull(&at, first_unit, count, base, segment.size, log_base, log_base, self.log.wrote_where, out, wanted,
                         self.max_bytes, self.check_crc, None, None, topic, number, first)
                finally:
                    segment.unpin()
            finally:
                region.unpin()
        except OffsetOutOfRangeError:
            # A file is leaving just now.
            return None
        if at.taken == 0 or (at.done < count and not at.full):
            return None
        found = GetMessageResult.__new__(GetMessageResult)
        found.status, found.messages, found.next_queue_offset = self.status, out, first + at.last + 1
        found.min_queue_offset, found.max_queue_offset = low, high
        return found


@cython.auto_pickle(False)
@cython.embedsignature(False)
cdef class QueryResult(list):
    """The messages that a query found.

    Attributes
    ----------
    truncated : bool
        There are more than `max_num`.
    uncovered : tuple of (int, int)
        Ranges of the log, begin and end in phy offsets, that were not looked at, or that are lost.
    """

    cdef public bint truncated
    cdef public tuple uncovered

    def __init__(self, messages=(), bint truncated=False, tuple uncovered not None=()):
        list.__init__(self, messages)
        self.truncated, self.uncovered = truncated, uncovered

    @property
    def complete(self):
        """True if all of the log was searched, through the index or directly: other messages do not exist."""
        return not self.uncovered

    @property
    def messages(self):
        """The messages as a plain list, named as in other results."""
        return list(self)

    def __reduce__(self):
        return QueryResult, (list(self), self.truncated, self.uncovered)

    def _repr_html_(self):
        notes = [f"{len(self)} messages", *(["there are more"] if self.truncated else [])]
        return messages_html(self, ", ".join(notes + ([] if self.complete else ["part of the log was not searched"])))


cdef struct Sought:
    # The key of a search, and the phy offset of the message found last.
    const unsigned char* topic
    const unsigned char* key
    Py_ssize_t topic_len, key_len
    int32_t key_hash
    int key_kind
    int64_t begin, end, max_num, lowest


@cython.no_gc_clear
cdef class KeyQuery:
    """Finds the messages with a key through index files, in the file that was asked for last or in `region_of`.

    Parameters
    ----------
    region_of : callable
        Returns for a phy offset its segment: (Region, offset of its first byte, and the bounds of what the log holds), or None.
    interval : float
        Seconds after `looked_at` (`time.monotonic`) in which the usual query is answered at once although another process may
        begin a new index file; infinite where this process is the writer.
    """

    cdef public double looked_at
    cdef public bint closed
    cdef OpenedIndexes indexes
    cdef object region_of
    cdef FileStream log
    cdef int check_crc
    cdef double interval

    def __cinit__(self, OpenedIndexes indexes not None, region_of not None, int check_crc, FileStream log not None,
                  double interval):
        self.indexes, self.region_of, self.check_crc, self.log, self.interval = indexes, region_of, check_crc, log, interval
        self.looked_at = -1.0

    def recent(self, topic, key, max_num):
        """Query by unique key or keys at any time; None if the caller has to refresh the index first."""
        return self.recent_in(topic, key, max_num)

    cdef object recent_in(self, topic, key, max_num):
        cdef int64_t num
        if (self.closed or not PyUnicode_CheckExact(<PyObject*>topic) or not PyUnicode_CheckExact(<PyObject*>key)
                or not small_number(<PyObject*>max_num, &num) or num < 0):
            return None
        cdef tuple indexes = self.indexes.known()
        if indexes is None or not indexes:
            return None
        if self.interval < INFINITY and (monotonic() - self.looked_at >= self.interval
                                         or is_full(<IndexRegion?>indexes[0])):
            return None
        # A record may hold U+FFFD for bytes that are no text: only a comparison of texts finds them.
        if not PyUnicode_IS_COMPACT_ASCII(<PyObject*>topic) or not PyUnicode_IS_COMPACT_ASCII(<PyObject*>key):
            if "\ufffd" in topic or "\ufffd" in key:
                return None
        return self.search(indexes, topic, key, ANY_KEY, INT64_MIN, INT64_MAX, num)

    def find(self, indexes, str topic not None, str key not None, int key_kind, int64_t begin, int64_t end,
             int64_t max_num):
        """Find the messages with one key, newest first, stored from `begin` to `end` (ms, inclusive), as a QueryResult.

        Returns None if the chain of a file is long or damaged, or its offsets do not decrease.
        """
        return self.search(indexes, topic, key, key_kind, begin, end, max_num)

    cdef object search(self, indexes, str topic, str key, int key_kind, int64_t begin, int64_t end, int64_t max_num):
        cdef QueryResult found = QueryResult.__new__(QueryResult)
        cdef IndexRegion index
        cdef Sought sought
        cdef uint32_t h = hash_str(0, topic) * 31u + 35u
        # They hold what `sought` points to.
        stored_topic, stored_key = stored(topic), stored(key)
        sought.topic = bytes_of(stored_topic, &sought.topic_len)
        sought.key = bytes_of(stored_key, &sought.key_len)
        if key_kind == TAG:
            # A tag is indexed as a key of the form T#tag.
            h = (h * 31u + 84u) * 31u + 35u
        sought.key_hash, sought.key_kind = index_hash(hash_str(h, key)), key_kind
        sought.begin, sought.end, sought.max_num, sought.lowest = begin, end, max_num, INT64_MAX
        found.uncovered = ()
        for each in indexes:
            index = <IndexRegion?>each
            if not self.walk(index, &sought, topic, found) or (index.damaged and not index.is_distrusted):
                return None
            if found.truncated:
                break
        return found

    cdef bint walk(self, IndexRegion index, Sought* sought, str topic, QueryResult found) except -1:
        # Take the messages of an index file's chain; False where it is too long, or leads to a later record.
        cdef Region region = index.region
        cdef unsigned char* entries = region.pin(0, region.size)
        cdef const unsigned char* entry
        cdef int64_t at, phy, steps = 0
        cdef bint damaged = False, descends = True
        try:
            at = index_head(entries, index.magic, index.slot_num, index.index_num, sought.key_hash)
            damaged = at < 0
            while at > 0 and not found.truncated and steps < WALK_STEPS and descends:
                entry = entries + INDEX_HEADER_SIZE + SLOT_SIZE * index.slot_num + ENTRY_SIZE * at
                phy = get_i64(entry + ENTRY_PHY_OFFSET)
                if get_i32(entry + ENTRY_KEY_HASH) == sought.key_hash:
                    damaged |= phy < 0 or self.look_at(phy, sought, topic, found, &descends)
                at = entry_before(entry, at, sought.key_hash, index.magic, index.slot_num, &damaged)
                steps += 1
            if damaged:
                index.damaged = True
            return descends and (at <= 0 or found.truncated)
        finally:
            region.unpin()

    cdef bint look_at(self, int64_t phy, Sought* sought, str topic, QueryResult found, bint* descends) except -1:
        # In the segment that was asked for last, or else in the one that has it.  True where an entry cannot lead there.
        cdef int64_t base_offset, room
        cdef Region segment = self.log.around(phy, &base_offset)
        cdef int64_t low = base_offset, high = self.log.wrote_where
        cdef unsigned char* p
        if segment is None:
            answer = self.region_of(phy)
            if answer is None:
                # Retention took it, its segment is lost, or the log does not go so far.
                return phy >= high
            segment, base_offset, low, high = answer
            if segment is None:
                return False
        if phy < low or phy < base_offset:
            return False
        if phy >= high or phy - base_offset >= segment.size:
            return True
        room = segment.size - (phy - base_offset)
        p = segment.pin(phy - base_offset, room)
        prefetch_head(p, room)
        try:
            return take(p, room, phy, sought, topic, self.check_crc, found, descends)
        finally:
            segment.unpin()


cdef bint take(const unsigned char* p, int64_t room, int64_t phy, Sought* sought, str topic, int check_crc, QueryResult found,
               bint* descends) except -1:
    # Add a record that has the key to what was found.  True where no record of such a key is there.
    cdef RecordView r
    if judge_record(p, room, phy, 0, &r) != RECORD:
        return True
    if not has_key(p, room, &r, sought.topic, sought.topic_len, sought.key, sought.key_len, sought.key_kind):
        return not has_key_hash(p, &r, sought.key_hash)
    if not sought.begin <= r.store_timestamp <= sought.end:
        return False
    if phy > sought.lowest:
        descends[0] = False
    elif phy == sought.lowest:
        # The key was indexed twice.
        pass
    elif len(<list>found) >= sought.max_num:
        found.truncated = True
    else:
        (<list>found).append(message_of(p, &r, check_crc, topic))
        sought.lowest = phy
    return False


@cython.auto_pickle(False)
@cython.embedsignature(False)
cdef class KeyQuestions:
    """`query_message` of a store, which is compiled because many programs ask for one key after the other."""

    cdef public StateFields _state

    @cython.annotation_typing(False)
    def query_message(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: Moment | None = None,
        end: Moment | None = None,
        max_log_bytes: int | None = _arguments.DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
        *,
        index_type: IndexType | None = None,
        compat: bool = False,
    ) -> QueryResult:
        """Find messages by key: newest first, each once, every one checked against its topic and key.

        Index files are searched, the index in RocksDB (``indexRocksDBEnable``), and what of the log neither covers: an index
        file is lost or damaged, or the broker died before it indexed the newest records.  That part is scanned once while
        the store is open.  As RocksDB has no entry of a record without a unique key, segments that begin with such records are
        scanned, too.

        Parameters
        ----------
        topic, key : str
            A key, a unique key, or with ``index_type="T"`` a tag.
        max_num : int
            The greatest number of messages; any number.
        begin, end : int or datetime, optional
            Store time range, inclusive and exact: ms since epoch, or a `datetime` (aware, or naive as local time).
        max_log_bytes : int, optional
            Scan at most this part of the log that the index does not cover; None = all of it.  The result is not `complete`
            where a part was not scanned.
        progress : callable, optional
            Called with the number of bytes of it that were scanned, and that of all.
        index_type : {None, "U", "K", "T"}
            None: unique key or keys; "U" only the unique key, "K" only the keys, "T" the tag.
        compat : bool
            Answer like RocketMQ's ``queryMessage`` (5.5.0): at most 64, ascending offsets, with duplicates and messages with
            other keys of the same hash, times compared by whole seconds, without a scan.

        Raises
        ------
        ValueError
            A time looks like seconds (see `rmqstore.arguments.milliseconds`), or `index_type` is unknown.
        MissingDependencyError
            The index is in RocksDB, rocksdict is not installed, and the log alone has no answer.
        UnsupportedFormatError
            With `compat`: the index is in RocksDB, or a part of the messages is in tiered storage.
        """
        # Called by its class, it may get any object.
        if not isinstance(<object>self, KeyQuestions) or self._state is None:
            raise AttributeError("the store was not opened: use MessageStore.open")
        query = self._state.key_query
        if type(query) is KeyQuery and begin is None and end is None and index_type is None and not compat:
            found = (<KeyQuery>query).recent_in(topic, key, max_num)
            if found is not None:
                return found
        return self._query_message(topic, key, max_num, begin, end, max_log_bytes, progress, index_type, compat)


cdef bint is_full(IndexRegion index) except -1:
    # Another file may follow it.
    cdef unsigned char* p = index.region.pin(0, INDEX_HEADER_SIZE)
    cdef bint full = index_count_of(p) >= index.index_num
    index.region.unpin()
    return full


cdef inline object stored(str text):
    # The bytes of a text in a record; an ASCII str has them itself.
    return text if PyUnicode_IS_COMPACT_ASCII(<PyObject*>text) else encode_java_utf8(text)


cdef inline const unsigned char* bytes_of(object text, Py_ssize_t* n) noexcept:
    # The bytes of a result of `stored`.
    if type(text) is bytes:
        n[0] = PyBytes_GET_SIZE(text)
        return <const unsigned char*>PyBytes_AS_STRING(text)
    n[0] = PyUnicode_GET_LENGTH(<PyObject*>text)
    return <const unsigned char*>PyUnicode_DATA(<PyObject*>text)
