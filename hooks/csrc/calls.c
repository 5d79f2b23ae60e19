/* Calls of modules: what goes in and comes out becomes events, as `modules.ModuleHooks._begin` and `_record_outputs`. */
#include "native.h"

/* The slots of the first arguments, `in.0`, ...: made once. */
#define NUM_SLOTS 16
static PyObject *slots[NUM_SLOTS];

/* --- which tensors there are */

/* Whether a value is a tensor, of any class: 1, 0, or -1 with an error set. */
static int is_any_tensor(PyObject *value)
{
    return is_tensor(value) ? 1 : PyObject_IsInstance(value, tensor_type);
}

/* Add what a value holds to a list of (slot, tensor), as `modules.named_tensors`; -1 with an error set. */
static int take_tensors(PyObject *pairs, PyObject *value, PyObject *slot)
{
    if (value == Py_None || PyUnicode_Check(value) || PyBytes_Check(value) || PyLong_Check(value) || PyFloat_Check(value))
        return 0;
    int is_one = is_any_tensor(value), failed = is_one < 0 ? -1 : 0;
    if (is_one == 1)
        failed = append_pair(pairs, slot, value);
    else if (is_one == 0) {
        PyObject *found = PyObject_CallFunctionObjArgs(named_tensors, value, slot, NULL);
        PyObject *all = found != NULL ? PySequence_List(found) : NULL;
        failed = all == NULL ? -1 : extend(pairs, all);
        Py_XDECREF(found);
        Py_XDECREF(all);
    }
    return failed;
}

static PyObject *slot_of(Py_ssize_t index)
{
    if (index >= NUM_SLOTS)
        return PyUnicode_FromFormat("in.%zd", index);
    if (slots[index] == NULL && (slots[index] = PyUnicode_FromFormat("in.%zd", index)) != NULL)
        PyUnicode_InternInPlace(&slots[index]);
    return Py_XNewRef(slots[index]);
}

/* Return (slot, tensor) of every tensor among a call's arguments, as `modules.named_arguments`. */
static PyObject *tensors_among(PyObject *args, PyObject *kwargs)
{
    PyObject *pairs = PyList_New(0), *name, *value;
    int failed = pairs == NULL ? -1 : 0;
    for (Py_ssize_t index = 0; !failed && index < PyTuple_GET_SIZE(args); index++) {
        PyObject *slot = slot_of(index);
        failed = slot == NULL ? -1 : take_tensors(pairs, PyTuple_GET_ITEM(args, index), slot);
        Py_XDECREF(slot);
    }
    for (Py_ssize_t position = 0; !failed && PyDict_Next(kwargs, &position, &name, &value);) {
        PyObject *slot = PyUnicode_FromFormat("in.%U", name);
        Py_INCREF(value);
        failed = slot == NULL ? -1 : take_tensors(pairs, value, slot);
        Py_DECREF(value);
        Py_XDECREF(slot);
    }
    if (failed)
        Py_CLEAR(pairs);
    return pairs;
}

/* --- tensors that were recorded before */

/* Return how often operations wrote a tensor, as `steps.version_of`; -1 where PyTorch does not count, -2 with an error. */
static long long version_of(PyObject *tensor)
{
    int is_inference = says(tensor, name_is_inference);
    if (is_inference != 0)
        return is_inference < 0 ? -2 : -1;
    PyObject *version = get(tensor, name__version);
    long long number = version != NULL ? PyLong_AsLongLong(version) : -2;
    Py_XDECREF(version);
    return PyErr_Occurred() ? -2 : number;
}

/* Return what is remembered of this very tensor, NULL where nothing is, or with an error set. */
static PyObject *remembered(PyObject *builder, PyObject *tensor)
{
    PyObject *all = get(builder, name__remembered), *key = PyLong_FromVoidPtr(tensor), *living = NULL;
    PyObject *held = all != NULL && key != NULL ? Py_XNewRef(PyDict_GetItemWithError(all, key)) : NULL;
    if (held != NULL && (living = PyObject_CallNoArgs(held)) != tensor)
        Py_CLEAR(held);
    Py_XDECREF(living);
    Py_XDECREF(all);
    Py_XDECREF(key);
    return held;
}

/* Note under which events a tensor was last recorded, as `StepBuilder.remember`; -1 with an error set. */
static int remember(PyObject *builder, PyObject *tensor, PyObject *events)
{
    PyObject *all = get(builder, name__remembered), *key = PyLong_FromVoidPtr(tensor), *version = NULL;
    PyObject *held = all != NULL && key != NULL ? PyObject_CallOneArg(remembered_type, tensor) : NULL;
    long long number = held != NULL ? version_of(tensor) : -2;
    int failed = -1;
    if (!PyErr_Occurred() && (version = PyLong_FromLongLong(number)) != NULL &&
        set(held, name_version, version) == 0 && set(held, name_events, events) == 0)
        failed = PyDict_SetItem(all, key, held);
    Py_XDECREF(all);
    Py_XDECREF(key);
    Py_XDECREF(held);
    Py_XDECREF(version);
    return failed;
}

/* Add an event that has the digest of another: 1, with the event in `added`; 0 where that is not to be; -1 with an error. */
static int add_equal(PyObject *builder, PyObject *site, PyObject *tensor, PyObject *group, PyObject *inputs, PyObject *held,
                     PyObject **added)
{
    PyObject *version = get(held, name_version), *events = NULL, *record = NULL, *kinds = NULL, *digests = NULL;
    PyObject *leaves = NULL, *sources = NULL, *all_owed = NULL, *device = NULL, *owed = NULL, *event = NULL;
    long long before = version != NULL ? PyLong_AsLongLong(version) : -2, now = PyErr_Occurred() ? -2 : version_of(tensor);
    int found = PyErr_Occurred() ? -1 : 0;
    if (found < 0 || before != now || before < 0 || (events = get(held, name_events)) == NULL ||
        !PyTuple_Check(events) || PyTuple_GET_SIZE(events) != 1)
        goto end;
    PyObject *known = PyTuple_GET_ITEM(events, 0);
    Py_ssize_t at = PyLong_AsSsize_t(known);
    found = -1;
    if ((record = get(builder, name_record)) == NULL || (kinds = get(record, name_kinds)) == NULL ||
        (digests = get(record, name_digests)) == NULL || (leaves = get(record, name_leaves)) == NULL ||
        (sources = same(builder, inputs)) == NULL || (all_owed = get(builder, name__owed)) == NULL ||
        (device = get(tensor, name_device)) == NULL)
        goto end;
    if (!PyList_Check(kinds) || !PyList_Check(digests) || !PyList_Check(leaves) || !PyDict_Check(all_owed) || at < 0 ||
        at >= PyList_GET_SIZE(kinds) || at >= PyList_GET_SIZE(digests) || at >= PyList_GET_SIZE(leaves)) {
        PyErr_SetString(PyExc_IndexError, "a step has no such event");
        goto end;
    }
    Py_ssize_t index = add_event(record, site, PyList_GET_ITEM(kinds, at), PyList_GET_ITEM(digests, at),
                                 PyList_GET_ITEM(leaves, at), group, sources);
    if (index < 0 || (event = PyLong_FromSsize_t(index)) == NULL)
        goto end;
    owed = Py_XNewRef(PyDict_GetItemWithError(all_owed, device));
    PyObject *ticket = owed != NULL ? PyDict_GetItemWithError(owed, known) : NULL;
    if (PyErr_Occurred() || (ticket != NULL && PyDict_SetItem(owed, event, ticket) < 0))
        goto end;
    found = (*added = item_of(alone, event)) == NULL ? -1 : 1;
end:
    Py_XDECREF(version);
    Py_XDECREF(events);
    Py_XDECREF(record);
    Py_XDECREF(kinds);
    Py_XDECREF(digests);
    Py_XDECREF(leaves);
    Py_XDECREF(sources);
    Py_XDECREF(all_owed);
    Py_XDECREF(device);
    Py_XDECREF(owed);
    Py_XDECREF(event);
    return PyErr_Occurred() ? -1 : found;
}

/* Record a tensor that may have been recorded before in this step, as `StepBuilder.add_again`; `held` is what is remembered
 * of it, or NULL. Returns its events, a tuple. */
static PyObject *add_again(PyObject *builder, PyObject *site, PyObject *tensor, PyObject *group, PyObject *inputs,
                           PyObject *held)
{
    PyObject *added = NULL;
    int is_cpu = held != NULL ? has(tensor, name_is_cpu) : 1;
    int found = is_cpu == 0 ? add_equal(builder, site, tensor, group, inputs, held, &added) : is_cpu < 0 ? -1 : 0;
    return found == 0 ? add_events(builder, site, tensor, group, inputs) : added;
}

/* --- which gradients to follow */

/* Return what is followed in this step, as `GradientHooks._enter`. */
static PyObject *enter_trace(PyObject *gradients, PyObject *builder)
{
    PyObject *trace = get(gradients, name__trace), *reference = NULL, *held = NULL;
    if (trace != NULL && trace != Py_None && (reference = get(trace, name_builder)) != NULL)
        held = PyObject_CallNoArgs(reference);
    Py_XDECREF(reference);
    Py_XDECREF(held);
    if (PyErr_Occurred())
        Py_CLEAR(trace);
    else if (held != builder)
        Py_SETREF(trace, PyObject_CallMethodOneArg(gradients, name__enter, builder));
    return trace;
}

/* Return what identifies a node, as `gradients._key_of`. */
static PyObject *key_of(PyObject *node)
{
    PyObject *number = PyObject_CallMethodNoArgs(node, name__sequence_nr), *by = PyLong_FromLong(64), *key = NULL;
    PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    PyObject *shifted = number != NULL && by != NULL ? PyNumber_Lshift(number, by) : NULL;
    if (shifted != NULL && thread != NULL)
        key = PyNumber_Or(shifted, thread);
    Py_XDECREF(number);
    Py_XDECREF(by);
    Py_XDECREF(thread);
    Py_XDECREF(shifted);
    return key;
}

/* Follow the gradient of a tensor's view too where an in-place operation may take the view out of the graph. */
static int follow_view(PyObject *trace, PyObject *tensor, PyObject *key, PyObject *tracked)
{
    int is_view = says(tensor, name__is_view);
    if (is_view != 1)
        return is_view;
    PyObject *base = get(tensor, name__base), *node = NULL, *at = NULL, *views = NULL;
    int failed = -1;
    if (base == NULL || (node = base != Py_None ? get(base, name_grad_fn) : Py_NewRef(Py_None)) == NULL)
        goto end;
    if (node == Py_None) {
        failed = 0;
        goto end;
    }
    int is_same = (at = key_of(node)) != NULL ? PyObject_RichCompareBool(at, key, Py_EQ) : -1;
    if (is_same == 0 && (views = get(trace, name_views)) != NULL)
        failed = PyObject_SetItem(views, at, tracked);
    else if (is_same > 0)
        failed = 0;
end:
    Py_XDECREF(base);
    Py_XDECREF(node);
    Py_XDECREF(at);
    Py_XDECREF(views);
    return failed;
}

/* Follow a tensor, as `_Trace.add`. */
static PyObject *follow(PyObject *trace, PyObject *producer, PyObject *slot, PyObject *is_eval)
{
    PyObject *all = get(trace, name_tracked), *tracked = NULL;
    if (all != NULL && !PyList_Check(all))
        PyErr_SetString(PyExc_TypeError, "what a trace follows is a list");
    else if (all != NULL && (tracked = like(tracked_pattern)) != NULL &&
             (set(tracked, name_producer, producer) < 0 || set(tracked, name_slot, slot) < 0 ||
              set(tracked, name_is_eval, is_eval) < 0 || set(tracked, name_trace, trace) < 0 ||
              put(tracked, name_number, PyLong_FromSsize_t(PyList_GET_SIZE(all))) < 0 || PyList_Append(all, tracked) < 0))
        Py_CLEAR(tracked);
    Py_XDECREF(all);
    return tracked;
}

/* Return `_Outputs(hooks, index, first)`. */
static PyObject *new_outputs(PyObject *hooks, PyObject *index, PyObject *first)
{
    PyObject *outputs = like(outputs_pattern);
    if (outputs != NULL &&
        (set(outputs, name__hooks, hooks) < 0 || set(outputs, name__index, index) < 0 || set(outputs, name__first, first) < 0))
        Py_CLEAR(outputs);
    return outputs;
}

/* Follow the gradient of a tensor that `node` made, as `GradientHooks._track`; return the `Tracked`. */
static PyObject *track(PyObject *gradients, PyObject *builder, PyObject *tensor, PyObject *node, PyObject *producer,
                       PyObject *slot, PyObject *is_eval)
{
    PyObject *trace = enter_trace(gradients, builder), *key = NULL, *index = NULL, *all = NULL, *outputs = NULL;
    PyObject *tracked = NULL, *done = NULL;
    if (trace == NULL || (key = key_of(node)) == NULL || (index = get(tensor, name_output_nr)) == NULL ||
        (all = get(trace, name_outputs)) == NULL)
        goto end;
    if (!PyDict_Check(all)) {
        PyErr_SetString(PyExc_TypeError, "what is followed of nodes is in a dictionary");
        goto end;
    }
    if ((outputs = Py_XNewRef(PyDict_GetItemWithError(all, key))) != NULL &&
        (tracked = PyObject_CallMethodOneArg(outputs, name_get, index)) == Py_None)
        Py_CLEAR(tracked);
    else if (tracked != NULL || PyErr_Occurred())
        goto end;
    if ((tracked = follow(trace, producer, slot, is_eval)) == NULL || set(tracked, name_key, key) < 0)
        goto failed;
    if (outputs != NULL)
        done = PyObject_CallMethodObjArgs(outputs, name_add, index, tracked, NULL);
    else if ((outputs = new_outputs(gradients, index, tracked)) != NULL &&
             PyDict_SetItem(all, key, outputs) == 0)
        done = PyObject_CallMethodOneArg(node, name_register_prehook, outputs);
    if (done != NULL && follow_view(trace, tensor, key, tracked) == 0)
        goto end;
failed:
    Py_CLEAR(tracked);
end:
    Py_XDECREF(trace);
    Py_XDECREF(key);
    Py_XDECREF(index);
    Py_XDECREF(all);
    Py_XDECREF(outputs);
    Py_XDECREF(done);
    return tracked;
}

/* Follow an argument's gradient, as `GradientHooks.track_input`; -1 with an error set. */
static int track_input(PyObject *gradients, PyObject *builder, PyObject *call, PyObject *slot, PyObject *tensor,
                       PyObject *node)
{
    PyObject *is_eval = get(call, name_is_eval), *number = NULL, *more = NULL, *before = NULL, *all = NULL;
    PyObject *tracked = is_eval != NULL ? track(gradients, builder, tensor, node, Py_None, slot, is_eval) : NULL;
    int failed = -1;
    if (tracked != NULL && (number = get(call, name_number)) != NULL &&
        (more = PyTuple_Pack(2, number, slot)) != NULL && (before = get(tracked, name_consumers)) != NULL &&
        (all = PySequence_Concat(before, more)) != NULL) {
        Py_SETREF(all, same(builder, all));
        failed = all == NULL ? -1 : set(tracked, name_consumers, all);
    }
    Py_XDECREF(is_eval);
    Py_XDECREF(tracked);
    Py_XDECREF(number);
    Py_XDECREF(more);
    Py_XDECREF(before);
    Py_XDECREF(all);
    return failed;
}

/* Follow a result's gradient, as `GradientHooks.track_output`; -1 with an error set. */
static int track_output(PyObject *gradients, PyObject *builder, PyObject *call, PyObject *slot, PyObject *tensor,
                        PyObject *node)
{
    PyObject *is_eval = get(call, name_is_eval), *producer = NULL;
    PyObject *tracked = is_eval != NULL ? track(gradients, builder, tensor, node, call, slot, is_eval) : NULL;
    int failed = -1;
    if (tracked != NULL && (producer = get(tracked, name_producer)) != NULL)
        failed = producer != Py_None || (set(tracked, name_producer, call) == 0 &&
                                         set(tracked, name_slot, slot) == 0)
                     ? 0
                     : -1;
    Py_XDECREF(is_eval);
    Py_XDECREF(tracked);
    Py_XDECREF(producer);
    return failed;
}

/* --- what goes in, what comes out */

/* Add a tuple's members, or a list's, to a list; `members` is given away. -1 with an error set. */
static int take_members(PyObject *list, PyObject *members)
{
    int failed = members == NULL ? -1 : 0;
    if (!failed && members != Py_None)
        failed = extend(list, members);
    Py_XDECREF(members);
    return failed;
}

/* Return what code inside a call computes from that is not recorded itself: what went into the call, what the calls within
 * it gave so far, and what collectives gave in it and around it. */
static PyObject *surroundings(PyObject *builder, PyObject *call)
{
    PyObject *found = PyList_New(0), *top = NULL, *around = Py_NewRef(call), *sources = NULL;
    if (found == NULL || take_members(found, get(call, name_inputs)) ||
        take_members(found, get(call, name_children)))
        goto end;
    while (around != Py_None) {
        if (take_members(found, get(around, name__received)))
            goto end;
        PyObject *parent = get(around, name_parent);
        if (parent == NULL)
            goto end;
        Py_SETREF(around, parent);
    }
    if ((top = get(builder, name_top)) != NULL && take_members(found, get(top, name__received)) == 0)
        sources = PyList_AsTuple(found);
end:
    Py_XDECREF(found);
    Py_XDECREF(top);
    Py_DECREF(around);
    return sources;
}

/* Add events to a tuple that an object has; -1 with an error set. */
static int extend_tuple(PyObject *object, PyObject *attribute, PyObject *events)
{
    PyObject *before = get(object, attribute), *all = NULL;
    int failed = before == NULL || (all = PySequence_Concat(before, events)) == NULL ? -1
                                                                                      : set(object, attribute, all);
    Py_XDECREF(before);
    Py_XDECREF(all);
    return failed;
}

/* Take a pair of a slot and a tensor apart; -1 with an error set. */
static int take_apart(PyObject *pair, PyObject **slot, PyObject **tensor)
{
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "a slot and a tensor are a tuple");
        return -1;
    }
    *slot = PyTuple_GET_ITEM(pair, 0);
    *tensor = PyTuple_GET_ITEM(pair, 1);
    return 0;
}

/* Record one argument of a call within another one; -1 with an error set. */
static int record_argument(PyObject *gradients, PyObject *builder, PyObject *call, PyObject *above, PyObject *sites,
                           PyObject *pair)
{
    PyObject *slot, *tensor, *site = NULL, *held = NULL, *sources = NULL, *group = NULL, *events = NULL, *node = NULL;
    int failed = -1;
    if (take_apart(pair, &slot, &tensor) < 0 || (site = item_of(sites, slot)) == NULL)
        return -1;
    if ((held = remembered(builder, tensor)) != NULL)
        sources = get(held, name_events);
    if (!PyErr_Occurred() && (sources == NULL || PyObject_Size(sources) == 0))
        Py_XSETREF(sources, surroundings(builder, above));
    if (PyErr_Occurred() || sources == NULL || (group = get(above, name_group)) == NULL ||
        (events = add_again(builder, site, tensor, group, sources, held)) == NULL ||
        extend_tuple(call, name_inputs, events) < 0 || remember(builder, tensor, events) < 0)
        goto end;
    int requires_grad = has(tensor, name_requires_grad);
    if (requires_grad == 1 && (node = get(tensor, name_grad_fn)) != NULL)
        failed = node != Py_None ? track_input(gradients, builder, call, slot, tensor, node) : 0;
    else if (requires_grad == 0)
        failed = 0;
end:
    Py_XDECREF(site);
    Py_XDECREF(held);
    Py_XDECREF(sources);
    Py_XDECREF(group);
    Py_XDECREF(events);
    Py_XDECREF(node);
    return failed;
}

/* Record one result of a call; -1 with an error set. */
static int record_result(PyObject *gradients, PyObject *builder, PyObject *call, PyObject *sites, PyObject *group,
                         PyObject *sources, PyObject *pair)
{
    PyObject *slot, *tensor, *site = NULL, *held = NULL, *events = NULL, *node = NULL;
    int failed = -1;
    if (take_apart(pair, &slot, &tensor) < 0 || (site = item_of(sites, slot)) == NULL)
        return -1;
    if (((held = remembered(builder, tensor)) == NULL && PyErr_Occurred()) ||
        (events = add_again(builder, site, tensor, group, sources, held)) == NULL ||
        extend_tuple(call, name_outputs, events) < 0 || remember(builder, tensor, events) < 0 ||
        (node = get(tensor, name_grad_fn)) == NULL)
        goto end;
    failed = node != Py_None ? track_output(gradients, builder, call, slot, tensor, node) : 0;
end:
    Py_XDECREF(site);
    Py_XDECREF(held);
    Py_XDECREF(events);
    Py_XDECREF(node);
    return failed;
}

/* Return `ModuleHooks._recorder.gradients`. */
static PyObject *gradients_of(PyObject *hooks)
{
    PyObject *recorder = get(hooks, name__recorder);
    PyObject *gradients = recorder != NULL ? get(recorder, name_gradients) : NULL;
    Py_XDECREF(recorder);
    return gradients;
}

/* Record what goes into a call; -1 with an error set. */
static int record_arguments(PyObject *hooks, PyObject *builder, PyObject *call, PyObject *parent, PyObject *sites,
                            PyObject *arguments)
{
    if (parent == Py_None) { /* data perhaps */
        PyObject *done = PyObject_CallMethodObjArgs(hooks, name__record_inputs, builder, call, arguments, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    PyObject *gradients = gradients_of(hooks);
    int failed = gradients == NULL ? -1 : 0;
    for (Py_ssize_t index = 0; !failed && index < PyList_GET_SIZE(arguments); index++)
        failed = record_argument(gradients, builder, call, parent, sites, PyList_GET_ITEM(arguments, index));
    Py_XDECREF(gradients);
    return failed;
}

/* Open the computation that a call is, as `builder.open_group(sites.group(...))`; return its number. */
static PyObject *open_call_group(PyObject *builder, PyObject *sites, PyObject *phase, PyObject *module, PyObject *parent)
{
    PyObject *above = parent != Py_None ? get(parent, name_group) : PyLong_FromLong(-1), *number = NULL;
    PyObject *kind = above != NULL ? PyObject_CallOneArg(class_name, module) : NULL;
    if (kind != NULL)
        number = open_group_at(builder, sites, phase, kind, above, name_empty);
    Py_XDECREF(above);
    Py_XDECREF(kind);
    return number;
}

/* Fill in a new call and count it; -1 with an error set. */
static int register_call(PyObject *hooks, PyObject *builder, PyObject *module, PyObject *call, PyObject *parent,
                         PyObject *phase, PyObject *sites, PyObject *root, PyObject *path)
{
    PyObject *first = get(sites, name_first), *calls = NULL, *called = NULL, *key = NULL;
    int failed = -1;
    if (first != NULL && set(call, name_sites, sites) == 0 &&
        put(call, name_occurrence, get(first, name_occurrence)) == 0 &&
        put(call, name_group, open_call_group(builder, sites, phase, module, parent)) == 0 &&
        put(call, name_thread, PyLong_FromUnsignedLong(PyThread_get_thread_ident())) == 0 &&
        (calls = get(builder, name_calls)) != NULL &&
        put(call, name_number, PyLong_FromSsize_t(PyObject_Size(calls))) == 0 && PyList_Append(calls, call) == 0 &&
        (called = get(hooks, name_called)) != NULL && (key = PyTuple_Pack(2, root, path)) != NULL)
        failed = PySet_Add(called, key);
    Py_XDECREF(first);
    Py_XDECREF(calls);
    Py_XDECREF(called);
    Py_XDECREF(key);
    return failed;
}

/* Return the innermost call of this thread, None where there is none, and whether it evaluates. */
static PyObject *innermost(PyObject *hooks, PyObject **is_eval)
{
    PyObject *local = get(hooks, name__local), *stack = NULL, *parent = NULL;
    if (local != NULL && (stack = get(local, name_stack)) != NULL && PyList_Check(stack) &&
        (*is_eval = get(local, name_is_eval)) != NULL)
        parent = Py_NewRef(PyList_GET_SIZE(stack) > 0 ? PyList_GET_ITEM(stack, PyList_GET_SIZE(stack) - 1) : Py_None);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a thread's calls are a list");
    Py_XDECREF(local);
    Py_XDECREF(stack);
    return parent;
}

/* Return `Call(phase, root, path, is_eval, parent)`. */
static PyObject *new_call(PyObject *phase, PyObject *root, PyObject *path, PyObject *is_eval, PyObject *parent)
{
    PyObject *call = like(call_pattern);
    if (call != NULL && (set(call, name_phase, phase) < 0 || set(call, name_root, root) < 0 || set(call, name_path, path) < 0 ||
                         set(call, name_is_eval, is_eval) < 0 || set(call, name_parent, parent) < 0))
        Py_CLEAR(call);
    return call;
}

/* As `ModuleHooks._begin`, unseen. */
static PyObject *begin_unseen(PyObject *hooks, PyObject *builder, PyObject *module, PyObject *name, PyObject *args,
                              PyObject *kwargs, PyObject *recomputes)
{
    PyObject *is_eval = NULL, *parent = innermost(hooks, &is_eval), *root = NULL, *path = NULL, *call = NULL, *sites = NULL;
    PyObject *arguments = NULL, *begun = NULL;
    PyObject *phase = recomputes == Py_True ? recompute_phase : forward_phase;
    if (parent == NULL || (root = get(name, name_root)) == NULL ||
        (path = get(name, name_path)) == NULL ||
        (call = new_call(phase, root, path, is_eval, parent)) == NULL ||
        (sites = next_sites(builder, phase, root, path, name_empty, is_eval)) == NULL ||
        register_call(hooks, builder, module, call, parent, phase, sites, root, path) < 0 ||
        (arguments = tensors_among(args, kwargs)) == NULL ||
        record_arguments(hooks, builder, call, parent, sites, arguments) < 0 ||
        put(call, name_first_node, PyObject_CallNoArgs(next_node)) < 0)
        goto end;
    begun = PyTuple_Pack(2, call, arguments);
end:
    Py_XDECREF(is_eval);
    Py_XDECREF(parent);
    Py_XDECREF(root);
    Py_XDECREF(path);
    Py_XDECREF(call);
    Py_XDECREF(sites);
    Py_XDECREF(arguments);
    return begun;
}

PyObject *begin_call(PyObject *unused, PyObject *const *args, Py_ssize_t num_args)
{
    Pause pause;
    if (num_args != 7 || !PyTuple_Check(args[4]) || !PyDict_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "begin_call takes hooks, a step, a module, its name, arguments, and whether it recomputes");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS) || begin_pause(&pause) < 0)
        return NULL;
    return end_pause(&pause, begin_unseen(args[0], args[1], args[2], args[3], args[4], args[5], args[6]));
}

/* As `ModuleHooks._record_outputs` for a call within another one, unseen. */
static PyObject *end_unseen(PyObject *hooks, PyObject *builder, PyObject *call, PyObject *parent, PyObject *result)
{
    PyObject *pairs = PyList_New(0), *out = PyUnicode_FromString("out"), *sources = NULL, *sites = NULL, *group = NULL;
    PyObject *gradients = NULL, *outputs = NULL, *phase = NULL, *done = NULL;
    if (pairs == NULL || out == NULL || take_tensors(pairs, result, out) < 0 ||
        (sources = surroundings(builder, call)) == NULL || (sites = get(call, name_sites)) == NULL ||
        (group = get(call, name_group)) == NULL || (gradients = gradients_of(hooks)) == NULL)
        goto end;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(pairs); index++)
        if (record_result(gradients, builder, call, sites, group, sources, PyList_GET_ITEM(pairs, index)) < 0)
            goto end;
    if ((outputs = get(call, name_outputs)) == NULL || extend_tuple(parent, name_children, outputs) < 0 ||
        (phase = get(call, name_phase)) == NULL)
        goto end;
    done = phase == recompute_phase ? PyObject_CallMethodObjArgs(hooks, name__note_recomputed, builder, call, NULL)
                                    : Py_NewRef(Py_None);
end:
    Py_XDECREF(pairs);
    Py_XDECREF(out);
    Py_XDECREF(sources);
    Py_XDECREF(sites);
    Py_XDECREF(group);
    Py_XDECREF(gradients);
    Py_XDECREF(outputs);
    Py_XDECREF(phase);
    return done;
}

PyObject *end_call(PyObject *unused, PyObject *const *args, Py_ssize_t num_args)
{
    Pause pause;
    if (num_args != 5) {
        PyErr_SetString(PyExc_TypeError, "end_call takes hooks, a step, a call, its arguments and its result");
        return NULL;
    }
    PyObject *parent = is_configured(0, NUM_NEEDS) ? get(args[2], name_parent) : NULL, *done = NULL;
    if (parent == Py_None)
        done = PyObject_CallMethodObjArgs(args[0], name__record_outputs, args[1], args[2], args[3], args[4], NULL);
    else if (parent != NULL && begin_pause(&pause) == 0)
        done = end_pause(&pause, end_unseen(args[0], args[1], args[2], parent, args[4]));
    Py_XDECREF(parent);
    return done;
}
