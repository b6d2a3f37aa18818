/* What Python itself takes for a call: a store that answers every call with the one object that it was given, and a
   message whose four attributes are always there.  Beside a kernel it shows how much of that is the interpreter's. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

typedef struct { PyObject_HEAD PyObject *answer; } constant;

static PyObject *give(PyObject *self, PyObject *const *args, Py_ssize_t num, PyObject *names) {
    PyObject *answer = ((constant *)self)->answer;
    (void)args, (void)num, (void)names;
    Py_INCREF(answer);
    return answer;
}

static int take(PyObject *self, PyObject *args, PyObject *names) {
    PyObject *answer;
    (void)names;
    if (!PyArg_ParseTuple(args, "O", &answer)) return -1;
    Py_INCREF(answer);
    Py_XSETREF(((constant *)self)->answer, answer);
    return 0;
}

static void end(PyObject *self) {
    Py_XDECREF(((constant *)self)->answer);
    Py_TYPE(self)->tp_free(self);
}

#define GIVES(name) {name, (PyCFunction)(void (*)(void))give, METH_FASTCALL | METH_KEYWORDS, NULL}
static PyMethodDef calls[] = {
    GIVES("put_message"), GIVES("get_message"), GIVES("query_message"),
    GIVES("put_key"), GIVES("select_phy_offset"), {NULL, NULL, 0, NULL},
};
static PyTypeObject constant_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "constant.Constant",
    .tp_basicsize = sizeof(constant),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = take,
    .tp_dealloc = end,
    .tp_methods = calls,
};

typedef struct { PyObject_HEAD PyObject *queue_offset, *body, *keys, *tags; } message;

static int take_fields(PyObject *self, PyObject *args, PyObject *names) {
    message *made = (message *)self;
    (void)names;
    if (!PyArg_ParseTuple(args, "OOOO", &made->queue_offset, &made->body, &made->keys, &made->tags)) return -1;
    Py_INCREF(made->queue_offset), Py_INCREF(made->body), Py_INCREF(made->keys), Py_INCREF(made->tags);
    return 0;
}

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(message, name), READONLY, NULL}
static PyMemberDef fields[] = {FIELD(queue_offset), FIELD(body), FIELD(keys), FIELD(tags), {NULL, 0, 0, 0, NULL}};
/* Its messages live as long as the process. */
static PyTypeObject message_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "constant.ConstantMessage",
    .tp_basicsize = sizeof(message),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = take_fields,
    .tp_members = fields,
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "constant", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_constant(void) {
    PyObject *made;
    if (PyType_Ready(&constant_type) < 0 || PyType_Ready(&message_type) < 0) return NULL;
    made = PyModule_Create(&module);
    if (made && PyModule_AddObject(made, "Constant", Py_NewRef((PyObject *)&constant_type)) < 0) Py_CLEAR(made);
    if (made && PyModule_AddObject(made, "ConstantMessage", Py_NewRef((PyObject *)&message_type)) < 0) Py_CLEAR(made);
    return made;
}
