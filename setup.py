"""Builds the compiled modules; everything else about the package is stated in pyproject.toml.

Owns the compiler flags and the Cython directives.  RMQSTORE_DEBUG=1 in the environment makes a debug build: bounds
and initialisation checks, Cython's and C's asserts on, and compiler warnings shown.  The generated C lies under build/,
apart for the two kinds of build, so that one never takes the other's.  No -march: a wheel runs on every machine of its
architecture, and code for newer instructions is chosen at run time.
"""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

MODULES = ("rmqstore._core", "rmqstore.rabbitmq._core", "rmqstore.rabbitmq._term")
# Plain C that the modules include.
HEADERS = ("rmqstore/_crc32.h", "rmqstore/_java_hash.h")

DEBUG = os.environ.get("RMQSTORE_DEBUG", "0") not in ("", "0")
C_FOLDER = os.path.join("build", "cython-debug" if DEBUG else "cython")

# The same in both builds: these change what the code means.  cdivision is C's (and Java's) remainder of a negative
# number.  wraparound stays off in the debug build too, because then its bounds checks refuse a negative index, where
# wrapping would quietly read from the end.
DIRECTIVES = {
    "language_level": "3",
    "binding": True,
    "cdivision": True,
    "embedsignature": True,
    "wraparound": False,
    "boundscheck": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "show_performance_hints": not DEBUG,  # it would advise to switch the checks off
}

# extra_compile_args come last on the command line: they win over what the interpreter was built with (often -DNDEBUG).
if DEBUG:
    COMPILE_ARGS = ["-O1", "-g", "-UNDEBUG", "-Wall"]
    MACROS = []
else:
    COMPILE_ARGS = ["-O3"]
    MACROS = [("CYTHON_WITHOUT_ASSERTIONS", "1"), ("NDEBUG", "1")]


def extension(name):
    """Describe the extension module `name`, whose source is the .pyx of that path."""
    return Extension(
        name,
        sources=[name.replace(".", "/") + ".pyx"],
        include_dirs=["rmqstore"],
        depends=list(HEADERS),
        define_macros=MACROS,
        extra_compile_args=COMPILE_ARGS,
    )


def generated_before_setup_changed(name):
    """Tell whether the generated C is older than this file: Cython itself does not notice changed directives."""
    c_file = os.path.join(C_FOLDER, *name.split(".")) + ".c"
    return os.path.exists(c_file) and os.path.getmtime(c_file) < os.path.getmtime(__file__)


setup(
    ext_modules=cythonize(
        [extension(name) for name in MODULES],
        build_dir=C_FOLDER,
        compiler_directives=DIRECTIVES,
        force=any(generated_before_setup_changed(name) for name in MODULES),
    ),
    # Each module takes a minute or more, so they are compiled side by side.
    options={"build_ext": {"parallel": min(len(MODULES), os.cpu_count() or 1)}},
)
