/* Keeping out of the program's way, as `dynamo.paused`. */
#include "native.h"

static int change_depth(long by)
{
    PyObject *depth = get(local_depth, name_depth), *now = NULL;
    long before = depth != NULL ? PyLong_AsLong(depth) : -1;
    int failed = -1;
    if (!PyErr_Occurred() && (now = PyLong_FromLong(before + by)) != NULL)
        failed = set(local_depth, name_depth, now);
    Py_XDECREF(depth);
    Py_XDECREF(now);
    return failed;
}

int begin_pause(Pause *pause)
{
    if ((pause->dynamo = PyObject_CallOneArg(set_eval_frame, Py_None)) == NULL)
        return -1;
    PyObject *entered = NULL;
    if ((pause->function = PyObject_CallNoArgs(no_function)) != NULL)
        entered = PyObject_CallMethodNoArgs(pause->function, name___enter__);
    if (entered != NULL && change_depth(1) == 0) {
        Py_DECREF(entered);
        return 0;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (entered != NULL)
        Py_XDECREF(PyObject_CallMethodObjArgs(pause->function, name___exit__, Py_None, Py_None, Py_None, NULL));
    Py_XDECREF(entered);
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
    int failed = change_depth(-1);
    if (failed && type == NULL)
        PyErr_Fetch(&type, &value, &traceback);
    PyErr_Clear();
    PyObject *back = PyObject_CallOneArg(set_eval_frame, pause->dynamo);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    if (failed || back == NULL)
        Py_CLEAR(result);
    Py_DECREF(pause->function);
    Py_DECREF(pause->dynamo);
    Py_XDECREF(left);
    Py_XDECREF(back);
    return result;
}
