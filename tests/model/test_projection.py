from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ling_serve.model import projection
from ling_serve.model.projection import Projection, QuantizedProjection, prefers_dense
from tests.parity.random_model import relative_rms


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (8, "mxfp8"), (4, "mxfp4")])
def test_quantised_weights(bits: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways agree with the dequantised weight in float64."""
    model = nn.Sequential(Projection(64, 48))
    nn.quantize(model, group_size=32, bits=bits, mode=mode)
    (layer,) = model.layers
    assert isinstance(layer, QuantizedProjection)
    options = {"group_size": 32, "bits": bits, "mode": mode}
    weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **options).astype(mx.float32)
    x = mx.random.normal((7, 64), key=mx.random.key(0))
    expected = np.array(x, dtype=np.float64) @ np.array(weight, dtype=np.float64).T
    for dense in (False, True):
        monkeypatch.setattr(projection, "prefers_dense", lambda *_, dense=dense: dense)
        error = relative_rms(np.array(layer(x)), expected)
        print(mode, bits, "dense" if dense else "as stored", f"{error:.1e}")
        assert error <= 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 5e-3), (mx.float16, 1e-3)])
@pytest.mark.parametrize("rows", [1, 9])
def test_16_bit_weights(dtype: mx.Dtype, tolerance: float, rows: int) -> None:
    layer = Projection(64, 48)
    layer.set_dtype(dtype)
    x = mx.random.normal((2, rows, 64), key=mx.random.key(1)).astype(dtype)
    actual = layer(x)
    assert (actual.dtype, actual.shape) == (dtype, (2, rows, 48))
    exact = [np.array(a.astype(mx.float32), dtype=np.float64) for a in (actual, x, layer.weight)]
    error = relative_rms(exact[0], exact[1] @ exact[2].T)
    print(dtype, rows, f"{error:.1e}")
    assert error <= tolerance


def test_float32_weights_are_never_converted() -> None:
    assert not prefers_dense(Projection(8, 8), 1000)


def test_quantised_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="quantize_input is true; expected false"):
        Projection(64, 64).to_quantized(32, 8, "mxfp8", quantize_input=True)
