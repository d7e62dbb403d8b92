"""grpo.py's maths as a text: each function can be pasted, and a debugger stops in it."""

import ast
import inspect
import types

import pytest
import torch

import grpo

logps = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
advantages = torch.tensor([1.0, -1.0])
mask = torch.ones(2, 2)


def called_by(function):
    """The functions of grpo.py that this one calls, and those that they call."""
    called = set()
    for name in function.__code__.co_names:
        if inspect.isfunction(getattr(grpo, name, None)):
            called |= {name} | called_by(getattr(grpo, name))
    return called


@pytest.mark.parametrize("name, most, arguments, options", [
    ("group_advantages", 2, (advantages, 2), {}),
    ("clipped_surrogate_loss", 2, (logps, logps), {}),
    ("grpo_loss", 8, (logps, advantages, mask), dict(old_logps=logps - 1, ref_logps=logps + 1, beta=0.1))])
def test_a_function_can_be_pasted_with_those_that_it_calls(name, most, arguments, options):
    """`import torch` and at most this many functions are a whole file"""
    needed = {name} | called_by(getattr(grpo, name))
    sources = [inspect.getsource(getattr(grpo, function)) for function in needed]
    pasted = types.ModuleType("pasted")
    exec("\n\n\n".join(["import torch", *sources]), vars(pasted))
    assert len(needed) <= most, sorted(needed)
    assert str(getattr(pasted, name)(*arguments, **options)) == str(getattr(grpo, name)(*arguments, **options))


def test_a_breakpoint_at_a_name_stops_in_the_function_and_no_local_is_a_letter_of_pdb():
    """No decorator is in between; no local is called r, n, s, c, l, a, p, q, w, u, d, b or j, pdb's short commands"""
    for function in ast.walk(ast.parse(inspect.getsource(grpo))):
        if isinstance(function, ast.FunctionDef):
            names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            assert not (function.decorator_list or names & set("rnsclapqwudbj")), function.name
