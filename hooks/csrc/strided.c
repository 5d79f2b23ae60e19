/* Strided tensors of a device to row-major order in the scratch buffer, as `DeviceDigester._gather` and `_copy` have it
 * for what a kernel of `row_major.py` copies. Those kernels are compiled when the Python launches them first; from then on
 * they are launched from here. */
#include "submit.h"

/* Places of the fields of `Arrangement`, and of `Transposed` and `Runs`; what they have of numbers. */
enum { ARRANGED_SHAPE, ARRANGED_STRIDES, ARRANGED_SPECIAL, NUM_ARRANGED };
enum { SPECIAL_SHAPE, SPECIAL_STRIDES, NUM_SPECIAL };
enum { TRANSPOSED_NUMBERS = 3, RUNS_NUMBERS = 4 };

#define ALIGNED_TO 16 /* as `LeafKernels.transpose`, of bytes and of elements */
#define MAX_WORD 8    /* as `LeafKernels.join_runs` */

/* What a kernel that copies is found under, as `shortcut.copy_key`. */
static long copy_key(int is_transpose, long long word_bytes, int is_aligned)
{
    return (long)word_bytes << 2 | is_transpose << 1 | is_aligned;
}

/* Take a kernel that copies, and read how much one program of it does: 1; 0 where it is not compiled yet; -1 with an
 * error set. */
static int take_kernel(PyObject *kernels, long key, Copy *copy, long long *block)
{
    PyObject *number = PyLong_FromLong(key);
    PyObject *kernel = number != NULL ? PyDict_GetItemWithError(kernels, number) : NULL;
    Py_XDECREF(number);
    if (kernel == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyTuple_Check(kernel) || PyTuple_GET_SIZE(kernel) != NUM_COPY_KERNEL) {
        PyErr_Format(PyExc_TypeError, "a CopyKernel, not %R", kernel);
        return -1;
    }
    *block = PyLong_AsLongLong(PyTuple_GET_ITEM(kernel, COPY_BLOCK));
    if (!PyErr_Occurred() && *block < 1)
        PyErr_SetString(PyExc_ValueError, "a program that copies has something to do");
    if (PyErr_Occurred())
        return -1;
    copy->kernel = Py_NewRef(kernel);
    return 1;
}

static long long ceil_div(long long number, long long by)
{
    return (number + by - 1) / by;
}

/* As `LeafKernels.transpose`: elements [B, R, C] with strides (b, 1, c). */
static int find_transpose(PyObject *kernels, uint64_t address, long long itemsize, const long long *shape,
                          const long long *strides, uint64_t out, Copy *copy)
{
    long long rows = shape[1], columns = shape[2], tile;
    uint64_t together = address | out | (uint64_t)(rows | columns | strides[0] | strides[1]);
    int found = take_kernel(kernels, copy_key(1, itemsize, together % ALIGNED_TO == 0), copy, &tile);
    if (found != 1)
        return found;
    copy->x = (unsigned)(ceil_div(rows, tile) * ceil_div(columns, tile));
    copy->y = (unsigned)shape[0];
    uint64_t values[] = {address, (uint64_t)rows, (uint64_t)columns, (uint64_t)strides[0], (uint64_t)strides[1], out};
    memcpy(copy->values, values, sizeof values);
    return 1;
}

/* As `LeafKernels.join_runs`: elements [A, B, C, R] with strides (a, b, c, 1). */
static int find_runs(PyObject *kernels, uint64_t address, long long itemsize, const long long *shape,
                     const long long *strides, uint64_t out, Copy *copy)
{
    /* In the largest words of which everything is a whole number. */
    uint64_t together = (uint64_t)((shape[3] | strides[0] | strides[1] | strides[2]) * itemsize);
    together |= address | out | MAX_WORD;
    long long word = (long long)(together & -together), many = word / itemsize, block;
    if (many < 1) /* elements that lie between words */
        return 0;
    int found = take_kernel(kernels, copy_key(0, word, 0), copy, &block);
    if (found != 1)
        return found;
    long long length = shape[3] / many, words = shape[0] * shape[1] * shape[2] * length;
    copy->x = (unsigned)ceil_div(words, block);
    copy->y = 1;
    uint64_t values[] = {
        address, (uint64_t)shape[1], (uint64_t)shape[2], (uint64_t)length, (uint64_t)words,
        (uint64_t)(strides[0] / many), (uint64_t)(strides[1] / many), (uint64_t)(strides[2] / many), out,
    };
    memcpy(copy->values, values, sizeof values);
    return 1;
}

/* Read a tuple of up to RUNS_NUMBERS numbers; returns how many they are, -1 with an error set. */
static Py_ssize_t read_numbers(PyObject *tuple, long long *numbers)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > RUNS_NUMBERS) {
        PyErr_Format(PyExc_TypeError, "extents or strides, not %R", tuple);
        return -1;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tuple); index++)
        numbers[index] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, index));
    return PyErr_Occurred() ? -1 : PyTuple_GET_SIZE(tuple);
}

/* Whether elements of a shape fill so many bytes: a tensor that another thread gives a new shape must not be copied
 * past the room that was made for it. */
static int fills(const long long *shape, Py_ssize_t num_dimensions, long long itemsize, long long num_bytes)
{
    long long filled = itemsize;
    for (Py_ssize_t index = 0; index < num_dimensions; index++) {
        if (shape[index] < 1 || filled > num_bytes / shape[index])
            return 0;
        filled *= shape[index];
    }
    return filled == num_bytes;
}

/* Find out how to copy a tensor that is arranged in a special way to `out`, as `DeviceDigester._copy`. */
static int find_special(PyObject *kernels, PyObject *tensor, PyObject *special, long long itemsize, long long num_bytes,
                        uint64_t out, Copy *copy)
{
    long long extents[RUNS_NUMBERS], strides[RUNS_NUMBERS];
    if (!PyTuple_Check(special) || PyTuple_GET_SIZE(special) != NUM_SPECIAL) {
        PyErr_Format(PyExc_TypeError, "Transposed or Runs, not %R", special);
        return -1;
    }
    Py_ssize_t num_extents = read_numbers(PyTuple_GET_ITEM(special, SPECIAL_SHAPE), extents);
    if (num_extents < 0)
        return -1;
    Py_ssize_t num_strides = read_numbers(PyTuple_GET_ITEM(special, SPECIAL_STRIDES), strides);
    if (num_strides < 0)
        return -1;
    uint64_t address = (uint64_t)number_of(tensor, name_data_ptr);
    if (PyErr_Occurred())
        return -1;
    if (address == 0 || num_strides != num_extents - 1 || !fills(extents, num_extents, itemsize, num_bytes))
        return 0;
    if (num_extents == TRANSPOSED_NUMBERS)
        return find_transpose(kernels, address, itemsize, extents, strides, out, copy);
    if (num_extents == RUNS_NUMBERS)
        return find_runs(kernels, address, itemsize, extents, strides, out, copy);
    return 0;
}

/* Find out how to copy a strided tensor to `out`: 1; 0 where it is not as `layout.special_of` has it, or no kernel is
 * compiled for it; -1 with an error set. */
static int find_copy(PyObject *shortcut, PyObject *tensor, long long num_bytes, uint64_t out, Copy *copy)
{
    int found = says(tensor, name_is_conj);
    if (found == 0)
        found = says(tensor, name_is_neg);
    if (found != 0)
        return found < 0 ? -1 : 0;
    long long itemsize = number_at(tensor, name_itemsize);
    if (PyErr_Occurred())
        return -1;
    if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8)
        return 0;
    PyObject *shape = get(tensor, name_shape), *arranged = NULL;
    PyObject *strides = shape != NULL ? PyObject_CallMethodNoArgs(tensor, name_stride) : NULL;
    if (strides != NULL)
        arranged = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(shortcut, SHORT_ARRANGEMENT), shape, strides, NULL);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    if (arranged == NULL)
        return -1;
    found = -1;
    if (!PyTuple_Check(arranged) || PyTuple_GET_SIZE(arranged) != NUM_ARRANGED)
        PyErr_Format(PyExc_TypeError, "an Arrangement, not %R", arranged);
    else {
        PyObject *special = PyTuple_GET_ITEM(arranged, ARRANGED_SPECIAL);
        PyObject *kernels = PyTuple_GET_ITEM(shortcut, SHORT_COPIES);
        found = special == Py_None ? 0 : find_special(kernels, tensor, special, itemsize, num_bytes, out, copy);
    }
    Py_DECREF(arranged);
    return found;
}

/* Whether the scratch buffer may be used without waiting for another stream: 1, 0, or -1 with an error set. */
static int is_free_for(PyObject *digester, PyObject *stream)
{
    PyObject *last = get(digester, name__scratch_stream);
    if (last == NULL)
        return -1;
    int is_so = last == Py_None ? 1 : PyObject_RichCompareBool(last, stream, Py_EQ);
    Py_DECREF(last);
    return is_so;
}

int find_copies(PyObject *digester, PyObject *shortcut, PyObject *stream, Py_ssize_t count, PyObject *const *tensors,
                const long long *sizes, long long *places, Copy *copies)
{
    Py_ssize_t piece = 0;
    while (piece < count && places[piece] != PLACE_STRIDED)
        piece++;
    if (piece == count)
        return 1;
    int found = is_free_for(digester, stream);
    if (found != 1)
        return found;
    long long room = number_at(digester, name__scratch_bytes), fill = 0;
    long long address = PyErr_Occurred() ? -1 : number_at(digester, name__scratch_address);
    if (PyErr_Occurred())
        return -1;
    for (; found == 1 && piece < count; piece++) {
        if (places[piece] != PLACE_STRIDED)
            continue;
        fill = ceil_div(fill, DIGEST_BYTES) * DIGEST_BYTES;
        if (sizes[piece] > room - fill)
            return 0;
        places[piece] = address + fill;
        found = find_copy(shortcut, tensors[piece], sizes[piece], (uint64_t)places[piece], &copies[piece]);
        fill += sizes[piece];
    }
    return found;
}

int launch_copies(PyObject *digester, PyObject *shortcut, PyObject *stream, Py_ssize_t count, Copy *copies)
{
    int is_noted = 0, failed = 0;
    for (Py_ssize_t piece = 0; failed == 0 && piece < count; piece++) {
        Copy *copy = &copies[piece];
        if (copy->kernel == NULL)
            continue;
        if (!is_noted && set(digester, name__scratch_stream, stream) < 0)
            return -1;
        is_noted = 1;
        unsigned long long handle = PyLong_AsUnsignedLongLongMask(stream);
        failed = launch(shortcut, copy->kernel, copy->x, copy->y, handle, copy->values);
    }
    return failed;
}
