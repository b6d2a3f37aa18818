"""Check a wheel: its files, and that it works after installation.

``wheel.py contents WHEEL`` compares its files with those that git knows, and reads its metadata.
``wheel.py use docs/start.md`` runs with the Python into whose environment the wheel was installed: the main calls of
both sides of the package, the demo on the sample store of the wheel, and then every session (``pycon`` block) of the
document, in a temporary folder.  It needs only the wheel's own requirements, so cibuildwheel runs it on every platform.
"""

from __future__ import annotations

import doctest
import email
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Sources that only a build needs; a wheel leaves them out.
SOURCES = (".pyx", ".c", ".h")
MODULES = (
    "rmqstore/_core",
    "rmqstore/_dispatch",
    "rmqstore/_columns",
    "rmqstore/_rows",
    "rmqstore/message/_read",
    "rmqstore/rabbitmq/_core",
    "rmqstore/rabbitmq/_messages",
    "rmqstore/rabbitmq/_term",
)


def contents(wheel: str) -> None:
    """Exit with the faults of the files and the metadata of `wheel`, if there are any."""
    archive = zipfile.ZipFile(wheel)
    names = {name for name in archive.namelist() if not name.endswith("/")}
    compiled = {name for name in names if name.endswith(".so")}
    package = {name for name in names - compiled if name.startswith("rmqstore/")}
    (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    tracked = subprocess.run(
        ["git", "ls-files", "rmqstore"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    wanted = {name for name in tracked if not name.endswith(SOURCES)}
    faults = []
    if package != wanted:
        faults.append(f"lacks {sorted(wanted - package)} and should not hold {sorted(package - wanted)}")
    if {name.partition(".")[0] for name in compiled} != set(MODULES):
        faults.append(f"has the compiled modules {sorted(compiled)}, not those of {MODULES}")
    others = {name for name in names - compiled - package if not name.startswith(folder + "/")}
    if others:
        faults.append(f"holds {sorted(others)}, which are not files of the package")
    if f"{folder}/licenses/LICENSE" not in names:
        faults.append("lacks the licence")
    metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    if metadata["License-Expression"] != "Apache-2.0" or metadata.get_all("License-File") != ["LICENSE"]:
        faults.append("does not state its licence as PEP 639 has it")
    here = os.fsencode(ROOT)
    faults += [
        f"names the folder it was built in, in {name}" for name in sorted(compiled) if here in archive.read(name)
    ]
    if faults:
        sys.exit("the wheel " + "; it ".join(faults))
    print(f"{len(names)} files in the wheel, {sum(info.file_size for info in archive.infolist())} bytes")


def main_calls() -> None:
    """Put, read and find a message; the same for a queue of RabbitMQ."""
    import rmqstore
    from rmqstore import Message, MessageStore, StoreConfig
    from rmqstore.rabbitmq import Message as QueueMessage
    from rmqstore.rabbitmq import QueueIndex

    config = StoreConfig(
        mapped_file_size_commit_log=1 << 16,
        mapped_file_size_consume_queue=2000,
        max_hash_slot_num=64,
        max_index_num=256,
    )
    with MessageStore.open("wheel-orders", config=config) as store:
        put = store.put_message(Message("Orders", b"paid", keys=["A-1001"], tags="EU"), queue_id=0)
        assert store.message_at(put.phy_offset).body == b"paid"
    with MessageStore.open("wheel-orders", config=config, read_only=True) as store:
        assert [m.body for m in store.get_message("Orders", queue_id=0, queue_offset=0).messages] == [b"paid"]
        assert [m.msg_id for m in store.query_message("Orders", "A-1001").messages] == [put.msg_id]
    with QueueIndex.open("wheel-queue", segment_entry_count=2048, create=True) as index:
        index.publish_many([QueueMessage(b"paid", routing_keys=["orders"])], deliver=True)
    with QueueIndex.open("wheel-queue", segment_entry_count=2048, read_only=True) as index:
        assert [QueueMessage.from_term(entry.message).body for entry in index] == [b"paid"]
    print("rmqstore", rmqstore.__version__, "works from", Path(rmqstore.__file__).parent)


def demo() -> None:
    """Run the demo with few messages of its own, and unpack the sample store, where the command line can run at all."""
    if not all(map(importlib.util.find_spec, ("click", "rich"))):
        print("no demo: the command line needs click and rich")
        return
    for arguments, said in (
        (["--messages", "300"], "All checks passed."),
        (["--unpack", "wheel-sample"], "rmqstore info wheel-sample"),
    ):
        command = [sys.executable, "-I", "-m", "rmqstore", "demo", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600, check=False)
        if done.returncode or said not in done.stdout:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print("the demo runs on the sample store of the wheel")


def sessions(document: Path) -> None:
    """Run the sessions of `document` in one namespace; exit if an answer is not the one that is shown."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {"__name__": "__main__"}, document.name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test)
    if runner.failures or not runner.tries:
        sys.exit(f"{runner.failures} of {runner.tries} answers of {document.name} are not as shown")
    print(f"{runner.tries} calls of {document.name} answer as shown")


def use(document: Path) -> None:
    """Try the installed package in a folder of its own."""
    document = document.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        import rmqstore

        if ROOT in Path(rmqstore.__file__).resolve().parents:
            sys.exit(f"{rmqstore.__file__} is the tree, not an installed wheel")
        assert rmqstore.__version__ == version("rmqstore"), (rmqstore.__version__, version("rmqstore"))
        main_calls()
        demo()
        sessions(document)
        os.chdir("/")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["contents", wheel]:
            contents(wheel)
        case ["use", document]:
            use(Path(document))
        case _:
            sys.exit(__doc__)
