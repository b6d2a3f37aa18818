/* The limit of one key a call from Python: an index file whose calls hash the key, go to its slot, and write or read entries.
 *
 * Nothing that a caller gives is checked, nobody else is kept out, and an answer is a plain list of numbers. The header is
 * kept up as RocketMQ's, so that what is put here can be read by the others. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "index.h"

enum { BEGIN_TIME = 0, END_TIME = 8, BEGIN_OFFSET = 16, END_OFFSET = 24, SLOTS_USED = 32, COUNT = 36 };

static uint8_t *file;
static size_t file_size;
static uint32_t room;

static void put32(uint8_t *p, uint32_t v) { v = __builtin_bswap32(v); memcpy(p, &v, 4); }
static void put64(uint8_t *p, uint64_t v) { v = __builtin_bswap64(v); memcpy(p, &v, 8); }

/* open(path, slots, entries): the one file that the calls work on; it is there, with its whole size. */
static PyObject *open_file(PyObject *self, PyObject *args) {
    (void)self;
    const char *path;
    if (!PyArg_ParseTuple(args, "sII", &path, &slot_num, &room)) return NULL;
    if (file) munmap(file, file_size);
    file_size = HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * room;
    int fd = open(path, O_RDWR);
    if (fd < 0) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    file = mmap(NULL, file_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (file == MAP_FAILED) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    idx = file;
    if (!get32(file + COUNT)) put32(file + COUNT, 1);
    Py_RETURN_NONE;
}

static uint32_t hash_of(PyObject *text) {
    Py_ssize_t size;
    const char *key = PyUnicode_AsUTF8AndSize(text, &size);
    return without_sign(java_hash(0, (const uint8_t *)key, (size_t)size));
}

/* put_key(key, phy_offset, store_timestamp) */
static PyObject *put_key(PyObject *self, PyObject *const *args, Py_ssize_t num, PyObject *names) {
    (void)self, (void)num, (void)names;
    uint32_t count = get32(file + COUNT), hash = hash_of(args[0]);
    if (count >= room) Py_RETURN_FALSE;
    uint64_t offset = (uint64_t)PyLong_AsLongLong(args[1]), time = (uint64_t)PyLong_AsLongLong(args[2]);
    uint8_t *slot = file + HEADER + (size_t)SLOT * (hash % slot_num);
    uint32_t before = get32(slot);
    if (before >= count) before = 0;
    uint8_t *entry = file + HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * count;
    if (count == 1) put64(file + BEGIN_TIME, time), put64(file + BEGIN_OFFSET, offset);
    put32(entry, hash);
    put64(entry + 4, offset);
    put32(entry + 12, (uint32_t)((time - get64(file + BEGIN_TIME)) / 1000));
    put32(entry + 16, before);
    put32(slot, count);
    if (!before) put32(file + SLOTS_USED, get32(file + SLOTS_USED) + 1);
    put32(file + COUNT, count + 1);
    put64(file + END_TIME, time), put64(file + END_OFFSET, offset);
    Py_RETURN_TRUE;
}

/* select_phy_offset(key) */
static PyObject *select_phy_offset(PyObject *self, PyObject *const *args, Py_ssize_t num, PyObject *names) {
    (void)self, (void)num, (void)names;
    uint32_t hash = hash_of(args[0]);
    PyObject *found = PyList_New(0);
    for (uint32_t at = get32(file + HEADER + (size_t)SLOT * (hash % slot_num)); found && at;) {
        const uint8_t *entry = file + HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * at;
        at = get32(entry + 16);
        if (get32(entry) != hash) continue;
        PyObject *offset = PyLong_FromLongLong((long long)get64(entry + 4));
        if (offset) PyList_Append(found, offset);
        Py_XDECREF(offset);
    }
    return found;
}

#define CALL(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS, NULL}
static PyMethodDef calls[] = {
    CALL(put_key), CALL(select_phy_offset), {"open", open_file, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "one_key", NULL, -1, calls, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_one_key(void) { return PyModule_Create(&module); }
