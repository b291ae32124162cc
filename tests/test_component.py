from __future__ import annotations

import pytest

from captioning.attention import AdditiveScore, Attention, Score, SoftAttention
from captioning.component import Component
from captioning.errors import InputError
from captioning.model import AttentionDecoder


def test_config_names_the_class_and_every_argument_also_the_defaults():
    config = SoftAttention(AdditiveScore()).to_config()
    assert config == {
        "class_path": "captioning.attention.SoftAttention",
        "init_args": {
            "score": {
                "class_path": "captioning.attention.AdditiveScore",
                "init_args": {"attention_dim": 512, "fused": True},
            },
            "normaliser": None,
            "dropout": 0.0,
        },
    }


def test_round_trip_through_plain_data_gives_an_equal_config():
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(7)), hidden_dim=3, gated=False)
    assert AttentionDecoder.from_config(decoder.to_config()).to_config() == decoder.to_config()


@pytest.mark.parametrize(
    "path",
    [
        *("os.system", "subprocess.Popen", "torch.nn.Linear", "nowhere.Thing"),
        *("captioning.errors.InputError", "captioning.decoder.AttentionDecoder", "captioning.nowhere.Thing"),
    ],
)
def test_a_file_cannot_choose_which_code_runs(path):
    with pytest.raises(InputError, match="is not a known Component"):
        Component.from_config({"class_path": path, "init_args": {"args": ["true"]}})


def test_a_component_of_another_kind_is_refused():
    with pytest.raises(InputError, match="is not a known Attention"):
        Attention.from_config(AdditiveScore(3).to_config())


@pytest.mark.parametrize(("name", "kind"), [("normaliser", "Normaliser"), ("score", "Score")])
def test_a_number_in_a_components_place_is_refused_before_it_is_used(name, kind):
    config = SoftAttention(AdditiveScore(3)).to_config()
    config["init_args"][name] = 2.5
    with pytest.raises(InputError, match=rf"SoftAttention: {name}: must be a {kind}, got 2\.5"):
        Attention.from_config(config)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(InputError, match="attention_dims"):
        Score.from_config({"class_path": "captioning.attention.AdditiveScore", "init_args": {"attention_dims": 3}})


def test_a_users_own_class_is_found_once_it_is_imported():
    class Own(AdditiveScore):
        pass

    assert isinstance(Score.from_config(Own(4).to_config()), Own)


def test_a_class_whose_types_only_a_type_checker_imports_is_rebuilt():
    class Typed(AdditiveScore):
        def __init__(self, attention_dim: Nowhere) -> None:  # noqa: F821 - as behind `if TYPE_CHECKING`
            super().__init__(attention_dim)

    assert isinstance(Score.from_config(Typed(4).to_config()), Typed)
