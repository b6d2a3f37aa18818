"""The sysFlag of a record, and bodies compressed as its bits say.

No body grows beyond `MAX_BODY_SIZE`, whatever its stream promises.  LZ4 and ZSTD need libraries of the extra `compression`.
"""

from __future__ import annotations

import enum
import zlib

from rmqstore.errors import CorruptionError, MissingDependencyError, StoreError, UnsupportedFormatError

__all__ = [
    "MAX_BODY_SIZE",
    "BodySizeError",
    "CompressionType",
    "SysFlag",
    "compress_body",
    "compression_flags",
    "decompress_body",
]

MAX_BODY_SIZE = 256 * 1024 * 1024
"""Largest body in bytes that decompression produces; a broker's own default limit for a body is 4 MiB."""


class BodySizeError(CorruptionError):
    """A compressed body has more bytes than its reader takes."""


class SysFlag(enum.IntFlag):
    """Bits of a record's sysFlag field (RocketMQ's MessageSysFlag)."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    TRANSACTION_MASK = 0xC
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    NEED_UNWRAP = 0x40
    INNER_BATCH = 0x80
    COMPRESSION_MASK = 0x700


_QUEUED = (0, SysFlag.TRANSACTION_COMMIT.value)


def is_queued(sys_flag: int) -> bool:
    """Return True if a record with these bits gets a unit in its queue: no prepared or rolled back half of a transaction."""
    return sys_flag & SysFlag.TRANSACTION_MASK.value in _QUEUED


class CompressionType(enum.IntEnum):
    """Values of the three compression bits; 0 means ZLIB too (writers older than the field)."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3


_COMPRESSION_SHIFT = 8


def compression_flags(type: CompressionType | int | str) -> int:
    """The sysFlag bits that say that a body is compressed as `type` (a `CompressionType`, its number or its name)."""
    return SysFlag.COMPRESSED.value | _compression_type(type) << _COMPRESSION_SHIFT


def _compression_type(type: CompressionType | int | str) -> CompressionType:
    try:
        return CompressionType[type.upper()] if isinstance(type, str) else CompressionType(type)
    except (KeyError, ValueError):
        raise ValueError(f"unknown compression type {type!r}: give LZ4, ZSTD or ZLIB") from None


def _missing(library: str, type: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{type} bodies need the library {library}: install it with 'pip install rmqstore[compression]'"
    )


def compress_body(body: bytes, type: CompressionType | int | str, level: int | None = None) -> bytes:
    """Compress a body; the sysFlag bits that go with it are `compression_flags` of the same type.

    Parameters
    ----------
    body : bytes
    type : CompressionType, int or str
        LZ4 (one frame), ZSTD or ZLIB.
    level : int, optional
        The library's level; None takes RocketMQ's default of 5 for ZSTD and ZLIB.  Java's LZ4 takes no level; here it
        is that of the lz4 library, by default its fast mode.

    Raises
    ------
    MissingDependencyError
        The lz4 or zstandard library is not installed.
    """
    kind = _compression_type(type)
    if kind is CompressionType.ZLIB:
        return zlib.compress(body, 5 if level is None else level)
    if kind is CompressionType.LZ4:
        try:
            import lz4.frame
        except ImportError:
            raise _missing("lz4", "LZ4") from None
        # RocketMQ's reader (lz4-java) takes independent blocks only.
        return bytes(lz4.frame.compress(body, compression_level=level or 0, block_linked=False))
    try:
        import zstandard
    except ImportError:
        raise _missing("zstandard", "ZSTD") from None
    return bytes(zstandard.ZstdCompressor(level=5 if level is None else level).compress(body))


def decompress_body(body: bytes, sys_flag: int, max_size: int = MAX_BODY_SIZE) -> bytes:
    """Decompress a body if `sys_flag` marks it as compressed and it is not empty.

    Bytes after a whole stream are treated like in the libraries of RocketMQ's broker: ZLIB ignores them; LZ4 accepts further
    frames only; ZSTD accepts further frames and ignores fewer than 4 bytes.

    Raises
    ------
    CorruptionError
        The stream is damaged or cut short.
    BodySizeError
        It holds more than `max_size` bytes.
    UnsupportedFormatError
        A compression type that no release of RocketMQ defines (4 to 7).
    MissingDependencyError
        The lz4 or zstandard library is not installed.
    """
    if not sys_flag & SysFlag.COMPRESSED.value or not body:
        return body
    kind = (sys_flag & SysFlag.COMPRESSION_MASK.value) >> _COMPRESSION_SHIFT
    if kind in (0, CompressionType.ZLIB):
        return _decompress_zlib(body, max_size)
    if kind == CompressionType.LZ4:
        return _decompress_lz4(body, max_size)
    if kind == CompressionType.ZSTD:
        return _decompress_zstd(body, max_size)
    raise UnsupportedFormatError(f"RocketMQ does not define body compression type {kind} (sysFlag {sys_flag:#x})")


def _too_large(kind: str, max_size: int) -> BodySizeError:
    return BodySizeError(f"the {kind} body holds more than {max_size} bytes: too much to be a message")


def _broken(kind: str, error: object) -> CorruptionError:
    return CorruptionError(f"the {kind} body cannot be decompressed: {error}")


# Bytes of input and output in one step, so that memory is proportional to the output.
_ZLIB_STEP = 64 * 1024
_ZLIB_PIECE = 256 * 1024


def _decompress_zlib(body: bytes, max_size: int) -> bytes:
    stream = zlib.decompressobj()
    out: list[bytes] = []
    size = 0
    view = memoryview(body)
    for pos in range(0, len(view), _ZLIB_STEP):
        data: bytes | memoryview = view[pos : pos + _ZLIB_STEP]
        more = True
        while more and not stream.eof:
            try:
                piece = stream.decompress(data, _ZLIB_PIECE)
            except zlib.error as error:
                raise _broken("ZLIB", error) from None
            data = stream.unconsumed_tail
            more = len(piece) == _ZLIB_PIECE or len(data) > 0
            size += len(piece)
            if size > max_size:
                raise _too_large("ZLIB", max_size)
            out.append(piece)
        if stream.eof:
            return b"".join(out)
    raise _broken("ZLIB", "the stream is cut short")


_LZ4_MAGIC = 0x184D2204
_SKIPPABLE_MAGIC = 0x184D2A50
_LZ4_PIECE = 256 * 1024


def _decompress_lz4(body: bytes, max_size: int) -> bytes:
    try:
        import lz4.frame
    except ImportError:
        raise _missing("lz4", "LZ4") from None
    out: list[bytes] = []
    size = 0
    frames = 0
    rest = bytes(body)
    while rest:
        magic = int.from_bytes(rest[:4], "little")
        if len(rest) < 4:
            raise _broken("LZ4", f"{len(rest)} bytes follow the last frame")
        if magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            end = 8 + int.from_bytes(rest[4:8], "little")
            if len(rest) < end:
                raise _broken("LZ4", "a skippable frame is cut short")
            rest = rest[end:]
            continue
        if magic != _LZ4_MAGIC:
            raise _broken("LZ4", f"no frame begins with {magic:#010x}")
        frames += 1
        stream = lz4.frame.LZ4FrameDecompressor()
        data = rest
        try:
            # The output of a call is bounded, so that a small body cannot claim all the memory at once.
            while not stream.eof:
                piece = stream.decompress(data, max_length=_LZ4_PIECE)
                data = b""
                size += len(piece)
                if size > max_size:
                    raise _too_large("LZ4", max_size)
                out.append(piece)
                if not piece and not stream.eof and stream.needs_input:
                    raise _broken("LZ4", "the frame is cut short")
        except (RuntimeError, EOFError, MemoryError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise _broken("LZ4", error) from None
        rest = stream.unused_data or b""
    if not frames:
        raise _broken("LZ4", "it holds no frame")
    return b"".join(out)


# A block of 4 stored bytes may stand for 128 KiB, so that one step of the input gives 16 MiB at most.
_ZSTD_STEP = 512


def _decompress_zstd(body: bytes, max_size: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise _missing("zstandard", "ZSTD") from None
    out: list[bytes] = []
    size = 0
    pos = 0
    decompressor = zstandard.ZstdDecompressor()
    view = memoryview(body)
    while pos < len(view):
        if pos and len(view) - pos < 4:
            break
        stream = decompressor.decompressobj()
        try:
            while not stream.eof:
                step = view[pos : pos + _ZSTD_STEP]
                if not step:
                    raise _broken("ZSTD", "the frame is cut short")
                piece = stream.decompress(step)
                pos += len(step)
                size += len(piece)
                if size > max_size:
                    raise _too_large("ZSTD", max_size)
                out.append(piece)
        except (zstandard.ZstdError, MemoryError) as error:
            raise _broken("ZSTD", error) from None
        pos -= len(stream.unused_data)
    return b"".join(out)
