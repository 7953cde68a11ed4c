from __future__ import annotations

import dataclasses
import struct
import zlib

import pytest
import torch

from leadout.errors import RefitError
from leadout.records import DraftSpec, WeightUpdate
from leadout.refit.apply import receive
from leadout.refit.publish import tensor_crc32, weight_update

SPEC = DraftSpec(method="eagle3", layer_ids=(1, 2, 3), vocab_size=3, vocab_map_crc32=7, rope="default theta=1 dim=4")
POLICY_SHAPES = {"model.embed_tokens.weight": (5, 4), "model.norm.weight": (4,)}
DRAFT_SHAPES = {"fc.weight": (2, 6), "d2t": (3,), "t2d": (5,)}


def tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    policy = {name: torch.randn(shape, generator=generator) for name, shape in POLICY_SHAPES.items()}
    draft = {
        "fc.weight": torch.randn(2, 6, generator=generator),
        "d2t": torch.tensor([0, 1, 2]),
        "t2d": torch.tensor([True, False, True, False, True]),
    }
    return policy, draft


def update(version: int = 3, draft_version: int = 2, **options: object) -> WeightUpdate:
    policy, draft = tensors()
    return weight_update(
        policy=policy, version=version, draft=draft, draft_version=draft_version, draft_spec=SPEC, **options
    )


def altered(sent: WeightUpdate, change) -> WeightUpdate:
    """The update with its stream changed on the way."""
    chunks = [(name, tensor.clone()) for name, tensor in sent.chunks]
    return dataclasses.replace(sent, chunks=iter(change(chunks)))


def test_received_tensors_are_the_sent_ones_in_bfloat16():
    policy, draft = tensors()
    got = receive(update(), POLICY_SHAPES, DRAFT_SHAPES, SPEC)
    assert {name: torch.equal(tensor, policy[name].bfloat16()) for name, tensor in got.policy.items()} == {
        "model.embed_tokens.weight": True,
        "model.norm.weight": True,
    }
    assert torch.equal(got.draft["fc.weight"], draft["fc.weight"].bfloat16())
    assert torch.equal(got.draft["d2t"], draft["d2t"])
    assert torch.equal(got.draft["t2d"], draft["t2d"])


def test_another_type_can_be_asked_for():
    policy, _ = tensors()
    got = receive(update(dtype=torch.float32), POLICY_SHAPES, DRAFT_SHAPES, SPEC, dtype="F32")
    assert torch.equal(got.policy["model.norm.weight"], policy["model.norm.weight"])


def test_the_report_carries_versions_and_checksums_of_the_sent_bytes():
    sent = update()
    report = receive(sent, POLICY_SHAPES, DRAFT_SHAPES, SPEC).report
    crcs = [zlib.crc32(tensor.bfloat16().view(torch.uint8).numpy().tobytes()) for tensor in tensors()[0].values()]
    assert (report.version, report.draft_version) == (3, 2)
    assert report.checksum == f"{zlib.crc32(struct.pack('<II', *crcs)):08x}"
    assert report.draft_checksum is not None


def test_checksums_change_with_the_weights_and_not_without():
    policy, _ = tensors()
    first, same = (receive(weight_update(policy=policy, version=1), POLICY_SHAPES).report for _ in range(2))
    policy["model.norm.weight"][0] += 1
    other = receive(weight_update(policy=policy, version=1), POLICY_SHAPES).report
    assert first.checksum == same.checksum != other.checksum


def test_a_tied_head_is_sent_once():
    policy, _ = tensors()
    policy["lm_head.weight"] = policy["model.embed_tokens.weight"]
    assert set(weight_update(policy=policy, version=1).manifest) == set(POLICY_SHAPES)


def test_equal_but_separate_tensors_are_both_sent():
    policy, _ = tensors()
    policy["lm_head.weight"] = policy["model.embed_tokens.weight"].clone()
    assert "lm_head.weight" in weight_update(policy=policy, version=1).manifest


def test_training_on_while_an_update_travels_does_not_change_it():
    policy, _ = tensors()
    expected = policy["model.norm.weight"].clone()
    sent = weight_update(policy=policy, version=1, dtype=torch.float32)
    policy["model.norm.weight"].zero_()
    assert torch.equal(receive(sent, POLICY_SHAPES).policy["model.norm.weight"], expected)


def test_a_generator_without_drafter_has_no_draft_checksum():
    sent = weight_update(policy=tensors()[0], version=1)
    assert receive(sent, POLICY_SHAPES).report.draft_checksum is None


def test_a_dropped_tensor_is_named():
    sent = altered(update(), lambda chunks: [chunk for chunk in chunks if chunk[0] != "draft.fc.weight"])
    with pytest.raises(RefitError, match=r"missing draft\.fc\.weight; unexpected none"):
        receive(sent, POLICY_SHAPES, DRAFT_SHAPES, SPEC)


def test_a_tensor_missing_from_the_manifest_is_named():
    policy, _ = tensors()
    del policy["model.norm.weight"]
    with pytest.raises(RefitError, match=r"missing model\.norm\.weight"):
        receive(weight_update(policy=policy, version=1), POLICY_SHAPES)


def test_a_tensor_nobody_knows_is_named():
    policy, _ = tensors()
    policy["model.extra.weight"] = torch.zeros(2)
    with pytest.raises(RefitError, match=r"missing none; unexpected model\.extra\.weight"):
        receive(weight_update(policy=policy, version=1), POLICY_SHAPES)


def test_a_misshapen_tensor_is_named_with_both_shapes():
    policy, _ = tensors()
    policy["model.norm.weight"] = torch.zeros(6)
    with pytest.raises(RefitError, match=r"model\.norm\.weight of shape \(4,\), got \(6,\)"):
        receive(weight_update(policy=policy, version=1), POLICY_SHAPES)


def test_a_stream_that_contradicts_its_manifest_is_an_error():
    def widen(chunks):
        return [(name, tensor.float() if name == "model.norm.weight" else tensor) for name, tensor in chunks]

    with pytest.raises(RefitError, match=r"expected model\.norm\.weight as BF16"):
        receive(altered(update(), widen), POLICY_SHAPES, DRAFT_SHAPES, SPEC)


def test_another_type_than_the_generators_is_an_error():
    with pytest.raises(RefitError, match="in F32, got BF16"):
        receive(update(), POLICY_SHAPES, DRAFT_SHAPES, SPEC, dtype="F32")


@pytest.mark.parametrize("name", ["model.norm.weight", "draft.fc.weight", "draft.d2t"])
def test_one_changed_value_is_corrupt(name):
    def flip(chunks):
        for key, tensor in chunks:
            if key == name:
                tensor.flatten()[0] += 1
        return chunks

    with pytest.raises(RefitError, match=f"{name} is corrupt"):
        receive(altered(update(), flip), POLICY_SHAPES, DRAFT_SHAPES, SPEC)


def test_a_repeated_tensor_is_an_error():
    with pytest.raises(RefitError, match="once"):
        receive(altered(update(), lambda chunks: [*chunks, chunks[0]]), POLICY_SHAPES, DRAFT_SHAPES, SPEC)


def test_an_older_policy_is_refused_and_the_same_one_taken():
    with pytest.raises(RefitError, match="version 4 or later, got version 3"):
        receive(update(), POLICY_SHAPES, DRAFT_SHAPES, SPEC, held_version=4)
    assert receive(update(), POLICY_SHAPES, DRAFT_SHAPES, SPEC, held_version=3).report.version == 3


def test_an_older_drafter_is_refused():
    with pytest.raises(RefitError, match="drafter weights of version 3 or later, got 2"):
        receive(update(), POLICY_SHAPES, DRAFT_SHAPES, SPEC, held_draft_version=3)


def test_weights_of_another_drafter_are_refused():
    other = dataclasses.replace(SPEC, vocab_map_crc32=8)
    with pytest.raises(RefitError, match="expected weights of the drafter"):
        receive(update(), POLICY_SHAPES, DRAFT_SHAPES, other)


def test_a_drafter_that_gets_no_weights_is_an_error():
    sent = weight_update(policy=tensors()[0], version=1)
    with pytest.raises(RefitError):
        receive(sent, POLICY_SHAPES, DRAFT_SHAPES, SPEC)


def test_the_crc_is_of_the_bytes_in_row_major_order():
    matrix = torch.arange(6.0).view(2, 3)
    assert tensor_crc32(matrix.T) == zlib.crc32(matrix.T.contiguous().numpy().tobytes())
