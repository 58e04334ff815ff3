"""Attention over images and sounds: each weight lands where its patch or frame is."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers import ViTConfig, ViTImageProcessor, ViTModel

import headscope
from fixtures.building import build_family
from headscope.errors import InputError
from headscope.heads.medium import Heard, Seen
from headscope.views.figure_base import COLOR_MAP, PLAIN, figure_style
from headscope.views.image_figure import image_figure, patch_grid
from headscope.views.sound_figure import time_axis
from tests.views_pictures import panel_box, pixels

HEIGHT, WIDTH, PATCH = 32, 48, 8
GRID = (HEIGHT // PATCH, WIDTH // PATCH)


@pytest.fixture(scope="module")
def bright_seeker() -> ViTModel:
    """Its only head looks, from every token, at the brightest patch: scores are a patch's mean brightness."""
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=(HEIGHT, WIDTH),
        patch_size=PATCH, hidden_act="relu",
    )  # fmt: skip
    model = ViTModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        patches = model.embeddings.patch_embeddings.projection
        patches.weight[0] = 1 / (3 * PATCH**2)
        # Beside the brightness, something of fixed size, so that the layer norm does not take it away.
        patches.bias[1], patches.bias[2] = 4.0, -4.0
        model.embeddings.cls_token[0, 0, 1:3] = torch.tensor([4.0, -4.0])
        layer = model.layers[0]
        layer.layernorm_before.weight.fill_(1.0)
        attention = layer.attention
        attention.q_proj.bias[0] = 40.0
        attention.k_proj.weight[0, 0] = 1.0
    return model


def image_with(row: int, column: int) -> NDArray[np.uint8]:
    image = np.full((HEIGHT, WIDTH, 3), 60, dtype=np.uint8)
    image[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 250
    return image


def processor() -> ViTImageProcessor:
    return ViTImageProcessor(size={"height": HEIGHT, "width": WIDTH})


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 5), (3, 0), (1, 4), (3, 5)])
def test_the_bright_patch_lands_on_the_bright_patch(bright_seeker: ViTModel, row: int, column: int) -> None:
    image = image_with(row, column)
    result = headscope.analyze(bright_seeker, processor=processor(), images=[image], maps=True)
    (attention,) = result.maps
    seen = result.media["self"]
    assert isinstance(seen, Seen)
    assert (seen.grid, seen.before, seen.after, seen.tokens) == (GRID, ("class",), (), 1 + GRID[0] * GRID[1])
    assert np.abs(seen.pixels.astype(int) - image).max() <= 1, "the image as it was before it was normalised"
    weights = attention.weights[:, 0]
    grid = patch_grid(seen, weights[0])
    assert np.unravel_index(grid.argmax(), GRID) == (row, column) and grid.max() > 0.9
    with figure_style():
        figure = image_figure(result, seen, weights, ("L0H0",), "a head", PLAIN)
        figure.set_dpi(100)
        names = [axes.get_title("left") for axes in figure.axes]
        png = pixels(headscope.heatmap(result, dpi=100, title="a head"))
        panel = panel_box(
            figure, next(i for i, name in enumerate(names) if name.startswith("patches together")), png, 100
        )
    yellow = np.array(matplotlib.colormaps[COLOR_MAP](1.0)[:3]) * 255
    distance = np.abs(panel - yellow).sum(-1)
    rows, columns = np.nonzero(distance < distance.min() + 30)
    assert np.median(rows) * GRID[0] // panel.shape[0] == row
    assert np.median(columns) * GRID[1] // panel.shape[1] == column
    assert 0.7 < len(rows) * GRID[0] * GRID[1] / (panel.shape[0] * panel.shape[1]) < 1.1


def test_class_and_register_tokens_are_no_patches() -> None:
    model = build_family("dinov2_with_registers")
    values = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(pixel_values=values, output_attentions=True).attentions[1][0].numpy()
    result = headscope.analyze(model, inputs={"pixel_values": values}, maps=True)
    seen = result.media["self"]
    assert isinstance(seen, Seen)
    assert seen.before == ("class", "register 0", "register 1", "register 2", "register 3")
    assert [seen.name(i) for i in (0, 4, 5, 9, 20)] == ["class", "register 3", "patch 0,0", "patch 1,0", "patch 3,3"]
    for head in range(4):
        found = patch_grid(seen, result.maps[1].weights[head, 0])
        np.testing.assert_allclose(found, expected[head, 0, 5:].reshape(4, 4), atol=1e-6)
    with figure_style():
        figure = image_figure(result, seen, result.maps[1].weights[:1, 7], ("x",), "x", PLAIN, query=7)
    strip = next(axes for axes in figure.axes if any("class" in t.get_text() for t in axes.get_xticklabels()))
    np.testing.assert_allclose(strip.images[0].get_array()[0], expected[0, 7, :5], atol=1e-6)
    outlined = [axes.patches[0].get_xy() for axes in figure.axes if axes.patches]
    assert outlined == [(1.5, -0.5)] * 2, "token 7 is the patch of row 0 and column 2, on the image and over it"


def test_the_row_drawn_is_the_query_or_the_class_token_or_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    from headscope.views import image_figure as module

    drawn: list[NDArray[np.float32]] = []
    real = module.image_figure
    monkeypatch.setattr(
        module, "image_figure", lambda a, s, weights, *rest: drawn.append(weights) or real(a, s, weights, *rest)
    )
    values = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    vit = headscope.analyze(build_family("vit"), inputs={"pixel_values": values}, maps=True, layer=1)
    weights = vit.maps[0].weights
    for query, row in ((None, 0), (5, 5), (-1, 16)):
        headscope.heatmap(vit, query=query)
        np.testing.assert_array_equal(drawn[-1], weights[:, row])
    headscope.heatmap(vit, "mean", query=3)
    np.testing.assert_allclose(drawn[-1][0], weights[:, 3].mean(0), atol=1e-7)
    with pytest.raises(InputError, match="query 17 is none of the 17 tokens"):
        headscope.heatmap(vit, query=17)
    config = transformers.SiglipVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    siglip = headscope.analyze(
        transformers.SiglipVisionModel(config).eval(), inputs={"pixel_values": values}, maps=True, stack="self"
    )
    headscope.heatmap(siglip)
    np.testing.assert_allclose(drawn[-1], siglip.maps[0].weights.mean(1), atol=1e-7)


def test_tokens_that_are_no_grid_of_patches_are_refused_but_not_as_matrices() -> None:
    values = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    masked = transformers.ViTMAEConfig(**small, image_size=32, patch_size=8, mask_ratio=0.75)
    pyramid = transformers.PvtConfig(
        image_size=32, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[2, 1], hidden_sizes=[16, 16],
        patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[2, 2], mlp_ratios=[1, 1],
    )  # fmt: skip
    for model, said in (
        (transformers.ViTMAEModel(masked), "5 × 5 tokens is not that of an image of 4 × 4 patches"),
        (transformers.PvtModel(pyramid), "not cut into one grid of patches"),
    ):
        result = headscope.analyze(model.eval(), inputs={"pixel_values": values}, maps=True, layer=0)
        for kind in ("heads", "mean", "rollout"):
            with pytest.raises(InputError, match=said) as caught:
                headscope.heatmap(result, kind)
            assert "--matrix" in (caught.value.hint or "")
        assert pixels(headscope.heatmap(result, matrix=True)).size


# ------------------------------------------------------------------ sounds
def whisper_sound() -> NDArray[np.float32]:
    """A second of silence with a tone from 0.5 to 0.6 s."""
    times = np.arange(16_000) / 16_000
    return (np.sin(2 * np.pi * 2000 * times) * ((times > 0.5) & (times < 0.6))).astype(np.float32)


def test_a_tone_is_heard_when_it_sounds(family_dir) -> None:
    result = headscope.analyze(str(family_dir("whisper")), audio=[whisper_sound()], decoder_texts="a", maps=True)
    assert set(result.media) == {"encoder", "cross"}
    encoder, cross = result.media["encoder"], result.media["cross"]
    assert isinstance(encoder, Heard) and isinstance(cross, Heard)
    assert (encoder.queries, cross.queries) == (True, False)
    assert (encoder.keys, encoder.seconds, encoder.spectrogram.shape) == (50, 1.0, (16, 100))
    loud = np.flatnonzero(encoder.spectrogram.max(0) > encoder.spectrogram.max() - 0.2)
    assert 48 <= loud.min() <= 51 and 58 <= loud.max() <= 61
    for stack in ("encoder", "cross"):
        assert pixels(headscope.heatmap(result, stack=stack, layer=1)).size
        assert pixels(headscope.heatmap(result, stack=stack, layer=1, head=0)).size


def test_seconds_stand_where_their_frames_are() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_axes((0, 0, 1, 1))
    time_axis(axes, Heard(np.zeros((4, 100), np.float32), 50, True, 10.0), (6.0, 6.0))
    ticks = {label.get_text(): place for label, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)}
    assert ticks["0"] == -0.5 and ticks["4"] == 4 * 5 - 0.5 and ticks["10"] == 49.5
    assert list(axes.get_yticks()) == list(axes.get_xticks())


def test_models_of_the_waveform_have_a_spectrogram_too() -> None:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(20, 16), conv_kernel=(20, 16), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = transformers.Wav2Vec2Model(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor()
    result = headscope.analyze(model, processor=extractor, audio=[whisper_sound()], maps=True)
    heard = result.media[result.maps[0].stack]
    assert isinstance(heard, Heard)
    assert (heard.keys, heard.queries, heard.seconds) == (50, True, 1.0)
    loud = np.flatnonzero(heard.spectrogram.max(0) > heard.spectrogram.max() - 1) / heard.spectrogram.shape[1]
    assert 0.47 < loud.min() < 0.52 and 0.58 < loud.max() < 0.63
    assert pixels(headscope.heatmap(result, head=0)).size


def test_texts_lie_on_nothing(family_model) -> None:
    model, _, _ = family_model("bert")
    result = headscope.analyze(model, ids=[2, 5, 3], maps=True)
    assert result.media == {}
    with pytest.raises(InputError, match="over an image"):
        headscope.heatmap(result, query=1)
