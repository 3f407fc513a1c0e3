"""Errors of the Python interface are short: a mistake is in the user's call, not in the functions below it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fedapp.models import ModelError
from fedapp.own import OwnPartError
from fedapp.server import USER_ERRORS
from strategies import RunError

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class UnknownKeyError(TypeError):
    """A keyword isn't a key of the run config."""


def short_errors(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Raise what a user can mend from here, without the frames below; IPython shows a single line.

    An error of the user's own code, which the line names with its place, stays the cause.
    """

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except (*USER_ERRORS, UnknownKeyError) as error:
            lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            error._render_traceback_ = lambda: lines  # type: ignore[union-attr]  # asked for by IPython
            cause = error.__cause__ if isinstance(error, OwnPartError | ModelError | RunError) else None
            raise error.with_traceback(None) from cause

    return called
