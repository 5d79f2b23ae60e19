/* What launches a kernel, and what brings a strided tensor to row-major order on its device. */
#ifndef BITCHECK_SUBMIT_H
#define BITCHECK_SUBMIT_H

#include "native.h"

/* Places of the fields of `Shortcut`, and of those that kernels have in it: `Kernel`, and `CopyKernel` with one more. */
enum {
    SHORT_LAUNCH,
    SHORT_ONE,
    SHORT_FEW,
    SHORT_COPIES,
    SHORT_SECRET,
    SHORT_DEVICE,
    SHORT_IS_CAPTURING,
    SHORT_CURRENT_DEVICE,
    SHORT_CURRENT_STREAM,
    SHORT_ARRANGEMENT,
    NUM_SHORT
};
enum { KERNEL_FUNCTION, KERNEL_THREADS, KERNEL_SHARED, NUM_KERNEL, COPY_BLOCK = NUM_KERNEL, NUM_COPY_KERNEL };

#define MAX_PARAMETERS 24 /* those of a kernel, and of what a version of Triton adds to them, which are zeros */

/* Launch a kernel on a grid: 0, or what CUDA says of it, or -1 with an error set. `values`: MAX_PARAMETERS of them. */
int launch(PyObject *shortcut, PyObject *kernel, unsigned x, unsigned y, unsigned long long stream, uint64_t *values);

/* How a kernel of `row_major.py` is launched that copies a tensor to row-major order. */
typedef struct {
    PyObject *kernel; /* a `CopyKernel`, a reference of its own; NULL where there is nothing to copy */
    unsigned x, y;
    uint64_t values[MAX_PARAMETERS];
} Copy;

/* Find out how to copy those of a few tensors that are PLACE_STRIDED to the scratch buffer, and set their places to
 * where they will lie in it, as `DeviceDigester._gather`: 1; 0 where the Python has to; -1 with an error set. Nothing is
 * launched yet. `copies`, one for each tensor, have kernels that are to be released in any case. */
int find_copies(PyObject *digester, PyObject *shortcut, PyObject *stream, Py_ssize_t count, PyObject *const *tensors,
                const long long *sizes, long long *places, Copy *copies);

/* Launch the copies that were found: 0, or what CUDA says of one, or -1 with an error set. */
int launch_copies(PyObject *digester, PyObject *shortcut, PyObject *stream, Py_ssize_t count, Copy *copies);

/* Read an attribute that is a number; -1 with an error set where it is none. */
static inline long long number_at(PyObject *object, PyObject *attribute)
{
    PyObject *value = get(object, attribute);
    long long number = value != NULL ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

#endif
