"""Muon in float32, beside torch's own in bfloat16."""

from __future__ import annotations

import pytest
import torch

from research.tiny.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 40), (2, 40, 5)])
def test_singular_values_become_about_one_and_their_vectors_stay(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    made = orthogonal(matrices)
    assert made.shape == matrices.shape
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    found = torch.einsum("nij,nik,nkl->njl", left, made, right.transpose(1, 2))  # in these vectors it is diagonal
    diagonal = torch.diagonal(found, dim1=1, dim2=2)
    torch.testing.assert_close(found, torch.diag_embed(diagonal), atol=1e-3, rtol=0)
    assert diagonal[values > 0.02 * values.max()].min() > 0.4 and diagonal.max() < 1.3


def test_it_steps_as_torchs_own_does():
    torch.manual_seed(1)
    starts = [torch.randn(6, 6), torch.randn(6, 6), torch.randn(9, 4), torch.randn(4, 9)]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(4)]
    ends = []
    for make in (
        lambda parameters: Muon(parameters, lr=0.02, weight_decay=0.1),
        lambda parameters: torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ):
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = make(parameters)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameters)
    for ours, theirs, start in zip(*ends, starts, strict=True):
        moved = (theirs - start).norm()
        assert (ours - theirs).norm() < 0.03 * moved  # bfloat16 rounds to one part in 256


def test_what_has_no_gradient_stays():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    Muon([parameter], lr=1.0).step()
    assert torch.equal(parameter.detach(), torch.ones(2, 2))
