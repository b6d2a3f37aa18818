"""Messages: what goes into the log and what comes out of it, and the codecs of their parts.

Owns `Message` and `MessageExt`, the properties text, tags codes, hosts and message ids, the sysFlag with body compression, and the
client form of inner batches.  Nothing here touches a file.

- `message`: `Message`, `MessageExt`, and the rules of a broker
- `properties`: the properties text, tags codes; `java_text`: text as Java encodes and decodes it
- `notebook`: messages as short tables of HTML
- `body_text`: bodies as text, large ones in pieces
- `hosts`: hosts and message ids; `compression`: bodies and the sysFlag; `inner_batch`: many messages in one body
"""

from rmqstore.message.body_text import (
    BodyText,
    body_text,
    json_pieces,
    text_pieces,
)
from rmqstore.message.compression import (
    MAX_BODY_SIZE,
    BodySizeError,
    CompressionType,
    SysFlag,
    compress_body,
    compression_flags,
    decompress_body,
    is_queued,
)
from rmqstore.message.hosts import (
    host_from_bytes,
    host_to_bytes,
    offset_message_id,
    parse_message_id,
)
from rmqstore.message.inner_batch import (
    encode_inner_batch,
)
from rmqstore.message.java_text import (
    decode_java_utf8,
    encode_java_utf8,
)
from rmqstore.message.message import (
    DLQ_PREFIX,
    MAX_RETRY_TOPIC_LENGTH,
    MAX_TOPIC_LENGTH,
    OTHER_MESSAGE,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    Message,
    MessageExt,
    body_findings,
    check_topic,
    is_light_queue,
)
from rmqstore.message.properties import (
    MAX_PROPERTIES_SIZE,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    parse_properties,
    properties_to_bytes,
    properties_to_text,
    tags_code,
)

__all__ = [
    "DLQ_PREFIX",
    "MAX_BODY_SIZE",
    "MAX_PROPERTIES_SIZE",
    "MAX_RETRY_TOPIC_LENGTH",
    "MAX_TOPIC_LENGTH",
    "NAME_VALUE_SEPARATOR",
    "OTHER_MESSAGE",
    "PROPERTY_SEPARATOR",
    "RETRY_PREFIX",
    "SCHEDULE_TOPIC",
    "BodySizeError",
    "BodyText",
    "CompressionType",
    "Message",
    "MessageExt",
    "SysFlag",
    "body_findings",
    "body_text",
    "check_topic",
    "compress_body",
    "compression_flags",
    "decode_java_utf8",
    "decompress_body",
    "encode_inner_batch",
    "encode_java_utf8",
    "host_from_bytes",
    "host_to_bytes",
    "is_light_queue",
    "is_queued",
    "json_pieces",
    "offset_message_id",
    "parse_message_id",
    "parse_properties",
    "properties_to_bytes",
    "properties_to_text",
    "tags_code",
    "text_pieces",
]
