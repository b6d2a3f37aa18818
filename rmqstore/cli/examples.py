"""The examples at the end of every command's ``--help``.

Owns the lines, which tests/cli/test_cli_examples.py runs one by one on a real broker's store, so that none can go stale.
In them ``store`` is the store's root and ``vhost`` a RabbitMQ vhost's directory.
"""

from __future__ import annotations

# By command: each line may have several shell commands.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "completion": ('eval "$(rmqstore completion bash)"',),
    "demo": ("rmqstore demo --unpack sample", "rmqstore demo", "rmqstore demo --messages 100000 --dir /tmp"),
    "dump": (
        "rmqstore dump store --begin-phy-offset 1048000 --end-phy-offset 1049500",
        "rmqstore dump store --what queue --topic Payments --queue 1",
        "rmqstore dump store --what index | grep longest",
        "rmqstore dump store/commitlog/00000000000001048576 --end-phy-offset 1049500",
        "rmqstore dump store/checkpoint",
    ),
    "export": (
        "rmqstore export store --topic Orders -O orders.parquet",
        "rmqstore export store --begin 2026-11-21 --end 2026-11-21 -O 2026-11-21.jsonl.gz",
        "rmqstore export store --topic Orders --tags 'paid || shipped' --begin 2026-11-21T05:32:45Z -O orders.csv.gz",
        "rmqstore export store --topic Payments --columns keys,store_timestamp,body | head -n 2",
        "rmqstore export store --topic Documents --format files -O bodies",
    ),
    "get": (
        "rmqstore get store Orders 3",
        "rmqstore get store Orders 3 --begin 2026-11-21T05:32:45Z --tags 'paid || shipped'",
        "rmqstore get store Orders 3 --max-num 5 --format '%T %p/%o %k %s'",
        "rmqstore get store Orders 3 --begin-queue-offset 7 --max-num 100 --json --body none",
    ),
    "import": (
        "rmqstore export store --topic Payments -O payments.jsonl && rmqstore import new payments.jsonl",
        "rmqstore export store -O all.parquet && rmqstore import copy all.parquet --keep-timestamps",
    ),
    "info": ("rmqstore info store", "rmqstore info store --json | python3 -m json.tool | less"),
    "metrics": (
        "rmqstore metrics store | grep rocketmq_group_diff",
        "rmqstore metrics store -O rmqstore.prom --cluster DefaultCluster --broker broker-a",
    ),
    "offsets": ("rmqstore offsets store", "rmqstore offsets show store --group G-billing"),
    "offsets reset": (
        "rmqstore offsets reset store --group G-billing --topic Orders --time 2026-11-21T05:33:00Z",
        "rmqstore offsets reset store --group G-billing --topic Orders --time '2h ago' --queue 1",
    ),
    "offsets set": ("rmqstore offsets set store --group G-billing --topic Orders --queue 1 --queue-offset 2500",),
    "offsets show": ("rmqstore offsets show store", "rmqstore offsets show store --group G-billing --json"),
    "pending": (
        "rmqstore pending store",
        "rmqstore pending store --kind timer --kind delayed --overdue",
        "rmqstore pending store --topic Payments --json",
        "rmqstore pending store -O pending.parquet",
    ),
    "query": (
        "rmqstore query store Orders ORD-100000",
        "rmqstore query store --key ORD-100000",
        "rmqstore query store Orders CUST-1 --begin 2026-11-21T05:32:40Z --max-num 10 --body none",
        "rmqstore query store Orders created --type tag --max-num 5",
        "rmqstore query store Orders ORD-100000 ORD-100001 --max-num 1 --body none",
        "rmqstore query store --id 7F0000010000518C000000000000037E --json",
        "rmqstore query store --phy-offset 484 --body hex",
    ),
    "queues": ("rmqstore queues store", "rmqstore queues store Orders --json"),
    "rabbitmq": ("rmqstore rabbitmq queues vhost",),
    "rabbitmq dump": ("rmqstore rabbitmq dump vhost --queue q --max-num 2",),
    "rabbitmq export": ("rmqstore rabbitmq export vhost -O messages.jsonl",),
    "rabbitmq import": (
        "rmqstore rabbitmq export vhost -O messages.jsonl && rmqstore rabbitmq import vhost q messages.jsonl --declared",
    ),
    "rabbitmq info": ("rmqstore rabbitmq info vhost",),
    "rabbitmq queues": ("rmqstore rabbitmq queues vhost --json",),
    "rabbitmq repair": ("rmqstore rabbitmq repair vhost repaired",),
    "rabbitmq verify": ("rmqstore rabbitmq verify vhost",),
    "rebuild": (
        "rmqstore rebuild store --output rebuilt -o messageDelayLevel='1s 2s 30m 1h'",
        "rmqstore rebuild store --what index --yes -o messageDelayLevel='1s 2s 30m 1h'",
    ),
    "recover": (
        "rmqstore recover store -o messageDelayLevel='1s 2s 30m 1h'",
        "rmqstore recover store --mode skip -o messageDelayLevel='1s 2s 30m 1h'",
    ),
    "serve": ("rmqstore serve store --port 0", "rmqstore serve store --port 0 --rabbitmq vhost"),
    "settings": (
        "rmqstore settings store",
        "rmqstore settings store --what topics --json",
        "rmqstore settings store --what metadata --json | python3 -m json.tool",
    ),
    "spark": ("rmqstore spark count store",),
    "spark count": ("rmqstore spark count store --by topic --by day --topic Orders --topic Payments --tags paid",),
    "spark export": ("rmqstore spark export store payments --format json --topic Payments --partition-by day",),
    "spark rebuild": ("rmqstore spark rebuild store --output again -o messageDelayLevel='1s 2s 30m 1h'",),
    "sql": (
        """rmqstore sql store "select topic, count(*) as n from messages group by topic order by n desc limit 5\"""",
        """rmqstore sql store "select tags, body from messages where topic = 'Orders' and 'ORD-100000' = any(keys)\"""",
        """rmqstore sql store "select * from consumers where lag > 0" --json""",
        """rmqstore sql store "select keys, tags, body from messages where topic = 'Orders'" -O orders.parquet""",
    ),
    "tail": (
        "rmqstore tail store",
        "rmqstore tail store Orders -n 3 --tags 'paid || shipped' --body none",
        "rmqstore tail store -n 5 --format '%d %t/%p %k'",
        "rmqstore tail store Orders --key CUST-1 -n 2 --json",
        "rmqstore tail -f store Orders",
    ),
    "topics": ("rmqstore topics store", "rmqstore topics store Orders", "rmqstore topics store --sort bytes"),
    "verify": ("rmqstore verify store", "rmqstore verify store -o messageDelayLevel='1s 2s 30m 1h' --json | tail -1"),
}


def epilog_of(command: str) -> str | None:
    """str or None: the section of `command` (words of the command line after ``rmqstore``), as click prints it."""
    lines = EXAMPLES.get(command)
    if lines is None:
        return None
    # The mark keeps click from filling the lines into a paragraph.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
