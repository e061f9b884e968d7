"""Tensors and parameters on other devices than the mesh: the error names the argument."""

from __future__ import annotations

import unittest.mock
from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from undivided import ContextParallel, InputError, TransformerLayer
from undivided.parallel import parallelize


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    distributed.destroy_process_group()


def make_layer() -> TransformerLayer:
    return TransformerLayer(32, 64, 4, attn_input_format="bshd")


def test_a_layer_on_two_devices_is_not_parallelized(mesh: DeviceMesh) -> None:
    layer = make_layer()
    layer.self_attention.proj.to("meta")
    with pytest.raises(InputError, match="module must have the parameters of each layer on one device, got cpu, meta"):
        parallelize(layer, mesh)
    assert all(type(parameter) is torch.nn.Parameter for parameter in layer.parameters())


def test_a_mesh_of_another_type_of_device_is_refused(mesh: DeviceMesh) -> None:
    """A user who makes the mesh for GPUs and leaves the model on the CPU."""
    layer = make_layer()
    with (
        unittest.mock.patch.object(mesh, "_device_type", "cuda"),
        pytest.raises(
            InputError, match=r"mesh must be of the device type of the parameters \('cpu'\), got 'cuda'\n  HINT"
        ),
    ):
        parallelize(layer, mesh)
    assert all(type(parameter) is torch.nn.Parameter for parameter in layer.parameters())


def test_a_mesh_of_several_axes_is_refused_with_one_that_it_has(mesh: DeviceMesh) -> None:
    for names, hint in (
        (("dp", "tp"), "mesh['tp']"),
        (("a", "b"), "mesh['b']"),
        (("tensors", "data"), "mesh['tensors']"),
    ):
        square = init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
        with pytest.raises(InputError, match="mesh must be a DeviceMesh with one axis, got 2 axes") as error:
            parallelize(make_layer(), square)
        assert repr(names) in str(error.value)
        assert error.value.hint == f"select one axis, such as {hint}"
    with pytest.raises(InputError, match="give its axes names"):
        parallelize(make_layer(), init_device_mesh("cpu", (1, 1)))


def test_hidden_states_on_another_device_than_dtensor_parameters_are_refused(mesh: DeviceMesh) -> None:
    layer = parallelize(make_layer(), mesh)
    with pytest.raises(InputError, match=r"hidden_states must be on the parameters' device \(cpu\), got meta"):
        layer(torch.randn(2, 8, 32, device="meta"))


def test_a_group_that_is_none_is_refused_with_what_to_pass(mesh: DeviceMesh) -> None:
    for group in ("cpu", 3, (mesh.get_group(), "cpu")):
        with pytest.raises(InputError, match="group must be a process group, a DeviceMesh or a simulated group, got"):
            ContextParallel(group, "ring+all_to_all" if isinstance(group, tuple) else "ring")
