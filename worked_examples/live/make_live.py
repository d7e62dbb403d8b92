"""Write live.html: the demo's model after its cold start, in a page that goes on from there by GRPO.

    python worked_examples/live/make_live.py [FILE]         (default: live.html beside this script)

The page holds the weights as base64 of 16-bit integers, in units of 1/8192, the first 100 held-out sums, and the parts
beside this file: style.css, body.html, maths.js (grpo.py's functions), gpt2.js (the transformer), worker.js, page.js.
It asks nobody.
"""

import base64
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import torch

import grpo

POLICY = ("default-src 'none'; script-src 'unsafe-inline' blob:; worker-src blob:; style-src 'unsafe-inline'; "
          "img-src data:")


def cold_start():
    """The policy of `python grpo.py --model tiny` before its first step, and its held-out sums."""
    options, config, _ = grpo.parse_options([])
    policy, *_, held_out = grpo.load_job(options, config)
    return policy, held_out


def page(policy, held_out):
    weights = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    integers = (weights * 2**13).round().numpy().astype("<i2")
    part = {path.name: path.read_text(encoding="utf-8") for path in HERE.iterdir() if path.suffix in (".js", ".css")}
    body = (HERE / "body.html").read_text(encoding="utf-8").rstrip()
    sums = " ".join(row["prompt"] for row in held_out[:100])
    return "\n".join([
        '<!doctype html><html lang="en"><meta charset="utf-8"><link rel="icon" href="data:,"><title>GRPO, live</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<style>\n{part["style.css"]}</style>', body,
        f'<script id="maths">\n{part["maths.js"]}</script>',
        f'<script id="gpt2">\n{part["gpt2.js"]}</script>',
        f'<script type="text/plain" id="worker">\n{part["worker.js"]}</script>',
        f'<script type="text/plain" id="sums">{sums}</script>',
        f'<script type="text/plain" id="weights">{base64.b64encode(integers.tobytes()).decode()}</script>',
        f'<script>\n{part["page.js"]}</script></html>', ""])


def main(argv):
    file = Path(argv[0] if argv else HERE / "live.html")
    html = page(*cold_start())
    file.write_text(html, encoding="utf-8")
    print(f"{file}: {len(html.encode()):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
