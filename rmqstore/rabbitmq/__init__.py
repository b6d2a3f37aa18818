"""RabbitMQ's classic queues on disk: read, written, verified and repaired.

Owns the names that users import.  Shares the Region fence, the byte order, the errors and MappedFile with the RocketMQ
side of the package, and imports nothing else of it.

- `_term` (Cython): Erlang's external term format, AMQP's properties and tables; what a message term holds
- `_core` (Cython): bytes of journal and segments: one pass over each, the map of both that a queue lives with
- `_messages` (Cython): bytes of message files, the table of where each message lies; the check of version 2's
- `layout`: names of directories and small files, locks and mappings
- `node`: a node's data directory: which directories are nodes and vhosts, parts that are not read (quorum queues,
  streams), and the durable queues that its Mnesia tables know
- `term`, `amqp`, `dets`: values of terms and their text; AMQP's types and JSON of them; the table of recovery terms
- `message`: a message, made with the bytes that a node writes, or read lazily; those that are lost
- `problem`: what is wrong in a file, as a value
- `live_index`: the entries of an index of any version, as columns and as objects; recovery terms
- `queue_index`: one queue's index, version 1, over `index_directory` (loading and reading) and `index_writer` (opening
  after a stop, and writing)
- `queue_index_v2`: the same of version 2, read only
- `message_store`: the shared messages of a vhost, a face over parts: `message_files` (files, places, references),
  `message_recovery` (opening, merging, one file alone), `clean_state` (an orderly close)
- `batches`: messages as Arrow arrays and record batches
- `vhost`: which directory is whose, its two message stores, and entries a segment
- `queue`: one directory below ``queues`` and its index; the messages of a queue
- `unreferenced`: whole messages without an index: of one message file, or that no entry of a vhost refers to
- `verify`, `repair`: what is wrong and what a node would do; a directory without it
- `transfer`, `importing`: messages out, as files and as JSON; messages into a stopped node's queue
"""

from rmqstore.rabbitmq.importing import ImportReport, import_messages, node_process
from rmqstore.rabbitmq.live_index import IndexEntry
from rmqstore.rabbitmq.message import LostMessage, Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import QueueDefinition, UnreadPart, durable_queues, find_vhosts, unread_parts
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.queue import Queue, QueuedMessage
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2
from rmqstore.rabbitmq.repair import RepairedQueue, RepairReport, repair
from rmqstore.rabbitmq.transfer import export
from rmqstore.rabbitmq.unreferenced import FoundMessage, file_messages, unreferenced_messages
from rmqstore.rabbitmq.verify import Consequence, Finding, verify
from rmqstore.rabbitmq.vhost import Vhost

__all__ = [
    "Consequence",
    "Finding",
    "FoundMessage",
    "ImportReport",
    "IndexEntry",
    "LostMessage",
    "Message",
    "MessageStore",
    "Problem",
    "Queue",
    "QueueDefinition",
    "QueueIndex",
    "QueueIndexV2",
    "QueuedMessage",
    "RepairReport",
    "RepairedQueue",
    "UnreadPart",
    "Vhost",
    "durable_queues",
    "export",
    "file_messages",
    "find_vhosts",
    "import_messages",
    "node_process",
    "repair",
    "unread_parts",
    "unreferenced_messages",
    "verify",
]
