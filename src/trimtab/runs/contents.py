"""The contents of a run folder: the names of its files and the purpose of each. The reference lists them."""

CONTENTS = {
    "recipe.yaml": "the resolved recipe, with absolute paths and the origin of every value; it can be trained again",
    "plan.json": "how steps are computed: micro-batch size, precision, techniques, predicted memory and time",
    "metrics.jsonl": "the journal: one line per logged interval or evaluation, flushed when written",
    "report.html": "the run as one page for a browser, written when it ends",
    "report.json": "data of the report that no other file contains: sizes of the data, results on held-out rows",
    "run.json": "state, step, best metric; `trimtab runs` reads it",
    "run.lock": "the process that owns the folder during training",
    "tracking.json": "the run's ID on each MLflow server, and what is already uploaded",
    "tracking.log": "messages of MLflow, until everything is uploaded",
    "checkpoints/step-N/": "the whole state after step N, to resume from",
    "best/": "the best model as a Hugging Face folder (of an adapter, a PEFT folder), with tokenizer and model card",
    "out-of-memory.html": "only if a GPU ran out of memory: a picture of its memory at that moment",
    "bad-rows-step-N.jsonl": "only if a loss was not finite: the rows of that step",
}
