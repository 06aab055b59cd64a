"""Functions that one module compiled by Cython takes from another, replaced by those of Python.

Such a module offers its C functions in ``__pyx_capi__``, in capsules whose names are their signatures, and others take them from there while they
are imported. What is put there calls back into Python by ctypes, by way of a few lines of C++ for each: a callback of ctypes can
raise nothing, and loses a reference to None, so it leaves the error, and gives tuples of one.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda.emulator import build

kept: list[Any] = []
"""What C points to, while the process lives."""


@dataclass(frozen=True)
class _Type:
    c: str
    ctypes: Any


_OBJECT = _Type("PyObject *", ctypes.py_object)
_TYPES = {
    "PyObject *": _OBJECT,
    "int": _Type("int", ctypes.c_int),
    "unsigned int": _Type("unsigned int", ctypes.c_uint),
    "size_t": _Type("size_t", ctypes.c_size_t),
    "intptr_t": _Type("intptr_t", ctypes.c_ssize_t),
    "float": _Type("float", ctypes.c_float),
}


@dataclass(frozen=True)
class _Function:
    """A C function that one module of CuPy takes from another."""

    name: str
    signature: bytes
    result: _Type
    arguments: tuple[_Type, ...]
    given: tuple[int, ...]
    """Which of the arguments say something."""

    @classmethod
    def of(cls, name: str, capsule: Any) -> _Function:
        signature = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))(
            capsule
        )
        found = re.fullmatch(r"(.*?) ?\((.*)\)", signature.decode())
        assert found, f"{name} is no function: {signature!r}"
        texts = [] if found[2] == "void" else found[2].split(", ")
        given = tuple(i for i, text in enumerate(texts) if "skip_dispatch" not in text)
        return cls(name, signature, _type(found[1]), tuple(map(_type, texts)), given)

    def text(self, i: int) -> str:
        """It in C++: calls what Python has put into its place, and raises what that could not."""
        types, names = [a.c for a in self.arguments], [f"a{n}" for n in range(len(self.arguments))]
        passed = ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True))
        call = f"(({self.result.c} (*)({', '.join(types)})) called[{i}])({', '.join(names)})"
        done = f"{{ {self.result.c} r = {call};"
        if self.result is _OBJECT:
            return f'extern "C" PyObject *made_{i}({passed}) {done} return taken(r); }}\n'
        failed = "-1" if self.result.c == "int" else "0"
        return f'extern "C" {self.result.c} made_{i}({passed}) {done} return failed() ? {failed} : r; }}\n'


def _type(text: str) -> _Type:
    text = text.removesuffix(" __pyx_skip_dispatch")
    return _TYPES[text] if text in _TYPES or "*" not in text else _Type("void *", ctypes.c_void_p)


_COMMON = """
#include <stddef.h>
#include <stdint.h>
extern "C" {
typedef struct _object PyObject;
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *PyObject_Type(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, intptr_t);
void PyErr_SetObject(PyObject *, PyObject *);
void *called[1024];
}
static thread_local PyObject *error;
extern "C" void raise_later(PyObject *e) { Py_IncRef(e); error = e; }
static bool failed() {
    if (!error) return false;
    PyObject *e = error, *type = PyObject_Type(e);
    error = 0;
    PyErr_SetObject(type, e);
    Py_DecRef(type);
    Py_DecRef(e);
    return true;
}
static PyObject *taken(PyObject *tuple) {
    PyObject *r = failed() ? 0 : PyTuple_GetItem(tuple, 0);
    if (r) Py_IncRef(r);
    Py_DecRef(tuple);
    return r;
}
"""


def replace(module: Any, ours: Any) -> None:
    """Let other compiled modules, and Python, find the methods of an object in the place of a module's functions of these names.

    Modules that have been imported before keep what they found. In Python the module's own function looks at the arguments first, and must fail
    with a RuntimeError if these are right: there is no driver.
    """
    names = [name for name in vars(type(ours)) if name in module.__pyx_capi__]
    found = [_Function.of(name, module.__pyx_capi__[name]) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "made.cpp", Path(folder) / "made.so"
        source.write_text(_COMMON + "".join(f.text(i) for i, f in enumerate(found)))
        build(source, made, ["-O1", "-shared", "-fPIC", "-w"])
        library = ctypes.PyDLL(str(made))
    library.raise_later.argtypes, library.raise_later.restype = [ctypes.py_object], None
    called = (ctypes.c_void_p * len(found)).in_dll(library, "called")
    kinds = ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    capsule = ctypes.PYFUNCTYPE(*kinds)(("PyCapsule_New", ctypes.pythonapi))
    for i, f in enumerate(found):
        work = getattr(ours, f.name)
        callback = ctypes.PYFUNCTYPE(f.result.ctypes, *(a.ctypes for a in f.arguments))(
            _called(f, work, library.raise_later)
        )
        called[i] = ctypes.cast(callback, ctypes.c_void_p)
        at = ctypes.cast(library[f"made_{i}"], ctypes.c_void_p)
        module.__pyx_capi__[f.name] = capsule(at, f.signature, None)
        if hasattr(module, f.name):  # others are for C alone
            setattr(module, f.name, _for_python(getattr(module, f.name), work))
        kept.extend((callback, f.signature))
    kept.append(library)


def _called(f: _Function, work: Callable[..., Any], raise_later: Callable[[BaseException], None]) -> Callable[..., Any]:
    """For C: results as it takes them; what is raised is left to be raised there."""
    wrapped = f.result is _OBJECT

    def call(*arguments: Any) -> Any:
        try:
            result = work(*(arguments[i] for i in f.given))
        except BaseException as error:  # noqa: BLE001  whatever it is
            raise_later(error)
            result = None if wrapped else 0
        return (result,) if wrapped else result

    return call


def _for_python(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """For Python: the real function looks at its arguments."""

    def call(*arguments: Any) -> Any:
        with suppress(RuntimeError):
            theirs(*arguments)
        return ours(*arguments)

    return call
