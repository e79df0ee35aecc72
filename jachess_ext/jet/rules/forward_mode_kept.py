"""Functions whose jets torch's own forward mode computes correctly (`forward_mode.py`).

For functions in `FORWARD_REVERSE`, torch's backward through its forward mode is correct,
too; for functions in `FORWARD_ONLY` it is not, and gradients are refused.

Written by `python -m python_tests.jet.keep_forward_mode` with torch 2.13.0; do not edit.
"""


def full_names(names: dict[str, str]) -> tuple[str, ...]:
    """Return ``namespace.name`` for each name in ``names``, which maps a namespace to its names,
    separated by blanks."""
    return tuple(f"{space}.{name}" for space, text in names.items() for name in text.split())


FORWARD_REVERSE = full_names(
    {
        "torch": """
            acos acosh addbmm addmv addr alias_copy aminmax angle as_strided_copy asin asinh atan
            atanh column_stack combinations constant_pad_nd corrcoef cosh cov cross cummax cummin
            cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal_copy diagonal_scatter
            diff digamma div dstack erfinv expand_copy fill fliplr flipud fmod frac frexp gradient
            hstack i0 index_fill index_put inner kron kthvalue ldexp lgamma lu_solve lu_unpack
            masked_scatter masked_select matrix_exp median mode msort mvlgamma nanmean nanmedian
            nanquantile nansum narrow_copy native_group_norm nextafter permute_copy pinverse
            polygamma put qr quantile rad2deg remainder rot90 scatter_reduce select_scatter sgn sinh
            slice_scatter split_with_sizes_copy squeeze_copy svd t_copy take tan trace
            transpose_copy trapezoid trapz trunc unbind_copy unfold_copy unsqueeze_copy vdot
            view_copy vstack
        """,
        "torch.Tensor": """
            __rmod__ acos acosh addbmm addmv addr aminmax asin asinh atan atanh corrcoef cosh
            cov cross cummax cummin deg2rad diag diag_embed diagflat diagonal_scatter diff digamma
            erfinv fliplr flipud fmod frac frexp i0 index_fill index_put inner kron kthvalue ldexp
            lgamma lu lu_solve masked_scatter masked_select matrix_exp median mode msort mvlgamma
            nanmean nanmedian nanquantile nansum narrow_copy nextafter pinverse polygamma put qr
            quantile rad2deg remainder rot90 select_scatter sgn sinh slice_scatter stft sum_to_size
            svd take tan trace trunc vdot
        """,
        "torch.functional": "block_diag cartesian_prod lu stft tensordot",
        "torch.linalg": """
            cholesky cholesky_ex cross inv inv_ex lstsq lu lu_factor lu_factor_ex lu_solve
            matrix_power multi_dot pinv qr solve_triangular svd svdvals tensorinv vecdot
        """,
        "torch.nn.functional": """
            adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d
            adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices
            bilinear binary_cross_entropy_with_logits channel_shuffle cross_entropy embedding
            hardshrink kl_div l1_loss linear_cross_entropy margin_ranking_loss max_pool1d
            max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
            max_pool3d_with_indices pad pixel_shuffle pixel_unshuffle poisson_nll_loss prelu
            smooth_l1_loss softshrink threshold
        """,
        "torch.special": "entr erfcx i0e i1e log_ndtr ndtr ndtri polygamma",
    }
)

FORWARD_ONLY = full_names(
    {
        "torch": "as_strided_scatter copysign renorm",
        "torch.Tensor": "as_strided_scatter copysign renorm",
        "torch.functional": "norm",
        "torch.linalg": "eig eigh eigvals eigvalsh matrix_norm vector_norm",
        "torch.nn.functional": """
            binary_cross_entropy cosine_embedding_loss hinge_embedding_loss max_unpool1d
            max_unpool2d max_unpool3d
        """,
        "torch.special": "i1",
    }
)
