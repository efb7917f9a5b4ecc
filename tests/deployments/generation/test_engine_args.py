"""Arguments of vLLM that are passed through: those refused, those that change what is sampled; all were looked at."""

import asyncio
import re
import sys
from importlib.machinery import PathFinder
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.generation import settings as module
from deployments.generation.settings import INEXACT_ENGINE_ARGS, RESERVED_ENGINE_ARGS, EngineSettings, engine_fields
from tests.paths import REPOSITORY, TINY_MODEL

[REFUSED, TAKEN] = [
    {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    for table in (REPOSITORY / "docs/deploy.md")
    .read_text()
    .partition("## Settings of vLLM that change what is sampled\n")[2]
    .partition("\n## ")[0]
    .split("These are taken")
]
OTHERS = """
_api_process_count _api_process_rank aggregate_engine_logging all2all_backend allow_deprecated_quantization
allowed_local_media_path allowed_media_domains async_scheduling attention_backend attention_config
aux_output_config block_size code_revision collect_detailed_traces compilation_config convert
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold
dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
decode_context_parallel_size device_ids disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization
distributed_executor_backend distributed_timeout_seconds download_dir dp_sync_interval ec_manager_config
ec_transfer_config elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill
enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_expert_parallel
enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
enable_logging_iteration_details enable_lora enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend
enable_prefix_caching enable_return_routed_experts enable_shm_tensor_arena enable_sleep_mode
enable_tower_connector_lora enforce_eager engram_config eplb_config expert_placement_strategy
fail_on_environ_validation fault_tolerance_config fully_sharded_loras gdn_prefill_backend gpu_memory_utilization
hf_token interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose
kda_decode_backend kda_prefill_backend kernel_config kv_cache_memory_bytes kv_cache_metrics
kv_cache_metrics_sample kv_events_config kv_sharing_fast_prefill language_model_only limit_mm_per_prompt
linear_backend log_config_file log_level logging_config long_prefill_token_threshold
long_prefill_token_threshold_adaptive lora_target_modules mamba_backend mamba_block_size mamba_cache_mode
mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm master_addr master_port max_cpu_loras
max_cudagraph_capture_size max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs
max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
max_parallel_loading_workers mm_device_do_normalize mm_encoder_attn_backend mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_impl moe_backend nnodes node_rank
num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
offload_num_in_group offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
prefix_match_unit profiler_config pt_load_map_location ray_workers_use_nsight reasoning_config
reasoning_parser_plugin renderer_num_workers replayssm_buffer_len return_sampling_mask revision runner
safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
scheduler_reserve_full_isl scheduling_policy seed served_model_name show_hidden_metrics_for_version
shutdown_timeout skip_mm_profiling sleep_mode_offload_cudagraph sleep_preserve_parameter_names
sparse_indexer_topk_backend specialize_active_lora stream_interval structured_outputs_config swa_bounded_replay
tensor_parallel_size tokenizer tokenizer_revision trust_remote_code ubatch_size use_fp64_gumbel use_replayssm
use_tqdm_on_load video_pruning_method video_pruning_rate watermark weight_transfer_config
"""
"""Fields that change at most the last bits of log-probabilities."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
VALUES: dict[str, Any] = {"speculative_config": DRAFTS, "watermark_config": {"key": 1}, "spec_tokens": 2}


@pytest.mark.parametrize("name", sorted(INEXACT_ENGINE_ARGS))
def test_what_breaks_exactness_or_the_record_is_refused_if_it_is_set(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name} would break exactness or the record \(docs/deploy\.md"):
        EngineSettings.model_validate({"model": "m", name: VALUES.get(name, True)})
    for nothing in list[Any]([None, False, {}, [], ""]):
        EngineSettings.model_validate({"model": "m", name: nothing})


def test_random_weights_are_refused_and_other_formats_of_weights_are_taken() -> None:
    with pytest.raises(ValidationError, match="load_format: dummy makes random weights, which would be recorded as"):
        EngineSettings.model_validate({"model": "m", "load_format": "dummy"})
    assert EngineSettings.model_validate({"model": "m", "load_format": "safetensors"})


def test_the_page_names_all_that_is_refused_or_changes_what_is_sampled() -> None:
    assert {*INEXACT_ENGINE_ARGS, *RESERVED_ENGINE_ARGS, "load_format"} == REFUSED
    settings = EngineSettings.model_validate({"model": "m", **dict.fromkeys(TAKEN - {"dtype"}, "x"), "dtype": "auto"})
    assert settings.engine_args().keys() >= TAKEN


def test_each_field_of_vllms_was_looked_at_before_it_is_passed_through() -> None:
    assert set(engine_fields() or ()) == REFUSED | TAKEN | set(OTHERS.split())
    assert not {*REFUSED, *TAKEN} & set(OTHERS.split())


@pytest.mark.slow
def test_no_engine_starts_that_would_draft_tokens_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that name a model for which they draft let vLLM do it without a setting."""
    from vllm.engine import arg_utils

    from deployments.generation.engine import VLLMEngine

    monkeypatch.setattr(
        arg_utils, "maybe_override_with_speculators", lambda model, tokenizer, **_: (model, tokenizer, dict(DRAFTS))
    )
    with pytest.raises(ValueError, match=r"models/tiny would be sampled with drafts, and speculative decoding is not"):
        asyncio.run(VLLMEngine.start({"model": str(TINY_MODEL), "max_model_len": 256}))


def test_the_fields_of_both_classes_are_found_without_importing_vllm() -> None:
    imported = "vllm" in sys.modules
    fields = engine_fields()
    assert fields is not None
    assert {"max_num_seqs", "enable_lora", "weight_transfer_config", "enable_log_requests"} <= fields
    assert not {"max_num_seq", "from_cli_args", "__post_init__"} & fields
    assert ("vllm" in sys.modules) is imported


def test_nothing_is_known_where_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: PathFinder.find_spec(name, []))
    assert engine_fields() is None
