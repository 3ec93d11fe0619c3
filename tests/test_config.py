import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprior.config import Experiment, PriorChoice, from_toml, keys, override, to_toml
from fedprior.data.partition import PARTITIONS
from fedprior.errors import UsageError, UserError
from fedprior.methods import METHODS, FedProx
from fedprior.optim import SGD
from fedprior.prepare.balance import BALANCES
from fedprior.recipes import RECIPES


def test_words_set_names_and_values_in_any_order():
    e = override(Experiment(), ["method.mu=0.5", "method=fedprox", "local.lr=0.1", "local=sgd", "rounds=3"])
    assert e.method == FedProx(mu=0.5)
    assert e.local == SGD(lr=0.1)
    assert e.rounds == 3
    assert Experiment().rounds != 3


def test_the_keys_a_user_would_guess_all_exist():
    wanted = """data data.path clients partition partition.alpha net method server local local.lr local.weight_decay
    steps epochs batch_size cohort rounds prior prior.steps prior.guidance balance seed precision engine name"""
    assert set(wanted.split()) <= set(keys(Experiment()))
    assert override(Experiment(), ["method=fedprox", "method.mu=1"]).method == FedProx(mu=1.0)


def test_steps_and_epochs_take_each_others_place():
    assert override(Experiment(), ["epochs=0.5"]).steps is None
    back = override(override(Experiment(), ["epochs=0.5"]), ["steps=7"])
    assert (back.steps, back.epochs) == (7, None)
    with pytest.raises(UsageError, match="not both"):
        override(Experiment(), ["steps=3", "epochs=1"])


def test_none_switches_prior_and_balance_off():
    e = override(RECIPES["gen-fedsd/cifar10"](), ["balance=none", "prior=none"])
    assert e.prior is None
    assert e.balance is None
    assert override(e, ["prior=some/where", "prior.guidance=3"]).prior == PriorChoice(name="some/where", guidance=3.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["roundz=3"], "did you mean rounds"),
        (["mu=3"], "unknown key 'mu'"),
        (["lr=0.1"], "did you mean (local|server).lr"),
        (["method.mo=3", "method=fedprox"], "method.mu"),
        (["method=fedpro"], "did you mean fedprox"),
        (["partition=dirichlet_balance"], "did you mean dirichlet_balanced"),
        (["balance.pool_size=3"], "balance=none; choose a balance first"),
        (["rounds=three"], "rounds must be a whole number, not 'three'"),
        (["local.lr=fast"], "local.lr must be a number"),
        (["augment=maybe"], "augment must be true or false"),
        (["precision=fp8"], "unknown value for precision 'fp8'"),
        (["rounds"], "not of the form key=value"),
        (["rounds=0"], "rounds must be at least 1"),
        (["cohort=30"], "cohort=30 is more than clients=20"),
        (["partition.alpha=0"], "partition.alpha must be a number above 0"),
        (["local.lr=-1"], "lr must be a number >= 0"),
        (["method=fedprox", "method.mu=-1"], "method.mu must be"),
        (["seed=-1"], "seed must be at least 0"),
        (["target=80"], "write 0.8 for 80 %"),
        (["target=nan"], "target is an accuracy"),
        (["max_update_norm=nan"], "max_update_norm must be above 0"),
        (["threads=100000"], "threads must be at most"),
        (["local=adamw", "local.beta2=1.5"], "must be below 1"),
        (["method.server=sgd"], "unknown key 'method.server'"),
        (["data.pth=x"], "did you mean data.path"),
        (["rounds.x=1"], "unknown key 'rounds.x'"),
        (["balance=max", "prior=none"], "balance needs a prior"),
    ],
)
def test_a_wrong_word_says_what_to_write_instead(words, message):
    with pytest.raises(UsageError, match=message) as caught:
        override(Experiment(), words)
    assert "\n" not in str(caught.value)


@given(
    method=st.sampled_from(sorted(METHODS)),
    scheme=st.sampled_from(sorted(PARTITIONS)),
    rule=st.sampled_from(["none", *sorted(BALANCES)]),
    epochs=st.none() | st.floats(0.1, 9),
    lr=st.floats(1e-6, 1),
    seed=st.integers(0, 2**40),
)
def test_a_written_experiment_reads_back_equal(tmp_path_factory, method, scheme, rule, epochs, lr, seed):
    words = [f"method={method}", f"partition={scheme}", f"balance={rule}", f"local.lr={lr}", f"seed={seed}"]
    e = override(Experiment(), words + ([f"epochs={epochs}"] if epochs else []))
    path = tmp_path_factory.mktemp("toml") / "e.toml"
    path.write_text(to_toml(e))
    assert from_toml(path) == e


@pytest.mark.parametrize(
    "words",
    [
        ["method=moon", "method.projection=none"],
        ["method=scaffold", "method.mode=pre", "server.lr=0.5"],
        ["method=fednova", "aggregate=median"],
        ["method=fedadam", "server.lr=0.3", "schedule=cosine", "schedule.over=7", "clip_gradient=10"],
        ["drop_rate=0.1", "straggler_rate=0.5", "min_cohort=2", "clip_update_norm=3", "persist_optimizer=true"],
    ],
)
def test_what_is_none_or_no_default_reads_back_equal(tmp_path, words):
    e = override(Experiment(), words)
    (tmp_path / "e.toml").write_text(to_toml(e))
    assert from_toml(tmp_path / "e.toml") == e != Experiment()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reads_back_equal(tmp_path, name):
    e = RECIPES[name]()
    (tmp_path / "e.toml").write_text(to_toml(e))
    assert from_toml(tmp_path / "e.toml") == e


def test_recipes_hold_the_papers_settings():
    c10, c100 = RECIPES["gen-fedsd/cifar10"](), RECIPES["gen-fedsd/cifar100"]()
    shared = {"clients": 100, "cohort": 10, "batch_size": 64, "net": "cct_2_3x2_32"}
    assert all(getattr(e, k) == v for e in (c10, c100) for k, v in shared.items())
    assert (c10.rounds, c10.steps, c10.local.lr, c10.local.weight_decay) == (100, 150, 5e-4, 3e-2)
    assert (c100.rounds, c100.steps, c100.local.lr, c100.local.weight_decay) == (200, 100, 6e-4, 6e-2)
    assert (c10.prior.steps, c10.prior.guidance) == (20, 7)
    rc = RECIPES["feddifrc/cifar10"]()
    assert (rc.clients, rc.cohort, rc.rounds, rc.epochs, rc.net) == (10, 5, 50, 10, "resnet10")
    assert rc.local == SGD(lr=0.01, momentum=0.9, weight_decay=1e-5)


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "e.toml"
    with pytest.raises(UsageError, match="there is no file"):
        from_toml(path)
    path.write_text("rounds = = 3")
    with pytest.raises(UsageError, match="not valid TOML"):
        from_toml(path)
    path.write_text("[method]\nname = 'fedprox'\nmuu = 3\n")
    with pytest.raises(UsageError, match=r"e\.toml: unknown key 'method\.muu'.*method\.mu"):
        from_toml(path)


def test_every_method_of_the_papers_tables_has_a_recipe_with_the_papers_setting():
    for paper, rows in (("gen-fedsd", ("fedprox", "fednova", "scaffold", "gptfl")), ("feddifrc", METHODS)):
        for data in ("cifar10", "cifar100"):
            base = RECIPES[f"{paper}/{data}"]()
            for name in set(rows) - {"fedavg", "local", "centralised"}:
                e = RECIPES[f"{paper}/{data}/{name}"]()
                assert type(e.method) is METHODS[name]
                assert (e.net, e.local, e.partition, e.rounds, e.cohort) == (
                    base.net,
                    base.local,
                    base.partition,
                    base.rounds,
                    base.cohort,
                )
    assert RECIPES["gen-fedsd/cifar10/fedprox"]().method.mu == 0.001
    assert RECIPES["feddifrc/cifar10/fedavgm"]().server == SGD(lr=1.0, momentum=0.97)
    assert RECIPES["gen-fedsd/cifar10/scaffold"]().balance == RECIPES["gen-fedsd/cifar10"]().balance
    assert RECIPES["gen-fedsd/cifar10/gptfl"]().balance is None


# What a prior says of itself -----------------------------------------------------------------------------


@pytest.fixture
def spoken(tmp_path):
    """A folder of a prior that says which templates and features serve it."""
    folder = tmp_path / "own"
    folder.mkdir()
    own = {"balance": {"templates": "single"}, "guide": {"timestep": 77, "levels": "3"}}
    (folder / "fedprior.json").write_text(json.dumps(own))
    return folder


def test_a_prior_brings_templates_and_features_unless_a_word_says_otherwise(spoken):
    both = ["balance=max", "guide=feddifrc", f"prior={spoken}"]
    found = override(Experiment(), both)
    assert (found.balance.templates, found.guide.timestep, found.guide.levels) == ("single", 77, "3")
    found = override(Experiment(), [*both, "balance.templates=clip", "guide.timestep=5"])
    assert (found.balance.templates, found.guide.timestep, found.guide.levels) == ("clip", 5, "3")
    later = override(override(Experiment(), [f"prior={spoken}"]), ["balance=max"])
    assert later.balance.templates == "single"


def test_what_was_settled_stays_when_other_words_change(spoken):
    chosen = override(Experiment(), ["balance=max", f"prior={spoken}", "balance.templates=clip"])
    assert override(chosen, ["rounds=3"]).balance.templates == "clip"
    assert override(chosen, ["prior.steps=3"]).balance.templates == "clip"
    assert from_toml_text(chosen).balance.templates == "clip"


def test_a_name_that_is_there_already_keeps_its_values(spoken):
    """So that balance=none,max of a sweep, or method=fedprox of a recipe with it, compares what the settings say."""
    words = ["method=fedprox", "method.mu=0.7", "balance=max", "balance.cap=3", "partition.alpha=5", "local.lr=0.3"]
    base = override(Experiment(), [*words, "data.half=all", "prior.steps=7", "aggregate=median"])
    again = ["method=fedprox", "balance=max", "partition=dirichlet", "local=sgd", "data=digits", "prior=digits"]
    assert override(base, [*again, "aggregate=median"]) == base
    assert override(base, ["method=fedprox", "method.mu=0.2"]).method.mu == 0.2
    assert override(override(base, ["method=moon"]), ["method=fedprox"]).method.mu == FedProx().mu
    assert override(base, ["balance=none", "balance=max"]).balance.cap == 3
    chosen = override(Experiment(), ["balance=max", f"prior={spoken}", "balance.templates=clip"])
    assert override(chosen, ["balance=max", f"prior={spoken}"]) == chosen
    assert override(chosen, ["balance=missing_only"]).balance.templates == "single"


def from_toml_text(experiment):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(experiment))
        return from_toml(path)


def test_a_prior_that_says_nothing_changes_nothing(tmp_path):
    (tmp_path / "silent").mkdir()
    plain = override(Experiment(), ["balance=max"])
    assert override(Experiment(), ["balance=max", f"prior={tmp_path / 'silent'}"]).balance == plain.balance
    (tmp_path / "silent" / "fedprior.json").write_text('{"balance": {"cap": 3}}')
    with pytest.raises(UserError, match=r"fedprior.json is damaged"):
        override(Experiment(), ["balance=max", f"prior={tmp_path / 'silent'}"])
