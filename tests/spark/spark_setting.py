"""The settings of the tests' Spark sessions, here and in other processes.

Owns saying whether Spark can run here, the environment variables that it needs, and its settings.  It starts nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unavailable_reason() -> str | None:
    """Why Spark cannot run here; None where it can."""
    for name in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            return f"the library {name} is not installed: pip install 'rmqstore[spark]'"
    java_home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (java_home and os.path.exists(os.path.join(java_home, "bin", "java"))):
        return "Spark needs Java 17 or later, and there is no java on the PATH and no JAVA_HOME"
    return None


def spark_environment() -> dict[str, str]:
    """The environment variables that a process which starts Spark needs, for `subprocess` as well."""
    paths = [
        str(ROOT),
        str(ROOT / "tests"),
        str(Path(__file__).parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


# Tests are over before Java's second compiler pays; without it, and with one thread for garbage, they take half as long.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
