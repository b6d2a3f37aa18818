# Functions on terms for the other compiled modules of this package.

from libc.stdint cimport int64_t

# The 16 bytes of the message id inside the message term of exactly n bytes at p; NULL for another term, or without an id.
# `body_size` is -1 for a message in another protocol's form.
cdef const unsigned char* message_id(const unsigned char* p, int64_t n, int64_t* body_size) noexcept nogil

cdef struct Fault:
    int code
    int64_t pos

# The length of the well-formed term at p, at most n bytes, or -1 with the reason in `fault`.
cdef int64_t term_extent(const unsigned char* p, int64_t n, Fault* fault) noexcept nogil
