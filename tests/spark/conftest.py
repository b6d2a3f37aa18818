"""The Spark session that all tests of this folder share: `local[2]`, small, without a web page.

Owns starting and stopping it.  Where pyspark, pyarrow or Java is missing a test is skipped with the reason; with CI=true
it fails, since they must be there.  Workers run this interpreter and find the package where this process found it.
"""

from __future__ import annotations

import os

import pytest
from spark_setting import SETTINGS, spark_environment, unavailable_reason

__all__ = ["SETTINGS", "spark", "spark_environment", "unavailable_reason"]


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """The SparkSession of all tests of a process, with the data source registered."""
    reason = unavailable_reason()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    os.environ.update(spark_environment())
    from pyspark.sql import SparkSession

    import rmqstore.spark

    folder = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2]").appName("rmqstore tests")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    session = builder.config("spark.local.dir", str(folder / "local")).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    rmqstore.spark.register(session)
    yield session
    session.stop()
