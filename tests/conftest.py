"""Sorts the test files so that the longest ones start first, and installs the hooks of two helper modules.

With several pytest-xdist workers, all of them then finish at about the same time. pytest-xdist hands out files in this
order because of `--no-loadscope-reorder`. By default it begins with the files that have the most tests, and a file with
a single test of one minute would run last, while the other workers are idle.

The hooks record demonstrated features (feature_matrix.py) and keep unit tests fast (process_guard.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_matrix import pytest_addoption, pytest_configure  # noqa: F401  # hooks
from process_guard import pytest_runtest_protocol, pytest_runtest_teardown  # noqa: F401  # hooks

from tests import environment  # noqa: F401  # before any library that sets variables

HERE = Path(__file__).parent
LONGEST = (
    "unit/devices/test_cpu_quantized_memory.py",
    "unit/devices/test_cpu_paged_memory.py",
    "unit/devices/test_cpu_kernels.py",
    "e2e/test_architectures.py",
    "e2e/test_parity.py",
    "e2e/test_speculative_decoding.py",
    "e2e/test_lora_serving.py",
    "e2e/test_patch_processes.py",
    "e2e/test_quantization.py",
    "e2e/test_serving_features.py",
    "e2e/test_disaggregated.py",
    "unit/models/test_models.py",
    "e2e/test_weights_from_a_peer.py",
    "unit/doctor/test_doctor.py",
    "e2e/test_quantization_memory.py",
    "e2e/test_processes.py",
    "e2e/test_kv_offload.py",
    "e2e/test_sim_faults.py",
    "e2e/test_startup_failures.py",
    "e2e/test_schemes.py",
    "e2e/test_served_families.py",
    "e2e/test_sleep_serving.py",
    "e2e/test_chat.py",
    "e2e/test_page.py",
    "e2e/test_cpu_graphs.py",
    "e2e/test_gguf_memory.py",
    "unit/devices/sim/test_sim_runtime.py",
    "e2e/test_gguf.py",
    "unit/ops/test_every_operator.py",
    "e2e/test_patch_launcher_running.py",
    "e2e/test_data_parallel.py",
    "unit/test_general_plugin.py",
    "e2e/test_numeric_guard.py",
    "unit/devices/test_cpu_quantized.py",
    "e2e/test_server.py",
    "e2e/test_data_and_tensor_parallel.py",
    "unit/devices/sim/test_sim_driver.py",
    "e2e/test_parallel.py",
    "e2e/test_patch_skeleton.py",
    "unit/versions/test_versions_static.py",
    "e2e/test_v2_runner.py",
    "unit/patchbay/patch/test_new_patches.py",
    "e2e/test_sim.py",
    "e2e/test_parallel_decoder.py",
    "e2e/test_compare.py",
    "e2e/test_shared_weights.py",
    "e2e/test_expert_parallel.py",
    "e2e/test_profiling.py",
    "e2e/test_patchbay_beside_a_plugin.py",
    "e2e/test_bfloat16.py",
    "e2e/test_sim_memory.py",
    "unit/patches/test_patch_launcher.py",
    "unit/devices/test_cpu_linear.py",
    "e2e/test_embeddings.py",
    "e2e/test_memory_limits.py",
    "e2e/test_minimal_device.py",
    "unit/devices/test_cpu_attention.py",
    "unit/patches/test_application.py",
    "e2e/test_sharded_state.py",
    "e2e/test_sim_two_cards.py",
    "e2e/test_sim_graphs.py",
    "unit/doctor/test_doctor_options.py",
    "unit/weights/test_shared_memory.py",
    "e2e/test_sim_races.py",
    "unit/patchbay/upstream/test_upstream_signatures.py",
    "unit/quantization/test_gguf_engine_arguments.py",
    "unit/quantization/test_checkpoint_schemes.py",
    "unit/test_build.py",
    "e2e/test_kv_cache_fp8.py",
    "unit/host/test_memory_ledger.py",
    "unit/kv_offload/test_offload_peers.py",
    "unit/cli/test_cli.py",
    "unit/patchbay/patch/test_commands.py",
    "unit/benchmarks/test_slow_engines.py",
    "unit/cli/test_ops_command.py",
    "unit/patchbay/audit/test_audit_corpus.py",
    "unit/patchbay/upstream/test_upstream_fetch.py",
    "unit/versions/test_matrix.py",
    "unit/ops/test_attention.py",
)
"""Test files in descending order of their duration. All other files follow in the order of collection."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    missing = [str(path) for path in places if not path.is_file()]
    if missing:
        raise pytest.UsageError(f"{__file__} lists files that do not exist: {', '.join(missing)}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
