"""The command `trimtab export`: what it prints, and how it fails."""

from tiny_runs import reviews


def test_export_prints_the_check_and_the_table(trimtab, tiny, own_folder):
    (own_folder / "texts.txt").write_text("\n".join(row["text"] for row in reviews(20)))
    done = trimtab("export", tiny.folder("llama"), "out", "--to", "gguf", "--data", "texts.txt", "--rows", 4)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("GGUF in f16: read back, ")
    assert lines[1].split()[:2] == ["model", "disk"]
    assert [line.split()[0] for line in lines[2:4]] == ["original", "gguf"]
    assert lines[4].startswith("out: ")
    assert (own_folder / "out" / "model.gguf").is_file()


def test_without_rows_it_says_how_to_get_the_table(trimtab, tiny):
    done = trimtab("export", tiny.folder("llama"), "out", "--to", "merged")
    assert done.code == 0, done.err
    assert "pass --data FILE" in done.out


def test_a_mistake_is_one_message(trimtab, tiny):
    done = trimtab("export", tiny.folder("llama"), "out", "--to", "coreml")
    assert done.code == 2
    assert done.err.endswith("error: --to coreml is not valid\n  cure: use one of onnx, onnx-int8, gguf, merged\n")
