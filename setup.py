"""Builds the compiled modules; everything else about the package is stated in pyproject.toml.

Owns the compiler flags and the Cython directives.  RMQSTORE_DEBUG=1 in the environment makes a debug build: bounds
and initialisation checks, Cython's and C's asserts on, and compiler warnings shown.  The generated C lies under build/,
apart for the two kinds of build, so that one never takes the other's.  RMQSTORE_SANITIZE=address,undefined or =thread makes
a build that sanitizers watch (`make sanitize`): asserts on, but none of the debug build's checks, which would come first.
RMQSTORE_SANITIZE=fuzzer makes one whose branches and comparisons libFuzzer sees (`make fuzz`, ci/fuzz/coverage.c); it takes
gcc and x86-64, and an interpreter that has loaded libFuzzer.  With =fuzzer,address AddressSanitizer watches it, too.
RMQSTORE_PORTABLE=1 leaves out what belongs to one system or one processor: Linux's MADV_POPULATE_WRITE, and the
instructions for CRC and hash (`make test-portable`).  No -march: a wheel runs on every machine of its architecture, and
code for newer instructions is chosen at run time.

The same sources give the same bytes in whatever folder they are built: the folder's name is left out of what the compiler
writes, and so are the positions for a debugger, except in a debug build.  The times in a wheel or a source distribution are
that of SOURCE_DATE_EPOCH where that is set; `ci/checks.sh` builds twice and compares.
"""

import gzip
import os
import shutil
import sys
import sysconfig
import tarfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

MODULES = (
    "rmqstore._core",
    "rmqstore._columns",
    "rmqstore.rabbitmq._term",
    "rmqstore._rows",
    "rmqstore.rabbitmq._core",
    "rmqstore.rabbitmq._messages",
    "rmqstore.message._read",
    "rmqstore._dispatch",
)

DEBUG = os.environ.get("RMQSTORE_DEBUG", "0") not in ("", "0")
PORTABLE = os.environ.get("RMQSTORE_PORTABLE", "0") not in ("", "0")
# Names as of gcc's and clang's -fsanitize.
SANITIZERS = os.environ.get("RMQSTORE_SANITIZE", "")
# Modules take a quarter of a minute each, so they are translated and compiled side by side.
PROCESSES = min(len(MODULES), os.cpu_count() or 1)
C_FOLDER = os.path.join("build", "cython-debug" if DEBUG else "cython")

# The same in both builds: these change what the code means.  cdivision is C's (and Java's) remainder of a negative
# number.  wraparound stays off in the debug build too, because then its bounds checks refuse a negative index, where
# wrapping would quietly read from the end.
DIRECTIVES = {
    "language_level": "3",
    "binding": True,
    "cdivision": True,
    "embedsignature": True,
    # Objects that threads share guard themselves; their docstrings have the rule.
    "freethreading_compatible": True,
    "wraparound": False,
    "boundscheck": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "show_performance_hints": False,
}

# extra_compile_args come last on the command line: they win over what the interpreter was built with (often -DNDEBUG).
LINK_ARGS = []
MORE_SOURCES = []
if SANITIZERS in ("fuzzer", "fuzzer,address"):
    # -O1: with more, gcc folds branches into arithmetic that nobody sees.
    COMPILE_ARGS = ["-fsanitize-coverage=trace-pc,trace-cmp", "-O1", "-g0", "-UNDEBUG", "-w"]
    if SANITIZERS == "fuzzer,address":
        # Only compiled so: atheris brings libFuzzer and the sanitizer's runtime in one library, and gcc's would be a second.
        COMPILE_ARGS += ["-fsanitize=address", "-fno-omit-frame-pointer", "-U_FORTIFY_SOURCE", "-g1"]
    MACROS = []
    MORE_SOURCES = ["ci/fuzz/coverage.c"]
elif SANITIZERS:
    # A number that grows beyond its type is an error although -fwrapv, which Python is built with, gives it a meaning.
    # memcpy and its like are left as calls that a sanitizer knows.
    COMPILE_ARGS = [
        f"-fsanitize={SANITIZERS}", "-fno-omit-frame-pointer", "-fno-wrapv", "-U_FORTIFY_SOURCE",
        "-O1", "-g1", "-UNDEBUG", "-w",
    ]
    LINK_ARGS = [f"-fsanitize={SANITIZERS}"]
    MACROS = []
elif DEBUG:
    # Older compilers must refuse what gcc 14 and clang 16 refuse.
    COMPILE_ARGS = ["-O1", "-g", "-UNDEBUG", "-Wall", "-Werror=incompatible-pointer-types", "-Werror=int-conversion"]
    MACROS = []
else:
    # Warnings are for the debug build: here they are about what Cython generates, two hundred lines in a user's first minute.
    COMPILE_ARGS = ["-O3", "-g0", "-w", f"-ffile-prefix-map={os.getcwd()}=."]
    MACROS = [("CYTHON_WITHOUT_ASSERTIONS", "1"), ("NDEBUG", "1")]
# The generated C is the same; only the compiler sees this.
if PORTABLE:
    MACROS = [*MACROS, ("RMQSTORE_PORTABLE", "1")]
    COMPILE_ARGS = [*COMPILE_ARGS, "-U__SSE2__"]


def extension(name):
    """Describe the extension module `name`, whose source is the .pyx of that path; Cython finds the headers it depends on."""
    return Extension(
        name,
        sources=[name.replace(".", "/") + ".pyx", *MORE_SOURCES],
        include_dirs=["rmqstore"],
        define_macros=MACROS,
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=LINK_ARGS,
    )


def generated_before_setup_changed(name):
    """Tell whether the generated C is older than this file: Cython itself does not notice changed directives."""
    c_file = os.path.join(C_FOLDER, *name.split(".")) + ".c"
    return os.path.exists(c_file) and os.path.getmtime(c_file) < os.path.getmtime(__file__)


class Sdist(sdist):
    """A source distribution whose bytes follow from its files, where SOURCE_DATE_EPOCH says which time it is of."""

    def make_archive(self, *arguments, **options):
        """Write the archive; setuptools' own has the times, owners and order of the files in this folder."""
        path = super().make_archive(*arguments, **options)
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch and path.endswith(".tar.gz"):
            beside = path + ".part"
            with tarfile.open(path) as archive, open(beside, "wb") as file:
                with gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed:
                    with tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as ordered:
                        for member in sorted(archive.getmembers(), key=lambda member: member.name):
                            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
                            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                            member.pax_headers = {}
                            ordered.addfile(member, archive.extractfile(member) if member.isfile() else None)
            os.replace(beside, path)
        return path


class BuildExt(build_ext):
    """Translate the Cython sources and compile them; without a C compiler, fail before either."""

    def run(self):
        """Build the extension modules, or exit and name what is missing."""
        if self.extensions:
            missing = missing_tools()
            if missing:
                sys.exit(f"error: rmqstore is compiled from source here, which needs {missing}")
            self.translate()
        super().run()

    def translate(self):
        """Give each extension its generated C as its source; Cython skips what did not change."""
        from Cython.Build import cythonize

        translated = cythonize(
            [extension(name) for name in MODULES],
            build_dir=C_FOLDER,
            compiler_directives=DIRECTIVES,
            nthreads=PROCESSES,
            force=any(generated_before_setup_changed(name) for name in MODULES),
        )
        by_name = {each.name: each for each in translated}
        for each in self.extensions:
            each.sources, each.depends = by_name[each.name].sources, by_name[each.name].depends


def missing_tools():
    """Return what to install before a build can succeed, "" if nothing is missing."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        return (
            f"a C compiler: there is no {compiler!r} on the PATH. Install one (Debian, Ubuntu: apt install gcc python3-dev; "
            "Fedora: dnf install gcc python3-devel; macOS: xcode-select --install), or name yours in CC"
        )
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        return (
            f"Python's header files: there is no {header}. Install them (Debian, Ubuntu: apt install python3-dev; "
            "Fedora: dnf install python3-devel)"
        )
    return ""


def extensions():
    """Return the compiled modules; none with RMQSTORE_WITHOUT_CORE=1: an editable install then uses those built in place."""
    if os.environ.get("RMQSTORE_WITHOUT_CORE", "0") not in ("", "0"):
        return []
    return [extension(name) for name in MODULES]


# The processes that translate read this file again where they are not forks of this one (macOS, Python 3.14).
if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": BuildExt, "sdist": Sdist},
        ext_modules=extensions(),
        options={"build_ext": {"parallel": PROCESSES}},
    )
