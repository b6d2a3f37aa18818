# What other compiled modules of the package may share: the Region fence and the byte order, nothing of any format.

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from *:
    """
    #ifndef RMQSTORE_BYTES
    #define RMQSTORE_BYTES
    #include <assert.h>
    #include <stdint.h>
    #include <string.h>

    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define rmq_swap16(v) (v)
    #define rmq_swap32(v) (v)
    #define rmq_swap64(v) (v)
    #else
    #define rmq_swap16(v) __builtin_bswap16(v)
    #define rmq_swap32(v) __builtin_bswap32(v)
    #define rmq_swap64(v) __builtin_bswap64(v)
    #endif

    /* memcpy of a constant size is one load or store, and it is right at every alignment. */
    static inline int16_t rmq_get_i16(const unsigned char *p) { uint16_t v; memcpy(&v, p, 2); return (int16_t)rmq_swap16(v); }
    static inline int32_t rmq_get_i32(const unsigned char *p) { uint32_t v; memcpy(&v, p, 4); return (int32_t)rmq_swap32(v); }
    static inline int64_t rmq_get_i64(const unsigned char *p) { uint64_t v; memcpy(&v, p, 8); return (int64_t)rmq_swap64(v); }
    static inline void rmq_put_i16(unsigned char *p, int16_t x) { uint16_t v = rmq_swap16((uint16_t)x); memcpy(p, &v, 2); }
    static inline void rmq_put_i32(unsigned char *p, int32_t x) { uint32_t v = rmq_swap32((uint32_t)x); memcpy(p, &v, 4); }
    static inline void rmq_put_i64(unsigned char *p, int64_t x) { uint64_t v = rmq_swap64((uint64_t)x); memcpy(p, &v, 8); }

    /* Publishing in order: a reader in another thread or process that sees what comes after sees what came before. */
    static inline void rmq_release(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }
    static inline void rmq_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

    /* Pins change only while the GIL is held, where there is one; then a plain addition is enough, and much cheaper. */
    #ifdef Py_GIL_DISABLED
    #define RMQ_HAS_GIL 0
    static inline int64_t rmq_add_pins(int64_t *p, int64_t n) { return __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL); }
    #else
    #define RMQ_HAS_GIL 1
    static inline int64_t rmq_add_pins(int64_t *p, int64_t n) { return *p += n; }
    #endif
    static inline int64_t rmq_atomic_or(int64_t *p, int64_t n) { return __atomic_fetch_or(p, n, __ATOMIC_ACQ_REL); }
    static inline int64_t rmq_atomic_load(int64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline unsigned char *rmq_atomic_take(unsigned char **p) { return __atomic_exchange_n(p, (unsigned char *)0, __ATOMIC_ACQ_REL); }

    /* The empty statement is an effect: GCC takes a function that only prefetches for one without, and drops its calls. */
    static inline void rmq_prefetch(const void *p) { __builtin_prefetch(p, 1, 3); __asm__ volatile(""); }
    static inline void rmq_assert(int ok) { assert(ok); (void)ok; }
    #endif
    """
    int16_t get_i16 "rmq_get_i16"(const unsigned char* p) noexcept nogil
    int32_t get_i32 "rmq_get_i32"(const unsigned char* p) noexcept nogil
    int64_t get_i64 "rmq_get_i64"(const unsigned char* p) noexcept nogil
    void put_i16 "rmq_put_i16"(unsigned char* p, int16_t x) noexcept nogil
    void put_i32 "rmq_put_i32"(unsigned char* p, int32_t x) noexcept nogil
    void put_i64 "rmq_put_i64"(unsigned char* p, int64_t x) noexcept nogil
    void release_fence "rmq_release"() noexcept nogil
    void acquire_fence "rmq_acquire"() noexcept nogil
    bint HAS_GIL "RMQ_HAS_GIL"
    int64_t add_pins "rmq_add_pins"(int64_t* p, int64_t n) noexcept
    int64_t atomic_or "rmq_atomic_or"(int64_t* p, int64_t n) noexcept nogil
    int64_t atomic_load "rmq_atomic_load"(int64_t* p) noexcept nogil
    unsigned char* atomic_take "rmq_atomic_take"(unsigned char** p) noexcept nogil
    void prefetch "rmq_prefetch"(const void* p) noexcept nogil
    void check "rmq_assert"(bint ok) noexcept nogil


cdef class Region:
    cdef unsigned char* base
    cdef readonly int64_t size
    cdef readonly bint writable
    cdef int64_t state
    cdef object __weakref__

    cdef unsigned char* pin(self, int64_t pos, int64_t extent) except NULL
    cdef unsigned char* pin_writable(self, int64_t pos, int64_t extent) except NULL
    cdef void unpin(self) noexcept
