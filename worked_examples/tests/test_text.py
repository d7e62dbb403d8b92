"""grpo.py's maths as a text: each function can be pasted, and a debugger steps through it."""

import ast
import inspect
import sys
import types

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from test_grpo import expect, grpo, tensors

t = tensors()


def call_grpo_loss():
    return grpo.grpo_loss(t.X, t.R, t.M, old_logps=t.X, ref_logps=t.X, beta=0.1)[0]


@pytest.mark.parametrize("name, most, call", [
    ("group_advantages", 2, lambda: grpo.group_advantages(t.R, 2)), ("grpo_loss", 8, call_grpo_loss),
    ("clipped_surrogate_loss", 2, lambda: grpo.clipped_surrogate_loss(t.X, t.X))])
def test_a_function_can_be_pasted_with_those_that_it_calls(name, most, call, monkeypatch):
    """`import torch` and at most this many functions are a whole file"""
    needed, want = {name} | grpo.called_by(getattr(grpo.module, name)), call()
    sources = [inspect.getsource(getattr(grpo.module, function)) for function in needed]
    pasted = types.ModuleType("pasted")
    exec("\n\n\n".join(["import torch", *sources]), vars(pasted))
    assert len(needed) <= most, sorted(needed)
    monkeypatch.setattr(grpo, "module", pasted)
    expect(call(), want, 0)


def test_a_debugger_comes_from_the_loss_to_the_ratio_in_a_few_steps():
    """At most 30 presses of `s` from the call of grpo_loss to the first line of importance_ratio"""
    stops, loss = [], grpo.module.grpo_loss

    def trace(frame, event, _):
        stops.append(f"{frame.f_code.co_name}: {event}")                # pdb, too, stops at calls, lines and returns
        return trace

    sys.settrace(trace)
    loss(t.X, t.R, t.M, old_logps=t.X, ref_logps=t.X, beta=0.1)
    sys.settrace(None)
    assert stops.index("importance_ratio: line") <= 30, stops


def test_a_breakpoint_at_a_name_stops_in_the_function_and_no_local_is_a_letter_of_pdb():
    """No decorator is in between; no local is called r, n, s, c, l, a, p, q, w, u, d, b or j, pdb's short commands"""
    for function in ast.walk(ast.parse(inspect.getsource(grpo.module))):
        if isinstance(function, ast.FunctionDef):
            nodes = list(ast.walk(function))
            names = {node.arg for node in nodes if isinstance(node, ast.arg)}
            names |= {node.id for node in nodes if isinstance(node, ast.Name)}
            assert not (function.decorator_list or names & set("rnsclapqwudbj")), function.name
