"""Hugging Face: the model as transformers calls it, and the tools built on that, offline."""

import copy
import json
import math
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_text import TINY, write_text

from fused_recoder.analysis.compare import ModelRuns, read_runs
from fused_recoder.training import Config, Corpus, Trainer, Vocabulary, load_model

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
from fused_recoder import hf  # noqa: E402

SENTENCES = ["w1 w3 w8 w17", "w2 w5", "w4 w9 w19"]
RUNS = {
    "plain": {"signal": None},
    "nll": {"step": 0.5, "dtype": "float64"},
    "surprisal": {"signal": "surprisal", "step": "learned", "tie_weights": True},
    "entropy": {"signal": "entropy", "step": 0.5, "states": "h"},
    "backtracking": {"step": "backtracking", "states": "c"},
    "ensemble": {"signal": "ensemble", "decoder_options": {"num_members": 2}},
    "pieces": {"tokenizer": "bpe", "max_vocab": 262, "step": 0.5},
    "characters": {"tokenizer": "char", "signal": "entropy", "step": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def _own_caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_RECODER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), train=60)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The folder of a run by name, trained when it is first asked for."""
    folder, done = tmp_path_factory.mktemp("runs"), set()

    def run(name):
        if name not in done:
            settings = TINY | {"epochs": 1, "lr": 5.0, "log_every": 100} | RUNS[name]
            trainer = Trainer(Config(**settings), text, folder / name, test=False)
            with torch.no_grad():  # opinions, so that recoding matters
                trainer.model.decoder.weight.mul_(20)
            trainer.train()
            done.add(name)
        return folder / name

    return run


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """A model and its tokenizer, as a folder that transformers has written."""
    folder = tmp_path_factory.mktemp("saved")

    def save(name):
        if not (folder / name).exists():
            hf.RecodingForCausalLM.from_run(trained(name)).save_pretrained(folder / name)
            hf.tokenizer_from_run(trained(name)).save_pretrained(folder / name)
        return folder / name

    return save


def surprisals(run):
    """Of every word, in bits, as `analyze` writes them."""
    numbers = read_runs(ModelRuns("ours", (run,)), SENTENCES)
    return [sentence.mean("surprisal").tolist() for sentence in numbers]


def by_word(scores, sentence, vocabulary):
    """Sums over the tokens of a word."""
    ids = vocabulary.encode(sentence.split())
    word = vocabulary.begins_word[ids].cumsum() - 1
    return np.bincount(word, weights=scores[: len(ids)]).tolist()


def small(**settings):
    torch.manual_seed(1)
    config = {"vocab_size": 12, "hidden_size": 6, "num_layers": 1, "step": 0.7, "pad_token_id": 11}
    model = hf.RecodingForCausalLM(hf.RecodingConfig(**config | settings)).double().eval()
    with torch.no_grad():
        model.lm.decoder.weight.mul_(20)
    return model


# The model


@pytest.mark.parametrize("name", RUNS)
def test_a_run_survives_transformers(trained, saved, name):
    ours = hf.RecodingForCausalLM.from_run(trained(name))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved(name))
    assert isinstance(theirs, hf.RecodingForCausalLM)
    assert not theirs.training
    assert theirs.dtype == ours.dtype
    tied = RUNS[name].get("tie_weights", False)
    assert (theirs.lm.decoder.weight is theirs.lm.encoder.weight) == tied
    ids = torch.randint(theirs.config.vocab_size - 1, (3, 9))
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits)
    own = load_model(trained(name)).model.eval()
    gold = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1).t()
    own_targets = gold if own.rnn.signal is not None and own.rnn.signal.needs_targets else None
    want = own(ids.t(), own_targets, logits=True).logits.transpose(0, 1)
    torch.testing.assert_close(ours(ids).logits[..., :-1], want)
    anew = transformers.AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float64)
    assert {t.dtype for t in (*anew.lm.parameters(), *anew.lm.buffers())} == {torch.float64}
    if name == "backtracking":
        assert anew.lm.rnn.step.value.tolist() == own.rnn.step.value.tolist()


def test_what_a_file_does_not_have_starts_anew(saved):
    """A learned step on a model that had none."""
    model = hf.RecodingForCausalLM.from_pretrained(saved("plain"), signal="nll", step="learned")
    torch.testing.assert_close(model.lm.rnn.step(), torch.full((2, 2), 0.1))


@pytest.mark.parametrize("signal", [None, "nll", "surprisal", "entropy"])
def test_gold_tokens_are_the_inputs_that_follow(signal):
    model = small(signal=signal)
    ids = torch.randint(11, (2, 7))
    logits = model(ids).logits
    for t in range(1, 7):  # whatever comes later
        other = ids.clone()
        other[:, t:] = (other[:, t:] + 1) % 11
        torch.testing.assert_close(model(other).logits[:, :t], logits[:, :t])
        if signal in ("nll", "surprisal"):  # and h' at t - 1 depends on the token at t
            assert not torch.allclose(model(other).logits[:, t], logits[:, t])
    reader = model.lm.reader(2)
    for t in range(7):
        torch.testing.assert_close(reader.feed(ids[:, t]), logits[:, t, :-1].log_softmax(-1))


@pytest.mark.parametrize("signal", [None, "nll", "entropy"])
def test_padding_is_on_the_right_and_not_read(signal):
    model = small(signal=signal)
    rows = [torch.randint(11, (n,)) for n in (3, 7, 5)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=11)
    mask = ids != 11
    other = ids.masked_fill(~mask, 4)  # what is in the padding does not matter
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask.long()},
                  {"input_ids": other, "attention_mask": mask}):  # fmt: skip
        logits = model(**given).logits
        for row, whole in zip(rows, logits, strict=True):
            torch.testing.assert_close(whole[: len(row)], model(row.unsqueeze(0)).logits[0])
    assert (model(ids).logits[..., 11] < -1e300).all()  # padding is never predicted


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2, 3]], [[0, 1, 1]], "padding must be on the right.*padding_side = 'right'"),
        ([[1, 2, 3]], [[1, 0, 1]], "padding must be on the right"),
        ([[11, 2, 3]], None, "padding must be on the right"),
        ([[1, 11, 11]], [[1, 1, 0]], "padding tokens where attention_mask is not 0"),
        ([[1, 2, 3]], [[0, 0, 0]], "lengths must be between 1 and T = 3, got 0"),
        ([[1, 2, 3]], [[1, 1]], r"attention_mask must have shape \(1, 3\)"),
    ],
)
def test_other_padding_is_refused(ids, mask, message):
    with pytest.raises(ValueError, match=message):
        small()(torch.tensor(ids), None if mask is None else torch.tensor(mask))


@pytest.mark.parametrize("settings", [{}, {"signal": None}, {"gradient": "exact"}])
def test_the_loss_is_the_usual_one(settings):
    model = small(**settings)
    ids = torch.randint(11, (3, 6))
    ids[1, 4:] = 11
    labels = ids.clone()
    labels[0, :3] = -100
    counted = labels[:, 1:].masked_fill(labels[:, 1:] == 11, -100)
    out = model(ids, labels=labels)
    want = F.cross_entropy(out.logits[:, :-1].reshape(-1, 12), counted.reshape(-1))
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-6)
    (logits,) = model(ids, return_dict=False)
    loss, again = model(ids, labels=labels, return_dict=False)
    assert torch.equal(logits, again)
    assert loss == out.loss
    total = model(ids, labels=labels, num_items_in_batch=2).loss
    assert total.item() == pytest.approx(want.item() * (counted != -100).sum().item() / 2, rel=1e-6)
    out.loss.backward()
    ours = [p.grad.clone() for p in model.lm.parameters()]
    model.zero_grad()
    gold = model.lm(ids.masked_fill(ids == 11, 0), counted_targets(ids), lengths=(ids != 11).sum(1),
                    logits=True).logits  # fmt: skip
    F.cross_entropy(gold[:, :-1].reshape(-1, 11), counted.reshape(-1)).backward()
    for grad, parameter in zip(ours, model.lm.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)


def counted_targets(ids):
    return F.pad(ids.masked_fill(ids == 11, -100)[:, 1:], (0, 1), value=-100)


def test_logits_may_be_written_into():
    for settings in ({}, {"signal": "entropy"}, {"signal": None, "pad_token_id": None}):
        model = small(**settings)
        ids = torch.randint(11, (2, 5))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            first = model(ids).logits
            kept = first.clone()
            first.fill_(math.nan)
            assert torch.equal(model(ids).logits, kept)
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert first.is_contiguous()


def test_training_mode_drops_and_learns():
    model = small(dropout=0.5, step="learned")
    ids = torch.randint(11, (4, 8))
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(ids, labels=ids).loss < small(dropout=0.5)(ids, labels=ids).loss


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pad_token_id must be the last token, 11, or None, got 3"):
        small(pad_token_id=3)
    with pytest.raises(NotImplementedError, match="the vocabulary is that of the text"):
        small().resize_token_embeddings(40)
    torch.save(small(signal=None).lm.state_dict(), tmp_path / "plain.pt")
    for convert in (hf.RecodingForCausalLM.from_run, hf.tokenizer_from_run):
        with pytest.raises(ValueError, match=r"plain\.pt has no vocabulary"):
            convert(tmp_path / "plain.pt")


def test_a_copy_is_whole():
    model = small()
    ids = torch.randint(11, (2, 5))
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


# The tokenizer


@pytest.mark.parametrize("name", ["nll", "pieces", "characters"])
def test_the_tokenizer_has_the_ids_of_the_corpus(text, trained, saved, name):
    theirs = transformers.AutoTokenizer.from_pretrained(saved(name))
    vocabulary = load_model(trained(name)).vocabulary
    for line in (text / "test.txt").read_text().splitlines():
        assert theirs(line).input_ids == vocabulary.encode(line.split())
        assert theirs.decode(theirs(f"  {line} ").input_ids).strip() == line
    ids = Corpus(text, vocabulary=vocabulary)["test"][1:].tolist()
    lines = (text / "test.txt").read_text().splitlines()
    assert theirs("".join(f"{line}<eos>" for line in lines)).input_ids == ids
    assert (theirs.bos_token, theirs.eos_token_id) == ("<eos>", vocabulary.eos)
    assert theirs.pad_token_id == len(vocabulary) == len(theirs) - 1
    batch = theirs(["w1 w2", "w3"], padding=True)
    assert batch["attention_mask"][1][-1] == 0
    assert set(batch) == {"input_ids", "attention_mask"}


def test_unknown_words_and_a_word_for_padding():
    made = hf.make_tokenizer(Vocabulary(["<eos>", "the", "<unk>", "<pad>"]))
    assert made("the zebra <pad>").input_ids == [1, 2, 3]
    assert (made.pad_token, made.pad_token_id) == ("<<pad>>", 4)


# Tools


@pytest.mark.parametrize("name", RUNS)
def test_minicons_has_the_numbers_of_analyze(trained, name):
    scorer = pytest.importorskip("minicons.scorer", reason="needs the package minicons")
    tokenizer, vocabulary = (
        hf.tokenizer_from_run(trained(name)),
        load_model(trained(name)).vocabulary,
    )
    ours = hf.RecodingForCausalLM.from_run(trained(name))
    theirs = scorer.IncrementalLMScorer(ours, "cpu", tokenizer=tokenizer)
    scores = theirs.token_score(SENTENCES, bos_token=True, surprisal=True, base_two=True)
    for sentence, found, want in zip(SENTENCES, scores, surprisals(trained(name)), strict=True):
        assert found[0] == ("<eos>", 0.0)
        bits = [score for _, score in found[1:]]
        assert by_word(bits, sentence, vocabulary) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name", ["plain", "nll", "entropy", "pieces"])
def test_surprisal_has_the_numbers_of_analyze(trained, saved, name):
    surprisal = pytest.importorskip("surprisal", reason="needs the package surprisal")
    model = surprisal.AutoHuggingFaceModel.from_pretrained(str(saved(name)), model_class="causal")
    model.tokenizer.pad_token = "<pad>"  # it takes <eos>, and out of every prediction
    found, vocabulary = model.surprise(SENTENCES), load_model(trained(name)).vocabulary
    for sentence, have, want in zip(SENTENCES, found, surprisals(trained(name)), strict=True):
        bits = (have.surprisals / math.log(2)).tolist()
        assert by_word(bits, sentence, vocabulary) == pytest.approx(want, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_runs_minimal_pairs(trained, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the package lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager, get_task_dict

    pairs = [("w1 w3 w8", "w1 w9 w8"), ("w4", "w4 w4"), ("w2 w19 w1 w1", "w2 w5")]
    rows = [json.dumps({"good": good, "bad": bad}) for good, bad in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    task = {
        "task": "pairs", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "pairs.jsonl")}, "cache_dir": str(tmp_path),
        },
        "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0,
        "doc_to_choice": "{{[good, bad]}}", "target_delimiter": "", "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    model = HFLM(
        pretrained=hf.RecodingForCausalLM.from_run(trained("nll")),
        tokenizer=hf.tokenizer_from_run(trained("nll")), batch_size=4, device="cpu",
    )  # fmt: skip
    tasks = get_task_dict([task], TaskManager(include_defaults=False))
    found = lm_eval.evaluate(lm=model, task_dict=tasks, log_samples=True, bootstrap_iters=0)

    def nll(sentence):
        numbers = read_runs(ModelRuns("ours", (trained("nll"),)), [sentence])[0]
        return numbers.mean("surprisal").sum() * math.log(2)

    nlls = [(nll(good), nll(bad)) for good, bad in pairs]
    right = sum(good < bad for good, bad in nlls)
    assert 0 < right < len(pairs)
    assert found["results"]["pairs"]["acc,none"] == pytest.approx(right / len(pairs))
    for sample in found["samples"]["pairs"]:
        scores = [-answer[0][0] for answer in sample["resps"]]
        assert scores == pytest.approx(list(nlls[sample["doc_id"]]), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_trains_it(trained, text, tmp_path):
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    tokenizer = hf.tokenizer_from_run(trained("nll"))
    model = small(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, step="learned")
    lines = (text / "train.txt").read_text().splitlines()
    encoded = [tokenizer(f"<eos>{line}<eos>") for line in lines]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=16, per_device_train_batch_size=8,
        learning_rate=0.1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", seed=1,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = transformers.Trainer(
        model=model.float(), args=arguments, train_dataset=encoded, data_collator=collate
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.1
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter.detach(), before[name].float()), name
    trainer.save_model(str(tmp_path / "saved"))
    again = hf.RecodingForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([encoded[0].input_ids])
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)
