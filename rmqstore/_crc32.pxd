# CRC-32 in the fastest form that the machine has (_crc32.h).  Each module has tables of its own: one that uses it calls
# `crc32_start` when it is imported.

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from "_crc32.h":
    void crc32_start "rmq_crc32_start"() noexcept
    uint32_t crc32_update "rmq_crc32_update"(uint32_t crc, const uint8_t* p, size_t n) noexcept nogil
    uint32_t crc32_shifted "rmq_crc32_shifted"(uint32_t crc, uint64_t n) noexcept nogil
    uint32_t crc32_by "rmq_crc32_by"(int i, uint32_t crc, const uint8_t* p, size_t n) noexcept nogil
    const char* crc32_name "rmq_crc32_name"(int i) noexcept
    int crc32_implementation_num "rmq_crc32_implementation_num"
