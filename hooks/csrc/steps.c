/* Tensors to events of a step, as `steps.StepBuilder` has them. */
#include "native.h"

#define MAX_KNOWN 131072 /* as `sites._MAX_KNOWN` and `_MAX_MEMBERS` */
#define MAX_MEMBERS 64

PyObject *next_sites(PyObject *builder, PyObject *phase, PyObject *root, PyObject *path, PyObject *slot, PyObject *is_eval)
{
    PyObject *known = get(builder, name__known), *places = NULL, *key = NULL, *place = NULL;
    PyObject *counts = NULL, *now = NULL, *executions = NULL, *sites = NULL;
    if (known == NULL || (places = get(known, name__places)) == NULL)
        goto end;
    if ((key = PyTuple_Pack(5, phase, root, path, slot, is_eval)) == NULL ||
        (place = item_of(places, key)) == NULL || (counts = get(builder, name__counts)) == NULL)
        goto end;
    if (!PyDict_Check(counts)) {
        PyErr_SetString(PyExc_TypeError, "a step counts in a dictionary");
        goto end;
    }
    PyObject *before = PyDict_GetItemWithError(counts, place);
    Py_ssize_t number = before != NULL ? PyLong_AsSsize_t(before) : 0;
    if (PyErr_Occurred() || (now = PyLong_FromSsize_t(number + 1)) == NULL || PyDict_SetItem(counts, place, now) < 0 ||
        (executions = get(place, name__executions)) == NULL)
        goto end;
    if (PyList_Check(executions) && number >= 0 && number < PyList_GET_SIZE(executions))
        sites = Py_NewRef(PyList_GET_ITEM(executions, number));
    else {
        PyObject *own = PyLong_FromSsize_t(number);
        if (own != NULL)
            sites = PyObject_CallMethodOneArg(place, name_execution, own);
        Py_XDECREF(own);
    }
end:
    Py_XDECREF(known);
    Py_XDECREF(places);
    Py_XDECREF(key);
    Py_XDECREF(place);
    Py_XDECREF(counts);
    Py_XDECREF(now);
    Py_XDECREF(executions);
    return sites;
}

PyObject *append_group(PyObject *builder, PyObject *group)
{
    PyObject *record = get(builder, name_record), *number = NULL;
    PyObject *groups = record != NULL ? get(record, name_groups) : NULL;
    if (groups != NULL && !PyList_Check(groups))
        PyErr_SetString(PyExc_TypeError, "a step's groups are a list");
    else if (groups != NULL && PyList_Append(groups, group) == 0)
        number = PyLong_FromSsize_t(PyList_GET_SIZE(groups) - 1);
    Py_XDECREF(record);
    Py_XDECREF(groups);
    return number;
}

PyObject *same(PyObject *builder, PyObject *value)
{
    if (PyTuple_GET_SIZE(value) > MAX_MEMBERS)
        return Py_NewRef(value);
    PyObject *known = get(builder, name__known);
    PyObject *values = known != NULL ? get(known, name__values) : NULL, *found = NULL;
    Py_XDECREF(known);
    if (values != NULL && !PyDict_Check(values))
        PyErr_SetString(PyExc_TypeError, "tuples are known in a dictionary");
    else if (values != NULL) {
        if (PyDict_GET_SIZE(values) >= MAX_KNOWN)
            PyDict_Clear(values);
        found = Py_XNewRef(PyDict_SetDefault(values, value, value));
    }
    Py_XDECREF(values);
    return found;
}

/* Places of the fields of a `Group`. */
enum { GROUP_OP = 3, GROUP_PARENT, NUM_GROUP };

PyObject *open_group_at(PyObject *builder, PyObject *sites, PyObject *kind, PyObject *op, PyObject *parent, PyObject *node)
{
    PyObject *group = get(sites, name__group), *known_node = group != NULL ? get(sites, name__node) : NULL, *number = NULL;
    if (known_node == NULL)
        goto end;
    int is_same = group != Py_None;
    if (is_same && (!PyTuple_Check(group) || PyTuple_GET_SIZE(group) != NUM_GROUP)) {
        PyErr_Format(PyExc_TypeError, "a Group, not %R", group);
        goto end;
    }
    if (is_same)
        is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(group, GROUP_PARENT), parent, Py_EQ);
    if (is_same > 0)
        is_same = PyObject_RichCompareBool(known_node, node, Py_EQ);
    if (is_same > 0 && PyUnicode_GET_LENGTH(node) == 0)
        is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(group, GROUP_OP), op, Py_EQ);
    if (is_same == 0)
        Py_SETREF(group, PyObject_CallMethodObjArgs(sites, name_group, kind, op, parent, node, NULL));
    if (is_same >= 0 && group != NULL)
        number = append_group(builder, group);
end:
    Py_XDECREF(group);
    Py_XDECREF(known_node);
    return number;
}

PyObject *known_group(PyObject *builder, PyObject *kind, PyObject *root, PyObject *path, PyObject *op)
{
    PyObject *known = get(builder, name__known), *values = known != NULL ? get(known, name__values) : NULL;
    PyObject *parent = values != NULL ? PyLong_FromLong(-1) : NULL;
    PyObject *key = parent != NULL ? PyTuple_Pack(5, kind, root, path, op, parent) : NULL, *found = NULL;
    if (key != NULL && PyDict_Check(values)) /* a Group equals the tuple of its fields */
        found = Py_XNewRef(PyDict_GetItemWithError(values, key));
    if (found != NULL && PyTuple_CheckExact(found))
        Py_CLEAR(found);
    Py_XDECREF(known);
    Py_XDECREF(values);
    Py_XDECREF(parent);
    Py_XDECREF(key);
    return found;
}

int add_on_device(PyObject *builder, Py_ssize_t count, PyObject *const *sites, PyObject *const *tensors, PyObject *group,
                  PyObject *const *sources, PyObject **added)
{
    PyObject *known[FEW_TENSORS] = {NULL}, *kinds[FEW_TENSORS], *tickets[FEW_TENSORS] = {NULL}, *device = NULL;
    PyObject *digesters = NULL, *digester = NULL, *all_owed = NULL, *owed = NULL, *record = NULL, *none = NULL;
    long long places[FEW_TENSORS], first_device = 0;
    Py_ssize_t num_added = 0;
    int found = 1;
    for (Py_ssize_t index = 0; found == 1 && index < count; index++) {
        if ((known[index] = plain_kind(tensors[index], index > 0 ? name_is_cuda : NULL)) == NULL) {
            found = PyErr_Occurred() ? -1 : 0;
            break;
        }
        kinds[index] = PyTuple_GET_ITEM(known[index], 0);
        places[index] = find_place_of(tensors[index], known[index]);
        long long device_index = PyErr_Occurred() || count == 1 ? 0 : number_of(tensors[index], name_get_device);
        if (index == 0)
            first_device = device_index;
        if (PyErr_Occurred())
            found = -1;
        else if ((places[index] <= 0 && places[index] != PLACE_STRIDED) || device_index != first_device)
            found = 0;
    }
    if (found != 1)
        goto end;
    found = -1;
    if ((device = get(tensors[0], name_device)) == NULL ||
        (digesters = get(builder, name__digesters)) == NULL ||
        (digester = item_of(digesters, device)) == NULL ||
        (found = submit_few(digester, count, tensors, kinds, places, tickets)) < 0) {
        if (PyErr_ExceptionMatches(digest_error)) { /* a graph is being captured, or the device has failed */
            PyErr_Clear();
            found = 0;
        }
        goto end;
    }
    if (found == 0)
        goto end;
    found = -1;
    if ((none = PyBytes_FromStringAndSize(NULL, 0)) == NULL || (record = get(builder, name_record)) == NULL ||
        (all_owed = get(builder, name__owed)) == NULL || (owed = item_of(all_owed, device)) == NULL)
        goto end;
    for (; num_added < count; num_added++) {
        Py_ssize_t at = add_event(record, sites[num_added], kinds[num_added], none, none, group, sources[num_added]);
        PyObject *event = at < 0 ? NULL : PyLong_FromSsize_t(at);
        if (event != NULL && PyObject_SetItem(owed, event, tickets[num_added]) < 0)
            Py_CLEAR(event);
        added[num_added] = event != NULL ? item_of(alone, event) : NULL;
        Py_XDECREF(event);
        if (added[num_added] == NULL)
            goto end;
    }
    found = 1;
end:
    while (found != 1 && num_added > 0)
        Py_DECREF(added[--num_added]);
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_XDECREF(known[index]);
        Py_XDECREF(tickets[index]);
    }
    Py_XDECREF(none);
    Py_XDECREF(device);
    Py_XDECREF(digesters);
    Py_XDECREF(digester);
    Py_XDECREF(record);
    Py_XDECREF(all_owed);
    Py_XDECREF(owed);
    return found;
}

int have_landed(PyObject *builder, Py_ssize_t count, PyObject *const *tensors)
{
    PyObject *flying = get(builder, name_flying);
    int is_any = flying != NULL ? PyObject_IsTrue(flying) : -1, landed = is_any < 0 ? -1 : 1;
    for (Py_ssize_t index = 0; is_any == 1 && landed == 1 && index < count; index++) {
        PyObject *storage = storage_of(tensors[index]);
        int is_flying = storage != NULL ? PySequence_Contains(flying, storage) : -1;
        landed = is_flying < 0 ? -1 : !is_flying;
        Py_XDECREF(storage);
    }
    Py_XDECREF(flying);
    return landed;
}

/* Whether a tensor may be recorded as it is: the step is kept, no collective still writes it, and no memory is known to
 * hold what it held by chance. -1 with an error set. */
static int is_at_hand(PyObject *builder, PyObject *tensor)
{
    int is_so = has(builder, name_is_kept);
    if (is_so == 1) {
        int is_in_part = has(builder, name_in_part);
        is_so = is_in_part < 0 ? -1 : !is_in_part;
    }
    return is_so == 1 ? have_landed(builder, 1, &tensor) : is_so;
}

/* Return what a tensor was computed from, those included that last wrote its memory, as `StepBuilder._with_writers`. */
static PyObject *with_writers(PyObject *builder, PyObject *tensor, PyObject *inputs)
{
    PyObject *writers = get(builder, name_writers), *wrote = NULL, *united = NULL, *sources = NULL;
    if (writers == NULL || writers == Py_None) {
        PyObject *found = writers != NULL ? same(builder, inputs) : NULL;
        Py_XDECREF(writers);
        return found;
    }
    wrote = PyObject_CallFunctionObjArgs(writers, builder, tensor, NULL);
    Py_DECREF(writers);
    int is_any = wrote != NULL ? PyObject_IsTrue(wrote) : -1;
    if (is_any == 0)
        sources = Py_NewRef(inputs);
    else if (is_any > 0 && (united = PyDict_New()) != NULL) {
        Py_SETREF(wrote, PySequence_Tuple(wrote));
        PyObject *both = wrote != NULL ? PySequence_Concat(inputs, wrote) : NULL;
        int failed = both == NULL ? -1 : 0;
        for (Py_ssize_t index = 0; !failed && index < PyTuple_GET_SIZE(both); index++)
            failed = PyDict_SetItem(united, PyTuple_GET_ITEM(both, index), Py_None);
        Py_XDECREF(both);
        if (!failed)
            sources = PySequence_Tuple(united);
    }
    Py_XDECREF(wrote);
    Py_XDECREF(united);
    if (sources != NULL)
        Py_SETREF(sources, same(builder, sources));
    return sources;
}

static PyObject *add_at_hand(PyObject *builder, PyObject *site, PyObject *tensor, PyObject *group, PyObject *inputs)
{
    int is_so = is_tensor(tensor) ? is_at_hand(builder, tensor) : 0, is_on_device = is_so == 1 ? has(tensor, name_is_cuda) : 0;
    if (is_so < 0 || is_on_device < 0)
        return NULL;
    if (is_so == 0)
        return Py_NewRef(Py_None);
    PyObject *sources = with_writers(builder, tensor, inputs), *added = NULL;
    if (sources == NULL)
        return NULL;
    if (is_on_device) {
        int found = add_on_device(builder, 1, &site, &tensor, group, &sources, &added);
        if (found == 0)
            added = Py_NewRef(Py_None);
    } else {
        PyObject *record = get(builder, name_record), *own[] = {record, site, tensor, group, sources};
        PyObject *event = record != NULL ? add_plain(NULL, own, 5) : NULL;
        added = event == NULL || event == Py_None ? Py_XNewRef(event) : item_of(alone, event);
        Py_XDECREF(event);
        Py_XDECREF(record);
    }
    Py_DECREF(sources);
    return added;
}

PyObject *add_events(PyObject *builder, PyObject *site, PyObject *tensor, PyObject *group, PyObject *inputs)
{
    PyObject *added = add_at_hand(builder, site, tensor, group, inputs);
    if (added == Py_None) {
        Py_DECREF(added);
        added = PyObject_CallMethodObjArgs(builder, name_add_tensor, site, tensor, group, inputs, NULL);
    }
    if (added != NULL && !PyTuple_Check(added))
        Py_SETREF(added, PySequence_Tuple(added));
    return added;
}

PyObject *add_tensor(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5 || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "add_tensor takes a step, a site, a tensor, a group and inputs");
        return NULL;
    }
    return is_configured(0, NUM_NEEDS) ? add_at_hand(args[0], args[1], args[2], args[3], args[4]) : NULL;
}
