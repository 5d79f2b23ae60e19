/* `bitcheck.hooks._native`: what the recorder does for every tensor and every operation, in C.
 *
 * It is the same as the Python beside it, function by function, which runs where this was not compiled: no C compiler,
 * another implementation of Python. What is not plain goes back to the Python.
 *
 * Only Python's C API is used, no header of PyTorch's: tensors are asked through their Python methods, so that one
 * build serves every version of PyTorch. The interpreter's lock is held, but for waiting.
 */
#include "native.h"

/* As `native.INTERFACE`: one more with every change of what the two halves expect of each other. */
#define INTERFACE 6

#include "xxh3.h"

#define DEFINE_NAME(NAME) PyObject *name_##NAME;
#define DEFINE_NEED(NEED) PyObject *NEED;
PyObject *name_empty;
NAMES(DEFINE_NAME)
NEEDS(DEFINE_NEED)

static PyObject *hash_bytes(PyObject *module, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *digest = NULL;
    if (view.len < XXH3_MIN_BYTES)
        PyErr_Format(PyExc_ValueError, "%d bytes or more, not %zd", XXH3_MIN_BYTES, view.len);
    else if ((digest = PyBytes_FromStringAndSize(NULL, XXH3_DIGEST_BYTES)) != NULL)
        xxh3_128(view.buf, (size_t)view.len, (uint8_t *)PyBytes_AS_STRING(digest));
    PyBuffer_Release(&view);
    return digest;
}

static PyObject *choose(PyObject *module, PyObject *limit)
{
    const char *name = PyUnicode_AsUTF8(limit);
    if (name == NULL)
        return NULL;
    if (strcmp(name, "portable") != 0 && strcmp(name, "avx2") != 0 && strcmp(name, "avx512") != 0)
        return PyErr_Format(PyExc_ValueError, "portable, avx2 or avx512, not %R", limit);
    return PyUnicode_FromString(xxh3_choose(name));
}

static const struct {
    const char *name;
    PyObject **place;
} needs[] = {
#define LIST_NEED(NEED) {#NEED, &NEED},
    NEEDS(LIST_NEED)};

int is_configured(size_t begin, size_t end)
{
    for (size_t index = begin; index < end; index++)
        if (*needs[index].place == NULL) {
            PyErr_Format(PyExc_RuntimeError, "configure was not given %s", needs[index].name);
            return 0;
        }
    return 1;
}

static PyObject *configure(PyObject *module, PyObject *args, PyObject *given)
{
    if (PyTuple_GET_SIZE(args) > 0) {
        PyErr_SetString(PyExc_TypeError, "configure takes named arguments");
        return NULL;
    }
    PyObject *name, *value;
    for (Py_ssize_t position = 0; given != NULL && PyDict_Next(given, &position, &name, &value);) {
        size_t index = 0, count = sizeof needs / sizeof *needs;
        while (index < count && PyUnicode_CompareWithASCIIString(name, needs[index].name) != 0)
            index++;
        if (index == count)
            return PyErr_Format(PyExc_TypeError, "configure knows no %R", name);
        if (needs[index].place == &loaded_modules && !PyDict_Check(value))
            return PyErr_Format(PyExc_TypeError, "loaded_modules is a dict, not %R", Py_TYPE(value));
        Py_XSETREF(*needs[index].place, Py_NewRef(value));
    }
    Py_RETURN_NONE;
}

#define FAST(FUNCTION) (PyCFunction)(void (*)(void))(FUNCTION), METH_FASTCALL

static PyMethodDef methods[] = {
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS,
     "Take what the functions need of PyTorch and of the Python beside them, by name."},
    {"choose", choose, METH_O,
     "Hash by the quickest form up to \"portable\", \"avx2\" or \"avx512\"; return the name of the one taken."},
    {"xxh3_128", hash_bytes, METH_O, "Return XXH3-128, seed 0, of 17 bytes or more, as 16 canonical bytes."},
    {"is_paused", is_paused, METH_NOARGS, "Say whether one of these functions is at work in this thread."},
    {"digest_plain", digest_plain, METH_O, "As `tensors.digest_plain_portably`."},
    {"add_plain", FAST(add_plain), "As `steps.add_plain_portably`."},
    {"add_tensor", FAST(add_tensor),
     "As `StepBuilder.add_tensor` for a plain tensor, where nothing but the tensor counts; None where it is not so."},
    {"plain_on_device", plain_on_device, METH_O, "As `tensors.plain_on_device_portably`."},
    {"places_of", FAST(places_of), "As `layout.places_of_portably`; None where a tensor's memory is not there."},
    {"receive_leaves", receive_leaves, METH_VARARGS,
     "As `DeviceDigester._receive` for tickets whose leaves come in one flight; return the places of the others."},
    {"wait_for_number", wait_for_number, METH_VARARGS,
     "Wait until the int64 at an address has reached a number, the interpreter's lock let go; say whether it has."},
    {"submit_tensors", submit_tensors, METH_VARARGS,
     "As `DeviceDigester._submit` for up to FEW_TENSORS tensors in one launch; None where the Python has to."},
    {"begin_call", FAST(begin_call), "As `ModuleHooks._begin`."},
    {"end_call", FAST(end_call), "As `ModuleHooks._record_outputs`."},
    {"record_node", FAST(record_node), "As `_Outputs.__call__`, which hands itself over."},
    {"record_accumulated", FAST(record_accumulated), "As `GradientHooks._accumulated`."},
    {"plan_nodes", FAST(plan_nodes), "As `GradientHooks._plan_nodes`."},
    {"run_operation", FAST(run_operation), "As `OpHooks._run`."},
    {"begin_operation", FAST(begin_operation), "As `OpHooks._begin`."},
    {"end_operation", FAST(end_operation), "As `OpHooks._end`."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "bitcheck.hooks._native", "The recorder's compiled half.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
#define INTERN_NAME(NAME)                                                                                              \
    if ((name_##NAME = PyUnicode_InternFromString(#NAME)) == NULL)                                                     \
        return NULL;
    NAMES(INTERN_NAME)
    if ((name_empty = PyUnicode_InternFromString("")) == NULL)
        return NULL;
    xxh3_choose("avx512");
    PyObject *module = PyModule_Create(&definition), *memory_type = module != NULL ? make_memory_type() : NULL;
    if (memory_type == NULL || PyModule_AddObjectRef(module, "Memory", memory_type) < 0 ||
        PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    Py_XDECREF(memory_type);
    return module;
}
