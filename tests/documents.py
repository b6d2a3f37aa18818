"""Reading the project's documents: which there are, their fenced blocks, and running what the blocks show.

Owns the marker by which a block says that it is not run, an HTML comment on the line before it::

    <!-- not run: it needs a cluster -->

and the paths that documents use for examples (`PATHS`): a test puts its own in their place.  It never imports rmqstore and
never writes below the project; what it runs, it runs in the folder that it is given.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Only the project's own documents: no environments, builds, caches or results.
LEAVES_OUT = {"build", "dist", "env", "results", "html", "node_modules", "site"}
FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,}) *(?P<info>[^`\n]*)$")
NOT_RUN = re.compile(r"^ *<!-- not run: (\S.*?) -->$")

#: Where documents say that things lie, longest first, and the name below a test's folder that stands for it.
PATHS = {
    "/var/lib/rabbitmq/mnesia/rabbit@host": "node",
    "/data/rocketmq/store": "store",
    "s3a://archive": "archive",
    "/mnt/disk/store": "store",
    "/data": "data",
    "/tmp": "tmp",
}


def markdown_files() -> list[Path]:
    """Every document of the project, sorted."""
    files = [
        path
        for path in sorted(ROOT.rglob("*.md"))
        if not any(
            part.startswith(".") or part in LEAVES_OUT or part.endswith(".egg-info")
            for part in path.relative_to(ROOT).parts
        )
    ]
    assert ROOT / "docs" / "formats.md" in files
    return files


@dataclasses.dataclass(frozen=True)
class Fence:
    """A fenced block: its info string, its lines, the 1-based number of the first, and why it is not run, if so."""

    info: str
    lines: tuple[str, ...]
    number: int
    not_run: str = ""

    @property
    def text(self) -> str:
        """The lines as they would stand in a file, without the indentation that all have."""
        indent = min((len(line) - len(line.lstrip()) for line in self.lines if line.strip()), default=0)
        return "".join(line[indent:] + "\n" for line in self.lines)


def split_fences(text: str) -> tuple[str, list[Fence]]:
    """The text with every fenced block emptied (line numbers stay), and the blocks."""
    outside, fences = [], []
    mark, info, lines, first, reason, last = "", "", [], 0, "", ""
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if not mark and found:
            mark, info, lines, first = found["mark"], found["info"].strip(), [], number + 1
            comment = NOT_RUN.match(last)
            reason = comment[1] if comment else ""
            outside.append("")
        elif mark:
            outside.append("")
            if found and found["mark"].startswith(mark) and not found["info"].strip():
                fences.append(Fence(info, tuple(lines), first, reason))
                mark = ""
            else:
                lines.append(line)
        else:
            outside.append(line)
        last = line
    assert not mark, f"the fence that begins at line {first - 1} is never closed"
    return "\n".join(outside), fences


def fences_of(path: Path) -> list[Fence]:
    """The fenced blocks of a document."""
    return split_fences(path.read_text(encoding="utf-8"))[1]


def with_paths_below(text: str, folder: Path) -> str:
    """`text` with the documents' paths replaced by those of a test, all below `folder`."""
    pattern = "|".join(re.escape(path) for path in sorted(PATHS, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{pattern})(?![\w-])", lambda found: str(folder / PATHS[found[0]]), text)


def run_shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`, stopping at the first command that fails; `rmqstore` and `python` are those under test."""
    with tempfile.TemporaryDirectory() as programs:
        # Programs, not functions of the shell: what a script starts in the background is then what it kills.
        for name, arguments in (("rmqstore", "-m rmqstore"), ("python", "")):
            program = Path(programs, name)
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        path = programs + os.pathsep + os.environ.get("PATH", os.defpath)
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", with_paths_below(script, folder)],
            cwd=folder,
            env={**os.environ, "TZ": "UTC", "PYTHONIOENCODING": "utf-8", "COLUMNS": "200", **environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )


def run_python(path: Path, fences: list[Fence], folder: Path, names: dict[str, object]) -> dict[str, object]:
    """Run Python blocks one after the other in one namespace, which begins with `names`; errors cite the document's lines."""
    namespace = {"__name__": "__main__", **names}
    for fence in fences:
        source = "\n" * (fence.number - 1) + with_paths_below(fence.text, folder)
        exec(compile(source, str(path), "exec"), namespace)
    return namespace
