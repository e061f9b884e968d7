"""The byte model of ``undivided demo --train``: packing, checkpoints that continue bit for bit, generation from
pages."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import undivided
from undivided.cli.demo.byte_model import END, ByteModel, Size, generate
from undivided.cli.demo.byte_training import Corpus, Recipe, Training, bigram_loss, pack, train

SMALL = Size(features=32, layers=2, heads=4, kv_heads=2, hidden=48, window=8, longest=48)


def _tokens(text: bytes) -> torch.Tensor:
    return torch.tensor([END, *text, END])


@pytest.fixture
def corpus() -> Corpus:
    texts = [b"the %d cats sat on the %d mats. " % (n, n + 1) * (1 + n % 5) for n in range(24)]
    tokens = [_tokens(text) for text in texts]
    return Corpus([t for n, t in enumerate(tokens) if n % 8], tokens[::8])


def test_a_batch_is_full_and_every_piece_is_of_one_document(corpus: Corpus) -> None:
    tokens, offsets = pack(corpus.train, 48, 500, torch.Generator().manual_seed(3))
    assert tokens.numel() == 500 == int(offsets[-1])
    assert int(offsets.diff().min()) >= 2
    assert int(offsets.diff().max()) <= 48
    whole = [bytes(document[1:-1].tolist()) for document in corpus.train]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        piece = bytes(token for token in tokens[start:stop].tolist() if token != END)
        assert any(piece in text for text in whole)


def test_held_out_files_are_not_trained_on() -> None:
    corpus = Corpus.of_library()
    seen = {document.numpy().tobytes() for document in corpus.train}
    assert len(corpus.held_out) > 8
    assert not any(document.numpy().tobytes() in seen for document in corpus.held_out if len(document) > 1000)


def test_a_piece_does_not_see_the_one_before_it(corpus: Corpus) -> None:
    model = ByteModel(SMALL)
    one, two = corpus.train[0][:20], corpus.train[1][:30]
    offsets = torch.tensor([0, 20, 50], dtype=torch.int32)
    with torch.no_grad():
        both = model(torch.cat((one, two)), offsets)
        alone = model(two, torch.tensor([0, 30], dtype=torch.int32))
    torch.testing.assert_close(both[20:], alone, rtol=1e-5, atol=1e-5)


def test_a_few_steps_beat_counting_pairs(corpus: Corpus) -> None:
    run = Training(SMALL, Recipe(steps=60, tokens=256, rate=1e-2, warm_up=5), corpus)
    train(run, None, 10, lambda done, loss: None)
    assert run.done == 60 == len(run.losses)
    assert run.held_out_loss(2) < bigram_loss(corpus)


def test_a_checkpoint_continues_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    recipe, file = Recipe(steps=8, tokens=128, warm_up=2), tmp_path / "run.pt"
    whole = Training(SMALL, recipe, corpus)
    train(whole, None, 1, lambda done, loss: None)

    part = Training(SMALL, recipe, corpus)
    for _ in range(3):
        part.step()
    part.save(file)
    torch.manual_seed(12345)  # nothing outside of the file matters
    resumed = Training.load(file, corpus)
    assert resumed.done == 3
    train(resumed, file, 100, lambda done, loss: None)

    assert resumed.losses == whole.losses
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter, resumed.model.state_dict()[name]), name
    assert Training.load(file, corpus).done == 8  # the end was saved too


def test_a_file_that_is_no_checkpoint_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    for content in (b"", b"not a checkpoint"):
        file = tmp_path / "wrong.pt"
        file.write_bytes(content)
        with pytest.raises(undivided.InputError, match="--checkpoint must be a checkpoint that this training wrote"):
            Training.load(file, corpus)
    torch.save({"done": 1}, tmp_path / "other.pt")
    with pytest.raises(undivided.InputError, match="--checkpoint must be"):
        Training.load(tmp_path / "other.pt", corpus)


class Evil:
    """Unpickling it without restrictions creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code_and_one_of_another_program_is_refused_without_a_warning(
    corpus: Corpus, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """PyTorch warns of the protocol of a plain pickle; the command is to print one line."""
    file, mark = tmp_path / "evil.pt", tmp_path / "mark"
    torch.save({"size": Evil(mark)}, file)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(Evil(mark)))
    for path in (file, plain):
        with pytest.raises(undivided.InputError, match="--checkpoint must be a checkpoint that this training wrote"):
            Training.load(path, corpus)
    assert not mark.exists()
    assert not recwarn.list


def test_generating_from_pages_is_reading_the_whole_text_each_time() -> None:
    """Nearly greedy: with a temperature this low the most probable byte is drawn."""
    torch.manual_seed(0)
    model = ByteModel(SMALL)
    torch.nn.init.normal_(model.embedding.weight, std=1.0)  # scores far apart
    prompts = [b"ab", b"a longer prompt, over a page"]
    texts = generate(model, prompts, 12, temperature=1e-3, seed=0)
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [END, *prompt]
        for _ in range(12):
            with torch.no_grad():
                scores = model(torch.tensor(tokens), torch.tensor([0, len(tokens)], dtype=torch.int32))
            tokens.append(int(scores[-1].argmax()))
            if tokens[-1] == END:
                break
        assert bytes(token for token in tokens if token != END) == text
