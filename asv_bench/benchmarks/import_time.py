"""What an import costs: time and memory of fresh interpreters, bytecode in place.

The aim is 60 ms without Arrow.  An interpreter of its own and NumPy are part of any such figure, so they stand beside it.
"""

import os
import re
import subprocess
import sys

from . import _data


class Import:
    """A fresh interpreter that imports one thing and ends."""

    number = 1
    repeat = (5, 20, 10.0)
    params = ["nothing", "numpy", "rmqstore", "rmqstore.cli"]
    param_names = ["module"]

    def setup(self, module):
        self.folder = _data.scratch()
        # A cache of our own: where no bytecode may be written beside the sources, compiling would be most of the figure.
        self.environment = {**os.environ, "PYTHONPYCACHEPREFIX": self.folder}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.code = "" if module == "nothing" else f"import {module}"
        self.run(self.code)

    def teardown(self, module):
        _data.remove(self.folder)

    def run(self, code):
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=self.environment).stdout

    def time_import(self, module):
        self.run(self.code)

    def track_milliseconds_of_import(self, module):
        """Of the import alone, as the new interpreter's clock says; the median of nine."""
        code = f"import time\nbegin = time.perf_counter()\n{self.code}\nprint((time.perf_counter() - begin) * 1000)"
        return sorted(float(self.run(code)) for _ in range(9))[4]

    track_milliseconds_of_import.unit = "ms"

    def track_peak_memory(self, module):
        """The most memory that the new interpreter had at a time (Linux)."""
        # Not getrusage: its maximum is that of the process which it was forked from, where that had more.
        said = self.run(f"{self.code}\nprint(open('/proc/self/status').read())")
        return int(re.search(r"^VmHWM:\s+(\d+) kB$", said, re.MULTILINE)[1]) * 1024

    track_peak_memory.unit = "bytes"
