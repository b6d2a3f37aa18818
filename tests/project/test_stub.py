"""The hand-written stubs say what the compiled modules have: the same public names and the same parameters.

Owns the comparison of every `rmqstore/**/*.pyi` with its compiled module, in both directions: a name that only one of
the two has is a fault, and so is a function whose parameters differ in name, order, kind or in having a default.  The
stub is parsed and never executed; types of parameters are mypy's business.  The comparison itself is tested on a
module with known faults, so that it cannot become one that finds nothing.

What the binary does not tell: parameters of `__init__`, `__new__` and of other special methods (Cython gives these no
signature), and the type of an attribute.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = sorted((ROOT / "rmqstore").rglob("*.pyi"))

# Special methods that the stub must name if the class defines them itself.  The rest every object has, or is
# Cython's own.  A constructor shows as __init__ only when it is written so: of __cinit__ the binary tells nothing.
SPECIAL = {
    "__bool__",
    "__call__",
    "__contains__",
    "__delitem__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__init__",
    "__iter__",
    "__len__",
    "__next__",
    "__setitem__",
}


def parameters_in_stub(node: ast.FunctionDef, bound: bool) -> list[str]:
    """The parameters as `name`, `name=`, `*name` or `**name`, with `*` and `/` as marks; without `self` if `bound`."""
    args = node.args
    positional = [arg.arg for arg in args.posonlyargs + args.args]
    first_default = len(positional) - len(args.defaults)
    listed = [name + ("=" if i >= first_default else "") for i, name in enumerate(positional)]
    if args.posonlyargs:
        listed.insert(len(args.posonlyargs), "/")
    if args.vararg:
        listed.append("*" + args.vararg.arg)
    elif args.kwonlyargs:
        listed.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults):
        listed.append(arg.arg + ("=" if default is not None else ""))
    if args.kwarg:
        listed.append("**" + args.kwarg.arg)
    return listed[1:] if bound else listed


def parameters_in_binary(function: object, bound: bool) -> list[str]:
    """The same of a function that has a signature, in the same notation."""
    listed: list[str] = []
    last = None
    star_seen = False
    for parameter in inspect.signature(function).parameters.values():
        if last is parameter.POSITIONAL_ONLY and parameter.kind is not last:
            listed.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY and not star_seen:
            listed.append("*")
            star_seen = True
        if parameter.kind is parameter.VAR_POSITIONAL:
            listed.append("*" + parameter.name)
            star_seen = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            listed.append("**" + parameter.name)
        else:
            listed.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
        last = parameter.kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        listed.append("/")
    return listed[1:] if bound else listed


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPECIAL


def names_in_stub(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The public names that a module or class body of a stub declares; imported names are not declared there."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.setdefault(node.name, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    return {name: node for name, node in names.items() if is_public(name)}


def names_in_module(module: types.ModuleType) -> dict[str, object]:
    """The public names that the module itself defines: no modules, classes or functions that it imported."""
    return {
        name: value
        for name, value in vars(module).items()
        if is_public(name)
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    }


def names_in_class(cls: type) -> dict[str, object]:
    if issubclass(cls, enum.Enum):
        return dict(cls.__members__)
    return {name: value for name, value in vars(cls).items() if is_public(name)}


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def value_in_stub(node: ast.stmt) -> object:
    """The value that a stub states for a constant or an enum member, or `...` if it states none."""
    value = getattr(node, "value", None)
    try:
        return ... if value is None else ast.literal_eval(value)
    except ValueError:
        return ...


def faults_of_function(where: str, node: ast.FunctionDef, value: object, owner: type | None) -> list[str]:
    kinds = decorators(node)
    if owner is not None and kinds & {"property", "setter", "cached_property"}:
        good = inspect.isdatadescriptor(value)
        return [] if good else [f"{where} is a property in the stub and {type(value).__name__} in the binary"]
    for kind in (staticmethod, classmethod):
        if isinstance(value, kind) != (kind.__name__ in kinds):
            return [f"{where} is a {kind.__name__} in only one of stub and binary"]
    if owner is not None and node.name in SPECIAL:
        return []
    bound = owner is not None and "staticmethod" not in kinds
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not callable(function):
        return [f"{where} is a function in the stub and {type(value).__name__} in the binary"]
    if "overload" in kinds:
        return []
    try:
        binary = parameters_in_binary(function, bound)
    except ValueError:
        return [f"{where} has no signature in the binary: is binding off?"]
    stub = parameters_in_stub(node, bound)
    return [] if stub == binary else [f"{where}({', '.join(stub)}) in the stub, ({', '.join(binary)}) in the binary"]


def faults_of_class(where: str, node: ast.ClassDef, cls: object) -> list[str]:
    if not isinstance(cls, type):
        return [f"{where} is a class in the stub and {type(cls).__name__} in the binary"]
    stub, binary = names_in_stub(node.body), names_in_class(cls)
    if not issubclass(cls, enum.Enum) and "__init__" not in binary:
        # Written as __cinit__: the stub's __init__ is the only place that can say its parameters.
        stub.pop("__init__", None)
    faults = [f"{where}.{name} is missing in the stub" for name in sorted(binary.keys() - stub.keys())]
    faults += [f"{where}.{name} is in the stub only" for name in sorted(stub.keys() - binary.keys())]
    for name in stub.keys() & binary.keys():
        faults += faults_of(f"{where}.{name}", stub[name], binary[name], cls)
    return faults


def faults_of(where: str, node: ast.stmt, value: object, owner: type | None) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return faults_of_class(where, node, value)
    if isinstance(node, ast.FunctionDef):
        return faults_of_function(where, node, value, owner)
    stated = value_in_stub(node)
    actual = value.value if isinstance(value, enum.Enum) else value
    if stated is not ... and stated != actual:
        return [f"{where} is {stated!r} in the stub and {actual!r} in the binary"]
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Final[") and owner is None:
        kind = ast.unparse(node.annotation)[6:-1]
        if kind in ("int", "str", "bytes", "bool", "float") and type(actual).__name__ != kind:
            return [f"{where} is {kind} in the stub and {type(actual).__name__} in the binary"]
    # A type alias or a plain variable may hold anything but a function: that is declared by `def`.
    if inspect.isroutine(value):
        return [f"{where} is a variable in the stub and a function in the binary"]
    return []


def faults_of_module(source: str, module: types.ModuleType) -> list[str]:
    """Every difference between a stub's text and the module, as sentences."""
    stub, binary = names_in_stub(ast.parse(source).body), names_in_module(module)
    assert stub, "the stub declares nothing"
    assert binary, "the module has no public name"
    faults = [f"{name} is missing in the stub" for name in sorted(binary.keys() - stub.keys())]
    faults += [f"{name} is in the stub only" for name in sorted(stub.keys() - binary.keys())]
    for name in sorted(stub.keys() & binary.keys()):
        faults += faults_of(name, stub[name], binary[name], None)
    return faults


def test_every_compiled_module_has_a_stub():
    sources = sorted((ROOT / "rmqstore").rglob("*.pyx"))
    assert ROOT / "rmqstore" / "_core.pyx" in sources
    assert [path.with_suffix(".pyi") for path in sources] == STUBS


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_stub_says_what_the_binary_has(stub):
    name = ".".join(stub.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name)
    assert not module.__file__.endswith((".py", ".pyc")), "not the compiled module"
    assert faults_of_module(stub.read_text(encoding="utf-8"), module) == []


def probe_module() -> types.ModuleType:
    """A module whose every name is known, to try the comparison on."""
    source = """
import enum

ANSWER = 42

class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2

class Thing:
    def __init__(self, a):
        self.a = a
    def __len__(self):
        return 1
    @property
    def size(self):
        return 1
    @staticmethod
    def make(fd, size=0):
        return fd
    @classmethod
    def of(cls, x):
        return x
    def read(self, pos, /, size, *, fill=None, **rest):
        return pos

def walk(region, *parts, limit=None):
    return region
"""
    module = types.ModuleType("probe")
    exec(compile(source, "probe", "exec"), module.__dict__)
    return module


SOUND = """
from typing import Final
ANSWER: Final[int]
class Colour(int):
    RED = 1
    BLUE: int
class Thing:
    def __init__(self, a: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def size(self) -> int: ...
    @staticmethod
    def make(fd: int, size: int = 0) -> int: ...
    @classmethod
    def of(cls, x: int) -> int: ...
    def read(self, pos: int, /, size: int, *, fill: int | None = None, **rest: int) -> int: ...
def walk(region: Thing, *parts: int, limit: int | None = None) -> Thing: ...
"""


def test_a_sound_stub_has_no_faults():
    assert faults_of_module(SOUND, probe_module()) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("ANSWER: Final[int]", "", "ANSWER is missing in the stub"),
        ("ANSWER: Final[int]", "ANSWER: Final[str]", "ANSWER is str in the stub and int in the binary"),
        ("ANSWER: Final[int]", "ANSWER = 41", "ANSWER is 41 in the stub and 42 in the binary"),
        ("ANSWER: Final[int]", "def ANSWER() -> int: ...", "ANSWER is a function in the stub and int in the binary"),
        ("RED = 1", "RED = 3", "Colour.RED is 3 in the stub and 1 in the binary"),
        ("BLUE: int", "GREEN: int", "Colour.BLUE is missing in the stub"),
        ("BLUE: int", "BLUE: int\n    GREEN: int", "Colour.GREEN is in the stub only"),
        ("    def __len__(self) -> int: ...\n", "", "Thing.__len__ is missing in the stub"),
        ("    @property\n", "", "Thing.size is a function in the stub and property in the binary"),
        ("    @staticmethod\n", "", "Thing.make is a staticmethod in only one of stub and binary"),
        ("fd: int, size: int = 0", "fd: int, size: int", "Thing.make(fd, size) in the stub, (fd, size=) in the binary"),
        ("cls, x: int", "cls, y: int", "Thing.of(y) in the stub, (x) in the binary"),
        ("pos: int, /, size", "pos: int, size", "Thing.read(pos, size, *, fill=, **rest) in the stub, "
         "(pos, /, size, *, fill=, **rest) in the binary"),
        ("*parts: int", "*", "walk(region, *, limit=) in the stub, (region, *parts, limit=) in the binary"),
        ("def walk(region", "def walks(region", "walk is missing in the stub"),
        ("class Thing:", "class Other: ...\nclass Thing:", "Other is in the stub only"),
    ],
)  # fmt: skip
def test_a_faulty_stub_is_seen(old, new, fault):
    assert old in SOUND
    assert fault in faults_of_module(SOUND.replace(old, new, 1), probe_module())
