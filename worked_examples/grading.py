"""What homework.py --grade does: call a student's functions in another process, test them, and give points.

What the file prints, breaks or forges stays in its process. Arguments and results travel as JSON (a pickle could run
code in the grader); a gradient is asked for by a second call. The grader computes every verdict itself, so there is
none that a file could forge. What a process of the same user can do nevertheless: see course.md.
"""

import ast
import builtins
import collections
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import homework
import hypothesis
import pytest
import torch

HERE = Path(__file__).resolve().parent
TESTS = [str(HERE.parent / "test_grpo.py"), str(HERE / "tests/test_relatives.py")]
LIMITS = dict(start=60, call=10, function=60)       # seconds: for the import, for a call, for all calls of a function
FORMULA = dict(group_advantages=4, per_token_logps=4, importance_ratio=4, clipped_surrogate_loss=4, kl_estimate=4,
               aggregate=4, grpo_loss=8)                                # points; the other functions 2
LEVELS = ("formula", "beyond", "errors", "in train")
MAIN, FURTHER = homework.main_and_further()
LAST = ("one step of train", "in train")


def encode(x, tensors, functions):
    """Plain data for JSON; tensors and functions are also appended to these lists."""
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return {"tensor": x.tolist(), "shape": list(x.shape), "dtype": str(x.dtype)[6:], "grad": x.requires_grad}
    if isinstance(x, dict):
        return {"dict": [[key, encode(value, tensors, functions)] for key, value in x.items()]}
    if isinstance(x, (list, tuple)):
        return {"list" if isinstance(x, list) else "tuple": [encode(y, tensors, functions) for y in x]}
    if callable(x):
        functions.append(x)
        return {"function": len(functions) - 1}
    return x


def decode(x, on_tensor=lambda tensor: tensor, on_function=None):
    """The inverse: each tensor goes through on_tensor, and a function is on_function(its number)."""
    if not isinstance(x, dict):
        return x
    kind = next(iter(x))
    if kind == "tensor":
        tensor = torch.tensor(x["tensor"], dtype=getattr(torch, x["dtype"])).reshape(x["shape"])
        return on_tensor(tensor.requires_grad_(x["grad"]))
    if kind == "function":
        return on_function(x["function"])
    if kind == "dict":
        return {key: decode(value, on_tensor, on_function) for key, value in x["dict"]}
    values = [decode(y, on_tensor, on_function) for y in x[kind]]
    return values if kind == "list" else tuple(values)


def collector(tensors):
    """For decode: keep each tensor in a list."""
    def on_tensor(tensor):
        tensors.append(tensor)
        return tensor
    return on_tensor


# The student's process ------------------------------------------------------------------------------------------------

def forbid(path):
    """Refuse to read this project's files and to start or end processes: a hurdle, not a sandbox."""
    root, own, realpath = os.path.realpath(HERE.parent) + os.sep, os.path.realpath(path), os.path.realpath
    events = {"os.kill", "os.killpg", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
              "subprocess.Popen", "ctypes.dlopen", "socket.connect"}

    def hook(event, args):
        if event in events:
            raise PermissionError(f"{event} is not allowed while a file is graded")
        if event == "open" and isinstance(args[0], (str, bytes)):
            name = realpath(os.fsdecode(args[0]))
            if name.startswith(root) and name != own and "site-packages" not in name:
                raise PermissionError(f"{os.path.basename(name)} is not to be read while a file is graded")
    sys.addaudithook(hook)


class Model:
    """The policy in the student's process: its passes happen with the grader."""
    device, dtype, training = torch.device("cpu"), torch.float32, False

    def __init__(self, channel, number, inputs):
        self.channel, self.number, self.inputs = channel, number, inputs

    def __call__(self, *args, **options):
        send(self.channel, {"model": self.number, "arguments": encode((args, options), [], [])})
        answer = receive(self.channel)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return types.SimpleNamespace(logits=decode(answer, collector(self.inputs)))

    forward = __call__


def send(channel, message):
    channel.send_bytes(json.dumps(message).encode())


def receive(channel):
    return json.loads(channel.recv_bytes(2**28))


def failure(error, path):
    """What the grader gets instead of a result."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return {"error": type(error).__name__, "text": f"{error}{where}", "bare": not error.args,
            "function": frames[-1].name if frames else ""}


def serve(path, channel):
    """Run a student's file, then answer: calls of its functions, and gradients of what they returned."""
    torch.set_num_threads(1)
    sys.modules.update(grpo=None, relatives=None, homework=None)        # importing them is an error from here on
    forbid(path)
    mine, calls, returned = {"__name__": Path(path).stem, "__file__": path}, {}, []
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), mine)
        parameters = {name: list(inspect.signature(f).parameters.values()) for name, f in mine.items()
                      if isinstance(f, types.FunctionType)}
        send(channel, {name: [[p.name, int(p.kind), p.default is not p.empty] for p in parameters[name]]
                       for name in parameters})
    except BaseException as error:                                      # SystemExit, too
        send(channel, failure(error, path))
    while True:
        request, outputs = receive(channel), []
        try:
            if "gradients" in request:
                kept_inputs, kept_outputs = calls[request["call"]]
                result = torch.autograd.grad(
                    [x for x in kept_outputs if x.requires_grad], [x for x in kept_inputs if x.requires_grad],
                    decode(request["gradients"]), retain_graph=True, allow_unused=True)
            else:
                inputs = []
                function = mine[request["name"]] if "name" in request else returned[request["returned"]]
                args, options = decode(
                    request["arguments"], collector(inputs), lambda number: Model(channel, number, inputs))
                result = function(*args, **options)
                calls[request["call"]] = inputs, outputs
                calls.pop(request["call"] - 500, None)
            send(channel, {"result": encode(result, outputs, returned)})
        except BaseException as error:
            send(channel, failure(error, path))


# The grader's process -------------------------------------------------------------------------------------------------

def logits_of(model, args, options, inputs):
    """A pass of the model, encoded; an error in it is a text."""
    try:
        inputs.append(model(*args, **options).logits)
    except Exception as error:
        return f"the model raises {type(error).__name__}: {error}"
    return encode(inputs[-1], [], [])


class Bridge(torch.autograd.Function):
    """Results that came from the student's process; their gradient is asked for there."""

    @staticmethod
    def forward(ctx, ask, outputs, *inputs):
        ctx.ask, ctx.outputs = ask, [x.requires_grad for x in outputs]
        outputs = [x.detach() for x in outputs]
        ctx.mark_non_differentiable(*[x for x, needs in zip(outputs, ctx.outputs) if not needs])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        answer = iter(ctx.ask([x for x, needs in zip(gradients, ctx.outputs) if needs]))
        return None, None, *[next(answer) if needs else None for needs in ctx.needs_input_grad[2:]]


class Student:
    """A student's file in a process of its own, which starts again if a call has ended it."""

    def __init__(self, path):
        self.path, self.process, self.count = str(Path(path).resolve()), None, 0
        self.broken, self.spent, self.called, self.unwritten = {}, collections.Counter(), [], None
        self.signatures, answer, empty = {}, self.start(), inspect.Parameter.empty
        try:
            if "error" in answer:
                raise RuntimeError(f"{answer['error']}: {answer['text']}")
            for name, parameters in answer.items():
                self.signatures[name] = inspect.Signature([
                    inspect.Parameter(word, inspect._ParameterKind(kind), default=None if optional else empty)
                    for word, kind, optional in parameters])
        except Exception as error:                                      # nothing that comes from there is trusted
            self.broken[None] = f"the file cannot be imported: {error}"

    def start(self):
        self.channel, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-B", __file__, self.path, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            cwd=tempfile.gettempdir(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        theirs.close()
        return self.wait(None, LIMITS["start"])

    def kill(self):
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self):
        self.kill()
        self.process.wait()
        self.process = None

    def wait(self, name, seconds, request=None, models=(), inputs=()):
        """The answer to a request. Until it comes, the student's function may ask for passes of the model."""
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            if request:
                send(self.channel, request)
            while "model" in (answer := dict(receive(self.channel))):
                send(self.channel, logits_of(models[answer["model"]], *decode(answer["arguments"]), inputs))
            return answer
        except (EOFError, ConnectionError):
            code = self.process.wait()
            late = code == -signal.SIGKILL
            reason = f"no answer in {seconds} seconds" if late else f"the process ended, exit code {code}"
        except Exception as error:
            reason = f"the answer cannot be read: {type(error).__name__}: {error}"
        finally:
            timer.cancel()
        self.stop()
        self.broken[name] = reason
        return {"error": "RuntimeError", "text": reason}

    def ask(self, name, request, models=(), inputs=()):
        """Send a request; return the answer or raise the student's error."""
        if self.spent[name] > LIMITS["function"]:
            self.broken[name] = f"its calls took more than {LIMITS['function']} seconds"
        if None in self.broken or name in self.broken:
            raise RuntimeError(self.broken.get(None) or self.broken[name])
        if self.process is None:
            self.start()
        started = time.monotonic()
        answer = self.wait(name, LIMITS["call"], request, models, inputs)
        self.spent[name] += time.monotonic() - started
        if "error" not in answer:
            return answer["result"]
        if answer["error"] == "NotImplementedError" and answer["bare"]:
            self.unwritten = answer["function"]
            raise NotImplementedError
        kind = getattr(builtins, str(answer["error"]), None)
        if kind in (ValueError, AssertionError, TypeError, IndexError, KeyError):
            raise kind(answer["text"])
        raise RuntimeError(f"{answer['error']}: {answer['text']}")

    def call(self, name, which, args, options):
        """Call a function of the file. The result has a gradient, as if it had been computed here."""
        self.count += 1
        count, inputs, models, outputs = self.count, [], [], []
        request = which | {"call": count, "arguments": encode((args, options), inputs, models)}
        result = self.ask(name, request, models, inputs)

        def returned(number):
            return lambda *args, **options: self.call(name, {"returned": number}, args, options)

        def gradients(values):
            return decode(self.ask(name, {"call": count, "gradients": encode(values, [], [])}))

        plain = decode(result, collector(outputs), returned)
        if any(x.requires_grad for x in outputs):
            bridged = iter(Bridge.apply(gradients, outputs, *inputs))
            plain = decode(result, lambda tensor: next(bridged), returned)
        return plain

    def functions(self, fixed):
        """A stand-in for each function. fixed: {function: {argument: value}}, where a test leaves the argument out."""
        def stand_in(name, signature):
            def function(*args, **options):
                self.called.append(name)
                given = list(signature.parameters)[:len(args)]
                more = {option: value for option, value in fixed.get(name, {}).items() if option not in given}
                return self.call(name, {"name": name}, args, more | options)
            function.__name__, function.__signature__ = name, signature
            return function

        return {name: stand_in(name, signature) for name, signature in self.signatures.items()}


# Tests ----------------------------------------------------------------------------------------------------------------

class Results:
    """A plugin of pytest: for each function and level its tests, and why each failed; None: it could not run."""

    def __init__(self, student, reasons):
        self.student, self.reasons, self.tests = student, reasons, {}
        self.names = sorted(reasons, key=len, reverse=True)             # the longest name that fits is meant

    def row(self, item, text=""):
        """The function and the level: named by the test or its parameters, else called last, else named by a skip."""
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else []
        words = [item.name.removeprefix("test_"), *map(str, parameters)]
        named = [name for word in words for name in self.names if word.startswith(name)]
        called = [name for name in reversed(self.student.called) if name in self.names]
        skipped = [name for name in self.names if name in text.split()]
        level = next((level for level in ("errors", "beyond") if item.get_closest_marker(level)), "formula")
        return next(iter(named + called + skipped), None), level

    def pytest_runtest_setup(self, item):
        self.student.called.clear()
        self.student.unwritten = None
        mark = item.get_closest_marker("beyond")
        if mark and mark.kwargs.get("step") == "file":
            pytest.skip("about the text of the file: not graded")
        function, level = self.row(item)
        if function and (self.reasons[function] or any(self.tests.get((function, level), {}).values())):
            self.tests.setdefault((function, level), {})[item.name] = ""
            pytest.skip("the points are lost already")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call":
            why = "" if report.passed else one_line(report, call)
            if report.skipped and self.student.unwritten:
                why = f"{self.student.unwritten} is not written yet"
            function, level = self.row(item, why)
            why = why and self.student.broken.get(function, why)        # what ended the process counts
            if function in FURTHER or self.student.unwritten not in FURTHER:
                tests = self.tests.setdefault((function, level), {})
                tests[item.name] = None if "has no argument" in why else why and f"{item.name}: {why}"
        return report


def one_line(report, call):
    if report.skipped:
        return report.longrepr[2].removeprefix("Skipped: ")
    lines = [line.strip() for line in str(call.excinfo.value).splitlines() if line.strip()]
    ends = [line for line in lines if line.lower().startswith(("expected", "got", "actual message"))]
    return "; ".join(ends or [f"{call.excinfo.typename}: {lines[0]}" if lines else call.excinfo.typename])


def run_tests(student, reasons, fixed):
    """test_grpo.py on a student's functions: {(function, level): {test: reason}}."""
    results = Results(student, reasons)
    hypothesis.settings.register_profile("grading", deadline=None, database=None, derandomize=True)
    hypothesis.settings.load_profile("grading")     # two runs give the same points
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder, "my_grpo.py")
        module.write_text("import grading\nglobals().update(grading.UNDER_TEST)\n")
        os.environ |= {"GRPO_MODULE": str(module), "GRPO_EXAMPLES": os.environ.get("GRPO_EXAMPLES", "20")}
        globals()["UNDER_TEST"] = student.functions(fixed)
        quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-W", "ignore"]
        pytest.main([*TESTS, "-m", "beyond or errors or not beyond", *quiet], [results])
    return results.tests


# In train -------------------------------------------------------------------------------------------------------------

def same(got, want):
    """Whether two results agree, as far as float32 can."""
    if isinstance(want, torch.Tensor):
        return (isinstance(got, torch.Tensor) and got.shape == want.shape
                and torch.allclose(got.double(), want.double(), rtol=1e-3, atol=1e-5, equal_nan=True))
    if isinstance(want, dict):
        return isinstance(got, dict) and all(name in got and same(got[name], want[name]) for name in want)
    if isinstance(want, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float):
        return isinstance(got, (int, float)) and math.isclose(got, want, rel_tol=1e-3, abs_tol=1e-5)
    return got == want


def difference(got, want):
    """Where two results differ, in one line."""
    if isinstance(want, tuple) and isinstance(got, tuple) and len(got) == len(want):
        got, want = next((pair for pair in zip(got, want) if not same(*pair)), (got, want))
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor) and got.shape == want.shape:
        place = (got.double() - want.double()).abs().nan_to_num(math.inf).argmax()
        got, want = got.flatten()[place].item(), want.flatten()[place].item()
    return " ".join(f"expected {want!r:.99}; got {got!r:.99}".split())


def one_step(grpo, **options):
    """The metrics of one step of train, with two updates, on a model that has learned nothing."""
    config = grpo.GRPOConfig(max_steps=1, num_generations=4, generation_batch_size=16, per_device_train_batch_size=8,
                             max_completion_length=8, num_iterations=2, beta=0.1, learning_rate=1e-3, **options)
    policy, tokenizer = grpo.load_model("tiny")

    def length(completions, **columns):             # in which the random answers of a group differ
        return [len(text) % 3 for text in completions]

    rewards = [grpo.accuracy_reward, grpo.think_format_reward, length]
    _, _, metrics = next(grpo.train(policy, tokenizer, grpo.tiny_problems(0)[0], rewards, config))
    return {name: value for name, value in metrics.items() if name != "step_time"}


def in_train(grpo, mine):
    """{function: reason}: what train passes to grpo.py's function is passed to the student's, too."""
    reasons = {}

    def both(name, ours):
        def function(*args, **options):
            want = ours(*args, **options)
            try:
                got = mine[name](*args, **options)
            except Exception as error:
                got = error
            if not same(got, want) and name not in reasons:
                reasons[name] = f"on what train passes: {difference(got, want)}"
            return want
        function.__name__ = name
        return function

    for name in mine:
        if hasattr(grpo, name):
            setattr(grpo, name, both(name, getattr(grpo, name)))
    for options in ({}, dict(policy_loss="cispo"), dict(policy_loss="sapo", importance_sampling_level="sequence")):
        one_step(grpo, **options)
    return reasons


def step_with(grpo, mine, want):
    """Why a step of train with the student's functions differs from grpo.py's, "" if it does not."""
    for name in mine:
        setattr(grpo, name, mine[name])
    try:
        got = one_step(grpo)
    except Exception as error:
        return f"train ends with {type(error).__name__}: {error}"
    wrong = [name for name in want if not same(got.get(name), want[name])]
    return f"{wrong[0]}: expected {want[wrong[0]]}; got {got.get(wrong[0])}" if wrong else ""


# Points ---------------------------------------------------------------------------------------------------------------

def points_of(path, variant):
    """Rows (function, level, points, reason); the points are lost if there is a reason."""
    before, after = ({name: homework.arguments(f) for name, f in homework.ours(v).items()} for v in (0, variant))
    changed = {name: [option for option in after[name] if after[name][option] != before[name][option]]
               for name in after}
    fixed = {name: {option: ast.literal_eval(before[name][option]) for option in changed[name]} for name in after}
    try:
        reasons, theirs = homework.written(path, variant)
    except (SyntaxError, ValueError) as error:
        reasons, theirs = dict.fromkeys(after, f"the file cannot be read: {error}"), {}
    student = Student(path)
    lacks = {name: why for name, why in reasons.items() if why.startswith("has no argument")}
    reasons |= dict.fromkeys(lacks, "")
    if None in student.broken:
        reasons = {name: reasons[name] or student.broken[None] for name in reasons}
    try:
        tests = run_tests(student, reasons, fixed)
        mine = {name: f for name, f in student.functions({}).items() if name in reasons and not reasons[name]}
        mine = {name: f for name, f in mine.items() if name not in lacks}
        found = in_train(homework.load(variant), mine)
        left = [name for name in MAIN if name not in mine]
        last = f"{', '.join(left)} not yet" if left else step_with(
            homework.load(variant), {name: mine[name] for name in MAIN}, one_step(homework.load(variant)))
    finally:
        student.kill()
    rows = []
    for name in MAIN + FURTHER:
        defaults = homework.arguments(theirs[name]) if name in theirs else {}
        wrong = [f"the default of {option} is {after[name][option]} in this variant" for option in changed[name]
                 if defaults.get(option) != after[name][option]]
        formula = ""
        for level in LEVELS:
            whys = list(tests.get((name, level), {}).values())
            failed = list(filter(None, whys)) + ["no test could run"] * (set(whys) == {None})
            points = min(len(whys), 1)
            if level == "formula":
                points, failed = FORMULA.get(name, 2), wrong + failed
            elif level == "in train":
                points, failed = int(name in MAIN), [found[name]] if name in found else []
            if level != "formula":                                      # first the formula, then the whole signature
                failed = [formula or lacks.get(name) or (failed + [""])[0]]
            why = reasons[name] or (failed + [""])[0]
            formula = why if level == "formula" else formula
            rows.append((name, level, points, why))
    return [*rows, (*LAST, 6, last)]


def grade(path, variant, json_file):
    """Print points, and why some are lost; exit code 0 if the main line and all that was tried is right."""
    rows = points_of(path, variant)
    print(f"{'function':30}{''.join(level.rjust(10) for level in LEVELS)}")
    for function in [*MAIN, *FURTHER, LAST[0]]:
        cells = {row[1]: f"{0 if row[3] else row[2]} of {row[2]}" for row in rows if row[0] == function and row[2]}
        print(f"{function:30}{''.join(cells.get(level, '').rjust(10) for level in LEVELS)}")
    lost = {}
    for name, level, points, why in rows:
        if points and why:
            lost.setdefault((name, why), []).append((level, points))
    for (name, why), parts in lost.items():
        print(f"-{sum(points for _, points in parts)} {name}, {', '.join(level for level, _ in parts)}: {why}")
    for title, names in (("the main line", [*MAIN, LAST[0]]), ("further exercises", FURTHER)):
        part = [row for row in rows if row[0] in names]
        print(f"{title}: {sum(row[2] for row in part if not row[3])} of {sum(row[2] for row in part)} points")
    if json_file:
        tests = [{"name": f"{name}, {level}", "score": 0 if why else points, "max_score": points, "output": why}
                 for name, level, points, why in rows if points]
        text = json.dumps({"score": sum(test["score"] for test in tests), "tests": tests}, indent=1)
        Path(json_file).write_text(text, encoding="utf-8")
    return int(any(name not in FURTHER or why != "not written" for name, why in lost))


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2])))
