# Declarations of _bytes.h: byte order, the order of stores, copies and comparisons of short texts.

from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t, uint64_t


cdef extern from "_bytes.h":
    int16_t get_i16 "rmq_get_i16"(const unsigned char* p) noexcept nogil
    int32_t get_i32 "rmq_get_i32"(const unsigned char* p) noexcept nogil
    int64_t get_i64 "rmq_get_i64"(const unsigned char* p) noexcept nogil
    void put_i16 "rmq_put_i16"(unsigned char* p, int16_t x) noexcept nogil
    void put_i32 "rmq_put_i32"(unsigned char* p, int32_t x) noexcept nogil
    void put_i64 "rmq_put_i64"(unsigned char* p, int64_t x) noexcept nogil
    # True in builds with AddressSanitizer, or ThreadSanitizer.
    bint WATCHES_ADDRESSES "RMQ_WATCHES_ADDRESSES"
    bint WATCHES_THREADS "RMQ_WATCHES_THREADS"
    # Numbers that other threads and processes read: at a multiple of their size, and `..._at` anywhere.
    int32_t load_i32 "rmq_load_i32"(const unsigned char* p) noexcept nogil
    int64_t load_i64 "rmq_load_i64"(const unsigned char* p) noexcept nogil
    void store_i32 "rmq_store_i32"(unsigned char* p, int32_t x) noexcept nogil
    void store_i64 "rmq_store_i64"(unsigned char* p, int64_t x) noexcept nogil
    int32_t acquire_i32 "rmq_acquire_i32"(const unsigned char* p) noexcept nogil
    void publish_i32 "rmq_publish_i32"(unsigned char* p, int32_t x) noexcept nogil
    void publish_i64 "rmq_publish_i64"(unsigned char* p, int64_t x) noexcept nogil
    void publish_bytes "rmq_publish_bytes"(unsigned char* p, const void* data, int n) noexcept nogil
    int32_t load_i32_at "rmq_load_i32_at"(const unsigned char* p) noexcept nogil
    int16_t acquire_i16_at "rmq_acquire_i16_at"(const unsigned char* p) noexcept nogil
    int32_t acquire_i32_at "rmq_acquire_i32_at"(const unsigned char* p) noexcept nogil
    void publish_i16_at "rmq_publish_i16_at"(unsigned char* p, int16_t x) noexcept nogil
    void publish_i32_at "rmq_publish_i32_at"(unsigned char* p, int32_t x) noexcept nogil
    bint HAS_GIL "RMQ_HAS_GIL"
    int64_t add_pins "rmq_add_pins"(int64_t* p, int64_t n) noexcept
    int64_t atomic_or "rmq_atomic_or"(int64_t* p, int64_t n) noexcept nogil
    void release "rmq_release"(int64_t* p) noexcept nogil
    int64_t atomic_load "rmq_atomic_load"(int64_t* p) noexcept nogil
    unsigned char* atomic_take "rmq_atomic_take"(unsigned char** p) noexcept nogil
    # Both wrap on overflow.
    int64_t sum_of "rmq_sum"(int64_t a, int64_t b) noexcept nogil
    int64_t difference_of "rmq_difference"(int64_t a, int64_t b) noexcept nogil
    void prefetch "rmq_prefetch"(const void* p) noexcept nogil
    void check "rmq_assert"(bint ok) noexcept nogil
    # a mod d for 32-bit a and d.
    uint64_t mod_magic "rmq_mod_magic"(uint32_t d) noexcept nogil
    uint32_t fastmod "rmq_fastmod"(uint32_t a, uint64_t magic, uint32_t d) noexcept nogil
    int64_t before "rmq_before"(const unsigned char* p, int wanted, int64_t n, int64_t room) noexcept nogil
    void copy_bytes "rmq_copy"(unsigned char* to, const unsigned char* source, int64_t n, int64_t room) noexcept nogil
    void copy_exactly "rmq_copy_exactly"(unsigned char* to, const unsigned char* source, int64_t n) noexcept nogil
    bint copy_ascii "rmq_copy_ascii"(unsigned char* to, const unsigned char* source, int64_t n, int64_t room) noexcept nogil
    bint same_bytes_at "rmq_same"(const unsigned char* p, const unsigned char* q, int64_t n) noexcept nogil
    bint is_ascii "rmq_is_ascii"(const unsigned char* p, int64_t n) noexcept nogil
    void put_hex "rmq_put_hex"(unsigned char* to, const unsigned char* source, int n) noexcept nogil
    void put_hex_8 "rmq_put_hex_8"(unsigned char* to, const unsigned char* source) noexcept nogil
    void put_hex_8_8 "rmq_put_hex_8_8"(unsigned char* to, const unsigned char* first, const unsigned char* second) noexcept nogil
    void put_view "rmq_put_view"(unsigned char* to, const unsigned char* p, int64_t n, int64_t room, int32_t buffer,
                                 int64_t pos) noexcept nogil
    int VIEW_INLINE "RMQ_VIEW_INLINE"
