/* Plain CPU tensors to digests, and digests to a step's columns. */
#include "native.h"

#include "row_major.h"
#include "team.h"
#include "xxh3.h"

#define PAD_BYTES 1024
#define MAX_JOINED_BYTES 4096
#define MIN_TEAM_LEAVES 4 /* to a thread: below it the others are not worth waking */

typedef struct {
    const uint8_t *data;
    uint8_t *leaves;
} Whole;

static void hash_whole_leaves(void *context, size_t begin, size_t end)
{
    const Whole *whole = context;
    for (size_t leaf = begin; leaf < end; leaf++)
        xxh3_128(whole->data + leaf * LEAF_BYTES, LEAF_BYTES, whole->leaves + leaf * XXH3_DIGEST_BYTES);
}

static void hash_leaves(const uint8_t *data, Py_ssize_t num_bytes, uint8_t *leaves)
{
    Whole whole = {data, leaves};
    size_t num_whole = (size_t)num_bytes / LEAF_BYTES;
    in_team(hash_whole_leaves, &whole, num_whole, MIN_TEAM_LEAVES);
    data += num_whole * LEAF_BYTES;
    leaves += num_whole * XXH3_DIGEST_BYTES;
    num_bytes %= LEAF_BYTES;
    if (num_bytes == 0)
        return;
    Py_ssize_t padded_bytes = (num_bytes + PAD_BYTES - 1) / PAD_BYTES * PAD_BYTES;
    if (padded_bytes == num_bytes) {
        xxh3_128(data, (size_t)num_bytes, leaves);
        return;
    }
    uint8_t padded[LEAF_BYTES];
    memcpy(padded, data, (size_t)num_bytes);
    memset(padded + num_bytes, 0, (size_t)(padded_bytes - num_bytes));
    xxh3_128(padded, (size_t)padded_bytes, leaves);
}

int hash_joined(const uint8_t *header, size_t header_bytes, const uint8_t *leaves, size_t leaves_bytes, uint8_t *digest)
{
    uint8_t few[MAX_JOINED_BYTES], *joined = few;
    size_t joined_bytes = header_bytes + leaves_bytes;
    if (joined_bytes > MAX_JOINED_BYTES && (joined = PyMem_RawMalloc(joined_bytes)) == NULL)
        return -1;
    memcpy(joined, header, header_bytes);
    memcpy(joined + header_bytes, leaves, leaves_bytes);
    xxh3_128(joined, joined_bytes, digest);
    if (joined != few)
        PyMem_RawFree(joined);
    return 0;
}

/* Return the digest of a tensor whose leaf digests are known. */
static PyObject *digest_leaves(PyObject *header, const uint8_t *leaves, Py_ssize_t leaves_bytes)
{
    Py_ssize_t header_bytes = PyBytes_GET_SIZE(header);
    if (header_bytes + leaves_bytes < XXH3_MIN_BYTES)
        return PyErr_Format(PyExc_ValueError, "no header of a digest: %R", header);
    uint8_t digest[XXH3_DIGEST_BYTES];
    if (hash_joined((const uint8_t *)PyBytes_AS_STRING(header), (size_t)header_bytes, leaves, (size_t)leaves_bytes, digest) < 0)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize((const char *)digest, XXH3_DIGEST_BYTES);
}

/* Return the digest of a tensor of `num_bytes` contiguous bytes, 1 at least, and set its leaf digests. */
static PyObject *digest_memory(PyObject *header, const uint8_t *data, Py_ssize_t num_bytes, PyObject **leaves)
{
    Py_ssize_t leaves_bytes = (num_bytes + LEAF_BYTES - 1) / LEAF_BYTES * XXH3_DIGEST_BYTES;
    if ((*leaves = PyBytes_FromStringAndSize(NULL, leaves_bytes)) == NULL)
        return NULL;
    uint8_t *found = (uint8_t *)PyBytes_AS_STRING(*leaves);
    hash_leaves(data, num_bytes, found);
    PyObject *digest = digest_leaves(header, found, leaves_bytes);
    if (digest == NULL)
        Py_CLEAR(*leaves);
    return digest;
}

/* A plain CPU tensor, as `tensors.digest_plain` has it. */
typedef struct {
    PyObject *known;         /* its entry in the table of kinds, which is held until `release` */
    PyObject *kind, *header; /* borrowed from it */
    const uint8_t *data;
    Py_ssize_t num_bytes, itemsize;
    long long span_bytes; /* from its first element to the end of its last */
    int is_contiguous, num_dimensions; /* those of more than one element; as `shape` and `strides`, if not contiguous */
    int64_t shape[MAX_DIMENSIONS], strides[MAX_DIMENSIONS];
} Plain;

/* Whether elements are of a size that can be put in order. */
static int can_copy(Py_ssize_t itemsize)
{
    return itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8 || itemsize == 16;
}

/* Read the dimensions of more than one element, strides in bytes, and the bytes from the first element to the end of
 * the last: 1; 0 where no memory is that large; -1 with an error set. */
static int read_strides(PyObject *tensor, PyObject *shape, Plain *plain)
{
    PyObject *strides = PyObject_CallMethodNoArgs(tensor, name_stride);
    if (strides == NULL)
        return -1;
    int found = 1;
    plain->num_dimensions = 0;
    plain->span_bytes = plain->itemsize;
    if (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != PyTuple_GET_SIZE(shape)) {
        PyErr_SetString(PyExc_ValueError, "a tensor changed its shape while it was read"); /* another thread's doing */
        found = -1;
    }
    for (Py_ssize_t dimension = 0; found == 1 && dimension < PyTuple_GET_SIZE(shape); dimension++) {
        long long extent = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, dimension));
        long long stride = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, dimension));
        if (PyErr_Occurred())
            found = -1;
        else if (extent == 1)
            continue;
        else if (plain->num_dimensions == MAX_DIMENSIONS || extent < 1 || stride < 0 ||
                 stride > (LLONG_MAX - plain->span_bytes) / plain->itemsize / (extent - 1))
            found = 0;
        else {
            plain->shape[plain->num_dimensions] = extent;
            plain->strides[plain->num_dimensions++] = stride * plain->itemsize;
            plain->span_bytes += (extent - 1) * stride * plain->itemsize;
        }
    }
    Py_DECREF(strides);
    return found;
}

PyObject *storage_of(PyObject *tensor)
{
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, name_untyped_storage), *number = NULL;
    if (storage != NULL) {
        number = get(storage, name__cdata);
        Py_DECREF(storage);
    }
    if (number == NULL && (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_NotImplementedError))) {
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    return number;
}

PyObject *plain_kind(PyObject *tensor, PyObject *is_there)
{
    if (!is_tensor(tensor) || (is_there != NULL && has(tensor, is_there) != 1))
        return NULL;
    PyObject *layout = get(tensor, name_layout);
    Py_XDECREF(layout);
    if (layout != strided_layout || has(tensor, name_is_nested) != 0)
        return NULL;
    PyObject *dtype = get(tensor, name_dtype);
    PyObject *shape = dtype != NULL ? get(tensor, name_shape) : NULL;
    PyObject *key = shape != NULL ? PyTuple_Pack(2, dtype, shape) : NULL;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    PyObject *known = key != NULL ? item_of(plain_kinds, key) : NULL;
    Py_XDECREF(key);
    if (known == NULL || (known != Py_None && is_true(PyObject_CallOneArg(is_functorch, tensor)) == 0))
        return known;
    Py_DECREF(known);
    return NULL;
}

/* Find out where a plain CPU tensor lies: 1; 0 where it is not plain or its memory is not there; -1 with an error set.
 * `plain->known` is to be released in any case. */
static int find_plain(PyObject *tensor, Plain *plain)
{
    int truth;
    PyObject *known = plain->known = plain_kind(tensor, name_is_cpu);
    if (known == NULL)
        return PyErr_Occurred() ? -1 : 0;
    plain->kind = PyTuple_GET_ITEM(known, KNOWN_KIND);
    plain->itemsize = PyLong_AsSsize_t(PyTuple_GET_ITEM(known, KNOWN_ITEMSIZE));
    plain->header = PyTuple_GET_ITEM(known, KNOWN_HEADER);
    plain->num_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(plain->kind, KIND_BYTES));
    if (PyErr_Occurred()) /* more bytes than can be addressed */
        return -1;
    if (plain->num_bytes == 0 || !can_copy(plain->itemsize))
        return 0;
    if ((truth = says(tensor, name_is_neg)) != 0)
        return truth < 0 ? -1 : 0;
    if (PyTuple_GET_ITEM(known, KNOWN_IS_COMPLEX) == Py_True && (truth = says(tensor, name_is_conj)) != 0)
        return truth < 0 ? -1 : 0;
    if ((plain->is_contiguous = says(tensor, name_is_contiguous)) < 0)
        return -1;
    plain->span_bytes = plain->num_bytes;
    if (!plain->is_contiguous && (truth = read_strides(tensor, PyTuple_GET_ITEM(plain->kind, KIND_SHAPE), plain)) != 1)
        return truth;
    long long address = number_of(tensor, name_data_ptr);
    long long offset = PyErr_Occurred() ? -1 : number_of(tensor, name_storage_offset);
    PyObject *storage = PyErr_Occurred() ? NULL : PyObject_CallMethodNoArgs(tensor, name_untyped_storage);
    if (storage == NULL)
        return -1;
    long long storage_bytes = number_of(storage, name_nbytes);
    Py_DECREF(storage);
    if (PyErr_Occurred())
        return -1;
    plain->data = (const uint8_t *)(uintptr_t)address;
    return address != 0 && offset >= 0 && plain->span_bytes <= storage_bytes &&
           offset <= (storage_bytes - plain->span_bytes) / plain->itemsize;
}

/* Digest a plain tensor that was found; set its leaf digests. NULL with an error set where there is no memory. */
static PyObject *digest_found(const Plain *plain, PyObject **leaves)
{
    if (plain->is_contiguous)
        return digest_memory(plain->header, plain->data, plain->num_bytes, leaves);
    uint8_t *ordered = PyMem_RawMalloc((size_t)plain->num_bytes);
    if (ordered == NULL)
        return PyErr_NoMemory();
    copy_row_major(ordered, plain->data, plain->num_dimensions, plain->shape, plain->strides, (size_t)plain->itemsize);
    PyObject *digest = digest_memory(plain->header, ordered, plain->num_bytes, leaves);
    PyMem_RawFree(ordered);
    return digest;
}

PyObject *digest_plain(PyObject *module, PyObject *tensor)
{
    Plain plain;
    PyObject *result = NULL, *digest, *leaves = NULL;
    if (!can_digest())
        return NULL;
    int found = find_plain(tensor, &plain);
    if (found == 0)
        result = Py_NewRef(Py_None);
    else if (found > 0 && (digest = digest_found(&plain, &leaves)) != NULL)
        result = Py_BuildValue("(ONN)", plain.kind, digest, leaves);
    Py_XDECREF(plain.known);
    return result;
}

/* --- a step's columns */

/* Append to a column of a step; `value` is borrowed. Returns the index, -1 with an error set. */
static Py_ssize_t append(PyObject *record, PyObject *column, PyObject *value)
{
    PyObject *list = get(record, column);
    if (list == NULL)
        return -1;
    Py_ssize_t index = PyList_Check(list) ? PyList_GET_SIZE(list) : -1;
    if (index < 0)
        PyErr_SetString(PyExc_TypeError, "a step's columns are lists");
    else if (PyList_Append(list, value) < 0)
        index = -1;
    Py_DECREF(list);
    return index;
}

/* Add an event to a step's columns, as `StepColumns.add`; returns its index, -1 with an error set. */
Py_ssize_t add_event(PyObject *record, PyObject *site, PyObject *kind, PyObject *digest, PyObject *leaves,
                     PyObject *group, PyObject *inputs)
{
    Py_ssize_t index = append(record, name_sites, site);
    if (index < 0 || append(record, name_kinds, kind) < 0 || append(record, name_digests, digest) < 0 ||
        append(record, name_leaves, leaves) < 0 || append(record, name_group_of, group) < 0 ||
        append(record, name_inputs, inputs) < 0)
        return -1;
    return index;
}

PyObject *add_plain(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5) {
        PyErr_SetString(PyExc_TypeError, "add_plain takes a step's columns, a site, a tensor, a group and inputs");
        return NULL;
    }
    Plain plain;
    PyObject *result = NULL, *digest, *leaves = NULL;
    if (!can_digest())
        return NULL;
    int found = find_plain(args[2], &plain);
    if (found == 0)
        result = Py_NewRef(Py_None);
    else if (found > 0 && (digest = digest_found(&plain, &leaves)) != NULL) {
        Py_ssize_t index = add_event(args[0], args[1], plain.kind, digest, leaves, args[3], args[4]);
        Py_DECREF(digest);
        Py_DECREF(leaves);
        if (index >= 0)
            result = PyLong_FromSsize_t(index);
    }
    Py_XDECREF(plain.known);
    return result;
}
