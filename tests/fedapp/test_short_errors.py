"""A mistake in a call from Python is one line in a notebook, and a short traceback elsewhere."""

import contextlib
import io
import traceback

import pytest

import fedapp


@pytest.fixture(scope="module")
def notebook():
    """A cell's output, as IPython prints it."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    shell.run_cell("import fedapp")

    def output(cell: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            shell.run_cell(cell)
        return printed.getvalue().strip()

    yield output
    type(shell).clear_instance()


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("fedapp.run(lr=-1)", "ConfigError: lr = -1: must be a number > 0"),
        ("fedapp.run(lrr=1)", "UnknownKeyError: unknown key 'lrr': did you mean 'lr'?"),
        ("fedapp.run(dataset='files')", "KeyConflictError: dataset = 'files' with data-path = '': "),
        ("fedapp.run(dataset=([[1.0]], [0]), num_clients=9)", "DataError: num_clients = 9: "),
        ("fedapp.load('nowhere')", "ConfigError: nowhere: no run is there"),
        ("fedapp.compare('nowhere')", "ConfigError: nowhere"),
        ("fedapp.sweep(lr=[1, -2])", "ConfigError: lr = -2: must be a number > 0"),
    ],
)
def test_a_mistake_in_a_notebook_is_one_line(cell, line, notebook):
    assert notebook(cell).startswith(line)
    assert "\n" not in notebook(cell)


def test_elsewhere_the_traceback_ends_at_the_call():
    with pytest.raises(fedapp.ConfigError) as caught:
        fedapp.run(lr=-1)
    assert caught.value.__cause__ is None
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames] == ["test_elsewhere_the_traceback_ends_at_the_call", "called"]


def broken(input_shape, num_classes):
    """A model with a mistake."""
    return 1 / 0


def test_the_line_names_the_place_in_the_users_own_code_which_stays_the_cause(notebook):
    line = "model = 'tests.fedapp.test_short_errors:broken': ZeroDivisionError: division by zero; test_short"
    call = "fedapp.run(model='tests.fedapp.test_short_errors:broken', num_server_rounds=1, num_clients=2)"
    assert notebook(call).startswith(f"ModelError: {line}_errors.py, line ")
    assert "\n" not in notebook(call)
    with pytest.raises(fedapp.ModelError, match=line) as caught:
        fedapp.run(model=broken, num_server_rounds=1, num_clients=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].name == "broken"


def test_a_class_of_a_notebook_has_its_own_name_in_an_error(notebook):
    notebook("class Narrow:\n    def __init__(self, input_shape, num_classes): raise KeyError('width')")
    call = "fedapp.run(model=Narrow, num_server_rounds=1, num_clients=2)"
    assert notebook(call).startswith("ModelError: model = 'python:Narrow': KeyError: 'width'; ")
