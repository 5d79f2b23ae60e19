/* Keeping out of the program's way, as `dynamo.paused`. */
#include "native.h"

/* How many of the compiled half's functions keep out of the way in this thread; the Python's are counted by `dynamo`. */
static _Thread_local long depth;

PyObject *is_paused(PyObject *module, PyObject *unused)
{
    return PyBool_FromLong(depth > 0);
}

int is_quiet(void)
{
    if (depth > 0)
        return 1;
    PyObject *other = get(local_depth, name_depth);
    long count = other != NULL ? PyLong_AsLong(other) : -1;
    Py_XDECREF(other);
    return PyErr_Occurred() ? -1 : count > 0;
}

int begin_pause(Pause *pause)
{
    if ((pause->dynamo = PyObject_CallOneArg(set_eval_frame, Py_None)) == NULL)
        return -1;
    PyObject *entered = NULL;
    if ((pause->function = PyObject_CallNoArgs(no_function)) != NULL)
        entered = PyObject_CallMethodNoArgs(pause->function, name___enter__);
    if (entered != NULL) {
        Py_DECREF(entered);
        depth++;
        return 0;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(pause->function);
    Py_XDECREF(PyObject_CallOneArg(set_eval_frame, pause->dynamo));
    Py_DECREF(pause->dynamo);
    PyErr_Restore(type, value, traceback);
    return -1;
}

/* Hand an error of the recorder's own to who listens for it; return None where it ends there, NULL with an error set where
 * it goes on to the program, as what is no Exception does: an interrupt. */
static PyObject *tell(void)
{
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *told = PyObject_CallOneArg(tell_error, value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return told;
}

PyObject *end_pause(Pause *pause, PyObject *result)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left = PyObject_CallMethodObjArgs(pause->function, name___exit__, Py_None, Py_None, Py_None, NULL);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback); /* in place of one that was set since */
        Py_XSETREF(result, tell());
    } else if (left == NULL)
        Py_CLEAR(result);
    PyErr_Fetch(&type, &value, &traceback);
    depth--;
    PyObject *back = PyObject_CallOneArg(set_eval_frame, pause->dynamo);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    if (back == NULL)
        Py_CLEAR(result);
    Py_DECREF(pause->function);
    Py_DECREF(pause->dynamo);
    Py_XDECREF(left);
    Py_XDECREF(back);
    return result;
}
