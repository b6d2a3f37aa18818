"""Count phrases that are hard to read, in docstrings, comments, messages and documents; fail above a ceiling.

    prose.py            compare the count with CEILING, which is a line of this file
    prose.py --list     show every place
    prose.py --lower    write the present count into CEILING, if it is lower

A single phrase can be right in its place.  The count shows the direction: it may only fall.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CEILING = 599
ROOT = Path(__file__).resolve().parent.parent
PHRASES = {
    name: re.compile(pattern)
    for name, pattern in {
        "a sentence that begins with a clause": r"(?:^|[.] )(?:What|Whether|Where|Who|As|So) [a-z]",
        "a person for a program": r"(?:^|[.;:,(] )[Ww]ho(?:ever)? (?:asks|reads|writes|calls|knows|has|may|holds|opens|gives)\b",
        "as of `x`": r"\b[Aa]s of (?=`|[a-z_]+\()",
        "is none": r"\b(?:is|are|was|were) none\b",
        "so many": r"\b[Ss]o many\b",
        "pass over, go over": r"\b(?:pass(?:es|ed|ing)?|go(?:es|ing)?|gone|went) over\b",
        "made again": r"\b(?:made|makes?|making) (?:\w+ ){0,3}again\b",
        "given out": r"\b(?:gives?|given|gave) (?:it )?out\b",
        "from ... on": r"\bfrom (?:\S+ ){1,6}on\b(?! (?:the|a|disk|this|its|each|that|which|every|one|all))",
        "old-fashioned": r"\ball the same\b|\bfor ever\b|\banew\b|\bmend(?:ed|s|ing)?\b|\bmeanwhile\b|\b(?:or|and) the like\b",
        "beside, in front of, behind": r"\bbeside\b|\bin front of\b|\bbehind (?:the|it|its|an?|that|which|them|another)\b",
        "leads nowhere, tells of": r"\bleads? nowhere\b|\btells? of\b|\bspeaks? for\b",
        "no more": r"\bno more\b(?! than)",
        "stands, lies": r"\b(?:stands|lies|lie) (?:in|there|before|behind|beside|after)\b",
        "stranger": r"\bstranger'?s?\b",
    }.items()
}
C_COMMENT = re.compile(r"#+ (.*)|/\*(.*)|^\s*\* (.*)|\"\"\"(.*)|^\s{4,}([A-Z`].*[.,;:]?)$")


def texts(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines of a file that people read."""
    if path.endswith((".py", ".pyi")):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                for number, line in enumerate(token.string.splitlines(), token.start[0]):
                    yield number, line.strip("#\"' ")
        return
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if not path.endswith((".md", ".html", ".txt")):
            comment = C_COMMENT.search(line)
            if comment:
                yield number, next(filter(None, comment.groups()), "")
        elif line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def found() -> Iterator[tuple[str, str]]:
    """Yield each phrase that a file of git's has, with its place."""
    suffixes = (".md", ".html", ".txt", ".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".sh", ".mk", "Makefile")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in listed.splitlines():
        if path.endswith(suffixes) and not path.startswith("tests/data/") and path != "ci/prose.py" and (ROOT / path).exists():
            for number, line in texts(path, (ROOT / path).read_text(encoding="utf-8", errors="replace")):
                for name, pattern in PHRASES.items():
                    for _ in pattern.finditer(line):
                        yield name, f"{path}:{number}: {line.strip()[:120]}"


def main(arguments: list[str]) -> None:
    """Count, and do what the only argument asks for."""
    places = list(found())
    count = len(places)
    if arguments == ["--list"]:
        print("\n".join(f"{place}  [{name}]" for name, place in places))
    elif arguments == ["--lower"] and count < CEILING:
        path = Path(__file__)
        path.write_text(re.sub(r"(?m)^CEILING = \d+$", f"CEILING = {count}", path.read_text("utf-8")), "utf-8")
    elif arguments not in ([], ["--lower"]):
        sys.exit(__doc__)
    print(f"{count} phrases that are hard to read; the ceiling is {CEILING}")
    if count > CEILING:
        print("\n".join(f"{num:6d}  {name}" for name, num in Counter(name for name, _ in places).most_common()))
        sys.exit("Say them plainly: `git diff` shows what is new, `python ci/prose.py --list` every place")


if __name__ == "__main__":
    main(sys.argv[1:])
