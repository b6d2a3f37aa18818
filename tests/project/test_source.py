"""Style as a test: rules about the sources themselves that no other tool checks.

Owns the direction of imports, the words that names avoid, the pointer rules of the compiled core (invariants I1 and
I3, by their text), and what tracked files may contain.  It reads files and runs one fresh interpreter; it never
changes anything.  Each rule asserts first that the files which it is about exist, so that none passes over nothing.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import rmqstore
from rmqstore import _columns, _core, _dispatch, _rows
from rmqstore.message import _read

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rmqstore"

# A room may import those to its left, and itself.  What is not a folder lies in the package's root.
ORDER = (
    "_unbuilt _version _shown errors arguments texts spans _numpy _bytes _crc32 _python _java_text _properties _core "
    "_record _dispatch _column_sink _columns _rows "
    "files message selection sources config rocksdb timer commitlog consumequeue index consumer flatfile store offline "
    "polars console cli demo spark testing __main__"
).split()
# What the RabbitMQ side shares with the RocketMQ side; otherwise neither knows the other.
SHARED_WITH_RABBITMQ = {"_shown", "_version", "errors", "_bytes", "_core", "_crc32", "files"}
# The command line is where both sides meet.
MAY_IMPORT_RABBITMQ = {"cli", "console", "spark"}
FACADE_LEAVES_OUT = {"cli", "console", "demo", "polars", "rabbitmq", "spark", "testing", "__main__"}
WEB = {"aiohttp", "bottle", "fastapi", "flask", "http", "jinja2", "socketserver", "starlette", "tornado", "uvicorn"}

# Modules that the package cannot be without: a rule over "all modules" is void if they are not found.
CERTAIN = {
    "__init__", "_core", "_version", "errors", "commitlog/commit_log", "index/index_file", "offline/rebuild", "store/message_store"
}  # fmt: skip


def module_files() -> list[Path]:
    files = [path for suffix in ("py", "pyx", "pxd", "pyi") for path in sorted(PACKAGE.rglob(f"*.{suffix}"))]
    assert CERTAIN <= {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in files}
    return files


def python_files() -> list[Path]:
    files = [path for path in module_files() if path.suffix == ".py"]
    for folder in ("tests", "asv_bench/benchmarks"):
        found = sorted((ROOT / folder).rglob("*.py"))
        assert found, f"no Python files in {folder}"
        files += found
    return files


def cython_files() -> list[Path]:
    files = [path for path in module_files() if path.suffix in (".pyx", ".pxd")]
    assert {PACKAGE / "_core.pyx", PACKAGE / "_core.pxd"} <= set(files)
    return files


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_part(path: Path) -> str:
    """The name in ORDER that a file belongs to: its module, or its subpackage."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.partition(".")[0]


class Parsed(NamedTuple):
    """What the rules ask of a Python file."""

    docstring: str | None
    classes: list[str]
    functions: list[str]
    #: (module with its dots, names that are taken from it), wherever in the file.
    imports: list[tuple[str, list[str]]]
    #: The names of `imports` that are not for a type checker alone.
    at_run_time: set[str]


@functools.cache
def parsed(path: Path) -> Parsed:
    """A Python file, parsed and gone through once for all rules; its tree is not kept."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = Parsed(ast.get_docstring(tree), [], [], [], set())
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for_types.update(each for statement in node.body for each in ast.walk(statement))
        if node not in for_types and isinstance(node, ast.Import):
            found.at_run_time.update(alias.name for alias in node.names)
        elif node not in for_types and isinstance(node, ast.ImportFrom):
            found.at_run_time.update(f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.functions.append(node.name)
        elif isinstance(node, ast.Import):
            found.imports.extend((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.imports.append(("." * node.level + (node.module or ""), [alias.name for alias in node.names]))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Imports


def absolute_name(module: str, path: Path) -> str:
    """Resolve the leading dots of an import in `path`."""
    dots = len(module) - len(module.lstrip("."))
    if not dots:
        return module
    package = path.parent.relative_to(ROOT).parts
    above = package[: len(package) - (dots - 1)]
    return ".".join([*above, module[dots:]]).rstrip(".")


def imported_names(path: Path) -> set[str]:
    """Every dotted name that a file imports or cimports, wherever in the file; `from a import b` gives a.b."""
    found: list[tuple[str, list[str]]] = []
    if path.suffix in (".py", ".pyi"):
        found += parsed(path).imports
    else:
        code = without_comments_and_strings(path.read_text(encoding="utf-8"))
        for match in re.finditer(r"(?m)^[ \t]*c?import[ \t]+([\w.]+)", code):
            found.append((match[1], []))
        for match in re.finditer(r"(?m)^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]*(\([^)]*\)|[^\n]*)", code):
            found.append((match[1], re.findall(r"(\w+)(?:[ \t]+as[ \t]+\w+)?", match[2])))
    names = set()
    for module, members in found:
        module = absolute_name(module, path)
        names |= {f"{module}.{member}" for member in members} or {module}
    return names


def imported_parts(path: Path) -> set[str]:
    """The names in ORDER that a file imports; `from rmqstore import Message` is an import of the facade, `__init__`."""
    parts = set()
    for name in imported_names(path):
        first, _, rest = name.partition(".")
        if first == "rmqstore":
            part = rest.partition(".")[0]
            is_module = any((PACKAGE / (part + suffix)).exists() for suffix in (".py", ".pyx", ".pxd", "/__init__.py"))
            parts.add(part if part and is_module else "__init__")
    return parts


def test_imports_point_one_way():
    wrong = []
    for path in module_files():
        importer = package_part(path)
        parts = imported_parts(path)
        if importer == "__init__":
            wrong += [f"{relative(path)} imports {part}" for part in parts & FACADE_LEAVES_OUT]
        elif importer == "rabbitmq":
            wrong += [f"{relative(path)} imports {part}" for part in parts - SHARED_WITH_RABBITMQ - {"rabbitmq"}]
        else:
            assert importer in ORDER, f"{relative(path)}: give the new module its place in ORDER"
            allowed = {*ORDER[: ORDER.index(importer)]}
            if importer in MAY_IMPORT_RABBITMQ:
                allowed.add("rabbitmq")
            if path.suffix == ".pyx":
                # What is only declared hangs on no module, so that every module may use it.
                allowed |= {part for part in parts if (PACKAGE / f"{part}.pxd").exists() and not (PACKAGE / f"{part}.pyx").exists()}
            if (PACKAGE / importer).is_dir() or path.suffix in (".pyx", ".pxd", ".pyi"):
                allowed.add(importer)
            wrong += [f"{relative(path)} imports {part}" for part in parts - allowed]
    assert not wrong


def test_no_modules_import_each_other():
    # Imports within functions count: they only hide a circle.
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in module_files() if path.suffix != ".pyi"}
    modules = {name.removesuffix(".__init__"): path for name, path in named.items()}
    graph = {}
    for name, path in modules.items():
        imports = parsed(path).at_run_time if path.suffix == ".py" else set()
        # A name of a module, or one in it.
        graph[name] = {each if each in modules else each.rpartition(".")[0] for each in imports} & modules.keys() - {name}
    assert "rmqstore.errors" in graph["rmqstore.store.writing"]
    list(graphlib.TopologicalSorter(graph).static_order())  # Raises CycleError with the modules of a circle.


def test_the_rule_sees_imports(tmp_path, monkeypatch):
    # The rule above is only worth something if every form of import is seen.
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "rmqstore")
    (tmp_path / "rmqstore" / "rabbitmq").mkdir(parents=True)
    for name in ("cli", "config", "message", "rabbitmq/__init__"):
        (tmp_path / "rmqstore" / f"{name}.py").write_text("")
    probe = tmp_path / "rmqstore" / "rabbitmq" / "probe.py"
    probe.write_text("import rmqstore.cli\ndef f():\n    from .. import config, Message\n    from ..message import M\n")
    assert imported_parts(probe) == {"cli", "config", "message", "__init__"}
    probe = tmp_path / "rmqstore" / "probe.pyx"
    probe.write_text("from .config cimport (\n    a,\n    b)\n# from .cli import x\ncimport rmqstore.message\n")
    assert imported_parts(probe) == {"config", "message"}


# How a directory is listed, each of which leaves it to the caller to tell errors apart.
LISTS = {"glob", "iglob", "iterdir", "listdir", "rglob", "scandir"}
MAY_LIST = {
    "console/application.py": "the package's own resources, which may lie in an archive",
    "demo.py": "the store that it just made, as a user's program would",
}


def listing_faults(source: str) -> set[str]:
    """The ways around `files/` that a Python file takes: errno, and its own listing of directories."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & {"errno", "glob"}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & {"errno", "glob"} | {alias.name for alias in node.names} & LISTS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {node.func.attr} & LISTS
    return found


def test_only_files_tests_errno_and_lists_directories():
    others = [path for path in module_files() if path.suffix == ".py" and package_part(path) != "files"]
    listing = {}
    for path in others:
        if found := listing_faults(path.read_text(encoding="utf-8")):
            listing[path.relative_to(PACKAGE).as_posix()] = found
    assert listing.keys() == MAY_LIST.keys(), "ask files/os_errors and files/listing"
    assert not any("errno" in found for found in listing.values())
    # The rule sees each way.
    assert listing_faults("import errno\nfrom glob import glob\nos.listdir('.')\nfor e in os.scandir('.'): e.x()") == {
        "errno", "glob", "listdir", "scandir"
    }  # fmt: skip


def test_importing_the_package_needs_no_extra_and_loads_no_web_and_no_spark():
    statements = (
        "import sys\n"
        "for name in ('lz4', 'polars', 'pyarrow', 'pyspark', 'zstandard'):\n"
        "    sys.modules[name] = None\n"
        "import rmqstore\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules if sys.modules[name] is not None}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", statements], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    loaded = set(ran.stdout.split())
    assert "rmqstore" in loaded
    assert not loaded & WEB


# ---------------------------------------------------------------------------------------------------------------------
# Docstrings and names


def test_every_module_says_what_it_owns():
    for path in python_files():
        assert parsed(path).docstring, f"{relative(path)} has no docstring"
    for path in cython_files():
        if path.suffix == ".pyx":
            code = re.sub(r"^(#[^\n]*\n|[ \t]*\n)*", "", path.read_text(encoding="utf-8"))
            assert code.startswith('"""'), f"{relative(path)} has no docstring"


# "base offset" is RocketMQ's own term, so the word is refused in names of classes only.
FORBIDDEN_WORDS = {"manager", "managers", "helper", "helpers", "util", "utils"}
FORBIDDEN_IN_CLASSES = FORBIDDEN_WORDS | {"base"}


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_names_say_what_a_thing_is():
    wrong = []
    for path in {*python_files(), *module_files()}:
        assert not words_of(path.stem) & FORBIDDEN_WORDS, relative(path)
        if path.suffix in (".py", ".pyi"):
            classes, functions = parsed(path).classes, parsed(path).functions
        else:
            code = without_comments_and_strings(path.read_text(encoding="utf-8"))
            classes = re.findall(r"(?m)^[ \t]*(?:cp?def[ \t]+)?(?:class|struct|enum|union)[ \t]+(\w+)", code)
            functions = [block.name for block in functions_of(code)]
        wrong += [f"{relative(path)}: class {name}" for name in classes if words_of(name) & FORBIDDEN_IN_CLASSES]
        wrong += [f"{relative(path)}: def {name}" for name in functions if words_of(name) & FORBIDDEN_WORDS]
    assert not wrong


# ---------------------------------------------------------------------------------------------------------------------
# The pointer rules of the compiled core, read from its text.  Comments and strings are blanked first; a block is the
# lines indented deeper than the line that opens it.

# Methods of Region that set, lend or give up the pointer; all its others pin like everybody else.
REGION_LIFETIME = {"map", "__cinit__", "pin", "drop", "unmap", "close", "__dealloc__"}


def without_comments_and_strings(source: str) -> str:
    """Blank comments and the contents of string literals, keeping every line break and indentation."""
    token = r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
    return re.sub(token, lambda match: "''" + "\n" * match[0].count("\n") if match[0][0] != "#" else "", source)


class Block:
    """A class or function of a Cython source: name, the class around it (or None), opening line, whole text."""

    def __init__(self, name: str, owner: str | None, head: str, body: str):
        self.name, self.owner, self.head, self.body = name, owner, head, body


def blocks(code: str, opening: str) -> list[tuple[re.Match[str], str]]:
    """Each line that `opening` matches, with the deeper indented lines below it."""
    found = []
    for match in re.finditer(rf"^(?P<indent>[ \t]*){opening}", code, re.MULTILINE):
        width = len(match["indent"])
        below = rf"[ \t]*\n|[ \t]{{{width + 1},}}[^\n]*\n|[ \t]{{{width}}}\)[^\n]*\n"
        body = re.match(rf"[^\n]*\n(?:{below})*", code[match.start() :] + "\n")
        assert body
        found.append((match, body[0]))
    return found


def classes_of(code: str) -> list[Block]:
    return [
        Block(match["name"], None, match[0], body)
        for match, body in blocks(code, r"(?:cdef[ \t]+)?(?:public[ \t]+|api[ \t]+)*class[ \t]+(?P<name>\w+)[^\n]*")
    ]


# A `cdef` with a parenthesis right after a name and no `=` before it is a function; `cdef int x = f(y)` is a variable.
FUNCTION = (
    r"(?:(?:async[ \t]+)?def|cp?def[ \t]+(?!class\b|extern\b|enum\b|struct\b|union\b)[^\n=(]*?)"
    r"[ \t]*\*?\b(?P<name>\w+)[ \t]*\([^\n]*"
)


def functions_of(code: str, owner: str | None = None) -> list[Block]:
    return [Block(match["name"], owner, match[0], body) for match, body in blocks(code, FUNCTION)]


def class_functions(code: str) -> list[Block]:
    """All functions of a source, each with the class that it stands in."""
    inside = [function for block in classes_of(code) for function in functions_of(block.body, block.name)]
    outside = code
    for block in classes_of(code):
        outside = outside.replace(block.body, "\n" * block.body.count("\n"))
    return inside + functions_of(outside)


# An attribute is a `cdef` line of a class body without parentheses; several names may share one type.
ATTRIBUTE = r"\s*cdef\s+(?:readonly\s+|public\s+)?(?P<type>[^(=]*?)(?P<names>\*[^(]*|\b\w+(?:\s*,\s*\w+)*)\s*$"


def pointer_attributes(code: str) -> set[tuple[str, str]]:
    """(class, attribute) of every attribute of a cdef class that is a pointer, or a struct that holds one."""
    pointer_structs = {
        match["name"]
        for match, body in blocks(code, r"(?:c(?:type)?def[ \t]+)?(?:packed[ \t]+)?struct[ \t]+(?P<name>\w+)[^\n]*")
        if "*" in body
    }
    found = set()
    for block in classes_of(code):
        lines = block.body.split("\n")[1:]
        depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        for line in lines:
            if len(line) - len(line.lstrip()) != depth:
                continue
            match = re.match(ATTRIBUTE, line)
            if match and ("*" in line or set(re.findall(r"\w+", match["type"])) & pointer_structs):
                found |= {(block.name, name) for name in re.findall(r"(\w+)\s*(?:,|$)", line)}
    return found


def test_only_region_stores_a_pointer():
    # I1.  Region's own is called base, in the shared declarations; rows that are to be written, and columns, lie in memory of
    # their own.
    found = set()
    for path in cython_files():
        found |= pointer_attributes(without_comments_and_strings(path.read_text(encoding="utf-8")))
    # What Region keeps of the list of mappings (_fault.h) is a place in that list, which is never freed.
    own = {("RowBatch", "rows"), ("RowBatch", "arena"), ("LocationTable", "slots"), ("Room", "p"), ("Region", "watched")}
    assert found == {("Region", "base")} | own


def test_no_module_level_pointer_variable():
    # I1.  A constant table is fine; a variable that could keep a mapping's address is not.
    for path in cython_files():
        code = without_comments_and_strings(path.read_text(encoding="utf-8"))
        heads = {function.head.strip() for function in functions_of(code)}
        for line in re.findall(r"^cdef[ \t][^\n]*\*[^\n]*", code, re.MULTILINE):
            if line.strip() not in heads and "extern" not in line:
                assert re.match(r"cdef\s+const\b", line), f"{relative(path)}: {line}"


# Slots of types, calls and free lists of our own: what a message or a method costs is CPython's business.
BACK_DOORS = re.compile(r"\b(tp_\w+|\w*vectorcall\w*|freelist|PyType_Modified|PyObject_GC_(?:New|Track|Del))\b", re.IGNORECASE)


def test_no_type_is_changed_by_hand():
    # Code in C is in strings, so that these are looked at, too.
    for path in cython_files():
        assert not BACK_DOORS.findall(path.read_text(encoding="utf-8")), relative(path)
    assert BACK_DOORS.findall("kind.tp_dealloc = free\n@cython.freelist(4)\nobject PyObject_Vectorcall()") == [
        "tp_dealloc", "freelist", "PyObject_Vectorcall",
    ]  # fmt: skip


PINS = re.compile(r"\.pin(_writable)?\(|= pin_source\(")
UNPINS = re.compile(r"\.(unpin|drop)\(|\bunpin_source\(source\)$", re.MULTILINE)
# What pins for its caller, who is looked at as well.
LENDING = {"pin_writable", "pin_source"}


def pin_faults(code: str) -> list[str]:
    """Breaks of the pin rules (I1, I3) in one source, as sentences.

    1. Outside Region nobody reads the attribute `base`: a pointer comes from `pin` or `pin_writable`, which check.
    2. In Region a function that reads `base` pins, or is one of those that set, lend or give up the pointer.
    3. Who pins also unpins, in the same function.
    4. `unpin` raises where the mapping is lost; who only drops the pin, because there are several, asks and raises.

    A class that pins in `__cinit__` and unpins in `__dealloc__` holds its region pinned as long as it lives (a view);
    it is free of the first and the third rule.
    """
    faults = []
    functions = class_functions(code)
    pinning = {f.owner for f in functions if f.name == "__cinit__" and PINS.search(f.body)}
    holding = {f.owner for f in functions if f.name == "__dealloc__" and UNPINS.search(f.body) and f.owner in pinning}
    for function in functions:
        where = f"{function.owner + '.' if function.owner else ''}{function.name}"
        pins = PINS.search(function.body)
        reads = re.search(r"\.base\b", function.body)
        if reads and function.owner != "Region" and function.owner not in holding:
            faults.append(f"{where} reads the pointer of a region past its pin")
        if reads and function.owner == "Region" and not pins and function.name not in REGION_LIFETIME:
            faults.append(f"{where} uses the pointer without a pin")
        drops = ".drop(" in function.body and function.owner != "Region" and function.owner not in holding
        if drops and ".raise_lost(" not in function.body:
            faults.append(f"{where} drops a pin and lets the answer of a lost mapping out")
        if pins and not UNPINS.search(function.body) and function.owner not in holding and function.name not in LENDING:
            faults.append(f"{where} pins and never unpins")
    return faults


def test_every_use_of_a_region_pins():
    pinning = 0
    for path in cython_files():
        code = without_comments_and_strings(path.read_text(encoding="utf-8"))
        assert not pin_faults(code), relative(path)
        pinning += sum(bool(PINS.search(function.body)) for function in class_functions(code))
    assert pinning > 0, "no function pins: the rule looked at nothing"


SOUND = """
cdef class Region:
    cdef unsigned char* base
    cdef readonly int64_t size

    def __cinit__(self, object buffer):  # don't stop at a quote
        self.base = NULL

    cdef unsigned char* pin(self, int64_t pos, int64_t extent) except NULL:
        return self.base + pos

    def first(self):
        cdef unsigned char* p = self.pin(0, 1)
        try:
            return self.base[0]
        finally:
            self.unpin()


cdef inline int leaf(const unsigned char* p) noexcept nogil:
    return p[0]


def read(Region region):
    cdef const unsigned char* p = region.pin(0, 1)
    try:
        return leaf(p)
    finally:
        region.unpin()
"""


def test_the_pointer_rules_see_a_break():
    sound = without_comments_and_strings(SOUND)
    assert [f"{f.owner}.{f.name}" for f in class_functions(sound)] == [
        "Region.__cinit__",
        "Region.pin",
        "Region.first",
        "None.leaf",
        "None.read",
    ]
    assert pin_faults(sound) == []
    assert pointer_attributes(sound) == {("Region", "base")}
    assert pin_faults(sound.replace("region.unpin()", "pass")) == ["read pins and never unpins"]
    dropped = sound.replace("region.unpin()", "region.drop()")
    assert pin_faults(dropped) == ["read drops a pin and lets the answer of a lost mapping out"]
    assert not pin_faults(sound.replace("region.unpin()", "region.drop(); region.raise_lost()"))
    assert pin_faults(sound.replace("region.pin(0, 1)", "region.base")) == [
        "read reads the pointer of a region past its pin"
    ]
    assert pin_faults(sound.replace("self.pin(0, 1)", "NULL")) == ["Region.first uses the pointer without a pin"]
    for attribute in ("char *p", "readonly void* p", "const uint8_t** p", "unsigned char* p", "Cursor p"):
        broken = f"cdef struct Cursor:\n    char* at\n\n\ncdef class View:\n    cdef {attribute}\n    cdef int q\n"
        assert pointer_attributes(broken) == {("View", "p")}, attribute


# ---------------------------------------------------------------------------------------------------------------------
# The columns of Arrow, read from the text of `_column_sink` and `_columns`


def column_faults(sink: str, columns: str) -> list[str]:
    """Columns that some way of writing rows knows nothing of, as sentences.

    A column is of one kind; the function that writes its kind names it in a
    branch of its own; its text is counted in `lack_room`; and the short way of views fills it row by row.
    """
    enums = [body for _, body in blocks(sink, r"cdef enum:")]
    numbers = next(body for body in enums if "COL_NUM" in body)
    every = {name for name in re.findall(r"^\s+(COL_\w+)", numbers, re.MULTILINE)} - {"COL_NUM", "COL_VALUES"}
    functions = {block.name: block.body for block in functions_of(sink) + functions_of(columns)}

    def mask(name: str) -> set[str]:
        (value,) = re.findall(rf"(?m)^    {name} = (\([^)]*\)|[^\n]*)", "".join(enums))
        return set(re.findall(r"COL_\w+", value))

    def asked(name: str) -> set[str]:
        return set(re.findall(r"1 << (COL_\w+)", functions[name]))

    kinds = {"write_int64s": mask("IS_INT64"), "write_int32s": mask("IS_INT32"), "write_texts": mask("HAS_OFFSETS")}
    kinds["write_bits"] = every - set().union(*kinds.values())
    times = Counter(name for kind in kinds.values() for name in kind)
    faults = [f"{name} is of two kinds" for name, number in times.items() if number > 1]
    for name, wanted in kinds.items():
        named = set(re.findall(r"column [!=]= (COL_\w+)", functions[name]))
        faults += [f"{name} has no branch for {column}" for column in sorted(wanted - named)]
        if "return NO_WRITER" not in functions[name]:
            faults.append(f"{name} takes a column that it does not know for another")
    faults += [f"lack_room does not ask for {column}" for column in sorted(kinds["write_texts"] - asked("lack_room"))]
    short_way = set().union(*map(asked, ("put_numbers", "put_texts", "put_split_texts")))
    short_way |= set(re.findall(r"main\[(COL_\w+)\]", functions["view_rows_of"]))
    return faults + [f"the short way of views does not fill {column}" for column in sorted(every - short_way)]


def test_every_column_has_a_branch_of_its_own():
    sink, columns = (
        without_comments_and_strings((PACKAGE / name).read_text(encoding="utf-8"))
        for name in ("_column_sink.pxd", "_columns.pyx")
    )
    assert column_faults(sink, columns) == []
    # A new column, as one forgets its branch.
    number = "    COL_NUM\n"
    assert number in sink
    grown = sink.replace(number, "    COL_NEW\n" + number)
    short = "the short way of views does not fill COL_NEW"
    assert column_faults(grown, columns) == ["write_bits has no branch for COL_NEW", short]
    for kind, wanted in (
        ("IS_INT64 = (", ["write_int64s has no branch for COL_NEW"]),
        ("IS_INT32 = ", ["write_int32s has no branch for COL_NEW"]),
        ("HAS_OFFSETS = (", ["write_texts has no branch for COL_NEW", "lack_room does not ask for COL_NEW"]),
    ):  # fmt: skip
        assert kind in grown
        assert column_faults(grown.replace(kind, f"{kind}1 << COL_NEW | ", 1), columns) == [*wanted, short], kind
    taken = sink.replace("        return NO_WRITER\n", "        pass\n")
    assert taken != sink and len(column_faults(taken, columns)) == len(re.findall("return NO_WRITER", sink)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Tracked files


def tracked_files() -> list[Path]:
    """What git tracks or would add; in a source distribution, which has no git, all files but builds and caches."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        left_out = {"build", "dist", ".venv", "__pycache__"}
        files = [path for path in ROOT.rglob("*") if not left_out & {*path.relative_to(ROOT).parts}]
    files = [path for path in files if path.is_file() and not path.is_symlink()]
    assert {ROOT / "pyproject.toml", ROOT / "setup.py", PACKAGE / "_core.pyx", Path(__file__).resolve()} <= set(files)
    return files


def tracked_texts() -> list[tuple[Path, str]]:
    texts = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192]:
            try:
                texts.append((path, content.decode("utf-8")))
            except UnicodeDecodeError:
                continue
    return texts


def test_files_end_with_one_newline():
    for path, text in tracked_texts():
        # Test data are other systems' bytes, ended as those systems do.
        if text and not relative(path).startswith("tests/data/"):
            assert text.endswith("\n") and not text.endswith("\n\n"), relative(path)


def test_no_machine_paths():
    # Put together from pieces, so that this file holds none itself.
    patterns = [rf"/{'home'}/[a-z]\w*/", rf"/{'Users'}/[A-Za-z]\w*/", rf"/{'root'}/", rf"/{'work'}/"]
    patterns += [rf"\.\./{'shared'}\b", rf"\.\./\.{'library'}\b"]
    # What a match has in it, which is found far sooner than a match.
    literals = [f"/{name}/" for name in ("home", "Users", "root", "work")] + [f"../{'shared'}", f"../.{'library'}"]
    # A short path such as /data may rightly stand in an example.
    for path in (ROOT, Path.home()):
        if len(path.parts) > 2:
            patterns.append(re.escape(str(path)) + r"\b")
            literals.append(str(path))
    machine_path = re.compile("|".join(rf"(?<![\w/-]){pattern}" for pattern in patterns))
    found = []
    for path, text in tracked_texts():
        if any(literal in text for literal in literals):
            found += [f"{relative(path)}: {match[0]}" for match in machine_path.finditer(text)]
    assert not found


def test_the_first_lines_of_a_room_list_its_modules():
    rooms = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    assert len(rooms) > 15
    for room in rooms:
        modules = {path.stem for path in module_files() if path.parent == room} - {"__init__"}
        doc = parsed(room / "__init__.py").docstring
        assert doc is not None, room.name
        named = set(re.findall(r"(?<!`)`(\w+)`(?!`)", doc))
        if room.name == "cli":
            # A command's module is named in the list of commands, which follows.
            named |= set(re.findall(r'"rmqstore\.cli\.(\w+)"', (room / "__init__.py").read_text(encoding="utf-8")))
        assert modules <= named, f"{room.name}/__init__.py does not list {sorted(modules - named)}"
        heads = [line[2:].partition(":")[0] for line in doc.splitlines() if line.startswith("- `")]
        listed = {name for head in heads for name in re.findall(r"(?<!`)`(\w+)`(?!`)", head)}
        assert listed <= modules, f"{room.name}/__init__.py lists {sorted(listed - modules)}, which it has not"


def test_architecture_names_every_room():
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 120
    picture = "\n".join(lines).partition("```text\n")[2].partition("```")[0]
    named = set(re.findall(r"\w+", picture))
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    compiled = {path.stem for path in PACKAGE.glob("*.pyx")}
    assert rooms | compiled <= named, sorted((rooms | compiled) - named)
    # What the tables and the text name is there.
    for name in re.findall(r"`([\w/]+/[\w/*]+\.(?:py|pyx|pxd))`", "\n".join(lines)):
        root = ROOT / "tests" if "/test_" in name or name.startswith("tests/") else PACKAGE
        assert list(root.glob(name.removeprefix("tests/"))), name


def test_the_build_requirements_are_stated_equally():
    # The Makefile installs them by name, because a build without isolation expects them.
    stated = re.search(r"(?m)^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = re.search(r"(?m)^BUILD_REQUIREMENTS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert stated and installed
    requirements = re.findall(r'"([^"]+)"', stated[1])
    assert requirements and requirements == re.findall(r'"([^"]+)"', installed[1])


def test_an_edit_of_one_compiled_module_builds_that_one_alone(monkeypatch):
    # What Cython looks at before it translates a module: declarations and headers, no other module.
    from Cython.Build.Dependencies import create_dependency_tree

    monkeypatch.chdir(ROOT)
    tree = create_dependency_tree()
    sources = [relative(path) for path in cython_files() if path.suffix == ".pyx"]
    assert "rmqstore/_rows.pyx" in sources and len(sources) >= 8
    for source in sources:
        asked = {os.path.relpath(path, ROOT) for path in tree.all_dependencies(source)}
        assert asked & set(sources) == {source}
    assert "rmqstore/_record.pxd" in {os.path.relpath(path, ROOT) for path in tree.all_dependencies("rmqstore/message/_read.pyx")}


def test_the_tests_run_on_the_build_that_was_asked_for():
    # `make debug-test` names the folder of its build; otherwise it is the tree itself.
    expected = Path(os.environ.get("RMQSTORE_EXPECTED_BUILD", ROOT)).resolve()
    for module in (rmqstore, _core, _dispatch, _columns, _rows, _read):
        assert expected in Path(module.__file__).resolve().parents, module.__file__


def test_no_two_test_files_have_one_name():
    # Pytest imports test files by their names alone, and reads only one of two.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
