/* Tensors of a device to tickets, as `DeviceDigester.submit` and `_submit`, and the launch itself. */
#include "submit.h"

#define MAX_FLIGHTS 1024    /* as `ring.MAX_FLIGHTS` */
#define DEFAULT_STREAM 0ULL /* as `cuda._DEFAULT` */

/* cuLaunchKernel of CUDA's driver. Each parameter is 8 bytes here; of a shorter one it reads the first. */
typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                            void **extra);

static void *pointer_of(PyObject *number)
{
    return (void *)(uintptr_t)PyLong_AsUnsignedLongLongMask(number);
}

/* The interpreter's lock is let go, as PyTorch's own launches do: where the device's queue is full the driver waits, and what
 * the device waits for may be another thread's Python. */
int launch(PyObject *shortcut, PyObject *kernel, unsigned x, unsigned y, unsigned long long stream, uint64_t *values)
{
    void *parameters[MAX_PARAMETERS];
    for (int index = 0; index < MAX_PARAMETERS; index++)
        parameters[index] = &values[index];
    LaunchKernel launch_kernel = (LaunchKernel)pointer_of(PyTuple_GET_ITEM(shortcut, SHORT_LAUNCH));
    void *function = pointer_of(PyTuple_GET_ITEM(kernel, KERNEL_FUNCTION));
    unsigned threads = (unsigned)PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(kernel, KERNEL_THREADS));
    unsigned shared = (unsigned)PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(kernel, KERNEL_SHARED));
    if (PyErr_Occurred())
        return -1;
    int answer;
    Py_BEGIN_ALLOW_THREADS;
    answer = launch_kernel(function, x, y, 1, threads, 1, 1, shared, (void *)(uintptr_t)stream, parameters, NULL);
    Py_END_ALLOW_THREADS;
    return answer;
}

static int is_shortcut(PyObject *shortcut)
{
    if (PyTuple_Check(shortcut) && PyTuple_GET_SIZE(shortcut) == NUM_SHORT) {
        PyObject *one = PyTuple_GET_ITEM(shortcut, SHORT_ONE), *few = PyTuple_GET_ITEM(shortcut, SHORT_FEW);
        if (PyTuple_Check(one) && PyTuple_GET_SIZE(one) == NUM_KERNEL && PyTuple_Check(few) &&
            PyTuple_GET_SIZE(few) == NUM_KERNEL && PyDict_Check(PyTuple_GET_ITEM(shortcut, SHORT_COPIES)))
            return 1;
    }
    PyErr_Format(PyExc_TypeError, "a Shortcut, not %R", shortcut);
    return 0;
}

/* Reserve slots, as `Ring.reserve`; returns the flight, a new reference, and sets the first slot. */
static PyObject *reserve(PyObject *ring, long long slots, long long capacity, long long *slot)
{
    PyObject *flights = get(ring, name__flights);
    Py_ssize_t num_flights = flights != NULL ? PyObject_Size(flights) : -1;
    Py_XDECREF(flights);
    long long head = num_flights < 0 ? -1 : number_at(ring, name__head);
    long long tail = PyErr_Occurred() ? -1 : number_at(ring, name__tail);
    if (PyErr_Occurred())
        return NULL;
    long long at = head % capacity;
    if (at == 0 || at + slots > capacity || head + slots - tail > capacity || num_flights >= MAX_FLIGHTS) {
        PyObject *number = PyLong_FromLongLong(slots), *flight = NULL;
        PyObject *pair = number != NULL ? PyObject_CallMethodOneArg(ring, name_reserve, number) : NULL;
        Py_XDECREF(number);
        if (pair != NULL && PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2) {
            *slot = PyLong_AsLongLong(PyTuple_GET_ITEM(pair, 1));
            flight = PyErr_Occurred() ? NULL : Py_NewRef(PyTuple_GET_ITEM(pair, 0));
        } else if (pair != NULL)
            PyErr_SetString(PyExc_TypeError, "a ring gives a flight and a slot");
        Py_XDECREF(pair);
        return flight;
    }
    PyObject *flight = get(ring, name__filling);
    *slot = head;
    if (flight != NULL &&
        (put(ring, name__head, PyLong_FromLongLong(head + slots)) < 0 ||
         put(flight, name_end, PyLong_FromLongLong(head + slots)) < 0))
        Py_CLEAR(flight);
    return flight;
}

static int append_number(PyObject *object, PyObject *attribute, PyObject *number)
{
    PyObject *list = get(object, attribute);
    int failed = list == NULL || number == NULL ? -1 : PyList_Append(list, number);
    Py_XDECREF(list);
    return failed;
}

/* Note for whom slots of a flight are, as `Flight.add`, under a new ticket, as `DeviceDigester._add_ticket`; return it. */
static PyObject *add_ticket(PyObject *digester, PyObject *flight, PyObject *kind, long long first, long long count)
{
    long long number = number_at(digester, name__num_tickets);
    PyObject *ticket = PyErr_Occurred() ? NULL : PyLong_FromLongLong(number + 1);
    PyObject *kinds = ticket != NULL ? get(digester, name__kinds) : NULL;
    PyObject *from = PyLong_FromLongLong(first), *many = PyLong_FromLongLong(count);
    if (kinds == NULL || set(digester, name__num_tickets, ticket) < 0 ||
        PyDict_SetItem(kinds, ticket, kind) < 0 || append_number(flight, name_tickets, ticket) < 0 ||
        append_number(flight, name_firsts, from) < 0 || append_number(flight, name_counts, many) < 0)
        Py_CLEAR(ticket);
    Py_XDECREF(kinds);
    Py_XDECREF(from);
    Py_XDECREF(many);
    return ticket;
}

/* Say that a stream was given what writes to a flight, as `Ring.mark`; -1 with an error set. */
static int mark(PyObject *ring, PyObject *stream)
{
    if (PyLong_AsUnsignedLongLongMask(stream) != DEFAULT_STREAM) {
        PyObject *marked = PyObject_CallMethodOneArg(ring, name_mark, stream);
        Py_XDECREF(marked);
        return marked == NULL ? -1 : 0;
    }
    PyObject *used = PyErr_Occurred() ? NULL : get(ring, name__used);
    int failed = used == NULL ? -1 : PySet_Add(used, stream);
    Py_XDECREF(used);
    return failed;
}

/* Numbers that a launch takes; -1 with an error set. */
typedef struct {
    long long device, launch_leaves, flight_leaves, base, capacity;
    uint64_t secret;
} Limits;

static int read_limits(PyObject *digester, PyObject *shortcut, PyObject *ring, Limits *limits)
{
    limits->device = PyLong_AsLongLong(PyTuple_GET_ITEM(shortcut, SHORT_DEVICE));
    limits->secret = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(shortcut, SHORT_SECRET));
    limits->launch_leaves = PyErr_Occurred() ? -1 : number_at(digester, name__launch_leaves);
    limits->flight_leaves = PyErr_Occurred() ? -1 : number_at(digester, name__flight_leaves);
    limits->base = PyErr_Occurred() ? -1 : number_at(ring, name__address);
    limits->capacity = PyErr_Occurred() ? -1 : number_at(ring, name__capacity);
    if (!PyErr_Occurred() && limits->capacity < 1)
        PyErr_SetString(PyExc_ValueError, "a ring has slots");
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether this thread may launch on the device now: 1; 0 while a graph is captured, or beside another device; -1 with an
 * error set. */
static int may_launch(PyObject *shortcut, long long device)
{
    int is_capturing = is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(shortcut, SHORT_IS_CAPTURING)));
    if (is_capturing != 0)
        return is_capturing < 0 ? -1 : 0;
    PyObject *current = PyObject_CallNoArgs(PyTuple_GET_ITEM(shortcut, SHORT_CURRENT_DEVICE));
    long long found = current != NULL ? PyLong_AsLongLong(current) : -1;
    Py_XDECREF(current);
    return PyErr_Occurred() ? -1 : found == device;
}

/* Launch the kernel for one tensor or for a few, of `leaves` leaves in all, as `LeafKernels.hash_one` and `hash_few`. */
static int launch_few(PyObject *shortcut, Py_ssize_t count, const long long *places, const long long *sizes,
                      const long long *counts, long long leaves, uint64_t out, uint64_t secret, unsigned long long stream)
{
    uint64_t values[MAX_PARAMETERS] = {0}, *next = values;
    Py_ssize_t most = count == 1 ? 1 : FEW_TENSORS;
    for (Py_ssize_t piece = 0; piece < most; piece++)
        *next++ = piece < count ? (uint64_t)places[piece] : 0;
    for (Py_ssize_t piece = 0; piece < most; piece++)
        *next++ = piece < count ? (uint64_t)sizes[piece] : 0;
    long long first = 0;
    for (Py_ssize_t piece = 1; piece < most; piece++) {
        first += piece - 1 < count ? counts[piece - 1] : 0;
        *next++ = (uint64_t)(piece < count ? first : leaves);
    }
    *next++ = out;
    *next++ = secret;
    PyObject *kernel = PyTuple_GET_ITEM(shortcut, count == 1 ? SHORT_ONE : SHORT_FEW);
    return launch(shortcut, kernel, (unsigned)leaves, 1, stream, values);
}

/* As `submit_few`, the ring's lock held. */
static int submit_locked(PyObject *digester, PyObject *shortcut, PyObject *ring, Py_ssize_t count,
                         PyObject *const *tensors, PyObject *const *kinds, const long long *given, PyObject **tickets)
{
    Limits limits;
    Copy copies[FEW_TENSORS] = {{NULL, 0, 0, {0}}};
    long long sizes[FEW_TENSORS], counts[FEW_TENSORS], places[FEW_TENSORS], leaves = 0, slot = 0;
    if (read_limits(digester, shortcut, ring, &limits) < 0)
        return -1;
    for (Py_ssize_t piece = 0; piece < count; piece++) {
        sizes[piece] = PyLong_AsLongLong(PyTuple_GET_ITEM(kinds[piece], 2));
        if (PyErr_Occurred())
            return -1;
        places[piece] = given[piece];
        if (sizes[piece] < 1 || (places[piece] <= 0 && places[piece] != PLACE_STRIDED))
            return 0;
        counts[piece] = (sizes[piece] + LEAF_BYTES - 1) / LEAF_BYTES;
        if (counts[piece] > limits.launch_leaves - leaves)
            return 0;
        leaves += counts[piece];
    }
    int result = may_launch(shortcut, limits.device);
    if (result != 1)
        return result;
    result = -1;
    PyObject *current_stream = PyTuple_GET_ITEM(shortcut, SHORT_CURRENT_STREAM), *flight = NULL;
    PyObject *stream = PyObject_CallOneArg(current_stream, PyTuple_GET_ITEM(shortcut, SHORT_DEVICE));
    unsigned long long handle = stream != NULL ? PyLong_AsUnsignedLongLongMask(stream) : 0;
    if (PyErr_Occurred())
        goto end;
    /* All that may turn out to be for the Python before slots are reserved, which then would be nobody's. */
    if ((result = find_copies(digester, shortcut, stream, count, tensors, sizes, places, copies)) != 1)
        goto end;
    result = -1;
    if ((flight = reserve(ring, leaves, limits.capacity, &slot)) == NULL)
        goto end;
    long long start = number_at(flight, name_start);
    if (PyErr_Occurred())
        goto end;
    uint64_t out = (uint64_t)limits.base + (uint64_t)(slot % limits.capacity) * DIGEST_BYTES;
    int failed = launch_copies(digester, shortcut, stream, count, copies);
    if (failed == 0)
        failed = launch_few(shortcut, count, places, sizes, counts, leaves, out, limits.secret, handle);
    if (failed != 0) { /* the Python's launch says why; the slots are nobody's, and it copies again what was copied */
        result = failed < 0 ? -1 : 0;
        goto end;
    }
    long long first = slot - start;
    result = mark(ring, stream) < 0 ? -1 : 1; /* also for the stream that uses the scratch buffer next */
    for (Py_ssize_t piece = 0; result == 1 && piece < count; piece++) {
        if ((tickets[piece] = add_ticket(digester, flight, kinds[piece], first, counts[piece])) == NULL)
            result = -1;
        first += counts[piece];
    }
    if (result == 1 && slot + leaves - start >= limits.flight_leaves) {
        PyObject *flushed = PyObject_CallMethodNoArgs(ring, name_flush);
        result = flushed == NULL ? -1 : 1;
        Py_XDECREF(flushed);
    }
end:
    for (Py_ssize_t piece = 0; piece < count; piece++)
        Py_XDECREF(copies[piece].kernel);
    Py_XDECREF(stream);
    Py_XDECREF(flight);
    return result;
}

int submit_few(PyObject *digester, Py_ssize_t count, PyObject *const *tensors, PyObject *const *kinds,
               const long long *places, PyObject **tickets)
{
    PyObject *shortcut = get(digester, name__shortcut), *ring = NULL, *lock = NULL, *locked = NULL;
    int found = shortcut == NULL ? -1 : 0;
    if (found < 0 || shortcut == Py_None || count > FEW_TENSORS)
        goto end;
    found = -1;
    if (!is_shortcut(shortcut) || (ring = get(digester, name__ring)) == NULL ||
        (lock = get(ring, name_lock)) == NULL || (locked = PyObject_CallMethodNoArgs(lock, name_acquire)) == NULL)
        goto end;
    found = submit_locked(digester, shortcut, ring, count, tensors, kinds, places, tickets);
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *released = PyObject_CallMethodNoArgs(lock, name_release);
    if (released == NULL && type == NULL)
        found = -1;
    else {
        PyErr_Clear();
        PyErr_Restore(type, error, traceback);
    }
    Py_XDECREF(released);
end:
    for (Py_ssize_t piece = 0; found < 0 && piece < count && piece < FEW_TENSORS; piece++)
        Py_CLEAR(tickets[piece]);
    Py_XDECREF(shortcut);
    Py_XDECREF(ring);
    Py_XDECREF(lock);
    Py_XDECREF(locked);
    return found;
}

PyObject *submit_tensors(PyObject *module, PyObject *args)
{
    PyObject *digester, *given_tensors, *given_kinds, *result = NULL;
    PyObject *tensors[FEW_TENSORS], *kinds[FEW_TENSORS], *tickets[FEW_TENSORS] = {NULL};
    long long places[FEW_TENSORS];
    if (!PyArg_ParseTuple(args, "OO!O!", &digester, &PyList_Type, &given_tensors, &PyList_Type, &given_kinds))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(given_tensors);
    if (count < 1 || count > FEW_TENSORS || PyList_GET_SIZE(given_kinds) != count)
        return PyErr_Format(PyExc_ValueError, "1 to %d tensors and as many kinds", FEW_TENSORS);
    for (Py_ssize_t piece = 0; piece < count; piece++) {
        PyObject *kind = PyList_GET_ITEM(given_kinds, piece);
        if (!PyTuple_Check(kind) || PyTuple_GET_SIZE(kind) != 3) {
            PyErr_SetString(PyExc_TypeError, "a kind is a tuple of three");
            return NULL;
        }
    }
    for (Py_ssize_t piece = 0; piece < count; piece++) {
        tensors[piece] = Py_NewRef(PyList_GET_ITEM(given_tensors, piece));
        kinds[piece] = Py_NewRef(PyList_GET_ITEM(given_kinds, piece));
    }
    int found = 1;
    for (Py_ssize_t piece = 0; found == 1 && piece < count; piece++) {
        long long num_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(kinds[piece], 2));
        places[piece] = PyErr_Occurred() ? PLACE_ERROR : find_place(tensors[piece], num_bytes);
        if (places[piece] == PLACE_ERROR)
            found = -1;
    }
    if (found == 1)
        found = submit_few(digester, count, tensors, kinds, places, tickets);
    if (found == 0)
        result = Py_NewRef(Py_None);
    else if (found > 0)
        result = PyList_New(0);
    for (Py_ssize_t piece = 0; piece < count; piece++) {
        if (found > 0 && result != NULL && PyList_Append(result, tickets[piece]) < 0)
            Py_CLEAR(result);
        Py_XDECREF(tickets[piece]);
        Py_DECREF(tensors[piece]);
        Py_DECREF(kinds[piece]);
    }
    return result;
}
