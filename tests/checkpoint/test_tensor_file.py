"""What is written piece by piece is a safetensors file like any other, and its checksum is that of the file."""

import zlib

import pytest
import safetensors.torch
import torch

from trimtab.checkpoint import tensor_file
from trimtab.checkpoint.tensor_file import ChecksummedFile, LiveTensor, Staging, write_tensors
from trimtab.checksums import checksum_of

DTYPES = sorted(tensor_file._NAMES, key=str)


def written(path, tensors):
    with ChecksummedFile(path) as file:
        write_tensors(file, {name: LiveTensor(tensor, Staging()) for name, tensor in tensors.items()})
    assert file.num_bytes == path.stat().st_size
    assert file.checksum == f"crc32:{zlib.crc32(path.read_bytes()):08x}" == checksum_of(path)
    return safetensors.torch.load_file(path)


def same(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype):
    raw = torch.arange(48, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype)
    tensors = {"flat": tensor, "square": tensor.reshape(2, -1), "none": tensor[:0], "one": tensor[0]}
    back = written(tmp_path / "x", tensors)
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_layouts_names_and_mixed_widths(tmp_path):
    base = torch.randn(4, 6)
    tensors = {
        "transposed": base.t(),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "strided": base[::2, 1::3],
        "bf16": torch.randn(5).bfloat16(),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        'ünï "quoted" \n': torch.randn(2).double(),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    back = written(tmp_path / "x", tensors)
    assert all(same(back[name], tensors[name].detach()) for name in tensors)


def test_the_same_bytes_as_the_library_writes(tmp_path):
    """But for the header's order of keys, which carries no meaning: sizes and data are equal."""
    tensors = {f"t{i}": torch.randn(i + 1) for i in range(5)} | {"b": torch.ones(3, dtype=torch.int8)}
    written(tmp_path / "ours", tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    ours, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    begin = 8 + int.from_bytes(ours[:8], "little")
    assert ours[begin:] == theirs[8 + int.from_bytes(theirs[:8], "little") :]


@pytest.mark.parametrize(
    ("piece", "block", "small", "send"), [(1, 1, 9, 2), (7, 3, 2, 5), (64, 1000, 8, 50), (7, 3, 9, 1)]
)
def test_pieces_of_any_size(tmp_path, monkeypatch, piece, block, small, send):
    """With the checksum on another thread and without, and with any order of write-back."""
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", piece)
    monkeypatch.setattr(tensor_file, "_BLOCK_BYTES", block)
    monkeypatch.setattr(tensor_file, "_SMALL_BYTES", small)
    monkeypatch.setattr(tensor_file, "_SEND_BYTES", send)
    tensors = {"a": torch.randn(11), "b": torch.arange(5, dtype=torch.int8)}
    back = written(tmp_path / "x", tensors)
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_no_tensor_is_copied_as_a_whole(monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1000)
    staging = Staging()
    flat = torch.randn(10, 77)
    pieces = list(LiveTensor(flat, staging).pieces())
    assert [piece.numel() for piece in pieces] == [1000, 1000, 1000, 80]
    assert [piece.data_ptr() - flat.data_ptr() for piece in pieces] == [0, 1000, 2000, 3000], (
        "it was copied unnecessarily"
    )
    for turned in (
        torch.randn(77, 10).t(),
        torch.randn(3, 400, 2).transpose(1, 2),
        torch.randn(1, 2, 600).expand(3, 2, 600),
    ):
        pieces = [(piece.data_ptr(), piece.clone()) for piece in LiveTensor(turned, staging).pieces()]
        assert max(piece.numel() for _, piece in pieces) <= 1000
        assert torch.equal(torch.cat([piece for _, piece in pieces]).view(torch.float32), turned.reshape(-1))
    assert {place for place, _ in pieces[:2]} <= {
        staging._memory.data_ptr(),
        turned.data_ptr(),
        turned.data_ptr() + 1000,
    }


def test_bytes_that_were_not_announced_are_an_error(tmp_path):
    tensor = LiveTensor(torch.ones(3), Staging())
    tensor.shape = (4,)
    with (
        ChecksummedFile(tmp_path / "x") as file,
        pytest.raises(ValueError, match="12 bytes of tensors .* announces 16"),
    ):
        write_tensors(file, {"x": tensor})


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(FileExistsError):
        ChecksummedFile(tmp_path / "x")
