# What the other compiled modules of the RabbitMQ side ask of a term.

from libc.stdint cimport int64_t

# The 16 bytes of the message id inside the message term of exactly n bytes at p; NULL where it is not one, or has none.
# `body_size` is -1 where another protocol's form does not say it.
cdef const unsigned char* message_id(const unsigned char* p, int64_t n, int64_t* body_size) noexcept nogil
