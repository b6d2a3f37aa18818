# What the other compiled modules of the RabbitMQ side may ask of a term: where it ends and which message it is.

from libc.stdint cimport int64_t

# The length of the well-formed external term at p, its first byte (131) included, or -1.  At most n bytes are looked at.
cdef int64_t term_extent(const unsigned char* p, int64_t n) noexcept nogil

# The 16 bytes of the message id inside the message term at p (basic_message or mc, not compressed), or NULL.
cdef const unsigned char* message_id(const unsigned char* p, int64_t n) noexcept nogil
