/* The plan of a backward, as `GradientHooks._plan_nodes`: which gradients each gradient will be computed from, and by whom.
 *
 * Nodes and edges are rows of plain memory: Python's cyclic garbage collector is not set off by them, so what a node says of
 * the nodes below it is asked for once and kept, as numbers of rows. What is rare goes back to the
 * Python: `_catch_lost_views`, and `_parameter`. */
#include "native.h"

#define ACCUMULATE "torch::autograd::AccumulateGrad"
#define NOWHERE (-1)

/* A node of autograd's. */
typedef struct {
    PyObject *node, *sources, *names; /* itself; what it passes on, from when that is known until all have taken it */
    long long number;                 /* of its sequence */
    Py_ssize_t first_edge, end_edge;
    Py_ssize_t first_arrival, last_arrival; /* edges that something came along, in that order */
    Py_ssize_t num_waits;                   /* edges to it that nothing came along yet */
    Py_ssize_t num_takers;                  /* edges from it whose other end has not taken what came along */
    int is_reached;
} NodeRow;

/* An edge, and what comes along it. */
typedef struct {
    Py_ssize_t from, to, next_arrival;
    long long index; /* of the output of the node that it leads to */
    int is_taken;
} Edge;

/* Rows that grow. */
typedef struct {
    void *rows;
    Py_ssize_t count, capacity;
} Rows;

typedef struct {
    PyObject *hooks, *builder, *trace, *owner_of; /* as handed over, not owned */
    PyObject *outputs, *calls, *starts, *thread, *num_bits;
    Rows nodes, edges, stack, order; /* NodeRow; Edge; the numbers of nodes to look at; of those reached, in that order */
    Py_ssize_t *slots, num_slots;    /* a node's address, hashed -> its number, NOWHERE where there is none */
} Walk;

static NodeRow *node_at(const Walk *walk, Py_ssize_t number)
{
    return (NodeRow *)walk->nodes.rows + number;
}

static Edge *edge_at(const Walk *walk, Py_ssize_t number)
{
    return (Edge *)walk->edges.rows + number;
}

/* Return a further row, with nothing in it; NULL with an error set. */
static void *add_row(Rows *rows, size_t row_bytes)
{
    if (rows->count == rows->capacity) {
        Py_ssize_t capacity = rows->capacity ? 2 * rows->capacity : 256;
        void *grown = PyMem_Realloc(rows->rows, (size_t)capacity * row_bytes);
        if (grown == NULL)
            return PyErr_NoMemory();
        rows->rows = grown;
        rows->capacity = capacity;
    }
    return memset((char *)rows->rows + (size_t)rows->count++ * row_bytes, 0, row_bytes);
}

static int push(Rows *rows, Py_ssize_t number)
{
    Py_ssize_t *row = add_row(rows, sizeof *row);
    if (row != NULL)
        *row = number;
    return row != NULL ? 0 : -1;
}

static Py_ssize_t pop(Rows *rows)
{
    return ((Py_ssize_t *)rows->rows)[--rows->count];
}

/* Return the slot that an object has, or would have. */
static Py_ssize_t *slot_of(const Walk *walk, const PyObject *node)
{
    size_t mask = (size_t)walk->num_slots - 1, at = (size_t)(((uintptr_t)node >> 4) * 0x9E3779B97F4A7C15u >> 20) & mask;
    while (walk->slots[at] != NOWHERE && node_at(walk, walk->slots[at])->node != node)
        at = (at + 1) & mask;
    return &walk->slots[at];
}

/* Return a node's number, a new one where it was not met before; -1 with an error set. */
static Py_ssize_t number_node(Walk *walk, PyObject *node)
{
    if (2 * walk->nodes.count >= walk->num_slots) {
        Py_ssize_t num_slots = walk->num_slots ? 2 * walk->num_slots : 1024;
        Py_ssize_t *slots = PyMem_Realloc(walk->slots, (size_t)num_slots * sizeof *slots);
        if (slots == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        walk->slots = slots;
        walk->num_slots = num_slots;
        memset(slots, 0xFF, (size_t)num_slots * sizeof *slots); /* NOWHERE each */
        for (Py_ssize_t number = 0; number < walk->nodes.count; number++)
            *slot_of(walk, node_at(walk, number)->node) = number;
    }
    Py_ssize_t *slot = slot_of(walk, node);
    if (*slot == NOWHERE) {
        NodeRow *row = add_row(&walk->nodes, sizeof *row);
        if (row == NULL)
            return -1;
        row->node = Py_NewRef(node);
        row->first_arrival = row->last_arrival = NOWHERE;
        *slot = walk->nodes.count - 1;
    }
    return *slot;
}

/* Take down the edges from a node, and the nodes that they lead to as what to look at next; -1 with an error set. */
static int add_edges(Walk *walk, Py_ssize_t number)
{
    PyObject *below = get(node_at(walk, number)->node, name_next_functions);
    int failed = below != NULL && PyTuple_Check(below) ? 0 : -1;
    Py_ssize_t first_edge = walk->edges.count;
    for (Py_ssize_t place = 0; !failed && place < PyTuple_GET_SIZE(below); place++) {
        PyObject *pair = PyTuple_GET_ITEM(below, place);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
            failed = -1;
            break;
        }
        if (PyTuple_GET_ITEM(pair, 0) == Py_None)
            continue;
        long long index = PyLong_AsLongLong(PyTuple_GET_ITEM(pair, 1));
        Py_ssize_t to = index == -1 && PyErr_Occurred() ? -1 : number_node(walk, PyTuple_GET_ITEM(pair, 0));
        Edge *edge = to < 0 ? NULL : add_row(&walk->edges, sizeof *edge);
        if (edge == NULL || push(&walk->stack, to) < 0) {
            failed = -1;
            break;
        }
        *edge = (Edge){.from = number, .to = to, .next_arrival = NOWHERE, .index = index};
        node_at(walk, to)->num_waits++;
    }
    if (failed && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "next_functions are a tuple of pairs");
    NodeRow *row = node_at(walk, number); /* not before: it has moved where nodes were added */
    row->first_edge = first_edge;
    row->end_edge = walk->edges.count;
    row->num_takers = row->end_edge - first_edge;
    Py_XDECREF(below);
    return failed;
}

/* Find all nodes that the roots lead to; -1 with an error set. */
static int reach_nodes(Walk *walk, PyObject *roots)
{
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(roots); place++) {
        Py_ssize_t number = number_node(walk, PyList_GET_ITEM(roots, place));
        if (number < 0 || push(&walk->stack, number) < 0)
            return -1;
    }
    while (walk->stack.count > 0) {
        Py_ssize_t number = pop(&walk->stack);
        NodeRow *row = node_at(walk, number);
        if (row->is_reached)
            continue;
        row->is_reached = 1;
        row->number = number_of(row->node, name__sequence_nr);
        if (PyErr_Occurred() || push(&walk->order, number) < 0 || add_edges(walk, number) < 0)
            return -1;
    }
    return 0;
}

/* Return what identifies a node, as `gradients._key_of`. */
static PyObject *key_of(const Walk *walk, const NodeRow *row)
{
    PyObject *number = PyLong_FromUnsignedLongLong((unsigned long long)row->number), *high = NULL, *key = NULL;
    if (number != NULL && (high = PyNumber_Lshift(number, walk->num_bits)) != NULL)
        key = PyNumber_Or(high, walk->thread);
    Py_XDECREF(number);
    Py_XDECREF(high);
    return key;
}

/* Have the Python catch the views that are not in the graph any more, where there may be some; -1 with an error set. */
static int catch_lost_views(const Walk *walk)
{
    int is_any = has(walk->trace, name_views);
    if (is_any <= 0)
        return is_any;
    PyObject *keys = PyDict_New(), *done = NULL;
    int failed = keys == NULL ? -1 : 0;
    for (Py_ssize_t place = 0; !failed && place < walk->order.count; place++) {
        NodeRow *row = node_at(walk, ((Py_ssize_t *)walk->order.rows)[place]);
        PyObject *key = key_of(walk, row);
        failed = key == NULL ? -1 : PyDict_SetItem(keys, row->node, key);
        Py_XDECREF(key);
    }
    if (!failed)
        done = PyObject_CallMethodObjArgs(walk->hooks, name__catch_lost_views, walk->trace, keys, NULL);
    Py_XDECREF(keys);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

/* Return the innermost module call during which a node was made, None for code outside all modules, as `_Owners`.
 * A node of no sequence has a number beyond all calls', which is negative here: it was made outside of them as well. */
static PyObject *find_owner(const Walk *walk, const NodeRow *row)
{
    Py_ssize_t low = 0, high = PyList_GET_SIZE(walk->starts);
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        long long start = PyLong_AsLongLong(PyList_GET_ITEM(walk->starts, middle));
        if (start == -1 && PyErr_Occurred())
            return NULL;
        if (row->number < start)
            high = middle;
        else
            low = middle + 1;
    }
    PyObject *call = Py_NewRef(low > 0 && low <= PyList_GET_SIZE(walk->calls) ? PyList_GET_ITEM(walk->calls, low - 1) : Py_None);
    while (call != NULL && call != Py_None) {
        PyObject *last = get(call, name_last_node);
        long long end = last != NULL ? PyLong_AsLongLong(last) : -1;
        Py_XDECREF(last);
        if (end == -1 && PyErr_Occurred())
            Py_CLEAR(call);
        else if (row->number < end)
            break;
        else
            Py_SETREF(call, get(call, name_parent));
    }
    return call;
}

/* Write down by whom and from what a gradient is computed that comes along one edge, as `gradients._settle`. */
static int settle_one(const Walk *walk, PyObject *tracked, const Edge *edge)
{
    const NodeRow *from = node_at(walk, edge->from);
    PyObject *call = find_owner(walk, from), *text = NULL, *sources = NULL, *number = NULL, *own = NULL, *owners = NULL;
    int failed = -1;
    if (call != NULL && (text = item_of(worded, from->names)) != NULL &&
        (sources = same(walk->builder, from->sources)) != NULL &&
        (number = call != Py_None ? get(call, name_number) : PyLong_FromLong(OUTSIDE)) != NULL &&
        (own = PyTuple_Pack(1, number)) != NULL && (owners = same(walk->builder, own)) != NULL &&
        set(tracked, name_sources, sources) == 0 && set(tracked, name_op, text) == 0)
        failed = set(tracked, name_owners, owners);
    Py_XDECREF(call);
    Py_XDECREF(text);
    Py_XDECREF(sources);
    Py_XDECREF(number);
    Py_XDECREF(own);
    Py_XDECREF(owners);
    return failed;
}

/* Take down what comes along one edge: (the call that computes it, the names) in `computed`, the sources in `flowing`. */
static int take_arrival(const Walk *walk, const Edge *edge, PyObject *computed, PyObject *flowing)
{
    const NodeRow *from = node_at(walk, edge->from);
    PyObject *call = find_owner(walk, from), *text = call != NULL ? item_of(worded, from->names) : NULL;
    PyObject *pair = text != NULL ? PyTuple_Pack(2, call, text) : NULL;
    int failed = pair == NULL ? -1 : PyDict_SetItem(computed, pair, Py_None);
    for (Py_ssize_t place = 0; !failed && place < PyTuple_GET_SIZE(from->sources); place++)
        failed = PyDict_SetItem(flowing, PyTuple_GET_ITEM(from->sources, place), Py_None);
    Py_XDECREF(call);
    Py_XDECREF(text);
    Py_XDECREF(pair);
    return failed;
}

/* Return (whether it is outside all modules, its first node, its place, itself, the names) of each call, in that order. */
static PyObject *sort_computed(PyObject *computed)
{
    PyObject *order = PyList_New(0), *pair, *unused;
    Py_ssize_t position = 0;
    for (Py_ssize_t place = 0; order != NULL && PyDict_Next(computed, &position, &pair, &unused); place++) {
        PyObject *call = PyTuple_GET_ITEM(pair, 0), *text = PyTuple_GET_ITEM(pair, 1);
        PyObject *start = call != Py_None ? get(call, name_first_node) : PyLong_FromLong(0);
        PyObject *item = start != NULL ? Py_BuildValue("(iOnOO)", call == Py_None, start, place, call, text) : NULL;
        if (item == NULL || PyList_Append(order, item) < 0)
            Py_CLEAR(order);
        Py_XDECREF(start);
        Py_XDECREF(item);
    }
    if (order != NULL && PyList_Sort(order) < 0)
        Py_CLEAR(order);
    return order;
}

/* Return a node's names as they are written beside those of other calls: with where that is. */
static PyObject *place_names(PyObject *call, PyObject *text)
{
    PyObject *where = get(call, name_path), *placed = NULL;
    int is_any = where != NULL ? PyObject_IsTrue(where) : -1;
    if (is_any == 0)
        Py_SETREF(where, get(call, name_root));
    if (is_any >= 0 && where != NULL)
        placed = PyUnicode_FromFormat("%S in %S", text, where);
    Py_XDECREF(where);
    return placed;
}

/* Write down the owners and the names of a gradient that several compute, or none; -1 with an error set. */
static int write_owners(const Walk *walk, PyObject *tracked, PyObject *order)
{
    Py_ssize_t count = PyList_GET_SIZE(order), num_calls = 0;
    PyObject *numbers = PyTuple_New(count), *named = PyDict_New(), *between = NULL, *op = NULL, *owners = NULL;
    int failed = numbers == NULL || named == NULL ? -1 : 0;
    for (Py_ssize_t place = 0; place < count; place++)
        num_calls += PyTuple_GET_ITEM(PyList_GET_ITEM(order, place), 3) != Py_None;
    for (Py_ssize_t place = 0; !failed && place < count; place++) {
        PyObject *item = PyList_GET_ITEM(order, place), *call = PyTuple_GET_ITEM(item, 3), *text = PyTuple_GET_ITEM(item, 4);
        PyObject *number = call != Py_None ? get(call, name_number) : PyLong_FromLong(OUTSIDE);
        PyObject *name = num_calls < 2 || call == Py_None ? Py_NewRef(text) : place_names(call, text);
        failed = number == NULL || name == NULL ? -1 : PyDict_SetItem(named, name, Py_None);
        Py_XDECREF(name);
        if (number != NULL)
            PyTuple_SET_ITEM(numbers, place, number);
    }
    if (!failed && (owners = same(walk->builder, numbers)) != NULL && (between = PyUnicode_FromString("; ")) != NULL &&
        (op = PyUnicode_Join(between, named)) != NULL && set(tracked, name_owners, owners) == 0)
        failed = set(tracked, name_op, op);
    else
        failed = -1;
    Py_XDECREF(numbers);
    Py_XDECREF(named);
    Py_XDECREF(between);
    Py_XDECREF(op);
    Py_XDECREF(owners);
    return failed;
}

/* Write that down of a gradient that comes along several edges, or of a root's, along none; -1 with an error set. */
static int settle_several(const Walk *walk, PyObject *tracked, const NodeRow *row, long long index)
{
    PyObject *computed = PyDict_New(), *flowing = PyDict_New(), *own = NULL, *sources = NULL, *order = NULL;
    int failed = computed == NULL || flowing == NULL ? -1 : 0;
    for (Py_ssize_t at = row->first_arrival; !failed && at != NOWHERE; at = edge_at(walk, at)->next_arrival)
        if (edge_at(walk, at)->index == index)
            failed = take_arrival(walk, edge_at(walk, at), computed, flowing);
    if (!failed && (own = PySequence_Tuple(flowing)) != NULL && (sources = same(walk->builder, own)) != NULL &&
        set(tracked, name_sources, sources) == 0 && (order = sort_computed(computed)) != NULL)
        failed = write_owners(walk, tracked, order);
    else
        failed = -1;
    Py_XDECREF(computed);
    Py_XDECREF(flowing);
    Py_XDECREF(own);
    Py_XDECREF(sources);
    Py_XDECREF(order);
    return failed;
}

/* Write down by whom and from what the gradient is computed that comes to one output of a node; -1 with an error set. */
static int settle_output(const Walk *walk, PyObject *tracked, const NodeRow *row, long long index)
{
    Py_ssize_t count = 0;
    const Edge *only = NULL;
    for (Py_ssize_t at = row->first_arrival; at != NOWHERE; at = edge_at(walk, at)->next_arrival) {
        Edge *edge = edge_at(walk, at);
        if (edge->index == index) {
            edge->is_taken = 1;
            only = edge;
            count++;
        }
    }
    return count == 1 ? settle_one(walk, tracked, only) : settle_several(walk, tracked, row, index);
}

/* The same for one entry of `_Outputs.items()`, whose number is one of the sources of what the node passes on. */
static int settle_followed(const Walk *walk, PyObject *index, PyObject *tracked, const NodeRow *row, PyObject *found)
{
    long long output = PyLong_AsLongLong(index);
    if ((output == -1 && PyErr_Occurred()) || settle_output(walk, tracked, row, output) < 0)
        return -1;
    PyObject *number = get(tracked, name_number);
    int failed = number == NULL ? -1 : PyDict_SetItem(found, number, Py_None);
    Py_XDECREF(number);
    return failed;
}

/* The same for all that is followed of a node; -1 with an error set. */
static int settle_outputs(const Walk *walk, PyObject *outputs, const NodeRow *row, PyObject *found)
{
    PyObject *others = get(outputs, name__others), *index = NULL, *first = NULL, *items = NULL;
    int failed = -1;
    if (others == Py_None) {
        if ((index = get(outputs, name__index)) != NULL && (first = get(outputs, name__first)) != NULL)
            failed = settle_followed(walk, index, first, row, found);
    } else if (others != NULL && (items = PyObject_CallMethodNoArgs(outputs, name_items)) != NULL) {
        failed = PyList_Check(items) ? 0 : -1;
        for (Py_ssize_t place = 0; !failed && place < PyList_GET_SIZE(items); place++) {
            PyObject *item = PyList_GET_ITEM(items, place);
            failed = PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2
                         ? settle_followed(walk, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1), row, found)
                         : -1;
        }
        if (failed && !PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "what is followed of a node is a list of pairs");
    }
    Py_XDECREF(others);
    Py_XDECREF(index);
    Py_XDECREF(first);
    Py_XDECREF(items);
    return failed;
}

/* Add the sources and the names of what comes to outputs that are not followed, output by output; -1 with an error set. */
static int pass_others(const Walk *walk, const NodeRow *row, PyObject *found, PyObject *names)
{
    for (Py_ssize_t at = row->first_arrival; at != NOWHERE; at = edge_at(walk, at)->next_arrival)
        for (Py_ssize_t like = edge_at(walk, at)->is_taken ? NOWHERE : at; like != NOWHERE; like = edge_at(walk, like)->next_arrival) {
            Edge *edge = edge_at(walk, like);
            if (edge->index != edge_at(walk, at)->index)
                continue;
            const NodeRow *from = node_at(walk, edge->from);
            edge->is_taken = 1;
            for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(from->sources); place++)
                if (PyDict_SetItem(found, PyTuple_GET_ITEM(from->sources, place), Py_None) < 0)
                    return -1;
            if (PyList_SetSlice(names, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, from->names) < 0)
                return -1;
        }
    return 0;
}

/* Settle the gradient of a parameter, which passes on nothing; -1 with an error set. */
static int flow_into_parameter(const Walk *walk, NodeRow *row)
{
    PyObject *variable = get(row->node, name_variable), *tracked = NULL, *trace = NULL;
    int failed = -1;
    if (variable == NULL || (tracked = PyObject_CallMethodOneArg(walk->hooks, name__parameter, variable)) == NULL)
        goto end;
    if (tracked != Py_None && ((trace = get(walk->hooks, name__trace)) == NULL ||
                               set(tracked, name_trace, trace) < 0 || settle_output(walk, tracked, row, 0) < 0))
        goto end;
    if ((row->sources = PyTuple_New(0)) != NULL && (row->names = PyTuple_New(0)) != NULL)
        failed = 0;
end:
    Py_XDECREF(variable);
    Py_XDECREF(tracked);
    Py_XDECREF(trace);
    return failed;
}

/* Settle whose gradients the node's own are made from, and what it passes on, as `GradientHooks._flow_into`. */
static int flow_into(const Walk *walk, NodeRow *row)
{
    PyObject *own = PyObject_CallMethodNoArgs(row->node, name_name), *key = NULL, *outputs = NULL, *found = NULL;
    PyObject *met = NULL, *names = NULL, *pair = NULL;
    int failed = -1;
    if (own == NULL || !PyUnicode_Check(own)) {
        if (own != NULL)
            PyErr_SetString(PyExc_TypeError, "a node's name is a string");
        goto end;
    }
    if (PyUnicode_CompareWithASCIIString(own, ACCUMULATE) == 0) {
        failed = flow_into_parameter(walk, row);
        goto end;
    }
    if ((key = key_of(walk, row)) == NULL)
        goto end;
    outputs = Py_XNewRef(PyDict_GetItemWithError(walk->outputs, key));
    if (outputs == NULL && PyErr_Occurred())
        goto end;
    if (outputs == NULL && row->first_arrival != NOWHERE && row->first_arrival == row->last_arrival) {
        const NodeRow *from = node_at(walk, edge_at(walk, row->first_arrival)->from);
        row->sources = Py_NewRef(from->sources);
        names = Py_NewRef(from->names);
    } else {
        if ((found = PyDict_New()) == NULL || (met = PyList_New(0)) == NULL ||
            (outputs != NULL && settle_outputs(walk, outputs, row, found) < 0) || pass_others(walk, row, found, met) < 0 ||
            (row->sources = PySequence_Tuple(found)) == NULL || (names = PyList_AsTuple(met)) == NULL)
            goto end;
    }
    if ((pair = PyTuple_Pack(2, own, names)) != NULL && (row->names = item_of(passed, pair)) != NULL)
        failed = 0;
end:
    Py_XDECREF(own);
    Py_XDECREF(key);
    Py_XDECREF(outputs);
    Py_XDECREF(found);
    Py_XDECREF(met);
    Py_XDECREF(names);
    Py_XDECREF(pair);
    return failed;
}

static void forget_passed(NodeRow *row)
{
    Py_CLEAR(row->sources);
    Py_CLEAR(row->names);
}

/* Hand what a node passes on to those below it, and forget what it was handed; -1 with an error set. */
static int pass_on(Walk *walk, Py_ssize_t number)
{
    NodeRow *row = node_at(walk, number);
    for (Py_ssize_t at = row->first_arrival; at != NOWHERE; at = edge_at(walk, at)->next_arrival) {
        NodeRow *from = node_at(walk, edge_at(walk, at)->from);
        if (--from->num_takers == 0)
            forget_passed(from);
    }
    for (Py_ssize_t at = row->first_edge; at < row->end_edge; at++) {
        NodeRow *below = node_at(walk, edge_at(walk, at)->to);
        if (below->last_arrival == NOWHERE)
            below->first_arrival = at;
        else
            edge_at(walk, below->last_arrival)->next_arrival = at;
        below->last_arrival = at;
        if (--below->num_waits == 0 && push(&walk->stack, edge_at(walk, at)->to) < 0)
            return -1;
    }
    if (row->num_takers == 0)
        forget_passed(row);
    return 0;
}

/* Let the gradients flow from the roots down; -1 with an error set. */
static int flow(Walk *walk)
{
    for (Py_ssize_t place = 0; place < walk->order.count; place++) {
        Py_ssize_t number = ((Py_ssize_t *)walk->order.rows)[place];
        if (node_at(walk, number)->num_waits == 0 && push(&walk->stack, number) < 0)
            return -1;
    }
    while (walk->stack.count > 0) {
        Py_ssize_t number = pop(&walk->stack);
        if (flow_into(walk, node_at(walk, number)) < 0 || pass_on(walk, number) < 0)
            return -1;
    }
    return 0;
}

/* Ask the trace and the owners for what they hold; -1 with an error set. */
static int begin_walk(Walk *walk)
{
    if ((walk->outputs = get(walk->trace, name_outputs)) == NULL ||
        (walk->calls = get(walk->owner_of, name__calls)) == NULL ||
        (walk->starts = get(walk->owner_of, name__starts)) == NULL ||
        (walk->thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident())) == NULL ||
        (walk->num_bits = PyLong_FromLong(64)) == NULL)
        return -1;
    if (PyDict_Check(walk->outputs) && PyList_Check(walk->calls) && PyList_Check(walk->starts))
        return 0;
    PyErr_SetString(PyExc_TypeError, "outputs are in a dictionary, calls and their starts in lists");
    return -1;
}

static void end_walk(Walk *walk)
{
    for (Py_ssize_t number = 0; number < walk->nodes.count; number++) {
        forget_passed(node_at(walk, number));
        Py_DECREF(node_at(walk, number)->node);
    }
    Py_XDECREF(walk->outputs);
    Py_XDECREF(walk->calls);
    Py_XDECREF(walk->starts);
    Py_XDECREF(walk->thread);
    Py_XDECREF(walk->num_bits);
    PyMem_Free(walk->nodes.rows);
    PyMem_Free(walk->edges.rows);
    PyMem_Free(walk->stack.rows);
    PyMem_Free(walk->order.rows);
    PyMem_Free(walk->slots);
}

PyObject *plan_nodes(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5 || !PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "plan_nodes takes hooks, a step, its trace, its owners and a list of nodes");
        return NULL;
    }
    if (!is_configured(0, NUM_NEEDS))
        return NULL;
    Walk walk = {.hooks = args[0], .builder = args[1], .trace = args[2], .owner_of = args[3]};
    int failed = begin_walk(&walk) || reach_nodes(&walk, args[4]) || catch_lost_views(&walk) || flow(&walk);
    end_walk(&walk);
    return failed ? NULL : Py_NewRef(Py_None);
}
