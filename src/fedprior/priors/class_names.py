"""Class names of data sets as words that a text encoder understands, and the articles that go with them."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from ..errors import UserError

PLAIN, REPAIRED = "plain", "repaired"

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDNET_ID = re.compile(r"n\d{8}")
NUMBERED = re.compile(r"\d+[._ -]+(?=[^\W\d])")  # "001.Black_footed_Albatross"
CAMEL = re.compile(r"(?<=[a-z]{2})(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")  # "SeaLake" and "CDPlayer", not "iPod"
HYPHEN = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")  # "alarm-clock", not "t-shirt"


def _of(words: str) -> frozenset[str]:
    return frozenset(words.split())


Words = str | tuple[str, ...]  # several where as many classes have the name, in the order of their labels

KNOWN: dict[str, dict[str, Words]] = {
    "cifar100": {  # senses by the superclasses: fish, food containers, small mammals, outdoor scenes, vehicles, ...
        "beetle": "beetle (insect)",
        "can": "can (container)",
        "keyboard": "computer keyboard",
        "mouse": "mouse (animal)",
        "orange": "orange (fruit)",
        "plain": "plain (landscape)",
        "plate": "plate (dish)",
        "ray": "ray (fish)",
        "seal": "seal (animal)",
        "tank": "tank (military vehicle)",
    },
    "domainnet": {"bat": "bat (animal)"},  # "baseball bat" is another class
    "eurosat": {
        "annual crop": "annual cropland",
        "industrial": "industrial buildings",
        "permanent crop": "permanent cropland",
        "residential": "residential buildings",
        "sea lake": "sea or lake",
    },
    "fashion_mnist": {"trouser": "trousers"},
    "imagenet": {  # senses by the synsets of ILSVRC 2012; of two classes with one name the lower label comes first
        "Angora": "Angora rabbit",
        "Cardigan": "Cardigan Welsh corgi",
        "admiral": "admiral butterfly",
        "bow": "bow (archery)",
        "boxer": "boxer (dog)",
        "brass": "brass plaque",
        "clog": "clog (shoe)",
        "cock": "cock (rooster)",
        "crane": ("crane (bird)", "crane (machine)"),
        "crane2": "crane (machine)",
        "cricket": "cricket (insect)",
        "drake": "drake (duck)",
        "ear": "ear of corn",
        "groom": "bridegroom",
        "hip": "rose hip",
        "impala": "impala (antelope)",
        "jaguar": "jaguar (animal)",
        "jay": "jay (bird)",
        "kite": "kite (bird)",
        "loafer": "loafer (shoe)",
        "maillot": ("maillot (swimsuit)", "maillot (tank suit)"),
        "monarch": "monarch butterfly",
        "monitor": "computer monitor",
        "mortar": "mortar (bowl)",
        "mouse": "computer mouse",
        "nail": "nail (metal)",
        "notebook": "notebook computer",
        "orange": "orange (fruit)",
        "organ": "pipe organ",
        "pick": "guitar pick",
        "projectile": "missile (projectile)",
        "puck": "hockey puck",
        "puffer": "puffer fish",
        "ram": "ram (sheep)",
        "reel": "fishing reel",
        "ringlet": "ringlet butterfly",
        "rule": "ruler",
        "slot": "slot machine",
        "sorrel": "sorrel horse",
        "stole": "stole (shawl)",
        "tank": "tank (military vehicle)",
        "tusker": "tusker (elephant)",
        "walking stick": "stick insect",
        "wing": "aircraft wing",
        "wreck": "shipwreck",
    },
    "office": {"keyboard": "computer keyboard", "monitor": "computer monitor", "mouse": "computer mouse"},
    "office_home": {
        "flipflops": "flip-flops",
        "glasses": "eyeglasses",
        "keyboard": "computer keyboard",
        "monitor": "computer monitor",
        "mouse": "computer mouse",
        "postit notes": "sticky notes",
        "tooth brush": "toothbrush",
    },
    "tiny_imagenet": {  # senses by the synsets; "crane" is n03126707, the machine
        "beach wagon": "station wagon",
        "beacon": "lighthouse",
        "bighorn": "bighorn sheep",
        "black widow": "black widow spider",
        "brass": "brass plaque",
        "chest": "chest (box)",
        "confectionery": "candy store",
        "convertible": "convertible (car)",
        "crane": "crane (machine)",
        "drumstick": "drumstick (of a drum)",
        "fly": "fly (insect)",
        "gasmask": "gas mask",
        "gondola": "gondola (boat)",
        "lesser panda": "red panda",
        "monarch": "monarch butterfly",
        "nail": "nail (metal)",
        "orange": "orange (fruit)",
        "organ": "pipe organ",
        "plate": "plate of food",
        "plunger": "plunger (plumbing)",
        "pop bottle": "soda bottle",
        "projectile": "missile (projectile)",
        "reel": "fishing reel",
        "slug": "slug (animal)",
        "tabby": "tabby cat",
        "teddy": "teddy bear",
        "thatch": "thatched roof",
        "torch": "torch (flame)",
        "walking stick": "stick insect",
    },
}
"""What is to be said in place of a name whose sense is certain from the set that it stands in. A set's name begins with
the key; the longest key counts."""

LABELS_IN_CAPITALS = ("eurosat", "fashion_mnist", "office_home")  # where a capital says nothing about the word

AMBIGUOUS = {
    "bass": "a fish or an instrument",
    "bat": "an animal or a club",
    "boxer": "a dog or an athlete",
    "crane": "a bird or a machine",
    "drake": "a duck or a person",
    "jaguar": "an animal or a car",
    "kite": "a bird or a toy",
    "monitor": "a screen or a lizard",
    "mouse": "an animal or a computer mouse",
    "nail": "a metal pin or a part of a finger",
    "organ": "an instrument or a part of a body",
    "ray": "a fish or light",
    "seal": "an animal or a stamp",
    "tank": "a vehicle or a container",
}
"""Names that say too little unless the set is known."""

PAIRS = _of(
    "binoculars boots earphones earrings eyeglasses flip-flops glasses gloves goggles headphones jeans leggings "
    "mittens pajamas pants pliers pyjamas sandals scissors shoes shorts skates sneakers socks spectacles sunglasses "
    "tights trousers trunks tweezers"
)
NO_ARTICLE = _of(  # mass nouns and plurals without an s
    "bacon bibimbap bread broccoli butter cattle celery ceviche cheese children clothing corn cream cropland dough "
    "edamame equipment food furniture garlic geese gnocchi grass guacamole hay hummus jewelry jewellery land "
    "lettuce lightning lingerie luggage meat men mice mud paella people popcorn pasta poutine rain ramen ravioli rice "
    "risotto sand sashimi shrubland smoke snow spaghetti spinach sushi takoyaki thatch tiramisu vegetation water "
    "women wool"
)
NOT_PLURAL = _of(
    "alias atlas bias canvas chaos christmas cosmos crossroads gallows gas headquarters kudos lens mercedes pampas "
    "rhinoceros series species thermos"
)
SILENT_H = re.compile(r"(hour|hono|honest|heir)", re.I)
CONSONANT_SOUND = re.compile(r"(eu|ew|one(sies?)?\b|once\b|ouija|u(biq|k|ni(?![nmd])|ra|ri|s[aeiu]|t[ei]))", re.I)
LINKS = _of(
    "about above across against along among around as at before behind beneath beside between beyond by called "
    "containing depicting during featuring for from in inside into like near of off on onto or outside over showing "
    "that through to toward towards under upon which with within without"
)
DETERMINERS = _of("every her his its many my one our some their these this those your")
ARTICLE = re.compile(r"(?P<head>.*)\b(?P<article>an?|the)(?P<between>(?:\s+[\w'-]+)*)\s+\{\}(?P<tail>.*)", re.I | re.S)


def wording(names: str | Path, classes: Sequence[str], dataset: str = "") -> tuple[str, ...]:
    """What to call each class in a sentence, without an article.

    `names` is "plain", the names with underscores as spaces, as both CLIP and Gen-FedSD write them; "repaired"; or a
    UTF-8 text file with lines `class name = words`, where classes that it leaves out are repaired.

    Repaired names have one word after another instead of underscores, camel case, numbers in front and, where a set
    has no other separator, hyphens; the first of several synonyms; digits in words where all classes are digits; and
    where `dataset` (a hub id, or a name as in `data=`) is in KNOWN, the sense that is meant: "crane (bird)". WordNet
    ids stay as they are, except Tiny-ImageNet's, whose names are known.

    Raises UserError, with file and line, for a file that cannot be read or whose lines are not of that form.
    """
    if str(names) == PLAIN:
        return tuple(name.replace("_", " ") for name in classes)
    words = _repaired(classes, _known_set(dataset))
    if str(names) == REPAIRED:
        return words
    path = Path(names)
    given = pairs(path, classes, "class name", "words", f"no class names at '{path}'; choose {PLAIN}, {REPAIRED} or")
    for name, said in given.items():
        if re.match(r"(an?|the)\s", said, re.I):
            raise UserError(f"{path}: '{said}' for '{name}' begins with an article; leave it out, templates have it")
        if "{" in said or "}" in said:
            raise UserError(f"{path}: '{said}' for '{name}' has a brace; write words alone")
    return tuple(given.get(name, repaired) for name, repaired in zip(classes, words, strict=True))


def odd(classes: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """A line for each class that its words do not describe: ids, bare numbers, names of several senses or of several
    classes."""
    out = []
    times = Counter(words)
    for name, said in zip(classes, words, strict=True):
        if WORDNET_ID.fullmatch(said):
            out.append(f"'{name}' is a WordNet id, which no text encoder knows")
        elif not re.search(r"[^\W\d_]", said):
            out.append(f"'{name}' has no letter, so nothing says what it shows")
        elif (lower := said.lower()) in AMBIGUOUS:
            out.append(f"'{name}' may mean {AMBIGUOUS[lower]}")
        if times[said] > 1:
            out.append(f"'{name}' is called '{said}', as {times[said] - 1} more")
    return tuple(out)


def article(words: str) -> str:
    """The indefinite article of a phrase, by the sound that it begins with: "an hour", "a unicorn", "an X-ray"."""
    first = re.split(r"[\s-]", words.strip(), maxsplit=1)[0]
    if first[:1].isdigit():
        return "an" if re.match(r"8|(11|18)(?!\d)", first) else "a"
    if len(first) == 1 or (first.isupper() and not re.search(r"[AEIOU].*[AEIOU]", first[1:])):  # said letter by letter
        return "an" if first[:1].upper() in set("AEFHILMNORSX") else "a"
    vowel = first[:1].lower() in set("aeiouàáâäèéêëìíîïòóôöùúûü")
    return "an" if SILENT_H.match(first) or (vowel and not CONSONANT_SOUND.match(first)) else "a"


def fitted(template: str, words: str) -> tuple[str, str]:
    """The template, and the words for its {}, with an article that fits them.

    "a {}" becomes "an {}" before a vowel's sound. Before things that come in pairs it stays and they become "pair of
    scissors"; before plurals, what cannot be counted and names with "the" it goes. "the {}" and templates without an
    article stay as they are.
    """
    found = ARTICLE.fullmatch(template)
    if found is None or set(found["between"].lower().split()) & (LINKS | DETERMINERS):
        return template, words
    head, between, tail = found["head"], found["between"], found["tail"]
    proper = re.sub(r"^the\s+", "", words, flags=re.I)
    if found["article"].lower() == "the":
        return template, proper
    after = re.match(r"\s+([\w'-]+)", tail)
    compound = after is not None and after[1].lower() not in LINKS  # "a {} photo": the article is the photo's
    drops = False
    if proper != words:
        drops = not between and not compound
        words = words if drops else proper
    elif not compound:
        noun = _noun(words)
        if noun in PAIRS:
            words = f"pair of {words}"
        else:
            drops = _many(noun) or words.lower() == "mashed potato"
    if drops:
        return f"{head}{between.lstrip()}{' ' if between else ''}{{}}{tail}", words
    fits = found["article"] if between else article(words)
    if found["article"][0].isupper():
        fits = fits.capitalize()
    return f"{head}{fits}{between} {{}}{tail}", words


def pairs(path: Path, known: Sequence[str], left: str, right: str, missing: str) -> dict[str, str]:
    """The lines `left = right` of a UTF-8 text file, by the names in `known`, whose underscores may be spaces.

    Blank lines and lines that start with # do not count. `missing` begins the message for a file that cannot be
    read. Raises UserError, with file and line, for a line of another form, a name that is not known, and one that
    comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save its lines '{left} = {right}' as UTF-8") from None
    except OSError:
        raise UserError(f"{missing} a text file with lines '{left} = {right}'") from None
    spaced = {name.replace("_", " "): name for name in known}
    first: dict[str, int] = {}
    out: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        said, equals, value = (part.strip() for part in line.partition("="))
        if not (said and equals and value) or "=" in value:
            raise UserError(f"{path}, line {number}: '{line}' is not of the form '{left} = {right}'")
        name = said if said in known else spaced.get(said.replace("_", " "))
        if name is None:
            near = difflib.get_close_matches(said, known, n=1, cutoff=0.0)
            hint = f"the nearest is '{near[0]}'" if near else "there are none"
            raise UserError(f"{path}, line {number}: the data have no {left} '{said}'; {hint}")
        if name in first:
            raise UserError(f"{path}, line {number}: '{said}' is already on line {first[name]}; remove one of them")
        first[name], out[name] = number, value
    return out


def _known_set(dataset: str) -> str:
    """The key of KNOWN that a data set's name stands for, else ""."""
    plain = dataset.rpartition("/")[2].lower().replace("-", "_")
    return max((key for key in KNOWN if plain.startswith(key)), key=len, default="")


def _repaired(classes: Sequence[str], dataset: str) -> tuple[str, ...]:
    if classes and set(classes) <= set(map(str, range(10))):
        return tuple(DIGITS[int(name)] for name in classes)
    ids = sorted(name for name in classes if WORDNET_ID.fullmatch(name))
    if dataset == "tiny_imagenet" and len(ids) == len(tiny_imagenet()):
        classes = [dict(zip(ids, tiny_imagenet(), strict=True)).get(name, name) for name in classes]
    numbered = all(NUMBERED.match(name) for name in classes)
    bare = [NUMBERED.sub("", name, count=1) if numbered else name for name in classes]
    hyphens = not any(re.search(r"[\s_]", name) for name in bare)
    spaced = [_spaced(name, hyphens, dataset in LABELS_IN_CAPITALS) for name in bare]
    table, times, seen = KNOWN.get(dataset, {}), Counter(spaced), Counter[str]()
    out = []
    for name in spaced:
        said = table.get(name, name)
        if isinstance(said, tuple):
            said = said[seen[name]] if times[name] == len(said) else name
        seen[name] += 1
        out.append(said)
    return tuple(out)


def _spaced(name: str, hyphens: bool, lower: bool) -> str:
    """One class name in words; `hyphens` says whether they separate words."""
    if WORDNET_ID.fullmatch(name):
        return name
    if not re.search(r"[\s_-]", name) and (split := CAMEL.sub(" ", name)) != name:
        name = " ".join(word if word.isupper() else word.lower() for word in split.split())
    name = name.replace("_", " ").partition(", ")[0]  # of synonyms the first
    name = re.sub(r"\b(\w) - (?=\w)", r"\1-", name)  # "T - shirt"
    name = re.split(r"\s+/\s+|(?<=\w{2})/(?=\w{2})", name)[0]  # "top / blouse"
    name = HYPHEN.sub(" ", name) if hyphens else name
    name = re.sub(r"(?<=\w)\(", " (", name)
    name = re.sub(r"\bT-shirt", "t-shirt", re.sub(r"^The\b", "the", name))
    if lower:
        name = " ".join(word if word.isupper() else word.lower() for word in name.split())
    return " ".join(name.split())


def _noun(words: str) -> str:
    """The word that says how many there are: the last one before a number, bracket or preposition."""
    before = re.sub(r"(?<=\w)\s+\d+$", "", words.partition("(")[0].lower().strip()).split()
    for i, word in enumerate(before):
        if i and word in LINKS:
            before = before[:i]
            break
    return before[-1] if before else ""


def _many(noun: str) -> bool:
    if noun in NO_ARTICLE:
        return True
    return len(noun) > 3 and noun.endswith("s") and not noun.endswith(("ss", "us", "is")) and noun not in NOT_PLURAL


@cache
def tiny_imagenet() -> tuple[str, ...]:
    """Tiny-ImageNet's 200 names in the order of their WordNet ids."""
    return tuple((files("fedprior.priors") / "tiny_imagenet_classes.txt").read_text(encoding="utf-8").splitlines())
