"""Elementwise operators of ATen by torch's tag `pointwise`, and their in-place forms.

Lowering needs both and loads no torch, so they are listed here, for torch 2.13; a test compares the
lists with torch.
"""

from __future__ import annotations

# Operators by their overloads with the tag; those with `!` have an in-place form.
_BY_OVERLOADS = {
    "default!": """
        abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_not ceil celu
        conj_physical cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 floor frac gcd
        gelu hardsigmoid hardtanh heaviside hypot i0 igamma igammac lcm leaky_relu lgamma log log10
        log1p log2 logical_and logical_not logical_or logical_xor logit mish mvlgamma nan_to_num
        neg nextafter polygamma rad2deg reciprocal relu relu6 rrelu rsqrt selu sgn sigmoid sign
        silu sin sinc sinh sqrt square tan tanh threshold trunc
        """,
    "default": """
        _conj_physical angle clone equal fmax fmin gelu_backward hardshrink isfinite isinf isnan
        isneginf isposinf logaddexp logaddexp2 logit_backward maximum minimum
        native_dropout_backward positive sigmoid_backward signbit silu_backward softplus softshrink
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0 tanh_backward
        threshold_backward
        """,
    "default x_scalar n_scalar": """
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
        """,
    "Tensor Scalar": "__lshift__ __rshift__ __xor__",
    "Tensor! Scalar!": "add copysign eq fmod ge gt le lt mul ne sub",
    "Tensor! Scalar! Scalar_Tensor": "bitwise_and bitwise_or bitwise_xor remainder",
    "Tensor! Tensor_Scalar! Scalar_Tensor": "bitwise_left_shift bitwise_right_shift",
    "Tensor! Scalar! Tensor_mode! Scalar_mode!": "div",
    "Tensor! Scalar_Other! Scalar_Self": "xlogy",
    "Tensor_Tensor Tensor_Scalar Scalar!": "float_power pow",
    "default! Tensor!": "clamp clamp_max clamp_min clip",
    "default! decimals!": "round",
    "Scalar! Tensor!": "lerp",
    "Tensor!": "true_divide",
    "Scalar!": "masked_fill",
    "Scalar": "rsub",
    "Tensor": "frexp ldexp",
    "other": "max min",
    "self": "where",
    "default other_scalar self_scalar": "special_xlog1py special_zeta",
}
# In-place forms, by `aten.kind.overload`; None where torch has none.
_FORMS = {
    f"aten.{name}.{word.removesuffix('!')}": (
        f"aten.{name}_.{word.removesuffix('!')}" if word.endswith("!") else None
    )
    for overloads, names in _BY_OVERLOADS.items()
    for name in names.split()
    for word in overloads.split()
}
_POINTWISE = frozenset((*_FORMS, *filter(None, _FORMS.values())))


def is_pointwise(target: str) -> bool:
    """Whether the operator, or its in-place form, works on each element by itself."""
    return target in _POINTWISE


def in_place_form(target: str) -> str | None:
    """The operator that writes the result over its first operand, if torch has it.

    >>> in_place_form("aten.add.Tensor"), in_place_form("aten.where.self")
    ('aten.add_.Tensor', None)
    """
    return _FORMS.get(target)
