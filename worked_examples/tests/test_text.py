"""grpo.py's maths as a text: each function can be pasted, and a debugger stops in it."""

import ast
import inspect
import pdb

import torch

import grpo


def called_by(function):
    """The functions of grpo.py that this one calls, and those that they call."""
    called = [getattr(grpo, name, None) for name in function.__code__.co_names]
    return {function}.union(*[called_by(other) for other in called if inspect.isfunction(other)])


def test_the_loss_can_be_pasted_with_those_that_it_calls():
    """`import torch` and at most eight functions are a whole file"""
    needed = called_by(grpo.grpo_loss)
    pasted = {}
    exec("\n\n\n".join(["import torch", *map(inspect.getsource, needed)]), pasted)
    assert len(needed) <= 8, needed
    logps = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    job = logps, torch.tensor([1.0, -1.0]), torch.ones(2, 2)
    options = dict(old_logps=logps - 1, ref_logps=logps + 1, beta=0.1)
    assert pasted["grpo_loss"](*job, **options) == grpo.grpo_loss(*job, **options)


def test_a_breakpoint_at_a_name_stops_in_the_function_and_no_local_is_a_letter_of_pdb():
    """No decorator is in between; no local is called like a one-letter command of pdb, as n or s"""
    commands = {name[-1] for name in dir(pdb.Pdb) if name.startswith("do_") and len(name) == 4}
    for function in ast.walk(ast.parse(inspect.getsource(grpo))):
        if isinstance(function, ast.FunctionDef):
            names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            assert not (function.decorator_list or names & commands), function.name
