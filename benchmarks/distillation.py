"""Does a teacher help? The same student, cut out of a fine-tuned teacher, trained with and without it, seed by seed.

The teacher is fine-tuned once on labelled rows. Half of its layers are the student. Both kinds of students start from
the same weights and train on the same rows with the same settings; one of them also learns from the teacher. All are
judged on test rows that none has seen; the weights after the last step count.

    python benchmarks/distillation.py --model FOLDER --train TRAIN.jsonl --test TEST.jsonl --out distillation.json
"""

import argparse
import json
import random
import statistics
from pathlib import Path

import torch
from record import machine

from trimtab import Recipe, fit
from trimtab.compress.layer_cut import cut_layers
from trimtab.inference.figures import latency
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load

TRAIN = {"batch_size": 32, "warmup": "6%", "weight_decay": 0.01}


def write_rows(rows, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def train(model, files, work, name, *, epochs, lr, seed=0, max_length=128, distill=None):
    """Train a model, and return the folder of its last weights."""
    result = fit(
        Recipe(
            model=model,
            task="classify",
            data={"train": files["train"], "eval": files["test"], "max_length": max_length},
            train={**TRAIN, "epochs": epochs, "lr": lr},
            checkpoint={"best": False, "every": None},
            distill=distill,
            track="none",
            seed=seed,
            out=str(work / name),
        ),
        progress="quiet",
        fresh=True,
    )
    return result.best


def cut(teacher, folder):
    """Write the student that both kinds start from."""
    loaded = load(teacher)
    cut_layers(loaded.model, "half")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def judge(folder, test):
    loaded = load(folder, device="cpu")
    held_out = read_held_out(loaded, test)
    return {
        "accuracy": quality_of(loaded, held_out)["accuracy"],
        "ms_1": latency(loaded, held_out, 1) * 1e3,
        "ms_32": latency(loaded, held_out, 32) * 1e3,
    }


def summary(report):
    """The means over seeds, and the share of the teacher's accuracy."""
    teacher, lines = report["teacher"], []
    lines.append(f"teacher: accuracy {teacher['accuracy']:.4f}, {teacher['ms_1']:.1f} ms, {teacher['ms_32']:.1f} ms")
    for kind in ("labels", "teacher and labels"):
        runs = [run[kind] for run in report["seeds"] if kind in run]
        if not runs:
            continue
        found = [run["accuracy"] for run in runs]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        speed = [statistics.median(run[key] for run in runs) for key in ("ms_1", "ms_32")]
        lines.append(
            f"student from {kind}: accuracy {statistics.mean(found):.4f} ± {spread:.4f} of {len(found)} seeds, "
            f"{statistics.mean(found) / teacher['accuracy']:.1%} of the teacher's; "
            f"{teacher['ms_1'] / speed[0]:.2f} × its speed with 1 row, {teacher['ms_32'] / speed[1]:.2f} × with 32"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="pretrained model that the teacher is trained from")
    parser.add_argument("--train", type=Path, required=True, help="jsonl with text and label")
    parser.add_argument("--test", type=Path, required=True, help="jsonl with text and label")
    parser.add_argument("--out", type=Path, required=True, help="file for the numbers")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--teacher-epochs", type=float, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--hidden", type=float, default=1.0)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in given.train.read_text(encoding="utf-8").splitlines()]
    test = str(given.test)
    files = {"train": write_rows(random.Random(0).sample(rows, given.rows), given.work / "train.jsonl"), "test": test}
    common = {"lr": given.lr, "max_length": given.max_length}
    teacher = given.work / "teacher" / "best"
    if not teacher.is_dir():
        teacher = train(given.model, files, given.work, "teacher", epochs=given.teacher_epochs, **common)
    start = cut(teacher, given.work / "start")
    terms = {"alpha": given.alpha, "temperature": given.temperature, "hidden": given.hidden}
    report = {
        "machine": machine("cpu", torch.get_num_threads(), ["torch", "transformers"]),
        "settings": {key: str(value) for key, value in vars(given).items()},
        "teacher": judge(teacher, test),
        "start": judge(start, test),
        "seeds": [],
    }
    kinds = {"labels": None, "teacher and labels": {"teacher": str(teacher), **terms}}
    for seed in range(given.seeds):
        report["seeds"].append({"seed": seed})
        for kind, distill in kinds.items():
            found = train(start, files, given.work, "student", epochs=given.epochs, seed=seed, distill=distill, **common)
            report["seeds"][-1][kind] = judge(found, test)
            given.out.write_text(json.dumps(report) + "\n")
            print(seed, kind, report["seeds"][-1][kind], flush=True)
    print(summary(report))


if __name__ == "__main__":
    main()
