"""Filters of synthetic images, each against what it promises, and the account of what they removed."""

import json
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedprior.data import table
from fedprior.errors import UsageError, UserError
from fedprior.prepare import filters
from fedprior.prepare.filters import ClipScore, Confidence
from fedprior.priors import architecture, quality
from fedprior.priors.check import Judge

JUDGE = Judge(steps=40)
PROMPTS = ("a photo of a cat", "a photo of a small dog", "a dog")


def noise(seed, n, side=16):
    made = np.random.default_rng(seed).integers(0, 256, (n, 3, side, side), dtype=np.uint8)
    return torch.from_numpy(made)


class Duplicates:
    """The simplest filter: removes images that are byte-equal to an earlier one of their class."""

    settings: ClassVar = {"filter": "duplicates"}

    def keep(self, images, labels, prompts):
        return ~quality.repeats(images, labels)


# Duplicates -----------------------------------------------------------------------------------------------


def test_the_first_of_equal_images_of_a_class_is_kept():
    images = noise(0, 3)[[0, 1, 0, 0, 2, 1]]
    keep = Duplicates().keep(images, torch.tensor([0, 0, 0, 1, 1, 0]), [""] * 6)
    assert keep.tolist() == [True, True, False, True, True, False]


# Confidence -----------------------------------------------------------------------------------------------


def shades(levels):
    """Images of one grey level each, with a little noise."""
    return (torch.tensor(levels)[:, None, None, None] + noise(1, len(levels)) // 16).byte()


@pytest.fixture(scope="module")
def confidence():
    """Real rows of class 0 are dark, of class 2 bright; there are none of class 1."""
    rows = table.make(shades([20, 220] * 20), torch.tensor([0, 2] * 20))
    return Confidence(rows=rows, classes=3, threshold=0.6, judge=JUDGE)


def test_images_that_look_like_another_owned_class_go(confidence):
    keep = confidence.keep(shades([20, 220, 20, 220]), torch.tensor([0, 0, 2, 2]), [""] * 4)
    assert keep.tolist() == [True, False, False, True]


def test_classes_without_real_rows_pass_unjudged(confidence):
    assert confidence.keep(shades([20, 120, 220]), torch.tensor([1, 1, 1]), [""] * 3).all()
    assert confidence.keep(shades([20, 120, 220]), torch.tensor([1, 1, 0]), [""] * 3).tolist() == [True, True, False]
    early = Confidence(rows=confidence.rows, classes=3, judge=Judge(steps=1))  # to which all classes are much alike
    probability = early.probability(shades([20, 220]), torch.tensor([0, 0]))
    others = early.probability(shades([20, 220]), torch.tensor([2, 2]))
    assert torch.allclose(probability + others, torch.ones(2))  # nothing is left for the class without rows


def test_a_client_of_one_class_judges_nothing():
    rows = table.make(shades([20] * 8), torch.zeros(8, dtype=torch.long))
    one = Confidence(rows=rows, classes=3, threshold=1.0, judge=JUDGE)
    assert one.keep(shades([20, 220, 220]), torch.tensor([0, 0, 1]), [""] * 3).all()


def test_thresholds_and_rows_that_cannot_be_used_are_refused(confidence):
    with pytest.raises(UsageError, match=r"from 0 to 1, not 1\.5"):
        Confidence(rows=confidence.rows, classes=3, threshold=1.5, judge=JUDGE)
    with pytest.raises(UserError, match="there are none"):
        Confidence(rows=table.take(confidence.rows, torch.zeros(0).long()), classes=3, judge=JUDGE)
    with pytest.raises(ValueError, match="synthetic"):
        Confidence(rows=table.make(noise(0, 2), torch.tensor([0, 1]), synthetic=True), classes=3, judge=JUDGE)


# CLIP score -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny CLIP of random weights for images of 30 x 30."""
    from transformers import CLIPConfig, CLIPModel

    where = tmp_path_factory.mktemp("clip")
    tokenizer = architecture.build_tokenizer(PROMPTS)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": len(tokenizer), "max_position_embeddings": architecture.TOKENS}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(
            CLIPConfig(
                text_config={**tower, **words, **ends, "pad_token_id": tokenizer.pad_token_id},
                vision_config={**tower, "image_size": 30, "patch_size": 10},
                projection_dim=8,
            )
        )
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


def reference(folder, images, prompts):
    """Cosines by CLIPModel itself, one image and prompt at a time."""
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    out = []
    for image, prompt in zip(images, prompts, strict=True):
        tokens = tokenizer([prompt], return_tensors="pt")
        with torch.no_grad():
            found = model(pixel_values=(image[None] / 255 - mean) / std, **tokens)
        out.append(float(torch.cosine_similarity(found.image_embeds, found.text_embeds)))
    return torch.tensor(out)


def test_scores_are_clips_cosines(folder, monkeypatch):
    monkeypatch.setattr(filters, "BATCH", 2)
    images, prompts = noise(2, 7, side=30), [PROMPTS[i] for i in (0, 1, 2, 0, 0, 1, 2)]
    clip = ClipScore.from_pretrained(folder, threshold=0.0)
    expected = reference(folder, images, prompts)
    assert torch.allclose(clip.scores(images, prompts), expected, atol=1e-5)
    assert expected.std() > 0.01
    limit = float(expected.median())
    above = ClipScore.from_pretrained(folder, threshold=limit - 1e-4).keep(images, torch.zeros(7).long(), prompts)
    assert above.tolist() == (expected >= limit).tolist()


def test_images_of_another_size_are_resized_and_none_give_none(folder):
    clip = ClipScore.from_pretrained(folder, threshold=0.0)
    assert clip.scores(noise(0, 2, side=16), PROMPTS[:2]).shape == (2,)
    assert clip.keep(noise(0, 0), torch.zeros(0).long(), []).tolist() == []


def test_a_score_filter_needs_a_cosine_and_a_whole_model(folder, tmp_path):
    with pytest.raises(UsageError, match="cosine"):
        ClipScore.from_pretrained(tmp_path / "none", threshold=30)  # before anything is loaded
    with pytest.raises(UserError, match=r"cannot load CLIP from .*; give a folder or hub id with safetensors"):
        ClipScore.from_pretrained(tmp_path / "none", threshold=0.2)


def test_half_a_model_is_refused(folder, tmp_path):
    from transformers import CLIPModel, CLIPTokenizer, CLIPVisionModelWithProjection

    config = CLIPModel.from_pretrained(folder).config
    config.vision_config.projection_dim = config.projection_dim
    CLIPVisionModelWithProjection(config.vision_config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    CLIPTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no whole CLIP model"):
        ClipScore.from_pretrained(tmp_path, threshold=0.2)


def test_pickled_weights_are_refused(folder, tmp_path):
    from transformers import CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    CLIPTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        ClipScore.from_pretrained(tmp_path, threshold=0.2)


# Together -------------------------------------------------------------------------------------------------


class Odd:
    """Removes the images whose first pixel is odd; notes what it was shown."""

    settings = {"filter": "odd"}  # noqa: RUF012

    def keep(self, images, labels, prompts):
        self.shown = list(prompts)
        return images[:, 0, 0, 0] % 2 == 0


def test_each_filter_sees_what_is_left_and_says_what_it_removed():
    images = torch.zeros((6, 3, 4, 4), dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.tensor([0, 1, 0, 3, 2, 1])
    labels, odd = torch.tensor([0, 0, 0, 1, 1, 0]), Odd()
    keep, (first, second) = filters.apply([Duplicates(), odd], images, labels, list("abcdef"), classes=3)
    assert keep.tolist() == [True, False, False, False, True, False]
    assert first == ({"filter": "duplicates"}, 6, 2, [2, 0, 0])
    assert second == ({"filter": "odd"}, 4, 2, [1, 1, 0])
    assert odd.shown == ["a", "b", "d", "e"]
    keep, removals = filters.apply([], images, labels, list("abcdef"), classes=3)
    assert keep.all()
    assert removals == []


def test_the_digest_changes_with_all_that_changes_what_is_kept(confidence, folder):
    other_rows = table.make(shades([20, 221] * 20), torch.tensor([0, 2] * 20))
    given = {"classes": 3, "threshold": 0.6, "judge": JUDGE}
    variants = [
        [],
        [Duplicates()],
        [confidence],
        [Duplicates(), confidence],
        [confidence, Duplicates()],
        [Confidence(rows=confidence.rows, **given | {"threshold": 0.7})],
        [Confidence(rows=confidence.rows, **given | {"judge": Judge(steps=41)})],
        [Confidence(rows=confidence.rows, **given, seed=1)],
        [Confidence(rows=other_rows, **given)],
        [ClipScore.from_pretrained(folder, threshold=0.2)],
        [ClipScore.from_pretrained(folder, threshold=0.3)],
    ]
    digests = [filters.digest(variant) for variant in variants]
    assert len(set(digests)) == len(variants)
    again = Confidence(rows=table.take(confidence.rows, torch.arange(40)), **given)
    assert filters.digest([again]) == filters.digest([confidence])
    assert "classifier" not in vars(again)  # a key costs no training
    json.dumps([one.settings for variant in variants for one in variant], allow_nan=False)


def test_the_digest_of_a_model_is_that_of_its_weights(folder, tmp_path):
    from transformers import CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        model.text_projection.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    CLIPTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    one, other = (ClipScore.from_pretrained(where, threshold=0.2) for where in (folder, tmp_path))
    assert one.settings["revision"] != other.settings["revision"]
