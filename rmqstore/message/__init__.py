"""Messages to put, stored messages, and the codecs of their parts.  No module here opens a file.

- `message`: `Message`, a broker's rules for messages, and findings about bodies
- `_read`: compiled: `MessageExt`, and how records become messages, by place, queue and key
- `codec`: texts as Java has them, properties, tags codes, hosts, message ids, inner batches
- `compression`: bodies and the sysFlag
- `shown`: bodies as text, large ones in pieces; messages as tables of HTML
"""

from rmqstore.message._read import OTHER_MESSAGE, MessageExt
from rmqstore.message.codec import (
    MAX_PROPERTIES_SIZE,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    decode_java_utf8,
    encode_inner_batch,
    encode_java_utf8,
    host_from_bytes,
    host_to_bytes,
    offset_message_id,
    parse_message_id,
    parse_properties,
    properties_to_bytes,
    properties_to_text,
    tags_code,
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
from rmqstore.message.message import (
    DLQ_PREFIX,
    MAX_RETRY_TOPIC_LENGTH,
    MAX_TOPIC_LENGTH,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    Message,
    body_findings,
    check_topic,
    is_light_queue,
)
from rmqstore.message.shown import BodyText, body_text, json_pieces, text_pieces

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
