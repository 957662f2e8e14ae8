"""A tiny model and rows of the right shape in the place of those that a recipe names."""

from datasets import ClassLabel, Dataset, Features, Value

from tiny_runs import reviews, tiny_config
from trimtab import Recipe


def stand_in(recipe: Recipe, num_rows: int, first: int) -> Dataset:
    """Rows with the columns that the recipe names; labels are numbers with names, as on the hub."""
    rows, data = reviews(num_rows, first), recipe.data
    if recipe.task == "chat":
        said = [
            [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}] for row in rows
        ]
        return Dataset.from_dict({data.messages: said})
    texts = [data.text] if isinstance(data.text, str) else data.text
    columns = {name: [row["text"] for row in rows] for name in texts}
    kinds = {name: Value("string") for name in texts}
    if data.label is not None:
        columns[data.label] = [int(row["label"] == "good") for row in rows]
        kinds[data.label] = ClassLabel(names=["neg", "pos"])
    if data.target is not None:
        columns[data.target] = [row["label"] for row in rows]
        kinds[data.target] = Value("string")
    return Dataset.from_dict(columns, features=Features(kinds))


def with_stand_ins(recipe: Recipe, family: str, tiny) -> Recipe:
    values = recipe.model_dump()
    if isinstance(recipe.model, str):
        values["model"] = tiny.folder(family, chat=recipe.task == "chat")
    else:
        assert recipe.model.config["model_type"] == family
        values["model"]["config"] |= tiny_config(family, vocab_size=300)
    values["data"] |= {"train": stand_in(recipe, 24, 0), "eval": stand_in(recipe, 9, 100)}
    values["train"] |= {"epochs": 3.0, "max_steps": 2, "log_every": 1}
    values["train"]["batch_size"] = min(recipe.train.batch_size, 12)
    return Recipe(**values)
