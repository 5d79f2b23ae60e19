/* What the parts of `bitcheck.hooks._native` share: names, what the Python has handed over, short ways to ask objects. */
#ifndef BITCHECK_NATIVE_H
#define BITCHECK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Attributes and methods that objects are asked for: interned strings, `name_...`. */
#define NAMES(NAME)                                                                                                    \
    NAME(__enter__)                                                                                                    \
    NAME(__exit__)                                                                                                     \
    NAME(_address)                                                                                                     \
    NAME(_base)                                                                                                        \
    NAME(_begin)                                                                                                       \
    NAME(_calls)                                                                                                       \
    NAME(_capacity)                                                                                                    \
    NAME(_capture)                                                                                                     \
    NAME(_catch_lost_views)                                                                                            \
    NAME(_cdata)                                                                                                       \
    NAME(_counts)                                                                                                      \
    NAME(_digesters)                                                                                                   \
    NAME(_end)                                                                                                         \
    NAME(_enter)                                                                                                       \
    NAME(_executions)                                                                                                  \
    NAME(_facts)                                                                                                       \
    NAME(_filling)                                                                                                     \
    NAME(_first)                                                                                                       \
    NAME(_flight_leaves)                                                                                               \
    NAME(_flights)                                                                                                     \
    NAME(_group)                                                                                                       \
    NAME(_head)                                                                                                        \
    NAME(_hooks)                                                                                                       \
    NAME(_index)                                                                                                       \
    NAME(_is_view)                                                                                                     \
    NAME(_kinds)                                                                                                       \
    NAME(_known)                                                                                                       \
    NAME(_last)                                                                                                        \
    NAME(_launch_leaves)                                                                                               \
    NAME(_launches)                                                                                                    \
    NAME(_lines)                                                                                                       \
    NAME(_local)                                                                                                       \
    NAME(_locate)                                                                                                      \
    NAME(_memory)                                                                                                      \
    NAME(_memory_of)                                                                                                   \
    NAME(_node)                                                                                                        \
    NAME(_note_recomputed)                                                                                             \
    NAME(_num_modules)                                                                                                 \
    NAME(_num_tickets)                                                                                                 \
    NAME(_others)                                                                                                      \
    NAME(_owed)                                                                                                        \
    NAME(_parameter)                                                                                                   \
    NAME(_parameters)                                                                                                  \
    NAME(_places)                                                                                                      \
    NAME(_received)                                                                                                    \
    NAME(_record_inputs)                                                                                               \
    NAME(_record_outputs)                                                                                              \
    NAME(_record_scalars)                                                                                              \
    NAME(_recorder)                                                                                                    \
    NAME(_remembered)                                                                                                  \
    NAME(_ring)                                                                                                        \
    NAME(_run)                                                                                                         \
    NAME(_scalars)                                                                                                     \
    NAME(_scratch_address)                                                                                             \
    NAME(_scratch_bytes)                                                                                               \
    NAME(_scratch_stream)                                                                                              \
    NAME(_sequence_nr)                                                                                                 \
    NAME(_shortcut)                                                                                                    \
    NAME(_site_of_unwritten)                                                                                           \
    NAME(_sources)                                                                                                     \
    NAME(_starts)                                                                                                      \
    NAME(_tail)                                                                                                        \
    NAME(_trace)                                                                                                       \
    NAME(_used)                                                                                                        \
    NAME(_values)                                                                                                      \
    NAME(_version)                                                                                                     \
    NAME(_weak_ref)                                                                                                    \
    NAME(acquire)                                                                                                      \
    NAME(add)                                                                                                          \
    NAME(add_all_computed)                                                                                             \
    NAME(add_computed)                                                                                                 \
    NAME(add_tensor)                                                                                                   \
    NAME(backward)                                                                                                     \
    NAME(builder)                                                                                                      \
    NAME(called)                                                                                                       \
    NAME(calls)                                                                                                        \
    NAME(children)                                                                                                     \
    NAME(consumers)                                                                                                    \
    NAME(counts)                                                                                                       \
    NAME(current)                                                                                                      \
    NAME(data_ptr)                                                                                                     \
    NAME(depth)                                                                                                        \
    NAME(device)                                                                                                       \
    NAME(digests)                                                                                                      \
    NAME(dtype)                                                                                                        \
    NAME(end)                                                                                                          \
    NAME(events)                                                                                                       \
    NAME(execution)                                                                                                    \
    NAME(first)                                                                                                        \
    NAME(first_node)                                                                                                   \
    NAME(firsts)                                                                                                       \
    NAME(flush)                                                                                                        \
    NAME(flying)                                                                                                       \
    NAME(gathered)                                                                                                     \
    NAME(get)                                                                                                          \
    NAME(get_device)                                                                                                   \
    NAME(grad)                                                                                                         \
    NAME(grad_)                                                                                                        \
    NAME(grad_fn)                                                                                                      \
    NAME(gradients)                                                                                                    \
    NAME(group)                                                                                                        \
    NAME(group_of)                                                                                                     \
    NAME(groups)                                                                                                       \
    NAME(in_part)                                                                                                      \
    NAME(inputs)                                                                                                       \
    NAME(is_active)                                                                                                    \
    NAME(is_conj)                                                                                                      \
    NAME(is_contiguous)                                                                                                \
    NAME(is_cpu)                                                                                                       \
    NAME(is_cuda)                                                                                                      \
    NAME(is_eval)                                                                                                      \
    NAME(is_fresh)                                                                                                     \
    NAME(is_inference)                                                                                                 \
    NAME(is_kept)                                                                                                      \
    NAME(is_meta)                                                                                                      \
    NAME(is_neg)                                                                                                       \
    NAME(is_nested)                                                                                                    \
    NAME(items)                                                                                                        \
    NAME(itemsize)                                                                                                     \
    NAME(key)                                                                                                          \
    NAME(kinds)                                                                                                        \
    NAME(last_node)                                                                                                    \
    NAME(layout)                                                                                                       \
    NAME(leaves)                                                                                                       \
    NAME(lock)                                                                                                         \
    NAME(losses)                                                                                                       \
    NAME(mark)                                                                                                         \
    NAME(modules)                                                                                                      \
    NAME(name)                                                                                                         \
    NAME(nbytes)                                                                                                       \
    NAME(next_functions)                                                                                               \
    NAME(note_write)                                                                                                   \
    NAME(number)                                                                                                       \
    NAME(occurrence)                                                                                                   \
    NAME(op)                                                                                                           \
    NAME(out)                                                                                                          \
    NAME(output_nr)                                                                                                    \
    NAME(outputs)                                                                                                      \
    NAME(owners)                                                                                                       \
    NAME(parameter_name)                                                                                               \
    NAME(parent)                                                                                                       \
    NAME(path)                                                                                                         \
    NAME(phase)                                                                                                        \
    NAME(producer)                                                                                                     \
    NAME(received)                                                                                                     \
    NAME(recomputed)                                                                                                   \
    NAME(record)                                                                                                       \
    NAME(register_prehook)                                                                                             \
    NAME(registry)                                                                                                     \
    NAME(release)                                                                                                      \
    NAME(requires_grad)                                                                                                \
    NAME(reserve)                                                                                                      \
    NAME(root)                                                                                                         \
    NAME(scalars)                                                                                                      \
    NAME(shape)                                                                                                        \
    NAME(sites)                                                                                                        \
    NAME(slot)                                                                                                         \
    NAME(sources)                                                                                                      \
    NAME(stack)                                                                                                        \
    NAME(start)                                                                                                        \
    NAME(step)                                                                                                         \
    NAME(storage_offset)                                                                                               \
    NAME(stride)                                                                                                       \
    NAME(thread)                                                                                                       \
    NAME(tickets)                                                                                                      \
    NAME(top)                                                                                                          \
    NAME(trace)                                                                                                        \
    NAME(tracked)                                                                                                      \
    NAME(untyped_storage)                                                                                              \
    NAME(values)                                                                                                       \
    NAME(version)                                                                                                      \
    NAME(variable)                                                                                                     \
    NAME(views)                                                                                                        \
    NAME(writers)

/* Objects that `configure` is given, by name: first those that a tensor's digest takes. */
#define NEEDS(NEED)                                                                                                    \
    NEED(digest_error)                                                                                                 \
    NEED(digest_header)                                                                                                \
    NEED(is_functorch)                                                                                                 \
    NEED(parameter_type)                                                                                               \
    NEED(plain_kinds)                                                                                                  \
    NEED(strided_layout)                                                                                               \
    NEED(tensor_type)                                                                                                  \
    NEED(free_weak_ref)                                                                                                \
    NEED(alone)                                                                                                        \
    NEED(attribute_types)                                                                                              \
    NEED(backward_phase)                                                                                               \
    NEED(blame)                                                                                                        \
    NEED(call_pattern)                                                                                                 \
    NEED(class_name)                                                                                                   \
    NEED(current_node)                                                                                                 \
    NEED(forward_phase)                                                                                                \
    NEED(graph_task)                                                                                                   \
    NEED(is_distributed)                                                                                               \
    NEED(is_expired)                                                                                                   \
    NEED(loaded_modules)                                                                                               \
    NEED(local_depth)                                                                                                  \
    NEED(member_names)                                                                                                 \
    NEED(named_tensors)                                                                                                \
    NEED(next_node)                                                                                                    \
    NEED(no_function)                                                                                                  \
    NEED(outputs_pattern)                                                                                              \
    NEED(recompute_phase)                                                                                              \
    NEED(remembered_type)                                                                                              \
    NEED(passed)                                                                                                       \
    NEED(set_eval_frame)                                                                                               \
    NEED(tell_error)                                                                                                   \
    NEED(tracked_pattern)                                                                                              \
    NEED(worded)

#define COUNT_NEED(NEED) NEED_##NEED,
enum { NEEDS(COUNT_NEED) NUM_NEEDS };

/* Whether `configure` was given all from `begin` up to `end`; an error is set where it was not. */
int is_configured(size_t begin, size_t end);

static inline int can_digest(void)
{
    return is_configured(0, NEED_free_weak_ref);
}

#define DECLARE_NAME(NAME) extern PyObject *name_##NAME;
extern PyObject *name_empty; /* "" */
#define DECLARE_NEED(NEED) extern PyObject *NEED;
NAMES(DECLARE_NAME)
NEEDS(DECLARE_NEED)

/* As PyObject_GetAttr and PyObject_SetAttr; quicker for objects whose classes have `__slots__`. Names are interned. */
PyObject *get(PyObject *object, PyObject *name);
int set(PyObject *object, PyObject *name, PyObject *value);

/* Return a new object with the slots of another, whose class has nothing but `__slots__`: quicker than to call the class. */
PyObject *like(PyObject *pattern);

/* Ask for an attribute, or call a method, of which a truth is the answer: 1, 0, or -1 with an error set. */
static inline int is_true(PyObject *answer)
{
    if (answer == NULL)
        return -1;
    int truth = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return truth;
}

static inline int has(PyObject *object, PyObject *attribute)
{
    return is_true(get(object, attribute));
}

static inline int says(PyObject *object, PyObject *method)
{
    return is_true(PyObject_CallMethodNoArgs(object, method));
}

/* Call a method that gives a number; -1 where it fails, with an error set, to be asked for. */
static inline long long number_of(PyObject *object, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    if (answer == NULL)
        return -1;
    unsigned long long number = PyLong_AsUnsignedLongLongMask(answer); /* an address may have its highest bit set */
    Py_DECREF(answer);
    return (long long)number;
}

/* Return what a table has for a key, as `table[key]`. Of what makes what is missing, which a subclass of dict does, the
 * generic way takes several times as long. */
static inline PyObject *item_of(PyObject *table, PyObject *key)
{
    PyObject *found = PyDict_Check(table) ? PyDict_GetItemWithError(table, key) : NULL;
    if (found != NULL)
        return Py_NewRef(found);
    return PyErr_Occurred() ? NULL : PyObject_GetItem(table, key);
}

/* Set an attribute to a new reference, which is given away; -1 with an error set, as there is where it is NULL. */
static inline int put(PyObject *object, PyObject *attribute, PyObject *value)
{
    int failed = value == NULL ? -1 : set(object, attribute, value);
    Py_XDECREF(value);
    return failed;
}

/* Add the members of a sequence, or a pair, to a list; -1 with an error set. */
static inline int extend(PyObject *list, PyObject *members)
{
    Py_ssize_t end = PyList_GET_SIZE(list);
    return PyList_SetSlice(list, end, end, members);
}

static inline int append_pair(PyObject *list, PyObject *name, PyObject *value)
{
    PyObject *pair = PyTuple_Pack(2, name, value);
    int failed = pair == NULL ? -1 : PyList_Append(list, pair);
    Py_XDECREF(pair);
    return failed;
}

static inline int is_tensor(PyObject *value)
{
    return (PyObject *)Py_TYPE(value) == tensor_type || (PyObject *)Py_TYPE(value) == parameter_type;
}

/* Add an event to a step's columns, as `StepColumns.add`; returns its index, -1 with an error set. */
Py_ssize_t add_event(PyObject *record, PyObject *site, PyObject *kind, PyObject *digest, PyObject *leaves,
                     PyObject *group, PyObject *inputs);

#define LEAF_BYTES (16 * 1024)
#define DIGEST_BYTES 16
#define FEW_TENSORS 4 /* as `layout.FEW_TENSORS` */

/* Places of the fields of a `Kind` and of `_PlainKind`. */
enum { KIND_SHAPE = 1, KIND_BYTES };
enum { KNOWN_KIND, KNOWN_ITEMSIZE, KNOWN_IS_COMPLEX, KNOWN_HEADER };

/* Return what is known of a tensor that is no more than its elements, `is_there` its property of the device where it
 * should lie, or NULL where it does: an entry of `plain_kinds`; NULL for any other tensor, or with an error set. */
PyObject *plain_kind(PyObject *tensor, PyObject *is_there);

/* Return what identifies a tensor's storage, as `tensors.storage_id`: a new reference, None for a tensor without one. */
PyObject *storage_of(PyObject *tensor);

/* Set the digest of a tensor whose leaf digests are known, of XXH3_MIN_BYTES or more in all; -1 where there is no memory, no
 * error set. It needs no lock of the interpreter. */
int hash_joined(const uint8_t *header, size_t header_bytes, const uint8_t *leaves, size_t leaves_bytes, uint8_t *digest);

/* Where a tensor's elements lie, one after the other, as `layout.places_of_portably` has it: 0 for an empty one,
 * PLACE_STRIDED for one that lies otherwise; PLACE_MISSING where its memory is not there; PLACE_ERROR with an error set. */
enum { PLACE_STRIDED = -1, PLACE_MISSING = -2, PLACE_ERROR = -3 };
long long find_place(PyObject *tensor, long long num_bytes);

/* Do the same where it is known what `plain_kind` gives. */
long long find_place_of(PyObject *tensor, PyObject *known);

/* Capture a few plain tensors of a device of which the elements lie at `places`, in one launch, as
 * `DeviceDigester._submit_few`, those that are PLACE_STRIDED copied to row-major order before, as `_gather`: 1, with a
 * ticket for each, a new reference; 0 where the Python has to; -1 with an error. */
int submit_few(PyObject *digester, Py_ssize_t count, PyObject *const *tensors, PyObject *const *kinds,
               const long long *places, PyObject **tickets);

/* Return the sites of what is recorded next at a place of the program, as `StepBuilder.next_sites`. */
PyObject *next_sites(PyObject *builder, PyObject *phase, PyObject *root, PyObject *path, PyObject *slot, PyObject *is_eval);

/* Add an event for each of up to FEW_TENSORS tensors, the first of which lies on a device, as
 * `StepBuilder._add_on_device`: 1, with the events of each, new references; 0 where the Python has to, since they are many, not plain, of several devices, or `submit_few` leaves
 * them to it; -1 with an error set. */
int add_on_device(PyObject *builder, Py_ssize_t count, PyObject *const *sites, PyObject *const *tensors, PyObject *group,
                  PyObject *const *sources, PyObject **added);

/* The number in `Tracked.owners` that stands for code outside all modules: `gradients._OUTSIDE`. */
#define OUTSIDE (-1)

/* Return the tuple that stood for an equal one before, as `Known.same`. */
PyObject *same(PyObject *builder, PyObject *value);

/* Whether no collective still writes any of some tensors, as `StepBuilder._has_landed`: 1, 0, or -1 with an error set. */
int have_landed(PyObject *builder, Py_ssize_t count, PyObject *const *tensors);

/* Open a computation that is described already, as `StepBuilder.open_group`; return its number. */
PyObject *append_group(PyObject *builder, PyObject *group);

/* Open the computation that an execution at one place is, mostly described as in the step before, as
 * `StepBuilder.open_group(sites.group(kind, op, parent, node))`; return its number. */
PyObject *open_group_at(PyObject *builder, PyObject *sites, PyObject *kind, PyObject *op, PyObject *parent, PyObject *node);

/* Return a computation that no other encloses, as `StepBuilder.same` has it; NULL where no step had it, or with an error
 * set. */
PyObject *known_group(PyObject *builder, PyObject *kind, PyObject *root, PyObject *path, PyObject *op);

/* Record a tensor as it is now, as `StepBuilder.add_tensor`; return its events, a tuple. `inputs` is one. */
PyObject *add_events(PyObject *builder, PyObject *site, PyObject *tensor, PyObject *group, PyObject *inputs);

/* What is turned off for as long as the recorder works, as `dynamo.paused` does. */
typedef struct {
    PyObject *dynamo, *function; /* what was there before */
} Pause;

/* Turn off what would see the recorder's own work; -1 with an error set, and nothing turned off. */
int begin_pause(Pause *pause);

/* Put everything back, with or without an error set; one that is set is told first. Returns `result`, which is given away,
 * or None where an error ended here. */
PyObject *end_pause(Pause *pause, PyObject *result);

/* Whether what runs in this thread is the recorder's own, as `dynamo.is_quiet`: 1, 0, or -1 with an error set. */
int is_quiet(void);

/* Return a new type, `Memory`. */
PyObject *make_memory_type(void);

/* The module's functions. */
PyObject *digest_plain(PyObject *module, PyObject *tensor);
PyObject *add_plain(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *run_operation(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *begin_operation(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *end_operation(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *is_paused(PyObject *module, PyObject *unused);
PyObject *plain_on_device(PyObject *module, PyObject *tensor);
PyObject *places_of(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *receive_leaves(PyObject *module, PyObject *args);
PyObject *wait_for_number(PyObject *module, PyObject *args);
PyObject *submit_tensors(PyObject *module, PyObject *args);
PyObject *add_tensor(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *begin_call(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *end_call(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *record_node(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *record_accumulated(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *plan_nodes(PyObject *module, PyObject *const *args, Py_ssize_t num_args);

#endif
