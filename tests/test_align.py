"""Alignment of real rows: which rows go through the prior, and what a round trip and a redrawing are."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from fedprior.data import table
from fedprior.data.table import Federation
from fedprior.prepare.align import align
from fedprior.prepare.images import Wording
from fedprior.priors import edit, embedded
from fedprior.priors.diffusion import to_bytes
from fedprior.priors.features import to_latents

SIZE = (4, 4)


@dataclass
class Shifting:
    """A round trip adds 1 to each pixel; a redrawing sets the image to a number of its seed."""

    name: str = "shifting"
    revision: str = "r1"
    size: int = 16
    trips: list[int] = field(default_factory=list)
    drawn: list[tuple[str, int, float]] = field(default_factory=list)
    settings = {"dtype": "fp32", "steps": 3}  # noqa: RUF012

    def roundtrip(self, images):
        self.trips.append(len(images))
        return images + 1

    def redraw(self, images, prompts, seeds, strength):
        self.drawn += [(p, s, strength) for p, s in zip(prompts, seeds, strict=True)]
        return torch.stack([torch.full_like(x, s % 251) for x, s in zip(images, seeds, strict=True)])


def federation():
    """Nine real rows at two clients, and three synthetic ones that both have."""
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.integers(0, 200, (9, 3, *SIZE), dtype=np.uint8))
    real = table.make(image, torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0]))
    made = table.make(torch.full((3, 3, *SIZE), 7, dtype=torch.uint8), torch.zeros(3), synthetic=True, first_id=9)
    fed = Federation(
        table=real,
        clients=(torch.tensor([5, 0, 3, 1]), torch.tensor([2, 4, 6, 7, 8])),
        test=real,
        classes=("cat", "dog"),
    )
    return fed.with_rows(made, [torch.arange(3)] * 2)


WORDS = Wording(classes=("cat", "dog"), templates=("a photo of a {}", "the {}"))


def aligned(how, prior=None, seed=0, strength=0.3, fed=None):
    return align(fed or federation(), prior or Shifting(), how, strength, WORDS, seed=seed)


def test_a_round_trip_changes_every_real_row_once_and_nothing_else():
    before, after = federation(), aligned("roundtrip")
    assert torch.equal(after.table["image"][:9], before.table["image"][:9] + 1)
    assert torch.equal(after.table["image"][9:], before.table["image"][9:])
    assert torch.equal(after.test["image"], before.test["image"])
    for name in ("label", "synthetic", "id"):
        assert torch.equal(after.table[name], before.table[name])
    assert all(torch.equal(a, b) for a, b in zip(after.clients, before.clients, strict=True))


def test_half_takes_half_of_each_clients_real_rows_by_seed():
    before, after = federation(), aligned("half")
    changed = (after.table["image"] != before.table["image"]).flatten(1).any(1)
    assert [int(changed[rows].sum()) for rows in before.clients] == [2, 2]
    assert torch.equal(after.table["image"][changed], before.table["image"][changed] + 1)
    assert torch.equal(aligned("half").table["image"], after.table["image"])
    others = {tuple((aligned("half", seed=s).table["image"] != before.table["image"]).flatten(1).any(1).tolist())
              for s in range(6)}  # fmt: skip
    assert len(others) > 1


def test_noised_rows_are_redrawn_under_their_own_class_by_a_seed_of_their_content():
    prior, before = Shifting(), federation()
    after = aligned("noised", prior, strength=0.25)
    assert len(prior.drawn) == 9
    assert {s for _, _, s in prior.drawn} == {0.25}
    for rows in before.clients:
        for row in rows[~before.table["synthetic"][rows]].tolist():
            (seed,) = {s % 251 for _, s, _ in prior.drawn} & set(after.table["image"][row].unique().tolist())
            word = ("a photo of a cat", "a photo of a dog")[int(before.table["label"][row])]
            assert (word, seed) in {(p, s % 251) for p, s, _ in prior.drawn}
    other = Shifting()
    aligned("noised", other, seed=5, strength=0.5)
    assert {(p, s) for p, s, _ in other.drawn} == {(p, s) for p, s, _ in prior.drawn}  # no other seed, no other place


def test_what_was_aligned_is_kept_by_content_and_settings():
    first = Shifting()
    aligned("roundtrip", first)
    again = Shifting()
    kept = aligned("roundtrip", again)
    assert again.trips == []
    assert torch.equal(kept.table["image"][:9], federation().table["image"][:9] + 1)
    for change in ({"revision": "r2"}, {"size": 32}):
        other = Shifting(**change)
        aligned("roundtrip", other)
        assert sum(other.trips) == 9
    stronger = Shifting()
    aligned("noised", stronger)
    aligned("noised", stronger, strength=0.4)
    assert len(stronger.drawn) == 18


def test_an_interruption_loses_one_client_at_most():
    class Breaking(Shifting):
        def roundtrip(self, images):
            if self.trips:
                raise KeyboardInterrupt
            return super().roundtrip(images)

    with pytest.raises(KeyboardInterrupt):
        aligned("roundtrip", Breaking())
    rest = Shifting()
    aligned("roundtrip", rest)
    assert rest.trips == [5]


# What the digits prior does ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    return embedded.load("digits")


@pytest.fixture(scope="module")
def some():
    from fedprior.data import digits

    return digits.train()["image"][:6]


def test_a_round_trip_is_the_decoded_mean_latent(digits, some):
    vae = digits.pipeline.vae
    with torch.no_grad():
        mean = vae.encode(some.float() / 127.5 - 1).latent_dist.mean
        expected = to_bytes(vae.decode(mean).sample / 2 + 0.5, (16, 16))
    made = digits.roundtrip(some)
    assert (made.int() - expected.int()).abs().max() <= 1
    assert (made.int() - some.int()).abs().float().mean() < 12  # it is the same digit
    larger = torch.nn.functional.interpolate(some.float(), scale_factor=2).byte()
    assert digits.roundtrip(larger).shape == larger.shape


def test_redrawing_keeps_less_the_stronger_it_is(digits, some):
    words = ["a photo of a three"] * 6
    gaps = []
    for strength in (0.2, 0.5, 1.0):
        made = digits.redraw(some, words, range(6), strength)
        assert made.shape == some.shape
        gaps.append(float((made.int() - some.int()).abs().float().mean()))
    assert gaps == sorted(gaps)
    assert gaps[2] > 2 * gaps[0]


def test_a_redrawn_image_depends_on_itself_its_prompt_and_its_seed(digits, some):
    words = ["a photo of a three", "a photo of a seven"] * 3
    together = digits.redraw(some, words, range(6), 0.6).int()
    for i in (0, 3, 5):
        alone = digits.redraw(some[i : i + 1], words[i : i + 1], [i], 0.6).int()
        assert (alone[0] - together[i]).abs().max() <= 2
    assert (digits.redraw(some[:1], words[:1], [9], 0.6).int() - together[:1]).abs().max() > 20


def test_noise_is_added_to_the_mean_latent(digits, some):
    """With a denoiser that predicts nothing the result is known: the first solver step starts from the noised mean."""
    seen = []

    class Caught(Exception):
        pass

    def catch(module, args, kwargs):
        seen.append((args[0] if args else kwargs["sample"]).detach())
        raise Caught

    hook = digits.pipeline.unet.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with pytest.raises(Caught):
            edit.redraw(
                digits.pipeline, some[:1], ["a photo of a three"], [4], strength=0.5, steps=10, guidance=1.0, size=16,
                batch_size=1,
            )  # fmt: skip
    finally:
        hook.remove()
    with torch.no_grad():
        mean, _ = to_latents(digits.pipeline, some[:1], 16, "signed")
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(4))
    alphas = digits.pipeline.scheduler.alphas_cumprod
    fits = [float((a.sqrt() * mean + (1 - a).sqrt() * noise - seen[0]).abs().max()) for a in alphas]
    assert min(fits) < 1e-4
    assert 350 < int(np.argmin(fits)) < 600  # about half of the schedule
