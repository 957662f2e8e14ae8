"""The contents of a run folder: the names of its files and the purpose of each. The reference lists them."""

CONTENTS = {
    "recipe.yaml": "the resolved recipe, with absolute paths and the origin of every value; it can be trained again",
    "plan.json": "how the steps are made: micro-batch size, precision, techniques, predicted memory and time",
    "metrics.jsonl": "the journal: one line per logged interval or evaluation, flushed when written",
    "report.html": "the run as one page for a browser, written when it ends",
    "report.json": "what the page shows and no other file has: sizes of the data, outcomes of held-out rows",
    "run.json": "state, step, best metric; `trimtab runs` reads it",
    "run.lock": "the process that the folder belongs to while the run trains",
    "tracking.json": "the run on each MLflow server, and what the server has of it",
    "tracking.log": "MLflow's own messages, until everything is uploaded",
    "checkpoints/step-N/": "the whole state after step N, to resume from",
    "best/": "the best model as a Hugging Face folder (of an adapter, a PEFT folder), with tokenizer and model card",
    "out-of-memory.html": "only if a GPU ran out of memory: the picture of that moment",
    "bad-rows-step-N.jsonl": "only if a loss was not finite: the rows of that step",
}
