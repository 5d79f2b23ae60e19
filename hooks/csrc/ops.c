/* Level `op`: one operation's arguments before it runs, its results after, as `ops.OpHooks` has them.
 *
 * What nearly every operation is, is done here; anything else is handed to `OpHooks._begin` and `_end` as it came.
 */
#include "native.h"

#include <structmember.h>

/* Places of the fields of `OpFacts`, of `Location`, of `Group` and of `Opened`. */
enum {
    FACTS_NAME,
    FACTS_IS_RECORDED,
    FACTS_IS_EMPTY,
    FACTS_DRAWS,
    FACTS_WRITTEN,
    FACTS_UNREAD,
    FACTS_ARGUMENTS,
    FACTS_IS_SCALING,
    FACTS_PRIVATE,
    NUM_FACTS
};
enum { WHERE_BUILDER, WHERE_PHASE, WHERE_ROOT, WHERE_PATH, WHERE_PARENT, WHERE_IS_EVAL, WHERE_NODE, NUM_WHERE };
enum { OPENED_BUILDER, OPENED_SITES, OPENED_GROUP, OPENED_INPUTS, OPENED_WRITTEN, OPENED_STORAGES, OPENED_LINE, NUM_OPENED };

/* The members of these tuples are read where they lie, so a tuple is looked at first: 1; 0 with an error set. */
static int is_tuple_of(PyObject *value, Py_ssize_t count, const char *name)
{
    if (PyTuple_Check(value) && PyTuple_GET_SIZE(value) == count)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s, not %R", name, value);
    return 0;
}

static int is_facts(PyObject *facts)
{
    if (!is_tuple_of(facts, NUM_FACTS, "OpFacts"))
        return 0;
    if (PyTuple_Check(PyTuple_GET_ITEM(facts, FACTS_WRITTEN)) && PyAnySet_Check(PyTuple_GET_ITEM(facts, FACTS_UNREAD)) &&
        PyTuple_Check(PyTuple_GET_ITEM(facts, FACTS_ARGUMENTS)) && PyTuple_Check(PyTuple_GET_ITEM(facts, FACTS_PRIVATE)))
        return 1;
    PyErr_Format(PyExc_TypeError, "OpFacts, not %R", facts);
    return 0;
}

static int is_where(PyObject *where)
{
    if (!is_tuple_of(where, NUM_WHERE, "a Location"))
        return 0;
    if (PyUnicode_Check(PyTuple_GET_ITEM(where, WHERE_NODE)))
        return 1;
    PyErr_Format(PyExc_TypeError, "a Location, not %R", where);
    return 0;
}

static int is_opened(PyObject *opened)
{
    if (!is_tuple_of(opened, NUM_OPENED, "what was opened"))
        return 0;
    if (PyList_Check(PyTuple_GET_ITEM(opened, OPENED_WRITTEN)) && PyAnySet_Check(PyTuple_GET_ITEM(opened, OPENED_STORAGES)))
        return 1;
    PyErr_Format(PyExc_TypeError, "what was opened, not %R", opened);
    return 0;
}

/* --- who last wrote a storage */

/* As `storages.StorageWriters`; NULL stands for None in `written` and `builder`. */
typedef struct {
    PyObject_HEAD
    PyObject *weak, *written, *builder, *events;
} Memory;

static int look_at(Memory *memory, PyObject *tensor)
{
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, name_untyped_storage);
    PyObject *weak = storage != NULL ? PyObject_CallMethodNoArgs(storage, name__weak_ref) : NULL;
    Py_XDECREF(storage);
    if (weak == NULL)
        return -1;
    PyObject *before = memory->weak, *freed = NULL;
    memory->weak = weak;
    if (before != NULL)
        freed = PyObject_CallOneArg(free_weak_ref, before);
    int failed = before != NULL && freed == NULL ? -1 : 0;
    Py_XDECREF(before);
    Py_XDECREF(freed);
    return failed;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tensor;
    if (!is_configured(NEED_free_weak_ref, NEED_free_weak_ref + 1) || !PyArg_ParseTuple(args, "O", &tensor))
        return NULL;
    Memory *memory = (Memory *)type->tp_alloc(type, 0);
    if (memory != NULL && ((memory->events = PyTuple_New(0)) == NULL || look_at(memory, tensor) < 0))
        Py_CLEAR(memory);
    return (PyObject *)memory;
}

/* Stand for the storage that a tensor has now; -1 with an error set. */
static int begin_again(Memory *memory, PyObject *tensor)
{
    PyObject *none = PyTuple_New(0);
    if (none == NULL || look_at(memory, tensor) < 0) {
        Py_XDECREF(none);
        return -1;
    }
    Py_CLEAR(memory->written);
    Py_CLEAR(memory->builder);
    Py_XSETREF(memory->events, none);
    return 0;
}

static PyObject *memory_begin_again(PyObject *memory, PyObject *tensor)
{
    return begin_again((Memory *)memory, tensor) < 0 ? NULL : Py_NewRef(Py_None);
}

static int memory_traverse(PyObject *self, visitproc visit, void *arg)
{
    Memory *memory = (Memory *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(memory->weak);
    Py_VISIT(memory->written);
    Py_VISIT(memory->builder);
    Py_VISIT(memory->events);
    return 0;
}

static int memory_clear(PyObject *self)
{
    Memory *memory = (Memory *)self;
    Py_CLEAR(memory->written);
    Py_CLEAR(memory->builder);
    Py_CLEAR(memory->events);
    return 0;
}

static void memory_dealloc(PyObject *self)
{
    Memory *memory = (Memory *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    memory_clear(self);
    if (memory->weak != NULL) {
        PyObject *error_type, *error, *traceback;
        PyErr_Fetch(&error_type, &error, &traceback);
        PyObject *freed = PyObject_CallOneArg(free_weak_ref, memory->weak);
        if (freed == NULL)
            PyErr_WriteUnraisable(free_weak_ref); /* not `self`, which nobody may hold any more */
        Py_XDECREF(freed);
        Py_DECREF(memory->weak);
        PyErr_Restore(error_type, error, traceback);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef memory_members[] = {
    {"weak", T_OBJECT, offsetof(Memory, weak), READONLY, "Of the storage: a weak reference's number."},
    {"written", T_OBJECT, offsetof(Memory, written), 0, NULL},
    {"builder", T_OBJECT, offsetof(Memory, builder), 0, NULL},
    {"events", T_OBJECT, offsetof(Memory, events), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef memory_methods[] = {
    {"begin_again", memory_begin_again, METH_O, "Stand for the storage that a tensor has now."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "Who last wrote a storage; one object serves all that follow each other at one address."},
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_traverse, memory_traverse},
    {Py_tp_clear, memory_clear},
    {Py_tp_members, memory_members},
    {Py_tp_methods, memory_methods},
    {0, NULL},
};

static PyType_Spec memory_spec = {"bitcheck.hooks._native.Memory", sizeof(Memory), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, memory_slots};

static PyTypeObject *memory_base;

PyObject *make_memory_type(void)
{
    PyObject *type = PyType_FromSpec(&memory_spec);
    memory_base = (PyTypeObject *)Py_XNewRef(type);
    return type;
}

/* Return what is known of a storage, whether it was freed or not; borrowed, NULL where nothing is; an error may be set. */
static Memory *known_memory(PyObject *memories, PyObject *storage)
{
    PyObject *memory = PyDict_GetItemWithError(memories, storage);
    if (memory == NULL || PyObject_TypeCheck(memory, memory_base))
        return (Memory *)memory;
    PyErr_SetString(PyExc_TypeError, "what is known of a storage is a Memory");
    return NULL;
}

/* Whether the storage that it stands for was freed; -1 with an error set. */
static int is_gone(Memory *memory)
{
    PyObject *weak = Py_NewRef(memory->weak);
    int truth = is_true(PyObject_CallOneArg(is_expired, weak));
    Py_DECREF(weak);
    return truth;
}

/* Return what is known of a storage, NULL where nothing is or it was freed; an error may be set. */
static Memory *living_memory(PyObject *memories, PyObject *storage)
{
    Memory *memory = known_memory(memories, storage);
    if (memory == NULL)
        return NULL;
    Py_INCREF(memory);
    if (is_gone(memory) != 0)
        Py_CLEAR(memory);
    return memory;
}

/* --- arguments */

static int is_plain_scalar(PyObject *value)
{
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
           PyUnicode_CheckExact(value);
}

/* Whether a value is a list or a tuple; of numbers only, such as a shape: 2. */
static int is_sequence(PyObject *value)
{
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value))
        return 0;
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(value); index++)
        if (!is_plain_scalar(PySequence_Fast_GET_ITEM(value, index)))
            return 1;
    return 2;
}

/* Add the members of a sequence to a list. */
static int sort_argument(PyObject *name, PyObject *value, PyObject *tensors, PyObject *scalars);

/* Put the members of a sequence where they belong, as `op_schema.named_arguments` names them: as `sort_argument`. */
static int sort_members(PyObject *name, PyObject *value, PyObject *tensors, PyObject *scalars)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    int has_tensor = 0, sorted = 1;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *member = PySequence_Fast_GET_ITEM(value, index);
        if (is_tensor(member))
            has_tensor = 1;
        else if (!is_plain_scalar(member))
            return 0;
    }
    PyObject *number = has_tensor ? PyLong_FromSsize_t(count) : NULL;
    PyObject *names = number != NULL ? PyObject_CallFunctionObjArgs(member_names, name, number, NULL) : NULL;
    Py_XDECREF(number);
    if (names == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyList_Check(names)) {
        PyErr_SetString(PyExc_TypeError, "member_names gives a list with the name of each member");
        sorted = -1;
    }
    for (Py_ssize_t index = 0; sorted == 1 && index < count; index++) {
        if (index >= PySequence_Fast_GET_SIZE(value) || index >= PyList_GET_SIZE(names)) {
            PyErr_SetString(PyExc_RuntimeError, "arguments were taken away while they were looked at");
            sorted = -1;
            break;
        }
        PyObject *member = Py_NewRef(PySequence_Fast_GET_ITEM(value, index));
        sorted = sort_argument(PyList_GET_ITEM(names, index), member, tensors, scalars);
        Py_DECREF(member);
    }
    Py_DECREF(names);
    return sorted;
}

/* Put one argument where it belongs: 1; 0 where it is for the Python to look at; 2 for a tensor that has no bytes. */
static int sort_argument(PyObject *name, PyObject *value, PyObject *tensors, PyObject *scalars)
{
    if (is_tensor(value)) {
        int is_meta = has(value, name_is_meta);
        if (is_meta != 0)
            return is_meta < 0 ? -1 : 2;
        return append_pair(tensors, name, value) < 0 ? -1 : 1;
    }
    int sequence = is_sequence(value);
    if (sequence == 1)
        return sort_members(name, value, tensors, scalars);
    if (is_plain_scalar(value) || sequence == 2)
        return append_pair(scalars, name, value) < 0 ? -1 : 1;
    return PySet_Contains(attribute_types, (PyObject *)Py_TYPE(value)); /* a dtype: the results show it */
}

/* Sort an operation's arguments as `ops._sort_arguments`: 1; 0 where the Python has to; 2 where a tensor has no bytes. */
static int sort_arguments(PyObject *facts, PyObject *args, PyObject *kwargs, PyObject *tensors, PyObject *scalars)
{
    PyObject *names = PyTuple_GET_ITEM(facts, FACTS_ARGUMENTS), *name, *value;
    Py_ssize_t num_names = PyTuple_GET_SIZE(names), num_values = PyTuple_GET_SIZE(args);
    int sorted = 1;
    for (Py_ssize_t index = 0; sorted == 1 && index < num_names && index < num_values; index++)
        sorted = sort_argument(PyTuple_GET_ITEM(names, index), PyTuple_GET_ITEM(args, index), tensors, scalars);
    for (Py_ssize_t position = 0; sorted == 1 && PyDict_Next(kwargs, &position, &name, &value);) {
        Py_INCREF(name);
        Py_INCREF(value);
        sorted = sort_argument(name, value, tensors, scalars);
        Py_DECREF(name);
        Py_DECREF(value);
    }
    return sorted;
}

/* Add an event for each tensor, as `StepBuilder.add_all_computed`; return a list of the events of each. */
static PyObject *add_computed(PyObject *builder, PyObject *sites, PyObject *tensors, PyObject *group, PyObject *sources)
{
    Py_ssize_t count = PyList_GET_SIZE(tensors);
    PyObject *added = NULL, *record = NULL;
    int has_landed_all = have_landed(builder, count, PySequence_Fast_ITEMS(tensors)), is_on_device = 0;
    int is_elsewhere = has_landed_all < 0 ? -1 : !has_landed_all;
    if (is_elsewhere == 0 && count > 0)
        is_elsewhere = is_on_device = has(PyList_GET_ITEM(tensors, 0), name_is_cuda);
    if (is_elsewhere < 0)
        return NULL;
    if (is_on_device) {
        if (count <= FEW_TENSORS) {
            PyObject *events[FEW_TENSORS];
            int is_done = add_on_device(builder, count, PySequence_Fast_ITEMS(sites), PySequence_Fast_ITEMS(tensors), group,
                                        PySequence_Fast_ITEMS(sources), events);
            if (is_done < 0)
                return NULL;
            if (is_done == 1) {
                if ((added = PyList_New(count)) == NULL)
                    while (count-- > 0)
                        Py_DECREF(events[count]);
                else
                    for (Py_ssize_t index = 0; index < count; index++)
                        PyList_SET_ITEM(added, index, events[index]);
                return added;
            }
        }
    }
    if (is_elsewhere) { /* on a device, or a collective may be writing one */
        added = PyObject_CallMethodObjArgs(builder, name_add_all_computed, sites, tensors, group, sources, NULL);
        if (added == NULL || (PyList_Check(added) && PyList_GET_SIZE(added) == count))
            return added;
        PyErr_SetString(PyExc_TypeError, "add_all_computed gives a list with the events of each tensor");
        goto failed;
    }
    if ((added = PyList_New(count)) == NULL || (record = get(builder, name_record)) == NULL)
        goto failed;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *site = PyList_GET_ITEM(sites, index), *tensor = PyList_GET_ITEM(tensors, index);
        PyObject *given = PyList_GET_ITEM(sources, index), *own[] = {record, site, tensor, group, given};
        PyObject *event = add_plain(NULL, own, 5), *events;
        if (event == NULL)
            goto failed;
        if (event == Py_None)
            events = PyObject_CallMethodObjArgs(builder, name_add_computed, site, tensor, group, given, NULL);
        else
            events = item_of(alone, event);
        Py_DECREF(event);
        if (events == NULL)
            goto failed;
        PyList_SET_ITEM(added, index, events);
    }
    Py_DECREF(record);
    return added;
failed:
    Py_XDECREF(record);
    Py_XDECREF(added);
    return NULL;
}

/* The tensors that an operation reads, as they are gathered; and what it writes. */
typedef struct {
    PyObject *sites, *tensors, *sources, *written, *storages;
} Reading;

/* Take note of one argument; -1 with an error set. */
static int read_argument(PyObject *hooks, PyObject *where, PyObject *facts, PyObject *memories, PyObject *sites,
                         PyObject *name, PyObject *tensor, Reading *reading)
{
    PyObject *writes = PyTuple_GET_ITEM(facts, FACTS_WRITTEN), *unread = PyTuple_GET_ITEM(facts, FACTS_UNREAD);
    PyObject *storage = storage_of(tensor), *argument = NULL, *site = NULL, *sources = NULL;
    Memory *memory = NULL;
    int failed = -1, is_written = 0;
    if (storage == NULL)
        return -1;
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "an argument's name is a string, not %R", name);
        goto end;
    }
    if (PyTuple_GET_SIZE(writes) > 0 || PySet_GET_SIZE(unread) > 0) {
        Py_ssize_t dot = PyUnicode_FindChar(name, '.', 0, PyUnicode_GET_LENGTH(name), 1);
        argument = dot < 0 ? Py_NewRef(name) : PyUnicode_Substring(name, 0, dot);
        if (argument == NULL || (is_written = PySequence_Contains(writes, argument)) < 0)
            goto end;
        if (is_written) {
            PyObject *slot = PyUnicode_FromFormat("%U.written", name);
            PyObject *entry = slot != NULL ? PyTuple_Pack(3, slot, tensor, storage) : NULL;
            Py_XDECREF(slot);
            int missed = entry == NULL || PyList_Append(reading->written, entry) < 0;
            Py_XDECREF(entry);
            if (missed || PySet_Add(reading->storages, storage) < 0)
                goto end;
        }
        int is_unread = PySet_Contains(unread, argument);
        if (is_unread != 0) {
            failed = is_unread < 0 ? -1 : 0;
            goto end;
        }
    } else if (PySet_Add(reading->storages, storage) < 0)
        goto end;
    memory = living_memory(memories, storage);
    if (PyErr_Occurred())
        goto end;
    if (memory != NULL && is_written && memory->written != NULL && memory->written != Py_None) {
        int is_fresh = is_true(PyObject_CallMethodOneArg((PyObject *)memory, name_is_fresh, tensor));
        if (is_fresh != 0) { /* what it held before is chance: what the operation leaves of that is in what it wrote */
            failed = is_fresh < 0 ? -1 : 0;
            goto end;
        }
    }
    if ((site = item_of(sites, name)) == NULL)
        goto end;
    if (memory != NULL) {
        int is_own = memory->builder == PyTuple_GET_ITEM(where, WHERE_BUILDER);
        sources = is_own && memory->events != NULL ? Py_NewRef(memory->events) : PyTuple_New(0);
    } else {
        PyObject *own = PyObject_CallMethodObjArgs(hooks, name__site_of_unwritten, where, site, tensor, storage, NULL);
        Py_SETREF(site, own);
        sources = own != NULL ? PyTuple_New(0) : NULL;
    }
    if (sources != NULL)
        failed = PyList_Append(reading->sites, site) || PyList_Append(reading->tensors, tensor) ||
                         PyList_Append(reading->sources, sources)
                     ? -1
                     : 0;
end:
    Py_DECREF(storage);
    Py_XDECREF(argument);
    Py_XDECREF(memory);
    Py_XDECREF(site);
    Py_XDECREF(sources);
    return failed;
}

/* Record what an operation reads; add the events to `inputs`, and what it writes and where that lies to the others. */
static int read_arguments(PyObject *hooks, PyObject *where, PyObject *facts, PyObject *sites, PyObject *group,
                          PyObject *given, PyObject *inputs, PyObject *written, PyObject *storages)
{
    PyObject *memories = NULL, *added = NULL;
    Reading reading = {PyList_New(0), PyList_New(0), PyList_New(0), written, storages};
    int failed = -1;
    if (reading.sites == NULL || reading.tensors == NULL || reading.sources == NULL ||
        (memories = get(hooks, name__memory)) == NULL)
        goto end;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(given); index++) {
        PyObject *pair = PyList_GET_ITEM(given, index);
        if (read_argument(hooks, where, facts, memories, sites, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1),
                          &reading) < 0)
            goto end;
    }
    added = add_computed(PyTuple_GET_ITEM(where, WHERE_BUILDER), reading.sites, reading.tensors, group, reading.sources);
    if (added == NULL)
        goto end;
    failed = 0;
    for (Py_ssize_t index = 0; !failed && index < PyList_GET_SIZE(added); index++)
        failed = extend(inputs, PyList_GET_ITEM(added, index));
end:
    Py_XDECREF(memories);
    Py_XDECREF(reading.sites);
    Py_XDECREF(reading.tensors);
    Py_XDECREF(reading.sources);
    Py_XDECREF(added);
    return failed;
}

/* Record an operation's numbers, flags and strings, as `OpHooks._record_scalars`; add the events to `inputs`. */
static int read_scalars(PyObject *hooks, PyObject *builder, PyObject *sites, PyObject *scalars, PyObject *group,
                        PyObject *inputs)
{
    PyObject *site = item_of(sites, name_scalars), *text = site != NULL ? PyObject_Repr(scalars) : NULL;
    PyObject *texts = text != NULL ? get(hooks, name__scalars) : NULL;
    PyObject *known = texts != NULL ? PyDict_GetItemWithError(texts, text) : NULL;
    int failed = -1;
    if (known == NULL) {
        if (texts != NULL && !PyErr_Occurred()) {
            PyObject *added = PyObject_CallMethodObjArgs(hooks, name__record_scalars, builder, site, scalars, group, NULL);
            failed = added == NULL ? -1 : extend(inputs, added);
            Py_XDECREF(added);
        }
        goto end;
    }
    if (!is_tuple_of(known, 4, "a text's kind, digest, leaves and value"))
        goto end;
    Py_INCREF(known);
    PyObject *none = PyTuple_New(0), *record = none != NULL ? get(builder, name_record) : NULL;
    PyObject *values = NULL, *event = NULL;
    if (record != NULL && (values = get(record, name_values)) != NULL) {
        Py_ssize_t index = add_event(record, site, PyTuple_GET_ITEM(known, 0), PyTuple_GET_ITEM(known, 1),
                                     PyTuple_GET_ITEM(known, 2), group, none);
        if (index >= 0 && (event = PyLong_FromSsize_t(index)) != NULL)
            failed = PyDict_SetItem(values, event, PyTuple_GET_ITEM(known, 3)) || PyList_Append(inputs, event) ? -1 : 0;
    }
    Py_XDECREF(record);
    Py_XDECREF(values);
    Py_XDECREF(event);
    Py_XDECREF(none);
    Py_DECREF(known);
end:
    Py_XDECREF(site);
    Py_XDECREF(text);
    Py_XDECREF(texts);
    return failed;
}

/* Whether the Python has to record an operation: its arguments are to be saved, its line is asked for, it draws random
 * numbers, or what it reads hangs on a number. -1 with an error set. */
static int is_seldom(PyObject *hooks, PyObject *facts, PyObject *kwargs)
{
    if (PyTuple_GET_ITEM(facts, FACTS_DRAWS) == Py_True ||
        (PyTuple_GET_ITEM(facts, FACTS_IS_SCALING) == Py_True && PyDict_GET_SIZE(kwargs) > 0))
        return 1;
    PyObject *capture = get(hooks, name__capture);
    PyObject *lines = capture != NULL ? get(hooks, name__lines) : NULL;
    int seldom = lines == NULL ? -1 : capture != Py_None || lines != Py_None;
    Py_XDECREF(capture);
    Py_XDECREF(lines);
    return seldom;
}

/* Return `OpHooks.in_part`. */
static PyObject *in_part_of(PyObject *hooks)
{
    PyObject *in_part = get(hooks, name_in_part);
    if (in_part == NULL || PyDict_Check(in_part))
        return in_part;
    Py_DECREF(in_part);
    PyErr_SetString(PyExc_TypeError, "memory written in part is in a dictionary");
    return NULL;
}

/* Whether a tensor that is read may hold what memory held by chance, as `OpHooks._chances` finds out; without any, whether
 * there is such memory at all. -1 with an error set. */
static int is_in_part(PyObject *hooks, PyObject *facts, PyObject *tensors)
{
    PyObject *in_part = in_part_of(hooks), *unread = PyTuple_GET_ITEM(facts, FACTS_UNREAD);
    int found = in_part == NULL ? -1 : 0;
    if (!found && PyDict_GET_SIZE(in_part) > 0) {
        found = tensors == NULL;
        for (Py_ssize_t index = 0; !found && index < PyList_GET_SIZE(tensors); index++) {
            PyObject *pair = PyList_GET_ITEM(tensors, index);
            int is_unread = PySet_Contains(unread, PyTuple_GET_ITEM(pair, 0));
            PyObject *storage = is_unread == 0 ? storage_of(PyTuple_GET_ITEM(pair, 1)) : NULL;
            if (storage != NULL)
                found = PyDict_Contains(in_part, storage);
            else if (is_unread <= 0)
                found = -1;
            Py_XDECREF(storage);
        }
    }
    Py_XDECREF(in_part);
    return found;
}

/* --- where it runs */

/* Return where an operation runs, as `OpHooks._locate`: mostly where the one before did. */
static PyObject *locate(PyObject *hooks)
{
    PyObject *recorder = get(hooks, name__recorder), *modules = NULL, *local = NULL, *stack = NULL;
    PyObject *call, *last = NULL;
    PyObject *builder = NULL, *gradients = NULL, *owners = NULL, *task = NULL, *node = NULL, *name = NULL, *number = NULL;
    PyObject *where = NULL;
    if (recorder == NULL || (modules = get(recorder, name_modules)) == NULL ||
        (local = get(modules, name__local)) == NULL || (stack = get(local, name_stack)) == NULL ||
        (task = PyObject_CallNoArgs(graph_task)) == NULL || (last = get(hooks, name__last)) == NULL)
        goto end;
    int is_backward = PyLong_AsLong(task) != -1;
    if (PyErr_Occurred() || !PyList_Check(stack))
        goto ask;
    call = PyList_GET_SIZE(stack) > 0 ? PyList_GET_ITEM(stack, PyList_GET_SIZE(stack) - 1) : Py_None;
    if (!PyTuple_Check(last) || PyTuple_GET_SIZE(last) != 2 || (call == Py_None && !is_backward))
        goto ask;
    if ((builder = get(recorder, name_current)) == NULL ||
        (gradients = get(recorder, name_gradients)) == NULL ||
        (owners = get(gradients, name_owners)) == NULL)
        goto end;
    PyObject *place = PyTuple_GET_ITEM(last, 0);
    if (!PyTuple_Check(place) || PyTuple_GET_SIZE(place) != 5 || PyTuple_GET_ITEM(place, 0) != builder || PyTuple_GET_ITEM(place, 1) != owners ||
        PyTuple_GET_ITEM(place, 2) != call)
        goto ask;
    if (is_backward) {
        if ((node = PyObject_CallNoArgs(current_node)) == NULL)
            goto end;
        if (node == Py_None || (number = PyObject_CallMethodNoArgs(node, name__sequence_nr)) == NULL)
            goto ask;
        if ((name = PyObject_CallMethodNoArgs(node, name_name)) == NULL)
            goto end;
        int is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(place, 3), number, Py_EQ);
        if (is_same > 0)
            is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(place, 4), name, Py_EQ);
        if (is_same < 0)
            goto end;
        if (!is_same)
            goto ask;
    } else {
        long before = PyLong_AsLong(PyTuple_GET_ITEM(place, 3));
        if (before != -1 || PyErr_Occurred())
            goto ask;
    }
    where = Py_NewRef(PyTuple_GET_ITEM(last, 1));
    goto end;
ask:
    if (!PyErr_Occurred())
        where = PyObject_CallMethodNoArgs(hooks, name__locate);
end:
    if (where != NULL && !is_where(where))
        Py_CLEAR(where);
    Py_XDECREF(recorder);
    Py_XDECREF(modules);
    Py_XDECREF(local);
    Py_XDECREF(stack);
    Py_XDECREF(last);
    Py_XDECREF(builder);
    Py_XDECREF(gradients);
    Py_XDECREF(owners);
    Py_XDECREF(task);
    Py_XDECREF(node);
    Py_XDECREF(name);
    Py_XDECREF(number);
    return where;
}

/* Open the group of an operation; return its number. */
static PyObject *open_group(PyObject *builder, PyObject *sites, PyObject *facts, PyObject *where)
{
    return open_group_at(builder, sites, name_op, PyTuple_GET_ITEM(facts, FACTS_NAME), PyTuple_GET_ITEM(where, WHERE_PARENT),
                         PyTuple_GET_ITEM(where, WHERE_NODE));
}

/* --- an operation that is about to run */

static PyObject *open_operation(PyObject *hooks, PyObject *facts, PyObject *args, PyObject *kwargs)
{
    PyObject *where = NULL, *sites = NULL, *group = NULL, *inputs = NULL, *computed_from = NULL, *opened = NULL;
    PyObject *tensors = PyList_New(0), *scalars = PyList_New(0), *written = PyList_New(0), *storages = PySet_New(NULL);
    if (tensors == NULL || scalars == NULL || written == NULL || storages == NULL)
        goto end;
    int sorted = is_seldom(hooks, facts, kwargs);
    if (sorted == 0)
        sorted = sort_arguments(facts, args, kwargs, tensors, scalars);
    else if (sorted > 0)
        sorted = 0;
    int in_part = sorted == 1 ? is_in_part(hooks, facts, tensors) : 0;
    if (in_part != 0)
        sorted = in_part < 0 ? -1 : 0;
    if (sorted == 0)
        opened = PyObject_CallMethodObjArgs(hooks, name__begin, facts, args, kwargs, NULL);
    if (sorted != 1 && sorted != 2)
        goto end;
    if ((where = locate(hooks)) == NULL)
        goto end;
    PyObject *builder = PyTuple_GET_ITEM(where, WHERE_BUILDER);
    int is_kept = has(builder, name_is_kept);
    if (is_kept == 0 && (in_part = is_in_part(hooks, facts, NULL)) != 0)
        opened = in_part < 0 ? NULL : PyObject_CallMethodObjArgs(hooks, name__begin, facts, args, kwargs, NULL);
    else if (is_kept == 0 || sorted == 2)
        opened = Py_NewRef(Py_None);
    if (is_kept != 1 || sorted == 2)
        goto end;
    sites = next_sites(builder, PyTuple_GET_ITEM(where, WHERE_PHASE), PyTuple_GET_ITEM(where, WHERE_ROOT),
                       PyTuple_GET_ITEM(where, WHERE_PATH), PyTuple_GET_ITEM(facts, FACTS_NAME),
                       PyTuple_GET_ITEM(where, WHERE_IS_EVAL));
    if (sites == NULL || (group = open_group(builder, sites, facts, where)) == NULL || (inputs = PyList_New(0)) == NULL)
        goto end;
    if (read_arguments(hooks, where, facts, sites, group, tensors, inputs, written, storages) < 0)
        goto end;
    if (PyList_GET_SIZE(scalars) > 0 && read_scalars(hooks, builder, sites, scalars, group, inputs) < 0)
        goto end;
    if ((computed_from = PyList_AsTuple(inputs)) != NULL)
        opened = PyTuple_Pack(7, builder, sites, group, computed_from, written, storages, Py_None);
end:
    Py_XDECREF(where);
    Py_XDECREF(sites);
    Py_XDECREF(group);
    Py_XDECREF(inputs);
    Py_XDECREF(computed_from);
    Py_XDECREF(tensors);
    Py_XDECREF(scalars);
    Py_XDECREF(written);
    Py_XDECREF(storages);
    return opened;
}

/* --- what it wrote */

/* Whether a tensor has as many bytes as its storage, or more; -1 with an error set. */
static int fills_storage(PyObject *tensor)
{
    PyObject *own = get(tensor, name_nbytes);
    long long own_bytes = own != NULL ? PyLong_AsLongLong(own) : -1;
    Py_XDECREF(own);
    PyObject *storage = PyErr_Occurred() ? NULL : PyObject_CallMethodNoArgs(tensor, name_untyped_storage);
    if (storage == NULL)
        return -1;
    long long storage_bytes = number_of(storage, name_nbytes);
    Py_DECREF(storage);
    return PyErr_Occurred() ? -1 : own_bytes >= storage_bytes;
}

/* Return what is known of a storage, which is nothing yet where it is new, as `OpHooks._memory_of`; NULL for a tensor
 * without one, or with an error set. */
static Memory *memory_of(PyObject *hooks, PyObject *memories, PyObject *tensor, PyObject *storage)
{
    Memory *memory = known_memory(memories, storage);
    if (memory == NULL) {
        if (PyErr_Occurred() || storage == Py_None)
            return NULL;
        memory = (Memory *)PyObject_CallMethodObjArgs(hooks, name__memory_of, tensor, storage, NULL);
        if (memory == NULL || PyObject_TypeCheck(memory, memory_base))
            return memory;
        Py_DECREF(memory);
        PyErr_SetString(PyExc_TypeError, "what is known of a storage is a Memory");
        return NULL;
    }
    Py_INCREF(memory);
    int gone = is_gone(memory);
    if (gone < 0 || (gone && begin_again(memory, tensor) < 0))
        Py_CLEAR(memory);
    return memory;
}

/* Memory is known to be written in full; -1 with an error set. */
static int follow_no_more(PyObject *hooks, PyObject *storage)
{
    PyObject *in_part = in_part_of(hooks);
    int found = in_part == NULL ? -1 : PyDict_Contains(in_part, storage);
    if (found > 0)
        found = PyDict_DelItem(in_part, storage);
    Py_XDECREF(in_part);
    return found;
}

/* Note what was written, as `OpHooks._note_write`; -1 with an error set. */
static int note_write(PyObject *hooks, PyObject *builder, PyObject *tensor, PyObject *storage, PyObject *events, int is_new)
{
    PyObject *memories = get(hooks, name__memory), *now = NULL; /* `_memory_of` may have made it anew */
    Memory *memory = memories != NULL ? memory_of(hooks, memories, tensor, storage) : NULL;
    Py_XDECREF(memories);
    if (memory == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (memory->written != NULL && memory->written != Py_None) {
        PyObject *noted = PyObject_CallMethodOneArg((PyObject *)memory, name_note_write, tensor);
        Py_XDECREF(noted);
        if (noted == NULL || (memory->written == Py_None && follow_no_more(hooks, storage) < 0))
            goto end;
    }
    int replaces = is_new || memory->builder != builder ? 1 : fills_storage(tensor);
    if (replaces > 0) {
        if ((now = PySequence_Tuple(events)) != NULL)
            Py_XSETREF(memory->builder, Py_NewRef(builder));
    } else if (replaces == 0) {
        PyObject *before = Py_XNewRef(memory->events), *list = before != NULL ? PySequence_List(before) : PyList_New(0);
        if (list != NULL && extend(list, events) == 0)
            now = PyList_AsTuple(list);
        Py_XDECREF(before);
        Py_XDECREF(list);
    }
    if (now != NULL)
        Py_XSETREF(memory->events, Py_NewRef(now));
end:;
    int failed = now == NULL ? -1 : 0;
    Py_DECREF(memory);
    Py_XDECREF(now);
    return failed;
}

/* Add what an operation gave to what it wrote, unless it lies where an argument does; -1 with an error set. */
static int take_result(PyObject *slot, PyObject *tensor, PyObject *storages, PyObject *wrote)
{
    int is_meta = has(tensor, name_is_meta);
    if (is_meta != 0)
        return is_meta < 0 ? -1 : 0;
    PyObject *storage = storage_of(tensor);
    if (storage == NULL)
        return -1;
    int failed = PySet_Contains(storages, storage);
    if (failed == 0) {
        PyObject *entry = PyTuple_Pack(3, slot, tensor, storage);
        failed = entry == NULL ? -1 : PyList_Append(wrote, entry);
        Py_XDECREF(entry);
    }
    Py_DECREF(storage);
    return failed < 0 ? -1 : 0;
}

/* Whether results are plain tensors, or a tuple or list of nothing else than these and None. */
static int is_plain_result(PyObject *result)
{
    if (result == Py_None || is_tensor(result))
        return 1;
    if (!PyTuple_CheckExact(result) && !PyList_CheckExact(result))
        return 0;
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(result); index++) {
        PyObject *member = PySequence_Fast_GET_ITEM(result, index);
        if (member != Py_None && !is_tensor(member))
            return 0;
    }
    return 1;
}

/* Take every tensor among plain results, named as `modules.named_tensors` does; -1 with an error set. */
static int take_results(PyObject *result, PyObject *storages, PyObject *wrote)
{
    if (result == Py_None)
        return 0;
    if (is_tensor(result))
        return take_result(name_out, result, storages, wrote);
    PyObject *count = PyLong_FromSsize_t(PySequence_Fast_GET_SIZE(result));
    PyObject *slots = count != NULL ? PyObject_CallFunctionObjArgs(member_names, name_out, count, NULL) : NULL;
    PyObject *members = slots != NULL ? PySequence_Tuple(result) : NULL;
    int failed = members == NULL ? -1 : 0;
    if (members != NULL && (!PyList_Check(slots) || PyList_GET_SIZE(slots) != PyTuple_GET_SIZE(members))) {
        PyErr_SetString(PyExc_TypeError, "member_names gives a list with the name of each member");
        failed = -1;
    }
    for (Py_ssize_t index = 0; !failed && index < PyTuple_GET_SIZE(members); index++) {
        PyObject *member = PyTuple_GET_ITEM(members, index);
        if (member != Py_None)
            failed = take_result(PyList_GET_ITEM(slots, index), member, storages, wrote);
    }
    Py_XDECREF(count);
    Py_XDECREF(slots);
    Py_XDECREF(members);
    return failed;
}

static PyObject *close_operation(PyObject *hooks, PyObject *facts, PyObject *opened, PyObject *given)
{
    if (!is_opened(opened))
        return NULL;
    if (PyTuple_GET_ITEM(opened, OPENED_LINE) != Py_None || PyTuple_GET_SIZE(PyTuple_GET_ITEM(facts, FACTS_PRIVATE)) > 0 ||
        !is_plain_result(given))
        return PyObject_CallMethodObjArgs(hooks, name__end, facts, opened, given, NULL);
    PyObject *builder = PyTuple_GET_ITEM(opened, OPENED_BUILDER), *sites = PyTuple_GET_ITEM(opened, OPENED_SITES);
    PyObject *group = PyTuple_GET_ITEM(opened, OPENED_GROUP), *inputs = PyTuple_GET_ITEM(opened, OPENED_INPUTS);
    PyObject *written = PyTuple_GET_ITEM(opened, OPENED_WRITTEN), *added = NULL, *result = NULL;
    PyObject *wrote = PySequence_List(written);
    PyObject *places = PyList_New(0), *tensors = PyList_New(0), *sources = PyList_New(0);
    if (wrote == NULL || places == NULL || tensors == NULL || sources == NULL ||
        take_results(given, PyTuple_GET_ITEM(opened, OPENED_STORAGES), wrote) < 0)
        goto end;
    Py_ssize_t count = PyList_GET_SIZE(wrote), num_written = PyList_GET_SIZE(written);
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *entry = PyList_GET_ITEM(wrote, index);
        if (!is_tuple_of(entry, 3, "a slot, a tensor and its storage"))
            goto end;
        PyObject *site = item_of(sites, PyTuple_GET_ITEM(entry, 0));
        if (site == NULL)
            goto end;
        int failed = PyList_Append(places, site) || PyList_Append(tensors, PyTuple_GET_ITEM(entry, 1)) ||
                     PyList_Append(sources, inputs);
        Py_DECREF(site);
        if (failed)
            goto end;
    }
    if (count > 0 && (added = add_computed(builder, places, tensors, group, sources)) == NULL)
        goto end;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *entry = PyList_GET_ITEM(wrote, index);
        if (note_write(hooks, builder, PyTuple_GET_ITEM(entry, 1), PyTuple_GET_ITEM(entry, 2),
                       PyList_GET_ITEM(added, index), index >= num_written) < 0)
            goto end;
    }
    result = Py_NewRef(Py_None);
end:
    Py_XDECREF(wrote);
    Py_XDECREF(places);
    Py_XDECREF(tensors);
    Py_XDECREF(sources);
    Py_XDECREF(added);
    return result;
}

/* --- one operation from its beginning to its end */

/* Return what is known of an operator where nothing keeps it from being recorded here or passed over here;
 * NULL where the Python has to look, or with an error set. */
static PyObject *facts_at_hand(PyObject *hooks, PyObject *func, PyObject *types)
{
    if (!PyTuple_Check(types))
        return NULL;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(types); index++) /* a subclass may go first */
        if (PyTuple_GET_ITEM(types, index) != tensor_type && PyTuple_GET_ITEM(types, index) != parameter_type)
            return NULL;
    PyObject *known = NULL, *number = NULL, *launches = NULL, *seen = NULL, *facts = NULL;
    PyObject *recorder = get(hooks, name__recorder);
    if (recorder == NULL || has(recorder, name_is_active) != 1 || is_quiet() != 0 ||
        (known = get(hooks, name__facts)) == NULL || (number = PyLong_FromVoidPtr(func)) == NULL)
        goto end;
    facts = Py_XNewRef(PyDict_GetItemWithError(known, number));
    if (facts != NULL &&
        (!is_facts(facts) || PyTuple_GET_ITEM(facts, FACTS_IS_EMPTY) == Py_True ||
         (launches = get(hooks, name__launches)) == NULL ||
         (seen = get(launches, name__num_modules)) == NULL ||
         PyLong_AsSsize_t(seen) != PyDict_GET_SIZE(loaded_modules) || PyErr_Occurred() ||
         is_true(PyObject_CallNoArgs(is_distributed)) != 0))
        Py_CLEAR(facts);
end:
    Py_XDECREF(recorder);
    Py_XDECREF(known);
    Py_XDECREF(number);
    Py_XDECREF(launches);
    Py_XDECREF(seen);
    return facts;
}

PyObject *run_operation(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5 || !PyTuple_Check(args[3]) || !PyDict_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "run_operation takes hooks, an operator, types, arguments and named arguments");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS))
        return NULL;
    PyObject *hooks = args[0], *func = args[1], *result = NULL, *facts = facts_at_hand(hooks, func, args[2]);
    if (facts == NULL)
        return PyErr_Occurred() ? NULL : PyObject_CallMethodObjArgs(hooks, name__run, func, args[2], args[3], args[4], NULL);
    if (PyTuple_GET_ITEM(facts, FACTS_IS_RECORDED) != Py_True) {
        Py_DECREF(facts);
        return PyObject_Call(func, args[3], args[4]);
    }
    Pause pause;
    PyObject *opened = begin_pause(&pause) < 0 ? NULL : end_pause(&pause, open_operation(hooks, facts, args[3], args[4]));
    if (opened != NULL)
        result = PyObject_Call(func, args[3], args[4]);
    if (result != NULL && opened != Py_None) {
        PyObject *closed = begin_pause(&pause) < 0 ? NULL : end_pause(&pause, close_operation(hooks, facts, opened, result));
        if (closed == NULL)
            Py_CLEAR(result);
        Py_XDECREF(closed);
    }
    Py_XDECREF(opened);
    Py_DECREF(facts);
    return result;
}

/* --- the same in two parts, for what is no operator: the launch of a kernel */

PyObject *begin_operation(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Pause pause;
    if (num_args != 4 || !PyTuple_Check(args[2]) || !PyDict_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "begin_operation takes hooks, facts, arguments and named arguments");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS) || !is_facts(args[1]) || begin_pause(&pause) < 0)
        return NULL;
    return end_pause(&pause, open_operation(args[0], args[1], args[2], args[3]));
}

PyObject *end_operation(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Pause pause;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "end_operation takes hooks, facts, what was opened and a result");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS) || !is_facts(args[1]) || !is_opened(args[2]) || begin_pause(&pause) < 0)
        return NULL;
    return end_pause(&pause, close_operation(args[0], args[1], args[2], args[3]));
}
