"""An order service with the store inside: two consumers, a crash in the middle by ``kill -9``, and nothing lost.

    python examples/order_service.py [--orders 2000] [--kills 2] [DIRECTORY]

The service is a process of its own (``order_service.py --serve DIRECTORY``).  It reads orders from its input, stores each and
answers with its number once it is stored; two threads also consume the topic, one for the group "billing", one for
"shipping", and each writes a line into its own book.  The shop that sends the orders kills the service at moments of its
choice, starts it again, and sends again what it has no answer for.  At the end it looks whether

- every order that was answered is in the store, once;
- each group has dealt with every order;
- `verify` finds nothing wrong.

Three things make it so, and a program of yours needs them too:

- A put that returned survives the death of the process.  For the death of the machine add ``flush_disk_type="SYNC_FLUSH"``.
- Consumers get a message at least once: the one in hand when the process died comes again, and so may those after
  the last time that progress was written.  So each looks into its book before it acts.
- An order that was stored just before the answer got lost is sent again.  So the service looks it up by its key first.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from rmqstore import Message, MessageStore, StoreConfig, verify

TOPIC = "Orders"
QUEUES = 4
GROUPS = ("billing", "shipping")
# Small files, so that a run fills several of each; RocketMQ's defaults are made for brokers.
CONFIG = StoreConfig(
    mapped_file_size_commit_log=256 * 1024,
    mapped_file_size_consume_queue=20_000,
    max_hash_slot_num=1000,
    max_index_num=4000,
)


# ------------------------------------------------------------------------------------------------------- the service


def book_of(directory: Path, group: str) -> Path:
    """The file in which a group records its work, an order number a line."""
    return directory / f"{group}.txt"


def whole_lines(path: Path) -> list[str]:
    """The lines of a book; one that a kill cut short does not count."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def consume(store: MessageStore, directory: Path, group: str, closing: threading.Event) -> None:
    """Deal with every order once, however often it comes, until the service closes and none is left."""
    path = book_of(directory, group)
    lines = whole_lines(path)
    # Remove an order that a kill cut short.
    path.write_text("".join(f"{number}\n" for number in lines))
    done = set(lines)
    with path.open("a") as book:
        last_round = False
        while not last_round:
            last_round = closing.is_set()
            for message in store.consume(TOPIC, group, timeout=0 if last_round else 0.2):  # waits for new orders
                number = message.keys[0]
                if number not in done:
                    book.write(number + "\n")  # here a real service would write an invoice
                    book.flush()
                    done.add(number)


def serve(directory: Path) -> None:
    """Store what comes in, answer, and let both groups consume, until the input ends."""
    closing = threading.Event()
    with MessageStore.open(directory / "store", config=CONFIG) as store:
        workers = [threading.Thread(target=consume, args=(store, directory, group, closing)) for group in GROUPS]
        for worker in workers:
            worker.start()
        for line in sys.stdin:
            order = json.loads(line)
            number = order["number"]
            if not store.query_message(TOPIC, number, max_num=1):  # else: sent again, its answer got lost
                # The orders of a customer stay in their order: they go into one queue.
                queue_id = order["customer"] % QUEUES
                store.put_message(Message(TOPIC, line.encode(), keys=[number], tags=order["region"]), queue_id=queue_id)
            print(number, flush=True)
        closing.set()
        for worker in workers:
            worker.join()


# ---------------------------------------------------------------------------------------------------------- the shop


def send(directory: Path, orders: list[dict[str, object]], kill_after: int | None) -> set[str]:
    """Send orders to a new service and return the numbers that it answered; kill it after `kill_after`, if given."""
    service = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert service.stdin is not None and service.stdout is not None
    answered: set[str] = set()

    def feed() -> None:
        try:
            for order in orders:
                service.stdin.write(json.dumps(order) + "\n")
            service.stdin.flush()
            if kill_after is None:
                service.stdin.close()  # a service that is to be killed waits for more
        except BrokenPipeError:
            pass  # the service was killed

    feeder = threading.Thread(target=feed)
    feeder.start()
    for line in service.stdout:
        if not line.endswith("\n"):
            break
        answered.add(line.strip())
        if kill_after is not None and len(answered) == kill_after:
            service.kill()  # SIGKILL: no handler runs, nothing is closed
    feeder.join()
    code = service.wait()
    assert code == (0 if kill_after is None else -signal.SIGKILL), f"the service ended with {code}"
    return answered


def main() -> None:
    """Sell, kill, sell on, and count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="where store and books lie; by default a temporary one")
    parser.add_argument("--orders", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.directory)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run(options.directory or Path(scratch), options.orders, options.kills, random.Random(options.seed))


def run(directory: Path, count: int, kills: int, moments: random.Random) -> None:
    """The whole story in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    open_orders: dict[str, dict[str, object]] = {
        f"ORD-{number:06}": {
            "number": f"ORD-{number:06}",
            "customer": number % 97,
            "region": "EU" if number % 3 else "US",
        }
        for number in range(count)
    }
    everything = set(open_orders)
    for kill in range(kills + 1):
        last = kill == kills or not open_orders
        orders, kill_after = list(open_orders.values()), None
        if not last:
            kill_after = moments.randint(1, max(1, len(orders) // (kills + 2)))
            orders = orders[: kill_after + 20]  # some are on their way when it dies
        answered = send(directory, orders, kill_after)
        for number in answered:
            open_orders.pop(number, None)
        print(f"{len(answered):6} orders answered, then {'the end' if last else 'kill -9'}")
        if last:
            break

    assert not open_orders
    with MessageStore.open(directory / "store", read_only=True) as store:
        stored = [message.keys[0] for message in store.messages() if message.topic == TOPIC]
        assert sorted(stored) == sorted(everything), "an order is missing or twice"
        assert all(
            len(store.query_message(TOPIC, number)) == 1
            for number in moments.sample(sorted(everything), min(count, 100))
        )
    for group in GROUPS:
        done = whole_lines(book_of(directory, group))
        assert sorted(done) == sorted(everything), f"{group} missed an order or did one twice"
    assert list(verify(directory / "store")) == []
    print(f"{count} orders stored once, billed once and shipped once, after {kill} kills; nothing is wrong on disk")


if __name__ == "__main__":
    main()
