"""Folds the sequences of a FASTA file with ESMFold, and writes their mean pLDDT: what the eval `protein` asks for with --fold.

    PYTHON external/esmfold.py --fasta=FILE --csv=FILE [--model=facebook/esmfold_v1] [--chunk=64] [--cpu]

    python experiments/evaluate.py ... --evals=protein --fold="PYTHON external/esmfold.py --fasta={fasta} --csv={csv}"

PYTHON is an environment of its own, `pip install torch "transformers>=4.52,<4.60"`; the weights are 8.4 GB. The CSV has the columns id and
plddt, 0 to 100: the mean over all atoms that a residue has, as ESMFold's own program reports it. A sequence that doesn't fit into memory
ends the program; a smaller --chunk wants less.
"""

import argparse
import csv

import torch
from transformers import EsmForProteinFolding


def read(path):
    """Returns {id: sequence}."""
    found = {}
    for block in open(path).read().split(">")[1:]:
        head, *lines = block.splitlines()
        found[head.split()[0]] = "".join(line.strip() for line in lines)
    return found


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--model", default="facebook/esmfold_v1")
    parser.add_argument("--chunk", type=int, default=64, help="of the trunk's axial attention")
    parser.add_argument("--cpu", action="store_true")
    flags = parser.parse_args()
    model = EsmForProteinFolding.from_pretrained(flags.model, low_cpu_mem_usage=False).eval()
    if torch.cuda.is_available() and not flags.cpu:
        model = model.cuda()
        model.esm = model.esm.half()
    else:
        model = model.float()
    model.trunk.set_chunk_size(flags.chunk)
    sequences = read(flags.fasta)
    with open(flags.csv, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "plddt"])
        for name in sorted(sequences, key=lambda name: len(sequences[name])):
            out = model.infer([sequences[name]])
            atoms = out["atom37_atom_exists"]
            rows.writerow([name, f"{100 * float((out['plddt'] * atoms).sum() / atoms.sum()):.3f}"])
            file.flush()


if __name__ == "__main__":
    main()
