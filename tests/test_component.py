import pytest
import torch

from captioning.attention import AdditiveScore, Attention, Score, SoftAttention
from captioning.component import Component
from captioning.errors import InputError
from captioning.model import AttentionDecoder
from captioning.objective import ArcticReduction, Likelihood


def test_config_names_the_class_and_every_argument_also_the_defaults():
    score = {"class_path": "captioning.attention.AdditiveScore", "init_args": {"attention_dim": 512, "fused": True}}
    assert SoftAttention(AdditiveScore()).to_config() == {
        "class_path": "captioning.attention.SoftAttention",
        "init_args": {"score": score, "normalizer": None, "dropout": 0.0},
    }
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(7)), hidden_dim=3, gated=False)
    objective = Likelihood(reduction=ArcticReduction())
    for component in (decoder, objective):
        assert type(component).from_config(component.to_config()).to_config() == component.to_config()
    assert isinstance(Likelihood.from_config(objective.to_config()).reduction, ArcticReduction)


def test_names_of_version_02_are_read_under_those_of_today():
    score = {"score": {"class_path": "captioning.attention.DotScore", "init_args": {}}}
    local = {"class_path": "captioning.attention.LocalScore", "init_args": score}
    softmax = {"class_path": "captioning.attention.Softmax", "init_args": {}}
    attention = SoftAttention.from_config(
        {"class_path": "captioning.attention.SoftAttention", "init_args": {"score": local, "normaliser": softmax}}
    )
    assert attention.to_config()["init_args"]["normalizer"] == softmax
    hard = {"class_path": "captioning.attention.HardAttention", "init_args": {"score": local, "inference": "argmax"}}
    assert Attention.from_config(hard).context_mode == "argmax"
    decoder = AttentionDecoder(attention, hidden_dim=4, standardize_annotations=True)
    decoder.build(7, 4, (2, 3))
    state = decoder.state_dict()
    decoder.feature_norm.running_mean.fill_(0.5)
    centers = "attention.score.centers", "attention.score.centres"
    old = {name.replace("feature_norm", "standardize").replace(*centers): value for name, value in state.items()}
    assert old.keys() != state.keys()
    decoder.load_state_dict(
        {name: value.clone() for name, value in old.items()} | {"standardize.running_mean": torch.ones(4)}
    )
    assert torch.equal(decoder.feature_norm.running_mean, torch.ones(4))


def test_arguments_that_a_class_passes_on_are_stored_one_by_one():
    class Passes(AdditiveScore):
        def __init__(self, **options):
            super().__init__(**options)

    config = Passes(attention_dim=3).to_config()
    assert config["init_args"] == {"attention_dim": 3}
    assert Score.from_config(config | {"class_path": Passes.__qualname__}).attention_dim == 3


def test_a_class_of_the_users_keeps_arguments_and_modules_that_have_old_names_of_ours():
    class Mine(Component):
        def __init__(self, inference: str, centres: int = 3):
            super().__init__()
            self.standardize = torch.nn.Linear(2, 2)

    config = {"class_path": Mine.__qualname__, "init_args": {"inference": "argmax", "centres": 5}}
    mine = Mine.from_config(config)
    assert mine.to_config()["init_args"] == config["init_args"]
    mine.load_state_dict(mine.state_dict())


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *((Component, path) for path in ("os.system", "torch.nn.Linear", "nowhere.Thing", "captioning.nowhere.Thing")),
        *((Component, path) for path in ("captioning.errors.InputError", "captioning.decoder.AttentionDecoder")),
        (Attention, "captioning.attention.AdditiveScore"),
    ],
)
def test_a_file_cannot_choose_which_code_runs(kind, path):
    with pytest.raises(InputError, match=f"is not a known {kind.__name__}"):
        kind.from_config({"class_path": path, "init_args": {"args": ["true"]}})


def test_a_class_that_this_version_no_longer_has_is_not_looked_for_elsewhere():
    with pytest.raises(
        InputError, match="AnnotationDropout is not a known Component; this version of captioning has no"
    ):
        Component.from_config({"class_path": "captioning.attention.AnnotationDropout", "init_args": {"p": 0.2}})
    with pytest.raises(InputError, match=r"own\.Score is not a known Score; import the module"):
        Score.from_config({"class_path": "own.Score", "init_args": {}})


def test_an_option_that_this_version_no_longer_has_may_stand_where_it_was_not_set():
    config = AdditiveScore(3).to_config()
    config["init_args"]["position_dim"] = None
    assert Score.from_config(config).to_config() == AdditiveScore(3).to_config()


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(InputError, match="attention_dims"):
        Score.from_config({"class_path": "captioning.attention.AdditiveScore", "init_args": {"attention_dims": 3}})


def test_a_users_own_class_is_found_once_it_is_imported():
    class Own(AdditiveScore):
        pass

    assert isinstance(Score.from_config(Own(4).to_config()), Own)
