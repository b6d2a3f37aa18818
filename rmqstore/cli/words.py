"""What a person at a shell reads in place of what a Python program would: options as they are typed, plain words, and
near names.

Owns the translation of the package's own texts, which name Python's arguments and enums.  Texts from a store are not
for it, and programs that ask for JSON get names of enums as they are.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

from rmqstore._core import Verdict

__all__ = ["did_you_mean", "from_here", "in_words", "verdict_words"]

# What was found where a record should be.
_VERDICTS = {
    Verdict.EMPTY.name: "nothing but zeros",
    Verdict.RECORD.name: "a whole record",
    Verdict.BLANK.name: "the blank that ends a segment",
    Verdict.BAD_MAGIC.name: "no magic number of a record",
    Verdict.BAD_SIZE.name: "an impossible size",
    Verdict.BAD_LENGTH.name: "lengths that do not fit",
    Verdict.BAD_PHY_OFFSET.name: "a wrong phy offset",
    Verdict.BAD_BODY_CRC.name: "a wrong body CRC",
    Verdict.BAD_PROP_CRC.name: "a wrong CRC of the properties",
    "MISSING": "a missing segment",
}
# A name that stands alone as in "(EMPTY)", or one that can be nothing else.
_VERDICT = re.compile(r"\((EMPTY|RECORD|BLANK|MISSING)\)|\b(BAD_(?:MAGIC|SIZE|LENGTH|PHY_OFFSET|BODY_CRC|PROP_CRC))\b")
# A configuration with some options given, as Python writes it.
_INFER = re.compile(r"config=StoreConfig\.infer\(path, ((?:\w+=(?:'[^']*'|[^\s(),]+)(?:, )?)+)\)")
_OPTION = re.compile(r"\w+=(?:'[^']*'|[^\s(),]+)")
# Python's arguments, and what does the same at the command line.
_AS_TYPED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), typed)
    for pattern, typed in (
        (
            r"""Open it read-only to get out what is whole, with recovery="skip" to go on after the damage, """
            r"""or with recovery="truncate" to cut""",
            "rmqstore export --corrupt skip gets out what is whole; rmqstore recover --mode skip goes on after the "
            "damage, --mode truncate cuts",
        ),
        (r"""recovery=(['"])(\w+)\1""", r"rmqstore recover --mode \2"),
        (r"StoreConfig\.from_properties\('broker\.conf'\)", "--config broker.conf"),
        (r", or StoreConfig\.infer\(path\)", ", or without -o and --config, so that they are found from the files"),
        (
            r": open it with read_only=True, or make queue files of them",
            "; commands that only read work all the same. To write, make queue files of them",
        ),
        (
            r"(?:, or )?open (?:it|the store) with read_only=True",
            "; commands that only read work all the same",
        ),
        (r"give max_hash_slot_num and max_index_num", "give -o maxHashSlotNum=... -o maxIndexNum=..."),
        (r"MessageStore\.open\(path, drop_units=(\d+)\)", r"rmqstore recover --drop-units \1"),
        (r"\bdrop_units=(\d+)", r"--drop-units \1"),
        (r"declared=True \(--declared\)", "--declared"),
    )
)


def from_here(text: str) -> str:
    """str: with paths below the working directory as a person there would type them."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:
        return text
    # Only where a path begins: /data/ is not to be taken out of /mnt/data/store.
    return text if here == os.sep else re.sub(rf"(?<![^\s\[('\"=,:]){re.escape(here)}", "", text)


def in_words(text: str) -> str:
    """str: a text of the package as a person at a shell needs it."""
    text = _INFER.sub(lambda found: " ".join(f"-o {each}" for each in _OPTION.findall(found[1])), text)
    for pattern, typed in _AS_TYPED:
        text = pattern.sub(typed, text)
    return _VERDICT.sub(
        lambda found: f"({_VERDICTS[found[1]]})" if found[1] is not None else _VERDICTS[found[2]], text
    )


def verdict_words(name: str) -> str:
    """str: the words for the name of a verdict; what is none stays what it is."""
    return _VERDICTS.get(name, name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """str: the question whether one of the `known` names was meant; "" where none is near."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""
