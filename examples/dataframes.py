# %% [markdown]
# # A broker's store in pandas and Polars
#
# A notebook as a script: the lines `# %%` begin a cell for Jupyter, VS Code and others, and `python examples/dataframes.py [STORE]`
# runs all of it.  Messages go as Arrow columns, of which only those that are asked for are decoded; no file lies between.
#
# Without an argument it makes a small store of its own.

# %%
import datetime
import json
import sys
import tempfile
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import rmqstore
from rmqstore import MessageStore, StoreConfig

scratch = tempfile.TemporaryDirectory()
arguments = [argument for argument in sys.argv[1:] if Path(argument, "commitlog").is_dir()]

# %% [markdown]
# ## A store, out of a table
#
# `put_table` takes anything that speaks Arrow: here a Polars frame, whose rows become messages without an object for each.

# %%
made = Path(scratch.name, "store")
small = StoreConfig(
    mapped_file_size_commit_log=2**20, mapped_file_size_consume_queue=20_000, max_hash_slot_num=1000, max_index_num=8000
)
orders = pl.DataFrame(
    {
        "keys": [[f"ORD-{number}", f"CUST-{number % 50}"] for number in range(5000)],
        "tags": [("created", "paid", "shipped")[number % 3] for number in range(5000)],
        "body": [f'{{"amount": {number % 200}.50, "customer": {number % 50}}}'.encode() for number in range(5000)],
        "queue_id": [number % 4 for number in range(5000)],
    }
)
with MessageStore.open(made, config=small) as store:
    store.put_table(orders, topic="Orders")

path = Path(arguments[0]) if arguments else made
description = rmqstore.describe(path)
print(
    path,
    "holds",
    sum(queue.max_queue_offset - queue.min_queue_offset for queue in description.queues),
    "messages in",
    len(description.queues),
    "queues",
)

# %% [markdown]
# ## Which messages, when: Polars
#
# Four columns, no body: only what is asked for is decoded.  `size` is an int32 a record; sums of it need more.

# %%
with MessageStore.open(path, read_only=True) as store:
    frame = pl.DataFrame(store.scan(["topic", "tags", "size", "store_timestamp"], topic="Orders"))
per_tag = (
    frame.group_by("tags")
    .agg(
        pl.len().alias("messages"),
        pl.col("size").cast(pl.Int64).sum().alias("bytes"),
        pl.col("store_timestamp").max().alias("newest"),
    )
    .sort("messages", "tags", descending=True)
)
print(per_tag)
assert per_tag["messages"].sum() == frame.height > 0

# %% [markdown]
# ## Their contents: pandas
#
# Bodies are JSON in the store that was made above.

# %%
with MessageStore.open(made, read_only=True) as store:
    table = store.scan(["queue_id", "tags", "keys", "body"], topic="Orders").read_all()
bodies = pd.DataFrame([json.loads(body) for body in table.column("body").to_pylist()])
paid = table.select(["queue_id", "tags"]).to_pandas().join(bodies).query("tags == 'paid'")
per_customer = paid.groupby("customer")["amount"].agg(["count", "sum"]).sort_values("sum", ascending=False)
print(per_customer.head(3))
assert int(per_customer["count"].sum()) == 1667

# %% [markdown]
# ## Many keys at once
#
# A list of keys from elsewhere, say a spreadsheet of complaints: `query_table` walks their chains side by side.

# %%
with MessageStore.open(made, read_only=True) as store:
    hits = store.query_table(
        ["ORD-17", "ORD-4711", "ORD-9999", "CUST-7"], topic="Orders", columns=["tags", "store_timestamp", "body"]
    )
found = pl.from_arrow(hits).group_by("key", maintain_order=True).len()
print(found)
# The key that is not there has no row; of a key with many messages come the newest 64.
assert dict(found.iter_rows()) == {"ORD-17": 1, "ORD-4711": 1, "CUST-7": 64}

# %% [markdown]
# ## A day of one queue, and what is damaged
#
# `corrupt` marks a record that does not agree with its CRC; its body is then as it lies on the disk.

# %%
with MessageStore.open(path, read_only=True) as store:
    queues = store.queue_ids("Orders")
    table = store.get_table(
        "Orders", queue_id=queues[0], columns=["queue_offset", "store_timestamp", "body", "corrupt"]
    )
newest = pc.max(table.column("store_timestamp")).as_py()
day = table.filter(pc.greater(table.column("store_timestamp"), pa.scalar(newest - datetime.timedelta(days=1))))
damaged = pc.sum(day.column("corrupt")).as_py()
print(f"queue {queues[0]}: {day.num_rows} messages on the last day until {newest}, {damaged} damaged")
assert day.num_rows > 0

# %% [markdown]
# ## Parquet, when the disk goes back to its broker

# %%
import pyarrow.parquet as pq  # noqa: E402

target = Path(scratch.name, "orders.parquet")
with MessageStore.open(path, read_only=True) as store:
    batches = store.scan(topic="Orders")
    # Batch by batch, so that memory stays flat however large the log is.
    with pq.ParquetWriter(target, batches.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
assert pq.read_metadata(target).num_rows == frame.height
print(target.name, target.stat().st_size, "bytes,", frame.height, "rows")
scratch.cleanup()
