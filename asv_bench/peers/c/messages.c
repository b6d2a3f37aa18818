/* The limit of messages as Python objects: a store whose calls make the objects and do nothing else.
 *
 * Messages are found by their units in one file a queue, or by the chain of a key in one index file, in one segment. The CRC
 * of the body is checked; body, keys and queue offset are made for every message at once, the topic is one object for all.
 * Nothing that a caller gives and nothing on the disk is checked otherwise, no mapping is pinned, and no other attribute can
 * be had. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#include "index.h"

enum { QUEUES = 16, UNIT = 20 };

static const uint8_t *queues[QUEUES];
static PyObject *topic;
static const char *topic_text;
static uint32_t topic_size, prefix;

typedef struct { PyObject_HEAD PyObject *topic, *body, *keys, *queue_offset; } message;

static void end_message(PyObject *self) {
    message *made = (message *)self;
    Py_XDECREF(made->topic), Py_XDECREF(made->body), Py_XDECREF(made->keys), Py_XDECREF(made->queue_offset);
    Py_TYPE(self)->tp_free(self);
}

#define FIELD(of, name) {#name, T_OBJECT_EX, offsetof(of, name), READONLY, NULL}
static PyMemberDef message_fields[] = {
    FIELD(message, topic), FIELD(message, body), FIELD(message, keys), FIELD(message, queue_offset), {NULL, 0, 0, 0, NULL},
};
static PyTypeObject message_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "messages.Message",
    .tp_basicsize = sizeof(message),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = end_message,
    .tp_members = message_fields,
};

typedef struct { PyObject_HEAD PyObject *messages, *next_queue_offset; } result;

static void end_result(PyObject *self) {
    Py_XDECREF(((result *)self)->messages), Py_XDECREF(((result *)self)->next_queue_offset);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef result_fields[] = {FIELD(result, messages), FIELD(result, next_queue_offset), {NULL, 0, 0, 0, NULL}};
static PyTypeObject result_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "messages.Result",
    .tp_basicsize = sizeof(result),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = end_result,
    .tp_members = result_fields,
};

static PyObject *message_of(const record *r, size_t pos) {
    message *made = PyObject_New(message, &message_type);
    if (!made) return NULL;
    made->topic = Py_NewRef(topic);
    made->body = PyBytes_FromStringAndSize((const char *)r->body, r->body_size);
    made->queue_offset = PyLong_FromLongLong((long long)get64(segment + pos + 20));
    made->keys = PyList_New(0);
    property each;
    for (const uint8_t *name = r->properties; made->keys && take_property(name, r->end, &each); name = each.next + 1) {
        if (!is_named(&each, "KEYS")) continue;
        for (const uint8_t *one = each.value; one < each.next;) {
            const uint8_t *space = memchr(one, ' ', (size_t)(each.next - one));
            if (!space) space = each.next;
            PyObject *key = PyUnicode_DecodeUTF8((const char *)one, space - one, NULL);
            if (key) PyList_Append(made->keys, key);
            Py_XDECREF(key);
            one = space + 1;
        }
        break;
    }
    if (PyErr_Occurred()) Py_CLEAR(made);
    return (PyObject *)made;
}

/* get_message(topic, queue_id, queue_offset, max_num=...) */
static PyObject *get_message(PyObject *self, PyObject *const *args, Py_ssize_t num, PyObject *names) {
    (void)self, (void)num, (void)names;
    const uint8_t *queue = queues[PyLong_AsLong(args[1])];
    long at = PyLong_AsLong(args[2]), count = PyLong_AsLong(args[3]), end = at;
    while (end < at + count && get32(queue + (size_t)UNIT * (size_t)end + 8)) end++;
    result *made = PyObject_New(result, &result_type);
    if (!made) return NULL;
    made->next_queue_offset = PyLong_FromLong(end);
    made->messages = PyList_New(end - at);
    for (long i = at; made->messages && i < end; i++) {
        size_t pos = get64(queue + (size_t)UNIT * (size_t)i);
        record r = take_apart(segment + pos, pos);
        PyObject *each = message_of(&r, pos);
        if (!each) Py_CLEAR(made->messages);
        else PyList_SET_ITEM(made->messages, i - at, each);
    }
    if (PyErr_Occurred()) Py_CLEAR(made);
    return (PyObject *)made;
}

/* query_message(topic, key) */
static PyObject *query_message(PyObject *self, PyObject *const *args, Py_ssize_t num, PyObject *names) {
    (void)self, (void)num, (void)names;
    Py_ssize_t width;
    const char *key = PyUnicode_AsUTF8AndSize(args[1], &width);
    PyObject *found = key ? PyList_New(0) : NULL;
    if (!found) return NULL;
    chain c = chain_of(topic_text, topic_size, prefix, (const uint8_t *)key, (uint32_t)width);
    size_t pos;
    for (record r; next_record(&c, &r, &pos);) {
        PyObject *each = message_of(&r, pos);
        if (each) PyList_Append(found, each);
        Py_XDECREF(each);
    }
    if (PyErr_Occurred()) Py_CLEAR(found);
    return found;
}

/* take(segment, index, slots, topic, queue, ...): the one store that the calls ask. */
static PyObject *take(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t num = PyTuple_GET_SIZE(args), size;
    const char *paths[4 + QUEUES];
    if (num < 4 || num > 4 + QUEUES) return PyErr_Format(PyExc_TypeError, "take(segment, index, slots, topic, queue, ...)");
    for (Py_ssize_t i = 0; i < num; i++)
        if (i != 2 && !(paths[i] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(args, i)))) return NULL;
    segment = map_whole(paths[0]), idx = map_whole(paths[1]);
    slot_num = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(args, 2));
    topic = Py_NewRef(PyTuple_GET_ITEM(args, 3));
    topic_text = PyUnicode_AsUTF8AndSize(topic, &size);
    topic_size = (uint32_t)size, prefix = prefix_of(topic_text, topic_size);
    for (Py_ssize_t i = 4; i < num; i++) queues[i - 4] = map_whole(paths[i]);
    choose_crc();
    return PyUnicode_FromString(crc_name);
}

#define CALL(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS, NULL}
static PyMethodDef calls[] = {CALL(get_message), CALL(query_message), {"take", take, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "messages", NULL, -1, calls, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_messages(void) {
    return PyType_Ready(&message_type) < 0 || PyType_Ready(&result_type) < 0 ? NULL : PyModule_Create(&module);
}
