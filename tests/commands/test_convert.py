"""`trimtab convert`: configs of Axolotl become recipes that the schema accepts, and no key is dropped silently."""

import re
from pathlib import Path

import pytest

from tiny_runs import lines_of, reviews, write_jsonl
from trimtab import fit
from trimtab.commands.convert import convert_axolotl
from trimtab.errors import RecipeError
from trimtab.recipe.foreign_keys.axolotl import AXOLOTL
from trimtab.recipe.load import load_recipe
from trimtab.recipe.yaml_text import read_yaml

LORA = """
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
wandb_project: films
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: true
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
loss_watchdog_threshold: 5.0
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens:
  pad_token: <|end_of_text|>
"""
QLORA = """
base_model: meta-llama/Meta-Llama-3-8B
trust_remote_code: true
tokenizer_config: ./tokenizer
load_in_4bit: true
adapter: qlora
datasets:
  - path: json
    data_files: [talks.jsonl]
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {user: [human, user], assistant: [gpt]}
    roles_to_train: [assistant]
test_datasets:
  - path: held-out.jsonl
    type: chat_template
    field_messages: conversations
chat_template: llama3
sequence_len: 4096
sample_packing: false
lora_r: 32
lora_alpha: 16
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
peft_use_rslora: true
loraplus_lr_ratio: 16
micro_batch_size: 1
batch_size: 16
max_steps: 500
optimizer: paged_adamw_32bit
lr_scheduler: rex
learning_rate: 2e-4
bf16: true
gradient_checkpointing: offload
eval_steps: 0.05
save_steps: 100
save_total_limit: 3
early_stopping_patience: 3
mlflow_tracking_uri: http://tracking:5000
mlflow_experiment_name: talks
gpu_memory_limit: 20
deepspeed: zero2.json
unknown_switch: 3
hf_api_token: hf_secret
"""
FULL = """
base_model: meta-llama/Llama-3.2-1B
pretraining_dataset:
  - path: wikitext
    name: wikitext-2-raw-v1
    split: train
    text_column: text
lora_r: 8
micro_batch_size: 2
gradient_accumulation_steps: 8
max_steps: 1000
optimizer: adamw_torch_fused
learning_rate: 1e-5
bfloat16: true
sequence_len: 1024
activation_offloading: true
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
cut_cross_entropy: true
torch_compile: true
seed: 42
"""
OWN_PROMPT = """
base_model: gpt2
datasets:
  - path: questions.csv
    type: {field_instruction: question, field_output: answer, format: "[Q] {instruction} [A]"}
  - path: more.csv
    type: alpaca
micro_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 1e-4
fp16: true
lr_scheduler: constant_with_warmup
val_set_size: 500
xformers_attention: true
"""
FILES = {"lora": LORA, "qlora": QLORA, "full": FULL, "own-prompt": OWN_PROMPT}


@pytest.fixture
def convert(tmp_path):
    def converted(text: str):
        path = tmp_path / "axolotl.yml"
        path.write_text(text)
        found = convert_axolotl(path)
        (tmp_path / "recipe.yaml").write_text(found.render(path.name))
        return found, load_recipe(tmp_path / "recipe.yaml", {}, ()).recipe

    return converted


@pytest.mark.parametrize("name", FILES)
def test_the_recipe_is_valid_and_names_every_key(convert, tmp_path, name):
    found, recipe = convert(FILES[name])
    assert recipe == found.recipe(), "what is written is what was validated"
    text = (tmp_path / "recipe.yaml").read_text()
    for key in read_yaml(FILES[name], name).values:
        assert re.search(rf"\b{key}\b", text), f"{key} is dropped"


def test_lora(convert):
    found, recipe = convert(LORA)
    assert (recipe.model, recipe.task, recipe.data.train) == (
        "NousResearch/Llama-3.2-1B",
        "chat",
        "teknium/GPT4-LLM-Cleaned",
    )
    assert (recipe.data.answer, recipe.data.prompt, recipe.data.eval_share) == ("output", None, 0.1)
    assert (recipe.train.batch_size, recipe.memory.micro_batch) == (8, 4)
    assert (recipe.train.lr, recipe.train.warmup, recipe.train.schedule) == (2e-4, 0.1, "cosine")
    assert (recipe.train.optimizer, recipe.train.precision) == ("adamw8bit", "auto")
    adapter = recipe.adapter
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.targets) == ("lora", 16, 32, ["q_proj", "v_proj"])
    assert (recipe.memory.padding, recipe.memory.gradient_checkpointing) == ("none", "all")
    assert (recipe.evaluate.every, recipe.checkpoint.every) == ("0.25 epochs", "epoch")
    assert [name for name, _, _ in found.lost] == ["wandb_project", "loss_watchdog_threshold"]
    assert found.empty == ["lora_model_dir"]
    assert "packed sequences" in found.notes["train.batch_size"]


def test_qlora(convert, tmp_path):
    found, recipe = convert(QLORA)
    assert recipe.model.name == "meta-llama/Meta-Llama-3-8B"
    assert (recipe.model.tokenizer, recipe.model.trust_remote_code) == ("./tokenizer", True)
    data = recipe.data
    assert (recipe.task, data.train, data.eval, data.messages) == (
        *("chat", "talks.jsonl", "held-out.jsonl", "conversations"),
    )
    assert (recipe.adapter.kind, recipe.adapter.targets, recipe.adapter.rslora) == ("qlora", "all-linear", True)
    assert (recipe.adapter.trains, recipe.adapter.lr_ratio) == (["embed_tokens", "lm_head"], 16)
    assert (recipe.train.batch_size, recipe.memory.micro_batch, recipe.train.max_steps) == (16, 1, 500)
    assert (recipe.train.optimizer, recipe.train.precision) == ("paged-adamw8bit", "bf16")
    assert (recipe.memory.offload_activations, recipe.memory.budget) == ("all", "20GiB")
    assert (recipe.checkpoint.every, recipe.checkpoint.keep, recipe.early_stopping.patience) == ("100 steps", 3, 3)
    assert (recipe.track.uri, recipe.track.experiment) == ("http://tracking:5000", "talks")
    lost = {name: reason for name, _, reason in found.lost}
    assert set(lost) == {"chat_template", "lr_scheduler", "deepspeed", "unknown_switch", "hf_api_token"}
    assert "allowed: linear | cosine" in lost["lr_scheduler"]
    assert "hf_secret" not in (tmp_path / "recipe.yaml").read_text()


def test_text_and_all_weights(convert):
    found, recipe = convert(FULL)
    assert (recipe.task, recipe.data.train, recipe.data.text) == (
        "causal-lm",
        "wikitext/wikitext-2-raw-v1:train",
        "text",
    )
    assert (recipe.adapter, recipe.train.precision, recipe.train.batch_size) == ("none", "bf16-pure", 16)
    assert (recipe.memory.kernels, recipe.memory.loss, recipe.train.compile) == ("liger", "chunked", "blocks")
    assert (recipe.memory.offload_activations, recipe.seed) == ("all", 42)
    assert (recipe.train.schedule, recipe.data.eval_share) == ("cosine", 0), "Axolotl's defaults"
    assert dict(found.omitted)["lora_r"].startswith("the file has no adapter")
    assert found.lost == []


def test_a_prompt_of_its_own(convert):
    found, recipe = convert(OWN_PROMPT)
    assert (recipe.task, recipe.data.prompt, recipe.data.answer) == ("chat", "question", "answer")
    assert (recipe.train.precision, recipe.train.schedule) == ("fp16", "constant")
    assert (recipe.train.epochs, recipe.data.max_length, recipe.train.warmup) == (1, 512, 0.03), "Axolotl's defaults"
    assert recipe.memory.attention_backend == "efficient"
    assert {name for name, _, _ in found.lost} == {"datasets.1", "val_set_size"}
    assert "format" in found.notes["task"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is a list, not a mapping"),
        ("a: b: c", "not valid YAML"),
        ("base_model: gpt2", "is not an Axolotl config"),
        ("model: gpt2\ndata: {train: a.csv}", "is already a recipe"),
        ("base_model: a\nseed: 1\nseed: 2\ndatasets: [{path: a.csv}]", "seed is given twice"),
        ("base_model: a\nrl: dpo\ndatasets: [{path: a.csv}]", "rl: 'dpo' requests preference"),
        ("base_model: a\ndatasets: [{path: 's3://b/c.jsonl', type: completion}]", "no data source"),
    ],
)
def test_bad_input_is_one_message(convert, text, message):
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        convert(text)
    assert caught.value.cure


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- base_model: a", "is a list"),
        ("base_model", "is a single value"),
        ("", "is empty"),
        ("{}", "not an Axolotl config"),
    ],
)
def test_what_is_no_mapping_is_told_what_a_config_has(tmp_path, text, problem):
    path = tmp_path / "axolotl.yml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"(?s){problem}.*base_model, and datasets or pretraining_dataset") as caught:
        convert_axolotl(path)
    assert "a recipe needs" not in str(caught.value)
    assert "found ;" not in caught.value.cure


def test_what_contradicts_is_listed(convert):
    text = "base_model: a\ndatasets: [{path: a.csv, type: completion}]\nmax_steps: 5\nnum_epochs: 2\n"
    found, recipe = convert(text + "bfloat16: true\noptimizer: adafactor\n")
    assert recipe.train.max_steps == 5
    assert dict(found.omitted)["num_epochs"] == "max_steps decides"
    (name, value, reason), *others = found.lost
    assert (name, value, others) == ("bfloat16", "train.precision: bf16-pure", [])
    assert "adafactor" in reason
    assert recipe.train.precision == "auto"


def test_a_wrong_value_is_listed(convert):
    found, _ = convert("base_model: a\ndatasets: [{path: a.csv, type: completion}]\nadapter: 3\nlearning_rate: many")
    assert [name for name, _, _ in found.lost] == ["adapter", "learning_rate"]


def test_keys_of_published_configs_are_known():
    names = (
        "base_model model_type tokenizer_type load_in_8bit load_in_4bit strict dataset_prepared_path val_set_size "
        "output_dir adapter lora_model_dir sequence_len sample_packing eval_sample_packing pad_to_sequence_len "
        "lora_r lora_alpha lora_dropout lora_target_linear lora_fan_in_fan_out lora_target_modules "
        "lora_modules_to_save wandb_project wandb_entity wandb_watch wandb_name wandb_log_model "
        "gradient_accumulation_steps micro_batch_size num_epochs optimizer lr_scheduler learning_rate "
        "train_on_inputs group_by_length bf16 fp16 tf32 gradient_checkpointing gradient_checkpointing_kwargs "
        "early_stopping_patience resume_from_checkpoint local_rank logging_steps xformers_attention "
        "flash_attention s2_attention warmup_steps warmup_ratio evals_per_epoch eval_table_size "
        "eval_max_new_tokens saves_per_epoch debug deepspeed weight_decay fsdp fsdp_config special_tokens "
        "loss_watchdog_threshold loss_watchdog_patience chat_template max_steps eval_steps save_steps adam_beta2 "
        "adam_epsilon max_grad_norm sdp_attention plugins liger_rope liger_rms_norm liger_glu_activation "
        "liger_fused_linear_cross_entropy cut_cross_entropy unfrozen_parameters neftune_noise_alpha hub_model_id"
    )
    assert [name for name in re.findall(r"\w+", names) if name not in AXOLOTL] == []


@pytest.mark.parametrize(
    "more",
    [
        "roles: {user: 5, 7: [a]}",
        "roles: {user: [[a]]}",
        "message_property_mappings: {role: [a]}",
        "message_field_role: {a: {}}",
        '"a\\nb: 2": 3',
        "1: 2",
    ],
)
def test_values_and_keys_of_odd_types(tmp_path, more):
    path = tmp_path / "axolotl.yml"
    path.write_text(f"base_model: m\ndatasets:\n  - path: a.jsonl\n    type: chat_template\n    {more}\n")
    text = convert_axolotl(path).render(path.name)
    (tmp_path / "recipe.yaml").write_text(text)
    assert load_recipe(tmp_path / "recipe.yaml", {}, ()).recipe.model == "m"


def test_rows_that_a_recipe_would_not_read_are_listed(tmp_path):
    path = tmp_path / "axolotl.yml"
    path.write_text(
        "base_model: m\n"
        "datasets: [{path: json, data_files: [a.jsonl, b.jsonl, c.jsonl], split: 'train[:10%]', type: chat_template}]\n"
        "test_datasets: [{path: ./d.jsonl, split: train}]\n"
    )
    found = convert_axolotl(path)
    assert (found.settings["data.train"], found.settings["data.eval"]) == ("a.jsonl", "./d.jsonl")
    lost = {name: value for name, value, _ in found.lost}
    assert "b.jsonl" in lost["datasets.0.data_files"]
    assert "train[:10%]" in lost["datasets.0.split"]
    assert "test_datasets.0.split" not in lost


def test_files_that_are_no_list(tmp_path):
    path = tmp_path / "axolotl.yml"
    path.write_text("base_model: m\ndatasets: [{path: a.jsonl, data_files: true}]\n")
    with pytest.raises(RecipeError, match="no data source") as failure:
        convert_axolotl(path)
    assert "download True of a.jsonl" in failure.value.cure


def test_secrets_inside_of_values_are_not_written(tmp_path):
    path = tmp_path / "axolotl.yml"
    path.write_text(
        "base_model: m\ndatasets: [{path: a.jsonl, type: chat_template}]\n"
        "vllm: {host: here, api_key: hf_xyz, more: [{token: hf_xyz}]}\n"
    )
    text = convert_axolotl(path).render(path.name)
    assert "host: here" in text
    assert "hf_xyz" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_a_converted_file_trains(tiny):
    rows = [
        {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}]}
        for row in reviews(24)
    ]
    write_jsonl(Path("talks.jsonl"), rows)
    Path("axolotl.yml").write_text(
        f"base_model: {tiny.folder('llama', chat=True)}\n"
        "datasets:\n  - path: talks.jsonl\n    type: chat_template\n"
        "val_set_size: 0.2\nsequence_len: 64\nsample_packing: true\nadapter: lora\nlora_r: 4\nlora_alpha: 8\n"
        "lora_target_linear: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\nmax_steps: 3\n"
        "optimizer: adamw_torch\nlr_scheduler: linear\nlearning_rate: 1e-3\nbf16: false\nlogging_steps: 1\n"
        "output_dir: outputs/lora\n"
    )
    Path("recipe.yaml").write_text(convert_axolotl(Path("axolotl.yml")).render("axolotl.yml"))
    result = fit(load_recipe(Path("recipe.yaml"), {}, ()).recipe, progress="quiet", device="cpu")
    assert (result.fit.step, result.plan.precision) == (3, "fp32")
    assert len([line for line in lines_of(result.folder) if "loss" in line]) == 3
    assert (Path("outputs/lora/best/adapter_config.json")).is_file()
