"""What `import rmqstore` brings along: NumPy, and nothing that only the command line or a rare call needs.

Owns no measurement: how long an import takes is a benchmark (`asv_bench/benchmarks/import_time.py`).
"""

from __future__ import annotations

import subprocess
import sys

# Front ends, extras, and what brings further libraries along: shutil the compression libraries, secrets OpenSSL.
NOT_NEEDED = {
    "asyncio", "click", "cython", "hashlib", "ipaddress", "json", "lz4", "multiprocessing", "numpy.f2py", "numpy.random",
    "numpy.testing", "pandas", "pyarrow", "rich", "secrets", "shutil", "socket", "sqlite3", "ssl", "subprocess", "tempfile",
    "unittest", "urllib.request", "zstandard",
}  # fmt: skip


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded for `code`, without those that it has loaded by itself."""
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_only_what_every_use_needs():
    # What NumPy loads is not ours to say; it differs between its versions.
    numpy = modules_after("import numpy")
    loaded = modules_after("import rmqstore")
    assert {"rmqstore.message_store", "rmqstore._core", "numpy"} <= loaded
    assert not loaded & NOT_NEEDED - numpy
    assert not loaded & {"pyarrow", "click", "rich", "numpy.testing", "rmqstore.cli", "rmqstore.demo"}
