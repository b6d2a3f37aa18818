/* Arrow's C data interface (arrow.apache.org/docs/format/CDataInterface.html): how memory is handed to another library
   with a word on who lets go of it.

   Owns the structure and the end of its life.  Each array, a child too, holds a reference to the Python object that its
   memory belongs to, so that it may be moved out of its parent; no array is copied here. */

#ifndef RMQSTORE_ARROW_H
#define RMQSTORE_ARROW_H

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

/* The guard is the one that the interface's page asks for. */
#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};
#endif

static void rmq_arrow_release(struct ArrowArray *array) {
    int64_t i;
    for (i = 0; i < array->n_children; i++)
        if (array->children[i]->release) array->children[i]->release(array->children[i]);
    /* Any thread may let go, also when Python has ended; then there is nobody left to tell. */
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)array->private_data);
        PyGILState_Release(state);
    }
    free(array->buffers);
    array->release = NULL;
}

/* Makes an array of memory that belongs to `owner`, with room for its buffers, and children that are made likewise.
   Its last buffer has `size_num` numbers: of a view column the sizes of the buffers that its views lead into.  -1: no
   memory. */
static int rmq_arrow_make(struct ArrowArray *array, PyObject *owner, int64_t length, int64_t null_count,
                          int64_t buffer_num, int64_t size_num, int64_t child_num) {
    /* One piece of memory, of pointers and 64-bit numbers: buffers, pointers to the children, the children, sizes. */
    const size_t pointers = (size_t)(buffer_num + child_num), children = (size_t)child_num * sizeof(struct ArrowArray);
    char *memory = calloc(1, pointers * sizeof(void *) + children + (size_t)size_num * sizeof(int64_t) + 8);
    int64_t i;
    array->release = NULL;
    if (!memory) return -1;
    array->length = length;
    array->null_count = null_count;
    array->offset = 0;
    array->n_buffers = buffer_num;
    array->n_children = child_num;
    array->buffers = (const void **)memory;
    array->children = (struct ArrowArray **)(memory + (size_t)buffer_num * sizeof(void *));
    array->dictionary = NULL;
    for (i = 0; i < child_num; i++)
        array->children[i] = (struct ArrowArray *)(memory + pointers * sizeof(void *)) + i;
    if (size_num) array->buffers[buffer_num - 1] = memory + pointers * sizeof(void *) + children;
    Py_INCREF(owner);
    array->private_data = owner;
    array->release = rmq_arrow_release;
    return 0;
}

static inline void rmq_arrow_drop(struct ArrowArray *array) {
    if (array->release) array->release(array);
}

#endif
