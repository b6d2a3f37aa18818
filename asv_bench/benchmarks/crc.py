"""CRC-32 of bodies, each implementation that the machine has beside zlib's, and Java's hash of keys.

Every figure is of `total` bytes in calls of one size, so that those of one size compare; a call from Python costs about
as much as 1 KiB.  `time_scan_crc_columns` in `operations.py` has the CRC without that call.
"""

import random
import zlib

from rmqstore import _core


class Crc32:
    """Calls of one size over 8 MiB of random bytes; sizes from a short property list to a large body."""

    params = [[*_core.crc32_implementations(), "zlib"], [16, 64, 256, 1024, 4096, 65536, 8 << 20]]
    param_names = ["implementation", "size"]
    total = 8 << 20

    def setup(self, implementation, size):
        data = memoryview(random.Random(1).randbytes(self.total))
        # At most 64 Ki calls: what counts is the ratio at one size.
        self.parts = [data[at : at + size] for at in range(0, min(self.total, size << 16), size)]

    def time_crc32(self, implementation, size):
        if implementation == "zlib":
            crc32 = zlib.crc32
            for part in self.parts:
                crc32(part)
        else:
            crc32_with = _core.crc32_with
            for part in self.parts:
                crc32_with(implementation, part)


class JavaHash:
    """Hashes of 100 000 keys of one length, one call each."""

    params = [[8, 16, 20, 36, 64, 200]]
    param_names = ["key length"]
    n = 100_000

    def setup(self, length):
        numbers = random.Random(2)
        self.keys = [f"{numbers.getrandbits(800):0200x}"[:length] for _ in range(self.n)]

    def time_java_string_hash(self, length):
        java_string_hash = _core.java_string_hash
        for key in self.keys:
            java_string_hash(key)
