/* Gradients to events, as `gradients.GradientHooks.record`, for the hooks that autograd calls. */
#include "native.h"

/* Return the module call that has a number in a trace, None for code outside all modules; NULL with an error set. */
static PyObject *call_of(PyObject *calls, PyObject *number)
{
    Py_ssize_t index = PyLong_AsSsize_t(number);
    if (index == OUTSIDE && !PyErr_Occurred())
        return Py_NewRef(Py_None);
    if (!PyErr_Occurred() && PyList_Check(calls) && index >= 0 && index < PyList_GET_SIZE(calls))
        return Py_NewRef(PyList_GET_ITEM(calls, index));
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "a trace has no such call");
    return NULL;
}

/* Return the module calls that compute a gradient, as `_Trace.owners`; none where it has no trace. */
static PyObject *owners_of(PyObject *tracked, PyObject *trace)
{
    PyObject *owners = PyList_New(0), *calls = NULL, *numbers = NULL;
    if (owners == NULL || trace == Py_None)
        return owners;
    if ((calls = get(trace, name_calls)) == NULL || (numbers = get(tracked, name_owners)) == NULL ||
        !PyTuple_Check(numbers)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "owners are a tuple");
        Py_CLEAR(owners);
    }
    for (Py_ssize_t index = 0; owners != NULL && index < PyTuple_GET_SIZE(numbers); index++) {
        PyObject *call = call_of(calls, PyTuple_GET_ITEM(numbers, index));
        if (call == NULL || PyList_Append(owners, call) < 0)
            Py_CLEAR(owners);
        Py_XDECREF(call);
    }
    Py_XDECREF(calls);
    Py_XDECREF(numbers);
    return owners;
}

/* Where a gradient is recorded, all of them new references. */
typedef struct {
    PyObject *root, *path, *slot, *owner;
} Blamed;

static void release_blamed(Blamed *blamed)
{
    Py_XDECREF(blamed->root);
    Py_XDECREF(blamed->path);
    Py_XDECREF(blamed->slot);
    Py_XDECREF(blamed->owner);
}

/* Return the root and path of a parameter, None where it has none, as `Registry.parameter_name`. */
static PyObject *name_of(PyObject *recorder, PyObject *parameter)
{
    PyObject *registry = get(recorder, name_registry), *names = NULL, *key = NULL, *living = NULL, *name = NULL;
    if (registry != NULL && (names = get(registry, name__parameters)) != NULL && PyDict_Check(names) &&
        (key = PyLong_FromVoidPtr(parameter)) != NULL) {
        PyObject *held = PyDict_GetItemWithError(names, key);
        if (held != NULL && PyTuple_Check(held) && PyTuple_GET_SIZE(held) == 2 &&
            (living = PyObject_CallNoArgs(PyTuple_GET_ITEM(held, 0))) == parameter)
            name = Py_NewRef(PyTuple_GET_ITEM(held, 1));
    }
    if (name == NULL && !PyErr_Occurred()) /* of no module */
        name = PyObject_CallMethodOneArg(registry, name_parameter_name, parameter);
    Py_XDECREF(registry);
    Py_XDECREF(names);
    Py_XDECREF(key);
    Py_XDECREF(living);
    return name;
}

/* Blame a parameter's gradient on its name: 1; 0 where it has none; -1 with an error set. */
static int blame_parameter(PyObject *recorder, PyObject *parameter, PyObject *owners, Blamed *blamed)
{
    PyObject *name = name_of(recorder, parameter);
    int found = name == NULL ? -1 : name != Py_None;
    if (found == 1 && (!PyTuple_Check(name) || PyTuple_GET_SIZE(name) != 2)) {
        PyErr_SetString(PyExc_TypeError, "a parameter's name is a root and a path");
        found = -1;
    }
    if (found == 1) {
        blamed->root = Py_NewRef(PyTuple_GET_ITEM(name, 0));
        blamed->path = Py_NewRef(PyTuple_GET_ITEM(name, 1));
        blamed->slot = Py_NewRef(name_grad);
        blamed->owner = Py_NewRef(PyList_GET_SIZE(owners) > 0 ? PyList_GET_ITEM(owners, 0) : Py_None);
    }
    Py_XDECREF(name);
    return found;
}

/* Blame a gradient on the call among its owners that consumes the tensor: 1; 0 where none does; -1 with an error set. */
static int blame_consumer(PyObject *tracked, PyObject *owners, Blamed *blamed)
{
    PyObject *consumers = get(tracked, name_consumers);
    int found = consumers == NULL ? -1 : 0;
    if (found == 0 && !PyTuple_Check(consumers)) {
        PyErr_SetString(PyExc_TypeError, "consumers are a tuple");
        found = -1;
    }
    for (Py_ssize_t index = 0; found == 0 && index < PyList_GET_SIZE(owners); index++) {
        PyObject *call = PyList_GET_ITEM(owners, index);
        PyObject *number = call != Py_None ? get(call, name_number) : NULL;
        if (call != Py_None && number == NULL)
            found = -1;
        for (Py_ssize_t place = 0; number != NULL && found == 0 && place + 1 < PyTuple_GET_SIZE(consumers); place += 2) {
            found = PyObject_RichCompareBool(PyTuple_GET_ITEM(consumers, place), number, Py_EQ);
            if (found != 1)
                continue;
            blamed->owner = Py_NewRef(call);
            if ((blamed->root = get(call, name_root)) == NULL ||
                (blamed->path = get(call, name_path)) == NULL ||
                (blamed->slot = PyUnicode_Concat(name_grad_, PyTuple_GET_ITEM(consumers, place + 1))) == NULL)
                found = -1;
        }
        Py_XDECREF(number);
    }
    Py_XDECREF(consumers);
    return found;
}

/* Blame a gradient as `gradients._blame`; -1 with an error set. */
static int blame_otherwise(PyObject *tracked, PyObject *owners, Blamed *blamed)
{
    PyObject *owner = PyList_GET_SIZE(owners) > 0 ? PyList_GET_ITEM(owners, 0) : Py_None;
    PyObject *found = PyObject_CallFunctionObjArgs(blame, tracked, owners, owner, NULL);
    if (found != NULL && PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 4) {
        blamed->root = Py_NewRef(PyTuple_GET_ITEM(found, 0));
        blamed->path = Py_NewRef(PyTuple_GET_ITEM(found, 1));
        blamed->slot = Py_NewRef(PyTuple_GET_ITEM(found, 2));
        blamed->owner = Py_NewRef(PyTuple_GET_ITEM(found, 3));
    } else if (found != NULL)
        PyErr_SetString(PyExc_TypeError, "_blame gives a root, a path, a slot and a call");
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 1;
}

/* Return the site of a gradient's event. */
static PyObject *site_of(PyObject *builder, PyObject *tracked, const Blamed *blamed)
{
    PyObject *is_eval = get(tracked, name_is_eval), *sites = NULL, *site = NULL;
    if (is_eval != NULL)
        sites = next_sites(builder, backward_phase, blamed->root, blamed->path, blamed->slot, is_eval);
    if (sites != NULL)
        site = get(sites, name_first);
    Py_XDECREF(is_eval);
    Py_XDECREF(sites);
    return site;
}

/* Open the computation that makes a gradient where a step before had it, too; return its number. NULL where none had, or
 * with an error set. */
static PyObject *open_group(PyObject *builder, PyObject *groups, PyObject *key, PyObject *owner, PyObject *op)
{
    PyObject *root = owner != Py_None ? get(owner, name_root) : Py_NewRef(name_empty), *path = NULL, *group = NULL;
    PyObject *number = NULL, *kept = NULL;
    if (root != NULL && (path = owner != Py_None ? get(owner, name_path) : Py_NewRef(name_empty)) != NULL &&
        (group = known_group(builder, name_backward, root, path, op)) != NULL &&
        (number = append_group(builder, group)) != NULL &&
        ((kept = same(builder, key)) == NULL || PyDict_SetItem(groups, kept, number) < 0))
        Py_CLEAR(number);
    Py_XDECREF(root);
    Py_XDECREF(path);
    Py_XDECREF(group);
    Py_XDECREF(kept);
    return number;
}

/* Return the number of the computation that makes a gradient, as `GradientHooks._group`. */
static PyObject *group_of(PyObject *hooks, PyObject *builder, PyObject *tracked, PyObject *trace, PyObject *owner)
{
    PyObject *now = get(hooks, name__trace), *held = NULL, *groups = NULL, *key = NULL, *group = NULL;
    PyObject *number = NULL, *op = NULL;
    if (now == NULL)
        return NULL;
    if (now == trace && now != Py_None) { /* else it is of another step, or was never planned */
        PyObject *reference = get(now, name_builder);
        held = reference != NULL ? PyObject_CallNoArgs(reference) : NULL;
        Py_XDECREF(reference);
        if (held == NULL || (groups = get(now, name_groups)) == NULL)
            goto end;
    }
    if (held == builder && PyDict_Check(groups)) {
        number = owner != Py_None ? get(owner, name_number) : PyLong_FromVoidPtr(Py_None);
        if (number == NULL || (op = get(tracked, name_op)) == NULL || (key = PyTuple_Pack(2, number, op)) == NULL)
            goto end;
        group = Py_XNewRef(PyDict_GetItemWithError(groups, key));
        if (group == NULL && !PyErr_Occurred())
            group = open_group(builder, groups, key, owner, op);
    }
    if (group == NULL && !PyErr_Occurred())
        group = PyObject_CallMethodObjArgs(hooks, name__group, builder, tracked, owner, NULL);
end:
    Py_XDECREF(now);
    Py_XDECREF(held);
    Py_XDECREF(groups);
    Py_XDECREF(key);
    Py_XDECREF(number);
    Py_XDECREF(op);
    return group;
}

/* Add events to those that a gradient is computed from, each once; -1 with an error set. `events` is given away. */
static int take_events(PyObject *found, PyObject *events)
{
    PyObject *row = events != NULL ? PySequence_Fast(events, "events are a list or a tuple") : NULL;
    int failed = row == NULL ? -1 : 0;
    for (Py_ssize_t index = 0; !failed && index < PySequence_Fast_GET_SIZE(row); index++)
        failed = PyDict_SetItem(found, PySequence_Fast_GET_ITEM(row, index), Py_None);
    Py_XDECREF(row);
    Py_XDECREF(events);
    return failed;
}

static int take_events_of(PyObject *found, PyObject *object, PyObject *attribute)
{
    return take_events(found, get(object, attribute));
}

/* Add the events of a tensor's gradient, if it was recorded in this step. */
static int take_gradient(PyObject *found, PyObject *tracked, PyObject *step)
{
    PyObject *own = get(tracked, name_step);
    int is_same = own == NULL ? -1 : PyObject_RichCompareBool(own, step, Py_EQ);
    Py_XDECREF(own);
    return is_same == 1 ? take_events_of(found, tracked, name_events) : is_same;
}

/* Add what collectives gave in backward, after the first of what was found. */
static int take_received(PyObject *found, PyObject *builder)
{
    PyObject *received = get(builder, name_received), *event, *unused;
    int failed = received == NULL || !PyList_Check(received) ? -1 : 0;
    if (failed && received != NULL)
        PyErr_SetString(PyExc_TypeError, "what was received is a list");
    if (!failed && PyList_GET_SIZE(received) > 0) {
        Py_ssize_t after = PyDict_GET_SIZE(found) > 0 ? PY_SSIZE_T_MAX : 0;
        for (Py_ssize_t position = 0; PyDict_Next(found, &position, &event, &unused);) {
            Py_ssize_t number = PyLong_AsSsize_t(event);
            after = number < after ? number : after;
        }
        for (Py_ssize_t index = 0; !failed && !PyErr_Occurred() && index < PyList_GET_SIZE(received); index++) {
            event = PyList_GET_ITEM(received, index);
            if (PyLong_AsSsize_t(event) > after)
                failed = PyDict_SetItem(found, event, Py_None);
        }
    }
    Py_XDECREF(received);
    return failed || PyErr_Occurred() ? -1 : 0;
}

/* Add what is known of a module call that computes a gradient, of its recomputation too. */
static int take_call(PyObject *found, PyObject *builder, PyObject *call)
{
    if (call == Py_None) {
        PyObject *top = get(builder, name_top);
        int failed = top == NULL || take_events_of(found, top, name_inputs) || take_events_of(found, top, name_children);
        Py_XDECREF(top);
        return failed ? -1 : 0;
    }
    if (take_events_of(found, call, name_inputs) || take_events_of(found, call, name_children) ||
        take_events_of(found, call, name_outputs))
        return -1;
    PyObject *recomputed = get(builder, name_recomputed), *key = NULL;
    int failed = recomputed == NULL || !PyDict_Check(recomputed) ? -1 : 0;
    if (failed && recomputed != NULL)
        PyErr_SetString(PyExc_TypeError, "recomputed calls are in a dictionary");
    if (!failed && PyDict_GET_SIZE(recomputed) > 0) {
        PyObject *root = get(call, name_root), *path = root != NULL ? get(call, name_path) : NULL;
        key = path != NULL ? PyTuple_Pack(2, root, path) : NULL;
        PyObject *events = key != NULL ? PyDict_GetItemWithError(recomputed, key) : NULL;
        failed = events != NULL ? take_events(found, Py_NewRef(events)) : PyErr_Occurred() ? -1 : 0;
        Py_XDECREF(root);
        Py_XDECREF(path);
    }
    Py_XDECREF(recomputed);
    Py_XDECREF(key);
    return failed;
}

/* Return the events that a gradient is computed from, as `GradientHooks._sources`. */
static PyObject *sources_of(PyObject *hooks, PyObject *builder, PyObject *tracked, PyObject *trace, PyObject *owners,
                            PyObject *step)
{
    PyObject *numbers = get(tracked, name_sources), *all = NULL, *found = NULL, *sources = NULL, *slot = NULL;
    if (numbers == NULL)
        return NULL;
    if (trace == Py_None || !PyTuple_Check(numbers)) { /* entered past torch.autograd */
        Py_DECREF(numbers);
        return PyObject_CallMethodObjArgs(hooks, name__sources, builder, tracked, owners, NULL);
    }
    if ((found = PyDict_New()) == NULL || (all = get(trace, name_tracked)) == NULL)
        goto end;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(numbers); index++) {
        PyObject *source = PyObject_GetItem(all, PyTuple_GET_ITEM(numbers, index));
        int failed = source == NULL ? -1 : take_gradient(found, source, step);
        Py_XDECREF(source);
        if (failed)
            goto end;
    }
    if ((PyTuple_GET_SIZE(numbers) == 0 && take_events_of(found, builder, name_losses)) || take_received(found, builder) ||
        take_events_of(found, builder, name_gathered) || (slot = get(tracked, name_slot)) == NULL)
        goto end;
    int is_parameter = PyObject_RichCompareBool(slot, name_grad, Py_EQ); /* a micro-batch adds to the one before */
    if (is_parameter < 0 || (is_parameter == 1 && take_gradient(found, tracked, step)))
        goto end;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(owners); index++)
        if (take_call(found, builder, PyList_GET_ITEM(owners, index)))
            goto end;
    sources = PySequence_Tuple(found);
end:
    Py_DECREF(numbers);
    Py_XDECREF(all);
    Py_XDECREF(found);
    Py_XDECREF(slot);
    return sources;
}

/* Record a gradient as it is now, `parameter` None or whose it is; -1 with an error set. */
static int record_gradient(PyObject *hooks, PyObject *tracked, PyObject *gradient, PyObject *parameter)
{
    PyObject *recorder = get(hooks, name__recorder), *builder = NULL, *trace = NULL, *owners = NULL;
    PyObject *record = NULL, *step = NULL, *site = NULL, *group = NULL, *sources = NULL, *events = NULL;
    Blamed blamed = {NULL, NULL, NULL, NULL};
    int result = -1;
    if (recorder == NULL || (builder = get(recorder, name_current)) == NULL)
        goto end;
    int is_wanted = has(recorder, name_is_active);
    if (is_wanted == 1)
        is_wanted = has(builder, name_is_kept);
    if (is_wanted != 1) {
        result = is_wanted;
        goto end;
    }
    if ((trace = get(tracked, name_trace)) == NULL || (owners = owners_of(tracked, trace)) == NULL ||
        (record = get(builder, name_record)) == NULL || (step = get(record, name_step)) == NULL)
        goto end;
    int found = parameter != Py_None ? blame_parameter(recorder, parameter, owners, &blamed)
                                     : blame_consumer(tracked, owners, &blamed);
    if (found == 0 && parameter != Py_None)
        result = 0;
    else if (found == 0)
        found = blame_otherwise(tracked, owners, &blamed);
    if (found != 1 || (site = site_of(builder, tracked, &blamed)) == NULL ||
        (group = group_of(hooks, builder, tracked, trace, blamed.owner)) == NULL ||
        (sources = sources_of(hooks, builder, tracked, trace, owners, step)) == NULL ||
        (events = add_events(builder, site, gradient, group, sources)) == NULL)
        goto end;
    result = set(tracked, name_events, events) || set(tracked, name_step, step) ? -1 : 0;
end:
    release_blamed(&blamed);
    Py_XDECREF(recorder);
    Py_XDECREF(builder);
    Py_XDECREF(trace);
    Py_XDECREF(owners);
    Py_XDECREF(record);
    Py_XDECREF(step);
    Py_XDECREF(site);
    Py_XDECREF(group);
    Py_XDECREF(sources);
    Py_XDECREF(events);
    return result;
}

/* Record one of the gradients that reach a node, if there is one. */
static int record_at(PyObject *hooks, PyObject *gradients, PyObject *index, PyObject *tracked)
{
    Py_ssize_t number = PyLong_AsSsize_t(index);
    if (PyErr_Occurred() || number < 0 || number >= PyTuple_GET_SIZE(gradients))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *gradient = PyTuple_GET_ITEM(gradients, number);
    return gradient == Py_None ? 0 : record_gradient(hooks, tracked, gradient, Py_None);
}

static PyObject *record_node_unseen(PyObject *outputs, PyObject *gradients)
{
    PyObject *hooks = get(outputs, name__hooks), *others = NULL, *index = NULL, *first = NULL, *items = NULL;
    int failed = -1;
    if (hooks == NULL || (others = get(outputs, name__others)) == NULL)
        goto end;
    if (others == Py_None) {
        if ((index = get(outputs, name__index)) != NULL && (first = get(outputs, name__first)) != NULL)
            failed = record_at(hooks, gradients, index, first);
        goto end;
    }
    if ((items = PyObject_CallMethodNoArgs(outputs, name_items)) == NULL)
        goto end;
    failed = PyList_Check(items) ? 0 : -1;
    if (failed)
        PyErr_SetString(PyExc_TypeError, "what is followed of a node is a list");
    for (Py_ssize_t place = 0; !failed && place < PyList_GET_SIZE(items); place++) {
        PyObject *item = PyList_GET_ITEM(items, place);
        failed = PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2
                     ? record_at(hooks, gradients, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1))
                     : -1;
        if (failed && !PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "what is followed of a node are pairs");
    }
end:
    Py_XDECREF(hooks);
    Py_XDECREF(others);
    Py_XDECREF(index);
    Py_XDECREF(first);
    Py_XDECREF(items);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyObject *record_node(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Pause pause;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "record_node takes what is followed of a node and the gradients that reach it");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS) || begin_pause(&pause) < 0)
        return NULL;
    PyObject *gradients = PySequence_Tuple(args[1]); /* compiled autograd hands over a list */
    PyObject *done = gradients != NULL ? record_node_unseen(args[0], gradients) : NULL;
    Py_XDECREF(gradients);
    return end_pause(&pause, done);
}

PyObject *record_accumulated(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Pause pause;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "record_accumulated takes hooks, what is followed and a parameter");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS) || begin_pause(&pause) < 0)
        return NULL;
    PyObject *gradient = get(args[2], name_grad), *result = NULL;
    if (gradient != NULL && (gradient == Py_None || record_gradient(args[0], args[1], gradient, args[2]) == 0))
        result = Py_NewRef(Py_None);
    Py_XDECREF(gradient);
    return end_pause(&pause, result);
}
