"""RabbitMQ's classic queues on disk: read, written, verified and repaired.

Owns the names that users import.  Shares the Region fence, the byte order, the errors and MappedFile with the RocketMQ
side of the package, and imports nothing else of it.
"""

from rmqstore.rabbitmq.definitions import QueueDefinition, durable_queues
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.queue_index import IndexEntry, Problem, QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2
from rmqstore.rabbitmq.repair import RepairedQueue, RepairReport, repair
from rmqstore.rabbitmq.transfer import ImportReport, export, import_messages, node_process
from rmqstore.rabbitmq.verify import Consequence, Finding, verify
from rmqstore.rabbitmq.vhost import Queue, QueuedMessage, Vhost, find_vhosts

__all__ = [
    "Consequence",
    "Finding",
    "ImportReport",
    "IndexEntry",
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
    "Vhost",
    "durable_queues",
    "export",
    "find_vhosts",
    "import_messages",
    "node_process",
    "repair",
    "verify",
]
