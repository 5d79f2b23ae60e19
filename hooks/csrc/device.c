/* What a device's digester does for every tensor: `device_digest.py`. */
#include "native.h"

#include <time.h>

#include "xxh3.h"

#define MAX_JOINED_LEAVES 8192 /* as `device_digest.MAX_JOINED_LEAVES`: of more, the hash is updated piece by piece */

PyObject *plain_on_device(PyObject *module, PyObject *tensor)
{
    PyObject *known = can_digest() ? plain_kind(tensor, name_is_cuda) : NULL;
    if (known == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    PyObject *kind = Py_NewRef(PyTuple_GET_ITEM(known, 0));
    Py_DECREF(known);
    return kind;
}

/* Find the bytes from a tensor's first element to the end of its last: 1; 0 where those are more than `available`; -1 with an
 * error set. */
static int find_span(PyObject *tensor, long long element_bytes, long long available, long long *span)
{
    PyObject *shape = get(tensor, name_shape), *strides = shape != NULL ? PyObject_CallMethodNoArgs(tensor, name_stride) : NULL;
    int found = strides != NULL ? 1 : -1;
    if (found == 1 && (!PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_GET_SIZE(shape) != PyTuple_GET_SIZE(strides))) {
        PyErr_SetString(PyExc_ValueError, "a tensor has as many strides as dimensions");
        found = -1;
    }
    *span = element_bytes;
    for (Py_ssize_t dimension = 0; found == 1 && dimension < PyTuple_GET_SIZE(shape); dimension++) {
        long long extent = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, dimension));
        long long stride = PyErr_Occurred() ? -1 : PyLong_AsLongLong(PyTuple_GET_ITEM(strides, dimension));
        if (PyErr_Occurred())
            found = -1;
        else if (extent < 1 || stride < 0 || *span > available ||
                 (extent > 1 && stride > (available - *span) / element_bytes / (extent - 1)))
            found = 0;
        else
            *span += (extent - 1) * stride * element_bytes;
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return found;
}

/* As `find_place`; `may_be_conj`: only what is complex is. */
static long long place_of(PyObject *tensor, long long num_bytes, long long element_bytes, int may_be_conj)
{
    if (num_bytes == 0)
        return 0;
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, name_untyped_storage);
    long long available = storage != NULL ? number_of(storage, name_nbytes) : -1;
    Py_XDECREF(storage);
    int is_contiguous = PyErr_Occurred() ? -1 : says(tensor, name_is_contiguous);
    if (is_contiguous < 0)
        return PLACE_ERROR;
    if (element_bytes < 1 || num_bytes < 0)
        return PLACE_MISSING;
    int is_measured = is_contiguous ? 1 : find_span(tensor, element_bytes, available, &num_bytes);
    if (is_measured != 1)
        return is_measured < 0 ? PLACE_ERROR : PLACE_MISSING;
    long long offset = number_of(tensor, name_storage_offset);
    if (PyErr_Occurred())
        return PLACE_ERROR;
    if (num_bytes > available || offset > (available - num_bytes) / element_bytes)
        return PLACE_MISSING;
    int is_otherwise = !is_contiguous;
    if (is_otherwise == 0 && may_be_conj)
        is_otherwise = says(tensor, name_is_conj);
    if (is_otherwise == 0)
        is_otherwise = says(tensor, name_is_neg);
    if (is_otherwise != 0)
        return is_otherwise < 0 ? PLACE_ERROR : PLACE_STRIDED;
    long long address = number_of(tensor, name_data_ptr);
    return PyErr_Occurred() ? PLACE_ERROR : address;
}

long long find_place(PyObject *tensor, long long num_bytes)
{
    PyObject *itemsize = num_bytes != 0 ? get(tensor, name_itemsize) : PyLong_FromLong(1);
    long long element_bytes = itemsize != NULL ? PyLong_AsLongLong(itemsize) : -1;
    Py_XDECREF(itemsize);
    return PyErr_Occurred() ? PLACE_ERROR : place_of(tensor, num_bytes, element_bytes, 1);
}

long long find_place_of(PyObject *tensor, PyObject *known)
{
    long long num_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(PyTuple_GET_ITEM(known, KNOWN_KIND), KIND_BYTES));
    long long element_bytes = PyErr_Occurred() ? -1 : PyLong_AsLongLong(PyTuple_GET_ITEM(known, KNOWN_ITEMSIZE));
    return PyErr_Occurred() ? PLACE_ERROR
                            : place_of(tensor, num_bytes, element_bytes, PyTuple_GET_ITEM(known, KNOWN_IS_COMPLEX) == Py_True);
}

PyObject *places_of(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *tensors = num_args == 2 ? PySequence_Fast(args[0], "tensors") : NULL, *places = NULL;
    PyObject *kinds = tensors != NULL ? PySequence_Fast(args[1], "kinds") : NULL;
    if (kinds == NULL || PySequence_Fast_GET_SIZE(tensors) != PySequence_Fast_GET_SIZE(kinds)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "places_of takes tensors and as many kinds");
        goto end;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
    places = PyList_New(count);
    for (Py_ssize_t index = 0; places != NULL && index < count; index++) {
        if (index >= PySequence_Fast_GET_SIZE(tensors) || index >= PySequence_Fast_GET_SIZE(kinds)) {
            PyErr_SetString(PyExc_RuntimeError, "tensors or kinds were taken away while they were looked at");
            Py_CLEAR(places);
            break;
        }
        PyObject *kind = PySequence_Fast_GET_ITEM(kinds, index), *place = NULL;
        if (!PyTuple_Check(kind) || PyTuple_GET_SIZE(kind) != 3) {
            PyErr_SetString(PyExc_TypeError, "a kind is a tuple of three");
            Py_CLEAR(places);
            break;
        }
        PyObject *tensor = Py_NewRef(PySequence_Fast_GET_ITEM(tensors, index));
        long long num_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(kind, 2));
        long long found = PyErr_Occurred() ? PLACE_ERROR : find_place(tensor, num_bytes);
        Py_DECREF(tensor);
        if (found == PLACE_MISSING)
            Py_SETREF(places, Py_NewRef(Py_None));
        else if (found == PLACE_ERROR || (place = PyLong_FromLongLong(found)) == NULL)
            Py_CLEAR(places);
        if (place == NULL)
            break;
        PyList_SET_ITEM(places, index, place);
    }
end:
    Py_XDECREF(tensors);
    Py_XDECREF(kinds);
    return places;
}

/* A ticket of which all leaves came in one flight. */
typedef struct {
    PyObject *ticket, *kind, *header; /* references of its own */
    const uint8_t *leaves;
    Py_ssize_t leaves_bytes;
    uint8_t digest[XXH3_DIGEST_BYTES];
} Landed;

/* Take one ticket of a flight: 1; 0 where its leaves come in several flights, or are many; -1 with an error set. */
static int take_landed(PyObject *ticket, PyObject *kind, Py_ssize_t first, Py_ssize_t count, const Py_buffer *view, Landed *one)
{
    if (kind == NULL || !PyTuple_Check(kind) || PyTuple_GET_SIZE(kind) != 3 || first < 0 || count < 0 ||
        count > view->len / XXH3_DIGEST_BYTES || first > view->len / XXH3_DIGEST_BYTES - count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a flight holds tickets that are under way, within its bytes");
        return -1;
    }
    Py_ssize_t num_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(kind, 2));
    if (PyErr_Occurred())
        return -1;
    if (count != (num_bytes + LEAF_BYTES - 1) / LEAF_BYTES || count > MAX_JOINED_LEAVES)
        return 0;
    PyObject *header = PyObject_Call(digest_header, kind, NULL);
    if (header != NULL && (!PyBytes_Check(header) || PyBytes_GET_SIZE(header) + count * XXH3_DIGEST_BYTES < XXH3_MIN_BYTES)) {
        PyErr_Format(PyExc_ValueError, "no header of a digest: %R", header);
        Py_CLEAR(header);
    }
    if (header == NULL)
        return -1;
    const uint8_t *leaves = (const uint8_t *)view->buf + first * XXH3_DIGEST_BYTES;
    *one = (Landed){Py_NewRef(ticket), Py_NewRef(kind), header, leaves, count * XXH3_DIGEST_BYTES, {0}};
    return 1;
}

#define MIN_UNLOCKED_BYTES 65536 /* to get the lock back may take longer than to hash less */

/* Hash what was taken, where it is much with the interpreter's lock let go. -1 with an error set. */
static int hash_landed(Landed *all, Py_ssize_t count)
{
    Py_ssize_t num_bytes = 0;
    for (Landed *one = all; one < all + count; one++)
        num_bytes += one->leaves_bytes;
    PyThreadState *held = num_bytes >= MIN_UNLOCKED_BYTES ? PyEval_SaveThread() : NULL;
    int failed = 0;
    for (Landed *one = all; !failed && one < all + count; one++)
        failed = hash_joined((const uint8_t *)PyBytes_AS_STRING(one->header), (size_t)PyBytes_GET_SIZE(one->header), one->leaves,
                             (size_t)one->leaves_bytes, one->digest);
    if (held != NULL)
        PyEval_RestoreThread(held);
    if (failed)
        PyErr_NoMemory();
    return failed;
}

/* Hand out one ticket's digest; -1 with an error set. */
static int hand_out(const Landed *one, PyObject *kinds, PyObject *known, Py_ssize_t limit_bytes)
{
    PyObject *digest = PyBytes_FromStringAndSize((const char *)one->digest, XXH3_DIGEST_BYTES), *kept = NULL, *found = NULL;
    int failed = -1, is_kept = PyLong_AsSsize_t(PyTuple_GET_ITEM(one->kind, 2)) <= limit_bytes;
    /* First where it is found, then away from where it is waited for: who resolves it looks in the other order. */
    if (digest != NULL &&
        (kept = PyBytes_FromStringAndSize((const char *)one->leaves, is_kept ? one->leaves_bytes : 0)) != NULL &&
        (found = PyTuple_Pack(2, digest, kept)) != NULL && PyDict_SetItem(known, one->ticket, found) == 0)
        failed = PyDict_DelItem(kinds, one->ticket);
    Py_XDECREF(digest);
    Py_XDECREF(kept);
    Py_XDECREF(found);
    return failed;
}

PyObject *receive_leaves(PyObject *module, PyObject *args)
{
    PyObject *tickets, *firsts, *counts, *landed, *kinds, *known;
    Py_ssize_t limit_bytes, num_taken = 0;
    if (!is_configured(NEED_digest_header, NEED_digest_header + 1) ||
        !PyArg_ParseTuple(args, "O!O!O!OO!O!n", &PyList_Type, &tickets, &PyList_Type, &firsts, &PyList_Type, &counts,
                          &landed, &PyDict_Type, &kinds, &PyDict_Type, &known, &limit_bytes))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(tickets);
    if (PyList_GET_SIZE(firsts) != count || PyList_GET_SIZE(counts) != count) {
        PyErr_SetString(PyExc_ValueError, "a flight has as many firsts and counts as tickets");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(landed, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *rest = PyList_New(0);
    Landed *all = PyMem_New(Landed, count > 0 ? count : 1);
    if (all == NULL)
        PyErr_NoMemory();
    int failed = rest == NULL || all == NULL ? -1 : 0;
    for (Py_ssize_t index = 0; !failed && index < count; index++) {
        if (PyList_GET_SIZE(tickets) != count || PyList_GET_SIZE(firsts) != count || PyList_GET_SIZE(counts) != count) {
            PyErr_SetString(PyExc_RuntimeError, "a flight was changed while it was received");
            failed = -1;
            break;
        }
        PyObject *ticket = Py_NewRef(PyList_GET_ITEM(tickets, index));
        Py_ssize_t first = PyLong_AsSsize_t(PyList_GET_ITEM(firsts, index));
        Py_ssize_t many = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(PyList_GET_ITEM(counts, index));
        PyObject *kind = PyErr_Occurred() ? NULL : Py_XNewRef(PyDict_GetItemWithError(kinds, ticket));
        int taken = take_landed(ticket, kind, first, many, &view, &all[num_taken]);
        if (taken > 0)
            num_taken++;
        else {
            PyObject *place = taken == 0 ? PyLong_FromSsize_t(index) : NULL;
            failed = place == NULL ? -1 : PyList_Append(rest, place);
            Py_XDECREF(place);
        }
        Py_DECREF(ticket);
        Py_XDECREF(kind);
    }
    if (!failed)
        failed = hash_landed(all, num_taken);
    for (Py_ssize_t index = 0; index < num_taken; index++) {
        if (!failed)
            failed = hand_out(&all[index], kinds, known, limit_bytes);
        Py_DECREF(all[index].ticket);
        Py_DECREF(all[index].kind);
        Py_DECREF(all[index].header);
    }
    PyMem_Free(all);
    PyBuffer_Release(&view);
    if (failed)
        Py_CLEAR(rest);
    return rest;
}

/* Whether a number has been reached, of numbers that grow one by one modulo `modulus`. */
static int is_reached(const volatile int64_t *word, long long number, long long modulus)
{
    long long ahead = (*word - number) % modulus;
    return (ahead < 0 ? ahead + modulus : ahead) < modulus / 2;
}

PyObject *wait_for_number(PyObject *module, PyObject *args)
{
    unsigned long long address;
    long long number, modulus;
    double pause_s, timeout_s;
    if (!PyArg_ParseTuple(args, "KLLdd", &address, &number, &modulus, &pause_s, &timeout_s))
        return NULL;
    if (address == 0 || modulus < 2 || !(pause_s >= 0 && pause_s < 1) || !(timeout_s >= 0)) {
        PyErr_SetString(PyExc_ValueError, "wait_for_number takes an address, a number, a modulus of two or more and times");
        return NULL;
    }
    const volatile int64_t *word = (const volatile int64_t *)(uintptr_t)address;
    struct timespec pause = {0, (long)(pause_s * 1e9)}, now;
    int reached;
    Py_BEGIN_ALLOW_THREADS;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double end_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec + timeout_s;
    while (!(reached = is_reached(word, number, modulus))) {
        nanosleep(&pause, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)now.tv_sec + 1e-9 * (double)now.tv_nsec > end_s)
            break;
    }
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(reached);
}
