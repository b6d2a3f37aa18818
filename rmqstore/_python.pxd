# CPython's functions that Cython lacks, or declares with counted references; rules for releasing the GIL.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t


cdef extern from "Python.h":
    ctypedef struct PyThreadState
    PyThreadState* PyEval_SaveThread()
    void PyEval_RestoreThread(PyThreadState* state)
    # Declared over borrowed pointers, so that hashing a list touches no reference count.
    int PyUnicode_KIND(PyObject* s)
    void* PyUnicode_DATA(PyObject* s)
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject* s)
    bint PyUnicode_Check(PyObject* s)
    bint PyUnicode_IS_ASCII(object s)
    PyObject* PyList_GET_ITEM(object items, Py_ssize_t i)
    PyObject* PyTuple_GET_ITEM(object items, Py_ssize_t i)
    str PyUnicode_DecodeUTF8(const char* s, Py_ssize_t size, const char* errors)
    object PyErr_SetFromErrno(object type)
    bint PyUnicode_IS_COMPACT_ASCII(PyObject* s)
    bint PyUnicode_CheckExact(PyObject* made)
    bint PyBytes_CheckExact(PyObject* made)
    bint PyDict_CheckExact(PyObject* made)
    bint PyLong_CheckExact(PyObject* made)
    str PyUnicode_New(Py_ssize_t size, uint32_t max_char)
    bint PyDict_Next(object mapping, Py_ssize_t* at, PyObject** key, PyObject** value)
    int64_t PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow)
    object PyType_GenericAlloc(type kind, Py_ssize_t num)
    void PyObject_GC_UnTrack(object made)
    void PyTuple_SET_ITEM(object made, Py_ssize_t i, object value)
    const char* PyUnicode_AsUTF8(object text) except NULL
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


cdef enum:
    # Nanoseconds of work below which the GIL is kept: a thread that releases it waits up to 5 ms (Python's switch interval)
    # for a thread that computes, and a batch of a thousand messages would do so ten times.
    WORTH_WAITING = 500_000
    # Estimated cost with warm caches: nanoseconds an index entry, nanoseconds a row without its bytes, bytes copied or
    # compared a nanosecond.
    PUT_COST = 50
    ROW_COST = 100
    COPIED_BYTES = 4


cdef inline PyThreadState* let_others_run(int64_t nanoseconds):
    # Release the GIL if work that touches no Python object takes long enough; `go_on` takes it back.
    return PyEval_SaveThread() if nanoseconds > WORTH_WAITING else NULL


cdef inline void go_on(PyThreadState* state) noexcept:
    if state != NULL:
        PyEval_RestoreThread(state)


cdef inline bint small_number(PyObject* value, int64_t* out) noexcept:
    # False if the value is no int or does not fit 64 bits.
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    out[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return overflow == 0


cdef inline int64_t clamped(offset) except? -1:
    # -1, which is no position, for a number of more than 64 bits.
    try:
        return offset
    except OverflowError:
        return -1
