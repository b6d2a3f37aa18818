"""Machine instructions of the pinned kernels, compared between commits: a check of speed that noise cannot decide.

Owns the comparison and `instructions.json`, the figures that were committed; what is counted is in `kernels.py`.  Counts
depend on the compiler and on Python as well as on our code.  Where those are the ones that the file was made with, the file
is what is compared with; elsewhere, or with --against, the commit before is built with the same tools and counted beside.

    python -m asv_bench.instructions                 compare; fails where a kernel takes over 10 % more
    python -m asv_bench.instructions --update        write the figures of this source into the file
    python -m asv_bench.instructions --against REV   compare with another commit, which is built for it
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FIGURES = Path(__file__).with_name("instructions.json")
CONSTANT_SOURCE = Path(__file__).with_name("constant.c")
LIMIT = 0.10
# What the kernels' instructions come from.
SOURCES = ("rmqstore", "setup.py", "pyproject.toml")
BUILT_FROM = (*SOURCES, "README.md", "LICENSE")


class IncomparableError(Exception):
    """The figures do not say whether a kernel became slower."""


class Row(NamedTuple):
    """A kernel's instructions an operation; `before` is None for one that was not there."""

    name: str
    before: float | None
    now: float

    @property
    def change(self) -> float:
        """float: how much more, as a part of what it was."""
        return 0.0 if self.before is None else self.now / self.before - 1

    @property
    def too_many(self) -> bool:
        """bool: over the limit."""
        return self.before is not None and self.now > self.before * (1 + LIMIT)


class Counted(NamedTuple):
    """What was counted on one source: instructions an operation, the versions that it was with, what could not run."""

    kernels: dict[str, float]
    setting: dict[str, str]
    missing: dict[str, str]


def compare(before: Mapping[str, float], now: Mapping[str, float], may_be_new: bool = False) -> list[Row]:
    """Put two counts side by side.

    Parameters
    ----------
    may_be_new : bool
        A kernel without an older figure is shown and not judged; otherwise it is an error.

    Raises
    ------
    IncomparableError
        A kernel is on one side only, or a figure is no positive number.
    """
    gone = sorted(before.keys() - now.keys())
    new = sorted(now.keys() - before.keys())
    if gone:
        raise IncomparableError(f"these kernels were counted before and are not now: {', '.join(gone)}")
    if new and not may_be_new:
        raise IncomparableError(f"there are no older figures of {', '.join(new)}; take them with --update")
    for figures in (before, now):
        for name, figure in figures.items():
            if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not 0 < figure < float("inf"):
                raise IncomparableError(f"{name}: {figure!r} is no number of instructions")
    return [Row(name, before.get(name), figure) for name, figure in now.items()]


def table(rows: Iterable[Row]) -> str:
    """The comparison as text, one kernel a line."""
    lines = [f"{'kernel':<42} {'before':>12} {'now':>12} {'change':>9}"]
    for row in rows:
        change = "new" if row.before is None else f"{row.change:+.1%}"
        before = "" if row.before is None else f"{row.before:,.1f}"
        lines.append(f"{row.name:<42} {before:>12} {row.now:>12,.1f} {change:>9}{'  TOO MANY' if row.too_many else ''}")
    return "\n".join(lines)


def per_operation(dumps: Mapping[str, int], kernels: Mapping[str, int]) -> dict[str, float]:
    """Instructions an operation, from the totals of n and of 2n operations.

    Raises
    ------
    IncomparableError
        A total is missing, or twice the work did not take more.
    """
    figures = {}
    for name, n in kernels.items():
        try:
            once, twice = dumps[f"{name}|{n}"], dumps[f"{name}|{2 * n}"]
        except KeyError as error:
            raise IncomparableError(f"callgrind left no count of {error}") from None
        if twice <= once:
            raise IncomparableError(f"{name}: {once} instructions for {n} operations, {twice} for {2 * n}")
        figures[name] = round((twice - once) / n, 1)
    return figures


def read_dumps(folder: Path) -> dict[str, int]:
    """Totals by mark, of the files that callgrind wrote into `folder`."""
    dumps = {}
    for path in folder.glob("callgrind.*"):
        text = path.read_text(encoding="utf-8", errors="replace")
        mark = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        if mark and total:
            dumps[mark[1].strip()] = int(total[1])
    return dumps


def compiler() -> str:
    """The C compiler's name and major version."""
    command = os.environ.get("CC", "cc").split()
    text = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    number = subprocess.run([*command, "-dumpversion"], check=True, capture_output=True, text=True).stdout
    return f"{'clang' if 'clang' in text else 'gcc'} {number.strip().split('.')[0]}"


def build_extension(source: Path, folder: Path) -> None:
    """Compile a module for this Python into `folder`."""
    include = sysconfig.get_path("include")
    command = [*os.environ.get("CC", "cc").split(), "-O2", "-shared", "-fPIC", f"-I{include}"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    subprocess.run([*command, "-o", str(folder / f"{source.stem}.so"), str(source)], check=True)


def count(tree: Path, scratch: Path) -> Counted:
    """Count the kernels with the package that is built in `tree`."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    library, answer = folder / "marks.so", folder / "answer.json"
    source = Path(__file__).with_name("callgrind.c")
    subprocess.run(
        [*os.environ.get("CC", "cc").split(), "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
    )
    build_extension(CONSTANT_SOURCE, folder)
    log = folder / "valgrind.log"
    done = subprocess.run(
        [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--log-file={log}",
            f"--callgrind-out-file={folder / 'callgrind'}",
            sys.executable, str(Path(__file__).with_name("kernels.py")), str(library), str(answer),
        ],
        # One order of hash tables in every run, and an allocator that does not keep to itself when it returns memory.
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join((str(tree), str(folder))),
            "PYTHONHASHSEED": "0",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "TMPDIR": str(folder),
        },
    )  # fmt: skip
    if done.returncode != 0 or not answer.exists():
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]) if log.exists() else ""
        raise IncomparableError(f"the kernels failed under valgrind (code {done.returncode})\n{tail}")
    told = json.loads(answer.read_text(encoding="utf-8"))
    if not Path(told["package"]).is_relative_to(tree):
        raise IncomparableError(f"{told['package']} was counted, not the package in {tree}")
    figures = per_operation(read_dumps(folder), told["kernels"])
    return Counted(figures, {"compiler": compiler(), **told["versions"]}, told["missing"])


def git(*arguments: str) -> str:
    """What git answers."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit_before() -> str:
    """The last commit if the sources differ from it, otherwise the one before they last changed."""
    if git("status", "--porcelain", "--", *SOURCES):
        return "HEAD"
    return git("log", "-1", "--format=%H", "--", *SOURCES) + "^"


def built(revision: str) -> Path:
    """The sources of a commit, with the core built; kept under build/instructions."""
    name = git("rev-parse", "--verify", revision + "^{commit}")
    tree = ROOT / "build" / "instructions" / name
    if not (tree / "built").exists():
        print(f"building {name[:12]} ({revision}) to compare with", flush=True)
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", name, *BUILT_FROM], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x"], cwd=tree, check=True, input=archive)
        subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=tree, check=True)
        (tree / "built").touch()
    return tree


def main(arguments: list[str] | None = None) -> int:
    """Count, compare, and say whether it is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the figures into instructions.json")
    parser.add_argument("--against", metavar="REV", help="compare with this commit instead of the file")
    options = parser.parse_args(arguments)
    try:
        return run(options.update, options.against)
    except IncomparableError as error:
        print(f"no comparison: {error}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        said = error.stderr if isinstance(error.stderr, str) else ""
        print(f"no comparison: {' '.join(error.cmd)} failed\n{said}", file=sys.stderr)
        if error.cmd[0] == "git":
            print("the commit before is needed, in a clone with its history; or give --update", file=sys.stderr)
    return 1


def run(update: bool, against: str | None) -> int:
    """As `main`, after the arguments are known."""
    if shutil.which("valgrind") is None:
        raise IncomparableError("valgrind is not installed (apt-get install valgrind)")
    with tempfile.TemporaryDirectory(prefix="rmqstore-instructions-") as name:
        now = count(ROOT, Path(name))
        if now.missing:
            raise IncomparableError(f"kernels that cannot run: {now.missing}")
        print("counted with " + ", ".join(f"{what} {which}" for what, which in now.setting.items()))
        if update:
            FIGURES.write_text(
                json.dumps({"setting": now.setting, "kernels": now.kernels}, indent=1) + "\n", encoding="utf-8"
            )
            print(table(Row(name, None, figure) for name, figure in now.kernels.items()))
            print(f"written to {FIGURES.relative_to(ROOT)}")
            return 0
        known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {"setting": {}, "kernels": {}}
        if against is None and known["setting"] == now.setting:
            print(f"compared with {FIGURES.relative_to(ROOT)}, instructions an operation")
            rows = compare(known["kernels"], now.kernels)
        else:
            if against is None:
                print(f"the committed figures were taken with {known['setting']}")
            before = count(built(against or commit_before()), Path(name))
            if before.setting != now.setting:
                raise IncomparableError(f"counted with {before.setting} and {now.setting}")
            for group, why in before.missing.items():
                print(f"not there before, in {group}: {why}")
            rows = compare(before.kernels, now.kernels, may_be_new=True)
    print(table(rows))
    slow = [row.name for row in rows if row.too_many]
    if slow:
        print(
            f"over {LIMIT:.0%} more instructions: {', '.join(slow)}.  If that is meant, say why in the commit and take the "
            "new figures: make instructions INSTRUCTIONS_ARGS=--update"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
