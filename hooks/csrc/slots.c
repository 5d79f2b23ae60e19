/* Attributes of objects whose classes have `__slots__`, read and written where they lie.
 *
 * Python looks an attribute up in the object's class each time, which is most of what the recorder's hooks take. Here it is
 * found out once for a class and a name; a class that was changed since has another version.
 */
#include "native.h"

#include <structmember.h>

#define NUM_ENTRIES 4096 /* a power of two, many times as many as there are classes' names */

typedef struct {
    PyTypeObject *type; /* compared only, never looked into: it may be gone */
    PyObject *name;
    unsigned version;
    Py_ssize_t offset; /* from the object's beginning; 0 where it is no slot */
} Entry;

static Entry entries[NUM_ENTRIES];

/* Return the offset of a member that a class has under a name for objects, readable and writable; 0 for any other attribute. */
static Py_ssize_t find_offset(PyTypeObject *type, PyObject *name)
{
    /* With another metaclass the class may answer otherwise than its objects do. */
    if (type->tp_getattro != PyObject_GenericGetAttr || type->tp_setattro != PyObject_GenericSetAttr ||
        !Py_IS_TYPE(type, &PyType_Type))
        return 0;
    PyObject *found = PyObject_GetAttr((PyObject *)type, name); /* the descriptor itself, where it is a member's */
    if (found == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_ssize_t offset = 0;
    if (Py_TYPE(found) == &PyMemberDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
        const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type == T_OBJECT_EX && member->flags == 0)
            offset = member->offset;
    }
    Py_DECREF(found);
    return offset;
}

static int is_of(const Entry *entry, const PyTypeObject *type, const PyObject *name)
{
    return entry->type == type && entry->name == name && entry->version == type->tp_version_tag && entry->version != 0;
}

/* Return where an object holds an attribute, NULL where that is not in a slot of its own. */
static PyObject **slot_of(PyObject *object, PyObject *name)
{
    PyTypeObject *type = Py_TYPE(object);
    uint64_t mixed = ((uint64_t)(uintptr_t)type ^ ((uint64_t)(uintptr_t)name << 20)) * 0x9E3779B97F4A7C15ULL;
    Entry *first = &entries[mixed >> 52 & (NUM_ENTRIES - 2)], *entry = is_of(first, type, name) ? first : first + 1;
    if (!is_of(entry, type, name)) {
        Py_ssize_t offset = find_offset(type, name);
        unsigned version = type->tp_version_tag; /* looking gives a class one, if it can have one */
        if (version == 0)
            return NULL;
        /* A place of two, so that hardly any two take it from each other; that of a class which was changed is free. */
        int is_free = first->version == 0 || (first->type == type && first->name == name);
        entry = is_free ? first : first + 1;
        *entry = (Entry){type, name, version, offset};
    }
    return entry->offset > 0 ? (PyObject **)((char *)object + entry->offset) : NULL;
}

PyObject *get(PyObject *object, PyObject *name)
{
    PyObject **place = slot_of(object, name);
    return place != NULL && *place != NULL ? Py_NewRef(*place) : PyObject_GetAttr(object, name);
}

int set(PyObject *object, PyObject *name, PyObject *value)
{
    PyObject **place = slot_of(object, name);
    if (place == NULL)
        return PyObject_SetAttr(object, name, value);
    Py_XSETREF(*place, Py_NewRef(value));
    return 0;
}

PyObject *like(PyObject *pattern)
{
    PyTypeObject *type = Py_TYPE(pattern);
    if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE) || type->tp_base != &PyBaseObject_Type || type->tp_dictoffset != 0 ||
        type->tp_weaklistoffset != 0 || type->tp_itemsize != 0)
        return PyErr_Format(PyExc_TypeError, "a class with __slots__ alone, not %R", type);
    PyObject *made = type->tp_alloc(type, 0);
    for (size_t offset = sizeof(PyObject); made != NULL && offset < (size_t)type->tp_basicsize; offset += sizeof(PyObject *))
        *(PyObject **)((char *)made + offset) = Py_XNewRef(*(PyObject **)((char *)pattern + offset));
    return made;
}
