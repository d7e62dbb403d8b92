"""grpo.py's maths as a text: each function can be pasted, and a debugger steps through it."""

import ast
import inspect
import sys
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


def test_a_debugger_comes_from_the_loss_to_the_ratio_in_a_few_steps():
    """At most 30 presses of `s` from the call of grpo_loss to the first line of importance_ratio"""
    stops = []

    def trace(frame, event, _):
        stops.append(f"{frame.f_code.co_name}: {event}")                # pdb, too, stops at calls, lines and returns
        return trace

    sys.settrace(trace)
    grpo.grpo_loss(logps, advantages, mask, old_logps=logps, ref_logps=logps, beta=0.1)
    sys.settrace(None)
    assert stops.index("importance_ratio: line") <= 30, stops


def test_a_breakpoint_at_a_name_stops_in_the_function_and_no_local_is_a_letter_of_pdb():
    """No decorator is in between; no local is called r, n, s, c, l, a, p, q, w, u, d, b or j, pdb's short commands"""
    for function in ast.walk(ast.parse(inspect.getsource(grpo))):
        if isinstance(function, ast.FunctionDef):
            names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            assert not (function.decorator_list or names & set("rnsclapqwudbj")), function.name
