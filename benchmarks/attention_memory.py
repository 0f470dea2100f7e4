"""Memory that entmax_attention holds beyond its inputs and output, forward and backward, in a process of its own.

    python benchmarks/attention_memory.py --out benchmarks/results/attention_memory.json

Peak resident memory is read from the operating system (Linux), which no allocator hides from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from measuring import machine, write

PROBE = """
import resource, sys, torch, selectivit as sv
n, backward = int(sys.argv[1]), sys.argv[2] == "backward"
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 6, n, 64).requires_grad_(backward) for _ in range(3))
small = [torch.randn(1, 6, 64, 64).requires_grad_(backward) for _ in range(3)]
warm = sv.entmax_attention(*small)  # loads what the first call loads
if backward:
    warm.sum().backward()
    for t in (q, k, v):
        t.grad = torch.zeros_like(t)
kept = torch.zeros(1, 6, n, 64), torch.ones(1, 6, n, 64)  # room for the output and its gradient, touched
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = sv.entmax_attention(q, k, v)
if backward:
    out.backward(kept[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 - out.numel() * 4 / 2**20)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for n in (1370, 4097, 9217):
        for what in ("forward", "backward"):
            found = subprocess.run(
                [sys.executable, "-c", PROBE, str(n), what], capture_output=True, text=True, check=True
            )
            mib = float(found.stdout)
            rows.append({"n": n, "pass": what, "mib_beyond_inputs_and_output": round(mib, 1)})
            whole = 6 * n * n * 4 / 2**20
            print(f"N = {n}, {what}: {mib:.0f} MiB (one matrix of scores: {whole:.0f} MiB)", flush=True)
    write(
        args.out, {"question": "memory of entmax attention (1, 6, N, 64) float32", "machine": machine(), "rows": rows}
    )


if __name__ == "__main__":
    main()
