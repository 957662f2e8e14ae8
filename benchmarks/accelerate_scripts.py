"""Run training scripts written for Accelerate with Accelerate and with only their import changed, and compare the bits.

    python benchmarks/accelerate_scripts.py CHECKOUTS [--only glue clm] [--processes 2] [--out results.json]

CHECKOUTS holds checkouts of huggingface/transformers in `transformers` and of huggingface/diffusers in `diffusers`.
Models, data and stand-ins for what would need a network are made here; the scripts themselves are not changed on disk.
Every script runs with accumulation 1 and 2: undisturbed, and once more from a checkpoint in the middle of an epoch.
Losses are recorded in `Accelerator.backward`, weights at the end. All runs are forks of one process, with one thread.

Packages beyond the tests': diffusers, evaluate, nltk, albumentations, torchmetrics, pycocotools, torchvision (a build
for CUDA will do: the two operators that its import misses are declared here).
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "TQDM_DISABLE": "1",
}

import torch

_VISION = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        _VISION.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

WORDS = ["red", "green", "blue", "warm", "cold", "old", "new", "tall", "small", "quick", "slow", "bright", "dark"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NUM_STEPS_SAVED = 2  # a checkpoint after this many optimizer steps is in the middle of an epoch, also on two processes
TIMEOUT_S = 240


@dataclass(frozen=True)
class Script:
    """A script: where it is, its arguments, and whether it is one of diffusers'."""

    path: str
    arguments: list[str] = field(default_factory=list)
    is_diffusers: bool = False
    replaced: tuple[str, ...] = ("", "")  # a second change, if it is what docs/accelerate.md asks for


_T = "transformers/examples/pytorch"
_TEXT = "--model_name_or_path {bert} --per_device_train_batch_size 2 --num_train_epochs 2 --learning_rate 1e-3 --seed 3"
_SEQ = _TEXT.replace("{bert}", "{t5}")
_IMAGE = _TEXT.replace("{bert}", "{vit}")
_LM = "--train_file {lm}/train.txt --validation_file {lm}/test.txt"
_D = (
    "--mixed_precision no --seed 3 --checkpointing_steps {every} --max_train_steps 12 --learning_rate 1e-3 "
    "--report_to tensorboard --train_batch_size 2"
)
_SD = f"--pretrained_model_name_or_path {{sd}} --resolution 16 {_D}"


def _scripts() -> dict[str, Script]:
    def one(path: str, text: str) -> Script:
        return Script(f"{_T}/{path}_no_trainer.py", text.split())

    def two(path: str, text: str, *replaced: str) -> Script:
        return Script(f"diffusers/examples/{path}.py", text.split(), is_diffusers=True, replaced=replaced or ("", ""))

    unconditional = (
        "unconditional_image_generation/train_unconditional",
        "--model_config_name_or_path {unet} --train_data_dir {flat} --resolution 16 --train_batch_size 2 "
        "--num_epochs 2 --mixed_precision no --checkpointing_steps {every} --learning_rate 1e-3 "
        "--logger tensorboard --ddpm_num_steps 10 --ddpm_num_inference_steps 2 "
        "--save_images_epochs 99 --save_model_epochs 99",
    )
    return {
        "glue": one("text-classification/run_glue", f"{_TEXT} --train_file {{csv}} --validation_file {{csv}}"),
        "clm": one("language-modeling/run_clm", f"{_TEXT} {_LM} --block_size 8".replace("{bert}", "{gpt2}")),
        "mlm": one(
            "language-modeling/run_mlm", f"{_TEXT} {_LM} --max_seq_length 32 --line_by_line true --mlm_probability 0.3"
        ),
        "ner": one("token-classification/run_ner", f"{_TEXT} --train_file {{ner}} --validation_file {{ner}}"),
        "swag": one("multiple-choice/run_swag", f"{_TEXT} --train_file {{swag}} --validation_file {{swag}}"),
        "qa": one(
            "question-answering/run_qa",
            f"{_TEXT} --train_file {{qa}} --validation_file {{qa}} --max_seq_length 32 --doc_stride 8",
        ),
        "summarization": one(
            "summarization/run_summarization",
            f"{_SEQ} --train_file {{csv}} --validation_file {{csv}} --text_column text --summary_column summary "
            "--max_target_length 8 --val_max_target_length 8 --num_beams 1",
        ),
        "translation": one(
            "translation/run_translation",
            f"{_SEQ} --train_file {{pairs}} --validation_file {{pairs}} --source_lang en --target_lang de "
            "--max_target_length 8 --val_max_target_length 8 --num_beams 1",
        ),
        "image classification": one(
            "image-classification/run_image_classification",
            f"{_IMAGE} --train_dir {{images}} --train_val_split 0.2 --ignore_mismatched_sizes "
            "--image_column_name image --label_column_name label",
        ),
        "mim": one(
            "image-pretraining/run_mim",
            f"{_IMAGE} --dataset_name {{flat}} --train_val_split 0.2 "
            "--mask_patch_size 4 --image_size 16 --patch_size 4",
        ),
        "segmentation": one(
            "semantic-segmentation/run_semantic_segmentation",
            f"{_IMAGE} --dataset_name {{masks}} --train_val_split 0.2".replace("{vit}", "{segformer}"),
        ),
        "object detection": one(
            "object-detection/run_object_detection",
            f"{_IMAGE} --dataset_name {{objects}} --train_val_split 0.2 --image_square_size 32 "
            "--ignore_mismatched_sizes --dataloader_num_workers 0".replace("{vit}", "{yolos}"),
        ),
        "controlnet": two(
            "controlnet/train_controlnet",
            f"{_SD} --train_data_dir {{control}} --conditioning_image_column conditioning --caption_column text "
            "--controlnet_model_name_or_path {controlnet}",
        ),
        "text to image": two("text_to_image/train_text_to_image", f"{_SD} --train_data_dir {{captions}}"),
        "text to image, LoRA": two("text_to_image/train_text_to_image_lora", f"{_SD} --train_data_dir {{captions}}"),
        "unconditional": two(*unconditional),
        "unconditional, without skipping by hand": two(*unconditional, "step < resume_step", "False"),
    }


# ---------------------------------------------------------------------- models and data


def make_files(folder: Path) -> dict[str, str]:
    """Write all models and data; return the paths by name."""
    torch.manual_seed(0)
    made = {
        name: folder / name
        for name in ("bert", "gpt2", "t5", "vit", "segformer", "sd", "unet", "controlnet", "yolos", "lm")
    }
    _make_text_models(made)
    _make_texts(folder, made)
    _make_vision(folder, made)
    _make_diffusion(made)
    return {name: str(path) for name, path in made.items()}


def _sentence(row: int, num_words: int) -> list[str]:
    return [WORDS[(row * 7 + place * place + 3 * place) % len(WORDS)] for place in range(num_words)]


def _make_text_models(made: dict[str, Path]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
        T5Config,
        T5ForConditionalGeneration,
    )

    special = ["<pad>", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, "?", ".", ":"])}

    def tokenizer(folder: Path, around: bool, **names: str) -> None:
        own = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
        own.pre_tokenizer = pre_tokenizers.Whitespace()
        if around:
            own.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        usual = {"pad_token": "<pad>", "unk_token": "[UNK]", "model_max_length": 64}
        PreTrainedTokenizerFast(tokenizer_object=own, **usual, **names).save_pretrained(folder)

    num = len(vocabulary)
    tokenizer(made["bert"], True, cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    BertForMaskedLM(BertConfig(vocab_size=num, max_position_embeddings=64, **SIZES)).save_pretrained(made["bert"])
    tokenizer(made["gpt2"], False, eos_token="</s>", bos_token="</s>")
    gpt2 = GPT2Config(vocab_size=num, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=5, eos_token_id=5)
    GPT2LMHeadModel(gpt2).save_pretrained(made["gpt2"])
    tokenizer(made["t5"], False, eos_token="</s>")
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(vocab_size=num, **t5)).save_pretrained(made["t5"])


def _make_texts(folder: Path, made: dict[str, Path]) -> None:
    import csv

    made["lm"].mkdir()
    for name, num in (("train", 22), ("test", 6)):
        lines = (" ".join(_sentence(row, 18 + row % 5)) for row in range(num))
        (made["lm"] / f"{name}.txt").write_text("\n".join(lines) + "\n")
    made["csv"] = folder / "rows.csv"
    with made["csv"].open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "summary", "label"])
        for row in range(22):
            rows.writerow([" ".join(_sentence(row, 4 + row % 5)), " ".join(_sentence(row, 3)), ["a", "b"][row % 2]])

    def lines(name: str, rows: list[dict[str, object]]) -> None:
        made[name] = folder / f"{name}.json"
        made[name].write_text("\n".join(json.dumps(row) for row in rows))

    words = [_sentence(row, 4 + row % 5) for row in range(22)]
    lines("ner", [{"tokens": w, "ner_tags": [("O", "B-X")[len(x) % 2] for x in w]} for w in words])
    endings = [{f"ending{n}": w[n] for n in range(4)} for w in words]
    lines("swag", [{"sent1": " ".join(w), "sent2": w[0], **endings[n], "label": n % 4} for n, w in enumerate(words)])
    lines("pairs", [{"translation": {"en": " ".join(w), "de": " ".join(reversed(w))}} for w in words])
    answers = [{"text": [w[1]], "answer_start": [len(w[0]) + 1]} for w in words]
    asked = [{"id": str(n), "question": "new ?", "context": " ".join(w)} for n, w in enumerate(words)]
    made["qa"] = folder / "qa.json"
    made["qa"].write_text(json.dumps({"data": [{**q, "answers": a} for q, a in zip(asked, answers, strict=True)]}))


def _make_vision(folder: Path, made: dict[str, Path]) -> None:
    import numpy
    from datasets import ClassLabel, Dataset, Features, Image, List, Value
    from PIL import Image as Pixels
    from transformers import (
        SegformerConfig,
        SegformerForSemanticSegmentation,
        SegformerImageProcessor,
        ViTConfig,
        ViTForMaskedImageModeling,
        ViTImageProcessor,
        YolosConfig,
        YolosForObjectDetection,
        YolosImageProcessor,
    )

    draw = numpy.random.default_rng(0)
    pictures = [Pixels.fromarray(draw.integers(0, 255, (20, 20, 3), dtype=numpy.uint8)) for _ in range(20)]
    for name in ("images", "flat", "captions", "control"):
        made[name] = folder / name
        made[name].mkdir()
    for number, picture in enumerate(pictures):
        place = made["images"] / "ab"[number % 2]
        place.mkdir(exist_ok=True)
        picture.save(place / f"{number}.png")
        picture.save(made["flat"] / f"{number}.png")
        picture.save(made["captions"] / f"{number}.png")
    captions = [{"file_name": f"{n}.png", "text": " ".join(_sentence(n, 4))} for n in range(20)]
    (made["captions"] / "metadata.jsonl").write_text("\n".join(map(json.dumps, captions)))
    mask = [Pixels.fromarray(draw.integers(0, 3, (20, 20), dtype=numpy.uint8)) for _ in range(20)]
    made["masks"] = folder / "masks"
    made["masks"].mkdir()
    features = Features({"image": Image(), "label": Image()})
    Dataset.from_dict({"image": pictures, "label": mask}, features).to_parquet(made["masks"] / "train.parquet")
    made["objects"] = folder / "objects"
    made["objects"].mkdir()
    boxes = {"id": List(Value("int64")), "area": List(Value("int64")), "bbox": List(List(Value("float32"), 4))}
    kinds = {"image_id": Value("int64"), "image": Image(), "width": Value("int64"), "height": Value("int64")}
    features = Features({**kinds, "objects": {**boxes, "category": List(ClassLabel(names=["a", "b"]))}})
    found = [{"id": [n], "area": [60], "bbox": [[2.0, 3.0, 10.0, 6.0]], "category": [n % 2]} for n in range(20)]
    columns = {
        "image_id": list(range(20)),
        "image": pictures,
        "width": [20] * 20,
        "height": [20] * 20,
        "objects": found,
    }
    for part in ("train", "test"):
        Dataset.from_dict(columns, features).to_parquet(made["objects"] / f"{part}.parquet")
    features = Features({"image": Image(), "conditioning": Image(), "text": Value("string")})
    texts = [row["text"] for row in captions]
    rows = {"image": pictures, "conditioning": pictures, "text": texts}
    Dataset.from_dict(rows, features).to_parquet(made["control"] / "train.parquet")
    vit = ViTConfig(image_size=16, patch_size=4, encoder_stride=4, hidden_dropout_prob=0.1, **SIZES)
    ViTForMaskedImageModeling(vit).save_pretrained(made["vit"])
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(made["vit"])
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16}
    segformer = SegformerConfig(**sizes, num_labels=3, num_attention_heads=[1, 1, 2, 2], sr_ratios=[1, 1, 1, 1])
    SegformerForSemanticSegmentation(segformer).save_pretrained(made["segformer"])
    SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(made["segformer"])
    yolos = YolosConfig(image_size=[32, 32], patch_size=8, num_detection_tokens=4, num_labels=2, **SIZES)
    YolosForObjectDetection(yolos).save_pretrained(made["yolos"])
    YolosImageProcessor().save_pretrained(made["yolos"])
    made["labels"] = folder / "labels.json"
    made["labels"].write_text(json.dumps({"0": "a", "1": "b", "2": "c"}))


def _make_diffusion(made: dict[str, Path]) -> None:
    from diffusers import (
        AutoencoderKL,
        ControlNetModel,
        DDPMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
        UNet2DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    blocks = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    unet = UNet2DConditionModel(
        **blocks,
        sample_size=8,
        attention_head_dim=2,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8)).save_pretrained(made["controlnet"])
    vae = AutoencoderKL(
        **blocks, down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, sample_size=16
    )
    pieces = ["<|startoftext|>", "<|endoftext|>", *sorted({c for word in WORDS for c in word})]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *(f"{p}</w>" for p in pieces[2:])])}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)
    text = CLIPTextConfig(
        vocab_size=len(vocabulary), max_position_embeddings=16, eos_token_id=1, bos_token_id=0, **SIZES
    )
    StableDiffusionPipeline(
        vae, CLIPTextModel(text), tokenizer, unet, DDPMScheduler(), None, None, requires_safety_checker=False
    ).save_pretrained(made["sd"])
    plain = ("DownBlock2D", "DownBlock2D"), ("UpBlock2D", "UpBlock2D")
    UNet2DModel(sample_size=16, down_block_types=plain[0], up_block_types=plain[1], **blocks).save_config(made["unet"])


# ---------------------------------------------------------------------- stand-ins


class _Metric:
    """A stand-in for a metric that `evaluate` would download: the number of values, and 0 for everything else."""

    def __init__(self) -> None:
        self._num = 0

    def add_batch(self, predictions: list[object], references: list[object]) -> None:
        self._num += len(references)

    def compute(self, **values: object) -> dict[str, object]:
        names = ("accuracy", "score", "f1", "overall_precision", "overall_recall", "overall_f1", "overall_accuracy")
        return dict.fromkeys((*names, "exact_match", "mean_iou", "overall_accuracy"), 0.0) | {"num": float(self._num)}


def make_stand_ins(files: dict[str, str]) -> None:
    """Replace what needs a network."""
    import accelerate.utils
    import albumentations
    import datasets
    import evaluate
    import huggingface_hub
    import nltk

    load, compose = datasets.load_dataset, albumentations.Compose
    # albumentations draws from generators of its own, which the scripts do not seed, and no checkpoint has
    albumentations.Compose = lambda *args, **kwargs: compose(*args, **{"seed": 0, **kwargs})
    # newer versions of datasets have no such argument
    datasets.load_dataset = lambda *args, trust_remote_code=None, **kwargs: load(*args, **kwargs)
    evaluate.load = lambda *args, **kwargs: _Metric()
    huggingface_hub.hf_hub_download = lambda *args, **kwargs: files["labels"]
    # Accelerate has removed this name, which scripts still compare
    accelerate.utils.DistributedType._member_map_["TPU"] = accelerate.utils.DistributedType.XLA
    nltk.data.find = lambda name: name
    nltk.sent_tokenize = lambda text: text.split(".")


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Run:
    """One run of a script."""

    name: str
    library: str
    accumulation: int
    num_processes: int
    resumes: bool = False

    @property
    def folder(self) -> str:
        """The folder of its results."""
        kind = "resumed" if self.resumes else "whole"
        return f"{self.name}-{self.library}-{self.accumulation}-{self.num_processes}-{kind}".replace(" ", "-").replace(
            ",", ""
        )


def with_import(source: str, library: str) -> str:
    """Return a script with only its imports of Accelerate changed."""
    if library == "accelerate":
        return source
    source = re.sub(r"^(\s*)from accelerate\b", rf"\1from {library}", source, flags=re.M)
    return re.sub(r"^(\s*)import accelerate$", rf"\1import {library} as accelerate", source, flags=re.M)


def arguments_of(script: Script, run: Run, out: Path, files: dict[str, str]) -> list[str]:
    """Return the script's arguments."""
    given = [part.format(**files, every=NUM_STEPS_SAVED) for part in script.arguments]
    given += ["--output_dir", str(out), "--gradient_accumulation_steps", str(run.accumulation)]
    saved = "checkpoint" if script.is_diffusers else "step"
    name = f"{saved}-{NUM_STEPS_SAVED}" if script.is_diffusers else f"{saved}_{NUM_STEPS_SAVED}"
    if not script.is_diffusers:
        given += ["--checkpointing_steps", str(NUM_STEPS_SAVED)]
    if run.resumes:
        given += ["--resume_from_checkpoint", name if script.is_diffusers else str(out / name)]
    return given


def execute(script: Script, run: Run, root: Path, out: Path, files: dict[str, str]) -> None:
    """Run a script in this process; write its losses and weights."""
    import importlib

    library = importlib.import_module(run.library)
    losses: list[float] = []
    seen: list[object] = []
    backward, prepare = library.Accelerator.backward, library.Accelerator.prepare

    def recorded(self: object, loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        losses.append(loss.item())
        backward(self, loss, *args, **kwargs)

    def noted(self: object, *parts: object, **kwargs: object) -> object:
        seen.append(self)
        return prepare(self, *parts, **kwargs)

    library.Accelerator.backward, library.Accelerator.prepare = recorded, noted
    path = root / script.path
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments_of(script, run, out, files)]
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    models: list[torch.nn.Module] = []
    source = with_import(path.read_text().replace(*script.replaced), run.library)
    exec(compile(source, str(path), "exec"), module.__dict__)
    for engine in {id(one): one for one in seen}.values():
        models += [engine.unwrap_model(model) for model in engine._models]
    weights = {f"{n}.{name}": p.detach() for n, model in enumerate(models) for name, p in model.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, out / f"end-{os.environ.get('RANK', 0)}.pt")


def fork(script: Script, run: Run, root: Path, out: Path, files: dict[str, str], rank: int, port: int) -> int:
    """Start a run in a fork and return its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(TIMEOUT_S)
        log = os.open(out / f"log-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if run.num_processes > 1:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.num_processes, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in world.items()}
            os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "MASTER_ADDR": "127.0.0.1"}
        os.chdir(out)
        torch.manual_seed(0)
        execute(script, run, root, out, files)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def perform(script: Script, run: Run, root: Path, work: Path, files: dict[str, str]) -> Path | None:
    """Run a script on all its processes; return its folder, or None if it failed."""
    import socket

    out = work / run.folder
    out.mkdir()
    if run.resumes:
        saved = f"checkpoint-{NUM_STEPS_SAVED}" if script.is_diffusers else f"step_{NUM_STEPS_SAVED}"
        whole = work / Run(run.name, run.library, run.accumulation, run.num_processes).folder
        if not (whole / saved).is_dir():
            return None
        shutil.copytree(whole / saved, out / saved)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [fork(script, run, root, out, files, rank, port) for rank in range(run.num_processes)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    return None if any(codes) else out


def same(one: Path | None, other: Path | None, last: bool = False) -> str:
    """Compare two ends; with `last`, the losses of `other` are the last ones of `one`."""
    if one is None or other is None:
        return "failed"
    for path in sorted(one.glob("end-*.pt")):
        a, b = torch.load(path), torch.load(other / path.name)
        losses = a["losses"][-len(b["losses"]) :] if last else a["losses"]
        if losses != b["losses"]:
            return "losses differ"
        if a["weights"].keys() != b["weights"].keys():
            return "names differ"
        if not all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"]):
            return "weights differ"
    return "equal"


def compare(name: str, script: Script, root: Path, work: Path, files: dict[str, str], num_processes: int) -> list[dict]:
    """Return a row of results for each accumulation."""
    rows = []
    for accumulation in (1, 2):
        ends = {
            (library, resumes): perform(
                script, Run(name, library, accumulation, num_processes, resumes), root, work, files
            )
            for library in ("accelerate", "trimtab.accelerate")
            for resumes in (False, True)
        }
        ours, theirs = "trimtab.accelerate", "accelerate"
        rows.append(
            {
                "script": name,
                "processes": num_processes,
                "accumulation": accumulation,
                "as with Accelerate": same(ends[theirs, False], ends[ours, False]),
                "resumed, trimtab": same(ends[ours, False], ends[ours, True], last=True),
                "resumed, Accelerate": same(ends[theirs, False], ends[theirs, True], last=True),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    scripts = _scripts()
    work = given.keep or Path(tempfile.mkdtemp())
    shutil.rmtree(work, ignore_errors=True)
    (work / "files").mkdir(parents=True)
    torch.set_num_threads(1)
    files = make_files(work / "files")
    make_stand_ins(files)
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import torchvision  # noqa: F401

    import trimtab.accelerate  # noqa: F401

    rows = []
    for name in given.only or scripts:
        rows += compare(name, scripts[name], given.checkouts.resolve(), work.resolve(), files, given.processes)
    if given.out:
        given.out.write_text("\n".join(map(json.dumps, rows)) + "\n")
    if not given.keep:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
